"""The data directory's FORMAT file: made once, and never made up."""

import contextlib
import json
import random
from dataclasses import replace

import pytest

from storage.directory import (
    FORMAT_FILE,
    FORMAT_VERSION,
    LOCK_FILE,
    LOG_DIRECTORIES,
    Identity,
    open_identity,
)
from storage.errors import DamageError, DirectoryLockedError, DiskError, FormatVersionError
from tests.unit.storage.samples import content, overwrite
from tests.world.storage.faults import Fault, FaultKind, Faults, FaultyFiles, Moment, SimulatedCrash
from tests.world.storage.files import SimulatedFiles

DOCUMENT = {"format": 1, "stamp": 7, "shard": 3, "id_secret": "00" * 16}


def counting(length: int) -> bytes:
    return bytes(range(1, length + 1))


def with_format(text: bytes) -> SimulatedFiles:
    files = SimulatedFiles()
    overwrite(files, FORMAT_FILE, 0, text)
    return files


def test_a_fingerprint_tells_directories_apart() -> None:
    one = Identity(stamp=1, shard=0, id_secret=bytes(16))
    others = [replace(one, stamp=2), replace(one, shard=1), replace(one, id_secret=b"x" * 16)]
    assert len({it.fingerprint for it in (one, *others)}) == 4
    assert replace(one, version=1).fingerprint == one.fingerprint


def test_it_is_made_once() -> None:
    files = SimulatedFiles()
    made = open_identity(files, random_bytes=counting, shard=5)
    assert made == Identity(stamp=0x01020304, shard=5, id_secret=counting(16))
    assert open_identity(files, random_bytes=None) == made
    assert open_identity(files, random_bytes=bytes, shard=9) == made
    assert json.loads(content(files, FORMAT_FILE)) == {
        "format": FORMAT_VERSION,
        "stamp": 0x01020304,
        "shard": 5,
        "id_secret": counting(16).hex(),
    }


def test_the_stamp_is_never_zero() -> None:
    assert open_identity(SimulatedFiles(), random_bytes=bytes).stamp == 1


def test_it_is_not_made_unless_asked_for() -> None:
    files = SimulatedFiles()
    with pytest.raises(FileNotFoundError):
        open_identity(files, random_bytes=None)
    assert files.list("") == []


@pytest.mark.parametrize("directory", LOG_DIRECTORIES)
def test_it_is_not_made_beside_logs(directory: str) -> None:
    # With another stamp every frame of these logs would be taken for a torn tail, and cut off.
    files = SimulatedFiles()
    files.make_directory(directory)
    overwrite(files, f"{directory}/file", 0, b"x")
    with pytest.raises(DamageError, match=r"FORMAT is damaged .* is missing"):
        open_identity(files, random_bytes=counting)


def test_a_newer_format_is_named() -> None:
    files = with_format(json.dumps({**DOCUMENT, "format": FORMAT_VERSION + 1}).encode())
    with pytest.raises(FormatVersionError, match="simulated has format version 4"):
        open_identity(files, random_bytes=counting)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b'{"format": 1}',
        *(
            json.dumps({**DOCUMENT, **wrong}).encode()
            for wrong in (
                {"format": 0},
                {"format": "x"},
                {"stamp": 0},
                {"stamp": 1 << 32},
                {"shard": -1},
                {"shard": 1 << 16},
                {"id_secret": "00" * 15},
                {"id_secret": "xy" * 16},
                {"id_secret": 5},
                {"stamp": None},
            )
        ),
    ],
)
def test_what_is_no_format_file_is_damage(text: bytes) -> None:
    with pytest.raises(DamageError, match="FORMAT is damaged at offset 0: not a format file"):
        open_identity(with_format(text), random_bytes=counting)


@pytest.mark.parametrize("kind", [FaultKind.CRASH, FaultKind.NO_SPACE, FaultKind.IO_ERROR])
@pytest.mark.parametrize("moment", Moment)
def test_a_crash_anywhere_leaves_the_whole_file_or_none(kind: FaultKind, moment: Moment) -> None:
    for call in range(1, 30):
        for seed in range(10):
            disk = SimulatedFiles(rng=random.Random(seed))
            faults = Faults(Fault(call, kind, moment))
            made: Identity | None = None
            with contextlib.suppress(SimulatedCrash, DiskError):
                made = open_identity(FaultyFiles(disk, faults), random_bytes=counting)
            disk = disk.crash()
            found = open_identity(disk, random_bytes=lambda length: counting(length)[::-1])
            assert made is None or found == made
            assert open_identity(disk, random_bytes=None) == found
        if not faults.struck:
            return
    pytest.fail("the calls never came to an end")


def test_one_owner_at_a_time() -> None:
    files = SimulatedFiles()
    with (
        files.lock(LOCK_FILE),
        pytest.raises(DirectoryLockedError, match="in use by process 1"),
        files.lock(LOCK_FILE),
    ):
        pass
    with files.lock(LOCK_FILE):
        pass
