"""Placement of replicas, whatever the nodes, their zones, and how many replicas there are to be."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from delayserver.cluster.placement import Placement, in_order

NAMES = st.text("abcn1234.-_", min_size=1, max_size=8)
ZONES = st.sampled_from(["", "x", "y", "z", "w"])
CLUSTERS = st.dictionaries(NAMES, ZONES, min_size=1, max_size=12)
REPLICAS = st.integers(2, 6)
SHARDS = st.integers(0, 255)


def zone_of(node: str, zones: dict[str, str]) -> str:
    return zones[node] or f"{node} alone"


@given(CLUSTERS, REPLICAS, SHARDS)
def test_a_shard_is_on_different_nodes_of_different_zones(
    zones: dict[str, str], replicas: int, shard: int
) -> None:
    nodes = Placement(replicas, zones).nodes(shard)
    assert len(nodes) == len(set(nodes)) == min(replicas, len(zones))
    assert nodes == in_order(shard, nodes), "and in this order they are to own it"
    assert nodes[0] == in_order(shard, zones)[0]
    # No zone has two more than another one that could have one more.
    used = Counter(zone_of(node, zones) for node in nodes)
    there = Counter(zone_of(node, zones) for node in zones)
    least = min((used[zone] for zone in there if used[zone] < there[zone]), default=replicas)
    assert max(used.values()) <= least + 1


@given(CLUSTERS, REPLICAS, SHARDS, NAMES, ZONES)
def test_a_node_that_comes_or_goes_moves_at_most_its_own_replica(
    zones: dict[str, str], replicas: int, shard: int, name: str, zone: str
) -> None:
    before = Placement(replicas, {one: zones[one] for one in zones if one != name}).nodes(shard)
    after = Placement(replicas, {**zones, name: zone}).nodes(shard)
    came, went = set(after) - set(before), set(before) - set(after)
    assert came <= {name}
    assert len(went) <= len(came)
    stayed = [node for node in before if node in after]
    assert stayed == [node for node in after if node != name], "in the same order"


@given(CLUSTERS, REPLICAS, SHARDS, st.data())
def test_a_node_that_is_put_elsewhere_moves_at_most_two(
    zones: dict[str, str], replicas: int, shard: int, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(sorted(zones)))
    before = set(Placement(replicas, zones).nodes(shard))
    after = set(Placement(replicas, {**zones, name: data.draw(ZONES)}).nodes(shard))
    assert len(before - after - {name}) <= 1
    assert len(after - before - {name}) <= 1
