"""The state of a message and of its deliveries: the only place that decides it.

    the place in its id, changes       ─┐
    the place of each row               ├─▶ one delivery for each subscription ─▶ the state
    the message's receivers             │                                         of the message
    its rows in the dispatch log       ─┘

Look-ups, lists, cancels, moves, replays, events and schedules ask here (`Messages.locate`). The
audit judges whole hours of rows in columns, by the same meanings (`pipeline.states.settlement`).

A message is `scheduled` as long as no consumer has had it and it can be cancelled: its row waits,
or a retry for the only subscription that it was for. It is `delivering` from when it is due until
the last of its deliveries has ended. Then it is `dead` if one of them died, `cancelled` if it was
cancelled or every delivery was given up, else `delivered`.

Cost: a few µs. Threads: pure.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from delayserver.records.message import ScheduleEntry, State
from delayserver.records.tables import Change, ChangeState


class RowStage(Enum):
    """Where a schedule row is."""

    WAITS = auto()
    """It is still to come, or no subscription has it yet."""
    WAITS_FOR_ONE = auto()
    """It is still to come, for some of those that it was for; others have settled it."""
    UNDER_WAY = auto()
    """A subscription has it, or it cannot be read."""
    GONE = auto()
    """Nothing waits for it in memory: it has ended."""


class ArrivedDelivery(NamedTuple):
    """A delivery that has arrived, as the dispatch log tells it."""

    attempt: int
    at_ms: int


class DeliveryState(NamedTuple):
    """A message at one subscription."""

    state: State
    attempt: int
    """The last one; of a delivery that is still to be made, that one. 0: no record that was read
    tells of it; nothing waits for that subscription any more, so it has had the message."""
    at_ms: int
    """When it ended, or is due."""
    entry: ScheduleEntry
    """The row of that attempt."""


@dataclass(slots=True)
class MessageState:
    """A message and its state."""

    state: State
    entry: ScheduleEntry
    """The row that waits where the message is scheduled, else its own."""
    attempts: int = 0
    """Attempts that failed, where a retry waits."""
    subscription_id: int = 0
    """Not 0: the waiting row is a retry for this subscription."""
    deliveries: dict[int, DeliveryState] = field(default_factory=dict)
    """By subscription; not those of which nothing is known yet."""

    @property
    def rows(self) -> list[ScheduleEntry]:
        """The rows of the message, those that wait first: where one is gone with its hour, another
        has the body."""
        rows = [one.entry for one in self.deliveries.values() if one.state in OPEN]
        rows += [self.entry, *(one.entry for one in self.deliveries.values())]
        return list(dict.fromkeys(rows))


OPEN = (State.SCHEDULED, State.DELIVERING)
"""A delivery in one of these states has not ended."""


def own_row(first: ScheduleEntry, changes: Mapping[int, Change]) -> ScheduleEntry:
    """The row by which a message is due that is `first` by its id: where it was moved to, if it
    was. A cancelled retry counts only if it is due later than `first`: where the clock was set
    back, a retry may be due before its message."""
    whole = changes.get(0)
    if whole is None:
        return first
    row = ScheduleEntry(whole.entry_seq, whole.due_ms)
    is_of_retry = whole.state == ChangeState.CANCELLED and any(
        number and change.entry_seq == row.seq for number, change in changes.items()
    )
    return first if is_of_retry and first.due_ms > row.due_ms else row


def state_of(
    first: ScheduleEntry,
    changes: Mapping[int, Change],
    place: Callable[[ScheduleEntry], RowStage],
    had_by: Collection[int] = (),
    settled: Mapping[int, ArrivedDelivery] | None = None,
) -> MessageState:
    """The state of a message whose id says `first`.

    `changes`: `Sequencer.changes`. `had_by`: existing subscriptions that its row was for, as far as
    the caller knows its subject. `settled`: deliveries of any of its rows, by subscription, as far
    as they were read."""
    if not changes and not had_by and not settled:
        at = place(first)  # As nearly always.
        is_open = State.SCHEDULED if at is RowStage.WAITS else State.DELIVERING
        return MessageState(State.DELIVERED if at is RowStage.GONE else is_open, first)
    whole = changes.get(0)
    entry = own_row(first, changes)
    is_cancelled = whole is not None and whole.state == ChangeState.CANCELLED
    deliveries = {
        subscription_id: _delivery(change, place, is_cancelled)
        for subscription_id, change in changes.items()
        if subscription_id
    }
    for subscription_id, (attempt, at_ms) in (settled or {}).items():
        known = deliveries.get(subscription_id)
        # A replay was delivered before, and one that died after that is dead.
        if known is None or known.state is State.DELIVERED or is_cancelled:
            row = entry if known is None else known.entry
            deliveries[subscription_id] = DeliveryState(State.DELIVERED, attempt, at_ms, row)
    found = MessageState(State.CANCELLED, entry, deliveries=deliveries)
    if is_cancelled:
        return found
    at = place(entry)
    if at is RowStage.WAITS:
        found.state = State.SCHEDULED
        return found
    if at is RowStage.GONE:
        for subscription_id in had_by:
            ended = DeliveryState(State.DELIVERED, 0, entry.due_ms, entry)
            deliveries.setdefault(subscription_id, ended)
    states = [one.state for one in deliveries.values()]
    retrying = [number for number, one in deliveries.items() if one.state is State.SCHEDULED]
    # A replay was delivered before: it cannot be cancelled.
    is_replayed = whole is not None and whole.state == ChangeState.REPLAYED
    is_shared = len(deliveries) > 1 or is_replayed
    if at is not RowStage.GONE or State.DELIVERING in states or (retrying and is_shared):
        found.state = State.DELIVERING
    elif retrying:
        [number] = retrying
        retry = deliveries[number]
        found = MessageState(State.SCHEDULED, retry.entry, retry.attempt - 1, number, deliveries)
    elif State.DEAD in states:
        found.state = State.DEAD
    elif not states or is_replayed or any(state is not State.CANCELLED for state in states):
        found.state = State.DELIVERED
    return found


def _delivery(
    change: Change, place: Callable[[ScheduleEntry], RowStage], is_cancelled: bool
) -> DeliveryState:
    row = ScheduleEntry(change.entry_seq, change.due_ms)
    state = State.DELIVERED
    if change.state == ChangeState.DEAD:
        state = State.DEAD
    elif change.state == ChangeState.DISCARDED or is_cancelled:
        state = State.CANCELLED
    else:
        match place(row):
            case RowStage.WAITS | RowStage.WAITS_FOR_ONE:
                state = State.SCHEDULED
            case RowStage.UNDER_WAY:
                state = State.DELIVERING
    return DeliveryState(state, change.attempt, change.due_ms, row)
