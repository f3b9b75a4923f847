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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum

import numpy as np
from numpy.lib.recfunctions import repack_fields
from numpy.typing import NDArray

from storage.buckets import bucket_path, end_ms, parse_bucket_file, start_ms
from storage.catalog import PART_TABLES, Catalog, Table
from storage.definitions_log import definitions_path, parse_definitions_name
from storage.directory import open_identity
from storage.errors import CatalogError, DamageError, DiskError, StorageError, UnreadableError
from storage.files import File, Files, OsFiles
from storage.frame import (
    CRC_BYTES,
    Damage,
    Frame,
    Header,
    Rows,
    crc32c,
    scan_live,
    with_torn_payload,
)
from storage.kinds import ANY
from storage.message_log import SPARE_NAMES, MessageLog, parse_segment_name
from storage.rows import (
    FLAG_AFTER_SYNC,
    FLAG_OPTIONS,
    FLAG_REMOVAL,
    FLAG_REMOVED,
    FLAG_REPLAY,
    FLAG_WATCHES,
    PRIORITY_MAX,
    PRIORITY_OF_GROUP,
    PRIORITY_SHIFT,
    PUBLISHES,
    REMOVES,
    SCHEDULES,
    LogKind,
    Outcome,
    RecordKind,
)

Progress = Callable[[str, int, int], None]
"""Told what is being done, how far, of how much."""
Mask = NDArray[np.bool_]
Rule = tuple[str, Mask]
"""What is wrong, and with which rows."""

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
        self._kinds = _known((*RecordKind, *kinds))

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
                    self._frame(found, _message_rules(found.header, found.rows, self._kinds))
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
                rules = _schedule_rules(found.header, found.rows, hour, last_seq)
                frames.append(repack_fields(found.rows[["seq", "message_seq", "flags"]]))
                last_seq = found.last_seq
                self._frame(found, rules, Severity.DAMAGE if promised else Severity.TORN_TAIL)
            else:
                frames.append(repack_fields(found.rows[["seq", "subscription_id"]]))
                self._frame(found, _dispatch_rules(found.header, found.rows, hour))
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
                rules = _definition_rules(found.header, found.rows)
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
        payload_rules = _payload_rules(frame)
        if not frame.payload_intact and not any(bad.any() for _, bad in payload_rules):
            self._report.add(
                frame.path,
                frame.unreadable or _WHOLE[header.kind == LogKind.DISPATCH],
                offset=frame.payload_start,
                end=frame.payload_start + header.payload_bytes,
                severity=severity,
            )
        for reason, bad in rules + payload_rules:
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


def unsound_rows(frame: Frame, hour: int, last_seq: int) -> Mask:
    """The rows of a frame of one of the two logs by hour that break a rule; `last_seq`: of the
    frame before. The frame was read with its payload."""
    is_schedule = frame.header.kind == LogKind.SCHEDULE
    rules = (
        _schedule_rules(frame.header, frame.rows, hour, last_seq)
        if is_schedule
        else _dispatch_rules(frame.header, frame.rows, hour)
    )
    bad: Mask = np.zeros(len(frame.rows), bool)
    for _, mask in rules + _payload_rules(frame):
        bad |= mask
    return bad


# ── rules: what rows of a sound frame must be ──────────────────────────────────────────────────


def _known(values: Iterable[int]) -> Mask:
    """Which of all bytes are among these: looked up, since many a frame has one row or two, for
    which a search takes longer than all other rules together."""
    known = np.zeros(256, bool)
    known[list(values)] = True
    return known


_PUBLISHES, _SCHEDULES, _REMOVES = map(_known, (PUBLISHES, SCHEDULES, REMOVES))
_OUTCOMES = _known(Outcome)
_FLAGS = np.uint8(FLAG_WATCHES | FLAG_REPLAY | FLAG_OPTIONS | 0xF0)
"""Of a row that makes an entry. An entry may have these, and a tombstone the one that is left."""


def _is_no_priority(flags: NDArray[np.uint8]) -> Mask:
    priorities = flags >> PRIORITY_SHIFT
    is_none: Mask = (priorities > PRIORITY_MAX) & (priorities != PRIORITY_OF_GROUP)
    return is_none


def _message_rules(header: Header, rows: Rows, known: Mask) -> list[Rule]:
    seqs, kinds, targets = rows["seq"], rows["kind"], rows["target_seq"]
    schedules, removes = _SCHEDULES[kinds], _REMOVES[kinds]
    expected = np.arange(len(rows), dtype=np.uint64) + np.uint64(header.first_seq)
    last_seq = header.first_seq + len(rows) - 1
    # An import takes more seqs than its own.
    has_import = kinds[-1] == RecordKind.IMPORT
    wrong_last = header.last_seq < last_seq if has_import else header.last_seq != last_seq
    is_publish = _PUBLISHES[kinds]
    return [
        ("seqs have gaps or do not match the header", (seqs != expected) | wrong_last),
        ("unknown kinds of records", ~known[kinds]),
        ("flags that are not known", (rows["flags"] & ~_FLAGS) != 0),
        ("a priority that is none", _is_no_priority(rows["flags"])),
        ("flags of what schedules nothing", (rows["flags"] != 0) & ~schedules),
        (
            "a replay that is not marked as one, or has no target",
            (kinds == RecordKind.REPLAY) & ((rows["flags"] & FLAG_REPLAY == 0) | (targets == 0)),
        ),
        (
            "an import that is not the last record of its group",
            (kinds == RecordKind.IMPORT) & (np.arange(len(rows)) < len(rows) - 1),
        ),
        ("no due time", schedules & (rows["due_ms"] <= 0)),
        ("a target that does not come before", (targets >= seqs) | (removes & (targets == 0))),
        ("no due time of the target", removes & (rows["target_due_ms"] <= 0)),
        (
            "a message that does not come before",
            (rows["message_seq"] > seqs) | (is_publish & (rows["message_seq"] != seqs)),
        ),
    ]


def _is_elsewhere(due_ms: NDArray[np.int64], bucket: int) -> Mask:
    return (due_ms < start_ms(bucket)) | (due_ms >= end_ms(bucket))


def _schedule_rules(header: Header, rows: Rows, hour: int, last_seq: int) -> list[Rule]:
    is_entry = (rows["flags"] & FLAG_REMOVAL) == 0
    seqs, kinds, message_seqs = rows["seq"], rows["kind"], rows["message_seq"]
    previous = np.concatenate([[np.uint64(last_seq)], seqs[:-1]])
    # One record may remove a row and schedule another in the same hour; the entry comes first.
    follows = np.concatenate([[False], is_entry[:-1]]) & ~is_entry
    ascending = (seqs > previous) | ((seqs == previous) & follows)
    if seqs[0] != header.first_seq or seqs[-1] != header.last_seq:
        ascending[:] = False
    return [
        ("seqs do not ascend or do not match the header", ~ascending),
        ("unknown kinds of entries", is_entry & ~_SCHEDULES[kinds]),
        ("unknown kinds of tombstones", ~is_entry & ~_REMOVES[kinds]),
        ("a priority that is none", is_entry & _is_no_priority(rows["flags"])),
        ("a tombstone with flags of an entry", ~is_entry & (rows["flags"] != FLAG_REMOVAL)),
        ("a due time of another hour", _is_elsewhere(rows["due_ms"], hour)),
        ("a message that does not come before", is_entry & (message_seqs > seqs)),
        (
            "a tombstone of what does not come before",
            ~is_entry & ((message_seqs >= seqs) | (message_seqs == 0)),
        ),
        ("a tombstone with a payload", ~is_entry & (rows["payload_length"] != 0)),
    ]


_WHOLE = (
    "the payloads as a whole do not match their checksum, though each one does",
    "the notes do not match their checksum: how these attempts went is lost, and no more",
)
"""Where rows have payloads of their own, and where they have not."""


def _dispatch_rules(header: Header, rows: Rows, hour: int) -> list[Rule]:
    seqs, message_seqs, outcomes = rows["seq"], rows["message_seq"], rows["outcome"]
    wrong_range = seqs.min() != header.first_seq or seqs.max() != header.last_seq
    no_subscription = (rows["subscription_id"] == 0) & (outcomes != Outcome.DROPPED)
    return [
        ("seqs do not match the header", np.full(len(rows), wrong_range)),
        ("a message that does not come before", (message_seqs > seqs) | (message_seqs == 0)),
        ("a due time of another hour", _is_elsewhere(rows["due_ms"], hour)),
        ("no time of settlement", rows["settled_ms"] <= 0),
        ("no subscription", no_subscription),
        ("no attempt", rows["attempt"] == 0),
        ("unknown outcomes", ~_OUTCOMES[outcomes]),
        ("flags that are not known", (rows["flags"] & ~np.uint8(FLAG_AFTER_SYNC)) != 0),
    ]


def _definition_rules(header: Header, rows: Rows) -> list[Rule]:
    seqs, is_removed = rows["seq"], rows["flags"] == FLAG_REMOVED
    key_end = rows["key_length"].astype(np.int64) + CRC_BYTES
    return [
        ("seqs do not match the header", (seqs != header.first_seq) | (seqs != header.last_seq)),
        ("no table", rows["table"] == 0),
        ("flags that are not known", (rows["flags"] & ~np.uint8(FLAG_REMOVED)) != 0),
        ("a key that is longer than its payload", key_end > rows["payload_length"]),
        ("a removal with a value", is_removed & (key_end < rows["payload_length"])),
    ]


def _payload_rules(frame: Frame) -> list[Rule]:
    """Each payload must lie in the blob, match its own checksum, and be the one of its row."""
    rows, blob = frame.rows, frame.payload or b""
    outside, broken, foreign = np.zeros((3, len(rows)), bool)
    if LogKind(frame.header.kind) is not LogKind.DISPATCH:
        places = zip(
            rows["payload_offset"].tolist(),
            rows["payload_length"].tolist(),
            rows["payload_crc"].tolist(),
            strict=True,
        )
        for index, (offset, length, crc) in enumerate(places):
            if not length:
                continue
            if length < CRC_BYTES or offset + length > len(blob):
                outside[index] = True
                continue
            stored = int.from_bytes(blob[offset : offset + CRC_BYTES], "little")
            if crc32c(blob[offset + CRC_BYTES : offset + length]) != stored:
                broken[index] = True
            elif stored != crc:
                foreign[index] = True
    return [
        ("a payload lies outside of the frame", outside),
        (frame.unreadable or "a payload does not match its checksum", broken),
        ("a payload is not the one that the row names", foreign),
    ]
