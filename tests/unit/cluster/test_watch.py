"""What nodes see of their cluster: who is in step, who is to own what, what may be deleted."""

from __future__ import annotations

import msgspec
import pytest

from delayserver.cluster.placement import Placement, in_order
from delayserver.cluster.watch import (
    HEARD_MS,
    IN_STEP_MS,
    IN_STEP_RECORDS,
    LEAVE_MS,
    SEEN_MS,
    Deletable,
    Heard,
    News,
    Parting,
    ReplicaNote,
    ReplicaState,
    Stage,
    apart,
    choose,
    kept_by_two,
    news_of,
    places_back,
    seen_from,
    there,
    unpack_note,
    waits_for_people,
)
from delayserver.shards.map import Machines
from delayserver.wire.operations import NodeDocument
from storage.replicated.meta import ClusterMeta, MoveRecord

NOW_MS = 1_800_000_000_000


def replica(
    node: str,
    *,
    ago_ms: int = 0,
    lag: int = 0,
    lag_ms: int = 0,
    kept: int = 100,
    stage: Stage = "replica",
) -> ReplicaState:
    at_ms, url = NOW_MS - ago_ms, f"http://{node}:8080"
    note = ReplicaNote(at_ms, url, 1000, kept // 10, lag_ms=lag_ms, stage=stage)
    return ReplicaState(node, kept, note, lag)


def news(*replicas: ReplicaState, **more: object) -> News:
    return msgspec.structs.replace(
        News(
            at_ms=NOW_MS,
            replicas={0: list(replicas)},
            nodes=["n1", "n2", "n3"],
            placement=Placement(zones=dict.fromkeys(("n1", "n2", "n3"), "")),
        ),
        **more,
    )


FIRST, SECOND, THIRD = in_order(0, ["n1", "n2", "n3"])


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


TWO_OF_THREE = Placement(2, dict.fromkeys(("n1", "n2", "n3"), ""))


def test_one_that_is_copied_is_not_in_step_however_short_the_log_is() -> None:
    stages: dict[Stage, bool] = {
        "copying": False,
        "passing": False,
        "replica": True,
        "leaving": True,
    }
    for stage, is_in_step in stages.items():
        assert replica("n1", stage=stage).is_in_step(NOW_MS) == is_in_step


def test_who_is_to_have_no_replica_gives_the_shard_to_one_that_is() -> None:
    here = news(replica(SECOND), replica(THIRD, stage="leaving"), placement=TWO_OF_THREE)
    assert choose(here, 0, THIRD, 3, may_balance=False) == SECOND
    assert choose(here, 0, SECOND, 3, may_balance=True) is None
    alone = news(replica(THIRD, stage="leaving"), replica("n9"), placement=TWO_OF_THREE)
    assert choose(alone, 0, THIRD, 3, may_balance=False) is None
    # If nobody else is in step it is better than nothing: for an owner that is drained …
    drained = msgspec.structs.replace(here, drained=[SECOND])
    assert choose(drained, 0, SECOND, 3, may_balance=False) == THIRD
    # … and nobody moves a shard there, though somebody asked for it before the node lost its place.
    moved = msgspec.structs.replace(here, moves={0: MoveRecord(0, THIRD, 3)})
    assert choose(moved, 0, SECOND, 3, may_balance=True) is None
    assert choose(moved, 0, THIRD, 4, may_balance=True) == SECOND


def test_an_owner_that_is_forgotten_and_runs_gives_its_shard_away() -> None:
    placement = Placement(2, {SECOND: "", THIRD: ""})
    here = news(replica(SECOND), replica(THIRD), placement=placement, forgotten=[FIRST])
    assert choose(here, 0, FIRST, 3, may_balance=True) == SECOND


def judged(news: News, *times_ms: int) -> list[Stage]:
    """What becomes of the replica of THIRD, which asks at these times."""
    parting = Parting(0, THIRD)
    return [parting.judge(news.placement, news, present_ms) for present_ms in times_ms]


def test_a_replica_goes_when_all_that_are_placed_are_in_step_and_it_has_said_so() -> None:
    here = news(replica(FIRST), replica(SECOND), replica(THIRD), placement=TWO_OF_THREE)
    found = judged(here, 5, 5 + LEAVE_MS - 1, 5 + LEAVE_MS)
    assert found == ["leaving", "leaving", "passing"]


@pytest.mark.parametrize(
    "second",
    [
        None,
        replica(SECOND, lag=IN_STEP_RECORDS + 1),
        replica(SECOND, ago_ms=IN_STEP_MS + 1),
        replica(SECOND, stage="copying"),
        replica(SECOND, stage="leaving"),
    ],
)
def test_a_replica_stays_while_another_is_not_in_step(second: ReplicaState | None) -> None:
    others = [replica(FIRST)] if second is None else [replica(FIRST), second]
    here = news(*others, replica(THIRD), placement=TWO_OF_THREE)
    assert judged(here, 0, 10 * LEAVE_MS) == ["leaving"] * 2


def test_a_replica_stays_while_nothing_new_is_heard() -> None:
    old = news(replica(FIRST), replica(SECOND), placement=TWO_OF_THREE)
    assert judged(old, NOW_MS - LEAVE_MS, NOW_MS + IN_STEP_MS)[1] == "passing"
    assert judged(old, NOW_MS - LEAVE_MS, NOW_MS + IN_STEP_MS + 1)[1] == "leaving"


def test_a_replica_that_is_placed_again_has_to_say_anew_that_it_leaves() -> None:
    here = news(replica(FIRST), replica(SECOND), placement=TWO_OF_THREE)
    parting = Parting(0, THIRD)
    asked = [(here, 0), (news(), LEAVE_MS), (here, LEAVE_MS + 1), (here, 2 * LEAVE_MS + 1)]
    found = [parting.judge(one.placement, one, present_ms) for one, present_ms in asked]
    assert found == ["leaving", "replica", "leaving", "passing"]


def test_with_as_many_replicas_as_nodes_nobody_leaves() -> None:
    for replicas in (3, 4, 1000):
        everywhere = Placement(replicas, TWO_OF_THREE.zones)
        assert all(Parting(0, node).is_placed(everywhere) for node in (FIRST, SECOND, THIRD))
    # Nor does one that is forgotten and runs, where there are not enough others.
    assert Parting(0, "n9").is_placed(Placement(4, TWO_OF_THREE.zones))
    assert not Parting(0, "n9").is_placed(TWO_OF_THREE)


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

    assert kept_by_two(news(), 0, NOW_MS, kept) is None
    assert kept_by_two(news(replica("n1", kept=9)), 0, NOW_MS, kept) is None
    three = [replica("n1", kept=30), replica("n2", kept=10), replica("n3", kept=20)]
    assert kept_by_two(news(*three), 0, NOW_MS, kept) == 20
    lost = [*three[:2], replica("n3", kept=20, ago_ms=SEEN_MS + 1)]
    assert kept_by_two(news(*lost), 0, NOW_MS, kept) == 10
    assert kept_by_two(news(*three), 1, NOW_MS, kept) is None


def test_one_replica_that_is_behind_holds_nothing_back_where_there_are_two_others() -> None:
    def kept(one: ReplicaState) -> int:
        return one.checkpoint_offset

    behind = replica("n3", kept=1, lag=10**6, lag_ms=10**7)
    assert (
        kept_by_two(news(replica("n1", kept=30), replica("n2", kept=25), behind), 0, NOW_MS, kept)
        == 25
    )
    assert kept_by_two(news(replica("n1", kept=30), behind), 0, NOW_MS, kept) == 1, (
        "R6: two have it"
    )


def test_by_old_news_or_a_replica_that_goes_nothing_is_deleted() -> None:
    def kept(one: ReplicaState) -> int:
        return one.checkpoint_offset

    two = news(replica("n1", kept=30), replica("n2", kept=20))
    assert kept_by_two(two, 0, NOW_MS + IN_STEP_MS, kept) == 20
    assert kept_by_two(two, 0, NOW_MS + IN_STEP_MS + 1, kept) is None
    for stage in ("leaving", "copying"):
        other = replica("n2", kept=20, stage=stage)
        assert kept_by_two(news(replica("n1", kept=30), other), 0, NOW_MS, kept) is None


def test_it_is_deleted_when_it_was_there_for_long_enough() -> None:
    log = Deletable(1_000)
    asked = [(5, 0), (9, 999), (14, 1_000), (20, 1_500), (30, 2_000), (40, 9_000)]
    assert [log.before(*one) for one in asked] == [None, None, 5, 5, 14, 30]


def test_nothing_is_deleted_while_two_replicas_do_not_have_it() -> None:
    """One is lost: what two had for an hour is in one place now. It comes back empty."""
    log = Deletable(1_000)
    assert log.before(50, 0) is None
    assert log.before(None, 2_000) is None
    assert log.before(10, 3_000) == 10
    assert log.before(60, 4_000) == 50


# ── what is heard ──────────────────────────────────────────────────────────────────────────────


def heard(*looks: tuple[int, str]) -> list[int]:
    """When the note of a node counts as heard, at each look; each with the clock that it names."""
    ears, whose = Heard(), ("n1", 0)
    found = []
    for now_ms, clock in looks:
        text = ReplicaNote(int(clock), "http://n1", 0, 0).pack()
        found.append(ears.take({whose: text}, now_ms)[whose].at_ms)
    return found


def test_a_note_is_as_old_as_the_node_that_looks_has_known_it() -> None:
    first_ms = 1_000 - IN_STEP_MS - 1
    assert heard((1_000, "7"), (4_000, "8"), (7_000, "8"), (10_000, "9")) == [
        first_ms,
        4_000,
        4_000,
        10_000,
    ]


def test_a_clock_that_was_set_back_changes_nothing() -> None:
    assert heard((0, "5000000"), (3_000, "5003000"), (6_000, "1000"))[1:] == [3_000, 6_000]


def test_a_node_that_has_not_looked_for_long_does_not_know_how_old_a_note_is() -> None:
    assert heard((0, "1"), (HEARD_MS, "2"), (2 * HEARD_MS + 1, "3"))[1:] == [HEARD_MS, HEARD_MS]


def test_what_somebody_else_has_said_is_no_note() -> None:
    assert Heard().take({("n1", 0): ""}, 5) == {}


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
    found = news_of(meta, replicas, NOW_MS, NOW_MS)
    assert [(one.node, one.state) for one in found.machines.nodes] == [
        ("n1", "serving"),
        ("n2", "away"),
    ]
    assert found.machines.nodes[0].last_seen_at == "2027-01-15T07:59:59.000Z"
    assert [one.lag_records for one in found.machines.replicas[0]] == [3, 0]
    assert found.placement == Placement(zones={"n1": "", "n2": ""})
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


def test_a_process_that_passes_on_makes_its_node_one_that_is_there_and_is_no_replica() -> None:
    meta = ClusterMeta("c.meta/0")
    meta.apply(0, b'{"node": "n1"}')
    found = news_of(meta, {0: [replica("n1", stage="passing")]}, NOW_MS, NOW_MS)
    assert [one.node for one in found.machines.nodes] == ["n1"]
    assert (found.replicas, found.machines.replicas) == ({0: []}, {0: []})


def test_the_news_say_who_owns_a_shard_by_its_latest_owner() -> None:
    meta = ClusterMeta("c.meta/0")
    told = [
        ReplicaState("n", 0, ReplicaNote(NOW_MS, "http://n", 0, 0, epoch=epoch, address=address), 0)
        for epoch, address in ((3, "former"), (7, "owner"), (0, ""))
    ]
    assert news_of(meta, {0: told, 1: told[2:]}, NOW_MS, NOW_MS).owners == {0: (7, "owner")}


def test_a_note_goes_through_text_and_what_others_have_said_is_none() -> None:
    note = replica("n1", stage="leaving").note
    assert unpack_note(note.pack()) == note
    assert unpack_note("") is None
    assert unpack_note("{}") is None


def test_the_news_say_what_each_node_has_said_last_of_whom_it_sees() -> None:
    def says(node: str, ago_ms: int, *unseen: str) -> ReplicaState:
        note = ReplicaNote(NOW_MS - ago_ms, "http://n:1", 0, 0, unseen=list(unseen))
        assert msgspec.json.decode(note.pack(), type=ReplicaNote) == note
        return ReplicaState(node, 0, note, 0)

    replicas = {0: [says("n1", 2000, "n2"), says("n2", 0)], 1: [says("n1", 1000, "n2", "n3")]}
    found = news_of(ClusterMeta("c.meta/0"), replicas, NOW_MS, NOW_MS)
    assert found.unseen == {"n1": ["n2", "n3"]}
