"""Bulk load: a table of future messages becomes messages of a running server, all or nothing.

    table ─▶ subject, due, key, body ─▶ by due time ─▶ staged parts ─▶ manifest ─▶ adopted
             (Spark expressions)         (sort)         (executors)    (driver)    (server)

The rows do not pass through the front door: executors write frames of the schedule log below the
data directory, in parallel, and the server takes them over with one record. Everything before the
manifest is thrown away when the job fails; everything after it may be repeated under the same name.

Of several shards each has a staging, a manifest and an adoption of its own, all or nothing for
each. Only when everything is staged a note is written above them (`imports/<id>.shards`: which
parts each shard has), and nothing is adopted before it. From then on nothing is staged again under
that name: a run that follows adopts where it is missing, and takes the note away at its end.

Cost: about 3 µs of one core per row of 200 bytes, 1.3 of them Spark's to read and sort it; memory
of one Arrow batch per task, and of Spark's sort.
Threads: the caller's.
"""

import contextlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
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
from delayserver.pipeline.load.staging import (
    BODY,
    DUE,
    HEADERS,
    KEY,
    SUBJECT,
    Stager,
    StagingPlan,
    StagingTarget,
)
from delayserver.pipeline.progress import Job
from delayserver.pipeline.publish.mapping import NESTED, TIMES, MessageColumns, is_whole
from delayserver.pipeline.states.snapshot import check_here
from delayserver.records.ids import IdCodec
from delayserver.records.message import Content
from delayserver.records.subjects import is_subject
from storage.directory import FORMAT_FILE, Identity, open_identity
from storage.files import OsFiles, replace_file
from storage.shards import (
    find_directory_above,
    read_shard_count,
    refuse_another,
    shard_directory,
)
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
NOTE_SUFFIX = ".shards"
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
        T.StructField("shard", T.IntegerType()),
    ]
)
Parts = tuple[tuple[str, int], ...]
"""Files of a manifest in their order, and how many rows each has."""


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
    if (above := find_directory_above(str(load.data_dir))) is not None:
        raise PipelineError(
            f"{load.data_dir} is one shard of several, and each row has its own: give {above}"
        )
    # Spark's own processes have another working directory.
    load = replace(load, data_dir=load.data_dir.resolve())
    count = read_shard_count(OsFiles(str(load.data_dir), readonly=True))
    with contextlib.ExitStack() as cleanup:
        targets = [
            _open_target(load, shard, cleanup)
            for shard in ([None] if count is None else range(count))
        ]
        return _Run(job, table, load, targets).run()


@dataclass(frozen=True, slots=True, eq=False)
class _Target:
    """Where rows go: a shard, or a server alone."""

    shard: int | None
    data_dir: Path
    files: OsFiles
    identity: Identity
    adoption: Adoption

    @property
    def has_manifest(self) -> bool:
        return self.files.exists(manifest_path(self.adoption.import_id))


def _open_target(load: LoadJob, shard: int | None, cleanup: contextlib.ExitStack) -> _Target:
    data_dir = load.data_dir if shard is None else load.data_dir / shard_directory(shard)
    if not (data_dir / FORMAT_FILE).is_file():
        raise PipelineError(
            f"{data_dir} is not a data directory; give the one that the server was started "
            "with (--data-dir); every executor must see it under the same path"
        )
    files = OsFiles(str(data_dir))
    identity = open_identity(files, random_bytes=None)
    if shard is not None:
        refuse_another(str(data_dir), identity.shard, shard)
    adoption = Adoption(load.server, load.id, shard=shard, token=load.token, wait_s=load.wait_s)
    return _Target(shard, data_dir, files, identity, cleanup.enter_context(adoption))


@dataclass(frozen=True, slots=True)
class _PartRows:
    """Which rows of an import are those of a part, and what became of the import."""

    start: int
    first_seq: int
    codec: IdCodec
    duplicates: Mapping[int, str]


class _Run:
    """One load."""

    def __init__(
        self, job: Job, table: DataFrame, load: LoadJob, targets: Sequence[_Target]
    ) -> None:
        self._job = job
        self._table = table
        self._load = load
        self._targets = targets
        self._files = OsFiles(str(load.data_dir))
        self._work = load.data_dir / DIRECTORY / f"{load.id}{WORK_SUFFIX}"
        self._note_path = f"{DIRECTORY}/{load.id}{NOTE_SUFFIX}"
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
        known = {one: found for one in self._targets if (found := one.adoption.find())}
        staged = self._staged() or dict.fromkeys(known, ())
        if staged and all(one in known and known[one].state == "adopted" for one in staged):
            loaded.was_adopted = True
            self._note(known.values())
            if len(self._targets) > 1:
                self._clear()
            return loaded
        if not staged:
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
            staged = self._staged()
        self._adopt(staged, known)
        return loaded

    def _clear(self) -> None:
        shutil.rmtree(self._work, ignore_errors=True)
        # Without the note nothing counts as staged.
        self._delete_note()
        for target in self._targets:
            delete(target.files, self._load.id)

    def _delete_note(self) -> None:
        if len(self._targets) > 1 and self._files.exists(self._note_path):
            self._files.unlink(self._note_path)
            self._files.sync_directory(DIRECTORY)

    def _staged(self) -> dict[_Target, Parts]:
        """For whom something is staged as a whole, and which parts; none, if nothing is."""
        if len(self._targets) == 1:
            (target,) = self._targets
            if not target.has_manifest:
                return {}
            return {target: _parts(read_manifest(target.files, self._load.id))}
        if not self._files.exists(self._note_path):
            return {}
        text = (self._load.data_dir / self._note_path).read_bytes()
        try:
            note = msgspec.json.decode(text, type=dict[int, Parts])
            return {self._targets[shard]: parts for shard, parts in note.items()}
        except (msgspec.DecodeError, IndexError) as error:
            raise PipelineError(
                f"{self._load.data_dir / self._note_path} cannot be read ({error}); restore it: it "
                "says what of the load is staged where"
            ) from error

    # ── staging ────────────────────────────────────────────────────────────────────────────────

    def _stage_or_clear(self) -> None:
        for files in (self._files, *(target.files for target in self._targets)):
            files.make_directory(DIRECTORY)
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
        note: dict[int, Parts] = {}
        for number, target in enumerate(self._targets):
            own = [part for part in parts if part["shard"] == number]
            if own:
                manifest = Manifest(
                    load.id,
                    target.identity.stamp,
                    plan.now_ms,
                    tuple(Part(p["part"], p["bytes"], p["row"], p["checksum"]) for p in own),
                    load.on_conflict,
                )
                write_manifest(target.files, manifest)
                note[number] = _parts(manifest)
        if note and len(self._targets) > 1:
            replace_file(self._files, self._note_path, msgspec.json.encode(note))

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
            numbers = [{name: number for number, name in enumerate(subjects, 1)}] * len(
                self._targets
            )
            now_ms = time.time_ns() // 1_000_000
            limits = (now_ms, defaults.delay_max_ms, defaults.body_max_bytes)
        else:
            begun = [target.adoption.begin(subjects) for target in self._targets]
            numbers = [one.subjects for one in begun]
            limits = (begun[-1].now_ms, begun[-1].delay_max_ms, begun[-1].body_max_bytes)
        plan = StagingPlan(
            load.id,
            tuple(
                StagingTarget(
                    "" if load.dry_run else str(target.data_dir),
                    target.identity.stamp,
                    target.identity.id_secret,
                    own,
                )
                for target, own in zip(self._targets, numbers, strict=True)
            ),
            *limits,
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

    def _adopt(self, staged: Mapping[_Target, Parts], known: Mapping[_Target, Adopted]) -> None:
        load, loaded = self._load, self._loaded
        began = time.monotonic()
        self._job.progress("adopting", 0, 0)
        adopted, refused = self._adopt_each(staged, known)
        loaded.adopting_s = time.monotonic() - began
        loaded.staged = sum(one.count for one in adopted.values())
        self._note(adopted.values())
        began = time.monotonic()
        for target in adopted:
            adopted[target] = target.adoption.follow(
                lambda done, total: self._job.progress("filing", done, total)
            )
        self._note(adopted.values())
        loaded.filing_s = time.monotonic() - began
        if refused:
            (first, error), *_ = refused.items()
            shards = ", ".join(str(target.shard) for target in refused)
            raise CallRefusedError(
                error.status,
                f"shard {first.shard}: {error}. All other rows are loaded, those of shard {shards} "
                f"are kept: run the same again with --id {load.id}, and where a key stands for "
                "other content with --on-conflict keep",
            )
        if load.ids is not None:
            if not all(staged.values()) or not self._work.is_dir():
                raise PipelineError("the ids are not known any more; the messages are loaded")
            self._job.progress("writing the ids", 0, 0)
            self._write_ids(load.ids, staged, adopted)
        self._delete_note()
        shutil.rmtree(self._work, ignore_errors=True)

    def _adopt_each(
        self, staged: Mapping[_Target, Parts], known: Mapping[_Target, Adopted]
    ) -> tuple[dict[_Target, Adopted], dict[_Target, CallRefusedError]]:
        """What was adopted, and who refused. Where nobody has adopted anything, what is staged is
        thrown away and the refusal is raised."""
        load = self._load
        adopted: dict[_Target, Adopted] = {}
        refused: dict[_Target, CallRefusedError] = {}
        for target in staged:
            if target in known and known[target].state == "adopted":
                adopted[target] = known[target]
                continue
            if target not in known:
                self._decide_conflicts(target)
            try:
                adopted[target] = target.adoption.adopt()
            except CallRefusedError as error:
                if not (adopted or known):
                    self._clear()
                    raise
                refused[target] = error
            except PipelineError as error:
                raise PipelineError(
                    f"{error}. What was staged is kept: run the same again with --id {load.id}"
                ) from error
        return adopted, refused

    def _decide_conflicts(self, target: _Target) -> None:
        """What an earlier run has staged is adopted as this one says."""
        if target.has_manifest:
            manifest = read_manifest(target.files, self._load.id)
            if manifest.on_conflict != self._load.on_conflict:
                write_manifest(target.files, replace(manifest, on_conflict=self._load.on_conflict))

    def _note(self, adopted: Iterable[Adopted]) -> None:
        loaded, found = self._loaded, list(adopted)
        unfinished = (one.state for one in found if one.state != "adopted")
        loaded.state = next(unfinished, "adopted")
        loaded.accepted = sum(one.accepted for one in found)
        loaded.duplicates = sum(one.duplicates for one in found)
        loaded.conflicts = sum(one.conflicts for one in found)

    def _write_ids(
        self, path: Path, staged: Mapping[_Target, Parts], adopted: Mapping[_Target, Adopted]
    ) -> None:
        """A Parquet file: which row has become which message."""
        places: dict[str, _PartRows] = {}
        for target, parts in staged.items():
            one, rows = adopted[target], 0
            duplicates = dict(target.adoption.duplicates()) if one.duplicates else {}
            codec = IdCodec(target.identity.shard, target.identity.id_secret)
            for file, count in parts:
                places[file] = _PartRows(rows, one.first_seq, codec, duplicates)
                rows += count
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
                    writer.write_batch(_ids(batch, schema, places))
        self._loaded.ids_file = str(path)


def _parts(manifest: Manifest) -> Parts:
    return tuple((part.file, part.count) for part in manifest.parts)


def _stager(plan: StagingPlan) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def stage(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for target in plan.targets:
            if target.data_dir:
                files = OsFiles(target.data_dir, readonly=True)
                check_here(files, target.data_dir, target.stamp)
        return Stager(plan).stage(batches)

    return stage


def _ids(
    batch: pa.RecordBatch, schema: pa.Schema, places: Mapping[str, _PartRows]
) -> pa.RecordBatch:
    parts = batch.column("part").dictionary_encode()
    indices, rows = parts.indices.to_numpy(), batch.column("row").to_numpy()
    due = batch.column("due_ms")
    due_ms = due.to_numpy()
    own, held = np.empty((2, batch.num_rows), object)
    for index, name in enumerate(parts.dictionary.to_pylist()):
        place, here = places[name], np.flatnonzero(indices == index)
        numbers = place.start + rows[here]
        codec = place.codec
        own[here] = codec.texts(codec.encode_many(due_ms[here], numbers + place.first_seq))
        if place.duplicates:
            held[here] = [place.duplicates.get(number) for number in numbers.tolist()]
    pairs = list(zip(held.tolist(), own.tolist(), strict=True))
    columns = [
        pa.array([there or made for there, made in pairs], pa.string()),
        pa.array([there is not None for there, _ in pairs], pa.bool_()),
        batch.column("subject"),
        batch.column("key"),
        due.cast(pa.timestamp("ms", tz="UTC")),
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
