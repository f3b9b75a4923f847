"""A cluster on this machine, through scripts/cluster: brokers and nodes on free ports."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from delayserver.cli.demo.process import free_ports

SCRIPTS = Path(__file__).parents[2] / "scripts"
START_TIMEOUT_S = 250


@dataclass
class Here:
    """One of them, with its files below `home`."""

    home: Path
    brokers: int = 1
    addresses: tuple[str, ...] = ()
    """Of the nodes."""

    @contextlib.contextmanager
    def running(self, *options: str) -> Iterator[Self]:
        """It runs inside of it, and is gone with its data behind it."""
        first = free_ports(10 + 10 * self.brokers)
        self.variables = {
            "CLUSTER_HERE": str(self.home / "nodes"),
            "CLUSTER_PORT": str(first),
            "KAFKA_HERE": str(self.home / "brokers"),
            "KAFKA_PORT": str(first + 10),
            "KAFKA_BROKERS": str(self.brokers),
        }
        try:
            self.addresses = tuple(self.run("start", *options).split())
            yield self
        finally:
            self.run("wipe")

    def run(self, *words: str, script: str = "cluster") -> str:
        """What it prints."""
        done = self.try_run(*words, script=script)
        assert done.returncode == 0, done.stderr + done.stdout + self._logs()
        return done.stdout.strip()

    def _logs(self) -> str:
        """The end of what each node has said."""
        logs = sorted((self.home / "nodes").rglob("*.log"))
        return "".join(f"── {path.name} ──\n{path.read_text()[-4000:]}\n" for path in logs)

    def try_run(self, *words: str, script: str = "cluster") -> "subprocess.CompletedProcess[str]":
        """Whatever becomes of it."""
        return subprocess.run(
            [SCRIPTS / script, *words],
            env=os.environ | self.variables,
            text=True,
            capture_output=True,
            timeout=START_TIMEOUT_S,
            check=False,
        )
