"""Processor time of a run of the tests, by file, by kind of process and by fixture.

A time on a shared machine is noise, so tests are judged by processor time. It has two sources:

    workers    each test reports the processor time of its own worker, and each fixture that of its
               setup, with the children that have ended
    processes  one thread of the controller reads /proc twice a second: servers, brokers, Sparks and
               browsers carry the name of the test that started them in their environment
               (PYTEST_CURRENT_TEST). A process that lives for less than half a second is missed.

A broker or a Spark that several files share is counted for the file that started it.
Cost: 20 ms of processor per second. Threads: the reader's own; `close` ends it.
"""

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

PROC = Path("/proc")
INTERVAL_S = 0.5
SETTLED_S = 2.0
"""After that long a process has become the program that it stays."""
KINDS = (
    ("kafka.Kafka", "Kafka"),
    ("redis-server", "Redis"),
    ("nats-server", "NATS"),
    ("beam.smp", "RabbitMQ"),
    ("prometheus", "Prometheus"),
    ("chromium", "Chromium"),
    ("playwright", "Chromium"),
    ("org.apache.spark", "Spark (Java)"),
    ("pyspark", "Spark (Python)"),
    ("spark_classes", "Spark (Python)"),
    ("celery", "Celery"),
    ("moto", "object store"),
    ("wrk", "load"),
    ("delayserver.api", "server"),
    ("delayserver serve", "server"),
    ("delayserver", "delayserver, other commands"),
    ("java", "Java, other"),
    ("python", "Python, other"),
)
"""Words of a command line, and the kind of process that they stand for; the first row counts."""

RUN = "PYTEST_RUN"
"""The variable that says to which run a process belongs."""
WORKER_S, FIXTURE = "worker_s", "fixture"
"""Properties of a report: what a test took of its worker, and what the setup of a fixture took."""
FIXTURE_MIN_S = 0.05
"""A fixture that is quicker is not told."""

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass
class Process:
    """One process of a test."""

    command: str = ""
    test: str = ""
    seen_first_s: float = 0.0
    processor_s: float = 0.0

    @property
    def kind(self) -> str:
        return next((kind for words, kind in KINDS if words in self.command), "other")


@dataclass
class FileTimes:
    """Time that the tests of one file took, in seconds."""

    worker_s: float = 0.0
    process_s: float = 0.0

    @property
    def processor_s(self) -> float:
        return self.worker_s + self.process_s


@dataclass
class FixtureTimes:
    """Time that the setups of one fixture took, in seconds."""

    setups: int = 0
    wall_s: float = 0.0
    worker_s: float = 0.0


@dataclass
class Times:
    """Time that a whole run took."""

    files: dict[str, FileTimes] = field(default_factory=lambda: defaultdict(FileTimes))
    fixtures: dict[str, FixtureTimes] = field(default_factory=lambda: defaultdict(FixtureTimes))
    kinds: dict[str, tuple[int, float]] = field(default_factory=dict)
    """By kind of process: how many there were, and their processor time."""
    is_whole: bool = True
    """All tests of these files have run to their end."""

    @property
    def processor_s(self) -> float:
        return sum(one.processor_s for one in self.files.values())

    def add_processes(self, processes: Iterable[Process]) -> None:
        """Count processes for the files that started them."""
        for one in processes:
            count, processor_s = self.kinds.get(one.kind, (0, 0.0))
            self.kinds[one.kind] = (count + 1, processor_s + one.processor_s)
            self.files[one.test.partition("::")[0]].process_s += one.processor_s


class ProcessReader:
    """Reads /proc in a thread of its own. Other runs on this machine have another `run`."""

    def __init__(self, run: str, root: Path = PROC, interval_s: float = INTERVAL_S) -> None:
        self._run_id = f"{RUN}={run}".encode()
        self._root = root
        self._interval_s = interval_s
        self._found: dict[tuple[str, str], Process] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="accounting", daemon=True)
        self._thread.start()

    def found(self) -> list[Process]:
        """The processes that were started by tests, until now."""
        return [one for one in list(self._found.values()) if one.test]

    def close(self) -> list[Process]:
        """End the thread; the same, of the whole run."""
        self._ended.set()
        self._thread.join()
        return self.found()

    def _run(self) -> None:
        while not self._ended.wait(self._interval_s):
            self._read()

    def _read(self) -> None:
        now_s = time.monotonic()
        for path in self._root.iterdir():
            if path.name.isdigit():
                try:
                    self._read_one(path, now_s)
                except OSError:
                    continue  # It has ended.

    def _read_one(self, path: Path, now_s: float) -> None:
        numbers = (path / "stat").read_text().rpartition(")")[2].split()
        user, system, start = numbers[11], numbers[12], numbers[19]
        one = self._found.setdefault((path.name, start), Process(seen_first_s=now_s))
        if now_s - one.seen_first_s < SETTLED_S:
            one.command = (path / "cmdline").read_text(errors="replace").replace("\0", " ")
            one.test = self._test_of((path / "environ").read_bytes())
        one.processor_s = (int(user) + int(system)) / _TICKS_PER_S

    def _test_of(self, environ: bytes) -> str:
        lines = environ.split(b"\0")
        if self._run_id in lines:
            for line in lines:
                name, _, value = line.partition(b"=")
                if name == b"PYTEST_CURRENT_TEST":
                    return value.decode(errors="replace").rpartition(" (")[0]
        return ""


class WorkerTimes:
    """Plugin of each process that runs tests: reports say what their test took of the processor."""

    def __init__(self) -> None:
        self._started_s = 0.0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._started_s = time.process_time()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        if call.when == "teardown":
            item.user_properties.append((WORKER_S, time.process_time() - self._started_s))
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
    ) -> Generator[None, object, object]:
        wall_s, worker_s = time.monotonic(), _used_s()
        try:
            return (yield)
        finally:
            wall_s, worker_s = time.monotonic() - wall_s, _used_s() - worker_s
            if wall_s > FIXTURE_MIN_S:
                where = fixturedef.baseid.removesuffix("/conftest.py")
                took = (f"{fixturedef.argname} ({where})", wall_s, worker_s)
                request._pyfuncitem.user_properties.append((FIXTURE, took))


class RunTimes:
    """Plugin of the controller: adds up what a run took, and tells at its end."""

    def __init__(self, tell: Callable[[Times], Iterable[str]]) -> None:
        self.times = Times()
        self._failed: set[str] = set()
        self._tell = tell
        # The workers and all that they start inherit it.
        os.environ[RUN] = f"{os.getpid()}"
        self._reader = ProcessReader(os.environ[RUN])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        if report.failed:
            self._failed.add(file)
        if report.when != "teardown":
            return
        one = self.times.files[file]
        for name, value in report.user_properties:
            if name == WORKER_S and isinstance(value, float):
                one.worker_s += value
            elif name == FIXTURE and isinstance(value, list | tuple):
                fixture, wall_s, worker_s = value
                found = self.times.fixtures[fixture]
                found.setups += 1
                found.wall_s += wall_s
                found.worker_s += worker_s

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter, exitstatus: int
    ) -> None:
        self.times.add_processes(self._reader.close())
        has_run = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        self.times.is_whole = has_run and not terminalreporter.stats.get("deselected")
        for file in self._failed:
            self.times.files.pop(file, None)
        lines = list(self._tell(self.times))
        if lines:
            terminalreporter.section("what the tests took")
        for line in lines:
            terminalreporter.write_line(line)


def _used_s() -> float:
    """Processor time of this process, and of its children that have ended."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system
