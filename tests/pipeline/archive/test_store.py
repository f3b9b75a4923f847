"""An archive in an object store that speaks S3: the place, and the table in it."""

import time

import pytest
from pyiceberg.table import StaticTable
from pyspark.sql import SparkSession

from delayserver.pipeline.archive.catalog import ArchiveConflictError
from delayserver.pipeline.archive.compaction import compact
from delayserver.pipeline.archive.place import LEFTOVER_S, ArchivePlace
from delayserver.pipeline.archive.plain import PlainFiles
from delayserver.pipeline.archive.table import ArchiveTable
from delayserver.pipeline.archive.writing import Layout, WrittenFile, write_rows
from delayserver.pipeline.progress import Job
from storage.errors import DiskError
from tests.pipeline.archive.made import made_rows
from tests.pipeline.objects import ObjectStore


def test_a_bucket_is_a_place(objects: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    place = ArchivePlace(objects.url("place"))
    place.create("a/one", b"1")
    with pytest.raises(FileExistsError):
        place.create("a/one", b"2")
    place.replace("a/one", b"3")
    place.rename("a/one", "b/two")
    assert place.read("b/two") == b"3"
    assert place.location("b/two") == "s3://delays/place/b/two"
    assert list(place.files_below("")) == ["b/two"]
    # Who has written it may be at work yet.
    assert place.leftovers("b") == []
    now_s = time.time() + LEFTOVER_S + 60
    monkeypatch.setattr(time, "time", lambda: now_s)
    assert place.leftovers("b") == ["b/two"]
    with place.locked(), place.locked():
        pass
    place.delete("b/two")
    assert place.files_below("") == {}
    with pytest.raises(DiskError, match="s3://nowhere/x/one") as found:
        ArchivePlace(objects.url("x", "nowhere")).replace("one", b"")
    assert "any:any" not in str(found.value)  # the keys


def test_a_table_in_a_bucket_and_plain_files(objects: ObjectStore, spark: SparkSession) -> None:
    place = ArchivePlace(objects.url("company/table"))

    def write(table: ArchiveTable | PlainFiles, first_seq: int) -> list[WrittenFile]:
        layout: Layout = table.layout("s", 0, {0: first_seq})
        rows = made_rows(spark, first_seq)
        return write_rows(rows, table.place, layout, table.file_schema, f"run{first_seq}")

    table, late = ArchiveTable(place), ArchiveTable(place)
    with table.running("one"):
        table.add(write(table, 0), [])
    with pytest.raises(ArchiveConflictError):
        late.add(write(late, 20), [])
    table.add(write(table, 40), [])
    assert compact(Job(spark), table, "all", 2).files_after == 2
    read = spark.read.format("delayarchive").load(objects.url("company/table"))
    assert sorted(row.seq for row in read.collect()) == [*range(20), *range(40, 60)]
    properties = {
        "s3.endpoint": f"http://127.0.0.1:{objects.port}",
        "s3.access-key-id": "any",
        "s3.secret-access-key": "any",
        "s3.region": "us-east-1",
    }
    outside = StaticTable.from_metadata(place.url, properties)
    assert outside.scan().to_arrow().num_rows == 40

    plain = PlainFiles(ArchivePlace(objects.url("company/plain")))
    with plain.running("two"):
        plain.add(write(plain, 0), [])
    (name,) = plain.place.files_below("")
    assert name == "date=1970-01-01/1970-01-01T00.s-0.0.parquet"
