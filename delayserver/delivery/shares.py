"""Shares: how much of an outlet each subscription may have under way, and whose turn is next.

    add ──▶ a line for each subscription ── take: in turn, within its share ──▶ under way
                                                                     give_back ◀──┘

An outlet has a window of bytes. A subscription may fill it as far as its own bytes are no more than
the bytes that are still free (Choudhury and Hahne, "Dynamic queue length thresholds"): one alone
gets half of it, and `n` that hang leave 1/(n+1) for the next one. One message of each subscription
may always be under way, whatever its length and whatever others do. So a topic that takes nothing
fills its own share, and a message for another topic leaves at once.

Example, with a window of 8 MiB: "bad" hangs with 4 MiB under way, and 4 MiB are free. "good" may
have 2 MiB under way beside it.

Each message counts its body and OVERHEAD_BYTES, so the window bounds the number of short messages,
too. In a turn a subscription sends TURN_BYTES, or one longer message: a short message waits behind
one turn of each other subscription, never behind a whole backlog.

Rejected: equal parts for all, of which each is tiny where a thousand subscriptions share a broker
and one is busy.

Cost: 1 µs for a message; O(subscriptions that wait) where all of them have used up their shares.
Threads: belongs to the event loop.
"""

from collections import Counter, OrderedDict, deque
from typing import Final, Generic, TypeVar

OVERHEAD_BYTES: Final = 1024
"""For headers, and the memory that clients use for each message."""
TURN_BYTES: Final = 128 * 1024

T = TypeVar("T")


class Shares(Generic[T]):
    """The window of one outlet."""

    def __init__(self, window_bytes: int) -> None:
        self._window_bytes = window_bytes
        self._lines: OrderedDict[int, deque[tuple[int, T]]] = OrderedDict()
        """By subscription id, none empty; the first is the next to be asked."""
        self._under_way: Counter[int] = Counter()
        """Bytes by subscription id; none is 0."""
        self.used_bytes = 0
        """Bytes that are under way, of all subscriptions together."""

    @property
    def waiting(self) -> int:
        """How many wait."""
        return sum(map(len, self._lines.values()))

    def __bool__(self) -> bool:
        """Whether any waits."""
        return bool(self._lines)

    def add(self, subscription_id: int, body_bytes: int, item: T) -> None:
        """It waits behind the others of its subscription."""
        line = self._lines.get(subscription_id)
        if line is None:
            line = self._lines[subscription_id] = deque()
        line.append((body_bytes + OVERHEAD_BYTES, item))

    def take(self) -> list[T]:
        """Some of one subscription that may be sent now, in order; none: nothing may."""
        for subscription_id in list(self._lines):
            line = self._lines[subscription_id]
            self._lines.move_to_end(subscription_id)
            taken = self._take_from(subscription_id, line)
            if not line:
                del self._lines[subscription_id]
            if taken:
                return taken
        return []

    def _take_from(self, subscription_id: int, line: deque[tuple[int, T]]) -> list[T]:
        taken: list[T] = []
        own_bytes, turn_bytes = self._under_way[subscription_id], 0
        while line:
            size_bytes = line[0][0]
            free_bytes = self._window_bytes - self.used_bytes
            if own_bytes and own_bytes + size_bytes > free_bytes:
                break
            if turn_bytes and turn_bytes + size_bytes > TURN_BYTES:
                break
            taken.append(line.popleft()[1])
            own_bytes += size_bytes
            turn_bytes += size_bytes
            self.used_bytes += size_bytes
        if own_bytes:
            self._under_way[subscription_id] = own_bytes
        else:
            del self._under_way[subscription_id]
        return taken

    def give_back(self, subscription_id: int, body_bytes: int) -> None:
        """A message that was taken is not under way any more."""
        size_bytes = body_bytes + OVERHEAD_BYTES
        left_bytes = self._under_way[subscription_id] - size_bytes
        assert left_bytes >= 0, (subscription_id, left_bytes)
        self.used_bytes -= size_bytes
        if left_bytes:
            self._under_way[subscription_id] = left_bytes
        else:
            del self._under_way[subscription_id]

    def remove(self, subscription_id: int) -> list[T]:
        """All of a subscription that waits."""
        return [item for _, item in self._lines.pop(subscription_id, ())]

    def clear(self) -> list[T]:
        """All that waits."""
        waiting = [item for line in self._lines.values() for _, item in line]
        self._lines.clear()
        return waiting
