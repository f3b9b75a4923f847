"""The replica of a shard in its directory: opened, made anew, set aside, dropped.

    FORMAT there and sound ──▶ opened
    damaged, too old, or none and the log is long ──▶ copied from a peer ──▶ opened
    the log has lost its end ──▶ people decide ──▶ opened, or set aside and copied
    the node is not placed for the shard (`placement`) ──▶ dropped, when others have it (`Parting`)

All other nodes learn of it by the notes of `Reports`, which say at each step what counts.

Cost: that of its parts. Threads: the one that follows, unless a method says otherwise.
"""

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import structlog

from delayserver.cluster.copying import HttpPeer
from delayserver.cluster.follow import Lifetime
from delayserver.cluster.membership import Lines, Membership
from delayserver.cluster.placement import Placement
from delayserver.cluster.reports import HowFar, Reports
from delayserver.cluster.watch import Parting, places_back, waits_for_people
from delayserver.config import Settings
from delayserver.recovery.dropping import drop, make_room
from delayserver.recovery.incoming import Incoming, clear, finish_swap, set_aside
from delayserver.recovery.replica import Replica
from delayserver.recovery.snapshots import Snapshots
from delayserver.recovery.standby import Standby
from storage.catalog import Catalog, LmdbCatalog
from storage.directory import FORMAT_FILE, LOCK_FILE, keep_mark
from storage.errors import DamageError, EngineError, NoPeerError, ReplicatedLogError
from storage.files import OsFiles
from storage.kinds import Kind
from storage.replicated.adoption import concerns, is_reached
from storage.replicated.meta import AdoptRecord, MetaLog
from storage.replicated.office import OfficeState
from storage.replicated.onlooker import Onlooker

if TYPE_CHECKING:
    from storage.replicated.kafka import KafkaEngine

RENEW_S: Final = 2.0
"""Between two rounds of asking who has a copy."""
COPY_RECORDS: Final = 100_000
"""A new replica reads as many records, and copies another one where there are more."""
DECISION_S: Final = 1.0
"""Between two looks whether people have decided how a log goes on that has lost its end."""
PEERS_MS: Final = 10_000
"""So long a replica that need not be made anew waits to hear of others."""

log = structlog.get_logger()


class ReplicaKeeper:
    """Keeps the replica of one shard; see `delayserver.cluster.follow.Keeper`."""

    def __init__(
        self,
        settings: Settings,
        shard: int,
        membership: Membership,
        engine: "KafkaEngine",
        lines: Lines,
        reports: Reports,
        make_peer: Callable[[str], HttpPeer],
        *,
        open_catalog: Callable[[], Catalog],
        stopwatch: Callable[[], int],
    ) -> None:
        """`make_peer`: of the process at a URL; `open_catalog`: that of the replica.
        `stopwatch` gives ms that only go on."""
        self._settings = settings
        self._number = shard
        self._membership = membership
        self._brokers = engine
        self._lines = lines
        self._reports = reports
        self._make_peer = make_peer
        self._open_catalog = open_catalog
        self._stopwatch = stopwatch
        self._files = OsFiles(str(settings.data_dir))
        self.snapshots = Snapshots(self._files, membership.of_shard(shard))
        self.is_damaged = False
        """Damage was found in office; behind it the replica is made anew."""
        self._obeyed: AdoptRecord | None = None
        """The last decision of people by which it was looked how the log goes on."""
        self._replica: Replica
        self._own_url = ""
        self._owner_url: Callable[[], str | None]
        self._parting: Parting

    def begin(self, replica: Replica, own_url: str, owner_url: Callable[[], str | None]) -> None:
        """Before a process follows: `replica` opens its files, `own_url` is the address of this
        process, and `owner_url` that of the owner (None: it is not known, or this one)."""
        self._replica, self._own_url, self._owner_url = replica, own_url, owner_url
        self._parting = Parting(self._number, self._membership.node)

    @property
    def placement(self) -> Placement:
        """As it was heard of last. For any thread."""
        news = self._lines.news
        return news.placement if news.at_ms else self._membership.placement

    @property
    def is_placed(self) -> bool:
        """Whether the node is to have a replica. For any thread."""
        return self._parting.is_placed(self.placement)

    def _open(self) -> Standby:
        """The replica as it is in the directory. Raises StorageError."""
        with self._files.lock(LOCK_FILE):
            finish_swap(self._files)
            identity = self._membership.of_shard(self._number)
            keep_mark(self._files, Kind.REPLICA, identity.fingerprint)
        standby = self._replica.stand_by(self._files, self._open_catalog)
        self.instruct(standby)
        self._reports.stopped = (0, 0)
        self._reports.how_far = lambda: (
            HowFar(standby.kept, standby.state.next_offset, standby.lag_ms)
            if standby.is_known
            else HowFar()
        )
        is_placed = self.is_placed
        self._reports.process_url = self._own_url
        self._reports.stage = "replica" if is_placed else "leaving"
        return standby

    def instruct(self, standby: Standby) -> None:
        """Tell the thread that follows the news about its shard. For any thread."""
        news, shard, own = self._lines.news, self._number, self._membership.node
        must_wait = waits_for_people(news, shard, own, standby.state.epoch)
        standby.is_drained = own in news.drained or must_wait
        standby.set_rank(self.placement.rank(shard, own) + places_back(news, shard, own))

    def adoptions(self) -> list[AdoptRecord]:
        """People's decisions about the log of the shard. Raises EngineError."""
        with contextlib.closing(self._brokers.meta()) as meta:
            return MetaLog(meta).read().adoptions.get(self._number, [])

    def ask_people(
        self, ending: Lifetime, standby: Standby, error: ReplicatedLogError
    ) -> Standby | None:
        """See `Keeper`."""
        shard, place = self._number, standby.place
        reach = self._replica.reach(self._files, place)
        log.error(
            "the log has lost its end, and this replica has more: people decide",
            error=str(error),
            shard=shard,
            seq=reach,
            decide=f"delayserver cluster adopt {shard} --from NODE",
        )
        self._reports.stop(place.epoch, reach)
        try:
            while not ending.is_ending:
                with contextlib.suppress(EngineError):
                    if self._is_decided(standby, place):
                        break
                ending.wait(DECISION_S)
        finally:
            standby.abandon()
        return None if ending.is_ending else self._open()

    def _is_decided(self, standby: Standby, place: OfficeState) -> bool:
        """Whether the replica may find in the log how it goes on. Raises StorageError."""
        engine, shard = self._brokers, self._number
        decisions = [one for one in self.adoptions() if concerns(one, place)]
        if not decisions or decisions[-1] == self._obeyed:
            return False
        decision = decisions[-1]
        with contextlib.closing(engine.log(shard)) as shard_log:
            if decision.of == self._membership.node and not is_reached(shard_log, decision):
                with contextlib.closing(engine.settled(shard)) as settled:
                    standby.adopt(decision, shard_log, settled)
            if not is_reached(shard_log, decision):
                return False
        self._obeyed = decision
        return True

    def set_aside(self, seq: int) -> None:
        """See `Keeper`."""
        self._reports.have_none()
        with self._files.lock(LOCK_FILE):
            kept = set_aside(self._files, seq)
        log.warning(
            "this replica is kept beside the one that is copied now; delete it when nobody misses "
            "anything",
            directory=str(self._settings.data_dir / kept),
            seq=seq,
        )

    def open_sound(self) -> Standby | None:
        """The replica as it is in the directory; None: it is damaged, or there is none, and a copy
        is quicker than the whole log, or none is needed. Raises StorageError."""
        if not self._files.exists(FORMAT_FILE) and not self.is_placed:
            return None
        with self._files.lock(LOCK_FILE):
            make_room(self._files)
        if self.is_damaged:
            self.is_damaged = False
            return None
        if not self._files.exists(FORMAT_FILE):
            with contextlib.suppress(EngineError):
                if self.adoptions():
                    return None  # Only other replicas have the records that the log has lost.
            with contextlib.closing(self._brokers.log(self._number)) as shard_log:
                if (shard_log.end() or 0) > COPY_RECORDS:
                    return None
        try:
            return self._open()
        except DamageError as error:
            log.error("damage found", error=str(error))
            return None

    def renew(self, ending: Lifetime, must: bool) -> Standby | None:
        """See `Keeper`."""
        # It counts for nothing meanwhile: records that it lacks are not deleted from the logs.
        self._reports.have_none("copying")

        def is_ending() -> bool:
            return ending.is_ending or not self.is_needed()

        incoming = Incoming(
            self._files,
            self._membership.of_shard(self._number),
            self._open_copy,
            progress=lambda what, done, total: log.info(what, done_bytes=done, total_bytes=total),
            is_ending=is_ending,
            sleep=ending.wait,
        )
        began_ms = self._stopwatch()
        while not is_ending():
            peers = self._peers()
            try:
                with self._files.lock(LOCK_FILE):
                    make_room(self._files)
                    manifest = incoming.fetch(peers)
                    clear(self._files)
            except NoPeerError as error:
                has_waited = self._stopwatch() - began_ms >= PEERS_MS
                if not must and (peers or has_waited):
                    log.error("it goes on with what is there", error=str(error))
                    break
                log.debug("nobody gives a copy", error=str(error))
                ending.wait(RENEW_S)
            else:
                seconds = round((self._stopwatch() - began_ms) / 1000, 1)
                log.info("the replica was made anew", seconds=seconds, bytes=manifest.total_bytes)
                break
        return None if is_ending() else self._open()

    def is_needed(self) -> bool:
        """See `Keeper`."""
        stage = self._parting.judge(self.placement, self._lines.news, self._stopwatch())
        if self._reports.stage in ("replica", "leaving") and stage != "passing":
            self._reports.stage = stage
        return stage == "replica" or (stage == "leaving" and self._files.exists(FORMAT_FILE))

    def look_on(self) -> Onlooker:
        """See `Keeper`."""
        shard = self._number
        self._reports.have_none("passing")
        self.snapshots.release_all()
        with self._files.lock(LOCK_FILE):
            drop(self._files)
        nodes = self.placement.nodes(shard)
        log.info("has no replica, and passes calls on", shard=shard, replicas=", ".join(nodes))
        return Onlooker(self._brokers.log(shard))

    def _open_copy(self, directory: str) -> LmdbCatalog:
        path = str(self._settings.data_dir / directory)
        max_bytes = self._settings.catalog_max_bytes
        return LmdbCatalog(path, max_bytes=max_bytes, readonly=True, verify_all=True)

    def _peers(self) -> list[HttpPeer]:
        """Nodes that may have a copy: the owner, then the others, the one last heard of first."""
        news, shard, own = self._lines.news, self._number, self._membership.node
        others = [one for one in news.replicas.get(shard, ()) if one.node != own]
        others.sort(key=lambda one: -one.note.at_ms)
        urls = [self._owner_url() or "", *(one.note.process_url for one in others)]
        return [self._make_peer(url) for url in dict.fromkeys(filter(None, urls))]
