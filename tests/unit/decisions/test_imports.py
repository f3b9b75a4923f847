"""Imports: adopted as a whole or not at all; keys, cancels and crashes in the middle of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from delayserver.config import Settings
from delayserver.decisions.imports import Import, Stage
from delayserver.decisions.new_messages import NewMessage
from delayserver.delivery.webhook import WebhookResponse
from delayserver.errors import (
    ConflictError,
    DiskReserveError,
    InputError,
    NotFoundError,
    OverloadedError,
    StoppingError,
    TooLargeError,
)
from delayserver.records.message import Payload, State
from delayserver.records.subscriptions import Subscription
from delayserver.records.tables import read_checkpoint
from delayserver.recovery.check import check
from storage import staging
from storage.catalog import Table
from storage.check import Severity
from storage.errors import DiskFullError, StagingError
from storage.rows import HOUR_MS
from storage.staging import OnConflict, manifest_path
from tests.world import Ledger, SimulatedClock, SimulatedServer
from tests.world.durable import StagedRow
from tests.world.publishes import publish_all
from tests.world.server import stage
from tests.world.storage.catalog import MemoryCatalog
from tests.world.storage.faults import Fault, FaultKind, Faults, FaultyFiles, Moment
from tests.world.storage.files import SimulatedFiles

SUBJECT = "coupon"
HOOK = Subscription(id=1, name="hook", subject="*", type="webhook", created_ms=0)
Row = tuple[int, str | None, str]
"""Due in so many ms, key, body."""


class Machine:
    """A machine with a server on it, moved by hand, and a ledger of what was promised."""

    def __init__(self, **settings: Any) -> None:
        self.settings = Settings(**{"segment_bytes": 4096, "disk_reserve_bytes": 0, **settings})
        self.disk = SimulatedFiles(rng=random.Random(1))
        self.catalog = MemoryCatalog()
        self.clock = SimulatedClock()
        self.ledger = Ledger()
        self.faults = Faults()
        self.answers: dict[str, Import | Exception] = {}
        self.start()
        registry = self.server.engine.registry
        registry.next_id()
        self.server.engine.subscribing.put_subscription(HOOK)
        self.server.engine.imports.begin([SUBJECT])
        self.server.rest()

    def start(self) -> None:
        self.ledger.new_life()
        self.catalog.faults = self.faults
        files = FaultyFiles(self.disk, self.faults)
        self.server = SimulatedServer(
            self.settings, files, self.catalog, self.clock, random.Random(2), self.ledger
        )
        self.ledger.recovered(self.server)

    def restart(self, *, power_loss: bool = False) -> None:
        self.disk = self.disk.crash() if power_loss else self.disk.kill()
        self.catalog = self.catalog.crash()
        self.faults = Faults()
        self.start()

    def stage(self, import_id: str, *rows: Row, parts: int = 1, **rest: Any) -> str:
        """Stage rows in due order; returns the path of the manifest."""
        number = self.server.engine.sequencer.subjects[SUBJECT]
        made = [
            StagedRow(self.clock.now_ms + in_ms, number, Payload(body.encode(), key=key))
            for in_ms, key, body in rows
        ]
        self.ledger.staged[import_id] = made
        size = -(-len(made) // parts)
        pieces: Sequence[Sequence[StagedRow]] = [
            made[at : at + size] for at in range(0, len(made), size)
        ]
        return stage(self.disk, import_id, pieces, self.server.engine.messages.key_hash, **rest)

    def adopt(self, import_id: str) -> None:
        def done(found: Import | None, error: Exception | None) -> None:
            self.answers[import_id] = found or error or AssertionError("no answer")
            if found is not None:
                self.ledger.adopted(import_id, found.first_seq)

        self.server.engine.imports.adopt(manifest_path(import_id), done)

    def load(self, import_id: str, *rows: Row, **rest: Any) -> Import:
        """Stage and adopt; everything is filed on return."""
        self.stage(import_id, *rows, **rest)
        self.adopt(import_id)
        self.rest()
        return self.adopted(import_id)

    def adopted(self, import_id: str) -> Import:
        answer = self.answers[import_id]
        assert isinstance(answer, Import), answer
        return answer

    def rest(self) -> None:
        """Everybody works, a checkpoint included."""
        for _ in range(3):
            self.clock.move(self.settings.checkpoint_ms)
            self.server.tick()
            self.server.rest()

    def verify(self) -> None:
        """Let the importer thread do its work, and the loop decide; nothing is committed."""
        self.server.run(self.server.importing, 1)
        while self.server.turn():
            pass

    def commit(self) -> None:
        self.server.run(self.server.committer, 1)
        while self.server.turn():
            pass

    def file(self) -> None:
        self.server.run(self.server.replayer, 1000)
        while self.server.turn():
            pass

    def publish(self, key: str, body: str = "1", *, in_ms: int = 10 * HOUR_MS) -> tuple[int, bool]:
        """Seq, and whether it is a duplicate."""
        message = NewMessage(SUBJECT, self.clock.now_ms + in_ms, Payload(body.encode(), key=key))
        (published,) = publish_all(self.server.engine.publishing, [message], self.clock.now_ms)
        return self.server.engine.ids.decode(published.message_id).seq, published.duplicate

    def state(self, seq: int) -> State:
        due_ms = self.ledger.messages[seq].due_ms
        return self.server.engine.messages.locate(seq, due_ms).state

    def deliver_all(self) -> list[str]:
        """What comes to the webhook until nothing is left; the bodies, in order."""
        bodies: list[str] = []
        for _ in range(40):
            self.rest()
            while self.server.sending:
                (delivery,) = self.server.sending[0]
                bodies.append(delivery.payload.body.decode())
                self.ledger.returned(delivery, seen=True)
                self.server.answer([delivery], WebhookResponse(200))
                self.server.rest()
            self.clock.move(HOUR_MS // 2)
        return bodies


@pytest.fixture
def machine() -> Machine:
    return Machine()


LATER: tuple[Row, ...] = tuple((2 * HOUR_MS + n * HOUR_MS, f"k{n}", f"{n}") for n in range(4))


def test_an_import_becomes_messages(machine: Machine) -> None:
    found = machine.load("a", *LATER, (9 * HOUR_MS, None, "last"), parts=2)
    assert (found.stage, found.count, found.duplicates) == (Stage.FILING, 5, 0)
    engine = machine.server.engine
    assert engine.imports.find("a").stage is Stage.ADOPTED
    assert read_checkpoint(machine.catalog) == found.first_seq + 4
    for number in range(4):
        entry = engine.messages.by_key(SUBJECT, f"k{number}")
        assert entry.seq == found.first_seq + number
        assert machine.state(entry.seq) is State.SCHEDULED
    assert machine.disk.list(staging.DIRECTORY) == []
    assert machine.deliver_all() == ["0", "1", "2", "3", "last"]


def test_rows_that_are_due_already_or_soon(machine: Machine) -> None:
    machine.clock.move(5 * HOUR_MS)
    machine.rest()
    rows: list[Row] = [(in_ms, None, f"{in_ms}") for in_ms in (-4 * HOUR_MS, -HOUR_MS, -1, 0, 700)]
    machine.load("a", *rows)
    assert machine.deliver_all() == [body for _, _, body in rows]
    machine.restart()
    assert machine.deliver_all() == []


def test_publishing_goes_on_in_the_middle(machine: Machine) -> None:
    machine.stage("a", *LATER)
    machine.adopt("a")
    machine.verify()
    machine.commit()
    assert machine.server.engine.groups.is_importing
    # What is due in this hour goes to the wheel at once, however long the filing takes.
    machine.publish("x", in_ms=200)
    machine.server._flush()
    machine.commit()
    seq = machine.ledger.durable_seq
    assert machine.server.engine.wheel.contains(seq, machine.ledger.messages[seq].due_ms)
    machine.clock.move(200)
    machine.server.tick()
    machine.server.rest()
    assert len(machine.server.sending) == 1


def test_keys_are_seen_from_the_decision_on(machine: Machine) -> None:
    machine.stage("a", *LATER)
    machine.adopt("a")
    machine.verify()
    first_seq = machine.server.engine.messages.by_key(SUBJECT, "k0").seq
    assert machine.publish("k1") == (first_seq + 1, True)
    machine.commit()
    assert machine.publish("k2", "2") == (first_seq + 2, True)
    with pytest.raises(ConflictError):
        machine.publish("k2", "another")
    machine.rest()
    assert machine.publish("k3", "3") == (first_seq + 3, True)
    assert machine.server.engine.sequencer._imported is None


def test_between_commit_and_filing_a_message_can_be_cancelled_but_not_read(
    machine: Machine,
) -> None:
    machine.stage("a", *LATER)
    machine.adopt("a")
    machine.verify()
    machine.commit()
    server = machine.server
    entry = server.engine.messages.by_key(SUBJECT, "k1")
    located = server.engine.messages.locate(entry.seq, entry.due_ms)
    assert located.state is State.SCHEDULED
    with pytest.raises(OverloadedError, match="imported a moment ago"):
        server.unfiled(located.entry)
    group = server.engine.messages.cancel(entry.seq, entry.due_ms)
    assert group is not None
    group.when_durable(lambda error: machine.ledger.cancelled(entry.seq))
    assert machine.deliver_all() == ["0", "2", "3"]
    assert machine.state(entry.seq) is State.CANCELLED


def test_keys_that_are_taken_are_left_out(machine: Machine) -> None:
    seq, _ = machine.publish("k1", "1")
    machine.rest()
    found = machine.load("a", *LATER, (9 * HOUR_MS, "k1", "1"), (9 * HOUR_MS, "k2", "2"))
    assert (found.count, found.duplicates, found.conflicts) == (6, 3, 0)
    left_out = machine.server.engine.imports.state("a").record.left_out()
    assert left_out["row"].tolist() == [1, 4, 5]
    assert left_out["seq"].tolist() == [seq, seq, found.first_seq + 2]
    assert sorted(machine.deliver_all()) == ["0", "1", "2", "3"]


def test_a_cancelled_key_is_taken(machine: Machine) -> None:
    seq, _ = machine.publish("k1", "1")
    machine.rest()
    machine.server.engine.messages.cancel(seq, machine.ledger.messages[seq].due_ms)
    assert machine.load("a", *LATER).duplicates == 1
    assert sorted(machine.deliver_all()) == ["0", "2", "3"]


def test_conflicts_refuse_everything_or_are_left_out(machine: Machine) -> None:
    machine.publish("k1", "another")
    machine.rest()
    machine.stage("a", *LATER)
    machine.adopt("a")
    machine.rest()
    assert isinstance(machine.answers["a"], ConflictError)
    with pytest.raises(NotFoundError):
        machine.server.engine.imports.find("a")
    found = machine.load("b", *LATER, on_conflict=OnConflict.KEEP)
    assert (found.duplicates, found.conflicts) == (1, 1)
    assert sorted(machine.deliver_all()) == ["0", "2", "3", "another"]


def test_what_changes_between_look_up_and_decision_counts(machine: Machine) -> None:
    kept, _ = machine.publish("k0", "0")
    cancelled, _ = machine.publish("k1", "1")
    machine.rest()
    machine.stage("a", *LATER)
    machine.adopt("a")
    # The importer has looked, and its answer is on its way: as with millions of keys.
    (request,) = machine.server.importing._inbox
    machine.server.importing._inbox.clear()
    verified = machine.server.importing._importer.verify(request)
    machine.server.engine.messages.cancel(cancelled, machine.ledger.messages[cancelled].due_ms)
    fresh, _ = machine.publish("k2", "2")
    machine.rest()
    assert read_checkpoint(machine.catalog) == machine.ledger.durable_seq
    machine.server.engine.imports.on_verified(verified, None)
    machine.rest()
    found = machine.adopted("a")
    left_out = machine.server.engine.imports.state("a").record.left_out()
    assert left_out["seq"].tolist() == [kept, cancelled, fresh]
    assert found.duplicates == 3
    # And then the overlays forget again.
    assert not machine.server.engine.imports.is_deciding
    assert len(machine.server.engine.sequencer.fresh_keys) == 0


def test_a_message_that_becomes_durable_just_before_the_decision_holds_its_key() -> None:
    machine = Machine(dedupe_window_ms=0)
    machine.publish("k1", "1", in_ms=200)
    machine.server._flush()
    # It is due before it is durable, so that only its waiting keeps the key taken.
    machine.clock.move(400)
    machine.server.tick()
    machine.stage("a", *LATER)
    machine.adopt("a")
    machine.verify()
    machine.rest()
    assert machine.adopted("a").duplicates == 1
    assert sorted(machine.deliver_all()) == ["0", "1", "2", "3"]


def test_an_import_that_waited_for_a_group_that_could_not_be_written_goes_on(
    machine: Machine,
) -> None:
    machine.stage("a", *LATER)
    machine.adopt("a")
    machine.publish("k1", "1")
    machine.server._flush()
    machine.verify()
    machine.faults.faults.append(
        Fault(machine.faults.call_count + 1, FaultKind.NO_SPACE, Moment.BEFORE, for_good=True)
    )
    machine.commit()
    machine.faults.faults.clear()
    # Nobody asks for anything else.
    machine.rest()
    assert machine.adopted("a").duplicates == 0
    assert sorted(machine.deliver_all()) == ["0", "1", "2", "3"]


def test_a_decision_that_is_rolled_back_is_taken_again(machine: Machine) -> None:
    machine.stage("a", *LATER)
    machine.adopt("a")
    machine.publish("k1", "1")
    machine.server._flush()
    # Rolled back while the import waits for the group: k1 is free.
    machine.faults.faults.append(
        Fault(machine.faults.call_count + 1, FaultKind.NO_SPACE, Moment.BEFORE, for_good=True)
    )
    machine.server.run(machine.server.committer, 1)
    machine.faults.faults.clear()
    machine.verify()
    machine.rest()
    assert machine.adopted("a").duplicates == 0
    assert sorted(machine.deliver_all()) == ["0", "1", "2", "3"]


def test_a_full_disk_refuses_it_and_it_can_be_tried_again(machine: Machine) -> None:
    machine.stage("a", *LATER)
    machine.adopt("a")
    machine.verify()
    machine.faults.faults.append(
        Fault(machine.faults.call_count + 1, FaultKind.NO_SPACE, Moment.BEFORE, for_good=True)
    )
    machine.commit()
    machine.faults.faults.clear()
    assert isinstance(machine.answers["a"], DiskFullError)
    assert not machine.server.engine.groups.is_importing
    with pytest.raises(NotFoundError):
        machine.server.engine.messages.by_key(SUBJECT, "k1")
    machine.adopt("a")
    machine.rest()
    assert machine.adopted("a").count == 4
    assert machine.deliver_all() == ["0", "1", "2", "3"]


def test_a_disk_that_fills_up_while_it_is_filed_only_delays_it(machine: Machine) -> None:
    machine.stage("a", *LATER)
    machine.adopt("a")
    machine.verify()
    machine.commit()
    machine.publish("later")
    machine.server._flush()
    machine.commit()
    for after in range(1, 12, 2):
        machine.faults.faults.append(
            Fault(machine.faults.call_count + after, FaultKind.NO_SPACE, Moment.MIDDLE)
        )
        machine.file()
        machine.faults.faults.clear()
    assert sorted(machine.deliver_all()) == ["0", "1", "1", "2", "3"]


def test_a_crash_after_any_slice(machine: Machine) -> None:
    for slices in range(5):
        name = f"a{slices}"
        rows = [(in_ms, f"{name}{key}", body) for in_ms, key, body in LATER]
        machine.stage(name, *rows)
        machine.adopt(name)
        machine.verify()
        machine.commit()
        machine.server.run(machine.server.replayer, 1000)
        for _ in range(slices):
            machine.server.run(machine.server.replayer, 1000)
            machine.server.replayer._checkpoint()
        machine.restart(power_loss=True)
        assert machine.server.engine.imports.find(name).stage is Stage.ADOPTED
        assert machine.disk.list(staging.DIRECTORY) == []
        machine.adopt(name)
        assert machine.adopted(name).count == 4
    assert sorted(machine.deliver_all()) == sorted(["0", "1", "2", "3"] * 5)


def test_the_same_import_is_adopted_once(machine: Machine) -> None:
    machine.stage("a", *LATER)
    answers: list[Import | None] = []
    for _ in range(2):
        machine.server.engine.imports.adopt(
            manifest_path("a"), lambda found, error: answers.append(found)
        )
    assert answers == []
    machine.verify()
    machine.commit()
    assert len(answers) == 2
    machine.adopt("a")
    first = machine.adopted("a").first_seq
    machine.rest()
    machine.adopt("a")
    assert machine.adopted("a").first_seq == first
    assert machine.adopted("a").stage is Stage.ADOPTED
    assert machine.ledger.imports == {"a": first}


def test_imports_wait_for_each_other(machine: Machine) -> None:
    for name in "abc":
        machine.stage(name, *LATER)
        machine.adopt(name)
    imports = machine.server.engine.imports
    assert [imports.find(name).stage for name in "abc"] == [
        Stage.VERIFYING,
        Stage.WAITING,
        Stage.WAITING,
    ]
    for _ in range(3):
        machine.rest()
    assert [machine.adopted(name).duplicates for name in "abc"] == [0, 4, 4]
    assert machine.deliver_all() == ["0", "1", "2", "3"]


def test_too_many_wait() -> None:
    machine = Machine(imports_waiting_max=1)
    machine.adopt("a")
    machine.adopt("b")
    with pytest.raises(OverloadedError):
        machine.adopt("c")


def test_what_was_staged_is_not_there_or_not_sound(machine: Machine) -> None:
    machine.adopt("none")
    machine.rest()
    assert isinstance(machine.answers["none"], NotFoundError)
    machine.stage("a", *LATER)
    machine.disk.unlink("imports/a.0.part")
    machine.adopt("a")
    machine.rest()
    assert isinstance(machine.answers["a"], StagingError)
    assert machine.ledger.imports == {}
    with pytest.raises(InputError):
        machine.server.engine.imports.adopt("/etc/passwd", lambda found, error: None)


def test_subjects_that_nobody_registered(machine: Machine) -> None:
    made = [(machine.clock.now_ms, 77, Payload(b"1"))]
    stage(machine.disk, "a", [made], machine.server.engine.messages.key_hash)
    machine.adopt("a")
    machine.rest()
    assert "77" in str(machine.answers["a"])


def test_limits() -> None:
    machine = Machine(import_max_messages=3, delay_max_ms=4 * HOUR_MS)
    machine.stage("a", *LATER)
    machine.adopt("a")
    machine.rest()
    assert isinstance(machine.answers["a"], TooLargeError)
    machine.stage("b", LATER[-1])
    machine.adopt("b")
    machine.rest()
    assert "delay_max_ms" in str(machine.answers["b"])


def test_the_reserve_of_the_disk() -> None:
    machine = Machine(disk_reserve_bytes=1 << 62)
    machine.stage("a", *LATER)
    machine.adopt("a")
    machine.rest()
    assert isinstance(machine.answers["a"], DiskReserveError)
    machine.server.engine.publishing.disk_is_low = True
    with pytest.raises(DiskReserveError):
        machine.adopt("b")


def test_a_server_that_stops_adopts_nothing_more(machine: Machine) -> None:
    machine.stage("a", *LATER)
    machine.adopt("a")
    machine.server.engine.groups.stopping = True
    machine.verify()
    assert isinstance(machine.answers["a"], StoppingError)
    with pytest.raises(StoppingError):
        machine.adopt("a")


def test_a_stop_in_the_middle_files_everything(machine: Machine) -> None:
    machine.stage("a", *LATER)
    machine.adopt("a")
    machine.verify()
    machine.commit()
    machine.server.stop()
    assert machine.disk.list(staging.DIRECTORY) == []
    assert machine.catalog.crash().get(Table.IMPORTS, b"a") is not None
    machine.restart()
    assert machine.deliver_all() == ["0", "1", "2", "3"]


def test_what_is_damaged_after_the_commit_is_named_and_the_rest_is_delivered(
    machine: Machine,
) -> None:
    machine.stage("a", *LATER)
    machine.adopt("a")
    machine.verify()
    machine.commit()
    file = machine.disk.open("imports/a.0.part")
    size = file.size() // 4
    file.pwrite([b"\xff" * 8], size + 70)
    machine.rest()
    assert machine.ledger.damage
    first_seq = machine.adopted("a").first_seq
    assert any(damage.first_seq == first_seq + 1 for damage in machine.ledger.damage)
    assert machine.deliver_all() == ["0", "2", "3"]


def test_check_knows_what_was_staged(machine: Machine) -> None:
    machine.stage("left", *LATER)
    (note,) = check(machine.disk, machine.catalog).findings
    assert (note.severity, note.file) == (Severity.NOTE, "imports/left")
    assert "--id left" in note.reason
    staging.delete(machine.disk, "left")
    machine.stage("a", *LATER)
    machine.adopt("a")
    machine.verify()
    machine.commit()
    assert check(machine.disk, machine.catalog).findings == []
    last_seq = machine.ledger.durable_seq
    file = machine.disk.open("imports/a.0.part")
    byte = file.pread(1, 70)
    file.pwrite([b"x"], 70)
    (damage,) = check(machine.disk, machine.catalog).damage
    assert (damage.file, damage.first_seq, damage.last_seq) == (
        "imports/a.0.part",
        last_seq - 3,
        last_seq,
    )
    file.pwrite([byte], 70)
    machine.rest()
    assert check(machine.disk, machine.catalog).findings == []
