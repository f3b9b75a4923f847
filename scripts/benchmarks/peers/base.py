"""What is asked of every peer, and the load that is the same for all.

A `Peer` is a server process (or several) in a directory of its own, started and ended here. It is
asked for four things: durable publishes with so many in flight, deliveries against their due time,
what a pending message costs in memory and on the disk, and how long it takes to come back after
kill -9. Whatever a peer's own clients would add is kept small: requests are prebuilt bytes, and
answers are only counted. Where that flatters a peer, its module says so.

Cost: one callback per answer; a generator does about 200,000 requests/s on a quiet core.
"""

import asyncio
import os
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import uvloop

BODY_BYTES = 200
STAMP_DIGITS = 13
"""A body begins with its due time in ms: so a receiver can tell how late it is."""
START_MAX_S = 60.0
POLL_S = 0.01
"""How often a peer is polled that does not say by itself what is due."""
LEASE_MS = 30_000
IDLE_S = 12.0
"""A consumer that gets nothing for so long has got all that comes."""


Counter = Callable[[bytes], tuple[int, bytes]]


class PeerError(Exception):
    """A peer did not do what was asked; the text says what."""


def make_body(due_ms: int) -> bytes:
    """A body of BODY_BYTES that tells when it is due."""
    return b"%013d" % due_ms + b"x" * (BODY_BYTES - STAMP_DIGITS)


def due_of(body: bytes) -> int:
    """When a body is due."""
    return int(body[:STAMP_DIGITS])


@dataclass(slots=True)
class ClosedLoopResult:
    """What a ClosedLoop has published, and how long each answer took."""

    count: int = 0
    seconds: float = 0.0
    latency_ms: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.count / self.seconds


@dataclass(slots=True)
class ClosedLoop:
    """How to publish: `in_flight` at once, for `seconds` or until `count` are published."""

    in_flight: int
    delay_ms: int
    seconds: float = float("inf")
    count: int | None = None
    per_s: float = 0.0
    """Paced: not more than so many each second (0: as many as are answered)."""

    def due_ms(self) -> int:
        """Of a message that is published now."""
        return time.time_ns() // 1_000_000 + self.delay_ms


@dataclass(slots=True)
class Got:
    """What a consumer received: the moment, and when it was due."""

    received_ns: list[int] = field(default_factory=list)
    due_ms: list[int] = field(default_factory=list)

    def add(self, received_ns: int, body: bytes) -> None:
        self.received_ns.append(received_ns)
        self.due_ms.append(due_of(body))

    def lateness_ms(self) -> list[float]:
        """Moment of receipt less due time."""
        pairs = zip(self.received_ns, self.due_ms, strict=True)
        return [(received - due * 1_000_000) / 1e6 for received, due in pairs]


class Program(ABC):
    """A server of others that a benchmark starts and ends."""

    name: str

    def __init__(self, directory: Path, port: int) -> None:
        self.directory = directory
        self.port = port
        self.processes: list[subprocess.Popen[bytes]] = []

    @abstractmethod
    def start(self) -> None:
        """Start it on its directory, which may have data; `is_ready` says when it answers."""

    @abstractmethod
    async def is_ready(self) -> bool:
        """Whether a client is served."""

    def spawn(
        self,
        *command: str,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
    ) -> None:
        """Start a process of the peer; its output goes to a file of its directory."""
        with (self.directory / "output.log").open("ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                cwd=cwd,
                env=env,
                user=user,
            )
        self.processes.append(process)

    async def wait_until_ready(self) -> float:
        """Seconds until it answers. Raises PeerError."""
        begun_at = time.monotonic()
        while time.monotonic() - begun_at < START_MAX_S:
            try:
                if await self.is_ready():
                    return time.monotonic() - begun_at
            except (OSError, asyncio.IncompleteReadError):
                pass
            if any(process.poll() not in (None, 0) for process in self.processes):
                break
            await asyncio.sleep(0.01)
        tail = (self.directory / "output.log").read_text(errors="replace")[-2000:]
        raise PeerError(f"{self.name} did not start: {tail}")

    def kill(self) -> None:
        """kill -9 for all that it has started."""
        for process in self.processes:
            for number in (process.pid, *_descendants(process.pid)):
                try:
                    os.kill(number, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            process.wait()
        self.processes.clear()


class Peer(Program):
    """One server that keeps messages until they are due."""

    packages: str
    """What has to be installed."""
    durability: str
    """How it is set, so that an answer means: on the disk."""
    in_flight_max: int = 1_000
    """More than that it does not take."""

    @classmethod
    @abstractmethod
    def is_installed(cls) -> bool:
        """Whether it can be started on this machine."""

    @abstractmethod
    async def publish(self, load: ClosedLoop) -> ClosedLoopResult:
        """Durable publishes, each answered."""

    @abstractmethod
    async def consume(self, count: int, idle_max_s: float) -> Got:
        """Receive and acknowledge until so many have come, or nothing comes for a while."""

    async def cancel(self, load: ClosedLoop) -> ClosedLoopResult | None:
        """Durable cancels by key of `load.count` messages that wait, each answered; they are
        published before. None: it has no such call."""
        return None

    def memory_bytes(self) -> int:
        """What its processes have for themselves (anonymous), together."""
        numbers = [
            number
            for process in self.processes
            for number in (process.pid, *_descendants(process.pid))
        ]
        return sum(_anonymous_bytes(number) for number in numbers)

    def disk_bytes(self) -> int:
        """Blocks that its directory takes."""
        total = 0
        for folder, _, names in os.walk(self.directory):
            for name in names:
                try:
                    total += os.lstat(os.path.join(folder, name)).st_blocks * 512
                except FileNotFoundError:
                    continue
        return total


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        if parent == pid:
            child = int(path.parent.name)
            found += [child, *_descendants(child)]
    return found


def _anonymous_bytes(pid: int) -> int:
    """Anonymous and shared memory: some keep their data in one, some in the other."""
    total = 0
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in ("Anonymous", "Pss_Shmem"):
                total += int(value.split()[0]) * 1024
    except (OSError, ValueError):
        return 0
    return total


# ---- closed loops ------------------------------------------------------------------------------


class _Line(asyncio.Protocol):
    """One connection with a window of requests that are not answered yet."""

    def __init__(self, loop: "_ClosedLoop", count_answers: Counter) -> None:
        self._loop = loop
        self._count_answers = count_answers
        self._sent_at: deque[float] = deque()
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def send(self, request: bytes) -> None:
        self._sent_at.append(time.perf_counter())
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        try:
            answers, self._rest = self._count_answers(self._rest + data if self._rest else data)
        except PeerError as error:
            self._loop.fail(error)
            return
        now = time.perf_counter()
        for _ in range(answers):
            self._loop.answered((now - self._sent_at.popleft()) * 1000)
        if answers:
            self._loop.refill(self, answers)

    def connection_lost(self, error: Exception | None) -> None:
        if self._sent_at:
            self._loop.fail(PeerError(f"the connection was lost: {error}"))

    def close(self) -> None:
        self._transport.close()


class _ClosedLoop:
    """A load over several connections to one port."""

    def __init__(self, load: ClosedLoop, request: Callable[[int], bytes]) -> None:
        self._load = load
        self._request = request
        self._asked = 0
        self.published = ClosedLoopResult()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def begin(self, lines: list[_Line], window: int) -> None:
        self._begun_at = time.perf_counter()
        for line in lines:
            self.refill(line, window)

    def answered(self, latency_ms: float) -> None:
        self.published.count += 1
        self.published.latency_ms.append(latency_ms)

    def fail(self, error: PeerError) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def refill(self, line: _Line, count: int) -> None:
        load, elapsed = self._load, time.perf_counter() - self._begun_at
        limit = float("inf") if load.count is None else load.count
        for _ in range(count):
            if self._asked >= limit or elapsed >= load.seconds:
                break
            if load.per_s and self._asked >= load.per_s * elapsed:
                delay_s = max(0.0, (self._asked + 1) / load.per_s - elapsed)
                asyncio.get_running_loop().call_later(delay_s, self.refill, line, 1)
                continue
            self._asked += 1
            line.send(self._request(load.due_ms()))
        # A window that waits for its pace has nothing under way, and is not the end.
        is_over = self._asked >= limit or elapsed >= load.seconds
        if is_over and self.published.count == self._asked and not self.done.done():
            self.published.seconds = time.perf_counter() - self._begun_at
            self.done.set_result(None)


def connect(port: int) -> socket.socket:
    """A connection to loopback."""
    return socket.create_connection(("127.0.0.1", port), 10)


async def closed_loop(
    port: int,
    load: ClosedLoop,
    request: Callable[[int], bytes],
    make_counter: Callable[[], Counter],
    *,
    connections: int,
    connect: Callable[[int], socket.socket] = connect,
) -> ClosedLoopResult:
    """Send requests (made from their due time) over so many connections until the load is done.

    Each connection has a counter of its own, which takes bytes and gives how many answers are
    whole in them, and the rest; it raises PeerError for one that is no success."""
    state = _ClosedLoop(load, request)
    running = asyncio.get_running_loop()
    connections = min(connections, load.in_flight)
    lines = []
    for _ in range(connections):
        made = connect(port)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.setblocking(False)
        counter = make_counter()
        _, line = await running.create_connection(partial(_Line, state, counter), sock=made)
        lines.append(line)
    state.begin(lines, load.in_flight // connections)
    try:
        await state.done
    finally:
        for line in lines:
            line.close()
    return state.published


def count_lines(expected: bytes) -> Counter:
    """Answers of one line each, all of which begin alike."""

    def count(data: bytes) -> tuple[int, bytes]:
        lines = data.split(b"\r\n")
        rest = lines.pop()
        for line in lines:
            if not line.startswith(expected):
                raise PeerError(f"not {expected!r}: {line[:200]!r}")
        return len(lines), rest

    return count


async def paced_tasks(
    load: ClosedLoop, publish: Callable[[int, int], Awaitable[None]]
) -> ClosedLoopResult:
    """A load for a client library: one task for each in flight; `publish(task, due_ms)`."""
    published = ClosedLoopResult()
    begun_at = time.perf_counter()
    limit = float("inf") if load.count is None else load.count
    asked = 0

    async def run(number: int) -> None:
        nonlocal asked
        while asked < limit and (elapsed := time.perf_counter() - begun_at) < load.seconds:
            if load.per_s and asked >= load.per_s * elapsed:
                await asyncio.sleep((asked + 1) / load.per_s - elapsed)
                continue
            asked += 1
            sent_at = time.perf_counter()
            await publish(number, load.due_ms())
            published.latency_ms.append((time.perf_counter() - sent_at) * 1000)

    await asyncio.gather(*(run(number) for number in range(load.in_flight)))
    published.count = len(published.latency_ms)
    published.seconds = time.perf_counter() - begun_at
    return published


# ---- in processes of their own ------------------------------------------------------------------


def run(work: Callable[[], Any]) -> Any:
    """The result of a coroutine, on an event loop of its own."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work())


def publish(kind: type[Peer], directory: Path, port: int, load: ClosedLoop) -> ClosedLoopResult:
    """In a process of its own."""
    published: ClosedLoopResult = run(lambda: kind(directory, port).publish(load))
    return published


def cancel(
    kind: type[Peer], directory: Path, port: int, load: ClosedLoop
) -> ClosedLoopResult | None:
    """In a process of its own."""
    cancelled: ClosedLoopResult | None = run(lambda: kind(directory, port).cancel(load))
    return cancelled


def consume(kind: type[Peer], directory: Path, port: int, count: int) -> Got:
    """In a process of its own."""
    got: Got = run(lambda: kind(directory, port).consume(count, IDLE_S))
    return got
