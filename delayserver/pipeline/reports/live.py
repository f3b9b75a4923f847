"""How late deliveries are, live: windows of time, from the stream of a server's dispatch log, or
from the same log at the brokers of a cluster.

    dispatch log ──stream──▶ counts by window, name and bucket ──▶ added up in this process
                             (Spark, once a second)                (percentiles from the sums)

A delivery counts in the window in which it was recorded. A window that has ended is reported at
once. If more deliveries come for it, since a micro-batch took longer, it is reported again with
everything.

Cost: a few tenths of a second of a core per micro-batch; with subjects a pass over the schedule log
of the hours that deliveries were due in. 1 KB per window and name. Threads: Spark's own puts counts
in, any other takes lines out; a lock is between them.
"""

import contextlib
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from delayserver.errors import PipelineError
from delayserver.pipeline.exports.place import absolute_root
from delayserver.pipeline.logs.columns import CORRUPT, CORRUPT_DDL, Names
from delayserver.pipeline.logs.options import paths_of
from delayserver.pipeline.progress import Job
from delayserver.pipeline.reports.lateness import percentile_ms
from delayserver.pipeline.states.snapshot import open_directories
from delayserver.pipeline.topics.settled import settled_rows
from delayserver.pipeline.topics.source import ClusterTopics
from delayserver.times import format_time

BY = ("subscription", "subject")
TRIGGER = "1 second"
ROWS_PER_TRIGGER = 2_000_000
KEPT = 120
"""Windows that are remembered."""
UNKNOWN = "(unknown)"

Count = tuple[int, str, int, int, int]
"""Start of the window in ms, name, bucket of lateness, how many, the latest of them in ms."""


@dataclass(frozen=True, slots=True)
class Line:
    """Deliveries of one name in one window."""

    start_ms: int
    name: str
    count: int
    p50_ms: int
    p99_ms: int
    max_ms: int

    def document(self, by: str, window_ms: int) -> dict[str, Any]:
        """For programs."""
        return {
            "window": format_time(self.start_ms),
            "window_ms": window_ms,
            by: self.name,
            "count": self.count,
            "per_s": round(self.count * 1000 / window_ms, 3),
            "p50_ms": self.p50_ms,
            "p99_ms": self.p99_ms,
            "max_ms": self.max_ms,
        }


@dataclass(slots=True)
class _Group:
    counts: Counter[int] = field(default_factory=Counter)
    max_ms: int = 0
    told: int = 0
    """How many deliveries it had when it was reported last."""


class Windows:
    """Counts of the newest windows."""

    def __init__(self, window_ms: int) -> None:
        self.window_ms = window_ms
        self._groups: dict[tuple[int, str], _Group] = {}
        self._lock = threading.Lock()

    def add(self, counts: Iterable[Count]) -> None:
        """Add the counts of a micro-batch."""
        with self._lock:
            for start_ms, name, bucket, count, max_ms in counts:
                group = self._groups.setdefault((start_ms, name), _Group())
                group.counts[bucket] += count
                group.max_ms = max(group.max_ms, max_ms)
            newest_ms = max((start_ms for start_ms, _ in self._groups), default=0)
            oldest_ms = newest_ms - KEPT * self.window_ms
            self._groups = {key: one for key, one in self._groups.items() if key[0] > oldest_ms}

    def lines(self) -> list[Line]:
        """All lines: the newest window first, and in it the slowest name."""
        with self._lock:
            lines = [_line(key, group) for key, group in self._groups.items()]
        return sorted(lines, key=lambda line: (-line.start_ms, -line.p99_ms, line.name))

    def news(self, now_ms: int) -> list[Line]:
        """Windows that have ended by then, and that were not reported before; oldest first."""
        told = []
        with self._lock:
            for key, group in sorted(self._groups.items()):
                count = group.counts.total()
                if key[0] + self.window_ms <= now_ms and count > group.told:
                    group.told = count
                    told.append(_line(key, group))
        return told


def _line(key: tuple[int, str], group: _Group) -> Line:
    start_ms, name = key
    p50_ms, p99_ms = (percentile_ms(group.counts, share) for share in (0.5, 0.99))
    # A percentile is the upper end of its bucket, which may be a little above the latest.
    latest_ms = group.max_ms
    count = group.counts.total()
    return Line(start_ms, name, count, min(p50_ms, latest_ms), min(p99_ms, latest_ms), latest_ms)


@dataclass(frozen=True, slots=True)
class WatchedStream:
    """A stream that is being watched."""

    by: str
    windows: Windows
    damage: list[str]
    """Places of the dispatch log that cannot be read."""
    _query: StreamingQuery

    def check(self) -> None:
        """Raises the error that ended the stream, if it has ended."""
        if not self._query.isActive:
            error = self._query.exception()
            raise error if error is not None else PipelineError("the stream has ended")


Rows = Callable[[DataFrame], DataFrame]
"""From the rows of a stream to deliveries: settled_ms, lateness_ms, lateness_bucket, the name, and
`_corrupt`."""


@contextlib.contextmanager
def watch(job: Job, *data_dirs: str, by: str, window_ms: int) -> Iterator[WatchedStream]:
    """Watch the deliveries that are recorded from the beginning of the context on.

    Raises PipelineError, and StorageError if there is no such directory."""
    assert by in BY
    _refuse_connect(job)
    roots = [absolute_root(one) for one in data_dirs]
    open_directories(*roots)
    stream = (
        job.spark.readStream.format("delaylog")
        .options(log="dispatch", damage="rows", startingOffsets="latest")
        .option("maxRowsPerTrigger", ROWS_PER_TRIGGER)
        .schema(_columns(by))
        .options(**paths_of(roots))
        .load()
    )
    job.progress("following the dispatch log", 0, 0)
    with _watched(stream, lambda batch: batch, by, window_ms) as watched:
        yield watched


@contextlib.contextmanager
def watch_topics(
    job: Job, topics: ClusterTopics, names: Callable[[], Mapping[int, Names]], *, window_ms: int
) -> Iterator[WatchedStream]:
    """Watch the deliveries that the brokers of a cluster are told from the beginning of the context
    on, by subscription. `names`: called for each micro-batch, gives the names by shard.

    Raises PipelineError."""
    _refuse_connect(job)
    stream = topics.stream(
        job.spark,
        "settled",
        startingOffsets="latest",
        # Deleted records were shown before, or are too old to be shown.
        failOnDataLoss="false",
    )

    def rows(batch: DataFrame) -> DataFrame:
        return settled_rows(batch, topics, names(), _columns("subscription"))

    job.progress("following what is settled", 0, 0)
    with _watched(stream, rows, "subscription", window_ms) as watched:
        yield watched


def _refuse_connect(job: Job) -> None:
    if job.is_connect:
        raise PipelineError(
            "lateness shows what arrives in this process, so it does not run over Spark Connect; "
            "take another --master"
        )


def _columns(by: str) -> str:
    return f"settled_ms long, lateness_ms long, lateness_bucket int, {by} string, {CORRUPT_DDL}"


@contextlib.contextmanager
def _watched(stream: DataFrame, rows: Rows, by: str, window_ms: int) -> Iterator[WatchedStream]:
    windows, damage = Windows(window_ms), list[str]()

    def take(batch: DataFrame, _: int) -> None:
        found = _counted(rows(batch), by, window_ms).collect()
        damage.extend(
            f"{row[CORRUPT]['file']}, offset {row[CORRUPT]['offset']}: {row[CORRUPT]['reason']}"
            for row in found
            if row[CORRUPT] is not None
        )
        windows.add(
            (row["start_ms"], row["name"], row["lateness_bucket"], row["count"], row["max_ms"])
            for row in found
            if row[CORRUPT] is None
        )

    with tempfile.TemporaryDirectory(prefix="delayserver-lateness-") as checkpoints:
        query = (
            stream.writeStream.foreachBatch(take)
            .option("checkpointLocation", checkpoints)
            .trigger(processingTime=TRIGGER)
            .start()
        )
        try:
            watched = WatchedStream(by, windows, damage, query)
            # Records that are written from then on are seen.
            while query.lastProgress is None:
                watched.check()
                query.awaitTermination(1)
            yield watched
        finally:
            query.stop()


def _counted(batch: DataFrame, by: str, window_ms: int) -> DataFrame:
    start_ms = F.expr(f"settled_ms div {window_ms} * {window_ms}")
    name = F.coalesce(F.col(by), F.lit(UNKNOWN))
    delivered = batch.where(f"lateness_bucket >= 0 or {CORRUPT} is not null")
    keys = (start_ms.alias("start_ms"), name.alias("name"), "lateness_bucket", CORRUPT)
    return delivered.groupBy(*keys).agg(
        F.count(F.lit(1)).alias("count"), F.max(F.greatest("lateness_ms", F.lit(0))).alias("max_ms")
    )
