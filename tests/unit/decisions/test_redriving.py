"""Redriving: delivered once more, because somebody asks."""

from __future__ import annotations

import numpy as np
import pytest

from delayserver.decisions.redriving import Replayable
from delayserver.errors import ConflictError, NotFoundError
from delayserver.records.message import (
    MessageOptions,
    Origin,
    Payload,
    ScheduleEntry,
    State,
    decode_payload,
)
from delayserver.records.tables import Change, ChangeState
from delayserver.schedule.wheel_rows import FiredRows
from storage.rows import FLAG_OPTIONS, FLAG_REPLAY, HOUR_MS, MESSAGE_DTYPE, RecordKind
from tests.unit.decisions.outcome_parts import Parts, record, settled_message, with_options
from tests.unit.fakes import (
    START_MS,
    deliveries,
    delivery,
    subscription,
)


def test_after_its_last_attempt_a_message_is_dead_and_can_be_redriven_once() -> None:
    parts = Parts()
    parts.answered(500, attempt=2)
    parts.commit()
    assert len(parts.given_up) == 1
    assert parts.retries.dead_by_subject == {1: 1}
    assert parts.messages.locate(parts.seq, START_MS).state is State.DEAD
    dead = parts.sent()
    payload = Payload(b"{}", origin=dead.origin)
    parts.redriving.redrive(1, parts.seq, payload, 1, START_MS)
    for again in (
        lambda: parts.redriving.redrive(1, parts.seq, payload, 1, START_MS),
        lambda: parts.redriving.discard(1, parts.seq, parts.seq, 1),
    ):
        with pytest.raises(NotFoundError):
            again()
    assert parts.state() == ChangeState.RETRYING


def test_a_dead_letter_of_a_deleted_subscription_is_redriven_to_its_heir_once() -> None:
    parts = Parts()
    parts.answered(500, attempt=2)
    parts.commit()
    payload = Payload(b"{}", origin=parts.sent().origin)
    parts.redriving.redrive(1, parts.seq, payload, 2, START_MS)
    assert parts.kinds() == [RecordKind.DISCARD, RecordKind.REDRIVE]
    changes = parts.sequencer.changes(parts.seq)
    assert (changes[1].state, changes[2].state) == (ChangeState.DISCARDED, ChangeState.RETRYING)
    for heir_id in (2, 3, 1):
        with pytest.raises(NotFoundError):
            parts.redriving.redrive(1, parts.seq, payload, heir_id, START_MS)
    parts.fail()
    assert parts.state() == ChangeState.DEAD


def test_a_dead_letter_is_not_redriven_to_an_heir_that_has_the_message_from_another() -> None:
    parts = Parts()
    parts.answered(500, attempt=2)
    parts.commit()
    payload = Payload(b"{}", origin=parts.sent().origin)
    left = FiredRows(START_MS // HOUR_MS, delivery(parts.seq).row)
    parts.dispatcher.queues.of(subscription(2)).rows.push(left)
    with pytest.raises(NotFoundError):
        parts.redriving.redrive(1, parts.seq, payload, 2, START_MS)
    assert parts.state() == ChangeState.DEAD
    parts.redriving.redrive(1, parts.seq, payload, 3, START_MS)


def test_a_dead_letter_whose_hour_is_gone_is_redriven_to_its_heir_once() -> None:
    parts = Parts()
    payload = Payload(b"{}", origin=parts.sent().origin)
    parts.redriving.redrive(7, parts.seq, payload, 8, START_MS)
    with pytest.raises(NotFoundError):
        parts.redriving.redrive(7, parts.seq, payload, 8, START_MS)


def test_a_dead_letter_whose_hour_is_gone_is_not_redriven_once_it_is_discarded() -> None:
    """By a call that had read it before."""
    parts = Parts()
    payload = Payload(b"{}", origin=parts.sent().origin)
    parts.redriving.discard(7, parts.seq, parts.seq, 1)
    with pytest.raises(NotFoundError):
        parts.redriving.redrive(7, parts.seq, payload, 7, START_MS)


def test_a_dead_letter_that_was_discarded_is_gone() -> None:
    parts = Parts()
    parts.outcomes.on_outdated(deliveries(parts.sent()), "too old", START_MS)
    parts.commit()
    parts.redriving.discard(1, parts.seq, parts.seq, 1)
    assert parts.state() == ChangeState.DISCARDED
    with pytest.raises(NotFoundError):
        parts.redriving.discard(1, parts.seq, parts.seq, 1)


def test_a_redrive_gives_a_new_time_to_live_and_keeps_the_priority() -> None:
    parts = Parts()
    parts.outcomes.on_expired(
        deliveries(with_options(parts, ttl_ms=1, priority=3)), np.array([0]), START_MS + 1
    )
    _, payload = record(parts)
    parts.commit()
    parts.redriving.redrive(1, parts.seq, payload, 1, START_MS + 500)
    row, redriven = record(parts)
    assert redriven.options == MessageOptions(1, START_MS + 500, 3)
    assert redriven.origin is not None
    assert redriven.expires_ms(redriven.origin.due_ms) == START_MS + 501
    assert (row["kind"], row["flags"]) == (RecordKind.REDRIVE, FLAG_OPTIONS | 3 << 4)


def test_a_replay_is_a_new_row_for_one_subscription_that_tells_of_what_was() -> None:
    parts = Parts()
    found = settled_message(parts)
    receivers, group = parts.redriving.replay(found, [1], START_MS + 7)
    assert receivers == [1]
    rows, blob = group.encode()
    [row] = np.frombuffer(rows, MESSAGE_DTYPE)
    assert (row["kind"], row["flags"], row["due_ms"]) == (
        *(RecordKind.REPLAY, FLAG_REPLAY),
        START_MS + 7,
    )
    assert (row["message_seq"], row["target_seq"], row["subscription_id"], row["attempt"]) == (
        *(parts.seq, parts.seq),
        *(1, 1),
    )
    payload = decode_payload(bytes(blob), "x", 0, 1)
    assert payload.is_replay and payload.history is not None
    assert [one.status for one in payload.history.attempts] == [200]
    assert payload.origin == Origin(parts.seq, START_MS, 1, START_MS, 1)
    # It was delivered, and is again: nobody can take that back.
    parts.commit()
    assert parts.messages.locate(parts.seq, START_MS).state is State.DELIVERING
    with pytest.raises(ConflictError):
        parts.messages.cancel(parts.seq, START_MS)
    with pytest.raises(ConflictError, match="delivering"):
        parts.redriving.replay(found, [1], START_MS + 8)
    assert parts.redriving.replayed_by_subject == {1: 1}


def test_what_is_not_settled_is_not_replayed() -> None:
    parts = Parts()
    entry = ScheduleEntry(parts.seq, START_MS)
    found = Replayable(parts.seq, START_MS, 1, entry, START_MS, Payload(b"{}"), [])
    with pytest.raises(ConflictError, match="delivering") as caught:
        parts.redriving.replay(found, [1], START_MS)
    assert caught.value.state == State.DELIVERING
    assert parts.kinds() == []


@pytest.mark.parametrize("subscription_ids", [[], [99]])
def test_nobody_in_particular_gets_no_replay(subscription_ids: list[int]) -> None:
    parts = Parts()
    found = settled_message(parts)
    with pytest.raises(ConflictError, match="they were deleted"):
        parts.redriving.replay(found, subscription_ids, START_MS)
    assert parts.kinds() == []


def test_a_dead_letter_is_redriven_and_not_replayed() -> None:
    parts = Parts()
    parts.answered(500, attempt=2)
    parts.commit()
    entry = ScheduleEntry(parts.seq, START_MS)
    found = Replayable(parts.seq, START_MS, 1, entry, START_MS, Payload(b"{}"), [])
    with pytest.raises(ConflictError, match="redriven"):
        parts.redriving.replay(found, [1], START_MS)


def test_a_replay_that_could_not_be_written_was_never_asked_for() -> None:
    parts = Parts()
    found = settled_message(parts)
    parts.redriving.replay(found, [1], START_MS)
    parts.fail()
    assert parts.messages.locate(parts.seq, START_MS).state is State.DELIVERED
    assert parts.sequencer.changes(parts.seq) == {}


def test_a_replay_that_dies_and_is_thrown_away_reads_as_delivered() -> None:
    parts = Parts()
    found = settled_message(parts)
    parts.redriving.replay(found, [1], START_MS)
    parts.commit()
    replayed = parts.sequencer.changes(parts.seq)[1].entry_seq
    parts.wheel.remove(replayed, START_MS)
    dead = Change(ChangeState.DEAD, replayed, START_MS, 2, 1)
    record = parts.sequencer.append(RecordKind.DEAD, message_seq=parts.seq, subscription_id=1)
    parts.sequencer.put_change(record, parts.seq, 1, dead)
    assert parts.messages.locate(parts.seq, START_MS).state is State.DEAD
    parts.redriving.discard(1, replayed, parts.seq, 1)
    assert parts.messages.locate(parts.seq, START_MS).state is State.DELIVERED
