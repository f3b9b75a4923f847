"""The message log is shipped: what is copied when, and a fault or a crash at each call."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from delayserver.backup.log_shipping import LogShipper
from delayserver.backup.shelf import BackupManifest
from delayserver.backup.shipped_log import (
    LATEST_MS,
    LogReach,
    find_cut,
    read_reach,
    timeline_place,
    write_reach,
)
from storage.directory import Identity
from storage.errors import BackupError, StorageError
from storage.files import Files
from storage.message_log import Durability, MessageLog
from tests.unit.storage.samples import SEGMENT_BYTES, STAMP, append_group
from tests.world.storage.faults import Fault, FaultKind, Faults, FaultyFiles, Moment, SimulatedCrash
from tests.world.storage.files import SimulatedFiles

IDENTITY = Identity(stamp=STAMP, shard=0, id_secret=bytes(16))
PLACE = timeline_place(STAMP, 0, 1)
MANIFEST = BackupManifest(
    name="one",
    server_version="",
    format_version=1,
    stamp=STAMP,
    shard=0,
    shards=1,
    checkpoint_seq=0,
    began_ms=0,
    taken_ms=0,
    completed_ms=0,
    is_verified=True,
    copied_bytes=0,
    files=[],
    timeline=1,
)


class Source:
    """A message log, of which a backup was taken when it was empty."""

    def __init__(self, *, files: SimulatedFiles | None = None) -> None:
        self.files = SimulatedFiles() if files is None else files
        self.log = MessageLog(
            self.files,
            stamp=STAMP,
            segment_bytes=SEGMENT_BYTES,
            durability=Durability.FSYNC,
            held_max_bytes=1 << 30,
        )
        self.next_seq = 1
        for found in self.log.read(1):
            self.next_seq = found.last_seq + 1

    def append(self, *counts: int) -> None:
        for count in counts:
            append_group(self.log, self.next_seq, count)
            self.next_seq += count

    def shipper(self, shelf: Files) -> LogShipper:
        return LogShipper(
            self.files,
            self.log,
            shelf,
            IDENTITY,
            take=lambda count: None,
            next_seq=self.next_seq,
            life="a life",
        )


def copied(shelf: SimulatedFiles) -> dict[str, bytes]:
    return {
        name: shelf.open(f"{PLACE}/{name}").pread(1 << 20, 0)
        for name in shelf.list(PLACE)
        if name.endswith(".messages")
    }


def own(source: Source) -> dict[str, bytes]:
    """What counts of each segment."""
    source.log.close()
    return {
        path.removeprefix("messages/"): source.files.open(path).pread(1 << 20, 0)
        for path in source.log.segments()
    }


def test_the_copy_is_the_log_byte_by_byte() -> None:
    source, shelf = Source(), SimulatedFiles()
    shipper = source.shipper(shelf)
    assert shipper.begin(0) == 1
    for counts in ((3, 1), (), (20, 20, 20), (1,)):
        source.append(*counts)
        shipper.step(10)
    assert len(copied(shelf)) > 1
    assert copied(shelf) == own(source)
    assert read_reach(shelf, PLACE) == LogReach(10, source.next_seq - 1)
    assert shipper.reach_ms == 10


def test_what_was_refused_is_not_shipped() -> None:
    source, shelf = Source(), SimulatedFiles()
    shipper = source.shipper(shelf)
    shipper.begin(0)
    source.append(2)
    # As `append` leaves it in the moment before it is told that there is no space.
    tail = source.log._tail
    assert tail is not None
    tail.pwrite([tail.pread(280, 0)], source.log._tail_offset)
    shipper.step(10)
    assert find_cut(shelf, MANIFEST, LATEST_MS).last_seq == 2
    assert copied(shelf) == own(source)


def test_a_copy_that_somebody_has_deleted_is_not_gone_on_with() -> None:
    source, shelf = Source(), SimulatedFiles()
    shipper = source.shipper(shelf)
    shipper.begin(0)
    source.append(2)
    shipper.step(10)
    for name in shelf.list(PLACE):
        shelf.unlink(f"{PLACE}/{name}")
    source.append(1)
    shipper.step(20)
    assert (shipper.timeline, shipper.breaks_total) == (0, 1)
    assert "is not there any more" in shipper.broken
    # Nothing is held back for it, and the next backup begins anew.
    assert source.log._held_from is None
    assert shipper.begin(3) == 2 and not shipper.broken


def visits() -> Iterator[tuple[int, FaultKind, Moment]]:
    for at in range(1, 60):
        for kind in (FaultKind.CRASH, FaultKind.IO_ERROR, FaultKind.NO_SPACE):
            for moment in Moment:
                yield at, kind, moment


def test_a_fault_at_each_call_of_the_disk_of_backups() -> None:
    """Whatever comes of it, the next step or the next start has it all."""
    struck = dict.fromkeys(FaultKind, 0)
    for at, kind, moment in visits():
        shelf = SimulatedFiles(rng=random.Random(at))
        source = Source()
        source.append(2)
        faults = Faults()
        shipper = source.shipper(FaultyFiles(shelf, faults))
        shipper.begin(0)
        shipper.step(5)
        source.append(1, 30, 30, 1)
        faults.faults.append(Fault(faults.call_count + at, kind, moment))
        try:
            shipper.step(10)
        except SimulatedCrash:
            shelf = shelf.crash()
            again = Source(files=source.files.kill())
            shipper = again.shipper(shelf)
            assert find_cut(shelf, MANIFEST, LATEST_MS).last_seq >= 2
            shipper.resume([MANIFEST])
            source = again
        except StorageError:
            assert shipper.reach_ms == 5
        struck[kind] += bool(faults.struck)
        faults.faults.clear()
        shipper.step(20)
        assert shipper.timeline == 1 and not shipper.broken
        assert find_cut(shelf, MANIFEST, 20).last_seq == source.next_seq - 1
        assert copied(shelf) == own(source)
    assert min(struck[k] for k in (FaultKind.CRASH, FaultKind.IO_ERROR, FaultKind.NO_SPACE)) > 10


def test_a_quiet_server_is_told_from_one_that_has_stopped() -> None:
    source, shelf = Source(), SimulatedFiles()
    shipper = source.shipper(shelf)
    shipper.begin(0)
    source.append(1)
    shipper.step(10)
    with pytest.raises(BackupError, match=r"reaches to 1970-01-01T00:00:00\.010Z: name that time"):
        find_cut(shelf, MANIFEST, 11)
    shipper.step(1000)
    assert find_cut(shelf, MANIFEST, 1000).last_seq == 1


def test_a_reach_that_is_not_whole_is_not_believed() -> None:
    source, shelf = Source(), SimulatedFiles()
    shipper = source.shipper(shelf)
    shipper.begin(0)
    source.append(1)
    shipper.step(10)
    data = shelf.open(f"{PLACE}/REACH").pread(1000, 0)
    for broken in (data.replace(b"10", b"11", 1), data[:-9], b"{}"):
        file = shelf.open(f"{PLACE}/REACH")
        file.truncate(0)
        file.pwrite([broken], 0)
        assert read_reach(shelf, PLACE) is None
        # The last record says how far it is, at least.
        assert find_cut(shelf, MANIFEST, 1).last_seq == 1
    write_reach(shelf, PLACE, LogReach(10, 3))
    with pytest.raises(BackupError, match="records 2–3 were there, and are missing"):
        find_cut(shelf, MANIFEST, 10)
