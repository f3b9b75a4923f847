"""Outcomes with their neighbours, and deliveries that were sent or leased."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from delayserver.decisions.leasing import Leasing
from delayserver.decisions.outcome_messages import OutcomeMessages
from delayserver.decisions.outcomes import Outcomes
from delayserver.decisions.redriving import Redriving, Replayable
from delayserver.decisions.retries import RECORD_ITEMS, Retries
from delayserver.decisions.subscribing import Subscribing
from delayserver.delivery.webhook import WebhookResponse
from delayserver.records.attempts import DeliveryAttempt
from delayserver.records.message import (
    DueDelivery,
    MessageOptions,
    OutcomeSubjects,
    Payload,
    ScheduleEntry,
    decode_payload,
)
from delayserver.records.subscriptions import Subscription
from delayserver.records.tables import DeadLetter
from delayserver.timers.timeouts import Timeouts
from storage.errors import DiskFullError
from storage.rows import HOUR_MS, MESSAGE_DTYPE, RecordKind
from tests.unit.fakes import (
    START_MS,
    MessageParts,
    Stopwatch,
    deliveries,
    delivery,
    message,
    subscription,
)
from tests.world.server import SimulatedServer

FULL = DiskFullError("pwrite", "messages", "no space")
WEBHOOK = subscription(
    1,
    type="webhook",
    url="http://127.0.0.1/",
    max_attempts=2,
    backoff_ms=(5_000,),
)
BOTH = OutcomeSubjects("done", "failed")


def bodies(server: SimulatedServer) -> list[bytes]:
    return [delivery.payload.body for [delivery] in server.sending]


class Parts(MessageParts):
    """Outcomes, and one delivery that was sent."""

    def __init__(self, receiver: Subscription = WEBHOOK, **settings: Any) -> None:
        super().__init__(receiver, **settings)
        self.given_up: list[str] = []
        self.stopwatch = Stopwatch()
        self.timeouts = Timeouts(self.stopwatch)
        self.subscribing = Subscribing(self.registry, self.sequencer, self.groups, self.dispatcher)
        self.retries = Retries(
            self.sequencer,
            self.groups,
            self.hours,
            self.messages,
            self.dispatcher,
            OutcomeMessages(self.registry, self.publishing),
            self.timeouts,
            self.slices,
            given_up=lambda delivery, reason: self.given_up.append(reason),
            group_retry_max_ms=HOUR_MS,
        )
        self.outcomes = Outcomes(
            self.registry,
            self.dispatcher,
            self.subscribing,
            self.retries,
            self.timeouts,
            lambda: 0.0,
        )
        self.leasing = Leasing(
            self.registry, self.groups, self.dispatcher, self.retries, self.timeouts, "e"
        )
        self.redriving = Redriving(
            self.registry, self.sequencer, self.groups, self.messages, self.dispatcher
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

        self.leasing.nack(tokens, delay_ms, START_MS, done=done)
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


class Holding(Parts):
    """A consumer holds five messages; two are recorded in a turn of the loop."""

    def __init__(self, attempt: int = 1) -> None:
        self.receiver = subscription(1, max_attempts=2)
        super().__init__(self.receiver)
        self.slices.turn_items = 2 * RECORD_ITEMS
        ones = [delivery(seq, attempt=attempt) for seq in range(2, 7)]
        self.hours.add(START_MS // HOUR_MS, len(ones))
        token = self.leasing.leases.grant(deliveries(*ones), 1000)
        self.tokens = [f"{token}{index}" for index in range(5)]
        self.told: list[tuple[list[str], Exception | None]] = []

    def begin(self) -> None:
        self.leasing.nack(
            [*self.tokens, "e-9-0"], 50, START_MS, done=lambda *what: self.told.append(what)
        )

    def turn(self) -> None:
        turns, self.ports.turns = self.ports.turns, []
        for function in turns:
            function()


def recorded_payload(parts: Parts) -> Payload:
    """Of the one record in the open group."""
    _, blob = parts.sequencer.group.encode()
    return decode_payload(bytes(blob), "messages", 0, 1)


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


def settled_message(parts: Parts) -> Replayable:
    """The message, as it is read once its delivery is settled."""
    parts.outcomes.on_sent([([parts.sent()], WebhookResponse(200).result(START_MS, 5))], START_MS)
    entry = ScheduleEntry(parts.seq, START_MS)
    arrived = DeliveryAttempt(1, 1, START_MS, 5, 200)
    return Replayable(parts.seq, START_MS, 1, entry, START_MS, Payload(b"{}"), [arrived])


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
