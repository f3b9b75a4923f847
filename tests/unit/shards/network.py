"""Links between shards in one process: they carry calls and notices, and a test cuts them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from delayserver.api.hot.answers import problem_answer
from delayserver.errors import DelayServerError, ShardAwayError
from delayserver.shards.link import answer_of, failed
from delayserver.shards.peers import PeerAnswer, PeerCall
from storage.errors import StorageError

Serve = Callable[[PeerCall], Awaitable[PeerAnswer | None]]


def away(shard: int, *, is_unknown: bool = False) -> PeerAnswer:
    return answer_of(problem_answer(ShardAwayError(shard, is_unknown=is_unknown)))


class Network:
    """As many nodes as there are shards, none of which is linked yet."""

    def __init__(self, count: int) -> None:
        self.nodes = [Node(self, shard, count) for shard in range(count)]
        self._links: dict[frozenset[int], asyncio.Event] = {}
        """Of each link what tells those who wait that it has ended."""

    def connect(self, *pair: int) -> None:
        self._links[frozenset(pair)] = asyncio.Event()
        self._tell(*pair, is_there=True)

    def connect_all(self) -> None:
        for one in range(len(self.nodes)):
            for other in range(one):
                self.connect(one, other)

    def cut(self, *pair: int) -> None:
        self._links.pop(frozenset(pair)).set()
        self._tell(*pair, is_there=False)

    def _tell(self, one: int, other: int, *, is_there: bool) -> None:
        for own, changed in ((one, other), (other, one)):
            for tell in self.nodes[own].changed:
                tell(changed, is_there)

    def link(self, *pair: int) -> asyncio.Event | None:
        return self._links.get(frozenset(pair))


class Node:
    """`Peers` of one shard."""

    def __init__(self, network: Network, own: int, count: int) -> None:
        self._network = network
        self.own = own
        self.count = count
        self.serve: Serve
        self.changed: list[Callable[[int, bool], None]] = []
        self.asked: list[tuple[int, PeerCall]] = []
        self._heard: dict[str, Callable[[int, bytes], None]] = {}

    async def ask(self, shard: int, call: PeerCall) -> PeerAnswer:
        self.asked.append((shard, call))
        other = self._network.nodes[shard]
        if shard == self.own:
            return await other.answer(call)
        ended = self._network.link(self.own, shard)
        if ended is None:
            return away(shard)
        # What has begun over there goes on when the link ends.
        answer = asyncio.ensure_future(other.answer(call))
        waiting = asyncio.ensure_future(ended.wait())
        await asyncio.wait((answer, waiting), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if ended.is_set():
            return away(shard, is_unknown=True)
        return answer.result()

    async def answer(self, call: PeerCall) -> PeerAnswer:
        """As `Local` does."""
        try:
            found = await self.serve(call)
        except (DelayServerError, StorageError) as error:
            return failed(error)
        assert found is not None, call
        return found

    def tell(self, shard: int, topic: str, notice: bytes) -> None:
        ended = self._network.link(self.own, shard)
        if ended is not None:
            loop = asyncio.get_running_loop()
            loop.call_soon(partial(self._deliver, ended, shard, topic, notice))

    def _deliver(self, ended: asyncio.Event, shard: int, topic: str, notice: bytes) -> None:
        if not ended.is_set():
            self._network.nodes[shard].hear(self.own, topic, notice)

    def hear(self, shard: int, topic: str, notice: bytes) -> None:
        if (heard := self._heard.get(topic)) is not None:
            heard(shard, notice)

    def on_told(self, topic: str, heard: Callable[[int, bytes], None]) -> None:
        self._heard[topic] = heard

    def on_change(self, changed: Callable[[int, bool], None]) -> None:
        self.changed.append(changed)
        for shard in range(self.count):
            if self._network.link(self.own, shard) is not None:
                changed(shard, True)
