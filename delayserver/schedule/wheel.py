"""The in-memory wheel: slots of 500 ms over the loaded hours, millisecond order in the open slot.

    hour files on disk   │ coarse level: one bucket per hour, no memory at all
    HourWheel            │ 7,200 slots; rows sorted by slot, `pointers[s]:pointers[s+1]` is slot s
    open slot            │ rows sorted by due time; each fires at its own millisecond

A row is 24 bytes of a NumPy array; no Python object exists for it while it waits. An hour is a list
of *runs*, each sorted by slot: those of the bulk load, of two million rows each, one behind the
other, and one for every 8,192 rows inserted since, merged eight at a time up to 65,536 rows. The
newest inserts stand unsorted in a *tail*. Opening a slot takes its slice of every run and its rows
of the tail; a run whose last slot was opened is given back.

Worked example. Slot length 500 ms, an hour that begins at 0. Rows due at 700, 1200 and 710 are
loaded: slots 1, 2, 1. `advance(600)` opens the slots up to the one that holds 600: slot 1 = [500,
1000) becomes the open slot, sorted: 700, 710. Nothing fires. `advance(705)` fires 700 (never early:
I1). An insert due at 702 goes to the open slot and fires at the next advance. `next_ms` is 710.

When the clock is set back, the slots stay open; a new row whose slot was opened before goes to the
open rows, and fires when the clock, as it is now, reaches it. So nothing fires early or twice.

Cost: load O(n) (radix sort of u16), insert O(1) amortised per row and vectorised, remove O(rows of
a slot), advance O(rows that fire) plus one slice per run and slot. Memory: 24 B per row, 29 KB per
run; the runs of a large hour stand in mapped files (`storage.scratch`), so that it takes memory by
the minute. Removing many at once costs about a microsecond each, and less where their slots are
small.
Threads: belongs to the event loop; `merge_runs` is pure and runs in the loader thread.

Rejected: a pointer-linked wheel (70 B and a Python object per message); one heap (the same, and
O(log n) to insert); sorting a whole hour by time (5 times slower than by u16 slot, for an order
that is needed for one slot at a time).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from delayserver.schedule.wheel_rows import ROUTE_SUBSCRIPTION, WHEEL_DTYPE, FiredRows
from storage.frame import Rows
from storage.rows import HOUR_MS, SEQ_MAX, as_bytes, concatenate, select

SLOT_MS = 500
LOADED_RUN_ROWS = 1 << 21
"""48 MiB: given back in some milliseconds, when the last slot of the run has been opened."""
LOADED_RUNS_MAX = 32
"""The most runs of an hour: each may have a descriptor, and every look-up asks all of them."""
RUN_ROWS = 8_192
RUN_MERGE = 8
MERGED_RUN_ROWS = RUN_ROWS * RUN_MERGE
FRESH_ROWS = 256
SLOT_ROWS_FEW = 64
SLOTS_MAX = 200
"""Slots with rows that are opened in one `advance`, at 50 µs each: after the machine has slept,
many are due."""


class Empty(Protocol):
    """Gives room for rows, as `np.empty` does."""

    def __call__(self, count: int, dtype: DTypeLike, /) -> NDArray[Any]: ...


@dataclass(frozen=True, slots=True)
class Stretch:
    """Rows sorted by slot, and where each slot begins (shape: slots + 1)."""

    rows: Rows
    pointers: NDArray[np.uint32]
    first_seq: int
    last_seq: int


@dataclass(slots=True)
class _HourWheel:
    runs: list[Stretch] = field(default_factory=list)
    merged_runs: list[Stretch] = field(default_factory=list)
    tail: Rows = field(default_factory=lambda: np.empty(64, WHEEL_DTYPE))
    tail_count: int = 0

    def all_runs(self) -> list[Stretch]:
        return self.merged_runs + self.runs

    def give_back(self, slot: int) -> None:
        """Forget the loaded runs that have nothing behind `slot`."""
        runs = self.merged_runs
        if any(run.pointers[slot + 1] == len(run.rows) for run in runs):
            self.merged_runs = [run for run in runs if run.pointers[slot + 1] < len(run.rows)]

    def first_slot(self, slot: int, slot_ms: int) -> int:
        """The first slot from `slot` on that has rows; the number of slots if there is none."""
        first = HOUR_MS // slot_ms
        for run in self.all_runs():
            # Empty slots have the same pointer as their successor.
            here = run.pointers[slot:]
            first = min(first, slot + int(np.searchsorted(here, here[0], side="right")) - 1)
        if self.tail_count:
            slots = self.tail["due_offset_ms"][: self.tail_count] // slot_ms
            later = slots[slots >= slot]
            if len(later):
                first = min(first, int(later.min()))
        return first


def build_run(rows: Rows, slot_ms: int = SLOT_MS) -> Stretch:
    """Sort rows of one hour by slot, keeping the order within a slot. Pure; O(n)."""
    count = HOUR_MS // slot_ms
    slots = _slots(rows, slot_ms)
    order = np.argsort(slots, kind="stable")
    pointers = np.zeros(count + 1, np.uint32)
    np.cumsum(_counts(slots, count), out=pointers[1:])
    seqs = rows["seq"]
    first, last = (int(seqs.min()), int(seqs.max())) if len(rows) else (0, 0)
    return Stretch(select(rows, order), pointers, first, last)


class RowIndexes(NamedTuple):
    """Where rows went that came together, by their seqs."""

    seqs: NDArray[np.uint64]
    """Ascending, shape n."""
    places: NDArray[np.uint32]
    """The index of each in all runs, as if they stood one behind the other."""


def merge_runs(
    parts: list[Rows],
    slot_ms: int = SLOT_MS,
    *,
    run_rows: int = LOADED_RUN_ROWS,
    empty: Empty = np.empty,
) -> tuple[list[Stretch], list[RowIndexes]]:
    """Sort rows of one hour that come in parts, keeping the order within a slot. Pure; O(n).

    The runs follow each other in time. A slot is in one of them, and the one that fills a run up to
    `run_rows`, or more, so that there are no more than LOADED_RUNS_MAX, is its last. `empty` gives
    their room.

    Each part is taken off the list as soon as it is merged: there is no more than twice the memory
    that all rows take, and no piece so large that giving it back is a pause for other threads."""
    count = HOUR_MS // slot_ms
    of_slots = np.zeros(count, np.intp)
    for rows in parts:
        of_slots += _counts(_slots(rows, slot_ms), count)
    ends = np.cumsum(of_slots)
    total = int(ends[-1])
    assert total < 1 << 32, total
    starts = ends - of_slots
    run_rows = max(run_rows, -(-total // LOADED_RUNS_MAX))
    # A run begins with the first slot that has any behind each so many rows.
    first_places = starts[of_slots > 0]
    bounds = first_places[np.diff(first_places // run_rows, prepend=-1) > 0]
    bounds = np.append(bounds, total)
    runs_rows = [empty(length, WHEEL_DTYPE) for length in np.diff(bounds).tolist()]
    first_seqs, last_seqs = [SEQ_MAX] * len(runs_rows), [0] * len(runs_rows)
    index: list[RowIndexes] = []
    next_places = starts.copy()  # of the next row of each slot
    parts.reverse()
    while parts:
        rows = parts.pop()
        if not len(rows):
            continue
        slots = _slots(rows, slot_ms)
        order = np.argsort(slots, kind="stable")
        counts = _counts(slots, count)
        shifts = next_places - (np.cumsum(counts) - counts)
        places = np.arange(len(rows)) + shifts[slots[order]]
        next_places += counts
        by_slot = select(rows, order)
        cuts = np.searchsorted(places, bounds).tolist()
        for number, (start, end) in enumerate(pairwise(cuts)):
            if start == end:
                continue
            here = by_slot[start:end]
            as_bytes(runs_rows[number])[places[start:end] - bounds[number]] = as_bytes(here)
            first_seqs[number] = min(first_seqs[number], int(here["seq"].min()))
            last_seqs[number] = max(last_seqs[number], int(here["seq"].max()))
        index.append(_places_of(rows["seq"], order, places, empty))
    runs = []
    for number, (first, last) in enumerate(pairwise(bounds.tolist())):
        pointers = np.zeros(count + 1, np.uint32)
        pointers[1:] = np.clip(ends, first, last) - first
        runs.append(Stretch(runs_rows[number], pointers, first_seqs[number], last_seqs[number]))
    return runs, index


def _places_of(
    seqs: NDArray[np.uint64], order: NDArray[np.intp], places: NDArray[np.intp], empty: Empty
) -> RowIndexes:
    """`places`: of the rows in that order (all of shape n)."""
    made = RowIndexes(empty(len(seqs), np.uint64), empty(len(seqs), np.uint32))
    made.seqs[:], made.places[order] = seqs, places
    if (made.seqs[1:] < made.seqs[:-1]).any():  # rows are filed in the order of their seqs, mostly
        by_seq = np.argsort(made.seqs)
        made.seqs[:], made.places[:] = made.seqs[by_seq], made.places[by_seq]
    return made


def _slots(rows: Rows, slot_ms: int) -> NDArray[np.uint16]:
    return (rows["due_offset_ms"] // slot_ms).astype(np.uint16)


def _counts(slots: NDArray[np.uint16], count: int) -> NDArray[np.intp]:
    return np.bincount(slots, minlength=count)


def _match(
    seqs: NDArray[np.uint64], wanted: NDArray[np.uint64]
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Where in `seqs` the wanted ones are, which are ascending; and which of them each is."""
    if not len(wanted):
        return np.empty(0, np.intp), np.empty(0, np.intp)
    # Messages that are cancelled together were often published together: the range excludes most.
    near = np.flatnonzero((seqs >= wanted[0]) & (seqs <= wanted[-1]))
    which = np.searchsorted(wanted, seqs[near])
    hits = wanted[which] == seqs[near]
    return near[hits], which[hits]


def _find_in_slots(
    run: Stretch, slots: NDArray[np.int64], seqs: NDArray[np.uint64]
) -> Iterator[tuple[Rows, NDArray[np.intp], NDArray[np.intp]]]:
    """Where rows are whose slots and seqs (ascending) are these, both of shape n: rows of the run,
    the indexes in them, and which of `seqs` each is."""
    asked, which = np.unique(slots, return_inverse=True)
    starts = run.pointers[asked].astype(np.intp)
    counts = run.pointers[asked + 1].astype(np.intp) - starts
    total = int(counts.sum())
    if total > SLOT_ROWS_FEW * len(seqs):
        # Slots are long: each is searched only for the rows wanted from it.
        order = np.argsort(which, kind="stable")
        wanted = np.split(order, np.flatnonzero(np.diff(which[order])) + 1)
        for start, count, here in zip(starts.tolist(), counts.tolist(), wanted, strict=True):
            if not count:
                continue  # it is in another run
            rows = run.rows[start : start + count]
            hits, found = _match(rows["seq"], seqs[here])
            yield rows, hits, here[found]
    elif total:
        skipped = starts - (np.cumsum(counts) - counts)
        index = np.arange(total) + np.repeat(skipped, counts)
        hits, found = _match(run.rows["seq"][index], seqs)
        yield run.rows, index[hits], found


class _OpenRows:
    """Rows of opened slots in due order; a small fresh part keeps single inserts cheap."""

    def __init__(self) -> None:
        self._due_ms: list[NDArray[np.int64]] = [np.empty(0, np.int64), np.empty(0, np.int64)]
        self._rows: list[Rows] = [np.empty(0, WHEEL_DTYPE), np.empty(0, WHEEL_DTYPE)]

    def __len__(self) -> int:
        return sum(len(rows) for rows in self._rows)

    def add(self, hour: int, rows: Rows) -> None:
        due_ms = rows["due_offset_ms"].astype(np.int64) + hour * HOUR_MS
        part = 1 if len(self._rows[1]) + len(rows) <= FRESH_ROWS else 0
        if part == 0 and len(self._rows[1]):
            due_ms = np.concatenate([self._due_ms[1], due_ms])
            rows = concatenate([self._rows[1], rows], WHEEL_DTYPE)
            self._due_ms[1], self._rows[1] = due_ms[:0], rows[:0]
        due_ms = np.concatenate([self._due_ms[part], due_ms])
        rows = concatenate([self._rows[part], rows], WHEEL_DTYPE)
        order = np.lexsort((rows["seq"], due_ms))
        self._due_ms[part], self._rows[part] = due_ms[order], select(rows, order)

    def next_ms(self) -> int | None:
        return min((int(due_ms[0]) for due_ms in self._due_ms if len(due_ms)), default=None)

    def pop_due(self, now_ms: int, rows_max: int, routes_max: int) -> list[FiredRows]:
        """Remove and return rows with due ≤ now: up to `rows_max`, of up to `routes_max` routes."""
        due_parts = [bool(len(due_ms)) and due_ms[0] <= now_ms for due_ms in self._due_ms]
        if all(due_parts):
            self._merge()
            due_parts[1] = False
        part = 1 if due_parts[1] else 0
        count = int(np.searchsorted(self._due_ms[part], now_ms, side="right"))
        count = _of_routes(self._rows[part]["route"][: min(count, rows_max)], routes_max)
        due_ms, rows = self._due_ms[part][:count], self._rows[part][:count]
        self._due_ms[part] = self._due_ms[part][count:]
        self._rows[part] = self._rows[part][count:]
        present = rows["seq"] != 0
        if not present.all():
            due_ms, rows = due_ms[present], select(rows, present)
        if not len(rows):
            return []
        hours = due_ms // HOUR_MS
        cuts = np.flatnonzero(np.diff(hours)) + 1
        pieces = np.split(rows, cuts)
        starts = [0, *cuts.tolist()]
        return [
            FiredRows(int(hours[start]), piece) for start, piece in zip(starts, pieces, strict=True)
        ]

    def _merge(self) -> None:
        due_ms = np.concatenate(self._due_ms)
        rows = concatenate(self._rows, WHEEL_DTYPE)
        order = np.lexsort((rows["seq"], due_ms))
        self._due_ms = [due_ms[order], np.empty(0, np.int64)]
        self._rows = [select(rows, order), np.empty(0, WHEEL_DTYPE)]

    def parts(self) -> list[Rows]:
        """All rows, as they stand here."""
        return self._rows

    def find(self, seq: int, due_ms: int) -> tuple[Rows, int] | None:
        for all_due_ms, rows in zip(self._due_ms, self._rows, strict=True):
            first = int(np.searchsorted(all_due_ms, due_ms, side="left"))
            last = int(np.searchsorted(all_due_ms, due_ms, side="right"))
            hits = np.flatnonzero(rows["seq"][first:last] == seq)
            if len(hits):
                return rows, first + int(hits[0])
        return None


def _of_routes(routes: NDArray[np.uint32], routes_max: int) -> int:
    """How many of the first rows are of `routes_max` routes, which is nearly always all of them."""
    if len(routes) <= routes_max or (routes == routes[0]).all():
        return len(routes)
    _, firsts = np.unique(routes, return_index=True)
    if len(firsts) <= routes_max:
        return len(routes)
    return int(np.partition(firsts, routes_max)[routes_max])


class Wheel:
    """All loaded hours, and the slots that are open. Hours are loaded in order, without gaps."""

    def __init__(self, now_ms: int, *, slot_ms: int = SLOT_MS) -> None:
        assert HOUR_MS % slot_ms == 0, slot_ms
        self._slot_ms = slot_ms
        self._hours: dict[int, _HourWheel] = {}
        self._open = _OpenRows()
        self._opened_until_ms = now_ms // slot_ms * slot_ms
        """Every slot that begins before this moment has been opened."""

    def load(self, hour: int, runs: list[Stretch]) -> None:
        """Take over the runs of an hour, as `merge_runs` made them. No slot of it was opened."""
        assert hour * HOUR_MS >= self._opened_until_ms, (hour, self._opened_until_ms)
        if runs:
            self._hours.setdefault(hour, _HourWheel()).merged_runs.extend(runs)

    def insert(self, hour: int, rows: Rows) -> None:
        """Add rows of one hour (WHEEL_DTYPE), in any order. They may be due already."""
        start_ms = hour * HOUR_MS
        opened = self._opened_until_ms - start_ms
        if opened > 0:
            passed = rows["due_offset_ms"] < opened
            if passed.all():
                self._open.add(hour, rows)
                return
            if passed.any():
                self._open.add(hour, select(rows, passed))
                rows = select(rows, ~passed)
        wheel = self._hours.setdefault(hour, _HourWheel())
        need = wheel.tail_count + len(rows)
        if need > len(wheel.tail):
            grown = np.empty(max(need, 2 * len(wheel.tail)), WHEEL_DTYPE)
            as_bytes(grown)[: wheel.tail_count] = as_bytes(wheel.tail)[: wheel.tail_count]
            wheel.tail = grown
        as_bytes(wheel.tail)[wheel.tail_count : need] = as_bytes(rows)
        wheel.tail_count = need
        if need >= RUN_ROWS:
            self._freeze_tail(wheel)

    def _freeze_tail(self, wheel: _HourWheel) -> None:
        run = build_run(wheel.tail[: wheel.tail_count], self._slot_ms)
        wheel.tail, wheel.tail_count = np.empty(64, WHEEL_DTYPE), 0
        if len(run.rows) >= MERGED_RUN_ROWS:
            wheel.merged_runs.append(run)
            return
        wheel.runs.append(run)
        if len(wheel.runs) == RUN_MERGE:
            rows = concatenate([run.rows for run in wheel.runs], WHEEL_DTYPE)
            wheel.merged_runs.append(build_run(rows, self._slot_ms))
            wheel.runs = []

    def remove(self, seq: int, due_ms: int) -> Rows | None:
        """Take out one waiting row; returns it (shape 1), or None when it is not here.

        None means that it fired, or was never inserted. The result answers a cancel: a row that was
        taken out cannot fire (I5)."""
        found = self._find(seq, due_ms)
        if found is None:
            return None
        rows, index = found
        row = rows[index : index + 1].copy()
        rows["seq"][index] = 0
        return row

    def remove_many(
        self, hour: int, seqs: NDArray[np.uint64], dues_ms: NDArray[np.int64]
    ) -> tuple[Rows, NDArray[np.intp]]:
        """Take out the waiting rows of one hour that have these seqs and due times.

        `seqs` (ascending) and `dues_ms` have shape n. Returns the rows (WHEEL_DTYPE, shape m), and
        of each the index of its seq (shape m). A row that waits for one subscription alone stays:
        its message is decided about one by one."""
        taken: list[Rows] = []
        which: list[NDArray[np.intp]] = []
        for rows, index, found in self._find_many(hour, seqs, dues_ms):
            whole = rows["route"][index] & ROUTE_SUBSCRIPTION == 0
            taken.append(select(rows, index[whole]))
            which.append(found[whole])
            rows["seq"][index[whole]] = 0
        empty: list[NDArray[np.intp]] = [np.empty(0, np.intp)]
        return concatenate(taken, WHEEL_DTYPE), np.concatenate(empty + which)

    def _find_many(
        self, hour: int, seqs: NDArray[np.uint64], dues_ms: NDArray[np.int64]
    ) -> Iterator[tuple[Rows, NDArray[np.intp], NDArray[np.intp]]]:
        """Where rows are: arrays of rows, the indexes in them, and which of `seqs` each is."""
        is_open = dues_ms < self._opened_until_ms
        if is_open.any():
            wanted = np.flatnonzero(is_open)
            for rows in self._open.parts():
                index, found = _match(rows["seq"], seqs[wanted])
                yield rows, index, wanted[found]
        wheel = self._hours.get(hour)
        if wheel is None or is_open.all():
            return
        closed = np.flatnonzero(~is_open)
        for run in wheel.all_runs():
            near = (seqs[closed] >= run.first_seq) & (seqs[closed] <= run.last_seq)
            wanted = closed[near]
            slots = dues_ms[wanted] % HOUR_MS // self._slot_ms
            for rows, index, found in _find_in_slots(run, slots, seqs[wanted]):
                yield rows, index, wanted[found]
        tail = wheel.tail[: wheel.tail_count]
        index, found = _match(tail["seq"], seqs[closed])
        yield tail, index, closed[found]

    def contains(self, seq: int, due_ms: int) -> bool:
        """Whether a row with that seq and due time waits here."""
        return self._find(seq, due_ms) is not None

    def get(self, seq: int, due_ms: int) -> Rows | None:
        """The row as it waits here (shape 1), or None."""
        found = self._find(seq, due_ms)
        return None if found is None else found[0][found[1] : found[1] + 1]

    def _find(self, seq: int, due_ms: int) -> tuple[Rows, int] | None:
        if due_ms < self._opened_until_ms:
            return self._open.find(seq, due_ms)
        wheel = self._hours.get(due_ms // HOUR_MS)
        if wheel is None:
            return None
        slot = due_ms % HOUR_MS // self._slot_ms
        for run in wheel.all_runs():
            if run.first_seq <= seq <= run.last_seq:
                start, end = run.pointers[slot], run.pointers[slot + 1]
                if start == end:
                    continue
                rows = run.rows[start:end]
                hits = np.flatnonzero(rows["seq"] == seq)
                if len(hits):
                    return rows, int(hits[0])
        tail = wheel.tail[: wheel.tail_count]
        hits = np.flatnonzero(tail["seq"] == seq)
        return (tail, int(hits[0])) if len(hits) else None

    def advance(
        self, now_ms: int, *, loaded_until_ms: int, rows_max: int, routes_max: int = SEQ_MAX
    ) -> list[FiredRows]:
        """Fire the rows that are due at `now_ms`, in due order; at most `rows_max` rows, of at most
        `routes_max` routes, at a time. As long as it `is_behind`, there is more.

        No slot at or after `loaded_until_ms` is opened: its rows have not been loaded, and later
        rows would overtake them."""
        opened = 0
        while self._is_to_open(now_ms, loaded_until_ms) and opened < SLOTS_MAX:
            if len(self._open) >= rows_max:
                break
            opened += self._open_next_slot(min(now_ms, loaded_until_ms))
        return self._open.pop_due(now_ms, rows_max, routes_max)

    def is_behind(self, now_ms: int, loaded_until_ms: int) -> bool:
        """Whether `advance` would find more that is due."""
        first_ms = self._open.next_ms()
        is_due = first_ms is not None and first_ms <= now_ms
        return is_due or self._is_to_open(now_ms, loaded_until_ms)

    def _is_to_open(self, now_ms: int, loaded_until_ms: int) -> bool:
        return self._opened_until_ms <= now_ms and self._opened_until_ms < loaded_until_ms

    def _open_next_slot(self, until_ms: int) -> bool:
        """Open the next slot, or pass over empty ones; whether it was the first."""
        start_ms = self._opened_until_ms
        hour = start_ms // HOUR_MS
        wheel = self._hours.get(hour)
        slot = start_ms % HOUR_MS // self._slot_ms
        next_ms = (hour + 1) * HOUR_MS
        if wheel is not None:
            next_ms = hour * HOUR_MS + wheel.first_slot(slot, self._slot_ms) * self._slot_ms
        # Pass over empty slots at once, but never beyond the moment asked for.
        passed_ms = min(next_ms, until_ms // self._slot_ms * self._slot_ms)
        is_opened = wheel is not None and passed_ms <= start_ms
        if wheel is None or passed_ms > start_ms:
            self._opened_until_ms = max(passed_ms, start_ms + self._slot_ms)
        else:
            self._opened_until_ms = start_ms + self._slot_ms
            self._open_slot(wheel, hour, slot)
        if self._opened_until_ms % HOUR_MS == 0:
            self._hours.pop(hour, None)
        return is_opened

    def _open_slot(self, wheel: _HourWheel, hour: int, slot: int) -> None:
        parts = [
            run.rows[run.pointers[slot] : run.pointers[slot + 1]]
            for run in wheel.all_runs()
            if run.pointers[slot] != run.pointers[slot + 1]
        ]
        if wheel.tail_count:
            tail = wheel.tail[: wheel.tail_count]
            here = tail["due_offset_ms"] // self._slot_ms == slot
            if here.any():
                parts.append(select(tail, here))
        if parts:
            rows = concatenate(parts, WHEEL_DTYPE)
            self._open.add(hour, select(rows, rows["seq"] != 0))
        wheel.give_back(slot)

    def next_ms(self) -> int:
        """When `advance` has something to do again: a row falls due or a slot opens."""
        first_ms = self._open.next_ms()
        if first_ms is None:
            return self._opened_until_ms
        return min(first_ms, self._opened_until_ms)
