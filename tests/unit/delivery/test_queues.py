"""Queues: made at first use, with what was expected before; when anything may leave them."""

from __future__ import annotations

import pytest

from delayserver.delivery.lane import Room
from delayserver.delivery.queues import Queues
from delayserver.schedule.wheel_rows import FiredRows
from tests.unit.delivery.parts import webhook
from tests.unit.fakes import HOUR, START_MS, Stopwatch, subscription, wheel_rows


@pytest.mark.parametrize("is_there", [False, True])
def test_a_queue_knows_what_is_expected_before_it_is_made_and_after(is_there: bool) -> None:
    queues, one = Queues(Stopwatch()), subscription()
    if is_there:
        queues.of(one)
    queues.expect(one.id, FiredRows(HOUR, wheel_rows(HOUR, (5, START_MS))))
    single_file = queues.of(one).rows.single_file
    assert single_file is not None
    assert [fired.hour for fired in single_file.next_expected(Room(10, 1000))] == [HOUR]
    assert [*queues] == [queues.of(one)]
    queues.remove(one.id)
    assert queues.get(one.id) is None


def test_a_queue_may_leave_as_its_definition_its_receiver_and_the_lease_say() -> None:
    stopwatch, leases = Stopwatch(), [True]
    queues, hook = Queues(stopwatch, may_deliver=lambda: leases[0]), webhook()
    queue = queues.of(hook)
    assert queues.may_leave(queue, hook)
    assert not queues.may_leave(queue, webhook(paused=False, max_in_flight=1))
    queue.held_until_ms = 5
    assert not queues.may_leave(queue, hook)
    stopwatch.shows_ms = 5
    assert queues.may_leave(queue, hook)
    leases[0] = False
    assert not queues.may_leave(queue, hook)
    leases[0], queues.draining = True, True
    assert not queues.may_leave(queue, hook)
