"""The settler of a shard with replicas: a set that all share, and files that follow it."""

from __future__ import annotations

import numpy as np
import pytest

from delayserver.delivery.replicated_settler import FILES_SYNC_MS, ReplicatedSettler
from storage.errors import DiskFullError, FencedError
from storage.frame import Frame
from storage.hour_log import HourLog
from storage.notes import Note, encode_note, unpack_notes
from storage.replicated.settled import ROWS_MAX, SettledLog, encode_settled
from storage.rows import DISPATCH_DTYPE, HOUR_MS, LogKind
from tests.unit.fakes import HOUR, STAMP, START_MS, Stopwatch, dispatch_row
from tests.world.storage.engine import AppendOutcome, MemoryLog
from tests.world.storage.faults import Fault, FaultKind, Faults, FaultyFiles
from tests.world.storage.files import SimulatedFiles


class Replica:
    """A disk, and one process's settler on it."""

    def __init__(self, log: MemoryLog, place: int = 0, files: SimulatedFiles | None = None) -> None:
        self.files = SimulatedFiles() if files is None else files
        self.faults = Faults()
        self.log = log.another()
        self.stopwatch = Stopwatch()
        self.told: list[int] = []
        self.opened: list[MemoryLog] = []
        self.settler = ReplicatedSettler(
            HourLog(FaultyFiles(self.files, self.faults), LogKind.DISPATCH, stamp=STAMP),
            self._open,
            place,
            self.stopwatch,
            self.told.append,
        )

    def _open(self) -> SettledLog:
        """The first is the one that is appended to."""
        self.opened.append(self.log if not self.opened else self.log.another())
        return SettledLog(self.opened[-1], STAMP)

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
    again.settler.take_in(0)
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
    assert other.settler.take_in(0)
    assert not other.settler.take_in(0)
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
        again.settler.take_in(0)
        assert again.recorded() == [1, 2]


def test_what_was_not_synced_is_read_again_and_may_stand_there_twice() -> None:
    log = MemoryLog()
    replica = Replica(log)
    replica.settle(1)
    replica.settler.sync()
    again = Replica(log, 0, replica.files.kill())
    again.settler.take_in(0)
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
            one.settler.take_in(0)
        except DiskFullError:
            one.faults.faults.clear()
            one.settler.take_in(0)
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


# ---- transactions ------------------------------------------------------------------------------


def transaction(log: MemoryLog, *seqs: int) -> int:
    """Its offset; a marker stands behind it."""
    rows = np.frombuffer(b"".join(map(dispatch_row, seqs)), DISPATCH_DTYPE)
    (offset,) = log.another().append([encode_settled(rows, STAMP, START_MS)])
    assert offset is not None
    log.mark()
    return offset


def told_of(replica: Replica, offset: int, *seqs: int) -> None:
    rows = {HOUR: [dispatch_row(seq) for seq in seqs]}
    replica.settler.write_recorded(rows, offset, START_MS)


def test_markers_are_passed() -> None:
    log = MemoryLog()
    owner = Replica(log)
    told_of(owner, transaction(log, 1, 2), 1, 2)
    owner.settle(3)
    owner.settler.sync()
    assert (owner.settler.offset, owner.recorded()) == (3, [1, 2, 3])
    # Whoever reads all of it has the same, and knows that it has all.
    replica = Replica(log)
    log.mark()
    while replica.settler.offset < 4:
        replica.settler.take_in(0)
    assert replica.recorded() == [1, 2, 3]


def test_a_record_that_is_read_before_its_news_comes_is_written_once() -> None:
    log = MemoryLog()
    owner = Replica(log)
    offset = transaction(log, 1)
    owner.settle(2)
    owner.settler.sync()
    assert (owner.settler.offset, owner.recorded()) == (3, [1, 2])
    told_of(owner, offset, 1)
    owner.settler.sync()
    assert (owner.settler.offset, owner.recorded()) == (3, [1, 2])


def test_an_owner_does_not_wait_for_what_it_cannot_read_yet() -> None:
    """A transaction is open: what stands behind it comes later, and so does the place."""
    log = MemoryLog()
    owner = Replica(log)
    log.mark()
    reader = owner.opened[1]
    reader.is_reachable = False
    owner.settle(1)
    owner.settler.sync()
    assert (owner.settler.offset, owner.recorded()) == (0, [1])
    owner.stopwatch.shows_ms += FILES_SYNC_MS
    owner.settle(2)
    owner.settler.sync()
    assert owner.told == [0]
    reader.is_reachable = True
    owner.settle(3)
    owner.settler.sync()
    assert (owner.settler.offset, owner.recorded()) == (4, [1, 2, 3])


def test_a_full_disk_while_something_cannot_be_read() -> None:
    log = MemoryLog()
    log.mark()
    for at in range(1, 40):
        owner = Replica(log)
        owner.opened[1].is_reachable = False
        owner.settler.write(
            {HOUR: [dispatch_row(1)], HOUR + 1: [dispatch_row(2, due_ms=START_MS + HOUR_MS)]},
            START_MS,
        )
        owner.no_room(at)
        try:
            owner.settler.sync()
        except DiskFullError:
            owner.faults.faults.clear()
            owner.opened[1].is_reachable = at % 2 == 0
            owner.settler.sync()
            assert (owner.recorded(), owner.recorded(HOUR + 1))[0][-1:] == [1], at
            assert owner.recorded(HOUR + 1)[-1:] == [2], at
        else:
            return
    raise AssertionError("the disk is always full")


def test_a_log_that_has_lost_its_end_is_read_on_from_there() -> None:
    log = MemoryLog()
    first, second = Replica(log), Replica(log)
    first.settle(1)
    first.settler.sync()
    first.settle(2)
    first.settler.sync()
    second.settler.take_in(0)
    del log._records.kept[1:]
    second.settler.go_back(1)
    third = Replica(log)
    third.settle(3)
    third.settler.sync()
    second.settler.take_in(0)
    assert second.recorded() == [1, 2, 3], "what the files have of it is settled nevertheless"
    second.settler.go_back(9)
    assert second.settler.offset == 2


def test_what_is_told_of_rows_goes_to_all_replicas_by_the_hour() -> None:
    log = MemoryLog()
    one, other = Replica(log), Replica(log)
    notes = {hour: Note(hour, 5, 1, 1, START_MS, 7, 204, "thanks") for hour in (HOUR, HOUR + 1)}
    one.settler.write(
        {
            HOUR: [dispatch_row(5), encode_note(notes[HOUR])],
            HOUR + 1: [
                dispatch_row(5, due_ms=START_MS + HOUR_MS),
                encode_note(notes[HOUR + 1]),
            ],
        },
        START_MS,
    )
    one.settler.sync()
    other.settler.take_in(0)
    for replica in (one, other):
        for hour, note in notes.items():
            hour_log = HourLog(replica.files, LogKind.DISPATCH, stamp=STAMP)
            [frame] = hour_log.scan(hour, payload=True)
            assert isinstance(frame, Frame)
            assert unpack_notes(frame.payload or b"") == [note]


def test_notes_of_a_newer_version_keep_no_row_back() -> None:
    log = MemoryLog()
    rows = np.frombuffer(dispatch_row(5), DISPATCH_DTYPE)
    log.append([encode_settled(rows, STAMP, START_MS, b"\xc1 nobody knows")])
    replica = Replica(log)
    replica.settler.take_in(0)
    assert replica.recorded() == [5]
