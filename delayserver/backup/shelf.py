"""Backups: the directory of backups, and the manifest of each.

    BACKUP_DIR/KIND                      the life that they belong to (`storage.kinds`)
    BACKUP_DIR/NAME/                     of a server alone: a data directory at a checkpoint, and
                    BACKUP               its manifest, written last
                    PARTIAL              it is being made or deleted: nothing in it counts
                    KIND                 that it is a backup
    BACKUP_DIR/NAME/SHARDS               of several shards: how many they are
                    shard-0000/BACKUP    each is such a directory, with a manifest of its own
    BACKUP_DIR/_log/                     the message log behind them (`shipped_log`); no backup can
                                         be called so

A backup is whole: it needs no other. A file that it shares with the one before is there under a
second name (a hard link), where the file system knows such; so either may be deleted.

The directory of all backups belongs to one life of one server: the first that uses it writes KIND
(`Shelf.claim`), and every other is refused. Without that a restored server, which has the stamp and
the shards of the lost one, would delete its backups, and continue its log with other records.

A process that is killed leaves PARTIAL behind, and the next backup, or the next start, deletes the
files there. A backup of another life that an operator has moved there is left alone.

Cost: a list reads each manifest: 60 bytes for each file of a backup. Threads: any, one at a time.
"""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import google_crc32c
import msgspec
import structlog

from delayserver.recovery.snapshots import COPIED
from delayserver.wire.bulk import BACKUP_NAME, BackupState, BackupStep
from storage.directory import FORMAT_FILE, Identity
from storage.errors import BackupError, DamageError, OtherLifeError, StorageError
from storage.files import Files, replace_file
from storage.kinds import (
    KIND_FILE,
    MANIFEST_FILE,
    PARTIAL_FILE,
    DirectoryMark,
    Kind,
    below,
    read_mark,
    require,
    write_mark,
)
from storage.shards import SHARDS_FILE, encode_shard_count, shard_directory

_OTHER_DIRECTORY: Final = (
    "nothing in it was changed: start this server with another backup_dir (--backup-dir), which "
    "may be empty, and make a backup then"
)
MANIFEST_VERSION: Final = 1
_NAME: Final = re.compile(BACKUP_NAME)

log = structlog.get_logger()


class BackupFile(NamedTuple):
    """One file of a backup."""

    path: str
    """Below the directory of the shard."""
    length: int
    crc32c: int
    """The checksum of all its bytes."""


class BackupManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a backup of a shard."""

    version: int = MANIFEST_VERSION
    name: str
    server_version: str
    """The version of the software that made it."""
    format_version: int
    stamp: int
    shard: int
    shards: int
    """How many the server has."""
    checkpoint_seq: int
    """The records up to this one are in it, and no other."""
    began_ms: int
    """Everything that was answered before is in it."""
    taken_ms: int
    """Nothing that came later is in it."""
    completed_ms: int
    is_verified: bool
    """Whether every byte was read again, and compared with all others."""
    copied_bytes: int
    """The bytes of the files that were not taken over from the backup before."""
    files: list[BackupFile]
    life: str = ""
    """The life that the server is in (`storage.kinds`). Empty: an older version has made it."""
    number: int = 0
    """From 1, in the order in which they were made, whatever the clock said. 0: likewise."""
    timeline: int = 0
    """The timeline of the log behind it (`delayserver.backup.shipped_log`); 0: there is none."""

    @property
    def total_bytes(self) -> int:
        """The size of all files."""
        return sum(file.length for file in self.files)

    @property
    def order(self) -> tuple[int, int]:
        """By this they are sorted: the newest has the largest."""
        return self.number, self.taken_ms


@dataclass(frozen=True, slots=True)
class BackupView:
    """A shard's part of a backup."""

    name: str
    shard: int
    state: BackupState
    step: BackupStep | None
    began_ms: int
    taken_ms: int | None
    completed_ms: int | None
    checkpoint_seq: int | None
    total_bytes: int
    done_bytes: int
    copied_bytes: int
    is_verified: bool
    error: str | None = None
    log_reaches_ms: int | None = None
    """How far it can be restored with the message log behind it; None: to `taken_ms` alone."""


def view_of(manifest: BackupManifest, log_reaches_ms: int | None = None) -> BackupView:
    """One that counts."""
    return BackupView(
        name=manifest.name,
        shard=manifest.shard,
        state="complete",
        step=None,
        began_ms=manifest.began_ms,
        taken_ms=manifest.taken_ms,
        completed_ms=manifest.completed_ms,
        checkpoint_seq=manifest.checkpoint_seq,
        total_bytes=manifest.total_bytes,
        done_bytes=manifest.total_bytes,
        copied_bytes=manifest.copied_bytes,
        is_verified=manifest.is_verified,
        log_reaches_ms=log_reaches_ms,
    )


class _Sealed(msgspec.Struct, frozen=True):
    crc32c: int
    backup: msgspec.Raw


class _Partial(msgspec.Struct, frozen=True):
    stamp: int
    shard: int
    life: str = ""


_decode_sealed = msgspec.json.Decoder(_Sealed).decode
_decode_manifest = msgspec.json.Decoder(BackupManifest).decode
_decode_partial = msgspec.json.Decoder(_Partial).decode


def encode_manifest(manifest: BackupManifest) -> bytes:
    """The content of BACKUP."""
    body = msgspec.json.encode(manifest)
    return msgspec.json.encode(_Sealed(google_crc32c.value(body), msgspec.Raw(body))) + b"\n"


def decode_manifest(data: bytes, path: str) -> BackupManifest:
    """Parse a file BACKUP. Raises DamageError, BackupError."""
    try:
        sealed = _decode_sealed(data)
        if google_crc32c.value(bytes(sealed.backup)) != sealed.crc32c:
            raise DamageError(path, 0, "it does not match its checksum")
        version = msgspec.json.decode(sealed.backup, type=dict[str, msgspec.Raw])["version"]
        if int(version) > MANIFEST_VERSION:
            raise BackupError(f"{path} was written by a newer version: use that to restore it")
        return _decode_manifest(sealed.backup)
    except (msgspec.DecodeError, msgspec.ValidationError, KeyError, ValueError) as error:
        raise DamageError(path, 0, f"it is no manifest of a backup ({error})") from error


def read_manifest(files: Files, place: str) -> BackupManifest | None:
    """The manifest in the directory `place` (empty: the root); None: it is no backup that counts.

    Raises DamageError, DiskError, BackupError."""
    path = below(place, MANIFEST_FILE)
    if files.exists(below(place, PARTIAL_FILE)):
        return None
    data = read_whole(files, path)
    return None if data is None else decode_manifest(data, path)


def is_backup_name(name: str) -> bool:
    """Whether a backup may be called so."""
    return _NAME.fullmatch(name) is not None and name != KIND_FILE


class Shelf:
    """The backups of one shard."""

    def __init__(self, files: Files, identity: Identity, shards: int, life: str) -> None:
        """`files`: those below the directory of all backups; `shards`: how many the server has;
        `life`: the name of the life that it is in."""
        self.files = files
        self._identity = identity
        self._shards = shards
        self.life = life

    def claim(self) -> None:
        """Let the directory be that of the backups of this life, if it belongs to none yet.

        Raises as `require_own`."""
        self.require_own()
        # One of several shards writes it: two processes would get into each other's way.
        if self._identity.shard == 0 and read_mark(self.files) is None:
            write_mark(self.files, DirectoryMark(Kind.BACKUPS, self.life))

    def require_own(self) -> None:
        """Raises OtherLifeError, DirectoryKindError, DamageError, DiskError: the directory must not
        be used."""
        require(self.files, (Kind.BACKUPS,))
        mark = read_mark(self.files)
        if mark is not None:
            if mark.life != self.life:
                raise OtherLifeError(
                    self.files.root, "the directory of the backups", _OTHER_DIRECTORY
                )
            return
        # An older version has used it, or none has.
        for name in filter(is_backup_name, self.files.list("")):
            with contextlib.suppress(DamageError, BackupError):
                manifest = read_manifest(self.files, self.place(name))
                if manifest is not None and not self._is_own(manifest):
                    raise OtherLifeError(
                        self.files.root, "the directory of the backups", _OTHER_DIRECTORY
                    )

    def place(self, name: str) -> str:
        """The directory of a backup of this shard."""
        return name if self._shards == 1 else f"{name}/{shard_directory(self._identity.shard)}"

    def manifests(self, *, skips_unreadable: bool = True) -> list[BackupManifest]:
        """Those that count, in the order in which they were made. One that cannot be read is told
        to the log, or raised: DamageError, BackupError."""
        found = []
        for name in filter(is_backup_name, self.files.list("")):
            try:
                manifest = self.find(name)
            except (DamageError, BackupError) as error:
                if not skips_unreadable:
                    raise
                log.error("a backup cannot be read", name=name, error=str(error))
                continue
            if manifest is not None:
                found.append(manifest)
        return sorted(found, key=lambda one: one.order)

    def find(self, name: str) -> BackupManifest | None:
        """The one of that name, if it counts and is of this shard. Raises as `read_manifest`."""
        manifest = read_manifest(self.files, self.place(name))
        return manifest if manifest is not None and self._is_own(manifest) else None

    def _is_own(self, found: "BackupManifest | _Partial") -> bool:
        is_of_shard = (found.stamp, found.shard) == (self._identity.stamp, self._identity.shard)
        return is_of_shard and found.life in ("", self.life)

    def is_free(self, name: str) -> bool:
        """Whether a backup of that name can be begun."""
        other = below(name, FORMAT_FILE if self._shards > 1 else SHARDS_FILE)
        # A process that was killed at the very beginning has left an empty directory.
        is_empty = not set(self.files.list(self.place(name))) - {f"{PARTIAL_FILE}.new"}
        return is_empty and not self.files.exists(other)

    def begin(self, name: str) -> str:
        """Make its directory, in which nothing counts yet; returns that. The name is free."""
        place = self.place(name)
        self.files.make_directory(place)
        self._mark(place)
        write_mark(self.files, DirectoryMark(Kind.BACKUP, self.life), place)
        if self._shards > 1 and self._identity.shard == 0:
            write_mark(self.files, DirectoryMark(Kind.BACKUP, self.life), name)
            replace_file(self.files, below(name, SHARDS_FILE), encode_shard_count(self._shards))
        for directory in COPIED:
            self.files.make_directory(below(place, directory))
        return place

    def _mark(self, place: str) -> None:
        partial = _Partial(self._identity.stamp, self._identity.shard, self.life)
        replace_file(self.files, below(place, PARTIAL_FILE), msgspec.json.encode(partial))

    def finish(self, manifest: BackupManifest) -> None:
        """It is whole: let it count from now on, durably."""
        place = self.place(manifest.name)
        replace_file(self.files, below(place, MANIFEST_FILE), encode_manifest(manifest))
        self.files.unlink(below(place, PARTIAL_FILE))
        self.files.sync_directory(place)

    def remove(self, name: str) -> None:
        """Delete the backup; from the first moment on it does not count.

        Raises DiskError: the rest is deleted when the next one is begun."""
        place = self.place(name)
        self._mark(place)
        for directory in (*COPIED, ""):
            for one in self.files.list(below(place, directory).rstrip("/")):
                path = below(place, f"{directory}/{one}".lstrip("/"))
                if directory or (one != PARTIAL_FILE and one not in COPIED):
                    self.files.unlink(path)
            if directory:
                with contextlib.suppress(FileNotFoundError):
                    self.files.remove_directory(below(place, directory))
        self.files.sync_directory(place)
        self.files.unlink(below(place, PARTIAL_FILE))
        self.files.remove_directory(place)
        if self._shards > 1:
            self._remove_above(name)

    def _remove_above(self, name: str) -> None:
        """The last of the shards to go takes along the files of all of them."""
        left = self.files.list(name)
        if set(left) <= {SHARDS_FILE, KIND_FILE}:
            with contextlib.suppress(FileNotFoundError):  # Another was last at the same moment.
                for one in left:
                    self.files.unlink(below(name, one))
                self.files.remove_directory(name)

    def clear(self) -> None:
        """Delete a backup that a process had begun to make or to delete before it ended. Raises
        DiskError."""
        for name in list(self._partial()):
            log.info("what is left of a backup is deleted", name=name)
            self.remove(name)

    def _partial(self) -> Iterator[str]:
        for name in filter(is_backup_name, self.files.list("")):
            data = read_whole(self.files, below(self.place(name), PARTIAL_FILE))
            if data is None:
                continue
            try:
                partial = _decode_partial(data)
            except (msgspec.DecodeError, msgspec.ValidationError):
                continue
            if self._is_own(partial):
                yield name


def read_whole(files: Files, path: str) -> bytes | None:
    """The content of a small file; None: it is not there. Raises DiskError, UnreadableError."""
    try:
        file = files.open(path)
    except FileNotFoundError:
        return None
    except StorageError:
        if not files.exists(path):
            return None  # A file stands where the directory would.
        raise
    with contextlib.closing(file):
        return file.pread(file.size(), 0)
