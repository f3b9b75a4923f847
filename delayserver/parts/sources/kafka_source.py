"""Topics of Kafka that are read for sources: a consumer, and the thread that polls it.

    brokers ──▶ librdkafka ──▶ KafkaFeed's thread ──▶ Handover ──▶ event loop

Partitions are assigned by hand, each at the position that the source's state has. There is no group
that could move them, and no offset of the broker counts: the group's offsets are committed behind
the records that were taken, for people who watch the lag. An error in them does not change the
records that are read here.

A position that the topic does not hold any more is looked at before reading begins. Records that
were deleted before they were taken are gone, and the log names how many. A topic that was made
again has another identity, its id, which is asked for before a batch is handed over; or it ends
before the position. Both are errors, and stay so until the source is made again. Partitions that
come later are found within REFRESH_S, and read from their beginning.

The markers of transactions, and aborted records, take offsets that no consumer gets. The client
tells the end of a partition, with its offset. So the position is moved there, and the lag that a
tool shows becomes 0.

If brokers go while a feed reads, its health tells: after AWAY_S without an answer, or where a
partition has no leader. The client looks for them by itself, ever more rarely.

Brokers have to be allowed as for `delivery.kafka_sink`.

Cost: 4 µs of the feed's thread for a record, and a question to a broker for each batch; some eight
threads for each source. Threads: `open`, `read`, `took` and `close` belong to the event loop; all
else here to the feed's thread.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Final, TypeVar

import structlog
from confluent_kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient

from delayserver.delivery.complaints import QuietLogger
from delayserver.delivery.kafka_sink import (
    Refusals,
    asked,
    authority,
    check_brokers,
    login_settings,
    reason_of,
)
from delayserver.delivery.own_threads import post_result
from delayserver.parts.sources.feeds import (
    BATCH_MAX_BYTES,
    BATCH_RECORDS_MAX,
    Batch,
    FeedError,
    Handover,
    Health,
)
from delayserver.parts.sources.records import KnownSource, SourceRecord
from delayserver.security.targets import TargetPolicy, split_bootstrap, split_broker
from storage.replicated.kafka_settings import admin_settings, source_settings

ASK_TRIES: Final = 5
ASK_TRY_S: Final = 1.0
"""For a question about the topic: the end of a feed waits no longer than that."""
POLL_S: Final = 0.2
REFRESH_S: Final = 30.0
"""Between two looks at how many partitions there are, and whether all can be read."""
SUSPECT_S: Final = 2.0
"""The same where something may be wrong."""
AWAY_S: Final = 8.0
"""After which brokers that do not answer are told of."""
CLOSE_S: Final = 5.0
"""A thread that a name server holds up is not waited for any longer."""
IDENTITY_S: Final = 5.0

_PASSING: Final = (
    KafkaError._TRANSPORT,
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._RESOLVE,
    KafkaError._TIMED_OUT,
    KafkaError._PARTITION_EOF,
)
"""Errors after which the client goes on by itself."""
_SUSPICIOUS: Final = (KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN, KafkaError._RESOLVE)

T = TypeVar("T")

log = structlog.get_logger()
client_log = QuietLogger(logging.getLogger(__name__))
"""The log lines of the client itself."""


class TopicIds:
    """Asks brokers for the ids of topics; of the feed's thread."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._admin: AdminClient | None = None

    def __call__(self, topic: str) -> str:
        """The id of a topic, which another of the same name does not have; empty where brokers do
        not say, since they are old, away, or do not let us ask. Blocks for IDENTITY_S at most."""
        try:
            if self._admin is None:
                self._admin = AdminClient(dict(self._settings), logger=client_log)
            topics = TopicCollection([topic])
            (found,) = self._admin.describe_topics(topics, request_timeout=IDENTITY_S).values()
            return str(found.result(IDENTITY_S).topic_id)
        except Exception as error:
            # Any error will do: an id that cannot be known is not checked.
            log.debug("the id of a topic is not known", topic=topic, error=str(error))
            return ""


class KafkaFeed:
    """A `Feed`."""

    def __init__(
        self,
        known: KnownSource,
        policy: TargetPolicy,
        loop: asyncio.AbstractEventLoop,
        health: Health,
        make_consumer: Callable[[dict[str, Any]], Consumer] = Consumer,
        make_ids: Callable[[Mapping[str, Any]], Callable[[str], str]] = TopicIds,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = known.definition
        self._topic = self._source.topic.topic
        self._positions = dict(known.state.positions)
        self.identity = known.state.identity
        """See `Feed`; at first that of the topic to which the positions belong."""
        self._policy = policy
        self._loop = loop
        self._handover = Handover(loop, health)
        self._took: dict[int, int] | None = dict(self._positions)
        """The positions to show; at first the begin, since a crash may have kept that back."""
        self._is_ending = False
        self._make_consumer = make_consumer
        login = admin_settings(self._source.topic.bootstrap) | login_settings(self._source.topic)
        self._ask_identity = make_ids(login)
        self._refusals = Refusals()
        self._monotonic = monotonic
        self._next: dict[int, int] = {}
        """For each assigned partition the offset behind the records that were handed over."""
        self._is_suspect = False
        """The client has said that brokers are away, or they did not answer."""
        self._looked_s = self._answered_s = 0.0
        self._ended: asyncio.Future[None] = loop.create_future()
        self._thread = threading.Thread(
            target=self._run, name="delayserver-kafka-source", daemon=True
        )
        self._thread.start()

    async def read(self) -> Batch:
        """See `Feed`."""
        return await self._handover.take()

    def took(self, positions: Mapping[int, int]) -> None:
        """See `Feed`."""
        self._took = dict(positions)

    async def close(self) -> None:
        """See `Feed`."""
        self._is_ending = True
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await asyncio.shield(self._ended)

    # In the feed's thread.

    def _run(self) -> None:
        target = self._source.topic
        login = login_settings(target)
        settings = {
            **source_settings(target.bootstrap, self._source.group),
            **login,
            "error_cb": self._on_error,
            "logger": client_log,
        }
        try:
            check_brokers(self._policy, split_bootstrap(target.bootstrap))
            consumer = self._make_consumer(settings)
            try:
                self._begin(consumer)
                self._read(consumer)
            finally:
                consumer.close()
        except FeedError as error:
            self._handover.fail(error)
        except Exception as error:  # also an address that is not allowed, a setting that is wrong
            self._handover.fail(FeedError(self._refusals.reason(error)))
        finally:
            post_result(self._ended, None)

    def _on_error(self, error: KafkaError) -> None:
        self._refusals(error)
        if error.code() in _SUSPICIOUS:
            self._is_suspect = True

    def _begin(self, consumer: Consumer) -> None:
        def is_in_vain() -> bool:
            consumer.poll(0)  # nothing is assigned yet, so only errors come
            return self._is_ending or bool(self._refusals)

        def partitions_within(wait_s: float) -> list[int]:
            try:
                return self._partitions(consumer, wait_s)[0]
            except KafkaException as error:
                if error.args[0].code() in _PASSING:
                    raise
                raise FeedError(reason_of(error.args[0])) from error

        partitions = asked(partitions_within, is_in_vain)
        found = self._ask_identity(self._topic)
        self.identity = self.identity or found
        self._check_identity(found)
        self._assign(consumer, partitions, consumer.assign)
        self._handover.tell(None)
        self._looked_s = self._answered_s = self._monotonic()

    def _read(self, consumer: Consumer) -> None:
        while not self._is_ending:
            came = consumer.consume(BATCH_RECORDS_MAX, POLL_S)
            records = [record for record in map(self._record, came) if record is not None]
            if records:
                # Asked behind the read: the records that were read are of the topic as it is now,
                # or as it was.
                if self.identity:
                    self._check_identity(self._ask_identity(self._topic))
                self._answered_s = self._monotonic()
            self._hand_over(records)
            self._show(consumer)
            pause_s = SUSPECT_S if self._is_suspect else REFRESH_S
            if self._monotonic() - self._looked_s > pause_s:
                self._look(consumer)
        self._show(consumer)

    def _check_identity(self, found: str) -> None:
        """Whether it is the topic still that the positions belong to, unless no broker has ever
        told that. Raises FeedError."""
        if found == self.identity:
            return
        if not found:
            raise FeedError(
                f"the brokers do not say whether {self._topic} is the topic that it was, and are "
                "asked again"
            )
        raise FeedError(
            f"the topic {self._topic} was made again: its id is {found}, and what was taken is of "
            f"{self.identity}. Delete the source, and put it again"
        )

    def _look(self, consumer: Consumer) -> None:
        """Whether brokers answer, and which partitions there are. Raises FeedError."""
        self._looked_s = self._monotonic()
        try:
            partitions, without_leader = self._partitions(consumer, ASK_TRY_S)
            new = [one for one in partitions if one not in self._next]
            if new:
                self._assign(consumer, new, consumer.incremental_assign)
        except KafkaException as error:
            # A broker that does not answer says nothing of partitions.
            self._is_suspect = True
            if self._looked_s - self._answered_s > AWAY_S:
                reason = self._refusals.reason(error)
                self._handover.tell(f"its brokers do not answer, and are asked again: {reason}")
            return
        self._answered_s = self._looked_s
        self._is_suspect = bool(without_leader)
        self._refusals.forget()
        if without_leader:
            named = ", ".join(map(str, without_leader[:10]))
            self._handover.tell(f"no broker leads these partitions of {self._topic} now: {named}")
        else:
            self._handover.tell(None)

    def _ask(self, ask: Callable[[], T]) -> T:
        """Ask a broker, which may be away for a moment. Raises KafkaException."""
        for _ in range(ASK_TRIES - 1):
            try:
                return ask()
            except KafkaException as error:
                if self._is_ending or error.args[0].code() not in _PASSING:
                    raise
        return ask()

    def _partitions(self, consumer: Consumer, wait_s: float) -> tuple[list[int], list[int]]:
        """Those of the topic, whose brokers are allowed, and those of them that no broker leads.
        Raises KafkaException, FeedError."""
        found = consumer.list_topics(self._topic, timeout=wait_s)
        brokers = (authority(one.host, one.port) for one in found.brokers.values())
        check_brokers(self._policy, tuple(map(split_broker, brokers)))
        topic = found.topics[self._topic]
        if topic.error is not None:
            raise FeedError(f"the topic {self._topic}: {reason_of(topic.error)}")
        led = found.brokers.keys()
        without_leader = [one for one, about in topic.partitions.items() if about.leader not in led]
        return sorted(topic.partitions), sorted(without_leader)

    def _assign(
        self,
        consumer: Consumer,
        partitions: Iterable[int],
        assign: Callable[[list[TopicPartition]], None],
    ) -> None:
        """Read these partitions, too: all of them, or none where it raises. Raises KafkaException,
        FeedError."""
        places = [self._place(consumer, partition) for partition in partitions]
        assign(places)
        self._next |= {place.partition: place.offset for place in places}

    def _place(self, consumer: Consumer, partition: int) -> TopicPartition:
        """Where to begin in a partition. Raises KafkaException, FeedError."""
        place = TopicPartition(self._topic, partition)
        first, end = self._ask(lambda: consumer.get_watermark_offsets(place, timeout=ASK_TRY_S))
        wanted = self._positions.get(partition, first)
        if wanted > end:
            raise FeedError(
                f"the topic {self._topic} ends at offset {end} of partition {partition}, before "
                f"{wanted}, which is next: it was made again. Delete the source, and put it again"
            )
        if wanted < first:
            log.error(
                "records were deleted from a topic before they were taken",
                source=self._source.name,
                topic=self._topic,
                partition=partition,
                first_lost=wanted,
                last_lost=first - 1,
            )
        place.offset = max(wanted, first)
        return place

    def _record(self, message: Message) -> SourceRecord | None:
        error = message.error()
        partition, offset = message.partition(), message.offset()
        if error is not None:
            if error.code() == KafkaError._PARTITION_EOF:
                return self._mark(partition, offset)
            if error.code() in _PASSING:
                self._is_suspect |= error.code() in _SUSPICIOUS
                return None
            raise FeedError(reason_of(error))
        assert partition is not None and offset is not None
        self._next[partition] = offset + 1
        found = message.headers() or []
        pairs = found.items() if isinstance(found, dict) else found
        headers = tuple((name, _bytes(value)) for name, value in pairs)
        key, value = _bytes(message.key()), _bytes(message.value())
        return SourceRecord(partition, offset, key, value, headers)

    def _mark(self, partition: int | None, end: int | None) -> SourceRecord | None:
        """A partition was read to its end. None: nothing is there that was not handed over."""
        if partition is None or end is None or end <= self._next.get(partition, end):
            return None
        self._next[partition] = end
        return SourceRecord(partition, end - 1, None, None, is_mark=True)

    def _hand_over(self, records: list[SourceRecord]) -> None:
        batch: list[SourceRecord] = []
        total_bytes = 0
        for record in records:
            of_record = len(record.key or b"") + len(record.value or b"")
            of_record += sum(len(name) + len(value or b"") for name, value in record.headers)
            if batch and total_bytes + of_record > BATCH_MAX_BYTES:
                self._give(batch)
                batch, total_bytes = [], 0
            batch.append(record)
            total_bytes += of_record
        if batch:
            self._give(batch)

    def _give(self, batch: Batch) -> None:
        while not self._is_ending and not self._handover.give(batch, POLL_S):
            pass

    def _show(self, consumer: Consumer) -> None:
        took, self._took = self._took, None
        if took:
            places = [TopicPartition(self._topic, *place) for place in took.items()]
            # For show: a client without the right to commit reads all the same.
            with suppress(KafkaException):
                consumer.commit(offsets=places, asynchronous=True)


def _bytes(value: str | bytes | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value


class KafkaFeedOpener:
    """A `FeedOpener`."""

    def __init__(self, policy: TargetPolicy) -> None:
        self._policy = policy

    async def open(self, known: KnownSource, health: Health) -> KafkaFeed:
        """See `FeedOpener`. The first `read` reports any error."""
        return KafkaFeed(known, self._policy, asyncio.get_running_loop(), health)
