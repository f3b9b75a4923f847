"""Receiving while a server is measured: consumers that pull, and a receiver of webhooks.

Each runs in a process of its own. The moment of receipt is taken first, by the clock of the day,
since that is the clock `deliver_at` speaks of; lateness is worked out when everything has come.
"""

import asyncio
import re
import select
import time
from dataclasses import dataclass
from datetime import datetime
from typing import cast

import httptools
import msgspec
import uvloop
from load import LoadConnection, http_request, wait_for


class _Pulled(msgspec.Struct):
    id: str
    deliver_at: str


class _PullAnswer(msgspec.Struct):
    messages: list[_Pulled]


class _AckAnswer(msgspec.Struct):
    acked: int


_decode_pull = msgspec.json.Decoder(_PullAnswer).decode
_decode_ack = msgspec.json.Decoder(_AckAnswer).decode


def _pull_request(
    name: str, messages_max: int, wait_ms: int, acks: list[bytes] | None = None
) -> bytes:
    wanted: dict[str, object] = {"max": messages_max, "wait": wait_ms}
    if acks:
        wanted["ack"] = [lease.decode() for lease in acks]
    body = msgspec.json.encode(wanted)
    return http_request("POST", f"/v1/subscriptions/{name}/pull", body)


_find_leases = re.compile(rb'"lease":"([^"]*)"').findall
"""While time is taken, an answer is not decoded: no body that is published here has a lease."""


def _ack_request(name: str, leases: list[bytes]) -> bytes:
    body = b'{"leases":["%b"]}' % b'","'.join(leases)
    return http_request("POST", f"/v1/subscriptions/{name}/ack", body)


def _lateness_ms(received_ns: int, due: str) -> float:
    due_ms = round(datetime.fromisoformat(due).timestamp() * 1000)
    return (received_ns - due_ms * 1_000_000) / 1e6


@dataclass(frozen=True, slots=True)
class Consumed:
    """What one consumer had, all of it acknowledged."""

    ids: list[str]
    acked: int
    began_at: float
    ended_at: float


def pull_all(
    port: int, name: str, start_at: float, messages_max: int, seconds_max: float
) -> Consumed:
    """Pull and ack in turn until nothing is there, or time is up."""
    answers: list[bytes] = []
    acked = 0
    pull = _pull_request(name, messages_max, 0)
    with LoadConnection(port) as connection:
        wait_for(start_at)
        began_at = ended_at = time.monotonic()
        while ended_at - began_at < seconds_max:
            answer = connection.demand(pull)
            leases = _find_leases(answer)
            if not leases:
                break
            answers.append(answer)
            acked += _decode_ack(connection.demand(_ack_request(name, leases))).acked
            ended_at = time.monotonic()
    ids = [message.id for answer in answers for message in _decode_pull(answer).messages]
    return Consumed(ids, acked, began_at, ended_at)


@dataclass(frozen=True, slots=True)
class Received:
    """Deliveries as their receiver saw them, one entry each."""

    ids: list[str]
    lateness_ms: list[float]
    """Moment of receipt less `deliver_at`."""
    acked: int


def pull_on_time(port: int, name: str, count: int, idle_max_ms: int) -> Received:
    """Long polls on one connection, acks on another, until `count` messages have come.

    Received is what has been read from the socket. Ends early if nothing comes for a while."""
    received: list[tuple[int, bytes]] = []
    total = acked = acks_out = 0
    pull = _pull_request(name, 1000, idle_max_ms)
    with LoadConnection(port) as pulling, LoadConnection(port) as acking:
        pulling.send(pull)
        is_pulling = True
        while is_pulling or acks_out:
            ready, _, _ = select.select([pulling, acking], [], [])
            if pulling in ready:
                answer = pulling.receive()
                received.append((time.time_ns(), answer))
                leases = _find_leases(answer)
                total += len(leases)
                is_pulling = bool(leases) and total < count
                if is_pulling:
                    pulling.send(pull)
                if leases:
                    acking.send(_ack_request(name, leases))
                    acks_out += 1
            while acks_out and (acking in ready or acking.has_more):
                ready = []
                acked += _decode_ack(acking.receive()).acked
                acks_out -= 1
    return _received(received, acked)


def pull_in_turn(port: int, name: str, count: int, idle_max_ms: int, carries: bool) -> Received:
    """One connection that pulls, acknowledges and pulls again, until `count` messages have come.

    `carries`: the next pull has the acks of the one before; else they are a request of their own,
    which is answered before the next pull is made. Ends early if nothing comes for a while."""
    received: list[tuple[int, bytes]] = []
    leases: list[bytes] = []
    total = acked = 0
    with LoadConnection(port) as connection:
        while total < count:
            asked = _pull_request(name, 1000, idle_max_ms, leases if carries else None)
            answer = connection.demand(asked)
            received.append((time.time_ns(), answer))
            if carries and leases:
                acked += _decode_ack(answer).acked
            leases = _find_leases(answer)
            total += len(leases)
            if not leases:
                break
            if not carries or total == count:
                acked += _decode_ack(connection.demand(_ack_request(name, leases))).acked
    return _received(received, acked)


def _received(answers: list[tuple[int, bytes]], acked: int) -> Received:
    pulled = [
        (at_ns, message) for at_ns, answer in answers for message in _decode_pull(answer).messages
    ]
    return Received(
        [message.id for _, message in pulled],
        [_lateness_ms(at_ns, message.deliver_at) for at_ns, message in pulled],
        acked,
    )


def bare_timers(per_s: int, seconds: float) -> list[float]:
    """Milliseconds by which an idle loop's own timers are late, with nothing to do but that."""
    late_ms: list[float] = []

    async def wait() -> None:
        loop = asyncio.get_running_loop()
        begun_at, count = loop.time(), int(per_s * seconds)
        over = loop.create_future()

        def fire(due_at: float) -> None:
            late_ms.append((loop.time() - due_at) * 1000)
            if len(late_ms) == count:
                over.set_result(None)

        for index in range(count):
            due_at = begun_at + 0.1 + index / per_s
            loop.call_at(due_at, fire, due_at)
        await over

    asyncio.run(wait())
    return late_ms


class _Receiver(asyncio.Protocol):
    """Answers each webhook with 200, and remembers when it came."""

    ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"

    def __init__(self, received: list[tuple[int, str, str]]) -> None:
        self._received = received
        self._parser = httptools.HttpRequestParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._now_ns = time.time_ns()
        self._parser.feed_data(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"webhook-id":
            self._id = value.decode()
        elif name == b"delay-due":
            self._due = value.decode()

    def on_message_complete(self) -> None:
        self._received.append((self._now_ns, self._id, self._due))
        self._transport.write(self.ANSWER)


def receive_webhooks(port: int, count: int, idle_max_ms: int) -> Received:
    """A receiver on `port`, until `count` webhooks have come, or nothing comes for a while."""
    received: list[tuple[int, str, str]] = []

    async def receive() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Receiver(received), "127.0.0.1", port)
        known, idle_since = 0, time.monotonic()
        while len(received) < count and time.monotonic() - idle_since < idle_max_ms / 1000:
            await asyncio.sleep(0.05)
            if len(received) > known:
                known, idle_since = len(received), time.monotonic()
        await asyncio.sleep(0.2)  # what comes twice would come now
        server.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(receive())
    return Received(
        [message_id for _, message_id, _ in received],
        [_lateness_ms(at_ns, due) for at_ns, _, due in received],
        len(received),
    )
