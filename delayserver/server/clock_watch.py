"""Finds out that the clock was set: it is compared with the stopwatch, which cannot be set.

    clock     10:00:00  10:00:10  09:00:20
    stopwatch      7 s      17 s      27 s   the clock was set back by an hour

A clock that is slewed by less than SET_MS between two looks counts as one that goes wrong by
itself: its drift adds up, and is logged once it is SET_MS.

Cost: a subtraction for each look. Threads: belongs to the event loop.
"""

from typing import Final

SET_MS: Final = 1_000
"""A clock that differs by more than this from the stopwatch was set, or has drifted so far."""


class ClockWatch:
    """A clock beside a stopwatch, as they were when they were looked at last."""

    def __init__(self, clock_ms: int, stopwatch_ms: int) -> None:
        self._offset_ms = clock_ms - stopwatch_ms
        self.ahead_total = 0
        """How often the clock was set ahead, since the start."""
        self.back_total = 0
        self.last_ms = 0
        """By how much it was set last; negative: back."""

    def look(self, clock_ms: int, stopwatch_ms: int) -> int:
        """By how much the clock was set since the last look that said so, in ms; 0: it was not."""
        by_ms = clock_ms - stopwatch_ms - self._offset_ms
        if abs(by_ms) <= SET_MS:
            return 0
        self._offset_ms += by_ms
        self.last_ms = by_ms
        if by_ms > 0:
            self.ahead_total += 1
        else:
            self.back_total += 1
        return by_ms
