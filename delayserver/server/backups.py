"""The backups of a shard, as an operator asks for them: begun, watched, listed, deleted.

    begin ─▶ settled rows are recorded and measured ─▶ accepted records are durable
          ─▶ the replay thread takes a snapshot ─▶ a thread copies and checks it

    every backup_log_ms  ─▶ accepted records are durable ─▶ a thread ships the log behind backups

One is made at a time. It is tied to no request: who began it asks how far it is. One that failed is
remembered until the next one, or the end of the process, and leaves no files.

Cost: of the event loop nothing but the calls; see `delayserver.backup.backing_up` for the thread.
Threads: belongs to the event loop.
"""

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import structlog

from delayserver.backup.backing_up import BackingUp, ReadPace, WantedBackup
from delayserver.backup.log_shipping import LogShipper
from delayserver.backup.shelf import (
    BackupManifest,
    BackupView,
    Shelf,
    is_backup_name,
    read_whole,
    view_of,
)
from delayserver.backup.shipped_log import read_reaches
from delayserver.errors import ConflictError, DelayServerError, InputError, NotFoundError
from delayserver.recovery.snapshots import HeldSnapshot, Snapshots, measure_settled
from delayserver.recovery.store import Store
from delayserver.security.tokens import TOKENS_FILE
from delayserver.server.futures import answering
from delayserver.server.shard import Shard
from delayserver.server.waits import Waits
from delayserver.times import format_time
from delayserver.wire.bulk import BACKUP_NAME, BackupStep
from storage.directory import FORMAT_VERSION, Identity
from storage.errors import (
    DirectoryKindError,
    DirectoryLockedError,
    OtherLifeError,
    StorageError,
)
from storage.files import OsFiles
from storage.kinds import Kind
from storage.message_log import MessageLog

_NO_DIRECTORY: Final = (
    "the server has no directory for backups: set backup_dir (--backup-dir), and start it again"
)
_LAST_STEP_S: Final = 10.0
"""A stop waits no longer than this for the rest of the log to be copied."""
_CLUSTER: Final = (
    "a node of a cluster makes no backups: its messages stand in Kafka, and each shard has "
    "replicas on several nodes (GET /v1/cluster shows them); docs/backup.md says how a cluster is "
    "kept safe"
)

log = structlog.get_logger()


class _BackupSource(NamedTuple):
    """The source of a backup."""

    held: HeldSnapshot
    at_ms: int
    timeline: int
    """The timeline of the log behind it; 0: there is none."""


class _ShardShelf:
    """The shelf of a shard's backups, which no other server may write to."""

    def __init__(
        self, directory: Path | None, identity: Identity, shards: int, life: str, *, is_alone: bool
    ) -> None:
        """`is_alone`: not a node of a cluster, which makes no backups."""
        self._backup_dir = directory
        self._identity = identity
        self._shards = shards
        self._life = life
        self._is_alone = is_alone
        self._held = contextlib.ExitStack()
        """The lock on it, once it was taken."""
        self.is_held = False
        self._claim_lock = threading.Lock()

    def _directory(self) -> str:
        """Raises ConflictError."""
        if not self._is_alone:
            raise ConflictError(_CLUSTER)
        if self._backup_dir is None:
            raise ConflictError(_NO_DIRECTORY)
        return str(self._backup_dir)

    def _shelf_of(self, files: OsFiles) -> Shelf:
        return Shelf(files, self._identity, self._shards, self._life)

    def made(self) -> Shelf:
        """The shelf, whoever has it. Raises ConflictError."""
        return self._shelf_of(OsFiles(self._directory()))

    async def own(self) -> Shelf:
        """The shelf, which no other server has. Raises ConflictError, StorageError."""
        try:
            return await asyncio.to_thread(self._claimed)
        except (OtherLifeError, DirectoryKindError) as error:
            raise ConflictError(str(error)) from error
        except DirectoryLockedError as error:
            raise ConflictError(
                f"the directory of backups {self._directory()} is in use by another server, which "
                "runs on a copy of this data directory: start one of them with another backup_dir "
                "(--backup-dir)"
            ) from error

    def _claimed(self) -> Shelf:
        """Raises ConflictError, StorageError."""
        shelf = self.made()
        shelf.require_own()
        with self._claim_lock:
            if not self.is_held:
                # A copy of the data directory, e.g. of the whole machine, is in the same life.
                name = f"_lock-{self._identity.shard:04d}"
                self._held.enter_context(shelf.files.lock(name))
                self.is_held = True
            shelf.claim()
        return shelf

    def shown(self) -> Shelf:
        """The shelf for a caller that only reads: also where the disk is read-only. Raises
        ConflictError, StorageError."""
        shelf = self._shelf_of(OsFiles(self._directory(), readonly=True))
        try:
            shelf.require_own()
        except (OtherLifeError, DirectoryKindError) as error:
            raise ConflictError(str(error)) from error
        return shelf

    def manifests(self) -> Sequence[BackupManifest]:
        """All of it, oldest first. Raises ConflictError, StorageError."""
        return self.made().manifests(skips_unreadable=False)

    def close(self) -> None:
        """Let it go."""
        self._held.close()


class BackupMaker:
    """See the top of this module."""

    def __init__(
        self,
        shard: Shard,
        waits: Waits,
        *,
        shards: int,
        life: str,
        tokens_directory: Path,
    ) -> None:
        """`shards`: how many the server has; `life`: that it is in; `tokens_directory`: where
        TOKENS is. The rest of a snapshot of an earlier process is removed. Raises DiskError."""
        self._shard = shard
        self._waits = waits
        self._clock = shard.clock
        self._settings = shard.settings
        self._shards = shards
        self._tokens_directory = tokens_directory
        self._monotonic = shard.monotonic
        self._identity = replace(shard.store.identity, version=FORMAT_VERSION)
        self._life = life
        is_alone = self._settings.cluster is None
        self._snapshots = Snapshots(shard.files, self._identity) if is_alone else None
        self._shelf = _ShardShelf(
            self._settings.backup_dir, self._identity, shards, life, is_alone=is_alone
        )
        self._ends = threading.Event()
        self._task: asyncio.Task[None] | None = None
        self._making: tuple[WantedBackup, BackingUp] | None = None
        self._failed: BackupView | None = None
        self._shelf_lock = asyncio.Lock()
        """Held by whoever deletes something."""
        self.failed_total = 0
        self.last: BackupManifest | None = None
        """The newest that counts."""
        self._log_stops = asyncio.Event()
        self._log_ends = threading.Event()
        self.shipper = self._make_shipper()
        """None: no log is copied behind backups."""
        self._shipping: asyncio.Task[None] | None = None
        self._log_lock = asyncio.Lock()
        """Held by whoever has the shipper do something."""
        self._resumed = asyncio.Event()
        self._log_error = ""

    # ── calls ──────────────────────────────────────────────────────────────────────────────────

    async def begin(self, name: str | None, *, is_verified: bool) -> BackupView:
        """Begin one. Raises ConflictError, InputError, StorageError."""
        shelf = await self._shelf.own()
        now_ms = self._clock()
        name = format_time(now_ms).replace(":", "-") if name is None else name
        if not is_backup_name(name):
            raise InputError(f"a backup's name is of the form {BACKUP_NAME}", "/name")
        if self._making is not None:
            running = self._making[0].name
            raise ConflictError(f"the backup {running} is being made: wait for it, or delete it")
        asked = WantedBackup(name, now_ms, is_verified)
        self._ends.clear()
        making = self._make(asked, shelf)
        self._making = asked, making
        try:
            async with self._shelf_lock:
                await asyncio.to_thread(shelf.clear)
            await self._resume_log()
            if not await asyncio.to_thread(shelf.is_free, name):
                raise ConflictError(f"there is a backup {name}, or something else of that name")
        except BaseException:
            self._making = None
            raise
        self._failed = None
        self._task = asyncio.get_running_loop().create_task(self._run(asked, making))
        return self._running(asked, making)

    async def list(self) -> list[BackupView]:
        """All that there are, oldest first. Raises ConflictError, StorageError."""
        while True:
            making = self._making
            manifests = await self._manifests()
            if making in (None, self._making):
                break  # Else it has ended meanwhile, and may not be among them.
        unfinished = self._unfinished()
        reaches = await asyncio.to_thread(
            lambda: read_reaches(self._shelf.shown().files, manifests)
        )
        views = [
            view_of(manifest, reaches.get(manifest.timeline))
            for manifest in manifests
            if unfinished is None or manifest.name != unfinished.name
        ]
        return views if unfinished is None else [*views, unfinished]

    async def get(self, name: str) -> BackupView:
        """Raises NotFoundError, ConflictError, StorageError."""
        found = next((one for one in await self.list() if one.name == name), None)
        if found is None:
            raise NotFoundError(f"there is no backup {name!r}")
        return found

    async def delete(self, name: str) -> None:
        """Delete one; if it is being made, it is given up. Raises as `get`."""
        shelf = await self._shelf.own()
        if self._making is not None and self._making[0].name == name:
            await self._give_up()
        unfinished = self._unfinished()
        if unfinished is not None and unfinished.name == name:
            self._failed = None
            return
        async with self._shelf_lock:
            if not is_backup_name(name) or await asyncio.to_thread(shelf.find, name) is None:
                raise NotFoundError(f"there is no backup {name!r}")
            await asyncio.to_thread(shelf.remove, name)
        await self._manifests()
        await self._prune_log()

    async def look(self) -> None:
        """Learn which is the newest, and delete the remains of a process that was killed; an error
        in that is told in the answer to the next backup. From then on the log is shipped."""
        if self._settings.backup_dir is None or self._snapshots is None:
            return
        try:
            shelf = await self._shelf.own()
            async with self._shelf_lock:
                await asyncio.to_thread(shelf.clear)
            await self._manifests()
        except StorageError:
            pass
        except ConflictError as error:
            if self.shipper is None:  # Else that says so.
                log.error("this server makes no backups", reason=str(error))
        if self.shipper is not None and self._shipping is None:
            self._shipping = asyncio.get_running_loop().create_task(self._ship_on())

    async def stop(self) -> None:
        """Give up the backup that is being made. The log is shipped until `finish_log`."""
        await self._give_up()
        if self._snapshots is not None:
            await asyncio.to_thread(self._snapshots.release_all)

    async def finish_log(self) -> None:
        """No record is accepted any more: ship the rest, if that does not take long."""
        if self._shipping is not None:
            self._log_stops.set()
            await asyncio.wait([self._shipping], timeout=_LAST_STEP_S)
            self._log_ends.set()
            # A step that hangs in the system cannot be ended, and the server does not wait for it.
        self._shelf.close()

    # ── the log behind them ────────────────────────────────────────────────────────────────────

    def _make_shipper(self) -> LogShipper | None:
        if not self._settings.ships_log or self._snapshots is None:
            return None
        message_log = self._shard.store.message_log
        assert isinstance(message_log, MessageLog)
        pace = ReadPace(self._settings.backup_bytes_per_s, self._monotonic, self._log_ends.wait)
        return LogShipper(
            self._shard.files,
            message_log,
            self._shelf.made().files,
            self._identity,
            take=pace.take,
            next_seq=self._shard.engine.sequencer.next_seq,
            life=self._life,
        )

    async def _ship_on(self) -> None:
        """Until the server stops, and once more then."""
        is_last = False
        try:
            while not is_last:
                is_last = self._log_stops.is_set()
                await self.ship()
                if not is_last:
                    with contextlib.suppress(TimeoutError):
                        interval_s = self._settings.backup_log_ms / 1000
                        await asyncio.wait_for(self._log_stops.wait(), interval_s)
        except Exception as error:
            self._shard.on_fatal(error)

    async def ship(self) -> None:
        """Copy the records that the log behind the backups lacks, if there is one. If the directory
        of backups refuses them, that is logged once, and tried again."""
        shipper = self.shipper
        if shipper is None:
            return
        try:
            await self._resume_log()
            if not shipper.timeline:
                return
            # A group that is written later in this millisecond is not in it.
            through_ms = self._clock() - 1
            await self._waits.all_durable()
            async with self._log_lock:
                await asyncio.to_thread(shipper.step, through_ms)
            self._log_error = ""
        except (StorageError, DelayServerError) as error:
            if str(error) != self._log_error:
                self._log_error = str(error)
                log.error("the message log is not copied; it is tried again", error=str(error))

    async def _resume_log(self) -> None:
        """Have the shipper go on where an earlier process has stopped. Raises StorageError."""
        shipper = self.shipper
        if shipper is None or self._resumed.is_set():
            return
        try:
            await self._shelf.own()
        except ConflictError as error:
            shipper.refuse(str(error))
            self._log_error = str(error)  # It was told.
            raise
        async with self._log_lock:
            if self._resumed.is_set():
                return  # Another task was quicker.
            found = await asyncio.to_thread(self._shelf.manifests)
            await asyncio.to_thread(shipper.resume, found)
            self._resumed.set()
        await self._prune_log()

    async def _prune_log(self) -> None:
        """Delete the parts of the log that no backup needs. No call waits for that."""
        if self.shipper is None or not self._shelf.is_held:
            return
        async with self._shelf_lock, self._log_lock:
            is_making = self._making is not None
            try:
                found = await asyncio.to_thread(self._shelf.manifests)
                await asyncio.to_thread(self.shipper.prune, found, is_making=is_making)
            except StorageError as error:
                log.error("the log behind the backups is not deleted", error=str(error))

    # ── how it is made ─────────────────────────────────────────────────────────────────────────

    async def _manifests(self) -> Sequence[BackupManifest]:
        found = await asyncio.to_thread(lambda: self._shelf.shown().manifests())
        self.last = found[-1] if found else None
        return found

    def _unfinished(self) -> BackupView | None:
        return self._failed if self._making is None else self._running(*self._making)

    async def _give_up(self) -> None:
        self._ends.set()
        if self._task is not None:
            await self._task

    def _make(self, asked: WantedBackup, shelf: Shelf) -> BackingUp:
        assert self._snapshots is not None
        return BackingUp(
            asked,
            shelf,
            self._snapshots,
            self._identity,
            shards=self._shards,
            pace=ReadPace(self._settings.backup_bytes_per_s, self._monotonic, self._ends.wait),
            check=self._check,
            tokens=self._tokens,
            clock=self._clock,
        )

    async def _run(self, asked: WantedBackup, making: BackingUp) -> None:
        try:
            taken = await self._take()
            manifest = await asyncio.to_thread(self._copy, making, taken)
        except (StorageError, DelayServerError) as error:
            self._failed = replace(
                self._running(asked, making),
                state="failed",
                step=None,
                completed_ms=self._clock(),
                error=str(error),
            )
            self.failed_total += 1
            log.error("a backup has failed", name=asked.name, error=str(error))
        except Exception as error:
            self._shard.on_fatal(error)
        else:
            self.last = manifest
            log.info(
                "a backup is complete",
                name=asked.name,
                total_bytes=manifest.total_bytes,
                copied_bytes=manifest.copied_bytes,
            )
        finally:
            self._making = None
        try:
            await self._prune_log()
            await self.ship()
        except Exception as error:
            self._shard.on_fatal(error)

    async def _take(self) -> _BackupSource:
        """Measure the settled rows before the checkpoint, so that it covers their messages."""
        snapshots = self._snapshots
        assert snapshots is not None
        await self._waits.settled()
        settled = await asyncio.to_thread(measure_settled, self._shard.files)
        await self._waits.all_durable()
        clock = self._clock
        asked: asyncio.Future[_BackupSource]
        asked = asyncio.get_running_loop().create_future()

        shipper = self.shipper

        def take(store: Store) -> _BackupSource:
            held = snapshots.take(store, settled)
            checkpoint_seq = held.manifest.checkpoint_seq
            timeline = 0 if shipper is None else shipper.begin(checkpoint_seq)
            return _BackupSource(held, clock(), timeline)

        self._shard.want_snapshot(take, answering(asked))
        return await asked

    def _copy(self, making: BackingUp, taken: _BackupSource) -> BackupManifest:
        assert self._snapshots is not None
        snapshot = self._snapshots.complete(taken.held)
        return making.run(snapshot, taken.at_ms, timeline=taken.timeline)

    def _check(self, place: str) -> str:
        # 15 ms of a start, which `delayserver.serve.app` has behind it.
        from delayserver.recovery.check import check_path

        assert self._settings.backup_dir is not None
        report = check_path(
            self._settings.backup_dir / place,
            catalog_max_bytes=self._settings.catalog_max_bytes,
            of={Kind.PARTIAL},
        )
        # Damage that was known before is not the copy's fault.
        found = next((one for one in report.damage if not one.is_known_damage), None)
        return "" if found is None else str(found)

    def _tokens(self) -> bytes | None:
        if self._identity.shard:
            return None
        return read_whole(OsFiles(str(self._tokens_directory), readonly=True), TOKENS_FILE)

    # ── how it is shown ────────────────────────────────────────────────────────────────────────

    def _running(self, asked: WantedBackup, making: BackingUp) -> BackupView:
        step: BackupStep = "waiting"
        if making.total_bytes:
            step = "checking" if making.is_checking else "copying"
        return BackupView(
            name=asked.name,
            shard=self._identity.shard,
            state="running",
            step=step,
            began_ms=asked.began_ms,
            taken_ms=None,
            completed_ms=None,
            checkpoint_seq=None,
            total_bytes=making.total_bytes,
            done_bytes=min(making.done_bytes, making.total_bytes),
            copied_bytes=making.copied_bytes,
            is_verified=False,
        )
