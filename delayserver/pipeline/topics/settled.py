"""Records of outcomes as rows of the dispatch log: the columns that `delaylog` has of it.

A record is a frame of the dispatch log as the files have it. Nothing of it is trusted before its
checksum. A record that does not match becomes a row of its own, whose column `_corrupt` names
topic, partition and offset. The subject is not among the columns, since only the schedule log has
it.

The topic is a set: after a take-over the same delivery may stand there twice, and once more, later,
from an owner that was lost for a while.

Cost: one crc32c pass and a copy of the bytes; a few µs for each record. Threads: Spark's tasks.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from delayserver.pipeline.logs.columns import LOGS, BatchBuilder, Names, batch_of_damage
from delayserver.pipeline.topics.source import ClusterTopics
from delayserver.pipeline.workers import spare_imports
from storage.errors import RecordDamageError
from storage.frame import Damage
from storage.replicated.reader import frame_of
from storage.rows import LogKind


def settled_rows(
    records: DataFrame, topics: ClusterTopics, names: Mapping[int, Names], columns: str
) -> DataFrame:
    """The rows in records of NAME.settled. `columns`: their names and types as Spark writes them,
    `_corrupt` one of them. `names`: by shard, the names for its numbers."""
    parsed = StructType.fromDDL(columns)
    assert isinstance(parsed, StructType), columns
    schema = to_arrow_schema(parsed, timezone="UTC")
    read = partial(_read, topics.name("settled"), topics.stamps, names, schema)
    return records.mapInArrow(read, columns)


def _read(
    topic: str,
    stamps: Mapping[int, int],
    names: Mapping[int, Names],
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Runs in a worker."""
    spare_imports()
    builders: dict[int, BatchBuilder] = {}
    for batch in batches:
        for _, value, shard, offset in zip(*map(pa.Array.to_pylist, batch.columns), strict=True):
            log = f"{topic}/{shard}"
            try:
                frame = frame_of(value or b"", LogKind.DISPATCH, stamps[shard], log, offset)
            except RecordDamageError as error:
                yield batch_of_damage(damage_of(error), schema, shard=shard)
                continue
            builder = builders.get(shard)
            if builder is None:
                named = names.get(shard, Names(shard=shard))
                builder = BatchBuilder(LOGS[LogKind.DISPATCH], schema, named)
                builders[shard] = builder
            yield from builder.add(frame.rows)
    for builder in builders.values():
        yield from builder.rest()


def damage_of(error: RecordDamageError) -> Damage:
    """A bad record as damage of a file: its log is the file, its offset the place."""
    return Damage(error.log, error.offset, error.offset + 1, error.reason, torn=False)
