"""The server: a shard moved by real threads, an event loop and a clock; the HTTP layer talks to it.

This is the only place that starts threads, reads the clock, and turns callbacks into awaitables.
Every call of the engine is on the event loop, also what comes back from a thread.

Cost: one loop wake-up per commit group. Threads: all public coroutines belong to the event loop.
"""

import asyncio
import contextlib
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import structlog

from delayserver.config import Settings
from delayserver.decisions.delayed_produce import Level
from delayserver.decisions.events import EVENT_MESSAGES_MAX
from delayserver.decisions.group import Group
from delayserver.decisions.imports import Import
from delayserver.decisions.messages import Located, Versions
from delayserver.decisions.watches import Watcher
from delayserver.delivery.delayed_fetch import Pulled, PullRequest
from delayserver.delivery.deliveries import Deliveries
from delayserver.delivery.dispatcher import NEVER_MS
from delayserver.delivery.queue import READ_ROWS_MAX, Handout
from delayserver.delivery.reader import Found, Reader
from delayserver.delivery.sender import HttpWebhookSender
from delayserver.delivery.webhook import (
    WebhookResponse,
    WebhookSender,
    webhook_request,
)
from delayserver.errors import AccessError, NotFoundError, StoppingError
from delayserver.records.message import HEADERS_BYTES_MAX, Delivery, Payload, ScheduleEntry
from delayserver.records.subscriptions import Subscription
from delayserver.records.tables import Archived, OnEvent
from delayserver.records.tracecontext import in_trace
from delayserver.recovery.recover import Progress, Recovered
from delayserver.schedule.archives import RetiredHour, retired_hours
from delayserver.security.targets import TargetPolicy
from delayserver.security.tokens import TokenFile, TokenTable
from delayserver.server.alarm import Alarm
from delayserver.server.engine import Answer
from delayserver.server.metrics import Metrics, TimedFiles
from delayserver.server.shard import Shard, Surroundings
from delayserver.server.threads import CallRequest, CheckpointRequest, ConfirmRequest
from storage.catalog import Catalog, LmdbCatalog
from storage.directory import CATALOG_DIRECTORY
from storage.errors import DamageError, StorageError
from storage.frame import Damage

if TYPE_CHECKING:
    from delayserver.server.telemetry import Telemetry

DISK_CHECK_S = 1.0
LOOK_MS = 1000
RELEASE_RECORDS = 10_000
"""Fewer leave no free memory worth giving back."""
CLOCK_SET_MS = 1_000
"""A clock that differs by more than this from one that cannot be set was set. A slow drift of
less adds up to this before it is noticed, and changes a lease by no more."""


log = structlog.get_logger()
T = TypeVar("T")


def wall_clock_ms() -> int:
    """Milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


class Server(Shard):
    """One shard: a data directory that is open, and everything that runs on it."""

    def __init__(
        self,
        settings: Settings,
        *,
        clock: Callable[[], int] = wall_clock_ms,
        fatal: Callable[[BaseException], None],
        progress: Progress = lambda what, done, total: None,
        sender: WebhookSender | None = None,
        telemetry: "Telemetry | None" = None,
        release_memory: Callable[[], None] = lambda: None,
        verify_catalog: bool = False,
    ) -> None:
        """Lock the directory and recover what is in it. Nothing runs before `start`.

        `verify_catalog`: all of it, however long it is. Raises StorageError, and AccessError where
        others could call without a token."""
        offset_ms = settings.clock_offset_ms
        self._fatal = fatal
        self._release_memory = release_memory
        self._seq_at_last_look = self._seq_at_release = 0
        self._sender = sender
        files = TimedFiles(str(settings.data_dir))
        self.tokens = TokenTable(TokenFile(files), settings.token, time.monotonic)
        self._tokens_error = ""
        self.telemetry = telemetry
        if settings.otel and telemetry is None:
            from delayserver.server.telemetry import Telemetry, provider_of_environment

            self.telemetry = Telemetry(provider_of_environment())
        own_clock: Callable[[], int] = (lambda: clock() + offset_ms) if offset_ms else clock
        self.tokens.refresh(own_clock())
        if not settings.on_loopback and not len(self.tokens):
            raise AccessError(
                f"{settings.host} is not a loopback address: make a token (delayserver token "
                f"create NAME --scope admin --data-dir {settings.data_dir}), or set one "
                "(DELAYSERVER_TOKEN, at least 16 characters), before others can reach the server"
            )

        def open_catalog() -> Catalog:
            files.make_directory(CATALOG_DIRECTORY)
            catalog = LmdbCatalog(
                str(settings.data_dir / CATALOG_DIRECTORY),
                max_bytes=settings.catalog_max_bytes,
                verify_all=verify_catalog,
            )
            self._cleanup.callback(catalog.close)
            return catalog

        surroundings = Surroundings(
            clock=own_clock,
            monotonic=time.monotonic,
            random_bytes=os.urandom,
            random=random.random,
            progress=progress,
        )
        super().__init__(settings, files, open_catalog, surroundings)
        self.started_ms = self.clock()
        self.pending_later = 0
        """Messages of hours that are not loaded, when it was counted last (see Queries)."""
        self.archive_waiting: list[RetiredHour] = []
        """Retired hours that are kept until they are archived, when they were listed last."""
        self.metrics = self._make_metrics()
        files.on_sync = self.metrics.on_sync
        self._report(self.recovered)

    def _report(self, recovered: Recovered) -> None:
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

    def _make_metrics(self) -> Metrics:
        engine, settings = self.engine, self.settings
        metrics = Metrics(engine.sequencer.subject_names, settings.metrics_subjects_max)
        messages, groups, hours = engine.messages, engine.groups, engine.hours
        dispatcher = engine.dispatcher
        by_subject = metrics.counter_by_subject
        by_subject("accepted", "Messages accepted", engine.publishing.accepted_by_subject)
        by_subject("cancelled", "Messages cancelled", messages.cancelled_by_subject)
        by_subject("delivered", "Deliveries that arrived", dispatcher.delivered_by_subject)
        by_subject("retried", "Deliveries tried again", engine.retried_by_subject)
        by_subject("dead", "Deliveries given up", engine.dead_by_subject)
        metrics.counter("imports", "Imports adopted", lambda: engine.imports.adopted_total)
        metrics.counter("commits", "Groups committed", lambda: groups.committed_total)
        gauge = metrics.gauge
        gauge("pending_deliveries", "Waiting in loaded hours, or on their way", hours.unsettled)
        gauge("pending_later_messages", "Waiting in later hours", lambda: self.pending_later)
        gauge("queued_deliveries", "Due, waiting for a subscriber", dispatcher.queued_count)
        gauge("in_flight_deliveries", "Being sent, or leased", dispatcher.in_flight_count)
        gauge("unmatched_messages", "Due, without any subscription", dispatcher.parked.count)
        gauge(
            "oldest_due_age_seconds",
            "How long the oldest message waits that is due and not on its way",
            lambda: self._age_s(dispatcher.oldest_due_ms()),
        )
        gauge("unfiled_bytes", "Accepted and not filed", lambda: groups.unfiled_bytes)
        gauge(
            "replay_lag_seconds",
            "How long the oldest group waits that is not filed",
            lambda: self._age_s(groups.oldest_unfiled_ms),
        )
        gauge(
            "replay_lag_records",
            "Accepted and not behind a checkpoint",
            lambda: engine.sequencer.next_seq - 1 - groups.checkpoint_seq,
        )
        gauge("leases", "Messages that consumers hold", engine.leases.count)
        gauge("waiting_pulls", "Consumers that wait for messages", dispatcher.fetches.count)
        gauge("watched_pulls", "Waiting pulls and those not purged yet", dispatcher.fetches.watched)
        gauge("timeouts", "Leases, pulls and others that may expire", engine.timeouts.size)
        gauge("subscriptions", "Subscriptions", lambda: len(engine.registry))
        gauge("disk_free_bytes", "Free on the device", lambda: self.free_bytes)
        gauge(
            "archive_waiting_hours",
            "Settled hours that are kept until they are archived (setting archive)",
            lambda: len(self.archive_waiting),
        )
        gauge(
            "archive_waiting_bytes",
            "The length of their files",
            lambda: sum(waiting.total_bytes for waiting in self.archive_waiting),
        )
        gauge("waiting_publishes", "Publishes that wait to be filed", engine.produces.count)
        heartbeats, events = engine.heartbeats, engine.events
        gauge("heartbeats", "Heartbeats that wait", heartbeats.__len__)
        metrics.counter(
            "heartbeats_renewed", "Renewals of heartbeats", lambda: heartbeats.renewed_total
        )
        metrics.counter(
            "heartbeats_fired", "Heartbeats that were not renewed", lambda: heartbeats.fired_total
        )
        metrics.counter("events", "Events that completed messages", lambda: events.events_total)
        return metrics

    def _age_s(self, since_ms: int | None) -> float:
        return 0.0 if since_ms is None else max(0, self.clock() - since_ms) / 1000

    # ── start and stop ─────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Start the threads and the clock: from now on messages fire."""
        self._loop = asyncio.get_running_loop()
        self._alarm = Alarm(self._loop, self._tick)
        self._tick_asked = False
        self._next_tick_ms = NEVER_MS
        self._clock_offset_ms = self.clock() - time.monotonic_ns() // 1_000_000
        self._sending: set[asyncio.Task[None]] = set()
        self._answers: list[Answer] = []
        self.subscription_lock = asyncio.Lock()
        if self._sender is None:
            self._sender = HttpWebhookSender(TargetPolicy(self.settings.webhook_targets))
        for thread in self.workers:
            thread.start()
        self._check_disk()
        self._tick()

    def begin_stop(self) -> None:
        """Accept nothing more, send nothing more, answer those who wait."""
        self.engine.groups.stopping = True
        self.engine.dispatcher.drain()

    async def stop(self) -> None:
        """Let what is on its way finish, file everything, close the directory."""
        engine = self.engine
        self.begin_stop()
        deadline = self._loop.time() + self.settings.drain_ms / 1000
        if self._sending:
            await asyncio.wait(self._sending, timeout=self.settings.drain_ms / 1000)
            self._on_answers()
        for task in self._sending:
            task.cancel()
        while not engine.groups.is_idle and self._loop.time() < deadline + 10:
            self._flush()
            await asyncio.sleep(0.002)
        self._alarm.close()
        self._disk_timer.cancel()
        self._flush_settle()
        for thread in self.workers:
            thread.finish()
            await asyncio.to_thread(thread.join)
        assert self._sender is not None
        await self._sender.close()
        if self.telemetry is not None:
            await asyncio.to_thread(self.telemetry.close)
        self.close()
        log.info("stopped")

    # ── how the shard is moved ─────────────────────────────────────────────────────────────────

    def post(self, function: Callable[..., None], *arguments: Any) -> None:
        # The loop is closed already when a thread ends late; nobody waits for it then.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def soon(self, function: Callable[[], None]) -> None:
        self._loop.call_soon(function)

    def tick_soon(self, due_ms: int = 0) -> None:
        if not self._tick_asked and due_ms < self._next_tick_ms:
            self._tick_asked = True
            self._loop.call_soon(self._tick)

    def on_fatal(self, error: BaseException) -> None:
        log.critical("the server must stop", error=str(error), exc_info=error)
        self._fatal(error)

    def on_damage(self, error: DamageError) -> None:
        log.error(
            "damage found",
            error=str(error),
            file=error.path,
            offset=error.offset,
            first_seq=error.first_seq,
            last_seq=error.last_seq,
        )

    def given_up(self, delivery: Delivery, reason: str) -> None:
        log.warning("dead letter", reason=reason, **self._about(delivery))

    def _about(self, delivery: Delivery) -> dict[str, object]:
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

    def hand_out(self, handout: Handout, deliveries: Deliveries) -> None:
        self._observe_lateness((self.clock() - deliveries.settled["due_ms"]).tolist())
        if self.telemetry is not None:
            for delivery in deliveries:
                self.telemetry.delivery("receive", handout.subscription.name, delivery).end({})
        super().hand_out(handout, deliveries)

    def _observe_lateness(self, late_ms: list[int]) -> None:
        for one_ms, count in Counter(late_ms).items():
            self.metrics.lateness_seconds.observe(one_ms / 1000, count)

    def send(self, subscription: Subscription, deliveries: list[Delivery]) -> None:
        now_ms = self.clock()
        self._observe_lateness([now_ms - delivery.entry.due_ms for delivery in deliveries])
        task = self._loop.create_task(self._send(subscription, deliveries))
        self._sending.add(task)
        task.add_done_callback(self._sent)

    def _sent(self, task: asyncio.Task[None]) -> None:
        self._sending.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            # The sender answers for what goes wrong on the network; this is a mistake of ours, and
            # the deliveries would stay on their way for good.
            self.on_fatal(error)

    async def _send(self, subscription: Subscription, deliveries: list[Delivery]) -> None:
        assert self._sender is not None
        request = webhook_request(subscription, deliveries, self.clock() // 1000)
        spans = []
        if self.telemetry is not None:
            begin = self.telemetry.delivery
            spans = [begin("deliver", subscription.name, delivery) for delivery in deliveries]
            if not subscription.batch_max:
                # The receiver belongs to this delivery, which links to the publish.
                headers = in_trace(request.headers, spans[0].trace, max_bytes=HEADERS_BYTES_MAX)
                request = replace(request, headers=headers)
        response: WebhookResponse = await self._sender.send(request)
        is_taken = response.status is not None and 200 <= response.status < 300
        failure = None if is_taken else response.error or f"HTTP {response.status}"
        for span in spans:
            span.end({"http.response.status_code": response.status or 0}, failure)
        if not is_taken:
            for delivery in deliveries:
                log.debug(
                    "webhook failed",
                    status=response.status,
                    error=response.error,
                    **self._about(delivery),
                )
        if not self._answers:
            self._loop.call_soon(self._on_answers)
        self._answers.append((deliveries, response))

    def _on_answers(self) -> None:
        """All that came in this turn of the loop."""
        answers, self._answers = self._answers, []
        try:
            self.engine.on_sent(answers, self.clock())
        except Exception as error:
            self.on_fatal(error)  # a mistake of ours: they would stay on their way for good

    # ── time, disk and memory ──────────────────────────────────────────────────────────────────

    def _tick(self) -> None:
        self._tick_asked = False
        now_ms = self.clock()
        self._watch_clock(now_ms)
        self._next_tick_ms = next_ms = self.engine.advance(now_ms)
        # Never longer than a second, since the clock may be set; and to the very beginning of the
        # millisecond, which is as early as anything may fire.
        wait_ms = min(next_ms - self.clock(), LOOK_MS)
        self._alarm.set(wait_ms * 1_000_000 - time.time_ns() % 1_000_000)

    def _watch_clock(self, now_ms: int) -> None:
        """Notice when somebody sets the clock, by comparing it with one that nobody can set."""
        offset_ms = now_ms - time.monotonic_ns() // 1_000_000
        delta_ms = offset_ms - self._clock_offset_ms
        if abs(delta_ms) > CLOCK_SET_MS:
            log.warning("the clock was set", by_ms=delta_ms)
            self.engine.on_clock_set(delta_ms)
            self._clock_offset_ms = offset_ms

    def _check_disk(self) -> None:
        free = self._files.free_bytes()
        self.free_bytes = free
        self.engine.publishing.disk_is_low = free < self.settings.disk_reserve_bytes
        self._refresh_tokens()
        self._release_when_idle()
        self._disk_timer = self._loop.call_later(DISK_CHECK_S, self._check_disk)

    def _refresh_tokens(self) -> None:
        """Take over what `delayserver token` has changed."""
        try:
            self.tokens.refresh(self.clock())
            self._tokens_error = ""
        except StorageError as error:
            if str(error) != self._tokens_error:
                self._tokens_error = str(error)
                log.error("the tokens stay as they were", error=str(error))

    def _release_when_idle(self) -> None:
        """Give free memory back to the system, once nothing has been accepted for a while.

        Not under load: it would be needed again at once, and it is a pause of some ms."""
        seq = self.engine.sequencer.next_seq
        is_idle = seq == self._seq_at_last_look and seq == self.engine.groups.checkpoint_seq + 1
        if is_idle and seq - self._seq_at_release >= RELEASE_RECORDS:
            self._seq_at_release = seq
            self._loop.run_in_executor(None, self._release_memory)
        self._seq_at_last_look = seq

    # ── what the HTTP layer asks for ───────────────────────────────────────────────────────────

    async def acknowledged(
        self, group: Group | None, seq: int, level: Level, timeout_ms: int
    ) -> Level:
        """How far a publish has come when it has reached `level`, or else after `timeout_ms`.

        Raises what kept its group from being durable."""
        future: asyncio.Future[Level] = self._loop.create_future()

        def answer(reached: Level, error: Exception | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(reached)
            else:
                future.set_exception(error)

        self.engine.timeouts.look(self.clock())
        self.engine.produces.wait(group, seq, level, timeout_ms, answer)
        self.tick_soon()
        return await future

    def durable(self, group: Group | None) -> asyncio.Future[None]:
        """Done when the group is durable; raises what kept it from being so."""
        future: asyncio.Future[None] = self._loop.create_future()
        if group is None:
            future.set_result(None)
        else:
            group.when_durable(_ending(future))
        return future

    async def subject_of(self, seq: int, due_ms: int) -> str:
        """The subject of a message. Raises NotFoundError, DamageError."""
        found = await self.find(self.engine.messages.locate(seq, due_ms))
        return self.engine.sequencer.subject_names[found.subject_id]

    async def move(self, seq: int, due_ms: int, new_due_ms: int, expected: Versions = None) -> str:
        """Give a message a new due time; durable on return. Returns its new version."""
        messages = self.engine.messages
        found = await self.find(messages.locate(seq, due_ms))
        group = messages.move(seq, due_ms, new_due_ms, found.payload, found.subject_id, expected)
        version = messages.version(seq)
        await self.durable(group)
        return version

    async def find(self, located: Located) -> Found:
        """Payload and subject of a message."""
        entry = located.entry
        found = self.unfiled(entry) or await self.call(lambda reader: reader.find(entry))
        if found is None:
            raise NotFoundError("the message was settled, and its hour is past its retention")
        return found

    def call(self, function: Callable[[Reader], T]) -> "asyncio.Future[T]":
        """Run something in the reader thread."""
        future: asyncio.Future[T] = self._loop.create_future()

        def done(result: object, error: Exception | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        self.reading.put(CallRequest(function, done))
        return future

    def pull(self, subscription: Subscription, request: PullRequest) -> Callable[[], None]:
        """Have `request` answered with messages and their leases, at once or later; returns what
        to call if the consumer is gone before. Raises StoppingError."""
        if self.engine.groups.stopping:
            raise StoppingError("the server is stopping")
        answer, is_gone = request.answer, False

        def answer_unless_gone(pulled: Pulled) -> None:
            if not is_gone:
                answer(pulled)
            else:
                # What the consumer would have got is available again.
                self.engine.nack(pulled.tokens, 0, self.clock())

        def cancel() -> None:
            nonlocal is_gone
            is_gone = True
            fetch.cancel()  # The consumer is gone: nothing must be leased to it.

        request.answer = answer_unless_gone
        fetch = self.engine.pull(subscription, request, self.clock())
        if not fetch.is_completed:
            self.tick_for_timeouts()
        return cancel

    def ack(
        self, subscription: Subscription, tokens: list[str], done: Callable[[list[str]], None]
    ) -> None:
        """Acknowledge leases; `done` gets those that were over, once the others are recorded."""
        expired = self.engine.ack(tokens, self.clock(), subscription.id)
        if len(expired) < len(tokens):
            self.when_settled(partial(done, expired))
        else:
            done(expired)

    def nack(
        self, subscription: Subscription, tokens: list[str], delay_ms: int
    ) -> tuple[list[str], Group | None]:
        """Give leased messages back. Returns the tokens that were over, and the group that has to
        be durable before that is told (None: none)."""
        expired = self.engine.nack(tokens, delay_ms, self.clock(), subscription.id)
        self.tick_soon()
        return expired, self.engine.groups.not_durable() if delay_ms else None

    def extend(self, subscription: Subscription, tokens: list[str], lease_ms: int) -> list[str]:
        """Give leases a new deadline. Returns those that were over."""
        expired = self.engine.extend(tokens, lease_ms, self.clock(), subscription.id)
        self.tick_soon()  # A lease may have been made shorter.
        return expired

    async def event(self, key: str) -> tuple[int, int]:
        """Complete what watches a key; durable on return. How many were cancelled and fired."""
        events, before_seq = self.engine.events, self.engine.sequencer.next_seq
        cancelled = fired = 0
        while watchers := events.watchers(key, before_seq):
            watchers = watchers[:EVENT_MESSAGES_MAX]
            bodies = await self._bodies_to_fire(watchers)
            done = events.complete(key, watchers, bodies, self.clock())
            self.tick_soon()
            await self.durable(done.group)
            cancelled += len(done.cancelled)
            fired += len(done.fired)
            if not done.cancelled and not done.fired:
                break  # What is left cannot be read.
        # What another event has decided must be durable, too.
        await self.durable(self.engine.groups.not_durable())
        return cancelled, fired

    async def _bodies_to_fire(self, watchers: list[Watcher]) -> dict[int, tuple[Payload, int]]:
        bodies: dict[int, tuple[Payload, int]] = {}
        on_disk: list[tuple[int, ScheduleEntry]] = []
        for watcher in watchers:
            if watcher.on_event == OnEvent.FIRE:
                entry = self.engine.events.entry(watcher)
                if (found := self.unfiled(entry)) is not None:
                    bodies[watcher.seq] = found.payload, found.subject_id
                else:
                    on_disk.append((watcher.seq, entry))

        def read(entries: list[tuple[int, ScheduleEntry]], reader: Reader) -> None:
            for seq, entry in entries:
                try:
                    found = reader.find(entry)
                except DamageError as error:
                    self.on_damage(error)
                    continue
                if found is not None:
                    bodies[seq] = found.payload, found.subject_id

        for start in range(0, len(on_disk), READ_ROWS_MAX):
            await self.call(partial(read, on_disk[start : start + READ_ROWS_MAX]))
        return bodies

    async def put_subscription(self, subscription: Subscription) -> None:
        """Add, change or remove a subscription; durable and in force on return."""
        await self.durable(self.engine.put_subscription(subscription))

    async def settled(self) -> None:
        """Done when every delivery that ended so far is recorded."""
        future: asyncio.Future[None] = self._loop.create_future()
        self.when_settled(lambda: None if future.done() else future.set_result(None))
        await future

    async def adopt(self, path: str) -> Import:
        """Adopt a staged import; on return it is durable. See Imports.adopt for the errors.

        Besides: NotFoundError, StagingError, ConflictError, TooLargeError."""
        future: asyncio.Future[Import] = self._loop.create_future()

        def done(found: Import | None, error: Exception | None) -> None:
            if future.done():
                return
            if found is not None:
                future.set_result(found)
            else:
                assert error is not None
                future.set_exception(error)

        self.engine.imports.adopt(path, done)
        return await future

    async def retired_hours(self) -> list[RetiredHour]:
        """Retired hours that are kept, in order, as of the last checkpoint."""
        # There may be years of them.
        return await asyncio.to_thread(lambda: list(retired_hours(self.catalog, self._files)))

    async def confirm_archive(self, hour: int, archived: Archived) -> None:
        """An hour was archived; durable on return.

        Raises NotFoundError, ConflictError, OverloadedError, StoppingError."""
        self.engine.groups.admit(0)
        future: asyncio.Future[None] = self._loop.create_future()
        self.replayer.put(ConfirmRequest(hour, archived, _ending(future)))
        await future

    async def checkpoint(self) -> None:
        """File everything that was accepted so far, so that the catalog shows it."""
        await self.durable(self.engine.groups.not_durable())
        future: asyncio.Future[None] = self._loop.create_future()
        self.replayer.put(
            CheckpointRequest(lambda: None if future.done() else future.set_result(None))
        )
        await future


def _ending(future: "asyncio.Future[None]") -> Callable[[Exception | None], None]:
    """A callback that ends the future, unless nobody waits for it any more."""

    def done(error: Exception | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    return done


def _named(damage: Damage) -> dict[str, object]:
    return {
        "file": damage.path,
        "offset": damage.offset,
        "end": damage.end,
        "reason": damage.reason,
        "first_seq": damage.first_seq,
        "last_seq": damage.last_seq,
    }
