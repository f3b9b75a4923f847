"""The sink of topics of Kafka: a record for each message, settled when a quorum has it.

    ProducerOutlet.send ──▶ librdkafka ──▶ brokers
      report ◀── event loop ◀── the outlet's thread, which polls ◀── on_delivery

A record's value is the body as it was published; its headers are `delay-id`, `delay-subject`,
`delay-key`, `delay-due`, `delay-attempt`, `delay-replay`, and then the message's own. It goes to a
partition by its key as the Java clients choose it.

An outlet (`delayserver.delivery.outlets`) is an idempotent producer, for all subscriptions with the
same brokers and the same time-out: what librdkafka sends again by itself is there once. Whether a
record that was not confirmed within the time-out is there, nobody knows: its message is tried
again, with the same id. What the client has not sent yet is bounded; a subscription whose outlet is
full waits, and its messages in their queue.

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
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from delayserver.delivery.carried import filled, headers
from delayserver.delivery.outlets import OutletError, OutletSink, Report, target_of
from delayserver.delivery.sink import Failed, MayBegin, Sink, Told
from delayserver.delivery.transaction_sink import TransactionSink
from delayserver.records.message import DueDelivery
from delayserver.records.subscriptions import KafkaTarget, Subscription
from delayserver.security.targets import Target, TargetPolicy, split_bootstrap, split_broker
from storage.replicated.kafka_settings import sink_settings
from storage.replicated.transactions import Header, SettledTransactions, TopicRecord

OPEN_TRIES: Final = 5
OPEN_TRY_S: Final = 1.0
"""For the question which brokers there are."""
POLL_S: Final = 0.5
CLOSE_TRIES: Final = 20
CLOSE_POLL_S: Final = 0.05

_REFUSED: Final = (KafkaError._AUTHENTICATION, KafkaError._SSL)

log = logging.getLogger(__name__)

T = TypeVar("T")


# ---- records ---------------------------------------------------------------------------------


def record_key(target: KafkaTarget, delivery: DueDelivery) -> bytes | None:
    """The key of a record; None: any partition."""
    key = filled(target.key, delivery)
    return None if key is None else key.encode()


def record_headers(delivery: DueDelivery) -> list[Header]:
    """The headers of a record. Unlike those of HTTP they are bytes: a key is there as it is."""
    return [(name, value.encode()) for name, value in headers(delivery)]


def topic_record(subscription: Subscription, delivery: DueDelivery) -> TopicRecord:
    """All of a record."""
    target = target_of(subscription, KafkaTarget)
    key = record_key(target, delivery)
    return TopicRecord(target.topic, delivery.payload.body, key, record_headers(delivery))


def login_settings(target: KafkaTarget) -> dict[str, str]:
    """How a client makes itself known, in the words of librdkafka."""
    protocol = ("sasl_" if target.username else "") + ("ssl" if target.tls else "plaintext")
    settings = {"security.protocol": protocol}
    if target.username:
        settings |= {
            "sasl.mechanism": target.mechanism,
            "sasl.username": target.username,
            "sasl.password": target.password,
        }
    return settings


def check_brokers(policy: TargetPolicy, brokers: tuple[Target, ...]) -> None:
    """Both gates of the allow list; waits for name servers. Raises InputError, OSError."""
    for broker in brokers:
        policy.check_broker(broker)
        if broker.is_address:
            continue
        for *_, address in socket.getaddrinfo(broker.host, broker.port, type=socket.SOCK_STREAM):
            policy.check_address(broker.host, broker.port, str(address[0]))


def reason_of(error: KafkaError) -> str:
    """An error as a dead letter names it."""
    return f"Kafka: {error.str()} ({error.name()})"


class Refusals:
    """Whether brokers do not let a client in (`error_cb`), and why. Questions to them do not tell
    that: to whoever asks nobody seems to answer. Belongs to the thread that polls the client."""

    def __init__(self) -> None:
        self._last: KafkaError | None = None

    def __call__(self, error: KafkaError) -> None:
        if error.code() in _REFUSED:
            self._last = error

    def __bool__(self) -> bool:
        return self._last is not None

    def reason(self, error: BaseException) -> str:
        """Why a question has failed."""
        if not isinstance(error, KafkaException):
            return f"Kafka: {error}"
        return reason_of(self._last or error.args[0])


def asked(ask: Callable[[float], T], is_refused: Callable[[], bool]) -> T:
    """Ask brokers, for so many seconds at a time, as long as they may let us in. Raises
    KafkaException."""
    for left in reversed(range(OPEN_TRIES)):
        try:
            return ask(OPEN_TRY_S)
        except KafkaException:
            if not left or is_refused():
                raise
    raise AssertionError


# ---- outlets ---------------------------------------------------------------------------------


class ProducerOutlet:
    """An `Outlet`: a producer, and the thread that polls it. Made in any thread, then of the event
    loop."""

    def __init__(self, settings: Mapping[str, Any], loop: asyncio.AbstractEventLoop) -> None:
        """Raises KafkaException where a setting is wrong."""
        self._loop = loop
        self._reports: deque[tuple[partial[None], str | None]] = deque()
        self._room: deque[asyncio.Future[None]] = deque()
        self._is_ending = False
        self._producer = Producer(dict(settings), logger=log)
        self._thread = threading.Thread(
            target=self._poll, name="delayserver-kafka-sink", daemon=True
        )
        self._thread.start()

    @property
    def is_broken(self) -> bool:
        """See `Outlet`."""
        return self._is_ending

    def brokers(self, topic: str, is_refused: Callable[[], bool]) -> list[tuple[str, int]]:
        """All that the cluster has; in any thread. Raises KafkaException."""
        found = asked(lambda wait_s: self._producer.list_topics(topic, timeout=wait_s), is_refused)
        return [(broker.host, broker.port) for broker in found.brokers.values()]

    async def send(
        self, subscription: Subscription, deliveries: list[DueDelivery], report: Report
    ) -> None:
        """See `Outlet`."""
        for delivery in deliveries:
            record = topic_record(subscription, delivery)
            reported = partial(report, delivery)
            while not self._produce(record, reported):
                room = self._loop.create_future()
                self._room.append(room)
                await room

    def _produce(self, record: TopicRecord, reported: "partial[None]") -> bool:
        """False: there is no room now."""
        if self._is_ending:
            reported("Kafka: the producer was closed")
            return True
        try:
            self._producer.produce(
                record.topic,
                record.value,
                record.key,
                headers=record.headers,
                on_delivery=partial(self._on_report, reported),
            )
        except BufferError:
            return False
        except KafkaException as error:
            reported(reason_of(error.args[0]))
        return True

    # In the thread that polls.

    def _poll(self) -> None:
        while not self._is_ending:
            try:
                self._producer.poll(POLL_S)
            except (KafkaException, SystemError) as error:
                # So the client says that it can do nothing any more: it raises, and where it calls
                # back nevertheless, Python does not like that.
                log.error("a producer is replaced: %s", error)
                self._is_ending = True
            self._hand_over()
        self._purge()

    def _purge(self) -> None:
        """What is not confirmed is reported as failed."""
        self._producer.purge()
        for _ in range(CLOSE_TRIES):
            with suppress(KafkaException, SystemError):
                self._producer.poll(CLOSE_POLL_S)
            if not len(self._producer):
                break
        self._hand_over()

    def _hand_over(self) -> None:
        if self._reports or self._is_ending:
            # The loop is closed already when a server ends whose brokers are away.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._take_reports)

    def _on_report(
        self, reported: "partial[None]", error: KafkaError | None, message: Message | None
    ) -> None:
        self._reports.append((reported, None if error is None else reason_of(error)))

    # On the event loop.

    def _take_reports(self) -> None:
        reports = self._reports
        for _ in range(len(reports)):
            reported, failure = reports.popleft()
            reported(failure)
        while self._room:
            room = self._room.popleft()
            if not room.done():
                room.set_result(None)

    async def close(self) -> None:
        """See `Outlet`."""
        self._is_ending = True
        await asyncio.to_thread(self._thread.join)
        # What was produced while the thread was about to end by itself.
        await asyncio.to_thread(self._purge)
        self._take_reports()


# ---- the sink --------------------------------------------------------------------------------


class KafkaOpener:
    """Makes producers."""

    def __init__(
        self,
        policy: TargetPolicy,
        make_settings: Callable[[str, int], Mapping[str, Any]] = sink_settings,
    ) -> None:
        """`make_settings`: what a producer is made with, for its brokers and a time-out in ms."""
        self._policy = policy
        self._make_settings = make_settings

    def key(self, subscription: Subscription) -> Hashable:
        """See `OutletOpener`."""
        target = target_of(subscription, KafkaTarget)
        login = target.username, target.password, target.mechanism, target.tls
        return target.bootstrap, subscription.timeout_ms, login

    async def open(self, subscription: Subscription) -> ProducerOutlet:
        """See `OutletOpener`."""
        target, loop = target_of(subscription, KafkaTarget), asyncio.get_running_loop()
        settings = self._make_settings(target.bootstrap, subscription.timeout_ms)
        refusals = Refusals()
        more = {**login_settings(target), "error_cb": refusals}
        try:
            await asyncio.to_thread(check_brokers, self._policy, split_bootstrap(target.bootstrap))
            outlet = await asyncio.to_thread(ProducerOutlet, {**settings, **more}, loop)
            try:
                named = await asyncio.to_thread(
                    outlet.brokers, target.topic, lambda: bool(refusals)
                )
                brokers = tuple(split_broker(authority(host, port)) for host, port in named)
                await asyncio.to_thread(check_brokers, self._policy, brokers)
            except BaseException:
                await outlet.close()
                raise
        except (KafkaException, OSError) as error:
            raise OutletError(refusals.reason(error)) from error
        return outlet


class KafkaSink(OutletSink):
    """A `Sink`: at least once, and exactly once by way of `TransactionSink`."""

    def __init__(self, opener: KafkaOpener, in_transactions: TransactionSink | None = None) -> None:
        """`in_transactions`: who delivers exactly once, if anybody can."""
        super().__init__(opener)
        self._in_transactions = in_transactions

    async def deliver(
        self,
        subscription: Subscription,
        deliveries: list[DueDelivery],
        may_begin: MayBegin,
        told: Told,
    ) -> None:
        """See `Sink`."""
        if not subscription.is_exactly_once:
            await super().deliver(subscription, deliveries, may_begin, told)
        elif self._in_transactions is not None:
            await self._in_transactions.deliver(subscription, deliveries, may_begin, told)
        else:
            told(deliveries, Failed("exactly_once: this is no node of a cluster"))

    async def close(self) -> None:
        """See `Sink`."""
        await super().close()
        if self._in_transactions is not None:
            await self._in_transactions.close()


def authority(host: str, port: int) -> str:
    """A broker as `split_broker` reads it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def make_kafka_sink(
    policy: TargetPolicy, transactions: SettledTransactions | None, clock: Callable[[], int]
) -> Sink:
    """The sink of a server; `transactions`: of the owner of a shard whose log stands in Kafka."""
    opener = KafkaOpener(policy)
    if transactions is None:
        return KafkaSink(opener)
    return KafkaSink(opener, TransactionSink(transactions, clock, topic_record))
