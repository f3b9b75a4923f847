"""The check: it names what is damaged, and is silent about what a crash may leave."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from storage.catalog import LmdbCatalog, Table
from storage.check import (
    Finding,
    LogCounts,
    NotADataDirectoryError,
    Report,
    Severity,
    assert_clean,
    check_directory,
)
from storage.directory import FORMAT_FILE, open_identity
from storage.errors import DamageError, DiskError, FormatVersionError
from storage.files import FILE_MODE, Files, OsFiles
from storage.frame import HEADER, HEADER_BYTES, Frame, crc32c, encode
from storage.message_log import MessageLog
from storage.rows import LogKind
from tests.unit.storage.samples import (
    HOUR,
    STAMP,
    append_group,
    append_rows,
    content,
    directory,
    dispatch_group,
    dispatch_log,
    flip,
    message_group,
    message_log,
    overwrite,
    schedule_group,
    schedule_log,
)
from tests.world.storage.catalog import MemoryCatalog
from tests.world.storage.faults import Fault, FaultKind, Faults, FaultyFiles
from tests.world.storage.files import SimulatedFile, SimulatedFiles

SCHEDULE = "schedule/2026-11-20T15.schedule"
DISPATCH = "dispatch/2026-11-20T15.dispatch"
FIRST, SECOND = MessageLog.path(1), MessageLog.path(6)


@pytest.fixture
def files() -> SimulatedFiles:
    files = SimulatedFiles()
    directory(files)
    return files


def checked(files: Files, **promises: object) -> list[tuple[str, str, int, int]]:
    """The findings: severity, file, and the seqs."""
    report = check_directory(files, None, **promises)  # type: ignore[arg-type]
    return [(f.severity.value, f.file, f.first_seq, f.last_seq) for f in report.findings]


def frame_ends(files: Files, path: str) -> list[int]:
    ends: list[int] = []
    check_directory(files, None, visit=lambda f: ends.append(f.end) if f.path == path else None)
    return ends


# ---- a sound directory -----------------------------------------------------------------------


def test_a_sound_directory_is_counted(files: SimulatedFiles) -> None:
    report = check_directory(files, None)
    assert report.findings == []
    assert report.is_clean
    message_bytes = sum(len(message_group(seq)[1]) for seq in range(1, 11))
    schedule_bytes = sum(len(message_group(seq)[1]) for seq in (1, 2, 3, 5, 6, 8))
    assert report.logs == {
        "messages": LogCounts(files=2, frames=4, rows=10, payload_bytes=message_bytes),
        "schedule": LogCounts(files=1, frames=2, rows=8, payload_bytes=schedule_bytes),
        "dispatch": LogCounts(files=1, frames=2, rows=3, payload_bytes=0),
        "definitions": LogCounts(),
    }
    assert_clean(files)


def test_a_new_directory_is_clean() -> None:
    files = SimulatedFiles()
    open_identity(files, random_bytes=lambda length: bytes(length - 1) + b"x")
    report = check_directory(files, None)
    assert report.is_clean
    assert report.logs["messages"] == LogCounts()


def test_every_frame_is_visited_in_order(files: SimulatedFiles) -> None:
    visited: list[Frame] = []
    check_directory(files, None, visit=visited.append)
    assert [(frame.path, frame.first_seq, frame.last_seq) for frame in visited] == [
        (FIRST, 1, 2),
        (FIRST, 3, 5),
        (SECOND, 6, 6),
        (SECOND, 7, 10),
        (SCHEDULE, 1, 3),
        (SCHEDULE, 5, 8),
        (DISPATCH, 5, 6),
        (DISPATCH, 1, 1),
    ]


def test_progress_is_told(files: SimulatedFiles) -> None:
    told: list[tuple[str, int, int]] = []
    check_directory(files, None, progress=lambda *args: told.append(args))
    assert told == [(FIRST, 0, 4), (SECOND, 1, 4), (SCHEDULE, 2, 4), (DISPATCH, 3, 4)]


@pytest.mark.damaged("a group of the message log")
def test_the_directory_of_the_system_is_checked_as_well(tmp_path: Path) -> None:
    directory(OsFiles(str(tmp_path)))
    assert_clean(tmp_path)
    flip(OsFiles(str(tmp_path)), FIRST, 0)
    with pytest.raises(AssertionError, match=r"damage: messages/0*1\.messages at 0–\d+, seq 1–2: "):
        assert_clean(str(tmp_path))


def test_nothing_is_written(files: SimulatedFiles) -> None:
    flip(files, FIRST, 0)
    faults = Faults(keep_trace=True)
    check_directory(FaultyFiles(files, faults), None)
    assert {entry.call for entry in faults.trace} <= {"open", "pread", "size", "close", "list"}


def test_the_tables_of_the_catalog_are_counted(files: SimulatedFiles) -> None:
    catalog = MemoryCatalog()
    catalog.commit({Table.KEYS: [(b"a", b""), (b"b", b"")], Table.META: [(b"m", b"")]})
    tables = check_directory(files, catalog).tables
    assert tables == {table.value: 0 for table in Table} | {"keys": 2, "meta": 1}


def test_a_catalog_that_cannot_be_read(files: SimulatedFiles, tmp_path: Path) -> None:
    catalog = LmdbCatalog(str(tmp_path), max_bytes=1 << 20)
    catalog.close()
    report = check_directory(files, catalog)
    assert {(f.file, f.severity) for f in report.findings} == {("catalog", Severity.DAMAGE)}


def test_the_report_as_json(files: SimulatedFiles) -> None:
    first_end = frame_ends(files, SCHEDULE)[0]
    flip(files, SCHEDULE, 0)
    document = json.loads(check_directory(files, MemoryCatalog()).to_json())
    assert document["root"] == "simulated"
    assert document["format_version"] == 3
    assert document["is_clean"] is False
    assert document["logs"]["messages"]["frames"] == 4
    assert document["tables"]["hours"] == 0
    (finding,) = document["findings"]
    assert finding.pop("reason").startswith("there is no header")
    assert finding == {
        "file": SCHEDULE,
        "offset": 0,
        "end": first_end,
        "first_seq": 1,
        "last_seq": 4,
        "severity": "damage",
        "is_known_damage": False,
    }


# ---- what is no data directory ---------------------------------------------------------------


def test_a_directory_without_a_format_file() -> None:
    with pytest.raises(NotADataDirectoryError, match="simulated is not a data directory"):
        check_directory(SimulatedFiles(), None)


def test_a_broken_format_file(files: SimulatedFiles) -> None:
    overwrite(files, FORMAT_FILE, 0, b"x")
    with pytest.raises(DamageError, match="FORMAT is damaged"):
        check_directory(files, None)


def test_a_frame_of_a_newer_server(files: SimulatedFiles) -> None:
    fields = list(HEADER.unpack(content(files, FIRST)[:HEADER_BYTES]))
    fields[1] = 2
    head = HEADER.pack(*fields)[:-4]
    overwrite(files, FIRST, 0, head + crc32c(head).to_bytes(4, "little"))
    with pytest.raises(FormatVersionError, match=r"1\.messages has format version 2"):
        check_directory(files, None)


# ---- damage ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [FIRST, SECOND, SCHEDULE, DISPATCH])
def test_no_byte_can_change_unnoticed(path: str) -> None:
    files = SimulatedFiles()
    directory(files)
    whole = content(files, path)
    last_frame = frame_ends(files, path)[-2]
    for offset in range(0, len(whole), 3):
        flip(files, path, offset)
        report = check_directory(files, None)
        assert report.findings, offset
        assert all(found.file == path for found in report.findings)
        # What is broken at the end of a file that may be being written is torn.
        may_be_torn = path != FIRST and offset >= last_frame
        assert may_be_torn or not report.is_clean, offset
        overwrite(files, path, 0, whole)


def test_every_frame_that_is_sound_is_still_counted(files: SimulatedFiles) -> None:
    flip(files, FIRST, 0)
    flip(files, SCHEDULE, 70)
    report = check_directory(files, None)
    assert report.logs["messages"].frames == 3
    assert report.logs["schedule"].frames == 1
    assert report.logs["dispatch"].frames == 2


def test_a_payload_is_named_by_its_seq(files: SimulatedFiles) -> None:
    payload = message_group(1, 2)[1]
    flip(files, FIRST, HEADER_BYTES + 160 + len(payload) - 1)
    (found,) = check_directory(files, None).findings
    assert (found.first_seq, found.last_seq, found.severity) == (2, 2, Severity.DAMAGE)
    assert found.reason == "a payload does not match its checksum (1 of 2 rows)"


def test_a_segment_that_is_missing(files: SimulatedFiles) -> None:
    log = message_log(files)
    list(log.read(1))
    append_group(log, 11)
    log.close()
    files.unlink(SECOND)
    assert checked(files) == [("damage", MessageLog.path(11), 6, 10)]
    # A power loss may bring back a segment that was deleted, and not its neighbour.
    assert checked(files, filed_seq=10) == [("note", MessageLog.path(11), 6, 10)]


def test_a_segment_that_was_cut(files: SimulatedFiles) -> None:
    files.open(FIRST).truncate(frame_ends(files, FIRST)[0])
    assert checked(files) == [("damage", SECOND, 3, 5)]


def test_a_segment_whose_end_is_broken(files: SimulatedFiles) -> None:
    flip(files, FIRST, frame_ends(files, FIRST)[0])
    assert checked(files) == [("damage", FIRST, 3, 5)]


def test_a_segment_that_repeats_records(files: SimulatedFiles) -> None:
    overwrite(files, MessageLog.path(9), 0, b"")
    assert checked(files) == [("damage", MessageLog.path(9), 9, 10)]


def test_a_segment_under_a_wrong_name(files: SimulatedFiles) -> None:
    files.rename(SECOND, MessageLog.path(7))
    assert ("damage", MessageLog.path(7), 6, 6) in checked(files)


def test_a_file_that_cannot_be_read_does_not_stop_the_check(files: SimulatedFiles) -> None:
    faults = Faults(Fault(3, FaultKind.IO_ERROR), only={"size"})
    report = check_directory(FaultyFiles(files, faults), None)
    assert faults.struck
    (found,) = [f for f in report.findings if f.reason.startswith("the rest was not checked")]
    assert found.file in {FIRST, SECOND, SCHEDULE, DISPATCH}
    assert report.logs["dispatch"].files == 1


def test_the_format_file_that_cannot_be_read(files: SimulatedFiles) -> None:
    with pytest.raises(DiskError):
        check_directory(FaultyFiles(files, Faults(Fault(1, FaultKind.IO_ERROR))), None)


# ---- no damage -------------------------------------------------------------------------------


def test_a_torn_tail(files: SimulatedFiles) -> None:
    for path in (SECOND, SCHEDULE, DISPATCH):
        overwrite(files, path, len(content(files, path)), b"torn")
    report = check_directory(files, None)
    assert report.is_clean
    assert [(f.file, f.severity) for f in report.findings] == [
        (SECOND, Severity.TORN_TAIL),
        (SCHEDULE, Severity.TORN_TAIL),
        (DISPATCH, Severity.TORN_TAIL),
    ]


def test_the_preallocated_tail_and_the_spare(files: SimulatedFiles) -> None:
    overwrite(files, SECOND, len(content(files, SECOND)), bytes(5000))
    overwrite(files, "messages/spare", 0, bytes(5000))
    overwrite(files, "messages/spare.new", 0, bytes(50))
    overwrite(files, MessageLog.path(11), 0, bytes(5000))
    assert checked(files) == []


def test_what_is_left_of_a_group_that_was_refused(files: SimulatedFiles) -> None:
    overwrite(files, FIRST, len(content(files, FIRST)), b"left over")
    assert checked(files) == [("note", FIRST, 6, 5)]


def test_files_of_other_names_are_notes(files: SimulatedFiles) -> None:
    names = [FIRST + ".damaged", "schedule/notes", "dispatch/x.schedule"]
    for name in names:
        overwrite(files, name, 0, b"x")
    assert sorted(found[1] for found in checked(files)) == sorted(names)
    assert check_directory(files, None).is_clean


def test_what_is_behind_the_last_checkpoint_may_be_broken(files: SimulatedFiles) -> None:
    (first, _) = frame_ends(files, SCHEDULE)
    schedule = schedule_log(files)
    append_rows(schedule, schedule.size(HOUR), *schedule_group([9]))
    for offset in (first, first + 70):
        flip(files, SCHEDULE, offset)
        assert checked(files)[0][0] == "damage"
        assert [found[0] for found in checked(files, committed={SCHEDULE: first})] == ["torn tail"]
        assert [found[0] for found in checked(files, committed={})] == ["torn tail"]
        assert [found[0] for found in checked(files, committed={SCHEDULE: first + 8})] == ["damage"]
        flip(files, SCHEDULE, offset)


def test_the_end_of_what_a_checkpoint_covers_is_never_torn(files: SimulatedFiles) -> None:
    first, second = frame_ends(files, SCHEDULE)
    flip(files, SCHEDULE, first)
    assert [found[0] for found in checked(files)] == ["torn tail"]
    assert [found[0] for found in checked(files, committed={SCHEDULE: second})] == ["damage"]


def test_a_hole_that_a_power_loss_left_in_a_dispatch_log(files: SimulatedFiles) -> None:
    flip(files, DISPATCH, 0)
    assert_clean(files, after_power_loss=True)
    with pytest.raises(AssertionError):
        assert_clean(files)


@pytest.mark.parametrize("seed", range(30))
def test_any_crash_leaves_a_clean_directory(seed: int) -> None:
    disk = SimulatedFiles(rng=random.Random(seed))
    directory(disk)
    log = message_log(disk)
    list(log.read(1))
    append_group(log, 11, 5)
    schedule, dispatch = schedule_log(disk), dispatch_log(disk)
    committed = {SCHEDULE: schedule.size(HOUR)}
    append_rows(schedule, schedule.size(HOUR), *schedule_group([9, 10]))
    append_rows(schedule, schedule.size(HOUR), *schedule_group([11, 12]))
    append_rows(dispatch, dispatch.size(HOUR), dispatch_group([3]))
    report = check_directory(disk.crash(), None, committed=committed)
    report.assert_clean()


# ---- beside a server -------------------------------------------------------------------------


class BusyFiles(SimulatedFiles):
    """Does something the first time that a file is read, as a server might."""

    def __init__(self) -> None:
        super().__init__()
        self.path = ""
        self.action: Callable[[], None] = lambda: None
        self.before_open = False

    def open(self, path: str, *, create: bool = False, mode: int = FILE_MODE) -> SimulatedFile:
        if path == self.path and self.before_open:
            self._act()
        file = super().open(path, create=create, mode=mode)
        if path == self.path:
            inner = file.pread

            def pread(length: int, offset: int) -> bytes:
                data = inner(length, offset)
                if self.path:
                    self._act()
                return data

            file.pread = pread  # type: ignore[method-assign]
        return file

    def _act(self) -> None:
        self.path = ""
        self.action()


def test_a_frame_that_is_read_while_it_is_written_is_read_again() -> None:
    files = BusyFiles()
    directory(files)
    whole = content(files, SECOND)
    first_end = frame_ends(files, SECOND)[0]
    # One write is not one step for a reader. While the check looks, the rest of the frame arrives,
    # and another frame behind it: by then it would look like damage.
    overwrite(files, SECOND, first_end + 64, bytes(len(whole) - first_end - 64))
    files.path = SECOND

    def action() -> None:
        overwrite(files, SECOND, 0, whole)
        rows, payload = message_group(11)
        frame = encode(
            LogKind.MESSAGE,
            rows.tobytes(),
            payload,
            first_seq=11,
            last_seq=11,
            created_ms=1,
            stamp=STAMP,
        )
        overwrite(files, SECOND, len(whole), frame)

    files.action = action
    report = check_directory(files, None)
    assert report.findings == []
    assert report.logs["messages"].rows == 11


@pytest.mark.parametrize("path", [FIRST, SCHEDULE, DISPATCH])
def test_a_file_that_is_deleted_meanwhile(path: str) -> None:
    files = BusyFiles()
    directory(files)
    files.path, files.before_open = path, True
    files.action = lambda: files.unlink(path)
    assert check_directory(files, None).findings == []


# ---- rows that verify and cannot be true -----------------------------------------------------


def test_a_delivery_that_was_recorded_twice_is_a_note(files: SimulatedFiles) -> None:
    log = dispatch_log(files)
    append_rows(log, log.size(HOUR), dispatch_group([5, 1]))
    append_rows(log, log.size(HOUR), dispatch_group([5], subscription_id=2))
    report = check_directory(files, None)
    assert [(f.reason, f.severity) for f in report.findings] == [
        ("2 deliveries are recorded more than once", Severity.NOTE)
    ]


def test_a_finding_reads_well() -> None:
    found = Finding("file", 8, 16, "why", 3, 0, Severity.TORN_TAIL)
    assert str(found) == "torn tail: file at 8–16, seq 3–?: why"
    assert Report("root", 1, findings=[found]).is_clean
