"""Drives a timer from an event loop: one ``call_later`` for all timers together.

The loop's own heap then holds a single entry, whatever the number of timers, and asyncio is asked
for the time only when the timer has work. The wake-up is moved forward when a timer is added that
needs it earlier; it is not moved back on cancel, since a wake-up for nothing costs less than
looking.

Threads
    Everything, callbacks included, belongs to the thread of the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import ceil, floor
from typing import Generic

from delayserver.timers.interface import Callback, HandleT, Timer


class AsyncioDriver(Generic[HandleT]):
    """Advances ``timer`` in the running loop. Errors of callbacks go to the loop's handler.

    ``clock`` gives the time in ms, and may have a fraction; it is the loop's clock by default. The
    timer's clock is set by it at once, so any ``start_ms`` before that will do.
    """

    def __init__(self, timer: Timer[HandleT], clock: Callable[[], float] | None = None) -> None:
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._timer = timer
        self._clock = clock or (lambda: loop.time() * 1000)
        self._wakeup: asyncio.TimerHandle | None = None
        self._wakeup_ms = 0
        if timer.on_error is None:
            timer.on_error = self._report
        timer.expire(floor(self._clock()))
        self._arm()

    def add(self, callback: Callback, delay_ms: int) -> HandleT:
        """Run ``callback`` on the event loop, ``delay_ms`` after the clock's time, rounded up.

        Raises TimerShutdownError after ``shutdown``.
        """
        since_advance_ms = ceil(self._clock()) - self._timer.now_ms
        handle = self._timer.add(callback, since_advance_ms + delay_ms)
        self._arm()
        return handle

    def cancel(self, handle: HandleT) -> bool:
        """Stop a timer. True if, and only if, it will now never (again) fire."""
        return self._timer.cancel(handle)

    def size(self) -> int:
        """How many timers are waiting."""
        return self._timer.size()

    def shutdown(self) -> None:
        """Shut the timer down and never wake again."""
        self._timer.shutdown()
        if self._wakeup is not None:
            self._wakeup.cancel()
            self._wakeup = None

    def _arm(self) -> None:
        next_ms = self._timer.next_advance_ms()
        if next_ms is None:
            return
        if self._wakeup is not None:
            if self._wakeup_ms <= next_ms:
                return
            self._wakeup.cancel()
        self._wakeup_ms = next_ms
        delay_s = max(0.0, next_ms - self._clock()) / 1000
        self._wakeup = self._loop.call_later(delay_s, self._wake)

    def _wake(self) -> None:
        self._wakeup = None
        try:
            self._timer.advance_clock(floor(self._clock()))
        finally:
            self._arm()

    def _report(self, error: Exception) -> None:
        self._loop.call_exception_handler(
            {"message": "a timer callback failed", "exception": error}
        )
