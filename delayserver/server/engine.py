"""The engine: everything the event loop decides, as one synchronous state machine.

    commands ──▶ Messages ──▶ Groups ──▶ committer ──▶ on_committed ──▶ replay ──▶ on_filed
                                                         │ express          │ live rows
    advance(now) ──▶ Hours, Wheel ◀─────────────────────┴──────────────────┘
                       └──▶ Dispatcher ──▶ read, send, settle

It reads no clock, touches no file and starts no thread: time comes in with every call, and what has
to be done elsewhere goes out through its ports and comes back through an `on_…` method. The server
wires the ports to threads, the simulation to a scheduler with a seed.

Cost: see the parts. Threads: belongs to the event loop; no locks.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

import msgspec
import numpy as np

from delayserver.config import Settings
from delayserver.decisions.cancels import Cancels
from delayserver.decisions.delayed_produce import Level, Produces
from delayserver.decisions.events import Events
from delayserver.decisions.group import Group
from delayserver.decisions.groups import GroupPorts, Groups
from delayserver.decisions.heartbeats import Heartbeats
from delayserver.decisions.imports import ImportPorts, Imports
from delayserver.decisions.messages import Messages
from delayserver.decisions.publishing import Publishing
from delayserver.decisions.sequencer import Sequencer
from delayserver.delivery.delayed_fetch import DelayedFetch, Pulled, PullRequest
from delayserver.delivery.deliveries import Deliveries
from delayserver.delivery.dispatcher import Dispatcher, DispatcherPorts
from delayserver.delivery.leases import Leases, Some
from delayserver.delivery.queue import Handout
from delayserver.delivery.webhook import (
    DeadLetter,
    Delivered,
    PauseSubscription,
    RetryLater,
    WebhookResponse,
    outcome,
)
from delayserver.errors import NotFoundError, OverloadedError, StoppingError
from delayserver.records.horizon import Horizon, Mark
from delayserver.records.ids import IdCodec, KeyHasher
from delayserver.records.message import (
    Delivery,
    Origin,
    Payload,
    ScheduleEntry,
    encode_payload,
    row_flags,
)
from delayserver.records.subscriptions import (
    Registry,
    RetryPolicy,
    Subscription,
    encode_subscription,
)
from delayserver.records.tables import Change, ChangeState
from delayserver.records.tables import DeadLetter as DeadLetterValue
from delayserver.schedule.hours import Hours
from delayserver.schedule.loader import LoadedHour
from delayserver.schedule.replay import Filed, Snapshot
from delayserver.schedule.wheel import Wheel
from delayserver.schedule.wheel_rows import ROUTE_SUBSCRIPTION, WHEEL_DTYPE
from delayserver.timers.timeouts import Timeouts
from storage.catalog import Catalog
from storage.frame import Rows, seal
from storage.rows import HOUR_MS, RecordKind, is_among, select

Answer = tuple[list[Delivery], WebhookResponse]
"""To a webhook, with all that it carried."""
RETRY_COMMIT_MS = 1000
"""A record that could not be written (the disk is full) is tried again after this."""


class EnginePorts(DispatcherPorts, GroupPorts, ImportPorts, Protocol):
    """What the engine needs done elsewhere. No call waits."""

    def load(self, through_hour: int) -> None:
        """Make all hours up to this one live; answer with `on_loading`, then `on_loaded` each."""
        ...

    def retire(self, hours: list[int], through_seq: int) -> None:
        """These hours are settled, up to that seq."""
        ...

    def given_up(self, delivery: Delivery, reason: str) -> None:
        """No attempt is left: somebody may want to know."""
        ...


class Engine:
    """Commands, events, and the passing of time."""

    def __init__(
        self,
        settings: Settings,
        catalog: Catalog,
        sequencer: Sequencer,
        registry: Registry,
        ids: IdCodec,
        key_hasher: KeyHasher,
        ports: EnginePorts,
        *,
        first_hour: int,
        now_ms: int,
        epoch: str,
        random: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._ports = ports
        self._random = random
        self._advanced_ms = now_ms
        self._horizon = Horizon()
        self._prune_seq = 0
        self._loads_asked: deque[range] = deque()
        self._stalled: list[tuple[int, Callable[[int], None]]] = []
        """What could not be recorded, and when to do it again."""
        self.ids = ids
        self.sequencer = sequencer
        self.registry = registry
        self.hours = Hours()
        self.wheel = Wheel(first_hour * HOUR_MS)
        self.timeouts = Timeouts(now_ms)
        self.leases = Leases(epoch, self.timeouts, self._on_expired)
        self.groups = Groups(settings, sequencer, ports)
        self.dispatcher = Dispatcher(
            registry,
            sequencer.subject_names,
            self.hours,
            ports,
            self.timeouts,
            started_ms=now_ms,
            changes=sequencer.changes,
            has_not_fired=self._has_not_fired,
        )
        self.messages = Messages(
            settings,
            catalog,
            sequencer,
            self.groups,
            self.wheel,
            self.hours,
            self.dispatcher,
            registry,
            ids,
            key_hasher,
            now_ms=now_ms,
        )
        self.publishing = Publishing(
            settings, sequencer, self.groups, self.messages, ids, key_hasher
        )
        self.cancels = Cancels(
            sequencer, self.groups, self.wheel, self.hours, self.messages, ids, key_hasher
        )
        watches = self.messages.watches
        self.events = Events(settings, sequencer, self.groups, self.messages, watches)
        self.produces = Produces(self.groups, self.timeouts)
        self.heartbeats = Heartbeats(
            settings, catalog, sequencer, self.groups, self.publishing, self.timeouts
        )
        self.retried_by_subject: defaultdict[int, int] = defaultdict(int)
        """How many deliveries since the start, by subject id; likewise `dead`."""
        self.dead_by_subject: defaultdict[int, int] = defaultdict(int)
        self.imports = Imports(
            settings,
            catalog,
            sequencer,
            self.groups,
            self.messages,
            self.publishing,
            ports,
            self._prune,
        )

    def start(
        self,
        through_hour: int,
        loaded: Iterable[LoadedHour],
        retired_through_hour: int = -1,
        fired: Iterable[Mark] = (),
    ) -> None:
        """Take over what recovery loaded: every unsettled hour up to `through_hour`.

        `fired`: what has fired though it is not due yet."""
        self._horizon = Horizon(fired)
        self.hours.live_through_hour = through_hour
        self.hours.retired_through_hour = retired_through_hour
        for hour in loaded:
            self.on_loaded(hour)

    # ── time ───────────────────────────────────────────────────────────────────────────────────

    def advance(self, now_ms: int) -> int:
        """Do what is due at `now_ms`; returns when to call again at the latest.

        A clock that was set back makes nothing fire again and nothing fire early."""
        self._advanced_ms = now_ms
        self._horizon.advance(self.sequencer.next_seq - 1, now_ms + 1)
        self.messages.advanced_ms = self.dispatcher.now_ms = now_ms
        self.sequencer.refresh()
        self._load_ahead(now_ms)
        rows_max = self._settings.fire_rows_max
        batches = self.wheel.advance(
            now_ms, loaded_until_ms=self.hours.loaded_until_ms, rows_max=rows_max
        )
        if batches:
            self.dispatcher.fire(batches, now_ms)
        self.timeouts.look(now_ms)
        self.heartbeats.start()
        self.timeouts.advance(now_ms)
        more = self.heartbeats.fire_due(now_ms, rows_max)
        self._settle_stalled(now_ms)
        wake_ms = self.dispatcher.wake(now_ms)
        if settled := self.hours.pop_settled(
            now_ms, self.sequencer.next_seq, self.groups.filed_seq
        ):
            self._ports.retire(settled, self.groups.filed_seq)
        if more or sum(len(batch.rows) for batch in batches) >= rows_max:
            return now_ms
        times = [self.wheel.next_ms(), self.timeouts.next_ms(), wake_ms]
        times += [at_ms for at_ms, _ in self._stalled]
        next_ms = min(at_ms for at_ms in times if at_ms is not None)
        # Rows of hours that are being loaded make the wheel wait, not spin.
        return max(next_ms, now_ms + 1)

    def on_clock_set(self, delta_ms: int) -> None:
        """The clock was set by that much. Due times are moments; leases and waits are lengths."""
        self.timeouts.shift(delta_ms)
        self.dispatcher.shift(delta_ms)

    def _load_ahead(self, now_ms: int) -> None:
        wanted = (now_ms + self._settings.lead_ms) // HOUR_MS
        if wanted > self.hours.live_through_hour:
            asked = range(self.hours.live_through_hour + 1, wanted + 1)
            # Until the replay thread has answered, nothing is known of any of these hours.
            self._loads_asked.append(asked)
            self.hours.loading.update(asked)
            self.hours.live_through_hour = wanted
            self._ports.load(wanted)

    def on_loading(self, before: int, snapshots: Iterable[Snapshot]) -> None:
        """The replay thread has made the hours after `before` live; these are being read."""
        asked = self._loads_asked.popleft()
        assert asked.start == before + 1, (asked, before)
        self.hours.loading.difference_update(asked)
        self.hours.loading.update(snapshot.hour for snapshot in snapshots)

    def on_loaded(self, loaded: LoadedHour) -> None:
        """An hour has come from the disk."""
        run, removed = loaded.run, self.sequencer.removed
        found = loaded.find(np.fromiter(removed, np.uint64, len(removed)))
        gone = found[self._removed_among(loaded.hour, select(run.rows, found))]
        run.rows["seq"][gone] = 0
        self.hours.add(loaded.hour, loaded.count - len(gone))
        self.wheel.load(loaded.hour, run)
        self.hours.loading.discard(loaded.hour)
        self._prune()

    def _removed_among(self, hour: int, rows: Rows) -> np.ndarray:
        """Which of the rows that come are not to wait, since their removal was decided already.

        As long as the removal is not durable it may be rolled back, and they with it."""
        removed = self.sequencer.removed
        # After many cancels there are far more of them than rows that come by the express way.
        is_few = len(rows) < len(removed)
        seqs = removed.get_many(rows["seq"].tolist()) if is_few else removed
        gone = is_among(rows["seq"], np.fromiter(seqs, np.uint64, len(seqs)))
        for index in np.flatnonzero(gone).tolist():
            row = rows[index : index + 1].copy()
            record = removed.get(int(row["seq"][0]))
            assert record is not None
            group = self.groups.group_of(record)
            if group is not None:
                group.undo.append(partial(self.insert, hour, row))
        return gone

    # ── the way of a group ─────────────────────────────────────────────────────────────────────

    def on_committed(self, now_ms: int) -> bool:
        """The group that was being written is durable: now it happens, now it is answered.

        True: something of it may be due soon."""
        group = self.groups.on_committed()
        if group.express:
            self._insert_express(group)
        for effect in group.effects:
            effect()
        is_quick = self._ports.is_quick()
        if not is_quick:
            self.groups.flush(now_ms)  # the committer works while the waiters are told
        group.end(None)
        if is_quick:
            self.groups.resume()
        self.produces.moved(Level.DURABLE)
        return bool(group.express)

    def on_commit_failed(self, error: Exception) -> None:
        """The group that was being written could not be, and was rolled back."""
        self.groups.on_commit_failed(error)
        self._horizon.roll_back(self.sequencer.next_seq - 1)
        self.produces.failed()

    def _insert_express(self, group: Group) -> None:
        by_hour: dict[int, list[tuple[int, int, int, int]]] = {}
        for seq, due_ms, route in group.express:
            row = (seq, 0, due_ms % HOUR_MS, route)
            by_hour.setdefault(due_ms // HOUR_MS, []).append(row)
        for hour, rows in by_hour.items():
            self._insert_unless_removed(hour, np.array(rows, WHEEL_DTYPE))

    def _insert_unless_removed(self, hour: int, rows: Rows) -> None:
        if len(self.sequencer.removed):
            rows = select(rows, ~self._removed_among(hour, rows))
        self.insert(hour, rows)

    def insert(self, hour: int, rows: Rows) -> None:
        """Rows of a live hour begin to wait. Without rows: the hour may have to retire again."""
        if len(rows):
            self.wheel.insert(hour, rows)
        self.hours.add(hour, len(rows))

    def on_filed(self, filed: Filed) -> None:
        """Records are in their hours' files; those of live hours begin to wait."""
        for hour, rows in filed.live:
            self._insert_unless_removed(hour, rows)
        self.groups.on_filed(filed.last_seq)
        self.produces.moved(Level.FILED)

    def on_checkpoint(self, seq: int) -> None:
        """The catalog knows everything up to `seq`."""
        self.groups.on_checkpoint(seq)
        self._prune_seq = seq
        self.imports.on_checkpoint(seq)
        self._prune()

    def _prune(self) -> None:
        # An hour that is being read does not show the removals since its snapshot, nor does what
        # was looked up for an import show the changes since.
        if not self.hours.loading and not self.imports.is_deciding:
            self.sequencer.prune(self._prune_seq)
            self.messages.watches.prune(self._prune_seq)
            self.heartbeats.prune(self._prune_seq)

    # ── subscriptions ──────────────────────────────────────────────────────────────────────────

    def put_subscription(self, subscription: Subscription) -> Group:
        """Add, change or (with `deleted`) remove a subscription; it counts once it is durable."""
        self.groups.admit(0)
        known = self.registry.by_id(subscription.id)
        if known is None:
            # What has fallen due is for others.
            self._horizon.advance(self.sequencer.next_seq - 1, subscription.created_ms)
            horizon, since_ms = self._horizon.marks, 0
        else:
            horizon, since_ms = known.horizon, known.subject_since_ms
            if known.subject != subscription.subject:
                since_ms = self._horizon.before_ms
        subscription = msgspec.structs.replace(
            subscription, horizon=horizon, subject_since_ms=since_ms
        )
        self.sequencer.append(
            RecordKind.SUBSCRIPTION,
            subscription_id=subscription.id,
            payload=seal(encode_subscription(subscription)),
        )
        group = self.sequencer.group
        group.effects.append(partial(self._on_subscription, subscription))
        self.groups.wake()
        return group

    def _on_subscription(self, subscription: Subscription) -> None:
        self.registry.put(subscription)
        self.dispatcher.on_subscription(subscription, self._advanced_ms)

    def subscription(self, name: str) -> Subscription:
        """A subscription by name. Raises NotFoundError."""
        found = self.registry.by_name(name)
        if found is None:
            raise NotFoundError(f"there is no subscription {name!r}")
        return found

    def _has_not_fired(self, entry: ScheduleEntry) -> bool:
        return self.messages.has_not_fired(entry)  # they need the dispatcher, too

    # ── deliveries ─────────────────────────────────────────────────────────────────────────────

    def on_read(self, handout: Handout, deliveries: Deliveries) -> None:
        """Payloads have been read."""
        self.dispatcher.on_read(handout, deliveries, self._advanced_ms)

    def pull(self, subscription: Subscription, request: PullRequest, now_ms: int) -> DelayedFetch:
        """A consumer asks for messages; `cancel` what is returned if it is gone before."""
        self.timeouts.look(now_ms)
        return self.dispatcher.request(self.dispatcher.queue(subscription), request)

    def hand_out(self, handout: Handout, deliveries: Deliveries, now_ms: int) -> None:
        """Lease deliveries to the consumer that asked for them."""
        request = handout.request
        assert request is not None
        self.timeouts.look(now_ms)
        request.answer(Pulled(deliveries, self.leases.grant(deliveries, request.lease_ms)))

    def ack(
        self, tokens: Sequence[str], now_ms: int, subscription_id: int | None = None
    ) -> list[str]:
        """A consumer is done with messages; returns the tokens of leases that are over, or not of
        the subscription (None: any)."""
        ended, over = self.leases.end(tokens, subscription_id)
        for deliveries, which in ended:
            self.dispatcher.settle_leased(deliveries, which, now_ms)
            deliveries.drop_payloads(which)
        return over

    def nack(
        self,
        tokens: Sequence[str],
        delay_ms: int,
        now_ms: int,
        subscription_id: int | None = None,
    ) -> list[str]:
        """A consumer does not want messages now; returns tokens as `ack`."""
        ended, over = self.leases.end(tokens, subscription_id)
        for some in ended:
            if delay_ms:
                self._retry_leased(some, delay_ms, now_ms)
            else:
                self._return_leased(some, now_ms)
        return over

    def extend(
        self,
        tokens: Sequence[str],
        lease_ms: int,
        now_ms: int,
        subscription_id: int | None = None,
    ) -> list[str]:
        """A consumer needs more time, counted from now; returns tokens as `ack`."""
        self.timeouts.look(now_ms)
        return self.leases.extend(tokens, lease_ms, subscription_id)

    def _on_expired(self, some: Some) -> None:
        self._return_leased(some, self._advanced_ms)

    def _retry_leased(self, some: Some, delay_ms: int, now_ms: int) -> None:
        subscription = self.registry.by_id(some.deliveries.subscription_id)
        for delivery in some.each():
            if subscription is not None and delivery.attempt >= subscription.max_attempts:
                self.give_back(delivery, now_ms)
            else:
                self._retry(delivery, delay_ms, now_ms)

    def _return_leased(self, some: Some, now_ms: int) -> None:
        """Leased deliveries were not taken: they are available again, or dead after their last
        attempt."""
        deliveries, which = some
        subscription = self.registry.by_id(deliveries.subscription_id)
        if subscription is not None:
            is_last = deliveries.settled["attempt"][which] >= subscription.max_attempts
            for delivery in Some(deliveries, which[is_last]).each():
                self.give_back(delivery, now_ms)
            which = which[~is_last]
        if len(which):
            self.dispatcher.return_leased(deliveries, which)
        if subscription is not None:
            self.dispatcher.pump(self.dispatcher.queue(subscription), now_ms)

    def give_back(self, delivery: Delivery, now_ms: int) -> None:
        """A delivery was not taken: it is available again, or dead after its last attempt."""
        subscription = self.registry.by_id(delivery.subscription_id)
        if subscription is not None and delivery.attempt >= subscription.max_attempts:
            self._bury(delivery, "not acknowledged in any attempt", now_ms, delivery.attempt)
            return
        self.dispatcher.return_delivery(delivery, delivery.attempt + 1)
        if subscription is not None:
            self.dispatcher.pump(self.dispatcher.queue(subscription), now_ms)

    def on_sent(self, answers: Sequence[Answer], now_ms: int) -> None:
        """Webhooks were answered, or were not; an answer counts for all that its request carried.

        Of those that come together, since the places that get free are filled in one step."""
        subscriptions: dict[int, Subscription] = {}
        for deliveries, response in answers:
            subscription = self._on_answer(deliveries, response, now_ms)
            if subscription is not None:
                subscriptions[subscription.id] = subscription
        for subscription in subscriptions.values():
            self.dispatcher.pump(self.dispatcher.queue(subscription), now_ms)

    def _on_answer(
        self, deliveries: list[Delivery], response: WebhookResponse, now_ms: int
    ) -> Subscription | None:
        """Returns the subscription, if it exists still."""
        self.dispatcher.end_request(deliveries)
        subscription = self.registry.by_id(deliveries[0].subscription_id)
        policy = RetryPolicy() if subscription is None else subscription.retry_policy
        # One jitter for all of them, so that a batch that failed is a batch again.
        jitter = self._random()
        gone: list[Delivery] = []
        for delivery in deliveries:
            match outcome(response, delivery.attempt, policy, lambda: jitter):
                case Delivered():
                    self.dispatcher.settle_delivered(delivery, now_ms)
                case RetryLater(delay_ms=delay_ms):
                    self._retry(delivery, delay_ms, now_ms)
                case DeadLetter(reason=reason):
                    self._bury(delivery, reason, now_ms, delivery.attempt)
                case PauseSubscription():
                    gone.append(delivery)
        for delivery in reversed(gone):
            self.dispatcher.return_delivery(delivery, delivery.attempt)
        if subscription is not None and gone:
            self._pause(subscription)
        return subscription

    def on_outdated(self, delivery: Delivery, reason: str, now_ms: int) -> None:
        """A delivery is too old to be attempted: it is a dead letter."""
        self._bury(delivery, reason, now_ms, delivery.attempt - 1)

    def on_orphaned(self, delivery: Delivery, left_by: int, now_ms: int) -> None:
        """A delivery is what is left of a message, and its subscription is gone: it gets a row that
        a restart finds, for whoever is there then."""
        delivery = msgspec.structs.replace(delivery, subscription_id=left_by)
        self._schedule_again(delivery, delivery.attempt, 0, now_ms)

    def _pause(self, subscription: Subscription) -> None:
        """The receiver is gone: send it nothing more, at once, and record it."""
        queue = self.dispatcher.queue(subscription)
        if queue.subscription.paused:
            return
        paused = msgspec.structs.replace(subscription, paused=True)
        try:
            group = self.put_subscription(paused)
        except (OverloadedError, StoppingError):
            return  # The next delivery will be answered 410 as well.
        queue.subscription = paused

        def unless_written(error: Exception | None) -> None:
            if error is not None and queue.subscription is paused:
                queue.subscription = subscription

        group.when_durable(unless_written)

    def _retry(self, delivery: Delivery, delay_ms: int, now_ms: int) -> None:
        """Schedule the next attempt; a restart keeps it, and memory does not."""
        self._schedule_again(delivery, delivery.attempt + 1, delay_ms, now_ms)
        self.retried_by_subject[delivery.origin.subject_id] += 1

    def _schedule_again(self, delivery: Delivery, attempt: int, delay_ms: int, now_ms: int) -> None:
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
        due_ms = now_ms + delay_ms
        seq = self.sequencer.append(
            RecordKind.RETRY,
            due_ms=due_ms,
            message_seq=origin.message_seq,
            target_seq=delivery.entry.seq,
            target_due_ms=delivery.entry.due_ms,
            key_hash=self.messages.key_hash(origin.subject_id, payload.key),
            subject_id=origin.subject_id,
            subscription_id=delivery.subscription_id,
            payload=sealed,
            attempt=attempt,
            flags=row_flags(payload),
        )
        change = Change(ChangeState.RETRYING, seq, due_ms, attempt, origin.subject_id)
        again = partial(self._schedule_again, delivery, attempt, delay_ms)
        self._conclude(delivery, seq, change, now_ms, again)
        route = delivery.subscription_id | ROUTE_SUBSCRIPTION
        self.messages.schedule(seq, due_ms, route)

    def _bury(self, delivery: Delivery, reason: str, now_ms: int, attempts: int) -> None:
        """No attempt is left after so many: it can be listed and redriven from now on."""
        origin = msgspec.structs.replace(delivery.origin, attempt=attempts + 1)
        payload = encode_payload(msgspec.structs.replace(delivery.payload, origin=origin))
        value = DeadLetterValue(reason, now_ms, attempts, payload)
        seq = self.sequencer.append(
            RecordKind.DEAD,
            message_seq=origin.message_seq,
            target_seq=delivery.entry.seq,
            target_due_ms=delivery.entry.due_ms,
            subject_id=origin.subject_id,
            subscription_id=delivery.subscription_id,
            payload=seal(msgspec.msgpack.encode(value)),
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

        self._conclude(delivery, seq, change, now_ms, again)
        self.groups.wake()
        self.dead_by_subject[origin.subject_id] += 1
        self._ports.given_up(delivery, reason)

    def _conclude(
        self,
        delivery: Delivery,
        seq: int,
        change: Change,
        now_ms: int,
        again: Callable[[int], None],
    ) -> None:
        """Record `seq` ends this delivery, once it is durable; `again` if it cannot be written."""
        sequencer = self.sequencer
        sequencer.put_change(seq, delivery.origin.message_seq, delivery.subscription_id, change)

        def concluded() -> None:
            self.hours.add(delivery.entry.hour, -1)
            self.dispatcher.release_delivery(delivery)
            subscription = self.registry.by_id(delivery.subscription_id)
            if subscription is not None:
                self.dispatcher.pump(self.dispatcher.queue(subscription), self._advanced_ms)

        sequencer.group.effects.append(concluded)

        def unless_written(error: Exception | None) -> None:
            if error is not None:
                self._stalled.append((now_ms + RETRY_COMMIT_MS, again))

        sequencer.group.when_durable(unless_written)

    def _settle_stalled(self, now_ms: int) -> None:
        """Failures that could not be recorded: again, now that there may be space."""
        ready = [item for item in self._stalled if item[0] <= now_ms]
        if ready:
            self._stalled = [item for item in self._stalled if item[0] > now_ms]
            for _, again in ready:
                again(now_ms)

    # ── dead letters ───────────────────────────────────────────────────────────────────────────

    def redrive(self, subscription_id: int, entry_seq: int, payload: Payload, now_ms: int) -> Group:
        """Deliver a dead letter again, counting its attempts from 1 again."""
        origin = payload.origin
        assert origin is not None
        change = self.sequencer.changes(origin.message_seq).get(subscription_id)
        # Without a change its hour was deleted long ago.
        if change is not None and (change.state, change.entry_seq) != (ChangeState.DEAD, entry_seq):
            raise NotFoundError("the dead letter was redriven or discarded already")
        origin = msgspec.structs.replace(origin, attempt=1)
        sealed = encode_payload(msgspec.structs.replace(payload, origin=origin))
        self.groups.admit(len(sealed))
        seq = self.sequencer.append(
            RecordKind.REDRIVE,
            due_ms=now_ms,
            message_seq=origin.message_seq,
            target_seq=entry_seq,
            key_hash=self.messages.key_hash(origin.subject_id, payload.key),
            subject_id=origin.subject_id,
            subscription_id=subscription_id,
            payload=sealed,
            attempt=1,
            flags=row_flags(payload),
        )
        change = Change(ChangeState.RETRYING, seq, now_ms, 1, origin.subject_id)
        self.sequencer.put_change(seq, origin.message_seq, subscription_id, change)
        self.messages.schedule(seq, now_ms, subscription_id | ROUTE_SUBSCRIPTION)
        return self.sequencer.group

    def discard(self, subscription_id: int, entry_seq: int, message_seq: int) -> Group:
        """Delete a dead letter. Raises NotFoundError."""
        change = self.sequencer.changes(message_seq).get(subscription_id)
        if change is not None and (change.state, change.entry_seq) != (ChangeState.DEAD, entry_seq):
            raise NotFoundError("the dead letter was redriven or discarded already")
        self.groups.admit(0)
        seq = self.sequencer.append(
            RecordKind.DISCARD,
            message_seq=message_seq,
            target_seq=entry_seq,
            subscription_id=subscription_id,
        )
        if change is not None:
            change = msgspec.structs.replace(change, state=ChangeState.DISCARDED)
            self.sequencer.put_change(seq, message_seq, subscription_id, change)
        self.groups.wake()
        return self.sequencer.group
