"""What a message says to RabbitMQ. (With a real one: tests/sinks/test_rabbitmq.py.)"""

import asyncio

import msgspec
import pytest

from delayserver.delivery.amqp_sink import AmqpOpener, properties, split_amqp_url
from delayserver.delivery.outlets import OutletSink
from delayserver.delivery.sink import Failed, Result
from delayserver.errors import InputError
from delayserver.records.message import Content, DueDelivery, Payload
from delayserver.records.subscriptions import AmqpTarget, decode_subscription, encode_subscription
from delayserver.security.targets import TargetPolicy
from tests.unit.fakes import delivery, subscription


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
    ("url", "reason"), [("amqp://127.0.0.1:1", "AMQP: "), ("amqp://10.0.0.1", "not allowed")]
)
def test_one_that_cannot_be_reached_is_a_reason(url: str, reason: str) -> None:
    told: list[Result] = []

    def tell(some: list[DueDelivery], result: Result) -> None:
        told.append(result)

    async def main() -> None:
        sink = OutletSink(AmqpOpener(TargetPolicy()))
        target = subscription(type="amqp", target=AmqpTarget(url, "e"))
        await sink.deliver(target, [delivery(1)], tell)
        await sink.close()

    asyncio.run(main())
    (result,) = told
    assert isinstance(result, Failed) and reason in result.reason


def test_a_definition_as_bytes() -> None:
    one = subscription(type="amqp", target=AmqpTarget("amqp://h", "", "{key}.x"))
    assert decode_subscription(encode_subscription(one)) == one


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x01" * 64, b""])
def test_what_is_no_broker_is_a_reason(answer: bytes) -> None:
    told: list[Result] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()
        writer.close()

    def tell(some: list[DueDelivery], result: Result) -> None:
        told.append(result)

    async def main() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            sink = OutletSink(AmqpOpener(TargetPolicy()))
            target = AmqpTarget(f"amqp://127.0.0.1:{port}", "")
            await sink.deliver(subscription(type="amqp", target=target), [delivery(1)], tell)
            await sink.close()

    asyncio.run(main())
    (result,) = told
    assert isinstance(result, Failed) and result.reason.startswith("AMQP: ")
