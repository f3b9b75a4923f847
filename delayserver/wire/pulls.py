"""Requests of consumers and their answers. Cost: of a decoder of msgspec. Threads: values."""

from typing import Annotated, Generic

import msgspec
from msgspec import UNSET, Meta, UnsetType

from delayserver.wire.fields import (
    DURATION_HELP,
    LeaseMs,
    Ms,
    PullWaitMs,
    Strict,
    Time,
    When,
    about,
)

_Number = Annotated[int, Meta(ge=1, le=10_000)]
_Leases = Annotated[list[str], Meta(max_length=10_000)]


class PullBody(Strict):
    """The request of a consumer for messages."""

    max: _Number = 100
    wait: Annotated[PullWaitMs, about("how long to wait for `min_messages`; default: 0")] = (
        msgspec.field(default_factory=PullWaitMs)
    )
    min_messages: Annotated[_Number, about("answer when so many are there; at most `max`")] = 1
    lease: Annotated[LeaseMs | None, about("default: that of the subscription")] = None
    ack: Annotated[
        _Leases | None,
        about("these are done; recorded within `settle_sync_ms`, not before the answer"),
    ] = None


class LeasesBody(Strict):
    """Messages that were pulled."""

    leases: _Leases


class NackBody(LeasesBody):
    """Messages to be delivered again."""

    delay: Annotated[Ms, about(f"{DURATION_HELP}; default: 0")] = msgspec.field(default_factory=Ms)


class ExtendBody(LeasesBody, kw_only=True):
    """Messages that need more time."""

    lease: LeaseMs


# ── answers ───────────────────────────────────────────────────────────────────────────────────────


class PulledFields(msgspec.Struct, Generic[When], frozen=True):
    """A message that is leased to the consumer that pulled it."""

    id: str
    subject: str
    key: str | None
    headers: dict[str, str]
    deliver_at: When
    attempt: int
    lease: Annotated[str, about("to be named in ack, nack and extend")]


class PulledDocument(PulledFields[Time], frozen=True):
    """A message that is leased to the consumer that pulled it."""

    body: msgspec.Raw | UnsetType = UNSET
    body_base64: str | UnsetType = UNSET


class AckedDocument(msgspec.Struct):
    """Answer to ack."""

    acked: int
    expired: list[str]


class PulledListDocument(msgspec.Struct):
    """Due messages; empty when none fell due in time."""

    messages: list[PulledDocument]
    acked: Annotated[
        int | UnsetType, about("how many the pull has acknowledged; only if it had `ack`")
    ] = UNSET
    expired: Annotated[list[str] | UnsetType, about("leases in `ack` that were over before")] = (
        UNSET
    )


class NackedDocument(msgspec.Struct):
    """Answer to nack."""

    nacked: int
    expired: list[str]


class ExtendedDocument(msgspec.Struct):
    """Answer to extend."""

    extended: int
    expired: list[str]
