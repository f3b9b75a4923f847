"""A sample is what the variable asks for, and the same in every run."""

import pytest

from tests.depth import SIMULATION, VARIABLE, every, is_whole, least, missing_max


@pytest.mark.parametrize(
    ("named", "whole"),
    [
        (None, True),
        ("all", True),
        ("simulation", True),
        ("crash, simulation", True),
        ("none", False),
        ("", False),
        ("crash", False),
        ("simulations", False),
    ],
)
def test_a_tier_is_whole_if_it_is_named(
    named: str | None, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if named is None:
        monkeypatch.delenv(VARIABLE, raising=False)
    else:
        monkeypatch.setenv(VARIABLE, named)
    assert is_whole(SIMULATION) is whole
    assert every(7, range(16)) == (list(range(16)) if whole else [0, 7, 14])
    assert least(5) == (5 if whole else 1)
    assert missing_max(range(9)) == (0 if whole else 2)


def test_a_sample_has_the_first_of_however_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "none")
    assert every(7, "a") == ["a"]
    assert every(7, "") == []
