"""A server of several shards: a supervisor, and the processes that it starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

from delayserver.cli.demo.process import free_port
from tests.waiting import wait_until

COUNT = 3


class Supervised:
    """A supervisor, and what it has started."""

    def __init__(self, directory: Path) -> None:
        self.data_dir = directory / "data"
        self.port = free_port()
        self.log_path = directory / "log"
        self.process: subprocess.Popen[bytes] | None = None
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=30)

    def launch(self, count: int = COUNT) -> subprocess.Popen[bytes]:
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(self.serving(count), stderr=log, stdout=log)
        return self.process

    def serving(self, count: int, directory: str = "") -> list[str]:
        """The command."""
        program = [sys.executable, "-m", "delayserver", "serve", f"--port={self.port}"]
        return [*program, f"--data-dir={self.data_dir / directory}", f"--shards={count}"]

    def start(self) -> None:
        self.launch()
        self.until_told("all shards are there")

    def until_told(self, text: str) -> None:
        wait_until(lambda: text in self.log_path.read_text())

    @property
    def shards(self) -> list[int]:
        """Process ids of the shards, in no order."""
        assert self.process is not None
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split()]

    def publish(self, key: str) -> httpx.Response:
        message = {"subject": "a", "key": key, "delay": "1h"}
        return self.client.post("/v1/messages", json=message)

    def published(self, key: str) -> dict[str, Any]:
        """The answer, once the shard of the key gives one."""

        def ask() -> dict[str, Any]:
            try:
                answer = self.publish(key)
            except httpx.TransportError:  # of the shard that has ended
                return {}
            if answer.status_code == 503:
                assert answer.headers["retry-after"] == "1"
                return {}
            assert answer.status_code in (200, 201)
            document: dict[str, Any] = answer.json()
            return document

        return wait_until(ask)

    def end(self) -> None:
        self.client.close()
        if self.process is not None and self.process.poll() is None:
            pids = self.shards
            self.process.kill()
            self.process.wait()
            wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
