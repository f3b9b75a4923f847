"""Notes in the data directory that the process died of a memory fault (SIGSEGV, SIGBUS).

LMDB maps its file and follows the numbers in it. It can be trusted with pages that a start
verifies. A page that rots while the server runs, or that a start left out, may lead it anywhere,
and then there is no exception to name the page. Python's own handler writes a line to
`catalog/fault` then, the process ends, and the next start verifies the whole catalog before it lets
LMDB near it. The damage gets its name, and the server does not run into it again and again.

Cost: none until it happens. Threads: set up before any starts.
"""

import faulthandler
import os
from pathlib import Path
from typing import BinaryIO

from storage.files import FILE_MODE

FAULT_FILE = "fault"


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags, FILE_MODE)


class MemoryFaults:
    """The file `fault` in a directory."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FAULT_FILE
        self._file: BinaryIO | None = None

    @property
    def was_seen(self) -> bool:
        """Whether a process before this one died of a fault, and none looked into it."""
        try:
            return self._path.stat().st_size > 0
        except FileNotFoundError:
            return False

    def watch(self) -> None:
        """Note a fault from now on; nothing where the directory does not exist yet."""
        if self._file is None and self._path.parent.is_dir():
            self._file = open(self._path, "ab", opener=_opener)  # noqa: SIM115 (it stays open)
            faulthandler.enable(self._file, all_threads=False)

    def remove_notes(self) -> None:
        """Empty the file, once a start has verified the catalog because of its notes."""
        self.watch()
        if self._file is not None:
            self._file.truncate(0)
