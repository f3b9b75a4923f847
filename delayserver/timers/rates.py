"""How many a second: a token bucket.

The bucket holds up to `burst` and fills with `rate_per_s`. A caller that takes more than it holds
overdraws it, and waits until that is paid back: a batch that is larger than the burst is possible,
and the rate is kept over time all the same. A moment that lies before one that was seen earns
nothing, because two callers may have looked at the clock in the other order.

A request that is about to be sent reserves its tokens and spends them when its first byte leaves.
Reserved tokens stay in the bucket, which holds no more than its burst with them. So however long
twenty requests wait for a connection, no more than the burst leave when there is one.

    burst 2, 2 a second    reserve 2 ── 10 s without a connection: it holds 2, 0 are available ──
                           spend 2 ── 0 are available, 1 after half a second

Cost: a few float operations; nothing runs between two calls. Threads: belongs to one thread. Time
is an argument, from a clock that cannot be set.
"""

from typing import Protocol


class Rate(Protocol):
    """Says how many requests may leave now."""

    def available(self, now_s: float) -> int:
        """How many can be reserved now."""

    def reserve(self, count: int, now_s: float) -> None:
        """So many requests are about to leave."""

    def spend(self, count: int, now_s: float) -> None:
        """So many of the reserved ones leave."""

    def release(self, count: int, now_s: float) -> None:
        """So many of the reserved ones do not leave."""

    def wait_s(self, now_s: float) -> float:
        """How long until one token can be reserved, if only time has to pass; 0: it can be now, or
        time alone does not help."""


class TokenBucket:
    """The bucket is full in the beginning."""

    __slots__ = ("_burst", "_level", "_rate_per_s", "_reserved", "_seen_s")

    def __init__(self, rate_per_s: float, burst: float) -> None:
        assert rate_per_s > 0, rate_per_s
        assert burst >= 1, burst
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._level = burst
        self._reserved = 0
        self._seen_s: float | None = None

    def wait_s(self, now_s: float) -> float:
        """How long until one token can be taken or reserved, if only time has to pass; else 0."""
        self._fill(now_s)
        left = self._level - self._reserved
        if left >= 1 or (self._reserved and self._burst - self._reserved < 1):
            return 0.0
        return (1 - left) / self._rate_per_s

    def available(self, now_s: float) -> int:
        """How many tokens can be taken now without overdrawing the bucket."""
        self._fill(now_s)
        return max(0, int(self._level - self._reserved))

    def take(self, count: int, now_s: float) -> None:
        """Take that many tokens, more than there are if need be."""
        self._fill(now_s)
        self._level -= count

    def reserve(self, count: int, now_s: float) -> None:
        """Keep that many tokens for requests about to leave, more than there are if need be."""
        self._fill(now_s)
        self._reserved += count

    def spend(self, count: int, now_s: float) -> None:
        """Take that many of the reserved tokens."""
        self.release(count, now_s)
        self.take(count, now_s)

    def release(self, count: int, now_s: float) -> None:
        """Give back that many of the reserved tokens, which are not used."""
        self._reserved -= count
        assert self._reserved >= 0, self._reserved

    def give_back(self, count: int, now_s: float) -> None:
        """Put back tokens that were taken, and not used."""
        self._fill(now_s)
        self._level = min(self._burst, self._level + count)

    def change(self, rate_per_s: float, burst: float, now_s: float) -> None:
        """Change the rate at which it fills, and its burst; it keeps the tokens it holds."""
        assert rate_per_s > 0, rate_per_s
        assert burst >= 1, burst
        self._fill(now_s)
        self._rate_per_s, self._burst = rate_per_s, burst
        self._level = min(burst, self._level)

    def _fill(self, now_s: float) -> None:
        if self._seen_s is None:
            self._seen_s = now_s
        elif now_s > self._seen_s:
            earned = (now_s - self._seen_s) * self._rate_per_s
            self._level = min(self._burst, self._level + earned)
            self._seen_s = now_s
