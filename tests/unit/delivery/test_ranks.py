"""Ranks: lanes by priority; none where there is but one."""

from __future__ import annotations

from itertools import count

import pytest

from delayserver.delivery.lane import Room
from delayserver.delivery.ranks import Ranks
from delayserver.records.message import ScheduleEntry
from delayserver.schedule.wheel_rows import FiredRows, route_bits
from storage.rows import PRIORITY_SHIFT
from tests.unit.fakes import HOUR, START_MS, seqs, wheel_rows

ROOM = 1 << 40


def fired(*ranked: tuple[int, int], due_ms: int = START_MS) -> FiredRows:
    """Rows of pairs of seq and priority, each a millisecond after the one before."""
    rows = wheel_rows(HOUR, *((seq, due_ms + at) for at, (seq, _) in zip(count(), ranked)))
    for index, (_, priority) in enumerate(ranked):
        rows["route"][index] |= route_bits(priority << PRIORITY_SHIFT)
    return FiredRows(HOUR, rows)


def test_higher_ones_leave_first_and_those_of_one_priority_as_they_came() -> None:
    ranks = Ranks()
    ranks.push(fired((1, 0), (2, 9), (3, 5), (4, 9), (5, 0)))
    ranks.push(fired((6, 5)))
    assert (ranks.count, ranks.priorities) == (6, [9, 5, 0])
    assert seqs(ranks.slices()) == [2, 4, 3, 6, 1, 5]
    assert seqs(ranks.pop(Room(3, ROOM))) == [2, 4, 3]
    ranks.push(fired((7, 9)))
    assert seqs(ranks.pop(Room(9, ROOM))) == [7, 6, 1, 5]
    assert (ranks.count, ranks.priorities) == (0, [0])


def test_a_message_that_came_back_is_first_of_its_priority() -> None:
    ranks = Ranks()
    ranks.push(fired((4, 5), (5, 5), (6, 0), due_ms=START_MS + 9))
    ranks.insert(fired((1, 0), (2, 5), (3, 9)))
    assert seqs(ranks.slices()) == [3, 2, 4, 5, 1, 6]


def test_a_row_without_options_is_of_priority_0() -> None:
    ranks = Ranks()
    ranks.push(FiredRows(HOUR, wheel_rows(HOUR, (1, START_MS), (2, START_MS))))
    ranks.push(fired((3, 0)))
    assert ranks.priorities == [0]
    assert seqs(ranks.slices()) == [1, 2, 3]


@pytest.mark.parametrize("priority", range(10))
def test_every_priority_has_a_lane(priority: int) -> None:
    ranks = Ranks()
    ranks.push(fired((1, priority)))
    assert ranks.priorities == sorted({0, priority}, reverse=True)


def test_others_follow_those_of_their_priority() -> None:
    late, fresh = Ranks(), Ranks()
    late.push(fired((1, 0), (2, 3)))
    fresh.push(fired((3, 0), (4, 3), (5, 7)))
    late.extend(fresh)
    assert seqs(late.slices()) == [5, 2, 4, 1, 3]


def test_what_does_not_fit_is_not_overtaken_by_what_is_lower() -> None:
    ranks = Ranks()
    batch = fired((1, 9), (2, 9), (3, 0))
    batch.rows["locator"] = [100, 100, 1]
    ranks.push(batch)
    assert seqs(ranks.pop(Room(9, 150))) == [1]


def test_the_oldest_of_any_priority_is_known_and_each_row_found() -> None:
    ranks = Ranks()
    assert ranks.first_ms() is None
    ranks.push(fired((1, 9), due_ms=START_MS + 50))
    ranks.push(fired((2, 0), due_ms=START_MS))
    assert ranks.first_ms() == START_MS
    assert ranks.is_before(START_MS + 1) and not ranks.is_before(START_MS)
    assert ranks.holds(ScheduleEntry(1, START_MS + 50)) and ranks.holds(ScheduleEntry(2, START_MS))
    assert not ranks.holds(ScheduleEntry(3, START_MS))
