"""Rows whose subscription was deleted: who gets them, and that nobody gets them twice."""

from __future__ import annotations

import pytest

from delayserver.records.attempts import History
from delayserver.records.message import Payload, ScheduleEntry
from delayserver.records.tables import Change, ChangeState
from delayserver.schedule.wheel_rows import ROUTE_SUBSCRIPTION
from storage.rows import Outcome
from tests.unit.delivery.parts import NOW_MS, Parts, webhook
from tests.unit.fakes import START_MS, subscription


def test_what_waited_for_a_deleted_subscription_goes_to_another_that_matches() -> None:
    gone, heir = subscription(1), subscription(2, created_ms=START_MS + 1)
    parts = Parts(gone, heir)
    parts.fire((5, START_MS))
    parts.change(subscription(1, deleted=True))
    parts.read()
    assert parts.waiting(heir) == [5]
    assert parts.hours.unsettled() == 1
    assert parts.settled() == []


def test_what_another_subscription_got_on_its_own_is_dropped() -> None:
    gone, other = subscription(1), subscription(2)
    parts = Parts(gone, other)
    parts.fire((5, START_MS))
    assert parts.hours.unsettled() == 2
    parts.change(subscription(1, deleted=True))
    parts.read()
    assert parts.waiting(other) == [5]
    assert parts.settled() == [(5, 0, Outcome.DROPPED)]
    assert parts.hours.unsettled() == 1


def test_what_no_other_subscription_matches_is_parked_again() -> None:
    parts = Parts(subscription(1))
    parts.fire((5, START_MS))
    parts.change(subscription(1, deleted=True))
    parts.read()
    assert parts.dispatcher.parked.count() == 1
    late = subscription(2)
    parts.change(late)
    assert parts.waiting(late) == [5]
    assert parts.hours.unsettled() == 1


def test_a_retry_for_a_deleted_subscription_is_adopted_when_it_fires() -> None:
    heir = subscription(2, created_ms=NOW_MS)
    parts = Parts(heir)
    parts.fire((5, START_MS), route=1 | ROUTE_SUBSCRIPTION)
    parts.read(attempt=3)
    assert parts.waiting(heir) == [5]


def retrying(seq: int, *, attempt: int = 2) -> Change:
    return Change(ChangeState.RETRYING, seq, START_MS, attempt, 1)


def test_what_the_heir_was_given_as_a_dead_letter_is_dropped() -> None:
    heir = subscription(2, created_ms=NOW_MS)
    parts = Parts(heir)
    parts.changes = {1: retrying(5), 2: retrying(9, attempt=1)}
    parts.fire((5, START_MS), route=1 | ROUTE_SUBSCRIPTION)
    parts.read(attempt=3)
    assert parts.waiting(heir) == []
    assert parts.settled() == [(5, 0, Outcome.DROPPED)]


def test_of_retries_for_several_deleted_subscriptions_the_last_is_adopted() -> None:
    heir = subscription(4, created_ms=NOW_MS)
    parts = Parts(heir)
    parts.changes = {
        0: Change(ChangeState.MOVED, 9, START_MS, 1, 1),
        1: retrying(5),
        2: retrying(6),
        3: Change(ChangeState.DEAD, 7, START_MS, 2, 1),
    }
    parts.ahead = [ScheduleEntry(6, START_MS)]
    parts.fire((5, START_MS), route=1 | ROUTE_SUBSCRIPTION)
    parts.read(attempt=2)
    assert parts.settled() == [(5, 0, Outcome.DROPPED)]
    parts.ahead = []
    parts.fire((6, START_MS), route=2 | ROUTE_SUBSCRIPTION)
    parts.read(attempt=2)
    assert parts.waiting(heir) == [6]
    # It fails there, and the heir is deleted in its turn.
    parts.changes[4] = retrying(8, attempt=3)
    parts.change(subscription(4, deleted=True))
    parts.read()
    parts.fire((8, START_MS), route=4 | ROUTE_SUBSCRIPTION)
    parts.read(attempt=3)
    assert parts.dispatcher.parked.contains(ScheduleEntry(8, START_MS))


def test_of_retries_that_are_adopted_together_one_is() -> None:
    heir = subscription(3, created_ms=NOW_MS)
    parts = Parts(heir)
    parts.changes = {1: retrying(5), 2: retrying(6)}
    parts.fire((5, START_MS), route=1 | ROUTE_SUBSCRIPTION)
    parts.fire((6, START_MS), route=2 | ROUTE_SUBSCRIPTION)
    parts.read(message_seq=1)
    parts.read(message_seq=1)
    assert parts.settled() == [(5, 0, Outcome.DROPPED)]
    assert parts.waiting(heir) == [6]


def test_as_long_as_one_that_is_gone_may_take_a_message_nobody_inherits_it() -> None:
    gone, other, heir = webhook(1), webhook(2), subscription(3, created_ms=START_MS + 1)
    parts = Parts(gone, other, heir)
    parts.fire((5, START_MS))
    [on_its_way] = parts.read()
    parts.change(webhook(1, deleted=True))
    parts.change(webhook(2, deleted=True))
    parts.read()
    parts.turn()
    assert parts.ports.handouts != []
    parts.read()
    assert parts.settled() == [(5, 0, Outcome.DROPPED)]
    assert parts.waiting(heir) == []
    parts.dispatcher.settling.return_delivery(on_its_way, 2)
    parts.read()
    assert parts.waiting(heir) == [5]


def test_what_others_failed_at_gets_a_row_of_its_own() -> None:
    gone, heir = subscription(2), subscription(3, created_ms=START_MS + 1)
    parts = Parts(gone, heir)
    parts.fire((5, START_MS))
    # The retry of another was dropped, since this one had the message on its own.
    parts.changes = {1: retrying(6)}
    parts.change(subscription(2, deleted=True))
    parts.read()
    [(delivery, left_by)] = parts.ports.orphans
    assert (delivery.entry.seq, left_by) == (5, 2)
    assert parts.dispatcher.holds(ScheduleEntry(5, START_MS))
    assert parts.settled() == []
    assert parts.waiting(heir) == []
    # When that is recorded:
    parts.dispatcher.settling.release_delivery(delivery)
    assert not parts.dispatcher.holds(ScheduleEntry(5, START_MS))


def test_what_is_being_adopted_is_on_its_way() -> None:
    parts = Parts(subscription(1))
    parts.fire((5, START_MS), (6, START_MS))
    parts.change(subscription(1, deleted=True))
    assert parts.dispatcher.holds(ScheduleEntry(5, START_MS))
    parts.read(6)
    assert not parts.dispatcher.holds(ScheduleEntry(5, START_MS))
    assert parts.dispatcher.holds(ScheduleEntry(6, START_MS))  # it could not be read
    assert parts.dispatcher.parked.contains(ScheduleEntry(5, START_MS))


def test_a_deletion_during_the_read_adopts_the_rows_as_well() -> None:
    gone, heir = webhook(1), subscription(2, created_ms=NOW_MS)
    parts = Parts(gone, heir)
    parts.fire((5, START_MS))
    parts.change(webhook(1, deleted=True))
    parts.read()
    assert parts.ports.sent == []
    parts.read()
    assert parts.waiting(heir) == [5]
    assert parts.hours.unsettled() == 1


def test_what_comes_back_after_the_deletion_is_adopted() -> None:
    gone, heir = webhook(1), subscription(2, created_ms=NOW_MS)
    parts = Parts(gone, heir)
    parts.fire((5, START_MS))
    [one] = parts.read()
    parts.change(webhook(1, deleted=True))
    parts.dispatcher.settling.return_delivery(one, 2)
    parts.read()
    assert parts.waiting(heir) == [5]


def test_those_who_wait_at_a_deleted_subscription_are_answered() -> None:
    parts = Parts(subscription(1))
    parts.pull(subscription(1), 10)
    parts.change(subscription(1, deleted=True))
    assert parts.answers == [[]]


def test_a_long_backlog_is_adopted_slice_by_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delayserver.delivery.orphans.READ_ROWS_MAX", 4)
    gone, heir = subscription(1), subscription(2, created_ms=NOW_MS)
    parts = Parts(gone, heir)
    for seq in range(1, 11):
        parts.fire((seq, START_MS))
    parts.change(subscription(1, deleted=True))
    assert parts.handouts() == [[1, 2, 3, 4]]
    assert len(parts.dispatcher.orphans) == 10
    # All of them are on their way, whether they are being read or not (I5).
    assert all(parts.dispatcher.holds(ScheduleEntry(seq, START_MS)) for seq in range(1, 11))
    parts.read()
    assert parts.handouts() == [], "the next slice waits for another turn of the loop"
    assert parts.waiting(heir) == [1, 2, 3, 4]
    parts.read()
    parts.read()
    assert parts.waiting(heir) == list(range(1, 11))
    assert (len(parts.dispatcher.orphans), parts.ports.turns) == (0, [])
    assert parts.hours.unsettled() == 10


def test_long_bodies_are_adopted_a_few_at_a_time() -> None:
    parts = Parts(subscription(1), answer_max_bytes=100)
    parts.fire(*((seq, START_MS) for seq in range(1, 4)), payload_bytes=40)
    parts.change(subscription(1, deleted=True))
    parts.read()
    parts.read()
    assert parts.dispatcher.parked.count() == 3


def test_no_more_are_read_while_many_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delayserver.delivery.orphans.READ_ROWS_MAX", 2)
    parts = Parts(subscription(2))
    parts.fire(*((seq, START_MS) for seq in range(5, 9)))
    parts.changes = {1: retrying(99)}
    parts.change(subscription(2, deleted=True))
    parts.read()
    parts.turn()
    assert parts.handouts() == []
    (first, _), (second, _) = parts.ports.orphans
    parts.dispatcher.settling.release_delivery(first)
    parts.dispatcher.settling.release_delivery(second)
    parts.turn()
    assert parts.handouts() == [[7, 8]]


def test_a_row_that_waits_to_be_read_may_still_take_its_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("delayserver.delivery.orphans.READ_ROWS_MAX", 1)
    first, second, heir = subscription(1), subscription(2), subscription(3, created_ms=START_MS + 1)
    parts = Parts(first, second, heir)
    parts.fire((5, START_MS), (6, START_MS))
    parts.change(subscription(1, deleted=True))
    parts.change(subscription(2, deleted=True))
    for _ in range(4):
        parts.read()
    # One row of each message is passed on, and one is dropped.
    assert parts.settled() == [(5, 0, Outcome.DROPPED), (6, 0, Outcome.DROPPED)]
    assert parts.waiting(heir) == [5, 6]
    assert parts.hours.unsettled() == 2


def test_a_replay_whose_subscription_is_gone_is_for_nobody_else() -> None:
    heir = subscription(2, created_ms=NOW_MS)
    parts = Parts(heir)
    parts.fire((5, START_MS), route=1 | ROUTE_SUBSCRIPTION)
    parts.read(payload=Payload(b"{}", history=History(is_replay=True)))
    assert parts.waiting(heir) == []
    assert parts.settled() == [(5, 0, Outcome.DROPPED)]
    assert parts.hours.unsettled() == 0
