"""The map: which shards there are and where each is asked, as one process knows it.

    links ──▶ who is there, and at which port ──▶ version ──▶ GET /v1/cluster, at once
                                              └─▶ changed ──▶ … or when it is another one

The version is a checksum of what the map says of shards, states and ports. So all processes that
see the same have the same version, whoever of them is asked, and nobody has to count or to keep
anything; versions are compared for being another one, and have no order. The addresses that a
document shows are those ports on the host that its request named, which is how this client reaches
this machine.

A server alone is one shard, which is asked where it was asked: its version never changes.

Cost: 3 µs and 1 µs for each shard; a future for each long poll. Threads: belongs to the event loop.
"""

import asyncio
import contextlib
import zlib
from collections.abc import Callable

from delayserver.api.cluster.link import Links
from delayserver.api.documents import ClusterDocument, NodeDocument, ShardDocument
from delayserver.config import Settings
from delayserver.times import format_time

NODE = "local"
"""This machine, which has all shards."""


class ClusterMap:
    """The map of one process. `links`: None of a server alone."""

    def __init__(self, links: Links | None, settings: Settings, clock: Callable[[], int]) -> None:
        """`clock`: milliseconds since the epoch."""
        self._links = links
        self._clock = clock
        self._scheme = "http" if settings.tls_cert is None else "https"
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        self._host = f"{host}:{settings.port}"
        self._changed = asyncio.Event()
        self._has_ended = False
        if links is not None:
            links.on_change(self._change)

    @property
    def version(self) -> int:
        """A checksum of 32 bits."""
        return zlib.crc32(repr(self._ports()).encode())

    def document(self, host: str) -> ClusterDocument:
        """The map for a client that named this machine by the header `Host` (or not at all)."""
        host = host or self._host
        here = f"{self._scheme}://{host}"
        shards = [
            ShardDocument(
                shard,
                NODE,
                0,
                here if self._links is None else self._links.url(shard, host),
                [],
                "away" if port is None else "serving",
            )
            for shard, port in enumerate(self._ports())
        ]
        node = NodeDocument(NODE, here, "serving", format_time(self._clock()))
        return ClusterDocument(self.version, shards, [node])

    async def other_than(self, version: int, wait_s: float) -> None:
        """Until the version is another one, or the server stops; at most so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while self.version == version and not self._has_ended:
                    await self._changed.wait()

    def end(self) -> None:
        """Nobody waits any more: the server stops."""
        self._has_ended = True
        self._changed.set()

    def _change(self, shard: int, is_there: bool) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _ports(self) -> list[int | None]:
        """Of each shard; 0: that at which the server was asked, None: it is away."""
        links = self._links
        return [0] if links is None else [links.ports.get(shard) for shard in range(links.count)]
