"""The hot path: publish one message, publish a batch. Plain ASGI, in front of FastAPI.

    request ──▶ read body ──▶ Intake ──▶ Server.publish ──▶ durable(group) ──▶ answer

The two calls stand in the OpenAPI document like all others, and any ASGI server can serve them.

Cost: 15 µs per request on top of uvicorn's own work (FastAPI with a pydantic body: 80 µs).
Threads: belongs to the event loop.
"""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from delayserver.api.intake import Intake
from delayserver.api.problems import MEDIA_TYPE, problem_of
from delayserver.errors import DelayServerError, TooLargeError
from delayserver.server import Server
from delayserver.times import format_time
from storage.errors import StorageError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]

MESSAGES_PATH = "/v1/messages"
BATCH_PATH = "/v1/messages/batch"
ENVELOPE_BYTES = 64 * 1024
"""A request may be longer than its body by this much."""


class PublishedDocument(msgspec.Struct):
    """The answer to a publish."""

    id: str
    subject: str
    key: str | None
    deliver_at: str
    state: str
    duplicate: bool


class BatchDocument(msgspec.Struct):
    """The answer to a batch."""

    count: int
    duplicates: int
    ids: list[str]


_encode = msgspec.json.Encoder().encode


class HotPath:
    """Serves the two paths, and passes everything else on."""

    def __init__(self, server: Server, intake: Intake, rest: Asgi) -> None:
        self._server = server
        self._intake = intake
        self._rest = rest
        # Base64 makes a third more of a body.
        self.one_max_bytes = server.settings.body_max_bytes * 4 // 3 + ENVELOPE_BYTES
        self._batch_max_bytes = server.settings.batch_max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._rest(scope, receive, send)
        elif scope["path"] == MESSAGES_PATH:
            await self.publish(scope, receive, send)
        elif scope["path"] == BATCH_PATH:
            await self.publish_batch(scope, receive, send)
        else:
            await self._rest(scope, receive, send)

    async def publish(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST /v1/messages"""
        server = self._server
        try:
            data = await read_body(receive, self.one_max_bytes)
            message = self._intake.one(data, server.clock())
            (published,) = server.publish([message])
            if published.group is not None:
                await server.durable(published.group)
        except (DelayServerError, StorageError) as error:
            await send_problem(send, error)
            return
        document = PublishedDocument(
            published.message_id,
            message.subject,
            message.payload.key,
            format_time(published.due_ms),
            "scheduled",
            published.duplicate,
        )
        location = b"/v1/messages/" + published.message_id.encode()
        await _answer(
            send, 200 if published.duplicate else 201, _encode(document), (b"location", location)
        )

    async def publish_batch(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST /v1/messages/batch"""
        server = self._server
        content_type = header(scope, b"content-type").decode("latin-1").lower()
        try:
            data = await read_body(receive, self._batch_max_bytes)
            messages = self._intake.batch(data, content_type, server.clock())
            published = server.publish(messages)
            # All new ones are in one group; only duplicates may be in an older one.
            groups = {id(one.group): one.group for one in published if one.group is not None}
            for group in groups.values():
                await server.durable(group)
        except (DelayServerError, StorageError) as error:
            await send_problem(send, error)
            return
        document = BatchDocument(
            len(published),
            sum(one.duplicate for one in published),
            [one.message_id for one in published],
        )
        await _answer(send, 200, _encode(document))


async def read_body(receive: Receive, max_bytes: int) -> bytes:
    """The whole request body. Raises TooLargeError as soon as it is longer than `max_bytes`."""
    message = await receive()
    data: bytes = message.get("body", b"")
    if not message.get("more_body", False):
        if len(data) > max_bytes:
            raise TooLargeError(f"the request has more than {max_bytes} bytes")
        return data
    parts = [data]
    total = len(data)
    while message.get("more_body", False):
        message = await receive()
        parts.append(message.get("body", b""))
        total += len(parts[-1])
        if total > max_bytes:
            raise TooLargeError(f"the request has more than {max_bytes} bytes")
    return b"".join(parts)


def header(scope: Scope, name: bytes) -> bytes:
    """The value of a request header (lower-case name), empty if it is not there."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return b""


async def send_problem(send: Send, error: Exception) -> None:
    """Answer with the problem document of an error."""
    problem = problem_of(error)
    extra = [(name.encode(), value.encode()) for name, value in problem.headers.items()]
    await _answer(send, problem.status, problem.encode(), *extra, content_type=MEDIA_TYPE.encode())


async def _answer(
    send: Send,
    status: int,
    body: bytes,
    *extra: tuple[bytes, bytes],
    content_type: bytes = b"application/json",
) -> None:
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [
                (b"content-type", content_type),
                (b"content-length", b"%d" % len(body)),
                *extra,
            ],
        }
    )
    await send({"type": "http.response.body", "body": body})
