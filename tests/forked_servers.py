"""Servers of tests that are forked from a process that has imported everything (`tests.zygote`).

Most of what a server of a test costs is the import of its modules: 0.75 s of processor, and 1.3 s
once it has answered a call of the REST API. A fork costs 0.02 s. A forked server is a real process
all the same: it has a number, a session, sockets, a log, and an exit status of its own, and is
killed by signals.

A server is started as users start it, by a command, where a fork would differ: another program, a
namespace, variables that Python reads when it begins. The crash runs, and the tests of the command
and of the supervisor, use `ServerProcess` itself.

Threads: any.
"""

import atexit
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from delayserver.cli.demo.process import RunningProcess, ServerProcess
from tests import zygote

ROOT = Path(__file__).parents[1]
SPACE = " " * 4096
"""Beside the arguments and the variables of the zygote: /proc shows those of its servers there."""
SAID_MAX_BYTES = 1 << 16
READ_AT_START = ("PYTHON", "LANG", "LC_")
"""How the variables begin that Python reads when it begins."""


class ZygoteFailed(Exception):
    """The process that forks servers has ended; the text holds what it has written."""


class ZygoteProcess:
    """The zygote of this process. It ends with this process, and so do its servers."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self._orders, others = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._said = os.memfd_create("zygote")
        with others:
            self._process = subprocess.Popen(
                [sys.executable, "-m", zygote.__name__, str(others.fileno()), SPACE],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._said,
                cwd=ROOT,
                # numpy would start a thread when it is imported.
                env={**environment, "OPENBLAS_NUM_THREADS": "1", "SPACE": SPACE},
                pass_fds=(others.fileno(),),
                start_new_session=True,
            )

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], log: IO[bytes]
    ) -> "ForkedProcess":
        """Fork a server that runs a command, which begins with PYTHON -m. Raises ZygoteFailed."""
        order = {"command": [*command], "environment": {**environment}, "cwd": os.getcwd()}
        return ForkedProcess(self, self._ask(order, log.fileno())["pid"])

    def status_of(self, pid: int) -> int:
        """The exit status of a server that has ended; asked once. Raises ZygoteFailed."""
        return self._ask({"ended": pid})["status"]

    def close(self) -> None:
        """End the zygote, and the servers that it has forked."""
        self._orders.close()
        self._process.wait()
        os.close(self._said)

    def _ask(self, order: Mapping[str, object], *files: int) -> dict[str, int]:
        with self._lock:
            try:
                socket.send_fds(self._orders, [json.dumps(order).encode()], files)
                data = self._orders.recv(zygote.REQUEST_MAX_BYTES)
            except ConnectionError:
                data = b""
        if not data:
            status = self._process.wait()
            text = os.pread(self._said, SAID_MAX_BYTES, 0).decode(errors="replace")
            raise ZygoteFailed(f"the zygote has ended with status {status}\n{text}")
        answer: dict[str, int] = json.loads(data)
        return answer


class ForkedProcess:
    """A server that was forked, with what a `subprocess.Popen` has."""

    def __init__(self, zygote: ZygoteProcess, pid: int) -> None:
        self.pid = pid
        self._zygote = zygote
        self._lock = threading.Lock()
        self._status: int | None = None
        self._handle = os.pidfd_open(pid)
        weakref.finalize(self, os.close, self._handle)

    def poll(self) -> int | None:
        """The exit status; None: it runs."""
        with self._lock:
            if self._status is None and self._ends_within(0):
                self._status = self._zygote.status_of(self.pid)
            return self._status

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, once it has ended. Raises subprocess.TimeoutExpired."""
        if self._status is None:
            self._ends_within(timeout)
        status = self.poll()
        if status is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._handle, number)

    def _ends_within(self, timeout_s: float | None) -> bool:
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))


@functools.cache
def _zygote_of(pid: int) -> ZygoteProcess:
    """That of this process; `pid`: a worker that was forked itself gets another one."""
    made = ZygoteProcess(os.environ)
    atexit.register(made.close)
    return made


class ForkedServerProcess(ServerProcess):
    """A `ServerProcess` that is forked."""

    def _spawn(
        self, command: Sequence[str], environment: Mapping[str, str], log: IO[bytes]
    ) -> RunningProcess:
        is_module = command[:2] == [sys.executable, "-m"]
        if not is_module or _of_python(environment) != _OF_PYTHON:
            return super()._spawn(command, environment, log)
        return _zygote_of(os.getpid()).start(command, environment, log)


def _of_python(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(READ_AT_START)}


_OF_PYTHON = _of_python(os.environ)
