"""Deadlines: none expires early, and each once its step is over."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayserver.delivery.backlog import Backlog, Instant
from delayserver.delivery.deadlines import LEFT_MAX, PART_MAX, STEP_MS, Deadlines
from delayserver.delivery.deliveries import NEVER_MS
from delayserver.delivery.lane import Room
from delayserver.schedule.wheel_rows import ROUTE_OPTIONS, FiredRows
from tests.unit.fakes import HOUR, START_MS, seqs, subscription, wheel_rows


def add(deadlines: Deadlines, *pairs: tuple[int, int]) -> None:
    """Pairs of seq and moment."""
    numbers = np.array([seq for seq, _ in pairs], np.uint64)
    deadlines.add(numbers, np.array([moment for _, moment in pairs], np.int64))


def test_rows_are_read_in_the_order_in_which_they_came_unless_all_have_left() -> None:
    deadlines = Deadlines()
    assert not deadlines
    for seq in (1, 2, 3):
        deadlines.note(FiredRows(HOUR, wheel_rows(HOUR, (seq, START_MS))))
    assert deadlines and deadlines.are_unread
    assert seqs(deadlines.next_unread(Room(2, 1000))) == [1, 2]
    deadlines.forget_unread()
    assert not deadlines


def test_what_comes_back_again_and_again_is_kept_once() -> None:
    deadlines = Deadlines()
    for _ in range(1000):
        add(deadlines, (7, START_MS), (8, START_MS))
    assert deadlines.count < 100
    assert set(deadlines.pop(START_MS, 10_000).tolist()) == {7, 8}


def test_no_part_becomes_too_long_to_be_sorted_in_a_turn() -> None:
    deadlines, count = Deadlines(), 5 * PART_MAX
    for first in range(0, count, 4096):
        add(deadlines, *[(seq, START_MS + count - seq) for seq in range(first, first + 4096)])
    assert count / PART_MAX <= len(deadlines.parts_rows) <= 10
    assert max(deadlines.parts_rows) <= PART_MAX
    assert len(deadlines.pop(START_MS + count + STEP_MS, 2 * count)) == count


def test_what_never_expires_is_not_kept() -> None:
    deadlines = Deadlines()
    add(deadlines, (7, NEVER_MS))
    assert not deadlines


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 1000)), max_size=60),
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 9)), max_size=20),
)
def test_each_expires_in_its_time(
    pairs: list[tuple[int, int]], looks: list[tuple[int, int]]
) -> None:
    deadlines, now_ms = Deadlines(), 0
    known: set[tuple[int, int]] = set()
    """Moments and seqs that were added: a row that came back may be popped once more."""
    waiting: set[tuple[int, int]] = set()
    for index, (by_ms, most) in enumerate(looks):
        now_ms += by_ms
        here = pairs[index * 3 : index * 3 + 3]
        add(deadlines, *here)
        new = {(-(-moment // STEP_MS) * STEP_MS, seq) for seq, moment in here}
        known |= new
        waiting |= new
        popped = deadlines.pop(now_ms, most).tolist()
        over = {one for one in known if one[0] <= now_ms}
        assert len(popped) <= most and {seq for _, seq in over} >= set(popped)
        waiting -= {one for one in over if one[1] in popped}  # Its row leaves, and only once.
        assert len(popped) == most or not [one for one in waiting if one[0] <= now_ms]
        if len(popped) < most:
            assert deadlines.next_ms(now_ms) == min((at for at, _ in waiting), default=None)


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 1000)), max_size=60),
    st.sets(st.integers(1, 20)),
)
def test_deadlines_of_rows_that_have_left_are_let_go(
    pairs: list[tuple[int, int]], waiting: set[int]
) -> None:
    deadlines = Deadlines()
    for pair in pairs:
        add(deadlines, pair)
    for _ in range(10):  # More parts than there are.
        if deadlines.count:
            rows = wheel_rows(HOUR, *[(seq, START_MS) for seq in sorted(waiting)])
            deadlines.let_go([FiredRows(HOUR, rows)] if waiting else [])
    expected = {seq for seq, _ in pairs} & waiting
    assert set(deadlines.pop(10_000, 100).tolist()) == expected


def test_the_deadlines_of_what_was_settled_long_ago_do_not_stay() -> None:
    """Each message waits for a moment and has a week to live."""
    backlog = Backlog(subscription(1), 0)
    for first in range(1, 10 * LEFT_MAX, 512):
        numbers = range(first, first + 512)
        rows = wheel_rows(HOUR, *[(seq, START_MS) for seq in numbers], route=1 | ROUTE_OPTIONS)
        backlog.push(FiredRows(HOUR, rows))
        assert backlog.deadlines is not None
        add(backlog.deadlines, *[(seq, START_MS + 600_000_000 + seq) for seq in numbers])
        backlog.pop(512, 1 << 30, Instant(START_MS, 0))
        backlog.let_go()
        assert backlog.deadlines.count <= LEFT_MAX


def test_rows_that_leave_a_long_queue_are_not_looked_for_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backlog, looks = Backlog(subscription(1), 0), 0
    let_go = Deadlines.let_go

    def counting(self: Deadlines, slices: Iterable[FiredRows]) -> None:
        nonlocal looks
        looks += 1
        let_go(self, slices)

    monkeypatch.setattr(Deadlines, "let_go", counting)
    count = 4 * PART_MAX
    numbers = np.random.default_rng(0).permutation(np.arange(1, count + 1))
    for first in range(0, count, 4096):
        some = sorted(numbers[first : first + 4096].tolist())
        rows = wheel_rows(HOUR, *[(seq, START_MS) for seq in some], route=1 | ROUTE_OPTIONS)
        backlog.push(FiredRows(HOUR, rows))
        assert backlog.deadlines is not None
        add(backlog.deadlines, *[(seq, START_MS + 600_000_000 + seq) for seq in some])
    while backlog.count:
        backlog.pop(256, 1 << 30, Instant(START_MS, 0))
        backlog.let_go()
        assert backlog.deadlines is not None
        assert backlog.deadlines.count <= LEFT_MAX + backlog.count * 5 // 4 + PART_MAX
    assert looks < 20, "in all, while 512 times some left"
