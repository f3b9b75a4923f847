"""Rows of an archive that no server ever had."""

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

from delayserver.pipeline.archive.table import ArchiveTable
from delayserver.pipeline.archive.writing import WrittenFile

HOUR = 494_500
_HOUR_US = 3_600_000_000


def made_rows(spark: SparkSession, first_seq: int, count: int = 20, *, days: int = 2) -> DataFrame:
    """So many messages to one subject, over so many days; what comes later is due earlier."""
    return spark.range(count).selectExpr(
        "'s' as store",
        "concat('m', id) as id",
        "'order.paid' as subject",
        "'k' as key",
        "map('a', cast(id as string)) as headers",
        "concat('body ', id) as body",
        "cast(null as binary) as body_bytes",
        f"timestamp_micros((id % {days}) * 86400000000 + 1000000 - {first_seq} * 100 + id) as due",
        "timestamp_micros(0) as filed",
        "'publish' as made_by",
        "1 as attempt",
        "'delivered' as state",
        "cast(array() as array<struct<subscription string, state string, attempt int, "
        "settled timestamp, lateness_ms long>>) as deliveries",
        f"id + {first_seq} as seq",
        "id as message_seq",
        "0 as hour",
        "0 as shard",
    )


def made_file(
    table: ArchiveTable, seqs: range, *, hour: int = HOUR, store: str = "s"
) -> WrittenFile:
    """A file of rows of one subject, as a task writes it."""
    layout = table.layout(store, 0, {})
    group = (hour // 24) * layout.buckets + 3
    name = layout.name(group, f"run-{hour}-{seqs.start}", 0)
    columns = {
        "store": [store] * len(seqs),
        "shard": [0] * len(seqs),
        "hour": [hour] * len(seqs),
        "seq": list(seqs),
        "due": [hour * _HOUR_US + seq for seq in seqs],
    }
    schema = table.file_schema
    arrays = [
        pa.array(columns[field.name]).cast(field.type)
        if field.name in columns
        else pa.nulls(len(seqs), field.type)
        for field in schema
    ]
    with table.place.writing(name) as stream:
        pq.write_table(pa.Table.from_arrays(arrays, schema=schema), stream)
    return WrittenFile(name, group, len(seqs))
