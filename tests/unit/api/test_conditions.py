"""If-Match and If-None-Match as RFC 9110 writes them."""

from __future__ import annotations

import pytest

from delayserver.api.conditions import entity_tag, expected_versions, is_known, wants_new
from delayserver.errors import InputError


@pytest.mark.parametrize(
    ("text", "versions"),
    [
        ('"17"', {"17"}),
        ('"17", "18.1" ,"19"', {"17", "18.1", "19"}),
        ('W/"17"', set()),
        ('W/"17", "18"', {"18"}),
        ('""', {""}),
    ],
)
def test_the_tags_of_if_match(text: str, versions: set[str]) -> None:
    assert expected_versions(text) == versions


def test_a_star_is_any_version_and_nothing_is_no_condition() -> None:
    anything = expected_versions(" * ")
    assert anything is not None
    assert "17" in anything
    assert expected_versions(None) is None


def test_a_tag_is_understood_again() -> None:
    assert expected_versions(entity_tag("17.1")) == {"17.1"}


@pytest.mark.parametrize("text", ["", "17", '"17', '"17",', '"1"7"', 'w/"17"', '"a b"', '*, "1"'])
def test_what_is_no_tag_is_refused(text: str) -> None:
    with pytest.raises(InputError) as caught:
        expected_versions(text)
    assert caught.value.pointer == "/header/if-match"


def test_only_a_star_makes_sense_for_what_must_be_new() -> None:
    assert wants_new("*") and not wants_new(None)
    with pytest.raises(InputError):
        wants_new('"17"')


@pytest.mark.parametrize(
    ("text", "known"),
    [
        (None, False),
        ("*", True),
        ('"17"', True),
        ('W/"17"', True),
        ('"1", W/"17"', True),
        ('"18"', False),
        ('W/"1", "7"', False),
    ],
)
def test_what_a_reader_has_already(text: str | None, known: bool) -> None:
    assert is_known(text, "17") is known


@pytest.mark.parametrize("text", ["", "17", '"17', '"17",', '*, "17"'])
def test_what_is_no_tag_is_refused_for_reading_too(text: str) -> None:
    with pytest.raises(InputError) as caught:
        is_known(text, "17")
    assert caught.value.pointer == "/header/if-none-match"
