"""Sinks: they bring deliveries to receivers of one kind, and report the result of each attempt.

    queue ──▶ Sink.deliver(subscription, deliveries) ──▶ told(some of them, a result)
                    │ ▲                                       │ outcome (pure)
                may_begin     Delivered │ RetryLater │ GiveUp │ PauseSubscription │
              (its first byte            Hold │ ReturnToQueue
                may leave)

A kind of receiver is a module with a `Sink`: webhooks (`delayserver.server.webhook_sink`), and
brokers, which share one (`delayserver.delivery.outlets`) and differ in their clients. Everything
before and behind it is the same for all: the queue with its rates and its pause, retries, dead
letters, metrics. How many deliveries are out at once is the caller's business (`max_in_flight`); a
sink that cannot take more lets its caller wait.

Rejected: an answer for all of a batch at once. If five hundred messages go to a topic, one
partition may hang for seconds, and the messages of the others would not be settled that long.

Cost: none. Threads: values and pure functions; a `Sink` belongs to the event loop, except for its
own threads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from delayserver.records.message import DueDelivery
from delayserver.records.subscriptions import RETRY_DELAY_MS_MAX, RetrySchedule, Subscription

RETRY_JITTER = 0.2
HOLD_MS_MIN = 1_000
"""A receiver that asks for less is not asked again sooner."""


# ---- the result of an attempt ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Recorded:
    """The settled row is recorded already, in the log of all replicas."""

    settled_ms: int
    """The time in the record."""
    offset: int
    """Where it stands."""


class Tried(msgspec.Struct, frozen=True, gc=False):
    """How an attempt went, for those who look it up."""

    began_ms: int
    duration_ms: int
    status: int = 0
    """The HTTP status; 0: none."""
    answer: str = ""
    """The beginning of the answer."""


class Confirmed(msgspec.Struct, frozen=True):
    """The receiver has it, for good."""

    recorded: Recorded | None = None
    tried: Tried | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """It was not taken, or that is unknown: another attempt follows, unless it was the last one."""

    reason: str
    tried: Tried | None = None


@dataclass(frozen=True, slots=True)
class Later:
    """The receiver asks to be sent nothing for a while: it was no attempt."""

    reason: str
    retry_after_ms: int


@dataclass(frozen=True, slots=True)
class Gone:
    """The receiver wants nothing any more."""

    reason: str


@dataclass(frozen=True, slots=True)
class Untried:
    """Nothing has reached the receiver, and nothing will: it was no attempt."""


Result = Confirmed | Failed | Later | Gone | Untried
Answer = tuple[list[DueDelivery], Result]
"""The result of all that went together."""
ResultCallback = Callable[[list[DueDelivery], Result], None]
MayBegin = Callable[[Sequence[DueDelivery]], bool]
"""Asked when the first byte of deliveries may leave; False: they are `Untried`."""


class Sink(Protocol):
    """Brings deliveries to receivers of one kind. A test may have one that answers by itself."""

    async def deliver(
        self,
        subscription: Subscription,
        deliveries: list[DueDelivery],
        may_begin: MayBegin,
        told: ResultCallback,
    ) -> None:
        """One attempt of each, if it `may_begin` when nothing is left to wait for. `told` is called
        on the event loop with their results, in any order and in any parts; all have been told of
        on return.

        A failure of the receiver or the network is a result, never an exception. A cancelled call
        tells no more."""

    def on_subscription(self, subscription: Subscription) -> None:
        """It was changed or deleted: let go of resources that only its former self needed."""

    async def close(self) -> None:
        """Let go of all open resources. Finish or cancel deliveries before."""


# ---- the consequence of a result -------------------------------------------------------------


class Delivered(msgspec.Struct, frozen=True):
    """The receiver has taken it."""

    recorded: Recorded | None = None
    tried: Tried | None = None


@dataclass(frozen=True, slots=True)
class RetryLater:
    """The next attempt comes after `delay_ms`."""

    delay_ms: int
    reason: str


@dataclass(frozen=True, slots=True)
class PauseSubscription:
    """The receiver wants nothing any more. The message stays pending; the attempt does not count
    against it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Hold:
    """The receiver wants nothing for `hold_ms`. The attempt does not count."""

    hold_ms: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """No attempt is left: the message becomes a dead letter."""

    reason: str


@dataclass(frozen=True, slots=True)
class ReturnToQueue:
    """It is the next to leave again; the attempt does not count."""


Outcome = Delivered | RetryLater | PauseSubscription | Hold | GiveUp | ReturnToQueue


def outcome(
    result: Result,
    attempt: int,
    retry: RetrySchedule,
    random: Callable[[], float],
    *,
    in_company: bool = False,
) -> Outcome:
    """The consequence of the result of attempt number `attempt` (from 1). Pure: `random` returns
    [0, 1).

    A retry waits for the backoff, or a receiver's queue for what it asks for, and up to
    RETRY_JITTER of it on top: so receivers never see a retry sooner than they asked or the
    subscription says, and messages that failed together do not return together.

    `in_company`: other messages were in the same request, and any of them may have made it fail.
    Then it is not given up, however many attempts there were: the next one it has alone."""
    longer = 1 + RETRY_JITTER * random()
    match result:
        case Confirmed(recorded, tried):
            return Delivered(recorded, tried)
        case Gone(reason):
            return PauseSubscription(reason)
        case Later(retry_after_ms=retry_after_ms):
            hold_ms = min(max(retry_after_ms, HOLD_MS_MIN), RETRY_DELAY_MS_MAX)
            return Hold(int(hold_ms * longer))
        case Untried():
            return ReturnToQueue()
        case Failed(reason):
            if attempt >= retry.max_attempts and not in_company:
                return GiveUp(f"{reason} (attempt {attempt} of {retry.max_attempts})")
            return RetryLater(int(retry.delay_ms(attempt) * longer), reason)
