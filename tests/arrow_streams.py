"""Streams of Arrow for tests: a table as a client would send it."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyarrow import ipc

from delayserver.times import parse_duration_ms

ARROW = "application/vnd.apache.arrow.stream"
HEADERS = pa.map_(pa.string(), pa.string())
TYPES = {
    "subject": pa.string(),
    "body": pa.string(),
    "delay": pa.int64(),
    "deliver_at": pa.int64(),
    "key": pa.string(),
    "headers": HEADERS,
    "ttl": pa.int64(),
    "jitter": pa.int64(),
    "priority": pa.int64(),
}


def stream_of(table: pa.Table, *, rows_max: int | None = None, **options: Any) -> bytes:
    """A stream with the rows of a table; `options`: of `pyarrow.ipc.IpcWriteOptions`."""
    sink = pa.BufferOutputStream()
    with ipc.new_stream(sink, table.schema, options=ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=rows_max)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def table_of(
    documents: Sequence[Mapping[str, Any]], types: Mapping[str, pa.DataType] = TYPES
) -> pa.Table:
    """Messages as they stand in JSON, as a table: bodies as JSON text, headers as a map, and
    delays in milliseconds."""

    def value(document: Mapping[str, Any], name: str) -> Any:
        found = document.get(name)
        if name == "body" and "body" in document:
            return json.dumps(found, ensure_ascii=False)
        if name == "delay" and isinstance(found, str):
            return parse_duration_ms(found)
        return list(found.items()) if isinstance(found, dict) else found

    names = [name for name in types if any(name in one for one in documents)]
    names = names if "subject" in names else ["subject", *names]
    return pa.table(
        {name: pa.array([value(one, name) for one in documents], types[name]) for name in names}
    )


def arrow_of(documents: Sequence[Mapping[str, Any]]) -> bytes:
    """The same as a stream."""
    return stream_of(table_of(documents))
