"""What publishers notice when an hour is loaded: nothing, it should be.

The server's clock is set so that the next hour will be loaded in a little while. Until then it is
filled; then a client publishes at an even rate, before the load and while it lasts.
"""

import time

import numpy as np
from load import publish_batches
from report import Figure
from servers import BenchmarkError, Served

from levels.bench import (
    HOUR_MS,
    MINUTE_MS,
    Bench,
    batches_tomorrow,
    now_ms,
    publish,
    random_batches,
)

DUE = 1_000_000
DUE_FULL = 10_000_000
LEAD_MS = 10 * MINUTE_MS
FILL_PER_S = 60_000
"""What a machine should manage, however busy, when the hour is filled."""
USUAL_S = 8
LOADED_MAX_S = 60
PER_S = 5_000
BATCH = 50


def hour(bench: Bench) -> None:
    """The change to an hour in which much is due."""
    count = DUE_FULL if bench.full else DUE
    fill_s = count / FILL_PER_S + 5
    # At `load_at` the server's clock is LEAD_MS before the hour.
    load_at = time.monotonic() + fill_s + USUAL_S
    load_ms = now_ms() + int((fill_s + USUAL_S) * 1000)
    offset_ms = -(load_ms + LEAD_MS) % HOUR_MS
    hour_ms = load_ms + offset_ms + LEAD_MS
    with bench.server("hour", "--clock-offset-ms", str(offset_ms)) as server:
        bench.step(f"hour: {count:,} due in the next hour")
        due = random_batches(hour_ms + 20 * MINUTE_MS, hour_ms + HOUR_MS - MINUTE_MS)
        publish(bench, server.port, due, count=count)
        server.wait_until_filed()
        begin_at = load_at - USUAL_S
        if time.monotonic() > begin_at:
            raise BenchmarkError(f"publishing {count:,} took more than {fill_s:.0f} s")

        bench.step("hour: publish while it is loaded")
        beside = bench.pool.submit(
            publish_batches,
            server.port,
            batches_tomorrow(hour_ms + 2 * HOUR_MS, size=BATCH),
            begin_at,
            seconds_max=USUAL_S + LOADED_MAX_S / 4,
            interval_s=BATCH / PER_S,
        )
        loaded_s = _wait_until_loaded(server, load_at, count)
        sent = beside.result()
        moments = sent.began_at + np.arange(len(sent.latency_ms)) * BATCH / PER_S
        latency_ms = np.array(sent.latency_ms)
        usual = latency_ms[moments < load_at - 0.5]
        during = latency_ms[(moments >= load_at - 0.5) & (moments < load_at + loaded_s)]
        usual_ms, during_ms = (float(np.percentile(part, 99)) for part in (usual, during))
        figure = bench.add(Figure(f"hour change, {count:,} due", during_ms / usual_ms, "× p99"))
        figure.p50_ms, figure.p99_ms = float(np.median(during)), during_ms
        figure.max_ms = float(during.max())
        figure.demand("≤ 2 × usual", during_ms <= 2 * usual_ms)
        figure.note = (
            f"{PER_S:,} published each second, {BATCH} at a time: p99 {usual_ms:.1f} ms before, "
            f"{during_ms:.1f} ms while the hour was loaded, which took {loaded_s:.1f} s"
        )
        figure.expect("loaded", server.stats()["pending_loaded"], count)


def _wait_until_loaded(server: Served, load_at: float, count: int) -> float:
    """How long the load took, as its effect shows."""
    while time.monotonic() < load_at + LOADED_MAX_S:
        if server.stats()["pending_loaded"] >= count:
            return max(0.5, time.monotonic() - load_at)
        time.sleep(0.1)
    raise BenchmarkError(f"the hour was not loaded within {LOADED_MAX_S} s")
