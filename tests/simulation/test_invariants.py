"""Promises that are broken without anything being lost, each with the bug that must be noticed.

The worlds of the simulation compare what was promised with what arrived. They cannot see that a
delivery was late because of others (I2), that a start read more than it had to (I10), or that two
processes had one directory (I12); no subscription gets another subject in them (I7), and no bit
rots (I8). So each of these has a check of its own, which has to pass, and to end by a violation
with the bug planted."""

import contextlib
import fcntl
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from delayserver.backup import restoring
from delayserver.backup.shelf import BackupManifest, Shelf, encode_manifest
from delayserver.config import Settings
from delayserver.decisions.new_messages import NewMessage
from delayserver.delivery.connections import Connections
from delayserver.delivery.delayed_fetch import Pulled, PullRequest
from delayserver.delivery.pump import Pump
from delayserver.delivery.queue import Queue
from delayserver.delivery.reader import Reader
from delayserver.delivery.settling import Settling
from delayserver.delivery.slow_start import LOOK_MS
from delayserver.delivery.webhook import WebhookResponse
from delayserver.parts.heartbeats.heartbeats import Heartbeats
from delayserver.parts.imports.archives import Archives, confirming, kept_hours
from delayserver.parts.imports.records import Archived
from delayserver.parts.schedules.scheduling import Scheduling, WantedSchedule
from delayserver.parts.sources.sourcing import Sourcing, WantedSource
from delayserver.records.message import DueDelivery, Payload
from delayserver.records.subscriptions import KafkaTarget, SubjectSpan, Subscription
from delayserver.records.understanding import Understanding
from delayserver.schedule.loader import LoadedHour, Loader
from delayserver.schedule.replay import Replay
from delayserver.server.body_reader import BodyReader
from delayserver.server.filer import CheckpointRequest, FilerCall
from storage import frame, kinds
from storage.buckets import bucket_path
from storage.catalog import Table
from storage.errors import DirectoryLockedError
from storage.files import Files, OsFiles, replace_file
from storage.rows import HOUR_MS, LogKind
from tests.simulation.half_made import backups, kept, restores
from tests.world import Observer, SimulatedClock, SimulatedServer, Violation
from tests.world.publishes import publish_all
from tests.world.storage.catalog import MemoryCatalog
from tests.world.storage.faults import Faults, FaultyFiles
from tests.world.storage.files import SimulatedFiles

SETTINGS = Settings(segment_bytes=1 << 20, lead_ms=1000)
MESSAGES = 20
BODY = b'{"order": 7}'
Patch = pytest.MonkeyPatch


class Machine:
    """A disk, and servers that are started on it."""

    def __init__(self) -> None:
        self.rng = random.Random(0)
        self.disk, self.catalog = SimulatedFiles(rng=self.rng), MemoryCatalog()
        self.clock, self.faults = SimulatedClock(), Faults()

    def start(
        self, settings: Settings = SETTINGS, observer: Observer | None = None
    ) -> SimulatedServer:
        files, observer = FaultyFiles(self.disk, self.faults), observer or Observer()
        return SimulatedServer(settings, files, self.catalog, self.clock, self.rng, observer)

    def kill(self) -> None:
        self.disk, self.catalog = self.disk.kill(), self.catalog.kill()
        self.faults = Faults()

    def publish(self, server: SimulatedServer, *due_times: int) -> None:
        publish_all(
            server.engine.publishing,
            [NewMessage("orders", due_ms, Payload(BODY)) for due_ms in due_times],
            self.clock.now_ms,
        )
        server.rest()


def subscribe(server: SimulatedServer, name: str) -> Subscription:
    subscription = Subscription(
        id=server.engine.registry.next_id(),
        name=name,
        subject="orders",
        type="webhook",
        created_ms=0,
        max_in_flight=3,
    )
    server.engine.subscribing.put_subscription(subscription)
    server.rest()
    return subscription


# ── I2 ─────────────────────────────────────────────────────────────────────────────────────────


def a_silent_subscriber_delays_nobody() -> None:
    machine = Machine()
    server = machine.start()
    subscribe(server, "silent")
    quick = subscribe(server, "quick")
    machine.publish(server, *(machine.clock.now_ms + 1 for _ in range(MESSAGES)))
    machine.clock.move(1)
    server.tick()
    server.rest()
    answered = 0
    while mine := [one for one in server.sending if one[0].subscription_id == quick.id]:
        server.answer(mine[0], WebhookResponse(200))
        server.rest()
        answered += 1
    # No time has passed, and the silent one has answered nothing.
    if answered != MESSAGES:
        raise Violation(f"{answered} of {MESSAGES} came to the quick one (I2)")


def one_queue_for_all(patch: Patch) -> None:
    original = Pump.run

    def run(self: Any, queue: Any, now_ms: int) -> None:
        if all(other.in_flight < other.subscription.max_in_flight for other in self._queues):
            original(self, queue, now_ms)

    patch.setattr(Pump, "run", run)


def a_receiver_that_hangs_leaves_connections() -> None:
    machine = Machine()
    settings = SETTINGS.model_copy(update={"webhook_connections_max": 90})
    server = machine.start(settings)
    hangs = msgspec.structs.replace(subscribe(server, "silent"), max_in_flight=1000)
    server.engine.subscribing.put_subscription(hangs)
    machine.publish(server, *(machine.clock.now_ms + 1 for _ in range(100)))
    machine.clock.move(1)
    server.tick()
    server.rest()
    while server.tick() <= LOOK_MS:  # Its requests become more, one in each millisecond.
        machine.clock.move(LOOK_MS)
        server.rest()
    quick = msgspec.structs.replace(subscribe(server, "quick"), url="http://127.0.0.1:1/")
    server.engine.subscribing.put_subscription(quick)
    machine.publish(server, machine.clock.now_ms + 1)
    machine.clock.move(1)
    server.tick()
    server.rest()
    if not any(one[0].subscription_id == quick.id for one in server.sending):
        raise Violation(f"{len(server.sending)} hang, and nothing is sent to the quick one (I2)")


def a_subscription_may_have_all_connections(patch: Patch) -> None:
    patch.setattr(Connections, "_share", lambda self, owner, host: self._free)


class Deaths(Observer):
    """Notes the messages that died."""

    def __init__(self) -> None:
        self.dead: list[int] = []

    def given_up(self, delivery: DueDelivery, reason: str) -> None:
        self.dead.append(delivery.origin.message_seq)


def a_message_that_ends_its_consumer_dies_alone() -> None:
    machine, deaths = Machine(), Deaths()
    server = machine.start(observer=deaths)
    everything = msgspec.structs.replace(
        subscribe(server, "all"), type="pull", max_attempts=3, lease_ms=1000
    )
    server.engine.subscribing.put_subscription(everything)
    machine.publish(server, *(machine.clock.now_ms + 1 for _ in range(MESSAGES)))
    machine.clock.move(1)
    bad: int | None = None
    for _ in range(20 * MESSAGES):
        server.tick()
        server.rest()
        held: list[tuple[str, DueDelivery]] = []

        def answer(got: Pulled, held: list[tuple[str, DueDelivery]] = held) -> None:
            held += [(token, delivery) for delivery, token in got]

        server.engine.leasing.pull(everything, PullRequest(MESSAGES, 1000, 0, answer))
        server.rest()
        bad = held[0][1].origin.message_seq if bad is None else bad
        if all(delivery.origin.message_seq != bad for _, delivery in held):
            server.ack([token for token, _ in held], lambda expired: None)
            server.rest()
        machine.clock.move(1000)  # otherwise the consumer has ended, and says nothing
    if deaths.dead != [bad]:
        raise Violation(f"{deaths.dead} died, and message {bad} ends its consumers")


def messages_that_failed_together_stay_together(patch: Patch) -> None:
    patch.setattr(Queue, "company_max", lambda self, attempt, count: count)
    patch.setattr(Settling, "may_be_the_cause", lambda self, deliveries, which: True)


# ── I7 ─────────────────────────────────────────────────────────────────────────────────────────


def a_changed_subject_changes_nothing_that_has_fallen_due() -> None:
    for is_restarted in (False, True):
        received = _after_a_change_of_subjects(is_restarted=is_restarted)
        if received != {"narrowed": MESSAGES}:
            raise Violation(f"{received} get what `narrowed` waits for ({is_restarted=}, I7)")


def _after_a_change_of_subjects(*, is_restarted: bool) -> dict[str, int]:
    """One has had all messages, and another waits for them. Its subject becomes one that does not
    match them, and that of a third one, which did not match them, one that does."""
    machine = Machine()
    server = machine.start()
    narrowed, widened = (subscribe(server, name) for name in ("narrowed", "widened"))

    def put(one: Subscription, subject: str, *, paused: bool) -> None:
        changed = msgspec.structs.replace(one, subject=subject, paused=paused)
        server.engine.subscribing.put_subscription(changed)
        server.rest()

    put(narrowed, "orders", paused=True)
    put(widened, "refunds", paused=True)
    subscribe(server, "settles all")
    machine.publish(server, *(machine.clock.now_ms + 1 for _ in range(MESSAGES)))
    machine.clock.move(1)
    if _received(server) != {"settles all": MESSAGES}:
        raise Violation("what is paused is sent")
    put(narrowed, "refunds", paused=True)
    put(widened, "*", paused=True)
    if is_restarted:
        machine.kill()
        server = machine.start()
    put(narrowed, "refunds", paused=False)
    put(widened, "*", paused=False)
    return _received(server)


def _received(server: SimulatedServer) -> dict[str, int]:
    """How many messages each subscription is sent now; each of them arrives."""
    registry, counts = server.engine.registry, Counter[str]()
    server.tick()
    server.rest()
    while server.sending:
        sent = server.sending[0]
        receiver = registry.by_id(sent[0].subscription_id)
        counts["" if receiver is None else receiver.name] += len(sent)
        server.answer(sent, WebhookResponse(200))
        server.rest()
    return dict(counts)


def a_subscription_goes_by_its_newest_subject(patch: Patch) -> None:
    original = Subscription.spans.fget  # type: ignore[attr-defined]

    def spans(self: Subscription) -> tuple[SubjectSpan, ...]:
        first = original(self)[0]
        return (first._replace(subject=self.subject),)

    patch.setattr(Subscription, "spans", property(spans))


# ── a definition harms only itself ─────────────────────────────────────────────────────────────


def what_is_not_understood_stands_still() -> None:
    """Definitions of each kind as a newer server writes them, beside those that it shares."""
    machine = Machine()
    server = machine.start()
    engine, now_ms = server.engine, machine.clock.now_ms
    quick = subscribe(server, "quick")
    subscribe(server, "newer")
    for name in ("ours", "newer"):
        engine.part(Scheduling).put(
            WantedSchedule(name, "ticks", Payload(BODY), "", 1000, "UTC"), now_ms
        )
        topic = KafkaTarget("127.0.0.1:9", name)
        engine.part(Sourcing).put(WantedSource(name, "taken", topic, "due", "g"), now_ms)
        engine.part(Heartbeats).put(name, 60_000, "beats", Payload(BODY), now_ms)
    machine.publish(server, now_ms + 5)
    server.replayer.put(CheckpointRequest(lambda: None))
    server.rest()
    machine.kill()
    writes: dict[Table, list[tuple[bytes, bytes | None]]] = {}
    for table in (Table.SUBSCRIPTIONS, Table.SCHEDULES, Table.SOURCES, Table.HEARTBEATS):
        for key, value in machine.catalog.scan(table):
            if b"newer" in value:
                fields = msgspec.msgpack.decode(value)
                grown = {**fields, "flow": 3} if isinstance(fields, dict) else [*fields, 3]
                writes.setdefault(table, []).append((key, msgspec.msgpack.encode(grown)))
    if len(writes) != 4:
        raise AssertionError(f"not of all kinds: {writes}")
    machine.catalog.commit(writes)
    try:
        server = machine.start()
        machine.clock.move(1000)
        for _ in range(2):  # it looks at schedules first
            server.tick()
            server.rest()
    except Exception as error:
        raise Violation(f"a definition has ended the start: {error!r}") from error
    engine = server.engine
    stands_still = {
        "subscription": {one.name for one in engine.registry if one.pause_reason},
        "schedule": set(engine.part(Scheduling).not_understood),
        "source": {one.definition.name for one in engine.part(Sourcing).all() if one.problem},
        "heartbeat": set(engine.part(Heartbeats).not_understood),
    }
    for kind, names in stands_still.items():
        if names != {"newer"}:
            raise Violation(f"each {kind} that stands still: {names}")
    if not any(one[0].subscription_id == quick.id for one in server.sending):
        raise Violation("what everybody understands is not delivered")
    if engine.part(Scheduling).get("ours").state.runs != 1:
        raise Violation("a schedule that is understood does not run")
    for table, pairs in writes.items():
        if any(machine.catalog.get(table, key) != value for key, value in pairs):
            raise Violation(f"{table} is not as it was stored")
    machine.kill()


def a_definition_that_is_not_understood_ends_the_start(patch: Patch) -> None:
    original = Understanding.read

    def read(self: Any, data: bytes, **known: object) -> tuple[Any, str]:
        value, problem = original(self, data, **known)
        if problem:
            raise ValueError(problem)
        return value, problem

    patch.setattr(Understanding, "read", read)


# ── I8 ─────────────────────────────────────────────────────────────────────────────────────────


def a_flipped_bit_is_named() -> None:
    machine = Machine()
    server = machine.start()
    machine.publish(server, machine.clock.now_ms + 1)
    machine.publish(server, machine.clock.now_ms + 2)  # the last group might be a torn tail
    machine.kill()
    file = machine.disk.open("messages/" + machine.disk.list("messages")[0])
    place = file.pread(file.size(), 0).index(BODY)
    file.pwrite([b"["], place)
    recovered = machine.start().recovered
    machine.kill()  # nobody checks a disk that is off
    if not recovered.damage:
        raise Violation(f"{file.path}@{place} is another byte, and nobody noticed (I8)")


class _Whatever(int):
    """Equal to every other number."""

    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False


def checksums_are_ignored(patch: Patch) -> None:
    original = frame.crc32c
    patch.setattr(frame, "crc32c", lambda data: _Whatever(original(data)))


def _three_due(machine: Machine) -> tuple[SimulatedServer, str, bytes]:
    """A server with three filed messages of several sectors, due in 100 ms; their file."""
    server = machine.start()
    subscribe(server, "quick")
    due_ms = machine.clock.now_ms + 100
    long = [Payload(b'"%d%s"' % (number, b"." * 10_000)) for number in range(3)]
    messages = [NewMessage("orders", due_ms, payload) for payload in long]
    publish_all(server.engine.publishing, messages, machine.clock.now_ms)
    server.rest()
    server.replayer.put(CheckpointRequest(lambda: None))
    server.rest()
    path = "schedule/" + machine.disk.list("schedule")[0]
    file = machine.disk.open(path)
    return server, path, file.pread(file.size(), 0)


def a_bad_sector_costs_what_stands_in_it() -> None:
    machine = Machine()
    server, path, data = _three_due(machine)
    place = data.index(b'"1.') + 5000
    machine.disk.fail_reads(path, place, place + 1)
    machine.clock.move(100)
    server.tick()
    server.rest()
    bodies = {one.payload.body[:2] for deliveries in server.sending for one in deliveries}
    while server.sending:
        server.answer(server.sending[0], WebhookResponse(200))
    is_kept = _is_kept(machine, server)
    machine.disk.mend_reads()
    if bodies != {b'"0', b'"2'}:
        raise Violation(f"a bad sector in the second of three messages, and {bodies} came (I8)")
    if not is_kept:
        raise Violation("nobody has had the second message, and it counts as delivered (I8)")


def _is_kept(machine: Machine, server: SimulatedServer) -> bool:
    """Whether the hour of the messages is still there for a repair, long after it."""
    for _ in range(5):
        machine.clock.move(HOUR_MS)
        server.tick()
        server.rest()
    return any(not state.retired_ms for state in server.replay.hours.values())


def the_neighbours_of_a_bad_sector_are_lost(patch: Patch) -> None:
    patch.setattr(Reader, "_read_each", lambda self, hour, locators, payloads: {})


def what_cannot_be_read_counts_as_settled(patch: Patch) -> None:
    original = BodyReader._on_fetched

    def on_fetched(self: Any, handout: Any, fetched: Any) -> None:
        original(self, handout, fetched)
        lost = handout.unread(self._reader.open(handout, fetched))
        self._engine.hours.add(handout.slices[0].hour, -len(lost))

    patch.setattr(BodyReader, "_on_fetched", on_fetched)


def an_hour_that_cannot_be_read_is_kept() -> None:
    machine = Machine()
    _, path, data = _three_due(machine)
    machine.disk.fail_reads(path, 0, len(data))
    machine.kill()
    server = machine.start()
    is_kept = _is_kept(machine, server)
    machine.disk.mend_reads()
    if not is_kept:
        raise Violation(f"nobody has seen what {path} holds, and it counts as delivered (I8)")


def an_hour_that_cannot_be_read_is_retired(patch: Patch) -> None:
    original = Loader.load

    def load(self: Any, *arguments: Any, **named: Any) -> LoadedHour:
        return replace(original(self, *arguments, **named), is_whole=True)

    patch.setattr(Loader, "load", load)


# ── archives ───────────────────────────────────────────────────────────────────────────────────


def an_hour_that_came_back_is_archived_again() -> None:
    """In the worlds it is rare: the clock is set back between an archive and the purge."""
    machine = Machine()
    settings = SETTINGS.model_copy(update={"archive": True})
    server = machine.start(settings)
    subscribe(server, "everything")
    hour = machine.clock.now_ms // HOUR_MS
    for is_archived in (True, False):
        machine.publish(server, machine.clock.now_ms + 1)
        _pass(machine, server, 1)
        _pass(machine, server, 2 * HOUR_MS)
        if is_archived:
            [retired] = kept_hours(machine.catalog, machine.disk)
            archived = Archived(*retired.extent, retired.count, "", "", machine.clock.now_ms)
            server.replayer.put(FilerCall(confirming(hour, archived), lambda error: None))
            server.rest()
            machine.clock.set(-2 * HOUR_MS)
    _pass(machine, server, settings.kept_ms)
    path = bucket_path(LogKind.SCHEDULE, hour)
    if not machine.disk.exists(path):
        raise Violation(f"{path} was deleted with a message that nobody has archived")


def _pass(machine: Machine, server: SimulatedServer, by_ms: int) -> None:
    """Time passes; what is due is delivered, and what is over is filed and purged."""
    machine.clock.move(by_ms)
    for _ in range(3):
        server.tick()
        server.rest()
        while server.sending:
            server.answer(server.sending[0], WebhookResponse(200))
            server.rest()
        server.replayer.put(CheckpointRequest(lambda: None))
        server.rest()


def an_hour_that_came_back_counts_as_archived(patch: Patch) -> None:
    patch.setattr(Archives, "lets_go", lambda self, hour: hour in self._archived)


# ── I10 ────────────────────────────────────────────────────────────────────────────────────────


def calls_of_a_start(backlog_hours: int) -> int:
    """File calls of a restart with a backlog of so many hours, all beyond the next one."""
    machine = Machine()
    server = machine.start()
    first_ms = machine.clock.now_ms + 5 * HOUR_MS
    for hour in range(backlog_hours):
        machine.publish(server, *(first_ms + hour * HOUR_MS + n for n in range(MESSAGES)))
    server.replayer.put(CheckpointRequest(lambda: None))
    server.rest()
    machine.kill()
    machine.start()
    return machine.faults.call_count


def a_start_does_not_read_the_backlog() -> None:
    few, many = calls_of_a_start(2), calls_of_a_start(60)
    # What remains per hour is the comparison of its length with the catalog.
    if many - few > 3 * (60 - 2):
        raise Violation(f"a start makes {few} file calls with 2 hours, {many} with 60 (I10)")


def the_whole_backlog_is_loaded(patch: Patch) -> None:
    original = Replay.snapshot
    patch.setattr(Replay, "snapshot", lambda self, hour: original(self, hour + 10_000))


# ── I12 ────────────────────────────────────────────────────────────────────────────────────────


def a_second_server_is_refused() -> None:
    machine = Machine()
    first = machine.start()
    try:
        machine.start()
    except DirectoryLockedError:
        return
    finally:
        first.close()  # until here it is alive, and nobody collects it with its lock
    raise Violation("two servers have one directory (I12)")


def the_lock_is_not_taken(patch: Patch) -> None:
    patch.setattr(SimulatedFiles, "lock", lambda self, path: contextlib.nullcontext())


# ── I18 ────────────────────────────────────────────────────────────────────────────────────────


def half_a_directory_is_refused() -> None:
    restores(range(200), kept(1))
    restores(range(100), kept(2))


def a_restore_is_not_marked(patch: Patch) -> None:
    patch.setattr(kinds, "require", lambda files, of, names=None: None)


def the_mark_of_a_restore_is_not_synced(patch: Patch) -> None:
    original = SimulatedFiles.sync_directory

    def begin(files: Files, origin: str) -> None:
        files.open(kinds.RESTORING_FILE, create=True).pwrite([b"{}"], 0)

    def sync_all_but_it(machine: SimulatedFiles, path: str) -> None:
        def is_it(change: Any) -> bool:
            return change.target is not None and change.target.name == kinds.RESTORING_FILE

        held = [change for change in machine._unsynced_names if is_it(change)]
        machine._unsynced_names = [one for one in machine._unsynced_names if not is_it(one)]
        original(machine, path)
        machine._unsynced_names = held + machine._unsynced_names

    patch.setattr(restoring, "begin_restore", begin)
    patch.setattr(SimulatedFiles, "sync_directory", sync_all_but_it)


def a_restore_counts_before_seqs_are_left_out(patch: Patch) -> None:
    original = restoring.go_ahead

    def early(files: Files, *rest: Any) -> int:
        kinds.end_restore(files)
        replace_file(files, kinds.RESTORING_FILE, b"{}")
        return original(files, *rest)

    patch.setattr(restoring, "go_ahead", early)


def a_restored_directory_goes_on_with_the_life_before(patch: Patch) -> None:
    patch.setattr(restoring, "write_mark", lambda files, mark, place="": None)


def half_a_backup_is_refused() -> None:
    backups(range(40))


def a_backup_is_not_marked_while_it_is_made(patch: Patch) -> None:
    patch.setattr(Shelf, "_mark", lambda self, place: None)
    patch.setattr(Shelf, "finish", _finish_without_mark)


def _finish_without_mark(shelf: Shelf, manifest: BackupManifest) -> None:
    path = f"{shelf.place(manifest.name)}/BACKUP"
    replace_file(shelf.files, path, encode_manifest(manifest))


# ── all of them ────────────────────────────────────────────────────────────────────────────────

CHECKS: list[tuple[Callable[[], None], Callable[[Patch], None]]] = [
    (a_silent_subscriber_delays_nobody, one_queue_for_all),
    (a_receiver_that_hangs_leaves_connections, a_subscription_may_have_all_connections),
    (
        a_message_that_ends_its_consumer_dies_alone,
        messages_that_failed_together_stay_together,
    ),
    (
        a_changed_subject_changes_nothing_that_has_fallen_due,
        a_subscription_goes_by_its_newest_subject,
    ),
    (what_is_not_understood_stands_still, a_definition_that_is_not_understood_ends_the_start),
    (a_flipped_bit_is_named, checksums_are_ignored),
    (a_bad_sector_costs_what_stands_in_it, the_neighbours_of_a_bad_sector_are_lost),
    (a_bad_sector_costs_what_stands_in_it, what_cannot_be_read_counts_as_settled),
    (an_hour_that_cannot_be_read_is_kept, an_hour_that_cannot_be_read_is_retired),
    (an_hour_that_came_back_is_archived_again, an_hour_that_came_back_counts_as_archived),
    (a_start_does_not_read_the_backlog, the_whole_backlog_is_loaded),
    (a_second_server_is_refused, the_lock_is_not_taken),
    (half_a_directory_is_refused, a_restore_is_not_marked),
    (half_a_directory_is_refused, the_mark_of_a_restore_is_not_synced),
    (half_a_directory_is_refused, a_restore_counts_before_seqs_are_left_out),
    (half_a_directory_is_refused, a_restored_directory_goes_on_with_the_life_before),
    (half_a_backup_is_refused, a_backup_is_not_marked_while_it_is_made),
]


_HALF_MADE = (half_a_directory_is_refused, half_a_backup_is_refused)


@pytest.mark.parametrize(
    "check", dict.fromkeys(check for check, _ in CHECKS if check not in _HALF_MADE)
)
def test_it_holds(check: Callable[[], None]) -> None:
    check()


@pytest.mark.unchecked("hundreds of machines, each of which is checked here")
@pytest.mark.parametrize("check", _HALF_MADE)
def test_it_holds_at_each_call(check: Callable[[], None]) -> None:
    check()


@pytest.mark.unchecked("a bug is planted")
@pytest.mark.parametrize(("check", "bug"), CHECKS)
def test_the_bug_is_noticed(
    check: Callable[[], None], bug: Callable[[Patch], None], monkeypatch: Patch
) -> None:
    bug(monkeypatch)
    with pytest.raises(Violation):
        check()


def test_a_lock_of_the_system_is_needed(tmp_path: Path, monkeypatch: Patch) -> None:
    """I12 on real files: a second owner is refused, and is not if the lock is left out."""
    files = OsFiles(str(tmp_path))
    with files.lock("LOCK"):
        with pytest.raises(DirectoryLockedError), OsFiles(str(tmp_path)).lock("LOCK"):
            pass
        monkeypatch.setattr(fcntl, "flock", lambda descriptor, how: None)
        with OsFiles(str(tmp_path)).lock("LOCK"):
            pass
