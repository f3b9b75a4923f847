"""Repair: a damaged data directory checks as sound again, and loses no more than it must.

    lock → finish an interrupted repair → check → plan, and write the new beside the old → swap them
         → file the intact part of a damaged message log → check again

Damaged                          Remedy
schedule, dispatch               the file is written again without it (`repair_logs`)
catalog                          built again from the logs (`repair_catalog`)
definitions log                  written again from the catalog; if that is damaged, too, from all
                                 its frames that are intact, and the lost ones are named
message log                      everything intact is filed, and the segments leave the log
notes of damage in the catalog   taken out; they stand in the report

Files are replaced as one step (`storage.swap`), and the rest is as in every start: so it may be
interrupted anywhere. A file that is replaced or removed stands in `repair/<time>/` under its own
path afterwards. A run that finds nothing writes nothing.

Cost: reads every byte about three times. Memory: the catalog. Threads: none.
"""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from delayserver.config import Settings
from delayserver.parts.installed import PARTS
from delayserver.parts.part import Parts, checks_of
from delayserver.records.definitions import TABLE_NUMBERS, by_table
from delayserver.records.tables import (
    CHECKPOINT_KEY,
    DEFINITIONS_KEY,
    LIVE_KEY,
    can_be_read,
    pack_definitions_place,
    parse_checkpoint,
    parse_hour_key,
)
from delayserver.recovery.check import check_files
from delayserver.recovery.definitions import read_generation
from delayserver.recovery.recover import file_message_log
from delayserver.recovery.repair_catalog import (
    Rebuilt,
    Tables,
    name_what_is_lost,
    rebuild,
)
from delayserver.recovery.repair_hours import HourFiles
from delayserver.schedule.expansion import Staging, unpack_import
from delayserver.schedule.replay import Replay
from storage.catalog import MAX_BYTES, LmdbCatalog, Table
from storage.catalog_file import DATA_FILE
from storage.check import Finding, NotADataDirectoryError, Progress, Report, Severity
from storage.definitions_log import DIRECTORY as DEFINITIONS
from storage.definitions_log import (
    Definition,
    DefinitionsLog,
    DefinitionsPlace,
    definition_generations,
    definitions_path,
    encode_definitions,
)
from storage.directory import (
    CATALOG_DIRECTORY,
    FORMAT_FILE,
    LOCK_FILE,
    REPAIR_DIRECTORY,
    REPAIR_FILE,
    open_identity,
)
from storage.errors import FormatOutdatedError
from storage.files import Files, OsFiles
from storage.frame import Damage
from storage.hour_log import HourLog
from storage.key_runs import DIRECTORY as KEYS_DIRECTORY
from storage.kinds import OWNED, require
from storage.message_log import DIRECTORY as MESSAGES
from storage.message_log import Durability, MessageLog, parse_segment_name
from storage.rows import LogKind
from storage.swap import Swap, finish, is_unfinished

_PASSES_MAX = 4
_COMMIT_ENTRIES = 50_000
_TABLES_NEEDED = (Table.META, Table.HOURS, Table.CHANGES, Table.DAMAGE, *TABLE_NUMBERS)


@dataclass(frozen=True, slots=True)
class Remedy:
    """One thing that was found in bytes `[offset, end)` of a file, and its remedy."""

    file: str
    offset: int
    end: int
    first_seq: int
    last_seq: int
    problem: str
    remedy: str


@dataclass(slots=True)
class RepairReport:
    """The findings and the work of a repair, or (`dry_run`) the work that it would do."""

    root: str
    dry_run: bool
    backups: list[str] = field(default_factory=list)
    """The directories that hold the replaced files, by path; and `report.json`, `plan.json`."""
    remedies: list[Remedy] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)
    """Data that is gone for good, beyond the rows that are named above."""
    remaining: list[str] = field(default_factory=list)
    """Damage that is still there."""

    @property
    def is_needed(self) -> bool:
        """Whether there was anything to repair."""
        return bool(self.remedies)

    def to_json(self) -> str:
        """The report as a JSON document."""
        return json.dumps(asdict(self), indent=1)


def repair_path(
    data_dir: Path,
    *,
    now_ms: int,
    dry_run: bool = False,
    catalog_max_bytes: int = MAX_BYTES,
    progress: Progress = lambda what, done, total: None,
    parts: Parts = PARTS,
) -> RepairReport:
    """Repair the directory `data_dir`. May be interrupted at any point and called again.

    Raises NotADataDirectoryError, DirectoryKindError, DirectoryLockedError while a server runs on
    it,
    FormatVersionError, FormatOutdatedError, DamageError for a broken FORMAT file (restore that from
    a copy: the logs cannot be read without it), DiskError, CatalogError."""
    require(OsFiles(str(data_dir), readonly=True), OWNED)  # Before it is locked: it is written to.
    if not (data_dir / FORMAT_FILE).is_file():
        raise NotADataDirectoryError(str(data_dir))
    return repair(
        OsFiles(str(data_dir)),
        data_dir,
        now_ms=now_ms,
        dry_run=dry_run,
        catalog_max_bytes=catalog_max_bytes,
        progress=progress,
        parts=parts,
    )


def repair(
    files: Files,
    data_dir: Path,
    *,
    now_ms: int,
    dry_run: bool,
    catalog_max_bytes: int,
    progress: Progress,
    parts: Parts,
) -> RepairReport:
    """Repair the directory that `files` shows; its catalog is LMDB's, below `data_dir`.

    A test hands in files that it damaged. May be interrupted at any point and called again. Raises
    the errors of `repair_path`, but for NotADataDirectoryError."""
    with files.lock(LOCK_FILE):
        identity = open_identity(files, random_bytes=None, of=OWNED)
        if not identity.has_definitions:
            raise FormatOutdatedError(files.root, identity.version)
        run = _Repair(
            files, data_dir, identity.stamp, now_ms, dry_run, catalog_max_bytes, progress, parts
        )
        return run.run()


class _Repair:
    """One run."""

    def __init__(
        self,
        files: Files,
        data_dir: Path,
        stamp: int,
        now_ms: int,
        dry_run: bool,
        catalog_max_bytes: int,
        progress: Progress,
        parts: Parts,
    ) -> None:
        self._files = files
        self._parts = parts
        self._data_dir = data_dir
        self._stamp = stamp
        self._now_ms = now_ms
        self._catalog_max_bytes = catalog_max_bytes
        self._progress = progress
        self.report = RepairReport(files.root, dry_run)

    def run(self) -> RepairReport:
        """Everything."""
        report = self.report
        if is_unfinished(self._files):
            report.remedies.append(
                Remedy(REPAIR_FILE, 0, 0, 0, 0, "a repair was interrupted", "it is finished first")
            )
            if report.dry_run:
                return report
            self._finish()
        # Filing a damaged message log may bring tombstones of lost entries: hence again.
        for _ in range(_PASSES_MAX):
            findings = [found for found in self._check().findings if _matters(found)]
            if not findings:
                return report
            self._repair(findings)
            if report.dry_run:
                return report
        report.remaining = [str(found) for found in self._check().damage]
        return report

    def _repair(self, findings: Sequence[Finding]) -> None:
        """Repair all findings of a check."""
        self._swap = swap = Swap(self._files, self._new_backup())
        self._hour_files = HourFiles(
            *(self._files, self._stamp, swap, self._progress), dry_run=self.report.dry_run
        )
        self._plan(findings)
        if self.report.dry_run:
            return
        if not swap.is_empty:
            swap.commit()
            self._finish()
        in_log = {found.file for found in findings if found.file.startswith(MESSAGES)}
        if in_log:
            self._file_message_log(sorted(in_log - {MESSAGES}))
            self._note_backup(swap.backup)
        swap.write("report.json", self.report.to_json())

    def _finish(self) -> None:
        self._note_backup(finish(self._files, lambda: self._open_catalog(self._catalog_path)))

    def _note_backup(self, backup: str) -> None:
        if (path := str(self._data_dir / backup)) not in self.report.backups:
            self.report.backups.append(path)

    def _check(self) -> Report:
        return check_files(
            self._files,
            self._catalog_path,
            catalog_max_bytes=self._catalog_max_bytes,
            progress=self._progress,
            parts=self._parts,
        )

    @property
    def _catalog_path(self) -> str:
        return str(self._data_dir / CATALOG_DIRECTORY)

    def _new_backup(self) -> str:
        name = datetime.fromtimestamp(self._now_ms / 1000, UTC).strftime("%Y-%m-%dT%H-%M-%SZ")
        number = 1
        while True:
            path = f"{REPAIR_DIRECTORY}/{name}-{number}"
            if not self._files.exists(path):
                return path
            number += 1

    # ── the plan ───────────────────────────────────────────────────────────────────────────────

    def _plan(self, found: Sequence[Finding]) -> None:
        """Decide which files are replaced, and (unless it is a dry run) write the new ones."""
        notes = [one for one in found if one.is_known_damage]
        findings = [one for one in found if not one.is_known_damage]
        self._progress("reading the catalog", 0, 1)
        catalog = self._read_catalog(findings)
        first_seq, defined = self._first_seq(), self._read_definitions()
        known = catalog[Table.META].get(CHECKPOINT_KEY) if catalog is not None else None
        checkpoint = parse_checkpoint(known) if known else None
        # Every start makes one: without it, or with an old one, somebody made another catalog.
        is_current = checkpoint is not None and (first_seq is None or first_seq <= checkpoint + 1)
        if checkpoint is None or not is_current:
            # The staged files of an import are deleted once the catalog has it.
            through = (unpack_import(it).last_seq for it in defined[Table.IMPORTS].values())
            checkpoint = max([self._filed_seq(first_seq, findings), *through])
        if catalog is not None and is_current:
            defined = {table: catalog[table] for table in TABLE_NUMBERS}
        rebuilt = Rebuilt(self._parts)
        hours = self._hour_files.mend_schedule(catalog, is_current, findings, rebuilt, checkpoint)
        self._hour_files.mend_dispatch(findings)
        is_damaged = not is_current and bool(self._lost_definitions)
        names, losses = name_what_is_lost(defined, rebuilt, is_damaged=is_damaged)
        if not is_current:
            losses += rebuilt.mend_parts(defined)
        for table, pairs in names.items():
            defined[table].update(pairs)
        self.report.losses += losses
        if not is_current:
            self.report.losses += self._lost_definitions
            fired = self._hour_files.buckets(LogKind.DISPATCH)
            live = catalog[Table.META].get(LIVE_KEY) if catalog is not None else None
            self._write_catalog(
                rebuild(
                    rebuilt,
                    defined,
                    hours,
                    checkpoint=checkpoint,
                    live_through_hour=max([-1, *fired, *([parse_hour_key(live)] if live else [])]),
                ),
                self._write_definitions(defined, checkpoint),
            )
        elif catalog is not None:
            if losses or any(one.file.startswith(DEFINITIONS) for one in findings):
                place = self._write_definitions(defined, checkpoint)
                self._swap.put(Table.META, DEFINITIONS_KEY, pack_definitions_place(place))
            for table, pairs in names.items():
                for key, value in pairs.items():
                    self._swap.put(table, key, value)
            for key in catalog[Table.DAMAGE]:
                self._swap.put(Table.DAMAGE, key, None)
        for one in findings:
            self._remedy(one, _what_is_done(one))
        for one in notes:
            self._remedy(one, "the note is taken out; what it names is not delivered")

    def _remedy(self, found: Finding, remedy: str) -> None:
        self.report.remedies.append(
            Remedy(
                found.file,
                found.offset,
                found.end,
                found.first_seq,
                found.last_seq,
                found.reason,
                remedy,
            )
        )

    def _first_seq(self) -> int | None:
        """Where the message log begins."""
        names = (parse_segment_name(name) for name in self._files.list(MESSAGES))
        return min((seq for seq in names if seq is not None), default=None)

    def _filed_seq(self, first_seq: int | None, findings: Sequence[Finding]) -> int:
        """The newest record that the message log cannot give back: all before it were filed."""
        filed = self._hour_files.schedule_seqs()
        if first_seq is None:
            return max(filed, default=0)
        seq = first_seq - 1
        for found in findings:
            # Segments that a power loss brought back stand before a hole that was filed.
            is_hole = found.file.startswith(MESSAGES) and found.last_seq > seq
            if is_hole and any(found.first_seq <= one <= found.last_seq for one in filed):
                seq = found.last_seq
        return seq

    # ── the catalog ────────────────────────────────────────────────────────────────────────────

    def _read_catalog(self, findings: Sequence[Finding]) -> Tables | None:
        """The tables of the catalog that are needed; None if it is damaged."""
        if any(one.file.startswith((CATALOG_DIRECTORY, KEYS_DIRECTORY)) for one in findings):
            return None
        path, max_bytes = self._catalog_path, self._catalog_max_bytes
        with contextlib.closing(LmdbCatalog(path, max_bytes=max_bytes, readonly=True)) as catalog:
            return {table: dict(catalog.scan(table)) for table in _TABLES_NEEDED}

    def _write_catalog(self, tables: Tables, place: DefinitionsPlace) -> None:
        """Write the catalog again as a whole."""
        self._swap.writes.clear()
        if self.report.dry_run:
            return
        tables[Table.META][DEFINITIONS_KEY] = pack_definitions_place(place)
        path = self._swap.new_path(f"{CATALOG_DIRECTORY}/{DATA_FILE}")
        directory = str((self._data_dir / path).parent)
        with contextlib.closing(self._open_catalog(directory)) as catalog:
            for table, pairs in tables.items():
                items = list(pairs.items())
                for start in range(0, len(items), _COMMIT_ENTRIES):
                    catalog.commit({table: items[start : start + _COMMIT_ENTRIES]})

    # ── the definitions log ────────────────────────────────────────────────────────────────────

    def _read_definitions(self) -> Tables:
        """The newest generation of the definitions log, as far as it is intact."""
        generation = max(definition_generations(self._files), default=0)
        defined = read_generation(self._files, generation, stamp=self._stamp)
        self._lost_definitions = [
            f"what was defined in {found.path} at {found.offset}–{found.end}"
            for found in defined.damage
        ]
        tables, more = by_table(defined.state), checks_of(self._parts)
        return {
            table: {
                key: value for key, value in pairs.items() if can_be_read(table, key, value, more)
            }
            for table, pairs in tables.items()
        }

    def _write_definitions(self, defined: Tables, seq: int) -> DefinitionsPlace:
        """Write the definitions log again: a new generation."""
        generations = definition_generations(self._files)
        for generation in generations:
            self._swap.remove(definitions_path(generation))
        generation, length = max(generations, default=0) + 1, 0
        entries = [
            Definition(number, key, value)
            for table, number in TABLE_NUMBERS.items()
            for key, value in defined[table].items()
        ]
        if self.report.dry_run or not entries:
            return DefinitionsPlace()
        with self._swap.new_file(definitions_path(generation)) as target:
            for parts in encode_definitions(entries, seq=seq, stamp=self._stamp):
                target.pwrite(parts, length)
                length += sum(map(len, parts))
        return DefinitionsPlace(generation, length, length)

    def _open_catalog(self, path: str) -> LmdbCatalog:
        return LmdbCatalog(path, max_bytes=self._catalog_max_bytes)

    # ── the message log ────────────────────────────────────────────────────────────────────────

    def _file_message_log(self, damaged_segments: Sequence[str]) -> None:
        """File the intact records; then the log is not needed any more, and may go."""
        files = self._files
        for path in damaged_segments:
            self._swap.copy(path)
        with contextlib.closing(self._open_catalog(self._catalog_path)) as catalog:
            log = MessageLog(
                files,
                stamp=self._stamp,
                segment_bytes=Settings.model_fields["segment_bytes"].default,
                durability=Durability.FSYNC,
            )
            with (
                contextlib.closing(HourLog(files, LogKind.SCHEDULE, stamp=self._stamp)) as schedule,
                contextlib.closing(HourLog(files, LogKind.DISPATCH, stamp=self._stamp)) as dispatch,
                contextlib.closing(DefinitionsLog(files, stamp=self._stamp)) as definitions,
            ):
                staging = Staging(files, self._stamp)
                replay = Replay(catalog, schedule, dispatch, log, staging, definitions, self._parts)
                damage: list[Damage] = []
                next_seq, _ = file_message_log(
                    log, replay, damage, now_ms=self._now_ms, progress=self._progress
                )
                replay.effects.name_lost_subjects()
                replay.skip_to(next_seq - 1)
                replay.checkpoint()
            for path in log.segments():
                files.unlink(path)
            files.sync_directory(MESSAGES)


def _matters(found: Finding) -> bool:
    return found.severity is not Severity.NOTE or found.is_known_damage


def _what_is_done(found: Finding) -> str:
    if found.file.startswith(CATALOG_DIRECTORY):
        return "the catalog is built again from the logs"
    if found.file.startswith(DEFINITIONS):
        return "the definitions log is written again"
    if found.file.startswith(MESSAGES):
        return "what is intact is filed, and the segments leave the log"
    return "the file is written again without it"
