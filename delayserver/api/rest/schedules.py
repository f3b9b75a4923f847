"""Schedules: messages that are published again and again.

Cost: about 200 µs per call, most of it for the next planned times; a page of 100 takes 15 ms.
Threads: belongs to the event loop.
"""

from functools import partial
from typing import Annotated, Final

from fastapi import APIRouter, Depends, Query, Request, Response

from delayserver.api.conditions import entity_tag
from delayserver.api.documents import NAMED_PAGE_MAX, schedule_document
from delayserver.api.rest.authorize import CallerOf, require
from delayserver.api.rest.common import (
    CONFLICT,
    INVALID,
    LOGGED,
    MISSING,
    IfMatch,
    IfNoneMatch,
    NamePath,
    Parts,
    PartsOf,
    json_answer,
)
from delayserver.api.rest.named import (
    CHANGED,
    CursorQuery,
    LimitQuery,
    NamedRoutes,
    put_answers,
    subject_of,
)
from delayserver.api.rest.openapi import answer, json_body
from delayserver.api.schedule_intake import read_schedule
from delayserver.decisions.scheduling import WantedSchedule, preview
from delayserver.records.schedules import KnownSchedule, Schedule, ScheduleState, upcoming
from delayserver.security.tokens import Action
from delayserver.times import format_time
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


async def _schedules(parts: PartsOf, caller: CallerOf) -> Schedules:
    return NamedRoutes(parts, caller, parts.calls.schedules, _document)


SchedulesOf = Annotated[Schedules, Depends(_schedules)]

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


@router.get(
    "/v1/schedules", tags=["schedules"], responses=INVALID | {200: answer(ScheduleListDocument)}
)
async def list_schedules(
    schedules: SchedulesOf, limit: LimitQuery = NAMED_PAGE_MAX, cursor: CursorQuery = None
) -> Response:
    """Schedules in the order of their names, those that the token may publish or consume."""
    return json_answer(ScheduleListDocument(*schedules.page(cursor, limit)))


@router.put(
    "/v1/schedules/{name}",
    tags=["schedules"],
    status_code=201,
    responses=put_answers(ScheduleDocument),
    openapi_extra=json_body(ScheduleModel),
)
async def put_schedule(
    name: NamePath,
    request: Request,
    schedules: SchedulesOf,
    if_match: IfMatch = None,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """Publish a message again and again, at the times of a cron expression or every so often.

    One that is there is changed: it keeps its counts, and its next run unless it is to run at other
    times."""
    parts = schedules.parts
    wanted = read_schedule(parts.intake, name, await request.body(), parts.calls.clock())
    return await schedules.put(wanted, if_match, if_none_match)


@router.get(
    "/v1/schedules/{name}",
    tags=["schedules"],
    responses=MISSING | {200: answer(ScheduleDocument)},
)
async def get_schedule(name: NamePath, schedules: SchedulesOf) -> Response:
    """A schedule, when it runs next, and what it has done."""
    return schedules.get(name)


@router.delete("/v1/schedules/{name}", tags=["schedules"], status_code=204, responses=CHANGED)
async def delete_schedule(name: NamePath, schedules: SchedulesOf, if_match: IfMatch = None) -> None:
    """End a schedule: when this answers, it never runs again. What it has published stays."""
    await schedules.delete(name, if_match)


@router.post(
    "/v1/schedules/{name}/pause",
    tags=["schedules"],
    responses=CHANGED | {200: answer(ScheduleDocument)},
)
async def pause_schedule(
    name: NamePath, schedules: SchedulesOf, if_match: IfMatch = None
) -> Response:
    """Publish nothing until it is resumed."""
    return await schedules.change(name, if_match, schedules.parts.calls.schedules.pause)


@router.post(
    "/v1/schedules/{name}/resume",
    tags=["schedules"],
    responses=CHANGED | {200: answer(ScheduleDocument)},
)
async def resume_schedule(
    name: NamePath, schedules: SchedulesOf, if_match: IfMatch = None
) -> Response:
    """Publish again; what becomes of the times that passed meanwhile, `catch_up` says."""
    calls = schedules.parts.calls
    resume = partial(calls.schedules.resume, now_ms=calls.clock())
    return await schedules.change(name, if_match, resume)


@router.post(
    "/v1/schedules/{name}/trigger",
    tags=["schedules"],
    status_code=201,
    responses=CONFLICT | LOGGED | {201: answer(PublishedDocument)},
)
async def trigger_schedule(name: NamePath, schedules: SchedulesOf) -> Response:
    """A run now, whatever the schedule says: it counts as one, and moves no planned time."""
    parts, known = schedules.parts, schedules.own(name)
    done, key = parts.calls.schedules.trigger(name, parts.calls.clock())
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


def _document(parts: Parts, known: KnownSchedule) -> ScheduleDocument:
    now_ms, state = parts.calls.clock(), known.state
    last_id = parts.calls.encode_id(state.last_due_ms, state.last_seq) if state.last_seq else None
    planned = () if known.problem else upcoming(known.definition, state, now_ms, NEXT_MAX)
    return schedule_document(known, subject_of(parts, known), planned, last_id)
