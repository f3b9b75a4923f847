"""The kind of a directory, the life it belongs to, and whether all of it is there.

    DIR/KIND         JSON: the kind of the directory, and the life it belongs to
    DIR/RESTORING    a restore makes the directory, or was interrupted: nothing in it counts
    DIR/PARTIAL      a backup is made or deleted here, or that was interrupted, likewise
    DIR/BACKUP       the manifest of a backup, written last

A server has several *lives*: the first begins when its directory is made, and each restore begins
another one. Two lives of one server have the same ids and stamps, but have answered different
things, so backups, shipped logs and exports belong to one of them. The name of the first life is
the fingerprint of the directory's identity, or drawn where there are several shards. A restore
draws the name of the next one.

Each opener of a directory says which kinds it can use (`require`). A directory without KIND was
made by a version that wrote none, or is new; then the files in it tell its kind. RESTORING and
PARTIAL are durable before anything else in the directory is, and are removed after all else is
durable. So a crash at any moment leaves a directory that is whole, or one that no opener takes for
whole.

Cost: one list of the directory, and a small file. Threads: functions without state.
"""

import contextlib
import json
from collections.abc import Collection
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple

from storage.errors import DamageError, DirectoryKindError, DiskError
from storage.files import Files, OsFiles, replace_file

KIND_FILE: Final = "KIND"
RESTORING_FILE: Final = "RESTORING"
PARTIAL_FILE: Final = "PARTIAL"
MANIFEST_FILE: Final = "BACKUP"
FORMAT_FILE: Final = "FORMAT"
SHARDS_FILE: Final = "SHARDS"
LOG_DIRECTORY: Final = "_log"
FRESH_NAMES: Final = frozenset({"lost+found", "LOCK", f"{RESTORING_FILE}.new"})
"""A directory with nothing else in it is empty: a new file system has the first, and a restore that
was interrupted at its very beginning leaves the others."""
LIFE_BYTES: Final = 8
"""Random bytes in the name of a life."""
UNNAMED_LIFE: Final = "unnamed"
"""The life of shards without a supervisor, which names it (`delayserver.serve.supervisor`)."""
_FIRST_SHARD: Final = "shard-0000"
_VERSION: Final = 1
_FILE_MAX_BYTES: Final = 4096


class Kind(StrEnum):
    """The kinds of directory."""

    DATA = "data"
    """A data directory: of a server alone, or of one shard."""
    SHARDS = "shards"
    """The data directory of several shards, which are below it."""
    REPLICA = "replica"
    """The copy of a shard that a node of a cluster has."""
    BACKUP = "backup"
    """A backup, or a shard's part of one. It shares its files with others."""
    BACKUPS = "backups"
    """All backups of a server."""
    LOG = "log"
    """The message log behind backups."""
    UNFINISHED = "unfinished"
    """A restore makes it, or was interrupted. No file says so but RESTORING."""
    PARTIAL = "partial"
    """A backup that is made or deleted, or that was interrupted, likewise."""


SERVED: Final = frozenset({Kind.DATA})
"""A server alone, or a shard of several, starts on it."""
OWNED: Final = frozenset({Kind.DATA, Kind.REPLICA})
"""A command may change it."""
READABLE: Final = frozenset({Kind.DATA, Kind.REPLICA, Kind.BACKUP})
"""A command may read it."""
ANY: Final = frozenset(Kind)
"""Its caller has asked already."""

_TOLD: Final = {
    Kind.DATA: ("the data directory of a server", "name another directory"),
    Kind.SHARDS: (
        "the data directory of a server with several shards",
        "name another directory, or one of its shards",
    ),
    Kind.REPLICA: (
        "what a node of a cluster has of a shard",
        "start a server on it with --cluster, or name another directory",
    ),
    Kind.BACKUP: (
        "a backup, whose files other backups share",
        "make a data directory of it (`delayserver restore BACKUP DIR`), and use that",
    ),
    Kind.BACKUPS: ("a directory of backups", "name another directory"),
    Kind.LOG: ("the message log behind backups", "name another directory"),
    Kind.UNFINISHED: (
        "a directory that `delayserver restore` makes, or that an interrupted one has left: not "
        "all of it is there",
        "wait until that has ended; if it was interrupted, delete what is in the directory and "
        "restore again",
    ),
    Kind.PARTIAL: (
        "a backup that is made or deleted, or that an interrupted server has left: not all of it "
        "is there",
        "name another one; the server deletes it when it makes the next one",
    ),
}


class DirectoryMark(NamedTuple):
    """The content of a file KIND."""

    kind: Kind
    life: str
    """The name of the life it belongs to, e.g. 16 hex digits."""


def read_mark(files: Files, place: str = "") -> DirectoryMark | None:
    """The content of KIND in the directory `place` (empty: the root); None: there is no such file.

    Raises DamageError, DiskError."""
    path = below(place, KIND_FILE)
    try:
        file = files.open(path)
    except FileNotFoundError:
        return None
    with contextlib.closing(file):
        text = file.pread(_FILE_MAX_BYTES, 0)
    try:
        document = json.loads(text)
        if int(document["format"]) > _VERSION:
            raise ValueError("a newer version wrote it")
        return DirectoryMark(Kind(document["kind"]), str(document["life"]))
    except (ValueError, KeyError, TypeError) as error:
        raise DamageError(path, 0, f"not a file of a kind ({error})") from error


def write_mark(files: Files, mark: DirectoryMark, place: str = "") -> None:
    """Record the kind and the life of a directory, durably. Raises DiskError."""
    document = {"format": _VERSION, "kind": mark.kind, "life": mark.life}
    replace_file(files, below(place, KIND_FILE), json.dumps(document).encode() + b"\n")


def require(files: Files, kinds: Collection[Kind], names: Collection[str] | None = None) -> None:
    """Refuse a directory that is of none of these kinds; one of no kind may be made to one.

    `names`: the names in it, if the caller has listed them. Raises DirectoryKindError, DamageError,
    DiskError."""
    found = _kind(files, "", files.list("") if names is None else names)
    if found is not None and found not in kinds:
        raise DirectoryKindError(files.root, *_TOLD[found])


def _kind(files: Files, place: str, names: Collection[str]) -> Kind | None:
    """The kind of the directory `place`, with these names in it; None: it is empty, not there, or
    of no kind that is known. Raises DamageError, DiskError."""
    if RESTORING_FILE in names:
        return Kind.UNFINISHED
    if PARTIAL_FILE in names:
        return Kind.PARTIAL
    if KIND_FILE in names and (mark := read_mark(files, place)) is not None:
        return mark.kind
    # A version that wrote no such file has made it.
    if MANIFEST_FILE in names:
        return Kind.BACKUP
    if SHARDS_FILE in names:
        is_backup = _is_part_of_backup(files, below(place, _FIRST_SHARD))
        return Kind.BACKUP if is_backup else Kind.SHARDS
    if FORMAT_FILE in names:
        return Kind.DATA
    others = sorted(set(names) - FRESH_NAMES)
    if LOG_DIRECTORY in names or any(_has_backup(files, below(place, name)) for name in others):
        return Kind.BACKUPS
    return None


def _is_part_of_backup(files: Files, place: str) -> bool:
    return files.exists(below(place, MANIFEST_FILE)) or files.exists(below(place, PARTIAL_FILE))


def _has_backup(files: Files, place: str) -> bool:
    with contextlib.suppress(DiskError):  # Not every directory is ours, e.g. lost+found.
        return _is_part_of_backup(files, place) or _is_part_of_backup(
            files, below(place, _FIRST_SHARD)
        )
    return False


def require_servable(root: str) -> None:
    """Refuse a directory on which no server may start, before anything is written into it: it is
    of another kind, or stands in a backup, in a directory of backups, or in one that a restore
    makes.

    Cost: some calls for each directory above. Raises DirectoryKindError, DamageError, DiskError."""
    require(OsFiles(root, readonly=True), {*OWNED, Kind.SHARDS})
    for above in Path(root).resolve().parents:
        files = OsFiles(str(above), readonly=True)
        known = (RESTORING_FILE, PARTIAL_FILE, KIND_FILE, MANIFEST_FILE)
        found = _kind(files, "", [name for name in known if _is_mark(files, name)])
        if found not in (None, Kind.DATA, Kind.SHARDS, Kind.REPLICA):
            told, advice = _TOLD[found]
            raise DirectoryKindError(root, f"in {above}, which is {told}", advice)


def _is_mark(files: Files, name: str) -> bool:
    """Whether a file of ours has that name: others may have a directory or a text called so."""
    try:
        with contextlib.closing(files.open(name)) as file:
            return file.pread(1, 0) == b"{"
    except (FileNotFoundError, DiskError):
        return False


def require_fresh(files: Files) -> None:
    """Refuse a directory in which something is. Raises DirectoryKindError, DiskError."""
    names = files.list("")
    require(files, (), names)
    if set(names) - FRESH_NAMES:
        found = "a directory that is not empty"
        advice = "name another directory, or move what is there out of the way"
        raise DirectoryKindError(files.root, found, advice)


def begin_restore(files: Files, origin: str) -> None:
    """Say that a directory, which must be empty, is being made of the backup `origin`.

    Durable on return: from then on no opener takes it for whole. The caller has locked it, or knows
    that no other process sees it. Raises DirectoryKindError, DiskError."""
    require_fresh(files)
    data = json.dumps({"format": _VERSION, "of": origin}).encode() + b"\n"
    replace_file(files, RESTORING_FILE, data)


def end_restore(files: Files) -> None:
    """All of the directory is durable: let it count, durably. Raises DiskError."""
    files.unlink(RESTORING_FILE)
    files.sync_directory("")


def below(place: str, path: str) -> str:
    """A path in the directory `place` (empty: the root)."""
    return f"{place}/{path}" if place else path
