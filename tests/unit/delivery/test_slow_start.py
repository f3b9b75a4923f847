"""Slow start: how many requests of a queue may leave, with answers and without."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from delayserver.delivery.slow_start import AT_ONCE, SlowStart


def test_without_answers_one_more_may_leave_each_millisecond() -> None:
    start = SlowStart()
    start.begin(start.room(1000))
    assert [start.room(1000 + ms) for ms in (0, 1, 5)] == [0, 1, 5]
    start.begin(5)
    assert start.room(1005) == 0
    assert start.room(9000) == AT_ONCE


def test_each_answer_lets_another_one_leave_at_once() -> None:
    start = SlowStart()
    for ms in range(10):
        start.begin(start.room(ms))
    assert start.room(10) == 1
    start.on_answered(AT_ONCE + 9)
    assert start.room(10) == AT_ONCE + 10


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 100), st.floats(0, 1))))
def test_more_are_out_only_by_what_time_allows(
    steps: list[tuple[int, int, float]],
) -> None:
    """Requests that end without an answer give nothing back."""
    start, now_ms, unanswered, out = SlowStart(), 0, 0, 0
    for passed_ms, wanted, answered in steps:
        now_ms += passed_ms
        count = min(wanted, start.room(now_ms))
        start.begin(count)
        out += count
        start.on_answered(some := int(out * answered))
        out -= some
        unanswered, out = unanswered + out // 2, out - out // 2
        assert unanswered + out <= AT_ONCE + now_ms
