"""Streams of Redis: what an entry says. (With a real Redis: tests/sinks/test_redis.py.)"""

import asyncio

import msgspec
import pytest

from delayserver.delivery.redis_sink import RedisOpener, fields, split_redis_url
from delayserver.errors import InputError
from delayserver.records.message import Payload
from delayserver.records.subscriptions import (
    RedisTarget,
    decode_subscription,
    encode_subscription,
)
from delayserver.security.targets import TargetPolicy
from tests.unit.delivery.reasons import reason
from tests.unit.fakes import delivery, subscription


def test_what_an_entry_says() -> None:
    payload = Payload(b"[1]", key="a ü", headers={"x-shop": "7", "body": "mine"})
    one = msgspec.structs.replace(delivery(3), payload=payload)
    found = fields(one)
    assert [*found] == [
        *("delay-id", "delay-subject", "delay-key", "delay-due", "delay-attempt"),
        *("x-shop", "header-body", "body"),
    ]
    assert (found["delay-key"], found["header-body"], found["body"]) == ("a ü", "mine", b"[1]")
    assert "delay-key" not in fields(delivery(3))


def test_the_number_of_a_database() -> None:
    assert split_redis_url("redis://h/12")[1] == 12
    assert split_redis_url("redis://h/")[1] == split_redis_url("redis://h")[1] == 0
    for path in ("/a", "/1/2", "/-1", "/12345"):
        with pytest.raises(InputError):
            split_redis_url(f"redis://h{path}")


@pytest.mark.parametrize(
    ("url", "reason_part"),
    [
        ("redis://127.0.0.1:1", "Redis: "),
        ("redis://10.0.0.1", "not allowed"),
        ("redis://nowhere.invalid", "cannot resolve"),
    ],
)
def test_one_that_cannot_be_reached_is_a_reason(url: str, reason_part: str) -> None:
    opener = RedisOpener(TargetPolicy(("127.0.0.1", "nowhere.invalid")))
    target = subscription(type="redis", target=RedisTarget(url, "s"))
    assert reason_part in asyncio.run(reason(opener, target))


def test_a_definition_as_bytes() -> None:
    one = subscription(type="redis", target=RedisTarget("redis://h", "s", 10))
    assert decode_subscription(encode_subscription(one)) == one
    assert one.is_pushed and one.takes_many and not one.is_exactly_once
