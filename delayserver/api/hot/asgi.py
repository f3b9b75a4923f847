"""The hot path as ASGI, in front of FastAPI; the protocol says when the client is gone.

    call ──▶ path not UTF-8? ─▶ refused, since different keys would be one
         ──▶ of a consumer? ──▶ Consuming ──▶ answered when it is told, or the client is gone
         ──▶ hot?           ──▶ Hot       ──▶ answered when its group is durable, or filed
         ──▶ health?        ──▶ answered
         ──▶ else           ──▶ FastAPI, its body limited

Calls that `protocol` does not serve come this way: a publish that names with `ack` the event it
waits for, a batch in MessagePack, which is made into JSON in slices, the first one in Arrow, which
waits for an import, a cancel whose subject has to be read, a head that is not as plain as most.

Cost: 100 µs per call more than without ASGI. Threads: belongs to the event loop.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote_to_bytes

import msgspec

from delayserver.api.hot.answers import Answer, Headers, consumer_answer, header, problem_answer
from delayserver.api.hot.cancel import ids_in
from delayserver.api.hot.consume import WHEN_GONE
from delayserver.api.hot.paths import (
    BATCH_PATH,
    MESSAGES_PATH,
    REST_MAX_BYTES,
    asks_disk,
    is_arrow,
    is_cancel,
    is_health,
    is_hot,
    is_long,
    one_of,
    parse_call,
)
from delayserver.api.hot.publish import Hot
from delayserver.api.intake import Intake
from delayserver.decisions.delayed_produce import Level
from delayserver.errors import AckTimeoutError, DelayServerError, InputError, TooLargeError
from delayserver.records.tracecontext import trace_of
from delayserver.server.calls import Calls
from delayserver.times import format_duration, parse_duration_ms
from delayserver.wire.reading import pointer_to
from storage.errors import StorageError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]
ACK_TIMEOUT_MAX_MS = 60_000
_ACK_LEVELS = {"durable": Level.DURABLE, "filed": Level.FILED}


class GoneError(Exception):
    """The client has closed its connection; nobody reads an answer."""


class HotPath:
    """The ASGI way in: serves these calls, and passes everything else on."""

    def __init__(self, calls: Calls, hot: Hot, rest: Asgi) -> None:
        self._calls = calls
        self._hot = hot
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._hot.turns.begin()
        is_http = scope["type"] == "http"
        if is_http and not is_utf8(scope):
            error = InputError("the path is not UTF-8 behind its escapes (%XX)", "/path")
            await send_answer(send, problem_answer(error))
        elif is_http and parse_call(scope["method"], scope["path"]) is not None:
            await self.consume(scope, receive, send)
        elif is_http and is_hot(scope["method"], scope["path"]):
            await self.publish(scope, receive, send)
        elif is_http and is_health(scope["method"], scope["path"]):
            await self.health(scope, receive, send)
        else:
            limit = max(self._hot.one_max_bytes, REST_MAX_BYTES)
            await self._rest(scope, limited(scope["headers"], receive, limit), send)

    async def publish(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one of them."""
        path, hot, headers = scope["path"], self._hot, scope["headers"]
        takes_ack = path in (MESSAGES_PATH, BATCH_PATH) and scope["method"] == "POST"
        query = scope["query_string"] if takes_ack else b""
        caller = scope.get("caller")
        try:
            if caller is not None:
                hot.authorize(path, None, caller)
            ack = parse_ack(query) if query else None
            limit = hot.max_bytes(path)
            data = await read_body(limited(headers, receive, limit, hot.about_limit(path)))
            content_type = header(headers, b"content-type")
            is_restricted = caller is not None and not caller.is_admin
            if is_long(scope["method"], path):
                with hot.bodies.holding(length := len(data)):
                    if path == BATCH_PATH:
                        await ready_to_read(hot.intake, content_type)
                        trace = trace_of(headers)
                        work = hot.answering(data, content_type, caller, trace)
                    else:
                        ids = ids_in(data) if is_restricted else ()
                        subjects = await hot.cancels.subjects_of(ids)
                        work = hot.cancels.answering(data, caller, subjects)
                    data = b""  # The work lets go of it as soon as it can.
                    answer = await hot.bodies.run(length, work)
            elif is_cancel(scope["method"], path):
                ids = [one_of(path)[1]] if is_restricted and asks_disk(path) else ()
                subjects = await hot.cancels.subjects_of(ids)
                answer = hot.cancels.answer(path, headers, caller, subjects)
            else:
                answer = hot.answer(path, data, content_type, caller, trace_of(headers))
            del data  # Its contents are kept elsewhere while the answer has to wait.
            if ack is not None and answer.status < 400:
                answer = await acknowledged(self._calls, answer, ack)
            elif answer.group is not None:
                await self._calls.durable(answer.group)
        except GoneError:
            return
        except (DelayServerError, StorageError) as error:
            answer = problem_answer(error)
        await send_answer(send, answer)

    async def health(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the health checks, before anything else is ready."""
        await send_answer(send, self._hot.health(scope["path"]))

    async def consume(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a call of a consumer."""
        call = parse_call(scope["method"], scope["path"])
        assert call is not None
        answered: asyncio.Future[bytes | Exception] = asyncio.get_running_loop().create_future()
        caller = scope.get("caller")

        def told(answer: bytes | Exception) -> None:
            if not answered.done():
                answered.set_result(answer)

        try:
            if caller is not None:
                self._hot.authorize(scope["path"], call, caller)
            data = await read_body(limited(scope["headers"], receive, REST_MAX_BYTES))
        except GoneError:
            return
        except DelayServerError as error:
            await send_answer(send, problem_answer(error))
            return
        cancel = self._hot.consuming.serve(call, data, caller, told)

        def gone() -> None:
            # Before anything else happens: the next due message must not be leased to it.
            cancel()
            told(GoneError())

        scope[WHEN_GONE](gone)
        try:
            answer = await answered
        finally:
            scope[WHEN_GONE](None)
            if not answered.done():
                cancel()
        if not isinstance(answer, GoneError):
            await send_answer(send, consumer_answer(answer))


def is_utf8(scope: Scope) -> bool:
    """Whether the path is UTF-8. All other bytes were replaced in it by the same U+FFFD."""
    if "\ufffd" not in scope["path"]:
        return True
    try:
        unquote_to_bytes(scope.get("raw_path") or b"").decode()
    except UnicodeDecodeError:
        return False
    return True


async def ready_to_read(intake: Intake, content_type: bytes) -> None:
    """See to it that a batch of that type can be read. Raises as `Intake.import_arrow`."""
    if is_arrow(content_type) and not intake.reads_arrow:
        await asyncio.get_running_loop().run_in_executor(None, intake.import_arrow)


class Ack(NamedTuple):
    """The event that a publish waits for, and for how long."""

    level: Level = Level.DURABLE
    timeout_ms: int = ACK_TIMEOUT_MAX_MS
    is_atomic: bool = False
    """A batch: all of it or nothing. Where a server has one shard, it always is."""


def parse_ack(query: bytes) -> Ack:
    """The query of a publish: `ack=durable|filed`, `timeout` and `atomic`. Raises InputError."""
    level, timeout_ms, is_atomic = Ack()
    for name, value in parse_qsl(query.decode("latin-1"), keep_blank_values=True):
        if name == "ack":
            if value not in _ACK_LEVELS:
                raise InputError("ack is durable or filed", "/query/ack")
            level = _ACK_LEVELS[value]
        elif name == "timeout":
            timeout_ms = parse_duration_ms(value, "/query/timeout")
            if timeout_ms > ACK_TIMEOUT_MAX_MS:
                most = format_duration(ACK_TIMEOUT_MAX_MS)
                raise InputError(f"a timeout is at most {most}", "/query/timeout")
        elif name == "atomic":
            if value not in ("true", "false"):
                raise InputError("atomic is true or false", "/query/atomic")
            is_atomic = value == "true"
        else:
            raise InputError("a publish takes ack, timeout and atomic", pointer_to("query", name))
    return Ack(level, timeout_ms, is_atomic)


async def acknowledged(calls: Calls, answer: Answer, ack: Ack) -> Answer:
    """The answer to a publish with `ack`: it waits for the event, for as long as `ack` says."""
    level, timeout_ms, _ = ack
    reached = await calls.acknowledged(answer.group, answer.seq, level, timeout_ms)
    if reached is Level.ACCEPTED:
        made = msgspec.json.decode(answer.body)
        raise AckTimeoutError(
            f"not durable within {format_duration(timeout_ms)}; it was accepted and may become "
            "so: look it up by its id (ids), or publish it again under its key",
            made["ids"] if "ids" in made else [made["id"]],
        )
    if reached.value < level.value:
        answer.status = 202
    return answer


def limited(headers: Headers, receive: Receive, max_bytes: int, about: str = "") -> Receive:
    """The same, but for a request body that is longer: then it raises TooLargeError, at once when
    the length is known. `about`: which limit it is, if not of the request itself."""
    length = header(headers, b"content-length")
    total = int(length) if length.isdigit() else 0
    counted = 0

    async def receive_limited() -> MutableMapping[str, Any]:
        nonlocal counted, total
        if total <= max_bytes:
            message = await receive()
            counted += len(message.get("body", b""))
            total = max(total, counted)
        if total > max_bytes:
            what = about or f"at most {max_bytes} bytes"
            raise TooLargeError(f"the request is too long: {what}")
        return message

    return receive_limited


async def read_body(receive: Receive) -> bytes:
    """The whole request body. Raises GoneError when it ends before that."""
    parts: list[bytes] = []
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise GoneError
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def send_answer(send: Send, answer: Answer) -> None:
    """Give an answer through ASGI."""
    headers = [
        (b"content-type", answer.content_type),
        (b"content-length", b"%d" % len(answer.body)),
        *(tuple(line.split(b": ", 1)) for line in answer.fields.splitlines()),
    ]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body})
