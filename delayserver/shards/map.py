"""The map: which shards there are and where each is asked, as one process knows it.

    links ──▶ who is there, and at which port ──▶ version ──▶ GET /v1/cluster, at once
    book  ──▶ owners and addresses        └─▶ changed ──▶ … or when it is another one

The version is a checksum of the map's shards, owners, states and addresses. So all processes with
the same map have the same version, and no process has to count or keep anything. Versions are
compared for equality only; they have no order. The lag of a replica and the moment at which a node
was last seen change all the time, so they are not part of it.

In a cluster the addresses are those in the book. On one machine they are the ports of the shards on
the host that the request named, which is how this client reaches this machine.

A server alone is the only shard of one, which is asked where it was asked: its version never
changes.

Cost: 3 µs and 1 µs for each shard; a future for each long poll. Threads: belongs to the event loop.
"""

import asyncio
import contextlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from delayserver.config import Settings
from delayserver.shards.book import OwnerBook, ShardOwner
from delayserver.shards.link import Links
from delayserver.times import format_time
from delayserver.wire.operations import (
    ClusterDocument,
    NodeDocument,
    ReplicaDocument,
    ShardDocument,
)

NODE = "local"
"""This machine, which has all shards."""


class Machines(NamedTuple):
    """A cluster process's knowledge of the machines."""

    nodes: Sequence[NodeDocument] = ()
    replicas: Mapping[int, Sequence[ReplicaDocument]] = {}
    """The replicas of each shard, without its owner."""


class ClusterMap:
    """The map of one process. `links`: None of a process on standby."""

    def __init__(
        self,
        links: Links | None,
        settings: Settings,
        clock: Callable[[], int],
        machines: Callable[[], Machines] = Machines,
        book: OwnerBook | None = None,
    ) -> None:
        """`clock`: milliseconds since the epoch. In a cluster: `machines` returns the present
        knowledge of them, and `book` has the owners if there are no links that have it."""
        self._links = links
        self._book = book if links is None else links.book
        self._machines = machines
        self._clock = clock
        self._scheme = "http" if settings.tls_cert is None else "https"
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        self._host = f"{host}:{settings.port}"
        self._changed = asyncio.Event()
        self._has_ended = False
        if links is not None:
            links.on_change(lambda shard, is_there: self.changed())
        if self._book is not None:
            self._book.on_change(lambda shard: self.changed())

    @property
    def version(self) -> int:
        """A checksum of 32 bits."""
        return zlib.crc32(repr(self._content()).encode())

    def document(self, host: str) -> ClusterDocument:
        """The map for a client that named this machine by the header `Host` (or not at all)."""
        if self._book is not None:
            nodes, replicas = self._machines()
            owned = [
                _owned(shard, self._book.owner(shard), entry.epoch, replicas.get(shard, ()))
                for shard, entry in enumerate(self._book.entries)
            ]
            return ClusterDocument(self.version, owned, list(nodes))
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
        """The server stops: end all waits."""
        self._has_ended = True
        self._changed.set()

    def changed(self) -> None:
        """Have those who wait look whether the version is another one."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _content(self) -> object:
        """The data whose change a client has to hear of."""
        if self._book is None:
            return self._ports()
        nodes = [(one.node, one.url, one.state) for one in self._machines().nodes]
        return self._book.entries, sorted(nodes)

    def _ports(self) -> list[int | None]:
        """The port of each shard; 0: the port at which the server was asked, None: it is away."""
        links = self._links
        return [0] if links is None else [links.ports.get(shard) for shard in range(links.count)]


def _owned(
    shard: int, owner: ShardOwner | None, epoch: int, replicas: Sequence[ReplicaDocument]
) -> ShardDocument:
    if owner is None:
        return ShardDocument(shard, None, epoch, None, list(replicas), "away")
    return ShardDocument(shard, owner.node, epoch, owner.url, list(replicas), "serving")
