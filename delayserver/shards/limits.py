"""Limits that hold for all shards together: how many requests of a webhook are out, and its rate.

    queue ── want ──▶ permit ── ask ──▶ home ── grant ──▶ permit ──▶ pump ──▶ requests
                        ▲ └─── back ──▶  │                                       │
                        └─── recall ─────┘   a place that ended is used again ◀──┘

Each webhook has a home, the shard `subscription_id % count`. A shard asks it for places for its
requests, and uses a place again as long as it has something to send. A place that it has no use for
goes back at once, so a shard that sends alone has all places. When other shards wait, the home
calls back the places that a shard has beyond its part. A row of the rate is used once, so with a
rate each request is asked for, and its place goes back when it has ended. All changes of one turn
of the event loop go in one notice to each shard; at the home itself no notice is needed.

A shard that is not linked to the home may use a share by itself: `max_in_flight // count` places,
and its part of the rate with its part of the burst. The home counts that share as taken meanwhile.
If the limit is smaller than the number of shards, the share is 0: the shard waits for its home.

The limit holds in between, too. When a link is lost, a shard may go on with as many places as it
had, up to its share; all of the share it has when every request that was out then must have ended:
after the timeout of the subscription and QUIET_MS. (A request may wait longer for a connection or
for the disk; that time is not added.) A home that has begun waits until it has heard of all shards,
or for MEET_MS. A home that has lost a shard counts that shard's places until its requests must have
ended. A link is lost when a process ends, and a receiver may still be at work for it, so nothing is
given away earlier.

The rows of a batch are tokens of the rate, and the batch is one place. To spread the rows that are
late (`catch_up`) and to drop old ones is up to each shard: all of them spread over the same time.

Cost: 2 µs for each of eight requests that end in a turn and whose places are used again, 15 µs for
one alone. Where each is asked for, in both processes together, 10 and 60 µs. (Measured on a busy
machine, on which a webhook takes 110 to 300 µs in all.) Threads: belongs to the event loop.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final, NamedTuple, Protocol

import msgspec

from delayserver.records.subscriptions import Subscription
from delayserver.shards.allotment import (
    MEET_MS,
    NO_LIMIT,
    Allotment,
    Standing,
    quiet_ms,
    share_of_places,
    share_of_rate,
)
from delayserver.shards.peers import Peers
from delayserver.timers.rates import TokenBucket

HOLD: Final = "limits.hold"
ASK: Final = "limits.ask"
GRANT: Final = "limits.grant"
RECALL: Final = "limits.recall"
WAKE_MIN_S: Final = 0.001


class Loop(Protocol):
    """The methods of an event loop that are used here."""

    def call_soon(self, function: Callable[[], None]) -> object:
        """Have a function called in another turn."""

    def call_later(self, delay: float, function: Callable[[], None]) -> object:
        """Have a function called after so many seconds."""


class LimitCalls(Protocol):
    """The methods of the shard that are used here."""

    def definition(self, subscription_id: int) -> Subscription | None:
        """A subscription as it is in force."""

    def pump(self, subscription_id: int) -> None:
        """Let rows leave the queue of a subscription as far as it may now."""

    def stopwatch(self) -> int:
        """Milliseconds of a clock that nobody sets."""


class _Change(NamedTuple):
    """A notice of a shard to the home of a subscription."""

    subscription_id: int
    places: int
    """Wanted more; less than 0: less."""
    rows: int
    places_back: int
    rows_back: int


class _Granted(NamedTuple):
    subscription_id: int
    places: int
    rows: int


_encode = msgspec.msgpack.Encoder().encode
_decode_held = msgspec.msgpack.Decoder(dict[int, int]).decode
_decode_changes = msgspec.msgpack.Decoder(list[_Change]).decode
_decode_grants = msgspec.msgpack.Decoder(list[_Granted]).decode
_decode_recalls = msgspec.msgpack.Decoder(list[tuple[int, int]]).decode


class _Permit:
    """A `Permit` of this shard."""

    __slots__ = (
        "_limits",
        "asked_places",
        "asked_rows",
        "bucket",
        "home",
        "is_linked",
        "places",
        "recalled",
        "rows",
        "spare",
        "subscription",
        "used",
    )

    def __init__(
        self, limits: "Limits", subscription: Subscription, home: int, used: Callable[[], int]
    ) -> None:
        self._limits = limits
        self.subscription = subscription
        self.home = home
        self.used = used
        self.is_linked = False
        """Whether the home counts; else the share does."""
        self.places = 0
        self.spare = 0
        """How many of these were granted for requests that were not made yet."""
        self.recalled = 0
        """How many of these go back as soon as requests have ended."""
        self.rows = 0
        """Granted by a rate, and not used."""
        self.asked_places = 0
        self.asked_rows = 0
        self.bucket: TokenBucket | None = None
        """The share of the rate, where the home is away."""

    def available(self, now_s: float) -> int:
        if self.is_linked:
            return self.rows if self.subscription.rate_per_s else NO_LIMIT
        return NO_LIMIT if self.bucket is None else self.bucket.available(now_s)

    def reserve(self, count: int, now_s: float) -> None:
        if self.is_linked:
            self.rows = max(0, self.rows - count)
        elif self.bucket is not None:
            self.bucket.take(count, now_s)

    def spend(self, count: int, now_s: float) -> None:
        """They were taken when they were reserved."""

    def release(self, count: int, now_s: float) -> None:
        if self.is_linked:
            self.rows += count if self.subscription.rate_per_s else 0
        elif self.bucket is not None:
            self.bucket.give_back(count, now_s)

    def wait_s(self, now_s: float) -> float:
        return 0.0 if self.bucket is None else self.bucket.wait_s(now_s)

    def want(self, places: int, rows: int) -> None:
        if not self.is_linked:
            return
        unused = max(0, self.places - self.used())
        if self.subscription.rate_per_s:
            # A place is of no use without rows, and those come with places.
            self.spare = min(self.spare, unused) if self.rows else 0
        else:
            ended = unused - min(self.spare, unused)
            self.spare = min(unused - min(ended, self.recalled), places)
        back = unused - self.spare
        self._lessen(back)
        places = max(0, places - self.spare - self.asked_places)
        rows = max(places, rows - self.rows - self.asked_rows) if places else 0
        self.asked_places += places
        self.asked_rows += rows
        if places or back:
            self._limits.tell(self, (places, rows, back, 0), goes_on=True)

    def keep(self, *, for_next: bool) -> None:
        if not self.is_linked:
            return
        unused = max(0, self.places - self.used())
        if for_next:
            self.spare = min(self.spare, unused)
            return
        rows, self.rows, self.spare = self.rows, 0, 0
        if unused or rows:
            self._lessen(unused)
            self._limits.tell(self, (0, 0, unused, rows))

    def _lessen(self, places: int) -> None:
        self.places -= places
        self.recalled = max(0, self.recalled - places)

    def give_up(self) -> None:
        """The subscription is gone: want nothing more, and give back the unused places. Requests
        that are out count until they must have ended: another shard may still send to it."""
        if self.is_linked:
            used = self.used()
            wanted, unused = (-self.asked_places, -self.asked_rows), max(0, self.places - used)
            self._limits.tell(self, (*wanted, unused, self.rows))
            if used:
                self._limits.give_back_later(self, used)

    def on_grant(self, places: int, rows: int) -> None:
        self.places += places
        self.spare += places
        if self.subscription.rate_per_s:
            self.rows += rows
        self.asked_places = max(0, self.asked_places - places)
        self.asked_rows = max(0, self.asked_rows - rows) if self.asked_places else 0

    def on_recall(self, places: int) -> None:
        self.recalled = min(self.places, self.recalled + places)

    def link(self) -> int:
        """The home counts from now on; how many places are out."""
        self._clear()
        self.is_linked, self.bucket = True, None
        self.places = self.used()
        return self.places

    def part(self, count: int, *, is_quiet: bool, now_s: float) -> None:
        """The share counts from now on, one of `count`; unless it is quiet, only as far as places
        were granted before."""
        share = share_of_places(self.subscription, count)
        self.places = share if is_quiet else min(share, self.places)
        if self.is_linked or self.bucket is None:
            self.share_rate(count, now_s)
        self.is_linked = False
        self._clear()

    def share_rate(self, count: int, now_s: float) -> None:
        """Begin with nothing: this home does not know how much the one before it has given away."""
        self.bucket = None
        if self.subscription.rate_per_s:
            rate_per_s, burst = share_of_rate(self.subscription, count)
            self.bucket = TokenBucket(rate_per_s, burst)
            self.bucket.take(burst, now_s)

    def _clear(self) -> None:
        self.spare = self.recalled = self.rows = self.asked_places = self.asked_rows = 0


class Limits:
    """`Permits` of one shard, and the home of some subscriptions."""

    def __init__(self, peers: Peers, calls: LimitCalls, loop: Loop) -> None:
        self._peers = peers
        self._calls = calls
        self._loop = loop
        self._permits: dict[int, _Permit] = {}
        begun_ms = calls.stopwatch()
        self._away_ms: dict[int, int] = {
            shard: begun_ms for shard in range(peers.count) if shard != peers.own
        }
        """Since when each shard that is not linked is away."""
        self._told: defaultdict[int, dict[int, list[int]]] = defaultdict(dict)
        """Changes that other homes hear of at the end of this turn, by home and subscription."""
        self._grants: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
        """Places that other shards are granted at the end of this turn."""
        self._recalls: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        """Places that are called back from them."""
        self._is_flush_asked = False
        self._pumps: set[int] = set()
        # At the home:
        self._standing = Standing(peers.own, peers.count, begun_ms)
        self._allotments: dict[int, Allotment] = {}
        self._waking: set[int] = set()
        """Subscriptions that a timer looks at again when the rate allows it."""
        for topic, heard in (
            (HOLD, self._on_held),
            (ASK, self._on_asked),
            (GRANT, self._on_granted),
            (RECALL, self._on_recalled),
        ):
            peers.on_told(topic, heard)
        peers.on_change(self._on_change)
        loop.call_later(MEET_MS / 1000, self._grant_all)

    def _now_s(self) -> float:
        return self._calls.stopwatch() / 1000

    # ── for the queues of this shard ───────────────────────────────────────────────────────────

    def of(self, subscription: Subscription, used: Callable[[], int]) -> _Permit:
        home = subscription.id % self._peers.count
        permit = self._permits[subscription.id] = _Permit(self, subscription, home, used)
        if home in self._away_ms:
            self._part(permit)
        else:
            permit.is_linked = True
        return permit

    def define(self, subscription: Subscription) -> None:
        permit = self._permits.get(subscription.id)
        if permit is not None:
            if subscription.deleted:
                del self._permits[subscription.id]
                permit.give_up()
            else:
                self._redefine(permit, subscription)
        allotment = self._allotments.get(subscription.id)
        if allotment is not None and subscription.deleted:
            del self._allotments[subscription.id]
        elif allotment is not None:
            allotment.define(subscription)
            self._grant(subscription.id, allotment)

    def _redefine(self, permit: _Permit, subscription: Subscription) -> None:
        before, permit.subscription = permit.subscription, subscription
        if not permit.is_linked:
            limits = subscription.rate_per_s, subscription.rate_burst
            if limits != (before.rate_per_s, before.rate_burst):
                permit.share_rate(self._peers.count, self._now_s())
            self._part(permit)

    def tell(
        self, permit: _Permit, numbers: tuple[int, int, int, int], *, goes_on: bool = False
    ) -> None:
        """Send the home of a permit the places that are wanted and given back (`_Change`).
        `goes_on`: a place that it gets at once is used at once."""
        change = _Change(permit.subscription.id, *numbers)
        if permit.home == self._peers.own:
            self._take(self._peers.own, change, permit if goes_on else None)
        else:
            self._tell_soon(permit.home, change)

    def give_back_later(self, permit: _Permit, places: int) -> None:
        """Give back places of requests that nobody sees ending."""
        give_back = partial(self.tell, permit, (0, 0, places, 0))
        self._loop.call_later(quiet_ms(permit.subscription) / 1000, give_back)

    def _tell_soon(self, home: int, change: _Change) -> None:
        told = self._told[home]
        subscription_id, *numbers = change
        before = told.get(subscription_id)
        if before is None:
            told[subscription_id] = numbers
            self._flush_soon()
        else:
            told[subscription_id] = [a + b for a, b in zip(before, numbers, strict=True)]

    def _on_granted(self, home: int, notice: bytes) -> None:
        for subscription_id, places, rows in _decode_grants(notice):
            permit = self._permits.get(subscription_id)
            if permit is None:  # it was deleted meanwhile
                self._tell_soon(home, _Change(subscription_id, 0, 0, places, rows))
            else:
                permit.on_grant(places, rows)
                self._calls.pump(subscription_id)

    def _on_recalled(self, home: int, notice: bytes) -> None:
        for subscription_id, places in _decode_recalls(notice):
            permit = self._permits.get(subscription_id)
            if permit is not None:
                permit.on_recall(places)

    # ── links come and go ──────────────────────────────────────────────────────────────────────

    def _on_change(self, shard: int, is_there: bool) -> None:
        if is_there:
            del self._away_ms[shard]
            permits = [one for one in self._permits.values() if one.home == shard]
            held = {one.subscription.id: one.link() for one in permits}
            self._peers.tell(shard, HOLD, _encode({key: n for key, n in held.items() if n}))
        else:
            self._away_ms[shard] = self._calls.stopwatch()
            self._told.pop(shard, None)
            self._grants.pop(shard, None)
            self._recalls.pop(shard, None)
            self._on_lost(shard)
            permits = [one for one in self._permits.values() if one.home == shard]
            for permit in permits:
                self._part(permit)
        self._pump_soon(permit.subscription.id for permit in permits)

    def _part(self, permit: _Permit) -> None:
        """Let a permit go by its share, and by all of it when it is quiet."""
        away_ms = self._away_ms[permit.home]
        wait_ms = away_ms + quiet_ms(permit.subscription) - self._calls.stopwatch()
        permit.part(self._peers.count, is_quiet=wait_ms <= 0, now_s=self._now_s())
        if wait_ms > 0:
            self._loop.call_later(wait_ms / 1000, partial(self._on_quiet, permit, away_ms))

    def _on_quiet(self, permit: _Permit, away_ms: int) -> None:
        subscription_id = permit.subscription.id
        is_there = self._permits.get(subscription_id) is permit
        if is_there and self._away_ms.get(permit.home) == away_ms:
            self._part(permit)
            self._calls.pump(subscription_id)

    # ── at the home ────────────────────────────────────────────────────────────────────────────

    def _on_held(self, shard: int, notice: bytes) -> None:
        """A shard that was linked says how much it has out. It reports nothing else here."""
        held = _decode_held(notice)
        for subscription_id in held:
            self._allotment(subscription_id)
        for subscription_id, allotment in self._allotments.items():
            allotment.hold(shard, held.get(subscription_id, 0))
        self._standing.know(shard)
        self._stand()

    def _on_lost(self, shard: int) -> None:
        self._standing.lose(shard, self._calls.stopwatch())
        for subscription_id, allotment in self._allotments.items():
            allotment.lose(shard)
            if allotment.subscription is not None:
                # Then it may have less.
                again = partial(self._grant_again, subscription_id)
                self._loop.call_later(quiet_ms(allotment.subscription) / 1000, again)
        self._stand()

    def _stand(self) -> None:
        now_ms = self._calls.stopwatch()
        for subscription_id, allotment in list(self._allotments.items()):
            allotment.on_standing(now_ms)
            self._grant(subscription_id, allotment)
            self._forget_if_idle(subscription_id, allotment)

    def _on_asked(self, shard: int, notice: bytes) -> None:
        for change in _decode_changes(notice):
            self._take(shard, change)

    def _take(self, shard: int, change: _Change, goes_on: _Permit | None = None) -> None:
        subscription_id, places, rows, places_back, rows_back = change
        allotment = self._allotment(subscription_id)
        if places_back or rows_back:
            allotment.give_back(shard, places_back, rows_back, self._calls.stopwatch())
        if places:
            allotment.ask(shard, places, rows)
        self._grant(subscription_id, allotment, goes_on)
        self._forget_if_idle(subscription_id, allotment)

    def _allotment(self, subscription_id: int) -> Allotment:
        allotment = self._allotments.get(subscription_id)
        if allotment is None:
            allotment = self._allotments[subscription_id] = Allotment(self._standing)
            allotment.define(self._calls.definition(subscription_id))
        return allotment

    def _forget_if_idle(self, subscription_id: int, allotment: Allotment) -> None:
        """A subscription that is gone, or not here yet, once nobody has anything of it."""
        if allotment.subscription is None and allotment.is_idle:
            self._allotments.pop(subscription_id, None)

    def _grant_all(self) -> None:
        for subscription_id, allotment in self._allotments.items():
            self._grant(subscription_id, allotment)

    def _grant_again(self, subscription_id: int) -> None:
        self._waking.discard(subscription_id)
        allotment = self._allotments.get(subscription_id)
        if allotment is not None:
            self._grant(subscription_id, allotment)

    def _grant(
        self, subscription_id: int, allotment: Allotment, goes_on: _Permit | None = None
    ) -> None:
        """Give the shards that wait the free places. `goes_on`: its queue need not be pumped."""
        now_ms = self._calls.stopwatch()
        for shard, places, rows in allotment.grant(now_ms):
            if shard != self._peers.own:
                self._grants[shard].append((subscription_id, places, rows))
                self._flush_soon()
                continue
            permit = self._permits.get(subscription_id)
            if permit is None:
                allotment.give_back(shard, places, rows, now_ms)
                continue
            permit.on_grant(places, rows)
            if permit is not goes_on:
                self._pump_soon((subscription_id,))
        for shard, places in allotment.recall(now_ms):
            if shard != self._peers.own:
                self._recalls[shard].append((subscription_id, places))
                self._flush_soon()
            elif (permit := self._permits.get(subscription_id)) is not None:
                permit.on_recall(places)
        wait_s = allotment.wait_s(now_ms)
        if wait_s and subscription_id not in self._waking:
            self._waking.add(subscription_id)
            wait_s = max(wait_s, WAKE_MIN_S)
            self._loop.call_later(wait_s, partial(self._grant_again, subscription_id))

    # ── the end of a turn ──────────────────────────────────────────────────────────────────────

    def _pump_soon(self, subscription_ids: Iterable[int]) -> None:
        self._pumps.update(subscription_ids)
        if self._pumps:
            self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._is_flush_asked:
            self._is_flush_asked = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flush_asked = False
        pumps, self._pumps = self._pumps, set()
        for subscription_id in pumps:
            self._calls.pump(subscription_id)
        for home, told in self._told.items():
            changes = [(subscription_id, *change) for subscription_id, change in told.items()]
            self._peers.tell(home, ASK, _encode(changes))
        for shard, grants in self._grants.items():
            self._peers.tell(shard, GRANT, _encode(grants))
        for shard, recalls in self._recalls.items():
            self._peers.tell(shard, RECALL, _encode(recalls))
        self._told.clear()
        self._grants.clear()
        self._recalls.clear()
