"""One number for each name, over all shards: what reports add up by.

Each shard numbers subjects and subscriptions by itself, so 3 is one name here and another there. A
subscription that was deleted and made again has two numbers under one name, and keeps two: the
first of a shard goes with the first of the others. Of one shard the numbers are its own.

What goes where its message says (`to`) has many numbers and one name, and counts under the first.

Cost: the small tables of each catalog; with several shards, a join of what was counted.
Threads: values.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from delayserver.pipeline.states.snapshot import Directory, read_subscriptions
from delayserver.records.direct import DIRECT_FIRST_ID, DIRECT_NAME
from delayserver.records.tables import read_subjects

_SHARED = "__shared"


@dataclass(frozen=True, slots=True)
class ShardNames:
    """The names of a shard, by its own numbers."""

    subjects: dict[int, str]
    subscriptions: dict[int, str]

    def subscription(self, number: int) -> str | None:
        """The name of a subscription, by any of its numbers."""
        return self.subscriptions.get(min(number, DIRECT_FIRST_ID))


def read_shard_names(directory: Directory) -> ShardNames:
    """What its catalog says; a subscription that was deleted is marked as such."""
    with directory.catalog() as catalog:
        subscriptions = {
            number: one.name + (" (deleted)" if one.deleted else "")
            for number, one in sorted(read_subscriptions(catalog).items())
        }
        subscriptions[DIRECT_FIRST_ID] = DIRECT_NAME
        return ShardNames(read_subjects(catalog), subscriptions)


def first_numbers(counts: DataFrame, column: str) -> DataFrame:
    """Rows with, in `column`, the one number under which a subscription counts."""
    return counts.withColumn(column, F.least(column, F.lit(DIRECT_FIRST_ID)))


class SharedNumbers:
    """Names that several shards have numbers for."""

    def __init__(self, of_shards: Mapping[int, Mapping[int, str]]) -> None:
        """`of_shards`: by shard, names by their numbers."""
        self.names: dict[int, str] = {}
        self._numbers: dict[tuple[int, int], int] | None = None
        if len(of_shards) == 1:
            (names,) = of_shards.values()
            self.names = dict(names)
            return
        self._numbers = {}
        known: dict[tuple[str, int], int] = {}
        for shard, names in of_shards.items():
            seen: Counter[str] = Counter()
            for number, name in sorted(names.items()):
                shared = known.setdefault((name, seen[name]), len(known) + 1)
                seen[name] += 1
                self.names[shared] = name
                self._numbers[shard, number] = shared

    def put_into(self, spark: SparkSession, counts: DataFrame, column: str) -> DataFrame:
        """Rows with a `shard`, the numbers of that shard in `column` replaced; 0: of no name."""
        if self._numbers is None:
            return counts
        pairs = [(shard, number, shared) for (shard, number), shared in self._numbers.items()]
        table = spark.createDataFrame(pairs, f"shard int, {column} int, {_SHARED} int")
        joined = counts.join(F.broadcast(table), ["shard", column], "left")
        return joined.withColumn(column, F.coalesce(_SHARED, F.lit(0))).drop(_SHARED)
