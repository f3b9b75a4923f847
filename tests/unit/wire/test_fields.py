"""Durations have the limits of their types, and patterns stand for a whole text."""

import msgspec
import pytest

from delayserver.wire import fields
from delayserver.wire.fields import Ms, Name, Topic, decode_field, describe_field
from delayserver.wire.messages import PRIORITY_MAX
from storage import rows

KINDS = Ms.__subclasses__()


@pytest.mark.parametrize("kind", KINDS)
def test_a_duration_is_within_the_limits_of_its_type(kind):
    for good_ms in (kind.least_ms, kind.most_ms):
        for value in (good_ms, f"{good_ms}ms"):
            found = decode_field(kind, value)
            assert (type(found), found) == (kind, good_ms)
    for bad in (kind.least_ms - 1, kind.most_ms + 1, f"{kind.most_ms + 1}ms"):
        with pytest.raises(ValueError, match=r"from \d|a duration is"):
            decode_field(kind, bad)


@pytest.mark.parametrize("value", [None, True, 1.0, "", "1.5s", "x", [], {}, -1])
def test_a_value_of_another_type_is_no_duration(value):
    decode_field(fields.TimeoutMs, 1)  # True and 1.0 are equal to it, and yet no durations.
    with pytest.raises(ValueError, match="a duration is"):
        decode_field(fields.TimeoutMs, value)


def test_a_duration_is_described_in_both_forms():
    assert [one["type"] for one in describe_field(Ms)["anyOf"]] == ["integer", "string"]


@pytest.mark.parametrize("kind", [Name, Topic])
def test_a_pattern_stands_for_the_whole_text(kind):
    assert msgspec.convert("a.b", kind) == "a.b"
    for text in ("a\n", "\na", " a", "", "a b"):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(text, kind)


def test_a_priority_is_what_rows_have_room_for():
    assert PRIORITY_MAX == rows.PRIORITY_MAX
