"""A call of one shard to another: a whole call, whose caller was checked where it came in.

    router ──▶ Peers.ask(shard, call) ──▶ that shard's own application ──▶ answer

The shard itself is asked in the same way, without a hop. Cost: see `delayserver.shards.link`.
Threads: belongs to the event loop.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple, Protocol

from delayserver.security.tokens import Caller

Fields = tuple[tuple[bytes, bytes], ...]
"""Headers: lower-case names, and values."""


class PeerCall(NamedTuple):
    """A request, as a shard would have got it from the client itself."""

    method: str
    path: str
    """Without escapes."""
    query: bytes = b""
    headers: Fields = ()
    """Those that the call depends on: content type, conditions, trace."""
    body: bytes = b""
    caller: Caller | None = None
    """The caller that was let in, and counted, where the request came in; None: all is allowed."""


class PeerAnswer(NamedTuple):
    """The answer of a shard."""

    status: int
    headers: Fields
    body: bytes


class Peers(Protocol):
    """All shards, as one of them sees them."""

    own: int
    """The number of the one that asks."""
    count: int

    def ask(self, shard: int, call: PeerCall) -> Awaitable[PeerAnswer]:
        """Have a shard answer a call. One that is away, or starts, is answered for: 503 with
        Retry-After, and where the call may have had its effect, `outcome: unknown`."""

    def tell(self, shard: int, topic: str, notice: bytes) -> None:
        """Send another shard a notice that has no answer. Notices arrive in the order in which they
        were sent; a notice to a shard that is away is lost."""

    def on_told(self, topic: str, heard: Callable[[int, bytes], None]) -> None:
        """Have `heard` called with each notice of a topic: the sender's shard, and the bytes."""

    def on_change(self, changed: Callable[[int, bool], None]) -> None:
        """Have `changed` called when a shard can be asked from now on (True), or not any more
        (False): whatever it was told before is forgotten there. Those that are there already are
        told of at once."""


class Asks:
    """Calls of other shards whose answers go to callbacks, so that nobody has to wait for them."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._asked: set[asyncio.Future[PeerAnswer]] = set()

    def ask(self, shard: int, call: PeerCall, told: Callable[[PeerAnswer], None]) -> None:
        """Have `told` called with the answer, later; never where the event loop ends before."""
        asked = asyncio.ensure_future(self._peers.ask(shard, call))
        self._asked.add(asked)
        asked.add_done_callback(partial(self._end, told))

    def _end(self, told: Callable[[PeerAnswer], None], asked: "asyncio.Future[PeerAnswer]") -> None:
        self._asked.discard(asked)
        if not asked.cancelled():
            told(asked.result())


class RoutedPeers(Peers, Protocol):
    """The same, for who has calls of clients answered."""

    def misdirected(self, shard: int, call: PeerCall) -> PeerAnswer | None:
        """The answer to a client that does not want its call forwarded, if the call belongs to
        another shard: 421, and the address of that shard. None: forward the call, also
        if the shard is away: forwarding then reports it."""
