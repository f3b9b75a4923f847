"""A replica that is not needed any more is deleted, and no crash leaves half of it."""

from __future__ import annotations

import itertools
import random

import pytest

from delayserver.recovery.dropping import drop, is_dropped, make_room
from storage.directory import DROPPED_FILE, FORMAT_FILE, Identity, open_identity
from storage.files import Files
from storage.replicated.own import OWN_FILE
from tests.world.storage.faults import Fault, FaultKind, Faults, FaultyFiles, Moment, SimulatedCrash
from tests.world.storage.files import SimulatedFiles

IDENTITY = Identity(stamp=77, shard=0, id_secret=bytes(range(16)))
PARTS = (
    "messages/00000000000000000001.log",
    "schedule/2030-01-01T00.schedule",
    "schedule/2030-01-01T01.schedule",
    "dispatch/2030-01-01T00.dispatch",
    "definitions/1",
    "keys/00000000000000000001.run",
    "catalog/data.mdb",
    "incoming/new/schedule/2030-01-01T00.schedule",
    "incoming/keys/00000000000000000001.run",
    OWN_FILE,
)
OTHERS = ("TOKENS", "catalog/fault", "repair/1/schedule/2030-01-01T00.schedule")


def replica() -> SimulatedFiles:
    disk = SimulatedFiles(rng=random.Random(1))
    open_identity(disk, random_bytes=random.Random(1).randbytes, given=IDENTITY)
    for path in (*PARTS, *OTHERS):
        directory = path.rpartition("/")[0]
        disk.make_directory(directory)
        file = disk.open(path, create=True)
        file.pwrite([b"something"], 0)
        file.fdatasync()
        file.close()
        disk.sync_directory(directory)
    return disk


def left(files: Files) -> list[str]:
    return [path for path in (FORMAT_FILE, DROPPED_FILE, *PARTS, *OTHERS) if files.exists(path)]


def test_nothing_of_it_is_left_and_all_else_is() -> None:
    disk = replica()
    drop(disk)
    disk = disk.crash()
    assert left(disk) == [DROPPED_FILE, *OTHERS]
    drop(disk)
    make_room(disk)
    assert left(disk.crash()) == list(OTHERS)
    disk = replica()
    drop(disk)
    make_room(disk)
    # Another one can be made there.
    assert open_identity(disk, random_bytes=random.Random(1).randbytes, given=IDENTITY) == IDENTITY


def test_what_has_come_of_a_copy_goes_too() -> None:
    disk = SimulatedFiles()
    path = "incoming/new/schedule/2030-01-01T00.schedule"
    disk.make_directory("incoming/new/schedule")
    disk.open(path, create=True).close()
    drop(disk)
    assert not disk.exists(path)
    assert is_dropped(disk), "so that nobody looks for it"
    make_room(disk)
    assert not is_dropped(disk)


@pytest.mark.parametrize("moment", [Moment.BEFORE, Moment.AFTER])
def test_a_crash_at_any_call_leaves_all_of_it_or_something_that_is_finished(
    moment: Moment,
) -> None:
    seen = {"whole": 0, "begun": 0}
    for at in itertools.count(1):
        disk = replica()
        try:
            drop(FaultyFiles(disk, Faults(Fault(at, FaultKind.CRASH, moment))))
        except SimulatedCrash:
            pass
        else:
            break
        disk = disk.crash()
        if disk.exists(FORMAT_FILE):
            seen["whole"] += 1
            assert not is_dropped(disk)
            assert set(PARTS) <= set(left(disk))
            make_room(disk)
            assert set(PARTS) <= set(left(disk)), "it is a replica as before"
        else:
            seen["begun"] += 1
            assert is_dropped(disk)
        drop(disk)
        assert left(disk) == [DROPPED_FILE, *OTHERS]
    assert all(seen.values()), seen


@pytest.mark.parametrize("moment", [Moment.BEFORE, Moment.AFTER])
def test_a_crash_before_another_replica_is_made_leaves_nothing_of_the_old_one(
    moment: Moment,
) -> None:
    for at in itertools.count(1):
        disk = replica()
        disk.rename(FORMAT_FILE, DROPPED_FILE)
        disk.sync_directory("")
        try:
            make_room(FaultyFiles(disk, Faults(Fault(at, FaultKind.CRASH, moment))))
        except SimulatedCrash:
            pass
        else:
            break
        disk = disk.crash()
        assert is_dropped(disk) or left(disk) == list(OTHERS)
        make_room(disk)
        assert left(disk) == list(OTHERS)
    assert at > len(PARTS)
