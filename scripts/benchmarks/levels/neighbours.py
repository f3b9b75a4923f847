"""Healthy subscriptions beside one whose receiver accepts connections and never answers."""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

from consumers import Received, receive_webhooks
from load import BatchRequests, make_batches, publish_batches
from report import Figure
from servers import Served

from delayserver.cli.demo.process import free_port
from levels.bench import (
    BATCH,
    BODY,
    Bench,
    idle_max_ms,
    lead_s,
    now_ms,
    set_latency,
    subscribe,
)

HEALTHY = 100
PER_S = 500
"""All healthy ones together."""
SECONDS = 15
HANGING = 20_000
"""Messages for the one that hangs, due at once."""
IN_FLIGHT_MAX = 10_000
RATIO_MAX, MORE_MAX_MS = 1.2, 2.0
"""How much later than alone, at the 99th percentile: the larger of the two."""


def neighbours(bench: Bench) -> None:
    """Lateness of the healthy ones, alone and then beside the one that hangs."""
    seconds = bench.size.of(quick=1, usual=SECONDS)
    with bench.server("neighbours") as server, _hanging_port() as hanging:
        alone = _healthy(bench, server, "alone", seconds)
        slow = {"type": "webhook", "url": f"http://127.0.0.1:{hanging}/"}
        subscribe(server, "hangs", {**slow, "max_in_flight": IN_FLIGHT_MAX})
        due_ms = now_ms()
        _publish(bench, server, make_batches("hangs", [due_ms] * HANGING, BODY, BATCH))
        beside = _healthy(bench, server, "beside one that hangs", seconds)
        assert alone.p99_ms is not None and beside.p99_ms is not None
        most_ms = max(RATIO_MAX * alone.p99_ms, alone.p99_ms + MORE_MAX_MS)
        beside.demand(f"p99 ≤ {most_ms:.1f} ms", beside.p99_ms <= most_ms)


@contextmanager
def _hanging_port() -> Iterator[int]:
    """Where the kernel makes connections, and nobody reads what comes."""
    with socket.create_server(("127.0.0.1", 0), backlog=4096) as listener:
        yield int(listener.getsockname()[1])


def _healthy(bench: Bench, server: Served, name: str, seconds: int) -> Figure:
    """Messages due at an even rate, each for the next of all healthy ones."""
    case = f"webhook, {PER_S} due/s of {HEALTHY} subscriptions, {name}"
    bench.step(case)
    count, port = PER_S * seconds, free_port()
    receiving = bench.pool.submit(receive_webhooks, port, count, idle_max_ms(count))
    subjects = [f"healthy-{number}" for number in range(HEALTHY)]
    for subject in subjects:
        subscribe(server, subject, {"type": "webhook", "url": f"http://127.0.0.1:{port}/{subject}"})
    from_ms = now_ms() + lead_s(count) * 1000
    dues_ms = [from_ms + index * 1000 // PER_S for index in range(count)]
    each = PER_S * seconds // HEALTHY
    of_each = [
        make_batches(one, dues_ms[at::HEALTHY], BODY, each) for at, one in enumerate(subjects)
    ]
    requests = [*chain.from_iterable(one.requests for one in of_each)]
    _publish(bench, server, BatchRequests(requests, each))
    received: Received = receiving.result()
    figure = bench.add(Figure(case, len(received.ids), "msg"))
    set_latency(figure, received.lateness_ms)
    figure.expect("received", len(received.ids), count)
    figure.expect("early", sum(late_ms < 0 for late_ms in received.lateness_ms), 0)
    return figure


def _publish(bench: Bench, server: Served, batches: BatchRequests) -> None:
    arguments = (server.port, batches, time.monotonic())
    wanted = len(batches.requests)
    bench.pool.submit(publish_batches, *arguments, requests_max=wanted).result()
