"""A server as a process of its own, that can be killed for real.

Cost: a start takes as long as Python's imports, about half a second, and the recovery. Threads: the
methods block, and may be called from any thread, one at a time.
"""

import http.client
import os
import random
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol, Self

READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
POLL_S = 0.02


class ServerFailed(Exception):
    """The server ended, or did not become ready; the text holds the end of its log."""


_ports = random.Random(os.getpid())
"""Others in each process, so that two that start at once do not take the same."""


def free_port() -> int:
    """A free port of loopback. See `free_ports`."""
    return free_ports(1)


def free_ports(count: int) -> int:
    """The first of so many free ports of loopback in a row, below those that the system gives to
    clients. A client's port could be taken by a connection between two looks, or while a server is
    killed and comes again."""
    while True:
        first = _ports.randrange(12_000, 32_000)
        if all(map(is_free, range(first, first + count))):
            return first


def is_free(port: int) -> bool:
    """Whether the port is free."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def damage_in(data_dir: Path) -> list[str]:
    """The damage that the check of a data directory finds, in one shard or several, by the same
    code as the command `check`."""
    from delayserver.recovery.check import check_path
    from delayserver.recovery.shards import check_shards, count_shards
    from storage.catalog import MAX_BYTES

    count = count_shards(data_dir)
    if count is None:
        damage = check_path(data_dir, catalog_max_bytes=MAX_BYTES).damage
        return [str(one) for one in damage]
    found = check_shards(data_dir, count, catalog_max_bytes=MAX_BYTES)
    return [
        *(f"shard {k}: {one}" for k, report in found.reports.items() for one in report.damage),
        *(f"shard {k} cannot be checked: {error}" for k, error in found.errors.items()),
    ]


class RunningProcess(Protocol):
    """The part of `subprocess.Popen` that is used here."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int, /) -> None: ...


class ServerProcess:
    """`delayserver serve` on loopback. As a context manager it never outlives its block.

    `tls`: the authority to trust, if it serves HTTPS; `program`: runs instead of `delayserver`."""

    ready_path = "/readyz"
    """Answered with 200 by a server that accepts messages."""
    fixed_options: tuple[str, ...] = ()
    """Arguments besides `options`, at each start."""
    host = "127.0.0.1"
    """The address that it listens on."""
    within: tuple[str, ...] = ()
    """A command to start it through, such as `nsenter`; its process becomes that of the server."""

    def __init__(
        self,
        data_dir: Path,
        *,
        port: int,
        log_path: Path,
        options: Sequence[str] = (),
        tls: ssl.SSLContext | None = None,
        program: Sequence[str] = ("-m", "delayserver"),
    ) -> None:
        self.data_dir = data_dir
        self.port = port
        self.log_path = log_path
        self.options = list(options)
        self._tls = tls
        self.program = program
        self._process: RunningProcess | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def url(self) -> str:
        """The address that clients use."""
        return f"{'http' if self._tls is None else 'https'}://{self.host}:{self.port}"

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process lives."""
        return self._process is not None and self._process.poll() is None

    @property
    def status(self) -> int | None:
        """The exit status of its process; None: it runs, or was never started."""
        return None if self._process is None else self._process.poll()

    def start(self) -> None:
        """Start the process; it is not ready yet."""
        assert not self.is_running, "the server runs already"
        command = [*self.within, sys.executable, *self.program, "serve"]
        command += ["--host", self.host, "--port", str(self.port)]
        command += ["--data-dir", str(self.data_dir)]
        command += [*self.fixed_options, *self.options]
        # Settings of another server on this machine are not meant for this one.
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("DELAYSERVER_")
        }
        with self.log_path.open("ab") as log:
            self._process = self._spawn(command, environment, log)

    def _spawn(
        self, command: Sequence[str], environment: Mapping[str, str], log: IO[bytes]
    ) -> RunningProcess:
        """Make the process; `log` is its output."""
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,  # ctrl-C is for the program that started it
        )

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until it accepts messages. Raises ServerFailed."""
        deadline = time.monotonic() + timeout_s
        while not self._is_ready():
            if not self.is_running:
                raise ServerFailed(f"the server ended with status {self.status}\n{self._log()}")
            if time.monotonic() > deadline:
                raise ServerFailed(f"the server was not ready in {timeout_s:g} s\n{self._log()}")
            time.sleep(POLL_S)

    def _is_ready(self) -> bool:
        address = self.host, self.port
        connection = (
            http.client.HTTPConnection(*address, timeout=1)
            if self._tls is None
            else http.client.HTTPSConnection(*address, timeout=1, context=self._tls)
        )
        try:
            connection.request("GET", self.ready_path)
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def kill(self) -> None:
        """SIGKILL: not a line of code runs in it any more. Waits until it is gone."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)  # does nothing if it has ended already
            self._process.wait()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Ask it to end; its exit status. Raises ServerFailed if it does not end in time."""
        assert self._process is not None
        self._process.send_signal(number)
        try:
            return self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            self.kill()
            raise ServerFailed(
                f"the server did not stop within {STOP_TIMEOUT_S:g} s\n{self._log()}"
            ) from error

    def _log(self) -> str:
        lines = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join(lines[-20:])
