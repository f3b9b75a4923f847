"""Server processes that are measured: started on loopback, looked at, ended by their own id.

`delay_server` runs a source tree's `delayserver serve` in a data directory, with the defaults of
an operator, but for the log level. `hello_server` runs `hello.py`: the least that the same uvicorn
can do, which tells how fast this machine is today. Either counts as started when it answers
`GET /readyz`; how long that took is part of `Served`.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from load import LoadConnection, http_request

from delayserver.cli.demo.process import free_port

ROOT = Path(__file__).resolve().parents[2]
START_MAX_S = 60.0
"""Unless told otherwise, as the next one."""
FILED_MAX_S = 60.0
STOP_MAX_S = 30.0
MEMORY_FILE_SYSTEMS = {"tmpfs", "ramfs"}


class BenchmarkError(Exception):
    """The figures could not be taken; the text says why."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What a process has in memory, in bytes."""

    anonymous: int
    """Its own: heap, stacks, arrays."""
    file: int
    """Pages of files that are mapped, programs and the catalog: the system drops them at need."""

    @property
    def resident(self) -> int:
        return self.anonymous + self.file


@dataclass(slots=True)
class Served:
    """A server process that is ready."""

    process: subprocess.Popen[bytes]
    port: int
    ready_s: float
    """From the start of the process to its first 200 at /readyz."""
    ready_cpu_s: float = 0.0
    """Its processor time until then."""

    def stats(self) -> dict[str, Any]:
        """GET /v1/stats"""
        with LoadConnection(self.port) as connection:
            answer: dict[str, Any] = connection.call("GET", "/v1/stats")
        return answer

    def metric(self, name: str) -> float:
        """A value of GET /metrics."""
        with LoadConnection(self.port) as connection:
            _, text = connection.request(http_request("GET", "/metrics"))
        for line in text.decode().splitlines():
            if line.startswith(name + " "):
                return float(line.split()[1])
        raise BenchmarkError(f"there is no metric {name}")

    def shards(self) -> list[int]:
        """Ids of the processes that this one has started, its shards, in no order; none of a server
        alone."""
        pid = self.process.pid
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def memory(self) -> Memory:
        """Resident memory of the process itself, without its shards."""
        return memory_of(self.process.pid)

    def cpu_s(self) -> float:
        """Processor time that all threads of the process have used, and of its shards."""
        return sum(map(cpu_s_of, (self.process.pid, *self.shards())))

    def wait_until_filed(self, timeout_s: float = FILED_MAX_S) -> None:
        """Until a checkpoint covers everything that was accepted."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            stats = self.stats()
            if stats["checkpoint_seq"] >= stats["last_seq"]:
                return
            time.sleep(0.1)
        raise BenchmarkError(f"nothing was checkpointed within {timeout_s:.0f} s")

    def kill(self) -> None:
        """kill -9"""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """SIGTERM, and SIGKILL if that is not heard."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_MAX_S)
            except subprocess.TimeoutExpired:
                self.kill()


def memory_of(pid: int) -> Memory:
    """Resident memory of a process, as /proc says."""
    kib = {"RssAnon": 0, "RssFile": 0, "RssShmem": 0}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in kib:
            kib[name] = int(value.split()[0])
    return Memory(kib["RssAnon"] * 1024, (kib["RssFile"] + kib["RssShmem"]) * 1024)


def cpu_s_of(pid: int) -> float:
    """Processor time that all threads of a process have used."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    user, system = int(after_name[11]), int(after_name[12])
    return (user + system) / os.sysconf("SC_CLK_TCK")


@contextmanager
def delay_server(
    data_dir: Path, *options: str, root: Path = ROOT, start_max_s: float = START_MAX_S
) -> Iterator[Served]:
    """The server of a source tree, this one if not told otherwise, until the block ends."""
    port = free_port()
    arguments = ["--port", str(port), "--data-dir", str(data_dir), "--log-level", "warning"]
    command = [sys.executable, "-m", "delayserver", "serve", *arguments, *options]
    with _serve(command, port, data_dir.with_suffix(".log"), root, start_max_s) as served:
        # What a server imports when it is first asked, or some time after its start, is there then:
        # it belongs to no measurement.
        served.stats()
        yield served


@contextmanager
def hello_server(directory: Path) -> Iterator[Served]:
    """The least that uvicorn can do, until the block ends."""
    port = free_port()
    command = [sys.executable, str(Path(__file__).with_name("hello.py")), str(port)]
    with _serve(command, port, directory / "hello.log", ROOT, START_MAX_S) as served:
        yield served


@contextmanager
def _serve(
    command: list[str], port: int, log: Path, root: Path, start_max_s: float
) -> Iterator[Served]:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("DELAYSERVER_")
    }
    # An installed server has its bytecode; without it a start compiles the whole package.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment["PYTHONPATH"] = str(root)
    begun_at = time.monotonic()
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            cwd=root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # Ctrl-C is for the benchmark, which then ends its servers.
            start_new_session=True,
        )
    try:
        _wait_until_ready(process, port, begun_at, log, start_max_s)
        served = Served(process, port, time.monotonic() - begun_at)
        served.ready_cpu_s = served.cpu_s()
        yield served
        if process.poll() not in (None, 0, -signal.SIGKILL):
            raise BenchmarkError(f"the server ended by itself: {log.read_text()[-2000:]}")
        served.stop()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _wait_until_ready(
    process: subprocess.Popen[bytes], port: int, begun_at: float, log: Path, start_max_s: float
) -> None:
    while time.monotonic() - begun_at < start_max_s:
        if process.poll() is not None:
            raise BenchmarkError(f"the server did not start: {log.read_text()[-2000:]}")
        try:
            with LoadConnection(port, timeout_s=5) as connection:
                if connection.request(http_request("GET", "/readyz"))[0] == 200:
                    return
        except OSError:
            pass
        time.sleep(0.005)
    raise BenchmarkError(f"the server was not ready after {start_max_s:.0f} s")


def add_directory(parser: argparse.ArgumentParser) -> None:
    """--dir, for `disk_directory`."""
    parser.add_argument(
        "--dir",
        type=Path,
        metavar="DIRECTORY",
        default=Path("/var/tmp"),
        help="where data directories are made, on the disk to be measured (default: %(default)s)",
    )


@contextmanager
def disk_directory(parent: Path) -> Iterator[Path]:
    """A new directory on a real disk, deleted at the end."""
    with tempfile.TemporaryDirectory(prefix="delayserver-bench-", dir=parent) as name:
        if file_system(Path(name)) in MEMORY_FILE_SYSTEMS:
            raise BenchmarkError(f"{parent} is in memory; choose a directory on a disk with --dir")
        yield Path(name)


def demand_space(directory: Path, needed_bytes: int) -> None:
    """Raises BenchmarkError if there is less room than that."""
    free = shutil.disk_usage(directory).free
    if free < needed_bytes:
        raise BenchmarkError(
            f"{needed_bytes / 1e9:.1f} GB are needed in {directory}, and {free / 1e9:.1f} GB are "
            "free: choose another directory with --dir, or fewer messages with --messages"
        )


def file_system(path: Path) -> str:
    """Type of the file system that holds `path`: `ext4`, `tmpfs`, …"""
    best, kind = "", "unknown"
    for line in Path("/proc/mounts").read_text().splitlines():
        mount, name = line.split()[1:3]
        if path.is_relative_to(mount) and len(mount) >= len(best):
            best, kind = mount, name
    return kind
