"""An export in an object store that speaks S3: what a place promises, and the jobs that read it."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from pyspark.sql import SparkSession

from delayserver.pipeline.audits.on_spark import audit
from delayserver.pipeline.exports.export import export
from delayserver.pipeline.exports.place import open_place
from delayserver.pipeline.progress import Job
from delayserver.pipeline.reports.forecast import forecast
from storage.errors import DiskError
from storage.rows import HOUR_MS
from tests.pipeline.store import START_MS, make_shards
from tests.sinks.programs import Program

SCRIPT = Path(__file__).parents[3] / "scripts" / "s3"
NOW_MS = START_MS + 3 * HOUR_MS


class ObjectStore(Program):
    def command(self) -> list[str]:
        return [str(SCRIPT), str(self.port)]

    def url(self, path: str, bucket: str = "delays") -> str:
        return (
            f"s3://any:any@{bucket}/{path}?scheme=http"
            f"&endpoint_override=127.0.0.1:{self.port}&region=us-east-1"
        )


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    with ObjectStore(tmp_path_factory.mktemp("s3")) as started:
        httpx.put(f"http://127.0.0.1:{started.port}/delays").raise_for_status()
        yield started


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
