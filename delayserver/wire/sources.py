"""Sources as clients write them. Cost: of a decoder of msgspec. Threads: values."""

from typing import Annotated, Generic, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta

from delayserver.wire.fields import (
    Bootstrap,
    BrokerMechanism,
    BrokerPassword,
    BrokerTls,
    BrokerUser,
    Cursor,
    Name,
    NotUnderstood,
    OnErrorName,
    Strict,
    Time,
    Topic,
    When,
    about,
)


class SourceModel(Strict):
    """A topic whose records are published, each once."""

    type: Literal["kafka"]
    bootstrap: Bootstrap
    topic: Annotated[Topic, about("what is read")]
    subject: Annotated[Name, about("what its records are published to")]
    due_header: Annotated[
        str,
        about(
            "the header of a record that says when its message is due: a time, "
            "milliseconds since 1970, or a duration; now, if a record has none",
            min_length=1,
            max_length=256,
        ),
    ] = "delay-until"
    group: Annotated[
        Annotated[str, Meta(min_length=1, max_length=249)] | None,
        about(
            "the consumer group whose offsets show how far it is; delayserver.NAME, if "
            "nothing is said"
        ),
    ] = None
    on_error: Annotated[
        OnErrorName,
        about(
            "with a record that cannot be published: it is left out, or the source is paused there"
        ),
    ] = "skip"
    username: BrokerUser = None
    password: BrokerPassword = None
    mechanism: BrokerMechanism = None
    tls: BrokerTls = None


# ── answers ───────────────────────────────────────────────────────────────────────────────────────


Record = TypeVar("Record")


class SkippedRecordFields(msgspec.Struct, Generic[When], frozen=True):
    """A record of a topic that could not be published."""

    partition: int
    offset: int
    reason: str
    at: When


class SkippedRecordDocument(SkippedRecordFields[Time], frozen=True):
    """A record of a topic that could not be published."""


class SourceFields(msgspec.Struct, Generic[When, Record], frozen=True):
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
        about("error: it came upon a record that cannot be published (on_error: stop)"),
    ]
    error: Annotated[str | None, about("why nothing can be read now")]
    positions: Annotated[dict[str, int], about("by partition the offset that is taken next")]
    published: Annotated[int, about("records that became messages")]
    skipped: Annotated[int, about("records that were left out")]
    last_skipped: Annotated[Record | None, about("the last that could not be published")]
    changed_at: When
    tls: bool | None = None
    username: str | None = None
    password: Annotated[str | None, about("masked")] = None
    mechanism: str | None = None


class SourceDocument(SourceFields[Time, SkippedRecordDocument], frozen=True):
    """A source as it is."""

    not_understood: NotUnderstood = UNSET


class SourceListDocument(msgspec.Struct):
    """A page of sources, in the order of their names."""

    sources: list[SourceDocument]
    cursor: Cursor
