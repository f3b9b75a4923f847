"""The loader: reads an hour from the disk into runs of the wheel, minus the settled rows.

    rows of the schedule file  −  tombstones in it  −  rows of the dispatch file  =  waiting rows

A row that went to several subscriptions may be settled for some of them only; it becomes one row
for each of the others. Only columns are read, never payloads.

The first `memory_bytes` that an hour needs are memory. All more stands in mapped files
(`storage.scratch`), so that an hour of a hundred million rows needs no more memory than one of
three million.

Cost: 10 M rows in about 2 s, rows that were filed one by one 1 µs each; 24 bytes each, and twice
that while it is at work. NumPy releases the GIL in the long steps; the rows come in parts, since to
give memory back takes time with the GIL held, too; and nothing is left for the event loop that
grows with the rows.
Threads: pure but for reading; runs in the loader thread with log instances of its own.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayserver.records.horizon import Mark, marks_of
from delayserver.records.receivers import shares
from delayserver.records.subscriptions import Registry, Subscription
from delayserver.schedule.ended import Ended, is_among_sorted
from delayserver.schedule.replay import Snapshot
from delayserver.schedule.wheel import LOADED_RUN_ROWS, RowIndexes, Stretch, merge_runs
from delayserver.schedule.wheel_rows import (
    ROUTE_GROUP,
    ROUTE_NUMBER,
    ROUTE_SUBSCRIPTION,
    WHEEL_DTYPE,
    wheel_rows,
)
from storage.frame import Damage, Rows
from storage.frame_runs import FrameRun
from storage.hour_log import HourLog
from storage.rows import FLAG_REMOVAL, HOUR_MS, SCHEDULE_DTYPE, as_bytes, concatenate, keep, select
from storage.scratch import PIECE_BYTES, Scratch

NEVER_MS = 1 << 62


class LoadSizes(NamedTuple):
    """How an hour is loaded."""

    part_rows: int = 65_536
    """Rows that are sorted at once: they stay in the cache, and each slot gets some of them."""
    run_rows: int = LOADED_RUN_ROWS
    """See `merge_runs`."""
    memory_bytes: int = 128 << 20
    """Enough for three million rows and the work of loading them."""
    piece_bytes: int = PIECE_BYTES
    """See `storage.scratch`."""


LOAD_SIZES = LoadSizes()


class Leased(NamedTuple):
    """Rows that consumers hold: seqs, and to which subscription each is leased (both shape n)."""

    seqs: NDArray[np.uint64]
    subscription_ids: NDArray[np.uint32]


@dataclass(slots=True)
class LoadedHour:
    """An hour, ready for the wheel."""

    hour: int
    runs: list[Stretch]
    """Where a row is, its place, is its index in all of them, as if they were one."""
    index: list[RowIndexes]
    damage: list[Damage] = field(default_factory=list)
    fired: list[Mark] = field(default_factory=list)
    """Rows that have fired though they are not due yet: the clock was set back."""
    of_groups: Rows = field(default_factory=lambda: np.empty(0, WHEEL_DTYPE))
    """Copies of the rows that are for one subscription, and of a group."""
    is_whole: bool = True
    """Whether its rows could all be read."""
    leased: Rows = field(default_factory=lambda: np.empty(0, WHEEL_DTYPE))
    """Copies of the rows that consumers hold, once for each of those: they do not wait."""
    leased_by: NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    """To which subscription each of those is leased."""

    @property
    def count(self) -> int:
        """How many rows wait."""
        return sum(len(run.rows) for run in self.runs)

    def find(self, seqs: NDArray[np.uint64]) -> NDArray[np.intp]:
        """The places of the rows that have one of these seqs, which come in any order. The cost
        depends on the number of `seqs`, and a little on that of the parts: the event loop asks."""
        seqs = np.sort(seqs)  # so that neighbours are looked for one after the other
        found = [np.empty(0, np.intp)]
        for part in self.index:
            first, last = np.searchsorted(seqs, part.seqs[[0, -1]]).tolist()
            wanted = seqs[first : last + 1]
            if not len(wanted):
                continue
            begins = np.searchsorted(part.seqs, wanted, side="left")
            counts = np.searchsorted(part.seqs, wanted, side="right") - begins
            # A row that several subscriptions wait for stands there several times.
            before = np.cumsum(counts) - counts
            which = np.arange(int(counts.sum())) + np.repeat(begins - before, counts)
            found.append(part.places[which].astype(np.intp))
        return np.concatenate(found)

    def rows(self, places: NDArray[np.intp]) -> Rows:
        """The rows in these places: a copy."""
        found = np.empty(len(places), WHEEL_DTYPE)
        for which, run, indexes in self._of_runs(places):
            found[which] = run.rows[indexes]
        return found

    def remove(self, places: NDArray[np.intp]) -> None:
        """Let the rows in these places not wait."""
        for _, run, indexes in self._of_runs(places):
            run.rows["seq"][indexes] = 0

    def _of_runs(
        self, places: NDArray[np.intp]
    ) -> Iterator[tuple[NDArray[np.intp], Stretch, NDArray[np.intp]]]:
        """For each run that has any of the places: which of them, and where they are in it."""
        ends = np.cumsum([len(run.rows) for run in self.runs])
        numbers = np.searchsorted(ends, places, side="right")
        for number in np.unique(numbers).tolist():
            which = np.flatnonzero(numbers == number)
            run = self.runs[number]
            yield which, run, places[which] - (ends[number] - len(run.rows))


class Loader:
    """Loads hours."""

    def __init__(
        self,
        schedule: HourLog,
        dispatch: HourLog,
        *,
        slot_ms: int,
        sizes: LoadSizes = LOAD_SIZES,
    ) -> None:
        self._schedule = schedule
        self._dispatch = dispatch
        self._slot_ms = slot_ms
        self._sizes = sizes

    def load(
        self,
        snapshot: Snapshot,
        registry: Registry,
        subject_names: dict[int, str],
        *,
        now_ms: int = NEVER_MS,
        leased: Leased | None = None,
    ) -> LoadedHour:
        """Load the waiting rows of an hour. The result names the damage; the rest is loaded (I8).

        `now_ms`: now, if the hour may have fired before this process began; `leased`: leases of its
        rows that consumers got from an earlier process."""
        sizes = self._sizes
        scratch = Scratch(self._schedule.files, sizes.memory_bytes, piece_bytes=sizes.piece_bytes)
        try:
            return self._load(snapshot, registry, subject_names, now_ms, scratch, leased)
        finally:
            # An open file would keep the space of an hour that is deleted later.
            self._schedule.release(snapshot.hour)
            self._dispatch.release(snapshot.hour)

    def _load(
        self,
        snapshot: Snapshot,
        registry: Registry,
        subject_names: dict[int, str],
        now_ms: int,
        scratch: Scratch,
        wanted: Leased | None,
    ) -> LoadedHour:
        damage: list[Damage] = []
        # A cancelled or moved row must not fire (I5), nor must a delivered row fire again (I4).
        ended, ahead = Ended(scratch), _Ahead(now_ms)
        parts = self._read_schedule(snapshot, ended, ahead, damage, scratch)
        is_whole = not damage
        self._read_dispatch(snapshot.hour, ended, ahead, damage)
        leased = _HeldRows(parts, wanted, ended)
        affected: list[Rows] = []
        for index, rows in enumerate(parts):
            removed = is_among_sorted(rows["seq"], ended.removed)
            gone = removed | is_among_sorted(rows["seq"], ended.by_somebody)
            gone |= is_among_sorted(rows["seq"], leased.seqs)
            # A row for one subscription alone is done.
            is_for_all = (rows["route"] & ROUTE_SUBSCRIPTION) == 0
            gone |= ~is_for_all & is_among_sorted(rows["seq"], ended.by(0))
            if not gone.any():
                continue
            here = select(rows, gone & ~removed & is_for_all)
            entries = _as_entries(here, snapshot.hour)
            for subscription, remains in remaining(
                entries, leased.not_for, registry, subject_names
            ):
                mine = select(here, remains)
                mine["route"] &= ~np.uint32(ROUTE_NUMBER)
                mine["route"] |= subscription.id | ROUTE_SUBSCRIPTION
                affected.append(mine)
            waiting = select(rows, ~gone)
            parts[index] = rows[: len(waiting)]  # in its place: it may be all the memory there is
            as_bytes(parts[index])[:] = as_bytes(waiting)
        if affected:
            parts.append(scratch.join(affected, WHEEL_DTYPE))
        of_groups = _of_groups(parts)
        runs, index_of_runs = merge_runs(
            parts, self._slot_ms, run_rows=self._sizes.run_rows, empty=scratch.empty
        )
        return LoadedHour(
            snapshot.hour,
            runs,
            index_of_runs,
            damage,
            ahead.marks(),
            of_groups,
            is_whole,
            leased.rows,
            leased.subscription_ids,
        )

    def _read_schedule(
        self,
        snapshot: Snapshot,
        ended: Ended,
        ahead: "_Ahead",
        damage: list[Damage],
        scratch: Scratch,
    ) -> list[Rows]:
        """The entries as they wait in the wheel, in parts of some length. The rows that tombstones
        have ended go to `ended`."""
        parts: list[Rows] = []
        waiting: list[Rows] = []
        count = 0
        for found in self._schedule.scan_runs(snapshot.hour, end=snapshot.length):
            if isinstance(found, Damage):
                damage.append(found)
                continue
            is_entry = (found.rows["flags"] & FLAG_REMOVAL) == 0
            here = keep(found.rows, is_entry)
            waiting.append(wheel_rows(here, snapshot.hour, found.payload_starts(is_entry)))
            count += len(here)
            if len(here) != len(found.rows):
                tombstones = select(found.rows, ~is_entry)
                is_whole = tombstones["subscription_id"] == 0
                ended.add_removed(tombstones["message_seq"][is_whole])
                for_one = select(tombstones, ~is_whole)
                ended.add_settled(for_one["message_seq"], for_one["subscription_id"])
                ahead.add(for_one["message_seq"], for_one["due_ms"])
            if count >= self._sizes.part_rows:
                parts.append(scratch.join(waiting, WHEEL_DTYPE))
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
        parts.append(scratch.join(waiting, WHEEL_DTYPE))
        return parts

    def _read_dispatch(
        self, hour: int, ended: Ended, ahead: "_Ahead", damage: list[Damage]
    ) -> None:
        for found in self._dispatch.scan_runs(hour):
            if isinstance(found, FrameRun):
                ended.add_settled(found.rows["seq"], found.rows["subscription_id"])
                ahead.add(found.rows["seq"], found.rows["due_ms"])
            elif not found.torn:
                damage.append(found)


class _HeldRows:
    """The rows of an hour that consumers hold: they wait for other subscriptions alone."""

    def __init__(self, parts: list[Rows], wanted: Leased | None, ended: Ended) -> None:
        """`parts`: all entries of the hour. A row that has ended for its subscription, or is not
        there, is not held."""
        self._ended = ended
        self.rows = np.empty(0, WHEEL_DTYPE)
        self.subscription_ids = np.empty(0, np.uint32)
        if wanted is not None and len(wanted.seqs):
            self._find(parts, wanted)
        self.seqs = np.unique(self.rows["seq"])
        """The numbers of the messages that are held, each once and in order."""

    def _find(self, parts: list[Rows], wanted: Leased) -> None:
        seqs, subscription_ids = wanted
        is_over = is_among_sorted(seqs, self._ended.removed)
        for subscription_id in np.unique(subscription_ids).tolist():
            mine = subscription_ids == subscription_id
            is_over |= mine & is_among_sorted(seqs, self._ended.by(subscription_id))
        seqs, subscription_ids = seqs[~is_over], subscription_ids[~is_over]
        known = np.unique(seqs)
        here = [select(rows, is_among_sorted(rows["seq"], known)) for rows in parts]
        found = concatenate(here, WHEEL_DTYPE)
        order = np.argsort(found["seq"], kind="stable")
        is_there = is_among_sorted(seqs, found["seq"][order])
        places = order[np.searchsorted(found["seq"][order], seqs[is_there])]
        self.rows, self.subscription_ids = select(found, places), subscription_ids[is_there]

    def not_for(self, subscription_id: int) -> NDArray[np.uint64]:
        """Rows that do not wait for a subscription, in order: they have ended, or it holds them."""
        ended = self._ended.by(subscription_id)
        mine = self.rows["seq"][self.subscription_ids == subscription_id]
        return np.union1d(ended, mine) if len(mine) else ended


class _Ahead:
    """Rows that have ended for at least one subscription, and are due at `now_ms` or later."""

    def __init__(self, now_ms: int) -> None:
        self._now_ms = now_ms
        self._seqs: list[NDArray[np.uint64]] = []
        self._dues_ms: list[NDArray[np.int64]] = []

    def add(self, seqs: NDArray[np.uint64], dues_ms: NDArray[np.int64]) -> None:
        ahead = dues_ms >= self._now_ms
        if ahead.any():
            self._seqs.append(seqs[ahead])
            self._dues_ms.append(dues_ms[ahead])

    def marks(self) -> list[Mark]:
        if not self._seqs:
            return []
        return marks_of(np.concatenate(self._seqs), np.concatenate(self._dues_ms))


def _of_groups(parts: list[Rows]) -> Rows:
    """Those that may be retries which hold up their group."""
    wanted = np.uint32(ROUTE_GROUP | ROUTE_SUBSCRIPTION)
    found = [select(rows, (rows["route"] & wanted) == wanted) for rows in parts]
    return concatenate(found, WHEEL_DTYPE)


def _as_entries(waiting: Rows, hour: int) -> Rows:
    """Wheel rows for all subscriptions as schedule rows again, with the columns of `remaining`."""
    entries = np.zeros(len(waiting), SCHEDULE_DTYPE)
    entries["seq"], entries["subject_id"] = waiting["seq"], waiting["route"] & ROUTE_NUMBER
    entries["due_ms"] = waiting["due_offset_ms"].astype(np.int64) + hour * HOUR_MS
    return entries


def remaining(
    entries: Rows,
    settled_by: Callable[[int], NDArray[np.uint64]],
    registry: Registry,
    subject_names: dict[int, str],
) -> Iterator[tuple[Subscription, np.ndarray]]:
    """The subscriptions that have yet to get rows which others have settled, and those rows.

    A row for one subscription is done. A row for a subject remains for those subscriptions that it
    is for (`records.receivers`) and that have not settled it.

    `settled_by`: the seqs that a subscription has settled, by its id, in order."""
    for subject_id in np.unique(entries["subject_id"]).tolist():
        mine = (entries["subject_id"] == subject_id) & (entries["subscription_id"] == 0)
        subject = subject_names[subject_id]
        rows = select(entries, mine)

        def has_settled(subscription_id: int, rows: Rows = rows) -> np.ndarray:
            return is_among_sorted(rows["seq"], settled_by(subscription_id))

        candidates = registry.candidates(subject)
        for one, share in shares(candidates, subject, rows["seq"], rows["due_ms"], has_settled):
            remains = mine.copy()
            remains[mine] = share
            yield one, remains
