"""The messages that other shards have for the consumers that wait here, as far as is known here.

    a pull ──▶ want ID, told to all ──▶ each says how much is there, now and from now on
           ──▶ fetch, of one that has something ──▶ a part ──▶ handed, or back

A subscription is wanted for some seconds beyond its last pull, so that a consumer in a loop does
not ask for the counts each time. A fetch takes its number off the count at once; only the shard
itself says how much is left (`delayserver.shards.supply`). A link that begins anew knows nothing.

Cost: 60 µs for a part, and 1 µs for a notice. Threads: belongs to the event loop.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, NamedTuple

import msgspec

from delayserver.server.calls import Calls
from delayserver.shards.peers import Asks, PeerAnswer, PeerCall, Peers
from delayserver.shards.supply import FETCH_PATH, READY, WANTS, Fetch, LentPart, NoticeKind, encode

KEPT_MS: Final = 10_000
"""A subscription that nobody pulls from is wanted for so long, or twice that."""
UNKNOWN_MS: Final = 1_000
"""A shard that does not say in this time how much it has, has nothing."""
REFUSED_MS: Final = 50
"""A shard that has refused to give anything is asked after this how much it has."""

_decode_ready = msgspec.msgpack.Decoder(tuple[int, int]).decode
_decode_part = msgspec.msgpack.Decoder(LentPart).decode


class ArrivedPart(NamedTuple):
    """A part that has come, and which link it came over."""

    shard: int
    link: int
    part: LentPart


class _Wanted:
    """One subscription."""

    def __init__(self) -> None:
        self.pulls = 0
        """How many are under way."""
        self.was_used = True
        """Since the last sweep."""
        self.turn = 0
        """Which shard the next pull begins with."""
        self.counts: Counter[int] = Counter()
        """By shard, of those that have said it."""
        self.asking: list[Callable[[], None]] = []
        """Called as soon as all of them have answered."""


class Demand:
    """The messages that this shard wants of others."""

    def __init__(self, calls: Calls, peers: Peers, on_more: Callable[[int], None]) -> None:
        """`on_more`: told of a subscription of which some shard says how much it has."""
        self._calls = calls
        self._peers = peers
        self._on_more = on_more
        self._wanted: dict[int, _Wanted] = {}
        self._links: dict[int, int] = {}
        """The shards that are there, and the number of the link to each."""
        self._last_link = 0
        self._is_sweeping = False
        self._asks = Asks(peers)
        peers.on_told(READY, self._hear)
        peers.on_change(self._on_change)

    # ── the wishes of consumers here ───────────────────────────────────────────────────────────

    def begin(self, subscription_id: int) -> None:
        """A pull begins; `end` is its end."""
        wanted = self._wanted.get(subscription_id)
        if wanted is None:
            wanted = self._wanted[subscription_id] = _Wanted()
            for shard in self._links:
                self._tell(shard, NoticeKind.BEGIN, subscription_id)
            if not self._is_sweeping:
                self._is_sweeping = True
                self._calls.after(KEPT_MS, self._sweep)
        wanted.pulls += 1

    def end(self, subscription_id: int) -> None:
        """A pull has ended."""
        wanted = self._wanted[subscription_id]
        wanted.pulls -= 1
        wanted.was_used = True

    def _sweep(self) -> None:
        for subscription_id, wanted in list(self._wanted.items()):
            if wanted.pulls or wanted.was_used:
                wanted.was_used = False
                continue
            del self._wanted[subscription_id]
            for shard in self._links:
                self._tell(shard, NoticeKind.END, subscription_id)
        self._is_sweeping = bool(self._wanted)
        if self._is_sweeping:
            self._calls.after(KEPT_MS, self._sweep)

    # ── the counts of other shards ─────────────────────────────────────────────────────────────

    def counts(self, subscription_id: int) -> Mapping[int, int]:
        """How much each other shard has, of those that have said so."""
        return self._wanted[subscription_id].counts

    def total(self, subscription_id: int) -> int:
        """How much all other shards have."""
        wanted = self._wanted.get(subscription_id)
        return wanted.counts.total() if wanted is not None else 0

    def next_turn(self, subscription_id: int) -> int:
        """Which shard a pull begins with: each time the next one."""
        wanted = self._wanted[subscription_id]
        wanted.turn = (wanted.turn + 1) % self._peers.count
        return wanted.turn

    def is_known(self, subscription_id: int) -> bool:
        """Whether all shards that are there have said how much they have."""
        counts = self._wanted[subscription_id].counts
        return all(shard in counts for shard in self._links)

    def when_known(self, subscription_id: int, known: Callable[[], None]) -> None:
        """Call `known` when it is; in the end one that does not say it has nothing."""
        wanted = self._wanted[subscription_id]
        if not wanted.asking:
            self._calls.after(UNKNOWN_MS, partial(self._know, wanted))
        wanted.asking.append(known)

    def _know(self, wanted: _Wanted) -> None:
        for shard in self._links:
            wanted.counts.setdefault(shard, 0)
        self._tell_asking(wanted)

    def _tell_asking(self, wanted: _Wanted) -> None:
        if wanted.asking and all(shard in wanted.counts for shard in self._links):
            asking, wanted.asking = wanted.asking, []
            for known in asking:
                known()

    # ── notices of other shards ────────────────────────────────────────────────────────────────

    def _on_change(self, shard: int, is_there: bool) -> None:
        if is_there:
            self._last_link += 1
            self._links[shard] = self._last_link
            self._tell(shard, NoticeKind.LINK, self._last_link)
            for subscription_id in self._wanted:
                self._tell(shard, NoticeKind.BEGIN, subscription_id)
            return
        del self._links[shard]
        for wanted in list(self._wanted.values()):
            wanted.counts.pop(shard, None)
            self._tell_asking(wanted)

    def _hear(self, shard: int, notice: bytes) -> None:
        subscription_id, count = _decode_ready(notice)
        wanted = self._wanted.get(subscription_id)
        if wanted is not None:
            wanted.counts[shard] = count
            self._tell_asking(wanted)
            self._on_more(subscription_id)

    def _tell(self, shard: int, what: NoticeKind, about: int | str) -> None:
        self._peers.tell(shard, WANTS, encode((what.value, about)))

    # ── parts ──────────────────────────────────────────────────────────────────────────────────

    def fetch(
        self,
        shard: int,
        subscription_id: int,
        max_messages: int,
        max_bytes: int,
        lease_ms: int,
        subjects: tuple[str, ...],
        told: Callable[[ArrivedPart | None], None],
    ) -> None:
        """Fetch up to so many messages from a shard that has some. `told` gets the part later, or
        None. The caller then reports the part as `handed`, or gives it `back`."""
        counts, link = self._wanted[subscription_id].counts, self._links[shard]
        counts[shard] = max(0, counts[shard] - max_messages)
        limits = max_messages, max_bytes, lease_ms
        wanted = Fetch(self._peers.own, link, subscription_id, *limits, subjects)
        call = PeerCall("POST", FETCH_PATH, body=encode(wanted))
        self._asks.ask(shard, call, partial(self._on_part, shard, link, subscription_id, told))

    def _on_part(
        self,
        shard: int,
        link: int,
        subscription_id: int,
        told: Callable[[ArrivedPart | None], None],
        answer: PeerAnswer,
    ) -> None:
        if answer.status == 200:
            part = _decode_part(answer.body)
            told(ArrivedPart(shard, link, part) if part.count else None)
            return
        # It was not asked, or refused: how much it has is not known any more.
        self._calls.after(REFUSED_MS, partial(self._begin_again, shard, subscription_id))
        told(None)

    def _begin_again(self, shard: int, subscription_id: int) -> None:
        if shard in self._links and subscription_id in self._wanted:
            self._tell(shard, NoticeKind.BEGIN, subscription_id)

    def is_held(self, taken: ArrivedPart) -> bool:
        """Whether its leases may be held still: with a link that has ended, they are over."""
        return self._links.get(taken.shard) == taken.link

    def handed(self, taken: ArrivedPart) -> None:
        """The consumer was answered."""
        if self.is_held(taken):
            self._tell(taken.shard, NoticeKind.HANDED, taken.part.prefix)

    def back(self, taken: ArrivedPart) -> None:
        """The consumer is gone, or wants more at once than there is."""
        if self.is_held(taken):
            self._tell(taken.shard, NoticeKind.BACK, taken.part.prefix)
