"""Subscriptions of type nats, with a real NATS and JetStream."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from nats.js.api import StreamConfig
from nats.js.errors import NotFoundError

from delayserver.delivery.nats_sink import NatsOpener
from delayserver.delivery.sink import Result
from delayserver.records.subscriptions import NatsTarget
from tests.integration.api_support import ApiServer
from tests.sinks import tls
from tests.sinks.contract import SinkContract
from tests.sinks.nats_server import NatsServer
from tests.sinks.programs import ESCAPED, USER
from tests.unit.fakes import SUBJECT, subscription
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with NatsServer(tmp_path_factory.mktemp("nats")) as started:
        yield started


class TestNats(SinkContract):
    def test_where_it_goes_and_what_stays_here(
        self, broker: NatsServer, server: ApiServer, name: str, path: str
    ) -> None:
        broker.prepare(name)
        where = {"nats_subject": "other.{subject}"}
        server.ask("PUT", path, 201, json={"subject": name, **broker.definition(name), **where})
        headers = {"Nats-Rollup": "all", "x": "\xe4"}
        for _ in range(2):
            server.publish(name, body=1, key=None, headers=headers)
        one, two = broker.read(name, 2)
        assert one.headers["x"] == "\xe4"
        assert "Nats-Rollup" not in one.headers and "Nats-Rollup" not in two.headers
        keyed = server.publish(name, body=1, key="a\r\nNats-Rollup: all \u00fc%")
        *_, entry = broker.read(name, 3)
        assert entry.id == keyed["id"]
        assert entry.headers["delay-key"] == "a%0D%0ANats-Rollup:%20all%20%C3%BC%25"

    def test_a_message_that_is_longer_than_the_server_takes(
        self, broker: NatsServer, server: ApiServer, name: str, path: str
    ) -> None:
        broker.prepare(name)
        retry = {"max_attempts": 1, "backoff": ["50ms"]}
        server.ask(
            "PUT", path, 201, json={"subject": name, **broker.definition(name), "retry": retry}
        )
        server.publish(name, body="x" * 1_048_500)
        (letter,) = wait_until(lambda: server.ask("GET", f"{path}/dead-letters")["dead_letters"])
        assert "longer than the server takes" in letter["reason"]
        server.recorded(server.publish(name, body=1)["id"])

    def test_one_message_for_two_subscriptions_into_one_stream(
        self, broker: NatsServer, server: ApiServer, name: str, path: str
    ) -> None:
        """The stream takes the second one for a duplicate of the first; no replay is one either."""
        broker.prepare(name)
        for number, subject in enumerate((name, f"other.{name}")):
            definition = {"subject": name, **broker.definition(name), "nats_subject": subject}
            server.ask("PUT", path if not number else f"{path}-2", 201, json=definition)
        id_ = server.publish(name, body=1)["id"]
        assert [entry.id for entry in broker.read(name, 2)] == [id_, id_]
        server.recorded(id_)
        server.delete(f"{path}-2")
        server.ask("POST", f"/v1/messages/{id_}/replay")
        *_, entry = broker.read(name, 3)
        assert (entry.id, entry.headers["delay-replay"]) == (id_, "1")

    def test_what_is_refused(self, broker: NatsServer, server: ApiServer) -> None:
        good = {"subject": "s", **broker.definition("due-x")}

        def refused(**changes: object) -> str:
            answer = server.ask("PUT", "/v1/subscriptions/bad", 422, json={**good, **changes})
            (error,) = answer["errors"]
            return str(error["pointer"])

        for url in ("redis://127.0.0.1", "nats://127.0.0.1/a", "nats://token@127.0.0.1"):
            assert refused(url=url) == "/url"
        for subject in ("", "a b", "a.*", ">", "a..b", "$JS.API.STREAM.DELETE.x", "{other}"):
            assert refused(nats_subject=subject) == "/nats_subject"
        assert refused(stream="s") == "/stream"


def test_tls(tmp_path: Path) -> None:
    certificates = tls.Certificates(tmp_path)
    made = NatsServer(tmp_path)
    made.trusted = certificates.context
    made.tls_options = (
        f'tls {{ cert_file: "{certificates.certificate}", key_file: "{certificates.key}" }}'
    )

    def to(host: str, opener: NatsOpener) -> Result:
        target = NatsTarget(f"tls://{USER}:{ESCAPED}@{host}:{made.port}")
        return tls.deliver(opener, subscription(type="nats", target=target))

    with made as broker:
        broker.ask(lambda stream: stream.add_stream(StreamConfig(name="s", subjects=[SUBJECT])))
        trusting = NatsOpener(tls.POLICY, certificates.context)
        assert tls.is_confirmed(to("localhost", trusting))
        assert tls.is_refused(to("127.0.0.1", trusting))
        assert tls.is_refused(to("localhost", NatsOpener(tls.POLICY)))
        state = broker.ask(lambda stream: stream.stream_info("s")).state
        assert state.messages == 1


def test_the_tests_know_a_stream_that_is_not_there(broker: NatsServer) -> None:
    with pytest.raises(NotFoundError):
        broker.ask(lambda stream: stream.stream_info("no-such-stream"))
