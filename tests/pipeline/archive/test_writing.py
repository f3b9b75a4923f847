"""Sorted batches to files: cut at groups and at sizes, without a session."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.transforms import BucketTransform
from pyiceberg.types import StringType
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F

from delayserver.pipeline.archive import writing
from delayserver.pipeline.archive.place import ArchivePlace
from delayserver.pipeline.archive.writing import WriterTask, bucket_column

SCHEMA = pa.schema([pa.field("seq", pa.int64(), metadata={"PARQUET:field_id": "7"})])


@dataclass(frozen=True)
class ByNumber:
    may_cut: bool = True

    def group(self) -> Column:
        raise NotImplementedError

    def name(self, group: int, task: str, number: int) -> str:
        return f"{group}/{task}-{number}.parquet"


def batches(*groups: int, rows: int = 4) -> Iterator[pa.RecordBatch]:
    """So many rows of each group in turn, in batches that end anywhere."""
    numbers = [group for group in groups for _ in range(rows)]
    for start in range(0, len(numbers), 3):
        some = numbers[start : start + 3]
        yield pa.RecordBatch.from_pydict(
            {"__group": some, "seq": list(range(start, start + len(some)))}
        )


def written(tmp_path: Path, layout: ByNumber, *groups: int) -> dict[str, list[int]]:
    task = WriterTask(ArchivePlace(str(tmp_path)), layout, SCHEMA, "run")
    told = pa.Table.from_batches(list(task.write(batches(*groups)))).to_pylist()
    seqs = {one["name"]: pq.read_table(tmp_path / one["name"])["seq"].to_pylist() for one in told}
    assert [one["count"] for one in told] == [len(some) for some in seqs.values()]
    assert [str(one["group"]) for one in told] == [name.partition("/")[0] for name in seqs]
    assert len(list(tmp_path.rglob("*.parquet"))) == len(told)
    return seqs


def test_a_file_holds_rows_of_one_group(tmp_path: Path) -> None:
    assert written(tmp_path, ByNumber(), 5, 6, 9) == {
        "5/run-0-0-0.parquet": [0, 1, 2, 3],
        "6/run-0-0-1.parquet": [4, 5, 6, 7],
        "9/run-0-0-2.parquet": [8, 9, 10, 11],
    }
    assert (
        pq.read_schema(tmp_path / "5/run-0-0-0.parquet").field("seq").metadata[b"PARQUET:field_id"]
        == b"7"
    )


@pytest.mark.parametrize(("may_cut", "files"), [(True, 4), (False, 2)])
def test_a_large_group_has_several_files_if_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, may_cut: bool, files: int
) -> None:
    monkeypatch.setattr(writing, "ROW_GROUP_BYTES", 1)
    monkeypatch.setattr(writing, "FILE_BYTES", 1)
    found = written(tmp_path, ByNumber(may_cut), 1, 2)
    assert [seq for some in found.values() for seq in some] == list(range(8))
    assert len(found) == files
    groups = [pq.read_metadata(tmp_path / name).num_row_groups for name in found]
    assert sum(groups) == 4


def test_nothing_is_no_file(tmp_path: Path) -> None:
    task = WriterTask(ArchivePlace(str(tmp_path)), ByNumber(), SCHEMA, "run")
    assert list(task.write(iter([]))) == []
    assert list(tmp_path.iterdir()) == []


def test_buckets_are_those_of_iceberg(spark: SparkSession) -> None:
    texts = ["order.paid", "", "ümläut", "a" * 50]
    rows = spark.createDataFrame([(text,) for text in texts], "subject string")
    found = rows.select("subject", bucket_column(16, "subject").alias("bucket")).collect()
    number = BucketTransform(16).transform(StringType())
    assert {row.subject: row.bucket for row in found} == {text: number(text) for text in texts}
    assert rows.where(F.lit(False)).select(bucket_column(16, "subject")).collect() == []
