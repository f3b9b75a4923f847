"""Deadlines: none expires early, and each once its step is over."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from delayserver.delivery.deadlines import STEP_MS, Deadlines
from delayserver.delivery.deliveries import NEVER_MS
from delayserver.delivery.lane import Room
from delayserver.schedule.wheel_rows import FiredRows
from tests.unit.fakes import HOUR, START_MS, seqs, wheel_rows


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
    assert sum(map(len, deadlines._buckets[START_MS // STEP_MS])) < 100
    assert set(deadlines.pop(START_MS, 10_000).tolist()) == {7, 8}


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
    waiting: list[tuple[int, int]] = []
    """Moment and seq."""
    for index, (by_ms, most) in enumerate(looks):
        now_ms += by_ms
        here = pairs[index * 3 : index * 3 + 3]
        add(deadlines, *here)
        waiting += [(-(-moment // STEP_MS) * STEP_MS, seq) for seq, moment in here]
        popped = sorted(deadlines.pop(now_ms, most).tolist())
        over = [one for one in sorted(waiting) if one[0] <= now_ms]
        assert len(popped) == min(most, len(over))
        for seq in popped:
            [first, *_] = [one for one in over if one[1] == seq]
            waiting.remove(first)
            over.remove(first)
        # The earliest first: what is left is no earlier than what was given up.
        left = [moment for moment, _ in waiting if moment > now_ms]
        if not over:
            assert deadlines.next_ms(now_ms) == min(left, default=None)
