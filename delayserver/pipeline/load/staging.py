"""Staging: the work of an executor on the rows of a table; from Arrow batches to staged frames.

    chunk of columns ──▶ sorted by due time ──▶ checked, encoded, sealed ──▶ a part of the import
                                                       └──▶ rejected rows, with the reason

The rules are those of a publish over HTTP, and values are converted as for a sink
(`publish.values`). Bad rows are handed back, not raised: a table of millions has some. If there are
several shards, a row with a key is staged for the shard that the key belongs to, and rows without a
key are spread evenly. Each shard gets a part of its own.

Each chunk becomes a frame per hour, so several of Spark's batches make one chunk, because frames of
few rows make filing slow. Spark's own sort, which moves each row, costs more than all of this.

Cost: about 1.8 µs per row of 200 bytes, 2.7 with a key, 0.4 more with several shards; memory two
times CHUNK_BYTES while batches become a chunk.
Threads: one writer per partition and shard, in a process of Spark's own.
"""

import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from pyspark import TaskContext

from delayserver.errors import InputError
from delayserver.pipeline.load.note import mark_of
from delayserver.pipeline.publish.values import (
    Problems,
    body_pieces,
    due_times,
    header_pieces,
    text_array,
    text_or_none,
)
from delayserver.pipeline.workers import spare_imports
from delayserver.records.arrow import fixed, integers, lengths, present
from delayserver.records.ids import KeyHasher
from delayserver.records.message import KEY_MAX_BYTES, Content, check_headers, encode_payloads
from delayserver.records.nesting import NESTED_MIN_BYTES, is_nested_too_deeply
from delayserver.records.sharding import shards_of
from delayserver.times import SECONDS_MAX, TIME_MS_MAX
from storage.files import OsFiles
from storage.frame import CRC_BYTES, crcs_of, seal_many
from storage.rows import NO_KEY
from storage.staging import PartWriter, part_name

SUBJECT, DUE, KEY, BODY, HEADERS = "__subject", "__due", "__key", "__body", "__headers"
"""The columns that this module wants of a table, with values as they stand there; other columns are
passed on to the ids."""
GIVEN_DUE, PROBLEM = "__given_due", "__problem"
"""Two more columns of a table that was read from files (`reading`): the due time as it stands
there, while DUE is whole milliseconds; and the reason why a row cannot be a message, if any."""
ROW, REJECT, PART, STAGED, PAST, ANCIENT, MARK = 0, 1, 2, 3, 4, 5, 6
"""The kind of a row of the outcome: a message, a rejected row, a file; or a number of the partition
(column `row`): its messages, those that are past, those from before 1973, and the sum of its marks
(`note.mark_of`) in 64 bits."""
REJECT_TEXT_MAX = 2_000
CHUNK_BYTES = 64 * 1024 * 1024
"""Bytes of columns that are sorted by due time together, and get a frame for each hour."""
STEP_BYTES = 4 * 1024 * 1024
"""The part of a chunk that is checked and encoded at once. Memory that is used again and again
takes a tenth less time than fresh memory of the system."""

_decode_headers = msgspec.json.Decoder(dict[str, str]).decode


@dataclass(frozen=True, slots=True)
class StagingTarget:
    """Where the rows of a shard are staged, and which numbers they get."""

    data_dir: str
    """Empty: nothing is written (a dry run)."""
    stamp: int
    id_secret: bytes
    subjects: dict[str, int]
    """The shard's numbers of subjects; all shards have the same names."""


@dataclass(frozen=True, slots=True)
class StagingPlan:
    """The plan that every executor gets."""

    import_id: str
    targets: tuple[StagingTarget, ...]
    """One target for each shard, in their order; a server alone has one."""
    now_ms: int
    delay_max_ms: int
    body_max_bytes: int
    subject: str | None
    """The subject of all rows; None: column SUBJECT."""
    has_key: bool
    has_headers: bool
    content: Content
    due_unit: str
    """The unit of due times that are whole numbers."""
    is_past_refused: bool
    """A row that is due before `now_ms` is rejected; otherwise it is due now."""
    with_rows: bool
    """Whether the outcome has a row for each message, for the ids."""
    passed_on: tuple[str, ...] = ()
    """Columns of the table for the file of ids."""
    schema: bytes = b""
    """The Arrow schema of the outcome, serialized."""


class _Shard:
    """The rows that a partition stages for one shard."""

    def __init__(self, target: StagingTarget, name: str, first: StagingTarget) -> None:
        self.target = target
        self.hasher = KeyHasher(target.id_secret)
        self.part = name
        self.writer: PartWriter | None = None
        self.count = 0
        self._numbers = np.zeros(max(first.subjects.values(), default=0) + 1, np.uint32)
        for subject, number in first.subjects.items():
            self._numbers[number] = target.subjects[subject]

    def subject_ids(self, numbers: np.ndarray) -> np.ndarray:
        """The shard's own numbers of subjects, by those of the first shard."""
        own: np.ndarray = self._numbers[numbers]
        return own


class Stager:
    """Stages the batches of one partition."""

    def __init__(self, plan: StagingPlan) -> None:
        self._plan = plan
        self._schema = pa.ipc.read_schema(pa.py_buffer(plan.schema))
        context = TaskContext.get()
        number = context.partitionId() if context else 0
        # A task that runs again, or twice at once, writes files of its own.
        self._shards = [
            _Shard(
                target,
                part_name(plan.import_id, f"{number:05d}-{uuid.uuid4().hex[:8]}"),
                plan.targets[0],
            )
            for target in plan.targets
        ]
        self._staged = self._past = self._ancient = self._mark = 0
        self._subject_hashes = _hashes_of(plan.targets[0].subjects)
        self._next = number
        """The shard of the next row without a key, modulo the number of shards."""

    def stage(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Stage all batches; yields the outcome."""
        spare_imports()
        for chunk in _chunks(batches):
            for step in _by_due(chunk):
                yield from self._stage_batch(step)
        for number, shard in enumerate(self._shards):
            if shard.writer is not None:
                part = shard.writer.close()
                yield self._outcome(
                    kind=[PART],
                    part=[part.file],
                    row=[part.count],
                    bytes=[part.bytes],
                    checksum=[part.checksum],
                    shard=[number],
                )
        mark = np.array(self._mark, np.uint64).astype(np.int64)
        yield self._outcome(
            kind=[STAGED, PAST, ANCIENT, MARK],
            row=[self._staged, self._past, self._ancient, int(mark)],
        )

    def _stage_batch(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        # The first problem of a row is its reason, so the order of these checks matters.
        problems = Problems()
        if PROBLEM in batch.schema.names:
            told = batch.column(PROBLEM)
            for index in np.flatnonzero(present(told)).tolist():
                problems[index] = told[index].as_py()
        subject_ids = self._subject_ids(batch, problems)
        due_ms = self._due_ms(batch, problems)
        bodies = self._bodies(batch, problems)
        keys = self._keys(batch, problems)
        headers = self._headers(batch, problems)
        kept = np.delete(np.arange(batch.num_rows), list(problems))
        if len(kept):
            self._count(due_ms[kept])
            order = kept[np.argsort(due_ms[kept], kind="stable")]
            for shard, own in self._by_shard(batch, order, keys):
                self._write(shard, own, due_ms, subject_ids, bodies, keys, headers)
                first, shard.count = shard.count, shard.count + len(own)
                if self._plan.with_rows:
                    now_or_later_ms = np.maximum(due_ms[own], self._plan.now_ms)
                    yield self._rows(shard, batch, own, now_or_later_ms, keys, first)
        if problems:
            yield self._rejects(batch, problems, keys, bodies)

    def _count(self, due_ms: np.ndarray) -> None:
        self._staged += len(due_ms)
        self._past += int(np.count_nonzero(due_ms < self._plan.now_ms))
        self._ancient += int(np.count_nonzero(due_ms <= SECONDS_MAX))

    def _by_shard(
        self, batch: pa.RecordBatch, order: np.ndarray, keys: list[str | None]
    ) -> Iterator[tuple[_Shard, np.ndarray]]:
        """The rows of each shard that has any, in the order of the shards."""
        count = len(self._shards)
        if count == 1:
            yield self._shards[0], order
            return
        chosen = order.tolist()
        if self._plan.subject is None:
            names = batch.column(SUBJECT).to_pylist()
            subjects = [names[index] for index in chosen]
        else:
            subjects = [self._plan.subject] * len(chosen)
        found = np.array(shards_of(subjects, [keys[index] for index in chosen], count, count))
        free = np.flatnonzero(found == count)
        found[free] = (self._next + np.arange(len(free))) % count
        self._next += len(free)
        for number, shard in enumerate(self._shards):
            own = order[found == number]
            if len(own):
                yield shard, own

    # ── the rules, column by column ────────────────────────────────────────────────────────────

    def _subject_ids(self, batch: pa.RecordBatch, problems: Problems) -> np.ndarray:
        """The numbers of the subjects in the first shard."""
        plan, known = self._plan, self._plan.targets[0].subjects
        if plan.subject is not None:
            return np.full(batch.num_rows, known[plan.subject], np.uint32)
        names = text_or_none(batch.column(SUBJECT))
        numbers = np.fromiter(
            (0 if name is None else known.get(name, 0) for name in names), np.uint32
        )
        problems.add(numbers == 0, "bad subject")
        return numbers

    def _due_ms(self, batch: pa.RecordBatch, problems: Problems) -> np.ndarray:
        """The due times of the table, past ones too."""
        plan, column = self._plan, batch.column(DUE)
        if GIVEN_DUE in batch.schema.names:
            # The reader has made milliseconds of them, and has reported the values it could not
            # read.
            problems.add(~present(column), "no due time")
            due_ms = integers(column)
        else:
            due_ms = due_times(column, plan.due_unit, problems)
        last_ms = min(plan.now_ms + plan.delay_max_ms, TIME_MS_MAX)
        problems.add(due_ms > last_ms, "due too far away")
        if plan.is_past_refused:
            problems.add(due_ms < plan.now_ms, "due in the past")
        return np.array(due_ms)

    def _bodies(self, batch: pa.RecordBatch, problems: Problems) -> list[bytes]:
        plan = self._plan
        if BODY not in batch.schema.names:
            return [b"null"] * batch.num_rows
        found = body_pieces(batch.column(BODY), problems)
        if plan.content is not Content.JSON:
            problems.add(np.array([body is None for body in found], bool), "no body")
        bodies = [b"null" if body is None else body for body in found]
        sizes_bytes = np.fromiter(map(len, bodies), np.int64, len(bodies))
        problems.add(sizes_bytes > plan.body_max_bytes, "body too large")
        if plan.content is Content.JSON:
            for index in np.flatnonzero(sizes_bytes > NESTED_MIN_BYTES).tolist():
                if index not in problems and is_nested_too_deeply(bodies[index]):
                    problems[index] = "body nested too deeply"
        return bodies

    def _keys(self, batch: pa.RecordBatch, problems: Problems) -> list[str | None]:
        if not self._plan.has_key:
            return [None] * batch.num_rows
        column = text_array(batch.column(KEY), "key", problems)
        bytes_ = lengths(column)
        bad = present(column) & ((bytes_ == 0) | (bytes_ > KEY_MAX_BYTES))
        problems.add(bad, "key is empty or too long")
        return text_or_none(column)

    def _headers(self, batch: pa.RecordBatch, problems: Problems) -> list[dict[str, str] | None]:
        found: list[dict[str, str] | None] = [None] * batch.num_rows
        if self._plan.has_headers:
            for index, text in enumerate(header_pieces(batch.column(HEADERS), problems)):
                if text is None or index in problems:
                    continue
                try:
                    own = _decode_headers(text)
                    check_headers(own)
                except (msgspec.DecodeError, InputError) as error:
                    problems.setdefault(index, f"bad headers: {error}")
                else:
                    found[index] = own or None
        return found

    # ── the outcome ────────────────────────────────────────────────────────────────────────────

    def _write(
        self,
        shard: _Shard,
        order: np.ndarray,
        due_ms: np.ndarray,
        subject_ids: np.ndarray,
        bodies: list[bytes],
        keys: list[str | None],
        headers: list[dict[str, str] | None],
    ) -> None:
        """Write these rows, in that order."""
        plan, target = self._plan, shard.target
        due_ms, subject_ids = due_ms[order], subject_ids[order]
        if not np.array_equal(order, np.arange(len(bodies))):
            chosen = order.tolist()
            bodies = [bodies[index] for index in chosen]
            keys = [keys[index] for index in chosen]
            headers = [headers[index] for index in chosen]
        count = len(order)
        payloads = encode_payloads(bodies, [plan.content] * count, keys, headers, [None] * count)
        crcs = crcs_of(payloads)
        lengths_ = np.fromiter(map(len, payloads), np.uint32, count) + np.uint32(CRC_BYTES)
        self._mark += mark_of(
            self._subject_hashes[subject_ids], due_ms, lengths_, np.array(crcs, np.uint32)
        )
        self._mark %= 1 << 64
        if not target.data_dir:
            return
        if shard.writer is None:
            files = OsFiles(target.data_dir)
            shard.writer = PartWriter(files, shard.part, stamp=target.stamp, created_ms=plan.now_ms)
        subject_ids = shard.subject_ids(subject_ids)
        if plan.has_key:
            hashes = b"".join(shard.hasher.many(subject_ids.tolist(), keys))
        else:
            hashes = NO_KEY * count
        sealed = b"".join(seal_many(payloads, crcs))
        # A time in the past means now.
        now_or_later_ms = np.maximum(due_ms, plan.now_ms)
        shard.writer.append(now_or_later_ms, subject_ids, hashes, lengths_, sealed)

    def _rows(
        self,
        shard: _Shard,
        batch: pa.RecordBatch,
        order: np.ndarray,
        due_ms: np.ndarray,
        keys: list[str | None],
        first: int,
    ) -> pa.RecordBatch:
        """A row of the outcome for each message."""
        plan, count = self._plan, len(order)
        chosen = batch.take(fixed(order))
        columns = {name: chosen.column(name) for name in plan.passed_on}
        if plan.has_key:
            columns["key"] = [keys[index] for index in order.tolist()]
        return self._outcome(
            kind=[ROW] * count,
            part=[shard.part] * count,
            row=range(first, first + count),
            due_ms=due_ms,
            subject=[plan.subject] * count if plan.subject is not None else chosen.column(SUBJECT),
            **columns,
        )

    def _rejects(
        self,
        batch: pa.RecordBatch,
        problems: Problems,
        keys: list[str | None],
        bodies: list[bytes],
    ) -> pa.RecordBatch:
        plan, indexes = self._plan, sorted(problems)
        chosen = batch.take(fixed(np.array(indexes)))
        count = len(indexes)
        subjects = [plan.subject] * count
        if plan.subject is None:
            subjects = text_or_none(chosen.column(SUBJECT))
        shown = [bodies[index] for index in indexes]
        given = GIVEN_DUE if GIVEN_DUE in batch.schema.names else DUE
        return self._outcome(
            kind=[REJECT] * count,
            reason=[problems[index] for index in indexes],
            subject=subjects,
            due=text_or_none(text_array(chosen.column(given), "due", Problems())),
            key=[_begin(keys[index]) for index in indexes],
            body=[text[:REJECT_TEXT_MAX].decode("utf-8", "replace") for text in shown],
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


def _chunks(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The rows of all batches, about CHUNK_BYTES at a time."""
    waiting: list[pa.RecordBatch] = []
    total_bytes = 0
    for batch in batches:
        if batch.num_rows:
            waiting.append(batch)
            total_bytes += batch.nbytes
        if total_bytes >= CHUNK_BYTES:
            chunk = pa.concat_batches(waiting)
            waiting, total_bytes = [], 0  # before staging, because the batch has copied them
            yield chunk
    if waiting:
        yield pa.concat_batches(waiting)


def _by_due(chunk: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """The rows in the order of their due times, about STEP_BYTES at a time: neighbours in the file
    lie next to each other in memory, too. If the due times are text, they are sorted after they
    have been read; the chunk stays whole then, lest each step have a frame for each hour."""
    due = chunk.column(DUE)
    if not (pa.types.is_integer(due.type) or pa.types.is_temporal(due.type)):
        yield chunk
        return
    moments = integers(due)
    is_sorted = bool((moments[1:] >= moments[:-1]).all())
    order = None if is_sorted else fixed(np.argsort(moments, kind="stable"))
    rows = max(1, chunk.num_rows * STEP_BYTES // max(1, chunk.nbytes))
    for start in range(0, chunk.num_rows, rows):
        yield chunk.slice(start, rows) if order is None else chunk.take(order.slice(start, rows))


def _hashes_of(subjects: dict[str, int]) -> np.ndarray:
    """A hash of each subject's name, by its number, because numbers belong to one server."""
    hashes = np.zeros(max(subjects.values(), default=0) + 1, np.uint64)
    for name, number in subjects.items():
        hashes[number] = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big")
    return hashes


def _begin(text: str | None) -> str | None:
    return None if text is None else text[:REJECT_TEXT_MAX]
