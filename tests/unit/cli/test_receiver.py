"""The demo's receiver of webhooks, called as the demo calls the server."""

import asyncio

import pytest

from delayserver.cli.demo.receiver import Receiver
from delayserver.cli.demo.shop import call
from delayserver.client.errors import UnansweredError
from delayserver.client.transport import HttpTransport


def transport_to(port):
    return HttpTransport(f"http://127.0.0.1:{port}")


def test_one_calls_the_other():
    received = []

    async def handler(headers, body):
        received.append((headers.get("content-type"), body))
        return 201

    async def run():
        async with Receiver(handler) as receiver:
            client = transport_to(receiver.port)
            answers = [await call(client, "POST", "/x", {"n": n}) for n in range(2)]
            answers += await asyncio.gather(*(call(client, "GET", "/") for _ in range(3)))
            await client.close()
            return answers

    assert asyncio.run(run()) == [(201, None)] * 5
    assert received[:2] == [
        ("application/json", b'{"n": 0}'),
        ("application/json", b'{"n": 1}'),
    ]


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf",
        b"HTTP/1.1 200 OK\r\ncontent-length: ten\r\n\r\n",
    ],
)
def test_an_answer_that_is_cut_off_is_none(answer):
    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async def run():
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            client = transport_to(server.sockets[0].getsockname()[1])
            with pytest.raises(UnansweredError):
                await call(client, "GET", "/")

    asyncio.run(run())


def test_nobody_listens_or_answers():
    async def serve(reader, writer):
        await reader.read()  # until the client gives up
        writer.close()

    async def run():
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            client = transport_to(port)
            with pytest.raises(UnansweredError, match="did not answer"):
                await call(client, "GET", "/", timeout_s=0.05)
        with pytest.raises(UnansweredError):
            await call(client, "GET", "/")

    asyncio.run(run())
