"""Answers of GET: how long they took, and whether they are compressed."""

import asyncio
import gzip
import threading

import pytest

from delayserver.api.finish import COMPRESS_MIN_BYTES, INLINE_MAX_BYTES, Finish, accepts_gzip

JSON = [(b"content-type", b"application/json")]
LONG = b"0123456789" * 1000


def ask(body, *, method="GET", accept=b"gzip", headers=JSON, more=False, took_s=0.0):
    """The answer as it leaves: headers, and the messages of its body."""
    sent = []

    async def app(scope, receive, send):
        await asyncio.sleep(took_s)
        length = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": [*headers, *length]})
        await send({"type": "http.response.body", "body": body, "more_body": more})
        if more:
            await send({"type": "http.response.body", "body": b"end"})

    async def receive():
        raise AssertionError("nobody reads a body")

    async def send(message):
        sent.append(message)

    asked = [(b"accept-encoding", accept)] if accept else []
    scope = {"type": "http", "method": method, "headers": asked}
    asyncio.run(Finish(app)(scope, receive, send))
    start, *bodies = sent
    assert len(dict(start["headers"])) == len(start["headers"])
    return dict(start["headers"]), bodies


def test_a_long_answer_is_compressed_for_who_takes_that():
    headers, (body,) = ask(LONG)
    assert gzip.decompress(body["body"]) == LONG
    assert headers[b"content-encoding"] == b"gzip"
    assert headers[b"content-length"] == b"%d" % len(body["body"])
    assert headers[b"vary"] == b"accept-encoding"
    assert len(body["body"]) < len(LONG) / 10


def test_who_does_not_take_it_gets_it_as_it_is_and_caches_are_told():
    headers, (body,) = ask(LONG, accept=b"")
    assert body["body"] == LONG
    assert b"content-encoding" not in headers
    assert headers[b"vary"] == b"accept-encoding"
    assert headers[b"content-length"] == b"%d" % len(LONG)


@pytest.mark.parametrize(
    ("body", "others"),
    [
        (LONG[: COMPRESS_MIN_BYTES - 1], {}),
        (LONG, {"headers": [(b"content-type", b"application/octet-stream")]}),
        (LONG, {"headers": [*JSON, (b"etag", b'"7"')]}),
        (LONG, {"headers": [*JSON, (b"content-encoding", b"br")]}),
        (LONG, {"more": True}),
    ],
    ids=["short", "of another type", "a version", "encoded", "in parts"],
)
def test_what_stays_as_it_is(body, others):
    headers, bodies = ask(body, **others)
    assert bodies[0]["body"] == body
    assert headers.get(b"content-encoding") in (None, b"br")
    assert headers[b"content-length"] == b"%d" % len(body)
    assert headers[b"server-timing"].startswith(b"app;dur=")
    assert len(bodies) == 1 + others.get("more", False)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_what_is_no_get_is_left_alone(method):
    headers, (body,) = ask(LONG, method=method)
    assert body["body"] == LONG
    assert set(headers) == {b"content-type", b"content-length"}


def test_it_says_how_long_the_answer_took():
    headers, _ = ask(b"{}", took_s=0.01)
    name, _, duration = headers[b"server-timing"].partition(b";dur=")
    assert name == b"app"
    assert 9 < float(duration) < 5000
    assert b", gzip;dur=" in ask(LONG)[0][b"server-timing"]


def test_the_event_loop_does_not_compress_what_is_very_long(monkeypatch):
    threads = []

    def compress(body, level, *, mtime):
        threads.append(threading.current_thread())
        return b"packed"

    monkeypatch.setattr("delayserver.api.finish.gzip.compress", compress)
    ask(b"x" * INLINE_MAX_BYTES)
    ask(b"x" * (INLINE_MAX_BYTES + 1))
    assert [one is threading.main_thread() for one in threads] == [True, False]


def test_vary_keeps_what_it_said():
    assert (
        ask(LONG, headers=[*JSON, (b"vary", b"Origin")])[0][b"vary"] == b"Origin, accept-encoding"
    )
    said = ask(LONG, headers=[*JSON, (b"vary", b"Accept-Encoding")])[0]
    assert said[b"vary"] == b"Accept-Encoding"


@pytest.mark.parametrize(
    ("value", "takes"),
    [
        (b"", False),
        (b"gzip", True),
        (b"br, GZIP;q=0.5", True),
        (b"gzip;q=0", False),
        (b"gzip; q=0.000, *", False),
        (b"*", True),
        (b"*;q=0", False),
        (b"identity", False),
        (b"gzipped", False),
        (b"gzip;q=0.01", True),
    ],
)
def test_who_takes_gzip(value, takes):
    assert accepts_gzip([(b"accept-encoding", value)]) is takes
