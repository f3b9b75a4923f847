"""Shards in one process that are moved by hand: servers of the simulation with one clock, and links
that carry one item at a time and are cut at any moment."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any

import msgspec

from delayserver.api.hot.answers import Answer, consumer_answer, problem_answer
from delayserver.api.hot.consume import Consuming
from delayserver.api.hot.paths import ConsumerCall
from delayserver.api.intake import Intake
from delayserver.config import Settings
from delayserver.decisions.new_messages import NewMessage
from delayserver.records.message import Payload
from delayserver.records.subscriptions import Subscription
from delayserver.security.tokens import Caller
from delayserver.shards.consuming import SharedGrants
from delayserver.shards.link import answer_of
from delayserver.shards.peers import PeerAnswer, PeerCall
from tests.unit.fakes import subscription
from tests.unit.shards.network import away
from tests.waiting import turns
from tests.world.server import Observer, SimulatedClock, SimulatedServer
from tests.world.storage.catalog import MemoryCatalog
from tests.world.storage.files import SimulatedFiles

ROUNDS_MAX = 2000


class Link:
    """One connection between two shards, as long as it lasts."""

    def __init__(self, one: int, other: int) -> None:
        self.ends = one, other
        self.is_there = True
        self.items: dict[int, deque[Callable[[], None]]] = {one: deque(), other: deque()}
        """What comes in at each end, in order."""
        self.asked: dict[int, asyncio.Future[PeerAnswer]] = {}


class Node:
    """`Peers` of one shard."""

    def __init__(self, world: World, own: int, count: int) -> None:
        self._world = world
        self.own = own
        self.count = count
        self.heard: dict[str, Callable[[int, bytes], None]] = {}
        self.changed: list[Callable[[int, bool], None]] = []
        self.asked: list[tuple[int, str]] = []
        """Which shards, and for what."""
        self._next_number = 0

    def ask(self, shard: int, call: PeerCall) -> asyncio.Future[PeerAnswer]:
        assert shard != self.own, call
        self.asked.append((shard, call.path))
        future: asyncio.Future[PeerAnswer] = asyncio.get_running_loop().create_future()
        link = self._world.link(self.own, shard)
        if link is None:
            future.set_result(away(shard))
            return future
        number = self._next_number = self._next_number + 1
        link.asked[number if self.own == link.ends[0] else -number] = future
        link.items[shard].append(lambda: self._world.serve(link, shard, self.own, future, call))
        return future

    def tell(self, shard: int, topic: str, notice: bytes) -> None:
        link = self._world.link(self.own, shard)
        if link is not None:
            other = self._world.nodes[shard]
            link.items[shard].append(lambda: other.heard[topic](self.own, notice))

    def on_told(self, topic: str, heard: Callable[[int, bytes], None]) -> None:
        assert topic not in self.heard
        self.heard[topic] = heard

    def on_change(self, changed: Callable[[int, bool], None]) -> None:
        self.changed.append(changed)


class Consumer:
    """One call of a consumer."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.leave: Callable[[], None]

    def told(self, answer: bytes | Exception) -> None:
        assert not self.answers, "told twice"
        self.answers.append(consumer_answer(answer))

    @property
    def document(self) -> Any:
        """What it was answered."""
        [answer] = self.answers
        assert answer.status == 200, answer
        return msgspec.json.decode(answer.body)

    @property
    def messages(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.document["messages"]
        return found

    @property
    def leases(self) -> list[str]:
        return [one["lease"] for one in self.messages]


class World:
    """Shards, all linked, with one subscription `s1`."""

    def __init__(self, count: int = 3, seed: int = 0, **settings: Any) -> None:
        self.clock = SimulatedClock()
        self.count = count
        self.nodes = [Node(self, shard, count) for shard in range(count)]
        self.servers = [
            SimulatedServer(
                # Small segments, since the files are in memory.
                Settings(**{"segment_bytes": 1 << 16, **settings}),
                SimulatedFiles(),
                MemoryCatalog(),
                self.clock,
                random.Random(seed * count + shard),
                Observer(),
                shard=shard,
            )
            for shard in range(count)
        ]
        self.consuming, self.grants = [], []
        for server, node in zip(self.servers, self.nodes, strict=True):
            intake = Intake(server.settings, server.calls.subjects, server.calls.random)
            grants = SharedGrants(server.calls, node)
            self.grants.append(grants)
            self.consuming.append(Consuming(server.calls, intake, grants))
        self._links: dict[frozenset[int], Link] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.subscribe(subscription(1, subject="*", created_ms=self.clock(), lease_ms=60_000))
        for pair in self.pairs():
            self.connect(*pair)

    def run(self, test: Coroutine[Any, Any, None]) -> None:
        asyncio.run(test)

    # ── links ──────────────────────────────────────────────────────────────────────────────────

    def pairs(self) -> Iterator[tuple[int, int]]:
        for other in range(self.count):
            for one in range(other):
                yield one, other

    def link(self, one: int, other: int) -> Link | None:
        return self._links.get(frozenset((one, other)))

    def connect(self, one: int, other: int) -> None:
        assert self.link(one, other) is None
        self._links[frozenset((one, other))] = Link(one, other)
        self._tell_change(one, other, is_there=True)

    def cut(self, one: int, other: int) -> None:
        link = self._links.pop(frozenset((one, other)))
        link.is_there = False
        for future in link.asked.values():
            if not future.done():
                future.set_result(away(other, is_unknown=True))
        self._tell_change(one, other, is_there=False)

    def _tell_change(self, one: int, other: int, *, is_there: bool) -> None:
        for own, changed in ((one, other), (other, one)):
            for tell in self.nodes[own].changed:
                tell(changed, is_there)

    def serve(
        self,
        link: Link,
        shard: int,
        asker: int,
        asked: asyncio.Future[PeerAnswer],
        call: PeerCall,
    ) -> None:
        async def answer() -> None:
            found: PeerAnswer | None = None
            try:
                for handler in self.grants[shard].handlers:
                    found = found or await handler(call)
            except Exception as error:
                found = answer_of(problem_answer(error))
            assert found is not None, call
            if link.is_there:
                link.items[asker].append(partial(asked.set_result, found))

        task = asyncio.get_running_loop().create_task(answer())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ── being moved ────────────────────────────────────────────────────────────────────────────

    async def turn(self) -> None:
        """All servers do what they can by themselves."""
        for server in self.servers:
            server.tick()
            server.rest()
        await turns(4)

    def deliver(self, one: int, other: int, at: int) -> bool:
        """The next item of a link comes in at one of its ends; False: there is none."""
        link = self.link(one, other)
        if link is None or not link.items[at]:
            return False
        link.items[at].popleft()()
        return True

    def deliver_some(self) -> bool:
        """The next item of some link; False: nothing is under way."""
        return any(self.deliver(*pair, at) for pair in self.pairs() for at in pair)

    async def settle(self) -> None:
        """Until nothing happens before the clock moves."""
        quiet = 0
        for _ in range(ROUNDS_MAX):
            await self.turn()
            quiet = 0 if self.deliver_some() else quiet + 1
            if quiet == 3:
                return
        raise AssertionError("the shards keep each other busy")

    async def move(self, by_ms: int, step_ms: int = 100) -> None:
        """Time passes."""
        await self.settle()
        while by_ms > 0:
            self.clock.move(min(by_ms, step_ms))
            by_ms -= step_ms
            await self.settle()

    # ── what is done ───────────────────────────────────────────────────────────────────────────

    def subscribe(self, one: Subscription, *shards: int) -> None:
        """A definition is in force, in all shards or in some."""
        for shard in shards or range(self.count):
            self.servers[shard].engine.subscribing.put_subscription(one)
            self.servers[shard].rest()

    def publish(self, shard: int, *, delay_ms: int = 0, body: bytes = b"1") -> str:
        server = self.servers[shard]
        message = NewMessage("orders", self.clock() + delay_ms, Payload(body))
        published = server.calls.publish_one(message, self.clock())
        server.rest()
        return published.message_id

    def call(
        self,
        shard: int,
        action: str,
        caller: Caller | None = None,
        to: str = "s1",
        **body: Any,
    ) -> Consumer:
        consumer = Consumer()
        call, data = ConsumerCall(to, action), msgspec.json.encode(body)
        consumer.leave = self.consuming[shard].serve(call, data, caller, consumer.told)
        return consumer

    def pull(self, shard: int, **body: Any) -> Consumer:
        return self.call(shard, "pull", **{"max": 1000, "wait": "20s", **body})

    async def available(self, *, at: int = 0) -> list[dict[str, Any]]:
        """All that a consumer gets at once, which it gives back."""
        consumer = self.pull(at, wait=0)
        await self.settle()
        await self.move(1000 if not consumer.answers else 0)
        await self.give_back(consumer, at)
        return consumer.messages

    async def drained(self, *, at: int = 0) -> list[dict[str, Any]]:
        """All that consumers get one after the other, who acknowledge it."""
        found: list[dict[str, Any]] = []
        while True:
            consumer = self.pull(at, wait=0)
            await self.settle()
            await self.move(1000 if not consumer.answers else 0)
            if not consumer.messages:
                return found
            found += consumer.messages
            await self.ack(at, consumer.leases)

    async def give_back(self, consumer: Consumer, at: int = 0) -> None:
        given = self.call(at, "nack", leases=consumer.leases)
        await self.settle()
        assert given.document["expired"] == []

    async def ack(self, shard: int, leases: list[str]) -> Any:
        acked = self.call(shard, "ack", leases=leases)
        await self.settle()
        return acked.document

    def check_nothing_is_left(self) -> None:
        """Nobody waits, and nothing is on its way."""
        for server, grants in zip(self.servers, self.grants, strict=True):
            assert server.engine.dispatcher.pulls.fetches.count() == 0
            assert server.engine.leasing.leases.count() == 0
            for asker in grants._supply._askers.values():
                assert not asker.lent and not asker.reading
            for wanted in grants._sources.demand._wanted.values():
                assert not wanted.pulls and not wanted.asking
        assert not self._tasks
