"""One connection of the calling side, fed by hand: what counts as an answer, and what does not."""

import asyncio
from typing import Any

import pytest

from delayserver.http.connection import HttpConnection
from tests.waiting import turns

OK = b"HTTP/1.1 200 OK\r\nX-Two: a\r\ncontent-length: 2\r\n\r\nok"


class FakeTransport:
    """Answers a request with the parts it was given, one after the other."""

    def __init__(self, connection: HttpConnection, *parts: bytes) -> None:
        self.connection = connection
        self.parts = parts
        self.written = b""
        self.aborted = False

    def write(self, data: bytes) -> None:
        self.written += data
        for part in self.parts:
            asyncio.get_running_loop().call_soon(self.connection.data_received, part)

    def abort(self) -> None:
        self.aborted = True


def exchange(*parts: bytes, **options: Any) -> Any:
    """One request, answered with these parts; the connection has the outcome in `error`."""

    async def run() -> Any:
        loop = asyncio.get_running_loop()
        connection: Any = HttpConnection(loop, **options)
        connection.connection_made(FakeTransport(connection, *parts))
        connection.error = None
        try:
            await connection.exchange(b"GET / HTTP/1.1\r\n\r\n", loop.time() + 0.05)
        except OSError as error:
            connection.error = error
        await turns()
        return connection

    return asyncio.run(run())


def one_by_one(data: bytes) -> tuple[bytes, ...]:
    return tuple(data[at : at + 1] for at in range(len(data)))


@pytest.mark.parametrize("parts", [(OK,), one_by_one(OK)])
def test_an_answer_comes_whole_or_in_pieces(parts):
    connection = exchange(*parts)
    assert (connection.error, connection.status, connection.body) == (None, 200, b"ok")
    assert connection.headers == [(b"X-Two", b"a"), (b"content-length", b"2")]
    assert connection.is_reusable


def test_a_body_that_is_not_kept():
    connection = exchange(OK, body_bytes_max=0)
    assert (connection.error, connection.body, connection.is_reusable) == (None, b"", True)


def test_the_head_of_an_answer_below_200_does_not_count():
    connection = exchange(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + OK)
    assert connection.status == 200
    assert (b"link", b"x") not in connection.headers


@pytest.mark.parametrize(
    ("parts", "error", "status"),
    [
        ((b"SSH-2.0\r\n",), "not HTTP", None),
        ((OK[:-1],), "", 200),  # the deadline
        ((OK[:20],), "", None),
    ],
)
def test_an_answer_that_does_not_come_whole_fails_and_keeps_its_status(parts, error, status):
    connection = exchange(*parts)
    assert error in str(connection.error)
    assert isinstance(connection.error, OSError)
    assert (connection.status, connection.is_reusable) == (status, False)


def test_an_answer_is_bounded():
    assert exchange(*one_by_one(OK), answer_bytes_max=len(OK)).error is None
    assert "longer than" in str(exchange(OK[:-1], b"k", answer_bytes_max=len(OK) - 2).error)


def test_more_answers_than_requests():
    connection = exchange(OK + OK)
    assert (connection.error, connection.is_reusable) == (None, False)
    transport: Any = connection._transport
    assert not transport.aborted
    connection.data_received(OK)
    assert transport.aborted


def test_a_connection_that_is_lost():
    async def run() -> None:
        loop = asyncio.get_running_loop()
        connection = HttpConnection(loop)
        transport: Any = FakeTransport(connection)
        connection.connection_made(transport)
        asked = asyncio.ensure_future(connection.exchange(b"x", loop.time() + 5))
        await turns()
        connection.connection_lost(ConnectionResetError("reset"))
        with pytest.raises(ConnectionError, match="without an answer \\(reset\\)"):
            await asked
        with pytest.raises(ConnectionError, match="before the request was sent"):
            await connection.exchange(b"x", loop.time() + 5)
        assert transport.written == b"x"

    asyncio.run(run())
