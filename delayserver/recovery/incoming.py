"""A replica that is made anew from another one: copied, verified, and swapped in as one step.

    peer ── manifest, files ──▶ DIR/incoming/new/… ── all verified ──▶ swap ──▶ DIR/…
                                                                        └─▶ DIR/incoming/… the old

The bytes that come are believed as little as those on the own disk. The catalog is verified to the
last value before it is opened, every frame with its payloads, every block of a key run; and the
catalog must name just these files, at these lengths. A file that is damaged at the peer is not
copied but named, and another peer is asked.

It may be interrupted anywhere. Before the swap nothing has changed, and the bytes that have come
are kept. Files only grow, so the peer goes on behind them, if its first bytes are the same (their
checksum tells). With the swap the new files count, whichever of them have their names by then
(`storage.swap`). The message log of the own disk (R8) is left as it is: it says itself whether it
continues the shard's.

People may have decided how a shard goes on where its log had lost its end. A replica that differs
from that is set aside first, and stays.

A replica in which damage was found (I8) is repaired in this way, too: see
docs/decisions/0037-a-damaged-replica-is-made-anew.md.

Cost: the network's and the disk's; each byte is written once and read once, 0.4 s a GB for the
checksums, 7 µs for each young key. Memory: a frame, or a piece. Threads: one, the caller's, which
owns the directory and has nothing of it open.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final, Protocol

import google_crc32c
import structlog

from delayserver.records.tables import (
    read_checkpoint,
    read_definitions_place,
    read_hours,
)
from delayserver.recovery.snapshots import CATALOG_PATH, COPIED, SnapshotFile, SnapshotManifest
from storage.buckets import bucket_path, parse_bucket_file
from storage.catalog import Catalog, Table
from storage.definitions_log import definitions_path, parse_definitions_name, scan_definitions
from storage.directory import (
    CATALOG_DIRECTORY,
    FORMAT_FILE,
    FORMAT_VERSION,
    Identity,
    encode_identity,
)
from storage.errors import CatalogError, CopySourceError, DamageError, NoPeerError, UnreadableError
from storage.files import File, Files
from storage.frame import Damage, Frame, damaged_payloads, scan
from storage.key_runs import RUNS_KEY, KeyRun, RunState, run_path, unpack_runs
from storage.message_log import DIRECTORY as MESSAGES
from storage.replicated.own import OWN_FILE
from storage.rows import LogKind
from storage.swap import Swap, finish, is_unfinished, unfinished_backup

DIRECTORY: Final = "incoming"
ASIDE: Final = "aside"
"""Where a replica goes that has something else than the shard goes on with."""
TRIES: Final = 3
"""Attempts with one peer, whose connection breaks, before another is asked."""
PAUSE_S: Final = 1.0
PIECE_BYTES: Final = 1 << 20
PROGRESS_S: Final = 5.0

log = structlog.get_logger()
Progress = Callable[[str, int, int], None]


class CopySource(Protocol):
    """Another node, which has a replica of the shard.

    All calls raise CopySourceError: it does not give one; OSError: it may if it is asked again."""

    name: str
    """For people."""

    def snapshot(self) -> SnapshotManifest:
        """Have it make one."""

    def read(
        self, snapshot_id: str, path: str, have: int, checksum: int
    ) -> contextlib.AbstractContextManager[tuple[int, Iterator[bytes]]]:
        """A file from `have` on if its bytes before that have this crc32c, else from 0: from where,
        and the pieces."""

    def release(self, snapshot_id: str) -> None:
        """It is not needed any more."""


class Incoming:
    """The directory of a replica into which another one is copied."""

    def __init__(
        self,
        files: Files,
        identity: Identity,
        open_catalog: Callable[[str], Catalog],
        *,
        progress: Progress = lambda what, done, total: None,
        is_ending: Callable[[], bool] = lambda: False,
        sleep: Callable[[float], None] = time.sleep,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`open_catalog` verifies the whole of the catalog in a directory below that of the files,
        and opens it for reading. `is_ending`: the copy should be given up, soon."""
        self._files = files
        self._identity = identity
        self._open_catalog = open_catalog
        self._progress = progress
        self._is_ending = is_ending
        self._sleep = sleep
        self._monotonic = monotonic
        self._done_bytes = 0
        self._told_s = 0.0

    def fetch(self, peers: Sequence[CopySource]) -> SnapshotManifest:
        """Make the directory a copy of one of the peers; the first that can give it does.

        Raises NoPeerError: nothing has changed; StorageError: of the own disk."""
        refusals: list[CopySourceError] = []
        for peer in peers:
            for left in reversed(range(TRIES)):
                if self._is_ending():
                    raise NoPeerError(self._identity.shard, refusals)
                try:
                    manifest = self._copy(peer)
                except CopySourceError as error:
                    log.error("a replica cannot be copied", peer=peer.name, why=error.reason)
                    refusals.append(error)
                    break
                except OSError as error:
                    log.warning("a copy was interrupted", peer=peer.name, error=str(error))
                    if not left:
                        refusals.append(CopySourceError(peer.name, f"{error}"))
                    else:
                        self._sleep(PAUSE_S)
                else:
                    self._swap(manifest)
                    return manifest
        raise NoPeerError(self._identity.shard, refusals)

    # ── copying ────────────────────────────────────────────────────────────────────────────────

    def _copy(self, peer: CopySource) -> SnapshotManifest:
        manifest = peer.snapshot()
        try:
            self._check(peer, manifest)
            self._make_room(manifest)
            self._done_bytes = 0
            catalog, *others = manifest.files
            self._copy_file(peer, manifest, catalog)
            runs = self._compare(peer, manifest)
            for file in others:
                self._copy_file(peer, manifest, file)
                if file.path in runs:
                    self._verify_run(peer, runs[file.path])
                else:
                    self._verify(peer, file)
            for directory in COPIED:
                self._files.sync_directory(_new(directory))
        finally:
            with contextlib.suppress(OSError, CopySourceError):
                peer.release(manifest.id)
        return manifest

    def _check(self, peer: CopySource, manifest: SnapshotManifest) -> None:
        """Whether it is of this shard, in a format that this version reads, and names no file that
        is none of a replica."""
        own = self._identity
        if (manifest.stamp, manifest.shard) != (own.stamp, own.shard):
            raise CopySourceError(peer.name, f"it has another shard, {manifest.shard}")
        if manifest.format_version > FORMAT_VERSION:
            reason = f"its format, {manifest.format_version}, is newer than {FORMAT_VERSION}"
            raise CopySourceError(peer.name, reason)
        paths = [file.path for file in manifest.files]
        if paths[:1] != [CATALOG_PATH] or len(set(paths)) != len(paths):
            raise CopySourceError(peer.name, "its snapshot does not begin with a catalog")
        for path in paths[1:]:
            if _kind_of(path) is None:
                raise CopySourceError(peer.name, f"{path!r} is no file of a replica")

    def _make_room(self, manifest: SnapshotManifest) -> None:
        """Delete files that have come before and are not in this manifest."""
        wanted = {file.path for file in manifest.files}
        for directory in COPIED:
            self._files.make_directory(_new(directory))
            for name in self._files.list(_new(directory)):
                if f"{directory}/{name}" not in wanted:
                    self._files.unlink(_new(f"{directory}/{name}"))

    def _copy_file(
        self, peer: CopySource, manifest: SnapshotManifest, wanted: SnapshotFile
    ) -> None:
        with contextlib.closing(self._files.open(_new(wanted.path), create=True)) as file:
            if file.size() > wanted.length:
                file.truncate(wanted.length)
            have = file.size()
            checksum = _checksum(file, have) if have else 0
            with peer.read(manifest.id, wanted.path, have, checksum) as (start, pieces):
                if start < have:
                    file.truncate(0)
                end = start
                self._done_bytes += start
                for piece in pieces:
                    if end + len(piece) > wanted.length:
                        raise CopySourceError(peer.name, f"{wanted.path} is longer than it says")
                    file.pwrite([piece], end)
                    end += len(piece)
                    self._done_bytes += len(piece)
                    self._tell(manifest)
                    if self._is_ending():
                        raise CopySourceError(peer.name, "the copy was given up")
            if end < wanted.length:
                raise ConnectionError(f"{wanted.path} ended at {end} of {wanted.length}")
            file.fdatasync()

    def _tell(self, manifest: SnapshotManifest) -> None:
        now_s = self._monotonic()
        if now_s - self._told_s >= PROGRESS_S:
            self._told_s = now_s
            self._progress("copying the shard", self._done_bytes, manifest.total_bytes)

    # ── verifying ──────────────────────────────────────────────────────────────────────────────

    def _compare(self, peer: CopySource, manifest: SnapshotManifest) -> dict[str, RunState]:
        """Whether the catalog is sound, and names just the files of the manifest; its key runs, by
        path."""
        try:
            with contextlib.closing(self._open_catalog(_new(CATALOG_DIRECTORY))) as catalog:
                named = {
                    bucket_path(LogKind.SCHEDULE, bucket): state.length
                    for bucket, state in read_hours(catalog).items()
                    if state.length
                }
                place = read_definitions_place(catalog)
                if place is not None and place.generation:
                    named[definitions_path(place.generation)] = place.length
                states = unpack_runs(catalog.get(Table.META, RUNS_KEY) or b"")
                seq = read_checkpoint(catalog)
        except (DamageError, CatalogError) as error:
            raise CopySourceError(peer.name, f"its catalog is damaged: {error}") from error
        runs = {run_path(state.number): state for state in states}
        lengths = dict(manifest.files[1:])
        others = {path: length for path, length in lengths.items() if path in runs.keys() | named}
        is_rest_settled = all(path.startswith("dispatch/") for path in lengths.keys() - others)
        named |= {path: lengths.get(path, 0) for path in runs}
        if not is_rest_settled or others != named or seq != manifest.checkpoint_seq:
            raise CopySourceError(peer.name, "its catalog names other files than its snapshot has")
        return runs

    def _verify(self, peer: CopySource, wanted: SnapshotFile) -> None:
        """Whether every frame is intact; a torn end of a dispatch log is cut off."""
        kind = _kind_of(wanted.path)
        assert kind is not None
        with contextlib.closing(self._files.open(_new(wanted.path))) as file:
            for found in frames(file, wanted.length, kind, self._identity.stamp):
                damage = found if isinstance(found, Damage) else _first_damage(found)
                if damage is None:
                    continue
                if damage.torn and kind is LogKind.DISPATCH:
                    file.truncate(damage.offset)
                    file.fdatasync()
                    return
                reason = f"{wanted.path} is damaged at offset {damage.offset}: {damage.reason}"
                raise CopySourceError(peer.name, reason)

    def _verify_run(self, peer: CopySource, state: RunState) -> None:
        """Whether it is the one that the catalog names, and every block is intact."""
        stamp, path = self._identity.stamp, _new(run_path(state.number))
        try:
            with contextlib.closing(KeyRun(self._files, state, stamp=stamp, path=path)) as run:
                for found in run.verify():
                    raise found.error()
        except DamageError as error:
            reason = f"{run_path(state.number)} is damaged at offset {error.offset}: {error.reason}"
            raise CopySourceError(peer.name, reason) from error

    # ── the swap ───────────────────────────────────────────────────────────────────────────────

    def _swap(self, manifest: SnapshotManifest) -> None:
        """Put all of it in the place of the old files."""
        self._remove_replaced()
        swap = Swap(self._files, DIRECTORY)
        wanted = {file.path for file in manifest.files}
        for directory in COPIED:
            for name in self._files.list(directory):
                if f"{directory}/{name}" not in wanted:
                    swap.remove(f"{directory}/{name}")
        for path in sorted(wanted):
            swap.replace(path)
        identity = replace(self._identity, version=manifest.format_version)
        with swap.new_file(FORMAT_FILE) as file:
            file.pwrite([encode_identity(identity)], 0)
        swap.commit()
        finish_swap(self._files)

    def _remove_replaced(self) -> None:
        """Delete, durably, the files that an earlier swap has replaced: else they would stay."""
        for directory in ("", *COPIED):
            for name in self._files.list(_old(directory)):
                if directory or name == FORMAT_FILE:
                    self._files.unlink(_old(f"{directory}/{name}".lstrip("/")))
            if self._files.exists(_old(directory)):
                self._files.sync_directory(_old(directory))


def finish_swap(files: Files) -> None:
    """Carry out a swap that was decided, now or before a crash. The swap of a repair is left alone:
    the process that opens the directory reports it. Raises StorageError."""
    if is_unfinished(files) and unfinished_backup(files).partition("/")[0] in (DIRECTORY, ASIDE):
        finish(files, _no_catalog)


def set_aside(files: Files, seq: int) -> str:
    """Put the replica, which goes up to `seq`, into a directory of its own below that of the shard,
    as one step: nothing of it is deleted. Returns that directory. Its own log goes with it.

    Nothing of it is open. Raises StorageError."""
    for number in itertools.count(1):
        kept = f"{ASIDE}/seq-{seq}" + (f"-{number}" if number > 1 else "")
        if not files.exists(kept):
            break
    swap = Swap(files, kept)
    for directory in (*COPIED, MESSAGES):
        for name in files.list(directory):
            swap.remove(f"{directory}/{name}")
    for name in (FORMAT_FILE, OWN_FILE):
        if files.exists(name):
            swap.remove(name)
    files.make_directory(kept)
    swap.commit()
    finish_swap(files)
    return kept


def clear(files: Files) -> None:
    """Delete replaced files, and copies that came to nothing. Raises DiskError."""
    for parent in (_old, _new):
        for directory in ("", *COPIED):
            for name in files.list(parent(directory)):
                if directory or name == FORMAT_FILE:
                    files.unlink(f"{parent(directory)}/{name}")


def _no_catalog() -> Catalog:
    raise AssertionError("the catalog is one of the files")


def frames(file: File, length: int, kind: LogKind, stamp: int) -> Iterator[Frame | Damage]:
    """Frames, with their payloads, and damage of a whole file of a log."""
    if kind is LogKind.DEFINITIONS:
        yield from scan_definitions(file, length, stamp=stamp)
    else:
        yield from scan(file, 0, length, kind=kind, stamp=stamp, payload=True)


def _first_damage(frame: Frame) -> Damage | None:
    if frame.payload_intact:
        return None
    found = next((damage for _, damage in damaged_payloads(frame)), None)
    if found is not None:
        return found
    reason = frame.unreadable or "the payloads do not match their checksum"
    return Damage(frame.path, frame.offset, frame.end, reason, torn=False)


def _kind_of(path: str) -> LogKind | None:
    """The kind of log that a file belongs to; a file of keys has no kind of its own, and counts as
    MESSAGE. None: it is no file of a replica."""
    directory, _, name = path.partition("/")
    match directory:
        case "schedule" if parse_bucket_file(LogKind.SCHEDULE, name) is not None:
            return LogKind.SCHEDULE
        case "dispatch" if parse_bucket_file(LogKind.DISPATCH, name) is not None:
            return LogKind.DISPATCH
        case "definitions" if parse_definitions_name(name) is not None:
            return LogKind.DEFINITIONS
        case "keys" if name[:20].isdigit() and path == run_path(int(name[:20])):
            return LogKind.MESSAGE
    return None


def _checksum(file: File, length: int) -> int:
    crc = 0
    for start in range(0, length, PIECE_BYTES):
        data = file.pread(min(PIECE_BYTES, length - start), start)
        crc = google_crc32c.extend(crc, data)
    return crc


def prefix_checksum(file: File, length: int) -> int | None:
    """The crc32c of the first `length` bytes; None: there are fewer, or some cannot be read."""
    try:
        return _checksum(file, length) if file.size() >= length else None
    except UnreadableError:
        return None


def _old(path: str) -> str:
    """The place where a replaced file goes."""
    return f"{DIRECTORY}/{path}".rstrip("/")


def _new(path: str) -> str:
    return f"{DIRECTORY}/new/{path}".rstrip("/")
