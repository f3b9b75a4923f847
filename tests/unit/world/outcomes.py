"""What power losses leave of simulated files, for the tests of files and of faults."""

from storage.files import File, Files
from tests.unit.storage.samples import content
from tests.world.storage.files import SimulatedFiles

OUTCOME_COUNT = 3000  # Power losses per test: enough for every outcome that is named to occur.


def durable_file(files: SimulatedFiles, path: str, data: bytes = b"") -> File:
    file = files.open(path, create=True)
    file.pwrite([data], 0)
    file.fdatasync()
    files.sync_directory(path.rpartition("/")[0])
    return file


def tree(files: Files) -> dict[str, bytes]:
    return {name: content(files, name) for name in files.list("")}


def outcomes(files: SimulatedFiles) -> list[SimulatedFiles]:
    """What power losses at this moment leave. `files` stays on."""
    machines = [files.crash() for _ in range(OUTCOME_COUNT)]
    files.is_off = False
    return machines


def contents(files: SimulatedFiles, path: str) -> set[bytes]:
    return {content(machine, path) for machine in outcomes(files)}


def trees(files: SimulatedFiles) -> set[tuple[tuple[str, bytes], ...]]:
    return {tuple(tree(machine).items()) for machine in outcomes(files)}
