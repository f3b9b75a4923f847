"""Lanes: rows that wait, in the order in which they came, in few arrays.

Rows come as they fire, often a few at a time, and a million of them may wait. Neighbouring slices
of a lane are joined as long as they are short. So the work for each array (taking rows, looking for
one) does not grow with how slowly they came.

    push ──▶ … 8,192 │ 700 │ 40 │ 3       each at least twice as long as the one that came later
    insert ──▶ 5 │ 60 │ 16,000 │ …        rows that come back, by due time and seq

Cost: O(1) per slice that is taken; a row is copied some ten times, at a few ns each, while others
wait beside it. To look for a row is a comparison for each SLICE_ROWS_MAX / 2 rows or more, and a
search in those few slices that may hold it. Threads: belongs to the event loop.
"""

from collections import deque
from collections.abc import Iterable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from delayserver.records.message import ScheduleEntry
from delayserver.schedule.wheel_rows import PAYLOAD_MAX_BYTES, WHEEL_DTYPE, FiredRows
from storage.rows import concatenate, is_among, select

SLICE_ROWS_MAX = 1 << 14
"""Longer slices are not made by joining: each search goes through one."""
BOUNDS_ROWS_MIN = 1 << 10
"""The bounds of a slice with so many rows are found when it is not the last any more. If the first
look-up had to find them all together, it would take too long."""


class Room:
    """How much may leave together: rows, and bytes of their payloads, but at least one row."""

    __slots__ = ("_is_untouched", "bytes", "rows")

    def __init__(self, rows_max: int, bytes_max: int) -> None:
        self.rows, self.bytes = rows_max, bytes_max
        self._is_untouched = True

    def take(self, fired: FiredRows, count: int) -> int:
        """How many of the first `count` rows, one or more, fit; they take their place."""
        if count == 1:
            total_bytes = int(fired.rows["locator"][0]) & PAYLOAD_MAX_BYTES
            fitting = int(total_bytes <= self.bytes)
        else:
            lengths = fired.payload_bytes(count)
            total_bytes, fitting = int(lengths.sum()), count
            if total_bytes > self.bytes:
                fitting = int(np.searchsorted(np.cumsum(lengths), self.bytes, side="right"))
        if fitting < count:
            fitting = fitting or int(self._is_untouched)
            self.rows = 0
        else:
            self.rows -= count
            self.bytes -= total_bytes
        self._is_untouched = False
        return fitting


class Lane:
    """A queue of rows, in slices."""

    __slots__ = ("count", "slices")

    def __init__(self) -> None:
        self.slices: deque[FiredRows] = deque()
        self.count = 0

    def push(self, fired: FiredRows) -> None:
        """Add rows that leave after all others."""
        self.count += len(fired.rows)
        slices = self.slices
        while slices and are_short(slices[-1], fired):
            fired = slices.pop().join(fired)
        if slices and len(slices[-1].rows) >= BOUNDS_ROWS_MIN:
            slices[-1].bounds()
        slices.append(fired)

    def insert(self, fired: FiredRows) -> None:
        """Add rows that left and come back, before all rows that are due later, or at the same time
        with a higher seq. Those that left last usually come back to the front."""
        self.count += len(fired.rows)
        slices = self.slices
        first, before = _turn(fired, 0), list[FiredRows]()
        while slices and _turn(slices[0], 0) < first:
            earlier = slices.popleft()
            if _turn(earlier, -1) > first:
                # It goes in between: rows that are due later follow again.
                cut = _place(earlier, fired.rows["due_offset_ms"][0], "left")
                if cut < len(earlier.rows):
                    slices.appendleft(FiredRows(earlier.hour, earlier.rows[cut:]))
                if not cut:
                    break
                earlier = FiredRows(earlier.hour, earlier.rows[:cut])
            before.append(earlier)
        while slices and _turn(slices[0], 0) < _turn(fired, -1) and slices[0].hour == fired.hour:
            other = slices.popleft()
            cut = _place(other, fired.rows["due_offset_ms"][-1], "right")
            if cut < len(other.rows):
                slices.appendleft(FiredRows(other.hour, other.rows[cut:]))
            if not cut:
                break
            rows = concatenate([fired.rows, other.rows[:cut]], WHEEL_DTYPE)
            order = np.lexsort((rows["seq"], rows["due_offset_ms"]))
            fired = FiredRows(fired.hour, select(rows, order))
        self._push_front(fired)
        for earlier in reversed(before):
            self._push_front(earlier)

    def _push_front(self, fired: FiredRows) -> None:
        while self.slices and are_short(self.slices[0], fired):
            fired = fired.join(self.slices.popleft())
        self.slices.appendleft(fired)

    def extend(self, other: "Lane") -> None:
        """Add the rows of another lane, which leave after all others."""
        self.slices.extend(other.slices)
        self.count += other.count

    def first_ms(self) -> int | None:
        """When the first row fell due."""
        return self.slices[0].first_ms() if self.slices else None

    def is_before(self, time_ms: int) -> bool:
        """Whether the first row fell due before `time_ms`."""
        first_ms = self.first_ms()
        return first_ms is not None and first_ms < time_ms

    def holds(self, entry: ScheduleEntry) -> bool:
        """Whether the row is here."""
        return holds(self.slices, entry)

    def pop(
        self, room: Room, since_ms: int | None = None, until_ms: int | None = None
    ) -> list[FiredRows]:
        """Rows from the front, as many as there is room for, as far as they fell due in that
        span."""
        taken: list[FiredRows] = []
        while room.rows > 0 and self.slices:
            fired = self.slices[0]
            count = min(room.rows, len(fired.rows))
            stopped = False
            if since_ms is not None or until_ms is not None:
                due_ms: np.ndarray = fired.due_ms(count)
                fits = due_ms >= since_ms if since_ms is not None else due_ms < until_ms
                stopped = not fits.all()
                count = int(np.argmin(fits)) if stopped else count
            if count:
                count = room.take(fired, count)
            if count == len(fired.rows):
                taken.append(self.slices.popleft())
            elif count:
                taken.append(FiredRows(fired.hour, fired.rows[:count]))
                self.slices[0] = FiredRows(fired.hour, fired.rows[count:], fired.known_bounds)
            self.count -= count
            if stopped:
                break
        return taken

    def take(self, seqs: NDArray[np.uint64]) -> list[FiredRows]:
        """Take out the rows that have these seqs, wherever they stand; those that are here."""
        if not len(seqs):
            return []
        first_seq, last_seq = int(seqs.min()), int(seqs.max())
        taken: list[FiredRows] = []
        kept: deque[FiredRows] = deque()
        for fired in self.slices:
            bounds = fired.bounds()
            if bounds.last_seq < first_seq or last_seq < bounds.first_seq:
                kept.append(fired)
                continue
            here = is_among(fired.rows["seq"], seqs)
            if not here.any():
                kept.append(fired)
                continue
            taken.append(FiredRows(fired.hour, select(fired.rows, here)))
            if not here.all():
                kept.append(FiredRows(fired.hour, select(fired.rows, ~here)))
        self.slices = kept
        self.count -= sum(len(fired.rows) for fired in taken)
        return taken


def _turn(fired: FiredRows, index: int) -> tuple[int, int, int]:
    """The key by which the rows of a lane are compared, for one of them."""
    row = fired.rows[index]
    return fired.hour, int(row["due_offset_ms"]), int(row["seq"])


def _place(fired: FiredRows, due_offset_ms: np.uint32, side: Literal["left", "right"]) -> int:
    """Where rows with a due time stand, or would stand."""
    return int(np.searchsorted(fired.rows["due_offset_ms"], due_offset_ms, side))


def holds(slices: Iterable[FiredRows], entry: ScheduleEntry) -> bool:
    """Whether the row is in one of the slices."""
    return any(len(fired.find(entry)) for fired in slices)


def are_short(longer: FiredRows, shorter: FiredRows) -> bool:
    """Whether to join two neighbours: the lengths of unjoined slices grow like powers."""
    before, after = len(longer.rows), len(shorter.rows)
    return before < 2 * after and before + after <= SLICE_ROWS_MAX and longer.hour == shorter.hour
