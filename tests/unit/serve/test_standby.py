"""A process on standby: what it answers, what it passes on and how, and how it ends.

Clients and owners are sockets here, and their bytes are written down: what passes through has to be
the same on both sides."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import time
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import uvloop

from delayserver.api.moving import Moving
from delayserver.cluster import forwarding, hop
from delayserver.config import Settings
from delayserver.security.tokens import TokenFile, TokenTable
from delayserver.serve import standby as module
from delayserver.serve.certificates import Certificates
from delayserver.serve.standby import StandbyFront
from delayserver.shards.link import Links
from delayserver.shards.map import ClusterMap
from tests.unit.shards.test_map import come, links_of
from tests.waiting import turns, until
from tests.world.storage.files import SimulatedFiles

NOW_MS = 1_795_192_200_000
MIB = 1024 * 1024


class Asked:
    """A request that has come to the owner, and how it is answered."""

    def __init__(
        self,
        head: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        ended: asyncio.Event,
    ) -> None:
        line, *fields = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
        self.method, self.target, _ = line.split(b" ")
        pairs = (field.partition(b": ") for field in fields)
        self.headers = [(name, value) for name, _, value in pairs]
        self.reader = reader
        self.writer = writer
        self.is_answered = asyncio.Event()
        self.ended = ended

    def header(self, name: bytes) -> bytes | None:
        return dict(self.headers).get(name)

    async def body(self) -> bytes:
        return await self.reader.readexactly(int(self.header(b"content-length") or 0))

    def answer(self, body: bytes = b"{}", status: bytes = b"200 OK", *fields: bytes) -> None:
        """Answer, and look at what comes next on the connection."""
        lines = [b"HTTP/1.1 " + status, b"content-length: %d" % len(body), *fields]
        self.writer.write(b"\r\n".join([*lines, b"", body]))
        self.is_answered.set()

    async def gone(self) -> None:
        """Until the standby has closed the connection."""
        self.is_answered.set()
        await self.ended.wait()


class Owner:
    """Accepts connections, and gives the heads of requests to the test."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[Asked] = asyncio.Queue()
        self.connections = 0
        self.writers: list[asyncio.StreamWriter] = []
        self.url = ""
        self._server: asyncio.Server

    async def begin(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=MIB)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.append(writer)
        ended = asyncio.Event()
        try:
            while True:
                asked = Asked(await reader.readuntil(b"\r\n\r\n"), reader, writer, ended)
                self.asked.put_nowait(asked)
                await asked.is_answered.wait()
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            with contextlib.suppress(ConnectionError):
                while await reader.read(MIB):
                    pass
        finally:
            ended.set()
            writer.close()

    def close(self) -> None:
        self._server.close()
        for writer in self.writers:
            writer.transport.abort()


class Client:
    """A connection to the standby."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, method: str, target: str, *fields: str, body: bytes = b"") -> None:
        lines = [f"{method} {target} HTTP/1.1", "host: localhost:1", *fields]
        if body:
            lines.append(f"content-length: {len(body)}")
        self.writer.write("\r\n".join([*lines, "", ""]).encode() + body)

    async def answer(self, *, has_body: bool = True) -> tuple[int, dict[str, str], bytes]:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        line, *fields = head.strip().split("\r\n")
        names = [field.split(": ", 1)[0] for field in fields]
        assert len(names) == len(set(names)), fields
        headers = dict(field.split(": ", 1) for field in fields)
        body = b""
        if has_body and headers.get("transfer-encoding") == "chunked":
            while length := int(await self.reader.readline(), 16):
                body += await self.reader.readexactly(length)
                await self.reader.readline()
            await self.reader.readline()
        elif has_body:
            body = await self.reader.readexactly(int(headers.get("content-length", 0)))
        return int(line.split(" ")[1]), headers, body

    async def ask(self, method: str, target: str, *fields: str, body: bytes = b"") -> Any:
        self.send(method, target, *fields, body=body)
        return await self.answer(has_body=method != "HEAD")

    async def problem(self) -> tuple[int, dict[str, str], dict[str, Any]]:
        status, headers, body = await self.answer()
        assert headers["content-type"] == "application/problem+json"
        return status, headers, json.loads(body)


class World:
    """A standby between clients and an owner."""

    def __init__(self, token: str | None = None, **settings: Any) -> None:
        self.owner = Owner()
        self.owner_url: str | None = None
        self.is_ready = self.has_replica = True
        self.links: Links = links_of(0, {0: 4000, 1: 4001})
        self._limits = Settings(**settings)
        self._tokens = TokenTable(TokenFile(SimulatedFiles("data")), token, lambda: 0.0)
        self._tokens.refresh(0)
        self.standby = self.make_front()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.clients: list[Client] = []

    def make_front(self) -> StandbyFront:
        return StandbyFront(
            self._limits,
            shard=3,
            owner=lambda: self.owner_url,
            is_ready=lambda: self.is_ready,
            has_replica=lambda: self.has_replica,
            shard_map=ClusterMap(self.links, self._limits, lambda: NOW_MS),
            metrics=lambda: "delayserver_lag 7\n",
            tokens=self._tokens,
            clock=lambda: NOW_MS,
        )

    def has_moved_to(self, owner: Owner | None) -> None:
        """The shard has another owner; None: nobody has it."""
        self.owner_url = None if owner is None else owner.url
        self.standby.owner_changed()

    async def begin(self) -> None:
        await self.owner.begin()
        self.owner_url = self.owner.url
        await self.standby.begin([self.listener], Certificates(Settings(), is_node=True))

    async def connect(self) -> Client:
        client = Client(*await asyncio.open_connection(*self.listener.getsockname()))
        self.clients.append(client)
        return client

    async def asked(self) -> Asked:
        return await self.owner.asked.get()

    async def passed(
        self, client: Client, *request: str, body: bytes = b"", part: bytes = b""
    ) -> Asked:
        """A request that was sent and has come to the owner, which it does with the first part of
        its body."""
        client.send(*request, body=body)
        client.writer.write(part)
        return await self.asked()

    async def close(self) -> None:
        for client in self.clients:
            client.writer.transport.abort()
        await self.standby.close()
        self.owner.close()
        self.listener.close()


def run(test: Callable[[World], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        world = World(**settings)
        await world.begin()
        try:
            async with asyncio.timeout(20):
                await test(world)
        finally:
            await world.close()  # what stays open would keep uvloop from ending
        assert world.standby.connections == world.standby.forwarded == 0

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


# ── what passes through ────────────────────────────────────────────────────────────────────────


def test_a_call_passes_as_it_came_without_what_is_meant_for_one_hop() -> None:
    async def test(world: World) -> None:
        client = await world.connect()
        target = "/v1/subjects/a/keys/%2F%c3%a9;x?b=2&a=%20+1&a"
        fields = ("Authorization: Bearer t", "X-A: 1", "x-a: 2", "origin: http://a.test")
        hop = ("Connection: keep-alive, X-Hop, content-length", "X-Hop: 1", "TE: trailers")
        asked = await world.passed(client, "PATCH", target, *fields, *hop, body=b'{"delay": 5}')
        assert (asked.method, asked.target) == (b"PATCH", target.encode())
        assert asked.headers == [
            (b"host", b"localhost:1"),
            (b"authorization", b"Bearer t"),
            (b"x-a", b"1"),
            (b"x-a", b"2"),
            (b"origin", b"http://a.test"),
            (b"content-length", b"12"),
            (b"delay-forwarded", b"1"),
        ]
        assert await asked.body() == b'{"delay": 5}'
        fields_back = (b"ETag: W/7", b"Location: /v1/x", b"connection: keep-alive", b"date: once")
        asked.answer(b"[1]", b"412 Precondition Failed", *fields_back)
        status, headers, body = await client.answer()
        assert (status, body, headers["etag"], headers["location"]) == (412, b"[1]", "W/7", "/v1/x")
        assert headers["date"].startswith("Fri, 20 Nov 2026")
        assert "connection" not in headers
        assert world.standby.answers == {b"412": 1}

    run(test)


def test_connections_to_the_owner_are_kept_and_those_to_another_one_are_not() -> None:
    async def test(world: World) -> None:
        client = await world.connect()
        for _ in range(5):
            asked = await world.passed(client, "POST", "/v1/messages", body=b"x")
            await asked.body()
            asked.answer()
            await client.answer()
        assert world.owner.connections == 1
        other = Owner()
        await other.begin()
        world.owner_url = other.url
        client.send("GET", "/v1/stats")
        (await other.asked.get()).answer()
        await client.answer()
        await asked.gone()
        other.close()

    run(test)


def test_a_head_has_no_body_and_calls_in_a_row_are_answered_in_their_order() -> None:
    async def test(world: World) -> None:
        client = await world.connect()
        for method in ("HEAD", "GET", "HEAD"):
            client.send(method, "/v1/stats")
        for method in ("HEAD", "GET", "HEAD"):
            asked = await world.asked()
            assert asked.method == method.encode()
            asked.writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n")
            asked.writer.write(b"abc" if method == "GET" else b"")
            asked.is_answered.set()
            status, headers, body = await client.answer(has_body=method == "GET")
            assert (status, headers["content-length"]) == (200, "3")
            assert body == (b"abc" if method == "GET" else b"")
        assert world.owner.connections == 1

    run(test)


def test_bodies_in_chunks_pass_in_both_directions_as_they_come() -> None:
    async def test(world: World) -> None:
        client = await world.connect()
        request = ("POST", "/v1/messages/batch", "transfer-encoding: chunked", "expect: no")
        asked = await world.passed(client, *request, part=b"3\r\nabc\r\n")
        assert asked.header(b"transfer-encoding") == b"chunked"
        assert asked.header(b"expect") is None
        assert await asked.reader.readexactly(8) == b"3\r\nabc\r\n"
        client.writer.write(b"2\r\nde\r\n0\r\n\r\n")
        assert await asked.reader.readexactly(12) == b"2\r\nde\r\n0\r\n\r\n"
        asked.writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n")
        head = await client.reader.readuntil(b"\r\n\r\n")
        assert b"transfer-encoding: chunked" in head
        assert await client.reader.readexactly(6) == b"1\r\nx\r\n"
        asked.writer.write(b"0\r\n\r\n")
        asked.is_answered.set()
        assert await client.reader.readexactly(5) == b"0\r\n\r\n"
        await world.passed(client, "GET", "/v1/stats")
        assert world.owner.connections == 1

    run(test)


async def stalled(moved: Callable[[], int]) -> int:
    """How much has moved when nothing moves any more."""
    before, same = -1, 0
    while same < 200:
        await turns()
        before, same = moved(), same + 1 if moved() == before else 0
    return before


def test_an_upload_waits_for_its_owner_and_is_nowhere_else() -> None:
    part, count = bytes(64 * 1024), 1024
    sent = len(part)

    async def send(client: Client) -> None:
        nonlocal sent
        for _ in range(count - 1):
            client.writer.write(part)
            await client.writer.drain()
            sent += len(part)

    async def test(world: World) -> None:
        client = await world.connect()
        length = f"content-length: {len(part) * count}"
        asked = await world.passed(client, "POST", "/v1/messages/batch", length, part=part)
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        sending = asyncio.ensure_future(send(client))
        # The buffers of the system hold some MiB on each way; nobody else may.
        assert await stalled(lambda: sent) < len(part) * count // 2
        received = 0
        while received < len(part) * count:
            received += len(await asked.reader.read(MIB))
        await sending
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert most - before < 8 * MIB  # with the buffers of client and owner, which are here, too
        asked.answer(b"done")
        assert (await client.answer())[2] == b"done"

    run(test)


def test_a_long_answer_waits_for_its_client() -> None:
    async def test(world: World) -> None:
        client = await world.connect()
        asked = await world.passed(client, "GET", "/v1/subjects/a/messages")
        length = 64 * MIB
        asked.writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % length)
        part, written = bytes(MIB), 0

        async def send() -> None:
            nonlocal written
            while written < length:
                asked.writer.write(part)
                await asked.writer.drain()
                written += len(part)

        sending = asyncio.ensure_future(send())
        assert await stalled(lambda: written) < length // 2
        await client.reader.readuntil(b"\r\n\r\n")
        received = 0
        while received < length:
            received += len(await client.reader.read(MIB))
        await sending

    run(test)


def test_an_answer_may_come_before_the_body_has_ended() -> None:
    async def test(world: World) -> None:
        client = await world.connect()
        request = ("POST", "/v1/messages/batch", "content-length: 101")
        asked = await world.passed(client, *request, part=b"x")
        asked.answer(b"too long", b"413 Content Too Large")
        assert (await client.answer())[0] == 413
        await asked.gone()
        client.writer.write(bytes(100))
        (await world.passed(client, "GET", "/v1/stats")).answer()
        assert (await client.answer())[0] == 200

    run(test)


# ── what does not pass ─────────────────────────────────────────────────────────────────────────


def test_what_was_forwarded_is_not_forwarded_again() -> None:
    async def test(world: World) -> None:
        client = await world.connect()
        client.send("POST", "/v1/messages", "delay-forwarded: 1", body=b"x")
        status, headers, problem = await client.problem()
        assert (status, headers["retry-after"]) == (503, "1")
        assert problem["type"] == "urn:delayserver:problem:standby"
        assert "outcome" not in problem
        assert world.owner.connections == 0

    run(test)


def test_who_wants_no_forwarding_is_told_the_owner() -> None:
    async def test(world: World) -> None:
        client = await world.connect()
        client.send("POST", "/v1/messages", "Delay-Forward: no", body=b"x")
        status, headers, _ = await client.problem()
        assert (status, headers["delay-owner"]) == (421, world.owner_url)

    run(test)


def test_a_caller_without_a_token_is_not_told_the_owner() -> None:
    async def test(world: World) -> None:
        client = await world.connect()
        assert world.owner_url is not None
        port = world.owner_url.rpartition(":")[2]
        for is_ready in (True, False):
            world.is_ready = is_ready
            for method, path in (
                ("GET", "/healthz"),
                ("GET", "/metrics"),
                ("GET", "/readyz"),
                ("GET", "/v1/cluster"),
                ("GET", "/v1/stats"),
                ("POST", "/v1/messages"),
            ):
                fields = ("delay-forward: no", "authorization: Bearer guess")
                client.send(method, path, *fields, body=b"x" if method == "POST" else b"")
                status, headers, body = await client.answer()
                assert port not in str(headers) + body.decode(), (method, path, body)
                assert status != 421
        assert world.owner.connections == 0
        client.send(
            "GET", "/v1/stats", "delay-forward: no", "authorization: Bearer sixteen letters!"
        )
        status, headers, _ = await client.problem()
        assert (status, headers["delay-owner"]) == (421, world.owner_url)

    run(test, token="sixteen letters!")


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        return f"http://127.0.0.1:{nobody.getsockname()[1]}"


@pytest.mark.parametrize("url", [None, "", "http://", "gopher://a.test"])
def test_without_an_owner_nothing_is_done(monkeypatch: Any, url: str | None) -> None:
    monkeypatch.setattr(forwarding, "OWNER_WAIT_S", 0.2)

    async def test(world: World) -> None:
        world.owner_url = closed_port() if url == "" else url
        for method in ("GET", "POST"):
            client = await world.connect()
            client.send(method, "/v1/messages", body=b"x")
            status, headers, problem = await client.problem()
            assert (status, headers["retry-after"]) == (503, "1")
            assert "outcome" not in problem

    run(test)


def test_what_is_too_long_is_refused_before_it_is_read() -> None:
    async def test(world: World) -> None:
        client = await world.connect()
        client.send("POST", "/v1/messages/batch", f"content-length: {65 * MIB}")
        client.writer.write(bytes(1000))
        assert (await client.problem())[0] == 413
        client = await world.connect()
        client.send("GET", "/v1/stats", *(f"x-{n}: 1" for n in range(200)))
        assert (await client.problem())[0] == 431
        assert world.owner.connections == 0

    run(test)


def test_a_body_in_chunks_that_turns_out_too_long_is_refused() -> None:
    async def test(world: World) -> None:
        client = await world.connect()
        part = b"%x\r\n%b\r\n" % (MIB, bytes(MIB))
        request = ("POST", "/v1/messages/batch", "transfer-encoding: chunked")
        asked = await world.passed(client, *request, part=part)
        client.writer.write(2 * part)
        assert (await client.problem())[0] == 413
        await asked.gone()

    run(test, body_max_bytes=MIB, batch_max_bytes=2 * MIB)


def test_a_body_that_does_not_come_in_time_ends_the_call_at_both_sides() -> None:
    async def test(world: World) -> None:
        client = await world.connect()
        request = ("POST", "/v1/messages/batch", "content-length: 100")
        asked = await world.passed(client, *request, part=b"x")
        assert (await client.problem())[0] == 408
        await asked.gone()
        assert await client.reader.read() == b""

    run(test, body_timeout_ms=20)


def test_there_are_no_more_connections_than_at_an_owner() -> None:
    async def test(world: World) -> None:
        for _ in range(2):
            assert (await (await world.connect()).ask("GET", "/healthz"))[0] == 200
        client = await world.connect()
        assert (await client.problem())[0] == 503

    run(test, connections_max=2)


# ── when the owner or the client goes ──────────────────────────────────────────────────────────


def test_of_a_call_that_the_owner_did_not_answer_nobody_knows() -> None:
    async def test(world: World) -> None:
        client = await world.connect()
        asked = await world.passed(client, "POST", "/v1/messages", body=b"x")
        asked.writer.write(b"HTTP/1.1 201 Created\r\ncontent-length: 10\r\n\r\n{")
        asked.writer.close()
        status, headers, problem = await client.problem()
        assert (status, headers["retry-after"], problem["outcome"]) == (503, "1", "unknown")
        assert (await client.ask("GET", "/healthz"))[0] == 200  # on the same connection

    run(test)


def test_a_call_that_changes_nothing_is_asked_once_more() -> None:
    async def test(world: World) -> None:
        client = await world.connect()
        (await world.passed(client, "GET", "/v1/stats")).writer.close()
        (await world.asked()).answer(b"again")
        assert (await client.answer())[2] == b"again"
        (await world.passed(client, "GET", "/v1/stats")).writer.close()
        (await world.asked()).writer.close()
        status, _, problem = await client.problem()
        assert status == 503
        assert "outcome" not in problem

    run(test)


@pytest.mark.parametrize("closes", [1, 10**9])
def test_a_connection_that_ends_before_anything_is_sent_is_no_attempt(
    monkeypatch: Any, closes: int
) -> None:
    async def test(world: World) -> None:
        forwarder = world.standby._forwarder
        connect, made = forwarder.connect, itertools.count(1)

        async def closing(place: Any) -> Any:
            stream = await connect(place)
            if next(made) <= closes:
                stream.abort()
            return stream

        monkeypatch.setattr(forwarder, "connect", closing)
        client = await world.connect()
        client.send("POST", "/v1/messages", body=b"x")
        if closes == 1:
            (await world.asked()).answer(b"done")
            assert (await client.answer())[2] == b"done"
        else:
            status, _, problem = await client.problem()
            assert status == 503 and "outcome" not in problem
            assert next(made) > 2

    monkeypatch.setattr(forwarding, "OWNER_WAIT_S", 0.2)
    run(test)


NOT_BEGUN = b'{"type":"urn:delayserver:problem:standby","status":503}'


@contextlib.asynccontextmanager
async def next_owner() -> AsyncIterator[Owner]:
    owner = Owner()
    await owner.begin()
    yield owner
    owner.close()


@pytest.mark.parametrize("how", ["whole", "in parts", "in chunks"])
def test_what_an_owner_that_leaves_has_not_begun_is_asked_of_the_next_one(
    monkeypatch: Any, how: str
) -> None:
    monkeypatch.setattr(forwarding, "LOOK_AGAIN_S", 0.0)

    async def test(world: World) -> None:
        client = await world.connect()
        async with next_owner() as other:
            request: tuple[str, ...] = ("POST", "/v1/messages")
            if how == "whole":
                asked = await world.passed(client, *request, body=b"abcde")
            elif how == "in parts":
                asked = await world.passed(client, *request, "content-length: 5", part=b"abc")
            else:
                chunks = "transfer-encoding: chunked"
                asked = await world.passed(client, *request, chunks, part=b"3\r\nabc\r\n")
            world.has_moved_to(None)
            asked.answer(NOT_BEGUN, b"503 Service Unavailable")
            await asked.gone()
            await turns(50)  # Nobody has it for a while.
            world.has_moved_to(other)
            again = await other.asked.get()
            if how == "in parts":
                client.writer.write(b"de")
            if how == "in chunks":
                client.writer.write(b"2\r\nde\r\n0\r\n\r\n")
                assert await again.reader.readexactly(20) == b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
            else:
                assert await again.body() == b"abcde"
            again.answer(b"done")
            assert (await client.answer())[::2] == (200, b"done")
            assert world.standby.answers == {b"200": 1}

    run(test)


def test_a_call_that_nobody_begins_is_refused_in_time_and_was_not_done(monkeypatch: Any) -> None:
    async def test(world: World) -> None:
        client = await world.connect()
        client.send("POST", "/v1/messages", body=b"x")
        answered = asyncio.ensure_future(client.problem())
        times = 0
        while not answered.done():
            with contextlib.suppress(TimeoutError):
                asked = await asyncio.wait_for(world.asked(), 0.1)
                asked.answer(NOT_BEGUN, b"503 Service Unavailable")
                times += 1
        status, headers, problem = await answered
        assert (status, headers["retry-after"], "outcome" in problem) == (503, "1", False)
        assert times > 2

    monkeypatch.setattr(forwarding, "OWNER_WAIT_S", 0.3)
    run(test)


def test_a_body_that_is_not_kept_is_not_sent_again(monkeypatch: Any) -> None:
    monkeypatch.setattr(hop, "KEPT_MAX_BYTES", 2)

    async def test(world: World) -> None:
        client = await world.connect()
        asked = await world.passed(client, "POST", "/v1/messages", "content-length: 5", part=b"abc")
        asked.answer(NOT_BEGUN, b"503 Service Unavailable")
        status, _, problem = await client.problem()
        assert (status, "outcome" in problem) == (503, False)

    run(test)


def test_a_long_answer_that_is_not_whole_does_not_look_whole() -> None:
    async def test(world: World) -> None:
        client = await world.connect()
        asked = await world.passed(client, "GET", "/v1/subjects/a/messages")
        asked.writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\nabc")
        await client.reader.readuntil(b"\r\n\r\n")
        asked.writer.close()
        assert await client.reader.read() == b"abc"

    run(test)


@pytest.mark.parametrize("length", [2, 100])
def test_a_call_that_its_client_gives_up_is_given_up(length: int) -> None:
    async def test(world: World) -> None:
        client = await world.connect()
        client.send("POST", "/v1/subscriptions/s/pull", f"content-length: {length}")
        client.writer.write(b"{}")
        asked = await world.asked()
        client.writer.close()
        await asked.gone()
        assert world.standby.answers == {}

    run(test)


def test_a_client_that_goes_while_the_owner_is_looked_for(monkeypatch: Any) -> None:
    async def test(world: World) -> None:
        looking = asyncio.Event()
        left = asyncio.Event()

        async def connect(place: Any) -> Any:
            looking.set()
            try:
                await asyncio.Event().wait()
            finally:
                left.set()

        monkeypatch.setattr(world.standby._forwarder, "connect", connect)
        client = await world.connect()
        client.send("POST", "/v1/subscriptions/s/pull", body=b"{}")
        await looking.wait()
        client.writer.close()
        await left.wait()

    run(test)


def test_an_owner_that_says_nothing_is_given_up(monkeypatch: Any) -> None:
    monkeypatch.setattr(forwarding, "SILENCE_S", 0.0)
    monkeypatch.setattr(forwarding, "SWEEP_S", 0.01)

    async def test(world: World) -> None:
        client = await world.connect()
        asked = await world.passed(client, "POST", "/v1/messages", body=b"x")
        assert (await client.problem())[2]["outcome"] == "unknown"
        await asked.gone()

    run(test)


def test_connections_that_are_idle_for_long_are_closed(monkeypatch: Any) -> None:
    monkeypatch.setattr(forwarding, "SWEEP_S", 0.01)

    async def test(world: World) -> None:
        client = await world.connect()
        asked = await world.passed(client, "GET", "/v1/stats")
        asked.answer()
        await client.answer()
        await asked.gone()

    run(test, idle_timeout_ms=100)


# ── what is answered here ──────────────────────────────────────────────────────────────────────


def test_it_says_whether_it_can_have_calls_answered() -> None:
    async def test(world: World) -> None:
        client = await world.connect()
        assert (await client.ask("GET", "/healthz"))[0] == 200
        assert (await client.ask("HEAD", "/healthz"))[::2] == (200, b"")
        assert (await client.ask("GET", "/readyz"))[0] == 200
        world.is_ready = False
        client.send("GET", "/readyz")
        status, headers, problem = await client.problem()
        assert (status, headers["retry-after"]) == (503, "1")
        assert "shard 3, and has not caught up" in problem["detail"]
        world.is_ready, world.owner_url = True, None
        client.send("GET", "/readyz")
        status, _, problem = await client.problem()
        assert (status, "no owner" in problem["detail"]) == (503, True)
        assert (await client.ask("GET", "/healthz"))[0] == 200
        assert world.owner.connections == 0

    run(test)


def test_without_a_replica_it_says_that_it_passes_on() -> None:
    async def test(world: World) -> None:
        world.has_replica = False
        client = await world.connect()
        status, _, body = await client.ask("GET", "/readyz")
        assert (status, json.loads(body)) == (200, {"status": "passing on"})
        world.owner_url = None
        client.send("GET", "/readyz")
        status, _, problem = await client.problem()
        assert (status, "passing on calls to shard 3" in problem["detail"]) == (503, True)

    run(test)


def test_it_has_the_map_and_tells_when_it_changes() -> None:
    async def test(world: World) -> None:
        client = await world.connect()
        status, headers, body = await client.ask("GET", "/v1/cluster")
        version = json.loads(body)["version"]
        assert (status, headers["etag"]) == (200, f'W/"{version}"')
        assert [one["url"] for one in json.loads(body)["shards"]] == [
            "http://localhost:4000",
            "http://localhost:4001",
            None,
        ]
        known = f'if-none-match: W/"{version}"'
        assert (await client.ask("GET", "/v1/cluster", known))[0] == 304
        client.send("GET", f"/v1/cluster?after={version}&wait=60s")
        other = await world.connect()
        other.send("GET", "/v1/cluster?after=-1")
        assert (await other.problem())[0] == 422
        other.send("GET", "/v1/cluster?after=1&wait=61s")
        assert (await other.problem())[0] == 422
        come(world.links, 2, 4002)
        assert json.loads((await client.answer())[2])["version"] != version

    run(test)


def test_what_is_answered_here_is_not_for_everybody() -> None:
    async def test(world: World) -> None:
        client = await world.connect()
        for path in ("/metrics", "/v1/cluster"):
            assert (await client.ask("GET", path))[0] == 401
            status, _, body = await client.ask(
                "GET", path, "authorization: Bearer sixteen letters!"
            )
            assert status == 200
        assert (await client.ask("GET", "/healthz"))[0] == 200
        status, headers, body = await client.ask(
            "GET", "/metrics", "authorization: Bearer sixteen letters!"
        )
        assert (body, headers["content-type"][:10]) == (b"delayserver_lag 7\n", "text/plain")
        # What is passed on is the owner's to refuse.
        (await world.passed(client, "GET", "/v1/stats")).answer()

    run(test, token="sixteen letters!")


# ── the hand-over ──────────────────────────────────────────────────────────────────────────────


def test_it_ends_in_order_and_goes_on_listening(monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "GRACE_S", 0.1)

    async def test(world: World) -> None:
        idle, quick, slow, safe, poll = [await world.connect() for _ in range(5)]
        await idle.ask("GET", "/healthz")
        version = json.loads((await idle.ask("GET", "/v1/cluster"))[2])["version"]
        poll.send("GET", f"/v1/cluster?after={version}&wait=60s")
        soon = await world.passed(quick, "POST", "/v1/messages", body=b"quick")
        never = await world.passed(slow, "POST", "/v1/messages", body=b"slow")
        await world.passed(safe, "GET", "/v1/stats")
        closing = asyncio.ensure_future(world.standby.close())
        assert await idle.reader.read() == b""
        assert (await poll.answer())[0] == 200
        late = await world.connect()
        late.send("GET", "/late")
        soon.answer(b"in time")
        assert (await quick.answer())[::2] == (200, b"in time")
        assert await quick.reader.read() == b""
        status, headers, problem = await slow.problem()
        assert (status, problem["outcome"]) == (503, "unknown")
        assert headers["connection"] == "close"
        status, _, problem = await safe.problem()
        assert (status, "outcome" in problem) == (503, False)
        await never.gone()
        await closing
        assert world.standby.connections == 0
        # Who connected meanwhile has waited for whoever listens next.
        assert world.listener.fileno() >= 0
        heard: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            heard.set_result(await reader.readuntil(b"\r\n\r\n"))
            writer.close()

        server = await asyncio.start_server(serve, sock=world.listener.dup())
        assert (await heard).startswith(b"GET /late ")
        server.close()

    run(test)


def test_clients_do_not_see_that_another_server_has_their_connections() -> None:
    async def test(world: World) -> None:
        idle, half, waiting, refused, asked, mixed = [await world.connect() for _ in range(6)]
        await idle.ask("GET", "/healthz")
        half.writer.write(b"GET /healthz HTTP/1.1\r\nhost: lo")
        sent = await world.passed(asked, "POST", "/v1/messages", body=b"asked")
        begun = await world.passed(refused, "POST", "/v1/messages", body=b"refused")
        world.has_moved_to(None)
        waiting.send("POST", "/v1/messages", "content-length: 7")
        waiting.writer.write(b"wait")
        for _ in range(2):
            mixed.send("POST", "/v1/messages", body=b"x")
        await until(lambda: world.standby.forwarded == 4)
        moving = Moving()
        before = world.standby
        closing = asyncio.ensure_future(before.close(moving))
        await turns(20)
        # The owner that was asked ends its calls: one it has done, and one it has not begun.
        sent.answer(b"done")
        status, headers, body = await asked.answer()
        assert (status, headers["connection"], body) == (200, "close", b"done")
        begun.answer(NOT_BEGUN, b"503 Service Unavailable")
        # Two calls on one connection cannot be told apart, so they are not left to the next server.
        for _ in range(2):
            assert (await mixed.problem())[0] == 503
        await closing
        assert before.connections == before.forwarded == 0
        assert before.answers == {b"200": 2, b"503": 2}
        waiting.writer.write(b"ing")
        world.standby = world.make_front()
        certificates = Certificates(Settings(), is_node=True)
        world.owner_url = world.owner.url
        await world.standby.begin([world.listener], certificates, moving.take())
        assert (await idle.ask("GET", "/healthz"))[0] == 200
        half.writer.write(b"calhost\r\n\r\n")
        assert (await half.answer())[0] == 200
        bodies = set()
        for _ in range(2):
            again = await world.asked()
            bodies.add(await again.body())
            again.answer(b"again")
        assert bodies == {b"waiting", b"refused"}
        for client in (waiting, refused):
            assert (await client.answer())[::2] == (200, b"again")

    run(test)


def test_a_client_that_does_not_read_is_not_waited_for(monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "GRACE_S", 0.02)
    monkeypatch.setattr(module, "FLUSH_S", 0.02)

    async def test(world: World) -> None:
        client = await world.connect()
        asked = await world.passed(client, "GET", "/v1/subjects/a/messages")
        asked.writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (64 * MIB))
        asked.writer.write(bytes(64 * MIB))
        await client.reader.readuntil(b"\r\n\r\n")
        began_s = time.monotonic()
        await world.standby.close()
        assert time.monotonic() - began_s < 10
        assert world.standby.connections == 0
        await asked.gone()

    run(test)
