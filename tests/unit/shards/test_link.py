"""Links between shards, over real sockets: what is asked is answered, or said to be unknown."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from delayserver.api import exit as exit_module
from delayserver.security.tokens import Action, Caller, Token
from delayserver.shards import link as link_module
from delayserver.shards.book import OwnerBook, ShardOwner
from delayserver.shards.link import Links
from delayserver.shards.meeting import UnixMeeting
from delayserver.shards.peers import PeerAnswer, PeerCall
from delayserver.shards.place import ShardPlace
from tests.waiting import turns, until


class Shard:
    """Answers what it is asked, unless it is told to keep it."""

    def __init__(
        self, number: int, directory: Path, count: int = 3, book: OwnerBook | None = None
    ) -> None:
        self.number = number
        place = ShardPlace(number, count, directory, directory)
        self.links = Links(place, UnixMeeting(directory), book)
        self.asked: list[Any] = []
        self.changes: list[tuple[int, bool]] = []
        self.keeps = False
        self.lets_go = asyncio.Event()
        """Then it answers what it has kept."""
        self.says = b""
        self.links.on_change(lambda shard, there: self.changes.append((shard, there)))

    def publish(self, responder: Any, data: bytes, caller: Caller | None) -> None:
        self.asked.append((data, caller))
        if not self.keeps:
            responder.respond(self.says + b"published " + data, None)

    def cancel(self, responder: Any, subject: str | None, text: str, caller: object) -> None:
        self.asked.append((subject, text))
        responder.respond(self.says + b"cancelled " + text.encode(), None)

    async def call(self, call: PeerCall) -> PeerAnswer:
        self.asked.append(call)
        if self.keeps:
            await self.lets_go.wait()
        return PeerAnswer(200, ((b"etag", b"1"),), b"%d:" % self.number + call.body)

    async def begin(self) -> None:
        await self.links.begin(self, 9000 + self.number)

    async def until_there(self, *shards: int) -> None:
        await until(lambda: all(map(self.links.is_there, shards)))


@pytest.fixture
def directory() -> Iterator[Path]:
    # The names of sockets are short, and those of tests are long.
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def run(directory: Path, test: Callable[[list[Shard]], Awaitable[None]], count: int = 3) -> None:
    async def main() -> None:
        shards = [Shard(number, directory, count) for number in range(count)]
        async with asyncio.timeout(20):
            for shard in shards:
                await shard.begin()
            for shard in shards:
                await shard.until_there(*range(count))
            await test(shards)
        for shard in shards:
            await shard.links.close()

    asyncio.run(main())


def test_each_asks_each_and_itself(directory: Path) -> None:
    async def test(shards: list[Shard]) -> None:
        for asker in shards:
            for asked in shards:
                call = PeerCall("PUT", "/é/x", b"a=b", ((b"host", b"h"),), b"body")
                answer = await asker.links.ask(asked.number, call)
                assert answer == PeerAnswer(200, ((b"etag", b"1"),), b"%d:body" % asked.number)
                assert asked.asked[-1] == call
        assert shards[1].links.ports == {0: 9000, 1: 9001, 2: 9002}
        assert sorted(shards[1].changes) == [(0, True), (2, True)]

    run(directory, test)


def test_long_calls_come_whole(directory: Path) -> None:
    async def test(shards: list[Shard]) -> None:
        bodies = [b"x" * length for length in (0, 1, 70_000, 3_000_000, 5)]
        calls = [shards[0].links.ask(1, PeerCall("POST", "/", body=body)) for body in bodies]
        assert [answer.body for answer in await asyncio.gather(*calls)] == [
            b"1:" + body for body in bodies
        ]

    run(directory, test)


def test_a_shard_that_hangs_holds_no_call(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process is stopped, and its sockets stay open."""
    monkeypatch.setattr(link_module, "PING_S", 0.02)
    monkeypatch.setattr(link_module, "HANG_S", 0.1)

    async def test(shards: list[Shard]) -> None:
        links = shards[2].links
        ends = [one for one in shards[0].links._open if one.shard == 2]
        for end in ends:
            end._transport.pause_reading()  # type: ignore[union-attr]
        told: list[bytes] = []
        links.publish(0, b"one", None, told.append)
        calls = [links.ask(shard, PeerCall("GET", "/v1/stats")) for shard in range(2)]
        answers = await asyncio.gather(*calls)
        assert [one.status for one in answers] == [503, 200]
        assert json.loads(answers[0].body)["outcome"] == "unknown"
        assert len(told) == 1 and b"unknown" in told[0]
        assert not links.is_there(0) or ends[0] not in shards[0].links._open

    run(directory, test)


def test_a_call_that_takes_its_time_ends_no_link(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "PING_S", 0.01)
    monkeypatch.setattr(link_module, "HANG_S", 0.1)
    pings = 0
    original = link_module._Link.put

    def counted(self: Any, item: Any) -> None:
        nonlocal pings
        pings += item[1] == link_module.PING
        original(self, item)

    monkeypatch.setattr(link_module._Link, "put", counted)

    async def test(shards: list[Shard]) -> None:
        shards[0].keeps = True
        shards[2].changes.clear()
        asked = asyncio.ensure_future(shards[2].links.ask(0, PeerCall("GET", "/v1/stats")))
        await until(lambda: pings > 20)
        assert not asked.done() and shards[2].changes == []
        asked.cancel()

    run(directory, test)


def test_a_process_that_has_hung_itself_ends_no_link(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(shards: list[Shard]) -> None:
        shards[0].keeps = True
        asked = asyncio.ensure_future(shards[2].links.ask(0, PeerCall("GET", "/v1/stats")))
        await until(lambda: shards[0].asked)
        link = shards[2].links._links[0]
        # Its timers come before what it has not read.
        link._heard_s = link._looked_s = asyncio.get_running_loop().time() - 60
        link._look()
        assert shards[2].links.is_there(0)
        asked.cancel()

    run(directory, test)


def test_what_a_former_owner_says_stays_with_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exit_module, "PATIENCE_S", 0)

    async def test(shards: list[Shard]) -> None:
        shards[0].links.exit.is_open = lambda: False
        shards[0].says = b"HTTP/1.1 200 OK "
        told: list[bytes] = []
        shards[2].links.publish(0, b"one", None, told.append)
        shards[2].links.cancel(0, "a", "key", None, told.append)
        await until(lambda: len(told) == 2)
        assert all(wire.startswith(b"HTTP/1.1 503 ") and b"unknown" in wire for wire in told)
        answers = [
            await shards[2].links.ask(0, PeerCall("GET", path))
            for path in ("/v1/stats", "/internal/pull", "/metrics")
        ]
        assert [one.status for one in answers] == [503, 503, 200]
        assert len(shards[0].asked) == 5

    run(directory, test)


def test_publishes_and_cancels_go_as_they_are(directory: Path) -> None:
    async def test(shards: list[Shard]) -> None:
        told: list[bytes] = []
        caller = Caller(Token("me", "00", ("publish:a.*",), 0), lambda: 0.0)
        links = shards[2].links
        links.publish(0, b"one", None, told.append)
        links.publish(0, b"two", caller, told.append)
        links.cancel(0, "a", "key", None, told.append)
        links.cancel(0, None, "id", None, told.append)
        await until(lambda: len(told) == 4)
        assert told == [b"published one", b"published two", b"cancelled key", b"cancelled id"]
        (first, second, *rest) = shards[0].asked
        assert (first, rest) == ((b"one", None), [("a", "key"), (None, "id")])
        assert second[1].name == "me"
        assert second[1].may(Action.PUBLISH, "a.b")
        assert not second[1].may(Action.PUBLISH, "b")

    run(directory, test)


def test_what_is_told_arrives_in_its_order(directory: Path) -> None:
    async def test(shards: list[Shard]) -> None:
        heard: list[tuple[int, bytes]] = []
        shards[1].links.on_told("news", lambda shard, notice: heard.append((shard, notice)))
        for number in range(100):
            shards[2].links.tell(1, "news", b"%d" % number)
            shards[2].links.tell(1, "nobody listens to this", b"")
        await shards[2].links.ask(1, PeerCall("GET", "/"))
        assert heard == [(2, b"%d" % number) for number in range(100)]

    run(directory, test)


def test_one_that_ends_is_away_and_what_it_was_asked_is_unknown(directory: Path) -> None:
    async def test(shards: list[Shard]) -> None:
        told: list[bytes] = []
        shards[1].keeps = True
        asked = asyncio.ensure_future(shards[0].links.ask(1, PeerCall("POST", "/")))
        shards[0].links.publish(1, b"one", None, told.append)
        await until(lambda: len(shards[1].asked) == 2)
        await shards[1].links.close()
        answer = await asked
        problem = json.loads(answer.body)
        assert (answer.status, problem["outcome"]) == (503, "unknown")
        assert (b"retry-after", b"1") in answer.headers
        assert told[0].startswith(b"HTTP/1.1 503 ")
        assert b'"outcome":"unknown"' in told[0]
        # From now on it is known that nothing happens.
        answer = await shards[0].links.ask(1, PeerCall("POST", "/"))
        assert answer.status == 503
        assert "outcome" not in json.loads(answer.body)
        assert shards[0].changes[-1] == (1, False)
        # It comes again, at the same place.
        again = Shard(1, directory)
        await again.begin()
        await shards[0].until_there(1)
        await again.until_there(0, 2)
        assert (await shards[0].links.ask(1, PeerCall("POST", "/"))).body == b"1:"
        assert shards[0].changes[-1] == (1, True)
        await again.links.close()

    run(directory, test)


def test_a_shard_that_leaves_does_not_come_back_and_calls_wait_for_the_next_owner(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "RETRY_S", 0.0)
    book = OwnerBook(3)
    for number in range(3):
        book.take(ShardOwner(number, 1, "node", "http://127.0.0.1:1", "127.0.0.1:1"))

    async def main() -> None:
        shards = [Shard(number, directory, book=book) for number in range(3)]
        for shard in shards:
            await shard.links.begin(shard, 9000 + shard.number, 1)
        for shard in shards:
            await shard.until_there(0, 1, 2)
        shards[2].keeps = True
        begun = asyncio.ensure_future(shards[0].links.ask(2, PeerCall("GET", "/slow")))
        await until(lambda: shards[2].asked != [])
        leaving = asyncio.create_task(shards[2].links.close())
        await until(lambda: not shards[1].links.is_there(2))
        shards[1].changes.clear()
        told: list[bytes] = []
        shards[1].links.publish(2, b"one", None, told.append)
        asked = asyncio.ensure_future(shards[1].links.ask(2, PeerCall("GET", "/x", body=b"x")))
        await turns(100)  # It would have come by now.
        assert shards[1].changes == []
        shards[2].lets_go.set()
        assert (await begun).body == b"2:"  # What it had begun is answered.
        await leaving
        for _ in range(2):
            # It was accepted in the last moment: what is sent to it meanwhile is not begun.
            late = Shard(2, directory, book=book)
            late.links._is_leaving = True
            await late.links.begin(late, 9002, 1)
            await until(lambda: shards[1].changes[-2:] == [(2, True), (2, False)])
            await late.links.close()
            assert late.asked == []
            shards[1].changes.clear()
        assert not asked.done() and not told
        again = Shard(2, directory, book=book)
        await again.links.begin(again, 9002, 1)
        assert (await asked).body == b"2:x"
        assert told == [b"published one"]
        for shard in (*shards[:2], again):
            await shard.links.close()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_what_a_shard_that_leaves_needs_for_its_last_answers_it_is_told(directory: Path) -> None:
    async def test(shards: list[Shard]) -> None:
        leaver, other = shards[2], shards[0]
        other.keeps = True
        asked = asyncio.ensure_future(leaver.links.ask(0, PeerCall("GET", "/slow", body=b"x")))
        await until(lambda: other.asked != [])
        leaving = asyncio.create_task(leaver.links.close())
        await until(lambda: not other.links.is_there(2))
        await turns(20)
        assert not asked.done()
        other.lets_go.set()
        assert (await asked).body == b"0:x"
        await leaving
        assert other.links._open == {other.links._links[1]}

    run(directory, test)


def test_one_of_another_server_is_not_let_in(directory: Path) -> None:
    async def test(shards: list[Shard]) -> None:
        stranger = Shard(2, directory, count=4)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await stranger.begin()
                await stranger.until_there(0)
        await stranger.links.close()
        assert shards[0].links.is_there(1)

    run(directory, test)


def test_whoever_has_not_said_who_it_is_is_left_too(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has been greeted, and may have calls for this shard already: it hears of the end."""
    monkeypatch.setattr(link_module, "FINISH_S", 0.1)
    close = UnixMeeting.close
    monkeypatch.setattr(UnixMeeting, "close", lambda self: None)  # it comes in the last moment

    async def test() -> None:
        shard = Shard(1, directory)
        await shard.begin()
        path = str(directory / "1")
        early, writer = await asyncio.open_unix_connection(path)
        greeting = await early.read(1)
        closing = asyncio.create_task(shard.links.close())
        await turns()
        late, other_writer = await asyncio.open_unix_connection(path)
        for said in (greeting + await early.read(), await late.read()):
            assert b"leave" in said
        await closing
        for one in (writer, other_writer):
            one.close()
            await one.wait_closed()
        close(shard.links._meeting)  # type: ignore[arg-type]

    asyncio.run(asyncio.wait_for(test(), 20))


def test_the_url_of_a_shard_is_its_port_on_the_host_that_the_client_named(directory: Path) -> None:
    links = Links(ShardPlace(0, 3, directory, directory), UnixMeeting(directory))
    links.ports = {0: 4000, 1: 4001}
    for host in ("10.0.0.7:8080", "10.0.0.7", "10.0.0.7:"):
        assert links.url(1, host) == "http://10.0.0.7:4001"
    assert links.url(1, "[::1]:8080") == links.url(1, "[::1]") == "http://[::1]:4001"
    assert links.url(2, "10.0.0.7") is None
    secret = Links(ShardPlace(0, 3, directory, directory), UnixMeeting(directory), is_https=True)
    secret.ports = links.ports
    assert secret.url(0, "shop.example:443") == "https://shop.example:4000"


def test_only_who_wants_no_forwarding_is_told_and_only_of_a_shard_that_is_there(
    directory: Path,
) -> None:
    links = Links(ShardPlace(0, 3, directory, directory), UnixMeeting(directory))
    links.ports = {0: 4000, 1: 4001}
    host = (b"host", b"127.0.0.1:8080")
    for value in (b"no", b" No "):
        call = PeerCall("POST", "/v1/messages", headers=(host, (b"delay-forward", value)))
        answer = links.misdirected(1, call)
        assert answer is not None and answer.status == 421
        assert dict(answer.headers)[b"delay-owner"] == b"http://127.0.0.1:4001"
        assert json.loads(answer.body)["type"] == "urn:delayserver:problem:misdirected"
        assert links.misdirected(2, call) is None
    for headers in ((host,), (host, (b"delay-forward", b"yes"))):
        assert links.misdirected(1, PeerCall("POST", "/v1/messages", headers=headers)) is None
