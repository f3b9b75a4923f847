"""The place up to which an owner's files have what the log of all replicas says."""

from __future__ import annotations

from delayserver.delivery.replicated_settler import FILES_SYNC_MS, ReplicatedSettler
from storage.frame import Frame
from storage.hour_log import HourLog
from storage.replicated.settled import SettledLog, settled_records
from storage.rows import LogKind
from storage.testing.engine import MemoryLog
from storage.testing.files import SimulatedFiles
from tests.unit.fakes import HOUR, START_MS, Stopwatch, dispatch_row

STAMP = 77


class Replica:
    def __init__(self, log: MemoryLog, place: int = 0) -> None:
        self.stopwatch = Stopwatch()
        self.told: list[int] = []
        dispatch = HourLog(SimulatedFiles(), LogKind.DISPATCH, stamp=STAMP)
        self.dispatch = dispatch
        self.settler = ReplicatedSettler(
            dispatch,
            lambda: SettledLog(log.another(), STAMP),
            place,
            self.stopwatch,
            self.told.append,
        )

    def write(self, *seqs: int) -> None:
        self.settler.write({HOUR: [dispatch_row(seq) for seq in seqs]}, START_MS)
        self.settler.sync()

    def write_recorded(self, offset: int, *seqs: int) -> None:
        rows = {HOUR: [dispatch_row(seq) for seq in seqs]}
        self.settler.write_recorded(rows, offset, START_MS)

    def filed(self) -> list[int]:
        frames = [one for one in self.dispatch.scan(HOUR) if isinstance(one, Frame)]
        return [int(seq) for frame in frames for seq in frame.rows["seq"]]


def append(log: MemoryLog, *seqs: int) -> int:
    """By somebody else: another owner, or a transaction."""
    rows = b"".join(map(dispatch_row, seqs))
    (offset,) = log.another().append(settled_records(rows, STAMP, START_MS))
    assert offset is not None
    return offset


def test_an_owner_alone_reads_nothing() -> None:
    log = MemoryLog()
    owner = Replica(log)
    owner.write(1, 2)
    owner.write(3)
    assert (owner.settler.offset, owner.filed()) == (2, [1, 2, 3])


def test_what_another_has_recorded_is_taken_in() -> None:
    log = MemoryLog()
    owner = Replica(log)
    append(log, 7)
    owner.write(1)
    assert owner.settler.offset == 2
    assert sorted(owner.filed()) == [1, 7]


def test_markers_are_passed() -> None:
    log = MemoryLog()
    owner = Replica(log)
    offset = append(log, 1, 2)
    log.mark()
    owner.write_recorded(offset, 1, 2)
    owner.write(3)
    assert (owner.settler.offset, owner.filed()) == (3, [1, 2, 3])
    # Whoever reads all of it has the same, and knows that it has all.
    replica = Replica(log)
    log.mark()
    while replica.settler.offset < 4:
        replica.settler.take_in(0)
    assert replica.filed() == [1, 2, 3]


def test_a_record_that_is_read_before_its_news_comes_is_written_once() -> None:
    log = MemoryLog()
    owner = Replica(log)
    offset = append(log, 1)
    log.mark()
    owner.write(2)
    assert (owner.settler.offset, sorted(owner.filed())) == (3, [1, 2])
    owner.write_recorded(offset, 1)
    owner.settler.sync()
    assert (owner.settler.offset, sorted(owner.filed())) == (3, [1, 2])


def test_an_owner_does_not_wait_for_what_it_cannot_read_yet() -> None:
    """Somebody's transaction is open: what stands behind it comes later, and so does the place."""
    log = MemoryLog()
    owner = Replica(log)
    log.mark()
    reader = owner.settler._read._log
    assert isinstance(reader, MemoryLog)
    reader.is_reachable = False
    owner.write(1)
    assert owner.settler.offset == 0
    owner.stopwatch.shows_ms += FILES_SYNC_MS
    owner.write(2)
    assert owner.told == [0]
    reader.is_reachable = True
    owner.write(3)
    assert (owner.settler.offset, owner.filed()) == (4, [1, 2, 3])
