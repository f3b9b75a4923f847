"""The settler: recorded deliveries survive, torn ones do not hide what is written behind them."""

from __future__ import annotations

import random

import numpy as np
import pytest

from delayserver.delivery.settler import DISPATCH_ROW, Settler
from storage.errors import DiskFullError
from storage.frame import Damage, Frame
from storage.hour_log import HourLog
from storage.notes import Note, encode_note
from storage.rows import DISPATCH_DTYPE, HOUR_MS, LogKind, Outcome
from tests.unit.fakes import HOUR, STAMP, START_MS, Disk, dispatch_row
from tests.world.storage.faults import Fault, FaultKind, Faults, FaultyFiles, Moment
from tests.world.storage.files import SimulatedFiles


def recorded(disk: Disk, hour: int = HOUR) -> list[int]:
    """Seqs in an hour's dispatch log, as a new process reads them."""
    log = HourLog(disk.files, LogKind.DISPATCH, stamp=STAMP)
    found = list(log.scan(hour))
    assert all(isinstance(one, Frame) for one in found), found
    return [seq for one in found if isinstance(one, Frame) for seq in one.rows["seq"].tolist()]


def test_a_row_is_the_dtype() -> None:
    row = np.frombuffer(dispatch_row(7, subscription_id=3), DISPATCH_DTYPE)[0]
    assert row.tolist() == (7, 7, START_MS, START_MS, 3, 1, Outcome.DELIVERED, 0)
    assert DISPATCH_ROW.size == DISPATCH_DTYPE.itemsize


def test_rows_go_to_the_logs_of_their_hours() -> None:
    disk = Disk()
    later = dispatch_row(5, due_ms=START_MS + HOUR_MS)
    rows = {HOUR: [dispatch_row(9), dispatch_row(4)], HOUR + 1: [later]}
    disk.settler.write(rows, START_MS)
    disk.settler.write({HOUR: [dispatch_row(6)]}, START_MS)
    assert rows == {}
    assert recorded(disk) == [9, 4, 6]
    assert recorded(disk, HOUR + 1) == [5]
    assert disk.settler.hours() == [HOUR, HOUR + 1]
    frame = next(HourLog(disk.files, LogKind.DISPATCH, stamp=STAMP).scan(HOUR))
    assert isinstance(frame, Frame)
    assert (frame.header.first_seq, frame.header.last_seq) == (4, 9)


def test_what_was_synced_survives_a_power_loss() -> None:
    files = SimulatedFiles()
    disk = Disk(files)
    assert not disk.settler.unsynced
    disk.settler.write({HOUR: [dispatch_row(1)]}, START_MS)
    assert disk.settler.unsynced
    disk.settler.sync()
    assert not disk.settler.unsynced
    for _ in range(10):
        assert recorded(Disk(files.crash())) == [1]


def test_a_settler_goes_on_behind_what_an_earlier_process_wrote() -> None:
    files = SimulatedFiles()
    Disk(files).settle(HOUR, dispatch_row(1))
    disk = Disk(files.kill())
    disk.settle(HOUR, dispatch_row(2))
    assert recorded(disk) == [1, 2]


def test_recovery_cuts_a_torn_tail_and_syncs_what_is_intact() -> None:
    files = SimulatedFiles()
    disk = Disk(files)
    disk.settler.write({HOUR: [dispatch_row(1)]}, START_MS)
    path = disk.dispatch.path(HOUR)
    size = disk.dispatch.size(HOUR)
    file = files.open(path)
    file.pwrite([b"DLY1 torn"], size)
    machine = files.kill()
    disk = Disk(machine)
    assert disk.settler.recover([HOUR, HOUR + 1]) == []
    assert disk.dispatch.size(HOUR) == size
    disk = Disk(machine.crash())
    disk.settle(HOUR, dispatch_row(2))
    assert recorded(disk) == [1, 2]


def test_recovery_makes_durable_what_a_killed_process_left_in_the_page_cache() -> None:
    files = SimulatedFiles()
    Disk(files).settler.write({HOUR: [dispatch_row(1)]}, START_MS)
    machine = files.kill()
    Disk(machine).settler.recover([HOUR])
    for _ in range(10):
        assert recorded(Disk(machine.crash())) == [1]


@pytest.mark.damaged("a frame of the dispatch log")
def test_recovery_reports_damage_before_valid_rows_and_keeps_them() -> None:
    files = SimulatedFiles()
    disk = Disk(files)
    disk.settle(HOUR, dispatch_row(1))
    disk.settle(HOUR, dispatch_row(2))
    size = disk.dispatch.size(HOUR)
    files.open(disk.dispatch.path(HOUR)).pwrite([b"\xff"], 70)
    disk = Disk(files.kill())
    [damage] = disk.settler.recover([HOUR])
    assert (damage.path, damage.offset, damage.torn) == (disk.dispatch.path(HOUR), 0, False)
    assert disk.dispatch.size(HOUR) == size
    found = list(disk.dispatch.scan(HOUR))
    assert [type(one) for one in found] == [Damage, Frame]


@pytest.mark.parametrize(
    "broken",
    [pytest.param(3, marks=pytest.mark.damaged("a frame of the dispatch log")), 20, 29],
)
def test_of_many_frames_only_what_was_synced_before_the_last_is_damage(broken: int) -> None:
    files = SimulatedFiles()
    disk = Disk(files)
    for seq in range(30):
        disk.settler.write({HOUR: [dispatch_row(seq + 1)]}, START_MS)
        if seq == 14:
            disk.settler.sync()
    length = disk.dispatch.size(HOUR) // 30
    files.open(disk.dispatch.path(HOUR)).pwrite([b"\xff"], broken * length + 70)
    disk = Disk(files.kill())
    damage = disk.settler.recover([HOUR])
    # What stands behind the sync may never have been written whole: it is cut, with all behind it.
    assert [one.offset for one in damage] == ([3 * length] if broken == 3 else [])
    assert disk.dispatch.size(HOUR) == (30 * length if broken == 3 else broken * length)


def test_what_a_full_disk_refused_is_still_to_be_written() -> None:
    files = SimulatedFiles()
    disk = Disk(files)
    faults = Faults(
        Fault(at=1, kind=FaultKind.NO_SPACE, moment=Moment.MIDDLE, partial_bytes=64),
        Fault(at=4, kind=FaultKind.NO_SPACE, moment=Moment.MIDDLE, partial_bytes=13),
        only=["pwrite"],
    )
    settler = Settler(HourLog(FaultyFiles(files, faults), LogKind.DISPATCH, stamp=STAMP))
    first = {HOUR: [dispatch_row(1)]}
    with pytest.raises(DiskFullError):
        settler.write(first, START_MS)
    settler.write(first, START_MS)
    rows = {HOUR + 1: [dispatch_row(2, due_ms=START_MS + HOUR_MS)], HOUR: [dispatch_row(3)]}
    with pytest.raises(DiskFullError):
        settler.write(rows, START_MS)
    assert list(rows) == [HOUR]
    settler.write(rows, START_MS)
    settler.sync()
    assert recorded(disk) == [1, 3]
    assert recorded(disk, HOUR + 1) == [2]


def test_a_torn_tail_that_recovery_had_no_reason_to_look_at_hides_nothing() -> None:
    files = SimulatedFiles()
    disk = Disk(files)
    disk.settle(HOUR, dispatch_row(1))
    files.open(disk.dispatch.path(HOUR)).pwrite([b"torn"], disk.dispatch.size(HOUR))
    disk = Disk(files.kill())
    disk.settle(HOUR, dispatch_row(2))
    assert recorded(disk) == [1, 2]


def test_an_hour_that_was_forgotten_may_be_deleted_and_begin_again() -> None:
    disk = Disk()
    disk.settle(HOUR, dispatch_row(1))
    disk.settler.release_hour(HOUR)
    disk.replay.purging.delete_files(HOUR)
    disk.settle(HOUR, dispatch_row(2))
    assert recorded(disk) == [2]


def test_a_hole_in_what_an_earlier_process_wrote_is_no_damage() -> None:
    """Nobody has looked at the hour before more is written to it, so none of it is synced."""
    for seed in range(200):
        files = SimulatedFiles(rng=random.Random(seed))
        disk = Disk(files)
        disk.settler.write({HOUR: [dispatch_row(1)]}, START_MS)
        disk.settler.write({HOUR: [dispatch_row(2)]}, START_MS)
        files = files.kill()
        disk = Disk(files)
        disk.settler.write({HOUR: [dispatch_row(3)]}, START_MS)
        again = Disk(files.crash())
        assert again.settler.recover([HOUR]) == [], seed
        assert recorded(again) in ([], [1], [1, 2], [1, 2, 3])


NOTE = encode_note(Note(HOUR, 2, 1, 1, START_MS, 7, 204, "thanks"))


def with_notes(files: SimulatedFiles) -> tuple[Disk, int]:
    """A frame that was synced, and one with a note that was not; where the latter begins."""
    disk = Disk(files)
    disk.settler.write({HOUR: [dispatch_row(1), NOTE]}, START_MS)
    disk.settler.sync()
    offset = disk.dispatch.size(HOUR)
    disk.settler.write({HOUR: [dispatch_row(2), NOTE]}, START_MS)
    return disk, offset


@pytest.mark.parametrize("how", ["cut", "zeros"])
def test_a_frame_whose_notes_are_torn_is_torn(how: str) -> None:
    """Else what is written next would stand within it, where nobody looks, or read as damage."""
    files = SimulatedFiles()
    disk, offset = with_notes(files)
    file = disk.files.open(disk.dispatch.path(HOUR))
    size = file.size()
    if how == "cut":
        file.truncate(size - 9)
    else:
        file.pwrite([bytes(9)], size - 16)
    again = Disk(files.kill())
    assert again.settler.recover([HOUR]) == []
    assert [one.offset for one in again.settler.torn] == [offset]
    again.settler.write({HOUR: [dispatch_row(3), NOTE]}, START_MS)
    assert recorded(again) == [1, 3]


@pytest.mark.unchecked("notes are damaged")
def test_notes_that_were_synced_and_are_damaged_cost_no_row() -> None:
    files = SimulatedFiles()
    disk, _ = with_notes(files)
    disk.settler.sync()
    disk.settler.write({HOUR: [dispatch_row(3), NOTE]}, START_MS)
    file = disk.files.open(disk.dispatch.path(HOUR))
    file.pwrite([b"X"], file.pread(file.size(), 0).index(b"thanks"))
    again = Disk(files.kill())
    assert again.settler.recover([HOUR]) == [] and again.settler.torn == []
    assert recorded(again) == [1, 2, 3]
