"""Times and durations survive being written and read."""

from datetime import UTC, datetime, timedelta, timezone

from hypothesis import given
from hypothesis import strategies as st

from delayserver.errors import InputError
from delayserver.times import (
    DURATION_MS_MAX,
    TIME_MS_MAX,
    TIME_MS_MIN,
    format_duration,
    format_time,
    parse_duration_ms,
    parse_time_ms,
)

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# Two days inside the calendar, so that no offset leads out of it; Hypothesis wants them naive.
FIRST = EPOCH.replace(year=1, day=3, tzinfo=None)
LAST = EPOCH.replace(year=9999, month=12, day=29, tzinfo=None)
offsets = st.integers(-23 * 60 - 59, 23 * 60 + 59).map(
    lambda minutes: timezone(timedelta(minutes=minutes))
)


@given(st.integers(TIME_MS_MIN, TIME_MS_MAX))
def test_a_time_that_was_written_reads_the_same(time_ms):
    assert parse_time_ms(format_time(time_ms)) == time_ms


@given(st.integers(TIME_MS_MIN, TIME_MS_MAX) | st.integers(10**8 - 5, 10**11 + 5))
def test_a_number_is_a_time_unless_it_is_seconds(number):
    try:
        assert parse_time_ms(number) == number
        is_refused = False
    except InputError:
        is_refused = True
    assert is_refused == (10**8 <= number <= 10**11)


@given(st.lists(st.integers(TIME_MS_MIN, TIME_MS_MAX), min_size=2, max_size=5))
def test_written_times_sort_as_the_times(times_ms):
    assert sorted(map(format_time, times_ms)) == list(map(format_time, sorted(times_ms)))


@given(st.datetimes(FIRST, LAST, timezones=offsets))
def test_a_time_is_read_as_the_standard_library_reads_it_rounded_up(moment):
    elapsed_us = (moment - EPOCH) // timedelta(microseconds=1)
    assert parse_time_ms(moment.isoformat()) == -(-elapsed_us // 1000)


@given(st.integers(0, DURATION_MS_MAX))
def test_a_duration_that_was_written_reads_the_same(duration_ms):
    assert parse_duration_ms(format_duration(duration_ms)) == duration_ms
