"""Sources: topics whose records are published, each once.

Cost: about 100 µs per call. Threads: belongs to the event loop.
"""

from functools import partial
from typing import Annotated, Final

from fastapi import APIRouter, Depends, Request, Response

from delayserver.api.documents import NAMED_PAGE_MAX, source_document
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
from delayserver.api.rest.targets import source_topic, topic_fields
from delayserver.decisions.sourcing import WantedSource
from delayserver.records.sources import KnownSource, OnError, Source, SourceState
from delayserver.security.tokens import Action
from delayserver.wire.reading import read
from delayserver.wire.sources import SourceDocument, SourceListDocument, SourceModel

GROUP_PREFIX: Final = "delayserver."

Sources = NamedRoutes[WantedSource, Source, SourceState, SourceDocument]


async def _sources(parts: PartsOf, caller: CallerOf) -> Sources:
    return NamedRoutes(parts, caller, parts.calls.sources, _document)


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
    source = WantedSource(
        name,
        wanted.subject,
        source_topic(wanted, sources.parts.targets),
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
    pause = partial(calls.sources.pause, now_ms=calls.clock())
    return await sources.change(name, if_match, pause)


@router.post(
    "/v1/sources/{name}/resume",
    tags=["sources"],
    responses=CHANGED | {200: answer(SourceDocument)},
)
async def resume_source(name: NamePath, sources: SourcesOf, if_match: IfMatch = None) -> Response:
    """Go on where it is; one that an error has stopped tries that record again."""
    calls = sources.parts.calls
    resume = partial(calls.sources.resume, now_ms=calls.clock())
    return await sources.change(name, if_match, resume)


def _document(parts: Parts, known: KnownSource) -> SourceDocument:
    source = known.definition
    error = parts.calls.source_errors.get(source.name)
    return source_document(known, subject_of(parts, known), error, topic_fields(source.topic))
