"""The messages of an hour and their outcomes, with bodies: `spark.read.format("delayhistory")`.

    spark.read.format("delayhistory").load("/var/lib/delayserver").where("state = 'dead'").show()

A row is an entry of a retired hour: a message when it was published, and once more for each time it
was moved or tried again; `id` is the message's in all of them. Its deliveries stand in the row, one
per subscription. A directory of several shards is read as a whole.

    from, to, seq, subject, shard
                  the selection, see `logs.selection`
    damage        error (default): the read fails and names the place; rows: it becomes a row whose
                  column `_corrupt` names it, and whose others are null but for `shard` and `hour`:
                  such an hour is not whole
    hours         which hours, as `wanted_hours` writes them, each read just as far as it says; by
                  default all that are retired. Only for one shard: two have hours of the same
                  names. If an hour is open, its settled rows are read
    partitions    how many tasks at most, but for one of each shard; 2 per processor of this machine

Cost: in each task, the rows of its largest hour and one frame are in memory at a time.
Threads: Spark's tasks, one reader each.
"""

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass

import msgspec
import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from delayserver.errors import InputError
from delayserver.pipeline.logs.columns import (
    CORRUPT,
    CORRUPT_TYPE,
    PAYLOAD_TYPES,
    TIME,
    Names,
    batch_of_damage,
    name_table,
    named,
    named_subscriptions,
    payloads_of,
)
from delayserver.pipeline.logs.logs import LogPiece, read, share
from delayserver.pipeline.logs.options import Options, parse_options
from delayserver.pipeline.logs.selection import SELECTING, RowSelection, parse_selection
from delayserver.pipeline.states.entry_states import SETTLED_DTYPE, EntryState
from delayserver.pipeline.states.hour_files import read_hour
from delayserver.pipeline.states.named import read_names
from delayserver.pipeline.states.settlement import Judgement, KnownSubscriptions, settle
from delayserver.pipeline.states.snapshot import (
    Directory,
    read_subscriptions,
    wanted_directories,
)
from delayserver.records.arrow import binaries, fixed, text_maps, texts
from delayserver.records.ids import IdCodec
from delayserver.records.message import Content, Payload
from delayserver.records.subscriptions import Subscription
from delayserver.records.tables import Extent, HourState, read_checkpoint, read_hours, read_subjects
from delayserver.schedule.retired import retired_hours
from storage.buckets import bucket_path
from storage.errors import DamageError
from storage.frame import Damage, Frame, Rows
from storage.rows import FLAG_REMOVAL, HOUR_MS, SCHEDULE_DTYPE, LogKind, RecordKind

BATCH_ROWS = 8 * 1024
"""A small batch, because bodies may be long."""
DELIVERY = pa.struct(
    [
        ("subscription", pa.string()),
        ("state", pa.string()),
        ("attempt", pa.int32()),
        ("settled", TIME),
        ("lateness_ms", pa.int64()),
    ]
)
TYPES: dict[str, pa.DataType] = {
    "id": pa.string(),
    "subject": pa.string(),
    "key": pa.string(),
    "headers": PAYLOAD_TYPES["headers"],
    "body": pa.string(),
    "body_bytes": pa.binary(),
    "due": TIME,
    "filed": TIME,
    "made_by": pa.string(),
    "attempt": pa.int32(),
    "state": pa.string(),
    "deliveries": pa.list_(DELIVERY),
    "seq": pa.int64(),
    "message_seq": pa.int64(),
    "hour": pa.int32(),
    "shard": pa.int32(),
    CORRUPT: CORRUPT_TYPE,
}
"""The meaning of columns whose names do not tell it:

body          JSON text; null if the body is anything else, which is in body_bytes then
filed         when the entry was put into its hour: up to a second after it was accepted
made_by       publish, run (of a schedule), move, retry, redrive (of a dead letter), fire (by an
              event)
attempt       which attempt the entry is, from 1
state         delivered, cancelled, moved, retried, dead, dropped; if its deliveries differ, the
              last of these that occurs
deliveries    per subscription: state; for a delivery the attempt, when it was recorded, and
              how long after the due time
"""

_STATES = texts([None, *(state.name.lower() for state in EntryState)])
_OPTIONS = (*SELECTING, "hours", "damage", "partitions")
_KINDS = name_table({kind: kind.name.lower() for kind in RecordKind})


class WantedHour(msgspec.Struct, array_like=True, frozen=True):
    """An hour, and the part of its files that is read."""

    hour: int
    schedule_bytes: int
    dispatch_bytes: int
    last_seq: int
    count: int
    is_open: bool = False
    """Whether messages of it are not settled; these are left out."""

    @property
    def extent(self) -> Extent:
        return Extent(self.schedule_bytes, self.dispatch_bytes, self.last_seq)


def wanted_hours(hours: Iterable[WantedHour]) -> str:
    """The option `hours`."""
    return msgspec.json.encode(list(hours)).decode()


class DelayHistory(DataSource):
    """The messages of the retired hours of a data directory, and their outcomes."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self._parsed = parse_options("delayhistory", options, _OPTIONS)

    @classmethod
    def name(cls) -> str:
        return "delayhistory"

    def schema(self) -> StructType:
        wanted = dict(TYPES)
        if not self._parsed.damage_as_rows:
            del wanted[CORRUPT]
        return from_arrow_schema(pa.schema(list(wanted.items())))

    def reader(self, schema: StructType) -> "HistoryReader":
        self._parsed.check_columns(schema.names, TYPES)
        self._parsed.check_damage(schema.names)
        return HistoryReader(self._parsed, to_arrow_schema(schema, timezone="UTC"))


@dataclass(frozen=True, slots=True)
class HistoryHour:
    """An hour to read the history of, as the driver hands it to a task."""

    wanted: WantedHour
    state: HourState | None
    """The state in the catalog; None: the hour is gone, or differs from the wanted one."""


@dataclass
class HistoryTask(InputPartition):
    """The input of one task, and the tables that it judges by."""

    directory: Directory
    hours: list[HistoryHour]
    wanted: RowSelection
    subjects: dict[int, str]
    subscriptions: list[Subscription]
    names: Names
    checkpoint_seq: int


class HistoryReader(DataSourceReader):
    """Reads the rows, judges them, and puts them together."""

    def __init__(self, options: Options, schema: pa.Schema) -> None:
        self._options = options
        self._selection = parse_selection(options)
        self._damage_as_rows = options.damage_as_rows
        self._schema = schema

    def partitions(self) -> list[HistoryTask]:
        directories = wanted_directories(self._options.roots, self._selection.shards)
        wanted = self._wanted()
        if wanted is not None and len(directories) > 1:
            raise InputError(
                "the option hours of delayhistory is for one shard: give its directory"
            )
        each = max(1, self._options.partitions // len(directories))
        tasks: list[HistoryTask] = []
        for directory in directories:
            tasks += self._tasks(directory, wanted, each)
        return tasks

    def _tasks(
        self, directory: Directory, wanted: list[WantedHour] | None, partitions: int
    ) -> list[HistoryTask]:
        with directory.catalog() as catalog:
            if wanted is None:
                retired = retired_hours(catalog, directory.files)
                wanted = [WantedHour(one.hour, *one.extent, one.count) for one in retired]
            overlaps = self._selection.hours.overlaps
            wanted = [one for one in wanted if overlaps(one.hour, one.hour)]
            names = read_names(catalog, directory.shard)
            states = read_hours(catalog)
            hours = [HistoryHour(one, _as_wanted(one, states.get(one.hour))) for one in wanted]
            return [
                HistoryTask(
                    directory,
                    some,
                    self._selection.of_shard(names),
                    read_subjects(catalog),
                    list(read_subscriptions(catalog).values()),
                    names,
                    read_checkpoint(catalog),
                )
                for some in share(
                    hours,
                    [one.schedule_bytes + one.dispatch_bytes for one in wanted],
                    partitions,
                )
            ]

    def _wanted(self) -> list[WantedHour] | None:
        text = self._options.given.get("hours")
        if text is None:
            return None
        try:
            return msgspec.json.decode(text, type=list[WantedHour])
        except msgspec.DecodeError as error:
            raise InputError(f"the option hours of delayhistory cannot be read ({error})") from None

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """All wanted rows of a task's hours. Raises OtherNodeError."""
        if not isinstance(partition, HistoryTask):
            return  # Spark's own partition, where there is nothing to read.
        partition.directory.check_here()
        history = _History(partition, self._schema)
        for hour in partition.hours:
            try:
                yield from history.read(hour)
            except DamageError as error:
                damage = partition.directory.named(_as_damage(error))
                if not self._damage_as_rows:
                    raise damage.error() from error
                shard, number = partition.directory.shard, hour.wanted.hour
                yield batch_of_damage(damage, self._schema, shard=shard, hour=number)


def _as_damage(error: DamageError) -> Damage:
    return Damage(
        error.path,
        error.offset,
        error.offset,
        error.reason,
        torn=False,
        first_seq=error.first_seq,
        last_seq=error.last_seq,
    )


def _as_wanted(wanted: WantedHour, state: HourState | None) -> HourState | None:
    if state is None or bool(state.retired_ms) == wanted.is_open:
        return None
    known = (state.length, state.last_entry_seq, state.entries)
    return state if known == (wanted.schedule_bytes, wanted.last_seq, wanted.count) else None


class _History:
    """From the files of an hour to Arrow batches."""

    def __init__(self, task: HistoryTask, schema: pa.Schema) -> None:
        directory = task.directory
        self._directory = directory
        self._task = task
        self._schema = schema
        self._ids = IdCodec(directory.shard, directory.id_secret)
        known = {one.id: one for one in task.subscriptions}
        self._definitions = KnownSubscriptions(task.subjects, known)

    def read(self, hour: HistoryHour) -> Iterator[pa.RecordBatch]:
        """All entries of an hour. Raises DamageError."""
        wanted, number = hour.wanted, hour.wanted.hour
        path = bucket_path(LogKind.SCHEDULE, number)
        if hour.state is None:
            raise DamageError(path, 0, "the hour has changed since it was listed")
        settled = self._settled(hour, hour.state)
        piece = LogPiece(LogKind.SCHEDULE, path, 0, wanted.schedule_bytes, wanted.schedule_bytes)
        stamp, files = self._directory.stamp, self._directory.files
        for found in read(files, piece, stamp=stamp, payload=True):
            if isinstance(found, Damage):
                raise found.error()
            is_wanted = (found.rows["flags"] & FLAG_REMOVAL) == 0
            is_wanted &= self._task.wanted.mask(found.rows)
            if wanted.is_open:
                is_wanted &= np.isin(found.rows["seq"], _ended(settled))
            kept = np.flatnonzero(is_wanted)
            for start in range(0, len(kept), BATCH_ROWS):
                yield self._batch(number, found, kept[start : start + BATCH_ROWS], settled)

    def _settled(self, hour: HistoryHour, state: HourState) -> Rows:
        """The outcomes of the entries of an hour (SETTLED_DTYPE), in the order of seq."""
        wanted = hour.wanted
        rows, damage = read_hour(
            self._directory.files,
            wanted.hour,
            state,
            np.empty(0, SCHEDULE_DTYPE),
            stamp=self._directory.stamp,
            checkpoint_seq=self._task.checkpoint_seq,
            dispatch_bytes=wanted.dispatch_bytes,
        )
        if damage:
            raise damage[0].error()
        judgement = Judgement(
            through_seq=np.iinfo(np.int64).max,
            retired_through_seq=0 if wanted.is_open else wanted.last_seq,
            now_ms=(wanted.hour + 1) * HOUR_MS,
            definitions=self._definitions,
        )
        settled = np.concatenate([np.empty(0, SETTLED_DTYPE), *settle(rows, judgement)])
        return settled[np.argsort(settled["seq"], kind="stable")]

    def _batch(self, hour: int, frame: Frame, kept: np.ndarray, settled: Rows) -> pa.RecordBatch:
        """The entries of a frame at these indexes. Raises DamageError."""
        rows = frame.rows[kept]
        payloads: list[Payload] = []
        for seq, payload in zip(rows["seq"].tolist(), payloads_of(frame, rows), strict=True):
            if payload is None:
                raise DamageError(frame.path, frame.offset, "an entry has no payload", seq, seq)
            payloads.append(payload)
        firsts = np.searchsorted(settled["seq"], rows["seq"])
        lasts = np.searchsorted(settled["seq"], rows["seq"], side="right")
        bodies = [_text(payload) for payload in payloads]
        made: dict[str, Callable[[], pa.Array]] = {
            "id": lambda: texts(list(map(self._id, rows, payloads))),
            "subject": lambda: named(rows["subject_id"], self._task.names.subjects),
            "key": lambda: texts([payload.key for payload in payloads]),
            "headers": lambda: text_maps(
                [payload.headers for payload in payloads], TYPES["headers"]
            ),
            "body": lambda: texts(bodies),
            "body_bytes": lambda: binaries(
                [
                    payload.body if body is None else None
                    for payload, body in zip(payloads, bodies, strict=True)
                ],
                TYPES["body_bytes"],
            ),
            "due": lambda: fixed(rows["due_ms"] * 1000, TIME),
            "filed": lambda: fixed(
                np.full(len(rows), frame.header.created_ms * 1000, np.int64), TIME
            ),
            "made_by": lambda: _KINDS.take(fixed(rows["kind"])),
            "attempt": lambda: fixed(np.maximum(rows["attempt"], 1).astype(np.int32)),
            "state": lambda: _STATES.take(fixed(settled["entry_state"][firsts])),
            "deliveries": lambda: self._deliveries(settled, firsts, lasts),
            "seq": lambda: fixed(rows["seq"].astype(np.int64)),
            "message_seq": lambda: fixed(rows["message_seq"].astype(np.int64)),
            "hour": lambda: fixed(np.full(len(rows), hour, np.int32)),
            "shard": lambda: fixed(np.full(len(rows), self._directory.shard, np.int32)),
            CORRUPT: lambda: pa.nulls(len(rows), CORRUPT_TYPE),
        }
        arrays = [made[column.name]().cast(column.type) for column in self._schema]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _id(self, row: np.void, payload: Payload) -> str:
        origin = payload.origin
        due_ms = int(row["due_ms"]) if origin is None else origin.published_due_ms
        return self._ids.encode(due_ms, int(row["message_seq"]))

    def _deliveries(self, settled: Rows, firsts: np.ndarray, lasts: np.ndarray) -> pa.Array:
        """The outcome of each entry at its subscriptions; without rows that concern all of them."""
        start = int(firsts[0])
        some = settled[start : int(lasts[-1])]
        shown = (some["subscription_id"] != 0) | (some["state"] == EntryState.DROPPED)
        before = np.concatenate([[0], np.cumsum(shown)])
        offsets = np.append(before[firsts - start], before[int(lasts[-1]) - start])
        some = some[shown]
        delivered = fixed(some["state"] == EntryState.DELIVERED)
        at = fixed(some["settled_ms"] * 1000, TIME)
        columns = (
            named_subscriptions(some["subscription_id"], self._task.names.subscriptions),
            _STATES.take(fixed(some["state"])),
            pa.compute.if_else(delivered, fixed(some["attempt"].astype(np.int32)), pa.NULL),
            pa.compute.if_else(fixed(some["settled_ms"] != 0), at, pa.NULL),
            pa.compute.if_else(delivered, fixed(some["settled_ms"] - some["due_ms"]), pa.NULL),
        )
        structs = pa.StructArray.from_arrays(columns, fields=list(DELIVERY))
        return pa.ListArray.from_arrays(fixed(offsets.astype(np.int32)), structs)


def _ended(settled: Rows) -> np.ndarray:
    """The entries without an open delivery: their outcome does not change any more."""
    seqs: np.ndarray = settled["seq"][settled["entry_state"] < EntryState.PENDING]
    return seqs


def _text(payload: Payload) -> str | None:
    """The body as JSON text; None if it is something else."""
    if payload.content != Content.JSON:
        return None
    try:
        return payload.body.decode()
    except UnicodeDecodeError:
        return None
