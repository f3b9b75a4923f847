"""Deliveries against their due time: to a client that pulls, and to webhooks."""

import time
from concurrent.futures import Future

import numpy as np
from consumers import Received, bare_timers, pull_in_turn, pull_on_time, receive_webhooks
from load import BatchRequests, ConnectionResult, make_batches, publish_batches
from report import Figure
from servers import BenchmarkError, Served

from delayserver.cli.demo.process import free_port
from levels.bench import (
    BATCH,
    BODY,
    DISTINCT,
    IDLE_MAX_MS,
    Bench,
    batches_tomorrow,
    idle_max_ms,
    now_ms,
    publish,
    publish_ahead,
    set_latency,
    subscribe,
)

LEVELS_MS = {(2000, False): 3, (5000, True): 5}
"""The 99th percentile by messages due each second, and whether others are published beside."""
WEBHOOK_LEVEL = 10_000
TIMERS_S = 2.0
LATENESS_S = 15
TURNS_PER_S = 2000
WEBHOOK_S = 10
QUICK_S = 1
BURST = 40_000
BURST_QUICK = 2_000
BURST_AHEAD_S = 8
BURST_AHEAD_QUICK_S = 3
BESIDE_PER_S = 10_000
BESIDE_BATCH = 100


def lateness(bench: Bench) -> None:
    """Deliveries to a pulling client, against their due time."""
    bench.step("calibration: timers")
    per_s = 1000
    figure = bench.add(Figure("bare asyncio timers", per_s, "due/s", group="calibration"))
    figure.note = "a process that does nothing else"
    timers_s = bench.size.of(quick=0.2, usual=TIMERS_S)
    set_latency(figure, bench.pool.submit(bare_timers, per_s, timers_s).result())
    usual = ((1000, 0), (2000, 0), (5000, BESIDE_PER_S))
    loads = bench.size.of(quick=((1000, 1000),), usual=usual, full=(*usual, (20_000, BESIDE_PER_S)))
    for load_per_s, beside_per_s in loads:
        _lateness_pull(bench, load_per_s, beside_per_s)


def _lateness_pull(bench: Bench, per_s: int, beside_per_s: int) -> None:
    case = f"pull, {per_s:,} due/s"
    if beside_per_s:
        case += f", {beside_per_s:,} publishes/s"
    bench.step(f"lateness: {case}")
    seconds = bench.size.of(quick=QUICK_S, usual=LATENESS_S)
    count = per_s * seconds
    name = "late"
    with bench.server(f"lateness-{per_s}-{beside_per_s}") as server:
        subscribe(server, name, {"type": "pull"})
        idle_ms = idle_max_ms(count)
        receiving = bench.pool.submit(pull_on_time, server.port, name, count, idle_ms)
        due_from_ms = publish_ahead(bench, server, name, per_s, count)
        cpu_s = server.cpu_s()
        beside = publish_beside(bench, server, due_from_ms, beside_per_s, seconds)
        received = receiving.result()
        published = count
        figure = _lateness_figure(bench, case, count, received, server, cpu_s)
        level_ms = LEVELS_MS.get((per_s, bool(beside_per_s)))
        if level_ms is not None:
            assert figure.p99_ms is not None
            figure.demand(f"p99 ≤ {level_ms} ms, none early", figure.p99_ms <= level_ms)
        if beside is not None:
            published += beside.result().messages
            figure.note = beside_note(beside.result())
        figure.expect("acknowledged", received.acked, count)
        figure.expect("accepted", server.stats()["accepted"], published)


def turns(bench: Bench) -> None:
    """Lateness of a client that pulls, handles and acknowledges in turn, in two ways."""
    per_s = bench.size.of(quick=1000, usual=TURNS_PER_S)
    count = per_s * bench.size.of(quick=QUICK_S, usual=LATENESS_S)
    apart: Figure | None = None
    for carries in (False, True):
        case = f"{per_s:,} due/s, " + (
            "the next pull has the acks" if carries else "ack, then pull"
        )
        bench.step(f"lateness in turn: {case}")
        name = "turns"
        with bench.server(f"turns-{carries}") as server:
            subscribe(server, name, {"type": "pull"})
            idle_ms = idle_max_ms(count)
            arguments = (server.port, name, count, idle_ms, carries)
            receiving = bench.pool.submit(pull_in_turn, *arguments)
            publish_ahead(bench, server, name, per_s, count)
            cpu_s = server.cpu_s()
            received = receiving.result()
            figure = _lateness_figure(bench, case, count, received, server, cpu_s)
            figure.expect("acknowledged", received.acked, count)
        if apart is None:
            apart = figure
        else:
            assert apart.p99_ms and figure.p99_ms and apart.cpu_us and figure.cpu_us
            figure.ratios["p99 apart"] = figure.p99_ms / apart.p99_ms
            figure.ratios["CPU apart"] = figure.cpu_us / apart.cpu_us


def publish_beside(
    bench: Bench,
    server: Served,
    from_ms: int,
    per_s: int,
    seconds: float,
    batches: BatchRequests | None = None,
) -> Future[ConnectionResult] | None:
    """Publish at an even rate while deliveries are measured; None: nothing.

    `batches` of BESIDE_BATCH; without them all is due tomorrow."""
    if not per_s:
        return None
    return bench.pool.submit(
        publish_batches,
        server.port,
        batches or batches_tomorrow(size=BESIDE_BATCH),
        time.monotonic() + max(0, from_ms - now_ms()) / 1000,
        seconds_max=seconds,
        interval_s=BESIDE_BATCH / per_s,
    )


def beside_note(sent: ConnectionResult) -> str:
    """How publishers fared meanwhile."""
    p99_ms = float(np.percentile(sent.latency_ms, 99))
    return f"publish p99 {p99_ms:.1f} ms, batches of {BESIDE_BATCH}"


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
    """Deliveries to a webhook: against their due time, and as many as go."""
    loads = bench.size.of(quick=((500, 500),), usual=((1000, 0), (2000, BESIDE_PER_S)))
    for per_s, beside_per_s in loads:
        _webhook_lateness(bench, per_s, beside_per_s)
    _webhook_rate(bench)


def _webhook_lateness(bench: Bench, per_s: int, beside_per_s: int) -> None:
    name = "hook"
    seconds = bench.size.of(quick=QUICK_S, usual=WEBHOOK_S)
    count = per_s * seconds
    case = f"webhook, {per_s:,} due/s"
    if beside_per_s:
        case += f", {beside_per_s:,} publishes/s"
    bench.step(case)
    with bench.server(f"webhook-{per_s}") as server:
        port = free_port()
        receiving = bench.pool.submit(receive_webhooks, port, count, idle_max_ms(count))
        subscribe(server, name, {"type": "webhook", "url": f"http://127.0.0.1:{port}/"})
        due_from_ms = publish_ahead(bench, server, name, per_s, count)
        cpu_s = server.cpu_s()
        beside = publish_beside(bench, server, due_from_ms, beside_per_s, seconds)
        received = receiving.result()
        figure = _lateness_figure(bench, case, count, received, server, cpu_s)
        if beside is not None:
            figure.note = beside_note(beside.result())


def _webhook_rate(bench: Bench) -> None:
    """All that is due at one moment."""
    name = "burst"
    count = bench.size.of(quick=BURST_QUICK, usual=BURST)
    ahead_s = bench.size.of(quick=BURST_AHEAD_QUICK_S, usual=BURST_AHEAD_S)
    bench.step(f"webhook: {count:,} due at once")
    with bench.server("webhook-rate") as server:
        port = free_port()
        receiving = bench.pool.submit(receive_webhooks, port, count, IDLE_MAX_MS * 2)
        subscribe(server, name, {"type": "webhook", "url": f"http://127.0.0.1:{port}/"})
        due_ms = now_ms() + ahead_s * 1000
        batches = make_batches(name, [due_ms] * DISTINCT, BODY, BATCH)
        publish(bench, server.port, batches, count=count)
        if now_ms() > due_ms:
            raise BenchmarkError(f"publishing {count:,} took more than {ahead_s} s")
        cpu_s = server.cpu_s()
        received = receiving.result()
        rate = len(received.ids) / (max(received.lateness_ms, default=1.0) / 1000)
        figure = bench.add_rate("webhooks, all due at once", rate, "msg/s", [])
        figure.demand(f"≥ {WEBHOOK_LEVEL:,}/s", rate >= WEBHOOK_LEVEL)
        figure.cpu_us = (server.cpu_s() - cpu_s) / max(1, len(received.ids)) * 1e6
        figure.note = f"{count:,} messages, until the last one has come"
        figure.expect("received", len(received.ids), count)
        figure.expect("received twice", len(received.ids) - len(set(received.ids)), 0)
