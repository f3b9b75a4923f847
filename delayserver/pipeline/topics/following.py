"""The audit as a stream: NAME.log and NAME.settled, read by Spark, judged in this process.

    both topics ──stream──▶ pieces (tasks) ──▶ rows of hours, in a directory ──▶ a verdict an hour
                            once a micro-batch      (`watch`, the driver)

The checkpoint of the stream and the rows stand in one directory, so that a stream that is started
again there goes on.

Cost: that of `pieces` and `watch`; two cores are busy for half a second of each micro-batch.
Threads: Spark's own takes micro-batches in; any other takes the news out, of a queue.
"""

import contextlib
import json
import queue
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from delayserver.errors import PipelineError
from delayserver.pipeline.progress import Job
from delayserver.pipeline.topics.names import KnownNames
from delayserver.pipeline.topics.pieces import DamagedRecord, pieces_of
from delayserver.pipeline.topics.source import ClusterTopics
from delayserver.pipeline.topics.verdicts import HourVerdict
from delayserver.pipeline.topics.watch import PATIENCE_MS, HourAuditStream

TRIGGER: Final = "5 seconds"
RECORDS_PER_TRIGGER: Final = 10_000
_OURS = re.compile(r"^(?:delayserver|storage)\.[\w.]+Error: (.+)$", re.MULTILINE)
"""The last line of a traceback of ours, in a task or in this process."""


class RecordsDeletedError(PipelineError):
    """The brokers have deleted records that the stream had not read yet."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            "records were deleted from the topics before they were read, so that what they hold "
            f"cannot be judged any more: begin with another --state ({reason})"
        )


class _LogDamagedError(Exception):
    """Ends the query; the watch holds the damage."""


@dataclass(frozen=True, slots=True)
class FollowedTopics:
    """A stream that gives verdicts."""

    watch: HourAuditStream
    _news: "queue.SimpleQueue[HourVerdict | DamagedRecord]"
    _query: StreamingQuery

    def news(self) -> "Iterator[HourVerdict | DamagedRecord]":
        """Yields the news since the last call: for each micro-batch its verdicts, and then the
        records in it that do not match their checksum or format."""
        while not self._news.empty():
            yield self._news.get()

    def has_ended(self) -> bool:
        """Whether everything is read, or a damaged record has ended the stream.

        Raises PipelineError, and any other error that ended the stream."""
        if self._query.isActive:
            return False
        error = self._query.exception()
        if error is None or any(one.ends_log for one in self.watch.damage):
            return True
        raise _named(error) from error


def _named(error: StreamingQueryException) -> Exception:
    """The error that has ended the stream, without Spark's text and two tracebacks around it."""
    text = str(error)
    ours = _OURS.findall(text)
    if ours:
        return PipelineError(ours[-1])
    if "Some data may have been lost" in text:
        reason = text.partition("Reason: ")[2].partition("\n")[0]
        return RecordsDeletedError(reason or "data loss")
    return error


@contextlib.contextmanager
def follow(
    job: Job,
    topics: ClusterTopics,
    directory: Path,
    known: Mapping[int, KnownNames],
    *,
    once: bool = False,
    patience_ms: int = PATIENCE_MS,
) -> Iterator[FollowedTopics]:
    """Follow the topics from the place where the directory was left, or from their beginning.
    `once`: stop at their present end.

    Raises PipelineError over Spark Connect, KafkaSourceMissingError, WatchStateError."""
    if job.is_connect:
        raise PipelineError(
            "the hours are judged in this process, so this does not run over Spark Connect; take "
            "another --master"
        )
    watch = HourAuditStream(directory / "hours", topics.identity, known, patience_ms=patience_ms)
    found: queue.SimpleQueue[HourVerdict | DamagedRecord] = queue.SimpleQueue()

    def take(batch: DataFrame, number: int) -> None:
        before = len(watch.damage)
        for verdict in watch.take(number, pieces_of(batch, topics, watch.places)):
            found.put(verdict)
        for damage in watch.damage[before:]:
            found.put(damage)
        if any(one.ends_log for one in watch.damage):
            raise _LogDamagedError

    stream = topics.stream(
        job.spark,
        "log",
        "settled",
        startingOffsets="earliest",
        maxOffsetsPerTrigger=str(RECORDS_PER_TRIGGER),
    )
    writer = stream.writeStream.foreachBatch(take).option(
        "checkpointLocation", str(directory / "spark")
    )
    writer = writer.trigger(availableNow=True) if once else writer.trigger(processingTime=TRIGGER)
    query = writer.start()
    try:
        yield FollowedTopics(watch, found, query)
    finally:
        query.stop()


def line_of(verdict: HourVerdict) -> str:
    """A verdict as a line of JSON."""
    return json.dumps(verdict.document(), ensure_ascii=False)
