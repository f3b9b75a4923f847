"""Attempts: how each try to deliver a message went, as long as the message is kept.

    failed ──▶ History in the payload of the RETRY, or of the message that is DEAD
    arrived ─▶ a note in the frame that settles the delivery (`storage.notes`)

A history goes from row to row with the payload, so nothing is written that would not be written
without it, and no object waits. It is bounded: the first attempts and the newest stay, and those in
between are only counted. An attempt that leaves no record is missing from it: a lease that ran out
before the last one, a nack without a delay.

Cost: 2 µs for each attempt that is added. Threads: immutable values.
"""

from typing import Final

import msgspec

ATTEMPTS_MAX: Final = 20
"""In a history."""
FIRST_KEPT: Final = 3
"""The number of first attempts among them."""
TEXT_CHARS_MAX: Final = 1024
"""The most characters of an answer or an error."""
TEXTS_BYTES_MAX: Final = 8 * 1024
"""The most bytes of all answers and errors in a history, together."""


class DeliveryAttempt(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One try to deliver a message to a subscription."""

    number: int
    """From 1; anew from 1 when a dead letter is redriven, or the message replayed."""
    subscription_id: int
    began_ms: int
    duration_ms: int | None = None
    """None: not known."""
    status: int = 0
    """The HTTP status; 0: none."""
    answer: str = ""
    """The beginning of the answer."""
    error: str = ""
    """Why it failed; empty: it arrived."""

    @property
    def texts_bytes(self) -> int:
        """The length of the answer and the error."""
        return len(self.answer.encode()) + len(self.error.encode())


class History(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The attempts of a message that were made before a row, in order."""

    attempts: tuple[DeliveryAttempt, ...] = ()
    dropped: int = 0
    """How many more there were, behind the first."""
    is_replay: bool = False
    """Whether this row delivers the message again at a client's request."""


def with_attempt(history: History | None, attempt: DeliveryAttempt) -> History:
    """A history with one attempt more, within its bounds."""
    history = history or History()
    return bounded((*history.attempts, attempt), history.dropped, history.is_replay)


def bounded(
    attempts: tuple[DeliveryAttempt, ...], dropped: int = 0, is_replay: bool = False
) -> History:
    """A history of these attempts: the oldest but the first few are left out where they are many,
    or long."""
    kept = list(attempts)
    sizes = [one.texts_bytes for one in kept]
    size = sum(sizes)
    while len(kept) > ATTEMPTS_MAX or (size > TEXTS_BYTES_MAX and len(kept) > FIRST_KEPT + 1):
        size -= sizes.pop(FIRST_KEPT)
        del kept[FIRST_KEPT]
        dropped += 1
    return History(tuple(kept), dropped, is_replay)
