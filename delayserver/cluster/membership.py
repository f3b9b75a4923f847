"""The facts that the processes of a node have of their cluster at the start, and exchange later.

    supervisor ── Membership ──▶ process of a shard      once, before anything else
    process ── ShardOwner │ Vacancy ──▶ supervisor ──▶ all processes of the node
    supervisor ── News ──▶ all processes of the node

A line is JSON. Each process learns from its own shard's log who owns that shard; the supervisor
hands it on, so that all of the node have the same book (`book`).

Cost: some µs a line. Threads: values; `Lines` belongs to the event loop.
"""

import asyncio
import os
from collections.abc import Callable
from typing import Any, Final

import msgspec

from delayserver.cluster.placement import Placement
from delayserver.cluster.watch import News
from delayserver.shards.book import Entry, OwnerBook, ShardOwner, Vacancy
from storage.directory import Identity
from storage.replicated.meta import ClusterIdentity

READ_BYTES: Final = 1 << 16


class Membership(msgspec.Struct, frozen=True):
    """A node's place in its cluster."""

    node: str
    number: int
    """From 1; others have others."""
    identity: ClusterIdentity
    placement: Placement = Placement()
    """As it was when this node came."""

    def of_shard(self, shard: int) -> Identity:
        """The identity of the directory of a shard."""
        return Identity(self.identity.stamps[shard], shard, bytes.fromhex(self.identity.id_secret))

    def to_document(self) -> Any:
        """As JSON values."""
        return msgspec.to_builtins(self)

    @classmethod
    def from_document(cls, document: Any) -> "Membership":
        """Reads the form that `to_document` wrote."""
        return msgspec.convert(document, cls)


class Address(msgspec.Struct, frozen=True):
    """The address of an owner, as its claim gives it."""

    node: str
    url: str
    link: str
    tunnels: bool = False
    """Whether calls may be passed on to it through `link`, sealed; older versions do not know."""

    def pack(self) -> str:
        """As the claim has it."""
        return msgspec.json.encode(self).decode()


def entry_of(shard: int, epoch: int, address: str) -> Entry:
    """The book's entry for a claim with this address; empty: the office is vacant, or its owner is
    not known."""
    if not address:
        return Vacancy(shard, epoch)
    try:
        found = msgspec.json.decode(address, type=Address)
        return ShardOwner(shard, epoch, found.node, found.url, found.link, found.tunnels)
    except (msgspec.DecodeError, ValueError):
        return Vacancy(shard, epoch)  # somebody who cannot be reached


Line = ShardOwner | Vacancy | News
_decode = msgspec.json.Decoder(Line).decode
_encode = msgspec.json.Encoder().encode


class Lines:
    """The lines of the supervisor, one by one, and its end."""

    def __init__(self, fd: int, rest: bytes, book: OwnerBook) -> None:
        """`rest`: bytes that were read already; their whole lines count at once."""
        self.news = News()
        """The supervisor's last view of the cluster."""
        self._fd = fd
        self._received = bytearray(rest)
        self.book = book
        """The book that the lines go into; the caller may put another one in its place."""
        self._on_gone: Callable[[], None] = lambda: None
        self._on_news: Callable[[], None] = lambda: None
        self._take()

    def begin(
        self, on_gone: Callable[[], None], on_news: Callable[[], None] = lambda: None
    ) -> None:
        """Listen with the event loop that runs now."""
        self._on_gone, self._on_news = on_gone, on_news
        asyncio.get_running_loop().add_reader(self._fd, self._read)
        self._take()

    def end(self) -> None:
        """Listen no more with this event loop."""
        asyncio.get_running_loop().remove_reader(self._fd)

    def _read(self) -> None:
        data = os.read(self._fd, READ_BYTES)
        if not data:
            self.end()
            self._on_gone()
            return
        self._received += data
        self._take()

    def _take(self) -> None:
        *lines, rest = self._received.split(b"\n")
        self._received = bytearray(rest)
        for line in lines:
            said = _decode(line)
            if isinstance(said, News):
                self.news = said
                self._on_news()
            else:
                self.book.take(said)


def news_line(news: News) -> bytes:
    """The news as a line that `Lines` reads."""
    return _encode(news) + b"\n"
