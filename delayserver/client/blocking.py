"""Producer and consumer for programs without asyncio: the same ones, on a loop in a thread.

`Producer` may be called from any number of threads; what they publish at the same time goes out
together. It may be made before a fork, and used on both sides. `Consumer.run` blocks, and ends at
SIGTERM and ctrl-C.

Each call is written and explained once, in the class for asyncio: `help(Producer.publish)` shows
that text.

Cost: a task and two hand-overs between threads per call. Threads: safe.
"""

import asyncio
import functools
import inspect
import signal
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar

from delayserver.client.backups import AsyncBackups
from delayserver.client.calling import EXIT_S
from delayserver.client.consumer import GRACE_S, LEASE_MS, AsyncConsumer, H
from delayserver.client.errors import ClosedError
from delayserver.client.loop_thread import LoopThread
from delayserver.client.producer import AsyncProducer
from delayserver.client.schedules import AsyncSchedules
from delayserver.client.sources import AsyncSources
from delayserver.client.subscriptions import AsyncSubscriptions
from delayserver.client.values import Delay

T = TypeVar("T")
V = TypeVar("V")
A = TypeVar("A")
G = TypeVar("G", bound="CallGroup[Any]")
C = TypeVar("C", bound="Closing")
K = TypeVar("K")
B = TypeVar("B")
P = ParamSpec("P")


class Closing(Protocol):
    """A client that can be closed."""

    async def close(self, timeout_s: float | None = None) -> None:
        """Wait for what is under way, at most `timeout_s`, then disconnect."""


def waiting(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate["CallGroup[A]", P], T]:
    """The same method with the same parameters, for a thread that waits for it."""

    @functools.wraps(method)
    def call(group: "CallGroup[A]", /, *arguments: P.args, **options: P.kwargs) -> T:
        return group._thread.call(method(group._client, *arguments, **options))

    return call


def each(
    method: Callable[Concatenate[A, P], AsyncIterator[V]],
) -> Callable[Concatenate["CallGroup[A]", P], Iterator[V]]:
    """The same list with the same parameters, for a thread that waits for each page."""

    @functools.wraps(method)
    def call(group: "CallGroup[A]", /, *arguments: P.args, **options: P.kwargs) -> Iterator[V]:
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
    """An `__init__` with the options of that class, and what it says of them; the one that is
    decorated gets what was made with them."""

    def decorate(take: Callable[[B, K], None]) -> Callable[Concatenate[B, P], None]:
        @functools.wraps(inspect.getattr_static(kind, "__init__"))
        def init(self: B, /, *arguments: P.args, **options: P.kwargs) -> None:
            take(self, kind(*arguments, **options))

        return init

    return decorate


class CallGroup(Generic[A]):
    """Calls of a client of asyncio. The threads that make them wait for the loop of `thread`."""

    def __init__(self, client: A, thread: LoopThread) -> None:
        self._client = client
        self._thread = thread


def sharing(kind: type[G], client: object, thread: LoopThread) -> G:
    """A group whose calls run in the thread of another, which also closes `client`."""
    group = kind.__new__(kind)
    CallGroup.__init__(group, client, thread)
    return group


class Blocking(CallGroup[C]):
    """A client of asyncio, with a loop in a thread of its own. Any number of threads may call it.

    The thread begins with the first call, and ends with `close`, or when this is dropped."""

    def __init__(self, client: C) -> None:
        super().__init__(client, LoopThread(functools.partial(client.close, EXIT_S)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(None if kind is None else EXIT_S)

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for what is under way, at most `timeout_s`, then disconnect and end the thread."""
        try:
            self._thread.call(self._client.close(timeout_s))
        except ClosedError:
            return  # closed before
        self._thread.stop()


class Producer(Blocking[AsyncProducer]):
    """A producer for programs without asyncio; any number of threads may call one.

        with Producer("http://127.0.0.1:8080") as producer:
            published = producer.publish("order.unpaid", {"order": 1001}, delay="30m")

    Its thread begins with the first call, and ends with `close`, or when it is dropped. It may be
    made before a fork: the child gets a thread, connections and generated keys of its own."""

    @with_options_of(AsyncProducer)
    def __init__(self, client: AsyncProducer) -> None:
        super().__init__(client)

    publish = waiting(AsyncProducer.publish)
    publish_all = waiting(AsyncProducer.publish_all)
    event = waiting(AsyncProducer.event)
    heartbeat = waiting(AsyncProducer.heartbeat)
    get_heartbeat = waiting(AsyncProducer.get_heartbeat)
    delete_heartbeat = waiting(AsyncProducer.delete_heartbeat)
    replace = waiting(AsyncProducer.replace)
    cancel = waiting(AsyncProducer.cancel)
    get = waiting(AsyncProducer.get)
    attempts = waiting(AsyncProducer.attempts)
    replay = waiting(AsyncProducer.replay)
    move = waiting(AsyncProducer.move)
    pending = each(AsyncProducer.pending)


class Subscriptions(Blocking[AsyncSubscriptions]):
    """The subscriptions of a server, for programs without asyncio.

        with Subscriptions("http://127.0.0.1:8080") as subscriptions:
            subscriptions.put_webhook("shop", "order.*", "http://127.0.0.1:9000/unpaid")

    Durations are timedeltas, text such as "15s", or whole milliseconds."""

    @with_options_of(AsyncSubscriptions)
    def __init__(self, client: AsyncSubscriptions) -> None:
        super().__init__(client)

    put_webhook = waiting(AsyncSubscriptions.put_webhook)
    put_pull = waiting(AsyncSubscriptions.put_pull)
    put_kafka = waiting(AsyncSubscriptions.put_kafka)
    put_redis = waiting(AsyncSubscriptions.put_redis)
    put_nats = waiting(AsyncSubscriptions.put_nats)
    put_amqp = waiting(AsyncSubscriptions.put_amqp)
    get = waiting(AsyncSubscriptions.get)
    list = waiting(AsyncSubscriptions.list)
    pause = waiting(AsyncSubscriptions.pause)
    resume = waiting(AsyncSubscriptions.resume)
    delete = waiting(AsyncSubscriptions.delete)
    dead_letters = each(AsyncSubscriptions.dead_letters)
    redrive = waiting(AsyncSubscriptions.redrive)
    discard = waiting(AsyncSubscriptions.discard)


class Schedules(Blocking[AsyncSchedules]):
    """The schedules of a server, for programs without asyncio.

        with Schedules("http://127.0.0.1:8080") as schedules:
            schedules.put("daily", "report.daily", {"shop": 7}, cron="0 9 * * MON-FRI")

    Durations are timedeltas, text such as "15s", or whole milliseconds; times are datetimes that
    know their zone, text in RFC 3339, or milliseconds since the epoch."""

    @with_options_of(AsyncSchedules)
    def __init__(self, client: AsyncSchedules) -> None:
        super().__init__(client)

    put = waiting(AsyncSchedules.put)
    preview = waiting(AsyncSchedules.preview)
    get = waiting(AsyncSchedules.get)
    list = each(AsyncSchedules.list)
    pause = waiting(AsyncSchedules.pause)
    resume = waiting(AsyncSchedules.resume)
    trigger = waiting(AsyncSchedules.trigger)
    delete = waiting(AsyncSchedules.delete)


class Sources(Blocking[AsyncSources]):
    """The sources of a server, for programs without asyncio.

        with Sources("http://127.0.0.1:8080") as sources:
            sources.put("orders", "order.unpaid", "127.0.0.1:9092", "orders")

    Messages that a source has published stay when it is deleted."""

    @with_options_of(AsyncSources)
    def __init__(self, client: AsyncSources) -> None:
        super().__init__(client)

    put = waiting(AsyncSources.put)
    get = waiting(AsyncSources.get)
    list = each(AsyncSources.list)
    pause = waiting(AsyncSources.pause)
    resume = waiting(AsyncSources.resume)
    delete = waiting(AsyncSources.delete)


class Backups(Blocking[AsyncBackups]):
    """The backups of a server, for programs without asyncio; with a token that has the scope
    `admin`.

        with Backups("http://127.0.0.1:8080") as backups:
            made = backups.wait(backups.begin("before-the-upgrade").name)

    `delayserver restore` makes a data directory of one."""

    @with_options_of(AsyncBackups)
    def __init__(self, client: AsyncBackups) -> None:
        super().__init__(client)

    begin = waiting(AsyncBackups.begin)
    get = waiting(AsyncBackups.get)
    wait = waiting(AsyncBackups.wait)
    list = waiting(AsyncBackups.list)
    delete = waiting(AsyncBackups.delete)


class Consumer:
    """A consumer for programs without asyncio.

        consumer = Consumer("http://127.0.0.1:8080", concurrency=8)

        @consumer.subscribe("order.unpaid")
        def remind(message: Message) -> None:
            ...

        consumer.run()

    Handlers run in threads, and what is `around` them in the same:
    `around=fresh_connections` with `@contextmanager def fresh_connections(message)`."""

    @with_options_of(AsyncConsumer)
    def __init__(self, consumer: AsyncConsumer) -> None:
        self._consumer = consumer
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
