"""The dispatcher: who gets a row, and which rows it has."""

from __future__ import annotations

import numpy as np
import pytest

from delayserver.records.horizon import Mark
from delayserver.records.message import MessageOptions, ScheduleEntry
from delayserver.records.subscriptions import Subscription
from delayserver.schedule.wheel_rows import (
    ROUTE_SUBSCRIPTION,
    WHEEL_DTYPE,
    FiredRows,
    route_bits,
)
from storage.rows import FLAG_OPTIONS, Outcome
from tests.unit.delivery.parts import NOW_MS, Parts, webhook
from tests.unit.fakes import (
    HOUR,
    START_MS,
    delivery,
    steps_of,
    subscription,
    wheel_rows,
)

WITH_OPTIONS = 1 | route_bits(FLAG_OPTIONS)
OVER = MessageOptions(ttl_ms=NOW_MS - START_MS)
"""What is due at START_MS, and is read at NOW_MS, has just expired."""
FINE = MessageOptions(ttl_ms=NOW_MS - START_MS + 1)
SINGLE_AND_BATCH = pytest.mark.parametrize("batch_max", [0, 2])


def test_a_message_goes_to_every_subscription_that_matches_and_each_counts() -> None:
    one, every, other = subscription(1), subscription(2, subject="*"), subscription(3, subject="x")
    parts = Parts(one, every, other)
    parts.fire((5, START_MS), (6, START_MS))
    assert parts.waiting(one) == parts.waiting(every) == [5, 6]
    assert parts.waiting(other) == []
    assert parts.hours.unsettled() == 4
    for subscription_id in (1, 2):
        for seq in (5, 6):
            parts.dispatcher.settling.settle_delivered(
                delivery(seq, subscription_id=subscription_id), NOW_MS
            )
    assert parts.hours.unsettled() == 0
    assert parts.dispatcher.settling.delivered_total == 4
    assert parts.settled() == [
        (seq, subscription_id, Outcome.DELIVERED) for subscription_id in (1, 2) for seq in (5, 6)
    ]


def test_a_subscription_gets_only_what_fell_due_since_it_exists() -> None:
    old, young = subscription(1), subscription(2, created_ms=START_MS + 500)
    parts = Parts(old, young)
    parts.fire((5, START_MS + 499), (6, START_MS + 500))
    assert parts.waiting(old) == [5, 6]
    assert parts.waiting(young) == [6]
    assert parts.hours.unsettled() == 3


def test_what_is_accepted_after_the_clock_was_set_back_is_for_the_subscriptions_of_then() -> None:
    old = subscription(1)
    young = subscription(2, horizon=(Mark(5, START_MS + 900), Mark(7, START_MS + 200)))
    parts = Parts(old, young)
    parts.fire((7, START_MS + 199), (5, START_MS + 500), (6, START_MS + 500), (8, START_MS + 501))
    assert parts.waiting(old) == [7, 5, 6, 8]
    assert parts.waiting(young) == [6, 8]
    parts.fire((8, START_MS), (1, START_MS + 900))
    assert parts.waiting(young) == [6, 8, 8, 1]


def test_what_fell_due_before_all_subscriptions_goes_to_the_oldest() -> None:
    first, second = (subscription(number, created_ms=START_MS + 500) for number in (1, 2))
    parts = Parts(first, second)
    parts.fire((5, START_MS + 499), (6, START_MS + 500))
    assert sorted(parts.waiting(first)) == [5, 6]
    assert parts.waiting(second) == [6]
    assert parts.hours.unsettled() == 3


def test_rows_of_several_subjects_in_one_batch_are_told_apart() -> None:
    orders, refunds = subscription(1), subscription(2, subject="refund")
    parts = Parts(orders, refunds)
    rows = np.concatenate(
        [
            wheel_rows(HOUR, (5, START_MS), route=1),
            wheel_rows(HOUR, (6, START_MS), route=2),
            wheel_rows(HOUR, (7, START_MS), route=1),
            wheel_rows(HOUR, (8, START_MS), route=2 | ROUTE_SUBSCRIPTION),
        ]
    ).astype(WHEEL_DTYPE)
    parts.hours.add(HOUR, 4)
    parts.dispatcher.fire([FiredRows(HOUR, rows)], NOW_MS)
    assert parts.waiting(orders) == [5, 7]
    assert sorted(parts.waiting(refunds)) == [6, 8]
    assert parts.hours.unsettled() == 4


def test_a_retry_goes_to_its_own_subscription_alone() -> None:
    one, other = subscription(1), subscription(2)
    parts = Parts(one, other)
    parts.fire((5, START_MS), route=2 | ROUTE_SUBSCRIPTION)
    assert parts.waiting(one) == []
    assert parts.waiting(other) == [5]
    assert parts.hours.unsettled() == 1


def test_many_rows_are_looked_for_at_once() -> None:
    """As one by one: those that wait, are on their way, are orphans, or could not be read."""
    parts = Parts(subscription(1, type="webhook", max_in_flight=2), subscription(2))
    parts.fire(*[(seq, START_MS + seq) for seq in range(2, 9)])
    parts.fire((20, START_MS), route=9 | ROUTE_SUBSCRIPTION)  # its subscription is gone
    parts.dispatcher.queues.unread.add(30)
    dispatcher = parts.dispatcher
    asked = [ScheduleEntry(seq, START_MS + (0 if seq > 9 else seq)) for seq in range(1, 32)]
    expected = {entry.seq for entry in asked if dispatcher.holds(entry)}
    assert expected == {*range(2, 9), 20, 30}
    assert dispatcher.holding([entry.seq for entry in asked]) == expected
    assert dispatcher.holding([]) == set()


@pytest.mark.parametrize("one", [subscription(1), webhook(1)])
def test_what_waited_for_a_definition_is_not_overtaken_by_what_falls_due_then(
    one: Subscription,
) -> None:
    parts = Parts(one)
    release = parts.dispatcher.defer({"order.unpaid"})
    parts.fire((5, START_MS + 1))
    release()
    parts.fire((6, START_MS + 900))
    for _ in range(4):
        parts.turn()
    order = [seq for seqs_ in parts.handouts() for seq in seqs_] + parts.waiting(one)
    assert order == [5, 6]


@pytest.mark.parametrize("one", [subscription(1), webhook(1)])
def test_what_waited_for_a_definition_fires_once(one: Subscription) -> None:
    parts = Parts(one)
    release = parts.dispatcher.defer({"order.unpaid"})
    parts.fire((5, START_MS + 1))
    release()
    for _ in range(4):
        parts.turn()
    assert [seq for seqs_ in parts.handouts() for seq in seqs_] + parts.waiting(one) == [5]
    assert not parts.dispatcher._deferred


def test_many_queues_are_counted_in_several_turns() -> None:
    many = [subscription(number, type="pull") for number in range(1, 301)]
    parts = Parts(*many)
    parts.fire((1, NOW_MS - 20), (2, NOW_MS - 10))
    turns, counted = steps_of(parts.dispatcher.waiting())
    assert turns == [1] * len(many)
    assert counted == (2 * len(many), 0, NOW_MS - 20)
