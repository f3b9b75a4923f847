"""The recipe of docs/spark.md: a Kafka topic as the source of the sink, as it is written there."""

import contextlib
import json
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from delayserver.pipeline import session as sessions
from tests.cluster.brokers import Brokers
from tests.cluster.topics import make_topic
from tests.integration.api_support import ApiServer, now_ms, time_ms

DOCUMENT = Path(__file__).parents[3] / "docs" / "spark.md"
SUBJECT = "order.unpaid"
HALF_AN_HOUR_MS = 1_800_000
RECORDS: list[tuple[bytes | None, bytes | None]] = [
    (b"o1", b'{"cents":1}'),
    (b"o2", b'{"cents":2}'),
    (b"o3", None),
    (b"broken", b"{"),
    (b"binary", b"\x00\xff"),
    (b"text", b'"\xff"'),
    (b"\xff", b'{"cents":3}'),
    (None, b'{"cents":4}'),
    (b"o1", b'{"cents":5}'),
]
REASONS = {
    "broken": "body is not JSON",
    "binary": "body is not JSON",
    "text": "body is not UTF-8",
    "\ufffd": "key is not UTF-8",
    None: "no key",
}


@pytest.fixture
def api(tmp_path: Path) -> Iterator[ApiServer]:
    server = ApiServer(tmp_path, checkpoint_ms=200)
    server.start()
    yield server
    server.shut_down()


def recipe() -> str:
    """The program, as it stands in the document."""
    section = DOCUMENT.read_text().partition("### From a Kafka topic")[2]
    return section.partition("```python\n")[2].partition("```")[0]


def pinned_coordinates() -> str:
    """Of the jars that the tests run on."""
    pom = (DOCUMENT.parents[1] / "scripts" / "spark-kafka.pom.xml").read_text()
    version = re.search("<spark.version>(.*)</spark.version>", pom)
    assert version is not None
    return f"org.apache.spark:spark-sql-kafka-0-10_2.13:{version[1]}"


def test_each_record_is_a_message_and_what_is_none_is_put_aside(
    broker: Brokers,
    api: ApiServer,
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings: dict[str, Any] = {}

    def session(job: str, **wanted: Any) -> AbstractContextManager[SparkSession]:
        settings.update(wanted["settings"])
        return contextlib.nullcontext(spark)

    def until_all_is_read(query: StreamingQuery) -> None:
        query.processAllAvailable()
        query.stop()

    monkeypatch.setattr(sessions, "open_session", session)
    monkeypatch.setattr(StreamingQuery, "awaitTermination", until_all_is_read)
    topic = make_topic(broker, "orders", partitions=2)
    producer = Producer({"bootstrap.servers": ",".join(broker.addresses)})
    made_ms = now_ms()
    for key, value in RECORDS:
        producer.produce(topic, value, key, partition=0, timestamp=made_ms)
    producer.flush()
    program = recipe()
    for written, meant in {
        "127.0.0.1:9092": ",".join(broker.addresses),
        "http://127.0.0.1:8080": str(api.base_url),
        # Relative ones are below where the JVM and its workers were started.
        '"refused"': f'"{tmp_path}/refused"',
        '"checkpoint"': f'"{tmp_path}/checkpoint"',
    }.items():
        assert program.count(written) == 1
        program = program.replace(written, meant)
    for _ in range(2):  # The second one goes on from the checkpoint of the first.
        exec(compile(program, str(DOCUMENT), "exec"), {})
    assert settings == {"spark.jars.packages": pinned_coordinates()}

    found = api.ask("GET", f"/v1/subjects/{SUBJECT}/messages")["messages"]
    assert {one["key"]: one["body"] for one in found} == {"o1": {"cents": 1}, "o2": {"cents": 2}}
    assert {time_ms(one["deliver_at"]) for one in found} == {made_ms + HALF_AN_HOUR_MS}
    rejects = [json.loads(line) for line in refused(tmp_path)]
    conflicts = [one for one in rejects if one["key"] == "o1"]
    assert [one["body"] for one in conflicts] == ['{"cents":5}']
    others = {one["key"]: one["reason"] for one in rejects if one["key"] != "o1"}
    assert others == REASONS


def refused(directory: Path) -> list[str]:
    """The lines of the rows that were put aside."""
    files = sorted((directory / "refused").glob("*.jsonl"))
    return [line for path in files for line in path.read_text().splitlines()]
