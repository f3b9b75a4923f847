"""cluster create, cluster status, on one broker."""

import json
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner, Result

from delayserver.cli import make_app
from delayserver.cluster.placement import in_order
from delayserver.cluster.watch import ReplicaNote
from storage.replicated.envelope import Beat, Claim, LogRecord, encode
from storage.replicated.kafka import KafkaEngine
from storage.replicated.kafka_settings import ClientSettings
from storage.replicated.meta import MetaLog
from tests.cluster.brokers import Brokers

RUNNER = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"})


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Brokers]:
    with Brokers(tmp_path_factory.mktemp("broker"), count=1).running() as one:
        yield one


def run(*words: str) -> Result:
    return RUNNER.invoke(make_app(("cluster",)), ["cluster", *words])


def test_the_life_of_a_cluster(broker: Brokers) -> None:
    url = broker.new_url()
    where = ("--cluster", str(url))
    make = ("create", *where, "--replication", "1", "--replicas", "2", "--shards")

    nothing = run("status", *where)
    assert nothing.exit_code == 2
    assert "holds no cluster; make one with `delayserver cluster create" in nothing.stderr

    made = run(*make, "2", "--json")
    assert json.loads(made.stdout) == {
        "cluster": url.name,
        "shards": 2,
        "replicas": 2,
        "durability": "fsync",
        "is_new": True,
        "topics_made": [url.log_topic, url.settled_topic, url.meta_topic],
    }
    again = run(*make, "2")
    assert again.stdout == (
        f"The cluster {url.name} was there already: 2 shards on 2 nodes each, durability fsync. "
        "Its topics were there.\n"
    )
    fewer = run("create", *where, "--shards", "2", "--replicas", "3", "--replication", "1")
    assert fewer.exit_code == 1
    assert "was made with replicas 2, which cannot be changed" in fewer.stderr
    another = run(*make, "3")
    assert another.exit_code == 1
    assert "was made with shards 2, which cannot be changed" in another.stderr
    assert "No node has registered yet." in run("status", *where).stdout

    engine = KafkaEngine(ClientSettings(url, {}))
    assert MetaLog(engine.meta()).register("n1", "rack-7") == 1
    assert MetaLog(engine.meta()).register("n2") == 2
    records: list[LogRecord] = [
        Claim(2, 1, 900, -1, "n2.example:8080"),
        *[Beat(2, 1, 1000, 0, 0, 0)] * 3,
    ]
    engine.log(1).append([*map(encode, records)])
    engine.commit_progress("n2", 1, 3)
    engine.commit_progress("n1", 1, 0, ReplicaNote(0, "http://n1", 0, 0, stage="passing").pack())

    found = json.loads(run("status", *where, "--json").stdout)
    assert found["problems"] == []
    assert found["shards"] == [
        {
            "shard": 0,
            "owner": None,
            "epoch": 0,
            "address": None,
            "clock_ms": None,
            "end": 0,
            "lag": {},
            "placed": in_order(0, ["n1", "n2"]),
        },
        {
            "shard": 1,
            "owner": "n2",
            "epoch": 1,
            "address": "n2.example:8080",
            "clock_ms": 1000,
            "end": 4,
            "lag": {"n2": 1},
            "placed": in_order(1, ["n1", "n2"]),
        },
    ]
    assert found["nodes"] == [
        {"node": "n1", "number": 1, "zone": "rack-7", "owns": 0, "replicas": 0, "lag": None},
        {"node": "n2", "number": 2, "zone": None, "owns": 1, "replicas": 1, "lag": 1},
    ]
    assert found["replicas"] == 2
    shown = run("status", *where).stdout
    assert "2 shards on 2 nodes each" in shown
    assert "n2.example:8080" in shown
    assert "1970-01-01T00:00:01.000Z" in shown

    # A third node: of each shard there is one that is to have no replica.
    assert MetaLog(engine.meta()).register("n3", "rack-7") == 3
    placed = json.loads(run("status", *where, "--json").stdout)["shards"][1]["placed"]
    (without,) = {"n1", "n2", "n3"}.difference(placed)
    refused = run("move", "1", without, *where)
    assert refused.exit_code == 1
    assert f"{without} is to have no replica of shard 1" in refused.stderr
    assert f"{', '.join(placed)} can." in refused.stderr

    # What is not needed any more was deleted, and the CLAIM with it.
    engine.log(1).delete_before(2)
    (_, shard) = json.loads(run("status", *where, "--json", "--whole").stdout)["shards"]
    assert (shard["owner"], shard["address"], shard["end"]) == ("n2", None, 4)


def test_topics_that_are_not_as_they_have_to_be(broker: Brokers) -> None:
    url = broker.new_url()
    broker.engine(url, shards=3)
    words = ("create", "--cluster", str(url), "--replication", "1", "--shards", "2")
    wrong = run(*words)
    assert wrong.exit_code == 1
    assert f"The topic {url.log_topic} has 3 partitions, and 2 are needed." in wrong.stderr
    # Nothing was written down: it can be made as the topics are.
    assert run(*words[:-1], "3").exit_code == 0


def test_more_copies_than_brokers(broker: Brokers) -> None:
    url = broker.new_url()
    refused = run("create", "--cluster", str(url), "--shards", "1")
    assert refused.exit_code == 2
    assert "create topic failed" in refused.stderr
