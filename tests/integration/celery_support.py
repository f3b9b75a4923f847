"""A broker, workers and forwarders of Celery as processes of their own, that can be killed for
real.

    python -m tests.integration.celery_support --restarts 200

restarts a server in order under a worker of Celery, and says how often each task ran.
"""

import argparse
import gc
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import kombu
import pytest

from delayserver.cli.demo.process import free_port, free_ports
from tests.integration.api_support import ApiServer, unique
from tests.integration.celery_app import DUMP_SIGNAL, make_app
from tests.waiting import wait_until

DUE_S = 1.2
"""Just more than the threshold of the app."""
STOP_S = 60.0
"""Celery forgets a task that it has handed to a process and not heard of when it is told to stop.
That process then waits 30 s for somebody to read what came of the task, before it ends (billiard,
`Worker._ensure_messages_consumed`)."""


class Process:
    """One program, and what it says."""

    def __init__(self, command: list[str], log_path: Path, environment: dict[str, str]) -> None:
        self.log_path = log_path
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **environment},
            )
        self.pid = self._process.pid

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def until_told(self, text: str) -> None:
        wait_until(lambda: text in self.log or not self.is_running)
        assert text in self.log, self.log

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def stop(self) -> int:
        """End it in order; the status. What does not end says where it stands."""
        self.send(signal.SIGTERM)
        try:
            return self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"it goes on after SIGTERM:\n{self._stacks()}", pytrace=False)

    def _stacks(self) -> str:
        """What it has said, and where the threads stand, those of what it has forked, too."""
        for pid in (self.pid, *_children(self.pid)):
            self._dump(pid)
        return self.log

    def _dump(self, pid: int) -> None:
        with self.log_path.open("a") as log:
            log.write(f"\n── process {pid} ──\n")
        length = len(self.log)
        # One that has ended meanwhile says nothing.
        with suppress(ProcessLookupError, AssertionError):
            os.kill(pid, DUMP_SIGNAL)
            wait_until(lambda: "(most recent call first)" in self.log[length:], 2)

    def kill(self) -> None:
        """End it, and the processes that it has forked, with SIGKILL; nothing if it has ended."""
        forked = _children(self.pid) if self.is_running else []
        self._process.kill()
        self._process.wait()
        for pid in forked:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def _children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Redis:
    """A Redis that loses nothing it has answered: `appendfsync always`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.port = free_port()
        self.start()

    def start(self) -> None:
        options = {
            "port": self.port,
            "bind": "127.0.0.1",
            "dir": self._directory,
            "appendonly": "yes",
            "appendfsync": "always",
            "save": "",
        }
        command = ["redis-server"]
        for name, value in options.items():
            command += [f"--{name}", str(value)]
        self.process = Process(command, self._directory / "redis.log", {})
        wait_until(self._answers)

    def _answers(self) -> bool:
        assert self.process.is_running, self.process.log
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(100) == b"+PONG\r\n"
        except OSError:
            return False

    def kill(self) -> None:
        self.process.kill()

    def url(self, database: int) -> str:
        return f"redis://127.0.0.1:{self.port}/{database}"


class RabbitMQ:
    """A node of RabbitMQ, with a directory, a name and ports of its own."""

    def __init__(self, directory: Path) -> None:
        # In a row, below those that the system gives to clients.
        port = free_ports(3)
        self.url = f"amqp://guest:guest@127.0.0.1:{port}//"
        mapper_port = str(port + 1)
        environment = {
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": mapper_port,
            "HOME": str(directory),
            "RABBITMQ_DIST_PORT": str(port + 2),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "enabled_plugins"),
            "RABBITMQ_LOG_BASE": str(directory / "log"),
            "RABBITMQ_MNESIA_BASE": str(directory / "mnesia"),
            "RABBITMQ_NODENAME": f"test{port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(port),
            "RABBITMQ_PID_FILE": str(directory / "pid"),
        }
        # The port mapper that a node starts by itself is a daemon, and would outlive it.
        mapper = ["epmd", "-address", "127.0.0.1", "-port", mapper_port]
        self._mapper = Process(mapper, directory / "epmd.log", {})
        # Debian's command of that name becomes another user first.
        program = "/usr/lib/rabbitmq/bin/rabbitmq-server"
        program = program if Path(program).exists() else "rabbitmq-server"
        self._node = Process([program], directory / "rabbitmq.log", environment)

    def until_there(self) -> None:
        wait_until(self._answers, 100)

    def _answers(self) -> bool:
        assert self._node.is_running, self._node.log
        try:
            with kombu.Connection(self.url, connect_timeout=2) as connection:
                connection.connect()
        except OSError:
            return False
        return True

    def kill(self) -> None:
        self._node.kill()
        self._mapper.kill()


class Shop:
    """An app of Celery, with a queue, a subject and a file of runs of its own."""

    def __init__(
        self, directory: Path, server: str, broker: str, backend: str = "", token: str = ""
    ) -> None:
        self.directory = directory
        self.runs_path = directory / "runs"
        self.subject = unique("celery.shop")
        self.settings = {
            "TEST_SUBJECT": self.subject,
            "TEST_SERVER": server,
            "TEST_BROKER": broker,
            "TEST_RUNS": str(self.runs_path),
            **({"TEST_BACKEND": backend} if backend else {}),
            **({"TEST_TOKEN": token} if token else {}),
        }
        self.app: Any = make_app(self.settings)
        self._processes: list[Process] = []

    def _start(self, *arguments: str, **settings: str) -> Process:
        path = self.directory / f"{unique('process')}.log"
        command = [sys.executable, "-m", *arguments]
        self._processes.append(Process(command, path, {**self.settings, **settings}))
        return self._processes[-1]

    def worker(self, *options: str, pool: str = "solo", forward: str = "yes") -> Process:
        """A worker, which is not ready yet."""
        app = ("-A", "tests.integration.celery_app")
        quick = ("--without-gossip", "--without-mingle", "--without-heartbeat", "-l", "INFO")
        command = ("celery", *app, "worker", "-P", pool, *quick, *options)
        return self._start(*command, TEST_FORWARD=forward)

    def forwarder(self) -> Process:
        app = ("-A", "tests.integration.celery_app")
        return self._start("delayserver.integrations.celery", *app, "-l", "debug")

    def end(self) -> None:
        """Kill whatever runs still."""
        for process in self._processes:
            process.kill()
        # Results say good-bye to the broker when they go, which is there still.
        gc.collect()
        self.app.close()

    def send(self, count: int, countdown: float = DUE_S) -> list[str]:
        """Send so many tasks; their ids."""
        run = self.app.tasks["run"]
        return [run.apply_async(countdown=countdown).id for _ in range(count)]

    def states(self, api: ApiServer, ids: Iterable[str]) -> set[str]:
        """What the delay server says of tasks."""
        path = f"/v1/subjects/{self.subject}/keys"
        return {api.ask("GET", f"{path}/{task_id}")["state"] for task_id in ids}

    @property
    def runs(self) -> list[list[str]]:
        """Task id, label, …, process id and moment of each run so far."""
        text = self.runs_path.read_text() if self.runs_path.exists() else ""
        return [line.split() for line in text.splitlines()]

    @property
    def counts(self) -> Counter[str]:
        """How often each task ran."""
        return Counter(run[0] for run in self.runs)

    def until_run(self, task_ids: Iterable[str], timeout_s: float = 30) -> None:
        """Wait until each has run."""
        wanted = set(task_ids)
        wait_until(lambda: wanted <= set(self.counts), timeout_s)


def tasks_over(api: ApiServer, shop: Shop, restarts: int, tasks: int = 10) -> list[str]:
    """Send so many tasks for each of so many planned restarts; their ids. Each has run."""
    sent: list[str] = []
    worker = shop.worker()
    worker.until_told("ready.")
    for _ in range(restarts):
        sent += shop.send(tasks)
        api.restart()
    shop.until_run(sent, 60)
    assert worker.stop() == 0
    return sent


def main() -> None:
    """Restart many times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--restarts", type=int, default=200, help="planned ones (default: 200)")
    restarts: int = parser.parse_args().restarts
    with tempfile.TemporaryDirectory() as name:
        api, store = ApiServer(Path(name)), Redis(Path(name))
        api.start()
        shop = Shop(Path(name), api.process.url, store.url(0))
        try:
            sent = tasks_over(api, shop, restarts)
            runs = Counter(shop.counts[one] for one in sent)
        finally:
            shop.end()
            api.shut_down()
            store.kill()
    print(f"{restarts} planned restarts; tasks that ran so often: {runs}")
    if runs.keys() != {1}:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
