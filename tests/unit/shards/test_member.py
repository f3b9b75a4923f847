"""The parts of a shard: of the only one, and of one of several."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from delayserver.api.hot.asgi import Receive, Scope, Send
from delayserver.api.intake import Intake
from delayserver.config import Settings
from delayserver.server.calls import Calls
from delayserver.shards.front import Front
from delayserver.shards.map import ClusterMap
from delayserver.shards.member import Member
from delayserver.shards.place import ShardPlace
from tests.world.server import Observer, SimulatedClock, SimulatedServer
from tests.world.storage.catalog import MemoryCatalog
from tests.world.storage.files import SimulatedFiles

NOWHERE = Path("/nowhere")


def calls_of_server() -> Calls:
    return SimulatedServer(
        Settings(segment_bytes=1 << 16),
        SimulatedFiles(),
        MemoryCatalog(),
        SimulatedClock(),
        random.Random(0),
        Observer(),
    ).calls


async def not_asked(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError(scope["path"])


def member_at(place: ShardPlace, calls: Calls) -> Member:
    return Member(place, calls, Intake(calls.settings, calls.subjects, calls.random), not_asked)


def test_the_only_shard_of_one_passes_nothing_on_and_is_whole_at_once() -> None:
    # Without an event loop: nothing is shared with others, so nothing comes later.
    calls = calls_of_server()
    member = member_at(ShardPlace.alone(NOWHERE), calls)
    hot = member.hot
    assert member.front is member.path
    assert not hot.routes
    assert (hot.gather, hot.cancels.gather) == (hot.gather_own, hot.cancels.gather_own)
    assert calls.subscriptions.spreading is None
    assert calls._engine.dispatcher.queues.permits is None
    hot.check_ready()


def test_the_only_shard_of_one_is_asked_where_the_server_was_asked() -> None:
    calls = calls_of_server()
    member = member_at(ShardPlace.alone(NOWHERE), calls)
    cluster = ClusterMap(member.links, calls.settings, calls.clock)
    before = cluster.version

    async def begin() -> None:
        await member.begin(0)
        await member.close()

    asyncio.run(begin())  # which needs no socket, and no directory for one
    assert cluster.version == before
    [shard] = cluster.document("behind.example:8443").shards
    assert (shard.state, shard.url) == ("serving", "http://behind.example:8443")


def test_one_of_several_routes_and_waits_for_the_others() -> None:
    calls = calls_of_server()

    async def made() -> Member:
        return member_at(ShardPlace(0, 2, NOWHERE, NOWHERE), calls)

    member = asyncio.run(made())
    hot = member.hot
    assert isinstance(member.front, Front)
    assert hot.routes
    assert hot.gather != hot.gather_own
    assert hot.cancels.gather != hot.cancels.gather_own
    assert calls.subscriptions.spreading is member.definitions
    assert calls._engine.dispatcher.queues.permits is not None
    assert not member.definitions.whole.is_set()
