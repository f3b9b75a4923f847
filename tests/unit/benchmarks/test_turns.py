"""The benchmark of turns tells the longest one from two looks at the buckets."""

from __future__ import annotations

import pytest
from turns import CASES, figure

INFINITE = float("inf")


@pytest.mark.parametrize(
    ("after", "longest_ms", "over", "reached"),
    [
        ({0.01: 105.0, 0.05: 105.0, 0.1: 106.0, INFINITE: 106.0}, 10.0, 0, True),
        ({0.01: 104.0, 0.05: 105.0, 0.1: 106.0, INFINITE: 106.0}, 50.0, 0, True),
        ({0.01: 100.0, 0.05: 102.0, 0.1: 106.0, INFINITE: 106.0}, 100.0, 3, False),
        ({0.01: 100.0, 0.05: 100.0, 0.1: 101.0, INFINITE: 106.0}, INFINITE, 5, False),
    ],
)
def test_the_longest_turn_between_two_looks(
    after: dict[float, float], longest_ms: float, over: int, reached: bool
) -> None:
    before = {0.01: 100.0, 0.05: 100.0, 0.1: 101.0, INFINITE: 101.0}
    found = figure("batch", 10_000, before, after)
    assert (found.value, found.reached) == (longest_ms, reached)
    assert found.note.startswith(f"{over} of {after[INFINITE] - 101:.0f} turns")


def test_each_case_says_what_it_does() -> None:
    assert {name: begin.__name__ for name, (begin, _) in CASES.items()} == {
        name: name for name in CASES
    }
