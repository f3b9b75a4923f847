"""What an append makes of a client that can do nothing any more; all else is in tests/cluster."""

from typing import Any, cast

import pytest
from confluent_kafka import KafkaError, KafkaException

from storage.replicated import kafka
from storage.replicated.kafka import KafkaLog
from storage.replicated.kafka_clients import Asker
from storage.replicated.kafka_settings import ClientSettings, ClusterUrl


class BrokenProducer:
    """A producer whose client has failed for good: `poll` raises."""

    error: Exception = KafkaException(KafkaError(KafkaError._FATAL))
    is_full = False

    def __init__(self, settings: dict[str, Any], **_: object) -> None:
        self.polls = 0

    def produce(self, topic: str, value: bytes, **_: object) -> None:
        if self.is_full:
            raise BufferError("the queue is full")

    def poll(self, wait_s: float) -> int:
        self.polls += 1
        assert self.polls < 10, "it is asked again and again"
        raise self.error

    def purge(self) -> None:
        """Nothing is kept."""


@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize(
    "error",
    [
        KafkaException(KafkaError(KafkaError._FATAL)),
        SystemError("returned a result with an exception set"),
    ],
)
def test_a_client_that_has_failed_for_good_gives_no_answer(
    error: Exception, is_full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka, "Producer", BrokenProducer)
    monkeypatch.setattr(BrokenProducer, "error", error)
    monkeypatch.setattr(BrokenProducer, "is_full", is_full)
    settings = ClientSettings(ClusterUrl.parse("kafka://127.0.0.1:9/delays"), {})
    log = KafkaLog(settings, cast("Asker", None), "delays.log", 0)
    assert log.append([b"one", b"two"]) == [None, None]
    with pytest.raises(AssertionError, match="an append has failed before"):
        log.append([b"three"])
