"""The consumer: pulls messages that are due, and calls a handler for each.

    long poll ──▶ a task for each message ──▶ handler ──returns──▶ ack         ┐ natural batches,
        ▲           at most `concurrency`        └─────raises──▶ nack, later   ┘ many in one call
        └── while there is room for more         leases are extended until that is answered

While handlers are busy, finished messages are acknowledged along with the next pull: one request
instead of two, which does not wait until they are recorded.

A message is delivered at least once: it comes again when its handler raises, when the process dies,
and when the server was restarted between delivery and acknowledgement. `Message.id` is the same
each time, and `attempt` counts.

The server being away is waited out, with backoff, for ever; a refusal (no such right, a
subscription of another kind) ends `run` with the error. In a cluster the next node is asked where
one cannot be reached (`following`).

Cost: one task per message that runs, none per message that waits. Threads: belongs to the event
loop; handlers that are plain functions run in threads.
"""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from http import HTTPStatus
from typing import Any, TypedDict, TypeVar, Unpack

import msgspec

from delayserver.client.batching import Batcher, Item
from delayserver.client.cutting import decoded_page
from delayserver.client.errors import (
    ClientError,
    ConflictError,
    NotADelayServerError,
    NotFoundError,
    OverloadedError,
    Problem,
    UnansweredError,
)
from delayserver.client.options import (
    URL_DEFAULT,
    ClientConfig,
    ReachOptions,
    options_of_consumer,
)
from delayserver.client.retries import NO_RETRIES, RetryPolicy, Time, answered
from delayserver.client.transport import TIMEOUT_S, ask, decoded, path_of
from delayserver.client.values import Delay, Message, duration
from delayserver.times import format_duration, parse_duration_ms

WAIT_MS = 20_000
LEASE_MS = 30_000
LEASE_MS_MIN = 100
CONCURRENCY = 64
GRACE_S = 30.0
RETRY_DELAY_MS_MAX = 10 * 60_000
RETRY_JITTER = 0.2
PULL_MAX = LEASES_MAX = 10_000
"""In one call, as the API allows."""
LEASES_MAX_BYTES = 512 * 1024
"""The server takes somewhat more than a megabyte in one call."""
RECONNECT = RetryPolicy(first_s=0.1)
PATIENCE_S = 0.25
ENDS_S = 10.0
"""For the last acknowledgements at a stop, when the server does not answer."""

log = logging.getLogger("delayserver.client")

Handler = Callable[[Message], Awaitable[None] | None]
Around = Callable[[Message], AbstractContextManager[Any]]
"""The context manager that a handler runs inside of; in its thread, if it is a plain function."""
H = TypeVar("H", bound=Callable[[Message], Any])
T = TypeVar("T")


class Retry(Exception):
    """Raised by a handler: not now; deliver it again after `delay`. Not an error to be logged.

    `delay` is a timedelta, text such as "5m", or whole milliseconds."""

    def __init__(self, delay: Delay = 0) -> None:
        self.delay_ms = parse_duration_ms(duration(delay))
        super().__init__(f"again in {format_duration(self.delay_ms)}")

    def __reduce__(self) -> tuple[type["Retry"], tuple[int], dict[str, Any]]:
        return type(self), (self.delay_ms,), vars(self)


def backoff_ms(attempt: int) -> int:
    """The usual wait after a handler has failed: 1 s, doubled each time, at most ten minutes."""
    return min(1000 << min(attempt - 1, 20), RETRY_DELAY_MS_MAX)


class _Subscription(msgspec.Struct, eq=False):
    """A handler, and the subscription that feeds it."""

    name: str
    subject: str
    handler: Handler
    is_async: bool
    """Plain functions run in a thread."""
    lease_ms: int
    concurrency: int
    running: set[asyncio.Task[None]] = msgspec.field(default_factory=set)
    leases: dict[str, float] = msgspec.field(default_factory=dict)
    """Until their end is answered; with the moment when they were taken."""
    done: list[str] = msgspec.field(default_factory=list)
    """Leases that the next pull is to acknowledge."""
    is_pulling: bool = False
    """A pull is under way: another is not made before it is answered, which may take long."""
    room: asyncio.Event = msgspec.field(default_factory=asyncio.Event)

    @property
    def path(self) -> str:
        return path_of("subscriptions", self.name)


class _View(msgspec.Struct):
    subject: str
    type: str


class _Pulled(msgspec.Struct):
    messages: list[Message]
    expired: list[str] = []


class _Ended(msgspec.Struct):
    expired: list[str]


class _Lease(Item):
    """A lease that ends; `delay_ms` None: because the message is done.

    `again`: the server may have heard of it, so that it is no news if the lease was over."""

    __slots__ = ("again", "delay_ms", "lease")

    def __init__(self, lease: str, delay_ms: int | None, *, again: bool = False) -> None:
        super().__init__(lease.encode(), asyncio.get_running_loop().create_future())
        self.lease = lease
        self.delay_ms = delay_ms
        self.again = again

    def fail(self, error: Exception) -> None:
        """The client does not wait for it: the message comes again after the lease."""
        self.future.cancel()


class ConsumerOptions(TypedDict, total=False):
    """Options of a consumer; see `AsyncClient.consumer`."""

    concurrency: int
    retry_delay_ms: Callable[[int], int]
    wait: Delay
    reconnect: RetryPolicy
    around: Around | None


class AnyConsumerOptions(ReachOptions, ConsumerOptions, total=False):
    """Options of a consumer that is made without a client, until 0.3."""

    url: str


class ConsumerSettings(msgspec.Struct, frozen=True):
    """The options of a consumer with their defaults."""

    concurrency: int = CONCURRENCY
    retry_delay_ms: Callable[[int], int] = backoff_ms
    wait: Delay = WAIT_MS
    reconnect: RetryPolicy = RECONNECT
    around: Around | None = None


class AsyncConsumer:
    """A consumer for asyncio.

        consumer = AsyncClient("http://127.0.0.1:8080").consumer(concurrency=8)

        @consumer.subscribe("order.unpaid")
        async def remind(message: Message) -> None:
            ...

        await consumer.run()

    Handlers are coroutine functions, or plain ones, which run in threads."""

    def __init__(
        self, server: ClientConfig | str = URL_DEFAULT, **options: Unpack[AnyConsumerOptions]
    ) -> None:
        """Made by `AsyncClient.consumer`, which explains the options."""
        reach, own = options_of_consumer("AsyncClient", server, dict(options))
        wanted = ConsumerSettings(**own)
        self._transport = reach.any_node()
        self._time = reach.time or Time()
        self._concurrency = wanted.concurrency
        self._retry_delay_ms = wanted.retry_delay_ms
        self._wait_ms = parse_duration_ms(duration(wanted.wait))
        self._reconnect = wanted.reconnect
        self._around: Around = wanted.around or nullcontext
        self._subscriptions: dict[str, _Subscription] = {}
        self._stopping = asyncio.Event()
        self._threads: ThreadPoolExecutor | None = None
        self._error: BaseException | None = None
        """The exception that a handler raised to end the program."""

    def subscribe(
        self,
        subject: str,
        *,
        name: str | None = None,
        lease: Delay = LEASE_MS,
        concurrency: int | None = None,
    ) -> Callable[[H], H]:
        """Decorate the handler of a subject's messages: a coroutine function, or a plain one, which
        runs in a thread. If a plain one returns an awaitable, the loop awaits it. `lease` is a
        timedelta, text such as "30s", or whole milliseconds.

        The subscription is made if it is not there. Consumers that give the same name share the
        work; with different names each gets every message. The name is the subject unless another
        one is given; a pattern (`order.*`) needs one. A handler that runs for longer than the lease
        keeps its message: the lease is extended. Raises ValueError, InputError."""
        name = subject if name is None else name
        concurrency = self._concurrency if concurrency is None else concurrency
        lease_ms = parse_duration_ms(duration(lease))
        if lease_ms < LEASE_MS_MIN:
            raise ValueError(f"a lease is at least {format_duration(LEASE_MS_MIN)}")
        if "*" in name:
            raise ValueError(f"the pattern {subject!r} needs a name=, which others may share")
        if name in self._subscriptions:
            raise ValueError(f"there is a handler for the subscription {name!r} already")
        if not 1 <= concurrency <= PULL_MAX:
            raise ValueError(f"concurrency is 1 to {PULL_MAX}")

        def register(handler: H) -> H:
            self._subscriptions[name] = _Subscription(
                name, subject, handler, _is_async(handler), lease_ms, concurrency
            )
            return handler

        return register

    # ── run and stop ───────────────────────────────────────────────────────────────────────────

    def stop(self) -> None:
        """End `run`: pull nothing more, let running handlers finish. Belongs to the event loop; may
        be called from a signal handler of the loop, any number of times."""
        self._stopping.set()

    async def run(self, *, grace_s: float = GRACE_S) -> None:
        """Handle messages until `stop` is called.

        Running handlers then have `grace_s` to finish. After that, or when `run` itself is
        cancelled, they are cancelled and their messages given back. A handler in a thread cannot be
        cancelled; its message comes again after the lease. SystemExit and KeyboardInterrupt of a
        handler do as `stop` does, and are raised at the end. Raises ClientError for a refusal that
        no waiting can mend."""
        if not self._subscriptions:
            raise ValueError("there is nothing to do: decorate a handler with `subscribe`")
        threads = sum(one.concurrency for one in self._subscriptions.values() if not one.is_async)
        if threads:
            self._threads = ThreadPoolExecutor(threads, thread_name_prefix="handler")
        served = [
            asyncio.create_task(self._serve(one, grace_s)) for one in self._subscriptions.values()
        ]
        try:
            await asyncio.wait(served, return_when=asyncio.FIRST_EXCEPTION)
            self._stopping.set()
            await asyncio.wait(served)
        finally:
            for task in served:
                task.cancel()
            await asyncio.gather(*served, return_exceptions=True)
            await self._transport.close()
            if self._threads is not None:
                self._threads.shutdown(wait=False, cancel_futures=True)
        for task in served:
            task.result()
        if self._error is not None:
            raise self._error

    async def _serve(self, subscription: _Subscription, grace_s: float) -> None:
        """One subscription, from its making to its end."""
        ends: Batcher[_Lease] = Batcher(
            partial(self._end, subscription),
            in_flight_max=1,
            batch_max=LEASES_MAX,
            batch_max_bytes=LEASES_MAX_BYTES,
            pending_max=LEASES_MAX,
            pending_max_bytes=LEASES_MAX_BYTES,
        )
        extending = asyncio.create_task(self._keep_extending(subscription))
        try:
            await self._pull_until_stopped(subscription, ends)
            if subscription.running:
                await asyncio.wait(subscription.running, timeout=grace_s)
        finally:
            for task in subscription.running:
                task.cancel()
            if subscription.running:
                await asyncio.wait(subscription.running)
            for lease in subscription.done:
                _end_now(_Lease(lease, None), ends)
            await ends.close(ENDS_S)
            extending.cancel()

    async def _or_stop(self, work: Awaitable[T], patience_s: float = 0) -> T | None:
        """The result of `work`; None when `stop` is called before, and so much time is over."""
        task = asyncio.ensure_future(work)
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait((task, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and patience_s:
                await asyncio.wait((task,), timeout=patience_s)
            return task.result() if task.done() else None
        finally:
            stopping.cancel()
            task.cancel()

    # ── pull ───────────────────────────────────────────────────────────────────────────────────

    async def _pull_until_stopped(self, subscription: _Subscription, ends: Batcher[_Lease]) -> None:
        failures, exists = 0, False
        while not self._stopping.is_set():
            try:
                if not exists:
                    await self._or_stop(self._ensure(subscription))
                    exists = True
                elif len(subscription.running) >= subscription.concurrency:
                    subscription.room.clear()
                    await self._or_stop(subscription.room.wait())
                else:
                    for message in await self._pull_or_stop(subscription, ends):
                        self._begin(subscription, message, ends)
                if failures:
                    log.info("%s: the server answers again", subscription.name)
                failures = 0
            except NotFoundError:
                log.warning("%s: the subscription is gone; it is made again", subscription.name)
                exists = False
            except (UnansweredError, OverloadedError, NotADelayServerError) as error:
                if isinstance(error, NotADelayServerError) and not exists:
                    raise  # the address is wrong; later, it may be a page of a proxy
                failures += 1
                if failures == 1:
                    log.warning("%s: %s; trying again", subscription.name, error)
                retry_after_s = getattr(error, "retry_after_s", None)
                wait_s = self._reconnect.wait_s(failures, self._time.random(), retry_after_s)
                await self._or_stop(self._time.sleep(wait_s))

    async def _ensure(self, subscription: _Subscription) -> None:
        """Make the subscription, unless it is there. An existing one is not changed."""
        try:
            view = await ask(self._transport, "GET", subscription.path, answer_type=_View)
        except NotFoundError:
            document = {
                "subject": subscription.subject,
                "type": "pull",
                "lease": subscription.lease_ms,
            }
            view = await ask(self._transport, "PUT", subscription.path, document, answer_type=_View)
        if (view.subject, view.type) != (subscription.subject, "pull"):
            raise ConflictError(
                Problem(
                    "The subscription is another one",
                    HTTPStatus.CONFLICT,
                    f"{subscription.name!r} is a {view.type} subscription to {view.subject!r}; "
                    "choose another name, or delete it",
                )
            )

    async def _pull_or_stop(
        self, subscription: _Subscription, ends: Batcher[_Lease]
    ) -> list[Message]:
        """Pull, and acknowledge finished messages with it. Returns nothing if `stop` is called
        before."""
        done, subscription.done = subscription.done, []
        for lease in done:
            subscription.leases.pop(lease, None)
        pulled: _Pulled | None = None
        subscription.is_pulling = True
        try:
            # A pull that is given up just when it is answered leaves its messages leased until the
            # lease ends. Messages that are due come within the patience.
            pulled = await self._or_stop(self._pull(subscription, done), PATIENCE_S)
        finally:
            subscription.is_pulling = False
            for lease in done if pulled is None else ():
                # Perhaps the server has not heard of it.
                subscription.leases[lease] = self._time.now_s()
                _end_now(_Lease(lease, None, again=True), ends)
        if pulled is None:
            return []
        _warn_of_expired(subscription, "ack", pulled.expired)
        return pulled.messages

    async def _pull(self, subscription: _Subscription, done: list[str]) -> _Pulled:
        wanted: dict[str, Any] = {
            "max": subscription.concurrency - len(subscription.running),
            "wait": self._wait_ms,
            "lease": subscription.lease_ms,
        }
        if done:
            wanted["ack"] = done
        path, body = subscription.path + "/pull", msgspec.json.encode(wanted)
        timeout_s = self._wait_ms / 1000 + TIMEOUT_S
        answer = await self._transport.request("POST", path, body, timeout_s=timeout_s)
        if not answer.is_success:
            raise answer.error()
        return decoded_page(answer.body, _Pulled, "messages", Message)

    # ── handle ─────────────────────────────────────────────────────────────────────────────────

    def _begin(self, subscription: _Subscription, message: Message, ends: Batcher[_Lease]) -> None:
        subscription.leases[message.lease] = self._time.now_s()
        if self._stopping.is_set():
            _give_back(message, ends)
            return
        task = asyncio.create_task(self._handle(subscription, message, ends))
        subscription.running.add(task)
        task.add_done_callback(subscription.running.discard)
        task.add_done_callback(lambda _: subscription.room.set())

    async def _handle(
        self, subscription: _Subscription, message: Message, ends: Batcher[_Lease]
    ) -> None:
        """Run the handler, and end the lease, whatever becomes of the handler."""
        delay_ms: int | None = None
        in_thread = not subscription.is_async
        try:
            if in_thread:
                loop = asyncio.get_running_loop()
                call = loop.run_in_executor(self._threads, self._called, subscription, message)
                result, error = await call
                in_thread = False
                if error is not None:
                    raise error
                if inspect.isawaitable(result):
                    await result
            else:
                with self._around(message):
                    await subscription.handler(message)  # type: ignore[misc]
        except Retry as retry:
            delay_ms = retry.delay_ms
        except BaseException as error:
            if _is_cancelled() and isinstance(error, asyncio.CancelledError):
                # A handler in a thread goes on there, and its message comes again.
                if in_thread:
                    subscription.leases.pop(message.lease, None)
                else:
                    _give_back(message, ends)
                raise
            if not isinstance(error, Exception | asyncio.CancelledError):
                self._error = self._error or error
                self._stopping.set()
                _give_back(message, ends)
                return
            log.error(
                "%s: the handler failed for message %s (attempt %d)",
                *(subscription.name, message.id, message.attempt),
                exc_info=error,
            )
            delay_ms = self._delay_after(message.attempt)
        if delay_ms is None and not (subscription.is_pulling or self._stopping.is_set()):
            subscription.done.append(message.lease)
            return
        # Where ends are not answered, nothing more is begun.
        await ends.reserve(len(message.lease))
        ends.put(_Lease(message.lease, delay_ms))

    def _called(
        self, subscription: _Subscription, message: Message
    ) -> tuple[Awaitable[None] | None, BaseException | None]:
        """Run a plain handler in its thread. Returns its result, or the exception that it raised. A
        future cannot hold everything that is raised: not StopIteration."""
        result = None  # also if `around` swallows the exception of the handler
        try:
            with self._around(message):
                result = subscription.handler(message)
        except BaseException as error:
            return None, error
        return result, None

    def _delay_after(self, attempt: int) -> int:
        """How long a message waits whose handler has failed."""
        try:
            wait_ms = self._retry_delay_ms(attempt)
            return max(0, int(wait_ms * (1 + RETRY_JITTER * self._time.random())))
        except Exception:
            log.exception("retry_delay_ms failed for attempt %d; the usual wait is taken", attempt)
            return backoff_ms(attempt)

    # ── leases ─────────────────────────────────────────────────────────────────────────────────

    async def _end(self, subscription: _Subscription, leases: list[_Lease]) -> None:
        """Acknowledge or give back, one call for all that were treated the same."""
        by_delay: dict[int | None, list[str]] = {}
        for one in leases:
            by_delay.setdefault(one.delay_ms, []).append(one.lease)
        again = {one.lease for one in leases if one.again}
        for delay_ms, tokens in by_delay.items():
            try:
                if delay_ms is None:
                    over = await self._call(subscription, "ack", tokens, self._reconnect)
                    _warn_of_expired(subscription, "ack", set(over) - again)
                else:
                    call = partial(self._call, subscription, "nack", tokens, self._reconnect)
                    _warn_of_expired(subscription, "nack", await call(delay=delay_ms))
            finally:
                for token in tokens:
                    subscription.leases.pop(token, None)

    async def _keep_extending(self, subscription: _Subscription) -> None:
        """Extend the leases that are held, three times in each, so that one request may fail."""
        third_s = subscription.lease_ms / 3000
        while True:
            await self._time.sleep(third_s)
            now_s = self._time.now_s()
            # A lease that was taken just now has time until the next turn.
            held = [one for one, at_s in subscription.leases.items() if now_s - at_s >= third_s / 2]
            for at in range(0, len(held), LEASES_MAX):
                tokens = held[at : at + LEASES_MAX]
                expired = await self._call(
                    subscription, "extend", tokens, NO_RETRIES, lease=subscription.lease_ms
                )
                _warn_of_expired(subscription, "extend", expired)
                for token in expired:
                    subscription.leases.pop(token, None)

    async def _call(
        self,
        subscription: _Subscription,
        call: str,
        leases: list[str],
        policy: RetryPolicy,
        **fields: int,
    ) -> list[str]:
        """Ack, nack or extend; the leases that had ended before.

        An error is only logged, because the messages come again."""
        body = msgspec.json.encode({"leases": leases, **fields})
        path = f"{subscription.path}/{call}"
        try:
            request = partial(self._transport.request, "POST", path, body)
            answer = await answered(request, policy, self._time)
            if not answer.is_success:
                raise answer.error()
            return decoded(answer.body, _Ended).expired
        except ClientError as error:
            log.warning("%s: %s failed: %s", subscription.name, call, error)
            return []


def _warn_of_expired(subscription: _Subscription, call: str, expired: Collection[str]) -> None:
    if expired:
        log.warning(
            "%s: %d leases had ended before their %s; their messages come again",
            *(subscription.name, len(expired), call),
        )


def _give_back(message: Message, ends: Batcher[_Lease]) -> None:
    _end_now(_Lease(message.lease, 0), ends)


def _end_now(lease: _Lease, ends: Batcher[_Lease]) -> None:
    """Where there is no room for that, the lease ends by itself."""
    if ends.try_reserve(len(lease.data)):
        ends.put(lease)


def _is_async(handler: Handler) -> bool:
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(
        getattr(handler, "__call__", None)  # noqa: B004
    )


def _is_cancelled() -> bool:
    """Whether the task that asks was told to end, and its handler has not raised it by itself."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
