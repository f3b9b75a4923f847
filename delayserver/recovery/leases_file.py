"""The file of the leases: `LEASES` in the data directory, and how a start reads it.

    start ── read ──▶ leases that go on ──▶ begin: the file says that a process runs
    planned stop ──▶ keep: the file says that it has ended in order, and with which leases

After a kill the file still says that a process runs. So the next start knows of the kill, and notes
the moment: all messages that had fallen due by then may have been handed out.

Cost: two syncs at a start, and two at a stop. Threads: used before the threads start, and after
they have ended.
"""

from typing import Final, Protocol

import structlog

from delayserver.records.kept_leases import (
    NONE_KEPT,
    KeptLeases,
    decode_kept_leases,
    encode_kept_leases,
)
from storage.directory import Identity
from storage.errors import DamageError, StorageError
from storage.files import Files, replace_file

LEASES_FILE: Final = "LEASES"

log = structlog.get_logger()


class LeasesPlace(Protocol):
    """Where a shard leaves its leases to the next process that serves it."""

    def read(self) -> KeptLeases:
        """Returns the leases that the last process has left. Raises StorageError."""

    def begin(self, kept: KeptLeases) -> None:
        """A process serves from now on: the leases that were read are not honoured again. Raises
        StorageError."""

    def keep(self, kept: KeptLeases) -> None:
        """The process ends in order, and leaves this to the next one."""


class LeasesFile:
    """A file in the data directory itself: that of a server on its own."""

    def __init__(self, files: Files, identity: Identity) -> None:
        self._files = files
        self._stamp = identity.stamp

    def read(self) -> KeptLeases:
        """See `LeasesPlace`. A file that is damaged counts as that of a process that was killed:
        its messages come again, and are marked."""
        try:
            file = self._files.open(LEASES_FILE)
        except FileNotFoundError:
            return NONE_KEPT
        try:
            data = file.pread(file.size(), 0)
            return decode_kept_leases(data, self._stamp, LEASES_FILE)
        except DamageError as error:
            log.error("the leases of the last run are lost", error=str(error))
            return NONE_KEPT
        finally:
            file.close()

    def begin(self, kept: KeptLeases) -> None:
        """See `LeasesPlace`."""
        replace_file(self._files, LEASES_FILE, encode_kept_leases(kept, self._stamp))

    def keep(self, kept: KeptLeases) -> None:
        """See `LeasesPlace`. Where the disk is full the leases end with the process, as after a
        kill."""
        try:
            replace_file(self._files, LEASES_FILE, encode_kept_leases(kept, self._stamp))
        except StorageError as error:
            log.error("the leases end with this process", error=str(error))
