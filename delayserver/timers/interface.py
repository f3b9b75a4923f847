"""The promises of every timer of this package, and the one loop that fires them.

Time
    Time is a whole number of milliseconds that only the caller knows. A timer has a clock,
    ``now_ms``: ``start_ms`` at first, then the largest value that ``advance_clock`` was given. A
    smaller value is ignored. Nothing here reads a clock, sleeps or starts a thread; the two
    drivers do (:mod:`asyncio_driver`, :mod:`thread_driver`).

Tick
    Tick *k* is the instant ``start_ms + k * tick_ms``. ``add`` at ``now_ms`` makes the timer due at
    ``now_ms + delay_ms``, and it belongs to the first tick at or after that instant: never early,
    and late by less than one tick. ``advance_clock(now_ms)`` fires the timers of all ticks up to
    ``now_ms``. A negative delay counts as zero. ``add`` itself never runs a callback: with a delay
    of zero at the very instant of a tick it is the next ``advance_clock`` that fires the timer,
    even if that is for the same ``now_ms``.

Order
    Ticks in order; inside a tick the order of ``add``. All designs here keep it, so that a run
    with one design can be compared with a run with another, firing by firing.

Callbacks
    A callback may add and cancel timers of the same tick or any other. A timer added by a
    callback never fires in the ``advance_clock`` that is running, so a callback that adds itself
    again with delay 0 cannot hang the caller.

Once
    ``cancel`` is true exactly once, and then the callback never runs; it is false after the timer
    fired, while it fires, after an earlier cancel and after ``shutdown``.

Errors
    A callback that raises takes nothing with it: all others of the advance run, and then the
    errors are raised together as one ``ExceptionGroup``; or each is handed to ``on_error`` as it
    comes. A ``BaseException`` (KeyboardInterrupt) ends the advance at once, and the next one
    continues with the timers that were left.

Threads
    A timer belongs to one thread at a time and takes no lock. ``LockedTimer`` adds the lock, and
    ``ThreadDriver`` threads of its own.

``advance_clock`` is built from three steps. They are public because a driver has to put a lock
around each of them and none around the callback. ``expire`` moves the due timers aside, ``take``
hands over one of these, and ``finished`` is told when its callback has returned.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from delayserver.errors import DelayServerError

Callback = Callable[[], object]
ErrorHandler = Callable[[Exception], object]


class TimerShutdownError(DelayServerError, RuntimeError):
    """A timer was added after ``shutdown``."""

    def __init__(self) -> None:
        super().__init__("the timer is shut down and takes no more timers")


def spent() -> None:
    """The callback of a handle that will not fire again, so that it keeps nothing else alive."""


class Handle:
    """One added timer, to pass to ``cancel``. Everything else is the timer's own business."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callback) -> None:
        self.callback = callback


HandleT = TypeVar("HandleT", bound=Handle)


class Scheduler(Protocol[HandleT]):
    """The part of a timer that its users need; a driver has it as well as a timer."""

    def add(self, callback: Callback, delay_ms: int) -> HandleT: ...

    def cancel(self, handle: HandleT) -> bool: ...


class Timer(ABC, Generic[HandleT]):
    """The interface of all designs. The module's docstring is the contract."""

    __slots__ = ("_now_ms", "on_error")

    def __init__(self, start_ms: int, on_error: ErrorHandler | None) -> None:
        self._now_ms = start_ms
        self.on_error = on_error

    @property
    def now_ms(self) -> int:
        """The timer's clock: where the last advance left it."""
        return self._now_ms

    @abstractmethod
    def add(self, callback: Callback, delay_ms: int) -> HandleT:
        """Run ``callback`` at the first tick at or after ``now_ms + delay_ms``.

        Raises TimerShutdownError after ``shutdown``.
        """

    @abstractmethod
    def cancel(self, handle: HandleT) -> bool:
        """Stop a timer of this object. True if, and only if, it will now never (again) fire."""

    def advance_clock(self, now_ms: int) -> int:
        """Move the clock to ``now_ms``, fire everything due by then, return how many fired.

        Raises ExceptionGroup, after the last of them, if callbacks raised and there is no
        ``on_error``.
        """
        self.expire(now_ms)
        fired = 0
        errors: list[Exception] = []
        on_error = self.on_error or errors.append
        while (handle := self.take()) is not None:
            fired += 1
            failed = False
            try:
                handle.callback()
            except Exception as error:
                failed = True
                on_error(error)
            self.finished(handle, self.now_ms, failed)
        if errors:
            raise ExceptionGroup(f"{len(errors)} of {fired} timer callbacks failed", errors)
        return fired

    @abstractmethod
    def size(self) -> int:
        """How many timers are waiting: added, and neither taken to be fired nor cancelled."""

    @abstractmethod
    def shutdown(self) -> None:
        """Drop all waiting timers and refuse new ones. Calling it again does nothing."""

    @abstractmethod
    def next_advance_ms(self) -> int | None:
        """The earliest time at which an advance has work to do; None if nothing waits.

        Not always a time at which something fires: a wheel also wakes to move timers about.
        """

    @abstractmethod
    def expire(self, now_ms: int) -> None:
        """Move the clock to ``now_ms`` and make everything due by then available to ``take``."""

    @abstractmethod
    def take(self) -> HandleT | None:
        """The next timer to fire, from now on too late to cancel; None if there is none."""

    def finished(self, handle: HandleT, now_ms: int, failed: bool) -> None:
        """The callback of a taken timer has returned at ``now_ms``, or ``failed``."""
        handle.callback = spent
