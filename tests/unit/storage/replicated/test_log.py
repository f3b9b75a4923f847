"""The owner's log: what it reads back, appends, and keeps of its places."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from storage import message_log
from storage.errors import FencedError, ShortageError
from storage.frame import Frame, encode
from storage.message_log import Durability, MessageLog
from storage.replicated import envelope
from storage.replicated import log as replicated_log
from storage.replicated.envelope import Claim
from storage.replicated.holder import Holder
from storage.replicated.lease import BEAT_MS, Tenure
from storage.replicated.log import (
    OFFICE_KEY,
    SEIZED_KEY,
    SEIZED_MAX,
    FollowedLog,
    ReplicatedLog,
    office_of,
    seized_of,
)
from storage.replicated.office import OfficeState
from storage.replicated.own import OwnLog
from storage.replicated.reader import RecordReader
from storage.rows import DTYPES, LogKind
from tests.unit.fakes import Stopwatch
from tests.world.storage.engine import AppendOutcome, MemoryLog
from tests.world.storage.faults import Fault, FaultKind, Faults, FaultyFiles
from tests.world.storage.files import SimulatedFiles

STAMP = 7
ROW = bytes(DTYPES[LogKind.MESSAGE].itemsize)


class Owner:
    """A node that claims, and its log. Each is a process."""

    def __init__(
        self,
        log: MemoryLog,
        files: SimulatedFiles | None = None,
        *,
        node: int = 1,
        place: OfficeState = OfficeState(),  # noqa: B008
    ) -> None:
        """`files`: where the own log is; None: there is none."""
        self.origin = log
        self.files = files
        self.faults = Faults()
        self.stopwatch = Stopwatch()
        self.writer = log.another()
        reader = RecordReader(log.another(), STAMP, OfficeState())
        end = log.end() or 0
        while reader.office.state.next_offset < end:
            reader.read(0)
        state = reader.office.state
        claim = Claim(node, state.epoch + 1, 5, state.last_offset, "")
        (offset,) = self.writer.append([envelope.encode(claim)])
        assert offset is not None
        reader.read(0)
        tenure = Tenure.of(reader.office, offset, 0)
        assert tenure is not None
        self.holder = Holder(
            node, self.writer, reader.office, tenure, clock=lambda: 5, stopwatch=self.stopwatch
        )
        self.log = ReplicatedLog(
            self.holder, log.another(), stamp=STAMP, place=place, own=self._own()
        )

    def _own(self) -> OwnLog | None:
        if self.files is None:
            return None
        files = FaultyFiles(self.files, self.faults)

        def make() -> MessageLog:
            return MessageLog(files, stamp=STAMP, segment_bytes=4096, durability=Durability.FSYNC)

        return OwnLog(files, make)

    def read(self, from_seq: int = 1) -> list[int]:
        found = [one for one in self.log.read(from_seq) if isinstance(one, Frame)]
        return [one.first_seq for one in found]

    def append(self, seq: int, payload: bytes = b"x" * 900) -> None:
        self.log.append(ROW, payload, first_seq=seq, last_seq=seq, created_ms=1)

    def beat(self) -> None:
        self.stopwatch.shows_ms += BEAT_MS
        assert self.holder.beat()

    def place(self, seq: int) -> OfficeState:
        return office_of(dict(self.log.places(seq))[OFFICE_KEY])


@pytest.fixture(params=[False, True], ids=["quorum", "own disk"])
def files(request: pytest.FixtureRequest) -> SimulatedFiles | None:
    return SimulatedFiles() if request.param else None


def lose(log: MemoryLog, end: int) -> None:
    """The engine has lost power, and what stood from there on."""
    del log._records.kept[end:]


def test_what_a_checkpoint_does_not_cover_is_read_back(files: SimulatedFiles | None) -> None:
    log = MemoryLog()
    first = Owner(log, files)
    assert first.read() == []
    for seq in range(1, 8):
        first.append(seq)
    place = first.place(3)
    second = Owner(log, files and files.crash(), place=place)
    assert second.read(4) == [4, 5, 6, 7]
    second.append(8)
    assert second.holder.state.next_seq == 9


def test_places_are_behind_what_is_filed_whatever_beats_come_between() -> None:
    owner = Owner(MemoryLog())
    owner.read()
    owner.append(1)
    owner.beat()
    owner.append(2)
    owner.beat()
    assert owner.place(1).next_seq == 2
    assert owner.place(2).next_seq == 3
    owner.beat()
    assert owner.place(2).next_seq == 3


def test_a_place_within_a_group_is_the_one_before_it() -> None:
    """A checkpoint may stand in the middle of an import, whose seqs are one group's."""
    owner = Owner(MemoryLog())
    owner.read()
    owner.append(1)
    owner.log.append(ROW, b"", first_seq=2, last_seq=9, created_ms=1)
    assert owner.place(5).next_seq == 2
    assert owner.place(9).next_seq == 10
    followed = FollowedLog(OfficeState(next_seq=2))
    assert office_of(dict(followed.places(5))[OFFICE_KEY]).next_seq == 2
    with pytest.raises(AssertionError):
        followed.places(0)


def test_a_group_is_one_frame_in_both_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    files = SimulatedFiles()
    owner = Owner(MemoryLog(), files)
    owner.read()
    made = []

    def encode_once(*parts: Any, **fields: Any) -> bytes:
        made.append(encode(*parts, **fields))
        return made[-1]

    monkeypatch.setattr(replicated_log, "encode", encode_once)
    monkeypatch.setattr(message_log, "encode", encode_once)
    owner.append(1)
    owner.append(2)
    assert len(made) == 2
    in_own = files.open(MessageLog.path(1)).pread(sum(map(len, made)), 0)
    assert in_own == b"".join(made)
    records = [record for _, record in owner.origin.another().read(0, 0.0)]
    for frame in made:
        assert sum(record.endswith(frame) for record in records) == 1


def test_it_beats_while_it_is_read(files: SimulatedFiles | None) -> None:
    log = MemoryLog()
    first = Owner(log, files)
    first.read()
    for seq in range(1, 5):
        first.append(seq)
    second = Owner(log, files and files.crash())
    found = []
    for frame in second.log.read(1):
        assert isinstance(frame, Frame)
        found.append(frame.first_seq)
        second.beat()
    assert found == [1, 2, 3, 4]
    second.append(5)


def test_an_own_disk_that_is_full_refuses_groups_and_the_office_is_kept() -> None:
    owner = Owner(MemoryLog(), SimulatedFiles())
    owner.read()
    owner.append(1)
    owner.faults.faults.append(
        Fault(owner.faults.call_count + 1, FaultKind.NO_SPACE, for_good=True)
    )
    with pytest.raises(ShortageError):
        for seq in range(2, 20):
            owner.append(seq)
    assert owner.holder.state.next_seq == seq, "the log has nothing of it"
    owner.faults.faults.clear()
    owner.append(seq)


def test_an_owner_whose_disk_stalls_keeps_its_shard() -> None:
    files = SimulatedFiles()
    owner = Owner(MemoryLog(), files)
    owner.read()
    ended: list[bool] = []

    def stall() -> None:
        beats = threading.Thread(target=owner.beat)
        beats.start()
        beats.join(10)
        ended.append(not beats.is_alive())
        owner.stopwatch.shows_ms += BEAT_MS

    files.on_sync = stall
    owner.append(1)
    assert ended and all(ended)
    assert owner.holder.state.next_seq == 2


@pytest.mark.parametrize("outcome", [AppendOutcome.LOST, AppendOutcome.UNANSWERED])
def test_what_nobody_was_told_about_stands_there_once(outcome: AppendOutcome) -> None:
    log, files = MemoryLog(), SimulatedFiles()
    first = Owner(log, files)
    first.read()
    first.append(1)
    first.writer.outcome = outcome
    with pytest.raises(FencedError):
        first.append(2)
    files = files.crash()
    second = Owner(log, files)
    assert second.read() == [1, 2]
    second.append(3)
    assert Owner(log).read() == [1, 2, 3]


def test_what_the_engine_lost_comes_back_from_the_own_disk() -> None:
    log, files = MemoryLog(), SimulatedFiles()
    first = Owner(log, files)
    first.read()
    for seq in range(1, 5):
        first.append(seq)
    lose(log, 2)
    files = files.crash()
    second = Owner(log, files)
    assert second.read() == [1, 2, 3, 4]


def test_a_process_that_ended_between_its_claim_and_the_own_log_loses_nothing() -> None:
    log, files = MemoryLog(), SimulatedFiles()
    first = Owner(log, files)
    first.read()
    for seq in range(1, 5):
        first.append(seq)
    lose(log, 2)
    files = files.crash()
    Owner(log, files)  # It claims, and ends.
    Owner(log, node=2)  # So does another one.
    assert Owner(log, files).read() == [1, 2, 3, 4]


@pytest.mark.parametrize("through", range(3))
def test_a_process_that_ends_while_it_brings_back_what_the_engine_lost_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, through: int
) -> None:
    log, files = MemoryLog(), SimulatedFiles()
    first = Owner(log, files)
    first.read()
    for seq in range(1, 6):
        first.append(seq)
    lose(log, 2)
    files = files.crash()
    second = Owner(log, files)
    append, answered = second.writer.append, 0

    def append_some(records: Sequence[bytes], *rest: Callable[[], None]) -> list[int | None]:
        nonlocal answered
        if answered == through:
            second.writer.outcome = AppendOutcome.LOST
        answered += 1
        return append(records, *rest)

    monkeypatch.setattr(second.writer, "append", append_some)
    with pytest.raises(FencedError):
        second.read()
    assert answered == through + 1
    # What the second one has brought back is of its own tenure, and the rest is needed as well.
    assert Owner(log, files.crash()).read() == [1, 2, 3, 4, 5]


def test_every_call_of_the_own_disk_may_be_the_last_one() -> None:
    for at in range(1, 200):
        log, files = MemoryLog(), SimulatedFiles()
        first = Owner(log, files)
        first.read()
        for seq in range(1, 9):
            first.append(seq)
        lose(log, 4)
        files = files.crash()
        second = Owner(log, files)
        second.faults.faults.append(Fault(at, FaultKind.NO_SPACE, for_good=True))
        try:
            second.read()
        except Exception:
            assert Owner(log, files.crash()).read() == list(range(1, 9)), at
        if not second.faults.struck:
            return
    raise AssertionError("it never comes through")


def test_the_own_log_goes_on_with_the_next_tenure() -> None:
    """The engine may still lose what was answered before."""
    log, files = MemoryLog(), SimulatedFiles()
    first = Owner(log, files)
    first.read()
    for seq in range(1, 4):
        first.append(seq)
    files = files.crash()
    second = Owner(log, files)
    second.read()
    second.append(4)
    lose(log, 1)
    assert Owner(log, files.crash()).read() == [1, 2, 3, 4]


def test_the_own_log_of_an_older_owner_is_thrown_away() -> None:
    """What another has decided since stands under the same seqs."""
    log, files = MemoryLog(), SimulatedFiles()
    first = Owner(log, files)
    first.read()
    for seq in range(1, 6):
        first.append(seq, b"old" * 100)
    lose(log, 3)
    other = Owner(log, node=2)
    assert other.read() == [1, 2]
    other.append(3, b"new" * 100)
    again = Owner(log, files.crash())
    assert again.read() == [1, 2, 3]
    again.append(4, b"new" * 100)


def test_what_the_own_log_lacks_is_added_to_it() -> None:
    log, files = MemoryLog(), SimulatedFiles()
    first = Owner(log, files)
    first.read()
    first.append(1)
    # A version before this one wrote to both at once, and the disk failed.
    frame = encode(LogKind.MESSAGE, ROW, b"x", first_seq=2, last_seq=2, created_ms=1, stamp=STAMP)
    first.holder.append_frame(frame)
    second = Owner(log, files.crash())
    assert second.read() == [1, 2]
    lose(log, 2)
    assert second.files is not None
    assert Owner(log, second.files.crash()).read() == [1, 2]


def test_moments_at_which_the_office_was_seized_are_kept_once_each() -> None:
    log = FollowedLog(OfficeState())
    for at_ms in (70, 5, 70):
        log.note_seized(at_ms)
    assert seized_of(dict(log.places(0))[SEIZED_KEY]) == (5, 70)
    for at_ms in range(100, 100 + SEIZED_MAX):
        log.note_seized(at_ms)
    assert log.seized_ms == tuple(range(100, 100 + SEIZED_MAX))
    assert seized_of(None) == ()
