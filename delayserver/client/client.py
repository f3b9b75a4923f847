"""One client for each mode: every call of the API, under the same names with asyncio and without.

    client ─▶ messages, heartbeats            the owners of shards
           ├▶ subscriptions, dead_letters, schedules, sources, events, backups,
           │  imports, tokens, cluster        any node of the cluster
           └▶ consumer(…)                     connections of its own, for its long polls

A call is written once, for asyncio. `Client` wraps that coroutine in one that a thread waits for.

Cost: of a client two pools of connections, which open with the first call. Threads: an AsyncClient
belongs to its event loop; any number of threads may call a Client.
"""

from typing import Self, Unpack

from delayserver.client.backups import AsyncClientBackups
from delayserver.client.blocking import (
    Blocking,
    ClientBackups,
    ClientCluster,
    ClientDeadLetters,
    ClientEvents,
    ClientHeartbeats,
    ClientImports,
    ClientMessages,
    ClientSchedules,
    ClientSources,
    ClientSubscriptions,
    ClientTokens,
    Consumer,
    with_options_of,
)
from delayserver.client.calling import EXIT_S, RetryingClient
from delayserver.client.consumer import AsyncConsumer, ConsumerOptions
from delayserver.client.groups import (
    AsyncClientCluster,
    AsyncClientDeadLetters,
    AsyncClientEvents,
    AsyncClientHeartbeats,
    AsyncClientImports,
    AsyncClientTokens,
)
from delayserver.client.messages import AsyncClientMessages
from delayserver.client.options import URL_DEFAULT, ClientConfig, ClientOptions
from delayserver.client.schedules import AsyncClientSchedules
from delayserver.client.sources import AsyncClientSources
from delayserver.client.subscriptions import AsyncClientSubscriptions


class AsyncClient:
    """Every call of a server, for asyncio.

        async with AsyncClient("http://127.0.0.1:8080") as client:
            await client.messages.publish("order.unpaid", {"order": 1001}, delay="30m")
            await client.subscriptions.put_pull("reminders", "order.unpaid")

    One client serves any number of tasks. It may be made anywhere, and used by one event loop after
    the other, and on both sides of a fork. In two loops that run at the same time it is refused:
    OtherLoopError."""

    def __init__(self, url: str = URL_DEFAULT, **options: Unpack[ClientOptions]) -> None:
        """- `retry`: how long to ask again while the server is away; a minute by default.
        - `timeout_s`: how long one request may take; with retries never longer than they may. Each
          call takes a `timeout_s`, too, for all of its requests: UnansweredError when that is over.
        - `generate_keys`: without keys of its own, a message is not sent again after a lost answer.
        - `pending_max`, `pending_max_bytes`: messages that may be published and not answered;
          `publish` waits while there is no room. `in_flight_max`: batches that may be under way.
        - `owner_hosts`: other shards and nodes are asked at their own addresses on the same host as
          `url`. With "any" they are asked on any host, which then gets the token. With "none"
          everything goes to `url`.
        - `token`; `tls`: instead of the system's certificates; `transport`, `connect`, `time`: for
          tests.

        Raises ValueError."""
        self._options = wanted = ClientConfig(url, **options)
        self.messages = AsyncClientMessages(wanted)
        self._any_node = any_node = RetryingClient(wanted, wanted.any_node())
        self.subscriptions = AsyncClientSubscriptions(any_node)
        self.schedules = AsyncClientSchedules(any_node)
        self.sources = AsyncClientSources(any_node)
        self.backups = AsyncClientBackups(any_node)
        self.dead_letters = AsyncClientDeadLetters(any_node)
        self.events = AsyncClientEvents(any_node)
        self.heartbeats = AsyncClientHeartbeats(self.messages)
        self.imports = AsyncClientImports(any_node)
        self.tokens = AsyncClientTokens(any_node)
        self.cluster = AsyncClientCluster(any_node)

    def consumer(self, **options: Unpack[ConsumerOptions]) -> AsyncConsumer:
        """A consumer of the same server, with connections of its own. `close` does not end it; its
        `stop` does.

        - `concurrency`: handlers that run at once, for each subscription; 64 by default.
        - `retry_delay_ms`: how long a message waits after its handler has failed, by the attempt
          (from 1); by default a second, doubled each time, at most ten minutes.
        - `wait`: how long a pull waits for messages at the server, as a timedelta, text such as
          "20s", or whole milliseconds.
        - `reconnect`: the waits while the server is away, which last as long as it does.
        - `around`: a context manager for each message, which its handler runs inside of."""
        return AsyncConsumer(self._options, **options)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self.close(None if kind is None else EXIT_S)

    async def close(self, timeout_s: float | None = None) -> None:
        """Take nothing more, wait for publishes under way, at most `timeout_s`, and disconnect."""
        await self.messages.close(timeout_s)
        await self._any_node.close()


class Client(Blocking[AsyncClient]):
    """Every call of a server, for programs without asyncio; any number of threads may use it.

        with Client("http://127.0.0.1:8080") as client:
            client.messages.publish("order.unpaid", {"order": 1001}, delay="30m")
            client.subscriptions.put_pull("reminders", "order.unpaid")

    One thread serves all groups. It begins with the first call, and ends with `close`, or when the
    client is dropped. A client may be made before a fork: the child gets a thread, connections and
    generated keys of its own."""

    @with_options_of(AsyncClient)
    def __init__(self, client: AsyncClient) -> None:
        super().__init__(client, client)
        thread = self._thread
        self.messages = ClientMessages(client.messages, thread)
        self.subscriptions = ClientSubscriptions(client.subscriptions, thread)
        self.schedules = ClientSchedules(client.schedules, thread)
        self.sources = ClientSources(client.sources, thread)
        self.backups = ClientBackups(client.backups, thread)
        self.dead_letters = ClientDeadLetters(client.dead_letters, thread)
        self.events = ClientEvents(client.events, thread)
        self.heartbeats = ClientHeartbeats(client.heartbeats, thread)
        self.imports = ClientImports(client.imports, thread)
        self.tokens = ClientTokens(client.tokens, thread)
        self.cluster = ClientCluster(client.cluster, thread)

    def consumer(self, **options: Unpack[ConsumerOptions]) -> Consumer:
        """A consumer of the same server, as `AsyncClient.consumer` explains it. Its handlers run in
        threads."""
        return Consumer(self._client._options, **options)
