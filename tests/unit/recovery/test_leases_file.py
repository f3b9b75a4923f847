"""The file of the leases: a planned stop is told from a kill."""

import pytest

from delayserver.records.kept_leases import KeptLeases
from delayserver.recovery.leases_file import LEASES_FILE, LeasesFile
from storage.directory import Identity
from storage.errors import StorageError
from tests.world.storage.faults import Fault, FaultKind, Faults, FaultyFiles, Moment
from tests.world.storage.files import SimulatedFiles

IDENTITY = Identity(7, 0, bytes(16))


@pytest.fixture
def files() -> SimulatedFiles:
    return SimulatedFiles()


def test_without_a_file_nothing_was_kept(files: SimulatedFiles) -> None:
    assert not LeasesFile(files, IDENTITY).read().is_clean


def test_a_process_that_runs_or_was_killed_is_not_one_that_has_stopped(
    files: SimulatedFiles,
) -> None:
    place = LeasesFile(files, IDENTITY)
    place.keep(KeptLeases(is_clean=True))
    assert place.read().is_clean
    place.begin(KeptLeases())
    assert not LeasesFile(files.crash(), IDENTITY).read().is_clean


def test_what_is_kept_outlasts_a_power_loss(files: SimulatedFiles) -> None:
    LeasesFile(files, IDENTITY).keep(KeptLeases(is_clean=True))
    assert LeasesFile(files.crash(), IDENTITY).read().is_clean


def test_a_damaged_file_counts_as_a_kill(files: SimulatedFiles) -> None:
    place = LeasesFile(files, IDENTITY)
    place.keep(KeptLeases(is_clean=True))
    files.open(LEASES_FILE).pwrite([b"?"], 5)
    assert not place.read().is_clean


def test_that_of_another_directory_counts_as_a_kill(files: SimulatedFiles) -> None:
    LeasesFile(files, IDENTITY).keep(KeptLeases(is_clean=True))
    assert not LeasesFile(files, Identity(8, 0, bytes(16))).read().is_clean


def test_a_full_disk_does_not_hold_up_a_stop_but_a_start(files: SimulatedFiles) -> None:
    full = FaultyFiles(files, Faults(Fault(1, FaultKind.NO_SPACE, Moment.BEFORE, for_good=True)))
    place = LeasesFile(full, IDENTITY)
    place.keep(KeptLeases(is_clean=True))
    assert not place.read().is_clean
    with pytest.raises(StorageError):
        place.begin(KeptLeases())
