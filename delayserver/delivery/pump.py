"""The pump: lets rows leave their queues as far as subscribers can take them.

    rows fired, an answer came, a place is free ──▶ run ──▶ expired and outdated rows: given up
                                                     │  ├─▶ webhooks and brokers: `Pushes`
    its time has come (`wake`), another turn (`soon`)┘  └─▶ consumers that wait: `Pulls`

A queue that nothing may leave yet names two moments at which it is looked at again though nothing
else happens: one on the stopwatch, when a rate, a pace or a pause of its receiver lets rows leave,
and one by the clock, when rows will be too old.

Cost: some µs for a queue that nothing may leave. Threads: belongs to the event loop.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from delayserver.delivery.backlog import Instant
from delayserver.delivery.deadlines import EXPIRED
from delayserver.delivery.deliveries import NEVER_MS, Deliveries
from delayserver.delivery.handout import Handout
from delayserver.delivery.looks import Looks
from delayserver.delivery.ports import DispatcherPorts
from delayserver.delivery.pulls import Pulls
from delayserver.delivery.pushes import WEBHOOKS_MAX, Pushes
from delayserver.delivery.queue import Queue
from delayserver.delivery.queues import Queues
from delayserver.delivery.slow_start import LOOK_MS
from delayserver.records.message import ScheduleEntry
from delayserver.records.subscriptions import Registry
from delayserver.schedule.wheel_rows import FiredRows
from delayserver.slices import Slices, TurnBudget
from delayserver.timers.timeouts import Timeouts
from delayserver.times import format_duration

PUMP_ITEMS = 10
"""A queue that is pumped counts for so many items of `slices` if something leaves it."""
REQUESTS_MAX = 32
"""Requests that leave a queue in one go: each takes 0.1 ms."""
HELD_LOOK_MS = 50
"""A queue that nothing may leave now is looked at again after this."""


ANSWER_BYTES_MAX = 16 * 1024 * 1024
"""Payloads that leave a queue together, unless one alone has more."""


class Undelivered(Protocol):
    """Decides about deliveries that no receiver is asked to take."""

    def on_outdated(self, deliveries: Deliveries, reason: str, now_ms: int) -> None:
        """Deliveries are older than their subscription or their messages want: they are not
        attempted."""

    def on_expired(self, deliveries: Deliveries, which: NDArray[np.intp], now_ms: int) -> None:
        """Deliveries have outlived their messages' time to live: they are not attempted. `which`:
        their indexes (shape n)."""


class Pump:
    """Lets rows leave."""

    def __init__(
        self,
        queues: Queues,
        ports: DispatcherPorts,
        slices: Slices,
        registry: Registry,
        timeouts: Timeouts,
        has_not_fired: Callable[[ScheduleEntry], bool],
        undelivered: Callable[[], Undelivered],
        reassign: Callable[[Handout], None],
        *,
        answer_max_bytes: int = ANSWER_BYTES_MAX,
        webhooks_max: int = WEBHOOKS_MAX,
        broker_room: Callable[[int], int] | None = None,
    ) -> None:
        """`reassign`: is given rows that were read and whose subscription is gone; the others as
        `Looks`, `Pushes` and `Pulls` need them."""
        self._queues = queues
        self._ports = ports
        self._slices = slices
        self._undelivered = undelivered
        self.reassign = reassign
        self._answer_max_bytes = answer_max_bytes
        self._to_run: set[int] = set()
        """Subscriptions whose queues are pumped in a turn to come."""
        self._wakes: dict[int, tuple[int, int]] = {}
        """Subscriptions whose rows may leave, or will be too old, though nothing else happens: when
        on the stopwatch, and when by the clock."""
        self._announced_ms = NEVER_MS
        """When the engine knows that it has to call `wake`, on the stopwatch."""
        self.looks = Looks(queues, ports, self, slices, has_not_fired, answer_max_bytes)
        self.pulls = Pulls(queues, ports, self, slices, registry, timeouts, answer_max_bytes)
        self.pushes = Pushes(
            queues,
            ports,
            self,
            slices,
            answer_max_bytes=answer_max_bytes,
            webhooks_max=webhooks_max,
            broker_room=broker_room,
        )

    def run(self, queue: Queue, now_ms: int) -> None:
        """Let rows leave the queue as far as the subscriber can take them."""
        queues, subscription = self._queues, queue.subscription
        queues.now_ms = now_ms
        self._wakes.pop(subscription.id, None)
        if queue.is_idle:
            return  # As behind most answers of a webhook.
        instant = queues.instant()
        is_held = queue.held_until_ms > instant.present_ms
        goes_on_ms = queue.held_until_ms if is_held and not subscription.paused else NEVER_MS
        if queues.draining:
            queue.keep()
        elif subscription.paused or is_held:
            self._stand_still(queue, instant, goes_on_ms)
        elif not queues.may_deliver():
            queue.keep()
            self.look_again(queue, instant)
        else:
            self._let_leave(queue, instant)

    def _stand_still(self, queue: Queue, instant: Instant, goes_on_ms: int) -> None:
        """Nothing is delivered; rows that expire meanwhile are given up."""
        expires_ms = None
        if queue.rows.deadlines is not None and self._queues.may_deliver():
            self._drop_expired(queue, instant.now_ms)
            self.looks.for_deadlines(queue)
            expires_ms = queue.rows.deadlines.next_ms(instant.now_ms)
        elif queue.rows.deadlines is not None:
            self.look_again(queue, instant)
            queue.keep()
            return
        queue.keep()
        if expires_ms is not None or goes_on_ms != NEVER_MS:
            expires_ms = NEVER_MS if expires_ms is None else expires_ms
            self._wake_at(queue.subscription.id, instant, goes_on_ms, expires_ms)

    def _let_leave(self, queue: Queue, instant: Instant) -> None:
        now_ms = instant.now_ms
        deadlines = queue.rows.deadlines
        if deadlines is not None:
            self._drop_expired(queue, now_ms)
        if queue.rows.single_file is not None:
            self.looks.for_groups(queue)
        self._drop_outdated(queue, now_ms)
        # Behind rows that leave, others may have become too old.
        while self._hand_out(queue, instant) and self._drop_outdated(queue, now_ms):
            pass
        if deadlines is not None:
            self.looks.for_deadlines(queue)
            queue.rows.let_go()
        elif queue.is_idle:
            return
        queue.keep()
        wait_ms, outdated_ms = _wait_ms(queue, instant), queue.rows.outdated_ms(now_ms)
        if wait_ms is None and outdated_ms is None:
            return
        leave_ms = NEVER_MS if wait_ms is None else instant.present_ms + wait_ms
        outdated_ms = NEVER_MS if outdated_ms is None else outdated_ms
        self._wake_at(queue.subscription.id, instant, leave_ms, outdated_ms)

    def _hand_out(self, queue: Queue, instant: Instant) -> bool:
        """To the sink, or to consumers that wait; False: no row left."""
        before = queue.count
        if not queue.subscription.is_pushed:
            self.pulls.complete(queue, instant)
            return queue.count != before
        if queue.permit is not None:
            queue.want(instant)
        left = REQUESTS_MAX
        while left > 0 and queue.rows.count:
            if not (count := self.pushes.begin(queue, instant, left)):
                break
            left -= count
        if left <= 0:
            self.soon(queue.subscription.id)
        return queue.count != before

    def _drop_outdated(self, queue: Queue, now_ms: int) -> bool:
        """Give up rows that are too old, a slice at a time; the next when this is recorded."""
        older_than_ms = queue.subscription.drop_older_than_ms
        slices = queue.pop_outdated(self._answer_max_bytes, now_ms) if older_than_ms else []
        if slices:
            limit = format_duration(older_than_ms)
            reason = f"older than {limit} when it could have been delivered"
            self._give_up(queue, slices, reason)
        return bool(slices)

    def _drop_expired(self, queue: Queue, now_ms: int) -> None:
        """Give up waiting rows known to have expired, some at a time, as `_drop_outdated`."""
        slices = queue.pop_expired(self._answer_max_bytes, now_ms)
        if slices:
            self._give_up(queue, slices, EXPIRED)

    def _give_up(self, queue: Queue, slices: list[FiredRows], reason: str) -> None:
        on_read = partial(self._on_given_up, reason)
        self._ports.read(Handout(queue.subscription.id, slices, on_read, queue.attempts))

    def _on_given_up(
        self, reason: str, handout: Handout, deliveries: Deliveries, now_ms: int
    ) -> None:
        queue = self._queues.get(handout.subscription_id)
        if queue is None:
            self.reassign(handout)
            return
        self.lose(queue, handout.unread(deliveries))
        self._undelivered().on_outdated(deliveries, reason, now_ms)
        self.run(queue, now_ms)

    def without_expired(self, deliveries: Deliveries, now_ms: int) -> Deliveries:
        """Give up those of deliveries that have outlived their messages' time to live; returns the
        others."""
        expired = deliveries.expired(now_ms)
        if not len(expired):
            return deliveries
        self._undelivered().on_expired(deliveries, expired, now_ms)
        return deliveries.select(np.delete(np.arange(len(deliveries)), expired))

    def lose(self, queue: Queue, seqs: list[int]) -> None:
        """Rows that left cannot be read, which was reported: no row waits behind them."""
        if seqs:
            present_ms = self._queues.stopwatch()
            for seq in seqs:
                queue.release(seq, present_ms)
            self.go_on(queue, self._queues.lose(queue, seqs))

    def go_on(self, queue: Queue, leaving: list[FiredRows]) -> None:
        """It is the turn of these rows of groups."""
        for fired in leaving:
            queue.rows.admit(fired)
        if leaving:
            self.soon(queue.subscription.id)

    # ── when queues are looked at ──────────────────────────────────────────────────────────────

    def run_in_turn(self, queue: Queue, now_ms: int, budget: TurnBudget) -> None:
        """Pump a queue now, or in a turn to come if the budget is spent."""
        if budget:
            budget.spend(PUMP_ITEMS)
            self.run(queue, now_ms)
        else:
            self.soon(queue.subscription.id)

    def soon(self, subscription_id: int) -> None:
        """Pump a queue in a turn to come, once for all that ask for it."""
        if subscription_id not in self._to_run:
            self._to_run.add(subscription_id)
            self._slices.soon(partial(self.again, subscription_id), PUMP_ITEMS)

    def again(self, subscription_id: int) -> None:
        """Pump the queue of a subscription, if it is still there."""
        self._to_run.discard(subscription_id)
        if (queue := self._queues.get(subscription_id)) is not None:
            self.run(queue, self._queues.now_ms)

    def is_to_run(self, queue: Queue) -> bool:
        """Whether a queue is pumped in a turn to come."""
        return queue.subscription.id in self._to_run

    def wake(self, now_ms: int, budget: TurnBudget | None = None) -> int | None:
        """Let rows leave whose time has come; returns how long until the next may, in ms: 0 if the
        budget does not reach for all of them."""
        budget = budget or TurnBudget()
        stopwatch = self._queues.stopwatch
        present_ms, are_left = stopwatch(), False
        for subscription_id, (leave_ms, outdated_ms) in list(self._wakes.items()):
            if leave_ms > present_ms and outdated_ms > now_ms:
                continue
            if not budget:
                # Those that were pumped stand behind the others in the next turn.
                are_left = True
                break
            budget.spend(PUMP_ITEMS)
            if (queue := self._queues.get(subscription_id)) is not None:
                self.run(queue, now_ms)
        if are_left:
            return 0
        present_ms = stopwatch()
        waits = (min(leave - present_ms, old - now_ms) for leave, old in self._wakes.values())
        wait_ms = min(waits, default=None)
        self._announced_ms = NEVER_MS if wait_ms is None else present_ms + wait_ms
        return wait_ms

    def wakes_ms(self, queue: Queue) -> int:
        """When the queue is looked at again though nothing else happens, on the stopwatch; NEVER_MS
        if that is not planned."""
        return self._wakes.get(queue.subscription.id, (NEVER_MS, NEVER_MS))[0]

    def _wake_at(
        self, subscription_id: int, instant: Instant, leave_ms: int, outdated_ms: int
    ) -> None:
        """Look at a queue again when the stopwatch shows `leave_ms`, or the clock `outdated_ms`."""
        self._wakes[subscription_id] = leave_ms, outdated_ms
        wake_ms = min(leave_ms, instant.present_ms + outdated_ms - instant.now_ms)
        if wake_ms < self._announced_ms:
            self._announced_ms = wake_ms
            self._ports.tick_soon()

    def look_again(self, queue: Queue, instant: Instant) -> None:
        """No row may leave now, and it is unknown when one may again."""
        subscription_id = queue.subscription.id
        leave_ms, outdated_ms = self._wakes.get(subscription_id, (NEVER_MS, NEVER_MS))
        leave_ms = min(leave_ms, instant.present_ms + HELD_LOOK_MS)
        self._wake_at(subscription_id, instant, leave_ms, outdated_ms)

    def forget(self, subscription_id: int) -> None:
        """A subscription is gone."""
        self._wakes.pop(subscription_id, None)


def _wait_ms(queue: Queue, instant: Instant) -> int | None:
    """How long until rows of a queue may leave though nothing else happens; None: never."""
    wait_ms = queue.rows.wait_ms(instant)
    if queue.starts_slowly(instant):
        return LOOK_MS if wait_ms is None else min(wait_ms, LOOK_MS)
    return wait_ms
