"""The server: a shard moved by real threads, an event loop and a clock, from its start to its stop.

This is the only place that starts threads and reads the clock. Every call of the engine is on the
event loop, also a result of a thread. The HTTP layer asks through `server.calls`.

A callback of the event loop that fails is a mistake of ours, and ends the server as a thread that
fails does: its work would be left undone for good, by a server that says it is ready.

Cost: one loop wake-up per commit group. Threads: everything belongs to the event loop but `post`.
"""

import asyncio
import contextlib
import os
import random
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from delayserver.clocks import stopwatch_ms, wall_clock_ms
from delayserver.config import Settings
from delayserver.decisions.group import Group
from delayserver.delivery.delayed_fetch import PullRequest
from delayserver.delivery.deliveries import NEVER_MS, Deliveries
from delayserver.delivery.webhook import WebhookSender
from delayserver.parts.installed import PARTS
from delayserver.records import zones
from delayserver.records.message import DueDelivery
from delayserver.records.subscriptions import StandIn, Subscription
from delayserver.recovery.recover import Recovered
from delayserver.recovery.store import Surroundings
from delayserver.server.alarm import Alarm
from delayserver.server.backups import BackupMaker
from delayserver.server.calls import Calls
from delayserver.server.dead_letter_log import DeadLetterLog
from delayserver.server.gauges import Gauges
from delayserver.server.loop_turns import LoopTurns
from delayserver.server.metrics import TimedFiles
from delayserver.server.shard import Shard
from delayserver.server.sink_runner import SinkRunner
from delayserver.server.token_keeper import TokenKeeper, open_tokens
from delayserver.server.waits import Waits
from storage.catalog import Catalog, LmdbCatalog
from storage.directory import CATALOG_DIRECTORY, keep_mark, life_of
from storage.errors import DamageError
from storage.files import Files, OsFiles
from storage.frame import Damage
from storage.kinds import Kind

if TYPE_CHECKING:
    from delayserver.server.telemetry import Telemetry

DISK_CHECK_S = 1.0
CLIENTS = frozenset(("aiormq", "confluent_kafka", "nats", "pamqp", "redis"))
"""Modules of others whose callbacks are on our event loop: the clients of brokers."""
LOOK_MS = 1000
LEASES_LOOK_S = 0.02
"""A stop looks so often whether a consumer still holds anything."""

log = structlog.get_logger()


def open_catalog_in(files: Files, settings: Settings, *, verify_all: bool = False) -> Catalog:
    """The catalog of a data directory. Raises StorageError."""
    files.make_directory(CATALOG_DIRECTORY)
    return LmdbCatalog(
        str(settings.data_dir / CATALOG_DIRECTORY),
        max_bytes=settings.catalog_max_bytes,
        verify_all=verify_all,
    )


def of_this_machine(settings: Settings, shard: int = 0) -> Surroundings:
    """The surroundings of a shard that a process of this machine serves, or follows."""
    offset_ms = settings.clock_offset_ms
    return Surroundings(
        clock=(lambda: wall_clock_ms() + offset_ms) if offset_ms else wall_clock_ms,
        stopwatch=stopwatch_ms,
        monotonic=time.monotonic,
        random_bytes=os.urandom,
        random=random.random,
        parts=PARTS,
        shard=shard,
    )


def telemetry_of(settings: Settings) -> "Telemetry | None":
    """As the settings and the environment say; it takes long to import."""
    if not settings.otel:
        return None
    from delayserver.server.telemetry import Telemetry, provider_of_environment

    return Telemetry(provider_of_environment())


class Server(Shard):
    """One shard: a data directory that is open, and everything that runs on it."""

    def __init__(
        self,
        settings: Settings,
        surroundings: Surroundings | None = None,
        *,
        fatal: Callable[[BaseException], None],
        sender: WebhookSender | None = None,
        telemetry: "Telemetry | None" = None,
        verify_catalog: bool = False,
        shards: int = 1,
        tokens_directory: Path | None = None,
    ) -> None:
        """Lock the directory and recover its state. Nothing runs before `start`.

        `surroundings`: None: those of this machine. `verify_catalog`: all of it, however long it
        is. `shards`: how many there are; `tokens_directory`: where the tokens of all of them are.
        Raises StorageError, and AccessError where others could call without a token."""
        surroundings = surroundings or of_this_machine(settings)
        self._fatal = fatal
        files = TimedFiles(str(settings.data_dir))
        tokens_dir = settings.data_dir if tokens_directory is None else tokens_directory
        token_files = files if tokens_directory is None else OsFiles(str(tokens_directory))
        self.telemetry = telemetry or telemetry_of(settings)
        self.tokens = open_tokens(settings, token_files, tokens_dir, surroundings.clock())
        open_catalog = partial(open_catalog_in, files, settings, verify_all=verify_catalog)
        super().__init__(settings, files, open_catalog, surroundings)
        life = life_of(files, self.store.identity, None if shards == 1 else token_files)
        keep_mark(files, Kind.DATA if settings.cluster is None else Kind.REPLICA, life)
        self.gauges = Gauges(
            self.engine, settings, self.clock, lambda: len(self.tokens.not_understood)
        )
        self.metrics = self.gauges.metrics
        files.on_sync = self.metrics.on_sync
        self._token_keeper = TokenKeeper(
            self.tokens, self.engine.slices, self.clock, self.not_understood
        )
        self.sinks = SinkRunner(self, self.metrics, sender, self.telemetry)
        self.targets = self.sinks.targets
        self._dead_letter_log = DeadLetterLog(self.engine.registry, self.engine.timeouts)
        self.turns = LoopTurns(
            self._call_in_loop, self.metrics.loop_turn_seconds.observe, time.perf_counter
        )
        self.backups = BackupMaker(
            *(self, Waits(self)), shards=shards, life=life, tokens_directory=tokens_dir
        )
        self.calls = Calls(
            self, self.gauges, self.tokens, self.telemetry, turns=self.turns, backups=self.backups
        )
        self._runners = [
            part.run(decider, self)
            for part, decider in zip(self.engine.parts, self.engine.deciders, strict=True)
            if part.run is not None
        ]
        self._add_metrics()

    def _add_metrics(self) -> None:
        self.gauges.add_backups(self.backups)
        self.gauges.add_brokers(self.broker_bodies, self.sinks.of_brokers)
        self.metrics.gauge(
            "waiting_webhooks",
            "Subscriptions that wait for a connection to be free",
            lambda: self.engine.dispatcher.pushes.connections.waiting,
        )
        self.metrics.counter(
            "attempts_broken",
            "Attempts that ended by an error that nobody had foreseen",
            lambda: self.sinks.broken_total,
        )
        self.metrics.counter("damage", "Damaged places that were found", lambda: self.damage_count)

    def on_recovered(self, recovered: Recovered) -> None:
        self.damage_count = len(recovered.damage)
        """Damaged places that were found."""
        for damage in recovered.damage:
            log.error("damage found", **_named(damage))
        for torn in recovered.torn:
            # As a crash leaves it; but damage to the very last frame looks the same.
            log.warning("torn tail cut off", **_named(torn))
        log.info(
            "recovered",
            data_dir=str(self.settings.data_dir),
            replayed=recovered.replayed,
            hours=len(recovered.loaded),
            waiting=sum(hour.count for hour in recovered.loaded),
        )

    # ── start and stop ─────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Start the threads and the clock: from now on messages fire. Raises StorageError."""
        readers = self.reader, self.reader_now
        self.carried_leases.take_over(self.engine, readers, self.clock())
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._on_loop_error)
        self._alarm = Alarm(self._loop, partial(self._call, self._tick))
        self._tick_asked = False
        self._next_tick_ms = NEVER_MS
        self._back_ms = self.stopwatch()
        """When the next tick comes at the latest, on the stopwatch."""
        for subscription in self.engine.registry:
            self.defined(subscription)
        for thread in self.workers:
            thread.start()
        self._check_disk()
        self._tick()
        for runner in self._runners:
            runner.start()
        self._looking = self._loop.create_task(self.backups.look())

    def begin_stop(self) -> None:
        """Accept nothing more, send nothing more, answer those who wait."""
        self.engine.groups.stopping = True
        self.hold_back()

    def hold_back(self) -> None:
        """Send nothing more, answer those who wait for deliveries."""
        if not self.engine.dispatcher.queues.draining:
            self._held_back_ms = self.stopwatch()
            self.engine.dispatcher.drain()

    async def end_leases(self, is_forced: Callable[[], bool]) -> None:
        """Hand out nothing more, and let consumers end their leases: until they have, for
        `drain_ms` at most, or until `is_forced` says that the stop must not wait. All other calls
        are answered as ever."""
        self.hold_back()
        until_ms = self._held_back_ms + self.settings.drain_ms
        leases = self.engine.leasing.leases
        while leases.count() and self.stopwatch() < until_ms and not is_forced():  # noqa: ASYNC110
            await asyncio.sleep(LEASES_LOOK_S)

    async def stop(
        self, on_recorded: Callable[[], None] = lambda: None, *, drain_ms: int | None = None
    ) -> None:
        """Let calls and deliveries under way finish, file everything, close the directory.

        `on_recorded` is called in a thread once nothing more is accepted, delivered or settled;
        `drain_ms`: how long these may take, if not as the settings say."""
        engine = self.engine
        self.begin_stop()
        for runner in self._runners:
            await runner.stop()
        await self._looking
        await self.backups.stop()
        drain_ms = self.settings.drain_ms if drain_ms is None else drain_ms
        # Leases were waited for meanwhile.
        drain_s = max(0, self._held_back_ms + drain_ms - self.stopwatch()) / 1000
        deadline = self._loop.time() + drain_s
        await self.sinks.stop(drain_s)
        while not engine.groups.is_idle and self._loop.time() < deadline + 10:
            self._flush()
            await asyncio.sleep(0.002)
        await self.backups.finish_log()
        self._alarm.close()
        self._disk_timer.cancel()
        self.settles.flush()
        for thread in self.workers:
            thread.finish()
            await asyncio.to_thread(thread.join)
            if thread is self.settling:
                await asyncio.to_thread(self.carried_leases.leave(self.engine))
                await asyncio.to_thread(on_recorded)
        if self.telemetry is not None:
            await asyncio.to_thread(self.telemetry.close)
        self.close()
        log.info("stopped")

    # ── how the shard is moved ─────────────────────────────────────────────────────────────────

    def post(self, function: Callable[..., None], *arguments: Any) -> None:
        # The loop is closed already when a thread ends late; nobody waits for it then.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._call, function, *arguments)

    def call_soon(self, function: Callable[[], None]) -> None:
        self._loop.call_soon(self._call, function)

    def _call_in_loop(self, function: Callable[[], None]) -> None:
        self._loop.call_soon(function)

    def tick_soon(self, within_ms: int = 0) -> None:
        is_sooner = not within_ms or self.stopwatch() + within_ms < self._next_tick_ms
        if is_sooner and not self._tick_asked:
            self._tick_asked = True
            self.call_soon(self._tick)

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Every callback of the server goes through here."""
        if not self.turns.is_begun:
            self.turns.begin()
        try:
            function(*arguments)
        except Exception as error:
            self.on_fatal(error)

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An error outside of `_call`: in the callback of a library, or in one connection or one
        task, which has ended by it."""
        error = context.get("exception")
        if error is not None and "handle" in context and not _is_of_client(error):
            self.on_fatal(error)
        else:
            loop.default_exception_handler(context)

    def on_fatal(self, error: BaseException) -> None:
        try:
            log.critical("the server must stop", error=str(error), exc_info=error)
        finally:
            self._fatal(error)

    @property
    def is_slow(self) -> bool:
        """Whether the disk is slower than the messages that are accepted."""
        return self.engine.groups.files_slowly(self.clock())

    def on_damage(self, error: DamageError) -> None:
        self.damage_count += 1
        log.error(
            "damage found",
            error=str(error),
            file=error.path,
            offset=error.offset,
            first_seq=error.first_seq,
            last_seq=error.last_seq,
        )

    def given_up(self, delivery: DueDelivery, reason: str) -> None:
        self._dead_letter_log.given_up(delivery, reason)

    def commit(self, group: Group, *, at_once: bool) -> None:
        self.metrics.group_records.observe(group.count)
        self._commit_began_at = time.perf_counter()
        try:
            super().commit(group, at_once=at_once)
        except BaseException as error:
            self.on_fatal(error)  # as in the committer's thread (I9)

    def _on_committed(self) -> None:
        self.metrics.commit_seconds.observe(time.perf_counter() - self._commit_began_at)
        super()._on_committed()

    def hand_out(
        self, subscription: Subscription, request: PullRequest, deliveries: Deliveries
    ) -> None:
        late_ms = (self.clock() - deliveries.settled["due_ms"]).tolist()
        self.metrics.on_begun(subscription.id, late_ms)
        if self.telemetry is not None:
            for delivery in deliveries:
                self.telemetry.delivery("receive", subscription.name, delivery).end({})
        super().hand_out(subscription, request, deliveries)

    def send(self, subscription: Subscription, deliveries: list[DueDelivery]) -> None:
        self.sinks.send(subscription, deliveries)

    def defined(self, subscription: Subscription) -> None:
        if isinstance(subscription, StandIn):
            self.not_understood("subscription", subscription.name, subscription.problem)
        self.sinks.on_defined(subscription)

    # ── time, disk and memory ──────────────────────────────────────────────────────────────────

    def _tick(self) -> None:
        self._tick_asked = False
        now_ms, began_ms = self.clock(), self.stopwatch()
        late_ms = max(0, began_ms - self._back_ms)
        stood_ms = int(self.turns.came_late(late_ms / 1000) * 1000)
        wait_ms = self.engine.advance(now_ms, stood_ms)
        self._next_tick_ms = began_ms + wait_ms
        self._back_ms = began_ms + min(wait_ms, LOOK_MS)
        # Never longer than a second, since the clock may be set; and to the very beginning of the
        # millisecond, which is as early as anything may fire.
        wait_ms = min(wait_ms - (self.clock() - now_ms), LOOK_MS)
        self._alarm.set(wait_ms * 1_000_000 - time.time_ns() % 1_000_000)

    def clock_was_set(self, by_ms: int) -> None:
        """Tell the operator: messages come early or late by that much."""
        log.warning("the clock was set", by_ms=by_ms)

    def not_understood(self, kind: str, name: str, reason: str) -> None:
        log.error("a definition is not understood", kind=kind, name=name, reason=reason)

    def _check_disk(self) -> None:
        free = self.gauges.free_bytes = self.files.free_bytes()
        self.engine.publishing.disk_is_low = free < self.settings.disk_reserve_bytes
        self._token_keeper.refresh()
        if zones.have_changed():
            log.info("the files of time zones have changed")
            self.engine.look_again()
            self.tick_soon()
        self._disk_timer = self._loop.call_later(DISK_CHECK_S, self._call, self._check_disk)


def _is_of_client(error: BaseException) -> bool:
    """Whether it is the client of a broker that failed, in a callback of its own: that harms the
    connection, whose end is seen, and nothing else."""
    frames = traceback.walk_tb(error.__traceback__)
    names = {frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in frames}
    return bool(names & CLIENTS) and "delayserver" not in names


def _named(damage: Damage) -> dict[str, object]:
    return {
        "file": damage.path,
        "offset": damage.offset,
        "end": damage.end,
        "reason": damage.reason,
        "first_seq": damage.first_seq,
        "last_seq": damage.last_seq,
    }
