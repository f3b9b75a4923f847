"""A shard: the parts of one data directory, recovered, and the ports and workers between them.

    Engine ── ports ──▶ committer, replay, loader, reader, settler ── post ──▶ Engine.on_…

What does not depend on how time passes stands here, once: `delayserver.server.server` lets real
threads and an event loop move it, `tests.world` moves it by hand, so that the simulation
runs the wiring of the server and not a copy of it.

Cost: one call per group, handout or hour; nothing per message but what the parts do.
Threads: everything belongs to the event loop but what the workers call through `post`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import structlog

from delayserver.config import Settings
from delayserver.decisions.group import Group
from delayserver.decisions.importer import Importer, VerifyRequest
from delayserver.decisions.sequencer import Sequencer
from delayserver.delivery.broker_bodies import BrokerBodies
from delayserver.delivery.delayed_fetch import PullRequest
from delayserver.delivery.deliveries import Deliveries
from delayserver.delivery.handout import Handout
from delayserver.delivery.leases import EPOCH_BYTES, epoch_of
from delayserver.delivery.reader import Fetched, Found, Reader
from delayserver.records.ids import IdCodec, KeyHasher
from delayserver.records.message import DueDelivery, ScheduleEntry
from delayserver.records.subscriptions import Subscription
from delayserver.recovery.recover import Recovered
from delayserver.recovery.store import Store, Surroundings
from delayserver.schedule.loader import LoadedHour, Loader
from delayserver.schedule.replay import Filed, Snapshot
from delayserver.schedule.wheel_rows import PAYLOAD_MAX_BYTES
from delayserver.server.carried_leases import LeasedRows, left_behind, take_over
from delayserver.server.engine import Engine
from delayserver.server.threads import (
    CallRequest,
    CommitterThread,
    ForgetRequest,
    HandoutRequest,
    HourRequest,
    ImporterThread,
    LoaderThread,
    LoadRequest,
    ReaderThread,
    ReplayThread,
    RetireRequest,
    SettleRequest,
    SettlerThread,
    SnapshotRequest,
    Worker,
)
from storage.catalog import Catalog
from storage.errors import DamageError, StorageError
from storage.files import Files
from storage.message_log import Durability
from storage.notes import NoteBytes
from storage.rows import LogKind

log = structlog.get_logger()


class Shard(ABC):
    """The parts of a server. A subclass lets time pass."""

    def __init__(
        self,
        settings: Settings,
        files: Files,
        open_catalog: Callable[[], Catalog],
        surroundings: Surroundings,
    ) -> None:
        """Lock the directory and recover what is in it. Nothing runs before somebody moves it.

        Raises StorageError."""
        self.settings = settings
        self.clock = surroundings.clock
        self.stopwatch = surroundings.stopwatch
        self.random = surroundings.random
        self.files = files
        self.transactions = surroundings.transactions
        """Where a batch of deliveries and that it is settled may be one; None: nowhere."""
        self.may_answer = surroundings.may_deliver
        """Whether nobody else can own the shard by now. If its log has not answered for a while
        another process may have accepted, moved or cancelled what this one does not know of."""
        self._settle = SettleRequest()
        self._settle_asked = False
        """Whether the request goes to the settler at the end of this turn of the event loop."""
        store = self.store = Store(settings, files, open_catalog, surroundings)
        try:
            self._recover(store, surroundings)
        except BaseException:
            store.close()
            raise

    def _recover(self, store: Store, surroundings: Surroundings) -> None:
        settings, identity = self.settings, store.identity
        catalog = self.catalog = store.catalog
        self.message_log = store.write_ahead_log
        self.replay, self.settler = store.replay, store.settler
        now_ms = self.clock()
        recovered = store.recover(now_ms)
        ids = IdCodec(identity.shard, identity.id_secret)
        sequencer = Sequencer(catalog, next_seq=recovered.next_seq, subjects=recovered.subjects)
        self.reader, self.reader_now = (
            Reader(
                store.hour_log(LogKind.SCHEDULE),
                store.hour_log(LogKind.DISPATCH),
                ids,
                sequencer.subject_names,
                sequencer.subjects,
                self.on_damage,
            )
            for _ in range(2)
        )
        """The one of the reader thread, and the one of the event loop, which never waits."""
        self.broker_bodies = BrokerBodies(settings.broker_bodies_max_bytes)
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
            stopwatch=self.stopwatch,
            epoch=epoch_of(surroundings.random_bytes(EPOCH_BYTES), identity.shard),
            random=surroundings.random,
            may_deliver=surroundings.may_deliver,
            broker_room=self.broker_bodies.room,
        )
        self.engine.groups.holds_office = surroundings.may_deliver
        self.engine.start(
            recovered.through_hour,
            recovered.loaded,
            recovered.retired_through_hour,
            recovered.fired,
        )
        self.on_recovered(recovered)
        self._leased = LeasedRows.of(recovered.loaded, store.kept, now_ms)
        self._is_first = recovered.next_seq == 1
        importer = Importer(self.files, catalog, identity.stamp)
        self._make_workers(store.loader, importer, surroundings)

    def take_over_leases(self) -> None:
        """Hold the leases that the process before has left. The last step before anything runs: as
        long as nobody is answered, a stop leaves them to the next process, and limits that are
        shared are known by now.

        Raises StorageError."""
        store, leased = self.store, self._leased
        del self._leased
        begun = store.kept.begun(self.clock(), is_first=self._is_first)
        self.starts_ms = self.reader.starts_ms = self.reader_now.starts_ms = begun.starts_ms
        """When a process began after a kill."""
        take_over(store.kept, leased, self.engine, self.reader)
        # Behind this the leases are those of this process alone.
        store.leases.begin(begun)

    def leave_leases(self) -> Callable[[], None]:
        """Returns a function that keeps the leases that are held now for the next process. It is
        called in any thread once all that was settled is durable."""
        kept = left_behind(self.engine, self.starts_ms)
        return partial(self.store.leases.keep, kept)

    def _make_workers(self, loader: Loader, importer: Importer, surroundings: Surroundings) -> None:
        settings, post, fatal = self.settings, self.post, self.on_fatal
        self.committer = CommitterThread(
            self.message_log,
            surroundings.monotonic,
            post,
            self._on_committed,
            self.engine.on_commit_failed,
            fatal,
        )
        self.replayer = ReplayThread(
            self.replay,
            self.clock,
            self.stopwatch,
            post,
            self._on_filed,
            self.engine.on_checkpoint,
            self._on_loading,
            fatal,
            file_ms=settings.file_ms,
            checkpoint_ms=settings.checkpoint_ms,
            checkpoint_bytes=settings.checkpoint_bytes,
            retention_ms=settings.kept_ms,
            archive=settings.archive,
            file_bytes_max=settings.group_max_bytes,
            on_deleted=self._on_deleted,
        )
        self.loading = LoaderThread(loader, post, self._on_loaded, fatal)
        self.reading = ReaderThread(self.reader, post, fatal)
        self.settling = SettlerThread(
            self.settler,
            self.clock,
            surroundings.monotonic,
            post,
            fatal,
            sync_ms=settings.settle_sync_ms,
            durable=settings.durability is Durability.FSYNC or self.settler.is_shared,
        )
        self.importing = ImporterThread(importer, post, self.engine.imports.on_verified, fatal)
        # In the order in which they may end: nobody hands anything to one before it.
        self.workers: list[Worker[Any]] = [
            self.committer,
            self.settling,
            self.loading,
            self.reading,
            self.replayer,
            self.importing,
        ]

    def close(self) -> None:
        """Close all files and let the directory go. The workers have ended."""
        self.store.close()

    # ── how it is moved ────────────────────────────────────────────────────────────────────────

    @abstractmethod
    def post(self, function: Callable[..., None], *arguments: Any) -> None:
        """Have the event loop call a function; called by any thread."""

    @abstractmethod
    def call_soon(self, function: Callable[[], None]) -> None:
        """Have the event loop call a function at the end of this turn; called on it."""

    @abstractmethod
    def send(self, subscription: Subscription, deliveries: list[DueDelivery]) -> None:
        """Have its sink deliver them; answer with `Outcomes.on_sent`."""

    @abstractmethod
    def on_fatal(self, error: BaseException) -> None:
        """A worker cannot go on: the server must end (I9)."""

    @abstractmethod
    def on_recovered(self, recovered: Recovered) -> None:
        """What was found, before anything runs. Who keeps its hours keeps their memory: they belong
        to the wheel, which gives them back."""

    @abstractmethod
    def on_damage(self, error: DamageError) -> None:
        """A damaged place was found; called by any thread."""

    @abstractmethod
    def given_up(self, delivery: DueDelivery, reason: str) -> None:
        """A message has become a dead letter, for `reason`."""

    @abstractmethod
    def tick_soon(self, within_ms: int = 0) -> None:
        """Something may be due earlier than the engine said last: after so long."""

    # ── ports of the engine ────────────────────────────────────────────────────────────────────

    def wake(self) -> None:
        self.call_soon(self._flush)

    def _flush(self) -> None:
        self.engine.groups.flush(self.clock(), at_once=self.is_quick())

    def is_quick(self) -> bool:
        return self.committer.is_quick

    def commit(self, group: Group, *, at_once: bool) -> None:
        if at_once and self.committer.takes_at_once(group):
            self.committer.commit(group, lambda function, *arguments: function(*arguments))
        else:
            self.committer.put(group)

    def _on_committed(self) -> None:
        if self.engine.on_committed(self.clock()):
            self.tick_soon()

    def file(self, group: Group) -> None:
        # It files about once a second, by its own clock; only a large backlog wakes it before.
        waiting_bytes = self.engine.groups.unfiled_bytes
        # Whoever loads a table waits until it is filed.
        must_file = waiting_bytes >= self.settings.checkpoint_bytes or group.import_count > 0
        self.replayer.put(group, wake=must_file)

    def verify(self, request: VerifyRequest) -> None:
        self.importing.put(request)

    def space_bytes(self) -> int:
        return self.files.free_bytes()

    def _on_filed(self, filed: Filed) -> None:
        for damage in filed.damage:
            self.on_damage(damage.error())
        self.engine.on_filed(filed)
        self.tick_soon()

    def want_snapshot(
        self,
        take: Callable[[Store], object],
        done: Callable[[object, StorageError | None], None],
    ) -> None:
        """Have the replay thread call `take` behind a checkpoint of all that has come so far."""
        self.replayer.put(SnapshotRequest(partial(take, self.store), done), wake=True)

    def forget_watches(self, keys: list[bytes]) -> None:
        self.replayer.put(ForgetRequest(keys))

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
            self.on_damage(damage.error())
        self.engine.on_loaded(loaded)
        self.tick_soon()

    def _on_deleted(self, hours: list[int]) -> None:
        def release(reader: Reader) -> None:
            for hour in hours:
                reader.release(hour)

        release(self.reader_now)
        self.reading.put(CallRequest(release, lambda result, error: None))

    def retire(self, hours: list[int], through_seq: int) -> None:
        def recorded() -> None:
            self.replayer.put(RetireRequest(hours, through_seq))

        self._settle.settled_hours += hours
        self.when_settled(recorded)

    def read(self, handout: Handout) -> None:
        self.broker_bodies.take(handout.subscription_id, handout.broker_bytes)
        unfiled: dict[int, bytes] = {}
        for batch in handout.slices:
            is_unfiled = batch.rows["locator"] <= PAYLOAD_MAX_BYTES
            for seq in batch.rows["seq"][is_unfiled].tolist():
                found = self.engine.groups.payload(seq)
                if found is not None:
                    unfiled[seq] = found[0]
        fetched = self.reader_now.fetch_now(handout, unfiled)
        if fetched is not None:
            self._on_fetched(handout, fetched)
        else:
            self.reading.put(HandoutRequest(handout, unfiled, self._on_fetched))

    def _on_fetched(self, handout: Handout, fetched: Fetched) -> None:
        deliveries = self.reader_now.open(handout, fetched)
        self.broker_bodies.give_back(handout.subscription_id, handout.broker_bytes)
        handout.answer(deliveries, self.clock())

    def hand_out(
        self, subscription: Subscription, request: PullRequest, deliveries: Deliveries
    ) -> None:
        deliveries.leased_ms = self.clock()
        self.engine.leasing.hand_out(subscription, request, deliveries)
        self.tick_for_timeouts()

    def tick_for_timeouts(self) -> None:
        """A timeout was added: have the next tick come early enough for it."""
        next_ms = self.engine.timeouts.next_ms()
        if next_ms is not None:
            self.tick_soon(max(0, next_ms - self.stopwatch()))

    def settle(self, hour: int, rows: bytes, note: NoteBytes | None) -> None:
        items = self._settle.rows_by_hour.setdefault(hour, [])
        items.append(rows)
        if note is not None:
            items.append(note)
        self._settle_soon()

    def settle_recorded(self, hour: int, rows: bytes, offset: int) -> None:
        at_offset = self._settle.recorded.setdefault(offset, {})
        at_offset.setdefault(hour, []).append(rows)
        self._settle_soon()

    def when_settled(self, done: Callable[[], None]) -> None:
        """Call back once everything that was settled so far is durable."""
        self._settle.done.append(done)
        self._settle_soon()

    def _settle_soon(self) -> None:
        if not self._settle_asked:
            self._settle_asked = True
            self.call_soon(self._flush_settle)

    def _flush_settle(self) -> None:
        self._settle_asked = False
        request, self._settle = self._settle, SettleRequest()
        if request.rows_by_hour or request.recorded or request.done:
            self.settling.put(request)

    # ── rows of messages ───────────────────────────────────────────────────────────────────────

    def unfiled(self, entry: ScheduleEntry) -> Found | None:
        """Payload and subject of a schedule row that is not in its hour's file yet."""
        found = self.engine.groups.payload(entry.seq)
        if found is None:
            return None
        sealed, subject_id = found
        return Found(self.reader.decode(entry, sealed, "messages"), subject_id, 0)
