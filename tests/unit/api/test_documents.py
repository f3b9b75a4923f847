"""Answers that hold messages have the form that their structs describe in OpenAPI."""

import base64
import json

import msgspec
import pytest

from delayserver.api import documents
from delayserver.delivery.delayed_fetch import Pulled
from delayserver.records.message import Content, DueDelivery, Payload
from delayserver.times import format_time
from delayserver.wire.pulls import AckedDocument, PulledDocument, PulledListDocument
from tests.unit.fakes import START_MS, deliveries, delivery


def pulled_message(one: DueDelivery, lease: str) -> dict[str, object]:
    """What a consumer gets of a delivery, field by field."""
    is_json = one.payload.content == Content.JSON
    text = one.payload.body.decode() if is_json else base64.b64encode(one.payload.body).decode()
    return {
        "id": one.message_id,
        "subject": one.subject,
        "key": one.payload.key,
        "headers": one.payload.headers or {},
        "deliver_at": format_time(one.origin.due_ms),
        "attempt": one.attempt,
        "lease": lease,
        **({"body": json.loads(text)} if is_json else {"body_base64": text}),
    }


def test_what_is_pulled_is_written_as_its_struct_says():
    payloads = [
        Payload(b"{}"),
        Payload(b'[1, "\xc3\xbc", 12345678901234567890.0]', key='a"b\\c\n\u2028'),
        Payload(b"\xff\x00", Content.BINARY, headers={"x-a": '"\\', "x-b": "\xfc"}),
        Payload(b"null", key="k", headers={}),
    ] * 300
    ones = [
        msgspec.structs.replace(
            delivery(seq, START_MS + seq % 7, attempt=1 + seq % 3, message_seq=1000 + seq),
            payload=payload,
        )
        for seq, payload in enumerate(payloads, 1)
    ]
    pulled = Pulled(deliveries(*ones), "e1-1f-")
    found = json.loads(documents.encode_pulled(pulled))
    assert found == {"messages": [pulled_message(*pair) for pair in pulled]}
    msgspec.json.decode(documents.encode_pulled(pulled), type=PulledListDocument)
    fields = PulledDocument.__struct_fields__
    for message in found["messages"]:
        assert [name for name in fields if name in message] == list(message)


def test_nothing_is_pulled():
    assert json.loads(documents.encode_pulled(Pulled())) == {"messages": []}
    assert json.loads(documents.encode_pulled(Pulled(deliveries()))) == {"messages": []}


def test_what_a_pull_acknowledged_stands_behind_the_messages():
    acked = AckedDocument(2, ["e-1-0"])
    for pulled in (Pulled(), Pulled(deliveries(delivery(1)), "e1-1f-")):
        found = json.loads(documents.encode_pulled(pulled, acked))
        messages = [pulled_message(*pair) for pair in pulled]
        assert found == {"messages": messages, "acked": 2, "expired": ["e-1-0"]}


@pytest.mark.parametrize("acked", [None, AckedDocument(2, ["e-1-0"])])
def test_parts_are_joined_as_if_they_were_one(acked: AckedDocument | None) -> None:
    """Whatever they are, and wherever there is nothing in one."""
    ones = [msgspec.structs.replace(delivery(seq), payload=Payload(b'"]},{"')) for seq in (1, 2, 3)]
    whole = documents.encode_pulled(Pulled(deliveries(*ones), "e-1-"), acked)
    first = documents.encode_messages(Pulled(deliveries(*ones[:2]), "e-1-"))
    last = documents.encode_messages(Pulled(deliveries(*ones[2:]), "e-1-"))
    last = last.replace(b'"e-1-0"', b'"e-1-2"')
    none = documents.encode_messages(Pulled())
    assert none == b""
    assert documents.join_messages([none, first, none, last], acked) == whole
    assert documents.join_messages([none, none], acked) == documents.encode_pulled(Pulled(), acked)


def test_a_body_goes_out_byte_for_byte():
    body = b'{"b": 1e400,  "a":1.50}'
    one = msgspec.structs.replace(delivery(1), payload=Payload(body))
    assert b'"body":' + body + b"}" in documents.encode_pulled(Pulled(deliveries(one), "e-1-"))
