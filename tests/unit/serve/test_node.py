"""A process of a node: what it waits for on standby, and to whom it gives its office."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from delayserver.cluster.watch import News, ReplicaNote, ReplicaState
from delayserver.recovery.standby import LAG_MAX_MS
from delayserver.serve.node import Awaited, NodeShard

if TYPE_CHECKING:
    from storage.replicated.holder import Holder


def test_who_is_told_to_stop_behind_its_claim_has_heard_it() -> None:
    async def run() -> None:
        office, holder = Awaited(), cast("Holder", object())
        office.came(holder)
        office.stop()
        await office.wait()
        assert office.holder is holder
        assert office.is_stopping

    asyncio.run(run())


def test_who_claims_though_it_was_told_to_stop_has_an_office_to_leave() -> None:
    async def run() -> None:
        office, holder = Awaited(), cast("Holder", object())
        office.stop()
        await office.wait()
        office.came(holder)
        assert office.holder is holder
        assert office.is_stopping

    asyncio.run(run())


def test_an_owner_whose_disk_is_slow_gives_its_shard_to_a_replica_in_step_and_keeps_its_own() -> (
    None
):
    def successor(*replicas: ReplicaState, **what: bool) -> str | None:
        news = News(at_ms=0, replicas={3: list(replicas)}, nodes=["n1", "n2"])
        keeper = SimpleNamespace(is_damaged=False)
        owner = SimpleNamespace(
            lines=SimpleNamespace(news=news),
            epoch=4,
            _keeper=keeper,
            _membership=SimpleNamespace(node="n1"),
            _place=SimpleNamespace(shard=3),
            _taken_ms=1 << 62,
        )
        found = NodeShard.successor(cast("NodeShard", owner), **what)
        assert not keeper.is_damaged, "nothing is wrong with what it has"
        return found

    own, other = (ReplicaState(node, 0, ReplicaNote(0, "", 0, 0), 0) for node in ("n1", "n2"))
    assert successor(own, other, is_slow=True) == "n2"
    assert successor(own, other) is None
    behind = ReplicaState("n2", 0, ReplicaNote(0, "", 0, 0, lag_ms=LAG_MAX_MS), 0)
    assert successor(own, behind, is_slow=True) is None
