"""Publish in place of the message that waits under a key, without ever delivering twice.

    PUT ──answer lost──▶ GET ──▶ a message waits: PUT, only if it is still that version ──▶ …
                             └─▶ none waits: it may have been this one, delivered. UnansweredError

A PUT that is simply repeated after a lost answer makes a second message where the first has fired
meanwhile, with another id, so that no receiver can drop it. A message that still waits may be
replaced by any client; `If-Match` makes sure that it is the one that was seen.

Cost: one request, as long as no answer is lost. Threads: belongs to the event loop.
"""

from functools import partial
from http import HTTPStatus

import msgspec

from delayserver.client.errors import UnansweredError, UnreachableError
from delayserver.client.retries import RetryPolicy, Time, answered
from delayserver.client.transport import HttpAnswer, Request, decoded


class _State(msgspec.Struct):
    state: str


class _UnknownError(Exception):
    """The client cannot know whether the server replaced it."""


async def replaced(
    request: Request,
    path: str,
    body: bytes,
    policy: RetryPolicy,
    time: Time,
    timeout_s: float,
) -> HttpAnswer:
    """The answer to PUT `body` at the path of a key. Raises UnansweredError."""
    is_lost = False

    async def attempt(*, timeout_s: float) -> HttpAnswer:
        nonlocal is_lost
        asked = partial(request, timeout_s=timeout_s)
        headers = {}
        if is_lost:
            found = await asked("GET", path)
            if found.status == HTTPStatus.NOT_FOUND:
                raise _UnknownError("no message goes by that key now")
            if not found.is_success:
                return found
            if (state := decoded(found.body, _State).state) != "scheduled":
                raise _UnknownError(f"the message of that key is {state} now")
            headers = {"if-match": found.headers["etag"]}
        try:
            answer = await asked("PUT", path, body, headers=headers)
        except UnreachableError:
            raise
        except UnansweredError:
            is_lost = True
            raise
        is_lost = is_lost or answer.is_unknown
        if headers and answer.status == HTTPStatus.PRECONDITION_FAILED:
            raise UnansweredError("what waited under that key changed while it was replaced")
        return answer

    try:
        return await answered(attempt, policy, time, timeout_s=timeout_s)
    except _UnknownError as error:
        raise UnansweredError(
            f"the answer to PUT {path} was lost, and {error}: it may have been this one"
        ) from None
