"""The errors of the client, in one tree.

ClientError
├── RefusedError            the server said no; carries the problem document
│   ├── InvalidError        400, 413, 422: `errors` names the fields
│   ├── NotAllowedError     401, 403: no token, a wrong one, or one without the right
│   ├── NotFoundError       404: no such message, key or subscription
│   ├── ConflictError       409: the state does not allow it; `state` is that state
│   ├── ChangedError        412: it is not the version that `if_match` names any more
│   ├── OverloadedError     429, 502, 503, 504: try again after `retry_after_s`
│   ├── DiskFullError       507: publishing is refused, delivery goes on
│   └── ServerError         everything else
├── UnansweredError         no answer came: what was asked may have been done, or not
│   └── UnreachableError    no connection was made: nothing was done
├── PartlyPublishedError    of a batch over several shards, `published` has the messages that are
│                           durable, by index, and `errors` the others
├── NotADelayServerError    something answers at that address, but not this API
├── UnsendableError         (a TypeError, too) a value has no form in JSON; nothing was sent
├── OtherLoopError          the producer is in use in another event loop; nothing was sent
└── ClosedError             the producer or consumer is closed

`OverloadedError` and `UnansweredError` reach the caller when the retries are used up.

All of them can be pickled, so that they reach the parent of a worker process.

Threads: values.
"""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Self

import msgspec

from delayserver.client.values import Published
from delayserver.errors import DelayServerError


class ClientError(DelayServerError):
    """Base of all errors of the client library."""


class FieldError(msgspec.Struct, frozen=True):
    """One bad field of a request."""

    pointer: str
    """JSON pointer (RFC 6901) into the message; empty: all of it."""
    detail: str


class Problem(msgspec.Struct, frozen=True):
    """A problem document (RFC 9457), as the server sends it with every refusal."""

    title: str
    status: int
    detail: str = ""
    type: str = "about:blank"
    errors: tuple[FieldError, ...] = ()
    state: str | None = None
    outcome: str = ""
    """`unknown`: it may have been done nevertheless, or a part of it."""
    ids: tuple[str | None, ...] = ()
    """With a batch: the ids of messages that were accepted nevertheless."""


class RefusedError(ClientError):
    """The server understood, and said no. Nothing was changed, unless `problem.outcome` says that
    this is unknown."""

    def __init__(self, problem: Problem, retry_after_s: float | None = None) -> None:
        super().__init__(_sentence(problem))
        self.problem = problem
        self.status = problem.status
        self.type = problem.type
        self.title = problem.title
        self.detail = problem.detail
        self.errors = problem.errors
        self.state = problem.state
        """With a conflict: the state that the message is in."""
        self.retry_after_s = retry_after_s
        """The server asked to wait for so long."""

    def __reduce__(self) -> tuple[type[Self], tuple[Problem, float | None], dict[str, Any]]:
        return type(self), (self.problem, self.retry_after_s), vars(self)


class InvalidError(RefusedError):
    """The request is wrong: correct it. `errors` names the fields."""


class NotAllowedError(RefusedError):
    """A token is needed, or this one does not have the right."""


class NotFoundError(RefusedError):
    """Nothing goes by that id, key or name."""


class ConflictError(RefusedError):
    """The state does not allow it: `state` says which."""


class ChangedError(RefusedError):
    """Another client was faster: look it up again, and decide anew."""


class OverloadedError(RefusedError):
    """Too much at once, or the server is stopping."""


class DiskFullError(RefusedError):
    """The disk of the server is nearly full."""


class ServerError(RefusedError):
    """The server failed."""


class UnansweredError(ClientError):
    """No answer came: the call may have had its effect, or not."""


class UnreachableError(UnansweredError):
    """No connection was made: nothing was done."""


class PartlyPublishedError(ClientError):
    """A batch is all or none in each shard: some of it was published, or may have been, and some
    was not. With keys of its own it may be published again as a whole."""

    def __init__(
        self, published: Mapping[int, Published], errors: Mapping[int, ClientError]
    ) -> None:
        count = len(published) + len(errors)
        first = errors[min(errors)]
        super().__init__(
            f"{len(published)} of {count} messages are published; message {min(errors)} is not: "
            f"{first}"
        )
        self.published = published
        """The durable ones, by their index in the batch."""
        self.errors = errors
        """The errors of the others, by their indexes. Behind an UnansweredError a message may be
        durable."""

    def __reduce__(self) -> tuple[type[Self], tuple[Any, Any], dict[str, Any]]:
        return type(self), (self.published, self.errors), vars(self)


class NotADelayServerError(ClientError):
    """The server at that address does not speak this API."""


class UnsendableError(ClientError, TypeError):
    """A body, key or header holds a value that would reach the consumer changed, such as a Decimal
    or NaN. The text names its place. Nothing was sent."""


class OtherLoopError(ClientError):
    """The producer belongs to another event loop, which still runs. Nothing was sent."""


class ClosedError(ClientError):
    """The producer or consumer is closed and takes nothing more."""


_CLASSES: Mapping[int, type[RefusedError]] = {
    HTTPStatus.BAD_REQUEST: InvalidError,
    HTTPStatus.UNAUTHORIZED: NotAllowedError,
    HTTPStatus.FORBIDDEN: NotAllowedError,
    HTTPStatus.NOT_FOUND: NotFoundError,
    HTTPStatus.CONFLICT: ConflictError,
    HTTPStatus.PRECONDITION_FAILED: ChangedError,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: InvalidError,
    HTTPStatus.UNPROCESSABLE_ENTITY: InvalidError,
    HTTPStatus.TOO_MANY_REQUESTS: OverloadedError,
    HTTPStatus.BAD_GATEWAY: OverloadedError,
    HTTPStatus.SERVICE_UNAVAILABLE: OverloadedError,
    HTTPStatus.GATEWAY_TIMEOUT: OverloadedError,
    HTTPStatus.INSUFFICIENT_STORAGE: DiskFullError,
}


def refusal(problem: Problem, retry_after_s: float | None = None) -> RefusedError:
    """The error for a problem document, by its status."""
    return _CLASSES.get(problem.status, ServerError)(problem, retry_after_s)


def _sentence(problem: Problem) -> str:
    text = f"{problem.title}: {problem.detail}" if problem.detail else problem.title
    named = [f"{one.pointer}: {one.detail}" for one in problem.errors if one.pointer]
    return f"{text} ({'; '.join(named[:5])})" if named else text
