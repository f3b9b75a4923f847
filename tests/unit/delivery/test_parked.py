"""Rows that no subscription matches."""

from __future__ import annotations

from delayserver.records.message import ScheduleEntry
from tests.unit.delivery.parts import NOW_MS, Parts
from tests.unit.fakes import START_MS, subscription


def test_a_message_without_subscription_waits_for_the_first_that_matches() -> None:
    parts = Parts(subscription(1, subject="refund"))
    parts.fire((5, START_MS), (6, START_MS))
    assert parts.dispatcher.parked.count() == 2
    assert parts.dispatcher.parked.contains(ScheduleEntry(5, START_MS))
    assert not parts.dispatcher.parked.contains(ScheduleEntry(7, START_MS))
    parts.change(subscription(2, subject="other.*", created_ms=NOW_MS))
    assert parts.dispatcher.parked.count() == 2
    late = subscription(3, subject="order.*", created_ms=NOW_MS)
    parts.change(late)
    assert parts.dispatcher.parked.count() == 0
    assert parts.waiting(late) == [5, 6]
    assert parts.hours.unsettled() == 2


def test_a_parked_message_can_be_taken_out_once() -> None:
    parts = Parts()
    parts.fire((5, START_MS), (6, START_MS))
    row = parts.dispatcher.parked.remove(ScheduleEntry(5, START_MS))
    assert row is not None
    assert row["seq"].tolist() == [5]
    assert parts.dispatcher.parked.remove(ScheduleEntry(5, START_MS)) is None
    assert parts.dispatcher.parked.remove(ScheduleEntry(6, START_MS + 3_600_000)) is None
    assert parts.dispatcher.parked.count() == 1
    parts.dispatcher.parked.remove(ScheduleEntry(6, START_MS))
    late = subscription(3)
    parts.change(late)
    parts.pull(late, 10)
    assert parts.waiting(late) == []
    assert parts.ports.handouts == []
