"""What the data pipeline costs: reading the logs on Spark, and the audit of everything.

    python scripts/benchmarks/pipeline.py [--json FILE] [--read-rows N] [--audit-rows N]

read      the schedule log of --read-rows messages of 200 bytes as a table: three columns, all
          columns, and bodies; each beside the same rows as Parquet, by turns in the same session.
          Level: columns in at most 1.5 times the time of Parquet
audit     --audit-rows messages, most of them delivered, 5 % cancelled, the rest pending.
          Level: 60 s and 4 GB for 10 million

The directories are made with the server's own parts. A time is the best of some rounds, the first
of which is left out: it starts workers. Memory is that of the JVM and of all its workers together,
at the most, without pages of files.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from pyspark.sql import DataFrame, SparkSession
from report import Figure, add_options, as_documents, make_console, show_figures, write_json

from delayserver.expansion import Staging
from delayserver.message import Payload, encode_payload
from delayserver.pipeline.audit import audit
from delayserver.pipeline.progress import Job
from delayserver.pipeline.session import open_session
from delayserver.replay import Records, Replay
from delayserver.subscriptions import Subscription, encode_subscription
from storage.catalog import LmdbCatalog
from storage.directory import open_identity
from storage.files import OsFiles
from storage.frame import Rows, seal
from storage.hour_log import HourLog
from storage.message_log import Durability, MessageLog
from storage.rows import (
    DISPATCH_DTYPE,
    FLAG_AFTER_SYNC,
    HOUR_MS,
    MESSAGE_DTYPE,
    LogKind,
    Outcome,
    RecordKind,
)

BATCH_ROWS = 100_000
DISPATCH_ROWS = 5_000
SUBJECTS = ("order.unpaid", "envelope.refund", "coupon.expiry", "cart.reminder")
ROUNDS = 4
COLUMNS = "seq long, due_ms long, subject_id int"
ALL_COLUMNS = f"{COLUMNS}, message_seq long, subscription_id int, payload_length int, kind tinyint"


# ---- a directory -----------------------------------------------------------------------------


class Maker:
    """A data directory, made with the parts of the server that write it."""

    def __init__(self, root: Path, body_bytes: int) -> None:
        files = OsFiles(str(root))
        self.stamp = open_identity(files, random_bytes=os.urandom).stamp
        files.make_directory("catalog")
        for kind in ("schedule", "dispatch"):
            files.make_directory(kind)
        self._catalog = LmdbCatalog(str(root / "catalog"), max_bytes=1 << 32)
        self._log = MessageLog(
            files, stamp=self.stamp, segment_bytes=1 << 16, durability=Durability.OS
        )
        schedule, dispatch = (
            HourLog(files, kind, stamp=self.stamp) for kind in (LogKind.SCHEDULE, LogKind.DISPATCH)
        )
        self._dispatch = dispatch
        staging = Staging(files, self.stamp)
        self._replay = Replay(self._catalog, schedule, dispatch, self._log, staging)
        self._sealed = encode_payload(Payload(b"x" * body_bytes))
        self._seq = 0
        self._rng = np.random.default_rng(5)

    def define(self, created_ms: int) -> None:
        """Subjects, and a subscription to all of them."""
        subscription = Subscription(
            id=1, name="everything", subject="*", type="webhook", created_ms=created_ms
        )
        payloads = [encode_subscription(subscription), *(name.encode() for name in SUBJECTS)]
        rows = self._rows(len(payloads))
        rows["kind"] = [RecordKind.SUBSCRIPTION] + [RecordKind.SUBJECT] * len(SUBJECTS)
        rows["subscription_id"][0] = 1
        rows["subject_id"] = np.arange(len(payloads))
        sealed = [seal(payload) for payload in payloads]
        lengths = np.array([len(data) for data in sealed])
        rows["payload_length"], rows["payload_offset"] = lengths, np.cumsum(lengths) - lengths
        self._replay.file([Records(rows, b"".join(sealed))], created_ms)

    def _rows(self, count: int) -> Rows:
        rows = np.zeros(count, MESSAGE_DTYPE)
        rows["seq"] = self._seq + 1 + np.arange(count)
        rows["message_seq"] = rows["seq"]
        self._seq += count
        return rows

    def publish(self, count: int, first_hour: int, hours: int) -> Rows:
        """Messages that are due evenly within so many hours."""
        rows = self._rows(count)
        rows["kind"] = RecordKind.PUBLISH
        spread = self._rng.integers(0, hours * HOUR_MS, count)
        rows["due_ms"] = first_hour * HOUR_MS + spread
        rows["subject_id"] = self._rng.integers(1, len(SUBJECTS) + 1, count)
        length = len(self._sealed)
        rows["payload_length"] = length
        rows["payload_offset"] = np.arange(count) * length
        rows["payload_crc"] = int.from_bytes(self._sealed[:4], "little")
        self._replay.file([Records(rows, self._sealed * count)], first_hour * HOUR_MS)
        self._replay.checkpoint()
        return rows

    def cancel(self, messages: Rows) -> None:
        """Cancel messages."""
        rows = self._rows(len(messages))
        rows["kind"] = RecordKind.CANCEL
        rows["message_seq"] = rows["target_seq"] = messages["seq"]
        rows["target_due_ms"] = messages["due_ms"]
        self._replay.file([Records(rows, b"")], int(messages["due_ms"][0]))

    def deliver(self, messages: Rows) -> None:
        """Record messages as delivered, a few milliseconds late, a few of them more."""
        late_ms = self._rng.lognormal(1.0, 1.1, len(messages)).astype(np.int64)
        rows = np.zeros(len(messages), DISPATCH_DTYPE)
        for name in ("seq", "message_seq", "due_ms"):
            rows[name] = messages[name]
        rows["settled_ms"] = messages["due_ms"] + late_ms
        rows["subscription_id"] = rows["attempt"] = 1
        rows["outcome"] = Outcome.DELIVERED
        hours = rows["due_ms"] // HOUR_MS
        for hour in np.unique(hours).tolist():
            here = rows[hours == hour]
            for start in range(0, len(here), DISPATCH_ROWS):
                some = here[start : start + DISPATCH_ROWS].copy()
                some["flags"][0] = FLAG_AFTER_SYNC
                self._dispatch.append(
                    hour,
                    some.tobytes(),
                    b"",
                    offset=self._dispatch.size(hour),
                    first_seq=int(some["seq"].min()),
                    last_seq=int(some["seq"].max()),
                    created_ms=int(some["settled_ms"][0]),
                )

    def close(self, retired: range) -> None:
        """End, with these hours settled."""
        for hour in retired:
            self._replay.retire(hour, self._seq, (hour + 1) * HOUR_MS)
        self._replay.checkpoint()
        self._dispatch.sync()
        self._log.close()
        self._catalog.close()


def make_directory(root: Path, count: int, *, body_bytes: int, hours: int, delivered: bool) -> None:
    """So many messages; with `delivered`, those of all hours but the last are settled."""
    first_hour = 494_500
    maker = Maker(root, body_bytes)
    maker.define(first_hour * HOUR_MS)
    last = first_hour + hours - 1
    for start in range(0, count, BATCH_ROWS):
        rows = maker.publish(min(BATCH_ROWS, count - start), first_hour, hours)
        if delivered:
            cancelled = rows["seq"] % 20 == 0
            maker.cancel(rows[cancelled])
            done = ~cancelled & (rows["due_ms"] // HOUR_MS < last)
            maker.deliver(rows[done])
    maker.close(range(first_hour, last) if delivered else range(0))


# ---- measuring -------------------------------------------------------------------------------


def memory_bytes() -> int:
    """What this process and everything below it hold for themselves."""
    parents: dict[int, int] = {}
    held: dict[int, int] = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            lines = dict(line.split(":\t", 1) for line in status.read_text().splitlines())
            number = int(lines["Pid"])
            parents[number] = int(lines["PPid"])
            held[number] = int(lines.get("RssAnon", "0").split()[0]) * 1024
        except (OSError, KeyError, ValueError):
            continue
    ours = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return sum(held.get(pid, 0) for pid in ours)


@contextmanager
def watched_memory() -> Iterator[list[int]]:
    """The most that was held within the context, as the last item."""
    most, ended = [memory_bytes()], threading.Event()

    def watch() -> None:
        while not ended.wait(0.2):
            most.append(max(most[-1], memory_bytes()))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        ended.set()
        thread.join()


def consume(frame: DataFrame) -> None:
    """Read every column of every row, and keep nothing."""
    frame.write.format("noop").mode("overwrite").save()


def compare(ours: Callable[[], DataFrame], base: Callable[[], DataFrame]) -> tuple[float, float]:
    """Seconds of both, by turns; the best of ROUNDS after one to warm up."""
    best = [float("inf")] * 2
    for number in range(ROUNDS + 1):
        for which, make in enumerate((ours, base)):
            began = time.perf_counter()
            consume(make())
            if number:
                best[which] = min(best[which], time.perf_counter() - began)
    return best[0], best[1]


def measure_reading(spark: SparkSession, root: Path, count: int) -> list[Figure]:
    """The schedule log beside Parquet."""
    figures = []
    cases = {
        "three columns": COLUMNS,
        "all columns": ALL_COLUMNS,
        "bodies": f"{COLUMNS}, body binary",
    }
    for case, schema in cases.items():
        path = str(root / f"{case}.parquet")

        def ours(schema: str = schema) -> DataFrame:
            return spark.read.format("delaylog").schema(schema).load(str(root / "data"))

        def base(path: str = path) -> DataFrame:
            return spark.read.parquet(path)

        ours().write.parquet(path)
        seconds, base_seconds = compare(ours, base)
        figure = Figure(f"read {case}", count / seconds, "rows/s")
        figure.ratios["Parquet's rate"] = base_seconds / seconds
        figure.note = f"{seconds:.2f} s, Parquet {base_seconds:.2f} s"
        figure.expect("rows", ours().count(), count)
        if case != "bodies":
            figure.demand("≤ 1.5 × Parquet's time", seconds <= 1.5 * base_seconds)
        figures.append(figure)
    return figures


def measure_audit(spark: SparkSession, root: Path, count: int) -> Figure:
    """The audit of everything."""
    with watched_memory() as most:
        found = audit(Job(spark), str(root))
    figure = Figure("audit", count / found.took_s, "messages/s")
    figure.note = f"{found.took_s:.1f} s, {most[-1] / 2**30:.2f} GB"
    figure.expect("accepted", found.messages["accepted"], count)
    figure.expect("violations", sum(found.violations.values()), 0)
    part = count / 10_000_000
    figure.demand("10 M in 60 s and 4 GB", found.took_s <= 60 * part and most[-1] <= 4 * 2**30)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_options(parser, "the rates")
    parser.add_argument("--read-rows", type=int, default=2_000_000)
    parser.add_argument("--audit-rows", type=int, default=10_000_000)
    parser.add_argument("--only", default="read,audit", help="which of them")
    parser.add_argument("--master", default="local[*]")
    arguments = parser.parse_args()
    chosen = arguments.only.split(",")
    console = make_console()
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="pipeline-", dir=".") as directory:
        root = Path(directory)
        if "read" in chosen:
            make_directory(
                root / "read" / "data",
                arguments.read_rows,
                body_bytes=200,
                hours=4,
                delivered=False,
            )
        if "audit" in chosen:
            make_directory(
                root / "audit", arguments.audit_rows, body_bytes=20, hours=24, delivered=True
            )
        with open_session("benchmark", master=arguments.master) as spark:
            if "read" in chosen:
                figures += measure_reading(spark, root / "read", arguments.read_rows)
            if "audit" in chosen:
                figures.append(measure_audit(spark, root / "audit", arguments.audit_rows))
    show_figures("The data pipeline", figures, console)
    if arguments.json:
        write_json(arguments.json, "pipeline", figures=as_documents(figures))


if __name__ == "__main__":
    main()
