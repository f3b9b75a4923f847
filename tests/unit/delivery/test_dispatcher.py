"""The dispatcher: one delivery for each subscription, accounted for until it is settled."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from delayserver.delivery.deadlines import STEP_MS
from delayserver.delivery.delayed_fetch import Pulled, PullRequest
from delayserver.delivery.deliveries import Deliveries
from delayserver.delivery.dispatcher import HELD_LOOK_MS
from delayserver.delivery.queue import Handout
from delayserver.delivery.settler import DISPATCH_ROW
from delayserver.delivery.sink import Recorded
from delayserver.delivery.slow_start import AT_ONCE, LOOK_MS
from delayserver.records.horizon import Mark
from delayserver.records.message import DueDelivery, MessageOptions, ScheduleEntry
from delayserver.records.subscriptions import KafkaTarget, Subscription
from delayserver.schedule.wheel_rows import (
    ROUTE_SUBSCRIPTION,
    WHEEL_DTYPE,
    FiredRows,
    route_bits,
)
from storage.rows import FLAG_OPTIONS, HOUR_MS, PRIORITY_SHIFT, Outcome
from tests.unit.delivery.parts import NOW_MS, Parts, webhook
from tests.unit.fakes import (
    HOUR,
    START_MS,
    deliveries,
    delivery,
    dispatch_row,
    seqs,
    subscription,
    wheel_rows,
)

# ---- routing -------------------------------------------------------------------------------------


def test_a_message_goes_to_every_subscription_that_matches_and_each_counts() -> None:
    one, every, other = subscription(1), subscription(2, subject="*"), subscription(3, subject="x")
    parts = Parts(one, every, other)
    parts.fire((5, START_MS), (6, START_MS))
    assert parts.waiting(one) == parts.waiting(every) == [5, 6]
    assert parts.waiting(other) == []
    assert parts.hours.unsettled() == 4
    for subscription_id in (1, 2):
        for seq in (5, 6):
            parts.dispatcher.settle_delivered(
                delivery(seq, subscription_id=subscription_id), NOW_MS
            )
    assert parts.hours.unsettled() == 0
    assert parts.dispatcher.delivered_total == 4
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


# ---- handing out ---------------------------------------------------------------------------------


def test_a_webhook_has_no_more_in_flight_than_it_allows() -> None:
    one = webhook(max_in_flight=2)
    parts = Parts(one)
    parts.fire((5, START_MS), (6, START_MS), (7, START_MS))
    first, _ = parts.read()
    assert [sent.entry.seq for _, sent in parts.ports.sent] == [5, 6]
    assert parts.dispatcher.in_flight_count() == 2
    assert parts.dispatcher.holds(ScheduleEntry(5, START_MS))
    parts.dispatcher.pump(parts.dispatcher.queue(one), NOW_MS)
    assert parts.ports.handouts == []
    parts.dispatcher.settle_delivered(first, NOW_MS)
    parts.dispatcher.pump(parts.dispatcher.queue(one), NOW_MS)
    parts.read()
    assert [sent.entry.seq for _, sent in parts.ports.sent] == [5, 6, 7]
    assert not parts.dispatcher.holds(ScheduleEntry(5, START_MS))


@pytest.mark.parametrize(
    "more", [{}, {"drop_older_than_ms": 60_000}, {"rate_per_s": 10_000, "rate_burst": 1000}]
)
def test_requests_without_an_answer_become_more_by_one_each_millisecond(
    more: dict[str, int],
) -> None:
    one = webhook(max_in_flight=1000, **more)
    parts = Parts(one)
    parts.fire(*[(seq, START_MS) for seq in range(1000)])

    def leave() -> int:
        before = len(parts.ports.sent)
        while parts.ports.handouts or parts.ports.turns:
            if parts.ports.handouts:
                for carried in [[each] for each in parts.read()]:
                    assert parts.dispatcher.may_begin(one, carried, NOW_MS)
            parts.turn()
        return len(parts.ports.sent) - before

    assert leave() == AT_ONCE
    for _ in range(3):
        assert parts.dispatcher.wake(NOW_MS) == LOOK_MS
        parts.wait(parts.stopwatch.shows_ms + LOOK_MS)
        parts.dispatcher.wake(NOW_MS)
        assert leave() == LOOK_MS
    for _, answered in parts.ports.sent[:10]:
        parts.dispatcher.end_request([answered], is_answered=True)
        parts.dispatcher.settle_delivered(answered, NOW_MS)
    parts.dispatcher.pump(parts.dispatcher.queue(one), NOW_MS)
    assert leave() == 10


def test_reads_that_are_answered_at_once_let_no_more_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = Parts(webhook(max_in_flight=1000))

    def read(handout: Handout) -> None:
        parts.ports.handouts.append(handout)
        parts.read()

    monkeypatch.setattr(parts.ports, "read", read)
    parts.fire(*[(seq, START_MS) for seq in range(1000)])
    while parts.ports.turns:
        parts.turn()
    assert len(parts.ports.sent) == AT_ONCE


def test_what_becomes_free_while_bodies_are_read_is_read_together() -> None:
    one = webhook(max_in_flight=4)
    parts = Parts(one)
    parts.fire(*[(seq, START_MS) for seq in range(1, 5)])
    deliveries = parts.read()
    parts.fire(*[(seq, START_MS) for seq in range(5, 9)])
    for delivered in deliveries:
        parts.dispatcher.settle_delivered(delivered, NOW_MS)
        parts.dispatcher.pump(parts.dispatcher.queue(one), NOW_MS)
    assert [handout.count for handout in parts.ports.handouts] == [1]
    parts.read()
    assert [handout.count for handout in parts.ports.handouts] == [3]
    parts.read()
    assert [sent.entry.seq for _, sent in parts.ports.sent] == list(range(1, 9))


def test_a_slow_subscription_delays_nobody_else() -> None:
    slow, quick = webhook(1, max_in_flight=1), webhook(2, max_in_flight=100)
    parts = Parts(slow, quick)
    parts.fire(*[(seq, START_MS) for seq in range(1, 11)])
    taken = {handout.subscription.id: handout.count for handout in parts.ports.handouts}
    assert taken == {1: 1, 2: 10}


def test_a_paused_subscription_keeps_its_messages_until_it_is_resumed() -> None:
    parts = Parts(webhook(paused=True))
    parts.fire((5, START_MS))
    assert parts.ports.handouts == []
    assert parts.dispatcher.holds(ScheduleEntry(5, START_MS))
    parts.change(webhook(paused=False))
    assert seqs(parts.ports.handouts[0].slices) == [5]


def test_a_consumer_gets_as_many_as_it_asked_for_the_rest_waits() -> None:
    one = subscription()
    parts = Parts(one)
    parts.fire((5, START_MS), (6, START_MS), (7, START_MS))
    assert parts.ports.handouts == []
    parts.pull(one, 2)
    parts.read()
    [(handout, deliveries)] = parts.ports.handed_out
    assert [d.entry.seq for d in deliveries] == [5, 6]
    assert handout.request is not None
    assert parts.waiting(one) == [7]


def test_a_consumer_that_waits_is_served_when_something_falls_due() -> None:
    one = subscription()
    parts = Parts(one)
    parts.pull(one, 10)
    parts.pull(one, 10)
    parts.fire((5, START_MS))
    assert [handout.count for handout in parts.ports.handouts] == [1]
    parts.fire((6, START_MS))
    assert [handout.count for handout in parts.ports.handouts] == [1, 1]


def test_a_consumer_is_answered_with_nothing_when_its_wait_is_over() -> None:
    one = subscription()
    parts = Parts(one)
    parts.pull(one, 10, wait_ms=100)
    parts.pull(one, 10, wait_ms=50)
    parts.wait(49)
    assert parts.answers == []
    parts.wait(50)
    assert parts.answers == [[]]
    parts.wait(100)
    assert parts.answers == [[], []]
    parts.fire((5, START_MS))
    assert parts.handouts() == []
    assert parts.dispatcher.fetches.count() == 0


def test_a_consumer_that_does_not_wait_is_answered_at_once() -> None:
    one = subscription()
    parts = Parts(one)
    parts.pull(one, 10, wait_ms=0)
    assert parts.answers == [[]]
    parts.fire((5, START_MS))
    parts.pull(one, 10, wait_ms=0, least=7)
    assert parts.handouts() == [[5]]
    assert parts.timeouts.size() == 0


def test_a_consumer_waits_until_as_many_are_there_as_it_wants() -> None:
    one = subscription()
    parts = Parts(one)
    parts.pull(one, 10, least=3)
    parts.fire((5, START_MS), (6, START_MS))
    assert parts.handouts() == []
    parts.fire((7, START_MS), (8, START_MS))
    assert parts.handouts() == [[5, 6, 7, 8]]


def test_when_its_wait_is_over_a_consumer_gets_what_there_is() -> None:
    one = subscription()
    parts = Parts(one)
    parts.pull(one, 10, wait_ms=50, least=3)
    parts.fire((5, START_MS))
    parts.wait(50)
    assert parts.handouts() == [[5]]
    assert parts.answers == []  # they are being read


def test_one_that_waits_for_many_holds_up_nobody_and_the_first_that_can_be_served_is() -> None:
    one = subscription()
    parts = Parts(one)
    parts.pull(one, 4, least=4)
    parts.pull(one, 1)
    parts.pull(one, 2)
    parts.fire((5, START_MS))
    assert parts.handouts() == [[5]]
    parts.fire((6, START_MS), (7, START_MS), (8, START_MS), (9, START_MS), (10, START_MS))
    assert parts.handouts()[1:] == [[6, 7, 8, 9], [10]]


def test_a_consumer_that_is_gone_gets_nothing_and_the_next_one_does() -> None:
    one = subscription()
    parts = Parts(one)
    gone = parts.pull(one, 1)
    parts.pull(one, 2)
    gone.cancel()
    assert parts.timeouts.size() == parts.dispatcher.fetches.count() == 1
    parts.fire((5, START_MS), (6, START_MS))
    assert parts.handouts() == [[5, 6]]
    assert parts.ports.handouts[0].request is not None
    assert parts.ports.handouts[0].request.max_messages == 2
    assert parts.answers == []


def test_while_a_subscription_is_paused_consumers_wait_and_then_get_nothing() -> None:
    one = subscription(paused=True)
    parts = Parts(one)
    parts.fire((5, START_MS))
    parts.pull(one, 1, wait_ms=50)
    parts.pull(one, 1)
    parts.wait(50)
    assert parts.answers == [[]]
    parts.change(subscription())
    assert parts.handouts() == [[5]]


def test_consumers_of_a_subscription_that_is_deleted_are_answered() -> None:
    one = subscription()
    parts = Parts(one)
    parts.pull(one, 1)
    parts.pull(one, 5, least=5)
    parts.change(subscription(deleted=True))
    assert parts.answers == [[], []]
    assert parts.timeouts.size() == parts.dispatcher.fetches.count() == 0


def test_when_the_server_stops_nothing_leaves_and_everybody_is_answered() -> None:
    one, hook = subscription(1), webhook(2)
    parts = Parts(one, hook)
    parts.pull(one, 10)
    parts.dispatcher.drain()
    assert parts.answers == [[]]
    parts.fire((5, START_MS))
    assert parts.ports.handouts == []
    assert parts.waiting(one) == parts.waiting(hook) == [5]


def test_a_message_that_was_not_taken_is_the_next_one_and_counts_its_attempts() -> None:
    one = subscription()
    parts = Parts(one)
    parts.fire((5, START_MS), (6, START_MS))
    parts.pull(one, 1)
    [first] = parts.read()
    parts.dispatcher.return_delivery(first, 2)
    assert parts.waiting(one) == [5, 6]
    assert parts.hours.unsettled() == 2
    parts.pull(one, 2)
    again, other = parts.read()
    assert (again.entry.seq, again.attempt) == (5, 2)
    assert (other.entry.seq, other.attempt) == (6, 1)
    parts.dispatcher.settle_delivered(again, NOW_MS)
    assert parts.dispatcher.queue(one).attempts == {}


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
    parts.dispatcher.on_read(handout, pulled, NOW_MS)
    parts.dispatcher.settle_leased(pulled, np.array([3, 0, 1]), NOW_MS + 9)
    assert sorted((hour, DISPATCH_ROW.unpack(row)) for hour, row in parts.ports.settled) == [
        (HOUR, (5, 3, START_MS, NOW_MS + 9, 2, 2, Outcome.DELIVERED, 0)),
        (HOUR, (6, 6, START_MS + 1, NOW_MS + 9, 2, 1, Outcome.DELIVERED, 0)),
        (HOUR + 1, (8, 8, next_hour_ms, NOW_MS + 9, 2, 1, Outcome.DELIVERED, 0)),
    ]
    assert parts.dispatcher.delivered_by_subject == {1: 2, 2: 1}
    assert parts.hours.unsettled() == 3 + 1
    queue = parts.dispatcher.queue(other)
    assert (queue.in_flight, queue.reserved) == (1, {7})
    assert not parts.dispatcher.holds(ScheduleEntry(8, next_hour_ms))


def test_what_comes_back_from_a_consumer_keeps_its_order_and_counts_its_attempts() -> None:
    one = subscription()
    parts = Parts(one)
    parts.fire(*((seq, START_MS) for seq in range(1, 6)))
    pulled = pull_all(parts, one)
    parts.fire((9, START_MS))
    parts.dispatcher.return_leased(pulled, np.array([0, 2, 3]))
    assert parts.waiting(one) == [1, 3, 4, 9]
    queue = parts.dispatcher.queue(one)
    assert (queue.in_flight, queue.reserved) == (2, {2, 5})
    assert parts.hours.unsettled() == 6
    again = pull_all(parts, one)
    assert [(delivery.entry.seq, delivery.attempt) for delivery in again] == [
        (1, 2),
        (3, 2),
        (4, 2),
        (9, 1),
    ]
    parts.dispatcher.settle_leased(again, np.arange(4), NOW_MS)
    parts.dispatcher.settle_leased(pulled, np.array([1, 4]), NOW_MS)
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
    parts.dispatcher.on_read(handout, pulled, NOW_MS)
    parts.dispatcher.return_leased(pulled, np.arange(4))
    assert parts.waiting(one) == [1, 2, 3, 4]
    assert [batch.hour for batch in parts.dispatcher.queue(one).rows.slices()] == [HOUR, HOUR + 1]


def test_what_comes_back_twice_is_found_wherever_it_waits() -> None:
    one = subscription()
    parts = Parts(one)
    parts.fire((1, START_MS), (2, START_MS + 5), (3, START_MS + 7))
    parts.pull(one, 10)
    handout = parts.ports.handouts.pop()
    dues_ms = {3: START_MS + 7, 1: START_MS, 2: START_MS + 5}
    pulled = deliveries(*(delivery(seq, due_ms) for seq, due_ms in dues_ms.items()))
    parts.dispatcher.on_read(handout, pulled, NOW_MS)
    parts.dispatcher.return_leased(pulled, np.arange(3))
    assert parts.waiting(one) == [1, 2, 3]
    for seq, due_ms in dues_ms.items():
        assert parts.dispatcher.holds(ScheduleEntry(seq, due_ms))


def test_what_was_leased_from_a_deleted_subscription_is_recorded_or_adopted() -> None:
    gone, heir = subscription(1), subscription(2, created_ms=NOW_MS)
    parts = Parts(gone, heir)
    parts.fire((1, START_MS), (2, START_MS), (3, START_MS))
    pulled = pull_all(parts, gone)
    parts.change(subscription(1, deleted=True))
    parts.dispatcher.settle_leased(pulled, np.array([1]), NOW_MS)
    assert parts.settled() == [(2, 1, Outcome.DELIVERED)]
    parts.dispatcher.return_leased(pulled, np.array([0, 2]))
    parts.read()
    assert parts.waiting(heir) == [1, 3]
    assert parts.hours.unsettled() == 2


def test_a_message_that_cannot_be_read_keeps_its_hour_open_and_its_place_free() -> None:
    parts = Parts(webhook(max_in_flight=2))
    parts.fire((5, START_MS), (6, START_MS))
    parts.read(5)
    assert [sent.entry.seq for _, sent in parts.ports.sent] == [6]
    assert parts.dispatcher.in_flight_count() == 1
    # Else it would be looked up as delivered.
    assert parts.dispatcher.holds(ScheduleEntry(5, START_MS))
    assert parts.hours.unsettled() == 2


def test_a_delivery_is_settled_in_the_hour_of_its_row() -> None:
    parts = Parts(subscription())
    parts.fire((5, START_MS + 7))
    one = delivery(5, START_MS + 7, attempt=3, message_seq=2, published_due_ms=1)
    parts.dispatcher.settle_delivered(one, NOW_MS)
    [(hour, row)] = parts.ports.settled
    assert hour == HOUR
    assert DISPATCH_ROW.unpack(row) == (5, 2, START_MS + 7, NOW_MS, 1, 3, Outcome.DELIVERED, 0)
    assert len(row) == len(dispatch_row(5))


# ---- batches, rates and old rows -----------------------------------------------------------------


def posts(parts: Parts) -> list[list[int]]:
    return [[delivery.entry.seq for delivery in post] for post in parts.ports.posts]


def test_batches_leave_one_by_one_and_count_as_requests() -> None:
    hook = webhook(batch_max=3, max_in_flight=2)
    parts = Parts(hook)
    parts.fire(*((seq, START_MS) for seq in range(1, 9)))
    first = parts.read()
    second = parts.read()
    assert posts(parts) == [[1, 2, 3], [4, 5, 6]]
    assert parts.ports.handouts == []
    parts.dispatcher.end_request(first, is_answered=True)
    for one in first:
        parts.dispatcher.settle_delivered(one, NOW_MS)
    parts.dispatcher.pump(parts.dispatcher.queue(hook), NOW_MS)
    parts.read()
    assert posts(parts)[2:] == [[7, 8]]
    parts.dispatcher.end_request(second, is_answered=True)
    assert len(parts.dispatcher.queue(hook).posts) == 1


def test_what_failed_and_is_not_recorded_yet_keeps_its_place_in_the_bound() -> None:
    hook = webhook(batch_max=2, max_in_flight=1)
    parts = Parts(hook)
    parts.fire(*((seq, START_MS) for seq in range(1, 7)))
    first = parts.read()
    parts.dispatcher.end_request(first, is_answered=True)
    parts.dispatcher.pump(parts.dispatcher.queue(hook), NOW_MS)
    assert parts.ports.handouts == []
    for one in first:
        parts.dispatcher.release_delivery(one)
    parts.dispatcher.pump(parts.dispatcher.queue(hook), NOW_MS)
    assert len(parts.ports.handouts) == 1


def test_a_batch_of_which_nothing_can_be_read_frees_its_place() -> None:
    hook = webhook(batch_max=2, max_in_flight=1)
    parts = Parts(hook)
    parts.fire((1, START_MS), (2, START_MS), (3, START_MS))
    parts.read(1, 2)
    assert posts(parts) == []
    queue = parts.dispatcher.queue(hook)
    assert (queue.in_flight, queue.posts) == (1, {3})
    parts.read()
    assert posts(parts) == [[3]]


def test_a_batch_that_is_too_long_leaves_the_rest_in_front(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delayserver.delivery.dispatcher.BATCH_BYTES_MAX", 5)
    hook = webhook(batch_max=4, max_in_flight=1)
    parts = Parts(hook)
    parts.fire(*((seq, START_MS) for seq in range(1, 6)), payload_bytes=2)
    sent = parts.read()
    assert posts(parts) == [[1, 2]]
    assert parts.waiting(hook) == [3, 4, 5]
    queue = parts.dispatcher.queue(hook)
    assert (queue.in_flight, queue.reserved) == (2, {1, 2})
    parts.dispatcher.end_request(sent[:2], is_answered=True)
    for one in sent[:2]:
        parts.dispatcher.settle_delivered(one, NOW_MS)
    parts.dispatcher.pump(queue, NOW_MS)
    parts.read()
    assert posts(parts) == [[1, 2], [3, 4]]


def test_a_pull_gets_no_more_bytes_than_an_answer_holds_and_the_next_one_the_rest() -> None:
    one = subscription(1)
    parts = Parts(one, answer_max_bytes=100)
    parts.fire(*((seq, START_MS) for seq in range(1, 6)), payload_bytes=40)
    parts.fire((6, START_MS), payload_bytes=400)
    queue = parts.dispatcher.queue(one)
    for expected in ([1, 2], [3, 4], [5], [6]):
        parts.pull(one, 1000)
        assert parts.handouts().pop() == expected
        [left] = parts.ports.handouts
        assert queue.in_flight == expected[-1]
        assert left.attempts == {}
        parts.read()
    assert queue.count == 0


def test_consumers_that_wait_share_what_is_too_long_for_one_answer() -> None:
    one = subscription(1)
    parts = Parts(one, answer_max_bytes=100)
    for _ in range(2):
        parts.pull(one, 1000)
    parts.fire(*((seq, START_MS) for seq in range(1, 6)), payload_bytes=40)
    assert parts.handouts() == [[1, 2], [3, 4]]
    assert parts.waiting(one) == [5]


def test_webhooks_and_what_is_given_up_are_read_a_few_bytes_at_a_time() -> None:
    hook, strict = webhook(max_in_flight=9), subscription(2, drop_older_than_ms=1)
    parts = Parts(hook, strict, answer_max_bytes=100)
    parts.fire(*((seq, START_MS) for seq in range(1, 6)), payload_bytes=40)
    assert parts.handouts() == [[1, 2], [1, 2]]
    parts.read()
    assert parts.handouts() == [[1, 2], [3, 4]]


def test_a_subscription_that_stops_batching_while_one_is_read_sends_them_one_by_one() -> None:
    hook = webhook(batch_max=2)
    parts = Parts(hook)
    parts.fire((1, START_MS), (2, START_MS))
    parts.change(webhook())
    parts.read()
    assert posts(parts) == []
    parts.read()
    assert posts(parts) == [[1], [2]]
    assert not parts.dispatcher.queue(hook).posts


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
            parts.dispatcher.release_delivery(one)
        parts.dispatcher.pump(parts.dispatcher.queue(hook), NOW_MS)
    assert slices == [[1, 2], [3, 4], [5], [6]]
    assert [delivery.entry.seq for delivery, _ in parts.ports.dropped] == [1, 2, 3, 4, 5]
    reason = "older than 500ms when it could have been delivered"
    assert {why for _, why in parts.ports.dropped} == {reason}
    assert posts(parts) == [[6]]
    queue = parts.dispatcher.queue(hook)
    assert (queue.dropping, queue.in_flight, queue.reserved) == (set(), 0, set())


def test_what_a_consumer_does_not_pull_in_time_is_given_up() -> None:
    pull = subscription(drop_older_than_ms=2_000)
    parts = Parts(pull)
    parts.fire((1, START_MS))
    assert parts.ports.handouts == []
    # Its age is that by the clock, also if the clock is set.
    assert parts.dispatcher.wake(NOW_MS) == START_MS + 2_001 - NOW_MS
    assert parts.dispatcher.wake(NOW_MS - 500) == START_MS + 2_001 - NOW_MS + 500
    parts.dispatcher.wake(START_MS + 2_001)
    parts.read()
    assert len(parts.ports.dropped) == 1


def test_the_engine_is_told_when_rows_may_leave_earlier_than_it_knows() -> None:
    hook = webhook(rate_per_s=10.0, rate_burst=1)
    parts = Parts(hook)
    parts.fire((1, START_MS), (2, START_MS), (3, START_MS))
    [first] = parts.read()
    parts.turn()
    assert parts.ports.ticks == 1
    parts.dispatcher.settle_delivered(first, NOW_MS)
    parts.dispatcher.pump(parts.dispatcher.queue(hook), NOW_MS)
    assert parts.ports.ticks == 1
    wait_ms = parts.dispatcher.wake(NOW_MS)
    assert wait_ms is not None
    assert 100 <= wait_ms <= 101
    assert parts.ports.handouts == []
    parts.wait(wait_ms)
    parts.dispatcher.wake(NOW_MS)
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
            parts.dispatcher.settle_delivered(one, NOW_MS)
    # Somebody has it looked at, about when the next may leave.
    parts.stopwatch.shows_ms, parts.stopwatch.step_ms = looked_ms, 1
    parts.dispatcher.pump(parts.dispatcher.queue(hook), NOW_MS)
    parts.stopwatch.step_ms = 0
    if not parts.ports.handouts:
        wait_ms = parts.dispatcher.wake(NOW_MS)
        assert wait_ms is not None
        parts.wait(parts.stopwatch.shows_ms + wait_ms)
        parts.dispatcher.wake(NOW_MS)
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
            parts.dispatcher.settle_delivered(one, NOW_MS)
        parts.turn()
    now_ms = NOW_MS + set_by_ms
    left_ms = parts.dispatcher.wake(now_ms)
    assert left_ms is not None and left_ms <= wait_ms
    parts.wait(wait_ms - 2)
    parts.dispatcher.wake(now_ms)
    assert parts.ports.handouts == []
    parts.wait(wait_ms)
    parts.dispatcher.wake(now_ms)
    assert parts.handouts() == [[rows]]


def test_a_pull_that_was_answered_is_no_work_for_the_garbage_collector() -> None:
    """What answers knows the pull, so that it can end it: such a ring holds up the event loop."""
    mine = subscription()
    parts = Parts(mine)
    queue = parts.dispatcher.queue(mine)
    answered: list[Pulled] = []

    def pull() -> None:
        def answer(pulled: Pulled) -> None:
            answered.append(pulled)
            assert fetch.is_completed

        fetch = parts.dispatcher.request(queue, PullRequest(10, 60_000, 1000, answer))

    for _ in range(50):
        pull()
    gc.collect()
    parts.wait(1001)
    assert len(answered) == 50
    parts.dispatcher.fetches._purgatory.reap()
    assert gc.collect() < 50


def test_others_are_told_of_what_may_leave() -> None:
    mine, hook = subscription(1), webhook(2)
    parts = Parts(mine, hook)
    dispatcher = parts.dispatcher
    told: list[tuple[int, int | None]] = []
    dispatcher.on_ready = lambda number: told.append((number, dispatcher.ready(number)))
    parts.fire((5, START_MS), (6, START_MS))
    assert told == [(1, 2)]
    # Who waits here is served before.
    for _ in range(2):
        parts.pull(mine, 10)
    parts.fire((7, START_MS))
    parts.fire((8, START_MS))
    assert told[1:] == [(1, 0), (1, 1)]
    paused = subscription(1, paused=True)
    parts.change(paused)
    parts.fire((9, START_MS))
    assert dispatcher.ready(1) == 0
    parts.change(mine)
    assert told[3:] == [(1, 2)]
    dispatcher.drain()
    assert dispatcher.ready(1) is None
    dispatcher.draining = False
    parts.change(subscription(1, deleted=True))
    assert dispatcher.ready(1) is None
    assert [queue.subscription.id for queue in dispatcher.queues()] == [2]


def test_a_pull_may_want_fewer_bytes_than_others() -> None:
    mine = subscription()
    parts = Parts(mine, answer_max_bytes=1000)
    parts.fire(*((seq, START_MS) for seq in range(1, 21)), payload_bytes=100)
    for max_bytes, count in ((0, 10), (350, 3), (50, 1), (2000, 6)):
        request = PullRequest(100, 30_000, 0, lambda pulled: None, max_bytes=max_bytes)
        parts.dispatcher.request(parts.dispatcher.queue(mine), request)
        assert len(parts.handouts()[-1]) == count


# ---- under a lease -------------------------------------------------------------------------------


class Lease:
    """Whether deliveries may leave."""

    def __init__(self, parts: Parts) -> None:
        self.holds = True
        parts.dispatcher.may_deliver = lambda: self.holds


def test_nothing_leaves_without_a_lease_and_all_does_with_it_again() -> None:
    hook, queue = webhook(1), subscription(2)
    parts = Parts(hook, queue)
    lease = Lease(parts)
    lease.holds = False
    parts.fire((5, START_MS), (6, START_MS))
    parts.pull(queue, 10, wait_ms=60_000)
    assert not parts.ports.handouts and not parts.answers
    assert parts.dispatcher.ready(queue.id) == 0
    lease.holds = True
    parts.wait(HELD_LOOK_MS)
    assert parts.dispatcher.wake(NOW_MS) is not None or parts.ports.handouts
    assert sorted(parts.handouts()) == [[5, 6], [5, 6]]
    assert parts.hours.unsettled() == 4


def test_a_pull_that_comes_without_a_lease_is_answered_when_there_is_one() -> None:
    """Nothing else happens to the queue: it was looked at before, and with a lease."""
    subscribed = subscription(1)
    parts = Parts(subscribed)
    lease = Lease(parts)
    parts.fire((5, START_MS))
    lease.holds = False
    parts.pull(subscribed, 10, wait_ms=60_000)
    lease.holds = True
    parts.wait(HELD_LOOK_MS)
    parts.dispatcher.wake(NOW_MS)
    assert parts.handouts() == [[5]]


def test_a_pull_without_a_lease_is_answered_when_its_time_is_up() -> None:
    queue = subscription(1)
    parts = Parts(queue)
    Lease(parts).holds = False
    parts.fire((5, START_MS))
    parts.pull(queue, 10, wait_ms=100)
    parts.wait(100)
    assert parts.answers == [[]]
    assert parts.waiting(queue) == [5]


@pytest.mark.parametrize("batch_max", [0, 2], ids=["one by one", "batch"])
def test_webhooks_that_were_read_go_back_and_were_no_attempt(batch_max: int) -> None:
    hook = webhook(1, batch_max=batch_max, max_in_flight=2)
    parts = Parts(hook)
    lease = Lease(parts)
    parts.fire((5, START_MS), (6, START_MS + 1), (7, START_MS + 2))
    lease.holds = False
    while parts.ports.handouts:
        parts.read()
    queue = parts.dispatcher.queue(hook)
    assert not parts.ports.posts
    assert sorted(parts.waiting(hook)) == [5, 6, 7]
    assert (queue.in_flight, queue.reserved, queue.posts, queue.is_reading) == (0, set(), set(), 0)
    lease.holds = True
    parts.wait(HELD_LOOK_MS)
    parts.dispatcher.wake(NOW_MS)
    sent = []
    while parts.ports.handouts:
        for one in parts.read():
            sent.append((one.entry.seq, one.origin.attempt))
            parts.dispatcher.end_request([one], is_answered=True)
            parts.dispatcher.settle_delivered(one, NOW_MS)
        parts.dispatcher.pump(queue, NOW_MS)
    assert sorted(sent) == [(5, 1), (6, 1), (7, 1)]
    assert not queue.attempts
    assert parts.hours.unsettled() == 0


def test_what_was_read_for_a_pull_goes_back_and_was_no_attempt() -> None:
    subscribed = subscription(1)
    parts = Parts(subscribed)
    lease = Lease(parts)
    parts.fire((5, START_MS), (6, START_MS + 1))
    parts.pull(subscribed, 10)
    lease.holds = False
    parts.read()
    assert parts.answers == [[]]
    assert not parts.ports.handed_out
    assert parts.waiting(subscribed) == [5, 6]
    assert parts.hours.unsettled() == 2
    lease.holds = True
    parts.pull(subscribed, 10)
    read = parts.read_columns()
    assert [(one.entry.seq, one.origin.attempt) for one in read] == [(5, 1), (6, 1)]
    parts.dispatcher.settle_leased(read, np.arange(2), NOW_MS)
    assert not parts.dispatcher.queue(subscribed).attempts
    assert parts.hours.unsettled() == 0


def test_a_second_attempt_that_goes_back_is_still_the_second() -> None:
    subscribed = subscription(1)
    parts = Parts(subscribed)
    lease = Lease(parts)
    parts.fire((5, START_MS))
    parts.pull(subscribed, 10)
    read = parts.read_columns()
    parts.dispatcher.return_leased(read, np.arange(1))
    parts.pull(subscribed, 10)
    lease.holds = False
    parts.read()
    lease.holds = True
    parts.pull(subscribed, 10)
    (again,) = parts.read()
    assert again.origin.attempt == 2


def test_what_was_read_for_somebody_who_is_gone_goes_back() -> None:
    subscribed = subscription(1)
    parts = Parts(subscribed)
    lease = Lease(parts)
    parts.fire((5, START_MS))
    fetch = parts.pull(subscribed, 10)
    lease.holds = False
    fetch.cancel()
    parts.read()
    assert not parts.answers
    assert parts.waiting(subscribed) == [5]


def test_what_is_unreadable_does_not_go_back() -> None:
    hook = webhook(1)
    parts = Parts(hook)
    lease = Lease(parts)
    parts.fire((5, START_MS), (6, START_MS))
    lease.holds = False
    parts.read(5)
    assert parts.waiting(hook) == [6]
    assert parts.dispatcher.queue(hook).in_flight == 0


def test_what_is_too_old_is_given_up_without_a_lease() -> None:
    """Nobody is asked to take it; whether it counts is decided by the log."""
    hook = webhook(1, drop_older_than_ms=1)
    parts = Parts(hook)
    lease = Lease(parts)
    parts.fire((5, START_MS))
    lease.holds = False
    parts.read()
    assert [one.entry.seq for one, _ in parts.ports.dropped] == [5]


# ---- sinks that take many ----------------------------------------------------------------------


def to_topic(**more: Any) -> Subscription:
    target = KafkaTarget(bootstrap="b:1", topic="t")
    return subscription(type="kafka", target=target, **{"max_in_flight": 3, **more})


def test_what_leaves_together_goes_to_a_topic_together() -> None:
    parts = Parts(to_topic())
    parts.fire((1, START_MS), (2, START_MS), (3, START_MS), (4, START_MS))
    assert parts.handouts() == [[1, 2, 3]]
    read = parts.read()
    assert [[one.entry.seq for one in post] for post in parts.ports.posts] == [[1, 2, 3]]
    # Each has a result of its own, and its place is free then.
    parts.dispatcher.settle_delivered(read[1], NOW_MS)
    parts.dispatcher.pump(parts.dispatcher.queue(to_topic()), NOW_MS)
    assert parts.handouts() == [[4]]


def test_what_is_recorded_already_is_not_recorded_again() -> None:
    parts = Parts(to_topic())
    parts.fire((1, START_MS))
    (one,) = parts.read()
    parts.dispatcher.settle_delivered(one, NOW_MS, Recorded(NOW_MS - 50, 9))
    assert parts.ports.settled == []
    ((hour, row, offset),) = parts.ports.recorded
    assert (hour, offset) == (HOUR, 9)
    seq, _, _, settled_ms, *_ = DISPATCH_ROW.unpack(row)
    assert (seq, settled_ms) == (1, NOW_MS - 50)
    assert parts.hours.unsettled_by_hour().get(HOUR, 0) == 0


# ---- messages with options --------------------------------------------------------------------

WITH_OPTIONS = 1 | route_bits(FLAG_OPTIONS)
OVER = MessageOptions(ttl_ms=NOW_MS - START_MS)
"""What is due at START_MS, and is read at NOW_MS, has just expired."""
FINE = MessageOptions(ttl_ms=NOW_MS - START_MS + 1)


def test_a_webhook_is_not_sent_what_has_expired() -> None:
    parts = Parts(webhook())
    parts.fire((1, START_MS), (2, START_MS), (3, START_MS), route=WITH_OPTIONS)
    parts.read_columns(options={1: OVER, 2: FINE, 3: OVER})
    assert [one.entry.seq for _, one in parts.ports.sent] == [2]
    assert [(one.entry.seq, why) for one, why in parts.ports.dropped] == [
        (1, "expired"),
        (3, "expired"),
    ]
    # Until that is recorded they are on their way.
    assert parts.dispatcher.in_flight_count() == 3
    assert parts.hours.unsettled() == 3


def test_a_batch_goes_without_what_has_expired_and_not_at_all_where_nothing_is_left() -> None:
    receiver = webhook(batch_max=2)
    parts = Parts(receiver)
    parts.fire(*((seq, START_MS) for seq in (1, 2, 3, 4)), route=WITH_OPTIONS)
    parts.read_columns(options={1: OVER})
    parts.read_columns(options={3: OVER, 4: OVER})
    assert [[one.entry.seq for one in post] for post in parts.ports.posts] == [[2]]
    assert len(parts.dispatcher.queue(receiver).posts) == 1
    assert [one.entry.seq for one, _ in parts.ports.dropped] == [1, 3, 4]


def test_a_consumer_gets_what_comes_behind_what_has_expired() -> None:
    consumer = subscription()
    parts = Parts(consumer)
    parts.fire(*((seq, START_MS) for seq in (1, 2, 3, 4)), route=WITH_OPTIONS)
    parts.pull(consumer, 2)
    while parts.ports.handouts or parts.ports.turns:
        parts.read_columns(options={1: OVER, 2: OVER, 3: OVER, 4: FINE})
    [(_, given)] = parts.ports.handed_out
    assert [one.entry.seq for one in given] == [4]
    assert sorted(one.entry.seq for one, _ in parts.ports.dropped) == [1, 2, 3]


def test_a_consumer_gets_nothing_where_all_has_expired() -> None:
    consumer = subscription()
    parts = Parts(consumer)
    parts.fire((1, START_MS), route=WITH_OPTIONS)
    parts.pull(consumer, 2)
    parts.read_columns(options={1: OVER})
    assert not parts.ports.handed_out and not parts.answers
    parts.wait(1001)
    assert parts.answers == [[]]


def test_what_is_taken_back_under_another_lease_does_not_expire_here() -> None:
    """Who may not deliver may not give up, either."""
    consumer = subscription()
    parts = Parts(consumer)
    parts.fire((1, START_MS), route=WITH_OPTIONS)
    parts.pull(consumer, 1)
    parts.dispatcher.may_deliver = lambda: False
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


def test_what_waits_in_vain_is_given_up_when_its_time_is_over_though_nobody_asks() -> None:
    consumer = subscription()
    parts = Parts(consumer)
    parts.fire((1, START_MS), (2, START_MS), (3, START_MS), route=WITH_OPTIONS)
    parts.fire((4, START_MS))
    long = MessageOptions(ttl_ms=HOUR_MS)
    parts.read_columns(options={1: FINE, 2: long, 3: FINE})
    assert (parts.waiting(consumer), parts.ports.handouts) == ([1, 2, 3, 4], [])
    over_ms = -(-(NOW_MS + 1) // STEP_MS) * STEP_MS
    assert parts.dispatcher.wake(NOW_MS) == over_ms - NOW_MS
    parts.dispatcher.wake(over_ms - 1)
    assert parts.ports.handouts == []
    parts.dispatcher.wake(over_ms)
    assert parts.waiting(consumer) == [2, 4]
    assert all(parts.dispatcher.holds(ScheduleEntry(seq, START_MS)) for seq in (1, 2, 3, 4))
    parts.read_columns(options={1: FINE, 3: FINE})
    assert [(one.entry.seq, why) for one, why in parts.ports.dropped] == [
        (1, "expired"),
        (3, "expired"),
    ]


def test_what_waits_for_a_paused_subscription_expires_all_the_same() -> None:
    parts = Parts(webhook(paused=True))
    parts.fire((1, START_MS), route=WITH_OPTIONS)
    parts.read_columns(options={1: OVER})
    parts.read_columns(options={1: OVER})
    assert [one.entry.seq for one, _ in parts.ports.dropped] == [1]
    assert parts.dispatcher.in_flight_count() == 0
    assert parts.ports.sent == []


def test_what_leaves_at_once_is_not_read_to_find_out_when_it_expires() -> None:
    parts = Parts(webhook())
    parts.fire((1, START_MS), route=WITH_OPTIONS)
    parts.read(options={1: FINE})
    parts.turn()
    assert parts.ports.handouts == []


def test_what_comes_back_is_known_to_expire_or_found_out() -> None:
    consumer = subscription()
    parts = Parts(consumer)
    parts.pull(consumer, 1)
    parts.fire((1, START_MS), route=WITH_OPTIONS)
    leased = parts.read_columns(options={1: FINE})
    parts.dispatcher.return_leased(leased, np.array([0]))
    parts.dispatcher.pump(parts.dispatcher.queue(consumer), NOW_MS)
    parts.read_columns(options={1: FINE})
    parts.dispatcher.wake(NOW_MS + STEP_MS)
    assert parts.handouts() == [[1]]
    assert parts.waiting(consumer) == []


def test_a_subscription_that_is_deleted_while_rows_are_looked_at_is_no_concern() -> None:
    consumer = subscription()
    parts = Parts(consumer)
    parts.fire((1, START_MS), route=WITH_OPTIONS)
    parts.turn()
    [look] = parts.ports.handouts
    assert look.is_look
    parts.change(subscription(deleted=True))
    parts.ports.handouts.clear()
    parts.dispatcher.on_read(look, deliveries(delivery(1)), NOW_MS)
    assert parts.ports.dropped == []


# ---- a delivery that waits for a connection may not begin any more ----------------------------


def paused(parts: Parts, hook: Subscription) -> None:
    parts.change(msgspec.structs.replace(hook, paused=True))


def with_another_url(parts: Parts, hook: Subscription) -> None:
    parts.change(msgspec.structs.replace(hook, url="http://127.0.0.1:2/"))


def deleted(parts: Parts, hook: Subscription) -> None:
    parts.change(msgspec.structs.replace(hook, deleted=True))


def without_lease(parts: Parts, hook: Subscription) -> None:
    parts.dispatcher.may_deliver = lambda: False


def stopping(parts: Parts, hook: Subscription) -> None:
    parts.dispatcher.drain()


def asked_to_wait(parts: Parts, hook: Subscription) -> None:
    parts.dispatcher.hold(hook.id, 1_000)


def connecting(hook: Subscription, *seqs_: int) -> tuple[Parts, list[DueDelivery]]:
    """Deliveries that have left their queue, and wait for a connection."""
    parts = Parts(hook)
    parts.ports.begin = None
    parts.fire(*((seq, START_MS) for seq in seqs_))
    return parts, parts.read()


def assert_may_not_begin(change: Callable[[Parts, Subscription], None], batch_max: int) -> None:
    """Neither may a request that has waited for a connection while something changed."""
    hook = webhook(batch_max=batch_max)
    parts, (one, other) = connecting(hook, 1, 2)
    request = [one, other] if batch_max else [one]
    change(parts, hook)
    assert not parts.dispatcher.may_begin(hook, request, NOW_MS)
    parts.dispatcher.end_request(request, is_answered=True)
    for each in request:
        parts.dispatcher.return_delivery(each, each.attempt)
    queue = parts.dispatcher.queues()
    if change is not deleted:
        assert [one.in_flight for one in queue] == [2 - len(request)]
        assert parts.waiting(hook)[: len(request)] == [one.entry.seq for one in request]


SINGLE_AND_BATCH = pytest.mark.parametrize("batch_max", [0, 2])


@SINGLE_AND_BATCH
def test_a_pause_holds_from_its_answer_on(batch_max: int) -> None:
    assert_may_not_begin(paused, batch_max)


@SINGLE_AND_BATCH
def test_a_deletion_holds_from_its_answer_on(batch_max: int) -> None:
    assert_may_not_begin(deleted, batch_max)


@SINGLE_AND_BATCH
def test_a_new_url_holds_from_its_answer_on(batch_max: int) -> None:
    assert_may_not_begin(with_another_url, batch_max)


@SINGLE_AND_BATCH
def test_no_request_begins_without_the_lease_of_the_shard(batch_max: int) -> None:
    assert_may_not_begin(without_lease, batch_max)


@SINGLE_AND_BATCH
@pytest.mark.parametrize("change", [stopping, asked_to_wait])
def test_no_request_begins_after(
    change: Callable[[Parts, Subscription], None], batch_max: int
) -> None:
    assert_may_not_begin(change, batch_max)


def test_no_delivery_begins_after_the_time_to_live() -> None:
    hook = webhook()
    parts = Parts(hook)
    parts.ports.begin = None
    parts.fire((1, NOW_MS - 10), route=1 | route_bits(FLAG_OPTIONS))
    (one,) = parts.read(options={1: MessageOptions(ttl_ms=50)})
    assert parts.dispatcher.may_begin(hook, [one], one.origin.due_ms + 49)
    assert not parts.dispatcher.may_begin(hook, [one], one.origin.due_ms + 50)


def test_what_waits_for_a_connection_uses_up_no_more_of_a_rate_than_its_burst() -> None:
    hook = webhook(rate_per_s=10.0, rate_burst=2)
    parts, waits = connecting(hook, *range(1, 9))
    for passed_ms in range(0, 10_000, 100):
        parts.wait(passed_ms)
        parts.dispatcher.wake(NOW_MS)
        parts.turn()
    # As long as no connection is there, no others leave.
    assert [one.entry.seq for one in waits] == [1, 2]
    assert parts.ports.handouts == []
    for one in waits:
        assert parts.dispatcher.may_begin(hook, [one], NOW_MS)
    parts.turn()
    assert parts.ports.handouts == []
    parts.wait(10_001)
    wait_ms = parts.dispatcher.wake(NOW_MS)
    assert wait_ms is not None and 90 <= wait_ms <= 110
    parts.wait(10_001 + wait_ms)
    parts.dispatcher.wake(NOW_MS)
    assert parts.handouts() == [[3]]


def test_what_could_not_begin_gives_back_its_part_of_the_rate() -> None:
    hook = webhook(rate_per_s=1.0, rate_burst=1)
    parts, (one,) = connecting(hook, 1, 2)
    parts.dispatcher.end_request([one], is_answered=True)
    parts.dispatcher.return_delivery(one, one.attempt)
    parts.dispatcher.pump(parts.dispatcher.queue(hook), NOW_MS)
    assert parts.handouts() == [[1]]


@pytest.mark.parametrize("rate_per_s", [0.0, 1.0])
def test_a_new_rate_holds_from_its_answer_on(
    rate_per_s: float,
) -> None:
    hook = webhook(rate_per_s=rate_per_s, rate_burst=int(rate_per_s))
    parts, waits = connecting(hook, 1, 2, 3)
    parts.change(msgspec.structs.replace(hook, rate_per_s=2.0, rate_burst=2))
    for one in waits:
        assert not parts.dispatcher.may_begin(hook, [one], NOW_MS)
        parts.dispatcher.end_request([one], is_answered=True)
        parts.dispatcher.return_delivery(one, one.attempt)
    queue = parts.dispatcher.queue(hook)
    parts.dispatcher.pump(queue, NOW_MS)
    parts.turn()
    assert sum(map(len, parts.handouts())) == 2
    assert not queue.unreserved


def test_a_queue_that_is_held_leaves_when_the_receiver_said() -> None:
    hook = webhook(max_in_flight=1)
    parts, (one,) = connecting(hook, 1, 2)
    assert parts.dispatcher.may_begin(hook, [one], NOW_MS)
    parts.dispatcher.end_request([one], is_answered=True)
    parts.dispatcher.hold(hook.id, 1_000)
    parts.dispatcher.return_delivery(one, one.attempt)
    parts.dispatcher.pump(parts.dispatcher.queue(hook), NOW_MS)
    assert parts.handouts() == []
    assert parts.dispatcher.wake(NOW_MS) == 1_000
    parts.wait(1_000)
    parts.dispatcher.wake(NOW_MS)
    assert parts.handouts() == [[1]]


def test_another_receiver_is_not_held() -> None:
    hook = webhook()
    parts, _ = connecting(hook, 1)
    parts.dispatcher.hold(hook.id, 1_000)
    with_another_url(parts, hook)
    parts.fire((2, START_MS))
    assert parts.handouts() == [[2]]


# ---- webhooks share connections ---------------------------------------------------------------


def test_webhooks_leave_as_far_as_there_are_places_and_take_turns() -> None:
    one, other = webhook(1), webhook(2, subject="refund")
    parts = Parts(one, other, webhooks_max=2)
    parts.fire(*((seq, START_MS) for seq in range(1, 5)))
    assert parts.handouts() == [[1, 2]]
    sent = parts.read()
    parts.fire((7, START_MS), (8, START_MS), route=2)
    assert parts.handouts() == []
    assert parts.waiting(other) == [7, 8]  # There they can expire, or be paused.
    left: list[list[int]] = []
    while sent:
        done = sent.pop(0)
        parts.dispatcher.end_request([done], is_answered=True)
        parts.dispatcher.settle_delivered(done, NOW_MS)
        parts.turn()
        for _ in parts.handouts():
            left += parts.handouts()[:1]
            sent += parts.read()
    assert left == [[3], [7], [4], [8]]
    assert parts.dispatcher.connections.free == 2


@pytest.mark.parametrize("batch_max", [0, 3])
@pytest.mark.parametrize("fate", ["unread", "expired", "deleted", "paused", "sent"])
def test_no_place_is_lost(fate: str, batch_max: int) -> None:
    hook = webhook(batch_max=batch_max)
    parts = Parts(hook, webhooks_max=10)
    options = {seq: MessageOptions(ttl_ms=1) for seq in (1, 2, 3)} if fate == "expired" else None
    route = 1 | route_bits(FLAG_OPTIONS) if options else 1
    parts.fire((1, START_MS), (2, START_MS), (3, START_MS), route=route)
    assert parts.dispatcher.connections.free == (9 if batch_max else 7)
    if fate == "deleted":
        deleted(parts, hook)
    elif fate == "paused":
        paused(parts, hook)
    unreadable = (1, 2, 3) if fate == "unread" else ()
    sent = parts.read(*unreadable, options=options)
    if fate == "sent":
        for request in [sent] if batch_max else [[one] for one in sent]:
            parts.dispatcher.end_request(request, is_answered=True)
    assert parts.dispatcher.connections.free == 10


# ---- what failed together goes apart ----------------------------------------------------------


def sizes(parts: Parts) -> list[int]:
    return [len(post) for post in parts.ports.posts]


@pytest.mark.parametrize(
    ("attempt", "expected"), [(1, [8]), (2, [4, 4]), (3, [2, 2, 2, 2]), (4, [1] * 8), (5, [1] * 8)]
)
def test_a_batch_that_failed_is_tried_in_halves_and_then_one_by_one(
    attempt: int, expected: list[int]
) -> None:
    hook = webhook(batch_max=8, max_attempts=5)
    parts = Parts(hook)
    parts.fire(*((seq, START_MS) for seq in range(1, 9)))
    parts.read(attempt=attempt)
    assert sizes(parts) == expected
    assert parts.dispatcher.connections.taken(hook.id) == len(expected)


def test_a_batch_that_failed_before_its_last_attempt_is_tried_one_by_one() -> None:
    hook = webhook(batch_max=8, max_attempts=2)
    parts = Parts(hook)
    parts.fire(*((seq, START_MS) for seq in range(1, 5)))
    parts.read(attempt=2)
    assert sizes(parts) == [1] * 4


def test_parts_of_a_batch_without_a_connection_wait_in_their_queue() -> None:
    hook = webhook(batch_max=8, max_attempts=5)
    parts = Parts(hook, webhooks_max=2)
    parts.fire(*((seq, START_MS) for seq in range(1, 9)))
    parts.read(attempt=3)
    assert posts(parts) == [[1, 2], [3, 4]]
    assert parts.waiting(hook) == [5, 6, 7, 8]


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
                parts.dispatcher.settle_leased(one, np.arange(len(one)), NOW_MS)
            parts.turn()
            continue
        deaths += 1
        for one in held:
            which = np.arange(len(one))
            is_cause = parts.dispatcher.may_be_the_cause(one, which)
            [attempt, *_] = one.settled["attempt"].tolist()
            if is_cause and attempt >= attempts:
                dead[int(one.settled["seq"][0])] = attempt
                parts.dispatcher.settle_leased(one, which, NOW_MS)
            else:
                parts.dispatcher.return_leased(one, which, are_suspects=True)
        parts.turn()
    assert parts.dispatcher.queue(mine).count == 0
    return deaths, dead


@pytest.mark.parametrize(("pull_max", "concurrent"), [(20, 20), (1, 20), (1, 1), (3, 10), (40, 40)])
def test_a_message_that_ends_its_consumers_dies_alone(pull_max: int, concurrent: int) -> None:
    deaths, dead = poisoned(pull_max, concurrent)
    assert list(dead) == [7]
    assert deaths <= 6


def test_many_rows_are_looked_for_at_once() -> None:
    """As one by one: those that wait, are on their way, are orphans, or could not be read."""
    parts = Parts(subscription(1, type="webhook", max_in_flight=2), subscription(2))
    parts.fire(*[(seq, START_MS + seq) for seq in range(2, 9)])
    parts.fire((20, START_MS), route=9 | ROUTE_SUBSCRIPTION)  # its subscription is gone
    parts.dispatcher._unread.add(30)
    dispatcher = parts.dispatcher
    asked = [ScheduleEntry(seq, START_MS + (0 if seq > 9 else seq)) for seq in range(1, 32)]
    expected = {entry.seq for entry in asked if dispatcher.holds(entry)}
    assert expected == {*range(2, 9), 20, 30}
    assert dispatcher.holding([entry.seq for entry in asked]) == expected
    assert dispatcher.holding([]) == set()


# ---- consumers that may not read everything ------------------------------------------------------


def pull_of(parts: Parts, one: Subscription, *subjects: str, wait_ms: int = 0) -> None:
    """A pull of somebody who may read these subjects; none: all."""
    request = PullRequest(10, 30_000, wait_ms, lambda pulled: None, subjects=subjects)
    parts.dispatcher.request(parts.dispatcher.queue(one), request)


def test_what_a_consumer_may_not_read_waits_for_one_that_may() -> None:
    mine = subscription(subject="*")
    parts = Parts(mine)
    queue = parts.dispatcher.queue(mine)
    parts.fire((5, START_MS), (6, START_MS + 1))
    pull_of(parts, mine, "refund")
    parts.read()
    assert not parts.ports.handed_out
    assert (queue.count, queue.in_flight, parts.dispatcher.queued_count()) == (2, 0, 2)
    assert parts.dispatcher.holds(ScheduleEntry(5, START_MS))
    assert parts.dispatcher.oldest_due_ms() == START_MS == queue.first_ms()
    assert parts.dispatcher.ready(mine.id) == 2
    # It does not stand in the way of what comes behind, nor end a pull that waits.
    pull_of(parts, mine, "refund", wait_ms=1000)
    assert not parts.ports.handouts
    pull_of(parts, mine, "refund", "order.*")
    assert [one.entry.seq for one in parts.read()] == [5, 6]
    assert not queue.withheld


def test_what_a_consumer_may_not_read_goes_to_another_that_waits() -> None:
    mine = subscription(subject="*")
    parts = Parts(mine)
    pull_of(parts, mine, "refund", wait_ms=1000)
    pull_of(parts, mine, wait_ms=1000)
    parts.fire((5, START_MS))
    parts.read()
    assert [one.entry.seq for one in parts.read()] == [5]


@pytest.mark.parametrize("end", ["rows", "time", "gone"])
def test_a_consumer_waits_on_when_it_may_read_nothing_of_what_was_read(end: str) -> None:
    mine = subscription(subject="*")
    parts = Parts(mine)
    parts.fire((5, START_MS), (6, START_MS + 1))
    answers: list[Pulled] = []
    request = PullRequest(10, 30_000, 1000, answers.append, subjects=("refund",))
    fetch = parts.dispatcher.request(parts.dispatcher.queue(mine), request)
    parts.read()
    fetches = parts.dispatcher.fetches
    assert not parts.ports.handed_out and not answers and fetches.count() == 1
    if end == "gone":
        fetch.cancel()
        assert not answers and request.again is None
    elif end == "time":
        parts.wait(999)
        assert not answers
        parts.wait(1001)
        assert [len(one.tokens) for one in answers] == [0] and request.again is None
    else:
        request.subjects = ()
        parts.fire((7, START_MS))
        assert [one.entry.seq for one in parts.read()] == [5, 6, 7]
    assert fetches.count() == 0


def test_what_nobody_might_read_is_left_behind_with_its_subscription() -> None:
    mine = subscription(subject="*")
    parts = Parts(mine)
    parts.fire((5, START_MS))
    pull_of(parts, mine, "refund")
    parts.read()
    parts.change(msgspec.structs.replace(mine, deleted=True))
    assert parts.dispatcher.orphans.holds(ScheduleEntry(5, START_MS))


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


def test_limits_of_a_pulled_subscription_note_nothing_about_what_is_leased() -> None:
    one = subscription(1)
    parts = Parts(one)
    parts.fire((5, START_MS))
    queue = parts.dispatcher.queue(one)
    queue.hold([5])
    parts.change(msgspec.structs.replace(one, drop_older_than_ms=1_000_000))
    assert not queue.unreserved
    parts.change(webhook(1, rate_per_s=1.0, rate_burst=1))
    assert queue.unreserved == {5}
    queue.release_leased([5])
    assert not queue.unreserved
