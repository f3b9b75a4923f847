"""Answers that hold messages: their bodies go out byte for byte as they were published.

A body is JSON that nobody decodes: neither a number that is too long for a float nor the order of
the fields changes on its way. OpenAPI describes the answers by these structs.

Cost: 1 µs per message. Threads: values.
"""

import base64
from collections.abc import Iterable, Mapping
from enum import IntEnum
from functools import lru_cache
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from delayserver.api.fields import (
    CatchUpName,
    MessageState,
    OnEventName,
    OverlapName,
    PendingState,
    Time,
)
from delayserver.backup.shelf import BackupState, BackupStep, BackupView
from delayserver.delivery.batch import body_fields
from delayserver.delivery.delayed_fetch import Pulled
from delayserver.queries.attempts import AttemptsView
from delayserver.queries.dead_letters import DeadLetterView
from delayserver.queries.listing import PendingView
from delayserver.queries.look_up import MessageView
from delayserver.records.message import Content, Payload, decode_payload, shown_headers
from delayserver.records.schedules import CatchUp, KnownSchedule, Overlap
from delayserver.records.sources import KnownSource, OnError
from delayserver.records.subscriptions import MASK, RetrySchedule
from delayserver.records.tables import Heartbeat, OnEvent
from delayserver.times import format_duration, format_time
from storage.errors import DamageError

_UNSET = msgspec.UNSET
_Unset = msgspec.UnsetType

encode = msgspec.json.Encoder().encode
PLACES_HEADER: Final = "delay-places"
"""Of a call that asks for a page of a list as ShardPageDocument."""
NAMED_PAGE_MAX: Final = 100
"""Schedules or sources in a page of their list: of schedules the next times are reckoned."""


class LatenessDocument(msgspec.Struct):
    """How late deliveries were, from due to sent, or handed to a consumer."""

    bounds_ms: Annotated[list[float], Meta(description="upper bounds")]
    counts: Annotated[
        list[int],
        Meta(
            description="deliveries that were at most as late as each bound, and later than the "
            "one before it; and one more count of those that were later than all"
        ),
    ]


class FailingDocument(msgspec.Struct):
    """A subscription whose receiver is down, or refuses all it is sent."""

    subscription: str
    since: Annotated[Time, Meta(description="the first of nothing but failures")]


class StatsDocument(msgspec.Struct):
    """Counters since the start of this process, and what waits now."""

    version: str
    started_at: Time
    accepted: int
    cancelled: int
    delivered: int
    retried: int
    dead: int
    dead_letters: Annotated[int, Meta(description="that wait now, as of the last checkpoint")]
    lateness: LatenessDocument
    last_seq: int
    checkpoint_seq: int
    pending_loaded: Annotated[int, Meta(description="that are due soon")]
    pending_later: Annotated[int, Meta(description="as of the last checkpoint")]
    queued: Annotated[int, Meta(description="due, and waiting for a subscriber")]
    in_flight: int
    oldest_due_at: Annotated[Time | None, Meta(description="of what is queued")]
    unmatched: Annotated[int, Meta(description="due, and no subscription matches")]
    subjects: int
    subscriptions: int
    paused: Annotated[int, Meta(description="subscriptions that are")]
    failing: Annotated[
        list[FailingDocument],
        Meta(description="up to 20 subscriptions, those first that have failed for longest"),
    ]
    unfiled_bytes: int
    replay_lag_ms: Annotated[
        int, Meta(description="how long the oldest waits that is accepted and not filed")
    ]
    archive_waiting_hours: int
    archive_waiting_bytes: int
    disk_free_bytes: int


class SubjectDocument(msgspec.Struct):
    """A subject, and what was counted of it since the start of this process."""

    name: str
    accepted: int
    cancelled: Annotated[
        int, Meta(description="of a cancel by id the subject is not always known: not counted here")
    ]
    delivered: int
    retried: int
    dead: int


class SubjectListDocument(msgspec.Struct):
    """A page of subjects, in the order of their names."""

    subjects: list[SubjectDocument]
    cursor: Annotated[
        str | None, Meta(description="for the next page; null: there is nothing more")
    ]


class OwnTokenDocument(msgspec.Struct):
    """What the caller may do."""

    name: Annotated[str | None, Meta(description="null: nobody is asked for a token")]
    scopes: list[str]
    expires_at: Time | None
    rate: Annotated[float | None, Meta(description="requests and messages per second")]


class TokenDocument(OwnTokenDocument):
    """A token that is valid now; its text is stored nowhere."""

    created_at: Time


class TokenListDocument(msgspec.Struct):
    """A page of tokens, in the order of their names."""

    tokens: list[TokenDocument]
    cursor: Annotated[
        str | None, Meta(description="for the next page; null: there is nothing more")
    ]


class ForecastBucketDocument(msgspec.Struct, rename={"since": "from"}):
    """How many messages fall due in one span of time."""

    since: Time
    count: int


class ForecastDocument(msgspec.Struct):
    """How many messages fall due when."""

    bucket: str
    buckets: list[ForecastBucketDocument]


class ReplicaDocument(msgspec.Struct):
    """A copy of a shard."""

    node: str
    lag_records: Annotated[int, Meta(description="how far it is behind the owner")]


class ShardDocument(msgspec.Struct):
    """A shard, and who has it."""

    shard: int
    owner: Annotated[
        str | None, Meta(description="the name of a node; null: nobody has it just now")
    ]
    epoch: Annotated[int, Meta(description="counts its owners; 0 where it has the same for ever")]
    url: Annotated[
        str | None,
        Meta(
            description="where the owner itself is asked; of shards of one machine on the host "
            "that the request named"
        ),
    ]
    replicas: list[ReplicaDocument]
    state: Annotated[
        Literal["serving", "away"], Meta(description="away: it starts, or has just ended")
    ]


class BackupPartDocument(msgspec.Struct):
    """What a backup has of one shard."""

    shard: int
    state: BackupState
    taken_at: Time | None
    checkpoint_seq: Annotated[
        int | None, Meta(description="the records up to this one are in it, and no other")
    ]


class BackupDocument(msgspec.Struct):
    """A backup, or how far it is."""

    name: str
    state: BackupState
    step: BackupStep | None
    started_at: Annotated[Time, Meta(description="everything that was answered before is in it")]
    taken_at: Annotated[Time | None, Meta(description="nothing that came later is in it")]
    completed_at: Time | None
    total_bytes: int
    done_bytes: int
    copied_bytes: Annotated[
        int, Meta(description="the rest is shared with the files of the backup before")
    ]
    verified: Annotated[
        bool, Meta(description="every byte was read again, and compared with all others")
    ]
    error: str | None
    shards: list[BackupPartDocument]
    log_reaches_at: Annotated[
        Time | None,
        Meta(
            description="it can be restored to any moment up to this one, with the message log "
            "behind it; null: to `taken_at` alone"
        ),
    ] = None


class BackupListDocument(msgspec.Struct):
    """All backups, the oldest first."""

    backups: list[BackupDocument]


def backup_document(view: BackupView) -> BackupDocument:
    """What a shard has of a backup, as all of it."""

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


class NodeDocument(msgspec.Struct):
    """A machine that has shards."""

    node: str
    url: str
    state: Literal["serving", "away"]
    last_seen_at: Time


class ClusterDocument(msgspec.Struct):
    """Which shards there are, and where."""

    version: Annotated[
        int,
        Meta(
            description="stands for shards, owners, states and addresses: as long as it is the "
            "same, so are they; two versions are not in an order"
        ),
    ]
    shards: list[ShardDocument]
    nodes: list[NodeDocument]


class HealthDocument(msgspec.Struct):
    """The answer to /healthz and /readyz."""

    status: str


class PublishedDocument(msgspec.Struct):
    """A message that is stored durably."""

    id: str
    subject: str
    key: str | None
    deliver_at: Time
    state: str
    duplicate: Annotated[bool, Meta(description="the key stood for the same message already")]


class BatchDocument(msgspec.Struct):
    """A batch that is stored durably, whole."""

    count: int
    duplicates: int
    ids: Annotated[list[str], Meta(description="in the order of the batch")]
    duplicates_by_shard: Annotated[
        dict[int, int] | _Unset,
        Meta(description="where the batch went to several shards, by their numbers"),
    ] = _UNSET


class DeliveryDocument(msgspec.Struct):
    """What became of a message at one subscription."""

    subscription: str
    state: str
    attempt: int
    at: Time


class AttemptDocument(msgspec.Struct):
    """One try to deliver a message."""

    subscription: Annotated[str, Meta(description="its name; empty if it was deleted")]
    attempt: Annotated[int, Meta(description="from 1; anew from 1 after a redrive or a replay")]
    at: Annotated[Time, Meta(description="when it began; when it ended where duration is null")]
    duration: Annotated[str | None, Meta(description="of a message that was pulled: of its lease")]
    outcome: Literal["delivered", "failed"]
    status: Annotated[int | None, Meta(description="of HTTP")]
    answer: Annotated[str | None, Meta(description="the beginning of what was answered")]
    error: Annotated[str | None, Meta(description="why it failed")]


class AttemptsDocument(msgspec.Struct):
    """How each attempt to deliver a message went, in order."""

    attempts: list[AttemptDocument]
    dropped: Annotated[
        int, Meta(description="how many more failed, behind the first three of a subscription")
    ]


class ReplayedDocument(msgspec.Struct):
    """A message that is delivered again."""

    id: str
    state: MessageState
    subscriptions: Annotated[list[str], Meta(description="the names of those that get it again")]


class ToRetryDocument(msgspec.Struct):
    """When an attempt that failed is made again."""

    max_attempts: int
    backoff: tuple[str, ...]


class ToDocument(msgspec.Struct):
    """Where a message says that it goes."""

    url: str
    timeout: str
    retry: ToRetryDocument
    secret: Annotated[str | _Unset, Meta(description="masked")] = _UNSET


class OutcomeMessageDocument(msgspec.Struct):
    """A message that is published with the outcome of another."""

    subject: str


class MessageDocument(msgspec.Struct):
    """A message and its state."""

    id: str
    subject: str
    key: str | None
    deliver_at: Time
    state: MessageState
    attempts: int
    headers: dict[str, str]
    deliveries: list[DeliveryDocument]
    body: msgspec.Raw | _Unset = _UNSET
    body_base64: str | _Unset = _UNSET
    watch: tuple[str, ...] | _Unset = _UNSET
    on_event: OnEventName | _Unset = _UNSET
    priority: Annotated[int | _Unset, Meta(description="where it is not 0")] = _UNSET
    group: str | _Unset = _UNSET
    expires_at: Annotated[
        Time | _Unset, Meta(description="from when on it is not delivered any more")
    ] = _UNSET
    to: Annotated[ToDocument | _Unset, Meta(description="where it goes, if it says so itself")] = (
        _UNSET
    )
    on_delivered: OutcomeMessageDocument | _Unset = _UNSET
    on_dead: OutcomeMessageDocument | _Unset = _UNSET


NotUnderstood = Annotated[
    str | _Unset,
    Meta(
        description="why this server does not understand it, so that it stands still (a zone that "
        "is missing, a field of a newer server); only if that is so. The other fields are what can "
        "be read of it"
    ),
]


class HeartbeatDocument(msgspec.Struct):
    """A heartbeat as it is."""

    key: str
    timeout: str
    subject: str
    expires_at: Annotated[
        Time, Meta(description="when the message is published unless it is renewed")
    ]
    headers: dict[str, str] | _Unset = _UNSET
    body: msgspec.Raw | _Unset = _UNSET
    body_base64: str | _Unset = _UNSET
    not_understood: NotUnderstood = _UNSET


class ScheduleDocument(msgspec.Struct):
    """A schedule as it is."""

    name: str
    subject: str
    cron: str | None
    every: str | None
    timezone: str
    jitter: str | None
    catch_up: CatchUpName
    overlap: OverlapName
    start_at: Time | None
    end_at: Time | None
    max_runs: int | None
    headers: dict[str, str]
    next_at: Annotated[list[Time], Meta(description="the next five planned times")]
    last_at: Annotated[Time | None, Meta(description="the planned time of the last run")]
    last_id: Annotated[str | None, Meta(description="its message")]
    runs: int
    skipped: Annotated[int, Meta(description="runs that were left out")]
    paused: bool
    body: msgspec.Raw | _Unset = _UNSET
    body_base64: str | _Unset = _UNSET
    not_understood: NotUnderstood = _UNSET


class ScheduleListDocument(msgspec.Struct):
    """A page of schedules, in the order of their names; it may hold fewer than there is room
    for."""

    schedules: list[ScheduleDocument]
    cursor: Annotated[
        str | None, Meta(description="for the next page; null: there is nothing more")
    ]


class SkippedRecordDocument(msgspec.Struct):
    """A record of a topic that could not be published."""

    partition: int
    offset: int
    reason: str
    at: Time


class SourceDocument(msgspec.Struct):
    """A source as it is."""

    name: str
    subject: str
    type: Literal["kafka"]
    bootstrap: str
    topic: str
    due_header: str
    group: str
    on_error: Literal["skip", "stop"]
    paused: bool
    pause_reason: Annotated[
        Literal["asked", "error"] | None,
        Meta(description="error: it came upon a record that cannot be published (on_error: stop)"),
    ]
    error: Annotated[str | None, Meta(description="why nothing can be read now")]
    positions: Annotated[
        dict[str, int], Meta(description="by partition the offset that is taken next")
    ]
    published: Annotated[int, Meta(description="records that became messages")]
    skipped: Annotated[int, Meta(description="records that were left out")]
    last_skipped: Annotated[
        SkippedRecordDocument | None, Meta(description="the last that could not be published")
    ]
    changed_at: Time
    tls: bool | None = None
    username: str | None = None
    password: Annotated[str | None, Meta(description="masked")] = None
    mechanism: str | None = None
    not_understood: NotUnderstood = _UNSET


class SourceListDocument(msgspec.Struct):
    """A page of sources, in the order of their names."""

    sources: list[SourceDocument]
    cursor: Annotated[
        str | None, Meta(description="for the next page; null: there is nothing more")
    ]


class PlannedDocument(msgspec.Struct):
    """When a schedule would run."""

    next_at: list[Time]


class PendingDocument(msgspec.Struct):
    """A message that waits."""

    id: str
    subject: str
    key: str | None
    deliver_at: Annotated[Time, Meta(description="of the next attempt, when it is being retried")]
    state: PendingState
    attempts: Annotated[int, Meta(description="that were made")]
    headers: dict[str, str]
    body: msgspec.Raw | _Unset = _UNSET
    body_base64: str | _Unset = _UNSET


class PendingListDocument(msgspec.Struct):
    """A page of pending messages, in due order; it may hold fewer than there is room for."""

    messages: list[PendingDocument]
    cursor: Annotated[
        str | None, Meta(description="for the next page; null: there is nothing more")
    ]


class ShardPageDocument(msgspec.Struct):
    """A page of any list of one shard, as it is given to a shard that puts such pages together."""

    items: list[msgspec.Raw]
    """What the page would hold."""
    places: list[tuple[int, ...]]
    """Of each of them, in the order of the list."""
    following: tuple[int, ...] | None
    """Where the next page begins; None: there is nothing more."""
    limit: int
    """How many were asked for."""


class PulledDocument(msgspec.Struct):
    """A message that is leased to the consumer that pulled it."""

    id: str
    subject: str
    key: str | None
    headers: dict[str, str]
    deliver_at: Time
    attempt: int
    lease: Annotated[str, Meta(description="to be named in ack, nack and extend")]
    body: msgspec.Raw | _Unset = _UNSET
    body_base64: str | _Unset = _UNSET


class AckedDocument(msgspec.Struct):
    """Answer to ack."""

    acked: int
    expired: list[str]


class PulledListDocument(msgspec.Struct):
    """What is due; empty when nothing fell due in time."""

    messages: list[PulledDocument]
    acked: Annotated[
        int | _Unset, Meta(description="how many the pull has acknowledged; only if it had `ack`")
    ] = _UNSET
    expired: Annotated[
        list[str] | _Unset, Meta(description="leases in `ack` that were over before")
    ] = _UNSET


class NackedDocument(msgspec.Struct):
    """Answer to nack."""

    nacked: int
    expired: list[str]


class ExtendedDocument(msgspec.Struct):
    """Answer to extend."""

    extended: int
    expired: list[str]


class StateDocument(msgspec.Struct, gc=False):
    """The answer to a cancel."""

    id: str
    state: str


class CancelResultDocument(msgspec.Struct, gc=False):
    """The result of one of them. `state` is missing where there is no such message, and where a
    server that stops or whose disk is full could not cancel it: `error` says which."""

    id: str | None = None
    subject: str | None = None
    key: str | None = None
    state: str | None = None
    error: str | None = None


class CancelledDocument(msgspec.Struct):
    """One result for each, ids first."""

    results: list[CancelResultDocument]


class DeadLetterDocument(msgspec.Struct):
    """A message that no attempt delivered."""

    dead_letter: str
    id: str
    subject: str
    key: str | None
    reason: str
    attempts: int
    died_at: Time
    headers: dict[str, str]
    body: msgspec.Raw | _Unset = _UNSET
    body_base64: str | _Unset = _UNSET


class DeadLetterCountDocument(msgspec.Struct):
    """A subscription that has dead letters; `_to`: messages that said themselves where they go."""

    name: str
    count: Annotated[int, Meta(description="counted up to 1000 in each shard")]


class DeadLetterCountsDocument(msgspec.Struct):
    """A page of subscriptions that have dead letters, in the order of their names."""

    subscriptions: list[DeadLetterCountDocument]
    cursor: Annotated[
        str | None, Meta(description="for the next page; null: there is nothing more")
    ]


class DeadLettersDocument(msgspec.Struct):
    """A page of dead letters."""

    dead_letters: list[DeadLetterDocument]
    cursor: str | None


def attempts_document(view: AttemptsView) -> AttemptsDocument:
    """The attempts of a message."""
    return AttemptsDocument(
        [
            AttemptDocument(
                subscription=one.subscription,
                attempt=one.attempt.number,
                at=format_time(one.attempt.began_ms),
                duration=None
                if one.attempt.duration_ms is None
                else format_duration(one.attempt.duration_ms),
                outcome="failed" if one.attempt.error else "delivered",
                status=one.attempt.status or None,
                answer=one.attempt.answer or None,
                error=one.attempt.error or None,
            )
            for one in view.attempts
        ],
        view.dropped,
    )


def message_document(view: MessageView) -> MessageDocument:
    """What somebody who looks a message up gets."""
    deliveries = [
        DeliveryDocument(one.subscription, one.state, one.attempt, format_time(one.at_ms))
        for one in view.deliveries
    ]
    priority, group, expires_at = _options(view)
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
        *_outcome_messages(view.payload),
    )


def heartbeat_document(
    heartbeat: Heartbeat, problem: str, subject: str, expires_ms: int
) -> HeartbeatDocument:
    """Returns the document that a caller gets for a heartbeat. `problem`: why the heartbeat is not
    understood; empty where it is."""
    payload = _stored_payload(heartbeat.payload)
    return HeartbeatDocument(
        heartbeat.key,
        format_duration(heartbeat.timeout_ms),
        subject,
        format_time(expires_ms),
        payload.headers or {},
        *body_fields(payload),
        problem or _UNSET,
    )


def schedule_document(
    known: KnownSchedule, subject: str, planned: Iterable[int], last_id: str | None
) -> ScheduleDocument:
    """What somebody who looks a schedule up gets. `planned`: its next times, in ms."""
    schedule, state = known.definition, known.state
    payload = _stored_payload(schedule.payload)
    every_ms, jitter_ms = schedule.every_ms, schedule.jitter_ms
    return ScheduleDocument(
        schedule.name,
        subject,
        schedule.cron or None,
        format_duration(every_ms) if every_ms else None,
        schedule.timezone,
        format_duration(jitter_ms) if jitter_ms else None,
        _name_among(CatchUp, schedule.catch_up),
        _name_among(Overlap, schedule.overlap),
        _time_or_none(schedule.start_ms),
        _time_or_none(schedule.end_ms),
        schedule.runs_max,
        payload.headers or {},
        [format_time(one) for one in planned],
        format_time(state.last_planned_ms) if last_id is not None else None,
        last_id,
        state.runs,
        state.skipped,
        state.is_paused,
        *body_fields(payload),
        known.problem or _UNSET,
    )


def source_document(
    known: KnownSource, subject: str, error: str | None, topic: Mapping[str, Any]
) -> SourceDocument:
    """What somebody who looks a source up gets. `topic`: where it is, without secrets."""
    source, state = known.definition, known.state
    last = state.last_skipped
    reason: Literal["asked", "error"] = "error" if state.is_stopped else "asked"
    return SourceDocument(
        name=source.name,
        subject=subject,
        type="kafka",
        due_header=source.due_header,
        group=source.group,
        on_error="stop" if source.on_error == OnError.STOP else "skip",
        paused=state.is_paused,
        pause_reason=reason if state.is_paused else None,
        error=None if state.is_paused else error,
        positions={str(one): offset for one, offset in sorted(state.positions.items())},
        published=state.taken,
        skipped=state.skipped,
        last_skipped=None
        if last is None
        else SkippedRecordDocument(
            last.partition, last.offset, last.reason, format_time(last.time_ms)
        ),
        changed_at=format_time(state.changed_ms),
        not_understood=known.problem or _UNSET,
        **topic,
    )


def _stored_payload(sealed: bytes) -> Payload:
    """Returns the payload that a definition publishes; `null` where that cannot be read."""
    try:
        return decode_payload(sealed, "catalog", 0, 0)
    except DamageError:
        return Payload(b"null", Content.JSON)


def _name_among(kind: type[IntEnum], value: int) -> Any:
    """The name of a value of an enumeration; of one that is not known the name of the default."""
    return (kind(value) if value in list(kind) else next(iter(kind))).name.lower()


def _time_or_none(time_ms: int | None) -> str | None:
    return None if time_ms is None else format_time(time_ms)


def pending_document(view: PendingView) -> PendingDocument:
    """What the list of pending messages holds."""
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
    """What a consumer gets (PulledListDocument): each message with its lease; `acked`: what became
    of the leases that came with the pull.

    Nine pieces for each, most of them the same for all, joined once: encoding takes 2.1 times as
    long with a struct for each of 1,000 messages, and 1.2 times with one for each of 10."""
    return _encode_messages(pulled, _PULLED, _end(acked))


def encode_messages(pulled: Pulled) -> bytes:
    """Some of what a consumer gets: the messages, with commas between them."""
    return _encode_messages(pulled, b"", b"")


def join_messages(parts: Iterable[bytes], acked: AckedDocument | None) -> bytes:
    """What a consumer gets, of parts as `encode_messages` makes them."""
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
    """What stands between id and time."""
    return b'","subject":%b,"key":%b,"headers":%b,"deliver_at":"' % (
        encode(subject),
        encode(key),
        encode(headers or {}),
    )


@lru_cache(maxsize=4096)
def _time(time_ms: int) -> bytes:
    return format_time(time_ms).encode()


def dead_letter_document(letter: DeadLetterView) -> DeadLetterDocument:
    """What the list of dead letters holds."""
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


def _watched(payload: Payload) -> tuple[tuple[str, ...] | _Unset, str | _Unset]:
    if payload.watch is None:
        return _UNSET, _UNSET
    return payload.watch.keys, OnEvent(payload.watch.on_event).name.lower()


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


def _outcome_messages(payload: Payload) -> list[OutcomeMessageDocument | _Unset]:
    subjects = payload.outcomes.delivered, payload.outcomes.dead
    return [_UNSET if one is None else OutcomeMessageDocument(one) for one in subjects]
