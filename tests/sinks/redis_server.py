"""A Redis that writes what it answers to the disk."""

from pathlib import Path
from typing import Any

import redis

from delayserver.cli.demo.process import free_port
from tests.sinks import tls
from tests.sinks.programs import ESCAPED, PASSWORD, USER, Broker, Entry, need
from tests.waiting import wait_until


class RedisServer(Broker):
    kind = "redis"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.tls_port = free_port()
        self.certificates = tls.Certificates(directory)

    def command(self) -> list[str]:
        program = need("redis-server", "ensure_redis")
        config = self.directory / "redis.conf"
        config.write_text(
            f"port {self.port}\nbind 127.0.0.1\ndir {self.directory}\nsave ''\n"
            # What was answered is on the disk.
            "appendonly yes\nappendfsync always\n"
            f"tls-port {self.tls_port}\ntls-auth-clients no\n"
            f"tls-cert-file {self.certificates.certificate}\n"
            f"tls-key-file {self.certificates.key}\n"
            f"tls-ca-cert-file {self.certificates.trusted}\n"
            f"user {USER} on >{PASSWORD} ~due-* +xadd\n"
        )
        return [program, str(config)]

    def definition(self, name: str, password: str = ESCAPED) -> dict[str, Any]:
        url = f"redis://{USER}:{password}@127.0.0.1:{self.port}"
        return {"type": "redis", "url": url, "stream": name}

    @property
    def client(self) -> "redis.Redis":
        return redis.Redis(port=self.port)

    def is_ready(self) -> bool:
        try:
            with self.client as client:
                return bool(client.ping())
        except redis.RedisError:
            return False

    def prepare(self, name: str) -> None:
        """A stream is made by its first entry."""

    def refuse(self, name: str) -> str:
        with self.client as client:
            client.set(name, "no stream")
        return "WRONGTYPE"

    def read(self, name: str, count: int) -> list[Entry]:
        with self.client as client:
            wait_until(lambda: client.xlen(name) >= count)
            entries: Any = client.xrange(name)
        return [
            Entry(
                {key.decode(): value.decode() for key, value in fields.items()},
                body,
                int(number.partition(b"-")[0]),
            )
            for number, fields in entries
            for body in [fields.pop(b"body")]
        ]
