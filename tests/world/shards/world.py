"""A world of several shards: a machine, many lives of each shard, and a scheduler with a seed.

    World ── chooses ──▶ a thread or the event loop of a shard, something under way between two,
      │                  the clock, somebody outside, or the end of a shard, or of all
      └── Promises: checked at each answer, whenever nothing is under way, and in the end

A cycle is a life of some shard. The seed decides everything, so a seed that fails fails again.

Cost: some 30 ms for a life. Threads: none.
"""

import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Self

from delayserver.decisions.retries import RETRY_COMMIT_MS
from delayserver.parts.schedules.scheduling import Scheduling
from delayserver.records.sharding import shard_of_name
from delayserver.shards.allotment import quiet_ms
from storage.rows import HOUR_MS
from tests.world.feeders import SHORT_DELAYS, Feeders, end_sources
from tests.world.feeders import Act as SourceAct
from tests.world.schedulers import Act, Schedulers, end_schedules
from tests.world.shards.clients import Definers, Publishers, Receivers
from tests.world.shards.consumers import DAY_MS, ShardConsumers
from tests.world.shards.machine import MachineShard, ShardsMachine
from tests.world.shards.promises import Promises
from tests.world.storage.faults import Faults
from tests.world.violation import Violation

LIVES = 12
"""Of all shards of a world together, besides the last one of each."""
STEPS = 60
"""Of each living shard in a life, about."""


QUIET_ROUNDS = 6
"""In which nothing comes any more, a second each."""


class ShardsStep(NamedTuple):
    """Something that may happen next."""

    do: Callable[[], object]
    weight: float
    is_possible: Callable[[], object] = lambda: True


class ShardsWorld:
    """One seed."""

    def __init__(self, seed: int, count: int) -> None:
        self.seed = seed
        self.rng = rng = random.Random(f"{count} shards {seed}")
        self.counts: Counter[str] = Counter()
        self.promises = Promises()
        self.machine = ShardsMachine(rng, count, self.counts, self.promises)
        self.promises.machine = self.machine
        self.publishers = Publishers(self.machine, self.promises)
        self.receivers = Receivers(self.machine)
        self.definers = Definers(self.machine, self.promises)
        self.consumers = ShardConsumers(self.machine, self.promises)
        self.schedulers = Schedulers(
            f"{count} shards {seed}", self.counts, self._ask_for_schedule, (300, 2000, 20_000)
        )
        self.feeders = Feeders(
            f"{count} shards {seed}", self.counts, self._ask_for_source, SHORT_DELAYS, 0.03
        )
        self.machine.started = self._started
        self.promises.ended = self._ended
        self._steps = self._all_steps()

    @property
    def all_counts(self) -> Counter[str]:
        """What happened, and how often."""
        ledgers = (shard.ledger.counts for shard in self.machine.shards)
        return sum(ledgers, self.counts + self.promises.counts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for shard in self.machine.up():
            shard.running.event_loop.abandon()

    def _started(self, shard: MachineShard) -> None:
        self.feeders.begin(shard.running, shard.ledger.sources)

    def _ended(self, shard: int) -> None:
        self.consumers.ended(shard)
        self.definers.ended(shard)

    # ── lives ──────────────────────────────────────────────────────────────────────────────────

    def live(self, lives: int) -> None:
        """So many lives of shards, from the first start on."""
        rng, machine = self.rng, self.machine
        self._start_all(Faults())
        self._make_whole()
        while self.counts["lives"] < lives:
            weights = [step.weight * rng.choice((0.2, 1.0, 1.0, 2.0)) for step in self._steps]
            for _ in range(rng.choice((1, 2)) * STEPS * machine.count):
                self._step(weights)
                if not machine.up():
                    break
            self._end_some()

    def _pull_and_end(self) -> None:
        """Consumers pull, and while parts are on their way a shard ends."""
        for _ in range(3):
            self.publishers.publish()
            if self.machine.up():
                self.consumers.pull()
        moves = self._steps[:3]
        for _ in range(self.rng.randrange(50)):
            if self.machine.up():
                self.rng.choice(moves).do()

    def _end_some(self) -> None:
        if self.rng.random() < 0.6 and self.machine.up():
            self._pull_and_end()
        rng, up = self.rng, self.machine.up()
        is_all = rng.random() < 0.25
        power_loss = rng.random() < 0.4
        ending = up if is_all else [rng.choice(up)] if up else []
        for shard in ending:
            self.counts["power loss" if power_loss else "kill"] += 1
            shard.end(power_loss=power_loss)
        if not self.machine.up():
            self.machine.start(rng.choice(self.machine.shards), self.machine.plan())

    def _start_all(self, faults: Faults) -> None:
        for shard in self.machine.shards:
            if not shard.is_up:
                self.machine.start(shard, faults)

    def _make_whole(self) -> None:
        """Until all have met, without faults."""
        for _ in range(100):
            for shard in self.machine.shards:
                shard.faults.faults.clear()
                if not shard.is_up:
                    self.machine.start(shard, Faults())
            if self.machine.settle() and self.machine.is_whole:
                return
            self.machine.let_pass(100)
        raise Violation("the shards do not find each other")

    # ── steps ──────────────────────────────────────────────────────────────────────────────────

    def _all_steps(self) -> tuple[ShardsStep, ...]:
        machine, consumers = self.machine, self.consumers
        return (
            ShardsStep(self._turn, 12),
            ShardsStep(self._work, 14),
            ShardsStep(machine.arrive, 14),
            ShardsStep(self._tick, 3),
            ShardsStep(self._let_pass, 2),
            ShardsStep(self.publishers.publish, 2),
            ShardsStep(self.publishers.cancel, 0.5),
            ShardsStep(self.definers.change, 0.8),
            ShardsStep(self.receivers.answer, 2),
            ShardsStep(consumers.pull, 1.5),
            ShardsStep(consumers.leave, 0.3, lambda: consumers.asking),
            ShardsStep(consumers.end, 1.5, lambda: self.promises.held),
            ShardsStep(self._start_one, 0.8, lambda: len(machine.up()) < machine.count),
            ShardsStep(self._heal, 0.2),
            ShardsStep(self._settle, 0.6),
        )

    def _step(self, weights: list[float]) -> None:
        while self.machine.up():
            step = self.rng.choices(self._steps, weights)[0]
            if step.is_possible():
                step.do()
                self.schedulers.maybe_act(self.machine.clock.now_ms)
                self.feeders.maybe_act(self.machine.clock.now_ms)
                return

    def _ask_for_schedule(self, name: str, act: Act) -> None:
        """The shard of its name has a schedule, as the router has it."""
        shard = self.machine.shards[shard_of_name(name, self.machine.count)]
        if shard.is_up:
            shard.guard(lambda: act(shard.running.engine, shard.ledger.schedules))

    def _ask_for_source(self, name: str, act: SourceAct) -> None:
        """So is a source."""
        shard = self.machine.shards[shard_of_name(name, self.machine.count)]
        if shard.is_up:
            shard.guard(lambda: act(shard.running.engine))

    def _one(self) -> MachineShard:
        return self.rng.choice(self.machine.up())

    def _turn(self) -> None:
        shard = self._one()
        for _ in range(self.rng.randrange(1, 8)):
            if shard.is_up and shard.running.has_callbacks:
                shard.guard(shard.running.turn)

    def _work(self) -> None:
        shard, rng = self._one(), self.rng
        server = shard.running
        if server.event_loop.has_threads:
            shard.guard(server.event_loop.run_thread)
            return
        busy = [worker for worker in server.workers if worker.backlog]
        worker = rng.choice(busy or [server.settling, server.replayer])
        self.machine.run(shard, worker, rng.randrange(1, 8))

    def _tick(self) -> None:
        shard = self._one()
        shard.guard(shard.tick)

    def _let_pass(self) -> None:
        rng, clock, let_pass = self.rng, self.machine.clock, self.machine.let_pass
        dice = rng.random()
        if dice < 0.9:
            let_pass(rng.choice((0, 1, 3, 10, 40, 120)))
        elif dice < 0.99:
            let_pass(rng.choice((1000, 3000)))
        else:
            let_pass(HOUR_MS - clock.now_ms % HOUR_MS + rng.choice((-2, 0, 1)))
            self.counts["hour changes"] += 1

    def _start_one(self) -> None:
        down = [shard for shard in self.machine.shards if not shard.is_up]
        self.machine.start(self.rng.choice(down), self.machine.plan())

    def _heal(self) -> None:
        for shard in self.machine.shards:
            if shard.faults.struck:
                shard.faults.faults.clear()

    def _settle(self) -> None:
        machine = self.machine
        if machine.settle() and machine.is_whole:
            self.promises.check_settled()

    # ── the end ────────────────────────────────────────────────────────────────────────────────

    def finish(self) -> None:
        """The world quietens down: no faults, all shards live, everybody is patient."""
        machine, promises = self.machine, self.promises
        self._make_whole()
        self._end_schedules()
        self._end_sources()
        self.receivers.is_patient = self.consumers.is_patient = True
        quiet_rounds = 0
        for _ in range(400):
            self._make_whole()
            promises.check_settled()
            self.definers.put_always()
            self._settle_whole()
            while any(shard.running.sending for shard in machine.shards):
                self.receivers.answer()
                self._settle_whole()
            self._take_all()
            promises.check_settled()
            promises.forget_what_is_over()
            quiet_rounds = quiet_rounds + 1 if self._is_done() else 0
            if quiet_rounds == QUIET_ROUNDS:
                break
            machine.let_pass(self._wait_ms())
        else:
            raise Violation("it never comes to rest")
        # What was out of webhooks that were deleted counts for so long.
        machine.let_pass(self._quiet_ms())
        self._settle_whole()
        self.consumers.check_answered()
        promises.check_nothing_is_left()
        for shard in machine.shards:
            shard.ledger.check_all_delivered()

    def _end_schedules(self) -> None:
        """All that was due has run; with them nothing would ever come to rest."""
        machine = self.machine
        # A schedule that was refused is tried again after so long.
        machine.let_pass(RETRY_COMMIT_MS)
        self._make_whole()
        for _ in range(200):
            now_ms = machine.clock.now_ms
            engines = [shard.running.engine for shard in machine.shards]
            if all(engine.part(Scheduling).wait_ms(now_ms) > 0 for engine in engines):
                break
            machine.let_pass(10)
            self._make_whole()
        for shard in machine.shards:
            shard.ledger.schedules.check_none_is_late(machine.clock.now_ms)
            shard.guard(partial(end_schedules, shard.running.engine, shard.ledger.schedules))
        self._make_whole()

    def _end_sources(self) -> None:
        """All that stands in their topics is published, each record once."""
        machine, now_ms = self.machine, self.machine.clock.now_ms
        for shard in machine.shards:
            shard.guard(partial(self.feeders.have_all_taken, shard.running.engine, now_ms))
        for _ in range(20):  # some feeds fail, and are opened again after a pause
            self._make_whole()
            machine.let_pass(1000)
        for shard in machine.shards:
            shard.ledger.sources.check_all_taken(self.feeders.ends)
            shard.guard(partial(end_sources, shard.running.engine))
        self._make_whole()

    def _settle_whole(self) -> None:
        if not self.machine.settle():
            raise Violation("a shard ended without a fault")

    def _take_all(self) -> None:
        """Pull at any process, and acknowledge all of it."""
        self.consumers.pull_all(self._settle_whole)

    def _is_done(self) -> bool:
        now_ms = self.machine.clock.now_ms
        return (
            not self.promises.held
            and all(due <= now_ms for one in self.machine.shards for due in one.ledger.due_times())
            and not self.consumers.asking
            and not any(
                shard.running.sending or shard.running.engine.hours.unsettled()
                for shard in self.machine.shards
            )
        )

    def _quiet_ms(self) -> int:
        """After this time no request of a subscription that there ever was is out."""
        ledgers = [shard.ledger for shard in self.machine.shards]
        return max(quiet_ms(one) for ledger in ledgers for one in ledger.subscriptions.values())

    def _wait_ms(self) -> int:
        """Until the next row falls due in any shard, or until what is tried again may be."""
        shards, now_ms = self.machine.shards, self.machine.clock.now_ms
        if self.promises.held:
            # Of subscriptions that are gone: nobody can say any more that he is done with it.
            return DAY_MS
        dues = (due for one in shards for due in one.ledger.due_times())
        return min([due + 5 - now_ms for due in dues if due > now_ms] + [1_000])


def run_shards_world(seed: int, *, count: int = 3, lives: int = LIVES) -> ShardsWorld:
    """One world from its first to its last life. Raises Violation."""
    with ShardsWorld(seed, count) as world:
        world.live(lives)
        world.finish()
    return world
