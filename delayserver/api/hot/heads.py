"""The head of a request, read into a struct, if it is as plain as those of clients are.

    bytes of a head ──▶ the same as one before? ──yes──▶ the same Head as then
                    ──▶ httptools ──▶ Head, or None: it goes uvicorn's way

Clients send the same few heads again and again, so the last ones are remembered by their bytes. A
call with an address of its own is remembered by the bytes behind its first line.

Cost: 0.6 µs for a head that is remembered, 14 µs for one with an address of its own, 20 µs for
another. Threads: belongs to the event loop.
"""

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import unquote

import httptools

from delayserver.api.hot.answers import header
from delayserver.api.hot.paths import (
    BATCH_PATH,
    HEARTBEATS_PATH,
    MESSAGE_PATH,
    MESSAGES_PATH,
    NO_FORWARD,
    ConsumerCall,
    is_cancel,
    is_hot,
    is_long,
    is_packed,
    parse_call,
)
from delayserver.records.tracecontext import Trace, trace_of

HEADS_KEPT = 1024

OF_ONE = (b"PUT " + HEARTBEATS_PATH.encode(), b"DELETE /v1/")
"""How calls begin of which each has an address of its own."""
_NOT_PLAIN = {b"content-encoding", NO_FORWARD[0]}
_PLACES = {b"PUT": HEARTBEATS_PATH.encode() + b"x", b"DELETE": MESSAGE_PATH.encode() + b"x"}
_REQUEST_LINE = re.compile(
    rb"(?P<method>PUT|DELETE) (?P<target>/[A-Za-z0-9%/:@!$&'()*+,;=._~-]+) HTTP/1\.1\r\n"
)
"""One that every parser reads in the same way."""


class Head(NamedTuple):
    """The head of a request that is served here."""

    path: str
    length: int
    """The length of the body, in bytes."""
    headers: list[tuple[bytes, bytes]]
    content_type: bytes
    keep_alive: bool
    trace: Trace | None
    is_cancel: bool = False
    is_long: bool = False
    """Whether it is that of a call for many messages."""
    may_gather: bool = False
    """Whether it is that of a publish as most clients send it, which may be gathered."""
    data: bytes = b""
    """If so, all of it, as it came; of a cancel that may be gathered all behind its address."""
    may_gather_cancel: bool = False
    """Whether it is that of a cancel of one message, whatever its version, without a body."""
    call: ConsumerCall | None = None
    """The call, if it is a consumer's."""


@lru_cache(maxsize=HEADS_KEPT)
def read_head(data: bytes) -> Head | None:
    """Read a head, which ends with an empty line; None: it goes uvicorn's way."""
    return _HeadParser().read(data)


def read_head_of_one(data: bytes) -> Head | None:
    """Read the head of a call with an address of its own; None: it goes uvicorn's way.

    Only the bytes behind the first line repeat, so these are remembered."""
    line = _REQUEST_LINE.match(data)
    if line is None:
        return read_head.__wrapped__(data)
    path = _plain_path(line["target"])
    method = line["method"]
    if path is None or not is_hot(method.decode(), path):
        return None
    rest = data[line.end("target") :]
    # A version is another one each time, too.
    read = read_head.__wrapped__ if b"if-match:" in rest.lower() else read_head
    head = read(b"%b %b%b" % (method, _PLACES[method], rest))
    if head is None:
        return None
    return head._replace(path=path, data=rest if head.may_gather_cancel else b"")


class _HeadParser:
    """Callbacks of httptools for one head."""

    _parser: httptools.HttpRequestParser

    def __init__(self) -> None:
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._heads = self._bodies = 0
        self._keep_alive = False

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._heads += 1
        # Once the whole request is read, which may be at once, the parser has forgotten it.
        self._keep_alive = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self._bodies += 1

    def read(self, data: bytes) -> Head | None:
        """Parse the head of one request; None if the hot protocol must not answer it."""
        parser = self._parser = httptools.HttpRequestParser(self)
        try:
            parser.feed_data(data)
        except httptools.HttpParserError:
            return None
        except httptools.HttpParserUpgrade as offer:
            line = parser.get_method(), self._url, parser.get_http_version()
            if offer.args[0] != len(data) or line[0] == b"CONNECT":
                return None
            head = _HeadParser().read(head_without_upgrade(*line, self._headers))
            return head and head._replace(data=data if head.may_gather else b"")
        finally:
            del self._parser  # it knows this object
        path = _plain_path(self._url)
        method = parser.get_method().decode()
        # An empty line that only some take for one must not hide a second request.
        is_one = self._heads == 1 and not self._bodies
        if path is None or not is_one or not is_hot(method, path):
            return None
        if parser.get_http_version() != "1.1" or header(self._headers, b"expect"):
            return None
        content_type = header(self._headers, b"content-type")
        if path == BATCH_PATH and is_packed(content_type):
            return None
        length = header(self._headers, b"content-length")
        if not length and method == "DELETE":
            length = b"0"
        if not length.isdigit() or header(self._headers, b"transfer-encoding"):
            return None
        names = [name for name, _ in self._headers]
        if names.count(b"host") != 1 or not _NOT_PLAIN.isdisjoint(names):
            return None
        keep_alive, trace = self._keep_alive, trace_of(self._headers)
        may_gather = path == MESSAGES_PATH and keep_alive and trace is None
        may_gather_cancel = (
            method == "DELETE" and keep_alive and length == b"0" and b"if-match" not in names
        )
        return Head(
            path,
            int(length),
            self._headers,
            content_type,
            keep_alive,
            trace,
            is_cancel(method, path),
            is_long(method, path),
            may_gather,
            data if may_gather else b"",
            may_gather_cancel,
            parse_call(method, path),
        )


def head_without_upgrade(
    method: bytes, target: bytes, version: str, headers: Iterable[tuple[bytes, bytes]]
) -> bytes:
    """A head again, without the offer to go on with another protocol: it is never taken."""
    lines = [b"%b: %b\r\n" % header for header in headers if header[0] != b"upgrade"]
    return b"%b %b HTTP/%b\r\n%b\r\n" % (method, target, version.encode(), b"".join(lines))


def _plain_path(url: bytes) -> str | None:
    """The path of a URL that is nothing but a path, without its escapes; None if it is another one,
    or not UTF-8, which is refused elsewhere."""
    if b"?" in url or b"#" in url or not url.isascii():
        return None
    path = url.decode()
    try:
        return unquote(path, errors="strict") if "%" in path else path
    except UnicodeDecodeError:
        return None
