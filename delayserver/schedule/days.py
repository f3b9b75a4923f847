"""Days: the far level of the wheel. Messages that are far off are filed by day, and a day is split
into its hours before it comes near.

    records ──▶ far: the day's file ── split, a slice per step ──▶ the files of its hours
            └─▶ near, or the day is split: the hour's file

A row is filed in its day, if that has a file; else in its hour, if the day is near or any of its
hours has a file; else in its day. So a day with rows has either a file of its own or files of
hours, and never both, whatever the clock does. Only the table HOURS tells which.

A split appends the rows of the day's file to those of its hours, in their order, so the rows of an
hour stay in the order of their seq. Rows that are filed meanwhile go behind the others in the day's
file. When all of it is copied the day is given up for its hours, in memory and with the next
checkpoint. After a crash before that the hours' files are cut back, to nothing, and the split
begins anew (I7). The day's file is deleted when the checkpoint is durable. If it had damage it is
set aside instead, and the intact rows are in their hours (I8).

Cost: two years are 730 files for a checkpoint, and not 17,520. A split reads and writes each byte
once, in slices of SLICE_BYTES.
Threads: belongs to the replay thread; in recovery and in the simulation it is called directly.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import add

import numpy as np
from numpy.typing import NDArray

from delayserver.records.tables import HourState
from delayserver.schedule.filing import BucketPart, parts_by_bucket
from storage.buckets import DAY_MS, day_of, days_of, hours_of, is_day
from storage.frame import Damage, Frame, Rows, damaged_payloads
from storage.hour_log import HourLog
from storage.rows import HOUR_MS, SCHEDULE_DTYPE, concatenate, select

NEAR_MS = DAY_MS
"""A day is near when it begins within that time, long before its first hour is loaded."""
SLICE_BYTES = 8 * 1024 * 1024
"""The bytes that are split in one step, so that filing does not wait for long."""

FileHour = Callable[[BucketPart, HourState], HourState]
"""Appends a frame to the file of an hour whose state is given; returns the new state."""


class Days:
    """Which rows are filed by day, and the split of the days that come near."""

    def __init__(
        self, schedule: HourLog, hours: dict[int, HourState], *, slice_bytes: int = SLICE_BYTES
    ) -> None:
        """`hours`: the filed hours and days (`Replay.hours`)."""
        self._schedule = schedule
        self._hours = hours
        self._slice_bytes = slice_bytes
        self._split: _Split | None = None

    def buckets(self, due_ms: NDArray[np.int64], near_hour: int) -> NDArray[np.int64]:
        """Where rows that are due then are filed: an hour or a day for each, shape n to shape n.

        `near_hour`: its day is near, and so are those before it."""
        hours = due_ms // HOUR_MS
        near_day = day_of(near_hour)
        first_far = min((near_day + 1, *filter(is_day, self._hours)))
        if not len(hours) or day_of(int(hours.max())) < first_far:
            return hours
        days = days_of(hours)
        by_day = [
            day for day in _distinct(days).tolist() if self._is_by_day(day, is_near=day <= near_day)
        ]
        return np.where(np.isin(days, by_day), days, hours) if by_day else hours

    def _is_by_day(self, day: int, *, is_near: bool) -> bool:
        if day in self._hours:
            return True
        return not is_near and not any(hour in self._hours for hour in hours_of(day))

    # ── the split ──────────────────────────────────────────────────────────────────────────────

    def first(self, through_hour: int) -> int | None:
        """The first day with a file of its own that begins with this hour or before, if any."""
        last_day = day_of(through_hour)
        days = [bucket for bucket in self._hours if is_day(bucket) and bucket <= last_day]
        return min(days, default=None)

    def split(self, day: int, file_hour: FileHour) -> tuple[set[int] | None, list[Damage]]:
        """Split the next slice of a day. Returns the hours that it has become, or None if there is
        more to do, and the damage in it.

        Raises ShortageError: nothing of the slice counts then; call again."""
        if self._split is not None and self._split.day != day:
            # A clock that was set back has brought an earlier one.
            self._split.give_up()
            self._split = None
        if self._split is None:
            self._split = _Split(self._schedule, day, self._slice_bytes)
        split = self._split
        damage = split.step(self._hours[day].length, file_hour)
        if split.end < self._hours[day].length:
            return None, damage
        self._split = None
        del self._hours[day]
        self._hours.update(split.states)
        return set(split.states), damage


class _Split:
    """A day that is being split."""

    def __init__(self, schedule: HourLog, day: int, slice_bytes: int) -> None:
        self.day = day
        self.states: dict[int, HourState] = {}
        """The states of its hours, as far as they are written."""
        self.end = 0
        """How much of the day's file is in them."""
        self._schedule = schedule
        self._slice_bytes = slice_bytes
        self._held: list[Frame] = []
        """Frames that are read and not written: a full disk has come in between."""
        self._damage: list[Damage] = []
        self._read_end = self._last_seq = 0

    def step(self, length: int, file_hour: FileHour) -> list[Damage]:
        if not self._held:
            self._read(length)
        states = dict(self.states)
        if self._held:
            rows, payload = _joined(self._held, self._damage)
            starts = rows["payload_offset"].astype(np.int64)
            for part in parts_by_bucket(payload, rows, starts, rows["due_ms"] // HOUR_MS):
                states[part.bucket] = file_hour(part, states.get(part.bucket, HourState()))
        # Only now, since a full disk in the middle must leave everything as it was.
        self.states, self.end, self._held = states, self._read_end, []
        damage, self._damage = self._damage, []
        return damage

    def give_up(self) -> None:
        """Nothing of it counts; it will begin anew."""
        for hour in self.states:
            self._schedule.cut(hour, 0)

    def _read(self, length: int) -> None:
        """Read frames of one slice, up to `length` of the day's file."""
        start = self._read_end
        for found in self._schedule.scan(
            self.day, start=start, end=length, payload=True, after_seq=self._last_seq
        ):
            if isinstance(found, Frame):
                self._held.append(found)
            else:
                self._damage.append(replace(found, torn=False))  # The catalog knows of it.
            self._read_end, self._last_seq = found.end, max(self._last_seq, found.last_seq)
            if self._read_end - start >= self._slice_bytes:
                return
        # The missing part of the file is gone; the catalog has known of more.
        if self._schedule.size(self.day) < length:
            path, end = self._schedule.path(self.day), self._read_end
            reason = "the file is shorter than the catalog says"
            self._damage.append(Damage(path, end, length, reason, torn=False))
        self._read_end = length


def _joined(frames: list[Frame], damage: list[Damage]) -> tuple[Rows, bytes]:
    """The intact rows of all frames with their payloads in one piece, to which their offsets are
    set. Damaged stretches are added to `damage`."""
    parts: list[Rows] = []
    start = 0
    for frame in frames:
        assert frame.payload is not None
        is_intact = np.ones(len(frame.rows), bool)
        for index, found in damaged_payloads(frame):
            is_intact[index] = False
            damage.append(found)
        rows = select(frame.rows, is_intact)
        rows["payload_offset"] += np.uint32(start)
        parts.append(rows)
        start += len(frame.payload)
    return concatenate(parts, SCHEDULE_DTYPE), b"".join(frame.payload or b"" for frame in frames)


def _distinct(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """The distinct values, in order: O(n) where they are near each other, as days are."""
    first = int(values.min())
    span = int(values.max()) - first
    if span > len(values) + 1_000:
        return np.unique(values)
    return np.flatnonzero(np.bincount(values - first)) + first


def add_by_hour(before: tuple[int, ...], more: Sequence[int]) -> tuple[int, ...]:
    """`HourState.by_hour` of a day with more rows; of an hour it is empty."""
    return tuple(map(add, before, more)) if before else tuple(more)
