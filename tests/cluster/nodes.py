"""Nodes of a cluster as processes on this machine, each of which has one process per shard."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from delayserver.cli.demo.process import ServerProcess, free_port
from storage.replicated.kafka_settings import ClusterUrl
from tests.cluster.brokers import wait_until


class Node(httpx.Client):
    """A node, and an HTTP client for it."""

    def __init__(self, name: str, directory: Path, url: ClusterUrl) -> None:
        self.name = name
        self.log_path = directory / f"{name}.log"
        port = free_port()
        options = [f"--cluster={url}", f"--node={name}", f"--advertise=http://127.0.0.1:{port}"]
        self.process = ServerProcess(
            directory / name, port=port, log_path=self.log_path, options=options
        )
        super().__init__(base_url=self.process.url, timeout=30)

    def shards(self) -> list[int]:
        """The pids of its processes for shards."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split()]

    def kill_shards(self) -> None:
        """kill -9; the node starts them again."""
        for pid in self.shards():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def ask(self, method: str, path: str, **arguments: Any) -> Any:
        """A call that is made again until it is answered with success; the key makes that safe."""
        give_up_s = time.monotonic() + 60
        while True:
            with contextlib.suppress(httpx.HTTPError):
                answer = self.request(method, path, **arguments)
                if answer.status_code < 500 and answer.status_code != 421:
                    assert answer.status_code < 400, answer.text
                    return answer.json() if answer.content else None
            assert time.monotonic() < give_up_s, self.log_path.read_text()[-3000:]
            time.sleep(0.1)

    def owner(self, shard: int = 0) -> str | None:
        """The name of who owns a shard, as this node knows."""
        with contextlib.suppress(httpx.HTTPError, KeyError, ValueError):
            shards = self.get("/v1/cluster").json()["shards"]
            owner: str | None = shards[shard]["owner"]
            return owner
        return None


@contextlib.contextmanager
def nodes(directory: Path, url: ClusterUrl, count: int) -> Iterator[list[Node]]:
    """Some nodes of a cluster that was made; they run, and one is in office."""
    made = [Node(f"n{number}", directory, url) for number in range(1, count + 1)]
    try:
        for node in made:
            node.process.start()
        wait_until(lambda: any(node.owner() for node in made))
        yield made
    finally:
        for node in made:
            node.close()
            if node.process.is_running:
                node.kill_shards()
            node.process.kill()
