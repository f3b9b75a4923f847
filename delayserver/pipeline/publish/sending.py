"""Sending: the work of a task on the rows of a table or stream; from Arrow batches to messages.

    batch of columns ──▶ parts, two at a time ──▶ as a stream of Arrow ──▶ counted
                               └─ not all taken ─▶ a message as JSON per row ──▶ counted
                                        └─ no due time, no key ─┐     └─ refused ──┐
                                                                └──────────────────┴▶ error, or file

A part whose rows are all in order goes as it stands (`columns`). If a server does not take that, or
one row is refused, its rows are sent as JSON: the client library takes a refused request apart
(`client.batches`). It asks again while the server is away (`client.retries`). If an answer is lost,
the request is always sent again: rows with keys may be sent again, and rows without keys are sent
at least once.

Cost: 0.4 µs per row as a stream, most of it for the socket; 6 µs as JSON. Threads: a task of
Spark's; an event loop of its own while it runs.
"""

import asyncio
import base64
import json
import os
import ssl
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import IO, Any

import msgspec
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import types as T
from pyspark.sql.datasource import WriterCommitMessage

from delayserver.client.batches import BATCH_PATH, PublishItem, send_publishes
from delayserver.client.errors import (
    ClientError,
    ConflictError,
    InvalidError,
    NotADelayServerError,
)
from delayserver.client.options import IN_FLIGHT_MAX
from delayserver.client.producer import BATCH_MAX_BYTES
from delayserver.client.retries import RetryPolicy, Time, answered
from delayserver.client.transport import JSON, HttpAnswer, HttpTransport, decoded
from delayserver.client.values import Published
from delayserver.errors import PipelineError
from delayserver.pipeline.publish.columns import ColumnReader
from delayserver.pipeline.publish.mapping import MessageColumns

BATCH_ROWS = 5_000
"""The more rows a request has, the cheaper is the look-up of each key. The event loop of a server
holds such a request for about 30 ms."""
NAMED_MAX = 5
"""Rows that an error names."""
_QUERY_ID = "sql.streaming.queryId"
"""The local property by which Spark gives it to the tasks of a micro-batch."""

ARROW = "application/vnd.apache.arrow.stream"

ArrowBatches = Iterator[pa.RecordBatch]
_Ask = Callable[..., Awaitable[HttpAnswer]]


@dataclass(frozen=True, slots=True)
class SendingPlan:
    """The plan that every task gets."""

    url: str
    token: str | None = field(repr=False)
    tls_ca: str | None
    columns: MessageColumns
    needs_key: bool
    """Each row needs a key: exactly once."""
    run: str
    """A name for this run of writing, if it is no streaming query."""
    rejects: str | None
    """A directory for rows that are refused; None: a refused row is an error."""
    report: str | None
    batch_rows: int
    timeout_s: float


class _AcceptedBatch(msgspec.Struct):
    """The answer to a batch that was taken."""

    count: int
    duplicates: int


@dataclass(slots=True)
class SendingReport(WriterCommitMessage):
    """The counts of one task."""

    query: str = ""
    """The id of the streaming query, the same after each of its restarts."""
    published: int = 0
    duplicates: int = 0
    """Rows that the server knew before, mostly because an attempt failed after it had sent them."""
    rejected: int = 0
    rejects_file: str | None = None


class _Row(PublishItem):
    """A row on its way, and its outcome."""

    __slots__ = ("error", "is_duplicate", "values")

    def __init__(self, data: bytes, values: tuple[Any, ...]) -> None:
        self.data = data
        self.values = values
        """Subject, due time, key, body, headers, and the due time as the table has it."""
        self.subject, self.key = values[0], values[2]
        self.error: Exception | None = None
        self.is_duplicate = False

    def succeed(self, result: object) -> None:
        assert isinstance(result, Published)
        self.is_duplicate = result.duplicate

    def fail(self, error: Exception) -> None:
        self.error = error


class Sender:
    """Sends the rows of one task."""

    def __init__(
        self, plan: SendingPlan, schema: T.StructType, *, takes_arrow: bool = True
    ) -> None:
        """`takes_arrow`: whether the server is asked with columns first."""
        self._plan = plan
        self._columns = ColumnReader(plan.columns, schema, needs_key=plan.needs_key)
        self._takes_arrow = takes_arrow
        """True until the server says that it does not take Arrow."""
        self._unsendable: list[tuple[tuple[Any, ...], str]] = []
        """Rows of a batch that cannot become messages, and why."""
        context = TaskContext.get()
        query = (context.getLocalProperty(_QUERY_ID) if context else None) or ""
        self._sent = SendingReport(query)
        self._rejects = None
        if plan.rejects is not None:
            self._rejects = _RejectFile(plan.rejects, begin_of(query or plan.run))

    def send(self, batches: ArrowBatches) -> SendingReport:
        """Send all rows; on return each is published, a duplicate, or rejected.

        Raises PipelineError if a row is refused and there is no directory for rejects, and if the
        server refuses all rows or stays away."""
        try:
            asyncio.run(self._send(batches))
            if self._rejects is not None:
                self._sent.rejects_file = self._rejects.close()
        except BaseException:
            if self._rejects is not None:
                self._rejects.discard()
            raise
        return self._sent

    async def _send(self, batches: ArrowBatches) -> None:
        plan = self._plan
        tls = None if plan.tls_ca is None else ssl.create_default_context(cafile=plan.tls_ca)
        transport = HttpTransport(plan.url, token=plan.token, tls=tls)
        policy, time = RetryPolicy(plan.timeout_s), Time()

        async def ask(
            method: str,
            path: str,
            body: bytes | None,
            *,
            repeatable: bool = True,
            content_type: str = JSON,
        ) -> HttpAnswer:
            request = partial(transport.request, method, path, body, content_type=content_type)
            return await answered(request, policy, time)

        async def follow(parts: Iterator[pa.RecordBatch]) -> None:
            for part in parts:
                try:
                    if self._takes_arrow and await self._is_taken(part, ask):
                        continue
                    for rows in self._requests(part):
                        await send_publishes(ask, list[PublishItem](rows))
                        self._settle(rows)
                except ClientError as error:
                    raise PipelineError(str(error)) from error

        try:
            for batch in batches:
                # Spark is asked for more, which blocks, when nothing is under way.
                parts = self._parts(batch)
                async with asyncio.TaskGroup() as tasks:
                    for _ in range(IN_FLIGHT_MAX):
                        tasks.create_task(follow(parts))
                unsendable, self._unsendable = self._unsendable, []
                self._refuse(unsendable)
        except BaseExceptionGroup as errors:
            # The first error; the other request was given up for it.
            raise errors.exceptions[0] from None
        finally:
            await transport.close()

    def _parts(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """The rows of a batch in parts, each about as large as a request may be."""
        for start in range(0, batch.num_rows, self._plan.batch_rows):
            waiting = [batch.slice(start, self._plan.batch_rows)]
            while waiting:
                part = waiting.pop()
                if part.nbytes > BATCH_MAX_BYTES and part.num_rows > 1:
                    middle = part.num_rows // 2
                    waiting += [part.slice(middle), part.slice(0, middle)]
                else:
                    yield part

    async def _is_taken(self, part: pa.RecordBatch, ask: _Ask) -> bool:
        """Whether the server has taken all rows of a part, as a stream of Arrow."""
        data = self._columns.stream(part)
        if data is None:
            return False
        answer = await ask("POST", BATCH_PATH, data, content_type=ARROW)
        if answer.status == HTTPStatus.UNSUPPORTED_MEDIA_TYPE:
            self._takes_arrow = False
        if answer.is_success:
            taken = decoded(answer.body, _AcceptedBatch)
            if taken.count != part.num_rows:
                raise NotADelayServerError(f"{part.num_rows} were sent, {taken.count} answered")
            self._sent.published += taken.count - taken.duplicates
            self._sent.duplicates += taken.duplicates
            return True
        if answer.status >= 500 or answer.status == HTTPStatus.TOO_MANY_REQUESTS:
            raise PipelineError(f"the server at {self._plan.url}: {answer.error()}")
        return False  # The rows are then sent one by one, and each gets its own answer.

    def _requests(self, batch: pa.RecordBatch) -> Iterator[list[_Row]]:
        """The rows of a batch in as many requests as they need."""
        rows: list[_Row] = []
        size_bytes = 0
        found, problems = self._columns.rows(batch)
        for index, values in enumerate(found):
            if index in problems:
                self._unsendable.append((values, problems[index]))
                continue
            row = _Row(self._data(*values[:5]), values)
            if rows and size_bytes + len(row.data) > BATCH_MAX_BYTES:
                yield rows
                rows, size_bytes = [], 0
            rows.append(row)
            size_bytes += len(row.data)
            if len(rows) == self._plan.batch_rows:
                yield rows
                rows, size_bytes = [], 0
        if rows:
            yield rows

    def _data(
        self,
        subject: str,
        due_ms: int,
        key: str | None,
        body: bytes | None,
        headers: bytes | None,
    ) -> bytes:
        """A message as JSON."""
        data = b'{"subject":%b,"deliver_at":%d' % (msgspec.json.encode(subject), due_ms)
        if key is not None:
            data += b',"key":' + msgspec.json.encode(key)
        if body is not None:
            if self._columns.is_binary:
                data += b',"body_base64":"%b"' % base64.b64encode(body)
            else:
                data += b',"body":' + body
        if headers is not None:
            data += b',"headers":' + headers
        return data + b"}"

    def _settle(self, rows: Sequence[_Row]) -> None:
        refused: list[tuple[tuple[Any, ...], str]] = []
        for row in rows:
            error = row.error
            if error is None:
                if row.is_duplicate:
                    self._sent.duplicates += 1
                else:
                    self._sent.published += 1
            elif isinstance(error, InvalidError | ConflictError):
                refused.append((row.values, error.detail or str(error)))
            else:
                raise PipelineError(f"the server at {self._plan.url}: {error}") from error
        self._refuse(refused)

    def _refuse(self, refused: Sequence[tuple[tuple[Any, ...], str]]) -> None:
        """Put rows aside, or raise PipelineError."""
        if not refused:
            return
        if self._rejects is None:
            named = [_named(values, reason) for values, reason in refused[:NAMED_MAX]]
            if len(refused) > NAMED_MAX:
                named.append(f"and {len(refused) - NAMED_MAX} more")
            raise PipelineError(
                f"{len(refused)} rows cannot be messages: {'; '.join(named)}. With the option "
                "rejects they are put aside"
            )
        for values, reason in refused:
            self._rejects.add(values, reason)
        self._sent.rejected += len(refused)


def _named(values: tuple[Any, ...], reason: str) -> str:
    subject, _, key, _, _, due = values
    return f"{subject or 'no subject'}, key {key!r}, due {due!r}: {reason}"


def begin_of(run: str) -> str:
    """The beginning of the names of the files of a query, or of another run."""
    return run.partition("-")[0]


class _RejectFile:
    """Rows that were put aside, in a file that is made for the first of them.

    Its name begins with a dot until the driver knows that all tasks have ended, and then with the
    name of the run, so that the files of a killed task can be recognised."""

    def __init__(self, directory: str, run: str) -> None:
        self._path = Path(directory, f".{run}-{uuid.uuid4().hex[:12]}.jsonl")
        self._file: IO[str] | None = None

    def add(self, values: tuple[Any, ...], reason: str) -> None:
        """Write a row, all of it: in a stream it may exist nowhere else."""
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("w", encoding="utf-8")
        subject, _, key, body, headers, due = values
        row = {
            "reason": reason,
            "subject": subject,
            "due": due,
            "key": key,
            "body": _text(body),
            "headers": _text(headers),
        }
        self._file.write(json.dumps(row, ensure_ascii=False) + "\n")

    def close(self) -> str | None:
        """Close the file durably; returns its name, if there is one."""
        if self._file is None:
            return None
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return self._path.name

    def discard(self) -> None:
        """Delete the file: the task failed, and runs again."""
        if self._file is not None:
            self._file.close()
            self._path.unlink(missing_ok=True)


def _text(data: bytes | None) -> str | None:
    return None if data is None else data.decode("utf-8", "replace")
