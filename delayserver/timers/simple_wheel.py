"""The simple timing wheel: an array of lists, one for each tick of a revolution.

Source: G. Varghese and T. Lauck, "Hashed and hierarchical timing wheels", SOSP 1987, scheme 4.

Algorithm
    Slot ``t % slot_count`` holds the timers of tick *t* of the running revolution; a tick empties
    its slot. The wheel reaches only to the end of its revolution. Timers that are due later wait in
    an overflow list, unordered. When a new revolution begins, the list is gone through once for the
    timers that fall into it.

Cost
    add O(1), cancel O(1), tick O(1) plus its timers. Each revolution looks at every timer that is
    still beyond it: O(n / slot_count) for each tick, the same as wheels with rounds, but all at one
    moment. With a revolution longer than nearly all delays this is the quickest design. Empty ticks
    are walked one by one (unless no timer waits at all), and memory grows with the revolution; the
    hierarchical wheel repairs both. The default is one hour of 500 ms.

Threads
    One owner; see ``interface``.

Example: ``SimpleWheelTimer(start_ms=0, tick_ms=1, slot_count=4)``
    ==========================  ==================  =========  ===========================
    call                        slots 0 1 2 3       overflow   fires
    ==========================  ==================  =========  ===========================
    add a, 2                    [] [] [a] []        []
    add b, 5; add c, 9          [] [] [a] []        [b c]
    advance_clock(3)            [] [] [] []         [b c]      a, at tick 2
    advance_clock(4)            [] [b] [] []        [c]        the second revolution begins
    add d, 1 (due 5)            [] [b d] [] []      [c]
    advance_clock(9)            [] [] [] []         []         b, d at tick 5; c at tick 9
    ==========================  ==================  =========  ===========================

Because a slot is filled from the overflow list at the very moment from which ``add`` may use it,
timers of one tick always stand in the order of their adding.
"""

from __future__ import annotations

from collections.abc import Iterable

from delayserver.timers.chain import Chain, ChainEntry
from delayserver.timers.interface import ErrorHandler
from delayserver.timers.wheel import WheelTimer


class SimpleWheelTimer(WheelTimer[ChainEntry]):
    """One revolution of lists and an overflow list. The module's docstring has the algorithm."""

    __slots__ = ("_end_tick", "_overflow", "_slots")

    def __init__(
        self,
        start_ms: int,
        tick_ms: int = 500,
        slot_count: int = 7_200,
        on_error: ErrorHandler | None = None,
    ) -> None:
        super().__init__(start_ms, tick_ms, slot_count, on_error, ChainEntry)
        self._slots: list[Chain[ChainEntry]] = [Chain() for _ in range(slot_count)]
        self._overflow: Chain[ChainEntry] = Chain()
        # The first tick of the next revolution.
        self._end_tick = slot_count

    def _place(self, entry: ChainEntry) -> None:
        if entry.due_tick < self._end_tick:
            self._slots[entry.due_tick % self._slot_count].append(entry)
        else:
            self._overflow.append(entry)

    def _turn(self, tick: int) -> None:
        if self._waiting:
            for passing in range(self._tick + 1, tick + 1):
                if passing == self._end_tick:
                    self._begin_revolution(passing)
                self._expired.take_all(self._slots[passing % self._slot_count])
        else:
            self._end_tick = (tick // self._slot_count + 1) * self._slot_count
        self._tick = tick

    def _begin_revolution(self, tick: int) -> None:
        self._end_tick = tick + self._slot_count
        for entry in self._overflow:
            if entry.due_tick < self._end_tick:
                entry.unlink()
                self._place(entry)

    def _chains(self) -> Iterable[Chain[ChainEntry]]:
        return (*self._slots, self._overflow)
