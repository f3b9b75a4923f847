"""A cluster of three nodes on three brokers, on a stage whose network can be cut.

"All is well" means: every process of every node runs, every shard has an owner and answers a
publish, and every partition is on all of its brokers. A strike alone excuses nothing. It excuses a
repetition at the shards whose owner it has changed or cut off from the clients, and only for
deliveries that were on their way then: between the strike and the claim of the next owner. An owner
that has left in order excuses nothing.

An owner that is lost without a strike is a failure. So is a cluster that is not well within WELL_S.
`tests.chaos.offices` finds out who owned what when, `tests.chaos.times` measures how long a strike
kept the clients waiting.

Cost: three JVMs and nine processes of Python: on two cores most of the times are theirs. Threads:
the event loop, and one for each log.
"""

import asyncio
import itertools
import os
import random
import signal
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from enum import StrEnum
from pathlib import Path
from shutil import copyfile
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from delayserver.cli.demo.ledger import Outage
from delayserver.cli.demo.process import ServerFailed, free_port
from delayserver.clocks import wall_clock_ms
from delayserver.cluster.watch import ReplicaNote
from storage.errors import EngineError
from storage.replicated.kafka import KafkaEngine
from storage.replicated.kafka_settings import ClientSettings, ClusterUrl
from storage.replicated.meta import MetaLog, make_identity
from tests.chaos.nodes import PORT, ClusterNode, full_disk
from tests.chaos.offices import OfficeWatch
from tests.chaos.stage import CLIENTS, both_ways, make_stage
from tests.chaos.strikes import Strike
from tests.chaos.times import Struck, measure, table_of
from tests.cluster.brokers import Brokers
from tests.harness.ledger import shard_of_order
from tests.harness.notes import Notes
from tests.harness.strikes import RoundPlan
from tests.harness.topology import Topology
from tests.harness.traffic import Doors
from tests.waiting import Looks

if TYPE_CHECKING:
    from rich.table import Table

Durability = Literal["os", "fsync", "fsync-all"]
NODES: Final = ("n1", "n2", "n3")
BROKERS: Final = (1, 2, 3)
ASK_S: Final = 3.0
"""Clients that know several nodes ask another one then."""
CALM_S: Final = 1.5
"""Between two rounds: the excuses of one are over when the next begins."""
WELL_S: Final = 90.0
FIRST_S: Final = 120.0
LOOK_S: Final = 0.1
APART_S: Final = 30.0
"""Within which a node that is cut off from the others gives its shards away."""
HEARD_MS: Final = 2000
"""An owner of which nothing was read for so long may be none any more."""
THAW_MS: Final = 3000
"""A process that was frozen may send an old delivery for so long."""
FAR_CLOCK_S: Final = 4.0
"""A standby with a wrong clock has so long to show that it does not claim."""
DISK_BYTES: Final = 512 << 20
DISK_LEFT_BYTES: Final = 64 << 10


class Cluster(Topology):
    """The nodes, the brokers and the network of a run."""

    def __init__(self, notes: Notes, seed: int, *, shards: int, durability: Durability) -> None:
        """`durability`: when a message is answered."""
        broker_names = [f"b{number}" for number in BROKERS]
        self.stage = make_stage(NODES, broker_names)
        self.host = self.stage.host
        self._secrets = random.Random(f"{seed}, secrets")
        token = self._secrets.randbytes(16).hex()
        self._brokers = Brokers(notes.directory / "brokers", len(BROKERS))
        if self.stage.can_cut:
            self._brokers.hosts = tuple(map(self.stage.host_of, broker_names))
            self._brokers.within = " ".join(self.stage.within("b#"))
        self._token = token
        self._ports = {name: PORT if self.stage.can_cut else free_port() for name in NODES}
        urls = [f"http://{self.stage.host_of(name)}:{port}" for name, port in self._ports.items()]
        super().__init__(notes, Doors(urls, random.Random(seed + 2), token=token, ask_s=ASK_S))
        self._nodes: dict[str, ClusterNode] = {}
        self._shards = range(shards)
        self._durability = durability
        self._struck: list[Struck] = []
        self._watches: list[OfficeWatch] = []
        self._frozen: list[int] = []
        """The brokers that are stopped, by pid."""
        self._struck_ms = 0
        """When the round was struck."""
        self._measured_ms = 0
        """When the strike fell that is measured: the second one of some kinds."""
        self._calm_epochs: list[int] = []
        """The epochs of the shards when all was well last."""
        self._epochs: list[int] = []
        """… when the round began."""
        self._round = -1
        self._since = 0, 0
        """How many messages there were at the last two strikes; all older ones are delivered."""
        self._shard = 0
        """The shard whose owner and whose leader are struck in this round."""

    # ── the parts ──────────────────────────────────────────────────────────────────────────────

    @asynccontextmanager
    async def standing(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            running = self._brokers.running()
            await asyncio.to_thread(running.__enter__)
            stack.push_async_callback(asyncio.to_thread, running.__exit__, None, None, None)
            stack.callback(self._keep_logs)
            stack.callback(self.stage.release_disks)
            url = ClusterUrl(self._brokers.addresses, "chaos")
            self._engine = KafkaEngine(ClientSettings(url, {}))
            await asyncio.to_thread(self._create, url)
            stack.push_async_callback(asyncio.to_thread, self._end_watches)
            data = self.notes.directory / "nodes"
            data.mkdir()
            for name, port in self._ports.items():
                node = self._nodes[name] = ClusterNode(
                    *(name, data, self.stage),
                    cluster=str(url),
                    shards=len(self._shards),
                    token=self._token,
                    port=port,
                )
                stack.push_async_callback(asyncio.to_thread, node.kill)
            if self.stage.can_cut:
                self.stage.small_disk(self._nodes[NODES[-1]].data_dir, DISK_BYTES)
            yield

    def _create(self, url: ClusterUrl) -> None:
        """Make the cluster, as `delayserver cluster create` does, and follow its logs."""
        self._log_topic = url.log_topic
        flushes = self._durability == "fsync-all"
        self._engine.create(len(self._shards), len(BROKERS), flushes=flushes)
        identity = make_identity(
            url.name, len(self._shards), self._durability, self._secrets.randbytes
        )
        MetaLog(self._engine.meta()).create(identity)
        for shard in self._shards:
            log, stamp = self._engine.log(shard), identity.stamps[shard]
            tenures = self.ledger.tenures[shard]
            self._watches.append(OfficeWatch(shard, log, stamp, tenures, self._node_of))
            self._watches[-1].start()

    def _node_of(self, number: int) -> tuple[str, int]:
        node = self._nodes[f"n{number}"]
        return node.name, node.offset_ms

    def _end_watches(self) -> None:
        for watch in self._watches:
            watch.end(self._engine.log(watch.shard).end())
            if watch.failure is not None:
                self.notes.fail(watch.failure)
            self.counts["records that do not count"] += watch.void
            self.counts["owners"] += len(watch.tenures)
        tenures = msgspec.json.encode({str(k): some for k, some in self.ledger.tenures.items()})
        (self.notes.directory / "tenures.json").write_bytes(tenures)
        self.notes.figures += [one.to_json() for one in self._struck]

    def _keep_logs(self) -> None:
        """Everything else of a broker goes with it; one that is stopped would be waited for."""
        self._thaw_brokers()
        for number in BROKERS:
            with suppress(OSError):
                to = self.notes.directory / f"broker-{number}.log"
                copyfile(self._brokers.log_path(number), to)

    def data_dirs(self) -> list[Path]:
        return [node.data_dir for node in self._nodes.values()]

    def table(self) -> "Table":
        return table_of(self._struck)

    async def start(self) -> None:
        # One after the other: each gets the number that its name says.
        for number, node in enumerate(self._nodes.values(), 1):
            node.start()
            await self._until_registered(node, number)
        await self._until_well("start", FIRST_S, in_sync=False)

    async def _until_registered(self, node: ClusterNode, number: int) -> None:
        async for _ in Looks(FIRST_S, LOOK_S):
            _, found = await asyncio.to_thread(MetaLog(self._engine.meta()).read_cluster)
            if found.get(node.name) == number:
                return
            if not node.is_running:
                break
        raise ServerFailed(f"{node.name} did not join as node {number}; see {node.log_path}")

    async def stop(self) -> None:
        for node in self._nodes.values():
            await self._stop_node(node)

    async def _stop_node(self, node: ClusterNode) -> None:
        status = await asyncio.to_thread(node.stop)
        if status != 0:
            self.notes.fail(f"{node.name} ended with status {status} after SIGTERM")

    def _owner(self, shard: int) -> ClusterNode | None:
        owner = self._watches[shard].owner
        return None if owner is None else self._nodes[owner]

    def _epoch(self, shard: int) -> int:
        tenures = self.ledger.tenures[shard]
        return tenures[-1].epoch if tenures else 0

    # ── a round ────────────────────────────────────────────────────────────────────────────────

    async def strike(self, kind: StrEnum, plan: RoundPlan) -> None:
        assert isinstance(kind, Strike)
        shard = plan.chance.choice(self._shards)
        if self._owner(shard) is None:  # It is given to another node just now, in order.
            await self._until_well("a round begins", WELL_S)
        self._look_for_idle_changes()
        owner = self._owner(shard)
        if owner is None:
            raise ServerFailed(f"no node owns shard {shard}, though all was well")
        self._epochs = [self._epoch(one) for one in self._shards]
        leader = await asyncio.to_thread(self._brokers.leader, self._log_topic, shard)
        self.notes.say(
            f"{kind}, shard {shard} of {owner.name}, leader b{leader}, for {plan.hold_s:.1f} s"
        )
        self._shard = shard
        self._round += 1
        self._since = self._since[1], len(self.ledger.orders)
        self._struck_ms = self._measured_ms = self.ledger.now_ms()
        await self._deal(kind, plan, owner, leader)
        self.notes.say("taken back")

    async def well(self) -> None:
        await self._until_well(self.notes.doing, WELL_S)

    async def settle(self, plan: RoundPlan) -> None:
        """Write down what is excused, and how long it took."""
        well_ms = self.ledger.now_ms()
        for shard in self._shards:
            for last, following in itertools.pairwise(self.ledger.tenures[shard]):
                if following.epoch > self._epochs[shard] and not last.is_released:
                    from_ms = min(self._struck_ms, last.last_ms)
                    self.ledger.struck([shard], from_ms, following.claim_ms)
            self.ledger.away[shard].append(Outage(self._struck_ms, well_ms))
            handovers = self._epoch(shard) - self._epochs[shard]
            if shard == self._shard or handovers:
                told = self.notes.doing, self._round, shard, handovers
                some = self.ledger.orders[self._since[0] :]
                self._struck.append(measure(*told, some, Outage(self._measured_ms, well_ms)))
                self.notes.say(str(self._struck[-1]))
        await asyncio.sleep(CALM_S)
        self._calm_epochs = [self._epoch(shard) for shard in self._shards]

    async def all_due(self) -> None:
        self._look_for_idle_changes()

    def _look_for_idle_changes(self) -> None:
        """Owners may give a shard to another one, in order, but none may lose one."""
        for shard, known in enumerate(self._calm_epochs):
            for tenure in self.ledger.tenures[shard]:
                if known <= tenure.epoch < self._epoch(shard) and not tenure.is_released:
                    self.notes.fail(
                        f"shard {shard} lost its owner of epoch {tenure.epoch} though nothing had "
                        "been struck"
                    )

    # ── strikes ────────────────────────────────────────────────────────────────────────────────

    async def _deal(self, kind: Strike, plan: RoundPlan, owner: ClusterNode, leader: int) -> None:
        """Strike, wait as long as the plan says, and take it back."""
        shard, chance = self._shard, plan.chance
        standby = chance.choice([node for node in self._nodes.values() if node is not owner])
        other = chance.choice([number for number in BROKERS if number != leader])
        match kind:
            case Strike.OWNER_KILL | Strike.STANDBY_KILL:
                node = owner if kind is Strike.OWNER_KILL else standby
                await asyncio.to_thread(node.kill_shard, shard)
            case Strike.OWNER_NODE_KILL | Strike.NODE_WIPED | Strike.ALL_NODES_KILL:
                met = [*self._nodes.values()] if kind is Strike.ALL_NODES_KILL else [owner]
                for node in met:
                    await asyncio.to_thread(node.kill)
                await asyncio.sleep(min(plan.hold_s, 3) if len(met) > 1 else plan.hold_s)
                if kind is Strike.NODE_WIPED:
                    await asyncio.to_thread(owner.wipe)
                for node in met:
                    node.start()
            case Strike.NODE_TERM:
                await self._stop_node(owner)
                await asyncio.sleep(plan.hold_s)
                owner.start()
            case Strike.OWNER_STOP | Strike.OWNER_NODE_STOP | Strike.STANDBY_STOP:
                await self._freeze(kind, plan, standby if kind is Strike.STANDBY_STOP else owner)
            case Strike.LEADER_KILL | Strike.FOLLOWER_KILL | Strike.ALL_BROKERS_KILL:
                one = (other,) if kind is Strike.FOLLOWER_KILL else (leader,)
                await self._kill_brokers(
                    BROKERS if kind is Strike.ALL_BROKERS_KILL else one, plan.hold_s
                )
            case Strike.OWNER_AND_LEADER_KILL:
                await self._kill_brokers((leader,), plan.hold_s, and_owner=owner)
            case Strike.LEADER_STOP | Strike.FOLLOWER_STOP:
                pid = self._brokers.pid(leader if kind is Strike.LEADER_STOP else other)
                self._frozen.append(pid)
                os.kill(pid, signal.SIGSTOP)
                try:
                    await asyncio.sleep(plan.hold_s)
                finally:
                    self._thaw_brokers()
            case Strike.CLOCK_NEAR:
                await self._clock_near(kind, plan, owner)
            case Strike.CLOCK_FAR:
                await self._clock_far(kind, plan, standby)
            case Strike.DISK_FULL:
                node = self._nodes[NODES[-1]]
                await self._until_open(node)
                self.notes.say(f"the disk of {node.name} is full")
                with full_disk(node.data_dir, DISK_LEFT_BYTES):
                    await asyncio.sleep(plan.hold_s)
            case _:
                await self._cut(kind, plan, owner, f"b{leader}")

    def _owned(self, owner: ClusterNode) -> list[int]:
        return [shard for shard in self._shards if self._owner(shard) is owner]

    async def _freeze(self, kind: Strike, plan: RoundPlan, node: ClusterNode) -> None:
        owned = self._owned(node)
        if kind is Strike.OWNER_NODE_STOP:
            await asyncio.to_thread(node.stop_all)
        else:
            await asyncio.to_thread(node.stop_shard, self._shard)
        await asyncio.sleep(plan.hold_s)
        self.ledger.thaws(owned, THAW_MS)
        node.go_on()
        self.ledger.thaws(owned, THAW_MS)

    async def _kill_brokers(
        self, numbers: Iterable[int], hold_s: float, and_owner: ClusterNode | None = None
    ) -> None:
        for number in numbers:
            os.kill(self._brokers.pid(number), signal.SIGKILL)
        if and_owner is not None:
            await asyncio.to_thread(and_owner.kill_shard, self._shard)
        await asyncio.sleep(hold_s)
        # Two that are down need each other to answer.
        revivals = [asyncio.to_thread(self._brokers.revive, number) for number in numbers]
        await asyncio.gather(*revivals)

    def _thaw_brokers(self) -> None:
        for pid in self._frozen:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._frozen.clear()

    async def _clock_near(self, kind: Strike, plan: RoundPlan, owner: ClusterNode) -> None:
        chance, shard = plan.chance, self._shard
        await self._set_clock(owner, chance.choice((-1, 1)) * chance.randint(300, 900))
        await asyncio.sleep(plan.hold_s)
        await self._until_well(kind, WELL_S)
        # Whichever node owns it now, the one with the other clock takes its turn.
        now = self._owner(shard)
        if now is not None and now is not owner:
            self._measured_ms = self.ledger.now_ms()
            await asyncio.to_thread(now.kill)
            await self._until_well(kind, WELL_S, without=now)
            now.start()
            await self._until_well(kind, WELL_S)
        await self._set_clock(owner, 0)

    async def _clock_far(self, kind: Strike, plan: RoundPlan, standby: ClusterNode) -> None:
        chance, shard = plan.chance, self._shard
        await self._set_clock(standby, chance.choice((-1, 1)) * chance.randint(2500, 9000))
        await self._until_well(kind, WELL_S)
        await asyncio.sleep(FAR_CLOCK_S)
        now = self._owner(shard)
        if now is not None and now is not standby:
            self._measured_ms = self.ledger.now_ms()
            await asyncio.to_thread(now.kill_shard, shard)
            await self._until_well(kind, WELL_S)
        if self._owner(shard) is standby:
            self.notes.fail(f"{standby.name} owns shard {shard}, and its clock is far off")
        await self._set_clock(standby, 0)

    async def _set_clock(self, node: ClusterNode, offset_ms: int) -> None:
        """Start a node again with its clock off by so much."""
        await asyncio.to_thread(node.stop)
        await self._until_read()
        if offset_ms:
            self.ledger.skewed(abs(offset_ms))
        node.offset_ms = offset_ms
        self.notes.say(f"the clock of {node.name} is off by {offset_ms} ms")
        node.start()
        if not offset_ms:
            await self._until_well("a clock is set right", WELL_S)
            self.ledger.skewed(0)

    async def _until_read(self) -> None:
        """Wait until all that stands in the logs by now is read, and dated by the clocks of its
        nodes."""
        for watch in self._watches:
            end = await asyncio.to_thread(self._engine.log(watch.shard).end)
            async for _ in Looks(WELL_S, LOOK_S):
                if watch.has_read(end):
                    break
            else:
                raise ServerFailed(f"the log of shard {watch.shard} is not read to its end, {end}")

    async def _until_open(self, node: ClusterNode) -> None:
        """Wait until a node has opened all of its shards: one that is still to be opened could not
        be on a full disk, and would end the node."""
        since_ms = wall_clock_ms()
        opened: list[ReplicaNote] = []
        async for _ in Looks(WELL_S, LOOK_S):
            opened = []
            # Brokers that were struck in the last round may still be choosing who knows of it.
            with suppress(EngineError):
                found = await asyncio.to_thread(self._engine.noted_progress, [node.name])
                texts = [text for _, text in found[node.name].values()]
                notes = [msgspec.json.decode(text, type=ReplicaNote) for text in texts]
                opened = [one for one in notes if one.process_url and one.at_ms >= since_ms]
            if len(opened) == len(self._shards):
                return
        raise ServerFailed(f"{node.name} has opened {len(opened)} of its shards")

    async def _cut(self, kind: Strike, plan: RoundPlan, owner: ClusterNode, leader: str) -> None:
        its, leads, brokers = [owner.name], [leader], [f"b{number}" for number in BROKERS]
        other_nodes = [name for name in NODES if name != owner.name]
        other_brokers = [name for name in brokers if name != leader]
        pairs = {
            Strike.CUT_OWNER_BROKERS: both_ways(its, brokers),
            Strike.CUT_OWNER_TO_BROKERS: [(owner.name, name) for name in brokers],
            Strike.CUT_BROKERS_TO_OWNER: [(name, owner.name) for name in brokers],
            Strike.CUT_OWNER_LEADER: both_ways(its, leads),
            Strike.CUT_OWNER_NODES: both_ways(its, other_nodes),
            Strike.CUT_OWNER_CLIENTS: both_ways(its, [CLIENTS]),
            Strike.CUT_OWNER_ALL: both_ways(its, [CLIENTS, *other_nodes, *brokers]),
            Strike.CUT_LEADER_BROKERS: both_ways(leads, other_brokers),
            Strike.CUT_HALVES: both_ways([*its, *leads], [*other_nodes, *other_brokers]),
        }[kind]
        owned, began_ms = self._owned(owner), self.ledger.now_ms()
        await asyncio.to_thread(self.stage.cut, pairs)
        try:
            await asyncio.sleep(plan.hold_s)
            if kind is Strike.CUT_OWNER_NODES:
                await self._until_given_away(owner)
        finally:
            # The kernel sends again what was lost, after twice the time of the time before: so the
            # first that gets through may come as long behind the cut as the cut was.
            late_ms = self.ledger.now_ms() - began_ms + THAW_MS
            self.ledger.thaws(owned, late_ms)
            await asyncio.to_thread(self.stage.heal)
            self.ledger.thaws(owned, late_ms)
            if any(CLIENTS in pair for pair in pairs):
                # The owner could not hear that a client has received something.
                self.ledger.struck(owned, began_ms, self.ledger.now_ms() + late_ms)

    async def _until_given_away(self, owner: ClusterNode) -> None:
        """The other two see each other, and it sees no other node."""
        async for _ in Looks(APART_S, LOOK_S):
            if self._owner(self._shard) is not owner:
                return
        self.notes.fail(f"{owner.name} keeps shard {self._shard}, and reaches no other node")

    # ── all is well ────────────────────────────────────────────────────────────────────────────

    async def _until_well(
        self,
        strike: str,
        timeout_s: float,
        *,
        in_sync: bool = True,
        without: ClusterNode | None = None,
    ) -> None:
        """Wait until all runs, is owned and answers. Raises ServerFailed that names the rest."""
        since_ms = self.ledger.now_ms()
        lacks: list[str] = []
        async for _ in Looks(timeout_s, LOOK_S):
            lacks = await self._lacks(since_ms, without) if in_sync else self._lacks_owners()
            if not lacks:
                return
        raise ServerFailed(f"{timeout_s:g} s behind {strike}: {', '.join(lacks)}")

    def _lacks_owners(self) -> list[str]:
        silent_ms = self.ledger.now_ms() - HEARD_MS
        return [
            f"shard {shard} has no owner that is heard"
            for shard in self._shards
            if self._owner(shard) is None or self.ledger.tenures[shard][-1].last_ms < silent_ms
        ]

    async def _lacks(self, since_ms: int, without: ClusterNode | None) -> list[str]:
        lacks = self._lacks_owners()
        for node in self._nodes.values():
            if node is without:
                continue
            if not node.is_running:
                raise ServerFailed(
                    f"{node.name} ended by itself with status {node.status}; see {node.log_path}"
                )
            if not node.has_all():
                lacks.append(f"{node.name} lacks a process")
        recent = itertools.takewhile(
            lambda order: order.asked_ms > since_ms or not order.answered,
            reversed(self.ledger.orders),
        )
        answering = {shard_of_order(order) for order in recent if order.answered}
        lacks += [f"shard {k} answers no publish" for k in self._shards if k not in answering]
        return lacks or await asyncio.to_thread(self._lacks_replicas)

    def _lacks_replicas(self) -> list[str]:
        topics = self._brokers.admin.list_topics(timeout=10).topics
        return [
            f"a partition of {name} has {len(one.isrs)} replicas in sync"
            for name, topic in topics.items()
            for one in topic.partitions.values()
            if set(one.isrs) != set(one.replicas)
        ]
