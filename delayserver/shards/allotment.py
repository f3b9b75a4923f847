"""The limits of one webhook for all shards together: its home counts the places and hands them out.

    ask ──▶ shards that wait, in turn ── grant ──▶ places that are out, of each shard
                                     ── recall ──▶ places of shards that have more than their part
    back ─────────────────────────────────────────▶ free again

A place is a request that may be out; beside it goes a token of the rate for each row. A shard that
waits is given as much as is free. Where that is not enough, a shard that has more than its part is
asked to give the rest back as its requests end. If there are fewer places than shards that want
one, the shards take turns: a shard that had one stands at the end of the line again.

The home does not know how much a shard has out that is not linked, so it assumes the most: in the
beginning everything, until the shard had time to be linked; after a link is lost, the shard's last
count, until its requests must have ended; and at all times its share, which the shard may use by
itself (`delayserver.shards.limits`).

Cost: 2 µs for an ask and its grant. Threads: belongs to the event loop. Time is an argument, from a
clock that is never set. A `grant`, the `recall` after it and the wait that follows get the same
time: with a later one, a place may be free already when the length of the wait is asked, and no
timer would come back for it.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from delayserver.records.subscriptions import Subscription
from delayserver.timers.rates import TokenBucket

NO_LIMIT: Final = 1 << 30
MEET_MS: Final = 2_000
"""A shard that runs is linked within this time."""
QUIET_MS: Final = 2_000
"""Beyond the timeout of a request: after that it has ended."""


def quiet_ms(subscription: Subscription) -> int:
    """After this time no request is out any more that nobody counts."""
    return subscription.timeout_ms + QUIET_MS


def share_of_places(subscription: Subscription, count: int) -> int:
    """The places that one of `count` shards may use by itself; 0: it needs the home."""
    return subscription.max_in_flight // count


def share_of_rate(subscription: Subscription, count: int) -> tuple[float, int]:
    """Rate per second and burst that one of `count` shards may use by itself."""
    return subscription.rate_per_s / count, max(1, subscription.rate_burst // count)


class Standing:
    """How the home stands with the other shards."""

    def __init__(self, own: int, count: int, now_ms: int) -> None:
        self.count = count
        self._begun_ms = now_ms
        self._lost_ms: list[int | None] = [None] * count
        """None: not since the home has begun."""
        self.unknown = {shard: None for shard in range(count) if shard != own}
        """Shards that are not linked, or have not said since then how much they have out."""

    def know(self, shard: int) -> None:
        """A shard is linked, and has said how much it has out."""
        self.unknown.pop(shard, None)

    def lose(self, shard: int, now_ms: int) -> None:
        """A shard is not linked any more."""
        if shard not in self.unknown:
            self.unknown[shard] = None
            self._lost_ms[shard] = now_ms

    def may_have_out(self, shard: int, had: int, subscription: Subscription, now_ms: int) -> int:
        """How many places an unknown shard may have taken. `had`: when it was lost."""
        share = share_of_places(subscription, self.count)
        lost_ms = self._lost_ms[shard]
        if lost_ms is None:
            is_met = now_ms >= self._begun_ms + MEET_MS
            return share if is_met else subscription.max_in_flight
        return max(share, had) if now_ms < lost_ms + quiet_ms(subscription) else share


@dataclass(slots=True)
class _Ask:
    places: int = 0
    rows: int = 0

    def add(self, places: int, rows: int) -> None:
        self.places = max(0, self.places + places)
        # Rows without a place are of no use.
        self.rows = max(self.places, self.rows + rows) if self.places else 0


class Grant(NamedTuple):
    """The part of its ask that a shard is given."""

    shard: int
    places: int
    rows: int


class Allotment:
    """How much of the limits of one webhook is out, and which shards wait for them."""

    def __init__(self, standing: Standing) -> None:
        self.subscription: Subscription | None = None
        """None: it is not known here, or not yet; then nothing is granted."""
        self._standing = standing
        self._bucket: TokenBucket | None = None
        self._out = [0] * standing.count
        self._recalled = [0] * standing.count
        """How many of these were called back."""
        self._asks: OrderedDict[int, _Ask] = OrderedDict()

    @property
    def out(self) -> Sequence[int]:
        """The places of each shard that are out."""
        return self._out

    @property
    def is_idle(self) -> bool:
        """Whether nothing is out, and nobody waits."""
        return not self._asks and not any(self._out)

    def define(self, subscription: Subscription | None) -> None:
        """Its limits are others from now on. Places that are out stay out."""
        before, self.subscription = self.subscription, subscription
        if subscription is None or not subscription.rate_per_s:
            self._bucket = None
            return
        is_other = before is None or (before.rate_per_s, before.rate_burst) != (
            subscription.rate_per_s,
            subscription.rate_burst,
        )
        if is_other:
            self._bucket = TokenBucket(*self._rate(subscription))

    def _rate(self, subscription: Subscription) -> tuple[float, int]:
        """The rate and the burst of the known shards together: the others may use their shares."""
        unknown, count = len(self._standing.unknown), self._standing.count
        rate_per_s, burst = share_of_rate(subscription, count)
        return (
            subscription.rate_per_s - unknown * rate_per_s,
            max(1, subscription.rate_burst - unknown * burst),
        )

    def on_standing(self, now_ms: int) -> None:
        """A shard is known from now on, or not any more."""
        if self._bucket is not None:
            assert self.subscription is not None
            self._bucket.change(*self._rate(self.subscription), now_ms / 1000)

    def hold(self, shard: int, places: int) -> None:
        """A shard that was linked says how many places it has out."""
        self._out[shard] = places

    def lose(self, shard: int) -> None:
        """A shard is not linked any more, and waits for nothing."""
        self._asks.pop(shard, None)
        self._recalled[shard] = 0

    def ask(self, shard: int, places: int, rows: int) -> None:
        """A shard wants so much more; less than 0: so much less, as far as it was not granted."""
        ask = self._asks.setdefault(shard, _Ask())
        ask.add(places, rows)
        if not ask.places:
            del self._asks[shard]

    def give_back(self, shard: int, places: int, rows: int, now_ms: int) -> None:
        """Requests of a shard have ended, or are not made."""
        self._out[shard] = max(0, self._out[shard] - places)
        self._recalled[shard] = max(0, self._recalled[shard] - places)
        if rows and self._bucket is not None:
            self._bucket.give_back(rows, now_ms / 1000)

    def grant(self, now_ms: int) -> list[Grant]:
        """Give the shards that wait the places that are free."""
        if not self._asks or self.subscription is None:
            return []
        unknown = self._standing.unknown
        free = self._for_known(self.subscription, now_ms)
        free -= sum(had for shard, had in enumerate(self._out) if shard not in unknown)
        rows = NO_LIMIT
        if self._bucket is not None:
            rows = self._bucket.available(now_ms / 1000)
        granted: dict[int, _Ask] = {}
        while self._asks and free > 0 and rows > 0:
            waiting = len(self._asks)
            places_each, rows_each = max(1, free // waiting), max(1, rows // waiting)
            # The shard that has the least is first, else another one would have to give it back.
            for shard in sorted(self._asks, key=self._out.__getitem__):
                ask = self._asks[shard]
                if not free or not rows:
                    break
                size = -(-ask.rows // ask.places)
                for_rows = min(ask.rows, rows, rows_each, min(ask.places, places_each) * size)
                places = -(-for_rows // size)
                free -= places
                rows -= for_rows
                self._out[shard] += places
                granted.setdefault(shard, _Ask()).add(places, for_rows)
                ask.add(-places, -for_rows)
                if ask.places:
                    self._asks.move_to_end(shard)
                else:
                    del self._asks[shard]
        grants = [Grant(shard, of.places, of.rows) for shard, of in granted.items()]
        if self._bucket is not None:
            self._bucket.take(sum(one.rows for one in grants), now_ms / 1000)
        return grants

    def recall(self, now_ms: int) -> list[tuple[int, int]]:
        """Shards that are to give back places as soon as they can, and how many; after `grant`."""
        if not self._asks or self.subscription is None or self.wait_s(now_ms):
            return []
        unknown, out = self._standing.unknown, self._out
        claims = [n for n, had in enumerate(out) if (had or n in self._asks) and n not in unknown]
        most = self._for_known(self.subscription, now_ms)
        if most <= 0:
            return []
        if most < len(claims):
            # There is not one for each: whoever's request ends first leaves its place.
            missing, least = sum(out), 0
        else:
            least = most // len(claims)
            missing = sum(
                min(ask.places, least - out[shard])
                for shard, ask in self._asks.items()
                if out[shard] < least
            ) - sum(self._recalled)
        recalls = []
        for shard in sorted(claims, key=out.__getitem__, reverse=True):
            places = min(missing, out[shard] - self._recalled[shard] - least)
            if places > 0:
                missing -= places
                self._recalled[shard] += places
                recalls.append((shard, places))
        return recalls

    def _for_known(self, subscription: Subscription, now_ms: int) -> int:
        """How many places there are for the shards whose requests are known."""
        standing = self._standing
        return subscription.max_in_flight - sum(
            standing.may_have_out(shard, self._out[shard], subscription, now_ms)
            for shard in standing.unknown
        )

    def wait_s(self, now_ms: int) -> float:
        """How long until the rate lets somebody go on who waits; 0: nobody waits for that."""
        if not self._asks or self._bucket is None:
            return 0.0
        return self._bucket.wait_s(now_ms / 1000)
