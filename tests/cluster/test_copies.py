"""A replica is made anew from another one: that of a new node, and of one whose disk has erred."""

from __future__ import annotations

import itertools
import math
import re
import time
import urllib.error
from http import HTTPStatus
from pathlib import Path

import pytest

from delayserver.recovery.check import check_path
from storage.replicated.kafka_settings import ClusterUrl
from storage.replicated.lease import OWNER_MS
from tests.cluster.brokers import Brokers
from tests.cluster.nodes import NodeProcess, running, until

CATALOG_MAX_BYTES = 1 << 34
MADE_ANEW = "the replica was made anew"


def says(node: NodeProcess, what: str) -> bool:
    return what in node.log_path.read_text()


def publish(node: NodeProcess, count: int) -> list[str]:
    """Messages that are due in hours, days and months."""
    delays = itertools.cycle(("2h", "5h", "4d", "60d"))
    return [
        node.publish(f"{node.name}-{number}-{time.time()}", delay=next(delays))
        for number in range(count)
    ]


def delete_all(brokers: Brokers, url: ClusterUrl) -> int:
    """Delete what all have behind a checkpoint; where the log begins then."""
    engine = brokers.engine(url)
    places: list[int] = []

    def are_known() -> bool:
        places[:] = [one[0] for one in engine.progress(("n1", "n2")).values() if 0 in one]
        return len(places) == 2 and min(places) > 30

    until(are_known, "two replicas say how far they are")
    log = engine.log(0)
    log.delete_before(min(places))

    def is_gone() -> bool:
        try:
            log.read(0, 0.1)
        except Exception as error:
            return "the log begins at" in str(error)
        return False

    until(is_gone, "the log begins later")
    return min(places)


def figure(node: NodeProcess, name: str) -> float:
    """A metric of the one shard; NaN where the node does not know it."""
    pattern = rf'^delayserver_{name}(?:{{shard="0"}})? (\S+)$'
    found = re.search(pattern, node.text("/metrics"), re.M)
    return float(found[1]) if found else math.nan


def until_filed(standby: NodeProcess) -> None:
    """A standby has behind a checkpoint all that was published before this call."""
    asked_s = time.monotonic()

    def is_filed() -> bool:
        now_s = time.monotonic()
        return now_s - figure(standby, "standby_lag_seconds") > asked_s

    until(is_filed, f"{standby.name} has filed all")


def until_known(brokers: Brokers, url: ClusterUrl, owner: NodeProcess) -> None:
    """The owner has heard that the other node has read most of the log: one whose replica is still
    being opened is all of it behind."""
    end = brokers.engine(url).log(0).end()
    assert end is not None

    def is_known() -> bool:
        (shard,) = owner.call("GET", "/v1/cluster")["shards"]
        others = [one for one in shard["replicas"] if one["node"] != owner.name]
        return any(one["lag_records"] < end / 2 for one in others)

    until(is_known, f"{owner.name} knows of another replica")


def standby_of(*nodes: NodeProcess) -> NodeProcess:
    return next(node for node in nodes if node.name != nodes[0].owners()[0])


def test_a_node_comes_when_the_beginning_of_the_log_is_gone(
    brokers: Brokers, url: ClusterUrl, tmp_path: Path
) -> None:
    first, second, third = (NodeProcess(f"n{number}", url, tmp_path) for number in (1, 2, 3))
    with running(first, second):
        ids = publish(first, 40)
        delete_all(brokers, url)
        with running(third):
            until(lambda: says(third, MADE_ANEW), "it has a copy")
            until(lambda: third.call_once("GET", "/readyz"), "it is in step")
            assert third.call("GET", f"/v1/messages/{ids[0]}")["state"] == "scheduled"
            ids += publish(third, 5)
            until_filed(third)
            for node in (first, second):
                node.kill()
            until(lambda: third.owners() == ["n3"], "it takes over")
            states = [third.call("GET", f"/v1/messages/{one}")["state"] for one in ids]
            assert set(states) == {"scheduled"}
            assert third.stop() == 0
    report = check_path(third.data_dir, catalog_max_bytes=CATALOG_MAX_BYTES)
    assert report.is_clean, report.damage


def test_what_a_disk_has_damaged_another_replica_has(
    brokers: Brokers, url: ClusterUrl, tmp_path: Path
) -> None:
    first, second = (NodeProcess(f"n{number}", url, tmp_path) for number in (1, 2))
    with running(first, second):
        ids = publish(first, 40)
        standby = standby_of(first, second)
        until(lambda: list((standby.data_dir / "schedule").glob("*")), "it is filed")
        until_filed(standby)
        # ── at a replica on standby: it reads its files, and finds it ──
        path = max((standby.data_dir / "schedule").glob("*"))
        _damage(path)
        until(lambda: says(standby, MADE_ANEW), "it is made anew")
        until(lambda: standby.call_once("GET", "/readyz"), "it is in step")
        assert says(standby, "is damaged at offset")
        # ── its catalog, while it is away ──
        standby.kill()
        catalog = standby.data_dir / "catalog" / "data.mdb"
        for page in range(2, catalog.stat().st_size // 4096):
            _damage(catalog, at=4096 * page)  # what it says of itself
        standby.log_path.unlink()
        standby.start()
        until(lambda: says(standby, MADE_ANEW), "it is made anew")
        until(lambda: standby.call_once("GET", "/readyz"), "it is in step")
        # ── and it is as good as the other ──
        owner = first if standby is second else second
        ids += publish(owner, 1)
        until_filed(standby)
        owner.kill()
        # It waits OWNER_MS for an owner that it has not heard itself since its start.
        until(lambda: standby.owners() == [standby.name], "it takes over", 2 * OWNER_MS / 1000)
        states = [standby.call("GET", f"/v1/messages/{one}")["state"] for one in ids]
        assert set(states) == {"scheduled"}
        assert standby.stop() == 0
    report = check_path(standby.data_dir, catalog_max_bytes=CATALOG_MAX_BYTES)
    assert report.is_clean, report.damage


def test_an_owner_gives_away_what_its_disk_has_damaged(
    brokers: Brokers, url: ClusterUrl, tmp_path: Path
) -> None:
    nodes = [NodeProcess(f"n{number}", url, tmp_path) for number in (1, 2)]
    with running(*nodes):
        nodes[0].call(
            "PUT",
            "/v1/subscriptions/late",
            {"subject": "order.late", "type": "pull", "lease": "1h"},
        )
        standby = standby_of(*nodes)
        (owner,) = [node for node in nodes if node is not standby]
        until(lambda: standby.call_once("GET", "/readyz"), "it is in step")
        ids = {standby.publish(f"{number}", delay="20s") for number in range(10)}
        until_filed(standby)
        until(lambda: figure(owner, "replay_lag_records") == 0, "the owner has filed all")
        until_known(brokers, url, owner)
        (path,) = (owner.data_dir / "schedule").glob("*T*")
        _damage(path, at=path.stat().st_size - 12)
        got: set[str] = set()

        def have_come() -> bool:
            pull = {"max": 100, "wait": "500ms"}
            for node in nodes:
                found = node.call("POST", "/v1/subscriptions/late/pull", pull)["messages"]
                got.update(message["id"] for message in found)
            return got == ids

        until(have_come, "all of them, the damaged one too")
        until(lambda: nodes[0].owners() == [standby.name], "the sound replica has the office")
        until(lambda: says(owner, MADE_ANEW), "the other one is made anew")
        until(lambda: owner.call_once("GET", "/readyz"), "it is in step")


def test_nobody_else_gets_a_copy(brokers: Brokers, url: ClusterUrl, tmp_path: Path) -> None:
    node = NodeProcess("n1", url, tmp_path)
    with running(node):
        # While it takes over, another process comes to listen there.
        until(lambda: "/v1/messages" in node.text("/openapi.json"), "the owner serves")
        for path in ("/internal/shards/0/snapshot", "/internal/shards/0/snapshot/1/FORMAT"):
            with pytest.raises(urllib.error.HTTPError) as refused:
                node.call_once("GET", path)
            assert refused.value.code == HTTPStatus.NOT_FOUND
            refused.value.close()
        assert "internal" not in node.text("/openapi.json")


def _damage(path: Path, at: int = 70) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))
