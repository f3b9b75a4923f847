"""Settling: what came of deliveries."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from delayserver.delivery.deliveries import Deliveries
from delayserver.delivery.settler import DISPATCH_ROW
from delayserver.delivery.sink import Recorded
from delayserver.records.message import MessageOptions, ScheduleEntry
from delayserver.records.subscriptions import Subscription
from delayserver.schedule.wheel_rows import (
    FiredRows,
    route_bits,
)
from storage.rows import FLAG_OPTIONS, Outcome
from tests.unit.delivery.parts import NOW_MS, Parts, to_topic, webhook
from tests.unit.fakes import (
    HOUR,
    START_MS,
    deliveries,
    delivery,
    dispatch_row,
    subscription,
    wheel_rows,
)

WITH_OPTIONS = 1 | route_bits(FLAG_OPTIONS)
OVER = MessageOptions(ttl_ms=NOW_MS - START_MS)
"""What is due at START_MS, and is read at NOW_MS, has just expired."""
FINE = MessageOptions(ttl_ms=NOW_MS - START_MS + 1)
SINGLE_AND_BATCH = pytest.mark.parametrize("batch_max", [0, 2])


def test_a_message_that_was_not_taken_is_the_next_one_and_counts_its_attempts() -> None:
    one = subscription()
    parts = Parts(one)
    parts.fire((5, START_MS), (6, START_MS))
    parts.pull(one, 1)
    [first] = parts.read()
    parts.dispatcher.settling.return_delivery(first, 2)
    assert parts.waiting(one) == [5, 6]
    assert parts.hours.unsettled() == 2
    parts.pull(one, 2)
    again, other = parts.read()
    assert (again.entry.seq, again.attempt) == (5, 2)
    assert (other.entry.seq, other.attempt) == (6, 1)
    parts.dispatcher.settling.settle_delivered(again, NOW_MS)
    assert parts.dispatcher.queues.of(one).attempts == {}


def pull_all(parts: Parts, one: Subscription) -> Deliveries:
    """All that waits, as a consumer has it."""
    parts.pull(one, 1000)
    return parts.read_columns()


def test_what_is_acknowledged_together_is_recorded_together_by_hour() -> None:
    one, other = subscription(1), subscription(2, subject="*")
    parts = Parts(one, other)
    next_hour_ms = START_MS + 3_600_000
    parts.fire((5, START_MS), (6, START_MS + 1), (7, START_MS + 2))
    parts.hours.add(HOUR + 1, 1)
    batch = FiredRows(HOUR + 1, wheel_rows(HOUR + 1, (8, next_hour_ms), route=2))
    parts.dispatcher.fire([batch], NOW_MS)
    parts.pull(other, 10)
    handout = parts.ports.handouts.pop()
    ones = [
        delivery(5, START_MS, subscription_id=2, message_seq=3, attempt=2),
        delivery(6, START_MS + 1, subscription_id=2),
        delivery(7, START_MS + 2, subscription_id=2),
        delivery(8, next_hour_ms, subscription_id=2, subject_id=2),
    ]
    pulled = deliveries(*ones)
    handout.answer(pulled, NOW_MS)
    parts.dispatcher.settling.settle_leased(pulled, np.array([3, 0, 1]), NOW_MS + 9)
    assert sorted((hour, DISPATCH_ROW.unpack(row)) for hour, row in parts.ports.settled) == [
        (HOUR, (5, 3, START_MS, NOW_MS + 9, 2, 2, Outcome.DELIVERED, 0)),
        (HOUR, (6, 6, START_MS + 1, NOW_MS + 9, 2, 1, Outcome.DELIVERED, 0)),
        (HOUR + 1, (8, 8, next_hour_ms, NOW_MS + 9, 2, 1, Outcome.DELIVERED, 0)),
    ]
    assert parts.dispatcher.settling.delivered_by_subject == {1: 2, 2: 1}
    assert parts.hours.unsettled() == 3 + 1
    queue = parts.dispatcher.queues.of(other)
    assert (queue.in_flight, queue.reserved) == (1, {7})
    assert not parts.dispatcher.holds(ScheduleEntry(8, next_hour_ms))


def test_what_comes_back_from_a_consumer_keeps_its_order_and_counts_its_attempts() -> None:
    one = subscription()
    parts = Parts(one)
    parts.fire(*((seq, START_MS) for seq in range(1, 6)))
    pulled = pull_all(parts, one)
    parts.fire((9, START_MS))
    parts.dispatcher.settling.return_leased(pulled, np.array([0, 2, 3]))
    assert parts.waiting(one) == [1, 3, 4, 9]
    queue = parts.dispatcher.queues.of(one)
    assert (queue.in_flight, queue.reserved) == (2, {2, 5})
    assert parts.hours.unsettled() == 6
    again = pull_all(parts, one)
    assert [(delivery.entry.seq, delivery.attempt) for delivery in again] == [
        (1, 2),
        (3, 2),
        (4, 2),
        (9, 1),
    ]
    parts.dispatcher.settling.settle_leased(again, np.arange(4), NOW_MS)
    parts.dispatcher.settling.settle_leased(pulled, np.array([1, 4]), NOW_MS)
    assert (queue.in_flight, queue.reserved, queue.attempts) == (0, set(), {})
    assert parts.hours.unsettled() == 0


def test_what_comes_back_of_several_hours_waits_in_due_order() -> None:
    one = subscription()
    parts = Parts(one)
    next_hour_ms = START_MS + 3_600_000
    parts.fire((1, START_MS), (2, START_MS + 1))
    parts.hours.add(HOUR + 1, 2)
    rows = wheel_rows(HOUR + 1, (3, next_hour_ms), (4, next_hour_ms))
    parts.dispatcher.fire([FiredRows(HOUR + 1, rows)], NOW_MS)
    parts.pull(one, 10)
    handout = parts.ports.handouts.pop()
    dues_ms = [START_MS, START_MS + 1, next_hour_ms, next_hour_ms]
    pulled = deliveries(*(delivery(seq, due_ms) for seq, due_ms in enumerate(dues_ms, 1)))
    handout.answer(pulled, NOW_MS)
    parts.dispatcher.settling.return_leased(pulled, np.arange(4))
    assert parts.waiting(one) == [1, 2, 3, 4]
    assert [batch.hour for batch in parts.dispatcher.queues.of(one).rows.slices()] == [
        HOUR,
        HOUR + 1,
    ]


def test_what_comes_back_twice_is_found_wherever_it_waits() -> None:
    one = subscription()
    parts = Parts(one)
    parts.fire((1, START_MS), (2, START_MS + 5), (3, START_MS + 7))
    parts.pull(one, 10)
    handout = parts.ports.handouts.pop()
    dues_ms = {3: START_MS + 7, 1: START_MS, 2: START_MS + 5}
    pulled = deliveries(*(delivery(seq, due_ms) for seq, due_ms in dues_ms.items()))
    handout.answer(pulled, NOW_MS)
    parts.dispatcher.settling.return_leased(pulled, np.arange(3))
    assert parts.waiting(one) == [1, 2, 3]
    for seq, due_ms in dues_ms.items():
        assert parts.dispatcher.holds(ScheduleEntry(seq, due_ms))


def test_what_was_leased_from_a_deleted_subscription_is_recorded_or_adopted() -> None:
    gone, heir = subscription(1), subscription(2, created_ms=NOW_MS)
    parts = Parts(gone, heir)
    parts.fire((1, START_MS), (2, START_MS), (3, START_MS))
    pulled = pull_all(parts, gone)
    parts.change(subscription(1, deleted=True))
    parts.dispatcher.settling.settle_leased(pulled, np.array([1]), NOW_MS)
    assert parts.settled() == [(2, 1, Outcome.DELIVERED)]
    parts.dispatcher.settling.return_leased(pulled, np.array([0, 2]))
    parts.read()
    assert parts.waiting(heir) == [1, 3]
    assert parts.hours.unsettled() == 2


def test_a_delivery_is_settled_in_the_hour_of_its_row() -> None:
    parts = Parts(subscription())
    parts.fire((5, START_MS + 7))
    one = delivery(5, START_MS + 7, attempt=3, message_seq=2, published_due_ms=1)
    parts.dispatcher.settling.settle_delivered(one, NOW_MS)
    [(hour, row)] = parts.ports.settled
    assert hour == HOUR
    assert DISPATCH_ROW.unpack(row) == (5, 2, START_MS + 7, NOW_MS, 1, 3, Outcome.DELIVERED, 0)
    assert len(row) == len(dispatch_row(5))


def test_what_failed_and_is_not_recorded_yet_keeps_its_place_in_the_bound() -> None:
    hook = webhook(batch_max=2, max_in_flight=1)
    parts = Parts(hook)
    parts.fire(*((seq, START_MS) for seq in range(1, 7)))
    first = parts.read()
    parts.dispatcher.pushes.end_request(first, is_answered=True)
    parts.dispatcher.pump.run(parts.dispatcher.queues.of(hook), NOW_MS)
    assert parts.ports.handouts == []
    for one in first:
        parts.dispatcher.settling.release_delivery(one)
    parts.dispatcher.pump.run(parts.dispatcher.queues.of(hook), NOW_MS)
    assert len(parts.ports.handouts) == 1


def test_what_is_recorded_already_is_not_recorded_again() -> None:
    parts = Parts(to_topic())
    parts.fire((1, START_MS))
    (one,) = parts.read()
    parts.dispatcher.settling.settle_delivered(one, NOW_MS, Recorded(NOW_MS - 50, 9))
    assert parts.ports.settled == []
    ((hour, row, offset),) = parts.ports.recorded
    assert (hour, offset) == (HOUR, 9)
    seq, _, _, settled_ms, *_ = DISPATCH_ROW.unpack(row)
    assert (seq, settled_ms) == (1, NOW_MS - 50)
    assert parts.hours.unsettled_by_hour().get(HOUR, 0) == 0


def poisoned(pull_max: int, concurrent: int, attempts: int = 5) -> tuple[int, dict[int, int]]:
    """Message 7 of 40 ends whichever consumer has it, together with all that this one has.

    Returns how often that happened, and the attempts of those that died, by seq."""
    mine = subscription(max_attempts=attempts)
    parts = Parts(mine)
    parts.fire(*((seq, START_MS) for seq in range(1, 41)))
    deaths, dead = 0, dict[int, int]()
    for _ in range(400):
        held: list[Deliveries] = []
        while sum(map(len, held)) < concurrent and len(held) < 40:
            fetch = parts.pull(mine, min(pull_max, concurrent - sum(map(len, held))), wait_ms=0)
            assert fetch.is_completed
            if not parts.ports.handouts:
                break
            held.append(parts.read_columns())
        if not held:
            break
        everything = [seq for one in held for seq in one.settled["seq"].tolist()]
        if 7 not in everything:
            for one in held:
                parts.dispatcher.settling.settle_leased(one, np.arange(len(one)), NOW_MS)
            parts.turn()
            continue
        deaths += 1
        for one in held:
            which = np.arange(len(one))
            is_cause = parts.dispatcher.settling.may_be_the_cause(one, which)
            [attempt, *_] = one.settled["attempt"].tolist()
            if is_cause and attempt >= attempts:
                dead[int(one.settled["seq"][0])] = attempt
                parts.dispatcher.settling.settle_leased(one, which, NOW_MS)
            else:
                parts.dispatcher.settling.return_leased(one, which, are_suspects=True)
        parts.turn()
    assert parts.dispatcher.queues.of(mine).count == 0
    return deaths, dead


@pytest.mark.parametrize(("pull_max", "concurrent"), [(20, 20), (1, 20), (1, 1), (3, 10), (40, 40)])
def test_a_message_that_ends_its_consumers_dies_alone(pull_max: int, concurrent: int) -> None:
    deaths, dead = poisoned(pull_max, concurrent)
    assert list(dead) == [7]
    assert deaths <= 6


def test_limits_of_a_pulled_subscription_note_nothing_about_what_is_leased() -> None:
    one = subscription(1)
    parts = Parts(one)
    parts.fire((5, START_MS))
    queue = parts.dispatcher.queues.of(one)
    queue.hold([5])
    parts.change(msgspec.structs.replace(one, drop_older_than_ms=1_000_000))
    assert not queue.unreserved
    parts.change(webhook(1, rate_per_s=1.0, rate_burst=1))
    assert queue.unreserved == {5}
    queue.release_leased([5])
    assert not queue.unreserved
