"""Common parts of the routes: who answers, the statuses that may come, types of parameters.

Cost: none. Threads: belongs to the event loop.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from fastapi import Depends, Header, Path, Request
from fastapi.responses import Response
from prometheus_client import CollectorRegistry
from starlette.convertors import Convertor, register_url_convertor

from delayserver.api.documents import PLACES_HEADER, encode
from delayserver.api.hot.asgi import HotPath
from delayserver.api.intake import Intake
from delayserver.api.map_call import ShardMap
from delayserver.errors import InputError
from delayserver.queries.dead_letters import DeadLetters
from delayserver.queries.listing import Listing
from delayserver.queries.look_up import Queries
from delayserver.records.direct import DIRECT_NAME
from delayserver.security.targets import TargetPolicy
from delayserver.server.calls import Calls
from delayserver.wire.fields import SUBJECT_PATTERN
from delayserver.wire.operations import ShardPageDocument

PAGE_MAX = 1000
SEQ_MAX = 2**64 - 1

Responses = dict[int | str, dict[str, Any]]

PROBLEM: dict[str, Any] = {}
"""A problem document, as `openapi` completes it."""
INVALID: Responses = {422: PROBLEM, 503: PROBLEM}
MISSING: Responses = {404: PROBLEM, **INVALID}
CONFLICT: Responses = {409: PROBLEM, **MISSING}
CONDITIONAL: Responses = {412: PROBLEM, **CONFLICT}
PUBLISH: Responses = {409: PROBLEM, 507: PROBLEM, **INVALID}
STORED: Responses = {500: PROBLEM}
"""A read from the disk may find damage."""
LOGGED: Responses = {507: PROBLEM}
"""A record may find the disk full."""


_JSON = re.compile(r"application/([^/]*\+)?json", re.IGNORECASE)


class _KeyConvertor(Convertor[str]):
    """`{key:key}`: the rest of the path, slashes and line breaks included."""

    regex = "(?s:.*)"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("key", _KeyConvertor())

SubjectPath = Annotated[str, Path(pattern=f"^{SUBJECT_PATTERN}$")]
NamePath = Annotated[str, Path(pattern=f"^{SUBJECT_PATTERN}$")]
OWNER_PATTERN = f"^({SUBJECT_PATTERN}|{DIRECT_NAME})$"
"""A subscription, or all messages that say where they go."""
OwnerPath = Annotated[
    str,
    Path(
        pattern=OWNER_PATTERN,
        description=f"a subscription; {DIRECT_NAME}: messages that say where they go (`to`)",
    ),
]
"""Whose dead letters."""
IfMatch = Annotated[
    str | None, Header(description="only if this is its version (ETag), or * for any")
]
IfNoneMatch = Annotated[str | None, Header(description="*: only if there is none of that name")]
PlacesHeader = Annotated[str | None, Header(alias=PLACES_HEADER, include_in_schema=False)]
"""A shard asks: a page as ShardPageDocument."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Answers the calls of one server."""

    calls: Calls
    intake: Intake
    path: HotPath
    """Answers the calls that are hot, also where they come through FastAPI."""
    cluster: ShardMap
    queries: Queries
    dead_letters: DeadLetters
    listing: Listing
    targets: TargetPolicy
    registry: CollectorRegistry


async def _parts(request: Request) -> Parts:
    parts: Parts = request.app.state.parts
    return parts


PartsOf = Annotated[Parts, Depends(_parts)]
"""Those of the server that is asked."""


class Forward(Response):
    """An answer that a plain ASGI function gives."""

    def __init__(self, handler: Any, request: Request) -> None:
        super().__init__()
        self._handler = handler
        self._request = request

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._handler(scope, self._request.receive, send)


async def json_of(request: Request, default: bytes = b"") -> bytes:
    """The body of a request, which says that it is JSON; `default`: where it has none. Raises
    InputError."""
    data = await request.body()
    media_type = request.headers.get("content-type", "").partition(";")[0].strip()
    if data and not _JSON.fullmatch(media_type):
        raise InputError("send a JSON object, with the header `Content-Type: application/json`")
    return data or default


def shard_page(
    items: Iterable[bytes],
    places: Iterable[tuple[int, ...]],
    following: tuple[int, ...] | None,
    limit: int,
) -> Response:
    """The answer to whoever puts pages together; see ShardPageDocument."""
    raw = [msgspec.Raw(item) for item in items]
    return json_answer(ShardPageDocument(raw, list(places), following, limit))


def json_answer(document: msgspec.Struct, status: int = 200) -> Response:
    """A document as JSON."""
    return Response(encode(document), status, media_type="application/json")
