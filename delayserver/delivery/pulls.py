"""Pulls: rows that consumers ask for, from their queue to a lease.

    request ──▶ waits (`DelayedFetch`) ──▶ enough are ready ──▶ rows leave ──▶ read ──▶ leased
                                       └─▶ its time is up ──▶ the rows that there are, or nothing
    read, and the consumer may not have that subject ──▶ laid by, for one that may

Cost: 10 µs for a pull besides its reading. Threads: belongs to the event loop.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from delayserver.delivery.backlog import Instant
from delayserver.delivery.delayed_fetch import DelayedFetch, Fetches, Pulled, PullRequest
from delayserver.delivery.deliveries import Deliveries
from delayserver.delivery.handout import Handout
from delayserver.delivery.ports import DispatcherPorts, Pumping
from delayserver.delivery.queue import Queue
from delayserver.delivery.queues import Queues
from delayserver.records.subscriptions import Registry, Subscription
from delayserver.slices import Slices
from delayserver.timers.timeouts import Timeouts
from storage.rows import select

COMPLETE_ITEMS = 200
"""A consumer that is answered in a turn to come counts for so many items of `slices`."""


class Pulls:
    """Has rows leased."""

    def __init__(
        self,
        queues: Queues,
        ports: DispatcherPorts,
        pump: Pumping,
        slices: Slices,
        registry: Registry,
        timeouts: Timeouts,
        answer_max_bytes: int,
    ) -> None:
        self._queues = queues
        self._ports = ports
        self._pump = pump
        self._slices = slices
        self._registry = registry
        self._answer_max_bytes = answer_max_bytes
        self.fetches = Fetches(timeouts)
        """Consumers that wait."""
        self.on_ready: Callable[[int], None] | None = None
        """Where there are other shards: told of a pull subscription of which other rows may leave
        than before, perhaps."""

    def request(self, queue: Queue, request: PullRequest) -> DelayedFetch:
        """Let a consumer wait: it is answered when enough messages are due, or its time is up."""
        request.until_ms = self._queues.stopwatch() + request.wait_ms
        return self._wait(queue, request)

    def _wait(self, queue: Queue, request: PullRequest) -> DelayedFetch:
        def ready() -> bool:
            return self._ready(queue, request) >= request.min_messages

        def complete(fetch: DelayedFetch) -> None:
            if not request.is_gone and not self._begin(queue, request):
                request.finish(Pulled())

        return self.fetches.add(queue.subscription.id, request, ready, complete)

    def _wait_on(self, queue: Queue, request: PullRequest) -> None:
        """The consumer may have none of the messages that were read: let it wait for the rest of
        its time."""
        request.wait_ms = max(0, request.until_ms - self._queues.stopwatch())
        fetch = self._wait(queue, request)
        if not fetch.is_completed:
            request.again = fetch
            self._ports.tick_soon()

    def complete(self, queue: Queue, instant: Instant) -> None:
        """Answer consumers that wait, as far as there are rows for them."""
        subscription_id = queue.subscription.id
        while (ready := queue.rows.ready(instant)) and (
            fetch := self.fetches.oldest(subscription_id, ready)
        ):
            fetch.force_complete()
        if self.on_ready is not None:
            self.on_ready(subscription_id)

    def end(self, subscription_id: int) -> None:
        """Answer all that wait: the subscription is gone, or the server stops."""
        for fetch in self.fetches.waiting(subscription_id):
            fetch.force_complete()

    def ready(self, subscription_id: int) -> int | None:
        """How many rows may leave; None: none will any more, since the subscription is gone, or the
        server stops."""
        subscription = self._registry.by_id(subscription_id)
        if subscription is None or self._queues.draining:
            return None
        queue = self._queues.of(subscription)
        withheld = 0 if subscription.paused else queue.count - queue.rows.count
        return self._ready(queue) + withheld

    def _ready(self, queue: Queue, request: PullRequest | None = None) -> int:
        """How many rows may leave the queue, for a consumer."""
        if request is not None and queue.withheld:
            queue.admit(request.may_read)
        is_there = self._queues.get(queue.subscription.id) is queue
        if not is_there or queue.subscription.paused or self._queues.draining:
            return 0
        instant = self._queues.instant()
        if not self._queues.may_deliver():
            self._pump.look_again(queue, instant)  # The caller will wait for it.
            return 0
        return queue.rows.ready(instant)

    def _begin(self, queue: Queue, request: PullRequest) -> bool:
        """Rows leave the queue for a consumer, and are read; False: there are none."""
        if not self._ready(queue, request):
            return False
        bytes_max = self._answer_max_bytes
        if request.max_bytes:
            bytes_max = min(bytes_max, request.max_bytes)
        slices = queue.pop(request.max_messages, bytes_max, self._queues.instant())
        if not slices:
            return False
        on_read = partial(self._on_read, queue.subscription, request)
        self._ports.read(
            Handout(queue.subscription.id, slices, on_read, queue.attempts, is_to_leave=True)
        )
        return True

    def _on_read(
        self,
        subscription: Subscription,
        request: PullRequest,
        handout: Handout,
        deliveries: Deliveries,
        now_ms: int,
    ) -> None:
        queue = self._queues.get(handout.subscription_id)
        if queue is None:
            if not request.is_gone:
                request.finish(Pulled())
            self._pump.reassign(handout)
            return
        self._pump.lose(queue, handout.unread(deliveries))
        if not self._queues.may_leave(queue, subscription):
            self._queues.put_back(queue, deliveries)
            if self._queues.draining and not request.is_gone:
                request.finish(Pulled())
            elif not request.is_gone:
                self._wait_on(queue, request)
            return
        deliveries = self._pump.without_expired(deliveries, now_ms)
        if request.subjects and len(deliveries):
            deliveries = self._withhold(queue, request, deliveries)
        if len(deliveries) or request.is_gone:
            self._ports.hand_out(queue.subscription, request, deliveries)
        else:
            self._wait_on(queue, request)

    def _withhold(self, queue: Queue, request: PullRequest, deliveries: Deliveries) -> Deliveries:
        """Lay by messages that a consumer may not read, for one that may, and return the rest."""
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
                self._slices.soon(partial(_complete, other), COMPLETE_ITEMS)
        return deliveries.select(np.flatnonzero(mine))


def _complete(fetch: DelayedFetch) -> None:
    fetch.force_complete()
