"""The state of every message, as a table: `spark.read.format("delaystate")`.

    spark.read.format("delaystate").load("/var/lib/delayserver").groupBy("subject", "state").count()

A row is one schedule row at one subscription, with its state, as `settlement` computes it. If a
schedule row is for no subscription in particular, or not yet, there is one row without a
subscription. A row that is not settled has no time in `settled`. The table shows one moment, also
beside a running server (`snapshot`).

Damage ends the read, whichever of the rows are wanted, because the unknown rows in the damaged
place may be among them. Every read of any row of an hour finds the damage in the files of that
hour. Every read finds damage of the message log.

If a directory has several shards, all are read, each at a moment of its own within the read; the
column `shard` tells them apart.

    from, to, seq, subject, subscription, shard, state
                  the selection, see `logs.selection`
    damage        error (default): the read fails and names the place; rows: it becomes a row whose
                  column `_corrupt` names it, and whose others are null
    partitions    how many tasks at most, but for one of each shard; 2 per processor of this machine
    now_ms        the moment that decides whether a row is due; by default that of the read

Cost: about 1 µs per row; 80 bytes per row of the largest hour in each task.
Threads: Spark's tasks, one reader each.
"""

import time
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from delayserver.pipeline.logs.columns import (
    COMMON,
    CORRUPT,
    SETTLED,
    SUBJECT,
    BatchBuilder,
    Derived,
    LogColumns,
    Names,
    batch_of_damage,
    lateness_columns,
)
from delayserver.pipeline.logs.logs import share
from delayserver.pipeline.logs.options import Options, parse_options
from delayserver.pipeline.logs.selection import (
    SELECTING,
    RowSelection,
    parse_selection,
)
from delayserver.pipeline.states.entry_states import SETTLED_DTYPE, BrokenGuarantee, EntryState
from delayserver.pipeline.states.hour_files import read_hour
from delayserver.pipeline.states.named import names_of
from delayserver.pipeline.states.settlement import Judgement, KnownSubscriptions, settle
from delayserver.pipeline.states.snapshot import (
    Directory,
    StatesSnapshot,
    take_snapshot,
    wanted_directories,
)
from delayserver.pipeline.states.vanished import hours_instead, was_deleted
from delayserver.pipeline.workers import spare_imports
from delayserver.records.arrow import fixed, texts
from delayserver.records.subscriptions import Subscription
from delayserver.records.tables import HourState
from storage import buckets
from storage.buckets import bucket_path, is_day
from storage.files import Files, size_of
from storage.frame import Damage, Rows
from storage.rows import SCHEDULE_DTYPE, LogKind, select

_STATES = texts([None, *(state.name.lower() for state in EntryState)])
_PROBLEMS = {int(problem): problem.name.lower() for problem in BrokenGuarantee if problem.name}


def _problem_names(rows: Rows, names: Names) -> pa.Array:
    """The names of the problems of each row; null if there is none."""
    numbers, places = np.unique(rows["problems"], return_inverse=True)
    joined = [
        " ".join(name for bit, name in _PROBLEMS.items() if bit & number) or None
        for number in numbers.tolist()
    ]
    return texts(joined).take(fixed(places))


_DERIVED: Derived = {
    **COMMON,
    **SUBJECT,
    **SETTLED,
    "state": (pa.string(), lambda rows, names: _STATES.take(fixed(rows["state"]))),
    "state_code": (pa.int8(), lambda rows, names: fixed(rows["state"], pa.int8())),
    "problem": (pa.string(), _problem_names),
    **lateness_columns(lambda rows: rows["state"] == EntryState.DELIVERED),
}
COLUMNS = LogColumns(SETTLED_DTYPE, _DERIVED)
DEFAULT_COLUMNS = (
    "hour",
    "due",
    "subject",
    "subscription",
    "state",
    "lateness_ms",
    "attempt",
    "problem",
    "seq",
    "message_seq",
    "shard",
)
_OPTIONS = (*SELECTING, "subscription", "state", "damage", "partitions", "now_ms")
_STATE_NUMBERS = {state.name.lower(): int(state) for state in EntryState}


class DelayState(DataSource):
    """The state of every message of a data directory."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        spare_imports()
        self._parsed = parse_options("delaystate", options, _OPTIONS)

    @classmethod
    def name(cls) -> str:
        return "delaystate"

    def schema(self) -> StructType:
        names = [*DEFAULT_COLUMNS, CORRUPT] if self._parsed.damage_as_rows else DEFAULT_COLUMNS
        return from_arrow_schema(pa.schema([(name, COLUMNS.types[name]) for name in names]))

    def reader(self, schema: StructType) -> "StateReader":
        spare_imports()
        self._parsed.check_columns(schema.names, COLUMNS.types)
        self._parsed.check_damage(schema.names)
        return StateReader(self._parsed, to_arrow_schema(schema, timezone="UTC"))


@dataclass(frozen=True, slots=True)
class StateHour:
    """An hour, or a day that is far, to read the states of, as the driver hands it to a task."""

    number: int
    state: HourState
    retired_through_seq: int
    unfiled: Rows


@dataclass
class StateTask(InputPartition):
    """The input of one task, and the tables that it judges by."""

    directory: Directory
    hours: list[StateHour]
    wanted: RowSelection
    damage: list[Damage]
    through_seq: int
    checkpoint_seq: int
    now_ms: int
    subjects: dict[int, str]
    subscriptions: list[Subscription]
    names: Names


class StateReader(DataSourceReader):
    """Reads the hours, and judges them."""

    def __init__(self, options: Options, schema: pa.Schema) -> None:
        self._options = options
        self._selection = parse_selection(options, _STATE_NUMBERS)
        self._damage_as_rows = options.damage_as_rows
        self._schema = schema

    def partitions(self) -> list[StateTask]:
        now_ms = self._options.number("now_ms", time.time_ns() // 1_000_000)
        directories = wanted_directories(self._options.roots, self._selection.shards)
        each = max(1, self._options.partitions // len(directories))
        tasks: list[StateTask] = []
        for directory in directories:
            tasks += self._tasks(directory, now_ms, each)
        return tasks

    def _tasks(self, directory: Directory, now_ms: int, partitions: int) -> list[StateTask]:
        with directory.catalog() as catalog:
            snapshot = take_snapshot(directory.files, catalog, stamp=directory.stamp)
        hours = _hours(snapshot, self._selection.hours.overlaps)
        sizes = _sizes(directory.files, hours)
        names = names_of(snapshot.subjects, snapshot.subscriptions, directory.shard)
        wanted = self._selection.of_shard(names)
        return [
            StateTask(
                directory,
                some,
                wanted,
                snapshot.damage if number == 0 else [],
                snapshot.through_seq,
                snapshot.checkpoint_seq,
                now_ms,
                snapshot.subjects,
                list(snapshot.subscriptions.values()),
                names,
            )
            for number, some in enumerate(share(hours, sizes, partitions))
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The states in the hours of a task, and the damage among them. Raises OtherNodeError."""
        spare_imports()
        if not isinstance(partition, StateTask):
            return  # Spark's own partition, where there is nothing to read.
        directory = partition.directory
        directory.check_here()
        batches = BatchBuilder(COLUMNS, self._schema, partition.names)
        yield from self._damaged(directory, partition.damage)
        for hour in partition.hours:
            for found in _settle(directory, hour, partition):
                if isinstance(found, Damage):
                    yield from self._damaged(directory, [found])
                    continue
                keep = partition.wanted.mask(found)
                yield from batches.add(found if keep.all() else select(found, keep))
            yield from batches.rest()

    def _damaged(self, directory: Directory, damage: Iterable[Damage]) -> Iterator[pa.RecordBatch]:
        for found in map(directory.named, damage):
            if not self._damage_as_rows:
                raise found.error()
            yield batch_of_damage(found, self._schema, shard=directory.shard)


def _hours(snapshot: StatesSnapshot, wanted: Callable[[int, int], bool]) -> list[StateHour]:
    nothing = np.empty(0, SCHEDULE_DTYPE)
    return [
        StateHour(
            number, state, snapshot.retired.get(number, 0), snapshot.unfiled.get(number, nothing)
        )
        for number, state in sorted(snapshot.hours.items())
        if wanted(buckets.hours_of(number)[0], buckets.hours_of(number)[-1])
    ]


def _sizes(files: Files, hours: list[StateHour]) -> list[int]:
    """About how much work each hour is: rows of both logs."""
    return [
        hour.state.entries
        + hour.state.removals
        + len(hour.unfiled)
        + size_of(files, bucket_path(LogKind.DISPATCH, hour.number)) // 40
        for hour in hours
    ]


def _settle(directory: Directory, hour: StateHour, task: StateTask) -> Iterator[Rows | Damage]:
    """The damage of an hour, and then the states of its other rows."""
    rows, damage = read_hour(
        directory.files,
        hour.number,
        hour.state,
        hour.unfiled,
        stamp=directory.stamp,
        checkpoint_seq=task.checkpoint_seq,
    )
    if damage and hour.state.length and was_deleted(directory, hour.number):
        for part in _split(directory, hour) if is_day(hour.number) else ():
            yield from _settle(directory, part, task)
        return
    yield from damage
    judgement = Judgement(
        through_seq=task.through_seq,
        retired_through_seq=hour.retired_through_seq,
        now_ms=task.now_ms,
        definitions=KnownSubscriptions(task.subjects, {one.id: one for one in task.subscriptions}),
    )
    yield from settle(rows, judgement)


def _split(directory: Directory, day: StateHour) -> Iterator[StateHour]:
    """The hours that a day has become meanwhile."""
    for hour, state, unfiled in hours_instead(directory, day.number, day.unfiled):
        yield StateHour(hour, state, day.retired_through_seq, unfiled)
