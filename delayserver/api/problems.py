"""Errors as problem documents (RFC 9457): what happened, where, and what to do.

Cost: only when something is wrong. Threads: pure.
"""

import re
from dataclasses import dataclass, field
from typing import Annotated

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
from storage.errors import DamageError, DiskFullError, ExhaustedError, StagingError, StorageError

MEDIA_TYPE = "application/problem+json"
POINTED_ERRORS_MAX = 1000
STOPPING_RETRY_AFTER_MS = 2000
EXHAUSTED_RETRY_AFTER_MS = 1000
SHARD_AWAY_RETRY_AFTER_MS = 1000
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for a document that is not what it should be."""


class FieldError(msgspec.Struct, omit_defaults=True):
    """One bad field."""

    pointer: Annotated[
        str, msgspec.Meta(description="a JSON pointer (RFC 6901); empty: the whole document")
    ]
    detail: str


class ProblemDocument(msgspec.Struct, omit_defaults=True):
    """What went wrong, where, and what to do (RFC 9457)."""

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


def pointer_to(*steps: str | int) -> str:
    """A JSON pointer (RFC 6901)."""
    return "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in steps)


def _problem(name: str, title: str, status: int, error: Exception) -> Problem:
    document = ProblemDocument(f"urn:delayserver:problem:{name}", title, status, str(error))
    return Problem(document)


def problem_of(error: Exception) -> Problem:
    """The answer to an error. One that is not of our trees is a bug; whoever asks logs it."""
    match error:
        case TooLargeError():
            problem = _problem("too-large", "The request is too large", 413, error)
            problem.document.errors = [FieldError(error.pointer, error.detail)]
        case InputErrors():
            problem = _problem("invalid", "The request is invalid", 422, error)
            problem.document.errors = [
                FieldError(one.pointer, one.detail) for one in error.errors[:POINTED_ERRORS_MAX]
            ]
        case InputError():
            problem = _problem("invalid", "The request is invalid", 422, error)
            problem.document.errors = [FieldError(error.pointer, error.detail)]
        case NotFoundError():
            problem = _problem("not-found", "Not found", 404, error)
        case KeyConflictError():
            problem = _problem("key-conflict", "The key stands for other content", 409, error)
            problem.document.state = error.state
        case ConflictError():
            problem = _problem("conflict", "The state does not allow it", 409, error)
            problem.document.state = error.state
        case PreconditionError():
            problem = _problem("precondition", "It has changed since", 412, error)
            if error.version:
                problem.headers["etag"] = entity_tag(error.version)
        case OverloadedError():
            problem = _problem("overloaded", "Too much at once", 503, error)
            problem.headers["retry-after"] = _seconds(error.retry_after_ms)
        case RateLimitedError():
            problem = _problem("rate-limited", "Too many requests", 429, error)
            problem.headers["retry-after"] = _seconds(error.retry_after_ms)
        case HeadTooLargeError():
            problem = _problem("head-too-large", "The request's headers are too large", 431, error)
        case MalformedError():
            problem = _problem("malformed", "The request is malformed", 400, error)
        case CodingError():
            problem = _problem("coding", "The request's body is compressed", 415, error)
            problem.headers["accept-encoding"] = "identity"  # RFC 9110, 15.5.16
        case MediaTypeError():
            problem = _problem("media-type", "The content type is not taken", 415, error)
        case AckTimeoutError():
            problem = _problem("ack-timeout", "Not durable in time", 504, error)
            problem.document.ids = [*error.ids]
        case StoppingError():
            problem = _problem("stopping", "The server is stopping", 503, error)
            problem.headers["retry-after"] = _seconds(STOPPING_RETRY_AFTER_MS)
        case ShardAwayError():
            problem = _problem("shard-away", "A shard is away", 503, error)
            problem.headers["retry-after"] = _seconds(SHARD_AWAY_RETRY_AFTER_MS)
            problem.document.outcome = "unknown" if error.is_unknown else ""
        case StandbyError():
            problem = _problem("standby", "On standby", 503, error)
            problem.headers["retry-after"] = _seconds(SHARD_AWAY_RETRY_AFTER_MS)
        case MisdirectedError():
            problem = _problem("misdirected", "Another shard has it", 421, error)
            problem.headers["delay-owner"] = error.owner
        case DiskReserveError() | DiskFullError():
            problem = _problem("disk-full", "The disk is nearly full", 507, error)
        case ExhaustedError():
            problem = _problem("overloaded", "Too much at once", 503, error)
            problem.headers["retry-after"] = _seconds(EXHAUSTED_RETRY_AFTER_MS)
        case AccessError(authenticated=True):
            problem = _problem("forbidden", "Not allowed", 403, error)
        case AccessError():
            problem = _problem("unauthorized", "A token is needed", 401, error)
            problem.headers["www-authenticate"] = "Bearer"
        case StagingError():
            problem = _problem("invalid", "The staged import is invalid", 422, error)
        case DamageError():
            problem = _problem("damaged", "The stored message is damaged", 500, error)
        case DelayServerError() | StorageError():
            problem = _problem("internal", "The server failed", 500, error)
        case _:
            problem = _problem("internal", "The server failed", 500, error)
            problem.document.detail = "an unexpected error, which is in the server's log"
    return problem


def _seconds(duration_ms: int) -> str:
    return str(max(1, -(-duration_ms // 1000)))


_AT = " - at `"
_UNKNOWN = re.compile(r"unknown field `(?P<name>.*)`")
_MISSING = re.compile(r"missing required field `(?P<name>.*)`")
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")


def input_error(error: Exception, pointer: str = "") -> InputError:
    """A decoder's error (UNREADABLE) with a JSON pointer to the field, below `pointer`."""
    if isinstance(error, UnicodeDecodeError):
        return InputError(f"not UTF-8: {error.reason} (byte {error.start})", pointer)
    if isinstance(error, RecursionError):
        return InputError("nested too deeply", pointer)
    text = str(error)
    # The text may quote the client, who may have sent any number of places: the last one is ours.
    detail, at, path = text.removesuffix("`").rpartition(_AT)
    if at and text.endswith("`"):
        text = detail
        for name, index in _STEP.findall(path):
            pointer += pointer_to(name or index)
    if text == "Input data was truncated":
        text = "the JSON ends too early, or there is none"
    named = _UNKNOWN.search(text) or _MISSING.search(text)
    if named is not None:
        pointer += pointer_to(named["name"])
    return InputError(text, pointer)
