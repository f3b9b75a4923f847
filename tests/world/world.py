"""The world around one server: a machine, many lives of the server on it, and a scheduler with a
seed, which chooses whose turn it is: a thread, the event loop, the clock, or somebody outside.

Cost: a few milliseconds per life. Threads: none.
"""

import itertools
import random
from collections import Counter
from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from typing import Any, NamedTuple, Self

import msgspec

from delayserver.config import Settings
from delayserver.decisions.retries import RETRY_COMMIT_MS
from delayserver.parts.heartbeats.heartbeats import Heartbeats
from delayserver.parts.imports.imports import Imports
from delayserver.parts.schedules.scheduling import Scheduling
from delayserver.records.subscriptions import Subscription
from storage import staging
from storage.buckets import bucket_path
from storage.catalog import Table
from storage.errors import ShortageError, StorageError
from storage.files import size_of
from storage.rows import HOUR_MS, LogKind
from tests.world.clients import Clients
from tests.world.definitions import check_definitions
from tests.world.feeders import Act as SourceAct
from tests.world.feeders import Feeders, end_sources
from tests.world.ledger import Ledger
from tests.world.operators import Operators
from tests.world.schedulers import Act, Schedulers, end_schedules
from tests.world.server import SimulatedClock, SimulatedServer
from tests.world.storage.catalog import MemoryCatalog
from tests.world.storage.faults import Fault, FaultKind, Faults, FaultyFiles, Moment, SimulatedCrash
from tests.world.storage.files import SimulatedFiles
from tests.world.subscribers import Subscribers
from tests.world.violation import Violation

GROUPS_SHARE = 0.3
"""Of the worlds; those in which a group goes in single file take longer to come to rest."""
REST_SHARE = 0.3
"""Of their lives, at the end of which all do what they have to do."""


class Step(NamedTuple):
    """Something that may happen next."""

    do: Callable[[], None]
    weight: float
    is_possible: Callable[[], object] = lambda: True


class Theme(Enum):
    """What happens more often in a world than in others: together it would be rare."""

    SET_BACK = auto()
    """The clock is set back by hours, and whoever archives takes his time: hours come back. What
    waits for a rate must not stand still."""
    REDEFINED = auto()
    """Subscriptions are changed, also while they are being changed, and receivers are gone."""
    FAR = auto()
    """Much is due in days, and the clock makes long jumps."""


def theme_of(seed: int) -> Theme | None:
    """That of the world of a seed."""
    themes: tuple[Theme | None, ...] = (None, None, *Theme)
    return random.Random(f"theme {seed}").choice(themes)


def has_groups(seed: int) -> bool:
    """Whether messages of the world of a seed have groups."""
    return random.Random(f"has groups {seed}").random() < GROUPS_SHARE


class World:
    """One seed: a machine, many lives of a server on it, and what everybody did."""

    make_ledger: Callable[[], Ledger] = Ledger
    make_clock: Callable[[], SimulatedClock] = SimulatedClock
    bad_sectors_share = 0.01
    """Before how many steps a device loses something, if it has lost nothing in this life."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        # Of its own, since it is asked now and then without anything coming of it.
        self._disk_luck = random.Random(seed + 1)
        self._device_luck = random.Random(f"device {seed}")
        self._bad_hour: int | None = None
        """The hour whose file cannot be read to its end."""
        self._was_bad = False
        """There was one in this life."""
        self._clock_luck = random.Random(f"clock {seed}")
        self._descriptor_luck = random.Random(f"descriptors {seed}")
        self._connection_luck = random.Random(f"connections {seed}")
        self._group_luck = random.Random(f"groups {seed}")
        self._theme = theme_of(seed)
        self.seed = seed
        self.clock = self.make_clock()
        self.ledger = self.make_ledger()
        self.ledger.present = self.clock.stopwatch_ms
        self.ledger.clock = self.clock
        self._held_up: dict[int, int] = {}
        """Queues whose rows may leave, and do not → since when, on the stopwatch."""
        self.counts: Counter[str] = Counter()
        # Without looking at the environment, which takes longer than many a life.
        self.settings = Settings.model_construct(
            segment_bytes=4096,
            file_ms=self._disk_luck.choice((20, 1000)),
            checkpoint_ms=rng.choice((50, 200, 1000)),
            checkpoint_bytes=rng.choice((2000, 64 << 20)),
            lead_ms=rng.choice((1, 50, 1000, HOUR_MS // 2)),
            retention_ms=rng.choice((0, 0, 1000, 2 * HOUR_MS)),
            dedupe_window_ms=rng.choice((0, 100, 6 * HOUR_MS)),
            settle_sync_ms=rng.choice((0, 20, 100)),
            group_max_bytes=1 << 20,
            fire_rows_max=rng.choice((2, 10_000)),
            webhook_connections_max=self._connection_luck.choice((1024, 1024, 2)),
            # Each of its own, so that what happens in a world does not depend on it.
            archive=random.Random(f"keep {seed}").random() < 0.5,
        )
        self.ledger.archive = self.settings.archive
        self.ledger.may_be_damaged = lambda: self._was_bad or bool(self.faults.struck)
        self.disk = SimulatedFiles(rng=rng)
        self.catalog = MemoryCatalog()
        self.faults = Faults()
        self.server: SimulatedServer | None = None
        shared = (rng, self.clock, self.ledger, self.counts)
        self.clients = Clients(*shared)
        self.subscribers = Subscribers(*shared)
        self.schedulers = Schedulers(str(seed), self.counts, self._ask_for_schedule)
        self.feeders = Feeders(str(seed), self.counts, self._ask_for_source)
        is_set_back = self._theme is Theme.SET_BACK
        self.operators = Operators(*shared, seed, rates_share=0.9 if is_set_back else 0.25)
        self.clients.is_far_sighted = self._theme is Theme.FAR
        self.clients.has_groups = has_groups(seed)
        if is_set_back:
            self.operators.copies_share = 0.97
        self._steps = self._all_steps()
        self._weights: tuple[float, ...] = ()
        """Of the steps; each is the sum of all up to it."""

    def live(self, steps: int) -> None:
        """One life, from recovery to its end, whatever that is."""
        rng = self.rng
        self.counts["lives"] += 1
        self.ledger.new_life()
        self.abandon()
        self.faults = self._plan()
        self.catalog.faults = self.faults
        self.disk.on_sync = self._slow_syncs()
        # A bias of its own in every life: one thread may starve, another be everywhere first.
        weights = (step.weight * rng.choice((0.1, 1.0, 1.0, 3.0)) for step in self._steps)
        self._weights = tuple(itertools.accumulate(weights))
        ending = "power loss" if rng.random() < 0.5 else "kill"
        is_up = False
        try:
            self._start()
            is_up = True
            if rng.random() < 0.4:
                self.operators.redrive_all()
            self.operators.maybe_replay()
            for _ in range(steps):
                self._step()
            self._maybe_rest()
            if rng.random() < 0.15:
                self.faults.faults.clear()
                self._running.stop()
                ending = "stop" if rng.random() < 0.5 else ending
                self.counts["stops"] += 1
        except SimulatedCrash:
            self.counts["crashes inside a call"] += 1
        except ShortageError as error:
            if is_up:
                raise Violation(f"what was used up for a time ended the server: {error}") from error
            # The operator makes room, and the server is started again.
            self.counts["started on a full disk"] += 1
        except ExceptionGroup as errors:  # of timers
            (first, *_) = errors.exceptions
            if errors.subgroup((Violation, ShortageError)) is not None:
                raise Violation(f"in a timer: {first}") from errors
            if not self.faults.struck or not all(
                isinstance(error, StorageError) for error in errors.exceptions
            ):
                raise
            self.counts["ended by a failed disk"] += 1
        except StorageError:
            if not self.faults.struck:
                raise
            self.counts["ended by a failed disk"] += 1
        self.counts[ending] += 1
        self._restore()
        self.disk = self.disk.crash() if ending == "power loss" else self.disk.kill()
        self.catalog = self.catalog.crash()

    def _slow_syncs(self) -> Callable[[], None]:
        """A disk on which, in some lives, time passes while something is synced."""
        luck = self._device_luck
        share = luck.choice((0.0, 0.0, 0.05, 0.5))

        def on_sync() -> None:
            if luck.random() < share:
                self.counts["slow syncs"] += 1
                self.clock.move(luck.choice((1, 20, 300)))

        return on_sync

    def _maybe_fail_reads(self) -> None:
        """The beginning of an hour's file cannot be read any more, for the rest of this life.

        What was there is not lost: it stays unsettled, and is delivered once somebody has put back
        a copy. The hour is loaded already; `test_bad_sectors.py` looks at those that are not."""
        luck, hours = self._device_luck, self._running.replay.hours
        if (
            self._bad_hour is None
            and luck.random() < self.bad_sectors_share
            and self.settings.retention_ms
        ):
            known = self._running.engine.hours
            loaded = [
                hour
                for hour, state in sorted(hours.items())
                if known.is_live(hour) and hour not in known.loading and not state.retired_ms
            ]
            if loaded:
                self._bad_hour = luck.choice(loaded)
                self._was_bad = True
                path = bucket_path(LogKind.SCHEDULE, self._bad_hour)
                end = luck.randrange(1, 1 + max(1, size_of(self.disk, path)))
                self.disk.fail_reads(path, 0, end)
                self.counts["bad sectors"] += 1

    def _restore_if_settled(self) -> None:
        """Whoever archives or purges an hour has to read it."""
        if self._bad_hour is not None:
            state = self._running.replay.hours.get(self._bad_hour)
            if state is None or state.retired_ms:
                self._restore()

    def _restore(self) -> None:
        """A copy is put back in the place of what cannot be read."""
        self.disk.mend_reads()
        self._bad_hour = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.abandon()

    def abandon(self) -> None:
        """Nobody goes on with what was under way in the last life."""
        if self.server is not None:
            self.server.event_loop.abandon()
        self.server = None

    @property
    def _running(self) -> SimulatedServer:
        assert self.server is not None
        return self.server

    def _plan(self) -> Faults:
        rng = self.rng
        dice = rng.random()
        at = rng.randrange(1, rng.choice((60, 200, 200, 400)))
        if dice < 0.5:
            return Faults(Fault(at, FaultKind.CRASH, rng.choice(tuple(Moment))))
        if dice < 0.6:
            only = rng.choice((None, {"pwrite_durable", "fdatasync", "pwrite", "commit"}))
            if only:
                at = at // 4 + 1
            fault = Fault(at, FaultKind.IO_ERROR, rng.choice(tuple(Moment)), for_good=dice < 0.55)
            return Faults(fault, only=only)  # type: ignore[arg-type]
        if dice < 0.75:
            return Faults(Fault(at, FaultKind.NO_SPACE, rng.choice(tuple(Moment)), for_good=True))
        if self._descriptor_luck.random() < 0.3:
            moment = self._descriptor_luck.choice(tuple(Moment))
            return Faults(Fault(at, FaultKind.NO_DESCRIPTOR, moment, for_good=True))
        return Faults()

    def _quick(self) -> Callable[[], bool]:
        """Whether the disk syncs quickly: never in this life, now and then, or always."""
        luck = self._disk_luck
        share = luck.choice((0.0, 0.0, 0.5, 1.0))
        return lambda: luck.random() < share

    def _start(self) -> None:
        self.server = self._open_server(FaultyFiles(self.disk, self.faults))
        purging = self.server.replay.purging
        purge = purging.step

        def step(*arguments: Any, **named: Any) -> bool:
            self._restore_if_settled()
            return purge(*arguments, **named)

        purging.step = step  # type: ignore[method-assign]
        self._held_up, self._was_bad = {}, False
        for actor in (self.clients, self.subscribers, self.operators):
            actor.begin(self.server, self.disk)
        self.ledger.recovered(self.server)
        self.subscribers.go_on()
        check_definitions(self.server, self.disk)
        registry = self.server.engine.registry
        for subscription in self.operators.faithful:
            if registry.by_id(subscription.id) is None:
                registry.next_id()
                self.operators.put(subscription)
        self.feeders.begin(self.server, self.ledger.sources)
        self.server.tick()

    def _open_server(self, files: FaultyFiles) -> SimulatedServer:
        server = SimulatedServer(
            self.settings,
            files,
            self.catalog,
            self.clock,
            self.rng,
            self.ledger,
            quick=self._quick(),
        )
        luck, share = self._connection_luck, self._connection_luck.choice((0.0, 0.0, 0.5))
        server.connects = lambda: luck.random() >= share
        return server

    # ── steps ──────────────────────────────────────────────────────────────────────────────────

    def _all_steps(self) -> tuple[Step, ...]:
        clients, subscribers, operators = self.clients, self.subscribers, self.operators

        def has_work(index: int) -> Callable[[], object]:
            return lambda: self._running.workers[index].backlog

        return (
            Step(self._turn, 6, lambda: self._running.has_callbacks),
            Step(partial(self._run_worker, 0), 3, has_work(0)),  # the committer
            Step(partial(self._run_worker, 1), 1),  # the settler
            Step(partial(self._run_worker, 2), 3, has_work(2)),  # the loader
            Step(partial(self._run_worker, 3), 4, has_work(3)),  # the reader
            Step(partial(self._run_worker, 4), 1.5),  # the replayer
            Step(partial(self._run_worker, 5), 3, has_work(5)),  # who adopts imports
            Step(self._run_thread, 20, lambda: self._running.event_loop.has_threads),
            Step(self._tick, 3),
            Step(clients.publish, 2),
            Step(clients.replace, 0.7),
            Step(clients.adopt, 0.4),
            Step(clients.cancel, 0.5),
            Step(clients.cancel_many, 0.3),
            Step(clients.look_up, 0.8),
            Step(clients.move, 0.7),
            Step(clients.complete_event, 0.5),
            Step(clients.heartbeat, 1.5),
            Step(operators.change_subscription, 0.5),
            Step(self._redefine, 3, lambda: self._theme is Theme.REDEFINED),
            Step(operators.decide_on_dead_letter, 2, operators.has_dead_letters),
            Step(subscribers.answer_webhook, 4, lambda: self._running.sending),
            Step(subscribers.connect, 4, lambda: self._running.connecting),
            Step(subscribers.pull, 1),
            Step(subscribers.hang_up, 0.4, lambda: subscribers.waiting),
            Step(subscribers.consume, 3, lambda: subscribers.leases),
        )

    def _step(self) -> None:
        while True:
            step = self.rng.choices(self._steps, cum_weights=self._weights)[0]
            if step.is_possible():
                step.do()
                break
        self._maybe_fail_reads()
        self.schedulers.maybe_act(self.clock.now_ms)
        self.feeders.maybe_act(self.clock.now_ms)
        self._restore_if_settled()
        if self.settings.archive:
            self.operators.maybe_archive()

    def _ask_for_schedule(self, name: str, act: Act) -> None:
        act(self._running.engine, self.ledger.schedules)

    def _ask_for_source(self, name: str, act: SourceAct) -> None:
        with self._running.event_loop.running():
            act(self._running.engine)

    def _turn(self) -> None:
        for _ in range(self.rng.randrange(1, 6)):
            self._running.turn()

    def _run_worker(self, index: int) -> None:
        server = self._running
        worker = server.workers[index]
        if index in (1, 4) or worker.backlog:
            if not server.run(worker, self.rng.randrange(1, 8)):
                self.counts["disk full"] += 1
                if self.rng.random() < 0.3:
                    self.faults.faults.clear()
            elif self.faults.struck and self.rng.random() < 0.02:
                self.faults.faults.clear()

    def _run_thread(self) -> None:
        self._running.event_loop.run_thread()

    def _redefine(self) -> None:
        """A subscription is changed, and before that is durable a receiver wants no more."""
        self.operators.change_subscription()
        if self._running.has_callbacks:
            self._running.turn()
        self.subscribers.answer_webhook(is_gone=True)

    def _tick(self) -> None:
        self._let_pass()
        if self._clock_luck.random() < 0.7:
            self._look()
        # Else somebody calls before the server looks at the clock.

    def _let_pass(self) -> None:
        """Time passes, or somebody sets the clock."""
        rng, clock = self.rng, self.clock
        dice = rng.random()
        if self._theme is Theme.SET_BACK and self._clock_luck.random() < 0.1:
            dice = 1.0
        if dice < 0.80:
            clock.move(rng.choice((0, 1, 3, 10, 40, 300)))
        elif dice < 0.90:
            next_hour_ms = (clock.now_ms // HOUR_MS + 1) * HOUR_MS
            by_ms = next_hour_ms - clock.now_ms + rng.choice((-200, -2, -1, 0, 1, 30))
            clock.move(max(0, by_ms))
            self.counts["hour changes"] += 1
        elif dice < 0.94:
            by_ms = rng.choice((1, 2, 3)) * HOUR_MS + rng.randrange(100)
            if self._theme is Theme.FAR:
                by_ms *= rng.choice((1, 4, 9))
            if self._clock_luck.random() < 0.5:
                clock.move(by_ms)  # the machine was asleep
            else:
                clock.set(by_ms)
                self.counts["clock jumps ahead"] += 1
        elif dice < 0.98:
            clock.set(-rng.choice((1, 5, 100, 600)))
        else:
            clock.set(-rng.choice((1, 2)) * HOUR_MS)
            self.counts["clock jumps back"] += 1

    def _look(self) -> None:
        """The server looks at its clocks; then all that waited for time alone has happened."""
        self._running.event_loop.look_at_clock()
        self._running.tick()
        self.ledger.check_leases()
        self.subscribers.check_waiting()
        if outlived := self.ledger.outlived(self._running):
            raise Violation(f"rows wait for {outlived} though their time to live is over")
        self._check_groups()
        present_ms, held_up = self.clock.stopwatch_ms(), dict[int, int]()
        for queue_id in self._running.held_up():
            held_up[queue_id] = since_ms = self._held_up.get(queue_id, present_ms)
            # What could not be recorded (a pause, too) is decided again after a second.
            if present_ms - since_ms > RETRY_COMMIT_MS:
                raise Violation(f"rows may leave queue {queue_id}, and nothing lets them go")
        self._held_up = held_up

    def _maybe_rest(self) -> None:
        """Where there are groups: now and then all do what they have to do. Who waits then waits
        for somebody."""
        if self.clients.has_groups and self._group_luck.random() < REST_SHARE:
            self._running.rest()
            self._check_groups()

    def _check_groups(self) -> None:
        if blocked := self.ledger.behind_nobody(self._running):
            raise Violation(f"groups wait for nobody: {blocked}")

    def finish(self) -> None:
        """The last life: no faults; subscribers that refuse, so that what is redriven dies again;
        then patient ones, and nothing may be left."""
        self.counts["lives"] += 1
        self.ledger.new_life()
        self.abandon()
        self.faults = Faults()
        self.catalog.faults = None
        self.disk.on_sync = lambda: None
        self._start()
        server, subscribers = self._running, self.subscribers
        server.rest()
        self._end_schedules()
        self._end_sources()
        self._redrive_what_dies_again()
        subscribers.is_patient = True
        for subscription in list(server.engine.registry):
            self.operators.put(msgspec.structs.replace(subscription, paused=False))
        server.rest()
        everything = Subscription(
            id=server.engine.registry.next_id(),
            name="everything",
            subject="*",
            type="webhook",
            created_ms=self.clock.now_ms,
        )
        self.operators.put(everything)
        hours = server.engine.hours
        server.tick()
        server.rest()
        self.operators.make_all()
        server.rest()
        self.operators.redrive_all()
        server.rest()
        subscribers.pull_all()
        subscribers.return_all()  # Once more, before everybody takes everything.
        has_replayed = not self.operators.replays
        for _ in range(1000 if self._theme is Theme.FAR else 300):
            server.rest()
            while server.out():
                subscribers.answer_webhook()
                server.rest()
            subscribers.pull_all()
            while subscribers.leases:
                subscribers.consume()
                if self.clients.has_groups and not subscribers.leases:
                    server.rest()
                    subscribers.pull_all()  # The next of each group.
            server.rest()
            self._check_groups()
            if (
                not server.out()
                and not subscribers.leases
                and not hours.unsettled()
                and not len(server.engine.part(Heartbeats))
                and all(state.retired_ms for state in server.replay.hours.values())
                and server.is_idle()
            ):
                if has_replayed:
                    break
                self.operators.replay_some(8)
                server.rest()
                has_replayed = True
            self._jump_to_next()
        else:
            raise Violation(f"it never comes to rest: {self._leftovers()}")
        self.ledger.check_all_delivered()
        self.operators.list_dead_letters()
        server.rest()
        self._keep_keys()
        self._purge()

    def _end_schedules(self) -> None:
        """All that was due has run; a server that goes on with them would never come to rest."""
        server, schedules = self._running, self._running.engine.part(Scheduling)
        self.clock.move(RETRY_COMMIT_MS)
        for _ in range(2000):
            server.tick()
            server.rest()
            if schedules.wait_ms(self.clock.now_ms) > 0:
                break
        self.ledger.schedules.check_none_is_late(self.clock.now_ms)
        end_schedules(server.engine, self.ledger.schedules)
        self._running.rest()

    def _end_sources(self) -> None:
        """All that stands in their topics is published, each record once."""
        server, engine = self._running, self._running.engine
        with server.event_loop.running():
            self.feeders.have_all_taken(engine, self.clock.now_ms)
        for _ in range(20):  # some feeds fail, and are opened again after a pause
            server.rest()
            self.clock.move(RETRY_COMMIT_MS)
            server.event_loop.look_at_clock()
            server.tick()
        self.ledger.sources.check_all_taken(self.feeders.ends)
        with server.event_loop.running():
            end_sources(engine)
        server.rest()

    def _redrive_what_dies_again(self) -> None:
        """A checkpoint after every step of a redrive, so that it could find its own victims."""
        server, subscribers = self._running, self.subscribers
        self.operators.make_all()
        server.rest()
        subscribers.is_refusing = True
        self.operators.redrive_all()
        for _ in range(30):
            server.take_turns()
            while server.out():
                subscribers.answer_webhook()
            subscribers.pull()
            self.clock.move(self.settings.checkpoint_ms)
            server.tick()
        subscribers.is_refusing = False
        server.rest()

    def _jump_to_next(self) -> None:
        """To the next moment at which a row falls due, or an hour ends."""
        now_ms = self.clock.now_ms
        next_hour_ms = (now_ms // HOUR_MS + 1) * HOUR_MS
        next_ms = min(
            (due for due in self.ledger.due_times() if due > now_ms), default=next_hour_ms
        )
        self.clock.move(min(next_ms + 300, next_hour_ms) - now_ms)
        self._running.tick()

    def _leftovers(self) -> str:
        engine = self._running.engine
        queues = {
            queue.subscription.name: (queue.count, queue.in_flight, queue.reserved)
            for queue in engine.dispatcher.queues
        }
        return (
            f"unsettled {engine.hours._unsettled}, loading {engine.hours.loading}, "
            f"hours {self._running.replay.hours}, queues {queues}, "
            f"parked {engine.dispatcher.parked.count()}"
        )

    def _keep_keys(self) -> None:
        """Everything is settled and may be deleted, but for hours whose keys are still taken."""
        engine = self._running.engine
        self.clock.move(2 * HOUR_MS)
        for _ in range(20):
            self._purge_round()
        for message in self.ledger.holders(self.clock.latest_ms, self.settings.dedupe_window_ms):
            key_hash = engine.messages.key_hash(message.subject_id, message.payload.key)
            holder = engine.publishing.holder_of_key(key_hash, self.clock.now_ms)
            if holder is None or holder.seq != message.seq:
                raise Violation(f"the key of {message.seq} was given up in its window (I3)")
            entry = engine.messages.locate(message.seq, message.due_ms).entry
            if not engine.whereabouts.is_known(entry, self.clock.now_ms):
                raise Violation(f"a key is taken by {message.seq}, which nobody knows (I3)")
            self.counts["keys that were kept"] += 1

    def _purge_round(self) -> None:
        self.clock.move(self.settings.checkpoint_ms)
        self._running.tick()
        self._running.rest()
        if self.settings.archive:
            self.operators.archive_all()

    def _purge(self) -> None:
        server, engine = self._running, self._running.engine
        self.clock.move(4 * HOUR_MS + self.settings.dedupe_window_ms)
        rounds_left = 200
        while rounds_left:
            self._purge_round()
            rounds_left -= 1
            if not server.replay.hours:
                # A few more, for what they left to be deleted.
                rounds_left = min(rounds_left, 5)
        files = [
            f"{directory}/{name}"
            for directory in ("schedule", "dispatch")
            for name in self.disk.list(directory)
        ]
        queues = list(engine.dispatcher.queues)
        left = {
            "hours": server.replay.hours,
            "files": files,
            "keys": list(server.catalog.scan(Table.KEYS)),
            "changes": list(server.catalog.scan(Table.CHANGES)),
            "watch keys": list(server.catalog.scan(Table.WATCHES)),
            "heartbeats": list(server.catalog.scan(Table.HEARTBEATS)),
            "schedules": list(server.catalog.scan(Table.SCHEDULE_STATES)),
            "sources": list(server.catalog.scan(Table.SOURCE_STATES)),
            "rows of the catalog about hours": list(server.catalog.scan(Table.HOURS)),
            "archives": list(server.catalog.scan(Table.ARCHIVES)),
            "counts": {h: n for h, n in engine.hours._unsettled.items() if n},
            "leases": engine.leasing.leases.count() + len(engine.leasing.leases._pulls),
            "pulls that wait": engine.dispatcher.pulls.fetches.count(),
            "timeouts": engine.timeouts.size(),
            "in flight": [q.in_flight for q in queues if q.in_flight],
            "reserved": [q.reserved for q in queues if q.reserved],
            "attempts": [q.attempts for q in queues if q.attempts],
            "open files": [
                hour
                for reader in (server.reader, server.reader_now)
                for log in (reader._schedule, reader._dispatch)
                for hour in (*log._dirty, *log._clean)
                if log.path(hour) not in files
            ],
            "orphans": len(engine.dispatcher.orphans),
            "parked": engine.dispatcher.parked.count(),
            "unfiled": engine.groups.unfiled_bytes,
            "staged files": [
                name
                for name in self.disk.list(staging.DIRECTORY)
                if staging.import_of(name) in self.ledger.imports
            ],
            "imported keys": engine.sequencer._imported,
            "imports": engine.part(Imports)._adoptions(),
            "removed": len(engine.sequencer.removed),
        }
        for name, value in left.items():
            if value:
                raise Violation(f"{name} are left over: {value}")


LIVES = 12
STEPS = 100


def run_world(seed: int, *, lives: int = LIVES, steps: int = STEPS) -> World:
    """One world from its first to its last life. Raises Violation."""
    with World(seed) as world:
        for _ in range(lives):
            world.live(steps)
        world.finish()
    return world
