"""Messages as clients publish and move them, events and heartbeats.

The intake decodes them on the hot path, and checks their fields beyond their types: such
limits stand here as `extra_json_schema`, for OpenAPI alone. A message without options has a form of
its own, since each field of a form costs every message.

Cost: of a decoder of msgspec. Threads: values.
"""

from typing import Annotated, Any, Final, Generic, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from delayserver.wire.fields import (
    Cursor,
    Duration,
    Key,
    MessageState,
    Moment,
    NotUnderstood,
    OnEventName,
    PendingState,
    SilenceMs,
    Strict,
    Subject,
    Time,
    TimeoutMs,
    When,
    about,
)
from delayserver.wire.subscriptions import RetryModel

WATCHES_MAX: Final = 8
"""Keys that a message may watch."""
PRIORITY_MAX: Final = 9
CANCELS_MAX: Final = 10_000
_Many = Meta(max_length=CANCELS_MAX)
Body = msgspec.Raw | UnsetType


class ToModel(Strict, gc=False):
    """Where one message goes, instead of to subscriptions."""

    url: Annotated[
        str, about("an http or https URL on the allow list", extra_json_schema={"maxLength": 2048})
    ]
    secret: Annotated[str | None, about("`whsec_…`, what the request is signed with")] = None
    retry: RetryModel | None = None
    timeout: Annotated[TimeoutMs | None, about("15s by default")] = None


class OutcomeMessageModel(Strict, gc=False):
    """A message that is published with the outcome of another, for each of its subscriptions."""

    subject: Subject


class PlainMessage(Strict, gc=False):
    """A message without options."""

    subject: Subject
    body: Body = UNSET
    body_base64: str | None = None
    delay: Duration = None
    deliver_at: Moment = None
    key: Annotated[Key | None, about("1 to 256 bytes; the same key: the same message")] = None
    headers: Annotated[dict[str, str] | None, about("sent along with a webhook")] = None
    watch: Annotated[
        Annotated[tuple[Key, ...], Meta(extra_json_schema={"maxItems": WATCHES_MAX})] | None,
        about("an event for one of them completes it"),
    ] = None
    on_event: Annotated[
        OnEventName | None,
        about("what such an event does: cancel (the default), or deliver it now"),
    ] = None


class PublishModel(PlainMessage, gc=False):
    """A message to publish. Give `body` or `body_base64`, and `delay` or `deliver_at`."""

    ttl: Annotated[
        Duration, about("a dead letter (`expired`) if no delivery begins so soon after it was due")
    ] = None
    jitter: Annotated[
        Duration, about("it is due up to so much later; drawn once, and answered as `deliver_at`")
    ] = None
    priority: Annotated[
        Annotated[int, Meta(extra_json_schema={"minimum": 0, "maximum": PRIORITY_MAX})] | None,
        about("of what is due, higher ones are delivered first; default 0"),
    ] = None
    to: Annotated[
        ToModel | None, about("where it goes, by webhook; no subscription gets it then")
    ] = None
    on_delivered: Annotated[
        OutcomeMessageModel | None,
        about("publish a message under this subject when it was delivered"),
    ] = None
    on_dead: Annotated[
        OutcomeMessageModel | None,
        about("publish a message under this subject when it is a dead letter"),
    ] = None
    group: Annotated[
        Key | None,
        about(
            "of the messages of a group, each subscription has one under way at a "
            "time, in due order"
        ),
    ] = None


class DebounceModel(Strict, gc=False):
    """A message that each PUT under its key pushes back."""

    quiet: Annotated[Duration, about("it is due when no PUT has come for so long")]
    at_most: Annotated[
        Duration, about("it is due so long after the first PUT at the latest; else without end")
    ] = None
    keep: Annotated[
        Literal["last", "first"],
        about("whose content is delivered: the last PUT's, or the first's"),
    ] = "last"


PublishUnderKeyModel: Final[Any] = msgspec.defstruct(
    "PublishUnderKeyModel",
    [
        *(
            (one.name, one.type, one.default)
            for one in msgspec.structs.fields(PublishModel)
            if one.name not in ("subject", "key")
        ),
        (
            "debounce",
            Annotated[DebounceModel | None, about("instead of `delay`, `deliver_at`, `jitter`")],
            None,
        ),
    ],
    namespace={"__doc__": "A message whose subject and key stand in the path."},
    forbid_unknown_fields=True,
    gc=False,
)
"""The fields of PublishModel but for those two, and how PUTs are debounced."""


class CancelKeyBody(Strict, gc=False):
    """A message by its key."""

    subject: str
    key: str


class CancelBody(Strict, gc=False):
    """The message to cancel."""

    ids: Annotated[list[str], _Many] = msgspec.field(default_factory=list)
    keys: Annotated[list[CancelKeyBody], _Many] = msgspec.field(default_factory=list)


class MoveModel(Strict):
    """A new due time: give one of the two."""

    delay: Duration = None
    deliver_at: Moment = None


class MovedFields(msgspec.Struct, Generic[When], frozen=True):
    """The answer to a move."""

    id: str
    deliver_at: When
    state: str


class MovedModel(MovedFields[Time], frozen=True):
    """The answer to a move."""


class EventModel(msgspec.Struct, frozen=True):
    """How many messages an event completed."""

    cancelled: int
    fired: Annotated[int, about("delivered now instead of at their time")]


class HeartbeatModel(Strict, gc=False):
    """A message that is published unless the heartbeat is renewed in time."""

    timeout: Annotated[SilenceMs, about("each renewal starts it anew")]
    subject: Subject
    body: Body = UNSET
    body_base64: str | None = None
    headers: dict[str, str] | None = None


# ── answers ───────────────────────────────────────────────────────────────────────────────────────


class PublishedDocument(msgspec.Struct):
    """A message that is stored durably."""

    id: str
    subject: str
    key: str | None
    deliver_at: Time
    state: str
    duplicate: Annotated[bool, about("the key stood for the same message already")]


class BatchDocument(msgspec.Struct):
    """A batch that is stored durably, whole."""

    count: int
    duplicates: int
    ids: Annotated[list[str], about("in the order of the batch")]
    duplicates_by_shard: Annotated[
        dict[int, int] | UnsetType,
        about("where the batch went to several shards, by their numbers"),
    ] = UNSET


class DeliveryFields(msgspec.Struct, Generic[When], frozen=True):
    """The state of a message at one subscription."""

    subscription: str
    state: str
    attempt: int
    at: When


class DeliveryDocument(DeliveryFields[Time], frozen=True):
    """The state of a message at one subscription."""


Attempts = TypeVar("Attempts")


class AttemptFields(msgspec.Struct, Generic[When], frozen=True):
    """One try to deliver a message."""

    subscription: Annotated[str, about("its name; empty if it was deleted")]
    attempt: Annotated[int, about("from 1; anew from 1 after a redrive or a replay")]
    at: Annotated[When, about("when it began; when it ended where duration is null")]
    duration: Annotated[str | None, about("of a message that was pulled: of its lease")]
    outcome: Literal["delivered", "failed"]
    status: Annotated[int | None, about("of HTTP")]
    answer: Annotated[str | None, about("the beginning of what was answered")]
    error: Annotated[str | None, about("why it failed")]


class AttemptDocument(AttemptFields[Time], frozen=True):
    """One try to deliver a message."""


class AttemptsFields(msgspec.Struct, Generic[Attempts], frozen=True):
    """How each attempt to deliver a message went, in order."""

    attempts: Attempts
    dropped: Annotated[int, about("how many more failed, behind the first three of a subscription")]


class AttemptsDocument(AttemptsFields[list[AttemptDocument]], frozen=True):
    """How each attempt to deliver a message went, in order."""


class ReplayedDocument(msgspec.Struct, frozen=True):
    """A message that is delivered again."""

    id: str
    state: MessageState
    subscriptions: Annotated[tuple[str, ...], about("the names of those that get it again")]


class ToRetryDocument(msgspec.Struct):
    """When an attempt that failed is made again."""

    max_attempts: int
    backoff: tuple[str, ...]


class ToDocument(msgspec.Struct):
    """Where a message says that it goes."""

    url: str
    timeout: str
    retry: ToRetryDocument
    secret: Annotated[str | UnsetType, about("masked")] = UNSET


class OutcomeMessageDocument(msgspec.Struct, frozen=True):
    """A message that is published with the outcome of another."""

    subject: str


class DebounceDocument(msgspec.Struct):
    """How PUTs push a message back."""

    quiet: str
    keep: str
    since: Annotated[Time, about("the first PUT since the key was free")]
    at_most: str | UnsetType = UNSET


class MessageFields(msgspec.Struct, Generic[When], frozen=True):
    """A message and its state: the fields that every message has."""

    id: str
    subject: str
    key: str | None
    deliver_at: When
    state: MessageState
    attempts: int
    headers: dict[str, str]


class MessageDocument(MessageFields[Time], frozen=True):
    """A message and its state."""

    deliveries: list[DeliveryDocument]
    body: msgspec.Raw | UnsetType = UNSET
    body_base64: str | UnsetType = UNSET
    watch: tuple[str, ...] | UnsetType = UNSET
    on_event: OnEventName | UnsetType = UNSET
    priority: Annotated[int | UnsetType, about("where it is not 0")] = UNSET
    group: str | UnsetType = UNSET
    expires_at: Annotated[Time | UnsetType, about("from when on it is not delivered any more")] = (
        UNSET
    )
    to: Annotated[ToDocument | UnsetType, about("where it goes, if it says so itself")] = UNSET
    on_delivered: OutcomeMessageDocument | UnsetType = UNSET
    on_dead: OutcomeMessageDocument | UnsetType = UNSET
    debounce: DebounceDocument | UnsetType = UNSET


class HeartbeatFields(msgspec.Struct, Generic[When], frozen=True):
    """A heartbeat as it is."""

    key: str
    timeout: str
    subject: str
    expires_at: Annotated[When, about("when the message is published unless it is renewed")]


class HeartbeatDocument(HeartbeatFields[Time], frozen=True):
    """A heartbeat as it is."""

    headers: dict[str, str] | UnsetType = UNSET
    body: msgspec.Raw | UnsetType = UNSET
    body_base64: str | UnsetType = UNSET
    not_understood: NotUnderstood = UNSET


class PendingDocument(msgspec.Struct):
    """A message that waits."""

    id: str
    subject: str
    key: str | None
    deliver_at: Annotated[Time, about("of the next attempt, when it is being retried")]
    state: PendingState
    attempts: Annotated[int, about("that were made")]
    headers: dict[str, str]
    body: msgspec.Raw | UnsetType = UNSET
    body_base64: str | UnsetType = UNSET


class PendingListDocument(msgspec.Struct):
    """A page of pending messages, in due order; it may hold fewer than there is room for."""

    messages: list[PendingDocument]
    cursor: Cursor


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
