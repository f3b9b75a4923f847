"""Rows to Parquet: each task writes those of its groups, in order, into files of bounded size.

    rows ─▶ by group, each in one task ─▶ sorted by due ─▶ cut at each group, and at FILE_BYTES

A group is the set of rows that may stand in one file (a partition of a table, or an hour). A
`Layout` says which group a row is in, and how its files are called. No row becomes an object:
batches of Arrow are put together to row groups, and written as they are.

A task reports its files as rows (`WrittenFile`). A file that is not reported counts for nothing.

Cost: one shuffle of all rows; in each task ROW_GROUP_BYTES of Arrow at a time. Threads: Spark's
tasks, one writer each.
"""

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark import TaskContext
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.functions import arrow_udf  # type: ignore[attr-defined]

from delayserver.pipeline.archive.place import ArchivePlace
from delayserver.pipeline.archive.rows import ROW_ORDER

FILE_BYTES = 256 << 20
"""Size of a file, compressed, after which another one begins, if the layout allows it."""
ROW_GROUP_BYTES = 64 << 20
"""Size of a row group, as Arrow."""
_GROUP = "__group"
_REPORT = "name string, group long, count long"


class Layout(Protocol):
    """How rows are spread over files. It is sent to the tasks."""

    def group(self) -> Column:
        """The number of the group that a row is in."""

    def name(self, group: int, task: str, number: int) -> str:
        """The name of a file, by its number in the task."""

    @property
    def may_cut(self) -> bool:
        """Whether a group may have several files."""


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file that was written."""

    name: str
    group: int
    count: int


def write_rows(
    rows: DataFrame, place: ArchivePlace, layout: Layout, schema: pa.Schema, run: str
) -> list[WrittenFile]:
    """Write rows, and return the files. `schema`: of the files, with the numbers of their fields;
    `run`: a name that no other run has."""
    grouped = rows.select(layout.group().cast("long").alias(_GROUP), *schema.names)
    ordered = grouped.repartition(_GROUP).sortWithinPartitions(_GROUP, *ROW_ORDER)
    task = WriterTask(place, layout, schema, run)
    found = ordered.mapInArrow(task.write, _REPORT).collect()
    return [WrittenFile(**row.asDict()) for row in found]


@dataclass(frozen=True, slots=True)
class WriterTask:
    """The work of a task on its rows. It is sent to the task as it is."""

    place: ArchivePlace
    layout: Layout
    schema: pa.Schema
    run: str

    def write(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write the rows, in order of their group."""
        context = TaskContext.get()
        # An earlier attempt of this task has files of another name.
        name = f"{self.run}-{context.partitionId() if context else 0}"
        name += f"-{context.taskAttemptId() if context else 0}"
        numbers = itertools.count()
        for group, some in itertools.groupby(_pieces(batches), key=lambda piece: piece[0]):
            for written in self._files(group, (batch for _, batch in some), name, numbers):
                yield pa.RecordBatch.from_pylist(
                    [{"name": written.name, "group": group, "count": written.count}]
                )

    def _files(
        self, group: int, batches: Iterator[pa.RecordBatch], task: str, numbers: Iterator[int]
    ) -> Iterator[WrittenFile]:
        row_groups = _gathered(batches)
        for first in row_groups:
            name = self.layout.name(group, task, next(numbers))
            count = 0
            with ExitStack() as cleanup:
                stream = cleanup.enter_context(self.place.writing(name))
                writer = cleanup.enter_context(
                    pq.ParquetWriter(stream, self.schema, compression="zstd")
                )
                for table in itertools.chain([first], row_groups):
                    writer.write_table(self._cast(table), row_group_size=len(table))
                    count += len(table)
                    if self.layout.may_cut and stream.tell() >= FILE_BYTES:
                        break
            yield WrittenFile(name, group, count)

    def _cast(self, table: pa.Table) -> pa.Table:
        columns = [table[field.name].cast(field.type) for field in self.schema]
        return pa.Table.from_arrays(columns, schema=self.schema)


def _pieces(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Each batch, cut where its group changes."""
    for batch in batches:
        groups = batch[_GROUP].to_numpy()
        starts = [0, *((groups[1:] != groups[:-1]).nonzero()[0] + 1).tolist(), len(groups)]
        for start, end in itertools.pairwise(starts):
            if end > start:
                yield int(groups[start]), batch.slice(start, end - start)


def _gathered(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """The batches of one row group at a time."""
    some: list[pa.RecordBatch] = []
    total_bytes = 0
    for batch in batches:
        some.append(batch)
        total_bytes += batch.nbytes
        if total_bytes >= ROW_GROUP_BYTES:
            yield pa.Table.from_batches(some)
            some, total_bytes = [], 0
    if some:
        yield pa.Table.from_batches(some)


def bucket_column(buckets: int, name: str) -> Column:
    """Which bucket of so many a text is in, as Iceberg computes it."""
    from pyiceberg.transforms import BucketTransform
    from pyiceberg.types import StringType

    def numbers(texts: pa.Array) -> pa.Array:
        number: Any = BucketTransform(buckets).transform(StringType())
        encoded = texts.dictionary_encode()
        known = pa.array([number(text) for text in encoded.dictionary.to_pylist()], pa.int32())
        return known.take(encoded.indices)

    column: Column = arrow_udf(numbers, "int")(F.col(name))
    return column
