"""A RabbitMQ, with a port mapper of its own."""

import asyncio
import os
import subprocess
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import aiormq
from aiormq.abc import AbstractChannel
from aiormq.exceptions import AMQPError

from delayserver.cli.demo.process import free_ports
from tests.sinks import tls
from tests.sinks.programs import ESCAPED, PASSWORD, USER, Broker, Entry, need
from tests.waiting import wait_until

T = TypeVar("T")
READ_TIMEOUT_S = 60.0


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

    def __exit__(self, *_: object) -> None:
        try:
            super().__exit__()
        finally:
            self.mapper.kill()
            self.mapper.wait()

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
            await asyncio.wait_for(have_come.wait(), READ_TIMEOUT_S)
            return entries

        return wait_until(lambda: self.ask(look))
