"""Batches as a stream of Apache Arrow: columns, as they stand in the request (the extra `arrow`).

    bytes ──▶ its parts: few, not compressed; the schema: these columns, of these types
          ──▶ record batches ──▶ validated in full ──▶ columns of one length

    subject      text, or a dictionary of text
    body         text: JSON; binary: a binary body
    delay        whole milliseconds, or a duration
    deliver_at   a timestamp with a time zone, or whole milliseconds (not seconds) since 1970
    key          text
    headers      a map from text to text
    ttl, jitter  whole milliseconds, or a duration
    priority     whole numbers

Only `subject` is required. A null counts as a field that was left out. No other type is read: each
further type needs a reader that withstands whatever a client sends.

The claims of a stream are not believed. Arrow verifies its metadata, and lengths against the
request; the values (offsets, indexes, UTF-8) are validated before anything looks at them. A stream
is not decompressed, since its buffers claim how long they will be: so nothing that is made here is
longer than the request, and a dictionary, which many batches may have in common, is short.

Rejected: a type for text that points into shared bytes (`string_view`, dictionaries of keys or
bodies), in which a short stream has long messages.

Cost: 0.2 ms a stream, 0.3 µs a message; memory: its values once more. Threads: pure.
"""

import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from delayserver.errors import InputError, MediaTypeError, TooLargeError
from delayserver.times import are_seconds

try:
    import pyarrow as pa
    import pyarrow.compute  # is made when it is first needed, which takes a while
    from pyarrow import ipc
    from pyarrow import types as of

    from delayserver.records.arrow import integers, pieces, present, strings
except (ImportError, OSError) as error:
    raise MediaTypeError(
        f"this server does not read Arrow ({error}): install its extra `arrow` (pip install "
        "'delayserver[arrow]'), or send the batch as JSON, NDJSON or MessagePack"
    ) from error

PARTS_MAX: Final = 256
"""Schema, dictionaries and record batches of a stream; each costs time, however short it is."""
SCHEMA_MAX_BYTES: Final = 64 * 1024
"""The limit of a schema, with the metadata of its writer; schemas are remembered."""
SCHEMAS_KEPT: Final = 64
DICTIONARIES_MAX_BYTES: Final = 2 * 1024 * 1024
"""They are validated again with each record batch."""
_END: Final = b"\xff\xff\xff\xff\0\0\0\0"
_UNREADABLE = (pa.ArrowException, OSError, ValueError, struct.error)
"""Errors that Arrow raises for a damaged stream."""
T = TypeVar("T")
_TEXT_IS = "text (string or large_string)"
_DURATION_IS = "whole milliseconds (at most 64 bits, with a sign), or a duration"


class Numbers(NamedTuple):
    """A column of whole numbers."""

    values: NDArray[np.int64]
    """Where there is none, any number."""
    there: NDArray[np.bool_] | None
    """Where there are numbers; None: everywhere."""

    def or_none(self) -> list[int | None]:
        """Each number, or None."""
        numbers: list[int | None] = self.values.tolist()
        return _or_none(numbers, self.there)

    def or_zero(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Values that were made of the numbers, with 0 where there is no number."""
        return values if self.there is None else np.where(self.there, values, 0)

    def mask(self) -> NDArray[np.bool_]:
        """Where there are numbers."""
        return np.ones(len(self.values), np.bool_) if self.there is None else self.there


class ArrowColumns(NamedTuple):
    """The messages of a stream, as columns of one length; None is a column that was left out."""

    subjects: list[str | None]
    bodies: list[bytes | None]
    is_binary: bool
    """Bodies are not JSON."""
    delays_ms: Numbers | None
    dues_ms: Numbers | None
    keys: list[str | None]
    headers: list[dict[str, str | None] | None]
    ttls_ms: Numbers | None
    jitters_ms: Numbers | None
    priorities: Numbers | None

    def as_fields(self) -> list[dict[str, Any]]:
        """Each message with the fields that it has in JSON, and JSON as it came."""
        nothing = [None] * len(self.subjects)
        columns: dict[str, Sequence[Any]] = {
            "subject": self.subjects,
            "body_base64" if self.is_binary else "body": self.bodies,
            "delay": nothing if self.delays_ms is None else self.delays_ms.or_none(),
            "deliver_at": nothing if self.dues_ms is None else self.dues_ms.or_none(),
            "key": self.keys,
            "headers": self.headers,
        }
        numbers = {"ttl": self.ttls_ms, "jitter": self.jitters_ms, "priority": self.priorities}
        columns |= {name: one.or_none() for name, one in numbers.items() if one is not None}
        return [
            {name: value for name, value in zip(columns, row, strict=True) if value is not None}
            for row in zip(*columns.values(), strict=True)
        ]


def read_columns(data: bytes, *, count_max: int) -> ArrowColumns:
    """The columns of a stream. Raises InputError, TooLargeError for more than `count_max` rows."""
    try:
        schema = _check_parts(data)
        batches = list(ipc.open_stream(data))
        count = sum(batch.num_rows for batch in batches)
        if count > count_max:
            raise TooLargeError(f"{count} messages in a batch; at most {count_max}")
        for batch in batches:
            batch.validate(full=True)
        if len(batches) == 1:
            arrays = batches[0].columns
        else:
            arrays = list(map(_in_one, pa.Table.from_batches(batches, schema).columns))
        return _columns(dict(zip(schema.names, map(_stored, arrays), strict=True)), count)
    except _UNREADABLE as error:
        raise InputError(f"not a stream of Arrow: {error}") from error


# ── the types that are read ────────────────────────────────────────────────────────────────────


def _check_parts(data: bytes) -> pa.Schema:
    """The schema of a stream. Raises InputError for one whose columns are others, that does not
    end, or that Arrow would take long to read."""
    source = pa.BufferReader(data)
    schema, dictionaries_bytes = None, 0
    for index, part in enumerate(ipc.MessageReader.open_stream(source)):
        if index == PARTS_MAX:
            raise InputError(
                f"a stream has at most {PARTS_MAX} parts (schema, dictionaries and record "
                "batches): combine them, as Table.combine_chunks does"
            )
        if part.metadata_version != ipc.MetadataVersion.V5:
            raise InputError("the stream is of a version before Arrow 1.0 (metadata before V5)")
        if schema is None:
            if source.tell() > SCHEMA_MAX_BYTES:
                raise InputError(f"a schema has at most {SCHEMA_MAX_BYTES} bytes")
            schema = _read_schema(data[: source.tell()])
            continue
        kind = part.type
        if _is_compressed(part.metadata.to_pybytes(), kind):
            raise InputError("the stream is compressed: write it without compression")
        if kind == "dictionary":
            dictionaries_bytes += part.body.size
    if dictionaries_bytes > DICTIONARIES_MAX_BYTES:
        raise InputError(f"dictionaries have at most {DICTIONARIES_MAX_BYTES} bytes in all")
    if source.tell() != len(data):
        raise InputError(f"{len(data) - source.tell()} bytes follow the stream")
    if not data.endswith(_END):
        raise InputError("the stream does not end: close its writer")
    return schema


def _is_compressed(data: bytes, kind: str) -> bool:
    """Whether the buffers of a record batch or of a dictionary are, by its metadata. pyarrow does
    not tell; the numbers are those of Message.fbs in Arrow's format. Arrow has verified that all of
    it is there."""
    header = _follow(data, _field(data, _follow(data, 0), 2))
    if kind == "dictionary":
        header = _follow(data, _field(data, header, 1))
    return _field(data, header, 3) != 0


def _field(data: bytes, table: int, number: int) -> int:
    """Where a field of a table (FlatBuffers) stands; 0: it is left out."""
    vtable = table - int(struct.unpack_from("<i", data, table)[0])
    at = 4 + 2 * number
    if at >= struct.unpack_from("<H", data, vtable)[0]:
        return 0
    offset = int(struct.unpack_from("<H", data, vtable + at)[0])
    return table + offset if offset else 0


def _follow(data: bytes, at: int) -> int:
    return at + int(struct.unpack_from("<I", data, at)[0])


def _is_text(kind: pa.DataType) -> bool:
    return bool(of.is_string(kind) or of.is_large_string(kind))


def _is_subject(kind: pa.DataType) -> bool:
    return _is_text(kind.value_type if of.is_dictionary(kind) else kind)


def _is_body(kind: pa.DataType) -> bool:
    return _is_text(kind) or _is_binary(kind)


def _is_binary(kind: pa.DataType) -> bool:
    return bool(of.is_binary(kind) or of.is_large_binary(kind))


def _is_whole(kind: pa.DataType) -> bool:
    return bool(of.is_integer(kind) and not of.is_uint64(kind))


def _is_delay(kind: pa.DataType) -> bool:
    return _is_whole(kind) or bool(of.is_duration(kind))


def _is_time(kind: pa.DataType) -> bool:
    return _is_whole(kind) or bool(of.is_timestamp(kind) and kind.tz)


def _is_headers(kind: pa.DataType) -> bool:
    return bool(of.is_map(kind)) and _is_text(kind.key_type) and _is_text(kind.item_type)


_COLUMNS: Final[dict[str, tuple[Callable[[pa.DataType], bool], str]]] = {
    "subject": (_is_subject, f"{_TEXT_IS}, or a dictionary of it"),
    "body": (_is_body, f"{_TEXT_IS}, which is JSON, or binary (binary or large_binary)"),
    "delay": (_is_delay, _DURATION_IS),
    "deliver_at": (
        _is_time,
        "a timestamp with a time zone, or whole milliseconds since 1970-01-01T00:00:00Z",
    ),
    "key": (_is_text, _TEXT_IS),
    "headers": (_is_headers, f"a map, its keys and values {_TEXT_IS}"),
    "ttl": (_is_delay, _DURATION_IS),
    "jitter": (_is_delay, _DURATION_IS),
    "priority": (_is_whole, "whole numbers (at most 64 bits, with a sign)"),
}


@lru_cache(maxsize=SCHEMAS_KEPT)
def _read_schema(data: bytes) -> pa.Schema:
    """The schema that a stream begins with; clients send the same few again and again. Raises
    InputError."""
    schema = ipc.open_stream(data).schema
    for field in schema:
        name, kind = field.name, field.type
        if name not in _COLUMNS:
            raise InputError(
                f"the table has a column {name!r}; in Arrow a message has {', '.join(_COLUMNS)}, "
                "and the rest in JSON"
            )
        is_right, expected = _COLUMNS[name]
        if not is_right(kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind):
            raise InputError(f"the column is {kind}; it has to be {expected}", f"/{name}")
    if len(set(schema.names)) < len(schema.names):
        raise InputError("two columns of the table have one name")
    if "subject" not in schema.names:
        raise InputError("the table has no column subject", "/subject")
    return schema


# ── columns ────────────────────────────────────────────────────────────────────────────────────


def _in_one(column: pa.ChunkedArray) -> pa.Array:
    """A column in one piece."""
    array = column.combine_chunks()
    # as some versions return it
    return array.chunk(0) if isinstance(array, pa.ChunkedArray) else array


def _stored(array: pa.Array) -> pa.Array:
    """The storage of an extension type (`arrow.json`), or the array itself."""
    return array.storage if isinstance(array, pa.ExtensionArray) else array


def _columns(arrays: dict[str, pa.Array], count: int) -> ArrowColumns:
    body, headers = arrays.get("body"), arrays.get("headers")
    return ArrowColumns(
        _subjects(arrays["subject"]),
        [None] * count if body is None else _or_none(pieces(body), _there(body)),
        body is not None and _is_binary(body.type),
        _numbers(arrays.get("delay")),
        _times(arrays.get("deliver_at")),
        _texts(arrays["key"]) if "key" in arrays else [None] * count,
        [None] * count if headers is None else _headers(headers),
        _numbers(arrays.get("ttl")),
        _numbers(arrays.get("jitter")),
        _numbers(arrays.get("priority")),
    )


def _there(array: pa.Array) -> NDArray[np.bool_] | None:
    """Where it is not null; None: everywhere."""
    if array.buffers()[0] is None:
        return None
    there = present(array)
    return None if there.all() else there


def _or_none(values: list[T], there: NDArray[np.bool_] | None) -> list[T | None]:
    if there is None:
        return cast(list[T | None], values)
    return [value if one else None for value, one in zip(values, there.tolist(), strict=True)]


def _texts(array: pa.Array) -> list[str | None]:
    return _or_none(strings(array), _there(array))


def _subjects(array: pa.Array) -> list[str | None]:
    """One text for all messages of a subject."""
    if not of.is_dictionary(array.type):
        array = array.dictionary_encode()
    names, indexes = _texts(array.dictionary), array.indices
    there = _there(indexes)
    if there is None and len(names) == 1:  # as most are
        return names * len(array)
    if not names:
        return [None] * len(array)
    numbers = integers(indexes)
    if there is not None:
        numbers = np.where(there, numbers, 0)
    return _or_none([names[number] for number in numbers.tolist()], there)


def _numbers(array: pa.Array | None) -> Numbers | None:
    """In whole milliseconds. A part of one is rounded up, so that nothing is early."""
    if array is None:
        return None
    values, kind = integers(array).astype(np.int64), array.type
    unit = "ms" if of.is_integer(kind) else kind.unit
    most = np.iinfo(np.int64).max
    if unit == "s":  # a value beyond that is too far away in any case
        values = np.clip(values, -(most // 1000), most // 1000) * 1000
    elif unit != "ms":
        parts = 1000 if unit == "us" else 1_000_000
        values = -(np.maximum(values, -most) * -1 // parts)
    return Numbers(values, _there(array))


def _times(array: pa.Array | None) -> Numbers | None:
    """Due times. A timestamp before 1973 is 1970, which means now as well: behind this, a number of
    that range is seconds that were taken for milliseconds."""
    times = _numbers(array)
    if times is None or array is None or not of.is_timestamp(array.type):
        return times
    return times._replace(values=np.where(are_seconds(times.values), 0, times.values))


def _headers(array: pa.Array) -> list[dict[str, str | None] | None]:
    pairs = list(zip(strings(array.keys), _texts(array.items), strict=True))
    ends = integers(array.offsets).tolist()
    return _or_none([dict(pairs[start:end]) for start, end in pairwise(ends)], _there(array))
