"""Shards for tests of what asks them: real ones in one process, and ones that say what they are
told to. Nothing goes through a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, MutableMapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from delayserver.api.hot.asgi import Asgi
from delayserver.api.hot.consume import WHEN_GONE
from delayserver.api.problems import problem_of
from delayserver.config import Settings
from delayserver.errors import AccessError, DelayServerError, NotFoundError, OverloadedError
from delayserver.parts.installed import PARTS
from delayserver.security.tokens import Caller, Token
from delayserver.serve.app import make_app
from delayserver.server.server import Server, of_this_machine
from delayserver.shards.peers import PeerAnswer, PeerCall
from delayserver.shards.place import ShardPlace
from delayserver.shards.router import Router
from storage.directory import open_identity
from storage.files import OsFiles
from storage.shards import shard_directory
from tests.waiting import turns

T = TypeVar("T")
JSON_TYPE = ((b"content-type", b"application/json"),)


def problem_answer_of(error: Exception) -> PeerAnswer:
    problem = problem_of(error)
    headers = [(name.encode(), value.encode()) for name, value in problem.headers.items()]
    content_type = (b"content-type", b"application/problem+json")
    return PeerAnswer(problem.status, (content_type, *headers), problem.encode())


def document_answer(document: Any, status: int = 200) -> PeerAnswer:
    return PeerAnswer(status, JSON_TYPE, msgspec.json.encode(document))


FORBIDDEN = AccessError("not this one", authenticated=True)
MISSING = NotFoundError("nobody")
AWAY = problem_answer_of(OverloadedError("shard 1 is starting", 2000))


def own_answer(shard: int, call: PeerCall) -> PeerAnswer:
    return document_answer({"shard": shard}, 200)


def body_of(answer: PeerAnswer | None) -> Any:
    assert answer is not None
    return msgspec.json.decode(answer.body)


def caller(*scopes: str) -> Caller:
    return Caller(Token("t", "00" * 32, scopes, 0), lambda: 0.0)


def refusing(errors: dict[int, DelayServerError], document: Any) -> Any:
    return lambda shard, call: (
        problem_answer_of(errors[shard]) if shard in errors else document_answer(document)
    )


class ToldPeers:
    """`Peers` whose shards answer what a test says, and that note what they were asked."""

    def __init__(
        self, count: int, answer: Callable[[int, PeerCall], PeerAnswer], own: int = 0
    ) -> None:
        self.own = own
        self.count = count
        self.asked: list[tuple[int, PeerCall]] = []
        self._answer = answer

    async def ask(self, shard: int, call: PeerCall) -> PeerAnswer:
        self.asked.append((shard, call))
        await turns()
        return self._answer(shard, call)

    def misdirected(self, shard: int, call: PeerCall) -> PeerAnswer | None:
        return None

    def tell(self, shard: int, topic: str, notice: bytes) -> None:
        raise AssertionError

    def on_told(self, topic: str, heard: Callable[[int, bytes], None]) -> None:
        raise AssertionError

    def on_change(self, changed: Callable[[int, bool], None]) -> None:
        raise AssertionError

    def route(self, call: PeerCall, **settings: Any) -> PeerAnswer | None:
        """What the router of the own shard answers."""
        return asyncio.run(Router(self, Settings(**settings), PARTS).answer(call))


class RealShards:
    """Servers with data directories of their own, and everything but sockets."""

    def __init__(self, directory: Path, count: int, **settings: Any) -> None:
        self._runner = asyncio.Runner()
        self.servers: list[Server] = []
        self._apps: list[Asgi] = []
        self.away: set[int] = set()
        self.routers: list[Router] = []
        self.count = count
        self.directory = directory
        for shard in range(count):
            data_dir = directory / shard_directory(shard)
            data_dir.mkdir(parents=True)
            files = OsFiles(str(data_dir))
            open_identity(files, random_bytes=_not_random(shard), shard=shard)
            made = Settings(data_dir=data_dir, **settings)
            server = Server(made, of_this_machine(made, shard), fatal=_fail)
            self.servers.append(server)
            self._apps.append(make_app(server.calls, ShardPlace.alone(data_dir))[0])
            self.routers.append(Router(_PeersOf(self, shard), made, PARTS))
        for server in self.servers:
            self._runner.run(server.start())

    def close(self) -> None:
        for server in self.servers:
            self._runner.run(server.stop())
        self._runner.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Have the event loop of all of them do something."""
        return self._runner.run(work)

    async def answer(self, shard: int, call: PeerCall) -> PeerAnswer:
        """What a shard answers by itself."""
        sent: list[MutableMapping[str, Any]] = []
        messages = [{"type": "http.request", "body": call.body}]

        async def receive() -> MutableMapping[str, Any]:
            return messages.pop() if messages else await asyncio.Future()

        async def send(message: MutableMapping[str, Any]) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": call.method,
            "path": call.path,
            "raw_path": quote(call.path).encode(),
            "query_string": call.query,
            "headers": [(b"host", b"localhost"), *call.headers],
            "caller": call.caller,
            WHEN_GONE: lambda gone: None,
        }
        await self._apps[shard](scope, receive, send)
        body = b"".join(message.get("body", b"") for message in sent[1:])
        # How long it took is another time each time.
        headers = (one for one in sent[0]["headers"] if one[0] != b"server-timing")
        return PeerAnswer(sent[0]["status"], tuple(headers), body)

    async def route(self, entered: int, call: PeerCall) -> PeerAnswer:
        """What a client is answered whose request came in at shard `entered`."""
        answer = await self.routers[entered].answer(call)
        return await self.answer(entered, call) if answer is None else answer

    def ask(
        self,
        method: str,
        path: str,
        document: Any = None,
        *,
        query: str = "",
        headers: Mapping[str, str] | None = None,
        entered: int = 0,
        direct: bool = False,
    ) -> PeerAnswer:
        """Ask through the router; `direct`: only the shard itself."""
        fields = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        body = b"" if document is None else msgspec.json.encode(document)
        if body:
            fields += JSON_TYPE
        call = PeerCall(method, path, query.encode(), tuple(fields), body)
        return self._runner.run(self.answer(entered, call) if direct else self.route(entered, call))

    def get(self, path: str, query: str = "", *, entered: int = 0) -> Any:
        answer = self.ask("GET", path, query=query, entered=entered)
        assert answer.status == 200, answer
        return msgspec.json.decode(answer.body)


class _PeersOf:
    def __init__(self, shards: RealShards, own: int) -> None:
        self._shards = shards
        self.own = own
        self.count = shards.count

    async def ask(self, shard: int, call: PeerCall) -> PeerAnswer:
        if shard in self._shards.away:
            return AWAY
        return await self._shards.answer(shard, call)

    misdirected = ToldPeers.misdirected
    tell = ToldPeers.tell
    on_told = ToldPeers.on_told
    on_change = ToldPeers.on_change


def _not_random(shard: int) -> Callable[[int], bytes]:
    return lambda length: bytes([shard + 1]) * length


def _fail(error: BaseException) -> None:
    raise AssertionError from error
