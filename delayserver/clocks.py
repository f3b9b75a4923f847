"""The two clocks of a process: one that people read and set, and one that measures how long things
take.

Cost: 0.1 µs a look. Threads: any.
"""

import time
from typing import Final

_STOPWATCH: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def wall_clock_ms() -> int:
    """Milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


def stopwatch_ms() -> int:
    """Milliseconds of a clock that nobody sets and that, where there is one, goes on in sleep. All
    processes of a machine have the same."""
    return time.clock_gettime_ns(_STOPWATCH) // 1_000_000
