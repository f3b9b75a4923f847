"""The crash harness: a real server under load, killed at random moments, judged by a ledger.

    load          `tests.load`: publishes, batches, cancels and moves; a webhook and consumers
    each round    start, perhaps killed while it recovers; load; SIGKILL at a random moment, or as
                  soon as a checkpoint shows in the files
    some rounds   a backup is made meanwhile; what is complete is restored in the end, and compared
    some rounds   the clock is set forward so that the hour changes within the round
    the end       all that is open has to be delivered, and after a graceful stop and one more start
                  nothing may come again

`tests.crash.shards` does the same to a server of several shards.

One data directory goes through all rounds. What counts as a broken promise is defined in
`delayserver.cli.demo.ledger`. The seed decides what happens to the server and which load it gets,
the machine how fast: a seed narrows a failure down, and the directory that is kept shows it.
"""

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from pathlib import Path
from typing import Any, Required, TypedDict

from delayserver.cli.demo.ledger import (
    RECEIVE_MS,
    DemoLedger,
    Outage,
    judge,
)
from delayserver.cli.demo.process import ServerFailed, ServerProcess, damage_in, free_port
from delayserver.cli.demo.receiver import Receiver
from delayserver.cli.demo.shop import call
from delayserver.cli.session import path
from delayserver.client.errors import UnansweredError
from delayserver.client.transport import HttpTransport, Transport
from tests.crash.backups import Facts
from tests.load import CONSUMED, HOUR_MS, RETRY_S, Load, pause
from tests.long_run import Outcome
from tests.waiting import Looks

CONSUMERS = 2
GRACE_S = 30.0
QUIET_S = 1.5
LOAD_S = (0.1, 1.2)
"""How long the load of a round lasts, at least and at most."""
CHECKPOINT_SHARE = 0.25
"""Of the rounds: the kill waits for a checkpoint."""
CHECKPOINT_WAIT_S = 1.5
LOOK_S = 0.0005
RECEIVE_TURNS = 10
"""Of the event loop; a delivery takes three, from the socket to the ledger."""
BACKUP_SHARE = 0.5
"""Of the rounds: a backup is begun with the load."""
BACKUP_WAIT_SHARE = 0.6
"""Of these: the load goes on until it is complete."""
BACKUP_POLL_S = 0.02
MOMENT_SHARE = 0.7
"""Of the rounds behind the first backup: a moment is noted, which is to be restored."""
CHECK_SHARE = 0.3
"""Of the rounds: the files are checked while the server is down."""


class RunOptions(TypedDict, total=False):
    """What all kinds of runs are given. See `CrashRun`."""

    seed: Required[int]
    rounds: Required[int]
    minutes: float | None
    report: Callable[["CrashRun"], None]


class CrashRun(Load[DemoLedger]):
    """One run on one data directory."""

    PUBLISHERS = 8
    makes_backups = True
    backups_may_fail = False
    """Because a part of the server is killed, and the rest goes on."""

    def __init__(
        self,
        directory: Path,
        *,
        seed: int,
        rounds: int,
        minutes: float | None = None,
        report: Callable[["CrashRun"], None] = lambda run: None,
        ledger: DemoLedger | None = None,
    ) -> None:
        super().__init__(DemoLedger() if ledger is None else ledger, seed + 1)
        self.rounds = rounds
        self.rounds_done = 0
        self._seed = seed
        # What happens to the server does not depend on how far the load happens to get.
        self._fate = random.Random(seed)
        # What was added later must not change what becomes of a seed.
        self._backup_fate = random.Random(seed + 2)
        self._backups: list[Facts] = []
        self._moments: list[Facts] = []
        self._directory = directory
        self._deadline_s = None if minutes is None else time.monotonic() + 60 * minutes
        self._report = report
        self._start_s = 0.7
        self._down_ms: int | None = None
        self._was_waited_for = False
        """All had fallen due, and the server had the time to deliver it."""

    async def run(self) -> Outcome:
        """All rounds, then the end."""
        self._server = self._make_server(
            self._directory / "data", free_port(), self._directory / "server.log"
        )
        self._client = self._make_client(self._server.url)
        async with Receiver(self._on_webhook) as receiver:
            with self._server:
                try:
                    await self._live(receiver.url)
                except* ServerFailed as group:
                    self.failures += [str(error) for error in group.exceptions]
        await self._client.close()
        verdict = judge(self.ledger)
        if not self._was_waited_for:
            # The server could not be asked for the rest: what failed is told, and nothing is lost
            # by that.
            self.counts["not waited for"] += len(verdict.lost)
            verdict.lost = []
        return Outcome(
            "crash",
            self._seed,
            self._directory,
            self.ledger,
            verdict,
            self.failures,
            self.counts,
        )

    def _make_server(self, data_dir: Path, port: int, log_path: Path) -> ServerProcess:
        return ServerProcess(data_dir, port=port, log_path=log_path)

    def _make_client(self, url: str) -> Transport:
        return HttpTransport(url)

    async def _live(self, url: str) -> None:
        await self._start()
        await self._subscribe(url)
        async with asyncio.TaskGroup() as tasks:
            consumers = [tasks.create_task(work) for work in self._consumers()]
            publishers = [tasks.create_task(self._publish()) for _ in range(self.PUBLISHERS)]
            while self._goes_on():
                await self._round()
                self.rounds_done += 1
                self._report(self)
            await self._end(publishers)
            for consumer in consumers:
                consumer.cancel()

    def _consumers(self) -> list[Coroutine[Any, Any, None]]:
        """What goes on from the first start to the end."""
        return [self._consume(name) for name in CONSUMED for _ in range(CONSUMERS)]

    def _goes_on(self) -> bool:
        if self._deadline_s is not None:
            return time.monotonic() < self._deadline_s
        return self.rounds_done < self.rounds

    # ── the server's life ──────────────────────────────────────────────────────────────────────

    async def _round(self) -> None:
        """Load until the kill, and the next start, which may be killed as well."""
        backup = self._begin_backup()
        await self._load_for(self._fate.uniform(*LOAD_S))
        if backup is not None and self._backup_fate.random() < BACKUP_WAIT_SHARE:
            await asyncio.wait([backup], timeout=GRACE_S)
        if self._fate.random() < CHECKPOINT_SHARE and await self._in_a_checkpoint():
            self.counts["kills in a checkpoint"] += 1
        await self._kill()
        if backup is not None:
            await backup
        if self._fate.random() < CHECK_SHARE:
            await self._check()
        if self._fate.random() < 0.3:
            await self._come_near_the_hour()
        while self._fate.random() < 0.35:
            self._launch()
            # Half of them before Python has read the program, half anywhere in the recovery.
            longest_s = self._fate.choice((0.3, self._start_s * 1.1))
            await pause(self._fate, 0, longest_s)
            await self._kill()
            self.counts["kills during start"] += 1
        await self._start()

    def _begin_backup(self) -> asyncio.Task[None] | None:
        if self.makes_backups and self._backup_fate.random() < BACKUP_SHARE:
            return asyncio.create_task(self._back_up(f"round-{self.rounds_done}"))
        return None

    async def _load_for(self, s: float) -> None:
        """Let the load go on, and note a moment in it."""
        before_s = s
        if self._backups and self._backup_fate.random() < MOMENT_SHARE:
            before_s = self._backup_fate.uniform(0, s)
        await asyncio.sleep(before_s)
        if before_s < s:
            facts = Facts(
                f"moment-{self.rounds_done}",
                self.ledger.orders,
                self.ledger.offset_ms,
                self.ledger.now_ms(),
            )
            await asyncio.sleep(0.002)  # what is made from here on is later by the clock
            facts.completed()
            self._moments.append(facts)
            self.counts["moments"] += 1
        await asyncio.sleep(s - before_s)

    async def _back_up(self, name: str) -> None:
        """Make a backup, unless the kill comes before it is complete."""
        facts = Facts(name, self.ledger.orders, self.ledger.offset_ms)
        where = path("backups", name)
        try:
            status, answer = await self._ask_for("POST", path("backups"), {"name": name})
            while status in (200, 202) and answer["state"] == "running":
                await asyncio.sleep(BACKUP_POLL_S)
                status, answer = await self._ask_for("GET", where)
        except UnansweredError:
            self.counts["backups cut off"] += 1
            return
        if answer.get("state") != "complete" and self.backups_may_fail:
            self.counts["backups cut off"] += 1
            return
        if answer.get("state") != "complete":
            self.failures.append(f"the backup {name} came to nothing: {answer}")
            return
        facts.completed()
        self._backups.append(facts)
        self.counts["backups"] += 1

    async def _ask_for(self, method: str, where: str, document: object = None) -> tuple[int, Any]:
        """One request about a backup. Raises UnansweredError."""
        if not self.backups_may_fail:
            return await self._ask_once(method, where, document)
        status, answer = await call(self._client, method, where, document)
        if status >= HTTPStatus.BAD_REQUEST:
            # A shard is away, or still makes its part of one that was cut off.
            raise UnansweredError(f"{status} {answer}")
        return status, answer

    async def _compare_backups(self) -> None:
        """Nothing runs any more: restore each backup and each moment, and ask it for what the
        ledger had."""
        for facts in (*self._backups, *self._moments):
            restored = self._directory / "restored" / facts.name
            self.failures += await asyncio.to_thread(facts.broken_in, self._backup_dir, restored)

    @property
    def _backup_dir(self) -> Path:
        return self._directory / "backups"

    async def _in_a_checkpoint(self) -> bool:
        """Wait until the server files or commits; False if it does not.

        A checkpoint writes schedule files, syncs them, commits the catalog, deletes segments. The
        kill comes within a millisecond or two of what is seen of it."""
        sign = self._fate.choice(("schedule", "catalog"))
        wait_s = self._fate.uniform(0, 0.003)
        directory = self._shard_directory() / sign
        if not await asyncio.to_thread(_changes, directory, CHECKPOINT_WAIT_S):
            return False
        await asyncio.sleep(wait_s)
        return True

    def _shard_directory(self) -> Path:
        """The directory of a server alone, which is looked at for checkpoints."""
        return self._server.data_dir

    async def _kill(self) -> None:
        if not self._server.is_running:
            raise ServerFailed("the server ended by itself; see server.log")
        if self._down_ms is None:
            self._down_ms = self.ledger.now_ms()
        self._server.kill()
        self.ledger.kills_ms.append(self.ledger.now_ms())
        self.counts["kills"] += 1
        await self._receive_all()
        self.ledger.kills_ms.append(self.ledger.now_ms())

    async def _receive_all(self) -> None:
        """What was sent before a kill has arrived, but on a busy machine the receiver may not have
        seen it. At most one delivery of each connection has to be read."""
        for _ in range(RECEIVE_TURNS):
            await asyncio.sleep(0)

    async def _receive_by_this_clock(self) -> None:
        """The server is down, and its next start has another clock. A delivery that it has sent,
        and that its receiver reads later than that, would be held against the new one."""
        await asyncio.sleep(RECEIVE_MS / 1000)

    async def _come_near_the_hour(self) -> None:
        """Set the clock of the next start forward, to shortly before an hour begins."""
        await self._receive_by_this_clock()
        to_hour_ms = HOUR_MS - self.ledger.now_ms() % HOUR_MS
        before_ms = round(1000 * (self._start_s + self._fate.uniform(-0.3, 1.5)))
        self.ledger.offset_ms += (to_hour_ms - before_ms) % HOUR_MS
        self.counts["hour changes"] += 1

    def _launch(self) -> None:
        choose = self._fate.choice
        self._server.options = [
            f"--clock-offset-ms={self.ledger.offset_ms}",
            f"--segment-bytes={choose((1 << 18, 1 << 20, 1 << 26))}",
            f"--checkpoint-ms={choose((50, 200, 1000))}",
            f"--settle-sync-ms={choose((0, 20, 100))}",
            # A publish that is asked again after the clock was set forward is still the same.
            "--dedupe-window-ms=2d",
            f"--retention-ms={choose((0, 1000, HOUR_MS))}",
            "--disk-reserve-bytes=1048576",
            *(self._backup_options() if self.makes_backups else []),
        ]
        self._server.start()

    def _backup_options(self) -> list[str]:
        # As long as a step of the copy takes, and too long for a round.
        interval_ms = self._backup_fate.choice((1, 50, 400, 10_000))
        return [f"--backup-dir={self._backup_dir}", f"--backup-log-ms={interval_ms}"]

    async def _start(self) -> None:
        began_s = time.monotonic()
        self._launch()
        await asyncio.to_thread(self._server.wait_ready)
        self._start_s = time.monotonic() - began_s
        if self._down_ms is not None:
            self.ledger.outages.append(Outage(self._down_ms, self.ledger.now_ms()))
            self._down_ms = None

    async def _end(self, publishers: list[asyncio.Task[None]]) -> None:
        """Everything falls due and is delivered; then nothing comes any more."""
        await self._publish_no_more(publishers)
        await self._kill()
        await self._receive_by_this_clock()
        self._let_all_fall_due()
        await self._start()
        async for _ in Looks(GRACE_S, RETRY_S):
            if not self.ledger.open_count:
                break
            self._report(self)
        self._was_waited_for = True
        await self._stop_when_quiet()
        await self._start()
        await self._stop_when_quiet()
        await self._check()
        await self._compare_backups()

    async def _publish_no_more(self, publishers: list[asyncio.Task[None]]) -> None:
        for publisher in publishers:
            publisher.cancel()
        await asyncio.gather(*publishers, return_exceptions=True)
        if self._follow_ups:
            await asyncio.wait(self._follow_ups, timeout=GRACE_S)

    def _let_all_fall_due(self) -> None:
        last_ms = max((order.due_ms for order in self.ledger.orders), default=0)
        self.ledger.offset_ms += max(0, last_ms - self.ledger.now_ms())

    async def _check(self) -> None:
        self.counts["checks of the files"] += 1
        self.failures += await asyncio.to_thread(damage_in, self._server.data_dir)

    async def _stop_when_quiet(self) -> None:
        """Nothing is open any more: a message that comes within this time comes again."""
        await asyncio.sleep(QUIET_S)
        await self._stop()

    async def _stop(self) -> None:
        status = await asyncio.to_thread(self._server.stop)
        if status != 0:
            self.failures.append(f"the server ended with status {status} after SIGTERM")


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
