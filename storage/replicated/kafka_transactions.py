"""Transactions of Kafka: `SettledTransactions` on real brokers.

A slot is a producer with the transactional id NAME.SHARD.SLOT.

    begin ─▶ produce … ─▶ flush ─▶ all were written ─▶ commit
                              └──▶ one was refused, or no broker answered ─▶ abort

Cost: 50 to 60 ms for a transaction of a slot whose last one has just ended: the coordinator refuses
a new one until the markers are written, and the client asks again 20 ms later, up to twice. Some
hundred messages cost no more than one. Opening takes 40 ms to 1.5 s, all slots at once.

Threads: see `SettledTransactions`. Five threads of librdkafka for each slot.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

import numpy as np
from confluent_kafka import KafkaError, KafkaException, Message, Producer
from confluent_kafka.admin import AdminClient

from storage.errors import EngineError, FencedError
from storage.replicated.kafka_clients import text_of
from storage.replicated.kafka_settings import ClientSettings
from storage.replicated.settled import encode_settled
from storage.replicated.transactions import SLOTS, Aborted, Committed, TopicRecord
from storage.rows import DISPATCH_DTYPE

CALL_TIMEOUT_S: Final = 3.0
"""After which the client is asked again for the same: the outcome has to be known."""
ASK_TIMEOUT_S: Final = 5.0
OPEN_TRIES: Final = 100

log = logging.getLogger(__name__)

_OF_THE_RECORD: Final = frozenset(
    {
        KafkaError._UNKNOWN_PARTITION,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError.INVALID_MSG,
        KafkaError.INVALID_RECORD,
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.POLICY_VIOLATION,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.TOPIC_EXCEPTION,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
    }
)
"""Errors that another transaction would meet as well. All others pass by themselves."""
_OF_ITS_BATCH: Final = frozenset(
    {
        KafkaError.INVALID_MSG,
        KafkaError.INVALID_RECORD,
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.POLICY_VIOLATION,
        KafkaError.RECORD_LIST_TOO_LARGE,
    }
)
"""Brokers refuse a batch for the sake of one record."""
_ROWS: Final = -1
"""Instead of the index of a record."""


class KafkaTransactions:
    """The transactions of a shard."""

    def __init__(self, settings: ClientSettings, shard: int, stamp: int) -> None:
        """Nothing connects before `open`. `stamp`: of the shard."""
        self._settings = settings
        self._shard = shard
        self._stamp = stamp
        self._opening = threading.Lock()
        self._gives_up = False
        self._producers: list[Producer] = []

    def _id(self, slot: int) -> str:
        return f"{self._settings.url.name}.{self._shard}.{slot}"

    # ── the same brokers? ──────────────────────────────────────────────────────────────────────

    def differs(self, bootstrap: str) -> str | None:
        """See `SettledTransactions`."""
        own, given = self._settings.url.brokers, tuple(bootstrap.split(","))
        if set(given) <= set(own):
            return None
        try:
            own_id = _cluster_id(self._settings.of_admin())
            # The secrets of our own brokers are not for anybody else.
            given_id = _cluster_id(
                {**self._settings.without_properties().of_admin(), "bootstrap.servers": bootstrap}
            )
        except KafkaException as error:
            return f"the brokers were asked who they are, and one did not say: {text_of(error)}"
        if own_id != given_id:
            return (
                f"exactly_once goes only into the brokers that have the cluster's own logs "
                f"({','.join(own)}, cluster id {own_id}); {bootstrap} is the cluster {given_id}"
            )
        return None

    # ── slots ──────────────────────────────────────────────────────────────────────────────────

    def open(self) -> None:
        """See `SettledTransactions`."""
        with self._opening:
            if not self._producers:
                with ThreadPoolExecutor(SLOTS, "delayserver-slots") as together:
                    self._producers = list(together.map(self._open_slot, range(SLOTS)))

    def _open_slot(self, slot: int) -> Producer:
        producer = Producer(self._settings.of_transactions(self._id(slot)), logger=log)
        for _ in range(OPEN_TRIES):
            try:
                producer.init_transactions(CALL_TIMEOUT_S)
                return producer
            except KafkaException as error:
                if not error.args[0].retriable():
                    raise self._refused(error) from error
                log.warning("%s: no coordinator yet: %s", self._id(slot), text_of(error))
        raise self._refused("no answer in time")

    def _refused(self, error: KafkaException | str) -> EngineError:
        advice = "see whether the brokers run and this client may write in transactions"
        return EngineError("open transactions", str(self._settings.url), text_of(error), advice)

    def commit(
        self, slot: int, records: Sequence[TopicRecord], rows: bytes, now_ms: int
    ) -> Committed | Aborted:
        """See `SettledTransactions`."""
        producer = self._producers[slot]
        settled = encode_settled(np.frombuffer(rows, DISPATCH_DTYPE), self._stamp, now_ms)
        offsets: list[int] = []
        errors: dict[int, KafkaError] = {}

        def reported(index: int, error: KafkaError | None, message: Message | None) -> None:
            if error is not None:
                errors[index] = error
            elif index == _ROWS and message is not None:
                place = message.offset()
                assert place is not None
                offsets.append(place)

        try:
            producer.begin_transaction()
            for index, record in enumerate(records):
                topic, value, key, headers = record
                told = partial(reported, index)
                try:
                    producer.produce(topic, value, key, headers=headers, on_delivery=told)
                except KafkaException as error:
                    if error.args[0].code() not in _OF_THE_RECORD:
                        raise
                    errors[index] = error.args[0]
            topic, told = self._settings.url.settled_topic, partial(reported, _ROWS)
            producer.produce(topic, settled, partition=self._shard, on_delivery=told)
            # All reports come within `message.timeout.ms`.
            while producer.flush(CALL_TIMEOUT_S) and not self._gives_up:
                pass
            if errors:
                return self._abort(slot, next(iter(errors.values())), errors)
            if not offsets:
                raise FencedError(self._id(slot), "the process ends in the middle of it")
            self._until_known(partial(producer.commit_transaction, CALL_TIMEOUT_S))
        except KafkaException as error:
            return self._abort(slot, error.args[0], errors)
        except SystemError as error:
            # The client does this with a fatal error: it raises one, and calls back nevertheless.
            raise FencedError(self._id(slot), "its producer can do nothing any more") from error
        (offset,) = offsets
        return Committed(offset)

    def _abort(self, slot: int, error: KafkaError, errors: Mapping[int, KafkaError]) -> Aborted:
        """Raises FencedError where it is not certain that nothing was committed."""
        if error.fatal():
            raise self._fenced(slot, error)
        try:
            abort = self._producers[slot].abort_transaction
            self._until_known(partial(abort, CALL_TIMEOUT_S))
        except KafkaException as failed:
            raise self._fenced(slot, failed.args[0]) from failed
        refused = {
            index: one.str()
            for index, one in errors.items()
            if index != _ROWS and one.code() in _OF_THE_RECORD
        }
        neighbours = frozenset(one for one in refused if errors[one].code() in _OF_ITS_BATCH)
        log.warning("%s: a transaction was aborted: %s", self._id(slot), error)
        return Aborted(error.str(), refused, neighbours)

    def _fenced(self, slot: int, error: KafkaError) -> FencedError:
        return FencedError(self._id(slot), f"its transaction cannot be ended: {error.str()}")

    def _until_known(self, call: Callable[[], object]) -> None:
        """A call that did not come to its end is made again, and goes on where it was."""
        while True:
            try:
                call()
                return
            except KafkaException as error:
                if self._gives_up or not error.args[0].retriable():
                    raise

    def give_up(self) -> None:
        """See `SettledTransactions`."""
        self._gives_up = True

    def close(self) -> None:
        """See `SettledTransactions`."""
        with self._opening:
            producers, self._producers = self._producers, []
        for producer in producers:
            producer.purge()
            producer.poll(0)


def _cluster_id(settings: dict[str, Any]) -> str | None:
    admin = AdminClient(settings, logger=log)
    found: str | None = admin.list_topics(timeout=ASK_TIMEOUT_S).cluster_id
    return found
