"""Producer and consumer for programs without asyncio: the same ones, on a loop in a thread.

`Producer` may be called from any number of threads; what they publish at the same time goes out
together. `Consumer.run` blocks, and ends at SIGTERM and ctrl-C.

Cost: a task and two hand-overs between threads per call. Threads: safe.
"""

import asyncio
import functools
import signal
import ssl
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Concatenate, ParamSpec, Self, TypedDict, TypeVar, Unpack

from delayserver.client.consumer import GRACE_S, LEASE_MS, AsyncConsumer, H
from delayserver.client.errors import ClosedError
from delayserver.client.producer import EXIT_S, URL_DEFAULT, AsyncProducer
from delayserver.client.retries import RetryPolicy, Time
from delayserver.client.transport import Transport
from delayserver.client.values import Delay, DeliverAt, Stored

T = TypeVar("T")
P = ParamSpec("P")


class _Options(TypedDict, total=False):
    token: str | None
    tls: ssl.SSLContext | None
    transport: Transport | None
    time: Time | None


class ProducerOptions(_Options, total=False):
    """Keyword arguments of Producer; AsyncProducer explains each of them."""

    retry: RetryPolicy
    generate_keys: bool
    pending_max: int
    pending_max_bytes: int
    in_flight_max: int


class ConsumerOptions(_Options, total=False):
    """Keyword arguments of Consumer; AsyncConsumer explains each of them."""

    concurrency: int
    retry_delay_ms: Callable[[int], int]
    wait: Delay
    reconnect: RetryPolicy


class _LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._stopped = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="delayserver-client", daemon=True
        )
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine there, and wait for it. Raises ClosedError after `stop`."""
        with self._lock:
            if self._stopped:
                work.close()
                raise ClosedError("it is closed and takes nothing more")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # ctrl-C here; a failure there, which is over
            raise

    def stop(self) -> None:
        """Let every call end, then the thread."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            ending = asyncio.run_coroutine_threadsafe(self._others(), self._loop)
        ending.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _others(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)


def _waiting(
    method: Callable[Concatenate[AsyncProducer, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate["Producer", P], T]:
    """The same method with the same parameters, for a thread that waits for it."""

    @functools.wraps(method)
    def call(producer: "Producer", /, *arguments: P.args, **options: P.kwargs) -> T:
        return producer._thread.call(method(producer._producer, *arguments, **options))

    return call


class Producer:
    """A producer for programs without asyncio. Options and errors: see AsyncProducer.

    with Producer("http://127.0.0.1:8080") as producer:
        published = producer.publish("order.unpaid", {"order": 1001}, delay="30m")
    """

    def __init__(self, url: str = URL_DEFAULT, **options: Unpack[ProducerOptions]) -> None:
        self._producer = AsyncProducer(url, **options)
        self._thread = _LoopThread()

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
    replace = _waiting(AsyncProducer.replace)
    cancel = _waiting(AsyncProducer.cancel)
    get = _waiting(AsyncProducer.get)
    move = _waiting(AsyncProducer.move)

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
    """A consumer for programs without asyncio. Options and errors: see AsyncConsumer.

        consumer = Consumer("http://127.0.0.1:8080", concurrency=8)

        @consumer.subscribe("order.unpaid")
        def remind(message: Message) -> None:
            ...

        consumer.run()

    Handlers run in threads, `concurrency` at once."""

    def __init__(self, url: str = URL_DEFAULT, **options: Unpack[ConsumerOptions]) -> None:
        self._consumer = AsyncConsumer(url, **options)
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
        """Decorate the handler of a subject's messages; AsyncConsumer.subscribe has the options."""
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
