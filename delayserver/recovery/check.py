"""The check of a data directory: that of `storage.check`, and whether logs and catalog agree.

    catalog                          must agree with
    hours: length                    the end of a frame of the schedule file
    hours: counts, last entry        the rows up to there
    checkpoint                       the message log: not behind its end, not before its beginning
    subjects                         the subjects of filed rows; numbered from 1 without gaps
    watches                          hours that are kept
    definitions of parts             subjects that are known, and where they stand
    the eight tables of definitions  the definitions log: the same entries
    records of parts                 as the part says, such as the staged files of an import
    keys, changes, dead letters, …   themselves: each entry can be read

It may run beside a server. Therefore it reads the catalog's promises first, and the logs, which
only grow, after them. If something then looks missing it is looked up again.

Cost: see `storage.check`; besides, one pass over the catalog. Threads: one, any.
"""

import contextlib
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from delayserver.parts.installed import PARTS
from delayserver.parts.part import Halves, Parts, checks_of, effects_of
from delayserver.records.tables import (
    CHECKPOINT_KEY,
    UNREADABLE,
    HourState,
    NotUnderstoodError,
    change_prefix,
    check_entry,
    hour_key,
    number_key,
    parse_number_key,
    parse_watch_key,
    read_checkpoint,
    read_definitions_place,
    read_hour,
    read_hours,
    unpack_change,
    unpack_damage,
    unpack_watch,
)
from delayserver.recovery.definitions import differences, read_generation
from storage import kinds
from storage.buckets import bucket_path
from storage.catalog import PART_TABLES, TABLES, Catalog, LmdbCatalog, Table
from storage.catalog_file import find_damage
from storage.check import NotADataDirectoryError, Progress, Report, Severity, check_directory
from storage.definitions_log import DIRECTORY as DEFINITIONS_DIRECTORY
from storage.definitions_log import definitions_path
from storage.directory import (
    CATALOG_DIRECTORY,
    FORMAT_FILE,
    REPAIR_FILE,
    open_identity,
)
from storage.errors import CatalogError, DamageError
from storage.files import Files, OsFiles, size_of
from storage.frame import Damage, Frame
from storage.message_log import DIRECTORY as MESSAGES_DIRECTORY
from storage.message_log import parse_segment_name
from storage.replicated.log import OFFICE_KEY
from storage.rows import FLAG_REMOVAL, HOUR_MS, LogKind
from storage.tiered_catalog import TieredCatalog

_ATTEMPTS = 5
_DIFFERENCES_MAX = 20


def check_path(
    data_dir: Path,
    *,
    catalog_max_bytes: int,
    progress: Progress = lambda what, done, total: None,
    of: Collection[kinds.Kind] = kinds.READABLE,
    parts: Parts = PARTS,
) -> Report:
    """Check the directory `data_dir` and its catalog; nothing is written.

    `of`: the kinds of directory that are checked. Raises DirectoryKindError for another kind,
    NotADataDirectoryError, FormatVersionError, DamageError for a broken FORMAT file."""
    files, path = OsFiles(str(data_dir), readonly=True), str(data_dir / CATALOG_DIRECTORY)
    kinds.require(files, of)
    if not files.exists(FORMAT_FILE):
        raise NotADataDirectoryError(str(data_dir))
    return check_files(
        files, path, catalog_max_bytes=catalog_max_bytes, progress=progress, parts=parts
    )


def check_files(
    files: Files, path: str, *, catalog_max_bytes: int, progress: Progress, parts: Parts = PARTS
) -> Report:
    """Check the data directory behind `files`, and its catalog, LMDB's directory `path`.

    A test hands in files that it damaged. Nothing is written."""
    report = _check_all(files, path, catalog_max_bytes, progress, parts)
    if files.exists(REPAIR_FILE):
        report.add(REPAIR_FILE, "a repair was interrupted: run it again")
    return report


def _check_all(
    files: Files, path: str, catalog_max_bytes: int, progress: Progress, parts: Parts
) -> Report:
    try:
        catalog = LmdbCatalog(path, max_bytes=catalog_max_bytes, readonly=True)
    except CatalogError as error:
        report = check_directory(files, None, progress=progress, kinds=effects_of(parts))
        report.add(CATALOG_DIRECTORY, f"{error}")
        return report
    except DamageError:
        damage = find_damage(path, TABLES, verify_all=True)
        return _without_catalog(files, damage, progress, parts)
    try:
        progress("catalog", 0, 1)
        damage = catalog.verify()
        if damage:
            # LMDB must not be let near it.
            return _without_catalog(files, damage, progress, parts)
        return check(files, catalog, progress=progress, parts=parts)
    finally:
        catalog.close()


def _without_catalog(
    files: Files, damage: list[Damage], progress: Progress, parts: Parts
) -> Report:
    report = check_directory(files, None, progress=progress, kinds=effects_of(parts))
    for found in damage:
        report.add(found.path, found.reason, offset=found.offset, end=found.end)
    return report


def check(
    files: Files,
    catalog: Catalog,
    *,
    progress: Progress = lambda what, done, total: None,
    parts: Parts = PARTS,
) -> Report:
    """Check the logs, the catalog with its key runs, and the one against the other.

    `catalog`: the inner one. Raises as `check_path`."""
    stamp = open_identity(files, random_bytes=None, of=kinds.ANY).stamp
    try:
        tiered = TieredCatalog(catalog, files, stamp=stamp, readonly=True)
    except DamageError as error:
        found = Damage(error.path, error.offset, error.offset, error.reason, torn=False)
        return _without_catalog(files, [found], progress, parts)
    try:
        if damage := tiered.verify_runs():
            return _without_catalog(files, damage, progress, parts)
        return _check_with_keys(files, tiered, progress, parts)
    finally:
        tiered.close_runs()


def _check_with_keys(files: Files, catalog: Catalog, progress: Progress, parts: Parts) -> Report:
    try:
        promised = _Promised(files, catalog, parts)
    except (struct.error, CatalogError) as error:
        report = check_directory(files, catalog, progress=progress, kinds=effects_of(parts))
        report.add(CATALOG_DIRECTORY, f"hours or checkpoint cannot be read: {error}")
        return report
    report = check_directory(
        files,
        catalog,
        progress=progress,
        visit=promised.visit,
        committed=promised.lengths(),
        filed_seq=promised.checkpoint_seq,
        kinds=effects_of(parts),
    )
    promised.compare(report)
    _check_definitions(files, catalog, report)
    _check_entries(catalog, report, parts)
    return report


@dataclass(slots=True)
class _Hour:
    """The catalog's record of an hour, and the content of its file up to that length."""

    hour: int
    state: HourState
    entries: int = 0
    removals: int = 0
    first_seq: int = 0
    last_entry_seq: int = 0
    end: int = 0
    """Where the last frame ends that begins before the committed length."""


class _Promised:
    """The catalog's promises about the logs."""

    def __init__(self, files: Files, catalog: Catalog, parts: Parts) -> None:
        self._files = files
        self._catalog = catalog
        self.checkpoint_seq = read_checkpoint(catalog)
        self._is_replica = catalog.get(Table.META, OFFICE_KEY) is not None
        self._hours = {
            bucket_path(LogKind.SCHEDULE, hour): _Hour(hour, state)
            for hour, state in read_hours(catalog).items()
        }
        self._place = read_definitions_place(catalog)
        self._subject_ids = np.array(
            [parse_number_key(key) for key, _ in catalog.scan(Table.SUBJECTS)], np.uint32
        )
        names = (parse_segment_name(name) for name in files.list(MESSAGES_DIRECTORY))
        self._segments = sorted(first_seq for first_seq in names if first_seq is not None)
        self._last_seq = self._segments[-1] - 1 if self._segments else 0
        self._unknown_subjects: dict[str, set[int]] = {}
        self._inspectors = [
            part.inspect(files, catalog) for part in parts if part.inspect is not None
        ]

    def lengths(self) -> dict[str, int]:
        """How many bytes of each schedule file, and of the definitions log, are committed."""
        lengths = {path: hour.state.length for path, hour in self._hours.items()}
        if self._place is not None and self._place.generation:
            lengths[definitions_path(self._place.generation)] = self._place.length
        return lengths

    def visit(self, frame: Frame) -> None:
        """Count a frame that verified."""
        if frame.header.kind == LogKind.MESSAGE:
            self._last_seq = max(self._last_seq, frame.last_seq)
            for inspector in self._inspectors:
                inspector.visit(frame)
        hour = self._hours.get(frame.path)
        if hour is None or frame.offset >= hour.state.length:
            return
        is_entry = (frame.rows["flags"] & FLAG_REMOVAL) == 0
        entries = frame.rows[is_entry]
        hour.entries += len(entries)
        hour.removals += len(frame.rows) - len(entries)
        hour.end = frame.end
        hour.first_seq = hour.first_seq or frame.first_seq
        if len(entries):
            hour.last_entry_seq = int(entries["seq"][-1])
        unknown = np.setdiff1d(entries["subject_id"], self._subject_ids)
        if len(unknown):
            self._unknown_subjects.setdefault(frame.path, set()).update(unknown.tolist())

    def compare(self, report: Report) -> None:
        """Add all disagreements, after all files were visited."""
        self._compare_checkpoint(report)
        damaged = {(found.file, found.offset) for found in report.damage}
        for path, hour in self._hours.items():
            length = hour.state.length
            if not any(file == path and offset < length for file, offset in damaged):
                self._compare_hour(report, path, hour)
        for inspector in self._inspectors:
            inspector.compare(report)
        for path, subject_ids in self._unknown_subjects.items():
            report.add(path, f"rows of subjects that the catalog does not know: {subject_ids}")

    def _compare_checkpoint(self, report: Report) -> None:
        if self._is_replica:
            # The shard's log stands on the engine. The log here was written besides by this node as
            # an owner, up to wherever the next one came, and is thrown away when it owns the shard
            # again.
            return
        seq = self.checkpoint_seq
        if self._segments and seq > self._last_seq:
            report.add(
                MESSAGES_DIRECTORY,
                f"the message log ends with seq {self._last_seq}, the checkpoint is {seq}",
                first_seq=self._last_seq + 1,
                last_seq=seq,
            )
        # A server may have gone on; then it deleted the segments that its newer checkpoint covers.
        newest = read_checkpoint(self._catalog)
        if self._segments and self._segments[0] > newest + 1:
            report.add(
                MESSAGES_DIRECTORY,
                f"the message log begins with seq {self._segments[0]}, the checkpoint is {newest}",
                first_seq=newest + 1,
                last_seq=self._segments[0] - 1,
            )

    def _compare_hour(self, report: Report, path: str, hour: _Hour) -> None:
        state = hour.state
        problem = None
        size = size_of(self._files, path)
        if size < state.length:
            problem = f"the file has {size} bytes, the catalog says {state.length}"
        elif hour.end != state.length:
            problem = f"the committed length {state.length} is not where a frame ends"
        else:
            for what, found, said in (
                ("entries", hour.entries, state.entries),
                ("removals", hour.removals, state.removals),
                ("as the first record", hour.first_seq, state.first_seq or hour.first_seq),
                ("as the last entry", hour.last_entry_seq, state.last_entry_seq),
            ):
                if found != said:
                    problem = f"the file has {found} {what}, the catalog says {said}"
        # An hour that is past its retention disappears from the catalog first.
        if problem and self._catalog.get(Table.HOURS, hour_key(hour.hour)) is not None:
            report.add(path, problem, offset=min(size, state.length), end=state.length)


# ── the definitions log against the catalog ────────────────────────────────────────────────────


def _check_definitions(files: Files, catalog: Catalog, report: Report) -> None:
    identity = open_identity(files, random_bytes=None, of=kinds.ANY)
    if not identity.has_definitions:
        reason = f"of version {identity.version}: the next start of a server makes it"
        report.add(DEFINITIONS_DIRECTORY, reason, severity=Severity.NOTE)
        return
    try:
        for _ in range(_ATTEMPTS):
            place = read_definitions_place(catalog)
            found = list(_compare_definitions(files, catalog, identity.stamp))
            if read_definitions_place(catalog) == place:
                for path, reason in found[:_DIFFERENCES_MAX]:
                    report.add(path, reason)
                return
    except (CatalogError, DamageError):
        return  # `check_directory` has said so.
    reason = "not compared with the catalog: a server that runs changes it all the time"
    report.add(DEFINITIONS_DIRECTORY, reason, severity=Severity.NOTE)


def _compare_definitions(files: Files, catalog: Catalog, stamp: int) -> Iterator[tuple[str, str]]:
    """Path and reason of each difference."""
    place = read_definitions_place(catalog)
    if place is None:
        if catalog.get(Table.META, CHECKPOINT_KEY) is not None:
            yield CATALOG_DIRECTORY, "it does not say how much of the definitions log counts"
        return
    path = definitions_path(place.generation)
    try:
        size = size_of(files, path) if place.generation else 0
        if size < place.length:
            yield path, f"the file has {size} bytes, the catalog says {place.length}"
            return
        defined = read_generation(files, place.generation, stamp=stamp, end=place.length)
    except FileNotFoundError:
        yield path, "the file is missing"
        return
    if not defined.damage:  # else `check_directory` has said so
        for difference in differences(defined.state, catalog):
            yield path, difference


# ── the catalog by itself ──────────────────────────────────────────────────────────────────────


def _check_entries(catalog: Catalog, report: Report, parts: Parts) -> None:
    more = checks_of(parts)
    for table in (*Table, *PART_TABLES):
        try:
            for key, value in catalog.scan(table):
                try:
                    check_entry(table, key, value, more)
                except NotUnderstoodError as error:
                    name = key.decode(errors="backslashreplace")
                    reason = f"{table}: {name!r} is not understood here ({error})"
                    report.add(CATALOG_DIRECTORY, reason, severity=Severity.NOTE)
                except UNREADABLE as error:
                    report.add(
                        CATALOG_DIRECTORY, f"{table}: entry {key.hex()} cannot be read ({error})"
                    )
        except (CatalogError, DamageError):
            return  # `check_directory` has said so.
    _check_subjects(catalog, report)
    _check_watches(catalog, report)
    for part in parts:
        if part.halves is not None:
            _check_halves(catalog, part.name, part.halves, report)
    _add_known_damage(catalog, report)


def _check_subjects(catalog: Catalog, report: Report) -> None:
    subjects = list(catalog.scan(Table.SUBJECTS))
    numbers = [parse_number_key(key) for key, _ in subjects]
    if numbers != list(range(1, len(numbers) + 1)):
        report.add(CATALOG_DIRECTORY, "subjects are not numbered from 1 without gaps")
    if len({name for _, name in subjects}) != len(subjects):
        report.add(CATALOG_DIRECTORY, "two subjects have the same name")


def _check_watches(catalog: Catalog, report: Report) -> None:
    """A message that is watched for must be kept: in the hour of its id, or where it went."""
    for key, value in catalog.scan(Table.WATCHES):
        with contextlib.suppress(*UNREADABLE):  # reported above
            name, seq = parse_watch_key(key)
            hours = {unpack_watch(value)[0] // HOUR_MS}
            for _, change in catalog.scan(Table.CHANGES, prefix=change_prefix(seq)):
                hours.add(unpack_change(change).due_ms // HOUR_MS)
            is_kept = any(read_hour(catalog, hour) for hour in hours)
            # A server that runs deletes the entry before the hour.
            if not is_kept and catalog.get(Table.WATCHES, key) is not None:
                report.add(CATALOG_DIRECTORY, f"message {seq} watches {name!r} and is not kept")


def _check_halves(catalog: Catalog, word: str, halves: Halves, report: Report) -> None:
    """Each definition has a subject and a state."""
    for key, value in catalog.scan(halves.definitions):
        with contextlib.suppress(*UNREADABLE):  # reported above
            whose = f"{word} {key.decode()!r}"
            if subject_id := halves.subject_id(value):
                _check_subject(catalog, subject_id, whose, report)
            # A server that runs removes both in one commit.
            is_half = halves.states is not None and catalog.get(halves.states, key) is None
            if is_half and catalog.get(halves.definitions, key) is not None:
                report.add(CATALOG_DIRECTORY, f"{whose} does not say {halves.lack}")


def _check_subject(catalog: Catalog, subject_id: int, whose: str, report: Report) -> None:
    if catalog.get(Table.SUBJECTS, number_key(subject_id)) is None:
        report.add(CATALOG_DIRECTORY, f"{whose} has an unknown subject")


def _add_known_damage(catalog: Catalog, report: Report) -> None:
    for _, value in catalog.scan(Table.DAMAGE):
        with contextlib.suppress(*UNREADABLE):  # reported above
            found = unpack_damage(value)
            report.add(
                found.path,
                f"noted at a start before this check: {found.reason}",
                offset=found.offset,
                end=found.end,
                first_seq=found.first_seq,
                last_seq=found.last_seq,
                severity=Severity.NOTE,
                is_known_damage=True,
            )
