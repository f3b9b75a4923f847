"""Errors as problem documents (RFC 9457): the failure, its place, and the way out.

Cost: only when something is wrong. Threads: pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final

import msgspec

from delayserver.api.conditions import entity_tag
from delayserver.errors import (
    AccessError,
    AckTimeoutError,
    CodingError,
    ConflictError,
    DelayServerError,
    DiskReserveError,
    HeadTooLargeError,
    InputError,
    InputErrors,
    KeyConflictError,
    MalformedError,
    MediaTypeError,
    MisdirectedError,
    NotFoundError,
    OverloadedError,
    PreconditionError,
    RateLimitedError,
    ShardAwayError,
    StandbyError,
    StoppingError,
    TooLargeError,
)
from delayserver.wire.reading import POINTED_ERRORS_MAX
from storage.errors import DamageError, DiskFullError, ExhaustedError, StagingError, StorageError

MEDIA_TYPE = "application/problem+json"
STOPPING_RETRY_AFTER_MS = 2000
EXHAUSTED_RETRY_AFTER_MS = 1000
SHARD_AWAY_RETRY_AFTER_MS = 1000


class FieldError(msgspec.Struct, omit_defaults=True):
    """One bad field."""

    pointer: Annotated[
        str, msgspec.Meta(description="a JSON pointer (RFC 6901); empty: the whole document")
    ]
    detail: str


class ProblemDocument(msgspec.Struct, omit_defaults=True):
    """An error: what happened, where, and what to do (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str
    errors: list[FieldError] | None = None
    state: Annotated[
        str, msgspec.Meta(description="with 409: the state that the message is in")
    ] = ""
    ids: Annotated[
        list[str | None] | None,
        msgspec.Meta(
            description="the messages that were accepted nevertheless, in order; null: not that one"
        ),
    ] = None
    outcome: Annotated[
        str,
        msgspec.Meta(description="`unknown` if the call, or a part of it, may have had its effect"),
    ] = ""


@dataclass(slots=True)
class Problem:
    """An error answer."""

    document: ProblemDocument
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def status(self) -> int:
        return self.document.status

    def encode(self) -> bytes:
        """The document as JSON."""
        return msgspec.json.encode(self.document)


def _problem(name: str, title: str, status: int, error: Exception) -> Problem:
    document = ProblemDocument(f"urn:delayserver:problem:{name}", title, status, str(error))
    return Problem(document)


_KINDS: Final[Sequence[tuple[type | tuple[type, ...], str, str, int]]] = (
    (TooLargeError, "too-large", "The request is too large", 413),
    ((InputErrors, InputError), "invalid", "The request is invalid", 422),
    (NotFoundError, "not-found", "Not found", 404),
    (KeyConflictError, "key-conflict", "The key stands for other content", 409),
    (ConflictError, "conflict", "The state does not allow it", 409),
    (PreconditionError, "precondition", "It has changed since", 412),
    (OverloadedError, "overloaded", "Too much at once", 503),
    (RateLimitedError, "rate-limited", "Too many requests", 429),
    (HeadTooLargeError, "head-too-large", "The request's headers are too large", 431),
    (MalformedError, "malformed", "The request is malformed", 400),
    (CodingError, "coding", "The request's body is compressed", 415),
    (MediaTypeError, "media-type", "The content type is not taken", 415),
    (AckTimeoutError, "ack-timeout", "Not durable in time", 504),
    (StoppingError, "stopping", "The server is stopping", 503),
    (ShardAwayError, "shard-away", "A shard is away", 503),
    (StandbyError, "standby", "On standby", 503),
    (MisdirectedError, "misdirected", "Another shard has it", 421),
    ((DiskReserveError, DiskFullError), "disk-full", "The disk is nearly full", 507),
    (ExhaustedError, "overloaded", "Too much at once", 503),
    (StagingError, "invalid", "The staged import is invalid", 422),
    (DamageError, "damaged", "The stored message is damaged", 500),
)
"""Each kind of error has the end of a URN, a title and a status. The first one
that fits counts."""


def problem_of(error: Exception) -> Problem:
    """The answer to an error. One that is not of our trees is a bug; whoever asks logs it."""
    if isinstance(error, AccessError):
        if error.authenticated:
            return _problem("forbidden", "Not allowed", 403, error)
        problem = _problem("unauthorized", "A token is needed", 401, error)
        problem.headers["www-authenticate"] = "Bearer"
        return problem
    for kinds, name, title, status in _KINDS:
        if isinstance(error, kinds):
            problem = _problem(name, title, status, error)
            _say_more(problem, error)
            return problem
    problem = _problem("internal", "The server failed", 500, error)
    if not isinstance(error, DelayServerError | StorageError):
        problem.document.detail = "an unexpected error, which is in the server's log"
    return problem


def _say_more(problem: Problem, error: Exception) -> None:
    """The fields and headers that only some kinds of errors have."""
    document, headers = problem.document, problem.headers
    match error:
        case InputErrors():
            document.errors = [
                FieldError(one.pointer, one.detail) for one in error.errors[:POINTED_ERRORS_MAX]
            ]
        case TooLargeError() | InputError():
            document.errors = [FieldError(error.pointer, error.detail)]
        case KeyConflictError() | ConflictError():
            document.state = error.state
        case PreconditionError():
            if error.version:
                headers["etag"] = entity_tag(error.version)
        case OverloadedError() | RateLimitedError():
            headers["retry-after"] = _seconds(error.retry_after_ms)
        case CodingError():
            headers["accept-encoding"] = "identity"  # RFC 9110, 15.5.16
        case AckTimeoutError():
            document.ids = [*error.ids]
        case StoppingError():
            headers["retry-after"] = _seconds(STOPPING_RETRY_AFTER_MS)
        case ShardAwayError():
            headers["retry-after"] = _seconds(SHARD_AWAY_RETRY_AFTER_MS)
            document.outcome = "unknown" if error.is_unknown else ""
        case StandbyError():
            headers["retry-after"] = _seconds(SHARD_AWAY_RETRY_AFTER_MS)
        case MisdirectedError():
            headers["delay-owner"] = error.owner
        case ExhaustedError():
            headers["retry-after"] = _seconds(EXHAUSTED_RETRY_AFTER_MS)


def _seconds(duration_ms: int) -> str:
    return str(max(1, -(-duration_ms // 1000)))
