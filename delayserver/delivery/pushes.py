"""Pushes: rows of webhooks and brokers, from their queue to the sink.

    begin ──▶ places, a rate, connections ──▶ rows leave ──▶ read ──▶ sent ──▶ may_begin? ──▶ out
                                                              │                   │
                    queue ◀── at their places ── may not leave any more ◀─────────┘
    end_request ──▶ the connection is free, and another request may leave

A row is checked twice: when it leaves its queue, and when the first byte of its request is about to
leave (`may_begin`), since it may have waited for a connection in between. A row that may not begin
goes back to its place in the queue, and there the queue decides about it.

Cost: 2 µs for a request besides its reading and sending. Threads: belongs to the event loop.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Final
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from delayserver.delivery.backlog import Instant
from delayserver.delivery.connections import Connections
from delayserver.delivery.deliveries import Deliveries
from delayserver.delivery.handout import READ_ROWS_MAX, Handout
from delayserver.delivery.ports import DispatcherPorts, Pumping
from delayserver.delivery.queue import Queue
from delayserver.delivery.queues import Queues
from delayserver.records.direct import is_direct
from delayserver.records.message import DueDelivery
from delayserver.records.subscriptions import Subscription
from delayserver.slices import Slices

BATCH_BYTES_MAX = 4 * 1024 * 1024
"""Payloads of the messages in one request, unless one alone has more."""
WEBHOOKS_MAX = 1024
"""Requests to receivers that are out at once."""
HOSTS_REMEMBERED = 4096
SERVE_ITEMS: Final = 10
"""Giving connections to queues that wait, which are pumped then, counts for so many items."""


class Pushes:
    """Has rows sent."""

    def __init__(
        self,
        queues: Queues,
        ports: DispatcherPorts,
        pump: Pumping,
        slices: Slices,
        *,
        answer_max_bytes: int,
        webhooks_max: int = WEBHOOKS_MAX,
        broker_room: Callable[[int], int] | None = None,
    ) -> None:
        """`broker_room`: how many bytes may leave the queue of a subscription for its broker; 0:
        nothing."""
        self._queues = queues
        self._ports = ports
        self._pump = pump
        self._answer_max_bytes = answer_max_bytes
        self._broker_room = broker_room or (lambda subscription_id: answer_max_bytes)
        self.connections = Connections(
            webhooks_max, lambda serve: slices.soon(serve, SERVE_ITEMS), pump.again
        )
        """The connections of webhooks."""

    # ── rows leave ─────────────────────────────────────────────────────────────────────────────

    def begin(self, queue: Queue, instant: Instant, requests_max: int) -> int:
        """Have rows sent as far as there are connections for them, in up to so many requests.
        Returns how many there are; 0: no row may leave."""
        subscription = queue.subscription
        rows_max = min(queue.free_places(), READ_ROWS_MAX)
        if rows_max <= 0:
            return 0
        if subscription.takes_many:
            room = self._broker_room(subscription.id)
            return min(1, self._leave(queue, rows_max, room, instant)) if room else 0
        ready = queue.rows.ready(instant)
        room = queue.slow_start.room(instant.present_ms)
        if not ready or not room:
            return 0
        wanted = 1 if subscription.batch_max else min(rows_max, ready, requests_max, room)
        taken = self.connections.take(subscription.id, host_of(subscription), wanted)
        if not taken:
            return 0
        if not subscription.batch_max:
            rows_max = taken
        queue.slow_start.begin(taken)
        bytes_max = BATCH_BYTES_MAX if subscription.batch_max else self._answer_max_bytes
        used = min(taken, self._leave(queue, rows_max, bytes_max, instant, taken))
        if used < taken:
            self._give_back(queue, taken - used)
        return used

    def _leave(
        self, queue: Queue, rows_max: int, bytes_max: int, instant: Instant, connections: int = 0
    ) -> int:
        """Rows leave the queue, and are read; returns how many. `connections`: those that were
        taken for them; one is kept for each request."""
        subscription = queue.subscription
        slices = queue.pop(rows_max, min(bytes_max, self._answer_max_bytes), instant)
        if not slices:
            return 0
        count = sum(len(fired.rows) for fired in slices)
        on_read = partial(self._on_read, subscription, min(connections, count))
        handout = Handout(subscription.id, slices, on_read, queue.attempts, is_to_leave=True)
        if subscription.takes_many:
            handout.broker_bytes = handout.total_bytes
        if subscription.batch_max:
            queue.posts.add(handout.first_seq)
        else:
            queue.is_reading = True
        self._ports.read(handout)
        return count

    def _give_back(self, queue: Queue, count: int) -> None:
        """So many connections were taken for requests that do not leave."""
        self.connections.give_back(queue.subscription.id, count)
        queue.slow_start.on_answered(count)

    # ── rows were read ─────────────────────────────────────────────────────────────────────────

    def _on_read(
        self,
        subscription: Subscription,
        connections: int,
        handout: Handout,
        deliveries: Deliveries,
        now_ms: int,
    ) -> None:
        queue = self._queues.get(handout.subscription_id)
        if queue is None:
            self._pump.reassign(handout)
            self.connections.give_back(handout.subscription_id, connections)
            return
        self._pump.lose(queue, handout.unread(deliveries))
        queue.posts.discard(handout.first_seq)
        if not subscription.batch_max:
            queue.is_reading = False
        requests = 0
        if not self._queues.may_leave(queue, subscription):
            self._queues.put_back(queue, deliveries)
        else:
            deliveries = self._pump.without_expired(deliveries, now_ms)
            if subscription.batch_max:
                requests, connections = self._send_batches(queue, deliveries, connections)
            else:
                requests = self._send(queue.subscription, deliveries)
        if connections > requests and not subscription.takes_many:
            self._give_back(queue, connections - requests)
        if not (requests and subscription.batch_max):
            self._pump.run(queue, now_ms)  # There is no answer that will do it.

    def _send(self, subscription: Subscription, deliveries: Deliveries) -> int:
        """Returns how many requests are sent; to a broker all go together."""
        if subscription.takes_many:
            if deliveries:
                self._ports.send(subscription, list(deliveries))
            return 0
        for delivery in deliveries:
            self._ports.send(subscription, [delivery])
        return len(deliveries)

    def _send_batches(
        self, queue: Queue, deliveries: Deliveries, connections: int
    ) -> tuple[int, int]:
        """Send the messages that were read for one request: in one request, unless some of them
        have failed together before. Deliveries that find no connection wait again. Returns how many
        requests are sent, and how many connections were taken for them."""
        subscription, requests = queue.subscription, 0
        for which in _apart(queue, deliveries.settled["attempt"]):
            if requests:
                if not self._takes_one_more(queue):
                    self._queues.put_back(queue, deliveries.select(which))
                    continue
                connections += 1
            requests += 1
            batch = [deliveries[index] for index in which.tolist()]
            queue.posts.add(batch[0].entry.seq)
            self._ports.send(subscription, batch)
        return requests, connections

    def _takes_one_more(self, queue: Queue) -> bool:
        """Whether there is a connection for one more request; it is taken."""
        subscription = queue.subscription
        has_room = queue.slow_start.room(self._queues.stopwatch()) > 0
        if not (has_room and queue.free_places() > 0):
            return False
        if not self.connections.take(subscription.id, host_of(subscription), 1):
            return False
        queue.slow_start.begin(1)
        return True

    # ── requests begin and end ─────────────────────────────────────────────────────────────────

    def may_begin(
        self, subscription: Subscription, deliveries: Sequence[DueDelivery], now_ms: int
    ) -> bool:
        """Whether deliveries that were sent (`DispatcherPorts.send`) may begin: asked when the
        first byte is about to leave. If so they have begun, and count against the rate.

        Otherwise the sink answers `Untried`: they go back to their queue, and leave again as the
        subscription says now, or are dead letters. A pause, a deletion, another URL, a time to live
        and a lost lease hold from then on, however long a request waits for a connection."""
        queue = self._queues.get(subscription.id)
        if queue is None or not self._queues.may_leave(queue, subscription):
            return False
        for delivery in deliveries:
            expires_ms = delivery.payload.expires_ms(delivery.origin.due_ms)
            if expires_ms is not None and expires_ms <= now_ms:
                return False
        queue.begin([delivery.entry.seq for delivery in deliveries], self._queues.stopwatch())
        if subscription.rate_per_s and queue.count:
            self._pump.soon(subscription.id)  # Others may leave, as soon as the rate allows it.
        return True

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
            until_ms = self._queues.stopwatch() + hold_ms
            queue.held_until_ms = max(queue.held_until_ms, until_ms)


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
