"""Topics of Kafka as feeds, with a consumer that a test fills. Real brokers: tests/sinks."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from structlog.testing import capture_logs

from delayserver.parts.sources import kafka_source
from delayserver.parts.sources.feeds import (
    BATCH_MAX_BYTES,
    BATCH_RECORDS_MAX,
    BATCHES_MAX,
    FeedError,
)
from delayserver.parts.sources.kafka_source import (
    ASK_TRIES,
    AWAY_S,
    REFRESH_S,
    SUSPECT_S,
    KafkaFeed,
)
from delayserver.parts.sources.records import Source, SourceRecord, SourceState
from delayserver.records.named import Known
from delayserver.records.subscriptions import KafkaTarget
from delayserver.security.targets import TargetPolicy
from tests.waiting import until

BROKERS = "127.0.0.1:9092"
PATIENCE_S = 5.0


@dataclass
class FakeMessage:
    """As much of a message of the client as a feed looks at."""

    at: int = 0
    of: int = 0
    body: bytes | None = b"1"
    its_key: bytes | str | None = None
    its_headers: Any = None
    failure: KafkaError | None = None

    def error(self) -> KafkaError | None:
        return self.failure

    def partition(self) -> int:
        return self.of

    def offset(self) -> int:
        return self.at

    def key(self) -> bytes | str | None:
        return self.its_key

    def value(self) -> bytes | None:
        return self.body

    def headers(self) -> Any:
        return self.its_headers


@dataclass
class FakeConsumer:
    """A topic of some partitions, and the client that reads it."""

    marks: dict[int, tuple[int, int]] = field(default_factory=lambda: {0: (0, 100)})
    """By partition the first offset and the one behind the last."""
    found: list[Sequence[FakeMessage]] = field(default_factory=list)
    """What each call of `consume` gives."""
    brokers: dict[int, Any] = field(
        default_factory=lambda: {1: SimpleNamespace(host="127.0.0.1", port=9092)}
    )
    failures: list[KafkaError] = field(default_factory=list)
    """What is answered first to whoever asks about the topic."""
    mark_failures: dict[int, KafkaError] = field(default_factory=dict)
    """By partition what is answered once in place of its marks."""
    assign_failures: dict[int, KafkaError] = field(default_factory=dict)
    """Likewise, in place of assigning it."""
    without_leader: set[int] = field(default_factory=set)
    topic_error: KafkaError | None = None
    commit_error: KafkaError | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    assigned: list[tuple[int, int]] = field(default_factory=list)
    committed: list[dict[int, int]] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    closed: int = 0

    def __call__(self, settings: dict[str, Any]) -> "FakeConsumer":
        self.settings = settings
        return self

    def list_topics(self, topic: str, timeout: float) -> Any:
        if self.failures:
            raise KafkaException(self.failures.pop(0))
        partitions = {
            one: SimpleNamespace(leader=-1 if one in self.without_leader else 1)
            for one in self.marks
        }
        metadata = SimpleNamespace(error=self.topic_error, partitions=partitions)
        return SimpleNamespace(brokers=self.brokers, topics={topic: metadata})

    def get_watermark_offsets(self, place: TopicPartition, timeout: float) -> tuple[int, int]:
        if place.partition in self.mark_failures:
            raise KafkaException(self.mark_failures.pop(place.partition))
        return self.marks[place.partition]

    def poll(self, timeout: float) -> None:
        """Nothing is assigned when it is asked."""
        assert not self.assigned

    def assign(self, places: list[TopicPartition]) -> None:
        assert not self.assigned
        self.incremental_assign(places)

    def incremental_assign(self, places: list[TopicPartition]) -> None:
        for one in places:
            if one.partition in self.assign_failures:
                raise KafkaException(self.assign_failures.pop(one.partition))
        self.assigned += [(one.partition, one.offset) for one in places]

    def consume(self, most: int, timeout: float) -> Sequence[FakeMessage]:
        self.asked.append(most)
        if not self.found:
            time.sleep(0.001)  # as the client does for as long as it is told to
            return []
        return self.found.pop(0)

    def commit(self, offsets: list[TopicPartition], asynchronous: bool) -> None:
        assert asynchronous
        self.committed.append({one.partition: one.offset for one in offsets})
        if self.commit_error is not None:
            raise KafkaException(self.commit_error)

    def close(self) -> None:
        self.closed += 1


def feed_of(
    consumer: Any, positions: dict[int, int], target: KafkaTarget | None = None, **more: Any
) -> KafkaFeed:
    source = Source("orders", 1, target or KafkaTarget(BROKERS, "t"), "due", "g")
    state = SourceState(1, 1, 0, positions=positions, identity=more.pop("known_identity", ""))
    policy = more.pop("policy", TargetPolicy(()))
    health = more.pop("health", lambda reason: None)
    identity = more.pop("identity", "")
    return KafkaFeed(
        Known(source, state),
        policy,
        asyncio.get_running_loop(),
        health,
        make_consumer=consumer,
        make_ids=lambda settings: lambda topic: identity() if callable(identity) else identity,
        **more,
    )


def run(
    consumer: FakeConsumer,
    test: Callable[[KafkaFeed], Coroutine[Any, Any, None]],
    positions: dict[int, int] | None = None,
    **more: Any,
) -> None:
    async def main() -> None:
        feed = feed_of(consumer, positions or {}, **more)
        try:
            await test(feed)
        finally:
            await feed.close()
        assert consumer.closed == 1

    asyncio.run(main())


def reason(consumer: FakeConsumer, positions: dict[int, int] | None = None, **more: Any) -> str:
    """Why a topic cannot be read."""
    told: list[str] = []

    async def read(feed: KafkaFeed) -> None:
        with pytest.raises(FeedError) as error:
            await feed.read()
        told.append(str(error.value))

    run(consumer, read, positions, **more)
    return told[0]


def test_it_begins_behind_what_was_taken_and_else_at_the_first() -> None:
    consumer = FakeConsumer({0: (3, 100), 1: (5, 100), 2: (0, 0)}, [[FakeMessage(42)]])

    async def test(feed: KafkaFeed) -> None:
        assert await feed.read() == [SourceRecord(0, 42, None, b"1")]
        assert consumer.assigned == [(0, 42), (1, 5), (2, 0)]

    run(consumer, test, {0: 42})


def test_how_it_is_connected() -> None:
    target = KafkaTarget(BROKERS, "t", username="u", password="p", tls=True)
    consumer = FakeConsumer(found=[[FakeMessage()]])

    async def test(feed: KafkaFeed) -> None:
        await feed.read()

    run(consumer, test, target=target)
    assert (
        consumer.settings.items()
        >= {
            "bootstrap.servers": BROKERS,
            "group.id": "g",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "security.protocol": "sasl_ssl",
            "sasl.username": "u",
            "sasl.password": "p",
        }.items()
    )


@pytest.mark.parametrize("as_dict", [False, True])
def test_what_a_record_has(as_dict: bool) -> None:
    pairs = [("a", b"1"), ("b", None), ("c", "2")]
    message = FakeMessage(7, 0, None, "key", dict(pairs) if as_dict else pairs)
    consumer = FakeConsumer(found=[[message, FakeMessage(8, body=b"", its_key=b"\xff")]])

    async def test(feed: KafkaFeed) -> None:
        headers = (("a", b"1"), ("b", None), ("c", b"2"))
        assert await feed.read() == [
            SourceRecord(0, 7, b"key", None, headers),
            SourceRecord(0, 8, b"\xff", b""),
        ]

    run(consumer, test)


def test_a_batch_is_bounded() -> None:
    body = bytes(BATCH_MAX_BYTES // 2)
    longer = FakeMessage(2, body=bytes(2 * BATCH_MAX_BYTES))
    found = [FakeMessage(0, body=body), FakeMessage(1, body=body), longer, FakeMessage(3)]
    consumer = FakeConsumer(found=[found])

    async def test(feed: KafkaFeed) -> None:
        batches = [[one.offset for one in await feed.read()] for _ in range(3)]
        assert batches == [[0, 1], [2], [3]]

    run(consumer, test)
    assert set(consumer.asked) == {BATCH_RECORDS_MAX}


def test_no_more_is_read_than_is_taken() -> None:
    consumer = FakeConsumer(found=[[FakeMessage(number)] for number in range(10)])

    async def test(feed: KafkaFeed) -> None:
        await until(lambda: len(consumer.found) == 10 - BATCHES_MAX - 1)
        await asyncio.sleep(0.02)
        assert len(consumer.found) == 10 - BATCHES_MAX - 1  # one is in its hands
        assert [(await feed.read())[0].offset for _ in range(10)] == list(range(10))

    run(consumer, test)


def test_what_passes_is_no_failure() -> None:
    away = FakeMessage(failure=KafkaError(KafkaError._ALL_BROKERS_DOWN))
    end = FakeMessage(failure=KafkaError(KafkaError._PARTITION_EOF))
    consumer = FakeConsumer(found=[[away], [end, FakeMessage(5)]])

    async def test(feed: KafkaFeed) -> None:
        assert [one.offset for one in await feed.read()] == [5]

    run(consumer, test)


def test_what_does_not_pass_is_told() -> None:
    failure = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    consumer = FakeConsumer(found=[[FakeMessage(failure=failure)]])
    assert "TOPIC_AUTHORIZATION_FAILED" in reason(consumer)


def test_a_topic_that_is_not_there() -> None:
    consumer = FakeConsumer(topic_error=KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART))
    told = reason(consumer)
    assert told.startswith("the topic t: ") and "UNKNOWN_TOPIC_OR_PART" in told


def test_brokers_that_are_away_for_a_moment_are_asked_again() -> None:
    away = [KafkaError(KafkaError._TRANSPORT)]
    consumer = FakeConsumer(found=[[FakeMessage(5)]], failures=away * (ASK_TRIES - 1))

    async def test(feed: KafkaFeed) -> None:
        assert [one.offset for one in await feed.read()] == [5]

    run(consumer, test)
    assert "_TRANSPORT" in reason(FakeConsumer(failures=away * ASK_TRIES))
    refused = KafkaError(KafkaError._AUTHENTICATION)
    assert "_AUTHENTICATION" in reason(FakeConsumer(failures=[refused]))


def test_a_topic_that_was_made_again() -> None:
    told = reason(FakeConsumer({0: (0, 3)}), {0: 4})
    assert "ends at offset 3 of partition 0, before 4" in told and "put it again" in told


def test_where_it_ends_is_where_it_may_begin() -> None:
    consumer = FakeConsumer({0: (0, 4)}, [[FakeMessage(4)]])

    async def test(feed: KafkaFeed) -> None:
        await feed.read()
        assert consumer.assigned == [(0, 4)]

    run(consumer, test, {0: 4})


def test_what_was_deleted_before_it_was_taken_is_named() -> None:
    consumer = FakeConsumer({0: (10, 100)}, [[FakeMessage(10)]])

    async def test(feed: KafkaFeed) -> None:
        await feed.read()
        assert consumer.assigned == [(0, 10)]

    with capture_logs() as logs:
        run(consumer, test, {0: 4})
    (line,) = logs
    assert (line["source"], line["first_lost"], line["last_lost"]) == ("orders", 4, 9)


def test_partitions_that_come_later_are_read_from_their_beginning() -> None:
    consumer, now_s = FakeConsumer({0: (0, 9)}, [[FakeMessage(0)]]), 0.0

    async def test(feed: KafkaFeed) -> None:
        nonlocal now_s
        await feed.read()
        consumer.marks[1] = 2, 9
        asked = len(consumer.asked)
        await until(lambda: len(consumer.asked) > asked + 1)
        assert consumer.assigned == [(0, 0)]
        now_s = REFRESH_S + 1
        await until(lambda: consumer.assigned == [(0, 0), (1, 2)])

    run(consumer, test, monotonic=lambda: now_s)


@pytest.mark.parametrize("fails_at", ["the marks", "the assignment"])
def test_partitions_that_could_not_be_assigned_are_assigned_later(fails_at: str) -> None:
    consumer, now_s = FakeConsumer({0: (0, 9)}, [[FakeMessage(0)]]), 0.0

    async def test(feed: KafkaFeed) -> None:
        nonlocal now_s
        await feed.read()
        consumer.marks |= {1: (2, 9), 2: (3, 9)}
        failure = KafkaError(KafkaError.LEADER_NOT_AVAILABLE)
        failures = consumer.mark_failures if fails_at == "the marks" else consumer.assign_failures
        failures[2] = failure
        now_s = REFRESH_S + 1
        await until(lambda: not failures)
        now_s += SUSPECT_S + 1
        await until(lambda: consumer.assigned == [(0, 0), (1, 2), (2, 3)])

    run(consumer, test, monotonic=lambda: now_s)


def test_how_far_it_is_can_be_seen_at_the_broker() -> None:
    # Who may not commit there reads all the same.
    refused = KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED)
    consumer = FakeConsumer(found=[[FakeMessage(5)], [FakeMessage(6)]], commit_error=refused)

    async def test(feed: KafkaFeed) -> None:
        await feed.read()
        await feed.read()
        await until(lambda: consumer.committed == [{0: 5}])
        feed.took({0: 7})

    run(consumer, test, {0: 5})
    assert consumer.committed == [{0: 5}, {0: 7}]  # also what was told last


def test_brokers_have_to_be_allowed() -> None:
    def make(settings: dict[str, Any]) -> Any:
        raise AssertionError("nobody is to be connected to")

    async def main() -> None:
        feed = feed_of(make, {}, KafkaTarget("10.0.0.7:9092", "t"))
        with pytest.raises(FeedError, match=r"10\.0\.0\.7"):
            await feed.read()
        await feed.close()

    asyncio.run(main())


def test_so_have_those_that_brokers_name() -> None:
    brokers = {1: SimpleNamespace(host="10.0.0.8", port=9092)}
    consumer = FakeConsumer(brokers=brokers)
    assert "10.0.0.8" in reason(consumer)
    assert consumer.assigned == []


def test_one_that_is_closed_does_not_wait_for_who_takes() -> None:
    consumer = FakeConsumer(found=[[FakeMessage(number)] for number in range(10)])

    async def test(feed: KafkaFeed) -> None:
        await until(lambda: len(consumer.found) == 10 - BATCHES_MAX - 1)

    run(consumer, test)


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def eof(at: int, of: int = 0) -> FakeMessage:
    return FakeMessage(at, of, failure=KafkaError(KafkaError._PARTITION_EOF))


def test_the_end_of_a_partition_moves_the_position_behind_markers() -> None:
    consumer = FakeConsumer(found=[[FakeMessage(0), eof(1)], [eof(3)], [eof(3), FakeMessage(7)]])

    async def test(feed: KafkaFeed) -> None:
        read = [one for _ in range(3) for one in await feed.read()]
        assert [(one.offset, one.is_mark) for one in read] == [(0, False), (2, True), (7, False)]

    run(consumer, test)


def test_a_topic_of_markers_alone_is_read_to_its_end() -> None:
    consumer = FakeConsumer(found=[[eof(4, 1)]], marks={0: (0, 0), 1: (2, 4)})

    async def test(feed: KafkaFeed) -> None:
        assert await feed.read() == [SourceRecord(1, 3, None, None, is_mark=True)]

    run(consumer, test)


def test_brokers_that_go_while_it_reads_are_told_of_and_so_is_their_return() -> None:
    told: list[str | None] = []
    consumer, clock = FakeConsumer(found=[[FakeMessage(0)]]), Clock()

    async def test(feed: KafkaFeed) -> None:
        await feed.read()
        await until(lambda: told == [None])
        consumer.settings["error_cb"](KafkaError(KafkaError._ALL_BROKERS_DOWN))
        consumer.failures = [KafkaError(KafkaError._TRANSPORT)] * 1000
        clock.now_s += SUSPECT_S + 0.1
        await until(lambda: len(consumer.failures) < 1000)
        assert told == [None]  # a moment is none
        clock.now_s += AWAY_S
        await until(lambda: len(told) == 2)
        assert "do not answer" in str(told[1]) and "_TRANSPORT" in str(told[1])
        consumer.failures = []
        clock.now_s += SUSPECT_S + 0.1
        await until(lambda: told[2:] == [None])

    run(consumer, test, monotonic=clock, health=told.append)


def test_a_partition_that_no_broker_leads_is_named_and_the_others_go_on() -> None:
    told: list[str | None] = []
    consumer, clock = FakeConsumer({0: (0, 9), 1: (0, 9)}, [[FakeMessage(0)]]), Clock()

    async def test(feed: KafkaFeed) -> None:
        await feed.read()
        consumer.without_leader = {1}
        clock.now_s += REFRESH_S + 0.1
        await until(lambda: len(told) == 2)
        assert str(told[1]).endswith("now: 1")
        consumer.found.append([FakeMessage(1)])
        assert [one.offset for one in await feed.read()] == [1]
        consumer.without_leader = set()
        clock.now_s += SUSPECT_S + 0.1
        await until(lambda: told[2:] == [None])

    run(consumer, test, monotonic=clock, health=told.append)


def test_another_topic_of_the_same_name_is_not_read_behind_the_positions_of_the_first() -> None:
    consumer = FakeConsumer({0: (0, 1000)}, [[FakeMessage(5)]])
    told = reason(consumer, {0: 5}, identity="b", known_identity="a")
    assert "was made again" in told and "its id is b" in told and "put it again" in told
    assert not consumer.assigned


@pytest.mark.parametrize(("identity", "known"), [("a", ""), ("a", "a"), ("", "")])
def test_a_topic_whose_identity_is_known_or_not(identity: str, known: str) -> None:
    consumer = FakeConsumer(found=[[FakeMessage(5)]])

    async def test(feed: KafkaFeed) -> None:
        await feed.read()
        assert feed.identity == identity

    run(consumer, test, {0: 5}, identity=identity, known_identity=known)


def test_a_topic_that_was_known_is_not_read_before_it_is_known_again() -> None:
    """Brokers may not say for a moment which topic it is; meanwhile it may be another one."""
    consumer = FakeConsumer(found=[[FakeMessage(5)]])
    told = reason(consumer, {0: 5}, identity="", known_identity="a")
    assert "do not say whether t is the topic that it was" in told
    assert not consumer.assigned


def test_a_topic_that_is_made_again_while_it_is_read() -> None:
    """No record of the new one is taken for one behind the positions of the old one."""
    consumer, known = FakeConsumer(found=[[FakeMessage(5)]]), ["a"]

    async def test(feed: KafkaFeed) -> None:
        assert [one.offset for one in await feed.read()] == [5]
        known[0] = "b"
        consumer.found.append([FakeMessage(6)])
        with pytest.raises(FeedError, match="its id is b, and what was taken is of a"):
            await feed.read()

    run(consumer, test, {0: 5}, identity=lambda: known[0])


def test_what_cannot_be_checked_is_not_taken_but_tried_again() -> None:
    consumer, known = FakeConsumer(found=[[FakeMessage(5)]]), ["a"]

    async def test(feed: KafkaFeed) -> None:
        await feed.read()
        known[0] = ""
        consumer.found.append([FakeMessage(6)])
        with pytest.raises(FeedError, match="do not say whether t is the topic that it was"):
            await feed.read()

    run(consumer, test, {0: 5}, identity=lambda: known[0])


def test_a_thread_that_hangs_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_source, "CLOSE_S", 0.01)
    gate = threading.Event()

    def hang(topic: str) -> str:
        gate.wait(30)
        return ""

    async def main() -> None:
        feeds = [feed_of(FakeConsumer(), {}) for _ in range(20)]
        for feed in feeds:
            feed._ask_identity = hang
        await asyncio.gather(*(feed.close() for feed in feeds))
        gate.set()

    asyncio.run(main())
