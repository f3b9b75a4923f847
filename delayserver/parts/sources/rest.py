"""Sources: topics whose records are published, each once.

Cost: about 100 µs per call. Threads: belongs to the event loop.
"""

from functools import partial
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Depends, Request, Response
from msgspec import UNSET

from delayserver.api.documents import NAMED_PAGE_MAX
from delayserver.api.rest.authorize import CallerOf, require
from delayserver.api.rest.common import (
    INVALID,
    MISSING,
    IfMatch,
    IfNoneMatch,
    NamePath,
    Parts,
    PartsOf,
    json_answer,
    json_of,
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
from delayserver.api.rest.targets import check_client, kafka_topic, topic_fields
from delayserver.parts.sources.records import KnownSource, OnError, Source, SourceState
from delayserver.parts.sources.sourcing import Sourcing, WantedSource
from delayserver.security.tokens import Action
from delayserver.times import format_time
from delayserver.wire.reading import read
from delayserver.wire.sources import (
    SkippedRecordDocument,
    SourceDocument,
    SourceListDocument,
    SourceModel,
)

GROUP_PREFIX: Final = "delayserver."

Sources = NamedRoutes[WantedSource, Source, SourceState, SourceDocument]


async def _sources(parts: PartsOf, caller: CallerOf) -> Sources:
    return NamedRoutes(parts, caller, parts.calls.part(Sourcing), _document)


SourcesOf = Annotated[Sources, Depends(_sources)]

router = APIRouter()


@router.get("/v1/sources", tags=["sources"], responses=INVALID | {200: answer(SourceListDocument)})
async def list_sources(
    sources: SourcesOf, limit: LimitQuery = NAMED_PAGE_MAX, cursor: CursorQuery = None
) -> Response:
    """Sources in the order of their names, those that the token may publish or consume."""
    return json_answer(SourceListDocument(*sources.page(cursor, limit)))


@router.put(
    "/v1/sources/{name}",
    tags=["sources"],
    status_code=201,
    responses=put_answers(SourceDocument),
    openapi_extra=json_body(SourceModel),
)
async def put_source(
    name: NamePath,
    request: Request,
    sources: SourcesOf,
    if_match: IfMatch = None,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """Publish what stands in a topic, each offset once, from the first one on.

    One that is there is changed, and goes on where it is, unless it is to read another topic."""
    wanted = read(await json_of(request), SourceModel)
    # Before anybody is told which brokers are allowed.
    require(sources.caller, Action.PUBLISH, wanted.subject)
    check_client("kafka")
    source = WantedSource(
        name,
        wanted.subject,
        kafka_topic(wanted, sources.parts.targets),
        wanted.due_header,
        wanted.group or GROUP_PREFIX + name,
        OnError[wanted.on_error.upper()],
    )
    return await sources.put(source, if_match, if_none_match)


@router.get(
    "/v1/sources/{name}", tags=["sources"], responses=MISSING | {200: answer(SourceDocument)}
)
async def get_source(name: NamePath, sources: SourcesOf) -> Response:
    """A source, how far it is, and what it could not publish last."""
    return sources.get(name)


@router.delete("/v1/sources/{name}", tags=["sources"], status_code=204, responses=CHANGED)
async def delete_source(name: NamePath, sources: SourcesOf, if_match: IfMatch = None) -> None:
    """End a source: when this answers, it takes nothing more. What it has published stays."""
    await sources.delete(name, if_match)


@router.post(
    "/v1/sources/{name}/pause",
    tags=["sources"],
    responses=CHANGED | {200: answer(SourceDocument)},
)
async def pause_source(name: NamePath, sources: SourcesOf, if_match: IfMatch = None) -> Response:
    """Take nothing until it is resumed."""
    calls = sources.parts.calls
    pause = partial(calls.part(Sourcing).pause, now_ms=calls.clock())
    return await sources.change(name, if_match, pause)


@router.post(
    "/v1/sources/{name}/resume",
    tags=["sources"],
    responses=CHANGED | {200: answer(SourceDocument)},
)
async def resume_source(name: NamePath, sources: SourcesOf, if_match: IfMatch = None) -> Response:
    """Go on where it is; one that an error has stopped tries that record again."""
    calls = sources.parts.calls
    resume = partial(calls.part(Sourcing).resume, now_ms=calls.clock())
    return await sources.change(name, if_match, resume)


def _document(parts: Parts, known: KnownSource) -> SourceDocument:
    source, state = known.definition, known.state
    error = parts.calls.part(Sourcing).errors.get(source.name)
    last = state.last_skipped
    reason: Literal["asked", "error"] = "error" if state.is_stopped else "asked"
    return SourceDocument(
        name=source.name,
        subject=subject_of(parts, known),
        type="kafka",
        due_header=source.due_header,
        group=source.group,
        on_error="stop" if source.on_error == OnError.STOP else "skip",
        paused=state.is_paused,
        pause_reason=reason if state.is_paused else None,
        error=None if state.is_paused else error,
        positions={str(one): offset for one, offset in sorted(state.positions.items())},
        published=state.taken,
        skipped=state.skipped,
        last_skipped=None
        if last is None
        else SkippedRecordDocument(
            last.partition, last.offset, last.reason, format_time(last.time_ms)
        ),
        changed_at=format_time(state.changed_ms),
        not_understood=known.problem or UNSET,
        **topic_fields(source.topic),
    )
