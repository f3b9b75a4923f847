"""Calls and consumers for programs without asyncio: the same ones, on a loop in a thread.

Any number of threads may call; messages that they publish at the same time go out together. A
client may be made before a fork, and used on both sides. `Consumer.run` blocks, and ends at
SIGTERM and ctrl-C.

Each call is written and explained once, in the class for asyncio: `help(client.messages.publish)`
shows that text.

Cost: a task and two hand-overs between threads per call. Threads: safe.
"""

import asyncio
import functools
import inspect
import signal
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, Unpack

from delayserver.client.backups import AsyncClientBackups
from delayserver.client.calling import EXIT_S
from delayserver.client.consumer import (
    GRACE_S,
    LEASE_MS,
    AnyConsumerOptions,
    AsyncConsumer,
    H,
)
from delayserver.client.errors import ClosedError
from delayserver.client.groups import (
    AsyncClientCluster,
    AsyncClientDeadLetters,
    AsyncClientEvents,
    AsyncClientHeartbeats,
    AsyncClientImports,
    AsyncClientTokens,
)
from delayserver.client.loop_thread import LoopThread
from delayserver.client.messages import AsyncClientMessages
from delayserver.client.options import URL_DEFAULT, ClientConfig, options_of_consumer
from delayserver.client.schedules import AsyncClientSchedules
from delayserver.client.sources import AsyncClientSources
from delayserver.client.subscriptions import AsyncClientSubscriptions
from delayserver.client.values import Delay

T = TypeVar("T")
V = TypeVar("V")
A_co = TypeVar("A_co", covariant=True)
K = TypeVar("K")
B = TypeVar("B")
P = ParamSpec("P")


class Closing(Protocol):
    """A client that can be closed."""

    async def close(self, timeout_s: float | None = None) -> None:
        """Wait for calls under way, at most `timeout_s`, then disconnect."""


def waiting(
    method: Callable[Concatenate[A_co, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate["CallGroup[A_co]", P], T]:
    """The same method with the same parameters, for a thread that waits for it."""

    @functools.wraps(method)
    def call(group: "CallGroup[A_co]", /, *arguments: P.args, **options: P.kwargs) -> T:
        return group._thread.call(method(group._client, *arguments, **options))

    return call


def each(
    method: Callable[Concatenate[A_co, P], AsyncIterator[V]],
) -> Callable[Concatenate["CallGroup[A_co]", P], Iterator[V]]:
    """The same list with the same parameters, for a thread that waits for each page."""

    @functools.wraps(method)
    def call(group: "CallGroup[A_co]", /, *arguments: P.args, **options: P.kwargs) -> Iterator[V]:
        return _read_on(group._thread, method(group._client, *arguments, **options))

    return call


def _read_on(thread: LoopThread, found: AsyncIterator[V]) -> Iterator[V]:
    async def following() -> V | None:
        return await anext(found, None)

    while (one := thread.call(following())) is not None:
        yield one


def with_options_of(
    kind: Callable[P, K],
) -> Callable[[Callable[[B, K], None]], Callable[Concatenate[B, P], None]]:
    """An `__init__` with the options of that class, and its docstring. The decorated function gets
    the object that was made with them."""

    def decorate(take: Callable[[B, K], None]) -> Callable[Concatenate[B, P], None]:
        @functools.wraps(inspect.getattr_static(kind, "__init__"))
        def init(self: B, /, *arguments: P.args, **options: P.kwargs) -> None:
            take(self, kind(*arguments, **options))

        return init

    return decorate


class CallGroup(Generic[A_co]):
    """Calls of a client of asyncio. The threads that make them wait for the loop of `thread`."""

    def __init__(self, client: A_co, thread: LoopThread) -> None:
        self._client = client
        self._thread = thread


class Blocking(CallGroup[A_co]):
    """Calls with a loop in a thread of its own. Any number of threads may make them.

    The thread begins with the first call, and ends with `close`, or when this is dropped."""

    def __init__(self, client: A_co, owner: Closing) -> None:
        """`owner` has the connections of `client`."""
        super().__init__(client, LoopThread(functools.partial(owner.close, EXIT_S)))
        self._owner = owner

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(None if kind is None else EXIT_S)

    def close(self, timeout_s: float | None = None) -> None:
        """Take nothing more, wait for publishes under way, at most `timeout_s`, disconnect, and end
        the thread."""
        try:
            self._thread.call(self._owner.close(timeout_s))
        except ClosedError:
            return  # closed before
        self._thread.stop()


class ClientMessages(CallGroup[AsyncClientMessages]):
    """As AsyncClientMessages, for threads."""

    publish = waiting(AsyncClientMessages.publish)
    publish_all = waiting(AsyncClientMessages.publish_all)
    replace = waiting(AsyncClientMessages.replace)
    cancel = waiting(AsyncClientMessages.cancel)
    get = waiting(AsyncClientMessages.get)
    attempts = waiting(AsyncClientMessages.attempts)
    replay = waiting(AsyncClientMessages.replay)
    move = waiting(AsyncClientMessages.move)
    pending = each(AsyncClientMessages.pending)


class ClientSubscriptions(CallGroup[AsyncClientSubscriptions]):
    """As AsyncClientSubscriptions, for threads."""

    put_webhook = waiting(AsyncClientSubscriptions.put_webhook)
    put_pull = waiting(AsyncClientSubscriptions.put_pull)
    put_kafka = waiting(AsyncClientSubscriptions.put_kafka)
    put_redis = waiting(AsyncClientSubscriptions.put_redis)
    put_nats = waiting(AsyncClientSubscriptions.put_nats)
    put_amqp = waiting(AsyncClientSubscriptions.put_amqp)
    get = waiting(AsyncClientSubscriptions.get)
    list = waiting(AsyncClientSubscriptions.list)
    pause = waiting(AsyncClientSubscriptions.pause)
    resume = waiting(AsyncClientSubscriptions.resume)
    delete = waiting(AsyncClientSubscriptions.delete)


class ClientSchedules(CallGroup[AsyncClientSchedules]):
    """As AsyncClientSchedules, for threads."""

    put = waiting(AsyncClientSchedules.put)
    preview = waiting(AsyncClientSchedules.preview)
    get = waiting(AsyncClientSchedules.get)
    list = each(AsyncClientSchedules.list)
    pause = waiting(AsyncClientSchedules.pause)
    resume = waiting(AsyncClientSchedules.resume)
    trigger = waiting(AsyncClientSchedules.trigger)
    delete = waiting(AsyncClientSchedules.delete)


class ClientSources(CallGroup[AsyncClientSources]):
    """As AsyncClientSources, for threads."""

    put = waiting(AsyncClientSources.put)
    get = waiting(AsyncClientSources.get)
    list = each(AsyncClientSources.list)
    pause = waiting(AsyncClientSources.pause)
    resume = waiting(AsyncClientSources.resume)
    delete = waiting(AsyncClientSources.delete)


class ClientBackups(CallGroup[AsyncClientBackups]):
    """As AsyncClientBackups, for threads."""

    begin = waiting(AsyncClientBackups.begin)
    get = waiting(AsyncClientBackups.get)
    wait = waiting(AsyncClientBackups.wait)
    list = waiting(AsyncClientBackups.list)
    delete = waiting(AsyncClientBackups.delete)


class ClientDeadLetters(CallGroup[AsyncClientDeadLetters]):
    """As AsyncClientDeadLetters, for threads."""

    list = each(AsyncClientDeadLetters.list)
    counts = each(AsyncClientDeadLetters.counts)
    redrive = waiting(AsyncClientDeadLetters.redrive)
    discard = waiting(AsyncClientDeadLetters.discard)


class ClientEvents(CallGroup[AsyncClientEvents]):
    """As AsyncClientEvents, for threads."""

    send = waiting(AsyncClientEvents.send)


class ClientHeartbeats(CallGroup[AsyncClientHeartbeats]):
    """As AsyncClientHeartbeats, for threads."""

    put = waiting(AsyncClientHeartbeats.put)
    get = waiting(AsyncClientHeartbeats.get)
    delete = waiting(AsyncClientHeartbeats.delete)


class ClientImports(CallGroup[AsyncClientImports]):
    """As AsyncClientImports, for threads."""

    begin = waiting(AsyncClientImports.begin)
    adopt = waiting(AsyncClientImports.adopt)
    get = waiting(AsyncClientImports.get)
    duplicates = each(AsyncClientImports.duplicates)
    archives = each(AsyncClientImports.archives)
    confirm_archive = waiting(AsyncClientImports.confirm_archive)


class ClientTokens(CallGroup[AsyncClientTokens]):
    """As AsyncClientTokens, for threads."""

    own = waiting(AsyncClientTokens.own)
    list = each(AsyncClientTokens.list)


class ClientCluster(CallGroup[AsyncClientCluster]):
    """As AsyncClientCluster, for threads."""

    map = waiting(AsyncClientCluster.map)
    stats = waiting(AsyncClientCluster.stats)
    forecast = waiting(AsyncClientCluster.forecast)
    subjects = each(AsyncClientCluster.subjects)
    metrics = waiting(AsyncClientCluster.metrics)
    is_alive = waiting(AsyncClientCluster.is_alive)
    is_ready = waiting(AsyncClientCluster.is_ready)


class Consumer:
    """A consumer for programs without asyncio.

        consumer = Client("http://127.0.0.1:8080").consumer(concurrency=8)

        @consumer.subscribe("order.unpaid")
        def remind(message: Message) -> None:
            ...

        consumer.run()

    Handlers run in threads, and their context manager `around` in the same thread:
    `around=fresh_connections` with `@contextmanager def fresh_connections(message)`."""

    def __init__(
        self, server: ClientConfig | str = URL_DEFAULT, **options: Unpack[AnyConsumerOptions]
    ) -> None:
        """Made by `Client.consumer`, which explains the options."""
        reach, own = options_of_consumer("Client", server, dict(options))
        self._consumer = AsyncConsumer(reach, **own)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_asked = False
        self._lock = threading.Lock()

    def subscribe(
        self,
        subject: str,
        *,
        name: str | None = None,
        lease: Delay = LEASE_MS,
        concurrency: int | None = None,
    ) -> Callable[[H], H]:
        """Decorate the handler of a subject's messages. `lease` is a timedelta, text such as "30s",
        or whole milliseconds.

        The subscription is made if it is not there. Consumers that give the same name share the
        work; with different names each gets every message. The name is the subject unless another
        one is given; a pattern (`order.*`) needs one. A handler that runs for longer than the lease
        keeps its message: the lease is extended. Raises ValueError, InputError."""
        return self._consumer.subscribe(subject, name=name, lease=lease, concurrency=concurrency)

    def run(self, *, grace_s: float = GRACE_S) -> None:
        """Handle messages until `stop` is called; in the main thread, SIGTERM and ctrl-C do it."""
        asyncio.run(self._run(grace_s))

    async def _run(self, grace_s: float) -> None:
        loop = asyncio.get_running_loop()
        with self._lock:
            self._loop = loop
            if self._stop_asked:
                return
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._consumer.stop)
        try:
            await self._consumer.run(grace_s=grace_s)
        finally:
            with self._lock:
                self._loop = None

    def stop(self) -> None:
        """End `run`; from any thread, also before it has begun."""
        with self._lock:
            self._stop_asked = True
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._consumer.stop)
