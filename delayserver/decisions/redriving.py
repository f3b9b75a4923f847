"""Redriving: a settled or dead message is delivered once more, at a client's request.

    DELIVERED, DEAD ──▶ replay (REPLAY) ──▶ each subscription that had it, attempts from 1 on
    DEAD ──▶ redrive (REDRIVE) ──▶ the subscription that gave it up, or its heir
        └──▶ discard (DISCARD)

Cost: a record for each delivery. Threads: belongs to the event loop.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from delayserver.decisions.group import Group
from delayserver.decisions.groups import Groups
from delayserver.decisions.messages import Messages
from delayserver.decisions.sequencer import Sequencer
from delayserver.delivery.dispatcher import Dispatcher
from delayserver.errors import ConflictError, NotFoundError
from delayserver.records.attempts import DeliveryAttempt, bounded
from delayserver.records.message import (
    MessageOptions,
    Origin,
    Payload,
    ScheduleEntry,
    State,
    encode_payload,
    row_flags,
)
from delayserver.records.subscriptions import (
    Registry,
)
from delayserver.records.tables import Change, ChangeState
from delayserver.schedule.wheel_rows import ROUTE_SUBSCRIPTION
from storage.rows import RecordKind


@dataclass(frozen=True, slots=True)
class Replayable:
    """A message that may be delivered again, as it was read."""

    message_seq: int
    published_due_ms: int
    subject_id: int
    entry: ScheduleEntry
    """Where it was settled, unless it was retried."""
    due_ms: int
    """When its first attempt was due."""
    payload: Payload
    attempts: Sequence[DeliveryAttempt]
    """All that were made so far."""


def _from_now(options: MessageOptions | None, now_ms: int) -> MessageOptions | None:
    """A replayed message gets its full time to live again, counted from now."""
    return None if options is None else msgspec.structs.replace(options, since_ms=now_ms)


class Redriving:
    """Delivers once more."""

    def __init__(
        self,
        registry: Registry,
        sequencer: Sequencer,
        groups: Groups,
        messages: Messages,
        dispatcher: Dispatcher,
    ) -> None:
        self._registry = registry
        self._sequencer = sequencer
        self._groups = groups
        self._messages = messages
        self._dispatcher = dispatcher
        self.replayed_by_subject: defaultdict[int, int] = defaultdict(int)
        """How many deliveries were asked for again since the start, by subject id."""

    def replay(
        self, found: Replayable, subscription_ids: Iterable[int], now_ms: int
    ) -> tuple[list[int], Group]:
        """Deliver a message that is settled again, to each of these subscriptions; counting its
        attempts from 1 again. Returns the subscriptions that will receive it. A subscription that
        holds it as a dead letter is left out.

        Raises ConflictError with the state, if it is not settled (any more) or no subscription gets
        it."""
        seq, entry = found.message_seq, found.entry
        located = self._messages.locate(seq, found.published_due_ms)
        if located.state not in (State.DELIVERED, State.DEAD) or located.entry != entry:
            raise ConflictError(
                f"the message is {located.state}; what is settled can be replayed", located.state
            )
        changes = self._sequencer.changes(seq)
        letters = {one for one, change in changes.items() if change.state == ChangeState.DEAD}
        there = (one for one in subscription_ids if self._registry.by_id(one) is not None)
        receivers = [one for one in there if one not in letters]
        if not receivers:
            raise ConflictError(
                "no subscription that had the message can have it again: it is a dead letter of "
                "them, which can be redriven, or they were deleted",
                located.state,
            )
        origin = Origin(seq, found.published_due_ms, found.subject_id, found.due_ms)
        payload = found.payload
        sealed = []
        for one in receivers:
            tried = tuple(attempt for attempt in found.attempts if attempt.subscription_id == one)
            history = bounded(tried, is_replay=True)
            payload = msgspec.structs.replace(
                payload, origin=origin, history=history, options=_from_now(payload.options, now_ms)
            )
            sealed.append(encode_payload(payload))
        self._groups.admit(sum(map(len, sealed)))
        # All are in one group: a crash leaves all or none.
        for one, data in zip(receivers, sealed, strict=True):
            record = self._sequencer.append(
                RecordKind.REPLAY,
                due_ms=now_ms,
                message_seq=seq,
                target_seq=entry.seq,
                target_due_ms=entry.due_ms,
                key_hash=self._messages.key_hash(found.subject_id, payload.key),
                subject_id=found.subject_id,
                subscription_id=one,
                payload=data,
                attempt=1,
                flags=row_flags(payload),
            )
            replayed = Change(ChangeState.REPLAYED, entry.seq, entry.due_ms, 0, found.subject_id)
            self._sequencer.put_change(record, seq, 0, replayed)
            change = Change(ChangeState.RETRYING, record, now_ms, 1, found.subject_id)
            self._sequencer.put_change(record, seq, one, change)
            flags = row_flags(payload)
            self._messages.schedule(record, now_ms, one | ROUTE_SUBSCRIPTION, flags)
        self.replayed_by_subject[found.subject_id] += len(receivers)
        return receivers, self._sequencer.group

    def redrive(
        self, owner_id: int, entry_seq: int, payload: Payload, heir_id: int, now_ms: int
    ) -> Group:
        """Deliver a dead letter again, counting its attempts from 1 again: to the subscription that
        gave it up, or, if that was deleted, to its heir. Its time to live counts from now. Raises
        NotFoundError."""
        origin, flags = payload.origin, row_flags(payload)
        assert origin is not None
        changes = self._letter_changes(owner_id, entry_seq, origin.message_seq)
        if heir_id != owner_id and self._has(heir_id, origin, changes):
            raise NotFoundError("the heir had the message in another way, or was just given it")
        origin = msgspec.structs.replace(origin, attempt=1)
        options = _from_now(payload.options, now_ms)
        payload = msgspec.structs.replace(payload, origin=origin, options=options)
        sealed = encode_payload(payload)
        self._groups.admit(len(sealed))
        if heir_id != owner_id:
            # Both records are in one group: no crash leaves one without the other.
            self.discard(owner_id, entry_seq, origin.message_seq, origin.subject_id)
        seq = self._sequencer.append(
            RecordKind.REDRIVE,
            due_ms=now_ms,
            message_seq=origin.message_seq,
            target_seq=entry_seq,
            key_hash=self._messages.key_hash(origin.subject_id, payload.key),
            subject_id=origin.subject_id,
            subscription_id=heir_id,
            payload=sealed,
            attempt=1,
            flags=flags,
        )
        change = Change(ChangeState.RETRYING, seq, now_ms, 1, origin.subject_id)
        self._sequencer.put_change(seq, origin.message_seq, heir_id, change)
        self._messages.schedule(seq, now_ms, heir_id | ROUTE_SUBSCRIPTION, flags)
        return self._sequencer.group

    def _has(self, heir_id: int, origin: Origin, changes: Mapping[int, Change]) -> bool:
        """Whether a message is on its way to the heir, or was, by itself or from a subscription
        that is gone."""
        first = ScheduleEntry(origin.message_seq, origin.published_due_ms)
        entries = [ScheduleEntry(one.entry_seq, one.due_ms) for one in changes.values()]
        holds = self._dispatcher.holds_for
        return heir_id in changes or any(holds(heir_id, entry) for entry in (first, *entries))

    def discard(self, owner_id: int, entry_seq: int, message_seq: int, subject_id: int) -> Group:
        """Delete a dead letter. Raises NotFoundError."""
        change = self._letter_changes(owner_id, entry_seq, message_seq).get(owner_id)
        self._groups.admit(0)
        seq = self._sequencer.append(
            RecordKind.DISCARD,
            message_seq=message_seq,
            target_seq=entry_seq,
            subscription_id=owner_id,
        )
        if change is None:
            # Its hour was deleted. A redrive that has read the letter by now must not find it dead.
            change = Change(ChangeState.DISCARDED, entry_seq, 0, 0, subject_id)
        else:
            change = msgspec.structs.replace(change, state=ChangeState.DISCARDED)
        self._sequencer.put_change(seq, message_seq, owner_id, change)
        self._groups.wake()
        return self._sequencer.group

    def _letter_changes(
        self, owner_id: int, entry_seq: int, message_seq: int
    ) -> Mapping[int, Change]:
        """The changes of the message of a dead letter, by subscription: none for the owner if its
        hour was deleted long ago. Raises NotFoundError."""
        changes = self._sequencer.changes(message_seq)
        change = changes.get(owner_id)
        if change is not None and (change.state, change.entry_seq) != (ChangeState.DEAD, entry_seq):
            raise NotFoundError("the dead letter was redriven or discarded already")
        return changes
