"""Producer and consumer for programs without asyncio: the same ones, on a loop in a thread.

`Producer` may be called from any number of threads; what they publish at the same time goes out
together. It may be made before a fork, and used on both sides. `Consumer.run` blocks, and ends at
SIGTERM and ctrl-C.

Cost: a task and two hand-overs between threads per call. Threads: safe.
"""

import asyncio
import functools
import signal
import ssl
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from delayserver.client.consumer import (
    CONCURRENCY,
    GRACE_S,
    LEASE_MS,
    RECONNECT,
    WAIT_MS,
    Around,
    AsyncConsumer,
    H,
    backoff_ms,
)
from delayserver.client.errors import ClosedError
from delayserver.client.loop_thread import LoopThread
from delayserver.client.producer import (
    EXIT_S,
    IN_FLIGHT_MAX,
    PENDING_MAX,
    PENDING_MAX_BYTES,
    RETRY,
    URL_DEFAULT,
    AsyncProducer,
)
from delayserver.client.retries import RetryPolicy, Time
from delayserver.client.transport import TIMEOUT_S, Transport
from delayserver.client.values import Delay, DeliverAt, Stored

T = TypeVar("T")
P = ParamSpec("P")


def _waiting(
    method: Callable[Concatenate[AsyncProducer, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate["Producer", P], T]:
    """The same method with the same parameters, for a thread that waits for it."""

    @functools.wraps(method)
    def call(producer: "Producer", /, *arguments: P.args, **options: P.kwargs) -> T:
        return producer._thread.call(method(producer._producer, *arguments, **options))

    return call


class Producer:
    """A producer for programs without asyncio; any number of threads may call one.

        with Producer("http://127.0.0.1:8080") as producer:
            published = producer.publish("order.unpaid", {"order": 1001}, delay="30m")

    - `retry`: how long to ask again while the server is away; a minute by default.
    - `timeout_s`: how long one request may take; with retries never longer than they may. Each call
      takes a `timeout_s`, too, for all of its requests: UnansweredError when that is over.
    - `generate_keys`: without keys of its own, a message is not sent again after a lost answer.
    - `pending_max`, `pending_max_bytes`: what may be published and not answered; `publish` waits
      while there is no room. `in_flight_max`: batches that may be under way at once.
    - `token`; `tls`: instead of the system's certificates; `transport`, `time`: for tests.

    Its thread begins with the first call, and ends with `close`, or when it is dropped. It may be
    made before a fork: the child gets a thread, connections and generated keys of its own."""

    def __init__(
        self,
        url: str = URL_DEFAULT,
        *,
        token: str | None = None,
        retry: RetryPolicy = RETRY,
        timeout_s: float = TIMEOUT_S,
        generate_keys: bool = True,
        pending_max: int = PENDING_MAX,
        pending_max_bytes: int = PENDING_MAX_BYTES,
        in_flight_max: int = IN_FLIGHT_MAX,
        tls: ssl.SSLContext | None = None,
        transport: Transport | None = None,
        time: Time | None = None,
    ) -> None:
        self._producer = AsyncProducer(
            url,
            token=token,
            retry=retry,
            timeout_s=timeout_s,
            generate_keys=generate_keys,
            pending_max=pending_max,
            pending_max_bytes=pending_max_bytes,
            in_flight_max=in_flight_max,
            tls=tls,
            transport=transport,
            time=time,
        )
        self._thread = LoopThread(functools.partial(self._producer.close, EXIT_S))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(None if kind is None else EXIT_S)

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for what is under way, at most `timeout_s`, then disconnect and end the thread."""
        try:
            self._thread.call(self._producer.close(timeout_s))
        except ClosedError:
            return  # closed before
        self._thread.stop()

    publish = _waiting(AsyncProducer.publish)
    """Publish a message; when this returns, it is durable.

    `body` is anything that msgspec writes as JSON (dataclasses and datetimes among it), a pydantic
    model, or bytes. Give `delay` or `deliver_at`; neither means now. `delay` is a timedelta, text
    such as "30m", or whole milliseconds, as in `delay=30_000`. `deliver_at` is a datetime that
    knows its zone, text in RFC 3339, or milliseconds since the epoch.

    Raises InvalidError; ConflictError where the key stands for a message with other content;
    NotAllowedError, DiskFullError; OverloadedError and UnansweredError when the retries are used
    up; TypeError and ValueError for a body, a delay or a time that cannot be written."""

    replace = _waiting(AsyncProducer.replace)
    """Publish in place of what waits under the key: a timer that each call pushes back. Raises as
    `publish`; ChangedError with `if_match`; UnansweredError after a lost answer, where it may have
    fired already."""

    cancel = _waiting(AsyncProducer.cancel)
    """Cancel a message, by its id or by subject and key; when this returns, it never fires. Raises
    ConflictError, whose `state` says what it is; NotFoundError; ChangedError with `if_match`."""

    get = _waiting(AsyncProducer.get)
    """Look a message up, by its id or by subject and key. Raises NotFoundError."""

    move = _waiting(AsyncProducer.move)
    """Give a message a new due time; `delay` and `deliver_at` as for `publish`. Raises as `cancel`,
    and InvalidError."""

    def pending(
        self,
        subject: str,
        *,
        since: DeliverAt | None = None,
        until: DeliverAt | None = None,
        page: int = 1000,
    ) -> Iterator[Stored]:
        """Messages of a subject that wait, in due order: from `since` on, and before `until`."""
        found = self._producer.pending(subject, since=since, until=until, page=page)
        end = object()

        async def following() -> Stored | object:
            return await anext(found, end)

        while isinstance(message := self._thread.call(following()), Stored):
            yield message


class Consumer:
    """A consumer for programs without asyncio.

        consumer = Consumer("http://127.0.0.1:8080", concurrency=8)

        @consumer.subscribe("order.unpaid")
        def remind(message: Message) -> None:
            ...

        consumer.run()

    Handlers run in threads.

    - `concurrency`: handlers that run at once, for each subscription.
    - `retry_delay_ms`: how long a message waits after its handler has failed, by the attempt
      (from 1); by default a second, doubled each time, at most ten minutes.
    - `wait`: how long a pull waits for messages at the server, as a timedelta, text such as "20s",
      or whole milliseconds.
    - `reconnect`: the waits while the server is away, which last as long as it does.
    - `around`: a context manager for each message, which its handler runs inside of, in the same
      thread: `around=fresh_connections` with `@contextmanager def fresh_connections(message)`.
    - `token`; `tls`: instead of the system's certificates; `transport`, `time`: for tests."""

    def __init__(
        self,
        url: str = URL_DEFAULT,
        *,
        token: str | None = None,
        concurrency: int = CONCURRENCY,
        retry_delay_ms: Callable[[int], int] = backoff_ms,
        wait: Delay = WAIT_MS,
        reconnect: RetryPolicy = RECONNECT,
        around: Around | None = None,
        tls: ssl.SSLContext | None = None,
        transport: Transport | None = None,
        time: Time | None = None,
    ) -> None:
        self._consumer = AsyncConsumer(
            url,
            token=token,
            concurrency=concurrency,
            retry_delay_ms=retry_delay_ms,
            wait=wait,
            reconnect=reconnect,
            around=around,
            tls=tls,
            transport=transport,
            time=time,
        )
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
