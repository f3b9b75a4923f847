"""The logs of a data directory as tables: `spark.read.format("delaylog")`.

    spark.dataSource.register(DelayLog)
    spark.read.format("delaylog").option("log", "schedule").load("/var/lib/delayserver")

Its options:

    log                 schedule (default), message, dispatch
    damage              error (default): the read fails and names the place; rows: it becomes a row
                        whose column `_corrupt` names it, and intact rows are read
    payload             true: with the columns key, headers, content and body
    from, to, seq, subject, subscription, shard
                        the selection, see `selection`; also of a stream
    partitions          how many tasks at most, but for one of each shard; 2 per processor of this
                        machine
    startingOffsets     of a stream: earliest (default), latest
    maxRowsPerTrigger   of a stream: how many rows a micro-batch has at most, to whole frames, as
                        many of each shard; the hours of a shard come in their order then, also of
                        a first read of everything

Columns are not pruned: a reader knows only its schema. So a query that needs a few columns says so:
`.schema("seq long, due_ms long, subject string")`. Every column in `columns.log_types` can be asked
for. A selection picks files by due time, files and frames by seq, directories by shard, and rows by
all of it, before anything is handed to Spark.

A directory of several shards is read as a whole. Each shard counts by itself: `shard` and `seq`
tell a row apart from all others, `shard` and `message_seq` a message.

A stream has one offset per file, the end of the last whole frame; in the schedule log, the end of
the filed part. An hour that the server deletes after its retention is gone for a stream, too. A
repair (`delayserver repair`) writes files anew: begin with a new checkpoint then.

Cost: columns at about the rate of Parquet; a payload 1 µs. Threads: Spark's tasks, one reader each.
"""

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from delayserver.pipeline.logs import logs
from delayserver.pipeline.logs.columns import (
    BATCH_ROWS,
    LOGS,
    BatchBuilder,
    Names,
    batch_of_damage,
    batch_of_frame,
    default_columns,
    log_types,
    needs_payload,
    needs_subjects,
)
from delayserver.pipeline.logs.dispatched import Subjects
from delayserver.pipeline.logs.logs import LogPiece
from delayserver.pipeline.logs.options import Options, parse_options
from delayserver.pipeline.logs.selection import (
    SELECTING,
    RowSelection,
    Selection,
    parse_selection,
)
from delayserver.pipeline.states.named import read_names
from delayserver.pipeline.states.snapshot import Directory, wanted_directories
from delayserver.pipeline.workers import spare_imports
from delayserver.records.tables import read_hours
from storage.buckets import is_day, parse_bucket_file
from storage.frame import Damage, Frame
from storage.rows import LogKind, select

_OPTIONS = (
    "log",
    "damage",
    "payload",
    *SELECTING,
    "subscription",
    "partitions",
    "startingOffsets",
    "maxRowsPerTrigger",
)


class DelayLog(DataSource):
    """One log of a data directory."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        spare_imports()
        self._options = _LogOptions(parse_options("delaylog", options, _OPTIONS))

    @classmethod
    def name(cls) -> str:
        return "delaylog"

    def schema(self) -> StructType:
        wanted = self._options
        known = log_types(wanted.kind)
        names = default_columns(wanted.kind, payload=wanted.payload, corrupt=wanted.damage_as_rows)
        return from_arrow_schema(pa.schema([(name, known[name]) for name in names]))

    def reader(self, schema: StructType) -> "LogReader":
        spare_imports()
        return LogReader(self._options, self._options.checked(schema))

    def streamReader(self, schema: StructType) -> "LogStreamReader":
        return LogStreamReader(self._options, self._options.checked(schema))


class _LogOptions:
    """The options of `delaylog`. Raises InputError."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self.roots = options.roots
        self.selection = parse_selection(options)
        self.partitions = options.partitions
        self.kind = LogKind[options.choice("log", "schedule", "message", "dispatch").upper()]
        self.damage_as_rows = options.damage_as_rows
        self.payload = options.choice("payload", "false", "true") == "true"
        self.from_latest = options.choice("startingOffsets", "earliest", "latest") == "latest"
        self.rows_max = options.number("maxRowsPerTrigger", 0)

    def checked(self, schema: StructType) -> pa.Schema:
        """The schema that was asked for. Raises InputError."""
        self._options.check_columns(schema.names, log_types(self.kind))
        self._options.check_damage(schema.names)
        return to_arrow_schema(schema, timezone="UTC")


@dataclass
class LogTask(InputPartition):
    """The input of one task."""

    directory: Directory
    pieces: list[LogPiece]
    wanted: RowSelection
    names: Names
    filed: dict[int, int] | None
    """For each hour, the length of its schedule log; None: subjects need not be looked up."""


class _Reading:
    """The common part of batches and streams: from pieces of files to Arrow batches."""

    def __init__(self, options: _LogOptions, schema: pa.Schema) -> None:
        self._options = options
        self._schema = schema
        self._payload = needs_payload(schema.names)

    def _directories(self) -> list[Directory]:
        return wanted_directories(self._options.roots, self._options.selection.shards)

    def _tasks(
        self, directory: Directory, pieces: list[LogPiece], partitions: int
    ) -> list[LogTask]:
        selection = self._options.selection
        wanted = {*self._schema.names, *selection.columns}
        names, filed = Names(shard=directory.shard), None
        if wanted & {"subject", "subscription"} or needs_subjects(self._options.kind, wanted):
            with directory.catalog() as catalog:
                names = read_names(catalog, directory.shard)
                if needs_subjects(self._options.kind, wanted):
                    filed = {hour: state.length for hour, state in read_hours(catalog).items()}
        groups = logs.plan(
            directory.files,
            pieces,
            stamp=directory.stamp,
            partitions=partitions,
            seqs=selection.seqs,
            bytes_min=logs.PARTITION_BYTES_MIN if self._payload else logs.COLUMNS_BYTES_MIN,
        )
        of_shard = selection.of_shard(names)
        return [LogTask(directory, group, of_shard, names, filed) for group in groups]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The wanted rows of a task, and the damage among them. Raises OtherNodeError."""
        spare_imports()
        if not isinstance(partition, LogTask):
            return  # Spark's own partition, where there is nothing to read.
        directory = partition.directory
        directory.check_here()
        files, stamp = directory.files, directory.stamp
        batches = BatchBuilder(LOGS[self._options.kind], self._schema, partition.names)
        subjects = None
        if partition.filed is not None:
            subjects = Subjects(
                files,
                stamp,
                partition.filed,
                tells_damage=partition.wanted.subject_ids is not None,
            )
        for piece in partition.pieces:
            items = logs.read(files, piece, stamp=stamp, payload=self._payload)
            for found in items if subjects is None else subjects.added_to(items):
                if isinstance(found, Damage):
                    named = directory.named(found)
                    if not self._options.damage_as_rows:
                        raise named.error()
                    yield batch_of_damage(named, self._schema, shard=directory.shard)
                elif self._payload:
                    yield from self._with_payload(found, partition)
                else:
                    keep = partition.wanted.mask(found.rows)
                    yield from batches.add(found.rows if keep.all() else select(found.rows, keep))
        yield from batches.rest()

    def _with_payload(self, frame: Frame, task: LogTask) -> Iterator[pa.RecordBatch]:
        kept = np.flatnonzero(task.wanted.mask(frame.rows))
        for start in range(0, len(kept), BATCH_ROWS):
            some = kept[start : start + BATCH_ROWS]
            yield batch_of_frame(frame, some, self._schema, task.names)


class LogReader(_Reading, DataSourceReader):
    """Reads the rows that are there."""

    def partitions(self) -> list[LogTask]:
        directories = self._directories()
        each = self._options.partitions // len(directories)
        tasks: list[LogTask] = []
        for directory in directories:
            pieces = _pieces(self._options.kind, directory, self._options.selection)
            tasks += self._tasks(directory, pieces, each)
        return tasks


def _pieces(kind: LogKind, directory: Directory, selection: Selection) -> list[LogPiece]:
    match kind:
        case LogKind.MESSAGE:
            return logs.message_pieces(directory.files, selection.seqs)
        case LogKind.SCHEDULE:
            with directory.catalog() as catalog:
                return logs.schedule_pieces(read_hours(catalog), selection.hours)
        case _:
            assert kind is LogKind.DISPATCH, kind
            return logs.dispatch_pieces(directory.files, selection.hours)


def _bucket_of(piece: LogPiece) -> int:
    bucket = parse_bucket_file(piece.kind, piece.path.rpartition("/")[2])
    assert bucket is not None, piece
    return bucket


class LogStreamReader(_Reading, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads the rows that are there, and then new ones."""

    def __init__(self, options: _LogOptions, schema: pa.Schema) -> None:
        super().__init__(options, schema)
        self._last: dict[str, int] | None = None
        """The end of the stream, if it has one."""

    def prepareForTriggerAvailableNow(self) -> None:
        self._last = self._ends({})

    def initialOffset(self) -> dict[str, int]:
        return self._ends({}) if self._options.from_latest else {}

    def getDefaultReadLimit(self) -> ReadLimit:
        rows_max = self._options.rows_max
        return ReadMaxRows(rows_max) if rows_max else ReadAllAvailable()

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:
        last = self._ends(start) if self._last is None else self._last
        ends = {path: max(end, start.get(path, 0)) for path, end in last.items()}
        return (
            self._limited(start, ends, limit.max_rows) if isinstance(limit, ReadMaxRows) else ends
        )

    def _limited(
        self, start: dict[str, int], ends: dict[str, int], rows_max: int
    ) -> dict[str, int]:
        """So many rows, file by file, the same number from each shard: none waits for another."""
        directories = self._directories()
        for directory in directories:
            rest = -(-rows_max // len(directories))
            for path, end in _of(directory, ends).items():
                name = f"{directory.prefix}{path}"
                piece = LogPiece(self._options.kind, path, start.get(name, 0), end)
                ends[name], count = logs.rows_end(
                    directory.files, piece, stamp=directory.stamp, rows_max=rest
                )
                rest -= count
        return ends

    def _ends(self, start: dict[str, int]) -> dict[str, int]:
        """Where the last whole frame of each file ends, behind the part that was read."""
        return {
            f"{directory.prefix}{path}": end
            for directory in self._directories()
            for path, end in self._ends_of(directory, _of(directory, start)).items()
        }

    def _ends_of(self, directory: Directory, start: dict[str, int]) -> dict[str, int]:
        pieces = _pieces(self._options.kind, directory, self._options.selection)
        if self._options.kind is LogKind.SCHEDULE:
            # The rows of a day come when it has become its hours, so that each row comes once.
            return {piece.path: piece.end for piece in pieces if not is_day(_bucket_of(piece))}
        ends = {}
        for piece in pieces:
            begin = start.get(piece.path, 0)
            unread = replace(piece, start=begin, end=max(begin, piece.end))
            ends[piece.path] = logs.whole_end(directory.files, unread, stamp=directory.stamp)
        return ends

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[LogTask]:
        directories = self._directories()
        tasks: list[LogTask] = []
        for directory in directories:
            read = _of(directory, start)
            pieces = [
                LogPiece(self._options.kind, path, read.get(path, 0), stop, promised_end=stop)
                for path, stop in _of(directory, end).items()
                if stop > read.get(path, 0)
            ]
            if pieces:
                each = self._options.partitions // len(directories)
                tasks += self._tasks(directory, pieces, each)
        return tasks


def _of(directory: Directory, offsets: dict[str, int]) -> dict[str, int]:
    """The ends for the files of one directory, by their paths in it."""
    prefix = directory.prefix
    return {
        name.removeprefix(prefix): offset
        for name, offset in offsets.items()
        if name.startswith(prefix)
    }
