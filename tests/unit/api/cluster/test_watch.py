"""What nodes see of their cluster: who is in step, who is to own what, what may be deleted."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from delayserver.api.cluster.watch import (
    IN_STEP_MS,
    IN_STEP_RECORDS,
    SEEN_MS,
    News,
    ReplicaNote,
    ReplicaState,
    choose,
    deletable,
    in_order,
    kept_by_two,
    news_of,
)
from storage.replicated.meta import ClusterMeta, MoveRecord

NOW_MS = 1_800_000_000_000


def replica(node: str, *, ago_ms: int = 0, lag: int = 0, kept: int = 100) -> ReplicaState:
    note = ReplicaNote(NOW_MS - ago_ms, f"http://{node}:8080", 1000, kept // 10)
    return ReplicaState(node, kept, note, lag)


def news(*replicas: ReplicaState, **more: object) -> News:
    return msgspec.structs.replace(
        News(at_ms=NOW_MS, replicas={0: list(replicas)}, nodes=["n1", "n2", "n3"]),
        **more,
    )


FIRST, SECOND, THIRD = in_order(0, ["n1", "n2", "n3"])


def test_each_node_goes_first_for_some_shards_and_none_moves_but_those_of_a_lost_one() -> None:
    nodes = ["n1", "n2", "n3"]
    orders = [in_order(shard, nodes) for shard in range(300)]
    firsts = [order[0] for order in orders]
    assert min(firsts.count(node) for node in nodes) > 60
    without = [in_order(shard, ["n1", "n3"]) for shard in range(300)]
    assert without == [[node for node in order if node != "n2"] for order in orders]
    for some in itertools.permutations(nodes):
        assert in_order(7, some) == in_order(7, nodes)


def test_an_owner_keeps_its_shard_where_nobody_wants_otherwise() -> None:
    here = news(replica(FIRST), replica(SECOND))
    assert choose(here, 0, FIRST, 3, may_balance=True) is None
    assert choose(here, 0, SECOND, 3, may_balance=False) is None
    assert choose(News(), 0, FIRST, 3, may_balance=True) is None


def test_one_that_goes_before_the_owner_gets_the_shard_when_it_is_in_step() -> None:
    assert choose(news(replica(FIRST), replica(SECOND)), 0, SECOND, 3, may_balance=True) == FIRST
    behind = news(replica(FIRST, lag=IN_STEP_RECORDS + 1), replica(SECOND))
    assert choose(behind, 0, SECOND, 3, may_balance=True) is None
    silent = news(replica(FIRST, ago_ms=IN_STEP_MS + 1), replica(SECOND))
    assert choose(silent, 0, SECOND, 3, may_balance=True) is None
    drained = news(replica(FIRST), replica(SECOND), drained=[FIRST])
    assert choose(drained, 0, SECOND, 3, may_balance=True) is None


def test_a_drained_owner_gives_its_shard_to_the_first_that_is_in_step() -> None:
    drained = [FIRST]
    here = news(replica(FIRST), replica(SECOND), replica(THIRD), drained=drained)
    assert choose(here, 0, FIRST, 3, may_balance=False) == SECOND
    here = news(replica(FIRST), replica(SECOND, lag=10**6), replica(THIRD), drained=drained)
    assert choose(here, 0, FIRST, 3, may_balance=False) == THIRD
    alone = news(replica(FIRST), drained=drained)
    assert choose(alone, 0, FIRST, 3, may_balance=False) is None


@pytest.mark.parametrize("epoch", [3, 4])
def test_a_move_is_meant_for_the_owner_of_one_epoch(epoch: int) -> None:
    moves = {0: MoveRecord(0, THIRD, 3)}
    here = news(replica(FIRST), replica(SECOND), replica(THIRD), moves=moves)
    wanted = THIRD if epoch == 3 else None
    assert choose(here, 0, FIRST, epoch, may_balance=False) == wanted
    # Until the node is in step the shard stays where it is, also if another would be better.
    late = news(replica(FIRST), replica(SECOND), replica(THIRD, lag=10**6), moves=moves)
    assert choose(late, 0, SECOND, 3, may_balance=True) is None


def test_a_shard_that_was_moved_stays_there_though_another_goes_before() -> None:
    moves = {0: MoveRecord(0, THIRD, 3)}
    here = news(replica(FIRST), replica(THIRD), moves=moves)
    assert choose(here, 0, THIRD, 4, may_balance=True) is None
    assert choose(here, 0, THIRD, 6, may_balance=True) == FIRST, "it has moved since"


def test_what_may_be_deleted_is_behind_two_that_are_there() -> None:
    def kept(one: ReplicaState) -> int:
        return one.checkpoint_offset

    assert kept_by_two(news(), 0, kept) is None
    assert kept_by_two(news(replica("n1", kept=9)), 0, kept) is None
    three = [replica("n1", kept=30), replica("n2", kept=10), replica("n3", kept=20)]
    assert kept_by_two(news(*three), 0, kept) == 20
    lost = [*three[:2], replica("n3", kept=20, ago_ms=SEEN_MS + 1)]
    assert kept_by_two(news(*lost), 0, kept) == 10
    assert kept_by_two(news(*three), 1, kept) is None


def test_it_is_deleted_when_it_was_there_for_long_enough() -> None:
    samples = [(0, 5), (1_000, 9), (2_000, 14)]
    assert deletable(samples, 999, 1_000) is None
    assert deletable(samples, 1_000, 1_000) == 5
    assert deletable(samples, 2_500, 1_000) == 9
    assert deletable([], 10**9, 1_000) is None


def test_the_news_name_each_node_once_with_what_it_said_last() -> None:
    meta = ClusterMeta("c.meta/0")
    for offset, record in enumerate(
        (b'{"node": "n1"}', b'{"node": "n2"}', b'{"drain": "n2"}', b'{"forget": "n3"}')
    ):
        meta.apply(offset, record)
    meta.moves[1] = MoveRecord(1, "n2", 4)
    replicas = {
        0: [replica("n1", ago_ms=9_000, lag=3), replica("n2", ago_ms=SEEN_MS + 1)],
        1: [replica("n1", ago_ms=1_000)],
    }
    found = news_of(meta, replicas, NOW_MS)
    assert [(one.node, one.state) for one in found.machines.nodes] == [
        ("n1", "serving"),
        ("n2", "away"),
    ]
    assert found.machines.nodes[0].last_seen_at == "2027-01-15T07:59:59.000Z"
    assert [one.lag_records for one in found.machines.replicas[0]] == [3, 0]
    assert (found.drained, found.forgotten, found.nodes) == (["n2"], ["n3"], ["n1", "n2"])
    line = msgspec.json.encode(found)
    assert msgspec.json.decode(line, type=News) == found
