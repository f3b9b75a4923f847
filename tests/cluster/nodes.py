"""Nodes of a cluster as real processes on the loopback, on real brokers."""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

from delayserver.cli.demo.process import free_port
from storage.replicated.kafka_settings import ClusterUrl
from tests.cluster.brokers import Brokers
from tests.forked_servers import ForkedServerProcess
from tests.waiting import Looks, wait_until

PATIENCE_S = 60.0


class NodeProcess(ForkedServerProcess):
    """`delayserver serve --cluster`: a supervisor, and a process for each shard."""

    def __init__(
        self,
        name: str,
        url: ClusterUrl,
        directory: Path,
        *,
        host: str = "127.0.0.1",
        zone: str | None = None,
    ) -> None:
        """`host`: where the others find it, at its port."""
        port = free_port()
        self.name = name
        super().__init__(
            directory / name,
            port=port,
            log_path=directory / f"{name}.log",
            options=[
                *("--cluster", str(url), "--node", name),
                *("--advertise", f"http://{host}:{port}"),
                *("--disk-reserve-bytes", "1048576"),
                *(() if zone is None else ("--zone", zone)),
            ],
        )

    def children(self) -> list[int]:
        """The processes of its shards."""
        path = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        with contextlib.suppress(OSError):
            return [int(pid) for pid in path.read_text().split()]
        return []

    def kill(self) -> None:
        """End all of it at once."""
        if self.is_running:
            children = self.children()
            super().kill()
            for pid in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def pause(self) -> None:
        """Stop the processes of its shards, as a machine that hangs does."""
        for pid in self.children():
            os.kill(pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let them go on."""
        for pid in self.children():
            os.kill(pid, signal.SIGCONT)

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Asked again where a shard or its process is away for a moment. Raises HTTPError,
        OSError."""
        for _ in Looks(PATIENCE_S, 0.05):
            try:
                return self.call_once(method, path, body)
            except urllib.error.HTTPError as error:
                if error.code != HTTPStatus.SERVICE_UNAVAILABLE:
                    raise
            except (ConnectionError, urllib.error.URLError) as error:
                # urllib tells a refused connection as the reason of an error of its own.
                if not isinstance(getattr(error, "reason", error), ConnectionError):
                    raise
        return self.call_once(method, path, body)

    def call_once(self, method: str, path: str, body: Any = None) -> Any:
        """Raises urllib.error.HTTPError, OSError."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"content-type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def text(self, path: str) -> str:
        """A page as it is."""
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            found: str = answer.read().decode()
            return found

    def publish(self, key: str, *, delay: str = "1h", subject: str = "order.late") -> str:
        """The id of the message."""
        message = {"subject": subject, "key": key, "body": {"key": key}, "delay": delay}
        answer: str = self.call("POST", "/v1/messages", message)["id"]
        return answer

    def owners(self) -> list[str | None]:
        """Who owns which shard, as this node sees it."""
        return [shard["owner"] for shard in self.call("GET", "/v1/cluster")["shards"]]


def until(is_so: Any, what: str, timeout_s: float = PATIENCE_S) -> float:
    """Wait until a call of it returns something true; how long that took, in seconds. What it is
    refused, or told in part by a process that ends, does not count."""
    began_s = time.monotonic()

    def is_told() -> bool:
        with contextlib.suppress(urllib.error.HTTPError, http.client.HTTPException, OSError):
            return bool(is_so())
        return False

    wait_until(is_told, timeout_s, what)
    return time.monotonic() - began_s


def delayserver(*words: str) -> str:
    """Run the command; what it prints."""
    return subprocess.run(
        ["delayserver", *words], check=True, text=True, stdout=subprocess.PIPE, timeout=120
    ).stdout


def new_cluster(brokers: Brokers, shards: int = 1, *words: str) -> ClusterUrl:
    """One that was made by the command, with these `words` besides."""
    made = brokers.new_url()
    delayserver("cluster", "create", "--cluster", str(made), "--shards", str(shards), *words)
    return made


@contextlib.contextmanager
def running(*nodes: NodeProcess) -> Iterator[Sequence[NodeProcess]]:
    """They run inside of it, and all shards have owners; the log of each is shown if it fails."""
    try:
        for node in nodes:
            node.start()
        for node in nodes:
            until(lambda node=node: all(node.owners()), f"{node.name} knows all owners")
        yield nodes
    except BaseException:
        for node in nodes:
            print(f"── {node.name} ──\n{node.log_path.read_text()[-4000:]}")
        raise
    finally:
        for node in nodes:
            node.kill()
