"""Messages of librdkafka's clients, in words; the calls of clients are in tests/cluster."""

import logging

import pytest
from confluent_kafka import KafkaError, KafkaException

from storage.errors import EngineError
from storage.replicated.kafka_clients import QUIET_S, Asker, _Repeats, refused
from storage.replicated.kafka_settings import ClientSettings, ClusterUrl


@pytest.mark.parametrize("wrap", [KafkaException, lambda error: error, lambda error: error.str()])
def test_a_refusal_says_why_however_the_client_tells_it(wrap: type[KafkaException]) -> None:
    error = refused("read", "a/0", wrap(KafkaError(KafkaError._TRANSPORT)))
    assert isinstance(error, EngineError)
    assert KafkaError(KafkaError._TRANSPORT).str() in str(error) and "a/0" in str(error)


def test_a_setting_that_the_client_does_not_know_is_an_error() -> None:
    settings = ClientSettings(ClusterUrl.parse("kafka://127.0.0.1:9/delays"), {"no.such": "1"})
    with pytest.raises(EngineError, match=r"no\.such"):
        Asker(settings)


def test_the_same_line_passes_once_in_a_while() -> None:
    filter_ = _Repeats()

    def passes(line: str, at_s: float) -> bool:
        record = logging.LogRecord("kafka", logging.WARNING, "", 0, line, None, None)
        record.created = at_s
        return filter_.filter(record)

    assert passes("[thrd:1] rdkafka#consumer-1 is away (after 7 ms in state UP)", 100.0)
    assert not passes("[thrd:2] rdkafka#consumer-2 is away (after 9 ms in state UP)", 101.0)
    assert passes("another line", 101.0)
    assert passes("[thrd:1] rdkafka#consumer-1 is away (after 8 ms in state UP)", 100.0 + QUIET_S)
