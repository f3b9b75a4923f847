"""Connections: how many webhooks are on their way at once, and whose turn is next.

    queue ── take ──▶ connections, at most its share ──▶ rows leave, are read, sent ── give_back ──▶
                 └──▶ none: the queue waits in line, its rows stay in it ◀── on_free ──┘

A queue takes the right to use one of `--webhook-connections-max` connections before a row leaves
it; these rights are counted here. Until then the row waits in the queue, where it can expire and
where a pause or another URL is heeded.

No queue gets all of them, even while no other wants one: a queue, and all queues of one host
together, may hold at most SHARE times as many as are left free (the dynamic threshold of Choudhury
and Hahne, IEEE/ACM Trans. Networking 6(2), 1998). With 1,024 connections one queue whose receiver
hangs gets 911 and leaves 113 free; sixteen such queues get 64 each, or a few less, and leave 7. So
a healthy queue, which needs a connection for milliseconds, finds one. Where the last one is taken
nevertheless, the queues that wait are served in the order in which they came, and each gets its
part of the free ones. With FEW connections or less none is kept back.

Rejected: a fixed part for each queue, which a single busy one could not exceed; and to take one
after the row has left, since a row that waits then has passed all checks already.

Cost: 1 µs for each take and give_back. At most LOOKS_MAX queues are served in one turn of the event
loop. Threads: belongs to the event loop.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Final

SHARE: Final = 8
"""A queue or host holds at most so many times the connections that are free."""
FEW: Final = 32
"""So many connections are too few to keep some back."""
LOOKS_MAX: Final = 16
"""Queues that are served in one turn of the event loop."""


class Connections:
    """A number of connections; each is taken for one queue at a time."""

    def __init__(
        self,
        count: int,
        call_soon: Callable[[Callable[[], None]], None],
        on_free: Callable[[int], None],
    ) -> None:
        """`on_free`: called with the owner of a queue that waits, when it may take connections."""
        assert count > 0, count
        self.count = count
        self._free = count
        self._call_soon = call_soon
        self._on_free = on_free
        self._taken: Counter[int] = Counter()
        """By owner."""
        self._taken_at: Counter[str] = Counter()
        """By host."""
        self._hosts: dict[int, str] = {}
        """The host of each owner that has connections."""
        self._line: OrderedDict[int, None] = OrderedDict()
        """Owners that found none free."""
        self._over: OrderedDict[int, str] = OrderedDict()
        """Owners that have their share, and want more; each with its host."""
        self._looks = 0
        """How many of these may find a larger share than when they were looked at."""
        self._serving: int | None = None
        self._is_asked = False

    @property
    def free(self) -> int:
        """How many are free."""
        return self._free

    @property
    def waiting(self) -> int:
        """How many owners wait since no connection is free. One that has its share is not among
        them: others find connections."""
        return len(self._line)

    def taken(self, owner: int) -> int:
        """How many an owner has."""
        return self._taken[owner]

    def take(self, owner: int, host: str, wanted: int) -> int:
        """Take up to `wanted` connections for requests to `host`; returns how many. If there are
        fewer, the owner waits, and `on_free` is called."""
        assert wanted > 0, wanted
        if self._line and self._serving != owner:
            self._line.setdefault(owner)
            return 0
        if self._hosts.get(owner, host) != host:
            self._move(owner, host)
        share = self._share(owner, host)
        turn = 1 + self._free // (len(self._line) + 1) if self._line else self._free
        count = min(wanted, share, turn, self._free)
        if count:
            self._free -= count
            self._taken[owner] += count
            self._taken_at[host] += count
            self._hosts[owner] = host
        if count < wanted:
            if share > count or not self._free:
                self._line.setdefault(owner)
                self._serve_soon()
            else:
                self._over.setdefault(owner, host)
        return count

    def _share(self, owner: int, host: str) -> int:
        """How many more an owner may take: the most that leave SHARE times the free ones not
        exceeded before the last of them is taken."""
        if self.count <= FEW:
            return self._free
        taken = max(self._taken[owner], self._taken_at[host])
        return max(0, (SHARE * (self._free + 1) - taken) // (SHARE + 1))

    def _move(self, owner: int, host: str) -> None:
        """An owner sends to another host from now on; its requests that are out count there."""
        before, count = self._hosts[owner], self._taken[owner]
        self._lessen(before, count)
        self._taken_at[host] += count
        self._hosts[owner] = host

    def give_back(self, owner: int, count: int = 1) -> None:
        """Connections of an owner are free again."""
        if not count:
            return
        assert 0 < count <= self._taken[owner], (owner, count, self._taken[owner])
        self._free += count
        self._lessen(self._hosts[owner], count)
        self._taken[owner] -= count
        if not self._taken[owner]:
            del self._taken[owner], self._hosts[owner]

    def _lessen(self, host: str, count: int) -> None:
        self._taken_at[host] -= count
        if not self._taken_at[host]:
            del self._taken_at[host]
        self._looks = len(self._over)
        if self._line or self._looks:
            self._serve_soon()

    def _serve_soon(self) -> None:
        if self._free and (self._line or self._looks) and not self._is_asked:
            self._is_asked = True
            self._call_soon(self._serve)

    def _serve(self) -> None:
        """Let waiting queues take the free connections, some in this turn of the event loop."""
        self._is_asked = False
        for _ in range(min(LOOKS_MAX, len(self._line))):
            if not self._free:
                return
            owner, _ = self._line.popitem(last=False)
            self._pump(owner)
        if self._line:
            self._serve_soon()
            return
        for _ in range(min(LOOKS_MAX, self._looks)):
            self._looks -= 1
            owner, host = self._over.popitem(last=False)
            if self._share(owner, host):
                self._pump(owner)
            else:
                self._over[owner] = host
        self._serve_soon()

    def _pump(self, owner: int) -> None:
        self._serving = owner
        try:
            self._on_free(owner)
        finally:
            self._serving = None
