"""Subjects and headers of NATS. (With a real NATS: tests/sinks/test_nats.py.)"""

import asyncio

import msgspec
import pytest

from delayserver.delivery.nats_sink import NatsOpener, check_subject, nats_headers, split_nats_url
from delayserver.delivery.outlets import OutletSink
from delayserver.delivery.sink import Failed, Result
from delayserver.errors import InputError
from delayserver.records.message import DueDelivery, Payload
from delayserver.records.subscriptions import NatsTarget, decode_subscription, encode_subscription
from delayserver.security.targets import TargetPolicy
from tests.unit.fakes import delivery, subscription


def test_what_a_message_says() -> None:
    payload = Payload(b"[1]", key="a\r\nb: ü", headers={"nAts-Rollup": "all", "x": "ä"})
    found = nats_headers(msgspec.structs.replace(delivery(3), payload=payload))
    assert [*found] == [
        *("Nats-Msg-Id", "delay-id", "delay-subject", "delay-key", "delay-due", "delay-attempt"),
        "x",
    ]
    assert found["Nats-Msg-Id"] == found["delay-id"] == "m3"
    assert found["delay-key"] == "a%0D%0Ab:%20%C3%BC"


@pytest.mark.parametrize("subject", ["a", "a.b-c_d", "due.{subject}", "ORDERS.7", "a$b"])
def test_subjects(subject: str) -> None:
    check_subject(subject)


@pytest.mark.parametrize(
    "subject",
    [
        "",
        ".",
        "a.",
        ".a",
        "a..b",
        "a b",
        "a\tb",
        "a\r\nPUB x",
        "a.*",
        ">",
        "ü",
        "$JS.API",
        "_INBOX.x",
    ],
)
def test_what_is_no_subject(subject: str) -> None:
    with pytest.raises(InputError):
        check_subject(subject)


def test_urls() -> None:
    assert split_nats_url("nats://:t@h").password == "t"
    assert split_nats_url("tls://u:p@h").target.port == 4222
    for url in ("nats://t@h", "nats://h/x", "ws://h"):
        with pytest.raises(InputError):
            split_nats_url(url)


@pytest.mark.parametrize(
    ("url", "reason"), [("nats://127.0.0.1:1", "NATS: "), ("nats://10.0.0.1", "not allowed")]
)
def test_one_that_cannot_be_reached_is_a_reason(url: str, reason: str) -> None:
    told: list[Result] = []

    def tell(some: list[DueDelivery], result: Result) -> None:
        told.append(result)

    async def main() -> None:
        sink = OutletSink(NatsOpener(TargetPolicy()))
        target = subscription(type="nats", target=NatsTarget(url))
        await sink.deliver(target, [delivery(1)], tell)
        await sink.close()

    asyncio.run(main())
    (result,) = told
    assert isinstance(result, Failed) and reason in result.reason


def test_a_password_goes_to_no_server_without_tls() -> None:
    """A server that wants none could be anybody on the way."""
    heard = bytearray()
    told: list[Result] = []

    def tell(some: list[DueDelivery], result: Result) -> None:
        told.append(result)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"max_payload": 1000, "headers": true}\r\n')
        heard.extend(await reader.read())
        writer.close()

    async def main() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            sink = OutletSink(NatsOpener(TargetPolicy()))
            target = NatsTarget(f"tls://user:hidden@127.0.0.1:{port}")
            await sink.deliver(subscription(type="nats", target=target), [delivery(1)], tell)
            await sink.close()

    asyncio.run(main())
    (result,) = told
    assert isinstance(result, Failed) and "no TLS" in result.reason
    assert b"hidden" not in heard


def test_a_definition_as_bytes() -> None:
    one = subscription(type="nats", target=NatsTarget("nats://h", "due.{id}"))
    assert decode_subscription(encode_subscription(one)) == one


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 400 Bad Request\r\n", b"INFO {]\r\n", b"INFO 7\r\n", b"\x01\n", b""]
)
def test_what_is_no_nats_is_a_reason(answer: bytes) -> None:
    told: list[Result] = []

    def tell(some: list[DueDelivery], result: Result) -> None:
        told.append(result)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()
        writer.close()

    async def main() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            sink = OutletSink(NatsOpener(TargetPolicy()))
            target = NatsTarget(f"nats://127.0.0.1:{port}")
            await sink.deliver(subscription(type="nats", target=target), [delivery(1)], tell)
            await sink.close()

    asyncio.run(main())
    (result,) = told
    assert isinstance(result, Failed) and result.reason.startswith("NATS: ")
