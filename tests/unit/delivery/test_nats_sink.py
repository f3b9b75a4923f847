"""Subjects and headers of NATS. (With a real NATS: tests/sinks/test_nats.py.)"""

import asyncio
import socket
import struct

import msgspec
import pytest

from delayserver.delivery.nats_sink import NatsOpener, check_subject, nats_headers, split_nats_url
from delayserver.errors import InputError
from delayserver.records.message import Payload
from delayserver.records.subscriptions import (
    NatsTarget,
    Subscription,
    decode_subscription,
    encode_subscription,
)
from delayserver.security.targets import TargetPolicy
from tests.unit.delivery.reasons import reason, reason_at, saying
from tests.unit.fakes import delivery, subscription


def subscribed(url: str) -> Subscription:
    return subscription(type="nats", target=NatsTarget(url))


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
    ("url", "reason_part"), [("nats://127.0.0.1:1", "NATS: "), ("nats://10.0.0.1", "not allowed")]
)
def test_one_that_cannot_be_reached_is_a_reason(url: str, reason_part: str) -> None:
    assert reason_part in asyncio.run(reason(NatsOpener(TargetPolicy()), subscribed(url)))


def test_a_password_goes_to_no_server_without_tls() -> None:
    """A server that wants none could be anybody on the way."""
    heard = bytearray()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"max_payload": 1000, "headers": true}\r\n')
        heard.extend(await reader.read())
        writer.close()

    found = reason_at(
        serve,
        NatsOpener(TargetPolicy()),
        lambda address: subscribed(f"tls://user:hidden@{address}"),
    )
    assert "no TLS" in asyncio.run(found)
    assert b"hidden" not in heard


def test_a_reset_in_place_of_a_refusal_says_what_it_may_be() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"max_payload": 1000, "headers": true}\r\n')
        await reader.readline()
        writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )
        writer.transport.abort()

    found = reason_at(
        serve,
        NatsOpener(TargetPolicy()),
        lambda address: subscribed(f"nats://user:hidden@{address}"),
    )
    assert "password" in (said := asyncio.run(found))
    assert "hidden" not in said


def test_a_definition_as_bytes() -> None:
    one = subscription(type="nats", target=NatsTarget("nats://h", "due.{id}"))
    assert decode_subscription(encode_subscription(one)) == one


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 400 Bad Request\r\n", b"INFO {]\r\n", b"INFO 7\r\n", b"\x01\n", b""]
)
def test_what_is_no_nats_is_a_reason(answer: bytes) -> None:
    found = reason_at(
        saying(answer), NatsOpener(TargetPolicy()), lambda address: subscribed(f"nats://{address}")
    )
    assert asyncio.run(found).startswith("NATS: ")
