"""One broker of Kafka, which wants a password."""

import contextlib
import time
from pathlib import Path
from typing import Any, Self

from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from tests.cluster.brokers import Brokers
from tests.sinks.programs import PASSWORD, USER, Broker, Entry
from tests.waiting import wait_until


class KafkaBroker(Broker):
    kind = "kafka"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        login = (
            "org.apache.kafka.common.security.plain.PlainLoginModule required "
            f'username="{USER}" password="{PASSWORD}" user_{USER}="{PASSWORD}";'
        )
        self.brokers = Brokers(
            directory,
            count=1,
            settings=(
                "listener.security.protocol.map=BROKER:SASL_PLAINTEXT,CONTROLLER:PLAINTEXT",
                "sasl.enabled.mechanisms=PLAIN",
                "sasl.mechanism.inter.broker.protocol=PLAIN",
                f"listener.name.broker.plain.sasl.jaas.config={login}",
            ),
        )

    def __enter__(self) -> Self:
        self._started = contextlib.ExitStack()
        brokers = self._started.enter_context(self.brokers.running())
        self.port = int(brokers.addresses[0].rpartition(":")[2])
        return self

    def __exit__(self, *_: object) -> None:
        self._started.close()

    def command(self) -> list[str]:
        raise AssertionError("scripts/kafka starts it")

    def start(self) -> None:
        self.brokers.revive(1)

    def kill(self) -> None:
        self.brokers.kill(1)

    def stop(self) -> None:
        self.brokers.pause(1)

    def go_on(self) -> None:
        self.brokers.resume(1)

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "bootstrap.servers": self.brokers.addresses[0],
            "security.protocol": "sasl_plaintext",
            "sasl.mechanism": "PLAIN",
            "sasl.username": USER,
            "sasl.password": PASSWORD,
        }

    def definition(self, name: str, password: str = PASSWORD) -> dict[str, Any]:
        login = {"username": USER, "password": password}
        return {"type": "kafka", "bootstrap": self.brokers.addresses[0], "topic": name, **login}

    def prepare(self, name: str) -> None:
        admin = AdminClient(self.settings)
        # What is answered is on the disk, and says when it came there.
        config = {"flush.messages": "1", "message.timestamp.type": "LogAppendTime"}
        admin.create_topics([NewTopic(name, 1, 1, config=config)])[name].result()
        wait_until(lambda: name in admin.list_topics(timeout=10).topics)

    def refuse(self, name: str) -> str:
        return "UNKNOWN_TOPIC"

    def read(self, name: str, count: int) -> list[Entry]:
        entries: list[Entry] = []
        consumer = Consumer({**self.settings, "group.id": "tests", "enable.auto.commit": False})
        try:
            place = TopicPartition(name, 0)

            def end() -> int:
                return int(consumer.get_watermark_offsets(place, timeout=10)[1])

            wait_until(lambda: end() >= count)
            consumer.assign([TopicPartition(name, 0, 0)])
            found = end()
            give_up_s = time.monotonic() + 30
            while len(entries) < found and time.monotonic() < give_up_s:
                entries += map(self.entry, consumer.consume(500, 0.1))
        finally:
            consumer.close()
        return entries

    @staticmethod
    def entry(message: Any) -> Entry:
        assert message.error() is None, message.error()
        headers = {name: value.decode() for name, value in message.headers()}
        return Entry(headers, message.value(), message.timestamp()[1])
