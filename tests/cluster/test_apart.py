"""A node that the other nodes cannot reach gives its shard away, though brokers hear it well."""

from __future__ import annotations

import time
import urllib.error
from http import HTTPStatus
from pathlib import Path

import pytest

from delayserver.cli.demo.process import free_port
from delayserver.cluster.sight import LOST_ROUNDS
from storage.replicated.kafka_settings import ClusterUrl
from tests.cluster.brokers import Brokers
from tests.cluster.doors import doors
from tests.cluster.nodes import NodeProcess, running, until
from tests.observe.rules import fires


def unseen(node: NodeProcess) -> float:
    """How many nodes it says that it does not see."""
    (line,) = [
        line
        for line in node.text("/metrics").splitlines()
        if line.startswith("delayserver_unseen_nodes")
    ]
    return float(line.rpartition(" ")[2])


def test_an_owner_that_is_cut_off_from_other_nodes(
    brokers: Brokers, url: ClusterUrl, tmp_path: Path
) -> None:
    nodes, places = [], []
    for number in range(1, 4):
        host, link_port = f"127.0.0.{number + 1}", free_port()
        node = NodeProcess(f"n{number}", url, tmp_path, host=host)
        node.options += ["--link-port", str(link_port)]
        nodes.append(node)
        places.append((host, node.port, link_port))
    with doors(*places) as made, running(*nodes):
        kept = [node.publish(f"{node.name}-{number}") for node in nodes for number in range(5)]
        for node in nodes:
            until(lambda node=node: node.call_once("GET", "/readyz"), "it is in step")
            until(lambda node=node: len(node.call("GET", "/v1/cluster")["nodes"]) == 3, "all known")
        (owner,) = [node for node in nodes if node.name == nodes[0].owners()[0]]
        door = made[nodes.index(owner)]
        others = [node for node in nodes if node is not owner]

        # ── it is the owner still, and hears its own clients; others cannot pass calls on ──
        door.shut()
        began_s = time.monotonic()
        owner.publish("by its own clients")
        with pytest.raises(urllib.error.HTTPError) as refused:
            others[0].call_once("GET", f"/v1/messages/{kept[0]}")
        assert refused.value.code == HTTPStatus.SERVICE_UNAVAILABLE
        refused.value.close()

        # ── the others say so, and it gives the shard to one of them ──
        until(lambda: others[0].owners()[0] in {node.name for node in others}, "another owner")
        took_s = time.monotonic() - began_s
        print(f"another owner after {took_s:.1f} s")
        assert took_s >= LOST_ROUNDS - 1, "not at the first connection that fails"
        for node in others:
            assert [node.call("GET", f"/v1/messages/{one}")["id"] for one in kept] == kept
            until(lambda node=node: unseen(node) == 1, "it does not see that one")
            assert fires(tmp_path, "DelayserverNodesUnseen", node.text("/metrics")) == ""
        assert "gives its shard away" in owner.log_path.read_text()
        assert "other nodes that cannot be reached" in others[0].log_path.read_text()
        # It passes on what its clients want, and has followed.
        assert owner.call("GET", f"/v1/messages/{kept[0]}")["id"] == kept[0]

        # ── the way is open again ──
        door.open()
        for node in others:
            until(lambda node=node: unseen(node) == 0, "it sees that one again")
        assert "status=" not in owner.log_path.read_text(), "all in order"
