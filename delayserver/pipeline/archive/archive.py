"""Archive: settled hours become Parquet, and the server is told so once that has been verified.

    GET /v1/archives   the hours that wait
      ─▶ survey        count and checksum of the rows in the server's files
      ─▶ write         rows that the archive does not have, as files that no table names yet
      ─▶ read back     the same count, the same checksum?
      ─▶ add           all of a step's files at once: from now on they count
      ─▶ PUT           the server may delete the hour

Rows are those of `delayhistory`, one per entry. The archive of an hour consists of the rows that
are in it: an hour that comes back after it was archived has rows that the archive does not have,
and only these are added, since the results of the others are settled. The job may be killed at any
point, and run again; at most one runs on a place at a time.

An hour that is archived anew (`--again`) is written and read back beside the archived rows of
it, and one snapshot puts the one in the place of the other. So a kill leaves the hour as it was or
as it is to be, and never out of the table, where the server counts it as archived and deletes it.

An hour that one message keeps open is not told of. With `without_unsettled` its settled rows
are archived, and the rest when the hour is.

An archive is a table of Iceberg (`table`), or plain Parquet (`plain`): an `ArchiveTarget`.

Cost: the files of the server are read twice, those of the archive written and read once. Threads:
the caller's.
"""

import json
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Protocol

import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from delayserver.errors import InputError, PipelineError
from delayserver.pipeline.archive.compaction import MANY, compact, rewritten
from delayserver.pipeline.archive.job import (
    Archive,
    ArchiveCalls,
    ArchiveFormat,
    ArchiveRun,
    HourFate,
    HourReport,
)
from delayserver.pipeline.archive.place import ArchivePlace
from delayserver.pipeline.archive.plain import PlainFiles
from delayserver.pipeline.archive.rows import ROW_TYPES, Sum, sum_columns, sum_of
from delayserver.pipeline.archive.source import said_of
from delayserver.pipeline.archive.table import ArchiveTable
from delayserver.pipeline.archive.writing import Layout, WrittenFile, write_rows
from delayserver.pipeline.calls import CallRefusedError
from delayserver.pipeline.exports.place import absolute_root
from delayserver.pipeline.logs.columns import CORRUPT
from delayserver.pipeline.logs.logs import LogPiece, whole_end
from delayserver.pipeline.progress import Job
from delayserver.pipeline.states.history import WantedHour, wanted_hours
from delayserver.pipeline.states.snapshot import Directory, open_directories
from delayserver.records.tables import read_hours
from delayserver.schedule.retired import retired_hours
from storage.buckets import bucket_path, end_ms, hour_name, is_day
from storage.files import size_of
from storage.rows import HOUR_MS, LogKind
from storage.shards import find_directory_above

STEP_HOURS = 48
STEP_BYTES = 1024 * 1024 * 1024
"""So much of the server's files is archived at a time: a finished step stays finished."""
OPEN_MS = HOUR_MS
"""So long after its end an hour counts as one that something keeps open."""
FORMER_OWNER = "_archive.json"
"""A file of an archive as it was before it was a table."""


@dataclass(frozen=True, slots=True)
class _Survey:
    """The rows of an hour in the server's files, counted."""

    sum: Sum = field(default_factory=Sum)
    first_seq: int = 0
    last_seq: int = 0
    damage: str | None = None


@dataclass(frozen=True, slots=True)
class _ReadBack:
    """The rows of an hour in the archive, counted."""

    sum: Sum = field(default_factory=Sum)
    added: int = 0
    """Rows that this step has written."""
    reason: str = ""
    """Why it cannot be read."""


@dataclass(slots=True)
class _Hour:
    """An hour on its way."""

    wanted: WantedHour
    survey: _Survey = field(default_factory=_Survey)

    @property
    def number(self) -> int:
        return self.wanted.hour

    @property
    def name(self) -> str:
        return hour_name(self.number)


class ArchiveTarget(Protocol):
    """Where rows go to."""

    place: ArchivePlace

    @property
    def file_schema(self) -> pa.Schema:
        """The schema of the files that it takes."""

    def running(self, run: str) -> AbstractContextManager[None]:
        """For a run that writes: files that other runs have left are deleted first."""

    def layout(self, store: str, shard: int, first_seqs: Mapping[int, int]) -> Layout:
        """How to write hours of a shard, of which these are the first rows."""

    def files_of(self, store: str, shard: int, hours: Collection[int]) -> list[str]:
        """The files whose rows of these hours count, and stay."""

    def add(self, files: Sequence[WrittenFile], hours: Iterable[Mapping[str, object]]) -> None:
        """From now on files count, that hold rows of these hours."""


def run(job: Job, wanted: Archive) -> ArchiveRun:
    """Archive all hours that wait for it, and compact tables of many small files.

    Raises PipelineError, InputError, CallRefusedError, StorageError."""
    began = time.monotonic()
    if wanted.format is not ArchiveFormat.ICEBERG:
        if wanted.compact:
            raise InputError("only a table is compacted; plain Parquet has one file for each hour")
        if wanted.without_unsettled:
            raise InputError("what is not settled is left out of a table alone: rows come later")
    for root in wanted.data_dirs:
        if (above := find_directory_above(root)) is not None:
            raise PipelineError(
                f"{root} is one shard of several, which are archived together: give {above}"
            )
    directories = open_directories(*map(absolute_root, wanted.data_dirs))
    place = ArchivePlace(wanted.to)
    if place.exists(FORMER_OWNER):
        raise PipelineError(
            f"{place.url} holds an archive of the format before this one, which stays readable as "
            "plain Parquet; give another --to for what comes now"
        )
    archived = ArchiveRun(place.url, is_kept=True)
    if wanted.dry_run:
        _archive(job, wanted, directories, _target(wanted, place), "", archived)
    else:
        with place.locked():
            target, name = _target(wanted, place), uuid.uuid4().hex
            with target.running(name):
                _archive(job, wanted, directories, target, name, archived)
                if isinstance(target, ArchiveTable):
                    files_min = 2 if wanted.compact else MANY
                    archived.compacted = compact(job, target, name, files_min)
                    if wanted.compact or archived.compacted.files_before:
                        target.expire()
    archived.took_s = time.monotonic() - began
    return archived


def _target(wanted: Archive, place: ArchivePlace) -> ArchiveTarget:
    match wanted.format:
        case ArchiveFormat.ICEBERG:
            return ArchiveTable(place, wanted.buckets)
        case ArchiveFormat.PARQUET:
            return PlainFiles(place)


def _archive(
    job: Job,
    wanted: Archive,
    directories: Sequence[Directory],
    target: ArchiveTarget,
    run_name: str,
    archived: ArchiveRun,
) -> None:
    """Archive the hours that wait in each directory."""
    again = _to_archive_again(wanted, directories)
    for directory, anew in zip(directories, again, strict=True):
        shard = directory.shard if len(directories) > 1 else None
        rest: dict[str, Any] = {"token": wanted.token, "wait_s": wanted.wait_s}
        with ArchiveCalls(wanted.server, shard=shard, **rest) as server:
            is_kept, hours = server.waiting()
            waiting = {one.hour for one in hours}
            hours += (one for one in anew if one.hour not in waiting)
            if wanted.without_unsettled:
                hours += open_hours(directory, time.time_ns() // 1_000_000 - OPEN_MS)
            if wanted.until_ms is not None:
                hours = [one for one in hours if (one.hour + 1) * HOUR_MS <= wanted.until_ms]
            archived.is_kept &= is_kept
            for number, some in enumerate(_steps(hours)):
                name = f"{run_name}-{directory.shard}-{number}"
                step = _Step(job, wanted, directory, target, server, some, name)
                for report in step.run():
                    report.shard = shard
                    archived.hours.append(report)


def _to_archive_again(wanted: Archive, directories: Sequence[Directory]) -> list[list[WantedHour]]:
    """For each directory the settled hours that are archived anew, whether they wait for it or are
    archived already. Raises InputError for an hour that no directory has."""
    found: list[list[WantedHour]] = []
    for directory in directories if wanted.again else ():
        with directory.catalog() as catalog:
            hours = list(retired_hours(catalog, directory.files))
        settled = (WantedHour(one.hour, *one.extent, one.count) for one in hours)
        found.append([one for one in settled if one.hour in wanted.again])
    missing = wanted.again - {one.hour for some in found for one in some}
    if wanted.without_unsettled:
        ended_by_ms = time.time_ns() // 1_000_000 - OPEN_MS
        for directory in directories:
            missing -= {one.hour for one in open_hours(directory, ended_by_ms)}
    if missing:
        raise InputError(
            f"--again {hour_name(min(missing))}: there is no such settled hour; nothing was due in "
            "it, it was deleted, or something of it is not settled"
        )
    return found or [[] for _ in directories]


def open_hours(directory: Directory, ended_by_ms: int) -> list[WantedHour]:
    """The hours that were over by then, and of which something is not settled."""
    with directory.catalog() as catalog:
        states = read_hours(catalog)
    files, found = directory.files, []
    for hour, state in sorted(states.items()):
        if is_day(hour) or state.retired_ms or not state.length or end_ms(hour) > ended_by_ms:
            continue
        path = bucket_path(LogKind.DISPATCH, hour)
        piece = LogPiece(LogKind.DISPATCH, path, 0, size_of(files, path))
        end = whole_end(files, piece, stamp=directory.stamp)
        extent = (state.length, end, state.last_entry_seq)
        found.append(WantedHour(hour, *extent, state.entries, is_open=True))
    return found


def _steps(hours: Sequence[WantedHour]) -> Iterator[list[WantedHour]]:
    some: list[WantedHour] = []
    for one in hours:
        total = sum(other.schedule_bytes for other in some) + one.schedule_bytes
        if some and (len(some) == STEP_HOURS or total > STEP_BYTES):
            yield some
            some = []
        some.append(one)
    if some:
        yield some


class _Step:
    """Some hours, from the server's files to the message that they are archived."""

    def __init__(
        self,
        job: Job,
        wanted: Archive,
        directory: Directory,
        target: ArchiveTarget,
        server: ArchiveCalls,
        hours: Iterable[WantedHour],
        name: str,
    ) -> None:
        self._job = job
        self._dry_run = wanted.dry_run
        self._again = wanted.again
        self._directory = directory
        self._store = f"{directory.stamp:08x}"
        self._target = target
        self._server = server
        self._name = name
        self._hours = [_Hour(hour) for hour in hours]
        self._source = self._rows()
        self._reports: dict[int, HourReport] = {}

    def run(self) -> list[HourReport]:
        """The result for each hour."""
        hours = self._surveyed()
        if self._dry_run:
            for hour in hours:
                self._report(hour, HourFate.SOUND)
        elif hours:
            # (Plain files are written as a whole anyway.)
            target = self._target
            table = target if isinstance(target, ArchiveTable) else None
            again: frozenset[int] = frozenset() if table is None else self._again
            if others := [hour for hour in hours if hour.number not in again]:
                self._archive(others)
            anew = [hour for hour in hours if hour.number in again]
            if anew and table is not None:
                self._archive_anew(anew, table)
        return [self._reports[hour.number] for hour in self._hours]

    def _report(
        self, hour: _Hour, fate: HourFate, *, added: int = 0, checksum: str = "", reason: str = ""
    ) -> None:
        wanted = hour.wanted
        total_bytes = wanted.schedule_bytes + wanted.dispatch_bytes
        left_out = wanted.count - hour.survey.sum.count if wanted.is_open else 0
        self._reports[hour.number] = HourReport(
            hour.name, fate, wanted.count, added, total_bytes, checksum, reason, left_out
        )

    # ── the server's rows ──────────────────────────────────────────────────────────────────────

    def _rows(self) -> DataFrame:
        """All that the hours hold, read anew each time that it is looked at."""
        reader = self._job.spark.read.format("delayhistory").option("damage", "rows")
        option = wanted_hours(hour.wanted for hour in self._hours)
        rows = reader.option("hours", option).load(self._directory.root)
        return rows.withColumn("store", F.lit(self._store))

    def _surveyed(self) -> list[_Hour]:
        """The hours whose files are sound, with the counts of their rows."""
        with self._job.step("reading the server's files"):
            rows = (
                self._source.groupBy("hour")
                .agg(
                    *sum_columns(),
                    F.min("seq").alias("first_seq"),
                    F.max("seq").alias("last_seq"),
                    F.max(F.concat_ws(": ", f"{CORRUPT}.file", f"{CORRUPT}.reason")).alias(
                        "damage"
                    ),
                    F.count(CORRUPT).alias("damages"),
                )
                .collect()
            )
        found = {
            row["hour"]: _Survey(
                sum_of(row),
                row["first_seq"] or 0,
                row["last_seq"] or 0,
                row["damage"] if row["damages"] else None,
            )
            for row in rows
        }
        sound = []
        for hour in self._hours:
            hour.survey = found.get(hour.number, _Survey())
            if hour.survey.damage is None:
                sound.append(hour)
        if len(sound) < len(self._hours):
            self._explain([hour for hour in self._hours if hour not in sound])
        return sound

    def _explain(self, hours: Iterable[_Hour]) -> None:
        """Hours that cannot be read: they may have changed, or have been deleted, meanwhile."""
        _, waiting = self._server.waiting()
        now = {one.hour: one for one in waiting}
        if any(hour.wanted.is_open for hour in hours):
            now |= {one.hour: one for one in open_hours(self._directory, _EVER_MS)}
        for hour in hours:
            known = now.get(hour.number)
            if known is None:
                self._report(hour, HourFate.GONE)
            elif known != hour.wanted:
                self._report(hour, HourFate.CHANGED)
            else:
                reason = f"{hour.survey.damage}; see `delayserver check`, and `delayserver repair`"
                self._report(hour, HourFate.DAMAGED, reason=reason)

    # ── from the one to the other ──────────────────────────────────────────────────────────────

    def _archive(self, hours: Sequence[_Hour]) -> None:
        """Write, compare, and tell; all of it again without an hour whose rows differed, since
        files hold rows of several hours."""
        has = self._has(hours)
        hours = [hour for hour in hours if hour.number in has]
        lacking = [hour for hour in hours if has[hour.number] < hour.survey.sum.count]
        files = self._write(lacking, has) if lacking else []
        added = self._verified(hours, [file.name for file in files])
        good = [hour for hour in hours if hour.number in added]
        if len(good) < len(hours) and files:
            for file in files:
                self._target.place.delete(file.name)
            if good:
                self._archive(good)
            return
        if files:
            self._job.progress("adding files to the archive", 0, 0)
            self._target.add(files, [self._summary(hour) for hour in lacking])
        for hour in good:
            self._confirm(hour, added[hour.number])

    def _archive_anew(self, hours: Sequence[_Hour], table: ArchiveTable) -> None:
        """Write these hours although the archive has rows of them, and put the new rows in the
        place of the old; without an hour whose rows differed, as `_archive`."""
        files = self._write(hours, dict.fromkeys((hour.number for hour in hours), 0))
        added = self._verified(hours, [file.name for file in files], is_anew=True)
        good = [hour for hour in hours if hour.number in added]
        if len(good) < len(hours):
            for file in files:
                table.place.delete(file.name)
            if good:
                self._archive_anew(good, table)
            return
        told = [self._summary(hour) for hour in hours]
        outdated = self._files_of(hours)
        if outdated:
            run, kept = f"{self._name}-kept", ~self._is_of(hours)
            files += rewritten(self._job, table, outdated, run, kept)
            self._job.progress("replacing files of the archive", 0, 0)
            table.replace(outdated, files, told)
        else:
            table.add(files, told)
        for hour in hours:
            self._confirm(hour, added[hour.number])

    def _has(self, hours: Sequence[_Hour]) -> dict[int, int]:
        """How many rows the archive has of each hour; hours that cannot be read are left out."""
        files = self._files_of(hours)
        none = {hour.number: 0 for hour in hours}
        if not files:
            return none
        try:
            with self._job.step("looking for what is archived"):
                return none | {
                    row["hour"]: row["count"]
                    for row in self._rows_in(files, _KEYS, hours).groupBy("hour").count().collect()
                }
        except (PySparkException, Py4JJavaError) as error:
            if len(hours) > 1:
                # Which of them is it?
                return {key: count for hour in hours for key, count in self._has([hour]).items()}
            reason = f"{said_of(error)}; {_RESTORE}"
            self._report(hours[0], HourFate.DIFFERENT, reason=reason)
            return {}

    def _files_of(self, hours: Iterable[_Hour]) -> list[str]:
        numbers = [hour.number for hour in hours]
        return self._target.files_of(self._store, self._directory.shard, numbers)

    def _rows_in(
        self, files: Sequence[str], columns: Iterable[str], hours: Iterable[_Hour]
    ) -> DataFrame:
        """The rows of these hours in files."""
        types = [(name, ROW_TYPES[name]) for name in columns]
        reader = self._job.spark.read.format("delayarchive").schema(
            from_arrow_schema(pa.schema(types))
        )
        rows = reader.option("files", json.dumps(files)).load(self._target.place.given)
        return rows.where(self._is_of(hours))

    def _is_of(self, hours: Iterable[_Hour]) -> Column:
        """Which rows are of these hours, as the server still has them: an hour that was deleted and
        came back began with another seq."""
        is_of = (
            (F.col("hour") == hour.number) & (F.col("seq") >= hour.survey.first_seq)
            for hour in hours
        )
        of_shard = (F.col("store") == self._store) & (F.col("shard") == self._directory.shard)
        return of_shard & reduce(Column.__or__, is_of)

    def _write(self, hours: Sequence[_Hour], has: Mapping[int, int]) -> list[WrittenFile]:
        """Write the rows of these hours that the archive does not have."""
        fresh = self._source.where(F.col("hour").isin([hour.number for hour in hours]))
        older = [hour for hour in hours if has[hour.number]]
        if older:
            known = self._rows_in(self._files_of(older), _KEYS, older)
            fresh = fresh.join(known.select("hour", "seq"), ["hour", "seq"], "left_anti")
        first_seqs = {hour.number: hour.survey.first_seq for hour in hours}
        target = self._target
        layout = target.layout(self._store, self._directory.shard, first_seqs)
        with self._job.step("writing Parquet"):
            return write_rows(fresh, target.place, layout, target.file_schema, self._name)

    # ── whether they are the same ──────────────────────────────────────────────────────────────

    def _verified(
        self, hours: Sequence[_Hour], files: Sequence[str], *, is_anew: bool = False
    ) -> dict[int, int]:
        """The hours for which the archive, with these files, has the server's rows; and how many
        rows of each are in these files. `is_anew`: these files alone."""
        with self._job.step("reading the archive back"):
            found = self._read_back(hours, files, is_anew=is_anew)
        added = {}
        for hour in hours:
            there, wanted = found.get(hour.number, _ReadBack()), hour.survey.sum
            if there.reason:
                advice = _RESTORE if self._files_of([hour]) else "run it again"
                self._report(hour, HourFate.DIFFERENT, reason=f"{there.reason}; {advice}")
            elif there.sum == wanted:
                added[hour.number] = there.added
            else:
                reason = (
                    f"the archive has {there.sum.count} rows with checksum {there.sum.checksum}, "
                    f"the server {wanted.count} with {wanted.checksum}"
                )
                if there.sum.count > there.added:
                    reason += f"; if the server is right, archive it with --again {hour.name}"
                else:
                    reason += "; run it again"
                self._report(hour, HourFate.DIFFERENT, reason=reason)
        return added

    def _read_back(
        self, hours: Sequence[_Hour], files: Sequence[str], *, is_anew: bool
    ) -> dict[int, _ReadBack]:
        """The counts of each hour in the archive, with these files."""
        older = [] if is_anew else self._files_of(hours)
        if not older and not files:
            return {}
        parts = [
            self._rows_in(some, ROW_TYPES, hours).withColumn(_IS_NEW, F.lit(is_new))
            for is_new, some in ((False, older), (True, files))
            if some
        ]
        try:
            rows = reduce(DataFrame.unionAll, parts).groupBy("hour", _IS_NEW).agg(*sum_columns())
            found: dict[int, _ReadBack] = {}
            for row in rows.collect():
                before, here = found.get(row["hour"], _ReadBack()), sum_of(row)
                added = before.added + (here.count if row[_IS_NEW] else 0)
                found[row["hour"]] = _ReadBack(before.sum + here, added)
            return found
        except (PySparkException, Py4JJavaError) as error:
            if len(hours) == 1:
                return {hours[0].number: _ReadBack(reason=said_of(error))}
            # Which of them is it?
            apart: dict[int, _ReadBack] = {}
            for hour in hours:
                apart |= self._read_back([hour], files, is_anew=is_anew)
            return apart

    # ── telling ────────────────────────────────────────────────────────────────────────────────

    def _summary(self, hour: _Hour) -> dict[str, object]:
        """The properties of a snapshot about an hour, for people."""
        survey = hour.survey
        return {
            "store": self._store,
            "shard": self._directory.shard,
            "hour": hour.name,
            "last_seq": survey.last_seq,
            "count": survey.sum.count,
            "checksum": survey.sum.checksum,
        }

    def _confirm(self, hour: _Hour, added: int) -> None:
        if hour.wanted.is_open:
            self._report(hour, HourFate.PARTLY, added=added)
            return
        self._job.progress(f"telling the server of {hour.name}", 0, 0)
        checksum = hour.survey.sum.checksum
        try:
            self._server.confirm(hour.wanted, checksum, self._target.place.url)
        except CallRefusedError as error:
            match error.status:
                case 404:
                    self._report(hour, HourFate.GONE, added=added)
                case 409:
                    self._report(hour, HourFate.CHANGED, added=added)
                case _:
                    raise
        else:
            self._report(hour, HourFate.ARCHIVED, added=added, checksum=checksum)


_KEYS = ("store", "shard", "hour", "seq")
_IS_NEW = "__new"
_EVER_MS = 1 << 62
_RESTORE = "restore that file from where you have a copy, then run it again"
