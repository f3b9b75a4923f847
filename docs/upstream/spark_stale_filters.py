"""Filters that were pushed into a Python data source stay with the DataFrame.

Needs pyspark and pyarrow, nothing else:  python spark_stale_filters.py
"""

from collections.abc import Iterable, Iterator

from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    EqualTo,
    Filter,
    GreaterThanOrEqual,
    InputPartition,
    LessThan,
)
from pyspark.sql.types import StructType

ROWS = 100


class Numbers(DataSource):
    """The whole numbers below ROWS, in one partition."""

    @classmethod
    def name(cls) -> str:
        return "numbers"

    def schema(self) -> str:
        return "n int"

    def reader(self, schema: StructType) -> "NumbersReader":
        return NumbersReader()


class NumbersReader(DataSourceReader):
    """Takes the three filters that it knows, and applies them in full."""

    def __init__(self) -> None:
        self.taken: list[Filter] = []

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        for wanted in filters:
            if isinstance(wanted, EqualTo | LessThan | GreaterThanOrEqual):
                self.taken.append(wanted)
            else:
                yield wanted

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(0)]

    def read(self, partition: InputPartition) -> Iterator[tuple[int]]:
        return ((n,) for n in range(ROWS) if all(holds(one, n) for one in self.taken))


def holds(wanted: Filter, n: int) -> bool:
    match wanted:
        case EqualTo(value=value):
            return n == value
        case LessThan(value=value):
            return n < value
        case GreaterThanOrEqual(value=value):
            return n >= value
    raise AssertionError(wanted)


def main() -> None:
    spark = (
        SparkSession.builder.master("local[1]")
        .config("spark.sql.python.filterPushdown.enabled", "true")
        .config("spark.ui.enabled", "false")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    spark.dataSource.register(Numbers)
    load = spark.read.format("numbers").load

    print(f"Spark {spark.version}")
    df = load()
    tell("a fresh DataFrame: count()", df.count(), ROWS)
    df = load()
    tell("where(n = 7).count()", df.where("n = 7").count(), 1)
    tell("then count() of the same DataFrame", df.count(), ROWS)
    tell("then where(n = 8).count() of the same", df.where("n = 8").count(), 1)
    df = load()
    halves = df.where("n < 30").union(df.where("n >= 30"))
    tell("where(n < 30) union where(n >= 30)", halves.count(), ROWS)
    df = load()
    below, all_of_it = df.where("n < 30").count(), df.where("n < 90").count()
    tell("where(n < 30), then where(n < 90)", below + all_of_it, 30 + 90)
    spark.stop()


def tell(what: str, found: int, wanted: int) -> None:
    print(f"{what:40} {found:4}   {'right' if found == wanted else f'WRONG, it is {wanted}'}")


if __name__ == "__main__":
    main()
