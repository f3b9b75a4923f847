"""The world around one server: machine, clients, subscribers, and a scheduler with a seed.

Cost: a few milliseconds per life. Threads: none.
"""

import contextlib
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np

from delayserver.config import Settings
from delayserver.decisions.imports import Import
from delayserver.decisions.publishing import NewMessage, Published
from delayserver.delivery.delayed_fetch import DelayedFetch, Pulled, PullRequest
from delayserver.delivery.reader import Found
from delayserver.delivery.webhook import WebhookResponse
from delayserver.errors import ConflictError, DelayServerError, NotFoundError, OverloadedError
from delayserver.records.message import Delivery, Payload, State, Watch, decode_payload
from delayserver.records.message_id import MessageId
from delayserver.records.subscriptions import Subscription
from delayserver.records.tables import Archived, ChangeState, DeadLetter, parse_dead_letter_key
from delayserver.schedule.archives import retired_hours
from delayserver.server.threads import ConfirmRequest
from delayserver.testing.definitions import check_definitions
from delayserver.testing.ledger import Ledger, StagedRow, Violation
from delayserver.testing.server import SimulatedClock, SimulatedServer, stage
from storage import staging
from storage.catalog import Table
from storage.directory import open_identity
from storage.errors import DiskFullError, StagingError, StorageError
from storage.frame import Frame
from storage.hour_log import HourLog
from storage.rows import HOUR_MS, LogKind
from storage.staging import OnConflict, manifest_path
from storage.testing.catalog import MemoryCatalog
from storage.testing.faults import Fault, FaultKind, Faults, FaultyFiles, Moment, SimulatedCrash
from storage.testing.files import SimulatedFiles

SUBJECTS = ("orders.paid", "orders.late", "misc")
KEYS = ("k1", "k2", "k3")
WATCH_KEYS = ("w1", "w2")
HEARTBEATS = ("h1", "h2")
OK = WebhookResponse(200)
LOST = WebhookResponse(None, None, "timed out")
FAITHFUL = (
    Subscription(
        id=1,
        name="hook",
        subject="orders.paid",
        type="webhook",
        created_ms=0,
        max_in_flight=3,
        max_attempts=3,
        backoff_ms=(5, 900),
    ),
    Subscription(id=2, name="queue", subject="orders.*", type="pull", created_ms=0, max_attempts=4),
)
"""Subscriptions that are there from the first to the last moment, with options by the seed."""
PASSING = ("p1", "p2", "p3")
"""Names of subscriptions that come and go."""


def filed_rows(disk: SimulatedFiles, hour: int, schedule_bytes: int) -> set[int]:
    """The seqs in the schedule file of an hour, as another process reads them."""
    stamp = open_identity(disk, random_bytes=None).stamp
    log = HourLog(disk, LogKind.SCHEDULE, stamp=stamp)
    seqs: set[int] = set()
    for frame in log.scan(hour, end=schedule_bytes):
        if not isinstance(frame, Frame):
            raise Violation(f"damage in an hour that is settled: {frame}")
        seqs.update(frame.rows["seq"].tolist())
    log.close()
    return seqs


@dataclass(slots=True)
class Lease:
    """What a consumer holds."""

    token: str
    delivery: Delivery


class World:
    """One seed: a machine, many lives of a server on it, and what everybody did."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        # Of its own, since it is asked now and then without anything coming of it.
        self._disk_luck = random.Random(seed + 1)
        self.seed = seed
        self.clock = SimulatedClock()
        self.ledger = Ledger(self.clock)
        self.counts: Counter[str] = Counter()
        # Without looking at the environment, which takes longer than many a life.
        self.settings = Settings.model_construct(
            segment_bytes=4096,
            file_ms=self._disk_luck.choice((20, 1000)),
            checkpoint_ms=rng.choice((50, 200, 1000)),
            checkpoint_bytes=rng.choice((2000, 64 << 20)),
            lead_ms=rng.choice((1, 50, 1000, HOUR_MS // 2)),
            retention_ms=rng.choice((0, 0, 1000, 2 * HOUR_MS)),
            dedupe_window_ms=rng.choice((0, 100, HOUR_MS)),
            settle_sync_ms=rng.choice((0, 20, 100)),
            group_max_bytes=1 << 20,
            fire_rows_max=rng.choice((2, 10_000)),
            # Each of its own, so that what happens in a world does not depend on it.
            archive=random.Random(f"keep {seed}").random() < 0.5,
        )
        self._archiving = random.Random(f"archiving {seed}")
        self._copies: list[tuple[int, Archived, set[int]]] = []
        """Hours that somebody has archived, and has not told of."""
        self.ledger.archive = self.settings.archive
        self.disk = SimulatedFiles(rng=rng)
        self.catalog = MemoryCatalog()
        self.faults = Faults()
        self.server: SimulatedServer | None = None
        self.leases: list[Lease] = []
        self.waiting: list[DelayedFetch] = []
        """Pulls that were not answered at once."""
        self._staged_in: dict[str, int] = {}
        """In which life an import was staged."""
        self._body_count = 0
        # Of their own, so that what happens in a world does not depend on how many there are.
        self._options = random.Random(f"options {seed}")
        self.faithful = tuple(self._with_options(subscription) for subscription in FAITHFUL)
        self._weights: tuple[float, ...] = ()
        """Of the steps; each is the sum of all up to it."""
        self._gentle = False

    def _with_options(self, subscription: Subscription) -> Subscription:
        """The same, with limits on when rows may leave."""
        rng, options = self._options, dict[str, Any]()
        match rng.randrange(4):
            case 0:
                options["spread_ms"] = rng.choice((1, 300, 20_000))
            case 1:
                options["drop_older_than_ms"] = rng.choice((1, 400, HOUR_MS))
        if subscription.type == "webhook":
            if rng.random() < 0.25:
                options.update(rate_per_s=rng.choice((5.0, 1000.0)), rate_burst=rng.choice((1, 20)))
            if rng.random() < 0.3:
                options.update(batch_max=rng.choice((1, 2, 5)), linger_ms=rng.choice((0, 3, 200)))
        return msgspec.structs.replace(subscription, **options)

    # ── lives ──────────────────────────────────────────────────────────────────────────────────

    def live(self, steps: int) -> None:
        """One life, from recovery to its end, whatever that is."""
        rng = self.rng
        self.counts["lives"] += 1
        self.ledger.new_life()
        self.leases, self.waiting = [], []
        self.server = None
        self.faults = self._plan()
        self.catalog.faults = self.faults
        # A bias of its own in every life: one thread may starve, another be everywhere first.
        weights = (step.weight * rng.choice((0.1, 1.0, 1.0, 3.0)) for step in _STEPS)
        self._weights = tuple(itertools.accumulate(weights))
        ending = "power loss" if rng.random() < 0.5 else "kill"
        try:
            self._start()
            for _ in range(steps):
                self._step()
            if rng.random() < 0.15:
                self.faults.faults.clear()
                self._running.stop()
                ending = "stop" if rng.random() < 0.5 else ending
                self.counts["stops"] += 1
        except SimulatedCrash:
            self.counts["crashes inside a call"] += 1
        except StorageError:
            if not self.faults.struck:
                raise
            self.counts["ended by a failed disk"] += 1
        self.counts[ending] += 1
        self.disk = self.disk.crash() if ending == "power loss" else self.disk.kill()
        self.catalog = self.catalog.crash()

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
        return Faults()

    def _quick(self) -> Callable[[], bool]:
        """Whether the disk syncs quickly: never in this life, now and then, or always."""
        luck = self._disk_luck
        share = luck.choice((0.0, 0.0, 0.5, 1.0))
        return lambda: luck.random() < share

    def _start(self) -> None:
        files = FaultyFiles(self.disk, self.faults)
        try:
            self.server = SimulatedServer(
                self.settings,
                files,
                self.catalog,
                self.clock,
                self.rng,
                self.ledger,
                quick=self._quick(),
            )
        except DiskFullError:
            # The operator makes room, and the server is started again.
            self.counts["started on a full disk"] += 1
            raise
        self.faults_begin_again()
        self.ledger.recovered(self.server)
        check_definitions(self.server, self.disk)
        timeouts = self.server.engine.timeouts
        self.ledger.present = lambda: timeouts.now_ms
        registry = self.server.engine.registry
        for subscription in self.faithful:
            if registry.by_id(subscription.id) is None:
                registry.next_id()
                self._put(subscription)
        self.server.tick()

    def faults_begin_again(self) -> None:
        """A hook for tests that count calls after the recovery."""

    # ── steps ──────────────────────────────────────────────────────────────────────────────────

    def _step(self) -> None:
        while True:
            step = self.rng.choices(_STEPS, cum_weights=self._weights)[0]
            if step.is_possible(self):
                step.do(self)
                break
        if self.settings.archive and self._archiving.random() < 0.1:
            self._archive()

    def _turn(self) -> None:
        for _ in range(self.rng.randrange(1, 6)):
            self._running.turn()

    def _commit(self) -> None:
        self._run_worker(0)

    def _file(self) -> None:
        self._run_worker(1)

    def _load(self) -> None:
        self._run_worker(2)

    def _read(self) -> None:
        self._run_worker(3)

    def _settle(self) -> None:
        self._run_worker(4)

    def _verify(self) -> None:
        self._run_worker(5)

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

    def _tick(self) -> None:
        rng, clock = self.rng, self.clock
        dice = rng.random()
        if dice < 0.80:
            clock.move(rng.choice((0, 1, 3, 10, 40, 300)))
        elif dice < 0.90:
            next_hour_ms = (clock.now_ms // HOUR_MS + 1) * HOUR_MS
            clock.move(next_hour_ms - clock.now_ms + rng.choice((-200, -2, -1, 0, 1, 30)))
            self.counts["hour changes"] += 1
        elif dice < 0.94:
            clock.move(rng.choice((1, 2, 3)) * HOUR_MS + rng.randrange(100))
            self.counts["clock jumps ahead"] += 1
        elif dice < 0.98:
            clock.move(-rng.choice((1, 5, 100, 600)))
        elif not self._gentle:
            clock.move(-rng.choice((1, 2)) * HOUR_MS)
            self.counts["clock jumps back"] += 1
        self._running.tick()

    # clients

    def _due_ms(self) -> int:
        rng, now_ms = self.rng, self.clock.now_ms
        to_hour = HOUR_MS - now_ms % HOUR_MS
        delay_ms = rng.choice(
            (
                0,
                rng.randrange(20),
                rng.randrange(400),
                rng.randrange(3000),
                to_hour + rng.randrange(-2, 3),
                to_hour + rng.randrange(600),
                HOUR_MS + rng.randrange(600),
                2 * HOUR_MS + rng.randrange(-100, 100),
            )
        )
        return now_ms + max(0, delay_ms)

    def _new_message(self, subject: str, key: str | None) -> NewMessage:
        self._body_count += 1
        variant = self.rng.randrange(2) if key else self._body_count
        body = f'"{variant}{"x" * self.rng.choice((0, 5, 200))}"'.encode()
        if key:
            body = f'"{variant}"'.encode()
        watch = None
        if variant % 3 == 1:
            # The same content watches the same keys.
            watch = Watch(WATCH_KEYS[: 1 + variant % 2], variant // 3 % 2)
        return NewMessage(subject, self._due_ms(), Payload(body, key=key, watch=watch))

    def _publish(self) -> None:
        rng = self.rng
        keyed = rng.random() < 0.3
        count = rng.choice((1, 1, 1, 2, 5))
        messages = [
            self._new_message(rng.choice(SUBJECTS), rng.choice(KEYS) if keyed else None)
            for _ in range(count)
        ]
        try:
            published = self._running.engine.publishing.publish(messages, self.clock.now_ms)
        except DelayServerError:
            return
        for message, one in zip(messages, published, strict=True):
            self._await_publish(message, one)

    def _await_publish(self, message: NewMessage, one: Published) -> None:
        seq = self._running.engine.ids.decode(one.message_id).seq

        def answered(error: Exception | None) -> None:
            if error is None:
                self.ledger.published(seq)
                known = self.ledger.messages[seq]
                if known.payload.body != message.payload.body:
                    raise Violation(f"the publish of {seq} was answered for other content (I3)")
                if one.duplicate:
                    self.counts["duplicates"] += 1
                if one.duplicate and known.cancelled:
                    self.counts["duplicates of cancelled ones"] += 1

        if one.group is None:
            answered(None)
        else:
            one.group.when_durable(answered)

    def _replace(self) -> None:
        rng, messages = self.rng, self._running.engine.messages
        publishing = self._running.engine.publishing
        subject, key = rng.choice(SUBJECTS), rng.choice(KEYS)
        message = self._new_message(subject, key)
        try:
            before = messages.by_key(subject, key).seq
        except NotFoundError:
            before = 0
        try:
            published, replaced = publishing.replace(message, self.clock.now_ms)
        except DelayServerError:
            return
        assert published.group is not None
        self._await_publish(message, published)
        if replaced:
            self.counts["replaced"] += 1
            published.group.when_durable(partial(self._cancel_answered, before))

    def _event(self) -> None:
        server, events, now_ms = self._running, self._running.engine.events, self.clock.now_ms
        key = self.rng.choice(WATCH_KEYS)
        expected = self.ledger.watching(key, max(now_ms, server.engine.timeouts.now_ms))
        watchers = events.watchers(key, server.engine.sequencer.next_seq)
        bodies = {}
        for watcher in watchers:
            entry = events.entry(watcher)
            found = server.unfiled(entry) or server.reader.find(entry)
            if found is not None:
                bodies[watcher.seq] = found.payload, found.subject_id
        already = {
            seq
            for seq in expected
            if (change := server.engine.sequencer.changes(seq).get(0)) is not None
            and change.state in (ChangeState.CANCELLED, ChangeState.FIRED)
        }
        try:
            done = events.complete(key, watchers, bodies, now_ms)
        except DelayServerError:
            return
        missing = expected - already - {*done.cancelled, *done.fired}
        if missing:
            raise Violation(f"an event for {key} left {missing} waiting (I5)")

        def answered(error: Exception | None) -> None:
            if error is None:
                self.ledger.event_completed(done.cancelled, done.fired)

        if done.group is None:
            answered(None)
        else:
            done.group.when_durable(answered)

    def _heartbeat(self) -> None:
        rng, server = self.rng, self._running
        heartbeats, key = server.engine.heartbeats, rng.choice(HEARTBEATS)
        dice = rng.random()
        try:
            if dice < 0.15:
                self.ledger.deleting.add(key)
                heartbeats.delete(key)
                return
            if dice < 0.75:
                known, _ = heartbeats.get(key)
                subject = server.engine.sequencer.subject_names[known.subject_id]
                payload, timeout_ms = decode_payload(known.payload, "", 0, 0), known.timeout_ms
            else:
                self._body_count += 1
                payload = Payload(f'"{key} {self._body_count}"'.encode())
                subject, timeout_ms = rng.choice(SUBJECTS), rng.choice((1, 40, 700))
            is_new, _, group = heartbeats.put(key, timeout_ms, subject, payload, self.clock.now_ms)
        except DelayServerError:
            return
        self.counts["heartbeats"] += is_new
        self.counts["renewals"] += dice < 0.75
        deadline_ms = server.engine.timeouts.now_ms + timeout_ms

        def answered(error: Exception | None) -> None:
            if error is None:
                self.ledger.renewed(payload.body, deadline_ms)

        if group is None:
            answered(None)
        else:
            group.when_durable(answered)

    def _some_message(self) -> tuple[int, int] | None:
        """A message that a client may know; mostly a young one."""
        known = self.ledger.messages
        if not known:
            return None
        seqs = list(known)
        seq = self.rng.choice(seqs[-12:] if self.rng.random() < 0.8 else seqs)
        return seq, known[seq].due_ms

    def _cancel(self) -> None:
        chosen = self._some_message()
        if chosen is None:
            return
        seq, due_ms = chosen
        try:
            group = self._running.engine.messages.cancel(seq, due_ms)
        except ConflictError as error:
            if error.state:
                self.ledger.located(seq, State(error.state))
            return
        except DelayServerError:
            return
        if group is None:
            self._cancel_answered(seq, None)
        else:
            group.when_durable(partial(self._cancel_answered, seq))

    def _cancel_many(self) -> None:
        chosen = [self._some_message() for _ in range(self.rng.randrange(1, 8))]
        found = [MessageId(0, due_ms, seq) for seq, due_ms in filter(None, chosen)]
        engine = self._running.engine
        try:
            refusals = engine.cancels.cancel(
                np.array([one.seq for one in found], np.uint64),
                np.array([one.due_ms for one in found], np.int64),
                np.zeros(len(found), np.uint32),
            )
        except DelayServerError:
            return
        group = engine.groups.not_durable()
        for index, one in enumerate(found):
            refusal = refusals.get(index)
            if isinstance(refusal, ConflictError):
                if refusal.state:
                    self.ledger.located(one.seq, State(refusal.state))
            elif refusal is None and group is None:
                self._cancel_answered(one.seq, None)
            elif refusal is None and group is not None:
                group.when_durable(partial(self._cancel_answered, one.seq))

    def _cancel_answered(self, seq: int, error: Exception | None) -> None:
        if error is None:
            self.ledger.cancelled(seq)

    def _look_up(self) -> None:
        chosen = self._some_message()
        if chosen is None:
            return
        located = self._running.engine.messages.locate(*chosen)
        # Of a message that is being retried the others may have been delivered.
        is_retry = bool(located.subscription_id)
        if self._running.engine.messages.is_known(located.entry) and not is_retry:
            self.ledger.located(chosen[0], located.state)

    def _move(self) -> None:
        chosen = self._some_message()
        if chosen is None:
            return
        seq, due_ms = chosen
        server, new_due_ms = self._running, self._due_ms()

        def found(value: Found | None, error: Exception | None) -> None:
            if error is not None:
                raise error
            if value is None:
                return
            try:
                group = server.engine.messages.move(
                    seq, due_ms, max(new_due_ms, self.clock.now_ms), value.payload, value.subject_id
                )
            except ConflictError as conflict:
                if conflict.state:
                    self.ledger.located(seq, State(conflict.state))
                return
            except DelayServerError:
                return
            group.when_durable(answered)

        def answered(error: Exception | None) -> None:
            if error is None:
                self.ledger.moved(seq, new_due_ms)

        # A message that is being imported cannot be read yet.
        with contextlib.suppress(OverloadedError):
            server.find(server.engine.messages.locate(seq, due_ms), found)

    def _import(self) -> None:
        rng = self.rng
        known = list(self.ledger.staged)
        import_id = rng.choice(known[-3:]) if known and rng.random() < 0.5 else self._stage()
        if import_id is None:
            return
        try:
            self._running.engine.imports.adopt(
                manifest_path(import_id), partial(self._import_answered, import_id)
            )
        except DelayServerError:
            return

    def _stage(self) -> str | None:
        """What a bulk load does: it writes files, and syncs none of them."""
        rng, subjects = self.rng, self.ledger.subjects
        if not subjects:
            return None
        import_id = f"import-{len(self.ledger.staged)}"
        self._staged_in[import_id] = self.counts["lives"]
        numbers = sorted(subjects)
        keyed = rng.random() < 0.5
        rows = []
        for _ in range(rng.choice((1, 3, 8))):
            message = self._new_message(
                subjects[rng.choice(numbers)], rng.choice(KEYS) if keyed else None
            )
            subject_id = self._running.engine.sequencer.subjects[message.subject]
            payload = msgspec.structs.replace(message.payload, watch=None)
            rows.append(StagedRow(message.due_ms, subject_id, payload))
        rows.sort(key=lambda row: row.due_ms)
        self.ledger.staged[import_id] = rows
        cut = rng.randrange(len(rows))
        parts = [rows[:cut], rows[cut:]] if cut else [rows]
        on_conflict = rng.choice(tuple(OnConflict))
        stage(
            self.disk,
            import_id,
            parts,
            self._running.engine.messages.key_hash,
            on_conflict=on_conflict,
        )
        self.counts["staged"] += 1
        return import_id

    def _import_answered(
        self, import_id: str, found: Import | None, error: Exception | None
    ) -> None:
        if found is not None:
            self.ledger.adopted(import_id, found.first_seq)
        elif isinstance(error, ConflictError):
            self.counts["imports with conflicts"] += 1
        elif isinstance(error, StagingError | NotFoundError):
            self.counts["imports damaged by a crash"] += 1
            was_sound = self._staged_in[import_id] == self.counts["lives"]
            if was_sound or import_id in self.ledger.imports:
                raise Violation(f"the import {import_id} was refused: {error}")

    def _archive(self) -> None:
        """Somebody copies a settled hour, and tells the server much later: it may have changed."""
        if self._archiving.random() < 0.8:
            self._copy_hour()
        elif self._copies:
            self._tell_of(*self._copies.pop(self._archiving.randrange(len(self._copies))))

    def _copy_hour(self) -> None:
        server = self._running
        copied = {hour for hour, _, _ in self._copies}
        retired = [
            one
            for one in retired_hours(server.catalog, self.disk)
            if not one.archived and one.hour not in copied
        ]
        if not retired:
            return
        one = self._archiving.choice(retired)
        archived = Archived(*one.extent, one.count, "", "", self.clock.now_ms)
        seqs = filed_rows(self.disk, one.hour, archived.schedule_bytes)
        self._copies.append((one.hour, archived, seqs))

    def _tell_of(self, hour: int, archived: Archived, seqs: set[int]) -> None:
        def answered(error: Exception | None) -> None:
            if error is None:
                self.ledger.archived(hour, archived)
            else:
                self.counts["archives refused"] += 1
                self.ledger.refused(hour, archived)

        self.ledger.archiving(hour, archived, seqs)
        self._running.replayer.put(ConfirmRequest(hour, archived, answered))

    # subscriptions

    def _put(self, subscription: Subscription) -> None:
        if self._running.engine.registry.by_id(subscription.id) is None:
            self.ledger.made(subscription.id)
        try:
            self._running.engine.put_subscription(subscription)
        except DelayServerError:
            return
        self.counts["subscription changes"] += 1

    def _change_subscription(self) -> None:
        rng, registry = self.rng, self._running.engine.registry
        if not self._running.engine.groups.is_idle:
            return  # The server changes one at a time, and waits for it.
        if rng.random() < 0.3:
            chosen = registry.by_id(rng.choice((1, 2)))
            if chosen is not None:
                self._put(msgspec.structs.replace(chosen, paused=not chosen.paused))
            return
        name = rng.choice(PASSING)
        known = registry.by_name(name)
        if known is None:
            made = Subscription(
                id=registry.next_id(),
                name=name,
                subject=rng.choice((*SUBJECTS, "orders.*", "*")),
                type=rng.choice(("webhook", "pull")),
                created_ms=self.clock.now_ms,
                max_in_flight=rng.choice((1, 3)),
                max_attempts=rng.choice((1, 1, 2, 4)),
                backoff_ms=(rng.choice((1, 50, 2000)),),
            )
            self._put(self._with_options(made))
        elif rng.random() < 0.6:
            self._put(msgspec.structs.replace(known, deleted=True))
        else:
            self._put(msgspec.structs.replace(known, paused=not known.paused))

    def _has_dead_letters(self) -> bool:
        return any(True for _ in self._running.catalog.scan(Table.DEAD_LETTERS))

    def _dead_letters(self) -> None:
        """Redrive or throw away a dead letter, as the server lists them."""
        server = self._running
        pairs = list(server.catalog.scan(Table.DEAD_LETTERS))
        if not pairs:
            return
        key, value = self.rng.choice(pairs)
        subscription_id, entry_seq = parse_dead_letter_key(key)
        letter = msgspec.msgpack.decode(value, type=DeadLetter)
        payload = decode_payload(letter.payload, "catalog", 0, entry_seq)
        assert payload.origin is not None
        engine = server.engine
        try:
            if self.rng.random() < 0.7:
                engine.redrive(subscription_id, entry_seq, payload, self.clock.now_ms)
            else:
                engine.discard(subscription_id, entry_seq, payload.origin.message_seq)
        except DelayServerError:
            return

    # subscribers

    def _webhook(self) -> None:
        server = self._running
        if not server.sending:
            return
        deliveries = self.rng.choice(server.sending)
        dice = 0.0 if self._gentle else self.rng.random()
        if dice < 0.5:
            response, seen = OK, True
        elif dice < 0.62:
            response, seen = LOST, True
        elif dice < 0.74:
            response, seen = LOST, False
        elif dice < 0.92:
            response, seen = WebhookResponse(500), False
        elif dice < 0.98:
            response, seen = WebhookResponse(503, 2000), False
        else:
            response, seen = WebhookResponse(410), False
        for delivery in deliveries:
            self.ledger.returned(delivery, seen=seen)
        server.answer(deliveries, response)

    def _pull(self) -> None:
        rng, server = self.rng, self._running
        pulls = [s for s in server.engine.registry if s.type == "pull"]
        if not pulls:
            return
        subscription = rng.choice(pulls)
        gone = not self._gentle and rng.random() < 0.1

        def answer(got: Pulled) -> None:
            for delivery, token in got:
                if gone:
                    self.ledger.returned(delivery, seen=False)
                    server.engine.nack([token], 0, self.clock.now_ms)
                else:
                    self.leases.append(Lease(token, delivery))

        wait_ms = 10 if self._gentle else rng.choice((0, 50, 5000))
        lease_ms = 10_000 if self._gentle else rng.choice((5, 500, 10_000))
        most = rng.choice((1, 3, 10))
        least = 1 if self._gentle else rng.choice((1, 1, most))
        fetch = server.pull(subscription, PullRequest(most, lease_ms, wait_ms, answer, least))
        if not fetch.is_completed:
            self.waiting.append(fetch)

    def _hang_up(self) -> None:
        """A consumer that waits is gone."""
        fetch = self.waiting.pop(self.rng.randrange(len(self.waiting)))
        fetch.cancel()

    def _consume(self) -> None:
        rng, server = self.rng, self._running
        if not self.leases:
            return
        lease = self.leases[rng.randrange(len(self.leases))]
        dice = 0.0 if self._gentle else rng.random()
        if dice < 0.6:
            self.leases.remove(lease)
            if server.engine.leases.get(lease.token) is not None:
                self.ledger.returned(lease.delivery, seen=True)
            server.ack([lease.token], partial(self._acked, lease))
        elif dice < 0.75:
            self.leases.remove(lease)
            if server.engine.leases.get(lease.token) is not None:
                self.ledger.returned(lease.delivery, seen=False)
            server.engine.nack([lease.token], rng.choice((0, 0, 20, 1000)), self.clock.now_ms)
        elif dice < 0.9:
            server.engine.extend([lease.token], rng.choice((1, 1000)), self.clock.now_ms)
        else:
            self.leases.remove(lease)  # It fell over.

    def _acked(self, lease: Lease, expired: list[str]) -> None:
        if not expired:
            self.ledger.acked(lease.delivery)

    # ── the end ────────────────────────────────────────────────────────────────────────────────

    def finish(self) -> None:
        """The last life: no faults, patient subscribers; then nothing may be left."""
        self.ledger.new_life()
        self.leases, self.waiting = [], []
        self._gentle = True
        self.faults = Faults()
        self.catalog.faults = None
        self._start()
        server = self._running
        server.rest()
        for subscription in list(server.engine.registry):
            self._put(msgspec.structs.replace(subscription, paused=False))
        server.rest()
        everything = Subscription(
            id=server.engine.registry.next_id(),
            name="everything",
            subject="*",
            type="webhook",
            created_ms=self.clock.now_ms,
        )
        self._put(everything)
        hours = server.engine.hours
        server.tick()
        server.rest()
        for subscription in server.engine.registry:
            if subscription.type == "pull":
                self._pull_all(subscription)
        for lease in self.leases:  # Once more, before everybody takes everything.
            self.ledger.returned(lease.delivery, seen=False)
            server.engine.nack([lease.token], 0, self.clock.now_ms)
        self.leases.clear()
        for _ in range(300):
            server.rest()
            while server.sending:
                self._webhook()
                server.rest()
            for subscription in server.engine.registry:
                if subscription.type == "pull":
                    self._pull_all(subscription)
            while self.leases:
                self._consume()
            server.rest()
            if (
                not server.sending
                and not self.leases
                and not hours.unsettled()
                and not len(server.engine.heartbeats)
                and all(state.retired_ms for state in server.replay.hours.values())
                and server.is_idle()
            ):
                break
            self._jump_to_next()
        else:
            raise Violation(f"it never comes to rest: {self._leftovers()}")
        self.ledger.check_all_delivered(self.faithful)
        self._purge()

    def _pull_all(self, subscription: Subscription) -> None:
        def answer(got: Pulled) -> None:
            self.leases += [Lease(token, delivery) for delivery, token in got]

        server = self._running
        server.pull(subscription, PullRequest(1000, 60_000, 0, answer))
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
            for queue in engine.dispatcher.queues()
        }
        return (
            f"unsettled {engine.hours._unsettled}, loading {engine.hours.loading}, "
            f"hours {self._running.replay.hours}, queues {queues}, "
            f"parked {engine.dispatcher.parked_count()}"
        )

    def _purge(self) -> None:
        server, engine = self._running, self._running.engine
        self.clock.move(4 * HOUR_MS)
        rounds_left = 200
        while rounds_left:
            self.clock.move(self.settings.checkpoint_ms)
            server.tick()
            server.rest()
            if self.settings.archive:
                self._copy_hour()
                while self._copies:
                    self._tell_of(*self._copies.pop())
            rounds_left -= 1
            if not server.replay.hours:
                # A few more, for what they left to be deleted.
                rounds_left = min(rounds_left, 5)
        files = [
            f"{directory}/{name}"
            for directory in ("schedule", "dispatch")
            for name in self.disk.list(directory)
        ]
        queues = list(engine.dispatcher.queues())
        left = {
            "hours": server.replay.hours,
            "files": files,
            "keys": list(server.catalog.scan(Table.KEYS)),
            "changes": list(server.catalog.scan(Table.CHANGES)),
            "watch keys": list(server.catalog.scan(Table.WATCHES)),
            "heartbeats": list(server.catalog.scan(Table.HEARTBEATS)),
            "rows of the catalog about hours": list(server.catalog.scan(Table.HOURS)),
            "archives": list(server.catalog.scan(Table.ARCHIVES)),
            "counts": {h: n for h, n in engine.hours._unsettled.items() if n},
            "leases": engine.leases.count() + len(engine.leases._pulls),
            "pulls that wait": engine.dispatcher.fetches.count(),
            "timeouts": engine.timeouts.size(),
            "in flight": [q.in_flight for q in queues if q.in_flight],
            "reserved": [q.reserved for q in queues if q.reserved],
            "attempts": [q.attempts for q in queues if q.attempts],
            "open files": [
                hour
                for reader in (server.reader, server.reader_now)
                for log in (reader._schedule, reader._dispatch)
                for hour in log._open
                if log.path(hour) not in files
            ],
            "orphans": engine.dispatcher._orphans,
            "parked": engine.dispatcher.parked_count(),
            "unfiled": engine.groups.unfiled_bytes,
            "staged files": [
                name
                for name in self.disk.list(staging.DIRECTORY)
                if staging.import_of(name) in self.ledger.imports
            ],
            "imported keys": engine.sequencer._imported,
            "imports": engine.imports._adoptions(),
            "removed": len(engine.sequencer.removed),
        }
        for name, value in left.items():
            if value:
                raise Violation(f"{name} are left over: {value}")


@dataclass(frozen=True, slots=True)
class _Step:
    """Something that may happen next."""

    do: Callable[[World], None]
    weight: float
    is_possible: Callable[[World], object] = lambda world: True


def _has_work(index: int) -> Callable[[World], object]:
    return lambda world: world._running.workers[index].backlog


_STEPS = (
    _Step(World._turn, 6, lambda world: world._running.has_callbacks),
    _Step(World._commit, 3, _has_work(0)),
    _Step(World._file, 1),
    _Step(World._load, 3, _has_work(2)),
    _Step(World._read, 4, _has_work(3)),
    _Step(World._settle, 1.5),
    _Step(World._verify, 3, _has_work(5)),
    _Step(World._tick, 3),
    _Step(World._publish, 2),
    _Step(World._replace, 0.7),
    _Step(World._import, 0.4),
    _Step(World._cancel, 0.5),
    _Step(World._cancel_many, 0.3),
    _Step(World._look_up, 0.8),
    _Step(World._move, 0.7),
    _Step(World._event, 0.5),
    _Step(World._heartbeat, 1.5),
    _Step(World._change_subscription, 0.5),
    _Step(World._dead_letters, 1.5, lambda world: world._has_dead_letters()),
    _Step(World._webhook, 4, lambda world: world._running.sending),
    _Step(World._pull, 1),
    _Step(World._hang_up, 0.2, lambda world: world.waiting),
    _Step(World._consume, 3, lambda world: world.leases),
)

LIVES = 12
STEPS = 100


def run_world(seed: int, *, lives: int = LIVES, steps: int = STEPS) -> World:
    """One world from its first to its last life. Raises Violation."""
    world = World(seed)
    for _ in range(lives):
        world.live(steps)
    world.finish()
    return world
