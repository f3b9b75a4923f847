"""What a message says to RabbitMQ. (With a real one: tests/sinks/test_rabbitmq.py.)"""

import asyncio
import os
import struct
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from aiormq import Channel
from aiormq.exceptions import (
    AMQPConnectionError,
    ChannelAccessRefused,
    ChannelClosed,
    ChannelInvalidStateError,
    ChannelLockedResource,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
    ConnectionFrameError,
    DeliveryError,
    MethodNotImplemented,
    ProtocolSyntaxError,
    PublishError,
)
from pamqp import commands
from pamqp.commands import Basic
from pamqp.exceptions import UnmarshalingException
from pamqp.frame import marshal

from delayserver.delivery import amqp_sink
from delayserver.delivery.amqp_sink import (
    ANSWERS,
    AmqpOpener,
    _AmqpOutlet,
    properties,
    split_amqp_url,
)
from delayserver.delivery.answers import Certainty
from delayserver.delivery.outlet import Outlet
from delayserver.delivery.outlets import OutletSink
from delayserver.delivery.sink import Confirmed, Failed, Result
from delayserver.errors import InputError
from delayserver.records.message import Content, DueDelivery, Payload
from delayserver.records.subscriptions import (
    AmqpTarget,
    Subscription,
    decode_subscription,
    encode_subscription,
)
from delayserver.security.targets import TargetPolicy
from tests.unit.delivery.reasons import reason, reason_at, saying
from tests.unit.fakes import always, delivery, subscription
from tests.waiting import turns, until


def total(m: "Sending", name: str) -> int:
    return sum(getattr(one.outlet, name) for one in m.sink.outlets.all_open())


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


def test_a_header_that_amqp_cuts_off_is_refused() -> None:
    name = "x" * 129
    with pytest.raises(InputError, match="more than 128 bytes"):
        properties(msgspec.structs.replace(delivery(3), payload=Payload(b"1", headers={name: "1"})))
    kept = Payload(b"1", headers={name[1:]: "1"})
    found = properties(msgspec.structs.replace(delivery(3), payload=kept))
    assert name[1:] in (found.headers or {})


RAISED: dict[BaseException, tuple[Certainty, bool]] = {
    DeliveryError(None, Basic.Nack(1)): (Certainty.UNKNOWN, False),
    ChannelPreconditionFailed("message size 9 is larger than 7"): (Certainty.NOT_STORED, True),
    ChannelAccessRefused("no"): (Certainty.NOT_STORED, True),
    ChannelNotFoundEntity("no exchange"): (Certainty.NOT_STORED, False),
    ChannelLockedResource("no"): (Certainty.NOT_STORED, False),
    ChannelClosed(311, "content too large"): (Certainty.UNKNOWN, True),
    ChannelInvalidStateError("closed"): (Certainty.UNKNOWN, True),
    MethodNotImplemented("x"): (Certainty.NOT_STORED, False),
    TypeError("x"): (Certainty.NOT_STORED, False),
    ValueError("x"): (Certainty.NOT_STORED, False),
    struct.error("x"): (Certainty.NOT_STORED, False),
    ConnectionFrameError("frame too large"): (Certainty.UNKNOWN, True),
    AMQPConnectionError("x"): (Certainty.UNKNOWN, True),
    ProtocolSyntaxError("x"): (Certainty.UNKNOWN, True),
    UnmarshalingException("x", "y"): (Certainty.UNKNOWN, True),
    RuntimeError("closed"): (Certainty.UNKNOWN, True),
    OSError("x"): (Certainty.UNKNOWN, True),
    asyncio.CancelledError(): (Certainty.UNKNOWN, True),
    TimeoutError(): (Certainty.UNKNOWN, False),
    KeyError("x"): (Certainty.UNKNOWN, False),
}


@pytest.mark.parametrize("raised", RAISED, ids=lambda one: type(one).__name__)
def test_what_the_client_raises(raised: BaseException) -> None:
    found = ANSWERS.of_error(raised)
    assert (found.kept, found.is_shared) == RAISED[raised]
    assert found.reason.startswith("AMQP: ")


def test_every_row_of_the_table_is_tested() -> None:
    used: set[type] = {PublishError}  # below: it takes a message that was returned
    for raised in RAISED:
        used |= {next((one for one in type(raised).__mro__ if one in ANSWERS.rows), object)}
    assert used - {object} == set(ANSWERS.rows)


class FakeChannel(Channel):
    """As much of a channel of the client as an outlet uses."""

    def __init__(self, connection: "FakeConnection", number: int) -> None:
        self.its_connection, self.number = connection, number
        self.is_gone = False
        self.waiting: list[tuple[bytes, asyncio.Future[None]]] = []

    @property
    def is_closed(self) -> bool:
        return self.is_gone

    async def basic_publish(self, body: bytes, **more: Any) -> Any:
        server = self.its_connection.server
        if self.is_gone:
            raise ChannelInvalidStateError("closed")
        confirmed = asyncio.get_running_loop().create_future()
        server.got.append((self.its_connection.number, self.number, more["routing_key"], body))
        self.waiting.append((body, confirmed))
        if server.hangs or server.is_blocked:
            server.held.append(confirmed)
        else:
            asyncio.get_running_loop().call_soon(self._answer)
        return await confirmed

    def _answer(self) -> None:
        """Answer all messages of one turn together. A bad one ends the channel."""
        waiting, self.waiting = self.waiting, []
        is_bad = any(body in self.its_connection.server.bad for body, _ in waiting)
        if is_bad:
            self.is_gone = True
            del self.its_connection.channels[self.number]
        for _, confirmed in waiting:
            if not confirmed.done():
                if is_bad:
                    confirmed.set_exception(ChannelPreconditionFailed("too large"))
                else:
                    confirmed.set_result(None)

    async def close(self, *_: Any, **__: Any) -> None:
        self.is_gone = True
        self.its_connection.channels.pop(self.number, None)


class FakeConnection:
    def __init__(self, server: "FakeServer", number: int) -> None:
        self.server, self.number = server, number
        self.channels: dict[int, FakeChannel] = {}
        self.is_closed = False
        self.connection_tune = SimpleNamespace(channel_max=server.channel_max)

    async def ready(self) -> None:
        if self.server.is_blocked:
            await asyncio.Event().wait()

    async def channel(self, channel_number: int, publisher_confirms: bool) -> FakeChannel:
        assert channel_number not in self.channels and publisher_confirms
        # RabbitMQ would end the connection of all.
        assert not self.server.channel_max or channel_number <= self.server.channel_max
        await asyncio.sleep(0)
        channel = self.channels[channel_number] = FakeChannel(self, channel_number)
        return channel

    async def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        assert self.is_closed


@dataclass
class FakeServer:
    channel_max: int = 0
    hangs: bool = False
    is_blocked: bool = False
    bad: set[bytes] = field(default_factory=set)
    got: list[tuple[int, int, str, bytes]] = field(default_factory=list)
    held: list[asyncio.Future[None]] = field(default_factory=list)
    connections: list[FakeConnection] = field(default_factory=list)

    async def connect(self) -> Any:
        self.connections.append(FakeConnection(self, len(self.connections)))
        return self.connections[-1]

    async def outlet(self, timeout_ms: int = 5000) -> Any:
        return _AmqpOutlet(self.connect, await self.connect(), timeout_ms)

    def go_on(self) -> None:
        self.is_blocked = self.hangs = False
        for confirmed in self.held:
            if not confirmed.done():
                confirmed.set_result(None)

    # As an opener.

    timeout_ms: int = 5000

    def key(self, subscription: Subscription) -> Hashable:
        return 1

    async def open(self, subscription: Subscription) -> Outlet:
        return await self.outlet(self.timeout_ms)

    @property
    def channels(self) -> int:
        return sum(len(one.channels) for one in self.connections)


def to_queue(number: int, key: str = "q") -> Subscription:
    return subscription(number, type="amqp", target=AmqpTarget("amqp://h", "", key))


class Sending:
    """A sink on a stand-in for RabbitMQ."""

    def __init__(self, server: FakeServer) -> None:
        self.sink = OutletSink(server)
        self.told: dict[tuple[int, int], Result] = {}

    async def deliver(self, number: int, *seqs: int) -> None:
        def tell(some: list[DueDelivery], result: Result) -> None:
            self.told.update(((number, one.entry.seq), result) for one in some)

        ones = [
            msgspec.structs.replace(delivery(seq), payload=Payload(b"%d" % seq)) for seq in seqs
        ]
        await self.sink.deliver(to_queue(number), ones, always, tell)

    def gone(self, number: int) -> None:
        self.sink.on_subscription(msgspec.structs.replace(to_queue(number), deleted=True))


def sending(
    server: FakeServer, main: Callable[[Sending], Coroutine[Any, Any, None]]
) -> dict[tuple[int, int], Result]:
    async def whole() -> dict[tuple[int, int], Result]:
        one = Sending(server)
        try:
            await main(one)
        finally:
            await one.sink.close()
        return one.told

    return asyncio.run(whole())


def test_a_channel_goes_with_its_subscription_and_its_number_comes_again() -> None:
    server = FakeServer(channel_max=3)

    async def main(m: Sending) -> None:
        await m.deliver(1, 1)
        for number in range(2, 50):
            await m.deliver(number, number)
            m.gone(number)
            await turns(5)
            assert server.channels == total(m, "channels") == 1
        await m.deliver(1, 99)

    told = sending(server, main)
    assert len(told) == 50 and set(told.values()) == {Confirmed()}
    assert len(server.connections) == 1


def test_more_subscriptions_than_a_connection_has_channels() -> None:
    server = FakeServer(channel_max=3)

    async def main(m: Sending) -> None:
        for turn in range(3):
            await asyncio.gather(*(m.deliver(number, turn) for number in range(10)))
        assert total(m, "connections") == 4 and total(m, "channels") == 10

    told = sending(server, main)
    assert len(told) == 30 and set(told.values()) == {Confirmed()}
    assert len(server.connections) == 4


def test_an_idle_channel_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amqp_sink, "CHANNEL_IDLE_S", 0.0)
    server = FakeServer(channel_max=2)

    async def main(m: Sending) -> None:
        for number in range(10):
            await m.deliver(number, number)
            await turns(3)

    told = sending(server, main)
    assert len(told) == 10 and set(told.values()) == {Confirmed()}
    assert len(server.connections) == 1


def test_a_time_out_holds_while_room_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The channel that makes room is closed by a broker that does not say goodbye."""
    monkeypatch.setattr(amqp_sink, "CHANNEL_IDLE_S", 0.0)
    server = FakeServer(channel_max=1, timeout_ms=30)
    goodbye = asyncio.Event()

    async def hang(channel: FakeChannel, *_: Any, **__: Any) -> None:
        await goodbye.wait()

    monkeypatch.setattr(FakeChannel, "close", hang)

    async def main(m: Sending) -> None:
        await m.deliver(1, 1)
        await turns(3)
        await asyncio.wait_for(m.deliver(2, 2), 10)
        goodbye.set()

    told = sending(server, main)
    assert told == {
        (1, 1): Confirmed(),
        (2, 2): Failed("AMQP: no confirmation within 30 ms"),
    }
    assert [body for *_, body in server.got] == [b"1"]


def test_one_message_that_ends_its_channel_fails_alone() -> None:
    server = FakeServer(bad={b"5"})
    told = sending(server, lambda m: m.deliver(1, *range(1, 17)))
    assert {one for one, result in told.items() if result != Confirmed()} == {(1, 5)}
    assert told[1, 5] == Failed("AMQP: too large")


def test_while_it_is_blocked_nothing_more_is_sent_and_the_time_stands_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = FakeServer(timeout_ms=100)

    async def main(m: Sending) -> None:
        await m.deliver(1, 1)
        server.is_blocked = True
        # A message that had left before the broker said so lies in its socket.
        (outlet,) = (one.outlet for one in m.sink.outlets.all_open())
        assert outlet.is_blocked
        under_way = asyncio.create_task(send_past(outlet, m))
        waiting = asyncio.create_task(m.deliver(1, 3))
        await asyncio.sleep(0.4)  # four times the time-out, of a real clock: aiormq's is none else
        assert len(server.got) == 2 and not under_way.done() and total(m, "is_blocked") == 1
        server.go_on()
        await asyncio.gather(under_way, waiting)
        assert len(server.got) == 3

    assert set(sending(server, main).values()) == {Confirmed()}


async def send_past(outlet: Outlet, m: Sending) -> None:
    """A message that the outlet has sent already."""
    done = asyncio.get_running_loop().create_future()
    outlet.send(to_queue(1), [delivery(2)], lambda one, answer: done.set_result(answer))
    m.told[1, 2] = (await done).result()


def test_a_broker_that_hangs_is_unknown_after_the_time_out() -> None:
    server = FakeServer(hangs=True, timeout_ms=30)
    told = sending(server, lambda m: m.deliver(1, 1, 2))
    expected = Failed("AMQP: no confirmation within 30 ms")
    assert told == {(1, 1): expected, (1, 2): expected}


CAPABLE: Any = {"capabilities": {"publisher_confirms": True}}
ANSWERED = (
    (commands.Connection.Start(server_properties=CAPABLE), 1),
    (commands.Connection.Tune(channel_max=0, frame_max=131072, heartbeat=0), 2),
    (commands.Connection.OpenOk(), 1),
    (commands.Channel.OpenOk(), 1),
    (commands.Confirm.SelectOk(), 0),
)
"""The words of a broker until a channel is there, and how many frames it gets behind each."""


def test_a_broker_that_stops_reading_costs_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amqp_sink, "CLOSE_S", 0.05)
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await reader.readexactly(8)
        for frame, count in ANSWERED:
            channel = int(not frame.name.startswith("Connection"))
            writer.write(marshal(frame, channel))
            for _ in range(count):
                head = await reader.readexactly(7)
                assert head[0] == 1, "no heartbeat"
                await reader.readexactly(int.from_bytes(head[3:]) + 1)

    def sockets() -> int:
        return len(os.listdir("/proc/self/fd")) - len(writers)

    async def main() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            before = sockets()
            sink = OutletSink(AmqpOpener(TargetPolicy()))
            target = AmqpTarget(f"amqp://{host}:{port}", "")
            to = subscription(type="amqp", target=target, timeout_ms=200)
            one = msgspec.structs.replace(delivery(1), payload=Payload(b"x" * 20_000_000))
            await sink.deliver(to, [one], always, lambda some, result: told.append(result))
            closing = asyncio.ensure_future(sink.close())
            await asyncio.wait({closing}, timeout=10)
            await turns(5)
            found = closing.done(), sockets()
            for writer in writers:
                writer.transport.abort()
            await closing
            assert found == (True, before)

    told: list[Result] = []
    asyncio.run(main())
    assert told == [Failed("AMQP: no confirmation within 200 ms")]


def test_closing_ends_what_is_under_way() -> None:
    server = FakeServer(hangs=True)

    async def main(m: Sending) -> None:
        task = asyncio.create_task(m.deliver(1, 1))
        await until(lambda: len(server.got) == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    assert sending(server, main) == {}
    assert all(one.is_closed for one in server.connections)


def test_a_channel_is_closed_behind_what_is_under_way() -> None:
    server = FakeServer(hangs=True)

    async def main(m: Sending) -> None:
        tasks = [asyncio.create_task(m.deliver(number, number)) for number in (1, 2)]
        await until(lambda: len(server.got) == 2)
        m.gone(1)
        await turns(5)
        assert server.channels == 2
        server.go_on()
        await asyncio.gather(*tasks)
        await until(lambda: server.channels == 1)

    assert sending(server, main) == {(1, 1): Confirmed(), (2, 2): Confirmed()}
