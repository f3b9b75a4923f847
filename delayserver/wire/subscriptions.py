"""Subscriptions: one struct for each type, and the form in which clients see all of them.

A request says its `type`, and has the fields of that type. It may also have null for a field of
another type, as the answers have: `read_subscription` leaves those out. Any other value of such a
field is an error that says so.

    {"type": "pull", "subject": "a", "lease": "30s"}             PullSubscription
    {"type": "pull", "subject": "a", "stream": null}             PullSubscription
    {"type": "pull", "subject": "a", "stream": "s", "x": 1}      errors at /stream and at /x

To support another type, add a struct to `SubscriptionRequest`, and read it in
`delayserver.api.rest.targets`.

Cost: 5 µs. Threads: pure.
"""

from contextlib import suppress
from types import NoneType
from typing import Annotated, Any, Final, Generic, Literal, TypeVar, cast, get_args

import msgspec
from msgspec import UNSET, Meta, UnsetType
from msgspec.structs import FieldInfo

from delayserver.errors import InputError
from delayserver.wire.fields import (
    ATTEMPTS_MAX,
    MASK,
    SIZE_MAX,
    BackoffMs,
    Bootstrap,
    BrokerMechanism,
    BrokerPassword,
    BrokerTls,
    BrokerUser,
    Cursor,
    Delivery,
    DisableAfterMs,
    DropAgeMs,
    LeaseMs,
    LingerMs,
    Method,
    Pattern,
    SpreadMs,
    Strict,
    Time,
    TimeoutMs,
    Topic,
    When,
    about,
    matching,
    one_of,
)
from delayserver.wire.reading import (
    UNREADABLE,
    alternatives,
    check_fields,
    decoder_of,
    in_one,
    raw_fields,
)

HEADERS_MAX: Final = 32
"""Headers that a subscription adds to each of its requests."""
SubscriptionType = Literal["webhook", "pull", "kafka", "redis", "nats", "amqp"]
_RECORD_KEY: Final = r"(\{key\}|\{subject\}|\{id\}|[^{}]*)"
_ROUTING: Final = r"([^{}]|\{key\}|\{subject\}|\{id\})*"


class RetryModel(Strict):
    """The times at which a failed delivery is tried again."""

    max_attempts: Annotated[int, Meta(ge=1, le=ATTEMPTS_MAX)] = 10
    backoff: Annotated[
        tuple[BackoffMs, ...],
        about("waits before the attempts after the first", max_length=ATTEMPTS_MAX),
    ] = ()


class RateModel(Strict):
    """How many messages are sent."""

    per_second: Annotated[float, Meta(ge=0.001, le=1_000_000)]
    burst: Annotated[
        Annotated[int, Meta(ge=1, le=1_000_000)] | None,
        about("at once; default: those of a second"),
    ] = None


class BatchingModel(Strict):
    """Several messages in one request, as a JSON array."""

    max: Annotated[int, about("messages in one request", ge=1, le=500)]
    linger: Annotated[
        LingerMs, about("how long after it fell due one waits for others; default: 0")
    ] = msgspec.field(default_factory=LingerMs)


class CatchUpModel(Strict):
    """How messages are caught up with that fell due meanwhile: give one of the two."""

    spread: Annotated[
        SpreadMs | None,
        about("hand them out evenly over this time; new messages on time beside them"),
    ] = None
    drop_older_than: Annotated[
        DropAgeMs | None,
        about("one that could not be handed out within this time is a dead letter"),
    ] = None

    def __post_init__(self) -> None:
        if (self.spread is None) == (self.drop_older_than is None):
            raise ValueError('"all", or an object with either spread or drop_older_than')


class AnySubscription(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type"):
    """The fields that subscriptions of all types have."""

    subject: Annotated[Pattern, about("exact, or a prefix that ends in .*, or *")]
    timeout: Annotated[TimeoutMs, about("not pull: time for an answer; default: 15000")] = (
        msgspec.field(default_factory=lambda: TimeoutMs(15_000))
    )
    max_in_flight: Annotated[
        Annotated[int, Meta(ge=1, le=10_000)] | None,
        about("webhook: requests at once; brokers: messages (1,000)"),
    ] = None
    retry: RetryModel = msgspec.field(default_factory=RetryModel)
    catch_up: Annotated[
        Literal["all"] | CatchUpModel,
        about('what happens to messages that fell due during downtime or a pause; default: "all"'),
    ] = "all"
    lease: Annotated[LeaseMs, about("pull: time to acknowledge; default: 30000")] = msgspec.field(
        default_factory=lambda: LeaseMs(30_000)
    )

    @property
    def kind(self) -> SubscriptionType:
        """Its type, as JSON says it."""
        return cast(SubscriptionType, self.__struct_config__.tag)


class PullSubscription(AnySubscription, kw_only=True, tag="pull"):
    """Messages wait for consumers."""


class PushedSubscription(AnySubscription, kw_only=True):
    """The server sends messages."""

    rate: Annotated[RateModel | None, about("at most so many messages")] = None


class WebhookSubscription(PushedSubscription, kw_only=True, tag="webhook"):
    """Each message is a request."""

    url: Annotated[str, about("where to POST", max_length=2048)]
    secret: Annotated[str | None, about("whsec_…, signs every request")] = None
    secrets: Annotated[
        Annotated[tuple[str, ...], Meta(min_length=1, max_length=4)] | None,
        about("instead of secret, newest first; each signs, to change them over"),
    ] = None
    headers: Annotated[
        Annotated[dict[str, str], Meta(max_length=HEADERS_MAX)] | None,
        about(
            "sent along with each request, instead of a message's own of the same "
            f"name; answers show {MASK} for each value"
        ),
    ] = None
    method: Annotated[Method | None, about("how requests are made; POST if nothing is said")] = None
    disable_after: Annotated[
        DisableAfterMs | None,
        about(
            "paused by the server after so long of nothing but failures, 1s to a year; "
            "a resume or a PUT ends that"
        ),
    ] = None
    batch: Annotated[BatchingModel | None, about("several in one request")] = None


class KafkaSubscription(PushedSubscription, kw_only=True, tag="kafka"):
    """Each message is a record of a topic."""

    bootstrap: Bootstrap
    topic: Annotated[Topic, about("where records go")]
    key: Annotated[
        Annotated[str, matching(_RECORD_KEY, max_length=256)] | None,
        about(
            "the key of each record: {key} (the default), {subject} or {id} of its "
            "message, or this text"
        ),
    ] = None
    delivery: Annotated[
        Delivery | None,
        about(
            "at_least_once (the default), or exactly_once, which is a transaction for "
            "each batch: only into the brokers that a cluster has its own logs on"
        ),
    ] = None
    username: BrokerUser = None
    password: BrokerPassword = None
    mechanism: BrokerMechanism = None
    tls: BrokerTls = None


class RedisSubscription(PushedSubscription, kw_only=True, tag="redis"):
    """Each message is an entry of a stream."""

    url: Annotated[
        str,
        about(
            "redis://[user:password@]host[:port][/database], or rediss:// for TLS", max_length=2048
        ),
    ]
    stream: Annotated[str, about("the key of a stream", min_length=1, max_length=512)]
    max_length: Annotated[
        Annotated[int, Meta(ge=1, le=SIZE_MAX)] | None,
        about("about how many entries the stream keeps; all, if nothing is said"),
    ] = None


class NatsSubscription(PushedSubscription, kw_only=True, tag="nats"):
    """Each message goes to a subject of JetStream."""

    url: Annotated[str, about("nats://[user:password@]host[:port], or tls://", max_length=2048)]
    nats_subject: Annotated[
        Annotated[str, matching(_ROUTING, min_length=1, max_length=512)] | None,
        about(
            "where messages go; {subject} (the default), {key} and {id} in it are "
            "those of the message"
        ),
    ] = None


class AmqpSubscription(PushedSubscription, kw_only=True, tag="amqp"):
    """Each message goes to an exchange of RabbitMQ."""

    url: Annotated[
        str,
        about("amqp://[user:password@]host[:port][/virtual host], or amqps://", max_length=2048),
    ]
    exchange: Annotated[str, about("its name; empty: the default exchange", max_length=255)]
    routing_key: Annotated[
        Annotated[str, matching(_ROUTING, max_length=512)] | None,
        about("{subject} (the default), {key} and {id} in it are those of the message"),
    ] = None


SubscriptionRequest = (
    WebhookSubscription
    | PullSubscription
    | KafkaSubscription
    | RedisSubscription
    | NatsSubscription
    | AmqpSubscription
)
"""A subscription as a client writes it."""
KINDS: Final[dict[str, type[AnySubscription]]] = {
    str(kind.__struct_config__.tag): kind for kind in get_args(SubscriptionRequest)
}
"""The struct of each type."""
_OWNERS: Final[dict[str, dict[str, FieldInfo]]] = {}
"""By the name of a field the types that have it."""
for _type, _kind in KINDS.items():
    for _field in msgspec.structs.fields(_kind):
        _OWNERS.setdefault(_field.encode_name, {})[_type] = _field


def _flat(name: str, owners: dict[str, FieldInfo]) -> tuple[Any, ...]:
    """A field of the form that clients see, for `msgspec.defstruct`: null where it is of another
    type, and with the types in its description."""
    field = next(iter(owners.values()))
    if len(owners) == len(KINDS):
        return (name, field.type) if field.required else (name, field.type, None)
    types_of: dict[str, list[str]] = {}
    for kind, one in owners.items():
        types_of.setdefault(_description(one.type), []).append(kind)
    described = (
        f"{'not pull' if len(kinds) == len(KINDS) - 1 else ', '.join(kinds)}: {text}"
        for text, kinds in types_of.items()
    )
    optional = get_args(field.type)[0] if NoneType in alternatives(field.type) else field.type
    return name, Annotated[optional | None, about("; ".join(described))], None


def _description(kind: Any) -> str:
    """The description of a field of that type; empty: it has none."""
    for one in reversed(get_args(kind)):
        found = (one.description or "") if isinstance(one, Meta) else _description(one)
        if found:
            return found
    return ""


_form = [_flat(*one) for one in _OWNERS.items()]
_form.insert(1, ("type", SubscriptionType))  # behind the subject
SubscriptionModel: Final = msgspec.defstruct(
    "SubscriptionModel",
    _form,
    namespace={"__doc__": "Who gets the messages of a subject."},
    forbid_unknown_fields=True,
    kw_only=True,
)
"""The form that clients see instead of the union: the fields of all types."""


def read_subscription(data: bytes) -> SubscriptionRequest:
    """A subscription as JSON. Raises InputError, or InputErrors with everything that is wrong."""
    try:
        found: SubscriptionRequest = decoder_of(SubscriptionRequest)(data)
        return found
    except UNREADABLE as error:
        raws = raw_fields(data)
        kind = _type_of(raws)
        if kind is None:
            raise in_one(check_fields(raws, SubscriptionModel)[1]) from error
        own: dict[str, msgspec.Raw] = {}
        foreign: list[InputError] = []
        for name, raw in raws.items():
            if kind in _OWNERS.get(name, (kind,)):
                own[name] = raw
            elif bytes(raw) != b"null":
                foreign.append(InputError(f"a subscription of type {kind} has none", f"/{name}"))
        del own["type"]
        values, errors = check_fields(own, KINDS[kind])
        if errors or foreign:
            raise in_one(errors + foreign) from error
        form: Any = KINDS[kind]
        return cast(SubscriptionRequest, form(**values))


def _type_of(raws: dict[str, msgspec.Raw]) -> str | None:
    """The type that a request says; None: it says none that is known."""
    with suppress(KeyError, *UNREADABLE):
        kind = msgspec.json.decode(raws["type"], type=str)
        return kind if kind in KINDS else None
    return None


# ── answers ───────────────────────────────────────────────────────────────────────────────────────


class RetryViewModel(msgspec.Struct):
    """The times at which a failed delivery is tried again."""

    max_attempts: int
    backoff: list[str]


class RateViewModel(msgspec.Struct):
    """How many messages are sent."""

    per_second: float
    burst: int


class BatchingViewModel(msgspec.Struct):
    """Several messages in one request."""

    max: int
    linger: str


Retry = TypeVar("Retry")
Rate = TypeVar("Rate")
Batch = TypeVar("Batch")


class SubscriptionFields(
    msgspec.Struct, Generic[When, Retry, Rate, Batch], kw_only=True, frozen=True
):
    """A subscription as it is. Secrets are never shown, and *** stands for a password."""

    name: str
    subject: str
    type: str
    created_at: When
    paused: bool
    pause_reason: Annotated[
        Annotated[str, one_of("asked", "gone", "failures", "not_understood")] | None,
        about(
            "why it is paused: asked; gone: its receiver answered 410; failures: "
            "nothing else for as long as disable_after says; not_understood: see there"
        ),
    ] = None
    queued: Annotated[int, about("due, and waiting for the subscriber")]
    in_flight: int
    failing_since: Annotated[
        When | None,
        about("the first of nothing but failures, as far as this process has seen them"),
    ] = None
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
    headers: Annotated[dict[str, str] | None, about(f"names, each with {MASK}")] = None
    method: str | None = None
    disable_after: str | None = None
    timeout: str | None = None
    max_in_flight: int | None = None
    retry: Retry
    rate: Rate | None = None
    batch: Batch | None = None
    catch_up: str | dict[str, str]
    lease: str | None = None
    not_understood: Annotated[
        str | None,
        about(
            "why this server does not understand it (a field of a newer server, a "
            "value that is not known), so that it stands still; the other fields are what can be "
            "read of it"
        ),
    ] = None


class SubscriptionViewModel(
    SubscriptionFields[Time, RetryViewModel, RateViewModel, BatchingViewModel],
    kw_only=True,
    frozen=True,
):
    """A subscription as it is. Secrets are never shown, and *** stands for a password."""


class SubscriptionsModel(msgspec.Struct):
    """A page of subscriptions, or all of them, oldest first."""

    subscriptions: list[SubscriptionViewModel]
    cursor: Cursor = None


class RedriveModel(Strict):
    """Which dead letters to deliver again; none named: all."""

    ids: Annotated[list[str], Meta(max_length=10_000)] | None = None


class RedrivenModel(msgspec.Struct):
    """How many were scheduled again."""

    redriven: int


class DeadLetterFields(msgspec.Struct, Generic[When], frozen=True):
    """A message that no attempt delivered."""

    dead_letter: str
    id: str
    subject: str
    key: str | None
    reason: str
    attempts: int
    died_at: When
    headers: dict[str, str]


class DeadLetterDocument(DeadLetterFields[Time], frozen=True):
    """A message that no attempt delivered."""

    body: msgspec.Raw | UnsetType = UNSET
    body_base64: str | UnsetType = UNSET


class DeadLetterCountDocument(msgspec.Struct):
    """A subscription that has dead letters; `_to`: messages that said themselves where they go."""

    name: str
    count: Annotated[int, about("counted up to 1000 in each shard")]


class DeadLetterCountsDocument(msgspec.Struct):
    """A page of subscriptions that have dead letters, in the order of their names."""

    subscriptions: list[DeadLetterCountDocument]
    cursor: Cursor


class DeadLettersDocument(msgspec.Struct):
    """A page of dead letters."""

    dead_letters: list[DeadLetterDocument]
    cursor: str | None
