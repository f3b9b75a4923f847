"""Who may call."""

import asyncio

import pytest

from delayserver.api.access import Access
from delayserver.errors import AccessError, HeadTooLargeError, MalformedError
from delayserver.security.tokens import TokenFile, TokenTable
from tests.world.storage.files import SimulatedFiles

TOKEN = "sixteen letters!"


async def nothing(scope, receive, send):
    """An application that is not asked."""


def make_access(token=TOKEN, **limits):
    tokens = TokenTable(TokenFile(SimulatedFiles("data")), token, lambda: 0.0)
    tokens.refresh(0)
    return Access(tokens, nothing, **{"headers_max": 3, "head_max_bytes": 50, **limits})


@pytest.mark.parametrize("value", ["Bearer " + TOKEN, "bearer  " + TOKEN, "BEARER " + TOKEN + " "])
def test_the_token_lets_in(value):
    caller = make_access().check([(b"authorization", value.encode())])
    assert caller is not None
    assert caller.is_admin


@pytest.mark.parametrize("value", ["", "Bearer", "Bearer ", TOKEN, f"Basic {TOKEN}"])
def test_without_a_token_one_is_asked_for(value):
    with pytest.raises(AccessError, match="Authorization: Bearer"):
        make_access().check([(b"authorization", value.encode())])


@pytest.mark.parametrize("value", [TOKEN[:-1], TOKEN + "x", TOKEN.upper(), "\xff"])
def test_another_token_does_not(value):
    with pytest.raises(AccessError, match="not valid") as caught:
        make_access().check([(b"authorization", f"Bearer {value}".encode("latin-1"))])
    assert not caught.value.authenticated


def test_the_token_is_not_kept():
    access = make_access()
    caller = access.check([(b"authorization", f"Bearer {TOKEN}".encode())])
    for part in (access, access.tokens, caller):
        assert TOKEN not in repr(vars(part))


@pytest.mark.parametrize("origin", [b"http://localhost", b"https://127.0.0.1:1", b"http://[::1]:2"])
def test_pages_of_this_machine_may_call(origin):
    assert make_access(None).check([(b"origin", origin)]) is None


@pytest.mark.parametrize(
    "origin", [b"null", b"http://a", b"http://[", b"\xff", b"//", b"localhost"]
)
def test_pages_of_elsewhere_may_not(origin):
    with pytest.raises(AccessError) as caught:
        make_access(None).check([(b"origin", origin)])
    assert caught.value.authenticated


def test_a_head_within_the_limits():
    make_access().check_head(b"/", [(b"host", b"1"), (b"b", b"2"), (b"c", b"3")], "1.1")
    make_access().check_head(b"x" * 39, [(b"host", b"def")], "1.1")
    make_access().check_head(b"x" * 40, [(b"abc", b"def")], "1.0")


def test_too_many_headers():
    with pytest.raises(HeadTooLargeError, match=r"more than 3 headers \(headers_max\)"):
        make_access().check_head(b"/", [(b"a", b"1")] * 4, "1.1")


@pytest.mark.parametrize(("target", "value"), [(b"x" * 40, b"defg"), (b"/", b"d" * 50)])
def test_a_head_that_is_too_long(target, value):
    with pytest.raises(HeadTooLargeError, match="head_max_bytes"):
        make_access().check_head(target, [(b"abc", value)], "1.1")


@pytest.mark.parametrize(("hosts", "version"), [(0, "1.1"), (2, "1.1"), (2, "1.0")])
def test_a_head_that_does_not_name_one_host(hosts, version):
    with pytest.raises(MalformedError, match=f"one header `Host`, and this one has {hosts}"):
        make_access().check_head(b"/", [(b"host", b"a")] * hosts, version)


def answer_of(access, **scope):
    """What is sent by this part of the application, or, without it, by the one behind."""
    sent = []

    async def send(message):
        sent.append(message)

    async def receive():
        raise AssertionError("the body is not needed")

    whole = {"type": "http", "method": "POST", "path": "/", "query_string": b"", **scope}
    asyncio.run(access({"http_version": "1.1", **whole}, receive, send))
    return sent


@pytest.mark.parametrize("coding", [b"gzip", b"GZIP", b"identity, br", b"\xff"])
def test_a_body_that_is_compressed_is_not_read(coding):
    headers = [(b"host", b"localhost"), (b"content-encoding", coding)]
    start, body = answer_of(make_access(None, head_max_bytes=1000), headers=headers)
    assert start["status"] == 415
    assert (b"accept-encoding", b"identity") in start["headers"]
    assert b"Content-Encoding" in body["body"]
    # Who it is is asked first.
    (start, _) = answer_of(make_access(head_max_bytes=1000), headers=headers)
    assert start["status"] == 401


@pytest.mark.parametrize("coding", [b"", b"identity", b" Identity "])
def test_a_body_that_is_not_is_read(coding):
    headers = [(b"host", b"localhost"), (b"content-encoding", coding)]
    assert answer_of(make_access(None, head_max_bytes=1000), headers=headers) == []


@pytest.mark.parametrize("token", [None, TOKEN])
def test_head_is_get_without_the_body_of_the_answer(token):
    async def echo(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": scope["headers"]})
        await send({"type": "http.response.body", "body": scope["method"].encode()})

    access = make_access(token, head_max_bytes=1000)
    access._app = echo
    headers = [(b"host", b"localhost")]
    whole = answer_of(access, method="GET", headers=headers)
    assert whole[0]["status"] == (200 if token is None else 401)
    assert whole[1]["body"]
    expected = [whole[0], {**whole[1], "body": b""}]
    assert answer_of(access, method="HEAD", headers=headers) == expected
