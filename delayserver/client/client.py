"""One client for each mode: every call of the API, under the same names with asyncio and without.

    client ─▶ messages, events, heartbeats    the producer, which asks the owners of shards
           ├▶ subscriptions, dead_letters, schedules, sources, backups,
           │  imports, tokens, cluster        any node of the cluster
           └▶ consumer(…)                     connections of its own, for its long polls

A call is written once, for asyncio. `Client` wraps that coroutine in one that a thread waits for.

Cost: of a client two pools of connections, which open with the first call. Threads: an AsyncClient
belongs to its event loop; any number of threads may call a Client.
"""

import ssl
from collections.abc import Callable
from functools import partial
from typing import Any, Self, TypedDict, Unpack

from delayserver.client.backups import AsyncBackups
from delayserver.client.blocking import (
    Backups,
    Blocking,
    CallGroup,
    Consumer,
    Producer,
    Schedules,
    Sources,
    Subscriptions,
    each,
    sharing,
    waiting,
    with_options_of,
)
from delayserver.client.calling import EXIT_S, RETRY, URL_DEFAULT, RetryingClient
from delayserver.client.cluster_map import OwnerHosts
from delayserver.client.consumer import Around, AsyncConsumer
from delayserver.client.following import followed
from delayserver.client.groups import (
    AsyncCluster,
    AsyncDeadLetters,
    AsyncEvents,
    AsyncHeartbeats,
    AsyncImports,
    AsyncTokens,
)
from delayserver.client.nodes import Connect
from delayserver.client.producer import AsyncProducer
from delayserver.client.retries import RetryPolicy, Time
from delayserver.client.schedules import AsyncSchedules
from delayserver.client.sources import AsyncSources
from delayserver.client.subscriptions import AsyncSubscriptions
from delayserver.client.transport import TIMEOUT_S, HttpTransport, Transport
from delayserver.client.values import Delay


class ConsumerOptions(TypedDict, total=False):
    """Options of `consumer`; AsyncConsumer explains them."""

    concurrency: int
    retry_delay_ms: Callable[[int], int]
    wait: Delay
    reconnect: RetryPolicy
    around: Around | None


class AsyncClient:
    """Every call of a server, for asyncio.

        async with AsyncClient("http://127.0.0.1:8080") as client:
            await client.messages.publish("order.unpaid", {"order": 1001}, delay="30m")
            await client.subscriptions.put_pull("reminders", "order.unpaid")

    Close the client, not its groups, which share connections."""

    def __init__(
        self,
        url: str = URL_DEFAULT,
        *,
        token: str | None = None,
        retry: RetryPolicy = RETRY,
        timeout_s: float = TIMEOUT_S,
        generate_keys: bool = True,
        owner_hosts: OwnerHosts = "same",
        tls: ssl.SSLContext | None = None,
        transport: Transport | None = None,
        connect: Connect | None = None,
        time: Time | None = None,
    ) -> None:
        """- `retry`: how long to ask again while the server is away; a minute by default.
        - `timeout_s`: how long one request may take. Each call takes a `timeout_s`, too, for all of
          its requests: UnansweredError when that is over.
        - `generate_keys`: without keys of its own, a message is not sent again after a lost answer.
        - `owner_hosts`: other shards and nodes are asked at their own addresses on the same host as
          `url`. With "any" they are asked on any host, which then gets the token. With "none"
          everything goes to `url`.
        - `token`; `tls`: instead of the system's certificates; `transport`, `connect`, `time`: for
          tests."""
        reached: dict[str, Any] = {
            **{"token": token, "tls": tls, "owner_hosts": owner_hosts},
            **{"transport": transport, "connect": connect, "time": time},
        }
        self._reached = {"url": url, **reached}
        self.messages = AsyncProducer(
            url, retry=retry, timeout_s=timeout_s, generate_keys=generate_keys, **reached
        )
        make = partial(HttpTransport, token=token, tls=tls)
        asked: dict[str, Any] = {
            **{"retry": retry, "timeout_s": timeout_s, "time": time},
            "transport": followed(transport, connect, make, url, owner_hosts),
        }
        self._any_node = RetryingClient(url, **asked)
        self.subscriptions = AsyncSubscriptions(url, **asked)
        self.schedules = AsyncSchedules(url, **asked)
        self.sources = AsyncSources(url, **asked)
        self.backups = AsyncBackups(url, **asked)
        self.dead_letters = AsyncDeadLetters(self._any_node, self.subscriptions)
        self.events = AsyncEvents(self.messages)
        self.heartbeats = AsyncHeartbeats(self.messages)
        self.imports = AsyncImports(self._any_node)
        self.tokens = AsyncTokens(self._any_node)
        self.cluster = AsyncCluster(self._any_node)

    def consumer(self, **options: Unpack[ConsumerOptions]) -> AsyncConsumer:
        """A consumer of the same server, with connections of its own. `close` does not end it; its
        `stop` does."""
        return AsyncConsumer(**self._reached, **options)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self.close(None if kind is None else EXIT_S)

    async def close(self, timeout_s: float | None = None) -> None:
        """Take nothing more, wait for publishes under way, at most `timeout_s`, and disconnect."""
        await self.messages.close(timeout_s)
        for group in (self.subscriptions, self.schedules, self.sources, self.backups):
            await group.close()
        await self._any_node.close()


class DeadLetterCalls(CallGroup[AsyncDeadLetters]):
    """As AsyncDeadLetters, for threads."""

    list = each(AsyncDeadLetters.list)
    counts = each(AsyncDeadLetters.counts)
    redrive = waiting(AsyncDeadLetters.redrive)
    discard = waiting(AsyncDeadLetters.discard)


class EventSending(CallGroup[AsyncEvents]):
    """As AsyncEvents, for threads."""

    send = waiting(AsyncEvents.send)


class HeartbeatCalls(CallGroup[AsyncHeartbeats]):
    """As AsyncHeartbeats, for threads."""

    put = waiting(AsyncHeartbeats.put)
    get = waiting(AsyncHeartbeats.get)
    delete = waiting(AsyncHeartbeats.delete)


class ImportCalls(CallGroup[AsyncImports]):
    """As AsyncImports, for threads."""

    begin = waiting(AsyncImports.begin)
    adopt = waiting(AsyncImports.adopt)
    get = waiting(AsyncImports.get)
    duplicates = each(AsyncImports.duplicates)
    archives = each(AsyncImports.archives)
    confirm_archive = waiting(AsyncImports.confirm_archive)


class TokenCalls(CallGroup[AsyncTokens]):
    """As AsyncTokens, for threads."""

    own = waiting(AsyncTokens.own)
    list = each(AsyncTokens.list)


class ClusterCalls(CallGroup[AsyncCluster]):
    """As AsyncCluster, for threads."""

    map = waiting(AsyncCluster.map)
    stats = waiting(AsyncCluster.stats)
    forecast = waiting(AsyncCluster.forecast)
    subjects = each(AsyncCluster.subjects)
    metrics = waiting(AsyncCluster.metrics)
    is_alive = waiting(AsyncCluster.is_alive)
    is_ready = waiting(AsyncCluster.is_ready)


class Client(Blocking[AsyncClient]):
    """Every call of a server, for programs without asyncio; any number of threads may use it.

        with Client("http://127.0.0.1:8080") as client:
            client.messages.publish("order.unpaid", {"order": 1001}, delay="30m")
            client.subscriptions.put_pull("reminders", "order.unpaid")

    One thread serves all groups. It begins with the first call, and ends with `close`, or when the
    client is dropped. Close the client, not its groups, which share that thread."""

    @with_options_of(AsyncClient)
    def __init__(self, client: AsyncClient) -> None:
        super().__init__(client)
        thread = self._thread
        self.messages = sharing(Producer, client.messages, thread)
        self.subscriptions = sharing(Subscriptions, client.subscriptions, thread)
        self.schedules = sharing(Schedules, client.schedules, thread)
        self.sources = sharing(Sources, client.sources, thread)
        self.backups = sharing(Backups, client.backups, thread)
        self.dead_letters = DeadLetterCalls(client.dead_letters, thread)
        self.events = EventSending(client.events, thread)
        self.heartbeats = HeartbeatCalls(client.heartbeats, thread)
        self.imports = ImportCalls(client.imports, thread)
        self.tokens = TokenCalls(client.tokens, thread)
        self.cluster = ClusterCalls(client.cluster, thread)

    def consumer(self, **options: Unpack[ConsumerOptions]) -> Consumer:
        """A consumer of the same server, with connections of its own. `close` does not end it; its
        `stop` does."""
        return Consumer(**self._client._reached, **options)
