"""A message as an object: only when it comes in, and when it goes out.

A row holds the columns of a message: seq, due time, subject, key. `Payload` holds the rest. It is a
MessagePack array by position, so a new field goes to the end, and old payloads stay readable.

Cost: about 0.5 µs to encode or decode.
Threads: immutable values.
"""

import re
import struct
from collections.abc import Collection, Mapping, Sequence
from enum import IntEnum, StrEnum
from itertools import repeat
from typing import Any, Final

import msgspec

from delayserver.errors import InputError
from delayserver.records.attempts import History
from delayserver.records.direct import Destination
from storage.errors import DamageError
from storage.frame import Rows, seal, unseal, unseal_many
from storage.rows import (
    FLAG_OPTIONS,
    FLAG_REPLAY,
    FLAG_WATCHES,
    HOUR_MS,
    PRIORITY_OF_GROUP,
    PRIORITY_SHIFT,
)

KEY_MAX_BYTES = 256
REPLAY_HEADER = "delay-replay"
"""`1` on a message that is delivered again at a client's request."""
SCHEDULE_HEADER: Final = "delay-schedule"
PLANNED_HEADER: Final = "delay-planned"
OUTCOME_HEADER: Final = "delay-outcome"
OUTCOME_ID_HEADER: Final = "delay-outcome-id"
OUTCOME_SUBSCRIPTION_HEADER: Final = "delay-outcome-subscription"
MADE_HEADERS: Final = frozenset(
    (
        SCHEDULE_HEADER,
        PLANNED_HEADER,
        OUTCOME_HEADER,
        OUTCOME_ID_HEADER,
        OUTCOME_SUBSCRIPTION_HEADER,
    )
)
"""Headers of messages that the server makes: runs of schedules, and messages about outcomes."""


def check_key(key: str, pointer: str = "/key") -> None:
    """Raises InputError unless `key` may be the key of a message, an event or a heartbeat."""
    if not 0 < len(key) <= KEY_MAX_BYTES or len(key.encode("utf-8", "replace")) > KEY_MAX_BYTES:
        raise InputError(f"a key has 1 to {KEY_MAX_BYTES} bytes", pointer)


def check_group(group: str) -> None:
    """Raises InputError unless `group` may be the group of a message."""
    if not 0 < len(group) <= KEY_MAX_BYTES or len(group.encode("utf-8", "replace")) > KEY_MAX_BYTES:
        raise InputError(f"a group has 1 to {KEY_MAX_BYTES} bytes", "/group")


def check_keys(keys: Collection[str]) -> None:
    """Raises InputError for the first key that `check_key` refuses, in no certain order."""
    # A character has at most four bytes.
    if keys and not (min(map(len, keys)) > 0 and max(map(len, keys)) <= KEY_MAX_BYTES // 4):
        for key in keys:
            check_key(key)


class Content(IntEnum):
    """The kind of text or bytes that the body holds."""

    JSON = 0
    BINARY = 1


class Origin(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Where a message that was moved or is being retried comes from."""

    message_seq: int
    published_due_ms: int
    """The due time in the message's id."""
    subject_id: int
    due_ms: int
    """When its first attempt was due."""
    attempt: int = 1
    """The attempt that comes next, from 1."""


class Watch(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Keys whose events complete a message before its time."""

    keys: tuple[str, ...]
    on_event: int = 0
    """0: an event cancels the message; 1: it fires it."""


class OutcomeSubjects(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Under which subjects a message with the outcome of each delivery is published."""

    delivered: str | None = None
    dead: str | None = None


class DebounceState(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """How each PUT under its key pushes a message back."""

    quiet_ms: int
    """It is due when no PUT has come for so long."""
    at_most_ms: int
    """How long after `since_ms` it is due at the latest; 0: without end."""
    keeps_first: bool
    """The content of the first PUT is delivered, not that of the last."""
    since_ms: int
    """When the first PUT came since the key was free."""

    def due_ms(self, now_ms: int) -> int:
        """When a message is due that is put now."""
        due_ms = now_ms + self.quiet_ms
        end_ms = self.since_ms + self.at_most_ms if self.at_most_ms else due_ms
        return max(now_ms, min(due_ms, end_ms))


class MessageOptions(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Rarer wishes of the publisher for a message; there are none where all is as by default."""

    ttl_ms: int = 0
    """How long after its due time a delivery may still begin; 0: for ever."""
    since_ms: int = 0
    """From when that counts, if it is not the due time: a dead letter was delivered again."""
    priority: int = 0
    """From 0 to 9: among the messages that are due, higher ones leave first."""
    group: str | None = None
    """A subscription has one message of a group under way at a time, in due order."""
    to: Destination | None = None
    """Where it goes; None: to all subscriptions that match."""
    outcomes: OutcomeSubjects | None = None
    """None: no message is published with the outcome."""
    debounce: DebounceState | None = None
    """None: no PUT under its key pushes it back."""

    def expires_ms(self, due_ms: int) -> int | None:
        """From when on it is too late for a message that is due at `due_ms`; None: never."""
        return (self.since_ms or due_ms) + self.ttl_ms if self.ttl_ms else None


class ScheduledRun(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Which run of a schedule a message is, and where the schedule stands behind it."""

    schedule: str
    state: bytes
    """A `ScheduleState` of `delayserver.parts.schedules`, packed."""


_NO_OUTCOMES = OutcomeSubjects()


class Payload(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The variable part of a message, as it stands in the logs."""

    body: bytes
    """The bytes that the publisher sent, unchanged."""
    content: int = Content.JSON
    key: str | None = None
    headers: dict[str, str] | None = None
    origin: Origin | None = None
    watch: Watch | None = None
    history: History | None = None
    """The attempts that were made so far."""
    options: MessageOptions | None = None
    run: ScheduledRun | None = None

    def expires_ms(self, due_ms: int) -> int | None:
        """From when on it is too late for a message whose first attempt is due at `due_ms`; None:
        never."""
        return None if self.options is None else self.options.expires_ms(due_ms)

    @property
    def to(self) -> Destination | None:
        """Where it goes; None: to all subscriptions that match."""
        return None if self.options is None else self.options.to

    @property
    def direct_id(self) -> int:
        """The direct subscription that gets it; 0: those that match do."""
        to = self.to
        return 0 if to is None else to.subscription_id

    @property
    def outcomes(self) -> OutcomeSubjects:
        """Under which subjects messages with the outcome are published."""
        options = self.options
        return _NO_OUTCOMES if options is None else options.outcomes or _NO_OUTCOMES

    @property
    def is_replay(self) -> bool:
        """Whether it is delivered again at a client's request."""
        return self.history is not None and self.history.is_replay


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Payload)
_many_decoder = msgspec.msgpack.Decoder(list[Payload])
_ARRAY_OF = struct.Struct(">BI")
"""The begin of an array in MessagePack: a mark, and the number of its items."""
_FIELDS_MIN = 5
"""The number of fields that every payload has."""
_OPTIONS = Payload.__struct_fields__.index("options")
_OPTIONS_MIN = 3
"""Likewise, of options."""


def encode_payload(payload: Payload) -> bytes:
    """The bytes of a payload, sealed with their checksum."""
    return seal(_encode(payload))


def _encode(payload: Payload) -> bytes:
    # Absent fields at the end are not written, so the bytes are the same as before there were such
    # fields. Their digest decides whether a publish with a known key repeats that message or
    # contradicts it.
    fields = msgspec.structs.astuple(payload)
    if payload.options is not None:
        options = _without_nothing(msgspec.structs.astuple(payload.options), _OPTIONS_MIN)
        fields = (*fields[:_OPTIONS], options, *fields[_OPTIONS + 1 :])
    return _encoder.encode(_without_nothing(fields, _FIELDS_MIN))


def _without_nothing(fields: tuple[Any, ...], count_min: int) -> tuple[Any, ...]:
    count = len(fields)
    while count > count_min and fields[count - 1] is None:
        count -= 1
    return fields[:count]


def debounced(payload: Payload, before: Payload | None, now_ms: int) -> tuple[Payload, int]:
    """A payload that is put now under a key where a message waits with the payload `before`, or
    none, and when it is due. Its options have a debounce, which goes on from that of the other."""
    assert payload.options is not None and payload.options.debounce is not None
    known = None if before is None or before.options is None else before.options.debounce
    if before is not None and before.origin is not None and before.origin.attempt > 1:
        known = None  # It has left, in time: else each call would have it attempted at once.
    since_ms = now_ms if known is None else min(known.since_ms, now_ms)
    debounce = msgspec.structs.replace(payload.options.debounce, since_ms=since_ms)
    kept = before if before is not None and debounce.keeps_first else payload
    # Without the course of deliveries, nor the moment at which a dead letter was delivered again:
    # the message is new, and its time to live begins when it is due.
    options = kept.options or MessageOptions()
    options = msgspec.structs.replace(options, since_ms=0, debounce=debounce)
    put = Payload(
        kept.body, kept.content, kept.key, kept.headers, watch=kept.watch, options=options
    )
    return put, debounce.due_ms(now_ms)


def encode_payloads(
    bodies: Sequence[bytes],
    contents: Sequence[int],
    keys: Sequence[str | None],
    headers: Sequence[dict[str, str] | None],
    watches: Sequence[Watch | None],
    options: Sequence[MessageOptions | None] = (),
) -> list[bytes]:
    """The payloads of new messages as MessagePack, without the checksum that `seal_many` adds.

    `options`: empty where no message has any."""
    encode = _encoder.encode
    encoded = list(map(encode, zip(bodies, contents, keys, headers, repeat(None), strict=False)))
    if options or any(watches):
        for index, watch in enumerate(watches):
            chosen = options[index] if options else None
            if watch is not None or chosen is not None:
                plain = bodies[index], contents[index], keys[index], headers[index]
                encoded[index] = _encode(Payload(*plain, watch=watch, options=chosen))
    return encoded


def row_flags(payload: Payload) -> int:
    """The flags in the row of a record that schedules a message with this payload."""
    flags = 0 if payload.watch is None else FLAG_WATCHES
    if payload.is_replay:
        flags |= FLAG_REPLAY
    return flags if payload.options is None else flags | option_flags(payload.options)


def option_flags(options: MessageOptions) -> int:
    """The flags that tell of the options."""
    priority = options.priority if options.group is None else PRIORITY_OF_GROUP
    flags = priority << PRIORITY_SHIFT
    return flags | FLAG_OPTIONS if options.ttl_ms or options.outcomes else flags


def shown_headers(payload: Payload) -> dict[str, str]:
    """The headers of a message as a consumer gets them: its own, and that it is a replay."""
    headers = payload.headers or {}
    return {**headers, REPLAY_HEADER: "1"} if payload.is_replay else headers


def decode_payload(sealed: bytes, where: str, offset: int, seq: int) -> Payload:
    """The payload that `encode_payload` sealed.

    `where`, `offset`, `seq`: the place and the record that an error names. Raises DamageError
    unless the bytes match their checksum (I8)."""
    data = unseal_payload(sealed, where, offset, seq)
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, ValueError) as error:
        raise DamageError(where, offset, f"a payload cannot be read ({error})", seq, seq) from error


def unseal_payload(sealed: bytes, where: str, offset: int, seq: int) -> bytes:
    """The encoded payload in a sealed one; arguments and errors as `decode_payload`."""
    data = unseal(sealed)
    if data is None:
        raise DamageError(where, offset, "a payload does not match its checksum", seq, seq)
    return data


def read_run(data: bytes) -> "ScheduledRun | None":
    """The run in an encoded payload that was unsealed. Raises msgspec.DecodeError."""
    return _decoder.decode(data).run


def decode_payloads(sealed: Sequence[bytes]) -> list[Payload] | None:
    """Many payloads at once; None if one of them cannot be read: `decode_payload` tells which.

    One call decodes them all as an array, which takes a fifth of the time of one call for each."""
    data = unseal_many(sealed)
    if data is None:
        return None
    try:
        payloads = _many_decoder.decode(b"".join([_ARRAY_OF.pack(0xDD, len(data)), *data]))
    except (msgspec.DecodeError, ValueError):
        return None
    assert len(payloads) == len(sealed)
    return payloads


class State(StrEnum):
    """The states of a message, as clients see them."""

    SCHEDULED = "scheduled"
    DELIVERING = "delivering"
    DELIVERED = "delivered"
    CANCELLED = "cancelled"
    DEAD = "dead"


class ScheduleEntry(msgspec.Struct, frozen=True, gc=False):
    """Names one schedule row: a message, or its delivery to one subscription, waits there."""

    seq: int
    due_ms: int

    @property
    def hour(self) -> int:
        """The hour whose file holds the row."""
        return self.due_ms // HOUR_MS


class DueDelivery(msgspec.Struct, eq=False):
    """A message that fell due, on its way to one subscription.

    The object exists only while a webhook or a lease carries the message. A waiting message is a
    row."""

    entry: ScheduleEntry
    origin: Origin
    subject: str
    message_id: str
    subscription_id: int
    attempt: int
    payload: Payload
    row: Rows
    """Its row of the wheel (WHEEL_DTYPE, shape 1). It waits again if no consumer takes it."""
    extra_attempts: int = 0
    """Attempts that a kill of the process may have hidden: the receiver is told of them, and they
    use up no `max_attempts`."""

    @property
    def told_attempt(self) -> int:
        """The attempt, as the receiver is told of it."""
        return self.attempt + self.extra_attempts


HEADERS_BYTES_MAX = 16 * 1024
"""Names and values of a message's own headers, all together."""
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(r"(?:[!-~\xa0-\xff](?:[\t -~\xa0-\xff]*[!-~\xa0-\xff])?)?")
_RESERVED_PREFIXES = ("delay-", "webhook-")
_RESERVED = frozenset(
    (
        "connection",
        "content-length",
        "content-type",
        "expect",
        "host",
        "http2-settings",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)


def header_pointer(name: str) -> str:
    """Where an error about a header stands."""
    return "/headers/" + name.replace("~", "~0").replace("/", "~1")


def check_headers(headers: Mapping[str, str], made: Collection[str] = ()) -> None:
    """Check a message's own headers. Raises InputError at `/headers` or `/headers/<name>`.

    A name is a token (RFC 9110), not one of those that the server or the connection sets, and
    different from the others in more than case; a value is visible ASCII or Latin-1, with spaces
    and tabs inside. `made`: names that are good besides, where the server may have set them."""
    size_bytes = 0
    seen: set[str] = set()
    for name, value in headers.items():
        pointer = header_pointer(name)
        lower = name.lower()
        if not _HEADER_NAME.fullmatch(name):
            raise InputError("a header name is letters, digits and !#$%&'*+-.^_`|~", pointer)
        if (lower in _RESERVED or lower.startswith(_RESERVED_PREFIXES)) and lower not in made:
            raise InputError(f"the header {lower} is set by the server", pointer)
        if lower in seen:
            raise InputError(f"the header {lower} is there twice", pointer)
        if not _HEADER_VALUE.fullmatch(value):
            raise InputError(
                "a header value is visible ASCII or Latin-1, without line breaks and without "
                "blanks at its ends; percent-encode anything else",
                pointer,
            )
        seen.add(lower)
        size_bytes += 0 if lower in made else len(name) + len(value)
    if size_bytes > HEADERS_BYTES_MAX:
        raise InputError(f"headers are at most {HEADERS_BYTES_MAX} bytes in all", "/headers")
