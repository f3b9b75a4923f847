"""The wheel against a sorted list, for any sequence of calls and any clock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from delayserver.schedule import wheel as wheel_module
from delayserver.schedule.wheel import LOADED_RUNS_MAX, Wheel, build_run, merge_runs
from delayserver.schedule.wheel_rows import WHEEL_DTYPE
from storage.frame import Rows
from storage.rows import HOUR_MS, concatenate

HOURS = 4
SLOT_MS = 60_000
"""Coarse, so that a run through all hours is quick."""


@dataclass
class Load:
    """Load the next hour that is not loaded; what was inserted into it before stays."""

    dues_ms: list[int]


@dataclass
class Insert:
    dues_ms: list[int]


@dataclass
class Remove:
    which: int
    unknown: bool = False


@dataclass
class RemoveMany:
    """Those of one hour among the first so many, some of which may have fired."""

    count: int
    hour: int


@dataclass
class Advance:
    now_ms: int
    rows_max: int = 1000


Step = Load | Insert | Remove | RemoveMany | Advance


class Model:
    """A sorted list of (due, seq): what a wheel is, with no thought of speed."""

    def __init__(self) -> None:
        self.waiting: list[tuple[int, int]] = []

    def add(self, rows: list[tuple[int, int]]) -> None:
        self.waiting = sorted(self.waiting + rows)

    def take(self, now_ms: int, rows_max: int) -> list[tuple[int, int]]:
        due = [row for row in self.waiting if row[0] <= now_ms][:rows_max]
        self.waiting = self.waiting[len(due) :]
        return due


@contextmanager
def small_runs() -> Iterator[None]:
    """Runs so small that freezing and merging happen all the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wheel_module, "RUN_ROWS", 3)
        patch.setattr(wheel_module, "RUN_MERGE", 2)
        patch.setattr(wheel_module, "MERGED_RUN_ROWS", 6)
        patch.setattr(wheel_module, "FRESH_ROWS", 2)
        patch.setattr(wheel_module, "SLOT_ROWS_FEW", 2)
        yield


def rows_of(hour: int, rows: list[tuple[int, int]]) -> Rows:
    return np.array([(seq, seq, due_ms - hour * HOUR_MS, 1) for due_ms, seq in rows], WHEEL_DTYPE)


class Runner:
    """Applies the steps to a wheel and to the model, and compares."""

    def __init__(self) -> None:
        self.wheel = Wheel(0, slot_ms=SLOT_MS)
        self.model = Model()
        self.next_seq = 1
        self.loaded_hours = 0
        self.given: list[tuple[int, int]] = []
        self.fired: list[tuple[int, int]] = []
        self.removed: list[tuple[int, int]] = []

    def number(self, dues_ms: list[int]) -> list[tuple[int, int]]:
        rows = [(due_ms, self.next_seq + index) for index, due_ms in enumerate(dues_ms)]
        self.next_seq += len(rows)
        self.given += rows
        self.model.add(rows)
        return rows

    def apply(self, step: Step) -> None:
        match step:
            case Load(dues_ms=dues_ms):
                self.load(dues_ms)
            case Insert(dues_ms=dues_ms):
                self.insert(dues_ms)
            case Remove(which=which, unknown=unknown):
                self.remove(which, unknown)
            case RemoveMany(count=count, hour=hour):
                self.remove_many(count, hour)
            case Advance(now_ms=now_ms, rows_max=rows_max):
                self.advance(now_ms, rows_max)

    def load(self, dues_ms: list[int]) -> None:
        if self.loaded_hours == HOURS:
            return
        hour = self.loaded_hours
        rows = self.number([hour * HOUR_MS + due_ms % HOUR_MS for due_ms in dues_ms])
        runs, _ = merge_runs([rows_of(hour, rows)], SLOT_MS, run_rows=2)
        self.wheel.load(hour, runs)
        self.loaded_hours += 1

    def insert(self, dues_ms: list[int]) -> None:
        # Rows of hours that are live, loaded or not.
        rows = self.number(dues_ms)
        for hour in sorted({due_ms // HOUR_MS for due_ms, _ in rows}):
            self.wheel.insert(hour, rows_of(hour, [r for r in rows if r[0] // HOUR_MS == hour]))

    def remove(self, which: int, unknown: bool) -> None:
        if not self.given:
            return
        due_ms, seq = self.given[which % len(self.given)]
        waits = (due_ms, seq) in self.model.waiting
        assert self.wheel.contains(seq, due_ms) is waits
        if unknown:
            seq = self.next_seq
            waits = False
        row = self.wheel.remove(seq, due_ms)
        assert (row is not None) is waits
        if row is not None:
            assert row["seq"].tolist() == row["locator"].tolist() == [seq]
            self.model.waiting.remove((due_ms, seq))
            self.removed.append((due_ms, seq))

    def remove_many(self, count: int, hour: int) -> None:
        wanted = [(seq, due_ms) for due_ms, seq in self.given[:count] if due_ms // HOUR_MS == hour]
        wanted.append((self.next_seq, hour * HOUR_MS))
        seqs = np.array([seq for seq, _ in sorted(wanted)], np.uint64)
        dues = np.array([due_ms for _, due_ms in sorted(wanted)], np.int64)
        rows, which = self.wheel.remove_many(hour, seqs, dues)
        found = sorted(zip(dues[which].tolist(), seqs[which].tolist(), strict=True))
        assert found == [one for one in self.model.waiting if one[::-1] in wanted]
        assert rows["seq"].tolist() == rows["locator"].tolist() == seqs[which].tolist()
        assert (rows["due_offset_ms"] + hour * HOUR_MS).tolist() == dues[which].tolist()
        for one in found:
            self.model.waiting.remove(one)
            self.removed.append(one)

    def advance(self, now_ms: int, rows_max: int) -> None:
        loaded_until_ms = self.loaded_hours * HOUR_MS
        batches = self.wheel.advance(now_ms, loaded_until_ms=loaded_until_ms, rows_max=rows_max)
        fired = [
            (batch.hour * HOUR_MS + offset_ms, seq)
            for batch in batches
            for seq, _, offset_ms, _ in batch.rows.tolist()
        ]
        assert len(fired) <= rows_max
        # Rows that were removed may stand among the first: then fewer fire, and it is called again.
        expected = self.model.take(min(now_ms, loaded_until_ms - 1), len(fired))
        assert fired == expected
        self.fired += fired
        next_ms = self.wheel.next_ms()
        if self.model.waiting:
            assert next_ms <= self.model.waiting[0][0]

    def finish(self) -> None:
        while self.loaded_hours < HOURS:
            self.load([])
        for _ in range(2 * len(self.given) + 2):
            self.advance(HOURS * HOUR_MS, 1000)
        assert self.model.waiting == []
        assert sorted(self.fired + self.removed) == sorted(self.given)


# Times near the borders of hours and slots, and close to each other, are the interesting ones.
borders = st.sampled_from(range(HOURS)).flatmap(
    lambda hour: st.integers(-3, 3).map(lambda by_ms: max(0, hour * HOUR_MS + by_ms))
)
times_ms = st.one_of(
    borders,
    st.integers(0, 4 * SLOT_MS),
    st.integers(HOUR_MS - 2 * SLOT_MS, HOUR_MS + 2 * SLOT_MS),
    st.integers(0, HOURS * HOUR_MS - 1),
)
dues_ms = st.lists(times_ms, min_size=1, max_size=8)
steps = st.lists(
    st.one_of(
        st.builds(Load, st.lists(times_ms, max_size=8)),
        st.builds(Insert, dues_ms),
        st.builds(Remove, st.integers(0, 50), st.booleans()),
        st.builds(RemoveMany, st.integers(0, 40), st.integers(0, HOURS - 1)),
        st.builds(Advance, times_ms, st.sampled_from([1, 3, 1000])),
    ),
    max_size=25,
)


@settings(deadline=None, max_examples=300)
@given(steps)
@example([Insert([0, SLOT_MS]), Load([]), Advance(SLOT_MS), Advance(0), Insert([1])])
@example([Load([5]), Load([1]), Advance(2 * HOUR_MS), Insert([HOUR_MS - 1]), Advance(HOUR_MS)])
def test_a_wheel_is_a_sorted_list(steps: list[Step]) -> None:
    with small_runs():
        runner = Runner()
        for step in steps:
            runner.apply(step)
        runner.finish()


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, HOUR_MS - 1), max_size=50), st.sampled_from([250, 500, 60_000]))
def test_a_run_holds_every_row_in_its_slot(offsets_ms: list[int], slot_ms: int) -> None:
    rows = rows_of(0, [(offset_ms, seq) for seq, offset_ms in enumerate(offsets_ms, 1)])
    run = build_run(rows, slot_ms)
    assert len(run.pointers) == HOUR_MS // slot_ms + 1
    assert run.pointers[-1] == len(rows)
    slots = np.repeat(np.arange(HOUR_MS // slot_ms), np.diff(run.pointers))
    assert (run.rows["due_offset_ms"] // slot_ms == slots).all()
    assert run.rows["seq"].tolist() == [
        seq
        for _, seq in sorted((offset_ms // slot_ms, seq) for seq, _, offset_ms, _ in rows.tolist())
    ]


@settings(deadline=None, max_examples=100)
@given(st.lists(st.lists(st.integers(0, 3_000), max_size=20), max_size=5), st.integers(1, 101))
def test_the_runs_of_parts_are_those_of_all_rows(
    parts_offsets_ms: list[list[int]], run_rows: int
) -> None:
    seqs = iter(range(1, 200))
    parts = [rows_of(0, [(ms, next(seqs)) for ms in part]) for part in parts_offsets_ms]
    whole = build_run(concatenate(parts, WHEEL_DTYPE))
    runs, index = merge_runs(parts, run_rows=run_rows)
    assert not parts, "whatever was merged is given back"
    rows = concatenate([run.rows for run in runs], WHEEL_DTYPE)
    assert rows.tobytes() == whole.rows.tobytes()
    counts = sum((np.diff(run.pointers.astype(int)) for run in runs), np.zeros(7_200, int))
    assert counts.tolist() == np.diff(whole.pointers).tolist()
    for run in runs:
        assert run.rows.tobytes() == build_run(run.rows).rows.tobytes()
        slots = run.rows["due_offset_ms"] // 500
        assert (np.diff(run.pointers)[np.unique(slots)] > 0).all()
        assert (run.first_seq, run.last_seq) == (run.rows["seq"].min(), run.rows["seq"].max())
        # Without its last slot it is not full, and a slot is in one run alone.
        assert (slots < slots.max()).sum() < max(run_rows, -(-len(rows) // LOADED_RUNS_MAX))
    last_first = [(run.rows["due_offset_ms"] // 500)[[0, -1]].tolist() for run in runs]
    assert all(before[1] < after[0] for before, after in pairwise(last_first))
    for part in index:
        assert (np.diff(part.seqs.astype(int)) > 0).all()
        assert rows["seq"][part.places].tolist() == part.seqs.tolist()
    assert sum(len(part.seqs) for part in index) == len(rows)
