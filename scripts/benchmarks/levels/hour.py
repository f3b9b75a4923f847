"""What publishers notice when an hour is loaded: nothing, it should be.

The directory is made beforehand, with so much due in one hour. The server's clock is set so that
this hour will be loaded in a little while; a client publishes at an even rate, before the load and
while it lasts. Meanwhile the server's memory is looked at.
"""

import time
from dataclasses import dataclass

import numpy as np
from load import publish_batches
from report import Figure
from servers import BenchmarkError, Served

from levels.bench import (
    HOUR_MS,
    MIB,
    MINUTE_MS,
    Bench,
    batches_tomorrow,
    now_ms,
    prebuild,
)

DUE_QUICK = (10_000,)
DUE = (1_000_000,)
DUE_FULL = (*DUE, 10_000_000)
LEAD_MS = 10 * MINUTE_MS
START_S = 8
"""What a start takes at most, however busy the machine is."""
USUAL_S = 8
USUAL_QUICK_S = 2
LOADED_MAX_S = 60
BEHIND_S = 15
BEHIND_QUICK_S = 2
"""For so long publishing goes on when the hour begins to be loaded."""
PER_S = 5_000
BATCH = 50
ROW_MAX_BYTES = 24


@dataclass(frozen=True, slots=True)
class Watched:
    """What was seen of a load from outside."""

    seconds: float
    peak_bytes: int
    """Anonymous memory at the most."""


def hour(bench: Bench) -> None:
    """The change to an hour in which much is due."""
    for count in bench.size.of(quick=DUE_QUICK, usual=DUE, full=DUE_FULL):
        _hour(bench, count)


def _hour(bench: Bench, count: int) -> None:
    bench.step(f"hour: {count:,} due in one hour")
    name = f"hour-{count}"
    hour_ms = now_ms() // HOUR_MS * HOUR_MS + 3 * HOUR_MS
    stretch = (count, hour_ms + 20 * MINUTE_MS, hour_ms + HOUR_MS - MINUTE_MS)
    prebuild(bench, name, stretch)
    usual_s = bench.size.of(quick=USUAL_QUICK_S, usual=USUAL_S)
    behind_s = bench.size.of(quick=BEHIND_QUICK_S, usual=BEHIND_S)
    # At `load_at` the server's clock is LEAD_MS before the hour.
    begin_at = time.monotonic() + START_S
    load_at = begin_at + usual_s
    offset_ms = hour_ms - LEAD_MS - now_ms() - (START_S + usual_s) * 1000
    with bench.server(name, "--clock-offset-ms", str(offset_ms)) as server:
        bench.step("hour: publish while it is loaded")
        before = server.memory()
        if time.monotonic() > begin_at:
            raise BenchmarkError(f"the server took more than {START_S} s to start")
        beside = bench.pool.submit(
            publish_batches,
            server.port,
            batches_tomorrow(hour_ms + 2 * HOUR_MS, size=BATCH),
            begin_at,
            seconds_max=usual_s + behind_s,
            interval_s=BATCH / PER_S,
        )
        watched = _wait_until_loaded(server, load_at, count)
        sent = beside.result()
        moments = sent.began_at + np.arange(len(sent.latency_ms)) * BATCH / PER_S
        latency_ms = np.array(sent.latency_ms)
        usual = latency_ms[(moments >= begin_at + usual_s / 4) & (moments < load_at - 0.5)]
        during = latency_ms[(moments >= load_at - 0.5) & (moments < load_at + watched.seconds)]
        usual_ms, during_ms = (float(np.percentile(part, 99)) for part in (usual, during))
        figure = bench.add(Figure(f"hour change, {count:,} due", during_ms / usual_ms, "× p99"))
        figure.p50_ms, figure.p99_ms = float(np.median(during)), during_ms
        figure.max_ms = float(during.max())
        figure.demand("≤ 2 × usual", during_ms <= 2 * usual_ms)
        figure.note = (
            f"{PER_S:,} published each second, {BATCH} at a time: p99 {usual_ms:.1f} ms before, "
            f"{during_ms:.1f} ms while the hour was loaded, which took {watched.seconds:.1f} s"
        )
        figure.expect("loaded", server.stats()["pending_loaded"], count)
        grown = server.memory().anonymous - before.anonymous
        figure = bench.add(Figure(f"memory, hour of {count:,} loaded", grown / count, "B/msg"))
        figure.demand(f"≤ {ROW_MAX_BYTES} B", round(figure.value) <= ROW_MAX_BYTES)
        peak = (watched.peak_bytes - before.anonymous) / count
        figure.note = f"at the most, while it was loaded: {peak:.0f} B; server {grown / MIB:.0f} MB"


def _wait_until_loaded(server: Served, load_at: float, count: int) -> Watched:
    """How long the load took, as its effect shows."""
    peak_bytes = 0
    while time.monotonic() < load_at + LOADED_MAX_S:
        peak_bytes = max(peak_bytes, server.memory().anonymous)
        if time.monotonic() > load_at and server.stats()["pending_loaded"] >= count:
            return Watched(max(0.5, time.monotonic() - load_at), peak_bytes)
        time.sleep(0.05)
    raise BenchmarkError(f"the hour was not loaded within {LOADED_MAX_S} s")
