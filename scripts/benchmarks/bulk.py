"""What a bulk load costs, beside POSTing the same rows: tables of future messages into a server.

    scripts/bench bulk [--quick] [--rows N] [--posted-rows N] [--copied-rows N] [--rounds N]
                       [--only loaded,posted,copied] [--json FILE]

load      a Parquet table of --rows messages of 200 bytes, due within a week: from the table to
          durable messages, on Spark with two cores. Level: 300,000 rows/s
keyed     the same with a key for each row: hashed, looked up, deduplicated
posted    --posted-rows of the same rows in batches of 10,000 (the most a batch may have) and of
          500, over one connection, each batch made beforehand
copied    --copied-rows with keys, by turns with PostgreSQL's COPY of the same into a table with a
          primary key and an index by due time: the ratio of the seconds. Levels: 0.7 until
          durable, 1.0 until filed

The server is a real one with its defaults, on a disk; both ways end with the same promise, that
every row is synced. Time is that of the best of --rounds rounds after a small one that starts
Spark's workers. The load generator, Spark and the server share the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from copying import copying
from load import LoadConnection, http_request
from peers.postgresql import is_installed
from report import Figure, make_console, make_parser, parse, report
from servers import Served, add_directory, delay_server, disk_directory
from sessions import open_session

from delayserver.pipeline.load.load import Loaded, LoadJob, run
from delayserver.pipeline.load.source import read_table
from delayserver.pipeline.progress import Job
from delayserver.pipeline.publish.mapping import MessageColumns

WEEK_MS = 7 * 86_400_000
WARM_ROWS = 20_000
LEVEL = 300_000
DURABLE_RATIO, FILED_RATIO = 0.7, 1.0
"""Of the time that PostgreSQL takes."""
CASES = ("loaded", "posted", "copied")
SUBJECT = "coupon.expiry"


def rows(count: int) -> list[dict[str, Any]]:
    """Coupons that expire within a week."""
    now_ms = time.time_ns() // 1_000_000 + 3_600_000
    return [
        {
            "key": f"coupon-{number}",
            # Spread as a hash would, so that neighbours are due at different times.
            "due": now_ms + number * 2_654_435_761 % WEEK_MS,
            "body": json.dumps({"coupon": number, "text": "x" * 165}),
        }
        for number in range(count)
    ]


def write_table(path: Path, made: list[dict[str, Any]]) -> None:
    table = pa.table(
        {
            "key": [row["key"] for row in made],
            "due": pa.array([row["due"] for row in made], pa.timestamp("ms", tz="UTC")),
            "body": [row["body"] for row in made],
        }
    )
    pq.write_table(table, path, row_group_size=max(1, len(made) // 8))


def load(job: Job, server: Served, data_dir: Path, path: Path, name: str, keyed: bool) -> Loaded:
    """One load under a subject of its own, so that no key is taken."""
    columns = MessageColumns(
        "due", subject=f"{SUBJECT}.{name}", key="key" if keyed else None, body="body"
    )
    wanted = LoadJob(name, data_dir, f"http://127.0.0.1:{server.port}", columns)
    return run(job, read_table(job, str(path), "parquet", {}), wanted)


def post(server: Served, made: list[dict[str, Any]], batch: int, keyed: bool) -> float:
    """Rows per second in batches."""
    requests = []
    for start in range(0, len(made), batch):
        messages = [
            {
                "subject": f"{SUBJECT}.posted{batch}{keyed}",
                "body": msgspec.Raw(row["body"].encode()),
                "deliver_at": row["due"],
                **({"key": row["key"]} if keyed else {}),
            }
            for row in made[start : start + batch]
        ]
        body = msgspec.json.encode(messages)
        requests.append(http_request("POST", "/v1/messages/batch", body))
    with LoadConnection(server.port) as connection:
        began = time.monotonic()
        for request in requests:
            connection.demand(request)
        return len(made) / (time.monotonic() - began)


def measure_loads(
    job: Job, server: Served, directory: Path, options: argparse.Namespace
) -> list[Figure]:
    """Loads, with keys and without; and the same rows posted."""
    data_dir, table, made = directory / "data", directory / "table.parquet", rows(options.rows)
    write_table(table, made)
    best: dict[bool, Loaded] = {}
    for number in range(options.rounds):
        for keyed in (False, True):
            loaded = load(job, server, data_dir, table, f"r{number}{keyed}", keyed)
            if keyed not in best or loaded.rows_per_s > best[keyed].rows_per_s:
                best[keyed] = loaded
            server.wait_until_filed(600)
    posted = {
        (batch, keyed): post(server, made[: options.posted_rows], batch, keyed)
        for batch in (500, 10_000)
        for keyed in (False, True)
        if "posted" in options.only
    }
    figures = []
    for keyed, name in ((False, "load"), (True, "keyed")):
        loaded = best[keyed]
        figure = Figure(
            f"{name}: {options.rows:,} rows of a Parquet table",
            loaded.rows_per_s,
            "rows/s",
            ratios={
                f"posted by {batch:,}": loaded.rows_per_s / rate
                for (batch, is_keyed), rate in posted.items()
                if is_keyed == keyed
            },
            note=f"staged {loaded.staging_s:.1f} s, committed {loaded.adopting_s:.1f} s, "
            f"filed {loaded.filing_s:.1f} s later",
        )
        if not keyed:
            figure.demand(f"≥ {LEVEL:,}", loaded.rows_per_s >= LEVEL)
        figure.expect("accepted", loaded.accepted, options.rows)
        figures.append(figure)
    for (batch, keyed), rate in posted.items():
        kind = "with key" if keyed else "without key"
        figures.append(Figure(f"posted in batches of {batch:,}, {kind}", rate, "rows/s"))
    return figures


def measure_copies(
    job: Job, server: Served, directory: Path, options: argparse.Namespace
) -> list[Figure]:
    """Loads and COPY by turns; each side's best counts, and the first round only warms them up."""
    data_dir, table, made = (
        directory / "data",
        directory / "copied.parquet",
        rows(options.copied_rows),
    )
    write_table(table, made)
    copied_s: list[float] = []
    durable_s: list[float] = []
    filed_s: list[float] = []
    with copying(directory / "postgresql", made) as database:
        for number in range(options.rounds + 1):
            copied_s.append(database.copy())
            began = time.monotonic()
            loaded = load(job, server, data_dir, table, f"copied{number}", True)
            filed_s.append(time.monotonic() - began)
            durable_s.append(filed_s[-1] - loaded.filing_s)
            server.wait_until_filed(600)
    best_s = min(copied_s[1:])
    figures = []
    for name, seconds, ratio in (
        ("durable", min(durable_s[1:]), DURABLE_RATIO),
        ("filed", min(filed_s[1:]), FILED_RATIO),
    ):
        figure = Figure(
            f"copied: {options.copied_rows:,} keyed rows until {name}",
            seconds / best_s,
            "of COPY's time",
            note=f"{seconds:.1f} s, PostgreSQL {best_s:.1f} s",
        )
        figure.demand(f"≤ {ratio}", seconds <= ratio * best_s)
        figure.expect("accepted", loaded.accepted, options.copied_rows)
        figures.append(figure)
    return figures


def main() -> int:
    """Exit status 1: counts were wrong."""
    parser = make_parser("bulk", __doc__)
    parser.add_argument("--rows", type=int, default=2_000_000, help="rows of the table")
    parser.add_argument("--posted-rows", type=int, default=200_000, help="of them, posted")
    parser.add_argument("--copied-rows", type=int, default=500_000, help="beside PostgreSQL")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join(CASES), help="which of them")
    add_directory(parser)
    options = parse(parser, rows=2_000, posted_rows=1_000, copied_rows=1_000, rounds=1)
    options.only = options.only.split(",")
    console = make_console()
    master = f"local[{min(2, os.cpu_count() or 1)}]"
    figures: list[Figure] = []
    with disk_directory(options.dir) as directory:
        data_dir, warm = directory / "data", directory / "warm.parquet"
        write_table(warm, rows(WARM_ROWS if not options.quick else options.rows))
        with (
            delay_server(data_dir) as server,
            open_session("bench", master, quick=options.quick) as spark,
        ):
            job = Job(spark)
            load(job, server, data_dir, warm, "warm", keyed=True)
            if {"loaded", "posted"} & {*options.only}:
                figures += measure_loads(job, server, directory, options)
            if "copied" in options.only:
                if is_installed():
                    figures += measure_copies(job, server, directory, options)
                else:
                    console.print("copied: PostgreSQL is not installed (Debian: postgresql)")
    return report(options, "bulk", "Bulk load", figures, console)


if __name__ == "__main__":
    sys.exit(main())
