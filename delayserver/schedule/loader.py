"""The loader: reads an hour from the disk into a run of the wheel, minus what is settled.

    rows of the schedule file  −  tombstones in it  −  rows of the dispatch file  =  what waits

A row that went to several subscriptions may be settled for some of them only; it becomes one row
for each of the others. Only columns are read, never payloads.

A row of the dispatch file without a subscription says that what a subscription left behind was
dropped, since others had the message or were to get it. That ends a row for this one alone; a row
for a subject waits until somebody had it.

Cost: 10 M rows in about 2 s, rows that were filed one by one 1 µs each; 24 bytes each, and twice
that while it is at work. NumPy releases the GIL in the long steps; the rows come in parts, since to
give memory back takes time with the GIL held, too; and nothing is left for the event loop that
grows with the rows.
Threads: pure but for reading; runs in the loader thread with log instances of its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from delayserver.records.horizon import Mark, marks_of
from delayserver.records.subscriptions import Registry, Subscription
from delayserver.schedule.replay import Snapshot
from delayserver.schedule.wheel import Run, merge_run
from delayserver.schedule.wheel_rows import ROUTE_SUBSCRIPTION, WHEEL_DTYPE, wheel_rows
from storage.frame import Damage, Rows
from storage.frame_runs import FrameRun
from storage.hour_log import HourLog
from storage.rows import (
    DISPATCH_DTYPE,
    FLAG_REMOVAL,
    HOUR_MS,
    SCHEDULE_DTYPE,
    concatenate,
    is_among,
    keep,
    select,
)

NEVER_MS = 1 << 62
PART_ROWS = 65_536
"""Rows that are sorted at once: they stay in the cache, and each slot gets some of them."""

SETTLED_DTYPE = np.dtype([("seq", "<u8"), ("subscription_id", "<u4")])
"""A schedule row that is settled for one subscription."""


@dataclass(slots=True)
class LoadedHour:
    """An hour, ready for the wheel."""

    hour: int
    run: Run
    damage: list[Damage] = field(default_factory=list)
    fired: list[Mark] = field(default_factory=list)
    """What of it has fired though it is not due yet: the clock was set back."""
    is_whole: bool = True
    """Whether its rows could all be read."""
    _by_seq: tuple[NDArray[np.uint64], NDArray[np.intp]] | None = None
    """All seqs in order, and where their rows stand."""

    @property
    def count(self) -> int:
        """How many rows wait."""
        return len(self.run.rows)

    def index(self) -> None:
        """Prepare `find`: 100 ns and 16 bytes per row, for as long as the hour is on its way."""
        seqs = self.run.rows["seq"]
        order = np.argsort(seqs)
        self._by_seq = seqs[order], order

    def find(self, seqs: NDArray[np.uint64]) -> NDArray[np.intp]:
        """Which rows of the run have one of these seqs, in any order. After `index`, the cost
        depends on the number of `seqs` alone: the event loop asks."""
        if not len(seqs) or not self.count:
            return np.empty(0, np.intp)
        if self._by_seq is None:
            self.index()
            assert self._by_seq is not None
        known, order = self._by_seq
        seqs = np.sort(seqs)  # so that neighbours are looked for one after the other
        first = np.searchsorted(known, seqs, side="left")
        counts = np.searchsorted(known, seqs, side="right") - first
        # A row that several subscriptions wait for stands there several times.
        before = np.cumsum(counts) - counts
        places = np.arange(int(counts.sum())) + np.repeat(first - before, counts)
        found: NDArray[np.intp] = order[places]
        return found


class Loader:
    """Loads hours."""

    def __init__(self, schedule: HourLog, dispatch: HourLog, *, slot_ms: int) -> None:
        self._schedule = schedule
        self._dispatch = dispatch
        self._slot_ms = slot_ms

    def load(
        self,
        snapshot: Snapshot,
        registry: Registry,
        subject_names: dict[int, str],
        *,
        now_ms: int = NEVER_MS,
    ) -> LoadedHour:
        """What of the hour waits. Damage is named in the result, and the rest is loaded (I8).

        `now_ms`: now, if the hour may have fired before this process began."""
        try:
            return self._load(snapshot, registry, subject_names, now_ms)
        finally:
            # An open file would keep the space of an hour that is deleted later.
            self._schedule.release(snapshot.hour)
            self._dispatch.release(snapshot.hour)

    def _load(
        self, snapshot: Snapshot, registry: Registry, subject_names: dict[int, str], now_ms: int
    ) -> LoadedHour:
        damage: list[Damage] = []
        parts, tombstones = self._read_schedule(snapshot, damage)
        is_whole = not damage
        # What was cancelled or moved must not fire (I5), nor what was delivered, again (I4).
        settled, due_ms = self._read_settled(snapshot.hour, tombstones, damage)
        ahead = due_ms >= now_ms
        fired = marks_of(settled["seq"][ahead], due_ms[ahead]) if ahead.any() else []
        removed_seqs = np.sort(tombstones["message_seq"][tombstones["subscription_id"] == 0])
        settled_seqs = np.sort(settled["seq"][settled["subscription_id"] != 0])
        dropped_seqs = np.sort(settled["seq"][settled["subscription_id"] == 0])
        affected: list[Rows] = []
        for index, rows in enumerate(parts):
            removed = is_among_sorted(rows["seq"], removed_seqs)
            gone = removed | is_among_sorted(rows["seq"], settled_seqs)
            # What was for one subscription alone is done.
            is_for_all = (rows["route"] & ROUTE_SUBSCRIPTION) == 0
            gone |= ~is_for_all & is_among_sorted(rows["seq"], dropped_seqs)
            if gone.any():
                affected.append(select(rows, gone & ~removed & is_for_all))
                parts[index] = select(rows, ~gone)
        if affected:
            here = concatenate(affected, WHEEL_DTYPE)
            entries = _as_entries(here, snapshot.hour)
            for subscription, remains in remaining(entries, settled, registry, subject_names):
                parts.append(select(here, remains))
                parts[-1]["route"] = subscription.id | ROUTE_SUBSCRIPTION
        run = merge_run(parts, self._slot_ms)
        return LoadedHour(snapshot.hour, run, damage, fired, is_whole)

    def _read_schedule(self, snapshot: Snapshot, damage: list[Damage]) -> tuple[list[Rows], Rows]:
        """The entries as they wait in the wheel, in parts of some length, and the tombstones."""
        parts: list[Rows] = []
        waiting: list[Rows] = []
        count = 0
        tombstones: list[Rows] = []
        for found in self._schedule.scan_runs(snapshot.hour, end=snapshot.length):
            if isinstance(found, Damage):
                damage.append(found)
                continue
            is_entry = (found.rows["flags"] & FLAG_REMOVAL) == 0
            here = keep(found.rows, is_entry)
            waiting.append(wheel_rows(here, snapshot.hour, found.payload_starts(is_entry)))
            count += len(here)
            if len(here) != len(found.rows):
                tombstones.append(select(found.rows, ~is_entry))
            if count >= PART_ROWS:
                parts.append(concatenate(waiting, WHEEL_DTYPE))
                waiting, count = [], 0
        size = self._schedule.size(snapshot.hour)
        if size < snapshot.length:
            damage.append(
                Damage(
                    self._schedule.path(snapshot.hour),
                    size,
                    snapshot.length,
                    "the file is shorter than the catalog says",
                    torn=False,
                )
            )
        parts.append(concatenate(waiting, WHEEL_DTYPE))
        return parts, concatenate(tombstones, SCHEDULE_DTYPE)

    def _read_settled(
        self, hour: int, tombstones: Rows, damage: list[Damage]
    ) -> tuple[Rows, np.ndarray]:
        """What has ended for some subscription (SETTLED_DTYPE), and when each was due."""
        parts: list[Rows] = []
        for found in self._dispatch.scan_runs(hour):
            if isinstance(found, FrameRun):
                parts.append(found.rows)
            elif not found.torn:
                damage.append(found)
        rows = concatenate(parts, DISPATCH_DTYPE)
        partial = select(tombstones, tombstones["subscription_id"] != 0)
        settled = np.empty(len(rows) + len(partial), SETTLED_DTYPE)
        settled["seq"] = np.concatenate([rows["seq"], partial["message_seq"]])
        settled["subscription_id"] = np.concatenate(
            [rows["subscription_id"], partial["subscription_id"]]
        )
        return settled, np.concatenate([rows["due_ms"], partial["due_ms"]])


def is_among_sorted(values: NDArray[np.uint64], ascending: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Which values (shape n) are in a sorted array (shape m): shape n. O(n log m)."""
    if not len(ascending):
        return np.zeros(len(values), bool)
    at = np.minimum(np.searchsorted(ascending, values), len(ascending) - 1)
    found: NDArray[np.bool_] = ascending[at] == values
    return found


def _as_entries(waiting: Rows, hour: int) -> Rows:
    """Wheel rows for all subscriptions as schedule rows again: what `remaining` asks of them."""
    entries = np.zeros(len(waiting), SCHEDULE_DTYPE)
    entries["seq"], entries["subject_id"] = waiting["seq"], waiting["route"]
    entries["due_ms"] = waiting["due_offset_ms"].astype(np.int64) + hour * HOUR_MS
    return entries


def remaining(
    entries: Rows, settled: Rows, registry: Registry, subject_names: dict[int, str]
) -> Iterator[tuple[Subscription, np.ndarray]]:
    """Of rows that are settled for at least one subscription: who is still to get which of them.

    A row for one subscription is done. A row for a subject remains for those subscriptions that it
    was for (they existed when it fell due) and that have not settled it."""
    for subject_id in np.unique(entries["subject_id"]).tolist():
        mine = (entries["subject_id"] == subject_id) & (entries["subscription_id"] == 0)
        for subscription in registry.matching(subject_names[subject_id]):
            done = settled["seq"][settled["subscription_id"] == subscription.id]
            remains = mine & subscription.existed_for(entries["seq"], entries["due_ms"])
            remains &= ~is_among(entries["seq"], done)
            if remains.any():
                yield subscription, remains
