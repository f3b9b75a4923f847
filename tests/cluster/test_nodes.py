"""Nodes on real brokers: what one owner has answered the next one has, whoever ended it and how."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from delayserver.serve.reporting import EXIT_FENCED
from storage.replicated.kafka_settings import ClusterUrl
from tests.cluster.brokers import Brokers
from tests.cluster.nodes import NodeProcess, delayserver, new_cluster, running, until
from tests.every_option import GROUPS, MEMBERS, EveryOption
from tests.integration.api_support import Receiver

SHARDS = 2


@pytest.fixture
def url(brokers: Brokers) -> ClusterUrl:
    return new_cluster(brokers, SHARDS)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


def test_owners_come_and_go(
    brokers: Brokers, url: ClusterUrl, tmp_path: Path, receiver: Receiver
) -> None:
    """One life of a cluster: its parts start slowly, so it is one test."""
    nodes = [NodeProcess(f"n{number}", url, tmp_path) for number in (1, 2, 3)]
    with running(*nodes):
        # ── any node takes any call ──
        nodes[0].call(
            "PUT",
            "/v1/subscriptions/late",
            {"subject": "order.late", "type": "pull", "lease": "1h"},
        )
        ids = [node.publish(f"{number}", delay="1s") for number in range(20) for node in nodes[:1]]
        kept = [node.publish(f"kept-{n}-{node.name}") for n in range(10) for node in nodes]
        for node in nodes:
            assert [node.call("GET", f"/v1/messages/{one}")["id"] for one in kept] == kept
        got = Counter[str]()
        for _ in range(100):
            for node in nodes:
                pulled = node.call(
                    "POST", "/v1/subscriptions/late/pull", {"max": 100, "wait": "500ms"}
                )["messages"]
                if pulled:
                    got.update(message["id"] for message in pulled)
                    leases = [message["lease"] for message in pulled]
                    node.call("POST", "/v1/subscriptions/late/ack", {"leases": leases})
            if len(got) == len(ids):
                break
        assert got == Counter(ids)
        cancelled = kept.pop()
        assert nodes[1].call("DELETE", f"/v1/messages/{cancelled}")["state"] == "cancelled"

        metrics = nodes[0].text("/metrics")
        assert "delayserver_office_epoch" in metrics or "delayserver_standby_lag_records" in metrics

        # ── an owner is killed, in the middle of messages with all options ──
        owner = next(node for node in nodes if node.name == nodes[0].owners()[0])
        others = [node for node in nodes if node is not owner]
        every = EveryOption(others[0].call, receiver)
        every.until_members(GROUPS * MEMBERS // 4)
        due = [others[0].publish(f"due {n}", delay="1ms") for n in range(20)]
        held = pull_all(others[0], due, 20)
        owner.kill()
        took_s = until(lambda: others[0].publish(f"after {time.time()}"), "an answer of the next")
        print(f"the next answer came after {took_s:.2f} s")
        until(lambda: owner.name not in others[1].owners(), "all shards have others")
        for node in others:
            states = [node.call("GET", f"/v1/messages/{one}")["state"] for one in kept]
            assert set(states) == {"scheduled"}
            assert node.call("GET", f"/v1/messages/{ids[0]}")["state"] == "delivered"
            assert node.call("GET", f"/v1/messages/{cancelled}")["state"] == "cancelled"
        every.check(others[0].call, kills=1)
        pull = {"max": 100, "wait": "1s"}
        # Those of the node that was killed come again, and may have been handled.
        answer = others[0].call("POST", "/v1/subscriptions/late/ack", {"leases": list(held)})
        again = pull_all(others[0], due, len(answer["expired"]))
        assert set(again.values()) == {2}
        others[0].call("POST", "/v1/subscriptions/late/ack", {"leases": list(again)})
        assert not others[0].call("POST", "/v1/subscriptions/late/pull", pull)["messages"]

        # ── it comes back, and another one hangs for longer than its lease ──
        owner.start()
        until(lambda: owner.owners() == others[0].owners(), "it knows who owns what")
        hanging = next(node for node in others if node.name in others[0].owners())
        (free,) = [node for node in others if node is not hanging]
        hanging.pause()
        until(lambda: hanging.name not in free.owners(), "others own its shards")
        until(lambda: free.publish(f"meanwhile {time.time()}"), "an answer meanwhile")
        before = len(hanging.children())
        hanging.resume()
        until(lambda: hanging.owners() == free.owners(), "it follows them")
        assert f"status={EXIT_FENCED}" in hanging.log_path.read_text()
        assert len(hanging.children()) == before

        # ── a node is drained while a consumer holds messages of it, stopped, and started again ──
        leaving = next(node for node in nodes if node.name in free.owners())
        staying = next(node for node in nodes if node is not leaving)
        ids = [staying.publish(f"held {n}", delay="1ms") for n in range(20)]
        held = pull_all(staying, ids, 20)
        delayserver("cluster", "drain", leaving.name, "--cluster", str(url))
        assert leaving.name not in staying.owners()
        assert not staying.call("POST", "/v1/subscriptions/late/pull", pull)["messages"]
        held_leases = {"leases": list(held)}
        answer = staying.call("POST", "/v1/subscriptions/late/ack", held_leases)
        assert answer == {"acked": 20, "expired": []}
        assert leaving.stop() == 0
        staying.publish("while it is away")
        leaving.start()
        until(lambda: leaving.owners() == staying.owners(), "it is back")
        status = json.loads(delayserver("cluster", "status", "--cluster", str(url), "--json"))
        assert {node["node"] for node in status["nodes"]} == {"n1", "n2", "n3"}

        # ── and a shard is moved back to it ──
        until(
            lambda: leaving.call("GET", "/v1/cluster")["nodes"][0]["state"] == "serving",
            "its replicas are known",
        )
        delayserver("cluster", "move", "0", leaving.name, "--cluster", str(url))
        assert staying.owners()[0] == leaving.name
        for node in nodes:
            assert [node.call("GET", f"/v1/messages/{one}")["id"] for one in kept] == kept


def pull_all(node: NodeProcess, ids: list[str], count: int) -> dict[str, int]:
    """Lease so many of these messages to a consumer; returns the attempts, by lease."""
    held: dict[str, int] = {}
    while len(held) < count:
        wanted = {"max": 100, "wait": "1s"}
        found = node.call("POST", "/v1/subscriptions/late/pull", wanted)["messages"]
        assert {message["id"] for message in found} <= set(ids)
        held |= {message["lease"]: message["attempt"] for message in found}
    return held


def test_a_node_whose_disk_is_lost_reads_the_log(
    brokers: Brokers, url: ClusterUrl, tmp_path: Path
) -> None:
    nodes = [NodeProcess(f"n{number}", url, tmp_path) for number in (1, 2)]
    with running(*nodes):
        kept = [nodes[0].publish(f"kept-{number}") for number in range(20)]
        for node in nodes:
            node.kill()
            # Both disks at once: only the brokers have it now.
            node.data_dir.rename(tmp_path / f"lost-{node.name}")
        for node in nodes:
            node.start()
        # Nobody has heard the last owner since it started, so it has a minute to come back; it is
        # back, and claims after the length of a lease.
        until(lambda: nodes[1].publish("afterwards"), "an owner")
        assert [nodes[1].call("GET", f"/v1/messages/{one}")["id"] for one in kept] == kept
