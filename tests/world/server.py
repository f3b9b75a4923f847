"""One life of the server in the simulation: its real parts and wiring, moved by hand.

Nothing happens by itself: `run` lets one thread handle a part of its inbox, `turn` lets the event
loop handle one callback, `tick` lets the engine look at the clock. What each thread does stays in
the order of its inbox; any order between threads can be chosen.

Cost: about 0.5 ms to build, recovery included. Threads: none.
"""

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from delayserver.config import Settings
from delayserver.delivery.backlog import Instant
from delayserver.delivery.delayed_fetch import PullRequest
from delayserver.delivery.deliveries import NEVER_MS, Deliveries
from delayserver.delivery.handout import Handout
from delayserver.delivery.leases import DeliverySelection
from delayserver.delivery.pump import HELD_LOOK_MS
from delayserver.delivery.queue import Queue
from delayserver.delivery.reader import FoundRow
from delayserver.delivery.settler import DISPATCH_ROW, Settler
from delayserver.delivery.sink import Answer, Untried
from delayserver.delivery.webhook import WebhookResponse
from delayserver.parts.imports.imports import Imports
from delayserver.parts.installed import PARTS
from delayserver.records.message import DueDelivery, Payload, encode_payload
from delayserver.records.message_state import MessageState
from delayserver.records.subscriptions import Subscription
from delayserver.recovery.openers import Openers
from delayserver.recovery.recover import Recovered
from delayserver.recovery.store import Surroundings
from delayserver.schedule.committed import Records
from delayserver.schedule.expansion import Staging
from delayserver.schedule.loader import LoadSizes
from delayserver.schedule.purge import Purge
from delayserver.schedule.replay import Filed, Replay
from delayserver.schedule.wheel_rows import FiredRows
from delayserver.security.tokens import TokenFile, TokenTable
from delayserver.server.calls import Calls
from delayserver.server.gauges import Gauges
from delayserver.server.shard import Shard
from delayserver.server.threads import CallRequest, Worker
from delayserver.slices import TurnBudget
from storage.buckets import is_day
from storage.catalog import Catalog
from storage.definitions_log import DefinitionsLog
from storage.directory import Identity, open_identity
from storage.errors import DamageError, ShortageError
from storage.files import Files
from storage.frame import Frame
from storage.hour_log import HourLog
from storage.message_log import MessageLog
from storage.notes import NoteBytes, framed
from storage.rows import HOUR_MS
from storage.staging import DIRECTORY as IMPORTS
from storage.staging import Manifest, OnConflict, PartWriter, part_name, write_manifest
from storage.tiered_catalog import KeyTiers
from tests.world.loop import SimulatedLoop
from tests.world.violation import Violation

START_MS = 494_500 * HOUR_MS - 300
"""When simulated time begins: shortly before an hour does."""


class SimulatedClock:
    """A clock that somebody else moves, and the stopwatch beside it."""

    def __init__(self, now_ms: int = START_MS) -> None:
        self.now_ms = self.latest_ms = now_ms
        self._passed_ms = 0

    def __call__(self) -> int:
        return self.now_ms

    def stopwatch_ms(self) -> int:
        """Milliseconds that passed."""
        return self._passed_ms

    def monotonic_s(self) -> float:
        """Seconds that passed."""
        return self._passed_ms / 1000

    def move(self, by_ms: int) -> None:
        """Time passes."""
        assert by_ms >= 0, by_ms
        self.set(by_ms)
        self._passed_ms += by_ms

    def set(self, by_ms: int) -> None:
        """Somebody sets the clock, ahead or (negative) back; no time passes."""
        self.now_ms += by_ms
        self.latest_ms = max(self.latest_ms, self.now_ms)


def longest_wait_ms(subscription: Subscription) -> int:
    """How long the next row may have to wait for time alone, whatever somebody does to the
    clock."""
    rate_per_s = subscription.rate_per_s
    pause_ms = int(1000 / rate_per_s) + 1 if rate_per_s else 0
    return max(pause_ms, subscription.linger_ms, subscription.spread_ms)


class Observer:
    """The server tells it what happens inside. Each method of this one ignores that."""

    def committed(self, rows: bytes, payload: bytes) -> None:
        """A group is durable."""

    def filing(self, batch: list[Records]) -> None:
        """Records are filed; in a recovery, as they were found in the message log."""

    def fired(self, batches: list[FiredRows], now_ms: int) -> None:
        """Rows fell due."""

    def sent(self, subscription: Subscription, delivery: DueDelivery) -> None:
        """A delivery leaves for its subscriber."""

    def left(self, subscription: Subscription, seqs: list[int], waiting: list[int]) -> None:
        """Rows have left the queue of a subscription, in this order, and others go on waiting that
        might leave."""

    def expired(self, deliveries: list[DueDelivery]) -> None:
        """Leases are over."""

    def given_up(self, delivery: DueDelivery, reason: str) -> None:
        """A message is a dead letter. (The ledger finds that in the records.)"""

    def settled(self, row: bytes) -> None:
        """A delivery ended (DISPATCH_ROW); not durable yet."""

    def recorded(self, rows: list[bytes]) -> None:
        """Rows of the dispatch log are durable."""

    def purging(self, hour: int, seqs: set[int], dispatch_bytes: int) -> None:
        """The files of an hour are about to be deleted; the schedule rows, and how long the other
        file is."""

    def damaged(self, error: DamageError) -> None:
        """A damaged place was named."""

    def leaving(self) -> None:
        """A planned stop keeps the leases that are held."""

    def taking_over(self) -> None:
        """A start holds the leases again that an earlier process has kept."""


class _ObservedLog(MessageLog):
    def __init__(self, observer: Observer, files: Files, **rest: Any) -> None:
        super().__init__(files, **rest)
        self._observer = observer

    def append(
        self, rows: bytes, payload: bytes, *, first_seq: int, last_seq: int, created_ms: int
    ) -> None:
        super().append(rows, payload, first_seq=first_seq, last_seq=last_seq, created_ms=created_ms)
        self._observer.committed(rows, payload)


def _observed_log(
    observer: Observer, files: Files, catalog: Catalog, identity: Identity, settings: Settings
) -> MessageLog:
    return _ObservedLog(
        observer,
        files,
        stamp=identity.stamp,
        segment_bytes=settings.segment_bytes,
        durability=settings.durability,
    )


class _ObservedReplay(Replay):
    def __init__(self, observer: Observer, *rest: Any, keepers: Any) -> None:
        # A frame per slice of a day, so that much may happen between two.
        watched = partial(_ObservedPurge, observer)
        super().__init__(*rest, keepers=keepers, purge=watched, day_slice_bytes=1)
        self.effects.keys_slice = 1  # as with very many keys
        self._observer = observer

    def file(self, batch: Any, now_ms: int) -> Filed:
        self._observer.filing(list(batch))
        return super().file(batch, now_ms)


class _ObservedPurge(Purge):
    def __init__(self, observer: Observer, *rest: Any) -> None:
        super().__init__(*rest)
        self._observer = observer

    def delete_files(self, hour: int) -> None:
        if not is_day(hour):  # What was in a day is in its hours.
            frames = [one for one in self._schedule.scan(hour) if isinstance(one, Frame)]
            seqs = {seq for frame in frames for seq in frame.rows["seq"].tolist()}
            self._observer.purging(hour, seqs, self._dispatch.size(hour))
        super().delete_files(hour)


def seqs_of(slices: Iterable[FiredRows]) -> list[int]:
    """The seqs of all rows, in order."""
    return [seq for fired in slices for seq in fired.rows["seq"].tolist()]


def _each_row(rows: list[bytes]) -> list[bytes]:
    """One by one (DISPATCH_ROW), without the notes among them."""
    data, size = bytes(framed(rows)[0]), DISPATCH_ROW.size
    return [data[start : start + size] for start in range(0, len(data), size)]


class _ObservedSettler(Settler):
    def __init__(self, observer: Observer, dispatch: HourLog) -> None:
        super().__init__(dispatch)
        self._observer = observer
        self._written: list[bytes] = []

    def write(self, rows_by_hour: dict[int, list[bytes]], now_ms: int) -> None:
        before = dict(rows_by_hour)
        try:
            super().write(rows_by_hour, now_ms)
        finally:
            for hour in before.keys() - rows_by_hour.keys():
                self._written += _each_row(before[hour])

    def sync(self) -> None:
        super().sync()
        self._observer.recorded(self._written)
        self._written = []


def stage(
    files: Files,
    import_id: str,
    parts: Sequence[Sequence[tuple[int, int, Payload]]],
    key_hash: Callable[[int, str | None], bytes],
    *,
    on_conflict: str = OnConflict.REFUSE,
) -> str:
    """Stage an import as a bulk load does; each part is rows of due time, subject number and
    payload, in due order. Returns the path of its manifest."""
    identity = open_identity(files, random_bytes=None)
    files.make_directory(IMPORTS)
    written = []
    for number, rows in enumerate(parts):
        name = part_name(import_id, str(number))
        writer = PartWriter(files, name, stamp=identity.stamp, created_ms=START_MS)
        sealed = [encode_payload(payload) for _, _, payload in rows]
        writer.append(
            np.array([due_ms for due_ms, _, _ in rows], np.int64),
            np.array([subject_id for _, subject_id, _ in rows], np.uint32),
            b"".join(key_hash(subject_id, payload.key) for _, subject_id, payload in rows),
            np.array([len(data) for data in sealed], np.uint32),
            b"".join(sealed),
        )
        written.append(writer.close())
    manifest = Manifest(import_id, identity.stamp, START_MS, tuple(written), on_conflict)
    return write_manifest(files, manifest)


def simulated_surroundings(
    observer: Observer, clock: SimulatedClock, rng: random.Random, *, shard: int = 0
) -> Surroundings:
    """Where a simulated server lives: everything small, so that much happens in a short life."""
    return Surroundings(
        clock=clock,
        stopwatch=clock.stopwatch_ms,
        monotonic=clock.monotonic_s,
        random_bytes=rng.randbytes,
        random=rng.random,
        parts=PARTS,
        shard=shard,
        openers=Openers(
            closes_catalog=False,
            message_log=partial(_observed_log, observer),
            replay=partial(_ObservedReplay, observer),
            settler=lambda dispatch, catalog, identity: _ObservedSettler(observer, dispatch),
            # One frame per slice, so that much may happen between two.
            staging=partial(Staging, slice_bytes=1),
            # An hour of some rows in many parts and runs, most of them in files.
            load_sizes=LoadSizes(part_rows=3, run_rows=4, memory_bytes=200, piece_bytes=100),
            # A few keys go to runs already, in several slices, and some more at once.
            key_tiers=KeyTiers(young_max=4, slice_rows=3, run_min=6, runs_max=2),
            # Written anew again and again.
            definitions=partial(DefinitionsLog, slack_bytes=2000),
        ),
    )


class SimulatedServer(Shard):
    """A server that is moved by hand."""

    def __init__(
        self,
        settings: Settings,
        files: Files,
        catalog: Catalog,
        clock: SimulatedClock,
        rng: random.Random,
        observer: Observer,
        *,
        quick: Callable[[], bool] = lambda: False,
        shard: int = 0,
        around: Callable[[Surroundings], Surroundings] = lambda surroundings: surroundings,
    ) -> None:
        """Recover what is on the disk. `quick`: whether the committer would be at that moment;
        `shard`: which of several it is; `around` may put other parts into its surroundings.

        Raises StorageError."""
        self.observer = observer
        self._quick = quick
        self.connects: Callable[[], bool] = lambda: True
        """Whether a webhook finds a connection at once."""
        self._begun: dict[int, tuple[Subscription, list[tuple[int, int]]]] = {}
        """By definition, if it has a rate: when requests began, and with how many messages."""
        self.connecting: list[tuple[Subscription, list[DueDelivery]]] = []
        """Webhooks that wait for a connection."""
        self.sending: list[list[DueDelivery]] = []
        """Webhooks whose first byte has left, and which are not answered."""
        self.latest_ms = 0
        """The latest moment at which the engine saw the clock."""
        self._loop: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        surroundings = simulated_surroundings(observer, clock, rng, shard=shard)
        super().__init__(settings, files, lambda: catalog, around(surroundings))
        self.event_loop = SimulatedLoop(self.post, clock.monotonic_s)
        gauges = Gauges(self.engine, settings, clock)
        tokens = TokenTable(TokenFile(files), None, clock.monotonic_s)
        self.calls = Calls(self, gauges, tokens)
        try:
            self.carried_leases.take_over(self.engine, (self.reader, self.reader_now), clock())
        except BaseException:
            self.close()
            raise
        self._watch()

    def _watch(self) -> None:
        observer = self.observer
        fire, give_back = self.engine.dispatcher.fire, self.engine.leasing.leases.on_expired

        def watched(
            slices: list[FiredRows], now_ms: int, budget: TurnBudget | None = None
        ) -> list[FiredRows]:
            observer.fired(slices, now_ms)
            left = fire(slices, now_ms, budget)
            assert not left, "no subject here has so many subscriptions"
            return left

        def expired(some: DeliverySelection) -> None:
            observer.expired(list(some.each()))
            give_back(some)

        # As with a million keys, much may happen while they are decided.
        for one in self.engine.deciders:
            if isinstance(one, Imports):  # not with the parts of every test
                one.decide_keys = 1
        # As with very many dead letters, much may happen while they are redriven.
        self.calls.redrives.redrive_max = 1
        # As with ten thousand leases of one consumer, or a backlog that expires.
        self.engine.slices.turn_items = 2
        # As with many thousand rows that fall due together.
        self.engine.dispatcher.pump.looks.rows_max = 2
        # What cancels many is short here, and has to be decided as a thousand are.
        self.engine.cancels.columns_min = 2
        self.engine.dispatcher.fire = watched  # type: ignore[method-assign]
        self.engine.leasing.leases.on_expired = expired

    # ── being moved ────────────────────────────────────────────────────────────────────────────

    def post(self, function: Callable[..., None], *arguments: Any) -> None:
        self._loop.append((function, arguments))

    def hang_up(self) -> None:
        """Whoever has called is gone, and nobody calls any more."""
        loop = self.event_loop
        loop.abandon()
        loop.silence()
        self._loop = deque(call for call in self._loop if not loop.is_own(call[0]))

    def call_soon(self, function: Callable[[], None]) -> None:
        self.post(function)

    def is_quick(self) -> bool:
        return self._quick()

    def tick_soon(self, within_ms: int = 0) -> None:
        """The world looks at the clock by itself."""

    def on_fatal(self, error: BaseException) -> None:
        raise AssertionError("only a thread that runs by itself calls this") from error

    def on_recovered(self, recovered: Recovered) -> None:
        self.recovered = recovered
        self.observer.taking_over()

    def on_damage(self, error: DamageError) -> None:
        self.observer.damaged(error)

    def given_up(self, delivery: DueDelivery, reason: str) -> None:
        self.observer.given_up(delivery, reason)

    def clock_was_set(self, by_ms: int) -> None:
        """The world sets its clocks itself."""

    def defined(self, subscription: Subscription) -> None:
        """Subscribers of a world need no sink."""

    def not_understood(self, kind: str, name: str, reason: str) -> None:
        """The world writes only definitions that are."""

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
        """One turn of a thread; False if the disk was full, or the like: the next turn tries again.

        Raises StorageError: the server would end itself."""
        try:
            worker.step(items_max)
        except ShortageError:
            return False
        return True

    def tick(self) -> int:
        """Let the engine see the clock; returns after how long it wants to see it again."""
        self.latest_ms = max(self.latest_ms, self.clock())
        return self.engine.advance(self.clock())

    def held_up(self) -> list[int]:
        """Subscriptions that could have more rows, and for which somebody waits: to be asked after
        `tick`, there are none."""
        dispatcher = self.engine.dispatcher
        instant = Instant(self.clock(), self.stopwatch())
        held_up = []
        for queue in dispatcher.queues:
            is_held = queue.held_until_ms > instant.present_ms
            if queue.subscription.paused or is_held or dispatcher.pump.is_to_run(queue):
                continue
            ready = queue.rows.ready(instant)
            if not ready and not self._stands_still(queue):
                continue
            if ready and self.is_held(queue):
                continue
            if queue.subscription.type == "webhook":
                connections = dispatcher.pushes.connections
                is_one_free = connections.free > 0 and not connections._is_asked
                is_waited_for = queue.free_places() > 0 and is_one_free
            else:
                is_waited_for = (
                    dispatcher.pulls.fetches.oldest(queue.subscription.id, max(1, ready))
                    is not None
                )
            if is_waited_for:
                held_up.append(queue.subscription.id)
        return held_up

    def is_held(self, queue: Queue) -> bool:
        """Nothing might leave when it was looked at last, under no lease; it soon is again."""
        leave_ms = self.engine.dispatcher.pump.wakes_ms(queue)
        return 0 < leave_ms - self.stopwatch() <= HELD_LOOK_MS

    def is_to_be_looked_at(self, queue: Queue) -> bool:
        """The next look at the clock lets its rows leave, or gives them up."""
        leave_ms = self.engine.dispatcher.pump.wakes_ms(queue)
        return leave_ms <= self.stopwatch()

    def _stands_still(self, queue: Queue) -> bool:
        """It is to be looked at again, and later than rows of its subscription may have to wait."""
        leave_ms = self.engine.dispatcher.pump.wakes_ms(queue)
        left_ms = leave_ms - self.stopwatch()
        return leave_ms != NEVER_MS and left_ms > longest_wait_ms(queue.subscription)

    def is_idle(self) -> bool:
        """Nothing is to be done but to wait for the clock or for subscribers."""
        is_calling = self._loop or self.event_loop.has_threads
        return not is_calling and not any(worker.backlog for worker in self.workers)

    def take_turns(self) -> bool:
        """Let everybody work once; False if the disk was full."""
        while self.turn():
            pass
        self.event_loop.run_thread()
        results = [self.run(worker, 1000) for worker in self.workers]
        return all(results)

    def rest(self, rounds_max: int = 2000) -> None:
        """Let everybody work, in turn, until nobody has anything to do, or the disk is full."""
        for _ in range(rounds_max):
            if not self.take_turns() or self.is_idle():
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
        self.settles.flush()
        for worker in self.workers:
            worker.step(1000)
            while worker.backlog:
                worker.step(1000)
            worker.close()
            if worker is self.settling:
                self.observer.leaving()
                self.carried_leases.leave(self.engine)()
        self.close()

    # ── what is watched on its way out ─────────────────────────────────────────────────────────

    def read(self, handout: Handout) -> None:
        queue = self.engine.dispatcher.queues.get(handout.subscription_id)
        if handout.is_to_leave and queue is not None:
            waiting = seqs_of(queue.rows.slices())
            if queue.rows.suspects.out:
                for_later = set(seqs_of(queue.rows.suspects.waiting.slices()))
                waiting = [seq for seq in waiting if seq not in for_later]
            if queue.rows.single_file is not None:
                for_turn = set(seqs_of(queue.rows.single_file.slices()))
                waiting = [seq for seq in waiting if seq not in for_turn]
            self.observer.left(queue.subscription, seqs_of(handout.slices), waiting)
        super().read(handout)

    def hand_out(
        self, subscription: Subscription, request: PullRequest, deliveries: Deliveries
    ) -> None:
        for delivery in () if request.is_gone else deliveries:
            self.observer.sent(subscription, delivery)
        super().hand_out(subscription, request, deliveries)

    def send(self, subscription: Subscription, deliveries: list[DueDelivery]) -> None:
        self.connecting.append((subscription, deliveries))
        if self.connects():
            self.connect(-1)

    def connect(self, index: int) -> None:
        """There is a connection for a webhook: it is sent, unless it may not begin any more."""
        subscription, deliveries = self.connecting.pop(index)
        if self.engine.dispatcher.pushes.may_begin(subscription, deliveries, self.clock()):
            self._check_may_begin(subscription, len(deliveries))
            for delivery in deliveries:
                self.observer.sent(subscription, delivery)
            self.sending.append(deliveries)
            self.on_begun(subscription, deliveries)
        else:
            answers: list[Answer] = [(deliveries, Untried())]
            self.call_soon(lambda: self.engine.outcomes.on_sent(answers, self.clock()))

    def _check_may_begin(self, subscription: Subscription, count: int) -> None:
        """The definition in force allows it: it may have changed since the rows left their queue.

        A pause that was answered is in force, and so is a rate."""
        in_force = self.engine.registry.by_id(subscription.id)
        if in_force is not subscription or in_force.paused:
            raise Violation(f"{subscription.name} is sent something, and is {in_force} by now (I5)")
        if not subscription.rate_per_s or self.engine.dispatcher.queues.permits is not None:
            return
        now_ms = self.stopwatch()
        begun = self._begun.setdefault(id(subscription), (subscription, []))[1]
        begun.append((now_ms, count))
        together = 0
        for at_ms, some in reversed(begun):
            together += some
            allowed = subscription.rate_burst + subscription.rate_per_s * (now_ms - at_ms) / 1000
            if together > max(allowed, 1) + max(0, some - 1) + max(0, count - 1) + 1e-6:
                raise Violation(f"{together} of {subscription.name} left in {now_ms - at_ms} ms")

    def on_begun(self, subscription: Subscription, deliveries: list[DueDelivery]) -> None:
        """The first byte of a webhook has left."""

    def out(self) -> list[list[DueDelivery]]:
        """The webhooks that are not answered, after all have found a connection."""
        while self.connecting:
            self.connect(0)
            self.rest()
        return self.sending

    def settle(self, hour: int, rows: bytes, note: NoteBytes | None) -> None:
        for row in _each_row([rows]):
            self.observer.settled(row)
        super().settle(hour, rows, note)

    # ── what clients and subscribers do ────────────────────────────────────────────────────────

    def answer(self, deliveries: list[DueDelivery], response: WebhookResponse) -> None:
        """A webhook is answered, or was not."""
        self.sending.remove(deliveries)
        now_ms = self.clock()
        self.engine.outcomes.on_sent([(deliveries, response.result(now_ms, 0))], now_ms)

    def ack(self, tokens: list[str], answer: Callable[[list[str]], None]) -> None:
        """A subscriber acknowledges. `answer` is called with the tokens whose leases were over,
        once the others are settled durably."""

        def settled(expired: list[str], error: Exception | None) -> None:
            if error is not None:
                return  # Its leases are over, and whoever asked is told that it failed.
            if len(expired) < len(tokens):
                self.when_settled(partial(answer, expired))
            else:
                answer(expired)

        self.engine.leasing.ack(tokens, self.clock(), None, settled)

    def find(
        self, located: MessageState, done: Callable[[FoundRow | None, Exception | None], None]
    ) -> None:
        """Payload and subject of a message, as `Server.move` needs them."""
        entry = located.entry
        unfiled = self.unfiled(entry)
        if unfiled is not None:
            done(unfiled, None)
        else:
            self.reading.put(CallRequest(lambda reader: reader.find(entry), done))  # type: ignore[arg-type]
