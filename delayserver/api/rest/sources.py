"""Sources: topics whose records are published, each once.

Cost: about 100 µs per call. Threads: belongs to the event loop.
"""

from contextlib import suppress
from typing import Annotated, Final

from fastapi import APIRouter, Query, Response

from delayserver.api.conditions import entity_tag, expected_versions, wants_new
from delayserver.api.documents import (
    NAMED_PAGE_MAX,
    SourceDocument,
    SourceListDocument,
    source_document,
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
from delayserver.api.rest.openapi import answer
from delayserver.api.rest.targets import source_topic, topic_fields
from delayserver.decisions.sourcing import KnownSource, WantedSource
from delayserver.errors import NotFoundError
from delayserver.records.sources import OnError
from delayserver.records.subjects import SUBJECT_PATTERN
from delayserver.security.tokens import Action, Caller

GROUP_PREFIX: Final = "delayserver."

router = APIRouter()


@router.get("/v1/sources", tags=["sources"], responses=INVALID | {200: answer(SourceListDocument)})
async def list_sources(
    caller: CallerOf,
    parts: PartsOf,
    limit: Annotated[int, Query(ge=1, le=NAMED_PAGE_MAX)] = NAMED_PAGE_MAX,
    cursor: Annotated[str | None, Query(pattern=f"^{SUBJECT_PATTERN}$")] = None,
) -> Response:
    """Sources in the order of their names, those that the token may publish or consume."""
    found, following = parts.calls.sources_page(cursor or "", limit)
    documents = [_document(parts, known) for known in found if _may_see(parts, caller, known)]
    return json_answer(SourceListDocument(documents, following))


@router.put(
    "/v1/sources/{name}",
    tags=["sources"],
    status_code=201,
    responses={
        201: answer(SourceDocument),
        200: answer(SourceDocument, "It was there, and is as the request says now"),
        412: PROBLEM,
        **INVALID,
        **LOGGED,
    },
)
async def put_source(
    name: NamePath,
    wanted: models.SourceModel,
    caller: CallerOf,
    parts: PartsOf,
    if_match: IfMatch = None,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """Publish what stands in a topic, each offset once, from the first one on.

    One that is there is changed, and goes on where it is, unless it is to read another topic."""
    expected, only_new = expected_versions(if_match), wants_new(if_none_match)
    require(caller, Action.PUBLISH, wanted.subject)
    with suppress(NotFoundError):  # else the messages of somebody else's would never come
        _require(parts, caller, parts.calls.source(name))
    source = WantedSource(
        name,
        wanted.subject,
        source_topic(wanted, parts.targets),
        wanted.due_header,
        wanted.group or GROUP_PREFIX + name,
        OnError[wanted.on_error.upper()],
    )
    known, is_new = await parts.calls.put_source(source, expected, only_new=only_new)
    return _answer(parts, known, 201 if is_new else 200)


@router.get(
    "/v1/sources/{name}", tags=["sources"], responses=MISSING | {200: answer(SourceDocument)}
)
async def get_source(name: NamePath, caller: CallerOf, parts: PartsOf) -> Response:
    """A source, how far it is, and what it could not publish last."""
    known = parts.calls.source(name)
    if caller is not None:
        caller.require((Action.PUBLISH, Action.CONSUME), _subject(parts, known))
    return _answer(parts, known)


@router.delete("/v1/sources/{name}", tags=["sources"], status_code=204, responses=DEFINED)
async def delete_source(
    name: NamePath, caller: CallerOf, parts: PartsOf, if_match: IfMatch = None
) -> None:
    """End a source: when this answers, it takes nothing more. What it has published stays."""
    expected = expected_versions(if_match)
    _require(parts, caller, parts.calls.source(name))
    await parts.calls.delete_source(name, expected)


@router.post(
    "/v1/sources/{name}/pause",
    tags=["sources"],
    responses=DEFINED | {200: answer(SourceDocument)},
)
async def pause_source(
    name: NamePath, caller: CallerOf, parts: PartsOf, if_match: IfMatch = None
) -> Response:
    """Take nothing until it is resumed."""
    expected = expected_versions(if_match)
    _require(parts, caller, parts.calls.source(name))
    return _answer(parts, await parts.calls.pause_source(name, expected))


@router.post(
    "/v1/sources/{name}/resume",
    tags=["sources"],
    responses=DEFINED | {200: answer(SourceDocument)},
)
async def resume_source(
    name: NamePath, caller: CallerOf, parts: PartsOf, if_match: IfMatch = None
) -> Response:
    """Go on where it is; one that an error has stopped tries that record again."""
    expected = expected_versions(if_match)
    _require(parts, caller, parts.calls.source(name))
    return _answer(parts, await parts.calls.resume_source(name, expected))


def _subject(parts: Parts, known: KnownSource) -> str:
    return parts.calls.subject_names[known.source.subject_id]


def _may_see(parts: Parts, caller: Caller | None, known: KnownSource) -> bool:
    subject = _subject(parts, known)
    return caller is None or any(
        caller.may(action, subject) for action in (Action.PUBLISH, Action.CONSUME)
    )


def _require(parts: Parts, caller: Caller | None, known: KnownSource) -> None:
    """Who changes a source takes away what it publishes."""
    require(caller, Action.PUBLISH, _subject(parts, known))


def _document(parts: Parts, known: KnownSource) -> SourceDocument:
    error = parts.calls.source_errors.get(known.source.name)
    return source_document(*known, _subject(parts, known), error, topic_fields(known.source.topic))


def _answer(parts: Parts, known: KnownSource, status: int = 200) -> Response:
    response = json_answer(_document(parts, known), status)
    response.headers["ETag"] = entity_tag(known.version)
    return response
