"""A server of several shards in this process, each with an address of its own."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

import msgspec

from delayserver.client.transport import NO_HEADERS, TIMEOUT_S, HttpAnswer
from delayserver.records.sharding import shard_of
from tests.unit.client.fake_server import UNREACHABLE, Clock, Producer, answer, message_id
from tests.waiting import turns

HOME = "http://here:8080"
CLUSTER_PATH = "/v1/cluster"

Reply = HttpAnswer | Exception | Callable[[Any], HttpAnswer]


class FakeShards:
    """Knows who was asked for what. `replies`: what an address gives next, instead of an answer
    that all is well; `map_replies`: instead of the map."""

    def __init__(self, count: int = 3) -> None:
        self.count = count
        self.nodes: list[str] = []
        """Their addresses, as the map names them."""
        self.epochs: defaultdict[int, int] = defaultdict(int)
        self.urls: dict[int, str | None] = {k: f"http://here:{4000 + k}" for k in range(count)}
        self.asked: list[tuple[str, str, str, Any]] = []
        """Address, method, path and document, without the maps."""
        self.headers: list[dict[str, str]] = []
        self.maps: list[tuple[str, str]] = []
        """Address and path."""
        self.replies: defaultdict[str, list[Reply]] = defaultdict(list)
        self.map_replies: defaultdict[str, list[Reply]] = defaultdict(list)
        self.unreachable: set[str] = set()
        self.connected: list[str] = []
        self.closed: list[str] = []
        self.version = 1
        self._changed = asyncio.Event()
        self._next_seq: defaultdict[int, int] = defaultdict(lambda: 1)
        self._known: dict[tuple[str, str], str] = {}

    # ── what a test does ───────────────────────────────────────────────────────────────────────

    async def producer(self, **options: Any) -> Producer:
        """One that knows all owners that there are."""
        options.setdefault("time", Clock(auto=True).time)
        home = self.connect(HOME)
        made = Producer(url=HOME, transport=home, connect=self.connect, **options)
        made._settle()
        await turns(20)
        return made

    async def change(self, **urls: str | None) -> None:
        """Have shards (`s0=…`) elsewhere, or nowhere, and let everybody hear of it."""
        self.urls |= {int(name[1:]): url for name, url in urls.items()}
        self.version += 1
        self._changed.set()
        self._changed = asyncio.Event()
        await turns(20)

    def key_of(self, shard: int, subject: str = "s", nth: int = 0) -> str:
        """A key that belongs to a shard."""
        found = (str(n) for n in range(10_000) if shard_of(subject, str(n), self.count) == shard)
        return [next(found) for _ in range(nth + 1)][nth]

    def who(self, path: str = "") -> list[str]:
        """Who was asked for paths that begin so, in order."""
        return [url for url, _, asked, _ in self.asked if asked.startswith(path)]

    def connect(self, url: str) -> "_Address":
        self.connected.append(url)
        return _Address(self, url)

    # ── what the shards do ─────────────────────────────────────────────────────────────────────

    async def map_at(self, url: str, path: str) -> HttpAnswer:
        self.maps.append((url, path))
        if self.map_replies[url]:
            reply = self.map_replies[url].pop(0)
            if isinstance(reply, Exception):
                raise reply
            assert isinstance(reply, HttpAnswer)
            return reply
        while f"after={self.version}&" in path:
            await self._changed.wait()
        return self.map()

    def map(self) -> HttpAnswer:
        """As it is."""
        shards: list[dict[str, Any]] = [
            {
                "shard": shard,
                "owner": "local",
                "epoch": self.epochs[shard],
                "url": url,
                "replicas": [],
                "state": "serving" if url else "away",
            }
            for shard, url in self.urls.items()
        ]
        nodes = [{"node": url, "url": url} for url in self.nodes]
        return answer(200, {"version": self.version, "shards": shards, "nodes": nodes})

    def answer(self, url: str, path: str, document: Any) -> HttpAnswer:
        if path.startswith("/v1/messages/batch"):
            return self.publish(url, document)
        if path == "/v1/messages/cancel":
            count = len(document["ids"]) + len(document["keys"])
            return answer(200, {"results": [{"state": "cancelled"}] * count})
        text = unquote(path.rsplit("/", 1)[-1])
        found: dict[str, Any] = {
            "id": text if len(text) == 36 else message_id(1),
            "subject": "s",
            "key": None,
        }
        found |= {"deliver_at": "2026-11-20T16:30:00.000Z", "state": "scheduled", "attempts": 0}
        if "heartbeats" in path:
            found = {"key": text, "timeout": "1s", "subject": "s"}
            found |= {"expires_at": "2026-11-20T16:30:00.000Z"}
        return answer(200, found, etag='"1"')

    def publish(self, url: str, documents: list[Any]) -> HttpAnswer:
        """What each message gets: a new id of its shard, or that which its key has."""
        ids: list[str] = []
        duplicates: dict[int, int] = {}
        own = next((shard for shard, one in self.urls.items() if one == url), 0)
        for one in documents:
            name = one["subject"], one.get("key")
            shard = own if name[1] is None else shard_of(*name, self.count)
            duplicates.setdefault(shard, 0)
            if name in self._known:
                duplicates[shard] += 1
            else:
                self._known[name] = message_id(self._next_seq[shard], shard=shard)
                self._next_seq[shard] += 1
            ids.append(self._known[name])
            if name[1] is None:
                del self._known[name]
        found = {"count": len(ids), "duplicates": sum(duplicates.values()), "ids": ids}
        if len(duplicates) > 1:
            found["duplicates_by_shard"] = duplicates
        return answer(200, found)


class _Address:
    """A transport to one of them."""

    def __init__(self, shards: FakeShards, url: str) -> None:
        self._shards = shards
        self._url = url

    async def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        headers: Mapping[str, str] = NO_HEADERS,
        timeout_s: float = TIMEOUT_S,
    ) -> HttpAnswer:
        shards, url = self._shards, self._url
        assert timeout_s > 0
        if url in shards.unreachable:
            raise UNREACHABLE
        if path.startswith(CLUSTER_PATH):
            return await shards.map_at(url, path)
        document = None if body is None else msgspec.json.decode(body)
        shards.asked.append((url, method, path, document))
        shards.headers.append(dict(headers))
        await turns()
        if not shards.replies[url]:
            return shards.answer(url, path, document)
        reply = shards.replies[url].pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply(document) if callable(reply) else reply

    async def close(self) -> None:
        self._shards.closed.append(self._url)
