"""The queue of one subscription: the rows that are due for it, and who asks for them.

    rows ── pop ──▶ reserved, in flight ── begin ──▶ begun ── release ──▶ gone, or in `rows` again
                                      └── it may not begin ── release ──▶ at its place in `rows`

`Backlog` decides which rows may leave, and when. The number at once depends on the rows in flight,
or, where several shards count together, on a `Permit`. A row that is pushed begins when the first
byte of its request is about to leave. Rows that are too old leave too, but do not count as in
flight: no receiver is asked to take them.

Cost: O(1) per call, and per row that leaves an entry in a set. Threads: belongs to the event loop.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from delayserver.delivery.backlog import Backlog, Instant
from delayserver.delivery.handout import READ_ROWS_MAX
from delayserver.delivery.permits import Permit
from delayserver.delivery.slow_start import SlowStart
from delayserver.records.message import ScheduleEntry
from delayserver.records.subscriptions import Subscription
from delayserver.schedule.wheel_rows import FiredRows


@dataclass(slots=True)
class Queue:
    """The rows that wait for one subscription, and those that left and are not settled."""

    subscription: Subscription
    rows: Backlog
    in_flight: int = 0
    """Deliveries that left and are not settled; for pull: leased."""
    posts: set[int] = field(default_factory=set)
    """Requests that carry a batch, by the seq of the first row."""
    dropping: set[int] = field(default_factory=set)
    """Rows that left to be given up; they count nowhere else."""
    attempts: dict[int, int] = field(default_factory=dict)
    """Rows that came back from a consumer: the attempt that comes next."""
    reserved: set[int] = field(default_factory=set)
    """Rows that left the queue."""
    begun: set[int] = field(default_factory=set)
    """Those of `reserved` whose first byte left, or was about to, if they are pushed."""
    unreserved: set[int] = field(default_factory=set)
    """Rows that left under earlier limits, and did not begin: nothing of the rate is theirs."""
    held_until_ms: int = 0
    """The receiver wants nothing before, on the stopwatch."""
    is_reading: bool = False
    """Rows are being read that go out as webhooks one by one."""
    withheld: dict[str, list[FiredRows]] = field(default_factory=dict)
    """Rows by subject that left for a consumer which may not read them: after another subject, or
    from a deleted subscription, there may be such. They wait for one that may."""
    slow_start: SlowStart = field(default_factory=SlowStart)
    """Limits how fast its requests become more, if it is a webhook's."""
    permit: Permit | None = None
    """The permit of a webhook whose limits are those of several shards together."""

    @property
    def count(self) -> int:
        """How many rows wait."""
        count = self.rows.count
        if self.withheld:
            count += sum(len(fired.rows) for fired in self._withheld_slices())
        return count

    @property
    def is_idle(self) -> bool:
        """Whether it is pushed, has no row, and is known to no other part that waits for it."""
        rows = self.rows
        return (
            not rows.count
            and rows.deadlines is None
            and rows.single_file is None
            and self.permit is None
            and self.subscription.is_pushed
            and not self.withheld
        )

    def first_ms(self) -> int | None:
        """When the oldest of them fell due."""
        first_ms = self.rows.first_ms()
        if not self.withheld:
            return first_ms
        firsts = [fired.first_ms() for fired in self._withheld_slices()]
        return min(firsts if first_ms is None else [first_ms, *firsts], default=None)

    def _withheld_slices(self) -> Iterator[FiredRows]:
        for slices in self.withheld.values():
            yield from slices

    def slices(self) -> Iterator[FiredRows]:
        """All rows that wait."""
        yield from self._withheld_slices()
        yield from self.rows.slices()

    def admit(self, may_read: Callable[[str], bool]) -> None:
        """Put rows that were withheld first in the queue again, for a consumer that may read
        them."""
        for subject in [one for one in self.withheld if may_read(one)]:
            for fired in reversed(self.withheld.pop(subject)):
                self.rows.put_back(fired)

    def holds(self, entry: ScheduleEntry) -> bool:
        """Whether the row waits here, or left and is not settled."""
        return (
            entry.seq in self.reserved
            or self.rows.holds(entry)
            or any(len(fired.find(entry)) for fired in self._withheld_slices())
        )

    def pop(self, rows_max: int, bytes_max: int, instant: Instant) -> list[FiredRows]:
        """Rows that may leave now, as many as `Backlog.pop` says: they are in flight from here
        on."""
        if self.rows.are_suspects_next(instant):
            slices = self.rows.suspects.pop(self._suspects_together(rows_max), bytes_max)
        else:
            slices = self.rows.pop(rows_max, bytes_max, instant)
        for fired in slices:
            self.reserved.update(fired.rows["seq"].tolist())
            self.in_flight += len(fired.rows)
        return slices

    def pop_outdated(self, bytes_max: int, now_ms: int) -> list[FiredRows]:
        """Rows that are next and too old; no more while many of them are not recorded yet."""
        free = READ_ROWS_MAX - len(self.dropping)
        return self._drop(self.rows.pop_outdated(free, bytes_max, now_ms) if free > 0 else [])

    def pop_expired(self, bytes_max: int, now_ms: int) -> list[FiredRows]:
        """Rows that wait and have expired; likewise."""
        free = READ_ROWS_MAX - len(self.dropping)
        return self._drop(self.rows.pop_expired(free, bytes_max, now_ms) if free > 0 else [])

    def _drop(self, slices: list[FiredRows]) -> list[FiredRows]:
        for fired in slices:
            seqs = fired.rows["seq"].tolist()
            self.reserved.update(seqs)
            self.dropping.update(seqs)
        return slices

    def begin(self, seqs: list[int], present_ms: int) -> None:
        """Rows that left are sent now."""
        before = len(self.begun)
        self.begun.update(seqs)
        if self.rows.rate is not None:
            self.rows.rate.spend(len(self.begun) - before, present_ms / 1000)

    def release(self, seq: int, present_ms: int) -> bool:
        """A row that left is not on its way any more; False: it was not."""
        if seq not in self.reserved:
            return False
        self.reserved.remove(seq)
        self.rows.suspects.end((seq,))
        if seq in self.dropping:
            self.dropping.remove(seq)
            return True
        self.in_flight -= 1
        if seq in self.begun:
            self.begun.remove(seq)
        elif seq in self.unreserved:
            self.unreserved.remove(seq)
        elif self.subscription.is_pushed and self.rows.rate is not None:
            self.rows.rate.release(1, present_ms / 1000)
        return True

    def hold(self, seqs: list[int]) -> None:
        """Rows have left already, in an earlier process, and are leased."""
        self.reserved.update(seqs)
        self.in_flight += len(seqs)

    def release_leased(self, seqs: list[int]) -> bool:
        """Rows that were leased are not on their way any more; their attempts count no longer.
        Returns whether rows may leave that had to wait for these.

        Vectorised over the seqs, since a consumer ends a whole pull at once."""
        before = len(self.reserved)
        self.reserved.difference_update(seqs)
        self.in_flight -= before - len(self.reserved)
        self.unreserved.difference_update(seqs if self.unreserved else ())
        if self.attempts:
            for seq in seqs:
                self.attempts.pop(seq, None)
        return self.rows.suspects.end(seqs)

    def _suspects_together(self, rows_max: int) -> int:
        """How many of the suspects that are next may be handed out together."""
        seqs = self.rows.suspects.next_seqs(rows_max)
        attempt = self.attempts.get(seqs[0], 1)
        most = self.company_max(attempt, rows_max)
        others = (at for at, seq in enumerate(seqs) if self.attempts.get(seq, 1) != attempt)
        return min(most, next(others, most))

    def company_max(self, attempt: int, count: int) -> int:
        """How many messages at their `attempt` may go together where `count` could. Messages that
        failed together go apart, in halves, then each alone, and its last attempt each has
        alone."""
        return 1 if attempt >= self.subscription.max_attempts else max(1, count >> (attempt - 1))

    def free_places(self) -> int:
        """How many rows may be sent as webhooks, in one batch or one by one."""
        most = self.subscription.max_in_flight if self.permit is None else self.permit.places
        if not self.subscription.batch_max:
            # While rows are read, more places get free: those are for the next read.
            return 0 if self.is_reading else most - self.in_flight
        if len(self.posts) >= most:
            return 0
        return min(self.subscription.batch_max, self._rows_free())

    def starts_slowly(self, instant: Instant) -> bool:
        """Whether webhooks could leave now, if those that are out might become more at once."""
        return (
            self.rows.count > 0
            and self.subscription.is_pushed
            and not self.subscription.takes_many
            and not self.slow_start.room(instant.present_ms)
            and self.free_places() > 0
            and self.rows.ready(instant) > 0
        )

    def _rows_free(self) -> int:
        """How many rows may leave in batches before others are settled."""
        # Rows whose failure is not recorded yet are on their way without a request.
        most = self.subscription.max_in_flight
        return most * self.subscription.batch_max - self.in_flight

    def _not_begun(self) -> int:
        """How many rows left and are not sent yet."""
        return self.in_flight - len(self.begun)

    def used_places(self) -> int:
        """How many requests are out, or about to be."""
        return len(self.posts) if self.subscription.batch_max else self.in_flight

    def want(self, instant: Instant) -> None:
        """Ask for permits for the rows that could leave, where several shards count together."""
        if self.permit is None or self.is_reading:
            return
        rows, size = self.rows.ready_but_for_rate(instant), self.subscription.batch_max or 1
        if self.subscription.batch_max:
            rows = max(0, min(rows, self._rows_free()))
        if burst := self.subscription.rate_burst:
            # Rows that were permitted and have not begun may all begin at the same moment.
            rows = min(rows, max(0, burst - self._not_begun()))
        free = max(0, self.subscription.max_in_flight - self.used_places())
        places = min(-(-rows // size), free, self.slow_start.room(instant.present_ms))
        self.permit.want(places, min(rows, places * size))

    def keep(self) -> None:
        """Give back the permits that it does not use."""
        if self.permit is not None:
            self.permit.keep(for_next=self.is_reading)
