"""Backlog: the rows that wait for one subscription, and when each may leave.

    push ─▶ late     fell due while nobody could have it: downtime, a pause      ┐
       └──▶ fresh    fell due while the subscription could be delivered to       ├─▶ pop
    come_back ─▶ returned   was handed out, and came back                        ┘
    suspect ─▶ suspects     one of them may have ended its consumer ─▶ suspects.pop

There is one order: a higher priority first (`Ranks`), then the lane (returned, late, fresh), then
due time, then seq. A row enters by `push`. A row that left and was handed out enters again by
`come_back`: it is the next to leave, however many others wait. A row that left and was never handed
out goes back to its place in its lane by `put_back`.

The subscription's definition limits which rows may leave, in this order:

    catch_up   spread: late rows leave evenly over a while, fresh ones on time beside them
               drop_older_than: rows that are older leave by `pop_outdated`, to be given up; a row
               that was handed out in time, and came back, stays
               all: everything at once
    batch      fewer than a batch wait until the oldest of them has lingered
    ttl        rows that are known to have expired leave by `pop_expired`, to be given up
    rate       a token bucket, one token for each row: reserved when the row leaves, spent when it
               is sent (`rate`); or a permit, where several shards have one rate together

Rows of a group come one by one, each when the one before is settled (`SingleFile`). To `spread`,
those that still wait for their turn count from the beginning: twenty rows of one group leave as
evenly as twenty others.

With `all` only a pause makes rows late. With `spread` fresh rows leave before late ones, which wait
for their moment. Rows are slices of arrays, never objects. The caller limits how much leaves at
once, also in bytes; a row that does not fit stays, and is next.

How old a row is follows from its due time, and so from the clock. To spread, to linger and a rate
are lengths of time: they are counted on the stopwatch, and last as long as they were meant to when
somebody sets the clock. Both are looked at once for everything that belongs together (`Instant`):
else what could not leave yet when it was asked for might be able to when it is asked how long that
takes, and nobody would come back.

Cost: O(1) per slice that is pushed or popped, plus a comparison for each row that leaves where old
rows are dropped. Threads: belongs to the event loop.
"""

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from delayserver.delivery.catch_up import Pace
from delayserver.delivery.deadlines import LEFT_MAX, Deadlines
from delayserver.delivery.lane import Lane, Room
from delayserver.delivery.ranks import Ranks
from delayserver.delivery.single_file import SingleFile
from delayserver.records.message import ScheduleEntry
from delayserver.records.subscriptions import Subscription
from delayserver.schedule.wheel_rows import ROUTE_GROUP, ROUTE_OPTIONS, FiredRows
from delayserver.timers.rates import Rate, TokenBucket
from storage.rows import select

EXPIRED_ROWS_MAX: Final = 8192
"""Rows that are taken out at once since they have expired."""


class Instant(NamedTuple):
    """The present time on both clocks."""

    now_ms: int
    """By the clock."""
    present_ms: int
    """By the stopwatch, a clock that nobody sets."""


class Suspects:
    """Rows that a consumer had when it fell silent, of which any may be the reason. They leave
    before all others, a few at a time, and the next ones when these are settled. So a message that
    ends its consumer is soon alone."""

    def __init__(self) -> None:
        self.waiting = Ranks()
        self.out: set[int] = set()
        """Those that were handed out, by seq, and are not settled."""

    @property
    def are_ready(self) -> bool:
        """Whether some may be handed out now."""
        return self.waiting.count > 0 and not self.out

    def next_seqs(self, count: int) -> list[int]:
        """The seqs of up to `count` that are next; one at least."""
        assert count > 0 and self.waiting.count, (count, self.waiting.count)
        seqs: list[int] = next(self.waiting.slices()).rows["seq"][:count].tolist()
        return seqs

    def pop(self, count: int, bytes_max: int) -> list[FiredRows]:
        """Up to `count` of them leave together, and no others until they are settled."""
        taken = self.waiting.pop(Room(count, bytes_max), priority=self.waiting.highest)
        for fired in taken:
            self.out.update(fired.rows["seq"].tolist())
        return taken

    def end(self, seqs: Iterable[int]) -> bool:
        """Rows are settled, or are back. Returns whether the next ones may leave now."""
        if not self.out:
            return False
        self.out.difference_update(seqs)
        return self.are_ready


class _Linger:
    """Rows wait until there is a batch of them, or the oldest has lingered."""

    def __init__(self, subscription: Subscription) -> None:
        self._batch_max = subscription.batch_max
        self._linger_ms = subscription.linger_ms
        self._until: tuple[int | None, int] = None, 0
        """When the row fell due that others are waited for, and until when, on the stopwatch."""

    def wait_ms(
        self, late: int, others: int, lanes: tuple[Ranks, Ranks, Ranks], instant: Instant
    ) -> int:
        """How long so many rows wait for others still; 0: they leave. `lanes`: of rows that came
        back, late ones, and fresh ones."""
        if late + others >= self._batch_max:
            return 0
        returned, late_rows, fresh = (lane.first_ms() for lane in lanes)
        firsts = (late_rows if late else None, fresh if others else None, returned)
        first_ms = min(first for first in firsts if first is not None)
        now_ms, present_ms = instant
        if self._until[0] != first_ms:
            # A row that is old already has lingered. If the clock was set back, it begins to.
            waited_ms = min(max(0, now_ms - first_ms), self._linger_ms)
            self._until = first_ms, present_ms + self._linger_ms - waited_ms
        return max(0, self._until[1] - present_ms)


class Backlog:
    """The rows that wait for one subscription."""

    def __init__(
        self, subscription: Subscription, behind_ms: int, permit: Rate | None = None
    ) -> None:
        """`behind_ms`: rows that fell due before this moment could not be delivered in time;
        `permit`: says instead of the rate of the subscription how many rows may leave."""
        self._fresh = Ranks()
        self._late = Ranks()
        self._returned = Ranks()
        self.suspects = Suspects()
        self._expired = Lane()
        """Rows that were taken out of the others, to be given up."""
        self.deadlines: Deadlines | None = None
        """Where rows have come that may expire."""
        self.single_file: SingleFile | None = None
        """Where rows have come that may have a group, or are expected."""
        self._behind_ms = behind_ms
        self._pace: Pace | None = None
        self._permit = permit
        self.rate = permit
        """Reserved when a row leaves; spent when it is sent, or released."""
        self._define(subscription)

    def _define(self, subscription: Subscription) -> None:
        self._linger = _Linger(subscription) if subscription.batch_max else None
        self._drop_older_than_ms = subscription.drop_older_than_ms
        self._spread_ms = subscription.spread_ms
        if self._permit is None:
            limit = subscription.rate_per_s, subscription.rate_burst
            self.rate = TokenBucket(*limit) if subscription.rate_per_s else None
        self._spread()

    def _spread(self) -> None:
        """Begin to spread the late rows."""
        self._pace = None
        if self._spread_ms:
            self._pace = Pace(self._spread_ms)
            self._pace.add(self._late.count)
            if self.single_file is not None:
                slices = self.single_file.slices()
                self._pace.add(sum(_count_late(fired, self._behind_ms) for fired in slices))

    def change(self, before: Subscription, after: Subscription, now_ms: int) -> bool:
        """Follow another definition of the subscription. Returns whether its limits are others, so
        that nothing is reserved of the rate for rows that have left."""
        is_limited_anew = _limits(before) != _limits(after)
        if is_limited_anew:
            self._define(after)
        if before.paused and not after.paused:
            self._fall_behind(now_ms)
        return is_limited_anew and self._permit is None

    def _fall_behind(self, now_ms: int) -> None:
        """All rows that wait, and rows that fell due until now and are still to come, are late."""
        self._behind_ms = now_ms
        fresh, self._fresh = self._fresh, Ranks()
        self._late.extend(fresh)
        self._spread()

    @property
    def count(self) -> int:
        """How many rows wait."""
        # Asked several times for each delivery.
        count = self._fresh.count + self._late.count + self._returned.count
        count += self.suspects.waiting.count + self._expired.count
        return count if self.single_file is None else count + self.single_file.count

    def _lanes(self) -> tuple[Ranks, ...]:
        return self.suspects.waiting, *self._ordinary()

    def _ordinary(self) -> tuple[Ranks, Ranks, Ranks]:
        return self._returned, self._late, self._fresh

    def first_ms(self) -> int | None:
        """When the oldest of them fell due."""
        # Asked of every queue for the statistics: most have rows in one lane, or in none.
        firsts = [lane.first_ms() for lane in self._lanes() if lane.count]
        firsts.append(self._expired.first_ms())
        if self.single_file is not None:
            firsts.append(self.single_file.first_ms())
        return min((first for first in firsts if first is not None), default=None)

    def slices(self) -> Iterator[FiredRows]:
        """All rows that wait, in the order of the lanes."""
        yield from self._expired.slices
        for lane in self._lanes():
            yield from lane.slices()
        if self.single_file is not None:
            yield from self.single_file.slices()

    def holds(self, entry: ScheduleEntry) -> bool:
        """Whether the row waits here."""
        return (
            self._expired.holds(entry)
            or any(lane.holds(entry) for lane in self._lanes())
            or (self.single_file is not None and self.single_file.holds(entry))
        )

    # ── in ─────────────────────────────────────────────────────────────────────────────────────

    def push(self, fired: FiredRows, route: int | None = None) -> None:
        """Add rows that fell due, in the order of their due times. `route`: that of all of them,
        where they have one."""
        marks = self._note(fired, route)
        if marks & ROUTE_GROUP:
            mask = fired.rows["route"] & ROUTE_GROUP != 0
            of_groups = FiredRows(fired.hour, select(fired.rows, mask))
            if self._pace is not None:
                self._pace.add(_count_late(of_groups, self._behind_ms))
            self.in_single_file().note(of_groups)
            if mask.all():
                return
            fired = FiredRows(fired.hour, select(fired.rows, ~mask))
        self._enter(fired, marks)

    def in_single_file(self) -> SingleFile:
        """Where the rows of groups wait for their turn; made at first use."""
        if self.single_file is None:
            self.single_file = SingleFile()
        return self.single_file

    def admit(self, fired: FiredRows) -> None:
        """Rows of groups that were pushed may leave now: it is their turn."""
        self._enter(fired, fired.marks(), is_counted=True)

    def _enter(self, fired: FiredRows, marks: int, *, is_counted: bool = False) -> None:
        """Add rows to the end of their lanes. `marks`: what is in the route of any of them;
        `is_counted`: the pace counts them already."""
        if not (self._spread_ms or self._drop_older_than_ms):
            self._fresh.push(fired, marks)
            return
        late, fresh = _divide(fired, self._behind_ms)
        if late is not None:
            self._late.push(late)
            if self._pace is not None and not is_counted:
                self._pace.add(len(late.rows))
        if fresh is not None:
            self._fresh.push(fresh)

    def come_back(self, fired: FiredRows) -> None:
        """Add rows that were handed out and were not taken: they leave before all others."""
        self._note(fired)
        self._returned.insert(fired)

    def put_back(self, fired: FiredRows) -> None:
        """Add rows that left and were not handed out, at the place where they were."""
        self._note(fired)
        if not (self._spread_ms or self._drop_older_than_ms):
            self._fresh.insert(fired)
            return
        late, fresh = _divide(fired, self._behind_ms)
        if late is not None:
            self._late.insert(late)
            if self._pace is not None:
                self._pace.put_back(len(late.rows))
        if fresh is not None:
            self._fresh.insert(fresh)

    def _note(self, fired: FiredRows, route: int | None = None) -> int:
        """Rows come: note those that may expire; returns what is in the route of any of them."""
        marks = fired.marks() if route is None else route
        if marks & ROUTE_OPTIONS:
            expiring = fired
            if route is None:
                mask = fired.rows["route"] & ROUTE_OPTIONS != 0
                expiring = FiredRows(fired.hour, select(fired.rows, mask))
            if self.deadlines is None:
                self.deadlines = Deadlines()
            self.deadlines.note(expiring)
        return marks

    # ── out ────────────────────────────────────────────────────────────────────────────────────

    def ready(self, instant: Instant) -> int:
        """How many rows may leave now; where an outdated one, or a suspect, is next, fewer may."""
        count = self.ready_but_for_rate(instant)
        if count and self.rate is not None:
            count = min(count, self.rate.available(instant.present_ms / 1000))
        return count + self.suspects.waiting.count if self.suspects.are_ready else count

    def ready_but_for_rate(self, instant: Instant) -> int:
        """How many rows might leave now if there were no rate."""
        late, others = self._allowed(instant)
        count = late + others
        if count and self._linger is not None:
            return 0 if self._linger.wait_ms(late, others, self._ordinary(), instant) else count
        return count

    def _allowed(self, instant: Instant) -> tuple[int, int]:
        """How many late rows the way to catch up lets leave, and how many others."""
        late, others = self._late.count, self._fresh.count
        if self._pace is not None:
            late = min(late, self._pace.allowance(instant.present_ms))
        elif self._drop_older_than_ms:
            since_ms = instant.now_ms - self._drop_older_than_ms
            late = 0 if self._late.is_before(since_ms) else late
            others = 0 if self._fresh.is_before(since_ms) else others
        return late, others + self._returned.count

    def pop(self, rows_max: int, bytes_max: int, instant: Instant) -> list[FiredRows]:
        """Up to `rows_max` rows that leave now, with payloads of up to `bytes_max`, or one that is
        longer. Fewer, or none, where an outdated one is next."""
        now_ms, present_ms = instant
        room = Room(min(rows_max, self.ready(instant)), bytes_max)
        since_ms = now_ms - self._drop_older_than_ms if self._drop_older_than_ms else None
        returned, late, fresh = self._returned, self._late, self._fresh
        is_plain = late.is_plain and fresh.is_plain and returned.is_plain
        if self._pace is None and is_plain and not self.suspects.are_ready:
            taken = returned.pop(room) if returned.count else []
            if late.count:
                taken += late.pop(room, since_ms)
            taken += fresh.pop(room, since_ms)
        else:
            taken = []
            for priority in self._priorities():
                taken += returned.pop(room, priority=priority)
                if self._pace is None:
                    taken += late.pop(room, since_ms, priority=priority)
                taken += fresh.pop(room, since_ms, priority=priority)
        if self._pace is not None:
            room.rows = min(room.rows, self._pace.allowance(present_ms))
            paced = late.pop(room, since_ms)
            self._pace.spend(_count(paced))
            taken += paced
        if self.rate is not None:
            self.rate.reserve(_count(taken), present_ms / 1000)
        return taken

    # ── suspects ───────────────────────────────────────────────────────────────────────────────

    def suspect(self, fired: FiredRows) -> None:
        """Add rows that a consumer had when it fell silent."""
        self._note(fired)
        self.suspects.waiting.insert(fired)

    def are_suspects_next(self, instant: Instant) -> bool:
        """Whether some are handed out now: no row of a higher priority may leave."""
        if not self.suspects.are_ready:
            return False
        highest = max(lane.highest for lane in self._ordinary())
        return self.suspects.waiting.highest >= highest or not self.ready_but_for_rate(instant)

    def _priorities(self) -> list[int]:
        """Those that may have rows, from the highest on, as far as no suspects are before them."""
        least = self.suspects.waiting.highest if self.suspects.are_ready else 0
        priorities = {one for lane in self._ordinary() for one in lane.priorities if one >= least}
        return sorted(priorities, reverse=True)

    def pop_outdated(self, rows_max: int, bytes_max: int, now_ms: int) -> list[FiredRows]:
        """Rows that are next, and too old to be delivered; as many as with `pop`."""
        if not self._drop_older_than_ms:
            return []
        until_ms = now_ms - self._drop_older_than_ms
        room = Room(rows_max, bytes_max)
        taken = self._late.pop(room, until_ms=until_ms)
        return taken + self._fresh.pop(room, until_ms=until_ms)

    def pop_expired(self, rows_max: int, bytes_max: int, now_ms: int) -> list[FiredRows]:
        """Rows that wait, wherever they stand, and are known to have outlived their time; as many
        as with `pop`."""
        if self.deadlines is None:
            return []
        while not self._expired.count:
            # Many at once, since all that waits is looked through for them.
            seqs = self.deadlines.pop(now_ms, EXPIRED_ROWS_MAX)
            if not len(seqs):
                return []
            taken = [fired for lane in self._lanes() for fired in lane.take(seqs)]
            if self.single_file is not None:
                taken += self.single_file.take(seqs)
            for fired in taken:
                self._expired.push(fired)
        return self._expired.pop(Room(rows_max, bytes_max))

    def let_go(self) -> None:
        """Forget deadlines of rows that have left, if they are many."""
        deadlines = self.deadlines
        if deadlines is None:
            return
        # All that waits is looked through for a part, so the more waits, the more may have left.
        if deadlines.count > LEFT_MAX + self.count + self.count // 4:
            deadlines.let_go(self.slices())

    def wait_ms(self, instant: Instant) -> int | None:
        """How long until more rows may leave, though nothing else happens; after `ready` or `pop`
        at the same instant."""
        waits: list[int] = []
        present_ms = instant.present_ms
        late, others = self._allowed(instant)
        if self._pace is not None and late < self._late.count:
            waits.append(max(1, self._pace.next_ms(present_ms) - present_ms))
        if late + others:
            lingers = self._linger
            if lingers and (ms := lingers.wait_ms(late, others, self._ordinary(), instant)):
                waits.append(ms)
            elif self.rate is not None and (wait_s := self.rate.wait_s(present_ms / 1000)):
                waits.append(int(wait_s * 1000) + 1)
        return min(waits, default=None)

    def outdated_ms(self, now_ms: int) -> int | None:
        """When a row will be too old that is next, or will expire, and is not yet; a moment of the
        clock."""
        expired_ms = None if self.deadlines is None else self.deadlines.next_ms(now_ms)
        if not self._drop_older_than_ms:
            return expired_ms
        firsts = (lane.first_ms() for lane in (self._late, self._fresh))
        ends = (first + self._drop_older_than_ms + 1 for first in firsts if first is not None)
        waits = [end_ms for end_ms in ends if end_ms > now_ms]
        return min(waits if expired_ms is None else [*waits, expired_ms], default=None)


def _count_late(fired: FiredRows, behind_ms: int) -> int:
    return int((fired.due_ms() < behind_ms).sum())


def _divide(fired: FiredRows, behind_ms: int) -> tuple[FiredRows | None, FiredRows | None]:
    """Those that are late, and the others."""
    late = fired.due_ms() < behind_ms
    if late.all():
        return fired, None
    if not late.any():
        return None, fired
    parts = (FiredRows(fired.hour, select(fired.rows, one)) for one in (late, ~late))
    return next(parts), next(parts)


def _count(slices: list[FiredRows]) -> int:
    return sum(len(fired.rows) for fired in slices)


def _limits(subscription: Subscription) -> tuple[float, ...]:
    return (
        subscription.rate_per_s,
        subscription.rate_burst,
        subscription.batch_max,
        subscription.linger_ms,
        subscription.spread_ms,
        subscription.drop_older_than_ms,
    )
