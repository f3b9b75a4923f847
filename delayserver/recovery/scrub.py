"""Reads filed rows, again and again, to find damage early (I8).

A disk damages bytes that are not read for months. The owner reads an hour when it comes near, and
then it is too late to get it from another node in time. A standby has nothing else to do: it reads
all its schedule files, a slice at a time, so that damage can be replaced while another replica is
sound.

Cost: 5 ms a second, and 4 MiB of the disk's bandwidth: 1 GB in 4 minutes. Bytes that the system has
in memory are not read from the disk. A shard that is larger than memory, where it matters, is.
Threads: the one that files.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from delayserver.records.tables import HourState
from storage.frame import Damage, Frame, damaged_payloads
from storage.hour_log import HourLog

SLICE_BYTES: Final = 4 * 1024 * 1024


class Scrub:
    """One round after the other over all hours and days."""

    def __init__(
        self,
        schedule: HourLog,
        hours: Mapping[int, HourState],
        *,
        slice_bytes: int = SLICE_BYTES,
    ) -> None:
        """`schedule`: opened for this alone. `hours`: the filed hours (`Replay.hours`)."""
        self._schedule = schedule
        self._hours = hours
        self._slice_bytes = slice_bytes
        self._bucket = -1
        self._end = self._last_seq = 0
        """How much of it was read."""

    def step(self) -> list[Damage]:
        """Read the next slice. Returns the damage in it. Raises DiskError."""
        state = self._hours.get(self._bucket)
        if state is None or self._end >= state.length:
            self._schedule.release(self._bucket)
            buckets = [bucket for bucket, one in self._hours.items() if one.length]
            if not buckets:
                return []
            later = [bucket for bucket in buckets if bucket > self._bucket]
            self._bucket = min(later or buckets)
            self._end = self._last_seq = 0
            state = self._hours[self._bucket]
        return self._read(state.length)

    def _read(self, length: int) -> list[Damage]:
        damage: list[Damage] = []
        start = self._end
        for found in self._schedule.scan(
            self._bucket, start=start, end=length, payload=True, after_seq=self._last_seq
        ):
            if isinstance(found, Frame):
                damage += [one for _, one in damaged_payloads(found)]
            else:
                damage.append(replace(found, torn=False))  # The catalog knows of it.
            self._end, self._last_seq = found.end, max(self._last_seq, found.last_seq)
            if self._end - start >= self._slice_bytes:
                return damage
        if self._schedule.size(self._bucket) < length:
            path, reason = self._schedule.path(self._bucket), "the file is shorter than it was"
            damage.append(Damage(path, self._end, length, reason, torn=False))
        self._end = length
        return damage
