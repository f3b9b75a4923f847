"""An answer of the hot path, before it goes through ASGI or over the wire.

Cost: none. Threads: values.
"""

from collections.abc import Iterable
from http import HTTPStatus
from typing import Protocol

import msgspec
import structlog

from delayserver.api.problems import MEDIA_TYPE, problem_of
from delayserver.decisions.group import Group
from delayserver.errors import DelayServerError
from storage.errors import StorageError

Headers = Iterable[tuple[bytes, bytes]]
"""The headers of a request, names in lower case."""
JSON = b"application/json"

_STATUSES = {one.value: f"{one.value} {one.phrase}".encode() for one in HTTPStatus}

log = structlog.get_logger()


class Answer(msgspec.Struct):
    """An answer that may be given once `group` is durable (None: at once)."""

    status: int
    body: bytes
    fields: bytes = b""
    """Header fields as they go over the wire, each with its line break."""
    content_type: bytes = JSON
    group: Group | None = None
    seq: int = 0
    """The last record of the call that it answers."""


def problem_answer(error: Exception) -> Answer:
    """The problem document of an error."""
    if not isinstance(error, DelayServerError | StorageError):
        log.error("a request failed", exc_info=error)
    problem = problem_of(error)
    fields = "".join(f"{name}: {value}\r\n" for name, value in problem.headers.items())
    return Answer(problem.status, problem.encode(), fields.encode(), MEDIA_TYPE.encode())


class Always:
    """Header fields of all answers of the process: the `Date` (RFC 9110, 6.6.1), once a second."""

    fields = b""
    """As they go over the wire."""

    @classmethod
    def set(cls, headers: Headers) -> None:
        """Have them from now on."""
        cls.fields = b"".join(b"%b: %b\r\n" % header for header in headers)


def wire_of(answer: Answer) -> bytes:
    """An answer as it goes over the wire."""
    return b"HTTP/1.1 %b\r\n%bcontent-type: %b\r\ncontent-length: %d\r\n%b\r\n%b" % (
        _STATUSES[answer.status],
        Always.fields,
        answer.content_type,
        len(answer.body),
        answer.fields,
        answer.body,
    )


class AnsweredError(Exception):
    """Another shard has refused, and its answer is that to the whole call."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(f"another shard has answered {answer.status}")
        self.answer = answer


def consumer_answer(told: bytes | Exception) -> Answer:
    """The answer to a call of a consumer: a document, or why there is none."""
    if isinstance(told, bytes):
        return Answer(200, told)
    return told.answer if isinstance(told, AnsweredError) else problem_answer(told)


def header(headers: Headers, name: bytes) -> bytes:
    """The value of a request header (lower-case name), empty if it is not there."""
    for key, value in headers:
        if key == name:
            return value
    return b""


class Responder(Protocol):
    """The receiver of an answer to a publish that is decided together with others."""

    last_group: Group | None
    """The last one that an answer of it waits for."""

    def respond(self, wire: bytes, group: Group | None) -> None:
        """Give this answer once the group is durable (None: at once)."""

    def tell(self, wire: bytes, error: Exception | None) -> None:
        """Give this answer, or the error."""


class ForwardedClient(Responder, Protocol):
    """The receiver of an answer to a call that may belong to another shard."""

    def go_elsewhere(self) -> None:
        """Another shard is asked."""

    def come_back(self, wire: bytes) -> None:
        """Give the answer of the other shard."""
