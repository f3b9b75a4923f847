"""The client library: publish messages, handle them when they are due, verify webhooks.

    from delayserver.client import AsyncClient     every call, with asyncio
    from delayserver.client import Client          every call, without
    from delayserver.client import verify_webhook  in a receiver of webhooks

In reading order:

    values      what the server tells about messages
    errors      what can go wrong, in one tree
    transport   one request, one answer
    retries     when to ask again
    batching    what gathers while a request is under way goes out with the next one
    batches     what the producer sends together, and each item's part of the answer
    writing     messages in JSON, and what JSON would change without a word
    replacing   what takes the place of a message, whatever becomes of answers
    calling     calls of any client: loops, forks, retries
    cluster_map the map of a cluster as clients read it
    owners      which shard is asked at which address
    nodes       where anything can be asked
    following   a transport to whichever node can be reached
    producer    publish, cancel, move, replace, look up; events and heartbeats
    definitions what the clients of subscriptions, schedules and sources share
    subscriptions   webhooks and pulls, and their dead letters
    cutting     answers of which one bad message costs only itself
    consumer    pull, handle, acknowledge
    loop_thread the event loop of callers that have none
    schedules   what is published again and again
    sources     topics whose records are published
    backups     copies of what a server has
    groups      calls without a client of their own: events, heartbeats, imports, tokens, cluster
    blocking    producer and consumer without asyncio
    client      one client for each mode, with every call
    webhooks    is this webhook from our server?

It needs nothing of the server but a few modules without state (times, ids, shards, signing) and the
HTTP connection that webhooks leave on, too.
"""

from delayserver.client.backups import AsyncBackups
from delayserver.client.blocking import (
    Backups,
    Consumer,
    Producer,
    Schedules,
    Sources,
    Subscriptions,
)
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
from delayserver.client.producer import AsyncProducer
from delayserver.client.retries import NO_RETRIES, RetryPolicy
from delayserver.client.schedules import AsyncSchedules
from delayserver.client.sources import AsyncSources
from delayserver.client.subscriptions import AsyncSubscriptions
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
