"""The shard to which a hot call belongs: a publish or a cancel of one message.

    body ──▶ subject and key ──▶ own? ──▶ decided together with others
                             ──▶ else ──▶ link ──▶ decided together with others there ──▶ answer

A call that cannot be read stays here, where it is refused. A server alone is the only shard of one:
`Hot` and `HotCancel` look at no call then. Cost: 1 µs for a call that stays, 5 µs and the turn of a
loop for one that goes. Threads: belongs to the event loop.
"""

from collections.abc import Callable
from typing import Protocol

import msgspec

from delayserver.errors import NotFoundError
from delayserver.records.sharding import shard_of, shard_of_id, shard_of_message
from delayserver.security.tokens import Caller
from delayserver.wire.reading import UNREADABLE

_PublishCallback = Callable[[bytes], None]


class Shards(Protocol):
    """All shards, as the hot path of one of them sees them (`delayserver.shards.link`)."""

    own: int
    """The number of the one that asks."""
    count: int

    def publish(
        self, shard: int, data: bytes, caller: Caller | None, told: _PublishCallback
    ) -> None:
        """Have another shard publish one message; `told` gets the answer, head and all."""

    def cancel(
        self,
        shard: int,
        subject: str | None,
        text: str,
        caller: Caller | None,
        told: _PublishCallback,
    ) -> None:
        """Have another shard cancel one message; likewise."""


class Named(msgspec.Struct):
    """The fields that say where a message belongs; the rest of it is not looked at."""

    subject: str
    key: str | None = None
    group: str | None = None

    def shard(self, count: int) -> int | None:
        """Where it belongs, of `count`; None: anywhere."""
        return shard_of_message(self.subject, self.key, self.group, count)


decode_named = msgspec.json.Decoder(Named).decode


def shard_of_publish(data: bytes, shards: Shards) -> int:
    """The shard of the message in a request; the own one where it cannot be read."""
    try:
        shard = decode_named(data).shard(shards.count)
    except UNREADABLE:
        return shards.own
    return shards.own if shard is None else shard


def shard_of_cancel(subject: str | None, text: str, shards: Shards) -> int:
    """The shard of a message by its key `text`, where there is a `subject`, or by its id; the own
    one if no shard has such an id."""
    try:
        shard = shard_of_id(text) if subject is None else shard_of(subject, text, shards.count)
    except NotFoundError:
        return shards.own
    return shard if shard < shards.count else shards.own
