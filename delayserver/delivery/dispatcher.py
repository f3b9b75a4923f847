"""The dispatcher: from rows that fired to finished deliveries.

    fired rows ── route ──▶ a queue per subscription ── pump ──▶ deliveries ── outcome ──▶ settled
                   ├──▶ parked, while no subscription matches
                   └──▶ orphans, if their subscription is gone: read, then judged

Every subscription has its own queue, of row arrays, so a slow one delays no other (I2). The
dispatcher knows the subscriptions of a row, and which rows it has. The pump
(`delayserver.delivery.pump`) lets them leave, `Pushes` and `Pulls` bring them to their sink or
consumer, and `Settling` ends their deliveries.

Every delivery of a row counts in the hour the row belongs to, from the moment it fires until it is
settled; an hour whose count is zero is done (`Hours`).

Cost: routing is vectorised; a queue entry is a slice.
Threads: belongs to the event loop.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from delayserver.delivery.deliveries import NEVER_MS, Deliveries
from delayserver.delivery.handout import Handout
from delayserver.delivery.orphans import Orphans
from delayserver.delivery.parked import Parked
from delayserver.delivery.ports import DispatcherPorts
from delayserver.delivery.pump import ANSWER_BYTES_MAX, PUMP_ITEMS, Pump, Undelivered
from delayserver.delivery.pushes import WEBHOOKS_MAX, host_of
from delayserver.delivery.queue import Queue
from delayserver.delivery.queues import Queues
from delayserver.delivery.reassignment import Orphaned, Reassignment
from delayserver.delivery.settling import Settling
from delayserver.records.message import DueDelivery, ScheduleEntry
from delayserver.records.receivers import shares
from delayserver.records.subjects import patterns_of
from delayserver.records.subscriptions import Registry, Subscription
from delayserver.records.tables import Change
from delayserver.schedule.hours import Hours
from delayserver.schedule.wheel_rows import ROUTE_NUMBER, ROUTE_SUBSCRIPTION, FiredRows
from delayserver.slices import Slices, TurnBudget, Work
from delayserver.timers.timeouts import Timeouts
from storage.frame import Rows
from storage.rows import HOUR_MS, Outcome, is_among, select

ROUTE_ITEMS = 2
"""A route that fires counts for so many items of `slices`, and each queue that gets it for one
more."""


class Waiting(NamedTuple):
    """How much the queues hold."""

    queued: int = 0
    """Deliveries that wait."""
    in_flight: int = 0
    """Deliveries that left a queue and are not settled: being sent, or leased."""
    oldest_due_ms: int | None = None
    """When the first of those that wait was due; None: none waits."""


class Undeliverable(Undelivered, Orphaned, Protocol):
    """Decides about all deliveries that the dispatcher cannot bring to anybody."""


class Dispatcher:
    """Routes, and knows which rows it has."""

    def __init__(
        self,
        registry: Registry,
        subject_names: dict[int, str],
        hours: Hours,
        ports: DispatcherPorts,
        timeouts: Timeouts,
        slices: Slices,
        undeliverable: Callable[[], Undeliverable],
        *,
        started_ms: int = 0,
        answer_max_bytes: int = ANSWER_BYTES_MAX,
        webhooks_max: int = WEBHOOKS_MAX,
        broker_room: Callable[[int], int] | None = None,
        may_deliver: Callable[[], bool] = lambda: True,
        changes: Callable[[int], Mapping[int, Change]] = lambda seq: {},
        has_not_fired: Callable[[ScheduleEntry], bool] = lambda entry: False,
    ) -> None:
        """`undeliverable`: is asked from the first row on that fires. `changes` and
        `has_not_fired`: as `Orphans` needs them; `may_deliver`: as `Queues`, `broker_room`: as
        `Pushes`."""
        self._registry = registry
        self._subject_names = subject_names
        self._hours = hours
        self._slices = slices
        self.queues = Queues(timeouts.stopwatch, started_ms, may_deliver)
        self.parked = Parked()
        self.orphans = Orphans(registry, changes, has_not_fired)
        self.pump = Pump(
            self.queues,
            ports,
            slices,
            registry,
            timeouts,
            has_not_fired,
            undeliverable,
            self._reassign,
            answer_max_bytes=answer_max_bytes,
            webhooks_max=webhooks_max,
            broker_room=broker_room,
        )
        self.pushes, self.pulls = self.pump.pushes, self.pump.pulls
        self._reassignment = Reassignment(
            self.queues,
            ports,
            slices,
            self.orphans,
            self.parked,
            registry,
            self.pump.run,
            self._drop,
            undeliverable,
            answer_max_bytes,
        )
        self.settling = Settling(
            self.queues, ports, self.pump, hours, self.orphans, self._reassignment
        )
        self._undecided: Counter[str] = Counter()
        """Subjects of which it is being recorded who gets them, as patterns."""
        self._deferred: list[FiredRows] = []
        """Rows of these that fell due meanwhile."""

    # ── routing ────────────────────────────────────────────────────────────────────────────────

    def expect(self, hour: int, rows: Rows) -> None:
        """Rows of an hour that was loaded (WHEEL_DTYPE) are for one subscription, and may have a
        group: those that are retries hold up the rest of it, as they did before the start."""
        for route, mine in _by_route(rows):
            self.queues.expect(route & ROUTE_NUMBER, FiredRows(hour, mine))

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
            self.pump.run_in_turn(queue, now_ms, budget)
        return left

    def defer(self, patterns: Collection[str]) -> Callable[[], None]:
        """Make rows of these subjects that fall due wait, while a change of their receivers is
        being recorded: else memory would go by the old definition, and a restart by the new one.

        Returns a function to call when the change is in force, or refused."""
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
        # Fired first: it takes the list of deferred rows, and begins another one.
        left = self._fire([], self.queues.now_ms, TurnBudget())
        self._deferred += left
        if self._deferred and not self._undecided:
            self._slices.soon(self._fire_deferred, PUMP_ITEMS)

    def _route(self, route: int, fired: FiredRows) -> list[Queue]:
        number, more = route & ROUTE_NUMBER, -len(fired.rows)
        if route & ROUTE_SUBSCRIPTION:
            subscription_id = number
            subscription = self._registry.by_id(subscription_id)
            if subscription is None:
                self._reassignment.leave(fired, subscription_id)
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
            queue = self.queues.of(subscription)
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
        queue = self.queues.of(subscription)
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
        self.queues.unread.update(seqs)
        self._hours.add(hour, len(seqs))

    def _reassign(self, handout: Handout) -> None:
        self._reassignment.reassign(handout)

    def _drop(self, delivery: DueDelivery, now_ms: int) -> None:
        """Drop a delivery that no receiver may have."""
        self.settling.settle(delivery, Outcome.DROPPED, now_ms)

    # ── which rows it has ──────────────────────────────────────────────────────────────────────

    def waiting(self) -> Work[Waiting]:
        """Count the rows of all queues, some queues in a turn: not as of one moment."""
        queued, in_flight, oldest_due_ms = 0, 0, self.parked.first_ms() or NEVER_MS
        for queue in list(self.queues):
            queued += queue.count
            in_flight += queue.in_flight
            first_ms = queue.first_ms()
            if first_ms is not None:
                oldest_due_ms = min(oldest_due_ms, first_ms)
            yield 1
        return Waiting(queued, in_flight, None if oldest_due_ms == NEVER_MS else oldest_due_ms)

    def holds(self, entry: ScheduleEntry) -> bool:
        """Whether the row waits in a queue, is on its way, or could not be read.

        A cancel asks. Without this it would be answered "cancelled" while the message is being
        delivered (I5)."""
        return (
            entry.seq in self.queues.unread
            or self.orphans.holds(entry)
            or any(len(fired.find(entry)) for fired in self._deferred)
            or any(queue.holds(entry) for queue in self.queues)
        )

    def holding(self, seqs: Iterable[int]) -> set[int]:
        """The rows of these seqs that `holds` would say so of: each queue is asked once."""
        wanted = set(seqs)
        found = wanted & self.queues.unread
        found |= self.orphans.holding(wanted)
        numbers = np.fromiter(sorted(wanted), np.uint64, len(wanted))
        waiting: list[Iterable[FiredRows]] = [self._deferred]
        for queue in self.queues:
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
        queue = self.queues.get(subscription_id)
        return queue is not None and queue.holds(entry)

    # ── subscriptions come and go ──────────────────────────────────────────────────────────────

    def on_subscription(self, subscription: Subscription, now_ms: int) -> None:
        """A subscription was added, changed or removed."""
        if self.queues.permits is not None:
            self.queues.permits.define(subscription)
        queue = self.queues.get(subscription.id)
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
            self.queues.of(subscription).rows.push(fired)
        if (queue := self.queues.get(subscription.id)) is not None:
            self.pump.run(queue, now_ms)

    def _drop_queue(self, queue: Queue) -> None:
        subscription_id = queue.subscription.id
        self.queues.remove(subscription_id)
        self.pump.forget(subscription_id)
        self.pulls.end(subscription_id)
        # Rows on their way may still arrive: until then no subscription may inherit their messages
        # (I4).
        self.orphans.add(queue.reserved)
        for fired in queue.slices():
            self._reassignment.leave(fired, subscription_id)

    def drain(self) -> None:
        """Let nothing leave the queues any more, and answer those who wait."""
        self.queues.draining = True
        for queue in self.queues:
            self.pulls.end(queue.subscription.id)


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
