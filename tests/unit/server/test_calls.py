"""The calls: what comes back from threads and groups, as awaitables; and who asks and goes away."""

from __future__ import annotations

import pytest

from delayserver.decisions.delayed_produce import Level
from delayserver.errors import NotFoundError
from storage.errors import DiskFullError
from tests.unit.server.machine import Machine
from tests.world.storage.faults import Fault, FaultKind, Moment


@pytest.fixture
def machine() -> Machine:
    return Machine()


def test_what_is_durable_is_told_and_so_is_why_it_is_not(machine: Machine) -> None:
    calls = machine.calls
    machine.publish()
    group = calls.not_durable()
    assert group is not None
    machine.wait(lambda: calls.durable(group))
    assert calls.not_durable() is None
    machine.wait(lambda: calls.durable(None))
    machine.publish()
    count = machine.faults.call_count
    machine.faults.faults.append(Fault(count + 1, FaultKind.NO_SPACE, Moment.BEFORE))
    with pytest.raises(DiskFullError):
        machine.wait(lambda: calls.durable(calls.not_durable()))


@pytest.mark.parametrize("level", [Level.DURABLE, Level.FILED])
def test_a_publish_is_acknowledged_at_the_level_that_it_asks_for(
    machine: Machine, level: Level
) -> None:
    seq = machine.publish().seq
    group = machine.calls.not_durable()
    assert machine.wait(lambda: machine.calls.acknowledged(group, seq, level, 1000)) is level


def test_a_message_is_found_before_and_after_it_is_filed_and_is_moved(machine: Machine) -> None:
    calls = machine.calls
    found = machine.publish()
    assert machine.wait(lambda: calls.subject_of(found.seq, found.due_ms)) == "orders"
    machine.wait(calls.checkpoint)
    assert (
        machine.wait(lambda: calls.find(calls.locate(found.seq, found.due_ms).entry)).subject_id
        == 1
    )
    later_ms = found.due_ms + 1
    before = calls.version(found.seq)
    version = machine.wait(lambda: calls.move(found.seq, found.due_ms, later_ms))
    assert version != before
    assert version == calls.version(found.seq)
    assert calls.locate(found.seq, found.due_ms).entry.due_ms == later_ms


def test_many_ids_are_those_of_one_at_a_time(machine: Machine) -> None:
    found = [machine.publish(due_in_ms=number) for number in range(3)]
    columns = machine.calls.find_by_ids([machine.calls.encode_id(o.due_ms, o.seq) for o in found])
    texts = machine.calls.encode_ids(columns.dues_ms, columns.seqs)
    assert list(texts) == [machine.calls.encode_id(one.due_ms, one.seq) for one in found]
    with pytest.raises(NotFoundError):
        machine.calls.message_id("x")
