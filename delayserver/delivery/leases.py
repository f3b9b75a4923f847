"""Leases: messages that a consumer pulled and has not acknowledged yet.

A lease names one delivery until it is acknowledged, given back, or over. Its token carries a random
number of this server process, so a lease of an earlier process is never mistaken for one of this,
and behind it the number of the shard, by which any other finds whose it is; nothing for shard 0.

    epoch ─ number of the pull ─ index in it        bebe260c-1f-499, of shard 2: bebe260c2-1f-499

Leases of one pull stand together: their deliveries as columns, a deadline and a mark for each, and
one timeout for all of them. It is set for the first that may be over, and when it comes and all
were extended meanwhile, it is set again.

Cost: some 10 µs per pull and per call; 0.3 µs for each token that is ended or extended.
Threads: belongs to the event loop.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayserver.delivery.deliveries import Deliveries
from delayserver.records.message import DueDelivery
from delayserver.timers.interface import Handle
from delayserver.timers.timeouts import Timeouts

EPOCH_BYTES: Final = 4
"""Of the random number of a process."""
_PARTS = 3
"""Of a token, with dashes between them."""
_EPOCH = re.compile(rf"[0-9a-f]{{{2 * EPOCH_BYTES}}}([1-9a-f][0-9a-f]{{0,3}})?-")


def epoch_of(random_bytes: bytes, shard: int) -> str:
    """What the tokens of a process begin with."""
    assert len(random_bytes) == EPOCH_BYTES
    return random_bytes.hex() + (f"{shard:x}" if shard else "")


def shard_of_lease(token: str) -> int | None:
    """Whose lease it is; None: nobody's, so it is over."""
    found = _EPOCH.match(token)
    return None if found is None else int(found[1] or "0", 16)


@dataclass(slots=True)
class _Pull:
    deliveries: Deliveries
    deadlines_ms: NDArray[np.int64]
    """On the stopwatch."""
    is_held: NDArray[np.bool_]
    held: int
    handle: Handle
    wakes_ms: int


class Some(NamedTuple):
    """Some deliveries of one pull, by index."""

    deliveries: Deliveries
    which: NDArray[np.intp]

    def each(self) -> Iterator[DueDelivery]:
        """Each delivery as an object, in the order of the indexes."""
        return map(self.deliveries.__getitem__, self.which.tolist())


class _Found(NamedTuple):
    number: int
    pull: _Pull
    which: NDArray[np.intp]


class Leases:
    """All leases of this process. `on_expired` gets the deliveries whose lease is over."""

    def __init__(self, epoch: str, timeouts: Timeouts, on_expired: Callable[[Some], None]) -> None:
        self._epoch = epoch
        self._timeouts = timeouts
        self.on_expired = on_expired
        self._pulls: dict[int, _Pull] = {}
        self._next_number = 1

    def grant(self, deliveries: Deliveries, lease_ms: int) -> str:
        """Lease deliveries for `lease_ms` from the present; returns what their tokens begin with.
        The index of each follows."""
        count = len(deliveries)
        if not count:
            return ""
        number = self._next_number
        self._next_number += 1
        deadline_ms = self._timeouts.stopwatch() + lease_ms
        handle = self._timeouts.add_at(partial(self._expire, number), deadline_ms)
        self._pulls[number] = _Pull(
            deliveries,
            np.full(count, deadline_ms, np.int64),
            np.ones(count, np.bool_),
            count,
            handle,
            deadline_ms,
        )
        return self._prefix(number)

    def _prefix(self, number: int) -> str:
        return f"{self._epoch}-{number:x}-"

    def get(self, token: str) -> DueDelivery | None:
        """The delivery, as long as it is leased."""
        found, _ = self._find([token], None)
        return found[0].pull.deliveries[int(found[0].which[0])] if found else None

    def end(
        self, tokens: Sequence[str], subscription_id: int | None = None
    ) -> tuple[list[Some], list[str]]:
        """End leases: their deliveries, and the tokens of those that were over already, never
        were, or are not of that subscription (None: any)."""
        found, over = self._find(tokens, subscription_id)
        for number, pull, which in found:
            self._end(number, pull, which)
        return [Some(pull.deliveries, which) for _, pull, which in found], over

    def end_pull(self, prefix: str) -> Some | None:
        """End what is held of a pull whose tokens begin like that; None: it is over."""
        known = self._pull(prefix, None)
        if known is None:
            return None
        number, pull = known
        which = np.flatnonzero(pull.is_held)
        self._end(number, pull, which)
        return Some(pull.deliveries, which)

    def _end(self, number: int, pull: _Pull, which: NDArray[np.intp]) -> None:
        pull.is_held[which] = False
        pull.held -= len(which)
        if not pull.held:
            self._timeouts.cancel(pull.handle)
            del self._pulls[number]

    def extend(
        self, tokens: Sequence[str], lease_ms: int, subscription_id: int | None = None
    ) -> list[str]:
        """Let leases last `lease_ms` from the present; the tokens that `end` would not end."""
        found, over = self._find(tokens, subscription_id)
        deadline_ms = self._timeouts.stopwatch() + lease_ms
        for number, pull, which in found:
            pull.deadlines_ms[which] = deadline_ms
            if deadline_ms < pull.wakes_ms:
                self._timeouts.cancel(pull.handle)
                self._wake_at(number, pull, deadline_ms)
        return over

    # ── tokens ─────────────────────────────────────────────────────────────────────────────────

    def _find(
        self, tokens: Sequence[str], subscription_id: int | None
    ) -> tuple[list[_Found], list[str]]:
        """What is held, by pull, each once; and the tokens of what is not, in order."""
        found: list[_Found] = []
        over: list[int] = []
        for prefix, places in _by_prefix(tokens).items():
            known = self._pull(prefix, subscription_id)
            if known is None:
                over += places
                continue
            number, pull = known
            which = _indexes(prefix, [tokens[place] for place in places], pull)
            if which is None:
                which, wrong = _sift(prefix, tokens, places, pull)
                over += wrong
            if len(which):
                found.append(_Found(number, pull, which))
        return found, [tokens[place] for place in sorted(over)]

    def _pull(self, prefix: str, subscription_id: int | None) -> tuple[int, _Pull] | None:
        """The pull whose tokens begin like that, to the letter: a number has other spellings, and
        one pull under two of them would be ended twice."""
        try:
            number = int(prefix.split("-")[1], 16)
        except (IndexError, ValueError):
            return None
        pull = self._pulls.get(number) if prefix == self._prefix(number) else None
        if pull is None or subscription_id not in (None, pull.deliveries.subscription_id):
            return None
        return number, pull

    # ── time ───────────────────────────────────────────────────────────────────────────────────

    def _wake_at(self, number: int, pull: _Pull, deadline_ms: int) -> None:
        pull.wakes_ms = deadline_ms
        pull.handle = self._timeouts.add_at(partial(self._expire, number), deadline_ms)

    def _expire(self, number: int) -> None:
        """End the leases of a pull whose deadline has passed."""
        pull, present_ms = self._pulls[number], self._timeouts.stopwatch()
        is_over = pull.is_held & (pull.deadlines_ms <= present_ms)
        expired = np.flatnonzero(is_over)
        left = pull.deadlines_ms[pull.is_held & ~is_over]
        if len(left):
            self._wake_at(number, pull, int(left.min()))
        if len(expired):
            self._end(number, pull, expired)
            self.on_expired(Some(pull.deliveries, expired))

    def count(self) -> int:
        """Leases that are held."""
        return sum(pull.held for pull in self._pulls.values())


def _by_prefix(tokens: Sequence[str]) -> dict[str, Sequence[int]]:
    """Where the tokens of each pull stand: all but their index is the same."""
    prefix = tokens[0][: tokens[0].rfind("-") + 1] if tokens else ""
    is_whole = prefix.count("-") == _PARTS - 1
    if is_whole and all(map(str.startswith, tokens, repeat(prefix))):
        # A consumer names what it pulled, all of one pull as a rule.
        return {prefix: range(len(tokens))}
    places: dict[str, Sequence[int]] = {}
    for place, token in enumerate(tokens):
        here = places.setdefault(token[: token.rfind("-") + 1], [])
        assert isinstance(here, list)
        here.append(place)
    return places


def _indexes(prefix: str, tokens: Sequence[str], pull: _Pull) -> NDArray[np.intp] | None:
    """Which leases of a pull these are, if each is held, and none is named twice; else None."""
    start = len(prefix)
    try:
        indexes = [int(token[start:]) for token in tokens]
    except ValueError:
        return None
    count = len(pull.is_held)
    if min(indexes) < 0 or max(indexes) >= count or len(set(indexes)) < len(indexes):
        return None
    which = np.array(indexes, np.intp)
    return which if pull.is_held[which].all() else None


def _sift(
    prefix: str, tokens: Sequence[str], places: Sequence[int], pull: _Pull
) -> tuple[NDArray[np.intp], list[int]]:
    """Which leases of a pull are held (shape n), each once, token by token; and the places of the
    tokens whose lease is not."""
    indexes: dict[int, None] = {}
    wrong: list[int] = []
    for place in places:
        which = _indexes(prefix, [tokens[place]], pull)
        if which is None or int(which[0]) in indexes:
            wrong.append(place)
        else:
            indexes[int(which[0])] = None
    return np.array(list(indexes), np.intp), wrong
