"""The sink of topics of Kafka: a record for each message, settled when a quorum has it.

    ProducerOutlet.send ──▶ librdkafka ──▶ brokers
      report ◀── event loop ◀── the outlet's thread, which polls ◀── on_delivery

A record's value is the body as it was published; its headers are `delay-id`, `delay-subject`,
`delay-key`, `delay-due`, `delay-attempt`, `delay-replay`, and then the message's own. It goes to a
partition by its key as the Java clients choose it.

An outlet (`delayserver.delivery.outlets`) is an idempotent producer, for all subscriptions with the
same brokers and the same time-out: a record that librdkafka sends again by itself is there once. A
record that was not confirmed within the time-out may be there or not, so its message is tried
again, with the same id. The window of the outlet bounds the records that the client has not sent
yet, with a share for each subscription; the others wait in front of it.

Records that go to a partition together share a batch, and a broker refuses a batch as a whole: as
too large, or since one of its records is bad. Such an answer is shared, so the messages go again in
halves, then singly, by a producer of their own.

Brokers have to be allowed, by name and by address, and so have those that they name: this is
checked before the first record goes to a broker. Unlike with webhooks the client looks names up by
itself, so a name server that gives another address a moment later is believed.

Cost: 8 µs of the event loop for a message, and 3 µs of the outlet's thread; five threads for each
outlet. Threads: belongs to the event loop, except methods that say otherwise. Polling blocks, so it
is done in a thread; the client has no way to be watched by an event loop from Python.

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

from delayserver.delivery.answers import (
    STORED,
    UNSENT,
    AnswerTable,
    BrokerAnswer,
    Certainty,
    Meaning,
    not_stored,
)
from delayserver.delivery.carried import filled, headers
from delayserver.delivery.complaints import QuietLogger
from delayserver.delivery.outlet import OutletError, Report, target_of
from delayserver.delivery.outlets import OutletSink
from delayserver.delivery.own_threads import post, post_error, post_result
from delayserver.delivery.sink import Failed, MayBegin, ResultCallback, Sink
from delayserver.delivery.transaction_sink import TransactionSink
from delayserver.errors import InputError
from delayserver.records.message import DueDelivery
from delayserver.records.subscriptions import KafkaTarget, Subscription
from delayserver.security.targets import Target, TargetPolicy, split_broker
from storage.replicated.kafka_settings import sink_settings
from storage.replicated.transactions import Header, SettledTransactions, TopicRecord

OPEN_TRIES: Final = 5
OPEN_TRY_S: Final = 1.0
"""For the question which brokers there are."""
POLL_S: Final = 0.5
CLOSE_TRIES: Final = 20
CLOSE_POLL_S: Final = 0.05
CLOSE_S: Final = 5.0
"""A thread that a name server holds up is not waited for any longer."""
WINDOW_BYTES: Final = 32 * 1024 * 1024

_REFUSED: Final = (KafkaError._AUTHENTICATION, KafkaError._SSL)

log = QuietLogger(logging.getLogger(__name__))

_NOT_STORED: Final = Meaning(Certainty.NOT_STORED)
_NEIGHBOUR: Final = Meaning(Certainty.NOT_STORED, is_shared=True)
_UNKNOWN: Final = Meaning(Certainty.UNKNOWN)
_LOST: Final = Meaning(Certainty.UNKNOWN, is_shared=True)

ANSWERS: Final = AnswerTable(
    "Kafka",
    {
        # The whole batch is refused, and one record may be the cause.
        KafkaError.MSG_SIZE_TOO_LARGE: _NEIGHBOUR,
        KafkaError.RECORD_LIST_TOO_LARGE: _NEIGHBOUR,
        KafkaError.INVALID_MSG: _NEIGHBOUR,
        KafkaError.INVALID_MSG_SIZE: _NEIGHBOUR,
        KafkaError.INVALID_RECORD: _NEIGHBOUR,
        KafkaError.INVALID_TIMESTAMP: _NEIGHBOUR,
        KafkaError.POLICY_VIOLATION: _NEIGHBOUR,
        KafkaError.UNSUPPORTED_COMPRESSION_TYPE: _NEIGHBOUR,
        # The topic, for all of them.
        KafkaError.UNKNOWN_TOPIC_OR_PART: _NOT_STORED,
        KafkaError.UNKNOWN_TOPIC_ID: _NOT_STORED,
        KafkaError.TOPIC_EXCEPTION: _NOT_STORED,
        KafkaError.TOPIC_AUTHORIZATION_FAILED: _NOT_STORED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED: _NOT_STORED,
        KafkaError.INVALID_REQUIRED_ACKS: _NOT_STORED,
        KafkaError.UNSUPPORTED_FOR_MESSAGE_FORMAT: _NOT_STORED,
        KafkaError._UNKNOWN_TOPIC: _NOT_STORED,
        KafkaError._UNKNOWN_PARTITION: _NOT_STORED,
        KafkaError._INVALID_ARG: _NOT_STORED,
        # Leaders that move, and replicas that are away: the client has asked until the time was up.
        KafkaError.LEADER_NOT_AVAILABLE: _NOT_STORED,
        KafkaError.NOT_LEADER_FOR_PARTITION: _NOT_STORED,
        KafkaError.FENCED_LEADER_EPOCH: _NOT_STORED,
        KafkaError.UNKNOWN_LEADER_EPOCH: _NOT_STORED,
        KafkaError.BROKER_NOT_AVAILABLE: _NOT_STORED,
        KafkaError.REPLICA_NOT_AVAILABLE: _NOT_STORED,
        KafkaError.NOT_ENOUGH_REPLICAS: _NOT_STORED,
        KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND: _UNKNOWN,
        KafkaError.REQUEST_TIMED_OUT: _UNKNOWN,
        KafkaError.NETWORK_EXCEPTION: _UNKNOWN,
        KafkaError.KAFKA_STORAGE_ERROR: _UNKNOWN,
        KafkaError.UNKNOWN: _UNKNOWN,
        KafkaError._MSG_TIMED_OUT: _UNKNOWN,
        KafkaError._TIMED_OUT: _UNKNOWN,
        KafkaError._TRANSPORT: _UNKNOWN,
        KafkaError._ALL_BROKERS_DOWN: _UNKNOWN,
        # A topic that was made anew does not know the numbers of this producer; another begins
        # with new ones.
        KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER: _LOST,
        KafkaError.UNKNOWN_PRODUCER_ID: _LOST,
        KafkaError.INVALID_PRODUCER_EPOCH: _LOST,
        KafkaError.DUPLICATE_SEQUENCE_NUMBER: Meaning(Certainty.STORED),
        # The client can do nothing any more, or was told to end.
        KafkaError._FATAL: _LOST,
        KafkaError._STATE: _LOST,
        KafkaError._GAPLESS_GUARANTEE: _LOST,
        KafkaError._PURGE_QUEUE: _NEIGHBOUR,
        KafkaError._PURGE_INFLIGHT: _LOST,
        KafkaError._DESTROY: _LOST,
        KafkaError._QUEUE_FULL: _NOT_STORED,
        KafkaError._AUTHENTICATION: _NOT_STORED,
        KafkaError._SSL: _NOT_STORED,
    },
)

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
    that: for the caller they just stay without an answer. Belongs to the thread that polls the
    client."""

    def __init__(self) -> None:
        self._last: KafkaError | None = None

    def __call__(self, error: KafkaError) -> None:
        if error.code() in _REFUSED:
            self._last = error

    def __bool__(self) -> bool:
        return self._last is not None

    def forget(self) -> None:
        """They let the client in."""
        self._last = None

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
            if is_refused() or not left:
                raise
    raise AssertionError


def answer_of(error: KafkaError) -> BrokerAnswer:
    """The answer about a record that an error of the client stands for."""
    return ANSWERS.of((error.code(),), f"{error.str()} ({error.name()})", error.name())


# ---- outlets ---------------------------------------------------------------------------------


class ProducerOutlet:
    """An `Outlet`: a producer, and the thread that makes it, asks for its brokers, and polls it."""

    window_bytes = WINDOW_BYTES
    is_blocked = False
    connections, channels = 1, 0

    def __init__(
        self,
        settings: Mapping[str, Any],
        check: Callable[[str], None],
        topic: str,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """`check`: raises where brokers are not allowed, of `host:port` with commas; in the
        thread."""
        self._loop = loop
        self._settings = settings
        self._check = check
        self._topic = topic
        self._refusals = Refusals()
        self._reports: deque[tuple[partial[None], BrokerAnswer]] = deque()
        self._is_ending = False
        self._producer: Producer | None = None
        self.opened: asyncio.Future[None] = loop.create_future()
        """Raises OutletError, InputError."""
        self._ended: asyncio.Future[None] = loop.create_future()
        self._thread = threading.Thread(
            target=self._run, name="delayserver-kafka-sink", daemon=True
        )
        self._thread.start()

    @property
    def is_broken(self) -> bool:
        """See `Outlet`."""
        return self._is_ending

    def send(
        self, subscription: Subscription, deliveries: list[DueDelivery], report: Report
    ) -> None:
        """See `Outlet`."""
        for delivery in deliveries:
            self._produce(topic_record(subscription, delivery), partial(report, delivery))

    def _produce(self, record: TopicRecord, reported: "partial[None]") -> None:
        assert self._producer is not None
        if self._is_ending:
            reported(UNSENT)
            return
        try:
            self._producer.produce(
                record.topic,
                record.value,
                record.key,
                headers=record.headers,
                on_delivery=partial(self._on_report, reported),
            )
        except BufferError:
            reported(not_stored("Kafka: the client is full"))
        except KafkaException as error:
            cause = error.args[0]
            if cause.fatal() or cause.code() == KafkaError._FATAL:
                self._is_ending = True
                reported(UNSENT)
            else:
                reported(answer_of(cause).alone())
        except Exception as error:
            # A client that cannot write a message down raises about that message alone.
            reported(ANSWERS.of_error(error).alone())

    def let_go(self, subscription_id: int) -> None:
        """See `Outlet`. Nothing is kept for one subscription."""

    # In the thread.

    def _run(self) -> None:
        try:
            self._open()
        except InputError as error:
            post_error(self.opened, error)
        except Exception as error:
            # The client's, the network's; whatever it is, those who wait have to be told.
            post_error(self.opened, OutletError(self._refusals.reason(error)))
        else:
            post_result(self.opened, None)
            self._poll()
        finally:
            self._is_ending = True
            post_result(self._ended, None)

    def _open(self) -> None:
        """Raises KafkaException, InputError, OSError."""
        self._check(str(self._settings["bootstrap.servers"]))
        more = {"error_cb": self._refusals}
        self._producer = producer = Producer({**self._settings, **more}, logger=log)

        def is_in_vain() -> bool:
            producer.poll(0)  # nothing was produced yet, so only errors come
            return self._is_ending or bool(self._refusals)

        found = asked(lambda wait_s: producer.list_topics(self._topic, timeout=wait_s), is_in_vain)
        named = [authority(broker.host, broker.port) for broker in found.brokers.values()]
        self._check(",".join(named))

    def _poll(self) -> None:
        assert self._producer is not None
        while not self._is_ending:
            try:
                self._producer.poll(POLL_S)
            except (KafkaException, SystemError) as error:
                # So the client says that it can do nothing any more: it raises, and where it calls
                # back nevertheless, Python does not like that.
                log.error("a producer is replaced: %s", error)
                self._is_ending = True
            self._hand_over()
        self._purge(self._producer)

    def _purge(self, producer: Producer) -> None:
        """Records that are not confirmed are reported as unknown."""
        producer.purge()
        for _ in range(CLOSE_TRIES):
            with suppress(KafkaException, SystemError):
                producer.poll(CLOSE_POLL_S)
            if not len(producer):
                break
        self._hand_over()

    def _hand_over(self) -> None:
        if self._reports or self._is_ending:
            post(self._loop, self._take_reports)

    def _on_report(
        self, reported: "partial[None]", error: KafkaError | None, message: Message | None
    ) -> None:
        if error is None:
            answer = STORED
        else:
            answer = answer_of(error)
            if error.fatal():
                self._is_ending = True
        self._reports.append((reported, answer))

    # On the event loop.

    def _take_reports(self) -> None:
        reports = self._reports
        for _ in range(len(reports)):
            reported, answer = reports.popleft()
            reported(answer)

    async def close(self) -> None:
        """See `Outlet`."""
        self._is_ending = True
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await asyncio.shield(self._ended)
        self._take_reports()
        if self._producer is not None and self._ended.done():
            # Records may have been produced while the thread was about to end by itself.
            self._producer.purge()
            self._producer.poll(0)
            self._take_reports()


# ---- the sink --------------------------------------------------------------------------------


class KafkaOpener:
    """Makes producers."""

    def __init__(
        self,
        policy: TargetPolicy,
        make_settings: Callable[[str, int], Mapping[str, Any]] = sink_settings,
    ) -> None:
        """`make_settings`: the settings of a producer, for its brokers and a time-out in ms."""
        self._policy = policy
        self._make_settings = make_settings

    def key(self, subscription: Subscription) -> Hashable:
        """See `OutletOpener`."""
        target = target_of(subscription, KafkaTarget)
        login = target.username, target.password, target.mechanism, target.tls
        return target.bootstrap, subscription.timeout_ms, login

    async def open(self, subscription: Subscription) -> ProducerOutlet:
        """See `OutletOpener`."""
        target = target_of(subscription, KafkaTarget)
        settings = {
            **self._make_settings(target.bootstrap, subscription.timeout_ms),
            **login_settings(target),
        }

        def check(brokers: str) -> None:
            check_brokers(self._policy, tuple(map(split_broker, brokers.split(","))))

        loop = asyncio.get_running_loop()
        outlet = ProducerOutlet(settings, check, target.topic, loop)
        try:
            await asyncio.shield(outlet.opened)
        except BaseException:
            await outlet.close()
            raise
        return outlet


class KafkaSink(OutletSink):
    """A `Sink`: at least once, and exactly once by way of `TransactionSink`."""

    def __init__(self, opener: KafkaOpener, in_transactions: TransactionSink | None = None) -> None:
        """`in_transactions`: the sink that delivers exactly once, if there is one."""
        super().__init__(opener)
        self._in_transactions = in_transactions

    async def deliver(
        self,
        subscription: Subscription,
        deliveries: list[DueDelivery],
        may_begin: MayBegin,
        told: ResultCallback,
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
