"""Deadlines: when rows that wait for one subscription outlive their messages' time to live.

Nobody reads the payload of a row before it leaves, and a row does not say when it expires. So those
with options that still wait are read once for that, some in a turn of the event loop, and what is
kept is a moment and a number:

    note ──▶ unread ──▶ (read) ──▶ add ──▶ buckets of STEP_MS ──▶ pop: their time is over

A row may have left by the time that its deadline comes, and be here twice if it came back: whoever
takes rows out takes those that are there. What leaves before it was read, or within the last
STEP_MS, is looked at as it leaves (`Deliveries.expired`). Where nothing waits, nothing is read.

Cost: nothing for rows without options; for the others a read of the payload and 16 bytes, and per
bucket a list and an entry of a heap. Threads: belongs to the event loop.
"""

from heapq import heappop, heappush
from typing import Final

import numpy as np
from numpy.typing import NDArray

from delayserver.delivery.deliveries import NEVER_MS
from delayserver.delivery.lane import Lane, Room
from delayserver.schedule.wheel_rows import FiredRows

EXPIRED: Final = "expired"
"""Why a delivery was given up that would begin too late for the time to live of its message."""
STEP_MS: Final = 100
"""Rows whose deadlines are no further apart may be given up together, the later of them on time."""
_PARTS_MAX = 16


class Deadlines:
    """When rows of one queue expire."""

    __slots__ = ("_buckets", "_steps", "_unread", "is_reading")

    def __init__(self) -> None:
        self._unread = Lane()
        self._buckets: dict[int, list[NDArray[np.uint64]]] = {}
        """Seqs, by the step at whose end they have expired."""
        self._steps: list[int] = []
        """A heap: the keys of the buckets."""
        self.is_reading = False
        """Rows are being read, or are about to be."""

    @property
    def are_unread(self) -> bool:
        """Whether there are rows of which nobody knows when they expire."""
        return self._unread.count > 0

    def __bool__(self) -> bool:
        return bool(self._steps) or self.are_unread or self.is_reading

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
        seqs, expires_ms = seqs[ever], expires_ms[ever]
        steps = -(-expires_ms // STEP_MS)
        for step in np.unique(steps).tolist():
            parts = self._buckets.get(step)
            if parts is None:
                parts = self._buckets[step] = []
                heappush(self._steps, step)
            parts.append(seqs[steps == step])
            if len(parts) > _PARTS_MAX:  # What comes back again and again is there once.
                parts[:] = [np.unique(np.concatenate(parts))]

    def pop(self, now_ms: int, count_max: int) -> NDArray[np.uint64]:
        """The seqs of rows that have expired, `count_max` at most."""
        taken: list[NDArray[np.uint64]] = [np.empty(0, np.uint64)]
        free = count_max
        while free > 0 and self._steps and self._steps[0] * STEP_MS <= now_ms:
            parts = self._buckets[self._steps[0]]
            while free > 0 and parts:
                seqs = parts.pop()
                if len(seqs) > free:
                    parts.append(seqs[free:])
                    seqs = seqs[:free]
                free -= len(seqs)
                taken.append(seqs)
            if not parts:
                del self._buckets[heappop(self._steps)]
        return np.concatenate(taken)

    def next_ms(self, now_ms: int) -> int | None:
        """When the next rows are given up that are not yet; a moment of the clock."""
        if not self._steps:
            return None
        next_ms = self._steps[0] * STEP_MS
        return next_ms if next_ms > now_ms else None
