"""What the sink of a stream or table takes: Spark and a server, in one run.

The rows come out of a Parquet file that is in the system's memory: what Spark takes for that alone
is told beside it. A task, as it runs in an executor, is measured by itself, too, without Spark: its
processor time is what a row costs an executor.

Cost: see `measure_sink`. Threads: the caller's; Spark's tasks.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T
from report import Figure
from servers import Served, delay_server

from delayserver.pipeline.publish.mapping import MessageColumns
from delayserver.pipeline.publish.sending import BATCH_ROWS, Sender, SendingPlan
from storage.rows import HOUR_MS

TASKS = 2
TASK_ROWS = 10_000
"""Of a batch of Arrow, as Spark makes them."""
BODY_BYTES = 200
TIMEOUT_S = 60.0
LEVEL_PER_S = 100_000
SCHEMA = T.StructType(
    [
        T.StructField("due", T.TimestampType()),
        T.StructField("key", T.StringType()),
        T.StructField("body", T.StringType()),
    ]
)
CASES = (
    ("as columns", "body", True, 1),
    ("as columns, its body made of all others", None, True, 1),
    ("as JSON, to a server without Arrow", "body", False, 10),
)
"""What a row is sent as, the column of its body, whether the server is asked with columns, and by
what the rows are fewer."""


@dataclass(frozen=True, slots=True)
class _Taken:
    """What it took to publish some rows."""

    seconds: float
    task_s: float
    """Processor time of this process."""
    server_s: float
    """… and of the server."""


def make_rows(count: int, now_ms: int) -> pa.Table:
    """Messages that are due within a day of tomorrow, each with a key."""
    number = np.arange(count)
    due_ms = pa.array(now_ms + 24 * HOUR_MS + number * 24 * HOUR_MS // count)
    text = "x" * (BODY_BYTES - 20)
    return pa.table(
        {
            "due": due_ms.cast(pa.timestamp("ms")).cast(pa.timestamp("us", "UTC")),
            "key": [f"order-{one}" for one in range(count)],
            "body": [f'{{"n":{one},"text":"{text}"}}' for one in range(count)],
        }
    )


def measure_sink(spark: SparkSession, root: Path, count: int, rounds: int) -> list[Figure]:
    """So many rows in so many rounds after one to warm up, each under a subject of its own."""
    root.mkdir()
    rows = make_rows(count, time.time_ns() // 1_000_000)
    files = [str(root / f"{task}.parquet") for task in range(TASKS)]
    for task, file in enumerate(files):
        pq.write_table(rows.take(np.arange(task, count, TASKS)), file)
    figures = []
    with delay_server(root / "data") as served:
        table = spark.read.parquet(*files)
        figures.append(_by_spark(table, served, count, rounds))
        published = count
        for case, body, takes_arrow, share in CASES:
            some = rows.slice(0, count // share)
            figures.append(_by_task(some, served, case, body, takes_arrow, rounds))
            published += some.num_rows
        published *= rounds + 1
        figures[0].expect("messages", served.stats()["accepted"], published)
    return figures


def _by_spark(table: DataFrame, served: Served, count: int, rounds: int) -> Figure:
    taken, bare_s = [], []
    for number in range(rounds + 1):
        began = time.perf_counter()
        table.write.format("noop").mode("overwrite").save()
        bare_s.append(time.perf_counter() - began)
        began, before_s = time.perf_counter(), served.cpu_s()
        writer = table.write.format("delayserver").mode("append")
        writer.options(url=_url(served), subject=f"spark.{number}")
        writer.options(dueColumn="due", keyColumn="key", bodyColumn="body").save()
        seconds = time.perf_counter() - began
        taken.append(_Taken(seconds, 0.0, served.cpu_s() - before_s))
    best = min(taken[1:], key=lambda one: one.seconds)
    figure = Figure("sink", count / best.seconds, "rows/s")
    figure.cpu_us = best.server_s / count * 1e6
    others = ", ".join(f"{count / one.seconds:,.0f}" for one in taken[1:])
    figure.note = f"rounds: {others}; reading alone {min(bare_s):.2f} of {best.seconds:.2f} s"
    figure.demand("≥ 100,000 rows/s", figure.value >= LEVEL_PER_S)
    return figure


def _by_task(
    rows: pa.Table, served: Served, case: str, body: str | None, takes_arrow: bool, rounds: int
) -> Figure:
    batches, count = rows.to_batches(max_chunksize=TASK_ROWS), rows.num_rows
    taken = []
    for _ in range(rounds + 1):
        # Keys are new under a new subject.
        columns = MessageColumns("due", f"task.{time.monotonic_ns()}", key="key", body=body)
        plan = SendingPlan(
            _url(served), None, None, columns, True, "bench", None, None, BATCH_ROWS, TIMEOUT_S
        )
        sender = Sender(plan, SCHEMA, takes_arrow=takes_arrow)
        began, task_s, before_s = time.perf_counter(), time.process_time(), served.cpu_s()
        sender.send(iter(batches))
        task_s = time.process_time() - task_s
        taken.append(_Taken(time.perf_counter() - began, task_s, served.cpu_s() - before_s))
    best = min(taken[1:], key=lambda one: one.task_s)
    figure = Figure(f"sink: a row {case}", best.task_s / count * 1e6, "µs of an executor")
    figure.cpu_us = best.server_s / count * 1e6
    figure.note = f"one task alone: {count / best.seconds:,.0f} rows/s"
    return figure


def _url(served: Served) -> str:
    return f"http://127.0.0.1:{served.port}"
