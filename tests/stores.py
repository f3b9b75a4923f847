"""Which data directories were written, and what is wrong with them: for `tests/conftest.py`.

Cost: about 2 ms per store. Threads: one.
"""

import fcntl
from collections import deque
from collections.abc import Callable
from pathlib import Path

from delayserver.recovery.check import check, check_path
from storage.catalog import MAX_BYTES, Catalog, Table
from storage.check import Report
from storage.directory import (
    CATALOG_DIRECTORY,
    FORMAT_FILE,
    LOCK_FILE,
    LOG_DIRECTORIES,
    open_identity,
)
from storage.errors import StorageError
from storage.files import Files
from storage.tiered_catalog import TieredCatalog
from tests.world.storage.faults import FaultyFiles
from tests.world.storage.files import SimulatedFiles

SIMULATED_MAX = 8
"""So many are kept until the test is over; one that makes more has the oldest checked before."""


class Stores:
    """The stores that were written and are not checked yet."""

    def __init__(self) -> None:
        self._simulated: deque[tuple[SimulatedFiles, Catalog]] = deque()
        self._real: set[Path] = set()
        self._seen: set[Path] = set()
        self._found: list[str] = []
        self.is_off = False
        """Nothing is checked."""

    def add(self, files: Files, catalog: Catalog) -> None:
        """Somebody is about to write these."""
        while isinstance(files, FaultyFiles):
            files = files._inner
        if not isinstance(files, SimulatedFiles):
            self._real.add(Path(files.root).resolve())
            return
        # Of servers that were started one after the other on a disk the last one knows its catalog.
        # Those that are off have an heir; else they would push out one that is in use, and may have
        # a bad sector just then.
        others = [one for one in self._simulated if one[0] is not files and not one[0].is_off]
        self._simulated = deque([*others, (files, catalog)])
        if len(self._simulated) > SIMULATED_MAX:
            self._check_simulated(*self._simulated.popleft())

    def add_below(self, root: Path, *, depth: int) -> None:
        """All data directories in this one that were not looked at before."""
        for level in range(depth + 1):
            paths = root.glob("*/" * level + FORMAT_FILE)
            self._real |= {path.parent.resolve() for path in paths} - self._seen

    def has_below(self, root: Path) -> bool:
        """Whether a data directory in this one is still to be checked."""
        return any(path.is_relative_to(root.resolve()) for path in self._real)

    def take(self, *, everything: bool = False) -> list[str]:
        """Check all of which nobody is the owner; what was found since the last time."""
        while self._simulated:
            self._check_simulated(*self._simulated.popleft())
        for path in sorted(self._real):
            if everything or not _is_locked(path):
                self._check_real(path)
        found, self._found = self._found, []
        return found

    def _check_simulated(self, files: SimulatedFiles, catalog: Catalog) -> None:
        if not (self.is_off or files.is_off):
            self._note(files.root, lambda: check(files, catalog))

    def _check_real(self, path: Path) -> None:
        self._real.discard(path)
        self._seen.add(path)
        # It may be gone; and a server that refused to start has made nothing but the first file.
        names = (CATALOG_DIRECTORY, *LOG_DIRECTORIES)
        if self.is_off or not any((path / name).exists() for name in names):
            return
        self._note(f"{path}", lambda: check_path(path, catalog_max_bytes=MAX_BYTES))

    def _note(self, root: str, run: Callable[[], Report]) -> None:
        try:
            self._found += [f"{root}: {found}" for found in run().damage]
        except StorageError as error:
            self._found.append(f"{root}: {error}")


def _is_locked(path: Path) -> bool:
    try:
        with (path / LOCK_FILE).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def keys_of(files: Files, catalog: Catalog) -> dict[bytes, bytes]:
    """The table KEYS of a store that nobody has open, with what stands in key runs."""
    stamp = open_identity(files, random_bytes=None).stamp
    tiered = TieredCatalog(catalog, files, stamp=stamp, readonly=True)
    found = dict(tiered.scan(Table.KEYS))
    tiered.close_runs()
    return found
