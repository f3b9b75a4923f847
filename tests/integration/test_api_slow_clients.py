"""Clients that are slow, greedy or many cost themselves a connection, and others nothing."""

import socket
import time

import pytest

from tests.integration.api_support import ApiServer, unique
from tests.integration.test_api_wire import Wire, message, request
from tests.waiting import DEADLINE_S, wait_until

HOT, BATCH, PULL = "/v1/messages", "/v1/messages/batch", "/v1/subscriptions/slow/pull"
BY_KEY = "/v1/subjects/slow/keys/k"
CONNECTIONS_MAX = 30
IDLE_MS = 1500


@pytest.fixture(scope="module")
def api(tmp_path_factory):
    server = ApiServer(
        tmp_path_factory.mktemp("slow"),
        connections_max=CONNECTIONS_MAX,
        # Long enough that a busy machine keeps within them, short enough to wait for.
        head_timeout_ms=1000,
        body_timeout_ms=1000,
        write_timeout_ms=1000,
        idle_timeout_ms=IDLE_MS,
        head_max_bytes=4096,
    )
    server.start()
    server.subscribe("slow", "slow")
    yield server
    server.shut_down()


@pytest.fixture
def wire(api):
    wire = Wire(api.process.port)
    yield wire
    wire.close()


def trickle(wire, pieces, pause_s=0.05):
    """Send piece by piece (of bytes: each of them) until the server has had enough."""
    for piece in pieces:
        wire.socket.settimeout(pause_s)
        try:
            if wire.socket.recv(1, socket.MSG_PEEK):
                break
        except TimeoutError:
            wire.socket.settimeout(DEADLINE_S)
            wire.send(bytes([piece]) if isinstance(piece, int) else piece)
    wire.socket.settimeout(DEADLINE_S)


def test_a_head_that_trickles(wire):
    trickle(wire, request(HOT, message("slow")))
    status, headers, problem = wire.answer()
    assert status == problem["status"] == 408
    assert "head_timeout_ms" in problem["detail"]
    assert headers["connection"] == "close"
    assert wire.is_closed


@pytest.mark.parametrize(
    ("path", "method"), [(HOT, "POST"), (BATCH, "POST"), (BY_KEY, "PUT"), (PULL, "POST")]
)
def test_a_body_that_trickles(api, wire, path, method):
    before = api.ask("GET", "/v1/stats")["accepted"]
    body = b"[" + b" " * 1000 + b"]"
    whole = request(path, body, "content-type: application/json", method=method)
    wire.send(whole[:-900])
    trickle(wire, whole[-900:])
    assert wire.answer()[0] == 408
    assert wire.is_closed
    assert api.ask("GET", "/v1/stats")["accepted"] == before


def test_a_body_that_comes_slowly_but_comes(wire):
    body = b"[" + b" " * 25_000 + message("slow") + b"]"
    wire.send(request(BATCH, b"", f"content-length: {len(body)}", length=False))
    for start in range(0, len(body), 500):
        wire.send(body[start : start + 500])
        time.sleep(0.05)  # 10 KiB/s, and longer than both time-outs together
    assert wire.answer()[2]["count"] == 1


def test_a_connection_without_a_request(wire):
    began = time.monotonic()
    assert wire.is_closed
    # The server's time began a moment before ours.
    assert time.monotonic() - began >= IDLE_MS / 1000 / 2


def test_a_connection_that_is_used_stays(wire):
    for _ in range(5):
        wire.send(request(HOT, message("slow")))
        assert wire.answer()[0] == 201
        time.sleep(0.4)
    assert wire.is_closed


def test_a_long_poll_is_not_slow(wire, api):
    body = b'{"wait": "4s"}'
    subscription = unique("poll")
    api.subscribe(subscription, subscription)
    path = f"/v1/subscriptions/{subscription}/pull"
    wire.send(request(path, body, "content-type: application/json"))
    assert wire.answer()[2] == {"messages": []}


def test_a_head_that_never_ends(wire):
    wire.send(b"POST /v1/messages HTTP/1.1\r\nx-long: ")
    trickle(wire, [b"x" * 1000] * 1000, 0.001)
    status, headers, _ = wire.answer()
    assert (status, headers["connection"]) == (431, "close")
    assert wire.is_closed


def test_many_headers_and_long_ones(api):
    for headers in ({f"x-{n}": "y" for n in range(200)}, {"x": "y" * 5000}):
        for path in (HOT, BY_KEY, "/healthz"):
            answer = api.post(path, headers=headers, json={"subject": "slow"})
            assert answer.status_code == 431
            assert answer.json()["type"] == "urn:delayserver:problem:head-too-large"
    # Short requests in one large piece are no large request.
    wire = Wire(api.process.port)
    wire.send(request(HOT, message("slow")) * 100)
    assert {wire.answer()[0] for _ in range(100)} == {201}
    wire.close()


@pytest.mark.parametrize("path", ["/openapi.json", BATCH])
def test_a_client_that_does_not_read_its_answers(api, path):
    """It is not read from any more, which bounds what it costs, and then it is cut off."""
    wire = Wire(api.process.port)
    wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    # A thousand wrong items in one batch make a long answer, at once.
    body = b"[" + b",".join([b"{}"] * 1000) + b"]" if path == BATCH else b""
    whole = request(path, body, method="POST" if path == BATCH else "GET")
    deadline = time.monotonic() + DEADLINE_S
    with pytest.raises(ConnectionError):
        while time.monotonic() < deadline:
            wire.send(whole)
    wire.close()
    assert wait_until(lambda: answers(api))


def test_too_many_connections(api):
    wires = [Wire(api.process.port) for _ in range(CONNECTIONS_MAX)]
    late = Wire(api.process.port)
    status, headers, problem = late.answer()
    assert status == 503
    assert "connections_max" in problem["detail"]
    assert int(headers["retry-after"]) >= 1
    assert late.is_closed
    for wire in (*wires, late):
        wire.close()
    wait_until(lambda: answers(api))


def answers(api):
    try:
        return api.get("/healthz").status_code == 200
    except OSError:
        return False
    except Exception as error:  # what httpx makes of a connection that ends at once
        return "disconnected" in str(error)


def test_a_long_head_byte_by_byte_is_no_longer_than_it_is(shared_api):
    wire = Wire(shared_api.process.port)
    for byte in request(HOT, message("slow"), f"x-long: {'y' * 2000}"):
        wire.send(bytes([byte]))
    assert wire.answer()[0] == 201
    wire.close()
