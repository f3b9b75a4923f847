"""Staging: what an executor does with the rows of a table; from Arrow batches to staged frames.

    batch of columns ──▶ checked, encoded, sealed ──▶ sorted by due time ──▶ a part of the import
                                 └──▶ rejected rows, with the reason

The rules are those of a publish over HTTP. Rows that are bad are handed back, not raised: a table
of millions has some.

Cost: about 3 µs per row. Threads: one writer per partition, in a process of Spark's own.
"""

import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from pyspark import TaskContext

from delayserver.delivery.webhook import check_headers
from delayserver.errors import InputError
from delayserver.ids import KeyHasher
from delayserver.message import Content, Payload, check_key, encode_payload
from delayserver.times import TIME_MS_MAX, parse_time_ms
from storage.files import OsFiles
from storage.rows import NO_KEY
from storage.staging import PartWriter, part_name

SUBJECT, DUE, KEY, BODY, HEADERS = "__subject", "__due", "__key", "__body", "__headers"
"""Columns of the table as this module wants it; others are passed on to the ids."""
ROW, REJECT, PART, COUNT = 0, 1, 2, 3
"""What a row of the outcome is about."""
REJECT_TEXT_MAX = 2_000

_check_json = msgspec.json.Decoder(msgspec.Raw).decode
_decode_headers = msgspec.json.Decoder(dict[str, str]).decode


class Rejected(Exception):
    """A row cannot be a message; the text says why."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What every executor has to know."""

    import_id: str
    data_dir: str
    """Empty: nothing is written (a dry run)."""
    stamp: int
    id_secret: bytes
    now_ms: int
    delay_max_ms: int
    body_max_bytes: int
    subjects: dict[str, int]
    subject: str | None
    """The subject of all rows; None: column SUBJECT."""
    has_key: bool
    has_headers: bool
    content: Content
    is_json_checked: bool
    """The bodies are JSON that we made ourselves."""
    with_rows: bool
    """Whether the outcome has a row for each message, for the ids."""
    passed_on: tuple[str, ...] = ()
    """Columns of the table for the file of ids."""
    schema: bytes = b""
    """The Arrow schema of the outcome, serialized."""


class Stager:
    """Stages the batches of one partition."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._hasher = KeyHasher(plan.id_secret)
        self._schema = pa.ipc.read_schema(pa.py_buffer(plan.schema))
        context = TaskContext.get()
        number = context.partitionId() if context else 0
        # A task that is tried again, or twice at once, writes a file of its own.
        self._part = part_name(plan.import_id, f"{number:05d}-{uuid.uuid4().hex[:8]}")
        self._writer: PartWriter | None = None
        self._count = 0
        self._reasons: Counter[str] = Counter()

    def stage(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Stage all batches; yields the outcome."""
        for batch in batches:
            if batch.num_rows:
                yield from self._stage_batch(batch)
        if self._writer is not None:
            part = self._writer.close()
            yield self._outcome(
                kind=[PART],
                part=[part.file],
                row=[part.count],
                bytes=[part.bytes],
                checksum=[part.checksum],
            )
        elif self._count:
            yield self._outcome(kind=[COUNT], row=[self._count])

    def _stage_batch(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        plan = self._plan
        columns = self._columns(batch)
        accepted: list[int] = []
        due_ms: list[int] = []
        subject_ids: list[int] = []
        hashes: list[bytes] = []
        sealed: list[bytes] = []
        rejected: list[tuple[int, str]] = []
        for index, (subject, due, key, body, headers) in enumerate(zip(*columns, strict=True)):
            try:
                subject_id = plan.subjects.get(subject) if subject is not None else None
                if subject_id is None:
                    raise Rejected("bad subject")
                due_at_ms = self._due_ms(due)
                payload = self._payload(key, body, headers)
            except Rejected as error:
                rejected.append((index, str(error)))
                continue
            accepted.append(index)
            due_ms.append(due_at_ms)
            subject_ids.append(subject_id)
            hashes.append(NO_KEY if key is None else self._hasher(subject_id, key))
            sealed.append(payload)
        if accepted:
            yield from self._write(batch, columns, accepted, due_ms, subject_ids, hashes, sealed)
        if rejected:
            yield self._rejects(columns, rejected)

    def _columns(self, batch: pa.RecordBatch) -> list[Any]:
        """Subject, due, key, body and headers as Python values."""
        plan, nothing = self._plan, [None] * batch.num_rows
        body = batch.column(BODY)
        if not pa.types.is_binary(body.type) and not pa.types.is_large_binary(body.type):
            # Bytes as they are: nobody needs them as text.
            body = body.cast(pa.large_string()).cast(pa.large_binary())
        return [
            [plan.subject] * batch.num_rows
            if plan.subject is not None
            else batch.column(SUBJECT).to_pylist(),
            batch.column(DUE).to_pylist(),
            batch.column(KEY).to_pylist() if plan.has_key else nothing,
            body.to_pylist(),
            batch.column(HEADERS).to_pylist() if plan.has_headers else nothing,
        ]

    def _due_ms(self, due: int | str | None) -> int:
        plan = self._plan
        if due is None:
            raise Rejected("no due time")
        if isinstance(due, str):
            try:
                due = parse_time_ms(int(due) if due.lstrip("-").isdigit() else due)
            except (InputError, ValueError):
                raise Rejected("due time cannot be read") from None
        if due - plan.now_ms > plan.delay_max_ms or due > TIME_MS_MAX:
            raise Rejected("due too far away")
        # A time in the past means now.
        return max(due, plan.now_ms)

    def _payload(self, key: str | None, body: bytes | None, headers: str | None) -> bytes:
        plan = self._plan
        if body is None:
            if plan.content is not Content.JSON:
                raise Rejected("no body")
            body = b"null"
        if len(body) > plan.body_max_bytes:
            raise Rejected("body too large")
        if not plan.is_json_checked and plan.content is Content.JSON:
            try:
                _check_json(body)
            except (msgspec.DecodeError, RecursionError):
                raise Rejected("body is not JSON") from None
        if key is not None:
            try:
                check_key(key)
            except InputError:
                raise Rejected("key is empty or too long") from None
        own: dict[str, str] | None = None
        if headers is not None:
            try:
                own = _decode_headers(headers)
                check_headers(own)
            except (msgspec.DecodeError, InputError) as error:
                raise Rejected(f"bad headers: {error}") from None
        return encode_payload(Payload(body, plan.content, key, own or None))

    def _write(
        self,
        batch: pa.RecordBatch,
        columns: list[Any],
        accepted: list[int],
        due_ms: list[int],
        subject_ids: list[int],
        hashes: list[bytes],
        sealed: list[bytes],
    ) -> Iterator[pa.RecordBatch]:
        plan = self._plan
        due = np.array(due_ms, np.int64)
        order = np.argsort(due, kind="stable")
        in_order = order.tolist()
        if plan.data_dir:
            if self._writer is None:
                files = OsFiles(plan.data_dir)
                self._writer = PartWriter(
                    files, self._part, stamp=plan.stamp, created_ms=plan.now_ms
                )
            lengths = np.fromiter(map(len, sealed), np.uint32, len(sealed))
            self._writer.append(
                due[order],
                np.array(subject_ids, np.uint32)[order],
                b"".join([hashes[index] for index in in_order]),
                lengths[order],
                b"".join([sealed[index] for index in in_order]),
            )
        first, self._count = self._count, self._count + len(accepted)
        if not plan.with_rows:
            return
        chosen = [accepted[index] for index in in_order]
        subjects, _, keys, _, _ = columns
        passed = {
            name: batch.column(name).take(pa.array(chosen, pa.int64())) for name in plan.passed_on
        }
        yield self._outcome(
            kind=[ROW] * len(chosen),
            part=[self._part] * len(chosen),
            row=range(first, self._count),
            due_ms=due[order],
            subject=[subjects[index] for index in chosen],
            key=[keys[index] for index in chosen],
            **passed,
        )

    def _rejects(self, columns: list[Any], rejected: list[tuple[int, str]]) -> pa.RecordBatch:
        subjects, due, keys, bodies, _ = columns
        indexes = [index for index, _ in rejected]
        return self._outcome(
            kind=[REJECT] * len(rejected),
            reason=[reason for _, reason in rejected],
            subject=[subjects[index] for index in indexes],
            due=[None if due[index] is None else str(due[index]) for index in indexes],
            key=[
                None if keys[index] is None else keys[index][:REJECT_TEXT_MAX] for index in indexes
            ],
            body=[_text(bodies[index]) for index in indexes],
        )

    def _outcome(self, **columns: Any) -> pa.RecordBatch:
        count = len(columns["kind"])
        arrays = []
        for column in self._schema:
            values = columns.get(column.name)
            if values is None:
                arrays.append(pa.nulls(count, column.type))
            elif isinstance(values, pa.Array):
                arrays.append(values.cast(column.type))
            else:
                arrays.append(pa.array(values, column.type))
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)


def _text(body: bytes | None) -> str | None:
    """The beginning of a body that was rejected, for people."""
    return None if body is None else body[:REJECT_TEXT_MAX].decode("utf-8", "replace")
