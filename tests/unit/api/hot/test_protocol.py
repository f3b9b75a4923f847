"""What connections hold of requests that come in part, and for how long; by hand, without a
network."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import uvicorn
from uvicorn.server import ServerState

from delayserver.api.access import Access
from delayserver.api.hot import connection as connection_module
from delayserver.api.hot.asgi import HotPath
from delayserver.api.hot.connection import PART_BYTES, Phase, unsent_bytes
from delayserver.api.hot.protocol import LINGER_S, make_protocol
from delayserver.api.moving import Moving
from delayserver.security.tokens import TokenFile, TokenTable
from tests.unit.api.hot.test_publish import Machine, message
from tests.waiting import turns, wait_until
from tests.world.storage.files import SimulatedFiles

TOKEN = "sixteen letters!"
BATCH, ONE = "/v1/messages/batch", "/v1/messages"


class Timer:
    def __init__(self, due_s: float, call: Callable[[], None]) -> None:
        self.due_s = due_s
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self.call = None


class HandLoop:
    """A loop whose time is moved by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.timers: list[Timer] = []

    def time(self) -> float:
        return self.now_s

    def call_later(self, wait_s: float, call: Callable[[], None]) -> Timer:
        self.timers.append(Timer(self.now_s + wait_s, call))
        return self.timers[-1]

    def pass_time(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while due := [one for one in self.timers if one.call and one.due_s <= end_s]:
            first = min(due, key=lambda one: one.due_s)
            self.timers.remove(first)
            self.now_s = max(self.now_s, first.due_s)
            assert first.call is not None
            first.call()
        self.now_s = end_s


class HandTransport:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.written = b""
        self.closing = False
        self.unread_bytes = 0
        self.ends_in_stages = True

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.closing = True

    abort = write_eof = close

    def is_closing(self) -> bool:
        return self.closing

    def can_write_eof(self) -> bool:
        return self.ends_in_stages

    def get_write_buffer_size(self) -> int:
        return self.unread_bytes

    def get_extra_info(self, name: str) -> None:
        return None

    def pause_reading(self) -> None:
        """Nothing more is sent in these tests."""

    resume_reading = pause_reading


class Listener:
    """Connections of one server."""

    def __init__(self, token: str | None = None, **settings: Any) -> None:
        self.machine = Machine(**settings)
        tokens = TokenTable(TokenFile(SimulatedFiles("data")), token, lambda: 0.0)
        tokens.refresh(0)
        limits = self.machine.settings
        self.passed_on: list[str] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            """Never asked: tasks are noted, and do not run."""

        access = Access(
            tokens, app, headers_max=limits.headers_max, head_max_bytes=limits.head_max_bytes
        )
        self.protocol = make_protocol(self.machine.hot, access, limits)
        self.config = uvicorn.Config(app, ws="none", lifespan="off", log_config=None)
        self.state = ServerState()
        self.loop = HandLoop()

    @property
    def held_bytes(self) -> int:
        """Of heads and bodies."""
        held: dict[Phase, int] = self.protocol.receiving.held_bytes
        assert held[Phase.NOTHING] == 0
        return sum(held.values())

    def connect(self, unserved: bytes = b"", **more: bool) -> tuple[Any, HandTransport]:
        connection: Any = self.protocol(self.config, self.state, {}, _loop=self.loop)  # type: ignore[arg-type]
        connection._start_asgi_task = lambda cycle, app: self.passed_on.append(cycle.scope["path"])
        connection.on_lost = lambda: None
        connection.unserved = unserved
        for name, value in more.items():
            setattr(connection, name, value)
        transport = HandTransport()
        transport.ends_in_stages = not connection.is_tunnel
        connection.connection_made(transport)
        return connection, transport


def head(length: int, path: str = BATCH, *fields: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: localhost", f"content-length: {length}", *fields]
    return "\r\n".join([*lines, "", ""]).encode()


def test_a_body_without_a_token_is_not_kept() -> None:
    listener = Listener(TOKEN)
    for fields in ((), ("authorization: Bearer guess",)):
        connection, _ = listener.connect()
        connection.data_received(head(1000, BATCH, *fields) + b"[")
        assert connection._head is None
    assert listener.passed_on == [BATCH, BATCH]  # where they are answered without their bodies
    connection, _ = listener.connect()
    connection.data_received(head(1000, BATCH, f"authorization: Bearer {TOKEN}") + b"[")
    assert connection._head.path == BATCH


def test_bodies_that_come_in_part_have_one_bound_together() -> None:
    listener = Listener(batch_max_bytes=5000, body_max_bytes=1000, receiving_max_bytes=10_000)
    ones = [listener.connect() for _ in range(3)]
    for connection, _ in ones[:2]:
        connection.data_received(head(5000) + b" " * 4000)
    assert listener.held_bytes == 2 * (4000 + PART_BYTES)
    ones[2][0].data_received(head(5000) + b" " * 1000)
    assert not ones[2][1].written
    ones[2][0].data_received(b" " * 1000)
    answer = ones[2][1].written
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"\r\nretry-after: 1\r\n" in answer
    assert b"receiving_max_bytes" in answer
    ones[2][0].data_received(b" " * 3000)  # nobody looks at it
    assert ones[2][1].written == answer
    assert listener.held_bytes == 2 * (4000 + PART_BYTES)
    # The others go on, and what is whole counts no more.
    ones[0][0].data_received(b"]".rjust(1000))
    assert ones[0][1].written.startswith(b"HTTP/1.1 422 ")
    assert listener.held_bytes == 4000 + PART_BYTES
    ones[1][0].connection_lost(None)
    assert listener.held_bytes == 0


def test_heads_have_a_bound_too_which_is_not_that_of_bodies() -> None:
    listener = Listener(batch_max_bytes=5000, body_max_bytes=1000, receiving_max_bytes=5000)
    (one, first), (other, second), (sender, third) = (listener.connect() for _ in range(3))
    for connection in (one, other):
        connection.data_received(b"GET /v1/elsewhere HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 2900)
    assert not first.written
    assert second.written.startswith(b"HTTP/1.1 503 ")
    sender.data_received(head(5000) + b" " * 4000)
    assert not third.written
    assert listener.held_bytes > 6900
    for connection in (one, sender):
        connection.connection_lost(None)
    assert listener.held_bytes == 0


def test_a_head_that_came_in_part_does_not_count_with_its_body() -> None:
    listener = Listener()
    connection, _ = listener.connect()
    data = head(100, "/v1/elsewhere").replace(b"POST", b"PUT")
    connection.data_received(data[:30])
    assert listener.held_bytes == 30 + PART_BYTES
    connection.data_received(data[30:] + b"[")
    assert listener.held_bytes == len(data) - 30 + 1 + PART_BYTES
    connection.data_received(b"]" * 99)
    assert listener.held_bytes == 0


def test_many_small_parts_cost_more_than_their_bytes() -> None:
    listener = Listener(batch_max_bytes=5000, body_max_bytes=1000, receiving_max_bytes=5000)
    connection, transport = listener.connect()
    connection.data_received(head(5000) + b"[")
    for _ in range(5000 // PART_BYTES):
        connection.data_received(b" ")
    assert transport.written.startswith(b"HTTP/1.1 503 ")


@pytest.mark.parametrize("path", [BATCH, "/v1/elsewhere"])
def test_a_body_does_not_buy_time_without_end(path: str) -> None:
    listener = Listener(head_timeout_ms=1000, body_timeout_ms=1000, body_time_max_ms=30_000)
    connection, transport = listener.connect()
    connection.data_received(head(100_000, path) + b" " * 60_000)
    listener.loop.pass_time(30.0)
    assert not transport.written
    listener.loop.pass_time(1.5)
    assert transport.written.startswith(b"HTTP/1.1 408 ")
    assert listener.held_bytes == 0


@pytest.mark.parametrize("path", [ONE, BATCH, "/v1/elsewhere"])
def test_what_has_come_in_part_is_refused_when_the_server_stops(path: str) -> None:
    listener = Listener()
    connection, transport = listener.connect()
    connection.data_received(head(100, path) + b"[")
    connection.shutdown()
    first, _, rest = transport.written.partition(b"\r\n")
    assert first == b"HTTP/1.1 503 Service Unavailable"
    assert b"application/problem+json" in rest
    assert b"problem:stopping" in rest
    assert b"\r\nretry-after: 2\r\n" in rest


class Held(Moving):
    """Keeps what has come of each."""

    def __init__(self) -> None:
        super().__init__()
        self.unserved: list[bytes] = []

    def hold(self, transport: Any, data: bytes) -> bool:
        self.unserved.append(data)
        return True


@pytest.mark.parametrize(
    "came",
    [b"", b"POST /v1/mess", head(100, ONE) + b"[", head(100, BATCH) + b"[", head(2, BATCH) + b"["],
)
def test_what_has_not_begun_is_left_to_the_next_server(came: bytes) -> None:
    listener = Listener()
    connection, transport = listener.connect()
    connection.data_received(came)
    listener.protocol.moving = held = Held()
    connection.shutdown()
    assert (held.unserved, transport.written) == ([came], b"")
    assert listener.held_bytes == 0 and not listener.state.connections
    assert not any(timer.call for timer in listener.loop.timers)


def test_what_has_begun_is_answered_here() -> None:
    listener = Listener()
    listener.protocol.moving = held = Held()
    body = b'{"subject":"orders"}'
    whole = head(len(body), ONE) + body
    for rest in (b"", head(100, ONE) + b"[", b"POST /v1/mess"):
        connection, transport = listener.connect()
        connection.data_received(whole + rest)
        connection.shutdown()
        listener.machine.commit()
        assert transport.written.count(b"HTTP/1.1 201 ") == 1
        assert transport.written.count(b"connection: close") == 1
    assert held.unserved == []


def test_a_body_that_comes_in_part_is_waited_for_if_its_call_has_begun() -> None:
    listener = Listener()
    connection, transport = listener.connect()
    connection.data_received(head(100, "/v1/elsewhere") + b"[")
    listener.protocol.moving = held = Held()
    connection.shutdown()
    assert (listener.passed_on, transport.written, held.unserved) == (["/v1/elsewhere"], b"", [])
    connection.data_received(b" " * 99)
    assert not connection.cycle.more_body and not connection.cycle.keep_alive


def test_a_connection_begins_with_what_the_server_before_has_not_served() -> None:
    listener = Listener()
    body = b'{"subject":"orders"}'
    _, transport = listener.connect(head(len(body), ONE) + body)
    listener.machine.commit()
    assert transport.written.startswith(b"HTTP/1.1 201 ")


@pytest.mark.parametrize("is_late", [True, False])
@pytest.mark.parametrize("moves", [True, False])
def test_who_passes_calls_on_is_told_that_nothing_is_done(is_late: bool, moves: bool) -> None:
    """A call may be under way to here when the server ends: this is its answer."""
    listener = Listener()
    listener.protocol.moving = held = Held() if moves else None
    connection, transport = listener.connect(is_tunnel=True, comes_late=is_late)
    if not is_late:
        connection.shutdown()
    first, _, rest = transport.written.partition(b"\r\n")
    assert first == b"HTTP/1.1 503 Service Unavailable"
    assert b"connection: close" in rest and b'"urn:delayserver:problem:standby"' in rest
    assert not transport.closing  # It may still send.
    connection.data_received(head(20, ONE) + b'{"subject":"orders"}')
    listener.machine.commit()
    assert transport.written.count(b"HTTP/1.1") == 1
    listener.loop.pass_time(LINGER_S)
    assert transport.closing
    assert held is None or held.unserved == []


def test_what_came_before_the_end_of_a_client_is_answered() -> None:
    listener = Listener()
    body = b'{"subject":"orders"}'
    whole = head(len(body), ONE) + body
    for rest, answers in ((b"", 2), (head(100), 2), (head(100) + b"[", 2), (b"POST /v1/m", 2)):
        connection, transport = listener.connect()
        connection.data_received(whole * 2 + rest)
        assert connection.eof_received() is True
        assert not transport.closing
        listener.machine.commit()
        assert transport.written.count(b"HTTP/1.1 201 ") == answers
        assert transport.written.count(b"connection: close") == 1
        assert transport.closing
    connection, _ = listener.connect()
    connection.data_received(head(100) + b"[")
    assert connection.eof_received() is False
    assert listener.held_bytes == 0


def turn(listener: Listener) -> None:
    """One turn of the event loop, as far as slices of work go on in it."""
    ports = listener.machine.ports
    turns, ports.turns = ports.turns, []
    for function in turns:
        function()


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_bad_batch_takes_its_turns_and_holds_up_nobody_else(is_gone: bool) -> None:
    listener = Listener()
    listener.machine.slices.turn_items = 50
    bad = b"[%b]" % b",".join([b'{"subject":"orders","ttl":0}'] * 40)
    body = b'{"subject":"orders"}'
    one = head(len(body), ONE) + body
    connection, transport = listener.connect()
    connection.data_received(one + head(len(bad)) + bad + one)
    other, answered = listener.connect()
    other.data_received(one)
    listener.machine.commit()
    assert transport.written.count(b"HTTP/1.1 ") == 1  # the publish before it
    assert answered.written.startswith(b"HTTP/1.1 201 ")
    if is_gone:
        transport.close()
        connection.connection_lost(None)
    turns = 0
    while listener.machine.ports.turns:
        turn(listener)
        turns += 1
    assert turns >= 7
    if is_gone:
        assert transport.written.count(b"HTTP/1.1 ") == 1
        return
    assert transport.written.count(b"HTTP/1.1 422 ") == 1
    assert b'"40 of 40 messages are invalid"' in transport.written
    # The server looks at the request behind it now.
    listener.machine.commit()
    assert transport.written.count(b"HTTP/1.1 201 ") == 2


def test_bodies_that_wait_in_slices_have_one_bound_together() -> None:
    bad = b"[%b]" % b",".join([b'{"subject":"orders","ttl":0}'] * 40)
    limit = 2 * len(bad)
    listener = Listener(batch_max_bytes=limit, body_max_bytes=limit, receiving_max_bytes=limit)
    listener.machine.slices.turn_items = 50
    ones = [listener.connect() for _ in range(3)]
    for connection, _ in ones:
        connection.data_received(head(len(bad)) + bad)
    assert [one.written[9:12] for _, one in ones] == [b"", b"", b"503"]
    assert b"receiving_max_bytes" in ones[2][1].written
    assert listener.machine.hot.bodies.held_bytes == limit
    while listener.machine.ports.turns:
        turn(listener)
    assert [one.written[9:12] for _, one in ones] == [b"422", b"422", b"503"]
    assert listener.machine.hot.bodies.held_bytes == 0
    ones[2][0].data_received(head(len(bad)) + bad)  # The connection goes on.
    while listener.machine.ports.turns:
        turn(listener)
    assert ones[2][1].written.count(b"HTTP/1.1 422 ") == 1


@pytest.mark.parametrize("path", [BATCH, "/v1/messages/cancel"])
def test_bodies_that_come_through_asgi_are_counted_too(path: str) -> None:
    machine = Machine(batch_max_bytes=1000, body_max_bytes=1000, receiving_max_bytes=1000)
    hot = HotPath(cast(Any, machine.calls), machine.hot, cast(Any, None))
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": []}
    sent: list[Any] = []
    held: list[int] = []

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"[" + b" " * 99, "more_body": False}

    async def send(event: Any) -> None:
        sent.append(event)
        held.append(machine.hot.bodies.held_bytes)

    for others_bytes, status in ((901, 503), (900, 422)):
        with machine.hot.bodies.holding(others_bytes):
            asyncio.run(hot.publish(dict(scope), receive, send))
        assert sent[-2]["status"] == status
        assert held[-1] == others_bytes


def test_what_is_passed_on_is_answered_too_but_for_a_call_that_may_wait() -> None:
    listener = Listener()
    for path, stays in (("/v1/elsewhere", True), ("/v1/subscriptions/a/pull?b=c", False)):
        connection, _ = listener.connect()
        connection.data_received(head(0, path))
        assert connection.eof_received() is stays


OFFER = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__")


@pytest.mark.parametrize("split", [1 << 20, 50, 1])
def test_an_offer_to_go_on_with_another_protocol_is_ignored(split: int) -> None:
    listener = Listener()
    body = b'{"subject":"orders"}'
    for path in (ONE, "/v1/elsewhere"):
        connection, transport = listener.connect()
        data = head(len(body), path, *OFFER) + body
        for start in range(0, len(data), split):
            connection.data_received(data[start : start + split])
        if path == ONE:
            listener.machine.commit()
            assert transport.written.startswith(b"HTTP/1.1 201 ")
            connection.data_received(data)  # a head that is known
            listener.machine.commit()
            assert transport.written.count(b"HTTP/1.1 201 ") == 2
        else:
            assert listener.passed_on == [path]
            assert bytes(connection.cycle.body) == body
            assert not connection.cycle.more_body
            assert connection.cycle.keep_alive
            assert not [value for name, value in connection.headers if name == b"upgrade"]


def test_many_offers_in_one_piece_are_ignored_one_after_the_other() -> None:
    listener = Listener()
    connection, _ = listener.connect()
    one = head(0, "/v1/elsewhere", *OFFER)
    connection.data_received(one * 3000)
    assert listener.passed_on == ["/v1/elsewhere"]
    assert len(connection.pipeline) == 2999


def test_a_proxy_is_asked_for_in_vain() -> None:
    connection, transport = Listener().connect()
    connection.data_received(b"CONNECT localhost:80 HTTP/1.1\r\nhost: localhost:80\r\n\r\n")
    assert transport.written.startswith(b"HTTP/1.1 400 ")


def test_a_consumer_that_goes_is_left_before_anything_else_happens() -> None:
    listener, happened = Listener(), list[str]()

    def serve(call: object, data: bytes, caller: object, told: object) -> Callable[[], None]:
        happened.append(data.decode())
        return lambda: happened.append("left")

    consuming = SimpleNamespace(serve=serve)
    hot: Any = SimpleNamespace(consuming=consuming, turns=listener.machine.hot.turns)
    path = HotPath(cast(Any, None), hot, cast(Any, None))
    tasks = list[asyncio.Task[None]]()

    def begin(cycle: Any, app: object) -> None:
        tasks.append(asyncio.create_task(cycle.run_asgi(path)))

    async def run() -> None:
        connection, transport = listener.connect()
        connection._start_asgi_task = begin
        connection.data_received(head(2, "/v1/subscriptions/s/pull?way=asgi") + b"{}")
        await turns()
        assert happened == ["{}"]
        assert not connection.eof_received()
        connection.connection_lost(None)
        # In the same turn of the event loop: a message may fall due in the next.
        assert happened == ["{}", "left"]
        await asyncio.gather(*tasks)
        assert happened == ["{}", "left"]
        assert not transport.written

    asyncio.run(run())


def test_answers_that_are_not_read_have_a_bound_together_and_the_longest_goes() -> None:
    listener = Listener(unread_max_bytes=1000)
    readers = [listener.connect() for _ in range(4)]
    unread = listener.protocol.unread
    for (connection, transport), length in zip(readers, (300, 500, 200, 100), strict=True):
        transport.unread_bytes = length
        connection.pause_writing()
    assert [transport.closing for _, transport in readers] == [False, True, False, False]
    assert unread.total_bytes == 600
    readers[0][0].resume_writing()
    readers[2][0].connection_lost(None)
    assert unread.total_bytes == 100


def test_a_client_that_reads_slowly_is_not_cut_off_and_one_that_does_not_read_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The system's buffer is large: that ours stays as long says nothing."""
    listener = Listener(write_timeout_ms=1000)
    (slow, transport), (stuck, stuck_transport) = listener.connect(), listener.connect()
    in_system = 3000
    monkeypatch.setattr(
        connection_module,
        "unsent_bytes",
        lambda one: 5000 + (in_system if one is transport else 3000),
    )
    for connection, one in (slow, transport), (stuck, stuck_transport):
        one.unread_bytes = 5000
        connection.pause_writing()
    for _ in range(10):
        listener.loop.pass_time(0.4)
        in_system -= 100
    assert (transport.closing, stuck_transport.closing) == (False, True)


def test_what_the_system_has_to_send_is_counted() -> None:
    """Over a real connection whose client does not read."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    with client, accepted:
        accepted.setblocking(False)
        sent = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                sent += accepted.send(bytes(1 << 20))

        class Transport:
            def get_extra_info(self, name: str) -> socket.socket:
                return accepted

            def get_write_buffer_size(self) -> int:
                return 7

        def unsent() -> int:
            return unsent_bytes(Transport())  # type: ignore[arg-type]

        before = unsent()
        assert 7 < before <= sent + 7
        client.recv(1 << 22)
        wait_until(lambda: unsent() < before)


def test_a_process_that_may_have_lost_its_shard_says_nothing_of_it() -> None:
    listener = Listener()
    holds = True
    listener.machine.hot.exit.is_open = lambda: holds
    connection, transport = listener.connect()
    # Its group becomes durable, and the process was stopped meanwhile.
    body = message()
    connection.data_received(head(len(body), "/v1/messages") + body)
    listener.machine.hot.decide()
    holds = False
    listener.machine.commit()
    # An answer that waits for no group.
    connection.data_received(head(1) + b"{")
    assert transport.written.count(b"HTTP/1.1 503 ") == 2
    assert transport.written.count(b"unknown") == 2
    assert b" 201 " not in transport.written and b" 422 " not in transport.written
