"""Whereabouts: a row that is still to come, wherever it is. (Of messages: see test_messages.)"""

from __future__ import annotations

import pytest

from delayserver.decisions.whereabouts import Whereabouts, is_for_one
from delayserver.records.message import ScheduleEntry
from delayserver.schedule.wheel_rows import ROUTE_SUBSCRIPTION
from storage.rows import HOUR_MS
from tests.unit.fakes import HOUR, START_MS, MessageParts, message, wheel_rows

SOON = START_MS + 1_000


class Parts(MessageParts):
    def __init__(self) -> None:
        super().__init__()
        self.whereabouts = Whereabouts(
            self.settings, self.catalog, self.groups, self.wheel, self.hours
        )

    def has_not_fired(self, seq: int, due_ms: int = SOON) -> bool:
        return self.whereabouts.has_not_fired(ScheduleEntry(seq, due_ms))


@pytest.fixture
def parts() -> Parts:
    return Parts()


def test_a_row_is_to_come_from_its_publish_until_it_leaves_the_wheel(parts: Parts) -> None:
    [seq] = parts.publish(message(SOON))
    assert parts.has_not_fired(seq)
    parts.commit()
    assert parts.has_not_fired(seq)
    parts.file()
    assert parts.has_not_fired(seq)
    assert parts.whereabouts.in_wheel(ScheduleEntry(seq, SOON)) is not None
    assert parts.wheel.remove(seq, SOON) is not None
    assert not parts.has_not_fired(seq)
    assert parts.whereabouts.in_wheel(ScheduleEntry(seq, SOON)) is None


def test_rows_of_hours_that_are_not_loaded_or_being_loaded_are_to_come(parts: Parts) -> None:
    parts.groups.durable_seq = parts.groups.filed_seq = 99
    assert not parts.has_not_fired(99)
    assert parts.has_not_fired(99, START_MS + HOUR_MS)
    parts.hours.loading.add(HOUR)
    assert parts.has_not_fired(99)


def test_what_no_checkpoint_covers_is_known_and_what_no_hour_has_is_not(parts: Parts) -> None:
    parts.groups.on_checkpoint(5)
    assert parts.whereabouts.is_known(ScheduleEntry(6, SOON), START_MS)
    assert not parts.whereabouts.is_known(ScheduleEntry(5, SOON), START_MS)


@pytest.mark.parametrize(("route", "is_one"), [(1, False), (2 | ROUTE_SUBSCRIPTION, True)])
def test_whose_a_row_is(route: int, is_one: bool) -> None:
    assert is_for_one(wheel_rows(HOUR, (1, SOON), route=route)) is is_one
    assert not is_for_one(None)
