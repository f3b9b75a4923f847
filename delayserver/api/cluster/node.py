"""A process of a node for one shard: on standby until it holds the office, then its server.

    follow (a thread) ──▶ Standby.step, step, … ──▶ Holder ──▶ beats (a thread)
         │ who owns the shard                          └──▶ the server, in this very process
         ▼                                                    │ somebody else is to have it
    book ──▶ front: answers, or passes on to the owner ◀──────┘

Whoever gives the office away in order is on standby again, in the same process: its socket never
stops listening. Whoever may have lost it ends at once, with a status that says "start me again"
(75): a new process follows the log, whoever owns it then.

Where the log has lost its end, and this replica has more, the thread that follows stops: people
decide (`cluster adopt`) behind which replica the log goes on. It is this one, or one that has the
same, or another: then what is here is set aside, and copied from there.

All the time a thread reports how far the replica is, and, of an owner, has the logs deleted that
two replicas have behind them (R6).

Where the node is not placed for the shard (`placement`) there is no replica: the process looks on
who owns the shard (`storage.replicated.onlooker`), and passes calls on to it, until it is. A
replica that it still has it keeps until it is not needed (`watch.Parting`).

Cost: that of its parts. Threads: the event loop, and the three above.
"""

import asyncio
import contextlib
import os
import random
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import structlog

from delayserver.api.cluster.book import Entry, OwnerBook, encode_line
from delayserver.api.cluster.copying import HttpPeer
from delayserver.api.cluster.joining import open_engine
from delayserver.api.cluster.link import ShardPlace
from delayserver.api.cluster.map import ClusterMap
from delayserver.api.cluster.meeting import TcpMeeting
from delayserver.api.cluster.membership import Address, Lines, Membership, entry_of
from delayserver.api.cluster.placement import Placement
from delayserver.api.cluster.proofs import Proofs
from delayserver.api.cluster.sharing import Sharing, Take, Taken
from delayserver.api.cluster.standby import StandbyFront, make_owner_tls
from delayserver.api.cluster.watch import (
    News,
    Parting,
    ReplicaNote,
    Stage,
    choose,
    deletable,
    kept_by_two,
    places_back,
    waits_for_people,
)
from delayserver.api.hot.asgi import Asgi
from delayserver.config import Settings
from delayserver.errors import AccessError
from delayserver.recovery.dropping import drop, make_room
from delayserver.recovery.incoming import Incoming, clear, finish_swap, set_aside
from delayserver.recovery.replica import Replica, ReplicaPlace
from delayserver.recovery.snapshots import Snapshots
from delayserver.recovery.standby import LAG_MAX_MS, Standby
from delayserver.recovery.store import Surroundings
from delayserver.security.tokens import TokenFile, TokenTable
from delayserver.server.metrics import Metrics
from delayserver.server.server import open_catalog_in, stopwatch_ms, wall_clock_ms
from storage.catalog import LmdbCatalog
from storage.directory import FORMAT_FILE, LOCK_FILE
from storage.errors import (
    DamageError,
    EngineError,
    LogReplacedError,
    NoPeerError,
    OffsetRangeError,
    OtherHistoryError,
    ReplicatedLogError,
    ShortageError,
)
from storage.files import OsFiles
from storage.replicated.adoption import concerns, is_reached
from storage.replicated.envelope import NOBODY
from storage.replicated.holder import Holder
from storage.replicated.log import FollowedLog
from storage.replicated.meta import AdoptRecord, MetaLog
from storage.replicated.office import OfficeState
from storage.replicated.onlooker import Onlooker
from storage.write_ahead_log import WriteAheadLog

if TYPE_CHECKING:
    from storage.replicated.kafka import KafkaEngine

STEP_S: Final = 0.1
"""How long a step waits for records."""
BEATS_LOOK_S: Final = 0.05
CAUGHT_UP_RECORDS: Final = 10_000
"""A standby that is not further behind can take over soon."""
TOKENS_S: Final = 1.0
SHORTAGE_WAIT_S: Final = 1.0
HEAL_S: Final = 600.0
"""After a damaged replica was made anew, or could not be, it is not tried again for so long."""
REPLACE_MS: Final = 3_600_000
"""A replica that has not kept up for so long is made anew: a copy is written in order, and is as
far as its source."""
RENEW_S: Final = 2.0
"""Between two rounds of asking who has a copy."""
COPY_RECORDS: Final = 100_000
"""A new replica reads as many records, and copies another one where there are more."""
DECISION_S: Final = 1.0
"""Between two looks whether people have decided how a log goes on that has lost its end."""
PEERS_S: Final = 10.0
"""So long a replica that need not be made anew waits to hear of others."""
REPORT_S: Final = 3.0
UNSEEN_MAX: Final = 30
"""Nodes that a note names at most: the brokers keep 4 KiB of it."""
DELETE_S: Final = 60.0
KEPT_MS: Final = 3_600_000
"""What two replicas have behind them stays in the logs for so long."""
STEADY_MS: Final = 60_000
"""An owner gives its shard to one that goes before it, but not sooner than this after its claim."""

log = structlog.get_logger()
Fatal = Callable[[BaseException], None]


class HowFar(NamedTuple):
    """How far a replica is."""

    kept: tuple[int, int] = (0, 0)
    """Where the last checkpoint stands, in the shard's log and in that of what is settled."""
    read: int = 0
    """What stands before it in the shard's log was read."""
    lag_ms: int = 0
    """All that stood in the shard's log so long ago is filed."""


class Beats(threading.Thread):
    """Has an owner be heard of."""

    def __init__(self, holder: Holder, fatal: Fatal) -> None:
        super().__init__(name="delayserver-beats", daemon=True)
        self._holder = holder
        self._fatal = fatal
        self._ending = threading.Event()

    def run(self) -> None:
        try:
            while not self._ending.wait(BEATS_LOOK_S):
                self._holder.beat()
        except BaseException as error:
            self._fatal(error)

    def end(self) -> None:
        """No beat comes behind this."""
        self._ending.set()
        self.join()


class Follow(threading.Thread):
    """Moves a standby until it holds the office, or is told to end; where the log or the disk does
    not let it go on, the replica is made anew from another one, or people decide. As long as no
    replica is needed here it looks on."""

    def __init__(
        self,
        standby: Standby | None,
        renew: Callable[[bool], Standby | None],
        ask_people: Callable[[Standby, ReplicatedLogError], Standby | None],
        set_aside: Callable[[int], None],
        is_needed: Callable[[], bool],
        look_on: Callable[[], Onlooker],
        on_owner: Callable[[int, str], None],
        on_claimed: Callable[[Holder], None],
        on_end: Callable[[], None],
        fatal: Fatal,
    ) -> None:
        """`standby` None: there is nothing to go on with. `renew` makes the replica anew and opens
        it, or opens it as it is if it need not be and nobody gives a copy; None: it is to end, or
        no replica is needed any more, which `is_needed` tells. `ask_people` is called where the log
        has lost its end, with a replica behind a checkpoint; it returns it opened anew when people
        have decided; None: it is to end. `set_aside` is called with the last seq of one that is not
        gone on with, closed. `look_on` deletes what there is of one. All are called in this thread:
        `on_owner` when another owns the shard, with the epoch and what the claim says, `on_claimed`
        when this node does, and `on_end` when the directory is closed, however that came."""
        super().__init__(name="delayserver-follow", daemon=True)
        self.standby = standby
        self.onlooker: Onlooker | None = None
        """As long as there is no replica, and none is needed."""
        self._renew = renew
        self._ask_people = ask_people
        self._set_aside = set_aside
        self._is_needed = is_needed
        self._look_on = look_on
        self._on_owner = on_owner
        self._on_claimed = on_claimed
        self._on_end = on_end
        self._fatal = fatal
        self._ending = threading.Event()
        self._heal_s = -HEAL_S
        """When it was tried last to replace what is damaged."""

    def run(self) -> None:
        try:
            self._follow()
            self._on_end()
        except BaseException as error:
            self._fatal(error)

    def _follow(self) -> None:
        known, must_renew = None, False
        while not self.is_ending:
            if not self._is_needed():
                self._pass_on()
                must_renew = False
                continue
            standby = self.standby
            if standby is None:
                standby = self.standby = self._renew(must_renew)
                known = None
                continue
            try:
                holder = standby.step(STEP_S)
            except OffsetRangeError as error:
                if error.offset >= error.first:
                    self._await_people(standby, error)
                    known = None
                else:
                    log.warning("the log does not reach back so far", error=str(error))
                    self._close()
                    must_renew = True
                continue
            except LogReplacedError as error:
                self._await_people(standby, error)
                known = None
                continue
            except OtherHistoryError as error:
                log.warning("the log goes on behind another replica", error=str(error))
                seq = standby.place.next_seq - 1
                self._close()
                self._set_aside(seq)
                must_renew = True
                continue
            except ShortageError as error:
                log.error("tried again soon", thread=self.name, error=str(error))
                self._ending.wait(SHORTAGE_WAIT_S)
                continue
            state = standby.state
            if (state.epoch, state.owner) != known:
                known = state.epoch, state.owner
                self._on_owner(state.epoch, standby.owner_address)
            if holder is not None:
                self._on_claimed(holder)
                standby.finish()
                return
            if standby.damage:
                must_renew = False
                self._heal(standby)
            elif standby.stuck_ms >= REPLACE_MS:
                log.error("the replica stays behind, and is made anew", lag_ms=standby.lag_ms)
                must_renew = False
                self._close()
        if self.standby is not None:
            self.standby.checkpoint()
            self.standby.close()

    def _await_people(self, standby: Standby, error: ReplicatedLogError) -> None:
        """The log has lost its end: what this replica knows of it nobody else may know, and a copy
        would overwrite it. Nobody is known to own the shard behind that."""
        try:
            standby.checkpoint()  # What was read and not filed may be nowhere else.
        except ShortageError as shortage:
            log.error("tried again soon", thread=self.name, error=str(shortage))
            self._ending.wait(SHORTAGE_WAIT_S)
            return
        self.standby = None
        self.standby = self._ask_people(standby, error)

    def _pass_on(self) -> None:
        """There is to be no replica here, for as long as none is needed."""
        if self.standby is not None:
            self._close()
        with contextlib.closing(self._look_on()) as onlooker:
            self.onlooker = onlooker
            while not self.is_ending and not self._is_needed():
                if onlooker.step(STEP_S) and onlooker.address is not None:
                    self._on_owner(onlooker.epoch, onlooker.address)
        self.onlooker = None

    def _heal(self, standby: Standby) -> None:
        """Something was found damaged: another replica has it still."""
        for damage in standby.damage:
            log.error("damage found", error=str(damage.error()))
        standby.damage.clear()
        if time.monotonic() - self._heal_s >= HEAL_S:
            self._heal_s = time.monotonic()
            self._close()

    def _close(self) -> None:
        standby, self.standby = self.standby, None
        assert standby is not None
        standby.abandon()

    @property
    def is_ending(self) -> bool:
        """Whether it was told to end."""
        return self._ending.is_set()

    def wait(self, seconds: float) -> None:
        """So long, or until it is told to end."""
        self._ending.wait(seconds)

    def end(self) -> None:
        """Have it end soon."""
        self._ending.set()


class Reports(threading.Thread):
    """Says how far the replica is, and deletes what is not needed any more."""

    def __init__(
        self, engine: "KafkaEngine", shard: int, node: str, url: str, lines: Lines
    ) -> None:
        """`url`: where clients reach the node."""
        super().__init__(name="delayserver-reports", daemon=True)
        self.how_far: Callable[[], HowFar] = HowFar
        self.process_url = ""
        """Where others get a copy of the replica; empty: there is none."""
        self.stopped: tuple[int, int] = (0, 0)
        """The epoch and the last seq of a replica that waits for people; (0, 0): it does not."""
        self.stage: Stage = "copying"
        self.office = (0, "")
        """The epoch in which this process owns the shard, and where it is found; 0: it does not."""
        self._brokers = engine
        self._number = shard
        self._node = node
        self._url = url
        self._lines = lines
        self._ending = threading.Event()
        self._asked = threading.Event()
        self._is_behind = False
        self._samples: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
        self._deleted_s = time.monotonic()

    def run(self) -> None:
        while not self._ending.is_set():
            self._asked.wait(REPORT_S)
            self._asked.clear()
            if self._ending.is_set():
                return
            try:
                self._report()
                if time.monotonic() - self._deleted_s >= DELETE_S:
                    self._deleted_s = time.monotonic()
                    self._delete()
            except EngineError as error:
                log.debug("the brokers do not answer", error=str(error))
            except Exception as error:
                # It only helps: the shard is served without it.
                log.error("a report failed", error=str(error), exc_info=error)

    def _report(self) -> None:
        (kept, settled), read, lag_ms = self.how_far()
        stage, (epoch, address) = self.stage, self.office
        self._tell_lag(lag_ms)
        note = ReplicaNote(
            wall_clock_ms(),
            self._url,
            read,
            settled,
            self.process_url,
            lag_ms=lag_ms,
            unseen=self._lines.news.unseen.get(self._node, [])[:UNSEEN_MAX],
            stage=stage,
            epoch=epoch,
            address=address,
            stopped_epoch=self.stopped[0],
            stopped_seq=self.stopped[1],
        )
        self._brokers.commit_progress(self._node, self._number, kept, note.pack())

    def _tell_lag(self, lag_ms: int) -> None:
        """Tell people, once, that the replica is behind, and that it is not any more."""
        is_behind = lag_ms > LAG_MAX_MS
        if is_behind and not self._is_behind:
            log.warning("the replica is behind, and does not take over", lag_ms=lag_ms)
        elif self._is_behind and not is_behind:
            log.info("the replica has caught up")
        self._is_behind = is_behind

    def _delete(self) -> None:
        """R6: what two replicas have had behind a checkpoint for an hour is not needed."""
        news, now_ms = self._lines.news, stopwatch_ms()
        places = (
            kept_by_two(news, self._number, lambda one: one.checkpoint_offset),
            kept_by_two(news, self._number, lambda one: one.note.settled_offset),
        )
        opened = (self._brokers.log, self._brokers.settled)
        for place, samples, open_log in zip(places, self._samples, opened, strict=True):
            if place is not None:
                samples.append((now_ms, place))
            offset = deletable(samples, now_ms, KEPT_MS)
            if self.office[0] and offset:
                with contextlib.closing(open_log(self._number)) as shard_log:
                    shard_log.delete_before(offset)
                samples[:] = [one for one in samples if one[1] > offset]

    def stop(self, epoch: int, seq: int) -> None:
        """Say at once that the replica waits for people: see `stopped`."""
        self.process_url, self.how_far = "", HowFar
        self.stopped = (epoch, seq)
        self._asked.set()

    def end(self) -> None:
        """Say nothing more."""
        self._ending.set()
        self._asked.set()


class Awaited:
    """What a standby waits for: the office, or that it is told to stop; the other one may come as
    well, as long as it is not a server."""

    def __init__(self) -> None:
        self.holder: Holder | None = None
        self.is_stopping = False
        self._event = asyncio.Event()

    def came(self, holder: Holder) -> None:
        """The office is held."""
        self.holder = holder
        self._event.set()

    def stop(self) -> None:
        """It is told to stop."""
        self.is_stopping = True
        self._event.set()

    async def wait(self) -> None:
        """Until one of the two is so."""
        await self._event.wait()


class NodeShard:
    """The process, as a member of its cluster."""

    def __init__(
        self,
        settings: Settings,
        place: ShardPlace,
        membership: Membership,
        rest: bytes,
        *,
        tell: Callable[[bytes], None],
        fatal: Fatal,
    ) -> None:
        """`rest`: what the supervisor has said behind the membership; `tell`: gives it a line.

        Raises StorageError, DelayServerError, OSError."""
        assert settings.advertise is not None
        self._settings = settings
        self._place = place
        self._membership = membership
        self._tell = tell
        self._fatal = fatal
        self._brokers = open_engine(settings)
        self.book = OwnerBook(place.count)
        self.lines = Lines(0, rest, self.book)
        self.meeting: TcpMeeting
        self.holder: Holder | None = None
        self._beats: Beats
        self._address = ""
        self._replica: Replica
        identity = membership.identity
        self._proofs = Proofs(bytes.fromhex(identity.link_secret), identity.cluster)
        self._files = OsFiles(str(settings.data_dir))
        self._snapshots = Snapshots(self._files, membership.of_shard(place.shard))
        self._tls = make_owner_tls(settings)
        self._own_url = ""
        self._is_damaged = False
        """What was found in office; behind it the replica is made anew."""
        self._obeyed: AdoptRecord | None = None
        """The last decision of people by which it was looked how the log goes on."""
        self._parting: Parting
        self._reports = Reports(
            self._brokers, place.shard, membership.node, settings.advertise, self.lines
        )
        self._reports.start()

    # ── on standby ─────────────────────────────────────────────────────────────────────────────

    @property
    def _placement(self) -> Placement:
        """As it was heard of last."""
        news = self.lines.news
        return news.placement if news.at_ms else self._membership.placement

    def _prepare(self, listeners: Sequence[socket.socket]) -> None:
        settings, shard, engine = self._settings, self._place.shard, self._brokers
        self._own_url, host = self._own_urls(listeners)
        port = settings.link_port and settings.link_port + shard
        link = _bind(settings.host, port)
        identity = self._membership.identity
        secret = bytes.fromhex(identity.link_secret)
        self.meeting = TcpMeeting(link, self.book, secret, identity.cluster)
        address = Address(self._membership.node, self._own_url, f"{host}:{link.getsockname()[1]}")
        self._address = address.pack()
        offset_ms = settings.clock_offset_ms
        place = ReplicaPlace(
            self._membership.number,
            self._placement.rank(shard, self._membership.node),
            self._membership.of_shard(shard),
            identity.durability == "fsync",
            self._address,
            partial(engine.log, shard),
            partial(engine.settled, shard),
            partial(engine.transactions, shard),
            self._adoptions,
        )
        surroundings = Surroundings(
            clock=lambda: wall_clock_ms() + offset_ms,
            stopwatch=stopwatch_ms,
            monotonic=time.monotonic,
            random_bytes=os.urandom,
            random=random.random,
            shard=shard,
        )
        self._replica = Replica(place, surroundings, settings)
        self._parting = Parting(shard, self._membership.node)

    def _open(self) -> Standby:
        """The replica as it is in the directory. Raises StorageError."""
        files, settings = self._files, self._settings
        with files.lock(LOCK_FILE):
            finish_swap(files)
        standby = self._replica.stand_by(files, lambda: open_catalog_in(files, settings))
        self._instruct(standby)
        self._reports.stopped = (0, 0)
        self._reports.how_far = lambda: (
            HowFar(standby.kept, standby.state.next_offset, standby.lag_ms)
            if standby.is_known
            else HowFar()
        )
        is_placed = self._parting.is_placed(self._placement)
        self._reports.process_url = self._own_url
        self._reports.stage = "replica" if is_placed else "leaving"
        return standby

    def _instruct(self, standby: Standby) -> None:
        """Tell who follows what the news mean for it."""
        news, shard, own = self.lines.news, self._place.shard, self._membership.node
        must_wait = waits_for_people(news, shard, own, standby.state.epoch)
        standby.is_drained = own in news.drained or must_wait
        standby.set_rank(self._placement.rank(shard, own))
        standby.go_back(places_back(news, shard, own))

    def _adoptions(self) -> list[AdoptRecord]:
        """What people have decided about the log of the shard. Raises EngineError."""
        with contextlib.closing(self._brokers.meta()) as meta:
            return MetaLog(meta).read().adoptions.get(self._place.shard, [])

    def _ask_people(
        self, follow: Follow, standby: Standby, error: ReplicatedLogError
    ) -> Standby | None:
        """Wait until people have decided how the log goes on, and do it if it is with this node's
        replica, which is opened anew then; None: it is to end. Raises StorageError."""
        shard, place = self._place.shard, standby.place
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
            while not follow.is_ending:
                with contextlib.suppress(EngineError):
                    if self._is_decided(standby, place):
                        break
                follow.wait(DECISION_S)
        finally:
            standby.abandon()
        return None if follow.is_ending else self._open()

    def _is_decided(self, standby: Standby, place: OfficeState) -> bool:
        """Whether the replica may find in the log how it goes on. Raises StorageError."""
        engine, shard = self._brokers, self._place.shard
        decisions = [one for one in self._adoptions() if concerns(one, place)]
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

    def _set_aside(self, seq: int) -> None:
        """What this replica has is not what the log goes on with. Raises StorageError."""
        self._reports.process_url, self._reports.how_far = "", HowFar
        with self._files.lock(LOCK_FILE):
            kept = set_aside(self._files, seq)
        log.warning(
            "this replica is kept beside the one that is copied now; delete it when nobody misses "
            "anything",
            directory=str(self._settings.data_dir / kept),
            seq=seq,
        )

    def _open_sound(self) -> Standby | None:
        """The same; None: it is damaged, or there is none, and a copy is quicker than the whole
        log, or none is needed. Raises StorageError."""
        if not self._files.exists(FORMAT_FILE) and not self._parting.is_placed(self._placement):
            return None
        with self._files.lock(LOCK_FILE):
            make_room(self._files)
        if self._is_damaged:
            self._is_damaged = False
            return None
        if not self._files.exists(FORMAT_FILE):
            with contextlib.suppress(EngineError):
                if self._adoptions():
                    return None  # What the log has lost is in other replicas alone.
            with contextlib.closing(self._brokers.log(self._place.shard)) as shard_log:
                if (shard_log.end() or 0) > COPY_RECORDS:
                    return None
        try:
            return self._open()
        except DamageError as error:
            log.error("damage found", error=str(error))
            return None

    def _renew(self, follow: Follow, must: bool) -> Standby | None:
        """Make the replica anew from another one; unless it must be, go on as it is if nobody gives
        a copy. None: it is to end, or none is needed any more. Raises StorageError."""
        # It counts for nothing meanwhile: what it lacks is not deleted from the logs.
        self._have_none("copying")

        def is_ending() -> bool:
            return follow.is_ending or not self._is_needed()

        incoming = Incoming(
            self._files,
            self._membership.of_shard(self._place.shard),
            self._open_copy,
            progress=lambda what, done, total: log.info(what, done_bytes=done, total_bytes=total),
            is_ending=is_ending,
            sleep=follow.wait,
        )
        began_s = time.monotonic()
        while not is_ending():
            peers = self._peers()
            try:
                with self._files.lock(LOCK_FILE):
                    make_room(self._files)
                    manifest = incoming.fetch(peers)
                    clear(self._files)
            except NoPeerError as error:
                has_waited = time.monotonic() - began_s >= PEERS_S
                if not must and (peers or has_waited):
                    log.error("it goes on with what is there", error=str(error))
                    break
                log.debug("nobody gives a copy", error=str(error))
                follow.wait(RENEW_S)
            else:
                seconds = round(time.monotonic() - began_s, 1)
                log.info("the replica was made anew", seconds=seconds, bytes=manifest.total_bytes)
                break
        return None if is_ending() else self._open()

    def _have_none(self, stage: Stage) -> None:
        """There is no replica that counts."""
        reports = self._reports
        reports.process_url, reports.how_far, reports.stage = "", HowFar, stage

    def _is_needed(self) -> bool:
        """Whether the node is to have a replica, or has to keep the one that it has."""
        stage = self._parting.judge(
            self._placement, self.lines.news, wall_clock_ms(), stopwatch_ms()
        )
        if self._reports.stage in ("replica", "leaving") and stage != "passing":
            self._reports.stage = stage
        return stage == "replica" or (stage == "leaving" and self._files.exists(FORMAT_FILE))

    def _look_on(self) -> Onlooker:
        """Let there be no replica. Raises StorageError."""
        shard = self._place.shard
        self._have_none("passing")
        self._snapshots.release_all()
        with self._files.lock(LOCK_FILE):
            drop(self._files)
        nodes = self._placement.nodes(shard)
        log.info("has no replica, and passes calls on", shard=shard, replicas=", ".join(nodes))
        return Onlooker(self._brokers.log(shard))

    def _open_copy(self, directory: str) -> LmdbCatalog:
        path = str(self._settings.data_dir / directory)
        max_bytes = self._settings.catalog_max_bytes
        return LmdbCatalog(path, max_bytes=max_bytes, readonly=True, verify_all=True)

    def _peers(self) -> list[HttpPeer]:
        """Who may have a copy: the owner, then the others, who was heard of last first."""
        news, shard, own = self.lines.news, self._place.shard, self._membership.node
        others = [one for one in news.replicas.get(shard, ()) if one.node != own]
        others.sort(key=lambda one: -one.note.at_ms)
        owner = self._owner_url(self._own_url)
        urls = [owner or "", *(one.note.process_url for one in others)]
        return [
            HttpPeer(url, shard, self._proofs, self._tls, wall_clock_ms)
            for url in dict.fromkeys(filter(None, urls))
        ]

    def sharing(self, want: Callable[[Take, Taken], None]) -> Callable[[Asgi], Asgi]:
        """What gives copies to other nodes, before an application. `want` has the thread that files
        take a snapshot."""
        shard, proofs = self._place.shard, self._proofs
        return lambda app: Sharing(app, shard, proofs, self._snapshots, want, wall_clock_ms)

    async def stand_by(
        self,
        listeners: Sequence[socket.socket],
        tls: ssl.SSLContext | None,
        on_open: Callable[[], None],
    ) -> Holder | None:
        """Follow, and answer at `listeners`, which listen already, until this node holds the
        office; None: it was told to stop. `on_open` is called once it can follow.

        Raises StorageError, AccessError."""
        settings, loop, lines = self._settings, asyncio.get_running_loop(), self.lines
        # What listened to the last one has ended.
        self.book = lines.book = self.book.renewed()
        tokens = self._open_tokens()
        self._prepare(listeners)
        opened = await asyncio.to_thread(self._open_sound)
        on_open()
        office = Awaited()
        ended = asyncio.Event()

        def tell_owner(epoch: int, address: str) -> None:
            entry = entry_of(self._place.shard, epoch, address)
            loop.call_soon_threadsafe(self._on_owner, entry)

        def on_claimed(holder: Holder) -> None:
            # From here on the office is held, whatever the event loop is busy with.
            self._beats = Beats(holder, self._fatal)
            self._beats.start()
            loop.call_soon_threadsafe(office.came, holder)

        def on_end() -> None:
            with contextlib.suppress(RuntimeError):  # The loop is closed already.
                loop.call_soon_threadsafe(ended.set)

        def on_news() -> None:
            if (standby := follow.standby) is not None:
                self._instruct(standby)
            if (owner := lines.news.owners.get(self._place.shard)) is not None:
                self._on_owner(entry_of(self._place.shard, *owner))
            cluster_map.changed()

        def is_ready() -> bool:
            if (onlooker := follow.onlooker) is not None:
                return onlooker.is_there
            standby = follow.standby
            if standby is None or standby.lag_ms > LAG_MAX_MS:
                return False
            return (standby.lag_records or 0) <= CAUGHT_UP_RECORDS

        def want(take: Take, told: Taken) -> None:
            standby = follow.standby
            if standby is None:
                told(None, NoPeerError(self._place.shard, []))
            else:
                standby.want_snapshot(take, told)

        def renew(must: bool) -> Standby | None:
            return self._renew(follow, must)

        def ask_people(standby: Standby, error: ReplicatedLogError) -> Standby | None:
            vacant = entry_of(self._place.shard, standby.state.epoch, "")
            loop.call_soon_threadsafe(self._on_owner, vacant)
            return self._ask_people(follow, standby, error)

        follow = Follow(
            opened,
            renew,
            ask_people,
            self._set_aside,
            self._is_needed,
            self._look_on,
            tell_owner,
            on_claimed,
            on_end,
            self._fatal,
        )
        cluster_map = ClusterMap(
            None, settings, wall_clock_ms, lambda: lines.news.machines, self.book
        )
        # A call that is passed on has a second descriptor, and the budget has one for each client.
        clients_max = max(1, settings.connections_max // 2)
        front = StandbyFront(
            settings.model_copy(update={"connections_max": clients_max}),
            shard=self._place.shard,
            owner=partial(self._owner_url, self._own_url),
            has_replica=lambda: follow.onlooker is None,
            is_ready=is_ready,
            shard_map=cluster_map,
            metrics=lambda: self._metrics(follow),
            tokens=tokens,
            clock=wall_clock_ms,
            before=self.sharing(want),
        )
        on_news()
        lines.begin(office.stop, on_news)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, office.stop)
        refreshing = loop.create_task(_refresh(tokens))
        follow.start()
        await front.begin(listeners, tls)
        self.book.on_change(lambda shard: front.owner_changed())
        if opened is not None or self._parting.is_placed(self._placement):
            log.info("on standby", shard=self._place.shard, node=self._membership.node)
        try:
            await office.wait()
            if office.is_stopping:
                follow.end()
            await front.close()
            await ended.wait()
            self.holder = office.holder
            if self.holder is not None and office.is_stopping:
                # It claimed meanwhile, and there was no server yet that would have heard it.
                await asyncio.to_thread(self.leave, None)
        finally:
            refreshing.cancel()
            lines.end()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
        return self.holder

    def _open_tokens(self) -> TokenTable:
        settings, directory = self._settings, self._place.data_dir
        tokens = TokenTable(TokenFile(OsFiles(str(directory))), settings.token, time.monotonic)
        tokens.refresh(wall_clock_ms())
        if not settings.on_loopback and not len(tokens):
            raise AccessError(
                f"{settings.host} is not a loopback address: make a token (delayserver token "
                f"create NAME --scope admin --data-dir {directory}), or set one "
                "(DELAYSERVER_TOKEN, at least 16 characters), before others can reach the node"
            )
        return tokens

    def _own_urls(self, listeners: Sequence[socket.socket]) -> tuple[str, str]:
        """Where clients reach this very process, and the host of its links."""
        advertise = self._settings.advertise
        assert advertise is not None
        scheme, _, authority = advertise.partition("://")
        host, colon, port = authority.rpartition(":")
        if not colon or not port.isdigit():
            host = authority
        if self._place.count == 1:
            return advertise, host
        return f"{scheme}://{host}:{listeners[-1].getsockname()[1]}", host

    def _owner_url(self, own_url: str) -> str | None:
        owner = self.book.owner(self._place.shard)
        # An office that this node has held before it was started again is nobody's now.
        return None if owner is None or owner.url == own_url else owner.url

    def _on_owner(self, entry: Entry) -> None:
        if self.book.take(entry):
            self._tell(encode_line(entry))

    def _metrics(self, follow: Follow) -> str:
        shard, standby = self._place.shard, follow.standby
        has_replica = int(follow.onlooker is None)
        lag = None if standby is None else standby.lag_records
        lag_s = None if standby is None else standby.lag_ms / 1000
        differs = standby is not None and standby.clock_differs
        return (
            "# HELP delayserver_standby_lag_records Records of the shard's log that were not read\n"
            "# TYPE delayserver_standby_lag_records gauge\n"
            f'delayserver_standby_lag_records{{shard="{shard}"}} {"NaN" if lag is None else lag}\n'
            "# HELP delayserver_standby_lag_seconds How long ago all of the shard's log was filed\n"
            "# TYPE delayserver_standby_lag_seconds gauge\n"
            f'delayserver_standby_lag_seconds{{shard="{shard}"}} '
            f"{'NaN' if lag_s is None else lag_s}\n"
            "# HELP delayserver_unseen_nodes Other nodes that cannot be reached from this one\n"
            "# TYPE delayserver_unseen_nodes gauge\n"
            f'delayserver_unseen_nodes{{shard="{shard}"}} {self._unseen_nodes()}\n'
            "# HELP delayserver_standby_clock_differs Whether the owner's clock is another one\n"
            "# TYPE delayserver_standby_clock_differs gauge\n"
            f'delayserver_standby_clock_differs{{shard="{shard}"}} {int(differs)}\n'
            "# HELP delayserver_standby_has_replica Whether this node is to have the shard\n"
            "# TYPE delayserver_standby_has_replica gauge\n"
            f'delayserver_standby_has_replica{{shard="{shard}"}} {has_replica}\n'
        )

    def _unseen_nodes(self) -> int:
        return len(self.lines.news.unseen.get(self._membership.node, ()))

    # ── in office ──────────────────────────────────────────────────────────────────────────────

    @property
    def epoch(self) -> int:
        """In which this node holds the office."""
        assert self.holder is not None
        return self.holder.claimed.epoch

    def around(self, surroundings: Surroundings) -> Surroundings:
        """The surroundings of the server, once this node holds the office."""
        assert self.holder is not None
        owned = self._replica.owned_by(self.holder)
        return replace(
            surroundings,
            clock=owned.clock,
            identity=owned.identity,
            message_log=owned.message_log,
            settler=owned.settler,
            may_deliver=owned.may_deliver,
            transactions=owned.transactions,
        )

    def serving(self, message_log: WriteAheadLog, metrics: Metrics) -> None:
        """This process serves the shard from now on, with that log; `metrics` are its own."""
        holder = self.holder
        assert holder is not None and isinstance(message_log, FollowedLog)
        self._taken_ms = stopwatch_ms()
        self._on_owner(entry_of(self._place.shard, self.epoch, self._address))
        self._reports.how_far = lambda: HowFar(message_log.kept, holder.state.next_offset)
        self._reports.office, self._reports.stage = (self.epoch, self._address), "replica"
        metrics.gauge(
            "office_epoch", "Which owner of its shard this process is", lambda: self.epoch
        )
        metrics.gauge(
            "office_lease", "Whether deliveries may leave", lambda: int(holder.may_deliver())
        )
        metrics.gauge(
            "office_unread_records",
            "Records of the log that a new owner would read, beats among them",
            lambda: holder.state.next_offset - message_log.kept[0],
        )
        metrics.gauge(
            "unseen_nodes", "Other nodes that cannot be reached from this one", self._unseen_nodes
        )

    def successor(self, *, is_damaged: bool = False, is_slow: bool = False) -> str | None:
        """The node that is to have the shard now instead of this one, if any. `is_damaged`: here is
        something that another replica has sound; this one is made anew behind the office.
        `is_slow`: the disk here does not keep up."""
        self._is_damaged |= is_damaged
        news, own = self.lines.news, self._membership.node
        return choose(
            replace_drained(news, own) if self._is_damaged or is_slow else news,
            self._place.shard,
            self._membership.node,
            self.epoch,
            may_balance=stopwatch_ms() - self._taken_ms >= STEADY_MS,
        )

    def leave(self, successor: str | None) -> None:
        """Give the office away: nothing is to be delivered or settled any more. `successor`: the
        node that is to have it; None: any that is in step."""
        assert self.holder is not None
        self._beats.end()
        news, shard, own = self.lines.news, self._place.shard, self._membership.node
        if successor is None:
            drained = replace_drained(news, own)
            successor = choose(drained, shard, own, 0, may_balance=False)
        number = NOBODY if successor not in news.nodes else news.nodes.index(successor) + 1
        self.holder.leave(number)
        self.holder.log.close()
        self._reports.office = (0, "")
        entry = entry_of(shard, self.epoch, "")
        self.holder = None
        self._on_owner(entry)

    def close(self) -> None:
        """Let go of what is left."""
        self._reports.end()


def replace_drained(news: News, node: str) -> News:
    """The same, and the node is to own nothing."""
    return msgspec.structs.replace(news, drained=[*news.drained, node])


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(
            f"cannot listen for other nodes on {host}:{port}: {error.strerror}; choose another "
            "--link-port"
        ) from error
    listener.set_inheritable(False)
    return listener


async def _refresh(tokens: TokenTable) -> None:
    while True:
        await asyncio.sleep(TOKENS_S)
        with contextlib.suppress(OSError):
            tokens.refresh(wall_clock_ms())
