"""URLs of brokers: what is read out of them, what is refused, what is shown."""

import pytest

from delayserver.errors import InputError
from delayserver.security.broker_urls import masked, split_broker_url

PORTS = {"redis": 6379, "rediss": 6380}


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("redis://a.test", ("redis", "a.test", 6379, "", "", "")),
        ("rediss://A.test:1/2", ("rediss", "a.test", 1, "", "", "/2")),
        ("rediss://a.test", ("rediss", "a.test", 6380, "", "", "")),
        ("redis://u:p%40%2F%3A@[::1]:7/", ("redis", "::1", 7, "u", "p@/:", "/")),
        ("redis://:only@10.0.0.1", ("redis", "10.0.0.1", 6379, "", "only", "")),
        ("redis://u@[::1]", ("redis", "::1", 6379, "u", "", "")),
        ("redis://a.test:80", ("redis", "a.test", 80, "", "", "")),
    ],
)
def test_a_url_is_split(url: str, parts: tuple[object, ...]) -> None:
    found = split_broker_url(url, PORTS)
    target = found.target
    assert (
        *(target.scheme, target.host, target.port),
        *(found.user, found.password, found.path),
    ) == parts


@pytest.mark.parametrize(
    "url",
    [
        *("", "redis", "redis://", "http://a.test", "REDIS://a.test", "redis:/a.test"),
        *("redis://a.test?db=1", "redis://a.test#x", "redis://u:p@a.test@b.test", "redis://a b"),
        *("redis://u:p:q@a.test", "redis://u:%zz@a.test", "redis://a.test:0", "redis://127.1"),
        *("redis://ü@a.test", "redis://u:***@a.test", "redis://a.test\\@b", "redis://a,b"),
        *("redis://a.test/x@b", "redis://" + "a" * 3000),
    ],
)
def test_what_is_refused(url: str) -> None:
    with pytest.raises(InputError) as caught:
        split_broker_url(url, PORTS)
    assert caught.value.pointer == "/url"
    assert "%zz" not in caught.value.detail


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://a.test:1/2", "redis://a.test:1/2"),
        ("redis://u@a.test", "redis://u@a.test"),
        ("redis://u:p%40@a.test:1/2", "redis://u:***@a.test:1/2"),
        ("redis://:a@a", "redis://:***@a"),
        ("redis://a:@a", "redis://a:***@a"),
    ],
)
def test_what_is_shown(url: str, shown: str) -> None:
    split_broker_url(url, PORTS)
    assert masked(url) == shown
