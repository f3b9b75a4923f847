"""Definitions under names: the routes by which each kind is shown and changed.

    GET    /v1/COLLECTION                 list
    PUT    /v1/COLLECTION/{name}          put
    GET    /v1/COLLECTION/{name}          get
    DELETE /v1/COLLECTION/{name}          delete
    POST   /v1/COLLECTION/{name}/pause    pause; resume

A caller that may publish to the subject may change it, one that may publish or consume sees it. It
carries its version as `ETag`.

Cost: none beyond that of the calls. Threads: belongs to the event loop.
"""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

import msgspec
import structlog
from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response

from delayserver.api.conditions import entity_tag, expected_versions, wants_new
from delayserver.api.documents import NAMED_PAGE_MAX, encode
from delayserver.api.rest.authorize import CallerOf, require
from delayserver.api.rest.common import (
    INVALID,
    LOGGED,
    MISSING,
    PROBLEM,
    IfMatch,
    IfNoneMatch,
    NamePath,
    Parts,
    PartsOf,
    Responses,
    json_answer,
)
from delayserver.api.rest.openapi import answer, json_body
from delayserver.decisions.defining import Defining, W
from delayserver.decisions.group import Group
from delayserver.errors import NotFoundError
from delayserver.records.named import D, Known, S
from delayserver.records.tables import lost_subject
from delayserver.records.understanding import reason_of
from delayserver.security.tokens import Action, Caller
from delayserver.wire.fields import SUBJECT_PATTERN

log = structlog.get_logger()

LimitQuery = Annotated[int, Query(ge=1, le=NAMED_PAGE_MAX)]
CursorQuery = Annotated[str | None, Query(pattern=f"^{SUBJECT_PATTERN}$")]
"""The name behind which a page begins."""

CHANGED: Responses = {412: PROBLEM, **MISSING, **LOGGED}
"""Answers to a change of one that is there."""


def put_answers(document: type[msgspec.Struct]) -> Responses:
    """The answers that a PUT may get."""
    was_there = answer(document, "It was there, and is as the request says now")
    return {201: answer(document), 200: was_there, 412: PROBLEM, **INVALID, **LOGGED}


N = TypeVar("N", bound=msgspec.Struct)
"""The document of one."""


@dataclass(frozen=True, slots=True)
class NamedRoutes(Generic[W, D, S, N]):
    """Those of one kind, for one caller."""

    parts: Parts
    caller: Caller | None
    known: Defining[W, D, S]
    document: Callable[[Parts, Known[D, S]], N]

    def page(self, cursor: str | None, limit: int) -> tuple[list[N], str | None]:
        """Those that the caller sees of the `limit` that come behind `cursor`, in the order of
        their names, as far as they fit into an answer; and the cursor of the next page."""
        found, following = self.known.page(cursor or "", limit)
        documents: list[N] = []
        total_bytes = 0
        for number, known in enumerate(found):
            if not self._may_see(known):
                continue
            document = self._shown(known)
            total_bytes += len(encode(document))
            if documents and total_bytes > self.parts.calls.settings.answer_max_bytes:
                return documents, found[number - 1].definition.name
            documents.append(document)
        return documents, following

    async def put(self, wanted: W, if_match: str | None, if_none_match: str | None) -> Response:
        """Make one, or change it."""
        expected, only_new = expected_versions(if_match), wants_new(if_none_match)
        require(self.caller, Action.PUBLISH, wanted.subject)
        with suppress(NotFoundError):  # else the messages of somebody else's would never come
            self.own(wanted.name)
        now_ms = self.parts.calls.clock()
        known, is_new, group = self.known.put(wanted, now_ms, expected=expected, only_new=only_new)
        await self.parts.calls.soon_durable(group)
        return self._answer(known, 201 if is_new else 200)

    def get(self, name: str) -> Response:
        """One of them."""
        known = self.known.get(name)
        if self.caller is not None:
            self.caller.require((Action.PUBLISH, Action.CONSUME), subject_of(self.parts, known))
        return self._answer(known)

    async def delete(self, name: str, if_match: str | None) -> None:
        """End one."""
        expected = expected_versions(if_match)
        self.own(name)
        await self.parts.calls.soon_durable(self.known.delete(name, expected=expected))

    async def change(
        self,
        name: str,
        if_match: str | None,
        decide: Callable[..., tuple[Known[D, S], Group | None]],
    ) -> Response:
        """Have `decide` called with the name, the time, and `expected`: the versions that may be
        changed."""
        expected = expected_versions(if_match)
        self.own(name)
        known, group = decide(name, self.parts.calls.clock(), expected=expected)
        await self.parts.calls.soon_durable(group)
        return self._answer(known)

    def own(self, name: str) -> Known[D, S]:
        """One that the caller may change, as the owner of its publishes. Raises
        NotFoundError, AccessError."""
        known = self.known.get(name)
        require(self.caller, Action.PUBLISH, subject_of(self.parts, known))
        return known

    def _shown(self, known: Known[D, S]) -> N:
        """Returns one as a document. A definition that cannot be shown is shown bare, so it takes
        neither its page with it nor the answer to a change that is recorded."""
        try:
            return self.document(self.parts, known)
        except Exception as error:
            name = known.definition.name
            log.error("a definition cannot be shown", name=name, error=reason_of(error))
            return self.document(self.parts, self.known.bare(name, error))

    def _may_see(self, known: Known[D, S]) -> bool:
        subject = subject_of(self.parts, known)
        return self.caller is None or any(
            self.caller.may(action, subject) for action in (Action.PUBLISH, Action.CONSUME)
        )

    def _answer(self, known: Known[D, S], status: int = 200) -> Response:
        response = json_answer(self._shown(known), status)
        response.headers["ETag"] = entity_tag(known.version)
        return response


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedKind(Generic[W, D, S, N]):
    """A kind of definition, as its routes are made. The texts are those of the OpenAPI document."""

    word: str
    """The word for one; the collection has it in the plural."""
    decider: type[Defining[W, D, S]]
    model: type[msgspec.Struct]
    """The body of a PUT."""
    read: Callable[[NamedRoutes[W, D, S, N], str, Request], Awaitable[W]]
    """Reads a PUT of that name. Raises InputError, TooLargeError, AccessError."""
    one: type[N]
    many: type[msgspec.Struct]
    """Made of a list of `one`, and the cursor of the next page."""
    document: Callable[[Parts, Known[D, S]], N]
    put_text: str
    get_text: str
    delete_text: str
    pause_text: str
    resume_text: str


def routes_of(kind: NamedKind[W, D, S, N]) -> Callable[..., Awaitable[NamedRoutes[W, D, S, N]]]:
    """The dependency of a route that wants the definitions of a kind for its caller."""

    async def routes(parts: PartsOf, caller: CallerOf) -> NamedRoutes[W, D, S, N]:
        return NamedRoutes(parts, caller, parts.calls.part(kind.decider), kind.document)

    return routes


def _endpoints(kind: NamedKind[W, D, S, N]) -> dict[str, Callable[..., Awaitable[Any]]]:
    """By verb, the function that answers."""
    OfCaller = Annotated[NamedRoutes[Any, Any, Any, Any], Depends(routes_of(kind))]

    async def get_many(
        routes: OfCaller, limit: LimitQuery = NAMED_PAGE_MAX, cursor: CursorQuery = None
    ) -> Response:
        return json_answer(kind.many(*routes.page(cursor, limit)))

    async def put(
        name: NamePath,
        request: Request,
        routes: OfCaller,
        if_match: IfMatch = None,
        if_none_match: IfNoneMatch = None,
    ) -> Response:
        return await routes.put(await kind.read(routes, name, request), if_match, if_none_match)

    async def get(name: NamePath, routes: OfCaller) -> Response:
        return routes.get(name)

    async def delete(name: NamePath, routes: OfCaller, if_match: IfMatch = None) -> None:
        await routes.delete(name, if_match)

    async def pause(name: NamePath, routes: OfCaller, if_match: IfMatch = None) -> Response:
        return await routes.change(name, if_match, routes.known.pause)

    async def resume(name: NamePath, routes: OfCaller, if_match: IfMatch = None) -> Response:
        return await routes.change(name, if_match, routes.known.resume)

    return {
        "list": get_many,
        "put": put,
        "get": get,
        "delete": delete,
        "pause": pause,
        "resume": resume,
    }


def add_named_routes(router: APIRouter, kind: NamedKind[W, D, S, N]) -> None:
    """Add the routes above of a kind."""
    word, plural, endpoints = kind.word, f"{kind.word}s", _endpoints(kind)
    list_text = (
        f"{plural.capitalize()} in the order of their names, those that the token may publish or "
        "consume."
    )
    many, one = {200: answer(kind.many)}, {200: answer(kind.one)}
    for method, path, verb, text, responses, more in (
        ("GET", "", "list", list_text, INVALID | many, {}),
        (
            *("PUT", "/{name}", "put", kind.put_text, put_answers(kind.one)),
            {"status_code": 201, "openapi_extra": json_body(kind.model)},
        ),
        ("GET", "/{name}", "get", kind.get_text, MISSING | one, {}),
        ("DELETE", "/{name}", "delete", kind.delete_text, CHANGED, {"status_code": 204}),
        ("POST", "/{name}/pause", "pause", kind.pause_text, CHANGED | one, {}),
        ("POST", "/{name}/resume", "resume", kind.resume_text, CHANGED | one, {}),
    ):
        router.add_api_route(
            f"/v1/{plural}{path}",
            endpoints[verb],
            methods=[method],
            name=f"{verb}_{plural if verb == 'list' else word}",
            description=text,
            tags=[plural],
            responses=responses,
            **more,
        )


def subject_of(parts: Parts, known: Known[D, S]) -> str:
    """The name that one publishes to."""
    return subject_name(parts, known.definition.subject_id)


def subject_name(parts: Parts, subject_id: int) -> str:
    """The name of a subject; one that is lost, or was never there, is nobody's to publish to."""
    return parts.calls.subject_names.get(subject_id, lost_subject(subject_id))
