"""A process that has imported what a server needs, and forks servers on demand.

    python -m tests.zygote SOCKET SPACE     as `tests.forked_servers` starts it

    {"modules", "environment", "cwd"} and a log  ──▶ {"pid"}      a server was forked
    {"ended": pid}                               ──▶ {"status"}   as `Popen.returncode`

Requests come over a socket, one at a time. When the other end is closed, the zygote kills the
servers that still run, and ends.

A server is all that one of `subprocess.Popen` would be: it has a session, an environment, a
directory and descriptors of its own, and runs `python -m …` to its end. `ps` shows its command and
/proc its environment, not those of the zygote. It stays a zombie until the caller asks for its
status, so its number is not given to another process meanwhile.

Four things differ from a server that the command starts: hash(str) is the same in all of them, the
umask and the limits are those of the zygote, and every module is there already. Tests that look at
one of these start the command; so do the crash runs.

Rejected: the forkserver of multiprocessing. It ignores SIGINT, keeps pipes open in each child, and
does not tell which signal has ended one. Also rejected: importing pyarrow, which starts a thread,
and OpenTelemetry, which reads the environment when it is imported.

Cost: the imports, once for each worker of pytest; 20 ms of processor for each server. Threads: one,
so nothing is locked when it forks.
"""

import atexit
import ctypes
import gc
import json
import os
import runpy
import signal
import socket
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

REQUEST_MAX_BYTES = 128 * 1024
MODULES = (
    "delayserver.cli.serve",
    "delayserver.serve.process",
    "delayserver.api.rest.app",
    "delayserver.serve.supervisor",
    "delayserver.cluster.joining",
    "delayserver.cluster.news",
    "delayserver.serve.candidacy",
    "delayserver.delivery.amqp_sink",
    "delayserver.delivery.kafka_sink",
    "delayserver.parts.sources.kafka_source",
    "delayserver.delivery.nats_sink",
    "delayserver.delivery.redis_sink",
    "starlette.middleware.cors",
    "uvloop",
)
"""Imported before the first fork, with all that these import: the modules of any server."""

_STAT_FIRST = 3
"""The first field of /proc/PID/stat behind the name."""
_ARG_START, _ENV_START = 48, 50
"""Fields of the same file; the next one of each is its end."""


class Zygote:
    """This process between its imports and a fork."""

    def __init__(self, orders: socket.socket) -> None:
        self._orders = orders
        self._running: set[int] = set()

    def serve(self) -> list[str] | None:
        """Fork servers until the other end is closed. Returns more than once: in each server, with
        what is to be run there, and in the zygote with None."""
        while True:
            data, files, _, _ = socket.recv_fds(self._orders, REQUEST_MAX_BYTES, 1)
            if not data:
                for pid in self._running:
                    os.kill(pid, signal.SIGKILL)
                return None
            order = json.loads(data)
            if "ended" in order:
                pid = order["ended"]
                _, status = os.waitpid(pid, 0)
                self._running.remove(pid)
                self._tell(status=os.waitstatus_to_exitcode(status))
                continue
            (log,) = files
            assert len(os.listdir("/proc/self/task")) == 1, "a module has started a thread"
            pid = os.fork()
            if pid == 0:
                self._orders.close()
                return _become(order, log)
            os.close(log)
            self._running.add(pid)
            self._tell(pid=pid)

    def _tell(self, **answer: int) -> None:
        self._orders.send(json.dumps(answer).encode())


def _become(order: dict[str, Any], log: int) -> list[str]:
    """Make this process that of a server; what it is to run."""
    os.setsid()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    command: list[str] = order["command"]
    os.environ.clear()
    os.environ.update(order["environment"])
    time.tzset()
    os.chdir(order["cwd"])
    sys.path[0] = os.getcwd()
    _show(_ARG_START, command)
    _show(_ENV_START, [f"{name}={value}" for name, value in os.environ.items()])
    return command


def _show(field: int, words: list[str]) -> None:
    """Have /proc show these words, as many as there is space for."""
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = (int(stat[at - _STAT_FIRST]) for at in (field, field + 1))
    text = b"".join(os.fsencode(word) + b"\0" for word in words)
    size = end - start
    ctypes.memmove(start, text[: size - 1].ljust(size, b"\0"), size)


class _Ending:
    """Ends a server without the last collections of Python, which visit, and so copy, all that was
    imported: 0.3 s. It comes behind all that others do at the end of a process."""

    def __init__(self) -> None:
        self.status: object = None
        atexit.register(self._end)

    def _end(self) -> None:
        if isinstance(self.status, int):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self.status)


def main() -> None:
    """The zygote; then, in each fork of it, a server."""
    ending = _Ending()
    orders = socket.socket(fileno=int(sys.argv[1]))
    for name in MODULES:
        import_module(name)
    for name in import_module("delayserver.serve.app").IMPORTED_LATE:
        import_module(name)
    gc.collect()
    gc.freeze()  # The collector need not look at it, and so copies none of it.
    command = Zygote(orders).serve()
    if command is not None:
        _, _, module, *arguments = command
        sys.argv = [module, *arguments]
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            ending.status = end.code
            raise


if __name__ == "__main__":
    main()
