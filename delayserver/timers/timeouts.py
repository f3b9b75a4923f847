"""The timeouts of the event loop: lengths of time, on one hierarchical timing wheel.

A due time is a moment, and stands in the wheel of messages. A lease, a long poll and a heartbeat
are lengths: when an operator sets the clock, they last as long as they were meant to. So they are
counted on the stopwatch, a clock that cannot be set and that goes on while the machine sleeps.

Cost: add O(levels) and cancel O(1), whatever waits; time in which nothing expires costs nothing
(`delayserver.timers.hierarchical`). Threads: belongs to the event loop.
"""

from collections.abc import Callable

from delayserver.timers.hierarchical import HierarchicalTimer
from delayserver.timers.interface import Callback, Handle


class Timeouts:
    """A `Scheduler` that reads the time itself."""

    def __init__(self, stopwatch: Callable[[], int]) -> None:
        """`stopwatch`: milliseconds since a moment of its own."""
        self.stopwatch = stopwatch
        """Never compare the time it shows with the time of a message."""
        self._timer = HierarchicalTimer(start_ms=stopwatch())

    def add(self, callback: Callback, delay_ms: int) -> Handle:
        """Call back `delay_ms` from the present, never earlier."""
        return self.add_at(callback, self.stopwatch() + delay_ms)

    def add_at(self, callback: Callback, at_ms: int) -> Handle:
        """Call back when the stopwatch shows `at_ms`; in the next `advance`, if it does already."""
        return self._timer.add(callback, at_ms - self._timer.now_ms)

    def cancel(self, handle: Handle) -> bool:
        """True if, and only if, the callback will now never run."""
        return self._timer.cancel(handle)  # type: ignore[arg-type]  # one that `add` returned

    def advance(self) -> int:
        """Let all timeouts expire whose time is over; returns how many.

        Raises ExceptionGroup after the last of them, if callbacks raised."""
        return self._timer.advance_clock(self.stopwatch())

    def next_ms(self) -> int | None:
        """When `advance` must be called again, on the stopwatch; None: no timeout waits."""
        return self._timer.next_advance_ms()

    def size(self) -> int:
        """How many timeouts wait."""
        return self._timer.size()
