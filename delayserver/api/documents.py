"""Answers that hold messages: their bodies go out byte for byte as they were published.

A body is JSON that nobody decodes: neither a number that is too long for a float nor the order of
the fields changes on its way. The structs of the answers stand in `delayserver.wire`.

Cost: 1 µs per message. Threads: values.
"""

import base64
from collections.abc import Iterable
from enum import IntEnum
from functools import lru_cache
from typing import Any, Final

import msgspec

from delayserver.backup.shelf import BackupView
from delayserver.delivery.batch import body_fields
from delayserver.delivery.delayed_fetch import Pulled
from delayserver.queries.dead_letters import DeadLetterView
from delayserver.queries.listing import PendingView
from delayserver.queries.look_up import MessageView
from delayserver.records.message import Content, Payload, decode_payload, shown_headers
from delayserver.records.subscriptions import RetrySchedule
from delayserver.records.tables import OnEvent
from delayserver.times import format_duration, format_time
from delayserver.wire.bulk import BackupDocument, BackupPartDocument
from delayserver.wire.fields import MASK, OnEventName
from delayserver.wire.messages import (
    DebounceDocument,
    DeliveryDocument,
    MessageDocument,
    OutcomeMessageDocument,
    PendingDocument,
    ToDocument,
    ToRetryDocument,
)
from delayserver.wire.pulls import AckedDocument
from delayserver.wire.subscriptions import DeadLetterDocument
from storage.errors import DamageError

_UNSET = msgspec.UNSET
_Unset = msgspec.UnsetType

encode = msgspec.json.Encoder().encode
PLACES_HEADER: Final = "delay-places"
"""The header of a call that asks for a page of a list as ShardPageDocument."""
NAMED_PAGE_MAX: Final = 100
"""Definitions under names in a page of their list: the next times of schedules are reckoned."""


def backup_document(view: BackupView) -> BackupDocument:
    """A shard's part of a backup, shown as a whole backup."""

    def shown(time_ms: int | None) -> str | None:
        return None if time_ms is None else format_time(time_ms)

    return BackupDocument(
        name=view.name,
        state=view.state,
        step=view.step,
        started_at=format_time(view.began_ms),
        taken_at=shown(view.taken_ms),
        completed_at=shown(view.completed_ms),
        total_bytes=view.total_bytes,
        done_bytes=view.done_bytes,
        copied_bytes=view.copied_bytes,
        verified=view.is_verified,
        error=view.error,
        shards=[
            BackupPartDocument(view.shard, view.state, shown(view.taken_ms), view.checkpoint_seq)
        ],
        log_reaches_at=shown(view.log_reaches_ms),
    )


def message_document(view: MessageView) -> MessageDocument:
    """The answer to a look-up of a message."""
    deliveries = [
        DeliveryDocument(one.subscription, one.state, one.attempt, format_time(one.at_ms))
        for one in view.deliveries
    ]
    priority, group, expires_at = _options(view)
    when_delivered, when_dead = _outcome_messages(view.payload)
    return MessageDocument(
        view.message_id,
        view.subject,
        view.payload.key,
        format_time(view.due_ms),
        view.state,
        view.attempts,
        view.payload.headers or {},
        deliveries,
        *body_fields(view.payload),
        *_watched(view.payload),
        priority,
        group,
        expires_at,
        _to_document(view.payload),
        when_delivered,
        when_dead,
        _debounce_document(view.payload),
    )


def stored_payload(sealed: bytes) -> Payload:
    """Returns the payload that a definition publishes; `null` where that cannot be read."""
    try:
        return decode_payload(sealed, "catalog", 0, 0)
    except DamageError:
        return Payload(b"null", Content.JSON)


def name_among(kind: type[IntEnum], value: int) -> Any:
    """The name of a value of an enumeration; of one that is not known the name of the default."""
    return (kind(value) if value in list(kind) else next(iter(kind))).name.lower()


def pending_document(view: PendingView) -> PendingDocument:
    """An entry in the list of pending messages."""
    return PendingDocument(
        view.message_id,
        view.subject,
        view.payload.key,
        format_time(view.due_ms),
        view.state,
        view.attempts,
        view.payload.headers or {},
        *body_fields(view.payload),
    )


def encode_pulled(pulled: Pulled, acked: AckedDocument | None = None) -> bytes:
    """The answer to a pull (PulledListDocument): each message with its lease; `acked`: the results
    of the leases that came with the pull.

    Nine pieces for each, most of them the same for all, joined once: encoding takes 2.1 times as
    long with a struct for each of 1,000 messages, and 1.2 times with one for each of 10."""
    return _encode_messages(pulled, _PULLED, _end(acked))


def encode_messages(pulled: Pulled) -> bytes:
    """A part of the answer to a pull: the messages, with commas between them."""
    return _encode_messages(pulled, b"", b"")


def join_messages(parts: Iterable[bytes], acked: AckedDocument | None) -> bytes:
    """The answer to a pull, of parts as `encode_messages` makes them."""
    return _PULLED + b",".join(filter(None, parts)) + _end(acked)


_PULLED = b'{"messages":['


def _end(acked: AckedDocument | None) -> bytes:
    return b"]}" if acked is None else b"]," + encode(acked)[1:]


def _encode_messages(pulled: Pulled, begin: bytes, end: bytes) -> bytes:
    deliveries = pulled.deliveries
    if deliveries is None or not deliveries:
        return begin + end
    count, payloads = len(deliveries), deliveries.payloads
    attempts = deliveries.told_attempts()
    numbers = max(count, max(attempts) + 1)
    _numbers.extend(b"%d" % number for number in range(len(_numbers), numbers))
    pieces: list[bytes] = [b'},{"id":"'] * (_PIECES * count)
    pieces[0] = begin + b'{"id":"'
    pieces[1::_PIECES] = deliveries.message_ids()
    pieces[2::_PIECES] = [
        _about(subject)
        if payload.key is None and not payload.headers and payload.history is None
        else _about.__wrapped__(subject, payload.key, shown_headers(payload))
        for subject, payload in zip(deliveries.subjects(), payloads, strict=True)
    ]
    pieces[3::_PIECES] = map(_time, deliveries.first_due_ms)
    pieces[4::_PIECES] = [b'","attempt":'] * count
    pieces[5::_PIECES] = [_numbers[attempt] for attempt in attempts]
    pieces[6::_PIECES] = [b',"lease":"' + pulled.lease_prefix.encode()] * count
    pieces[7::_PIECES] = _numbers[:count]
    pieces[8::_PIECES] = [
        b'","body":' + payload.body
        if payload.content == Content.JSON
        else b'","body_base64":"%b"' % base64.b64encode(payload.body)
        for payload in payloads
    ]
    pieces.append(b"}")
    pieces.append(end)
    return b"".join(pieces)


_PIECES = 9
_numbers = [b"%d" % number for number in range(1000)]
"""The text of numbers: attempts, and the indexes of leases. It grows to the largest pull."""


@lru_cache(maxsize=4096)
def _about(subject: str, key: str | None = None, headers: dict[str, str] | None = None) -> bytes:
    """The fields between id and time."""
    return b'","subject":%b,"key":%b,"headers":%b,"deliver_at":"' % (
        encode(subject),
        encode(key),
        encode(headers or {}),
    )


@lru_cache(maxsize=4096)
def _time(time_ms: int) -> bytes:
    return format_time(time_ms).encode()


def dead_letter_document(letter: DeadLetterView) -> DeadLetterDocument:
    """An entry in the list of dead letters."""
    return DeadLetterDocument(
        str(letter.entry_seq),
        letter.message_id,
        letter.subject,
        letter.payload.key,
        letter.reason,
        letter.attempts,
        format_time(letter.died_ms),
        letter.payload.headers or {},
        *body_fields(letter.payload),
    )


def _watched(payload: Payload) -> tuple[tuple[str, ...] | _Unset, OnEventName | _Unset]:
    if payload.watch is None:
        return _UNSET, _UNSET
    return payload.watch.keys, name_among(OnEvent, payload.watch.on_event)


def _to_document(payload: Payload) -> ToDocument | _Unset:
    to = payload.to
    if to is None:
        return _UNSET
    schedule = RetrySchedule.within_limits(to.max_attempts, to.backoff_ms)
    return ToDocument(
        to.url,
        format_duration(to.timeout_ms),
        ToRetryDocument(schedule.max_attempts, tuple(map(format_duration, schedule.backoff_ms))),
        MASK if to.secret else _UNSET,
    )


def _options(view: MessageView) -> tuple[int | _Unset, str | _Unset, str | _Unset]:
    payload = view.payload
    if payload.options is None:
        return _UNSET, _UNSET, _UNSET
    first_due_ms = view.due_ms if payload.origin is None else payload.origin.due_ms
    expires_ms = payload.options.expires_ms(first_due_ms)
    return (
        payload.options.priority or _UNSET,
        _UNSET if payload.options.group is None else payload.options.group,
        _UNSET if expires_ms is None else format_time(expires_ms),
    )


def _debounce_document(payload: Payload) -> DebounceDocument | _Unset:
    debounce = None if payload.options is None else payload.options.debounce
    if debounce is None:
        return _UNSET
    return DebounceDocument(
        format_duration(debounce.quiet_ms),
        "first" if debounce.keeps_first else "last",
        format_time(debounce.since_ms),
        format_duration(debounce.at_most_ms) if debounce.at_most_ms else _UNSET,
    )


def _outcome_messages(payload: Payload) -> list[OutcomeMessageDocument | _Unset]:
    subjects = payload.outcomes.delivered, payload.outcomes.dead
    return [_UNSET if one is None else OutcomeMessageDocument(one) for one in subjects]
