"""Rows that wait: in few arrays, however they came; and how many leave together."""

from __future__ import annotations

import random
from itertools import groupby

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayserver.delivery.lane import SLICE_ROWS_MAX, Lane, Room
from delayserver.records.message import ScheduleEntry
from delayserver.schedule.wheel_rows import WHEEL_DTYPE, FiredRows
from storage.rows import HOUR_MS
from tests.unit.fakes import HOUR, START_MS, seqs, wheel_rows


def one(seq: int, hour: int = HOUR) -> FiredRows:
    return FiredRows(hour, wheel_rows(hour, (seq, hour * HOUR_MS + seq)))


def many(first_seq: int, count: int) -> FiredRows:
    rows = np.zeros(count, WHEEL_DTYPE)
    rows["seq"] = rows["due_offset_ms"] = np.arange(first_seq, first_seq + count)
    return FiredRows(HOUR, rows)


@pytest.mark.parametrize("count", [1, 1000, 40_000])
def test_rows_that_come_one_by_one_stand_in_few_slices(count: int) -> None:
    lane = Lane()
    for seq in range(1, count + 1):
        lane.push(one(seq))
    assert lane.count == count
    # Full ones, at least half as long as one may be, and each of the others half of the one before.
    assert len(lane.slices) <= 2 * count / SLICE_ROWS_MAX + np.log2(SLICE_ROWS_MAX) + 1
    assert seqs(lane.slices) == list(range(1, count + 1))


def test_a_look_for_a_row_searches_the_slices_alone_that_may_hold_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lane = Lane()
    for first_seq in range(1, 1_000_000, 5000):
        lane.push(many(first_seq, 5000))
    searched: list[int] = []
    search = np.flatnonzero

    def noted(mask: np.ndarray) -> np.ndarray:
        searched.append(len(mask))
        return search(mask)

    monkeypatch.setattr(np, "flatnonzero", noted)
    assert len(lane.slices) <= 110
    for seq in (1, 777_777, 1_000_000):
        assert lane.holds(ScheduleEntry(seq, START_MS + seq))
    assert not lane.holds(ScheduleEntry(1_000_001, START_MS + 1_000_001))
    assert not lane.holds(ScheduleEntry(5, START_MS + HOUR_MS + 5))
    assert len(searched) == 3
    assert max(searched) <= SLICE_ROWS_MAX


def test_what_comes_back_stands_in_few_slices_too_and_in_front() -> None:
    lane = Lane()
    lane.push(one(1001))
    for seq in range(1000, 0, -1):
        lane.insert(one(seq))
    assert len(lane.slices) <= 11
    assert seqs(lane.pop(Room(2000, 1))) == list(range(1, 1002))


def test_rows_of_two_hours_are_not_mixed() -> None:
    lane = Lane()
    for seq in range(1, 9):
        lane.push(one(seq, HOUR + seq % 2))
    assert [(fired.hour, len(fired.rows)) for fired in lane.slices] == [
        (HOUR + seq % 2, 1) for seq in range(1, 9)
    ]


def test_any_order_of_calls_against_a_list() -> None:
    rng = random.Random(7)
    lane, expected = Lane(), list[int]()
    taken: list[FiredRows] = []
    next_seq = 1
    for _ in range(3000):
        match rng.choice(("push", "push", "pop", "back", "find")):
            case "push":
                count = rng.choice((1, 1, 3, 50))
                lane.push(many(next_seq, count))
                expected += range(next_seq, next_seq + count)
                next_seq += count
            case "pop":
                count = rng.choice((1, 7, 200))
                taken = lane.pop(Room(count, 1))
                assert seqs(taken) == expected[:count]
                del expected[:count]
            case "back":
                expected[:0] = seqs(taken)
                for fired in reversed(taken):
                    lane.insert(fired)
                taken = []
            case _:
                for seq in rng.sample(range(1, next_seq + 2), min(5, next_seq)):
                    assert lane.holds(ScheduleEntry(seq, START_MS + seq)) == (seq in expected)
        assert lane.count == len(expected)
    assert seqs(lane.slices) == expected


def test_a_lane_goes_behind_another_as_it_is() -> None:
    late, fresh = Lane(), Lane()
    late.push(many(1, 10))
    fresh.push(many(11, 1000))
    [slice_of_fresh] = fresh.slices
    late.extend(fresh)
    assert late.slices[-1] is slice_of_fresh
    assert seqs(late.pop(Room(2000, 1))) == list(range(1, 1011))


def test_the_first_row_leaves_however_long_it_is_and_the_next_if_it_fits() -> None:
    lane = Lane()
    rows = wheel_rows(HOUR, *((seq, START_MS) for seq in range(1, 6)))
    rows["locator"] = np.array([100, 10, 20, 30, 0], np.uint64) + np.uint64(9 << 24)
    lane.push(FiredRows(HOUR, rows))
    assert [seqs(lane.pop(Room(9, 50))) for _ in range(4)] == [[1], [2, 3], [4, 5], []]
    lane.push(FiredRows(HOUR, rows))
    room = Room(9, 130)
    assert seqs(lane.pop(room)) == [1, 2, 3]
    assert seqs(lane.pop(room)) == [], "what did not fit is not overtaken"


def test_rows_are_taken_out_wherever_they_stand() -> None:
    lane = Lane()
    for first in (1, 100, 110):
        lane.push(FiredRows(HOUR, wheel_rows(HOUR, *((first + at, START_MS) for at in range(9)))))
    lane.push(FiredRows(HOUR + 1, wheel_rows(HOUR + 1, (200, START_MS + HOUR_MS))))
    taken = lane.take(np.array([3, 114, 200, 7, 999], np.uint64))
    assert sorted(seqs(taken)) == [3, 7, 114, 200]
    expected = [seq for first in (1, 100, 110) for seq in range(first, first + 9)]
    expected = [seq for seq in expected if seq not in (3, 7, 114)]
    assert lane.count == len(expected)
    assert seqs(lane.pop(Room(99, 1 << 40))) == expected
    assert lane.take(np.empty(0, np.uint64)) == []


@given(
    lengths=st.lists(st.integers(1, 9), max_size=8),
    moves=st.lists(st.tuples(st.integers(1, 12), st.randoms(use_true_random=False)), max_size=8),
)
def test_what_comes_back_in_any_order_stands_by_due_time_and_seq(
    lengths: list[int], moves: list[tuple[int, random.Random]]
) -> None:
    lane, seq = Lane(), 1
    expected: list[int] = []
    for length in lengths:
        # Three rows fall due in each millisecond, and an hour has seven rows.
        for hour, of_hour in groupby(range(seq, seq + length), key=lambda one: one // 7):
            lane.push(
                FiredRows(
                    HOUR + hour,
                    wheel_rows(
                        HOUR + hour,
                        *((one, START_MS + hour * HOUR_MS + one // 3) for one in of_hour),
                    ),
                )
            )
        expected += range(seq, seq + length)
        seq += length
    for count, chance in moves:
        taken = lane.pop(Room(count, 1))
        single = [
            FiredRows(fired.hour, fired.rows[at : at + 1])
            for fired in taken
            for at in range(len(fired.rows))
        ]
        chance.shuffle(single)
        for fired in single:
            lane.insert(fired)
        assert seqs(lane.slices) == expected
        assert lane.count == len(expected)
