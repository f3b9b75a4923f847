"""The message log: what was answered is there after any crash, and what is damaged is named."""

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import TypeVar

import pytest

from storage.errors import DamageError, DiskError, DiskFullError, SyncError
from storage.files import Files
from storage.frame import Damage, Frame, encode
from storage.message_log import Durability, MessageLog
from storage.rows import LogKind
from tests.unit.storage.samples import (
    SEGMENT_BYTES,
    STAMP,
    append_group,
    content,
    flip,
    message_group,
    message_log,
    overwrite,
)
from tests.world.storage.faults import Fault, FaultKind, Faults, FaultyFiles, Moment, SimulatedCrash
from tests.world.storage.files import SimulatedFiles

SPARE = "messages/spare"

Found = tuple[str, int, int]
T = TypeVar("T")


def outline(found: Frame | Damage) -> Found:
    is_whole = isinstance(found, Frame) and found.payload_intact
    return ("frame" if is_whole else "damage", found.first_seq, found.last_seq)


def read(files: Files, from_seq: int = 1) -> list[Found]:
    return [outline(found) for found in message_log(files).read(from_seq)]


def opened(files: Files, from_seq: int = 1) -> MessageLog:
    """The log as the server opens it."""
    log = message_log(files)
    for _ in log.read(from_seq):
        pass
    return log


def frames(*counts: int) -> list[Found]:
    """The outline of groups that begin with seq 1."""
    found = []
    seq = 1
    for group_count in counts:
        found.append(("frame", seq, seq + group_count - 1))
        seq += group_count
    return found


def written(files: Files, *counts: int, from_seq: int = 1) -> MessageLog:
    """A log with groups of these counts, still open."""
    log = opened(files, from_seq)
    seq = from_seq
    for group_count in counts:
        append_group(log, seq, group_count)
        seq += group_count
    return log


@pytest.fixture
def files() -> SimulatedFiles:
    return SimulatedFiles()


# ---- append and read -------------------------------------------------------------------------


def test_what_was_appended_is_read_back(files: SimulatedFiles) -> None:
    log = written(files, 2, 1, 3)
    log.close()
    found = list(message_log(files).read(1))
    assert [outline(item) for item in found] == frames(2, 1, 3)
    rows, payload = message_group(4, 3)
    assert isinstance(found[2], Frame)
    assert found[2].rows.tobytes() == rows.tobytes()
    assert found[2].payload == payload


def test_it_is_durable_without_being_closed(files: SimulatedFiles) -> None:
    written(files, 1, 2)
    for _ in range(20):
        assert read(files.crash()) == frames(1, 2)
        files.is_off = False


def test_an_empty_directory(files: SimulatedFiles) -> None:
    log = message_log(files)
    assert list(log.read(1)) == []
    assert log.first_seq() is None
    assert log.segments() == []


def test_reading_begins_with_the_frame_that_holds_the_seq(files: SimulatedFiles) -> None:
    written(files, 2, 3, 1).close()
    assert read(files, 2) == frames(2, 3, 1)
    assert read(files, 3) == frames(2, 3, 1)[1:]
    assert read(files, 6) == frames(2, 3, 1)[2:]
    assert read(files, 7) == []


def test_it_goes_on_after_a_restart(files: SimulatedFiles) -> None:
    for seq in (1, 2, 3):
        written(files, 1, from_seq=seq).close()
    assert read(files) == frames(1, 1, 1)
    assert len(message_log(files).segments()) == 3


def test_frames_are_read_before_the_first_append(files: SimulatedFiles) -> None:
    log = written(files, 1)
    with pytest.raises(AssertionError, match="before append"):
        list(log.read(1))


# ---- segments --------------------------------------------------------------------------------


def test_a_full_segment_is_followed_by_another(files: SimulatedFiles) -> None:
    written(files, *[1] * 60).close()
    log = message_log(files)
    assert len(log.segments()) > 2
    assert log.segments()[0] == "messages/00000000000000000001.messages"
    assert read(files) == frames(*[1] * 60)
    assert all(len(content(files, path)) <= SEGMENT_BYTES for path in log.segments())


def test_a_segment_is_filled_beforehand_and_cut_when_it_is_full(files: SimulatedFiles) -> None:
    log = written(files, 1)
    assert len(content(files, log.segments()[0])) == SEGMENT_BYTES
    append_group(log, 2, 40)
    assert len(content(files, log.segments()[0])) < SEGMENT_BYTES
    assert set(content(files, log.segments()[0])[-8:]) != {0}


def test_a_group_larger_than_a_segment_gets_one_of_its_own(files: SimulatedFiles) -> None:
    log = written(files, 1, 200, 1)
    assert len(log.segments()) == 3
    assert len(content(files, log.segments()[1])) > SEGMENT_BYTES
    log.close()
    assert read(files) == frames(1, 200, 1)


def test_it_knows_whether_a_group_needs_a_new_segment(files: SimulatedFiles) -> None:
    log, seq, had_room = opened(files), 1, 0
    assert not log.has_room(0)
    while len(log.segments()) < 3:
        rows, payload = message_group(seq, 7)
        has_room, segments = log.has_room(rows.nbytes + len(payload)), len(log.segments())
        append_group(log, seq, 7)
        assert has_room == (len(log.segments()) == segments)
        had_room += has_room
        seq += 7
    assert had_room > 1


def test_the_spare_is_taken_by_the_next_rotation(files: SimulatedFiles) -> None:
    log = written(files, 1)
    log.prepare_spare()
    log.prepare_spare()
    assert content(files, SPARE) == bytes(SEGMENT_BYTES)
    append_group(log, 2, 20)
    append_group(log, 22, 20)
    assert not files.exists(SPARE)
    log.close()
    assert read(files) == frames(1, 20, 20)


def test_a_spare_of_another_size_will_do(files: SimulatedFiles) -> None:
    files.make_directory("messages")
    overwrite(files, SPARE, 0, bytes(100))
    written(files, 3, 4).close()
    assert read(files) == frames(3, 4)


def test_a_spare_that_is_too_small_is_left(files: SimulatedFiles) -> None:
    log = written(files, 1)
    log.prepare_spare()
    append_group(log, 2, 200)
    assert files.exists(SPARE)
    log.close()
    assert read(files) == frames(1, 200)


def test_an_empty_newest_segment_goes(files: SimulatedFiles) -> None:
    log = written(files, 1)
    log.close()
    path = MessageLog.path(2)
    overwrite(files, path, 0, bytes(SEGMENT_BYTES))
    assert read(files) == frames(1)
    assert not files.exists(path)


def test_files_of_other_names_are_left_alone(files: SimulatedFiles) -> None:
    written(files, 1).close()
    names = ["notes.txt", "1.messages", "copy.messages", "00000000000000000001.messages.damaged"]
    for name in names:
        overwrite(files, f"messages/{name}", 0, b"x")
    assert read(files) == frames(1)
    assert set(names) < set(files.list("messages"))


def test_a_segment_of_another_directory_is_not_taken_for_a_torn_tail(
    files: SimulatedFiles,
) -> None:
    rows, payload = message_group(1)
    frame = encode(
        LogKind.MESSAGE,
        rows.tobytes(),
        payload,
        first_seq=1,
        last_seq=1,
        created_ms=1,
        stamp=STAMP + 1,
    )
    files.make_directory("messages")
    overwrite(files, MessageLog.path(1), 0, frame)
    with pytest.raises(DamageError, match="written in another data directory"):
        read(files)
    assert content(files, MessageLog.path(1)) == frame


# ---- torn tails and damage -------------------------------------------------------------------


def test_a_torn_tail_is_cut_off_and_not_reported(files: SimulatedFiles) -> None:
    written(files, 1, 2).close()
    path = MessageLog.path(1)
    whole = content(files, path)
    first_end = next(found.end for found in message_log(files).read(1))
    for length in range(first_end, len(whole) - 8):  # Less is zeros: the padding.
        machine = SimulatedFiles()
        machine.make_directory("messages")
        overwrite(machine, path, 0, whole[:length] + bytes(500))
        assert read(machine) == frames(1)
        assert len(content(machine, path)) == first_end
        written(machine, 1, from_seq=2).close()
        assert read(machine) == frames(1, 1)


def test_what_was_cut_off_does_not_come_back(files: SimulatedFiles) -> None:
    written(files, 1, 2).close()
    path = MessageLog.path(1)
    flip(files, path, len(content(files, path)) - 1 - 8)
    flip(files, path, next(found.end for found in message_log(files).read(1)))
    assert read(files) == frames(1)
    for _ in range(20):
        assert read(files.crash()) == frames(1)
        files.is_off = False


def test_a_payload_is_torn_at_the_end_and_damaged_before_it(files: SimulatedFiles) -> None:
    written(files, 2, 3, 2).close()
    ends = [found.end for found in message_log(files).read(1)]
    flip(files, MessageLog.path(1), ends[0] + 64 + 3 * 80 + 10)
    flip(files, MessageLog.path(1), ends[1] + 64 + 2 * 80 + 10)
    found = list(message_log(files).read(1))
    assert [outline(item) for item in found] == [("frame", 1, 2), ("damage", 3, 5)]
    # The rows of the group can be trusted, and so can its other payloads.
    assert isinstance(found[1], Frame)
    assert len(content(files, MessageLog.path(1))) == ends[1]


@pytest.mark.parametrize("broken", range(3))
def test_damage_before_valid_frames_is_named(files: SimulatedFiles, broken: int) -> None:
    counts = [2, 3, 1, 2]
    written(files, *counts).close()
    ends = [0, *(found.end for found in message_log(files).read(1))]
    flip(files, MessageLog.path(1), ends[broken] + 70)
    expected = frames(*counts)
    expected[broken] = ("damage", *expected[broken][1:])
    assert read(files) == expected
    found = list(message_log(files).read(1))[broken]
    assert isinstance(found, Damage)
    assert (found.path, found.offset, found.end) == (
        MessageLog.path(1),
        ends[broken],
        ends[broken + 1],
    )
    assert found.reason == "the rows do not match their checksum"


def test_damage_below_the_first_seq_that_is_asked_for_is_left_out(files: SimulatedFiles) -> None:
    written(files, 2, 3, 1).close()
    flip(files, MessageLog.path(1), 0)
    assert read(files, 3) == frames(2, 3, 1)[1:]


@pytest.mark.parametrize("followed_by", [b"", bytes(SEGMENT_BYTES), b"torn"])
def test_the_end_of_an_older_segment_is_never_torn(
    files: SimulatedFiles, followed_by: bytes
) -> None:
    # The name of the next segment tells that its last group was answered.
    written(files, 2, 3).close()
    flip(files, MessageLog.path(1), next(found.end for found in message_log(files).read(1)))
    overwrite(files, MessageLog.path(6), 0, followed_by)
    assert read(files) == [("frame", 1, 2), ("damage", 3, 5)]
    written(files, 1, from_seq=6).close()
    assert read(files) == [("frame", 1, 2), ("damage", 3, 5), ("frame", 6, 6)]


def test_the_first_frame_of_a_later_segment_is_damaged(files: SimulatedFiles) -> None:
    written(files, 2).close()
    written(files, 2, 1, from_seq=3).close()
    flip(files, MessageLog.path(3), 5)
    assert read(files) == [("frame", 1, 2), ("damage", 3, 4), ("frame", 5, 5)]


def test_a_missing_segment_is_named(files: SimulatedFiles) -> None:
    for seq in (1, 2, 3):
        written(files, 1, from_seq=seq).close()
    files.unlink(MessageLog.path(2))
    assert read(files) == [("frame", 1, 1), ("damage", 2, 2), ("frame", 3, 3)]
    files.unlink(MessageLog.path(1))
    assert read(files) == [("damage", 1, 2), ("frame", 3, 3)]
    assert read(files, 3) == [("frame", 3, 3)]


def test_a_missing_end_of_an_older_segment_is_named(files: SimulatedFiles) -> None:
    written(files, 1, 2).close()
    written(files, 1, from_seq=4).close()
    file = files.open(MessageLog.path(1))
    file.truncate(next(found.end for found in message_log(files).read(1)))
    assert read(files) == [("frame", 1, 1), ("damage", 2, 3), ("frame", 4, 4)]
    overwrite(files, MessageLog.path(4), 0, bytes(SEGMENT_BYTES))
    assert read(files) == [("frame", 1, 1), ("damage", 2, 3)]


# ---- housekeeping ----------------------------------------------------------------------------


def test_segments_go_when_all_their_records_are_filed(files: SimulatedFiles) -> None:
    for seq in (1, 3, 5):
        written(files, 2, from_seq=seq).close()
    log = opened(files)
    log.delete_through(1)
    assert log.first_seq() == 1
    log.delete_through(2)
    assert log.first_seq() == 3
    log.delete_through(3)
    assert log.first_seq() == 3
    log.delete_through(99)
    assert log.segments() == [MessageLog.path(5)]
    assert files.list("messages") == ["00000000000000000005.messages"]


def test_a_damaged_segment_is_kept_under_another_name(files: SimulatedFiles) -> None:
    for seq in (1, 3, 5):
        written(files, 2, from_seq=seq).close()
    log = opened(files)
    log.keep_segment(MessageLog.path(3))
    before = content(files, MessageLog.path(3))
    log.delete_through(6)
    assert files.list("messages") == [
        "00000000000000000003.messages.damaged",
        "00000000000000000005.messages",
    ]
    assert content(files, MessageLog.path(3) + ".damaged") == before
    assert read(files, 5) == [("frame", 5, 6)]


def test_the_newest_segment_stays(files: SimulatedFiles) -> None:
    log = written(files, 2)
    log.delete_through(2)
    append_group(log, 3)
    assert len(log.segments()) == 1


def test_what_somebody_copies_is_held_back(files: SimulatedFiles) -> None:
    for seq in (1, 3, 5):
        written(files, 2, from_seq=seq).close()
    log = held(files, held_max_bytes=1 << 20)
    # Whoever copies has not said yet how far he is.
    log.delete_through(6)
    assert log.first_seq() == 1
    log.hold_from(3)
    log.delete_through(6)
    assert log.first_seq() == 3
    log.hold_from(6)
    log.delete_through(6)
    assert log.first_seq() == 5
    written(files, 2, from_seq=7).close()
    log = held(files, held_max_bytes=1 << 20)
    log.hold_from(None)
    log.delete_through(8)
    assert log.first_seq() == 7


def test_it_is_held_back_up_to_a_bound(files: SimulatedFiles) -> None:
    for seq in (1, 3, 5):
        written(files, 2, from_seq=seq).close()
    length = len(content(files, MessageLog.path(1)))
    log = held(files, held_max_bytes=2 * length)
    log.hold_from(1)
    log.delete_through(6)
    assert log.first_seq() == 1
    written(files, 2, from_seq=7).close()
    log = held(files, held_max_bytes=2 * length)
    log.hold_from(1)
    log.delete_through(8)
    assert log.first_seq() == 7


def held(files: SimulatedFiles, *, held_max_bytes: int) -> MessageLog:
    log = MessageLog(
        files,
        stamp=STAMP,
        segment_bytes=SEGMENT_BYTES,
        durability=Durability.FSYNC,
        held_max_bytes=held_max_bytes,
    )
    assert [*log.read(1)]
    return log


def test_what_is_written_can_be_read_by_others(files: SimulatedFiles) -> None:
    log = written(files, 2)
    tail = log.written()
    assert (tail.first_seqs, tail.tail_seq) == ([1], 1)
    log.close()
    # The file was cut to what counts.
    assert log.written() == ([1], None, 0)
    assert len(content(files, MessageLog.path(1))) == tail.tail_length


# ---- a disk that fails -----------------------------------------------------------------------

GROUP_COUNTS = (3, 1, 9, 20, 2, 60, 1, 7, 15, 4)


@dataclass(slots=True)
class Ledger:
    """What the log has promised."""

    answered: dict[int, int] = field(default_factory=dict)
    """First seq and count of each group that is durable."""
    checkpoint_seq: int = 0

    @property
    def frames(self) -> list[Found]:
        """What must be read behind the checkpoint."""
        return [
            ("frame", first, first + group_count - 1)
            for first, group_count in self.answered.items()
            if first + group_count - 1 > self.checkpoint_seq
        ]


def work(files: Files, ledger: Ledger) -> None:
    """Append groups of all sizes with all that belongs to it.

    A group that finds the disk full is refused, and another one takes its seqs."""
    rng = random.Random(1)
    log = retried(lambda: opened(files))
    seq = 1
    for number in range(40):
        while True:
            group_count = rng.choice(GROUP_COUNTS)
            try:
                append_group(log, seq, group_count)
                break
            except DiskFullError:
                continue
        ledger.answered[seq] = group_count
        if number % 7 == 3:
            retried(log.prepare_spare)
        if number % 11 == 10:
            ledger.checkpoint_seq = seq - 1
            retried(lambda: log.delete_through(ledger.checkpoint_seq))
        seq += group_count
    log.close()


def retried(call: Callable[[], T]) -> T:
    while True:
        with contextlib.suppress(DiskFullError):
            return call()


def every_fault(
    kind: FaultKind, moment: Moment
) -> Iterator[tuple[SimulatedFiles, Ledger, BaseException | None]]:
    """The disk after a power loss, what was promised, and how the run ended, for every call."""
    for call in count(1):
        disk = SimulatedFiles(rng=random.Random(call))
        faults = Faults(Fault(call, kind, moment))
        ledger = Ledger()
        error: BaseException | None = None
        try:
            work(FaultyFiles(disk, faults), ledger)
        except (DiskError, SimulatedCrash) as caught:
            error = caught
        if faults.call_count < call:
            assert call > 100
            return
        if faults.struck:
            yield disk.crash(), ledger, error


def check_log(files: SimulatedFiles, ledger: Ledger) -> None:
    """All that was answered is there, and at most one group that was not; nothing is damaged."""
    from_seq = ledger.checkpoint_seq + 1
    expected = ledger.frames
    found = read(files, from_seq)
    assert found[: len(expected)] == expected
    assert len(found) <= len(expected) + 1
    assert all(what == "frame" for what, _, _ in found)
    # It goes on from there, and through another power loss.
    next_seq = found[-1][2] + 1 if found else from_seq
    log = opened(files, from_seq)
    append_group(log, next_seq, 40)
    assert read(files.crash(), from_seq) == [*found, ("frame", next_seq, next_seq + 39)]


@pytest.mark.parametrize("moment", Moment)
def test_a_crash_at_any_call_loses_nothing_that_was_answered(moment: Moment) -> None:
    for disk, ledger, error in every_fault(FaultKind.CRASH, moment):
        assert isinstance(error, SimulatedCrash)
        check_log(disk, ledger)


@pytest.mark.parametrize("moment", Moment)
def test_a_full_disk_at_any_call_refuses_one_group_and_no_more(moment: Moment) -> None:
    for disk, ledger, error in every_fault(FaultKind.NO_SPACE, moment):
        assert error is None
        assert read(disk, ledger.checkpoint_seq + 1) == ledger.frames
        check_log(disk, ledger)


@pytest.mark.parametrize("moment", Moment)
def test_an_error_at_any_call_is_told(moment: Moment) -> None:
    for disk, ledger, error in every_fault(FaultKind.IO_ERROR, moment):
        assert isinstance(error, DiskError)
        assert not isinstance(error, DiskFullError)
        check_log(disk, ledger)


def test_a_crash_after_a_refused_group(files: SimulatedFiles) -> None:
    """The group that was refused had reached the disk as a whole; the next one is in the way."""
    for smaller in (1, 5, 39):
        for seed in range(20):
            disk = SimulatedFiles(rng=random.Random(seed))
            faults = Faults()
            log = message_log(FaultyFiles(disk, faults), segment_bytes=64 * 1024)
            list(log.read(1))
            append_group(log, 1)
            faults.faults.append(Fault(faults.call_count + 1, FaultKind.NO_SPACE, Moment.AFTER))
            with pytest.raises(DiskFullError):
                append_group(log, 2, 40)
            append_group(log, 2, smaller)
            assert read(disk.crash()) == frames(1, smaller)


@pytest.mark.parametrize("groups", [0, 3])
def test_a_refused_group_does_not_come_back(groups: int) -> None:
    """It had reached the disk as a whole, and somebody was told that it counts for nothing."""
    for seed in range(20):
        disk = SimulatedFiles(rng=random.Random(seed))
        faults = Faults(only={"pwrite_durable"})
        log = message_log(FaultyFiles(disk, faults), segment_bytes=64 * 1024)
        list(log.read(1))
        for seq in range(1, groups + 1):
            append_group(log, seq)
        at = faults.call_count + 1
        faults.faults.append(Fault(at, FaultKind.NO_SPACE, Moment.AFTER, for_good=True))
        with pytest.raises(DiskFullError):
            append_group(log, groups + 1, 40)
        assert read(disk.crash()) == frames(*[1] * groups)


def test_a_failed_sync_is_not_retried(files: SimulatedFiles) -> None:
    faults = Faults(Fault(2, FaultKind.IO_ERROR, Moment.MIDDLE), only={"pwrite_durable"})
    log = written(FaultyFiles(files, faults), 1)
    with pytest.raises(SyncError):
        append_group(log, 2)
    assert faults.call_count == 2


def test_durability_os_survives_a_kill_and_syncs_nothing() -> None:
    disk = SimulatedFiles()
    faults = Faults(only={"pwrite_durable"})
    log = message_log(FaultyFiles(disk, faults), segment_bytes=64 * 1024, durability=Durability.OS)
    list(log.read(1))
    append_group(log, 1)
    append_group(log, 2, 3)
    assert faults.call_count == 0
    assert read(disk.kill()) == frames(1, 3)
