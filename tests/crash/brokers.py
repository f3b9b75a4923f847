"""Traffic through brokers: into a Redis, NATS, RabbitMQ and Kafka, and out of a topic.

    sinks     a subscription into each of the brokers, or into all of them at once
    source    a topic of that Kafka, to which a producer writes all the time; the records that the
              server publishes from it go into the Redis
    the end   all streams, queues and topics are read whole; an entry is a delivery

Each offset of the topic is an order like any: lost, or published twice (under two ids), it is a
broken promise. An entry may be there twice, with the same id, if the server or its own broker was
killed while it was on its way; such an entry may also overtake a cancel that was answered.

Redis, NATS and Kafka say when they had an entry. RabbitMQ does not: marks that are written into its
queue some times a second say between which moments that was.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import aiormq
from aiormq.exceptions import AMQPError, ChannelInvalidStateError
from confluent_kafka import KafkaError, Message, Producer

from delayserver.cli.demo.ledger import Order
from delayserver.cli.demo.process import ServerFailed
from delayserver.cli.session import path
from delayserver.client.errors import UnansweredError
from tests.crash.servers import Blow
from tests.harness.ledger import MARK, timed
from tests.harness.notes import Notes
from tests.harness.traffic import Doors, Traffic, pause
from tests.sinks.kafka_server import KafkaBroker
from tests.sinks.nats_server import NatsServer
from tests.sinks.programs import ESCAPED, USER, Broker, find
from tests.sinks.rabbitmq_server import RabbitMq
from tests.sinks.redis_server import RedisServer

PLACE: Final = "due-load"
"""The stream, queue or topic of each broker."""
WHERE: Final[Mapping[str, Mapping[str, str]]] = {
    Blow.REDIS: {"stream": PLACE},
    Blow.NATS: {"nats_subject": PLACE},
    Blow.AMQP: {"routing_key": PLACE},
    Blow.KAFKA: {"topic": PLACE},
}
ALL: Final = "load.all.x"
FED, FED_PLACE, FEED = "load.fed", "due-fed", "feed"
RETRY: Final = {"max_attempts": 100, "backoff": ["200ms", "500ms"] + ["1s"] * 97}
MARK_S: Final = 0.05
FEED_S: Final = (0.05, 0.4)
FLUSH_S: Final = 30.0
PROGRAMS: Final = {
    "redis-server": "ensure_redis",
    "nats-server": "ensure_nats",
    "rabbitmq-server": "ensure_rabbitmq",
    "java": "ensure_kafka",
}


def missing_programs() -> list[str]:
    """The programs that are not installed, and the name in scripts/environment.sh that installs
    each."""
    return [f"{name} ({ensure})" for name, ensure in PROGRAMS.items() if find(name) is None]


class Brokers:
    """The four brokers of a run."""

    def __init__(self, directory: Path) -> None:
        self.rabbitmq = RabbitMq(directory / "amqp")
        self.kafka = KafkaBroker(directory / "kafka")
        self.redis = RedisServer(directory / "redis")
        self.by_kind: dict[str, Broker] = {
            Blow.REDIS: self.redis,
            Blow.NATS: NatsServer(directory / "nats"),
            Blow.AMQP: self.rabbitmq,
            Blow.KAFKA: self.kafka,
        }


class BrokerTraffic(Traffic):
    """Publishers, a producer of the topic, and readers of all brokers."""

    PUBLISHERS = 4
    PAUSE_S = 0.1
    subscribers: Mapping[str, tuple[str, ...]] = {
        **{f"load.{kind}": (kind,) for kind in WHERE},
        ALL: tuple(f"all-{kind}" for kind in WHERE),
    }
    subjects = tuple(subscribers)

    def __init__(self, notes: Notes, client: Doors, seed: int, brokers: Brokers) -> None:
        super().__init__(notes, client, seed)
        self._brokers = brokers
        logging.getLogger("aiormq").setLevel(logging.CRITICAL)  # its broker is away now and then

    async def subscribe(self, url: str) -> None:
        kafka, redis = self._brokers.kafka, self._brokers.redis
        for kind, broker in self._brokers.by_kind.items():
            await asyncio.to_thread(broker.prepare, PLACE)
            target = {**broker.definition(PLACE), **WHERE[kind], "retry": RETRY}
            for name, subject in ((kind, f"load.{kind}"), (f"all-{kind}", "load.all.*")):
                await self._define("subscriptions", name, {"subject": subject, **target})
        await asyncio.to_thread(kafka.prepare, FEED)
        target = {**redis.definition(PLACE), "stream": FED_PLACE, "retry": RETRY}
        await self._define("subscriptions", FED, {"subject": FED, **target})
        await self._define("sources", FED, {**kafka.definition(FEED), "subject": FED})

    async def _define(self, kind: str, name: str, document: object) -> None:
        try:
            await self.ask_once("PUT", path(kind, name), document)
        except UnansweredError as error:
            # Nothing is killed yet: to ask again would not help.
            raise ServerFailed(f"{kind}/{name} is not accepted: {error}") from error

    def writers(self) -> list[Coroutine[Any, Any, None]]:
        return [*super().writers(), self._feed()]

    def readers(self) -> list[Coroutine[Any, Any, None]]:
        return [self._mark()]

    async def _feed(self) -> None:
        """Write to the topic of the source, without knowing of the server."""
        producer = Producer(
            {
                **self._brokers.kafka.settings,
                "enable.idempotence": True,  # each record is there once
                "message.timeout.ms": 300_000,
                "log_level": 2,
            }
        )
        try:
            while True:
                for _ in range(self._random.randint(1, 20)):
                    order = self.ledger.order(FED, (FED,), with_key=False)
                    delay_ms = self._random.choice((0, 100, 1000, 3000))
                    self.ledger.publish_asked(order, delay_ms)
                    producer.produce(
                        FEED,
                        json.dumps(order.body),
                        headers={"delay-until": f"{delay_ms}ms".encode()},
                        on_delivery=partial(self._fed, order),
                    )
                await asyncio.to_thread(producer.poll, 0)
                await pause(self._random, *FEED_S)
        finally:
            if left := await asyncio.to_thread(producer.flush, FLUSH_S):
                self.notes.fail(f"{left} records could not be written to the topic")

    def _fed(self, order: Order, error: KafkaError | None, _: Message) -> None:
        """In a thread. A record that stands in the topic is to be published."""
        if error is not None:
            self.notes.fail(f"a record could not be written to the topic: {error}")
            return
        order.due_ms = order.earliest_ms
        order.answered = True

    async def _mark(self) -> None:
        """Write marks into the queue of RabbitMQ, as long as it is there."""
        url = f"amqp://{USER}:{ESCAPED}@127.0.0.1:{self._brokers.rabbitmq.port}"
        while True:
            with contextlib.suppress(AMQPError, ChannelInvalidStateError, OSError):
                connection = await aiormq.connect(url)
                try:
                    channel = await connection.channel()
                    while True:
                        made = self._made_mark()
                        await channel.basic_publish(b"0", routing_key=PLACE, properties=made)
                        self.counts["marks"] += 1
                        await asyncio.sleep(MARK_S)
                finally:
                    await connection.close()
            await asyncio.sleep(MARK_S)

    def _made_mark(self) -> aiormq.spec.Basic.Properties:
        """The properties of an entry that says when the entries around it came."""
        headers: dict[str, Any] = {MARK: str(self.ledger.now_ms()), "delay-id": MARK}
        return aiormq.spec.Basic.Properties(
            headers=headers, message_id=MARK, delivery_mode=2, content_type="application/json"
        )

    async def read(self) -> None:
        await asyncio.to_thread(self._read)

    def _read(self) -> None:
        for kind, broker in self._brokers.by_kind.items():
            entries = broker.read(PLACE, 1)
            if broker is self._brokers.redis:
                entries += broker.read(FED_PLACE, 1)
            self.ledger.read(kind, timed(entries, self.ledger.now_ms()), fed=FED)

    async def look(self) -> None:
        """Compare the source's own account with the records of the topic."""
        _, view = await self.ask("GET", path("sources", FED))
        fed = [order for order in self.ledger.orders if order.subject == FED and order.answered]
        self.counts["offsets"] = len(fed)
        expected = {"0": len(fed)}, len(fed), 0
        found = view["positions"], view["published"], view["skipped"]
        if found != expected:
            self.notes.fail(f"the source says {found}, not {expected}")

    async def ended(self) -> None:
        await self.read()
        for order in self.ledger.orders:
            for name, receipts in order.receipts.items():
                kind = "redis" if name == FED else name.removeprefix("all-")
                self.counts[f"entries of {kind}"] += len(receipts)
                self.counts[f"twice in {kind}"] += len(receipts) > 1
