"""Subscriptions of type amqp, with a real RabbitMQ."""

from collections.abc import Iterator

import pytest
from aiormq.abc import AbstractChannel

from delayserver.delivery.amqp_sink import AmqpOpener
from delayserver.delivery.sink import Result
from delayserver.records.subscriptions import AmqpTarget
from tests.integration.api_support import ApiServer
from tests.sinks import tls
from tests.sinks.contract import SinkContract
from tests.sinks.programs import ESCAPED, USER
from tests.sinks.rabbitmq_server import RabbitMq
from tests.unit.fakes import subscription
from tests.waiting import wait_until

# On a busy machine Erlang takes half a minute to start.
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitMq]:
    with RabbitMq(tmp_path_factory.mktemp("rabbitmq")) as started:
        yield started


class TestRabbitMq(SinkContract):
    def test_an_exchange_and_routing_keys(
        self, broker: RabbitMq, server: ApiServer, name: str, path: str
    ) -> None:
        async def bind(channel: AbstractChannel) -> None:
            await channel.exchange_declare(f"x-{name}", exchange_type="topic", durable=True)
            await channel.queue_bind(name, f"x-{name}", "due.*.k")

        broker.prepare(name)
        broker.ask(bind)
        broker.prepare("elsewhere")
        where = {"exchange": f"x-{name}", "routing_key": "due.{subject}.{key}"}
        server.ask("PUT", path, 201, json={"subject": name, **broker.definition(name), **where})
        server.recorded(server.publish(name, body=1, key="k", headers={"CC": "elsewhere"})["id"])
        (entry,) = broker.read(name, 1)
        assert "CC" not in entry.headers

    def test_an_exchange_that_is_not_there(
        self, broker: RabbitMq, server: ApiServer, name: str, path: str
    ) -> None:
        definition = {**broker.definition(name), "exchange": "no-such-exchange"}
        letter = self.dead_letter(server, name, path, definition)
        assert "no exchange" in letter["reason"]

    def test_a_message_for_two_subscriptions(
        self, broker: RabbitMq, server: ApiServer, name: str, path: str
    ) -> None:
        """One is returned and the other is not: the client tells them apart."""
        broker.prepare(name)
        retry = {"max_attempts": 1, "backoff": ["50ms"]}
        definition = {"subject": name, **broker.definition(name), "retry": retry}
        server.ask("PUT", path, 201, json=definition)
        other = {**definition, "routing_key": "nowhere"}
        server.ask("PUT", f"{path}-2", 201, json=other)
        ids = {server.publish(name, body=n)["id"] for n in range(20)}
        dead = f"{path}-2/dead-letters"
        wait_until(lambda: len(server.ask("GET", dead)["dead_letters"]) == 20)
        assert {entry.id for entry in broker.read(name, 20)} == ids
        assert server.ask("GET", f"{path}/dead-letters")["dead_letters"] == []
        server.delete(f"{path}-2")

    def test_tls(self, broker: RabbitMq, name: str) -> None:
        def to(host: str, opener: AmqpOpener) -> Result:
            url = f"amqps://{USER}:{ESCAPED}@{host}:{broker.tls_port}"
            target = AmqpTarget(url, "", name)
            return tls.deliver(opener, subscription(type="amqp", target=target))

        broker.prepare(name)
        trusting = AmqpOpener(tls.POLICY, broker.certificates.context)
        assert tls.is_confirmed(to("localhost", trusting))
        assert len(broker.read(name, 1)) == 1
        assert tls.is_refused(to("127.0.0.1", trusting))
        assert tls.is_refused(to("localhost", AmqpOpener(tls.POLICY)))
        assert len(broker.read(name, 1)) == 1

    def test_what_is_refused(self, broker: RabbitMq, server: ApiServer) -> None:
        good = {"subject": "s", **broker.definition("due-x")}

        def refused(**changes: object) -> str:
            answer = server.ask("PUT", "/v1/subscriptions/bad", 422, json={**good, **changes})
            (error,) = answer["errors"]
            return str(error["pointer"])

        for url in ("redis://127.0.0.1", "amqp://127.0.0.1/a/b", "amqp://127.0.0.1?heartbeat=0"):
            assert refused(url=url) == "/url"
        assert refused(routing_key="{other}") == "/routing_key"
        assert refused(nats_subject="s") == "/nats_subject"
