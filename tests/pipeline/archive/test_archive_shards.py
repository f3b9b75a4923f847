"""The archive of several shards: each has hours of the same names, and seqs of its own."""

import shutil
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.table import StaticTable
from pyspark.sql import SparkSession

from delayserver.errors import PipelineError
from delayserver.pipeline.archive.archive import run
from delayserver.pipeline.archive.job import Archive, ArchiveCalls, HourFate
from delayserver.pipeline.progress import Job
from storage.buckets import hour_name
from storage.rows import HOUR_MS
from tests.pipeline.cluster import Cluster
from tests.pipeline.store import HOUR, make_shards
from tests.waiting import wait_until

SHARDS = 2
RETENTION_MS = 10 * 365 * 24 * HOUR_MS

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two shards with an hour each that is settled; seqs are the same, numbers differ."""
    root = tmp_path_factory.mktemp("archive")
    for shard, store in enumerate(make_shards(root / "data", SHARDS, retention_ms=RETENTION_MS)):
        store.subscribe("one", "order.*")
        for subject in ("order.paid", "order.unpaid")[:: 1 - 2 * shard]:
            store.publish(subject, [60_000 + number for number in range(5 + shard)])
        store.run(2 * HOUR_MS)
        store.checkpoint()
        store.stop()
    cluster = Cluster(root, archive=True, retention_ms=RETENTION_MS, checkpoint_ms=50)
    for shard in range(SHARDS):
        wait_until(partial(waiting, cluster, shard))
    yield cluster
    cluster.close()


def waiting(cluster: Cluster, shard: int) -> list[dict[str, Any]]:
    """Hours of a shard, whichever is asked."""
    address = f"/v1/archives?limit=1000&shard={shard}"
    hours: list[dict[str, Any]] = cluster.shards[-1].ask("GET", address)["hours"]
    assert len(hours) <= 1
    return hours


def test_all_shards_are_in_one_table(cluster: Cluster, spark: SparkSession, tmp_path: Path) -> None:
    to, job = tmp_path / "archive", Job(spark)
    wanted = Archive([str(cluster.data_dir)], str(to), cluster.url, wait_s=5)
    dry = run(job, Archive([str(cluster.data_dir)], str(to), cluster.url, wait_s=5, dry_run=True))
    assert [(one.shard, one.fate) for one in dry.hours] == [
        (0, HourFate.SOUND),
        (1, HourFate.SOUND),
    ]
    archived = run(job, wanted)
    assert archived.is_clean and archived.is_kept
    assert [(one.shard, one.hour, one.fate, one.added) for one in archived.hours] == [
        (0, hour_name(HOUR), HourFate.ARCHIVED, 10),
        (1, hour_name(HOUR), HourFate.ARCHIVED, 12),
    ]
    for shard, server in enumerate(cluster.shards):
        assert waiting(cluster, shard) == []
        (done,) = server.ask("GET", f"/v1/archives?state=archived&shard={shard}")["hours"]
        assert done["location"] == str(to)
    assert run(job, wanted).hours == []

    rows = StaticTable.from_metadata(str(to)).scan().to_arrow().to_pylist()
    assert Counter((row["shard"], row["subject"]) for row in rows) == {
        (0, "order.paid"): 5,
        (0, "order.unpaid"): 5,
        (1, "order.paid"): 6,
        (1, "order.unpaid"): 6,
    }
    assert all(int(row["id"][:4], 16) == row["shard"] for row in rows)
    assert len({row["store"] for row in rows}) == SHARDS
    read = spark.read.format("delayarchive").load(str(to))
    assert read.where("shard = 1").count() == 12


def test_the_shards_may_be_in_directories_of_their_own(
    cluster: Cluster, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = ArchiveCalls.call

    def listing(self: ArchiveCalls, method: str, path: str, *rest: Any) -> Any:
        return call(self, method, path.replace("archives?", "archives?state=all&"), *rest)

    monkeypatch.setattr(ArchiveCalls, "call", listing)
    roots = []
    for shard in range(SHARDS):
        roots.append(str(tmp_path / f"mount{shard}"))
        # As it is where that shard is mounted.
        shutil.copytree(cluster.data_dir / f"shard-{shard:04}", roots[-1])
    wanted = Archive(roots, str(tmp_path / "archive"), cluster.url, wait_s=5, dry_run=True)
    assert [(one.shard, one.fate) for one in run(Job(spark), wanted).hours] == [
        (0, HourFate.SOUND),
        (1, HourFate.SOUND),
    ]


def test_one_of_several_is_refused(cluster: Cluster, spark: SparkSession, tmp_path: Path) -> None:
    alone = Archive([str(cluster.data_dir / "shard-0001")], str(tmp_path), cluster.url)
    with pytest.raises(PipelineError, match="archived together"):
        run(Job(spark), alone)
