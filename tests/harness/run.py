"""A run: topology × strikes × traffic, judged by the rules of the ledger.

    start       all servers serve; the subscriptions are made
    each round  load; a strike, and perhaps others before all is well; then all is well again
    the end     the writers stop; everything falls due and is delivered; after a stop in order and
                one more start nothing may come again; the files are checked
    judgement   each rule of the run reads the ledger

One data directory (or one for each node) goes through all rounds. The seed decides which strikes
fall and which load there is, the machine how fast: a seed narrows a failure down, and the directory
that is kept shows it.

Cost: real time. Threads: the event loop.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from delayserver.cli.demo.ledger import Verdict, judge
from delayserver.cli.demo.process import ServerFailed
from delayserver.cli.demo.receiver import Receiver
from delayserver.client.errors import UnansweredError
from tests.harness.notes import Notes
from tests.harness.rules import EVERYWHERE, Rule
from tests.harness.strikes import Schedule
from tests.harness.topology import Topology
from tests.harness.traffic import Traffic

LOOK_S = 0.2
LATE_S = 10.0
"""A message that was named as unreadable is waited for so long, before the next start."""


@dataclass
class Outcome:
    """A run, judged."""

    run: "Run"
    verdict: Verdict
    """Figures; the rules of the run are in `broken`."""
    broken: dict[str, list[str]]
    """A sentence for each broken promise, by the name of the rule."""

    @property
    def notes(self) -> Notes:
        return self.run.notes

    @property
    def is_clean(self) -> bool:
        """Whether every promise was kept."""
        return not any(self.broken.values()) and not self.notes.failures


@dataclass
class Run:
    """One run. `rounds` or `seconds` says how long it goes on; `grace_s`: nobody waits longer for
    the next delivery at the end; `quiet_s`: for so long nothing may come behind the last."""

    name: str
    seed: int
    topology: Topology
    schedule: Schedule
    traffic: Traffic
    rounds: int = 0
    seconds: float | None = None
    rules: Mapping[str, Rule] = field(default_factory=lambda: EVERYWHERE)
    grace_s: float = 30.0
    quiet_s: float = 1.5
    report: Callable[["Run"], None] = lambda run: None
    rounds_done: int = 0
    passed_s: float = 0.0
    was_waited_for: bool = False
    """All had fallen due, and the servers had the time to deliver it."""

    def __post_init__(self) -> None:
        self.notes = self.topology.notes
        self.ledger = self.notes.ledger
        self.counts = self.notes.counts

    async def run(self) -> Outcome:
        """All rounds, then the end, then the judgement."""
        try:
            async with (
                self.topology.standing(),
                Receiver(self.traffic.on_webhook, self.topology.host) as receiver,
            ):
                try:
                    await self._live(receiver.url)
                finally:
                    await self.traffic.client.close()
        except* (ServerFailed, UnansweredError, OSError) as group:
            for error in _leaves(group):
                self.notes.fail(str(error) if isinstance(error, ServerFailed) else repr(error))
        broken = {name: list(rule(self.ledger)) for name, rule in self.rules.items()}
        if not self.was_waited_for:
            # The servers could not be asked for the rest: the failure is told, and nothing is lost
            # by that.
            self.counts["not waited for"] += len(broken.pop("lost", ()))
        return Outcome(self, judge(self.ledger, rules={}), broken)

    async def _live(self, url: str) -> None:
        await self.topology.start()
        await self.traffic.subscribe(url)
        async with going_on(self.traffic.readers()):
            async with going_on((*self.traffic.writers(), *self.topology.watching())):
                began_s = time.monotonic()
                while self._goes_on(began_s):
                    await self._round()
            self.notes.doing = "ends"
            await self.traffic.followed(self.grace_s)
            await self.topology.all_due()
            await self._drain()
            await self.traffic.look()
            self._look_for_missing()
        await self.traffic.client.close()
        await self.topology.look()
        await self._stop()
        await self.topology.start()
        async with going_on(self.traffic.readers()):
            await self._drain()
        await self._stop()
        await self.traffic.ended()
        await self.topology.ended()

    def _goes_on(self, began_s: float) -> bool:
        self.passed_s = time.monotonic() - began_s
        self.report(self)
        if self.seconds is not None:
            return self.passed_s < self.seconds
        return self.rounds_done < self.rounds

    async def _round(self) -> None:
        plan = self.schedule.round(self.seed, self.rounds_done)
        await self.topology.before(plan)
        for index, kind in enumerate(plan.strikes):
            if index:
                await self.topology.between(plan)
            self.notes.doing = str(kind)
            self.report(self)
            await self.topology.strike(kind, plan)
            self.counts[f"strikes, {kind}"] += 1
        await self.topology.well()
        await self.topology.settle(plan)
        self.notes.doing = "load"
        self.rounds_done += 1

    async def _drain(self) -> None:
        """Wait until all that is due has come, and then for what must not come behind it."""
        count, since_s = -1, time.monotonic()
        while count and (waited_s := time.monotonic() - since_s) < self.grace_s:
            await asyncio.sleep(LOOK_S)
            await self.traffic.read()
            self.report(self)
            if self.ledger.open_count != count:
                count, since_s = self.ledger.open_count, time.monotonic()
            elif waited_s > LATE_S and count <= self.topology.unreadable():
                break  # A message that cannot be read does not come before the next start.
        self.was_waited_for = True
        await asyncio.sleep(self.quiet_s)

    def _look_for_missing(self) -> None:
        missing, named = self.ledger.open_count, self.topology.unreadable()
        self.counts["delivered after the last start"] = missing
        if missing > named:
            self.notes.fail(f"{missing} messages did not come, and {named} at most are unreadable")

    async def _stop(self) -> None:
        await self.topology.stop()
        await self.topology.check()


@asynccontextmanager
async def going_on(work: Iterable[Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    """Work for as long as the block lasts. An error in it ends the block."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one) for one in work]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()


def _leaves(group: BaseExceptionGroup) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
