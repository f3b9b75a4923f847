"""The dispatcher: from rows that fired to finished deliveries.

    fired rows ── route ──▶ a queue per subscription ── read ──▶ deliveries ── outcome ──▶ settled
                   ├──▶ parked, while no subscription matches
                   └──▶ orphans, if their subscription is gone: read, then judged

Every subscription has its own queue, of row arrays, so a slow one delays nobody else (I2). What
leaves a queue stays together, as columns (`Deliveries`): as many as a consumer asked for with pull;
for a sink up to `max_in_flight`, which become objects. When they may leave is decided by `Backlog`.

A row that is pushed is checked twice: when it leaves its queue, and when the first byte of its
request is about to leave (`may_begin`), since it may have waited for a connection in between. What
may not begin goes back to its place in the queue, and there the queue decides about it.

Every delivery of a row counts in the hour the row belongs to, from the moment it fires until it is
settled; an hour whose count is zero is done (`Hours`).

Cost: routing is vectorised; a queue entry is a slice.
Threads: belongs to the event loop.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Protocol
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from delayserver.delivery.backlog import Backlog, Instant
from delayserver.delivery.connections import Connections
from delayserver.delivery.deadlines import EXPIRED, Deadlines
from delayserver.delivery.delayed_fetch import DelayedFetch, Fetches, Pulled, PullRequest
from delayserver.delivery.deliveries import NEVER_MS, Deliveries
from delayserver.delivery.lane import Room
from delayserver.delivery.orphans import Fate, Orphans
from delayserver.delivery.parked import Parked
from delayserver.delivery.permits import Permit, Permits
from delayserver.delivery.queue import READ_ROWS_MAX, Handout, Queue
from delayserver.delivery.settler import pack_settled
from delayserver.delivery.single_file import SingleFile
from delayserver.delivery.sink import Recorded, Tried
from delayserver.delivery.slow_start import LOOK_MS
from delayserver.records.direct import is_direct
from delayserver.records.message import DueDelivery, ScheduleEntry
from delayserver.records.receivers import shares
from delayserver.records.subjects import patterns_of
from delayserver.records.subscriptions import Registry, Subscription
from delayserver.records.tables import Change
from delayserver.schedule.hours import Hours
from delayserver.schedule.wheel_rows import (
    ROUTE_NUMBER,
    ROUTE_SUBSCRIPTION,
    WHEEL_DTYPE,
    FiredRows,
)
from delayserver.slices import Slices, TurnBudget
from delayserver.timers.timeouts import Timeouts
from delayserver.times import format_duration
from storage.frame import Rows
from storage.notes import Note, NoteBytes, encode_note
from storage.rows import HOUR_MS, Outcome, concatenate, is_among, select

BATCH_BYTES_MAX = 4 * 1024 * 1024
"""Payloads of the messages in one request, unless one alone has more."""
ANSWER_BYTES_MAX = 16 * 1024 * 1024
"""Payloads that leave a queue together, unless one alone has more."""

WEBHOOKS_MAX = 1024
"""Requests to receivers that are out at once."""
HOSTS_REMEMBERED = 4096
ROUTE_ITEMS = 2
"""A route that fires counts for so many items of `slices`, and each queue that gets it for one
more."""
PUMP_ITEMS = 10
"""A queue that is pumped counts for so many items if something leaves it."""
REQUESTS_MAX = 32
"""Requests that leave a queue in one go: each takes 0.1 ms."""
SERVE_ITEMS = 10
"""Giving connections to queues that wait, which are pumped then, counts for so many items."""
LOOK_ITEMS = 200
"""A read of up to READ_ROWS_MAX rows counts for so many items, whatever it is for."""
HELD_LOOK_MS = 50
"""A queue that nothing may leave now is looked at again after this."""


class DispatcherPorts(Protocol):
    """What the dispatcher needs done elsewhere."""

    def read(self, handout: Handout) -> None:
        """Read the payloads; answer with `Dispatcher.on_read`."""
        ...

    def send(self, subscription: Subscription, deliveries: list[DueDelivery]) -> None:
        """Have its sink deliver them; answer with `Outcomes.on_sent`."""
        ...

    def hand_out(self, handout: Handout, deliveries: Deliveries) -> None:
        """Lease deliveries to the consumer that asked."""
        ...

    def settle(self, hour: int, rows: bytes, note: NoteBytes | None) -> None:
        """Append rows (DISPATCH_ROW) to the dispatch log of their hour, and a note about them."""
        ...

    def settle_recorded(self, hour: int, rows: bytes, offset: int) -> None:
        """Likewise, rows that stand in the log of all replicas already, at `offset`."""
        ...

    def tick_soon(self) -> None:
        """Call `wake`, through `Engine.advance`, earlier than it said last."""
        ...


class Undelivered(Protocol):
    """What decides about deliveries that nobody is asked to take."""

    def on_outdated(self, deliveries: Deliveries, reason: str, now_ms: int) -> None:
        """Deliveries are older than their subscription or their messages want: they are not
        attempted."""
        ...

    def on_expired(self, deliveries: Deliveries, which: NDArray[np.intp], now_ms: int) -> None:
        """Deliveries have outlived their messages' time to live: they are not attempted. `which`:
        their indexes (shape n)."""
        ...

    def on_orphaned(self, delivery: DueDelivery, left_by: int, now_ms: int) -> None:
        """A delivery has lost its subscription, and no file says that anybody waits for it.

        Unless this is recorded, a crash loses the message."""
        ...


class Dispatcher:
    """Routes, queues, hands out, settles."""

    def __init__(
        self,
        registry: Registry,
        subject_names: dict[int, str],
        hours: Hours,
        ports: DispatcherPorts,
        timeouts: Timeouts,
        slices: Slices,
        *,
        started_ms: int = 0,
        answer_max_bytes: int = ANSWER_BYTES_MAX,
        webhooks_max: int = WEBHOOKS_MAX,
        changes: Callable[[int], Mapping[int, Change]] = lambda seq: {},
        has_not_fired: Callable[[ScheduleEntry], bool] = lambda entry: False,
    ) -> None:
        """`changes` and `has_not_fired`: as `Orphans` needs them."""
        self._registry = registry
        self._started_ms = started_ms
        self._answer_max_bytes = answer_max_bytes
        self.now_ms = started_ms
        """The time of the last call that said what time it is."""
        self._subject_names = subject_names
        self._hours = hours
        self._ports = ports
        self.outcomes: Undelivered
        """Set by who decides; nothing may fire before."""
        self._stopwatch = timeouts.stopwatch
        self._has_not_fired = has_not_fired
        self._expected: dict[int, list[FiredRows]] = {}
        """Retries that an earlier process has recorded of messages with groups, by subscription,
        where that has no queue yet."""
        self.fetches = Fetches(timeouts)
        self._queues: dict[int, Queue] = {}
        self.connections = Connections(
            webhooks_max, lambda serve: slices.soon(serve, SERVE_ITEMS), self._pump_again
        )
        """The connections of webhooks."""
        self._slices = slices
        self._to_pump: set[int] = set()
        """Subscriptions whose queues are pumped in a turn to come."""
        self._wakes: dict[int, tuple[int, int]] = {}
        """Subscriptions whose rows may leave, or will be too old, though nothing else happens: when
        on the stopwatch, and when by the clock."""
        self._announced_ms = NEVER_MS
        """When the engine knows that it has to call `wake`, on the stopwatch."""
        self.parked = Parked()
        self.orphans = Orphans(registry, changes, has_not_fired)
        self._is_adopting = False
        """Orphans are being read, or are about to be."""
        self._undecided: Counter[str] = Counter()
        """Subjects of which it is being recorded who gets them, as patterns."""
        self._deferred: list[FiredRows] = []
        """Rows of these that fell due meanwhile."""
        self._unread: set[int] = set()
        """Rows that could not be read when they were due. They stay unsettled, and their hours are
        kept: a repair, or a start at which they can be read, has them delivered (I8)."""
        self.delivered_by_subject: Counter[int] = Counter()
        self.delivered_by_subscription: Counter[int] = Counter()
        """How many deliveries arrived since the start, by subject id."""
        self.on_ready: Callable[[int], None] | None = None
        """Where there are other shards: told of a pull subscription of which other rows may leave
        than before, perhaps."""
        self.permits: Permits | None = None
        """Where several shards count together; set before anything fires."""
        self.broker_room: Callable[[int], int] = lambda subscription_id: ANSWER_BYTES_MAX
        """How many bytes may leave the queue of a subscription for its broker; 0: nothing."""
        self.may_deliver: Callable[[], bool] = lambda: True
        """Whether anything may leave now: where others could take over, only under a lease."""
        self.look_rows_max = READ_ROWS_MAX
        """Rows that are read in one turn to find out of which groups they are."""
        self.draining = False
        """Nothing leaves the queues any more: the server is stopping."""

    # ── routing ────────────────────────────────────────────────────────────────────────────────

    def queue(self, subscription: Subscription) -> Queue:
        """The queue of a subscription; made at first use."""
        queue = self._queues.get(subscription.id)
        if queue is None:
            queue = self._queues[subscription.id] = self._new_queue(subscription)
        return queue

    def _new_queue(self, subscription: Subscription) -> Queue:
        def used_places() -> int:
            return queue.used_places()

        permit: Permit | None = None
        is_shared = subscription.is_pushed and not is_direct(subscription.id)
        if self.permits is not None and is_shared:
            permit = self.permits.of(subscription, used_places)
        behind_ms = max(self._started_ms, subscription.created_ms)
        backlog = Backlog(subscription, behind_ms, permit)
        queue = Queue(subscription, backlog, permit=permit)
        for fired in self._expected.pop(subscription.id, []):
            backlog.in_single_file().expect(fired)
        return queue

    def expect(self, hour: int, rows: Rows) -> None:
        """Rows of an hour that was loaded (WHEEL_DTYPE) are for one subscription, and may have a
        group: those that are retries hold up the rest of it, as they did before the start."""
        for route, mine in _by_route(rows):
            subscription_id, fired = route & ROUTE_NUMBER, FiredRows(hour, mine)
            queue = self._queues.get(subscription_id)
            if queue is not None:
                queue.rows.in_single_file().expect(fired)
            else:
                self._expected.setdefault(subscription_id, []).append(fired)

    def queues(self) -> Iterator[Queue]:
        """The queues of all subscriptions that have had a row."""
        return iter(self._queues.values())

    def fire(
        self, slices: list[FiredRows], now_ms: int, budget: TurnBudget | None = None
    ) -> list[FiredRows]:
        """Put rows that are due into the queues of their subscriptions, and let them leave. Returns
        the rows that are still to be fired, since the budget is spent.

        `slices`: rows of one hour each, none empty. Every row counts in its hour already."""
        return self._fire(slices, now_ms, budget or TurnBudget())

    def _fire(self, slices: list[FiredRows], now_ms: int, budget: TurnBudget) -> list[FiredRows]:
        touched: dict[int, Queue] = {}
        left: list[FiredRows] = []
        # The rows that were deferred fell due before.
        deferred, self._deferred = self._deferred, []
        for fired in (*deferred, *slices):
            for route, rows in _by_route(fired.rows):
                mine = FiredRows(fired.hour, rows)
                if self._undecided and self._is_undecided(route):
                    self._deferred.append(mine)
                    continue
                if not budget:
                    left.append(mine)
                    continue
                queues = self._route(route, mine)
                budget.spend(ROUTE_ITEMS + len(queues))
                for queue in queues:
                    touched[queue.subscription.id] = queue
        for queue in touched.values():
            self._pump_in_turn(queue, now_ms, budget)
        return left

    def _pump_in_turn(self, queue: Queue, now_ms: int, budget: TurnBudget) -> None:
        """Pump a queue now, or in a turn to come if the budget is spent."""
        if budget:
            budget.spend(PUMP_ITEMS)
            self.pump(queue, now_ms)
        else:
            self.pump_soon(queue.subscription.id)

    def pump_soon(self, subscription_id: int) -> None:
        """Pump a queue in a turn to come, once for all that ask for it."""
        if subscription_id not in self._to_pump:
            self._to_pump.add(subscription_id)
            self._slices.soon(partial(self._pump_again, subscription_id), PUMP_ITEMS)

    def defer(self, patterns: Collection[str]) -> Callable[[], None]:
        """Let what falls due of these subjects wait, as a change of who gets it is being recorded:
        else memory would go by the definition of before, and a restart by the one behind it.

        Returns what to call when the change is in force, or refused."""
        self._undecided.update(patterns)

        def release() -> None:
            self._undecided -= Counter(patterns)
            if self._deferred:
                self._slices.soon(self._fire_deferred, PUMP_ITEMS)

        return release

    def _is_undecided(self, route: int) -> bool:
        if route & ROUTE_SUBSCRIPTION:
            return False
        subject = self._subject_names[route & ROUTE_NUMBER]
        return any(pattern in self._undecided for pattern in patterns_of(subject))

    def _fire_deferred(self) -> None:
        # Fired first: it takes the list of what was deferred, and begins another one.
        left = self._fire([], self.now_ms, TurnBudget())
        self._deferred += left
        if self._deferred and not self._undecided:
            self._slices.soon(self._fire_deferred, PUMP_ITEMS)

    def _route(self, route: int, fired: FiredRows) -> list[Queue]:
        number, more = route & ROUTE_NUMBER, -len(fired.rows)
        if route & ROUTE_SUBSCRIPTION:
            subscription_id = number
            subscription = self._registry.by_id(subscription_id)
            if subscription is None:
                self._adopt(fired, subscription_id)
                return []
            shared = [(subscription, fired)]
        else:
            subject = self._subject_names[number]
            shared, left = _shares(fired, subject, self._registry.candidates(subject))
            if left is not None:
                self.parked.add(number, left)
                more += len(left.rows)
        queues = []
        for subscription, share in shared:
            queue = self.queue(subscription)
            queue.rows.push(share, route)
            queues.append(queue)
            more += len(share.rows)
        # A row counted once while it waited; now each of its deliveries does.
        self._hours.add(fired.hour, more)
        return queues

    def hold_leased(self, deliveries: Deliveries) -> None:
        """Deliveries of a subscription are leased since before the start: they do not wait."""
        subscription = self._registry.by_id(deliveries.subscription_id)
        assert subscription is not None
        queue = self.queue(subscription)
        settled = deliveries.settled
        queue.hold(settled["seq"].tolist())
        for hour, count in Counter((settled["due_ms"] // HOUR_MS).tolist()).items():
            self._hours.add(hour, count)
        seqs = zip(settled["message_seq"].tolist(), settled["seq"].tolist(), strict=True)
        for payload, (message_seq, seq) in zip(deliveries.payloads, seqs, strict=True):
            if payload.options is not None and payload.options.group is not None:
                queue.rows.in_single_file().hold(payload.options.group, message_seq, seq)

    def lose_leased(self, hour: int, seqs: list[int]) -> None:
        """Rows that were leased before the start cannot be read, which was reported."""
        self._unread.update(seqs)
        self._hours.add(hour, len(seqs))

    def _adopt(self, fired: FiredRows, left_by: int) -> None:
        """Have rows of a subscription that is gone read; `_on_orphans_read` decides about them."""
        self.orphans.leave(fired, left_by)
        if not self._is_adopting:
            self._adopt_some()

    def _adopt_some(self) -> None:
        handout = self.orphans.next_slice(self._answer_max_bytes)
        self._is_adopting = handout is not None
        if handout is not None:
            self._ports.read(handout)

    def _adopt_more(self) -> None:
        """Not in this turn of the loop: there may be very many."""
        if self.orphans.are_left and not self._is_adopting:
            self._is_adopting = True
            self._slices.soon(self._adopt_some, LOOK_ITEMS)

    def _on_orphans_read(self, handout: Handout, deliveries: Deliveries, now_ms: int) -> None:
        passed_on: dict[tuple[int, int, int | None], list[Rows]] = {}
        for delivery in deliveries:
            match self.orphans.judge(delivery):
                case Fate.DROPPED:
                    self._settle(delivery, Outcome.DROPPED, now_ms)
                case Fate.RECORDED:
                    self.outcomes.on_orphaned(delivery, handout.left_by, now_ms)
                case Fate.PASSED_ON:
                    heir_id = self.orphans.heir_id(delivery, handout.left_by)
                    whose = (delivery.entry.hour, delivery.origin.subject_id, heir_id)
                    passed_on.setdefault(whose, []).append(delivery.row)
        unread = handout.unread(deliveries)
        self.orphans.remove(unread)
        self._unread.update(unread)
        for (hour, subject_id, heir_id), rows in passed_on.items():
            fired = FiredRows(hour, concatenate(rows, WHEEL_DTYPE))
            heir = None if heir_id is None else self._registry.by_id(heir_id)
            if heir is None:
                self.parked.add(subject_id, fired)
            else:
                queue = self.queue(heir)
                queue.rows.push(fired)
                self.pump(queue, now_ms)
        self._is_adopting = False
        self._adopt_more()

    def oldest_due_ms(self) -> int | None:
        """When the oldest message was due that waits for a subscriber; None if none waits.

        Each queue is in due order, and what came back stands in front of it."""
        times = [queue.first_ms() for queue in self._queues.values()]
        times.append(self.parked.first_ms())
        return min((time_ms for time_ms in times if time_ms is not None), default=None)

    def queued_count(self) -> int:
        """Deliveries that wait in queues."""
        return sum(queue.count for queue in self._queues.values())

    def in_flight_count(self) -> int:
        """Deliveries that left a queue and are not settled: being sent, or leased."""
        return sum(queue.in_flight for queue in self._queues.values())

    @property
    def delivered_total(self) -> int:
        """Deliveries that arrived since the start."""
        return sum(self.delivered_by_subject.values())

    def holds(self, entry: ScheduleEntry) -> bool:
        """Whether the row waits in a queue, is on its way, or could not be read.

        A cancel asks. Without this it would be answered "cancelled" while the message is being
        delivered (I5)."""
        return (
            entry.seq in self._unread
            or self.orphans.holds(entry)
            or any(len(fired.find(entry)) for fired in self._deferred)
            or any(queue.holds(entry) for queue in self._queues.values())
        )

    def holding(self, seqs: Iterable[int]) -> set[int]:
        """The rows of these seqs that `holds` would say so of: each queue is asked once."""
        wanted = set(seqs)
        found = wanted & self._unread
        found |= self.orphans.holding(wanted)
        numbers = np.fromiter(sorted(wanted), np.uint64, len(wanted))
        waiting: list[Iterable[FiredRows]] = [self._deferred]
        for queue in self._queues.values():
            found |= wanted & queue.reserved
            waiting.append(queue.slices())
        for slices in waiting:
            for fired in slices:
                bounds = fired.bounds()
                near = numbers[
                    np.searchsorted(numbers, np.uint64(bounds.first_seq)) : np.searchsorted(
                        numbers, np.uint64(bounds.last_seq), side="right"
                    )
                ]
                if len(near):
                    found.update(near[is_among(near, fired.rows["seq"])].tolist())
        return found

    def holds_for(self, subscription_id: int, entry: ScheduleEntry) -> bool:
        """Whether the row waits for this subscription, or is on its way to it."""
        queue = self._queues.get(subscription_id)
        return queue is not None and queue.holds(entry)

    # ── subscriptions come and go ──────────────────────────────────────────────────────────────

    def on_subscription(self, subscription: Subscription, now_ms: int) -> None:
        """A subscription was added, changed or removed."""
        if self.permits is not None:
            self.permits.define(subscription)
        queue = self._queues.get(subscription.id)
        if subscription.deleted:
            if queue is not None:
                self._drop_queue(queue)
            return
        if queue is not None:
            is_limited_anew = queue.rows.change(queue.subscription, subscription, now_ms)
            if is_limited_anew and subscription.is_pushed:
                queue.unreserved |= queue.reserved - queue.begun - queue.dropping
            if host_of(queue.subscription) != host_of(subscription):
                queue.held_until_ms = 0  # It was another receiver that wanted to wait.
            queue.subscription = subscription
        for fired in self.parked.remove_matching(subscription, self._subject_names):
            self.queue(subscription).rows.push(fired)
        if subscription.id in self._queues:
            self.pump(self._queues[subscription.id], now_ms)

    def _drop_queue(self, queue: Queue) -> None:
        del self._queues[queue.subscription.id]
        self._wakes.pop(queue.subscription.id, None)
        for fetch in self.fetches.waiting(queue.subscription.id):
            fetch.force_complete()
        # Rows on their way may still arrive: until then nobody may inherit their messages (I4).
        self.orphans.add(queue.reserved)
        for fired in queue.slices():
            self._adopt(fired, queue.subscription.id)

    # ── handing out ────────────────────────────────────────────────────────────────────────────

    def pump(self, queue: Queue, now_ms: int) -> None:
        """Let rows leave the queue as far as the subscriber can take them."""
        self.now_ms = now_ms
        instant = self._instant()
        subscription = queue.subscription
        self._wakes.pop(subscription.id, None)
        deadlines, single_file = queue.rows.deadlines, queue.rows.single_file
        is_held = queue.held_until_ms > instant.present_ms
        is_still = subscription.paused or is_held
        goes_on_ms = queue.held_until_ms if is_held and not subscription.paused else NEVER_MS
        if self.draining or (is_still and deadlines is None):
            queue.keep()
            if goes_on_ms != NEVER_MS and not self.draining:
                self._wake_at(subscription.id, instant, goes_on_ms, NEVER_MS)
            return
        if not self.may_deliver():
            queue.keep()
            self._look_again(queue, instant)
            return
        if deadlines is not None:
            self._drop_expired(queue, now_ms)
        if deadlines is not None and is_still:
            self._look_soon(queue, deadlines)
            queue.keep()
            expires_ms = deadlines.next_ms(now_ms)
            if expires_ms is not None or goes_on_ms != NEVER_MS:
                expires_ms = NEVER_MS if expires_ms is None else expires_ms
                self._wake_at(subscription.id, instant, goes_on_ms, expires_ms)
            return
        if single_file is not None:
            self._find_groups_soon(queue, single_file)
        self._drop_outdated(queue, now_ms)
        # Behind rows that leave, others may have become too old.
        while self._hand_out(queue, instant) and self._drop_outdated(queue, now_ms):
            pass
        if deadlines is not None:
            self._look_soon(queue, deadlines)
            queue.rows.let_go()
        queue.keep()
        wait_ms, outdated_ms = self._wait_ms(queue, instant), queue.rows.outdated_ms(now_ms)
        if wait_ms is None and outdated_ms is None:
            return
        present_ms = instant.present_ms
        leave_ms = NEVER_MS if wait_ms is None else present_ms + wait_ms
        outdated_ms = NEVER_MS if outdated_ms is None else outdated_ms
        self._wake_at(subscription.id, instant, leave_ms, outdated_ms)

    def _wait_ms(self, queue: Queue, instant: Instant) -> int | None:
        """How long until rows of a queue may leave though nothing else happens; None: never."""
        wait_ms = queue.rows.wait_ms(instant)
        if queue.starts_slowly(instant):
            return LOOK_MS if wait_ms is None else min(wait_ms, LOOK_MS)
        return wait_ms

    def _wake_at(
        self, subscription_id: int, instant: Instant, leave_ms: int, outdated_ms: int
    ) -> None:
        """Look at a queue again when the stopwatch shows `leave_ms`, or the clock `outdated_ms`."""
        self._wakes[subscription_id] = leave_ms, outdated_ms
        wake_ms = min(leave_ms, instant.present_ms + outdated_ms - instant.now_ms)
        if wake_ms < self._announced_ms:
            self._announced_ms = wake_ms
            self._ports.tick_soon()

    def _look_again(self, queue: Queue, instant: Instant) -> None:
        """Nothing may leave now; nobody says when it may again."""
        subscription_id = queue.subscription.id
        leave_ms, outdated_ms = self._wakes.get(subscription_id, (NEVER_MS, NEVER_MS))
        leave_ms = min(leave_ms, instant.present_ms + HELD_LOOK_MS)
        self._wake_at(subscription_id, instant, leave_ms, outdated_ms)

    def _hand_out(self, queue: Queue, instant: Instant) -> bool:
        """To the sink, or to consumers that wait; False: to nobody."""
        subscription, before = queue.subscription, queue.count
        if subscription.is_pushed:
            queue.want(instant)
            left = REQUESTS_MAX
            while left > 0 and queue.rows.count:
                if not (count := self._push_out(queue, instant, left)):
                    break
                left -= count
            if left <= 0:
                self.pump_soon(subscription.id)
        else:
            while (ready := queue.rows.ready(instant)) and (
                fetch := self.fetches.oldest(subscription.id, ready)
            ):
                fetch.force_complete()
            if self.on_ready is not None:
                self.on_ready(subscription.id)
        return queue.count != before

    def _push_out(self, queue: Queue, instant: Instant, requests_max: int) -> int:
        """Have rows sent as far as there are connections for them, in up to so many requests.
        Returns how many there are; 0: no row may leave."""
        subscription = queue.subscription
        rows_max = min(queue.free_places(), READ_ROWS_MAX)
        if rows_max <= 0:
            return 0
        if subscription.takes_many:
            return min(1, self._start(queue, rows_max, None, instant))
        ready = queue.rows.ready(instant)
        if not ready:
            return 0
        room = queue.slow_start.room(instant.present_ms)
        if not room:
            return 0
        wanted = 1 if subscription.batch_max else min(rows_max, ready, requests_max, room)
        taken = self.connections.take(subscription.id, host_of(subscription), wanted)
        if not taken:
            return 0
        if not subscription.batch_max:
            rows_max = taken
        queue.slow_start.begin(taken)
        used = min(taken, self._start(queue, rows_max, None, instant, taken))
        self._give_back(queue, taken - used)
        return used

    def _give_back(self, queue: Queue, count: int) -> None:
        """So many connections were taken for requests that do not leave."""
        self.connections.give_back(queue.subscription.id, count)
        queue.slow_start.on_answered(count)

    def wake(self, now_ms: int, budget: TurnBudget | None = None) -> int | None:
        """Let rows leave whose time has come; returns how long until the next may, in ms: 0 if the
        budget does not reach for all of them."""
        budget = budget or TurnBudget()
        present_ms, are_left = self._stopwatch(), False
        for subscription_id, (leave_ms, outdated_ms) in list(self._wakes.items()):
            if leave_ms > present_ms and outdated_ms > now_ms:
                continue
            if not budget:
                # Those that were pumped stand behind the others in the next turn.
                are_left = True
                break
            budget.spend(PUMP_ITEMS)
            if (queue := self._queues.get(subscription_id)) is not None:
                self.pump(queue, now_ms)
        if are_left:
            return 0
        present_ms = self._stopwatch()
        waits = (min(leave - present_ms, old - now_ms) for leave, old in self._wakes.values())
        wait_ms = min(waits, default=None)
        self._announced_ms = NEVER_MS if wait_ms is None else present_ms + wait_ms
        return wait_ms

    def _start(
        self,
        queue: Queue,
        rows_max: int,
        request: PullRequest | None,
        instant: Instant,
        connections: int = 0,
    ) -> int:
        """Start a handout: rows leave the queue, and are read; returns how many.
        `connections`: those that were taken for it; it keeps one for each request."""
        bytes_max = self._answer_max_bytes
        if queue.subscription.batch_max:
            bytes_max = min(bytes_max, BATCH_BYTES_MAX)
        if request is not None and request.max_bytes:
            bytes_max = min(bytes_max, request.max_bytes)
        if queue.subscription.takes_many:
            bytes_max = min(bytes_max, self.broker_room(queue.subscription.id))
        slices = queue.pop(rows_max, bytes_max, instant) if bytes_max else []
        if not slices:
            return 0
        handout = Handout(queue.subscription, slices, queue.attempts, request)
        count = handout.count
        handout.connections = min(connections, count)
        if queue.subscription.is_pushed:
            if queue.subscription.batch_max:
                handout.as_batch = True
                queue.posts.add(handout.first_seq)
            else:
                queue.is_reading = True
        self._ports.read(handout)
        return count

    def _drop_outdated(self, queue: Queue, now_ms: int) -> bool:
        """Give up what is too old, a slice at a time: the next follows when this is recorded."""
        slices = queue.pop_outdated(self._answer_max_bytes, now_ms)
        if not slices:
            return False
        limit = format_duration(queue.subscription.drop_older_than_ms)
        handout = Handout(queue.subscription, slices, queue.attempts)
        handout.give_up_reason = f"older than {limit} when it could have been delivered"
        self._ports.read(handout)
        return True

    def _drop_expired(self, queue: Queue, now_ms: int) -> None:
        """Give up what waits and is known to have expired, some at a time, as `_drop_outdated`."""
        slices = queue.pop_expired(self._answer_max_bytes, now_ms)
        if slices:
            handout = Handout(queue.subscription, slices, queue.attempts)
            handout.give_up_reason = EXPIRED
            self._ports.read(handout)

    def _look_soon(self, queue: Queue, deadlines: Deadlines) -> None:
        """Find out when rows expire that wait still."""
        if not deadlines.are_unread:
            return
        if not queue.count:
            deadlines.forget_unread()
        elif not deadlines.is_reading:
            deadlines.is_reading = True
            look = partial(self._look_at_some, queue.subscription.id, deadlines)
            self._slices.soon(look, LOOK_ITEMS)

    def _look_at_some(self, subscription_id: int, deadlines: Deadlines) -> None:
        """Read rows of which nobody knows when they expire; some, as the next turn is others'."""
        queue = self._queues.get(subscription_id)
        if queue is None:
            return
        slices = deadlines.next_unread(Room(READ_ROWS_MAX, self._answer_max_bytes))
        if slices:
            self._ports.read(Handout(queue.subscription, slices, {}, is_look=True))
        else:
            deadlines.is_reading = False

    def _on_looked(self, queue: Queue, deliveries: Deliveries, now_ms: int) -> None:
        """Rows that wait were read; what of them could not be is found out when it leaves."""
        deadlines = queue.rows.deadlines
        assert deadlines is not None
        expiries_ms = deliveries.expiries_ms(np.arange(len(deliveries)))
        deadlines.add(deliveries.settled["seq"], expiries_ms)
        deadlines.is_reading = False
        self.pump(queue, now_ms)

    def _find_groups_soon(self, queue: Queue, single_file: SingleFile) -> None:
        """Find out of which groups the rows are that came."""
        if single_file.are_unread and not single_file.is_reading:
            single_file.is_reading = True
            find = partial(self._find_some_groups, queue.subscription.id, single_file)
            self._slices.soon(find, LOOK_ITEMS)

    def _find_some_groups(self, subscription_id: int, single_file: SingleFile) -> None:
        """Read rows of which nobody knows the group; some, as the next turn is others'."""
        queue = self._queues.get(subscription_id)
        if queue is None:
            return
        subscription = queue.subscription
        while slices := single_file.next_expected(self._room()):
            # What has ended meanwhile need not be there any more.
            if slices := self._still_expected(queue, slices):
                self._ports.read(Handout(subscription, slices, {}, is_look=True, are_expected=True))
                return
        if slices := single_file.next_unread(self._room()):
            self._ports.read(Handout(subscription, slices, {}, is_look=True, of_group=True))
        else:
            single_file.is_reading = False  # They have expired meanwhile.

    def _room(self) -> Room:
        return Room(self.look_rows_max, self._answer_max_bytes)

    def _still_expected(self, queue: Queue, slices: list[FiredRows]) -> list[FiredRows]:
        """Of rows that waited in the wheel, those that do, or have come to the queue since."""
        found = []
        for fired in slices:
            entries = map(ScheduleEntry, fired.rows["seq"].tolist(), fired.due_ms().tolist())
            waits = [self._has_not_fired(entry) or queue.holds(entry) for entry in entries]
            if any(waits):
                found.append(FiredRows(fired.hour, select(fired.rows, np.array(waits))))
        return found

    def _on_groups_found(
        self, queue: Queue, handout: Handout, deliveries: Deliveries, now_ms: int
    ) -> None:
        single_file = queue.rows.single_file
        assert single_file is not None
        single_file.is_reading = False
        if handout.of_group:
            leaving, lost = single_file.on_read(deliveries)
            for fired in leaving:
                queue.rows.admit(fired)
            self._lose(queue, lost)
        else:
            for delivery in deliveries:
                options, entry = delivery.payload.options, delivery.entry
                is_retry = delivery.attempt > 1
                if is_retry and (self._has_not_fired(entry) or queue.holds(entry)):
                    assert options is not None and options.group is not None
                    single_file.hold(options.group, delivery.origin.message_seq, entry.seq)
        self.pump(queue, now_ms)

    def _lose(self, queue: Queue, seqs: list[int]) -> None:
        """Rows cannot be read, which was reported: nobody waits behind them."""
        self._unread.update(seqs)
        if queue.rows.single_file is not None:
            self._go_on(queue, queue.rows.single_file.lose(seqs))

    def keep_turn(self, subscription_id: int, message_seq: int, seq: int) -> None:
        """A message is retried as row `seq`: if it is the first of its group, that is still."""
        queue = self._queues.get(subscription_id)
        if queue is not None and queue.rows.single_file is not None:
            queue.rows.single_file.follow(message_seq, seq)

    def end_turn(self, subscription_id: int, message_seqs: Iterable[int]) -> None:
        """Messages are settled for a subscription: what waits behind them in their groups is
        next."""
        queue = self._queues.get(subscription_id)
        if queue is None or queue.rows.single_file is None:
            return
        self._go_on(queue, queue.rows.single_file.release(message_seqs))

    def is_to_be_pumped(self, queue: Queue) -> bool:
        """Whether a queue is pumped in a turn to come."""
        return queue.subscription.id in self._to_pump

    def _go_on(self, queue: Queue, leaving: list[FiredRows]) -> None:
        """It is the turn of these rows."""
        for fired in leaving:
            queue.rows.admit(fired)
        if leaving:
            self.pump_soon(queue.subscription.id)

    def _pump_again(self, subscription_id: int) -> None:
        self._to_pump.discard(subscription_id)
        if (queue := self._queues.get(subscription_id)) is not None:
            self.pump(queue, self.now_ms)

    def on_read(self, handout: Handout, deliveries: Deliveries, now_ms: int) -> None:
        """The payloads of a handout were read: send the deliveries, lease them or give them up.

        Rows that could not be read were reported; `deliveries` has none of them."""
        if handout.left_by:
            self._on_orphans_read(handout, deliveries, now_ms)
            return
        queue = self._queues.get(handout.subscription.id)
        if handout.is_look:
            if queue is None:
                pass  # Deleted meanwhile, and its rows with it.
            elif handout.of_group or handout.are_expected:
                self._on_groups_found(queue, handout, deliveries, now_ms)
            else:
                self._on_looked(queue, deliveries, now_ms)
        elif queue is None:
            # Deleted meanwhile: the rows go where those in its queue went.
            if handout.request is not None and not handout.request.is_gone:
                handout.request.finish(Pulled())
            for fired in handout.slices:
                self.orphans.remove(fired.rows["seq"].tolist())
                self._adopt(fired, handout.subscription.id)
            self.connections.give_back(handout.subscription.id, handout.connections)
        else:
            requests = self._on_handout(queue, handout, deliveries, now_ms)
            if handout.connections:
                self._give_back(queue, handout.connections - requests)
            if handout.request is None and not (requests and handout.as_batch):
                self.pump(queue, now_ms)  # There is no answer that will do it.

    def _on_handout(
        self, queue: Queue, handout: Handout, deliveries: Deliveries, now_ms: int
    ) -> int:
        """As `on_read`; returns how many requests are sent."""
        if lost := handout.unread(deliveries):
            for seq in lost:
                queue.release(seq, self._stopwatch())
            self._lose(queue, lost)
        if handout.give_up_reason:
            self.outcomes.on_outdated(deliveries, handout.give_up_reason, now_ms)
            return 0
        if not self._may_leave(queue, handout.subscription):
            self._take_back(queue, handout, deliveries)
            return 0
        if len(expired := deliveries.expired(now_ms)):
            self.outcomes.on_expired(deliveries, expired, now_ms)
            left = np.delete(np.arange(len(deliveries)), expired)
            deliveries = deliveries.select(left)
        if handout.request is not None and handout.request.subjects and len(deliveries):
            deliveries = self._withhold(queue, handout.request, deliveries)
        if handout.request is not None:
            if handout.count > 0 and not len(deliveries) and not handout.request.is_gone:
                self._wait_on(queue, handout.request)
            else:
                self._ports.hand_out(handout, deliveries)
            return 0
        queue.posts.discard(handout.first_seq)
        if handout.as_batch:
            return self._send_batches(queue, handout, deliveries)
        queue.is_reading = False
        if queue.subscription.takes_many:
            if deliveries:
                self._ports.send(queue.subscription, list(deliveries))
            return 0
        for delivery in deliveries:
            self._ports.send(queue.subscription, [delivery])
        return len(deliveries)

    def _send_batches(self, queue: Queue, handout: Handout, deliveries: Deliveries) -> int:
        """Send what was read for one request: in one, unless some of it has failed together before.
        Deliveries that find no connection wait again. Returns how many requests are sent."""
        subscription, requests = queue.subscription, 0
        for which in _apart(queue, deliveries.settled["attempt"]):
            if requests:
                is_free = queue.free_places() > 0
                host = host_of(subscription)
                has_room = queue.slow_start.room(self._stopwatch()) > 0
                if not (is_free and has_room and self.connections.take(subscription.id, host, 1)):
                    self._put_back(queue, deliveries.select(which))
                    continue
                queue.slow_start.begin(1)
                handout.connections += 1
            requests += 1
            batch = [deliveries[index] for index in which.tolist()]
            queue.posts.add(batch[0].entry.seq)
            self._ports.send(subscription, batch)
        return requests

    def _may_leave(self, queue: Queue, subscription: Subscription) -> bool:
        """Whether anything may be delivered now, as far as the subscription decides: what was read
        or waits for a connection was taken for `subscription`, which may have changed since."""
        is_changed = queue.subscription is not subscription and subscription.is_pushed
        is_still = self.draining or queue.subscription.paused or is_changed
        # Few queues were ever held: those need no look at the stopwatch.
        is_held = queue.held_until_ms and queue.held_until_ms > self._stopwatch()
        return not (is_still or is_held) and self.may_deliver()

    def may_begin(
        self, subscription: Subscription, deliveries: Sequence[DueDelivery], now_ms: int
    ) -> bool:
        """Whether deliveries that were sent (`DispatcherPorts.send`) may begin: asked when the
        first byte is about to leave. If so they have begun, and count against the rate.

        Otherwise the sink answers `Untried`: they go back to their queue, and leave again as the
        subscription says now, or are dead letters. A pause, a deletion, another URL, a time to live
        and a lost lease hold from then on, however long a request waits for a connection."""
        queue = self._queues.get(subscription.id)
        if queue is None or not self._may_leave(queue, subscription):
            return False
        for delivery in deliveries:
            expires_ms = delivery.payload.expires_ms(delivery.origin.due_ms)
            if expires_ms is not None and expires_ms <= now_ms:
                return False
        queue.begin([delivery.entry.seq for delivery in deliveries], self._stopwatch())
        if subscription.rate_per_s and queue.count:
            self.pump_soon(subscription.id)  # Others may leave, as soon as the rate allows it.
        return True

    def _withhold(self, queue: Queue, request: PullRequest, deliveries: Deliveries) -> Deliveries:
        """Lay by what a consumer may not read, for one that may, and return the rest."""
        subjects = deliveries.subjects()
        mine = np.array([request.may_read(subject) for subject in subjects], np.bool_)
        if mine.all():
            return deliveries
        for subject in set(subjects):
            if request.may_read(subject):
                continue
            which = np.flatnonzero(np.array([one == subject for one in subjects]))
            settled = select(deliveries.settled, which)
            seqs = settled["seq"].tolist()
            queue.release_leased(seqs)
            queue.attempts.update(zip(seqs, settled["attempt"].tolist(), strict=True))
            queue.withheld.setdefault(subject, []).extend(deliveries.slices(which))
            other = self.fetches.oldest(queue.subscription.id, len(which), subject)
            if other is not None:
                self._slices.soon(partial(_complete, other), LOOK_ITEMS)
        return deliveries.select(np.flatnonzero(mine))

    def _take_back(self, queue: Queue, handout: Handout, deliveries: Deliveries) -> None:
        """Nothing may leave any more that was read: it goes back to its place, and was no
        attempt."""
        if handout.request is None:
            queue.posts.discard(handout.first_seq)
            queue.is_reading &= handout.as_batch
        elif not handout.request.is_gone:
            handout.request.finish(Pulled())
        self._put_back(queue, deliveries)

    def _put_back(self, queue: Queue, deliveries: Deliveries) -> None:
        """Deliveries that were not sent wait again, at their places."""
        if not len(deliveries):
            return
        present_ms = self._stopwatch()
        for seq in deliveries.settled["seq"].tolist():
            queue.release(seq, present_ms)
        for fired in deliveries.slices(np.arange(len(deliveries))):
            queue.rows.put_back(fired)

    def end_request(self, deliveries: list[DueDelivery], *, is_answered: bool) -> None:
        """A request is over, and another may be sent. The caller settles, releases or returns each
        of the deliveries that it carried."""
        subscription_id = deliveries[0].subscription_id
        if self.connections.taken(subscription_id):
            self.connections.give_back(subscription_id)
        queue = self._queues.get(subscription_id)
        if queue is not None:
            queue.posts.discard(deliveries[0].entry.seq)
            if is_answered:
                queue.slow_start.on_answered()

    def hold(self, subscription_id: int, hold_ms: int) -> None:
        """The receiver of a subscription wants nothing for so long."""
        queue = self._queues.get(subscription_id)
        if queue is not None:
            until_ms = self._stopwatch() + hold_ms
            queue.held_until_ms = max(queue.held_until_ms, until_ms)

    def request(self, queue: Queue, request: PullRequest) -> DelayedFetch:
        """Let a consumer wait: it is answered when enough messages are due, or its time is up."""
        request.until_ms = self._stopwatch() + request.wait_ms
        return self._wait(queue, request)

    def _wait_on(self, queue: Queue, request: PullRequest) -> None:
        """Nothing of what was read for a consumer can be given to it: let it wait for what is left
        of its time."""
        request.wait_ms = max(0, request.until_ms - self._stopwatch())
        fetch = self._wait(queue, request)
        if not fetch.is_completed:
            request.again = fetch
            self._ports.tick_soon()

    def _wait(self, queue: Queue, request: PullRequest) -> DelayedFetch:

        def ready() -> bool:
            return self._ready(queue, request) >= request.min_messages

        def complete(fetch: DelayedFetch) -> None:
            if request.is_gone:
                return
            ready = self._ready(queue, request) > 0
            if not (ready and self._start(queue, request.max_messages, request, self._instant())):
                request.finish(Pulled())

        return self.fetches.add(queue.subscription.id, request, ready, complete)

    def ready(self, subscription_id: int) -> int | None:
        """How many rows may leave; None: none will any more, since the subscription is gone, or the
        server stops."""
        subscription = self._registry.by_id(subscription_id)
        if subscription is None or self.draining:
            return None
        queue = self.queue(subscription)
        withheld = 0 if subscription.paused else queue.count - queue.rows.count
        return self._ready(queue) + withheld

    def _ready(self, queue: Queue, request: PullRequest | None = None) -> int:
        """How many rows may leave the queue, for a consumer."""
        if request is not None and queue.withheld:
            queue.admit(request.may_read)
        is_there = self._queues.get(queue.subscription.id) is queue
        if not is_there or queue.subscription.paused or self.draining:
            return 0
        instant = self._instant()
        if not self.may_deliver():
            self._look_again(queue, instant)  # Whoever asks will wait for it.
            return 0
        return queue.rows.ready(instant)

    def _instant(self) -> Instant:
        return Instant(self.now_ms, self._stopwatch())

    def drain(self) -> None:
        """Let nothing leave the queues any more, and answer those who wait."""
        self.draining = True
        for subscription_id in self._queues:
            for fetch in self.fetches.waiting(subscription_id):
                fetch.force_complete()

    # ── what came of a delivery ────────────────────────────────────────────────────────────────

    def settle_delivered(
        self,
        delivery: DueDelivery,
        now_ms: int,
        recorded: Recorded | None = None,
        tried: Tried | None = None,
    ) -> None:
        """Record a delivery that has arrived, so that a restart does not repeat it (I4).

        `recorded`: who delivered it has told all replicas; so this one writes the same row.
        `tried`: what is told of the attempt."""
        self.delivered_by_subject[delivery.origin.subject_id] += 1
        self.delivered_by_subscription[delivery.subscription_id] += 1
        if recorded is None:
            self._settle(delivery, Outcome.DELIVERED, now_ms, tried)
        else:
            row = pack_settled(delivery, Outcome.DELIVERED, recorded.settled_ms)
            self._ports.settle_recorded(delivery.entry.hour, row, recorded.offset)
            self._hours.add(delivery.entry.hour, -1)
        self.release_delivery(delivery)
        self.end_turn(delivery.subscription_id, (delivery.origin.message_seq,))

    def settle_leased(self, deliveries: Deliveries, which: NDArray[np.intp], now_ms: int) -> None:
        """Record leased deliveries that have arrived (I4). `which`: their indexes (shape n)."""
        rows = select(deliveries.settled, which)
        rows["settled_ms"] = now_ms
        hours = rows["due_ms"] // HOUR_MS
        for hour, count in Counter(hours.tolist()).items():
            of_hour = rows if count == len(rows) else select(rows, hours == hour)
            self._ports.settle(hour, of_hour.tobytes(), _note_leased(deliveries, of_hour, now_ms))
            self._hours.add(hour, -count)
        subject_ids = deliveries.subject_ids
        self.delivered_by_subject.update([subject_ids[index] for index in which.tolist()])
        self.delivered_by_subscription[deliveries.subscription_id] += len(which)
        self._release_leased(deliveries.subscription_id, rows["seq"].tolist())
        self.end_turn(deliveries.subscription_id, rows["message_seq"].tolist())

    def may_be_the_cause(self, deliveries: Deliveries, which: NDArray[np.intp]) -> bool:
        """Whether leased deliveries whose leases are over are to blame: nothing else of their
        subscription was in the hands of consumers, or of what had failed before. `which`: their
        indexes (shape n)."""
        queue = self._queues.get(deliveries.subscription_id)
        if queue is None or len(which) > 1:
            return len(which) == 1
        seq = int(deliveries.settled["seq"][which[0]])
        return queue.in_flight <= 1 or queue.rows.suspects_out == {seq}

    def _release_leased(self, subscription_id: int, seqs: list[int]) -> Queue | None:
        queue = self._queues.get(subscription_id)
        if queue is None:
            self.orphans.remove(seqs)
        elif queue.release_leased(seqs):
            self.pump_soon(subscription_id)  # The next suspects may leave.
        return queue

    def release_delivery(self, delivery: DueDelivery) -> None:
        """Free the place of a delivery that is not on its way any more, whatever came of it.

        It remains unsettled: a record of a retry, or a dead letter, settles its row."""
        seq = delivery.entry.seq
        queue = self._queues.get(delivery.subscription_id)
        if queue is None:
            self.orphans.remove((seq,))
            self._adopt_more()
        elif queue.release(seq, self._stopwatch()):
            queue.attempts.pop(seq, None)

    def return_delivery(self, delivery: DueDelivery, next_attempt: int) -> None:
        """Put a delivery that was not taken into its queue again: as the next one if it was handed
        out, else at its place.

        `next_attempt`: the number of its next attempt; that of this one, if it does not count."""
        seq, fired = delivery.entry.seq, FiredRows(delivery.entry.hour, delivery.row)
        queue = self._queues.get(delivery.subscription_id)
        was_handed_out = queue is None or not queue.subscription.is_pushed or seq in queue.begun
        self.release_delivery(delivery)
        if queue is None:
            self._adopt(fired, delivery.subscription_id)
            return
        if next_attempt != delivery.origin.attempt:
            queue.attempts[seq] = next_attempt
        if was_handed_out:
            queue.rows.come_back(fired)
        else:
            queue.rows.put_back(fired)

    def return_leased(
        self,
        deliveries: Deliveries,
        which: NDArray[np.intp],
        attempts_used: int = 1,
        *,
        are_suspects: bool = False,
    ) -> None:
        """Put deliveries of a pull into their queue again, for one attempt more, as the next ones.

        `which`: their indexes (shape n); `attempts_used`: 0 where no consumer was sent them: they
        go to their places; `are_suspects`: one of them may have ended the consumer that had all."""
        settled = select(deliveries.settled, which)
        seqs = settled["seq"].tolist()
        queue = self._release_leased(deliveries.subscription_id, seqs)
        if queue is not None:
            queue.attempts.update(
                zip(seqs, (settled["attempt"] + attempts_used).tolist(), strict=True)
            )
        for fired in deliveries.slices(which):
            if queue is None:
                self._adopt(fired, deliveries.subscription_id)
            elif are_suspects:
                queue.rows.suspect(fired)
            elif attempts_used:
                queue.rows.come_back(fired)
            else:
                queue.rows.put_back(fired)

    def _settle(
        self, delivery: DueDelivery, outcome: Outcome, now_ms: int, tried: Tried | None = None
    ) -> None:
        note = None if tried is None else _note(delivery, tried)
        self._ports.settle(delivery.entry.hour, pack_settled(delivery, outcome, now_ms), note)
        self._hours.add(delivery.entry.hour, -1)


def _apart(queue: Queue, attempts: NDArray[np.uint16]) -> Iterator[NDArray[np.intp]]:
    """Which deliveries (indexes) go together in one request, by their attempts (both shape n)."""
    for attempt in np.unique(attempts).tolist():
        which = np.flatnonzero(attempts == attempt)
        most = len(which)
        if attempt > 1:
            most = queue.company_max(attempt, most)
        yield from np.split(which, range(most, len(which), most))


@lru_cache(maxsize=HOSTS_REMEMBERED)
def _host_of_url(url: str) -> str:
    return urlsplit(url).netloc.lower()


def host_of(subscription: Subscription) -> str:
    """Where the requests of a webhook go. Those of messages with `to` go to the hosts that share
    their number."""
    if is_direct(subscription.id):
        return str(subscription.id)
    return _host_of_url(subscription.url)


def _note(delivery: DueDelivery, tried: Tried) -> NoteBytes:
    entry = delivery.entry
    return encode_note(
        Note(
            *(entry.hour, entry.seq, delivery.subscription_id, 1),
            *(tried.began_ms, tried.duration_ms, tried.status, tried.answer),
        )
    )


def _note_leased(deliveries: Deliveries, rows: Rows, now_ms: int) -> NoteBytes | None:
    """One for all rows of an hour that are acknowledged together."""
    began_ms = deliveries.leased_ms
    if not began_ms:
        return None
    first = rows[0]
    hour, seq = int(first["due_ms"]) // HOUR_MS, int(first["seq"])
    subscription_id, took_ms = deliveries.subscription_id, max(0, now_ms - began_ms)
    return encode_note(Note(hour, seq, subscription_id, len(rows), began_ms, took_ms))


def _complete(fetch: DelayedFetch) -> None:
    fetch.force_complete()


def _by_route(rows: Rows) -> Iterator[tuple[int, Rows]]:
    routes = rows["route"]
    first = int(routes[0])
    if (routes == first).all():
        yield first, rows
        return
    for route in np.unique(routes).tolist():
        yield route, select(rows, routes == route)


def _shares(
    fired: FiredRows, subject: str, candidates: Sequence[Subscription]
) -> tuple[list[tuple[Subscription, FiredRows]], FiredRows | None]:
    """The rows of a subject that each subscription gets (`records.receivers`), and the rows that
    wait for a subscription."""
    first_ms = fired.first_ms()
    for one in candidates:
        if first_ms < one.unchanged_since_ms:
            break
    else:
        # As nearly always: all rows fell due when the definitions were those of now.
        all_rows = [(one, fired) for one in candidates if not one.deleted and one.matches(subject)]
        return all_rows, None if all_rows else fired
    shared = shares(candidates, subject, fired.rows["seq"], fired.due_ms())
    is_left = np.ones(len(fired.rows), bool)
    for _, mask in shared:
        is_left &= ~mask
    left = FiredRows(fired.hour, select(fired.rows, is_left)) if is_left.any() else None
    return [(one, FiredRows(fired.hour, select(fired.rows, mask))) for one, mask in shared], left
