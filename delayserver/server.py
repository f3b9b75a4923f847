"""The server: the engine, its threads and its clock, wired together; what the HTTP layer talks to.

This is the only place that starts threads, reads the clock, and turns callbacks into awaitables.
Every call of the engine is on the event loop, also what comes back from a thread.

Cost: one loop wake-up per commit group. Threads: all public coroutines belong to the event loop.
"""

import asyncio
import contextlib
import itertools
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import msgspec
import structlog

from delayserver.config import Settings
from delayserver.delivery.sender import HttpWebhookSender
from delayserver.delivery.webhook import (
    WebhookRequest,
    WebhookResponse,
    WebhookSender,
)
from delayserver.dispatcher import PullRequest, Take
from delayserver.engine import Engine
from delayserver.errors import InputError, NotFoundError, StoppingError
from delayserver.ids import IdCodec, KeyHasher
from delayserver.loader import LoadedHour, Loader
from delayserver.message import Content, Delivery, Entry, Payload, State, decode_payload
from delayserver.messages import Located, NewMessage, Published
from delayserver.metrics import Metrics
from delayserver.reader import Found, Reader
from delayserver.recovery import Progress, Recovered, recover
from delayserver.replay import (
    DeadLetter,
    Filed,
    Replay,
    Snapshot,
    dead_letter_key,
    parse_dead_letter_key,
    read_hours,
)
from delayserver.sequencer import ChangeState, Group, Sequencer
from delayserver.settler import Settler
from delayserver.signing import WebhookSecret
from delayserver.subscriptions import Subscription
from delayserver.targets import TargetPolicy
from delayserver.times import format_time
from delayserver.wheel import SLOT_MS
from delayserver.workers import (
    CallRequest,
    CheckpointRequest,
    CommitterThread,
    HourRequest,
    LoaderThread,
    LoadRequest,
    ReaderThread,
    ReplayThread,
    RetireRequest,
    SettleRequest,
    SettlerThread,
    TakeRequest,
    Worker,
)
from storage.catalog import Catalog, LmdbCatalog, Table
from storage.directory import CATALOG_DIRECTORY, LOCK_FILE, open_identity
from storage.errors import DamageError
from storage.files import Files, OsFiles
from storage.frame import Damage, Rows
from storage.hour_log import HourLog
from storage.message_log import Durability, MessageLog
from storage.rows import HOUR_MS, LogKind, Outcome

DISK_CHECK_S = 1.0
REDRIVE_PAGE = 500
RELEASE_RECORDS = 10_000
"""Fewer leave no free memory worth giving back."""
CLOCK_SET_MS = 1_000
"""A clock that differs by more than this from one that cannot be set was set. A slow drift of
less adds up to this before it is noticed, and changes a lease by no more."""
CONTENT_TYPES = {Content.JSON: "application/json", Content.BINARY: "application/octet-stream"}

log = structlog.get_logger()
T = TypeVar("T")


@dataclass(slots=True)
class DeadLetterView:
    """A message that no attempt delivered."""

    entry_seq: int
    message_id: str
    subject: str
    reason: str
    died_ms: int
    attempts: int
    payload: Payload


@dataclass(slots=True)
class DeliveryView:
    """What became of a message at one subscription."""

    subscription: str
    state: str
    attempt: int
    at_ms: int


@dataclass(slots=True)
class MessageView:
    """A message as somebody who looks it up sees it."""

    message_id: str
    subject: str
    due_ms: int
    state: State
    attempts: int
    payload: Payload
    deliveries: list[DeliveryView] = field(default_factory=list)


def wall_clock_ms() -> int:
    """Milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


class Server:
    """One shard: a data directory that is open, and everything that runs on it."""

    def __init__(
        self,
        settings: Settings,
        *,
        clock: Callable[[], int] = wall_clock_ms,
        fatal: Callable[[BaseException], None],
        progress: Progress = lambda what, done, total: None,
        sender: WebhookSender | None = None,
        release_memory: Callable[[], None] = lambda: None,
    ) -> None:
        """Lock the directory and recover what is in it. Nothing runs before `start`.

        Raises StorageError."""
        self.settings = settings
        offset_ms = settings.clock_offset_ms
        self.clock: Callable[[], int] = (lambda: clock() + offset_ms) if offset_ms else clock
        self._fatal = fatal
        self._release_memory = release_memory
        self._seq_at_last_look = self._seq_at_release = 0
        self._sender = sender
        self._cleanup = contextlib.ExitStack()
        try:
            self._open(progress)
        except BaseException:
            self._cleanup.close()
            raise

    def _open(self, progress: Progress) -> None:
        settings = self.settings
        files: Files = OsFiles(str(settings.data_dir))
        self._files = files
        self._cleanup.enter_context(files.lock(LOCK_FILE))
        identity = open_identity(files, random_bytes=os.urandom)
        files.make_directory(CATALOG_DIRECTORY)
        catalog: Catalog = LmdbCatalog(
            str(settings.data_dir / CATALOG_DIRECTORY), max_bytes=settings.catalog_max_bytes
        )
        self._cleanup.callback(catalog.close)
        self.catalog = catalog

        def hour_log(kind: LogKind) -> HourLog:
            made = HourLog(files, kind, stamp=identity.stamp)
            self._cleanup.callback(made.close)
            return made

        self._message_log = MessageLog(
            files,
            stamp=identity.stamp,
            segment_bytes=settings.segment_bytes,
            durability=settings.durability,
        )
        schedule = hour_log(LogKind.SCHEDULE)
        replay_dispatch = hour_log(LogKind.DISPATCH)
        self._replay = Replay(catalog, schedule, replay_dispatch, self._message_log)
        self._settler = Settler(hour_log(LogKind.DISPATCH))
        self._loader = Loader(
            hour_log(LogKind.SCHEDULE), hour_log(LogKind.DISPATCH), slot_ms=SLOT_MS
        )
        now_ms = self.clock()
        recovered = recover(
            catalog,
            self._message_log,
            schedule,
            self._replay,
            self._settler,
            self._loader,
            now_ms=now_ms,
            lead_ms=settings.lead_ms,
            progress=progress,
        )
        self._report(recovered)
        ids = IdCodec(identity.shard, identity.id_secret)
        sequencer = Sequencer(catalog, next_seq=recovered.next_seq, subjects=recovered.subjects)
        self._reader = Reader(
            hour_log(LogKind.SCHEDULE),
            hour_log(LogKind.DISPATCH),
            ids,
            sequencer.subject_names,
            self._on_damage,
        )
        first_hour = min([recovered.through_hour, *(hour.hour for hour in recovered.loaded)])
        self.engine = Engine(
            settings,
            catalog,
            sequencer,
            recovered.registry,
            ids,
            KeyHasher(identity.id_secret),
            self,
            first_hour=first_hour,
            now_ms=now_ms,
            epoch=os.urandom(4).hex(),
            random=random.random,
        )
        self.engine.start(recovered.through_hour, recovered.loaded, recovered.retired_through_hour)
        self.metrics = self._make_metrics()

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
        metrics, engine = Metrics(), self.engine
        messages, groups, hours = engine.messages, engine.groups, engine.hours
        metrics.counter("accepted", "Messages accepted", lambda: messages.accepted_total)
        metrics.counter("cancelled", "Messages cancelled", lambda: messages.cancelled_total)
        metrics.counter(
            "delivered", "Deliveries that arrived", lambda: engine.dispatcher.delivered_total
        )
        metrics.counter("retried", "Deliveries tried again", lambda: engine.retried_total)
        metrics.counter("dead", "Deliveries given up", lambda: engine.dead_total)
        metrics.counter("commits", "Groups committed", lambda: groups.committed_total)
        metrics.gauge("pending_deliveries", "Waiting in loaded hours", hours.unsettled)
        metrics.gauge("unmatched_messages", "Due, without any subscription", self._unmatched)
        metrics.gauge("unfiled_bytes", "Accepted and not filed", lambda: groups.unfiled_bytes)
        metrics.gauge(
            "replay_lag_records",
            "Accepted and not behind a checkpoint",
            lambda: engine.sequencer.next_seq - 1 - groups.checkpoint_seq,
        )
        metrics.gauge("leases", "Messages that consumers hold", engine.leases.count)
        metrics.gauge("disk_free_bytes", "Free on the device", lambda: self.free_bytes)
        return metrics

    def _unmatched(self) -> int:
        return self.engine.dispatcher.parked_count()

    # ── start and stop ─────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Start the threads and the clock: from now on messages fire."""
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._tick_asked = False
        self._clock_offset_ms = self.clock() - time.monotonic_ns() // 1_000_000
        self._settle_asked = False
        self._settle = SettleRequest()
        self._sending: set[asyncio.Task[None]] = set()
        self.subscription_lock = asyncio.Lock()
        if self._sender is None:
            self._sender = HttpWebhookSender(TargetPolicy(self.settings.webhook_targets))
        settings, post, fatal = self.settings, self._post, self._on_fatal
        self._committer = CommitterThread(
            self._message_log, post, self._on_committed, self.engine.groups.on_commit_failed, fatal
        )
        self._replayer = ReplayThread(
            self._replay,
            self.clock,
            post,
            self._on_filed,
            self.engine.on_checkpoint,
            self._on_loading,
            fatal,
            checkpoint_ms=settings.checkpoint_ms,
            checkpoint_bytes=settings.checkpoint_bytes,
            retention_ms=settings.retention_ms,
            on_deleted=self._on_deleted,
        )
        self._loading = LoaderThread(self._loader, post, self._on_loaded, fatal)
        self._reading = ReaderThread(self._reader, post, fatal)
        self._settling = SettlerThread(
            self._settler,
            self.clock,
            time.monotonic,
            post,
            fatal,
            sync_ms=settings.settle_sync_ms,
            durable=settings.durability is Durability.FSYNC,
        )
        self._threads: list[Worker[Any]] = [
            self._committer,
            self._settling,
            self._loading,
            self._reading,
            self._replayer,
        ]
        for thread in self._threads:
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
        for task in self._sending:
            task.cancel()
        while not engine.groups.is_idle and self._loop.time() < deadline + 10:
            self._flush()
            await asyncio.sleep(0.002)
        if self._timer is not None:
            self._timer.cancel()
        self._disk_timer.cancel()
        self._flush_settle()
        for thread in self._threads:
            thread.finish()
            await asyncio.to_thread(thread.join)
        assert self._sender is not None
        await self._sender.close()
        self._cleanup.close()
        log.info("stopped")

    def _post(self, function: Callable[..., None], *arguments: object) -> None:
        # The loop is closed already when a thread ends late; nobody waits for it then.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def _on_fatal(self, error: BaseException) -> None:
        log.critical("the server must stop", error=str(error), exc_info=error)
        self._fatal(error)

    def _on_damage(self, error: DamageError) -> None:
        log.error("damage found", error=str(error))

    def _check_disk(self) -> None:
        free = self._files.free_bytes()
        self.free_bytes = free
        self.engine.messages.disk_is_low = free < self.settings.disk_reserve_bytes
        self._release_when_idle()
        self._disk_timer = self._loop.call_later(DISK_CHECK_S, self._check_disk)

    def _release_when_idle(self) -> None:
        """Give free memory back to the system, once nothing has been accepted for a while.

        Not under load: it would be needed again at once, and it is a pause of some ms."""
        seq = self.engine.sequencer.next_seq
        is_idle = seq == self._seq_at_last_look and seq == self.engine.groups.checkpoint_seq + 1
        if is_idle and seq - self._seq_at_release >= RELEASE_RECORDS:
            self._seq_at_release = seq
            self._loop.run_in_executor(None, self._release_memory)
        self._seq_at_last_look = seq

    # ── time ───────────────────────────────────────────────────────────────────────────────────

    def _tick(self) -> None:
        self._tick_asked = False
        if self._timer is not None:
            self._timer.cancel()
        now_ms = self.clock()
        self._watch_clock(now_ms)
        next_ms = self.engine.advance(now_ms)
        # Never longer than a second, since the clock may be set.
        delay_s = min(max(next_ms - now_ms, 0) / 1000, 1.0)
        self._timer = self._loop.call_later(delay_s, self._tick)

    def _watch_clock(self, now_ms: int) -> None:
        """Notice when somebody sets the clock, by comparing it with one that nobody can set."""
        offset_ms = now_ms - time.monotonic_ns() // 1_000_000
        delta_ms = offset_ms - self._clock_offset_ms
        if abs(delta_ms) > CLOCK_SET_MS:
            log.warning("the clock was set", by_ms=delta_ms)
            self.engine.on_clock_set(delta_ms)
            self._clock_offset_ms = offset_ms

    def _tick_soon(self) -> None:
        if not self._tick_asked:
            self._tick_asked = True
            self._loop.call_soon(self._tick)

    # ── ports of the engine ────────────────────────────────────────────────────────────────────

    def wake(self) -> None:
        self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self.engine.groups.flush(self.clock())

    def commit(self, group: Group) -> None:
        self.metrics.group_records.observe(len(group.rows))
        self._commit_began_at = time.perf_counter()
        self._committer.put(group)

    def _on_committed(self) -> None:
        self.metrics.commit_seconds.observe(time.perf_counter() - self._commit_began_at)
        if self.engine.on_committed(self.clock()):
            self._tick_soon()

    def file(self, group: Group) -> None:
        # It files about once a second, by its own clock; only a large backlog wakes it before.
        waiting_bytes = self.engine.groups.unfiled_bytes
        self._replayer.put(group, wake=waiting_bytes >= self.settings.checkpoint_bytes)

    def _on_filed(self, filed: Filed) -> None:
        self.engine.on_filed(filed)
        self._tick_soon()

    def load(self, through_hour: int) -> None:
        self._replayer.put(LoadRequest(through_hour))

    def _on_loading(self, before: int, snapshots: list[Snapshot]) -> None:
        self.engine.on_loading(before, snapshots)
        registry = self.engine.registry.snapshot()
        names = self.engine.sequencer.subject_names
        for snapshot in snapshots:
            self._loading.put(HourRequest(snapshot, registry, dict(names)))

    def _on_deleted(self, hours: list[int]) -> None:
        def release(reader: Reader) -> None:
            for hour in hours:
                reader.release(hour)

        self._reading.put(CallRequest(release, lambda result, error: None))

    def _on_loaded(self, loaded: LoadedHour) -> None:
        for damage in loaded.damage:
            self._on_damage(damage.error())
        self.engine.on_loaded(loaded)
        self._tick_soon()

    def retire(self, hours: list[int], through_seq: int) -> None:
        def recorded() -> None:
            self._replayer.put(RetireRequest(hours, through_seq))

        self._settle.forget += hours
        self._settle.done.append(recorded)
        self._settle_soon()

    def read(self, take: Take) -> None:
        unfiled: dict[int, bytes] = {}
        for batch in take.batches:
            for seq in batch.rows["seq"][batch.rows["locator"] == 0].tolist():
                found = self.engine.groups.payload(seq)
                if found is not None:
                    unfiled[seq] = found[0]
        if len(unfiled) == take.count:
            # Everything is in memory: no need to go through the thread.
            self.engine.on_read(take, self._reader.deliveries(take, unfiled))
        else:
            self._reading.put(TakeRequest(take, unfiled, self.engine.on_read))

    def hand_out(self, take: Take, deliveries: list[Delivery]) -> None:
        now_ms = self.clock()
        for delivery in deliveries:
            self.metrics.lateness_seconds.observe((now_ms - delivery.entry.due_ms) / 1000)
        self.engine.hand_out(take, deliveries, now_ms)
        self._tick_soon()

    def settle(self, hour: int, row: bytes) -> None:
        self._settle.rows_by_hour.setdefault(hour, []).append(row)
        self._settle_soon()

    def _settle_soon(self) -> None:
        if not self._settle_asked:
            self._settle_asked = True
            self._loop.call_soon(self._flush_settle)

    def _flush_settle(self) -> None:
        self._settle_asked = False
        request, self._settle = self._settle, SettleRequest()
        if request.rows_by_hour or request.done:
            self._settling.put(request)

    def send(self, subscription: Subscription, delivery: Delivery) -> None:
        late_ms = self.clock() - delivery.entry.due_ms
        self.metrics.lateness_seconds.observe(late_ms / 1000)
        task = self._loop.create_task(self._send(subscription, delivery))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _send(self, subscription: Subscription, delivery: Delivery) -> None:
        assert self._sender is not None
        payload = delivery.payload
        request = WebhookRequest(
            url=subscription.url,
            message_id=delivery.message_id,
            subject=delivery.subject,
            key=payload.key,
            due_ms=delivery.origin.due_ms,
            attempt=delivery.attempt,
            headers=payload.headers or {},
            body=payload.body,
            content_type=CONTENT_TYPES[Content(payload.content)],
            secrets=tuple(WebhookSecret.parse(secret) for secret in subscription.secrets),
            timeout_ms=subscription.timeout_ms,
            timestamp_s=self.clock() // 1000,
        )
        response: WebhookResponse = await self._sender.send(request)
        self.engine.on_sent(delivery, response, self.clock())

    # ── what the HTTP layer asks for ───────────────────────────────────────────────────────────

    def publish(self, messages: list[NewMessage]) -> list[Published]:
        """Accept all or none; tell nobody before `durable(group)`. See Messages.publish."""
        return self.engine.messages.publish(messages, self.clock())

    def durable(self, group: Group | None) -> asyncio.Future[None]:
        """Done when the group is durable; raises what kept it from being so."""
        future: asyncio.Future[None] = self._loop.create_future()

        def waiter(error: Exception | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

        if group is None:
            future.set_result(None)
        else:
            group.when_durable(waiter)
        return future

    async def cancel(self, seq: int, due_ms: int) -> None:
        """Cancel; on return it is durable that the message never fires (I5)."""
        await self.durable(self.engine.messages.cancel(seq, due_ms))

    async def move(self, seq: int, due_ms: int, new_due_ms: int) -> None:
        """Give a message a new due time; durable on return."""
        found = await self._find(self.engine.messages.locate(seq, due_ms))
        group = self.engine.messages.move(seq, due_ms, new_due_ms, found.payload, found.subject_id)
        await self.durable(group)

    async def _find(self, located: Located) -> Found:
        """Payload and subject of a message."""
        entry = located.entry
        unfiled = self.engine.groups.payload(entry.seq)
        if unfiled is not None:
            sealed, subject_id = unfiled
            payload = self._reader.decode(entry, sealed)
            return Found(payload, subject_id, 0)
        found = await self._call(lambda reader: reader.find(entry))
        if found is None:
            raise NotFoundError("the message was settled, and its hour is past its retention")
        return found

    def _call(self, function: Callable[[Reader], T]) -> "asyncio.Future[T]":
        """Run something in the reader thread."""
        future: asyncio.Future[T] = self._loop.create_future()

        def done(result: object, error: Exception | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        self._reading.put(CallRequest(function, done))
        return future

    async def look_up(self, seq: int, due_ms: int) -> MessageView:
        """A message, its state and what became of it so far. Raises NotFoundError, DamageError."""
        messages, registry = self.engine.messages, self.engine.registry
        located = messages.locate(seq, due_ms)
        found = await self._find(located)
        view = MessageView(
            message_id=self.engine.ids.encode(due_ms, seq),
            subject=self.engine.sequencer.subject_names[found.subject_id],
            due_ms=located.entry.due_ms,
            state=located.state,
            attempts=located.attempts,
            payload=found.payload,
        )
        entries = {0: (located.entry, 0)}
        for subscription_id, change in self.engine.sequencer.changes(seq).items():
            if subscription_id:
                entries[subscription_id] = (Entry(change.entry_seq, change.due_ms), change.attempt)
        if located.state is State.SCHEDULED and len(entries) == 1:
            return view
        for entry, _ in entries.values():
            rows = await self._call(partial(_settled, entry))
            for row in rows[rows["outcome"] == Outcome.DELIVERED]:
                subscription = registry.by_id(int(row["subscription_id"]))
                name = subscription.name if subscription else ""
                attempt, at_ms = int(row["attempt"]), int(row["settled_ms"])
                view.deliveries.append(DeliveryView(name, State.DELIVERED, attempt, at_ms))
                view.attempts = max(view.attempts, attempt)
        done = {delivery.subscription for delivery in view.deliveries}
        for subscription_id, (entry, attempt) in entries.items():
            subscription = registry.by_id(subscription_id)
            if subscription is None or subscription.name in done:
                continue
            change = self.engine.sequencer.changes(seq)[subscription_id]
            state = State.DEAD if located.state is State.DEAD else State.SCHEDULED
            view.deliveries.append(DeliveryView(subscription.name, state, attempt, entry.due_ms))
            view.attempts = max(view.attempts, attempt - (state is State.SCHEDULED))
        return view

    async def pull(
        self, subscription: Subscription, max_messages: int, wait_ms: int, lease_ms: int
    ) -> list[tuple[Delivery, str]]:
        """Messages and their leases, as soon as there are any, none after `wait_ms`."""
        if self.engine.groups.stopping:
            raise StoppingError("the server is stopping")
        future: asyncio.Future[list[tuple[Delivery, str]]] = self._loop.create_future()

        def answer(deliveries: list[tuple[Delivery, str]]) -> None:
            if not future.done():
                future.set_result(deliveries)
                return
            # The consumer is gone: what it would have got is available again.
            for _, token in deliveries:
                self.engine.nack(token, 0, self.clock())

        request = PullRequest(max_messages, lease_ms, self.clock() + wait_ms, answer)
        self.engine.pull(subscription, request)
        self._tick_soon()
        try:
            return await future
        except asyncio.CancelledError:
            # The consumer is gone: nothing must be leased to it.
            with contextlib.suppress(ValueError):
                self.engine.dispatcher.queue(subscription).requests.remove(request)
            raise

    def _is_of(self, token: str, subscription: Subscription) -> bool:
        """Whether a lease is held, by a consumer of this subscription."""
        delivery = self.engine.leases.get(token)
        return delivery is not None and delivery.subscription_id == subscription.id

    async def ack(self, subscription: Subscription, tokens: list[str]) -> list[str]:
        """Acknowledge leases; on return it is recorded. Returns those that were over."""
        now_ms = self.clock()
        expired = [
            token
            for token in tokens
            if not (self._is_of(token, subscription) and self.engine.ack(token, now_ms))
        ]
        if len(expired) < len(tokens):
            future: asyncio.Future[None] = self._loop.create_future()

            def recorded() -> None:
                if not future.done():
                    future.set_result(None)

            self._settle.done.append(recorded)
            self._settle_soon()
            await future
        return expired

    async def nack(self, subscription: Subscription, tokens: list[str], delay_ms: int) -> list[str]:
        """Give leased messages back. Returns the tokens that were over."""
        now_ms = self.clock()
        expired = [
            token
            for token in tokens
            if not (self._is_of(token, subscription) and self.engine.nack(token, delay_ms, now_ms))
        ]
        self._tick_soon()
        await self.durable(self.engine.groups.not_durable() if delay_ms else None)
        return expired

    def extend(self, subscription: Subscription, tokens: list[str], lease_ms: int) -> list[str]:
        """Give leases a new deadline. Returns those that were over."""
        deadline_ms = self.clock() + lease_ms
        return [
            token
            for token in tokens
            if not (
                self._is_of(token, subscription) and self.engine.leases.extend(token, deadline_ms)
            )
        ]

    async def put_subscription(self, subscription: Subscription) -> None:
        """Add, change or remove a subscription; durable and in force on return."""
        await self.durable(self.engine.put_subscription(subscription))

    async def checkpoint(self) -> None:
        """File everything that was accepted so far, so that the catalog shows it."""
        await self.durable(self.engine.groups.not_durable())
        future: asyncio.Future[None] = self._loop.create_future()
        self._replayer.put(
            CheckpointRequest(lambda: None if future.done() else future.set_result(None))
        )
        await future

    # ── dead letters ───────────────────────────────────────────────────────────────────────────

    async def dead_letters(
        self, subscription: Subscription, from_seq: int, limit: int
    ) -> list[DeadLetterView]:
        """Dead letters of a subscription from one schedule row on, in the order of their rows."""
        await self.checkpoint()
        return await asyncio.to_thread(self._scan_dead_letters, subscription, from_seq, limit)

    def _scan_dead_letters(
        self, subscription: Subscription, from_seq: int, limit: int
    ) -> list[DeadLetterView]:
        prefix = subscription.id.to_bytes(4, "big")
        pairs = self.catalog.scan(
            Table.DEAD_LETTERS, dead_letter_key(subscription.id, from_seq), prefix=prefix
        )
        letters = []
        for key, value in itertools.islice(pairs, limit):
            letter = msgspec.msgpack.decode(value, type=DeadLetter)
            _, entry_seq = parse_dead_letter_key(key)
            payload = decode_payload(letter.payload, "catalog", 0, entry_seq)
            origin = payload.origin
            assert origin is not None
            letters.append(
                DeadLetterView(
                    entry_seq,
                    self.engine.ids.encode(origin.published_due_ms, origin.message_seq),
                    self.engine.sequencer.subject_names[origin.subject_id],
                    letter.reason,
                    letter.died_ms,
                    letter.attempts,
                    payload,
                )
            )
        return letters

    async def redrive(self, subscription: Subscription, ids: set[str] | None) -> int:
        """Schedule dead letters again: those with these message ids, or all. Returns how many."""
        from_seq = count = 0
        while letters := await self.dead_letters(subscription, from_seq, REDRIVE_PAGE):
            now_ms = self.clock()
            for letter in letters:
                if ids is None or letter.message_id in ids:
                    # Another call may have taken it since it was listed.
                    with contextlib.suppress(NotFoundError):
                        self.engine.redrive(
                            subscription.id, letter.entry_seq, letter.payload, now_ms
                        )
                        count += 1
            from_seq = letters[-1].entry_seq + 1
        await self.durable(self.engine.groups.not_durable())
        return count

    async def discard(self, subscription: Subscription, message_id: str) -> None:
        """Delete the dead letter of a message. Raises NotFoundError."""
        found = self.engine.messages.message_id(message_id)
        await self.checkpoint()
        entry_seq = await self._find_dead_letter(subscription, found.seq, message_id)
        await self.durable(self.engine.discard(subscription.id, entry_seq, found.seq))

    async def _find_dead_letter(
        self, subscription: Subscription, message_seq: int, message_id: str
    ) -> int:
        change = self.engine.sequencer.changes(message_seq).get(subscription.id)
        if change is not None:
            key = dead_letter_key(subscription.id, change.entry_seq)
            if change.state == ChangeState.DEAD and self.catalog.get(Table.DEAD_LETTERS, key):
                return change.entry_seq
        else:
            # Its hour is past the retention: only the letter itself tells whose it is.
            from_seq = 0
            while letters := await self.dead_letters(subscription, from_seq, REDRIVE_PAGE):
                for letter in letters:
                    if letter.message_id == message_id:
                        return letter.entry_seq
                from_seq = letters[-1].entry_seq + 1
        raise NotFoundError(f"{subscription.name} has no dead letter {message_id!r}")

    # ── operations ─────────────────────────────────────────────────────────────────────────────

    def stats(self) -> dict[str, object]:
        """Counters since the start of this process, and what waits now."""
        engine = self.engine
        return {
            "accepted": engine.messages.accepted_total,
            "cancelled": engine.messages.cancelled_total,
            "delivered": engine.dispatcher.delivered_total,
            "retried": engine.retried_total,
            "dead": engine.dead_total,
            "last_seq": engine.sequencer.next_seq - 1,
            "checkpoint_seq": engine.groups.checkpoint_seq,
            "pending_loaded": engine.hours.unsettled(),
            "pending_later": self._pending_later(),
            "unmatched": self._unmatched(),
            "subjects": len(engine.sequencer.subjects),
            "subscriptions": len(engine.registry),
            "disk_free_bytes": self.free_bytes,
        }

    def _pending_later(self) -> int:
        """Messages of hours that are not loaded, as of the last checkpoint."""
        through_hour = self.engine.hours.live_through_hour
        return sum(
            max(0, state.entries - state.removals)
            for hour, state in read_hours(self.catalog).items()
            if hour > through_hour
        )

    async def forecast(self, bucket_ms: int) -> list[dict[str, object]]:
        """How many messages fall due per bucket, a whole number of hours. Raises InputError."""
        if bucket_ms < HOUR_MS or bucket_ms % HOUR_MS:
            raise InputError("a bucket is a whole number of hours, such as 1h or 1d", "/bucket")
        await self.checkpoint()
        counts: dict[int, int] = {}
        for hour, state in read_hours(self.catalog).items():
            if not state.retired_ms:
                bucket = hour * HOUR_MS // bucket_ms * bucket_ms
                counts[bucket] = counts.get(bucket, 0) + state.entries - state.removals
        return [
            {"from": format_time(bucket), "count": max(0, count)}
            for bucket, count in sorted(counts.items())
        ]


def _named(damage: Damage) -> dict[str, object]:
    return {
        "file": damage.path,
        "offset": damage.offset,
        "end": damage.end,
        "reason": damage.reason,
        "first_seq": damage.first_seq,
        "last_seq": damage.last_seq,
    }


def _settled(entry: Entry, reader: Reader) -> Rows:
    return reader.settled(entry.hour, entry.seq)
