"""GET /v1/cluster: the map as a client gets it, whoever answers.

    after=VERSION ──▶ waits until it is another one, or `wait` has gone by, or the client is gone
                  ──▶ 304 to who names this version by `If-None-Match`, else the document, `ETag`

A server answers through FastAPI, which reads the parameters and describes them; a process on
standby has no FastAPI. Both answer here.

Cost: that of the map. Threads: belongs to the event loop.
"""

import asyncio
from collections.abc import Callable
from typing import Final, Protocol
from urllib.parse import parse_qsl

from delayserver.api.conditions import entity_tag, is_known
from delayserver.api.documents import encode
from delayserver.api.hot.answers import Answer
from delayserver.api.hot.asgi import Scope
from delayserver.api.hot.consume import WHEN_GONE
from delayserver.errors import InputError
from delayserver.times import format_duration, parse_duration_ms
from delayserver.wire.operations import ClusterDocument
from delayserver.wire.reading import pointer_to

WAIT: Final = "30s"
"""How long a long poll takes that does not say it."""
WAIT_MAX_MS: Final = 60_000


class ShardMap(Protocol):
    """The methods of a map that this call needs."""

    @property
    def version(self) -> int:
        """Another one whenever the map says something else."""

    def document(self, host: str) -> ClusterDocument:
        """The map for a client that named this machine by the header `Host`."""

    async def other_than(self, version: int, wait_s: float) -> None:
        """Until the version is another one; at most so long."""


async def answer_map(
    shard_map: ShardMap,
    scope: Scope,
    *,
    host: str,
    after: int | None,
    wait: str,
    if_none_match: str | None,
    on_wait: Callable[[Callable[[], object]], None] = lambda end: None,
) -> Answer:
    """Answer the call. Raises InputError. `on_wait` is given the function that ends a long poll."""
    wait_ms = parse_duration_ms(wait, "/query/wait")
    if wait_ms > WAIT_MAX_MS:
        raise InputError(f"wait is at most {format_duration(WAIT_MAX_MS)}", "/query/wait")
    if after is not None:
        waiting = asyncio.ensure_future(shard_map.other_than(after, wait_ms / 1000))
        on_wait(waiting.cancel)
        scope[WHEN_GONE](waiting.cancel)
        try:
            await asyncio.wait((waiting,))
        finally:
            waiting.cancel()
            scope[WHEN_GONE](None)
    document = shard_map.document(host)
    version = str(document.version)
    # Weak: the version leaves out other fields of the document, such as when a node was seen.
    fields = f"etag: W/{entity_tag(version)}\r\n".encode()
    if is_known(if_none_match, version):
        return Answer(304, b"", fields)
    return Answer(200, encode(document), fields)


def read_query(query: bytes) -> tuple[int | None, str]:
    """`after` and `wait` of a call that FastAPI does not read. Raises InputError."""
    after, wait = None, WAIT
    for name, value in parse_qsl(query.decode("latin-1"), keep_blank_values=True):
        if name == "after":
            if not (value.isascii() and value.isdigit()):
                raise InputError("after is a version, a whole number", pointer_to("query", name))
            after = int(value)
        elif name == "wait":
            wait = value
    return after, wait
