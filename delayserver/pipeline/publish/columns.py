"""Columns: the fields of messages, out of Arrow batches, row by row or as a stream of Arrow.

    batch of columns ──▶ rows: subject, due time, key, body, headers
                     ──▶ a stream, as the server takes it

Both are the same messages, so that a row may go one way now and the other when it is sent again.
`values` converts their values.

Cost: 1 µs a row, and the cost of `values`; next to nothing as a stream of columns that are text or
binary. Threads: pure.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import ipc
from pyspark.sql import types as T

from delayserver.pipeline.publish.mapping import MessageColumns
from delayserver.pipeline.publish.values import (
    Problems,
    body_pieces,
    due_times,
    given_times,
    header_pieces,
    object_pieces,
    text_array,
    text_or_none,
)
from delayserver.records.arrow import binaries, fixed, texts
from delayserver.times import SECONDS_MAX

_HEADERS = pa.map_(pa.string(), pa.string())


class ColumnReader:
    """Takes subject, due time, key, body and headers out of Arrow batches."""

    def __init__(self, columns: MessageColumns, schema: T.StructType, *, needs_key: bool) -> None:
        """`needs_key`: a row without a key is no message."""
        self._columns = columns
        self._needs_key = needs_key
        self._at = {name: index for index, name in enumerate(schema.names)}
        self._rest = columns.rest(schema.names)
        body = None if columns.body is None else schema[columns.body].dataType
        self.is_binary = isinstance(body, T.BinaryType)
        """The bodies are not JSON."""
        self._is_text = isinstance(body, T.StringType)

    def rows(self, batch: pa.RecordBatch) -> tuple[Iterable[tuple[Any, ...]], Problems]:
        """Subject, due time in ms, key, body, headers and the due time of the table, for each row,
        None if there is none; and the reasons why some rows cannot be messages."""
        columns, problems = self._columns, Problems()
        due_ms: list[int | None] = self._due_ms(batch, problems).tolist()
        for index in problems:  # These rows have no due time that can be read.
            due_ms[index] = None
        subjects: list[str | None] = [columns.subject] * batch.num_rows
        if columns.subject_column is not None:
            subjects = self._texts(batch, columns.subject_column, "subject", problems)
            problems.add(_are_none(subjects), "no subject")
        keys: list[str | None] = [None] * batch.num_rows
        if columns.key is not None:
            keys = self._texts(batch, columns.key, "key", problems)
            if self._needs_key:
                problems.add(_are_none(keys), "no key")
        bodies = self._bodies(batch, problems)
        if self.is_binary:
            problems.add(_are_none(bodies), "no body")
        headers: list[bytes | None] = [None] * batch.num_rows
        if columns.headers is not None:
            headers = header_pieces(batch.column(self._at[columns.headers]), problems)
        given = given_times(batch.column(self._at[columns.due]))
        return zip(subjects, due_ms, keys, bodies, headers, given, strict=True), problems

    def stream(self, batch: pa.RecordBatch) -> bytes | None:
        """The rows of a batch as the server takes them in Arrow, which give the same messages as
        `rows`; None if the rows must be looked at one by one."""
        columns, count, problems = self._columns, batch.num_rows, Problems()
        if columns.subject_column is None:
            indexes = fixed(np.zeros(count, np.int8))
            subject = pa.DictionaryArray.from_arrays(indexes, texts([columns.subject]))
        else:
            subject = self._text(batch, columns.subject_column, "subject", problems)
        table = {"subject": subject, "deliver_at": fixed(self._due_ms(batch, problems))}
        if subject.null_count:
            return None
        if columns.key is not None:
            table["key"] = self._text(batch, columns.key, "key", problems)
            if table["key"].null_count and self._needs_key:
                return None
        if columns.body is not None and (self.is_binary or self._is_text):
            table["body"] = batch.column(self._at[columns.body])
            if self.is_binary and table["body"].null_count:
                return None
        elif columns.body is not None or self._rest:
            table["body"] = binaries(self._bodies(batch, problems), pa.string())
        if columns.headers is not None:
            table["headers"] = batch.column(self._at[columns.headers])
            if table["headers"].type != _HEADERS:
                return None
        if problems:
            return None
        sink = pa.BufferOutputStream()
        named = pa.RecordBatch.from_arrays(list(table.values()), list(table))
        with ipc.new_stream(sink, named.schema) as writer:
            writer.write_batch(named)
        data: bytes = sink.getvalue().to_pybytes()
        return data

    def _due_ms(self, batch: pa.RecordBatch, problems: Problems) -> np.ndarray:
        column = batch.column(self._at[self._columns.due])
        due_ms = due_times(column, self._columns.due_unit or "ms", problems)
        # A time before 1973 is past, so it means now. It goes out as 0, because the server takes a
        # number of that range for seconds.
        due_or_now_ms: np.ndarray = np.where(due_ms <= SECONDS_MAX, 0, due_ms)
        return due_or_now_ms

    def _text(self, batch: pa.RecordBatch, name: str, what: str, problems: Problems) -> pa.Array:
        return text_array(batch.column(self._at[name]), what, problems)

    def _texts(
        self, batch: pa.RecordBatch, name: str, what: str, problems: Problems
    ) -> list[str | None]:
        return text_or_none(self._text(batch, name, what, problems))

    def _bodies(self, batch: pa.RecordBatch, problems: Problems) -> list[bytes | None]:
        name = self._columns.body
        if name is not None:
            return body_pieces(batch.column(self._at[name]), problems)
        rest = self._rest
        if not rest:
            return [None] * batch.num_rows
        columns = [batch.column(self._at[one]) for one in rest]
        return list(object_pieces(rest, columns, batch.num_rows, problems))


def _are_none(values: list[Any]) -> np.ndarray:
    return np.fromiter((value is None for value in values), bool, len(values))
