"""What holds of every kind of broker; a file for each makes a class of it."""

import itertools
import json
import time
from collections import Counter
from typing import Any

from tests.integration.api_support import ApiServer
from tests.sinks.programs import ESCAPED, PASSWORD, Broker, Entry
from tests.waiting import Looks, wait_until

QUICKLY = {"max_attempts": 100, "backoff": ["500ms"] * 99}


class SinkContract:
    """A subclass's file has the fixture `broker`, which is started once for all of them."""

    def test_a_message_with_its_headers(
        self, broker: Broker, server: ApiServer, name: str, path: str
    ) -> None:
        broker.prepare(name)
        definition = {"subject": name, **broker.definition(name)}
        view = server.ask("PUT", path, 201, json=definition)
        masked = broker.definition(name, "***")
        assert view.items() >= {"subject": name, **masked, "max_in_flight": 1000}.items()
        shown = server.get("/v1/subscriptions").text
        assert ESCAPED not in shown and PASSWORD not in shown
        published = server.publish(name, body={"a": [1, 2]}, key="k-7", headers={"x-shop": "7"})
        (entry,) = broker.read(name, 1)
        assert json.loads(entry.body) == {"a": [1, 2]}
        assert entry.headers == {
            "delay-id": published["id"],
            "delay-subject": name,
            "delay-key": "k-7",
            "delay-due": published["deliver_at"],
            "delay-attempt": "1",
            "x-shop": "7",
        }
        assert len(server.recorded(published["id"])) == 1
        metrics = server.get("/metrics").text
        labels = f'result="confirmed",subscription="{name}"'
        assert f"delayserver_sink_results_total{{{labels}}} 1.0" in metrics

    def test_a_broker_that_is_killed_in_the_middle(
        self, broker: Broker, server: ApiServer, name: str, path: str
    ) -> None:
        broker.prepare(name)
        definition = {"subject": name, **broker.definition(name), "retry": QUICKLY}
        definition |= {"max_in_flight": 100}
        server.ask("PUT", path, 201, json=definition)
        batch = [{"subject": name, "body": n, "delay": 100 + n} for n in range(1500)]
        ids = server.ask("POST", "/v1/messages/batch", 200, json=batch)["ids"]
        broker.read(name, 200)
        broker.kill()
        time.sleep(0.2)
        broker.start()
        times = self.read_all(broker, name, ids)
        # Messages that come again were in flight when the broker was killed, and have the same id.
        assert set(times) == set(ids)
        assert max(times.values()) <= 2
        assert sum(times.values()) <= len(ids) + definition["max_in_flight"]

    def test_a_broker_that_hangs(
        self, broker: Broker, server: ApiServer, name: str, path: str
    ) -> None:
        broker.prepare(name)
        definition = {"subject": name, **broker.definition(name), "retry": QUICKLY}
        server.ask("PUT", path, 201, json={**definition, "timeout": "300ms"})
        ids = [server.publish(name, body=0)["id"]]
        broker.read(name, 1)
        broker.stop()
        try:
            ids += [server.publish(name, body=n)["id"] for n in range(1, 10)]
            failed = f'delayserver_sink_results_total{{result="failed",subscription="{name}"}}'
            wait_until(lambda: failed in server.get("/metrics").text)
        finally:
            broker.go_on()
        assert set(self.read_all(broker, name, ids)) == set(ids)

    def test_a_server_that_is_killed_in_the_middle(
        self, broker: Broker, server: ApiServer, name: str, path: str
    ) -> None:
        broker.prepare(name)
        server.ask("PUT", path, 201, json={"subject": name, **broker.definition(name)})
        batch = [{"subject": name, "body": n, "delay": 100 + 5 * n} for n in range(500)]
        ids = server.ask("POST", "/v1/messages/batch", 200, json=batch)["ids"]
        recorded = [entry.id for entry in broker.read(name, 100)]
        for message_id in recorded:
            server.recorded(message_id)
        server.restart(kill=True)
        times = self.read_all(broker, name, ids)
        assert set(times) == set(ids)
        assert max(times.values()) <= 2
        # How many others come again depends on the disk; these have been looked up as delivered.
        assert {times[message_id] for message_id in recorded} == {1}

    def test_pause_and_resume(
        self, broker: Broker, server: ApiServer, name: str, path: str
    ) -> None:
        broker.prepare(name)
        server.ask("PUT", path, 201, json={"subject": name, **broker.definition(name)})
        first = server.publish(name, body=1)["id"]
        server.recorded(first)
        server.ask("POST", f"{path}/pause")
        second = server.publish(name, body=2)["id"]
        wait_until(lambda: server.ask("GET", path)["queued"] == 1)
        assert [entry.id for entry in broker.read(name, 1)] == [first]
        server.ask("POST", f"{path}/resume")
        assert [entry.id for entry in broker.read(name, 2)] == [first, second]

    def test_a_place_that_refuses(
        self, broker: Broker, server: ApiServer, name: str, path: str
    ) -> None:
        reason = broker.refuse(name)
        letter = self.dead_letter(server, name, path, broker.definition(name))
        assert reason in letter["reason"]
        assert letter["reason"].endswith("(attempt 2 of 2)")

    def test_a_wrong_password(
        self, broker: Broker, server: ApiServer, name: str, path: str
    ) -> None:
        letter = self.dead_letter(server, name, path, broker.definition(name, "wrong-one"))
        assert "auth" in letter["reason"].lower() or "password" in letter["reason"].lower()
        assert "wrong-one" not in letter["reason"]
        assert "wrong-one" not in server.log

    def test_its_connection_is_closed_when_it_goes(
        self, broker: Broker, server: ApiServer, name: str, path: str
    ) -> None:
        before = fewest_connections(broker)
        broker.prepare(name)
        # A time-out of its own, so a connection of its own.
        definition = {"subject": name, **broker.definition(name), "timeout": "7s"}
        server.ask("PUT", path, 201, json=definition)
        server.recorded(server.publish(name, body=1)["id"])
        wait_until(lambda: broker.connections() > before)
        server.delete(path)
        # One that stayed would be one too many for ever.
        wait_until(lambda: broker.connections() <= before)

    def dead_letter(
        self, server: ApiServer, name: str, path: str, definition: dict[str, Any]
    ) -> dict[str, Any]:
        retry = {"max_attempts": 2, "backoff": ["50ms"]}
        server.ask("PUT", path, 201, json={"subject": name, **definition, "retry": retry})
        published = server.publish(name, body=1)
        (letter,) = wait_until(lambda: server.ask("GET", f"{path}/dead-letters")["dead_letters"])
        assert letter["id"] == published["id"]
        return dict(letter)

    def read_all(self, broker: Broker, name: str, ids: list[str]) -> "Counter[str]":
        """How often each is there, once all are."""
        found: list[Entry] = []
        for count in itertools.count(len(ids)):
            found = broker.read(name, count)
            if {entry.id for entry in found} >= set(ids):
                break
        return Counter(entry.id for entry in found)


def fewest_connections(broker: Broker) -> int:
    """How many there are at least, for a second: those of others may come and go."""
    return min(broker.connections() for _ in Looks(1))
