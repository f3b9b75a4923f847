"""Tasks as bodies of messages: what was put in comes out, and nothing else is taken for one."""

import json
import uuid
from datetime import UTC, datetime
from decimal import Decimal

import pytest
from kombu import Exchange, Queue
from kombu.exceptions import EncodeError

from delayserver.integrations.celery import NotATaskError
from delayserver.integrations.celery.wire import WireTask

CONTENT = [[1, "é"], {"a": None}, {"chain": None}]


def make(body=CONTENT, **options):
    return WireTask.make(
        body,
        **{"now_ms": 1000, "exchange": "", "routing_key": "q", "headers": {"id": "x"}, **options},
    )


def test_what_was_encoded_is_decoded():
    headers = {"id": "x", "at": datetime(2026, 1, 1, tzinfo=UTC), "one": uuid.UUID(int=7)}
    task = make(headers=headers, correlation_id="x", priority=3, price=Decimal("1.5"), raw=b"\xff")
    again = WireTask.decode(task.encode())
    assert again == task
    assert again.headers == headers
    assert again.properties["raw"] == b"\xff"
    assert again.content(["json"]) == CONTENT


@pytest.mark.parametrize("options", [{"serializer": "pickle"}, {"compression": "zlib"}])
def test_bytes_are_kept(options):
    task = WireTask.decode(make(**options).encode())
    assert isinstance(task.data, bytes)
    assert list(task.content(["json", "pickle"])) == CONTENT


def test_its_body_is_what_it_would_be_on_the_broker():
    assert json.loads(make().data) == CONTENT
    assert make(compression="zlib").headers["compression"] == "application/x-gzip"


def test_routes_are_names():
    exchange = Exchange("topics", type="topic")
    task = make(exchange=exchange, declare=[Queue("a", exchange), exchange])
    assert (task.exchange, task.queues) == ("topics", ["a"])


def test_what_is_left_of_its_time_on_the_broker():
    task = make(expiration=2.5)
    assert [task.expiration_s(now_ms) for now_ms in (1000, 2000, 9000)] == [2.5, 1.5, 0]
    assert make().expiration_s(9000) is None


@pytest.mark.parametrize(
    "data", [b"", b"\xff", b"[]", b"{}", b'{"order": 1}', b'{"__type__": "x", "__value__": 1}']
)
def test_what_is_no_task_is_refused(data):
    with pytest.raises(NotATaskError, match="no task of Celery"):
        WireTask.decode(data)


def test_a_body_that_is_no_base64_is_refused():
    data = make(serializer="pickle").encode()
    broken = json.loads(data) | {"body": "?"}
    with pytest.raises(NotATaskError, match="base64"):
        _ = WireTask.decode(json.dumps(broken).encode()).data


def test_content_that_is_not_accepted_is_not_read():
    with pytest.raises(NotATaskError, match="cannot be read"):
        make(serializer="pickle").content(["json"])
    with pytest.raises(NotATaskError, match="cannot be read"):
        make(headers={"compression": "none such"}, compression=None, serializer="pickle").content(
            ["pickle"]
        )


def test_arguments_that_cannot_be_serialized_are_refused_as_celery_refuses_them():
    with pytest.raises(EncodeError):
        make(body=object())
