"""The owner's own log: whether it continues the log, and with what."""

from __future__ import annotations

import pytest

from storage.errors import DamageError
from storage.files import replace_file
from storage.message_log import DIRECTORY, Durability, MessageLog
from storage.replicated.office import OfficeState
from storage.replicated.own import OWN_FILE, OwnLog
from storage.rows import DTYPES, LogKind
from tests.world.storage.files import SimulatedFiles

STAMP = 7
ROW_BYTES = DTYPES[LogKind.MESSAGE].itemsize


def own_log(files: SimulatedFiles) -> OwnLog:
    def make() -> MessageLog:
        return MessageLog(files, stamp=STAMP, segment_bytes=4096, durability=Durability.FSYNC)

    return OwnLog(files, make)


def write(log: MessageLog, *seqs: int) -> None:
    for seq in seqs:
        log.append(bytes(ROW_BYTES), b"x" * 1000, first_seq=seq, last_seq=seq, created_ms=1)


def kept(epoch: int, *seqs: int) -> SimulatedFiles:
    """A disk on which these were written in the tenure of `epoch`."""
    files = SimulatedFiles()
    own = own_log(files)
    own.take_over(epoch)
    log = own.begin()
    write(log, *seqs)
    log.close()
    return files.crash()


def claimed(frame_epoch: int, epoch: int = 9) -> OfficeState:
    return OfficeState(epoch=epoch, frame_epoch=frame_epoch)


def test_it_continues_while_nobody_else_has_decided_anything() -> None:
    own = own_log(kept(3, 1))
    assert own.continues(claimed(frame_epoch=3, epoch=4))
    assert own.continues(claimed(frame_epoch=3, epoch=6)), "others came and went"
    assert own.continues(claimed(frame_epoch=2, epoch=4)), "all of its tenure is lost"
    assert not own.continues(claimed(frame_epoch=4, epoch=5))
    assert not own_log(SimulatedFiles()).continues(claimed(frame_epoch=0, epoch=1))


def test_a_file_that_says_no_epoch() -> None:
    files = SimulatedFiles()
    replace_file(files, OWN_FILE, b"{}")
    with pytest.raises(DamageError, match="not a file of an epoch"):
        own_log(files).continues(claimed(0))


def test_it_goes_on_behind_what_is_there() -> None:
    files = kept(3, 1, 2, 3, 4, 5)
    resumed = own_log(files).resume(4)
    assert resumed is not None
    log, frames, behind = resumed
    assert [frame.first_seq for frame in frames] == [4, 5]
    assert behind == 6
    write(log, 6)
    log.close()
    again = own_log(files.crash()).resume(7)
    assert again is not None and again[1:] == ([], 7)


def test_one_that_is_behind_the_log() -> None:
    resumed = own_log(kept(3, 1, 2)).resume(9)
    assert resumed is not None and resumed[1:] == ([], 3)


def test_an_empty_one() -> None:
    resumed = own_log(kept(3)).resume(9)
    assert resumed is not None and resumed[1:] == ([], 0)


def test_what_does_not_follow_the_log_is_not_taken() -> None:
    files = kept(3, 5, 6)
    assert own_log(files).resume(4) is None
    assert list(own_log(files.kill()).lacking(4)) == []


def test_what_is_damaged_ends_it() -> None:
    files = kept(3, 1, 2, 3, 4, 5, 6, 7, 8)
    first = MessageLog.path(1)
    file = files.open(first)
    at = 1200  # within the second frame
    file.pwrite([b"\xff" * 8], at)
    file.close()
    assert own_log(files).resume(1) is None
    assert [frame.first_seq for frame in own_log(files.kill()).lacking(1)] == [1]


def test_it_begins_anew() -> None:
    files = kept(3, 1, 2, 3, 4, 5, 6)
    own = own_log(files)
    own.take_over(4)
    log = own.begin()
    write(log, 40)
    log.close()
    files = files.crash()
    assert len(files.list(DIRECTORY)) >= 1
    resumed = own_log(files).resume(40)
    assert resumed is not None
    assert [frame.first_seq for frame in resumed[1]] == [40]


def test_between_taking_over_and_beginning_anew_nothing_is_lost() -> None:
    files = kept(3, 1, 2)
    own_log(files).take_over(4)
    own = own_log(files.crash())
    assert own.continues(claimed(frame_epoch=3, epoch=5))
    assert [frame.first_seq for frame in own.lacking(1)] == [1, 2]


def test_how_far_it_reaches_behind_a_checkpoint() -> None:
    files = kept(5, 3, 4, 5)
    assert own_log(files).reach(claimed(frame_epoch=5)._replace(next_seq=4)) == 5
    assert own_log(files).reach(claimed(frame_epoch=5)._replace(next_seq=7)) == 6
    assert own_log(files).reach(claimed(frame_epoch=6)._replace(next_seq=4)) == 3
    assert own_log(SimulatedFiles()).reach(claimed(frame_epoch=5)._replace(next_seq=4)) == 3
