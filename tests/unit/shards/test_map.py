"""The map: a version for what is the same, addresses as the client reaches them, long polls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import msgspec

from delayserver.config import Settings
from delayserver.shards.book import OwnerBook, ShardOwner, Vacancy
from delayserver.shards.link import Links
from delayserver.shards.map import ClusterMap, Machines
from delayserver.shards.meeting import UnixMeeting
from delayserver.shards.place import ShardPlace
from delayserver.wire.operations import NodeDocument, ReplicaDocument
from tests.waiting import turns

NOW_MS = 1_795_192_200_000
FOR_EVER_S = 1e6


def links_of(own: int, ports: dict[int, int], count: int = 3) -> Links:
    nowhere = Path("nowhere")
    links = Links(ShardPlace(own, count, nowhere, nowhere), UnixMeeting(nowhere))
    links.ports = dict(ports)
    return links


def map_of(links: Links | None, **settings: Any) -> ClusterMap:
    return ClusterMap(links, Settings(**settings), lambda: NOW_MS)


def shown(cluster: ClusterMap, host: str = "10.0.0.7:8080") -> Any:
    return msgspec.to_builtins(cluster.document(host))


def test_a_server_alone_is_one_shard_at_the_address_where_it_was_asked() -> None:
    cluster = map_of(None, host="::1", port=8080)
    document = shown(cluster)
    (shard,) = document["shards"]
    assert shard == {
        "shard": 0,
        "owner": "local",
        "epoch": 0,
        "url": "http://10.0.0.7:8080",
        "replicas": [],
        "state": "serving",
    }
    assert document["nodes"] == [
        {
            "node": "local",
            "url": "http://10.0.0.7:8080",
            "state": "serving",
            "last_seen_at": "2026-11-20T16:30:00.000Z",
        }
    ]
    assert document["version"] == cluster.version == map_of(None).version
    assert shown(cluster, "")["nodes"][0]["url"] == "http://[::1]:8080"


def test_each_shard_has_its_port_and_one_that_is_away_none() -> None:
    document = shown(map_of(links_of(1, {0: 4000, 1: 4001})))
    assert [(one["shard"], one["state"], one["url"]) for one in document["shards"]] == [
        (0, "serving", "http://10.0.0.7:4000"),
        (1, "serving", "http://10.0.0.7:4001"),
        (2, "away", None),
    ]


def test_who_sees_the_same_has_the_same_version_and_who_sees_another_thing_another() -> None:
    ports = {0: 4000, 1: 4001, 2: 4002}
    versions = {map_of(links_of(own, ports)).version for own in range(3)}
    assert len(versions) == 1
    others = [
        {0: 4000, 1: 4001},
        {0: 4000, 1: 4001, 2: 4003},
        {0: 4001, 1: 4000, 2: 4002},
    ]
    found = {map_of(links_of(0, other)).version for other in others}
    found.add(map_of(links_of(0, ports, count=4)).version)
    found.add(map_of(None).version)
    assert len(found) == 5
    assert not found & versions


def run(test: Callable[[Links, ClusterMap], Awaitable[None]]) -> None:
    async def main() -> None:
        links = links_of(0, {0: 4000, 1: 4001})
        async with asyncio.timeout(10):
            await test(links, map_of(links))

    asyncio.run(main())


def come(links: Links, shard: int, port: int) -> None:
    """As a link to another shard does that has said who it is."""
    links.joined(cast(Any, object()), shard, port)


async def _is_waiting(poll: asyncio.Task[None]) -> bool:
    await turns(10)
    return not poll.done()


def test_a_long_poll_ends_when_the_version_is_another_one() -> None:
    async def test(links: Links, cluster: ClusterMap) -> None:
        before = cluster.version
        await cluster.other_than(before + 1, FOR_EVER_S)
        polls = [asyncio.create_task(cluster.other_than(before, FOR_EVER_S)) for _ in range(3)]
        assert await _is_waiting(polls[0])
        come(links, 2, 4002)
        await asyncio.gather(*polls)
        assert cluster.version != before

    run(test)


def test_a_long_poll_does_not_end_by_a_change_that_changes_nothing() -> None:
    async def test(links: Links, cluster: ClusterMap) -> None:
        come(links, 2, 4002)
        poll = asyncio.create_task(cluster.other_than(cluster.version, FOR_EVER_S))
        assert await _is_waiting(poll)
        links.ports.pop(2)
        links._links.clear()
        come(links, 2, 4002)
        assert await _is_waiting(poll)
        cluster.end()
        await poll

    run(test)


def test_nobody_waits_for_longer_than_asked_or_when_the_server_stops() -> None:
    async def test(links: Links, cluster: ClusterMap) -> None:
        await cluster.other_than(cluster.version, 0)
        poll = asyncio.create_task(cluster.other_than(cluster.version, FOR_EVER_S))
        assert await _is_waiting(poll)
        cluster.end()
        await poll
        await cluster.other_than(cluster.version, FOR_EVER_S)

    run(test)


# ── in a cluster ───────────────────────────────────────────────────────────────────────────────


def owner(shard: int, epoch: int, node: str) -> ShardOwner:
    return ShardOwner(shard, epoch, node, f"http://{node}:{8000 + shard}", f"{node}:7000")


def node(name: str, state: Any = "serving", seen_at: str = "") -> NodeDocument:
    return NodeDocument(name, f"http://{name}:80", state, seen_at)


def map_of_book(book: OwnerBook, machines: Callable[[], Machines] = Machines) -> ClusterMap:
    nowhere = Path("nowhere")
    links = Links(ShardPlace(0, 2, nowhere, nowhere), UnixMeeting(nowhere), book)
    return ClusterMap(links, Settings(), lambda: NOW_MS, machines)


def test_owners_and_their_addresses_are_those_in_the_book() -> None:
    book = OwnerBook(2)
    book.take(owner(0, 3, "n2"))
    book.take(Vacancy(1, 5))
    machines = Machines([node("n1"), node("n2", "away")], {0: [ReplicaDocument("n1", 17)]})
    document = shown(map_of_book(book, lambda: machines))
    assert document["shards"] == [
        {
            "shard": 0,
            "owner": "n2",
            "epoch": 3,
            "url": "http://n2:8000",
            "replicas": [{"node": "n1", "lag_records": 17}],
            "state": "serving",
        },
        {"shard": 1, "owner": None, "epoch": 5, "url": None, "replicas": [], "state": "away"},
    ]
    assert [(one["node"], one["state"]) for one in document["nodes"]] == [
        ("n1", "serving"),
        ("n2", "away"),
    ]
    assert shown(map_of_book(book))["nodes"] == []


def test_the_version_is_of_what_matters_to_clients() -> None:
    book, machines = OwnerBook(2), [Machines([node("n1"), node("n2")])]
    cluster = map_of_book(book, lambda: machines[-1])
    before = cluster.version
    lagging = {0: [ReplicaDocument("n1", 1)]}
    machines.append(Machines([node("n2", seen_at="later"), node("n1")], lagging))
    assert cluster.version == before
    machines.append(Machines([node("n1"), node("n2", "away")]))
    assert cluster.version != before
    machines.append(machines[0])
    versions = {before}
    for entry in (owner(0, 1, "n1"), owner(0, 2, "n1"), Vacancy(0, 2), owner(0, 3, "n2")):
        book.take(entry)
        versions.add(cluster.version)
    assert len(versions) == 5


def test_a_long_poll_ends_when_an_owner_moves() -> None:
    async def main() -> None:
        book, machines = OwnerBook(2), [Machines()]
        cluster = map_of_book(book, lambda: machines[-1])
        poll = asyncio.create_task(cluster.other_than(cluster.version, FOR_EVER_S))
        assert await _is_waiting(poll)
        book.take(owner(1, 1, "n1"))
        await poll
        poll = asyncio.create_task(cluster.other_than(cluster.version, FOR_EVER_S))
        assert await _is_waiting(poll)
        machines.append(Machines([node("n1")]))
        cluster.changed()
        await poll

    asyncio.run(main())
