"""Types of fields in requests and answers, with their limits and their descriptions in OpenAPI.

A duration in a request is a number of milliseconds or text; `decode_field` makes an `Ms` of it, and
checks the limits of its type. Those of a message (`Duration`) are read by the intake, since their
limit is a setting.

Cost: types; a duration takes 0.5 µs. Threads: pure.
"""

from functools import lru_cache
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from delayserver.errors import InputError
from delayserver.times import DURATION_MS_MAX, format_duration, parse_duration_ms

SUBJECT_PATTERN: Final = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
ANY_PATTERN: Final = r"\*|[A-Za-z0-9][A-Za-z0-9._-]{0,127}|[A-Za-z0-9][A-Za-z0-9._-]{0,125}\.\*"
ATTEMPTS_MAX: Final = 100
"""Attempts to deliver a message, and delays between them, that a client may ask for."""
MASK: Final = "***"
"""Stands in answers for a value that is a secret."""
SIZE_MAX: Final = 2**63 - 1
DURATION_PATTERN: Final = r"^([0-9]+|(?=.)([0-9]+d)?([0-9]+h)?([0-9]+m)?([0-9]+s)?([0-9]+ms)?)$"
DURATION_HELP: Final = "milliseconds, or text such as 500ms, 30s, 1h30m, 2d (digits alone: ms)"
DURATION_FORMS: Final[list[dict[str, Any]]] = [
    {"type": "integer", "minimum": 0},
    {"type": "string", "pattern": DURATION_PATTERN},
]
_SECOND_MS = 1000
_HOUR_MS = 3600 * _SECOND_MS
_DAY_MS = 24 * _HOUR_MS


def matching(pattern: str, **limits: Any) -> Meta:
    r"""Text that matches a pattern as a whole: the `$` of Python also matches before a line break.
    OpenAPI shows a `$` (`delayserver.api.rest.openapi`), since JSON Schema has no `\Z`."""
    return Meta(pattern=rf"^{pattern}\Z", **limits)


def about(text: str, **limits: Any) -> Meta:
    """The description of a field in OpenAPI, besides its type and limits."""
    return Meta(description=text, **limits)


def one_of(*names: str) -> Meta:
    """The values of a text that the server makes, for OpenAPI."""
    return Meta(extra_json_schema={"enum": [*names]})


class Strict(msgspec.Struct, forbid_unknown_fields=True):
    """A document that a client sends: a field that is not known is an error."""


Name = Annotated[str, matching(SUBJECT_PATTERN)]
Subject = Annotated[str, Meta(extra_json_schema={"pattern": f"^{SUBJECT_PATTERN}$"})]
"""The subject of a message. The hot path checks it."""
Pattern = Annotated[str, matching(f"({ANY_PATTERN})")]
Key = Annotated[str, Meta(extra_json_schema={"minLength": 1, "maxLength": 256})]
Time = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]
"""RFC 3339 in UTC, with milliseconds."""
When = TypeVar("When")
"""The type of times in an answer: `Time` where the server writes it, a datetime in a program. The
fields of an answer that both sides have stand once, in a generic struct (`BackupFields[When]`)."""
Cursor = Annotated[str | None, about("for the next page; null: there is nothing more")]

# ── durations and times of requests ───────────────────────────────────────────────────────────────

Duration = Annotated[
    Annotated[int, Meta(extra_json_schema={"minimum": 0})]
    | Annotated[str, Meta(extra_json_schema={"pattern": DURATION_PATTERN})]
    | None,
    about(DURATION_HELP),
]
"""One that the intake reads, or none."""
Moment = Annotated[
    int | Annotated[str, Meta(extra_json_schema={"format": "date-time"})] | None,
    about(
        "RFC 3339 with an offset, or milliseconds since the epoch; a number from 10^8 "
        "to 10^11 is refused, because it is seconds"
    ),
]
"""A point in time, or none."""


class Ms(int):
    """A duration in milliseconds, from `least_ms` to `most_ms`. JSON has it as a number, or as text
    such as `30s`."""

    least_ms: ClassVar[int] = 0
    most_ms: ClassVar[int] = DURATION_MS_MAX


class TimeoutMs(Ms):
    """For an answer."""

    least_ms, most_ms = 1, _HOUR_MS


class SilenceMs(Ms):
    """After which a heartbeat is over."""

    least_ms = 1


class LeaseMs(Ms):
    """Until a message comes again."""

    least_ms, most_ms = 1, 7 * _DAY_MS


class PullWaitMs(Ms):
    """For messages to fall due."""

    most_ms = 60 * _SECOND_MS


class LingerMs(Ms):
    """For others to fill a batch."""

    most_ms = 60 * _SECOND_MS


class SpreadMs(Ms):
    """Over which messages are handed out that fell due meanwhile."""

    least_ms, most_ms = 1, 7 * _DAY_MS


class DropAgeMs(Ms):
    """From which on a message is a dead letter."""

    least_ms, most_ms = 1, 365 * _DAY_MS


class DisableAfterMs(Ms):
    """The time of nothing but failures after which a subscription is paused."""

    least_ms, most_ms = _SECOND_MS, 365 * _DAY_MS


class BackoffMs(Ms):
    """Between two attempts."""

    least_ms, most_ms = 1, _DAY_MS


def decode_field(kind: type, value: Any) -> Any:
    """A value of one of these types, for a decoder of msgspec. Raises ValueError."""
    return _ms(kind, value if isinstance(value, int | str) else "")


@lru_cache(maxsize=4096, typed=True)
def _ms(kind: type, value: int | str) -> Ms:
    """Clients send the same few durations again and again."""
    assert issubclass(kind, Ms), kind
    try:
        duration_ms = parse_duration_ms(value)
    except InputError as error:
        raise ValueError(error.detail) from error
    if not kind.least_ms <= duration_ms <= kind.most_ms:
        least, most = format_duration(kind.least_ms), format_duration(kind.most_ms)
        raise ValueError(f"from {least} to {most}")
    return kind(duration_ms)


def describe_field(kind: type) -> dict[str, Any]:
    """The schema of one of these types."""
    assert issubclass(kind, Ms), kind
    return {"anyOf": DURATION_FORMS, "examples": ["30s"], "description": DURATION_HELP}


# ── choices of requests, and names of states in answers ───────────────────────────────────────────

OnEventName = Literal["cancel", "fire"]
"""The effect of an event on a message that watches its key."""
CatchUpName = Literal["none", "last", "all"]
OverlapName = Literal["skip", "allow"]
OnErrorName = Literal["skip", "stop"]
Delivery = Literal["at_least_once", "exactly_once"]
Method = Literal["POST", "PUT"]
Mechanism = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]
MessageState = Annotated[str, one_of("scheduled", "delivering", "delivered", "cancelled", "dead")]
PendingState = Annotated[str, one_of("scheduled", "delivering")]

NotUnderstood = Annotated[
    str | msgspec.UnsetType,
    about(
        "why this server does not understand it, so that it stands still (a zone that "
        "is missing, a field of a newer server); only if that is so. The other fields are what can "
        "be read of it"
    ),
]

# ── who brokers let in ────────────────────────────────────────────────────────────────────────────

Bootstrap = Annotated[
    str,
    matching(
        r"[^\s,]+:[0-9]{1,5}(,[^\s,]+:[0-9]{1,5})*",
        max_length=2048,
        description="brokers to begin with, host:port with commas between them",
    ),
]
Topic = Annotated[str, matching(r"[A-Za-z0-9._-]{1,249}")]
BrokerUser = Annotated[
    Annotated[str, Meta(min_length=1, max_length=256)] | None,
    about("whom the brokers let in (SASL)"),
]
BrokerPassword = Annotated[Annotated[str, Meta(max_length=1024)] | None, about("of that user")]
BrokerMechanism = Annotated[
    Mechanism | None,
    about("how the user logs in; PLAIN, if nothing is said"),
]
BrokerTls = Annotated[bool | None, about("encrypted, to brokers whose certificate is trusted")]
