"""Schedules: messages that are published again and again.

Cost: about 200 µs per call, most of it for the next planned times; a page of 100 takes 15 ms.
Threads: belongs to the event loop.
"""

from collections.abc import Iterable
from typing import Annotated, Final

from fastapi import APIRouter, Depends, Query, Request, Response
from msgspec import UNSET

from delayserver.api.conditions import entity_tag
from delayserver.api.documents import name_among, stored_payload
from delayserver.api.rest.authorize import CallerOf, require
from delayserver.api.rest.common import (
    CONFLICT,
    INVALID,
    LOGGED,
    NamePath,
    Parts,
    PartsOf,
    json_answer,
)
from delayserver.api.rest.named import (
    NamedKind,
    NamedRoutes,
    add_named_routes,
    routes_of,
    subject_of,
)
from delayserver.api.rest.openapi import answer, json_body
from delayserver.delivery.batch import body_fields
from delayserver.parts.schedules.intake import read_schedule
from delayserver.parts.schedules.records import (
    CatchUp,
    KnownSchedule,
    Overlap,
    Schedule,
    ScheduleState,
    upcoming,
)
from delayserver.parts.schedules.scheduling import Scheduling, WantedSchedule, preview
from delayserver.security.tokens import Action
from delayserver.times import format_duration, format_time
from delayserver.wire.messages import PublishedDocument
from delayserver.wire.schedules import (
    PlannedDocument,
    ScheduleDocument,
    ScheduleListDocument,
    ScheduleModel,
)

NEXT_MAX: Final = 5
"""Planned times that an answer shows."""
PREVIEW_MAX: Final = 100

Schedules = NamedRoutes[WantedSchedule, Schedule, ScheduleState, ScheduleDocument]

router = APIRouter()


@router.post(
    "/v1/schedules/preview",
    tags=["schedules"],
    responses=INVALID | {200: answer(PlannedDocument)},
    openapi_extra=json_body(ScheduleModel),
)
async def preview_schedule(
    request: Request,
    caller: CallerOf,
    parts: PartsOf,
    count: Annotated[int, Query(ge=1, le=PREVIEW_MAX)] = NEXT_MAX,
) -> Response:
    """When a schedule would run: the next planned times, nothing is stored."""
    now_ms = parts.calls.clock()
    wanted = read_schedule(parts.intake, "preview", await request.body(), now_ms)
    require(caller, Action.PUBLISH, wanted.subject)
    planned = preview(wanted, now_ms, count)
    return json_answer(PlannedDocument([format_time(one) for one in planned]))


async def _read(schedules: Schedules, name: str, request: Request) -> WantedSchedule:
    parts = schedules.parts
    return read_schedule(parts.intake, name, await request.body(), parts.calls.clock())


def _document(parts: Parts, known: KnownSchedule) -> ScheduleDocument:
    now_ms, state = parts.calls.clock(), known.state
    last_id = parts.calls.encode_id(state.last_due_ms, state.last_seq) if state.last_seq else None
    planned = () if known.problem else upcoming(known.definition, state, now_ms, NEXT_MAX)
    return schedule_document(known, subject_of(parts, known), planned, last_id)


def schedule_document(
    known: KnownSchedule, subject: str, planned: Iterable[int], last_id: str | None
) -> ScheduleDocument:
    """The answer to a look-up of a schedule. `planned`: its next times, in ms."""
    schedule, state = known.definition, known.state
    payload = stored_payload(schedule.payload)
    every_ms, jitter_ms = schedule.every_ms, schedule.jitter_ms
    return ScheduleDocument(
        schedule.name,
        subject,
        schedule.cron or None,
        format_duration(every_ms) if every_ms else None,
        schedule.timezone,
        format_duration(jitter_ms) if jitter_ms else None,
        name_among(CatchUp, schedule.catch_up),
        name_among(Overlap, schedule.overlap),
        _time_or_none(schedule.start_ms),
        _time_or_none(schedule.end_ms),
        schedule.runs_max,
        payload.headers or {},
        [format_time(one) for one in planned],
        format_time(state.last_planned_ms) if last_id is not None else None,
        last_id,
        state.runs,
        state.skipped,
        state.is_paused,
        *body_fields(payload),
        known.problem or UNSET,
    )


def _time_or_none(time_ms: int | None) -> str | None:
    return None if time_ms is None else format_time(time_ms)


KIND: Final = NamedKind(
    word="schedule",
    decider=Scheduling,
    model=ScheduleModel,
    read=_read,
    one=ScheduleDocument,
    many=ScheduleListDocument,
    document=_document,
    put_text="Publish a message again and again, at the times of a cron expression or every so "
    "often.\n\n"
    "One that is there is changed: it keeps its counts, and its next run unless it is to run at "
    "other\ntimes.",
    get_text="A schedule, when it runs next, and what it has done.",
    delete_text="End a schedule: when this answers, it never runs again. Its messages stay.",
    pause_text="Publish nothing until it is resumed.",
    resume_text="Publish again; what becomes of the times that passed meanwhile, `catch_up` says.",
)
add_named_routes(router, KIND)


@router.post(
    "/v1/schedules/{name}/trigger",
    tags=["schedules"],
    status_code=201,
    responses=CONFLICT | LOGGED | {201: answer(PublishedDocument)},
)
async def trigger_schedule(
    name: NamePath, schedules: Annotated[Schedules, Depends(routes_of(KIND))]
) -> Response:
    """A run now, whatever the schedule says: it counts as one, and moves no planned time."""
    parts, known = schedules.parts, schedules.own(name)
    done, key = parts.calls.part(Scheduling).trigger(name, parts.calls.clock())
    await parts.calls.soon_durable(done.group)
    document = PublishedDocument(
        done.message_id,
        subject_of(parts, known),
        key,
        format_time(done.due_ms),
        "scheduled",
        False,
    )
    response = json_answer(document, 201)
    response.headers["Location"] = f"/v1/messages/{done.message_id}"
    response.headers["ETag"] = entity_tag(str(done.seq))
    return response
