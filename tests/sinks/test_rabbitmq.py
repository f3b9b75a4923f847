"""Subscriptions of type amqp, with a real RabbitMQ."""

import asyncio
import os
import subprocess
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import aiormq
import pytest
from aiormq.abc import AbstractChannel
from aiormq.exceptions import AMQPError

from delayserver.delivery.amqp_sink import AmqpOpener
from delayserver.delivery.sink import Result
from delayserver.records.subscriptions import AmqpTarget
from tests.cluster.brokers import free_port as free_ports
from tests.integration.api_support import ApiServer, wait_until
from tests.sinks import tls
from tests.sinks.contract import SinkContract
from tests.sinks.programs import ESCAPED, PASSWORD, USER, Broker, Entry, need
from tests.unit.fakes import subscription

T = TypeVar("T")

# On a busy machine Erlang takes half a minute to start.
pytestmark = pytest.mark.timeout(300)


class RabbitMq(Broker):
    kind = "amqp"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        # In a row, below those that the system gives to clients.
        self._distribution_port = free_ports(3)
        self._mapper_port = self._distribution_port + 1
        self.tls_port = self._distribution_port + 2
        self.certificates = tls.Certificates(directory)
        # The port mapper that a node starts by itself is a daemon, and would outlive it.
        need("rabbitmq-server", "ensure_rabbitmq")
        self.mapper = subprocess.Popen(
            [
                need("epmd", "ensure_rabbitmq"),
                "-address",
                "127.0.0.1",
                "-port",
                str(self._mapper_port),
            ]
        )

    def command(self) -> list[str]:
        (self.directory / "rabbitmq.conf").write_text(
            f"default_user = {USER}\ndefault_pass = {PASSWORD}\n"
            f"listeners.tcp.1 = 127.0.0.1:{self.port}\n"
            f"listeners.ssl.1 = 127.0.0.1:{self.tls_port}\n"
            f"ssl_options.cacertfile = {self.certificates.trusted}\n"
            f"ssl_options.certfile = {self.certificates.certificate}\n"
            f"ssl_options.keyfile = {self.certificates.key}\n"
            "ssl_options.verify = verify_none\n"
        )
        return [need("rabbitmq-server", "ensure_rabbitmq")]

    def environment(self) -> Mapping[str, str]:
        here = self.directory
        return {
            **os.environ,
            "RABBITMQ_NODENAME": f"tests{self.port}@localhost",
            "RABBITMQ_CONFIG_FILE": str(here / "rabbitmq"),
            "RABBITMQ_DIST_PORT": str(self._distribution_port),
            "RABBITMQ_MNESIA_BASE": str(here / "mnesia"),
            "RABBITMQ_LOG_BASE": str(here / "logs"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(here / "enabled_plugins"),
            "RABBITMQ_PID_FILE": str(here / "pid"),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": str(self._mapper_port),
            # Two cores and one node: fewer schedulers start sooner.
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 1:1 +sbwt none",
            "HOME": str(here),
        }

    def definition(self, name: str, password: str = ESCAPED) -> dict[str, Any]:
        url = f"amqp://{USER}:{password}@127.0.0.1:{self.port}"
        return {"type": "amqp", "url": url, "exchange": ""}

    def ask(self, question: Callable[[AbstractChannel], Awaitable[T]]) -> T:
        async def main() -> T:
            connection = await aiormq.connect(f"amqp://{USER}:{ESCAPED}@127.0.0.1:{self.port}")
            try:
                return await question(await connection.channel())
            finally:
                await connection.close()

        return asyncio.run(main())

    def is_ready(self) -> bool:
        async def nothing(channel: AbstractChannel) -> bool:
            return True

        try:
            return super().is_ready() and self.ask(nothing)
        except (AMQPError, OSError):
            return False

    def prepare(self, name: str) -> None:
        self.ask(lambda channel: channel.queue_declare(name, durable=True))

    def refuse(self, name: str) -> str:
        return "no queue gets it"

    def read(self, name: str, count: int) -> list[Entry]:
        async def look(channel: AbstractChannel) -> list[Entry]:
            found = (await channel.queue_declare(name, passive=True)).message_count or 0
            if found < count:
                return []
            entries: list[Entry] = []
            have_come = asyncio.Event()

            async def take(message: Any) -> None:
                properties = message.header.properties
                headers = {key: str(value) for key, value in properties.headers.items()}
                assert (properties.message_id, properties.delivery_mode) == (headers["delay-id"], 2)
                assert properties.content_type == "application/json"
                entries.append(Entry(headers, message.body))
                if len(entries) >= found:
                    have_come.set()

            # What is not acknowledged is there again for the next look.
            await channel.basic_consume(name, take)
            await asyncio.wait_for(have_come.wait(), 20)
            return entries

        return wait_until(lambda: self.ask(look))


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitMq]:
    made = RabbitMq(tmp_path_factory.mktemp("rabbitmq"))
    try:
        with made as started:
            yield started
    finally:
        made.mapper.kill()
        made.mapper.wait()


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
