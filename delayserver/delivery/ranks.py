"""Ranks: rows that wait, of a higher priority first, and of one priority in the order they came.

There is a lane for each priority that waits, ten at most, and the one of priority 0 always: where
no message has another, that is all. No row is sorted: those that fire together are told apart by
their routes, a comparison for all of them, and each goes to the end of its lane.

    push ──▶ 9 │ ▒▒            ┐
        ├──▶ 5 │ ▒▒▒▒▒▒        ├─▶ pop: lane by lane, from the highest on
        └──▶ 0 │ ▒▒▒▒▒▒▒▒▒▒▒▒  ┘

Cost: of a `Lane`, and for each lane that is there; 2 µs more for a push of rows with priorities.
Threads: belongs to the event loop.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from delayserver.delivery.lane import Lane, Room
from delayserver.records.message import ScheduleEntry
from delayserver.schedule.wheel_rows import ROUTE_PRIORITY, FiredRows, priority_of
from storage.rows import select


class Ranks:
    """A queue of rows for each priority."""

    __slots__ = ("_lanes", "_plain", "count")

    def __init__(self) -> None:
        self.count = 0
        """How many rows wait."""
        self._plain = Lane()
        self._lanes: dict[int, Lane] = {0: self._plain}
        """By priority, from the highest on; all but that of 0 have rows."""

    @property
    def priorities(self) -> list[int]:
        """Those that may have rows, from the highest on."""
        return list(self._lanes)

    @property
    def highest(self) -> int:
        """The highest priority of a row; -1: there is none."""
        return next((one for one, lane in self._lanes.items() if lane.count), -1)

    @property
    def is_plain(self) -> bool:
        """Whether no row has another priority than 0."""
        return len(self._lanes) == 1

    def slices(self) -> Iterator[FiredRows]:
        """All rows, in the order in which they leave."""
        for lane in self._lanes.values():
            yield from lane.slices

    def push(self, fired: FiredRows, marks: int = ROUTE_PRIORITY) -> None:
        """Add rows that leave after all others of their priorities. `marks`: the flags in the route
        of any of them, as far as they are known."""
        self.count += len(fired.rows)
        if not marks & ROUTE_PRIORITY:
            self._plain.push(fired)
            return
        for priority, rows in _by_priority(fired):
            self._lane(priority).push(rows)

    def insert(self, fired: FiredRows) -> None:
        """Add rows that left and come back, each to its place among those of its priority."""
        self.count += len(fired.rows)
        for priority, rows in _by_priority(fired):
            self._lane(priority).insert(rows)

    def extend(self, other: "Ranks") -> None:
        """Add the rows of others, which leave after all others of their priorities."""
        self.count += other.count
        for priority, lane in other._lanes.items():
            self._lane(priority).extend(lane)

    def _lane(self, priority: int) -> Lane:
        lane = self._lanes.get(priority)
        if lane is None:
            self._lanes[priority] = lane = Lane()
            self._lanes = dict(sorted(self._lanes.items(), reverse=True))
        return lane

    def first_ms(self) -> int | None:
        """When the first row of a lane fell due that is the oldest of them."""
        if len(self._lanes) == 1:
            return self._plain.first_ms()
        firsts = (lane.first_ms() for lane in self._lanes.values())
        return min((first for first in firsts if first is not None), default=None)

    def is_before(self, time_ms: int) -> bool:
        """Whether the first row of a lane fell due before `time_ms`."""
        return any(lane.is_before(time_ms) for lane in self._lanes.values())

    def holds(self, entry: ScheduleEntry) -> bool:
        """Whether the row is here."""
        return any(lane.holds(entry) for lane in self._lanes.values())

    def pop(
        self,
        room: Room,
        since_ms: int | None = None,
        until_ms: int | None = None,
        priority: int | None = None,
    ) -> list[FiredRows]:
        """Rows of that priority (None: of all, from the highest on), as `Lane.pop` takes them."""
        if self.is_plain and not priority:
            taken = self._plain.pop(room, since_ms, until_ms)
            self.count = self._plain.count
            return taken
        taken = []
        for one in self.priorities if priority is None else (priority,):
            lane = self._lanes.get(one)
            if lane is not None:
                taken += lane.pop(room, since_ms, until_ms)
                if one and not lane.count:
                    del self._lanes[one]
        self.count = sum(lane.count for lane in self._lanes.values())
        return taken

    def take(self, seqs: NDArray[np.uint64]) -> list[FiredRows]:
        """Take out the rows that have these seqs, wherever they stand; those that are here."""
        taken: list[FiredRows] = []
        for priority, lane in list(self._lanes.items()):
            taken += lane.take(seqs)
            if priority and not lane.count:
                del self._lanes[priority]
        self.count = sum(lane.count for lane in self._lanes.values())
        return taken


def _by_priority(fired: FiredRows) -> Iterator[tuple[int, FiredRows]]:
    """Rows of each priority, in their order."""
    routes = fired.rows["route"]
    if len(routes) == 1:
        yield priority_of(int(routes[0])), fired
        return
    marks = routes & ROUTE_PRIORITY
    if (marks == marks[0]).all():
        yield priority_of(int(marks[0])), fired
        return
    priorities = np.array([priority_of(mark) for mark in marks.tolist()], np.uint8)
    for priority in np.unique(priorities).tolist():
        yield priority, FiredRows(fired.hour, select(fired.rows, priorities == priority))
