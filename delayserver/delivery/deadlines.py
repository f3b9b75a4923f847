"""Deadlines: when rows that wait for one subscription outlive their messages' time to live.

The payload of a row is not read before it leaves, and a row does not say when it expires. So
waiting rows with options are read once for that, some in a turn of the event loop, and only a
moment and a number are kept:

    note ──▶ unread ──▶ (read) ──▶ add ──▶ parts, each sorted by moment ──▶ pop: their time is over

A row may have left by the time that its deadline comes, and be here twice if it came back: the
caller that takes rows out takes those that are there. A row that leaves before it was read, or
within the last STEP_MS, is looked at as it leaves (`Deliveries.expired`). Where nothing waits,
nothing is read.

Deadlines of rows that have left are let go (`let_go`), a part at a time, when they are many: a
message that was acknowledged at once and had a week to live does not stand here for a week.

Cost: nothing for rows without options; for the others a read of the payload and 16 bytes, which are
sorted some ten times. Threads: belongs to the event loop.
"""

from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from delayserver.delivery.deliveries import NEVER_MS
from delayserver.delivery.lane import Lane, Room
from delayserver.schedule.wheel_rows import FiredRows
from storage.rows import concatenate, is_among, select

EXPIRED: Final = "expired"
"""Why a delivery was given up that would begin too late for the time to live of its message."""
STEP_MS: Final = 100
"""Rows whose deadlines are no further apart may be given up together, the later of them on time."""
LEFT_MAX: Final = 4096
"""So many deadlines of rows that have left may stand here beside those of rows that wait, and a
quarter of these."""
PART_MAX: Final = 1 << 15
"""Longer parts are not made by joining: to sort one takes some 3 ms."""
_DEADLINE = np.dtype([("at_ms", "<i8"), ("seq", "<u8")])


class Deadlines:
    """When rows of one queue expire."""

    __slots__ = ("_parts", "_unread", "is_reading")

    def __init__(self) -> None:
        self._unread = Lane()
        self._parts: list[NDArray[np.void]] = []
        """Moments that are multiples of STEP_MS, and seqs, sorted (_DEADLINE). None is empty, and
        each is at least twice as long as the one behind it, or the two are longer than PART_MAX, or
        it has lost deadlines that are over."""
        self.is_reading = False
        """Rows are being read, or are about to be."""

    @property
    def are_unread(self) -> bool:
        """Whether there are rows whose expiry is unknown."""
        return self._unread.count > 0

    def __bool__(self) -> bool:
        return bool(self._parts) or self.are_unread or self.is_reading

    @property
    def count(self) -> int:
        """How many deadlines are known."""
        return sum(self.parts_rows)

    @property
    def parts_rows(self) -> list[int]:
        """How many there are in each part."""
        return [len(part) for part in self._parts]

    def note(self, fired: FiredRows) -> None:
        """Rows wait whose payloads have options."""
        self._unread.push(fired)

    def forget_unread(self) -> None:
        """All rows have left."""
        if self._unread.count:
            self._unread = Lane()

    def next_unread(self, room: Room) -> list[FiredRows]:
        """Rows that are to be read next."""
        return self._unread.pop(room)

    def add(self, seqs: NDArray[np.uint64], expires_ms: NDArray[np.int64]) -> None:
        """Rows expire at these moments (both of shape n; NEVER_MS: never)."""
        ever = expires_ms < NEVER_MS
        part = np.empty(int(ever.sum()), _DEADLINE)
        part["seq"], part["at_ms"] = seqs[ever], -(-expires_ms[ever] // STEP_MS) * STEP_MS
        if len(part):
            self._join(part)

    def _join(self, part: NDArray[np.void]) -> None:
        while self._parts and _are_short(len(self._parts[-1]), len(part)):
            part = concatenate([self._parts.pop(), part], _DEADLINE)
        self._parts.append(_sorted(part))

    def pop(self, now_ms: int, count_max: int) -> NDArray[np.uint64]:
        """The seqs of rows that have expired, `count_max` at most."""
        taken: list[NDArray[np.uint64]] = [np.empty(0, np.uint64)]
        left: list[NDArray[np.void]] = []
        for part in self._parts:
            over = int(np.searchsorted(part["at_ms"], now_ms, side="right"))
            over = min(over, count_max)
            count_max -= over
            taken.append(part["seq"][:over])
            if over < len(part):
                left.append(part[over:])
        self._parts = left
        return np.concatenate(taken)

    def let_go(self, slices: Iterable[FiredRows]) -> None:
        """Let those deadlines of one part go whose rows do not wait; the next call looks at the
        next part. `slices`: all rows that wait."""
        part = self._parts.pop(0)
        first_seq, last_seq = int(part["seq"].min()), int(part["seq"].max())
        waiting = [np.empty(0, np.uint64)]
        for fired in slices:
            bounds = fired.bounds()
            if first_seq <= bounds.last_seq and bounds.first_seq <= last_seq:
                waiting.append(fired.rows["seq"])
        part = part[is_among(part["seq"], np.concatenate(waiting))]
        if len(part):
            self._join(part)

    def next_ms(self, now_ms: int) -> int | None:
        """When the next rows are given up that are not yet; a moment of the clock."""
        next_ms = min((int(part["at_ms"][0]) for part in self._parts), default=None)
        return next_ms if next_ms is not None and next_ms > now_ms else None


def _are_short(longer: int, shorter: int) -> bool:
    return longer < 2 * shorter and longer + shorter <= PART_MAX


def _sorted(part: NDArray[np.void]) -> NDArray[np.void]:
    """Sorted by moment and seq; a row that came back again and again is there once."""
    part = select(part, np.lexsort((part["seq"], part["at_ms"])))
    is_new = np.append(
        True,
        (part["seq"][1:] != part["seq"][:-1]) | (part["at_ms"][1:] != part["at_ms"][:-1]),
    )
    return part if is_new.all() else select(part, is_new)
