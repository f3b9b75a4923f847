"""The limits of a source."""

import json

import pytest

from delayserver.wire.reading import read, readable_fields
from delayserver.wire.sources import SourceModel

LEAST = {"type": "kafka", "bootstrap": "a:1,b:2", "topic": "t", "subject": "s"}


def test_what_is_not_said_has_its_default():
    found = read(json.dumps(LEAST).encode(), SourceModel)
    assert (found.due_header, found.on_error, found.group) == ("delay-until", "skip", None)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("type", "redis"),
        ("bootstrap", "a"),
        ("bootstrap", "a:1,"),
        ("topic", "t t"),
        ("subject", "a.*"),
        ("due_header", ""),
        ("group", ""),
        ("on_error", "halt"),
        ("username", ""),
        ("mechanism", "NONE"),
        ("tls", 1),
    ],
)
def test_limits(field, value):
    _, (error,) = readable_fields(json.dumps({**LEAST, field: value}).encode(), SourceModel)
    assert error.pointer == f"/{field}"
