"""Producer and consumer for programs without asyncio: the same ones, on a loop in a thread.

`Producer` may be called from any number of threads; what they publish at the same time goes out
together. It may be made before a fork, and used on both sides. `Consumer.run` blocks, and ends at
SIGTERM and ctrl-C.

Cost: a task and two hand-overs between threads per call. Threads: safe.
"""

import asyncio
import functools
import inspect
import signal
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from delayserver.client.backups import AsyncBackups
from delayserver.client.calling import EXIT_S, RetryingClient
from delayserver.client.consumer import GRACE_S, LEASE_MS, AsyncConsumer, H
from delayserver.client.errors import ClosedError
from delayserver.client.loop_thread import LoopThread
from delayserver.client.producer import AsyncProducer
from delayserver.client.schedules import AsyncSchedules
from delayserver.client.sources import AsyncSources
from delayserver.client.subscriptions import AsyncSubscriptions
from delayserver.client.values import DeadLetter, Delay, DeliverAt, Schedule, Source, Stored

T = TypeVar("T")
V = TypeVar("V")
C = TypeVar("C", bound=RetryingClient)
K = TypeVar("K")
B = TypeVar("B")
P = ParamSpec("P")


def _waiting(
    method: Callable[Concatenate[C, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate["Blocking[C]", P], T]:
    """The same method with the same parameters, for a thread that waits for it."""

    @functools.wraps(method)
    def call(blocking: "Blocking[C]", /, *arguments: P.args, **options: P.kwargs) -> T:
        return blocking._thread.call(method(blocking._client, *arguments, **options))

    return call


def _with_options_of(
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


class Blocking(Generic[C]):
    """A client of asyncio, with a loop in a thread of its own. Any number of threads may call it.

    The thread begins with the first call, and ends with `close`, or when this is dropped."""

    def __init__(self, client: C) -> None:
        self._client = client
        self._thread = LoopThread(functools.partial(client.close, EXIT_S))

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

    def _each(self, found: AsyncIterator[V]) -> Iterator[V]:
        """What an asynchronous iterator gives."""

        async def following() -> V | None:
            return await anext(found, None)

        while (one := self._thread.call(following())) is not None:
            yield one


class Producer(Blocking[AsyncProducer]):
    """A producer for programs without asyncio; any number of threads may call one.

        with Producer("http://127.0.0.1:8080") as producer:
            published = producer.publish("order.unpaid", {"order": 1001}, delay="30m")

    Its thread begins with the first call, and ends with `close`, or when it is dropped. It may be
    made before a fork: the child gets a thread, connections and generated keys of its own."""

    @_with_options_of(AsyncProducer)
    def __init__(self, client: AsyncProducer) -> None:
        super().__init__(client)

    publish = _waiting(AsyncProducer.publish)
    """Publish a message; when this returns, it is durable.

    `body` is anything that msgspec writes as JSON (dataclasses and datetimes among it), a pydantic
    model, or bytes. Give `delay` or `deliver_at`; neither means now. `delay` is a timedelta, text
    such as "30m", or whole milliseconds, as in `delay=30_000`. `deliver_at` is a datetime that
    knows its zone, text in RFC 3339, or milliseconds since the epoch.

    `watch` names up to 8 keys: an `event` for one of them cancels the message, or delivers it at
    once with `on_event="fire"`. With `ack="filed"` it is filed, too, when this returns, so that
    lists show it (`Published.filed` says so).

    What cannot be delivered within `ttl` of its due time becomes a dead letter (`expired`). With
    `jitter` it is due up to so much later: `Published.deliver_at` says when. Of what is due, that
    of a higher `priority` (0, the default, to 9) is delivered first. With `to`, a URL or more
    (`To`), it goes there by webhook, and to no subscription. When it was delivered, or is a
    dead letter, a message that tells so is published under the subject `on_delivered` or `on_dead`,
    for each subscription. Of the messages of a `group`
    each subscription has one under way at a time, in due order. A message with a group gets no key
    by itself, since the key would say to which shard it goes.

    Raises InvalidError; ConflictError where the key stands for a message with other content;
    NotAllowedError, DiskFullError; OverloadedError and UnansweredError when the retries are used
    up; TypeError and ValueError for a body, a delay or a time that cannot be written."""

    publish_all = _waiting(AsyncProducer.publish_all)
    """Publish messages in one step: all of them, or none, in each shard that has some of them. At
    most 10,000. With `atomic` a batch that needs more than one shard is refused before anything is
    done.

    Raises as `publish`, but an InvalidError also where a key stands for other content: its `errors`
    name the bad ones by their index (`/3/key`). PartlyPublishedError where some shards have
    published their part and others have not."""

    event = _waiting(AsyncProducer.event)
    """Something happened: complete every message that watches the key, at once. Durable when this
    returns. After a lost answer it is asked again, and the result is that of the last."""

    heartbeat = _waiting(AsyncProducer.heartbeat)
    """Publish a message unless this is called again within `timeout`, which is a timedelta, text
    such as "10s", or whole milliseconds. Raises as `publish`."""

    get_heartbeat = _waiting(AsyncProducer.get_heartbeat)
    """A heartbeat, and when it expires. Raises NotFoundError."""

    delete_heartbeat = _waiting(AsyncProducer.delete_heartbeat)
    """End a heartbeat: when this returns, it never publishes. Raises NotFoundError."""

    replace = _waiting(AsyncProducer.replace)
    """Publish in place of what waits under the key: a timer that each call pushes back. Raises as
    `publish`; ChangedError with `if_match`; UnansweredError after a lost answer, where it may have
    fired already."""

    cancel = _waiting(AsyncProducer.cancel)
    """Cancel a message, by its id or by subject and key; when this returns, it never fires. Raises
    ConflictError, whose `state` says what it is; NotFoundError; ChangedError with `if_match`."""

    get = _waiting(AsyncProducer.get)
    """Look a message up, by its id or by subject and key. Raises NotFoundError."""

    attempts = _waiting(AsyncProducer.attempts)
    """How each attempt to deliver a message went. Raises NotFoundError."""

    replay = _waiting(AsyncProducer.replay)
    """Have a message that is settled delivered again, to all that had it, or to `subscription`,
    with the same id, and the header `delay-replay`.

    A lost answer is an UnansweredError: asked again, it may deliver it twice. Raises ConflictError,
    whose `state` says what it is, NotFoundError."""

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
        return self._each(self._client.pending(subject, since=since, until=until, page=page))


class Subscriptions(Blocking[AsyncSubscriptions]):
    """The subscriptions of a server, for programs without asyncio.

        with Subscriptions("http://127.0.0.1:8080") as subscriptions:
            subscriptions.put_webhook("shop", "order.*", "http://127.0.0.1:9000/unpaid")

    Durations are timedeltas, text such as "15s", or whole milliseconds."""

    @_with_options_of(AsyncSubscriptions)
    def __init__(self, client: AsyncSubscriptions) -> None:
        super().__init__(client)

    put_webhook = _waiting(AsyncSubscriptions.put_webhook)
    """Have the messages of a subject POSTed to a URL. What is not given has the default of the
    server, also where the subscription is there and had another one.

    - `subject`: exact, or a prefix that ends in `.*`, or `*`.
    - `secret`: `whsec_…`, signs every request; or `secrets`, newest first, to change them over.
    - `timeout`: of one delivery. `max_in_flight`: deliveries at once.
    - `max_attempts`, `backoff`: how often, and the waits before the attempts after the first.
    - `per_second`, `burst`: at most so many messages. `batch_max`, `batch_linger`: several in one
      request, and how long one waits for others.
    - `spread` or `drop_older_than`: what fell due during downtime or a pause is handed out over
      this time, or becomes a dead letter when it is older.
    - `headers`: sent along with each request, such as `authorization`; never shown again.
      `method`: `PUT` instead of POST.
    - `disable_after`: after so long of nothing but failures the server pauses it.

    Raises InvalidError, ConflictError (it is a pull subscription), NotAllowedError."""

    put_pull = _waiting(AsyncSubscriptions.put_pull)
    """Have the messages of a subject wait for consumers. `lease`: the time to acknowledge one,
    unless a consumer asks for another. The rest is as for `put_webhook`."""

    put_kafka = _waiting(AsyncSubscriptions.put_kafka)
    """Have the messages of a subject written to a topic of Kafka.

    - `bootstrap`: brokers to begin with, `host:port` with commas between them.
    - `key`: of each record: `{key}` (the default), `{subject}` or `{id}` of its message, or this
      text.
    - `delivery`: `exactly_once` only from a cluster into its own brokers.
    - `username`, `password`, `mechanism` (SASL; `PLAIN` if nothing is said), `tls`: how brokers let
      somebody in.
    - `timeout`: how long brokers may take to confirm a message; `max_in_flight`: messages that they
      have not confirmed.

    The rest is as for `put_webhook`."""

    put_redis = _waiting(AsyncSubscriptions.put_redis)
    """Have the messages of a subject added to a stream of Redis.

    - `url`: `redis://[user:password@]host[:port][/database]`, or `rediss://` for TLS. Answers show
      `***` instead of the password.
    - `max_length`: about how many entries the stream keeps.
    - `timeout`: how long the broker may take to confirm a message; `max_in_flight`: messages that
      it has not confirmed.

    The rest is as for `put_webhook`."""

    put_nats = _waiting(AsyncSubscriptions.put_nats)
    """Have the messages of a subject published to a stream of NATS JetStream.

    - `url`: `nats://[user:password@]host[:port]`, or `tls://`.
    - `nats_subject`: where to; `{subject}` (the default), `{key}` and `{id}` in it are those of the
      message.

    The rest is as for `put_redis`."""

    put_amqp = _waiting(AsyncSubscriptions.put_amqp)
    """Have the messages of a subject published to an exchange of RabbitMQ.

    - `url`: `amqp://[user:password@]host[:port][/virtual host]`, or `amqps://`.
    - `exchange`: its name; empty: the default exchange, whose routing keys are names of queues.
    - `routing_key`: `{subject}` (the default), `{key}` and `{id}` in it are those of the message.

    The rest is as for `put_redis`."""

    get = _waiting(AsyncSubscriptions.get)
    """A subscription. Raises NotFoundError."""

    list = _waiting(AsyncSubscriptions.list)
    """All that the token may consume, oldest first."""

    pause = _waiting(AsyncSubscriptions.pause)
    """Deliver nothing until it is resumed; what falls due waits. Raises NotFoundError."""

    resume = _waiting(AsyncSubscriptions.resume)
    """Deliver again. Raises NotFoundError."""

    delete = _waiting(AsyncSubscriptions.delete)
    """Delete a subscription; what only it was to get waits for the next one that matches. Raises
    NotFoundError."""

    def dead_letters(self, name: str, *, page: int = 100) -> Iterator[DeadLetter]:
        """Messages that were given up, in the order in which their last attempts were scheduled.
        Raises NotFoundError.

        One request for each `page` of them."""
        return self._each(self._client.dead_letters(name, page=page))

    redrive = _waiting(AsyncSubscriptions.redrive)
    """Deliver dead letters again, all or those with these message ids; how many they are. A lost
    answer is an UnansweredError: asked again, it would redrive what died meanwhile."""

    discard = _waiting(AsyncSubscriptions.discard)
    """Delete a dead letter. Raises NotFoundError."""


class Schedules(Blocking[AsyncSchedules]):
    """The schedules of a server, for programs without asyncio.

        with Schedules("http://127.0.0.1:8080") as schedules:
            schedules.put("daily", "report.daily", {"shop": 7}, cron="0 9 * * MON-FRI")

    Durations are timedeltas, text such as "15s", or whole milliseconds; times are datetimes that
    know their zone, text in RFC 3339, or milliseconds since the epoch."""

    @_with_options_of(AsyncSchedules)
    def __init__(self, client: AsyncSchedules) -> None:
        super().__init__(client)

    put = _waiting(AsyncSchedules.put)
    """Make a schedule, or change it: what is not given has its default then.

    - `cron`: five fields with names, six with seconds in front, or "@daily" and the like, on the
      clock of `timezone` (UTC); or `every`, at least a second.
    - `jitter`: each message is due up to so much later.
    - `catch_up`: what was missed during downtime or a pause: "last" (once), "none", "all".
    - `overlap`: "skip" leaves a run out while the message of the one before is not settled.
    - `start_at`, `end_at`, `max_runs`: when it begins, and ends.
    - `if_match`: only if that is its version (`Schedule.version`).

    Raises InvalidError, NotAllowedError, ChangedError with `if_match`."""

    preview = _waiting(AsyncSchedules.preview)
    """The next times of a schedule that is not made. `subject`: one that the token may publish
    to. Raises InvalidError, NotAllowedError."""

    get = _waiting(AsyncSchedules.get)
    """A schedule, when it runs next, and what it has done. Raises NotFoundError."""

    def list(self, *, page: int = 100) -> Iterator[Schedule]:
        """All that the token may publish or consume, in the order of their names.

        One request for each `page` of them, at most 100."""
        return self._each(self._client.list(page=page))

    pause = _waiting(AsyncSchedules.pause)
    """Publish nothing until it is resumed. Raises NotFoundError, ChangedError."""

    resume = _waiting(AsyncSchedules.resume)
    """Publish again; `catch_up` says what becomes of what it has missed. Raises NotFoundError,
    ChangedError."""

    trigger = _waiting(AsyncSchedules.trigger)
    """Run it now, besides its planned times; the message. Raises NotFoundError. A lost answer is an
    UnansweredError: asked again, it would run twice."""

    delete = _waiting(AsyncSchedules.delete)
    """End a schedule: when this returns, it never runs again. What it has published stays. Raises
    NotFoundError, ChangedError."""


class Sources(Blocking[AsyncSources]):
    """The sources of a server, for programs without asyncio.

        with Sources("http://127.0.0.1:8080") as sources:
            sources.put("orders", "order.unpaid", "127.0.0.1:9092", "orders")

    What a source has published stays, whatever becomes of it."""

    @_with_options_of(AsyncSources)
    def __init__(self, client: AsyncSources) -> None:
        super().__init__(client)

    put = _waiting(AsyncSources.put)
    """Publish what stands in a topic of Kafka, or change that: what is not given has its default
    then.

    - `bootstrap`: brokers to begin with, `host:port` with commas between them.
    - `due_header`: the header that says when a message is due; "delay-until" by default.
    - `group`: the consumer group whose offsets show how far it is.
    - `on_error`: with a record that cannot be published: "skip", or "stop" there.
    - `username`, `password`, `mechanism`, `tls`: for brokers that want to know who comes.
    - `if_match`: only if that is its version (`Source.version`).

    Raises InvalidError, NotAllowedError, ChangedError with `if_match`."""

    get = _waiting(AsyncSources.get)
    """A source, and how far it is. Raises NotFoundError."""

    def list(self, *, page: int = 100) -> Iterator[Source]:
        """All that the token may publish or consume, in the order of their names.

        One request for each `page` of them, at most 100."""
        return self._each(self._client.list(page=page))

    pause = _waiting(AsyncSources.pause)
    """Take nothing until it is resumed. Raises NotFoundError, ChangedError."""

    resume = _waiting(AsyncSources.resume)
    """Go on where it is; one that an error has stopped tries that record again. Raises
    NotFoundError, ChangedError."""

    delete = _waiting(AsyncSources.delete)
    """End a source: when this returns, it takes nothing more. What it has published stays. Raises
    NotFoundError, ChangedError."""


class Backups(Blocking[AsyncBackups]):
    """The backups of a server, for programs without asyncio; with a token that has the scope
    `admin`.

        with Backups("http://127.0.0.1:8080") as backups:
            made = backups.wait(backups.begin("before-the-upgrade").name)

    `delayserver restore` makes a data directory of one."""

    @_with_options_of(AsyncBackups)
    def __init__(self, client: AsyncBackups) -> None:
        super().__init__(client)

    begin = _waiting(AsyncBackups.begin)
    """Begin a backup, in which is what was answered before.

    - `name`: without one it is the time.
    - `verify`: read every byte of it again, and compare it with all others.

    A lost answer is an UnansweredError: asked again, it would begin another. Raises ConflictError
    while one is being made, where there is one of that name, or where the server makes none;
    InvalidError."""

    get = _waiting(AsyncBackups.get)
    """A backup, or how far it is. Raises NotFoundError."""

    wait = _waiting(AsyncBackups.wait)
    """The backup once it is complete or has failed (`Backup.state`). Raises NotFoundError;
    UnansweredError when `timeout_s` is over, and it is made all the same."""

    list = _waiting(AsyncBackups.list)
    """All that there are, the oldest first, and the one that is being made or has failed."""

    delete = _waiting(AsyncBackups.delete)
    """Delete a backup; one that is being made is given up. Raises NotFoundError."""


class Consumer:
    """A consumer for programs without asyncio.

        consumer = Consumer("http://127.0.0.1:8080", concurrency=8)

        @consumer.subscribe("order.unpaid")
        def remind(message: Message) -> None:
            ...

        consumer.run()

    Handlers run in threads, and what is `around` them in the same:
    `around=fresh_connections` with `@contextmanager def fresh_connections(message)`."""

    @_with_options_of(AsyncConsumer)
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
