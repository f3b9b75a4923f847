"""A node does without its replica: the files of the shard are deleted.

    DIR/FORMAT, …  ── rename FORMAT → DROPPED ──▶ there is no replica ── delete all the rest
    DIR/DROPPED    ── to make a replica again ──▶ delete all files left, then DROPPED

DROPPED says that the node shall have no replica, so that no process looks for it, and that the
files left there belong to none. A process may be killed in the middle and leave logs. Without
FORMAT they could not be told from those of a damaged directory. Tokens, the lock, and the files
that repairs have replaced are not part of the replica, and stay.

Cost: an unlink for each file. Threads: one, the caller's; nothing of the directory is open.
"""

from typing import Final

from delayserver.recovery import incoming
from delayserver.recovery.memory_faults import FAULT_FILE
from delayserver.recovery.snapshots import COPIED
from storage.directory import CATALOG_DIRECTORY, DROPPED_FILE, FORMAT_FILE
from storage.files import Files, replace_file
from storage.message_log import DIRECTORY as MESSAGES
from storage.replicated.own import OWN_FILE
from storage.staging import DIRECTORY as IMPORTS

_KEPT: Final = frozenset({f"{CATALOG_DIRECTORY}/{FAULT_FILE}"})
"""A process that dies of a memory fault writes into it."""


def is_dropped(files: Files) -> bool:
    """Whether a directory shall have no replica."""
    return files.exists(DROPPED_FILE)


def drop(files: Files) -> None:
    """Let there be no replica in a directory. Raises StorageError."""
    incoming.finish_swap(files)
    if files.exists(FORMAT_FILE):
        files.rename(FORMAT_FILE, DROPPED_FILE)
        files.sync_directory("")
    elif not is_dropped(files):
        replace_file(files, DROPPED_FILE, b"")
    _delete_all(files)


def make_room(files: Files) -> None:
    """Clear the place of a dropped replica for a new one, if it is one. Raises StorageError."""
    if is_dropped(files):
        _delete_all(files)
        files.unlink(DROPPED_FILE)
        files.sync_directory("")


def _delete_all(files: Files) -> None:
    incoming.clear(files)
    for directory in (MESSAGES, IMPORTS, *COPIED):
        paths = {f"{directory}/{name}" for name in files.list(directory)}
        for path in paths - _KEPT:
            files.unlink(path)
        if paths:
            files.sync_directory(directory)
    if files.exists(OWN_FILE):
        files.unlink(OWN_FILE)
        files.sync_directory("")
