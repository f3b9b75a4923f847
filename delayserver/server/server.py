"""The server: a shard moved by real threads, an event loop and a clock, from its start to its stop.

This is the only place that starts threads and reads the clock. Every call of the engine is on the
event loop, also what comes back from a thread. The HTTP layer asks through `server.calls`.

A callback of the event loop that fails is a mistake of ours, and ends the server as a thread that
fails does: what it was to do would be left undone for good, by a server that says it is ready.

Cost: one loop wake-up per commit group. Threads: everything belongs to the event loop but `post`.
"""

import asyncio
import contextlib
import dataclasses
import os
import random
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from delayserver.clocks import stopwatch_ms, wall_clock_ms
from delayserver.config import Settings
from delayserver.decisions.group import Group
from delayserver.delivery.delayed_fetch import PullRequest
from delayserver.delivery.deliveries import NEVER_MS, Deliveries
from delayserver.delivery.feeds import FeedOpener
from delayserver.delivery.outlets import NoClient, OutletSink, body_bytes
from delayserver.delivery.sender import HttpWebhookSender
from delayserver.delivery.sink import Answer, Failed, Gone, Later, Result, Sink
from delayserver.delivery.webhook import WebhookSender
from delayserver.errors import AccessError
from delayserver.records import zones
from delayserver.records.message import DueDelivery
from delayserver.records.schedules import forget_zones
from delayserver.records.subscriptions import StandIn, Subscription
from delayserver.records.understanding import reason_of
from delayserver.recovery.recover import Progress, Recovered
from delayserver.recovery.store import WRITTEN_HOURS_MIN, Surroundings
from delayserver.security.targets import TargetPolicy
from delayserver.security.tokens import TokenFile, TokenTable
from delayserver.server.alarm import Alarm
from delayserver.server.backups import BackupMaker
from delayserver.server.calls import Calls
from delayserver.server.gauges import Gauges
from delayserver.server.loop_turns import LoopTurns
from delayserver.server.metrics import TimedFiles
from delayserver.server.shard import Shard
from delayserver.server.source_runner import SourceRunner
from delayserver.server.webhook_sink import WebhookSink
from storage.catalog import Catalog, LmdbCatalog
from storage.directory import CATALOG_DIRECTORY, keep_mark, life_of
from storage.errors import DamageError, StorageError
from storage.files import Files, OsFiles
from storage.frame import Damage
from storage.kinds import Kind

if TYPE_CHECKING:
    from delayserver.server.telemetry import Telemetry

DISK_CHECK_S = 1.0
REASON_CHARACTERS_MAX = 1000
"""The longest reason that a client may give for an attempt that failed; the rest is cut."""
ANSWERS_MAX = 32
"""Answers whose consequences are drawn in one turn of the event loop: 0.1 ms each."""
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


class Server(Shard):
    """One shard: a data directory that is open, and everything that runs on it."""

    def __init__(
        self,
        settings: Settings,
        *,
        clock: Callable[[], int] = wall_clock_ms,
        stopwatch: Callable[[], int] = stopwatch_ms,
        fatal: Callable[[BaseException], None],
        progress: Progress = lambda what, done, total: None,
        sender: WebhookSender | None = None,
        telemetry: "Telemetry | None" = None,
        verify_catalog: bool = False,
        schedule_hours_max: int = WRITTEN_HOURS_MIN,
        shard: int = 0,
        shards: int = 1,
        tokens_directory: Path | None = None,
        around: Callable[[Surroundings], Surroundings] = lambda surroundings: surroundings,
    ) -> None:
        """Lock the directory and recover what is in it. Nothing runs before `start`.

        `verify_catalog`: all of it, however long it is. `schedule_hours_max`: files of hours that
        the schedule log has open where it is written. `shard`: its number among `shards` of them;
        `tokens_directory`: where the tokens of all of them are; `around` may put other parts into
        the surroundings. Raises StorageError, and
        AccessError where others could call without a token."""
        offset_ms = settings.clock_offset_ms
        self._fatal = fatal
        self._sender = sender
        self._targets = TargetPolicy(settings.webhook_targets)
        self._sinks: dict[str, Sink] = {}
        """By type of subscription; made at first use."""
        files = TimedFiles(str(settings.data_dir))
        tokens_dir = settings.data_dir if tokens_directory is None else tokens_directory
        token_files = files if tokens_directory is None else OsFiles(str(tokens_directory))
        self.tokens = TokenTable(TokenFile(token_files), settings.token, time.monotonic)
        self._tokens_error = ""
        self._is_refreshing = False
        self._tokens_told: set[tuple[str, str]] = set()
        """Tokens that are not understood, and why, as the log has them."""
        self._attempts_broken = 0
        self.telemetry = telemetry
        if settings.otel and telemetry is None:
            from delayserver.server.telemetry import Telemetry, provider_of_environment

            self.telemetry = Telemetry(provider_of_environment())
        own_clock: Callable[[], int] = (lambda: clock() + offset_ms) if offset_ms else clock
        self.tokens.refresh(own_clock())
        if not settings.on_loopback and not len(self.tokens):
            raise AccessError(
                f"{settings.host} is not a loopback address: make a token (delayserver token "
                f"create NAME --scope admin --data-dir {tokens_dir}), or set one "
                "(DELAYSERVER_TOKEN, at least 16 characters), before others can reach the server"
            )

        surroundings = Surroundings(
            clock=own_clock,
            stopwatch=stopwatch,
            monotonic=time.monotonic,
            random_bytes=os.urandom,
            random=random.random,
            progress=progress,
            schedule_hours_max=schedule_hours_max,
            shard=shard,
        )
        open_catalog = partial(open_catalog_in, files, settings, verify_all=verify_catalog)
        super().__init__(settings, files, open_catalog, around(surroundings))
        kind = Kind.DATA if settings.cluster is None else Kind.REPLICA
        above = None if shards == 1 else token_files
        life = life_of(files, self.store.identity, above)
        keep_mark(files, kind, life)
        self.engine.subscribing.on_defined = self._on_defined
        self.gauges = Gauges(self.engine, settings, self.clock)
        self.metrics = self.gauges.metrics
        self.metrics.gauge(
            "waiting_webhooks",
            "Subscriptions that wait for a connection to be free",
            lambda: self.engine.dispatcher.pushes.connections.waiting,
        )
        files.on_sync = self.metrics.on_sync
        self.turns = LoopTurns(
            self._call_in_loop, self.metrics.loop_turn_seconds.observe, time.perf_counter
        )
        self.calls = Calls(self, self.gauges, self.tokens, self.telemetry, turns=self.turns)
        self.backups = self.calls.backups = BackupMaker(
            self,
            self.calls,
            shards=shards,
            life=life,
            tokens_directory=tokens_dir,
            monotonic=time.monotonic,
        )
        self.gauges.add_backups(self.backups)
        self.gauges.add_brokers(self.broker_bodies, self._broker_sinks)
        self._sources = SourceRunner(
            self.engine.sources, self._make_feed_opener, self.clock, self.on_fatal
        )
        self.gauges.not_understood_tokens = lambda: len(self.tokens.not_understood)
        self.calls.source_errors = self._sources.errors
        self.metrics.gauge("sources_failing", "Sources that cannot go on", self._sources.failing)
        self.metrics.counter(
            "attempts_broken",
            "Attempts that ended by an error that nobody had foreseen",
            lambda: self._attempts_broken,
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
        self.take_over_leases()
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._on_loop_error)
        self._alarm = Alarm(self._loop, partial(self._call, self._tick))
        self._tick_asked = False
        self._next_tick_ms = NEVER_MS
        self._back_ms = self.stopwatch()
        """When the next tick comes at the latest, on the stopwatch."""
        self.engine.on_clock_set = self._on_clock_set
        for kind in (self.engine.schedules, self.engine.sources, self.engine.heartbeats):
            kind.on_not_understood = self._on_not_understood
        self._sending: set[asyncio.Task[None]] = set()
        self._answers: list[Answer] = []
        for subscription in self.engine.registry:
            self._on_defined(subscription)
        for thread in self.workers:
            thread.start()
        self._check_disk()
        self._tick()
        self._sources.start()
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
        """Hand out nothing more, and let consumers end what they hold: until they have, for
        `drain_ms` at most, or until `is_forced` says that nobody wants to wait. All other calls are
        answered as ever."""
        self.hold_back()
        until_ms = self._held_back_ms + self.settings.drain_ms
        leases = self.engine.leasing.leases
        while leases.count() and self.stopwatch() < until_ms and not is_forced():  # noqa: ASYNC110
            await asyncio.sleep(LEASES_LOOK_S)

    async def stop(
        self, on_recorded: Callable[[], None] = lambda: None, *, drain_ms: int | None = None
    ) -> None:
        """Let what is on its way finish, file everything, close the directory.

        `on_recorded` is called in a thread once nothing more is accepted, delivered or settled;
        `drain_ms`: how long what is on its way may take, if not as the settings say."""
        engine = self.engine
        self.begin_stop()
        await self._sources.stop()
        await self._looking
        await self.backups.stop()
        drain_ms = self.settings.drain_ms if drain_ms is None else drain_ms
        # Leases were waited for meanwhile.
        drain_s = max(0, self._held_back_ms + drain_ms - self.stopwatch()) / 1000
        deadline = self._loop.time() + drain_s
        if self._sending:
            await asyncio.wait(self._sending, timeout=drain_s)
            while self._answers:
                self._on_answers()
        for task in self._sending:
            task.cancel()
        # Behind this nothing leaves any more, whoever owns the shard then.
        await asyncio.gather(*self._sending, return_exceptions=True)
        for sink in self._sinks.values():
            await sink.close()
        while not engine.groups.is_idle and self._loop.time() < deadline + 10:
            self._flush()
            await asyncio.sleep(0.002)
        await self.backups.finish_log()
        self._alarm.close()
        self._disk_timer.cancel()
        self._flush_settle()
        for thread in self.workers:
            thread.finish()
            await asyncio.to_thread(thread.join)
            if thread is self.settling:
                await asyncio.to_thread(self.leave_leases())
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
        """What went past `_call`: the callback of somebody else, or what concerns one connection
        or one task, and has ended that."""
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
        """Whether the disk does not keep up with what is accepted."""
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
        log.warning("dead letter", reason=reason, **self._about(delivery))

    def _about(self, delivery: DueDelivery) -> dict[str, object]:
        """What a log line about a delivery holds."""
        subscription = self.engine.registry.by_id(delivery.subscription_id)
        return {
            "message_id": delivery.message_id,
            "subject": delivery.subject,
            "key": delivery.payload.key,
            "subscription": subscription.name if subscription else None,
            "attempt": delivery.attempt,
        }

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
        self._observe_lateness(subscription, late_ms)
        if self.telemetry is not None:
            for delivery in deliveries:
                self.telemetry.delivery("receive", subscription.name, delivery).end({})
        super().hand_out(subscription, request, deliveries)

    def _observe_lateness(self, subscription: Subscription, late_ms: list[int]) -> None:
        of_all = self.metrics.lateness_seconds
        of_subscription = self.metrics.lateness_by_subscription[subscription.id]
        counts = {late_ms[0]: 1} if len(late_ms) == 1 else Counter(late_ms)
        for one_ms, count in counts.items():
            of_all.observe(one_ms / 1000, count)
            of_subscription.observe(one_ms / 1000, count)

    def send(self, subscription: Subscription, deliveries: list[DueDelivery]) -> None:
        if subscription.takes_many:
            self.broker_bodies.take(subscription.id, sum(map(body_bytes, deliveries)))
        task = self._loop.create_task(self._send(subscription, deliveries))
        self._sending.add(task)
        task.add_done_callback(self._sent)

    def _sent(self, task: asyncio.Task[None]) -> None:
        self._sending.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            # The office or the disk is lost, and the deliveries would stay on their way for good.
            self.on_fatal(error)

    async def _send(self, subscription: Subscription, deliveries: list[DueDelivery]) -> None:
        """One attempt. Whatever goes wrong in the client of one receiver ends this attempt, and
        nothing else."""
        began_at = time.perf_counter()
        left = {id(delivery): delivery for delivery in deliveries}
        may_begin = partial(self._may_begin, subscription)

        def told(some: list[DueDelivery], result: Result) -> None:
            known = [one for one in some if left.pop(id(one), None) is not None]
            if known:
                self._on_result(subscription, began_at, known, _writable(result))

        try:
            await self._sink(subscription.type).deliver(subscription, deliveries, may_begin, told)
            reason = "the client has not said what came of it"
        except StorageError:
            raise  # of the settled logs of a cluster: another node may own the shard
        except Exception as error:
            self._attempts_broken += 1
            # Without its locals, which may hold secrets.
            reason = f"an error that was not foreseen: {type(error).__name__}: {error}"
            log.error("an attempt is broken", subscription=subscription.name, error=reason[:300])
        if left:
            told(list(left.values()), Failed(reason))

    def _may_begin(self, subscription: Subscription, deliveries: Sequence[DueDelivery]) -> bool:
        """See `MayBegin`. How late a message is, is counted when it begins."""
        now_ms = self.clock()
        if not self.engine.dispatcher.pushes.may_begin(subscription, deliveries, now_ms):
            return False
        self._observe_lateness(subscription, [now_ms - one.entry.due_ms for one in deliveries])
        return True

    def _sink(self, kind: str) -> Sink:
        sink = self._sinks.get(kind)
        if sink is None:
            sink = self._sinks[kind] = self._make_sink(kind)
        return sink

    def _broker_sinks(self) -> list[OutletSink]:
        return [sink for sink in self._sinks.values() if isinstance(sink, OutletSink)]

    def _on_defined(self, subscription: Subscription) -> None:
        if isinstance(subscription, StandIn):
            self._on_not_understood("subscription", subscription.name, subscription.problem)
        try:
            sink = self._sinks.get(subscription.type)
            if sink is not None:
                sink.on_subscription(subscription)
            elif subscription.target is not None and not _stands_still(subscription):
                self._sink(subscription.type)
        except StorageError:
            raise
        except Exception as error:
            # Its first attempt fails with the same, and says so.
            self._attempts_broken += 1
            log.error(
                "a client cannot be made", subscription=subscription.name, error=reason_of(error)
            )

    def _make_sink(self, kind: str) -> Sink:
        if kind == "webhook":
            sender = self._sender or HttpWebhookSender(
                self._targets,
                connections_max=self.settings.webhook_connections_max,
                answer_kept_max_bytes=self.settings.answer_kept_max_bytes,
            )
            return WebhookSink(sender, self.clock, self.metrics, self.telemetry)
        try:
            return self._make_broker_sink(kind)
        except ModuleNotFoundError as error:
            # The subscription was made when it was installed. Its messages are tried again.
            log.error("a client is missing", type=kind, error=str(error))
            return OutletSink(NoClient(kind))

    def _make_broker_sink(self, kind: str) -> Sink:
        """Their clients are extras, and take up to 0.3 s to import: only where there is a
        subscription, and before anything is due for it. Raises ModuleNotFoundError."""
        match kind:
            case "kafka":
                from delayserver.delivery.kafka_sink import make_kafka_sink

                return make_kafka_sink(self._targets, self.transactions, self.clock)
            case "redis":
                from delayserver.delivery.redis_sink import RedisOpener

                return OutletSink(RedisOpener(self._targets))
            case "nats":
                from delayserver.delivery.nats_sink import NatsOpener

                return OutletSink(NatsOpener(self._targets))
            case _:
                assert kind == "amqp", kind
                from delayserver.delivery.amqp_sink import AmqpOpener

                return OutletSink(AmqpOpener(self._targets))

    def _make_feed_opener(self) -> FeedOpener:
        """As `_make_broker_sink`, once there is a source. Raises ModuleNotFoundError."""
        from delayserver.delivery.kafka_source import KafkaFeedOpener

        return KafkaFeedOpener(self._targets)

    def _on_result(
        self,
        subscription: Subscription,
        began_at: float,
        deliveries: list[DueDelivery],
        result: Result,
    ) -> None:
        if subscription.takes_many:
            self.broker_bodies.give_back(subscription.id, sum(map(body_bytes, deliveries)))
            kind, seconds = type(result).__name__.lower(), time.perf_counter() - began_at
            self.metrics.on_sink(subscription.id, kind, len(deliveries), seconds)
        if isinstance(result, Failed | Later | Gone):
            for delivery in deliveries:
                log.debug("a delivery failed", error=result.reason, **self._about(delivery))
        if not self._answers:
            self.call_soon(self._on_answers)
        self._answers.append((deliveries, result))

    def _on_answers(self) -> None:
        """Those that came in this turn of the loop, or some of them if there are many."""
        answers, self._answers = self._answers[:ANSWERS_MAX], self._answers[ANSWERS_MAX:]
        if self._answers:
            self.call_soon(self._on_answers)
        self.engine.outcomes.on_sent(answers, self.clock())

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

    def _on_clock_set(self, by_ms: int) -> None:
        """Tell the operator: messages come early or late by that much."""
        log.warning("the clock was set", by_ms=by_ms)

    def _on_not_understood(self, kind: str, name: str, reason: str) -> None:
        log.error("a definition is not understood", kind=kind, name=name, reason=reason)

    def _check_disk(self) -> None:
        free = self.gauges.free_bytes = self.files.free_bytes()
        self.engine.publishing.disk_is_low = free < self.settings.disk_reserve_bytes
        self._refresh_tokens()
        if zones.have_changed():
            log.info("the files of time zones have changed")
            forget_zones()
            self.engine.schedules.look_again()
            self.tick_soon()
        self._disk_timer = self._loop.call_later(DISK_CHECK_S, self._call, self._check_disk)

    def _refresh_tokens(self) -> None:
        """Take over what `delayserver token` has changed."""
        if not self._is_refreshing:
            self._is_refreshing = True
            work = self.tokens.refreshing(self.clock())
            self.engine.slices.begin(work, self._on_tokens)

    def _on_tokens(self, nothing: None, error: Exception | None) -> None:
        self._is_refreshing = False
        if error is not None and not isinstance(error, StorageError):
            raise error
        if error is not None and str(error) != self._tokens_error:
            log.error("the tokens stay as they were", error=str(error))
        self._tokens_error = "" if error is None else str(error)
        not_understood = set(self.tokens.not_understood.items())
        for name, reason in not_understood - self._tokens_told:
            self._on_not_understood("token", name, reason)
        self._tokens_told = not_understood


def _writable(result: Result) -> Result:
    """A result whose reason can be recorded: a client may say anything, at any length."""
    if not isinstance(result, Failed | Later | Gone):
        return result
    reason = result.reason[:REASON_CHARACTERS_MAX].encode("utf-8", "replace").decode()
    return result if reason == result.reason else dataclasses.replace(result, reason=reason)


def _stands_still(subscription: Subscription) -> bool:
    """Whether nothing is ever sent for a subscription as it is now."""
    return subscription.deleted or isinstance(subscription, StandIn)


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
