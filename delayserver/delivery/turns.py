"""Turns: a few places that subscriptions share, and whose turn is next.

    take(subscription) ──► a place is free ──────────────────────────► sends ──► give_back
                       └─► waits; of those who wait, the subscription with the fewest places is next

A place is an outlet on which messages go apart (`outlets.APART_MAX`), or a producer of transactions
(`transactions.SLOTS`). A subscription whose broker takes its time fills the places that no other
one wants: as soon as another subscription has something to send, it gets the next place that is
given back. If many subscriptions wait, the first CANDIDATES are compared; the others come
nearer with each turn.

Cost: 1 µs for a turn that need not be waited for. Threads: belongs to the event loop.
"""

import asyncio
from collections import Counter, OrderedDict, deque
from itertools import islice

CANDIDATES = 8


class Turns:
    """So many places; each is taken for one subscription at a time."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._taken: Counter[int] = Counter()
        self._waiting: OrderedDict[int, deque[asyncio.Future[None]]] = OrderedDict()
        """By subscription; no caller waits as long as a place is free."""

    @property
    def waiting(self) -> int:
        """How many wait for their turn."""
        return sum(map(len, self._waiting.values()))

    async def take(self, subscription_id: int) -> None:
        """Wait for a place. A cancelled caller has none."""
        if not self._free:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(subscription_id, deque()).append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self.give_back(subscription_id)  # it came at the same moment
                raise
            return
        self._free -= 1
        self._taken[subscription_id] += 1

    def give_back(self, subscription_id: int) -> None:
        """Give the place to the next caller."""
        self._taken[subscription_id] -= 1
        if not self._taken[subscription_id]:
            del self._taken[subscription_id]
        while self._waiting:
            turn = self._next()
            if not turn.cancelled():
                turn.set_result(None)
                return
        self._free += 1

    def _next(self) -> "asyncio.Future[None]":
        chosen = min(islice(self._waiting, CANDIDATES), key=self._taken.__getitem__)
        turns = self._waiting[chosen]
        turn = turns.popleft()
        if turns:
            self._waiting.move_to_end(chosen)
        else:
            del self._waiting[chosen]
        if not turn.cancelled():
            self._taken[chosen] += 1
        return turn
