"""Buckets: hours and days by their numbers and by their names."""

import numpy as np
import pytest

from storage.buckets import (
    DAY_MS,
    bucket_name,
    bucket_path,
    day_of,
    days_of,
    end_ms,
    hours_of,
    is_day,
    parse_bucket,
    parse_bucket_file,
    places_of,
    start_ms,
)
from storage.rows import HOUR_MS, LogKind
from tests.unit.storage.samples import HOUR

DAY = day_of(HOUR)


def test_an_hour_is_a_bucket_and_so_is_its_day() -> None:
    assert not is_day(HOUR)
    assert (start_ms(HOUR), end_ms(HOUR)) == (HOUR * HOUR_MS, (HOUR + 1) * HOUR_MS)
    assert list(hours_of(HOUR)) == [HOUR]
    assert is_day(DAY)
    assert start_ms(DAY) == HOUR * HOUR_MS // DAY_MS * DAY_MS
    assert end_ms(DAY) - start_ms(DAY) == DAY_MS
    assert HOUR in hours_of(DAY)
    assert [start_ms(hour) for hour in hours_of(DAY)] == list(
        range(start_ms(DAY), end_ms(DAY), HOUR_MS)
    )
    assert {day_of(hour) for hour in hours_of(DAY)} == {DAY}
    assert day_of(hours_of(DAY)[-1] + 1) == DAY + 1
    assert places_of(HOUR) == (HOUR, DAY, HOUR)


def test_many_at_once() -> None:
    hours = np.arange(HOUR, HOUR + 100)
    assert days_of(hours).tolist() == [day_of(hour) for hour in hours.tolist()]


def test_hours_come_before_days() -> None:
    assert max(HOUR, 100 * 366 * 24) < day_of(0)


@pytest.mark.parametrize(("bucket", "name"), [(HOUR, "2026-11-20T15"), (DAY, "2026-11-20")])
def test_a_bucket_goes_by_its_name_in_utc(bucket: int, name: str) -> None:
    assert bucket_name(bucket) == name
    assert parse_bucket(name) == bucket
    assert bucket_path(LogKind.SCHEDULE, bucket) == f"schedule/{name}.schedule"
    assert parse_bucket_file(LogKind.SCHEDULE, f"{name}.schedule") == bucket


@pytest.mark.parametrize(
    "name", ["", "20261120", "2026-11-20T5", "2026-W47-5", "1969-12-31", "2026-02-29", "2026-1-2"]
)
def test_other_names_are_no_buckets(name: str) -> None:
    assert parse_bucket(name) is None


def test_the_dispatch_log_has_no_days() -> None:
    assert parse_bucket_file(LogKind.DISPATCH, "2026-11-20.dispatch") is None
    assert parse_bucket_file(LogKind.DISPATCH, "2026-11-20T15.dispatch") == HOUR
