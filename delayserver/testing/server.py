"""One life of the server in the simulation: its real parts, wired as `delayserver.server` does it.

Nothing happens by itself: `run` lets one thread handle a part of its inbox, `turn` lets the event
loop handle one callback, `tick` lets the engine look at the clock. What each thread does stays in
the order of its inbox; any order between threads can be chosen.

Cost: about 0.5 ms to build, recovery included. Threads: none.
"""

import contextlib
import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from delayserver.config import Settings
from delayserver.delivery.webhook import WebhookResponse
from delayserver.dispatcher import PullRequest, Take
from delayserver.engine import Engine
from delayserver.ids import IdCodec, KeyHasher
from delayserver.loader import LoadedHour, Loader
from delayserver.message import Delivery
from delayserver.messages import Located
from delayserver.reader import Found, Reader
from delayserver.recovery import recover
from delayserver.replay import Filed, Records, Replay, Snapshot
from delayserver.sequencer import Group, Sequencer
from delayserver.settler import Settler
from delayserver.subscriptions import Subscription
from delayserver.wheel import SLOT_MS, Batch
from delayserver.workers import (
    CallRequest,
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
from storage.catalog import Catalog
from storage.directory import LOCK_FILE, open_identity
from storage.errors import DamageError, DiskFullError
from storage.files import Files
from storage.hour_log import HourLog
from storage.message_log import Durability, MessageLog
from storage.rows import HOUR_MS, LogKind

START_MS = 494_500 * HOUR_MS - 300
"""When simulated time begins: shortly before an hour does."""


class SimulatedClock:
    """A clock that somebody else moves."""

    def __init__(self, now_ms: int = START_MS) -> None:
        self.now_ms = now_ms
        self._monotonic_ms = 0

    def __call__(self) -> int:
        return self.now_ms

    def monotonic_s(self) -> float:
        """Seconds that never go back."""
        return self._monotonic_ms / 1000

    def move(self, by_ms: int) -> None:
        """Go on, or (negative) back."""
        self.now_ms += by_ms
        self._monotonic_ms += max(by_ms, 1)


class Watcher:
    """Told what happens inside; the default ignores it."""

    def committed(self, rows: bytes, payload: bytes) -> None:
        """A group is durable."""

    def filing(self, batch: list[Records]) -> None:
        """Records are filed; in a recovery, as they were found in the message log."""

    def fired(self, batches: list[Batch], now_ms: int) -> None:
        """Rows fell due."""

    def sent(self, subscription: Subscription, delivery: Delivery) -> None:
        """A delivery leaves for its subscriber."""

    def expired(self, deliveries: list[Delivery]) -> None:
        """Leases are over."""

    def settled(self, row: bytes) -> None:
        """A delivery ended (DISPATCH_ROW); not durable yet."""

    def recorded(self, rows: list[bytes]) -> None:
        """Rows of the dispatch log are durable."""

    def damaged(self, error: DamageError) -> None:
        """A damaged place was named."""


class _WatchedLog(MessageLog):
    watcher: Watcher

    def append(
        self, rows: bytes, payload: bytes, *, first_seq: int, last_seq: int, created_ms: int
    ) -> None:
        super().append(rows, payload, first_seq=first_seq, last_seq=last_seq, created_ms=created_ms)
        self.watcher.committed(rows, payload)


class _WatchedReplay(Replay):
    watcher: Watcher

    def file(self, batch: Any, now_ms: int) -> Filed:
        self.watcher.filing(list(batch))
        return super().file(batch, now_ms)


class _WatchedSettler(Settler):
    def __init__(self, dispatch: HourLog, watcher: Watcher) -> None:
        super().__init__(dispatch)
        self._watcher = watcher
        self._written: list[bytes] = []

    def write(self, rows_by_hour: dict[int, list[bytes]], now_ms: int) -> None:
        before = dict(rows_by_hour)
        try:
            super().write(rows_by_hour, now_ms)
        finally:
            for hour in before.keys() - rows_by_hour.keys():
                self._written += before[hour]

    def sync(self) -> None:
        super().sync()
        self._watcher.recorded(self._written)
        self._written = []


class SimulatedServer:
    """A server that is moved by hand."""

    def __init__(
        self,
        settings: Settings,
        files: Files,
        catalog: Catalog,
        clock: SimulatedClock,
        rng: random.Random,
        watcher: Watcher,
    ) -> None:
        """Recover what is on the disk. Raises StorageError."""
        self.settings = settings
        self.clock = clock
        self.watcher = watcher
        self.catalog = catalog
        self.sending: list[Delivery] = []
        """Webhooks that were sent and not answered."""
        self._loop: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._settle = SettleRequest()
        self._settle_asked = False
        self._cleanup = contextlib.ExitStack()
        self._cleanup.enter_context(files.lock(LOCK_FILE))
        identity = open_identity(files, random_bytes=rng.randbytes)
        stamp = identity.stamp

        def hour_log(kind: LogKind) -> HourLog:
            made = HourLog(files, kind, stamp=stamp)
            self._cleanup.callback(made.close)
            return made

        self.message_log = _WatchedLog(
            files,
            stamp=stamp,
            segment_bytes=settings.segment_bytes,
            durability=Durability.FSYNC,
        )
        self.message_log.watcher = watcher
        schedule = hour_log(LogKind.SCHEDULE)
        replay = _WatchedReplay(catalog, schedule, hour_log(LogKind.DISPATCH), self.message_log)
        replay.watcher = watcher
        self.replay: Replay = replay
        self.settler = _WatchedSettler(hour_log(LogKind.DISPATCH), watcher)
        loader = Loader(hour_log(LogKind.SCHEDULE), hour_log(LogKind.DISPATCH), slot_ms=SLOT_MS)
        now_ms = clock()
        recovered = self.recovered = recover(
            catalog,
            self.message_log,
            schedule,
            self.replay,
            self.settler,
            loader,
            now_ms=now_ms,
            lead_ms=settings.lead_ms,
        )
        ids = IdCodec(identity.shard, identity.id_secret)
        sequencer = Sequencer(catalog, next_seq=recovered.next_seq, subjects=recovered.subjects)
        self.reader = Reader(
            hour_log(LogKind.SCHEDULE),
            hour_log(LogKind.DISPATCH),
            ids,
            sequencer.subject_names,
            watcher.damaged,
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
            epoch=rng.randbytes(4).hex(),
            random=rng.random,
        )
        self.engine.start(recovered.through_hour, recovered.loaded, recovered.retired_through_hour)
        self._watch()
        self._make_workers(loader)

    def _watch(self) -> None:
        watcher = self.watcher
        fire, expire = self.engine.dispatcher.fire, self.engine.leases.expire

        def watched(batches: list[Batch], now_ms: int) -> None:
            watcher.fired(batches, now_ms)
            fire(batches, now_ms)

        def expiring(now_ms: int) -> list[Delivery]:
            deliveries = expire(now_ms)
            watcher.expired(deliveries)
            return deliveries

        self.engine.dispatcher.fire = watched  # type: ignore[method-assign]
        self.engine.leases.expire = expiring  # type: ignore[method-assign]

    def _make_workers(self, loader: Loader) -> None:
        settings, post, fatal = self.settings, self._post, self._on_fatal
        groups = self.engine.groups
        self.committer = CommitterThread(
            self.message_log, post, self._on_committed, groups.on_commit_failed, fatal
        )
        self.replayer = ReplayThread(
            self.replay,
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
        self.loading = LoaderThread(loader, post, self._on_loaded, fatal)
        self.reading = ReaderThread(self.reader, post, fatal)
        self.settling = SettlerThread(
            self.settler,
            self.clock,
            self.clock.monotonic_s,
            post,
            fatal,
            sync_ms=settings.settle_sync_ms,
            durable=True,
        )
        self.workers: list[Worker[Any]] = [
            self.committer,
            self.replayer,
            self.loading,
            self.reading,
            self.settling,
        ]

    def _on_fatal(self, error: BaseException) -> None:
        raise AssertionError("only a thread that runs by itself calls this") from error

    # ── being moved ────────────────────────────────────────────────────────────────────────────

    def _post(self, function: Callable[..., None], *arguments: Any) -> None:
        self._loop.append((function, arguments))

    @property
    def has_callbacks(self) -> bool:
        """Whether the event loop has something to do."""
        return bool(self._loop)

    def turn(self) -> bool:
        """One callback of the event loop; False if there was none."""
        if not self._loop:
            return False
        function, arguments = self._loop.popleft()
        function(*arguments)
        return True

    def run(self, worker: Worker[Any], items_max: int) -> bool:
        """One turn of a thread; False if the disk was full: the next turn tries the same again.

        Raises StorageError: the server would end itself."""
        try:
            worker.step(items_max)
        except DiskFullError:
            return False
        return True

    def tick(self) -> int:
        """Let the engine see the clock; returns when it wants to see it again."""
        return self.engine.advance(self.clock())

    def is_idle(self) -> bool:
        """Nothing is to be done but to wait for the clock or for subscribers."""
        return not self._loop and not any(worker.backlog for worker in self.workers)

    def rest(self, rounds_max: int = 2000) -> None:
        """Let everybody work, in turn, until nobody has anything to do, or the disk is full."""
        for _ in range(rounds_max):
            while self.turn():
                pass
            results = [self.run(worker, 1000) for worker in self.workers]
            if not all(results) or self.is_idle():
                return
        raise AssertionError("the threads keep each other busy")

    def stop(self) -> None:
        """End in good order, as `Server.stop` does; what was sent is not waited for."""
        self.engine.groups.stopping = True
        self.engine.dispatcher.drain()
        while not self.engine.groups.is_idle:
            self._flush()
            self.run(self.committer, 1000)
            while self.turn():
                pass
        self._flush_settle()
        for worker in (
            self.committer,
            self.settling,
            self.loading,
            self.reading,
            self.replayer,
        ):
            worker.step(1000)
            worker.close()
        self._cleanup.close()

    # ── ports of the engine ────────────────────────────────────────────────────────────────────

    def wake(self) -> None:
        self._post(self._flush)

    def _flush(self) -> None:
        self.engine.groups.flush(self.clock())

    def commit(self, group: Group) -> None:
        self.committer.put(group)

    def _on_committed(self) -> None:
        self.engine.on_committed(self.clock())

    def file(self, group: Group) -> None:
        self.replayer.put(group)

    def _on_filed(self, filed: Filed) -> None:
        self.engine.on_filed(filed)

    def _on_deleted(self, hours: list[int]) -> None:
        def release(reader: Reader) -> None:
            for hour in hours:
                reader.release(hour)

        self.reading.put(CallRequest(release, lambda result, error: None))

    def load(self, through_hour: int) -> None:
        self.replayer.put(LoadRequest(through_hour))

    def _on_loading(self, before: int, snapshots: list[Snapshot]) -> None:
        self.engine.on_loading(before, snapshots)
        registry = self.engine.registry.snapshot()
        names = self.engine.sequencer.subject_names
        for snapshot in snapshots:
            self.loading.put(HourRequest(snapshot, registry, dict(names)))

    def _on_loaded(self, loaded: LoadedHour) -> None:
        for damage in loaded.damage:
            self.watcher.damaged(damage.error())
        self.engine.on_loaded(loaded)

    def retire(self, hours: list[int], through_seq: int) -> None:
        def recorded() -> None:
            self.replayer.put(RetireRequest(hours, through_seq))

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
            self.engine.on_read(take, self.reader.deliveries(take, unfiled))
        else:
            self.reading.put(TakeRequest(take, unfiled, self.engine.on_read))

    def hand_out(self, take: Take, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            self.watcher.sent(take.subscription, delivery)
        self.engine.hand_out(take, deliveries, self.clock())

    def send(self, subscription: Subscription, delivery: Delivery) -> None:
        self.watcher.sent(subscription, delivery)
        self.sending.append(delivery)

    def settle(self, hour: int, row: bytes) -> None:
        self.watcher.settled(row)
        self._settle.rows_by_hour.setdefault(hour, []).append(row)
        self._settle_soon()

    def _settle_soon(self) -> None:
        if not self._settle_asked:
            self._settle_asked = True
            self._post(self._flush_settle)

    def _flush_settle(self) -> None:
        self._settle_asked = False
        request, self._settle = self._settle, SettleRequest()
        if request.rows_by_hour or request.done:
            self.settling.put(request)

    # ── what clients and subscribers do ────────────────────────────────────────────────────────

    def answer(self, delivery: Delivery, response: WebhookResponse) -> None:
        """A webhook is answered, or was not."""
        self.sending.remove(delivery)
        self.engine.on_sent(delivery, response, self.clock())

    def ack(self, tokens: list[str], answer: Callable[[list[str]], None]) -> None:
        """As `Server.ack`: `answer` is called with the leases that were over."""
        now_ms = self.clock()
        expired = [token for token in tokens if not self.engine.ack(token, now_ms)]
        if len(expired) < len(tokens):
            self._settle.done.append(partial(answer, expired))
            self._settle_soon()
        else:
            answer(expired)

    def find(
        self, located: Located, done: Callable[[Found | None, Exception | None], None]
    ) -> None:
        """Payload and subject of a message, as `Server.move` needs them."""
        entry = located.entry
        unfiled = self.engine.groups.payload(entry.seq)
        if unfiled is not None:
            sealed, subject_id = unfiled
            done(Found(self.reader.decode(entry, sealed), subject_id, 0), None)
        else:
            self.reading.put(CallRequest(lambda reader: reader.find(entry), done))  # type: ignore[arg-type]

    def pull(self, subscription: Subscription, request: PullRequest) -> None:
        """A consumer asks for messages."""
        self.engine.pull(subscription, request)
