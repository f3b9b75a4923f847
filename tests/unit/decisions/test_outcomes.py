"""Outcomes: answers that come together, and records that may not be written."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest

from delayserver.config import Settings
from delayserver.decisions.new_messages import NewMessage
from delayserver.decisions.outcome_messages import OutcomeMessages
from delayserver.decisions.outcomes import RECORD_ITEMS, RETRY_COMMIT_MS, Outcomes, Replayable
from delayserver.decisions.subscribing import Subscribing
from delayserver.delivery.backlog import Instant
from delayserver.delivery.delayed_fetch import Pulled, PullRequest
from delayserver.delivery.handout import Handout
from delayserver.delivery.sink import Confirmed, Recorded
from delayserver.delivery.webhook import WebhookResponse
from delayserver.errors import ConflictError, NotFoundError, OverloadedError
from delayserver.records.attempts import DeliveryAttempt, History
from delayserver.records.message import (
    DueDelivery,
    MessageOptions,
    Origin,
    OutcomeSubjects,
    Payload,
    ScheduleEntry,
    State,
    decode_payload,
)
from delayserver.records.subscriptions import Subscription
from delayserver.records.tables import Change, ChangeState, DeadLetter
from delayserver.schedule.wheel_rows import FiredRows
from delayserver.timers.timeouts import Timeouts
from delayserver.times import format_time
from storage.errors import DiskFullError
from storage.notes import Note
from storage.rows import FLAG_OPTIONS, FLAG_REPLAY, HOUR_MS, MESSAGE_DTYPE, RecordKind
from tests.unit.fakes import (
    START_MS,
    MessageParts,
    Stopwatch,
    deliveries,
    delivery,
    message,
    seqs,
    subscription,
)
from tests.world.publishes import publish_all
from tests.world.server import Observer, SimulatedClock, SimulatedServer
from tests.world.storage.catalog import MemoryCatalog
from tests.world.storage.files import SimulatedFiles


@pytest.fixture
def server() -> SimulatedServer:
    """Four messages are due for a webhook that takes two at once; two are on their way."""
    clock = SimulatedClock()
    server = SimulatedServer(
        Settings(), SimulatedFiles(), MemoryCatalog(), clock, random.Random(0), Observer()
    )
    receiver = subscription(
        1, subject="*", type="webhook", max_in_flight=2, created_ms=clock.now_ms
    )
    server.engine.subscribing.put_subscription(receiver)
    server.rest()
    clock.move(1)
    messages = [NewMessage("orders", clock.now_ms, Payload(b"%d" % number)) for number in range(4)]
    publish_all(server.engine.publishing, messages, clock.now_ms)
    for _ in range(2):
        server.rest()
        server.tick()
    server.rest()
    return server


def bodies(server: SimulatedServer) -> list[bytes]:
    return [delivery.payload.body for [delivery] in server.sending]


@pytest.mark.parametrize("statuses", [(200, 200), (200, 500), (500, None)])
def test_answers_that_come_together_make_place_in_one_step(
    server: SimulatedServer, monkeypatch: pytest.MonkeyPatch, statuses: tuple[int | None, ...]
) -> None:
    assert bodies(server) == [b"0", b"1"]
    answers = [
        (deliveries, WebhookResponse(status).result(0, 0))
        for deliveries, status in zip(server.sending, statuses, strict=True)
    ]
    server.sending.clear()
    taken: list[int] = []
    read = server.read

    def noted(take: Handout) -> None:
        taken.append(take.count)
        read(take)

    monkeypatch.setattr(server, "read", noted)
    server.engine.outcomes.on_sent(answers, server.clock())
    if statuses == (200, 200):
        assert taken == [2]
    server.rest()  # A failure makes place once it is recorded.
    assert bodies(server) == [b"2", b"3"]
    assert server.engine.dispatcher.settling.delivered_total == statuses.count(200)


def test_no_answers_are_nothing(server: SimulatedServer) -> None:
    server.engine.outcomes.on_sent([], server.clock())
    assert bodies(server) == [b"0", b"1"]


# ---- records that a failure makes -------------------------------------------------------------

FULL = DiskFullError("pwrite", "messages", "no space")
WEBHOOK = subscription(
    1,
    type="webhook",
    url="http://127.0.0.1/",
    max_attempts=2,
    backoff_ms=(5_000,),
)


class Parts(MessageParts):
    """Outcomes, and one delivery that was sent."""

    def __init__(self, receiver: Subscription = WEBHOOK, **settings: Any) -> None:
        super().__init__(receiver, **settings)
        self.given_up: list[str] = []
        self.stopwatch = Stopwatch()
        self.timeouts = Timeouts(self.stopwatch)
        self.subscribing = Subscribing(self.registry, self.sequencer, self.groups, self.dispatcher)
        self.outcomes = Outcomes(
            self.registry,
            self.sequencer,
            self.groups,
            self.hours,
            self.messages,
            self.dispatcher,
            self.subscribing,
            OutcomeMessages(self.registry, self.publishing),
            self.timeouts,
            epoch="e",
            random=lambda: 0.0,
            given_up=lambda delivery, reason: self.given_up.append(reason),
            slices=self.slices,
            group_retry_max_ms=HOUR_MS,
        )
        [self.seq] = self.publish(message(START_MS))
        self.commit()
        due = self.wheel.advance(START_MS, loaded_until_ms=START_MS + HOUR_MS, rows_max=9)
        self.dispatcher.fire(due, START_MS)

    def wait(self, passed_ms: int) -> None:
        """Until the stopwatch shows `passed_ms`, whatever the clock does."""
        self.stopwatch.shows_ms = passed_ms
        self.timeouts.advance()

    def sent(self, attempt: int = 1) -> DueDelivery:
        return delivery(self.seq, attempt=attempt)

    def answered(self, status: int, attempt: int = 1) -> None:
        self.outcomes.on_sent(
            [([self.sent(attempt)], WebhookResponse(status).result(START_MS, 5))], START_MS
        )

    def nack(self, tokens: list[str], delay_ms: int) -> list[str]:
        """Give leases back; returns those that were over."""
        told: list[str] = ["nothing"]

        def done(expired: list[str], error: Exception | None) -> None:
            assert error is None
            told[:] = expired

        self.outcomes.nack(tokens, delay_ms, START_MS, done=done)
        return told

    def fail(self) -> None:
        """The disk is full."""
        self.groups.flush(START_MS)
        self.groups.on_commit_failed(FULL)

    def kinds(self) -> list[int]:
        """Of the records in the open group."""
        rows, _ = self.sequencer.group.encode()
        kinds: list[int] = np.frombuffer(rows, MESSAGE_DTYPE)["kind"].tolist()
        return kinds

    def state(self) -> int:
        return self.sequencer.changes(self.seq)[1].state


def test_a_delivery_leaves_its_place_when_its_retry_is_durable() -> None:
    parts = Parts()
    parts.answered(500)
    # The hour may not retire before: a crash then would lose the message.
    assert parts.hours.unsettled() == 1
    assert parts.dispatcher.in_flight_count() == 1
    assert parts.kinds() == [RecordKind.RETRY]
    parts.commit()
    assert parts.dispatcher.in_flight_count() == 0
    assert parts.messages.locate(parts.seq, START_MS).state is State.SCHEDULED
    assert parts.outcomes.retried_by_subject == {1: 1}


@pytest.mark.parametrize("attempt", [1, 2])
def test_a_failure_that_could_not_be_recorded_is_recorded_a_second_later(attempt: int) -> None:
    parts = Parts()
    parts.answered(500, attempt)
    parts.fail()
    assert parts.sequencer.changes(parts.seq) == {}
    assert parts.dispatcher.in_flight_count() == 1
    # However far the clock is set back meanwhile.
    parts.dispatcher.queues.now_ms = START_MS - HOUR_MS
    parts.wait(RETRY_COMMIT_MS - 1)
    assert parts.kinds() == []
    parts.wait(RETRY_COMMIT_MS)
    parts.commit()
    assert parts.state() == (ChangeState.RETRYING, ChangeState.DEAD)[attempt - 1]
    assert parts.dispatcher.in_flight_count() == 0


def test_after_its_last_attempt_a_message_is_dead_and_can_be_redriven_once() -> None:
    parts = Parts()
    parts.answered(500, attempt=2)
    parts.commit()
    assert len(parts.given_up) == 1
    assert parts.outcomes.dead_by_subject == {1: 1}
    assert parts.messages.locate(parts.seq, START_MS).state is State.DEAD
    dead = parts.sent()
    payload = Payload(b"{}", origin=dead.origin)
    parts.outcomes.redrive(1, parts.seq, payload, 1, START_MS)
    for again in (
        lambda: parts.outcomes.redrive(1, parts.seq, payload, 1, START_MS),
        lambda: parts.outcomes.discard(1, parts.seq, parts.seq, 1),
    ):
        with pytest.raises(NotFoundError):
            again()
    assert parts.state() == ChangeState.RETRYING


def test_a_dead_letter_of_a_deleted_subscription_is_redriven_to_its_heir_once() -> None:
    parts = Parts()
    parts.answered(500, attempt=2)
    parts.commit()
    payload = Payload(b"{}", origin=parts.sent().origin)
    parts.outcomes.redrive(1, parts.seq, payload, 2, START_MS)
    assert parts.kinds() == [RecordKind.DISCARD, RecordKind.REDRIVE]
    changes = parts.sequencer.changes(parts.seq)
    assert (changes[1].state, changes[2].state) == (ChangeState.DISCARDED, ChangeState.RETRYING)
    for heir_id in (2, 3, 1):
        with pytest.raises(NotFoundError):
            parts.outcomes.redrive(1, parts.seq, payload, heir_id, START_MS)
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
        parts.outcomes.redrive(1, parts.seq, payload, 2, START_MS)
    assert parts.state() == ChangeState.DEAD
    parts.outcomes.redrive(1, parts.seq, payload, 3, START_MS)


def test_a_dead_letter_whose_hour_is_gone_is_redriven_to_its_heir_once() -> None:
    parts = Parts()
    payload = Payload(b"{}", origin=parts.sent().origin)
    parts.outcomes.redrive(7, parts.seq, payload, 8, START_MS)
    with pytest.raises(NotFoundError):
        parts.outcomes.redrive(7, parts.seq, payload, 8, START_MS)


def test_a_dead_letter_whose_hour_is_gone_is_not_redriven_once_it_is_discarded() -> None:
    """By a call that had read it before."""
    parts = Parts()
    payload = Payload(b"{}", origin=parts.sent().origin)
    parts.outcomes.discard(7, parts.seq, parts.seq, 1)
    with pytest.raises(NotFoundError):
        parts.outcomes.redrive(7, parts.seq, payload, 7, START_MS)


def test_a_dead_letter_that_was_discarded_is_gone() -> None:
    parts = Parts()
    parts.outcomes.on_outdated(deliveries(parts.sent()), "too old", START_MS)
    parts.commit()
    parts.outcomes.discard(1, parts.seq, parts.seq, 1)
    assert parts.state() == ChangeState.DISCARDED
    with pytest.raises(NotFoundError):
        parts.outcomes.discard(1, parts.seq, parts.seq, 1)


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


def test_a_receiver_that_is_gone_does_not_undo_a_change_that_is_being_synced() -> None:
    parts = Parts()
    changed = msgspec.structs.replace(WEBHOOK, url="http://elsewhere")
    parts.subscribing.put_subscription(changed)
    parts.answered(410)
    parts.commit()
    [known] = parts.registry
    assert (known.url, known.paused) == ("http://elsewhere", True)


def test_a_receiver_that_is_gone_does_not_bring_back_what_is_being_deleted() -> None:
    parts = Parts()
    parts.subscribing.change(WEBHOOK.name, deleted=True)
    parts.answered(410)
    assert parts.kinds() == [RecordKind.SUBSCRIPTION]
    parts.commit()
    assert not len(parts.registry)


def test_what_a_deleted_subscription_left_gets_a_record_of_its_own() -> None:
    parts = Parts()
    parts.outcomes.on_orphaned(parts.sent(), 7, START_MS)
    assert parts.kinds() == [RecordKind.RETRY]
    change = parts.sequencer.changes(parts.seq)[7]
    assert (change.state, change.attempt) == (ChangeState.RETRYING, 1)
    # Nobody has tried again.
    assert not parts.outcomes.retried_by_subject


def test_a_consumer_that_gives_back_waits_or_gets_it_again_and_the_last_attempt_is_dead() -> None:
    receiver = subscription(1, max_attempts=2, backoff_ms=(5_000,))
    parts = Parts(receiver)
    leases = parts.outcomes.leases

    def lease(attempt: int = 1) -> str:
        parts.dispatcher.queues.of(receiver).rows.pop(1, 1, Instant(START_MS, 0))
        return leases.grant(deliveries(parts.sent(attempt)), 1000) + "0"

    assert parts.nack([lease(), "e-9-0"], 0) == ["e-9-0"]
    assert parts.dispatcher.queues.of(receiver).count == 1
    parts.outcomes.nack([lease()], 50, START_MS)
    assert parts.kinds() == [RecordKind.RETRY]
    parts.wait(0)
    assert parts.outcomes.extend([lease(attempt=2)], 10) == []
    parts.wait(10)
    assert parts.kinds() == [RecordKind.RETRY, RecordKind.DEAD]
    assert parts.outcomes.dead_by_subject == {1: 1}


@pytest.mark.parametrize("attempt", [1, 2])
def test_many_long_bodies_are_recorded_again_in_several_groups(attempt: int) -> None:
    receiver = subscription(1, max_attempts=2)
    parts = Parts(receiver, group_max_bytes=3000)
    body = Payload(bytes(900))
    ones = [
        msgspec.structs.replace(delivery(seq, attempt=attempt), payload=body) for seq in range(2, 8)
    ]
    parts.hours.add(START_MS // HOUR_MS, len(ones))
    token = parts.outcomes.leases.grant(deliveries(*ones), 1000)
    began = len(parts.ports.committing)
    parts.outcomes.nack([f"{token}{index}" for index in range(6)], 50, START_MS)
    while not parts.groups.is_idle:
        parts.commit()
    groups = parts.ports.committing[began:]
    assert [group.count for group in groups] == [2, 2, 2]
    assert all(group.total_bytes <= 3000 for group in groups)


def test_a_delay_is_refused_while_too_much_is_not_filed_and_the_leases_go_on() -> None:
    sizes = {"group_max_bytes": 600, "checkpoint_bytes": 600, "unfiled_max_bytes": 600}
    parts = Parts(subscription(1), **sizes)
    parts.publish(message(START_MS, body=bytes(700)))
    parts.commit()
    token = parts.outcomes.leases.grant(deliveries(parts.sent()), 1000) + "0"
    with pytest.raises(OverloadedError):
        parts.outcomes.nack([token], 50, START_MS)
    assert parts.outcomes.leases.get(token) is not None
    assert parts.nack([token], 0) == []


class Holding(Parts):
    """A consumer holds five messages; two are recorded in a turn of the loop."""

    def __init__(self, attempt: int = 1) -> None:
        self.receiver = subscription(1, max_attempts=2)
        super().__init__(self.receiver)
        self.slices.turn_items = 2 * RECORD_ITEMS
        ones = [delivery(seq, attempt=attempt) for seq in range(2, 7)]
        self.hours.add(START_MS // HOUR_MS, len(ones))
        token = self.outcomes.leases.grant(deliveries(*ones), 1000)
        self.tokens = [f"{token}{index}" for index in range(5)]
        self.told: list[tuple[list[str], Exception | None]] = []

    def begin(self) -> None:
        self.outcomes.nack(
            [*self.tokens, "e-9-0"], 50, START_MS, done=lambda *what: self.told.append(what)
        )

    def turn(self) -> None:
        turns, self.ports.turns = self.ports.turns, []
        for function in turns:
            function()


def test_a_consumer_that_gives_back_many_does_not_hold_up_the_others() -> None:
    parts = Holding()
    parts.begin()
    assert parts.kinds() == [RecordKind.RETRY] * 2
    parts.commit()
    # All of them are on their way back: they cannot be given back again, nor expire.
    assert parts.nack(parts.tokens, 0) == parts.tokens
    parts.turn()
    assert parts.kinds() == [RecordKind.RETRY] * 2
    for _ in range(2):  # once the queue of the first two is looked at
        parts.turn()
    assert parts.kinds() == [RecordKind.RETRY] * 3, "the first two are in the group before"
    assert (parts.told, parts.ports.turns) == ([], [])
    parts.commit()
    assert parts.told == [(["e-9-0"], None)]
    assert parts.outcomes.retried_by_subject == {1: 5}


def test_a_nack_of_which_a_part_could_not_be_written_fails() -> None:
    parts = Holding()
    parts.begin()
    parts.fail()
    for _ in range(2):
        parts.turn()
        parts.commit()
    assert parts.told == [(["e-9-0"], FULL)]
    assert parts.outcomes.retried_by_subject == {1: 5}
    # What could not be recorded is recorded later, and the others are.
    parts.wait(RETRY_COMMIT_MS)
    assert parts.kinds() == [RecordKind.RETRY] * 2


def test_many_last_attempts_that_end_together_are_buried_some_in_a_turn() -> None:
    parts = Holding(attempt=2)
    assert parts.nack(parts.tokens, 0) == []
    counts = [len(parts.kinds())]
    while parts.ports.turns:
        parts.turn()
        counts.append(len(parts.kinds()))
    assert counts == [2, 4, 5]
    assert parts.kinds() == [RecordKind.DEAD] * 5


def test_no_message_dies_of_a_lease_that_ran_out_with_others() -> None:
    parts = Holding(attempt=2)
    parts.wait(1000)
    assert parts.kinds() == []
    queue = parts.dispatcher.queues.of(parts.receiver)
    assert len(queue.rows.next_suspects(20)) == 5
    # Each has its last attempt alone; and then it is the cause.
    handed_out = seqs(queue.pop(20, 1 << 20, Instant(START_MS, 1000)))
    assert len(handed_out) == 1
    assert not queue.rows.has_suspects


# ---- how attempts went ---------------------------------------------------------------------------


def recorded_payload(parts: Parts) -> Payload:
    """Of the one record in the open group."""
    _, blob = parts.sequencer.group.encode()
    return decode_payload(bytes(blob), "messages", 0, 1)


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


def test_what_arrives_is_told_with_the_row_that_settles_it() -> None:
    parts = Parts()
    response = WebhookResponse(200, body=b"thanks")
    parts.outcomes.on_sent([([parts.sent()], response.result(START_MS - 9, 9))], START_MS)
    [note] = parts.ports.notes
    assert note == Note(START_MS // HOUR_MS, parts.seq, 1, 1, START_MS - 9, 9, 200, "thanks")


def test_what_is_given_back_for_later_tells_since_when_it_was_leased() -> None:
    parts = Parts()
    leased = deliveries(parts.sent())
    leased.leased_ms = START_MS - 70
    prefix = parts.outcomes.leases.grant(leased, 1000)
    parts.nack([f"{prefix}0"], 500)
    history = recorded_payload(parts).history
    assert history is not None
    [attempt] = history.attempts
    assert (attempt.began_ms, attempt.duration_ms) == (START_MS - 70, 70)
    assert attempt.error == "given back (nack)"


def test_one_note_is_enough_for_what_is_acknowledged_together() -> None:
    parts = Parts()
    leased = deliveries(parts.sent(), delivery(parts.seq + 1))
    leased.leased_ms = START_MS - 70
    prefix = parts.outcomes.leases.grant(leased, 1000)
    parts.hours.add(START_MS // HOUR_MS, 1)
    parts.outcomes.ack([f"{prefix}0", f"{prefix}1"], START_MS)
    [note] = parts.ports.notes
    assert (note.seq, note.count, note.began_ms, note.duration_ms) == (
        *(parts.seq, 2),
        *(START_MS - 70, 70),
    )


# ---- messages with options --------------------------------------------------------------------


def with_options(parts: Parts, attempt: int = 1, **options: Any) -> DueDelivery:
    payload = Payload(b"{}", options=MessageOptions(**options))
    return msgspec.structs.replace(parts.sent(attempt), payload=payload)


def record(parts: Parts) -> tuple[Any, Payload]:
    """The only record of the open group, and the message in it."""
    rows, payloads = parts.sequencer.group.encode()
    [row] = np.frombuffer(rows, MESSAGE_DTYPE)
    sealed = payloads
    if row["kind"] == RecordKind.DEAD:
        sealed = msgspec.msgpack.decode(payloads[4:], type=DeadLetter).payload
    return row, decode_payload(sealed, "", 0, 0)


@pytest.mark.parametrize(("ttl_ms", "wait_ms"), [(0, 5_000), (60_000, 5_000), (2_000, 2_000)])
def test_a_retry_is_due_no_later_than_its_message_expires(ttl_ms: int, wait_ms: int) -> None:
    parts = Parts()
    sent = with_options(parts, ttl_ms=ttl_ms, priority=7)
    parts.outcomes.on_sent([([sent], WebhookResponse(500).result(START_MS, 5))], START_MS)
    row, payload = record(parts)
    assert (row["kind"], row["due_ms"]) == (RecordKind.RETRY, START_MS + wait_ms)
    assert payload.options == sent.payload.options
    assert row["flags"] == (FLAG_OPTIONS if ttl_ms else 0) | 7 << 4


def test_a_retry_of_what_has_expired_meanwhile_is_due_now() -> None:
    parts = Parts()
    sent = with_options(parts, ttl_ms=1_000)
    later_ms = START_MS + 9_000
    parts.outcomes.on_sent([([sent], WebhookResponse(500).result(START_MS, 5))], later_ms)
    assert record(parts)[0]["due_ms"] == later_ms


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


def test_very_many_that_expired_are_recorded_some_in_a_turn() -> None:
    parts = Parts()
    parts.slices.turn_items = 2 * RECORD_ITEMS
    ones = [msgspec.structs.replace(delivery(seq), payload=Payload(b"")) for seq in range(10, 15)]
    parts.outcomes.on_expired(deliveries(*ones), np.arange(5), START_MS)
    counts = [parts.sequencer.group.count]
    while parts.ports.turns:
        parts.ports.turns.pop(0)()
        counts.append(parts.sequencer.group.count)
    assert counts == [2, 4, 5]


def test_a_redrive_gives_a_new_time_to_live_and_keeps_the_priority() -> None:
    parts = Parts()
    parts.outcomes.on_expired(
        deliveries(with_options(parts, ttl_ms=1, priority=3)), np.array([0]), START_MS + 1
    )
    _, payload = record(parts)
    parts.commit()
    parts.outcomes.redrive(1, parts.seq, payload, 1, START_MS + 500)
    row, redriven = record(parts)
    assert redriven.options == MessageOptions(1, START_MS + 500, 3)
    assert redriven.origin is not None
    assert redriven.expires_ms(redriven.origin.due_ms) == START_MS + 501
    assert (row["kind"], row["flags"]) == (RecordKind.REDRIVE, FLAG_OPTIONS | 3 << 4)


# ---- once more -----------------------------------------------------------------------------------


def settled_message(parts: Parts) -> Replayable:
    """The message, as it is read once its delivery is settled."""
    parts.outcomes.on_sent([([parts.sent()], WebhookResponse(200).result(START_MS, 5))], START_MS)
    entry = ScheduleEntry(parts.seq, START_MS)
    arrived = DeliveryAttempt(1, 1, START_MS, 5, 200)
    return Replayable(parts.seq, START_MS, 1, entry, START_MS, Payload(b"{}"), [arrived])


def test_a_replay_is_a_new_row_for_one_subscription_that_tells_of_what_was() -> None:
    parts = Parts()
    found = settled_message(parts)
    receivers, group = parts.outcomes.replay(found, [1], START_MS + 7)
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
        parts.outcomes.replay(found, [1], START_MS + 8)
    assert parts.outcomes.replayed_by_subject == {1: 1}


def test_what_is_not_settled_is_not_replayed() -> None:
    parts = Parts()
    entry = ScheduleEntry(parts.seq, START_MS)
    found = Replayable(parts.seq, START_MS, 1, entry, START_MS, Payload(b"{}"), [])
    with pytest.raises(ConflictError, match="delivering") as caught:
        parts.outcomes.replay(found, [1], START_MS)
    assert caught.value.state == State.DELIVERING
    assert parts.kinds() == []


@pytest.mark.parametrize("subscription_ids", [[], [99]])
def test_nobody_in_particular_gets_no_replay(subscription_ids: list[int]) -> None:
    parts = Parts()
    found = settled_message(parts)
    with pytest.raises(ConflictError, match="they were deleted"):
        parts.outcomes.replay(found, subscription_ids, START_MS)
    assert parts.kinds() == []


def test_a_dead_letter_is_redriven_and_not_replayed() -> None:
    parts = Parts()
    parts.answered(500, attempt=2)
    parts.commit()
    entry = ScheduleEntry(parts.seq, START_MS)
    found = Replayable(parts.seq, START_MS, 1, entry, START_MS, Payload(b"{}"), [])
    with pytest.raises(ConflictError, match="redriven"):
        parts.outcomes.replay(found, [1], START_MS)


def test_a_replay_that_could_not_be_written_was_never_asked_for() -> None:
    parts = Parts()
    found = settled_message(parts)
    parts.outcomes.replay(found, [1], START_MS)
    parts.fail()
    assert parts.messages.locate(parts.seq, START_MS).state is State.DELIVERED
    assert parts.sequencer.changes(parts.seq) == {}


def test_a_replay_that_dies_and_is_thrown_away_reads_as_delivered() -> None:
    parts = Parts()
    found = settled_message(parts)
    parts.outcomes.replay(found, [1], START_MS)
    parts.commit()
    replayed = parts.sequencer.changes(parts.seq)[1].entry_seq
    parts.wheel.remove(replayed, START_MS)
    dead = Change(ChangeState.DEAD, replayed, START_MS, 2, 1)
    record = parts.sequencer.append(RecordKind.DEAD, message_seq=parts.seq, subscription_id=1)
    parts.sequencer.put_change(record, parts.seq, 1, dead)
    assert parts.messages.locate(parts.seq, START_MS).state is State.DEAD
    parts.outcomes.discard(1, replayed, parts.seq, 1)
    assert parts.messages.locate(parts.seq, START_MS).state is State.DELIVERED


# ---- messages with the outcome of others ------------------------------------------------------

BOTH = OutcomeSubjects("done", "failed")


def told(parts: Parts) -> list[tuple[str, dict[str, Any]]]:
    """Subject and body of the messages with an outcome in the open group."""
    rows, payloads = parts.sequencer.group.encode()
    found = []
    for row in np.frombuffer(rows, MESSAGE_DTYPE):
        if row["kind"] == RecordKind.PUBLISH:
            start, length = int(row["payload_offset"]), int(row["payload_length"])
            payload = decode_payload(payloads[start : start + length], "", 0, 0)
            body = msgspec.json.decode(payload.body)
            assert payload.key == f"{body['id']}:{body['subscription']}:{body['outcome']}"
            assert payload.headers == {
                "delay-outcome": body["outcome"],
                "delay-outcome-id": body["id"],
                "delay-outcome-subscription": body["subscription"],
            }
            assert payload.options is None  # else there could be loops
            assert row["due_ms"] == parts.dispatcher.queues.now_ms
            found.append((parts.sequencer.subject_names[row["subject_id"]], body))
    return found


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
    assert parts.ports.settled == [] and parts.dispatcher.in_flight_count() == 1
    parts.commit()
    assert len(parts.ports.settled) == 1 and parts.dispatcher.in_flight_count() == 0
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
    assert len(parts.ports.settled) == 1 and parts.dispatcher.in_flight_count() == 0


def test_a_dead_letter_and_the_message_that_tells_so_are_in_one_group() -> None:
    parts = Parts(group_max_bytes=100_000)
    sent = with_options(parts, 2, outcomes=BOTH)
    # As much as the record alone leaves room for.
    parts.publish(message(START_MS + HOUR_MS, body=bytes(99_300)))
    parts.outcomes.on_sent([([sent], WebhookResponse(500).result(START_MS, 5))], START_MS)
    [(subject, body)] = told(parts)
    assert (subject, body["outcome"], body["attempts"]) == ("failed", "dead", 2)
    assert body["reason"]
    assert RecordKind.DEAD in parts.kinds()


def test_a_dead_letter_that_could_not_be_written_is_told_once() -> None:
    parts = Parts()
    sent = with_options(parts, 2, outcomes=BOTH)
    parts.outcomes.on_sent([([sent], WebhookResponse(500).result(START_MS, 5))], START_MS)
    parts.fail()
    parts.wait(RETRY_COMMIT_MS)
    assert [subject for subject, _ in told(parts)] == ["failed"]
    parts.commit()
    assert parts.state() == ChangeState.DEAD


@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize("outcomes", [None, OutcomeSubjects()])
def test_nothing_is_told_that_nobody_has_asked_for(
    status: int, outcomes: OutcomeSubjects | None
) -> None:
    parts = Parts()
    sent = with_options(parts, 2, ttl_ms=HOUR_MS, outcomes=outcomes)
    parts.outcomes.on_sent([([sent], WebhookResponse(status).result(START_MS, 5))], START_MS)
    assert told(parts) == []
    assert len(parts.ports.settled) == (status == 200)


def test_what_all_replicas_know_is_settled_at_once_and_told() -> None:
    parts = Parts()
    sent = with_options(parts, outcomes=BOTH)
    parts.outcomes.on_sent([([sent], Confirmed(Recorded(START_MS, 7)))], START_MS)
    assert parts.dispatcher.in_flight_count() == 0
    assert [subject for subject, _ in told(parts)] == ["done"]


def test_acknowledged_messages_are_settled_when_those_are_durable_that_tell_so() -> None:
    clock = SimulatedClock()
    server = SimulatedServer(
        Settings(), SimulatedFiles(), MemoryCatalog(), clock, random.Random(0), Observer()
    )
    put = server.engine.subscribing.put_subscription
    put(subscription(1, subject="orders", created_ms=clock.now_ms))
    put(subscription(2, subject="done", created_ms=clock.now_ms))
    server.rest()
    clock.move(1)
    options = [MessageOptions(outcomes=BOTH), None, MessageOptions(ttl_ms=HOUR_MS)]
    messages = [
        NewMessage("orders", clock.now_ms, Payload(b"%d" % number, options=one))
        for number, one in enumerate(options)
    ]
    publish_all(server.engine.publishing, messages, clock.now_ms)
    for _ in range(2):
        server.rest()
        server.tick()
    server.rest()
    consumer, listener = map(server.engine.registry.by_id, (1, 2))
    assert consumer is not None and listener is not None
    got: list[Pulled] = []
    server.engine.outcomes.pull(consumer, PullRequest(9, 60_000, 0, got.append))
    server.rest()
    [pulled] = got
    over: list[list[str]] = []
    server.ack(pulled.tokens, over.append)
    assert over == [] and server.engine.dispatcher.settling.delivered_total == 2
    server.rest()
    assert over == [[]] and server.engine.dispatcher.settling.delivered_total == 3
    server.tick()
    server.rest()
    server.engine.outcomes.pull(listener, PullRequest(9, 60_000, 0, got.append))
    server.rest()
    [delivery] = [delivery for delivery, _ in got[1]]
    assert msgspec.json.decode(delivery.payload.body)["outcome"] == "delivered"
