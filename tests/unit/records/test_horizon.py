"""The horizon: what has fallen due, also if the clock was set back."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from delayserver.records.horizon import MARKS_MAX, Horizon, Mark, fallen_due, marks_of

SEQS = st.integers(0, 30)
TIMES_MS = st.integers(0, 30)
MARKS = st.lists(st.builds(Mark, SEQS, TIMES_MS), max_size=MARKS_MAX)
EVERYTHING = [(seq, due_ms) for seq in range(32) for due_ms in range(32)]


def fallen(marks: tuple[Mark, ...] | list[Mark]) -> set[tuple[int, int]]:
    """Which of all small rows have fallen due."""
    seqs, due_ms = (np.array(column) for column in zip(*EVERYTHING, strict=True))
    is_fallen = fallen_due(marks, seqs.astype(np.uint64), due_ms.astype(np.int64)).tolist()
    return {row for row, one in zip(EVERYTHING, is_fallen, strict=True) if one}


def test_the_example_of_the_module() -> None:
    horizon = Horizon()
    assert (horizon.marks, horizon.before_ms) == ((), 0)
    horizon.advance(100, 12_00)
    horizon.advance(107, 10_00)
    assert horizon.marks == (Mark(100, 12_00), Mark(107, 10_00))
    assert horizon.before_ms == 12_00
    horizon.advance(120, 10_01)
    assert horizon.marks == (Mark(100, 12_00), Mark(120, 10_01))
    horizon.advance(230, 12_01)
    assert list(horizon.marks) == [Mark(230, 12_01)]


def test_seqs_that_were_rolled_back_have_not_fallen_due() -> None:
    horizon = Horizon([Mark(7, 90), Mark(9, 50), Mark(12, 40)])
    horizon.roll_back(8)
    assert fallen(horizon.marks) == fallen([Mark(7, 90), Mark(8, 50)])
    horizon.advance(10, 45)
    assert fallen(horizon.marks) == fallen([Mark(7, 90), Mark(8, 50), Mark(10, 45)])


@given(MARKS)
def test_no_mark_is_lost_and_none_says_too_much(marks: list[Mark]) -> None:
    assert fallen(Horizon(marks).marks) == fallen(marks)


@given(MARKS)
def test_each_later_mark_has_a_higher_seq_and_an_earlier_time(marks: list[Mark]) -> None:
    kept = Horizon(marks).marks
    assert [mark.before_ms for mark in kept] == sorted({m.before_ms for m in kept}, reverse=True)
    assert [mark.seq for mark in kept] == sorted(mark.seq for mark in kept)
    assert Horizon(marks).before_ms == max((mark.before_ms for mark in marks), default=0)


@given(st.lists(st.builds(Mark, SEQS, TIMES_MS), min_size=MARKS_MAX, max_size=30))
def test_a_clock_that_is_set_back_all_the_time_leaves_few_marks(marks: list[Mark]) -> None:
    kept = Horizon(marks).marks
    assert len(kept) <= MARKS_MAX
    assert fallen(kept) >= fallen(marks)


@given(st.lists(st.tuples(SEQS, TIMES_MS), max_size=20))
def test_rows_that_fired_make_the_marks_that_they_need(rows: list[tuple[int, int]]) -> None:
    seqs = np.array([seq for seq, _ in rows], np.uint64)
    due_ms = np.array([due for _, due in rows], np.int64)
    marks = marks_of(seqs, due_ms)
    assert fallen(marks) == fallen([Mark(seq, due + 1) for seq, due in rows])
    assert len(marks) <= len(rows)
    assert sorted(marks) == marks
    times_ms = [mark.before_ms for mark in marks]
    assert times_ms == sorted(set(times_ms), reverse=True)
