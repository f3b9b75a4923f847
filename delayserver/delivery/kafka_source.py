"""Topics of Kafka that are read for sources: a consumer, and the thread that polls it.

    brokers ──▶ librdkafka ──▶ KafkaFeed's thread ──▶ Handover ──▶ event loop

Partitions are assigned by hand, each at the position that the source's state has. There is no group
that could move them, and no offset of the broker counts: the group's offsets are committed behind
what was taken, for those who watch the lag. Somebody else's error there is nobody's concern here.

A position that the topic does not hold any more is looked at before reading begins. What was
deleted before it was taken is gone, and is said: the log names how much. A topic that ends before
its position is another one of the same name; that is an error, and stays one until the source is
made again. Partitions that come later are found within REFRESH_S, and read from their beginning.

Brokers have to be allowed as for `delivery.kafka_sink`.

Cost: 4 µs of the feed's thread for a record; some five threads for each source. Threads: `open`,
`read`, `took` and `close` belong to the event loop; what else is here to the feed's thread.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final, TypeVar

import structlog
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from delayserver.delivery.feeds import (
    BATCH_MAX_BYTES,
    BATCH_RECORDS_MAX,
    Batch,
    FeedError,
    Handover,
)
from delayserver.delivery.kafka_sink import (
    Refusals,
    asked,
    authority,
    check_brokers,
    login_settings,
    reason_of,
)
from delayserver.records.sources import Source, SourceRecord
from delayserver.security.targets import TargetPolicy, split_bootstrap, split_broker
from storage.replicated.kafka_settings import source_settings

ASK_TRIES: Final = 5
ASK_TRY_S: Final = 1.0
"""For a question about the topic: whoever ends a feed waits no longer than that."""
POLL_S: Final = 0.2
REFRESH_S: Final = 30.0
"""Between two looks at how many partitions there are."""

_PASSING: Final = (
    KafkaError._TRANSPORT,
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._RESOLVE,
    KafkaError._TIMED_OUT,
    KafkaError._PARTITION_EOF,
)
"""Errors after which the client goes on by itself."""

T = TypeVar("T")

log = structlog.get_logger()
client_log = logging.getLogger(__name__)
"""What the client says by itself."""


class KafkaFeed:
    """A `Feed`."""

    def __init__(
        self,
        source: Source,
        positions: Mapping[int, int],
        policy: TargetPolicy,
        loop: asyncio.AbstractEventLoop,
        make_consumer: Callable[[dict[str, Any]], Consumer] = Consumer,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._topic = source.topic.topic
        self._positions = dict(positions)
        self._policy = policy
        self._handover = Handover(loop)
        self._took: dict[int, int] | None = dict(positions)
        """What is to be shown; at first where it begins, since a crash may have kept that back."""
        self._is_ending = False
        self._make_consumer = make_consumer
        self._refusals = Refusals()
        self._monotonic = monotonic
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
        await asyncio.to_thread(self._thread.join)

    # In the feed's thread.

    def _run(self) -> None:
        target = self._source.topic
        settings = {
            **source_settings(target.bootstrap, self._source.group),
            **login_settings(target),
            "error_cb": self._refusals,
            "logger": client_log,
        }
        try:
            check_brokers(self._policy, split_bootstrap(target.bootstrap))
            consumer = self._make_consumer(settings)
            try:
                self._read(consumer)
            finally:
                consumer.close()
        except FeedError as error:
            self._handover.fail(error)
        except Exception as error:  # also an address that is not allowed, a setting that is wrong
            self._handover.fail(FeedError(self._refusals.reason(error)))

    def _read(self, consumer: Consumer) -> None:

        def is_in_vain() -> bool:
            consumer.poll(0)  # nothing is assigned yet, so only what is wrong comes
            return self._is_ending or bool(self._refusals)

        def partitions_within(wait_s: float) -> list[int]:
            try:
                return self._partitions(consumer, wait_s)
            except KafkaException as error:
                if error.args[0].code() in _PASSING:
                    raise
                raise FeedError(reason_of(error.args[0])) from error

        partitions = asked(partitions_within, is_in_vain)
        consumer.assign([self._place(consumer, partition) for partition in partitions])
        looked_s = self._monotonic()
        while not self._is_ending:
            came = consumer.consume(BATCH_RECORDS_MAX, POLL_S)
            self._hand_over([record for record in map(self._record, came) if record is not None])
            self._show(consumer)
            if self._monotonic() - looked_s > REFRESH_S:
                looked_s = self._monotonic()
                # A broker that does not answer says nothing of partitions.
                with suppress(KafkaException):
                    found = self._partitions(consumer, ASK_TRY_S)
                    new = [one for one in found if one not in partitions]
                    consumer.incremental_assign([self._place(consumer, one) for one in new])
                    partitions += new
        self._show(consumer)

    def _ask(self, ask: Callable[[], T]) -> T:
        """What a broker answers, which may be away for a moment. Raises KafkaException."""
        for _ in range(ASK_TRIES - 1):
            try:
                return ask()
            except KafkaException as error:
                if self._is_ending or error.args[0].code() not in _PASSING:
                    raise
        return ask()

    def _partitions(self, consumer: Consumer, wait_s: float) -> list[int]:
        """Those of the topic, whose brokers are allowed. Raises KafkaException, FeedError."""
        found = consumer.list_topics(self._topic, timeout=wait_s)
        brokers = (authority(one.host, one.port) for one in found.brokers.values())
        check_brokers(self._policy, tuple(map(split_broker, brokers)))
        topic = found.topics[self._topic]
        if topic.error is not None:
            raise FeedError(f"the topic {self._topic}: {reason_of(topic.error)}")
        return sorted(topic.partitions)

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
        if error is not None:
            if error.code() in _PASSING:
                return None
            raise FeedError(reason_of(error))
        partition, offset = message.partition(), message.offset()
        assert partition is not None and offset is not None
        found = message.headers() or []
        pairs = found.items() if isinstance(found, dict) else found
        headers = tuple((name, _bytes(value)) for name, value in pairs)
        key, value = _bytes(message.key()), _bytes(message.value())
        return SourceRecord(partition, offset, key, value, headers)

    def _hand_over(self, records: list[SourceRecord]) -> None:
        batch: list[SourceRecord] = []
        total_bytes = 0
        for record in records:
            of_record = len(record.key or b"") + len(record.value or b"")
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
            # For show: who may not do that reads all the same.
            with suppress(KafkaException):
                consumer.commit(offsets=places, asynchronous=True)


def _bytes(value: str | bytes | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value


class KafkaFeedOpener:
    """A `FeedOpener`."""

    def __init__(self, policy: TargetPolicy) -> None:
        self._policy = policy

    async def open(self, source: Source, positions: Mapping[int, int]) -> KafkaFeed:
        """See `FeedOpener`. What is wrong is said by the first `read`."""
        return KafkaFeed(source, positions, self._policy, asyncio.get_running_loop())
