"""The audit: a proof over all files that every accepted message was settled exactly once.

    delaystate ─▶ facts ─┬─▶ messages and deliveries by state        accepted = delivered + …
                         ├─▶ lateness by hour, subject, subscription
                         ├─▶ messages with a history (moved, retried, redriven), by message
                         └─▶ violations and damage, one by one

The files are read once, and each hour is judged by itself (`settlement`); what comes to Spark is
counted right away. The facts have a row for each combination of hour, subject, subscription, state
and lateness that occurs, and single rows only for what must be looked at by itself: messages that
went through several schedule rows, and violations. A message that was moved or retried must go on
as another schedule row, maybe in another hour; that is the one thing hours cannot tell alone.

Of a directory of several shards all are read, and there is one verdict. A message is told apart by
its shard and its seq; it never leaves its shard, so what goes on is followed within it.

Cost: about 4 µs of one core per message, most of it Spark's rows; memory as `settlement`
says, and the facts.
Threads: the driver's; Spark's tasks.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from delayserver.pipeline.logs.columns import CORRUPT_DDL
from delayserver.pipeline.logs.options import TASKS_PER_CORE, absolute_root, paths_of
from delayserver.pipeline.progress import Job
from delayserver.pipeline.reports.lateness import UPPER_MS_SQL
from delayserver.pipeline.reports.names import (
    ShardNames,
    SharedNumbers,
    first_numbers,
    read_shard_names,
)
from delayserver.pipeline.states.settlement import BrokenGuarantee, EntryState
from delayserver.pipeline.states.snapshot import (
    Directory,
    open_directories,
)
from delayserver.records.ids import IdCodec
from delayserver.records.tables import change_key, read_hours, unpack_change
from storage.buckets import day_of
from storage.catalog import Catalog, Table
from storage.rows import HOUR_MS, PUBLISHES, RecordKind

PERCENTILES = {"p50_ms": 0.5, "p90_ms": 0.9, "p99_ms": 0.99, "p999_ms": 0.999}
EXAMPLES_MAX = 200
"""Violations that are shown one by one; all of them are counted."""
OUTCOMES = ("delivered", "cancelled", "dead", "pending", "dropped", "deleted", "missing")
"""What may have become of a message. The first four are what a healthy server shows; dropped: its
subscription was deleted, and others had it; deleted: it was moved or retried into an hour that is
past its retention."""

_SCHEMA = f"""shard int, hour int, subject_id int, subscription_id int, state_code tinyint,
    entry_state tinyint, is_first boolean, has_history boolean, problems tinyint,
    lateness_bucket int, kind tinyint, attempt int, seq long, message_seq long, successor_seq long,
    due_ms long, settled_ms long, {CORRUPT_DDL}"""
_KEYS = (
    "shard",
    "hour",
    "subject_id",
    "subscription_id",
    "state_code",
    "entry_state",
    "is_first",
    "has_history",
    "problems",
    "lateness_bucket",
)
_SINGLE = ("kind", "attempt", "seq", "message_seq", "successor_seq", "due_ms", "settled_ms")


@dataclass(slots=True)
class Audit:
    """What an audit found."""

    data_dir: str
    shards: int
    """How many were read."""
    taken_ms: int
    took_s: float
    messages: dict[str, int]
    """accepted, and what became of them; see OUTCOMES."""
    deliveries: dict[str, int]
    """By state: each message counts once for each subscription that it was for."""
    violations: dict[str, int]
    damage: list[dict[str, Any]]
    lateness: pd.DataFrame
    """Of all deliveries: bucket, upper_ms, count."""
    groups: pd.DataFrame
    """A line for everything (dimension all), each hour, subject and subscription: deliveries by
    state, and percentiles of their lateness."""
    examples: pd.DataFrame
    """The first EXAMPLES_MAX violations."""

    @property
    def is_clean(self) -> bool:
        """Whether nothing is wrong."""
        return not self.damage and not any(self.violations.values())

    def of(self, dimension: str) -> pd.DataFrame:
        """The lines of hours, subjects or subscriptions."""
        chosen = self.groups[self.groups["dimension"] == dimension]
        return chosen.drop(columns=["dimension"]).reset_index(drop=True)


def audit(job: Job, *data_dirs: str, now_ms: int | None = None) -> Audit:
    """Audit a data directory, also beside its server; or the shards of several, or exports.

    Raises NotADataDirectoryError, also for a shard that is not there, CatalogError, DamageError for
    a broken FORMAT file."""
    started = time.monotonic()
    roots = [absolute_root(one) for one in data_dirs]
    directories = open_directories(*roots)
    taken_ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    rows = (
        job.spark.read.format("delaystate")
        .option("partitions", TASKS_PER_CORE * job.cores)
        .options(now_ms=taken_ms, damage="rows")
        .schema(_SCHEMA)
        .options(**paths_of(roots))
        .load()
    )
    facts = _facts(rows).persist()
    try:
        with job.step("reading the logs"):
            damage = [row["_corrupt"].asDict() for row in _damaged(facts).collect()]
        with job.step("adding it up"):
            sound = facts.where("_corrupt is null")
            # What was read before has its names by now.
            names = {one.shard: read_shard_names(one) for one in directories}
            subjects = SharedNumbers({shard: one.subjects for shard, one in names.items()})
            subscriptions = SharedNumbers(
                {shard: one.subscriptions for shard, one in names.items()}
            )
            shared = subjects.put_into(job.spark, sound, "subject_id")
            shared = first_numbers(shared, "subscription_id")
            shared = subscriptions.put_into(job.spark, shared, "subscription_id")
            groups, lateness = _groups(shared)
            messages = _messages(sound, job)
            violations = _violations(sound)
            examples = _examples(sound)
        with job.step("following what was moved and retried"):
            lost = _lost(sound, directories)
            violations["lost"] = len(lost)
            messages["missing"] += len(lost)
            messages["deleted"] -= len(lost)
            examples = pd.concat([examples, lost]).head(EXAMPLES_MAX)
    finally:
        facts.unpersist()
    return Audit(
        data_dir=", ".join(roots),
        shards=len(directories),
        taken_ms=taken_ms,
        took_s=time.monotonic() - started,
        messages={"accepted": sum(messages.values()), **messages},
        deliveries=_deliveries(groups),
        violations={**violations, "damaged": len(damage)},
        damage=damage,
        lateness=lateness,
        groups=_named_groups(groups, subjects.names, subscriptions.names),
        examples=_named_examples(examples.reset_index(drop=True), directories, names),
    )


def write_parquet(spark: SparkSession, found: Audit, target: str) -> None:
    """The tables of an audit below a directory, in place of those of an earlier one."""
    tables = {
        "hours": found.of("hour"),
        "subjects": found.of("subject"),
        "subscriptions": found.of("subscription"),
        "lateness": found.lateness,
        "violations": found.examples,
    }
    for name, table in tables.items():
        arrow = pa.Table.from_pandas(table, preserve_index=False)
        frame = spark.createDataFrame(arrow)
        frame.coalesce(1).write.mode("overwrite").parquet(f"{target}/{name}")


# ── the one pass ───────────────────────────────────────────────────────────────────────────────


def _facts(rows: DataFrame) -> DataFrame:
    """Counts, and the rows that are looked at one by one."""
    is_single = F.col("has_history") | (F.col("problems") != 0) | F.col("_corrupt").isNotNull()
    lateness = F.when(_is(EntryState.DELIVERED), F.col("settled_ms") - F.col("due_ms"))
    return rows.groupBy(
        *_KEYS,
        *(F.when(is_single, F.col(name)).alias(name) for name in _SINGLE),
        "_corrupt",
    ).agg(F.count(F.lit(1)).alias("n"), F.max(lateness).alias("max_ms"))


def _is(state: EntryState, column: str = "state_code") -> Column:
    return F.col(column) == int(state)


def _damaged(facts: DataFrame) -> DataFrame:
    return facts.where("_corrupt is not null").select("_corrupt")


# ── deliveries ─────────────────────────────────────────────────────────────────────────────────


def _groups(facts: DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """A line for everything, each hour, each subject and each subscription."""
    keys = F.expr(
        "stack(4, 'all', 0, 'hour', hour, 'subject', subject_id, 'subscription', subscription_id)"
        " as (dimension, key)"
    )
    by_key = (
        facts.select(keys, "state_code", "lateness_bucket", "is_first", "n", "max_ms")
        .groupBy("dimension", "key", "state_code", "lateness_bucket")
        .agg(
            F.sum("n").alias("n"),
            F.sum(F.when(F.col("is_first"), F.col("n"))).alias("entries"),
            F.max("max_ms").alias("max_ms"),
        )
        .persist()
    )
    try:
        states = by_key.groupBy("dimension", "key").agg(
            F.coalesce(F.sum("entries"), F.lit(0)).alias("entries"),
            *(
                F.coalesce(F.sum(F.when(_is(state), F.col("n"))), F.lit(0)).alias(
                    state.name.lower()
                )
                for state in EntryState
            ),
            F.max("max_ms").alias("max_ms"),
        )
        groups = states.join(_percentiles(by_key), ["dimension", "key"], "left").toPandas()
        buckets = by_key.where("dimension = 'all' and lateness_bucket >= 0").select(
            "lateness_bucket",
            F.expr(UPPER_MS_SQL.format("lateness_bucket")).alias("upper_ms"),
            F.col("n").alias("count"),
        )
        lateness = buckets.orderBy("lateness_bucket").toPandas()
    finally:
        by_key.unpersist()
    return groups.sort_values(["dimension", "key"], ignore_index=True), lateness


def _percentiles(by_key: DataFrame) -> DataFrame:
    """Of each key, the upper end of the bucket that holds the delivery of that rank."""
    ordered = Window.partitionBy("dimension", "key").orderBy("lateness_bucket")
    ranked = by_key.where("lateness_bucket >= 0").select(
        "dimension",
        "key",
        F.expr(UPPER_MS_SQL.format("lateness_bucket")).alias("upper_ms"),
        F.sum("n").over(ordered).alias("through"),
        F.sum("n").over(Window.partitionBy("dimension", "key")).alias("total"),
    )
    return ranked.groupBy("dimension", "key").agg(
        *(
            F.min(
                F.when(F.col("through") >= F.ceil(F.col("total") * part), F.col("upper_ms"))
            ).alias(name)
            for name, part in PERCENTILES.items()
        )
    )


def _deliveries(groups: pd.DataFrame) -> dict[str, int]:
    everything = groups[groups["dimension"] == "all"]
    return {state.name.lower(): int(everything[state.name.lower()].sum()) for state in EntryState}


# ── messages ───────────────────────────────────────────────────────────────────────────────────

_PLAIN = {
    EntryState.DROPPED: "dropped",
    EntryState.DELIVERED: "delivered",
    EntryState.CANCELLED: "cancelled",
    EntryState.PENDING: "pending",
    EntryState.MISSING: "missing",
}


def _messages(facts: DataFrame, job: Job) -> dict[str, int]:
    """What became of messages, by OUTCOMES."""
    found = dict.fromkeys(OUTCOMES, 0)
    plain = facts.where("is_first and not has_history").groupBy("entry_state").agg(F.sum("n"))
    for entry_state, count in plain.collect():
        found[_PLAIN[EntryState(entry_state)]] += count
    for outcome, count in _with_history(facts).groupBy("outcome").count().collect():
        found[outcome] += count
    return found


def _with_history(facts: DataFrame) -> DataFrame:
    """A row for each message that went through several schedule rows, with what became of it."""

    def count(condition: Column) -> Column:
        return F.sum(F.when(condition, F.col("n")).otherwise(F.lit(0)))

    # A redrive takes one dead letter of the message away again.
    redriven = F.col("is_first") & (F.col("kind") == int(RecordKind.REDRIVE))
    dead = count(_is(EntryState.DEAD)) - count(redriven)
    return (
        facts.where("has_history")
        .groupBy("shard", "message_seq")
        .agg(
            F.when(count(_is(EntryState.MISSING)) > 0, "missing")
            .when(count(_is(EntryState.PENDING)) > 0, "pending")
            .when(dead > 0, "dead")
            .when(count(_is(EntryState.CANCELLED)) > 0, "cancelled")
            .when(count(_is(EntryState.DELIVERED)) > 0, "delivered")
            .when(count(_is(EntryState.DROPPED)) > 0, "dropped")
            .otherwise("deleted")
            .alias("outcome"),
            F.min_by("kind", "seq").alias("first_kind"),
        )
        # What went on by replays alone is counted where it was settled.
        .where(F.col("first_kind") != int(RecordKind.REPLAY))
    )


def _lost(facts: DataFrame, directories: Iterable[Directory]) -> pd.DataFrame:
    """Rows that say they go on as another schedule row, which is nowhere.

    The hour of the other one may be past its retention; the catalog knows where it was."""
    history = facts.where("has_history")
    entries = history.where("is_first").select("shard", F.col("seq").alias("successor_seq"))
    going_on = history.where("successor_seq != 0")
    dangling = going_on.join(entries, ["shard", "successor_seq"], "left_anti")
    rows = dangling.select(*_EXAMPLE, "successor_seq").toPandas()
    is_lost = np.zeros(len(rows), bool)
    for directory in directories:
        here = (rows["shard"] == directory.shard).to_numpy()
        some = rows[here]
        if some.empty:
            continue
        with directory.catalog() as catalog:
            hours = read_hours(catalog)
            is_lost[here] = [
                _is_lost(catalog, hours, message_seq, subscription_id, successor_seq)
                for message_seq, subscription_id, successor_seq in zip(
                    some["message_seq"], some["subscription_id"], some["successor_seq"], strict=True
                )
            ]
    return rows[is_lost].drop(columns=["successor_seq"]).assign(problem="lost")


def _is_lost(
    catalog: Catalog,
    hours: Iterable[int],
    message_seq: int,
    subscription_id: int,
    successor_seq: int,
) -> bool:
    for number in {0, int(subscription_id)}:
        value = catalog.get(Table.CHANGES, change_key(int(message_seq), number))
        if value is not None:
            change = unpack_change(value)
            if change.entry_seq == successor_seq:
                hour = change.due_ms // HOUR_MS
                return hour in hours or day_of(hour) in hours
    return False


# ── violations ─────────────────────────────────────────────────────────────────────────────────

_EXAMPLE = (
    "shard",
    "seq",
    "message_seq",
    "subject_id",
    "subscription_id",
    "state_code",
    "kind",
    "attempt",
    "due_ms",
    "settled_ms",
)


def _violations(facts: DataFrame) -> dict[str, int]:
    """How many rows have each problem."""
    (row,) = (
        facts.where("problems != 0")
        .agg(
            *(
                F.sum(F.when(F.col("problems").bitwiseAND(int(problem)) != 0, F.col("n"))).alias(
                    str(problem.name).lower()
                )
                for problem in BrokenGuarantee
            )
        )
        .collect()
    )
    return {name: count or 0 for name, count in row.asDict().items()}


def _examples(facts: DataFrame) -> pd.DataFrame:
    rows = (
        facts.where("problems != 0")
        .orderBy("hour", "shard", "seq", "subscription_id")
        .select(*_EXAMPLE, "problems")
        .limit(EXAMPLES_MAX)
        .toPandas()
    )
    problems = [
        ", ".join(
            str(one.name).lower().replace("_", " ") for one in BrokenGuarantee if one & number
        )
        for number in rows["problems"].tolist()
    ]
    return rows.drop(columns=["problems"]).assign(problem=problems)


def _named_groups(
    groups: pd.DataFrame, subjects: Mapping[int, str], subscriptions: Mapping[int, str]
) -> pd.DataFrame:
    """With a column `name`; lines of no subject or no subscription are left out."""
    names: list[str | None] = []
    for dimension, key in zip(groups["dimension"], groups["key"], strict=True):
        match dimension:
            case "subject":
                names.append(subjects.get(key))
            case "subscription":
                names.append(subscriptions.get(key))
            case "hour":
                names.append(str(pd.Timestamp(int(key) * HOUR_MS, unit="ms", tz="UTC")))
            case _:
                names.append("all")
    named = groups.assign(name=pd.Series(names, index=groups.index, dtype=object))
    return named[named["name"].notna()].reset_index(drop=True)


def _named_examples(
    examples: pd.DataFrame, directories: Iterable[Directory], names: Mapping[int, ShardNames]
) -> pd.DataFrame:
    """Names, times and ids, in the order in which people look at them."""
    codecs = {one.shard: IdCodec(one.shard, one.id_secret) for one in directories}
    is_publish = examples["kind"].isin([int(kind) for kind in PUBLISHES])
    shards = examples["shard"].tolist()
    ids = [
        codecs[shard].encode(int(due_ms), int(seq)) if known else None
        for shard, due_ms, seq, known in zip(
            shards, examples["due_ms"], examples["message_seq"], is_publish, strict=True
        )
    ]
    subjects = [
        names[shard].subjects.get(number)
        for shard, number in zip(shards, examples["subject_id"], strict=True)
    ]
    subscriptions = [
        names[shard].subscription(number)
        for shard, number in zip(shards, examples["subscription_id"], strict=True)
    ]
    settled_ms = examples["settled_ms"].where(examples["settled_ms"] > 0)
    return pd.DataFrame(
        {
            "problem": examples["problem"],
            "subject": pd.Series(subjects, index=examples.index, dtype=object),
            "subscription": pd.Series(subscriptions, index=examples.index, dtype=object),
            "due": pd.to_datetime(examples["due_ms"], unit="ms", utc=True),
            "settled": pd.to_datetime(settled_ms, unit="ms", utc=True),
            "attempt": examples["attempt"],
            "shard": examples["shard"],
            "seq": examples["seq"],
            "message_seq": examples["message_seq"],
            "message_id": ids,
        }
    )
