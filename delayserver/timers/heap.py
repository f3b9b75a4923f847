"""The heap: a priority queue by due time, with timers that repeat.

Source: java.util.concurrent's ScheduledThreadPoolExecutor and its delayed work queue. Its pool of
threads is ``thread_driver``, which serves the other designs as well.

Algorithm
    A binary heap by (due time, number of the add). The order is total, so there are no ticks to
    speak of: the tick is 1 ms. Each handle knows its index in the heap, so that a cancel really
    removes it. A timer can repeat:

    - at a **fixed rate** it is due again one period after it *was due*. Firings that were missed
      are made up for, one after the other, and the rate holds in the long run;
    - with a **fixed delay** it is due again one pause after its callback *returned*. Nothing is
      made up for, and there is always a pause between two runs.

    Either goes back into the heap only when its callback has returned, so it never overlaps itself
    however many threads there are, and it ends when the callback raises.

Cost
    add, cancel and each firing O(log n); memory one slot of an array more than the handle. Empty
    time costs nothing. The right design for few timers, exact order, or very long delays; the
    constant of a heap in Python is what makes a wheel pay off early.

Threads
    One owner; see ``interface``.

Example: ``HeapTimer(start_ms=0)``
    =========================================  =====================  =========================
    call                                       heap, smallest first   fires
    =========================================  =====================  =========================
    add a, 7; add b, 3                         3:b 7:a
    add_fixed_rate r, 2, period 4              2:r 3:b 7:a
    advance_clock(5)                           6:r 7:a                r at 2, b at 3
    cancel a                                   6:r
    advance_clock(11)                          14:r                   r for 6 and r for 10
    =========================================  =====================  =========================
"""

from __future__ import annotations

from enum import Enum

from delayserver.timers.indexed_heap import NOT_IN_HEAP, IndexedHeap
from delayserver.timers.interface import (
    Callback,
    ErrorHandler,
    Handle,
    Timer,
    TimerShutdownError,
    spent,
)


class Repeat(Enum):
    """The time from which the next firing is counted."""

    NEVER = "one-shot"
    FIXED_RATE = "from the time at which this one was due"
    FIXED_DELAY = "from the time at which this one was finished"


class HeapHandle(Handle):
    """A timer with its key (due in ms, number of the add) and its place in the heap."""

    __slots__ = ("index", "key", "period_ms", "repeat")

    def __init__(
        self, callback: Callback, key: tuple[int, int], repeat: Repeat, period_ms: int
    ) -> None:
        super().__init__(callback)
        self.key = key
        self.index = NOT_IN_HEAP
        self.repeat = repeat
        self.period_ms = period_ms


class HeapTimer(Timer[HeapHandle]):
    """A heap with an index, and repeating timers. The module's docstring has the algorithm."""

    __slots__ = ("_closed", "_heap", "_limit", "_sequence")

    def __init__(self, start_ms: int, on_error: ErrorHandler | None = None) -> None:
        super().__init__(start_ms, on_error)
        self._heap: IndexedHeap[HeapHandle] = IndexedHeap()
        self._sequence = 0
        # Only keys below this one may fire: the due timers, without those that were added since the
        # last expire.
        self._limit = (start_ms, 0)
        self._closed = False

    def add(self, callback: Callback, delay_ms: int) -> HeapHandle:
        return self._add(callback, delay_ms, Repeat.NEVER, 0)

    def add_fixed_rate(self, callback: Callback, delay_ms: int, period_ms: int) -> HeapHandle:
        """Fire after ``delay_ms`` and then every ``period_ms``, counted from the due times.

        Raises ValueError for a period below 1 ms.
        """
        return self._add(callback, delay_ms, Repeat.FIXED_RATE, period_ms)

    def add_fixed_delay(self, callback: Callback, delay_ms: int, pause_ms: int) -> HeapHandle:
        """Fire after ``delay_ms`` and then ``pause_ms`` after each return of the callback.

        Raises ValueError for a pause below 1 ms.
        """
        return self._add(callback, delay_ms, Repeat.FIXED_DELAY, pause_ms)

    def _add(self, callback: Callback, delay_ms: int, repeat: Repeat, period_ms: int) -> HeapHandle:
        if self._closed:
            raise TimerShutdownError
        if repeat is not Repeat.NEVER and period_ms < 1:
            raise ValueError(f"a timer cannot repeat every {period_ms} ms")
        key = (self._now_ms + max(0, delay_ms), self._sequence)
        self._sequence += 1
        handle = HeapHandle(callback, key, repeat, period_ms)
        self._heap.push(handle)
        return handle

    def cancel(self, handle: HeapHandle) -> bool:
        if handle.index != NOT_IN_HEAP:
            self._heap.remove(handle)
        elif handle.repeat is Repeat.NEVER or handle.callback is spent or self._closed:
            return False
        # A repeating timer that is just running is recognised by this when it is finished.
        handle.callback = spent
        return True

    def size(self) -> int:
        return len(self._heap)

    def shutdown(self) -> None:
        self._closed = True
        while (handle := self._heap.first) is not None:
            self._heap.remove(handle)
            handle.callback = spent

    def next_advance_ms(self) -> int | None:
        first = self._heap.first
        return None if first is None else first.key[0]

    def expire(self, now_ms: int) -> None:
        self._now_ms = max(now_ms, self._now_ms)
        self._limit = (self._now_ms, self._sequence)

    def take(self) -> HeapHandle | None:
        first = self._heap.first
        if first is None or first.key >= self._limit:
            return None
        self._heap.remove(first)
        return first

    def finished(self, handle: HeapHandle, now_ms: int, failed: bool) -> None:
        if handle.repeat is Repeat.NEVER or failed or self._closed:
            handle.callback = spent
        if handle.callback is spent:
            return
        due_ms, sequence = handle.key
        from_ms = due_ms if handle.repeat is Repeat.FIXED_RATE else now_ms
        # It keeps its number, and with it its place among the timers of the same millisecond.
        handle.key = (from_ms + handle.period_ms, sequence)
        self._heap.push(handle)
