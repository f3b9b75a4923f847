"""The webhook sender against real receivers on loopback: good ones, bad ones, and wrong addresses.

Every test runs on the event loop of the standard library and on uvloop, whose transports differ."""

import asyncio
import contextlib
import errno
import os
import shutil
import socket
import ssl
import subprocess
from dataclasses import dataclass
from typing import Any

import pytest
import uvloop

from delayserver.delivery import sender as sender_module
from delayserver.delivery.sender import HttpWebhookSender
from delayserver.delivery.webhook import WebhookRequest, WebhookResponse
from delayserver.records.message import MADE_HEADERS
from delayserver.security.signing import WebhookSecret, verify
from delayserver.security.targets import TargetPolicy
from tests.waiting import turns, until

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
NOW_S = 1_795_192_200
SECRET = WebhookSecret(b"s" * 32)


@dataclass
class Received:
    line: str
    headers: dict[str, str]
    body: bytes


class Receiver:
    """An HTTP server that gives `answers` one after the other, and the last again and again.

    An answer is bytes to write; None closes the connection; or it is a coroutine function of reader
    and writer, after which the connection is closed."""

    def __init__(self, *answers, tls=None, host="127.0.0.1", port=0):
        self.received = []
        self.host = host
        self.port = port
        self.connections = 0
        self.ended = asyncio.Event()  # a connection was closed, by whichever side
        self._answers = list(answers)
        self._tls = tls
        self._tasks = set()

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, self.host, self.port, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_):
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, reader, writer):
        task = asyncio.current_task()
        self._tasks.add(task)
        self.connections += 1
        try:
            await self._converse(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            self.ended.set()
            writer.close()
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                await writer.wait_closed()

    async def _converse(self, reader, writer):
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            line, *fields = head.strip().split("\r\n")
            headers = dict(field.split(": ", 1) for field in fields)
            body = await reader.readexactly(int(headers["content-length"]))
            self.received.append(Received(line, headers, body))
            answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
            if answer is None:
                return
            if not isinstance(answer, bytes):
                await answer(reader, writer)
                return
            writer.write(answer)
            await writer.drain()


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request):
    def run_on_loop(main):
        factory = uvloop.new_event_loop if request.param == "uvloop" else None
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(main())

    return run_on_loop


@contextlib.asynccontextmanager
async def open_sender(*allowed, connections_max=64, resolve=None, tls=None):
    sender = HttpWebhookSender(
        TargetPolicy(allowed), connections_max=connections_max, resolve=resolve, tls=tls
    )
    try:
        yield sender
    finally:
        await sender.close()


def request_to(port, host="127.0.0.1", **changes):
    fields: dict[str, Any] = {
        "url": f"http://{host}:{port}/hook?a=b",
        "message_id": "m1",
        "subject": "order.unpaid",
        "key": "1001",
        "due_ms": NOW_S * 1000,
        "attempt": 1,
        "headers": {"X-Shop": "7"},
        "body": b'{"order": 1001}',
        "content_type": "application/json",
        "secrets": (SECRET,),
        "timeout_ms": 60_000,
        "timestamp_s": NOW_S,
    }
    return WebhookRequest(**(fields | changes))


def exchange(run, *answers, **changes):
    """One request to a receiver; the response and the receiver."""

    async def main():
        async with Receiver(*answers) as receiver, open_sender() as sender:
            return await sender.send(request_to(receiver.port, **changes), always), receiver

    return run(main)


async def mute(reader, writer):
    await asyncio.Event().wait()


def always() -> bool:
    return True


class Names:
    """A resolver, which counts its look-ups; what is not in `mapping` does not exist."""

    def __init__(self, mapping):
        self.mapping = mapping
        self.lookups = 0

    async def __call__(self, host, port):
        self.lookups += 1
        if host not in self.mapping:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return self.mapping[host]


# ---- receivers that behave ---------------------------------------------------------------------


def test_a_webhook_arrives_as_it_was_published(run):
    response, receiver = exchange(run, OK)
    assert response == WebhookResponse(200)
    (received,) = receiver.received
    assert received.line == "POST /hook?a=b HTTP/1.1"
    assert received.headers["host"] == f"127.0.0.1:{receiver.port}"
    assert received.headers["content-type"] == "application/json"
    assert received.headers["x-shop"] == "7"
    assert received.headers["delay-due"] == "2026-11-20T16:30:00.000Z"
    assert received.body == b'{"order": 1001}'
    assert verify(received.headers, received.body, [SECRET], NOW_S) == "m1"


def test_what_the_server_says_of_messages_that_it_makes_arrives(run):
    """No publisher may give a message headers of these names."""
    made = dict.fromkeys(sorted(MADE_HEADERS), "nightly")
    response, receiver = exchange(run, OK, headers={**made, "x-shop": "7"})
    assert response == WebhookResponse(200)
    (received,) = receiver.received
    assert {name: received.headers[name] for name in made} == made


@pytest.mark.parametrize("size_bytes", [0, 1, 3_000_000])
def test_bodies_of_any_size_arrive(run, size_bytes):
    body = bytes(range(256)) * (size_bytes // 256 + 1)
    response, receiver = exchange(run, OK, body=body[:size_bytes])
    assert response.status == 200
    assert receiver.received[0].body == body[:size_bytes]


@pytest.mark.parametrize("status", [201, 204, 302, 400, 410, 500, 599])
def test_a_status_is_returned(run, status):
    response, _ = exchange(run, f"HTTP/1.1 {status} X\r\ncontent-length: 0\r\n\r\n".encode())
    assert response == WebhookResponse(status)


def test_a_redirect_is_not_followed(run):
    async def main():
        async with Receiver(OK) as elsewhere:
            location = f"location: http://127.0.0.1:{elsewhere.port}/\r\n".encode()
            answer = b"HTTP/1.1 307 X\r\n" + location + b"content-length: 0\r\n\r\n"
            async with Receiver(answer) as receiver, open_sender() as sender:
                response = await sender.send(request_to(receiver.port), always)
            return response, receiver, elsewhere

    response, receiver, elsewhere = run(main)
    assert response.status == 307
    assert len(receiver.received) == 1
    assert elsewhere.connections == 0


@pytest.mark.parametrize(
    ("value", "retry_after_ms"),
    [("7", 7_000), ("Fri, 20 Nov 2026 16:31:00 GMT", 60_000), ("soon", None)],
)
def test_retry_after_is_returned(run, value, retry_after_ms):
    response, _ = exchange(
        run, f"HTTP/1.1 503 X\r\nRetry-After: {value}\r\ncontent-length: 0\r\n\r\n".encode()
    )
    assert response == WebhookResponse(503, retry_after_ms)


def test_interim_answers_are_skipped(run):
    response, _ = exchange(run, b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 X\r\na: b\r\n\r\n" + OK)
    assert response == WebhookResponse(200)


def send_several(run, *answers, count=3):
    async def main():
        async with Receiver(*answers) as receiver, open_sender() as sender:
            return [
                await sender.send(request_to(receiver.port), always) for _ in range(count)
            ], receiver

    return run(main)


@pytest.mark.parametrize(
    "answer",
    [
        OK,
        b"HTTP/1.1 204 X\r\n\r\n",
        b"HTTP/1.1 500 X\r\ncontent-length: 3\r\n\r\nabc",
        CHUNKED + b"3\r\nabc\r\n0\r\nretry-after: 9\r\n\r\n",
    ],
)
def test_a_connection_is_used_again(run, answer):
    responses, receiver = send_several(run, answer)
    assert {response.status for response in responses} == {int(answer[9:12])}
    assert {response.retry_after_ms for response in responses} == {None}
    assert receiver.connections == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 X\r\nconnection: close\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.0 200 X\r\ncontent-length: 0\r\n\r\n",
        OK + b"HTTP/1.1 500 X\r\ncontent-length: 0\r\n\r\n",  # the answer to no question
        OK + b"garbage",
    ],
)
def test_a_connection_that_cannot_be_trusted_is_not_used_again(run, answer):
    responses, receiver = send_several(run, answer)
    assert responses == [WebhookResponse(200)] * 3
    assert receiver.connections == 3


def test_an_idle_connection_that_the_receiver_closes_costs_nothing(run):
    async def answer_and_close(reader, writer):
        writer.write(OK)

    async def main():
        async with Receiver(answer_and_close) as receiver, open_sender() as sender:
            for _ in range(3):
                assert await sender.send(request_to(receiver.port), always) == WebhookResponse(200)
                (route,) = sender._routes.values()
                await until(lambda: not route.idle or not route.idle[0].is_open)  # noqa: B023
            return receiver.connections

    assert run(main) == 3


def test_an_answer_that_nobody_asked_for_ends_an_idle_connection(run):
    asked: list[bool] = []

    async def answer_twice(reader, writer):
        writer.write(OK)
        await until(lambda: asked)
        writer.write(OK)
        await reader.read()

    async def main():
        async with Receiver(answer_twice) as receiver, open_sender() as sender:
            assert await sender.send(request_to(receiver.port), always) == WebhookResponse(200)
            asked.append(True)
            async with asyncio.timeout(3):
                await receiver.ended.wait()
            assert await sender.send(request_to(receiver.port), always) == WebhookResponse(200)

    run(main)


def test_a_kept_connection_that_is_closed_under_a_request_is_no_failure(run):
    async def main():
        async with Receiver(OK, None, OK) as receiver, open_sender() as sender:
            for _ in range(2):
                assert await sender.send(request_to(receiver.port), always) == WebhookResponse(200)
            return receiver.connections, len(receiver.received)

    assert run(main) == (2, 3)


def test_a_kept_connection_that_is_closed_within_an_answer_is_a_failure(run):
    async def half(reader, writer):
        writer.write(b"HTTP/1.1 2")
        await writer.drain()

    async def main():
        async with Receiver(OK, half, OK) as receiver, open_sender() as sender:
            assert await sender.send(request_to(receiver.port), always) == WebhookResponse(200)
            response = await sender.send(request_to(receiver.port), always)
            return response.status, len(receiver.received)

    assert run(main) == (None, 2)


def test_a_new_connection_that_is_closed_under_a_request_is_a_failure(run):
    response, receiver = exchange(run, None)
    assert response.status is None
    assert len(receiver.received) == 1


def test_a_request_that_may_not_begin_sends_nothing(run):
    async def main():
        async with Receiver(OK) as receiver, open_sender() as sender:
            for may_begin in (lambda: False, always, lambda: False, always):
                response = await sender.send(request_to(receiver.port), may_begin)
                assert response == WebhookResponse(
                    *(None, None, None, b""), is_withheld=not may_begin()
                ) or response == WebhookResponse(200)
            return len(receiver.received), receiver.connections

    # The first connection was opened for nothing, and the others use one.
    assert run(main) == (2, 2)


def test_a_request_is_not_sent_once_more_if_it_may_not_begin_any_more(run):
    async def main():
        asked = []

        def once():
            asked.append(True)
            return len(asked) == 1

        async with Receiver(OK, None, OK) as receiver, open_sender() as sender:
            assert await sender.send(request_to(receiver.port), always) == WebhookResponse(200)
            response = await sender.send(request_to(receiver.port), once)
            assert response.is_withheld
            return len(asked), len(receiver.received)

    assert run(main) == (2, 2)


@pytest.mark.parametrize("way", ["refuses", "is mute", "answers 502"])
def test_a_receiver_that_has_moved_is_found_after_one_failure(run, monkeypatch, way):
    monkeypatch.setattr(sender_module, "LOOK_UP_AGAIN_S", 0)
    old_ways: dict[str, list[Any]] = {
        "refuses": [None],
        "is mute": [mute],
        "answers 502": [b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n"],
    }

    async def main():
        resolve = Names({"hooks.test": ["127.0.0.2"]})
        async with (
            Receiver(OK, *old_ways[way], host="127.0.0.2") as old,
            open_sender("hooks.test", "127.0.0.0/8", resolve=resolve) as sender,
        ):
            old.port = old._server.sockets[0].getsockname()[1]
            async with Receiver(OK, host="127.0.0.3", port=old.port) as new:
                request = request_to(old.port, "hooks.test", timeout_ms=300)
                assert await sender.send(request, always) == WebhookResponse(200)
                resolve.mapping = {"hooks.test": ["127.0.0.3"]}
                failed = await sender.send(request, always)
                assert failed.status in (None, 502)
                assert await sender.send(request, always) == WebhookResponse(200)
                return len(new.received)

    assert run(main) == 1


def test_receivers_that_always_fail_cost_few_look_ups(run):
    resolve = Names({"hooks.test": ["127.0.0.1"]})

    async def main():
        async with (
            Receiver(b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n") as receiver,
            open_sender("hooks.test", "127.0.0.1", resolve=resolve) as sender,
        ):
            for _ in range(50):
                await sender.send(request_to(receiver.port, "hooks.test"), always)

    run(main)
    assert resolve.lookups <= 3


def test_an_address_that_is_mute_has_a_head_start_and_no_more(run):
    async def main():
        with socket.socket() as full:
            # A listener whose queue is full takes no connection, and refuses none.
            full.bind(("127.0.0.2", 0))
            full.listen(0)
            port = full.getsockname()[1]
            resolve = Names({"hooks.test": ["127.0.0.2", "127.0.0.3"]})
            fillers = []
            for _ in range(3):
                filler = socket.socket()
                filler.setblocking(False)
                filler.connect_ex(("127.0.0.2", port))
                fillers.append(filler)
            async with (
                Receiver(OK, host="127.0.0.3", port=port),
                open_sender("hooks.test", "127.0.0.0/8", resolve=resolve) as sender,
            ):
                request = request_to(port, "hooks.test", timeout_ms=2_000)
                response = await sender.send(request, always)
            for filler in fillers:
                filler.close()
            return response

    assert run(main) == WebhookResponse(200)


def test_a_connection_that_was_idle_for_long_is_not_used_again(run, monkeypatch):
    async def main():
        async with Receiver(OK) as receiver, open_sender() as sender:
            assert await sender.send(request_to(receiver.port), always) == WebhookResponse(200)
            monkeypatch.setattr(sender_module, "IDLE_S", 0)  # as if so much time had passed
            assert await sender.send(request_to(receiver.port), always) == WebhookResponse(200)
            return receiver.connections

    assert run(main) == 2


def test_idle_connections_and_unused_targets_are_forgotten(run, monkeypatch):
    monkeypatch.setattr(sender_module, "IDLE_S", 0.01)
    monkeypatch.setattr(sender_module, "ADDRESS_TTL_S", 0.01)

    async def main():
        async with Receiver(OK) as receiver, open_sender() as sender:
            await sender.send(request_to(receiver.port, "localhost"), always)
            await receiver.ended.wait()
            await until(lambda: not sender._routes)
            assert sender._sweeper is None
            assert await sender.send(request_to(receiver.port), always) == WebhookResponse(200)

    run(main)


# ---- receivers that do not ---------------------------------------------------------------------


async def never(reader, writer):
    await reader.read()


async def status_then_stall(reader, writer):
    writer.write(b"HTTP/1.1 200 X\r\ncontent-length: 100\r\n\r\nabc")
    await reader.read()


async def status_then_close(reader, writer):
    writer.write(b"HTTP/1.1 200 X\r\ncontent-length: 100\r\n\r\nabc")


def endless(start, piece):
    async def answer(reader, writer):
        writer.write(start)
        while True:
            writer.write(piece)
            await writer.drain()
            await turns()  # drain() of an empty buffer does not give way to others

    return answer


def exchange_until_closed(run, answer, **changes):
    """The response, once the receiver has seen that the connection is closed."""

    async def main():
        async with Receiver(answer) as receiver, open_sender() as sender:
            # Far below the timeout of the request: it is not that which ends the matter.
            async with asyncio.timeout(20):
                response = await sender.send(request_to(receiver.port, **changes), always)
                await receiver.ended.wait()
            return response

    return run(main)


def test_a_receiver_that_never_answers(run):
    response = exchange_until_closed(run, never, timeout_ms=50)
    assert response == WebhookResponse(None, error="no answer within 50 ms")


@pytest.mark.parametrize("answer", [None, b"HTTP/1.1 200"])
def test_a_receiver_that_closes_without_an_answer(run, answer):
    async def cut(reader, writer):
        writer.write(answer)

    response = exchange_until_closed(run, cut if answer else None)
    assert response.status is None
    assert "closed without an answer" in response.error


@pytest.mark.parametrize(
    "answer",
    [
        b"\x00\xff\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 XYZ\r\n\r\n",
        b"HTTP/1.1 101 X\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
    ],
)
def test_a_receiver_that_answers_garbage(run, answer):
    response = exchange_until_closed(run, answer)
    assert response.status is None
    assert "not HTTP" in response.error


@pytest.mark.parametrize(
    "answer",
    [
        status_then_close,
        endless(CHUNKED, b"1000\r\n" + b"x" * 4096 + b"\r\n"),
        endless(b"HTTP/1.1 200 X\r\n\r\n", b"x" * 4096),
        endless(b"HTTP/1.1 200 X\r\ncontent-length: 999999999999\r\n\r\n", b"x" * 4096),
        CHUNKED + b"not a length\r\n",
    ],
)
def test_the_status_counts_even_if_the_body_is_bad(run, answer):
    assert exchange_until_closed(run, answer) == WebhookResponse(200)


def test_the_status_counts_even_if_the_body_never_comes(run):
    assert exchange_until_closed(run, status_then_stall, timeout_ms=1000) == WebhookResponse(200)


@pytest.mark.parametrize(
    "answer",
    [
        endless(b"HTTP/1.1 200 X\r\n", b"x: " + b"y" * 200 + b"\r\n"),
        endless(b"HTTP/1.1 200 X\r\nx: ", b"y" * 4096),
        endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 50),
    ],
)
def test_a_head_without_end_is_cut_off(run, answer):
    response = exchange_until_closed(run, answer)
    assert response.status is None
    assert response.error


def test_nobody_listens(run):
    async def main():
        with socket.socket() as reserved:
            reserved.bind(("127.0.0.1", 0))  # and does not listen
            async with open_sender() as sender:
                return await sender.send(request_to(reserved.getsockname()[1]), always)

    response = run(main)
    assert response.status is None
    assert response.error


def test_a_bad_receiver_delays_no_other(run):
    async def main():
        async with Receiver(never) as bad, Receiver(OK) as good, open_sender() as sender:
            stuck = [
                asyncio.create_task(sender.send(request_to(bad.port), always)) for _ in range(20)
            ]
            for _ in range(20):
                assert await sender.send(request_to(good.port), always) == WebhookResponse(200)
            assert not any(task.done() for task in stuck)
            for task in stuck:
                task.cancel()
            await asyncio.gather(*stuck, return_exceptions=True)
            await bad.ended.wait()  # a cancelled send closes its connection

    run(main)


def test_an_idle_connection_makes_room_for_one_to_another_target(run):
    async def main():
        async with (
            Receiver(OK) as first,
            Receiver(OK) as second,
            Receiver(OK) as third,
            open_sender(connections_max=2) as sender,
        ):
            for receiver in (first, second, third, second, third):
                assert await sender.send(request_to(receiver.port), always) == WebhookResponse(200)
            # The one that was idle for longest: its receiver sees it closed.
            await first.ended.wait()
            assert not second.ended.is_set()
            assert [one.connections for one in (first, second, third)] == [1, 1, 1]
            await sender.send(request_to(first.port), always)
            assert first.connections == 2

    run(main)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOBUFS])
def test_a_machine_without_descriptors_is_no_failure_of_the_receiver(run, monkeypatch, number):
    monkeypatch.setattr(sender_module, "EXHAUSTED_WAIT_S", 0)

    async def main():
        async with Receiver(OK) as receiver, open_sender() as sender:
            connect, refusals = sender._connect, [OSError(number, os.strerror(number))] * 3

            async def lacking(*arguments):
                if refusals:
                    raise refusals.pop()
                return await connect(*arguments)

            monkeypatch.setattr(sender, "_connect", lacking)
            response = await sender.send(request_to(receiver.port), always)
            assert (response, len(receiver.received)) == (WebhookResponse(200), 1)

    run(main)


# ---- names and addresses -----------------------------------------------------------------------


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_loopback_is_allowed_by_default(run, host):
    async def main():
        async with Receiver(OK) as receiver, open_sender() as sender:
            return await sender.send(request_to(receiver.port, host), always)

    assert run(main) == WebhookResponse(200)


@pytest.mark.parametrize("addresses", [["127.0.0.1"], ["::ffff:127.0.0.1"], ["169.254.169.254"]])
def test_a_listed_name_that_resolves_to_a_forbidden_address_is_not_connected_to(run, addresses):
    async def main():
        resolve = Names({"hooks.test": addresses})
        async with Receiver(OK) as receiver, open_sender("hooks.test", resolve=resolve) as sender:
            return await sender.send(request_to(receiver.port, "hooks.test"), always), receiver

    response, receiver = run(main)
    assert response.status is None
    assert "not allowed" in response.error
    assert receiver.connections == 0


def test_a_name_that_is_not_listed_is_not_even_resolved(run):
    resolve = Names({"other.test": ["127.0.0.1"]})

    async def main():
        async with open_sender("hooks.test", "127.0.0.1", resolve=resolve) as sender:
            return await sender.send(request_to(80, "other.test"), always)

    response = run(main)
    assert "not allowed" in response.error
    assert resolve.lookups == 0


def test_of_several_addresses_only_the_allowed_ones_are_tried(run):
    """The first allowed one refuses the connection, so the next one gets it, and keeps it."""

    async def main():
        resolve = Names({"hooks.test": ["10.0.0.1", "127.0.0.2", "127.0.0.1"]})
        closing = b"HTTP/1.1 200 X\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
        async with (
            Receiver(closing) as receiver,
            open_sender("hooks.test", "127.0.0.0/8", resolve=resolve) as sender,
        ):
            for _ in range(2):
                response = await sender.send(request_to(receiver.port, "hooks.test"), always)
                assert response == WebhookResponse(200)
            (route,) = sender._routes.values()
            assert route.addresses == ("127.0.0.1", "127.0.0.2")
            return receiver.received[0].headers["host"], receiver.port

    host, port = run(main)
    assert host == f"hooks.test:{port}"


def test_a_name_that_turns_bad_is_refused_after_its_time_to_live(run, monkeypatch):
    monkeypatch.setattr(sender_module, "ADDRESS_TTL_S", 0)
    mapping = {"hooks.test": ["127.0.0.1"]}

    async def main():
        resolve = Names(mapping)
        async with (
            Receiver(OK) as receiver,
            open_sender("hooks.test", "127.0.0.1", resolve=resolve) as sender,
        ):
            request = request_to(receiver.port, "hooks.test")
            assert await sender.send(request, always) == WebhookResponse(200)
            del mapping["hooks.test"]  # a name server that is down stops nothing
            assert await sender.send(request, always) == WebhookResponse(200)
            assert await sender.send(request, always) == WebhookResponse(200)
            mapping["hooks.test"] = ["10.0.0.1"]
            # Served with the old address while the new one is found.
            await sender.send(request, always)
            return await sender.send(request, always)

    response = run(main)
    assert response.status is None
    assert "10.0.0.1" in response.error


def test_an_idle_connection_to_an_address_that_the_name_left_is_not_used(run, monkeypatch):
    monkeypatch.setattr(sender_module, "ADDRESS_TTL_S", 0)

    async def main():
        resolve = Names({"hooks.test": ["127.0.0.1"]})
        async with (
            Receiver(OK) as receiver,
            open_sender("hooks.test", "127.0.0.0/8", resolve=resolve) as sender,
        ):
            request = request_to(receiver.port, "hooks.test")
            assert await sender.send(request, always) == WebhookResponse(200)
            resolve.mapping = {"hooks.test": ["127.0.0.2"]}  # where nobody listens
            # Finds that out meanwhile.
            assert await sender.send(request, always) == WebhookResponse(200)
            return await sender.send(request, always)

    assert run(main).status is None


def test_a_name_is_looked_up_once_for_all_who_wait(run):
    resolve = Names({"hooks.test": ["127.0.0.1"]})

    async def main():
        async with (
            Receiver(OK) as receiver,
            open_sender("hooks.test", "127.0.0.1", resolve=resolve) as sender,
        ):
            request = request_to(receiver.port, "hooks.test")
            responses = await asyncio.gather(*(sender.send(request, always) for _ in range(20)))
            assert responses == [WebhookResponse(200)] * 20

    run(main)
    assert resolve.lookups == 1


@pytest.mark.parametrize(
    ("mapping", "error"), [({}, "cannot resolve"), ({"no.test": []}, "no addr")]
)
def test_a_name_without_addresses(run, mapping, error):
    async def main():
        async with open_sender("no.test", resolve=Names(mapping)) as sender:
            return await sender.send(request_to(80, "no.test"), always)

    response = run(main)
    assert response.status is None
    assert error in response.error


def test_who_gives_up_waiting_for_a_name_does_not_end_the_look_up_for_others(run):
    async def main():
        found = asyncio.Event()

        async def resolve(host, port):
            await found.wait()
            return ["127.0.0.1"]

        async with (
            Receiver(OK) as receiver,
            open_sender("hooks.test", "127.0.0.1", resolve=resolve) as sender,
        ):
            patient = asyncio.create_task(
                sender.send(request_to(receiver.port, "hooks.test"), always)
            )
            hasty = await sender.send(
                request_to(receiver.port, "hooks.test", timeout_ms=10), always
            )
            found.set()
            return hasty, await patient

    assert run(main) == (
        WebhookResponse(None, error="no answer within 10 ms"),
        WebhookResponse(200),
    )


def test_a_name_server_that_never_answers_costs_the_timeout(run):
    async def resolve(host, port):
        await asyncio.Event().wait()

    async def main():
        async with open_sender("slow.test", resolve=resolve) as sender:
            return await sender.send(request_to(80, "slow.test", timeout_ms=20), always)

    assert run(main) == WebhookResponse(None, error="no answer within 20 ms")


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"url": "http://user@127.0.0.1/"}, "webhook URL"),
        ({"headers": {"x": "a\r\nb: c"}}, "line breaks"),
        ({"headers": {"content-length": "0"}}, "set by the server"),
        ({"headers": {"delay-attempt": "7"}}, "set by the server"),
        ({"headers": {"delay-schedule": "a\r\nb: c"}}, "line breaks"),
        ({"content_type": "a/b\r\nx: y"}, "line break"),
        ({"message_id": "a\nb"}, "line break"),
        ({"subject": "订单"}, "Latin-1"),
    ],
)
def test_what_must_not_be_sent_is_not_sent(run, changes, error):
    async def main():
        async with Receiver(OK) as receiver, open_sender() as sender:
            return await sender.send(request_to(receiver.port, **changes), always), receiver

    response, receiver = run(main)
    assert response.status is None
    assert error in response.error
    assert receiver.connections == 0


# ---- TLS ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """Certificate and key for hooks.test, signed by itself."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the openssl command")
    directory = tmp_path_factory.mktemp("tls")
    command = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    command += " -subj /CN=hooks.test -addext subjectAltName=DNS:hooks.test"
    subprocess.run(
        [openssl, *command.split(), "-keyout", "key.pem", "-out", "cert.pem"],
        cwd=directory,
        check=True,
        capture_output=True,
    )
    return directory / "cert.pem", directory / "key.pem"


@pytest.mark.parametrize(("host", "status"), [("hooks.test", 200), ("other.test", None)])
def test_the_certificate_is_checked_against_the_name(run, certificate, host, status):
    """… although the connection is made to the address that was checked."""
    cert, key = certificate
    server_tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server_tls.load_cert_chain(cert, key)
    asked_for = []
    server_tls.sni_callback = lambda _socket, name, _context: asked_for.append(name)
    client_tls = ssl.create_default_context(cafile=cert)

    async def main():
        resolve = Names({host: ["127.0.0.1"]})
        async with (
            Receiver(OK, tls=server_tls) as receiver,
            open_sender(host, "127.0.0.1", resolve=resolve, tls=client_tls) as sender,
        ):
            url = f"https://{host}:{receiver.port}/"
            first = await sender.send(request_to(0, url=url), always)
            return first, await sender.send(request_to(0, url=url), always), receiver

    first, second, receiver = run(main)
    assert first.status == second.status == status
    assert set(asked_for) == {host}
    if status is None:
        assert "certificate" in first.error.lower()
    else:
        assert receiver.connections == 1
