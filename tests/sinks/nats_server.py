"""A NATS with JetStream."""

import asyncio
import ssl
import subprocess
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import nats
from nats.js import JetStreamContext
from nats.js.api import StreamConfig

from tests.sinks.programs import ESCAPED, PASSWORD, USER, Broker, Entry, need
from tests.waiting import wait_until

T = TypeVar("T")


def synced(program: str) -> str:
    """The setting that syncs each message before it is confirmed, from 2.10 on. Without it, what is
    confirmed outlives the process, and not a power loss."""
    shown = subprocess.run([program, "--version"], check=True, capture_output=True, text=True)
    major, minor = shown.stdout.rpartition("v")[2].split(".")[:2]
    return ", sync_interval: always" if (int(major), int(minor)) >= (2, 10) else ""


class NatsServer(Broker):
    kind = "nats"
    tls_options = ""
    """More of its configuration."""
    trusted: "ssl.SSLContext | None" = None

    def command(self) -> list[str]:
        program = need("nats-server", "ensure_nats")
        config = self.directory / "nats.conf"
        config.write_text(
            f"listen: 127.0.0.1:{self.port}\n"
            f'jetstream {{ store_dir: "{self.directory}/streams"{synced(program)} }}\n'
            f'authorization {{ users: [{{ user: "{USER}", password: "{PASSWORD}" }}] }}\n'
            f"{self.tls_options}\n"
        )
        return [program, "--config", str(config)]

    def definition(self, name: str, password: str = ESCAPED) -> dict[str, Any]:
        return {"type": "nats", "url": f"nats://{USER}:{password}@127.0.0.1:{self.port}"}

    def ask(self, question: Callable[[JetStreamContext], Awaitable[T]]) -> T:
        async def main() -> T:
            url = f"nats://localhost:{self.port}"
            client = await nats.connect(url, user=USER, password=PASSWORD, tls=self.trusted)
            try:
                return await question(client.jetstream())
            finally:
                await client.close()

        return asyncio.run(main())

    def prepare(self, name: str) -> None:
        config = StreamConfig(name=name, subjects=[name, f"other.{name}"])
        self.ask(lambda stream: stream.add_stream(config))

    def refuse(self, name: str) -> str:
        return "no response from stream"

    def read(self, name: str, count: int) -> list[Entry]:
        async def look(stream: JetStreamContext) -> list[Entry]:
            found = (await stream.stream_info(name)).state.messages
            if found < count:
                return []
            subscription = await stream.subscribe("", stream=name, ordered_consumer=True)
            return [self.entry(await subscription.next_msg(10)) for _ in range(found)]

        return wait_until(lambda: self.ask(look))

    @staticmethod
    def entry(message: Any) -> Entry:
        headers = dict(message.headers)
        assert headers.pop("Nats-Msg-Id").partition(":")[0] == headers["delay-id"]
        return Entry(headers, message.data, int(message.metadata.timestamp.timestamp() * 1000))
