"""The sink of topics of Kafka: a record for each message, settled when a quorum has it.

    deliver ──▶ Outlet.produce ──▶ librdkafka ──▶ brokers
      told ◀── event loop ◀── the outlet's thread, which polls ◀── report

A record's value is the body as it was published; its headers are `delay-id`, `delay-subject`,
`delay-key`, `delay-due`, `delay-attempt`, `delay-replay`, and then the message's own. It goes to a
partition by its key as the Java clients choose it.

An outlet is an idempotent producer, for all subscriptions with the same brokers and the same
time-out: what librdkafka sends again by itself is there once. Whether a record that was not
confirmed within the time-out is there, nobody knows: its message is tried again, with the same id.
What the client has not sent yet is bounded; a subscription whose outlet is full waits, and its
messages in their queue.

Brokers have to be allowed, by name and by address, and so have those that they name: this is looked
at before the first record goes to a broker. Unlike with webhooks the client looks names up by
itself, so a name server that gives another address a moment later is believed.

Cost: 8 µs of the event loop for a message, and 3 µs of the outlet's thread; five threads for each
outlet. Threads: belongs to the event loop, but for what says so. Polling blocks, so it is done in a
thread; the client has no way to be watched by an event loop from Python.

Rejected: `confluent_kafka.aio`, which hands each call to a thread of a pool. An outlet for each
subscription: a thousand subscriptions of one cluster would have five thousand threads.
"""

import asyncio
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from delayserver.delivery.sink import Confirmed, Failed, Result, Sink, Told
from delayserver.delivery.transaction_sink import TransactionSink
from delayserver.errors import InputError
from delayserver.records.message import REPLAY_HEADER, DueDelivery
from delayserver.records.subscriptions import KafkaTarget, Subscription
from delayserver.security.targets import Target, TargetPolicy, split_bootstrap, split_broker
from delayserver.times import format_time
from storage.replicated.kafka_settings import sink_settings
from storage.replicated.transactions import Header, SettledTransactions, TopicRecord

OPEN_TIMEOUT_S: Final = 5.0
"""For the question which brokers there are."""
POLL_S: Final = 0.5
CLOSE_TRIES: Final = 20
CLOSE_POLL_S: Final = 0.05
IDLE_S: Final = 300.0
"""After which an outlet that nobody uses is closed."""
SWEEP_S: Final = 30.0

log = logging.getLogger(__name__)

Reported = Callable[[KafkaError | None], None]


# ---- records ---------------------------------------------------------------------------------


def record_key(target: KafkaTarget, delivery: DueDelivery) -> bytes | None:
    """The key of a record; None: any partition."""
    match target.key:
        case "{key}":
            key = delivery.payload.key
            return None if key is None else key.encode()
        case "{subject}":
            return delivery.subject.encode()
        case "{id}":
            return delivery.message_id.encode()
        case text:
            return text.encode()


def record_headers(delivery: DueDelivery) -> list[Header]:
    """The headers of a record. Unlike those of HTTP they are bytes: a key is there as it is."""
    payload = delivery.payload
    headers: list[Header] = [
        ("delay-id", delivery.message_id.encode()),
        ("delay-subject", delivery.subject.encode()),
        ("delay-due", format_time(delivery.origin.due_ms).encode()),
        ("delay-attempt", b"%d" % delivery.attempt),
    ]
    if payload.key is not None:
        headers.insert(2, ("delay-key", payload.key.encode()))
    if payload.is_replay:
        headers.append((REPLAY_HEADER, b"1"))
    if payload.headers:
        headers += [(name, value.encode()) for name, value in payload.headers.items()]
    return headers


def topic_record(subscription: Subscription, delivery: DueDelivery) -> TopicRecord:
    """All of a record."""
    target = subscription.target
    assert isinstance(target, KafkaTarget)
    key, headers = record_key(target, delivery), record_headers(delivery)
    return TopicRecord(target.topic, delivery.payload.body, key, headers)


def reason_of(error: KafkaError) -> str:
    """An error as a dead letter names it."""
    return f"Kafka: {error.str()} ({error.name()})"


# ---- outlets ---------------------------------------------------------------------------------


class Outlet:
    """A producer, and the thread that polls it. Made in any thread, then of the event loop."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        loop: asyncio.AbstractEventLoop,
        fatal: Callable[[Exception], None],
    ) -> None:
        """`fatal` is called on the event loop when the producer can do nothing any more.

        Raises KafkaException where a setting is wrong."""
        self.users = 0
        self.idle_since_s = loop.time()
        self._loop = loop
        self._fatal = fatal
        self._reports: deque[tuple[Reported, KafkaError | None]] = deque()
        self._room: deque[asyncio.Future[None]] = deque()
        self._is_ending = False
        self._producer = Producer(dict(settings), logger=log)
        self._thread = threading.Thread(
            target=self._poll, name="delayserver-kafka-sink", daemon=True
        )
        self._thread.start()

    def brokers(self, topic: str) -> list[tuple[str, int]]:
        """All that the cluster has. Asks one of them; in any thread. Raises KafkaException."""
        found = self._producer.list_topics(topic, timeout=OPEN_TIMEOUT_S).brokers.values()
        return [(broker.host, broker.port) for broker in found]

    async def produce(self, target: KafkaTarget, delivery: DueDelivery, reported: Reported) -> None:
        """Send a record, as soon as there is room for it; `reported` is told what came of it.

        Raises KafkaException: nothing was sent."""
        value, key = delivery.payload.body, record_key(target, delivery)
        headers, on_delivery = record_headers(delivery), partial(self._on_report, reported)
        while True:
            if self._is_ending:
                raise KafkaException(KafkaError(KafkaError._DESTROY))
            try:
                self._producer.produce(
                    target.topic, value, key, headers=headers, on_delivery=on_delivery
                )
                return
            except BufferError:
                room = self._loop.create_future()
                self._room.append(room)
                await room

    # In the thread that polls.

    def _poll(self) -> None:
        while not self._is_ending:
            try:
                self._producer.poll(POLL_S)
            except (KafkaException, SystemError) as error:
                # So the client says that it can do nothing any more: it raises, and where it calls
                # back nevertheless, Python does not like that.
                self._is_ending = True
                with suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(self._fatal, error)
            if self._reports:
                # The loop is closed already when a server ends whose brokers are away.
                with suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(self._take_reports)

    def _on_report(
        self, reported: Reported, error: KafkaError | None, message: Message | None
    ) -> None:
        self._reports.append((reported, error))

    # On the event loop.

    def _take_reports(self) -> None:
        reports = self._reports
        for _ in range(len(reports)):
            reported, error = reports.popleft()
            reported(error)
        while self._room:
            room = self._room.popleft()
            if not room.done():
                room.set_result(None)

    def close(self) -> None:
        """What is not confirmed is reported as failed. In any thread."""
        self._is_ending = True
        self._thread.join()
        self._producer.purge()
        for _ in range(CLOSE_TRIES):
            with suppress(KafkaException, SystemError):
                self._producer.poll(CLOSE_POLL_S)
            if not len(self._producer):
                break
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._take_reports)


# ---- the sink --------------------------------------------------------------------------------


class _Handed:
    """What was given to `deliver` together."""

    def __init__(self, count: int, told: Told) -> None:
        self._left = count
        self._told = told
        self._waiting: list[tuple[DueDelivery, KafkaError | None]] = []
        self.is_over = False
        """Its task was cancelled."""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def tell(self, deliveries: list[DueDelivery], result: Result) -> None:
        if self.is_over:
            return
        self._told(deliveries, result)
        self._left -= len(deliveries)
        if not self._left:
            self.done.set_result(None)

    def report(self, delivery: DueDelivery, error: KafkaError | None) -> None:
        """What came of one. Those that come in one turn of the event loop are told together."""
        if not self._waiting:
            self.done.get_loop().call_soon(self._tell_waiting)
        self._waiting.append((delivery, error))

    def _tell_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        taken = [delivery for delivery, error in waiting if error is None]
        if taken:
            self.tell(taken, Confirmed())
        for delivery, error in waiting:
            if error is not None:
                self.tell([delivery], Failed(reason_of(error)))


class KafkaSink:
    """A `Sink`: at least once, and exactly once by way of `TransactionSink`."""

    def __init__(
        self,
        policy: TargetPolicy,
        in_transactions: TransactionSink | None = None,
        make_settings: Callable[[str, int], Mapping[str, Any]] = sink_settings,
    ) -> None:
        """`in_transactions`: who delivers exactly once, if anybody can. `make_settings`: what a
        producer is made with, for its brokers and a time-out in ms."""
        self._in_transactions = in_transactions
        self._policy = policy
        self._make_settings = make_settings
        self._outlets: dict[tuple[str, int], asyncio.Task[Outlet]] = {}
        self._sweeper: asyncio.TimerHandle | None = None
        self._dropping: set[asyncio.Task[None]] = set()

    async def deliver(
        self, subscription: Subscription, deliveries: list[DueDelivery], told: Told
    ) -> None:
        """See `Sink`."""
        target = subscription.target
        assert isinstance(target, KafkaTarget)
        handed = _Handed(len(deliveries), told)
        if target.exactly_once:
            if self._in_transactions is not None:
                await self._in_transactions.deliver(subscription, deliveries, told)
            else:
                handed.tell(deliveries, Failed("exactly_once: this is no node of a cluster"))
            return
        try:
            outlet = await self._outlet(target, subscription.timeout_ms)
        except InputError as error:
            handed.tell(deliveries, Failed(error.detail))
            return
        except (KafkaException, OSError) as error:
            handed.tell(deliveries, Failed(_text(error)))
            return
        outlet.users += 1
        try:
            for delivery in deliveries:
                try:
                    await outlet.produce(target, delivery, partial(handed.report, delivery))
                except KafkaException as error:
                    handed.report(delivery, error.args[0])
            await handed.done
        finally:
            handed.is_over = True
            outlet.users -= 1
            outlet.idle_since_s = asyncio.get_running_loop().time()

    async def close(self) -> None:
        """See `Sink`."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        for key in list(self._outlets):
            await self._drop(key)
        await asyncio.gather(*self._dropping)
        if self._in_transactions is not None:
            await self._in_transactions.close()

    # Outlets

    async def _outlet(self, target: KafkaTarget, timeout_ms: int) -> Outlet:
        """Raises InputError where a broker is not allowed, KafkaException, OSError."""
        key = target.bootstrap, timeout_ms
        loop = asyncio.get_running_loop()
        opening = self._outlets.get(key)
        if opening is None:
            opening = self._outlets[key] = loop.create_task(self._open(key, target.topic))
            if self._sweeper is None:
                self._sweeper = loop.call_later(SWEEP_S, self._sweep)
        try:
            # Shared by all who wait: that one of them is cancelled does not end it.
            return await asyncio.shield(opening)
        except Exception:
            if self._outlets.get(key) is opening:
                del self._outlets[key]
            raise

    async def _open(self, key: tuple[str, int], topic: str) -> Outlet:
        bootstrap, timeout_ms = key
        loop = asyncio.get_running_loop()
        await asyncio.to_thread(self._check, split_bootstrap(bootstrap))

        def fatal(error: Exception) -> None:
            log.error("the producer for %s is replaced: %s", bootstrap, error)
            self._drop_soon(key)

        settings = self._make_settings(bootstrap, timeout_ms)
        outlet = await asyncio.to_thread(Outlet, settings, loop, fatal)
        try:
            named = await asyncio.to_thread(outlet.brokers, topic)
            brokers = tuple(split_broker(_authority(host, port)) for host, port in named)
            await asyncio.to_thread(self._check, brokers)
        except BaseException:
            await asyncio.to_thread(outlet.close)
            raise
        return outlet

    def _check(self, brokers: tuple[Target, ...]) -> None:
        """Both gates of the allow list; waits for name servers. Raises InputError, OSError."""
        for broker in brokers:
            self._policy.check_broker(broker)
            if broker.is_address:
                continue
            for *_, address in socket.getaddrinfo(
                broker.host, broker.port, type=socket.SOCK_STREAM
            ):
                self._policy.check_address(broker.host, broker.port, str(address[0]))

    def _drop_soon(self, key: tuple[str, int]) -> None:
        task = asyncio.get_running_loop().create_task(self._drop(key))
        self._dropping.add(task)
        task.add_done_callback(self._dropping.discard)

    async def _drop(self, key: tuple[str, int]) -> None:
        opening = self._outlets.pop(key, None)
        if opening is None:
            return
        with suppress(Exception):
            outlet = await opening
            await asyncio.to_thread(outlet.close)

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        for key, opening in list(self._outlets.items()):
            if opening.done() and not opening.exception():
                outlet = opening.result()
                if not outlet.users and now_s - outlet.idle_since_s >= IDLE_S:
                    self._drop_soon(key)
        self._sweeper = loop.call_later(SWEEP_S, self._sweep) if self._outlets else None


def _authority(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _text(error: KafkaException | OSError) -> str:
    if isinstance(error, KafkaException):
        return reason_of(error.args[0])
    return f"Kafka: {error}"


def make_kafka_sink(
    policy: TargetPolicy, transactions: SettledTransactions | None, clock: Callable[[], int]
) -> Sink:
    """The sink of a server; `transactions`: of the owner of a shard whose log stands in Kafka."""
    if transactions is None:
        return KafkaSink(policy)
    return KafkaSink(policy, TransactionSink(transactions, clock, topic_record))
