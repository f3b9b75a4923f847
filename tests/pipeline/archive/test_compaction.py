"""Compaction: the same rows in fewer files, and nothing of it if they are not the same."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyiceberg.manifest import DataFile
from pyiceberg.table import StaticTable
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from delayserver.errors import PipelineError
from delayserver.pipeline.archive import compaction
from delayserver.pipeline.archive.compaction import Compacted, compact, rewritten
from delayserver.pipeline.archive.place import ArchivePlace
from delayserver.pipeline.archive.rows import Sum
from delayserver.pipeline.archive.table import ArchiveTable
from delayserver.pipeline.archive.writing import write_rows
from delayserver.pipeline.progress import Job
from tests.pipeline.archive.made import made_rows

pytestmark = pytest.mark.timeout(300)
RUNS = 4


@pytest.fixture
def table(spark: SparkSession, tmp_path: Path) -> ArchiveTable:
    """A day of one subject, and as many hours of another day, each in a file of its own."""
    table = ArchiveTable(ArchivePlace(str(tmp_path / "archive")), buckets=2)
    for run in range(RUNS):
        rows = made_rows(spark, 20 * run)
        layout = table.layout("s", 0, {})
        table.add(write_rows(rows, table.place, layout, table.file_schema, f"run{run}"), [])
    return table


def rows_of(table: ArchiveTable) -> list[dict[str, Any]]:
    found = StaticTable.from_metadata(table.place.url).scan().to_arrow()
    rows: list[dict[str, Any]] = found.sort_by("seq").to_pylist()
    return rows


def files_of(table: ArchiveTable) -> list[str]:
    assert table.current is not None
    return [task.file.file_path for task in table.current.scan().plan_files()]


def on_disk(table: ArchiveTable) -> list[Path]:
    return list(Path(table.place.url).glob("data/*/*/*.parquet"))


def test_the_same_rows_in_one_file_of_each_partition(table: ArchiveTable, job: Job) -> None:
    before = rows_of(table)
    assert len(files_of(table)) == 2 * RUNS
    assert compact(job, table, "few") == Compacted()
    assert compact(job, table, "all", 2) == Compacted(2 * RUNS, 2)
    assert rows_of(table) == before and len(before) == 20 * RUNS
    for path in files_of(table):
        due = pq.read_table(path)["due"].to_pylist()
        assert due == sorted(due) and len(due) == 10 * RUNS
    assert compact(job, table, "again", 2) == Compacted()


def test_what_is_read_back_otherwise_replaces_nothing(
    table: ArchiveTable, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, files = rows_of(table), files_of(table)
    sums = iter([Sum(80, 1), Sum(80, 2)])
    monkeypatch.setattr(compaction, "_sum", lambda rows: next(sums))
    with pytest.raises(PipelineError, match="read back"):
        compact(job, table, "all", 2)
    assert rows_of(table) == before and files_of(table) == files
    assert len(on_disk(table)) == len(files)


def test_a_kill_before_the_replacement_leaves_files_that_the_next_run_deletes(
    table: ArchiveTable, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, files = rows_of(table), files_of(table)

    def killed(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ArchiveTable, "replace", killed)
    with pytest.raises(KeyboardInterrupt), table.running("one"):
        compact(job, table, "all", 2)
    assert len(on_disk(table)) == len(files) + 2
    with ArchiveTable(table.place).running("two"):
        assert len(on_disk(table)) == len(files)
    assert rows_of(table) == before


def test_rows_can_be_left_out(table: ArchiveTable, job: Job) -> None:
    old = names_of(table)
    kept = rewritten(job, table, old, "kept", F.col("seq") >= 5)
    assert [row["seq"] for row in rows_of(table)] == list(range(20 * RUNS)), "they do not count yet"
    table.replace(old, kept)
    assert [row["seq"] for row in rows_of(table)] == list(range(5, 20 * RUNS))
    old = names_of(table)
    table.replace(old, rewritten(job, table, old, "none", F.lit(False)))
    assert rows_of(table) == [] and files_of(table) == []


def test_a_file_with_columns_of_others_is_left_as_it_is(
    table: ArchiveTable, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, files = rows_of(table), on_disk(table)
    filled = names_of(table)[0]

    def others_in(self: ArchiveTable, file: DataFile) -> list[int]:
        return [30] if self.place.name_of(file.file_path) == filled else []

    monkeypatch.setattr(ArchiveTable, "_others_in", others_in)
    with pytest.raises(PipelineError, match=r"holds columns of other programs .*number 30"):
        rewritten(job, table, names_of(table), "kept", F.col("seq") >= 5)
    assert sorted(on_disk(table)) == sorted(files)
    assert compact(job, table, "all", 2) == Compacted(2 * RUNS - 1, 2)
    assert filled in names_of(table)
    assert rows_of(table) == before


def test_a_file_that_cannot_be_read_stays_and_is_named(table: ArchiveTable, job: Job) -> None:
    path = Path(files_of(table)[0])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(PipelineError, match=f"stay as they are: {path} cannot be read"):
        compact(job, table, "all", 2)


def names_of(table: ArchiveTable) -> list[str]:
    return [table.place.name_of(path) for path in files_of(table)]


@pytest.fixture
def job(spark: SparkSession) -> Job:
    return Job(spark)
