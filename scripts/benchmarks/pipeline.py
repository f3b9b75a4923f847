"""What the data pipeline costs: reading the logs on Spark, the audit of everything, and the sink.

    scripts/bench pipeline [--quick] [--json FILE] [--read-rows N] [--audit-rows N,…]
                           [--sink-rows N] [--rounds N] [--only read,audit,sink] [--master MASTER]
                           [--dir DIRECTORY]

read      the schedule log of --read-rows messages of 200 bytes as a table: three columns, all
          columns, bodies, and what became of every message (delaystate); each beside the same rows
          as Parquet, by turns in the same session. Level: columns in at most 1.2 times the time of
          Parquet
audit     directories of --audit-rows messages each, most of them delivered, 5 % cancelled, the rest
          pending. Levels: 2 million in 4 s, 10 million in 10 s, 2 GB, and the same per message to
          40 million. Besides, once more when an hour was settled since, and without Spark
sink      --sink-rows messages of 200 bytes with keys go from a table to a server, by two tasks; and
          what a row costs one task, which is measured by itself. Level: 100,000 rows/s

The directories are made with the server's own parts. A time is the best of some rounds, the first
of which is left out: it starts workers. Memory is that of the JVM and of all its workers together,
at the most, without pages of files.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from auditing import measure_audits
from directories import BATCH_ROWS, Maker
from publishing import measure_sink
from pyspark.sql import DataFrame, SparkSession
from report import Figure, make_console, make_parser, parse, report
from servers import add_directory, disk_directory
from sessions import open_session

from delayserver.records.subscriptions import Subscription
from storage.rows import HOUR_MS

SUBJECTS = ("order.unpaid", "envelope.refund", "coupon.expiry", "cart.reminder")
COLUMNS = "seq long, due_ms long, subject_id int"
STATES = "seq long, subject string, subscription string, state string, due timestamp"
AUDIT_ROWS = "500000,1000000,2000000,4000000,10000000,20000000,40000000"
ALL_COLUMNS = f"{COLUMNS}, message_seq long, subscription_id int, payload_length int, kind tinyint"


def make_directory(root: Path, count: int, *, body_bytes: int, hours: int, delivered: bool) -> None:
    """So many messages; with `delivered`, those of all hours but the last are settled."""
    first_hour = 494_500
    maker = Maker(root, b"x" * body_bytes, SUBJECTS)
    rng = np.random.default_rng(5)
    maker.define(
        Subscription(
            id=1,
            name="everything",
            subject="*",
            type="webhook",
            created_ms=first_hour * HOUR_MS,
        )
    )
    last = first_hour + hours - 1
    for start in range(0, count, BATCH_ROWS):
        spread = rng.integers(0, hours * HOUR_MS, min(BATCH_ROWS, count - start))
        rows = maker.publish(first_hour * HOUR_MS + spread)
        if delivered:
            cancelled = rows["seq"] % 20 == 0
            maker.cancel(rows[cancelled])
            done = ~cancelled & (rows["due_ms"] // HOUR_MS < last)
            maker.deliver(rows[done])
    maker.close(range(first_hour, last) if delivered else range(0))


def make_settled(root: Path, count: int, hours: int) -> None:
    """So many messages for an audit, settled but for those of the last hour."""
    make_directory(root, count, body_bytes=20, hours=hours, delivered=True)


# ---- measuring -------------------------------------------------------------------------------


def consume(frame: DataFrame) -> None:
    """Read every column of every row, and keep nothing."""
    frame.write.format("noop").mode("overwrite").save()


def compare(
    ours: Callable[[], DataFrame], base: Callable[[], DataFrame], rounds: int
) -> tuple[float, float]:
    """Seconds of both, by turns; the best of so many rounds after one to warm up."""
    best = [float("inf")] * 2
    for number in range(rounds + 1):
        for which, make in enumerate((ours, base)):
            began = time.perf_counter()
            consume(make())
            if number:
                best[which] = min(best[which], time.perf_counter() - began)
    return best[0], best[1]


def measure_reading(spark: SparkSession, root: Path, count: int, rounds: int) -> list[Figure]:
    """The schedule log beside Parquet."""
    figures = []
    cases = {
        "three columns": ("delaylog", COLUMNS),
        "all columns": ("delaylog", ALL_COLUMNS),
        "bodies": ("delaylog", f"{COLUMNS}, body binary"),
        "states": ("delaystate", STATES),
    }
    for case, (source, schema) in cases.items():
        path = str(root / f"{case}.parquet")

        def ours(source: str = source, schema: str = schema) -> DataFrame:
            return spark.read.format(source).schema(schema).load(str(root / "data"))

        def base(path: str = path) -> DataFrame:
            return spark.read.parquet(path)

        ours().write.parquet(path)
        seconds, base_seconds = compare(ours, base, rounds)
        figure = Figure(f"read {case}", count / seconds, "rows/s")
        figure.ratios["Parquet's rate"] = base_seconds / seconds
        figure.note = f"{seconds:.2f} s, Parquet {base_seconds:.2f} s"
        figure.expect("rows", ours().count(), count)
        if case != "bodies":
            figure.demand("≤ 1.2 × Parquet's time", seconds <= 1.2 * base_seconds)
        figures.append(figure)
    return figures


def main() -> int:
    """Exit status 1: counts were wrong."""
    parser = make_parser("pipeline", __doc__)
    parser.add_argument("--read-rows", type=int, default=2_000_000)
    parser.add_argument("--audit-rows", default=AUDIT_ROWS, metavar="N,…")
    parser.add_argument("--sink-rows", type=int, default=500_000)
    parser.add_argument("--rounds", type=int, default=4, help="of each reading, and of the sink")
    parser.add_argument("--only", default="read,audit,sink", help="which of them")
    parser.add_argument("--master", default="local[*]")
    add_directory(parser)
    quick = {"read_rows": 5_000, "audit_rows": "5000,10000", "sink_rows": 5_000}
    arguments = parse(parser, **quick, rounds=1, master="local[2]")
    chosen = arguments.only.split(",")
    console = make_console()
    figures: list[Figure] = []
    with disk_directory(arguments.dir) as root:
        if "read" in chosen:
            make_directory(
                root / "read" / "data",
                arguments.read_rows,
                body_bytes=200,
                hours=4,
                delivered=False,
            )
        with open_session("bench", arguments.master, quick=arguments.quick) as spark:
            if "read" in chosen:
                figures += measure_reading(
                    spark, root / "read", arguments.read_rows, arguments.rounds
                )
            if "audit" in chosen:
                sizes = [int(size) for size in arguments.audit_rows.split(",")]
                figures += measure_audits(spark, root, sizes, make_settled)
            if "sink" in chosen:
                figures += measure_sink(spark, root / "sink", arguments.sink_rows, arguments.rounds)
    return report(arguments, "pipeline", "The data pipeline", figures, console)


if __name__ == "__main__":
    sys.exit(main())
