"""Subscriptions and sources of type kafka: a server of its own, a broker that wants a password.

With three brokers, and exactly once from a cluster: tests/cluster/test_kafka_sink.py."""

from collections.abc import Iterator

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from tests.integration.api_support import ApiServer
from tests.sinks.contract import SinkContract
from tests.sinks.kafka_server import KafkaBroker
from tests.waiting import wait_until

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    with KafkaBroker(tmp_path_factory.mktemp("kafka") / "broker") as started:
        yield started


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
