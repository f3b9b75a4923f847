"""What a server does, and whether it reaches the levels it was designed for.

    scripts/bench [levels] [--full] [--only CASES] [--json FILE] [--plot FILE.png] [--dir DIRECTORY]

Every case runs against a server process of its own, on loopback, with a new data directory on a
disk and the settings an operator gets by default (an answer means: synced). Each figure is checked:
what was sent must be what the server accepted, and what a receiver got must be all of it, once,
and never early. The load generators share the machine's cores with the server.

calibrate  how busy the machine is with other things.
           fdatasync of 4 KiB in a preallocated file, one after the other: what the disk does.
           A bare ASGI "hello" on the same uvicorn, POSTed the same bodies: what the machine does.
post       single POSTs by wrk, in rounds: hello, server, and both again with a key in the body.
           The figure is the median of the rounds, and so is the ratio of server to hello.
batch      batches of 500, JSON and MessagePack, prebuilt, from four processes; due at random
           times of the day after tomorrow.
lateness   1,000 due each second; one client that pulls (long poll, acks on a second connection)
           takes the moment at which it has read a message, less `deliver_at`. All is published
           3 s before the first is due.
           Beside it: how late the timers of a bare asyncio loop are on this machine.
           With --full: 2,000 and 5,000 each second, beside 10,000 published each second.
webhook    the same with webhooks to a receiver that answers 200 at once.
backlog    memory: of an empty server (fresh, and started again), with 1,000,000 due tomorrow, and
           with 1,000,000 more in the loaded hour after a restart: difference over the count, all
           that the process holds for them included. Restart: kill -9 as the last of 100,000 in the
           loaded hour is answered, with the million due later; time from exec to /readyz, the
           start of Python included.
pull       100,000 due messages, pulled and acknowledged 500 at a time by two processes, for 8 s
           at most: first such that were published before they were due, then such that were due
           when they were published.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import msgspec
import numpy as np
import wrk
from consumers import Received, bare_timers, pull_all, pull_on_time, receive_webhooks
from load import (
    JSON,
    MSGPACK,
    Batches,
    Connection,
    LoadError,
    Sent,
    make_batches,
    publish_batches,
    start_together,
    wait_for,
)
from report import (
    Figure,
    add_options,
    as_documents,
    make_console,
    new_drawing,
    show_figures,
    write_json,
)
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from servers import (
    BenchmarkError,
    Memory,
    Served,
    delay_server,
    disk_directory,
    free_port,
    hello_server,
)

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
MINUTE_MS = 60_000
MIB = 1024 * 1024

BODY = {
    "order": 100_000_000_001,
    "customer": "c-000481516",
    "amount": "129.90",
    "currency": "CNY",
    "reason": "unpaid",
    "items": [{"sku": "A-1001", "count": 2}, {"sku": "B-2002", "count": 1}],
    "trace": "4bf92f3577b34da6a3ce929d0e0e4736",
}
"""About 200 bytes of JSON."""

SYNC_S = 1.0
BUSY_S = 1.0
BUSY_MAX_PERCENT = 10
TIMERS_S = 2.0
POST_ROUNDS = 3
POST_CONNECTIONS = 128
POST_S = 2
BATCH = 500
BATCH_S = 3.0
PUBLISHERS = 4
DISTINCT = 10_000
"""Messages that differ; a longer run sends them again."""
LATENESS_S = 15
LEAD_S = 3
IDLE_MAX_MS = 5_000
WEBHOOK_S = 10
BESIDE_PER_S = 10_000
BESIDE_BATCH = 100
BACKLOG = 1_000_000
SOON = 100_000
PULL_COUNT = 100_000
PULL_AHEAD_S = 8
PULL_MAX_S = 8.0
PULL_PROCESSES = 2
SETTLE_S = 1.5
POOL_PROCESSES = 5
POOL_START_S = 1.5


@dataclass(slots=True)
class Bench:
    """What the cases share, and what they have found."""

    directory: Path
    pool: ProcessPoolExecutor
    full: bool
    step: Callable[[str], None]
    """Tells what is being done."""
    figures: list[Figure] = field(default_factory=list)
    lateness_ms: dict[str, list[float]] = field(default_factory=dict)
    """For the drawing."""
    sync_per_s: float = 0.0
    hello_per_s: float = 0.0

    @contextmanager
    def server(self, name: str, *options: str) -> Iterator[Served]:
        """A server whose data directory has this name."""
        with delay_server(self.directory / name, *options) as served:
            yield served

    def add(self, figure: Figure) -> Figure:
        """Report a figure."""
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


# ---- calibration -------------------------------------------------------------------------------


def calibrate(bench: Bench) -> None:
    """What disk and machine do."""
    bench.step("calibration: how busy the machine is")
    busy = busy_percent(BUSY_S)
    figure = bench.add(Figure("processors, used by others", busy, "%"))
    figure.note = f"calibration, of all {os.cpu_count()} together, before anything was started"
    if busy > BUSY_MAX_PERCENT:
        figure.note += ": [bold]the machine is busy, times are noise[/]"

    bench.step("calibration: fdatasync")
    times_ms = sync_times_ms(bench.directory / "sync", SYNC_S)
    bench.sync_per_s = 1000 / statistics.fmean(times_ms)
    figure = bench.add(Figure("fdatasync of 4 KiB", bench.sync_per_s, "/s", note="calibration"))
    set_latency(figure, times_ms)

    bench.step("calibration: hello")
    with hello_server(bench.directory) as hello:
        wrk.post(hello.port, "/", one_message(), POST_CONNECTIONS, 1)
        posts, cpu_us = post_once(hello, "/", one_message(), POST_CONNECTIONS)
    bench.hello_per_s = posts.rate
    figure = bench.add_rate(
        f"bare uvicorn hello, {POST_CONNECTIONS} conn.", posts.rate, "req/s", []
    )
    figure.p50_ms, figure.p99_ms, figure.max_ms = posts.p50_ms, posts.p99_ms, posts.max_ms
    figure.cpu_us = cpu_us
    figure.note = "calibration"


def busy_percent(seconds: float) -> float:
    """Share of all processors that is used, by whomever."""

    def read() -> tuple[int, int]:
        numbers = [int(x) for x in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        return sum(numbers), numbers[3] + numbers[4]  # idle, waiting for the disk

    all_before, idle_before = read()
    time.sleep(seconds)
    all_after, idle_after = read()
    return 100 * (1 - (idle_after - idle_before) / max(1, all_after - all_before))


def sync_times_ms(path: Path, seconds: float) -> list[float]:
    """Times of write and fdatasync, in turn, over a file that has all its blocks already."""
    block, blocks = b"\0" * 4096, 4096
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, block * blocks)
        os.fsync(descriptor)
        times_ms: list[float] = []
        until = time.perf_counter() + seconds
        while (begun := time.perf_counter()) < until:
            os.pwrite(descriptor, b"\1" * 4096, len(times_ms) % blocks * 4096)
            os.fdatasync(descriptor)
            times_ms.append((time.perf_counter() - begun) * 1000)
        return times_ms
    finally:
        os.close(descriptor)
        path.unlink()


# ---- single POSTs ------------------------------------------------------------------------------


def one_message(key: str | None = None) -> bytes:
    """A message that is due tomorrow."""
    message = {"subject": "bench.post", "body": BODY, "delay": "1d"}
    return msgspec.json.encode(message if key is None else {**message, "key": key})


def post_once(server: Served, path: str, body: bytes, connections: int) -> tuple[wrk.Posts, float]:
    """One run of wrk, and the server's processor time for each request, in µs."""
    before_s = server.cpu_s()
    posts = wrk.post(server.port, path, body, connections, POST_S)
    return posts, (server.cpu_s() - before_s) / posts.requests * 1e6


def post(bench: Bench) -> None:
    """Single durable POSTs beside hello, in rounds."""
    sent, in_flight = 0, 0
    figures = []
    with hello_server(bench.directory) as hello, bench.server("post") as server:
        for connections in (64, POST_CONNECTIONS, 512) if bench.full else (POST_CONNECTIONS,):
            rounds: dict[bool, list[Round]] = {False: [], True: []}
            for number, keyed in product(range(POST_ROUNDS), rounds):
                what = "with key" if keyed else "no key"
                bench.step(f"post: {connections} connections, {what}, round {number + 1}")
                key = f"{connections}-{number}-{wrk.KEY_PLACE}" if keyed else None
                body = one_message(key)
                base, _ = post_once(hello, "/", body, connections)
                head, cpu_us = post_once(server, "/v1/messages", body, connections)
                rounds[keyed].append(Round(base, head, cpu_us))
                sent += head.requests
                in_flight += connections
            for keyed, all_rounds in rounds.items():
                figures.append(_post_figure(bench, connections, keyed, all_rounds))
        accepted = server.stats()["accepted"]
    for figure in figures:
        # wrk does not count what is on its way when it ends.
        figure.expect(
            "accepted, within those on their way", sent <= accepted <= sent + in_flight, True
        )


@dataclass(frozen=True, slots=True)
class Round:
    """Hello and the server, one after the other."""

    base: wrk.Posts
    head: wrk.Posts
    cpu_us: float


def _post_figure(bench: Bench, connections: int, keyed: bool, rounds: list[Round]) -> Figure:
    def median(of: Callable[[wrk.Posts], float]) -> float:
        return statistics.median(of(one.head) for one in rounds)

    case = f"POST, {connections} conn., {'with key' if keyed else 'no key'}"
    figure = bench.add_rate(case, median(lambda posts: posts.rate), "msg/s", [])
    figure.p50_ms = median(lambda posts: posts.p50_ms)
    figure.p99_ms = median(lambda posts: posts.p99_ms)
    figure.max_ms = max(one.head.max_ms for one in rounds)
    figure.cpu_us = statistics.median(one.cpu_us for one in rounds)
    figure.ratios["hello"] = statistics.median(one.head.rate / one.base.rate for one in rounds)
    rates = ", ".join(f"{one.base.rate:,.0f}" for one in rounds)
    figure.note = f"hello beside it: {rates}"
    if connections == POST_CONNECTIONS:
        figure.demand("≥ 0.7 × hello", figure.ratios["hello"] >= 0.7)
        figure.demand("p99 ≤ 15 ms", figure.p99_ms <= 15)
    return figure


# ---- batches -----------------------------------------------------------------------------------


def random_batches(
    from_ms: int, to_ms: int, *, content_type: str = JSON, size: int = BATCH
) -> Batches:
    """Batches whose messages are due at random times of a stretch."""
    dues_ms = np.random.default_rng(1).integers(from_ms, to_ms, DISTINCT).tolist()
    return make_batches("bench.later", dues_ms, BODY, size, content_type)


def batches_tomorrow(
    from_ms: int | None = None, *, content_type: str = JSON, size: int = BATCH
) -> Batches:
    """Due at random times of the 24 hours that begin in 24 hours."""
    from_ms = (now_ms() if from_ms is None else from_ms) + DAY_MS
    return random_batches(from_ms, from_ms + DAY_MS, content_type=content_type, size=size)


def now_ms() -> int:
    """The clock of the day, as the server has it."""
    return time.time_ns() // 1_000_000


def publish(
    bench: Bench, port: int, batches: Batches, *, count: int | None = None, seconds: float = 0
) -> list[Sent]:
    """Publish so many messages, or so long, from PUBLISHERS processes."""
    requests_max = float("inf")
    if count is not None:
        requests_max, rest = divmod(count, PUBLISHERS * batches.messages)
        assert rest == 0, count
    seconds_max = seconds or float("inf")
    start_at = start_together()
    futures = [
        bench.pool.submit(
            publish_batches,
            port,
            batches,
            start_at,
            requests_max=requests_max,
            seconds_max=seconds_max,
        )
        for _ in range(PUBLISHERS)
    ]
    return [future.result() for future in futures]


def rate_of(sent: list[Sent]) -> float:
    """Messages each second, all processes together."""
    seconds = max(one.ended_at for one in sent) - min(one.began_at for one in sent)
    return sum(one.messages for one in sent) / seconds


def batch(bench: Bench) -> None:
    """Durable batches."""
    with bench.server("batch") as server:
        for name, content_type in (("JSON", JSON), ("msgpack", MSGPACK)):
            bench.step(f"batch: {name}")
            batches = batches_tomorrow(content_type=content_type)
            before, cpu_s = server.stats()["accepted"], server.cpu_s()
            sent = publish(bench, server.port, batches, seconds=BATCH_S)
            latency_ms = [ms for one in sent for ms in one.latency_ms]
            count = sum(one.messages for one in sent)
            figure = bench.add_rate(f"batch of {BATCH}, {name}", rate_of(sent), "msg/s", latency_ms)
            figure.cpu_us = (server.cpu_s() - cpu_s) / count * 1e6
            figure.note = f"{PUBLISHERS} in flight; latencies are those of a batch"
            figure.expect("accepted", server.stats()["accepted"] - before, count)


# ---- lateness ----------------------------------------------------------------------------------


def lateness(bench: Bench) -> None:
    """Deliveries to a pulling client, against their due time."""
    bench.step("calibration: timers")
    per_s = 1000
    figure = bench.add(Figure("bare asyncio timers", per_s, "due/s"))
    figure.note = "calibration, a process that does nothing else"
    set_latency(figure, bench.pool.submit(bare_timers, per_s, TIMERS_S).result())
    _lateness_pull(bench, 1000, beside_per_s=0)
    if bench.full:
        _lateness_pull(bench, 2000, beside_per_s=BESIDE_PER_S)
        _lateness_pull(bench, 5000, beside_per_s=BESIDE_PER_S)


def _lateness_pull(bench: Bench, per_s: int, beside_per_s: int) -> None:
    case = f"pull, {per_s:,} due/s"
    if beside_per_s:
        case += f", {beside_per_s:,} publishes/s"
    bench.step(f"lateness: {case}")
    count = per_s * LATENESS_S
    name = "late"
    with bench.server(f"lateness-{per_s}-{beside_per_s}") as server:
        subscribe(server, name, {"type": "pull"})
        receiving = bench.pool.submit(pull_on_time, server.port, name, count, IDLE_MAX_MS)
        due_from_ms = publish_ahead(bench, server, name, per_s, count)
        cpu_s, beside = server.cpu_s(), None
        if beside_per_s:
            beside = bench.pool.submit(
                publish_batches,
                server.port,
                batches_tomorrow(size=BESIDE_BATCH),
                time.monotonic() + max(0, due_from_ms - now_ms()) / 1000,
                seconds_max=LATENESS_S,
                interval_s=BESIDE_BATCH / beside_per_s,
            )
        received = receiving.result()
        published = count
        figure = _lateness_figure(bench, case, count, received, server, cpu_s)
        if (per_s, beside_per_s) == (1000, 0):
            assert figure.p99_ms is not None
            figure.demand("p99 ≤ 10 ms, none early", figure.p99_ms <= 10)
        if beside is not None:
            sent = beside.result()
            published += sent.messages
            p99_ms = float(np.percentile(sent.latency_ms, 99))
            figure.note = f"publish p99 {p99_ms:.1f} ms, batches of {BESIDE_BATCH}"
        figure.expect("acknowledged", received.acked, count)
        figure.expect("accepted", server.stats()["accepted"], published)


def subscribe(server: Served, name: str, subscription: dict[str, object]) -> None:
    """A subscription to the subject of the same name."""
    with Connection(server.port) as connection:
        document = {"subject": name, **subscription}
        connection.call("PUT", f"/v1/subscriptions/{name}", document)


def publish_ahead(bench: Bench, server: Served, subject: str, per_s: int, count: int) -> int:
    """Publish what will be due at an even rate from LEAD_S on; returns when the first one is."""
    from_ms = now_ms() + LEAD_S * 1000
    dues_ms = [from_ms + index * 1000 // per_s for index in range(count)]
    batches = make_batches(subject, dues_ms, BODY, BATCH)
    sent = bench.pool.submit(
        publish_batches,
        server.port,
        batches,
        time.monotonic(),
        requests_max=len(batches.requests),
    ).result()
    if now_ms() >= from_ms:
        raise BenchmarkError(f"publishing {count:,} took more than {LEAD_S} s")
    assert sent.messages == count
    return from_ms


def _lateness_figure(
    bench: Bench, case: str, count: int, received: Received, server: Served, cpu_s: float
) -> Figure:
    if not received.ids:
        raise BenchmarkError(f"{case}: nothing was delivered")
    figure = bench.add(Figure(case, len(received.ids), "msg"))
    figure.cpu_us = (server.cpu_s() - cpu_s) / len(received.ids) * 1e6
    set_latency(figure, received.lateness_ms)
    figure.note = "receipt less deliver_at"
    figure.expect("received", len(received.ids), count)
    figure.expect("received twice", len(received.ids) - len(set(received.ids)), 0)
    figure.expect("early", sum(late_ms < 0 for late_ms in received.lateness_ms), 0)
    figure.expect("delivered, as the server counts", server.stats()["delivered"], count)
    bench.lateness_ms[case] = received.lateness_ms
    return figure


def webhook(bench: Bench) -> None:
    """Deliveries to a webhook, against their due time."""
    per_s, name = 1000, "hook"
    count = per_s * WEBHOOK_S
    bench.step(f"webhook: {per_s:,} due/s")
    with bench.server("webhook") as server:
        port = free_port()
        receiving = bench.pool.submit(receive_webhooks, port, count, IDLE_MAX_MS)
        subscribe(server, name, {"type": "webhook", "url": f"http://127.0.0.1:{port}/"})
        publish_ahead(bench, server, name, per_s, count)
        cpu_s = server.cpu_s()
        received = receiving.result()
        case = f"webhook, {per_s:,} due/s"
        _lateness_figure(bench, case, count, received, server, cpu_s)


# ---- backlog: memory and restart ---------------------------------------------------------------


def backlog(bench: Bench) -> None:
    """What waiting messages cost in memory, and at a restart."""
    # The server's clock shows five minutes past an hour, so that this hour is loaded, and no other.
    offset_ms = HOUR_MS - now_ms() % HOUR_MS + 5 * MINUTE_MS
    options = ("--clock-offset-ms", str(offset_ms))
    hour_ms = (now_ms() + offset_ms) // HOUR_MS * HOUR_MS
    later = batches_tomorrow(hour_ms)
    soon = random_batches(hour_ms + HOUR_MS // 2, hour_ms + HOUR_MS - MINUTE_MS)

    with bench.server("backlog", *options) as server:
        empty, empty_ready_s = server.memory(), server.ready_s
        bench.step(f"backlog: {BACKLOG:,} due tomorrow")
        rate = rate_of(publish(bench, server.port, later, count=BACKLOG))
        after = settled_memory(server)
        figure = _growth_figure(bench, f"memory, {BACKLOG:,} due tomorrow", empty, after)
        figure.demand("< 50 MB", figure.value < 50)
        figure.note += f"; published at {rate:,.0f}/s; empty: {empty.resident / MIB:.0f} MB"
        figure.expect("pending later", server.stats()["pending_later"], BACKLOG)

        bench.step(f"backlog: {SOON:,} in the loaded hour, kill -9")
        publish(bench, server.port, soon, count=SOON)
        server.kill()

    bench.step("backlog: restart")
    with bench.server("backlog", *options) as server:
        figure = bench.add(Figure("restart after kill -9", server.ready_s, "s"))
        figure.demand("< 3 s", server.ready_s < 3)
        figure.note = f"{BACKLOG + SOON:,} pending, {SOON:,} loaded; empty: {empty_ready_s:.2f} s"
        stats = server.stats()
        figure.expect("pending in loaded hours", stats["pending_loaded"], SOON)
        figure.expect("pending later", stats["pending_later"], BACKLOG)

        bench.step(f"backlog: {BACKLOG:,} in the loaded hour")
        publish(bench, server.port, soon, count=BACKLOG - SOON)
        after = settled_memory(server)
        _per_message_figure(bench, "as they came", empty, after)

    bench.step(f"backlog: restart with {BACKLOG:,} in the loaded hour")
    with bench.server("backlog", *options) as server:
        after = settled_memory(server)
        figure = _per_message_figure(bench, "restarted", empty, after)
        figure.demand("≤ 32 B", figure.value <= 32)
        figure.note += f"; ready in {server.ready_s:.2f} s"
        stats = server.stats()
        figure.expect("pending in loaded hours", stats["pending_loaded"], BACKLOG)
        figure.expect("pending later", stats["pending_later"], BACKLOG)


def settled_memory(server: Served) -> Memory:
    """Memory when everything has been filed, and a moment later."""
    server.wait_until_filed()
    time.sleep(SETTLE_S)
    return server.memory()


def _growth_figure(bench: Bench, case: str, before: Memory, after: Memory) -> Figure:
    grown = (after.anonymous - before.anonymous) / MIB
    figure = bench.add(Figure(case, grown, "MB"))
    figure.note = f"anonymous; file-backed {(after.file - before.file) / MIB:+.0f} MB"
    return figure


def _per_message_figure(bench: Bench, how: str, empty: Memory, after: Memory) -> Figure:
    case = f"memory, {BACKLOG:,} in a loaded hour, {how}"
    figure = _growth_figure(bench, case, empty, after)
    figure.note += (
        f", {figure.value:.0f} MB in all over an empty server, {BACKLOG:,} later included"
    )
    figure.value, figure.unit = figure.value * MIB / BACKLOG, "B/msg"
    return figure


# ---- pull --------------------------------------------------------------------------------------


def pull(bench: Bench) -> None:
    """Pull and acknowledge what is due."""
    _pull(bench, "filed", "published before they were due", PULL_AHEAD_S)
    _pull(bench, "at once", "due when they were published", 0)


def _pull(bench: Bench, name: str, what: str, ahead_s: int) -> None:
    case = f"pull and ack, {BATCH} at a time, {name}"
    subject = name.replace(" ", "-")
    with bench.server(f"pull-{subject}") as server:
        bench.step(f"pull: publish {PULL_COUNT:,}, {what}")
        subscribe(server, subject, {"type": "pull", "lease": "5m"})
        due_ms = now_ms() + ahead_s * 1000
        batches = make_batches(subject, [due_ms] * DISTINCT, BODY, BATCH)
        publish(bench, server.port, batches, count=PULL_COUNT)
        if ahead_s and now_ms() > due_ms:
            raise BenchmarkError(f"publishing {PULL_COUNT:,} took more than {ahead_s} s")
        server.wait_until_filed()
        time.sleep(max(0, due_ms + 500 - now_ms()) / 1000)

        bench.step(f"pull: {PULL_PROCESSES} consumers, {BATCH} at a time, {what}")
        start_at, cpu_s = start_together(), server.cpu_s()
        futures = [
            bench.pool.submit(pull_all, server.port, subject, start_at, BATCH, PULL_MAX_S)
            for _ in range(PULL_PROCESSES)
        ]
        consumed = [future.result() for future in futures]
        seconds = max(one.ended_at for one in consumed) - min(one.began_at for one in consumed)
        ids = [message_id for one in consumed for message_id in one.ids]
        figure = bench.add_rate(case, len(ids) / seconds, "msg/s", [])
        figure.cpu_us = (server.cpu_s() - cpu_s) / len(ids) * 1e6
        figure.note = f"{what}; {PULL_PROCESSES} consumers, answered acks"
        if seconds < PULL_MAX_S:
            figure.expect("received", len(ids), PULL_COUNT)
        else:
            figure.note += f"; {PULL_COUNT - len(ids):,} were left after {PULL_MAX_S:.0f} s"
        figure.expect("received twice", len(ids) - len(set(ids)), 0)
        figure.expect("acknowledged", sum(one.acked for one in consumed), len(ids))
        figure.expect("delivered, as the server counts", server.stats()["delivered"], len(ids))


# ---- the run -----------------------------------------------------------------------------------

CASES: dict[str, Callable[[Bench], None]] = {
    "post": post,
    "batch": batch,
    "lateness": lateness,
    "webhook": webhook,
    "backlog": backlog,
    "pull": pull,
}


def plot(bench: Bench, path: Path) -> None:
    """Rates in multiples of hello, and how late messages were."""
    figure, (left, right) = new_drawing(2, figsize=(14, 5))
    rates = [one for one in bench.figures if "hello" in one.ratios]
    left.barh([one.case for one in rates], [one.ratios["hello"] for one in rates])
    left.invert_yaxis()
    left.set(xscale="log", xlabel="multiples of the bare uvicorn hello")
    left.axvline(1, color="black", linewidth=1)
    for case, lateness_ms in bench.lateness_ms.items():
        shares = np.arange(1, len(lateness_ms) + 1) / len(lateness_ms)
        right.plot(np.maximum(np.sort(lateness_ms), 0.01), 1 - shares + shares[0], label=case)
    right.set(xscale="log", yscale="log", xlabel="ms late", ylabel="share that is at least so late")
    right.grid(True, which="both", alpha=0.25)
    if bench.lateness_ms:
        right.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def run(bench: Bench, cases: list[str], console: Console) -> bool:
    """Run the cases; a case that fails does not keep the others from running."""
    failed = False
    for case in cases:
        first = len(bench.figures)
        try:
            CASES[case](bench)
        except (BenchmarkError, LoadError, OSError) as error:
            failed = True
            console.print(f"[bold red]{case} failed:[/]", escape(str(error)))
            for figure in bench.figures[first:]:
                figure.wrong.append("not checked to the end, since the case failed")
    return not failed and not any(figure.wrong for figure in bench.figures)


def main() -> int:
    """Exit status 1: a case failed, or counts were wrong. A missed level is not a failure."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench levels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser, "rates and lateness into this PNG file")
    parser.add_argument("--full", action="store_true", help="more connections, more load")
    parser.add_argument("--only", metavar="CASES", help=f"of {','.join(CASES)}; by commas")
    parser.add_argument(
        "--dir",
        type=Path,
        metavar="DIRECTORY",
        default=Path("/var/tmp"),
        help="where data directories are made, on the disk to be measured (default: %(default)s)",
    )
    options = parser.parse_args()
    cases = options.only.split(",") if options.only else list(CASES)
    if unknown := set(cases) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    if not wrk.is_installed():
        parser.error("wrk is not installed; on Debian and Ubuntu: apt-get install wrk")

    console = make_console()
    progress = Progress(
        SpinnerColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=console,
        transient=True,
    )
    context = multiprocessing.get_context("spawn")
    with (
        disk_directory(options.dir) as directory,
        ProcessPoolExecutor(POOL_PROCESSES, mp_context=context) as pool,
        progress,
    ):
        task = progress.add_task("begin")

        def step(what: str) -> None:
            progress.update(task, description=what)
            if not console.is_terminal:
                print(f"{what} …", file=sys.stderr, flush=True)

        # Every process has started, and imported what it needs, before anything is measured.
        list(pool.map(wait_for, [time.monotonic() + POOL_START_S] * POOL_PROCESSES))
        bench = Bench(directory, pool, options.full, step)
        calibrate(bench)
        complete = run(bench, cases, console)

    show_figures("What the server does", bench.figures, console)
    if options.json is not None:
        write_json(options.json, "levels", figures=as_documents(bench.figures))
    if options.plot is not None:
        plot(bench, options.plot)
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
