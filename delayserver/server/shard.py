"""A shard: the parts of one data directory, recovered, and the ports and workers between them.

    Engine ── ports ──▶ committer, replay, loader, reader, settler ── post ──▶ Engine.on_…

The wiring that does not depend on how time passes stands here, once: `delayserver.server.server`
lets real threads and an event loop move it, `tests.world` moves it by hand, so that the simulation
runs the wiring of the server and not a copy of it.

Cost: one call per group, handout or hour; nothing per message but the parts' own work.
Threads: everything belongs to the event loop, except the methods that workers call through `post`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import structlog

from delayserver.config import Settings
from delayserver.decisions.group import Group
from delayserver.decisions.sequencer import Sequencer
from delayserver.delivery.broker_bodies import BrokerBodies
from delayserver.delivery.delayed_fetch import PullRequest
from delayserver.delivery.deliveries import Deliveries
from delayserver.delivery.handout import Handout
from delayserver.delivery.leases import EPOCH_BYTES, epoch_of
from delayserver.delivery.reader import Reader
from delayserver.records.ids import IdCodec, KeyHasher
from delayserver.records.message import DueDelivery
from delayserver.records.subscriptions import Subscription
from delayserver.recovery.recover import Recovered
from delayserver.recovery.store import Store, Surroundings
from delayserver.schedule.loader import LoadedHour, Loader
from delayserver.schedule.replay import Filed, Snapshot
from delayserver.server.body_reader import BodyReader
from delayserver.server.carried_leases import CarriedLeases
from delayserver.server.engine import Engine
from delayserver.server.filer import (
    FilerThread,
    FilingRules,
    ForgetRequest,
    LoadRequest,
    RetireRequest,
    SnapshotRequest,
)
from delayserver.server.settle_queue import SettleQueue
from delayserver.server.threads import (
    CommitterThread,
    HourRequest,
    LoaderThread,
    ReaderThread,
    SettlerThread,
    Worker,
)
from storage.catalog import Catalog
from storage.errors import DamageError, StorageError
from storage.files import Files
from storage.message_log import Durability
from storage.notes import NoteBytes
from storage.rows import LogKind

log = structlog.get_logger()
W = TypeVar("W", bound=Worker[Any])


class ShardMover(ABC):
    """Lets time pass for a shard, and hears from it: a server with threads, or a simulation."""

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
        """Recovery's findings, before anything runs. The hours' rows belong to the wheel from here
        on: a caller that keeps `recovered` would keep their memory."""

    @abstractmethod
    def on_damage(self, error: DamageError) -> None:
        """A damaged place was found; called by any thread."""

    @abstractmethod
    def given_up(self, delivery: DueDelivery, reason: str) -> None:
        """A message has become a dead letter, for `reason`."""

    @abstractmethod
    def clock_was_set(self, by_ms: int) -> None:
        """The clock was set, by so many ms."""

    @abstractmethod
    def defined(self, subscription: Subscription) -> None:
        """A subscription was added, changed or deleted, and that is in force."""

    @abstractmethod
    def not_understood(self, kind: str, name: str, reason: str) -> None:
        """A definition is not understood: the word for its kind, its name, and why."""

    @abstractmethod
    def tick_soon(self, within_ms: int = 0) -> None:
        """Something may be due earlier than the engine said last: after so long."""


class Shard(ShardMover):
    """The parts of a server. A subclass lets time pass."""

    def __init__(
        self,
        settings: Settings,
        files: Files,
        open_catalog: Callable[[], Catalog],
        surroundings: Surroundings,
    ) -> None:
        """Lock the directory and recover its state. Nothing runs before a caller moves it.

        Raises StorageError."""
        self.settings = settings
        self.clock = surroundings.clock
        self.stopwatch = surroundings.stopwatch
        self.monotonic = surroundings.monotonic
        self.random = surroundings.random
        self.files = files
        self.space_bytes = files.free_bytes
        self.transactions = surroundings.openers.transactions
        """Where a batch of deliveries and that it is settled may be one; None: nowhere."""
        self.may_answer = surroundings.may_deliver
        """Whether no other process can own the shard by now. If its log has not answered for a
        while, another process may have accepted, moved or cancelled messages since then."""
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
        self.settling = SettlerThread(
            self.settler,
            self.clock,
            surroundings.monotonic,
            self.post,
            self.on_fatal,
            sync_ms=settings.settle_sync_ms,
            durable=settings.durability is Durability.FSYNC or self.settler.is_shared,
        )
        self.settles = SettleQueue(self.call_soon, self.settling.put)
        self.settle_recorded = self.settles.settle_recorded
        self.when_settled = self.settles.when_settled
        self.reading = ReaderThread(self.reader, self.post, self.on_fatal)
        self.broker_bodies = BrokerBodies(settings.broker_bodies_max_bytes)
        self.engine = _make_engine(self, recovered, sequencer, ids, surroundings, now_ms)
        self.bodies = BodyReader(
            self.engine, self.reader_now, self.broker_bodies, self.clock, self.reading.put
        )
        self.unfiled = self.bodies.unfiled
        self.engine.start(
            recovered.through_hour,
            recovered.loaded,
            recovered.retired_through_hour,
            recovered.fired,
        )
        self.on_recovered(recovered)
        self.carried_leases = CarriedLeases(
            store, recovered.loaded, now_ms, is_first=recovered.next_seq == 1
        )
        self._make_workers(store.loader, surroundings)

    def _make_workers(self, loader: Loader, surroundings: Surroundings) -> None:
        settings, post, fatal = self.settings, self.post, self.on_fatal
        self.committer = CommitterThread(
            self.message_log,
            surroundings.monotonic,
            post,
            self._on_committed,
            self.engine.on_commit_failed,
            fatal,
        )
        self.replayer = FilerThread(
            self.replay,
            self.clock,
            self.stopwatch,
            post,
            self._on_filed,
            self.engine.on_checkpoint,
            self._on_loading,
            fatal,
            FilingRules(
                settings.file_ms,
                settings.checkpoint_ms,
                settings.checkpoint_bytes,
                settings.kept_ms,
                settings.group_max_bytes,
            ),
            self.bodies.release,
        )
        self.loading = LoaderThread(loader, post, self._on_loaded, fatal)
        # In the order in which they may end: nobody hands anything to one before it.
        self.workers: list[Worker[Any]] = [
            self.committer,
            self.settling,
            self.loading,
            self.reading,
            self.replayer,
            *(
                part.work(decider, self)
                for part, decider in zip(self.engine.parts, self.engine.deciders, strict=True)
                if part.work is not None
            ),
        ]

    def worker(self, kind: type[W]) -> W:
        """The thread of a part, by its class."""
        return next(one for one in self.workers if isinstance(one, kind))

    def close(self) -> None:
        """Close all files and let the directory go. The workers have ended."""
        self.store.close()

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
        # A bulk load waits until its table is filed.
        must_file = waiting_bytes >= self.settings.checkpoint_bytes or group.import_count > 0
        self.replayer.put(group, wake=must_file)

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

    def retire(self, hours: list[int], through_seq: int) -> None:
        def recorded() -> None:
            self.replayer.put(RetireRequest(hours, through_seq))

        self.settles.retire(hours, recorded)

    def hand_out(
        self, subscription: Subscription, request: PullRequest, deliveries: Deliveries
    ) -> None:
        deliveries.leased_ms = self.clock()
        self.engine.leasing.hand_out(subscription, request, deliveries)
        self.tick_for_timeouts()

    def read(self, handout: Handout) -> None:
        self.bodies.read(handout)

    def settle(self, hour: int, rows: bytes, note: NoteBytes | None) -> None:
        self.settles.settle(hour, rows, note)

    def tick_for_timeouts(self) -> None:
        """A timeout was added: have the next tick come early enough for it."""
        next_ms = self.engine.timeouts.next_ms()
        if next_ms is not None:
            self.tick_soon(max(0, next_ms - self.stopwatch()))


def _make_engine(
    shard: Shard,
    recovered: Recovered,
    sequencer: Sequencer,
    ids: IdCodec,
    surroundings: Surroundings,
    now_ms: int,
) -> Engine:
    identity = shard.store.identity
    return Engine(
        shard.settings,
        shard.catalog,
        sequencer,
        recovered.registry,
        ids,
        KeyHasher(identity.id_secret),
        shard,
        first_hour=min([recovered.through_hour, *(one.hour for one in recovered.loaded)]),
        now_ms=now_ms,
        stopwatch=shard.stopwatch,
        epoch=epoch_of(surroundings.random_bytes(EPOCH_BYTES), identity.shard),
        random=surroundings.random,
        parts=surroundings.parts,
        may_deliver=surroundings.may_deliver,
        broker_room=shard.broker_bodies.room,
    )
