"""HTTP on the wire, byte by byte: pipelining, closing, waiting for leave, breaking off, garbage."""

import json
import socket
import time
from email.utils import parsedate_to_datetime
from http.client import HTTPResponse
from typing import Any

import pytest

from tests.integration.api_support import ApiServer, unique
from tests.waiting import DEADLINE_S, wait_until

HOT, BATCH, REST = "/v1/messages", "/v1/messages/batch", "/healthz"


@pytest.fixture
def api(shared_api):
    return shared_api


@pytest.fixture
def subject():
    return unique("wire")


class Wire:
    """A connection; answers are read one after the other."""

    def __init__(self, port):
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self.socket.makefile("rb")

    def send(self, data):
        self.socket.sendall(data)

    def answer(self, method="POST"):
        """Status, headers and document of the next answer."""
        shared: Any = _Shared(self._file)
        answer = HTTPResponse(shared, method=method)
        answer.begin()
        body = answer.read()
        return answer.status, answer.headers, json.loads(body) if body else None

    @property
    def is_closed(self):
        """Whether the server ends the connection, and says nothing more."""
        return self._file.read(1) == b""

    def close(self):
        self._file.close()
        self.socket.close()


class _Shared:
    """HTTPResponse wants to open and close the file itself."""

    def __init__(self, file):
        self._file = file

    def makefile(self, mode):
        return self

    def close(self):
        pass

    def __getattr__(self, name):
        return getattr(self._file, name)


@pytest.fixture
def wire(api):
    wire = Wire(api.process.port)
    yield wire
    wire.close()


def request(path, body=b"", *fields, method="POST", version="1.1", length=True):
    lines = [f"{method} {path} HTTP/{version}", "host: localhost", *fields]
    if length:
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def message(subject, number=0, **more):
    return json.dumps({"subject": subject, "body": number, "delay": "1h", **more}).encode()


def chunked(*parts):
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def count(api, subject):
    """How many messages of a subject there are, by trying their keys."""
    return sum(
        api.get(f"/v1/subjects/{subject}/keys/{number}").status_code == 200 for number in range(20)
    )


def test_a_connection_serves_hot_and_other_calls_in_turn(wire, subject):
    for number in range(5):
        wire.send(request(HOT, message(subject, number)))
        assert wire.answer()[0] == 201
        wire.send(request(REST, method="GET"))
        assert wire.answer("GET")[2] == {"status": "ok"}
        wire.send(request(BATCH, b"[" + message(subject) + b"]"))
        assert wire.answer()[2]["count"] == 1


@pytest.mark.parametrize("split", [1 << 20, 700, 37])
def test_pipelined_requests_are_answered_in_order(wire, subject, split):
    lone = message(subject, key="same")
    requests = [
        request(HOT, lone),
        request(HOT, message(subject, 2)),
        request(REST, method="GET"),
        request(HOT, b"{"),
        request(HOT, lone),
        request(BATCH, b"[" + message(subject) + b"," + message(subject) + b"]"),
        request("/nowhere", method="GET"),
        request(f"/v1/subjects/{subject}/keys/same", method="GET"),
        request(HOT, message(subject, 3)),
    ]
    data = b"".join(requests)
    for start in range(0, len(data), split):
        wire.send(data[start : start + split])
    answers = [wire.answer() for _ in requests]
    assert [status for status, _, _ in answers] == [201, 201, 200, 422, 200, 200, 404, 200, 201]
    documents = [document for _, _, document in answers]
    assert documents[4]["id"] == documents[0]["id"] == documents[7]["id"]
    assert documents[5]["count"] == 2
    assert len({documents[n]["id"] for n in (0, 1, 8)}) == 3


@pytest.mark.parametrize("split", [1 << 20, 700, 37])
def test_what_stands_behind_a_call_of_a_consumer_is_answered_after_it(api, wire, subject, split):
    path = api.subscribe(unique("wire"), subject)
    later = message(subject, 1, key="later")
    leases = json.dumps({"leases": ["e-1-0"]}).encode()
    requests = [
        request(f"{path}/pull", b'{"wait": "300ms"}'),
        request(HOT, later),
        request(f"{path}/ack", leases),
        request(f"{path}/pull", b'{"wait": "5ms"}'),
        request(REST, method="GET"),
        request(HOT, later),
        request(f"{path}/extend", b"{"),
        request(f"{path}/pull"),
        request(HOT, message(subject, 2)),
        request(f"{path}/nack", leases),
    ]
    data = b"".join(requests)
    for start in range(0, len(data), split):
        wire.send(data[start : start + split])
    answers = [wire.answer() for _ in requests]
    statuses = [status for status, _, _ in answers]
    assert statuses == [200, 201, 200, 200, 200, 200, 422, 200, 201, 200]
    documents = [document for _, _, document in answers]
    assert documents[0] == documents[3] == documents[7] == {"messages": []}
    assert documents[2] == {"acked": 0, "expired": ["e-1-0"]}
    assert documents[9] == {"nacked": 0, "expired": ["e-1-0"]}
    assert documents[5]["id"] == documents[1]["id"]


def test_much_behind_a_call_of_a_consumer_is_not_read_until_it_is_answered(api, wire, subject):
    path = api.subscribe(unique("wire"), subject)
    body = message(subject, body="x" * 10_000)
    wire.send(request(f"{path}/pull", b'{"wait": "300ms"}'))
    wire.send(b"".join(request(HOT, body) for _ in range(50)))
    assert wire.answer()[2] == {"messages": []}
    assert [wire.answer()[0] for _ in range(50)] == [201] * 50


def test_a_connection_ends_after_a_pull_that_says_so(api, wire, subject):
    path = api.subscribe(unique("wire"), subject)
    wire.send(request(f"{path}/pull", b'{"wait": "50ms"}', "connection: close"))
    status, headers, document = wire.answer()
    assert (status, headers["connection"], document) == (200, "close", {"messages": []})
    assert wire.is_closed


def test_many_pipelined_publishes(wire, subject):
    wire.send(b"".join(request(HOT, message(subject, n)) for n in range(300)))
    ids = [wire.answer()[2]["id"] for _ in range(300)]
    assert ids == sorted(ids, key=lambda text: text[16:28])  # in the order of their sequence
    assert len(set(ids)) == 300


@pytest.mark.parametrize("path", [HOT, REST])
def test_connection_close_is_kept(wire, subject, path):
    method = "POST" if path == HOT else "GET"
    body = message(subject) if path == HOT else b""
    wire.send(request(path, body, "connection: close", method=method))
    status, headers, _ = wire.answer()
    assert status in (200, 201)
    assert headers["connection"] == "close"
    assert wire.is_closed


def test_a_client_of_http_1_0_is_answered_and_left(wire, subject):
    wire.send(request(HOT, message(subject), version="1.0"))
    assert wire.answer()[0] == 201
    assert wire.is_closed


def test_a_client_that_asks_for_leave_to_send_gets_it(wire, subject):
    body = message(subject)
    head = request(HOT, b"", "expect: 100-continue", f"content-length: {len(body)}", length=False)
    wire.send(head)
    assert wire._file.readline() == b"HTTP/1.1 100 Continue\r\n"
    assert wire._file.readline() == b"\r\n"
    wire.send(body)
    assert wire.answer()[0] == 201


def test_who_asks_for_leave_to_send_too_much_is_refused_before(wire):
    wire.send(request(HOT, b"", "expect: 100-continue", "content-length: 99999999", length=False))
    status, _, problem = wire.answer()
    assert status == 413
    assert problem["type"] == "urn:delayserver:problem:too-large"


@pytest.mark.parametrize("path", [HOT, BATCH])
def test_a_body_in_chunks(wire, subject, path):
    body = message(subject)
    if path == BATCH:
        body = b"[" + body + b"]"
    head = request(path, b"", "transfer-encoding: chunked", length=False)
    for _ in range(2):
        wire.send(head + chunked(body[:10], body[10:]))
        assert wire.answer()[0] in (200, 201)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/%6Dessages", 201),
        ("/v1/messages?ack=durable", 201),
        ("/v1/messages?x=1", 422),
        ("//localhost/v1/messages", 404),
    ],
)
def test_other_spellings_of_the_path(wire, subject, path, status):
    wire.send(request(path, message(subject)))
    assert wire.answer()[0] == status


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01 this is TLS\r\n\r\n",
        b"GET\r\n\r\n",
        b"POST /v1/messages HTTP/1.1\r\ncontent-length: x\r\n\r\n",
        b"POST /v1/messages HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/messages HTTP/1.1\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}",
        b"POST /v1/messages HTTP/1.1\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n{}",
        b"POST /v1/messages HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/messages HTTP/9.9\r\n\r\n",
    ],
)
def test_garbage_gets_a_problem_and_the_connection_ends(wire, data):
    wire.send(data)
    status, headers, problem = wire.answer()
    assert status == problem["status"] == 400
    assert headers["content-type"] == "application/problem+json"
    assert wire.is_closed


def test_garbage_behind_a_request_does_not_take_its_answer(wire, api, subject):
    wire.send(request(HOT, message(subject)) + b"garbage\r\n\r\n")
    status, _, document = wire.answer()
    assert status == 201
    assert wire.is_closed
    assert api.look_up(document["id"])["state"] == "scheduled"


def test_garbage_behind_pipelined_requests_never_counts_as_an_answer_to_one(wire, subject):
    requests = request(HOT, message(subject)) + request(HOT, message(subject))
    wire.send(requests + b"garbage\r\n\r\n")
    assert [wire.answer()[0] for _ in range(2)] == [201, 201]
    assert wire.is_closed


@pytest.mark.parametrize("end", ["close", "reset"])
def test_a_client_that_leaves_before_its_answer_has_published(api, subject, end):
    wire = Wire(api.process.port)
    wire.send(request(HOT, message(subject, key="0")) + request(BATCH, b"[]") * 3)
    if end == "reset":
        wire.socket.setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00"
        )
    wire.close()
    if end == "close":
        wait_until(lambda: count(api, subject) == 1)
    assert api.ask("GET", REST) == {"status": "ok"}


@pytest.mark.parametrize("length", [True, False])
def test_what_breaks_off_publishes_nothing(api, subject, length):
    lines = b"".join(message(subject, key=str(n)) + b"\n" for n in range(10))
    wire = Wire(api.process.port)
    if length:
        field = f"content-length: {len(lines) + 100}"
        wire.send(request(BATCH, lines, field, "content-type: application/x-ndjson", length=False))
    else:
        fields = ("transfer-encoding: chunked", "content-type: application/x-ndjson")
        wire.send(request(BATCH, b"", *fields, length=False) + chunked(lines)[:-5])
    put = Wire(api.process.port)
    field = "transfer-encoding: chunked"
    path = f"/v1/subjects/{subject}/keys/11"
    put.send(request(path, b"8\r\n{}      \r\n", field, method="PUT", length=False))
    wire.close()
    put.close()
    before = api.ask("GET", "/v1/stats")["accepted"]
    for _ in range(20):  # what they sent came in before these
        api.ask("GET", REST)
    assert api.ask("GET", "/v1/stats")["accepted"] == before
    assert count(api, subject) == 0
    assert "Exception" not in api.log


def test_requests_one_byte_at_a_time(wire, subject):
    for byte in request(HOT, message(subject)):
        wire.send(bytes([byte]))
    assert wire.answer()[0] == 201


def test_pipelined_publishes_share_a_sync(wire, api, subject):
    before = api.metric("commits_total")
    wire.send(b"".join(request(HOT, message(subject, n)) for n in range(200)))
    assert all(wire.answer()[0] == 201 for _ in range(200))
    assert api.metric("commits_total") - before < 100


def test_a_body_that_comes_in_pieces(wire, subject):
    body = b"[" + b",".join(message(subject, "x" * 10_000) for _ in range(20)) + b"]"
    data = request(HOT, message(subject)) + request(BATCH, body) + request(REST, method="GET")
    for start in range(0, len(data), 9_000):
        wire.send(data[start : start + 9_000])
        if start % 27_000 == 0:
            time.sleep(0.005)  # so that they do not come in one piece after all
    assert wire.answer()[0] == 201
    assert wire.answer()[2]["count"] == 20
    assert wire.answer("GET")[0] == 200


def test_what_follows_connection_close_is_not_served(wire, api, subject):
    wire.send(request(HOT, message(subject, key="0"), "connection: close"))
    wire.send(request(HOT, message(subject, key="1")))
    assert wire.answer()[0] == 201
    assert wire.is_closed
    assert count(api, subject) == 1


@pytest.mark.parametrize("end", [b"\n\n", b"\n\r\n", b"\r\n\n"])
def test_a_request_cannot_hide_behind_an_empty_line_that_is_none(wire, api, subject, end):
    hidden = request(HOT, message(subject, key="0"))
    wire.send(b"POST /v1/messages HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0" + end + hidden)
    status, _, problem = wire.answer()
    # Whether that ends a head or not: it is one request without a body, and then another one.
    assert (status, problem["status"]) in ((400, 400), (422, 422))
    if status == 422:
        assert wire.answer()[0] == 201
    else:
        assert wire.is_closed
        assert count(api, subject) == 0


@pytest.mark.parametrize("length", [0, 2])
def test_a_head_that_is_long_or_odd_is_read_all_the_same(wire, subject, length):
    fields = [f"x-{n}: {'y' * 500}" for n in range(length * 8)]
    body = message(subject)
    for head in ("Content-Length", "CONTENT-LENGTH"):
        wire.send(request(HOT, b"", f"{head}:   {len(body)}  ", *fields, length=False) + body)
        assert wire.answer()[0] == 201


def test_who_does_not_read_the_answers_is_not_read_from(wire, subject):
    wire.socket.settimeout(0.5)
    one = request(HOT, message(subject))
    many = memoryview(one * 1000)
    sent = 0
    with pytest.raises(TimeoutError):
        while sent < 64 << 20:  # what the system keeps for both ends is a few MB
            sent += wire.socket.send(many[sent % len(many) :])
    wire.socket.settimeout(DEADLINE_S)
    for _ in range(sent // len(one)):
        assert wire._file.readline() == b"HTTP/1.1 201 Created\r\n"
        while line := wire._file.readline().strip():
            if line.startswith(b"content-length"):
                length = int(line.split()[1])
        wire._file.read(length)


@pytest.mark.parametrize("bad", [0, 1], ids=["all are good", "one is bad"])
def test_publishes_of_many_connections_are_each_answered_for_their_own(api, subject, bad):
    wires = [Wire(api.process.port) for _ in range(32)]
    try:
        for turn in range(3):
            for number, wire in enumerate(wires):
                name = "not a subject" if bad and number == 16 else subject
                key = f"{turn}-{number}"
                wire.send(request(HOT, message(name, number, key=key)))
            for number, wire in enumerate(wires):
                status, headers, found = wire.answer()
                if bad and number == 16:
                    assert (status, found["errors"][0]["pointer"]) == (422, "/subject")
                    continue
                assert (status, found["key"]) == (201, f"{turn}-{number}")
                assert headers["location"].endswith(found["id"])
                if not turn:
                    assert api.look_up(found["id"])["body"] == number
        # A second request behind the first of a turn is answered behind it.
        first = request(HOT, message(subject))
        for wire in wires:
            wire.send(first + request(HOT, message("")) + first)
        for wire in wires:
            assert [wire.answer()[0] for _ in range(3)] == [201, 422, 201]
    finally:
        for wire in wires:
            wire.close()


def cancel_by_key(subject, key, *fields):
    return request(f"/v1/subjects/{subject}/keys/{key}", b"", *fields, method="DELETE")


@pytest.mark.parametrize("connection", ["keep-alive", "close"])
def test_connection_close_is_kept_for_a_cancel(wire, subject, connection):
    wire.send(cancel_by_key(subject, "k", f"connection: {connection}"))
    status, headers, _ = wire.answer("DELETE")
    assert status == 404
    if connection == "close":
        assert headers["connection"] == "close"
        assert wire.is_closed


def test_cancels_of_many_connections_are_each_answered_for_their_own(api, subject):
    wires = [Wire(api.process.port) for _ in range(32)]
    try:
        for turn in range(3):
            for number, wire in enumerate(wires):
                wire.send(request(HOT, message(subject, key=f"{turn}-{number}")))
            ids = [wire.answer()[2]["id"] for wire in wires]
            for number, wire in enumerate(wires):
                name = f"{turn}-{number}" if number != 16 else "none"
                by_id = request(f"{HOT}/{ids[number]}", method="DELETE")
                wire.send(by_id if number == 8 else cancel_by_key(subject, name))
            for number, wire in enumerate(wires):
                status, _, found = wire.answer("DELETE")
                if number == 16:
                    assert status == 404
                    continue
                assert (status, found) == (200, {"id": ids[number], "state": "cancelled"})
                assert api.look_up(ids[number])["state"] == "cancelled"
    finally:
        for wire in wires:
            wire.close()


@pytest.mark.parametrize("split", [1 << 20, 150])
def test_cancels_behind_other_requests_are_answered_in_order(wire, subject, split):
    again = request(HOT, message(subject, 1, key="k"))
    cancel = cancel_by_key(subject, "k")
    other_version = cancel_by_key(subject, "k", 'if-match: "1"')
    requests = [again, cancel, cancel, again, other_version, cancel, cancel_by_key(subject, "none")]
    for expected in (201, 200):
        data = b"".join(requests)
        for start in range(0, len(data), split):
            wire.send(data[start : start + split])
        # A key stays taken behind a cancel.
        statuses = [wire.answer()[0] for _ in requests]
        assert statuses == [expected, 200, 200, 200, 200, 200, 404]


def test_a_cancel_with_a_head_like_others_is_held_against_the_limits(tmp_path, subject):
    server = ApiServer(tmp_path, head_max_bytes=1024)
    server.start()
    try:
        wire = Wire(server.process.port)
        for key in ("k", "l", "k" * 512):
            wire.send(cancel_by_key(subject, key))
            assert wire.answer("DELETE")[0] == 404
        wire.send(cancel_by_key(subject, "k" * 1024))
        assert wire.answer("DELETE")[0] == 431
        wire.close()
    finally:
        server.shut_down()


@pytest.mark.parametrize("path", [HOT, f"{HOT}?ack=filed", "/nowhere"])
def test_a_client_that_ends_its_side_gets_its_answers(wire, api, subject, path):
    wire.send(request(path, message(subject, key="0")) + request(HOT, message(subject, key="1")))
    wire.socket.shutdown(socket.SHUT_WR)
    assert wire.answer()[0] == (404 if path == "/nowhere" else 201)
    assert wire.answer()[0] == 201
    # Its end may come a moment after the answers.
    assert wire.is_closed
    assert count(api, subject) == (1 if path == "/nowhere" else 2)


def test_a_consumer_that_ends_its_side_is_leased_nothing(wire, api, subject):
    path = api.subscribe(unique("wire"), subject)
    for query in ("", "?way=asgi"):
        wire = Wire(api.process.port)
        wire.send(request(f"{path}/pull{query}", b'{"wait": "60s"}'))
        wire.socket.shutdown(socket.SHUT_WR)
        assert wire.is_closed
        wire.close()
    api.publish(subject)
    (pulled,) = api.pull(path)
    assert pulled["attempt"] == 1


@pytest.mark.parametrize("path", [HOT, REST])
@pytest.mark.parametrize("hosts", ["", "host: localhost\r\nhost: evil.example\r\n"])
def test_a_request_names_one_host(wire, path, hosts):
    data = request(path, message("wire"), method="GET" if path == REST else "POST")
    wire.send(data.replace(b"host: localhost\r\n", hosts.encode()))
    status, headers, problem = wire.answer()
    assert status == problem["status"] == 400
    assert "one header `Host`" in problem["detail"]
    assert headers["content-type"] == "application/problem+json"
    assert wire.is_closed


@pytest.mark.parametrize("path", [HOT, BATCH, "/nowhere"])
def test_an_offer_of_another_protocol_is_ignored(wire, subject, path):
    fields = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQ")
    body = b"[" + message(subject) + b"]" if path == BATCH else message(subject)
    for _ in range(2):
        wire.send(request(path, body, *fields) + request(HOT, message(subject)))
        assert wire.answer()[0] == {HOT: 201, BATCH: 200}.get(path, 404)
        assert wire.answer()[0] == 201


@pytest.mark.parametrize("path", [HOT, BATCH, "/v1/subjects/stop/keys/k"])
def test_half_a_body_at_a_stop_gets_a_problem(tmp_path, path):
    server = ApiServer(tmp_path)
    server.start()
    try:
        wire = Wire(server.process.port)
        method = "PUT" if path.endswith("k") else "POST"
        wire.send(request(path, b"{", "content-length: 100", method=method, length=False))
        assert server.ask("GET", REST) == {"status": "ok"}
        assert server.process.stop() == 0
        status, headers, problem = wire.answer()
        assert (status, headers["retry-after"]) == (503, "2")
        assert problem["type"] == "urn:delayserver:problem:stopping"
        wire.close()
    finally:
        server.shut_down()


def test_head_wherever_there_is_a_get(wire, api, subject):
    found = api.publish(subject, delay="1h")
    paths = ["/healthz", "/readyz", f"{HOT}/{found['id']}", "/v1/subscriptions", "/openapi.json"]
    for path in (*paths, "/v1/messages/nothing", "/nowhere", HOT):
        wire.send(request(path, method="GET"))
        status, headers, _ = wire.answer("GET")
        wire.send(request(path, method="HEAD"))
        assert wire.answer("HEAD")[0] == status
        wire.send(request(path, method="HEAD"))  # nothing stands between two answers
        _, same, nothing = wire.answer("HEAD")
        assert nothing is None
        assert same["content-length"] == headers["content-length"]
        assert same["content-type"] == headers["content-type"]
    assert status == 405
    wire.send(request("/v1/stats", method="POST"))
    status, headers, _ = wire.answer()
    assert (status, headers["allow"]) == (405, "GET, HEAD")


def test_every_answer_has_a_date(wire, api, subject):
    path = api.subscribe(unique("wire"), subject)
    before = time.time() - DEADLINE_S  # the server makes it once a second, if it gets to it
    hot, unread = message(subject, key="k"), request(HOT, b"{")
    requests = [request(HOT, hot), request(HOT, hot), unread, request(BATCH, b"[]")]
    requests += [cancel_by_key(subject, "k"), request(f"{path}/pull"), request(REST, method="GET")]
    requests += [request("/v1/stats", method="GET"), request("/nowhere"), b"garbage\r\n\r\n"]
    for data in (b"".join(requests[:4]), *requests[4:]):
        wire.send(data)
        for _ in range(4 if data.count(b"HTTP/1.1") == 4 else 1):
            _, headers, _ = wire.answer()
            assert len(headers.get_all("date")) == 1
            date = parsedate_to_datetime(headers["date"]).timestamp()
            assert before <= date <= time.time()


def test_publishes_and_cancels_that_come_together_have_a_date(api, subject):
    wires = [Wire(api.process.port) for _ in range(32)]
    for requests in (
        [request(HOT, message(subject, key=str(number))) for number in range(32)],
        [cancel_by_key(subject, number) for number in range(32)],
    ):
        for wire, data in zip(wires, requests, strict=True):
            wire.send(data)
        for wire in wires:
            status, headers, _ = wire.answer()
            assert status in (200, 201)
            assert len(headers.get_all("date")) == 1
    for wire in wires:
        wire.close()
