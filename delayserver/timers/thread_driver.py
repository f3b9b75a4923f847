"""Drives a timer with a pool of threads: leader and followers.

Source: D. Schmidt and others, "Leader/Followers", PLoP 2000; ScheduledThreadPoolExecutor's queue.

Algorithm
    Among the threads that have no callback to run, only one, the leader, waits with a timeout, for
    the next time at which the timer has work. The others, the followers, wait without one. When the
    leader gets a callback to run, it first wakes a follower, which becomes leader, and then runs
    the callback itself: no hand-over to another thread lies between the due time and the callback,
    and one due time wakes one thread, not all. A timer that is due before the leader would wake
    deposes it: one waiting thread is woken and leads with the shorter timeout.

    With one thread (the default) this is simply a timer thread.

Cost
    The timer's own cost, a lock, and two clock readings for each callback.

Threads
    Every method may be called from any thread, and from callbacks. The lock is not held while a
    callback runs. With more than one thread the callbacks of different timers run at the same time;
    they start in the timer's order.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from math import ceil, floor, inf
from types import TracebackType
from typing import Generic, Self

from delayserver.timers.interface import Callback, HandleT, Timer


def monotonic_ms() -> float:
    """The machine's monotonic clock in ms."""
    return time.monotonic() * 1000


class ThreadDriver(Generic[HandleT]):
    """Advances ``timer`` in ``thread_count`` threads of its own, from now until ``shutdown``.

    ``clock`` gives the time in ms, and may have a fraction. The timer's clock is set by it at once,
    so any ``start_ms`` before that will do; from then on the timer must not be used directly. The
    errors of callbacks go to the timer's ``on_error``, or else to ``threading.excepthook``.
    """

    def __init__(
        self,
        timer: Timer[HandleT],
        clock: Callable[[], float] = monotonic_ms,
        thread_count: int = 1,
    ) -> None:
        if thread_count < 1:
            raise ValueError(f"a pool needs a thread, not {thread_count=}")
        self._timer = timer
        self._clock = clock
        self._available = threading.Condition()
        self._leader: threading.Thread | None = None
        # When the leader will wake by itself; never, if there is no leader.
        self._wakeup_ms = inf
        self._closed = False
        timer.expire(floor(clock()))
        # Daemon threads, so that a program that forgets shutdown still ends.
        self._threads = [
            threading.Thread(target=self._work, name=f"timer-{index}", daemon=True)
            for index in range(thread_count)
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    def add(self, callback: Callback, delay_ms: int) -> HandleT:
        """Run ``callback`` in a worker thread, ``delay_ms`` after the clock's time, rounded up.

        Raises TimerShutdownError after ``shutdown``.
        """
        return self._admit(lambda passed_ms: self._timer.add(callback, passed_ms + delay_ms))

    def cancel(self, handle: HandleT) -> bool:
        """Stop a timer. True if, and only if, it will now never (again) fire."""
        with self._available:
            return self._timer.cancel(handle)

    def size(self) -> int:
        """How many timers are waiting."""
        with self._available:
            return self._timer.size()

    def shutdown(self) -> None:
        """Shut the timer down and wait for the running callbacks, except for the caller's own."""
        with self._available:
            self._closed = True
            self._timer.shutdown()
            self._available.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _admit(self, add: Callable[[int], HandleT]) -> HandleT:
        """Call ``add`` with the ms since the timer's last advance, by which its clock is behind."""
        with self._available:
            handle = add(ceil(self._clock()) - self._timer.now_ms)
            self._wake_in_time()
            return handle

    def _work(self) -> None:
        while (handle := self._next_due()) is not None:
            failed = False
            try:
                handle.callback()
            except Exception as error:
                failed = True
                self._report(error)
            with self._available:
                self._timer.finished(handle, ceil(self._clock()), failed)
                self._wake_in_time()

    def _next_due(self) -> HandleT | None:
        """Wait, as leader or follower, for a timer to fire; None when the driver is shut down."""
        with self._available:
            while not self._closed:
                self._timer.expire(floor(self._clock()))
                handle = self._timer.take()
                if handle is not None:
                    self._wake_in_time()
                    return handle
                self._wait()
            return None

    def _wait(self) -> None:
        next_ms = self._timer.next_advance_ms()
        if next_ms is None or self._leader is not None:
            self._available.wait()
            return
        self._leader = threading.current_thread()
        self._wakeup_ms = next_ms
        self._available.wait((next_ms - self._clock()) / 1000)
        if self._leader is threading.current_thread():
            self._resign()

    def _wake_in_time(self) -> None:
        """Wake one waiting thread if the timer has work before the leader would see it."""
        next_ms = self._timer.next_advance_ms()
        if next_ms is not None and next_ms < self._wakeup_ms:
            self._resign()
            self._available.notify()

    def _resign(self) -> None:
        self._leader = None
        self._wakeup_ms = inf

    def _report(self, error: Exception) -> None:
        if self._timer.on_error is not None:
            self._timer.on_error(error)
        else:
            threading.excepthook(
                threading.ExceptHookArgs(
                    (type(error), error, error.__traceback__, threading.current_thread())
                )
            )
