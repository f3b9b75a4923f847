"""A process that owns its shard for as long as it lives: all shards are on this machine.

    alone        ──▶ no supervisor speaks, and none is told anything
    of several   ──▶ standard input ends with the supervisor; standard output tells it how far it is

It answers the same questions as an owner in a cluster (`delayserver.serve.owner`), which may have
to give its shard away.

Cost: none. Threads: belongs to the event loop.
"""

import socket
from collections.abc import Callable, Sequence
from typing import Final

from delayserver.api.hot.asgi import Asgi
from delayserver.cluster.membership import Lines
from delayserver.recovery.store import Surroundings
from delayserver.server.server import Server
from delayserver.shards.book import OwnerBook
from delayserver.shards.map import Machines
from delayserver.shards.meeting import UnixMeeting
from delayserver.shards.place import ShardPlace

STANDARD_INPUT: Final = 0


class FixedOwner:
    """The owner of a shard outside of a cluster."""

    book = None
    epoch = 0

    def __init__(self, place: ShardPlace) -> None:
        self.place = place
        self.meeting = UnixMeeting(place.sockets)

    def around(self, surroundings: Surroundings) -> Surroundings:
        """The surroundings of the server: its own."""
        return surroundings

    def sharing(self, server: Server) -> Callable[[Asgi], Asgi]:
        """Returns a function that leaves an application as it is: no node comes for copies."""
        return lambda app: app

    def machines(self) -> Machines:
        """There is one machine, which needs no name."""
        return Machines()

    def lend(self, listeners: Sequence[socket.socket]) -> list[socket.socket]:
        """The sockets that end with the server: all."""
        return [*listeners]

    def serving(
        self, server: Server, on_gone: Callable[[], None], on_news: Callable[[], None]
    ) -> None:
        """The server serves from now on: `on_gone` is called when the supervisor has ended."""
        if not self.place.is_alone:
            book = OwnerBook(self.place.count)
            Lines(STANDARD_INPUT, b"", book).begin(on_gone, on_news)

    def end(self) -> None:
        """The process ends, and hears nothing more."""

    def successor(self, *, is_damaged: bool = False, is_slow: bool = False) -> None:
        """Returns None: no other process is to have the shard."""

    def leave(self, successor: str | None) -> None:
        """The office stays with the directory."""
