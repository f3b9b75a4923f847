"""A message as it waits in memory."""

from __future__ import annotations

import numpy as np
import pytest

from delayserver.records.message import ScheduleEntry
from delayserver.schedule.wheel_rows import (
    PAYLOAD_MAX_BYTES,
    ROUTE_NUMBER,
    ROUTE_OPTIONS,
    ROUTE_SUBSCRIPTION,
    WHEEL_DTYPE,
    FiredRows,
    priority_of,
    route_bits,
    wheel_rows,
)
from storage.rows import FLAG_OPTIONS, FLAG_WATCHES, HOUR_MS, SCHEDULE_DTYPE
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


def test_a_route_says_whether_there_are_options_and_their_priority() -> None:
    entries = np.zeros(4, SCHEDULE_DTYPE)
    entries["due_ms"], entries["seq"], entries["subject_id"] = START_MS, [5, 6, 7, 8], 3
    entries["subscription_id"] = [0, 0, 4, 4]
    entries["flags"] = [0, FLAG_OPTIONS, FLAG_OPTIONS | 9 << 4, FLAG_WATCHES]
    routes = wheel_rows(entries, HOUR, 0)["route"].tolist()
    assert [route & ROUTE_NUMBER for route in routes] == [3, 3, 4, 4]
    assert [bool(route & ROUTE_SUBSCRIPTION) for route in routes] == [False, False, True, True]
    assert [bool(route & ROUTE_OPTIONS) for route in routes] == [False, True, True, False]
    assert list(map(priority_of, routes)) == [0, 0, 9, 0]


@pytest.mark.parametrize("priority", range(10))
def test_a_route_is_made_of_the_flags_of_a_record(priority: int) -> None:
    flags = FLAG_OPTIONS | FLAG_WATCHES | priority << 4
    entries = np.zeros(1, SCHEDULE_DTYPE)
    entries["subject_id"], entries["flags"] = 7, flags
    [route] = wheel_rows(entries, 0, 0)["route"].tolist()
    assert route == 7 | route_bits(flags)
    assert priority_of(route) == priority
