"""The timing wheel with rounds: every timer in the one wheel, whatever its delay.

Source: Varghese and Lauck 1987, scheme 6 (unsorted lists), as Netty's HashedWheelTimer has it.

Algorithm
    The timer of tick *t* hangs in bucket ``t % slot_count`` together with those of other
    revolutions, and carries the number of rounds that the wheel must still make before it is due.
    A tick goes through its whole bucket: a timer with no rounds left fires, any other has one
    taken off.

    ``add`` only puts the timer into a pending queue, and each tick moves at most
    ``transfer_limit`` of them (100,000) into the wheel before it looks at its bucket. So ``add``
    touches nothing but one end of a queue, and a flood of adds cannot make one tick arbitrarily
    long. A timer that was in the queue for longer than its delay goes into the bucket of the tick
    that found it: it is then late, never early. Only in this case does this design not fire at the
    first tick, and it takes more than ``transfer_limit`` adds for each tick.

    Netty also queues cancellations, because they come from other threads. Here the owner cancels,
    so the timer is unlinked at once, from the queue or from its bucket.

Cost
    add O(1), cancel O(1). A tick costs O(n / slot_count), since it looks at timers of later rounds
    too: good while n is not much larger than the wheel, or while most timers are cancelled before
    they are due. Empty ticks are walked one by one. The defaults are Netty's: 512 buckets of
    100 ms, since a coarse tick is what keeps that walk cheap.

Threads
    One owner; see ``interface``.

Example: ``HashedWheelTimer(start_ms=0, tick_ms=1, slot_count=4)``, buckets with (rounds)
    ====================  =========  =====================  =======================
    call                  pending    buckets 0 1 2 3        fires
    ====================  =========  =====================  =======================
    add a, 2; add b, 6    [a b]      [] [] [] []
    advance_clock(1)      []         [] [] [a(0) b(1)] []
    advance_clock(2)      []         [] [] [b(0)] []        a
    add c, 1 (due 3)      [c]        [] [] [b(0)] []
    advance_clock(5)      []         [] [] [b(0)] []        c, at tick 3
    advance_clock(6)      []         [] [] [] []            b
    ====================  =========  =====================  =======================
"""

from __future__ import annotations

from collections.abc import Iterable

from delayserver.timers.chain import Chain, ChainEntry
from delayserver.timers.interface import ErrorHandler
from delayserver.timers.wheel import WheelTimer


class Timeout(ChainEntry):
    """An entry that counts its rounds; ``rounds`` is set when it leaves the pending queue."""

    __slots__ = ("rounds",)

    rounds: int


class HashedWheelTimer(WheelTimer[Timeout]):
    """One wheel, rounds and a pending queue. The module's docstring has the algorithm."""

    __slots__ = ("_buckets", "_pending", "_transfer_limit")

    def __init__(
        self,
        start_ms: int,
        tick_ms: int = 100,
        slot_count: int = 512,
        on_error: ErrorHandler | None = None,
        *,
        transfer_limit: int = 100_000,
    ) -> None:
        if transfer_limit < 1:
            raise ValueError(f"a tick must transfer something, not {transfer_limit=}")
        super().__init__(start_ms, tick_ms, slot_count, on_error, Timeout)
        self._buckets: list[Chain[Timeout]] = [Chain() for _ in range(slot_count)]
        self._pending: Chain[Timeout] = Chain()
        self._transfer_limit = transfer_limit

    def _place(self, entry: Timeout) -> None:
        self._pending.append(entry)

    def _turn(self, tick: int) -> None:
        if self._waiting:
            for passing in range(self._tick + 1, tick + 1):
                self._transfer(passing)
                self._expire_bucket(passing)
        self._tick = tick

    def _transfer(self, tick: int) -> None:
        """Move timers from the pending queue into the wheel, as it stands before ``tick``."""
        pending, slot_count = self._pending, self._slot_count
        for _ in range(self._transfer_limit):
            timeout = pending.pop_first()
            if timeout is None:
                return
            ticks_left = max(0, timeout.due_tick - tick)
            timeout.rounds = ticks_left // slot_count
            self._buckets[(tick + ticks_left) % slot_count].append(timeout)

    def _expire_bucket(self, tick: int) -> None:
        for timeout in self._buckets[tick % self._slot_count]:
            if timeout.rounds:
                timeout.rounds -= 1
            else:
                timeout.unlink()
                self._expired.append(timeout)

    def _chains(self) -> Iterable[Chain[Timeout]]:
        return (*self._buckets, self._pending)
