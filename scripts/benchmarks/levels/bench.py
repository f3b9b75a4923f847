"""What the cases share: the run, the messages, and how they are published.

A case starts servers of its own, publishes from processes of their own, and reports figures.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import wrk
from load import (
    JSON,
    BatchRequests,
    ConnectionResult,
    LoadConnection,
    make_batches,
    publish_batches,
    start_together,
)
from report import Figure
from servers import START_MAX_S, BenchmarkError, Memory, Served, delay_server

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
PREBUILD = Path(__file__).parents[1] / "prebuild.py"
MINUTE_MS = 60_000
MIB = 1024 * 1024

BODY = {
    "order": 100_000_000_001,
    "customer": "c-48",
    "amount": "129.90",
    "currency": "CNY",
    "reason": "unpaid",
    "items": [{"sku": "A-1001", "count": 2}, {"sku": "B-2002", "count": 1}],
    "trace": "4bf92f3577b34da6a3ce929d0e0e4736",
}
"""200 bytes of JSON."""

POST_CONNECTIONS = 128
QUICK_CONNECTIONS = 2
"""So few leave processors to others, and need few keys."""
QUICK_KEYS = 30_000
"""More than so many connections can cancel in a second."""
BATCH = 500
PUBLISHERS = 2
"""Processes that publish batches; more would fight for the processors."""
IN_FLIGHT_EACH = 4
KEYS_EACH = 1_000_000_000
SUBJECT = "bench.later"
DISTINCT = 10_000
"""Messages that differ; a longer run sends them again."""
LEAD_S = 3
AHEAD_PER_S = 20_000
"""What a machine should manage, however busy."""
IDLE_MAX_MS = 5_000
SETTLE_S = 4.0
"""Free memory has gone back to the system then."""
QUICK_OPTIONS = ("--file-ms", "50ms", "--checkpoint-ms", "100ms")
"""Of a server: what a case publishes is filed soon."""

T = TypeVar("T")


class Size(Enum):
    """How much a case does."""

    QUICK = auto()
    """As little as shows that it works; its figures say nothing of the server."""
    USUAL = auto()
    FULL = auto()
    """More connections, more load, more that waits."""

    def of(self, *, quick: T, usual: T, full: T | None = None) -> T:
        """The number for this size; that of USUAL is that of FULL, too, where none is given."""
        if self is Size.FULL and full is not None:
            return full
        return quick if self is Size.QUICK else usual


@dataclass(slots=True)
class Bench:
    """What the cases share, and what they have found."""

    root: Path
    """The source tree whose server is measured."""
    directory: Path
    pool: ProcessPoolExecutor
    size: Size
    step: Callable[[str], None]
    """Tells what is being done."""
    share: Callable[[float], None] = lambda done: None
    """Tells how much of that is done, from 0 to 1."""
    figures: list[Figure] = field(default_factory=list)
    lateness_ms: dict[str, list[float]] = field(default_factory=dict)
    """For the drawing, by case."""
    curves: dict[str, dict[int, float]] = field(default_factory=dict)
    """For the drawing: a cost by the number of messages pending."""
    sync_per_s: float = 0.0
    hello_per_s: float = 0.0
    busy_percent: float = 0.0

    @contextmanager
    def server(
        self, name: str, *options: str, start_max_s: float = START_MAX_S
    ) -> Iterator[Served]:
        """A server whose data directory has this name."""
        options += self.size.of(quick=QUICK_OPTIONS, usual=())
        path = self.directory / name
        with delay_server(path, *options, root=self.root, start_max_s=start_max_s) as served:
            yield served

    def add(self, figure: Figure) -> Figure:
        """Report a figure, with what machine and disk did just before its case."""
        if self.hello_per_s:
            figure.calibration = {
                "hello/s": self.hello_per_s,
                "fdatasync/s": self.sync_per_s,
                "others %": self.busy_percent,
            }
        self.figures.append(figure)
        return figure

    def add_rate(self, case: str, rate: float, unit: str, latency_ms: list[float]) -> Figure:
        """Report a rate, and what it is in multiples of the calibrations."""
        figure = self.add(Figure(case, rate, unit))
        figure.ratios = {"hello": rate / self.hello_per_s, "fdatasync": rate / self.sync_per_s}
        if latency_ms:
            set_latency(figure, latency_ms)
        return figure


def set_latency(figure: Figure, latency_ms: list[float]) -> None:
    """Median, 99th percentile and worst."""
    figure.p50_ms, figure.p99_ms = (float(x) for x in np.percentile(latency_ms, [50, 99]))
    figure.max_ms = max(latency_ms)


def one_message(key: str | None = None) -> bytes:
    """A message that is due tomorrow."""
    message = {"subject": "bench.post", "body": BODY, "delay": "1d"}
    return msgspec.json.encode(message if key is None else {**message, "key": key})


def post_once(
    bench: Bench, server: Served, path: str, body: bytes, connections: int
) -> tuple[wrk.Posts, float]:
    """One run of wrk, and the server's processor time for each request, in µs."""
    before_s = server.cpu_s()
    posts = wrk.post(server.port, path, body, connections, bench.size.of(quick=1, usual=2))
    return posts, (server.cpu_s() - before_s) / posts.requests * 1e6


def random_batches(
    from_ms: int,
    to_ms: int,
    *,
    content_type: str = JSON,
    size: int = BATCH,
    keyed: bool = False,
    count: int = DISTINCT,
) -> BatchRequests:
    """Batches of `count` messages that are due at random times of a stretch."""
    dues_ms = np.random.default_rng(1).integers(from_ms, to_ms, count).tolist()
    return make_batches(SUBJECT, dues_ms, BODY, size, content_type, keyed=keyed)


def batches_tomorrow(
    from_ms: int | None = None,
    *,
    content_type: str = JSON,
    size: int = BATCH,
    keyed: bool = False,
) -> BatchRequests:
    """Due at random times of the 24 hours that begin in 24 hours."""
    from_ms = (now_ms() if from_ms is None else from_ms) + DAY_MS
    return random_batches(
        from_ms, from_ms + DAY_MS, content_type=content_type, size=size, keyed=keyed
    )


def prebuild(bench: Bench, name: str, *stretches: tuple[int, int, int]) -> None:
    """A data directory in which so many messages are due, at random, between two moments: for each
    stretch a count and the two moments. See `prebuild.py`: the measured tree's own code makes it,
    since the bytes on disk may be others there."""
    (bench.directory / name).mkdir()
    wanted = {
        "directory": str(bench.directory / name),
        "body": msgspec.json.encode(BODY).decode(),
        "subject": SUBJECT,
        "stretches": stretches,
    }
    made = subprocess.run(
        [sys.executable, "-P", str(PREBUILD), json.dumps(wanted)],
        env={**os.environ, "PYTHONPATH": f"{bench.root}:{bench.root / 'scripts' / 'benchmarks'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        raise BenchmarkError(f"the directory {name} was not made: {made.stderr[-2000:]}")


def now_ms() -> int:
    """The clock of the day, as the server has it."""
    return time.time_ns() // 1_000_000


def publish(
    bench: Bench,
    port: int | Sequence[int],
    batches: BatchRequests,
    *,
    count: int | None = None,
    seconds: float = 0,
    first_process: int = 0,
) -> list[ConnectionResult]:
    """Publish so many messages, or so long, from PUBLISHERS processes; where there are several
    ports, to each in turn.

    Where batches are keyed, each process, numbered from `first_process`, has keys of its own."""
    requests_max = float("inf")
    if count is not None:
        requests_max, rest = divmod(count, PUBLISHERS * batches.messages)
        assert rest == 0, count
    seconds_max = seconds or float("inf")
    ports = [port] if isinstance(port, int) else port
    start_at = start_together()
    futures = [
        bench.pool.submit(
            publish_batches,
            ports[number % len(ports)],
            batches,
            start_at,
            requests_max=requests_max,
            seconds_max=seconds_max,
            first_key=(first_process + number) * KEYS_EACH,
            in_flight=IN_FLIGHT_EACH,
        )
        for number in range(PUBLISHERS)
    ]
    return [future.result() for future in futures]


def send_once(
    bench: Bench, port: int, requests: list[bytes], **options: Any
) -> list[ConnectionResult]:
    """Send each request once, from PUBLISHERS processes; each is of BATCH messages.

    `options` are those of `publish_batches`."""
    start_at = start_together()
    parts = [requests[number::PUBLISHERS] for number in range(PUBLISHERS)]
    futures = [
        bench.pool.submit(
            publish_batches,
            port,
            BatchRequests(part, BATCH),
            start_at,
            requests_max=len(part),
            in_flight=IN_FLIGHT_EACH,
            **options,
        )
        for part in parts
    ]
    return [future.result() for future in futures]


def latencies_of(sent: list[ConnectionResult]) -> list[float]:
    """Of all processes together, in ms."""
    return [ms for one in sent for ms in one.latency_ms]


def rate_of(sent: list[ConnectionResult]) -> float:
    """Messages each second, all processes together."""
    seconds = max(one.ended_at for one in sent) - min(one.began_at for one in sent)
    return sum(one.messages for one in sent) / seconds


def subscribe(server: Served, name: str, subscription: dict[str, object]) -> None:
    """A subscription to the subject of the same name."""
    with LoadConnection(server.port) as connection:
        document = {"subject": name, **subscription}
        connection.call("PUT", f"/v1/subscriptions/{name}", document)


def lead_s(count: int) -> int:
    """How long before the first is due so many are published, so that the last is in time, too."""
    return LEAD_S + count // AHEAD_PER_S


def idle_max_ms(count: int) -> int:
    """How long a receiver of so many, published ahead, waits when nothing comes."""
    return IDLE_MAX_MS + lead_s(count) * 1000


def publish_ahead(
    bench: Bench,
    server: Served,
    subject: str,
    per_s: int,
    count: int,
    *,
    offset_ms: int = 0,
    keyed: bool = False,
) -> int:
    """Publish what will be due at an even rate from `lead_s` on; returns when the first one is.

    `offset_ms`: by how much the server's clock is ahead. Keys count up from 0."""
    from_ms = now_ms() + offset_ms + lead_s(count) * 1000
    dues_ms = [from_ms + index * 1000 // per_s for index in range(count)]
    batches = make_batches(subject, dues_ms, BODY, BATCH, keyed=keyed)
    sent = bench.pool.submit(
        publish_batches,
        server.port,
        batches,
        time.monotonic(),
        requests_max=len(batches.requests),
    ).result()
    if now_ms() + offset_ms >= from_ms:
        raise BenchmarkError(f"publishing {count:,} took more than {lead_s(count)} s")
    assert sent.messages == count
    return from_ms


def settled_memory(bench: Bench, server: Served) -> Memory:
    """Memory when everything has been filed, and a moment later."""
    server.wait_until_filed()
    time.sleep(bench.size.of(quick=0.1, usual=SETTLE_S))
    return server.memory()
