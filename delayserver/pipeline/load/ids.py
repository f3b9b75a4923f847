"""The ids of a load: which row of the table has become which message, as a Parquet file.

A message's number is that of its row among all that were staged, counted from the first of the
import. A row that was left out has the id of the message that holds its key. So the executors need
to report only the part of each row and its place there.

Cost: 1 µs a row. Threads: the caller's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from delayserver.errors import PipelineError
from delayserver.pipeline.load import staging
from delayserver.pipeline.load.note import Parts
from delayserver.records.ids import IdCodec

_COLUMNS = (
    ("id", pa.string()),
    ("duplicate", pa.bool_()),
    ("subject", pa.string()),
    ("key", pa.string()),
    ("deliver_at", pa.timestamp("ms", tz="UTC")),
)


@dataclass(frozen=True, slots=True)
class ImportedParts:
    """The parts that one shard has adopted."""

    codec: IdCodec
    first_seq: int
    parts: Parts
    duplicates: Mapping[int, str]
    """Rows of the import that were left out, and the ids of the messages that hold their keys."""


@dataclass(frozen=True, slots=True)
class _PartPosition:
    """The place of a part in its import."""

    start: int
    imported: ImportedParts


def check_columns(names: Sequence[str]) -> None:
    """Raises PipelineError if columns of the table cannot stand in the file of ids, because it has
    one of that name, or because one of them is named twice."""
    own = {name for name, _ in _COLUMNS}
    known: set[str] = set()
    for name in names:
        if name.lower() in own:
            raise PipelineError(
                f"the file of ids has a column {name.lower()!r} of its own, so the column {name!r} "
                "of the table cannot stand there; leave it out of --ids-column, or rename it"
            )
        if name.lower() in known:
            raise PipelineError(f"--ids-column names the column {name!r} twice")
        known.add(name.lower())


def write_ids(
    path: Path,
    results: ds.Dataset,
    imported: Sequence[ImportedParts],
    passed: Mapping[str, pa.Field],
) -> None:
    """Write the file; a whole file takes the place of an old one. `results`: the report of the
    executors; `passed`: columns of the table that stand there, too, by their names in `results`."""
    places: dict[str, _PartPosition] = {}
    for one in imported:
        start = 0
        for file, count in one.parts:
            places[file] = _PartPosition(start, one)
            start += count
    schema = pa.schema([*_COLUMNS, *passed.values()])
    batches = results.to_batches(filter=pc.field("kind") == staging.ROW)
    unfinished = path.with_name(f"{path.name}.new")
    with pq.ParquetWriter(unfinished, schema) as writer:
        for batch in batches:
            if batch.num_rows:
                writer.write_batch(_ids(batch, schema, places, passed))
    unfinished.replace(path)


def _ids(
    batch: pa.RecordBatch,
    schema: pa.Schema,
    places: Mapping[str, _PartPosition],
    passed: Mapping[str, pa.Field],
) -> pa.RecordBatch:
    parts = batch.column("part").dictionary_encode()
    indices, rows = parts.indices.to_numpy(), batch.column("row").to_numpy()
    due = batch.column("due_ms")
    due_ms = due.to_numpy()
    own, held = np.empty((2, batch.num_rows), object)
    for index, name in enumerate(parts.dictionary.to_pylist()):
        place, here = places[name], np.flatnonzero(indices == index)
        imported, numbers = place.imported, place.start + rows[here]
        codec = imported.codec
        own[here] = codec.texts(codec.encode_many(due_ms[here], numbers + imported.first_seq))
        if imported.duplicates:
            held[here] = [imported.duplicates.get(number) for number in numbers.tolist()]
    pairs = list(zip(held.tolist(), own.tolist(), strict=True))
    columns = [
        pa.array([there or made for there, made in pairs], pa.string()),
        pa.array([there is not None for there, _ in pairs], pa.bool_()),
        batch.column("subject"),
        batch.column("key"),
        due.cast(pa.timestamp("ms", tz="UTC")),
        *(batch.column(name).cast(field.type) for name, field in passed.items()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
