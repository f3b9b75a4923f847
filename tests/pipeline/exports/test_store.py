"""An export in an object store that speaks S3: what a place promises, and the jobs that read it."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from delayserver.pipeline.audits.on_spark import audit
from delayserver.pipeline.exports.export import export
from delayserver.pipeline.exports.place import open_place
from delayserver.pipeline.progress import Job
from delayserver.pipeline.reports.forecast import forecast
from storage.errors import DiskError
from storage.rows import HOUR_MS
from tests.pipeline.objects import ObjectStore
from tests.pipeline.store import START_MS, make_shards

NOW_MS = START_MS + 3 * HOUR_MS


def test_a_bucket_is_a_place(objects: ObjectStore) -> None:
    place = open_place(objects.url("place"))
    assert place.names() == []
    place.write("a/b", b"first")
    place.write("a/b", b"second")
    place.write("c", b"")
    assert (place.read("a/b"), place.read("c")) == (b"second", b"")
    assert (place.read_piece("a/b", 3, 2), place.read_piece("a/b", 30, 4)) == (b"con", b"nd")
    assert place.names() == ["a/b", "c"]
    for missing in (lambda: place.read("d"), lambda: place.read_piece("d", 1, 0)):
        with pytest.raises(FileNotFoundError):
            missing()
    place.delete("c")
    place.delete("c")
    assert place.names() == ["a/b"]


def test_what_the_store_says_is_named_with_its_place(objects: ObjectStore) -> None:
    with pytest.raises(DiskError, match=r"s3://nowhere/x/a") as found:
        open_place(objects.url("x", "nowhere")).write("a", b"1")
    assert "any:any" not in str(found.value)  # the keys


def test_jobs_read_shards_out_of_a_bucket(
    spark: SparkSession, objects: ObjectStore, tmp_path: Path
) -> None:
    root, to = tmp_path / "data", objects.url("company")
    for store in make_shards(root):
        store.subscribe("mail", "order.*")
        store.publish("order.paid", [1000 * n for n in range(10)])
        store.run(5000)
        store.stop()
    export(str(root), to, now_ms=NOW_MS)
    job = Job(spark)
    found = audit(job, to, now_ms=NOW_MS)
    assert found.is_clean and found.shards == 3
    assert (found.messages["accepted"], found.messages["delivered"]) == (30, 18)
    assert forecast(job, to, now_ms=START_MS + 5000).waiting == 12
    wanted = spark.read.format("delaystate").load(str(root)).drop("shard").collect()
    states = spark.read.format("delaystate").load(to).drop("shard").collect()
    assert len(wanted) == 30 and sorted(states) == sorted(wanted)
