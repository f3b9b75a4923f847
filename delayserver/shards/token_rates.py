"""The rates of API tokens, for all processes together.

    request ──▶ own bucket ── every SHARE_S ──▶ the buckets of all others

Each process has the whole bucket of each token, lets in the calls that it allows, tells the others
how many those were, and takes the counts of the others from its own bucket. A bucket may be
overdrawn: all processes pay back the calls that were too many, so the rate is kept over time. For a
moment several processes may exceed it before they know of each other: by no more than a burst, and
the calls that the rate allows in SHARE_S, in each further process.

A process that begins has full buckets, as a server alone; so it has for a token that it does not
know yet when others tell of it: each process looks at the file once a second.

Cost: nothing where no token has a rate; else 0.3 µs for a request, and a notice for each other
process every SHARE_S at most. Threads: belongs to the event loop.
"""

from collections import Counter
from typing import Final

import msgspec

from delayserver.security.tokens import TokenTable
from delayserver.shards.limits import Loop
from delayserver.shards.peers import Peers

TAKEN: Final = "tokens.taken"
SHARE_S: Final = 0.02

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(dict[bytes, int]).decode


class TokenRates:
    """The calls that one process lets in, and its knowledge of the others."""

    def __init__(self, peers: Peers, tokens: TokenTable, loop: Loop) -> None:
        self._peers = peers
        self._tokens = tokens
        self._loop = loop
        self._others = [shard for shard in range(peers.count) if shard != peers.own]
        self._taken: Counter[bytes] = Counter()
        """The calls that the others were not told of, by digest."""
        tokens.on_taken = self._on_taken
        peers.on_told(TAKEN, self._on_told)

    def _on_taken(self, digest: bytes, count: int) -> None:
        if not self._taken:
            self._loop.call_later(SHARE_S, self._share)
        self._taken[digest] += count

    def _share(self) -> None:
        notice = _encode(self._taken)
        self._taken = Counter()
        for shard in self._others:
            self._peers.tell(shard, TAKEN, notice)

    def _on_told(self, shard: int, notice: bytes) -> None:
        for digest, count in _decode(notice).items():
            self._tokens.count_elsewhere(digest, count)
