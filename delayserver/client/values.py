"""What the server tells about messages, as the client library hands it on.

Cost: times are made of text only where they are looked at. Threads: immutable values.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, TypedDict, TypeVar

import msgspec

from delayserver.records.message_id import read_id
from delayserver.times import SECONDS_REASON, are_seconds, format_time
from delayserver.wire.fields import CatchUpName, OnErrorName, OnEventName, OverlapName
from delayserver.wire.subscriptions import SubscriptionType

T = TypeVar("T")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)

Delay = timedelta | str | int
"""A timedelta, text such as `30m`, or whole milliseconds: `30` is 30 ms."""
DeliverAt = datetime | str | int
"""A datetime that knows its zone, RFC 3339, or milliseconds (not seconds) since the epoch."""
REPR_BYTES_MAX = 200
"""Of a body, in what is printed."""


OnEvent = OnEventName


class To(msgspec.Struct, frozen=True, kw_only=True):
    """Where one message goes by webhook, instead of to subscriptions."""

    url: str
    """On the allow list of the server."""
    secret: str | None = None
    """`whsec_…`, what the request is signed with."""
    timeout: Delay | None = None
    """For an answer; 15 s by default."""
    max_attempts: int | None = None
    """Before it is a dead letter; 10 by default."""
    backoff: Sequence[Delay] | None = None
    """The waits before the attempts after the first."""


class Debounce(msgspec.Struct, frozen=True, kw_only=True):
    """How each `replace` under a key pushes its message back."""

    quiet: Delay
    """The message is due when no call has come for so long."""
    at_most: Delay | None = None
    """It is due so long after the first call at the latest; None: there is no latest moment."""
    keep: Literal["last", "first"] = "last"
    """Whose content is delivered."""


class PublishOptions(TypedDict, total=False):
    """Options of a message besides its subject, body and key; see `publish`."""

    delay: Delay | None
    deliver_at: DeliverAt | None
    headers: Mapping[str, str] | None
    watch: Sequence[str] | None
    on_event: OnEvent | None
    ttl: Delay | None
    jitter: Delay | None
    priority: int | None
    to: To | str | None
    on_delivered: str | None
    on_dead: str | None
    group: str | None


class ReplaceOptions(PublishOptions, total=False):
    """Options of a message that takes the place of another; see `replace`."""

    debounce: Debounce | None


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    """A message for `publish_all`; the fields are the arguments of `publish`."""

    subject: str
    body: Any = None
    delay: Delay | None = None
    deliver_at: DeliverAt | None = None
    key: str | None = None
    headers: Mapping[str, str] | None = None
    watch: Sequence[str] | None = None
    on_event: OnEvent | None = None
    ttl: Delay | None = None
    jitter: Delay | None = None
    priority: int | None = None
    to: To | str | None = None
    """A text is the URL."""
    on_delivered: str | None = None
    on_dead: str | None = None
    group: str | None = None


class Published(msgspec.Struct, frozen=True, gc=False):
    """A message that is stored durably."""

    id: str
    duplicate: bool = False
    """The key stood for the same message already; `id` is that one's. After a lost answer it may
    have been this very call that published it."""
    filed: bool = False
    """It is in its hour, where lists show it: asked for with `ack="filed"`."""

    @property
    def deliver_at(self) -> datetime:
        """When it is due. Of a duplicate: when it was to be due at first; `get` knows whether it
        was moved since."""
        return _EPOCH + timedelta(milliseconds=read_id(self.id).due_ms)


class Moved(msgspec.Struct, frozen=True, gc=False):
    """A message that has a new due time; the id stays."""

    id: str
    deliver_at: datetime
    version: str = ""
    """See Stored.version."""


class Delivery(msgspec.Struct, frozen=True):
    """The outcome of a message at one subscription."""

    subscription: str
    state: str
    attempt: int
    at: datetime


class DeliveryAttempt(msgspec.Struct, frozen=True):
    """One try to deliver a message."""

    subscription: str
    """Its name; empty if it was deleted."""
    attempt: int
    """From 1; anew from 1 after a redrive."""
    at: datetime
    """When it began."""
    outcome: Literal["delivered", "failed"]
    duration: str | None = None
    """Such as `120ms`."""
    status: int | None = None
    """Of HTTP."""
    answer: str | None = None
    """The beginning of what was answered."""
    error: str | None = None
    """Why it failed."""


class Replayed(msgspec.Struct, frozen=True):
    """A message that is delivered again."""

    id: str
    subscriptions: tuple[str, ...]
    """The names of those that get it."""


class Attempts(msgspec.Struct, frozen=True):
    """How each attempt to deliver a message went, in order."""

    attempts: tuple[DeliveryAttempt, ...]
    dropped: int = 0
    """How many more failed, behind the first three of a subscription."""


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """A body: JSON as it was published, or bytes."""

    body_json: msgspec.Raw = msgspec.field(name="body", default=msgspec.Raw(b"null"))
    body_base64: bytes | None = None

    def __repr__(self) -> str:
        fields = msgspec.structs.asdict(self)
        del fields["body_json"], fields["body_base64"]
        raw = self.raw
        shown = repr(raw[:REPR_BYTES_MAX]) if self.body_base64 is not None else _start_of(raw)
        if len(raw) > REPR_BYTES_MAX:
            shown += f"… ({len(raw)} bytes)"
        told = [f"{name}={value!r}" for name, value in fields.items()]
        return f"{type(self).__name__}({', '.join(told)}, body={shown})"

    @property
    def raw(self) -> bytes:
        """The bytes that were published."""
        return bytes(self.body_json) if self.body_base64 is None else self.body_base64

    def decode(self, type: type[T]) -> T:
        """The body as a value of a type that msgspec knows (a Struct, a dataclass, …).

        Raises msgspec.ValidationError where it is none."""
        return msgspec.json.decode(self.raw, type=type)

    @property
    def body(self) -> Any:
        """The value of the JSON, or bytes where bytes were published. Decoded at each look."""
        return msgspec.json.decode(self.body_json) if self.body_base64 is None else self.raw


def _start_of(body: bytes) -> str:
    return body[:REPR_BYTES_MAX].decode(errors="replace")


class OutcomeMessage(msgspec.Struct, frozen=True, gc=False):
    """A message that is published with the outcome of another."""

    subject: str


class Stored(Body, frozen=True, kw_only=True):
    """A message that was looked up, or listed. It can be a member of a set and a key of a dict."""

    id: str
    subject: str
    key: str | None
    deliver_at: datetime
    state: str
    """scheduled, delivering, delivered, cancelled or dead"""
    attempts: int
    headers: dict[str, str] = {}
    watch: tuple[str, ...] = ()
    on_event: OnEvent | None = None
    priority: int = 0
    group: str | None = None
    expires_at: datetime | None = None
    """From when on it is too late to deliver it; None: never."""
    to: dict[str, Any] | None = None
    """Where it goes, if it says so itself: url, timeout and retry as the API has them, and a
    secret as `***`."""
    on_delivered: OutcomeMessage | None = None
    on_dead: OutcomeMessage | None = None
    debounce: dict[str, Any] | None = None
    """How `replace` pushes it back: quiet, at_most and keep as the API has them, and since when."""
    deliveries: tuple[Delivery, ...] = ()
    version: str = ""
    """For `if_match`: changes with whatever happens to the message. Empty in lists."""

    def __hash__(self) -> int:
        return hash(self.id)


class Message(Body, frozen=True, kw_only=True):
    """A message that is due, as a consumer gets it. It can be a member of a set and a key of a
    dict; as one that tells repeats, `id` is better, since `attempt` and `lease` differ."""

    id: str
    """The same in every attempt: by it, repeats are known."""
    subject: str
    key: str | None
    deliver_at: datetime
    attempt: int
    """1 for the first."""
    lease: str
    headers: dict[str, str] = {}

    def __hash__(self) -> int:
        return hash(self.id)


class EventResult(msgspec.Struct, frozen=True):
    """How many messages an event completed."""

    cancelled: int
    fired: int


class Heartbeat(Body, frozen=True, kw_only=True):
    """A message that is published unless the heartbeat is renewed in time."""

    key: str
    timeout: str
    """Such as `10s`."""
    subject: str
    expires_at: datetime
    headers: dict[str, str] = {}

    def __hash__(self) -> int:
        return hash(self.key)


CatchUp = CatchUpName
Overlap = OverlapName


class Schedule(Body, frozen=True, kw_only=True):
    """A schedule as it is; durations are text such as `15s`."""

    name: str
    subject: str
    timezone: str
    catch_up: CatchUp
    overlap: Overlap
    next_at: tuple[datetime, ...]
    """The next five planned times."""
    runs: int
    skipped: int
    """Runs that were left out."""
    paused: bool
    cron: str | None = None
    every: str | None = None
    jitter: str | None = None
    start_at: datetime | None = None
    end_at: datetime | None = None
    max_runs: int | None = None
    last_at: datetime | None = None
    """The planned time of the last run."""
    last_id: str | None = None
    """Of its message."""
    headers: dict[str, str] = {}
    version: str = ""
    """For `if_match`: changes when it is put, paused or resumed. Empty in lists."""

    def __hash__(self) -> int:
        return hash(self.name)


BackupState = Literal["running", "complete", "failed"]
OnError = OnErrorName


class SkippedRecord(msgspec.Struct, frozen=True):
    """A record of a topic that could not be published, and why."""

    partition: int
    offset: int
    reason: str
    at: datetime


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A source as it is; `***` stands for a password."""

    name: str
    subject: str
    type: Literal["kafka"]
    bootstrap: str
    topic: str
    due_header: str
    group: str
    on_error: OnError
    paused: bool
    positions: dict[str, int]
    """By partition the offset that is taken next."""
    published: int
    """Records that became messages."""
    skipped: int
    """Records that were left out."""
    changed_at: datetime
    pause_reason: Literal["asked", "error"] | None = None
    """error: it came upon a record that cannot be published."""
    error: str | None = None
    """Why nothing can be read now."""
    last_skipped: SkippedRecord | None = None
    tls: bool | None = None
    username: str | None = None
    password: str | None = None
    mechanism: str | None = None
    version: str = ""
    """For `if_match`: changes when it is put, paused or resumed. Empty in lists."""

    def __hash__(self) -> int:
        return hash(self.name)


class BackupPart(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a backup that is from one shard."""

    shard: int
    state: BackupState
    taken_at: datetime | None = None
    checkpoint_seq: int | None = None
    """The records up to this one are in it, and no other."""


class Backup(msgspec.Struct, frozen=True, kw_only=True):
    """A backup, or how far it is."""

    name: str
    state: BackupState
    started_at: datetime
    """Everything that was answered before is in it."""
    shards: list[BackupPart]
    step: Literal["waiting", "copying", "checking"] | None = None
    """Of one that is running."""
    taken_at: datetime | None = None
    """Nothing that came later is in it."""
    completed_at: datetime | None = None
    total_bytes: int = 0
    done_bytes: int = 0
    copied_bytes: int = 0
    """The rest is shared with the files of the backup before."""
    verified: bool = False
    """Every byte was read again, and compared with all others."""
    error: str | None = None
    log_reaches_at: datetime | None = None
    """It can be restored to any moment up to this one, with the message log behind it; None: to
    `taken_at` alone."""

    def __hash__(self) -> int:
        return hash(self.name)


class Subscription(msgspec.Struct, frozen=True, kw_only=True):
    """A subscription as it is; durations are text such as `15s`. Secrets are never shown,
    and `***` stands for a password."""

    name: str
    subject: str
    type: SubscriptionType
    created_at: datetime
    paused: bool
    queued: int
    """Messages that are due and wait for the subscriber."""
    in_flight: int
    retry: dict[str, Any]
    catch_up: str | dict[str, str]
    url: str | None = None
    bootstrap: str | None = None
    topic: str | None = None
    key: str | None = None
    delivery: str | None = None
    username: str | None = None
    password: str | None = None
    mechanism: str | None = None
    tls: bool | None = None
    stream: str | None = None
    max_length: int | None = None
    nats_subject: str | None = None
    exchange: str | None = None
    routing_key: str | None = None
    signed: bool | None = None
    headers: dict[str, str] | None = None
    """Their names; each value is masked."""
    method: str | None = None
    disable_after: str | None = None
    pause_reason: str | None = None
    """asked, gone (its receiver answered 410) or failures (nothing else for `disable_after`)"""
    failing_since: datetime | None = None
    """The first of nothing but failures, as far as the server's process has seen them."""
    timeout: str | None = None
    max_in_flight: int | None = None
    rate: dict[str, Any] | None = None
    batch: dict[str, Any] | None = None
    lease: str | None = None


class DeadLetter(Body, frozen=True, kw_only=True):
    """A message that no attempt delivered."""

    id: str
    """Of the message."""
    subject: str
    key: str | None
    reason: str
    attempts: int
    died_at: datetime
    headers: dict[str, str] = {}

    def __hash__(self) -> int:
        return hash(self.id)


def duration(value: Delay) -> int | str:
    """A duration as the API takes it; finer than a millisecond is rounded up."""
    return -(-value // _MILLISECOND) if isinstance(value, timedelta) else value


def time(value: DeliverAt) -> int | str:
    """A time as the API takes it; finer than a millisecond is rounded up. Raises ValueError."""
    if isinstance(value, int) and are_seconds(value):
        raise ValueError(f"{value}: {SECONDS_REASON}")
    if not isinstance(value, datetime):
        return value
    if value.tzinfo is None:
        raise ValueError(f"{value!r} has no time zone; give one, such as datetime.UTC")
    return format_time(-(-(value - _EPOCH) // _MILLISECOND))
