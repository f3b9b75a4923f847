"""Kafka as the engine of the replicated logs: a log is a partition of a topic.

Only those parts of Kafka are used that every implementation of its protocol has: an append that is
answered with its offset when a quorum has it (`acks=all` of an idempotent producer), a read from an
offset, the end, and DeleteRecords. How far the nodes' replicas have come stands in offsets of
consumer groups, one group a node, so that the usual tools show the lag; no consumer is ever in
these groups.

Cost: an append to three brokers 1 ms, with four copies of its bytes; a read of records that are
there already some 10 µs and 1 µs a record; asking where the log ends 1 ms. A log that is read has
five threads of librdkafka and reads up to 40 MiB ahead, one that is appended to has five
threads. Both are made when they are needed first, since most processes do one of the two.

Threads: a `KafkaLog` belongs to one thread at a time, a `KafkaEngine` to all. Neither outlives a
fork.

Rejected: transactions for fencing. They cost 50 ms from Python, their markers take offsets, and the
log's own order fences as well (`storage.replicated.office`). Consumer groups for ownership: they
know nothing of who has the data, and notice a death after 6 s at the soonest. One producer for all
logs: an append that fails ends it, and with it the appends of others. Asking a log's consumer for
the end: the broker answers the requests of a connection one after the other, so the question waits
for the fetch before it (50 to 130 ms). The admin client for the end: while it waits for a leader
that is away it spends 0.5 to 0.7 of a core, whatever its settings say (librdkafka 2.16.1; a
consumer 0.003). The admin client for the offsets of groups: when a group has moved to another
broker, the answer kills the process (librdkafka 2.16.1: `rd_kafka_handle_OffsetFetch` looks for the
group of a client that has none; and a request to a coordinator whose connection breaks uses memory
that was freed, issue 5397). A consumer that never joins its group reads and writes the offsets
instead, one for each node.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Final

from confluent_kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import ConfigResource, NewTopic, OffsetSpec

from storage.errors import EngineError, OffsetRangeError
from storage.replicated.kafka_clients import (
    CALL_TIMEOUT_S,
    END_TIMEOUT_S,
    REPORTS_GRACE_S,
    Asker,
    answer,
    log,
    made,
    refused,
    result,
)
from storage.replicated.kafka_settings import ClientSettings, ClusterUrl
from storage.replicated.kafka_topics import TopicFound, TopicPlan, differences, plans
from storage.replicated.kafka_transactions import KafkaTransactions

BATCH_RECORDS: Final = 512
"""The most records of one read: 17 MB of groups of 128 messages."""
CREATE_TRIES: Final = 100
CREATE_POLL_S: Final = 0.1
REPORTS_POLL_S: Final = 1.0

_RANGE_ERRORS = frozenset(
    {KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE, KafkaError._LOG_TRUNCATION}
)
_AWAY_ERRORS = frozenset(
    {
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._MAX_POLL_EXCEEDED,
        KafkaError._RESOLVE,
        KafkaError._TIMED_OUT,
        KafkaError._TRANSPORT,
    }
)
"""Errors of brokers that cannot be reached now. The client goes on trying."""
_NOWHERE = -1
"""Where a consumer stands that reads nothing."""


class KafkaLog:
    """One partition, as an `EngineLog`."""

    def __init__(
        self,
        settings: ClientSettings,
        asker: Asker,
        topic: str,
        partition: int,
        *,
        is_transactional: bool = False,
    ) -> None:
        """`is_transactional`: some of it was written in transactions."""
        self.place = 0
        self._is_transactional = is_transactional
        self.name = f"{topic}/{partition}"
        self._settings = settings
        self._asker = asker
        self._topic = topic
        self._partition = partition
        self._producer: Producer | None = None
        self._consumer: Consumer | None = None
        self._position = _NOWHERE
        self._has_failed = False

    def prepare_append(self) -> None:
        """Connect the producer, behind the caller's back.

        The first append takes half a second longer otherwise: a producer that finds no connection
        when it asks for its number asks again after 500 ms, and no setting changes that. It is a
        long time for a process that claims an office."""
        if self._producer is None:
            self._make_producer()

    def append(self, records: Sequence[bytes]) -> list[int | None]:
        """See `EngineLog`. Waits up to `message_timeout_ms` of the settings."""
        assert not self._has_failed, f"{self.name}: an append has failed before"
        if self._position != _NOWHERE:
            # The owner knows the records that it wrote: they need not be fetched and kept as well.
            assert self._consumer is not None
            self._consumer.unassign()
            self._position = _NOWHERE
        offsets: list[int | None] = [None] * len(records)
        waiting = set(range(len(records)))
        producer = self._producer or self._make_producer()
        for index, record in enumerate(records):
            self._produce(producer, record, _report(self.name, index, offsets, waiting))
        self._poll(producer, 0)
        # librdkafka promises a timeout. We set our own as well, because an owner that waits forever
        # would block its shard.
        patience_s = self._settings.message_timeout_ms / 1000 + REPORTS_GRACE_S
        while waiting and patience_s > 0:
            found = self._poll(producer, REPORTS_POLL_S)
            if found is None:
                break
            if not found:
                patience_s -= REPORTS_POLL_S
        self._has_failed = None in offsets
        return offsets

    def _produce(
        self,
        producer: Producer,
        record: bytes,
        report: "Callable[[KafkaError | None, Message | None], None]",
    ) -> None:
        while True:
            try:
                producer.produce(self._topic, record, partition=self._partition, on_delivery=report)
                return
            except BufferError:
                # Its queue is full (100,000 records, 1 GiB): some have to be answered first.
                if self._poll(producer, REPORTS_POLL_S) is None:
                    return  # The report is missing: it is not known whether the record is there.
            except KafkaException as error:
                # Too large a record is ours to know: `envelope` cuts frames.
                assert error.args[0].code() != KafkaError.MSG_SIZE_TOO_LARGE, len(record)
                report(error.args[0], None)
                return

    def _poll(self, producer: Producer, wait_s: float) -> int | None:
        """How many reports it has made; None: it can do nothing any more.

        The client says so by an exception; and where it calls back nevertheless, Python says that
        something was returned though there is one."""
        try:
            return producer.poll(wait_s)
        except (KafkaException, SystemError) as error:
            log.error("%s: its producer can do nothing any more: %s", self.name, error)
            return None

    def read(self, offset: int, wait_s: float) -> list[tuple[int, bytes]]:
        """See `EngineLog`. Raises EngineError where reading is refused.

        A topic that is not there looks like one whose brokers are away."""
        assert offset >= 0, offset
        try:
            consumer = self._consumer or self._make_consumer()
            if offset != self._position:
                # Not `seek`: it fails while the partition is not fetched yet.
                consumer.assign([TopicPartition(self._topic, self._partition, offset)])
                self._position = offset
            found = consumer.consume(BATCH_RECORDS, 0)
            if not found and wait_s > 0:
                # `consume` waits until it has as many as it was asked for.
                found = consumer.consume(1, wait_s)
                if found:
                    found += consumer.consume(BATCH_RECORDS - 1, 0)
        except KafkaException as error:
            raise refused("read", self.name, error) from error
        records: list[tuple[int, bytes]] = []
        self.place = offset
        for message in found:
            problem = message.error()
            if problem is not None and problem.code() == KafkaError._PARTITION_EOF:
                end = message.offset()
                assert end is not None
                self.place = self._position = end
                continue
            if problem is not None:
                # The next read begins anew at this place, and is told again.
                self._position = _NOWHERE
                if not records:
                    self._judge(offset, problem)
                return records
            place = message.offset()
            assert place is not None
            records.append((place, message.value() or b""))
            self.place = self._position = place + 1
        return records

    def _judge(self, offset: int, error: KafkaError) -> None:
        """An error instead of records: returns if it may pass."""
        if error.code() in _RANGE_ERRORS:
            if (ends := self._ends()) is None:
                return
            first, end = ends
            is_cut = error.code() == KafkaError._LOG_TRUNCATION
            # Else a broker has answered that did not know yet that it leads.
            if is_cut or not first <= offset <= end:
                raise OffsetRangeError(self.name, offset, first, end)
        elif error.code() not in _AWAY_ERRORS and not error.retriable():
            raise refused("read", self.name, error)

    def end(self) -> int | None:
        """See `EngineLog`. Asks the partition's leader, for at most END_TIMEOUT_S."""
        ends = self._ends()
        return None if ends is None else ends[1]

    def is_led(self) -> bool:
        """Whether a broker knows that it leads the partition."""
        partition = TopicPartition(self._topic, self._partition)
        admin = self._asker.admin
        try:
            wanted = {partition: OffsetSpec.latest()}
            asked = admin.list_offsets(wanted, request_timeout=END_TIMEOUT_S)
            offset: int = result(asked[partition], END_TIMEOUT_S).offset
        except (KafkaException, FutureTimeoutError):
            return False
        finally:
            admin.poll(0)  # its log lines
        # Where no leader answers in time there is no error but an offset below zero.
        return offset >= 0

    def _ends(self) -> tuple[int, int] | None:
        """Where it begins and ends, as the brokers say it now."""
        try:
            return self._asker.ends(self._topic, self._partition)
        except KafkaException as error:
            # Brokers that are away are said to be by the client. A topic that was deleted is not.
            log.warning("%s: the brokers do not say where it ends: %s", self.name, error)
            return None

    def delete_before(self, offset: int) -> None:
        """See `EngineLog`. The broker deletes whole segments, in its own time."""
        assert offset >= 0, offset
        wanted = TopicPartition(self._topic, self._partition, offset)
        asked = self._asker.admin.delete_records([wanted], request_timeout=CALL_TIMEOUT_S)
        answer("delete records", self.name, asked[wanted])

    def close(self) -> None:
        """See `EngineLog`."""
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None
            self._position = _NOWHERE
        if self._producer is not None:
            # Only of an append that has failed something may be left.
            self._producer.purge()
            self._producer.poll(0)
            self._producer = None

    def _make_producer(self) -> Producer:
        self._producer = made(Producer, self._settings.of_producer(), self._settings.url)
        return self._producer

    def _make_consumer(self) -> Consumer:
        self._consumer = made(
            Consumer,
            self._settings.of_consumer(is_transactional=self._is_transactional),
            self._settings.url,
        )
        return self._consumer


class KafkaEngine:
    """The logs of one cluster, and its progress."""

    def __init__(
        self, settings: ClientSettings, *, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        """Waits for no broker. Raises EngineError where the client does not know a setting."""
        self._settings = settings
        self._url = settings.url
        self._asker = Asker(settings)
        self._sleep = sleep
        self._created: set[str] = set()
        self._asking: dict[str, Consumer] = {}
        """By node, the consumer that asks for its progress, and commits it."""
        self._log_partitions: tuple[int, ...] = ()

    @property
    def url(self) -> ClusterUrl:
        """Where it is."""
        return self._url

    def log(self, shard: int) -> KafkaLog:
        """The message log of a shard, opened anew."""
        return KafkaLog(self._settings, self._asker, self._url.log_topic, shard)

    def settled(self, shard: int) -> KafkaLog:
        """The log of a shard's settled rows, opened anew."""
        topic = self._url.settled_topic
        return KafkaLog(self._settings, self._asker, topic, shard, is_transactional=True)

    def transactions(self, shard: int, stamp: int) -> KafkaTransactions:
        """Those of a shard with that stamp; nothing is opened yet."""
        return KafkaTransactions(self._settings, shard, stamp)

    def meta(self) -> KafkaLog:
        """The log of the cluster's facts (`storage.replicated.meta`), opened anew."""
        return KafkaLog(self._settings, self._asker, self._url.meta_topic, 0)

    def create(self, shards: int, replication: int, *, flushes: bool) -> list[str]:
        """Make the topics that are missing; returns their names. `check` judges those there are.

        Returns when all partitions have leaders that know of it. `flushes`: see `TopicPlan`. Raises
        EngineError."""
        known = self._topic_partitions()
        missing = [
            plan for plan in plans(self._url, shards, flushes=flushes) if plan.name not in known
        ]
        made = [plan.name for plan in missing if self._make_topic(plan, replication)]
        # Brokers learn of a topic one after the other, each in its time. The broker that is asked
        # next may not know it yet.
        self._created.update(plan.name for plan in missing)
        for plan in missing:
            self._wait_for_leaders(plan)
        return made

    def _why(self, error: KafkaException) -> KafkaException | KafkaError:
        """The reason that brokers did not answer: it says more than the error that none did."""
        return self._asker.trouble or error

    def _wait_for_leaders(self, plan: TopicPlan) -> None:
        waiting = {
            KafkaLog(self._settings, self._asker, plan.name, partition)
            for partition in range(plan.partitions)
        }
        for _ in range(CREATE_TRIES):
            waiting = {one for one in waiting if not one.is_led()}
            if not waiting:
                return
            self._sleep(CREATE_POLL_S)
        reason = f"{len(waiting)} of its partitions have no leader"
        raise EngineError("create topic", plan.name, reason, "look at the logs of the brokers")

    def _make_topic(self, plan: TopicPlan, replication: int) -> bool:
        """Whether it was made now, and not by another at the same time."""
        settings = plan.settings(replication)
        topic = NewTopic(plan.name, plan.partitions, replication, config=settings)
        asked = self._asker.admin.create_topics([topic], request_timeout=CALL_TIMEOUT_S)
        try:
            result(asked[plan.name], CALL_TIMEOUT_S)
        except KafkaException as error:
            if error.args[0].code() == KafkaError.TOPIC_ALREADY_EXISTS:
                return False
            raise refused("create topic", plan.name, error) from error
        except FutureTimeoutError as error:
            raise refused("create topic", plan.name, "no answer in time") from error
        return True

    def check(self, shards: int, *, flushes: bool, replication: int | None = None) -> list[str]:
        """Errors of the topics, a sentence for each. Raises EngineError."""
        wanted = plans(self._url, shards, flushes=flushes)
        return differences(self._found({plan.name for plan in wanted}), wanted, replication)

    def _found(self, names: Iterable[str]) -> dict[str, TopicFound]:
        known = self._topic_partitions()
        found = {}
        for name in known.keys() & names:
            replications = tuple(len(one.replicas) for one in known[name].values())
            found[name] = TopicFound(replications, self._settings_of(name))
        return found

    def _settings_of(self, name: str) -> dict[str, str]:
        """The settings of a topic that one of the brokers knows."""
        resource = ConfigResource(ConfigResource.Type.TOPIC, name)
        for _ in range(CREATE_TRIES):
            asked = self._asker.admin.describe_configs([resource], request_timeout=CALL_TIMEOUT_S)
            try:
                entries = result(asked[resource], CALL_TIMEOUT_S)
                return {entry.name: entry.value for entry in entries.values()}
            except KafkaException as error:
                if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                    raise refused("describe topic", name, error) from error
            except FutureTimeoutError as error:
                raise refused("describe topic", name, "no answer in time") from error
            self._sleep(CREATE_POLL_S)
        raise refused("describe topic", name, "some brokers do not know it")

    def has_topics(self) -> bool:
        """Whether the topic of the cluster's facts is there. Raises EngineError."""
        return self._url.meta_topic in self._topic_partitions()

    def _topic_partitions(self) -> dict[str, dict[int, Any]]:
        """The partitions of each topic that there is."""
        for _ in range(CREATE_TRIES):
            try:
                topics = self._asker.topics()
            except KafkaException as error:
                raise refused("list topics", str(self._url), self._why(error)) from error
            known = {name: one.partitions for name, one in topics.items() if one.error is None}
            if self._created <= known.keys():
                return known
            self._sleep(CREATE_POLL_S)
        names = ", ".join(sorted(self._created - known.keys()))
        reason = f"{names} are not there, and were made"
        raise EngineError("list topics", str(self._url), reason, "look at the logs of the brokers")

    def commit_progress(self, node: str, shard: int, offset: int, note: str = "") -> None:
        """The node's replica of a shard has a checkpoint at `offset` of the shard's log; `note`
        goes with it (4 KiB at most).

        Raises EngineError; the next call reports it again. Brokers forget a report after
        `offsets.retention.minutes` (a week)."""
        assert offset >= 0, offset
        place = TopicPartition(self._url.log_topic, shard, offset, metadata=note)
        group = self._url.progress_group(node)
        asking = self._of_group(node)
        try:
            answered = asking.commit(offsets=[place], asynchronous=False)
        except KafkaException as error:
            raise refused("commit progress", group, error) from error
        finally:
            asking.poll(0)  # its log lines
        for partition in answered or ():
            if partition.error is not None:
                raise refused("commit progress", group, partition.error)

    def progress(self, nodes: Iterable[str]) -> dict[str, dict[int, int]]:
        """Where the checkpoint of each node's replicas is: offset by shard.

        See `noted_progress`."""
        return {
            node: {shard: offset for shard, (offset, _) in places.items()}
            for node, places in self.noted_progress(nodes).items()
        }

    def noted_progress(self, nodes: Iterable[str]) -> dict[str, dict[int, tuple[int, str]]]:
        """The same, each with its note.

        A shard of which nothing is known is left out. Raises EngineError."""
        return {node: self._progress_of(node) for node in nodes}

    def _of_group(self, node: str) -> Consumer:
        """The consumer that asks for a node's progress, and commits it."""
        asking = self._asking.get(node)
        if asking is None:
            group = {"group.id": self._url.progress_group(node)}
            settings = self._settings.of_consumer() | group
            asking = self._asking[node] = made(Consumer, settings, self._url)
        return asking

    def _progress_of(self, node: str) -> dict[int, tuple[int, str]]:
        group = self._url.progress_group(node)
        asking = self._of_group(node)
        topic = self._url.log_topic
        if not self._log_partitions:
            self._log_partitions = tuple(self._topic_partitions().get(topic, ()))
        wanted = [TopicPartition(topic, partition) for partition in self._log_partitions]
        if not wanted:
            return {}
        try:
            places = asking.committed(wanted, CALL_TIMEOUT_S)
        except KafkaException as error:
            raise refused("list progress", group, error) from error
        finally:
            asking.poll(0)  # its log lines
        return {
            place.partition: (place.offset, place.metadata or "")
            for place in places
            if place.error is None and place.offset >= 0
        }


def _report(
    name: str, index: int, offsets: list[int | None], waiting: set[int]
) -> "Callable[[KafkaError | None, Message | None], None]":
    """The callback of the client for the outcome of a record."""

    def reported(error: KafkaError | None, message: Message | None) -> None:
        waiting.discard(index)
        if error is None and message is not None:
            offsets[index] = message.offset()
        else:
            # The caller is told by the None that stays; the reason is for people.
            log.warning("%s: an append has failed: %s", name, error)

    return reported
