"""How many a second: a token bucket.

The bucket holds up to `burst` and fills with `rate_per_s`. Who takes more than it holds overdraws
it, and waits until that is paid back: a batch that is larger than the burst is possible, and the
rate is kept over time all the same. A moment that lies before one that was seen earns nothing: who
looked at the clock first may ask last.

Cost: a few float operations; nothing runs while nobody asks. Threads: belongs to one thread. Time
is an argument, from a clock that nobody sets.
"""

from typing import Protocol


class Rate(Protocol):
    """What says how many may leave now."""

    def available(self, now_s: float) -> int:
        """How many can be taken now."""
        ...

    def take(self, count: int, now_s: float) -> None:
        """They are taken."""
        ...

    def wait_s(self, now_s: float) -> float:
        """How long until one can be taken, if only time has to pass; 0: it can be now, or time
        alone does not help."""
        ...


class TokenBucket:
    """Full in the beginning."""

    __slots__ = ("_burst", "_level", "_rate_per_s", "_seen_s")

    def __init__(self, rate_per_s: float, burst: float) -> None:
        assert rate_per_s > 0, rate_per_s
        assert burst >= 1, burst
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._level = burst
        self._seen_s: float | None = None

    def wait_s(self, now_s: float) -> float:
        """How long until one can be taken; 0: now."""
        self._fill(now_s)
        return 0.0 if self._level >= 1 else (1 - self._level) / self._rate_per_s

    def available(self, now_s: float) -> int:
        """How many can be taken now without overdrawing it."""
        self._fill(now_s)
        return max(0, int(self._level))

    def take(self, count: int, now_s: float) -> None:
        """Take that many, more than there are if need be."""
        self._fill(now_s)
        self._level -= count

    def give_back(self, count: int, now_s: float) -> None:
        """Put back what was taken, and not used."""
        self._fill(now_s)
        self._level = min(self._burst, self._level + count)

    def change(self, rate_per_s: float, burst: float, now_s: float) -> None:
        """From now on it fills with another rate, up to another burst; what it holds it keeps."""
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
