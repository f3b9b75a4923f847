"""The hot path without ASGI: a uvicorn protocol that answers the two publish calls by itself.

    bytes ──▶ POST /v1/messages[/batch]? ──yes─▶ Hot ──▶ answers, when the group is durable
                                         ──no──▶ uvicorn's own protocol ──▶ ASGI

A request is served here if its head is as plain as those of clients are: HTTP/1.1, a content
length, nothing to wait for or to switch to. Everything else goes uvicorn's way, byte for byte as it
came, also in the middle of a connection. Answers come in the order of the
requests: groups become durable in order, and an answer that waits for none waits for the group of
the one before it; what goes uvicorn's way waits until all that came before is answered.

What a head says is found out by httptools, once: clients send the same few heads again and again,
so the last ones are remembered by their bytes. No task, no future, no ASGI message and no callback
of a parser exists for a request that is served here.

Cost: 25 µs of CPU per durable publish, system calls included (`scripts/bench`). Threads: belongs
to the event loop.
"""

from collections import deque
from functools import lru_cache
from http import HTTPStatus
from typing import NamedTuple, TypeAlias, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from delayserver.api.access import Access
from delayserver.api.hot import BATCH_PATH, MESSAGES_PATH, Answer, Hot, header, problem_answer
from delayserver.api.problems import MEDIA_TYPE, Problem, ProblemDocument
from delayserver.errors import AccessError
from delayserver.sequencer import Group

HEAD_MAX_BYTES = 4096
"""Longer heads go uvicorn's way."""
HEADS_KEPT = 1024
PIPELINED_MAX = 1024
"""A connection with so many unanswered requests is not read from."""

_PATHS = {MESSAGES_PATH.encode(): MESSAGES_PATH, BATCH_PATH.encode(): BATCH_PATH}
_BEGIN = b"POST " + MESSAGES_PATH.encode()
_CLOSE = b"connection: close\r\n"
_END = b"\r\n\r\n"
_STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}


def make_protocol(hot: Hot, access: Access) -> type[HttpToolsProtocol]:
    """The protocol class for one server, as uvicorn's `http` setting takes it."""
    return type("HotProtocol", (_HotProtocol,), {"hot": hot, "access": access})


class Head(NamedTuple):
    """What the head of a request says that is served here."""

    path: str
    length: int
    """Of its body, in bytes."""
    headers: list[tuple[bytes, bytes]]
    content_type: bytes
    keep_alive: bool


@lru_cache(maxsize=HEADS_KEPT)
def read_head(data: bytes) -> Head | None:
    """Read a head, which ends with an empty line; None: it goes uvicorn's way."""
    return _HeadParser().read(data)


class _HeadParser:
    """Callbacks of httptools for one head."""

    def __init__(self) -> None:
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._heads = self._bodies = 0

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._heads += 1

    def on_body(self, body: bytes) -> None:
        self._bodies += 1

    def read(self, data: bytes) -> Head | None:
        """See `read_head`."""
        parser = httptools.HttpRequestParser(self)
        try:
            parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            return None
        path = _PATHS.get(self._url)
        # An empty line that only some take for one must not hide a second request.
        is_one = self._heads == 1 and not self._bodies
        if path is None or not is_one or parser.get_method() != b"POST":
            return None
        if parser.get_http_version() != "1.1" or header(self._headers, b"expect"):
            return None
        length = header(self._headers, b"content-length")
        if not length.isdigit() or header(self._headers, b"transfer-encoding"):
            return None
        return Head(
            path,
            int(length),
            self._headers,
            header(self._headers, b"content-type"),
            parser.should_keep_alive(),
        )


class _Unanswered:
    """What uvicorn's protocol wants to know of the requests that are being answered here."""

    __slots__ = ("count", "disconnected", "keep_alive", "message_event", "more_body")

    def __init__(self) -> None:
        self.count = 0
        self.keep_alive = True
        self.more_body = False
        self.disconnected = False
        self.message_event = _NO_EVENT

    @property
    def response_complete(self) -> bool:
        return not self.count


class _NoEvent:
    """Nobody waits for more of a request that is served here."""

    def set(self) -> None:
        """uvicorn calls it when the connection is lost."""


_NO_EVENT = _NoEvent()
_AnyCycle: TypeAlias = _Unanswered | RequestResponseCycle
_NOT_HTTP = Answer(
    400,
    Problem(
        ProblemDocument(
            "about:blank", "Bad Request", 400, "what came in is not an HTTP/1.1 request"
        )
    ).encode(),
    content_type=MEDIA_TYPE.encode(),
)


class _HotProtocol(HttpToolsProtocol):
    hot: Hot
    access: Access

    _head: Head | None = None
    """Of the request whose body is being received here."""
    _parts: list[bytes]
    _missing: int
    _rest = b""
    """The beginning of a head that may be one of ours."""
    _parsing = False
    """uvicorn's parser is in the middle of a request."""
    _last_group: Group | None = None
    """The last one that an answer waited for."""
    _idle_since: float = 0.0

    def __init__(self, *arguments: object, **named: object) -> None:
        super().__init__(*arguments, **named)  # type: ignore[arg-type]
        self._unanswered = _Unanswered()
        self._answers: deque[Answer] = deque()
        """Those that wait for a group, in order."""

    # ── what comes in ──────────────────────────────────────────────────────────────────────────

    def data_received(self, data: bytes) -> None:
        start = 0
        if self._head is not None:
            start = self._receive_body(data)
        elif self._rest:
            data, self._rest = self._rest + data, b""
        length, unanswered = len(data), self._unanswered
        while start < length:
            cycle: _AnyCycle | None = self.cycle
            is_free = cycle is unanswered or cycle is None or cycle.response_complete
            if self._parsing or not is_free:
                super().data_received(data[start:] if start else data)
                return
            if not unanswered.keep_alive:
                return  # the connection ends with the answer that is due
            end = data.find(_END, start, start + HEAD_MAX_BYTES)
            if end < 0 and self._may_be_ours(data, start):
                self._rest = data[start:]
                return
            body_start = end + len(_END)
            head = read_head(data[start:body_start]) if end >= 0 else None
            # A body that is too long: uvicorn's way knows what to do.
            if head is None or head.length > self.hot.max_bytes(head.path):
                super().data_received(data[start:] if start else data)
                return
            start = body_start + head.length
            unanswered.count += 1
            self.cycle = unanswered  # type: ignore[assignment]
            if start > length:
                self._head = head
                self._parts = [data[body_start:]]
                self._missing = start - length
                return
            self._serve(head, data[body_start:start])

    @staticmethod
    def _may_be_ours(data: bytes, start: int) -> bool:
        """Whether the beginning of a head is worth waiting for the rest of it."""
        begun = data[start : start + len(_BEGIN)]
        return _BEGIN.startswith(begun) and len(data) - start < HEAD_MAX_BYTES

    def _receive_body(self, data: bytes) -> int:
        """The body of a request goes on; where in `data` it ends."""
        head, missing = self._head, self._missing
        assert head is not None
        if len(data) < missing:
            self._parts.append(data)
            self._missing = missing - len(data)
            return len(data)
        body = b"".join([*self._parts, data[:missing]])
        self._head, self._parts = None, []
        self._serve(head, body)
        return missing

    def on_message_begin(self) -> None:
        self._parsing = True
        super().on_message_begin()

    def on_message_complete(self) -> None:
        self._parsing = False
        super().on_message_complete()

    # ── answers ────────────────────────────────────────────────────────────────────────────────

    def _serve(self, head: Head, body: bytes) -> None:
        try:
            self.access.check(head.headers)
            answer = self.hot.answer(head.path, body, head.content_type)
        except AccessError as error:
            answer = problem_answer(error)
        unanswered = self._unanswered
        if not head.keep_alive:
            unanswered.keep_alive = False
        group = answer.group
        if unanswered.count > 1:
            if unanswered.count == PIPELINED_MAX:
                self.flow.pause_reading()
            last = self._last_group
            if group is None or (last is not None and group.first_seq < last.first_seq):
                group = last
        if group is None:
            self._write(answer)
        else:
            self._last_group = group
            self._answers.append(answer)
            group.when_durable(self._when_durable)

    def _when_durable(self, error: Exception | None) -> None:
        """What the next answer waits for is durable."""
        answer = self._answers.popleft()
        if error is not None and answer.group is not None:
            answer = problem_answer(error)
        self._write(answer)

    def _write(self, answer: Answer) -> None:
        """Give the next answer that is due."""
        unanswered = self._unanswered
        unanswered.count -= 1
        transport = self.transport
        if transport.is_closing():
            return
        is_last = not unanswered.count and not unanswered.keep_alive
        transport.write(
            b"%bcontent-type: %b\r\ncontent-length: %d\r\n%b%b\r\n%b"
            % (
                _STATUS_LINES[answer.status],
                answer.content_type,
                len(answer.body),
                answer.fields,
                _CLOSE if is_last else b"",
                answer.body,
            )
        )
        if is_last:
            transport.close()
        if not unanswered.count:
            self._last_group = None
            self.on_response_complete()
            return
        self.server_state.total_requests += 1
        if unanswered.count == PIPELINED_MAX - 1:
            self._resume_reading()

    def send_400_response(self, msg: str) -> None:
        """What came in last is not HTTP. A whole request before it is answered nevertheless."""
        cycle = cast(_AnyCycle | None, self.cycle)
        if cycle is not None and not cycle.response_complete and not cycle.more_body:
            cycle.keep_alive = False
            self.flow.pause_reading()
        elif self.pipeline:
            self.transport.close()  # an answer now would be taken for that to an earlier request
        else:
            self._unanswered.count = 1
            self._unanswered.keep_alive = False
            self._write(_NOT_HTTP)

    # ── clients that do not read their answers are not read from ───────────────────────────────

    def pause_writing(self) -> None:
        super().pause_writing()
        self.flow.pause_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.flow.resume_reading()

    def _resume_reading(self) -> None:
        if not self.flow.write_paused:
            self.flow.resume_reading()

    # ── idle connections ───────────────────────────────────────────────────────────────────────
    # One timer per connection that looks now and then, not one per request.

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
            return
        self._resume_reading()
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
        cycle = cast(_AnyCycle | None, self.cycle)
        busy = cycle is not None and not cycle.response_complete
        if busy or idle_s < self.timeout_keep_alive:
            self._watch_idleness(max(0.1, self.timeout_keep_alive - (0 if busy else idle_s)))
        else:
            self.transport.close()
