"""Subscriptions of type kafka on real brokers: what a record is, on time, at least once, exactly
once."""

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from storage.replicated.kafka_settings import ClusterUrl
from tests.cluster.brokers import Brokers
from tests.cluster.nodes import NodeProcess, running, until
from tests.cluster.topics import Reader, make_topic
from tests.integration.api_support import ApiServer, time_ms
from tests.waiting import wait_until

_numbers = count()
SLOW = pytest.mark.timeout(300)


@pytest.fixture
def topic(brokers: Brokers) -> str:
    return make_topic(brokers, f"due-{next(_numbers)}")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ApiServer]:
    with ApiServer(tmp_path) as started:
        started.start()
        yield started
        started.shut_down()


def kafka(brokers: Brokers, topic: str, **more: object) -> dict[str, Any]:
    bootstrap = ",".join(brokers.addresses)
    return {"subject": "s", "type": "kafka", "bootstrap": bootstrap, "topic": topic, **more}


def subscribe(server: ApiServer, document: dict[str, Any], name: str = "out") -> Any:
    return server.ask("PUT", f"/v1/subscriptions/{name}", 201, json=document)


# ---- at least once ---------------------------------------------------------------------------


def test_a_record(brokers: Brokers, topic: str, server: ApiServer) -> None:
    view = subscribe(server, kafka(brokers, topic))
    assert view["bootstrap"] == ",".join(brokers.addresses)
    assert (view["topic"], view["key"], view["delivery"]) == (topic, "{key}", "at_least_once")
    assert (view["max_in_flight"], view["timeout"]) == (1000, "15s")
    assert "lease" not in view or view["lease"] is None
    subscribe(server, kafka(brokers, topic, key="{subject}"), "by-subject")
    subscribe(server, kafka(brokers, topic, key="{id}"), "by-id")
    subscribe(server, kafka(brokers, topic, key="fixed"), "fixed")
    server.publish("s")  # warm
    reader = Reader(brokers, topic)
    assert len(reader.read(4)) == 4

    published = server.publish(
        "s", body={"a": [1, 2]}, key="k-ü", headers={"X-Shop": "7"}, delay="500ms"
    )
    records = reader.read(8)[4:]
    due_ms = time_ms(published["deliver_at"])
    id_ = published["id"]
    assert sorted(record.message.key() or b"" for record in records) == sorted(
        ["k-ü".encode(), b"s", id_.encode(), b"fixed"]
    )
    for record in records:
        assert json.loads(record.message.value() or b"") == {"a": [1, 2]}
        assert list(record.headers.items()) == [
            ("delay-id", id_),
            ("delay-subject", "s"),
            ("delay-key", "k-ü"),
            ("delay-due", published["deliver_at"]),
            ("delay-attempt", "1"),
            ("X-Shop", "7"),
        ]
        assert record.message.timestamp()[1] >= due_ms
    assert len(server.recorded(id_, 4)) == 4
    metrics = server.get("/metrics").text
    assert 'delayserver_sink_results_total{result="confirmed",subscription="out"} 2.0' in metrics


def test_a_topic_that_is_not_there(brokers: Brokers, server: ApiServer) -> None:
    retry = {"max_attempts": 2, "backoff": ["100ms"]}
    subscribe(server, kafka(brokers, "no-such-topic", retry=retry))
    published = server.publish("s", body=1)
    path = "/v1/subscriptions/out/dead-letters"
    (letter,) = wait_until_any(lambda: server.ask("GET", path)["dead_letters"])
    assert letter["id"] == published["id"]
    assert "topic" in letter["reason"].lower()
    assert letter["reason"].endswith("(attempt 2 of 2)")
    # Once the topic is there, it can be redriven.
    make_topic(brokers, "no-such-topic")
    # The client looks again after 10 s at the latest.
    retry = {"max_attempts": 20, "backoff": ["1s"] * 19}
    server.ask("PUT", "/v1/subscriptions/out", json=kafka(brokers, "no-such-topic", retry=retry))
    server.ask("POST", f"{path}/redrive", 200, json={})
    (record,) = Reader(brokers, "no-such-topic").read(1)
    assert record.id == published["id"]


def wait_until_any(look: Any) -> Any:
    wait_until(lambda: bool(look()))
    return look()


def test_what_is_refused(brokers: Brokers, topic: str, server: ApiServer) -> None:
    good = kafka(brokers, topic)

    def refused(document: dict[str, Any]) -> tuple[str, str]:
        answer = server.ask("PUT", "/v1/subscriptions/bad", 422, json=document)
        (error,) = answer["errors"]
        return error["pointer"], error["detail"]

    assert refused(good | {"delivery": "exactly_once"})[0] == "/delivery"
    pointer, detail = refused(good | {"bootstrap": "example.com:9092"})
    assert pointer == "/bootstrap" and "webhook_targets" in detail
    assert refused(good | {"bootstrap": "10.0.0.1:9092"})[0] == "/bootstrap"
    for field, value in {
        "bootstrap": "nowhere",
        "topic": "a b",
        "key": "{other}",
        "batch": {"max": 3},
        "url": "http://127.0.0.1/",
        "secret": "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
    }.items():
        assert refused(good | {field: value})[0].startswith(f"/{field}"), field
    del good["topic"]
    assert refused(good)[0] == "/topic"


@SLOW
def test_brokers_that_hang_and_come_back(brokers: Brokers, topic: str, server: ApiServer) -> None:
    retry = {"max_attempts": 20, "backoff": ["200ms"]}
    subscribe(server, kafka(brokers, topic, retry=retry, timeout="2s"))
    reader = Reader(brokers, topic)
    ids = [server.publish("s", body=0)["id"]]
    reader.read(1)
    for number in (1, 2, 3):
        brokers.pause(number)
    try:
        ids += [server.publish("s", body=n)["id"] for n in range(1, 30)]
        wait_until(lambda: 'result="failed"' in server.get("/metrics").text)
    finally:
        for number in (1, 2, 3):
            brokers.resume(number)
    brokers.wait_until_all_are_in_sync()
    wait_until(lambda: {one.id for one in reader.read_for(0.2)} >= set(ids))
    reader.close()


@SLOW
def test_a_server_that_is_killed_again_and_again(
    brokers: Brokers, topic: str, server: ApiServer
) -> None:
    """Nothing is lost; what comes again was not settled yet."""
    subscribe(server, kafka(brokers, topic))
    reader, ids = Reader(brokers, topic), []
    for number in range(3):
        batch = [{"subject": "s", "body": n, "delay": 300 + n} for n in range(1000)]
        ids += server.ask("POST", "/v1/messages/batch", 200, json=batch)["ids"]
        # In the middle of them, each time somewhere else.
        reader.read(len(reader.received) + 200 + 300 * number)
        server.restart(kill=True)
    wait_until(lambda: {one.id for one in reader.read_for(0.5)} >= set(ids))
    times = Counter(one.id for one in reader.read_for(2))
    assert set(times) == set(ids)
    assert max(times.values()) <= 1 + 3
    assert sum(times.values()) < len(ids) * 2
    reader.close()


# ---- exactly once ----------------------------------------------------------------------------


def ask(node: NodeProcess, method: str, path: str, document: Any = None) -> Any:
    """Again and again until it is answered with success: keys make that safe."""
    answers: list[Any] = []

    def answered() -> bool:
        answers.append(node.call(method, path, document))
        return True

    until(answered, f"{method} {path}")
    return answers[-1]


def publish(node: NodeProcess, count: int, first: int) -> list[str]:
    """So many due within 1 s; their ids."""
    batch = [
        {"subject": "s", "body": n, "key": f"k{n}", "delay": 100 + 2 * (n - first)}
        for n in range(first, first + count)
    ]
    ids: list[str] = ask(node, "POST", "/v1/messages/batch", batch)["ids"]
    return ids


def feed(brokers: Brokers, topic: str, count: int, first: int) -> list[str]:
    """Write so many records to a topic that a source reads; their bodies."""
    # Brokers are killed meanwhile, and each record is to be in the topic once.
    settings = {"enable.idempotence": True, "acks": "all"}
    producer = Producer({"bootstrap.servers": ",".join(brokers.addresses), **settings})
    bodies = [f'"in {n}"' for n in range(first, first + count)]
    for body in bodies:
        producer.produce(topic, body, headers={"delay-until": b"300ms"})
    assert producer.flush(60) == 0
    return bodies


@SLOW
def test_exactly_once_holds_over_kills_of_owners_and_brokers(
    brokers: Brokers, topic: str, url: ClusterUrl, tmp_path: Path
) -> None:
    """Into a topic, and out of another one: whoever owns the shard runs its source."""
    made = [NodeProcess(f"n{number}", url, tmp_path) for number in (1, 2)]
    feeding = make_topic(brokers, f"{topic}-in")
    with running(*made):
        ask(made[0], "PUT", "/v1/sources/in", kafka(brokers, feeding))
        document = kafka(brokers, topic, delivery="exactly_once")
        assert ask(made[0], "PUT", "/v1/subscriptions/out", document)["delivery"] == "exactly_once"
        reader = Reader(brokers, topic)
        ids, bodies = publish(made[0], 500, 0), feed(brokers, feeding, 200, 0)
        for round_ in range(1, 5):
            reader.read(len(reader.received) + 150)
            owner = made[0].owners()[0]
            node, other = made if made[0].name == owner else made[::-1]
            for pid in node.children():
                os.kill(pid, signal.SIGKILL)
            if round_ % 2:
                brokers.kill(1 + round_ % 3)
            bodies += feed(brokers, feeding, 200, 1000 * round_)
            ids += publish(other, 500, 1000 * round_)
            if round_ % 2:
                brokers.revive(1 + round_ % 3)
        reader.read(len(ids) + len(bodies), 120)
        times = Counter(one.id for one in reader.read_for(8))
        reader.close()
        assert set(ids) - set(times) == set()
        assert {id_: n for id_, n in times.items() if n > 1} == {}
        # Each record of the other topic is a message, and one alone.
        others = [one.message.value() for one in reader.received if one.id not in ids]
        assert sorted(body.decode() for body in others if body) == sorted(bodies)
        assert len(times) == len(ids) + len(bodies)
        brokers.wait_until_all_are_in_sync()
