"""The archive as a source of Spark, planned and read here without a session."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.table import FileScanTask
from pyiceberg.typedef import Record
from pyspark.sql.pandas.types import from_arrow_schema

from delayserver.errors import InputError, PipelineError
from delayserver.pipeline.archive.place import ArchivePlace
from delayserver.pipeline.archive.source import ArchiveReader, ArchiveTask, DelayArchive
from delayserver.pipeline.archive.table import ArchiveTable
from tests.pipeline.archive.made import HOUR, made_file

SEQ = from_arrow_schema(pa.schema([("seq", pa.int64())]))


@pytest.fixture
def table(tmp_path: Path) -> ArchiveTable:
    """Two snapshots: of seqs up to 10, and up to 15."""
    table = ArchiveTable(ArchivePlace(str(tmp_path / "archive")))
    table.add([made_file(table, range(10))], [])
    table.add([made_file(table, range(10, 15), hour=HOUR + 24)], [])
    return table


def reader_of(table: ArchiveTable, **options: str) -> ArchiveReader:
    given: Mapping[str, str] = {"path": table.place.url, **options}
    return DelayArchive(dict(given)).reader(SEQ)


def seqs_of(reader: ArchiveReader, tasks: list[ArchiveTask] | None = None) -> list[int]:
    planned = reader.partitions() if tasks is None else tasks
    return sorted(
        seq for task in planned for batch in reader.read(task) for seq in batch["seq"].to_pylist()
    )


def test_the_newest_snapshot_or_one_that_is_named(table: ArchiveTable) -> None:
    assert table.current is not None
    first, second = table.current.snapshots()
    assert seqs_of(reader_of(table)) == list(range(15))
    assert seqs_of(reader_of(table, snapshot=str(first.snapshot_id))) == list(range(10))
    assert seqs_of(reader_of(table, snapshot=str(second.snapshot_id))) == list(range(15))
    with pytest.raises(InputError, match="no snapshot 5"):
        reader_of(table, snapshot="5").partitions()


def test_files_that_are_named_whether_they_count_or_not(table: ArchiveTable) -> None:
    unnamed = made_file(table, range(90, 93))
    assert seqs_of(reader_of(table, files=json.dumps([unnamed.name]))) == [90, 91, 92]
    assert seqs_of(reader_of(table, files="[]")) == []


def test_tasks_are_no_more_than_asked_for(table: ArchiveTable) -> None:
    assert len(reader_of(table, partitions="1").partitions()) == 1
    assert len(reader_of(table, partitions="8").partitions()) == 2


def test_what_another_engine_has_deleted_is_left_out(table: ArchiveTable) -> None:
    """By positions in a file, as Spark and Trino do it."""
    assert table.current is not None
    (task, _) = sorted(table.current.scan().plan_files(), key=lambda one: -one.file.record_count)
    schema = pa.schema(
        [
            pa.field("file_path", pa.string(), False, {"PARQUET:field_id": "2147483546"}),
            pa.field("pos", pa.int64(), False, {"PARQUET:field_id": "2147483545"}),
        ]
    )
    rows = pa.table([[task.file.file_path] * 2, [3, 7]], schema=schema)
    path = Path(table.place.path("data/deletes.parquet"))
    pq.write_table(rows, path)
    deletes = DataFile.from_args(
        content=DataFileContent.POSITION_DELETES,
        file_path=str(path),
        file_format=FileFormat.PARQUET,
        partition=Record(),
        record_count=2,
        file_size_in_bytes=path.stat().st_size,
    )
    with_deletes = FileScanTask(task.file, {deletes})
    tasks = [ArchiveTask(table.place, [], table.current, with_deletes)]
    assert seqs_of(reader_of(table), tasks) == [0, 1, 2, 4, 5, 6, 8, 9]


def test_what_cannot_be_read_is_named(table: ArchiveTable, tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="holds no archive"):
        reader_of(ArchiveTable(ArchivePlace(str(tmp_path)))).partitions()
    with pytest.raises(InputError, match="one archive"):
        DelayArchive({"paths": json.dumps(["/a", "/b"])})
    with pytest.raises(InputError, match="no column 'seqs'"):
        DelayArchive({"path": "/a"}).reader(from_arrow_schema(pa.schema([("seqs", pa.int64())])))
    reader = reader_of(table)
    tasks = reader.partitions()
    for task in tasks:
        for name in task.names:
            table.place.delete(name)
    with pytest.raises(PipelineError, match=r"parquet cannot be read"):
        seqs_of(reader, tasks)


def test_a_session_does_without_what_the_table_needs() -> None:
    program = "import sys, delayserver.pipeline.session; sys.exit('pyiceberg' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
