"""A connection that costs only itself: limits on a client's bytes, and on the time that it takes.

    request    its head within `head_timeout_ms`, its body within `body_timeout_ms` after that and
               a second more for each KiB, up to `body_time_max_ms`; else 408, and the connection
               ends
    requests   bodies that have come in part on all connections are no more than
               `receiving_max_bytes` together, and heads no more than that; the one that brings more
               gets a 503, and its connection ends
    head       no more headers, and no longer ones, than the limits allow; else 431
    answer     a client that reads nothing for `write_timeout_ms` is cut off; nothing more is read
               from it while it does not read. Bytes that the system has sent and the client's
               machine has taken count as read, so one that reads slowly is not cut off
    answers    the answers on all connections that clients have not read are no more than
               `unread_max_bytes` together; the client with most of them is cut off
    no request for `idle_timeout_ms`: the connection ends

How many there may be is the business of the acceptor (`delayserver.serve.acceptor`). A request that
comes in one piece is never timed. Each connection is looked at now and then by one timer of its
own, whatever happens on it meanwhile.

Cost: nothing for a request that comes in one piece; 2 µs per look. Threads: belongs to the event
loop.
"""

import asyncio
import contextlib
import fcntl
import sys
import termios
from abc import abstractmethod
from collections.abc import Callable
from enum import IntEnum
from typing import Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from delayserver.api.access import Access
from delayserver.api.hot.answers import Answer, problem_answer
from delayserver.api.moving import Moving
from delayserver.api.problems import MEDIA_TYPE, Problem, ProblemDocument
from delayserver.config import Settings
from delayserver.errors import (
    HeadTooLargeError,
    MalformedError,
    OverloadedError,
    StandbyError,
    StoppingError,
)

BODY_BYTES_PER_S: Final = 1024
PART_BYTES: Final = 64
"""The cost of each part of a request besides its bytes."""
PART_MAX_BYTES: Final = 256 * 1024
"""A read may hold whole requests before the head that is not whole: they count up to here."""
NOT_BEGUN: Final = StandbyError("the shard is given away just now, and nothing was done: try again")
LOOKS_PER_TIMEOUT: Final = 2
LOOK_MIN_S: Final = 0.02


class Phase(IntEnum):
    """The part of a request that is coming in."""

    NOTHING = 0
    HEAD = 1
    BODY = 2


def _refusal(title: str, status: int, detail: str) -> Answer:
    document = ProblemDocument("about:blank", title, status, detail)
    return Answer(status, Problem(document).encode(), content_type=MEDIA_TYPE.encode())


NOT_HTTP: Final = _refusal("Bad Request", 400, "what came in is not an HTTP/1.1 request")
TOO_SLOW: Final = _refusal(
    "Request Timeout",
    408,
    "the request did not come in time (head_timeout_ms, body_timeout_ms, body_time_max_ms)",
)


class Receiving:
    """The bytes of requests that have come in part, over all connections of a server.

    Heads and bodies are counted apart. Any client can send a head, and a client without a token
    must not use up the room of clients that may send a body."""

    def __init__(self) -> None:
        self.held_bytes = dict.fromkeys(Phase, 0)


class Unread:
    """Long answers that clients have not read, on all connections of a server."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._by_connection: dict[Connection, int] = {}
        self.total_bytes = 0

    def note(self, connection: "Connection", unread_bytes: int) -> None:
        """A connection has so many bytes to be read; 0: none, or few. If all together have too
        many, those with most are cut off."""
        self.total_bytes += unread_bytes - self._by_connection.pop(connection, 0)
        if unread_bytes:
            self._by_connection[connection] = unread_bytes
        while self.total_bytes > self._max_bytes:
            longest = max(self._by_connection, key=self._by_connection.__getitem__)
            self.total_bytes -= self._by_connection.pop(longest)
            longest.transport.abort()


def unsent_bytes(transport: asyncio.Transport) -> int:
    """Returns how many bytes of answers the client's machine has not taken yet. They are in our
    buffer, and in the system's."""
    in_system = 0
    connection = transport.get_extra_info("socket")
    if connection is not None:
        with contextlib.suppress(OSError):  # no TCP
            taken = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4))
            in_system = int.from_bytes(taken, sys.byteorder)
    return transport.get_write_buffer_size() + in_system


class Connection(HttpToolsProtocol):
    """uvicorn's protocol with limits. A subclass reports requests that have come in part."""

    access: Access
    settings: Settings
    receiving: Receiving
    unread: Unread
    moving: Moving | None = None
    """Where the connections of a server go that ends while its process goes on; None: nowhere."""

    is_tunnel = False
    """Whether another process of the cluster is the client, which passes calls on."""
    comes_late = False
    """Whether the server was ending already when the connection came."""
    unserved = b""
    """Bytes that came over the connection before this server had it."""
    phase = Phase.NOTHING
    """Which part of the request is still coming in."""
    idle_since_s = 0.0
    """When the last answer was given."""
    _began_s = 0.0
    _received_bytes = 0
    """The bytes of the part that `phase` names."""
    _held_bytes = 0
    """Its share of `receiving`."""
    _refusal: Answer | None = None
    """The answer that stopped the parser."""
    _unwritten_bytes = 0
    _unwritten_since_s = 0.0
    _watch: asyncio.TimerHandle | None = None
    on_lost: Callable[[], None]
    """Told when the connection is no more; set by who has accepted it."""

    @abstractmethod
    def refuse(self, answer: Answer) -> None:
        """Answer the request that is coming in, unless it would be taken for another one's, and
        end the connection."""

    @abstractmethod
    def say_goodbye(self, answer: Answer) -> None:
        """Answer a request that may be on its way, and end the connection when it has come."""

    @abstractmethod
    def take_back(self, *, is_given_back: bool = False) -> bytes | None:
        """Returns the bytes that have come and are not being served; None: a call is being served,
        or the bytes are gone. `is_given_back`: the call under way has not been begun after all."""

    @abstractmethod
    def has_unanswered(self) -> bool:
        """Whether a request has come in, or begun to, that has no answer yet."""

    # ── limits ─────────────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.idle_since_s = self.loop.time()
        settings = self.settings
        timeout_ms = min(
            settings.head_timeout_ms,
            settings.body_timeout_ms,
            settings.write_timeout_ms,
            settings.idle_timeout_ms,
        )
        self._look_s = max(LOOK_MIN_S, timeout_ms / 1000 / LOOKS_PER_TIMEOUT)
        self._watch = self.loop.call_later(self._look_s, self._look)
        if self.comes_late:
            self.shutdown()
        elif self.unserved:
            unserved, self.unserved = self.unserved, b""
            self.data_received(unserved)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.let_go()
        self.unread.note(self, 0)
        if self._watch is not None:
            self._watch.cancel()
        self.on_lost()

    def shutdown(self) -> None:
        """The server stops: a request that has come in part is refused, a whole one is answered. If
        the process goes on, its next server gets the calls that are not begun. A process that
        passes calls on is told that this one does not begin them."""
        if self.is_tunnel and self.take_back() is not None:
            self.say_goodbye(problem_answer(NOT_BEGUN))
        elif self.move():
            return
        elif self.phase:
            error = NOT_BEGUN if self.is_tunnel else StoppingError("the server is stopping")
            self._give_up(problem_answer(error))
        else:
            super().shutdown()

    def move(self, *, is_given_back: bool = False) -> bool:
        """Leave the connection to the next server of the process, if there will be one and no call
        of it has been begun (`is_given_back`: as in `take_back`). Returns whether it was left."""
        if self.moving is None or self.is_tunnel:
            return False
        data = self.take_back(is_given_back=is_given_back)
        if data is None or not self.moving.hold(self.transport, data):
            return False
        self.connection_lost(ConnectionAbortedError("the next server has it"))
        return True

    def check_head(self) -> None:
        """Stop the parser unless the head that has come in is sound and keeps the limits.

        Raises MalformedError, HeadTooLargeError, which end in `send_400_response`."""
        try:
            self.access.check_head(self.url, self.headers, self.parser.get_http_version())
        except (MalformedError, HeadTooLargeError) as error:
            self._refusal = problem_answer(error)
            raise

    def send_400_response(self, msg: str) -> None:
        """The parser cannot go on."""
        self.has_come()
        self.refuse(self._refusal or NOT_HTTP)

    def comes_in_part(self, phase: Phase, length: int, *, is_kept: bool = True) -> None:
        """More of a request is to come: it is timed from its first part on, and its bytes are
        counted if they are kept. After a refusal here, the connection is not read any more."""
        if self.phase is Phase.NOTHING:
            self._began_s = self.loop.time()
        if self.phase is not phase:
            self.let_go()
            self.phase, self._received_bytes = phase, 0
        self._received_bytes += length
        settings, receiving = self.settings, self.receiving
        if phase is Phase.HEAD and self._received_bytes > settings.head_max_bytes + PART_MAX_BYTES:
            self.has_come()
            self.refuse(problem_answer(self.access.head_too_long()))
        elif length and is_kept:
            self._held_bytes += length + PART_BYTES
            receiving.held_bytes[phase] += length + PART_BYTES
            if receiving.held_bytes[phase] > settings.receiving_max_bytes:
                self.has_come()
                error = OverloadedError(
                    f"requests that are being received have {settings.receiving_max_bytes} bytes "
                    "together (receiving_max_bytes)"
                )
                self.refuse(problem_answer(error))

    def has_come(self) -> None:
        """Nothing more is to come of the request that came in part."""
        self.let_go()
        self.phase = Phase.NOTHING

    def let_go(self) -> None:
        """Drop the bytes of a request that came in part."""
        self.receiving.held_bytes[self.phase] -= self._held_bytes
        self._held_bytes = 0

    # ── time ───────────────────────────────────────────────────────────────────────────────────

    def _look(self) -> None:
        """Is the client late with something?"""
        now_s = self.loop.time()
        self._watch = self.loop.call_later(self._look_s, self._look)
        settings = self.settings
        unwritten_bytes = self.transport.get_write_buffer_size()
        if unwritten_bytes or self.transport.is_closing():
            if self.flow.write_paused:
                self.unread.note(self, unwritten_bytes)
            unwritten_bytes = unsent_bytes(self.transport)
            if unwritten_bytes != self._unwritten_bytes or not self._unwritten_since_s:
                self._unwritten_bytes = unwritten_bytes
                self._unwritten_since_s = now_s
            elif now_s - self._unwritten_since_s >= settings.write_timeout_ms / 1000:
                self.transport.abort()
            return
        self._unwritten_since_s = 0.0
        if self.flow.read_paused:
            self._began_s = now_s  # it is we who do not read
        elif self.phase:
            time_ms = settings.head_timeout_ms
            if self.phase is Phase.BODY:
                bought_ms = self._received_bytes * 1000 // BODY_BYTES_PER_S
                time_ms += min(settings.body_timeout_ms + bought_ms, settings.body_time_max_ms)
            if now_s - self._began_s >= time_ms / 1000:
                self._give_up(TOO_SLOW)
        elif self.has_unanswered():
            self.idle_since_s = now_s
        elif now_s - self.idle_since_s >= settings.idle_timeout_ms / 1000:
            self.transport.close()

    def _give_up(self, answer: Answer) -> None:
        """Refuse the request that has come in part."""
        is_answered = self.phase is Phase.BODY and not self.has_unanswered()
        self.has_come()
        if is_answered:
            self.transport.abort()  # the answer did not need the body
        else:
            self.refuse(answer)

    def _unset_keepalive_if_required(self) -> None:
        """uvicorn's own timer is not used."""
