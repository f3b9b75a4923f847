"""The application: access, then the hot path, then everything else on FastAPI.

Threads: belongs to the event loop.
"""

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

import delayserver
from delayserver.api.access import Access
from delayserver.api.hot import Asgi, Hot, HotPath
from delayserver.api.intake import Intake
from delayserver.api.problems import (
    MEDIA_TYPE,
    FieldError,
    Problem,
    ProblemDocument,
    problem_of,
)
from delayserver.api.protocol import make_protocol
from delayserver.api.routes import make_router
from delayserver.errors import DelayServerError
from delayserver.server import Server
from delayserver.targets import TargetPolicy
from storage.errors import StorageError

DESCRIPTION = """
Publish a message and say when it is due. It is stored durably, can be looked up, moved and
cancelled, and is delivered on time, by webhook or to pulling consumers.

Errors are problem documents (RFC 9457). Durations: integer milliseconds, or text such as `30m`;
times: RFC 3339 with an offset, or integer milliseconds since the epoch.
"""


def make_app(server: Server) -> tuple[Asgi, type[HttpToolsProtocol]]:
    """The ASGI application of a server, and the protocol that takes the hot path past it."""
    intake = Intake(server.settings, server.engine.sequencer.subjects)
    registry = CollectorRegistry()
    registry.register(server.metrics)
    fastapi = FastAPI(
        title="Delay server", version=delayserver.__version__, description=DESCRIPTION
    )
    hot = Hot(server, intake)
    path = HotPath(server, hot, fastapi)
    targets = TargetPolicy(server.settings.webhook_targets)
    fastapi.include_router(make_router(server, intake, path, hot, targets, registry))
    fastapi.add_exception_handler(DelayServerError, _on_error)
    fastapi.add_exception_handler(StorageError, _on_error)
    fastapi.add_exception_handler(RequestValidationError, _on_invalid)
    fastapi.add_exception_handler(HTTPException, _on_http)
    access = Access(server.settings.token, path)
    return access, make_protocol(hot, access)


def _answer(problem: Problem) -> Response:
    return Response(problem.encode(), problem.status, problem.headers, MEDIA_TYPE)


async def _on_error(request: Request, error: Exception) -> Response:
    return _answer(problem_of(error))


async def _on_invalid(request: Request, error: Exception) -> Response:
    """What pydantic found, with a pointer per field."""
    assert isinstance(error, RequestValidationError)
    errors = []
    for one in error.errors():
        where = [str(step) for step in one["loc"] if step != "body"]
        errors.append(FieldError("".join("/" + step for step in where), one["msg"]))
    document = ProblemDocument(
        "urn:delayserver:problem:invalid",
        "The request is invalid",
        422,
        "; ".join(f"{one.pointer or '/'}: {one.detail}" for one in errors[:5]),
        errors,
    )
    return _answer(Problem(document))


async def _on_http(request: Request, error: Exception) -> Response:
    """No such path, no such method."""
    assert isinstance(error, HTTPException)
    detail = f"{request.method} {request.url.path}: {error.detail}; see /docs"
    document = ProblemDocument("about:blank", str(error.detail), error.status_code, detail)
    return _answer(Problem(document, dict(error.headers or {})))
