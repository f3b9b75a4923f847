"""Real brokers on free ports of the loopback, through scripts/kafka."""

import contextlib
import itertools
import logging
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Self

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from delayserver.cli.demo.process import free_ports
from storage.replicated.kafka import KafkaEngine
from storage.replicated.kafka_settings import ClientSettings, ClusterUrl
from tests.waiting import wait_until

SCRIPT = Path(__file__).parents[2] / "scripts" / "kafka"
START_TIMEOUT_S = 250
PATIENCE_S = 30.0


@dataclass
class Brokers:
    """Some brokers: `count` of them, with numbers from 1."""

    home: Path
    count: int = 3
    hosts: tuple[str, ...] = ()
    """Their addresses, if not the loopback's."""
    within: str = ""
    """What each is started through; scripts/kafka says how."""
    settings: tuple[str, ...] = ()
    """NAME=VALUE besides."""
    addresses: tuple[str, ...] = ()
    _names: "itertools.count[int]" = field(default_factory=itertools.count)

    @contextlib.contextmanager
    def running(self) -> Iterator[Self]:
        """They run inside of it, and are gone with their data behind it."""
        self._port = free_ports(10 * self.count)
        # Of the ids that the script makes up one in 64 begins like an option.
        self.home.mkdir(parents=True, exist_ok=True)
        (self.home / "cluster").write_text("-Zb3PVYrQpiNEZ9dYQWbkA\n")
        try:
            self.addresses = tuple(self._run("start", *self.settings).split(","))
            yield self
        finally:
            self._run("wipe")

    def kill(self, number: int) -> None:
        self._run("kill", str(number))

    def pause(self, number: int) -> None:
        self._run("pause", str(number))

    def resume(self, number: int) -> None:
        self._run("resume", str(number))

    def pid(self, number: int) -> int:
        return int((self.home / str(number) / "pid").read_text())

    def log_path(self, number: int) -> Path:
        """What a broker says."""
        return self.home / str(number) / "log"

    def revive(self, number: int) -> None:
        self._run("revive", str(number))

    def _run(self, *words: str) -> str:
        variables = {
            "KAFKA_HERE": str(self.home),
            "KAFKA_BROKERS": str(self.count),
            "KAFKA_PORT": str(self._port),
            "KAFKA_HOSTS": " ".join(self.hosts),
            "KAFKA_WITHIN": self.within,
            # They end before the better compiler is worth its time: 40 % less of a processor.
            "KAFKA_JAVA": "-XX:TieredStopAtLevel=1",
        }
        return subprocess.run(
            [SCRIPT, *words],
            env=os.environ | variables,
            text=True,
            stdout=subprocess.PIPE,
            timeout=START_TIMEOUT_S,
            check=True,
        ).stdout.strip()

    def new_url(self) -> ClusterUrl:
        """A cluster that nobody has made yet."""
        return ClusterUrl(self.addresses, f"c{next(self._names)}")

    def engine(
        self, url: ClusterUrl | None = None, *, shards: int = 1, message_timeout_ms: int = 60_000
    ) -> KafkaEngine:
        """The engine of a cluster with its topics."""
        settings = ClientSettings(url or self.new_url(), {}, message_timeout_ms)
        engine = KafkaEngine(settings)
        engine.create(shards, self.count, flushes=False)
        return engine

    @cached_property
    def admin(self) -> AdminClient:
        """Kept: what was asked of a client that nobody has any more is not answered."""
        quiet = logging.getLogger("tests.cluster.brokers")
        return AdminClient({"bootstrap.servers": ",".join(self.addresses)}, logger=quiet)

    def leader(self, topic: str, partition: int = 0) -> int:
        """The number of the broker that leads it."""
        topics = self.admin.list_topics(topic, timeout=10).topics
        leader: int = topics[topic].partitions[partition].leader
        assert leader > 0
        return leader

    def wait_until_all_are_in_sync(self) -> None:
        """Every partition is on all of its brokers again."""

        def are() -> bool:
            try:
                topics = self.admin.list_topics(timeout=10).topics.values()
            except KafkaException:
                return False  # It asked one that has just ended.
            partitions = [one for topic in topics for one in topic.partitions.values()]
            return all(set(one.isrs) == set(one.replicas) for one in partitions)

        wait_until(are)
