"""A node that owns its shard: to whom it gives its office."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from delayserver.cluster.watch import News, ReplicaNote, ReplicaState
from delayserver.recovery.standby import LAG_MAX_MS
from delayserver.serve.owner import OwnerNode


def test_an_owner_whose_disk_is_slow_gives_its_shard_to_a_replica_in_step_and_keeps_its_own() -> (
    None
):
    def successor(*replicas: ReplicaState, **what: bool) -> str | None:
        news = News(at_ms=0, replicas={3: list(replicas)}, nodes=["n1", "n2"])
        keeper = SimpleNamespace(is_damaged=False)
        node = SimpleNamespace(
            lines=SimpleNamespace(news=news),
            keeper=keeper,
            membership=SimpleNamespace(node="n1"),
            place=SimpleNamespace(shard=3),
        )
        owner = SimpleNamespace(node=node, epoch=4, _taken_ms=1 << 62)
        found = OwnerNode.successor(cast("OwnerNode", owner), **what)
        assert not keeper.is_damaged, "nothing is wrong with what it has"
        return found

    own, other = (ReplicaState(node, 0, ReplicaNote(0, "", 0, 0), 0) for node in ("n1", "n2"))
    assert successor(own, other, is_slow=True) == "n2"
    assert successor(own, other) is None
    behind = ReplicaState("n2", 0, ReplicaNote(0, "", 0, 0, lag_ms=LAG_MAX_MS), 0)
    assert successor(own, behind, is_slow=True) is None
