"""Registers schedules with the core. Cost: none. Threads: immutable values."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from delayserver.api.scopes import PUBLISH_BODY, named_rules
from delayserver.parts.part import Feature, Halves, Write
from delayserver.parts.schedules.records import (
    SCHEDULE_CHANGES,
    check_schedule,
    check_schedule_state,
    read_state,
    unpack_schedule,
)
from delayserver.parts.schedules.scheduling import Scheduling
from delayserver.records.message import read_run
from delayserver.records.tables import named_key, named_writes
from storage.catalog import Table
from storage.rows import RecordKind

if TYPE_CHECKING:
    from fastapi import APIRouter

VERBS: Final = ("pause", "resume", "trigger")


def _effect(payload: bytes) -> Iterator[Write]:
    change, _ = SCHEDULE_CHANGES.read(payload)
    tables = Table.SCHEDULES, Table.SCHEDULE_STATES
    return named_writes(tables, change.name, change.schedule, change.state)


def _effect_of_run(payload: bytes) -> Iterator[Write]:
    """A run is a message, and the state behind it."""
    if (run := read_run(payload)) is not None:
        yield Table.SCHEDULE_STATES, named_key(run.schedule), run.state


def _routes() -> "APIRouter":
    from delayserver.parts.schedules.rest import router

    return router


SCHEDULES_PART: Final = Feature(
    name="schedule",
    effects={RecordKind.SCHEDULE: _effect, RecordKind.RUN: _effect_of_run},
    checks={Table.SCHEDULES: check_schedule, Table.SCHEDULE_STATES: check_schedule_state},
    halves=Halves(
        Table.SCHEDULES,
        lambda value: unpack_schedule(value).subject_id,
        Table.SCHEDULE_STATES,
        lambda value: read_state(value)[0].seq,
        "when it runs",
    ),
    decide=Scheduling,
    routes=_routes,
    rules=named_rules("schedules", VERBS) | {("POST", "/v1/schedules/preview"): PUBLISH_BODY},
    collection="schedules",
    verbs=VERBS,
    examples={
        "ScheduleModel": [
            {
                "subject": "report.daily",
                "body": {"shop": 7},
                "cron": "0 9 * * MON-FRI",
                "timezone": "Europe/Berlin",
            }
        ]
    },
)
