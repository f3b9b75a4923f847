"""A log that has lost its end, really: the broker comes back with older files of it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.replicated.kafka import KafkaEngine
from storage.replicated.kafka_settings import ClientSettings
from tests.cluster.brokers import Brokers
from tests.cluster.nodes import NodeProcess, delayserver, running, until

LOST = "the log has lost its end"


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Brokers]:
    with Brokers(tmp_path / "broker", count=1).running() as one:
        yield one


def publish(node: NodeProcess, what: str, count: int = 20) -> list[str]:
    return [node.publish(f"{what}-{number}") for number in range(count)]


def wait_until_filed(engine: KafkaEngine, owner: NodeProcess, *names: str) -> list[str]:
    """Until the checkpoints of these nodes stand behind all that is in the log now; the ids of what
    was published for that."""
    end = engine.log(0).end()
    assert end is not None
    # An owner's checkpoint stands behind a frame, and not behind beats.
    ids = publish(owner, f"behind {end}", 1)

    def are_filed() -> bool:
        places = engine.progress(names)
        return all(places[name].get(0, 0) >= end for name in names)

    until(are_filed, f"{names} have filed all")
    return ids


def says(node: NodeProcess, what: str) -> bool:
    return what in node.log_path.read_text()


def test_a_log_that_has_lost_its_end_goes_on_behind_a_replica(
    broker: Brokers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DELAYSERVER_CHECKPOINT_MS", "300")
    url = broker.new_url()
    where = ("--cluster", str(url))
    delayserver("cluster", "create", *where, "--shards", "1", "--replication", "1")
    engine = KafkaEngine(ClientSettings(url, {}))
    nodes = [NodeProcess(name, url, tmp_path) for name in ("n1", "n2")]
    partition = broker.home / "1" / "data" / f"{url.log_topic}-0"
    with running(*nodes):
        (owner,) = (node for node in nodes if [node.name] == nodes[0].owners())
        (other,) = (node for node in nodes if node is not owner)
        ids = publish(owner, "in the log")
        shutil.copytree(partition, tmp_path / "older")
        ids += publish(owner, "filed by both")
        ids += wait_until_filed(engine, owner, "n1", "n2")
        other.kill()
        ids += publish(owner, "filed by the owner")
        ids += wait_until_filed(engine, owner, owner.name)
        ids += publish(owner, "in its own log")

        # ── power is lost, and the broker had not written what it had ──
        owner.kill()
        broker.kill(1)
        shutil.rmtree(partition)
        shutil.copytree(tmp_path / "older", partition)
        broker.revive(1)
        for node in nodes:
            node.log_path.write_text("")
            node.start()
        for node in nodes:
            until(lambda node=node: says(node, LOST), f"{node.name} stops")
            assert says(node, "cluster adopt 0 --from NODE")
            assert node.owners() == [None]

        # ── people decide ──
        adopt = ("delayserver", "cluster", "adopt", "0", *where, "--from")
        shorter = subprocess.run(
            [*adopt, other.name], check=False, stderr=subprocess.PIPE, text=True
        )
        assert shorter.returncode == 2
        assert f"another replica more: {owner.name} up to seq" in shorter.stderr
        done = delayserver(*adopt[1:], owner.name, "--yes")
        assert done == f"Done: shard 0 goes on behind what {owner.name} has.\n"
        until(lambda: says(other, "the replica was made anew"), "the other one is copied")
        (kept,) = tmp_path.glob(f"{other.name}/**/aside/*/FORMAT")
        assert str(kept.parent) in other.log_path.read_text()
        ids += publish(other, "behind that")
        for node in nodes:
            states = [node.call("GET", f"/v1/messages/{one}")["state"] for one in ids]
            assert set(states) == {"scheduled"}
        assert len(set(ids)) == len(ids)

        # ── the one that was copied takes over, with all of it ──
        owner.kill()
        until(lambda: other.owners() == [other.name], "the other one owns the shard")
        assert {other.call("GET", f"/v1/messages/{one}")["state"] for one in ids} == {"scheduled"}
