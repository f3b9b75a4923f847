"""Catch-up: rows that fell due while no receiver could have them leave evenly over a while.

After downtime or a pause everything is due at once. With `spread` the n-th of N such rows leaves
after n/N of the time, so that a receiver sees a steady rate. Rows that fall due from then on leave
on time beside them. Worked example: 4 rows over 10 s leave at 0, 2.5, 5 and 7.5 s.

Rows may still be added while others leave (they fire in slices): all that are known at a moment
count in the share that may have left by then.

None of this is recorded. Rows that have left and are settled stand in the logs; after a restart the
rest is behind again, and is spread again.

Cost: O(1). Threads: belongs to the event loop. Time is an argument, from a clock that nothing sets.
"""


class Pace:
    """How many of the rows that are behind may have left."""

    __slots__ = ("_left", "_over_ms", "_since_ms", "_total")

    def __init__(self, over_ms: int, since_ms: int | None = None) -> None:
        """`since_ms`: when the time begins; None: when it is asked for the first row."""
        assert over_ms > 0, over_ms
        self._over_ms = over_ms
        self._since_ms = since_ms
        self._total = 0
        self._left = 0

    def add(self, count: int) -> None:
        """So many more rows are behind."""
        self._total += count

    def allowance(self, now_ms: int) -> int:
        """How many may leave now."""
        if not self._total:
            return 0
        if self._since_ms is None:
            self._since_ms = now_ms
        elapsed_ms = now_ms - self._since_ms
        share = self._total * elapsed_ms // self._over_ms + 1
        return max(0, min(self._total, share) - self._left)

    def spend(self, count: int) -> None:
        """Count rows that leave against the allowance."""
        self._left += count
        assert self._left <= self._total, (self._left, self._total)

    def put_back(self, count: int) -> None:
        """Rows that left are behind again: as many of them as this pace has seen leaving may leave
        at once."""
        back = min(count, self._left)
        self._left -= back
        self._total += count - back

    def next_ms(self, now_ms: int) -> int:
        """When the allowance grows, if there is more to come."""
        known = self._left + self.allowance(now_ms)
        since_ms = now_ms if self._since_ms is None else self._since_ms
        return since_ms + -(-known * self._over_ms // max(1, self._total))
