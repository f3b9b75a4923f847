"""Rows that no subscription matches."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from delayserver.delivery.parked import Parked
from delayserver.records.message import ScheduleEntry
from delayserver.schedule.wheel_rows import FiredRows
from storage.rows import HOUR_MS
from tests.unit.delivery.parts import NOW_MS, Parts
from tests.unit.fakes import HOUR, START_MS, seqs, subscription, wheel_rows


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


def test_however_they_came_one_is_found_by_few_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    parked = Parked()
    for seq in range(1, 20_001):
        rows = wheel_rows(HOUR, (seq, START_MS + seq), route=1 + seq % 500)
        parked.add(1 + seq % 500, FiredRows(HOUR, rows))
    looks: list[ScheduleEntry] = []
    find = FiredRows.find

    def noted(self: FiredRows, entry: ScheduleEntry) -> NDArray[np.intp]:
        looks.append(entry)
        return find(self, entry)

    monkeypatch.setattr(FiredRows, "find", noted)
    for seq in (1, 10_000, 19_995):
        assert parked.contains(ScheduleEntry(seq, START_MS + seq))
    assert len(looks) <= 3 * 16
    assert not parked.contains(ScheduleEntry(20_001, START_MS + 20_001))
    row = parked.get(ScheduleEntry(700, START_MS + 700))
    assert row is not None
    assert row["route"].tolist() == [201]


def test_each_subject_goes_to_who_matches_it_in_the_order_in_which_it_came() -> None:
    parked = Parked()
    names = {1: "order.unpaid", 2: "refund", 3: "order.paid"}
    for seq in range(1, 31):
        hour = HOUR + (seq <= 15)
        due_ms = hour * HOUR_MS + seq
        parked.add(1 + seq % 3, FiredRows(hour, wheel_rows(hour, (seq, due_ms))))
    assert parked.first_ms() == START_MS + 16
    assert parked.remove_matching(subscription(1, subject="nothing"), names) == []
    taken = parked.remove_matching(subscription(1, subject="order.*"), names)
    expected = [*range(16, 31), *range(1, 16)]
    assert seqs(taken) == [seq for seq in expected if seq % 3 != 1]
    assert parked.count() == 10
    assert parked.remove(ScheduleEntry(16, START_MS + 16)) is not None
    assert parked.first_ms() == START_MS + 19
    rest = parked.remove_matching(subscription(2, subject="*"), names)
    assert seqs(rest) == [seq for seq in expected if seq % 3 == 1 and seq != 16]
    assert (parked.count(), parked.first_ms()) == (0, None)


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
