"""Messages to a topic, on brokers that librdkafka makes up: no Java, and no disk."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any

import msgspec
import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer

from delayserver.delivery.answers import Certainty
from delayserver.delivery.kafka_sink import (
    ANSWERS,
    WINDOW_BYTES,
    KafkaOpener,
    KafkaSink,
    ProducerOutlet,
    answer_of,
    record_headers,
    record_key,
)
from delayserver.delivery.shares import OVERHEAD_BYTES
from delayserver.delivery.sink import Confirmed, Failed, Result
from delayserver.errors import InputError
from delayserver.records.message import DueDelivery, Payload
from delayserver.records.subscriptions import (
    KafkaTarget,
    Subscription,
    decode_subscription,
    encode_subscription,
)
from delayserver.security.targets import TargetPolicy, split_bootstrap
from storage.replicated.kafka_settings import sink_settings
from tests.unit.fakes import always, delivery, subscription
from tests.waiting import until


@pytest.fixture(scope="module")
def bootstrap() -> Iterator[str]:
    mock = Producer({"test.mock.num.brokers": 3})
    brokers = mock.list_topics(timeout=10).brokers.values()
    yield ",".join(f"{broker.host}:{broker.port}" for broker in brokers)


def kafka(bootstrap: str, topic: str = "t", timeout_ms: int = 5000, **more: Any) -> Subscription:
    target = KafkaTarget(bootstrap=bootstrap, topic=topic, **more)
    return subscription(type="kafka", target=target, timeout_ms=timeout_ms)


def with_payload(seq: int, **payload: Any) -> DueDelivery:
    one = delivery(seq)
    return msgspec.structs.replace(one, payload=Payload(**{"body": b"%d" % seq, **payload}))


class Machine:
    def __init__(self, policy: TargetPolicy, **more: Any) -> None:
        self.sink = KafkaSink(KafkaOpener(policy, **more))
        self.told: list[tuple[int, Result]] = []

    async def deliver(self, subscription: Subscription, *deliveries: DueDelivery) -> None:
        def told(some: list[DueDelivery], result: Result) -> None:
            self.told += [(one.entry.seq, result) for one in some]

        await self.sink.deliver(subscription, list(deliveries), always, told)


def run(
    main: Callable[[Machine], Coroutine[Any, Any, None]],
    policy: TargetPolicy | None = None,
    **more: Any,
) -> Machine:
    async def whole() -> Machine:
        machine = Machine(policy or TargetPolicy(()), **more)
        try:
            await main(machine)
        finally:
            await machine.sink.close()
        return machine

    return asyncio.run(whole())


def test_messages_arrive(bootstrap: str) -> None:
    ones = [with_payload(seq, key=f"k{seq}") for seq in range(1, 301)]
    machine = run(lambda m: m.deliver(kafka(bootstrap), *ones))
    assert sorted(machine.told) == [(seq, Confirmed()) for seq in range(1, 301)]
    consumer = Consumer(
        {"bootstrap.servers": bootstrap, "group.id": "g", "auto.offset.reset": "earliest"}
    )
    consumer.subscribe(["t"])
    found: dict[bytes, Any] = {}
    give_up_s = time.monotonic() + 20
    while len(found) < 300 and time.monotonic() < give_up_s:
        for message in consumer.consume(500, 0.2):
            if message.error() is None:
                found[message.value() or b""] = message
    consumer.close()
    assert found.keys() == {b"%d" % seq for seq in range(1, 301)}
    assert found[b"7"].key() == b"k7"
    assert ("delay-id", b"m7") in found[b"7"].headers()


def test_what_a_record_says() -> None:
    one = with_payload(3, key="a ü", headers={"x-shop": "7", "Y": ""})
    names = [name for name, _ in record_headers(one)]
    assert names == [
        *("delay-id", "delay-subject", "delay-key", "delay-due", "delay-attempt"),
        *("x-shop", "Y"),
    ]
    values = dict(record_headers(one))
    assert values["delay-key"] == "a ü".encode()
    assert values["delay-attempt"] == b"1"
    assert "delay-key" not in dict(record_headers(with_payload(3)))
    keys = {text: record_key(KafkaTarget("b:1", "t", text), one) for text in _KEYS}
    assert keys == dict(
        zip(_KEYS, ["a ü".encode(), b"order.unpaid", b"m3", b"x", b""], strict=True)
    )
    assert record_key(KafkaTarget("b:1", "t"), with_payload(3)) is None


_KEYS = ("{key}", "{subject}", "{id}", "x", "")


def test_brokers_that_are_away_are_a_reason() -> None:
    machine = run(lambda m: m.deliver(kafka("127.0.0.1:1", timeout_ms=100), delivery(1)))
    ((seq, result),) = machine.told
    assert seq == 1
    assert isinstance(result, Failed) and result.reason.startswith("Kafka: ")


@pytest.mark.parametrize("allowed", ["10.0.0.0/8", "broker.example"])
def test_brokers_that_are_not_allowed(bootstrap: str, allowed: str) -> None:
    policy = TargetPolicy((allowed,))
    machine = run(lambda m: m.deliver(kafka(bootstrap), delivery(1)), policy)
    ((_, result),) = machine.told
    assert isinstance(result, Failed) and "not allowed" in result.reason


def test_brokers_that_name_others_that_are_not_allowed(bootstrap: str) -> None:
    first, *_ = split_bootstrap(bootstrap)
    policy = TargetPolicy((f"127.0.0.1:{first.port}",))
    subscription = kafka(f"127.0.0.1:{first.port}")
    machine = run(lambda m: m.deliver(subscription, delivery(1)), policy)
    ((_, result),) = machine.told
    assert isinstance(result, Failed) and "not allowed" in result.reason


def test_the_window_fits_into_the_client() -> None:
    settings = sink_settings("b:1", 1000)
    assert int(settings["queue.buffering.max.messages"]) > WINDOW_BYTES / OVERHEAD_BYTES
    assert int(settings["queue.buffering.max.kbytes"]) * 1024 > 2 * WINDOW_BYTES


def test_a_long_queue_goes_through_the_window(
    bootstrap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProducerOutlet, "window_bytes", 5 * OVERHEAD_BYTES)
    ones = [delivery(seq) for seq in range(1, 101)]
    machine = run(lambda m: m.deliver(kafka(bootstrap), *ones))
    assert sorted(machine.told) == [(seq, Confirmed()) for seq in range(1, 101)]


def test_a_message_that_is_too_long_is_refused_alone(bootstrap: str) -> None:
    def short(bootstrap: str, timeout_ms: int) -> Mapping[str, Any]:
        return sink_settings(bootstrap, timeout_ms) | {"message.max.bytes": 2000}

    ones = [with_payload(1), with_payload(2, body=b"x" * 3000), with_payload(3)]
    machine = run(lambda m: m.deliver(kafka(bootstrap), *ones), make_settings=short)
    told = dict(machine.told)
    assert (told[1], told[3]) == (Confirmed(), Confirmed())
    assert isinstance(told[2], Failed) and "MSG_SIZE_TOO_LARGE" in told[2].reason


def test_who_is_cancelled_is_told_nothing(bootstrap: str) -> None:
    is_opened = threading.Event()

    def noted(bootstrap: str, timeout_ms: int) -> Mapping[str, Any]:
        is_opened.set()
        return sink_settings(bootstrap, timeout_ms)

    async def main(m: Machine) -> None:
        task = asyncio.create_task(m.deliver(kafka("127.0.0.1:1"), delivery(1)))
        await asyncio.to_thread(is_opened.wait)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    assert run(main, make_settings=noted).told == []


def test_exactly_once_without_a_cluster_is_refused(bootstrap: str) -> None:
    machine = run(lambda m: m.deliver(kafka(bootstrap, exactly_once=True), delivery(1)))
    ((_, result),) = machine.told
    assert isinstance(result, Failed) and "no node of a cluster" in result.reason


def test_a_definition_as_bytes(bootstrap: str) -> None:
    one = kafka(bootstrap, key="{id}")
    assert decode_subscription(encode_subscription(one)) == one
    assert one.is_pushed and one.takes_many and not one.is_exactly_once
    assert kafka(bootstrap, exactly_once=True).is_exactly_once
    plain = subscription(type="webhook")
    assert b"target" not in encode_subscription(plain)
    assert plain.is_pushed and not plain.takes_many


@pytest.mark.parametrize(
    "text", ["", "a", "a:", "a:0", "a:70000", "a:1,", "http://a:1", "a:1/b", "u@a:1", "a b:1"]
)
def test_what_is_no_broker(text: str) -> None:
    with pytest.raises(InputError) as caught:
        split_bootstrap(text)
    assert caught.value.pointer == "/bootstrap"


def test_brokers() -> None:
    found = split_bootstrap("Broker1:9092,10.0.0.1:1,[::1]:65535")
    assert [(one.host, one.port, one.is_address) for one in found] == [
        ("broker1", 9092, False),
        ("10.0.0.1", 1, True),
        ("::1", 65535, True),
    ]


ANSWERED: dict[tuple[Certainty, bool], str] = {
    (Certainty.STORED, False): "DUPLICATE_SEQUENCE_NUMBER",
    (Certainty.NOT_STORED, True): """MSG_SIZE_TOO_LARGE RECORD_LIST_TOO_LARGE INVALID_MSG
        INVALID_MSG_SIZE INVALID_RECORD INVALID_TIMESTAMP POLICY_VIOLATION
        UNSUPPORTED_COMPRESSION_TYPE _PURGE_QUEUE""",
    (Certainty.NOT_STORED, False): """UNKNOWN_TOPIC_OR_PART UNKNOWN_TOPIC_ID TOPIC_EXCEPTION
        TOPIC_AUTHORIZATION_FAILED CLUSTER_AUTHORIZATION_FAILED INVALID_REQUIRED_ACKS
        UNSUPPORTED_FOR_MESSAGE_FORMAT _UNKNOWN_TOPIC _UNKNOWN_PARTITION _INVALID_ARG
        LEADER_NOT_AVAILABLE NOT_LEADER_FOR_PARTITION FENCED_LEADER_EPOCH UNKNOWN_LEADER_EPOCH
        BROKER_NOT_AVAILABLE REPLICA_NOT_AVAILABLE NOT_ENOUGH_REPLICAS _QUEUE_FULL _AUTHENTICATION
        _SSL""",
    (
        Certainty.UNKNOWN,
        False,
    ): """NOT_ENOUGH_REPLICAS_AFTER_APPEND REQUEST_TIMED_OUT
        NETWORK_EXCEPTION
        KAFKA_STORAGE_ERROR UNKNOWN _MSG_TIMED_OUT _TIMED_OUT _TRANSPORT _ALL_BROKERS_DOWN""",
    (Certainty.UNKNOWN, True): """OUT_OF_ORDER_SEQUENCE_NUMBER UNKNOWN_PRODUCER_ID
        INVALID_PRODUCER_EPOCH _FATAL _STATE _GAPLESS_GUARANTEE _PURGE_INFLIGHT _DESTROY""",
}
CODES = {name: meant for meant, names in ANSWERED.items() for name in names.split()}


@pytest.mark.parametrize("name", CODES)
def test_what_the_client_answers(name: str) -> None:
    found = answer_of(KafkaError(getattr(KafkaError, name)))
    assert (found.kept, found.is_shared) == CODES[name]
    assert found.reason.startswith("Kafka: ") and name in found.reason


def test_every_row_of_the_table_is_tested() -> None:
    assert {getattr(KafkaError, name) for name in CODES} == set(ANSWERS.rows)


def test_a_code_that_no_row_names_is_unknown() -> None:
    found = answer_of(KafkaError(KafkaError.SECURITY_DISABLED))
    assert found.kept is Certainty.UNKNOWN and "SECURITY_DISABLED" in found.reason


def test_many_brokers_that_are_away_hold_no_thread_that_others_need() -> None:
    async def main(m: Machine) -> None:
        tasks = [
            asyncio.create_task(m.deliver(kafka(f"127.0.0.1:{port}"), delivery(port)))
            for port in range(1, 21)
        ]
        await until(lambda: threading.active_count() > 20)
        assert await asyncio.wait_for(asyncio.to_thread(lambda: 7), 5) == 7
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    assert run(main).told == []


def test_a_producer_that_can_do_nothing_any_more_is_replaced(bootstrap: str) -> None:
    fatal = KafkaError(KafkaError._FATAL)

    async def main(m: Machine) -> None:
        await m.deliver(kafka(bootstrap), delivery(1))
        (opened,) = m.sink.outlets.all_open()
        outlet: Any = opened.outlet
        outlet._producer = Fatal(outlet._producer, KafkaException(fatal))
        await m.deliver(kafka(bootstrap), delivery(2))

    assert sorted(run(main).told) == [(1, Confirmed()), (2, Confirmed())]


class Fatal:
    """A producer of the client that can do nothing any more."""

    def __init__(self, real: Producer, error: Exception) -> None:
        self._real, self._error = real, error

    def produce(self, *_: Any, **__: Any) -> None:
        raise self._error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __len__(self) -> int:
        return len(self._real)
