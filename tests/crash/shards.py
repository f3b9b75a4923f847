"""The crash harness for a server of several shards: they are killed one by one, and together.

    one, two      processes of shards; the supervisor has to bring them back while the others serve
    supervisor    it alone: its shards have to end by themselves, in order, and all is started again
    all           supervisor and shards at once

Each of them comes under load, in a checkpoint of some shard, as the hour changes, and while a shard
or the whole starts. What a kill excuses, it excuses only for the messages of the shards that it
met: a delivery of another may not come again, and a supervisor's death excuses nothing.

Calls come in at all processes, over connections of several clients. What is known of a call that
was broken off, or answered "outcome: unknown", is as little as with one process; any other refusal
means that nothing was done, and of a batch the part that each shard has taken stands in the answer.
"""

import asyncio
import random
import time
from collections.abc import Collection, Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple, Unpack

from delayserver.cli.demo.ledger import DemoLedger, Order, Outage
from delayserver.cli.demo.process import ServerFailed
from delayserver.cli.demo.sharded import ShardedServer
from delayserver.client.transport import Transport
from delayserver.records.message_id import read_id
from storage.shards import shard_directory
from tests.crash.harness import (
    BACKUP_WAIT_SHARE,
    CHECK_SHARE,
    CHECKPOINT_SHARE,
    GRACE_S,
    LOAD_S,
    CrashRun,
    RunOptions,
)
from tests.load import HOUR_MS, Spread, pause

CLIENTS = 8
AGAIN_SHARE = 0.4
"""Of the blows: another one falls before all are back."""
HOUR_SHARE = 0.4
"""Of the starts of the whole: shortly before an hour begins."""
NEAR_HOUR_MS = 2500
"""A blow that falls so shortly before an hour waits for it."""


class Blow(StrEnum):
    """Who is killed."""

    ONE = "one shard"
    TWO = "two shards"
    SUPERVISOR = "the supervisor"
    ALL = "all"


BLOWS = {Blow.ONE: 45, Blow.TWO: 15, Blow.SUPERVISOR: 15, Blow.ALL: 25}
"""Of a hundred."""


class RoundPlan(NamedTuple):
    """What is to happen in a round, whatever happens in those before."""

    blows: tuple[Blow, ...]
    """The first under load, the others while something starts."""
    is_checked: bool
    """If the whole goes down, its files are checked."""
    is_near_hour: bool
    """… and it starts shortly before an hour begins."""


NO_BLOWS = RoundPlan((), is_checked=False, is_near_hour=False)


def plan_round(chance: random.Random) -> RoundPlan:
    """Draw a round."""
    blows = chance.choices(list(BLOWS), list(BLOWS.values()))
    while chance.random() < AGAIN_SHARE:
        blows += chance.choices(list(BLOWS), list(BLOWS.values()))
    return RoundPlan(
        tuple(blows),
        is_checked=chance.random() < CHECK_SHARE,
        is_near_hour=chance.random() < HOUR_SHARE,
    )


class ShardsLedger(DemoLedger):
    """Kills and outages of each shard, which is told by the ids of its messages."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._kills_ms: list[list[int]] = [[] for _ in range(count)]
        self._outages: list[list[Outage]] = [[] for _ in range(count)]
        self._down_ms: dict[int, int] = {}

    def went_down(self, shards: Collection[int], *, killed: bool) -> None:
        """Shards are away from now on. `killed`: in the middle of what they did."""
        now_ms = self.now_ms()
        for shard in shards:
            self._down_ms.setdefault(shard, now_ms)
            if killed:
                self._kills_ms[shard].append(now_ms)

    def came_back(self) -> None:
        """All are there."""
        now_ms = self.now_ms()
        for shard, down_ms in self._down_ms.items():
            self._outages[shard].append(Outage(down_ms, now_ms))
        self._down_ms.clear()

    def kills_of(self, order: Order) -> Sequence[int]:
        return [] if (shard := shard_of_order(order)) is None else self._kills_ms[shard]

    def outages_of(self, order: Order) -> Sequence[Outage]:
        return [] if (shard := shard_of_order(order)) is None else self._outages[shard]

    def times(self) -> dict[str, object]:
        shards = [
            {"outages_ms": [[one.down_ms, one.up_ms] for one in outages], "kills_ms": kills_ms}
            for outages, kills_ms in zip(self._outages, self._kills_ms, strict=True)
        ]
        return {"shards": shards}


def shard_of_order(order: Order) -> int | None:
    """Who has it; None as long as nobody has named it."""
    return read_id(min(order.message_ids)).shard if order.message_ids else None


class ShardsCrashRun(CrashRun):
    """One run on the directory of several shards."""

    MIXED_SHARE = 0.5
    backups_may_fail = True
    ledger: ShardsLedger
    _server: ShardedServer

    def __init__(self, directory: Path, *, shards: int, **options: Unpack[RunOptions]) -> None:
        super().__init__(directory, ledger=ShardsLedger(shards), **options)
        self._count = shards
        self._all = range(shards)
        self._plan = NO_BLOWS
        self._was_ready = False
        """Since the last start of the whole, all were there once."""
        self._may_give_up = False
        """A shard was killed before that, so the supervisor may have taken it for one that cannot
        start, which ends the whole."""

    def _make_server(self, data_dir: Path, port: int, log_path: Path) -> ShardedServer:
        return ShardedServer(data_dir, count=self._count, port=port, log_path=log_path)

    def _make_client(self, url: str) -> Transport:
        return Spread(url, CLIENTS, random.Random(self._seed + 2))

    def _shard_directory(self) -> Path:
        return self._server.data_dir / shard_directory(self._fate.choice(self._all))

    # ── a round ────────────────────────────────────────────────────────────────────────────────

    async def _round(self) -> None:
        """Load until the blow, perhaps others before all are there again, and then they are."""
        self._fate = random.Random(f"{self._seed}, round {self.rounds_done}")
        self._plan = plan_round(self._fate)
        backup = self._begin_backup()
        await self._load()
        if backup is not None and self._backup_fate.random() < BACKUP_WAIT_SHARE:
            await asyncio.wait([backup], timeout=GRACE_S)
        first, *others = self._plan.blows
        await self._strike(first)
        if backup is not None:
            await backup
        for blow in others:
            await self._amid_a_start()
            if self._is_there():
                await self._strike(blow)
                self.counts["kills during start"] += 1
        await self._back()
        self._plan = NO_BLOWS

    async def _load(self) -> None:
        """Until the moment of the first blow."""
        await self._load_for(self._fate.uniform(*LOAD_S))
        to_hour_ms = HOUR_MS - self.ledger.now_ms() % HOUR_MS
        if to_hour_ms < NEAR_HOUR_MS:
            await asyncio.sleep(to_hour_ms / 1000 + self._fate.uniform(-0.02, 0.1))
            self.counts["kills as the hour changes"] += 1
        elif self._fate.random() < CHECKPOINT_SHARE and await self._in_a_checkpoint():
            self.counts["kills in a checkpoint"] += 1

    async def _amid_a_start(self) -> None:
        """Until somewhere in the start of those that are away."""
        if self._is_there():
            await asyncio.to_thread(self._server.wait_started)
        else:
            self._launch_again()
        # Half of them before Python has read the program, half anywhere in the recovery.
        longest_s = self._fate.choice((0.3, self._start_s * 1.1))
        await pause(self._fate, 0, longest_s)

    async def _strike(self, blow: Blow) -> None:
        match blow:
            case Blow.ONE:
                await self._kill_shards(1)
            case Blow.TWO:
                await self._kill_shards(2)
            case Blow.SUPERVISOR:
                await self._kill_supervisor()
            case Blow.ALL:
                await self._kill()
        self.counts[f"kills of {blow}"] += 1
        if not self._is_there():
            await self._while_down()

    async def _kill_shards(self, count: int) -> None:
        """Kill so many of those that run; there may be fewer while they start."""
        known = self._server.shards()
        others = [pid for pid in self._server.children() if pid not in known.values()]
        running = [known[shard] for shard in sorted(known)] + others
        victims = self._fate.sample(running, min(count, len(running)))
        met = set(self._server.kill_shards(victims))
        shards = {shard for shard, pid in known.items() if pid in met}
        if not met <= set(known.values()):
            # One that has not opened anything yet serves a shard that nobody else serves.
            shards |= set(self._all) - set(known)
        await self._killed(shards)
        self.counts["kills"] += len(met)
        self._may_give_up |= not self._was_ready

    async def _kill_supervisor(self) -> None:
        self.ledger.went_down(self._all, killed=False)
        self._server.kill_supervisor()
        self.counts["kills"] += 1
        await asyncio.to_thread(self._server.wait_left)

    async def _kill(self) -> None:
        if not self._is_there():
            return
        self._server.kill()
        await self._killed(self._all)
        self.counts["kills"] += 1

    async def _killed(self, shards: Collection[int]) -> None:
        self.ledger.went_down(shards, killed=True)
        await self._receive_all()
        self.ledger.went_down(shards, killed=True)

    def _is_there(self) -> bool:
        """Whether there is a supervisor. Raises ServerFailed where it has ended without reason."""
        if self._server.is_running:
            return True
        if self._server.is_meant_to_run and not self._may_give_up:
            raise ServerFailed("the server ended by itself; see server.log")
        return False

    # ── starts ─────────────────────────────────────────────────────────────────────────────────

    async def _start(self) -> None:
        await self._back()

    async def _back(self) -> None:
        """Until all shards are there: brought back by the supervisor, or started with it."""
        began_s = time.monotonic()
        while True:
            if not self._is_there():
                began_s = time.monotonic()
                self._launch_again()
            try:
                await asyncio.to_thread(self._server.wait_ready)
            except ServerFailed:
                if self._is_there():
                    raise
                self.counts["starts given up"] += 1
            else:
                break
        if not self._was_ready:
            self._start_s = time.monotonic() - began_s
        self._was_ready, self._may_give_up = True, False
        self.ledger.came_back()

    async def _while_down(self) -> None:
        """What is done to the whole once a round while nobody is there."""
        plan, self._plan = self._plan, NO_BLOWS
        if plan.is_checked:
            await self._check()
        if plan.is_near_hour:
            await self._come_near_the_hour()

    def _launch_again(self) -> None:
        """Start the whole."""
        self._was_ready = self._may_give_up = False
        self._launch()
