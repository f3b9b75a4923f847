"""The client library: publish messages, handle them when they are due, verify webhooks.

    from delayserver.client import AsyncClient     every call, with asyncio
    from delayserver.client import Client          every call, without
    from delayserver.client import verify_webhook  in a receiver of webhooks

In reading order:

    values      messages and definitions as the server tells of them
    errors      everything that can go wrong, in one tree
    transport   one request, one answer
    retries     when to ask again
    batching    items that gather while a request is under way go out with the next one
    batches     publishes and cancels that go out together, and each item's part of the answer
    writing     messages and options in JSON, and values that JSON would change
    replacing   a message takes the place of another, also when answers are lost
    cluster_map the map of a cluster as clients read it
    nodes       any node of a cluster is asked
    following   a transport to whichever node can be reached
    owners      which shard is asked at which address
    options     how a server is reached, and the limits of a client
    calling     calls of any client: loops, forks, retries
    producer    publish
    messages    cancel, move, replace, look up
    definitions calls that subscriptions, schedules, sources and backups share
    subscriptions   webhooks, pulls and brokers
    schedules   messages that are published again and again
    sources     topics whose records are published
    backups     copies of a server's data
    groups      dead letters, events, heartbeats, imports, tokens, cluster
    cutting     answers in which a bad message costs only itself
    consumer    pull, handle, acknowledge
    loop_thread the event loop of callers that have none
    blocking    all calls and the consumer without asyncio
    client      one client for each mode, with every call
    aliases     old names, until 0.3
    webhooks    is this webhook from our server?

It needs nothing of the server but a few modules without state (times, ids, shards, signing) and the
HTTP connection that webhooks leave on, too.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from delayserver.client.blocking import Consumer
from delayserver.client.client import AsyncClient, Client
from delayserver.client.consumer import AsyncConsumer, Retry
from delayserver.client.errors import (
    ChangedError,
    ClientError,
    ClosedError,
    ConflictError,
    DiskFullError,
    FieldError,
    InvalidError,
    NotADelayServerError,
    NotAllowedError,
    NotFoundError,
    OtherLoopError,
    OverloadedError,
    PartlyPublishedError,
    Problem,
    RefusedError,
    ServerError,
    UnansweredError,
    UnreachableError,
    UnsendableError,
)
from delayserver.client.retries import NO_RETRIES, RetryPolicy
from delayserver.client.values import (
    Attempts,
    Backup,
    BackupPart,
    DeadLetter,
    Debounce,
    Delivery,
    DeliveryAttempt,
    Draft,
    EventResult,
    Heartbeat,
    Message,
    Moved,
    OutcomeMessage,
    Published,
    Replayed,
    Schedule,
    SkippedRecord,
    Source,
    Stored,
    Subscription,
    To,
)

if TYPE_CHECKING:
    from delayserver.client.aliases import (
        AsyncBackups,
        AsyncProducer,
        AsyncSchedules,
        AsyncSources,
        AsyncSubscriptions,
        Backups,
        Producer,
        Schedules,
        Sources,
        Subscriptions,
    )
    from delayserver.client.webhooks import SignatureError, verify_webhook

__all__ = [
    "NO_RETRIES",
    "AsyncBackups",
    "AsyncClient",
    "AsyncConsumer",
    "AsyncProducer",
    "AsyncSchedules",
    "AsyncSources",
    "AsyncSubscriptions",
    "Attempts",
    "Backup",
    "BackupPart",
    "Backups",
    "ChangedError",
    "Client",
    "ClientError",
    "ClosedError",
    "ConflictError",
    "Consumer",
    "DeadLetter",
    "Debounce",
    "Delivery",
    "DeliveryAttempt",
    "DiskFullError",
    "Draft",
    "EventResult",
    "FieldError",
    "Heartbeat",
    "InvalidError",
    "Message",
    "Moved",
    "NotADelayServerError",
    "NotAllowedError",
    "NotFoundError",
    "OtherLoopError",
    "OutcomeMessage",
    "OverloadedError",
    "PartlyPublishedError",
    "Problem",
    "Producer",
    "Published",
    "RefusedError",
    "Replayed",
    "Retry",
    "RetryPolicy",
    "Schedule",
    "Schedules",
    "ServerError",
    "SignatureError",
    "SkippedRecord",
    "Source",
    "Sources",
    "Stored",
    "Subscription",
    "Subscriptions",
    "To",
    "UnansweredError",
    "UnreachableError",
    "UnsendableError",
    "verify_webhook",
]


def __getattr__(name: str) -> Any:
    """Import the modules of old names and of webhooks when one is used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "webhooks" if name in ("SignatureError", "verify_webhook") else "aliases"
    return getattr(import_module(f"delayserver.client.{module}"), name)
