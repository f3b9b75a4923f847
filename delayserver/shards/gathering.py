"""A pull that takes of all shards: it waits for so many, takes a part of each, and is answered.

    wait ──▶ enough in all of them, or time is up ──▶ a part of each that has something, all at once
      ▲                                                    │
      └── too few, and time is left: given back ◀──────────┴──▶ enough ──▶ answered ──▶ handed

A message that a shard has announced may be gone when it is asked for, since other consumers pull,
too. Then the pull waits on, behind the others. If other pulls may be doing the same, each shard
waits for a different time: otherwise two pulls that each want more than half of the messages would
take them from one another for ever.

One shard after the other would be simpler, but takes a hop for each. So all are asked at once, each
for no more than it has announced, within the rest of `max`, and they share the bytes of an answer.

A shard that does not answer delays a pull by a second at most: a part that is late goes back.

Cost: 30 µs more than by a server alone, and 60 µs for each other shard that has something.
Threads: belongs to the event loop.
"""

from collections.abc import Sequence
from functools import partial
from typing import Final

from delayserver.api.documents import encode_messages, encode_pulled, join_messages
from delayserver.api.hot.consume import AnswerCallback, Cancel, PullCall
from delayserver.delivery.delayed_fetch import DelayedFetch, Pulled, PullRequest
from delayserver.errors import StoppingError
from delayserver.records.subscriptions import Subscription
from delayserver.server.calls import Calls
from delayserver.shards.demand import ArrivedPart, Demand
from delayserver.wire.pulls import AckedDocument

LATE_MS: Final = 100
"""A pull that has enough messages waits no longer for more."""
LOST_MS: Final = 1_000
"""A pull that has too few waits no longer for a shard that does not answer."""
APART_MS_MAX: Final = 100
"""The longest time between two tries of a pull that gets too few of the messages that are there."""


class PullSources:
    """Where the pulls of one shard take messages from: itself, and the others."""

    def __init__(self, calls: Calls, own: int, count: int, demand: Demand) -> None:
        self.calls = calls
        self.own = own
        self.count = count
        self.demand = demand

    def total(self, subscription_id: int) -> int | None:
        """How much there is in all shards; None: nothing will leave any more."""
        own = self.calls.consumers.ready(subscription_id)
        if own is None:
            return None
        subscription = self.calls.registry.by_id(subscription_id)
        assert subscription is not None
        return 0 if subscription.paused else own + self.demand.total(subscription_id)

    def shares(self, subscription_id: int, most: int) -> list[tuple[int, int]]:
        """Which shards have something, and how much each is to give; each time another one is
        first, so that none is left out where there is always more."""
        if not self.total(subscription_id):
            return []
        there = {
            **self.demand.counts(subscription_id),
            self.own: self.calls.consumers.ready(subscription_id) or 0,
        }
        first = self.demand.next_turn(subscription_id)
        shares = []
        for shard in sorted(there, key=lambda shard: (shard - first) % self.count):
            if (share := min(there[shard], most)) > 0:
                shares.append((shard, share))
                most -= share
        return shares


class _Round:
    """Parts that are on their way to one pull."""

    def __init__(self, shares: Sequence[tuple[int, int]]) -> None:
        self.order = [shard for shard, _ in shares]
        self.missing = len(shares)
        self.own: Pulled | None = None
        self.own_fetch: DelayedFetch | None = None
        """The read of the own part, while it lasts."""
        self.taken: list[ArrivedPart] = []
        self.is_cut = False
        """Some shard had more than the bytes that it may give."""
        self.waits_ms = 0
        self.stop_waiting: Cancel | None = None
        self.is_closed = False
        """Parts that come from now on go back."""

    @property
    def own_count(self) -> int:
        """How many messages there are of the own shard."""
        return 0 if self.own is None or self.own.deliveries is None else len(self.own.deliveries)

    @property
    def count(self) -> int:
        """How many there are by now."""
        return self.own_count + sum(taken.part.count for taken in self.taken)

    def close(self) -> None:
        """Take nothing more."""
        self.is_closed = True
        if self.stop_waiting is not None:
            self.stop_waiting()
        if self.own_fetch is not None:
            self.own_fetch.cancel()


class Gathering:
    """One pull."""

    def __init__(
        self,
        sources: PullSources,
        subscription: Subscription,
        asked: PullCall,
        tell: AnswerCallback,
    ) -> None:
        self._sources = sources
        self._calls = sources.calls
        self._subscription = subscription
        self._asked = asked
        self._tell: AnswerCallback | None = tell
        self._deadline_ms = self._calls.stopwatch() + asked.wait_ms
        self._tries = 0
        self._has_begun = False
        self._fetch: DelayedFetch | None = None
        self._round: _Round | None = None
        self._acked: AckedDocument | None = None
        self.is_acking = False
        """Leases came with the pull: it is answered after their results are known."""

    def begin(self) -> None:
        """Begin to wait, unless it was refused already."""
        if self._tell is None:
            return
        self._has_begun = True
        self._sources.demand.begin(self._subscription.id)
        self._wait()

    def acknowledged(self, acked: AckedDocument) -> None:
        """Take the results of the leases that came with the pull."""
        self._acked, self.is_acking = acked, False
        if self._round is not None and self._round.is_closed:
            self._judge(self._round)

    def refuse(self, error: Exception) -> None:
        """It cannot be answered."""
        tell = self._tell
        self.cancel()
        if tell is not None:
            tell(error)

    def cancel(self) -> None:
        """The consumer is gone: take nothing more, and give back the messages that were taken."""
        if self._tell is None:
            return
        self._end()
        if self._fetch is not None:
            self._fetch.cancel()
            self._fetch = None
        if self._round is not None:
            self._give_back(self._round)

    def _end(self) -> None:
        # The callback knows this pull: a circle would be left to the garbage collector.
        self._tell = None
        if self._has_begun:
            self._sources.demand.end(self._subscription.id)

    # ── waiting ────────────────────────────────────────────────────────────────────────────────

    def _wait(self) -> None:
        if self._tell is None:
            return
        left_ms = max(0, self._deadline_ms - self._calls.stopwatch())
        most, least, _, lease_ms, subjects = self._asked
        request = PullRequest(most, lease_ms, left_ms, _not_answered, least, subjects)
        fetch = self._calls.consumers.wait(
            self._subscription, request, self._is_ready, self._complete
        )
        if not fetch.is_completed:
            self._fetch = fetch

    def _is_ready(self) -> bool:
        total = self._sources.total(self._subscription.id)
        return total is None or total >= self._asked.min_messages

    def _complete(self, fetch: DelayedFetch) -> None:
        self._fetch = None
        if self._tell is None:
            return
        demand, subscription_id = self._sources.demand, self._subscription.id
        own = self._calls.consumers.ready(subscription_id)
        is_enough = own is None or own >= self._asked.max_messages
        if is_enough or demand.is_known(subscription_id):
            self._take()
        else:
            demand.when_known(subscription_id, self._take)

    # ── taking ─────────────────────────────────────────────────────────────────────────────────

    def _take(self) -> None:
        if self._tell is None:
            return
        sources, asked = self._sources, self._asked
        shares = sources.shares(self._subscription.id, asked.max_messages)
        round_ = self._round = _Round(shares)
        max_bytes = self._calls.settings.answer_max_bytes // max(1, len(shares))
        for shard, count in shares:
            if shard != sources.own:
                told = partial(self._on_taken, round_)
                limits = count, max_bytes, asked.lease_ms, asked.subjects
                sources.demand.fetch(shard, self._subscription.id, *limits, told)
        for shard, count in shares:
            if shard == sources.own:
                self._take_own(round_, count, max_bytes)
        self._look(round_)

    def _take_own(self, round_: _Round, count: int, max_bytes: int) -> None:
        is_now = True

        def answer(pulled: Pulled) -> None:
            round_.own_fetch = None
            round_.own = pulled
            round_.is_cut |= round_.own_count < count
            round_.missing -= 1
            if not is_now:
                self._look(round_)

        request = PullRequest(
            count,
            self._asked.lease_ms,
            0,
            answer,
            subjects=self._asked.subjects,
            max_bytes=max_bytes,
        )
        try:
            fetch = self._calls.consumers.pull(self._subscription, request)
        except StoppingError:  # after a failed sync; its queue is not drained any more
            round_.missing -= 1
            return
        is_now = False
        if round_.own is None:
            round_.own_fetch = fetch

    def _on_taken(self, round_: _Round, taken: ArrivedPart | None) -> None:
        """A part of another shard has come; None: it had nothing left."""
        if round_.is_closed:
            if taken is not None:
                self._sources.demand.back(taken)
            return
        if taken is not None:
            round_.taken.append(taken)
            round_.is_cut |= taken.part.is_cut
        round_.missing -= 1
        self._look(round_)

    def _look(self, round_: _Round) -> None:
        """All parts have come, or how long are the others waited for?"""
        if not round_.missing:
            self._close(round_)
            return
        waits_ms = LATE_MS if round_.count >= self._asked.min_messages else LOST_MS
        if waits_ms != round_.waits_ms:
            if round_.stop_waiting is not None:
                round_.stop_waiting()
            round_.waits_ms = waits_ms
            round_.stop_waiting = self._calls.after(waits_ms, partial(self._close, round_))

    def _close(self, round_: _Round) -> None:
        if not round_.is_closed:
            round_.close()
            self._judge(round_)

    # ── answering ──────────────────────────────────────────────────────────────────────────────

    def _judge(self, round_: _Round) -> None:
        """Is it enough?"""
        # With a link that has ended, the leases are over.
        round_.taken = [one for one in round_.taken if self._sources.demand.is_held(one)]
        is_enough = round_.count >= self._asked.min_messages or (round_.is_cut and round_.count)
        is_last = (
            self._calls.stopwatch() >= self._deadline_ms
            or self._sources.total(self._subscription.id) is None
        )
        if not is_enough and not is_last:
            self._wait_on(round_)
        elif not self.is_acking:
            self._answer(round_)

    def _wait_on(self, round_: _Round) -> None:
        was_some = round_.count > 0
        self._give_back(round_)
        total = self._sources.total(self._subscription.id)
        if not was_some and (total is None or total < self._asked.min_messages):
            self._calls.call_soon(self._wait)
            return
        self._tries += 1
        apart_ms = min(self._tries * (self._sources.own + 1), APART_MS_MAX)
        left_ms = self._deadline_ms - self._calls.stopwatch()
        self._calls.after(min(apart_ms, left_ms), self._wait)

    def _give_back(self, round_: _Round) -> None:
        self._round = None
        round_.close()
        for taken in round_.taken:
            self._sources.demand.back(taken)
        if round_.own is not None and round_.own.lease_prefix:
            self._calls.consumers.give_back(round_.own.lease_prefix)

    def _answer(self, round_: _Round) -> None:
        tell, demand = self._tell, self._sources.demand
        assert tell is not None
        self._round = None
        self._end()
        try:
            document = self._encode(round_)
        except Exception as error:  # told to whoever asked
            for taken in round_.taken:
                demand.back(taken)
            tell(error)
            return
        tell(document)
        for taken in round_.taken:
            demand.handed(taken)

    def _encode(self, round_: _Round) -> bytes:
        own = round_.own or Pulled()
        if not round_.taken:
            return encode_pulled(own, self._acked)
        parts = {taken.shard: taken.part.messages for taken in round_.taken}
        parts[self._sources.own] = encode_messages(own)
        return join_messages((parts.get(shard, b"") for shard in round_.order), self._acked)


def _not_answered(pulled: Pulled) -> None:
    raise AssertionError("a pull that waits for several shards is answered by its gathering")
