"""The server's reports on itself: health, counters, subjects, tokens, the messages due by time, and
the places of its shards. Cost: none. Threads: values.
"""

from typing import Annotated, Literal

import msgspec

from delayserver.wire.fields import Cursor, Time, about


class LatenessDocument(msgspec.Struct):
    """How late deliveries were, from due to sent, or handed to a consumer."""

    bounds_ms: Annotated[list[float], about("upper bounds")]
    counts: Annotated[
        list[int],
        about(
            "deliveries that were at most as late as each bound, and later than the "
            "one before it; and one more count of those that were later than all"
        ),
    ]


class FailingDocument(msgspec.Struct):
    """A subscription whose receiver is down, or refuses all it is sent."""

    subscription: str
    since: Annotated[Time, about("the first of nothing but failures")]


class StatsDocument(msgspec.Struct):
    """Counters since the start of this process, and the rows that wait now."""

    version: str
    started_at: Time
    accepted: int
    cancelled: int
    delivered: int
    retried: int
    dead: int
    dead_letters: Annotated[int, about("that wait now, as of the last checkpoint")]
    lateness: LatenessDocument
    last_seq: int
    checkpoint_seq: int
    pending_loaded: Annotated[int, about("that are due soon")]
    pending_later: Annotated[int, about("as of the last checkpoint")]
    queued: Annotated[int, about("due, and waiting for a subscriber")]
    in_flight: int
    oldest_due_at: Annotated[Time | None, about("of what is queued")]
    unmatched: Annotated[int, about("due, and no subscription matches")]
    subjects: int
    subscriptions: int
    paused: Annotated[int, about("subscriptions that are")]
    failing: Annotated[
        list[FailingDocument],
        about("up to 20 subscriptions, those first that have failed for longest"),
    ]
    unfiled_bytes: int
    replay_lag_ms: Annotated[int, about("how long the oldest waits that is accepted and not filed")]
    archive_waiting_hours: int
    archive_waiting_bytes: int
    disk_free_bytes: int


class SubjectDocument(msgspec.Struct):
    """A subject, and its counts since the start of this process."""

    name: str
    accepted: int
    cancelled: Annotated[
        int, about("of a cancel by id the subject is not always known: not counted here")
    ]
    delivered: int
    retried: int
    dead: int


class SubjectListDocument(msgspec.Struct):
    """A page of subjects, in the order of their names."""

    subjects: list[SubjectDocument]
    cursor: Cursor


class OwnTokenDocument(msgspec.Struct):
    """The rights of the caller."""

    name: Annotated[str | None, about("null: nobody is asked for a token")]
    scopes: list[str]
    expires_at: Time | None
    rate: Annotated[float | None, about("requests and messages per second")]


class TokenDocument(OwnTokenDocument):
    """A token that is valid now; its text is stored nowhere."""

    created_at: Time


class TokenListDocument(msgspec.Struct):
    """A page of tokens, in the order of their names."""

    tokens: list[TokenDocument]
    cursor: Cursor


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
    lag_records: Annotated[int, about("how far it is behind the owner")]


class ShardDocument(msgspec.Struct):
    """A shard, and who has it."""

    shard: int
    owner: Annotated[str | None, about("the name of a node; null: nobody has it just now")]
    epoch: Annotated[int, about("counts its owners; 0 where it has the same for ever")]
    url: Annotated[
        str | None,
        about(
            "where the owner itself is asked; of shards of one machine on the host "
            "that the request named"
        ),
    ]
    replicas: list[ReplicaDocument]
    state: Annotated[Literal["serving", "away"], about("away: it starts, or has just ended")]


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
        about(
            "stands for shards, owners, states and addresses: as long as it is the "
            "same, so are they; two versions are not in an order"
        ),
    ]
    shards: list[ShardDocument]
    nodes: list[NodeDocument]


class HealthDocument(msgspec.Struct):
    """The answer to /healthz and /readyz."""

    status: str


class ShardPageDocument(msgspec.Struct):
    """A page of any list of one shard, as it is given to a shard that puts such pages together."""

    items: list[msgspec.Raw]
    """The rows that the page would hold."""
    places: list[tuple[int, ...]]
    """The place of each of them, in the order of the list."""
    following: tuple[int, ...] | None
    """Where the next page begins; None: there is nothing more."""
    limit: int
    """How many were asked for."""
