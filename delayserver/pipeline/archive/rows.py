"""The rows of an archive, their order, and the sum by which two sets of them are compared.

They have the columns of `delayhistory`, and also the directory that they come from (`store`: its
stamp, which no two servers share). `store`, `shard`, `hour` and `seq` identify a row.

The checksum is the sum over all rows of a hash of all columns: it does not depend on their order,
and sums of disjoint sets add up.

Cost: one hash for each row, in Spark. Threads: functions.
"""

from typing import Any

import msgspec
import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql import functions as F

from delayserver.pipeline.logs.columns import CORRUPT
from delayserver.pipeline.states.history import TYPES

ROW_TYPES: dict[str, pa.DataType] = {
    "store": pa.string(),
    **{name: kind for name, kind in TYPES.items() if name != CORRUPT},
}
"""Columns, in the order in which they are written."""
ROW_ORDER = ("due", "shard", "seq")
HOUR_KEY = ("store", "shard", "hour")


class Sum(msgspec.Struct, frozen=True):
    """Count and checksum of rows; sums of disjoint sets of rows can be added."""

    count: int = 0
    hashes: int = 0
    """The sum of the hashes, modulo 2^64."""

    def __add__(self, other: "Sum") -> "Sum":
        return Sum(self.count + other.count, (self.hashes + other.hashes) % 2**64)

    @property
    def checksum(self) -> str:
        """The hashes as 16 hexadecimal digits, the form that people compare."""
        return f"{self.hashes:016x}"


def sum_columns() -> tuple[Column, Column, Column]:
    """Count, and the sum of the hashes of rows in two halves, which cannot overflow."""
    columns = []
    for name in ROW_TYPES:
        column = F.col(name)
        # A map has no hash; a null does not change one.
        columns += [F.map_entries(column) if name == "headers" else column, column.isNull()]
    row_hash = F.xxhash64(*columns)
    low = row_hash.bitwiseAND(F.lit(0xFFFFFFFF))
    return (
        F.count("seq").alias("count"),
        F.sum(F.shiftright(row_hash, 32)).alias("high"),
        F.sum(low).alias("low"),
    )


def sum_of(row: Any) -> Sum:
    """The result of `sum_columns`. `row`: of Spark, with a count above 0."""
    return Sum(row["count"], ((row["high"] << 32) + row["low"]) % 2**64)
