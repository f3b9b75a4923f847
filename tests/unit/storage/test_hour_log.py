"""The logs by hour: appended, cut, searched and let go, whatever the disk does."""

import random
from collections.abc import Sequence

import numpy as np
import pytest

from storage import hour_log
from storage.buckets import bucket_path, hour_name, parse_bucket_file, parse_hour
from storage.errors import DamageError, DiskFullError, SyncError
from storage.files import File
from storage.frame import Damage, Frame, unseal
from storage.hour_log import HourLog
from storage.kept import ENTRY_BYTES
from storage.rows import FLAG_REMOVAL, SCHEDULE_DTYPE, LogKind, concatenate
from tests.unit.storage.samples import (
    HOUR,
    append_rows,
    body,
    content,
    dispatch_group,
    dispatch_log,
    flip,
    message_log,
    overwrite,
    schedule_group,
    schedule_log,
)
from tests.world.storage.faults import Fault, FaultKind, Faults, FaultyFiles, Moment
from tests.world.storage.files import SimulatedFiles

PATH = "schedule/2026-11-20T15.schedule"


@pytest.fixture
def files() -> SimulatedFiles:
    return SimulatedFiles()


@pytest.fixture
def log(files: SimulatedFiles) -> HourLog:
    return schedule_log(files)


def append(log: HourLog, offset: int, seqs: list[int], hour: int = HOUR) -> int:
    return append_rows(log, offset, *schedule_group(seqs, hour=hour), hour=hour)


def filled(log: HourLog, *groups: list[int], hour: int = HOUR) -> list[int]:
    """Append one frame per group; returns where each ends, after a 0."""
    ends = [0]
    for seqs in groups:
        ends.append(append(log, ends[-1], seqs, hour))
    return ends


def outline(log: HourLog, hour: int = HOUR) -> list[tuple[str, int, int]]:
    return [
        ("frame" if isinstance(found, Frame) else "torn" if found.torn else "damage",
         found.offset, found.end)
        for found in log.scan(hour)
    ]  # fmt: skip


# ---- names -----------------------------------------------------------------------------------


def test_a_file_is_named_by_its_utc_hour(log: HourLog) -> None:
    assert log.path(HOUR) == bucket_path(LogKind.SCHEDULE, HOUR) == PATH
    assert bucket_path(LogKind.DISPATCH, 0) == "dispatch/1970-01-01T00.dispatch"


@pytest.mark.parametrize(
    "name",
    [
        "notes.schedule",
        "2026-11-20T15.dispatch",
        "2026-11-20T15.schedule.bak",
        "2026-11-20T5.schedule",
        "2026-11-20T24.schedule",
        "2026-02-30T01.schedule",
        "2026-11-20T15",
    ],
)
def test_other_names_are_left_alone(files: SimulatedFiles, log: HourLog, name: str) -> None:
    overwrite(files, f"schedule/{name}", 0, b"x")
    assert parse_bucket_file(LogKind.SCHEDULE, name) is None
    assert log.buckets() == []


def test_an_hour_goes_by_its_name_in_utc() -> None:
    assert hour_name(HOUR) == "2026-11-20T15"
    assert parse_hour("2026-11-20T15") == HOUR


@pytest.mark.parametrize(
    "name", ["", "2026-11-20T24", "2026-11-20", "2026-11-20T5", "1969-12-31T23", "2026-02-29T00"]
)
def test_other_names_are_no_hours(name: str) -> None:
    assert parse_hour(name) is None


def test_hours_are_in_order(log: HourLog) -> None:
    for hour in (HOUR + 30, HOUR, HOUR - 9):
        append(log, 0, [1], hour)
    assert log.buckets() == [HOUR - 9, HOUR, HOUR + 30]


# ---- append, sync, cut -----------------------------------------------------------------------


def test_append_tells_where_the_payloads_are(log: HourLog) -> None:
    rows, payload = schedule_group([3, 5])
    start, end = log.append(
        HOUR, rows.tobytes(), payload, offset=0, first_seq=3, last_seq=5, created_ms=9
    )
    (found,) = log.scan(HOUR, payload=True)
    assert isinstance(found, Frame)
    assert (found.payload_start, found.end) == (start, end)
    assert log.read(HOUR, start, len(payload)) == payload == found.payload
    assert found.header.created_ms == 9
    assert log.size(HOUR) == end


def test_an_hour_without_a_file_is_empty(log: HourLog) -> None:
    assert log.size(HOUR) == 0
    assert list(log.scan(HOUR)) == []
    assert log.read(HOUR, 0, 10) == b""
    assert log.find(HOUR, 1) is None
    log.touch(HOUR)
    log.cut(HOUR, 0)
    log.release(HOUR)
    log.delete(HOUR)
    log.sync()
    assert log.buckets() == []


def test_a_frame_begins_where_one_can_be_found_again(log: HourLog) -> None:
    with pytest.raises(AssertionError):
        append(log, 4, [1])


def test_nothing_is_durable_before_the_sync(files: SimulatedFiles, log: HourLog) -> None:
    ends = filled(log, [1], [2, 3])
    lengths = set()
    for _ in range(200):
        lengths.add(schedule_log(files.crash()).size(HOUR))
        files.is_off = False
    assert {0, ends[-1]} < lengths
    log.sync()
    for _ in range(50):
        assert outline(schedule_log(files.crash())) == [
            ("frame", 0, ends[1]),
            ("frame", ends[1], ends[2]),
        ]
        files.is_off = False


def test_a_sync_covers_what_was_touched(files: SimulatedFiles, log: HourLog) -> None:
    end = filled(log, [1])[-1]
    killed = files.kill()
    again = schedule_log(killed)
    again.touch(HOUR)
    again.sync()
    assert all(schedule_log(killed.crash()).size(HOUR) == end for _ in range(20))


def test_a_failed_sync_is_told(files: SimulatedFiles) -> None:
    faults = Faults(Fault(1, FaultKind.IO_ERROR), only={"fdatasync"})
    log = schedule_log(FaultyFiles(files, faults))
    filled(log, [1])
    with pytest.raises(SyncError):
        log.sync()


def test_a_cut_takes_off_the_end(files: SimulatedFiles, log: HourLog) -> None:
    ends = filled(log, [1], [2], [3])
    log.cut(HOUR, ends[2])
    log.sync()
    assert [schedule_log(files.crash()).size(HOUR) for _ in range(20)] == [ends[2]] * 20


def test_a_cut_never_makes_a_file_longer(log: HourLog) -> None:
    end = filled(log, [1])[-1]
    log.cut(HOUR, end + 100)
    assert log.size(HOUR) == end


def test_filing_again_after_a_cut_gives_the_same_bytes(files: SimulatedFiles, log: HourLog) -> None:
    ends = filled(log, [1], [2], [3, 4])
    whole = content(files, PATH)
    log.cut(HOUR, ends[1])
    append(log, append(log, ends[1], [2]), [3, 4])
    assert content(files, PATH) == whole


@pytest.mark.parametrize("moment", Moment)
def test_a_full_disk_at_every_call_then_the_same_again(moment: Moment) -> None:
    for call in range(1, 30):
        disk = SimulatedFiles(rng=random.Random(call))
        faults = Faults(Fault(call, FaultKind.NO_SPACE, moment))
        files = FaultyFiles(disk, faults)
        try:
            log = schedule_log(files)
        except DiskFullError:
            log = schedule_log(files)
        ends = {HOUR: 0, HOUR + 1: 0}
        for number, hour in enumerate((HOUR, HOUR, HOUR + 1, HOUR, HOUR + 1)):
            seqs = [number * 3 + 1, number * 3 + 2]
            try:
                ends[hour] = append(log, ends[hour], seqs, hour)
            except DiskFullError:
                # More has come in the meantime.
                ends[hour] = append(log, ends[hour], [*seqs, seqs[-1] + 1], hour)
        log.sync()
        after = schedule_log(disk.crash())
        for hour, end in ends.items():
            assert all(isinstance(found, Frame) for found in after.scan(hour))
            assert after.size(hour) == end
        if not faults.struck and faults.call_count < call:
            return
    pytest.fail("the calls never came to an end")


def test_a_crash_leaves_a_torn_tail_or_a_hole_behind_what_was_synced() -> None:
    outcomes: set[str] = set()
    for seed in range(300):
        disk = SimulatedFiles(rng=random.Random(seed))
        log = schedule_log(disk)
        synced = filled(log, [1], [2])[-1]
        log.sync()
        append(log, append(log, synced, [3]), [4])
        after = schedule_log(disk.crash())
        found = outline(after)
        assert [(what, end) for what, _, end in found[:2]][-1] == ("frame", synced)
        assert all(offset >= synced for what, offset, _ in found if what != "frame")
        outcomes.update(what for what, _, _ in found)
        after.cut(HOUR, synced)
        assert all(what == "frame" for what, _, _ in outline(after))
    assert outcomes == {"frame", "torn", "damage"}


@pytest.mark.parametrize("length", range(1, 140, 7))
def test_zeros_that_a_crash_left_are_cut_so_that_what_follows_is_found(
    files: SimulatedFiles, length: int
) -> None:
    """The new length reached the disk, the data did not."""
    log = dispatch_log(files)
    end = append_rows(log, 0, dispatch_group([9, 12]))
    overwrite(files, log.path(HOUR), end, bytes(length))
    for found in log.scan(HOUR):
        if isinstance(found, Damage) and found.torn:
            log.cut(HOUR, found.offset)
    append_rows(log, log.size(HOUR), dispatch_group([3]))
    assert [found.first_seq for found in dispatch_log(files).scan(HOUR)] == [9, 3]


def test_damage_in_the_dispatch_log_takes_no_other_frame_with_it(files: SimulatedFiles) -> None:
    log = dispatch_log(files)
    end = 0
    ends = [end := append_rows(log, end, dispatch_group(seqs)) for seqs in ([80], [90], [7], [8])]
    flip(files, log.path(HOUR), ends[0])
    assert outline(log) == [
        ("frame", 0, ends[0]),
        ("damage", ends[0], ends[1]),
        ("frame", ends[1], ends[2]),
        ("frame", ends[2], ends[3]),
    ]


# ---- find ------------------------------------------------------------------------------------


def found_body(log: HourLog, seq: int) -> bytes | None:
    found = log.find(HOUR, seq)
    # Among others, and alone.
    near = np.array([seq + 1, 2, seq, 1 << 40, seq], np.uint64)
    offsets, lengths, _ = log.find_payloads(HOUR, near)
    assert lengths[3] == 0
    assert (offsets[2], lengths[2]) == (offsets[4], lengths[4])
    if found is None:
        assert lengths[2] == 0
        return None
    row, offset = found
    assert (offsets[2], lengths[2]) == (offset, row["payload_length"])
    assert row["seq"] == seq
    assert not row["flags"] & FLAG_REMOVAL
    return unseal(log.read(HOUR, offset, int(row["payload_length"])))


def test_every_entry_is_found_and_nothing_else(log: HourLog) -> None:
    groups = [[2, 3, 7], [11], [20, 24, 25, 31]]
    filled(log, *groups)
    for seq in range(40):
        expected = unseal(body(seq)) if any(seq in group for group in groups) else None
        assert found_body(log, seq) == expected


def test_what_is_appended_later_is_found(files: SimulatedFiles, log: HourLog) -> None:
    writer = schedule_log(files)
    end = 0
    for seq in range(1, 20):
        assert found_body(log, seq) is None
        end = append(writer, end, [seq])
        assert found_body(log, seq) == unseal(body(seq))


def test_tombstones_are_not_found(log: HourLog) -> None:
    rows, payload = schedule_group([1, 2], removed={3: 1})
    append_rows(log, 0, rows, payload)
    assert found_body(log, 3) is None
    assert found_body(log, 1) == unseal(body(1))


@pytest.mark.parametrize("tombstone_first", [False, True])
def test_a_move_within_the_hour_is_found_once(log: HourLog, tombstone_first: bool) -> None:
    # Record 5 removes row 2 and is a row of its own.
    rows, payload = schedule_group([2, 5, 6], removed={5: 2})
    if tombstone_first:
        rows[[1, 2]] = rows[[2, 1]]
    assert rows["seq"].tolist() == [2, 5, 5, 6]
    append_rows(log, 0, rows, payload)
    assert [found_body(log, seq) for seq in (2, 5, 6)] == [unseal(body(s)) for s in (2, 5, 6)]


def test_find_names_a_frame_that_was_damaged_since(files: SimulatedFiles, log: HourLog) -> None:
    ends = filled(log, [1, 2], [5, 6])
    assert found_body(log, 1) is not None
    flip(files, PATH, ends[1] + 70)
    message = rf"{PATH} is damaged at offset {ends[1]}, seq 5–5"
    with pytest.raises(DamageError, match=message):
        log.find(HOUR, 5)
    _, lengths, [error] = log.find_payloads(HOUR, np.array([5, 1, 6], np.uint64))
    assert (lengths > 0).tolist() == [False, True, False]
    with pytest.raises(DamageError, match=message):
        raise error
    assert found_body(log, 1) is not None


@pytest.mark.parametrize("indexed_before", [False, True])
@pytest.mark.parametrize(
    ("place", "lost"),
    [
        # Nothing is known of what stood between the frames around it.
        (10, [3, 5, 6, 8]),
        # Its header tells which seqs it holds.
        (70, [5, 6]),
    ],
)
def test_find_names_a_frame_that_was_damaged_before(
    files: SimulatedFiles, log: HourLog, indexed_before: bool, place: int, lost: list[int]
) -> None:
    writer = schedule_log(files)
    ends = filled(writer, [1, 2])
    if indexed_before:
        assert found_body(log, 1) is not None
    append(writer, append(writer, ends[1], [5, 6]), [9])
    flip(files, PATH, ends[1] + place)
    for seq in lost:
        with pytest.raises(DamageError):
            log.find(HOUR, seq)
    for seq in (1, 2, 9):
        assert found_body(log, seq) is not None
    for seq in {3, 8, 10}.difference(lost):
        assert log.find(HOUR, seq) is None


LONG = 100
"""Rows of a frame that is longer than a sector."""


def test_what_could_not_be_read_for_a_moment_is_found_again(
    files: SimulatedFiles, log: HourLog
) -> None:
    ends = filled(log, *(list(range(at, at + LONG)) for at in (1, 201, 401, 601, 801)))
    files.fail_reads(PATH, ends[1] + 10, ends[3])
    for seq in (201, 300, 401, 500):
        with pytest.raises(DamageError, match=f"seq {seq}–{seq}: .*cannot be read"):
            log.find(HOUR, seq)
    _, lengths, damage = log.find_payloads(HOUR, np.array([1, 300, 401, 801], np.uint64))
    assert (lengths > 0).tolist() == [True, False, False, True]
    assert [error.first_seq for error in damage] == [300, 401]
    files.mend_reads()
    assert all(found_body(log, seq) for seq in (1, 201, 300, 401, 500, 601, 801))
    _, lengths, damage = log.find_payloads(HOUR, np.array([201, 300, 401], np.uint64))
    assert (lengths > 0).all() and damage == []


def test_an_hour_grows_while_its_end_cannot_be_read(files: SimulatedFiles, log: HourLog) -> None:
    ends = filled(log, *(list(range(at, at + LONG)) for at in (1, 201)))
    end = ends[2]
    files.fail_reads(PATH, ends[1], end)
    for seq in (401, 601):
        with pytest.raises(DamageError):
            log.find(HOUR, 300)
        with pytest.raises(DamageError):
            log.find(HOUR, seq)  # nothing is known of what comes behind
        end = append(log, end, list(range(seq, seq + LONG)))
        # A sector that it shares with what cannot be read is lost to it, too.
        assert log.find(HOUR, 1) is not None
    assert found_body(log, 650) is not None
    files.mend_reads()
    assert all(found_body(log, seq) for seq in (1, 201, 401, 500, 601))


def noted_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The length of each read from now on."""
    lengths: list[int] = []
    read = HourLog.read

    def noting(self: HourLog, hour: int, offset: int, length: int) -> bytes:
        lengths.append(length)
        return read(self, hour, offset, length)

    monkeypatch.setattr(HourLog, "read", noting)
    return lengths


def test_a_row_is_found_without_reading_other_frames(
    log: HourLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour may hold gigabytes, and somebody waits for the first that is looked for in it."""
    groups = [list(range(start, start + 500)) for start in range(1, 10_001, 500)]
    filled(log, *groups)
    reads = noted_reads(monkeypatch)
    assert log.find(HOUR, 7_777) is not None
    assert sum(reads) < log.size(HOUR) / 5


def test_neighbours_are_found_by_reading_their_frame_once(
    log: HourLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(log, [1, 2, 3], [4, 5, 6])
    assert log.find(HOUR, 2) is not None
    reads = noted_reads(monkeypatch)
    assert log.find(HOUR, 3) is not None
    assert reads == []
    assert log.find(HOUR, 4) is not None
    assert len(reads) == 2
    log.cut(HOUR, 0)
    assert log.find(HOUR, 3) is None


def test_the_index_forgets_what_was_cut(log: HourLog) -> None:
    ends = filled(log, [1], [2], [3])
    assert found_body(log, 3) is not None
    log.cut(HOUR, ends[1])
    assert found_body(log, 3) is None
    append(log, ends[1], [2, 3, 4])
    assert found_body(log, 4) == unseal(body(4))


# ---- open files ------------------------------------------------------------------------------


def open_count(faults: Faults) -> int:
    calls = [entry.call for entry in faults.trace]
    return calls.count("open") - calls.count("close")


def test_a_bounded_number_of_files_is_open(files: SimulatedFiles) -> None:
    faults = Faults(keep_trace=True)
    log = schedule_log(FaultyFiles(files, faults), open_files_max=3)
    for hour in range(HOUR, HOUR + 10):
        append(log, 0, [hour], hour)
    # A file that does not exist is asked for once before it is made.
    assert open_count(faults) - 10 <= 3
    assert all(log.find(hour, hour) for hour in range(HOUR, HOUR + 10))
    log.sync()
    after = schedule_log(files.crash())
    assert [after.size(hour) > 0 for hour in range(HOUR, HOUR + 10)] == [True] * 10


def test_the_file_that_was_used_last_stays_open(files: SimulatedFiles) -> None:
    for hour in (1, 2, 3):
        append(schedule_log(files), 0, [hour], hour)
    faults = Faults(keep_trace=True, only={"open"})
    log = schedule_log(FaultyFiles(files, faults), open_files_max=2)
    for hour in (1, 2, 1, 3, 1):
        log.size(hour)
    assert [entry.path for entry in faults.trace] == [log.path(hour) for hour in (1, 2, 3)]


def test_a_file_is_not_closed_between_a_write_and_its_sync(files: SimulatedFiles) -> None:
    """Else an error of writing it back need not be told to anybody."""
    rng = random.Random(0)
    for open_files_max in (1, 2, 3, 10):
        disk = SimulatedFiles(rng=random.Random(open_files_max))
        faults = Faults(keep_trace=True)
        log = schedule_log(FaultyFiles(disk, faults), open_files_max=open_files_max)
        ends = dict.fromkeys(range(12), 0)
        for step in range(1, 400):
            hour = rng.randrange(12)
            match rng.randrange(12):
                case 0:
                    log.sync()
                case 1:
                    log.cut(hour, ends[hour])
                case 2:
                    log.rewrite(hour, 0)
                case 3:
                    log.release(hour)
                case 4 | 5:
                    assert log.size(hour) == ends[hour]
                case _:
                    ends[hour] = append(log, ends[hour], [step], hour)
            assert len(log._clean) + len(log._dirty) <= open_files_max
        dirty: set[str] = set()
        for entry in faults.trace:
            if entry.call in ("pwrite", "truncate"):
                dirty.add(entry.path)
            elif entry.call == "fdatasync":
                dirty.discard(entry.path)
            assert entry.call != "close" or entry.path not in dirty
        log.sync()
        after = schedule_log(disk.crash())
        assert {hour: after.size(hour) for hour in range(12)} == ends


def test_files_that_were_written_are_synced_together(files: SimulatedFiles) -> None:
    batches: list[list[str]] = []

    class Noting(SimulatedFiles):
        def sync_all(self, files: Sequence[File]) -> None:
            batches.append([file.path for file in files])
            super().sync_all(files)

    log = schedule_log(Noting(), open_files_max=8)
    for hour in range(13):
        append(log, 0, [1], hour)
    paths = [log.path(hour) for hour in range(13)]
    # The half that was not used for longest; then others are closed without a sync.
    assert batches == [paths[:4], paths[4:8]]
    log.sync()
    assert batches[2:] == [paths[8:]]


@pytest.mark.parametrize("struck", [1, 2, 3, 4])
def test_an_error_of_any_sync_is_told_when_files_are_closed(
    files: SimulatedFiles, struck: int
) -> None:
    faults = Faults(Fault(struck, FaultKind.IO_ERROR), only={"fdatasync"})
    log = schedule_log(FaultyFiles(files, faults), open_files_max=8)
    for hour in range(8):
        append(log, 0, [1], hour)
    with pytest.raises(SyncError):
        append(log, 0, [1], 8)
    # None of them counts as synced.
    assert list(log._dirty) == list(range(8))


@pytest.mark.parametrize("struck", range(1, 21))
def test_an_error_of_any_sync_is_told(files: SimulatedFiles, struck: int) -> None:
    faults = Faults(Fault(struck, FaultKind.IO_ERROR), only={"fdatasync"})
    log = schedule_log(FaultyFiles(files, faults))
    for hour in range(20):
        append(log, 0, [1], hour)
    with pytest.raises(SyncError):
        log.sync()
    assert len(faults.struck) == 1


def test_a_scan_goes_on_when_its_file_was_closed_meanwhile(
    files: SimulatedFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.frame._READ_BYTES", 64)
    log = schedule_log(files, open_files_max=2)
    filled(log, [1], [2], [3])
    found = []
    for frame in log.scan(HOUR):
        found.append(frame.first_seq)
        for hour in range(5):
            append(log, log.size(hour), [frame.first_seq], hour)
    assert found == [1, 2, 3]


def test_what_is_known_of_files_is_bounded_by_bytes(
    files: SimulatedFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hour_log, "INDEXES_MAX_BYTES", 2 * (ENTRY_BYTES + 24 * 3))
    monkeypatch.setattr(hour_log, "DECODED_MAX_BYTES", 3 * (ENTRY_BYTES + 64 * 2))
    log = schedule_log(files)
    for hour in range(6):
        filled(log, *([seq, seq + 1] for seq in range(1, 7, 2)), hour=hour)
    for _ in range(2):
        for hour in range(6):
            assert all(log.find(hour, seq) for seq in range(1, 7))
            assert log.find(hour, 7) is None
            assert list(log._indexes) == [(hour - 1) % 6, hour][-len(log._indexes) :]
            assert len({hour for hour, _ in log._decoded}) == 1
    assert (len(log._indexes), len(log._decoded)) == (2, 3)
    # One that is larger is kept alone.
    end = filled(log, *([seq] for seq in range(1, 100)), hour=9)[-1]
    assert log.find(9, 50) is not None
    assert list(log._indexes) == [9]
    assert log.size(9) == end


def test_few_frames_are_kept(log: HourLog) -> None:
    """To forget an hour is to walk over them."""
    filled(log, *([seq] for seq in range(1, 200)))
    assert all(log.find(HOUR, seq) for seq in range(1, 200))
    assert len(log._decoded) == hour_log.DECODED_FRAMES_MAX


def test_release_syncs_what_was_written(files: SimulatedFiles, log: HourLog) -> None:
    end = filled(log, [1])[-1]
    log.release(HOUR)
    log.sync()
    assert schedule_log(files.crash()).size(HOUR) == end


def test_after_release_a_file_may_be_deleted_by_others(files: SimulatedFiles, log: HourLog) -> None:
    filled(log, [1])
    assert log.find(HOUR, 1)
    log.release(HOUR)
    schedule_log(files).delete(HOUR)
    assert log.size(HOUR) == 0
    assert log.find(HOUR, 1) is None
    append(log, 0, [7])
    assert log.find(HOUR, 1) is None
    assert found_body(log, 7) == unseal(body(7))


def test_delete_removes_the_file_and_what_is_known_of_it(
    files: SimulatedFiles, log: HourLog
) -> None:
    filled(log, [1])
    assert log.find(HOUR, 1)
    log.delete(HOUR)
    assert log.buckets() == []
    assert log.find(HOUR, 1) is None
    log.sync()


def test_close_closes_every_file(files: SimulatedFiles) -> None:
    faults = Faults(keep_trace=True)
    log = schedule_log(FaultyFiles(files, faults))
    for hour in range(3):
        append(log, 0, [1], hour)
    log.close()
    assert open_count(faults) == 3  # Those that did not exist at the first call.


def test_the_logs_do_not_see_each_others_files(files: SimulatedFiles, log: HourLog) -> None:
    filled(log, [1])
    append_rows(dispatch_log(files), 0, dispatch_group([1], hour=HOUR + 1), hour=HOUR + 1)
    message_log(files)
    assert log.buckets() == [HOUR]
    assert dispatch_log(files).buckets() == [HOUR + 1]


def test_concatenate_of_nothing_has_the_columns() -> None:
    assert concatenate([], SCHEDULE_DTYPE).dtype == SCHEDULE_DTYPE
    rows, _ = schedule_group([1, 2])
    np.testing.assert_array_equal(concatenate([rows[:1], rows[1:]], SCHEDULE_DTYPE), rows)
