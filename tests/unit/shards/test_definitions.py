"""Definitions: what shard 0 has decided is in every shard before it is answered, and again after a
crash in between."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from delayserver.errors import ShardAwayError
from delayserver.records.subscriptions import Registry, Subscription
from delayserver.shards import definitions
from delayserver.shards.definitions import Definitions
from delayserver.shards.peers import PeerAnswer, PeerCall
from tests.unit.fakes import START_MS
from tests.unit.shards.network import Network, away
from tests.unit.shards.shards import RealShards
from tests.waiting import DEADLINE_S, Looks, turns, until

COUNT = 3


class Cluster:
    """Real shards whose definitions are one, and the links between them."""

    def __init__(self, directory: Path) -> None:
        self.shards = RealShards(directory, COUNT)
        self.network = Network(COUNT)
        self.parts = [
            Definitions(server.calls, node)
            for server, node in zip(self.shards.servers, self.network.nodes, strict=True)
        ]
        for node, part in zip(self.network.nodes, self.parts, strict=True):
            node.serve = part.answer
        self.run(self._begin)

    async def _begin(self) -> None:
        for part in self.parts:
            part.begin()

    def run(self, work: Callable[[], Awaitable[Any]]) -> Any:
        async def limited() -> Any:
            async with asyncio.timeout(20):
                return await work()

        return self.shards.run(limited())

    def connect_all(self) -> None:
        async def connect() -> None:
            self.network.connect_all()
            await self.until_whole()

        self.run(connect)

    async def until_whole(self) -> None:
        for part in self.parts:
            await part.whole.wait()

    async def until_same(self) -> None:
        await until(self.are_same)

    async def until_told(self) -> None:
        """Until the home knows that all have what it has told them."""

        async for _ in Looks(DEADLINE_S, 0.001):
            with contextlib.suppress(ShardAwayError):
                await self.parts[0].check()
                return
        pytest.fail("a shard stays away")

    def are_same(self) -> bool:
        return all(self.known(shard) == self.known(0) for shard in range(1, COUNT))

    def known(self, shard: int) -> list[Subscription]:
        """What is in force there, but for what is of a shard alone."""
        replace = msgspec.structs.replace
        registry = self.shards.servers[shard].calls.registry
        return [replace(one, history=()) for one in registry]

    def fail_since(self, since_ms: int) -> bool:
        """Whether all say that of the first subscription."""
        return all(self.known(one)[0].failing_since_ms == since_ms for one in range(COUNT))

    def names(self, shard: int) -> list[str]:
        return [one.name for one in self.known(shard)]

    async def put(self, name: str, **more: Any) -> Subscription:
        def define(existing: Subscription | None, known: Registry) -> Subscription:
            number = existing.id if existing else known.next_id()
            return Subscription(number, name, "a", "pull", START_MS, **more)

        return await self.shards.servers[0].calls.subscriptions.put(name, define)

    async def put_when_there(self, name: str) -> None:
        """As a client does that is told to come again."""
        async for _ in Looks(DEADLINE_S, 0.001):
            try:
                await self.put(name)
                return
            except ShardAwayError as error:
                assert not error.is_unknown
        pytest.fail("the shard stays away")

    async def change(self, name: str, **changes: bool) -> None:
        await self.shards.servers[0].calls.subscriptions.change(name, **changes)

    def close(self) -> None:
        async def close() -> None:
            for part in self.parts:
                part.close()

        self.run(close)
        self.shards.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.close()


def test_a_change_is_in_every_shard_before_it_is_answered(cluster: Cluster) -> None:
    cluster.connect_all()

    async def change() -> None:
        for lease_ms in (1, 2):
            await cluster.put("s", lease_ms=lease_ms)
            await cluster.put("t", lease_ms=lease_ms)
            assert cluster.are_same()
            assert [one.lease_ms for one in cluster.known(2)] == [lease_ms] * 2
        await cluster.change("s", paused=True)
        assert cluster.known(1)[0].paused and cluster.are_same()
        await cluster.change("s", deleted=True)
        assert cluster.names(2) == ["t"] and cluster.are_same()

    cluster.run(change)


def test_changes_at_the_same_time_end_alike_everywhere(cluster: Cluster) -> None:
    cluster.connect_all()

    async def change() -> None:
        async def one(number: int) -> None:
            await cluster.put("s", lease_ms=number + 1)
            await cluster.put(f"s{number % 4}", lease_ms=number + 1)

        await asyncio.gather(*map(one, range(20)))

    cluster.run(change)
    assert cluster.are_same() and len(cluster.known(0)) == 5


def test_nothing_is_changed_while_a_shard_is_away(cluster: Cluster) -> None:
    cluster.connect_all()

    async def change() -> None:
        await cluster.put("s")
        cluster.network.cut(0, 2)
        for work in (cluster.put("t"), cluster.change("s", deleted=True)):
            with pytest.raises(ShardAwayError) as caught:
                await work
            assert not caught.value.is_unknown
        assert cluster.names(0) == cluster.names(1) == ["s"]
        # One that does not decide may be away from others.
        cluster.network.connect(0, 2)
        cluster.network.cut(1, 2)
        await cluster.put_when_there("t")
        assert cluster.are_same()

    cluster.run(change)


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_change_waits_for_a_shard_that_moves(cluster: Cluster, is_asked: bool) -> None:
    """It may be away already, or go while it is asked."""
    cluster.connect_all()
    home = cluster.parts[0]

    async def change() -> None:
        await cluster.until_told()
        home._moving_s = DEADLINE_S
        gate = Gate(cluster, 2)
        if is_asked:
            task = asyncio.ensure_future(cluster.put("s"))
            await gate.came.wait()
            cluster.network.cut(0, 2)
        else:
            cluster.network.cut(0, 2)
            task = asyncio.ensure_future(cluster.put("s"))
        await turns(100)
        assert not task.done()
        gate.remove()
        cluster.network.connect(0, 2)
        await task
        assert cluster.are_same() and cluster.names(2) == ["s"]
        # One that nobody takes is away.
        home._moving_s = 0.01
        cluster.network.cut(0, 2)
        with pytest.raises(ShardAwayError) as caught:
            await cluster.put("t")
        assert not caught.value.is_unknown

    cluster.run(change)


class Gate:
    """Keeps what a shard is asked until it is opened."""

    def __init__(self, cluster: Cluster, shard: int) -> None:
        self.came = asyncio.Event()
        self.opened = asyncio.Event()
        self._node = cluster.network.nodes[shard]
        self._serve = self._node.serve
        self._node.serve = self.serve

    async def serve(self, call: PeerCall) -> PeerAnswer | None:
        self.came.set()
        await self.opened.wait()
        return await self._serve(call)

    def remove(self) -> None:
        self._node.serve = self._serve


async def cut_in_between(cluster: Cluster, work: Awaitable[Any]) -> None:
    """The shard is asked, and ends before it has done it."""
    await cluster.until_told()
    gate = Gate(cluster, 2)
    task = asyncio.ensure_future(work)
    await gate.came.wait()
    cluster.network.cut(0, 2)
    with pytest.raises(ShardAwayError) as caught:
        await task
    assert caught.value.is_unknown
    gate.remove()


def test_what_a_shard_has_missed_it_gets_when_it_is_there_again(cluster: Cluster) -> None:
    cluster.connect_all()

    async def change() -> None:
        await cluster.put("gone")
        await cluster.put("again")
        await cut_in_between(cluster, cluster.put("new"))
        assert "new" in cluster.names(0) and "new" not in cluster.names(2)
        cluster.network.connect(0, 2)
        await cluster.until_same()
        for name in ("gone", "again"):
            await cut_in_between(cluster, cluster.change(name, deleted=True))
            assert name in cluster.names(2)
            if name == "gone":
                cluster.network.connect(0, 2)
                await cluster.until_same()
                assert cluster.names(2) == ["again", "new"]
        # The same name is another subscription by the time that the shard is there again.
        cluster.network.connect(0, 2)
        gate = Gate(cluster, 2)
        await gate.came.wait()
        gate.opened.set()
        gate.remove()
        await cluster.put_when_there("again")
        assert cluster.are_same() and cluster.names(2) == ["new", "again"]

    cluster.run(change)


def test_a_new_link_is_told_everything_though_nothing_was_changed(cluster: Cluster) -> None:
    cluster.connect_all()

    async def change() -> None:
        await cluster.put("s")
        cluster.network.cut(0, 2)
        # As if that shard had lost what it had confirmed.
        await cluster.shards.servers[2].calls.subscriptions.change("s", deleted=True)
        assert cluster.names(2) == []
        cluster.network.connect(0, 2)
        await cluster.until_same()
        assert cluster.names(2) == ["s"]

    cluster.run(change)


def test_none_is_ready_until_all_have_met_and_know_all(cluster: Cluster) -> None:
    def missing(shard: int) -> str:
        with pytest.raises(ShardAwayError) as caught:
            cluster.parts[shard].check_whole()
        return str(caught.value)

    async def meet() -> None:
        assert "shard 1" in missing(0)
        assert "shard 0" in missing(1) and "shard 0" in missing(2)
        cluster.network.connect(0, 1)
        cluster.network.connect(1, 2)
        gate = Gate(cluster, 2)
        cluster.network.connect(0, 2)
        await gate.came.wait()
        await cluster.parts[1].whole.wait()
        await until(lambda: "shard 1" not in missing(0))  # its answer is on its way
        # Both have met all others, and the definitions are on their way.
        assert "shard 2" in missing(0)
        assert "shard 0" in missing(2)
        told: list[int] = []
        cluster.parts[2].when_whole(lambda: told.append(2))
        gate.opened.set()
        await cluster.until_whole()
        await turns()
        assert told == [2]
        for part in cluster.parts:
            part.check_whole()
        # Once ready, always: who is away is told of in each answer.
        cluster.network.cut(0, 2)
        for part in cluster.parts:
            part.check_whole()

    cluster.run(meet)


@pytest.mark.parametrize("reason", ["gone", "failures"])
@pytest.mark.parametrize("shard", range(COUNT))
def test_a_receiver_that_is_gone_or_fails_pauses_its_subscription_in_all(
    cluster: Cluster, shard: int, reason: str
) -> None:
    cluster.connect_all()

    async def pause() -> None:
        made = await cluster.put("s")
        cluster.shards.servers[shard].engine.subscribing.pause(made.id, reason)
        await until(lambda: all(cluster.known(one)[0].paused for one in range(COUNT)))
        assert cluster.are_same() and cluster.known(shard)[0].pause_reason == reason
        await cluster.change("s", paused=False)
        assert cluster.are_same() and not cluster.known(shard)[0].paused
        assert cluster.known(shard)[0].pause_reason == ""

    cluster.run(pause)


@pytest.mark.parametrize(("fails", "arrives"), [(0, 1), (1, 0), (1, 2)])
def test_what_arrives_in_one_shard_takes_back_that_another_one_fails(
    cluster: Cluster, fails: int, arrives: int
) -> None:
    cluster.connect_all()
    parts = [server.engine.subscribing for server in cluster.shards.servers]

    async def until_since(since_ms: int) -> None:
        await until(lambda: cluster.fail_since(since_ms))

    async def fail() -> None:
        await cluster.put("s", disable_after_ms=1000)
        for after_ms in (0, 500):
            assert not parts[fails].fails_for_long(parts[fails].subscription("s"), after_ms + 1)
        await until_since(1)
        # Nobody has anything else to say, so any of them may pause it.
        assert parts[arrives].fails_for_long(parts[arrives].subscription("s"), 1001)
        parts[arrives].on_arrived(parts[arrives].subscription("s"), 1002)
        await until_since(0)
        # Two failures with years between, and something that had arrived elsewhere.
        for now_ms in (1003, START_MS):
            if now_ms == START_MS:
                parts[arrives].on_arrived(parts[arrives].subscription("s"), START_MS - 1)
            assert not parts[fails].fails_for_long(parts[fails].subscription("s"), now_ms)
        await until(lambda: not parts[fails].failing.since_ms(1))
        await until_since(0)
        assert not parts[fails].fails_for_long(parts[fails].subscription("s"), START_MS + 99)
        await cluster.until_told()
        assert cluster.are_same() and not cluster.known(0)[0].paused

    cluster.run(fail)


def test_what_the_home_has_not_heard_of_failures_is_told_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(definitions, "RETRY_S", 0.01)
    cluster.connect_all()
    part = cluster.shards.servers[2].engine.subscribing

    async def fail() -> None:
        await cluster.put("s", disable_after_ms=1000)
        await cluster.until_told()
        cluster.network.cut(0, 2)
        for now_ms in (1, 501, 502):
            assert not part.fails_for_long(part.subscription("s"), now_ms)
        await until(lambda: len(cluster.network.nodes[2].asked) >= 2)
        assert cluster.known(0)[0].failing_since_ms == 0
        cluster.network.connect(0, 2)
        await until(lambda: cluster.fail_since(1))
        assert part.fails_for_long(part.subscription("s"), 1001)

    cluster.run(fail)


def test_a_node_of_an_older_version_says_no_reason(cluster: Cluster) -> None:
    cluster.connect_all()

    async def pause() -> None:
        made = await cluster.put("s")
        call = PeerCall("POST", "/internal/pause", body=b"%d" % made.id)
        await cluster.network.nodes[0].serve(call)
        assert cluster.known(0)[0].pause_reason == "gone" and cluster.are_same()

    cluster.run(pause)


def test_a_pause_that_the_home_could_not_record_is_told_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(definitions, "RETRY_S", 0.01)
    cluster.connect_all()

    async def pause() -> None:
        made = await cluster.put("s")
        cluster.network.cut(0, 2)
        cluster.shards.servers[1].engine.subscribing.pause(made.id)
        await until(lambda: len(cluster.network.nodes[1].asked) >= 2)
        assert [cluster.known(shard)[0].paused for shard in range(COUNT)] == [False, True, False]
        cluster.network.connect(0, 2)
        await until(lambda: all(cluster.known(one)[0].paused for one in range(COUNT)))

    cluster.run(pause)


def test_a_shard_that_is_there_and_refuses_is_asked_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(definitions, "RETRY_S", 0.01)
    cluster.connect_all()
    node = cluster.network.nodes[1]
    serve, refused = node.serve, list[PeerCall]()

    async def refuse(call: PeerCall) -> PeerAnswer | None:
        if len(refused) < 3:
            refused.append(call)
            return away(1)
        return await serve(call)

    node.serve = refuse

    async def change() -> None:
        await cluster.put("s")
        assert len(refused) == 3 and cluster.are_same()
        # One that never does is no reason to wait for ever.
        node.serve = lambda call: _refuse_always()
        monkeypatch.setattr(definitions, "SPREAD_S", 0.1)
        with pytest.raises(ShardAwayError) as caught:
            await cluster.put("t")
        assert caught.value.is_unknown
        node.serve = serve
        await cluster.until_same()

    cluster.run(change)


def test_what_is_confirmed_in_the_turn_in_which_the_time_is_up_is_answered(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.connect_all()
    home = cluster.parts[0]

    async def until_told(shard: int, follower: Any, revision: int) -> None:
        # The time is up here, and what ends the wait is the last confirmation.
        await asyncio.Event().wait()

    async def change() -> None:
        subscription = await cluster.put("s")
        monkeypatch.setattr(definitions, "SPREAD_S", 0.01)
        monkeypatch.setattr(home, "_until_told", until_told)
        monkeypatch.setattr(home, "_put", lambda subscription: None)
        await home.spread(subscription)

    cluster.run(change)


async def _refuse_always() -> PeerAnswer:
    return away(1)


def test_what_is_no_call_about_definitions_is_for_others(cluster: Cluster) -> None:
    assert cluster.run(lambda: cluster.parts[0].answer(PeerCall("GET", "/v1/stats"))) is None
