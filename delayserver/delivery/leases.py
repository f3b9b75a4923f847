"""Leases: messages that a consumer pulled and has not acknowledged yet.

A lease names one delivery until it is acknowledged, given back, or over. Its token carries a random
number of the server process that granted it, so a lease of one process is never mistaken for one of
another, and behind it the number of the shard, by which any other finds whose it is; nothing for
shard 0.

    epoch ─ number of the pull ─ index in it        bebe260c-1f-499, of shard 2: bebe260c2-1f-499

Leases of one pull stand together: their deliveries as columns, a deadline and a mark for each, and
one timeout for all of them. It is set for the first that may be over, and when it comes and all
were extended meanwhile, it is set again.

At a planned stop the leases that are left are kept (`kept`), and the next process holds them on
under the same tokens (`restore`). Those of many pulls stand together then, and each pull has a span
of them.

Cost: some 10 µs per pull and per call; 0.3 µs for each token that is ended or extended.
Threads: belongs to the event loop.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, repeat
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayserver.delivery.deliveries import Deliveries
from delayserver.records.kept_leases import LEASE_DTYPE, PULL_DTYPE
from delayserver.records.message import DueDelivery
from delayserver.timers.interface import Handle
from delayserver.timers.timeouts import Timeouts
from storage.frame import Rows
from storage.rows import select

EPOCH_BYTES: Final = 4
"""The length of the random number of a process."""
_PARTS = 3
"""The parts of a token, with dashes between them."""
_EPOCH = re.compile(rf"[0-9a-f]{{{2 * EPOCH_BYTES}}}([1-9a-f][0-9a-f]{{0,3}})?-")


def epoch_of(random_bytes: bytes, shard: int) -> str:
    """The prefix of the tokens of a process."""
    assert len(random_bytes) == EPOCH_BYTES
    return random_bytes.hex() + (f"{shard:x}" if shard else "")


def shard_of_lease(token: str) -> int | None:
    """The shard of a lease; None: no shard has it, so it is over."""
    found = _EPOCH.match(token)
    return None if found is None else int(found[1] or "0", 16)


@dataclass(slots=True)
class _Pull:
    deliveries: Deliveries
    number: int
    """In its tokens; of leases that are restored: in no token."""
    deadlines_ms: NDArray[np.int64]
    """On the stopwatch."""
    is_held: NDArray[np.bool_]
    held: int
    handle: Handle
    wakes_ms: int
    restored: "_Restored | None" = None
    """Where they are those of pulls of an earlier process."""


@dataclass(frozen=True, slots=True)
class _Restored:
    """Where the leases of each pull of an earlier process stand."""

    indexes: NDArray[np.int64]
    """The last number of each token; ascending within a pull."""
    pulls: Rows
    """The pulls (PULL_DTYPE, shape p)."""
    starts: NDArray[np.intp]
    """Where the leases of each begin, and where the last ones end (shape p + 1)."""


class DeliverySelection(NamedTuple):
    """Some deliveries of one pull, by index."""

    deliveries: Deliveries
    which: NDArray[np.intp]

    def each(self) -> Iterator[DueDelivery]:
        """Each delivery as an object, in the order of the indexes."""
        return map(self.deliveries.__getitem__, self.which.tolist())


class _FoundLeases(NamedTuple):
    pull: _Pull
    which: NDArray[np.intp]


class _Span(NamedTuple):
    """The leases of one pull, among those that stand together."""

    pull: _Pull
    start: int
    end: int

    def indexes(self, numbers: Sequence[int]) -> list[int] | None:
        """Where the leases stand whose tokens end with these numbers; None: one never was."""
        if self.pull.restored is None:
            is_sound = min(numbers) >= 0 and max(numbers) < self.end
            return list(numbers) if is_sound else None
        known = self.pull.restored.indexes[self.start : self.end]
        if min(numbers) < 0 or max(numbers) > known[-1]:
            return None
        places = np.searchsorted(known, numbers)
        is_known = bool((known[places] == numbers).all())
        return (places + self.start).tolist() if is_known else None


class Leases:
    """All leases of this process. `on_expired` gets the deliveries whose lease is over."""

    def __init__(
        self, epoch: str, timeouts: Timeouts, on_expired: Callable[[DeliverySelection], None]
    ) -> None:
        self._epoch = epoch
        self._timeouts = timeouts
        self.on_expired = on_expired
        self._pulls: dict[int, _Pull] = {}
        self._spans: dict[str, _Span] = {}
        """Pulls of earlier processes, by the prefix of their tokens."""
        self._next_number = 1

    def grant(self, deliveries: Deliveries, lease_ms: int) -> str:
        """Lease deliveries for `lease_ms` from the present; returns the prefix of their tokens. The
        index of each follows."""
        count = len(deliveries)
        if not count:
            return ""
        deadline_ms = self._timeouts.stopwatch() + lease_ms
        pull = self._hold(deliveries, np.full(count, deadline_ms, np.int64), deadline_ms)
        return self._prefix(pull.number)

    def _hold(
        self, deliveries: Deliveries, deadlines_ms: NDArray[np.int64], first_ms: int
    ) -> _Pull:
        count, number = len(deliveries), self._next_number
        self._next_number += 1
        handle = self._timeouts.add_at(partial(self._expire, number), first_ms)
        is_held = np.ones(count, np.bool_)
        pull = _Pull(deliveries, number, deadlines_ms, is_held, count, handle, first_ms)
        self._pulls[number] = pull
        return pull

    def _prefix(self, number: int) -> str:
        return f"{self._epoch}-{number:x}-"

    # ── over a planned restart ─────────────────────────────────────────────────────────────────

    def kept(self) -> tuple[Rows, Rows]:
        """All leases that are held, as the next process needs them: pulls (PULL_DTYPE) and leases
        (LEASE_DTYPE). A lease that is about to end has a millisecond left."""
        pulls, leases = [np.zeros(0, PULL_DTYPE)], [np.zeros(0, LEASE_DTYPE)]
        present_ms = self._timeouts.stopwatch()
        for pull in self._pulls.values():
            which = np.flatnonzero(pull.is_held)
            settled, left = (
                select(pull.deliveries.settled, which),
                np.zeros(len(which), LEASE_DTYPE),
            )
            left["seq"], left["due_ms"] = settled["seq"], settled["due_ms"]
            left["attempt"] = settled["attempt"]
            left["left_ms"] = np.maximum(pull.deadlines_ms[which] - present_ms, 1)
            restored = pull.restored
            if restored is None:
                one = np.zeros(1, PULL_DTYPE)
                one["number"], one["epoch"] = pull.number, int(self._epoch[: 2 * EPOCH_BYTES], 16)
                one["leased_ms"] = pull.deliveries.leased_ms
                one["subscription_id"], one["count"] = pull.deliveries.subscription_id, len(which)
                left["index"] = which
                pulls.append(one)
            else:
                left["index"] = restored.indexes[which]
                counts = np.diff(np.searchsorted(which, restored.starts))
                some = restored.pulls[counts > 0].copy()
                some["count"] = counts[counts > 0]
                pulls.append(some)
            leases.append(left)
        return np.concatenate(pulls), np.concatenate(leases)

    def restore(self, deliveries: Deliveries, pulls: Rows, leases: Rows) -> None:
        """Hold leases of an earlier process. `leases` are those of `deliveries` (both of shape n,
        n > 0), in the order of `pulls`, whose counts say how many each has."""
        deadlines_ms = self._timeouts.stopwatch() + leases["left_ms"]
        pull = self._hold(deliveries, deadlines_ms, int(deadlines_ms.min()))
        starts = np.concatenate([[0], np.cumsum(pulls["count"].astype(np.intp))])
        assert starts[-1] == len(deliveries) == len(leases), (starts, len(leases))
        pull.restored = _Restored(leases["index"].astype(np.int64), pulls, starts)
        for prefix, start, end in self._spans_of(pull.restored):
            self._spans[prefix] = _Span(pull, start, end)

    def _spans_of(self, restored: _Restored) -> Iterator[tuple[str, int, int]]:
        shard = self._epoch[2 * EPOCH_BYTES :]
        epochs, numbers = restored.pulls["epoch"].tolist(), restored.pulls["number"].tolist()
        starts = restored.starts.tolist()
        for epoch, number, span in zip(epochs, numbers, pairwise(starts), strict=True):
            yield f"{epoch:08x}{shard}-{number:x}-", *span

    def get(self, token: str) -> DueDelivery | None:
        """The delivery, as long as it is leased."""
        found, _ = self._find([token], None)
        return found[0].pull.deliveries[int(found[0].which[0])] if found else None

    def end(
        self, tokens: Sequence[str], subscription_id: int | None = None
    ) -> tuple[list[DeliverySelection], list[str]]:
        """End leases: their deliveries, and the tokens of those that were over already, never
        were, or are not of that subscription (None: any)."""
        found, over = self._find(tokens, subscription_id)
        for pull, which in found:
            self._end(pull, which)
        return [DeliverySelection(pull.deliveries, which) for pull, which in found], over

    def end_pull(self, prefix: str) -> DeliverySelection | None:
        """End the leases that are still held of the pull with this prefix; None: it is over."""
        known = self._span(prefix, None)
        if known is None:
            return None
        pull, start, end = known
        which = start + np.flatnonzero(pull.is_held[start:end])
        self._end(pull, which)
        return DeliverySelection(pull.deliveries, which)

    def _end(self, pull: _Pull, which: NDArray[np.intp]) -> None:
        pull.is_held[which] = False
        pull.held -= len(which)
        if not pull.held:
            self._timeouts.cancel(pull.handle)
            del self._pulls[pull.number]
            if pull.restored is not None:
                for prefix, _, _ in self._spans_of(pull.restored):
                    del self._spans[prefix]

    def extend(
        self, tokens: Sequence[str], lease_ms: int, subscription_id: int | None = None
    ) -> list[str]:
        """Let leases last `lease_ms` from the present; the tokens that `end` would not end."""
        found, over = self._find(tokens, subscription_id)
        deadline_ms = self._timeouts.stopwatch() + lease_ms
        for pull, which in found:
            pull.deadlines_ms[which] = deadline_ms
            if deadline_ms < pull.wakes_ms:
                self._timeouts.cancel(pull.handle)
                self._wake_at(pull, deadline_ms)
        return over

    # ── tokens ─────────────────────────────────────────────────────────────────────────────────

    def _find(
        self, tokens: Sequence[str], subscription_id: int | None
    ) -> tuple[list[_FoundLeases], list[str]]:
        """The held leases, by pull, each once; and the tokens of leases that are over, in order."""
        found: list[_FoundLeases] = []
        over: list[int] = []
        for prefix, places in _by_prefix(tokens).items():
            span = self._span(prefix, subscription_id)
            if span is None:
                over += places
                continue
            which = _indexes(prefix, [tokens[place] for place in places], span)
            if which is None:
                which, wrong = _sift(prefix, tokens, places, span)
                over += wrong
            if len(which):
                found.append(_FoundLeases(span.pull, which))
        return found, [tokens[place] for place in sorted(over)]

    def _span(self, prefix: str, subscription_id: int | None) -> _Span | None:
        """The pull whose tokens begin like that, to the letter: a number has other spellings, and
        one pull under two of them would be ended twice."""
        span = self._spans.get(prefix) if self._spans else None
        if span is None:
            try:
                number = int(prefix.split("-")[1], 16)
            except (IndexError, ValueError):
                return None
            pull = self._pulls.get(number) if prefix == self._prefix(number) else None
            if pull is None or pull.restored is not None:
                return None
            span = _Span(pull, 0, len(pull.is_held))
        if subscription_id not in (None, span.pull.deliveries.subscription_id):
            return None
        return span

    # ── time ───────────────────────────────────────────────────────────────────────────────────

    def _wake_at(self, pull: _Pull, deadline_ms: int) -> None:
        pull.wakes_ms = deadline_ms
        pull.handle = self._timeouts.add_at(partial(self._expire, pull.number), deadline_ms)

    def _expire(self, number: int) -> None:
        """End the leases of a pull whose deadline has passed."""
        pull, present_ms = self._pulls[number], self._timeouts.stopwatch()
        is_over = pull.is_held & (pull.deadlines_ms <= present_ms)
        expired = np.flatnonzero(is_over)
        left = pull.deadlines_ms[pull.is_held & ~is_over]
        if len(left):
            self._wake_at(pull, int(left.min()))
        if len(expired):
            self._end(pull, expired)
            self.on_expired(DeliverySelection(pull.deliveries, expired))

    def count(self) -> int:
        """Leases that are held."""
        return sum(pull.held for pull in self._pulls.values())


def _by_prefix(tokens: Sequence[str]) -> dict[str, Sequence[int]]:
    """Where the tokens of each pull stand: all but their index is the same."""
    prefix = tokens[0][: tokens[0].rfind("-") + 1] if tokens else ""
    is_whole = prefix.count("-") == _PARTS - 1
    if is_whole and all(map(str.startswith, tokens, repeat(prefix))):
        # A consumer names the messages that it pulled, all of one pull as a rule.
        return {prefix: range(len(tokens))}
    places: dict[str, Sequence[int]] = {}
    for place, token in enumerate(tokens):
        here = places.setdefault(token[: token.rfind("-") + 1], [])
        assert isinstance(here, list)
        here.append(place)
    return places


def _indexes(prefix: str, tokens: Sequence[str], span: _Span) -> NDArray[np.intp] | None:
    """Which leases of a pull these are, if each is held, and none is named twice; else None."""
    start = len(prefix)
    try:
        numbers = [int(token[start:]) for token in tokens]
    except ValueError:
        return None
    indexes = span.indexes(numbers)
    if indexes is None or len(set(indexes)) < len(indexes):
        return None
    which = np.array(indexes, np.intp)
    return which if span.pull.is_held[which].all() else None


def _sift(
    prefix: str, tokens: Sequence[str], places: Sequence[int], span: _Span
) -> tuple[NDArray[np.intp], list[int]]:
    """Which leases of a pull are held (shape n), each once, token by token; and the places of the
    tokens whose lease is not."""
    indexes: dict[int, None] = {}
    wrong: list[int] = []
    for place in places:
        which = _indexes(prefix, [tokens[place]], span)
        if which is None or int(which[0]) in indexes:
            wrong.append(place)
        else:
            indexes[int(which[0])] = None
    return np.array(list(indexes), np.intp), wrong
