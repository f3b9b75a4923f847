"""What disk and machine can do at all, today: the figures that others are compared with."""

import os
import statistics
import time
from pathlib import Path

import wrk
from report import Figure
from servers import hello_server

from levels.bench import POST_CONNECTIONS, Bench, Size, one_message, post_once, set_latency

LONG_S = 1.0
SHORT_S = 0.5
QUICK_S = 0.1
BUSY_MAX_PERCENT = 10


def recalibrate(bench: Bench) -> None:
    """The same in short, just before a case: what is measured then has it beside it."""
    if bench.size is Size.QUICK:
        return
    bench.step("calibration")
    bench.busy_percent = busy_percent(SHORT_S)
    times_ms = sync_times_ms(bench.directory / "sync", SHORT_S)
    bench.sync_per_s = 1000 / statistics.fmean(times_ms)
    with hello_server(bench.directory) as hello:
        bench.hello_per_s = wrk.post(hello.port, "/", one_message(), POST_CONNECTIONS, 1).rate


def calibrate(bench: Bench) -> None:
    """What disk and machine do."""
    calibrate_disk(bench)
    bench.step("calibration: hello")
    with hello_server(bench.directory) as hello:
        if bench.size is not Size.QUICK:
            wrk.post(hello.port, "/", one_message(), POST_CONNECTIONS, 1)
        posts, cpu_us = post_once(bench, hello, "/", one_message(), POST_CONNECTIONS)
    bench.hello_per_s = posts.rate
    figure = bench.add_rate(
        f"bare uvicorn hello, {POST_CONNECTIONS} conn.", posts.rate, "req/s", []
    )
    figure.p50_ms, figure.p99_ms, figure.max_ms = posts.p50_ms, posts.p99_ms, posts.max_ms
    figure.cpu_us = cpu_us
    figure.group = "calibration"


def calibrate_disk(bench: Bench) -> None:
    """How busy the machine is with other things, and what the disk does."""
    bench.step("calibration: how busy the machine is")
    seconds = bench.size.of(quick=QUICK_S, usual=LONG_S)
    busy = bench.busy_percent = busy_percent(seconds)
    figure = bench.add(Figure("processors, used by others", busy, "%", group="calibration"))
    figure.note = f"of all {os.cpu_count()} together, before anything was started"
    if busy > BUSY_MAX_PERCENT:
        figure.note += ": the machine is busy, times are noise"

    bench.step("calibration: fdatasync")
    times_ms = sync_times_ms(bench.directory / "sync", seconds)
    bench.sync_per_s = 1000 / statistics.fmean(times_ms)
    figure = bench.add(Figure("fdatasync of 4 KiB", bench.sync_per_s, "/s", group="calibration"))
    set_latency(figure, times_ms)


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
