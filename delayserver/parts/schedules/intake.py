"""Schedules as clients write them: from bytes to what `scheduling` takes.

All that is wrong with one is named at once. The expression itself is asked whether it ever runs.
Whether there is a time before its end is decided behind that, and of a new one alone: one that has
ended may be put again.

Cost: 100 µs. Threads: pure.
"""

from collections.abc import Callable
from typing import Any, Final, cast

import msgspec

from delayserver.api.intake import Intake
from delayserver.errors import InputError
from delayserver.parts.schedules.records import CatchUp, Overlap
from delayserver.parts.schedules.recurrence import EVERY_MIN_MS, check_expression
from delayserver.parts.schedules.scheduling import WantedSchedule
from delayserver.records.message import Payload
from delayserver.records.zones import check_zone
from delayserver.times import parse_duration_ms, parse_time_ms
from delayserver.wire.reading import in_one, readable_fields
from delayserver.wire.schedules import ScheduleModel

_UNSET: Final = msgspec.UNSET


def read_schedule(intake: Intake, name: str, data: bytes, now_ms: int) -> WantedSchedule:
    """A schedule as JSON. Raises InputError, TooLargeError."""
    found, errors = readable_fields(data, ScheduleModel)
    get = found.get
    done: dict[str, Any] = {}

    def check(field: str, read: Callable[[], object]) -> None:
        try:
            done[field] = read()
        except InputError as error:
            errors.append(error)

    if "subject" in found:
        check("payload", lambda: _payload(intake, found))
    timezone = str(get("timezone") or "UTC")
    check("timezone", lambda: check_zone(timezone))
    check("every_ms", lambda: _every_ms(intake, get("every")))
    check("cron", lambda: _cron(get("cron"), get("every")))
    check("jitter_ms", lambda: _jitter_ms(intake, get("jitter")))
    check("start_ms", lambda: _start_ms(intake, get("start_at"), now_ms))
    check("end_ms", lambda: _time_ms(get("end_at"), "/end_at"))
    start_ms, end_ms = done.get("start_ms"), done.get("end_ms")
    if end_ms is not None and start_ms is not None and end_ms <= start_ms:
        errors.append(InputError("it ends before it begins", "/end_at"))
    if errors:
        raise in_one(errors)
    return WantedSchedule(
        name,
        str(found["subject"]),
        done["payload"],
        done["cron"],
        done["every_ms"],
        timezone,
        done["jitter_ms"],
        CatchUp[str(get("catch_up") or "last").upper()],
        Overlap[str(get("overlap") or "allow").upper()],
        start_ms,
        end_ms,
        cast(int | None, get("max_runs")),
    )


def _payload(intake: Intake, found: dict[str, Any]) -> Payload:
    get = found.get
    return intake.payload(found["subject"], get("body", _UNSET), get("body_base64"), get("headers"))


def _cron(cron: Any, every: Any) -> str:
    if (cron is None) == (every is None):
        raise InputError("give either cron or every", "/cron")
    if cron is None:
        return ""
    if not cron.strip():
        raise InputError("it is empty", "/cron")
    check_expression(cron)
    return str(cron)


def _every_ms(intake: Intake, every: Any) -> int:
    if every is None:
        return 0
    every_ms = parse_duration_ms(every, "/every")
    if every_ms < EVERY_MIN_MS:
        raise InputError("a schedule runs every second at most: at least 1s", "/every")
    intake.check_wait(every_ms, "/every")
    return every_ms


def _jitter_ms(intake: Intake, jitter: Any) -> int:
    if jitter is None:
        return 0
    jitter_ms = parse_duration_ms(jitter, "/jitter")
    intake.check_wait(jitter_ms, "/jitter")
    return jitter_ms


def _start_ms(intake: Intake, start_at: Any, now_ms: int) -> int | None:
    start_ms = _time_ms(start_at, "/start_at")
    if start_ms is not None:
        intake.check_wait(start_ms - now_ms, "/start_at")
    return start_ms


def _time_ms(moment: Any, pointer: str) -> int | None:
    return None if moment is None else parse_time_ms(moment, pointer)
