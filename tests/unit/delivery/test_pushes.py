"""Pushes: rows of webhooks and brokers, from their queue to the sink."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from delayserver.delivery.handout import Handout
from delayserver.delivery.pump import HELD_LOOK_MS
from delayserver.delivery.slow_start import AT_ONCE, LOOK_MS
from delayserver.records.message import DueDelivery, MessageOptions, ScheduleEntry
from delayserver.records.subscriptions import Subscription
from delayserver.schedule.wheel_rows import (
    route_bits,
)
from storage.rows import FLAG_OPTIONS
from tests.unit.delivery.parts import NOW_MS, Lease, Parts, posts, to_topic, webhook
from tests.unit.fakes import (
    START_MS,
    counted,
    subscription,
)

WITH_OPTIONS = 1 | route_bits(FLAG_OPTIONS)
OVER = MessageOptions(ttl_ms=NOW_MS - START_MS)
"""What is due at START_MS, and is read at NOW_MS, has just expired."""
FINE = MessageOptions(ttl_ms=NOW_MS - START_MS + 1)
SINGLE_AND_BATCH = pytest.mark.parametrize("batch_max", [0, 2])


def test_a_webhook_has_no_more_in_flight_than_it_allows() -> None:
    one = webhook(max_in_flight=2)
    parts = Parts(one)
    parts.fire((5, START_MS), (6, START_MS), (7, START_MS))
    first, _ = parts.read()
    assert [sent.entry.seq for _, sent in parts.ports.sent] == [5, 6]
    assert counted(parts.dispatcher).in_flight == 2
    assert parts.dispatcher.holds(ScheduleEntry(5, START_MS))
    parts.dispatcher.pump.run(parts.dispatcher.queues.of(one), NOW_MS)
    assert parts.ports.handouts == []
    parts.dispatcher.settling.settle_delivered(first, NOW_MS)
    parts.dispatcher.pump.run(parts.dispatcher.queues.of(one), NOW_MS)
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
                    assert parts.dispatcher.pushes.may_begin(one, carried, NOW_MS)
            parts.turn()
        return len(parts.ports.sent) - before

    assert leave() == AT_ONCE
    for _ in range(3):
        assert parts.dispatcher.pump.wake(NOW_MS) == LOOK_MS
        parts.wait(parts.stopwatch.shows_ms + LOOK_MS)
        parts.dispatcher.pump.wake(NOW_MS)
        assert leave() == LOOK_MS
    for _, answered in parts.ports.sent[:10]:
        parts.dispatcher.pushes.end_request([answered], is_answered=True)
        parts.dispatcher.settling.settle_delivered(answered, NOW_MS)
    parts.dispatcher.pump.run(parts.dispatcher.queues.of(one), NOW_MS)
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
        parts.dispatcher.settling.settle_delivered(delivered, NOW_MS)
        parts.dispatcher.pump.run(parts.dispatcher.queues.of(one), NOW_MS)
    assert [handout.count for handout in parts.ports.handouts] == [1]
    parts.read()
    assert [handout.count for handout in parts.ports.handouts] == [3]
    parts.read()
    assert [sent.entry.seq for _, sent in parts.ports.sent] == list(range(1, 9))


def test_batches_leave_one_by_one_and_count_as_requests() -> None:
    hook = webhook(batch_max=3, max_in_flight=2)
    parts = Parts(hook)
    parts.fire(*((seq, START_MS) for seq in range(1, 9)))
    first = parts.read()
    second = parts.read()
    assert posts(parts) == [[1, 2, 3], [4, 5, 6]]
    assert parts.ports.handouts == []
    parts.dispatcher.pushes.end_request(first, is_answered=True)
    for one in first:
        parts.dispatcher.settling.settle_delivered(one, NOW_MS)
    parts.dispatcher.pump.run(parts.dispatcher.queues.of(hook), NOW_MS)
    parts.read()
    assert posts(parts)[2:] == [[7, 8]]
    parts.dispatcher.pushes.end_request(second, is_answered=True)
    assert len(parts.dispatcher.queues.of(hook).posts) == 1


def test_a_batch_of_which_nothing_can_be_read_frees_its_place() -> None:
    hook = webhook(batch_max=2, max_in_flight=1)
    parts = Parts(hook)
    parts.fire((1, START_MS), (2, START_MS), (3, START_MS))
    parts.read(1, 2)
    assert posts(parts) == []
    queue = parts.dispatcher.queues.of(hook)
    assert (queue.in_flight, queue.posts) == (1, {3})
    parts.read()
    assert posts(parts) == [[3]]


def test_a_batch_that_is_too_long_leaves_the_rest_in_front(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delayserver.delivery.pushes.BATCH_BYTES_MAX", 5)
    hook = webhook(batch_max=4, max_in_flight=1)
    parts = Parts(hook)
    parts.fire(*((seq, START_MS) for seq in range(1, 6)), payload_bytes=2)
    sent = parts.read()
    assert posts(parts) == [[1, 2]]
    assert parts.waiting(hook) == [3, 4, 5]
    queue = parts.dispatcher.queues.of(hook)
    assert (queue.in_flight, queue.reserved) == (2, {1, 2})
    parts.dispatcher.pushes.end_request(sent[:2], is_answered=True)
    for one in sent[:2]:
        parts.dispatcher.settling.settle_delivered(one, NOW_MS)
    parts.dispatcher.pump.run(queue, NOW_MS)
    parts.read()
    assert posts(parts) == [[1, 2], [3, 4]]


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
    assert not parts.dispatcher.queues.of(hook).posts


@pytest.mark.parametrize("batch_max", [0, 2], ids=["one by one", "batch"])
def test_webhooks_that_were_read_go_back_and_were_no_attempt(batch_max: int) -> None:
    hook = webhook(1, batch_max=batch_max, max_in_flight=2)
    parts = Parts(hook)
    lease = Lease(parts)
    parts.fire((5, START_MS), (6, START_MS + 1), (7, START_MS + 2))
    lease.holds = False
    while parts.ports.handouts:
        parts.read()
    queue = parts.dispatcher.queues.of(hook)
    assert not parts.ports.posts
    assert sorted(parts.waiting(hook)) == [5, 6, 7]
    assert (queue.in_flight, queue.reserved, queue.posts, queue.is_reading) == (0, set(), set(), 0)
    lease.holds = True
    parts.wait(HELD_LOOK_MS)
    parts.dispatcher.pump.wake(NOW_MS)
    sent = []
    while parts.ports.handouts:
        for one in parts.read():
            sent.append((one.entry.seq, one.origin.attempt))
            parts.dispatcher.pushes.end_request([one], is_answered=True)
            parts.dispatcher.settling.settle_delivered(one, NOW_MS)
        parts.dispatcher.pump.run(queue, NOW_MS)
    assert sorted(sent) == [(5, 1), (6, 1), (7, 1)]
    assert not queue.attempts
    assert parts.hours.unsettled() == 0


def test_a_second_attempt_that_goes_back_is_still_the_second() -> None:
    subscribed = subscription(1)
    parts = Parts(subscribed)
    lease = Lease(parts)
    parts.fire((5, START_MS))
    parts.pull(subscribed, 10)
    read = parts.read_columns()
    parts.dispatcher.settling.return_leased(read, np.arange(1))
    parts.pull(subscribed, 10)
    lease.holds = False
    parts.read()
    lease.holds = True
    parts.pull(subscribed, 10)
    (again,) = parts.read()
    assert again.origin.attempt == 2


def test_what_leaves_together_goes_to_a_topic_together() -> None:
    parts = Parts(to_topic())
    parts.fire((1, START_MS), (2, START_MS), (3, START_MS), (4, START_MS))
    assert parts.handouts() == [[1, 2, 3]]
    read = parts.read()
    assert [[one.entry.seq for one in post] for post in parts.ports.posts] == [[1, 2, 3]]
    # Each has a result of its own, and its place is free then.
    parts.dispatcher.settling.settle_delivered(read[1], NOW_MS)
    parts.dispatcher.pump.run(parts.dispatcher.queues.of(to_topic()), NOW_MS)
    assert parts.handouts() == [[4]]


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
    assert counted(parts.dispatcher).in_flight == 3
    assert parts.hours.unsettled() == 3


def test_a_batch_goes_without_what_has_expired_and_not_at_all_where_nothing_is_left() -> None:
    receiver = webhook(batch_max=2)
    parts = Parts(receiver)
    parts.fire(*((seq, START_MS) for seq in (1, 2, 3, 4)), route=WITH_OPTIONS)
    parts.read_columns(options={1: OVER})
    parts.read_columns(options={3: OVER, 4: OVER})
    assert [[one.entry.seq for one in post] for post in parts.ports.posts] == [[2]]
    assert len(parts.dispatcher.queues.of(receiver).posts) == 1
    assert [one.entry.seq for one, _ in parts.ports.dropped] == [1, 3, 4]


def paused(parts: Parts, hook: Subscription) -> None:
    parts.change(msgspec.structs.replace(hook, paused=True))


def with_another_url(parts: Parts, hook: Subscription) -> None:
    parts.change(msgspec.structs.replace(hook, url="http://127.0.0.1:2/"))


def deleted(parts: Parts, hook: Subscription) -> None:
    parts.change(msgspec.structs.replace(hook, deleted=True))


def without_lease(parts: Parts, hook: Subscription) -> None:
    parts.dispatcher.queues.may_deliver = lambda: False


def stopping(parts: Parts, hook: Subscription) -> None:
    parts.dispatcher.drain()


def asked_to_wait(parts: Parts, hook: Subscription) -> None:
    parts.dispatcher.pushes.hold(hook.id, 1_000)


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
    assert not parts.dispatcher.pushes.may_begin(hook, request, NOW_MS)
    parts.dispatcher.pushes.end_request(request, is_answered=True)
    for each in request:
        parts.dispatcher.settling.return_delivery(each, each.attempt)
    queue = parts.dispatcher.queues
    if change is not deleted:
        assert [one.in_flight for one in queue] == [2 - len(request)]
        assert parts.waiting(hook)[: len(request)] == [one.entry.seq for one in request]


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
    assert parts.dispatcher.pushes.may_begin(hook, [one], one.origin.due_ms + 49)
    assert not parts.dispatcher.pushes.may_begin(hook, [one], one.origin.due_ms + 50)


def test_what_waits_for_a_connection_uses_up_no_more_of_a_rate_than_its_burst() -> None:
    hook = webhook(rate_per_s=10.0, rate_burst=2)
    parts, waits = connecting(hook, *range(1, 9))
    for passed_ms in range(0, 10_000, 100):
        parts.wait(passed_ms)
        parts.dispatcher.pump.wake(NOW_MS)
        parts.turn()
    # As long as no connection is there, no others leave.
    assert [one.entry.seq for one in waits] == [1, 2]
    assert parts.ports.handouts == []
    for one in waits:
        assert parts.dispatcher.pushes.may_begin(hook, [one], NOW_MS)
    parts.turn()
    assert parts.ports.handouts == []
    parts.wait(10_001)
    wait_ms = parts.dispatcher.pump.wake(NOW_MS)
    assert wait_ms is not None and 90 <= wait_ms <= 110
    parts.wait(10_001 + wait_ms)
    parts.dispatcher.pump.wake(NOW_MS)
    assert parts.handouts() == [[3]]


def test_what_could_not_begin_gives_back_its_part_of_the_rate() -> None:
    hook = webhook(rate_per_s=1.0, rate_burst=1)
    parts, (one,) = connecting(hook, 1, 2)
    parts.dispatcher.pushes.end_request([one], is_answered=True)
    parts.dispatcher.settling.return_delivery(one, one.attempt)
    parts.dispatcher.pump.run(parts.dispatcher.queues.of(hook), NOW_MS)
    assert parts.handouts() == [[1]]


@pytest.mark.parametrize("rate_per_s", [0.0, 1.0])
def test_a_new_rate_holds_from_its_answer_on(
    rate_per_s: float,
) -> None:
    hook = webhook(rate_per_s=rate_per_s, rate_burst=int(rate_per_s))
    parts, waits = connecting(hook, 1, 2, 3)
    parts.change(msgspec.structs.replace(hook, rate_per_s=2.0, rate_burst=2))
    for one in waits:
        assert not parts.dispatcher.pushes.may_begin(hook, [one], NOW_MS)
        parts.dispatcher.pushes.end_request([one], is_answered=True)
        parts.dispatcher.settling.return_delivery(one, one.attempt)
    queue = parts.dispatcher.queues.of(hook)
    parts.dispatcher.pump.run(queue, NOW_MS)
    parts.turn()
    assert sum(map(len, parts.handouts())) == 2
    assert not queue.unreserved


def test_a_queue_that_is_held_leaves_when_the_receiver_said() -> None:
    hook = webhook(max_in_flight=1)
    parts, (one,) = connecting(hook, 1, 2)
    assert parts.dispatcher.pushes.may_begin(hook, [one], NOW_MS)
    parts.dispatcher.pushes.end_request([one], is_answered=True)
    parts.dispatcher.pushes.hold(hook.id, 1_000)
    parts.dispatcher.settling.return_delivery(one, one.attempt)
    parts.dispatcher.pump.run(parts.dispatcher.queues.of(hook), NOW_MS)
    assert parts.handouts() == []
    assert parts.dispatcher.pump.wake(NOW_MS) == 1_000
    parts.wait(1_000)
    parts.dispatcher.pump.wake(NOW_MS)
    assert parts.handouts() == [[1]]


def test_another_receiver_is_not_held() -> None:
    hook = webhook()
    parts, _ = connecting(hook, 1)
    parts.dispatcher.pushes.hold(hook.id, 1_000)
    with_another_url(parts, hook)
    parts.fire((2, START_MS))
    assert parts.handouts() == [[2]]


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
        parts.dispatcher.pushes.end_request([done], is_answered=True)
        parts.dispatcher.settling.settle_delivered(done, NOW_MS)
        parts.turn()
        for _ in parts.handouts():
            left += parts.handouts()[:1]
            sent += parts.read()
    assert left == [[3], [7], [4], [8]]
    assert parts.dispatcher.pushes.connections.free == 2


@pytest.mark.parametrize("batch_max", [0, 3])
@pytest.mark.parametrize("fate", ["unread", "expired", "deleted", "paused", "sent"])
def test_no_place_is_lost(fate: str, batch_max: int) -> None:
    hook = webhook(batch_max=batch_max)
    parts = Parts(hook, webhooks_max=10)
    options = {seq: MessageOptions(ttl_ms=1) for seq in (1, 2, 3)} if fate == "expired" else None
    route = 1 | route_bits(FLAG_OPTIONS) if options else 1
    parts.fire((1, START_MS), (2, START_MS), (3, START_MS), route=route)
    assert parts.dispatcher.pushes.connections.free == (9 if batch_max else 7)
    if fate == "deleted":
        deleted(parts, hook)
    elif fate == "paused":
        paused(parts, hook)
    unreadable = (1, 2, 3) if fate == "unread" else ()
    sent = parts.read(*unreadable, options=options)
    if fate == "sent":
        for request in [sent] if batch_max else [[one] for one in sent]:
            parts.dispatcher.pushes.end_request(request, is_answered=True)
    assert parts.dispatcher.pushes.connections.free == 10


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
    assert parts.dispatcher.pushes.connections.taken(hook.id) == len(expected)


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
