"""The hot path without ASGI: a uvicorn protocol that answers the two publish calls by itself.

    httptools ──▶ POST /v1/messages[/batch]? ──yes─▶ Hot ──▶ answers, when the group is durable
                                             ──no──▶ uvicorn's own protocol ──▶ ASGI

All other requests go uvicorn's way, and so do pipelined ones behind a request that is not answered
yet, since answers must come in order. No task, no future and no ASGI message exists for a request
that is served here; all answers of a group are written in one turn of the loop.

Cost: 40 µs of CPU per durable publish, system calls included (`scripts/bench`); no task and no
ASGI message. Threads: belongs to the event loop.
"""

from functools import partial
from http import HTTPStatus
from typing import TypeAlias, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from delayserver.api.access import Access
from delayserver.api.hot import BATCH_PATH, MESSAGES_PATH, Answer, Hot, header, problem_answer
from delayserver.api.problems import MEDIA_TYPE, Problem, ProblemDocument
from delayserver.errors import AccessError

_PATHS = {MESSAGES_PATH.encode(): MESSAGES_PATH, BATCH_PATH.encode(): BATCH_PATH}
_STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}


def make_protocol(hot: Hot, access: Access) -> type[HttpToolsProtocol]:
    """The protocol class for one server, as uvicorn's `http` setting takes it."""
    return type("HotProtocol", (_HotProtocol,), {"hot": hot, "access": access})


class _Cycle:
    """What uvicorn's protocol wants to know of a request that is being answered here."""

    __slots__ = ("disconnected", "keep_alive", "message_event", "more_body", "response_complete")

    def __init__(self, keep_alive: bool) -> None:
        self.keep_alive = keep_alive
        self.more_body = True
        self.response_complete = False
        self.disconnected = False
        self.message_event = _NO_EVENT


_AnyCycle: TypeAlias = _Cycle | RequestResponseCycle
_NOT_HTTP = Answer(
    400,
    Problem(
        ProblemDocument(
            "about:blank", "Bad Request", 400, "what came in is not an HTTP/1.1 request"
        )
    ).encode(),
    content_type=MEDIA_TYPE.encode(),
)


class _NoEvent:
    """Nobody waits for more of a request that is served here."""

    def set(self) -> None:
        """uvicorn calls it when the connection is lost."""


_NO_EVENT = _NoEvent()


class _HotProtocol(HttpToolsProtocol):
    hot: Hot
    access: Access

    _path: str = ""
    """Of the request that is being received; empty when it goes uvicorn's way."""
    _idle_since: float = 0.0

    # ── parser callbacks ───────────────────────────────────────────────────────────────────────

    def on_message_begin(self) -> None:
        # The scope of ASGI is made in `on_headers_complete`, for those requests that need one.
        self.url = b""
        self.expect_100_continue = False
        self.headers = []

    def on_headers_complete(self) -> None:
        path = _PATHS.get(self.url)
        if path is not None and self._is_ours(path):
            self._path = path
            self._parts: list[bytes] = []
            self.cycle = _Cycle(self.parser.should_keep_alive())  # type: ignore[assignment]
            return
        self._path = ""
        url, headers, expect_100_continue = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expect_100_continue
        self.headers += headers
        super().on_headers_complete()

    def _is_ours(self, path: str) -> bool:
        parser = self.parser
        if parser.get_method() != b"POST" or self.expect_100_continue or parser.should_upgrade():
            return False
        if parser.get_http_version() != "1.1" or self._unanswered() is not None:
            return False
        length = header(self.headers, b"content-length")
        # Without a length, or with one that is too long: uvicorn's way knows what to do.
        return length.isdigit() and int(length) <= self.hot.max_bytes(path)

    def _unanswered(self) -> _AnyCycle | None:
        """The request that began last, as long as it has no answer."""
        cycle = cast(_AnyCycle | None, self.cycle)
        return None if cycle is None or cycle.response_complete else cycle

    def on_body(self, body: bytes) -> None:
        if self._path:
            self._parts.append(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._path:
            super().on_message_complete()
            return
        path, self._path = self._path, ""
        cycle = self.cycle
        cycle.more_body = False
        try:
            self.access.check(self.headers)
        except AccessError as error:
            self._write(cycle, problem_answer(error))
            return
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        answer = self.hot.answer(path, data, header(self.headers, b"content-type"))
        if answer.group is None:
            self._write(cycle, answer)
        else:
            # Until then the next request may come in, and `self.cycle` be that one's.
            answer.group.when_durable(partial(self._when_durable, cycle, answer))

    # ── answers ────────────────────────────────────────────────────────────────────────────────

    def _when_durable(self, cycle: _AnyCycle, answer: Answer, error: Exception | None) -> None:
        self._write(cycle, answer if error is None else problem_answer(error))

    def _write(self, cycle: _AnyCycle, answer: Answer) -> None:
        cycle.response_complete = True
        if self.transport.is_closing():
            return
        head = b"%bcontent-type: %b\r\ncontent-length: %d\r\n" % (
            _STATUS_LINES[answer.status],
            answer.content_type,
            len(answer.body),
        )
        for name, value in answer.headers:
            head += b"%b: %b\r\n" % (name, value)
        if cycle.keep_alive:
            self.transport.write(b"%b\r\n%b" % (head, answer.body))
        else:
            self.transport.write(b"%bconnection: close\r\n\r\n%b" % (head, answer.body))
            self.transport.close()
        self.on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """What came in last is not HTTP. A whole request before it is answered nevertheless."""
        cycle = self._unanswered()
        if cycle is not None and not cycle.more_body:
            cycle.keep_alive = False
            self.flow.pause_reading()
        elif self.pipeline:
            self.transport.close()  # an answer now would be taken for that to an earlier request
        else:
            self._write(_Cycle(keep_alive=False), _NOT_HTTP)

    # ── idle connections ───────────────────────────────────────────────────────────────────────
    # One timer per connection that looks now and then, not one per request.

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
            return
        self._idle_since = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._watch_idleness(self.timeout_keep_alive)

    def _unset_keepalive_if_required(self) -> None:
        if self.transport.is_closing() and self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None

    def _watch_idleness(self, delay_s: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(
            delay_s, self.timeout_keep_alive_handler
        )

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.is_closing():
            return
        idle_s = self.loop.time() - self._idle_since
        busy = self._unanswered() is not None
        if busy or idle_s < self.timeout_keep_alive:
            self._watch_idleness(max(0.1, self.timeout_keep_alive - (0 if busy else idle_s)))
        else:
            self.transport.close()
