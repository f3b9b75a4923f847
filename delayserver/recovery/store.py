"""A data directory that is open: its lock, catalog and logs, and the parts that file and settle.

    Store ──▶ recover ──▶ a shard that serves     (`delayserver.server.shard`)
      └─────▶ follow  ──▶ a standby that files    (`delayserver.recovery.standby`)

Cost: that of opening the catalog. Threads: made before any thread starts; then each part belongs to
the thread that its module names.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import structlog

from delayserver.config import Settings
from delayserver.parts.part import Parts
from delayserver.records.kept_leases import NONE_KEPT
from delayserver.recovery.openers import OWN_DIRECTORY, Openers
from delayserver.recovery.recover import Progress, Recovered, recover
from delayserver.schedule.loader import Loader
from delayserver.schedule.wheel import SLOT_MS
from storage.catalog import Catalog
from storage.directory import FORMAT_VERSION, LOCK_FILE, open_identity, upgrade
from storage.errors import ShardNumberError
from storage.files import Files
from storage.hour_log import HourLog
from storage.rows import LogKind
from storage.tiered_catalog import TieredCatalog
from storage.write_ahead_log import WriteAheadLog

WRITTEN_HOURS_MIN: Final = 128
"""Files of hours that a log which is written to may have open, however small the limit is."""
READ_HOURS_MAX: Final = 32
"""… a log that is only read. Several read the same files, each for a thread of its own."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Where a shard lives: its time, its chance, its features, and how its disk is opened."""

    clock: Callable[[], int]
    """Milliseconds since the epoch; may be set. For moments: when something is due."""
    stopwatch: Callable[[], int]
    """Milliseconds; never set, and goes on while the machine sleeps. For lengths of time."""
    random_bytes: Callable[[int], bytes]
    random: Callable[[], float]
    """From 0 to 1."""
    monotonic: Callable[[], float]
    """Seconds; never set, and stands still while the machine sleeps: how long work takes."""
    parts: Parts
    """The features of the server."""
    progress: Progress = lambda what, done, total: None
    shard: int = 0
    """Its number among those of a server."""
    schedule_hours_max: int = WRITTEN_HOURS_MIN
    """Files of hours that the schedule log has open where it is written."""
    may_deliver: Callable[[], bool] = lambda: True
    """Whether deliveries may leave now, and questions be answered: where others could take over,
    only under a lease."""
    openers: Openers = OWN_DIRECTORY


class Store:
    """The parts of one data directory, from its lock on."""

    def __init__(
        self,
        settings: Settings,
        files: Files,
        open_catalog: Callable[[], Catalog],
        surroundings: Surroundings,
    ) -> None:
        """Lock the directory and open its parts. Opening changes only the files that it has to.

        Raises StorageError."""
        self.files = files
        self._settings = settings
        self._surroundings = surroundings
        self._cleanup = contextlib.ExitStack()
        try:
            self._open(open_catalog)
        except BaseException:
            self.close()
            raise

    def _open(self, open_catalog: Callable[[], Catalog]) -> None:
        files, surroundings = self.files, self._surroundings
        openers = surroundings.openers
        self._cleanup.enter_context(files.lock(LOCK_FILE))
        identity = self.identity = open_identity(
            files,
            random_bytes=surroundings.random_bytes,
            shard=surroundings.shard,
            given=openers.identity,
            of=openers.of,
        )
        if identity.shard != surroundings.shard:
            raise ShardNumberError(files.root, identity.shard, surroundings.shard)
        catalog = open_catalog()
        if openers.closes_catalog:
            self._cleanup.callback(catalog.close)
        self.catalog = TieredCatalog(catalog, files, stamp=identity.stamp, tiers=openers.key_tiers)
        self._cleanup.callback(self.catalog.close_runs)
        self.message_log = openers.message_log(files, self.catalog, identity, self._settings)
        self.schedule = self.hour_log(LogKind.SCHEDULE, surroundings.schedule_hours_max)
        definitions = openers.definitions(files, stamp=identity.stamp)
        self._cleanup.callback(definitions.close)
        self.replay = openers.replay(
            self.catalog,
            self.schedule,
            self.hour_log(LogKind.DISPATCH),
            self.message_log,
            openers.staging(files, identity.stamp),
            definitions,
            surroundings.parts,
            keepers=[
                partial(part.keep, self._settings) for part in surroundings.parts if part.keep
            ],
        )
        self.leases = openers.leases(files, identity)
        self.kept = NONE_KEPT
        """The leases that the last process has left; known behind `recover`."""
        dispatch = self.hour_log(LogKind.DISPATCH, WRITTEN_HOURS_MIN)
        self.settler = openers.settler(dispatch, self.catalog, identity)
        self._cleanup.callback(self.settler.close)
        self.loader = Loader(
            self.hour_log(LogKind.SCHEDULE),
            self.hour_log(LogKind.DISPATCH),
            slot_ms=SLOT_MS,
            sizes=openers.load_sizes,
        )

    def hour_log(self, kind: LogKind, open_files_max: int = READ_HOURS_MAX) -> HourLog:
        """The schedule log or the dispatch log, with open files of its own: for one thread."""
        made = HourLog(self.files, kind, stamp=self.identity.stamp, open_files_max=open_files_max)
        self._cleanup.callback(made.close)
        return made

    @property
    def write_ahead_log(self) -> WriteAheadLog:
        """The message log, which is not that of a standby: groups are appended to it."""
        assert isinstance(self.message_log, WriteAheadLog)
        return self.message_log

    def recover(self, now_ms: int) -> Recovered:
        """Bring it to where a shard can serve from it. Raises StorageError."""
        self.kept = self.leases.read()
        recovered = recover(
            self.catalog,
            self.write_ahead_log,
            self.replay,
            self.settler,
            self.loader,
            now_ms=now_ms,
            lead_ms=self._settings.lead_ms,
            is_carried_over=not self.identity.has_definitions,
            leases=self.kept.leased(),
            progress=self._surroundings.progress,
        )
        if self.identity.version < FORMAT_VERSION:
            # Not before a checkpoint has the new parts of this version.
            upgrade(self.files, self.identity)
            log.info("the data directory was carried over", format_version=FORMAT_VERSION)
        return recovered

    def close(self) -> None:
        """Close all files and let the directory go."""
        self._cleanup.close()
