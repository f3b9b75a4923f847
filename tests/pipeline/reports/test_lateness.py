"""Buckets of lateness."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from delayserver.pipeline.reports.lateness import bucket_of, upper_ms

VALUES = st.integers(0, 1 << 46)


@given(st.lists(VALUES, min_size=1))
def test_a_bucket_holds_its_values_and_little_more(values: list[int]) -> None:
    array = np.array(values)
    upper = upper_ms(bucket_of(array))
    assert (upper >= array).all()
    assert (upper - array <= array / 64).all()


@given(VALUES)
def test_buckets_are_in_the_order_of_values_without_gaps(value: int) -> None:
    here, after = bucket_of(np.array([value, value + 1])).tolist()
    assert after in (here, here + 1)


def test_small_values_are_exact_and_negative_ones_count_as_zero() -> None:
    array = np.arange(128)
    assert upper_ms(bucket_of(array)).tolist() == array.tolist()
    assert bucket_of(np.array([-5])).tolist() == [0]
