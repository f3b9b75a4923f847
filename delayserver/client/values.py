"""Messages and definitions as a program gets them: the fields of `delayserver.wire`, with datetimes
for times.

Cost: times are made of text only where they are looked at. Threads: immutable values.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar

import msgspec

from delayserver.records.message_id import read_id
from delayserver.times import SECONDS_REASON, are_seconds, format_time
from delayserver.wire.bulk import BackupFields, BackupPartFields
from delayserver.wire.fields import CatchUpName, OnErrorName, OnEventName, OverlapName
from delayserver.wire.messages import (
    AttemptFields,
    AttemptsFields,
    DeliveryFields,
    EventModel,
    HeartbeatFields,
    MessageFields,
    MovedFields,
    OutcomeMessageDocument,
    ReplayedDocument,
)
from delayserver.wire.pulls import PulledFields
from delayserver.wire.schedules import ScheduleFields
from delayserver.wire.sources import SkippedRecordFields, SourceFields
from delayserver.wire.subscriptions import DeadLetterFields, SubscriptionFields

T = TypeVar("T")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)
_NULL = msgspec.Raw(b"null")

Delay = timedelta | str | int
"""A timedelta, text such as `30m`, or whole milliseconds: `30` is 30 ms."""
DeliverAt = datetime | str | int
"""A datetime that knows its zone, RFC 3339, or milliseconds (not seconds) since the epoch."""
REPR_BYTES_MAX = 200
"""Bytes of a body that are printed."""


OnEvent = OnEventName


class To(msgspec.Struct, frozen=True, kw_only=True):
    """Where one message goes by webhook, instead of to subscriptions."""

    url: str
    """On the allow list of the server."""
    secret: str | None = None
    """`whsec_…`: the secret that signs the request."""
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
        """When it is due. With a duplicate: when it was due at first; `get` knows whether it was
        moved since."""
        return _EPOCH + timedelta(milliseconds=read_id(self.id).due_ms)


class Replayed(ReplayedDocument, frozen=True):
    """A message that is delivered again. `subscriptions` are the names of those that get it."""


class EventResult(EventModel, frozen=True):
    """How many messages an event completed."""


class OutcomeMessage(OutcomeMessageDocument, frozen=True):
    """A message that is published with the outcome of another."""


class Moved(MovedFields[datetime], frozen=True, gc=False):
    """A message that has a new due time; the id stays."""

    version: str = ""
    """See Stored.version."""


class Delivery(DeliveryFields[datetime], frozen=True):
    """The outcome of a message at one subscription."""


class DeliveryAttempt(AttemptFields[datetime], frozen=True):
    """One try to deliver a message. Its `duration` is text such as `120ms`."""


class Attempts(AttemptsFields[tuple[DeliveryAttempt, ...]], frozen=True):
    """How each attempt to deliver a message went, in order."""


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """A body: JSON as it was published, or bytes."""

    if TYPE_CHECKING:  # Each document has the two fields, since its other fields are of `wire`.
        body_json: msgspec.Raw = _NULL
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

        Raises msgspec.ValidationError for a body that is no such value."""
        return msgspec.json.decode(self.raw, type=type)

    @property
    def body(self) -> Any:
        """The value of the JSON, or bytes where bytes were published. Decoded at each look."""
        return msgspec.json.decode(self.body_json) if self.body_base64 is None else self.raw


def _start_of(body: bytes) -> str:
    return body[:REPR_BYTES_MAX].decode(errors="replace")


class Stored(Body, MessageFields[datetime], frozen=True, kw_only=True):
    """A message that was looked up, or listed. It can be a member of a set and a key of a dict.
    Its `state` is scheduled, delivering, delivered, cancelled or dead."""

    watch: tuple[str, ...] = ()
    on_event: OnEvent | None = None
    priority: int = 0
    group: str | None = None
    expires_at: datetime | None = None
    """From this time on it is too late to deliver the message; None: it never is."""
    to: dict[str, Any] | None = None
    """Where it goes, if it says so itself: url, timeout and retry as the API has them, and a
    secret as `***`."""
    on_delivered: OutcomeMessage | None = None
    on_dead: OutcomeMessage | None = None
    debounce: dict[str, Any] | None = None
    """How `replace` pushes it back: quiet, at_most and keep as the API has them, and since when."""
    deliveries: tuple[Delivery, ...] = ()
    version: str = ""
    """For `if_match`: changes with everything that happens to the message. Empty in lists."""
    headers: dict[str, str] = {}
    body_json: msgspec.Raw = msgspec.field(name="body", default=_NULL)
    body_base64: bytes | None = None

    def __hash__(self) -> int:
        return hash(self.id)


class Message(Body, PulledFields[datetime], frozen=True, kw_only=True):
    """A message that is due, as a consumer gets it. Its `id` is the same in every attempt, and
    `attempt` is 1 for the first. It can be a member of a set and a key of a dict. To recognise a
    repeat, compare the `id`, since `attempt` and `lease` differ."""

    headers: dict[str, str] = {}
    body_json: msgspec.Raw = msgspec.field(name="body", default=_NULL)
    body_base64: bytes | None = None

    def __hash__(self) -> int:
        return hash(self.id)


class Heartbeat(Body, HeartbeatFields[datetime], frozen=True, kw_only=True):
    """A message that is published unless the heartbeat is renewed in time. Its `timeout` is text
    such as `10s`."""

    headers: dict[str, str] = {}
    body_json: msgspec.Raw = msgspec.field(name="body", default=_NULL)
    body_base64: bytes | None = None

    def __hash__(self) -> int:
        return hash(self.key)


CatchUp = CatchUpName
Overlap = OverlapName
OnError = OnErrorName


class Schedule(Body, ScheduleFields[datetime, tuple[datetime, ...]], frozen=True, kw_only=True):
    """A schedule as it is; durations are text such as `15s`."""

    version: str = ""
    """For `if_match`: changes when it is put, paused or resumed. Empty in lists."""
    headers: dict[str, str] = {}
    body_json: msgspec.Raw = msgspec.field(name="body", default=_NULL)
    body_base64: bytes | None = None

    def __hash__(self) -> int:
        return hash(self.name)


class SkippedRecord(SkippedRecordFields[datetime], frozen=True):
    """A record of a topic that could not be published, and why."""


class Source(SourceFields[datetime, SkippedRecord], frozen=True, kw_only=True):
    """A source as it is; `***` stands for a password."""

    version: str = ""
    """For `if_match`: changes when it is put, paused or resumed. Empty in lists."""

    def __hash__(self) -> int:
        return hash(self.name)


class BackupPart(BackupPartFields[datetime], frozen=True):
    """The part of a backup that is from one shard."""


class Backup(BackupFields[datetime, BackupPart], frozen=True):
    """A backup, or how far it is."""

    def __hash__(self) -> int:
        return hash(self.name)


Parts = dict[str, Any]
"""An object of the API as it is."""


class Subscription(SubscriptionFields[datetime, Parts, Parts, Parts], frozen=True, kw_only=True):
    """A subscription as it is; durations are text such as `15s`. Secrets are never shown,
    and `***` stands for a password."""


class DeadLetter(Body, DeadLetterFields[datetime], frozen=True, kw_only=True):
    """A message that no attempt delivered. Its `id` is that of the message."""

    headers: dict[str, str] = {}
    body_json: msgspec.Raw = msgspec.field(name="body", default=_NULL)
    body_base64: bytes | None = None

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
