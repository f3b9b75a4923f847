"""One server, or one of several shards, and perhaps brokers beside it: killed one by one, and
together, again and again.

    one, two      processes of shards; the supervisor has to bring them back while the others serve
    supervisor    it alone: its shards have to end by themselves, in order; then all start again
    all           supervisor and shards at once; a server alone has only this
    a broker      a Redis, NATS, RabbitMQ or Kafka that it writes to; perhaps the server, too

A strike comes under load, as soon as a checkpoint shows in the files, as the hour changes, or while
a shard or the whole starts. A kill excuses a repetition only of the shards, or of the broker, that
it met; a supervisor's death excuses nothing. While the whole is down, in some rounds the files are
checked, and the clock of the next start is set forward to shortly before an hour begins.

In some rounds a backup is made under load; see `tests.crash.backups`.
"""

import asyncio
import contextlib
import os
import random
import time
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import ExitStack, asynccontextmanager
from enum import StrEnum
from pathlib import Path

from delayserver.cli.demo.process import ServerFailed, ServerProcess, free_port
from delayserver.cli.demo.sharded import ShardedServer
from storage.shards import shard_directory
from tests.crash.backups import Backups
from tests.harness.notes import Notes
from tests.harness.strikes import RoundPlan, Schedule, deck_of
from tests.harness.topology import Topology
from tests.harness.traffic import HOUR_MS, Doors, pause
from tests.sinks.programs import Broker
from tests.waiting import Looks, turns

CLIENTS = 8
LEAVE_SHARE = 0.05
CHECKPOINT_SHARE = 0.25
"""The share of the rounds in which the strike waits for a checkpoint."""
CHECKPOINT_WAIT_S = 1.5
LOOK_S = 0.0005
RECEIVE_TURNS = 10
"""Turns of the event loop; a delivery takes three, from the socket to the ledger."""
CHECK_SHARE = 0.3
"""The share of the starts of the whole before which the files are checked."""
HOUR_SHARE = 0.3
"""The share of the starts of the whole that come shortly before an hour begins."""
NEAR_HOUR_MS = 2500
"""A strike that falls so shortly before an hour waits for it."""
BOTH_SHARE = 0.25
"""The share of the kills of a broker in which the server is killed, too."""
AWAY_S = (0.0, 1.5)
"""A broker that was killed stays away for so long."""


class Blow(StrEnum):
    """The victim of a kill."""

    ONE = "one shard"
    TWO = "two shards"
    SUPERVISOR = "the supervisor"
    ALL = "all"

    REDIS = "redis"
    NATS = "nats"
    AMQP = "amqp"
    KAFKA = "kafka"


BLOWS = (Blow.ONE, 9), (Blow.TWO, 3), (Blow.SUPERVISOR, 3), (Blow.ALL, 5)
BROKERS = (Blow.REDIS, Blow.NATS, Blow.AMQP, Blow.KAFKA)


def schedule(shards: int, brokers: Collection[str] = ()) -> Schedule:
    """The schedule of kills: of a server alone, of shards, or of a server and its brokers."""
    if brokers:
        return Schedule((Blow.ALL, *BROKERS), (0.1, 1.2))
    deck = (Blow.ALL,) if shards == 1 else deck_of(BLOWS)
    return Schedule(deck, (0.1, 1.2), again_share=0.35)


class Servers(Topology):
    """A server on one data directory."""

    def __init__(
        self,
        notes: Notes,
        seed: int,
        *,
        shards: int = 1,
        brokers: Mapping[str, Broker] | None = None,
    ) -> None:
        self._server = _process(notes.directory, shards)
        doors = [self._server.url] * (1 if shards == 1 else CLIENTS)
        client = Doors(
            doors, random.Random(seed + 2), leave_share=0.0 if shards == 1 else LEAVE_SHARE
        )
        super().__init__(notes, client)
        self._all = range(shards)
        self._brokers = brokers or {}
        self._dead_brokers: list[str] = []
        # A shard may be away while a backup is made; the others go on.
        self._backups = None if brokers else Backups(notes, client, seed, may_fail=shards > 1)
        self._fate = random.Random(seed)
        """Decides about starts; the plan of each round about the round."""
        self._start_s = 0.7
        """How long the last start of the whole took."""
        self._is_meant = False
        """It was started, and neither killed nor stopped."""
        self._was_ready = False
        """Since the last start of the whole, all were there once."""
        self._may_give_up = False
        """A shard was killed before that, so the supervisor may have taken it for one that cannot
        start, which ends the whole."""

    @asynccontextmanager
    async def standing(self) -> AsyncIterator[None]:
        with ExitStack() as started:
            for broker in self._brokers.values():
                await asyncio.to_thread(started.enter_context, broker)
            with self._server:
                yield

    def data_dirs(self) -> list[Path]:
        return [self._server.data_dir]

    # ── a round ────────────────────────────────────────────────────────────────────────────────

    async def before(self, plan: RoundPlan) -> None:
        if self._backups is None:
            await asyncio.sleep(plan.load_s)
        else:
            await self._backups.under_load(plan.load_s)
        to_hour_ms = HOUR_MS - self.ledger.server_ms() % HOUR_MS
        if to_hour_ms < NEAR_HOUR_MS:
            await asyncio.sleep(to_hour_ms / 1000 + plan.chance.uniform(-0.02, 0.1))
            self.counts["kills as the hour changes"] += 1
        elif plan.chance.random() < CHECKPOINT_SHARE and await self._in_a_checkpoint(plan.chance):
            self.counts["kills in a checkpoint"] += 1

    async def _in_a_checkpoint(self, chance: random.Random) -> bool:
        """Wait until some shard files or commits; False if it does not.

        A checkpoint writes schedule files, syncs them, commits the catalog, deletes segments. The
        kill comes within a millisecond or two of the first change that shows."""
        directory = self._server.data_dir
        if len(self._all) > 1:
            directory /= shard_directory(chance.choice(self._all))
        sign, wait_s = chance.choice(("schedule", "catalog")), chance.uniform(0, 0.003)
        if not await asyncio.to_thread(_changes, directory / sign, CHECKPOINT_WAIT_S):
            return False
        await asyncio.sleep(wait_s)
        return True

    async def between(self, plan: RoundPlan) -> None:
        if not self._is_there():
            await self._launch(plan.chance)
        elif isinstance(self._server, ShardedServer):
            await asyncio.to_thread(self._server.wait_started)
        # Half of them before Python has read the program, half anywhere in the recovery.
        longest_s = plan.chance.choice((0.3, self._start_s * 1.1))
        await pause(plan.chance, 0, longest_s)
        self.counts["kills during start"] += self._is_there()

    async def strike(self, kind: StrEnum, plan: RoundPlan) -> None:
        if not self._is_there():
            return
        match kind:
            case Blow.ONE | Blow.TWO:
                await self._kill_shards(1 if kind is Blow.ONE else 2, plan.chance)
            case Blow.SUPERVISOR:
                await self._kill_supervisor()
            case Blow.ALL:
                await self._kill()
            case _:
                await self._kill_broker(kind)
                if plan.chance.random() < BOTH_SHARE:
                    await self._kill()
        if self._backups is not None:
            await self._backups.cut_off()

    async def well(self) -> None:
        if self._dead_brokers:
            await pause(self._fate, *AWAY_S)
        starts = [asyncio.to_thread(self._brokers[kind].start) for kind in self._dead_brokers]
        self._dead_brokers.clear()
        await asyncio.gather(self._back(), *starts)

    # ── kills ──────────────────────────────────────────────────────────────────────────────────

    async def _kill_shards(self, count: int, chance: random.Random) -> None:
        """Kill so many of those that run; there may be fewer while they start."""
        assert isinstance(self._server, ShardedServer)
        known = self._server.shards()
        others = [pid for pid in self._server.children() if pid not in known.values()]
        running = [known[shard] for shard in sorted(known)] + others
        victims = chance.sample(running, min(count, len(running)))
        met = set(self._server.kill_shards(victims))
        shards = {shard for shard, pid in known.items() if pid in met}
        if not met <= set(known.values()):
            # One that has not opened anything yet serves a shard that no other process serves.
            shards |= set(self._all) - set(known)
        await self._killed(shards, len(met))
        self._may_give_up |= not self._was_ready

    async def _kill_supervisor(self) -> None:
        assert isinstance(self._server, ShardedServer)
        self.ledger.went_down(self._all)
        self._is_meant = False
        self._server.kill_supervisor()
        self.counts["kills"] += 1
        await asyncio.to_thread(self._server.wait_left)

    async def _kill(self) -> None:
        if self._is_there():
            self._is_meant = False
            self._server.kill()
            await self._killed(self._all)

    async def _killed(self, shards: Collection[int], count: int = 1) -> None:
        """Note a kill. A delivery that was sent before it has arrived, but on a busy machine the
        receiver may not have seen it: at most one of each connection has to be read."""
        from_ms = self.ledger.now_ms()
        self.ledger.went_down(shards)
        await turns(RECEIVE_TURNS)
        self.ledger.struck(shards, from_ms, self.ledger.now_ms())
        self.counts["kills"] += count

    async def _kill_broker(self, kind: str) -> None:
        from_ms = self.ledger.now_ms()
        await asyncio.to_thread(self._brokers[kind].kill)
        self.ledger.struck([kind], from_ms, self.ledger.now_ms())
        self._dead_brokers.append(kind)

    def _is_there(self) -> bool:
        """Whether the server runs. Raises ServerFailed where it has ended without reason."""
        if self._server.is_running:
            return True
        if self._is_meant and not self._may_give_up:
            raise ServerFailed("the server ended by itself; see server.log")
        return False

    # ── starts and stops ───────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        await self._back()

    async def _back(self) -> None:
        """Wait until all are there: brought back by the supervisor, or started with it."""
        began_s = time.monotonic()
        while True:
            if not self._is_there():
                began_s = time.monotonic()
                await self._launch(self._fate)
            try:
                await asyncio.to_thread(self._server.wait_ready)
            except ServerFailed:
                if self._is_there() or len(self._all) == 1:
                    raise
                self.counts["starts given up"] += 1
            else:
                break
        if not self._was_ready:
            self._start_s = time.monotonic() - began_s
        self._was_ready, self._may_give_up = True, False
        self.ledger.came_back()

    async def _launch(self, chance: random.Random) -> None:
        """Start the whole; it is not ready yet. In some rounds its files are checked before."""
        if self._was_ready and chance.random() < CHECK_SHARE:
            await self.check()
        if self._was_ready and chance.random() < HOUR_SHARE:
            to_hour_ms = HOUR_MS - self.ledger.server_ms() % HOUR_MS
            before_ms = round(1000 * (self._start_s + chance.uniform(-0.3, 1.5)))
            self._set_forward((to_hour_ms - before_ms) % HOUR_MS)
            self.counts["hour changes"] += 1
        self._was_ready = self._may_give_up = False
        choose = chance.choice
        self._server.options = [
            f"--clock-offset-ms={self.ledger.clock.offset_ms}",
            f"--segment-bytes={choose((1 << 18, 1 << 20, 1 << 26))}",
            f"--checkpoint-ms={choose((50, 200, 1000))}",
            f"--settle-sync-ms={choose((0, 20, 100))}",
            # A publish that is asked again after the clock was set forward is still the same.
            "--dedupe-window-ms=2d",
            f"--retention-ms={choose((0, 1000, HOUR_MS))}",
            "--disk-reserve-bytes=1048576",
            *(self._backups.options() if self._backups is not None else []),
        ]
        self._is_meant = True
        self._server.start()

    def _set_forward(self, by_ms: int) -> None:
        """Set the clock of the next start."""
        now_ms = self.ledger.now_ms()
        self.ledger.clock.set(self.ledger.clock.offset_ms + by_ms, now_ms, now_ms)

    async def all_due(self) -> None:
        await self._kill()
        last_ms = max((max(one.due_ms, one.moving_ms) for one in self.ledger.orders), default=0)
        self._set_forward(max(0, last_ms - self.ledger.server_ms()))
        await self._back()

    async def stop(self) -> None:
        self.ledger.went_down(self._all)
        self._is_meant = False
        status = await asyncio.to_thread(self._server.stop)
        if status != 0:
            self.notes.fail(f"the server ended with status {status} after SIGTERM")

    async def ended(self) -> None:
        if self._backups is not None:
            await self._backups.compare()


def _process(directory: Path, shards: int) -> ServerProcess:
    data_dir, log_path = directory / "data", directory / "server.log"
    if shards == 1:
        return ServerProcess(data_dir, port=free_port(), log_path=log_path)
    return ShardedServer(data_dir, count=shards, port=free_port(), log_path=log_path)


def _changes(directory: Path, wait_s: float) -> bool:
    """Whether a file of a directory is written to within that time; returns as soon as one is."""
    before = _written_at(directory)
    return any(_written_at(directory) != before for _ in Looks(wait_s, LOOK_S))


def _written_at(directory: Path) -> set[tuple[str, int, int]]:
    found = set()
    for entry in os.scandir(directory):
        # A file may be deleted meanwhile; LMDB's readers write into its lock file all the time.
        with contextlib.suppress(FileNotFoundError):
            status = entry.stat()
            if entry.name != "lock.mdb":
                found.add((entry.name, status.st_mtime_ns, status.st_size))
    return found
