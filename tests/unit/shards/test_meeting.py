"""Links over TCP: to the owner of a shard, wherever it is now, and to nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from delayserver.errors import InputError, LinkError, ShardAwayError
from delayserver.shards import link as link_module
from delayserver.shards import meeting as meeting_module
from delayserver.shards.book import OwnerBook, ShardOwner, Vacancy
from delayserver.shards.link import UNSENT_MAX_BYTES, Links, _Link, failed
from delayserver.shards.meeting import STRANGERS_MAX, TcpMeeting
from delayserver.shards.peers import PeerAnswer, PeerCall
from delayserver.shards.place import ShardPlace
from tests.waiting import turns, until

SECRET = b"s" * 32
COUNT = 3
NOWHERE = Path("nowhere")


class Machine:
    """One process with a book of its own. It answers with its node and what it was asked."""

    def __init__(
        self, shard: int, node: str, secret: bytes = SECRET, cluster: str = "shop"
    ) -> None:
        self.shard = shard
        self.node = node
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self.book = OwnerBook(COUNT)
        self.meeting = TcpMeeting(listener, self.book, secret, cluster)
        self.links = Links(ShardPlace(shard, COUNT, NOWHERE, NOWHERE), self.meeting, self.book)
        self.asked: list[Any] = []
        self.keeps = False
        self._released = asyncio.Event()

    def release(self) -> None:
        """Answer what was kept."""
        self._released.set()

    def publish(self, responder: Any, data: bytes, caller: object) -> None:
        self.asked.append(data)
        responder.respond(b"published " + data, None)

    def cancel(self, responder: Any, subject: str | None, text: str, caller: object) -> None:
        raise AssertionError

    async def call(self, call: PeerCall) -> PeerAnswer:
        self.asked.append(call)
        if self.keeps:
            await self._released.wait()
        return PeerAnswer(200, (), self.node.encode() + b":" + call.body)

    def owner(self, epoch: int) -> ShardOwner:
        """What is said of it once it owns its shard."""
        url = f"http://{self.node}:{self.port}"
        return ShardOwner(self.shard, epoch, self.node, url, f"127.0.0.1:{self.port}")

    async def begin(self, epoch: int = 1) -> None:
        await self.links.begin(self, 1, epoch)

    async def ask(self, shard: int, body: bytes = b"") -> PeerAnswer:
        return await self.links.ask(shard, PeerCall("POST", "/", body=body))

    async def until_linked(self, *shards: int) -> None:
        await until(lambda: all(map(self.links.is_there, shards)))


class Eager(_Link):
    """Asks before it has heard anything."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.publish(b"of a zombie", None, lambda answer: None)


def tell(entry: ShardOwner | Vacancy, *machines: Machine) -> None:
    for machine in machines:
        machine.book.take(entry)


@contextlib.asynccontextmanager
async def running(*machines: Machine, epoch: int = 1) -> AsyncIterator[None]:
    """Each is the first owner of its shard, and all know it."""
    for machine in machines:
        tell(machine.owner(epoch), *machines)
    try:
        async with asyncio.timeout(20):
            for machine in machines:
                await machine.begin(epoch)
            yield
    finally:
        for machine in machines:
            await machine.links.close()
        await turns(5)  # What was accepted in the last moment is closed, too.


def run(test: Callable[[Machine, Machine, Machine], Awaitable[None]]) -> None:
    async def main() -> None:
        machines = [Machine(shard, f"n{shard}") for shard in range(COUNT)]
        async with running(*machines):
            for machine in machines:
                await machine.until_linked(*range(COUNT))
            await test(*machines)

    asyncio.run(main())


def test_each_asks_each() -> None:
    async def test(*machines: Machine) -> None:
        for asker in machines:
            for asked in machines:
                assert (await asker.ask(asked.shard, b"x")).body == f"{asked.node}:x".encode()
        told: list[bytes] = []
        machines[2].links.publish(0, b"one", None, told.append)
        await until(lambda: bool(told))
        assert told == [b"published one"]
        assert [machine.meeting.refused for machine in machines] == [0, 0, 0]

    run(test)


def test_long_calls_come_whole() -> None:
    async def test(*machines: Machine) -> None:
        bodies = [bytes(length) for length in (0, 1, 70_000, 5_000_000, 5)]
        answers = await asyncio.gather(*(machines[0].ask(1, body) for body in bodies))
        assert [answer.body for answer in answers] == [b"n1:" + body for body in bodies]

    assert UNSENT_MAX_BYTES > 5_000_000
    run(test)


@pytest.mark.parametrize("shard", [0, 1, 2])
def test_a_shard_that_has_moved_is_asked_where_it_is_now(shard: int) -> None:
    async def test(*machines: Machine) -> None:
        old = machines[shard]
        others = [machine for machine in machines if machine is not old]
        new = Machine(shard, "new")
        for machine in others:
            tell(machine.owner(1), new)
        old.keeps = True
        asked = asyncio.ensure_future(others[0].ask(shard))
        await until(lambda: bool(old.asked))
        # The old owner does not know it yet, and stays.
        tell(new.owner(2), *others, new)
        answer = await asked
        assert (answer.status, json.loads(answer.body)["outcome"]) == (503, "unknown")
        assert [machine.links.is_there(shard) for machine in others] == [False, False]
        await new.begin(2)
        try:
            for machine in others:
                await machine.until_linked(shard)
                assert (await machine.ask(shard)).body == b"new:"
                assert machine.links.url(shard, "anything") == new.owner(2).url
                assert (await new.ask(machine.shard)).body == f"{machine.node}:".encode()
        finally:
            await new.links.close()

    run(test)


def test_the_old_owner_is_refused_though_it_does_not_know_that_it_is_one() -> None:
    async def test(*machines: Machine) -> None:
        low, _, old = machines
        new = Machine(2, "new")
        tell(low.owner(1), new)
        tell(machines[1].owner(1), new)
        # It has come before anybody was told of it: a later epoch replaces an earlier one.
        await new.begin(2)
        try:
            await new.until_linked(0)
            await until(lambda: low.links._links[2].epoch == 2)
            # The zombie comes again and again; what it asks behind its greeting has no effect.
            await old.meeting.connect(0, partial(Eager, old.links, 0))
            await until(lambda: not old.links.is_there(0))
            assert low.links._links[2].epoch == 2
            assert b"of a zombie" not in low.asked
            assert (await low.ask(2)).body == b"new:"
        finally:
            await new.links.close()

    run(test)


def test_a_shard_that_was_given_up_is_away_until_it_has_another_owner() -> None:
    async def test(*machines: Machine) -> None:
        tell(Vacancy(0, 1), *machines)
        assert not machines[1].links.is_there(0)
        assert machines[1].links.url(0, "") is None
        answer = await machines[1].ask(0)
        assert answer.status == 503 and "outcome" not in json.loads(answer.body)
        new = Machine(0, "new")
        for machine in machines[1:]:
            tell(machine.owner(1), new)
        tell(new.owner(2), *machines, new)
        await new.begin(2)
        try:
            await machines[1].until_linked(0)
            assert (await machines[1].ask(0)).body == b"new:"
        finally:
            await new.links.close()

    run(test)


@pytest.mark.parametrize("other", [{"secret": b"t" * 32}, {"cluster": "another"}])
def test_without_the_secret_of_the_cluster_nobody_is_linked(other: dict[str, Any]) -> None:
    async def main() -> None:
        low, high = Machine(0, "n0"), Machine(1, "n1", **other)
        async with running(low, high):
            await until(lambda: high.meeting.refused > 0)
            assert not low.links.is_there(1) and not high.links.is_there(0)
            assert not low.asked and not high.asked

    asyncio.run(main())


def test_who_listens_has_to_be_the_shard_that_was_asked_for() -> None:
    async def main() -> None:
        zero, high = Machine(0, "n0"), Machine(2, "n2")
        async with running(zero, high):
            wrong = ShardOwner(1, 1, "n0", "http://n0", f"127.0.0.1:{zero.port}")
            tell(wrong, high)
            await until(lambda: high.meeting.refused > 0)
            assert not high.links.is_there(1)

    asyncio.run(main())


async def _is_cut_off(reader: asyncio.StreamReader) -> bool:
    with contextlib.suppress(ConnectionError):
        return await reader.read() == b""
    return True


def test_strangers_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        machine = Machine(0, "n0")
        async with running(machine):
            # Who says something else, at once.
            reader, writer = await asyncio.open_connection("127.0.0.1", machine.port)
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert await _is_cut_off(reader)
            assert machine.meeting.refused == 1
            # Who has come first, when there are too many.
            opened = [
                await asyncio.open_connection("127.0.0.1", machine.port)
                for _ in range(STRANGERS_MAX + 1)
            ]
            assert await _is_cut_off(opened[0][0])
            assert machine.meeting.refused == 2
            assert len(machine.meeting._strangers) == STRANGERS_MAX
            # And all of them are forgotten when they go.
            for _, one in (*opened, (reader, writer)):
                one.close()
            await until(lambda: not machine.meeting._strangers)
            # Who says nothing, in time.
            monkeypatch.setattr(meeting_module, "HANDSHAKE_S", 0.001)
            reader, writer = await asyncio.open_connection("127.0.0.1", machine.port)
            assert await _is_cut_off(reader)
            assert machine.meeting.refused == 3
            writer.close()

    asyncio.run(main())


def test_who_connects_does_not_wait_for_one_that_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            machine = Machine(1, "n1")
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            tell(ShardOwner(0, 1, "n0", "http://n0", address), machine)
            monkeypatch.setattr(meeting_module, "HANDSHAKE_S", 0.001)
            async with running(machine):
                await until(lambda: machine.meeting.refused > 1)
                assert not machine.links.is_there(0)

    asyncio.run(main())


def test_calls_wait_while_a_shard_moves() -> None:
    """The owner that leaves answers what it has begun. Later calls go to the next owner."""

    async def main() -> None:
        asker, owner, following = Machine(1, "n1"), Machine(0, "n0"), Machine(0, "n2")
        async with running(asker, owner):
            await asker.until_linked(0)
            owner.keeps = True
            begun = [asyncio.ensure_future(asker.ask(0, b"begun"))]
            await until(lambda: owner.asked)
            leaving = asyncio.ensure_future(owner.links.close())
            await turns(3)
            told: list[bytes] = []
            later = asyncio.ensure_future(asker.ask(0, b"later"))
            asker.links.publish(0, b"one", None, told.append)
            await turns(10)
            assert not later.done() and not told
            owner.release()
            assert (await begun[0]).body == b"n0:begun"
            await leaving
            tell(Vacancy(0, 1), asker, owner)
            vacant = asyncio.ensure_future(asker.ask(0, b"vacant"))
            await turns(10)
            assert not vacant.done()
            tell(following.owner(2), asker, following)
            tell(asker.owner(1), following)
            await following.begin(2)
            assert (await later).body == b"n2:later"
            assert (await vacant).body == b"n2:vacant"
            await until(lambda: bool(told))
            assert told == [b"published one"]
            assert owner.asked[1:] == []
            await following.links.close()

    asyncio.run(main())


def test_a_shard_that_says_that_another_is_away_keeps_its_link() -> None:
    async def test(*machines: Machine) -> None:
        away = failed(ShardAwayError(1))

        async def refuse(call: PeerCall) -> PeerAnswer:
            return away

        machines[0].call = refuse  # type: ignore[method-assign]
        link = machines[2].links._links[0]
        assert await machines[2].ask(0, b"x") == away
        assert machines[2].links._links[0] is link and not link.is_retired

    run(test)


def test_a_shard_that_nobody_takes_is_away_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "WAIT_S", 0.05)

    async def main() -> None:
        asker = Machine(1, "n1")
        async with running(asker):
            told: list[bytes] = []
            asker.links.publish(0, b"one", None, told.append)
            answer = await asker.ask(0)
            assert answer.status == 503 and b"unknown" not in answer.body
            await until(lambda: bool(told))
            assert told[0].startswith(b"HTTP/1.1 503 ") and b"unknown" not in told[0]

    asyncio.run(main())


class Echo(asyncio.Protocol):
    """Gives back what comes, in capital letters."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data.upper())


class Caller(Echo):
    """Keeps what comes."""

    def __init__(self) -> None:
        self.heard = b""
        self.is_lost = False

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True

    def data_received(self, data: bytes) -> None:
        self.heard += data


@contextlib.asynccontextmanager
async def wiretapped(port: int) -> AsyncIterator[tuple[int, bytearray]]:
    """Another port that leads to this one, and all that passes."""
    seen = bytearray()
    tasks: set[asyncio.Task[None]] = set()
    writers: list[asyncio.StreamWriter] = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            seen.extend(data)
            writer.write(data)

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        writers.extend((back, writer))
        for one in (pump(reader, back), pump(there, writer)):
            tasks.add(asyncio.ensure_future(one))

    server = await asyncio.start_server(pass_on, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], seen
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in writers:
            writer.transport.abort()
        await turns(5)


@pytest.mark.parametrize("secret", [SECRET, bytes(32)])
def test_a_standby_passes_calls_on_through_a_tunnel_that_nobody_reads(secret: bytes) -> None:
    async def main() -> None:
        owner, standby = Machine(0, "n0"), Machine(0, "n1", secret)
        owner.meeting.take_tunnels(Echo)
        async with running(owner), wiretapped(owner.port) as (port, seen):
            address = f"127.0.0.1:{port}"
            tell(ShardOwner(0, 1, "n0", "http://n0", address, tunnels=True), standby)
            caller = Caller()
            if secret != SECRET:
                with pytest.raises((LinkError, OSError)):
                    await standby.meeting.tunnel(0, lambda: caller)
            else:
                await standby.meeting.tunnel(0, lambda: caller)
                caller.transport.write(b"authorization: bearer of a secret")
                await until(lambda: caller.heard == b"AUTHORIZATION: BEARER OF A SECRET")
                caller.transport.abort()
                assert len(seen) > 100
            assert b"bearer" not in bytes(seen).lower()
            assert not owner.asked and owner.links.is_there(0)
        standby.meeting.close()

    asyncio.run(main())


def test_a_tunnel_whose_proof_is_under_way_when_the_owner_leaves_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its other end may use it as soon as it has our proof: it needs an answer."""
    prove = meeting_module._Gate._prove

    def closing(gate: meeting_module._Gate, data: bytes) -> bytes:
        rest = prove(gate, data)
        if gate.is_believed and gate._session is None:
            gate._meeting.close()
        return rest

    async def main() -> None:
        owner, standby = Machine(0, "n0"), Machine(0, "n1")
        owner.meeting.take_tunnels(Echo)
        async with running(owner):
            tell(owner.owner(1), standby)
            monkeypatch.setattr(meeting_module._Gate, "_prove", closing)
            caller = Caller()
            await standby.meeting.tunnel(0, lambda: caller)
            assert owner.meeting.is_closed
            caller.transport.write(b"a call")
            await until(lambda: caller.heard == b"A CALL")
            caller.transport.abort()
            linked = Machine(1, "n1")
            tell(owner.owner(1), linked)
            with pytest.raises(OSError):
                await linked.meeting.tunnel(0, Caller)
        for machine in (standby, linked):
            machine.meeting.close()

    asyncio.run(main())


def test_an_owner_that_takes_no_tunnel_refuses_it() -> None:
    async def main() -> None:
        owner, standby = Machine(0, "n0"), Machine(0, "n1")
        async with running(owner):
            tell(owner.owner(1), standby)
            caller = Caller()
            await standby.meeting.tunnel(0, lambda: caller)
            await until(lambda: caller.is_lost)
            assert owner.meeting.refused == 1
        standby.meeting.close()

    asyncio.run(main())


def test_a_secret_has_its_length() -> None:
    with socket.socket() as listener, pytest.raises(InputError, match="32 bytes"):
        TcpMeeting(listener, OwnerBook(1), b"short", "shop")
