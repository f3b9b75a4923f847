"""Retries: records that may not be written."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from delayserver.decisions.retries import RETRY_COMMIT_MS
from delayserver.delivery.webhook import WebhookResponse
from delayserver.records.attempts import DeliveryAttempt, History
from delayserver.records.message import (
    State,
    decode_payload,
)
from delayserver.records.tables import ChangeState, DeadLetter
from delayserver.times import format_time
from storage.rows import HOUR_MS, RecordKind
from tests.unit.decisions.outcome_parts import (
    BOTH,
    WEBHOOK,
    Parts,
    record,
    recorded_payload,
    told,
    with_options,
)
from tests.unit.fakes import (
    START_MS,
    counted,
    deliveries,
)


def test_a_delivery_leaves_its_place_when_its_retry_is_durable() -> None:
    parts = Parts()
    parts.answered(500)
    # The hour may not retire before: a crash then would lose the message.
    assert parts.hours.unsettled() == 1
    assert counted(parts.dispatcher).in_flight == 1
    assert parts.kinds() == [RecordKind.RETRY]
    parts.commit()
    assert counted(parts.dispatcher).in_flight == 0
    assert parts.messages.locate(parts.seq, START_MS).state is State.SCHEDULED
    assert parts.retries.retried_by_subject == {1: 1}


@pytest.mark.parametrize("attempt", [1, 2])
def test_a_failure_that_could_not_be_recorded_is_recorded_a_second_later(attempt: int) -> None:
    parts = Parts()
    parts.answered(500, attempt)
    parts.fail()
    assert parts.sequencer.changes(parts.seq) == {}
    assert counted(parts.dispatcher).in_flight == 1
    # However far the clock is set back meanwhile.
    parts.dispatcher.queues.now_ms = START_MS - HOUR_MS
    parts.wait(RETRY_COMMIT_MS - 1)
    assert parts.kinds() == []
    parts.wait(RETRY_COMMIT_MS)
    parts.commit()
    assert parts.state() == (ChangeState.RETRYING, ChangeState.DEAD)[attempt - 1]
    assert counted(parts.dispatcher).in_flight == 0


def test_a_receiver_that_is_gone_pauses_its_subscription_at_once() -> None:
    parts = Parts()
    queue = parts.dispatcher.queues.of(WEBHOOK)
    [handout] = parts.ports.handouts
    handout.answer(deliveries(parts.sent()), START_MS)
    parts.answered(410)
    for tries in 1, 2:
        assert queue.subscription.paused and queue.count == 1
        parts.fail()
        assert parts.kinds() == []
        parts.wait(tries * RETRY_COMMIT_MS)
    parts.commit()
    [known] = parts.registry
    assert known.paused and parts.dispatcher.queues.of(known).subscription.paused


def test_a_retry_tells_how_the_attempt_went() -> None:
    parts = Parts()
    parts.answered(500)
    history = recorded_payload(parts).history
    assert history is not None
    assert history.attempts == (DeliveryAttempt(1, 1, START_MS, 5, 500, "", "HTTP 500"),)
    # What cannot be written is told once, when it is written at last.
    parts.fail()
    parts.wait(RETRY_COMMIT_MS)
    history = recorded_payload(parts).history
    assert history is not None and len(history.attempts) == 1


def test_a_dead_letter_tells_of_all_attempts() -> None:
    parts = Parts()
    before = History((DeliveryAttempt(1, 1, 3, 4, 0, "", "refused"),))
    sent = parts.sent(2)
    sent = msgspec.structs.replace(
        sent, payload=msgspec.structs.replace(sent.payload, history=before)
    )
    result = WebhookResponse(None, error="no answer within 5 ms").result(START_MS, 5)
    parts.outcomes.on_sent([([sent], result)], START_MS)
    assert parts.kinds() == [RecordKind.DEAD]
    _, blob = parts.sequencer.group.encode()
    letter = msgspec.msgpack.decode(bytes(blob)[4:], type=DeadLetter)
    history = decode_payload(letter.payload, "x", 0, 1).history
    assert history is not None
    assert [one.error for one in history.attempts] == ["refused", "no answer within 5 ms"]


@pytest.mark.parametrize("attempt", [1, 2])
def test_what_expired_is_a_dead_letter_that_counts_the_attempts_before(attempt: int) -> None:
    parts = Parts()
    expired = deliveries(with_options(parts, attempt, ttl_ms=1))
    parts.outcomes.on_expired(expired, np.array([0]), START_MS + 1)
    row, _ = record(parts)
    assert (row["kind"], row["attempt"]) == (RecordKind.DEAD, attempt - 1)
    # It is on its way until that is durable.
    assert parts.hours.unsettled() == 1
    parts.commit()
    assert (parts.hours.unsettled(), parts.state()) == (0, ChangeState.DEAD)
    assert parts.given_up == ["expired"]


def test_what_has_arrived_is_settled_when_the_message_that_tells_so_is_durable() -> None:
    parts = Parts()
    sent = with_options(parts, outcomes=BOTH)
    parts.outcomes.on_sent([([sent], WebhookResponse(200).result(START_MS, 5))], START_MS)
    [(subject, body)] = told(parts)
    assert subject == "done"
    assert body == {
        "id": sent.message_id,
        "subject": "order.unpaid",
        "key": None,
        "subscription": WEBHOOK.name,
        "outcome": "delivered",
        "attempts": 1,
        "reason": None,
        "time": format_time(START_MS),
    }
    assert parts.ports.settled == [] and counted(parts.dispatcher).in_flight == 1
    parts.commit()
    assert len(parts.ports.settled) == 1 and counted(parts.dispatcher).in_flight == 0
    assert parts.dispatcher.settling.delivered_total == 1


def test_a_message_with_an_outcome_is_there_once_however_often_its_delivery_is_repeated() -> None:
    parts = Parts()
    sent = with_options(parts, outcomes=BOTH)
    result = WebhookResponse(200).result(START_MS, 5)
    parts.hours.add(START_MS // HOUR_MS, 2)  # it is repeated twice
    for _ in range(2):  # before it is durable
        parts.outcomes.on_sent([([sent], result)], START_MS)
    assert len(told(parts)) == 1 and parts.ports.settled == []
    parts.commit()
    assert len(parts.ports.settled) == 2
    # Behind it, and behind the dedupe window.
    later_ms = START_MS + 24 * HOUR_MS
    parts.outcomes.on_sent([([sent], result)], later_ms)
    assert told(parts) == [] and len(parts.ports.settled) == 3


def test_what_could_not_be_told_is_told_a_second_later_and_settled_then() -> None:
    parts = Parts()
    sent = with_options(parts, outcomes=BOTH)
    parts.outcomes.on_sent([([sent], WebhookResponse(200).result(START_MS, 5))], START_MS)
    parts.fail()
    assert told(parts) == [] and parts.ports.settled == []
    parts.wait(RETRY_COMMIT_MS)
    assert [subject for subject, _ in told(parts)] == ["done"]
    parts.commit()
    assert len(parts.ports.settled) == 1 and counted(parts.dispatcher).in_flight == 0


def test_a_dead_letter_that_could_not_be_written_is_told_once() -> None:
    parts = Parts()
    sent = with_options(parts, 2, outcomes=BOTH)
    parts.outcomes.on_sent([([sent], WebhookResponse(500).result(START_MS, 5))], START_MS)
    parts.fail()
    parts.wait(RETRY_COMMIT_MS)
    assert [subject for subject, _ in told(parts)] == ["failed"]
    parts.commit()
    assert parts.state() == ChangeState.DEAD
