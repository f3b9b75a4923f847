"""A standalone cluster of Spark from the jars of pyspark: a master and two workers, real processes.

    master ◀── worker "one"     ── its executors ── their Python
           ◀── worker "two"     ── likewise; what is `hidden` is an empty directory there
    driver: a process that has a session on it, and is asked for what tests want

Each worker works in a directory of its own, has a host name of its own, and one core. What is
hidden is so by a mount namespace, as on a node where somebody forgot to mount it.
"""

import contextlib
import multiprocessing
import os
import re
import signal
import subprocess
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

import pyspark
from pyspark.sql import SparkSession
from sessions import QUICK_JAVA, QUICK_SETTINGS
from typer.testing import CliRunner

from delayserver.cli import make_app
from delayserver.pipeline import session as sessions
from delayserver.pipeline.session import find_java, open_session
from tests.pipeline.forking import make_forking_python
from tests.pipeline.processes import descendants, runs
from tests.waiting import wait_until

P = ParamSpec("P")
T = TypeVar("T")

HOME = Path(pyspark.__file__).parent
START_S = 60.0
SETTINGS = QUICK_SETTINGS | {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "512m",
    "spark.executor.memory": "512m",
    "spark.executor.extraJavaOptions": QUICK_JAVA,
    # Both have registered before the first task is given out.
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "60s",
}
_EXECUTOR = "CoarseGrainedExecutorBackend"


class SparkCluster:
    """A master and its workers."""

    def __init__(self, root: Path, hidden: Path) -> None:
        """Logs and working directories are below `root`; `hidden` is not there at worker two."""
        self._root = root
        self._processes: list[subprocess.Popen[bytes]] = []
        self.workers: dict[str, int] = {}
        """Their processes, by their host names."""
        try:
            master = self._start("master", "Master", "--port", "0")
            found = wait_until(partial(master.search, r"(spark://\S+:[1-9]\d*)"), START_S)
            assert found is not None
            self.url = found[1]
            logs = []
            for name, hides in (("one", None), ("two", hidden)):
                words = ("--port", "0", "--cores", "1", "--memory", "1g", self.url)
                logs.append(self._start(name, "Worker", *words, hides=hides))
                self.workers[name] = self._processes[-1].pid
            for log in logs:
                wait_until(partial(log.search, "Successfully registered"), START_S)
        except BaseException:
            self.close()
            raise

    def _start(self, name: str, role: str, *words: str, hides: Path | None = None) -> "Log":
        here = self._root / name
        here.mkdir()
        program = f"org.apache.spark.deploy.{role.lower()}.{role}"
        command = [str(HOME / "bin" / "spark-class"), program]
        command += ["--host", "127.0.0.1", "--webui-port", "0", *words]
        if role == "Worker":
            prepare = f"hostname {name}"
            if hides is not None:
                prepare += f" && mount -t tmpfs none '{hides}'"
            apart = ["unshare", "--mount", "--uts"]
            if os.geteuid() != 0:
                apart.append("--map-root-user")
            command = [*apart, "sh", "-c", f'{prepare} && exec "$@"', "sh", *command]
        environment = {
            "SPARK_DAEMON_MEMORY": "128m",
            "SPARK_DAEMON_JAVA_OPTS": f"{QUICK_JAVA} -Dspark.master.rest.enabled=false",
            "SPARK_WORKER_DIR": str(here / "work"),
        }
        process, log = start_program(command, here, environment)
        self._processes.append(process)
        return log

    def executor(self, worker: str) -> int | None:
        """The process of a worker's executor, if there is one."""
        for child in descendants(self.workers[worker]):
            if runs(child, _EXECUTOR):
                return child
        return None

    def kill_executor(self, worker: str) -> None:
        """Kill the executor of a worker, and what it has started."""
        executor = self.executor(worker)
        assert executor is not None
        for pid in [executor, *descendants(executor)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def stop_python(self, worker: str) -> None:
        """Have what an executor of a worker is about to do in Python never end."""
        executor = self.executor(worker)
        assert executor is not None
        for pid in descendants(executor):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    @contextlib.contextmanager
    def frozen(self, worker: str) -> Iterator[None]:
        """What the executor of a worker is given meanwhile is not done."""
        executor = self.executor(worker)
        assert executor is not None
        os.kill(executor, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(executor, signal.SIGCONT)

    def close(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            process.wait(30)


class Log:
    """What a process prints."""

    def __init__(self, path: Path, process: "subprocess.Popen[bytes]") -> None:
        self._path = path
        self._process = process

    def search(self, pattern: str) -> re.Match[str] | None:
        """The first place where it says so; a process that has ended says no more."""
        text = self._path.read_text(errors="replace")
        assert self._process.poll() is None, text
        return re.search(pattern, text)


def start_program(
    command: list[str], here: Path, environment: Mapping[str, str]
) -> "tuple[subprocess.Popen[bytes], Log]":
    """A program of Spark, and what it prints; it works in that directory."""
    java = find_java()
    everywhere = {
        "SPARK_HOME": str(HOME),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": str(make_forking_python(here)),
        **({} if java is None else {"JAVA_HOME": str(java)}),
    }
    path = here / "log"
    with path.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=here,
            env={**os.environ, **everywhere, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    return process, Log(path, process)


# ── the driver ─────────────────────────────────────────────────────────────────────────────────


class DriverError(Exception):
    """What was wanted of a driver failed there."""


class Driver:
    """A process with a session: that of the tests has one of its own, and there is one for each."""

    def __init__(self, master: str, directory: Path, settings: Mapping[str, str]) -> None:
        """It works in that directory."""
        spawn = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(1, spawn, _open, (master, str(directory), settings))

    def start(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """Have it call a function of a module, which finds the session by `the_session`."""
        return self._pool.submit(_told, partial(function, *args, **kwargs))

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What the function returns."""
        return self.start(function, *args, **kwargs).result()

    def command(self, *words: str) -> tuple[int, str, str]:
        """Exit status, output and errors of a command of the pipeline there."""
        return self.run(_command, words)

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.run(_close)
        self._pool.shutdown()


_OPENED = contextlib.ExitStack()
_SESSIONS: list[SparkSession] = []


def _open(master: str, directory: str, settings: Mapping[str, str]) -> None:
    os.chdir(directory)
    os.environ["PYSPARK_PYTHON"] = str(make_forking_python(Path(directory)))
    session = open_session("tests", master=master, settings=settings)
    _SESSIONS.append(_OPENED.enter_context(session))

    @contextlib.contextmanager
    def shared(*arguments: object, **settings: object) -> Iterator[SparkSession]:
        yield the_session()

    sessions.open_session = shared


def _told(function: Callable[[], T]) -> T:
    """Errors of Spark cannot go from process to process."""
    try:
        return function()
    except Exception:
        raise DriverError(traceback.format_exc()) from None


def _close() -> None:
    _OPENED.close()


def the_session() -> SparkSession:
    """In the driver: its session."""
    return _SESSIONS[0]


def _command(words: tuple[str, ...]) -> tuple[int, str, str]:
    result = CliRunner().invoke(make_app(), ["pipeline", *words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr
