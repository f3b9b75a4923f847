"""Who may call."""

import pytest

from delayserver.api.access import Access
from delayserver.errors import AccessError

TOKEN = "sixteen letters!"


async def nothing(scope, receive, send):
    """An application that is not asked."""


@pytest.mark.parametrize("value", ["Bearer " + TOKEN, "bearer  " + TOKEN, "BEARER " + TOKEN + " "])
def test_the_token_lets_in(value):
    Access(TOKEN, nothing).check([(b"authorization", value.encode())])


@pytest.mark.parametrize("value", ["", "Bearer", "Bearer ", TOKEN, f"Basic {TOKEN}"])
def test_without_a_token_one_is_asked_for(value):
    with pytest.raises(AccessError, match="Authorization: Bearer"):
        Access(TOKEN, nothing).check([(b"authorization", value.encode())])


@pytest.mark.parametrize("value", [TOKEN[:-1], TOKEN + "x", TOKEN.upper(), "\xff"])
def test_another_token_does_not(value):
    with pytest.raises(AccessError, match="not valid") as caught:
        Access(TOKEN, nothing).check([(b"authorization", f"Bearer {value}".encode("latin-1"))])
    assert not caught.value.authenticated


def test_the_token_is_not_kept():
    assert TOKEN not in repr(vars(Access(TOKEN, nothing)))


@pytest.mark.parametrize("origin", [b"http://localhost", b"https://127.0.0.1:1", b"http://[::1]:2"])
def test_pages_of_this_machine_may_call(origin):
    Access(None, nothing).check([(b"origin", origin)])


@pytest.mark.parametrize(
    "origin", [b"null", b"http://a", b"http://[", b"\xff", b"//", b"localhost"]
)
def test_pages_of_elsewhere_may_not(origin):
    with pytest.raises(AccessError) as caught:
        Access(None, nothing).check([(b"origin", origin)])
    assert caught.value.authenticated
