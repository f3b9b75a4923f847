"""One connection for what passes through, fed by hand: what comes in parts, what waits for whom."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from delayserver.http.stream import HELD_MAX_BYTES, HttpStream
from tests.waiting import turns

OK = b"HTTP/1.1 200 OK\r\nX-Two: a\r\ncontent-length: 2\r\n\r\nok"
REQUEST = b"GET / HTTP/1.1\r\n\r\n"


class FakeTransport:
    """Keeps what is written, and what it was told."""

    def __init__(self) -> None:
        self.written = b""
        self.aborted = False
        self.reads = True

    def write(self, data: bytes) -> None:
        self.written += data

    def abort(self) -> None:
        self.aborted = True

    def is_closing(self) -> bool:
        return self.aborted

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True


def run(test: Callable[[HttpStream, FakeTransport], Awaitable[None]], *, is_head: bool = False):
    async def main() -> None:
        stream = HttpStream(asyncio.get_running_loop())
        transport: Any = FakeTransport()
        stream.connection_made(transport)
        stream.begin(REQUEST, is_head=is_head)
        async with asyncio.timeout(10):
            await test(stream, transport)

    asyncio.run(main())


async def body_of(stream: HttpStream) -> bytes:
    parts = []
    while part := await stream.read():
        parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize("step", [1, 7, len(OK)])
def test_an_answer_comes_whole_or_in_pieces(step: int) -> None:
    async def test(stream: HttpStream, transport: FakeTransport) -> None:
        assert transport.written == REQUEST
        for at in range(0, len(OK), step):
            stream.data_received(OK[at : at + step])
        assert await stream.answered() == 200
        assert stream.headers == [(b"x-two", b"a"), (b"content-length", b"2")]
        assert await body_of(stream) == b"ok"
        assert stream.finish()

    run(test)


def test_an_answer_without_a_body_and_the_next_one() -> None:
    async def test(stream: HttpStream, transport: FakeTransport) -> None:
        stream.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n")
        assert (await stream.answered(), await stream.read()) == (200, b"")
        assert stream.finish()
        stream.begin(REQUEST)
        stream.data_received(b"HTTP/1.1 100 Continue\r\nx: 1\r\n\r\n" + OK)
        assert (await stream.answered(), await body_of(stream)) == (200, b"ok")
        assert (b"x", b"1") not in stream.headers
        assert stream.finish()

    run(test, is_head=True)


def test_who_does_not_read_is_waited_for() -> None:
    async def test(stream: HttpStream, transport: FakeTransport) -> None:
        length = 2 * HELD_MAX_BYTES
        stream.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % length)
        stream.data_received(bytes(HELD_MAX_BYTES))
        assert transport.reads and stream.waits_for_other
        stream.data_received(b"1")
        assert not transport.reads and not stream.waits_for_other
        assert len(await stream.read()) == HELD_MAX_BYTES + 1
        assert transport.reads
        reading = asyncio.ensure_future(body_of(stream))
        stream.data_received(bytes(HELD_MAX_BYTES - 1))
        assert len(await reading) == HELD_MAX_BYTES - 1

    run(test)


def test_a_request_waits_until_the_other_side_takes_it() -> None:
    async def test(stream: HttpStream, transport: FakeTransport) -> None:
        stream.pause_writing()
        writing = asyncio.ensure_future(stream.write(b"more"))
        await turns()
        assert transport.written == REQUEST
        stream.data_received(OK)  # which does not mean that it takes more
        await turns()
        assert not writing.done()
        stream.resume_writing()
        await writing
        assert transport.written == REQUEST + b"more"

    run(test)


@pytest.mark.parametrize(
    "answer",
    [b"SSH-2.0\r\n", OK[:-1], OK[:20], b"HTTP/1.1 200 OK\r\n\r\nuntil the end", b""],
)
def test_an_answer_that_does_not_come_whole_fails(answer: bytes) -> None:
    async def test(stream: HttpStream, transport: FakeTransport) -> None:
        stream.pause_writing()
        writing = asyncio.ensure_future(stream.write(b"more"))
        await turns()
        stream.data_received(answer)
        stream.connection_lost(None)
        with pytest.raises(OSError):
            await stream.answered()
            await body_of(stream)
        with pytest.raises(OSError):
            await writing
        assert not stream.finish()
        with pytest.raises(OSError, match="before the request was sent"):
            stream._is_under_way = False
            stream.begin(REQUEST)

    run(test)


def test_who_gives_up_hears_of_it() -> None:
    async def test(stream: HttpStream, transport: FakeTransport) -> None:
        answered = asyncio.ensure_future(stream.answered())
        await turns()
        stream.abort()
        with pytest.raises(ConnectionAbortedError):
            await answered
        assert transport.aborted

    run(test)


def test_more_answers_than_requests() -> None:
    async def test(stream: HttpStream, transport: FakeTransport) -> None:
        stream.data_received(OK + OK)
        assert await body_of(stream) == b"ok"
        assert not stream.finish()
        stream.data_received(OK)
        assert transport.aborted

    run(test)


def test_a_connection_that_the_other_side_closes() -> None:
    async def test(stream: HttpStream, transport: FakeTransport) -> None:
        stream.data_received(OK.replace(b"X-Two: a", b"connection: close"))
        assert await body_of(stream) == b"ok"
        assert not stream.finish()

    run(test)
