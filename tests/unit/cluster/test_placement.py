"""Which nodes have a replica of a shard: spread over zones, and moved no more than they have to."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from delayserver.cluster.placement import Placement, in_order
from storage.replicated.meta import ClusterMeta


def test_each_node_goes_first_for_some_shards_and_none_moves_but_those_of_a_lost_one() -> None:
    nodes = ["n1", "n2", "n3"]
    orders = [in_order(shard, nodes) for shard in range(300)]
    firsts = [order[0] for order in orders]
    assert min(firsts.count(node) for node in nodes) > 80
    without = [in_order(shard, ["n1", "n3"]) for shard in range(300)]
    assert without == [[node for node in order if node != "n2"] for order in orders]
    for some in itertools.permutations(nodes):
        assert in_order(7, some) == in_order(7, nodes)


@pytest.mark.parametrize("replicas", [3, 4, 100])
def test_with_as_many_replicas_as_nodes_zones_do_not_matter(replicas: int) -> None:
    zones = {"n1": "a", "n2": "", "n3": "a"}
    for shard in range(20):
        assert Placement(replicas, zones).nodes(shard) == in_order(shard, zones)


def test_a_node_without_a_zone_has_one_of_its_own() -> None:
    one_zone = Placement(2, {"n1": "a", "n2": "a", "n3": ""})
    assert all("n3" in one_zone.nodes(shard) for shard in range(50))
    none = Placement(2, dict.fromkeys(("n1", "n2", "n3"), ""))
    assert {node for shard in range(50) for node in none.nodes(shard)} == {"n1", "n2", "n3"}
    assert any("n3" not in none.nodes(shard) for shard in range(50))
    # A zone that is called as a node is another one.
    called = Placement(2, {"n1": "", "n2": "n1", "n3": "n1"})
    assert all("n1" in called.nodes(shard) for shard in range(50))


def test_who_has_none_goes_behind_all_that_have_one() -> None:
    placement = Placement(2, dict.fromkeys(("n1", "n2", "n3"), ""))
    first, second = placement.nodes(0)
    (third,) = {"n1", "n2", "n3"} - {first, second}
    assert placement.order(0, ["n9"])[:2] == [first, second]
    assert set(placement.order(0, ["n9"])[2:]) == {third, "n9"}
    ranks = [placement.rank(0, node) for node in (first, second, third, "n9")]
    assert ranks == [0, 1, 2, 2]


def test_nobody_is_placed_where_nobody_is() -> None:
    assert Placement(2).nodes(0) == []
    assert Placement(2).rank(0, "n1") == 0


def test_it_is_made_of_all_nodes_that_are_not_forgotten() -> None:
    meta = ClusterMeta("c.meta/0")
    for offset, record in enumerate(
        (
            b'{"node": "n1", "zone": "a"}',
            b'{"node": "n2"}',
            b'{"node": "n3"}',
            b'{"forget": "n3"}',
            b'{"drain": "n2"}',
        )
    ):
        meta.apply(offset, record)
    assert Placement.of(meta).zones == {"n1": "a", "n2": ""}


def test_shards_are_spread_over_nodes() -> None:
    for count in (3, 5, 8, 12):
        placement = Placement(2, {f"node-{number}": "" for number in range(count)})
        found = Counter(node for shard in range(1000) for node in placement.nodes(shard))
        firsts = Counter(placement.nodes(shard)[0] for shard in range(1000))
        for counted, mean in ((found, 2000 / count), (firsts, 1000 / count)):
            assert 0.6 * mean < min(counted.values()) <= max(counted.values()) < 1.4 * mean
