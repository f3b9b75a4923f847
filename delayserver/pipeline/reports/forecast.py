"""The forecast: how many messages fall due when, and how much memory each hour will take.

    delaystate (pending) ─┬─▶ due per minute       of the days that were asked for; the hot ones
                          └─▶ due per hour and subject, and the memory of each hour

An hour is in memory from ten minutes before it begins until it is settled. It takes 24 bytes for
each row, a table of its slots, and while it is loaded about as much again. Each of several shards
has a table of its own; the forecast adds them up.

Cost: about 1 µs of one core per message that waits. Threads: the driver's; Spark's tasks.
"""

import time
from dataclasses import dataclass

import pandas as pd
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from delayserver.pipeline.exports.place import absolute_root, shown_url
from delayserver.pipeline.logs.columns import CORRUPT, CORRUPT_DDL
from delayserver.pipeline.logs.options import TASKS_PER_CORE, paths_of
from delayserver.pipeline.progress import Job
from delayserver.pipeline.reports.names import SharedNumbers, read_shard_names
from delayserver.pipeline.states.snapshot import open_directories
from delayserver.schedule.wheel import SLOT_MS
from delayserver.schedule.wheel_rows import WHEEL_DTYPE
from storage.rows import HOUR_MS

MINUTE_MS = 60_000
DAY_MS = 24 * HOUR_MS
HOT_MINUTES = 20
SUBJECTS_MAX = 100
"""So many subjects are listed one by one, those with the most messages; the rest is added up."""
OTHERS = "(others)"
_SLOTS_BYTES = 4 * (HOUR_MS // SLOT_MS + 1)


@dataclass(slots=True)
class Forecast:
    """The result of a forecast."""

    data_dir: str
    taken_ms: int
    took_s: float
    days: int
    waiting: int
    """Messages that are not due yet."""
    overdue: int
    """Messages that are due and not settled: waiting for a subscriber, or on their way."""
    damaged: int
    """Places that could not be read; their rows are not counted."""
    minutes: pd.DataFrame
    """minute_ms, due: within the days that were asked for."""
    hours: pd.DataFrame
    """hour_ms, due, memory_bytes: for all hours."""
    subjects: pd.DataFrame
    """subject, due, in order."""
    by_subject: pd.DataFrame
    """hour_ms, subject, due: within the days that were asked for."""

    @property
    def hot(self) -> pd.DataFrame:
        """The minutes in which most falls due."""
        return self.minutes.nlargest(HOT_MINUTES, "due")


def memory_bytes(rows: int, shards: int = 1) -> int:
    """The memory that an hour with so many rows takes in the server, over all its shards."""
    return rows * WHEEL_DTYPE.itemsize + shards * _SLOTS_BYTES


def forecast(job: Job, *data_dirs: str, days: int = 7, now_ms: int | None = None) -> Forecast:
    """Forecast a data directory, also beside its server; or the shards of several, or exports.

    Raises the errors of `audit.audit`."""
    started = time.monotonic()
    roots = [absolute_root(one) for one in data_dirs]
    directories = open_directories(*roots)
    subjects = SharedNumbers({one.shard: read_shard_names(one).subjects for one in directories})
    taken_ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    waiting = (
        job.spark.read.format("delaystate")
        .option("partitions", TASKS_PER_CORE * job.cores)
        .options(now_ms=taken_ms, state="pending", damage="rows")
        .schema(f"shard int, due_ms long, subject_id int, is_first boolean, {CORRUPT_DDL}")
        .options(**paths_of(roots))
        .load()
        .where(F.col("is_first") | F.col(CORRUPT).isNotNull())
    )
    until_ms = taken_ms + days * DAY_MS
    # Minutes for the days that matter, then hours, so that the table stays small.
    unit = F.when(F.col("due_ms") < until_ms, F.lit(MINUTE_MS)).otherwise(F.lit(HOUR_MS))
    of_shards = (
        waiting.withColumn("from_ms", F.col("due_ms") - F.col("due_ms") % unit)
        .groupBy(
            "shard", "from_ms", "subject_id", (F.col("due_ms") <= taken_ms).alias("is_overdue")
        )
        .count()
    )
    counted = _shared(subjects, job.spark, of_shards).persist()
    try:
        with job.step("reading the logs"):
            by_moment = counted.groupBy("is_overdue").agg(F.sum("count").alias("n"))
            totals = {row["is_overdue"]: row["n"] for row in by_moment.collect()}
        with job.step("adding it up"):
            minutes, hours, largest, by_subject = _sums(counted.where("not is_overdue"), until_ms)
    finally:
        counted.unpersist()
    hours["memory_bytes"] = [memory_bytes(due, len(directories)) for due in hours["due"].tolist()]
    return Forecast(
        data_dir=", ".join(map(shown_url, roots)),
        taken_ms=taken_ms,
        took_s=time.monotonic() - started,
        days=days,
        waiting=int(totals.get(False, 0)),
        overdue=int(totals.get(True, 0)),
        damaged=int(totals.get(None, 0)),
        minutes=minutes,
        hours=hours,
        subjects=_named(largest, subjects.names),
        by_subject=_named(by_subject, subjects.names),
    )


def _sums(coming: DataFrame, until_ms: int) -> tuple[pd.DataFrame, ...]:
    """How many are due, by minute, by hour, of the largest subjects, and by hour and subject, the
    others together. The first and the last end at `until_ms`."""

    def due_by(some: DataFrame, *columns: Column) -> DataFrame:
        return some.groupBy(*columns).agg(F.sum("count").alias("due"))

    until = coming.where(F.col("from_ms") < until_ms)
    hour_ms = (F.col("from_ms") - F.col("from_ms") % HOUR_MS).alias("hour_ms")
    minutes = due_by(until, F.col("from_ms").alias("minute_ms")).orderBy("minute_ms").toPandas()
    hours = due_by(coming, hour_ms).orderBy("hour_ms").toPandas()
    largest = (
        due_by(coming, F.col("subject_id")).orderBy(F.desc("due")).limit(SUBJECTS_MAX).toPandas()
    )
    known = F.col("subject_id").isin(largest["subject_id"].tolist())
    subject = F.when(known, F.col("subject_id")).alias("subject_id")
    return minutes, hours, largest, due_by(until, hour_ms, subject).orderBy("hour_ms").toPandas()


def _shared(subjects: SharedNumbers, spark: SparkSession, counts: DataFrame) -> DataFrame:
    """The rows with the number of the subject that all shards share; 0: without a name."""
    if subjects.pairs is None:
        return counts
    table = spark.createDataFrame(subjects.pairs, "shard int, subject_id int, shared int")
    joined = counts.join(F.broadcast(table), ["shard", "subject_id"], "left")
    return joined.withColumn("subject_id", F.coalesce("shared", F.lit(0))).drop("shared")


def _named(table: pd.DataFrame, names: dict[int, str]) -> pd.DataFrame:
    """The rows with the names of subjects in place of their numbers."""
    subjects = table["subject_id"].map(names).fillna(OTHERS)
    return table.drop(columns=["subject_id"]).assign(subject=subjects)
