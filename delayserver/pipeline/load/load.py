"""Bulk load: a table of future messages becomes messages of a running server, all or nothing.

    table ─▶ subject, due, key, body ─▶ by due time ─▶ staged parts ─▶ manifest ─▶ adopted
             (Spark expressions)         (sort)         (executors)    (driver)    (server)

The rows do not pass through the front door: executors write frames of the schedule log below the
data directory, in parallel, and the server takes them over with one record. Everything before the
manifest is thrown away when the job fails; everything after it may be repeated under the same name.

Cost: about 3 µs of one core per row of 200 bytes, 1.3 of them Spark's to read and sort it; memory
of one Arrow batch per task, and of Spark's sort.
Threads: the caller's.
"""

import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_schema

from delayserver.config import Settings
from delayserver.errors import PipelineError
from delayserver.pipeline.calls import CallRefusedError
from delayserver.pipeline.load import staging
from delayserver.pipeline.load.adoption import Adopted, Adoption
from delayserver.pipeline.load.source import quoted
from delayserver.pipeline.load.staging import BODY, DUE, HEADERS, KEY, SUBJECT, Stager, StagingPlan
from delayserver.pipeline.progress import Job
from delayserver.pipeline.publish.mapping import NESTED, TIMES, MessageColumns, is_whole
from delayserver.records.ids import IdCodec
from delayserver.records.message import Content
from delayserver.records.subjects import is_subject
from storage.directory import FORMAT_FILE, Identity, open_identity
from storage.files import OsFiles
from storage.staging import (
    DIRECTORY,
    Manifest,
    OnConflict,
    Part,
    delete,
    is_import_id,
    manifest_path,
    read_manifest,
    write_manifest,
)

SUBJECTS_MAX = 100_000
WORK_SUFFIX = ".work"
"""What the executors report, until the job has ended; the server leaves it alone."""
PARTITIONS_PER_CORE = 2
PIECES_MAX = 32

_OUTCOME = T.StructType(
    [
        T.StructField("kind", T.IntegerType()),
        T.StructField("part", T.StringType()),
        T.StructField("row", T.LongType()),
        T.StructField("bytes", T.LongType()),
        T.StructField("checksum", T.LongType()),
        T.StructField("due_ms", T.LongType()),
        T.StructField("subject", T.StringType()),
        T.StructField("key", T.StringType()),
        T.StructField("reason", T.StringType()),
        T.StructField("due", T.StringType()),
        T.StructField("body", T.StringType()),
    ]
)


@dataclass(frozen=True, slots=True)
class LoadJob:
    """What is to be loaded, and how."""

    id: str
    data_dir: Path
    server: str
    columns: MessageColumns
    token: str | None = None
    on_conflict: OnConflict = OnConflict.REFUSE
    strict: bool = False
    dry_run: bool = False
    rejects: Path | None = None
    """Where rejected rows go; None: `<id>.rejected.jsonl` in the working directory."""
    ids: Path | None = None
    ids_columns: tuple[str, ...] = ()
    wait_s: float = 60.0


@dataclass(slots=True)
class Loaded:
    """What became of a load."""

    id: str
    state: str = ""
    """adopted, filing, rejected (strict), checked (a dry run)."""
    was_adopted: bool = False
    """It had been loaded before under the same name; nothing was done."""
    read: int = 0
    staged: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    accepted: int = 0
    duplicates: int = 0
    conflicts: int = 0
    rejects_file: str | None = None
    ids_file: str | None = None
    staging_s: float = 0.0
    adopting_s: float = 0.0
    filing_s: float = 0.0

    @property
    def rejected_total(self) -> int:
        """Rows that cannot be messages."""
        return sum(self.rejected.values())

    @property
    def rows_per_s(self) -> float:
        """Rows that were made durable messages per second, reading and staging included."""
        seconds = self.staging_s + self.adopting_s
        return self.staged / seconds if seconds else 0.0

    def document(self) -> dict[str, Any]:
        """What `--json` prints: the fields, and the rate, as JSON values."""
        return {**asdict(self), "rows_per_s": round(self.rows_per_s)}


def run(job: Job, table: DataFrame, load: LoadJob) -> Loaded:
    """Load the table. Raises PipelineError, CallRefusedError, StorageError."""
    if not is_import_id(load.id):
        raise PipelineError(
            f"{load.id!r} cannot be the name of an import: 1 to 64 letters, digits, - and _"
        )
    if not (load.data_dir / FORMAT_FILE).is_file():
        raise PipelineError(
            f"{load.data_dir} is not a data directory; give the one that the server was started "
            "with (--data-dir); every executor must see it under the same path"
        )
    # Spark's own processes have another working directory.
    load = replace(load, data_dir=load.data_dir.resolve())
    with Adoption(load.server, load.id, token=load.token, wait_s=load.wait_s) as adoption:
        return _Run(job, table, load, adoption).run()


class _Run:
    """One load."""

    def __init__(self, job: Job, table: DataFrame, load: LoadJob, adoption: Adoption) -> None:
        self._job = job
        self._table = table
        self._load = load
        self._adoption = adoption
        self._files = OsFiles(str(load.data_dir))
        self._identity: Identity = open_identity(self._files, random_bytes=None)
        self._work = load.data_dir / DIRECTORY / f"{load.id}{WORK_SUFFIX}"
        self._loaded = Loaded(load.id)

    def run(self) -> Loaded:
        load, loaded = self._load, self._loaded
        if load.dry_run:
            self._files.make_directory(DIRECTORY)
            try:
                self._stage()
            finally:
                shutil.rmtree(self._work, ignore_errors=True)
            loaded.state = "checked"
            return loaded
        known = self._adoption.find()
        if known is not None and known.state == "adopted":
            loaded.was_adopted = True
            self._note(known)
            return loaded
        if known is None and not self._files.exists(manifest_path(load.id)):
            began = time.monotonic()
            self._stage_or_clear()
            loaded.staging_s = time.monotonic() - began
            if load.strict and loaded.rejected:
                self._clear()
                loaded.state = "rejected"
                return loaded
            if not loaded.staged:
                self._clear()
                loaded.state = "empty"
                return loaded
        self._adopt()
        return loaded

    def _clear(self) -> None:
        shutil.rmtree(self._work, ignore_errors=True)
        delete(self._files, self._load.id)

    # ── staging ────────────────────────────────────────────────────────────────────────────────

    def _stage_or_clear(self) -> None:
        self._files.make_directory(DIRECTORY)
        self._clear()  # What an earlier run under this name may have left.
        try:
            self._stage()
        except BaseException:
            self._clear()
            raise

    def _stage(self) -> None:
        load, loaded = self._load, self._loaded
        with self._job.step("looking at the table"):
            chosen, plan = self._plan()
        ordered = self._partitioned(chosen).sortWithinPartitions(DUE)
        # Executors get functions by value: no method of an object that holds the session.
        outcome = ordered.mapInArrow(_stager(plan), self._schema())
        with self._job.step("staging"):
            outcome.write.mode("overwrite").parquet(self._work.as_uri())
        results = ds.dataset(self._work, format="parquet")
        parts = results.to_table(filter=pc.field("kind") == staging.PART).to_pylist()
        parts.sort(key=lambda part: part["part"])
        counted = results.to_table(columns=["row"], filter=pc.field("kind") == staging.COUNT)
        loaded.staged = sum(part["row"] for part in parts) + (pc.sum(counted["row"]).as_py() or 0)
        self._write_rejects(results)
        loaded.read = loaded.staged + loaded.rejected_total
        if parts:
            manifest = Manifest(
                load.id,
                self._identity.stamp,
                plan.now_ms,
                tuple(Part(p["part"], p["bytes"], p["row"], p["checksum"]) for p in parts),
                load.on_conflict,
            )
            write_manifest(self._files, manifest)

    def _partitioned(self, chosen: DataFrame) -> DataFrame:
        """The rows in as many partitions as there is work for.

        A part may hold rows of any hours, so a table that comes in a few pieces need not be
        shuffled: each hour gets a frame from each piece. Of many pieces, or of one alone, ranges
        of due times are made."""
        count = self._job.cores
        if not self._job.is_connect:
            pieces = chosen.rdd.getNumPartitions()
            if count <= pieces <= PIECES_MAX:
                return chosen
        return chosen.repartitionByRange(count * PARTITIONS_PER_CORE, DUE)

    def _schema(self) -> T.StructType:
        passed = [self._table.schema[name] for name in self._load.ids_columns]
        return T.StructType([*_OUTCOME.fields, *passed])

    def _plan(self) -> tuple[DataFrame, StagingPlan]:
        """The table in the form that executors want, and what they must know."""
        load, columns, table = self._load, self._load.columns, self._table
        columns.check(table.schema, load.ids_columns)
        body, content, is_ours = self._body()
        chosen = [_due(table, columns.due).alias(DUE), body.alias(BODY)]
        if columns.subject_column is not None:
            chosen.append(F.col(quoted(columns.subject_column)).cast("string").alias(SUBJECT))
        if columns.key is not None:
            chosen.append(F.col(quoted(columns.key)).cast("string").alias(KEY))
        if columns.headers is not None:
            chosen.append(_headers(table, columns.headers).alias(HEADERS))
        chosen += [F.col(quoted(name)) for name in load.ids_columns]
        subjects = self._subjects()
        if load.dry_run:
            defaults = Settings()
            numbers = {name: number for number, name in enumerate(subjects, 1)}
            now_ms = time.time_ns() // 1_000_000
            limits = (now_ms, defaults.delay_max_ms, defaults.body_max_bytes)
        else:
            begun = self._adoption.begin(subjects)
            numbers = begun.subjects
            limits = (begun.now_ms, begun.delay_max_ms, begun.body_max_bytes)
        plan = StagingPlan(
            load.id,
            "" if load.dry_run else str(load.data_dir),
            self._identity.stamp,
            self._identity.id_secret,
            *limits,
            subjects=numbers,
            subject=columns.subject,
            has_key=columns.key is not None,
            has_headers=columns.headers is not None,
            content=content,
            is_json_checked=is_ours,
            with_rows=load.ids is not None and not load.dry_run,
            passed_on=load.ids_columns,
            schema=to_arrow_schema(self._schema()).serialize().to_pybytes(),
        )
        return table.select(*chosen), plan

    def _subjects(self) -> list[str]:
        columns = self._load.columns
        if columns.subject is not None:
            return [columns.subject]
        assert columns.subject_column is not None
        column = F.col(quoted(columns.subject_column)).cast("string")
        found = self._table.select(column).distinct().limit(SUBJECTS_MAX + 1).collect()
        if len(found) > SUBJECTS_MAX:
            raise PipelineError(
                f"column {columns.subject_column} has more than {SUBJECTS_MAX} subjects; "
                "put what varies into the key or the body, not into the subject"
            )
        names = sorted(row[0] for row in found if row[0] is not None and is_subject(row[0]))
        if not names:
            raise PipelineError(f"column {columns.subject_column} has no valid subject")
        return names

    def _body(self) -> tuple[Column, Content, bool]:
        """The body, what it is, and whether it is JSON that Spark made."""
        columns, table = self._load.columns, self._table
        if columns.body is None:
            rest = columns.rest(table.columns)
            if not rest:
                return F.lit("null"), Content.JSON, True
            return _to_json(F.struct(*map(quoted, rest))), Content.JSON, True
        kind, column = table.schema[columns.body].dataType, F.col(quoted(columns.body))
        if isinstance(kind, T.BinaryType):
            return column, Content.BINARY, True
        if isinstance(kind, NESTED):
            return _to_json(column), Content.JSON, True
        return column.cast("string"), Content.JSON, False

    def _write_rejects(self, results: ds.Dataset) -> None:
        load, loaded = self._load, self._loaded
        rejects = pc.field("kind") == staging.REJECT
        reasons: Counter[str] = Counter()
        path = load.rejects or Path(f"{load.id}.rejected.jsonl")
        names = ["reason", "subject", "due", "key", "body"]
        file = None
        try:
            for batch in results.to_batches(columns=names, filter=rejects):
                for row in batch.to_pylist():
                    if file is None:
                        file = path.open("w", encoding="utf-8")
                    reasons[row["reason"].partition(":")[0]] += 1
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
        finally:
            if file is not None:
                file.close()
        loaded.rejected = dict(reasons)
        loaded.rejects_file = str(path) if reasons else None

    # ── adoption ───────────────────────────────────────────────────────────────────────────────

    def _adopt(self) -> None:
        load, loaded = self._load, self._loaded
        # Read now: the server deletes it.
        path = manifest_path(load.id)
        manifest = read_manifest(self._files, load.id) if self._files.exists(path) else None
        began = time.monotonic()
        self._job.progress("adopting", 0, 0)
        try:
            adopted = self._adoption.adopt()
        except CallRefusedError:
            self._clear()
            raise
        except PipelineError as error:
            raise PipelineError(
                f"{error}. What was staged is kept: run the same again with --id {load.id}"
            ) from error
        loaded.adopting_s = time.monotonic() - began
        loaded.staged = adopted.count
        self._note(adopted)
        began = time.monotonic()
        self._note(
            self._adoption.follow(lambda done, total: self._job.progress("filing", done, total))
        )
        loaded.filing_s = time.monotonic() - began
        if load.ids is not None:
            if manifest is None or not self._work.is_dir():
                raise PipelineError("the ids are not known any more; the messages are loaded")
            self._job.progress("writing the ids", 0, 0)
            self._write_ids(load.ids, manifest, adopted)
        shutil.rmtree(self._work, ignore_errors=True)

    def _note(self, adopted: Adopted) -> None:
        loaded = self._loaded
        loaded.state = adopted.state
        loaded.accepted = adopted.accepted
        loaded.duplicates, loaded.conflicts = adopted.duplicates, adopted.conflicts

    def _write_ids(self, path: Path, manifest: Manifest, adopted: Adopted) -> None:
        """A Parquet file: which row has become which message."""
        firsts: dict[str, int] = {}
        rows = 0
        for part in manifest.parts:
            firsts[part.file] = rows
            rows += part.count
        duplicates = dict(self._adoption.duplicates()) if adopted.duplicates else {}
        codec = IdCodec(self._identity.shard, self._identity.id_secret)
        passed = [to_arrow_schema(self._schema()).field(name) for name in self._load.ids_columns]
        schema = pa.schema(
            [
                ("id", pa.string()),
                ("duplicate", pa.bool_()),
                ("subject", pa.string()),
                ("key", pa.string()),
                ("deliver_at", pa.timestamp("ms", tz="UTC")),
                *passed,
            ]
        )
        results = ds.dataset(self._work, format="parquet")
        batches = results.to_batches(filter=pc.field("kind") == staging.ROW)
        with pq.ParquetWriter(path, schema) as writer:
            for batch in batches:
                if batch.num_rows:
                    writer.write_batch(
                        _ids(batch, schema, firsts, adopted.first_seq, duplicates, codec)
                    )
        self._loaded.ids_file = str(path)


def _stager(plan: StagingPlan) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def stage(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return Stager(plan).stage(batches)

    return stage


def _ids(
    batch: pa.RecordBatch,
    schema: pa.Schema,
    firsts: Mapping[str, int],
    first_seq: int,
    duplicates: Mapping[int, str],
    codec: IdCodec,
) -> pa.RecordBatch:
    parts = batch.column("part").dictionary_encode()
    starts = np.array([firsts[name] for name in parts.dictionary.to_pylist()], np.int64)
    rows = starts[parts.indices.to_numpy()] + batch.column("row").to_numpy()
    due_ms = batch.column("due_ms")
    ids = codec.texts(codec.encode_many(due_ms.to_pylist(), rows + first_seq))
    held = [duplicates.get(row) for row in rows.tolist()] if duplicates else [None] * len(ids)
    columns = [
        pa.array([there or own for there, own in zip(held, ids, strict=True)], pa.string()),
        pa.array([there is not None for there in held], pa.bool_()),
        batch.column("subject"),
        batch.column("key"),
        due_ms.cast(pa.timestamp("ms", tz="UTC")),
        *(batch.column(field.name).cast(field.type) for field in list(schema)[5:]),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _to_json(column: Column) -> Column:
    return F.to_json(column, {"ignoreNullFields": "false"})


def _due(table: DataFrame, name: str) -> Column:
    """The due time as whole milliseconds, or as text that is read later."""
    kind, column = table.schema[name].dataType, F.col(quoted(name))
    if isinstance(kind, TIMES):
        # Never earlier than it says: a part of a millisecond is rounded up.
        micros = F.unix_micros(column.cast("timestamp"))
        return F.floor((micros + 999) / F.lit(1000)).cast("long")
    return column.cast("long") if is_whole(kind) else column


def _headers(table: DataFrame, name: str) -> Column:
    column = F.col(quoted(name))
    return column if isinstance(table.schema[name].dataType, T.StringType) else F.to_json(column)
