"""When a schedule runs: against a clock that is read second by second, and another library."""

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from croniter import croniter
from hypothesis import given
from hypothesis import strategies as st

from delayserver.errors import InputError
from delayserver.parts.schedules.recurrence import Cron, Every, check_expression
from delayserver.times import format_time, parse_time_ms

ZONES = (
    "Europe/Berlin",
    "Europe/London",
    "America/New_York",
    "America/Sao_Paulo",
    "America/St_Johns",
    "America/Havana",  # the clock is changed at midnight
    "Africa/Casablanca",  # the year has four changes
    "Asia/Tehran",
    "Australia/Lord_Howe",  # by half an hour
    "Pacific/Apia",
)
EXPRESSIONS = (
    "30 2 * * *",
    "0 0 * * *",
    "*/20 * * * *",
    "15,45 1-3 * * *",
    "0 3 * * SUN",
    "59 23 L * *",
)
MINUTE_MS = 60_000


def moments(cron: Cron, after: str, count: int) -> list[str]:
    found, time_ms = [], parse_time_ms(after)
    for _ in range(count):
        planned = cron.after(time_ms)
        assert planned is not None and planned.time_ms > time_ms
        assert cron.moment_ms(planned) == planned.time_ms
        time_ms = planned.time_ms
        found.append(format_time(time_ms).removesuffix(":00.000Z"))
    return found


def after_ms(cron: Cron, time_ms: int) -> int | None:
    planned = cron.after(time_ms)
    return None if planned is None else planned.time_ms


def changes(zone: ZoneInfo) -> list[datetime]:
    """Every change of the offset in ten years, in UTC, to the minute."""
    found = []
    day = datetime(2016, 1, 1, tzinfo=UTC)
    days = [day + timedelta(days=n) for n in range(3653)]
    for one, other in pairwise(days):
        if one.astimezone(zone).utcoffset() != other.astimezone(zone).utcoffset():
            minutes = (one + timedelta(minutes=n) for n in range(1, 1441))
            before = one.astimezone(zone).utcoffset()
            found.append(next(m for m in minutes if m.astimezone(zone).utcoffset() != before))
    return found


def as_the_clock_shows(expression: str, zone: ZoneInfo, start: datetime, end: datetime) -> set[int]:
    """Each planned time at the first minute at which the clock shows it or more."""
    fires: set[int] = set()
    shown = start.astimezone(zone).replace(tzinfo=None)
    planned = croniter(expression, shown).get_next(datetime)
    minute = start
    while minute < end:
        minute += timedelta(minutes=1)
        reading = minute.astimezone(zone).replace(tzinfo=None)
        while planned <= reading:
            fires.add(int(minute.timestamp() * 1000))
            planned = croniter(expression, planned).get_next(datetime)
    return fires


@pytest.mark.parametrize("name", ZONES)
def test_every_change_of_the_clock_in_ten_years(name):
    zone = ZoneInfo(name)
    found = changes(zone)
    assert found
    for number, change in enumerate(found):
        # Each change with two expressions, each pair of kinds many times over.
        for expression in (EXPRESSIONS[number % 6], EXPRESSIONS[(number // 2 + 3) % 6]):
            start, end = change - timedelta(hours=3), change + timedelta(hours=5)
            expected = as_the_clock_shows(expression, zone, start, end)
            cron, made = Cron(expression, name), set()
            time_ms, end_ms = int(start.timestamp() * 1000), int(end.timestamp() * 1000)
            while (next_ms := after_ms(cron, time_ms)) is not None and next_ms <= end_ms:
                made.add(time_ms := next_ms)
            assert made == expected, (expression, change)
            # From any moment on, also within the gap or the repeated hour.
            for from_ms in range(time_ms - 7 * 60 * MINUTE_MS, time_ms, 17 * MINUTE_MS + 1):
                later = {one for one in made if one > from_ms}
                if later:
                    first = after_ms(cron, from_ms)
                    assert first is not None
                    assert first in later or first < min(made), (expression, change, from_ms)
                    assert first <= min(later)


def test_a_time_in_the_gap_is_the_end_of_the_gap_together_with_what_is_planned_for_then():
    cron = Cron("30 2,3 * * *", "Europe/Berlin")
    # On 2026-03-29 the clock goes from 02:00 to 03:00 (01:00 UTC).
    assert moments(cron, "2026-03-28T12:00:00Z", 3) == [
        "2026-03-29T01:00",
        "2026-03-29T01:30",
        "2026-03-30T00:30",
    ]
    cron = Cron("*/30 2-3 * * *", "Europe/Berlin")
    assert moments(cron, "2026-03-28T12:00:00Z", 3) == [
        "2026-03-29T01:00",
        "2026-03-29T01:30",
        "2026-03-30T00:00",
    ]


def test_a_time_that_there_is_twice_is_the_first_of_the_two():
    cron = Cron("30 2 * * *", "Europe/Berlin")
    assert moments(cron, "2026-10-24T12:00:00Z", 2) == ["2026-10-25T00:30", "2026-10-26T01:30"]
    # From between the two, and from the second one.
    for after in ("2026-10-25T01:00:00Z", "2026-10-25T01:10:00.5Z", "2026-10-25T01:30:00Z"):
        assert moments(cron, after, 1) == ["2026-10-26T01:30"]
    cron = Cron("*/30 * * * *", "Europe/Berlin")
    assert moments(cron, "2026-10-25T00:00:00Z", 2) == ["2026-10-25T00:30", "2026-10-25T02:00"]


def test_forms_of_an_expression():
    after = "2026-11-20T08:00:00Z"
    assert moments(Cron("@daily", "UTC"), after, 1) == ["2026-11-21T00:00"]
    assert moments(Cron(" @Hourly ", "UTC"), after, 1) == ["2026-11-20T09:00"]
    assert moments(Cron("0 9 * JAN mon-fri", "UTC"), after, 1) == ["2027-01-01T09:00"]
    assert moments(Cron("0 0 29 2 *", "UTC"), after, 1) == ["2028-02-29T00:00"]
    every_second = Cron("* * * * * *", "UTC")
    assert after_ms(every_second, 1_000_500) == 1_001_000
    assert after_ms(every_second, 1_001_000) == 1_002_000
    in_the_morning = Cron("15 30 9 * * *", "UTC")
    assert after_ms(in_the_morning, 0) == (9 * 3600 + 30 * 60 + 15) * 1000


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("", "five fields"),
        ("* * * *", "five fields"),
        ("60 * * * *", "Bad minute"),
        ("0 0 30 2 *", "Bad day-of-month"),
        ("0 0 * * FRI-MON", "Bad day-of-week"),
        ("*/0 * * * *", "five fields"),
        ("@reboot", "five fields"),
        ("0 0 */31 2 MON#2", "no such day"),
        ("0 9 * * *" + " " * 256, "at most 256"),
        ("٠ 9 * * *", "all of ASCII"),
    ],
)
def test_what_is_no_expression_is_refused_with_what_would_be_one(expression, said):
    with pytest.raises(InputError, match=said) as caught:
        Cron(expression, "UTC")
    assert caught.value.pointer == "/cron"


@pytest.mark.parametrize("name", ["", "Europe", "Mars/Base", "/etc/passwd", "../UTC", "CEST"])
def test_a_zone_that_is_not_known_is_refused(name):
    with pytest.raises(InputError, match="no time zone") as caught:
        Cron("@daily", name)
    assert caught.value.pointer == "/timezone"


@pytest.mark.parametrize(
    "expression",
    [
        *("*/90 * * * *", "*/60 * * * *", "0 */36 * * *", "0 0 */32 * *", "0 0 1 */13 *"),
        *("0 0 * * */8", "0 0 * * */7", "*/61 * * * * *", "5/90 * * * *", "0 0/24 * * *"),
        *("1-5/10 * * * *", "0 0,6-9/4 * * *", "45/30 * * * *", "0 0 L/2 * *", "0 0 1 JAN/12 *"),
    ],
)
def test_a_step_beyond_its_field_is_refused_where_one_is_put(expression):
    with pytest.raises(InputError, match="use every") as caught:
        check_expression(expression)
    assert caught.value.pointer == "/cron"
    assert Cron(expression, "UTC").after(0) is not None  # one that was put before goes on


@pytest.mark.parametrize(
    "expression",
    [
        *("*/30 * * * *", "*/59 * * * *", "0 */12 * * *", "0 0 */30 * *", "0 0 * * */2"),
        *("*/20 * * * * *", "10-40/15 * * * *", "0 9 * JAN-DEC/3 *", "59/1 * * * *", "@daily"),
    ],
)
def test_a_step_within_its_field_is_not(expression):
    check_expression(expression)


def test_it_ends_where_the_calendar_does():
    assert Cron("@daily", "UTC").after(parse_time_ms("9950-01-01T00:00:00Z")) is None


@given(st.integers(1000, 10**9), st.integers(0, 10**13), st.integers(-(10**12), 10**13))
def test_every_is_in_step_with_its_base(every_ms, base_ms, time_ms):
    found = Every(every_ms, base_ms).after(time_ms).time_ms
    assert found - every_ms <= time_ms < found
    assert (found - base_ms) % every_ms == 0
