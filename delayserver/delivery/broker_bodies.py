"""Bodies on their way to brokers: their bytes in memory, and the part that each may have.

    queue ── room? ──▶ read (take) ──▶ given to a sink (take) ──▶ told of (give_back)

A broker that hangs must not fill the memory with bodies that lie on the disk anyway. So a queue
lets rows leave for a broker only as far as its subscription has room. Rows without room stay there:
they can be cancelled, expire, and be paused.

All subscriptions have `max_bytes` together, the setting `broker_bodies_max_bytes`. One may have as
many bytes as are free beside its own, as in `delayserver.delivery.shares`: half of them if it is
alone, and one more always finds room. One message of each subscription may leave whatever others
have.

Cost: 0.2 µs for each message. Threads: belongs to the event loop.
"""

from collections import Counter


class BrokerBodies:
    """The bytes of all subscriptions of a process that go to brokers."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.under_way_bytes = 0
        self._by_subscription: Counter[int] = Counter()
        """By subscription id; none is 0."""

    def room(self, subscription_id: int) -> int:
        """How many bytes may leave its queue now, where one message always fits; 0: none."""
        own_bytes = self._by_subscription.get(subscription_id, 0)
        room_bytes = self.max_bytes - self.under_way_bytes - own_bytes
        return max(room_bytes, 0 if own_bytes else 1)

    def take(self, subscription_id: int, count_bytes: int) -> None:
        """So many bytes are in memory."""
        if count_bytes:
            self.under_way_bytes += count_bytes
            self._by_subscription[subscription_id] += count_bytes

    def give_back(self, subscription_id: int, count_bytes: int) -> None:
        """So many bytes are not in memory any more."""
        if not count_bytes:
            return
        left_bytes = self._by_subscription[subscription_id] - count_bytes
        assert left_bytes >= 0, (subscription_id, left_bytes)
        self.under_way_bytes -= count_bytes
        if left_bytes:
            self._by_subscription[subscription_id] = left_bytes
        else:
            del self._by_subscription[subscription_id]
