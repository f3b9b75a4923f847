"""Delayed produce: a publish that is answered when the high watermark has passed it.

    durable_seq   everything up to it is synced in the message log
    filed_seq     everything up to it is in its schedule log, and visible to every look-up

A publish that says nothing waits for its group alone and never comes here. One that names a level,
or how long it will wait, is a delayed operation: each move of the watermark that it waits for lets
it look, a commit that failed lets it fail, and else it is completed when its time is up.

Cost: about 10 µs for a publish that waits; one dictionary look-up per group where none does.
Threads: belongs to the event loop.
"""

from collections.abc import Callable
from enum import Enum, auto

from delayserver.decisions.group import Group
from delayserver.decisions.groups import Groups
from delayserver.timers.purgatory import DelayedOperation, Purgatory
from delayserver.timers.timeouts import Timeouts


class Level(Enum):
    """How far a publish has come."""

    ACCEPTED = auto()
    DURABLE = auto()
    FILED = auto()


class _Event(Enum):
    FAILED = auto()


class DelayedProduce(DelayedOperation):
    """One publish that waits. `answer`: how far it came in time, or the error."""

    __slots__ = ("_answer", "_group", "_groups", "_level", "_seq")

    def __init__(
        self,
        groups: Groups,
        group: Group | None,
        seq: int,
        level: Level,
        timeout_ms: int,
        answer: Callable[[Level, Exception | None], None],
    ) -> None:
        super().__init__(timeout_ms)
        self._groups = groups
        self._group = group
        self._seq = seq
        self._level = level
        self._answer = answer

    def try_complete(self) -> bool:
        failed = self._group is not None and self._group.error is not None
        is_there = failed or self._reached().value >= self._level.value
        return is_there and self.force_complete()

    def on_complete(self) -> None:
        self._answer(self._reached(), None if self._group is None else self._group.error)

    def _reached(self) -> Level:
        # Not by seq: those of a group that was rolled back are given out again.
        if self._group is not None and not self._group.is_ended:
            return Level.ACCEPTED
        return Level.FILED if self._groups.filed_seq >= self._seq else Level.DURABLE


class Produces:
    """All publishes that wait for a watermark."""

    def __init__(self, groups: Groups, timeouts: Timeouts) -> None:
        self._groups = groups
        self._purgatory: Purgatory[Level | _Event] = Purgatory(timeouts)

    def wait(
        self,
        group: Group | None,
        seq: int,
        level: Level,
        timeout_ms: int,
        answer: Callable[[Level, Exception | None], None],
    ) -> None:
        """Call `answer` once `level` is reached, the group has failed, or the time is up.

        `group`: the one that has to be durable, None: it is; `seq`: the last record of the
        publish."""
        produce = DelayedProduce(self._groups, group, seq, level, timeout_ms, answer)
        self._purgatory.try_complete_else_watch(produce, [level, _Event.FAILED])

    def on_level_moved(self, level: Level) -> None:
        """Answer the publishes that the new high watermark of a level has reached."""
        self._purgatory.check_and_complete(level)

    def on_rolled_back(self) -> None:
        """Answer the publishes whose group could not be written and was rolled back."""
        self._purgatory.check_and_complete(_Event.FAILED)

    def count(self) -> int:
        """How many wait."""
        return self._purgatory.delayed()
