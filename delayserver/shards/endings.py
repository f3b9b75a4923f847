"""Leases of several shards in one call: each shard is told of its own, all at once.

    tokens ──▶ own, or nobody's ──▶ Calls
           ──▶ of a shard       ──▶ the same call there ──▶ those that were over
           ──▶ of one that cannot be asked: unknown

Only the owner of a shard says that a lease is over. A shard that cannot be asked may be well, and
hold the lease: the way to it is cut; and a lease outlasts a planned restart of its shard, and its
move to another node, which is waited for. So its part is unknown, as is that of one that ends while
it is asked, and the client asks again. If a shard refuses, its refusal is the answer to the whole
call. Leases that other shards have ended by then stay over, and are found over when the call is
repeated.

Cost: 50 ns a token where all are of one shard, else 1 µs; 60 µs for each shard that is asked.
Threads: belongs to the event loop.
"""

import asyncio
from collections.abc import Sequence
from functools import partial
from itertools import repeat
from typing import Final

import msgspec

from delayserver.api.hot.answers import AnsweredError, problem_answer
from delayserver.api.hot.consume import LeaseEnd, OwnGrants, ToldExpired
from delayserver.api.problems import ProblemDocument, problem_of
from delayserver.delivery.leases import shard_of_lease
from delayserver.errors import ShardAwayError
from delayserver.shards.link import hot_answer
from delayserver.shards.peers import Asks, PeerAnswer, PeerCall, Peers

LEASES_PATH: Final = "/internal/leases"
_AWAY: Final = problem_of(ShardAwayError(0)).document.type


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(LeaseEnd).decode
_decode_expired = msgspec.msgpack.Decoder(list[str]).decode
_read_problem = msgspec.json.Decoder(ProblemDocument).decode


class Endings:
    """The leases of all shards, as one of them is told of them."""

    def __init__(self, own: OwnGrants, peers: Peers) -> None:
        self._own = own
        self._peers = peers
        self._asks = Asks(peers)

    def end(self, leased: LeaseEnd, done: ToldExpired) -> None:
        """Have leases end, wherever they were granted; `done` is called when all is done.

        Raises the error of the own shard: then nothing was done."""
        tokens = leased.tokens
        parts = places_by_shard(tokens, self._peers.own, self._peers.count)
        if parts.keys() <= {self._peers.own}:
            self._own.end(leased, done)
            return
        joined = _Joined(tokens, len(parts), done)
        own = parts.pop(self._peers.own, None)
        if own is not None:
            some = [tokens[place] for place in own]
            self._own.end(leased._replace(tokens=some), partial(joined.told, own))
        for shard, places in parts.items():
            some = [tokens[place] for place in places]
            body = _encode(leased._replace(tokens=some))
            call = PeerCall("POST", LEASES_PATH, body=body)
            self._asks.ask(shard, call, partial(self._on_answer, shard, joined, places))

    def _on_answer(
        self,
        shard: int,
        joined: "_Joined",
        places: Sequence[int],
        answer: PeerAnswer,
    ) -> None:
        if answer.status == 200:
            joined.told(places, _decode_expired(answer.body))
            return
        refusal = hot_answer(answer)
        if _read_problem(answer.body).type == _AWAY:
            refusal = problem_answer(ShardAwayError(shard, is_unknown=True))
        joined.told(places, [], AnsweredError(refusal))

    async def answer(self, call: PeerCall) -> PeerAnswer | None:
        """Those of this shard, as another one was told of them. Raises OverloadedError,
        StoppingError, StorageError."""
        if call.path != LEASES_PATH:
            return None
        leased = _decode(call.body)
        future: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()

        def done(expired: list[str], error: Exception | None = None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(expired)
            else:
                future.set_exception(error)

        # The subscription may be deleted here, and not yet where the call came in. Its leases are
        # held on, and keep their messages from others.
        self._own.end(leased, done)
        return PeerAnswer(200, (), _encode(await future))


class _Joined:
    """The answer to a call whose leases are of several shards."""

    def __init__(self, tokens: list[str], missing: int, done: ToldExpired) -> None:
        self._tokens = tokens
        self._missing = missing
        self._done = done
        self._over: list[int] = []
        """Where the tokens stand whose leases were over."""
        self._error: Exception | None = None

    def told(
        self, places: Sequence[int], expired: list[str], error: Exception | None = None
    ) -> None:
        """By one of the shards; `places`: where its tokens stand."""
        self._error = self._error or error
        left = len(expired)
        for place in reversed(places):
            # If a token is named twice, the first of the two has ended its lease.
            if left and self._tokens[place] == expired[left - 1]:
                left -= 1
                self._over.append(place)
        assert not left, expired
        self._missing -= 1
        if not self._missing:
            self._done([self._tokens[place] for place in sorted(self._over)], self._error)


def places_by_shard(tokens: Sequence[str], own: int, count: int) -> dict[int, Sequence[int]]:
    """The positions of the tokens of each shard. A token of no shard is given to the own one."""
    if not tokens:
        return {}
    epoch = tokens[0][: tokens[0].find("-") + 1]
    if epoch and all(map(str.startswith, tokens, repeat(epoch))):
        # A consumer names leases that it pulled, as a rule from one shard.
        return {_owner(tokens[0], own, count): range(len(tokens))}
    places: dict[int, Sequence[int]] = {}
    for place, token in enumerate(tokens):
        here = places.setdefault(_owner(token, own, count), [])
        assert isinstance(here, list)
        here.append(place)
    return places


def _owner(token: str, own: int, count: int) -> int:
    shard = shard_of_lease(token)
    return own if shard is None or shard >= count else shard
