"""The note of a load: which table was staged under its name, and how; and the lock of its name.

    imports/<id>.load     JSON, sealed; empty while nothing is staged as a whole

The note is written when everything is staged, before a manifest is, and stays when the load is
done: a run that follows under the name compares its table with it. It says which parts each shard
has; nothing is adopted before it, and from then on nothing is staged again, unless nothing was
adopted and the table is another one.

A load holds a lock on the file (flock), so that two loads under one name do not throw each other's
files away; the lock of a process that was killed is free. An empty note without a lock belongs to a
load that was killed before it had staged everything: `abandoned` finds them.

The mark of a table is the sum of a number for each of its messages, made of subject, due time, key
and content: it does not depend on the order of the rows, nor on how Spark cuts them. Two tables
with one mark are taken for the same; by chance that is one in 2^32 for each row that differs.

Cost: some system calls. Threads: the caller's.
"""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from delayserver.errors import PipelineError
from storage.frame import seal, unseal
from storage.staging import is_import_id

SUFFIX = ".load"
Parts = tuple[tuple[str, int], ...]
"""Files of a manifest in their order, and how many rows each has."""


class LoadNote(msgspec.Struct, frozen=True, kw_only=True):
    """The result of staging under a name."""

    columns: dict[str, str | None]
    """The column of the table for each field, as `MessageColumns` has them, and other options that
    change the messages."""
    now_ms: int
    """Messages that were due before this moment were made due at it."""
    delay_max_ms: int
    body_max_bytes: int
    read: int
    """Rows of the table."""
    staged: int
    past: int
    rejected: dict[str, int]
    mark: int
    """The mark of all messages, 64 bits."""
    has_ids: bool
    """Whether the load kept which row became which message, to report it."""
    parts: dict[int, Parts]
    """The parts of each shard that has any, by its number; 0 is a server alone."""


class NoteFile:
    """The note of one name, locked. As a context: the file stays if it holds a note."""

    def __init__(self, directory: Path, import_id: str) -> None:
        """Raises PipelineError if another load has the name."""
        self._path = directory / f"{import_id}{SUFFIX}"
        self._descriptor = self._locked(import_id)

    def _locked(self, import_id: str) -> int:
        while True:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # It may be the file of a load that has just ended and deleted it.
                if self._path.exists() and self._path.samefile(f"/proc/self/fd/{descriptor}"):
                    return descriptor
            except BlockingIOError:
                os.close(descriptor)
                raise PipelineError(
                    f"another load runs under the name {import_id}: wait until it has ended, or "
                    "give this one another --id"
                ) from None
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not os.fstat(self._descriptor).st_size:
            self._path.unlink(missing_ok=True)
        os.close(self._descriptor)

    def read(self) -> LoadNote | None:
        """The note; None: nothing was staged as a whole, or the note does not match its checksum
        because a crash cut it off."""
        text = unseal(os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0))
        return None if text is None else msgspec.json.decode(text, type=LoadNote)

    def write(self, note: LoadNote) -> None:
        """Write it; durable on return. A crash meanwhile leaves a note that cannot be read."""
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, seal(msgspec.json.encode(note)), 0)
        os.fsync(self._descriptor)
        directory = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def clear(self) -> None:
        """From now on nothing counts as staged; durable on return."""
        os.ftruncate(self._descriptor, 0)
        os.fsync(self._descriptor)


def abandoned(directory: Path) -> Iterator[tuple[str, NoteFile]]:
    """Names under which a load was killed before everything was staged, and their notes, locked.
    The other files under such a name may be deleted. The caller closes each note."""
    for path in sorted(directory.glob(f"*{SUFFIX}")):
        import_id = path.name.removesuffix(SUFFIX)
        if not is_import_id(import_id):
            continue
        try:
            file = NoteFile(directory, import_id)
        except PipelineError:
            continue  # The load runs.
        if file.read() is None:
            yield import_id, file
        else:
            file.__exit__()


def mark_of(
    subjects: NDArray[np.uint64],
    due_ms: NDArray[np.int64],
    lengths: NDArray[np.uint32],
    crcs: NDArray[np.uint32],
) -> int:
    """The mark of some messages (arrays of one length): hashes of their subjects, due times, and
    lengths and checksums of their payloads, in which the keys are."""
    content = lengths.astype(np.uint64) << np.uint64(32) | crcs
    # No message is a zero, which would make no difference to a sum.
    begun = _mixed(subjects ^ np.uint64(0x9E3779B97F4A7C15))
    mixed = _mixed(_mixed(begun ^ due_ms.astype(np.uint64)) ^ content)
    return int(mixed.sum(dtype=np.uint64))


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Each number with its bits spread over all (the finalizer of MurmurHash3, by A. Appleby)."""
    numbers = (numbers ^ numbers >> np.uint64(33)) * np.uint64(0xFF51AFD7ED558CCD)
    numbers = (numbers ^ numbers >> np.uint64(33)) * np.uint64(0xC4CEB9FE1A85EC53)
    return numbers ^ numbers >> np.uint64(33)
