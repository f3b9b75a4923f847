"""Publishing while a server is measured, counted to the message.

A `LoadConnection` is one keep-alive connection on a blocking socket. Requests
are built before the clock starts, so that sending one costs little more than the copy;
`publish_batches` runs in a process of its own, beside others, and takes and gives plain data.
Single POSTs come from `wrk`, deliveries are taken by `consumers`.

Times between processes are CLOCK_MONOTONIC, which they share.
"""

import re
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec

JSON = "application/json"
MSGPACK = "application/msgpack"
ARROW = "application/vnd.apache.arrow.stream"
START_AFTER_S = 0.3
"""Processes that begin together are told this much before."""
BUSY = 503
AGAIN_S = 0.05
"""So long after it was refused a request is sent again."""


class LoadError(Exception):
    """A request was not answered as it must be."""


def http_request(method: str, path: str, body: bytes = b"", content_type: str = JSON) -> bytes:
    """The bytes of a request."""
    head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: {content_type}\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


class LoadConnection:
    """One keep-alive connection to a server on loopback."""

    _length = re.compile(rb"\r\ncontent-length: *([0-9]+)", re.IGNORECASE)

    def __init__(self, port: int, timeout_s: float = 60) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._rest = b""
        """What came behind the last answer."""
        self.refused = 0
        """Answers of 503 that `receive_patiently` has had."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._socket.close()

    def fileno(self) -> int:
        """To wait for it with others."""
        return self._socket.fileno()

    @property
    def has_more(self) -> bool:
        """Whether something has come behind the last answer."""
        return bool(self._rest)

    def send(self, request: bytes) -> None:
        """Send a request whose answer `receive` takes later."""
        self._socket.sendall(request)

    def request(self, request: bytes) -> tuple[int, bytes]:
        """Status and body of the answer."""
        self._socket.sendall(request)
        return self._receive_answer()

    def demand(self, request: bytes) -> bytes:
        """The body of the answer. Raises LoadError unless the status is 2xx."""
        self._socket.sendall(request)
        return self.receive()

    def receive(self) -> bytes:
        """The body of the next answer. Raises LoadError unless the status is 2xx."""
        return _accepted(*self._receive_answer())

    def receive_patiently(self, request: bytes) -> bytes:
        """The body of the next answer, that to `request`, which is sent again while it is 503."""
        while (answer := self._receive_answer())[0] == BUSY:
            self.refused += 1
            time.sleep(AGAIN_S)
            self.send(request)
        return _accepted(*answer)

    def _receive_answer(self) -> tuple[int, bytes]:
        head, self._rest = self._rest, b""
        while (end := head.find(b"\r\n\r\n")) < 0:
            head += self._receive()
        found = self._length.search(head, 0, end)
        if found is None:
            raise LoadError(f"an answer without a length: {head[:200]!r}")
        status, until = int(head[9:12]), end + 4 + int(found[1])
        if len(head) >= until:
            self._rest = head[until:]
            return status, head[end + 4 : until]
        parts, missing = [head[end + 4 :]], until - len(head)
        while missing > 0:
            parts.append(self._receive())
            missing -= len(parts[-1])
        if missing:
            parts[-1], self._rest = parts[-1][:missing], parts[-1][missing:]
        return status, b"".join(parts)

    def call(self, method: str, path: str, document: Any = None) -> Any:
        """Ask with JSON; the answer, decoded. Raises LoadError unless the status is 2xx."""
        body = b"" if document is None else msgspec.json.encode(document)
        return msgspec.json.decode(self.demand(http_request(method, path, body)))

    def _receive(self) -> bytes:
        data = self._socket.recv(1 << 18)
        if not data:
            raise LoadError("the server closed the connection")
        return data


def _accepted(status: int, body: bytes) -> bytes:
    if not 200 <= status < 300:
        raise LoadError(f"a request was answered {status}: {body[:500]!r}")
    return body


def start_together() -> float:
    """A moment soon, on CLOCK_MONOTONIC."""
    return time.monotonic() + START_AFTER_S


def wait_for(moment: float) -> None:
    """Until that moment on CLOCK_MONOTONIC."""
    time.sleep(max(0.0, moment - time.monotonic()))


def ask_each(port: int, method: str, message_ids: Iterable[str]) -> list[float]:
    """Call each message by its id, one after the other; how long each took, in ms."""
    latency_ms = []
    with LoadConnection(port) as connection:
        for message_id in message_ids:
            request = http_request(method, f"/v1/messages/{message_id}")
            begun_at = time.monotonic()
            connection.demand(request)
            latency_ms.append((time.monotonic() - begun_at) * 1000)
    return latency_ms


# ---- batches -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BatchRequests:
    """Requests that publish batches."""

    requests: list[bytes]
    messages: int
    """In each of them."""
    keyed: bool = False
    """Each request is a template, with a KEY in every message: its key, as a number."""

    def request(self, number: int, first_key: int) -> bytes:
        """The request that is sent as the one with this number, from 0."""
        template = self.requests[number % len(self.requests)]
        if not self.keyed:
            return template
        first = first_key + number * self.messages
        return template % tuple(range(first, first + self.messages))


KEY = "%012d"
"""Stands where the key of a message is to be."""


def make_batches(
    subject: str,
    dues_ms: Iterable[int],
    body: dict[str, Any],
    size: int,
    content_type: str = JSON,
    *,
    keyed: bool = False,
) -> BatchRequests:
    """Batches of `size` messages, one message for each due time; `size` divides their number."""
    messages = [{"subject": subject, "body": body, "deliver_at": due_ms} for due_ms in dues_ms]
    if keyed:
        messages = [{**message, "key": KEY % 0} for message in messages]
    assert len(messages) % size == 0, (len(messages), size)
    assert not keyed or content_type != MSGPACK, content_type
    encoders: dict[str, Callable[[Any], bytes]] = {
        JSON: msgspec.json.encode,
        MSGPACK: msgspec.msgpack.encode,
        ARROW: arrow_stream,
    }
    encode = encoders[content_type]
    path = "/v1/messages/batch"
    requests = [
        http_request("POST", path, encode(messages[at : at + size]), content_type)
        for at in range(0, len(messages), size)
    ]
    if keyed:
        # Put in now, since a template is shorter than what it makes, and the head has the length.
        requests = [
            request.replace(b"%", b"%%").replace((KEY % 0).encode(), KEY.encode())
            for request in requests
        ]
    return BatchRequests(requests, size, keyed)


def arrow_stream(messages: list[dict[str, Any]]) -> bytes:
    """Messages of one subject as a stream of Arrow, bodies as JSON text."""
    import pyarrow as pa

    columns = {name: [one[name] for one in messages] for name in messages[0]}
    columns["body"] = [msgspec.json.encode(body).decode() for body in columns["body"]]
    table = pa.table(columns)
    table = table.set_column(0, "subject", table["subject"].dictionary_encode())
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    data: bytes = sink.getvalue().to_pybytes()
    return data


@dataclass(frozen=True, slots=True)
class ConnectionResult:
    """What one connection sent, all of it answered."""

    messages: int
    began_at: float
    ended_at: float
    latency_ms: list[float]
    answers: list[bytes] = field(default_factory=list)
    """Their bodies, where they are kept."""
    refused: int = 0
    """How often a patient connection was answered 503."""


def publish_batches(
    port: int,
    batches: BatchRequests,
    start_at: float,
    *,
    requests_max: float = float("inf"),
    seconds_max: float = float("inf"),
    interval_s: float = 0.0,
    first_key: int = 0,
    in_flight: int = 1,
    is_patient: bool = False,
    keep_answers: bool = False,
) -> ConnectionResult:
    """Send the requests in turn, over and over: so many, or so long.

    With an interval they are paced, and latency counts from when a request was to be sent. Keys
    count up from `first_key`. With several in flight each has a connection of its own, and they are
    waited for in turn: groups of them are answered together. Patient connections send what was
    answered 503 again, and its latency goes on."""
    latency_ms: list[float] = []
    answers: list[bytes] = []
    waiting: deque[tuple[LoadConnection, float, bytes]] = deque()
    with ExitStack() as stack:
        connections = [stack.enter_context(LoadConnection(port)) for _ in range(in_flight)]
        free = list(connections)
        wait_for(start_at)
        began_at = ended_at = time.monotonic()
        sent = 0
        while True:
            while free and sent < requests_max and ended_at - began_at < seconds_max:
                turn_at = time.monotonic()
                if interval_s:
                    turn_at = began_at + sent * interval_s
                    wait_for(turn_at)
                connection = free.pop()
                request = batches.request(sent, first_key)
                connection.send(request)
                waiting.append((connection, turn_at, request))
                sent += 1
            if not waiting:
                break
            connection, turn_at, request = waiting.popleft()
            answer = connection.receive_patiently(request) if is_patient else connection.receive()
            free.append(connection)
            ended_at = time.monotonic()
            latency_ms.append((ended_at - turn_at) * 1000)
            if keep_answers:
                answers.append(answer)
    return ConnectionResult(
        len(latency_ms) * batches.messages,
        began_at,
        ended_at,
        latency_ms,
        answers,
        sum(connection.refused for connection in connections),
    )
