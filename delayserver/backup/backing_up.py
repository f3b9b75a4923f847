"""A backup is made: a snapshot is copied to another directory, checked, and counts from then on.

    snapshot ── each file ──▶ the backup before has the same: a link to that
                         └──▶ else a copy ── all of it checked ──▶ BACKUP says that it is one

A file of the backup before is not believed because of its name: the file of the snapshot is read,
and its checksum and length decide. So a file that was made anew under its old name is copied. A
file that the disk of the backups has damaged is found by the check and ends this backup.

The snapshot keeps its files whatever is purged meanwhile. All reads together take no more than so
many bytes a second, so that messages leave in time.

Rejected: to believe a file that has the same name and length. It saves a read of settled hours that
do not change, and would take a damaged file of the source along for as long as it is kept.

Cost: each file is read once, and once more by the check; new files are written once. 0.4 s of CPU a
GB for the checksums. Memory: a piece. Threads: one, which may wait.
"""

import contextlib
from collections.abc import Callable
from typing import Final, NamedTuple

import google_crc32c

import delayserver
from delayserver.backup.shelf import BackupFile, BackupManifest, Shelf
from delayserver.recovery.snapshots import COPIED, SnapshotFile, SnapshotManifest, Snapshots
from storage.directory import FORMAT_FILE, Identity, encode_identity
from storage.errors import BackupError, DiskError, ShortageError, StorageError, SyncError
from storage.files import PRIVATE_MODE, File, replace_file
from storage.frame import Damage, scan
from storage.kinds import below
from storage.rows import LogKind

PIECE_BYTES: Final = 1 << 20

Check = Callable[[str], str]
"""Checks the directory of a backup. Returns its fault, empty if it is sound."""


class WantedBackup(NamedTuple):
    """A request for a backup."""

    name: str
    began_ms: int
    is_verified: bool


class ReadPace:
    """So many bytes a second, on the average, and no more than a second's worth at once."""

    def __init__(
        self,
        bytes_per_s: int,
        monotonic: Callable[[], float],
        wait: Callable[[float], bool],
    ) -> None:
        """`wait` sleeps; it returns True, at once, when all is to end."""
        self._bytes_per_s = bytes_per_s
        self._monotonic = monotonic
        self._wait = wait
        self._free_s = 0.0

    def take(self, count: int) -> None:
        """Return when so many bytes may be read. Raises BackupError: it is to end."""
        now_s = self._monotonic()
        begin_s = max(self._free_s, now_s)
        self._free_s = begin_s + count / self._bytes_per_s
        if self._wait(begin_s - now_s):
            raise BackupError("the backup was given up: the server stops, or somebody deleted it")


class BackingUp:
    """One backup of one shard. Any thread may read its progress."""

    def __init__(
        self,
        asked: WantedBackup,
        shelf: Shelf,
        snapshots: Snapshots,
        identity: Identity,
        *,
        shards: int,
        pace: ReadPace,
        check: Check,
        tokens: Callable[[], bytes | None],
        clock: Callable[[], int],
    ) -> None:
        """`tokens`: the content of the server's TOKENS, where they belong to this shard's part."""
        self._asked = asked
        self._shelf = shelf
        self._snapshots = snapshots
        self._identity = identity
        self._shards = shards
        self._pace = pace
        self._check = check
        self._tokens = tokens
        self._clock = clock
        self.total_bytes = 0
        self.done_bytes = 0
        self.copied_bytes = 0
        self.is_checking = False

    def run(
        self, snapshot: SnapshotManifest, taken_ms: int, *, timeline: int = 0
    ) -> BackupManifest:
        """Make it of a snapshot, which is let go of. `timeline`: of the log behind it. Raises
        StorageError: nothing is left of it, unless the disk does not let it be deleted."""
        asked, shelf = self._asked, self._shelf
        try:
            before = next(reversed(shelf.manifests()), None)
            self.total_bytes = snapshot.total_bytes
            try:
                place = shelf.begin(asked.name)
                manifest = self._make(place, snapshot, taken_ms, timeline, before)
                shelf.finish(manifest)
            except BaseException:
                with contextlib.suppress(StorageError):
                    shelf.remove(asked.name)
                raise
        finally:
            self._snapshots.release(snapshot.id)
        return manifest

    def _make(
        self,
        place: str,
        snapshot: SnapshotManifest,
        taken_ms: int,
        timeline: int,
        before: BackupManifest | None,
    ) -> BackupManifest:
        files = [self._own(place, FORMAT_FILE, encode_identity(self._identity))]
        tokens = self._tokens()
        if tokens is not None:
            files.append(self._own(place, "TOKENS", tokens, mode=PRIVATE_MODE))
        known = {} if before is None else {file.path: file for file in before.files}
        for wanted in snapshot.files:
            file = self._take(place, snapshot, wanted, before, known.get(wanted.path))
            if file.length:
                files.append(file)
        for directory in COPIED:
            self._shelf.files.sync_directory(below(place, directory))
        if self._asked.is_verified:
            self.is_checking = True
            problem = self._check(place)
            if problem:
                raise BackupError(
                    f"what was copied is not sound: {problem}. `delayserver check` says whether "
                    "the server's own directory is; until it is repaired, a backup that is not "
                    "verified (--no-verify) takes it as it is"
                )
        return BackupManifest(
            name=self._asked.name,
            server_version=delayserver.__version__,
            format_version=self._identity.version,
            stamp=snapshot.stamp,
            shard=snapshot.shard,
            shards=self._shards,
            checkpoint_seq=snapshot.checkpoint_seq,
            began_ms=self._asked.began_ms,
            taken_ms=taken_ms,
            completed_ms=self._clock(),
            is_verified=self._asked.is_verified,
            copied_bytes=self.copied_bytes,
            files=files,
            life=self._shelf.life,
            number=1 if before is None else before.number + 1,
            timeline=timeline,
        )

    def _own(self, place: str, name: str, data: bytes, *, mode: int | None = None) -> BackupFile:
        path = below(place, name)
        if mode is None:
            replace_file(self._shelf.files, path, data)
        else:
            replace_file(self._shelf.files, path, data, mode=mode)
        return BackupFile(name, len(data), google_crc32c.value(data))

    # ── one file ───────────────────────────────────────────────────────────────────────────────

    def _take(
        self,
        place: str,
        snapshot: SnapshotManifest,
        wanted: SnapshotFile,
        before: BackupManifest | None,
        known: BackupFile | None,
    ) -> BackupFile:
        opened = self._snapshots.open(snapshot.id, wanted.path)
        if opened is None:
            raise BackupError(f"{wanted.path} of the snapshot is gone")
        source, length = opened
        with contextlib.closing(source):
            if wanted.path.startswith("dispatch/"):
                length = self._whole(source, length)
            if before is not None and known is not None and known.length == length:
                if self._checksum(source, length) == known.crc32c and self._link(
                    below(self._shelf.place(before.name), wanted.path), below(place, wanted.path)
                ):
                    return known
                self.done_bytes -= length
            return self._copy(source, length, wanted.path, place)

    def _whole(self, file: File, length: int) -> int:
        """Where the last whole frame ends: the one behind it was being written."""
        for found in scan(
            file, 0, length, kind=LogKind.DISPATCH, stamp=self._identity.stamp, payload=False
        ):
            if isinstance(found, Damage) and found.torn:
                return found.offset
        return length

    def _link(self, source: str, target: str) -> bool:
        """Whether the file of the backup before has this name, too, now."""
        try:
            self._shelf.files.link(source, target)
        except (SyncError, ShortageError):
            raise
        except DiskError:
            return False  # The file system knows no such, or has too many of them.
        return True

    def _checksum(self, file: File, length: int) -> int:
        crc = 0
        for start in range(0, length, PIECE_BYTES):
            crc = google_crc32c.extend(crc, self._piece(file, start, length))
        return crc

    def _copy(self, source: File, length: int, path: str, place: str) -> BackupFile:
        files, target_path = self._shelf.files, below(place, path)
        crc = 0
        with contextlib.closing(files.open(target_path, create=True)) as target:
            for start in range(0, length, PIECE_BYTES):
                piece = self._piece(source, start, length)
                crc = google_crc32c.extend(crc, piece)
                target.pwrite([piece], start)
                self.copied_bytes += len(piece)
            target.fdatasync()
        return BackupFile(path, length, crc)

    def _piece(self, file: File, start: int, length: int) -> bytes:
        count = min(PIECE_BYTES, length - start)
        self._pace.take(count)
        data = file.pread(count, start)
        if len(data) < count:
            raise BackupError(f"{file.path} has become shorter while it was copied")
        self.done_bytes += count
        return data
