"""The world around a shard with replicas: each life of the server is a tenure, on any of the nodes.

A node follows, falls silent, is killed, loses power or its disk, and starts again. Whoever holds
the office serves, with the clients, subscribers and operators of the world around one server, until
it crashes, leaves, loses the office, or hangs: then another takes over, and the old one goes on as
a zombie for a time. Now and then the engine loses the end of the log, more than it may, and people
name the replica behind which it goes on. At last the engine is calm, all replicas are compared, and
one of them brings to an end what is left, as in the world around one server.

Cost: some 15 ms per life. Threads: none.
"""

import itertools
import random
from collections.abc import Callable
from http import HTTPStatus

from delayserver.delivery.webhook import WebhookResponse
from delayserver.records.tables import read_checkpoint, read_settled_place
from delayserver.shards.peers import PeerCall
from storage.errors import (
    FencedError,
    LogReplacedError,
    OffsetRangeError,
    OtherHistoryError,
    ShortageError,
    StorageError,
    UnreadableError,
)
from storage.replicated.envelope import Release
from storage.replicated.holder import Holder
from storage.replicated.meta import AdoptRecord
from storage.replicated.office import RecordDecision
from storage.replicated.settled import SettledLog
from storage.staging import DIRECTORY as IMPORTS
from tests.world.replicas.engine import Chance, ChancyLog
from tests.world.replicas.ledger import ReplicaLedger
from tests.world.replicas.node import IDENTITY, Cluster, Node, each_row
from tests.world.replicas.promises import check_log, check_replicas
from tests.world.server import SimulatedServer
from tests.world.storage.faults import Fault, FaultKind, Faults, FaultyFiles, Moment, SimulatedCrash
from tests.world.violation import Violation
from tests.world.world import Step, World

SET_BACK_MAX_MS = 400
"""Those whose clocks differ by a second do not take over: no node is set back for long here."""
START_MS = 20
"""A node needs so long to start again. So a clock that was set back catches up with the log."""
OK = WebhookResponse(200)
NO_MESSAGE = "0" * 32


class TakenOver(Exception):
    """Another node is in office now."""


class ReplicaWorld(World):
    """One seed: some nodes, many tenures, and what everybody did."""

    make_ledger = ReplicaLedger
    ledger: ReplicaLedger

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        luck = self._luck = random.Random(f"replicas {seed}")
        self.settings = self.settings.model_copy(update={"archive": False})
        self.ledger.archive = False
        self.clients.says_where = random.Random(f"to {seed}").random() < 0.3
        self._chance = Chance(luck, self.clock, self.counts)
        self.cluster = Cluster(
            self.settings,
            self.clock,
            self.ledger,
            self.counts,
            luck,
            luck.random() < 0.5,
            self._chance,
            ChancyLog("ds.log/0", self._chance),
            ChancyLog("ds.settled/0", self._chance),
        )
        # Of its own, so that what else happens in a world does not depend on it.
        self._loss_luck = random.Random(f"lost ends {seed}")
        self.nodes = [Node(self.cluster, number) for number in range(1, luck.choice((3, 4)))]
        self._owner: Node | None = None
        self._next: tuple[Node, Holder] | None = None
        """Who has taken over, and does not serve yet."""
        self._first: Node | None = None
        """Who alone has what the engine has lost, and serves before all others."""
        self._leave_luck = random.Random(f"left in order {seed}")
        """Most starts meet a fault before they have taken the leases over."""
        self._left_epoch = 0
        """Those of the owner that was the last one to be told to leave, and had kept its leases."""
        self._adopting: Node | None = None
        """Whom people name, if the log loses its end."""
        stage = self.clients._stage

        def staged_everywhere() -> str | None:
            import_id = stage()
            self._copy_staged()
            return import_id

        self.clients._stage = staged_everywhere  # type: ignore[method-assign]

    def _copy_staged(self) -> None:
        """Whoever has an import adopted has its files on all nodes before."""
        staged = self.cluster.staged
        fresh: dict[str, bytes] = {}
        for name in self.disk.list(IMPORTS):
            path = f"{IMPORTS}/{name}"
            if path not in staged:
                file = self.disk.open(path)
                fresh[path] = file.pread(file.size(), 0)
                file.close()
        staged.update(fresh)
        for node in self.nodes:
            node.put_staged(fresh)

    # ── a tenure ───────────────────────────────────────────────────────────────────────────────

    def live(self, steps: int) -> None:
        rng, luck = self.rng, self._luck
        self.counts["lives"] += 1
        weights = (step.weight * rng.choice((0.1, 1.0, 1.0, 3.0)) for step in self._steps)
        self._weights = tuple(itertools.accumulate(weights))
        ending = "power loss" if rng.random() < 0.5 else "kill"
        is_up = False
        try:
            self._start()
            is_up = True
            if rng.random() < 0.4:
                self.operators.redrive_all()
            for _ in range(steps):
                self._step()
            self._maybe_rest()
            dice = luck.random()
            if (self.cluster.has_own_log and dice > 0.8) or (dice > 0.8 and self._is_in_step()):
                ending = "power loss of all"
            elif dice < (0.35 if self._running.engine.leasing.leases.count() else 0.15):
                self._leave()
            elif dice < 0.5:
                self._hang()
        except TakenOver:
            ending = "taken over"
        except SimulatedCrash:
            self.counts["crashes inside a call"] += 1
        except FencedError:
            self.counts["lost the office"] += 1
        except ShortageError as error:
            if is_up:
                raise Violation(f"what was used up for a time ended the server: {error}") from error
            self.counts["started on a full disk"] += 1
        except ExceptionGroup as errors:
            self._judge_timers(errors)
        except StorageError:
            if not self.faults.struck:
                raise
            self.counts["ended by a failed disk"] += 1
        self.counts[ending] += 1
        self._end_tenure(ending)

    def _judge_timers(self, errors: ExceptionGroup[Exception]) -> None:
        (first, *_) = errors.exceptions
        if errors.subgroup((Violation, ShortageError)) is not None:
            raise Violation(f"in a timer: {first}") from errors
        if errors.subgroup(FencedError) is None and (
            not self.faults.struck or errors.split(StorageError)[1] is not None
        ):
            raise errors
        self.counts["ended by a failed disk"] += 1

    def _end_tenure(self, ending: str) -> None:
        node, self._owner = self._owner, None
        self.server = None
        if node is None:
            return
        self._restore()
        node.disk.on_sync = lambda: None
        if ending == "taken over" and node.server is not None:
            node.outlive()
        elif ending == "power loss of all":
            self._lose_all_power(node)
        else:
            node.end(power_loss=ending == "power loss")

    def _lose_all_power(self, owner: Node) -> None:
        """All nodes, and all servers of the engine, which have not written their last records.

        Either no more is lost than what no checkpoint has; then the owner comes back before others
        may claim. Or more is lost, and people name the replica behind which the log goes on."""
        for node in self.nodes:
            node.end(power_loss=True)
        self._next = None
        log = self.cluster.log
        adopting = self._adopting or owner
        if self._adopting is not None or self._loss_luck.random() < 0.5:
            self._adopting = None
            if self._lose_end(adopting) or not self.cluster.has_own_log:
                return
        # One that is not copied yet, since the end was lost before, counts offsets of another log.
        kept = max(node.place().next_offset for node in self.nodes if node.has_adopted)
        end = self._luck.randrange(kept, log.length + 1)
        self.counts["records that the engine lost"] += log.lose_tail(end)
        for offset in [offset for offset in self.cluster.verdicts if offset >= end]:
            del self.cluster.verdicts[offset]
        self.ledger.lost_power()
        self._first = owner

    def _is_in_step(self) -> bool:
        """Whether there is a replica on standby that has filed all that was answered: without own
        logs nothing else may be all that is left."""
        if self.cluster.has_own_log or self._loss_luck.random() < 0.5:
            return False
        node = self._loss_luck.choice(self.nodes)
        if node is self._owner or node.holder is not None:
            return False
        end = self.cluster.log.length, self.cluster.settled.length
        for _ in range(200):
            node.faults.faults.clear()
            self._step_node(node)
            self._see_who_is_in_office()
            standby = node.standby
            if standby is None or not standby.is_known or standby.state.next_offset < end[0]:
                continue
            if standby._settler.offset >= end[1]:
                standby.checkpoint()
                self._adopting = node
                return True
        return False

    def _lose_end(self, node: Node) -> bool:
        """The engine loses what replicas have filed, and people name this one; all are down.
        Whether that can be: the end of an import that is half filed is nowhere else."""
        log, settled, place = self.cluster.log, self.cluster.settled, node.place()
        if place.next_offset == 0 or read_checkpoint(node.catalog) != place.next_seq - 1:
            return False
        end = self._loss_luck.randrange(place.next_offset)
        self.counts["records that the engine lost"] += log.lose_tail(end)
        if read_settled_place(node.catalog) == settled.length:
            # What its files have is settled, whatever the log says.
            self.ledger.recorded(self._settled_rows())
            settled.lose_tail(self._loss_luck.randrange(settled.length + 1))
        for offset in [offset for offset in self.cluster.verdicts if offset >= end]:
            del self.cluster.verdicts[offset]
        epoch = max(node.place().epoch for node in self.nodes) + 1
        decision = AdoptRecord(0, f"node-{node.number}", end, epoch)
        self.cluster.adoptions.append(decision)
        self.cluster.adopted_seq = place.next_seq
        self._adopt(node, decision)
        self.counts["ends of the log that were lost"] += 1
        self.ledger.lost_power()
        self._first = node
        return True

    def _adopt(self, node: Node, decision: AdoptRecord) -> None:
        """The node finds that the log has lost its end, and goes on as people have decided."""
        cluster = self.cluster
        node.faults = Faults()
        node.start()
        assert node.standby is not None
        for _ in range(200):
            try:
                node.standby.step(0)
            except (OffsetRangeError, LogReplacedError):
                break
        else:
            raise Violation(f"{node} does not find that the log has lost its end")
        node.standby.checkpoint()
        for _ in range(200):
            if cluster.log.length > decision.end:
                break
            node.standby.adopt(decision, cluster.log.another(), cluster.settled.another())
        node.end(power_loss=self._loss_luck.random() < 0.5)

    def _start(self) -> None:
        self.server = None
        node, holder = self._take_office()
        self.ledger.new_life()
        self.ledger.has_left = self._has_left(holder)
        self.ledger.recorded(self._settled_rows())
        self._owner = node
        is_calm = self._chance.is_calm
        self.disk, self.catalog = node.disk, node.catalog
        is_spared = self.ledger.has_left and self._leave_luck.random() < 0.7
        self.faults = node.faults = Faults() if is_calm or is_spared else self._plan()
        self.catalog.faults = self.faults
        slow = self._slow_syncs()
        meanwhile = self._meanwhile(node, holder)

        def on_sync() -> None:
            if not is_calm:
                slow()
                if self.server is None:
                    meanwhile()

        self.disk.on_sync = on_sync
        super()._start()
        self._first = None

    def _open_server(self, files: FaultyFiles) -> SimulatedServer:
        node = self._owner
        assert node is not None and node.holder is not None
        holder = node.holder
        server = node.serve(holder, files, self.rng, self._quick())
        if self._chance.is_calm:
            tick = server.tick

            def tick_and_beat() -> int:
                holder.beat()
                return tick()

            server.tick = tick_and_beat  # type: ignore[method-assign]
        return server

    def _has_left(self, holder: Holder) -> bool:
        """Whether the last record that counts before the claim is the release of the owner that was
        told to leave. An owner that fails while it leaves has not left."""
        cluster, claim = self.cluster, holder.claimed.claim_offset
        counting = [at for at in range(claim) if cluster.verdicts.get(at, RecordDecision.VOID)]
        last = cluster.records[counting[-1]] if counting else None
        return isinstance(last, Release) and last.epoch == self._left_epoch

    def _settled_rows(self) -> list[bytes]:
        """All that stands in the log of what is settled: the new owner knows it."""
        log = SettledLog(self.cluster.settled.another(), IDENTITY.stamp)
        rows: list[bytes] = []
        offset, end = 0, self.cluster.settled.length
        while offset < end:
            for found in log.read(offset, 0):
                rows += each_row([found.rows.tobytes()])
                offset = found.offset + 1
        return rows

    def _leave(self) -> None:
        """The owner goes in order, and may say who shall follow."""
        assert self._owner is not None and self._owner.holder is not None
        self.faults.faults.clear()
        self._running.stop()
        holder = self._owner.holder
        self._left_epoch = holder.claimed.epoch
        holder.leave(self._luck.choice((0, *(node.number for node in self.nodes))))
        self.counts["left"] += 1

    def _hang(self) -> None:
        """The owner says nothing any more, and goes on doing what it does, until others notice."""
        self.counts["hung"] += 1
        for _ in range(600):
            self._let_hang()
            self._running.tick()
            if self._running.has_callbacks:
                self._running.turn()
            self._step_others()
            self._see_who_is_in_office()

    def _let_hang(self) -> None:
        self.clock.move(self._luck.choice((10, 100, 300)))

    # ── who is in office ───────────────────────────────────────────────────────────────────────

    def _take_office(self) -> tuple[Node, Holder]:
        """Let time pass until somebody holds the office, and has filed all."""
        for number in range(4000):
            if self._next is None:
                self._step_node(self._first or self._luck.choice(self.nodes))
                self.clock.move(self._luck.choice((20, 100, 300 if number < 100 else 1000)))
                continue
            node, holder = mine = self._next
            node.disk.on_sync = self._meanwhile(node, holder)
            try:
                node.finish()
            except ShortageError:
                node.faults.faults.clear()
                continue
            except SimulatedCrash:
                node.end(power_loss=self._luck.random() < 0.5)
                self._next = None if self._next == mine else self._next
                continue
            if self._next == mine:
                self._next = None
                self.counts["took over"] += 1
                return mine
            node.end(power_loss=False)  # Another was in office before this one could serve.
        raise Violation("nobody takes over")

    def _meanwhile(self, node: Node, holder: Holder) -> Callable[[], None]:
        """While a new owner prepares itself, time passes, it beats, and others look."""
        troubles = self._troubles()

        def meanwhile() -> None:
            if self._chance.is_calm or self._luck.random() < 0.5:
                return
            self.clock.move(self._luck.choice((1, 200, 700)))
            try:
                holder.beat()
            except FencedError:
                return  # It will find out by itself.
            for other in self.nodes:
                if other is not node and self._first is None:
                    self._step_node(other)
            if (
                self._next is not None
                and self._next[0] is not node
                and troubles == self._troubles()
            ):
                raise Violation(f"{self._next[0]} took over while {node} recovered")

        return meanwhile

    def _troubles(self) -> int:
        return self.counts["slow appends"] + self.counts["appends without an answer"]

    def _took_over(self, node: Node, holder: Holder) -> None:
        node.holder = holder
        node.clock.be_true()
        for other in self.nodes:
            if other is not node and other.holder is not None and other.holder.may_deliver():
                raise Violation(f"{other} holds its lease, and {node} has taken over (I14)")
        if self._next is not None:
            self._next[0].end(power_loss=False)
        self._next = node, holder

    def _see_who_is_in_office(self) -> None:
        if self._next is not None:
            raise TakenOver

    # ── steps ──────────────────────────────────────────────────────────────────────────────────

    def _all_steps(self) -> tuple[Step, ...]:
        return (
            *super()._all_steps(),
            Step(self._beat, 3),
            Step(self._step_others, 4),
            Step(self._strike, 0.3),
        )

    def _step(self) -> None:
        super()._step()
        self._see_who_is_in_office()

    def _beat(self) -> None:
        assert self._owner is not None and self._owner.holder is not None
        self._owner.holder.beat()

    def _let_pass(self) -> None:
        before_ms = self.clock.now_ms
        super()._let_pass()
        if self.clock.now_ms < before_ms - SET_BACK_MAX_MS:
            self.clock.set(before_ms - SET_BACK_MAX_MS - self.clock.now_ms)
        if self._luck.random() < 0.9:
            self._beat()

    def _look(self) -> None:
        assert self._owner is not None and self._owner.holder is not None
        if self._owner.holder.may_deliver():
            super()._look()
            return
        self.counts["looks without a lease"] += 1
        self._running.tick()
        self.ledger.check_leases()
        self.subscribers.check_waiting()
        self._held_up = {}

    def _step_others(self) -> None:
        node = self._luck.choice(self.nodes)
        if node is not self._owner:
            self._step_node(node)

    def _step_node(self, node: Node) -> None:
        """What a node that does not serve does next."""
        if node.is_zombie:
            self._step_zombie(node)
            return
        if node.holder is not None:
            return
        holder: Holder | None = None
        try:
            if node.standby is None:
                node.faults = self._node_faults()
                node.start()
            else:
                holder = node.standby.step(0)
        except ShortageError:
            self.counts["out of room at a standby"] += 1
            if node.standby is None:
                node.end(power_loss=False)
            elif self._luck.random() < 0.5:
                node.faults.faults.clear()
        except (SimulatedCrash, FencedError):
            self.counts["standbys that ended"] += 1
            node.end(power_loss=self._luck.random() < 0.5)
        except OtherHistoryError:
            node.end(power_loss=False)
            self._copy(node)
        else:
            if holder is not None:
                self._took_over(node, holder)
            elif node.standby is not None and node.standby.clock_differs:
                node.end(power_loss=False)  # Its clock is set, and it starts anew.

    def _copy(self, node: Node) -> None:
        """The replica is set aside, and made anew from another one that has gone on."""
        for source in self.nodes:
            if source is node or not source.has_adopted:
                continue
            try:
                node.copy(source)
            except UnreadableError:
                node.lose_disk()
                continue  # It has a bad sector. It is tried again when this one has started.
            self.counts["replicas that were set aside"] += 1
            node.faults = Faults()
            node.start()
            return

    def _node_faults(self) -> Faults:
        luck = self._luck
        if self._chance.is_calm or luck.random() < 0.5:
            return Faults()
        kind = luck.choice((FaultKind.CRASH, FaultKind.NO_SPACE, FaultKind.NO_DESCRIPTOR))
        at, moment = luck.randrange(1, 200), luck.choice(tuple(Moment))
        return Faults(Fault(at, kind, moment, for_good=kind is not FaultKind.CRASH))

    def _step_zombie(self, node: Node) -> None:
        server, luck = node.server, self._luck
        assert server is not None and node.holder is not None
        self.counts["turns of zombies"] += 1
        dice = luck.random()
        self.ledger.is_late = True
        self._must_not_know(node)
        try:
            if dice < 0.1:
                node.holder.beat()
            elif dice < 0.3:
                server.tick()
            elif dice < 0.5 and server.sending:
                self._answer_late(node)
            elif dice < 0.7:
                server.turn()
            else:
                server.run(luck.choice(server.workers), 3)
        except (SimulatedCrash, StorageError):
            self.counts["zombies that ended"] += 1
            node.end(power_loss=luck.random() < 0.5)
        except ExceptionGroup as errors:
            if errors.split(StorageError)[1] is not None:
                raise
            node.end(power_loss=False)
        finally:
            self.ledger.is_late = False

    def _must_not_know(self, node: Node) -> None:
        """Clients ask a zombie: for a message that the owner may have accepted, and about leases
        that it may have ended."""
        assert node.server is not None
        calls = [PeerCall("DELETE", f"/v1/messages/{NO_MESSAGE}")]
        calls += [
            PeerCall("POST", f"/v1/subscriptions/{one.name}/{call}", body=b'{"leases": ["1-1-1"]}')
            for one in node.server.engine.registry
            if one.type == "pull"
            for call in ("ack", "nack")
        ]
        call = self._luck.choice(calls)
        answer = node.answer(call)
        if answer is not None and answer.status != HTTPStatus.SERVICE_UNAVAILABLE:
            raise Violation(f"{node} answers {call} {answer.status}, and another owns the shard")

    def _answer_late(self, node: Node) -> None:
        """A receiver answers what the zombie has sent when it was the owner."""
        server = node.server
        assert server is not None
        deliveries = self._luck.choice(server.sending)
        for delivery in deliveries:
            self.ledger.seen_late(delivery)
        self.counts["answered late"] += 1
        server.answer(deliveries, OK)

    def _strike(self) -> None:
        """Something happens to a node that does not serve."""
        node, luck = self._luck.choice(self.nodes), self._luck
        if node is self._owner or (node.holder is not None and not node.is_zombie):
            return
        node.end(power_loss=luck.random() < 0.5)
        self.counts["standbys that were struck"] += 1
        is_elsewhere = any(one.has_adopted for one in self.nodes if one is not node)
        if luck.random() < 0.15 and is_elsewhere:
            node.lose_disk()
            self.counts["disks lost"] += 1

    # ── the end ────────────────────────────────────────────────────────────────────────────────

    def finish(self) -> None:
        self._chance.is_calm = True
        if self._first is not None:
            self._start()  # What the engine has lost comes back with it.
            self._end_tenure("kill")
        self._agree()
        super().finish()

    def _agree(self) -> None:
        """All replicas read to the end, and have the same."""
        end = self.cluster.log.length
        for node in self.nodes:
            if node.holder is None or node.is_zombie:
                node.end(power_loss=False)
        while behind := [node for node in self.nodes if not _has_read(node, end)]:
            if behind[0].standby is None:
                self.clock.move(START_MS)
            self._step_node(behind[0])
        next_seqs = set[int]()
        for node in self.nodes:
            assert node.standby is not None
            node.faults.faults.clear()
            node.standby.checkpoint()
            next_seqs.add(node.standby.state.next_seq)
        if len(next_seqs) == 1:
            check_replicas(self.nodes)
            self.counts["replicas compared"] += 1
        check_log(self.cluster, self.ledger)

    def abandon(self) -> None:
        """Nobody goes on with what was under way, but zombies."""
        self.server = None

    def __exit__(self, *exception: object) -> None:
        for node in self.nodes:
            if node.server is not None:
                node.server.event_loop.abandon()


def _has_read(node: Node, end: int) -> bool:
    """Whether a node knows all records before `end`. An owner does, as it has claimed behind them.
    A node that has ended does not: its clock was set, its replica is copied, or another node has
    taken over from it."""
    if node.holder is not None:
        return True
    standby = node.standby
    return standby is not None and standby.is_known and standby.state.next_offset >= end


LIVES = 10
STEPS = 100


def run_replica_world(seed: int, *, lives: int = LIVES, steps: int = STEPS) -> ReplicaWorld:
    """One world from its first to its last tenure. Raises Violation."""
    with ReplicaWorld(seed) as world:
        for _ in range(lives):
            world.live(steps)
        world.finish()
    return world
