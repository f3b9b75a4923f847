"""Outcome messages: the outcome of a delivery, told by a message of its own.

A publisher may ask for it (`on_delivered`, `on_dead`). Each subscription has its outcome, so there
is a message for each. The outcome of such a message is not told by another, so there are no loops.

It is written before, or together with, the outcome, and never twice. Its key names the outcome
(`{id}:{subscription}:{outcome}`), and is looked up without regard to the dedupe window. A crash in
between has the delivery repeated, as it may be anyway, and the key is there by then.

Cost: 20 µs for a message; nothing where none is asked for. Threads: belongs to the event loop.
"""

from typing import Literal, NamedTuple

import msgspec

from delayserver.decisions.group import Group
from delayserver.decisions.packing import MESSAGE_ROW
from delayserver.decisions.publishing import Publishing
from delayserver.records.message import (
    OUTCOME_HEADER,
    OUTCOME_ID_HEADER,
    OUTCOME_SUBSCRIPTION_HEADER,
    DueDelivery,
    Payload,
    encode_payload,
)
from delayserver.records.sharding import outcome_key
from delayserver.records.subscriptions import Registry
from delayserver.times import format_time

OutcomeName = Literal["delivered", "dead"]


class OutcomeBody(msgspec.Struct):
    """The body of such a message."""

    id: str
    subject: str
    key: str | None
    subscription: str
    outcome: OutcomeName
    attempts: int
    reason: str | None
    """Why it is dead."""
    time: str
    """When that was decided."""


class OutcomeToTell(NamedTuple):
    """A message that must be published."""

    subject: str
    payload: Payload
    sealed: bytes

    @property
    def total_bytes(self) -> int:
        """How much of a group it needs at most: its record, and one that numbers its subject."""
        return len(self.sealed) + 2 * MESSAGE_ROW.size + 2 * len(self.subject)


_encode = msgspec.json.Encoder().encode


class OutcomeMessages:
    """Makes the messages that tell of outcomes, and publishes them."""

    def __init__(self, registry: Registry, publishing: Publishing) -> None:
        self._registry = registry
        self._publishing = publishing

    def of_delivered(self, delivery: DueDelivery, now_ms: int) -> OutcomeToTell | None:
        """The message that a delivery has arrived; None: the publisher did not ask for it."""
        subject = delivery.payload.outcomes.delivered
        if subject is None:
            return None
        return self._make(subject, delivery, "delivered", delivery.attempt, None, now_ms)

    def of_dead(
        self, delivery: DueDelivery, attempts: int, reason: str, now_ms: int
    ) -> OutcomeToTell | None:
        """The message that a delivery was given up after so many attempts; None: not asked for."""
        subject = delivery.payload.outcomes.dead
        if subject is None:
            return None
        return self._make(subject, delivery, "dead", attempts, reason, now_ms)

    def publish(self, message: OutcomeToTell, now_ms: int) -> Group | None:
        """Put it into the open group, in which the caller has made room, unless it is there.

        Returns the group with which it is durable; None: it is."""
        return self._publishing.publish_outcome(*message, now_ms)

    def _make(
        self,
        subject: str,
        delivery: DueDelivery,
        outcome: OutcomeName,
        attempts: int,
        reason: str | None,
        now_ms: int,
    ) -> OutcomeToTell:
        subscription = self._registry.by_id(delivery.subscription_id)
        # A subscription that was deleted while the delivery was on its way has only its number; no
        # name looks like that.
        name = f"#{delivery.subscription_id}" if subscription is None else subscription.name
        message_id, key = delivery.message_id, delivery.payload.key
        body = OutcomeBody(
            *(message_id, delivery.subject, key, name),
            *(outcome, attempts, reason, format_time(now_ms)),
        )
        headers = {
            OUTCOME_HEADER: outcome,
            OUTCOME_ID_HEADER: message_id,
            OUTCOME_SUBSCRIPTION_HEADER: name,
        }
        own_key = outcome_key(message_id, name, outcome)
        payload = Payload(_encode(body), key=own_key, headers=headers)
        return OutcomeToTell(subject, payload, encode_payload(payload))
