"""Operations that wait for an event, but not for ever: Kafka's purgatory of delayed operations.

A long poll is answered when enough messages are there, or else when its time is up. A publish is
answered when its group is durable, a session expires unless it is renewed. Each is an operation
that watches some keys. An event for one of the keys makes the operation look whether it can
complete; if nothing completes it, the timer does. However many threads try, it completes once.

Source: Kafka's DelayedOperation and DelayedOperationPurgatory.

Nothing is lost between looking and watching
    ``try_complete_else_watch`` tries, puts the operation into the watch lists, and tries again: an
    event that came after the first try and before the operation was listed is seen by the second.

Nothing is lost between two threads (the retry flag)
    Two events may hit one operation at once. Only one thread at a time may look, and the other must
    not wait for it: it may hold locks that the first one needs to finish looking. But if it just
    went away, its event could be lost, since the first thread may have looked before the event
    changed anything. So it leaves a note, the retry flag, and the thread inside looks once more
    when it is done. Only the thread that raised the flag tries again itself, for the case that the
    one inside had left just before. A thread that finds the flag raised can go, because another
    thread will look.

        thread A                              thread B
        takes the lock, clears the flag
        sees 9 of 10 messages: not yet
                                              adds the 10th; the lock is taken; raises the flag
                                              tries again; lock still taken, flag raised: goes
        gives the lock back, sees the flag
        looks again: 10 of 10, completes

Lists are cleaned late
    A completed operation stays in the lists of its other keys until an event for the key, or the
    reaper, comes by. The reaper runs in the ``try_complete_else_watch`` that finds more than
    ``purge_interval`` entries of completed operations, and more of them than of waiting ones.
    Unlinking at completion would search all the lists at the one moment that has to be quick.

Cost
    With k keys: watching O(k); an event O(operations that watch its key), or O(operations that it
    completes) for those who ask the ``oldest`` first; completion O(1) and a ``cancel`` of the
    timer. The reaper goes through all lists, but then at least half of them goes away: O(1) for
    each watch in the long run, and the lists at most double.

Threads
    As many as the scheduler allows: ``LockedTimer`` and ``ThreadDriver`` take any thread, a plain
    timer or ``AsyncioDriver`` only their own. No lock of the purgatory is held while a method of an
    operation or of the scheduler runs; ``try_complete`` runs in one thread at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable, Sequence
from functools import partial
from threading import Lock
from typing import Any, Generic, TypeVar

from delayserver.timers.interface import Handle, Scheduler

Key = TypeVar("Key", bound=Hashable)


class Flag:
    """A flag that exactly one of several threads raises.

    It is a lock that no thread ever waits for, the one compare-and-set that Python has.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = Lock()

    def test_and_raise(self) -> bool:
        """Raise the flag; whether it was up before."""
        return not self._lock.acquire(blocking=False)

    def is_up(self) -> bool:
        return self._lock.locked()

    def clear(self) -> None:
        """Lower the flag. At most one thread at a time may do this."""
        if self._lock.locked():
            self._lock.release()


class DelayedOperation(ABC):
    """Something to be completed by an event or after ``timeout_ms``, whichever is first, once."""

    __slots__ = (
        "_completed",
        "_handle",
        "_key_count",
        "_looking",
        "_purgatory",
        "_retry",
        "timeout_ms",
    )

    def __init__(self, timeout_ms: int) -> None:
        self.timeout_ms = timeout_ms
        self._completed = Flag()
        self._looking = Lock()
        self._retry = Flag()
        # Set when the operation begins to wait: where, for how many keys, and its timeout.
        self._purgatory: Purgatory[Any] | None = None
        self._key_count = 0
        self._handle: Handle | None = None

    @abstractmethod
    def try_complete(self) -> bool:
        """Look whether the condition holds; if it does, return ``self.force_complete()``.

        Never called by two threads at once. An error that it raises goes to the caller that caused
        the look, and the operation goes on waiting.
        """

    @abstractmethod
    def on_complete(self) -> None:
        """Called exactly once, by the thread that completed the operation."""

    def on_expiration(self) -> None:  # noqa: B027
        """Called after ``on_complete`` if it was the timeout that completed the operation."""

    @property
    def is_completed(self) -> bool:
        return self._completed.is_up()

    def force_complete(self) -> bool:
        """Complete the operation whatever its condition; true for the one caller who did it."""
        if self._completed.test_and_raise():
            return False
        if self._purgatory is not None:
            self._purgatory._disarm(self)
        self.on_complete()
        return True

    def maybe_try_complete(self) -> bool:
        """Try to complete, now or through the thread that is just trying; true if this call did."""
        while not self.is_completed:
            if self._looking.acquire(blocking=False):
                done = False
                failure: Exception | None = None
                try:
                    self._retry.clear()
                    done = self.try_complete()
                except Exception as error:
                    failure = error
                finally:
                    self._looking.release()
                if done or not self._retry.is_up():
                    if failure is not None:
                        raise failure
                    return done
                # A look that failed is forgotten here: the next one will fail or succeed anew.
            elif self._retry.test_and_raise():
                return False
        return False


class Purgatory(Generic[Key]):
    """Where delayed operations wait. The module's docstring has the algorithm."""

    def __init__(self, scheduler: Scheduler[Any], purge_interval: int = 1000) -> None:
        self._scheduler = scheduler
        self._purge_interval = purge_interval
        self._lock = Lock()
        self._watchers: dict[Key, deque[DelayedOperation]] = {}
        # Operations that wait for their timeout; entries in all lists; those of them that wait.
        self._delayed = 0
        self._watched = 0
        self._watched_waiting = 0

    def try_complete_else_watch(self, operation: DelayedOperation, keys: Sequence[Key]) -> bool:
        """Complete ``operation`` at once if that is possible; else watch ``keys`` and the clock.

        True if this call completed it. Raises ValueError if there is no key to watch, and
        TimerShutdownError if the scheduler is shut down; the operation is not watched then.
        """
        if not keys:
            raise ValueError("an operation that watches no key could only expire")
        if operation.maybe_try_complete():
            return True
        self._arm(operation, len(keys))
        self._watch(operation, keys)
        return operation.maybe_try_complete()

    def check_and_complete(self, key: Key) -> int:
        """Something happened to ``key``: let its operations look. Returns how many this completed.

        Raises ExceptionGroup, after all have looked, with the errors of those that raised.
        """
        with self._lock:
            operations = list(self._watchers.get(key, ()))
        completed = 0
        errors: list[Exception] = []
        for operation in operations:
            try:
                completed += operation.maybe_try_complete()
            except Exception as error:
                errors.append(error)
        if operations:
            with self._lock:
                self._clean(key)
        if errors:
            raise ExceptionGroup(f"{len(errors)} operations of {key!r} failed", errors)
        return completed

    def oldest(self, key: Key) -> DelayedOperation | None:
        """The operation that was watched first, among those that wait for ``key``.

        This is for operations that compete for an event, when the event is to complete the first
        few of them. Completed ones are purged from the front, so it costs O(1) in the long run.
        """
        with self._lock:
            operations = self._watchers.get(key)
            while operations:
                if not operations[0].is_completed:
                    return operations[0]
                operations.popleft()
                self._watched -= 1
            self._watchers.pop(key, None)
        return None

    def watched(self) -> int:
        """Entries in all watch lists, with those of completed operations not yet purged."""
        return self._watched

    def delayed(self) -> int:
        """Operations that wait for an event or their timeout."""
        return self._delayed

    def reap(self) -> int:
        """Purge completed operations from all watch lists; returns how many entries went."""
        with self._lock:
            return sum(self._clean(key) for key in list(self._watchers))

    def _watch(self, operation: DelayedOperation, keys: Sequence[Key]) -> None:
        with self._lock:
            self._watched += len(keys)
            for key in keys:
                self._watchers.setdefault(key, deque()).append(operation)
            completed = self._watched - self._watched_waiting
            piled_up = completed > max(self._purge_interval, self._watched_waiting)
        if piled_up:
            self.reap()

    def _clean(self, key: Key) -> int:
        """Purge one list, and the key with its last entry. The lock is held."""
        operations = self._watchers.pop(key, deque())
        waiting = deque(operation for operation in operations if not operation.is_completed)
        if waiting:
            self._watchers[key] = waiting
        purged = len(operations) - len(waiting)
        self._watched -= purged
        return purged

    def _arm(self, operation: DelayedOperation, key_count: int) -> None:
        operation._purgatory = self
        operation._key_count = key_count
        self._count(1, key_count)
        try:
            expire = partial(self._expire, operation)
            operation._handle = self._scheduler.add(expire, operation.timeout_ms)
        except BaseException:
            self._count(-1, -key_count)
            raise
        # A completion just before the handle was stored found nothing to disarm. If it came just
        # after, the handle is cancelled twice, and only the first cancel counts.
        if operation.is_completed:
            self._disarm(operation)

    def _disarm(self, operation: DelayedOperation) -> None:
        if operation._handle is not None and self._scheduler.cancel(operation._handle):
            self._count(-1, -operation._key_count)

    def _expire(self, operation: DelayedOperation) -> None:
        self._count(-1, -operation._key_count)
        if operation.force_complete():
            operation.on_expiration()

    def _count(self, operations: int, entries: int) -> None:
        with self._lock:
            self._delayed += operations
            self._watched_waiting += entries
