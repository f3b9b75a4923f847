"""Who asks one address goes on to the other nodes of its cluster."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from delayserver.client import AsyncClient
from delayserver.client.errors import UnreachableError
from delayserver.client.following import ALONE_S, LOOK_S, Following
from delayserver.client.transport import HttpAnswer
from tests.unit.client.fake_server import (
    LOST,
    UNREACHABLE,
    FakeTransport,
    answer,
    asynchronous,
    problem,
)
from tests.waiting import turns

HOME, OTHER = "http://here:8080", "http://here:8081"
FAR = "http://far:8080"


def map_of(*urls: str) -> HttpAnswer:
    nodes = [{"node": url, "url": url} for url in urls]
    return answer(200, {"version": 1, "shards": [], "nodes": nodes})


class Cluster:
    """Transports to its nodes, and who was asked for what."""

    def __init__(self, known: HttpAnswer | Exception) -> None:
        self.known = known
        self.asked: list[str] = []
        self.looks = 0
        self.made = {url: FakeTransport(default=self._answering(url)) for url in (HOME, OTHER, FAR)}

    def _answering(self, url: str) -> Callable[[str, str, Any], Any]:
        def reply(method: str, path: str, document: Any) -> Any:
            if path == "/v1/cluster":
                self.looks += 1
                return self.known
            self.asked.append(url)
            return answer(200, {"subscriptions": []})

        return reply

    def lose(self, url: str) -> None:
        self.made[url].default = lambda *_: UNREACHABLE


@asynchronous
async def test_another_node_is_asked_when_the_configured_one_is_lost() -> None:
    cluster = Cluster(map_of(HOME, OTHER, FAR))
    following = Following(cluster.made[HOME], HOME, cluster.made.__getitem__)
    await following.request("GET", "/")
    await turns(10)
    assert cluster.looks == 1
    cluster.lose(HOME)
    await following.request("GET", "/")
    assert cluster.asked == [HOME, OTHER]
    # On another host only where that is allowed.
    cluster.lose(OTHER)
    with pytest.raises(UnreachableError):
        await following.request("GET", "/")
    await following.close()
    assert [one.closed for one in cluster.made.values()] == [True, True, False]


@asynchronous
async def test_any_host() -> None:
    cluster = Cluster(map_of(HOME, FAR))
    following = Following(cluster.made[HOME], HOME, cluster.made.__getitem__, "any")
    await following.request("GET", "/")
    await turns(10)
    cluster.lose(HOME)
    await following.request("GET", "/")
    assert cluster.asked == [HOME, FAR]
    await following.close()


@asynchronous
async def test_no_host_is_asked_for_no_map() -> None:
    cluster = Cluster(map_of(HOME, OTHER))
    following = Following(cluster.made[HOME], HOME, cluster.made.__getitem__, "none")
    await following.request("GET", "/")
    await turns(10)
    assert cluster.looks == 0
    await following.close()


@pytest.mark.parametrize(
    ("known", "wait_s"),
    [
        (map_of(HOME, OTHER), LOOK_S),
        (map_of(HOME), ALONE_S),
        (problem(404), ALONE_S),
        (answer(200, "something else"), ALONE_S),
        (problem(503), 1.0),
        (LOST, 1.0),
    ],
)
def test_how_often_the_map_is_asked_for(
    known: HttpAnswer | Exception, wait_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        loop, passed_s = asyncio.get_running_loop(), 0.0
        real = loop.time
        monkeypatch.setattr(loop, "time", lambda: real() + passed_s)
        cluster = Cluster(known)
        following = Following(cluster.made[HOME], HOME, cluster.made.__getitem__)
        for wanted in (1, 2):
            await following.request("GET", "/")
            await turns(10)
            passed_s += wait_s * 0.9
            await following.request("GET", "/")
            await turns(10)
            assert cluster.looks == wanted
            passed_s += wait_s * 0.2
        await following.close()

    asyncio.run(main())


def test_another_loop_begins_anew() -> None:
    cluster = Cluster(map_of(HOME, OTHER))
    following = Following(cluster.made[HOME], HOME, cluster.made.__getitem__)
    for wanted in (1, 2):
        cluster.made[HOME].gate = asyncio.Event()
        cluster.made[HOME].gate.set()

        async def ask() -> None:
            await following.request("GET", "/")
            await turns(10)

        asyncio.run(ask())
        assert cluster.looks == wanted


@asynchronous
async def test_subscriptions_go_on_at_another_node() -> None:
    cluster = Cluster(map_of(HOME, OTHER))
    async with AsyncClient(
        HOME, transport=cluster.made[HOME], connect=cluster.made.__getitem__
    ) as client:
        await client.subscriptions.list()
        await turns(10)
        cluster.lose(HOME)
        await client.subscriptions.list()
    assert cluster.asked == [HOME, OTHER]
    assert cluster.made[HOME].closed


def test_whose_addresses_are_used_is_one_of_three() -> None:
    hosts: Any = "all"
    with pytest.raises(ValueError, match="owner_hosts is"):
        AsyncClient(HOME, owner_hosts=hosts)
