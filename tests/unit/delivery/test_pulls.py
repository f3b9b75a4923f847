"""Pulls: rows that consumers ask for."""

from __future__ import annotations

import gc

import msgspec
import numpy as np
import pytest

from delayserver.delivery.delayed_fetch import Pulled, PullRequest
from delayserver.delivery.pump import HELD_LOOK_MS
from delayserver.records.message import MessageOptions, ScheduleEntry
from delayserver.records.subscriptions import Subscription
from delayserver.schedule.wheel_rows import (
    route_bits,
)
from storage.rows import FLAG_OPTIONS
from tests.unit.delivery.parts import NOW_MS, Lease, Parts, webhook
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


def test_a_consumer_gets_as_many_as_it_asked_for_the_rest_waits() -> None:
    one = subscription()
    parts = Parts(one)
    parts.fire((5, START_MS), (6, START_MS), (7, START_MS))
    assert parts.ports.handouts == []
    parts.pull(one, 2)
    parts.read()
    [(_, deliveries)] = parts.ports.handed_out
    assert [d.entry.seq for d in deliveries] == [5, 6]
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
    assert parts.dispatcher.pulls.fetches.count() == 0


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
    assert parts.timeouts.size() == parts.dispatcher.pulls.fetches.count() == 1
    parts.fire((5, START_MS), (6, START_MS))
    assert parts.handouts() == [[5, 6]]
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
    assert parts.timeouts.size() == parts.dispatcher.pulls.fetches.count() == 0


def test_a_pull_gets_no_more_bytes_than_an_answer_holds_and_the_next_one_the_rest() -> None:
    one = subscription(1)
    parts = Parts(one, answer_max_bytes=100)
    parts.fire(*((seq, START_MS) for seq in range(1, 6)), payload_bytes=40)
    parts.fire((6, START_MS), payload_bytes=400)
    queue = parts.dispatcher.queues.of(one)
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


def test_a_pull_that_was_answered_is_no_work_for_the_garbage_collector() -> None:
    """What answers knows the pull, so that it can end it: such a ring holds up the event loop."""
    mine = subscription()
    parts = Parts(mine)
    queue = parts.dispatcher.queues.of(mine)
    answered: list[Pulled] = []

    def pull() -> None:
        def answer(pulled: Pulled) -> None:
            answered.append(pulled)
            assert fetch.is_completed

        fetch = parts.dispatcher.pulls.request(queue, PullRequest(10, 60_000, 1000, answer))

    for _ in range(50):
        pull()
    gc.collect()
    parts.wait(1001)
    assert len(answered) == 50
    parts.dispatcher.pulls.fetches._purgatory.reap()
    assert gc.collect() < 50


def test_others_are_told_of_what_may_leave() -> None:
    mine, hook = subscription(1), webhook(2)
    parts = Parts(mine, hook)
    dispatcher = parts.dispatcher
    told: list[tuple[int, int | None]] = []
    dispatcher.pulls.on_ready = lambda number: told.append((number, dispatcher.pulls.ready(number)))
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
    assert dispatcher.pulls.ready(1) == 0
    parts.change(mine)
    assert told[3:] == [(1, 2)]
    dispatcher.drain()
    assert dispatcher.pulls.ready(1) is None
    dispatcher.queues.draining = False
    parts.change(subscription(1, deleted=True))
    assert dispatcher.pulls.ready(1) is None
    assert [queue.subscription.id for queue in dispatcher.queues] == [2]


def test_a_pull_may_want_fewer_bytes_than_others() -> None:
    mine = subscription()
    parts = Parts(mine, answer_max_bytes=1000)
    parts.fire(*((seq, START_MS) for seq in range(1, 21)), payload_bytes=100)
    for max_bytes, count in ((0, 10), (350, 3), (50, 1), (2000, 6)):
        request = PullRequest(100, 30_000, 0, lambda pulled: None, max_bytes=max_bytes)
        parts.dispatcher.pulls.request(parts.dispatcher.queues.of(mine), request)
        assert len(parts.handouts()[-1]) == count


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
    parts.dispatcher.pump.wake(NOW_MS)
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


@pytest.mark.parametrize("stop", ["lease", "pause", "drain"])
def test_what_was_read_for_a_pull_goes_back_and_was_no_attempt(stop: str) -> None:
    subscribed = subscription(1)
    parts = Parts(subscribed)
    lease = Lease(parts)
    parts.fire((5, START_MS), (6, START_MS + 1))
    parts.pull(subscribed, 10)
    if stop == "pause":
        parts.change(msgspec.structs.replace(subscribed, paused=True))
    lease.holds = stop != "lease"
    parts.dispatcher.queues.draining = stop == "drain"
    parts.read()
    # It waits for the rest of its time, unless the server ends.
    assert parts.answers == ([[]] if stop == "drain" else [])
    parts.wait(1001)
    assert parts.answers == [[]]
    assert not parts.ports.handed_out
    assert parts.waiting(subscribed) == [5, 6]
    assert parts.hours.unsettled() == 2
    lease.holds, parts.dispatcher.queues.draining = True, False
    parts.change(subscribed)
    parts.pull(subscribed, 10)
    read = parts.read_columns()
    assert [(one.entry.seq, one.origin.attempt) for one in read] == [(5, 1), (6, 1)]
    parts.dispatcher.settling.settle_leased(read, np.arange(2), NOW_MS)
    assert not parts.dispatcher.queues.of(subscribed).attempts
    assert parts.hours.unsettled() == 0


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


def pull_of(parts: Parts, one: Subscription, *subjects: str, wait_ms: int = 0) -> None:
    """A pull of somebody who may read these subjects; none: all."""
    request = PullRequest(10, 30_000, wait_ms, lambda pulled: None, subjects=subjects)
    parts.dispatcher.pulls.request(parts.dispatcher.queues.of(one), request)


def test_what_a_consumer_may_not_read_waits_for_one_that_may() -> None:
    mine = subscription(subject="*")
    parts = Parts(mine)
    queue = parts.dispatcher.queues.of(mine)
    parts.fire((5, START_MS), (6, START_MS + 1))
    pull_of(parts, mine, "refund")
    parts.read()
    assert not parts.ports.handed_out
    assert (queue.count, queue.in_flight, counted(parts.dispatcher).queued) == (2, 0, 2)
    assert parts.dispatcher.holds(ScheduleEntry(5, START_MS))
    assert counted(parts.dispatcher).oldest_due_ms == START_MS == queue.first_ms()
    assert parts.dispatcher.pulls.ready(mine.id) == 2
    # It does not stand in the way of what comes behind, nor end a pull that waits.
    pull_of(parts, mine, "refund", wait_ms=1000)
    assert not parts.ports.handouts
    pull_of(parts, mine, "refund", "order.*")
    assert [one.entry.seq for one in parts.read()] == [5, 6]
    assert not queue.withheld


@pytest.mark.parametrize("end", ["rows", "time", "gone"])
def test_a_consumer_waits_on_when_it_may_read_nothing_of_what_was_read(end: str) -> None:
    mine = subscription(subject="*")
    parts = Parts(mine)
    parts.fire((5, START_MS), (6, START_MS + 1))
    answers: list[Pulled] = []
    request = PullRequest(10, 30_000, 1000, answers.append, subjects=("refund",))
    fetch = parts.dispatcher.pulls.request(parts.dispatcher.queues.of(mine), request)
    parts.read()
    fetches = parts.dispatcher.pulls.fetches
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


def test_what_a_consumer_may_not_read_goes_to_another_that_waits() -> None:
    mine = subscription(subject="*")
    parts = Parts(mine)
    pull_of(parts, mine, "refund", wait_ms=1000)
    pull_of(parts, mine, wait_ms=1000)
    parts.fire((5, START_MS))
    parts.read()
    assert [one.entry.seq for one in parts.read()] == [5]


def test_what_nobody_might_read_is_left_behind_with_its_subscription() -> None:
    mine = subscription(subject="*")
    parts = Parts(mine)
    parts.fire((5, START_MS))
    pull_of(parts, mine, "refund")
    parts.read()
    parts.change(msgspec.structs.replace(mine, deleted=True))
    assert parts.dispatcher.orphans.holds(ScheduleEntry(5, START_MS))
