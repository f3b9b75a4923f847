"""Orphans: rows whose subscription was deleted, and who is to have them.

A row for a subscription does not say what its subject is: that stands in its payload. So it is read
first, and until that is done it is an orphan. So is a row that was on its way when its subscription
was deleted: it may still arrive.

    read ──▶ somebody else had or will get the message ──▶ dropped
        ├──▶ nothing that a restart finds says that it waits ──▶ recorded again
        └──▶ passed on: to a subscription that matches now, or parked

Several rows of one message may be orphans at the same time, one for each subscription that failed
to take it. Only the last of them is passed on: else whoever inherits it would get it twice.

Cost: O(1) per row, and one look at the subscriptions of its subject.
Threads: belongs to the event loop.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from enum import Enum, auto

from delayserver.records.message import DueDelivery, ScheduleEntry
from delayserver.records.subscriptions import Registry
from delayserver.records.tables import Change, ChangeState


class Fate(Enum):
    """What becomes of an orphan."""

    DROPPED = auto()
    """Others had the message, or are to get it."""
    RECORDED = auto()
    """It needs a record of its own, and remains an orphan until that is durable."""
    PASSED_ON = auto()


class Orphans:
    """Knows the orphans by their seq, and judges them."""

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

    def __contains__(self, seq: object) -> bool:
        return seq in self._counts

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, seqs: Iterable[int]) -> None:
        """One more row of each seq is an orphan."""
        self._counts.update(seqs)

    def remove(self, seqs: Iterable[int]) -> None:
        """One row of each seq is an orphan no longer; other seqs are passed over."""
        counts = self._counts
        for seq in seqs:
            counts[seq] -= 1
            if counts[seq] <= 0:
                del counts[seq]

    def judge(self, delivery: DueDelivery) -> Fate:
        """Decide what becomes of an orphan that was read; it is one no longer, unless RECORDED."""
        seq, origin = delivery.entry.seq, delivery.origin
        self.remove((seq,))
        # A row that it was moved to was newer than the publish: at worst it comes once more.
        matching = self._registry.matching(delivery.subject)
        if any(s.existed(origin.message_seq, origin.due_ms) for s in matching):
            return Fate.DROPPED  # It had this message on its own.
        changes = self._changes(origin.message_seq)
        if self._is_elsewhere(delivery, changes):
            return Fate.DROPPED
        if _is_in_memory_alone(delivery, changes):
            self.add((seq,))
            return Fate.RECORDED
        return Fate.PASSED_ON

    def _is_elsewhere(self, delivery: DueDelivery, changes: Mapping[int, Change]) -> bool:
        """Whether another row of the message is on its way to a subscription that is gone too, or
        is still to come.

        Each of them was tried on its own; the last of the rows that is open is passed on. From then
        on it is the only one, so it need not be looked for among those that wait for an heir."""
        seq, message_seq = delivery.entry.seq, delivery.origin.message_seq
        first_seq = changes[0].entry_seq if 0 in changes else message_seq
        return first_seq in self._counts or any(
            subscription_id
            and change.state == ChangeState.RETRYING
            and change.entry_seq != seq
            and (
                change.entry_seq in self._counts
                or self._has_not_fired(ScheduleEntry(change.entry_seq, change.due_ms))
            )
            for subscription_id, change in changes.items()
        )


def _is_in_memory_alone(delivery: DueDelivery, changes: Mapping[int, Change]) -> bool:
    """Whether a restart would not find the row again, since others have failed at it.

    It finds the rows of those alone. Without a record of its own the message would be lost in a
    crash, though its publish was answered (I3)."""
    of_others = [change for subscription_id, change in changes.items() if subscription_id]
    return bool(of_others) and not any(
        change.state == ChangeState.RETRYING and change.entry_seq == delivery.entry.seq
        for change in of_others
    )
