"""What a supervisor tells the processes of its node: the news, and whom the node does not see."""

from __future__ import annotations

import asyncio
from typing import cast

import msgspec
import pytest

from delayserver.cluster import news as telling
from delayserver.cluster.sight import LOST_ROUNDS
from delayserver.cluster.watch import ClusterObserver, News
from delayserver.shards.map import Machines
from delayserver.wire.operations import NodeDocument

NOBODY_THERE = "http://127.0.0.1:1"
NOW = "2026-11-26T12:00:00.000Z"


class Watch:
    """Sees two nodes, and sometimes no brokers."""

    def __init__(self) -> None:
        self.looks = 0

    def look(self) -> News | None:
        self.looks += 1
        if self.looks == 2:
            return None
        nodes = [NodeDocument(node, NOBODY_THERE, "serving", NOW) for node in ("n1", "n2")]
        return News(self.looks, Machines(nodes))


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telling, "LOOK_S", 0.001)


def test_all_is_told_that_is_known_and_who_cannot_be_reached() -> None:
    told: list[News] = []

    async def run() -> None:
        enough = asyncio.Event()

        def tell(line: bytes) -> None:
            told.append(msgspec.json.decode(line, type=News))
            if told[-1].unseen["n1"]:
                enough.set()

        watch = cast(ClusterObserver, Watch())
        task = asyncio.create_task(telling.tell_news(tell, watch, "n1"))
        async with asyncio.timeout(30):
            await enough.wait()
        task.cancel()

    asyncio.run(run())
    # Where the brokers did not answer there was nothing to tell.
    assert [one.at_ms for one in told[:3]] == [1, 3, 4]
    assert told[0].unseen == {"n1": []}
    # Itself it does not ask.
    assert told[-1].unseen == {"n1": ["n2"]}
    assert len(told) >= LOST_ROUNDS
