"""Heads that are read without ASGI: what is remembered of one must not show in another."""

import pytest

from delayserver.api.hot.heads import Head, read_head, read_head_of_one

REST = b"host: 127.0.0.1\r\nauthorization: Bearer a\r\n"
ID = b"0" * 36


def head(line: bytes, rest: bytes = REST) -> bytes:
    return line + b"\r\n" + rest + b"\r\n"


@pytest.mark.parametrize(
    ("line", "path"),
    [
        (b"DELETE /v1/messages/" + ID + b" HTTP/1.1", "/v1/messages/" + "0" * 36),
        (b"DELETE /v1/subjects/a/keys/b HTTP/1.1", "/v1/subjects/a/keys/b"),
        (b"DELETE /v1/subjects/a/keys/%C3%A9%2Fb/c HTTP/1.1", "/v1/subjects/a/keys/é/b/c"),
        (b"DELETE /v1/subjects/a/keys/ HTTP/1.1", "/v1/subjects/a/keys/"),
    ],
)
def test_a_cancel_is_served_here(line: bytes, path: str) -> None:
    found = read_head_of_one(head(line))
    assert found is not None
    assert (found.path, found.length, found.is_cancel, found.keep_alive) == (path, 0, True, True)
    assert found._replace(data=b"") == read_head.__wrapped__(head(line))


LINES = (
    b"DELETE /v1/messages/a HTTP/1.1",
    b"DELETE /v1/messages/a HTTP/1.0",
    b"DELETE /v1/messages/a?b HTTP/1.1",
    b"DELETE /v1/messages/a%3Fb HTTP/1.1",
    b"DELETE /v1/messages/a/b HTTP/1.1",
    b"DELETE /v1/messages/ HTTP/1.1",
    b"DELETE  /v1/messages/a HTTP/1.1",
    b"DELETE /v1/messages/a  HTTP/1.1",
    b"DELETE /v1/messages/a b HTTP/1.1",
    b'DELETE /v1/messages/a"<b HTTP/1.1',
    b"DELETE /v1/messages/a\xff HTTP/1.1",
    b"DELETE /v1/messages/a HTTP/1.1\r",
    b"DELETE /v1/messages/a\r\nx: y\r\n\r\nGET / HTTP/1.1",
    b"DELETE http://b/v1/messages/a HTTP/1.1",
    b"DELETE /v1/subscriptions/a HTTP/1.1",
    b"DELETE /v1/heartbeats/a HTTP/1.1",
    b"PUT /v1/heartbeats/a HTTP/1.1",
    b"PUT /v1/heartbeats/a?b HTTP/1.1",
    b"PUT /v1/messages/a HTTP/1.1",
)
RESTS = (
    b"",
    REST,
    b"content-length: 7\r\n",
    b"Content-Length: 0\r\nConnection: close\r\n",
    b"content-length: x\r\n",
    b"transfer-encoding: chunked\r\n",
    b"content-length: 1\r\ntransfer-encoding: chunked\r\n",
    b"expect: 100-continue\r\n",
    b"upgrade: websocket\r\nconnection: upgrade\r\n",
    REST + b"Upgrade: h2c\r\nConnection: Upgrade\r\ncontent-length: 0\r\n",
    REST + REST,
    REST + b"content-encoding: gzip\r\n",
    b'if-match: "1"\r\n',
    b"no colon\r\n",
    b" folded: x\r\n",
    b"x: \x00\r\n",
    b"\n",
)


@pytest.mark.parametrize("rest", RESTS)
@pytest.mark.parametrize("line", LINES)
def test_it_reads_as_the_parser_does(line: bytes, rest: bytes) -> None:
    data = head(line, rest)
    read: list[Head | None] = [read_head_of_one(data) for _ in range(2)]
    # What it is remembered by aside.
    read = [one and one._replace(data=b"") for one in read]
    assert read == [read_head.__wrapped__(data)] * 2


@pytest.mark.parametrize(
    "line", [b"DELETE /v1/messages/a", b"DELETE /v1/subjects/a/keys/b", b"POST /v1/messages/cancel"]
)
def test_a_head_without_a_body_says_whether_the_connection_ends(line: bytes) -> None:
    for fields, keep_alive in (b"", True), (b"connection: close\r\n", False):
        found = read_head(head(line + b" HTTP/1.1", b"host: a\r\ncontent-length: 0\r\n" + fields))
        assert found is not None
        assert found.keep_alive is keep_alive


def test_neither_the_first_line_nor_a_version_is_remembered() -> None:
    before = read_head.cache_info().currsize
    for number in range(100):
        for rest in (b"x: y\r\n", b'If-Match: "%d"\r\n' % number):
            line = b"DELETE /v1/messages/%d HTTP/1.1" % number
            found = read_head_of_one(head(line, REST + rest))
            assert found is not None
            assert found.path == f"/v1/messages/{number}"
    assert read_head.cache_info().currsize <= before + 1


@pytest.mark.parametrize("line", [b"POST /v1/messages", b"DELETE /v1/messages/a"])
@pytest.mark.parametrize(
    ("fields", "is_served"),
    [
        (b"host: a\r\n", True),
        (b"", False),
        (b"host: a\r\nhost: a\r\n", False),
        (b"host: a\r\ncontent-encoding: gzip\r\n", False),
        (b"host: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n", True),
        (b"host: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nhost: b\r\n", False),
    ],
)
def test_a_head_with_one_host_and_a_body_as_it_is(
    line: bytes, fields: bytes, is_served: bool
) -> None:
    data = head(line + b" HTTP/1.1", b"content-length: 0\r\n" + fields)
    for read in (read_head, read_head_of_one):
        found = read(data)
        assert (found is not None) is is_served
        if found is not None:
            assert all(name != b"upgrade" for name, _ in found.headers)


def test_an_offer_is_ignored_and_nothing_else_of_a_head() -> None:
    plain = head(b"POST /v1/messages HTTP/1.1", REST + b"content-length: 2\r\n")
    offer = plain[:-2] + b"Upgrade: h2c\r\nConnection: Upgrade\r\n\r\n"
    found, expected = read_head(offer), read_head(plain)
    assert found is not None
    assert expected is not None
    assert found.data == offer  # by which it is known the next time
    connection = [(b"connection", b"Upgrade")]
    assert found == expected._replace(headers=[*expected.headers, *connection], data=offer)
