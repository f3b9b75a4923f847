"""When a schedule runs: a cron expression on the clock of a time zone, or every so often.

    Cron("0 9 * * MON-FRI", "Europe/Berlin").after(ms)    the first moment later than ms
    Every(90_000, base_ms).after(ms)                      base, base + 90 s, base + 180 s, …

A planned time of a cron expression is a reading of the clock on the wall. It falls on the first
moment at which that clock shows it or a later time. A time that a change of the clock leaves out
falls on the end of the gap, together with the runs that are planned for then. A time that there is
twice falls on the first of the two alone. So a schedule that must go on through the repeated hour
is one with `every`, or in UTC.

`cronsim` reads the expressions and finds the next reading, on a clock without a zone. The zone is
applied here. cronsim's own way is that of Debian's cron, which treats expressions with a star in
them in another way than those without.

A schedule keeps the reading, and the moment follows from it (`Cron.moment_ms`): when the rules of a
zone change, a schedule of nine o'clock still runs at nine.

`check_expression` and `zones.check_zone` check the expressions and zones that clients put. They are
stricter than the reading of stored ones: an expression that was accepted once goes on as it did.

Cost: some 30 µs for a moment of a cron expression, 100 µs beside a change of the clock; 50 µs for
an expression that was not read lately. Threads: pure; caches may be shared.
"""

from copy import copy
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Final, NamedTuple, Protocol
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError
from cronsim.cronsim import Field

from delayserver.errors import InputError
from delayserver.records.zones import zone_of

EXPRESSION_MAX: Final = 256
"""Characters of a cron expression."""
EVERY_MIN_MS: Final = 1000

_ALIASES: Final = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_FORMS: Final = (
    'five fields (minute, hour, day of month, month, day of week: "0 9 * * MON-FRI"), six with '
    f"seconds in front, or one of {', '.join(_ALIASES)}"
)
_SECOND: Final = timedelta(seconds=1)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_FIELDS: Final = (
    ("second", 60),
    ("minute", 60),
    ("hour", 24),
    ("day of month", 31),
    ("month", 12),
    ("day of week", 7),
)
"""The fields of an expression: their names, and how many values each has."""
NO_READING: Final = 0
"""In the place of a reading: the moment says it all."""
_YEARS_MAX: Final = 9900
"""The calendar of `datetime` ends in 9999, and an expression is looked for through 50 years."""


class Planned(NamedTuple):
    """A planned time."""

    time_ms: int
    """The moment."""
    reading_ms: int = NO_READING
    """The clock on the wall shows this then, counted as if it stood in UTC. NO_READING: the moment
    does not depend on a zone."""


class Recurrence(Protocol):
    """Moments one behind the other, without a memory of its own."""

    def after(self, time_ms: int) -> Planned | None:
        """The first one later than that; None: there is none."""

    def moment_ms(self, planned: Planned) -> int:
        """When a time that was planned comes, as the rules of the zone are now."""


class Every:
    """`base_ms`, and every `every_ms` before and behind that."""

    def __init__(self, every_ms: int, base_ms: int) -> None:
        assert every_ms > 0
        self._every_ms = every_ms
        self._base_ms = base_ms

    def after(self, time_ms: int) -> Planned:
        """The first step later than that."""
        steps = (time_ms - self._base_ms) // self._every_ms + 1
        return Planned(self._base_ms + steps * self._every_ms)

    def moment_ms(self, planned: Planned) -> int:
        """No zone has a say in it."""
        return planned.time_ms

    def count(self, from_ms: int, through_ms: int, most: int) -> int:
        """How many steps lie between two moments, both included, up to `most`."""
        first_ms = self.after(from_ms - 1).time_ms
        return min(most, max(0, (through_ms - first_ms) // self._every_ms + 1))


class Cron:
    """A cron expression and a zone."""

    def __init__(self, expression: str, timezone: str) -> None:
        """Raises InputError at `/cron` or `/timezone`."""
        self._zone = zone_of(timezone)
        self._template = _parsed(expression)

    def after(self, time_ms: int) -> Planned | None:
        """The first planned time later than that."""
        moment = _EPOCH + timedelta(milliseconds=time_ms)
        if moment.year > _YEARS_MAX:
            return None
        local = moment.astimezone(self._zone)
        reading = local.replace(tzinfo=None, microsecond=0)
        if local.fold:
            # The clock shows for the second time a time that it has shown. Only later readings are
            # new.
            first = _utc(reading, self._zone, 0)
            last = _change(first, moment, self._zone) - _SECOND
            reading = last.astimezone(self._zone).replace(tzinfo=None)
        sim = copy(self._template)
        sim.dt = reading
        for reading in sim:
            planned_ms = _ms(self._moment_of(reading))
            if planned_ms > time_ms:
                return Planned(planned_ms, _ms(reading.replace(tzinfo=UTC)))
        return None

    def moment_ms(self, planned: Planned) -> int:
        """When the clock shows the reading for the first time, or the first later one."""
        if planned.reading_ms == NO_READING:
            return planned.time_ms
        reading = _EPOCH + timedelta(milliseconds=planned.reading_ms)
        return _ms(self._moment_of(reading.replace(tzinfo=None)))

    def count(self, from_ms: int, through_ms: int, most: int) -> int:
        """How many planned times lie between two moments, both included, up to `most`."""
        found, time_ms = 0, from_ms - 1
        while found < most and (planned := self.after(time_ms)) is not None:
            if planned.time_ms > through_ms:
                break
            found, time_ms = found + 1, planned.time_ms
        return found

    def _moment_of(self, reading: datetime) -> datetime:
        """When the clock shows that for the first time, or the first later time."""
        found = _utc(reading, self._zone, 0)
        if found.astimezone(self._zone).replace(tzinfo=None) == reading:
            return found
        # With the offset of before it is behind the gap, with that of after before the gap.
        return _change(_utc(reading, self._zone, 1), found, self._zone)


def check_expression(expression: str) -> None:
    """Raises InputError at `/cron`: it is none, there is no such day, or it has a step that is
    longer than its field and would mean something else (`*/90` minutes is every hour)."""
    _parsed(expression)
    text = _ALIASES.get(expression.strip().lower(), expression).upper().split()
    for (name, count), field in zip(_FIELDS[-len(text) :], text, strict=True):
        for term in field.split(","):
            _check_step(name, count, term)


def _check_step(name: str, count: int, term: str) -> None:
    values, slash, step = term.partition("/")
    if not slash:
        return
    # A single value is left of `*/90`, of `50/20` and of `1-5/10`.
    number = _FIELDS.index((name, count))
    left = Field(number).parse(term)
    if values in ("L", "LW") or (int(step) > 1 and (len(left) < 2 or int(step) >= count)):
        raise InputError(
            f"the step in {term!r} is longer than the field ({name}) or the range that it is for, "
            f"and would mean something else: for an interval use every, else list the values",
            "/cron",
        )


@lru_cache(maxsize=1024)
def _parsed(expression: str) -> CronSim:
    """The expression as cronsim reads it; to be copied. Raises InputError at `/cron`."""
    text = _ALIASES.get(expression.strip().lower(), expression)
    start = datetime(2000, 1, 1)  # noqa: DTZ001 (a reading of a clock, without a zone)
    try:
        if len(expression) > EXPRESSION_MAX or not expression.isascii():
            raise CronSimError(f"it has at most {EXPRESSION_MAX} characters, all of ASCII")
        sim = CronSim(text, start)
        next(copy(sim))
    except (CronSimError, ValueError) as error:
        raise InputError(f"no cron expression ({error}): give {_FORMS}", "/cron") from error
    except StopIteration as error:
        raise InputError("there is no such day within 50 years", "/cron") from error
    except Exception as error:  # an oversight of the library harms only this expression
        raise InputError(f"no cron expression ({error!r}): give {_FORMS}", "/cron") from error
    return sim


def _utc(reading: datetime, zone: ZoneInfo, fold: int) -> datetime:
    return reading.replace(tzinfo=zone, fold=fold).astimezone(UTC)


def _change(before: datetime, after: datetime, zone: ZoneInfo) -> datetime:
    """The first moment with the offset that `zone` has at `after`, which is another one than at
    `before`, both in UTC."""
    offset = after.astimezone(zone).utcoffset()
    low, high = int(before.timestamp()), int(after.timestamp())
    while high - low > 1:
        middle = (low + high) // 2
        if datetime.fromtimestamp(middle, zone).utcoffset() == offset:
            high = middle
        else:
            low = middle
    return datetime.fromtimestamp(high, UTC)


def _ms(moment: datetime) -> int:
    return (moment - _EPOCH) // timedelta(milliseconds=1)
