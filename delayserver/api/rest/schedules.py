"""Schedules: messages that are published again and again.

Cost: about 200 µs per call, most of it for the next planned times; a page of 100 takes 15 ms.
Threads: belongs to the event loop.
"""

from contextlib import suppress
from typing import Annotated, Final

from fastapi import APIRouter, Query, Request, Response

from delayserver.api.conditions import entity_tag, expected_versions, wants_new
from delayserver.api.documents import (
    NAMED_PAGE_MAX,
    PlannedDocument,
    PublishedDocument,
    ScheduleDocument,
    ScheduleListDocument,
    schedule_document,
)
from delayserver.api.rest import models
from delayserver.api.rest.authorize import CallerOf, require
from delayserver.api.rest.common import (
    DEFINED,
    INVALID,
    LOGGED,
    MISSING,
    PROBLEM,
    IfMatch,
    IfNoneMatch,
    NamePath,
    Parts,
    PartsOf,
    json_answer,
)
from delayserver.api.rest.openapi import answer, json_body
from delayserver.api.schedule_intake import read_schedule
from delayserver.decisions.scheduling import KnownSchedule, preview
from delayserver.errors import NotFoundError
from delayserver.records.schedules import upcoming
from delayserver.records.subjects import SUBJECT_PATTERN
from delayserver.security.tokens import Action, Caller
from delayserver.times import format_time

NEXT_MAX: Final = 5
"""Planned times that an answer shows."""
PREVIEW_MAX: Final = 100


router = APIRouter()


@router.post(
    "/v1/schedules/preview",
    tags=["schedules"],
    responses=INVALID | {200: answer(PlannedDocument)},
    openapi_extra=json_body(models.ScheduleModel),
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
    caller: CallerOf,
    parts: PartsOf,
    limit: Annotated[int, Query(ge=1, le=NAMED_PAGE_MAX)] = NAMED_PAGE_MAX,
    cursor: Annotated[str | None, Query(pattern=f"^{SUBJECT_PATTERN}$")] = None,
) -> Response:
    """Schedules in the order of their names, those that the token may publish or consume."""
    found, following = parts.calls.schedules_page(cursor or "", limit)
    documents: list[ScheduleDocument] = []
    total_bytes = 0
    for number, known in enumerate(found):
        if not _may_see(parts, caller, known):
            continue
        total_bytes += len(known.schedule.payload)
        if documents and total_bytes > parts.calls.settings.answer_max_bytes:
            following = found[number - 1].schedule.name
            break
        documents.append(_document(parts, known))
    return json_answer(ScheduleListDocument(documents, following))


@router.put(
    "/v1/schedules/{name}",
    tags=["schedules"],
    status_code=201,
    responses={
        201: answer(ScheduleDocument),
        200: answer(ScheduleDocument, "It was there, and is as the request says now"),
        412: PROBLEM,
        **INVALID,
        **LOGGED,
    },
    openapi_extra=json_body(models.ScheduleModel),
)
async def put_schedule(
    name: NamePath,
    request: Request,
    caller: CallerOf,
    parts: PartsOf,
    if_match: IfMatch = None,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """Publish a message again and again, at the times of a cron expression or every so often.

    One that is there is changed: it keeps its counts, and its next run unless it is to run at other
    times."""
    expected, only_new = expected_versions(if_match), wants_new(if_none_match)
    now_ms = parts.calls.clock()
    wanted = read_schedule(parts.intake, name, await request.body(), now_ms)
    require(caller, Action.PUBLISH, wanted.subject)
    with suppress(NotFoundError):  # else the messages of somebody else's would never come
        _require(parts, caller, parts.calls.schedule(name))
    known, is_new = await parts.calls.put_schedule(wanted, expected, only_new=only_new)
    return _answer(parts, known, 201 if is_new else 200)


@router.get(
    "/v1/schedules/{name}",
    tags=["schedules"],
    responses=MISSING | {200: answer(ScheduleDocument)},
)
async def get_schedule(name: NamePath, caller: CallerOf, parts: PartsOf) -> Response:
    """A schedule, when it runs next, and what it has done."""
    known = parts.calls.schedule(name)
    if caller is not None:
        caller.require((Action.PUBLISH, Action.CONSUME), _subject(parts, known))
    return _answer(parts, known)


@router.delete("/v1/schedules/{name}", tags=["schedules"], status_code=204, responses=DEFINED)
async def delete_schedule(
    name: NamePath, caller: CallerOf, parts: PartsOf, if_match: IfMatch = None
) -> None:
    """End a schedule: when this answers, it never runs again. What it has published stays."""
    expected = expected_versions(if_match)
    _require(parts, caller, parts.calls.schedule(name))
    await parts.calls.delete_schedule(name, expected)


@router.post(
    "/v1/schedules/{name}/pause",
    tags=["schedules"],
    responses=DEFINED | {200: answer(ScheduleDocument)},
)
async def pause_schedule(
    name: NamePath, caller: CallerOf, parts: PartsOf, if_match: IfMatch = None
) -> Response:
    """Publish nothing until it is resumed."""
    expected = expected_versions(if_match)
    _require(parts, caller, parts.calls.schedule(name))
    return _answer(parts, await parts.calls.pause_schedule(name, expected))


@router.post(
    "/v1/schedules/{name}/resume",
    tags=["schedules"],
    responses=DEFINED | {200: answer(ScheduleDocument)},
)
async def resume_schedule(
    name: NamePath, caller: CallerOf, parts: PartsOf, if_match: IfMatch = None
) -> Response:
    """Publish again; what becomes of the times that passed meanwhile, `catch_up` says."""
    expected = expected_versions(if_match)
    _require(parts, caller, parts.calls.schedule(name))
    return _answer(parts, await parts.calls.resume_schedule(name, expected))


@router.post(
    "/v1/schedules/{name}/trigger",
    tags=["schedules"],
    status_code=201,
    responses=MISSING | LOGGED | {201: answer(PublishedDocument)},
)
async def trigger_schedule(name: NamePath, caller: CallerOf, parts: PartsOf) -> Response:
    """A run now, whatever the schedule says: it counts as one, and moves no planned time."""
    known = parts.calls.schedule(name)
    _require(parts, caller, known)
    done, key = await parts.calls.trigger_schedule(name)
    document = PublishedDocument(
        done.message_id,
        _subject(parts, known),
        key,
        format_time(done.due_ms),
        "scheduled",
        False,
    )
    response = json_answer(document, 201)
    response.headers["Location"] = f"/v1/messages/{done.message_id}"
    response.headers["ETag"] = entity_tag(str(done.seq))
    return response


def _subject(parts: Parts, known: KnownSchedule) -> str:
    return parts.calls.subject_names[known.schedule.subject_id]


def _may_see(parts: Parts, caller: Caller | None, known: KnownSchedule) -> bool:
    subject = _subject(parts, known)
    return caller is None or any(
        caller.may(action, subject) for action in (Action.PUBLISH, Action.CONSUME)
    )


def _require(parts: Parts, caller: Caller | None, known: KnownSchedule) -> None:
    """Who changes a schedule takes away what it publishes."""
    require(caller, Action.PUBLISH, _subject(parts, known))


def _document(parts: Parts, known: KnownSchedule) -> ScheduleDocument:
    now_ms, state = parts.calls.clock(), known.state
    last_id = parts.calls.encode_id(state.last_due_ms, state.last_seq) if state.last_seq else None
    planned = upcoming(known.schedule, state, now_ms, NEXT_MAX)
    return schedule_document(known.schedule, state, _subject(parts, known), planned, last_id)


def _answer(parts: Parts, known: KnownSchedule, status: int = 200) -> Response:
    response = json_answer(_document(parts, known), status)
    response.headers["ETag"] = entity_tag(known.version)
    return response
