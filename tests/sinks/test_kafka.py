"""Subscriptions and sources of type kafka: a server of its own, a broker that wants a password.

With three brokers, and exactly once from a cluster: tests/cluster/test_kafka_sink.py."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from tests.cluster.brokers import Brokers
from tests.integration.api_support import ApiServer, wait_until
from tests.sinks.contract import SinkContract
from tests.sinks.programs import PASSWORD, USER, Broker, Entry

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(300)]


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
        admin.create_topics([NewTopic(name, 1, 1)])[name].result()
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
        return Entry(headers, message.value())


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    made = KafkaBroker(tmp_path_factory.mktemp("kafka") / "broker")
    with made.brokers.running() as brokers:
        made.port = int(brokers.addresses[0].rpartition(":")[2])
        yield made


class TestKafka(SinkContract):
    """Nothing beyond."""


def produce(broker: KafkaBroker, name: str, numbers: range, delay: str | None = None) -> None:
    producer = Producer({**broker.settings, "message.timeout.ms": 60_000})
    headers: dict[str, str | bytes | None] = {} if delay is None else {"delay-until": delay}
    for number in numbers:
        producer.produce(name, b"%d" % number, b"key", headers=headers)
    assert producer.flush(60) == 0


def test_each_offset_is_there_once_whoever_is_killed(
    broker: KafkaBroker, server: ApiServer, name: str
) -> None:
    """The server and the broker are killed while records are taken."""
    broker.prepare(name)
    source = f"/v1/sources/{name}"
    count = 2000

    def published() -> int:
        return int(server.ask("GET", source)["published"])

    definition = broker.definition(name)
    made = server.ask("PUT", source, 201, json={**definition, "subject": name, "due_header": "due"})
    assert (made["password"], made["positions"], made["group"]) == (
        "***",
        {},
        f"delayserver.{name}",
    )
    for begin in range(0, count, 500):
        produce(broker, name, range(begin, begin + 500))
        if begin == 500:
            wait_until(lambda: published() > 0)
            server.restart(kill=True)
        if begin == 1000:
            broker.kill()
            broker.start()
            wait_until(lambda: AdminClient(broker.settings).list_topics(timeout=10).brokers, 60)
    wait_until(lambda: published() == count, 90)
    server.restart(kill=True)
    path = server.subscribe(name, name, type="pull")
    messages = server.pull_all(path, count)
    assert sorted(one["body"] for one in messages) == list(range(count))
    assert {one["key"] for one in messages} == {"key"}
    now = server.ask("GET", source)
    assert now["positions"] == {"0": count} and not now["skipped"] and now["error"] is None
    assert not server.pull(path, max=10)  # nothing is there twice

    consumer = Consumer({**broker.settings, "group.id": f"delayserver.{name}"})
    place = TopicPartition(name, 0)
    wait_until(lambda: consumer.committed([place], timeout=10)[0].offset == count)
    consumer.close()

    assert server.ask("POST", f"{source}/pause")["pause_reason"] == "asked"
    produce(broker, name, range(1), delay="soon")
    server.ask("PUT", source, json={**definition, "subject": name, "on_error": "stop"})
    server.ask("POST", f"{source}/resume")
    wait_until(lambda: server.ask("GET", source)["pause_reason"] == "error")
    found = server.ask("GET", source)
    assert found["last_skipped"]["offset"] == count and "'soon'" in found["last_skipped"]["reason"]
    assert found["positions"] == {"0": count}
    server.delete(source)
    server.delete(path)
