"""One server under TLS, whose clock and files obey the run, and whose process must stay flat.

    step        its clock is set forward or back
    full, exhausted, unreadable, slow
                its files have no room, no descriptors, cannot be read, or sync slowly; see
                `tests.soak.child`

The process has to live all the time. Its memory and its descriptors must be flat. The median of
RssAnon in the last quarter of the run is at most MEMORY_SHARE and MEMORY_BYTES above that of the
second: the first is the warm-up, and the bytes are what a greedy client may hold at a sample. At
the end there is no socket more than before the first client came, and few files more: each hour
that is in use has two. A message that a failed read keeps back must be named in the log, and come
after the next start.

Cost: half a core for the server. Threads: the event loop.
"""

import asyncio
import contextlib
import json
import os
import random
import ssl
import statistics
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import trustme

from delayserver.cli.demo.process import ServerFailed, ServerProcess, free_port
from tests.harness.notes import Notes
from tests.harness.strikes import RoundPlan, Schedule
from tests.harness.topology import Topology
from tests.harness.traffic import HOUR_MS, Doors
from tests.integration.api_support import make_token
from tests.waiting import Looks

CHILD = Path(__file__).with_name("child.py")
TOKEN = "a token of the soak, with all rights"
FAR_MS = HOUR_MS
"""No far message is due within that of the end."""
OFFSET_MAX_MS = 300_000
"""The clock of the server is never set further away from the machine's."""
STEP_MAX_MS = 120_000
PAUSE_S = 8.0
"""Between two changes, on average; less in a short run, so that each kind has its turn."""
SAMPLE_S = 1.0
CLOSED_S = 20.0
"""Idle connections of the server's own webhooks are closed within that."""
MEMORY_SHARE = 0.15
MEMORY_BYTES = 16 << 20
FILES_MORE = 24
ENDED = "the server ended by itself; see server.log"
OPTIONS = (
    *("--log-json", "--durability=fsync", "--segment-bytes=4194304"),
    *("--retention-ms=1m", "--dedupe-window-ms=15m", "--disk-reserve-bytes=1048576"),
    *("--head-timeout-ms=2s", "--body-timeout-ms=2s", "--write-timeout-ms=2s"),
    "--idle-timeout-ms=10s",
)


class Weather(StrEnum):
    """A change of the server's surroundings."""

    STEP = "step"
    FULL = "full"
    EXHAUSTED = "exhausted"
    UNREADABLE = "unreadable"
    SLOW = "slow"


WEATHER = (*Weather, Weather.STEP)


def pause_of(seconds: float) -> float:
    """The average pause between two changes in a run of this length."""
    return min(PAUSE_S, seconds / 20)


def schedule(kinds: Sequence[Weather], seconds: float) -> Schedule:
    """The schedule of a run of this length."""
    return Schedule(kinds, (0.0, 2 * pause_of(seconds)))


@dataclass
class Sample:
    """The memory and the descriptors of the process at a moment."""

    memory_bytes: int
    sockets: int
    files: int


@dataclass
class Samples:
    """The samples of a run."""

    all: list[Sample] = field(default_factory=list)

    def memory(self, quarter: int) -> float:
        """The median of a quarter of the run."""
        count = len(self.all)
        some = self.all[count * quarter // 4 : max(1, count * (quarter + 1) // 4)]
        return statistics.median(sample.memory_bytes for sample in some)

    def complaints(self, begin: Sample, end: Sample) -> Iterator[str]:
        """A sentence for each figure that is not flat."""
        before, after = self.memory(1), self.memory(3)
        if after > before * (1 + MEMORY_SHARE) + MEMORY_BYTES:
            yield f"memory grew from {before / 2**20:.0f} to {after / 2**20:.0f} MiB"
        if end.sockets > begin.sockets:
            yield f"{end.sockets} sockets are open after the end, {begin.sockets} were before"
        if end.files > begin.files + FILES_MORE:
            yield f"{end.files} files are open after the end, {begin.files} were before"


def sample_of(pid: int) -> Sample:
    """The memory and the descriptors of a process now."""
    status = Path(f"/proc/{pid}/status").read_text()
    memory_bytes = int(status.partition("RssAnon:")[2].split()[0]) * 1024
    targets = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            targets.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    sockets = sum(target.startswith("socket:") for target in targets)
    return Sample(memory_bytes, sockets, len(targets) - sockets)


class WeatherServer(Topology):
    """A server alone, as `tests.soak.child` runs it."""

    def __init__(
        self, notes: Notes, seed: int, *, sample_s: float = SAMPLE_S, bug: str | None = None
    ) -> None:
        self.port = free_port()
        self.tls = _make_certificate(notes.directory)
        self._server = ServerProcess(
            notes.directory / "data",
            port=self.port,
            log_path=notes.directory / "server.log",
            tls=self.tls,
        )
        self._server.options = [
            *OPTIONS,
            f"--token={TOKEN}",
            f"--tls-cert={notes.directory / 'cert.pem'}",
            f"--tls-key={notes.directory / 'key.pem'}",
        ]
        chance = random.Random(seed + 2)
        super().__init__(notes, Doors([self._server.url], chance, token=TOKEN, tls=self.tls))
        self.narrow_token = make_token(self._server.data_dir, "elsewhere", "publish:elsewhere")
        self.read_faults = 0
        """How often reads were made to fail."""
        self.control = notes.directory / "control"
        self._sample_s = sample_s
        self._bug = [bug] if bug else []
        self._begin: Sample | None = None
        """… when no client had come yet."""
        self._samples = Samples()
        self._log_offset = 0
        self._damaged: set[int] = set()
        """The seqs that the server has named."""

    @asynccontextmanager
    async def standing(self) -> AsyncIterator[None]:
        with self._server:
            yield

    def data_dirs(self) -> list[Path]:
        return [self._server.data_dir]

    async def start(self) -> None:
        self.control.unlink(missing_ok=True)
        clock = str(self.ledger.clock.offset_ms)
        self._server.program = (str(CHILD), str(self.control), clock, *self._bug)
        self._server.start()
        await asyncio.to_thread(self._server.wait_ready)
        self.ledger.came_back()
        self._begin = self._begin or sample_of(self._server.pid)

    async def stop(self) -> None:
        self.ledger.went_down([0])
        status = await asyncio.to_thread(self._server.stop)
        if status != 0:
            self.notes.fail(f"the server ended with status {status} after SIGTERM")

    def watching(self) -> list[Coroutine[Any, Any, None]]:
        return [self._sample()]

    async def _sample(self) -> None:
        while True:
            if not self._server.is_running:
                raise ServerFailed(ENDED)
            self._samples.all.append(sample_of(self._server.pid))
            await asyncio.sleep(self._sample_s)

    # ── the weather ────────────────────────────────────────────────────────────────────────────

    async def order(self, order: dict[str, object]) -> None:
        """Have the child do something, and wait until it is so."""
        try:
            reader, writer = await asyncio.open_unix_connection(str(self.control))
        except OSError as error:
            raise ServerFailed(ENDED) from error
        try:
            writer.write(json.dumps(order).encode() + b"\n")
            if not await reader.readline():
                raise ServerFailed(ENDED)
        finally:
            # The child hears one after the other: an order that is given up keeps no other waiting.
            writer.close()

    async def set_clock(self, offset_ms: int) -> None:
        """Set the clock of the server."""
        ordered_ms = self.ledger.now_ms()
        # It may have been started with an offset already; it is set once after that at most.
        await self.order({"clock_ms": offset_ms})
        self.ledger.clock.set(offset_ms, ordered_ms, self.ledger.now_ms() + 1)

    async def strike(self, kind: StrEnum, plan: RoundPlan) -> None:
        chance = plan.chance
        if kind is Weather.STEP:
            step_ms = round(chance.choice((-1, 1)) * STEP_MAX_MS * chance.random() ** 3)
            offset_ms = self.ledger.clock.offset_ms + step_ms
            await self.set_clock(max(-OFFSET_MAX_MS, min(OFFSET_MAX_MS, offset_ms)))
            return
        where = chance.choice(("messages", "")) if kind is not Weather.UNREADABLE else "schedule"
        self.read_faults += kind is Weather.UNREADABLE
        most_s = 0.3 if kind is Weather.UNREADABLE else 2.0
        times_s = {"s": chance.uniform(0.05, most_s), "wait_s": chance.uniform(0.1, 2)}
        await self.order({"fault": str(kind), "where": where, **times_s})

    async def all_due(self) -> None:
        """Set the clock forward until all but the far messages are due."""
        await self.order({"fault": "slow", "where": "", "s": 0, "wait_s": 0})
        now_ms = self.ledger.server_ms()
        dues_ms = [order.due_ms for order in self.ledger.pending()]
        last_ms = max((due_ms for due_ms in dues_ms if due_ms < now_ms + FAR_MS), default=now_ms)
        await self.set_clock(self.ledger.clock.offset_ms + last_ms - now_ms)

    # ── looks ──────────────────────────────────────────────────────────────────────────────────

    def unreadable(self) -> int:
        """As `Topology` says. A mistake that the server has logged as its own, and a line that it
        did not mean to write, is a failure."""
        with self._server.log_path.open() as log:
            log.seek(self._log_offset)
            while (line := log.readline()).endswith("\n"):
                self._log_offset = log.tell()
                said: dict[str, Any] = {"event": line.strip()}
                if line.startswith("{"):
                    said = json.loads(line)
                if said["event"] == "damage found":
                    self._damaged.update(range(said["first_seq"], said["last_seq"] + 1))
                elif said.get("level", "critical") == "critical" or "exception" in said:
                    self.notes.fail(f"the log says: {line.strip()[-300:]}")
        self.counts["reads that failed"] = len(self._damaged)
        return len(self._damaged)

    async def ended(self) -> None:
        """Read the log to its end."""
        self.unreadable()

    async def look(self) -> None:
        """Compare memory and descriptors with those before the first client came."""
        assert self._begin is not None
        begin = self._begin
        async for _ in Looks(CLOSED_S, 0.5):
            end = sample_of(self._server.pid)
            if end.sockets <= begin.sockets:
                break
        for complaint in self._samples.complaints(begin, end):
            self.notes.fail(complaint)
        figures = {
            "at the start": begin.memory_bytes,
            "in the second quarter": self._samples.memory(1),
            "in the last quarter": self._samples.memory(3),
            "at the end": end.memory_bytes,
        }
        self.counts.update({f"MiB {name}": round(n / 2**20) for name, n in figures.items()})
        self.counts["descriptors at the start"] = begin.sockets + begin.files
        self.counts["descriptors at most"] = max(s.sockets + s.files for s in self._samples.all)
        self.counts["descriptors at the end"] = end.sockets + end.files


def _make_certificate(directory: Path) -> ssl.SSLContext:
    authority = trustme.CA()
    made = authority.issue_cert("127.0.0.1")
    made.cert_chain_pems[0].write_to_path(str(directory / "cert.pem"))
    made.private_key_pem.write_to_path(str(directory / "key.pem"))
    tls = ssl.create_default_context()
    authority.configure_trust(tls)
    return tls
