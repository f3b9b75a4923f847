"""A lock around any timer, so that several threads may add, cancel and advance.

The lock is held for each step of an advance and never while a callback runs. So a callback may
call the timer, and may wait for a lock whose owner is just calling the timer, without a deadlock;
and a cancel has one winner: it is true, or the callback runs.

Cost: one uncontended lock for each call, about 0.1 µs.
"""

from __future__ import annotations

from threading import Lock

from delayserver.timers.interface import Callback, HandleT, Timer


class LockedTimer(Timer[HandleT]):
    """Any timer, for any number of threads. Callbacks run in the thread that advances."""

    __slots__ = ("_lock", "_timer")

    def __init__(self, timer: Timer[HandleT]) -> None:
        super().__init__(timer.now_ms, timer.on_error)
        self._timer = timer
        self._lock = Lock()

    @property
    def now_ms(self) -> int:
        return self._timer.now_ms

    def add(self, callback: Callback, delay_ms: int) -> HandleT:
        with self._lock:
            return self._timer.add(callback, delay_ms)

    def cancel(self, handle: HandleT) -> bool:
        with self._lock:
            return self._timer.cancel(handle)

    def size(self) -> int:
        with self._lock:
            return self._timer.size()

    def shutdown(self) -> None:
        with self._lock:
            self._timer.shutdown()

    def next_advance_ms(self) -> int | None:
        with self._lock:
            return self._timer.next_advance_ms()

    def expire(self, now_ms: int) -> None:
        with self._lock:
            self._timer.expire(now_ms)

    def take(self) -> HandleT | None:
        with self._lock:
            return self._timer.take()

    def finished(self, handle: HandleT, now_ms: int, failed: bool) -> None:
        with self._lock:
            self._timer.finished(handle, now_ms, failed)
