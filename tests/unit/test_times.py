"""What is a time, what is a duration, and how both are written."""

import numpy as np
import pytest

from delayserver.errors import InputError
from delayserver.times import (
    DURATION_MS_MAX,
    TIME_MS_MAX,
    TIME_MS_MIN,
    are_seconds,
    format_duration,
    format_time,
    parse_duration_ms,
    parse_time_ms,
    read_time_ms,
)

DAY_MS = 86_400_000


@pytest.mark.parametrize(
    ("text", "duration_ms"),
    [
        ("500ms", 500),
        ("0s", 0),
        ("30m", 1_800_000),
        ("5m5ms", 300_005),
        ("1h30m", 5_400_000),
        ("90m", 5_400_000),
        ("2d", 2 * DAY_MS),
        ("1d2h3m4s5ms", DAY_MS + 7_384_005),
        (1500, 1500),
        ("1500", 1500),
        ("0", 0),
        (0, 0),
        (DURATION_MS_MAX, DURATION_MS_MAX),
    ],
)
def test_a_duration_is_read(text, duration_ms):
    assert parse_duration_ms(text) == duration_ms


@pytest.mark.parametrize(
    "value",
    [
        "",
        "m",
        "30 ",
        "1m30",
        "9" * 16,
        "9" * 17,
        "1" * 1_000_000,
        "1.5h",
        "-5s",
        "+5s",
        "5 s",
        " 5s",
        "5s\n",
        "5M",
        "30m1h",  # not in descending order
        "1m1m",
        "1h30",
        "٣s",  # a digit, but not of ASCII
        "1w",
        "9" * 17 + "ms",
        "9" * 16 + "d",
        -1,
        DURATION_MS_MAX + 1,
        True,
        1.5,
        None,
        [],
    ],
)
def test_what_is_no_duration_is_refused(value):
    with pytest.raises(InputError, match="d, h, m, s, ms") as caught:
        parse_duration_ms(value, "/delay")
    assert caught.value.pointer == "/delay"


@pytest.mark.parametrize(
    ("duration_ms", "text"),
    [
        (0, "0s"),
        (1, "1ms"),
        (1500, "1s500ms"),
        (60_000, "1m"),
        (5_400_000, "1h30m"),
        (DAY_MS, "1d"),
        (DAY_MS + 1, "1d1ms"),
        (400 * DAY_MS, "400d"),
    ],
)
def test_a_duration_is_written_without_empty_units(duration_ms, text):
    assert format_duration(duration_ms) == text


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("2026-11-20T16:30:00Z", "2026-11-20T16:30:00.000Z"),
        ("2026-11-20t16:30:00z", "2026-11-20T16:30:00.000Z"),
        ("2026-11-20T17:30:00.5+01:00", "2026-11-20T16:30:00.500Z"),
        ("2026-11-20T16:30:00-00:00", "2026-11-20T16:30:00.000Z"),
        ("2026-12-31T23:30:00-01:30", "2027-01-01T01:00:00.000Z"),
        ("2024-02-29T00:00:00Z", "2024-02-29T00:00:00.000Z"),
        ("1970-01-01T00:00:00Z", "1970-01-01T00:00:00.000Z"),
        ("1969-12-31T23:59:59.999Z", "1969-12-31T23:59:59.999Z"),
        ("0001-01-01T00:00:00Z", "0001-01-01T00:00:00.000Z"),
        ("2026-11-20T16:30:00.123Z", "2026-11-20T16:30:00.123Z"),
        # Finer than a millisecond: never earlier than was asked.
        ("2026-11-20T16:30:00.123000000Z", "2026-11-20T16:30:00.123Z"),
        ("2026-11-20T16:30:00.1230000001Z", "2026-11-20T16:30:00.124Z"),
        ("2026-11-20T16:30:00.9999Z", "2026-11-20T16:30:01.000Z"),
        ("1969-12-31T23:59:59.9991Z", "1970-01-01T00:00:00.000Z"),
        # A leap second is the second after it.
        ("2016-12-31T23:59:60Z", "2017-01-01T00:00:00.000Z"),
        ("2017-01-01T00:59:60+01:00", "2017-01-01T00:00:00.000Z"),
        (1_795_192_200_001, "2026-11-20T16:30:00.001Z"),
        (-1, "1969-12-31T23:59:59.999Z"),
        (TIME_MS_MAX, "9999-12-31T23:59:59.999Z"),
        (TIME_MS_MIN, "0001-01-01T00:00:00.000Z"),
    ],
)
def test_a_time_is_read_and_written(text, written):
    assert format_time(parse_time_ms(text)) == written


@pytest.mark.parametrize(
    "value",
    [
        "",
        "2026-11-20",
        "2026-11-20T16:30:00",  # without an offset it is a different time for each reader
        "2026-11-20 16:30:00Z",
        "2026-11-20T16:30Z",
        "2026-11-20T16:30:00.Z",
        "2026-11-20T16:30:00,5Z",
        "2026-11-20T16:30:00+0100",
        "2026-11-20T16:30:00+24:00",
        "2026-11-20T24:00:00Z",
        "2026-11-20T16:60:00Z",
        "2026-11-20T16:30:60Z",  # no leap second there
        "2026-02-29T00:00:00Z",
        "2026-13-01T00:00:00Z",
        "0000-01-01T00:00:00Z",
        "0001-01-01T00:00:00+00:01",
        "9999-12-31T23:59:59.9991Z",
        "26-11-20T16:30:00Z",
        "2026-11-20T16:30:00Z\n",
        "２026-11-20T16:30:00Z",
        "1795192200000",
        # Nobody needs so many digits, and reading them takes 0.1 s.
        "2026-11-20T16:30:00." + "0" * 1_000_000 + "Z",
        TIME_MS_MAX + 1,
        TIME_MS_MIN - 1,
        False,
        1.0,
        None,
    ],
)
def test_what_is_no_time_is_refused(value):
    with pytest.raises(InputError, match="RFC 3339 with an offset") as caught:
        parse_time_ms(value, "/deliver_at")
    assert caught.value.pointer == "/deliver_at"


@pytest.mark.parametrize("seconds", [10**8, 1_795_192_200, 10**11])
def test_a_point_in_time_in_seconds_is_refused(seconds):
    for read, value in ((parse_time_ms, seconds), (read_time_ms, str(seconds))):
        with pytest.raises(InputError, match="milliseconds, not seconds") as caught:
            read(value, "/deliver_at")
        assert caught.value.pointer == "/deliver_at"
    assert parse_duration_ms(seconds) == parse_duration_ms(str(seconds)) == seconds


@pytest.mark.parametrize("time_ms", [0, 10**8 - 1, 10**11 + 1, -1_795_192_200])
def test_a_number_beside_that_range_is_a_time(time_ms):
    assert parse_time_ms(time_ms) == time_ms


def test_a_column_of_times_is_judged_as_its_numbers():
    times = [0, 10**8 - 1, 10**8, 1_795_192_200, 10**11, 10**11 + 1, -(10**9)]
    assert are_seconds(np.array(times)).tolist() == list(map(are_seconds, times))
    assert list(map(are_seconds, times)) == [False, False, True, True, True, False, False]


@pytest.mark.parametrize(
    ("text", "time_ms"),
    [("0", 0), ("1795192200001", 1_795_192_200_001), ("1970-01-02T10:17:36Z", 123_456_000)],
)
def test_digits_alone_are_milliseconds_where_all_is_text(text, time_ms):
    assert read_time_ms(text) == time_ms


@pytest.mark.parametrize("text", ["", "-5", "٣", "9" * 20, "9" * 5000, "tomorrow"])
def test_text_that_is_no_time_is_refused_where_all_is_text(text):
    with pytest.raises(InputError, match="RFC 3339 with an offset"):
        read_time_ms(text)
