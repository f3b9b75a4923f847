"""The timeouts of the event loop: lengths of time, on one hierarchical timing wheel.

A due time is a moment, and stands in the wheel of messages. A lease, a long poll and a heartbeat
are lengths: when somebody sets the clock, they last as long as they were meant to. So they are
counted on a clock of their own, which is that of the machine without the steps that were noticed
(`shift`), and which never goes back.

    moment on this clock  =  clock of the machine − all shifts

Cost: add O(levels) and cancel O(1), whatever waits; time in which nothing expires costs nothing
(`delayserver.timers.hierarchical`). Threads: belongs to the event loop.
"""

from delayserver.timers.hierarchical import HierarchicalTimer
from delayserver.timers.interface import Callback, Handle


class Timeouts:
    """A `Scheduler` that is told the time."""

    def __init__(self, now_ms: int) -> None:
        self._timer = HierarchicalTimer(start_ms=now_ms)
        self._shift_ms = 0
        self.now_ms = now_ms
        """The present on this clock."""

    def note_time(self, now_ms: int) -> int:
        """Note that the clock of the machine shows `now_ms`; returns the present. Nothing expires.

        A length that is added next counts from there, and not from the last `advance`."""
        self.now_ms = max(self.now_ms, now_ms - self._shift_ms)
        return self.now_ms

    def add(self, callback: Callback, delay_ms: int) -> Handle:
        """Call back `delay_ms` from the present, never earlier."""
        return self._timer.add(callback, self.now_ms - self._timer.now_ms + delay_ms)

    def cancel(self, handle: Handle) -> bool:
        """True if, and only if, the callback will now never run."""
        return self._timer.cancel(handle)  # type: ignore[arg-type]  # one that `add` returned

    def advance(self, now_ms: int) -> int:
        """Let expire what is over at `now_ms`; returns how many.

        Raises ExceptionGroup after the last of them, if callbacks raised."""
        return self._timer.advance_clock(self.note_time(now_ms))

    def shift(self, delta_ms: int) -> None:
        """The clock of the machine was set by that much."""
        self._shift_ms += delta_ms

    def next_ms(self) -> int | None:
        """When to call `advance` again, by the clock of the machine; None: nothing waits."""
        next_ms = self._timer.next_advance_ms()
        return None if next_ms is None else next_ms + self._shift_ms

    def size(self) -> int:
        """How many wait."""
        return self._timer.size()
