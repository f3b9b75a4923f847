"""The hot path without ASGI: a uvicorn protocol that answers hot calls by itself.

    bytes ──▶ POST /v1/messages[/batch]? DELETE? ──yes─▶ Hot ──▶ answers, when the group is durable
          ──▶ pull, ack, nack, extend? ──yes─▶ Consuming ──▶ answers, when it has one
          ──▶ else ──▶ uvicorn's own protocol ──▶ ASGI

A request is served here if its head is as plain as those of clients are: HTTP/1.1, a content
length, nothing to wait for or to switch to. Everything else goes uvicorn's way, byte for byte as it
came, also in the middle of a connection. Answers come in the order of the
requests: groups become durable in order, and an answer that waits for none waits for the group of
the one before it. A call that goes uvicorn's way waits until all calls before it are answered. A
call of a consumer may wait for long: the bytes behind it are looked at when it is answered. If a
call before it has no answer yet, it goes uvicorn's way.

A head is remembered (`heads`). No task, no future, no ASGI message and no callback of a
parser exists for a request that is served here. Publishes that come while a group is being synced
are decided together (`Hot.gather`), and so are cancels that come in one turn.

Cost: 5 µs per durable publish, besides 10 µs of system calls (`scripts/bench`). Threads: belongs to
the event loop.
"""

import re
from collections import Counter
from functools import partial
from typing import Protocol, TypeAlias, cast

import httptools
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from delayserver.api.access import Access
from delayserver.api.hot.answers import Answer, consumer_answer, header, problem_answer, wire_of
from delayserver.api.hot.connection import Connection, Phase, Receiving, Unread
from delayserver.api.hot.consume import WHEN_GONE, Cancel
from delayserver.api.hot.heads import (
    HEADS_KEPT,
    OF_ONE,
    Head,
    head_without_upgrade,
    read_head,
    read_head_of_one,
)
from delayserver.api.hot.paths import (
    CLUSTER_PATH,
    ConsumerCall,
    asks_disk,
    is_arrow,
    one_of,
    parse_call,
)
from delayserver.api.hot.publish import Hot
from delayserver.api.moving import GIVE_BACK
from delayserver.config import Settings
from delayserver.decisions.group import Group
from delayserver.errors import DelayServerError
from delayserver.security.tokens import Caller, TokenTable
from delayserver.slices import Work

HEAD_MAX_BYTES = 4096
"""Longer heads go uvicorn's way."""
HELD_MAX_BYTES = 64 * 1024
"""The most bytes that are read behind a call that waits; as long as fewer come, the server notices
when the client goes away."""
LINGER_S = 1.0
"""A client has this long to close a connection whose last answer was given."""
TAKEN_BACK_MAX_BYTES = 64 * 1024
"""As much of a request that is passed on is kept, so that it can be left to another server."""
PIPELINED_MAX = 1024
"""A connection with so many unanswered requests is not read from."""

_CANCEL_LINE = re.compile(
    rb"DELETE /v1/subjects/([A-Za-z0-9._-]+)/keys/([A-Za-z0-9:@!$&'()*+,;=._~-]+)(?= HTTP/1\.1\r\n)"
)
"""The head of a cancel by key, as most clients send it."""
_BEGIN = b"POST /v1/"
_STATUS = slice(9, 12)
"""The place of the status in an answer, behind `HTTP/1.1 `."""
_END = b"\r\n\r\n"
_END_BYTES = len(_END)
_CLOSE = b"\r\nconnection: close" + _END


def make_protocol(hot: Hot, access: Access, settings: Settings) -> type[Connection]:
    """The protocol class for one server, as uvicorn's `http` setting takes it."""
    common: dict[bytes, int] = {}
    attributes = {
        "hot": hot,
        "access": access,
        "answers": access.answers,
        "tokens": access.tokens,
        "settings": settings,
        "turns": hot.turns,
        "receiving": Receiving(),
        "unread": Unread(settings.unread_max_bytes),
        "common": common,
        "common_of_cancels": set[bytes](),
    }
    return type("HotProtocol", (_HotProtocol,), attributes)


def make_passing_protocol(access: Access, settings: Settings) -> type[Connection]:
    """The same, where no call is served past ASGI: who answers passes calls on to others."""
    attributes = {
        "access": access,
        "answers": access.answers,
        "settings": settings,
        "receiving": Receiving(),
        "unread": Unread(settings.unread_max_bytes),
    }
    return type("PassingProtocol", (_PassingProtocol,), attributes)


class _Unanswered:
    """The attributes of requests that are being answered here, as uvicorn's protocol reads them."""

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
    """An event without effect: no task waits for more of a request that is served here."""

    def set(self) -> None:
        """uvicorn calls it when the connection is lost."""


_NO_EVENT = _NoEvent()
_AnyCycle: TypeAlias = _Unanswered | RequestResponseCycle


class TurnListener(Protocol):
    """Told of the turns of the event loop in which something comes in."""

    is_begun: bool

    def begin(self) -> None:
        """Something has."""


class _HotProtocol(Connection):
    hot: Hot
    turns: TurnListener
    answers: Counter[bytes]
    tokens: TokenTable
    common: dict[bytes, int]
    """Heads of publishes that were served without a caller, and the lengths of their bodies."""
    common_of_cancels: set[bytes]
    """The heads of cancels by key so far, without the address."""

    _head: Head | None = None
    """The head of the request whose body is being received here."""
    _head_data: bytes
    """As it came."""
    _parts: list[bytes]
    _missing: int
    _rest = b""
    """The beginning of a head that may be one of ours."""
    _parsing = Phase.NOTHING
    """Where in a request uvicorn's parser is."""
    last_group: Group | None = None
    """The last one that an answer waited for, while one is due."""
    _cancel: Cancel | None = None
    """A consumer waits for its answer; bytes behind its call are looked at afterwards."""
    _is_elsewhere = False
    """Another shard is asked, or the answer takes more than a turn of the loop; likewise."""
    _leave: Cancel | None = None
    """Ends the wait of a call that goes through ASGI."""
    _may_wait = False
    """Whether the last request that went uvicorn's way may be a long poll."""

    def __init__(self, *arguments: object, **named: object) -> None:
        super().__init__(*arguments, **named)  # type: ignore[arg-type]
        self._unanswered = _Unanswered()

    # ── input ──────────────────────────────────────────────────────────────────────────────────

    def data_received(self, data: bytes) -> None:
        if not self.turns.is_begun:
            self.turns.begin()
        unanswered = self._unanswered
        is_ours = self.cycle is unanswered  # type: ignore[comparison-overlap]
        if is_ours and not (unanswered.count or self._parsing or self._rest):
            # Nearly all requests: alone, whole, and with a head like others before.
            body_start = data.find(_END) + _END_BYTES
            length = self.common.get(data[:body_start])
            if length == len(data) - body_start and unanswered.keep_alive and self.tokens.is_open:
                unanswered.count = 1
                self.hot.gather(self, data[body_start:], None)
                return
            line = _CANCEL_LINE.match(data)
            if (
                line is not None
                and data[line.end() :] in self.common_of_cancels
                and len(data) <= self.access.head_max_bytes
                and unanswered.keep_alive
                and self.tokens.is_open
            ):
                unanswered.count = 1
                self.hot.cancels.gather(self, line[1].decode(), line[2].decode(), None)
                return
        start = 0
        if self._head is not None:
            start = self._receive_body(data)
        elif self._rest:
            data, self._rest = self._rest + data, b""
        length = len(data)
        while start < length:
            if not unanswered.keep_alive:
                return  # the connection ends with the answer that is due
            if self._cancel is not None or self._is_elsewhere:
                self._hold(data[start:])
                return
            cycle = cast("_AnyCycle | None", self.cycle)
            is_free = cycle is unanswered or cycle is None or cycle.response_complete
            if self._parsing or not is_free:
                self._pass_on(data, start)
                return
            end = data.find(_END, start, start + HEAD_MAX_BYTES)
            if end < 0 and self._may_be_ours(data, start):
                self.comes_in_part(Phase.HEAD, 0)  # its length is bounded here
                self._rest = data[start:]
                return
            body_start = end + _END_BYTES
            if end < 0:
                head = None
            elif data.startswith(OF_ONE, start):
                head = read_head_of_one(data[start:body_start])
            else:
                head = read_head(data[start:body_start])
            # A head or a body that is too long, or not to be waited for: uvicorn's way handles it,
            # and keeps nothing of a body before it has looked at the head.
            if (
                head is None
                or (head.call is not None and unanswered.count)
                or head.length > self.hot.max_bytes(head.path)
                or body_start - start > self.access.head_max_bytes
                or len(head.headers) > self.access.headers_max
                or (head.is_cancel and asks_disk(head.path) and self._is_restricted(head))
                or (is_arrow(head.content_type) and not self.hot.intake.reads_arrow)
                or (self.settings.cors_origins and header(head.headers, b"origin"))
                or (self.hot.routes and not self._is_gathered(head))
                or (body_start + head.length > length and self._is_refused(head))
            ):
                self._pass_on(data, start)
                return
            head_start, start = start, body_start + head.length
            unanswered.count += 1
            self.cycle = unanswered  # type: ignore[assignment]
            if start > length:
                self._head = head
                self._parts = [data[body_start:]]
                self._head_data = data[head_start:body_start]
                self._missing = start - length
                self.comes_in_part(Phase.BODY, length - body_start)
                return
            self._serve(head, data[body_start:start])

    def _is_gathered(self, head: Head) -> bool:
        """Whether a request may be handed to another shard from here."""
        if self._unanswered.count:
            return False
        may_gather = head.may_gather and self.hot.gathers
        return may_gather or head.may_gather_cancel or head.call is not None

    def _is_restricted(self, head: Head) -> bool:
        return self.access.is_restricted(head.headers)

    def _is_refused(self, head: Head) -> bool:
        """Whether a request is not served, whatever its body says. Nothing is counted."""
        try:
            caller = self.access.caller(head.headers)
            if caller is not None:
                caller.check_rate()
                self.hot.authorize(head.path, head.call, caller)
        except DelayServerError:
            return True
        return False

    def _pass_on(self, data: bytes, start: int) -> None:
        """Go uvicorn's way from here on."""
        rest, parser = memoryview(data)[start:], self.parser
        try:
            while len(rest):
                try:
                    parser.feed_data(rest)
                    break
                except httptools.HttpParserUpgrade as offer:
                    # An upgrade that is not taken is ignored (RFC 9110, 7.8). The parser is ready
                    # for the head again. It does not accept CONNECT.
                    rest = rest[offer.args[0] :]
                    line = parser.get_method(), self.url, parser.get_http_version()
                    parser.feed_data(head_without_upgrade(*line, self.headers))
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.logger.warning("Invalid HTTP request received.")
            self.send_400_response(str(error))
            return
        if self._parsing:
            cycle = cast("_AnyCycle | None", self.cycle)
            is_body = self._parsing is Phase.BODY
            is_kept = not is_body or cycle is None or not cycle.response_complete
            self.comes_in_part(self._parsing, len(data) - start, is_kept=is_kept)

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
            self.comes_in_part(Phase.BODY, len(data))
            return len(data)
        body = b"".join([*self._parts, data[:missing]])
        self._head, self._parts = None, []
        self._serve(head, body)
        return missing

    def on_message_begin(self) -> None:
        self._parsing = Phase.HEAD
        super().on_message_begin()
        self.scope[WHEN_GONE] = self._when_gone  # type: ignore[literal-required]

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # It will be read again, without the offer.
        self.check_head()
        self._parsing = Phase.BODY
        super().on_headers_complete()
        path = self.scope["path"]
        self._may_wait = path == CLUSTER_PATH or parse_call(self.scope["method"], path) is not None

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._parsing = Phase.NOTHING
        self.has_come()
        super().on_message_complete()

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends nothing more. Its calls are answered nevertheless, unless a call may
        wait for messages: a client that has gone looks alike, and must not get a lease."""
        self._drop_part()
        self.has_come()
        cycle = cast("_AnyCycle | None", self.cycle)
        if (
            cycle is None
            or cycle.response_complete
            or cycle.more_body
            or self._cancel is not None
            or (cycle is not self._unanswered and self._may_wait)
            or not self.transport.can_write_eof()  # TLS ends in both directions at once
        ):
            return False
        cycle.keep_alive = False
        return True

    # ── answers ────────────────────────────────────────────────────────────────────────────────

    def _serve(self, head: Head, body: bytes) -> None:
        if self.phase:
            self.has_come()
        hot, unanswered = self.hot, self._unanswered
        if unanswered.count > 1:
            # Calls that came before over this connection are answered first.
            while hot.decide():
                pass
            hot.cancels.decide()
        try:
            caller = self.access.check(head.headers)
            if caller is not None and head.call is None:
                hot.authorize(head.path, None, caller)
            if head.may_gather and hot.gathers and unanswered.count == 1:
                if caller is None:
                    if len(self.common) == HEADS_KEPT:
                        self.common.clear()
                    self.common[head.data] = head.length
                hot.gather(self, body, caller)
                return
            if head.call is not None:
                self._consume(head, head.call, body, caller)
                return
            if head.may_gather_cancel and unanswered.count == 1:
                self._gather_cancel(head, caller)
                return
            if head.is_long:
                if head.is_cancel:
                    work = hot.cancels.answering(body, caller)
                else:
                    work = hot.answering(body, head.content_type, caller, head.trace)
                self._serve_in_slices(head, len(body), work)
                return
            if head.is_cancel:
                answer = hot.cancels.answer(head.path, head.headers, caller)
            else:
                answer = hot.answer(head.path, body, head.content_type, caller, head.trace)
        except DelayServerError as error:
            answer = problem_answer(error)
        self._respond_with(head, answer)

    def _respond_with(self, head: Head, answer: Answer) -> None:
        if not head.keep_alive:
            self._unanswered.keep_alive = False
        self.respond(wire_of(answer), answer.group)

    def _serve_in_slices(self, head: Head, length: int, work: Work[Answer]) -> None:
        """Answer at once, as nearly always, or in a turn to come: the bytes behind the request are
        looked at then. `length`: of its body, in bytes. Raises OverloadedError."""
        is_told = False

        def told(answer: Answer | None, error: Exception | None) -> None:
            nonlocal is_told
            is_told = True
            was_held, self._is_elsewhere = self._is_elsewhere, False
            if answer is None:
                assert error is not None
                answer = problem_answer(error)
            self._respond_with(head, answer)
            if was_held and not self.transport.is_closing():
                self.data_received(b"")  # go on with the held bytes

        self.hot.bodies.begin(length, work, told)
        if not is_told:
            self._is_elsewhere = True

    def go_elsewhere(self) -> None:
        """The only request without an answer is answered by another shard: the bytes behind it are
        looked at then."""
        self._is_elsewhere = True

    def come_back(self, wire: bytes) -> None:
        """Give the answer of the other shard."""
        self._is_elsewhere = False
        self._give(wire)
        if not self.transport.is_closing():
            self.data_received(b"")  # go on with the held bytes

    def _gather_cancel(self, head: Head, caller: Caller | None) -> None:
        if caller is None:
            if len(self.common_of_cancels) == HEADS_KEPT:
                self.common_of_cancels.clear()
            self.common_of_cancels.add(head.data)
        self.hot.cancels.gather(self, *one_of(head.path), caller)

    def respond(self, wire: bytes, group: Group | None) -> None:
        """Give an answer to the last request, once the group is durable (None: at once)."""
        unanswered, tell = self._unanswered, self.write if group is None else self.tell
        if unanswered.count > 1:
            if unanswered.count == PIPELINED_MAX:
                self.flow.pause_reading()
            last = self.last_group
            if group is None or (last is not None and group.first_seq < last.first_seq):
                group = last
        if group is None:
            self.write(wire)
        else:
            self.last_group = group
            group.when_durable(partial(tell, wire))

    def _consume(self, head: Head, call: ConsumerCall, body: bytes, caller: Caller | None) -> None:
        """Serve a call of a consumer. Nothing else waits for an answer on the connection."""
        if not head.keep_alive:
            self._unanswered.keep_alive = False
        is_told = False

        def told(answer: bytes | Exception) -> None:
            nonlocal is_told
            is_told = True
            was_held, self._cancel = self._cancel is not None, None
            self.write(wire_of(consumer_answer(answer)))
            if was_held and not self.transport.is_closing():
                self.data_received(b"")  # go on with the held bytes

        cancel = self.hot.consuming.serve(call, body, caller, told)
        if not is_told:
            self._cancel = cancel

    def _hold(self, data: bytes) -> None:
        """Keep the bytes behind a call of a consumer that is not answered."""
        self._rest = data
        if len(data) > HELD_MAX_BYTES:
            self.flow.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for leave in (self._cancel, self._leave):
            if leave is not None:
                leave()
        self._cancel = self._leave = None

    def _when_gone(self, leave: Cancel | None) -> None:
        """Set the function to call when the client is gone; None: nothing any more."""
        self._leave = leave

    def tell(self, wire: bytes, error: Exception | None) -> None:
        """Give an answer whose group is durable, or is not since there was an error."""
        if error is not None:
            wire = wire_of(problem_answer(error))
        wire = self.hot.exit.wire(wire)
        unanswered, transport = self._unanswered, self.transport
        is_last = unanswered.count == 1 and unanswered.keep_alive and not self.pipeline
        if not is_last or self.flow.read_paused or transport.is_closing():
            self._give(wire)
            return
        # Nearly all answers, as `_give` gives them.
        unanswered.count = 0
        self.last_group = None
        self.answers[wire[_STATUS]] += 1
        transport.write(wire)
        self.server_state.total_requests += 1
        self.idle_since_s = self.loop.time()

    def write(self, wire: bytes, error: Exception | None = None) -> None:
        """Give the next answer that is due; nothing of it depends on the error of a group."""
        self._give(self.hot.exit.wire(wire))

    def _give(self, wire: bytes) -> None:
        """Give the next answer that is due, which has passed an exit."""
        unanswered, transport = self._unanswered, self.transport
        unanswered.count -= 1
        if transport.is_closing():
            return
        self.answers[wire[_STATUS]] += 1
        if unanswered.count:
            transport.write(wire)
            self.server_state.total_requests += 1
            if unanswered.count == PIPELINED_MAX - 1:
                self._resume_reading()
            return
        self.last_group = None
        if unanswered.keep_alive:
            transport.write(wire)
        else:
            transport.write(wire.replace(_END, _CLOSE, 1))
            self._close_in_stages()
        self.on_response_complete()

    def _close_in_stages(self) -> None:
        """Say that this was the last answer, and let the client close first (RFC 9112, 9.6): if the
        client had sent bytes that were never read, the system would drop the answer."""
        transport = self.transport
        if transport.can_write_eof():
            transport.write_eof()
        elif not self.is_tunnel:
            transport.close()
            return
        self.loop.call_later(LINGER_S, transport.close)

    def shutdown(self) -> None:
        cycle = cast("_AnyCycle | None", self.cycle)
        if self.moving is not None and self._parsing is Phase.BODY and self.has_unanswered():
            assert cycle is not None
            cycle.keep_alive = False  # The rest of its body is waited for.
        else:
            super().shutdown()

    def say_goodbye(self, answer: Answer) -> None:
        self._drop_part()
        self.has_come()
        self._unanswered.keep_alive = False
        self.cycle = self._unanswered  # type: ignore[assignment]
        self.transport.write(wire_of(answer).replace(_END, _CLOSE, 1))
        self._close_in_stages()

    def take_back(self, *, is_given_back: bool = False) -> bytes | None:
        if self._head is not None:
            is_only = self._unanswered.count == 1
            return b"".join((self._head_data, *self._parts)) if is_only else None
        return None if self.has_unanswered() or self._parsing else self._rest

    def has_unanswered(self) -> bool:
        cycle = cast("_AnyCycle | None", self.cycle)
        return cycle is not None and not cycle.response_complete

    def _drop_part(self) -> None:
        """A request whose body has come in part is none."""
        if self._head is not None:
            self._head, self._parts = None, []
            self._unanswered.count -= 1

    def refuse(self, answer: Answer) -> None:
        self._drop_part()
        cycle = cast("_AnyCycle | None", self.cycle)
        if cycle is not None and not cycle.response_complete and not cycle.more_body:
            # Whole requests before it are answered nevertheless.
            cycle.keep_alive = False
            self.flow.pause_reading()
        elif self.pipeline:
            self.transport.close()  # an answer now would be taken for that to an earlier request
        else:
            self._unanswered.count = 1
            self._unanswered.keep_alive = False
            self._give(wire_of(answer))  # No shard was asked.

    # ── clients that do not read their answers are not read from ───────────────────────────────

    def pause_writing(self) -> None:
        super().pause_writing()
        self.flow.pause_reading()
        self.unread.note(self, self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        self.flow.resume_reading()
        self.unread.note(self, 0)

    def _resume_reading(self) -> None:
        flow = self.flow
        if flow.read_paused and not flow.write_paused:
            flow.resume_reading()

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
            return
        if not self.has_unanswered():
            self.let_go()
        self._resume_reading()
        self.idle_since_s = self.loop.time()


class _PassingProtocol(_HotProtocol):
    """Everything goes uvicorn's way, bodies too, as they come."""

    _came: bytes | None = b""
    """Bytes of the request that is under way, or comes in; None: it is too long, or not alone."""

    def data_received(self, data: bytes) -> None:
        if self._unanswered.keep_alive:  # else the connection ends with the answer that is due
            came = self._came if self._parsing or self.has_unanswered() else b""
            if came is not None and len(came) + len(data) > TAKEN_BACK_MAX_BYTES:
                came = None
            self._came = None if came is None else came + data
            self._pass_on(data, 0)

    def on_message_begin(self) -> None:
        if self.has_unanswered():
            self._came = None
        super().on_message_begin()
        give_back = partial(self.move, is_given_back=True)
        self.scope[GIVE_BACK] = give_back  # type: ignore[typeddict-unknown-key]

    def take_back(self, *, is_given_back: bool = False) -> bytes | None:
        is_served = self.has_unanswered()
        if not (is_served or self._parsing):
            return b""
        return None if is_served and not is_given_back else self._came

    def refuse(self, answer: Answer) -> None:
        cycle = cast("_AnyCycle | None", self.cycle)
        if cycle is not None and cycle.more_body and not cycle.response_complete:
            # The body is streamed to the handler. After that we must not answer the request
            # ourselves, because the client would receive two responses.
            leave, self._leave = self._leave, None
            cycle.disconnected = True
            cycle.message_event.set()
            if leave is not None:
                leave()
        super().refuse(answer)
