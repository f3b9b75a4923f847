"""Every file call and every commit of a standard scenario fails once, in every way there is.

After SQLite's `do_ioerr_test`: a run without a fault counts the calls, and then the scenario runs
with a fault at call N = 1, 2, … up to the last. After each fault the disk goes through a power loss
or a kill, and the promises are checked against what is left. A full disk has room again after a
while, and it goes on.

Each of the ways takes every third call, each another third, so that all calls are there; with
EVERY_CALL=1 in the environment each way takes all of them. Runs that cannot show anything new are
left out, which is more than half of all:

    no space, no descriptor    calls that need none go through: their run would be one without fault
    a crash                    a call that only reads leaves what the call behind it begins with

Rejected: to fork the process at each call, instead of running up to it anew. A run takes 30 ms,
half of them up to the call. A fork of a process with 83 MB takes 4 ms, and the pages that its child
touches take 6 to 10 ms more (2026-11-27).
"""

import contextlib
import copy
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import pytest

from delayserver.config import Settings
from delayserver.decisions.new_messages import NewMessage
from delayserver.decisions.publishing import Accepted
from delayserver.delivery.delayed_fetch import Pulled, PullRequest
from delayserver.delivery.webhook import WebhookResponse
from delayserver.parts.heartbeats.heartbeats import Heartbeats
from delayserver.parts.imports.archives import confirming, kept_hours
from delayserver.parts.imports.imports import Import, Imports
from delayserver.parts.imports.records import Archived
from delayserver.records.message import Payload, Watch
from delayserver.records.subscriptions import Subscription
from delayserver.records.tables import OnEvent
from delayserver.server.filer import FilerCall
from storage.buckets import DAY_MS
from storage.catalog import Table
from storage.errors import ShortageError, StorageError
from storage.rows import HOUR_MS
from tests.depth import every
from tests.stores import keys_of
from tests.world import Ledger, SimulatedClock, SimulatedServer
from tests.world.durable import StagedRow
from tests.world.operators import FAITHFUL, filed_rows
from tests.world.publishes import publish_all
from tests.world.server import stage
from tests.world.storage.catalog import MemoryCatalog
from tests.world.storage.faults import (
    Fault,
    FaultKind,
    Faults,
    FaultyFiles,
    Moment,
    NumberedCall,
    SimulatedCrash,
)
from tests.world.storage.files import SimulatedFiles

SETTINGS = Settings(
    segment_bytes=4096,
    checkpoint_ms=50,
    lead_ms=100,
    retention_ms=0,
    archive=True,
    settle_sync_ms=0,
    group_max_bytes=1 << 20,
)
STRIDE = 1 if os.environ.get("EVERY_CALL") else 3
SAMPLE_STRIDE = 7
SEEDS = 5
"""So many scenarios, which differ in what is luck."""
POWER_LOSS, KILL = "power loss", "kill"
FAR_MS = 3 * DAY_MS
"""What is due then is filed by day."""


@dataclass
class Machine:
    """A disk with the server's life on it."""

    disk: SimulatedFiles
    catalog: MemoryCatalog
    clock: SimulatedClock
    ledger: Ledger
    rng: random.Random
    disk_luck: random.Random

    @classmethod
    def new(cls, seed: int) -> "Machine":
        rng, clock = random.Random(seed), SimulatedClock()
        disk, disk_luck = SimulatedFiles(rng=rng), random.Random(seed)
        return cls(disk, MemoryCatalog(), clock, Ledger(), rng, disk_luck)

    def start(self, faults: Faults) -> SimulatedServer:
        self.ledger.new_life()
        self.catalog.faults = faults
        files = FaultyFiles(self.disk, faults)
        server = SimulatedServer(
            SETTINGS,
            files,
            self.catalog,
            self.clock,
            self.rng,
            self.ledger,
            # Groups are committed in either way.
            quick=lambda: self.disk_luck.random() < 0.5,
        )
        self.ledger.present = self.clock.stopwatch_ms
        self.ledger.clock = self.clock
        self.ledger.recovered(server)
        return server

    def end(self, how: str) -> None:
        self.disk = self.disk.crash() if how == POWER_LOSS else self.disk.kill()
        self.catalog = self.catalog.crash()


class Scenario:
    """What a day brings: publish, cancel, move, deliver, fail, retire, delete, restart.

    `must_last`: nothing may end the server but its start and its stop."""

    def __init__(self, machine: Machine, faults: Faults, *, must_last: bool = False) -> None:
        self.machine = machine
        self.faults = faults
        self.must_last = must_last
        self.is_halfway = False
        """Whether the first of its two lives is over."""
        self.began_ms = machine.clock.now_ms
        self.clock = machine.clock
        self.ledger = machine.ledger
        self.leases: list[str] = []
        self.answered: set[str] = set()

    def run(self) -> None:
        if not self.is_halfway:
            self.first_life()
        self.second_life()

    def first_life(self) -> None:
        self.server = self.machine.start(self.faults)
        for subscription in FAITHFUL:
            self.put(subscription)
        now_ms = self.began_ms
        self.publish("orders.paid", now_ms + 10, now_ms + 20, now_ms + 400)
        doomed = self.publish("orders.late", now_ms + 500)
        moved = self.publish("orders.late", now_ms + 600, key="k")
        self.publish("orders.late", now_ms + HOUR_MS + 350, now_ms + HOUR_MS)
        self.cancel(doomed)
        self.move(moved, now_ms + 2 * HOUR_MS)
        watched = self.publish("orders.late", now_ms + HOUR_MS + 360, watch=OnEvent.CANCEL)
        watched += self.publish("orders.late", now_ms + 2 * HOUR_MS, watch=OnEvent.FIRE)
        far = self.publish("orders.late", now_ms + FAR_MS, now_ms + FAR_MS + HOUR_MS)
        self.cancel(far[:1])
        self.heartbeat(timeout_ms=300)
        self.event(watched)
        self.adopt("import", now_ms + 15, now_ms + 450, now_ms + HOUR_MS + 10)
        self.pass_time(60)
        self.deliver(fail=True)
        self.pass_time(300)
        self.publish("orders.paid", self.clock.now_ms, body="x" * 3000)
        self.pass_time(300)
        self.deliver()
        self.pass_time(HOUR_MS)
        self.deliver()
        self.server.stop()
        self.is_halfway = True

    def second_life(self) -> None:
        self.server = self.machine.start(self.faults)
        self.pass_time(HOUR_MS)
        self.deliver()
        self.pass_time(2 * HOUR_MS)
        self.archive()
        self.publish("orders.late", self.began_ms + FAR_MS + 5)
        # The day of what is far comes near, and is split.
        self.pass_time(FAR_MS // 2)
        self.pass_time(60)
        self.pass_time(FAR_MS // 2)
        self.deliver()
        for _ in range(2):
            self.pass_time(2 * HOUR_MS)
            self.archive()
            self.pass_time(60)
        self.pass_time(60)
        self.server.stop()

    def work(self) -> None:
        """Everybody works; a full disk has room again after a while."""
        try:
            self.server.rest()
            if self.faults.struck:
                self.server.rest()
                self.faults.faults.clear()
                self.server.rest()
        except ShortageError as error:
            if self.must_last:
                raise AssertionError("a server that runs waits, and tries again") from error
            raise

    def put(self, subscription: Subscription) -> None:
        if self.server.engine.registry.by_id(subscription.id) is None:
            self.server.engine.registry.next_id()
            self.server.engine.subscribing.put_subscription(subscription)
        self.work()
        if self.server.engine.registry.by_id(subscription.id) is None:
            self.put(subscription)  # It was refused while the disk was full.

    def publish(
        self,
        subject: str,
        *due_times: int,
        key: str | None = None,
        body: str = "",
        watch: OnEvent | None = None,
    ) -> list[Accepted]:
        watches = None if watch is None else Watch(("w",), watch)
        messages = [
            NewMessage(
                subject, due_ms, Payload(f'"{due_ms}{body}"'.encode(), key=key, watch=watches)
            )
            for due_ms in due_times
        ]
        published = publish_all(self.server.engine.publishing, messages, self.clock.now_ms)
        for one in published:
            seq = self.server.engine.ids.decode(one.message_id).seq

            def answered(
                error: Exception | None, seq: int = seq, message_id: str = one.message_id
            ) -> None:
                if error is None:
                    self.ledger.published(seq)
                    self.answered.add(message_id)

            assert one.group is not None
            one.group.when_durable(answered)
        self.work()
        return published

    def known(self, published: list[Accepted]) -> Iterator[tuple[int, int]]:
        for one in published:
            found = self.server.engine.ids.decode(one.message_id)
            if one.message_id in self.answered:
                yield found.seq, found.due_ms

    def adopt(self, import_id: str, *due_times: int) -> None:
        """A bulk load. What is refused since the disk was full is adopted at the next try."""
        server = self.server
        number = server.engine.sequencer.subjects["orders.late"]
        rows = [StagedRow(due_ms, number, Payload(b"1", key=f"{due_ms}")) for due_ms in due_times]
        self.ledger.staged[import_id] = rows
        path = stage(self.machine.disk, import_id, [rows], server.engine.messages.key_hash)

        def answered(found: Import | None, error: Exception | None) -> None:
            if found is not None:
                self.ledger.adopted(import_id, found.first_seq)

        for _ in range(2):
            server.engine.part(Imports).adopt(path, answered)
            self.work()

    def cancel(self, published: list[Accepted]) -> None:
        for seq, due_ms in self.known(published):
            group = self.server.engine.messages.cancel(seq, due_ms)

            def answered(error: Exception | None, seq: int = seq) -> None:
                if error is None:
                    self.ledger.cancelled(seq)

            assert group is not None
            group.when_durable(answered)
            self.work()

    def move(self, published: list[Accepted], new_due_ms: int) -> None:
        for seq, due_ms in self.known(published):
            message = self.ledger.messages[seq]
            self.server.engine.messages.move(
                seq, due_ms, new_due_ms, message.payload, message.subject_id
            )
            self.work()

    def heartbeat(self, timeout_ms: int) -> None:
        payload, now_ms = Payload(b'"alive"'), self.clock.now_ms
        for _ in range(2):
            self.server.engine.part(Heartbeats).put("h", timeout_ms, "orders.late", payload, now_ms)
            self.work()

    def event(self, published: list[Accepted]) -> None:
        events, engine = self.server.engine.events, self.server.engine
        watchers, _ = events.watchers("w", engine.sequencer.next_seq)
        messages = {seq: self.ledger.messages[seq] for seq, _ in self.known(published)}
        bodies = {seq: (one.payload, one.subject_id) for seq, one in messages.items()}
        done = events.complete("w", watchers, bodies, self.clock.now_ms)

        def answered(error: Exception | None) -> None:
            if error is None:
                self.ledger.event_completed(done.cancelled, done.fired)

        if done.group is not None:
            done.group.when_durable(answered)
        self.work()

    def pass_time(self, by_ms: int) -> None:
        self.clock.move(by_ms)
        self.server.tick()
        self.work()
        self.server.tick()
        self.work()

    def archive(self) -> None:
        """Somebody has a copy of every hour that is settled; what is refused is tried again."""
        disk, ledger = self.machine.disk, self.ledger
        for one in list(kept_hours(self.server.catalog, disk)):
            if one.archived is None:
                archived = Archived(*one.extent, one.count, "", "", self.clock.now_ms)
                rows = filed_rows(disk, one.hour, archived.schedule_bytes)
                assert rows is not None
                ledger.archiving(one.hour, archived, rows)

                def answered(
                    error: Exception | None, hour: int = one.hour, archived: Archived = archived
                ) -> None:
                    assert error is None, error
                    ledger.archived(hour, archived)

                self.server.replayer.put(FilerCall(confirming(one.hour, archived), answered))
                self.work()

    def deliver(self, *, fail: bool = False) -> None:
        server = self.server
        while server.sending:
            [delivery] = server.sending[0]
            self.ledger.returned(delivery, seen=not fail)
            server.answer([delivery], WebhookResponse(500 if fail else 200))
            self.work()
            fail = False
        queue = server.engine.subscribing.subscription("queue")

        def take(got: Pulled) -> None:
            for delivery, token in got:
                self.ledger.returned(delivery, seen=True)
                self.leases.append(token)

        server.calls.consumers.pull(queue, PullRequest(100, 60_000, 0, take))
        server.tick()
        self.work()
        tokens, self.leases = self.leases, []
        server.ack(tokens, lambda expired: None)
        self.work()


def drain(machine: Machine) -> None:
    """A life without faults: everything that is left arrives."""
    scenario = Scenario(machine, Faults())
    scenario.server = machine.start(scenario.faults)
    for subscription in FAITHFUL:
        scenario.put(subscription)
    for by_ms in (0, 1000, HOUR_MS, HOUR_MS, HOUR_MS, HOUR_MS, FAR_MS // 2, 60, FAR_MS):
        scenario.pass_time(by_ms)
        scenario.deliver()
    machine.ledger.check_all_delivered()
    assert not scenario.server.engine.hours.unsettled()


def strike(fault: Fault, seed: int, *, hows: Sequence[str]) -> None:
    """The scenario with one fault, then each of these ends of what is left of the machine."""
    scenario = scenario_with(fault, seed)
    with contextlib.suppress(SimulatedCrash, StorageError):
        scenario.run()
    assert scenario.faults.struck[0] == trace(seed)[fault.at - 1]
    machine = scenario.machine
    for how in hows[1:]:
        end(copy.deepcopy(machine), how)
    end(machine, hows[0])


@cache
def halfway(seed: int) -> Scenario:
    """A scenario between its two lives, in which nothing has failed."""
    scenario = Scenario(Machine.new(seed), Faults())
    scenario.first_life()
    del scenario.server
    return scenario


def scenario_with(fault: Fault, seed: int, *, must_last: bool = False) -> Scenario:
    """The scenario in which this fails. If it fails in the second life, the first is not lived
    anew: the scenario goes on from a copy of what the first has left."""
    first = halfway(seed)
    if fault.at <= first.faults.call_count:
        return Scenario(Machine.new(seed), Faults(fault), must_last=must_last)
    scenario = copy.deepcopy(first)
    scenario.must_last = must_last
    scenario.faults.faults.append(fault)
    return scenario


def end(machine: Machine, how: str) -> None:
    machine.end(how)
    drain(machine)


@cache
def trace(seed: int) -> list[NumberedCall]:
    """The calls of a scenario in which nothing fails."""
    machine, faults = Machine.new(seed), Faults(keep_trace=True)
    Scenario(machine, faults).run()
    end(machine, KILL)
    return faults.trace


Strike = Callable[[int, int], object]
"""Called with the number of a call and the seed of the scenario that it belongs to."""


def strike_each(first: int, is_struck: Callable[[NumberedCall], bool], run: Strike) -> int:
    """Strike every `STRIDE`-th call from `first` on, but for those that `is_struck` leaves out.
    Returns how many there are; a sample strikes every seventh of them.

    Call 7 of one seed is not call 7 of another, since luck decides whether a group is committed at
    once or by the committer. Each number is therefore looked up in the scenario of its own seed.
    """
    numbers = range(first, max(len(trace(seed)) for seed in range(SEEDS)) + 1, STRIDE)
    calls = [(at, at % SEEDS) for at in numbers if at <= len(trace(at % SEEDS))]
    struck = [(at, seed) for at, seed in calls if is_struck(trace(seed)[at - 1])]
    for at, seed in every(SAMPLE_STRIDE, struck):
        try:
            run(at, seed)
        except Exception as error:
            error.add_note(f"after a fault at call {at}, seed {seed}: {trace(seed)[at - 1]}")
            raise
    return len(struck)


def test_the_scenario_is_a_full_one() -> None:
    machine = Machine.new(0)
    Scenario(machine, Faults()).run()
    counts = machine.ledger.counts
    assert counts["published"] == 13
    assert counts["imported"] == 3
    assert counts["cancelled by an event"] == counts["fired by an event"] == 1
    assert counts["heartbeats fired"] == 1
    assert counts["move"] == counts["retry"] == 1
    assert counts["cancelled"] == 2
    assert counts["archived"] == 5
    assert machine.disk.list("schedule") == machine.disk.list("dispatch") == []
    assert counts["sent"] > 8


@pytest.mark.parametrize(("first", "moment"), list(enumerate(Moment, 1)))
def test_a_crash_at_every_call(first: int, moment: Moment) -> None:
    """A run up to the crash serves two ends: a power loss, and a kill."""

    def crash(at: int, seed: int) -> None:
        strike(Fault(at, FaultKind.CRASH, moment), seed, hows=(POWER_LOSS, KILL))

    assert strike_each(first, lambda call: call.changes, crash) > 200 / STRIDE


@pytest.mark.parametrize("kind", (FaultKind.IO_ERROR, FaultKind.NO_SPACE))
@pytest.mark.parametrize(
    ("first", "moment", "for_good"),
    [
        *((first, moment, False) for first, moment in enumerate(Moment, 1)),
        (2, Moment.BEFORE, True),
    ],
)
def test_a_failure_at_every_call(
    kind: FaultKind, first: int, moment: Moment, for_good: bool
) -> None:
    def fail(at: int, seed: int) -> None:
        fault = Fault(at, kind, moment, for_good=for_good)
        strike(fault, seed, hows=[KILL if at % 2 else POWER_LOSS])

    struck = strike_each(first, lambda call: call.can_fail_by(kind), fail)
    assert struck > (600 if kind is FaultKind.IO_ERROR else 120) / STRIDE


@pytest.mark.parametrize(("first", "moment"), list(enumerate(Moment, 1)))
def test_no_descriptor_at_any_call_ends_a_server_that_runs(first: int, moment: Moment) -> None:
    lived = died = 0

    def want(at: int, seed: int) -> None:
        nonlocal lived, died
        scenario = scenario_with(Fault(at, FaultKind.NO_DESCRIPTOR, moment), seed, must_last=True)
        machine, faults = scenario.machine, scenario.faults
        try:
            scenario.run()
            machine.ledger.check_all_delivered()
            # What was deleted is known nowhere, though its deletion may have been interrupted.
            assert keys_of(machine.disk, machine.catalog) == {}, faults.struck
            for table in (Table.HOURS, Table.CHANGES, Table.WATCHES, Table.ARCHIVES):
                assert list(machine.catalog.scan(table)) == [], (table, faults.struck)
            lived += 1
        except ShortageError:
            died += 1  # at a start, or at a stop that was to be the end of it
        assert faults.struck[0] == trace(seed)[at - 1]
        end(machine, KILL if at % 2 else POWER_LOSS)

    strike_each(first, lambda call: call.can_fail_by(FaultKind.NO_DESCRIPTOR), want)
    assert lived > (lived + died) / 4
