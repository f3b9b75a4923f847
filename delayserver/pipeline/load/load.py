"""Bulk load: a table of future messages becomes messages of a running server, all or nothing.

    table ─▶ subject, due, key, body ─▶ by due time ─▶ staged parts ─▶ manifest ─▶ adopted
             (Spark columns)             (sort)         (executors)    (driver)    (server)

The rows do not pass through the front door: executors write frames of the schedule log below the
data directory, in parallel, and the server takes them over with one record. Everything before the
manifest is thrown away when the job fails; everything after it may be repeated under the same name.

The name is locked while a load runs, and its staged rows are noted (`note`): a run that follows
compares its table with the note, and adopts where that is missing. If there are several shards,
each has a staging, a manifest and an adoption of its own, all or nothing for each; nothing is
adopted before everything is staged. If a load is killed while it stages, the next one throws its
files away.

Cost: about 3 µs of one core per row of 200 bytes, 1.3 of them Spark's to read and sort it; memory
of one Arrow batch per task, and of Spark's sort.
Threads: the caller's.
"""

import contextlib
import json
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_schema

from delayserver.errors import PipelineError
from delayserver.pipeline.calls import CallRefusedError
from delayserver.pipeline.load import staging
from delayserver.pipeline.load.adoption import Adopted, Adoption, Begun
from delayserver.pipeline.load.ids import ImportedParts, check_columns, write_ids
from delayserver.pipeline.load.note import LoadNote, NoteFile, Parts, abandoned
from delayserver.pipeline.load.source import FrameTable, LoadTable
from delayserver.pipeline.load.staging import DUE, Stager, StagingPlan, StagingTarget
from delayserver.pipeline.progress import Job
from delayserver.pipeline.publish.mapping import MessageColumns
from delayserver.pipeline.publish.values import SECONDS
from delayserver.pipeline.states.snapshot import check_here
from delayserver.records.arrow import texts
from delayserver.records.ids import IdCodec
from delayserver.records.subjects import is_subject
from storage.directory import FORMAT_FILE, Identity, open_identity
from storage.files import OsFiles
from storage.kinds import OWNED
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
WORK_SUFFIX = ".work"
"""The folder of the executors' reports, until the job has ended; the server leaves it alone."""
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


@dataclass(frozen=True, slots=True)
class LoadJob:
    """The table to be loaded, and the options."""

    id: str
    data_dir: Path
    server: str
    columns: MessageColumns
    token: str | None = None
    on_conflict: OnConflict = OnConflict.REFUSE
    strict: bool = False
    dry_run: bool = False
    past: str = "now"
    """A row with a past due time is due `now`, or is rejected (`reject`)."""
    rejects: Path | None = None
    """Where rejected rows go; None: `<id>.rejected.jsonl` in the working directory."""
    ids: Path | None = None
    ids_columns: tuple[str, ...] = ()
    wait_s: float = 60.0


@dataclass(slots=True)
class Loaded:
    """The result of a load."""

    id: str
    state: str = ""
    """adopted, filing, rejected (strict), checked (a dry run)."""
    was_adopted: bool = False
    """It had been loaded before under the same name; nothing was done."""
    read: int = 0
    staged: int = 0
    past: int = 0
    """How many of these were due before now, and so at once."""
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
        """The form that `--json` prints: the fields, and the rate, as JSON values."""
        return {**asdict(self), "rows_per_s": round(self.rows_per_s)}


def check(load: LoadJob) -> None:
    """Checks that need no table: the name, the data directory, that the server
    has that directory, and lets us load. Raises PipelineError, CallRefusedError, StorageError."""
    with contextlib.ExitStack() as cleanup:
        _open_targets(load, cleanup)


def run(job: Job, table: LoadTable | DataFrame, load: LoadJob) -> Loaded:
    """Load the table. Raises PipelineError, CallRefusedError, StorageError."""
    if isinstance(table, DataFrame):
        table = FrameTable(table)
    # Spark's own processes have another working directory.
    load = replace(load, data_dir=load.data_dir.resolve())
    with contextlib.ExitStack() as cleanup:
        targets = _open_targets(load, cleanup)
        OsFiles(str(load.data_dir)).make_directory(DIRECTORY)
        note = cleanup.enter_context(NoteFile(load.data_dir / DIRECTORY, load.id))
        return _Load(job, table, load, targets, note).run()


@dataclass(frozen=True, slots=True, eq=False)
class _Target:
    """Where rows go: a shard, or a server alone."""

    shard: int | None
    data_dir: Path
    files: OsFiles
    identity: Identity
    adoption: Adoption
    begun: Begun
    """The first answer of its server: its time and its limits."""

    @property
    def has_manifest(self) -> bool:
        return self.files.exists(manifest_path(self.adoption.import_id))


def _open_targets(load: LoadJob, cleanup: contextlib.ExitStack) -> list[_Target]:
    """Everybody who gets rows, asked whether it is the one."""
    check_columns(load.ids_columns)
    if not is_import_id(load.id):
        raise PipelineError(
            f"{load.id!r} cannot be the name of an import: 1 to 64 letters, digits, - and _"
        )
    if (above := find_directory_above(str(load.data_dir))) is not None:
        raise PipelineError(
            f"{load.data_dir} is one shard of several, and each row has its own: give {above}"
        )
    count = read_shard_count(OsFiles(str(load.data_dir), readonly=True))
    shards = [None] if count is None else range(count)
    targets = [_open_target(load, shard, cleanup) for shard in shards]
    for target in targets:
        if target.begun.directory != target.identity.fingerprint:
            raise PipelineError(
                f"the server at {load.server} has another data directory than {target.data_dir}: "
                "give its --server, and its --data-dir"
            )
    return targets


def _open_target(load: LoadJob, shard: int | None, cleanup: contextlib.ExitStack) -> _Target:
    data_dir = load.data_dir if shard is None else load.data_dir / shard_directory(shard)
    if not (data_dir / FORMAT_FILE).is_file():
        raise PipelineError(
            f"{data_dir} is not a data directory; give the one that the server was started "
            "with (--data-dir); every executor must see it under the same path"
        )
    files = OsFiles(str(data_dir))
    identity = open_identity(files, random_bytes=None, of=OWNED)
    if shard is not None:
        refuse_another(str(data_dir), identity.shard, shard)
    adoption = cleanup.enter_context(
        Adoption(load.server, load.id, shard=shard, token=load.token, wait_s=load.wait_s)
    )
    return _Target(shard, data_dir, files, identity, adoption, adoption.begin([]))


class _Load:
    """One load."""

    def __init__(
        self,
        job: Job,
        table: LoadTable,
        load: LoadJob,
        targets: Sequence[_Target],
        note: NoteFile,
    ) -> None:
        self._job = job
        self._table = table
        self._load = load
        self._targets = targets
        self._note = note
        self._work = _work_of(load.data_dir, load.id)
        self._loaded = Loaded(load.id)

    def run(self) -> Loaded:
        load, loaded = self._load, self._loaded
        self._clean_up()
        if load.dry_run:
            try:
                self._stage()
            finally:
                shutil.rmtree(self._work, ignore_errors=True)
            loaded.state = "checked"
            return loaded
        known = {one: found for one in self._targets if (found := one.adoption.find())}
        note = self._note.read()
        staged = self._staged(note, known)
        if staged and note is not None and (difference := self._difference(note)):
            if known:
                raise PipelineError(
                    f"another table was loaded under the name {load.id}: {difference}. Give this "
                    "one another --id"
                )
            staged = {}  # Nothing of it counts yet.
        if staged and note is not None:
            loaded.read, loaded.staged, loaded.past = note.read, note.staged, note.past
            loaded.rejected = dict(note.rejected)
        if staged and all(one in known and known[one].state == "adopted" for one in staged):
            loaded.was_adopted = True
            self._tell(known.values())
            self._finish(staged, known)
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
            staged = self._staged(self._note.read(), known)
        self._adopt(staged, known)
        return loaded

    def _clean_up(self) -> None:
        """Delete the files of loads that were killed while they staged, under any name."""
        for import_id, note in abandoned(self._load.data_dir / DIRECTORY):
            with note:
                shutil.rmtree(_work_of(self._load.data_dir, import_id), ignore_errors=True)
                for target in self._targets:
                    delete(target.files, import_id)

    def _clear(self) -> None:
        # Without the note nothing counts as staged.
        self._note.clear()
        shutil.rmtree(self._work, ignore_errors=True)
        for target in self._targets:
            delete(target.files, self._load.id)

    def _staged(
        self, note: LoadNote | None, known: Mapping[_Target, Adopted]
    ) -> dict[_Target, Parts]:
        """The targets for which something is staged as a whole, and the parts; none, if nothing is.
        If a load's note is gone, the parts of its adopted rows are not known."""
        if note is None:
            return dict.fromkeys(known, ())
        staged = {self._targets[number]: parts for number, parts in note.parts.items()}
        # A crash may have come between the note and a manifest.
        is_whole = known or all(target.has_manifest for target in staged)
        return staged if is_whole else {}

    def _difference(self, note: LoadNote) -> str | None:
        """How the table differs from the one that was staged; None: not at all. It is judged as of
        then, and nothing is written."""
        with self._job.step("comparing the table"):
            chosen, plan = self._plan((note.now_ms, note.delay_max_ms, note.body_max_bytes))
            kinds = (staging.REJECT, staging.STAGED, staging.MARK)
            outcome = chosen.mapInArrow(_stager(plan), self._schema())
            rows = outcome.where(F.col("kind").isin(*kinds)).select("kind", "row").toArrow()
        numbers = _Numbers.of(rows)
        staged, mark = numbers.staged, numbers.mark
        read = staged + rows.filter(pc.field("kind") == staging.REJECT).num_rows
        if (read, staged, mark) == (note.read, note.staged, note.mark):
            return None
        differences = [
            f"{name.replace('_', ' ')} was {was}, and is {now}"
            for name, now in _columns(self._load).items()
            if (was := note.columns.get(name)) != now
        ]
        if read != note.read:
            differences.append(f"it had {note.read} rows, and has {read}")
        elif staged != note.staged:
            differences.append(f"{note.staged} of its rows were messages, and {staged} are")
        return "; ".join(differences) or f"its {read} rows have other content"

    # ── staging ────────────────────────────────────────────────────────────────────────────────

    def _stage_or_clear(self) -> None:
        for target in self._targets:
            target.files.make_directory(DIRECTORY)
        self._clear()  # An earlier run under this name may have left files.
        try:
            self._stage()
        except BaseException:
            self._clear()
            raise

    def _stage(self) -> None:
        load, loaded = self._load, self._loaded
        with self._job.step("looking at the table"):
            chosen, plan = self._plan(None)
        partitioned = self._partitioned(chosen)
        with self._job.step("staging"):
            results = self._written(partitioned, plan)
        numbers = _Numbers.of(results.to_table(columns=["kind", "row"]))
        loaded.staged, loaded.past = numbers.staged, numbers.past
        if self._table.has_numbers(load.columns):
            self._doubt_unit(results, numbers.ancient)
        self._write_rejects(results)
        loaded.read = loaded.staged + loaded.rejected_total
        if load.dry_run or (load.strict and loaded.rejected):
            return
        manifests = self._manifests(results, plan)
        if manifests:
            self._note.write(
                LoadNote(
                    columns=_columns(load),
                    now_ms=plan.now_ms,
                    delay_max_ms=plan.delay_max_ms,
                    body_max_bytes=plan.body_max_bytes,
                    read=loaded.read,
                    staged=loaded.staged,
                    past=loaded.past,
                    rejected=loaded.rejected,
                    mark=numbers.mark,
                    has_ids=plan.with_rows,
                    parts={number: _parts(one) for number, one in manifests.items()},
                )
            )
        for number, manifest in manifests.items():
            write_manifest(self._targets[number].files, manifest)

    def _manifests(self, results: ds.Dataset, plan: StagingPlan) -> dict[int, Manifest]:
        """The manifest of the staged rows, by target."""
        parts = results.to_table(filter=pc.field("kind") == staging.PART).to_pylist()
        parts.sort(key=lambda part: part["part"])
        manifests: dict[int, Manifest] = {}
        for number, target in enumerate(self._targets):
            own = [part for part in parts if part["shard"] == number]
            if own:
                manifests[number] = Manifest(
                    self._load.id,
                    target.identity.stamp,
                    plan.now_ms,
                    tuple(Part(p["part"], p["bytes"], p["row"], p["checksum"]) for p in own),
                    self._load.on_conflict,
                )
        return manifests

    def _doubt_unit(self, results: ds.Dataset, ancient: int) -> None:
        """A whole column of seconds is refused as a whole, instead of row by row."""
        if self._load.columns.due_unit is not None:
            return
        is_seconds = (pc.field("kind") == staging.REJECT) & (pc.field("reason") == SECONDS)
        seconds = results.count_rows(filter=is_seconds)
        if (ancient + seconds) * 2 > self._loaded.staged + seconds:
            raise PipelineError(
                f"{ancient + seconds} of {self._loaded.staged + seconds} rows would have been due "
                f"before 1973, as if column {self._load.columns.due} were in seconds; due "
                "times are milliseconds, not seconds, and nothing was loaded. Say --due-unit s if "
                "they are seconds, or --due-unit ms to load the other rows"
            )

    def _partitioned(self, chosen: DataFrame) -> DataFrame:
        """The rows in as many partitions as there is work for.

        A part may hold rows of any hours: each hour gets a frame from each chunk that a task
        stages. A table in a few pieces has few chunks, and is taken as it is. A larger one is
        sorted, and if it has many pieces, or just one, ranges of due times are made."""
        count = self._job.cores
        if not self._job.is_connect:
            pieces = chosen.rdd.getNumPartitions()
            if count <= pieces <= count * PARTITIONS_PER_CORE:
                return chosen
            if count <= pieces <= PIECES_MAX:
                return chosen.sortWithinPartitions(DUE)
        ranges = chosen.repartitionByRange(count * PARTITIONS_PER_CORE, DUE)
        return ranges.sortWithinPartitions(DUE)

    def _written(self, rows: DataFrame, plan: StagingPlan) -> ds.Dataset:
        """Stage the rows; returns the executors' reports. They write them by themselves: a path
        with blanks, percent signs or letters beyond ASCII is another one to a JVM."""
        shutil.rmtree(self._work, ignore_errors=True)
        self._work.mkdir()
        directories = {str(one.data_dir): one.identity.stamp for one in self._targets}
        write = _writer(plan, str(self._work), directories)
        told = rows.mapInArrow(write, "file string").collect()
        names = {row["file"] for row in told}
        for path in self._work.iterdir():
            if path.name not in names:
                path.unlink()  # It comes from a task that failed, and was done again.
        return ds.dataset(self._work, format="parquet")

    def _schema(self) -> T.StructType:
        return T.StructType([*_OUTCOME.fields, *self._table.passed(self._load.ids_columns)])

    def _plan(self, limits: tuple[int, int, int] | None) -> tuple[DataFrame, StagingPlan]:
        """The table in the form that executors want, and the facts that they need. `limits`: of an
        earlier run (its time, how far away a message may be due, and how long a body may be): the
        rows are judged by these, and nothing is written."""
        load, columns, table = self._load, self._load.columns, self._table
        table.check(columns, load.ids_columns)
        subjects = self._subjects()
        writes = limits is None and not load.dry_run
        if writes:
            begun = [target.adoption.begin(subjects) for target in self._targets]
            numbers = [one.subjects for one in begun]
        else:
            # A dry run is judged by the limits of the server, too.
            begun = [target.begun for target in self._targets]
            numbers = [{name: number for number, name in enumerate(subjects, 1)}] * len(begun)
        if limits is None:
            limits = (begun[-1].now_ms, begun[-1].delay_max_ms, begun[-1].body_max_bytes)
        plan = StagingPlan(
            load.id,
            tuple(
                StagingTarget(
                    str(target.data_dir) if writes else "",
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
            content=table.content(columns),
            due_unit=table.due_unit(columns),
            is_past_refused=load.past == "reject",
            with_rows=load.ids is not None and writes,
            passed_on=tuple(one.name for one in table.passed(load.ids_columns)),
            schema=to_arrow_schema(self._schema()).serialize().to_pybytes(),
        )
        return table.rows(self._job, columns, load.ids_columns), plan

    def _subjects(self) -> list[str]:
        columns = self._load.columns
        if columns.subject is not None:
            return [columns.subject]
        found = self._table.subjects(self._job, columns, SUBJECTS_MAX + 1)
        if len(found) > SUBJECTS_MAX:
            raise PipelineError(
                f"column {columns.subject_column} has more than {SUBJECTS_MAX} subjects; "
                "put what varies into the key or the body, not into the subject"
            )
        names = sorted(name for name in found if name is not None and is_subject(name))
        if not names:
            raise PipelineError(f"column {columns.subject_column} has no valid subject")
        return names

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
        self._tell(adopted.values())
        began = time.monotonic()
        for target in adopted:
            adopted[target] = target.adoption.follow(
                lambda done, total: self._job.progress("filing", done, total)
            )
        self._tell(adopted.values())
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
        self._finish(staged, adopted)

    def _finish(self, staged: Mapping[_Target, Parts], adopted: Mapping[_Target, Adopted]) -> None:
        """Everything is adopted: tell the ids, and clean up."""
        load = self._load
        if load.ids is not None:
            self._job.progress("writing the ids", 0, 0)
            self._write_ids(load.ids, staged, adopted)
        shutil.rmtree(self._work, ignore_errors=True)

    def _adopt_each(
        self, staged: Mapping[_Target, Parts], known: Mapping[_Target, Adopted]
    ) -> tuple[dict[_Target, Adopted], dict[_Target, CallRefusedError]]:
        """The adopted rows, and the refusals. If no target has adopted anything, the staged files
        are thrown away and the refusal is raised."""
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
        """The staged rows of an earlier run are adopted with this run's choice on conflicts."""
        if target.has_manifest:
            manifest = read_manifest(target.files, self._load.id)
            if manifest.on_conflict != self._load.on_conflict:
                write_manifest(target.files, replace(manifest, on_conflict=self._load.on_conflict))

    def _tell(self, adopted: Iterable[Adopted]) -> None:
        loaded, found = self._loaded, list(adopted)
        unfinished = (one.state for one in found if one.state != "adopted")
        loaded.state = next(unfinished, "adopted")
        loaded.accepted = sum(one.accepted for one in found)
        loaded.duplicates = sum(one.duplicates for one in found)
        loaded.conflicts = sum(one.conflicts for one in found)

    def _write_ids(
        self, path: Path, staged: Mapping[_Target, Parts], adopted: Mapping[_Target, Adopted]
    ) -> None:
        note = self._note.read()
        if note is None or not note.has_ids or not self._work.is_dir():
            raise PipelineError(
                "the messages are loaded, but their ids were not asked for then (--ids), or thrown "
                "away since: GET /v1/subjects/SUBJECT/keys/KEY tells that of each"
            )
        places = [
            ImportedParts(
                IdCodec(target.identity.shard, target.identity.id_secret),
                adopted[target].first_seq,
                parts,
                dict(target.adoption.duplicates()) if adopted[target].duplicates else {},
            )
            for target, parts in staged.items()
        ]
        fields = to_arrow_schema(T.StructType(self._table.passed(self._load.ids_columns)))
        passed = {
            field.name: field.with_name(name)
            for name, field in zip(self._load.ids_columns, fields, strict=True)
        }
        write_ids(path, ds.dataset(self._work, format="parquet"), places, passed)
        self._loaded.ids_file = str(path)


def _parts(manifest: Manifest) -> Parts:
    return tuple((part.file, part.count) for part in manifest.parts)


_Stage = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
"""In a worker. Executors get functions by value: no method of an object that holds the session."""


def _stager(plan: StagingPlan) -> _Stage:
    return lambda batches: Stager(plan).stage(batches)


def _writer(plan: StagingPlan, work: str, directories: Mapping[str, int]) -> _Stage:
    """`directories`: all of the load, `work` among them or in them, with their stamps."""

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        # Before anything is written, and though a dry run writes to `work` alone: elsewhere the
        # driver would not find it.
        for data_dir, stamp in directories.items():
            check_here(OsFiles(data_dir, readonly=True), data_dir, stamp)
        # A task that is tried again, or twice at once, writes a file of its own.
        path = Path(work, f"{uuid.uuid4().hex}.parquet")
        schema = pa.ipc.read_schema(pa.py_buffer(plan.schema))
        with pq.ParquetWriter(path, schema) as writer:
            for outcome in Stager(plan).stage(batches):
                writer.write_batch(outcome)
        yield pa.RecordBatch.from_arrays([texts([path.name])], ["file"])

    return write


def _work_of(data_dir: Path, import_id: str) -> Path:
    return data_dir / DIRECTORY / f"{import_id}{WORK_SUFFIX}"


def _columns(load: LoadJob) -> dict[str, str | None]:
    """The options of a load that, besides its table, decide the messages that it makes."""
    return {**asdict(load.columns), "past": load.past}


@dataclass(frozen=True, slots=True)
class _Numbers:
    """The sums over the partitions' counts."""

    staged: int
    past: int
    ancient: int
    mark: int
    """64 bits, that go around."""

    @classmethod
    def of(cls, outcome: pa.Table) -> Self:
        """From columns `kind` and `row`."""
        staged, past, ancient, mark = (
            outcome.filter(pc.field("kind") == kind)["row"].to_pylist()
            for kind in (staging.STAGED, staging.PAST, staging.ANCIENT, staging.MARK)
        )
        return cls(sum(staged), sum(past), sum(ancient), sum(mark) % (1 << 64))
