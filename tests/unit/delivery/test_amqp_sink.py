"""What a message says to RabbitMQ. (With a real one: tests/sinks/test_rabbitmq.py.)"""

import asyncio

import msgspec
import pytest

from delayserver.delivery.amqp_sink import AmqpOpener, properties, split_amqp_url
from delayserver.errors import InputError
from delayserver.records.message import Content, Payload
from delayserver.records.subscriptions import (
    AmqpTarget,
    Subscription,
    decode_subscription,
    encode_subscription,
)
from delayserver.security.targets import TargetPolicy
from tests.unit.delivery.reasons import reason, reason_at, saying
from tests.unit.fakes import delivery, subscription


def subscribed(url: str) -> Subscription:
    return subscription(type="amqp", target=AmqpTarget(url, ""))


def test_what_a_message_says() -> None:
    payload = Payload(
        b"\0", key="a ü", content=Content.BINARY, headers={"cc": "q", "BCC": "q", "x": "7"}
    )
    found = properties(msgspec.structs.replace(delivery(3), payload=payload))
    assert (found.message_id, found.delivery_mode) == ("m3", 2)
    assert found.content_type == "application/octet-stream"
    assert [*(found.headers or {})] == [
        *("delay-id", "delay-subject", "delay-key", "delay-due", "delay-attempt", "x")
    ]
    assert properties(delivery(3)).content_type == "application/json"


def test_virtual_hosts() -> None:
    paths = {"": "/", "/": "/", "/shop": "shop", "/%2F": "/", "/a%2Fb": "a/b"}
    assert {path: split_amqp_url(f"amqp://h{path}")[1] for path in paths} == paths
    assert split_amqp_url("amqps://h")[0].target.port == 5671
    with pytest.raises(InputError):
        split_amqp_url("amqp://h/a/b")


@pytest.mark.parametrize(
    ("url", "reason_part"), [("amqp://127.0.0.1:1", "AMQP: "), ("amqp://10.0.0.1", "not allowed")]
)
def test_one_that_cannot_be_reached_is_a_reason(url: str, reason_part: str) -> None:
    assert reason_part in asyncio.run(reason(AmqpOpener(TargetPolicy()), subscribed(url)))


def test_a_definition_as_bytes() -> None:
    one = subscription(type="amqp", target=AmqpTarget("amqp://h", "", "{key}.x"))
    assert decode_subscription(encode_subscription(one)) == one


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x01" * 64, b""])
def test_what_is_no_broker_is_a_reason(answer: bytes) -> None:
    found = reason_at(
        saying(answer), AmqpOpener(TargetPolicy()), lambda address: subscribed(f"amqp://{address}")
    )
    assert asyncio.run(found).startswith("AMQP: ")
