"""Archive: retired hours become Parquet, and the server is told so once that has been verified.

    GET /v1/archives   what waits
      ─▶ survey        count and checksum of what the server's files hold
      ─▶ write         staged by Spark, moved to PATH/date=…/subject=…/hour.seq.n.parquet;
                       of several shards each has its own PATH/shard=…, and hours of its own
      ─▶ read back     the same count, the same checksum?
      ─▶ manifest      from now on it counts
      ─▶ PUT           the server may delete the hour

Rows are those of `delayhistory`, one per entry. An hour that comes back after it was archived is an
hour with rows behind those that the archive has: only these are added, in an edition of their own,
since what became of the others is settled. So nothing in the archive is ever written again. An
edition counts once its manifest is there; files of the hour that stand in no manifest were left by
a run that did not come to its end, and are deleted before the hour is archived again. The job may
be killed at any point, and run again; at most one runs on a place at a time.

The checksum is the sum over all rows of a hash of all columns: it does not depend on their order,
and sums of editions add up.

Cost: the files of the server are read twice, those of the archive written and read once. Threads:
the caller's.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import reduce
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from delayserver.errors import PipelineError
from delayserver.pipeline.archive.place import Place
from delayserver.pipeline.calls import CallRefusedError, ServerCalls
from delayserver.pipeline.logs.columns import CORRUPT
from delayserver.pipeline.progress import Job
from delayserver.pipeline.states.history import TYPES, WantedHour, wanted_hours
from delayserver.pipeline.states.snapshot import Directory, open_directories
from storage.buckets import hour_name, parse_hour
from storage.rows import HOUR_MS
from storage.shards import find_directory_above

STEP_HOURS = 48
STEP_BYTES = 1024 * 1024 * 1024
"""So much of the server's files is archived at a time: what is done is done."""
PAGE_HOURS = 1000
CONFIRM_TIMEOUT_S = 120.0
OWNER = "_archive.json"
MANIFESTS = "_manifests"
STAGING = "_staging"
"""Spark leaves out names that begin like this when it reads a directory."""
FORMAT = 1

_HOUR = "__hour"
_PARTITIONS = {"date": pa.date32(), "subject": pa.string()}
_COLUMNS = {name: kind for name, kind in TYPES.items() if name not in (CORRUPT, "subject", "shard")}
"""Those in the files; the others are in the names of their directories, and the shard in ids."""


class HourFate(StrEnum):
    """What became of an hour."""

    ARCHIVED = "archived"
    CHANGED = "changed"
    """It has come back since it was listed: the next run archives what is new."""
    GONE = "gone"
    """The server has deleted it meanwhile."""
    DAMAGED = "damaged"
    """The server's files cannot be read."""
    DIFFERENT = "different"
    """What was read back is not what the server has."""
    SOUND = "sound"
    """It would be archived (a dry run)."""


FAILURES = (HourFate.DAMAGED, HourFate.DIFFERENT)


@dataclass(frozen=True, slots=True)
class Archive:
    """What is to be archived, and where."""

    data_dir: Path
    to: str
    server: str
    token: str | None = None
    until_ms: int | None = None
    """Only hours that ended by then."""
    dry_run: bool = False
    wait_s: float = 60.0


@dataclass(slots=True)
class HourReport:
    """What became of one hour."""

    hour: str
    fate: HourFate
    count: int
    added: int = 0
    """Rows that this run has added to the archive."""
    total_bytes: int = 0
    """Of the server's files."""
    checksum: str = ""
    reason: str = ""
    shard: int | None = None
    """Which one it is of, where there are several."""


@dataclass(slots=True)
class ArchiveRun:
    """What a run of the archive command did."""

    to: str
    is_kept: bool
    """Whether the server keeps hours until they are archived."""
    hours: list[HourReport] = field(default_factory=list)
    took_s: float = 0.0

    @property
    def is_clean(self) -> bool:
        """Whether every hour that could be archived was."""
        return not any(hour.fate in FAILURES for hour in self.hours)

    def total(self, fate: HourFate) -> int:
        """How many hours had this fate."""
        return sum(hour.fate is fate for hour in self.hours)

    def document(self) -> dict[str, Any]:
        """What `--json` prints: the fields, as JSON values."""
        return asdict(self)


class Sum(msgspec.Struct, frozen=True):
    """Count and checksum of rows; sums of disjoint sets of rows can be added."""

    count: int = 0
    hashes: int = 0
    """Modulo 2^64."""

    def __add__(self, other: "Sum") -> "Sum":
        return Sum(self.count + other.count, (self.hashes + other.hashes) % 2**64)

    def __sub__(self, other: "Sum") -> "Sum":
        return Sum(self.count - other.count, (self.hashes - other.hashes) % 2**64)

    @property
    def checksum(self) -> str:
        """The hashes as 16 hexadecimal digits, the form that people compare."""
        return f"{self.hashes:016x}"


class EditionManifest(msgspec.Struct, frozen=True):
    """An edition: rows of an hour that were archived at a time. It counts since it has this."""

    format: int
    hour: str
    first_seq: int
    last_seq: int
    count: int
    checksum: str
    files: list[str]
    archived_ms: int

    @property
    def name(self) -> str:
        return f"{MANIFESTS}/{self.hour}.{self.last_seq}.json"

    @property
    def sum(self) -> Sum:
        return Sum(self.count, int(self.checksum, 16))


class Owner(msgspec.Struct, frozen=True, omit_defaults=True):
    """Whose archive it is."""

    format: int
    stamp: int
    """Of the data directory; of several shards, that of the first."""
    shards: int | None = None
    """How many there are below, where there are several."""


@dataclass(frozen=True, slots=True)
class _Survey:
    """What the server's files hold of an hour."""

    sum: Sum = field(default_factory=Sum)
    first_seq: int = 0
    last_seq: int = 0
    damage: str | None = None


@dataclass(slots=True)
class _Hour:
    """An hour on its way."""

    wanted: WantedHour
    survey: _Survey = field(default_factory=_Survey)
    editions: list[EditionManifest] = field(default_factory=list)
    """All that the archive has of it."""

    @property
    def number(self) -> int:
        return self.wanted.hour

    @property
    def name(self) -> str:
        return hour_name(self.number)

    @property
    def through_seq(self) -> int:
        """The archive has all rows up to this one."""
        return max((edition.last_seq for edition in self.editions), default=0)

    @property
    def current(self) -> list[EditionManifest]:
        """The editions of what the server still has; older ones are of an hour that was deleted and
        came back."""
        first_seq = self.survey.first_seq
        return [one for one in self.editions if first_seq and one.last_seq >= first_seq]

    @property
    def has_new(self) -> bool:
        return self.survey.last_seq > self.through_seq


class ArchiveCalls(ServerCalls):
    """The calls by which the server lists hours to archive, and learns which are archived."""

    def __init__(self, url: str, *, shard: int | None = None, **rest: Any) -> None:
        """`shard`: which one, where there are several. `rest` as ServerCalls has it."""
        super().__init__(url, **rest)
        self._shard = "" if shard is None else f"shard={shard}"

    def waiting(self) -> tuple[bool, list[WantedHour]]:
        """Whether hours are kept until they are archived, and those that wait for it."""
        hours: list[WantedHour] = []
        cursor: str | None = ""
        while cursor is not None:
            query = f"&cursor={cursor}" if cursor else ""
            query += f"&{self._shard}" if self._shard else ""
            page = self.call("GET", f"/v1/archives?limit={PAGE_HOURS}{query}")
            for one in page["hours"]:
                number = parse_hour(one["hour"])
                assert number is not None, one
                numbers = (one[name] for name in WantedHour.__struct_fields__[1:])
                hours.append(WantedHour(number, *numbers))
            cursor = page["cursor"]
        return page["archive"], hours

    def confirm(self, hour: WantedHour, checksum: str, location: str) -> None:
        """Tell the server that an hour was archived. Raises CallRefusedError."""
        document = {
            **hour.extent._asdict(),
            "count": hour.count,
            "checksum": checksum,
            "location": location,
        }
        query = f"?{self._shard}" if self._shard else ""
        path = f"/v1/archives/{hour_name(hour.hour)}{query}"
        self.call("PUT", path, document, CONFIRM_TIMEOUT_S)


def run(job: Job, wanted: Archive) -> ArchiveRun:
    """Archive all hours that wait for it. Raises PipelineError, CallRefusedError, StorageError."""
    began = time.monotonic()
    if (above := find_directory_above(str(wanted.data_dir))) is not None:
        raise PipelineError(
            f"{wanted.data_dir} is one shard of several, which are archived together: give {above}"
        )
    directories = open_directories(str(wanted.data_dir))
    place = Place(job, wanted.to)
    archived = ArchiveRun(place.root, is_kept=True)
    if len(directories) == 1:
        (directory,) = directories
        _archive(job, wanted, directory, None, place, archived)
    else:
        if not wanted.dry_run:
            _own(place, Owner(FORMAT, directories[0].stamp, len(directories)))
        for directory in directories:
            below = Place(job, place.url(f"shard={directory.shard}"))
            _archive(job, wanted, directory, directory.shard, below, archived)
    archived.took_s = time.monotonic() - began
    return archived


def _archive(
    job: Job,
    wanted: Archive,
    directory: Directory,
    shard: int | None,
    place: Place,
    archived: ArchiveRun,
) -> None:
    """Archive what waits in a directory at a place of its own."""
    rest: dict[str, Any] = {"token": wanted.token, "wait_s": wanted.wait_s}
    with ArchiveCalls(wanted.server, shard=shard, **rest) as server:
        is_kept, hours = server.waiting()
        if wanted.until_ms is not None:
            hours = [one for one in hours if (one.hour + 1) * HOUR_MS <= wanted.until_ms]
        archived.is_kept &= is_kept
        if not wanted.dry_run:
            _own(place, Owner(FORMAT, directory.stamp))
            place.delete(STAGING)
        root = str(Path(directory.root).resolve())
        for some in _steps(hours):
            reports = _Step(job, wanted.dry_run, root, place, server, some).run()
            for report in reports:
                report.shard = shard
            archived.hours += reports
        if not wanted.dry_run:
            place.delete(STAGING)


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


def _own(place: Place, owner: Owner) -> None:
    """Two servers have hours of the same names: each needs a place of its own."""
    if OWNER not in place.names(""):
        place.write(OWNER, msgspec.json.encode(owner).decode())
        return
    found = _decoded(place, OWNER, Owner)
    if (found.stamp, found.shards) != (owner.stamp, owner.shards):
        raise PipelineError(
            f"{place.root} holds the archive of another data directory; give each its own --to"
        )


def _decoded(place: Place, name: str, kind: type[Any]) -> Any:
    try:
        found = msgspec.json.decode(place.read(name), type=kind)
    except msgspec.DecodeError as error:
        raise PipelineError(
            f"{place.url(name)} cannot be read ({error}); restore it, or, if it is a manifest, "
            "delete it: the hour is archived anew as long as the server has it"
        ) from error
    if found.format != FORMAT:
        raise PipelineError(
            f"{place.url(name)} has format {found.format}, this version knows {FORMAT}: use a "
            "newer one"
        )
    return found


class _Step:
    """Some hours, from what the server has to what it is told."""

    def __init__(
        self,
        job: Job,
        dry_run: bool,
        root: str,
        place: Place,
        server: ArchiveCalls,
        hours: Iterable[WantedHour],
    ) -> None:
        self._job = job
        self._dry_run = dry_run
        self._root = root
        self._place = place
        self._server = server
        self._hours = [_Hour(hour) for hour in hours]
        self._source = self._rows()
        self._reports: dict[int, HourReport] = {}

    def run(self) -> list[HourReport]:
        """What became of each hour."""
        hours = self._surveyed()
        if self._dry_run:
            for hour in hours:
                self._report(hour, HourFate.SOUND)
        elif hours:
            self._find_editions(hours)
            self._delete_unfinished(hours)
            new = [hour for hour in hours if hour.has_new]
            files = self._write(new) if new else {}
            good = self._verified(hours, files)
            for hour in good:
                self._commit(hour, files.get(hour.number, []))
        return [self._reports[hour.number] for hour in self._hours]

    def _report(
        self, hour: _Hour, fate: HourFate, *, added: int = 0, checksum: str = "", reason: str = ""
    ) -> None:
        wanted = hour.wanted
        total_bytes = wanted.schedule_bytes + wanted.dispatch_bytes
        self._reports[hour.number] = HourReport(
            hour.name, fate, wanted.count, added, total_bytes, checksum, reason
        )

    # ── what the server has ────────────────────────────────────────────────────────────────────

    def _rows(self) -> DataFrame:
        """All that the hours hold, read anew each time that it is looked at."""
        reader = self._job.spark.read.format("delayhistory").option("damage", "rows")
        option = wanted_hours(hour.wanted for hour in self._hours)
        rows = reader.option("hours", option).load(self._root)
        return rows.withColumn("date", F.to_date("due"))

    def _surveyed(self) -> list[_Hour]:
        """The hours whose files are sound, with what they hold."""
        with self._job.step("reading the server's files"):
            rows = (
                self._source.groupBy("hour")
                .agg(
                    *_sums(),
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
                _sum(row),
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
        for hour in hours:
            known = now.get(hour.number)
            if known is None:
                self._report(hour, HourFate.GONE)
            elif known != hour.wanted:
                self._report(hour, HourFate.CHANGED)
            else:
                reason = f"{hour.survey.damage}; see `delayserver check`, and `delayserver repair`"
                self._report(hour, HourFate.DAMAGED, reason=reason)

    # ── what the archive has ───────────────────────────────────────────────────────────────────

    def _find_editions(self, hours: Iterable[_Hour]) -> None:
        by_name = {hour.name: hour for hour in hours}
        for name in self._place.names(MANIFESTS):
            hour = by_name.get(name.partition(".")[0])
            if hour is not None and name.endswith(".json"):
                hour.editions.append(_decoded(self._place, f"{MANIFESTS}/{name}", EditionManifest))

    def _delete_unfinished(self, hours: Iterable[_Hour]) -> None:
        """Files that stand in no manifest: whoever wrote them did not come to an end."""
        known = {file for hour in hours for edition in hour.editions for file in edition.files}
        names = {hour.name for hour in hours}
        for date in sorted({_date_directory(name) for name in names}):
            for file in self._place.files_below(date):
                if file.rpartition("/")[2].partition(".")[0] in names:
                    path = f"{date}/{file}"
                    if path not in known:
                        self._place.delete(path)

    def _write(self, hours: Sequence[_Hour]) -> dict[int, list[str]]:
        """Write what is new of these hours; the files of each."""
        place = self._place
        fresh = self._source.withColumn(_HOUR, F.col("hour"))
        if len(hours) < len(self._hours):
            fresh = fresh.where(F.col("hour").isin([hour.number for hour in hours]))
        older = [hour for hour in hours if hour.through_seq]
        if older:
            is_old = (
                (F.col("hour") == hour.number) & (F.col("seq") <= hour.through_seq)
                for hour in older
            )
            fresh = fresh.where(~reduce(Column.__or__, is_old))
        with self._job.step("writing Parquet"):
            columns = [_HOUR, *_PARTITIONS, *_COLUMNS]
            writer = fresh.select(*columns).write.partitionBy(_HOUR, *_PARTITIONS)
            writer.mode("overwrite").parquet(place.url(STAGING))
        files: dict[int, list[str]] = {hour.number: [] for hour in hours}
        last_seqs = {hour.number: hour.survey.last_seq for hour in hours}
        self._job.progress("moving files into place", 0, 0)
        for staged in place.files_below(STAGING):
            directory, _, name = staged.rpartition("/")
            if not name.endswith(".parquet"):
                continue
            first, _, partition = directory.partition("/")
            number = int(first.partition("=")[2])
            index = len(files[number])
            path = f"{partition}/{hour_name(number)}.{last_seqs[number]}.{index}.parquet"
            place.rename(f"{STAGING}/{staged}", path)
            files[number].append(path)
        return files

    # ── whether they are the same ──────────────────────────────────────────────────────────────

    def _verified(self, hours: Sequence[_Hour], files: Mapping[int, list[str]]) -> list[_Hour]:
        """The hours of which the archive holds what the server has."""
        wanted = {
            hour.number: [
                *(file for edition in hour.current for file in edition.files),
                *files.get(hour.number, []),
            ]
            for hour in hours
        }
        with self._job.step("reading the archive back"):
            found = self._read_back(wanted)
        good = []
        for hour in hours:
            sum_or_reason = found.get(hour.number, Sum())
            if sum_or_reason == hour.survey.sum:
                good.append(hour)
                continue
            if isinstance(sum_or_reason, str):
                reason = sum_or_reason
            else:
                reason = (
                    f"the archive has {sum_or_reason.count} rows with checksum "
                    f"{sum_or_reason.checksum}, the server {hour.survey.sum.count} with "
                    f"{hour.survey.sum.checksum}"
                )
            manifests = [self._place.url(edition.name) for edition in hour.current]
            advice = f"; to archive it anew, delete {', '.join(manifests)}" if manifests else ""
            self._report(hour, HourFate.DIFFERENT, reason=f"{reason}{advice}, and run it again")
        return good

    def _read_back(self, files: Mapping[int, list[str]]) -> dict[int, Sum | str]:
        """Count and checksum of each hour's files, or why they cannot be read."""
        files = {number: some for number, some in files.items() if some}
        if not files:
            return {}
        schema = from_arrow_schema(pa.schema([*_COLUMNS.items(), *_PARTITIONS.items()]))
        reader = self._job.spark.read.schema(schema).option("basePath", self._place.root)
        paths = [self._place.url(file) for some in files.values() for file in some]
        try:
            rows = reader.parquet(*paths).groupBy("hour").agg(*_sums()).collect()
        except (PySparkException, Py4JJavaError) as error:
            if len(files) == 1:
                (number,) = files
                return {number: f"the archive cannot be read: {_first_line(error)}"}
            # Which of them is it?
            apart: dict[int, Sum | str] = {}
            for number, some in files.items():
                apart |= self._read_back({number: some})
            return apart
        return {row["hour"]: _sum(row) for row in rows}

    # ── telling ────────────────────────────────────────────────────────────────────────────────

    def _commit(self, hour: _Hour, files: list[str]) -> None:
        added = 0
        self._job.progress(f"telling the server of {hour.name}", 0, 0)
        if hour.has_new:
            before = reduce(Sum.__add__, (edition.sum for edition in hour.current), Sum())
            new = hour.survey.sum - before
            manifest = EditionManifest(
                FORMAT,
                hour.name,
                max(hour.survey.first_seq, hour.through_seq + 1),
                hour.survey.last_seq,
                new.count,
                new.checksum,
                files,
                time.time_ns() // 1_000_000,
            )
            self._place.sync(files)
            self._place.write(manifest.name, msgspec.json.encode(manifest).decode())
            self._place.sync([manifest.name])
            added = new.count
        checksum = hour.survey.sum.checksum
        try:
            self._server.confirm(hour.wanted, checksum, self._place.root)
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


def _date_directory(name: str) -> str:
    """Where the files of an hour are."""
    return f"date={name.partition('T')[0]}"


def _sums() -> tuple[Column, Column, Column]:
    """Count, and the sum of the hashes of rows in two halves, which cannot overflow."""
    columns = []
    for name in (*_COLUMNS, *_PARTITIONS):
        column = F.col(name)
        # A map has no hash; a null does not change one.
        columns += [F.map_entries(column) if name == "headers" else column, column.isNull()]
    row_hash = F.xxhash64(*columns)
    low = row_hash.bitwiseAND(F.lit(0xFFFFFFFF))
    return (
        F.count("seq").alias("count"),
        F.sum(F.shiftright(row_hash, 32)).alias("high"),
        F.sum(low).alias("low"),
    )


def _sum(row: Any) -> Sum:
    return Sum(row["count"], ((row["high"] << 32) + row["low"]) % 2**64)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
