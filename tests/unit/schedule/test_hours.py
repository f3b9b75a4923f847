"""Hours: what is loaded, what is not settled, and when an hour is over and done."""

from __future__ import annotations

import pytest

from delayserver.schedule.hours import Hours
from storage.rows import HOUR_MS


@pytest.fixture
def hours() -> Hours:
    return Hours(live_through_hour=10)


def test_hours_go_live_in_order(hours: Hours) -> None:
    assert hours.is_live(3)
    assert hours.is_live(10)
    assert not hours.is_live(11)


def test_an_hour_that_is_being_loaded_holds_the_wheel_back(hours: Hours) -> None:
    assert hours.loaded_until_ms == 11 * HOUR_MS
    hours.loading.update({9, 10})
    assert hours.loaded_until_ms == 9 * HOUR_MS
    hours.loading.discard(9)
    assert hours.loaded_until_ms == 10 * HOUR_MS


def test_unsettled_deliveries_are_counted_by_hour(hours: Hours) -> None:
    hours.add(9, 2)
    hours.add(7, 1)
    hours.add(9, 1)
    assert hours.unsettled() == 4
    hours.add(7, -1)
    assert hours.unsettled() == 3
    assert hours.pop_settled(10 * HOUR_MS, next_seq=1, filed_seq=0) == [7]


def test_the_oldest_hour_that_something_keeps_open(hours: Hours) -> None:
    assert hours.oldest_open(11 * HOUR_MS) is None
    hours.add(9, 2)
    hours.add(7, 1)
    assert hours.oldest_open(8 * HOUR_MS - 1) is None  # It is not over.
    assert hours.oldest_open(10 * HOUR_MS) == (7, 1)
    hours.add(7, -1)
    assert hours.oldest_open(10 * HOUR_MS) == (9, 2)


def test_no_more_can_be_settled_than_there_was(hours: Hours) -> None:
    hours.add(9, 1)
    with pytest.raises(AssertionError):
        hours.add(9, -2)


def test_an_hour_is_done_once_it_is_over_and_nothing_of_it_is_left(hours: Hours) -> None:
    hours.add(9, 1)
    end_ms = 10 * HOUR_MS
    assert hours.pop_settled(end_ms, next_seq=5, filed_seq=4) == []
    hours.add(9, -1)
    assert hours.pop_settled(end_ms - 1, next_seq=5, filed_seq=4) == []
    assert hours.pop_settled(end_ms, next_seq=5, filed_seq=4) == [9]
    assert hours.pop_settled(end_ms, next_seq=5, filed_seq=4) == []


def test_an_hour_waits_for_the_records_that_were_accepted_before_its_end(hours: Hours) -> None:
    hours.add(9, 0)
    end_ms = 10 * HOUR_MS
    # Records up to 19 may be due in the hour; those that come later cannot.
    assert hours.pop_settled(end_ms, next_seq=20, filed_seq=12) == []
    assert hours.pop_settled(end_ms + 1000, next_seq=30, filed_seq=18) == []
    assert hours.pop_settled(end_ms + 2000, next_seq=40, filed_seq=19) == [9]


def test_an_hour_that_is_being_loaded_is_not_done(hours: Hours) -> None:
    hours.add(9, 0)
    hours.loading.add(9)
    assert hours.pop_settled(11 * HOUR_MS, next_seq=1, filed_seq=0) == []
    hours.loading.discard(9)
    assert hours.pop_settled(11 * HOUR_MS, next_seq=1, filed_seq=0) == [9]


def test_an_hour_that_gets_a_message_after_it_was_done_is_done_again(hours: Hours) -> None:
    hours.add(9, 0)
    assert hours.pop_settled(11 * HOUR_MS, next_seq=1, filed_seq=0) == [9]
    hours.add(9, 1)
    assert hours.pop_settled(11 * HOUR_MS, next_seq=2, filed_seq=1) == []
    hours.add(9, -1)
    assert hours.pop_settled(11 * HOUR_MS, next_seq=2, filed_seq=1) == [9]


def test_an_hour_that_was_settled_takes_no_express_rows_until_it_is_open_again(
    hours: Hours,
) -> None:
    hours.add(9, 0)
    hours.add(8, 0)
    assert hours.takes_express(9)
    assert not hours.takes_express(11)
    assert hours.pop_settled(10 * HOUR_MS, next_seq=1, filed_seq=0) == [9, 8]
    assert not hours.takes_express(9)
    assert hours.takes_express(10)
    hours.add(9, 1)
    assert hours.takes_express(9)
    assert not hours.takes_express(8)
