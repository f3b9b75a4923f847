"""What the client library hands on: how it prints, and where it can be kept."""

import base64
from datetime import UTC, datetime

import msgspec
import pytest

from delayserver.client import Draft, Message, Stored, values
from delayserver.client.values import time
from delayserver.client.writing import draft_to_send, due
from delayserver.wire import messages, pulls, schedules, sources, subscriptions

DUE = datetime(2026, 11, 20, 16, 30, tzinfo=UTC)
COMMON = {"id": "a", "subject": "s", "key": "k", "deliver_at": DUE, "headers": {"x": "y"}}


def of(kind, **fields):
    """As an answer has it."""
    own = {"attempt": 2, "lease": "L"} if kind is Message else {"state": "dead", "attempts": 3}
    return msgspec.json.decode(msgspec.json.encode({**COMMON, **own, **fields}), type=kind)


@pytest.mark.parametrize("kind", [Message, Stored])
@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"body": {"order": 1001, "name": "ü"}}, 'body={"order":1001,"name":"ü"})'),
        ({"body": None}, "body=null)"),
        ({"body_base64": base64.b64encode(b"\0\xff").decode()}, r"body=b'\x00\xff')"),
        ({"body": "x" * 1000}, "x… (1002 bytes))"),
    ],
)
def test_what_is_printed_shows_the_body(kind, fields, shown):
    text = str(of(kind, **fields))
    assert text.endswith(shown)
    assert text.startswith(f"{kind.__name__}(id='a', subject='s', key='k', ")
    assert "headers={'x': 'y'}" in text
    assert "Raw" not in text
    assert len(text) < 600


@pytest.mark.parametrize("kind", [Message, Stored])
def test_messages_can_be_members_of_a_set(kind):
    assert len({of(kind, body=1), of(kind, body=1), of(kind, body=2), of(kind, id="b")}) == 3


def test_seconds_are_refused_before_anything_is_sent():
    for say in (
        lambda: time(1_795_192_200),
        lambda: due(None, 1_795_192_200),
        lambda: draft_to_send(Draft(subject="s", deliver_at=1_795_192_200)),
    ):
        with pytest.raises(ValueError, match=r"1795192200: .* milliseconds, not seconds"):
            say()
    assert time(1_795_192_200_000) == 1_795_192_200_000
    assert time(0) == 0
    assert due(1_795_192_200, None) == {"delay": 1_795_192_200}


@pytest.mark.parametrize(
    ("value", "document", "unknown"),
    [
        (values.Moved, messages.MovedModel, set()),
        (values.Stored, messages.MessageDocument, set()),
        (values.Message, pulls.PulledDocument, set()),
        (values.Heartbeat, messages.HeartbeatDocument, {"not_understood"}),
        (values.Schedule, schedules.ScheduleDocument, {"not_understood"}),
        (values.Source, sources.SourceDocument, {"not_understood"}),
        (values.DeadLetter, subscriptions.DeadLetterDocument, set()),
    ],
)
def test_a_value_has_the_fields_of_the_answer(value, document, unknown):
    known, answered = (
        {field.encode_name for field in msgspec.structs.fields(kind)} for kind in (value, document)
    )
    assert answered - known == unknown
    assert known - answered <= {"version"}, "the server never sends it"
