"""Streams of Redis: what an entry says. (With a real Redis: tests/sinks/test_redis.py.)"""

import asyncio
import os
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from redis._parsers.base import BaseParser
from redis.asyncio import ConnectionPool, Redis
from redis.exceptions import (
    AuthenticationWrongNumberOfArgsError,
    DataError,
    InvalidResponse,
    MaxConnectionsError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from delayserver.delivery import redis_sink
from delayserver.delivery.answers import Certainty
from delayserver.delivery.outlets import OutletSink
from delayserver.delivery.redis_sink import (
    ANSWERS,
    RedisOpener,
    answer_of,
    fields,
    split_redis_url,
)
from delayserver.delivery.sink import Confirmed, Failed, Result
from delayserver.errors import InputError
from delayserver.records.message import DueDelivery, Payload
from delayserver.records.subscriptions import (
    RedisTarget,
    decode_subscription,
    encode_subscription,
)
from delayserver.security.targets import TargetPolicy
from tests.unit.delivery.reasons import reason
from tests.unit.fakes import always, delivery, subscription
from tests.waiting import turns


def by_name(found: list[str | bytes]) -> dict[str | bytes, str | bytes]:
    names, values = found[::2], found[1::2]
    assert len(set(names)) == len(names)
    return dict(zip(names, values, strict=True))


def test_what_an_entry_says() -> None:
    payload = Payload(b"[1]", key="a ü", headers={"x-shop": "7", "body": "mine"})
    found = by_name(fields(msgspec.structs.replace(delivery(3), payload=payload)))
    assert [*found] == [
        *("delay-id", "delay-subject", "delay-key", "delay-due", "delay-attempt"),
        *("x-shop", "header-body", "body"),
    ]
    assert (found["delay-key"], found["header-body"], found["body"]) == ("a ü", "mine", b"[1]")
    assert "delay-key" not in by_name(fields(delivery(3)))


def test_each_header_has_a_field_of_its_own() -> None:
    names = ["body", "header-body", "header-header-body", "Body", "header-x", "xbody"]
    payload = Payload(b"[1]", headers={name: f"of {name}" for name in names})
    found = by_name(fields(msgspec.structs.replace(delivery(3), payload=payload)))
    assert sorted(value for value in found.values() if str(value).startswith("of ")) == sorted(
        f"of {name}" for name in names
    )
    assert found["body"] == b"[1]" and found["header-body"] == "of body"
    assert found["header-x"] == "of header-x"


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


STORED_IN = {
    "WRONGTYPE Operation against a key": (Certainty.NOT_STORED, False),
    "MISCONF Redis is configured to save RDB snapshots": (Certainty.NOT_STORED, False),
    "NOREPLICAS Not enough good replicas to write.": (Certainty.NOT_STORED, False),
    "BUSY Redis is busy running a script.": (Certainty.NOT_STORED, False),
    "OOM command not allowed when used memory > 'maxmemory'.": (Certainty.NOT_STORED, False),
    "READONLY You can't write against a read only replica.": (Certainty.NOT_STORED, False),
    "NOPERM this user has no permissions": (Certainty.NOT_STORED, False),
    "MOVED 3999 127.0.0.1:6381": (Certainty.NOT_STORED, False),
    "ASK 3999 127.0.0.1:6381": (Certainty.NOT_STORED, False),
    "TRYAGAIN Multiple keys request during rehashing of slot": (Certainty.NOT_STORED, False),
    "CLUSTERDOWN Hash slot not served": (Certainty.NOT_STORED, False),
    "CROSSSLOT Keys in request don't hash": (Certainty.NOT_STORED, False),
    "MASTERDOWN Link with MASTER is down": (Certainty.NOT_STORED, False),
    "EXECABORT Transaction discarded": (Certainty.NOT_STORED, False),
    "ERR The ID specified in XADD is equal or smaller": (Certainty.NOT_STORED, False),
    "SOMETHING new": (Certainty.NOT_STORED, False),
    "NOAUTH Authentication required.": (Certainty.NOT_STORED, False),
    "LOADING Redis is loading the dataset in memory": (Certainty.NOT_STORED, False),
}
"""What Redis answers, as it stands on the wire."""
RAISED: dict[Exception, tuple[Certainty, bool]] = {
    AuthenticationWrongNumberOfArgsError("x"): (Certainty.NOT_STORED, False),
    MaxConnectionsError("x"): (Certainty.NOT_STORED, False),
    DataError("x"): (Certainty.NOT_STORED, True),
    UnicodeEncodeError("utf-8", "x", 0, 1, "no"): (Certainty.NOT_STORED, True),
    RedisConnectionError("Connection closed by server."): (Certainty.UNKNOWN, True),
    ConnectionResetError("x"): (Certainty.UNKNOWN, True),
    OSError("x"): (Certainty.UNKNOWN, True),
    InvalidResponse("Protocol Error: b'x'"): (Certainty.UNKNOWN, True),
    RedisTimeoutError("x"): (Certainty.UNKNOWN, False),
    TimeoutError("x"): (Certainty.UNKNOWN, False),
    ValueError("not enough values to unpack"): (Certainty.UNKNOWN, False),
}


@pytest.mark.parametrize("answer", STORED_IN)
def test_what_redis_answers(answer: str) -> None:
    found = answer_of(BaseParser.parse_error(answer))
    assert (found.kept, found.is_shared) == STORED_IN[answer]
    assert found.reason.startswith("Redis: ")


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_what_the_client_raises(error: Exception) -> None:
    found = answer_of(error)
    assert (found.kept, found.is_shared) == RAISED[error]


def test_every_row_of_the_table_is_tested() -> None:
    used = set()
    for error in [*map(BaseParser.parse_error, STORED_IN), *RAISED]:
        first = str(error).split(" ", 1)[0] if type(error) is ResponseError else None
        used.add(next((key for key in (first, *type(error).__mro__) if key in ANSWERS.rows), None))
    assert used - {None} == set(ANSWERS.rows)


class Answering:
    """A Redis that speaks as a test says, command by command."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.commands: list[list[bytes]] = []
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                count = int((await reader.readuntil(b"\r\n"))[1:])
                command = []
                for _ in range(count):
                    size = int((await reader.readuntil(b"\r\n"))[1:])
                    command.append((await reader.readexactly(size + 2))[:-2])
                if command[0] != b"XADD":
                    writer.write(b"+OK\r\n")
                    continue
                self.commands.append(command)
                answer = self.answers.pop(0) if self.answers else b"$3\r\n1-1\r\n"
                if not answer:
                    break
                writer.write(answer)
        writer.close()


def told_by(redis: Answering, count: int, **more: Any) -> dict[int, Result]:
    """Returns the results of so many messages, by seq."""
    told: dict[int, Result] = {}

    def tell(some: list[DueDelivery], result: Result) -> None:
        told.update((one.entry.seq, result) for one in some)

    async def main() -> None:
        async with await asyncio.start_server(redis.serve, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            sink = OutletSink(RedisOpener(TargetPolicy()))
            target = RedisTarget(f"redis://{host}:{port}", "s", **more)
            ones = [delivery(seq) for seq in range(1, count + 1)]
            await sink.deliver(subscription(type="redis", target=target), ones, always, tell)
            await sink.close()

    asyncio.run(main())
    return told


def test_each_command_has_its_answer() -> None:
    redis = Answering(b"$3\r\n1-1\r\n", b"-OOM full\r\n")
    assert told_by(redis, 3, max_length=7) == {
        1: Confirmed(),
        2: Failed("Redis: full"),
        3: Confirmed(),
    }
    assert redis.commands[0][:6] == [b"XADD", b"s", b"MAXLEN", b"~", b"7", b"*"]


@pytest.mark.parametrize("answer", [b":1\r\n", b"$-1\r\n", b"*0\r\n", b"$0\r\n\r\n"])
def test_an_answer_that_is_no_id_is_unknown(answer: bytes) -> None:
    told = told_by(Answering(answer), 2)
    result = told[1]
    assert isinstance(result, Failed) and "no id" in result.reason
    assert told[2] == Confirmed()


@pytest.mark.parametrize(
    ("lengths", "taken"),
    [
        ((9, 1, 5), [2, 1]),
        ((9, 2), [1, 1]),
        ((11, 1), [1, 1]),
        ((0, 10, 0), [3]),
        ((1,) * 5, [3, 2]),
    ],
)
def test_a_pipeline_has_so_many_bytes_and_no_more_unless_one_body_alone_has(
    lengths: tuple[int, ...], taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_sink, "BATCH_BYTES_MAX", 10)
    monkeypatch.setattr(redis_sink, "BATCH_MAX", 3)
    outlet = redis_sink._RedisOutlet(Redis(), ConnectionPool(), 1000)
    to = subscription(type="redis", target=RedisTarget("redis://h", "s"))
    for seq, length in enumerate(lengths):
        one = msgspec.structs.replace(delivery(seq), payload=Payload(b"x" * length))
        outlet._waiting.append((to, one, lambda delivery, answer: None))
    assert [len(outlet._take()) for _ in taken] == taken and not outlet._waiting


def test_a_redis_that_stops_reading_costs_no_socket() -> None:
    writers: list[asyncio.StreamWriter] = []
    long = Payload(b"x" * 20_000_000)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        while True:
            for _ in range(int((await reader.readuntil(b"\r\n"))[1:])):
                size = int((await reader.readuntil(b"\r\n"))[1:])
                if size == len(long.body):
                    return  # From here on it reads nothing.
                await reader.readexactly(size + 2)
            writer.write(b"+OK\r\n")

    def sockets() -> int:
        return len(os.listdir("/proc/self/fd")) - len(writers)

    async def main() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            before = sockets()
            sink = OutletSink(RedisOpener(TargetPolicy()))
            target = RedisTarget(f"redis://{host}:{port}", "s")
            to = subscription(type="redis", target=target, timeout_ms=50)
            for seq in range(2):
                one = msgspec.structs.replace(delivery(seq), payload=long)
                await sink.deliver(to, [one], always, lambda some, result: told.append(result))
            await sink.close()
            await turns(3)
            assert len(writers) == 2 and sockets() == before
            for writer in writers:
                writer.transport.abort()

    told: list[Result] = []
    asyncio.run(main())
    assert told == [Failed("Redis: no answer within 50 ms")] * 2


def test_a_redis_that_became_a_replica_is_left_for_another_connection() -> None:
    redis = Answering(b"-READONLY no\r\n")
    told = told_by(redis, 2)
    assert told[2] == Confirmed() and told[1] == Failed("Redis: no")


def test_one_message_for_which_redis_ends_the_connection_fails_alone() -> None:
    class Picky(Answering):
        async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.connections += 1
            data = b""
            while chunk := await reader.read(1 << 16):
                data += chunk
                if b"m5\r\n" in data:
                    break
                for _ in range(data.count(b"XADD")):
                    writer.write(b"$3\r\n1-1\r\n")
                if b"CLIENT" in data or b"SELECT" in data or b"HELLO" in data:
                    writer.write(b"+OK\r\n" * data.count(b"CLIENT"))
                data = b""
            writer.close()

    redis = Picky()
    told = told_by(redis, 8)
    assert {seq for seq, result in told.items() if isinstance(result, Failed)} == {5}
    assert len(told) == 8 and redis.connections > 2


def test_one_message_that_the_client_cannot_write_fails_alone() -> None:
    redis = Answering()
    told: dict[int, Result] = {}

    def tell(some: list[DueDelivery], result: Result) -> None:
        told.update((one.entry.seq, result) for one in some)

    async def main() -> None:
        async with await asyncio.start_server(redis.serve, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            sink = OutletSink(RedisOpener(TargetPolicy()))
            target = RedisTarget(f"redis://{host}:{port}", "s")
            ones = [delivery(seq) for seq in range(1, 9)]
            ones[4] = msgspec.structs.replace(ones[4], payload=Payload(b"1", key="\ud800"))
            await sink.deliver(subscription(type="redis", target=target), ones, always, tell)
            await sink.close()

    asyncio.run(main())
    assert {seq for seq, result in told.items() if result != Confirmed()} == {5}
