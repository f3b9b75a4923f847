"""How costs grow with the backlog: they should not.

One server, whose backlog (due tomorrow, and as much again in the loaded hour) grows by factors of
ten. At each size: processor time for a publish and for a cancel by key, and lateness.
"""

import os

import numpy as np
import wrk
from consumers import pull_on_time
from report import Figure

from levels.bench import (
    HOUR_MS,
    MINUTE_MS,
    QUICK_CONNECTIONS,
    QUICK_KEYS,
    Bench,
    batches_tomorrow,
    idle_max_ms,
    now_ms,
    one_message,
    post_once,
    publish,
    publish_ahead,
    random_batches,
    subscribe,
)
from levels.posts import CANCEL_SUBJECT, publish_keys

SIZES_QUICK = (1_000,)
SIZES = (1_000, 10_000, 100_000)
SIZES_FULL = (*SIZES, 1_000_000, 10_000_000)
FILL_BATCH = 125
CONNECTIONS = 64
CANCELS = 80_000
PER_S = 1_000
LATENESS_S = 4
LATENESS_QUICK_S = 1


def curves(bench: Bench) -> None:
    """Publish, cancel and lateness over the backlog."""
    offset_ms = HOUR_MS - now_ms() % HOUR_MS + 5 * MINUTE_MS
    hour_ms = (now_ms() + offset_ms) // HOUR_MS * HOUR_MS
    later = batches_tomorrow(hour_ms, size=FILL_BATCH)
    soon = random_batches(hour_ms + HOUR_MS // 2, hour_ms + HOUR_MS - MINUTE_MS, size=FILL_BATCH)
    sizes = bench.size.of(quick=SIZES_QUICK, usual=SIZES, full=SIZES_FULL)
    connections = bench.size.of(quick=QUICK_CONNECTIONS, usual=CONNECTIONS)
    cancels = bench.size.of(quick=QUICK_KEYS, usual=CANCELS)
    first: dict[str, float] = {}
    with bench.server("curves", "--clock-offset-ms", str(offset_ms)) as server:
        backlog = 0
        for size in sizes:
            bench.step(f"curves: {size:,} pending")
            # Half of it later, half of it in the hour that is loaded.
            for batches in (later, soon):
                publish(bench, server.port, batches, count=(size - backlog) // 2)
            backlog = size
            server.wait_until_filed()
            # The curve is of what waits. Gigabytes that are still to be written keep the disk busy.
            os.sync()

            _, publish_us = post_once(bench, server, "/v1/messages", one_message(), connections)
            # Each size has keys of its own, which begin with its number of digits.
            digits = len(str(size))
            keys = [
                f"{digits}-{wrk.key_of(thread, count)}"
                for thread in range(1, wrk.THREADS + 1)
                for count in range(1, cancels + 1)
            ]
            publish_keys(bench, server, keys)
            server.wait_until_filed()
            cpu_s = server.cpu_s()
            path = f"/v1/subjects/{CANCEL_SUBJECT}/keys/{digits}-{wrk.KEY_PLACE}"
            ended = wrk.post(server.port, path, b"", connections, 1, method="DELETE")
            cancel_us = (server.cpu_s() - cpu_s) / ended.requests * 1e6

            subject = f"curve-{digits}"
            subscribe(server, subject, {"type": "pull"})
            count = PER_S * bench.size.of(quick=LATENESS_QUICK_S, usual=LATENESS_S)
            idle_ms = idle_max_ms(count)
            receiving = bench.pool.submit(pull_on_time, server.port, subject, count, idle_ms)
            publish_ahead(bench, server, subject, PER_S, count, offset_ms=offset_ms)
            received = receiving.result()
            late_ms = float(np.percentile(received.lateness_ms, 99)) + offset_ms
            for what, value, unit in (
                ("publish", publish_us, "µs CPU"),
                ("cancel by key", cancel_us, "µs CPU"),
                ("lateness p99", late_ms, "ms"),
            ):
                figure = bench.add(Figure(f"{what}, {size:,} pending", value, unit))
                bench.curves.setdefault(f"{what}, {unit}", {})[size] = value
                figure.ratios["smallest"] = value / first.setdefault(what, value)
                figure.expect("received", len(received.ids), count)
