"""Snapshots: the files of a checkpoint, kept as they are, for a replica or a backup to copy.

    filing thread, behind a checkpoint ── take ──▶ a moment of the catalog, a link to each file
    any other thread                   ── complete ──▶ the copy of the catalog, the manifest
                                       ── open, read … ──▶ release

    snapshots/<id>/schedule/…     hours and days, each up to its length at the checkpoint
                  /dispatch/…     as they are now, or were when they were measured; bytes behind
                                  their last whole frame are cut off
                  /definitions/…  one generation, up to its length
                  /keys/…         the runs that the catalog names
                  /catalog/…      LMDB, copied and compacted

All these files grow at their ends, or are replaced by others. So a second name (a hard link) keeps
the state of a checkpoint, whatever is purged, split, merged or written anew meanwhile, and costs no
copy. The filing thread takes all links at once, so they are of one moment. The filed records of the
message log are in these files; the message log itself is the same on all nodes.

`messages/`, `imports/` and tokens are not a part of it.

Cost: of the filing thread 20 µs a file (there are some hundred, 17,520 at the most) and a read
transaction; then 0.1 s and 81 MB of disk for a million young keys. Pages of the catalog that are
replaced while it is copied are used again later. Threads: as above; the rest any, one at a time.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import msgspec
import structlog

from delayserver.records.tables import read_definitions_place
from delayserver.recovery.store import Store
from storage.buckets import bucket_path
from storage.catalog import Frozen, Table
from storage.catalog_file import DATA_FILE
from storage.definitions_log import definitions_path
from storage.directory import CATALOG_DIRECTORY, Identity
from storage.errors import CatalogError, DamageError, DiskError, StorageError, SyncError
from storage.files import File, Files, size_of
from storage.key_runs import RUNS_KEY, run_path, unpack_runs
from storage.rows import LogKind

DIRECTORY: Final = "snapshots"
COPIED: Final = ("schedule", "dispatch", "definitions", "keys", CATALOG_DIRECTORY)
"""The directories of a replica that a snapshot has."""
CATALOG_PATH: Final = f"{CATALOG_DIRECTORY}/{DATA_FILE}"
SNAPSHOTS_MAX: Final = 4

log = structlog.get_logger()


class SnapshotFile(NamedTuple):
    """One of its files."""

    path: str
    """Below the directory of the shard."""
    length: int


class SnapshotManifest(msgspec.Struct, frozen=True):
    """The content of a snapshot."""

    id: str
    format_version: int
    stamp: int
    shard: int
    checkpoint_seq: int
    files: list[SnapshotFile]

    @property
    def total_bytes(self) -> int:
        """The size of all files."""
        return sum(file.length for file in self.files)

    def encode(self) -> bytes:
        """As JSON."""
        return msgspec.json.encode(self)


decode_manifest = msgspec.json.Decoder(SnapshotManifest).decode


class HeldSnapshot(NamedTuple):
    """A snapshot of which only the catalog is missing."""

    manifest: SnapshotManifest
    catalog: Frozen


def measure_settled(files: Files) -> dict[str, int]:
    """How long the dispatch logs are now, by path. Any thread may ask. Raises DiskError."""
    paths = (f"dispatch/{name}" for name in files.list("dispatch"))
    return {path: size_of(files, path) for path in paths}


def taken(take: Callable[[], object]) -> tuple[object, StorageError | None]:
    """The result of `take`, or why there is none: the filing thread goes on without it. Raises
    SyncError: then it cannot go on."""
    try:
        return take(), None
    except SyncError:
        raise
    except (CatalogError, DamageError, DiskError) as error:
        return None, error


class Snapshots:
    """Those of one directory."""

    def __init__(self, files: Files, identity: Identity) -> None:
        """Removes the snapshots that an earlier process has left. Raises DiskError."""
        self._files = files
        self._identity = identity
        self._kept: dict[str, dict[str, int]] = {}
        """Snapshots that can be read, oldest first: lengths by path."""
        self._lock = threading.Lock()
        self._number = 0
        for name in files.list(DIRECTORY):
            self._remove(name)

    # ── the filing thread ──────────────────────────────────────────────────────────────────────

    def take(self, store: Store, settled: Mapping[str, int] | None = None) -> HeldSnapshot:
        """Keep the files that the last checkpoint names. It must have been made just now: nothing
        was filed or purged since. `settled`: how much of each dispatch log belongs to it; None: all
        that there is. Raises DiskError, CatalogError, DamageError: then nothing is kept."""
        self._number += 1
        snapshot_id = f"{os.getpid()}-{self._number}"
        frozen = store.catalog.freeze()
        try:
            files = self._link_all(snapshot_id, store, settled)
        except BaseException:
            frozen.close()
            self._remove(snapshot_id)
            raise
        identity = self._identity
        manifest = SnapshotManifest(
            snapshot_id,
            store.identity.version,
            identity.stamp,
            identity.shard,
            store.replay.checkpoint_seq,
            files,
        )
        return HeldSnapshot(manifest, frozen)

    def _link_all(
        self, snapshot_id: str, store: Store, settled: Mapping[str, int] | None
    ) -> list[SnapshotFile]:
        for directory in COPIED:
            self._files.make_directory(f"{DIRECTORY}/{snapshot_id}/{directory}")
        wanted: list[tuple[str, int | None]] = [
            (bucket_path(LogKind.SCHEDULE, bucket), state.length)
            for bucket, state in store.replay.hours.items()
            if state.length
        ]
        place = read_definitions_place(store.catalog)
        if place is not None and place.generation:
            wanted.append((definitions_path(place.generation), place.length))
        runs = unpack_runs(store.catalog.get(Table.META, RUNS_KEY) or b"")
        wanted += [(run_path(run.number), None) for run in runs]
        # The catalog says up to which place of the replicated log they have the settled deliveries.
        # These were written before, so they are in the files by now.
        files = [self._link(snapshot_id, path, length) for path, length in wanted]
        for hour in store.settler.hours():
            file = self._link(snapshot_id, bucket_path(LogKind.DISPATCH, hour), None)
            if settled is not None:
                file = SnapshotFile(file.path, min(file.length, settled.get(file.path, 0)))
            if file.length:
                files.append(file)
        return files

    def _link(self, snapshot_id: str, path: str, length: int | None) -> SnapshotFile:
        kept = _path(snapshot_id, path)
        try:
            self._files.link(path, kept)
        except FileNotFoundError:
            raise DamageError(path, 0, "the catalog names it, and it is not there") from None
        size = size_of(self._files, kept)
        if length is not None and size < length:
            reason = f"the file has {size} bytes, the catalog says {length}"
            raise DamageError(path, size, reason)
        return SnapshotFile(path, size if length is None else length)

    # ── any other thread ───────────────────────────────────────────────────────────────────────

    def complete(self, held: HeldSnapshot) -> SnapshotManifest:
        """Copy the catalog; returns the files to read. The oldest of too many snapshots goes.

        Raises CatalogError, DiskError: then nothing is kept."""
        snapshot_id = held.manifest.id
        try:
            with contextlib.closing(held.catalog) as frozen:
                frozen.copy(self._files, _path(snapshot_id, CATALOG_DIRECTORY))
            length = size_of(self._files, _path(snapshot_id, CATALOG_PATH))
        except BaseException:
            self._remove(snapshot_id)
            raise
        # First, since all the rest is held against it.
        files = [SnapshotFile(CATALOG_PATH, length), *held.manifest.files]
        with self._lock:
            self._kept[snapshot_id] = dict(files)
            outdated = list(self._kept)[:-SNAPSHOTS_MAX]
        for one in outdated:
            self.release(one)
        return msgspec.structs.replace(held.manifest, files=files)

    def open(self, snapshot_id: str, path: str) -> tuple[File, int] | None:
        """A file and how much of it counts; None: it is not in that snapshot, or that is gone.

        Raises DiskError."""
        length = self._kept.get(snapshot_id, {}).get(path)
        if length is None:
            return None
        try:
            return self._files.open(_path(snapshot_id, path)), length
        except FileNotFoundError:
            return None

    def release(self, snapshot_id: str) -> None:
        """The snapshot is not needed any more. A copy that has a file of it open reads on."""
        with self._lock:
            is_known = self._kept.pop(snapshot_id, None) is not None
        if is_known:
            try:
                self._remove(snapshot_id)
            except StorageError as error:
                log.error("a snapshot was not removed", id=snapshot_id, error=str(error))

    def release_all(self) -> None:
        """None is needed any more."""
        for snapshot_id in tuple(self._kept):
            self.release(snapshot_id)

    def _remove(self, snapshot_id: str) -> None:
        # The directories stay, and are empty: a handful for each snapshot that was asked for.
        for directory in COPIED:
            parent = f"{DIRECTORY}/{snapshot_id}/{directory}"
            for name in self._files.list(parent):
                with contextlib.suppress(FileNotFoundError):
                    self._files.unlink(f"{parent}/{name}")


def _path(snapshot_id: str, path: str) -> str:
    return f"{DIRECTORY}/{snapshot_id}/{path}"
