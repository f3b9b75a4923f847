"""The state of a message: one function of its changes, its rows, its receivers and what arrived."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec
import pytest

from delayserver.records.message import ScheduleEntry, State
from delayserver.records.message_state import (
    OPEN,
    ArrivedDelivery,
    MessageState,
    RowStage,
    own_row,
    state_of,
)
from delayserver.records.tables import Change, ChangeState

FIRST = ScheduleEntry(7, 1000)
AGAIN = ScheduleEntry(9, 2000)
A, B = 1, 2
RETRY = Change(ChangeState.RETRYING, AGAIN.seq, AGAIN.due_ms, 2, 0)
DEAD = Change(ChangeState.DEAD, FIRST.seq, FIRST.due_ms, 1, 0)
GIVEN_UP = Change(ChangeState.DISCARDED, FIRST.seq, FIRST.due_ms, 1, 0)
MOVED = Change(ChangeState.MOVED, AGAIN.seq, AGAIN.due_ms, 0, 0)
CANCELLED = Change(ChangeState.CANCELLED, AGAIN.seq, AGAIN.due_ms, 0, 0)
REPLAYED = Change(ChangeState.REPLAYED, FIRST.seq, FIRST.due_ms, 0, 0)


def state(
    changes: Mapping[int, Change],
    *,
    first: RowStage = RowStage.GONE,
    again: RowStage = RowStage.GONE,
    had_by: Collection[int] = (),
    settled: Mapping[int, ArrivedDelivery] | None = None,
) -> MessageState:
    def place(entry: ScheduleEntry) -> RowStage:
        return {FIRST: first, AGAIN: again}[entry]

    return state_of(FIRST, changes, place, had_by, settled)


def told(found: MessageState) -> dict[int, tuple[str, int]]:
    return {number: (one.state, one.attempt) for number, one in found.deliveries.items()}


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        (RowStage.WAITS, State.SCHEDULED),
        (RowStage.WAITS_FOR_ONE, State.DELIVERING),
        (RowStage.UNDER_WAY, State.DELIVERING),
        (RowStage.GONE, State.DELIVERED),
    ],
)
def test_a_message_that_never_changed_goes_by_its_row(place: RowStage, expected: State) -> None:
    found = state({}, first=place)
    assert (found.state, found.entry, found.deliveries) == (expected, FIRST, {})


def test_one_that_was_moved_goes_by_the_row_that_it_was_moved_to() -> None:
    found = state({0: MOVED}, again=RowStage.WAITS)
    assert (found.state, found.entry) == (State.SCHEDULED, AGAIN)


def test_a_retry_for_the_only_receiver_is_scheduled() -> None:
    found = state({A: RETRY}, again=RowStage.WAITS, had_by=[A])
    assert (found.state, found.entry, found.attempts) == (State.SCHEDULED, AGAIN, 1)
    assert found.subscription_id == A and found.rows == [AGAIN]
    assert told(found) == {A: (State.SCHEDULED, 2)}


def test_a_retry_beside_a_delivery_is_on_its_way_and_both_are_told() -> None:
    found = state({B: RETRY}, again=RowStage.WAITS, had_by=[A, B])
    assert (found.state, found.entry, found.subscription_id) == (State.DELIVERING, FIRST, 0)
    assert told(found) == {A: (State.DELIVERED, 0), B: (State.SCHEDULED, 2)}
    # The row that waits has the body when the hour of the first one is gone.
    assert found.rows == [AGAIN, FIRST]
    settled = {A: ArrivedDelivery(3, 1500)}
    again = state({B: RETRY}, again=RowStage.WAITS, had_by=[A, B], settled=settled)
    assert (again.deliveries[A].attempt, again.deliveries[A].at_ms) == (3, 1500)


def test_each_subscription_is_told_once() -> None:
    found = state({B: DEAD}, had_by=[A, B], settled={A: ArrivedDelivery(1, 1500)})
    assert found.state is State.DEAD
    assert told(found) == {A: (State.DELIVERED, 1), B: (State.DEAD, 1)}


def test_nothing_of_a_cancelled_message_is_scheduled() -> None:
    found = state({0: CANCELLED, A: RETRY}, again=RowStage.GONE, had_by=[A])
    assert found.state is State.CANCELLED and told(found) == {A: (State.CANCELLED, 2)}
    found = state({0: CANCELLED, A: RETRY, B: DEAD}, settled={A: ArrivedDelivery(2, 2001)})
    assert told(found) == {A: (State.DELIVERED, 2), B: (State.DEAD, 1)}


@pytest.mark.parametrize(("due_ms", "row"), [(2000, AGAIN), (900, FIRST)])
def test_one_whose_retry_was_cancelled_is_due_by_the_later_row(
    due_ms: int, row: ScheduleEntry
) -> None:
    """A clock that was set back has the retry due before the message."""
    cancelled, retry = (msgspec.structs.replace(one, due_ms=due_ms) for one in (CANCELLED, RETRY))
    found = state({0: cancelled, A: retry})
    assert (found.state, found.entry) == (State.CANCELLED, row)
    # Where it was moved, by whichever way, that is when it is due.
    assert own_row(FIRST, {0: cancelled}) == ScheduleEntry(AGAIN.seq, due_ms)


def test_a_retry_that_has_ended_has_arrived() -> None:
    found = state({A: RETRY}, had_by=[A], settled={A: ArrivedDelivery(2, 2001)})
    assert found.state is State.DELIVERED and told(found) == {A: (State.DELIVERED, 2)}
    found = state({A: RETRY}, again=RowStage.UNDER_WAY, had_by=[A])
    assert found.state is State.DELIVERING and told(found) == {A: (State.DELIVERING, 2)}


def test_what_everybody_gave_up_is_cancelled_and_what_others_had_is_delivered() -> None:
    assert state({A: GIVEN_UP}, had_by=[A]).state is State.CANCELLED
    assert state({A: GIVEN_UP}, had_by=[A, B]).state is State.DELIVERED


def test_what_is_replayed_is_on_its_way_until_it_arrives_once_more() -> None:
    settled = {A: ArrivedDelivery(1, 1500)}
    found = state({0: REPLAYED, A: RETRY}, again=RowStage.WAITS, had_by=[A], settled=settled)
    assert found.state is State.DELIVERING and told(found) == {A: (State.SCHEDULED, 2)}
    assert found.deliveries[A].state in OPEN
    found = state({0: REPLAYED, A: RETRY}, had_by=[A], settled=settled)
    assert found.state is State.DELIVERED and told(found) == {A: (State.DELIVERED, 1)}
