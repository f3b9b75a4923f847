"""What is durable: the messages, as the records of the message log tell.

The ledger's first source. Each record is applied once, when its group has become durable or when a
recovery has found it, and is held against those before it: order and keys (I3), imports and
heartbeats (I4), and that a heartbeat which was renewed has not fired (I1).

Cost: about 10 µs per record. Threads: none.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from delayserver.decisions.packing import MESSAGE_ROW
from delayserver.parts.heartbeats.records import Heartbeat
from delayserver.records.direct import is_direct
from delayserver.records.message import Payload, decode_payload
from delayserver.records.subscriptions import Subscription, decode_subscription
from delayserver.records.tables import DeadLetter
from delayserver.schedule.committed import Records
from delayserver.schedule.expansion import ImportRecord
from storage.frame import unseal
from storage.rows import FLAG_REMOVAL, HOUR_MS, MOVES, PUBLISHES, REMOVES, SCHEDULES, RecordKind
from tests.world.group_records import GroupRecords
from tests.world.schedule_records import ScheduleRecords
from tests.world.server import Observer, SimulatedClock
from tests.world.source_records import SourceRecords
from tests.world.violation import Violation

_SCHEDULES = frozenset(map(int, SCHEDULES))
_REMOVES = frozenset(map(int, REMOVES))
EXPIRED = "expired"
NEVER_MS = 1 << 62


class StagedRow(NamedTuple):
    """A row of a staged import."""

    due_ms: int
    subject_id: int
    payload: Payload


@dataclass(slots=True)
class DurableMessage:
    """A message, as the durable records of the simulation describe it."""

    seq: int
    due_ms: int
    """As it was published; part of its id."""
    subject_id: int
    payload: Payload
    cancelled: bool = False
    where: dict[int, int] = field(default_factory=dict)
    """The row that waits, by subscription (0: for all)."""
    fired: bool = False
    """An event moved it to now."""
    dead: set[int] = field(default_factory=set)
    """Subscriptions that have it as a dead letter, or had and threw it away."""
    discarded: set[int] = field(default_factory=set)
    """Subscriptions whose dead letter of it somebody threw away."""


class DurableRecords(Observer):
    """Everything that durable records say."""

    def __init__(self) -> None:
        self.messages: dict[int, DurableMessage] = {}
        self.subjects: dict[int, str] = {}
        self.subscriptions: dict[int, Subscription] = {}
        self.durable_seq = 0
        self._extra_seqs = 0
        """Those of an import besides its own."""
        self.counts: Counter[str] = Counter()
        self.schedules = ScheduleRecords(self.counts)
        self.groups = GroupRecords(self.counts)
        self.sources = SourceRecords(self.counts)
        self._by_key: dict[tuple[int, str], int] = {}
        """Subject and key → the newest message."""
        self.had_key_before: dict[int, int] = {}
        """Message → the message that had its key until then."""
        self._entries: dict[int, tuple[int, int, int]] = {}
        """Schedule row → due time, message, subscription."""
        self._removed: set[tuple[int, int]] = set()
        """Schedule row and subscription (0: all) that a durable record took away."""
        self._filed: dict[int, list[tuple[int, int]]] = {}
        """Hour → (seq, flags) of the rows that its schedule file must hold."""
        self._tentative: dict[int, Records] = {}
        self.replays: Counter[tuple[int, int]] = Counter()
        """How often a message was to be delivered again, by message and subscription."""
        self._made_seqs: dict[int, int] = {}
        """Subscription → the record that made it."""
        self._made_by_ms: dict[int, int] = {}
        """Subscription → the latest moment that any clock had shown when that was durable."""
        self.heartbeats: dict[str, tuple[bytes, int]] = {}
        """Key → body and timeout, of those that are durable."""
        self._deadlines_ms: dict[bytes, int] = {}
        """By body: when a heartbeat may fire at the earliest, on the stopwatch."""
        self.present: Callable[[], int] = lambda: 0
        """The stopwatch."""
        self.clock = SimulatedClock()
        self._expires_ms: dict[int, int] = {}
        """Schedule row → from when on it is too late to deliver it."""
        self.deleting: set[str] = set()
        """Heartbeats that a client has deleted; durable or not."""
        self._heartbeat_messages: set[int] = set()
        self.staged: dict[str, list[StagedRow]] = {}
        """What the world has staged, by import."""
        self.imports: dict[str, int] = {}
        """Import → first seq; durable."""
        self.letters: dict[tuple[int, int], int] = {}
        """Dead letters, by subscription and schedule row, and their messages."""
        self._redriven_below: Counter[int] = Counter()
        """By subscription: no redrive of its dead letters may take rows from this one on."""
        self._handed_over = (0, 0, 0)
        """The last dead letter that was thrown away: record, row, subscription."""
        self._sends: dict[int, Counter[int]] = {}
        """Message → how often it was sent to each subscription."""
        self._latest_ms = 0
        """The latest moment that any life has seen."""

    def holders(self, latest_ms: int, window_ms: int) -> Iterator[DurableMessage]:
        """Messages whose key nobody else may have, so long after they were due; `latest_ms`: the
        latest moment that anybody has seen."""
        for seq in self._by_key.values():
            message = self.messages[seq]
            due_ms = self._entries[message.where[0]][0]
            if due_ms + window_ms > latest_ms:
                yield message

    def cancelled_holder(
        self, subject: str, key: str, window_ms: int, latest_ms: int
    ) -> int | None:
        """The cancelled message that no publish may take this key from; None if there is none.

        A client that replaces it may, and that need not be durable yet."""
        numbers = (number for number, name in self.subjects.items() if name == subject)
        seq = self._by_key.get((next(numbers, 0), key))
        if seq is None or not self.messages[seq].cancelled:
            return None
        is_held = self._entries[self.messages[seq].where[0]][0] + window_ms > latest_ms
        return seq if is_held else None

    def committed(self, rows: bytes, payload: bytes) -> None:
        self._apply(rows, payload)

    def filing(self, batch: list[Records]) -> None:
        for records in batch:
            first_seq = int(records.rows["seq"][0]) if len(records.rows) else 0
            if first_seq > self.durable_seq:
                self._tentative[first_seq] = records

    def _apply(self, rows: bytes, payload: bytes) -> None:
        for row in MESSAGE_ROW.iter_unpack(rows):
            self._apply_record(row, payload)
            seq = row[0]
            if seq != self.durable_seq + 1:
                raise Violation(f"seq {seq} follows {self.durable_seq} in the message log (I3)")
            self.durable_seq = seq + self._extra_seqs
            self._extra_seqs = 0

    def _apply_record(self, row: tuple[object, ...], blob: bytes) -> None:
        (
            seq,
            due_ms,
            message_seq,
            target,
            target_due_ms,
            _,
            subject_id,
            subscription_id,
            offset,
            length,
            _,
            attempt,
            kind,
            flags,
        ) = row
        assert isinstance(seq, int) and isinstance(due_ms, int) and isinstance(message_seq, int)
        assert isinstance(target, int) and isinstance(target_due_ms, int)
        assert isinstance(subject_id, int) and isinstance(subscription_id, int)
        assert isinstance(flags, int) and isinstance(attempt, int)
        assert isinstance(offset, int) and isinstance(length, int) and isinstance(kind, int)
        self.counts[RecordKind(kind).name.lower()] += 1
        if kind in (*PUBLISHES, *MOVES):
            subscription_id = 0  # The payload says who gets it.
        sealed = blob[offset : offset + length]
        if kind in _SCHEDULES:
            self._entries[seq] = (due_ms, message_seq, subscription_id)
            self._filed.setdefault(due_ms // HOUR_MS, []).append((seq, flags))
        if kind in _REMOVES:
            self._filed.setdefault(target_due_ms // HOUR_MS, []).append((seq, FLAG_REMOVAL))
            self._removed.add((target, subscription_id))
        if kind == RecordKind.PUBLISH:
            self._new_message(seq, due_ms, subject_id, decode_payload(sealed, "", 0, seq))
            self._note_expiry(seq, self.messages[seq], due_ms)
        elif kind == RecordKind.IMPORT:
            self._import(seq, msgspec.msgpack.decode(unseal(sealed) or b"", type=ImportRecord))
        elif kind == RecordKind.SUBJECT:
            self.subjects[subject_id] = (unseal(sealed) or b"").decode()
        elif kind == RecordKind.SUBSCRIPTION:
            self._define(seq, decode_subscription(unseal(sealed) or b""))
        elif kind == RecordKind.RUN:
            payload = decode_payload(sealed, "", 0, seq)
            assert payload.run is not None
            self._new_message(seq, due_ms, subject_id, payload)
            self.schedules.run(payload.run.schedule, seq, due_ms, payload.run.state)
        elif kind == RecordKind.SCHEDULE:
            self.schedules.changed(seq, unseal(sealed) or b"")
        elif kind == RecordKind.SOURCE:
            self.sources.changed(unseal(sealed) or b"")
        elif kind == RecordKind.HEARTBEAT:
            self._apply_heartbeat(seq, message_seq, sealed)
        else:
            message = self.known(message_seq)
            if kind == RecordKind.CANCEL:
                message.cancelled = True
                self.groups.settled(message_seq)
            elif kind in (RecordKind.MOVE, RecordKind.FIRE):
                message.where[0] = seq
                self._note_expiry(seq, message, due_ms)
                message.fired = message.fired or kind == RecordKind.FIRE
            elif kind == RecordKind.REPLAY:
                self._replay(message, subscription_id)
                self._note_expiry(seq, message, due_ms)
                message.where[subscription_id] = seq
            elif kind in (RecordKind.RETRY, RecordKind.REDRIVE):
                if kind == RecordKind.REDRIVE:
                    self._redrive(seq, message, subscription_id, target)
                    self._note_expiry(seq, message, due_ms)
                elif target in self._expires_ms:
                    self._expires_ms[seq] = self._expires_ms[target]
                message.where[subscription_id] = seq
                message.dead.discard(subscription_id)
            elif kind == RecordKind.DEAD:
                message.dead.add(subscription_id)
                self.letters[subscription_id, target] = message_seq
                self.groups.settled(message_seq, subscription_id)
                self._check_letter(message, subscription_id, target, unseal(sealed) or b"")
            elif kind == RecordKind.DISCARD:
                message.discarded.add(subscription_id)
                self.letters.pop((subscription_id, target), None)
                self._handed_over = seq, target, subscription_id
        if kind in _SCHEDULES:
            retry_of = target if kind == RecordKind.RETRY else 0
            self.groups.waits(seq, message_seq, due_ms, retry_of, subscription_id, attempt)

    def _define(self, seq: int, definition: Subscription) -> None:
        """Nobody changes more than one thing at once: what does has undone another change."""
        known = self.subscriptions.get(definition.id)
        if known is not None:
            if known.deleted:
                raise Violation(f"{definition.name} was deleted, and is back (I3)")
            before = known.timeout_ms, known.paused, known.deleted
            after = definition.timeout_ms, definition.paused, definition.deleted
            if sum(one != other for one, other in zip(before, after, strict=True)) > 1:
                raise Violation(f"a change of {definition.name} was undone: {before}, {after}")
        self._note_definition(seq, definition)

    def _note_definition(self, seq: int, definition: Subscription) -> None:
        """A definition is durable, and may follow the one before."""
        self.subscriptions[definition.id] = definition
        self._made_seqs.setdefault(definition.id, seq)
        self._made_by_ms.setdefault(definition.id, self.clock.latest_ms)

    def _redrive(self, seq: int, message: DurableMessage, heir_id: int, target: int) -> None:
        """Only what was dead when the call began is redriven, and once."""
        owner_id = heir_id
        if self.letters.pop((heir_id, target), None) is None:
            discarded_at, row_seq, owner_id = self._handed_over
            if (discarded_at, row_seq) != (seq - 1, target):
                raise Violation(f"row {target} was redriven, and is no dead letter (I4)")
            self.counts["handed to an heir"] += 1
            message.dead.discard(owner_id)
            message.discarded.discard(owner_id)
        if target >= self._redriven_below[owner_id]:
            raise Violation(f"row {target} died again, and the same redrive took it once more")

    def _replay(self, message: DurableMessage, subscription_id: int) -> None:
        """Only what is not dead there is replayed, and what nobody has cancelled."""
        if message.cancelled or (subscription_id in message.dead - message.discarded):
            raise Violation(f"message {message.seq} was replayed, and was not delivered (I4)")
        self.replays[message.seq, subscription_id] += 1

    def known(self, message_seq: int) -> DurableMessage:
        """A message that is durable."""
        message = self.messages.get(message_seq)
        if message is None:
            raise Violation(f"there is no message {message_seq}, and it counts as one (I3)")
        return message

    def is_deleted(self, subscription_id: int) -> bool:
        """Whether a subscription was deleted; a direct one never is."""
        return not is_direct(subscription_id) and self.subscriptions[subscription_id].deleted

    def times_sent(self, message_seq: int, subscription_id: int) -> int:
        """How often a message was sent to a subscription, or to one that may have left it to it."""
        sends = self._sends.get(message_seq, Counter())
        return sum(
            count
            for other_id, count in sends.items()
            if other_id == subscription_id or self.is_deleted(other_id)
        )

    def _note_expiry(self, row_seq: int, message: DurableMessage, due_ms: int) -> None:
        """The time to live of a message counts from this row on."""
        options = message.payload.options
        if options is not None and options.ttl_ms:
            self._expires_ms[row_seq] = due_ms + options.ttl_ms

    def _check_letter(
        self, message: DurableMessage, subscription_id: int, row_seq: int, value: bytes
    ) -> None:
        """What was dropped for its age says so, and only where that was asked for; nothing counts
        as an attempt that was sent to nobody."""
        letter = msgspec.msgpack.decode(value, type=DeadLetter)
        reason, times_sent = letter.reason, self.times_sent(message.seq, subscription_id)
        if not reason:
            raise Violation(f"a dead letter of {subscription_id} has no reason")
        if letter.attempts > times_sent:
            raise Violation(
                f"message {message.seq} was sent to {subscription_id} {times_sent} times, "
                f"and is dead after {letter.attempts}"
            )
        if reason == EXPIRED:
            self.counts["expired"] += 1
            if self.clock.latest_ms < self._expires_ms.get(row_seq, NEVER_MS):
                raise Violation(f"row {row_seq} has died of its time to live, which is not over")
        if reason.startswith("older than"):
            self.counts["dropped for their age"] += 1
            if not self.subscriptions[subscription_id].drop_older_than_ms:
                raise Violation(f"{subscription_id} drops nothing, and lost something: {reason}")

    def _apply_heartbeat(self, seq: int, message_seq: int, sealed: bytes) -> None:
        heartbeat = msgspec.msgpack.decode(unseal(sealed) or b"", type=Heartbeat)
        key = heartbeat.key
        if heartbeat.subject_id:
            body = decode_payload(heartbeat.payload, "", 0, seq).body
            self.heartbeats[key] = body, heartbeat.timeout_ms
            return
        body, _ = self.heartbeats.pop(key)
        if message_seq == seq:
            if key not in self.deleting:
                raise Violation(f"heartbeat {key} is gone, and published nothing (I3)")
            return
        self.counts["heartbeats fired"] += 1
        message = self.messages.get(message_seq)
        if message is None or message.payload.body != body:
            raise Violation(f"heartbeat {key} published something else: {message} (I3)")
        if message_seq in self._heartbeat_messages:
            raise Violation(f"heartbeat {key} was published by {message_seq} again (I4)")
        self._heartbeat_messages.add(message_seq)
        if self.present() < self._deadlines_ms.get(body, 0):
            raise Violation(f"heartbeat {key} was renewed, and fired (I1)")

    def _new_message(self, seq: int, due_ms: int, subject_id: int, payload: Payload) -> None:
        # A run takes its key whatever holds it: where the clock was set back and the schedule was
        # replaced, a run of the one before may have been moved, and wait under the same key.
        is_taken = self.sources.published(payload) or payload.run is not None
        if payload.key is not None:
            known = self._by_key.get((subject_id, payload.key))
            if known is not None and self._surely_waits(known) and not is_taken:
                raise Violation(f"message {seq} has the key of message {known}, which waits (I3)")
            if known is not None:
                self.had_key_before[seq] = known
            self._by_key[subject_id, payload.key] = seq
        self.schedules.published(payload, due_ms)
        if payload.options is not None and payload.options.group is not None:
            self.groups.published(seq, payload.options.group)
        message = DurableMessage(seq, due_ms, subject_id, payload)
        message.where[0] = seq
        self.messages[seq] = message

    def _surely_waits(self, message_seq: int) -> bool:
        """Whether it can neither have fired nor be cancelled: its key is taken."""
        message = self.messages[message_seq]
        return not message.cancelled and self._entries[message.where[0]][0] > self._latest_ms

    def _import(self, first_seq: int, record: ImportRecord) -> None:
        if record.id in self.imports:
            raise Violation(f"the import {record.id} was adopted twice (I4)")
        self.imports[record.id] = first_seq
        rows = self.staged[record.id]
        self._extra_seqs = record.count - 1
        if record.count != len(rows):
            raise Violation(f"the import {record.id} has {record.count} rows, not {len(rows)} (I3)")
        holders = {row: seq for row, seq, _ in record.left_out().tolist()}
        for number, row in enumerate(rows):
            if number in holders:
                continue
            seq = first_seq + number
            self._entries[seq] = (row.due_ms, seq, 0)
            self._filed.setdefault(row.due_ms // HOUR_MS, []).append((seq, 0))
            self._new_message(seq, row.due_ms, row.subject_id, row.payload)
            self.counts["imported"] += 1
        for number, seq in holders.items():
            row, holder = rows[number], self.messages.get(seq)
            self.counts["left out of imports"] += 1
            if holder is None or (holder.subject_id, holder.payload.key) != (
                row.subject_id,
                row.payload.key,
            ):
                raise Violation(f"row {number} of {record.id} was left out for no reason (I3)")
