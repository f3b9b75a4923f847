"""Rows as Arrow columns: the fixed-width ones as they stand, and columns derived from them.

    as FORMAT.md has them     seq, due_ms, message_seq, subject_id, subscription_id, kind, …
    derived                   hour, due, settled (timestamps), subject, subscription (names)
    of the directory          shard: only with it a seq, or the number of a name, is one of a kind
    of the dispatch log       lateness_ms, lateness_bucket; subject, looked up (`dispatched`)
    from the payload          key, headers, content, body

Only the columns that are asked for are made. Unsigned columns become signed ones of the same width,
since Spark has no others; no value that a server writes is that large.

Cost: one strided copy per column, about 2 ns per row; a payload about 1 µs per row.
Threads: pure functions.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from delayserver.pipeline.logs.dispatched import DISPATCHED_DTYPE
from delayserver.pipeline.reports.lateness import bucket_of
from delayserver.records.arrow import binaries, fixed, text_maps, texts
from delayserver.records.direct import DIRECT_FIRST_ID, DIRECT_NAME
from delayserver.records.message import Payload, decode_payload
from storage.frame import Damage, Frame, Rows
from storage.rows import DTYPES, HOUR_MS, SCHEDULES, LogKind, Outcome, concatenate, select

CORRUPT = "_corrupt"
"""The column that names a damaged stretch, in a row whose other columns are null."""
TIME = pa.timestamp("us", tz="UTC")
BATCH_ROWS = 128 * 1024
BATCH_ROWS_MIN = 16 * 1024
"""Fewer rows than this wait for more, since each batch costs Spark about 0.2 ms."""

CORRUPT_TYPE = pa.struct(
    [
        ("file", pa.string()),
        ("offset", pa.int64()),
        ("end", pa.int64()),
        ("reason", pa.string()),
        ("first_seq", pa.int64()),
        ("last_seq", pa.int64()),
    ]
)


CORRUPT_DDL = f"""{CORRUPT} struct<file: string, offset: long, end: long, reason: string,
    first_seq: long, last_seq: long>"""
"""The type of that column, in Spark's own words."""


def name_table(names: Mapping[int, str]) -> pa.Array:
    """Names by their numbers; null if there is none."""
    return texts([names.get(number) for number in range(max(names, default=0) + 1)])


@dataclass(frozen=True, slots=True)
class Names:
    """The names for the numbers in the logs of a shard."""

    subjects: pa.Array = field(default_factory=lambda: name_table({}))
    subscriptions: pa.Array = field(default_factory=lambda: name_table({}))
    shard: int = 0


def _as(kind: pa.DataType) -> tuple[pa.DataType, Callable[[np.ndarray], pa.Array]]:
    return kind, lambda column: fixed(column, kind)


def _hashes(column: np.ndarray) -> pa.Array:
    data = np.ascontiguousarray(column).view(np.uint8)
    length = column.dtype.itemsize
    array = pa.Array.from_buffers(pa.binary(length), len(column), [None, pa.py_buffer(data)])
    return array.cast(pa.binary())


_SIGNED: dict[np.dtype, tuple[pa.DataType, Callable[[np.ndarray], pa.Array]]] = {
    np.dtype("<u8"): _as(pa.int64()),
    np.dtype("<i8"): _as(pa.int64()),
    np.dtype("<u4"): _as(pa.int32()),
    np.dtype("<u2"): (pa.int32(), lambda column: fixed(column.astype(np.int32))),
    np.dtype("u1"): _as(pa.int8()),
    np.dtype("?"): _as(pa.bool_()),
    np.dtype("V16"): (pa.binary(), _hashes),
}

Derive = Callable[[Rows, Names], pa.Array]
Derived = Mapping[str, tuple[pa.DataType, Derive]]


class LogColumns:
    """The columns of one kind of rows: those of its dtype, and derived ones."""

    def __init__(self, dtype: np.dtype[np.void], derived: Derived) -> None:
        self._dtype = dtype
        self._derived = derived
        self.stored = tuple(name for name in dtype.names or () if name not in derived)
        self.types: dict[str, pa.DataType] = {
            **{name: _SIGNED[dtype[name]][0] for name in self.stored},
            **{name: made_type for name, (made_type, _) in derived.items()},
            CORRUPT: CORRUPT_TYPE,
        }

    def array(self, rows: Rows, name: str, names: Names) -> pa.Array:
        """One column."""
        if name in self._derived:
            return self._derived[name][1](rows, names)
        if name == CORRUPT:
            return pa.nulls(len(rows), CORRUPT_TYPE)
        return _SIGNED[self._dtype[name]][1](rows[name])

    def batch(self, rows: Rows, schema: pa.Schema, names: Names) -> pa.RecordBatch:
        """Rows as an Arrow batch of that schema."""
        arrays = [self.array(rows, column.name, names).cast(column.type) for column in schema]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)


class BatchBuilder:
    """Collects rows until there are enough for a batch, because frames may be small. The rows of a
    frame that is large enough by itself are not copied."""

    def __init__(self, columns: LogColumns, schema: pa.Schema, names: Names) -> None:
        self._columns = columns
        self._schema = schema
        self._names = names
        self._parts: list[Rows] = []
        self._count = 0

    def add(self, rows: Rows) -> Iterator[pa.RecordBatch]:
        """Take rows; returns the batches that are full."""
        self._parts.append(rows)
        self._count += len(rows)
        if self._count >= BATCH_ROWS_MIN:
            yield from self.rest()

    def rest(self) -> Iterator[pa.RecordBatch]:
        """The last batch, of all rows that wait."""
        if not self._count:
            return
        first, *others = self._parts
        rows = concatenate(self._parts, first.dtype) if others else first
        self._parts, self._count = [], 0
        for start in range(0, len(rows), BATCH_ROWS):
            some = rows[start : start + BATCH_ROWS]
            yield self._columns.batch(some, self._schema, self._names)


def batch_of_damage(
    damage: Damage, schema: pa.Schema, *, shard: int, hour: int | None = None
) -> pa.RecordBatch:
    """One row that names a damaged stretch, and the shard and the hour it is of."""
    value = {name: getattr(damage, name) for name in ("offset", "end", "reason")}
    value |= {"file": damage.path, "first_seq": damage.first_seq, "last_seq": damage.last_seq}
    known = {CORRUPT: value, "shard": shard, "hour": hour}
    row = {column.name: known.get(column.name) for column in schema}
    return pa.RecordBatch.from_pylist([row], schema=schema)


# ── derived columns ────────────────────────────────────────────────────────────────────────────


def named(numbers: np.ndarray, names: pa.Array) -> pa.Array:
    """Names in place of numbers; null if there is none."""
    return names.take(fixed(np.where(numbers < len(names), numbers, 0)))


def named_subscriptions(numbers: np.ndarray, names: pa.Array) -> pa.Array:
    """Names of subscriptions; all numbers of direct messages (`to`) have one name."""
    is_to = numbers >= DIRECT_FIRST_ID
    # pandas, which a worker does not import, would look at a Python string.
    return pc.if_else(fixed(is_to), texts([DIRECT_NAME])[0], named(numbers, names))


COMMON: Derived = {
    "shard": (
        pa.int32(),
        lambda rows, names: fixed(np.full(len(rows), names.shard, np.int32)),
    ),
    "hour": (
        pa.int32(),
        lambda rows, names: fixed((rows["due_ms"] // HOUR_MS).astype(np.int32)),
    ),
    "due": (TIME, lambda rows, names: fixed(rows["due_ms"] * 1000, TIME)),
    "subscription": (
        pa.string(),
        lambda rows, names: named_subscriptions(rows["subscription_id"], names.subscriptions),
    ),
}
SUBJECT: Derived = {
    "subject": (pa.string(), lambda rows, names: named(rows["subject_id"], names.subjects))
}


def _settled(rows: Rows, names: Names) -> pa.Array:
    moments = fixed(rows["settled_ms"] * 1000, TIME)
    return pc.if_else(fixed(rows["settled_ms"] != 0), moments, pa.NULL)


SETTLED: Derived = {"settled": (TIME, _settled)}
"""Null where no time is recorded."""


def lateness_columns(is_delivered: Callable[[Rows], np.ndarray]) -> Derived:
    """How late each delivery came; null, and -1 for its bucket, for the other rows."""

    def lateness_ms(rows: Rows, names: Names) -> pa.Array:
        lateness = fixed(rows["settled_ms"] - rows["due_ms"])
        return pc.if_else(fixed(is_delivered(rows)), lateness, pa.NULL)

    def bucket(rows: Rows, names: Names) -> pa.Array:
        buckets = bucket_of(rows["settled_ms"] - rows["due_ms"])
        return fixed(np.where(is_delivered(rows), buckets, -1).astype(np.int32))

    return {"lateness_ms": (pa.int64(), lateness_ms), "lateness_bucket": (pa.int32(), bucket)}


# ── the logs ───────────────────────────────────────────────────────────────────────────────────

LOGS = {
    LogKind.MESSAGE: LogColumns(DTYPES[LogKind.MESSAGE], {**COMMON, **SUBJECT}),
    LogKind.SCHEDULE: LogColumns(DTYPES[LogKind.SCHEDULE], {**COMMON, **SUBJECT}),
    LogKind.DISPATCH: LogColumns(
        DISPATCHED_DTYPE,
        {
            **COMMON,
            **SUBJECT,
            **SETTLED,
            **lateness_columns(lambda rows: rows["outcome"] == Outcome.DELIVERED),
        },
    ),
}
PAYLOAD_TYPES = {
    "key": pa.string(),
    "headers": pa.map_(pa.string(), pa.string()),
    "content": pa.int8(),
    "body": pa.binary(),
}
_UNSHOWN = ("payload_offset", "payload_crc", "key_hash")
"""Not in the default schema: of use only to a reader that asks for them."""
_LOOKED_UP = ("subject", "subject_id")
"""Not in the default schema of the dispatch log: they cost a pass over the schedule log."""


def log_types(kind: LogKind) -> dict[str, pa.DataType]:
    """Every column that a log has, and its type."""
    return LOGS[kind].types | ({} if kind is LogKind.DISPATCH else PAYLOAD_TYPES)


def default_columns(kind: LogKind, *, payload: bool, corrupt: bool) -> list[str]:
    """The columns of a log for a read that names none."""
    unshown = _UNSHOWN + (_LOOKED_UP if kind is LogKind.DISPATCH else ())
    derived = ("due", "settled", "subject", "subscription", "shard")
    known = (*LOGS[kind].stored, *(name for name in derived if name in LOGS[kind].types))
    found = [name for name in known if name not in unshown]
    if payload and kind is not LogKind.DISPATCH:
        found += PAYLOAD_TYPES
    return [*found, CORRUPT] if corrupt else found


def needs_payload(columns: Collection[str]) -> bool:
    """Whether any of the columns stands in the payloads."""
    return not PAYLOAD_TYPES.keys().isdisjoint(columns)


def needs_subjects(kind: LogKind, columns: Collection[str]) -> bool:
    """Whether subjects have to be looked up for any of the columns."""
    return kind is LogKind.DISPATCH and not set(_LOOKED_UP).isdisjoint(columns)


def batch_of_frame(
    frame: Frame, keep: np.ndarray, schema: pa.Schema, names: Names
) -> pa.RecordBatch:
    """Those rows of a frame that `keep` selects, with the columns of their payloads.

    Raises DamageError for a payload that does not match its checksum."""
    rows = select(frame.rows, keep)
    payloads = payloads_of(frame, rows)
    columns = LOGS[LogKind(frame.header.kind)]
    arrays = []
    for column in schema:
        if column.name in PAYLOAD_TYPES:
            array = _payload_column(payloads, column.name)
        else:
            array = columns.array(rows, column.name, names)
        arrays.append(array.cast(column.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def payloads_of(frame: Frame, rows: Rows) -> list[Payload | None]:
    """The payloads of messages; other records have no payload of that form."""
    blob = frame.payload
    assert blob is not None
    payloads: list[Payload | None] = []
    places = (rows[name].tolist() for name in ("payload_offset", "payload_length", "kind", "seq"))
    for offset, length, kind, seq in zip(*places, strict=True):
        if not length or kind not in SCHEDULES:
            payloads.append(None)
            continue
        sealed = blob[offset : offset + length]
        payloads.append(decode_payload(sealed, frame.path, frame.payload_start + offset, seq))
    return payloads


def _payload_column(payloads: Sequence[Payload | None], name: str) -> pa.Array:
    column = [None if payload is None else getattr(payload, name) for payload in payloads]
    match name:
        case "key":
            return texts(column)
        case "body":
            return binaries(column, PAYLOAD_TYPES[name])
        case "headers":
            return text_maps(column, PAYLOAD_TYPES[name])
    return pa.array(column, PAYLOAD_TYPES[name])
