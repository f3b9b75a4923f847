"""A message as it waits in memory."""

from __future__ import annotations

import numpy as np
import pytest

from delayserver.records.message import ScheduleEntry
from delayserver.schedule.wheel_rows import (
    PAYLOAD_MAX_BYTES,
    ROUTE_SUBSCRIPTION,
    WHEEL_DTYPE,
    FiredRows,
    wheel_rows,
)
from storage.rows import HOUR_MS, SCHEDULE_DTYPE
from tests.unit.fakes import HOUR, START_MS, place_of
from tests.unit.fakes import wheel_rows as waiting


def test_a_waiting_row_is_24_bytes() -> None:
    assert WHEEL_DTYPE.itemsize == 24


@pytest.mark.parametrize("place", [(0, 1), (64, PAYLOAD_MAX_BYTES), ((1 << 40) - 1, 7)])
def test_a_row_says_where_its_payload_is(place: tuple[int, int]) -> None:
    entries = np.zeros(1, SCHEDULE_DTYPE)
    start = place[0] // 2
    entries["payload_offset"], entries["payload_length"] = min(place[0] - start, 1 << 31), place[1]
    start = place[0] - int(entries["payload_offset"][0])
    [locator] = wheel_rows(entries, 0, start)["locator"].tolist()
    assert place_of(locator) == place


def test_a_row_is_for_a_subject_or_for_one_subscription() -> None:
    entries = np.zeros(2, SCHEDULE_DTYPE)
    entries["due_ms"], entries["seq"], entries["subject_id"] = [START_MS, START_MS + 7], [5, 6], 3
    entries["subscription_id"] = [0, 4]
    rows = wheel_rows(entries, HOUR, 0)
    assert rows["route"].tolist() == [3, 4 | ROUTE_SUBSCRIPTION]
    assert rows["seq"].tolist() == [5, 6]
    assert rows["due_offset_ms"].tolist() == [START_MS % HOUR_MS, START_MS % HOUR_MS + 7]


def test_rows_that_fired_know_when_they_are_due() -> None:
    rows = FiredRows(HOUR, waiting(HOUR, (5, START_MS), (6, START_MS + 2), (7, START_MS + 9)))
    assert rows.first_ms() == START_MS
    assert rows.due_ms().tolist() == [START_MS, START_MS + 2, START_MS + 9]
    assert rows.due_ms(2).tolist() == [START_MS, START_MS + 2]


def test_a_row_is_found_among_those_that_wait_together() -> None:
    late = FiredRows(HOUR, waiting(HOUR, (7, START_MS + 9), (5, START_MS)))
    assert late.find(ScheduleEntry(5, START_MS)).tolist() == [1]
    for seq, due_ms in ((6, START_MS), (5, START_MS + 10), (5, START_MS + HOUR_MS), (8, START_MS)):
        assert not len(late.find(ScheduleEntry(seq, due_ms)))
    assert late.bounds() == (0, 9, 5, 7)
    both = late.join(FiredRows(HOUR, waiting(HOUR, (4, START_MS + 20))))
    assert both.known_bounds is None, "of what came later they were not asked for"
    assert both.bounds() == (0, 20, 4, 7)
    assert both.join(late).known_bounds == (0, 20, 4, 7)
    assert both.find(ScheduleEntry(4, START_MS + 20)).tolist() == [2]
