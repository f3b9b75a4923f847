"""The topics of a real cluster: two nodes, two shards, a broker that wants TLS and a password, and
what an outside ledger says.

The tests share the cluster, in the order in which they stand here: the nodes run until the verdicts
are wanted.
"""

import contextlib
import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner, Result

from delayserver.cli import make_app, pipeline_watch
from delayserver.pipeline.logs.columns import CORRUPT_DDL
from delayserver.pipeline.progress import Job
from delayserver.pipeline.reports import live
from delayserver.pipeline.topics.names import names_in_directories, names_in_log
from delayserver.pipeline.topics.settled import settled_rows
from delayserver.pipeline.topics.source import (
    ClusterTopics,
    open_topics,
)
from storage.errors import ClusterMissingError, EngineError
from storage.replicated import envelope, kafka
from storage.replicated.engine import EngineLog
from storage.replicated.envelope import Beat, Claim, FramePart
from storage.replicated.kafka import KafkaEngine
from storage.replicated.kafka_settings import ClientSettings, ClusterUrl
from storage.replicated.office import OfficeState
from storage.replicated.reader import RecordReader
from storage.replicated.reading import read_to_end
from storage.replicated.settled import encode_settled
from storage.rows import DISPATCH_DTYPE, HOUR_MS
from tests.cluster.nodes import NodeProcess, delayserver, running
from tests.cluster.test_secured import Secured, properties
from tests.integration.api_support import Receiver
from tests.waiting import wait_until

SHARDS = 2
GHOST = 9
"""The number of a node that claims when the others are gone, so that the logs' clocks go on."""


@dataclass
class Ledger:
    """What somebody outside has seen."""

    hook: str
    receiver: Receiver
    published: int = 0
    cancelled: int = 0

    def publish(self, node: NodeProcess, count: int, *, delay: str = "50ms") -> list[str]:
        ids = [node.publish(f"k{self.published + n}", delay=delay) for n in range(count)]
        self.published += count
        return ids

    @property
    def received(self) -> int:
        return self.receiver.count(self.hook)


@dataclass
class Cluster:
    """Two nodes on one broker."""

    url: ClusterUrl
    config: Path
    """What its broker wants: TLS, and the password of one who may do what docs/cluster.md says."""
    nodes: list[NodeProcess]
    ledger: Ledger
    engine: KafkaEngine
    topics: ClusterTopics
    state: Path
    _running: ExitStack = field(default_factory=ExitStack)

    def stop(self) -> None:
        """End the nodes, and have the logs say that two hours have passed."""
        self._running.close()
        for shard in range(SHARDS):
            with contextlib.closing(self.engine.log(shard)) as log:
                state = self._read(log, shard).office.state
                claim = Claim(GHOST, state.epoch + 1, state.clock_ms, state.last_offset, "")
                self.say(shard, claim)
                self.say(shard, Beat(GHOST, claim.epoch, state.clock_ms + 2 * HOUR_MS, 1, 1, 1))

    def say(self, shard: int, record: Claim | Beat) -> None:
        with contextlib.closing(self.engine.log(shard)) as log:
            assert log.append([envelope.encode(record)]) != [None]

    def settle(self, shard: int, row: np.ndarray) -> bytes:
        """A record of NAME.settled with a row; not appended."""
        return encode_settled(row, self.topics.stamps[shard], 0)

    def settled(self, shard: int) -> list[tuple[int, bytes]]:
        """The records of NAME.settled."""
        with contextlib.closing(self.engine.settled(shard)) as log:
            return list(read_to_end(log, 0))

    def append(self, shard: int, record: bytes) -> int:
        with contextlib.closing(self.engine.settled(shard)) as log:
            (offset,) = log.append([record])
        assert offset is not None
        return offset

    def _read(self, log: EngineLog, shard: int) -> RecordReader:
        reader = RecordReader(log, self.topics.stamps[shard], OfficeState())
        end = log.end()
        assert end is not None
        while reader.office.state.next_offset < end:
            reader.read(1)
        return reader

    def run(self, *words: str) -> Result:
        """The command, in the session of the tests."""
        access = ("--cluster", str(self.url), "--kafka-config", str(self.config))
        return CliRunner().invoke(
            make_app(["pipeline", "pipeline_lateness", "pipeline_watch"]),
            ["pipeline", words[0], *access, *words[1:]],
        )

    def watch(self, *words: str) -> tuple[int, list[dict[str, Any]]]:
        """Exit status and verdicts of all there is."""
        # Hours are kept for so long behind their end: what is tampered with then is found.
        options = ("--state", str(self.state), "--once", "--patience", "3h", "--json", "-")
        result = self.run("watch", *options, *words)
        assert result.exit_code in (0, 1), result.output
        return result.exit_code, [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    home = tmp_path_factory.mktemp("cluster")
    secured, receiver = Secured(home), Receiver()
    with contextlib.closing(receiver), secured.brokers.running(), ExitStack() as stack:
        url, login = secured.brokers.new_url(), secured.login("node", "n")
        secured.grant(url.name, "nothing-else")
        config = Path(properties(home / "client.properties", login))
        words = ("--shards", str(SHARDS), "--replication", "1", "--durability", "os")
        access = ("--cluster", str(url), "--kafka-config", str(config))
        delayserver("cluster", "create", *access, *words)
        nodes = [NodeProcess(name, url, home) for name in ("n1", "n2")]
        for node in nodes:
            node.options += ["--kafka-config", str(config)]
        stack.enter_context(running(*nodes))
        hook = receiver.hook(200)
        definition = {"subject": "order.*", "type": "webhook", "url": hook}
        nodes[0].call("PUT", "/v1/subscriptions/hook", definition)
        yield Cluster(
            url,
            config,
            nodes,
            Ledger(hook, receiver),
            KafkaEngine(ClientSettings(url, login)),
            open_topics(str(url), config),
            home / "watch",
            stack,
        )


def test_deliveries_are_seen_as_brokers_are_told_of_them(
    cluster: Cluster, spark: SparkSession
) -> None:
    job = Job(spark)
    known = names_in_log(job, cluster.topics)
    assert [one.name for one in known[0].subscriptions.values()] == ["hook"]
    directories = [str(cluster.nodes[0].data_dir / f"shard-{n:04d}") for n in range(SHARDS)]
    in_log = {n: one.subscriptions for n, one in known.items()}

    def in_files() -> dict[int, Any]:
        found = names_in_directories(cluster.topics.identity, *directories)
        return {n: one.subscriptions for n, one in found.items()}

    wait_until(lambda: in_files() == in_log)  # A replica that follows is a moment behind.

    def names() -> dict[int, Any]:
        return {shard: one.columns(shard) for shard, one in known.items()}

    with live.watch_topics(job, cluster.topics, names, window_ms=HOUR_MS) as watched:
        cluster.ledger.publish(cluster.nodes[0], 40)
        wait_until(lambda: sum(line.count for line in watched.windows.lines()) == 40, timeout_s=200)
        watched.check()
        lines = watched.windows.lines()
    assert {line.name for line in lines} == {"hook"}
    assert all(0 <= line.p50_ms <= line.max_ms for line in lines)
    assert watched.damage == []
    assert cluster.ledger.received == 40


def test_rows_of_the_topic_are_those_that_a_node_has_in_its_files(
    cluster: Cluster, spark: SparkSession
) -> None:
    columns = "shard int, seq long, due timestamp, settled timestamp, subscription string, "
    columns += "lateness_ms long, lateness_bucket int, outcome byte, attempt int"
    known = names_in_log(Job(spark), cluster.topics)
    names = {shard: one.columns(shard) for shard, one in known.items()}
    records = cluster.topics.table(spark, "settled")
    ours = settled_rows(records, cluster.topics, names, f"{columns}, {CORRUPT_DDL}")
    rows = sorted(map(tuple, ours.where("_corrupt is null").drop("_corrupt").collect()))
    assert len(rows) == cluster.ledger.received > 0

    def in_files() -> list[tuple[Any, ...]]:
        return sorted(
            tuple(row)
            for shard in range(SHARDS)
            for row in spark.read.format("delaylog")
            .option("log", "dispatch")
            .schema(columns)
            .load(str(cluster.nodes[1].data_dir / f"shard-{shard:04d}"))
            .collect()
        )

    wait_until(lambda: in_files() == rows, timeout_s=60)


@pytest.mark.usefixtures("shared_session")
def test_verdicts_are_what_the_ledger_says_and_what_is_tampered_with_is_named(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, node = cluster.ledger, cluster.nodes[1]
    for message_id in ledger.publish(node, 7, delay="1m"):
        node.call("DELETE", f"/v1/messages/{message_id}")
        ledger.cancelled += 1
    ledger.publish(node, 30)
    delivered = ledger.published - ledger.cancelled
    wait_until(lambda: ledger.received == delivered)
    status, verdicts = cluster.watch()
    assert (status, verdicts) == (0, [])  # The hour goes on.
    cluster.stop()

    status, verdicts = cluster.watch()
    assert status == 0, verdicts
    assert all(one["closed"] and one["clean"] for one in verdicts)
    sums = {
        name: sum(one[name] for one in verdicts) for name in ("entries", "delivered", "cancelled")
    }
    assert sums == {
        "entries": ledger.published,
        "delivered": delivered,
        "cancelled": ledger.cancelled,
    }
    assert cluster.watch() == (0, [])

    # Somebody who may write to the topic says something else, with a correct checksum.
    offset, data = cluster.settled(0)[0]
    row = np.frombuffer(data[64 : 64 + 40], DISPATCH_DTYPE).copy()
    row["settled_ms"] += 1
    cluster.append(0, cluster.settle(0, row))
    stranger = row.copy()
    stranger["seq"], stranger["message_seq"] = 1, 1
    cluster.append(0, cluster.settle(0, stranger))
    broken = cluster.append(0, data[:70] + bytes([data[70] ^ 1]) + data[71:])
    # A watch that looks all the time tells of both in one order, too: together, when it knows both.
    monkeypatch.setattr(pipeline_watch, "LOOK_S", 0.005)
    status, found = cluster.watch()
    assert status == 1
    verdict, damaged = found
    assert verdict["violations"] == {"repeated": 1, "unknown": 1}
    assert {one["shard"] for one in verdict["examples"]} == {0}
    assert damaged["damaged"]["log"] == f"{cluster.url.name}.settled/0"
    assert damaged["damaged"]["offset"] == broken > offset
    assert "checksum" in damaged["damaged"]["reason"]

    # As a table, from the beginning, by a watch of its own.
    result = cluster.run("watch", "--state", str(cluster.state.with_name("other")), "--once")
    assert result.exit_code == 1
    assert "closed, 1 repeated, 1 unknown" in result.output
    assert f"damaged: {cluster.url.name}.settled/0 at offset {broken}" in result.output


@pytest.mark.usefixtures("shared_session")
def test_a_log_that_was_cut_is_judged_from_there_on_with_names_of_a_node(cluster: Cluster) -> None:
    """As it is when two replicas have filed what stands in it."""
    with contextlib.closing(cluster.engine.log(0)) as log:
        frames = [
            offset
            for offset, data in read_to_end(log, 0)
            if isinstance(envelope.decode(data, log.name, offset), FramePart)
        ]
        log.delete_before(frames[len(frames) // 2])
    result = cluster.run("watch", "--state", str(cluster.state.with_name("cut")), "--once")
    assert result.exit_code == 2
    assert "the log of shard 0 begins with seq" in result.output
    assert "Traceback" not in result.output

    directories = [cluster.nodes[0].data_dir / f"shard-{n:04d}" for n in range(SHARDS)]
    words = [word for one in directories for word in ("--data-dir", str(one))]
    new = ("--state", str(cluster.state.with_name("named")), "--once", "--json", "-")
    result = cluster.run("watch", *new, *words)
    verdicts = [json.loads(line) for line in result.stdout.splitlines()]
    verdict = next(one for one in verdicts if "hour" in one)
    assert verdict["closed"] and verdict["unjudged"] > 0
    assert 0 < verdict["delivered"] < cluster.ledger.received
    assert set(verdict["violations"]) <= {"repeated"}


@pytest.mark.usefixtures("shared_session")
def test_a_damaged_record_of_the_log_ends_it_with_its_place(cluster: Cluster) -> None:
    with contextlib.closing(cluster.engine.log(1)) as log:
        (offset,) = log.append([b"DLR1" + bytes(60)])
    status, found = cluster.watch()
    assert status == 1
    (damaged,) = found
    assert damaged["damaged"] == {
        "log": f"{cluster.url.name}.log/1",
        "offset": offset,
        "reason": "it does not match its checksum",
    }


def test_what_is_missing_is_said(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ClusterMissingError):
        open_topics(str(ClusterUrl(cluster.url.brokers, "nobody")), cluster.config)
    monkeypatch.setattr(kafka, "CALL_TIMEOUT_S", 1.0)
    with pytest.raises(EngineError, match="list topics failed"):
        open_topics("kafka://127.0.0.1:1/delays")


def test_lateness_of_a_cluster_knows_no_subjects() -> None:
    result = CliRunner().invoke(
        make_app(["pipeline_lateness"]),
        ["pipeline", "lateness", "--cluster", "kafka://b:1/c", "--by", "subject"],
    )
    assert result.exit_code == 2
    assert "the log of settled deliveries has no subjects" in result.output
