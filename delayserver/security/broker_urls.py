"""URLs of brokers: `scheme://[user[:password]@]host[:port][/path]`, and nothing else.

There is one parser, as for webhooks (`delayserver.security.targets`). The server connects to the
parts that it returns, and a client library gets these parts and never the URL. So no client reads
an option out of the URL (there is no query), and no client connects to another host than the one
that the allow list checked.

The password stands in the definition of its subscription, as secrets of webhooks do. `masked` is
the form that every answer shows.

Cost: 3 µs. Threads: pure functions and values.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final
from urllib.parse import unquote

from delayserver.errors import InputError
from delayserver.security.targets import URL_CHARACTERS_MAX, Target, split_url
from delayserver.wire.fields import MASK

_URL: Final = re.compile(
    r"(?P<scheme>[a-z]+)://"
    r"(?:(?P<user>[\w.~!$&'()*+,;=%-]*)(?::(?P<password>[\w.~!$&'()*+,;=%-]*))?@)?"
    r"(?P<authority>[^\s/?#@]+)(?P<path>/[\w.~!$&'()*+,;=%:/-]*)?",
    re.ASCII,
)
_ESCAPES: Final = re.compile(r"(?:[^%]|%[0-9A-Fa-f]{2})*")


@dataclass(frozen=True, slots=True)
class BrokerUrl:
    """The parts of a URL, decoded."""

    target: Target
    user: str
    password: str
    path: str
    """The part behind the host, as it was written, with its slash; empty: none."""


def split_broker_url(url: str, ports: Mapping[str, int]) -> BrokerUrl:
    """The parts of a URL with one of these schemes; `ports`: where each is served by default.

    Raises InputError at `/url`."""
    match = _URL.fullmatch(url) if len(url) <= URL_CHARACTERS_MAX and url.isascii() else None
    example = f"{next(iter(ports))}://[user:password@]host[:port]"
    if match is None or match["scheme"] not in ports or not _ESCAPES.fullmatch(url):
        raise InputError(
            f"a URL here is {example}, with {' or '.join(ports)} in front, without a query, at "
            f"most {URL_CHARACTERS_MAX} characters; percent-encode what else is in a password",
            "/url",
        )
    if match["password"] == MASK:
        raise InputError(f"{MASK} stands for a password in answers; write the password", "/url")
    try:
        target, _ = split_url(f"http://{match['authority']}")
    except InputError:
        raise InputError(f"its host and port cannot be read; write {example}", "/url") from None
    scheme = match["scheme"]
    has_port = match["authority"].rpartition(":")[2].isdigit()
    port = target.port if has_port else ports[scheme]
    return BrokerUrl(
        replace(target, scheme=scheme, port=port),
        unquote(match["user"] or ""),
        unquote(match["password"] or ""),
        match["path"] or "",
    )


def masked(url: str) -> str:
    """A URL that was accepted, without its password."""
    match = _URL.fullmatch(url)
    assert match is not None
    if match["password"] is None:
        return url
    start, end = match.span("password")
    return f"{url[:start]}{MASK}{url[end:]}"
