"""The heap and the pool of threads together: java.util.concurrent's scheduled executor.

All of it is in the two parts, ``heap`` and ``thread_driver``; here are only the two ways of adding
that a heap has more than the other designs.
"""

from __future__ import annotations

from collections.abc import Callable

from delayserver.timers.heap import HeapHandle, HeapTimer
from delayserver.timers.interface import Callback, ErrorHandler
from delayserver.timers.thread_driver import ThreadDriver, monotonic_ms


class ScheduledExecutor(ThreadDriver[HeapHandle]):
    """A pool of threads for one-shot and repeating timers."""

    def __init__(
        self,
        thread_count: int,
        clock: Callable[[], float] = monotonic_ms,
        on_error: ErrorHandler | None = None,
    ) -> None:
        self._heap = HeapTimer(0, on_error)
        super().__init__(self._heap, clock, thread_count)

    def add_fixed_rate(self, callback: Callback, delay_ms: int, period_ms: int) -> HeapHandle:
        """Run ``callback`` after ``delay_ms``, then every ``period_ms``, by the due times.

        Raises ValueError for a period below 1 ms, and TimerShutdownError after ``shutdown``.
        """
        return self._admit(
            lambda passed_ms: self._heap.add_fixed_rate(callback, passed_ms + delay_ms, period_ms)
        )

    def add_fixed_delay(self, callback: Callback, delay_ms: int, pause_ms: int) -> HeapHandle:
        """Run ``callback`` after ``delay_ms``, then ``pause_ms`` after each of its returns.

        Raises ValueError for a pause below 1 ms, and TimerShutdownError after ``shutdown``.
        """
        return self._admit(
            lambda passed_ms: self._heap.add_fixed_delay(callback, passed_ms + delay_ms, pause_ms)
        )
