"""Checks a data directory: every header, row and payload of the four logs.

It only reads, takes no lock, and may run beside a server. Whatever looks broken is looked at a
second time, because it may have been read while it was being written. Not damage are:

    a torn tail            a group that a crash cut off, and that nobody was told about
    zeros behind frames    a segment of the message log is filled before it is written
    an unfiled end         a schedule file and the definitions log may be longer than the last
                           checkpoint says (`committed`); of the latter there may be another one

What the values of the catalog mean is not known here, only that they can be read; `visit` is for
those who know more and want to compare.

Cost: reads every byte once; about 1.5 µs per row with a payload. Memory: one frame at a time, and
17 bytes per row of one hour. Threads: one, any.
"""

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum

import numpy as np
from numpy.lib.recfunctions import repack_fields

from storage.buckets import bucket_path, parse_bucket_file
from storage.catalog import PART_TABLES, Catalog, Table
from storage.definitions_log import definitions_path, parse_definitions_name
from storage.directory import open_identity
from storage.errors import CatalogError, DamageError, DiskError, StorageError, UnreadableError
from storage.files import File, Files, OsFiles
from storage.frame import (
    Damage,
    Frame,
    Rows,
    scan_live,
    with_torn_payload,
)
from storage.frame_rules import (
    WHOLE,
    Rule,
    definition_rules,
    dispatch_rules,
    known_bytes,
    message_rules,
    payload_rules,
    schedule_rules,
)
from storage.kinds import ANY
from storage.message_log import SPARE_NAMES, MessageLog, parse_segment_name
from storage.rows import FLAG_REMOVAL, LogKind, RecordKind

Progress = Callable[[str, int, int], None]
"""Told what is being done, how far, of how much."""

_DIRECTORIES = {
    LogKind.MESSAGE: "messages",
    LogKind.SCHEDULE: "schedule",
    LogKind.DISPATCH: "dispatch",
    LogKind.DEFINITIONS: "definitions",
}


class NotADataDirectoryError(StorageError):
    """There is no FORMAT file, so this is not the data directory of a server."""

    def __init__(self, root: str) -> None:
        super().__init__(
            f"{root} is not a data directory: it has no file FORMAT; "
            "give the directory that the server was started with (--data-dir)"
        )


class Severity(StrEnum):
    """How much a finding matters."""

    DAMAGE = "damage"
    """Something that was stored cannot be trusted, or is gone."""
    TORN_TAIL = "torn tail"
    """What a crash left of something that was not finished; a start removes it."""
    NOTE = "note"
    """Nothing is wrong with the data."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was found in bytes `[offset, end)` of a file.

    The seqs bound the records it is about (0: unknown)."""

    file: str
    offset: int
    end: int
    reason: str
    first_seq: int
    last_seq: int
    severity: Severity
    is_known_damage: bool = False
    """A start before this check noted it in the catalog."""

    def __str__(self) -> str:
        seqs = f", seq {self.first_seq}–{self.last_seq or '?'}" if self.first_seq else ""
        return f"{self.severity}: {self.file} at {self.offset}–{self.end}{seqs}: {self.reason}"


@dataclass(slots=True)
class LogCounts:
    """What verified of one log."""

    files: int = 0
    frames: int = 0
    rows: int = 0
    payload_bytes: int = 0


@dataclass(slots=True)
class Report:
    """What a check counted and found."""

    root: str
    format_version: int
    logs: dict[str, LogCounts] = field(default_factory=dict)
    tables: dict[str, int] = field(default_factory=dict)
    """Entries of each table of the catalog; empty when it was not checked."""
    findings: list[Finding] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """Whether nothing is damaged; torn tails and notes are no damage."""
        return not self.damage

    @property
    def damage(self) -> list[Finding]:
        """The findings that matter."""
        return [found for found in self.findings if found.severity is Severity.DAMAGE]

    def add(
        self,
        file: str,
        reason: str,
        *,
        offset: int = 0,
        end: int = 0,
        first_seq: int = 0,
        last_seq: int = 0,
        severity: Severity = Severity.DAMAGE,
        is_known_damage: bool = False,
    ) -> None:
        """Note one finding."""
        self.findings.append(
            Finding(file, offset, end, reason, first_seq, last_seq, severity, is_known_damage)
        )

    def assert_clean(self, *, after_power_loss: bool = False) -> None:
        """For tests: fail unless nothing is damaged.

        `after_power_loss`: several frames of a dispatch log may have been waiting for a sync when
        the power went, and the disk may have kept the later ones alone; such a hole is allowed."""
        damage = self.damage
        if after_power_loss:
            damage = [found for found in damage if not found.file.startswith("dispatch/")]
        assert not damage, "\n".join(str(found) for found in damage)

    def to_json(self) -> str:
        """The report as a JSON document."""
        return json.dumps({**asdict(self), "is_clean": self.is_clean}, indent=1)


def check_directory(
    files: Files,
    catalog: Catalog | None,
    *,
    progress: Progress = lambda what, done, total: None,
    visit: Callable[[Frame], None] = lambda frame: None,
    committed: Mapping[str, int] | None = None,
    filed_seq: int = 0,
    kinds: Collection[RecordKind] = (),
) -> Report:
    """Check all logs, and that the catalog can be read (None: leave it out).

    `visit` is called with every frame that verified, in the order of its file. `committed` tells
    how many bytes of each schedule file, and of the definitions log, a checkpoint covers,
    `filed_seq` up to which record nobody needs the message log; both must have been read before.
    `kinds`: those of the records of parts.
    Raises NotADataDirectoryError, FormatVersionError, DamageError for a broken FORMAT file."""
    try:
        identity = open_identity(files, random_bytes=None, of=ANY)
    except FileNotFoundError:
        raise NotADataDirectoryError(files.root) from None
    report = Report(files.root, identity.version)
    check = _Check(files, identity.stamp, report, progress, visit=visit, kinds=kinds)
    check.run(committed, filed_seq)
    if catalog is not None:
        progress("catalog", 0, 1)
        _check_tables(catalog, report)
    return report


def assert_clean(
    root_or_files: str | os.PathLike[str] | Files,
    catalog: Catalog | None = None,
    *,
    after_power_loss: bool = False,
) -> None:
    """For tests: check a directory, and fail unless it is free of damage."""
    if isinstance(root_or_files, str | os.PathLike):
        root_or_files = OsFiles(os.fspath(root_or_files))
    check_directory(root_or_files, catalog).assert_clean(after_power_loss=after_power_loss)


def _check_tables(catalog: Catalog, report: Report) -> None:
    for table in (*Table, *PART_TABLES):
        try:
            count = sum(1 for _ in catalog.scan(table))
            if count or table not in PART_TABLES:
                report.tables[table] = count
        except (CatalogError, DamageError) as error:
            report.add("catalog", f"table {table}: {error}")


class _Check:
    """One run over the files."""

    def __init__(
        self,
        files: Files,
        stamp: int,
        report: Report,
        progress: Progress,
        *,
        visit: Callable[[Frame], None],
        kinds: Collection[RecordKind],
    ) -> None:
        self._files = files
        self._stamp = stamp
        self._report = report
        self._progress = progress
        self._visit = visit
        self._kinds = known_bytes((*RecordKind, *kinds))

    def run(self, committed: Mapping[str, int] | None, filed_seq: int) -> None:
        """Check all files."""
        segments = self._list(LogKind.MESSAGE)
        hours = {kind: self._list(kind) for kind in (LogKind.SCHEDULE, LogKind.DISPATCH)}
        generations = self._list(LogKind.DEFINITIONS)
        total = len(segments) + sum(map(len, hours.values())) + len(generations)
        done = self._message_log(segments, filed_seq, total)
        for kind, numbers in hours.items():
            for hour in numbers:
                path = bucket_path(kind, hour)
                self._progress(path, done, total)
                length = None if committed is None else committed.get(path, 0)
                self._hour(kind, path, hour, length if kind is LogKind.SCHEDULE else None)
                done += 1
        for generation in generations:
            path = definitions_path(generation)
            self._progress(path, done, total)
            if committed is not None and path not in committed:
                self._note(path, "no checkpoint names it; the next start deletes it")
            else:
                self._definitions(path, None if committed is None else committed[path])
            done += 1

    def _list(self, kind: LogKind) -> list[int]:
        directory = _DIRECTORIES[kind]
        self._report.logs[directory] = LogCounts()
        numbers = []
        for name in self._files.list(directory):
            if kind is LogKind.MESSAGE:
                if name in SPARE_NAMES:
                    continue
                number = parse_segment_name(name)
            elif kind is LogKind.DEFINITIONS:
                number = parse_definitions_name(name)
            else:
                number = parse_bucket_file(kind, name)
            if number is None:
                self._note(f"{directory}/{name}", "not a file of this log; it is left alone")
            else:
                numbers.append(number)
        return sorted(numbers)

    def _note(self, path: str, reason: str) -> None:
        self._report.add(path, reason, severity=Severity.NOTE)

    # ── the message log ────────────────────────────────────────────────────────────────────────

    def _message_log(self, segments: list[int], filed_seq: int, total: int) -> int:
        for done, name_seq in enumerate(segments):
            path = MessageLog.path(name_seq)
            self._progress(path, done, total)
            behind = segments[done + 1] if done + 1 < len(segments) else None
            expected = name_seq
            for found in self._items(LogKind.MESSAGE, path, after_seq=name_seq - 1):
                if found is None:
                    # It was deleted meanwhile, after a checkpoint.
                    expected = behind or 0
                elif isinstance(found, Frame):
                    self._contiguous(found, expected)
                    self._frame(found, message_rules(found.header, found.rows, self._kinds))
                    expected = found.last_seq + 1
                elif not found.torn:
                    damage = found if behind is None else found.before(behind)
                    self._damage(damage)
                    expected = damage.last_seq + 1
                elif behind is None:
                    self._damage(found, Severity.TORN_TAIL)
                else:
                    # The next segment's name tells whether these bytes were a part of the log.
                    is_refused = expected >= behind
                    self._damage(
                        replace(found, last_seq=behind - 1),
                        Severity.NOTE if is_refused else Severity.DAMAGE,
                    )
                    expected = max(expected, behind)
            if behind is not None and expected < behind:
                # A power loss may bring back some of the segments that were deleted.
                is_filed = behind - 1 <= filed_seq
                self._report.add(
                    MessageLog.path(behind),
                    "records are missing before this segment",
                    first_seq=expected,
                    last_seq=behind - 1,
                    severity=Severity.NOTE if is_filed else Severity.DAMAGE,
                )
            elif behind is not None and expected > behind:
                self._report.add(
                    MessageLog.path(behind),
                    "the segment repeats records of the one before",
                    first_seq=behind,
                    last_seq=expected - 1,
                )
        return len(segments)

    def _contiguous(self, frame: Frame, expected: int) -> None:
        if frame.first_seq != expected:
            missing = frame.first_seq > expected
            self._report.add(
                frame.path,
                "records are missing before this frame" if missing else "records repeat",
                offset=frame.offset,
                end=frame.end,
                first_seq=min(expected, frame.first_seq),
                last_seq=max(expected, frame.first_seq) - 1,
            )

    # ── the logs by hour ───────────────────────────────────────────────────────────────────────

    def _hour(self, kind: LogKind, path: str, hour: int, committed: int | None) -> None:
        frames: list[Rows] = []
        last_seq = 0
        is_whole = True
        for found in self._items(kind, path):
            if found is None:
                return
            promised = committed is None or found.offset < committed
            if isinstance(found, Damage):
                is_whole = False
                is_torn = found.torn if committed is None else not promised
                self._damage(found, Severity.TORN_TAIL if is_torn else Severity.DAMAGE)
            elif kind is LogKind.SCHEDULE:
                rules = schedule_rules(found.header, found.rows, hour, last_seq)
                frames.append(repack_fields(found.rows[["seq", "message_seq", "flags"]]))
                last_seq = found.last_seq
                self._frame(found, rules, Severity.DAMAGE if promised else Severity.TORN_TAIL)
            else:
                frames.append(repack_fields(found.rows[["seq", "subscription_id"]]))
                self._frame(found, dispatch_rules(found.header, found.rows, hour))
        if not frames:
            return
        rows = np.concatenate(frames)
        if kind is LogKind.DISPATCH:
            repeated = len(rows) - len(np.unique(rows))
            if repeated:
                self._note(path, f"{repeated} deliveries are recorded more than once")
        elif is_whole:
            self._tombstones(path, rows)

    def _tombstones(self, path: str, rows: Rows) -> None:
        is_entry = (rows["flags"] & FLAG_REMOVAL) == 0
        tombstones = rows[~is_entry]
        lost = tombstones[~np.isin(tombstones["message_seq"], rows["seq"][is_entry])]
        if len(lost):
            self._report.add(
                path,
                f"tombstones of rows that are not in the file ({len(lost)} rows)",
                first_seq=int(lost["message_seq"].min()),
                last_seq=int(lost["message_seq"].max()),
            )

    # ── the definitions log ────────────────────────────────────────────────────────────────────

    def _definitions(self, path: str, committed: int | None) -> None:
        for found in self._items(LogKind.DEFINITIONS, path):
            if found is None:
                return
            promised = committed is None or found.offset < committed
            if isinstance(found, Damage):
                is_torn = found.torn if committed is None else not promised
                self._damage(found, Severity.TORN_TAIL if is_torn else Severity.DAMAGE)
            else:
                rules = definition_rules(found.header, found.rows)
                self._frame(found, rules, Severity.DAMAGE if promised else Severity.TORN_TAIL)

    # ── one file, one frame ────────────────────────────────────────────────────────────────────

    def _items(
        self, kind: LogKind, path: str, after_seq: int = 0
    ) -> Iterator[Frame | Damage | None]:
        """Frames and damage of a file; None if it is gone since the directory was listed."""
        try:
            file = self._files.open(path)
        except FileNotFoundError:
            yield None
            return
        except DiskError as error:
            self._report.add(path, f"{error}")
            return
        self._report.logs[_DIRECTORIES[kind]].files += 1
        try:
            yield from with_torn_payload(self._frames(kind, file, after_seq))
        except DiskError as error:
            self._report.add(path, f"the rest was not checked: {error}")
        finally:
            file.close()

    def _frames(self, kind: LogKind, file: File, last_seq: int) -> Iterator[Frame | Damage]:
        for found in scan_live(
            file, 0, kind=kind, stamp=self._stamp, payload=True, after_seq=last_seq
        ):
            if isinstance(found, Frame):
                self._padding(file, found)
            yield found

    def _padding(self, file: File, frame: Frame) -> None:
        """No checksum covers the zeros at the end of a frame, and no reader looks at them."""
        start, problem = frame.payload_start + frame.header.payload_bytes, ""
        try:
            if start < frame.end and any(file.pread(frame.end - start, start)):
                problem = "the padding of a frame is not zero"
        except UnreadableError as error:
            problem = f"the padding of a frame: {error.reason}"
        if problem:
            self._report.add(frame.path, problem, offset=start, end=frame.end)

    def _damage(self, found: Damage, severity: Severity = Severity.DAMAGE) -> None:
        self._report.add(
            found.path,
            found.reason,
            offset=found.offset,
            end=found.end,
            first_seq=found.first_seq,
            last_seq=found.last_seq,
            severity=severity,
        )

    def _frame(self, frame: Frame, rules: list[Rule], severity: Severity = Severity.DAMAGE) -> None:
        header = frame.header
        counts = self._report.logs[_DIRECTORIES[LogKind(header.kind)]]
        counts.frames += 1
        counts.rows += len(frame.rows)
        counts.payload_bytes += header.payload_bytes
        of_payloads = payload_rules(frame)
        if not frame.payload_intact and not any(bad.any() for _, bad in of_payloads):
            self._report.add(
                frame.path,
                frame.unreadable or WHOLE[header.kind == LogKind.DISPATCH],
                offset=frame.payload_start,
                end=frame.payload_start + header.payload_bytes,
                severity=severity,
            )
        for reason, bad in rules + of_payloads:
            if bad.any():
                seqs = frame.rows["seq"][bad]
                self._report.add(
                    frame.path,
                    f"{reason} ({int(bad.sum())} of {len(bad)} rows)",
                    offset=frame.offset,
                    end=frame.end,
                    first_seq=int(seqs.min()),
                    last_seq=int(seqs.max()),
                    severity=severity,
                )
        self._visit(frame)
