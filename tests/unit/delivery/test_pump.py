"""The pump: when rows leave their queues."""

from __future__ import annotations

from typing import Any

import pytest

from delayserver.delivery.pump import HELD_LOOK_MS
from delayserver.records.message import MessageOptions, ScheduleEntry
from delayserver.schedule.wheel_rows import (
    route_bits,
)
from storage.rows import FLAG_OPTIONS, HOUR_MS, PRIORITY_SHIFT
from tests.unit.delivery.parts import NOW_MS, Lease, Parts, posts, webhook
from tests.unit.fakes import (
    START_MS,
    counted,
    seqs,
    subscription,
)

WITH_OPTIONS = 1 | route_bits(FLAG_OPTIONS)
OVER = MessageOptions(ttl_ms=NOW_MS - START_MS)
"""What is due at START_MS, and is read at NOW_MS, has just expired."""
FINE = MessageOptions(ttl_ms=NOW_MS - START_MS + 1)
SINGLE_AND_BATCH = pytest.mark.parametrize("batch_max", [0, 2])


def test_a_slow_subscription_delays_nobody_else() -> None:
    slow, quick = webhook(1, max_in_flight=1), webhook(2, max_in_flight=100)
    parts = Parts(slow, quick)
    parts.fire(*[(seq, START_MS) for seq in range(1, 11)])
    taken = {handout.subscription_id: handout.count for handout in parts.ports.handouts}
    assert taken == {1: 1, 2: 10}


def test_a_paused_subscription_keeps_its_messages_until_it_is_resumed() -> None:
    parts = Parts(webhook(paused=True))
    parts.fire((5, START_MS))
    assert parts.ports.handouts == []
    assert parts.dispatcher.holds(ScheduleEntry(5, START_MS))
    parts.change(webhook(paused=False))
    assert seqs(parts.ports.handouts[0].slices) == [5]


def test_when_the_server_stops_nothing_leaves_and_everybody_is_answered() -> None:
    one, hook = subscription(1), webhook(2)
    parts = Parts(one, hook)
    parts.pull(one, 10)
    parts.dispatcher.drain()
    assert parts.answers == [[]]
    parts.fire((5, START_MS))
    assert parts.ports.handouts == []
    assert parts.waiting(one) == parts.waiting(hook) == [5]


def test_a_message_that_cannot_be_read_keeps_its_hour_open_and_its_place_free() -> None:
    parts = Parts(webhook(max_in_flight=2))
    parts.fire((5, START_MS), (6, START_MS))
    parts.read(5)
    assert [sent.entry.seq for _, sent in parts.ports.sent] == [6]
    assert counted(parts.dispatcher).in_flight == 1
    # Else it would be looked up as delivered.
    assert parts.dispatcher.holds(ScheduleEntry(5, START_MS))
    assert parts.hours.unsettled() == 2


def test_old_rows_are_given_up_a_slice_at_a_time_and_new_ones_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("delayserver.delivery.queue.READ_ROWS_MAX", 2)
    hook = webhook(drop_older_than_ms=500, created_ms=START_MS)
    parts = Parts(hook)
    parts.fire(*((seq, START_MS) for seq in range(1, 6)), (6, START_MS + 600))
    assert [seqs(handout.slices) for handout in parts.ports.handouts] == [[1, 2]]
    slices = []
    while parts.ports.handouts:
        given_up = parts.read()
        slices.append([one.entry.seq for one in given_up])
        for one in given_up:
            parts.dispatcher.settling.release_delivery(one)
        parts.dispatcher.pump.run(parts.dispatcher.queues.of(hook), NOW_MS)
    assert slices == [[1, 2], [3, 4], [5], [6]]
    assert [delivery.entry.seq for delivery, _ in parts.ports.dropped] == [1, 2, 3, 4, 5]
    reason = "older than 500ms when it could have been delivered"
    assert {why for _, why in parts.ports.dropped} == {reason}
    assert posts(parts) == [[6]]
    queue = parts.dispatcher.queues.of(hook)
    assert (queue.dropping, queue.in_flight, queue.reserved) == (set(), 0, set())


def test_what_a_consumer_does_not_pull_in_time_is_given_up() -> None:
    pull = subscription(drop_older_than_ms=2_000)
    parts = Parts(pull)
    parts.fire((1, START_MS))
    assert parts.ports.handouts == []
    # Its age is that by the clock, also if the clock is set.
    assert parts.dispatcher.pump.wake(NOW_MS) == START_MS + 2_001 - NOW_MS
    assert parts.dispatcher.pump.wake(NOW_MS - 500) == START_MS + 2_001 - NOW_MS + 500
    parts.dispatcher.pump.wake(START_MS + 2_001)
    parts.read()
    assert len(parts.ports.dropped) == 1


def test_the_engine_is_told_when_rows_may_leave_earlier_than_it_knows() -> None:
    hook = webhook(rate_per_s=10.0, rate_burst=1)
    parts = Parts(hook)
    parts.fire((1, START_MS), (2, START_MS), (3, START_MS))
    [first] = parts.read()
    parts.turn()
    assert parts.ports.ticks == 1
    parts.dispatcher.settling.settle_delivered(first, NOW_MS)
    parts.dispatcher.pump.run(parts.dispatcher.queues.of(hook), NOW_MS)
    assert parts.ports.ticks == 1
    wait_ms = parts.dispatcher.pump.wake(NOW_MS)
    assert wait_ms is not None
    assert 100 <= wait_ms <= 101
    assert parts.ports.handouts == []
    parts.wait(wait_ms)
    parts.dispatcher.pump.wake(NOW_MS)
    assert len(parts.ports.handouts) == 1


@pytest.mark.parametrize("looked_ms", range(90, 111))
@pytest.mark.parametrize(
    ("limits", "rows"),
    [
        ({"rate_per_s": 10.0, "rate_burst": 1}, 2),
        ({"batch_max": 5, "linger_ms": 100}, 1),
        ({"spread_ms": 200}, 2),
    ],
)
def test_time_that_passes_while_the_queue_is_looked_at_keeps_nothing_back(
    limits: dict[str, Any], rows: int, looked_ms: int
) -> None:
    hook = webhook(**limits, created_ms=NOW_MS)
    parts = Parts(hook)
    parts.fire(*((seq, NOW_MS - 1) for seq in range(1, rows + 1)))
    for _ in parts.handouts():
        for one in parts.read():
            parts.dispatcher.settling.settle_delivered(one, NOW_MS)
    # Somebody has it looked at, about when the next may leave.
    parts.stopwatch.shows_ms, parts.stopwatch.step_ms = looked_ms, 1
    parts.dispatcher.pump.run(parts.dispatcher.queues.of(hook), NOW_MS)
    parts.stopwatch.step_ms = 0
    if not parts.ports.handouts:
        wait_ms = parts.dispatcher.pump.wake(NOW_MS)
        assert wait_ms is not None
        parts.wait(parts.stopwatch.shows_ms + wait_ms)
        parts.dispatcher.pump.wake(NOW_MS)
    assert parts.handouts() == [[rows]]


@pytest.mark.parametrize("set_by_ms", [-HOUR_MS, HOUR_MS])
@pytest.mark.parametrize(
    ("limits", "rows", "wait_ms"),
    [
        ({"rate_per_s": 10.0, "rate_burst": 1}, 2, 101),
        ({"batch_max": 5, "linger_ms": 1_200}, 1, 200),
        ({"spread_ms": 500}, 2, 250),
    ],
)
def test_rows_leave_when_their_time_has_passed_though_the_clock_was_set(
    limits: dict[str, Any], rows: int, wait_ms: int, set_by_ms: int
) -> None:
    hook = webhook(**limits, created_ms=NOW_MS)
    parts = Parts(hook)
    parts.fire(*((seq, START_MS) for seq in range(1, rows + 1)))
    for handout in parts.ports.handouts:
        assert handout.count == rows - 1
        for one in parts.read():
            parts.dispatcher.settling.settle_delivered(one, NOW_MS)
        parts.turn()
    now_ms = NOW_MS + set_by_ms
    left_ms = parts.dispatcher.pump.wake(now_ms)
    assert left_ms is not None and left_ms <= wait_ms
    parts.wait(wait_ms - 2)
    parts.dispatcher.pump.wake(now_ms)
    assert parts.ports.handouts == []
    parts.wait(wait_ms)
    parts.dispatcher.pump.wake(now_ms)
    assert parts.handouts() == [[rows]]


def test_nothing_leaves_without_a_lease_and_all_does_with_it_again() -> None:
    hook, queue = webhook(1), subscription(2)
    parts = Parts(hook, queue)
    lease = Lease(parts)
    lease.holds = False
    parts.fire((5, START_MS), (6, START_MS))
    parts.pull(queue, 10, wait_ms=60_000)
    assert not parts.ports.handouts and not parts.answers
    assert parts.dispatcher.pulls.ready(queue.id) == 0
    lease.holds = True
    parts.wait(HELD_LOOK_MS)
    assert parts.dispatcher.pump.wake(NOW_MS) is not None or parts.ports.handouts
    assert sorted(parts.handouts()) == [[5, 6], [5, 6]]
    assert parts.hours.unsettled() == 4


def test_what_is_unreadable_does_not_go_back() -> None:
    hook = webhook(1)
    parts = Parts(hook)
    lease = Lease(parts)
    parts.fire((5, START_MS), (6, START_MS))
    lease.holds = False
    parts.read(5)
    assert parts.waiting(hook) == [6]
    assert parts.dispatcher.queues.of(hook).in_flight == 0


def test_what_is_too_old_is_given_up_without_a_lease() -> None:
    """Nobody is asked to take it; whether it counts is decided by the log."""
    hook = webhook(1, drop_older_than_ms=1)
    parts = Parts(hook)
    lease = Lease(parts)
    parts.fire((5, START_MS))
    lease.holds = False
    parts.read()
    assert [one.entry.seq for one, _ in parts.ports.dropped] == [5]


def test_what_is_taken_back_under_another_lease_does_not_expire_here() -> None:
    """Who may not deliver may not give up, either."""
    consumer = subscription()
    parts = Parts(consumer)
    parts.fire((1, START_MS), route=WITH_OPTIONS)
    parts.pull(consumer, 1)
    parts.dispatcher.queues.may_deliver = lambda: False
    parts.read_columns(options={1: OVER})
    assert (parts.ports.dropped, parts.waiting(consumer)) == ([], [1])


def test_rows_of_a_higher_priority_leave_first_whoever_takes_them() -> None:
    consumer, receiver = subscription(1), webhook(2, max_in_flight=1)
    parts = Parts(consumer, receiver)
    for seq, priority in ((1, 0), (2, 9), (3, 4), (4, 9)):
        route = 1 | route_bits(FLAG_OPTIONS | priority << PRIORITY_SHIFT)
        parts.fire((seq, START_MS), route=route)
    parts.pull(consumer, 4)
    assert parts.handouts() == [[1], [2, 4, 3, 1]], "the webhook had its first before the others"
    assert parts.waiting(receiver) == [2, 4, 3]
