"""The hierarchical timing wheel: wheels of growing ticks, advanced by a queue of buckets.

Source: Varghese and Lauck 1987, scheme 7, as Kafka's TimingWheel and SystemTimer have it.

Algorithm
    Level 0 has ``slot_count`` buckets of one tick. A bucket of level *k* spans a whole revolution
    of level *k - 1*, that is ``slot_count ** k`` ticks: 20 ms, 400 ms, 8 s, 160 s, 53 min, 18 h for
    the revolutions of the default, so seven levels reach two weeks and nine reach 16 years. A level
    is made when the first timer needs it.

    A timer goes into the lowest level whose running revolution holds its tick. A bucket is reused
    in every revolution: putting a timer into it compares the bucket's expiration, the tick at
    which it begins, with the one that the timer asks for. If it differs, the bucket is empty and
    out of date; it gets the new expiration and enters the delay queue, a heap by expiration. If it
    is equal the bucket is in the queue already. So the queue holds each bucket at most once, and
    is as long as there are buckets in use, not timers.

    Advancing polls the queue. A bucket of level 0 is due as a whole and is handed over as it is.
    Any other is dissolved: the clock stands at the beginning of its span, so its timers are placed
    anew and come to lie at least one level lower (demotion), or are due. Ticks without a bucket
    are never looked at: an empty hour, or year, costs one look at the heap.

    A wheel here ends with its revolution, while Kafka's slides on with the clock (it takes whatever
    is due less than one interval from now). Sliding places a timer that is due just behind a
    boundary one level lower, which saves it one demotion; in exchange timers of the same tick may
    lie in different levels, and the one that was added later can fire first. With fixed
    revolutions all timers of a tick are in the same bucket at any time, so they fire in the order
    of their adding, and no two queued buckets have the same expiration.

Cost
    With m levels: add O(m), in fact m comparisons and one append; cancel O(1), an unlink; a timer
    is demoted at most m - 1 times in its life. m grows with the logarithm of the longest delay, not
    with the number of timers. Each bucket that is used costs a push and a pop on a heap of at most
    ``m * slot_count``, however many timers it holds. A bucket that lost all its timers to cancels
    stays queued and is polled empty at its time.

Threads
    One owner; see ``interface``.

Example: ``HierarchicalTimer(start_ms=0, tick_ms=1, slot_count=3)``
    Level 0 has buckets of 1 tick, level 1 of 3 (revolution 9), level 2 of 9 (revolution 27).
    A bucket is written as the ticks that it spans.

    ====================  ======================================  ===============================
    call                  buckets in use (the delay queue)        what happens
    ====================  ======================================  ===============================
    add a, 2              2:[a]                                   level 0 holds ticks 0 to 2
    add b, 4; add c, 5    2:[a] 3-5:[b c]                         level 1 holds ticks 0 to 8
    add d, 13             2:[a] 3-5:[b c] 9-17:[d]                level 2 is made
    advance_clock(2)      3-5:[b c] 9-17:[d]                      a fires
    advance_clock(3)      4:[b] 5:[c] 9-17:[d]                    3-5 is dissolved into level 0
    add e, 2 (due 5)      4:[b] 5:[c e] 9-17:[d]                  behind c, which came first
    advance_clock(8)      9-17:[d]                                b fires at 4, c and e at 5
    advance_clock(9)      12-14:[d]                               d goes down to level 1
    advance_clock(12)     13:[d]                                  and to level 0
    advance_clock(13)                                             d fires
    ====================  ======================================  ===============================
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush

from delayserver.timers.chain import Chain, ChainEntry
from delayserver.timers.interface import ErrorHandler
from delayserver.timers.wheel import WheelTimer

NOT_QUEUED = -1


class Bucket(Chain[ChainEntry]):
    """The timers of one span of ticks, and the tick at which that span begins."""

    __slots__ = ("expiration_tick", "span_ticks")

    def __init__(self, span_ticks: int) -> None:
        super().__init__()
        self.span_ticks = span_ticks
        self.expiration_tick = NOT_QUEUED


class WheelLevel:
    """One wheel: ``slot_count`` buckets of ``span_ticks`` each."""

    __slots__ = ("buckets", "end_tick", "revolution_ticks", "span_ticks")

    def __init__(self, span_ticks: int, slot_count: int, tick: int) -> None:
        self.span_ticks = span_ticks
        self.revolution_ticks = span_ticks * slot_count
        self.buckets = [Bucket(span_ticks) for _ in range(slot_count)]
        self.move_to(tick)

    def move_to(self, tick: int) -> None:
        """Let the revolution that holds ``tick`` be the running one."""
        # The first tick that is too late for this level.
        self.end_tick = (tick // self.revolution_ticks + 1) * self.revolution_ticks


class HierarchicalTimer(WheelTimer[ChainEntry]):
    """Wheels of wheels and a delay queue. The module's docstring has the algorithm."""

    __slots__ = ("_levels", "_queue")

    def __init__(
        self,
        start_ms: int,
        tick_ms: int = 1,
        slot_count: int = 20,
        on_error: ErrorHandler | None = None,
    ) -> None:
        if slot_count < 2:
            raise ValueError(f"levels of {slot_count=} would all be the same")
        super().__init__(start_ms, tick_ms, slot_count, on_error, ChainEntry)
        self._levels = [WheelLevel(1, slot_count, 0)]
        # No two queued buckets have the same expiration, so buckets are never compared.
        self._queue: list[tuple[int, Bucket]] = []

    def _place(self, entry: ChainEntry) -> None:
        due_tick = entry.due_tick
        for level in self._levels:
            if due_tick < level.end_tick:
                break
        else:
            level = self._add_levels(due_tick)
        span = due_tick // level.span_ticks
        bucket = level.buckets[span % self._slot_count]
        bucket.append(entry)
        expiration_tick = span * level.span_ticks
        if bucket.expiration_tick != expiration_tick:
            bucket.expiration_tick = expiration_tick
            heappush(self._queue, (expiration_tick, bucket))

    def _add_levels(self, due_tick: int) -> WheelLevel:
        level = self._levels[-1]
        while due_tick >= level.end_tick:
            level = WheelLevel(level.revolution_ticks, self._slot_count, self._tick)
            self._levels.append(level)
        return level

    def _turn(self, tick: int) -> None:
        queue = self._queue
        while queue and queue[0][0] <= tick:
            expiration_tick, bucket = heappop(queue)
            bucket.expiration_tick = NOT_QUEUED
            self._move_to(expiration_tick)
            self._dissolve(bucket)
        self._move_to(tick)

    def _move_to(self, tick: int) -> None:
        self._tick = tick
        for level in self._levels:
            if tick < level.end_tick:
                break  # and so it is for all higher levels, whose revolutions hold this one
            level.move_to(tick)

    def _dissolve(self, bucket: Bucket) -> None:
        """Hand over the timers due at ``_tick``, the bucket's first, and place the rest anew."""
        if bucket.span_ticks == 1:
            self._expired.take_all(bucket)
            return
        while (entry := bucket.pop_first()) is not None:
            if entry.due_tick > self._tick:
                self._place(entry)
            else:
                self._expired.append(entry)

    def _chains(self) -> Iterable[Chain[ChainEntry]]:
        return (bucket for level in self._levels for bucket in level.buckets)

    def _next_tick(self) -> int:
        return self._queue[0][0]
