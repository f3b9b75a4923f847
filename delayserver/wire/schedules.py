"""Schedules as clients write them.

Whether an expression ever runs, and how far away a time may be, is decided where a schedule is read
(`delayserver.parts.schedules.intake`). Cost: of a decoder of msgspec. Threads: values.
"""

from typing import Annotated, Final, Generic, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from delayserver.wire.fields import (
    CatchUpName,
    Cursor,
    Duration,
    Moment,
    NotUnderstood,
    OverlapName,
    Strict,
    Subject,
    Time,
    When,
    about,
)
from delayserver.wire.messages import Body

RUNS_MAX: Final = 10**15


class ScheduleModel(Strict):
    """A message that is published again and again. Give `cron` or `every`, and `body` or
    `body_base64`."""

    subject: Subject
    body: Body = UNSET
    body_base64: str | None = None
    headers: dict[str, str] | None = None
    cron: Annotated[
        Annotated[str, Meta(extra_json_schema={"maxLength": 256})] | None,
        about(
            "minute, hour, day of month, month, day of week, with names; six fields: "
            "with seconds in front; or @hourly, @daily, @weekly, @monthly, @yearly"
        ),
    ] = None
    every: Duration = None
    timezone: Annotated[str | None, about("of `cron`: an IANA name; default: UTC")] = None
    jitter: Duration = None
    catch_up: Annotated[
        CatchUpName | None,
        about(
            "what becomes of runs that were missed, while the server was down or the "
            "schedule paused: the last one is made now (the default), none, or all"
        ),
    ] = None
    overlap: Annotated[
        OverlapName | None,
        about("skip: a run is left out while the message of the one before is not settled"),
    ] = None
    start_at: Moment = None
    end_at: Moment = None
    max_runs: Annotated[
        Annotated[int, Meta(ge=1, le=RUNS_MAX)] | None, about("the schedule ends with this run")
    ] = None


# ── answers ───────────────────────────────────────────────────────────────────────────────────────


Times = TypeVar("Times")


class ScheduleFields(msgspec.Struct, Generic[When, Times], frozen=True):
    """A schedule as it is."""

    name: str
    subject: str
    cron: str | None
    every: str | None
    timezone: str
    jitter: str | None
    catch_up: CatchUpName
    overlap: OverlapName
    start_at: When | None
    end_at: When | None
    max_runs: int | None
    headers: dict[str, str]
    next_at: Annotated[Times, about("the next five planned times")]
    last_at: Annotated[When | None, about("the planned time of the last run")]
    last_id: Annotated[str | None, about("its message")]
    runs: int
    skipped: Annotated[int, about("runs that were left out")]
    paused: bool


class ScheduleDocument(ScheduleFields[Time, list[Time]], frozen=True):
    """A schedule as it is."""

    body: msgspec.Raw | UnsetType = UNSET
    body_base64: str | UnsetType = UNSET
    not_understood: NotUnderstood = UNSET


class ScheduleListDocument(msgspec.Struct):
    """A page of schedules, in the order of their names; it may hold fewer than there is room
    for."""

    schedules: list[ScheduleDocument]
    cursor: Cursor


class PlannedDocument(msgspec.Struct):
    """When a schedule would run."""

    next_at: list[Time]
