"""Trace context: what is valid goes along, what is not is ignored, and a retry is no conflict."""

import numpy as np
import pytest

from delayserver.decisions.new_messages import NewMessage
from delayserver.errors import ConflictError
from delayserver.records.message import Payload
from delayserver.records.tables import KeyEntry
from delayserver.records.tracecontext import trace_of, with_trace
from delayserver.schedule.effects import content_digests
from storage.rows import MESSAGE_DTYPE
from tests.unit.fakes import MessageParts
from tests.world.publishes import publish_all

ID, SPAN = b"0af7651916cd43dd8448eb211c80319c", b"b7ad6b7169203331"
VALID = b"00-" + ID + b"-" + SPAN + b"-01"


@pytest.mark.parametrize(
    "value",
    [
        VALID,
        b" " + VALID + b" ",
        b"cc-" + ID + b"-" + SPAN + b"-00",
        VALID.replace(b"00-", b"01-") + b"-x",
    ],
)
def test_what_is_valid(value: bytes) -> None:
    assert trace_of([(b"host", b"a"), (b"traceparent", value)]) == {
        "traceparent": value.strip().decode()
    }


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"x",
        VALID.upper(),
        VALID[:-1],
        VALID + b"-more",
        VALID + b"0",
        b"ff" + VALID[2:],
        VALID.replace(ID, b"0" * 32),
        VALID.replace(SPAN, b"0" * 16),
        VALID.replace(b"-", b"_"),
        VALID + b"\xff",
    ],
)
def test_what_is_malformed_is_ignored(value: bytes) -> None:
    assert trace_of([(b"traceparent", value)]) is None


def test_two_of_them_are_none() -> None:
    assert trace_of([(b"traceparent", VALID)] * 2) is None
    assert trace_of([(b"tracestate", b"a=1")]) is None


@pytest.mark.parametrize(
    ("states", "wanted"),
    [
        ([b"a=1"], "a=1"),
        ([b"a=1", b" b=2,c=3 "], "a=1,b=2,c=3"),
        ([b"x" * 513], None),
        ([b"a=\x01"], None),
        ([b""], None),
    ],
)
def test_the_state_goes_along(states: list[bytes], wanted: str | None) -> None:
    trace = trace_of([(b"traceparent", VALID), *((b"tracestate", one) for one in states)])
    assert trace is not None
    assert trace.get("tracestate") == wanted


def test_the_headers_of_a_message_come_first() -> None:
    trace = {"traceparent": "t"}
    assert with_trace(None, trace, max_bytes=12) == trace
    assert with_trace({"a": "b"}, trace, max_bytes=14) == {"a": "b", "traceparent": "t"}
    assert with_trace({"a": "bc"}, trace, max_bytes=14) is None
    assert with_trace({"TraceParent": "mine"}, trace, max_bytes=99) is None


# ---- what it means for keys --------------------------------------------------------------------


PAYLOAD = Payload(b"1", key="k", headers={"x-shop": "7"})


def traced(key: str | None, trace: bytes, body: bytes = b"1") -> NewMessage:
    message = NewMessage("orders", 10_000_000, Payload(body, key=key, headers={"x-shop": "7"}))
    message.trace = trace_of([(b"traceparent", trace)])
    return message


def test_a_retry_in_another_span_is_the_same_message() -> None:
    parts = MessageParts()
    other = VALID.replace(SPAN, b"c" * 16)
    first = parts.publishing.publish_one(traced("k", VALID), 0)
    assert parts.publishing.publish_one(traced("k", other), 0).message_id == first.message_id
    assert parts.publishing.publish_one(traced("k", b""), 0).duplicate
    batch = publish_all(
        parts.publishing, [traced("k", other), traced("l", other), traced("l", VALID)], 0
    )
    assert [one.duplicate for one in batch] == [True, False, True]
    with pytest.raises(ConflictError):
        parts.publishing.publish_one(traced("k", VALID, b"2"), 0)


def test_the_log_tells_the_digest_of_the_content() -> None:
    plain, with_context = MessageParts(), MessageParts()
    plain.publishing.publish_one(NewMessage("orders", 10_000_000, PAYLOAD), 0)
    with_context.publishing.publish_one(traced("k", VALID), 0)
    digests = []
    for parts in (plain, with_context):
        rows, _ = parts.sequencer.group.encode()
        published = np.frombuffer(rows, MESSAGE_DTYPE)[1:]
        digests += content_digests(published).tolist()
        known = parts.sequencer.key(published["key_hash"][0].tobytes())
        assert isinstance(known, KeyEntry)
        assert known.digest == digests[-1]
    assert digests[0] == digests[1]
