"""Queues: one for each subscription that has had a row, and the state that all of them share.

    subscription ──▶ of ──▶ its Queue, made at first use
                     now_ms, stopwatch: the time of the last call, and lengths of time
                     may_leave: draining, a pause, a lost lease, a receiver that wants to wait

Cost: O(1) per call. Threads: belongs to the event loop.
"""

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from delayserver.delivery.backlog import Backlog, Instant
from delayserver.delivery.deliveries import Deliveries
from delayserver.delivery.permits import Permit, Permits
from delayserver.delivery.queue import Queue
from delayserver.records.direct import is_direct
from delayserver.records.subscriptions import Subscription
from delayserver.schedule.wheel_rows import FiredRows


class Queues:
    """All queues."""

    def __init__(
        self,
        stopwatch: Callable[[], int],
        started_ms: int = 0,
        may_deliver: Callable[[], bool] = lambda: True,
    ) -> None:
        """`may_deliver`: whether anything may leave now; where others could take over, only under a
        lease."""
        self.stopwatch = stopwatch
        self.started_ms = started_ms
        self.now_ms = started_ms
        """The time of the last call that came with a time."""
        self.may_deliver = may_deliver
        self.draining = False
        """Nothing leaves the queues any more: the server is stopping."""
        self.permits: Permits | None = None
        """Where several shards count together; set before anything fires."""
        self.unread: set[int] = set()
        """Rows that could not be read when they were due. They stay unsettled, and their hours are
        kept: a repair, or a start at which they can be read, has them delivered (I8)."""
        self._by_id: dict[int, Queue] = {}
        self._expected: dict[int, list[FiredRows]] = {}
        """Retries that an earlier process has recorded of messages with groups, by subscription,
        where that has no queue yet."""

    def of(self, subscription: Subscription) -> Queue:
        """The queue of a subscription; made at first use."""
        queue = self._by_id.get(subscription.id)
        if queue is None:
            queue = self._by_id[subscription.id] = self._new_queue(subscription)
        return queue

    def _new_queue(self, subscription: Subscription) -> Queue:
        def used_places() -> int:
            return queue.used_places()

        permit: Permit | None = None
        is_shared = subscription.is_pushed and not is_direct(subscription.id)
        if self.permits is not None and is_shared:
            permit = self.permits.of(subscription, used_places)
        behind_ms = max(self.started_ms, subscription.created_ms)
        backlog = Backlog(subscription, behind_ms, permit)
        queue = Queue(subscription, backlog, permit=permit)
        for fired in self._expected.pop(subscription.id, []):
            backlog.in_single_file().expect(fired)
        return queue

    def get(self, subscription_id: int) -> Queue | None:
        """The queue of a subscription; None: it has none, or is gone."""
        return self._by_id.get(subscription_id)

    def remove(self, subscription_id: int) -> None:
        """A subscription is gone."""
        del self._by_id[subscription_id]

    def __iter__(self) -> Iterator[Queue]:
        return iter(self._by_id.values())

    def instant(self) -> Instant:
        """The time, by the clock and by the stopwatch."""
        return Instant(self.now_ms, self.stopwatch())

    def may_leave(self, queue: Queue, subscription: Subscription) -> bool:
        """Whether anything may be delivered now, as far as the subscription decides. A row that was
        read, or waits for a connection, was taken for `subscription`, which may have changed
        since."""
        is_changed = queue.subscription is not subscription and subscription.is_pushed
        is_still = self.draining or queue.subscription.paused or is_changed
        if is_still or not self.may_deliver():
            return False
        # Few queues were ever held, and never for a consumer: no others need the stopwatch.
        return not (
            subscription.is_pushed
            and queue.held_until_ms
            and queue.held_until_ms > self.stopwatch()
        )

    def expect(self, subscription_id: int, fired: FiredRows) -> None:
        """Rows are still to come that are for one subscription, and may have a group: those that
        are retries hold up the rest of it."""
        queue = self._by_id.get(subscription_id)
        if queue is not None:
            queue.rows.in_single_file().expect(fired)
        else:
            self._expected.setdefault(subscription_id, []).append(fired)

    def lose(self, queue: Queue, seqs: Iterable[int]) -> list[FiredRows]:
        """Rows cannot be read, which was reported: no row waits behind them. Returns those whose
        turn it is now."""
        self.unread.update(seqs)
        single_file = queue.rows.single_file
        return [] if single_file is None else single_file.lose(seqs)

    def put_back(self, queue: Queue, deliveries: Deliveries) -> None:
        """Deliveries that were not sent wait again, at their places."""
        if not len(deliveries):
            return
        present_ms = self.stopwatch()
        for seq in deliveries.settled["seq"].tolist():
            queue.release(seq, present_ms)
        for fired in deliveries.slices(np.arange(len(deliveries))):
            queue.rows.put_back(fired)
