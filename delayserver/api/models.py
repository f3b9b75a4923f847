"""What goes in and out of the calls on FastAPI, as pydantic models; OpenAPI is made from them.

Unknown fields are errors. Durations: integer milliseconds, or text such as `30s`; times: RFC 3339,
or integer milliseconds since the epoch. Threads: values.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from delayserver.errors import InputError
from delayserver.times import parse_duration_ms


def _duration(value: Any) -> int:
    try:
        return parse_duration_ms(value)
    except InputError as error:
        raise ValueError(error.detail) from error


DurationMs = Annotated[
    int,
    BeforeValidator(_duration),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 0, "maximum": 10**12},
                {"type": "string", "pattern": r"^[0-9]{1,6}(ms|s|m|h|d)$"},
            ],
            "description": "milliseconds, or text such as 500ms, 30s, 1h30m, 2d",
            "examples": ["30s"],
        }
    ),
]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
Pattern = Annotated[
    str,
    Field(pattern=r"^(\*|[A-Za-z0-9][A-Za-z0-9._-]{0,127}|[A-Za-z0-9][A-Za-z0-9._-]{0,125}\.\*)$"),
]


class Strict(BaseModel):
    """Refuses fields that it does not know."""

    model_config = ConfigDict(extra="forbid")


class PublishModel(Strict):
    """A message to publish. Give `body` or `body_base64`, and `delay` or `deliver_at`."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {"subject": "order.unpaid", "body": {"order": 1001}, "delay": "30m", "key": "1001"}
            ]
        },
    )

    subject: Name
    body: Any = None
    body_base64: str | None = None
    delay: int | str | None = Field(None, description="from now, such as 30m")
    deliver_at: int | str | None = Field(None, description="RFC 3339 with an offset")
    key: str | None = Field(None, min_length=1, max_length=256)
    headers: dict[str, str] | None = None


class PublishUnderKeyModel(Strict):
    """A message whose subject and key stand in the path."""

    body: Any = None
    body_base64: str | None = None
    delay: int | str | None = None
    deliver_at: int | str | None = None
    headers: dict[str, str] | None = None


class PublishedModel(BaseModel):
    """A message that is stored durably."""

    id: str
    subject: str
    key: str | None
    deliver_at: str
    state: str
    duplicate: bool = Field(description="the key stood for the same message already")


class BatchModel(BaseModel):
    """A batch that is stored durably, whole."""

    count: int
    duplicates: int
    ids: list[str] = Field(description="in the order of the batch")


class DeliveryModel(BaseModel):
    """What became of a message at one subscription."""

    subscription: str
    state: str
    attempt: int
    at: str


class MessageModel(BaseModel):
    """A message and its state."""

    id: str
    subject: str
    key: str | None
    deliver_at: str
    state: Literal["scheduled", "delivering", "delivered", "cancelled", "dead"]
    attempts: int
    headers: dict[str, str]
    body: Any = None
    body_base64: str | None = None
    deliveries: list[DeliveryModel]


class StateModel(BaseModel):
    """The answer to a cancel."""

    id: str
    state: str


class MoveModel(Strict):
    """A new due time: give one of the two."""

    delay: int | str | None = Field(None, examples=["10m"])
    deliver_at: int | str | None = None


class MovedModel(BaseModel):
    """The answer to a move."""

    id: str
    deliver_at: str
    state: str


class KeyModel(Strict):
    """A message by its key."""

    subject: str
    key: str


class CancelModel(Strict):
    """What to cancel."""

    ids: list[str] = Field(default=[], max_length=10_000)
    keys: list[KeyModel] = Field(default=[], max_length=10_000)


class CancelResultModel(BaseModel):
    """What became of one of them; `state` is missing where there is no such message."""

    id: str | None = None
    subject: str | None = None
    key: str | None = None
    state: str | None = None
    error: str | None = None


class CancelledModel(BaseModel):
    """One result for each, ids first."""

    results: list[CancelResultModel]


class RetryModel(Strict):
    """When a failed webhook is tried again."""

    max_attempts: int = Field(10, ge=1, le=100)
    backoff: list[DurationMs] = Field(
        default=[], max_length=100, description="waits before the attempts after the first"
    )


class SubscriptionModel(Strict):
    """Who gets the messages of a subject."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "subject": "order.unpaid",
                    "type": "webhook",
                    "url": "http://127.0.0.1:9000/unpaid",
                },
                {"subject": "order.*", "type": "pull", "lease": "30s"},
            ]
        },
    )

    subject: Pattern = Field(description="exact, or a prefix that ends in .*, or *")
    type: Literal["webhook", "pull"]
    url: str | None = Field(None, max_length=2048, description="webhook: where to POST")
    secret: str | None = Field(None, description="webhook: whsec_…, signs every request")
    timeout: DurationMs = Field(15_000, description="webhook: time for an answer")
    max_in_flight: int | None = Field(None, ge=1, le=10_000)
    retry: RetryModel = RetryModel()
    lease: DurationMs = Field(30_000, description="pull: time to acknowledge")


class SubscriptionViewModel(BaseModel):
    """A subscription as it is. The secret is never shown."""

    name: str
    subject: str
    type: str
    created_at: str
    paused: bool
    queued: int = Field(description="due, and waiting for the subscriber")
    in_flight: int
    url: str | None = None
    signed: bool | None = None
    timeout: str | None = None
    max_in_flight: int | None = None
    retry: dict[str, Any]
    lease: str | None = None


class SubscriptionsModel(BaseModel):
    """All subscriptions, oldest first."""

    subscriptions: list[SubscriptionViewModel]


class PullModel(Strict):
    """What a consumer wants."""

    max: int = Field(100, ge=1, le=10_000)
    wait: DurationMs = Field(0, le=60_000, description="how long to wait for the first message")
    lease: DurationMs | None = Field(None, description="default: that of the subscription")


class LeasesModel(Strict):
    """Messages that were pulled."""

    leases: list[str] = Field(max_length=10_000)


class NackModel(LeasesModel):
    """Messages to be delivered again."""

    delay: DurationMs = Field(0)


class ExtendModel(LeasesModel):
    """Messages that need more time."""

    lease: DurationMs


class AckedModel(BaseModel):
    """Answer to ack."""

    acked: int
    expired: list[str]


class NackedModel(BaseModel):
    """Answer to nack."""

    nacked: int
    expired: list[str]


class ExtendedModel(BaseModel):
    """Answer to extend."""

    extended: int
    expired: list[str]


class DeadLetterModel(BaseModel):
    """A message that no attempt delivered."""

    dead_letter: str
    id: str
    subject: str
    key: str | None
    reason: str
    attempts: int
    died_at: str
    headers: dict[str, str]
    body: Any = None
    body_base64: str | None = None


class DeadLettersModel(BaseModel):
    """A page of dead letters."""

    dead_letters: list[DeadLetterModel]
    cursor: str | None


class RedriveModel(Strict):
    """Which dead letters to deliver again; none named: all."""

    ids: list[str] | None = Field(None, max_length=10_000)


class RedrivenModel(BaseModel):
    """How many were scheduled again."""

    redriven: int


class ProblemModel(BaseModel):
    """RFC 9457."""

    type: str
    title: str
    status: int
    detail: str
    errors: list[dict[str, str]] | None = None
    state: str | None = None
