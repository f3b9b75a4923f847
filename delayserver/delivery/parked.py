"""Parked: rows that are due, and that no subscription matches.

They stay until a subscription comes that matches their subject, and still count in their hour, so
that the hour is kept. A cancel or a move takes them out.

They are kept by hour, whatever their subject is, in few arrays, as in a `Lane`: a look-up of a row
knows its hour and not its subject, and there may be very many of both.

Cost: as a `Lane`; to take a row out copies the slice that it is in (20 µs). A new subscription
costs 20 ns for each row that is parked, or nothing where it matches all or none. Threads: belongs
to the event loop.
"""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayserver.delivery.lane import BOUNDS_ROWS_MIN, are_short
from delayserver.records.message import ScheduleEntry
from delayserver.records.subscriptions import Subscription
from delayserver.schedule.wheel_rows import WHEEL_DTYPE, FiredRows
from storage.frame import Rows
from storage.rows import HOUR_MS, concatenate, is_among, select


class _Slice(NamedTuple):
    fired: FiredRows
    subject_ids: NDArray[np.uint32]
    """The subject of each row: its route does not say it where it is for one subscription."""


class _ParkedPosition(NamedTuple):
    slices: list[_Slice]
    at: int
    row: int


class Parked:
    """The rows that wait for a subscription to come."""

    def __init__(self) -> None:
        self._by_hour: dict[int, list[_Slice]] = {}
        self._counts: Counter[int] = Counter()
        """By subject; of none that has no row."""

    def add(self, subject_id: int, fired: FiredRows) -> None:
        """Park rows of a subject."""
        count = len(fired.rows)
        self._counts[subject_id] += count
        slices = self._by_hour.setdefault(fired.hour, [])
        subject_ids = np.full(count, subject_id, np.uint32)
        while slices and are_short(slices[-1].fired, fired):
            before = slices.pop()
            fired = before.fired.join(fired)
            subject_ids = np.concatenate([before.subject_ids, subject_ids])
        if slices and len(slices[-1].subject_ids) >= BOUNDS_ROWS_MIN:
            slices[-1].fired.bounds()
        slices.append(_Slice(fired, subject_ids))

    def remove_matching(
        self, subscription: Subscription, subject_names: Mapping[int, str]
    ) -> list[FiredRows]:
        """Take out all rows that a subscription matches, hour by hour, those of each hour in the
        order in which they came."""
        matching = [one for one in self._counts if subscription.matches(subject_names[one])]
        if not matching:
            return []
        wanted = np.array(matching, np.uint32)
        are_all = len(matching) == len(self._counts)
        for subject_id in matching:
            del self._counts[subject_id]
        taken: list[FiredRows] = []
        for hour in sorted(self._by_hour):
            left: list[_Slice] = []
            for one in self._by_hour.pop(hour):
                mine = None if are_all else is_among(one.subject_ids, wanted)
                if mine is None or mine.all():
                    taken.append(one.fired)
                elif mine.any():
                    rows = one.fired.rows
                    taken.append(FiredRows(hour, select(rows, mine)))
                    others = FiredRows(hour, select(rows, ~mine))
                    left.append(_Slice(others, one.subject_ids[~mine]))
                else:
                    left.append(one)
            if left:
                self._by_hour[hour] = left
        return taken

    def remove(self, entry: ScheduleEntry) -> Rows | None:
        """Take out a row (WHEEL_DTYPE, shape 1); None if it is not here."""
        place = self._find(entry)
        if place is None:
            return None
        slices, index, row = place
        fired, subject_ids = slices[index]
        subject_id = int(subject_ids[row])
        self._counts[subject_id] -= 1
        if not self._counts[subject_id]:
            del self._counts[subject_id]
        if len(subject_ids) > 1:
            parts = [fired.rows[:row], fired.rows[row + 1 :]]
            bounds = fired.bounds()
            due_offset_ms = entry.due_ms % HOUR_MS
            is_edge = due_offset_ms in (bounds.first_offset_ms, bounds.last_offset_ms)
            rest = FiredRows(
                fired.hour, concatenate(parts, WHEEL_DTYPE), None if is_edge else bounds
            )
            slices[index] = _Slice(rest, np.delete(subject_ids, row))
        else:
            del slices[index]
            if not slices:
                del self._by_hour[fired.hour]
        return fired.rows[row : row + 1].copy()

    def contains(self, entry: ScheduleEntry) -> bool:
        """Whether the row is here."""
        return self._find(entry) is not None

    def get(self, entry: ScheduleEntry) -> Rows | None:
        """The row (WHEEL_DTYPE, shape 1), or None if it is not here."""
        place = self._find(entry)
        if place is None:
            return None
        slices, index, row = place
        return slices[index].fired.rows[row : row + 1]

    def _find(self, entry: ScheduleEntry) -> _ParkedPosition | None:
        slices = self._by_hour.get(entry.hour, [])
        for index, (fired, _) in enumerate(slices):
            found = fired.find(entry)
            if len(found):
                return _ParkedPosition(slices, index, int(found[0]))
        return None

    def count(self) -> int:
        """How many rows wait."""
        return self._counts.total()

    def first_ms(self) -> int | None:
        """When the oldest row fell due."""
        if not self._by_hour:
            return None
        hour = min(self._by_hour)
        firsts = (fired.bounds().first_offset_ms for fired, _ in self._by_hour[hour])
        return hour * HOUR_MS + min(firsts)
