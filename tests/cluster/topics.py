"""Topics of somebody, and who reads them."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, Message, TopicPartition
from confluent_kafka.admin import NewTopic

from tests.cluster.brokers import Brokers
from tests.waiting import wait_until


def make_topic(brokers: Brokers, name: str, partitions: int = 3) -> str:
    """A topic on all brokers; its name."""
    settings = {"min.insync.replicas": str(min(2, brokers.count))}
    topic = NewTopic(name, partitions, brokers.count, config=settings)
    asked = brokers.admin.create_topics([topic])
    asked[name].result()

    def is_led() -> bool:
        found = brokers.admin.list_topics(timeout=10).topics.get(name)
        return found is not None and all(one.leader > 0 for one in found.partitions.values())

    wait_until(is_led)
    return name


@dataclass
class Received:
    """A record, and when it came (ms since the epoch)."""

    message: Message
    came_ms: int

    @property
    def headers(self) -> dict[str, str]:
        return {name: (value or b"").decode() for name, value in self.message.headers() or []}  # type: ignore[union-attr, str-unpack]

    @property
    def id(self) -> str:
        return self.headers["delay-id"]


def consumer_of(
    brokers: Brokers, topic: str, settings: Mapping[str, str | bool] | None = None
) -> Consumer:
    """Of all partitions of a topic that is there, from the beginning on, what is committed.

    It is no member of a group: one whose coordinator is killed is sent back to the beginning
    45 s later, and has each record twice.
    """
    consumer = Consumer(
        {
            "bootstrap.servers": ",".join(brokers.addresses),
            "group.id": "none",
            "auto.offset.reset": "error",
            "isolation.level": "read_committed",
            "topic.metadata.refresh.interval.ms": 1000,
            "enable.auto.commit": False,
            **(settings or {}),
        }
    )
    partitions = consumer.list_topics(topic, timeout=30).topics[topic].partitions
    assert partitions
    consumer.assign([TopicPartition(topic, one, OFFSET_BEGINNING) for one in partitions])
    return consumer


class Reader:
    """Reads a topic from its beginning, each record once."""

    def __init__(
        self, brokers: Brokers, topic: str, login: Mapping[str, str] | None = None
    ) -> None:
        """`login`: settings of a client whom the brokers let in."""
        self.received: list[Received] = []
        self._consumer = consumer_of(brokers, topic, login)

    def read(self, count: int, timeout_s: float = 60) -> list[Received]:
        """So many from the beginning on, or what came within that time."""
        give_up_s = time.monotonic() + timeout_s
        while len(self.received) < count and time.monotonic() < give_up_s:
            for message in self._consumer.consume(500, 0.05):
                error = message.error()
                if error is None:
                    self.received.append(Received(message, time.time_ns() // 1_000_000))
                else:
                    assert error.code() != KafkaError._AUTO_OFFSET_RESET, error
        return self.received

    def read_for(self, seconds: float) -> list[Received]:
        """All that comes within that time."""
        return self.read(1 << 60, seconds)

    def close(self) -> None:
        self._consumer.close()
