"""Orphans: rows whose subscription was deleted, and the subscriptions that get them.

A row for a subscription does not say what its subject is: that stands in its payload. So it is read
first, and until that is done it is an orphan. So is a row that was on its way when its subscription
was deleted: it may still arrive.

    left ──▶ read ──▶ a replay, or another one had or will get the message ──▶ dropped
                 ├──▶ nothing that a restart finds says that it waits ──▶ recorded again
                 └──▶ passed on: to the subscription that `records.receivers` names, or parked

A subscription may leave a million rows. They are read a slice at a time. The next slice follows
when all of the last one is judged, and recorded where necessary. A crash in between leaves the rest
as it was: the rows of a subscription that is gone are orphans again when they are loaded.

Several rows of one message may be orphans at the same time, one for each subscription that failed
to take it. Only the last of them is passed on: else its heir would get the message twice.

Cost: O(1) per row, and one look at the subscriptions of its subject; nothing at once for rows that
are left.
Threads: belongs to the event loop.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from enum import Enum, auto

from delayserver.delivery.handout import READ_ROWS_MAX
from delayserver.delivery.lane import Lane, Room
from delayserver.records.message import DueDelivery, ScheduleEntry
from delayserver.records.receivers import had, heir_of, receivers
from delayserver.records.subscriptions import Registry
from delayserver.records.tables import Change, ChangeState
from delayserver.schedule.wheel_rows import ROUTE_SUBSCRIPTION, FiredRows


class Fate(Enum):
    """The fate of an orphan."""

    DROPPED = auto()
    """Others had the message, or are to get it."""
    RECORDED = auto()
    """It needs a record of its own, and remains an orphan until that is durable."""
    PASSED_ON = auto()


class Orphans:
    """Knows the orphans, and judges them."""

    def __init__(
        self,
        registry: Registry,
        changes: Callable[[int], Mapping[int, Change]],
        has_not_fired: Callable[[ScheduleEntry], bool],
    ) -> None:
        """`changes`: where the deliveries of a message are now, by subscription, if not where its
        id says (`Sequencer.changes`); `has_not_fired`: whether a row is still to come."""
        self._registry = registry
        self._changes = changes
        self._has_not_fired = has_not_fired
        self._counts: Counter[int] = Counter()
        """By seq: a row of a subject is one orphan for each subscription that it was for."""
        self._recorded: set[int] = set()
        """Those whose record is not durable yet."""
        self._left: dict[int, Lane] = {}
        """Rows that are not being read yet, by the subscription that left them."""

    def holds(self, entry: ScheduleEntry) -> bool:
        """Whether the row is an orphan."""
        return entry.seq in self._counts or any(lane.holds(entry) for lane in self._left.values())

    def holding(self, seqs: set[int]) -> set[int]:
        """The rows of these seqs that are orphans."""
        found = {seq for seq in seqs if seq in self._counts}
        for lane in self._left.values():
            for fired in lane.slices:
                found |= seqs & set(fired.rows["seq"].tolist())
        return found

    def __len__(self) -> int:
        return len(self._counts) + sum(lane.count for lane in self._left.values())

    @property
    def are_left(self) -> bool:
        """Whether there are rows that are not being read yet."""
        return bool(self._left)

    def leave(self, fired: FiredRows, left_by: int) -> None:
        """Rows have lost their subscription `left_by`: they are to be read, by `next_slice`."""
        self._left.setdefault(left_by, Lane()).push(fired)

    def next_slice(self, bytes_max: int) -> tuple[int, list[FiredRows]] | None:
        """Rows that are to be read next, of so many bytes in all, and the subscription that left
        them; None: not now."""
        rows_max = READ_ROWS_MAX - len(self._recorded)
        if not self._left or rows_max <= 0:
            return None
        left_by, lane = next(iter(self._left.items()))
        slices = lane.pop(Room(rows_max, bytes_max))
        if not lane.count:
            del self._left[left_by]
        for fired in slices:
            self.add(fired.rows["seq"].tolist())
        return left_by, slices

    def add(self, seqs: Iterable[int]) -> None:
        """One more row of each seq is an orphan."""
        self._counts.update(seqs)

    def remove(self, seqs: Iterable[int]) -> None:
        """One row of each seq is an orphan no longer; other seqs are passed over."""
        counts, recorded = self._counts, self._recorded
        for seq in seqs:
            recorded.discard(seq)
            counts[seq] -= 1
            if counts[seq] <= 0:
                del counts[seq]

    def judge(self, delivery: DueDelivery) -> Fate:
        """Decide the fate of an orphan that was read; it is one no longer, unless RECORDED."""
        seq, origin = delivery.entry.seq, delivery.origin
        self.remove((seq,))
        if delivery.payload.is_replay:
            return Fate.DROPPED  # It was delivered before; no other client asked for it.
        changes = self._changes(origin.message_seq)
        first = _first_row(delivery, changes)
        existing = [s for s in self._registry.candidates(delivery.subject) if not s.deleted]
        if any(had(one, delivery.subject, first.seq, first.due_ms) for one in existing):
            return Fate.DROPPED  # It had this message on its own.
        if any(one.id in changes for one in existing):
            return Fate.DROPPED  # It was given the message as the heir of another one.
        if self._is_elsewhere(delivery, changes):
            return Fate.DROPPED
        if _is_in_memory_alone(delivery, changes):
            self.add((seq,))
            self._recorded.add(seq)
            return Fate.RECORDED
        return Fate.PASSED_ON

    def heir_id(self, delivery: DueDelivery, left_by: int) -> int | None:
        """The subscription that an orphan is passed on to; None: it waits for one to come."""
        candidates, subject = self._registry.candidates(delivery.subject), delivery.subject
        seq, due_ms = delivery.entry.seq, delivery.entry.due_ms
        if int(delivery.row["route"][0]) & ROUTE_SUBSCRIPTION:
            departed = self._registry.departed(left_by)
            heir = heir_of(departed, candidates, subject, seq, due_ms)
            return None if heir is None else heir.id
        heirs = receivers(candidates, subject, seq, due_ms)
        return heirs[0].id if heirs else None

    def _is_elsewhere(self, delivery: DueDelivery, changes: Mapping[int, Change]) -> bool:
        """Whether another row of the message is on its way to a subscription that is gone too, or
        is still to come.

        Each of them was tried on its own; the last of the rows that is open is passed on. From then
        on it is the only one, so it need not be looked for among those that wait for an heir."""
        seq = delivery.entry.seq
        return self.holds(_first_row(delivery, changes)) or any(
            subscription_id
            and change.state == ChangeState.RETRYING
            and change.entry_seq != seq
            and (self.holds(_entry(change)) or self._has_not_fired(_entry(change)))
            for subscription_id, change in changes.items()
        )


def _first_row(delivery: DueDelivery, changes: Mapping[int, Change]) -> ScheduleEntry:
    """The row that was for all subscriptions of the message's subject."""
    if 0 in changes:
        return _entry(changes[0])
    return ScheduleEntry(delivery.origin.message_seq, delivery.origin.published_due_ms)


def _entry(change: Change) -> ScheduleEntry:
    return ScheduleEntry(change.entry_seq, change.due_ms)


def _is_in_memory_alone(delivery: DueDelivery, changes: Mapping[int, Change]) -> bool:
    """Whether a restart would not find the row again, since others have failed at it.

    It finds the rows of those alone. Without a record of its own the message would be lost in a
    crash, though its publish was answered (I3)."""
    of_others = [change for subscription_id, change in changes.items() if subscription_id]
    return bool(of_others) and not any(
        change.state == ChangeState.RETRYING and change.entry_seq == delivery.entry.seq
        for change in of_others
    )
