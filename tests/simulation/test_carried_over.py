"""A directory of version 1, which has no definitions log, is carried over by the first start."""

import contextlib
import json
import random
from pathlib import Path

import pytest

from delayserver.records.tables import DEFINITIONS_KEY, read_definitions_place
from delayserver.recovery.check import check_path
from delayserver.recovery.definitions import differences, read_generation
from storage.catalog import LmdbCatalog, Table
from storage.check import Severity
from storage.definitions_log import DIRECTORY as DEFINITIONS
from storage.directory import CATALOG_DIRECTORY, FORMAT_FILE, FORMAT_VERSION, open_identity
from storage.errors import DiskError
from storage.files import OsFiles
from tests.depth import every, least
from tests.simulation.on_disk import (
    CATALOG_BYTES,
    END_MS,
    SETTINGS,
    Life,
    copy,
    deliver_all,
    make_directory,
)
from tests.world import Observer, SimulatedClock, SimulatedServer
from tests.world.storage.faults import Fault, FaultKind, Faults, FaultyFiles, Moment, SimulatedCrash


def opened(directory: Path) -> LmdbCatalog:
    return LmdbCatalog(str(directory / CATALOG_DIRECTORY), max_bytes=CATALOG_BYTES)


@pytest.fixture(scope="module")
def old(in_memory: Path) -> Path:
    """What a server of version 1 left: it was killed."""
    directory = in_memory / "old"
    make_directory(directory)
    for path in (directory / DEFINITIONS).iterdir():
        path.unlink()
    (directory / DEFINITIONS).rmdir()
    catalog = opened(directory)
    catalog.commit({Table.META: [(DEFINITIONS_KEY, None)]})
    catalog.close()
    document = json.loads((directory / FORMAT_FILE).read_text())
    (directory / FORMAT_FILE).write_text(json.dumps({**document, "format": 1}))
    return directory


def must_be_carried_over(directory: Path) -> None:
    identity = open_identity(OsFiles(str(directory)), random_bytes=None)
    assert identity.version == FORMAT_VERSION
    catalog = opened(directory)
    place = read_definitions_place(catalog)
    assert place is not None and place.generation
    files = OsFiles(str(directory))
    defined = read_generation(files, place.generation, stamp=identity.stamp, end=place.length)
    assert not defined.damage and len(defined.state) > 8
    assert list(differences(defined.state, catalog)) == []
    catalog.close()
    assert check_path(directory, catalog_max_bytes=CATALOG_BYTES).is_clean


def test_the_first_start_writes_it(old: Path, in_memory: Path) -> None:
    directory = copy(old, in_memory / "x")
    report = check_path(directory, catalog_max_bytes=CATALOG_BYTES)
    assert [found.severity for found in report.findings] == [Severity.NOTE]
    Life(directory).end()
    must_be_carried_over(directory)
    before = sorted(path.name for path in (directory / DEFINITIONS).iterdir())
    Life(directory).end()
    assert sorted(path.name for path in (directory / DEFINITIONS).iterdir()) == before


def test_it_delivers_as_before(old: Path, in_memory: Path) -> None:
    new = in_memory / "new"
    make_directory(new)
    expected = deliver_all(new).receipts
    assert deliver_all(copy(old, in_memory / "x")).receipts == expected


def test_what_an_older_server_left_in_between_does_not_count(old: Path, in_memory: Path) -> None:
    """FORMAT had not been written, so a server of version 1 could start again."""
    directory = copy(old, in_memory / "x")
    Life(directory).end()
    document = json.loads((directory / FORMAT_FILE).read_text())
    (directory / FORMAT_FILE).write_text(json.dumps({**document, "format": 1}))
    catalog = opened(directory)
    catalog.commit({Table.SUBJECTS: [((6).to_bytes(4, "big"), b"of the older one")]})
    catalog.close()
    Life(directory).end()
    must_be_carried_over(directory)


@pytest.mark.parametrize("kind", [FaultKind.CRASH, FaultKind.NO_SPACE])
def test_any_call_may_fail(kind: FaultKind, old: Path, in_memory: Path) -> None:
    struck = 0
    for at in (*every(7, range(2, 167, 3)), 167):
        directory = copy(old, in_memory / "x")
        faults = Faults(Fault(at, kind, list(Moment)[at % len(Moment)]))
        catalog = opened(directory)
        files, clock = FaultyFiles(OsFiles(str(directory)), faults), SimulatedClock(END_MS)
        with contextlib.suppress(SimulatedCrash, DiskError):
            SimulatedServer(SETTINGS, files, catalog, clock, random.Random(0), Observer()).close()
        catalog.close()
        Life(directory).end()
        must_be_carried_over(directory)
        struck += bool(faults.struck)
    assert struck >= least(4) and not faults.struck, "there are more calls"
