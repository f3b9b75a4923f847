"""Rows become messages of a server: `df.write.format("delayserver")`, `df.writeStream…`.

    Arrow batch ──▶ POST /v1/messages/batch ──▶ published, a duplicate, or refused
             └─▶ cannot be sent          ▲ again, while the server is away

    spark.dataSource.register(DelayServerSink)
    events.writeStream.format("delayserver").option("subject", "order.unpaid")
        .option("dueColumn", "due").option("keyColumn", "order")
        .option("checkpointLocation", "…").start()

Spark repeats tasks and micro-batches that failed, and cuts them differently when it does. So each
row needs a key of its own: a row that is sent again is the same message. Without a key column there
must be `delivery=at-least-once`. Exactly once has an end: a key is taken until some time after its
message was due (`dedupe_window_ms` of the server), or until the message is cancelled. A micro-batch
that is repeated later than that publishes such rows anew. There is no promise about the order.

Its options:

    url                 of the server; http://127.0.0.1:8080
    token, tlsCa        if the server asks for one; the authority of its certificate (PEM file)
    subject             of all rows, or
    subjectColumn         of each
    dueColumn           when it is due; a past time is due now (see `mapping` for the columns)
    dueUnit             the unit of whole numbers in it: s, ms (default), us or ns
    keyColumn           the key
    bodyColumn          default: all columns without another use, as one JSON object
    headersColumn
    delivery            exactly-once (default), at-least-once
    rejects             a directory for rows that are refused, as JSON lines with the reason;
                        without it they fail the query, which names them
    report              a file to which the counts of each micro-batch are added, as JSON lines
    batchSize           rows in one request; 5,000
    timeout             how long a server that is away or overloaded is waited for; 5m

Executors read `tlsCa` and write `rejects`, so these must be the same place everywhere; `report` is
the driver's. The server judges the rows, by the rules of every publish. The sink itself only finds
rows that cannot be sent at all. Rows that were refused do not keep the others of their request
back.

Cost: 0.4 µs per row with a body of text, 2.4 µs where two columns become JSON, 6 µs to a server
that does not take Arrow (docs/spark.md). Threads: Spark's tasks, an event loop in each.
"""

import json
import os
import uuid
from collections.abc import MutableMapping, Sequence
from pathlib import Path

from pyspark.sql import types as T
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from delayserver.client.options import URL_DEFAULT
from delayserver.client.transport import HttpTransport
from delayserver.errors import InputError, PipelineError
from delayserver.pipeline.logs.options import Options, parse_named
from delayserver.pipeline.publish.mapping import MessageColumns
from delayserver.pipeline.publish.sending import (
    BATCH_ROWS,
    ArrowBatches,
    Sender,
    SendingPlan,
    SendingReport,
    begin_of,
)
from delayserver.pipeline.publish.values import TIME_UNITS
from delayserver.times import parse_duration_ms

TIMEOUT_DEFAULT = "5m"

_OPTIONS = (
    "url",
    "token",
    "tlsCa",
    "subject",
    "subjectColumn",
    "dueColumn",
    "dueUnit",
    "keyColumn",
    "bodyColumn",
    "headersColumn",
    "delivery",
    "rejects",
    "report",
    "batchSize",
    "timeout",
)
_OPTIONS_OF_SPARK = ("checkpointLocation", "queryName")


class DelayServerSink(DataSource):
    """A server, as a place to write messages to."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        ours = {
            name: text
            for name, text in options.items()
            if name.lower() not in {one.lower() for one in _OPTIONS_OF_SPARK}
        }
        self._plan = _plan(parse_named(self.name(), ours, _OPTIONS))

    @classmethod
    def name(cls) -> str:
        return "delayserver"

    def writer(self, schema: T.StructType, overwrite: bool) -> "TableWriter":
        return TableWriter(self._checked(schema, overwrite), schema)

    def streamWriter(self, schema: T.StructType, overwrite: bool) -> "StreamWriter":
        return StreamWriter(self._checked(schema, overwrite), schema)

    def _checked(self, schema: T.StructType, overwrite: bool) -> "SendingPlan":
        if overwrite:
            raise InputError("messages are added, never overwritten: use the mode append")
        self._plan.columns.check(schema)
        return self._plan


def _plan(options: Options) -> SendingPlan:
    """Raises InputError."""
    subject, subject_column = options.text("subject"), options.text("subjectColumn")
    if (subject is None) == (subject_column is None):
        raise InputError("delayserver needs either the option subject or subjectColumn")
    due, key = options.text("dueColumn"), options.text("keyColumn")
    if due is None:
        raise InputError("delayserver needs the option dueColumn")
    is_exact = options.choice("delivery", "exactly-once", "at-least-once") == "exactly-once"
    if is_exact and key is None:
        raise InputError(
            "delayserver needs the option keyColumn: Spark sends rows again after a failure, and "
            "only a key of its own makes a row the same message then. Where repeats do no harm, "
            "say delivery=at-least-once"
        )
    url, token = options.text("url") or URL_DEFAULT, options.text("token")
    try:
        HttpTransport(url, token=token)
        timeout_ms = parse_duration_ms(options.text("timeout") or TIMEOUT_DEFAULT)
    except ValueError as error:
        raise InputError(f"an option of delayserver: {error}") from error
    return SendingPlan(
        url,
        token,
        _path(options, "tlsCa"),
        MessageColumns(
            due,
            subject,
            subject_column,
            key,
            options.text("bodyColumn"),
            options.text("headersColumn"),
            options.choice("dueUnit", "ms", *TIME_UNITS),
        ),
        is_exact,
        uuid.uuid4().hex[:8],
        _path(options, "rejects"),
        options.text("report"),
        max(1, options.number("batchSize", BATCH_ROWS)),
        timeout_ms / 1000,
    )


def _path(options: Options, name: str) -> str | None:
    """The absolute path, because tasks work in directories of their own."""
    path = options.text(name)
    return path and os.path.abspath(path)


class _Writer:
    """The common part of tables and streams."""

    def __init__(self, plan: SendingPlan, schema: T.StructType) -> None:
        self._plan = plan
        self._schema = schema

    def write(self, iterator: ArrowBatches) -> SendingReport:
        """Send the rows of one task."""
        return Sender(self._plan, self._schema).send(iterator)

    def _commit(self, messages: Sequence[WriterCommitMessage | None], batch: int | None) -> None:
        """Called when all tasks have ended. Their rejected rows are shown under the name of the
        micro-batch, in place of those of an earlier attempt, and the counts are reported."""
        sent = [message for message in messages if isinstance(message, SendingReport)]
        names = []
        if self._plan.rejects is not None:
            names = _show_rejects(Path(self._plan.rejects), sent, batch)
            self._sweep(sent)
        if self._plan.report is not None:
            counts = {
                "query": _query_of(sent) or None,
                "batch": batch,
                "published": sum(one.published for one in sent),
                "duplicates": sum(one.duplicates for one in sent),
                "rejected": sum(one.rejected for one in sent),
                "rejects": names,
            }
            with open(self._plan.report, "a", encoding="utf-8") as file:
                file.write(json.dumps(counts) + "\n")

    def _abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Spark does it again: messages that were published are then known by their keys."""
        self._sweep([message for message in messages if isinstance(message, SendingReport)])

    def _sweep(self, sent: Sequence[SendingReport]) -> None:
        """Called when no task runs any more. A file that is not shown belongs to a task that failed
        or was killed, in this run or in an earlier one of the query."""
        if self._plan.rejects is not None:
            run = begin_of(_query_of(sent) or self._plan.run)
            for path in Path(self._plan.rejects).glob(f".{run}-*.jsonl"):
                path.unlink(missing_ok=True)


def _query_of(sent: Sequence[SendingReport]) -> str:
    """The id of the streaming query; empty if there is none, or if no task has reported it."""
    return next((one.query for one in sent if one.query), "")


class TableWriter(_Writer, DataSourceArrowWriter):
    """The writer of `df.write`."""

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self._commit(messages, None)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self._abort(messages)


class StreamWriter(_Writer, DataSourceStreamArrowWriter):
    """The writer of `df.writeStream`."""

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self._commit(messages, batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self._abort(messages)


def _show_rejects(directory: Path, sent: Sequence[SendingReport], batch: int | None) -> list[str]:
    """Give these files of rejected rows their names."""
    if batch is None:
        # A table is written once; the names that the tasks chose do not repeat.
        stem = ""
    else:
        stem = f"{begin_of(_query_of(sent))}-{batch:08d}-"
        for before in directory.glob(f"{stem}*.jsonl"):
            before.unlink()
    names = []
    for one in sent:
        if one.rejects_file is not None:
            name = stem + one.rejects_file.partition("-")[2]
            try:
                Path(directory, one.rejects_file).replace(directory / name)
            except FileNotFoundError as error:
                raise PipelineError(
                    f"a task has put rejected rows into {directory}, and the driver does not find "
                    "them there: `rejects` has to be the same directory on all machines"
                ) from error
            names.append(name)
    return names
