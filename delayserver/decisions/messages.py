"""Messages: look up, cancel, move. Each answer is definite, and durable before it is told.

A message is found without an index: its id says when it was due and which record published it. Only
changes since (cancelled, moved, retried, dead) stand in the overlay or the catalog.

Cost: a few µs, plus a search in one slot when the hour is loaded. Threads: belongs to the event
loop.
"""

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import partial
from itertools import count
from math import inf

import msgspec

from delayserver.config import Settings
from delayserver.decisions.group import Group
from delayserver.decisions.groups import Groups
from delayserver.decisions.sequencer import Sequencer
from delayserver.decisions.whereabouts import Whereabouts, is_for_one
from delayserver.delivery.dispatcher import Dispatcher
from delayserver.errors import (
    ConflictError,
    NotFoundError,
    PreconditionError,
)
from delayserver.records.direct import is_direct
from delayserver.records.ids import IdCodec, KeyHasher
from delayserver.records.message import (
    Origin,
    Payload,
    ScheduleEntry,
    State,
    encode_payload,
    row_flags,
)
from delayserver.records.message_id import MessageId
from delayserver.records.message_state import (
    OPEN,
    ArrivedDelivery,
    MessageState,
    RowStage,
    state_of,
)
from delayserver.records.receivers import had
from delayserver.records.subscriptions import Registry
from delayserver.records.tables import Change, ChangeState, KeyEntry
from delayserver.schedule.hours import Hours
from delayserver.schedule.wheel import Wheel
from delayserver.schedule.wheel_rows import ROUTE_NUMBER, ROUTE_SUBSCRIPTION, route_bits, route_of
from storage.frame import Rows
from storage.rows import HOUR_MS, NO_KEY, RecordKind

Versions = Container[str] | None
"""The versions of a message that the caller wants to change; None: any."""
_ENDED = (ChangeState.CANCELLED, ChangeState.DEAD, ChangeState.DISCARDED)


class Messages:
    """The operations on messages."""

    def __init__(
        self,
        settings: Settings,
        sequencer: Sequencer,
        groups: Groups,
        wheel: Wheel,
        hours: Hours,
        whereabouts: Whereabouts,
        dispatcher: Dispatcher,
        registry: Registry,
        ids: IdCodec,
        key_hasher: KeyHasher,
        *,
        now_ms: int,
    ) -> None:
        self._sequencer = sequencer
        self._groups = groups
        self._wheel = wheel
        self._hours = hours
        self._whereabouts = whereabouts
        self._dispatcher = dispatcher
        self._registry = registry
        self._ids = ids
        self._key_hasher = key_hasher
        self._express_ms = settings.express_ms
        self.advanced_ms = now_ms
        self.cancelled_by_subject: defaultdict[int, int] = defaultdict(int)
        """How many since the start, by subject id; 0: the subject was not known
        without a look at the disk."""

    @property
    def cancelled_total(self) -> int:
        """Messages cancelled since the start."""
        return sum(self.cancelled_by_subject.values())

    def schedule(self, seq: int, due_ms: int, route: int, flags: int) -> None:
        """The open group has a new schedule row: should it go to the wheel by the express way?

        `flags`: those of its record."""
        if due_ms < self._express_until_ms() and self._hours.takes_express(due_ms // HOUR_MS):
            self._sequencer.group.express.append((seq, due_ms, route | route_bits(flags)))
        self._groups.wake()

    def schedule_many(
        self,
        first_seq: int,
        dues_ms: Sequence[int],
        routes: Sequence[int],
        flags: Sequence[int] | int,
    ) -> None:
        """The open group has new schedule rows of seqs one behind the other, not none; those that
        are due soon go to the wheel by the express way.

        `flags`: those of their records (`Publishes.flags`)."""
        if not isinstance(flags, int):
            routes = [route | route_bits(one) for route, one in zip(routes, flags, strict=True)]
        until_ms = self._express_until_ms()
        if min(dues_ms) < until_ms:
            takes_express = self._hours.takes_express
            self._sequencer.group.express += [
                (seq, due_ms, route)
                for seq, due_ms, route in zip(count(first_seq), dues_ms, routes, strict=False)
                if due_ms < until_ms and takes_express(due_ms // HOUR_MS)
            ]
        self._groups.wake()

    def _express_until_ms(self) -> float:
        # While an import is filed, which takes its time, nothing that is live waits for it.
        return inf if self._groups.is_importing else self.advanced_ms + self._express_ms

    # ── where is a message ─────────────────────────────────────────────────────────────────────

    def message_id(self, text: str) -> MessageId:
        """Parse an id. Raises NotFoundError."""
        parsed = self._ids.decode(text)
        if parsed.seq >= self._sequencer.next_seq:
            raise NotFoundError(f"there is no message {text!r}")
        return parsed

    def key_hash(self, subject_id: int, key: str | None) -> bytes:
        """The hash under which the table KEYS knows a key of a subject; NO_KEY for None."""
        return NO_KEY if key is None else self._key_hasher(subject_id, key)

    def by_key(self, subject: str, key: str) -> MessageId:
        """The message that a key stands for. Raises NotFoundError."""
        subject_id = self._sequencer.subjects.get(subject)
        entry = subject_id and self._sequencer.key(self._key_hasher(subject_id, key))
        if not entry:
            raise NotFoundError(f"there is no message with key {key!r} in subject {subject!r}")
        return MessageId(0, entry.due_ms, entry.seq)

    def locate(self, seq: int, due_ms: int) -> MessageState:
        """The state of the message that was published with `seq` for `due_ms`; always definite
        (I5)."""
        return self._locate(seq, due_ms, self._sequencer.changes(seq))

    def look_up(
        self, seq: int, due_ms: int, subject: str, settled: Mapping[int, ArrivedDelivery]
    ) -> MessageState:
        """As `locate`, with all that its files tell, too: its subject (empty, if it names its own
        address), and its deliveries."""
        return self._locate(seq, due_ms, self._sequencer.changes(seq), subject, settled)

    def held(self, seqs: Iterable[int]) -> Container[int]:
        """The rows of messages, by their seqs, that are in queues or on their way: those that the
        messages have now, and those that they had."""
        rows: set[int] = set()
        for seq in seqs:
            rows.add(seq)
            rows.update(change.entry_seq for change in self._sequencer.changes(seq).values())
        return self._dispatcher.holding(rows)

    def _locate(
        self,
        seq: int,
        due_ms: int,
        changes: dict[int, Change],
        subject: str = "",
        settled: Mapping[int, ArrivedDelivery] | None = None,
        held: Container[int] | None = None,
    ) -> MessageState:
        """`held`: where the caller has asked for many messages (`held`) in the same turn."""
        place = partial(self._place, held)
        first = ScheduleEntry(seq, due_ms)
        if not changes and not subject:
            return state_of(first, changes, place, settled=settled)
        whole, had_by = changes.get(0), list[int]()
        if any(map(is_direct, changes)):
            subject = ""  # It goes where it says, and to no subscription.
        elif not subject and len(changes) > (whole is not None):
            subject = self._sequencer.subject_names[max(c.subject_id for c in changes.values())]
        if subject:
            row = first if whole is None else ScheduleEntry(whole.entry_seq, whole.due_ms)
            had_by = [
                one.id
                for one in self._registry.candidates(subject)
                if not one.deleted and had(one, subject, row.seq, row.due_ms)
            ]
        return state_of(first, changes, place, had_by, settled)

    def _place(self, held: Container[int] | None, entry: ScheduleEntry) -> RowStage:
        """Where a schedule row is that was not removed."""
        waits = self._whereabouts.has_not_fired(entry)
        if waits or self._dispatcher.parked.contains(entry):
            # A restart leaves rows for those that have not settled them.
            row = self._whereabouts.in_wheel(entry)
            is_one = is_for_one(self._dispatcher.parked.get(entry) if row is None else row)
            return RowStage.WAITS_FOR_ONE if is_one else RowStage.WAITS
        is_held = self._dispatcher.holds(entry) if held is None else entry.seq in held
        return RowStage.UNDER_WAY if is_held else RowStage.GONE

    def version(self, seq: int) -> str:
        """Changes whenever the message is moved, cancelled, retried, dead or redriven.

        Each of these makes a schedule row of a higher seq, or ends one."""
        changes = self._sequencer.changes(seq).values()
        newest = max((change.entry_seq for change in changes), default=seq)
        ended = sum(change.state in _ENDED for change in changes)
        return f"{newest}.{ended}" if ended else str(newest)

    def _must_be(self, expected: Versions, seq: int) -> None:
        if expected is not None and (version := self.version(seq)) not in expected:
            raise PreconditionError(
                "the message has changed since; look it up, and decide again", version
            )

    # ── cancel and move ────────────────────────────────────────────────────────────────────────

    def cancel(
        self,
        seq: int,
        due_ms: int,
        expected: Versions = None,
        subject: str = "",
        *,
        event: bytes = b"",
        held: Container[int] | None = None,
    ) -> Group | None:
        """Cancel a message; it never fires once the group is durable (None: it is) (I5).

        `subject`: where the caller knows it, so that it is counted there. `event`: the watch key,
        sealed, if it was an event; `held`: as `held` says for many of them. Raises ConflictError
        with the state, PreconditionError, NotFoundError. A message that is cancelled
        already is so whatever was expected: the answer to the first call may be lost."""
        changes = self._sequencer.changes(seq)
        located = self._locate(seq, due_ms, changes, held=held)
        if located.state is State.CANCELLED:
            # The cancel that is there may not be durable. A client that is told "cancelled" before
            # it is would see the message fire after a crash (I5).
            return self.group_of_change(seq)
        self._must_be_scheduled(located)
        self._must_be(expected, seq)
        self._groups.admit(0)
        entry = located.entry
        record = self._sequencer.append(
            RecordKind.CANCEL,
            message_seq=seq,
            target_seq=entry.seq,
            target_due_ms=entry.due_ms,
            payload=event,
        )
        change = Change(ChangeState.CANCELLED, entry.seq, entry.due_ms, 0, 0)
        self._sequencer.put_change(record, seq, 0, change, changes)
        # At once, and not when it is durable: else it could fire in between. Not answered before it
        # is durable: else a restart would not know of it, and fire (I5).
        row = self._take_out(entry)
        if located.subscription_id:
            # Others of its group have waited for the retry.
            end_turn = partial(self._dispatcher.settling.end_turn, located.subscription_id, (seq,))
            self._sequencer.group.effects.append(end_turn)
        subject_id = self._sequencer.subjects.get(subject) or _subject_id(row)
        self.cancelled_by_subject[subject_id] += 1
        self._groups.wake()
        return self._sequencer.group

    def group_of_change(self, message_seq: int) -> Group | None:
        """A group after which the last change of the message is certainly durable."""
        return self._groups.not_durable() if self._sequencer.has_fresh_change(message_seq) else None

    def check_under_key(self, subject: str, key: str, expected: Versions, only_new: bool) -> None:
        """Check that the message under a key is as the caller expects, or absent (`only_new`).

        Raises PreconditionError, ConflictError with the state."""
        try:
            found = self.by_key(subject, key)
        except NotFoundError as error:
            if expected is None:
                return
            raise PreconditionError(str(error)) from error
        located = self.locate(found.seq, found.due_ms)
        if only_new and located.state in (State.SCHEDULED, State.DELIVERING):
            raise PreconditionError(
                f"a message under the key is {located.state}", self.version(found.seq)
            )
        if expected is not None:
            self._must_be_scheduled(located)
            self._must_be(expected, found.seq)

    def is_cancellable(self, entry: KeyEntry, due_after_ms: int | None = None) -> bool:
        """Whether the message that a key stands for can be cancelled, and is due later than that,
        where a time is given."""
        located = self.locate(entry.seq, entry.due_ms)
        try:
            self._must_be_scheduled(located)
        except (ConflictError, NotFoundError):
            return False
        return due_after_ms is None or located.entry.due_ms > due_after_ms

    def _must_be_scheduled(self, located: MessageState) -> None:
        if located.state is not State.SCHEDULED:
            # The hour of its own row may be gone long before its last retry.
            is_open = located.state in OPEN
            if not is_open and not self._whereabouts.is_known(located.entry, self.advanced_ms):
                raise NotFoundError("the message was settled, and its hour is past its retention")
            raise ConflictError(f"the message is {located.state}", located.state)

    def _take_out(self, entry: ScheduleEntry) -> Rows | None:
        """Remove a row from wherever it waits in memory, and put it back on a roll-back."""
        row = self._wheel.remove(entry.seq, entry.due_ms)
        if row is None:
            row = self._dispatcher.parked.remove(entry)
        if row is not None:
            group = self._sequencer.group
            # A cancel that could not be written was refused: the message fires, at once if it fell
            # due meanwhile.
            group.undo.append(partial(self._wheel.insert, entry.hour, row))
            # It counts until then, since an hour must not retire before the settling record is
            # durable.
            group.effects.append(partial(self._hours.add, entry.hour, -1))
        return row

    def move(
        self,
        seq: int,
        due_ms: int,
        new_due_ms: int,
        payload: Payload,
        subject_id: int,
        expected: Versions = None,
    ) -> Group:
        """Give a message a new due time. Raises as `cancel`."""
        return self._move(seq, due_ms, new_due_ms, payload, subject_id, expected, RecordKind.MOVE)

    def fire(self, seq: int, due_ms: int, now_ms: int, payload: Payload, subject_id: int) -> Group:
        """Move a message to now, for an event: it watches nothing any more. Raises as `cancel`."""
        return self._move(seq, due_ms, now_ms, payload, subject_id, None, RecordKind.FIRE)

    def _move(
        self,
        seq: int,
        due_ms: int,
        new_due_ms: int,
        payload: Payload,
        subject_id: int,
        expected: Versions,
        kind: RecordKind,
    ) -> Group:
        changes = self._sequencer.changes(seq)
        located = self._locate(seq, due_ms, changes)
        if located.state is State.SCHEDULED and located.subscription_id:
            raise ConflictError("the message is being retried", State.DELIVERING)
        self._must_be_scheduled(located)
        self._must_be(expected, seq)
        known = changes.get(0)
        if known is not None and known.state == ChangeState.FIRED:
            kind = RecordKind.FIRE  # It watches nothing, wherever it is moved.
        entry = located.entry
        sealed = encode_payload(
            msgspec.structs.replace(
                payload, origin=Origin(seq, due_ms, subject_id, due_ms=new_due_ms)
            )
        )
        self._groups.admit(len(sealed))
        record = self._sequencer.append(
            kind,
            due_ms=new_due_ms,
            message_seq=seq,
            target_seq=entry.seq,
            target_due_ms=entry.due_ms,
            key_hash=self.key_hash(subject_id, payload.key),
            subject_id=subject_id,
            subscription_id=payload.direct_id,
            payload=sealed,
            flags=(flags := row_flags(payload)),
        )
        state = ChangeState.FIRED if kind is RecordKind.FIRE else ChangeState.MOVED
        change = Change(state, record, new_due_ms, 0, subject_id)
        self._sequencer.put_change(record, seq, 0, change, changes)
        # The old row goes before the new one comes, both in one group: it fires once (I4).
        self._take_out(entry)
        self.schedule(record, new_due_ms, route_of(subject_id, payload.direct_id), flags)
        return self._sequencer.group


def _subject_id(row: Rows | None) -> int:
    """The subject of a row that waited in memory; 0: not known."""
    route = 0 if row is None else int(row["route"][0])
    return 0 if route & ROUTE_SUBSCRIPTION else route & ROUTE_NUMBER
