"""Answers of brokers: a message is stored, it is not stored, or it is unknown.

    the client's exception, code or reply ──▶ AnswerTable.of ──▶ BrokerAnswer ──▶ Result of the sink

Each kind of broker has one table, whose rows are all the answers that its client library is known
to give. An exception that no row names counts as unknown: the message is tried again, may be there
twice, and the reason names the exception.

    certainty    consequence
    STORED       the message counts as delivered
    NOT_STORED   an attempt has failed; a retry stores no second copy
    UNKNOWN      an attempt has failed; a retry may store a second copy, with the same id

A broker may refuse a message because of its neighbour: Kafka refuses a batch because one of its
records is bad, and RabbitMQ closes a channel because of one message. Such rows say `is_shared`. The
sink then sends these messages again, apart from each other, and only a message that is refused
alone has failed (`delayserver.delivery.outlets`).

Cost: 1 µs for an error, nothing for a stored message. Threads: values that do not change.
"""

from collections.abc import Hashable, Iterable, Mapping
from enum import StrEnum
from typing import Final, NamedTuple

import msgspec

from delayserver.delivery.sink import Confirmed, Failed

REASON_CHARACTERS_MAX: Final = 500


class Certainty(StrEnum):
    """Whether the broker has a message."""

    STORED = "stored"
    NOT_STORED = "not_stored"
    UNKNOWN = "unknown"


class Meaning(NamedTuple):
    """A row of a table."""

    kept: Certainty
    is_shared: bool = False
    """Another message that travelled with it may be the cause."""
    text: str = ""
    """A reason that says more than the client does; empty: the client's own words."""


class BrokerAnswer(msgspec.Struct, frozen=True):
    """The answer of a broker about one message."""

    kept: Certainty
    reason: str = ""
    """Why it is not known to be stored; empty where it is."""
    is_shared: bool = False
    """Others that travelled with it may be the cause, so it is sent once more, apart."""

    def alone(self) -> "BrokerAnswer":
        """The same about a message that has travelled alone."""
        return BrokerAnswer(self.kept, self.reason) if self.is_shared else self

    def result(self) -> Confirmed | Failed:
        """The result that the sink reports for it."""
        if self.kept is Certainty.STORED:
            return CONFIRMED
        return Failed(self.reason)


CONFIRMED: Final = Confirmed()
STORED: Final = BrokerAnswer(Certainty.STORED)
DUPLICATE: Final = BrokerAnswer(Certainty.STORED, "the broker had it already")
"""An earlier attempt has stored it, and the broker has left this one out."""
UNSENT: Final = BrokerAnswer(Certainty.NOT_STORED, "it was not sent")
"""Its outlet broke before it had left. Another outlet sends it, and it was no attempt."""


def not_stored(reason: str) -> BrokerAnswer:
    """The broker does not have it, and the message itself was refused."""
    return BrokerAnswer(Certainty.NOT_STORED, reason)


def unknown(reason: str, *, is_shared: bool = False) -> BrokerAnswer:
    """The broker may have it."""
    return BrokerAnswer(Certainty.UNKNOWN, reason, is_shared)


class AnswerTable:
    """The meanings of the words of one client library.

    Keys are classes of exceptions, of which the most special counts, or codes and first words of
    errors, whatever the client gives."""

    def __init__(self, broker: str, rows: Mapping[Hashable, Meaning]) -> None:
        self.broker = broker
        self.rows = rows

    def of(self, keys: Iterable[Hashable], text: str, name: str) -> BrokerAnswer:
        """The answer of the first key that has a row. `text`: the client's words; `name`: of an
        error that no row names."""
        for key in keys:
            meaning = self.rows.get(key)
            if meaning is not None:
                reason = self._reason(meaning.text or text or name)
                return BrokerAnswer(meaning.kept, reason, meaning.is_shared)
        words = f"{name}: {text}" if text and text != name else name
        return unknown(self._reason(f"{words} (an answer that this server does not know)"))

    def of_error(self, error: BaseException, more: Iterable[Hashable] = ()) -> BrokerAnswer:
        """The answer that an exception stands for. `more`: keys that are more special than its
        class."""
        classes = (one for one in type(error).__mro__ if one not in _TOO_BROAD)
        return self.of((*more, *classes), str(error), type(error).__name__)

    def _reason(self, words: str) -> str:
        return f"{self.broker}: {words}"[:REASON_CHARACTERS_MAX]


_TOO_BROAD: Final = (Exception, BaseException, object)
"""A row for one of these would name nothing."""
