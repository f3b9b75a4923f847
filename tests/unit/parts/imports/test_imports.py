"""Imports: adopted as a whole or not at all; keys, cancels and crashes in the middle of it."""

from __future__ import annotations

import pytest

from delayserver.errors import (
    ConflictError,
    DiskReserveError,
    InputError,
    NotFoundError,
    OverloadedError,
    StoppingError,
    TooLargeError,
)
from delayserver.parts.imports.imports import Import, Imports, Stage
from delayserver.parts.imports.worker import ImporterThread
from delayserver.records.message import Payload, State
from delayserver.records.tables import read_checkpoint
from storage import staging
from storage.catalog import Table
from storage.errors import DiskFullError, StagingError
from storage.rows import HOUR_MS
from storage.staging import OnConflict, manifest_path
from tests.unit.parts.imports.machine import LATER, SUBJECT, Machine, Row
from tests.world.server import stage
from tests.world.storage.faults import Fault, FaultKind, Moment


def test_an_import_becomes_messages(machine: Machine) -> None:
    found = machine.load("a", *LATER, (9 * HOUR_MS, None, "last"), parts=2)
    assert (found.stage, found.count, found.duplicates) == (Stage.FILING, 5, 0)
    engine = machine.server.engine
    assert engine.part(Imports).find("a").stage is Stage.ADOPTED
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
    left_out = machine.server.engine.part(Imports).state("a").record.left_out()
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
        machine.server.engine.part(Imports).find("a")
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
    (request,) = machine.server.worker(ImporterThread)._inbox
    machine.server.worker(ImporterThread)._inbox.clear()
    verified = machine.server.worker(ImporterThread)._importer.verify(request)
    machine.server.engine.messages.cancel(cancelled, machine.ledger.messages[cancelled].due_ms)
    fresh, _ = machine.publish("k2", "2")
    machine.rest()
    assert read_checkpoint(machine.catalog) == machine.ledger.durable_seq
    machine.server.engine.part(Imports).on_verified(verified, None)
    machine.rest()
    found = machine.adopted("a")
    left_out = machine.server.engine.part(Imports).state("a").record.left_out()
    assert left_out["seq"].tolist() == [kept, cancelled, fresh]
    assert found.duplicates == 3
    # And then the overlays forget again.
    assert not machine.server.engine.part(Imports).is_deciding
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
        assert machine.server.engine.part(Imports).find(name).stage is Stage.ADOPTED
        assert machine.disk.list(staging.DIRECTORY) == []
        machine.adopt(name)
        assert machine.adopted(name).count == 4
    assert sorted(machine.deliver_all()) == sorted(["0", "1", "2", "3"] * 5)


def test_the_same_import_is_adopted_once(machine: Machine) -> None:
    machine.stage("a", *LATER)
    answers: list[Import | None] = []
    for _ in range(2):
        machine.server.engine.part(Imports).adopt(
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
    imports = machine.server.engine.part(Imports)
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
        machine.server.engine.part(Imports).adopt("/etc/passwd", lambda found, error: None)


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
