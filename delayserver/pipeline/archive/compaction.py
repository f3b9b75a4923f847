"""Compaction: small files of one partition of the table become few, in one snapshot.

Each run of the archive adds a file to each partition that it has rows for. If a partition has many
small files, they are read, sorted and written again, read back, and replaced. A reader of the table
sees the same rows before and after, and never a mixture. Older snapshots still name the old files;
when they are given up (`expire`), the files go with them.

Files from which another engine has deleted rows are left to that engine.

Cost: the small files are read twice and written once, COMPACT_BYTES at a time. Threads: the
caller's.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame

from delayserver.errors import PipelineError
from delayserver.pipeline.archive.rows import Sum, sum_columns, sum_of
from delayserver.pipeline.archive.source import said_of
from delayserver.pipeline.archive.table import ArchiveTable
from delayserver.pipeline.archive.writing import FILE_BYTES, WrittenFile, write_rows
from delayserver.pipeline.progress import Job

SMALL_BYTES = FILE_BYTES // 4
"""A file below this is small."""
COMPACT_BYTES = 1 << 30
MANY = 16
"""A partition with so many small files is compacted without an order."""


@dataclass(frozen=True, slots=True)
class Compacted:
    """The counts of a compaction."""

    files_before: int = 0
    files_after: int = 0

    def __add__(self, other: "Compacted") -> "Compacted":
        return Compacted(
            self.files_before + other.files_before, self.files_after + other.files_after
        )


def compact(job: Job, table: ArchiveTable, run: str, files_min: int = MANY) -> Compacted:
    """Compact the partitions that have so many small files or more.

    Raises PipelineError if the rows written differ from the rows read; the table is as before."""
    done = Compacted()
    for number, names in enumerate(_steps(table, files_min)):
        done += rewrite(job, table, names, f"{run}-compact-{number}")
    return done


def _steps(table: ArchiveTable, files_min: int) -> Iterator[list[str]]:
    """Files of whole partitions, so many at a time."""
    some: list[str] = []
    total_bytes = 0
    for group in table.small_files(SMALL_BYTES):
        if len(group) >= max(2, files_min):
            some += group
            total_bytes += sum(group.values())
        if total_bytes >= COMPACT_BYTES:
            yield some
            some, total_bytes = [], 0
    if some:
        yield some


def rewrite(job: Job, table: ArchiveTable, names: Sequence[str], run: str) -> Compacted:
    """Write the rows of some files into others, and put these in their place.

    Raises the PipelineError of `rewritten`; the table is as before then."""
    files = rewritten(job, table, names, run)
    table.replace(names, files)
    return Compacted(len(names), len(files))


def rewritten(
    job: Job, table: ArchiveTable, names: Sequence[str], run: str, kept: Column | None = None
) -> list[WrittenFile]:
    """Write the rows of some files into others, which do not count yet. `kept`: selects the rows.

    Raises PipelineError if a file holds columns of other programs or cannot be read, or if the rows
    written differ from the rows read."""
    table.refuse_others(names)
    layout, place = table.layout("", 0, {}), table.place
    files: list[WrittenFile] = []
    try:
        with job.step("rewriting files of the archive"):
            rows = _rows(job, table, names)
            rows = rows if kept is None else rows.where(kept)
            before = _sum(rows)
            files = write_rows(rows, place, layout, table.file_schema, run)
        with job.step("reading them back"):
            after = _sum(_rows(job, table, [file.name for file in files]))
    except (PySparkException, Py4JJavaError) as error:
        raise PipelineError(f"files of {place.url} stay as they are: {said_of(error)}") from error
    if after != before:
        for file in files:
            place.delete(file.name)
        raise PipelineError(
            f"files of {place.url} stay as they are: of {before.count} rows with checksum "
            f"{before.checksum}, {after.count} with {after.checksum} were read back; check the disk"
        )
    return files


def _rows(job: Job, table: ArchiveTable, names: Sequence[str]) -> DataFrame:
    reader = job.spark.read.format("delayarchive").option("files", json.dumps(names))
    return reader.load(table.place.given)


def _sum(rows: DataFrame) -> Sum:
    (row,) = rows.agg(*sum_columns()).collect()
    return sum_of(row) if row["count"] else Sum()
