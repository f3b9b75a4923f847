"""Parked: rows that are due, and that no subscription matches.

They stay, by subject, until a subscription comes that matches it, and still count in their hour, so
that the hour is kept. A cancel or a move takes them out.

Cost: O(1) to add; to look for a row is a comparison per slice that fired, and one search in those
that may hold it. Threads: belongs to the event loop.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from delayserver.records.message import ScheduleEntry
from delayserver.records.subscriptions import Subscription
from delayserver.schedule.wheel_rows import FiredRows
from storage.frame import Rows


class Parked:
    """What waits for a subscription to come."""

    def __init__(self) -> None:
        self._by_subject: dict[int, list[FiredRows]] = {}

    def add(self, subject_id: int, fired: FiredRows) -> None:
        """Park rows of a subject."""
        self._by_subject.setdefault(subject_id, []).append(fired)

    def remove_matching(
        self, subscription: Subscription, subject_names: Mapping[int, str]
    ) -> Iterator[FiredRows]:
        """Take out all rows that a subscription matches, of each subject in the order in which
        they came."""
        for subject_id in list(self._by_subject):
            if subscription.matches(subject_names[subject_id]):
                yield from self._by_subject.pop(subject_id)

    def remove(self, entry: ScheduleEntry) -> Rows | None:
        """Take out a row (WHEEL_DTYPE, shape 1); None if it is not here."""
        for slices, position, hits in self._find(entry):
            fired = slices[position]
            if hits.all():
                del slices[position]
            else:
                slices[position] = FiredRows(fired.hour, fired.rows[~hits])
            rows: Rows = fired.rows[hits]
            return rows
        return None

    def contains(self, entry: ScheduleEntry) -> bool:
        """Whether the row is here."""
        return any(True for _ in self._find(entry))

    def get(self, entry: ScheduleEntry) -> Rows | None:
        """The row (WHEEL_DTYPE, shape 1), or None if it is not here."""
        for slices, position, hits in self._find(entry):
            rows: Rows = slices[position].rows[hits]
            return rows
        return None

    def _find(self, entry: ScheduleEntry) -> Iterator[tuple[list[FiredRows], int, np.ndarray]]:
        """Where the row is: a list, the place in it, and which row of that slice."""
        for slices in self._by_subject.values():
            for position, fired in enumerate(slices):
                if fired.may_hold(entry):
                    hits = fired.rows["seq"] == entry.seq
                    if hits.any():
                        yield slices, position, hits

    def count(self) -> int:
        """How many rows wait."""
        return sum(len(fired.rows) for slices in self._by_subject.values() for fired in slices)

    def first_ms(self) -> int | None:
        """When the oldest row fell due, as far as each subject's first slice tells."""
        firsts = (slices[0].first_ms() for slices in self._by_subject.values() if slices)
        return min(firsts, default=None)
