"""A token bucket keeps a rate over time, whatever comes at once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayserver.timers.rates import TokenBucket


def test_a_full_bucket_gives_its_burst_at_once() -> None:
    bucket = TokenBucket(rate_per_s=2, burst=3)
    for _ in range(3):
        assert bucket.wait_s(100.0) == 0
        bucket.take(1, 100.0)
    assert bucket.wait_s(100.0) == pytest.approx(0.5)
    assert bucket.wait_s(100.5) == 0


def test_it_never_holds_more_than_its_burst() -> None:
    bucket = TokenBucket(rate_per_s=10, burst=2)
    bucket.take(0, 0.0)
    bucket.take(2, 1000.0)
    assert bucket.wait_s(1000.0) == pytest.approx(0.1)


def test_who_overdraws_it_waits_for_all_of_it() -> None:
    bucket = TokenBucket(rate_per_s=10, burst=5)
    bucket.take(105, 0.0)
    assert bucket.wait_s(0.0) == pytest.approx(10.1)
    assert bucket.wait_s(10.1 + 1e-9) == 0


def test_a_clock_that_stands_or_goes_back_earns_nothing() -> None:
    bucket = TokenBucket(rate_per_s=1, burst=1)
    bucket.take(1, 50.0)
    assert bucket.wait_s(50.0) == bucket.wait_s(10.0) == 1
    assert bucket.wait_s(50.0) == 1  # nor is what was earned until then earned again


@given(
    rate=st.floats(0.1, 1000),
    burst=st.integers(1, 100),
    gaps=st.lists(st.floats(0, 5), max_size=200),
)
def test_no_window_sees_more_than_burst_and_rate_allow(
    rate: float, burst: int, gaps: list[float]
) -> None:
    bucket = TokenBucket(rate, burst)
    now_s, taken = 0.0, 0
    for gap in gaps:
        now_s += gap
        if bucket.wait_s(now_s) == 0:
            bucket.take(1, now_s)
            taken += 1
        assert taken <= burst + rate * now_s + 1e-6


def test_what_was_not_used_comes_back_up_to_the_burst() -> None:
    bucket = TokenBucket(rate_per_s=1, burst=4)
    bucket.take(4, 0.0)
    bucket.give_back(3, 0.0)
    assert bucket.available(0.0) == 3
    bucket.give_back(3, 10.0)
    assert bucket.available(10.0) == 4


def test_another_rate_counts_from_now_on() -> None:
    bucket = TokenBucket(rate_per_s=1, burst=10)
    bucket.take(8, 0.0)
    bucket.change(4, 5, 2.0)
    assert bucket.available(2.0) == 4
    assert bucket.available(2.25) == 5
    bucket.change(4, 3, 2.25)
    assert bucket.available(100.0) == 3
