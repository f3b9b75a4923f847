"""What nodes see of their cluster: who is in step, who is to own what, what may be deleted."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from delayserver.api.cluster.map import Machines
from delayserver.api.cluster.watch import (
    IN_STEP_MS,
    IN_STEP_RECORDS,
    SEEN_MS,
    News,
    ReplicaNote,
    ReplicaState,
    apart,
    choose,
    deletable,
    in_order,
    kept_by_two,
    news_of,
    places_back,
    seen_from,
    there,
    waits_for_people,
)
from delayserver.api.documents import NodeDocument
from storage.replicated.meta import ClusterMeta, MoveRecord

NOW_MS = 1_800_000_000_000


def replica(
    node: str, *, ago_ms: int = 0, lag: int = 0, lag_ms: int = 0, kept: int = 100
) -> ReplicaState:
    at_ms, url = NOW_MS - ago_ms, f"http://{node}:8080"
    note = ReplicaNote(at_ms, url, 1000, kept // 10, lag_ms=lag_ms)
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
    stuck = news(replica(FIRST, lag_ms=IN_STEP_MS + 1), replica(SECOND))
    assert choose(stuck, 0, SECOND, 3, may_balance=True) is None, "it reads, and files nothing"
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


# ── a network that has come apart ──────────────────────────────────────────────────────────────


def machines(*nodes: str, away: tuple[str, ...] = ()) -> Machines:
    return Machines(
        [
            *(NodeDocument(node, f"http://{node}", "serving", "") for node in nodes),
            *(NodeDocument(node, f"http://{node}", "away", "") for node in away),
        ]
    )


def split(*parts: tuple[str, ...], away: tuple[str, ...] = ()) -> News:
    """All replicas are in step, and no node sees one of another part."""
    nodes = [node for part in parts for node in part]
    return news(
        *(replica(node) for node in nodes),
        machines=machines(*nodes, away=away),
        nodes=[*nodes, *away],
        unseen={node: [one for one in nodes if one not in part] for part in parts for node in part},
    )


@pytest.mark.parametrize(
    ("parts", "are_apart"),
    [
        ([("a",)], ""),
        ([("a", "b")], ""),
        ([("a",), ("b",)], "ab"),
        ([("a", "b", "c")], ""),
        ([("a",), ("b", "c")], "a"),
        ([("a",), ("b",), ("c",)], "abc"),
        ([("a", "b"), ("c", "d")], "abcd"),
        ([("a",), ("b", "c", "d")], "a"),
        ([("a", "b"), ("c", "d", "e")], "ab"),
        ([("a", "b"), ("c", "d"), ("e",)], "abcde"),
    ],
)
def test_who_makes_no_majority_with_those_that_it_reaches_is_apart(
    parts: list[tuple[str, ...]], are_apart: str
) -> None:
    assert apart(split(*parts)) == set(are_apart)


def test_who_is_away_counts_for_nothing() -> None:
    assert apart(split(("a", "b"), away=("c", "d", "e"))) == set()
    assert apart(split(("a",), away=("c",))) == set()


def test_a_way_that_one_end_cannot_go_is_closed() -> None:
    """Nobody can connect to the first one, which can connect to all."""
    whole = split((FIRST, SECOND, THIRD))
    one_way = msgspec.structs.replace(whole, unseen={SECOND: [FIRST], THIRD: [FIRST]})
    assert apart(one_way) == {FIRST}
    # A single way that is closed is none: each of both has another one.
    assert apart(msgspec.structs.replace(whole, unseen={SECOND: [FIRST]})) == set()


def test_an_owner_that_is_apart_gives_its_shard_to_one_that_is_not() -> None:
    here = split((FIRST,), (SECOND, THIRD))
    assert choose(here, 0, FIRST, 3, may_balance=False) == SECOND
    assert choose(here, 0, SECOND, 4, may_balance=True) is None, "it gets nothing back meanwhile"
    moved = msgspec.structs.replace(here, moves={0: MoveRecord(0, FIRST, 2)})
    assert choose(moved, 0, FIRST, 3, may_balance=False) == SECOND, "also if somebody wanted it"
    whole = split((FIRST, SECOND, THIRD))
    assert choose(whole, 0, SECOND, 4, may_balance=True) == FIRST, "all is as before"


def test_an_owner_that_is_apart_keeps_its_shard_where_nobody_is_better() -> None:
    for parts in ([(FIRST,), (SECOND,), (THIRD,)], [(FIRST,), (SECOND,)]):
        for own in (FIRST, SECOND):
            assert choose(split(*parts), 0, own, 3, may_balance=True) is None
    here = split((FIRST,), (SECOND, THIRD))
    behind = [replica(SECOND, lag=10**6), replica(THIRD, ago_ms=IN_STEP_MS + 1)]
    late = msgspec.structs.replace(here, replicas={0: [replica(FIRST), *behind]})
    assert choose(late, 0, FIRST, 3, may_balance=True) is None
    drained = msgspec.structs.replace(here, drained=[SECOND, THIRD])
    assert choose(drained, 0, FIRST, 3, may_balance=True) is None


def test_who_is_drained_gives_its_shard_to_one_that_is_not_apart_before_others() -> None:
    here = split((FIRST,), (SECOND, THIRD))
    drained = msgspec.structs.replace(here, drained=[THIRD])
    assert choose(drained, 0, THIRD, 3, may_balance=False) == SECOND
    drained = msgspec.structs.replace(here, drained=[SECOND, THIRD])
    assert choose(drained, 0, THIRD, 3, may_balance=False) == FIRST


def test_who_is_apart_goes_behind_all_others_where_there_is_a_better_one() -> None:
    here = split((FIRST,), (SECOND, THIRD))
    assert [places_back(here, 0, node) for node in (FIRST, SECOND, THIRD)] == [3, 0, 0]
    assert places_back(split((FIRST,), (SECOND,)), 0, FIRST) == 0
    behind = [replica(node, lag=10**6) for node in (SECOND, THIRD)]
    late = msgspec.structs.replace(here, replicas={0: [replica(FIRST), *behind]})
    assert places_back(late, 0, FIRST) == 0


def test_what_a_node_sees_itself_counts_before_it_has_said_so() -> None:
    whole = split((FIRST, SECOND, THIRD))
    assert there(whole) == {node: f"http://{node}" for node in (FIRST, SECOND, THIRD)}
    seen = seen_from(whole, FIRST, [SECOND, THIRD])
    assert apart(seen) == {FIRST}
    assert apart(seen_from(seen, FIRST, [])) == set()


# ── what may be deleted ────────────────────────────────────────────────────────────────────────


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


def test_one_replica_that_is_behind_holds_nothing_back_where_there_are_two_others() -> None:
    def kept(one: ReplicaState) -> int:
        return one.checkpoint_offset

    behind = replica("n3", kept=1, lag=10**6, lag_ms=10**7)
    assert kept_by_two(news(replica("n1", kept=30), replica("n2", kept=25), behind), 0, kept) == 25
    assert kept_by_two(news(replica("n1", kept=30), behind), 0, kept) == 1, "R6: two have it"


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
    assert found.unseen == {}
    assert (found.drained, found.forgotten, found.nodes) == (["n2"], ["n3"], ["n1", "n2"])
    line = msgspec.json.encode(found)
    assert msgspec.json.decode(line, type=News) == found


def stopped(node: str, epoch: int, *, ago_ms: int = 0) -> ReplicaState:
    one = replica(node, ago_ms=ago_ms)
    note = msgspec.structs.replace(one.note, stopped_epoch=epoch, stopped_seq=70)
    return msgspec.structs.replace(one, note=note)


def test_while_another_replica_has_more_than_the_log_nobody_goes_on_without_it() -> None:
    here = news(replica("n1"), stopped("n2", 4))
    assert waits_for_people(here, 0, "n1", 4)
    assert waits_for_people(here, 0, "n1", 0), "a node that has read nothing yet"
    assert not waits_for_people(here, 0, "n1", 5), "the log goes on behind a replica"
    assert not waits_for_people(here, 0, "n2", 4), "its own"
    assert not waits_for_people(here, 1, "n1", 4), "another shard"
    assert not waits_for_people(news(stopped("n2", 4, ago_ms=SEEN_MS + 1)), 0, "n1", 4)
    assert not waits_for_people(news(replica("n2")), 0, "n1", 0)


def test_a_replica_that_waits_for_people_is_in_step_with_nobody() -> None:
    assert replica("n2").is_in_step(NOW_MS)
    assert not stopped("n2", 4).is_in_step(NOW_MS)


def test_the_news_say_what_each_node_has_said_last_of_whom_it_sees() -> None:
    def says(node: str, ago_ms: int, *unseen: str) -> ReplicaState:
        note = ReplicaNote(NOW_MS - ago_ms, "http://n:1", 0, 0, unseen=list(unseen))
        assert msgspec.json.decode(note.pack(), type=ReplicaNote) == note
        return ReplicaState(node, 0, note, 0)

    replicas = {0: [says("n1", 2000, "n2"), says("n2", 0)], 1: [says("n1", 1000, "n2", "n3")]}
    found = news_of(ClusterMeta("c.meta/0"), replicas, NOW_MS)
    assert found.unseen == {"n1": ["n2", "n3"]}
