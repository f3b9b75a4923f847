"""What goes in and out of the calls that FastAPI decodes and writes, as pydantic models.

All others have structs (`openapi`), but what the intake decodes is described here too.

Unknown fields are errors. Durations: integer milliseconds, or text such as `30s`; times: RFC 3339,
or integer milliseconds since the epoch. Threads: values.
"""

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    StringConstraints,
    WithJsonSchema,
)

from delayserver.api.fields import DURATION_HELP, DURATION_PATTERN
from delayserver.backup.shelf import NAME_PATTERN as BACKUP_NAME_PATTERN
from delayserver.errors import InputError
from delayserver.records.subjects import ANY_PATTERN, SUBJECT_PATTERN
from delayserver.records.subscriptions import HEADERS_MAX, MASK
from delayserver.times import parse_duration_ms
from storage.rows import HOUR_MS


def _duration(value: Any) -> int:
    try:
        return parse_duration_ms(value)
    except InputError as error:
        raise ValueError(error.detail) from error


def _when(value: Any) -> Any:
    """Read later, by the same code as on the hot path."""
    if isinstance(value, bool) or not isinstance(value, int | str | None):
        raise ValueError("a whole number or text")
    return value


_DURATION: dict[str, Any] = {
    "anyOf": [
        {"type": "integer", "minimum": 0},
        {
            "type": "string",
            "pattern": DURATION_PATTERN,
        },
    ],
    "description": DURATION_HELP,
}
_TIME: dict[str, Any] = {
    "anyOf": [{"type": "integer"}, {"type": "string", "format": "date-time"}],
    "description": "RFC 3339 with an offset, or milliseconds since the epoch; a number from 10^8 "
    "to 10^11 is refused, because it is seconds",
}
_NULL = {"type": "null"}
Time = Annotated[str, Field(json_schema_extra={"format": "date-time"})]
WEEK_MS = 7 * 24 * HOUR_MS
SIZE_MAX = 2**63 - 1
YEAR_MS = 365 * 24 * HOUR_MS

DurationMs = Annotated[
    int, BeforeValidator(_duration), WithJsonSchema({**_DURATION, "examples": ["30s"]})
]
LeaseMs = Annotated[DurationMs, Field(ge=1, le=WEEK_MS)]
Delay = Annotated[
    int | str | None,
    PlainValidator(_when),
    WithJsonSchema({**_DURATION, "anyOf": [*_DURATION["anyOf"], _NULL]}),
]
DeliverAt = Annotated[
    int | str | None,
    PlainValidator(_when),
    WithJsonSchema({**_TIME, "anyOf": [*_TIME["anyOf"], _NULL]}),
]
Key = Annotated[str, StringConstraints(min_length=1, max_length=256)]
WatchKeys = Annotated[list[Key], Field(max_length=8)]
Name = Annotated[str, Field(pattern=f"^{SUBJECT_PATTERN}$")]
Pattern = Annotated[
    str,
    Field(pattern=f"^({ANY_PATTERN})$"),
]


class Strict(BaseModel):
    """Refuses fields that it does not know, and text that is not Unicode (half a surrogate pair),
    which pydantic looks at only where text has a length to check."""

    model_config = ConfigDict(extra="forbid", str_min_length=0)


class RetryModel(Strict):
    """When what failed is tried again."""

    max_attempts: int = Field(10, strict=True, ge=1, le=100)
    backoff: list[DurationMs] = Field(
        default=[], max_length=100, description="waits before the attempts after the first"
    )


class ToModel(Strict):
    """Where one message goes, instead of to subscriptions."""

    url: str = Field(description="an http or https URL on the allow list", max_length=2048)
    secret: str | None = Field(None, description="`whsec_…`, what the request is signed with")
    retry: RetryModel | None = None
    timeout: DurationMs | None = Field(None, ge=1, le=HOUR_MS, description="15s by default")


class OutcomeMessageModel(Strict):
    """A message that is published with the outcome of another, for each of its subscriptions."""

    subject: Name


class PublishUnderKeyModel(Strict):
    """A message whose subject and key stand in the path."""

    body: Any = None
    body_base64: str | None = None
    delay: Delay = None
    deliver_at: DeliverAt = None
    headers: dict[str, str] | None = Field(None, description="sent along with a webhook")
    watch: WatchKeys | None = Field(None, description="an event for one of them completes it")
    on_event: Literal["cancel", "fire"] | None = Field(
        None, description="what such an event does: cancel (the default), or deliver it now"
    )
    ttl: Delay = Field(
        None, description="a dead letter (`expired`) if no delivery begins so soon after it was due"
    )
    jitter: Delay = Field(
        None, description="it is due up to so much later; drawn once, and answered as `deliver_at`"
    )
    priority: int | None = Field(
        None, ge=0, le=9, description="of what is due, higher ones are delivered first; default 0"
    )
    to: ToModel | None = Field(
        None, description="where it goes, by webhook; no subscription gets it then"
    )
    on_delivered: OutcomeMessageModel | None = Field(
        None, description="publish a message under this subject when it was delivered"
    )
    on_dead: OutcomeMessageModel | None = Field(
        None, description="publish a message under this subject when it is a dead letter"
    )
    group: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="of the messages of a group, each subscription has one under way at a time, in "
        "due order",
    )


class PublishModel(PublishUnderKeyModel):
    """A message to publish. Give `body` or `body_base64`, and `delay` or `deliver_at`."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"subject": "order.unpaid", "body": {"order": 1001}, "delay": "30m", "key": "1001"}
            ]
        },
    )

    subject: Name
    key: Key | None = Field(None, description="1 to 256 bytes; the same key: the same message")


class EventModel(BaseModel):
    """What an event completed."""

    cancelled: int
    fired: int = Field(description="delivered now instead of at their time")


class HeartbeatModel(Strict):
    """A message that is published unless the heartbeat is renewed in time."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"timeout": "10s", "subject": "worker.lost", "body": {"worker": 7}}]
        },
    )

    timeout: DurationMs = Field(ge=1, description="each renewal starts it anew")
    subject: Name
    body: Any = None
    body_base64: str | None = None
    headers: dict[str, str] | None = None


class ScheduleModel(Strict):
    """A message that is published again and again. Give `cron` or `every`, and `body` or
    `body_base64`."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "subject": "report.daily",
                    "body": {"shop": 7},
                    "cron": "0 9 * * MON-FRI",
                    "timezone": "Europe/Berlin",
                }
            ]
        },
    )

    subject: Name
    body: Any = None
    body_base64: str | None = None
    headers: dict[str, str] | None = None
    cron: str | None = Field(
        None,
        max_length=256,
        description="minute, hour, day of month, month, day of week, with names; six fields: with "
        "seconds in front; or @hourly, @daily, @weekly, @monthly, @yearly",
    )
    every: Delay = None
    timezone: str | None = Field(None, description="of `cron`: an IANA name; default: UTC")
    jitter: Delay = None
    catch_up: Literal["none", "last", "all"] | None = Field(
        None,
        description="what becomes of runs that were missed, while the server was down or the "
        "schedule paused: the last one is made now (the default), none, or all",
    )
    overlap: Literal["skip", "allow"] | None = Field(
        None,
        description="skip: a run is left out while the message of the one before is not settled",
    )
    start_at: DeliverAt = None
    end_at: DeliverAt = None
    max_runs: int | None = Field(None, ge=1, description="the schedule ends with this run")


BOOTSTRAP_PATTERN = r"^[^\s,]+:[0-9]{1,5}(,[^\s,]+:[0-9]{1,5})*$"
TOPIC_PATTERN = r"^[A-Za-z0-9._-]{1,249}$"

BrokerUser = Annotated[
    str | None,
    Field(min_length=1, max_length=256, description="kafka: whom the brokers let in (SASL)"),
]
BrokerPassword = Annotated[str | None, Field(max_length=1024, description="kafka: of that user")]
BrokerMechanism = Annotated[
    Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] | None,
    Field(description="kafka: how the user logs in; PLAIN, if nothing is said"),
]
BrokerTls = Annotated[
    bool | None,
    Field(strict=True, description="kafka: encrypted, to brokers whose certificate is trusted"),
]


class SourceModel(Strict):
    """A topic whose records are published, each once."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "type": "kafka",
                    "bootstrap": "127.0.0.1:9092",
                    "topic": "orders",
                    "subject": "order.unpaid",
                    "due_header": "delay-until",
                }
            ]
        },
    )

    type: Literal["kafka"]
    bootstrap: str = Field(
        max_length=2048,
        pattern=BOOTSTRAP_PATTERN,
        description="brokers to begin with, host:port with commas between them",
    )
    topic: str = Field(pattern=TOPIC_PATTERN, description="what is read")
    subject: Name = Field(description="what its records are published to")
    due_header: str = Field(
        "delay-until",
        min_length=1,
        max_length=256,
        description="the header of a record that says when its message is due: a time, "
        "milliseconds since 1970, or a duration; now, if a record has none",
    )
    group: str | None = Field(
        None,
        min_length=1,
        max_length=249,
        description="the consumer group whose offsets show how far it is; delayserver.NAME, if "
        "nothing is said",
    )
    on_error: Literal["skip", "stop"] = Field(
        "skip",
        description="with a record that cannot be published: it is left out, or the source is "
        "paused there",
    )
    username: BrokerUser = None
    password: BrokerPassword = None
    mechanism: BrokerMechanism = None
    tls: BrokerTls = None


class MoveModel(Strict):
    """A new due time: give one of the two."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"delay": "10m"}]})

    delay: Delay = None
    deliver_at: DeliverAt = None


class MovedModel(BaseModel):
    """The answer to a move."""

    id: str
    deliver_at: Time
    state: str


class RateModel(Strict):
    """How many messages are sent."""

    per_second: float = Field(ge=0.001, le=1_000_000, allow_inf_nan=False)
    burst: int | None = Field(
        None, strict=True, ge=1, le=1_000_000, description="at once; default: those of a second"
    )


class BatchingModel(Strict):
    """Several messages in one request, as a JSON array."""

    max: int = Field(strict=True, ge=1, le=500, description="messages in one request")
    linger: DurationMs = Field(
        0, le=60_000, description="how long after it fell due one waits for others"
    )


class SpreadModel(Strict):
    """Hand out what fell due meanwhile evenly over this time; new messages on time beside it."""

    spread: DurationMs = Field(ge=1, le=WEEK_MS)


class DropModel(Strict):
    """What could not be handed out within this time becomes a dead letter."""

    drop_older_than: DurationMs = Field(ge=1, le=YEAR_MS)


RECORD_KEY_PATTERN = r"^(\{key\}|\{subject\}|\{id\}|[^{}]*)$"
ROUTING_PATTERN = r"^([^{}]|\{key\}|\{subject\}|\{id\})*$"


class SubscriptionModel(Strict):
    """Who gets the messages of a subject."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "subject": "order.unpaid",
                    "type": "webhook",
                    "url": "http://127.0.0.1:9000/unpaid",
                },
                {"subject": "order.*", "type": "pull", "lease": "30s"},
                {
                    "subject": "sms",
                    "type": "webhook",
                    "url": "http://127.0.0.1:9000/sms",
                    "rate": {"per_second": 100, "burst": 200},
                    "batch": {"max": 100, "linger": "20ms"},
                    "catch_up": {"spread": "10m"},
                },
                {
                    "subject": "order.*",
                    "type": "kafka",
                    "bootstrap": "127.0.0.1:9092",
                    "topic": "orders.due",
                },
                {
                    "subject": "order.*",
                    "type": "redis",
                    "url": "redis://127.0.0.1:6379",
                    "stream": "orders.due",
                    "max_length": 100_000,
                },
                {
                    "subject": "order.*",
                    "type": "nats",
                    "url": "nats://127.0.0.1:4222",
                    "nats_subject": "due.{subject}",
                },
                {
                    "subject": "order.*",
                    "type": "amqp",
                    "url": "amqp://127.0.0.1:5672",
                    "exchange": "due",
                },
            ]
        },
    )

    subject: Pattern = Field(description="exact, or a prefix that ends in .*, or *")
    type: Literal["webhook", "pull", "kafka", "redis", "nats", "amqp"]
    url: str | None = Field(
        None,
        max_length=2048,
        description="webhook: where to POST; redis: redis://[user:password@]host[:port][/database]"
        ", or rediss:// for TLS; nats: nats://[user:password@]host[:port], or tls://; "
        "amqp: amqp://[user:password@]host[:port][/virtual host], or amqps://",
    )
    bootstrap: str | None = Field(
        None,
        max_length=2048,
        pattern=BOOTSTRAP_PATTERN,
        description="kafka: brokers to begin with, host:port with commas between them",
    )
    topic: str | None = Field(None, pattern=TOPIC_PATTERN, description="kafka: where records go")
    key: str | None = Field(
        None,
        max_length=256,
        pattern=RECORD_KEY_PATTERN,
        description="kafka: the key of each record: {key} (the default), {subject} or {id} of its "
        "message, or this text",
    )
    delivery: Literal["at_least_once", "exactly_once"] | None = Field(
        None,
        description="kafka: at_least_once (the default), or exactly_once, which is a transaction "
        "for each batch: only into the brokers that a cluster has its own logs on",
    )
    username: BrokerUser = None
    password: BrokerPassword = None
    mechanism: BrokerMechanism = None
    tls: BrokerTls = None
    stream: str | None = Field(
        None, min_length=1, max_length=512, description="redis: the key of a stream"
    )
    max_length: int | None = Field(
        None,
        strict=True,
        ge=1,
        le=SIZE_MAX,
        description="redis: about how many entries the stream keeps; all, if nothing is said",
    )
    nats_subject: str | None = Field(
        None,
        min_length=1,
        max_length=512,
        pattern=ROUTING_PATTERN,
        description="nats: where messages go; {subject} (the default), {key} and {id} in it are "
        "those of the message",
    )
    exchange: str | None = Field(
        None, max_length=255, description="amqp: its name; empty: the default exchange"
    )
    routing_key: str | None = Field(
        None,
        max_length=512,
        pattern=ROUTING_PATTERN,
        description="amqp: {subject} (the default), {key} and {id} in it are those of the message",
    )
    secret: str | None = Field(None, description="webhook: whsec_…, signs every request")
    secrets: list[str] | None = Field(
        None,
        min_length=1,
        max_length=4,
        description="webhook: instead of secret, newest first; each signs, to change them over",
    )
    headers: dict[str, str] | None = Field(
        None,
        max_length=HEADERS_MAX,
        description="webhook: sent along with each request, instead of a message's own of the same "
        f"name; answers show {MASK} for each value",
    )
    method: Literal["POST", "PUT"] | None = Field(
        None, description="webhook: how requests are made; POST if nothing is said"
    )
    disable_after: DurationMs | None = Field(
        None,
        ge=1000,
        le=YEAR_MS,
        description="webhook: paused by the server after so long of nothing but failures, 1s to a "
        "year; a resume or a PUT ends that",
    )
    timeout: DurationMs = Field(
        15_000, ge=1, le=HOUR_MS, description="not pull: time for an answer"
    )
    max_in_flight: int | None = Field(
        None,
        strict=True,
        ge=1,
        le=10_000,
        description="webhook: requests at once; brokers: messages (1,000)",
    )
    retry: RetryModel = RetryModel()
    rate: RateModel | None = Field(None, description="not pull: at most so many messages")
    batch: BatchingModel | None = Field(None, description="webhook: several in one request")
    catch_up: Literal["all"] | SpreadModel | DropModel = Field(
        "all", description="what happens to messages that fell due during downtime or a pause"
    )
    lease: LeaseMs = Field(30_000, description="pull: time to acknowledge")


class RetryViewModel(BaseModel):
    """When what failed is tried again."""

    max_attempts: int
    backoff: list[str]


class RateViewModel(BaseModel):
    """How many messages are sent."""

    per_second: float
    burst: int


class BatchingViewModel(BaseModel):
    """Several messages in one request."""

    max: int
    linger: str


class SubscriptionViewModel(BaseModel):
    """A subscription as it is. Secrets are never shown, and *** stands for a password."""

    name: str
    subject: str
    type: str
    created_at: Time
    paused: bool
    pause_reason: Literal["asked", "gone", "failures", "not_understood"] | None = Field(
        None,
        description="why it is paused: asked; gone: its receiver answered 410; failures: nothing "
        "else for as long as disable_after says; not_understood: see there",
    )
    queued: int = Field(description="due, and waiting for the subscriber")
    in_flight: int
    failing_since: Time | None = Field(
        None, description="the first of nothing but failures, as far as this process has seen them"
    )
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
    headers: dict[str, str] | None = Field(None, description=f"names, each with {MASK}")
    method: str | None = None
    disable_after: str | None = None
    timeout: str | None = None
    max_in_flight: int | None = None
    retry: RetryViewModel
    rate: RateViewModel | None = None
    batch: BatchingViewModel | None = None
    catch_up: str | dict[str, str]
    lease: str | None = None
    not_understood: str | None = Field(
        None,
        description="why this server does not understand it (a field of a newer server, a value "
        "that is not known), so that it stands still; the other fields are what can be read of it",
    )


class SubscriptionsModel(BaseModel):
    """A page of subscriptions, or all of them, oldest first."""

    subscriptions: list[SubscriptionViewModel]
    cursor: str | None = Field(None, description="for the next page; null: there is nothing more")


class RedriveModel(Strict):
    """Which dead letters to deliver again; none named: all."""

    ids: list[str] | None = Field(None, max_length=10_000)


class RedrivenModel(BaseModel):
    """How many were scheduled again."""

    redriven: int


class ImportSubjectsModel(Strict):
    """The subjects of an import that is about to be staged; none: only to ask."""

    subjects: list[Name] = Field(max_length=10_000)


class ImportBegunModel(BaseModel):
    """What a bulk load needs to know."""

    id: str
    state: Literal["staging", "waiting", "verifying", "committing", "filing", "adopted"]
    subjects: dict[str, int] = Field(description="the numbers that stand in the staged rows")
    now: Time = Field(description="the server's clock: what is due before it is due now")
    delay_max_ms: int
    body_max_bytes: int
    directory: str = Field(
        description="which data directory the server has; who can read that directory can tell"
    )


class BackupModel(Strict):
    """A backup to be made."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"name": "before-the-upgrade"}]})

    name: str | None = Field(
        None, pattern=f"^{BACKUP_NAME_PATTERN}$", description="default: the time"
    )
    verify: bool = Field(True, description="read every byte again, and compare it with all others")


class ImportModel(Strict):
    """A staged import to be adopted."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"manifest": "imports/coupons-1.manifest"}]}
    )

    manifest: str = Field(
        max_length=4096,
        description="its path, below the data directory; where there are shards, it says which",
    )


class ImportViewModel(BaseModel):
    """An import."""

    id: str
    state: Literal["waiting", "verifying", "committing", "filing", "adopted"]
    count: int = Field(description="rows that were staged")
    done: int = Field(description="of these, how many are verified (then: filed)")
    accepted: int = Field(description="messages that it made")
    duplicates: int = Field(description="rows left out, since their key is taken")
    conflicts: int = Field(description="of the duplicates, those with other content")
    first_seq: int = Field(description="the seq in the id of the first row; 0: not decided")


class DuplicateModel(BaseModel):
    """A row that was left out."""

    row: int = Field(description="counted from 0, in the order of the manifest")
    id: str = Field(description="the message that holds its key")


class DuplicatesModel(BaseModel):
    """A page of duplicates, in row order."""

    duplicates: list[DuplicateModel]
    cursor: str | None


class ArchiveModel(Strict):
    """What an archive of an hour covers; the first four as the list of archives has them."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "schedule_bytes": 48128,
                    "dispatch_bytes": 4160,
                    "last_seq": 1100,
                    "count": 100,
                    "checksum": "5a0c7e9fd1c2b3a4",
                    "location": "s3a://archive/delays",
                }
            ]
        }
    )

    schedule_bytes: int = Field(ge=0, le=SIZE_MAX)
    dispatch_bytes: int = Field(ge=0, le=SIZE_MAX)
    last_seq: int = Field(ge=0, le=SIZE_MAX, description="of the last entry")
    count: int = Field(ge=0, le=SIZE_MAX, description="entries that were archived")
    checksum: str = Field("", max_length=256, description="kept as it is, for people who compare")
    location: str = Field("", max_length=4096, description="where the archive is, likewise")


class ArchiveViewModel(BaseModel):
    """A settled hour; where there are shards, of one of them."""

    hour: str = Field(
        description="in UTC, as in the names of its files", examples=["2026-11-20T15"]
    )
    state: Literal["waiting", "archived"]
    retired_at: Time = Field(description="when everything was settled")
    count: int = Field(
        description="entries: messages, and once more for each time one was moved or tried again"
    )
    last_seq: int
    schedule_bytes: int
    dispatch_bytes: int
    archived_at: Time | None = None
    checksum: str | None = None
    location: str | None = None
    shard: int = Field(0, description="whose hour it is, in a list of all shards; else missing")


class ArchiveConfirmedModel(BaseModel):
    """Answer to a confirmation."""

    hour: str
    state: Literal["archived"]
    archived_at: Time


class ArchivesModel(BaseModel):
    """A page of settled hours, the oldest first."""

    archive: bool = Field(description="the setting: whether an hour is kept until it was archived")
    hours: list[ArchiveViewModel]
    cursor: str | None
