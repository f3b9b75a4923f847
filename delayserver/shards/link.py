"""The links: one kept connection between each two shards, or between their owners of the moment.

    calls of a turn of the event loop ──▶ one frame ──▶ the other's own application
                                      ◀── one frame ◀── its answers of a turn

A frame is its length and an array of items in MessagePack; an item is a call, an answer, or
a notice. Between two shards, the one with the higher number connects, and tries again until
the other is there; both ask over the same connection, so both learn at the same time that it has
ended. A call that was sent and not answered by then may have had its effect.

A shard believes all calls that come over a link: callers were checked where their calls came in,
and the handshake (`meeting`) decides which process may be at the other end.

Where a shard has one owner after the other, each with a higher epoch, a link is to the owner only:
a link of an owner that was replaced, as the book or another link says, is refused, and an existing
one ends when the book says that the shard has moved. On one machine all epochs are 0, and the
shards tell each other at which ports clients reach them; in a cluster the book has their URLs.

While a shard moves from one node to another, which takes about a second, calls to it wait. A call
that comes while there is no link to the owner waits for WAIT_S. The owner that leaves says which
calls it has not begun, and these wait too. Calls that it has begun are answered before its links
end, by either side.

A shard may hang: its process is stopped, and its sockets stay open. A shard that is asked something
and has said nothing for PING_S is asked whether it is there; after HANG_S the link ends. Then the
outcome of the calls that it was asked is unknown, and later calls are told that it is away. A call
that takes its time at a shard that is well ends nothing. A shard of an older version does not know
the question, and is waited for.

Cost: 2 µs for a call and its answer at either side, and two system calls a turn.
Threads: belongs to the event loop.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from enum import IntEnum
from functools import lru_cache, partial
from http import HTTPStatus
from typing import Any, Final, NamedTuple, Protocol, cast

import msgspec
import structlog

from delayserver.api.exit import Exit
from delayserver.api.hot.answers import Answer, Responder, header, problem_answer, wire_of
from delayserver.api.hot.paths import NO_FORWARD
from delayserver.decisions.group import Group
from delayserver.errors import (
    DelayServerError,
    LinkError,
    MisdirectedError,
    OverloadedError,
    ShardAwayError,
)
from delayserver.security.tokens import Caller, Token
from delayserver.shards.book import OwnerBook
from delayserver.shards.meeting import Meeting
from delayserver.shards.peers import PeerAnswer, PeerCall
from delayserver.shards.place import ShardPlace
from delayserver.shards.sealed import Party
from storage.errors import StorageError

VERSION: Final = 2
RETRY_S: Final = 0.05
"""Between two tries to connect."""
UNSENT_MAX_BYTES: Final = 64 * 1024 * 1024
"""The bytes that may wait to be sent to a shard that does not read."""
WAIT_S: Final = 5.0
"""How long a call waits where a shard has no owner just now."""
WAITING_MAX: Final = 10_000
"""So many calls wait at most."""
FINISH_S: Final = 1.0
"""An owner that leaves answers the calls that it has begun within this time."""
FINISH_LOOK_S: Final = 0.005
PING_S: Final = 2.0
HANG_S: Final = 10.0
"""Longer than any turn of an event loop that works, and shorter than clients wait."""
LEAVE: Final = "leave"
PING: Final = "ping"
PONG: Final = "pong"
"""Topics of notices about the sender: it leaves; a question; the answer to it, which is also sent
at the beginning."""
_LENGTH_BYTES: Final = 4

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[list[Any]]).decode


class LinkItem(IntEnum):
    """The first element of an item."""

    HELLO = 0
    ONE = 1
    """A publish of one message, and …"""
    CANCEL = 2
    """A cancel of one message, and …"""
    WIRE = 3
    """… the answer to either, as it goes over the wire."""
    CALL = 4
    ANSWER = 5
    TELL = 6


_REFUSED: Final = b"HTTP/1.1 503 "
_LEAVES: Final = b'"shard %d starts, or is away'
"""Part of the answer of a shard that is asked while it leaves (ShardAwayError)."""
_UNKNOWN: Final = b'"outcome":"unknown"'
WireCallback = Callable[[bytes], None]
"""Gets an answer as it goes over the wire."""
Heard = Callable[[int, bytes], None]
Changed = Callable[[int, bool], None]

log = structlog.get_logger()


class Application(Protocol):
    """The application of a shard, as other shards and the shard itself ask it."""

    def publish(self, responder: Responder, data: bytes, caller: Caller | None) -> None:
        """POST /v1/messages, together with others that come before the committer is free."""

    def cancel(
        self, responder: Responder, subject: str | None, text: str, caller: Caller | None
    ) -> None:
        """DELETE of one message, together with others: `text` is its key where there is a
        `subject`, else its id."""

    def call(self, call: PeerCall) -> Awaitable[PeerAnswer]:
        """Any other call. Never raises."""


class Links:
    """All other shards, as `Peers`; and this one, without a hop."""

    def __init__(
        self,
        place: ShardPlace,
        meeting: Meeting,
        book: OwnerBook | None = None,
        *,
        exit_: Exit | None = None,
        is_https: bool = False,
    ) -> None:
        """`book`: who owns each shard now; None: each has its process for ever. `exit_`: answers
        leave through it. `is_https`: clients reach each shard by HTTPS."""
        self.exit = exit_ or Exit(lambda: True, place.shard)
        self.own = place.shard
        self.count = place.count
        self.book = book
        self._scheme = "https" if is_https else "http"
        self.ports: dict[int, int] = {self.own: 0} if place.is_alone else {}
        """Where each shard that is there listens itself, for clients; 0: where the server does."""
        self.epoch = 0
        """The epoch of this process as the owner of its shard."""
        self._meeting = meeting
        self._application: Application
        self._links: dict[int, _Link] = {}
        self._open: set[_Link] = set()
        """Those over which the other has not said yet who it is, too."""
        self._heard: dict[str, Heard] = {}
        self._changed: list[Changed] = []
        self._connecting: list[asyncio.Task[None]] = []
        self._ended: dict[int, asyncio.Event] = {}
        self._waiting: dict[int, list[_Waiting]] = {}
        """Calls to shards that have no owner just now."""
        self._is_leaving = False

    # ── begin and end ──────────────────────────────────────────────────────────────────────────

    async def begin(self, application: Application, port: int, epoch: int = 0) -> None:
        """Be there for the others, and look for them. `port`: where this shard listens itself, for
        clients; 0: where the server does. `epoch`: of this process, as the owner of its shard."""
        self._application = application
        self.ports[self.own] = port
        self.epoch = epoch
        if self.book is not None:
            self.book.on_change(self._close_replaced)
        await self._meeting.listen(Party(self.own, epoch), partial(_Link, self, None))
        loop = asyncio.get_running_loop()
        for shard in range(self.own):
            self._connecting.append(loop.create_task(self._keep_connected(shard)))

    async def close(self) -> None:
        """Leave the others. Calls that were begun for them are answered before."""
        self._is_leaving = True
        self._meeting.close()
        # A shard that has heard of this would else be connected to again, as if this process were
        # the next owner. Links that are up stay.
        for task in self._connecting:
            task.cancel()
        await asyncio.gather(*self._connecting, return_exceptions=True)
        for shard in tuple(self._waiting):
            self._give_up(shard)
        for link in self._open:
            link.leave()
        # Each other shard ends its link when none of its calls is left. Calls that it sent before
        # it heard of this are refused until then, so it knows that nothing was done.
        for _ in range(round(FINISH_S / FINISH_LOOK_S)):
            if all(link.is_retired for link in self._open):
                break
            await asyncio.sleep(FINISH_LOOK_S)
        for link in list(self._open):
            link.close()

    async def _keep_connected(self, shard: int) -> None:
        while True:
            ended = self._ended[shard] = asyncio.Event()
            # A meeting counts and logs every refusal that is more than an absent shard.
            with contextlib.suppress(OSError, LinkError):
                await self._meeting.connect(shard, partial(_Link, self, shard))
                await ended.wait()
            await asyncio.sleep(RETRY_S)

    def opened(self, link: "_Link") -> None:
        """There is a connection, over which the other has said nothing yet."""
        self._open.add(link)
        if self._is_leaving:
            link.leave()  # It was accepted just before.

    def joined(self, link: "_Link", shard: int, port: int) -> None:
        """A link may be used: the other has said who it is, and was not refused."""
        assert 0 <= shard < self.count and shard != self.own, shard
        if (before := self._links.get(shard)) is not None:
            self.left(before, shard)
            if before.epoch < link.epoch:
                before.retire()
            else:
                before.close()  # It has come again, so its calls over the old link are lost.
        self._links[shard] = link
        self.ports[shard] = port
        log.debug("linked", shard=shard)
        for changed in self._changed:
            changed(shard, True)
        for one in self._waiting.pop(shard, ()):
            one.timer.cancel()
            one.send(link)

    def is_replaced(self, shard: int, epoch: int) -> bool:
        """Whether the owner of that epoch of a shard was replaced by another one."""
        if (link := self._links.get(shard)) is not None and link.epoch > epoch:
            return True
        return self.book is not None and not self.book.may_own(shard, epoch)

    def _close_replaced(self, shard: int) -> None:
        """A shard has another owner: retire links to the former one, and to peers of no known
        epoch."""
        for link in tuple(self._open):
            if link.shard == shard and self.is_replaced(shard, link.epoch):
                self.retire(shard, link)

    def _when_linked(
        self, shard: int, send: Callable[["_Link"], None], refuse: Callable[[Exception], None]
    ) -> None:
        """Have `send` called with the link to a shard, or `refuse` with why there is none."""
        link = self._links.get(shard)
        if link is not None and link.unsent_bytes > UNSENT_MAX_BYTES:
            refuse(OverloadedError(f"shard {shard} is slow to take what is forwarded to it"))
        elif link is not None:
            send(link)
        elif self.book is None or self._is_leaving or self._is_crowded:
            refuse(ShardAwayError(shard))
        else:
            timer = asyncio.get_running_loop().call_later(WAIT_S, self._give_up, shard, True)
            self._waiting.setdefault(shard, []).append(_Waiting(send, refuse, timer))

    @property
    def _is_crowded(self) -> bool:
        return sum(map(len, self._waiting.values())) >= WAITING_MAX

    def _give_up(self, shard: int, only_first: bool = False) -> None:
        """Refuse the calls that have waited for a shard for long enough: all, or the oldest."""
        waiting = self._waiting.pop(shard, [])
        count = 1 if only_first else len(waiting)
        if waiting[count:]:
            self._waiting[shard] = waiting[count:]
        for one in waiting[:count]:
            one.timer.cancel()
            one.refuse(ShardAwayError(shard))

    def left(self, link: "_Link", shard: int | None) -> None:
        """A link has ended, or never began; None: it is not known whose it was."""
        self._open.discard(link)
        if shard is None:
            return
        if self._links.get(shard) is link:
            del self._links[shard], self.ports[shard]
            log.debug("unlinked", shard=shard)
            for changed in self._changed:
                changed(shard, False)
        if not link.is_retired and (ended := self._ended.get(shard)) is not None:
            ended.set()

    # ── calls to other shards ──────────────────────────────────────────────────────────────────

    def ask(self, shard: int, call: PeerCall) -> Awaitable[PeerAnswer]:
        if shard == self.own:
            return self._application.call(call)
        future: asyncio.Future[PeerAnswer] = asyncio.get_running_loop().create_future()

        def told(answer: PeerAnswer) -> None:
            if not future.done():
                future.set_result(answer)

        def refuse(error: Exception) -> None:
            told(answer_of(problem_answer(error)))

        def send(link: _Link) -> None:
            link.ask(call, partial(heard, link))

        def heard(link: _Link, answer: PeerAnswer) -> None:
            if self._moves(shard, link, answer.status, answer.body, until_s):
                self._when_linked(shard, send, refuse)
            else:
                told(answer)

        until_s = _now_s() + WAIT_S
        self._when_linked(shard, send, refuse)
        return future

    def _moves(self, shard: int, link: "_Link", status: int, body: bytes, until_s: float) -> bool:
        """Whether who was asked has not begun a call, since it leaves its shard, and the next owner
        is looked for, until then by the loop's time. Nothing more is asked of this one then."""
        if status != HTTPStatus.SERVICE_UNAVAILABLE or self.book is None or self._is_leaving:
            return False
        if _LEAVES % shard not in body or _UNKNOWN in body:
            return False  # Another one is away that it has asked.
        self.retire(shard, link)
        return _now_s() < until_s

    def retire(self, shard: int, link: "_Link") -> None:
        """Nothing more is asked of the owner at the end of that link."""
        if self._links.get(shard) is link:
            self.left(link, shard)
        link.retire()

    def publish(self, shard: int, data: bytes, caller: Caller | None, told: WireCallback) -> None:
        """Have another shard publish one message; `told` gets the answer, head and all."""
        self._send_one(shard, lambda link, heard: link.publish(data, caller, heard), told)

    def _send_one(
        self, shard: int, send: Callable[["_Link", WireCallback], None], told: WireCallback
    ) -> None:
        def refuse(error: Exception) -> None:
            told(wire_of(problem_answer(error)))

        def begin(link: _Link) -> None:
            send(link, partial(heard, link))

        def heard(link: _Link, wire: bytes) -> None:
            status = HTTPStatus.SERVICE_UNAVAILABLE if wire.startswith(_REFUSED) else 0
            if status and self._moves(shard, link, status, wire, until_s):
                self._when_linked(shard, begin, refuse)
            else:
                told(wire)

        until_s = _now_s() + WAIT_S
        self._when_linked(shard, begin, refuse)

    def cancel(
        self, shard: int, subject: str | None, text: str, caller: Caller | None, told: WireCallback
    ) -> None:
        """Have another shard cancel one message; likewise."""
        self._send_one(shard, lambda link, heard: link.cancel(subject, text, caller, heard), told)

    def tell(self, shard: int, topic: str, notice: bytes) -> None:
        if (link := self._links.get(shard)) is not None:
            link.put([LinkItem.TELL.value, topic, notice])

    def on_told(self, topic: str, heard: Heard) -> None:
        assert topic not in self._heard, topic
        self._heard[topic] = heard

    def on_change(self, changed: Changed) -> None:
        self._changed.append(changed)
        for shard in self._links:
            changed(shard, True)

    def is_there(self, shard: int) -> bool:
        """Whether a shard can be asked."""
        return shard == self.own or shard in self._links

    def url(self, shard: int, host: str) -> str | None:
        """Where clients reach a shard itself, who named this machine by the header `Host`; None:
        it is away, or nobody has it."""
        if self.book is not None:
            owner = self.book.owner(shard)
            return None if owner is None else owner.url
        port = self.ports.get(shard)
        if port == 0:
            return f"{self._scheme}://{host}"
        return None if port is None else f"{self._scheme}://{_without_port(host)}:{port}"

    def misdirected(self, shard: int, call: PeerCall) -> PeerAnswer | None:
        if header(call.headers, NO_FORWARD[0]).strip().lower() != NO_FORWARD[1]:
            return None
        url = self.url(shard, header(call.headers, b"host").decode("latin-1"))
        return None if url is None else failed(MisdirectedError(shard, url))

    # ── calls from other shards ────────────────────────────────────────────────────────────────

    def serve_one(self, link: "_Link", number: int, data: bytes, caller: Caller | None) -> None:
        asker = _Asker(self, link, number)
        if self._is_leaving:
            asker.tell(b"", ShardAwayError(self.own))
        else:
            self._application.publish(asker, data, caller)

    def serve_cancel(
        self, link: "_Link", number: int, subject: str | None, text: str, caller: Caller | None
    ) -> None:
        asker = _Asker(self, link, number)
        if self._is_leaving:
            asker.tell(b"", ShardAwayError(self.own))
        else:
            self._application.cancel(asker, subject, text, caller)

    async def serve(self, link: "_Link", number: int, call: PeerCall) -> None:
        if self._is_leaving:
            answer = failed(ShardAwayError(self.own))
        else:
            answer = await self._application.call(call)
        if await self.exit.holds_back(call.path, answer.status):
            answer = answer_of(self.exit.refusal())
        link.put([LinkItem.ANSWER.value, number, answer.status, answer.headers, answer.body])

    def hear(self, shard: int, topic: str, notice: bytes) -> None:
        if (heard := self._heard.get(topic)) is not None:
            heard(shard, notice)


class _Waiting(NamedTuple):
    """A call to a shard that has no owner just now."""

    send: Callable[["_Link"], None]
    refuse: Callable[[Exception], None]
    timer: asyncio.TimerHandle


class _Asker:
    """A publish that another shard waits for."""

    __slots__ = ("_link", "_links", "_number", "last_group")

    def __init__(self, links: Links, link: "_Link", number: int) -> None:
        self._links = links
        self._link = link
        self._number = number
        self.last_group: Group | None = None

    def respond(self, wire: bytes, group: Group | None) -> None:
        if group is None:
            self.tell(wire, None)
        else:
            group.when_durable(partial(self.tell, wire))

    def tell(self, wire: bytes, error: Exception | None) -> None:
        if error is not None:
            wire = wire_of(problem_answer(error))
        self._link.put([LinkItem.WIRE.value, self._number, self._links.exit.wire(wire)])


class _Link(asyncio.Protocol):
    """One connection, of either side. `expected`: the shard that was connected to; None: the other
    has come here."""

    def __init__(self, links: Links, expected: int | None) -> None:
        self._links = links
        self._expected = expected
        self._other: int | None = None
        self.epoch = -1
        """The epoch of the other side, as the owner of its shard; -1 until it has said it."""
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._items: list[Sequence[object]] = []
        self._unsent_bytes = 0
        self._received = bytearray()
        """The bytes of a frame that has come in part."""
        self._missing_until = 0
        """How much of it has to be there before it is looked at again."""
        self._next_number = 0
        self._calls: dict[int, Callable[[PeerAnswer], None]] = {}
        self._ones: dict[int, WireCallback] = {}
        self._serving: set[asyncio.Task[None]] = set()
        self._heard_s = self._looked_s = 0.0
        """When something came last, and when it was last looked whether it did."""
        self._answers_pings = False
        self.is_retired = False
        """No more calls are sent over it; calls that were sent still get their answers."""
        self._watch: asyncio.TimerHandle | None = None
        """Looks again, while something is asked."""

    @property
    def shard(self) -> int | None:
        """Which is at the other end, or was wanted there; None: not known yet."""
        return self._expected if self._other is None else self._other

    @property
    def unsent_bytes(self) -> int:
        """How many bytes wait here to be sent."""
        assert self._transport is not None
        return self._unsent_bytes + self._transport.get_write_buffer_size()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def leave(self) -> None:
        """Tell the other that this shard leaves. It has been greeted before, so it may have calls
        for this shard already."""
        self.put([LinkItem.TELL.value, LEAVE, b""])

    def retire(self) -> None:
        """The other does not own its shard any more. It may still answer calls from before."""
        if not self.is_retired:
            self._loop.call_later(FINISH_S, self.close)
        self.is_retired = True
        self._end_retired()

    def _end_retired(self) -> None:
        """End it when neither side waits for an answer: a call that runs there may need one."""
        if self.is_retired and not (self._calls or self._ones or self._serving):
            assert self._transport is not None
            self._transport.close()

    def _end_serving(self, task: asyncio.Task[None]) -> None:
        self._serving.discard(task)
        self._loop.call_soon(self._end_retired)  # Behind `_send`.

    # ── sending ────────────────────────────────────────────────────────────────────────────────

    def publish(self, data: bytes, caller: Caller | None, told: WireCallback) -> None:
        number = self._next_number = self._next_number + 1
        self._ones[number] = told
        self._listen()
        self._unsent_bytes += len(data)
        self.put([LinkItem.ONE.value, number, data, _shown(caller)])

    def cancel(
        self, subject: str | None, text: str, caller: Caller | None, told: WireCallback
    ) -> None:
        number = self._next_number = self._next_number + 1
        self._ones[number] = told
        self._listen()
        self.put([LinkItem.CANCEL.value, number, subject, text, _shown(caller)])

    def ask(self, call: PeerCall, told: Callable[[PeerAnswer], None]) -> None:
        number = self._next_number = self._next_number + 1
        self._calls[number] = told
        self._listen()
        self._unsent_bytes += len(call.body)
        self.put([LinkItem.CALL.value, number, *call[:-1], _shown(call.caller)])

    def _listen(self) -> None:
        """Something is asked: see to it that the other one is there until it is answered."""
        if self._watch is None:
            self._heard_s = self._looked_s = self._loop.time()
            self._watch = self._loop.call_later(PING_S, self._look)

    def _look(self) -> None:
        if not (self._calls or self._ones) or self._other is None:
            self._watch = None
            return
        now_s = self._loop.time()
        if now_s - self._looked_s > 2 * PING_S:
            self._heard_s = now_s  # This process stood still itself, and has not read its socket.
        self._looked_s = now_s
        silence_s = now_s - self._heard_s
        if silence_s >= HANG_S and self._answers_pings:
            log.warning("a shard hangs", shard=self._other, silent_s=round(silence_s, 1))
            self._watch = None
            self.close()
            return
        if silence_s >= PING_S:
            self.put([LinkItem.TELL.value, PING, b""])
        self._watch = self._loop.call_later(PING_S, self._look)

    def put(self, item: Sequence[object]) -> None:
        """Send this with all of this turn of the event loop."""
        if not self._items:
            self._loop.call_soon(self._send)
        self._items.append(item)

    def _send(self) -> None:
        items, self._items, self._unsent_bytes = self._items, [], 0
        assert self._transport is not None
        if not self._transport.is_closing():
            frame = _encode(items)
            self._transport.write(len(frame).to_bytes(_LENGTH_BYTES, "little") + frame)

    # ── receiving ──────────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        links = self._links
        port = links.ports[links.own]
        self.put([LinkItem.HELLO.value, VERSION, links.own, links.count, port, links.epoch])
        self.put([LinkItem.TELL.value, PONG, b""])
        links.opened(self)

    def data_received(self, data: bytes) -> None:
        self._heard_s = self._loop.time()
        received = self._received
        if received:
            received += data
            if len(received) < self._missing_until:
                return
            data = bytes(received)
            received.clear()
        start, end = 0, len(data)
        while end - start >= _LENGTH_BYTES:
            begin = start + _LENGTH_BYTES
            stop = begin + int.from_bytes(data[start:begin], "little")
            if stop > end:
                break
            start = stop
            try:
                for item in _decode(memoryview(data)[begin:stop]):
                    self._take(item)
            except LinkError:
                self.close()  # A frame behind a greeting that is refused has no effect.
                return
        if start < end:
            received += memoryview(data)[start:]
            is_known = end - start >= _LENGTH_BYTES
            self._missing_until = stop - start if is_known else _LENGTH_BYTES

    def _take(self, item: list[Any]) -> None:
        match item[0]:
            case LinkItem.ONE:
                _, number, body, shown = item
                self._links.serve_one(self, number, body, _caller(shown))
            case LinkItem.CANCEL:
                _, number, subject, text, shown = item
                self._links.serve_cancel(self, number, subject, text, _caller(shown))
            case LinkItem.WIRE:
                if (told := self._ones.pop(item[1], None)) is not None:
                    told(item[2])
                    self._end_retired()
            case LinkItem.CALL:
                _, number, method, path, query, headers, body, shown = item
                fields = tuple((name, value) for name, value in headers)
                call = PeerCall(method, path, query, fields, body, _caller(shown))
                task = self._loop.create_task(self._links.serve(self, number, call))
                self._serving.add(task)
                task.add_done_callback(self._end_serving)
            case LinkItem.ANSWER:
                _, number, status, headers, body = item
                if (heard := self._calls.pop(number, None)) is not None:
                    heard(PeerAnswer(status, tuple((a, b) for a, b in headers), body))
                    self._end_retired()
            case LinkItem.TELL:
                assert self._other is not None
                if item[1] == PING:
                    self.put([LinkItem.TELL.value, PONG, b""])
                elif item[1] == LEAVE:
                    self._links.retire(self._other, self)
                elif item[1] == PONG:
                    self._answers_pings = True
                elif not self.is_retired:
                    self._links.hear(self._other, item[1], item[2])
            case _:
                self._greet(item)

    def _greet(self, item: list[Any]) -> None:
        """Hear who the other is. Raises LinkError when there is to be no link to it."""
        links = self._links
        version, shard, count = item[1:4]
        is_another = 0 <= shard < links.count and shard != links.own
        is_known = (version, count) == (VERSION, links.count) and is_another
        if not is_known or self._expected not in (None, shard):
            log.error("a link to something else", shard=shard, version=version, shards=count)
            raise LinkError("a link to something else")
        port, epoch = item[4:]
        if links.is_replaced(shard, epoch):
            # It comes again and again, until its own log tells it.
            log.debug("an owner that was replaced", shard=shard, epoch=epoch)
            raise LinkError(f"an owner of shard {shard} that was replaced")
        self._other, self.epoch = shard, epoch
        links.joined(self, shard, port)

    def connection_lost(self, exc: Exception | None) -> None:
        shard = self.shard
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        calls, self._calls = self._calls, {}
        ones, self._ones = self._ones, {}
        self._links.left(self, shard)
        if shard is None:
            return
        unknown = problem_answer(ShardAwayError(shard, is_unknown=True))
        for told in calls.values():
            told(answer_of(unknown))
        for tell in ones.values():
            tell(wire_of(unknown))


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def answer_of(answer: Answer) -> PeerAnswer:
    """An answer of the hot path, as one shard gives it to another."""
    lines = [tuple(line.split(b": ", 1)) for line in answer.fields.splitlines()]
    fields = cast(list[tuple[bytes, bytes]], lines)
    return PeerAnswer(answer.status, ((b"content-type", answer.content_type), *fields), answer.body)


def hot_answer(answer: PeerAnswer) -> Answer:
    """The answer of another shard, as it is given to a client."""
    content_type = header(answer.headers, b"content-type")
    lines = [
        b"%b: %b\r\n" % field
        for field in answer.headers
        if field[0] not in (b"content-type", b"content-length")
    ]
    return Answer(answer.status, answer.body, b"".join(lines), content_type)


def failed(error: Exception) -> PeerAnswer:
    """The problem document of an error, as a shard answers with it."""
    assert isinstance(error, DelayServerError | StorageError), error
    return answer_of(problem_answer(error))


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and (port.isdigit() or not port) else host


def _shown(caller: Caller | None) -> tuple[str, tuple[str, ...]] | None:
    return None if caller is None else (caller.name, caller.token.scopes)


def _caller(shown: list[Any] | None) -> Caller | None:
    return None if shown is None else _caller_of(shown[0], tuple(shown[1]))


@lru_cache(maxsize=1024)
def _caller_of(name: str, scopes: tuple[str, ...]) -> Caller:
    """The caller that the other shard has let in, and counted."""
    return Caller(Token(name, "", scopes, 0), _no_time)


def _no_time() -> float:
    raise AssertionError("a forwarded call has been counted")
