"""The chaos harness: a cluster under load, struck at random, judged by a ledger and by its logs.

    stage       namespaces for three brokers and three nodes (`tests.chaos.stage`)
    load        `tests.load`, over connections to all nodes; each call goes to any
    each round  load; one strike (`tests.chaos.strikes`), for some seconds; all is well again
    the end     all that is open has to be delivered; after a stop in order and one more start
                nothing may come again; files are checked; the logs tell who owned what when

"All is well" means: every process of every node runs, every shard has an owner and answers a
publish, and every partition is on all of its brokers. What is excused stands in
`tests.chaos.ledger`, who may have delivered in `tests.chaos.offices`, how long it took in
`tests.chaos.times`.

An owner that is lost without a strike is a failure. So is what does not become well within WELL_S.

Cost: three JVMs and nine processes of Python: on two cores most of the times are theirs. Threads:
the event loop, and one for each log.
"""

import asyncio
import itertools
import math
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from shutil import copyfile
from typing import Any, Final, Literal

import msgspec

from delayserver.cli.demo.ledger import Outage, Receipt, judge
from delayserver.cli.demo.process import ServerFailed, damage_in, free_port
from delayserver.cli.demo.receiver import PEER, Receiver
from delayserver.client.transport import (
    NO_HEADERS,
    TIMEOUT_S,
    HttpAnswer,
    HttpTransport,
    Transport,
)
from delayserver.clocks import wall_clock_ms
from delayserver.cluster.watch import ReplicaNote
from storage.errors import EngineError
from storage.replicated.kafka import KafkaEngine
from storage.replicated.kafka_settings import ClientSettings, ClusterUrl
from storage.replicated.meta import MetaLog, make_identity
from tests.chaos.ledger import THAW_MS, ChaosLedger, Span, shard_of
from tests.chaos.nodes import PORT, ClusterNode, full_disk
from tests.chaos.offices import OfficeWatch, broken_offices
from tests.chaos.stage import CLIENTS, Stage, both_ways, make_stage
from tests.chaos.strikes import NEEDS_STAGE, RoundPlan, Strike, plan_round
from tests.chaos.times import ShardTimes, Struck, measure, table_of
from tests.cluster.brokers import Brokers
from tests.load import CONSUMED, RETRY_S, Load
from tests.long_run import Outcome
from tests.waiting import Looks

NODES: Final = 3
BROKERS: Final = 3
PUBLISHERS: Final = 8
CONSUMERS: Final = 1
ASK_S: Final = 3.0
"""Clients that know several nodes ask another one then."""
CALM_S: Final = 1.5
"""Between two rounds: what one excuses is over when the next begins."""
WELL_S: Final = 90.0
FIRST_S: Final = 120.0
GRACE_S: Final = 45.0
QUIET_S: Final = 2.0
LOOK_S: Final = 0.1
APART_S: Final = 30.0
"""Within which a node that is cut off from the others gives its shards away."""
HEARD_MS: Final = 2000
"""An owner of which nothing was read for so long may be none any more."""
DISK_BYTES: Final = 512 << 20
DISK_LEFT_BYTES: Final = 64 << 10


class AnyNode:
    """A `Transport` to a cluster: each call goes to any node."""

    def __init__(self, urls: Iterable[str], token: str, chance: random.Random) -> None:
        self._chance = chance
        self._transports = [HttpTransport(url, token=token) for url in urls]

    async def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        headers: Mapping[str, str] = NO_HEADERS,
        timeout_s: float = TIMEOUT_S,
    ) -> HttpAnswer:
        """As `Transport` says."""
        transport = self._chance.choice(self._transports)
        timeout_s = min(timeout_s, ASK_S)
        return await transport.request(method, path, body, headers=headers, timeout_s=timeout_s)

    async def close(self) -> None:
        """As `Transport` says."""
        for transport in self._transports:
            await transport.close()


class ChaosRun(Load[ChaosLedger]):
    """One run on one cluster."""

    PAUSE_S = 0.08
    MIXED_SHARE = 0.5

    def __init__(
        self,
        directory: Path,
        *,
        seed: int,
        rounds: int,
        minutes: float | None = None,
        shards: int = 2,
        durability: Literal["os", "fsync", "fsync-all"] = "fsync",
        only: str = "",
        report: Callable[["ChaosRun"], None] = lambda run: None,
    ) -> None:
        super().__init__(ChaosLedger(shards), seed + 1)
        self.rounds = rounds
        self.rounds_done = 0
        self.striking = "starts"
        """What is done just now, for people."""
        self.struck: list[Struck] = []
        self._seed = seed
        self._directory = directory
        self._shards = shards
        self._durability = durability
        self._deadline_s = None if minutes is None else time.monotonic() + 60 * minutes
        self._report = report
        names = [f"n{k}" for k in range(1, NODES + 1)]
        self._broker_names = [f"b{k}" for k in range(1, BROKERS + 1)]
        self._stage: Stage = make_stage(names, self._broker_names)
        self._kinds = tuple(
            kind
            for kind in Strike
            if only in kind and (self._stage.can_cut or kind not in NEEDS_STAGE)
        )
        self._names = names
        self._times = [ShardTimes() for _ in range(shards)]
        self._watches: list[OfficeWatch] = []
        self._numbers: dict[int, str] = {}
        self._nodes: dict[str, ClusterNode] = {}
        self._brokers: Brokers
        self._frozen: list[tuple[str, list[int]]] = []
        self._struck_s = 0.0
        """When the strike fell that is measured."""
        self._epochs: list[int] = []
        """Of the shards, when all was well last."""
        self._secrets = random.Random(f"{seed}, secrets")
        self._token = self._secrets.randbytes(16).hex()
        self._log = (directory / "strikes.log").open("a", buffering=1)

    @property
    def kinds(self) -> tuple[Strike, ...]:
        """What may happen."""
        return self._kinds

    async def run(self) -> Outcome:
        """All rounds, then the end."""
        async with AsyncExitStack() as stack:
            stack.callback(self._log.close)
            await stack.enter_async_context(self._running_brokers())
            stack.callback(self._stage.release_disks)
            await stack.enter_async_context(self._running_nodes())
            receiver = await stack.enter_async_context(Receiver(self._on_webhook, self._stage.host))
            urls = [node.url for node in self._nodes.values()]
            self._client: Transport = AnyNode(urls, self._token, random.Random(self._seed + 2))
            stack.push_async_callback(self._client.close)
            try:
                await self._live(receiver.url)
            except* ServerFailed as group:
                self.failures += [str(error) for error in group.exceptions]
            await asyncio.to_thread(self._judge_offices)
        return Outcome(
            "chaos",
            self._seed,
            self._directory,
            self.ledger,
            judge(self.ledger),
            self.failures,
            self.counts,
            [one.to_json() for one in self.struck],
            [table_of(self.struck)],
        )

    # ── who is there ───────────────────────────────────────────────────────────────────────────

    @asynccontextmanager
    async def _running_brokers(self) -> AsyncIterator[None]:
        brokers = self._brokers = Brokers(self._directory / "brokers", BROKERS)
        if self._stage.can_cut:
            brokers.hosts = tuple(map(self._stage.host_of, self._broker_names))
            brokers.within = " ".join(self._stage.within("b#"))
        running = brokers.running()
        await asyncio.to_thread(running.__enter__)
        try:
            url = ClusterUrl(brokers.addresses, "chaos")
            self._engine = KafkaEngine(ClientSettings(url, {}))
            await asyncio.to_thread(self._create, url)
            yield
        finally:
            # One that is stopped would be waited for.
            self._thaw()
            for number in range(1, BROKERS + 1):
                # All else of a broker goes with it.
                with suppress(OSError):
                    copyfile(brokers.log_path(number), self._directory / f"broker-{number}.log")
            await asyncio.to_thread(running.__exit__, None, None, None)

    def _create(self, url: ClusterUrl) -> None:
        """What `delayserver cluster create` does."""
        flushes = self._durability == "fsync-all"
        self._engine.create(self._shards, BROKERS, flushes=flushes)
        identity = make_identity(url.name, self._shards, self._durability, self._secrets.randbytes)
        MetaLog(self._engine.meta()).create(identity)
        self._url = url
        for shard in range(self._shards):
            watch = OfficeWatch(
                shard, self._engine.log(shard), identity.stamps[shard], self._offset_of
            )
            self._watches.append(watch)
            watch.start()

    @asynccontextmanager
    async def _running_nodes(self) -> AsyncIterator[None]:
        data = self._directory / "nodes"
        data.mkdir()
        for name in self._names:
            node = self._nodes[name] = ClusterNode(
                name,
                data,
                self._stage,
                cluster=str(self._url),
                shards=self._shards,
                token=self._token,
                port=PORT if self._stage.can_cut else free_port(),
            )
            if self._stage.can_cut and name == self._names[-1]:
                self._stage.small_disk(node.data_dir, DISK_BYTES)
        try:
            # One after the other: each gets the number that its name says.
            for node in self._nodes.values():
                node.start()
                await self._until_registered(node)
            yield
        finally:
            for node in self._nodes.values():
                await asyncio.to_thread(node.kill)
            for watch in self._watches:
                watch.end(0)

    async def _until_registered(self, node: ClusterNode) -> None:
        async for _ in Looks(FIRST_S, LOOK_S):
            _, found = await asyncio.to_thread(MetaLog(self._engine.meta()).read_cluster)
            self._numbers = {number: name for name, number in found.items()}
            if node.name in found:
                return
            if not node.is_running:
                break
        raise ServerFailed(f"{node.name} did not join; see {node.log_path}")

    def _offset_of(self, number: int) -> int:
        name = self._numbers.get(number)
        return 0 if name is None else self._nodes[name].offset_ms

    def _owner(self, shard: int) -> ClusterNode | None:
        name = self._numbers.get(self._watches[shard].owner)
        return None if name is None else self._nodes[name]

    def _epoch(self, shard: int) -> int:
        tenures = self._watches[shard].tenures
        return tenures[-1].epoch if tenures else 0

    # ── the run ────────────────────────────────────────────────────────────────────────────────

    async def _live(self, url: str) -> None:
        await self._until_well("start", FIRST_S, in_sync=False)
        await self._subscribe(url)
        async with asyncio.TaskGroup() as tasks:
            consumers = [
                tasks.create_task(self._consume(name))
                for name in CONSUMED
                for _ in range(CONSUMERS)
            ]
            publishers = [tasks.create_task(self._publish()) for _ in range(PUBLISHERS)]
            while self._goes_on():
                plan = plan_round(self._seed, self.rounds_done, self._shards, self._kinds)
                await self._round(plan)
                self.rounds_done += 1
                self._report(self)
            await self._end(publishers)
            for consumer in consumers:
                consumer.cancel()

    def _goes_on(self) -> bool:
        if self._deadline_s is not None:
            return time.monotonic() < self._deadline_s
        return self.rounds_done < self.rounds

    async def _round(self, plan: RoundPlan) -> None:
        self.striking = str(plan.strike)
        self._report(self)
        await asyncio.sleep(plan.load_s)
        if self._owner(plan.shard) is None:  # It is given to another node just now, in order.
            await self._until_well("a round begins", WELL_S)
        self._look_for_idle_changes()
        epochs = [self._epoch(shard) for shard in range(self._shards)]
        owner = self._owner(plan.shard)
        if owner is None:
            raise ServerFailed(f"nobody owns shard {plan.shard}, though all was well")
        owned = [shard for shard in range(self._shards) if self._owner(shard) is owner]
        leader = await asyncio.to_thread(self._brokers.leader, self._url.log_topic, plan.shard)
        self._note(
            f"round {self.rounds_done}: {plan.strike}, shard {plan.shard} of {owner.name}, leader "
            f"b{leader}, for {plan.hold_s:.1f} s"
        )
        self._struck_s, struck_ms = time.monotonic(), self.ledger.now_ms()
        await self._strike(plan, owner, leader, owned)
        self._note("taken back")
        await self._until_well(str(plan.strike), WELL_S)
        well_s, well_ms = time.monotonic(), self.ledger.now_ms()
        for shard in range(self._shards):
            self._settle_round(plan, shard, epochs[shard], struck_ms, well_ms)
            handovers = self._epoch(shard) - epochs[shard]
            if shard == plan.shard or handovers:
                times = self._times[shard]
                name, number = str(plan.strike), self.rounds_done
                found = measure(name, number, shard, handovers, times, self._struck_s, well_s)
                self.struck.append(found)
                self._note(str(found))
        self.counts[f"strikes, {plan.strike}"] += 1
        await asyncio.sleep(CALM_S)
        self._epochs = [self._epoch(shard) for shard in range(self._shards)]

    def _settle_round(
        self, plan: RoundPlan, shard: int, epoch: int, struck_ms: int, well_ms: int
    ) -> None:
        """Write down what is excused."""
        tenures = self._watches[shard].tenures
        for last, following in itertools.pairwise(tenures):
            if following.epoch > epoch and not last.is_released:
                self.ledger.handovers[shard].append(
                    Span(min(struck_ms, last.last_ms), following.claim_ms)
                )
        self.ledger.away[shard].append(Outage(struck_ms, well_ms))

    def _look_for_idle_changes(self) -> None:
        """Owners may give a shard to another one, in order, but nobody may lose one."""
        for shard, known in enumerate(self._epochs):
            for tenure in self._watches[shard].tenures:
                if known <= tenure.epoch < self._epoch(shard) and not tenure.is_released:
                    self._fail(
                        f"shard {shard} lost its owner of epoch {tenure.epoch} before round "
                        f"{self.rounds_done}, though nothing had been struck"
                    )

    def _is_refusal(self, status: int, answer: Any) -> bool:
        is_full = status == HTTPStatus.INSUFFICIENT_STORAGE
        may_be_full = self.striking == str(Strike.DISK_FULL)
        return (is_full and may_be_full) or super()._is_refusal(status, answer)

    def _fail(self, what: str) -> None:
        if what not in self.failures:
            self._note(f"failure: {what}")
        super()._fail(what)

    def _note(self, what: str) -> None:
        now_ms = self.ledger.now_ms()
        stamp = time.strftime("%H:%M:%S", time.gmtime(now_ms / 1000))
        self._log.write(f"{stamp}.{now_ms % 1000:03} {now_ms} {what}\n")

    # ── strikes ────────────────────────────────────────────────────────────────────────────────

    async def _strike(
        self, plan: RoundPlan, owner: ClusterNode, leader: int, owned: list[int]
    ) -> None:
        """Strike, wait as long as the plan says, and take it back."""
        chance, shard, strike = plan.chance, plan.shard, plan.strike
        others = [node for node in self._nodes.values() if node is not owner]
        standby = chance.choice(others)
        other = chance.choice([k for k in range(1, BROKERS + 1) if k != leader])
        match strike:
            case Strike.OWNER_KILL | Strike.OWNER_AND_LEADER_KILL:
                if strike is Strike.OWNER_AND_LEADER_KILL:
                    self._signal_broker(leader, signal.SIGKILL)
                await asyncio.to_thread(owner.kill_shard, shard)
                if strike is Strike.OWNER_AND_LEADER_KILL:
                    await _hold(plan)
                    await self._revive((leader,))
            case Strike.OWNER_NODE_KILL | Strike.NODE_WIPED:
                await asyncio.to_thread(owner.kill)
                await _hold(plan)
                if strike is Strike.NODE_WIPED:
                    await asyncio.to_thread(owner.wipe)
                owner.start()
            case Strike.NODE_TERM:
                status = await asyncio.to_thread(owner.stop)
                if status != 0:
                    self._fail(f"{owner.name} ended with status {status} after SIGTERM")
                await _hold(plan)
                owner.start()
            case Strike.STANDBY_KILL:
                await asyncio.to_thread(standby.kill_shard, shard)
            case Strike.OWNER_STOP | Strike.OWNER_NODE_STOP | Strike.STANDBY_STOP:
                node = standby if strike is Strike.STANDBY_STOP else owner
                if strike is Strike.OWNER_NODE_STOP:
                    await asyncio.to_thread(node.stop_all)
                else:
                    await asyncio.to_thread(node.stop_shard, shard)
                await _hold(plan)
                self._thaws(owned, THAW_MS)
                node.go_on()
                self._thaws(owned, THAW_MS)
            case Strike.ALL_NODES_KILL:
                for node in self._nodes.values():
                    await asyncio.to_thread(node.kill)
                await _hold(plan, most_s=3)
                for node in self._nodes.values():
                    node.start()
            case Strike.LEADER_KILL | Strike.FOLLOWER_KILL | Strike.ALL_BROKERS_KILL:
                met = {
                    Strike.LEADER_KILL: (leader,),
                    Strike.FOLLOWER_KILL: (other,),
                    Strike.ALL_BROKERS_KILL: tuple(range(1, BROKERS + 1)),
                }[strike]
                for number in met:
                    self._signal_broker(number, signal.SIGKILL)
                await _hold(plan)
                await self._revive(met)
            case Strike.LEADER_STOP | Strike.FOLLOWER_STOP:
                number = leader if strike is Strike.LEADER_STOP else other
                self._signal_broker(number, signal.SIGSTOP)
                try:
                    await _hold(plan)
                finally:
                    self._signal_broker(number, signal.SIGCONT)
            case Strike.CLOCK_NEAR:
                await self._set_clock(owner, chance.choice((-1, 1)) * chance.randint(300, 900))
                await _hold(plan)
                await self._until_well(strike, WELL_S)
                # Whoever owns it now, the one with the other clock takes its turn.
                now = self._owner(shard)
                if now is not None and now is not owner:
                    self._struck_s = time.monotonic()
                    await asyncio.to_thread(now.kill)
                    await self._until_well(strike, WELL_S, without=now)
                    now.start()
                    await self._until_well(strike, WELL_S)
                await self._set_clock(owner, 0)
            case Strike.CLOCK_FAR:
                await self._set_clock(standby, chance.choice((-1, 1)) * chance.randint(2500, 9000))
                await self._until_well(strike, WELL_S)
                await asyncio.sleep(4)
                now = self._owner(shard)
                if now is standby:
                    self._fail(f"{standby.name} owns shard {shard}, and its clock is far off")
                elif now is not None:
                    self._struck_s = time.monotonic()
                    await asyncio.to_thread(now.kill_shard, shard)
                    await self._until_well(strike, WELL_S)
                    if self._owner(shard) is standby:
                        self._fail(f"{standby.name} claimed shard {shard}, its clock is far off")
                await self._set_clock(standby, 0)
            case Strike.DISK_FULL:
                await self._fill_disk(plan)
            case _:
                await self._cut(plan, owner, leader, owned)

    def _signal_broker(self, number: int, which: signal.Signals) -> None:
        pid = self._brokers.pid(number)
        os.kill(pid, which)
        if which is signal.SIGSTOP:
            self._frozen.append((f"b{number}", [pid]))
        elif which is signal.SIGCONT:
            self._frozen.clear()

    async def _revive(self, numbers: Iterable[int]) -> None:
        """Start brokers again: two that are down need each other to answer."""
        await asyncio.gather(
            *(asyncio.to_thread(self._brokers.revive, number) for number in numbers)
        )

    def _thaw(self) -> None:
        for _, pids in self._frozen:
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGCONT)
                except ProcessLookupError:
                    continue
        self._frozen.clear()

    def _thaws(self, shards: Iterable[int], late_ms: int) -> None:
        now_ms = self.ledger.now_ms()
        for shard in shards:
            self.ledger.thaws[shard].append(Span(now_ms, now_ms + late_ms))

    async def _set_clock(self, node: ClusterNode, offset_ms: int) -> None:
        """Start a node again with its clock off by so much."""
        await asyncio.to_thread(node.stop)
        await self._until_read()
        self.ledger.skew_ms = max(self.ledger.skew_ms, abs(offset_ms))
        node.offset_ms = offset_ms
        self._note(f"the clock of {node.name} is off by {offset_ms} ms")
        node.start()
        if offset_ms == 0:
            await self._until_well("a clock is set right", WELL_S)
            self.ledger.skew_ms = 0

    async def _until_read(self) -> None:
        """All that stands in the logs by now is read, and dated by the clocks of its nodes."""
        for shard, watch in enumerate(self._watches):
            end = await asyncio.to_thread(self._engine.log(shard).end)
            async for _ in Looks(WELL_S, LOOK_S):
                if watch.has_read(end):
                    break
            else:
                raise ServerFailed(f"the log of shard {shard} is not read to its end, {end}")

    async def _fill_disk(self, plan: RoundPlan) -> None:
        node = self._nodes[self._names[-1]]
        await self._until_open(node)
        self._note(f"the disk of {node.name} is full")
        with full_disk(node.data_dir, DISK_LEFT_BYTES):
            await _hold(plan)

    async def _until_open(self, node: ClusterNode) -> None:
        """What is still to be opened could not be on a full disk, and would end the node."""
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
            if len(opened) == self._shards:
                return
        raise ServerFailed(f"{node.name} has opened {len(opened)} of its shards")

    async def _cut(
        self, plan: RoundPlan, owner: ClusterNode, leader: int, owned: list[int]
    ) -> None:
        brokers, its = self._broker_names, [owner.name]
        leads = [f"b{leader}"]
        other_nodes = [name for name in self._names if name != owner.name]
        other_brokers = [name for name in brokers if name != leads[0]]
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
        }[plan.strike]
        is_deaf = any(CLIENTS in pair for pair in pairs)
        began_ms = self.ledger.now_ms()
        await asyncio.to_thread(self._stage.cut, pairs)
        try:
            await _hold(plan)
            if plan.strike is Strike.CUT_OWNER_NODES:
                await self._until_given_away(plan.shard, owner)
        finally:
            # The kernel sends again what was lost, after twice the time of the time before: so the
            # first that gets through may come as long behind the cut as the cut was.
            late_ms = self.ledger.now_ms() - began_ms + THAW_MS
            self._thaws(owned, late_ms)
            await asyncio.to_thread(self._stage.heal)
            self._thaws(owned, late_ms)
            if is_deaf:
                for shard in owned:
                    self.ledger.cut_off[shard].append(
                        Span(began_ms, self.ledger.now_ms() + late_ms)
                    )

    async def _until_given_away(self, shard: int, owner: ClusterNode) -> None:
        """The other two see each other, and it sees nobody."""
        async for _ in Looks(APART_S, LOOK_S):
            if self._owner(shard) is not owner:
                return
        self._fail(f"{owner.name} keeps shard {shard}, and reaches no other node")

    # ── all is well ────────────────────────────────────────────────────────────────────────────

    async def _until_well(
        self,
        what: str,
        timeout_s: float,
        *,
        in_sync: bool = True,
        without: ClusterNode | None = None,
    ) -> None:
        """Until all runs, is owned and answers. Raises ServerFailed that says what does not."""
        since_s = time.monotonic()
        lacks: list[str] = []
        async for _ in Looks(timeout_s, LOOK_S):
            lacks = await self._lacks(since_s, without) if in_sync else self._lacks_owners()
            if not lacks:
                return
        raise ServerFailed(f"{timeout_s:g} s behind {what}: {', '.join(lacks)}")

    def _lacks_owners(self) -> list[str]:
        silent_ms = self.ledger.now_ms() - HEARD_MS
        return [
            f"shard {k} has no owner that is heard"
            for k in range(self._shards)
            if self._owner(k) is None or self._watches[k].tenures[-1].last_ms < silent_ms
        ]

    async def _lacks(self, since_s: float, without: ClusterNode | None) -> list[str]:
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
        for shard, times in enumerate(self._times):
            if not any(asked_s > since_s for asked_s in times.asked_s[-20:]):
                lacks.append(f"shard {shard} answers no publish")
        if not lacks:
            lacks = await asyncio.to_thread(self._lacks_replicas)
        return lacks

    def _lacks_replicas(self) -> list[str]:
        topics = self._brokers.admin.list_topics(timeout=10).topics
        return [
            f"a partition of {name} has {len(one.isrs)} replicas in sync"
            for name, topic in topics.items()
            for one in topic.partitions.values()
            if set(one.isrs) != set(one.replicas)
        ]

    # ── what is counted ────────────────────────────────────────────────────────────────────────

    async def _ask_once(self, method: str, where: str, document: object = None) -> tuple[int, Any]:
        asked_s = time.monotonic()
        status, answer = await super()._ask_once(method, where, document)
        if method == "POST" and isinstance(answer, dict):
            now_s = time.monotonic()
            ids = [answer["id"]] if "id" in answer else answer.get("ids", ())
            for shard in {shard_of(message_id) for message_id in ids}:
                if shard is not None:
                    self._times[shard].answered(asked_s, now_s)
        return status, answer

    def _on_delivered(
        self, name: str, message_id: str, headers: Mapping[str, str], body: bytes
    ) -> Receipt:
        node = self._stage.name_of(headers[PEER])
        shard = shard_of(message_id)
        if node is not None:
            self.ledger.delivered_by(node, message_id)
        if shard is not None:
            self._times[shard].delivered(time.monotonic())
        return super()._on_delivered(name, message_id, headers, body)

    def _on_pulled(self, name: str, message: Mapping[str, Any]) -> Receipt:
        self.ledger.pulled(message["lease"])
        shard = shard_of(message["id"])
        if shard is not None:
            self._times[shard].delivered(time.monotonic())
        return super()._on_pulled(name, message)

    def _delay_ms(self) -> int:
        """All falls due within the run: a cluster's clock is not set forward."""
        chance = self._random
        kind = chance.random()
        if kind < 0.1:
            return 0
        if kind < 0.4:
            return chance.randint(1, 300)
        return chance.randint(300, 4000 if kind < 0.9 else 15_000)

    # ── the end ────────────────────────────────────────────────────────────────────────────────

    async def _end(self, publishers: list["asyncio.Task[None]"]) -> None:
        """Everything falls due and is delivered; then nothing comes any more."""
        self.striking = "ends"
        self._look_for_idle_changes()
        for publisher in publishers:
            publisher.cancel()
        await asyncio.gather(*publishers, return_exceptions=True)
        if self._follow_ups:
            await asyncio.wait(self._follow_ups, timeout=GRACE_S)
        async for _ in Looks(GRACE_S, RETRY_S):
            if not self.ledger.open_count:
                break
            self._report(self)
        await self._stop_nodes(QUIET_S)
        for node in self._nodes.values():
            node.start()
        await self._until_well("the last start", WELL_S, in_sync=False)
        await self._stop_nodes(2 * QUIET_S)
        for node in self._nodes.values():
            damage = await asyncio.to_thread(damage_in, node.data_dir)
            self.failures += [f"{node.name}: {one}" for one in damage]

    async def _stop_nodes(self, quiet_s: float) -> None:
        """Nothing is open any more: a message that comes within this time comes again."""
        await asyncio.sleep(quiet_s)
        for node in self._nodes.values():
            status = await asyncio.to_thread(node.stop)
            if status != 0:
                self._fail(f"{node.name} ended with status {status} after SIGTERM")

    def _judge_offices(self) -> None:
        for shard, watch in enumerate(self._watches):
            watch.end(self._engine.log(shard).end())
            if watch.failure is not None:
                self._fail(watch.failure)
            self.counts["records that do not count"] += watch.void
            self.counts["owners"] += len(watch.tenures)
        tenures = [tenure for watch in self._watches for tenure in watch.tenures]
        self.failures += list(broken_offices(tenures, self.ledger, self._numbers.__getitem__))
        (self._directory / "tenures.json").write_bytes(msgspec.json.encode(tenures))


async def _hold(plan: RoundPlan, *, most_s: float = math.inf) -> None:
    """The strike lasts."""
    await asyncio.sleep(min(plan.hold_s, most_s))
