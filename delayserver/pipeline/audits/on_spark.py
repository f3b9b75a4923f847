"""The audit as one job on Spark: a stage of tasks that read and judge, and nothing is shuffled.

    driver: plan ──▶ tasks, in groups of about the same size
    executors: a group each ──▶ facts, as bytes
    driver: merged

The driver looks at the directory once, and every task judges by the driver's snapshot. An executor
that does not see the directory, or sees another one, must not count as one that finds nothing. So
each task opens FORMAT and compares the stamp.

Cost: that of `audit`, on all cores; half a second of Spark. Threads: the driver's; Spark's tasks.
"""

import pickle
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from delayserver.pipeline.audits.audit import Audit, merge
from delayserver.pipeline.audits.facts import HourFacts, unpack_facts
from delayserver.pipeline.audits.judging import judge_of
from delayserver.pipeline.audits.plan import AuditPlan, HourTask, ShardBasis, make_plan
from delayserver.pipeline.audits.verdicts import Verdicts
from delayserver.pipeline.logs.logs import share
from delayserver.pipeline.logs.options import TASKS_PER_CORE
from delayserver.pipeline.progress import Job
from delayserver.pipeline.workers import spare_imports

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SCHEMA = "number int, facts binary"
_ARROW_SCHEMA = pa.schema([("number", pa.int32()), ("facts", pa.binary())])

Group = list[tuple[int, HourTask]]
"""Tasks and their numbers in the plan."""


def audit(
    job: Job,
    *data_dirs: str,
    now_ms: int | None = None,
    since_ms: int | None = None,
    with_bodies: bool = False,
    verdicts: Verdicts | None = None,
) -> Audit:
    """Audit a data directory, or several, also beside the server. Raises the errors of
    `audit_here`, and OtherNodeError if an executor does not see a directory."""
    started = time.monotonic()
    job.progress("looking", 0, 0)
    now_ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    plan = make_plan(
        *data_dirs, now_ms=now_ms, since_ms=since_ms, with_bodies=with_bodies, verdicts=verdicts
    )
    with job.step("reading and judging"):
        judged = list(_judged(job, plan))
    job.progress("adding it up", 0, 0)
    found = merge(plan, judged)
    found.took_s = time.monotonic() - started
    return found


def _judged(job: Job, plan: AuditPlan) -> Iterator[tuple[int, HourFacts]]:
    numbered = list(enumerate(plan.tasks))
    if not numbered:
        return
    sizes = [task.size for task in plan.tasks]
    groups = share(numbered, sizes, TASKS_PER_CORE * job.cores)
    # A basis has all rows that are not filed yet, and each task its part of them.
    bases = {
        shard: replace(one, snapshot=replace(one.snapshot, unfiled={}))
        for shard, one in plan.bases.items()
    }
    pickled = [pickle.dumps(group) for group in groups]
    frame = job.spark.range(0, len(groups), 1, len(groups))
    for row in frame.mapInArrow(partial(_judge_groups, bases, pickled), _SCHEMA).collect():
        yield row["number"], unpack_facts(bytes(row["facts"]))


def _judge_groups(
    bases: dict[int, ShardBasis], pickled: list[bytes], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Runs in a worker: the facts of all tasks of some groups."""
    spare_imports()
    for basis in bases.values():
        basis.directory.check_here()
    judges = {shard: judge_of(basis) for shard, basis in bases.items()}
    for batch in batches:
        for index in batch.column(0).to_pylist():
            for number, task in pickle.loads(pickled[index]):
                facts = judges[task.shard](task).pack()
                yield pa.RecordBatch.from_pylist(
                    [{"number": number, "facts": facts}], schema=_ARROW_SCHEMA
                )


def write_parquet(spark: "SparkSession", found: Audit, target: str) -> None:
    """Write the tables of an audit below a directory; they replace those of an earlier one."""
    tables = {
        "hours": found.of("hour"),
        "subjects": found.of("subject"),
        "subscriptions": found.of("subscription"),
        "lateness": found.lateness,
        "violations": found.examples,
    }
    for name, table in tables.items():
        arrow = pa.Table.from_pylist(
            [{key: value for key, value in row.items() if key != "dimension"} for row in table],
            schema=_table_schema(name),
        )
        frame = spark.createDataFrame(arrow)
        frame.coalesce(1).write.mode("overwrite").parquet(f"{target}/{name}")


def _table_schema(name: str) -> pa.Schema:
    """The columns of a table, even if it has no rows."""
    from delayserver.pipeline.audits.groups import PERCENTILES
    from delayserver.pipeline.states.entry_states import EntryState

    numbers: list[str]
    match name:
        case "lateness":
            texts, numbers = [], ["bucket", "upper_ms", "count"]
        case "violations":
            texts = ["problem", "subject", "subscription", "due", "settled", "message_id"]
            numbers = ["attempt", "shard", "seq", "message_seq"]
        case _:
            texts = ["name"]
            states = [one.name.lower() for one in EntryState]
            numbers = ["key", "entries", *states, "max_ms", *PERCENTILES]
    return pa.schema([(one, pa.string()) for one in texts] + [(one, pa.int64()) for one in numbers])
