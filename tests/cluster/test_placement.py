"""Fewer replicas than nodes, on real brokers: calls at nodes without one, replicas that move."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest

from delayserver.cluster.placement import Placement
from delayserver.recovery.shards import check_shards
from storage.directory import FORMAT_FILE
from storage.replicated.kafka_settings import ClusterUrl
from storage.replicated.meta import MetaLog
from storage.shards import shard_directory
from tests.cluster.brokers import Brokers
from tests.cluster.nodes import NodeProcess, delayserver, new_cluster, running, until

SHARDS = 2
REPLICAS = 2
ZONES = {"n1": "a", "n2": "b", "n3": "c"}


@pytest.fixture
def url(brokers: Brokers) -> ClusterUrl:
    made = new_cluster(brokers, SHARDS, "--replicas", str(REPLICAS))
    # All are known before the first one starts, so nobody begins with what it has to give away.
    with contextlib.closing(brokers.engine(made).meta()) as meta:
        for name, zone in ZONES.items():
            MetaLog(meta).register(name, zone)
    return made


def placed(zones: dict[str, str]) -> list[set[str]]:
    """Which nodes are to have each shard."""
    placement = Placement(REPLICAS, zones)
    return [set(placement.nodes(shard)) for shard in range(SHARDS)]


def on_disk(*nodes: NodeProcess) -> list[set[str]]:
    """Which nodes have files of each shard."""
    return [
        {
            node.name
            for node in nodes
            if (node.data_dir / shard_directory(shard) / FORMAT_FILE).exists()
        }
        for shard in range(SHARDS)
    ]


def in_the_map(node: NodeProcess) -> list[set[str]]:
    """Which nodes have a replica of each shard, as a node sees it."""
    shards = node.call("GET", "/v1/cluster")["shards"]
    return [{one["node"] for one in shard["replicas"]} for shard in shards]


def states(node: NodeProcess, ids: list[str]) -> set[str]:
    return {node.call("GET", f"/v1/messages/{one}")["state"] for one in ids}


def test_replicas_follow_the_nodes_that_there_are(
    brokers: Brokers, url: ClusterUrl, tmp_path: Path
) -> None:
    """One life of a cluster: its parts start slowly, so it is one test."""
    nodes = [NodeProcess(name, url, tmp_path, zone=zone) for name, zone in ZONES.items()]
    with running(*nodes):
        # ── a node without a replica answers all calls, and keeps nothing ──
        ids = [node.publish(f"{number}-{node.name}") for number in range(10) for node in nodes]
        for node in nodes:
            assert states(node, ids) == {"scheduled"}
        until(lambda: on_disk(*nodes) == placed(ZONES), "who is to have files has some")
        until(lambda: in_the_map(nodes[0]) == placed(ZONES), "who has what is in the map")
        for node in nodes:
            says = node.log_path.read_text().count("has no replica, and passes calls on")
            assert says == sum(node.name not in names for names in placed(ZONES))

        # ── an owner is killed: who has no replica follows the next one ──
        lost = next(node for node in nodes if node.name == nodes[0].owners()[0])
        first, second = (node for node in nodes if node is not lost)
        lost.kill()
        for node in (first, second):
            took_s = until(
                lambda node=node: lost.name not in node.owners(), "others own its shards"
            )
            assert node.publish(f"after {time.time()}-{node.name}")
            print(f"others own its shards after {took_s:.2f} s")
        assert states(first, ids) == states(second, ids) == {"scheduled"}

        # ── it is forgotten, and one comes that stands where another does ──
        delayserver("cluster", "forget", lost.name, "--cluster", str(url))
        fourth = NodeProcess("n4", url, tmp_path, zone=ZONES[first.name])
        with running(fourth):
            zones = {
                first.name: ZONES[first.name],
                second.name: ZONES[second.name],
                "n4": ZONES[first.name],
            }
            wanted = placed(zones)
            assert all(second.name in names for names in wanted), "it gets what the lost one had"
            began_s = time.monotonic()
            until(lambda: on_disk(first, second, fourth) == wanted, "all have what they are to")
            print(f"all have what they are to after {time.monotonic() - began_s:.2f} s")
            for node in (first, second, fourth):
                assert states(node, ids) == {"scheduled"}
            until(lambda: in_the_map(second) == wanted, "all say so")
            # ── and what was copied is as good ──
            second.kill()
            until(lambda: second.name not in fourth.owners(), "the others own its shards")
            for node in (first, fourth):
                assert states(node, ids) == {"scheduled"}
            assert fourth.stop() == 0
            found = check_shards(fourth.data_dir, SHARDS, catalog_max_bytes=1 << 34)
            assert {shard for shard, names in enumerate(wanted) if "n4" in names} == {
                *found.reports
            }
            assert all(report.is_clean for report in found.reports.values())
            assert not found.errors
