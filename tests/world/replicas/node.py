"""A node of the simulated cluster: a disk, a catalog, clocks, and one process or none.

    down ── start ──▶ standby ── holds the office ──▶ server ── another takes over ──▶ zombie
     ▲                   │                              │                               │
     └───────────────────┴────────── killed, power lost, fenced, disk lost ─────────────┘

Cost: that of the parts. Threads: none.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from delayserver.api.hot.asgi import Asgi, Receive, Scope, Send
from delayserver.api.intake import Intake
from delayserver.api.leaving import Leaving
from delayserver.config import Settings
from delayserver.delivery.settler import DISPATCH_ROW
from delayserver.recovery.replica import Replica, ReplicaPlace
from delayserver.recovery.snapshots import COPIED
from delayserver.recovery.standby import Standby
from delayserver.recovery.store import Surroundings
from delayserver.shards.local import ask_app
from delayserver.shards.member import Member
from delayserver.shards.peers import PeerAnswer, PeerCall
from delayserver.shards.place import ShardPlace
from storage.catalog import Table
from storage.directory import FORMAT_FILE, Identity
from storage.files import Files
from storage.notes import framed
from storage.replicated.envelope import Adopt, LogRecord
from storage.replicated.holder import Holder
from storage.replicated.log import OFFICE_KEY, office_of
from storage.replicated.meta import AdoptRecord
from storage.replicated.office import OfficeState, RecordDecision
from storage.replicated.reader import RecordReading
from storage.staging import DIRECTORY as IMPORTS
from tests.world.replicas.engine import Chance, ChancyLog
from tests.world.replicas.ledger import (
    ReplicaLedger,
    StandbyObserver,
    Turncoat,
    ZombieObserver,
)
from tests.world.server import (
    SimulatedClock,
    SimulatedServer,
    simulated_surroundings,
)
from tests.world.storage.catalog import MemoryCatalog
from tests.world.storage.faults import Faults, FaultyFiles
from tests.world.storage.files import SimulatedFiles
from tests.world.violation import Violation

IDENTITY = Identity(stamp=77, shard=0, id_secret=bytes(range(16)))
SKEW_MS = 300
RATE_MAX = 1.15
PLACES_BACK = (0, 0, 0, 3)


class NodeClock:
    """The clocks of a node. Those of whoever owns the shard are the true ones, those of others run
    at rates within 15 % of them, and differ a little."""

    def __init__(self, true: SimulatedClock, rng: random.Random) -> None:
        self._true = true
        self._rng = rng
        self._shown_ms, self._since_ms = rng.randrange(1 << 20), true.stopwatch_ms()
        self._rate = 1.0
        self._skew_ms = 0
        self.differ()

    def wall_ms(self) -> int:
        """Milliseconds since the epoch."""
        return self._true.now_ms + self._skew_ms

    def stopwatch_ms(self) -> int:
        """Milliseconds that passed, as it counts them."""
        return self._shown_ms + int((self._true.stopwatch_ms() - self._since_ms) * self._rate)

    def be_true(self) -> None:
        """The others differ from this one from now on."""
        self._set_rate(1.0)
        self._skew_ms = 0

    def differ(self) -> None:
        """The other way round."""
        rng = self._rng
        self._set_rate(rng.choice((1.0, RATE_MAX, 1 / RATE_MAX, rng.uniform(0.9, 1.1))))
        self._skew_ms = rng.randrange(-SKEW_MS, SKEW_MS)

    def _set_rate(self, rate: float) -> None:
        self._shown_ms, self._since_ms = self.stopwatch_ms(), self._true.stopwatch_ms()
        self._rate = rate


@dataclass
class Cluster:
    """What the nodes of a shard share."""

    settings: Settings
    clock: SimulatedClock
    ledger: ReplicaLedger
    counts: Counter[str]
    rng: random.Random
    has_own_log: bool
    chance: Chance
    log: ChancyLog
    settled: ChancyLog
    verdicts: dict[int, RecordDecision] = field(default_factory=dict)
    """What was made of each record by whoever read it first."""
    records: dict[int, LogRecord] = field(default_factory=dict)
    """The record at each offset, as it was read last."""
    adoptions: list[AdoptRecord] = field(default_factory=list)
    """What people have decided where the log had lost its end."""
    adopted_seq: int = 1
    """What stands before it need not be in the log any more: it was lost there once, and a replica
    had it."""
    staged: dict[str, bytes] = field(default_factory=dict)
    """What imports were staged on all nodes, by path."""


class Node:
    """A machine that has a replica."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        self.cluster = cluster
        self.number = number
        self.clock = NodeClock(cluster.clock, cluster.rng)
        self.faults = Faults()
        self.standby: Standby | None = None
        self.server: SimulatedServer | None = None
        self.holder: Holder | None = None
        """Not None: the node is the owner, or does not know yet that it is not any more."""
        self.app: Asgi
        """The API of its server, as clients ask it."""
        self.observer = Turncoat(StandbyObserver(cluster.ledger))
        self.lose_disk()

    def __repr__(self) -> str:
        return f"node {self.number}"

    @property
    def is_zombie(self) -> bool:
        """Whether another has taken over from its server."""
        return self.server is not None and isinstance(self.observer.target, ZombieObserver)

    # ── its disk ───────────────────────────────────────────────────────────────────────────────

    def place(self) -> OfficeState:
        """Where the catalog's checkpoint stands in the log. No process runs."""
        return office_of(self.catalog.get(Table.META, OFFICE_KEY))

    def lose_disk(self) -> None:
        """A new disk, with nothing on it but what was staged. No process runs."""
        assert self.standby is None and self.server is None
        self.disk, self.catalog = SimulatedFiles(rng=self.cluster.rng), MemoryCatalog()
        self.put_staged(self.cluster.staged)

    def put_staged(self, staged: dict[str, bytes]) -> None:
        """Have these files, and synced: what a node is to do before others adopt an import."""
        self.disk.make_directory(IMPORTS)
        for path, data in staged.items():
            file = self.disk.open(path, create=True)
            file.truncate(0)
            file.pwrite([data], 0)
            file.fdatasync()
            file.close()
        self.disk.sync_directory(IMPORTS)
        self.disk.sync_directory("")

    @property
    def has_adopted(self) -> bool:
        """Whether its checkpoint stands behind all that people have decided."""
        adoptions = self.cluster.adoptions
        return not adoptions or self.place().epoch >= adoptions[-1].epoch

    def copy(self, source: "Node") -> None:
        """A replica like that of another node, as its files are now; what was here is set aside. No
        process runs here."""
        self.lose_disk()
        for directory in COPIED:
            self.disk.make_directory(directory)
            paths = [f"{directory}/{name}" for name in source.disk.list(directory)]
            for path in paths:
                self._copy_file(source, path)
            self.disk.sync_directory(directory)
        self._copy_file(source, FORMAT_FILE)
        self.disk.sync_directory("")
        self.catalog = source.catalog.duplicate()

    def _copy_file(self, source: "Node", path: str) -> None:
        read, written = source.disk.open(path), self.disk.open(path, create=True)
        written.pwrite([read.pread(read.size(), 0)], 0)
        written.fdatasync()
        written.close()
        read.close()

    def end(self, *, power_loss: bool) -> None:
        """The process is gone."""
        if self.server is not None:
            self.server.event_loop.abandon()
        self.standby = self.server = self.holder = None
        self.disk.on_sync = lambda: None
        self.disk.mend_reads()  # A bad sector is one for the rest of a life.
        self.disk = self.disk.crash() if power_loss else self.disk.kill()
        self.catalog = self.catalog.crash()

    # ── a standby ──────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Begin to follow. Raises StorageError, SimulatedCrash."""
        self.clock.differ()
        self.observer = Turncoat(StandbyObserver(self.cluster.ledger))
        self.catalog.faults = self.faults
        cluster = self.cluster
        base = simulated_surroundings(self.observer, cluster.clock, cluster.rng)
        replica = Replica(self._place(), self._around(base), cluster.settings)
        self.standby = replica.stand_by(FaultyFiles(self.disk, self.faults), lambda: self.catalog)
        # As one that is apart, by turns.
        self.standby.set_rank(self.number - 1 + cluster.rng.choice(PLACES_BACK))
        self._watch(self.standby)

    def _watch(self, standby: Standby) -> None:
        read, verdicts = standby._reader.read, self.cluster.verdicts

        def noted(wait_s: float) -> list[RecordReading]:
            first = standby.state.next_offset
            found = read(wait_s)
            for offset, one in enumerate(found, first):
                self.cluster.records[offset] = one.record
                known = verdicts.setdefault(offset, one.verdict)
                if known is not one.verdict:
                    raise Violation(f"{one.verdict!r} at {offset}, not {known!r} as before (I15)")
                if isinstance(one.record, Adopt) and not one.is_other_history:
                    self.cluster.counts["went on with what they had"] += 1
            return found

        def claimed() -> Holder | None:
            before = standby.state, self.cluster.log.length
            holder = claim()
            if holder is not None and standby._waiting:
                raise Violation(f"{self} owns the shard, and has not filed what it has read")
            if self.cluster.log.length > before[1] != before[0].next_offset:
                raise Violation(f"{self} claims, has read up to {before} (R3)")
            return holder

        claim = standby._claim
        standby._claim = claimed  # type: ignore[method-assign]
        standby._reader.read = noted  # type: ignore[method-assign]

    def _around(self, base: Surroundings) -> Surroundings:
        return replace(base, clock=self.clock.wall_ms, stopwatch=self.clock.stopwatch_ms)

    def _place(self) -> ReplicaPlace:
        cluster = self.cluster
        return ReplicaPlace(
            self.number,
            self.number - 1,
            IDENTITY,
            cluster.has_own_log,
            f"node-{self.number}",
            cluster.log.another,
            cluster.settled.another,
            adoptions=lambda: cluster.adoptions,
        )

    def finish(self) -> None:
        """It holds the office: file what is left. Raises StorageError, SimulatedCrash."""
        assert self.standby is not None
        self.standby.finish()
        self.standby = None
        self.catalog = self.catalog.crash()

    # ── an owner ───────────────────────────────────────────────────────────────────────────────

    def serve(
        self, holder: Holder, files: Files, rng: random.Random, quick: Callable[[], bool]
    ) -> SimulatedServer:
        """Be the owner. Raises StorageError, SimulatedCrash."""
        cluster = self.cluster
        self.observer = Turncoat(cluster.ledger)
        server = SimulatedServer(
            cluster.settings,
            files,
            self.catalog,
            cluster.clock,
            rng,
            self.observer,
            quick=quick,
            around=lambda base: Replica(
                self._place(), self._around(base), cluster.settings
            ).owned_by(holder),
        )
        self.server = server
        calls = server.calls
        intake = Intake(cluster.settings, calls.subjects, calls.random)
        member = Member(ShardPlace.alone(Path("simulated")), calls, intake, _not_asked)
        self.app = Leaving(member.hot.exit, member.front)
        self._observe(server)
        return server

    def answer(self, call: PeerCall) -> PeerAnswer | None:
        """The answer of its server to a client, at once; None: it keeps the client waiting."""
        assert self.server is not None
        with self.server.event_loop.running():
            asking = ask_app(self.app, call)
            try:
                asking.send(None)
            except StopIteration as done:
                answer: PeerAnswer = done.value
                return answer
            asking.close()
            return None

    def _observe(self, server: SimulatedServer) -> None:
        observer = self.observer
        append, write, sync = server.message_log.append, server.settler.write, server.settler.sync
        written: list[bytes] = []

        def appended(rows: bytes, payload: bytes, **named: Any) -> None:
            append(rows, payload, **named)
            observer.committed(rows, payload)

        def wrote(rows_by_hour: dict[int, list[bytes]], now_ms: int) -> None:
            before = dict(rows_by_hour)
            try:
                write(rows_by_hour, now_ms)
            finally:
                for hour in before.keys() - rows_by_hour.keys():
                    written.extend(each_row(before[hour]))

        def synced() -> None:
            sync()
            observer.recorded(list(written))
            written.clear()

        server.message_log.append = appended  # type: ignore[method-assign]
        server.settler.write = wrote  # type: ignore[method-assign]
        server.settler.sync = synced  # type: ignore[method-assign]

    def outlive(self) -> None:
        """Another has taken over, and this process does not know."""
        assert self.server is not None
        self.server.hang_up()
        self.observer.target = ZombieObserver(self.cluster.ledger, self.number)


async def _not_asked(scope: Scope, receive: Receive, send: Send) -> None:
    """FastAPI answers through the same exit, and takes a second to make."""
    raise AssertionError(scope["path"])


def each_row(rows: list[bytes]) -> list[bytes]:
    """One by one (DISPATCH_ROW), without the notes among them."""
    data, size = bytes(framed(rows)[0]), DISPATCH_ROW.size
    return [data[start : start + size] for start in range(0, len(data), size)]
