"""Buckets of the schedule log: hours, and days for entries that are far off. Each is one file.

    day (2027-03-01.schedule) ── split before it comes near ──▶ hour (2027-03-01T15.schedule)
                                                             ── loaded ──▶ slots of 500 ms

So the schedule log is the coarse part of a hierarchical timing wheel (Varghese and Lauck, 1987):
two years are some 730 files, and not 17,520. A bucket is a number: an hour is its number since
1970, a day is its number since 1970 and a bit of its own. So hours come before days wherever
buckets are in order, and the code that handles hours handles days too. All of it is in UTC.

Cost: arithmetic. Threads: pure functions.
"""

from datetime import UTC, datetime
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from storage.rows import HOUR_MS, LogKind

DAY_HOURS = 24
DAY_MS = DAY_HOURS * HOUR_MS
DAY_FLAG = 1 << 31
"""Marks the bucket of a day. Hours stay below it for another 245,000 years."""

_NAMES_KEPT = 4096
_HOUR_NAME = "%Y-%m-%dT%H"
_DAY_NAME = "%Y-%m-%d"


def day_of(hour: int) -> int:
    """The bucket of the day that an hour belongs to."""
    return DAY_FLAG | hour // DAY_HOURS


def days_of(hours: NDArray[np.int64]) -> NDArray[np.int64]:
    """As `day_of`, of many: shape n to shape n."""
    days: NDArray[np.int64] = hours // DAY_HOURS | DAY_FLAG
    return days


def is_day(bucket: int) -> bool:
    """Whether the bucket is a day."""
    return bucket >= DAY_FLAG


def hours_of(bucket: int) -> range:
    """The hours of a bucket."""
    if is_day(bucket):
        first = (bucket & ~DAY_FLAG) * DAY_HOURS
        return range(first, first + DAY_HOURS)
    return range(bucket, bucket + 1)


def places_of(hour: int) -> tuple[int, int, int]:
    """The files to search, in this order, for an entry that is due in an hour: the hour, its day,
    and the hour again, because the day may have been split in between."""
    return hour, day_of(hour), hour


def start_ms(bucket: int) -> int:
    """When the bucket begins."""
    return (bucket & ~DAY_FLAG) * DAY_MS if is_day(bucket) else bucket * HOUR_MS


def end_ms(bucket: int) -> int:
    """When it is over: the next one begins."""
    return start_ms(bucket) + (DAY_MS if is_day(bucket) else HOUR_MS)


@lru_cache(_NAMES_KEPT)
def hour_name(hour: int) -> str:
    """An hour as people and file names call it: `2026-11-20T15`, in UTC, never in local time."""
    return _name(hour, _HOUR_NAME)


@lru_cache(_NAMES_KEPT)
def bucket_name(bucket: int) -> str:
    """The name of the bucket's file: an hour as `hour_name` has it, a day `2026-11-20`."""
    return _name(bucket, _DAY_NAME) if is_day(bucket) else hour_name(bucket)


def _name(bucket: int, pattern: str) -> str:
    return datetime.fromtimestamp(start_ms(bucket) / 1000, UTC).strftime(pattern)


@lru_cache(_NAMES_KEPT)
def parse_hour(name: str) -> int | None:
    """The hour that `hour_name` names `name`; None for any other text."""
    start = _parse(name)
    hour = -1 if start is None else start // HOUR_MS
    return hour if hour >= 0 and hour_name(hour) == name else None


@lru_cache(_NAMES_KEPT)
def parse_bucket(name: str) -> int | None:
    """The bucket that `bucket_name` names `name`; None for any other text."""
    start = _parse(name)
    day = -1 if start is None or start < 0 else DAY_FLAG | start // DAY_MS
    return day if day >= 0 and bucket_name(day) == name else parse_hour(name)


def _parse(name: str) -> int | None:
    try:
        # The quickest check, for there may be 17,520 hours. Other forms that it takes are refused
        # by name.
        start = datetime.fromisoformat(name).replace(tzinfo=UTC)
    except ValueError:
        return None
    return int(start.timestamp()) * 1000


@lru_cache(_NAMES_KEPT)
def bucket_path(kind: LogKind, bucket: int) -> str:
    """The path of a bucket's file in the schedule log or the dispatch log, which has no days."""
    log = kind.name.lower()
    return f"{log}/{bucket_name(bucket)}.{log}"


@lru_cache(_NAMES_KEPT)
def parse_bucket_file(kind: LogKind, name: str) -> int | None:
    """The bucket of a file name, or None if it is not one of that log."""
    stem, dot, log = name.partition(".")
    if not dot or log != kind.name.lower():
        return None
    return parse_bucket(stem) if kind is LogKind.SCHEDULE else parse_hour(stem)
