"""Topics of somebody, and who reads them."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from confluent_kafka import Consumer, Message
from confluent_kafka.admin import NewTopic

from tests.cluster.brokers import Brokers, wait_until


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


class Reader:
    """Reads a topic from its beginning, what is committed."""

    def __init__(
        self, brokers: Brokers, topic: str, login: Mapping[str, str] | None = None
    ) -> None:
        """`login`: settings of a client whom the brokers let in."""
        self.received: list[Received] = []
        self._consumer = Consumer(
            {
                "bootstrap.servers": ",".join(brokers.addresses),
                "group.id": f"{topic}.{time.monotonic_ns()}",
                "auto.offset.reset": "earliest",
                "isolation.level": "read_committed",
                "topic.metadata.refresh.interval.ms": 1000,
                "enable.auto.commit": False,
                **(login or {}),
            }
        )
        self._consumer.subscribe([topic])

    def read(self, count: int, timeout_s: float = 60) -> list[Received]:
        """So many from the beginning on, or what came within that time."""
        give_up_s = time.monotonic() + timeout_s
        while len(self.received) < count and time.monotonic() < give_up_s:
            for message in self._consumer.consume(500, 0.05):
                if message.error() is None:
                    self.received.append(Received(message, time.time_ns() // 1_000_000))
        return self.received

    def read_for(self, seconds: float) -> list[Received]:
        """All that comes within that time."""
        return self.read(1 << 60, seconds)

    def close(self) -> None:
        self._consumer.close()
