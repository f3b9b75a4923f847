"""Real brokers and other programs on free ports of the loopback: started, killed, stopped and gone
on with, by pid."""

import os
import shutil
import signal
import socket
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest

from delayserver.cli.demo.process import free_port
from tests.waiting import Looks

START_TIMEOUT_S = 120.0
ESTABLISHED = "01"
USER, PASSWORD, ESCAPED = "delays", "p@ss:w/rd", "p%40ss%3Aw%2Frd"


@dataclass(frozen=True)
class Entry:
    """What stands in a broker."""

    headers: dict[str, str]
    body: bytes
    stored_ms: int = 0
    """When the broker had it (ms since the epoch); 0: it does not say."""

    @property
    def id(self) -> str:
        return self.headers["delay-id"]


def find(program: str) -> str | None:
    """The path of a program."""
    places = ("/usr/lib/rabbitmq/bin", os.environ.get("PATH", ""), "/usr/sbin")
    return shutil.which(program, path=":".join(places))


def need(program: str, ensure: str) -> str:
    """The path of a program. Where it is missing the test is skipped by name, and fails in CI."""
    found = find(program)
    if found is None:
        text = f"{program} is not installed; {ensure} in scripts/environment.sh installs it"
        if os.environ.get("CI"):
            pytest.fail(text, pytrace=False)
        pytest.skip(text)
    return found


class Program(ABC):
    """A program with a directory and a port of its own."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def command(self) -> list[str]:
        """What starts it."""

    def environment(self) -> Mapping[str, str]:
        return os.environ

    def is_ready(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def start(self) -> None:
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self.command(),
                cwd=self.directory,
                env=dict(self.environment()),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        for _ in Looks(START_TIMEOUT_S):
            if self.is_ready():
                return
            if self._process.poll() is not None:
                break
        raise AssertionError((self.directory / "log").read_text(errors="replace")[-2000:])

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, number)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        assert self._process is not None
        self._process.wait()

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            self.kill()


class Broker(Program):
    """A broker with an account of its own."""

    kind: ClassVar[str]
    """The type of its subscriptions."""

    @abstractmethod
    def definition(self, name: str, password: str = ESCAPED) -> dict[str, Any]:
        """The fields of a subscription that sends to the place of that name."""

    @abstractmethod
    def prepare(self, name: str) -> None:
        """Make that place."""

    @abstractmethod
    def refuse(self, name: str) -> str:
        """Have the place refuse messages; what a reason says then."""

    @abstractmethod
    def read(self, name: str, count: int) -> list[Entry]:
        """All that is there, at least so many."""

    def connections(self) -> int:
        """How many clients are connected to it."""
        # The client's ends: that of a broker may be a socket of IPv6.
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return sum(
            line[2] == f"0100007F:{self.port:04X}" and line[3] == ESTABLISHED for line in lines
        )
