"""The archive as a table of Spark: `spark.read.format("delayarchive").load("/srv/archive")`.

    spark.read.format("delayarchive").load("/srv/archive").where("state = 'dead'").show()

It is for sessions without Iceberg's own runtime: the driver plans by pyiceberg, each task reads its
files by pyarrow. A schema with fewer columns reads only these:
`spark.read.schema("id string, due timestamp")`. A `where` is Spark's.

    snapshot      which one, by its number; the newest by default
    files         a JSON list of files below the place, whether a snapshot names them or not
    partitions    how many tasks at most; 2 per processor of this machine

Cost: one batch of a file at a time in each task; a file from which another engine has deleted rows
is read as a whole. Threads: Spark's tasks, one reader each.
"""

import json
import re
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from delayserver.errors import InputError, PipelineError
from delayserver.pipeline.archive.place import ArchivePlace
from delayserver.pipeline.archive.rows import ROW_TYPES
from delayserver.pipeline.logs.logs import share
from delayserver.pipeline.logs.options import Options, parse_options

if TYPE_CHECKING:
    from pyiceberg.table import FileScanTask, Table

BATCH_ROWS = 8 * 1024
"""A small batch, because bodies may be long."""
_OPTIONS = ("snapshot", "files", "partitions")


class DelayArchive(DataSource):
    """The rows of an archive."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self._parsed = parse_options("delayarchive", options, _OPTIONS)
        if len(self._parsed.roots) != 1:
            raise InputError("delayarchive reads one archive at a time")

    @classmethod
    def name(cls) -> str:
        return "delayarchive"

    def schema(self) -> StructType:
        return from_arrow_schema(pa.schema(list(ROW_TYPES.items())))

    def reader(self, schema: StructType) -> "ArchiveReader":
        self._parsed.check_columns(schema.names, ROW_TYPES)
        return ArchiveReader(self._parsed, to_arrow_schema(schema, timezone="UTC"))


@dataclass
class ArchiveTask(InputPartition):
    """The input of one task: files as they stand, or a file less the rows deleted from it."""

    place: ArchivePlace
    names: list[str]
    table: "Table | None" = None
    with_deletes: "FileScanTask | None" = None


class ArchiveReader(DataSourceReader):
    """Plans the read by the table, and reads files."""

    def __init__(self, options: Options, schema: pa.Schema) -> None:
        self._place = ArchivePlace(options.roots[0])
        self._schema = schema
        self._partitions = options.partitions
        self._files = options.text("files")
        self._snapshot = options.number("snapshot", 0) or None

    def partitions(self) -> list[ArchiveTask]:
        if self._files is not None:
            names: list[str] = json.loads(self._files)
            return self._tasks(names, [1] * len(names))
        # Every session knows this source, and few need these modules, which take a second to
        # import.
        from delayserver.pipeline.archive.catalog import DirectoryCatalog

        table = DirectoryCatalog(self._place).find()
        if table is None:
            raise PipelineError(f"{self._place.url} holds no archive; is it the right path?")
        if self._snapshot is not None and table.snapshot_by_id(self._snapshot) is None:
            raise InputError(f"the archive has no snapshot {self._snapshot}")
        planned = list(table.scan(snapshot_id=self._snapshot).plan_files())
        plain = [task.file for task in planned if not task.delete_files]
        tasks = self._tasks(
            [self._place.name_of(file.file_path) for file in plain],
            [file.file_size_in_bytes for file in plain],
        )
        rest = [task for task in planned if task.delete_files]
        return tasks + [ArchiveTask(self._place, [], table, task) for task in rest]

    def _tasks(self, names: list[str], sizes: list[int]) -> list[ArchiveTask]:
        groups = share(names, sizes, self._partitions)
        return [ArchiveTask(self._place, some) for some in groups]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """All rows of a task's files. Raises DiskError."""
        if not isinstance(partition, ArchiveTask):
            return  # Spark's own partition, where there is nothing to read.
        for name in partition.names:
            for batch in read_file(partition.place, name, self._schema.names):
                yield self._cast(batch)
        if partition.table is not None and partition.with_deletes is not None:
            for batch in self._without_deleted(partition.table, partition.with_deletes):
                yield self._cast(batch)

    def _without_deleted(self, table: "Table", task: "FileScanTask") -> Iterator[pa.RecordBatch]:
        from pyiceberg.expressions import AlwaysTrue
        from pyiceberg.io.pyarrow import ArrowScan

        wanted = table.metadata.schema().select(*self._schema.names)
        return ArrowScan(table.metadata, table.io, wanted, AlwaysTrue()).to_record_batches([task])

    def _cast(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        columns = [batch[field.name].cast(field.type) for field in self._schema]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)


def read_file(place: ArchivePlace, name: str, columns: list[str]) -> Iterator[pa.RecordBatch]:
    """The rows of a file, some at a time. Raises DiskError, PipelineError."""
    try:
        with place.errors("read", name) as path, place.filesystem.open_input_file(path) as file:
            parquet = pq.ParquetFile(file)
            yield from parquet.iter_batches(BATCH_ROWS, columns=columns)
    except FileNotFoundError as error:
        seen = "; each node has to see the archive under this path" if place.is_local else ""
        raise PipelineError(
            f"{place.location(name)} cannot be read: it is not there{seen}"
        ) from error
    except pa.ArrowInvalid as error:
        raise PipelineError(f"{place.location(name)} cannot be read: {error}") from error


def said_of(error: Exception) -> str:
    """The message of a task about a file, without the place in the program."""
    said = _SAID.findall(str(error))
    return said[-1] if said else str(error).strip().partition("\n")[0]


_SAID = re.compile(r"^[\w.]+Error: (.+)$", re.MULTILINE)
