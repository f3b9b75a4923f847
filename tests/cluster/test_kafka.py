"""The engine on real brokers: its contract, its topics, its progress, and brokers that fail."""

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import (
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
)

from delayserver.cli.demo.process import free_port
from storage.errors import EngineError
from storage.replicated.kafka import KafkaEngine
from storage.replicated.kafka_settings import ClientSettings, ClusterUrl
from storage.replicated.meta import MetaLog, make_identity
from tests.cluster.brokers import Brokers
from tests.engine_contract import EngineContract, Opener, read_until
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]


class TestContract(EngineContract):
    @pytest.fixture
    def open_log(self, brokers: Brokers) -> Iterator[Opener]:
        engine = brokers.engine()
        yield lambda: engine.log(0)


def test_shards_and_settled_are_logs_of_their_own(brokers: Brokers) -> None:
    engine = brokers.engine(shards=3)
    logs = [*map(engine.log, range(3)), *map(engine.settled, range(3)), engine.meta()]
    for number, log in enumerate(logs):
        assert log.append([log.name.encode()] * (1 + number)) == list(range(1 + number))
    for number, log in enumerate(logs):
        assert log.end() == 1 + number
        assert read_until(log, 0, 1)[0] == (0, log.name.encode())


def test_a_record_is_read_within_milliseconds(brokers: Brokers) -> None:
    """Of being written: the broker answers a read that waits."""
    engine = brokers.engine()
    writer, reader = engine.log(0), engine.log(0)
    writer.append([b"warm"])
    read_until(reader, 0, 1)
    late_s: list[float] = []

    def read() -> None:
        while len(late_s) < 30:
            # On a busy machine one read may bring several.
            for _, data in reader.read(1 + len(late_s), 10):
                late_s.append(time.monotonic() - float(data))

    thread = Thread(target=read)
    thread.start()
    for _ in range(30):
        time.sleep(0.02)
        writer.append([repr(time.monotonic()).encode()])
    thread.join(20)
    assert len(late_s) == 30
    assert sorted(late_s)[15] < 0.05, late_s


def test_a_prepared_append_is_quick(brokers: Brokers) -> None:
    """Of several, since the machine may be busy."""
    engine = brokers.engine()
    logs = [engine.log(0) for _ in range(5)]
    for log in logs:
        log.prepare_append()
    time.sleep(1.5)
    took_s = []
    for log in logs:
        begun_s = time.monotonic()
        log.append([b"a"])
        took_s.append(time.monotonic() - begun_s)
        log.close()
    assert min(took_s) < 0.25, took_s


def test_two_who_make_a_cluster_agree(brokers: Brokers) -> None:
    engine = brokers.engine()
    rng = random.Random(7)
    first, second = (
        MetaLog(engine.meta()).create(make_identity("c", 1, "fsync", rng.randbytes))
        for _ in range(2)
    )
    assert (first[1], second[1]) == (True, False)
    assert first[0] == second[0]
    assert MetaLog(engine.meta()).register("n1") == 1
    assert MetaLog(engine.meta()).register("n2") == 2
    assert MetaLog(engine.meta()).register("n1") == 1


# ---- topics ----------------------------------------------------------------------------------


def test_topics_are_made_as_they_have_to_be(brokers: Brokers) -> None:
    url = brokers.new_url()
    engine = KafkaEngine(ClientSettings(url, {}))
    assert not engine.has_topics()
    assert len(engine.check(4, flushes=True)) == 3
    names = [url.log_topic, url.settled_topic, url.meta_topic]
    assert engine.create(4, 3, flushes=True) == names
    assert engine.has_topics()
    assert engine.check(4, flushes=True, replication=3) == []
    assert engine.check(4, flushes=False) == []
    assert engine.create(4, 3, flushes=True) == []


@pytest.fixture(scope="module")
def sound(brokers: Brokers) -> KafkaEngine:
    """A cluster to which each test does something wrong, and takes it back."""
    engine = brokers.engine(shards=2)
    assert engine.check(2, flushes=False) == []
    return engine


@pytest.mark.parametrize(
    ("setting", "right", "wrong"),
    [
        ("min.insync.replicas", "2", "1"),
        ("cleanup.policy", "delete", "compact"),
        ("cleanup.policy", "delete", "compact,delete"),
        ("retention.ms", "-1", "604800000"),
        ("retention.bytes", "-1", "1000000000"),
        ("unclean.leader.election.enable", "false", "true"),
        ("max.message.bytes", "1048588", "100000"),
    ],
)
def test_a_topic_with_a_wrong_setting(
    brokers: Brokers, sound: KafkaEngine, setting: str, right: str, wrong: str
) -> None:
    name = sound.url.log_topic
    alter(brokers, name, setting, wrong)
    try:
        # Each look may ask another broker, and one of them learns of it later.
        (sentence,) = wait_until(lambda: sound.check(2, flushes=False))
        assert sentence.startswith(f"{setting} of {name} is {wrong}; it has to be ")
    finally:
        alter(brokers, name, setting, right)
    wait_until(lambda: sound.check(2, flushes=False) == [])


def alter(brokers: Brokers, topic: str, setting: str, value: str) -> None:
    entry = ConfigEntry(setting, value, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=[entry])
    brokers.admin.incremental_alter_configs([resource])[resource].result()


def test_topics_that_do_not_flush(sound: KafkaEngine) -> None:
    found = sound.check(2, flushes=True)
    assert len(found) == 3
    assert all(sentence.startswith("flush.messages of ") for sentence in found)


def test_topics_of_another_number_of_shards(brokers: Brokers, sound: KafkaEngine) -> None:
    (log, settled) = sound.check(4, flushes=False)
    assert "has 2 partitions, and 4 are needed" in log
    assert sound.url.settled_topic in settled
    other = brokers.engine()
    brokers.admin.create_partitions([NewPartitions(other.url.meta_topic, 2)])[
        other.url.meta_topic
    ].result()
    wait_until(lambda: len(other.check(1, flushes=False)) == 1)


def test_topics_on_fewer_brokers(brokers: Brokers) -> None:
    url = brokers.new_url()
    settings = {"retention.ms": "-1"}
    topic = NewTopic(url.log_topic, 1, 1, config=settings)
    brokers.admin.create_topics([topic])[url.log_topic].result()
    engine = brokers.engine(url)
    (sentence,) = engine.check(1, flushes=False, replication=3)
    assert sentence == f"The topic {url.log_topic} has 1 replicas, and 3 were asked for."


# ---- progress --------------------------------------------------------------------------------


def test_progress(brokers: Brokers) -> None:
    engine = brokers.engine(shards=3)
    assert engine.progress(["n1", "n2"]) == {"n1": {}, "n2": {}}
    engine.commit_progress("n1", 0, 70)
    engine.commit_progress("n1", 2, 0)
    engine.commit_progress("n2", 1, 9)
    engine.commit_progress("n1", 0, 71)
    assert engine.progress(["n1", "n2", "n3"]) == {"n1": {0: 71, 2: 0}, "n2": {1: 9}, "n3": {}}


_ASKS = """
import contextlib, sys, time
from storage.errors import EngineError
from storage.replicated.kafka import KafkaEngine
from storage.replicated.kafka_settings import ClientSettings, ClusterUrl

engine = KafkaEngine(ClientSettings(ClusterUrl.parse(sys.argv[1]), {}))
while True:
    with contextlib.suppress(EngineError):
        engine.noted_progress([f"n{number}" for number in range(12)])
    time.sleep(0.02)
"""


def test_who_asks_for_progress_outlives_the_brokers_that_know_it(brokers: Brokers) -> None:
    """Groups that move to another broker: the admin client's answer to that was a SIGSEGV."""
    engine = brokers.engine()
    command = [sys.executable, "-c", _ASKS, str(engine.url)]
    with subprocess.Popen(command, cwd=ROOT) as asking:
        try:
            for number in range(1, brokers.count + 1):
                brokers.kill(number)
                brokers.revive(number)
                brokers.wait_until_all_are_in_sync()
                assert asking.poll() is None, f"it ended when broker {number} was killed"
        finally:
            asking.kill()


# ---- brokers that fail -----------------------------------------------------------------------


class Writer(Thread):
    """Appends one record after the other, and remembers what was answered."""

    def __init__(self, engine: KafkaEngine) -> None:
        super().__init__()
        self.log = engine.log(0)
        self.log.append([b"warm"])
        self.answers: list[tuple[int, bytes]] = [(0, b"warm")]
        self.longest_s = 0.0
        self.is_done = False

    def run(self) -> None:
        number = 0
        while not self.is_done:
            data = b"%d" % number
            number += 1
            begun_s = time.monotonic()
            (offset,) = self.log.append([data])
            self.longest_s = max(self.longest_s, time.monotonic() - begun_s)
            assert offset is not None
            self.answers.append((offset, data))

    def wait_for_answers(self, count: int) -> None:
        """That come from now on."""
        wanted = len(self.answers) + count
        wait_until(lambda: len(self.answers) >= wanted or not self.is_alive())
        assert self.is_alive()


@pytest.mark.parametrize("strike", ["kill", "pause"])
def test_the_leader_fails(brokers: Brokers, strike: str) -> None:
    """While somebody appends: every append is answered, nothing is lost, nothing is there twice,
    and a reader and the question for the end find the next leader as well."""
    engine = brokers.engine()
    reader = engine.log(0)
    writer = Writer(engine)
    read: list[tuple[int, bytes]] = read_until(reader, 0, 1)
    writer.start()
    leader = brokers.leader(engine.url.log_topic)
    try:
        writer.wait_for_answers(50)
        read += reader.read(len(read), 5)
        getattr(brokers, strike)(leader)
        struck_s = time.monotonic()
        writer.wait_for_answers(50)
        assert time.monotonic() - struck_s < 20
        wait_until(lambda: engine.log(0).end() is not None)
    finally:
        {"kill": brokers.revive, "pause": brokers.resume}[strike](leader)
        writer.is_done = True
        writer.join(60)
    end = writer.log.end()
    assert end == len(writer.answers)
    read += read_until(reader, len(read), end)
    assert read == writer.answers
    assert 0.5 < writer.longest_s < 15
    brokers.wait_until_all_are_in_sync()


def test_an_append_that_is_not_answered_in_time(brokers: Brokers) -> None:
    """Two of three brokers hang: there is no quorum, and the outcome is unknown."""
    engine = brokers.engine(message_timeout_ms=2000)
    log = engine.log(0)
    assert log.append([b"a"]) == [0]
    leader = brokers.leader(engine.url.log_topic)
    others = [number for number in (1, 2, 3) if number != leader]
    for number in others:
        brokers.pause(number)
    try:
        begun_s = time.monotonic()
        assert log.append([b"b", b"c"]) == [None, None]
        assert 1 < time.monotonic() - begun_s < 6
        with pytest.raises(AssertionError):
            log.append([b"d"])
        begun_s = time.monotonic()
        log.close()
        assert time.monotonic() - begun_s < 5
    finally:
        for number in others:
            brokers.resume(number)
    brokers.wait_until_all_are_in_sync()
    # Unknown is what it was: here one of the two had reached the leader, or none, or both.
    found = [data for _, data in read_until(engine.log(0), 0, 1)]
    assert found == [b"a", b"b", b"c"][: len(found)]


def test_nobody_is_there(caplog: pytest.LogCaptureFixture) -> None:
    url = ClusterUrl((f"127.0.0.1:{free_port()}",), "nobody")
    engine = KafkaEngine(ClientSettings(url, {"socket.timeout.ms": "1000"}, 1500))
    log = engine.log(0)
    assert log.end() is None
    assert log.read(0, 0.5) == []
    assert log.append([b"a"]) == [None]
    log.close()
    # Each of its clients tries some five times a second, and says so once.
    lines = [line for line in caplog.messages if "Connection refused" in line]
    assert 0 < len(lines) <= 3, lines
    assert any("an append has failed" in line for line in caplog.messages)


def test_a_setting_that_the_client_does_not_know(brokers: Brokers) -> None:
    with pytest.raises(EngineError, match="no-such-setting"):
        KafkaEngine(ClientSettings(brokers.new_url(), {"no-such-setting": "1"}))


def test_a_topic_that_is_not_there(brokers: Brokers, caplog: pytest.LogCaptureFixture) -> None:
    log = KafkaEngine(ClientSettings(brokers.new_url(), {})).log(0)
    assert log.read(0, 0.5) == []
    assert log.end() is None
    assert any("do not say where it ends" in line for line in caplog.messages)


def test_a_transaction_takes_offsets(brokers: Brokers) -> None:
    """What `OffsetGapError` is for: nobody may write to these logs in a transaction."""
    engine = brokers.engine()
    servers = ",".join(brokers.addresses)
    producer = Producer({"bootstrap.servers": servers, "transactional.id": engine.url.name})
    producer.init_transactions(20)
    producer.begin_transaction()
    producer.produce(engine.url.log_topic, b"a", partition=0)
    producer.commit_transaction(20)
    log = engine.log(0)
    assert log.append([b"b"]) == [2]
    assert log.read(0, 5)[0] == (0, b"a")
