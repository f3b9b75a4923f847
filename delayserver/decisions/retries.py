"""Retries: the records of deliveries that go on later or are given up, and messages that tell so.

    failed ──▶ a RETRY later, or DEAD after the last attempt ──▶ durable ──▶ its place is free
    arrived, and a message is to tell so ──▶ that is durable ──▶ settled

Only when a record is durable does a delivery leave its place: a crash before finds it unsettled,
and it is delivered again. If the record cannot be written (the disk is full), the same is decided
again a second later; until then the delivery counts as on its way, so its hour is kept and its
place is taken.

A consumer may give back ten thousand at once. They are recorded some in a turn of the event loop,
and on their way until then; a crash in between finds the others unsettled.

Cost: about 20 µs for each. Threads: belongs to the event loop.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import msgspec

from delayserver.decisions.group import Group
from delayserver.decisions.groups import Groups
from delayserver.decisions.messages import Messages
from delayserver.decisions.outcome_messages import OutcomeMessages
from delayserver.decisions.packing import MESSAGE_ROW
from delayserver.decisions.sequencer import Sequencer
from delayserver.delivery.dispatcher import Dispatcher
from delayserver.delivery.leases import DeliverySelection
from delayserver.delivery.sink import (
    Failed,
    Recorded,
    Result,
    Tried,
)
from delayserver.records.attempts import TEXT_CHARS_MAX, DeliveryAttempt, with_attempt
from delayserver.records.message import (
    DueDelivery,
    Origin,
    encode_payload,
    row_flags,
)
from delayserver.records.tables import Change, ChangeState, DeadLetter
from delayserver.schedule.hours import Hours
from delayserver.schedule.wheel_rows import ROUTE_SUBSCRIPTION
from delayserver.slices import Slices, Work, told_nothing
from delayserver.timers.timeouts import Timeouts
from storage.frame import seal
from storage.rows import RecordKind

RECORD_ITEMS = 2
"""A delivery that is recorded counts for so many items of `slices`."""
RETRY_COMMIT_MS = 1000
"""A record that could not be written (the disk is full) is tried again after this."""


@dataclass(slots=True)
class _Recording:
    """Deliveries that take a record each."""

    record: Callable[[DueDelivery, int], None]
    reason: str | None
    """Why the attempts have failed; None: there were none."""
    ended_ms: int
    """When they have."""
    done: Callable[[Exception | None], None]
    """Called once, when all records are durable, or with the error that kept one from being so."""
    group: Group | None = None
    """The last one that has some of them."""
    not_durable: int = 1
    """Groups that have some of them, and one until all are decided."""
    error: Exception | None = None

    def failed(self, leased_ms: int) -> Failed | None:
        """The result of attempts that began when a consumer got them (0: it is unknown)."""
        if self.reason is None:
            return None
        began_ms = leased_ms or self.ended_ms
        return Failed(self.reason, tried=Tried(began_ms, max(0, self.ended_ms - began_ms)))

    def is_in(self, group: Group | None) -> None:
        """A record was put into this group, or an older one."""
        if group is not None and group is not self.group:
            self.group = group
            self.not_durable += 1
            group.when_durable(self.told)

    def told(self, error: Exception | None) -> None:
        """One of `not_durable` is."""
        self.error = self.error or error
        self.not_durable -= 1
        if not self.not_durable:
            self.done(self.error)


def failed_attempt(delivery: DueDelivery, result: Result, now_ms: int) -> DueDelivery:
    """A delivery whose attempt has failed: the records that follow tell of it."""
    assert isinstance(result, Failed)
    tried = result.tried
    attempt = DeliveryAttempt(
        delivery.attempt,
        delivery.subscription_id,
        now_ms if tried is None else tried.began_ms,
        None if tried is None else tried.duration_ms,
        0 if tried is None else tried.status,
        "" if tried is None else tried.answer[:TEXT_CHARS_MAX],
        result.reason[:TEXT_CHARS_MAX],
    )
    history = with_attempt(delivery.payload.history, attempt)
    payload = msgspec.structs.replace(delivery.payload, history=history)
    return msgspec.structs.replace(delivery, payload=payload)


class Retries:
    """Records the further course of deliveries, besides a row of the dispatch log."""

    def __init__(
        self,
        sequencer: Sequencer,
        groups: Groups,
        hours: Hours,
        messages: Messages,
        dispatcher: Dispatcher,
        outcome_messages: OutcomeMessages,
        timeouts: Timeouts,
        slices: Slices,
        *,
        given_up: Callable[[DueDelivery, str], None],
        group_retry_max_ms: int,
    ) -> None:
        """`given_up`: told of each delivery that has no attempt left, and why; `slices`: records
        many deliveries in slices; `group_retry_max_ms`: a retry of a message with a group waits no
        longer, because a start loads hours only so far ahead."""
        self._sequencer = sequencer
        self._groups = groups
        self._hours = hours
        self._messages = messages
        self._dispatcher = dispatcher
        self._outcome_messages = outcome_messages
        self._timeouts = timeouts
        self._slices = slices
        self._given_up = given_up
        self._group_retry_max_ms = group_retry_max_ms
        self.retried_by_subject: defaultdict[int, int] = defaultdict(int)
        """How many deliveries were tried again since the start, by subject id."""
        self.dead_by_subject: defaultdict[int, int] = defaultdict(int)
        """How many deliveries were given up since the start, by subject id."""
        self.retried_by_subscription: Counter[int] = Counter()
        self.dead_by_subscription: Counter[int] = Counter()

    def each(
        self,
        some: Iterable[DeliverySelection],
        record: Callable[[DueDelivery, int], None],
        reason: str | None,
        now_ms: int,
        done: Callable[[Exception | None], None] = lambda error: None,
    ) -> None:
        """Call `record` for each delivery; for the first ones now. `reason`: why its attempt has
        failed; None: none was made."""
        recording = _Recording(record, reason, now_ms, done)
        self._slices.begin(self._recorded(list(some), recording, now_ms), told_nothing)

    def _recorded(
        self, some: list[DeliverySelection], recording: _Recording, now_ms: int
    ) -> Work[None]:
        for deliveries, which in some:
            failed = recording.failed(deliveries.leased_ms)
            for delivery in DeliverySelection(deliveries, which).each():
                recorded = delivery if failed is None else failed_attempt(delivery, failed, now_ms)
                recording.record(recorded, now_ms)
                recording.is_in(self._groups.not_durable())
                yield RECORD_ITEMS
                now_ms = max(now_ms, self._dispatcher.queues.now_ms)
        recording.told(None)

    def deliver(
        self,
        delivery: DueDelivery,
        recorded: Recorded | None,
        tried: Tried | None,
        now_ms: int,
    ) -> None:
        """A delivery has arrived. It is settled, once the message that tells so is durable, if one
        is asked for. In the other order a crash in between would lose that message. In this one it
        repeats the delivery, and the key keeps a second message away.

        A delivery that another part has `recorded` (exactly once) is settled already."""
        message = self._outcome_messages.of_delivered(delivery, now_ms)
        if message is None or recorded is not None:
            self._dispatcher.settling.settle_delivered(delivery, now_ms, recorded, tried)
        if message is None:
            return

        def tell() -> None:
            self._groups.make_room(message.total_bytes)
            group = self._outcome_messages.publish(message, now_ms)
            if group is None:
                told(None)
            else:
                group.when_durable(told)

        def told(error: Exception | None) -> None:
            if error is not None:
                self._timeouts.add(tell, RETRY_COMMIT_MS)
            elif recorded is None:
                self._dispatcher.settling.settle_delivered(delivery, now_ms, None, tried)
                self._dispatcher.pump.again(delivery.subscription_id)

        tell()

    def retry(self, delivery: DueDelivery, delay_ms: int, now_ms: int) -> None:
        """Schedule the next attempt. The record keeps it: memory alone would lose it in a crash,
        and the attempts before it would be made again."""
        self.schedule_again(delivery, delivery.attempt + 1, delay_ms, now_ms)
        self.retried_by_subject[delivery.origin.subject_id] += 1
        self.retried_by_subscription[delivery.subscription_id] += 1

    def schedule_again(
        self, delivery: DueDelivery, attempt: int, delay_ms: int, now_ms: int
    ) -> None:
        origin = delivery.origin
        next_origin = Origin(
            origin.message_seq,
            origin.published_due_ms,
            origin.subject_id,
            origin.due_ms,
            attempt,
        )
        payload = msgspec.structs.replace(delivery.payload, origin=next_origin)
        sealed = encode_payload(payload)
        due_ms, expires_ms = now_ms + delay_ms, payload.expires_ms(origin.due_ms)
        if payload.options is not None and payload.options.group is not None:
            # A restart loads no hour that is further away, and has to know which rows hold up a
            # group.
            loaded_until_ms = self._hours.loaded_until_ms
            due_ms = min(due_ms, now_ms + self._group_retry_max_ms, loaded_until_ms - 1)
        if expires_ms is not None:
            # An attempt after that would be in vain. It becomes a dead letter then, not before.
            due_ms = max(now_ms, min(due_ms, expires_ms))
        flags = row_flags(payload)
        self._groups.make_room(len(sealed) + MESSAGE_ROW.size)
        seq = self._sequencer.append(
            RecordKind.RETRY,
            due_ms=due_ms,
            message_seq=origin.message_seq,
            target_seq=delivery.entry.seq,
            target_due_ms=delivery.entry.due_ms,
            key_hash=self._messages.key_hash(origin.subject_id, payload.key),
            subject_id=origin.subject_id,
            subscription_id=delivery.subscription_id,
            payload=sealed,
            attempt=attempt,
            flags=flags,
        )
        change = Change(ChangeState.RETRYING, seq, due_ms, attempt, origin.subject_id)
        again = partial(self.schedule_again, delivery, attempt, delay_ms)
        self._conclude(delivery, seq, change, again)
        route = delivery.subscription_id | ROUTE_SUBSCRIPTION
        self._messages.schedule(seq, due_ms, route, flags)

    def bury(self, delivery: DueDelivery, reason: str, now_ms: int, attempts: int) -> None:
        """No attempt is left after so many: it can be listed and redriven from now on."""
        origin = msgspec.structs.replace(delivery.origin, attempt=attempts + 1)
        payload = encode_payload(msgspec.structs.replace(delivery.payload, origin=origin))
        value = seal(msgspec.msgpack.encode(DeadLetter(reason, now_ms, attempts, payload)))
        message = self._outcome_messages.of_dead(delivery, attempts, reason, now_ms)
        told_bytes = 0 if message is None else message.total_bytes
        self._groups.make_room(len(value) + MESSAGE_ROW.size + told_bytes)
        seq = self._sequencer.append(
            RecordKind.DEAD,
            message_seq=origin.message_seq,
            target_seq=delivery.entry.seq,
            target_due_ms=delivery.entry.due_ms,
            subject_id=origin.subject_id,
            subscription_id=delivery.subscription_id,
            payload=value,
            attempt=attempts,
        )
        change = Change(
            ChangeState.DEAD,
            delivery.entry.seq,
            delivery.entry.due_ms,
            attempts,
            origin.subject_id,
        )

        def again(now_ms: int) -> None:
            self.bury(delivery, reason, now_ms, attempts)

        self._conclude(delivery, seq, change, again)
        if message is not None:
            # In the group of the record: a crash leaves both, or neither.
            self._outcome_messages.publish(message, now_ms)
        self._groups.wake()
        self.dead_by_subject[origin.subject_id] += 1
        self.dead_by_subscription[delivery.subscription_id] += 1
        self._given_up(delivery, reason)

    def _conclude(
        self,
        delivery: DueDelivery,
        seq: int,
        change: Change,
        again: Callable[[int], None],
    ) -> None:
        """Record `seq` ends this delivery, once it is durable; `again` if it cannot be written.

        Not before: if the hour counted one delivery less at once, it could retire and be deleted
        before the record is durable, and a crash then would lose the message (I3)."""
        sequencer = self._sequencer
        sequencer.put_change(seq, delivery.origin.message_seq, delivery.subscription_id, change)

        def concluded() -> None:
            self._hours.add(delivery.entry.hour, -1)
            self._dispatcher.settling.release_delivery(delivery)
            place = delivery.subscription_id, delivery.origin.message_seq
            if change.state == ChangeState.DEAD:
                self._dispatcher.settling.end_turn(place[0], (place[1],))
            else:
                # It keeps its place, and others of its group wait for it.
                self._dispatcher.settling.keep_turn(*place, change.entry_seq)
            # Once for all deliveries of the group.
            self._dispatcher.pump.soon(delivery.subscription_id)

        sequencer.group.effects.append(concluded)

        def unless_written(error: Exception | None) -> None:
            # The roll-back has undone the record, and no other part asks for this delivery again:
            # without another try it would stay on its way until the next restart.
            if error is not None:
                self._timeouts.add(lambda: again(self._dispatcher.queues.now_ms), RETRY_COMMIT_MS)

        sequencer.group.when_durable(unless_written)
