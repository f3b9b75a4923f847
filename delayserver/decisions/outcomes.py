"""Outcomes: what comes of deliveries, and the records that some of it takes.

    pull ──▶ lease ──▶ ack ─────────────▶ settled
                  ├──▶ nack, expired ──▶ first in its queue again, a RETRY later, or DEAD
    sink ──▶ confirmed ─────────────────▶ settled
        ├──▶ gone ──────────────────────▶ subscription paused, first in its queue again
        ├──▶ later ─────────────────────▶ its queue waits, first in its queue again
        ├──▶ untried ───────────────────▶ at its place in its queue again
        └──▶ failed ────────────────────▶ a RETRY later, or DEAD after the last attempt
                                          (subscription paused, if it says: after so long of that)
    too old, expired ──▶ DEAD           DEAD ──▶ redriven (REDRIVE) or discarded (DISCARD)
    settled ──▶ delivered again, if somebody asks (REPLAY)

What arrived is settled in the dispatch log alone, by the `Dispatcher`: most deliveries end so, and
no record is written. What failed becomes a record of the message log, and only when that is durable
does the delivery leave its place: a crash before finds it unsettled, and it is delivered again. If
the record cannot be written (the disk is full), the same is decided again a second later; until
then the delivery counts as on its way, so its hour is kept and its place is taken.

A consumer may give back ten thousand at once, or fall over with them. What of them needs a record
is recorded some in a turn of the event loop, and on its way until then; a crash in between finds
the others unsettled.

A publisher may ask for a message that tells of it (`OutcomeMessages`): with a DEAD in its group;
with a delivery that arrived before its row of the dispatch log.

Cost: columns for what consumers take and acknowledge, about 10 µs for a webhook that arrived, 20 µs
for a retry. Threads: belongs to the event loop.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np
from numpy.typing import NDArray

from delayserver.decisions.group import Group
from delayserver.decisions.groups import Groups
from delayserver.decisions.messages import Messages
from delayserver.decisions.outcome_messages import OutcomeMessages
from delayserver.decisions.packing import MESSAGE_ROW
from delayserver.decisions.sequencer import Sequencer
from delayserver.decisions.subscribing import Subscribing
from delayserver.delivery.deadlines import EXPIRED
from delayserver.delivery.delayed_fetch import DelayedFetch, Pulled, PullRequest
from delayserver.delivery.deliveries import Deliveries
from delayserver.delivery.dispatcher import Dispatcher
from delayserver.delivery.leases import Leases, Some
from delayserver.delivery.sink import (
    Answer,
    Confirmed,
    Delivered,
    Failed,
    GiveUp,
    Gone,
    Hold,
    Later,
    PauseSubscription,
    Recorded,
    Result,
    RetryLater,
    ReturnToQueue,
    Tried,
    outcome,
)
from delayserver.errors import ConflictError, NotFoundError, OverloadedError, StoppingError
from delayserver.records.attempts import TEXT_CHARS_MAX, DeliveryAttempt, bounded, with_attempt
from delayserver.records.direct import is_direct
from delayserver.records.message import (
    DueDelivery,
    MessageOptions,
    Origin,
    Payload,
    ScheduleEntry,
    State,
    encode_payload,
    row_flags,
)
from delayserver.records.subscriptions import (
    FAILURES,
    GONE,
    Registry,
    RetrySchedule,
    Subscription,
    for_message,
)
from delayserver.records.tables import Change, ChangeState, DeadLetter
from delayserver.schedule.hours import Hours
from delayserver.schedule.wheel_rows import ROUTE_SUBSCRIPTION
from delayserver.slices import Slices, Work
from delayserver.timers.timeouts import Timeouts
from storage.frame import seal
from storage.rows import RecordKind

RECORD_ITEMS = 2
"""A delivery that is recorded counts for so many items of `slices`."""
RETRY_COMMIT_MS = 1000
"""A record that could not be written (the disk is full) is tried again after this."""

_OF_NO_SUBSCRIPTION = RetrySchedule()
"""The schedule of a delivery whose subscription was deleted meanwhile."""


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


@dataclass(slots=True)
class _Recording:
    """Deliveries that take a record each."""

    record: Callable[[DueDelivery, int], None]
    reason: str | None
    """Why the attempts have failed; None: there were none."""
    ended_ms: int
    """When they have."""
    done: Callable[[Exception | None], None]
    """Called once, when all records are durable, or with what kept one from being so."""
    group: Group | None = None
    """The last one that has some of them."""
    not_durable: int = 1
    """Groups that have some of them, and one until all are decided."""
    error: Exception | None = None

    def failed(self, leased_ms: int) -> Failed | None:
        """How attempts went that began when a consumer got them (0: nobody knows)."""
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


def _failed(delivery: DueDelivery, result: Result, now_ms: int) -> DueDelivery:
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


def _is_answered(result: Result) -> bool:
    """Whether a receiver has answered, or nothing was sent to it."""
    return not isinstance(result, Failed) or (result.tried is not None and result.tried.status > 0)


def _from_now(options: MessageOptions | None, now_ms: int) -> MessageOptions | None:
    """What is delivered again because somebody asked lives as long as it did, from now on."""
    return None if options is None else msgspec.structs.replace(options, since_ms=now_ms)


def _decided(nothing: None, error: Exception | None) -> None:
    """All records are in their groups."""
    if error is not None:
        raise error


def _nobody(expired: list[str], error: Exception | None) -> None:
    """Nobody waits for the answer."""


class Outcomes:
    """Ends deliveries, or lets them begin again."""

    def __init__(
        self,
        registry: Registry,
        sequencer: Sequencer,
        groups: Groups,
        hours: Hours,
        messages: Messages,
        dispatcher: Dispatcher,
        subscribing: Subscribing,
        outcome_messages: OutcomeMessages,
        timeouts: Timeouts,
        *,
        epoch: str,
        random: Callable[[], float],
        given_up: Callable[[DueDelivery, str], None],
        slices: Slices,
        group_retry_max_ms: int,
    ) -> None:
        """`epoch`: what the tokens of this process's leases begin with; `random`: from 0 to 1;
        `given_up`: told of each delivery that has no attempt left, and why; `slices`: in which
        what needs many records is recorded; `group_retry_max_ms`: a retry of a message with a
        group waits no longer: how far ahead hours are loaded at a start."""
        self._group_retry_max_ms = group_retry_max_ms
        self._registry = registry
        self._sequencer = sequencer
        self._groups = groups
        self._hours = hours
        self._messages = messages
        self._dispatcher = dispatcher
        self._subscribing = subscribing
        self._outcome_messages = outcome_messages
        self._timeouts = timeouts
        self._random = random
        self._given_up = given_up
        self._slices = slices
        self.leases = Leases(epoch, timeouts, self._on_expired)
        self.retried_by_subject: defaultdict[int, int] = defaultdict(int)
        """How many deliveries were tried again since the start, by subject id."""
        self.dead_by_subject: defaultdict[int, int] = defaultdict(int)
        """How many deliveries were given up since the start, by subject id."""
        self.replayed_by_subject: defaultdict[int, int] = defaultdict(int)
        """How many deliveries were asked for again since the start, by subject id."""
        self.retried_by_subscription: Counter[int] = Counter()
        self.dead_by_subscription: Counter[int] = Counter()
        dispatcher.outcomes = self

    # ── consumers ──────────────────────────────────────────────────────────────────────────────

    def pull(self, subscription: Subscription, request: PullRequest) -> DelayedFetch:
        """A consumer asks for messages; `cancel` what is returned if it is gone before."""
        return self._dispatcher.pulls.request(self._dispatcher.queues.of(subscription), request)

    def hand_out(
        self, subscription: Subscription, request: PullRequest, deliveries: Deliveries
    ) -> None:
        """Lease deliveries to the consumer that asked for them, unless it is gone."""
        if request.is_gone:
            # It went while bodies were read: nobody was sent them, so it was no attempt.
            if len(deliveries):
                self._dispatcher.settling.return_leased(deliveries, np.arange(len(deliveries)), 0)
            self._pump(subscription.id)
            return
        request.finish(Pulled(deliveries, self.leases.grant(deliveries, request.lease_ms)))

    def give_back(self, prefix: str) -> None:
        """What was leased under tokens that begin like that was sent to nobody: what is held of it
        is available again, and it was no attempt."""
        some = self.leases.end_pull(prefix)
        if some is not None:
            self._dispatcher.settling.return_leased(some.deliveries, some.which, 0)
            self._pump(some.deliveries.subscription_id)

    def ack(
        self,
        tokens: Sequence[str],
        now_ms: int,
        subscription_id: int | None = None,
        done: Callable[[list[str], Exception | None], None] = _nobody,
    ) -> list[str]:
        """A consumer is done with messages; returns the tokens of leases that are over, or not of
        the subscription (None: any).

        `done` gets the same once the settler has the others: before this returns, unless a message
        with the outcome has to be durable before; or what kept it from being so."""
        ended, over = self.leases.end(tokens, subscription_id)
        telling: list[Some] = []
        began_ms: dict[int, int] = {}
        for deliveries, which in ended:
            told, others = deliveries.telling(which), which
            if len(told):
                telling.append(Some(deliveries, told))
                seqs = deliveries.settled["seq"][told].tolist()
                began_ms |= dict.fromkeys(seqs, deliveries.leased_ms)
                others = np.setdiff1d(which, told, assume_unique=True)
            if len(others):
                self._dispatcher.settling.settle_leased(deliveries, others, now_ms)
                deliveries.drop_payloads(others)
        if telling:
            record = partial(self._deliver_leased, began_ms)
            self._record_each(telling, record, None, now_ms, partial(done, over))
        else:
            done(over, None)
        return over

    def _deliver_leased(
        self, began_ms: Mapping[int, int], delivery: DueDelivery, now_ms: int
    ) -> None:
        """`began_ms`: when each was leased, by seq; 0: nobody knows."""
        leased_ms = began_ms[delivery.entry.seq]
        tried = Tried(leased_ms, max(0, now_ms - leased_ms)) if leased_ms else None
        self._deliver(delivery, None, tried, now_ms)

    def nack(
        self,
        tokens: Sequence[str],
        delay_ms: int,
        now_ms: int,
        subscription_id: int | None = None,
        done: Callable[[list[str], Exception | None], None] = _nobody,
    ) -> None:
        """A consumer does not want messages now; `done` gets tokens as `ack` returns them.

        With a delay they are recorded again, and `done` is called when all of that is durable, or
        with what kept it from being so. Raises OverloadedError: nothing was done."""
        if delay_ms:
            self._groups.admit_retries()
        ended, over = self.leases.end(tokens, subscription_id)
        if delay_ms:
            retry = partial(self._retry_leased, delay_ms)
            self._record_each(ended, retry, "given back (nack)", now_ms, partial(done, over))
            return
        for some in ended:
            self._return_leased(some, "given back (nack)", now_ms)
        done(over, None)

    def extend(
        self,
        tokens: Sequence[str],
        lease_ms: int,
        subscription_id: int | None = None,
    ) -> list[str]:
        """A consumer needs more time, counted from now; returns tokens as `ack`."""
        return self.leases.extend(tokens, lease_ms, subscription_id)

    def _on_expired(self, some: Some) -> None:
        """Leases are over. A consumer that falls silent may have been ended by any message that it
        had, so an attempt counts against one only if it had no company."""
        now_ms = self._dispatcher.queues.now_ms
        if self._dispatcher.settling.may_be_the_cause(*some):
            self._return_leased(some, "the lease ran out", now_ms, are_suspects=True)
            return
        self._dispatcher.settling.return_leased(*some, are_suspects=True)
        self._pump(some.deliveries.subscription_id)

    def _record_each(
        self,
        some: Iterable[Some],
        record: Callable[[DueDelivery, int], None],
        reason: str | None,
        now_ms: int,
        done: Callable[[Exception | None], None] = lambda error: None,
    ) -> None:
        """Call `record` for each delivery; for the first ones now. `reason`: why its attempt has
        failed; None: none was made."""
        recording = _Recording(record, reason, now_ms, done)
        self._slices.begin(self._recorded(list(some), recording, now_ms), _decided)

    def _recorded(self, some: list[Some], recording: _Recording, now_ms: int) -> Work[None]:
        for deliveries, which in some:
            failed = recording.failed(deliveries.leased_ms)
            for delivery in Some(deliveries, which).each():
                recorded = delivery if failed is None else _failed(delivery, failed, now_ms)
                recording.record(recorded, now_ms)
                recording.is_in(self._groups.not_durable())
                yield RECORD_ITEMS
                now_ms = max(now_ms, self._dispatcher.queues.now_ms)
        recording.told(None)

    def _retry_leased(self, delay_ms: int, delivery: DueDelivery, now_ms: int) -> None:
        subscription = self._registry.by_id(delivery.subscription_id)
        if subscription is not None and delivery.attempt >= subscription.max_attempts:
            self._return_one(delivery, now_ms)
        else:
            self._retry(delivery, delay_ms, now_ms)

    def _return_leased(
        self, some: Some, reason: str, now_ms: int, *, are_suspects: bool = False
    ) -> None:
        """Leased deliveries were not taken: they are available again, or dead after their last
        attempt."""
        deliveries, which = some
        subscription = self._registry.by_id(deliveries.subscription_id)
        if subscription is not None:
            is_last = deliveries.settled["attempt"][which] >= subscription.max_attempts
            if is_last.any():
                last = Some(deliveries, which[is_last])
                self._record_each([last], self._return_one, reason, now_ms)
                which = which[~is_last]
        if len(which):
            self._dispatcher.settling.return_leased(deliveries, which, are_suspects=are_suspects)
        if subscription is not None:
            self._dispatcher.pump.run(self._dispatcher.queues.of(subscription), now_ms)

    def _return_one(self, delivery: DueDelivery, now_ms: int) -> None:
        """A delivery was not taken: it is available again, or dead after its last attempt."""
        subscription = self._registry.by_id(delivery.subscription_id)
        if subscription is not None and delivery.attempt >= subscription.max_attempts:
            self._bury(delivery, "not acknowledged in any attempt", now_ms, delivery.attempt)
            return
        self._dispatcher.settling.return_delivery(delivery, delivery.attempt + 1)
        if subscription is not None:
            self._dispatcher.pump.run(self._dispatcher.queues.of(subscription), now_ms)

    # ── sinks ──────────────────────────────────────────────────────────────────────────────────

    def on_sent(self, answers: Sequence[Answer], now_ms: int) -> None:
        """What came of deliveries that were sent; a result counts for all that it stands with.

        Of those that come together, since the places that get free are filled in one step."""
        subscriptions: dict[int, Subscription] = {}
        for deliveries, result in answers:
            subscription = self._on_answer(deliveries, result, now_ms)
            if subscription is not None:
                subscriptions[subscription.id] = subscription
        for subscription in subscriptions.values():
            self._dispatcher.pump.run(self._dispatcher.queues.of(subscription), now_ms)

    def _on_answer(
        self, deliveries: list[DueDelivery], result: Result, now_ms: int
    ) -> Subscription | None:
        """Returns the subscription, if it exists still."""
        self._dispatcher.pushes.end_request(deliveries, is_answered=_is_answered(result))
        subscription = self._registry.by_id(deliveries[0].subscription_id)
        policy = _OF_NO_SUBSCRIPTION
        if subscription is not None:
            policy = for_message(subscription, deliveries[0].payload).retry_schedule
            if is_direct(subscription.id) and isinstance(result, Gone):
                # There is nobody who could resume it.
                result = Failed(result.reason)
                policy = RetrySchedule.within_limits(deliveries[0].attempt, ())
        jitter = self._random()
        in_company = len(deliveries) > 1 and subscription is not None and subscription.batch_max > 0
        returned: list[DueDelivery] = []
        is_gone = False
        for delivery in deliveries:
            match outcome(result, delivery.attempt, policy, lambda: jitter, in_company=in_company):
                case Delivered(recorded, tried):
                    self._deliver(delivery, recorded, tried, now_ms)
                case RetryLater(delay_ms=delay_ms):
                    self._retry(_failed(delivery, result, now_ms), delay_ms, now_ms)
                case GiveUp(reason=reason):
                    failed = _failed(delivery, result, now_ms)
                    self._bury(failed, reason, now_ms, delivery.attempt)
                case PauseSubscription():
                    returned.append(delivery)
                    is_gone = True
                case Hold(hold_ms=hold_ms):
                    if is_direct(delivery.subscription_id):
                        # Its queue has the messages of other hosts, too.
                        self._schedule_again(delivery, delivery.attempt, hold_ms, now_ms)
                    else:
                        returned.append(delivery)
                        self._dispatcher.pushes.hold(delivery.subscription_id, hold_ms)
                case ReturnToQueue():
                    returned.append(delivery)
        for delivery in returned:
            self._dispatcher.settling.return_delivery(delivery, delivery.attempt)
        if subscription is not None:
            if is_gone:
                self._pause(subscription.id, GONE)
            elif not is_direct(subscription.id):
                self._on_result(subscription, result, now_ms)
        return subscription

    def _deliver(
        self,
        delivery: DueDelivery,
        recorded: Recorded | None,
        tried: Tried | None,
        now_ms: int,
    ) -> None:
        """A delivery has arrived: it is settled, once it is durable that a message tells so, if one
        is asked for. In the other order a crash in between would lose that message; in this one it
        repeats the delivery, and the key keeps a second message away.

        What others have `recorded` (exactly once) is settled already."""
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
                self._pump(delivery.subscription_id)

        tell()

    def _on_result(self, subscription: Subscription, result: Result, now_ms: int) -> None:
        """A subscription wants to be paused when it has had nothing but failures for long."""
        if isinstance(result, Confirmed):
            self._subscribing.on_arrived(subscription, now_ms)
        elif isinstance(result, Failed | Later) and self._subscribing.fails_for_long(
            subscription, now_ms
        ):
            self._pause(subscription.id, FAILURES)

    def on_outdated(self, deliveries: Deliveries, reason: str, now_ms: int) -> None:
        """Deliveries are too old to be attempted: they are dead letters."""
        some = Some(deliveries, np.arange(len(deliveries)))
        self._record_each([some], partial(self._bury_untried, reason), None, now_ms)

    def on_expired(self, deliveries: Deliveries, which: NDArray[np.intp], now_ms: int) -> None:
        """Deliveries have outlived their messages' time to live: they are dead letters."""
        bury = partial(self._bury_untried, EXPIRED)
        self._record_each([Some(deliveries, which)], bury, None, now_ms)

    def _bury_untried(self, reason: str, delivery: DueDelivery, now_ms: int) -> None:
        self._bury(delivery, reason, now_ms, delivery.attempt - 1)

    def on_orphaned(self, delivery: DueDelivery, left_by: int, now_ms: int) -> None:
        """A delivery is all that is left of a message, and its subscription `left_by` is gone.

        The RETRY makes the delivery visible again after a crash. Without it the message would be
        lost then, because no row of the hour's file says that anybody still waits for it."""
        delivery = msgspec.structs.replace(delivery, subscription_id=left_by)
        self._schedule_again(delivery, delivery.attempt, 0, now_ms)

    # ── records ────────────────────────────────────────────────────────────────────────────────

    def _pause(self, subscription_id: int, reason: str) -> None:
        """The receiver is gone, or fails: send it nothing more, and record it; later if that is
        refused."""

        def unless_written(error: Exception | None) -> None:
            if error is not None:
                self._timeouts.add(partial(self._pause, subscription_id, reason), RETRY_COMMIT_MS)

        try:
            group = self._subscribing.pause(subscription_id, reason)
        except StoppingError:
            return  # The next process hears of it when it sends.
        except OverloadedError as error:
            unless_written(error)
            return
        if group is not None:
            group.when_durable(unless_written)

    def _pump(self, subscription_id: int) -> None:
        subscription = self._registry.by_id(subscription_id)
        if subscription is not None:
            queues = self._dispatcher.queues
            self._dispatcher.pump.run(queues.of(subscription), queues.now_ms)

    def _retry(self, delivery: DueDelivery, delay_ms: int, now_ms: int) -> None:
        """Schedule the next attempt. The record keeps it: memory alone would lose it in a crash,
        and the attempts before it would be made again."""
        self._schedule_again(delivery, delivery.attempt + 1, delay_ms, now_ms)
        self.retried_by_subject[delivery.origin.subject_id] += 1
        self.retried_by_subscription[delivery.subscription_id] += 1

    def _schedule_again(
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
            # A restart loads no hour that is further away, and has to know what holds up a group.
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
        again = partial(self._schedule_again, delivery, attempt, delay_ms)
        self._conclude(delivery, seq, change, again)
        route = delivery.subscription_id | ROUTE_SUBSCRIPTION
        self._messages.schedule(seq, due_ms, route, flags)

    def _bury(self, delivery: DueDelivery, reason: str, now_ms: int, attempts: int) -> None:
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
            self._bury(delivery, reason, now_ms, attempts)

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
            # The roll-back has undone the record, and nobody asks for this delivery again: without
            # another try it would stay on its way until the next restart.
            if error is not None:
                self._timeouts.add(lambda: again(self._dispatcher.queues.now_ms), RETRY_COMMIT_MS)

        sequencer.group.when_durable(unless_written)

    # ── once more ──────────────────────────────────────────────────────────────────────────────

    def replay(
        self, found: Replayable, subscription_ids: Iterable[int], now_ms: int
    ) -> tuple[list[int], Group]:
        """Deliver a message that is settled again, to each of these subscriptions; counting its
        attempts from 1 again. Returns those that get it: which have it as a dead letter, do not.

        Raises ConflictError with the state, if it is not settled (any more) or nobody gets it."""
        seq, entry = found.message_seq, found.entry
        located = self._messages.locate(seq, found.published_due_ms)
        if located.state not in (State.DELIVERED, State.DEAD) or located.entry != entry:
            raise ConflictError(
                f"the message is {located.state}; what is settled can be replayed", located.state
            )
        changes = self._sequencer.changes(seq)
        receivers = [
            one
            for one in subscription_ids
            if self._registry.by_id(one) is not None
            and (one not in changes or changes[one].state != ChangeState.DEAD)
        ]
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

    # ── dead letters ───────────────────────────────────────────────────────────────────────────

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
        """What changed for the message of a dead letter, by subscription: nothing for the owner if
        its hour was deleted long ago. Raises NotFoundError."""
        changes = self._sequencer.changes(message_seq)
        change = changes.get(owner_id)
        if change is not None and (change.state, change.entry_seq) != (ChangeState.DEAD, entry_seq):
            raise NotFoundError("the dead letter was redriven or discarded already")
        return changes
