"""The dispatch log is written again: rows count, whether or not their notes can be read."""

from __future__ import annotations

import pytest

from delayserver.recovery.repair_logs import Mended, Mender
from storage.frame import Frame
from storage.hour_log import HourLog
from storage.notes import Note, encode_note, unpack_notes
from storage.rows import SEQ_MAX, LogKind
from tests.unit.fakes import HOUR, STAMP, START_MS, Disk, dispatch_row
from tests.world.storage.files import SimulatedFiles

NOTES = [Note(HOUR, seq, 1, 1, START_MS, 7, 204, f"thanks {seq}") for seq in (1, 2)]


def mend(files: SimulatedFiles) -> tuple[Mended, HourLog]:
    """What became of the file, and the log that has the new one."""
    path = HourLog(files, LogKind.DISPATCH, stamp=STAMP).path(HOUR)
    source = files.open(path)
    mender = Mender(
        source,
        LogKind.DISPATCH,
        HOUR,
        stamp=STAMP,
        end=source.size(),
        through_seq=SEQ_MAX,
        changes={},
    )
    mended = SimulatedFiles()
    log = HourLog(mended, LogKind.DISPATCH, stamp=STAMP)
    return mender.mend(mended.open(path, create=True)), log


@pytest.mark.unchecked("notes are damaged")
@pytest.mark.parametrize("damaged", [False, True])
def test_rows_are_kept_with_the_notes_that_verify(damaged: bool) -> None:
    files = SimulatedFiles()
    disk = Disk(files)
    for note in NOTES:
        disk.settler.write({HOUR: [dispatch_row(note.seq), encode_note(note)]}, START_MS)
        disk.settler.sync()
    file = files.open(disk.dispatch.path(HOUR))
    if damaged:
        file.pwrite([b"X"], file.pread(file.size(), 0).index(b"thanks 1"))
    mended, log = mend(files)
    assert (mended.kept_rows, mended.dropped_rows, mended.is_changed) == (2, 0, damaged)
    frames = [one for one in log.scan(HOUR, payload=True) if isinstance(one, Frame)]
    assert [one.rows["seq"].tolist() for one in frames] == [[1], [2]]
    assert all(one.payload_intact for one in frames)
    found = [note for one in frames for note in unpack_notes(one.payload or b"")]
    assert found == NOTES[damaged:]
