"""Brokers and nodes of a benchmark, started through scripts/cluster on ports and in directories of
their own; nothing of them is left behind the block.

Cost: some 20 s on a machine of two cores. Threads: one, and it blocks.
"""

import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from levels.bench import Bench
from servers import ROOT, BenchmarkError

from delayserver.cli.demo.process import free_ports
from delayserver.cluster.placement import in_order

NODES = ("n1", "n2")
COMMAND_MAX_S = 250
WAIT_MAX_S = 60.0
POLL_S = 0.05


@dataclass
class Here:
    """A cluster of one shard."""

    directory: Path
    first_port: int
    brokers: int
    pending: int
    """How many messages are to wait when something is lost."""
    waiting: int = 0
    """How many do."""
    addresses: list[str] = field(default_factory=list)

    def run(self, *words: str, script: str = "cluster") -> str:
        """What one of the two scripts prints. Raises BenchmarkError."""
        done = subprocess.run(
            [ROOT / "scripts" / script, *words],
            env=os.environ
            | {
                "CLUSTER_HERE": str(self.directory / "nodes"),
                "CLUSTER_PORT": str(self.first_port),
                "KAFKA_HERE": str(self.directory / "brokers"),
                "KAFKA_PORT": str(self.first_port + 10),
                "KAFKA_BROKERS": str(self.brokers),
            },
            text=True,
            capture_output=True,
            timeout=COMMAND_MAX_S,
            check=False,
        )
        if done.returncode:
            raise BenchmarkError(f"scripts/{script} {words[0]}: {done.stderr[-2000:]}")
        return done.stdout.strip()

    def port_of(self, node: str) -> int:
        """Where a node listens."""
        return self.first_port + int(node[1:])

    def map_at(self, node: str) -> Any:
        """What a node knows of the cluster; None: it does not answer."""
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.port_of(node)}/v1/cluster", timeout=2
            ) as answer:
                return json.load(answer)
        except (OSError, ValueError):
            return None

    def owner(self) -> tuple[str, int]:
        """The node that owns the shard, and its epoch, once all nodes that answer agree, and it
        serves. Raises BenchmarkError."""
        give_up_s = time.monotonic() + WAIT_MAX_S
        while time.monotonic() < give_up_s:
            maps = [known for node in NODES if (known := self.map_at(node)) is not None]
            found = {(one["shards"][0].get("owner"), one["shards"][0]["epoch"]) for one in maps}
            if len(found) == 1:
                ((node, epoch),) = found
                if node is not None and self.stats(node) is not None:
                    return node, epoch
            time.sleep(POLL_S)
        raise BenchmarkError("the nodes do not agree on an owner that serves")

    def wait_until_in_step(self) -> None:
        """Every node is there, and could take over at once. Raises BenchmarkError."""
        give_up_s = time.monotonic() + WAIT_MAX_S
        while time.monotonic() < give_up_s:
            known = self.map_at(self.owner()[0])
            replicas = [] if known is None else known["shards"][0]["replicas"]
            behind = {one["node"]: one["lag_records"] for one in replicas}
            serving = {one["node"] for one in known["nodes"] if one["state"] == "serving"}
            if serving >= {*NODES} and all(behind.get(node, 999) < 100 for node in NODES):
                return
            time.sleep(0.2)
        raise BenchmarkError("not every node was in step in time")

    def settled(self) -> tuple[str, int]:
        """The owner that stays it for as long as nothing is lost, and its epoch; all are in step.
        Raises BenchmarkError."""
        self.wait_until_in_step()
        node, epoch = self.owner()
        if node == (first := in_order(0, NODES)[0]):
            return node, epoch
        self.run("move", "0", first)
        return self.owner()

    def wait_until_all_wait(self, node: str) -> None:
        """Until a checkpoint of the owner covers as many as were answered. Raises BenchmarkError:
        some are missing."""
        give_up_s, found = time.monotonic() + WAIT_MAX_S, 0
        while time.monotonic() < give_up_s:
            stats = self.stats(node)
            if stats is not None:
                found = stats["pending_loaded"] + stats["pending_later"]
                if found >= self.waiting:
                    return
            time.sleep(0.2)
        raise BenchmarkError(f"of {self.waiting:,} that were answered only {found:,} wait")

    def stats(self, node: str) -> Any:
        """The counts of the server; None: it does not serve."""
        url = f"http://127.0.0.1:{self.port_of(node)}/v1/stats"
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return json.load(answer)
        except (OSError, ValueError):
            return None

    def url(self) -> str:
        """As --cluster wants it."""
        return self.run("url")

    def pids(self, node: str) -> list[int]:
        """The supervisor, and its processes."""
        pid = int((self.directory / "nodes" / node / "pid").read_text())
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [pid, *map(int, children)]


@contextmanager
def cluster_here(bench: Bench, pending: int) -> Iterator[Here]:
    """A cluster that serves, until the block ends."""
    brokers = bench.size.of(quick=1, usual=3)
    here = Here(bench.directory / "here", free_ports(20 + 10 * brokers), brokers, pending)
    here.directory.mkdir()
    try:
        here.addresses = here.run("start", "--nodes", str(len(NODES)), "--shards", "1").split()
        yield here
    finally:
        here.run("wipe")
