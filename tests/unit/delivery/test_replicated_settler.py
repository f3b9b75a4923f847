"""The settler of a shard with replicas: a set that all share, and files that follow it."""

from __future__ import annotations

import numpy as np
import pytest

from delayserver.delivery.replicated_settler import FILES_SYNC_MS, ReplicatedSettler
from storage.errors import DiskFullError, FencedError
from storage.frame import Frame
from storage.hour_log import HourLog
from storage.replicated.settled import ROWS_MAX, SettledLog
from storage.rows import DISPATCH_DTYPE, HOUR_MS, LogKind
from storage.testing.engine import AppendOutcome, MemoryLog
from storage.testing.faults import Fault, FaultKind, Faults, FaultyFiles
from storage.testing.files import SimulatedFiles
from tests.unit.fakes import HOUR, STAMP, START_MS, Stopwatch, dispatch_row

NEVER = 1 << 62


class Replica:
    """A disk, and one process's settler on it."""

    def __init__(self, log: MemoryLog, place: int = 0, files: SimulatedFiles | None = None) -> None:
        self.files = SimulatedFiles() if files is None else files
        self.faults = Faults()
        self.log = log.another()
        self.stopwatch = Stopwatch()
        self.told: list[int] = []
        self.settler = ReplicatedSettler(
            HourLog(FaultyFiles(self.files, self.faults), LogKind.DISPATCH, stamp=STAMP),
            SettledLog(self.log, STAMP),
            place,
            self.stopwatch,
            self.told.append,
        )

    def settle(self, *seqs: int) -> None:
        self.settler.write({HOUR: [dispatch_row(seq) for seq in seqs]}, START_MS)

    def recorded(self, hour: int = HOUR) -> list[int]:
        log = HourLog(self.files, LogKind.DISPATCH, stamp=STAMP)
        found = list(log.scan(hour))
        return [seq for one in found if isinstance(one, Frame) for seq in one.rows["seq"].tolist()]

    def no_room(self, at: int = 1) -> None:
        self.faults.faults.append(
            Fault(self.faults.call_count + at, FaultKind.NO_SPACE, for_good=True)
        )


def all_of(log: MemoryLog) -> list[int]:
    found = SettledLog(log.another(), STAMP).read(0, 0)
    return [seq for one in found for seq in one.rows["seq"].tolist()]


def test_a_quorum_knows_it_before_the_files_have_it() -> None:
    log = MemoryLog()
    replica = Replica(log)
    replica.settle(1, 2)
    assert replica.settler.unsynced
    assert (all_of(log), replica.recorded()) == ([], [])
    replica.settler.sync()
    assert (all_of(log), replica.recorded()) == ([1, 2], [1, 2])
    assert not replica.settler.unsynced


@pytest.mark.parametrize("outcome", [AppendOutcome.LOST, AppendOutcome.UNANSWERED])
def test_what_nobody_may_know_is_not_in_the_files(outcome: AppendOutcome) -> None:
    """Else this replica alone would say that it is delivered."""
    log = MemoryLog()
    replica = Replica(log)
    replica.settle(1)
    replica.log.outcome = outcome
    with pytest.raises(FencedError):
        replica.settler.sync()
    assert replica.recorded() == []
    again = Replica(log, files=replica.files.kill())
    again.settler.take_in(0, NEVER)
    assert again.recorded() == all_of(log)


def test_rows_of_others_between_own_ones() -> None:
    log = MemoryLog()
    one, other = Replica(log), Replica(log)
    one.settle(1)
    one.settler.sync()
    other.settle(2)
    other.settler.sync()
    one.settle(3)
    one.settler.sync()
    assert one.recorded() == all_of(log) == [1, 2, 3]
    assert other.recorded() == [1, 2]
    assert other.settler.take_in(0, NEVER)
    assert not other.settler.take_in(0, NEVER)
    assert other.recorded() == [1, 2, 3]


def test_a_place_is_told_behind_a_sync_of_the_files() -> None:
    replica = Replica(MemoryLog())
    replica.settle(1)
    replica.settler.sync()
    assert replica.told == []
    replica.stopwatch.shows_ms = FILES_SYNC_MS
    replica.settle(2)
    replica.settler.sync()
    assert replica.told == [2]
    for _ in range(10):
        again = Replica(replica.log, replica.told[-1], replica.files.crash())
        again.settler.take_in(0, NEVER)
        assert again.recorded() == [1, 2]


def test_what_was_not_synced_is_read_again_and_may_stand_there_twice() -> None:
    log = MemoryLog()
    replica = Replica(log)
    replica.settle(1)
    replica.settler.sync()
    again = Replica(log, 0, replica.files.kill())
    again.settler.take_in(0, NEVER)
    assert set(again.recorded()) == {1}


def test_a_full_disk_forgets_no_row_of_its_own() -> None:
    log = MemoryLog()
    one, other = Replica(log), Replica(log)
    other.settle(1)
    other.settler.sync()
    one.settle(2)
    one.no_room()
    for _ in range(2):
        with pytest.raises(DiskFullError):
            one.settler.sync()
    assert all_of(log) == [1, 2], "it is appended once"
    one.faults.faults.clear()
    one.settler.sync()
    assert one.recorded() == [1, 2]


def test_a_full_disk_in_the_middle_of_a_record_doubles_no_row_of_others() -> None:
    log = MemoryLog()
    other = Replica(log)
    rows = {HOUR: [dispatch_row(1)], HOUR + 1: [dispatch_row(2, due_ms=START_MS + HOUR_MS)]}
    other.settler.write(rows, START_MS)
    other.settler.sync()
    for at in range(1, 40):
        one = Replica(log)
        one.no_room(at)
        try:
            one.settler.take_in(0, NEVER)
        except DiskFullError:
            one.faults.faults.clear()
            one.settler.take_in(0, NEVER)
            assert (one.recorded(), one.recorded(HOUR + 1)) == ([1], [2]), at
        else:
            return
    raise AssertionError("the disk is always full")


def test_more_than_a_record_holds() -> None:
    log = MemoryLog()
    replica = Replica(log)
    rows = np.zeros(ROWS_MAX + 1, DISPATCH_DTYPE)
    rows["seq"], rows["due_ms"] = np.arange(1, ROWS_MAX + 2), START_MS
    replica.settler.write({HOUR: [rows.tobytes()]}, START_MS)
    replica.settler.sync()
    assert log.end() == 2
    assert len(replica.recorded()) == ROWS_MAX + 1
    assert replica.settler.offset == 2
