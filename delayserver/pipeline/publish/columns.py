"""Columns: what messages are made of, out of Arrow batches, row by row or as a stream of Arrow.

    batch of columns ──▶ rows: subject, due time, key, body, headers
                     ──▶ a stream, as the server takes it

Both are the same messages, so that a row may go one way now and the other when it is sent again.

Spark does not look into its texts: `cast(value as string)` takes any bytes. So what is no UTF-8 is
found here, a row at a time.

Cost: 1 µs a row, and 1 µs more per column that becomes JSON; next to nothing as a stream of columns
that are text or binary. Threads: pure.
"""

import contextlib
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from pyarrow import ipc
from pyspark.sql import types as T

from delayserver.pipeline.publish.mapping import MessageColumns
from delayserver.records.arrow import binaries, fixed, integers, present, texts

_HEADERS = pa.map_(pa.string(), pa.string())

# Times become RFC 3339 text and bytes base64, as with to_json; decimals are numbers.
encode = msgspec.json.Encoder(decimal_format="number").encode


class NotText(str):
    """A text that is not UTF-8, as far as it can be read."""

    __slots__ = ()


class ColumnReader:
    """Takes subject, due time, key, body and headers out of Arrow batches."""

    def __init__(self, columns: MessageColumns, schema: T.StructType, *, needs_key: bool) -> None:
        """`needs_key`: a row without one is no message."""
        self._columns = columns
        self._needs_key = needs_key
        self._at = {name: index for index, name in enumerate(schema.names)}
        self._rest = columns.rest(schema.names)
        body = None if columns.body is None else schema[columns.body].dataType
        headers = None if columns.headers is None else schema[columns.headers].dataType
        self.is_binary = isinstance(body, T.BinaryType)
        """The bodies are not JSON."""
        self.is_text = isinstance(body, T.StringType)
        """The bodies are JSON that somebody else made, and so are the headers:"""
        self.are_headers_text = isinstance(headers, T.StringType)

    def rows(self, batch: pa.RecordBatch) -> Iterable[tuple[Any, ...]]:
        """Subject, due time, key, body and headers of each row; None where there is nothing."""
        columns, nothing = self._columns, [None] * batch.num_rows
        if columns.subject_column is None:
            subjects = [columns.subject] * batch.num_rows
        else:
            subjects = self._texts(batch, columns.subject_column)
        return zip(
            subjects,
            _due(batch.column(self._at[columns.due])),
            nothing if columns.key is None else self._texts(batch, columns.key),
            self._bodies(batch),
            nothing if columns.headers is None else self._headers(batch, columns.headers),
            strict=True,
        )

    def stream(self, batch: pa.RecordBatch) -> bytes | None:
        """The rows of a batch as the server takes them in Arrow, and the same messages as `rows`;
        None where a row has to be looked at by itself."""
        try:
            return self._stream(batch)
        except pa.ArrowInvalid:
            return None  # Some text is none.

    def _stream(self, batch: pa.RecordBatch) -> bytes | None:
        columns, count = self._columns, batch.num_rows
        due = batch.column(self._at[columns.due])
        if columns.subject_column is None:
            indexes = fixed(np.zeros(count, np.int8))
            subject = pa.DictionaryArray.from_arrays(indexes, texts([columns.subject]))
        else:
            subject = self._text(batch, columns.subject_column)
        if _is_text(due.type) or due.null_count or subject.null_count:
            return None
        table = {"subject": subject, "deliver_at": fixed(_due_ms(due))}
        if columns.key is not None:
            table["key"] = self._text(batch, columns.key)
            if table["key"].null_count and self._needs_key:
                return None
        if columns.body is not None and (self.is_binary or self.is_text):
            table["body"] = batch.column(self._at[columns.body])
            if self.is_binary and table["body"].null_count:
                return None
        elif columns.body is not None or self._rest:
            bodies = [one for one in self._bodies(batch) if not isinstance(one, NotText)]
            if len(bodies) < count:
                return None
            table["body"] = binaries(bodies, pa.string())
        if columns.headers is not None:
            table["headers"] = batch.column(self._at[columns.headers])
            if table["headers"].type != _HEADERS:
                return None
        sink = pa.BufferOutputStream()
        named = pa.RecordBatch.from_arrays(list(table.values()), list(table))
        with ipc.new_stream(sink, named.schema) as writer:
            writer.write_batch(named)
        data: bytes = sink.getvalue().to_pybytes()
        return data

    def _text(self, batch: pa.RecordBatch, name: str) -> pa.Array:
        return batch.column(self._at[name]).cast(pa.string())

    def _texts(self, batch: pa.RecordBatch, name: str) -> list[str | None]:
        column = batch.column(self._at[name])
        return _decoded(column if _is_bytes(column.type) else column.cast(pa.string()))

    def _bodies(self, batch: pa.RecordBatch) -> list[bytes | NotText | None]:
        name = self._columns.body
        if name is None:
            rest = self._rest
            if not rest:
                return [None] * batch.num_rows
            columns = [_values(batch.column(self._at[one])) for one in rest]
            rows = zip(*columns, strict=True)
            return [_encoded(dict(zip(rest, row, strict=True)), row) for row in rows]
        column = batch.column(self._at[name])
        if self.is_binary or self.is_text:
            return [*_as_bytes(column)]
        return [None if value is None else _encoded(value, (value,)) for value in _values(column)]

    def _headers(self, batch: pa.RecordBatch, name: str) -> list[bytes | NotText | None]:
        column = batch.column(self._at[name])
        if self.are_headers_text:
            return [*_as_bytes(column)]
        values = _values(column)
        if pa.types.is_struct(column.type):
            # A field of a struct that is null is no header.
            values = [
                {k: v for k, v in value.items() if v is not None}
                if isinstance(value, dict)
                else value
                for value in values
            ]
        return [None if value is None else _encoded(value, (value,)) for value in values]


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _as_bytes(column: pa.Array) -> list[bytes | None]:
    values: list[bytes | None] = column.cast(pa.large_binary()).to_pylist()
    return values


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _values(column: pa.Array) -> list[Any]:
    if _is_text(column.type):
        return list(_decoded(column))
    try:
        values: list[Any] = column.to_pylist(maps_as_pydicts="lossy")
    except UnicodeDecodeError as error:
        if len(column) == 1:
            return [NotText(error.object.decode("utf-8", "replace"))]
        return [value for at in range(len(column)) for value in _values(column.slice(at, 1))]
    return values


def _decoded(column: pa.Array) -> list[str | None]:
    """Texts, or bytes that should be some; of what is no UTF-8, NotText."""
    if _is_text(column.type):
        with contextlib.suppress(UnicodeDecodeError):
            texts: list[str | None] = column.to_pylist()
            return texts
    return [None if value is None else _text_of(value) for value in _as_bytes(column)]


def _text_of(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return NotText(value.decode("utf-8", "replace"))


def _encoded(value: Any, parts: Iterable[Any]) -> bytes | NotText:
    """As JSON, unless one of its parts is no text."""
    return next((part for part in parts if isinstance(part, NotText)), None) or encode(value)


def _due(column: pa.Array) -> list[int | str | None]:
    """Milliseconds since 1970, or text that the server reads."""
    if _is_text(column.type):
        return [
            max(0, int(text)) if text is not None and text.lstrip("-").isdecimal() else text
            for text in _decoded(column)
        ]
    moments = zip(_due_ms(column).tolist(), present(column).tolist(), strict=True)
    return [due_ms if there else None for due_ms, there in moments]


def _due_ms(column: pa.Array) -> np.ndarray:
    """Milliseconds since 1970 of a column that is no text; where it is null, any number."""
    kind = column.type
    if pa.types.is_timestamp(kind):
        # Never earlier than it says: a part of a millisecond is rounded up.
        due_ms = -(-integers(column.cast(pa.timestamp("us", kind.tz))) // 1000)
    elif pa.types.is_date(kind):
        due_ms = integers(column.cast(pa.timestamp("ms")))
    else:
        due_ms = integers(column.cast(pa.int64()))
    at_least: np.ndarray = np.maximum(due_ms, 0)  # What is past is due now, however long ago.
    return at_least
