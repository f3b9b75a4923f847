"""The archive of several shards: each has hours of the same names, and a place of its own."""

import json
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from pyspark.sql import SparkSession

from delayserver.errors import PipelineError
from delayserver.pipeline.archive.archive import Archive, HourFate, run
from delayserver.pipeline.progress import Job
from storage.buckets import hour_name
from storage.rows import HOUR_MS
from tests.integration.api_support import wait_until
from tests.pipeline.cluster import Cluster
from tests.pipeline.store import HOUR, make_shards

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


def test_each_shard_has_a_place_of_its_own(
    cluster: Cluster, spark: SparkSession, tmp_path: Path
) -> None:
    to, job = tmp_path / "archive", Job(spark)
    wanted = Archive(cluster.data_dir, str(to), cluster.url, wait_s=5)
    dry = run(job, Archive(cluster.data_dir, str(to), cluster.url, wait_s=5, dry_run=True))
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
        assert done["location"].endswith(f"/shard={shard}")
    assert run(job, wanted).hours == []

    names = [("shard", pa.int32()), ("date", pa.string()), ("subject", pa.string())]
    partitions = ds.partitioning(pa.schema(names), flavor="hive")
    rows = ds.dataset(to, format="parquet", partitioning=partitions).to_table().to_pylist()
    assert Counter((row["shard"], row["subject"]) for row in rows) == {
        (0, "order.paid"): 5,
        (0, "order.unpaid"): 5,
        (1, "order.paid"): 6,
        (1, "order.unpaid"): 6,
    }
    assert all(int(row["id"][:4], 16) == row["shard"] for row in rows)
    assert spark.read.parquet(str(to)).where("shard = 1").count() == 12

    owner = to / "_archive.json"
    assert json.loads(owner.read_text())["shards"] == SHARDS
    (to / "._archive.json.crc").unlink()  # Hadoop's own checksum.
    owner.write_text(json.dumps({**json.loads(owner.read_text()), "shards": 3}))
    with pytest.raises(PipelineError, match="another data directory"):
        run(job, wanted)


def test_one_of_several_is_refused(cluster: Cluster, spark: SparkSession, tmp_path: Path) -> None:
    alone = Archive(cluster.data_dir / "shard-0001", str(tmp_path), cluster.url)
    with pytest.raises(PipelineError, match="archived together"):
        run(Job(spark), alone)
