"""A request on its next hop: its body, and the headers that are not for one connection alone."""

from collections.abc import Iterable, MutableMapping
from typing import Any, Final

from delayserver.api.hot.answers import Headers
from delayserver.api.hot.asgi import Receive

KEPT_MAX_BYTES: Final = 64 * 1024
"""As much of a body is kept until its call is answered."""
LAST_CHUNK: Final = b"0\r\n\r\n"
_OF_HOP: Final = frozenset(
    {
        b"connection",
        b"expect",  # answered here: the body is asked for when it can be passed on
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
"""Headers that are meant for one connection (RFC 9110, 7.6.1)."""
_NOT_OF_HOP: Final = frozenset({b"content-length", b"host"})
"""… and those that are not, though `Connection` may name them: without its length, the end of a
body would be another one there than here."""


class CallBody:
    """The body of a call, part by part; again from its beginning as long as it is short."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._kept: list[MutableMapping[str, Any]] | None = []
        self._kept_bytes = 0
        self._next = 0

    async def receive(self) -> MutableMapping[str, Any]:
        """The next part, as ASGI has it."""
        if self._kept is None:
            return await self._receive()
        if self._next == len(self._kept):
            message = await self._receive()
            self._kept_bytes += len(message.get("body", b""))
            if self._kept_bytes > KEPT_MAX_BYTES and message.get("more_body", False):
                self._kept = None
                return message
            self._kept.append(message)
        self._next += 1
        return self._kept[self._next - 1]

    def rewind(self) -> bool:
        """Begin again; False: it cannot be."""
        self._next = 0
        return self._kept is not None


def beyond_hop(headers: Headers) -> Iterable[tuple[bytes, bytes]]:
    """Those that are not meant for one connection alone."""
    named: set[bytes] = set()
    for name, value in headers:
        if name == b"connection":
            named.update(one.strip().lower() for one in value.split(b","))
    leave_out = _OF_HOP | (named - _NOT_OF_HOP) if named else _OF_HOP
    return [field for field in headers if field[0] not in leave_out]


def chunk(body: bytes) -> bytes:
    """A part of a body that is sent in chunks; nothing where there is nothing."""
    return b"%x\r\n%b\r\n" % (len(body), body) if body else b""
