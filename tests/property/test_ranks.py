"""Rows by priority, against a list that is sorted."""

from __future__ import annotations

from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from delayserver.delivery.lane import Room
from delayserver.delivery.ranks import Ranks
from tests.unit.delivery.test_ranks import fired
from tests.unit.fakes import START_MS, seqs

steps = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.lists(st.integers(0, 9), min_size=1, max_size=5)),
        st.tuples(st.just("insert"), st.lists(st.integers(0, 9), min_size=1, max_size=5)),
        st.tuples(st.just("pop"), st.lists(st.just(0), max_size=6)),
    ),
    max_size=30,
)


@given(steps)
def test_a_backlog_has_one_order(steps: list[tuple[str, list[int]]]) -> None:
    ranks, seq = Ranks(), count(1)
    waiting: list[tuple[int, int]] = []
    """Seq and priority, as they leave: Python's sort keeps the order of equals."""
    for step, numbers in steps:
        if step == "pop":
            expected, waiting = waiting[: len(numbers)], waiting[len(numbers) :]
            assert seqs(ranks.pop(Room(len(numbers), 1 << 40))) == [one for one, _ in expected]
        else:
            ranked = [(next(seq), priority) for priority in numbers]
            add = ranks.push if step == "push" else ranks.insert
            add(fired(*ranked, due_ms=START_MS + 10 * ranked[0][0]))
            waiting += ranked
            waiting.sort(key=lambda one: -one[1])
        assert ranks.count == len(waiting)
        assert seqs(ranks.slices()) == [one for one, _ in waiting]
        assert ranks.priorities == sorted({0, *(one for _, one in waiting)}, reverse=True)
