"""Everything that is not hot, as one application on FastAPI.

Cost: 0.4 s of CPU to import and to make, which is why `delayserver.serve.app` does it when it is
first asked, or some time after the start. Threads: made in any thread; the application belongs to
the event loop.
"""

from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from prometheus_client import CollectorRegistry, Info, ProcessCollector
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

import delayserver
from delayserver.api.hot.asgi import Asgi, GoneError, HotPath
from delayserver.api.intake import Intake
from delayserver.api.map_call import ShardMap
from delayserver.api.problems import MEDIA_TYPE, Problem, ProblemDocument, problem_of
from delayserver.api.rest import (
    backups,
    console,
    docs_page,
    messages,
    operations,
    subscriptions,
    tokens,
)
from delayserver.api.rest.authorize import authorize
from delayserver.api.rest.common import Parts
from delayserver.api.rest.openapi import complete, operation_id
from delayserver.api.scopes import DOCUMENT_PATH
from delayserver.errors import DelayServerError, InputError
from delayserver.queries.dead_letters import DeadLetters
from delayserver.queries.listing import Listing
from delayserver.queries.look_up import Queries
from delayserver.security.targets import TargetPolicy
from delayserver.server.calls import Calls
from delayserver.wire.reading import in_one, pointer_to
from storage.errors import StorageError

DESCRIPTION = """
Publish a message and say when it is due. It is stored durably, can be looked up, moved and
cancelled, and is delivered on time, by webhook or to pulling consumers.

Errors are problem documents (RFC 9457). Durations: integer milliseconds, or text such as `30m`;
times: RFC 3339 with an offset, or integer milliseconds since the epoch.
"""


def make_rest(calls: Calls, intake: Intake, path: HotPath, cluster: ShardMap) -> Asgi:
    """The application of a server, whose hot calls are those of `path`."""
    registry = CollectorRegistry()
    registry.register(calls.gauges.metrics)
    ProcessCollector(registry=registry)
    Info("delayserver_build", "Version", registry=registry).info(
        {"version": delayserver.__version__}
    )
    fastapi = _FastAPI(
        title="Delay server",
        version=delayserver.__version__,
        description=DESCRIPTION,
        license_info={"name": "Apache 2.0", "identifier": "Apache-2.0"},
        generate_unique_id_function=operation_id,
        openapi_url=DOCUMENT_PATH,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # a 307 without a word; the client may lose its token or body
    )
    fastapi.state.parts = Parts(
        calls=calls,
        intake=intake,
        path=path,
        cluster=cluster,
        queries=Queries(calls),
        dead_letters=DeadLetters(calls),
        listing=Listing(calls),
        targets=TargetPolicy(calls.settings.webhook_targets),
        registry=registry,
    )
    kinds = (messages, subscriptions, operations, backups)
    routers = [kind.router for kind in kinds]
    routers += [part.routes() for part in calls.parts if part.routes is not None]
    for router in (*routers, tokens.router):
        fastapi.include_router(router, dependencies=[Depends(authorize)])
    for pages in (docs_page, console):
        fastapi.include_router(pages.router)
    fastapi.add_exception_handler(DelayServerError, _on_error)
    fastapi.add_exception_handler(StorageError, _on_error)
    fastapi.add_exception_handler(RequestValidationError, _on_invalid)
    fastapi.add_exception_handler(HTTPException, _on_http)
    fastapi.add_exception_handler(ClientDisconnect, _on_disconnect)
    fastapi.add_exception_handler(GoneError, _on_disconnect)
    fastapi.add_exception_handler(Exception, _on_error)
    return fastapi


class _FastAPI(FastAPI):
    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            complete(super().openapi(), self.state.parts.calls.parts)
        assert self.openapi_schema is not None
        return self.openapi_schema


def _answer(problem: Problem) -> Response:
    return Response(problem.encode(), problem.status, problem.headers, MEDIA_TYPE)


async def _on_error(request: Request, error: Exception) -> Response:
    return _answer(problem_of(error))


async def _on_invalid(request: Request, error: Exception) -> Response:
    """A path, a query or a header that is wrong, with a pointer to each error."""
    assert isinstance(error, RequestValidationError)
    found = [InputError(one["msg"], pointer_to(*one["loc"])) for one in error.errors()]
    return _answer(problem_of(in_one(found)))


async def _on_disconnect(request: Request, error: Exception) -> Response:
    """The client has gone, so this answer is never sent."""
    return Response(status_code=499)


async def _on_http(request: Request, error: Exception) -> Response:
    """No such path, or no such method."""
    assert isinstance(error, HTTPException)
    detail = f"{request.method} {request.url.path}: {error.detail}; see /docs"
    document = ProblemDocument("about:blank", str(error.detail), error.status_code, detail)
    headers = dict(error.headers or {})
    if "GET" in headers.get("Allow", "").split(", "):
        headers["Allow"] += ", HEAD"
    return _answer(Problem(document, headers))
