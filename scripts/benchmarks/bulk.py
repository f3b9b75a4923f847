"""What a bulk load costs, beside POSTing the same rows: tables of future messages into a server.

    scripts/bench bulk [--quick] [--rows N] [--posted-rows N] [--rounds N] [--json FILE]

load      a Parquet table of --rows messages of 200 bytes, due within a week: from the table to
          durable messages, on Spark with two cores. Level: 300,000 rows/s
keyed     the same with a key for each row: hashed, looked up, deduplicated
posted    --posted-rows of the same rows in batches of 10,000 (the most a batch may have) and of
          500, over one connection, each batch made beforehand

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
from load import LoadConnection, http_request
from report import (
    Figure,
    add_options,
    make_console,
    parse,
    show_figures,
    without_levels,
    write_json,
)
from servers import Served, add_directory, delay_server, disk_directory
from sessions import open_session

from delayserver.pipeline.load.load import Loaded, LoadJob, run
from delayserver.pipeline.load.source import read_table
from delayserver.pipeline.progress import Job
from delayserver.pipeline.publish.mapping import MessageColumns

WEEK_MS = 7 * 86_400_000
WARM_ROWS = 20_000
LEVEL = 300_000
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


def main() -> int:
    """Exit status 1: counts were wrong."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench bulk",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", type=int, default=2_000_000, help="rows of the table")
    parser.add_argument("--posted-rows", type=int, default=200_000, help="of them, posted")
    parser.add_argument("--rounds", type=int, default=3)
    add_options(parser)
    add_directory(parser)
    options = parse(parser, rows=2_000, posted_rows=1_000, rounds=1)
    console = make_console()
    master = f"local[{min(2, os.cpu_count() or 1)}]"
    made = rows(options.rows)
    figures: list[Figure] = []
    with disk_directory(options.dir) as directory:
        table, warm = directory / "table.parquet", directory / "warm.parquet"
        write_table(table, made)
        write_table(warm, made[:WARM_ROWS])
        data_dir = directory / "data"
        with (
            delay_server(data_dir) as server,
            open_session("bench", master, quick=options.quick) as spark,
        ):
            job = Job(spark)
            load(job, server, data_dir, warm, "warm", keyed=True)
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
            }
    for keyed, name in ((False, "load"), (True, "keyed")):
        loaded = best[keyed]
        figure = Figure(
            f"{name}: {options.rows:,} rows of a Parquet table",
            loaded.rows_per_s,
            "rows/s",
            ratios={
                f"posted by {batch:,}": loaded.rows_per_s / posted[batch, keyed]
                for batch in (500, 10_000)
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
    if options.quick:
        without_levels(figures)
    show_figures("Bulk load", figures, console)
    if options.json is not None:
        write_json(options.json, "bulk", figures)
    return 1 if any(figure.wrong for figure in figures) else 0


if __name__ == "__main__":
    sys.exit(main())
