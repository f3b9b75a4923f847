"""Subjects and patterns."""

import pytest

from delayserver.records.subjects import is_pattern, matches


@pytest.mark.parametrize(
    ("pattern", "subject", "wanted"),
    [
        ("*", "a", True),
        ("*", "a.b.c", True),
        ("a", "a", True),
        ("a", "a.b", False),
        ("a", "ab", False),
        ("a.*", "a.b", True),
        ("a.*", "a.b.c", True),
        ("a.*", "a", False),
        ("a.*", "ab.c", False),
        # A pattern within another one.
        ("*", "a.*", True),
        ("*", "*", True),
        ("a.*", "a.*", True),
        ("a.*", "a.b.*", True),
        ("a.b.*", "a.*", False),
        ("a.*", "*", False),
        ("a", "a.*", False),
    ],
)
def test_what_a_pattern_stands_for(pattern: str, subject: str, wanted: bool) -> None:
    assert matches(pattern, subject) is wanted


@pytest.mark.parametrize("text", ["*", "a", "a.b", "a.*", "order.unpaid.*", "A_b-c.1"])
def test_patterns(text: str) -> None:
    assert is_pattern(text)


@pytest.mark.parametrize("text", ["", ".*", "a*", "*.a", "a.*.b", "a b", "-a", "a\n", "x" * 129])
def test_what_is_none(text: str) -> None:
    assert not is_pattern(text)
