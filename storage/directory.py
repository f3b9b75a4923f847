"""The data directory: who owns it, which format it has, and the secrets that belong to it.

    DIR/LOCK              owned by one process (I12)
    DIR/FORMAT            JSON: format version, stamp of the frames, shard, secret of the ids
    DIR/messages/         the message log
    DIR/schedule/         the schedule log, one file per UTC hour
    DIR/dispatch/         the dispatch log, one file per UTC hour
    DIR/definitions/      the definitions log
    DIR/catalog/          LMDB
    DIR/REPAIR            the plan of a repair that was interrupted
    DIR/repair/           the files that repairs replaced
    DIR/snapshots/        the files that another node is copying now
    DIR/incoming/         files that come from another node
    DIR/DROPPED           instead of FORMAT: the node shall have no replica of the shard
    DIR/KIND              the kind of the directory, and the life it belongs to (`storage.kinds`)
    DIR/RESTORING         a restore makes the directory, or was interrupted

Cost: a few system calls at start. Threads: used before any thread starts.
"""

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Final

from storage import kinds
from storage.errors import (
    DamageError,
    ForeignDirectoryError,
    FormatVersionError,
    RepairUnfinishedError,
)
from storage.files import Files, replace_file

FORMAT_VERSION = 3
DEFINITIONS_VERSION = 2
"""The first with a definitions log."""
FORMAT_FILE: Final = kinds.FORMAT_FILE
LOCK_FILE = "LOCK"
REPAIR_FILE = "REPAIR"
DROPPED_FILE = "DROPPED"
REPAIR_DIRECTORY = "repair"
ID_SECRET_BYTES = 16
CATALOG_DIRECTORY = "catalog"
LOG_DIRECTORIES = ("messages", "schedule", "dispatch", "definitions")


@dataclass(frozen=True, slots=True)
class Identity:
    """The values that tell this data directory from all others; made once, never changed."""

    stamp: int
    """In every frame header; not known to publishers (u32)."""
    shard: int
    """In every message id (u16)."""
    id_secret: bytes
    """Key of the check digits of message ids, 16 bytes."""
    version: int = FORMAT_VERSION
    """The directory's format. 1: there is no definitions log yet. 2: there are no days yet."""

    @property
    def fingerprint(self) -> str:
        """Tells this directory from all others, and neither stamp nor secret: 16 hex digits."""
        told = self.stamp.to_bytes(4, "big") + self.shard.to_bytes(2, "big")
        return blake2b(told, key=self.id_secret, digest_size=8).hexdigest()

    @property
    def has_definitions(self) -> bool:
        """Whether it was made, or carried over, by a server that writes a definitions log."""
        return self.version >= DEFINITIONS_VERSION


def open_identity(
    files: Files,
    *,
    random_bytes: Callable[[int], bytes] | None,
    shard: int = 0,
    given: Identity | None = None,
    of: Collection[kinds.Kind] = kinds.SERVED,
) -> Identity:
    """Read DIR/FORMAT; make it first where there is none and `random_bytes` is given.

    `given`: the identity that a copy of the shard takes over. `of`: the kinds of directory that the
    caller can use. Raises DirectoryKindError for a directory of another kind, ForeignDirectoryError
    for a directory of something else, FormatVersionError for one of a newer server, DamageError for
    a FORMAT file that is not one or is missing beside logs, RepairUnfinishedError where a server
    must not start yet, FileNotFoundError when there is none and none may be made."""
    names = files.list("")
    kinds.require(files, of if given is None else kinds.OWNED, names)
    if random_bytes is not None and REPAIR_FILE in names:
        raise RepairUnfinishedError(f"{files.root}")
    try:
        file = files.open(FORMAT_FILE)
        if random_bytes is not None:
            # A process that was killed while it made the file may not have made its name durable.
            files.sync_directory("")
    except FileNotFoundError:
        if random_bytes is None:
            raise
        return _create(files, random_bytes, shard, given)
    try:
        text = file.pread(64 * 1024, 0)
    finally:
        file.close()
    try:
        document = json.loads(text)
        version = int(document["format"])
        if version > FORMAT_VERSION:
            raise FormatVersionError(f"{files.root}", version, FORMAT_VERSION)
        identity = Identity(
            stamp=int(document["stamp"]),
            shard=int(document["shard"]),
            id_secret=bytes.fromhex(document["id_secret"]),
            version=version,
        )
        if not (
            version >= 1
            and 0 < identity.stamp < 1 << 32
            and 0 <= identity.shard < 1 << 16
            and len(identity.id_secret) == ID_SECRET_BYTES
        ):
            raise ValueError("a number is out of its range")
        if given is not None and replace(identity, version=given.version) != given:
            raise ForeignDirectoryError(f"{files.root}")
        return identity
    except (ValueError, KeyError, TypeError) as error:
        raise DamageError(FORMAT_FILE, 0, f"not a format file ({error})") from error


def _create(
    files: Files, random_bytes: Callable[[int], bytes], shard: int, given: Identity | None
) -> Identity:
    # FORMAT is the first thing that is made. With a new stamp the logs could not be read.
    if any(files.list(name) for name in LOG_DIRECTORIES):
        raise DamageError(FORMAT_FILE, 0, "the file is missing, though there are logs beside it")
    identity = given or Identity(
        stamp=int.from_bytes(random_bytes(4), "big") or 1,
        shard=shard,
        id_secret=random_bytes(ID_SECRET_BYTES),
    )
    _write(files, identity)
    return identity


def upgrade(files: Files, identity: Identity) -> None:
    """Note that the directory has all that the newest version asks for; older servers refuse it."""
    _write(files, replace(identity, version=FORMAT_VERSION))


def encode_identity(identity: Identity) -> bytes:
    """The content of DIR/FORMAT."""
    document = {
        "format": identity.version,
        "stamp": identity.stamp,
        "shard": identity.shard,
        "id_secret": identity.id_secret.hex(),
    }
    return json.dumps(document, indent=1).encode() + b"\n"


def _write(files: Files, identity: Identity) -> None:
    replace_file(files, FORMAT_FILE, encode_identity(identity))


def life_of(files: Files, identity: Identity, above: Files | None = None) -> str:
    """The name of the life that the directory is in. `above`: the directory of all shards, which
    has the name for them. Raises DamageError, DiskError."""
    mark = kinds.read_mark(files if above is None else above)
    if mark is not None:
        return mark.life
    return identity.fingerprint if above is None else kinds.UNNAMED_LIFE


def keep_mark(files: Files, kind: kinds.Kind, life: str) -> None:
    """Write DIR/KIND where there is none: the directory is new, or an older version has made it.
    Raises DamageError, DiskError."""
    if kinds.read_mark(files) is None:
        kinds.write_mark(files, kinds.DirectoryMark(kind, life))
