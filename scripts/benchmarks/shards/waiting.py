"""What waits in shards: how late it comes, what it takes in memory, and what filing it costs."""

import statistics

import numpy as np
from consumers import Received, pull_on_time
from levels.bench import (
    BATCH,
    MIB,
    PUBLISHERS,
    Bench,
    batches_tomorrow,
    idle_max_ms,
    latencies_of,
    publish,
    publish_ahead,
    rate_of,
    settled_memory,
)
from load import LoadConnection
from report import Figure
from servers import memory_of

from shards.rates import ONE, SHARDS, TURN_S, TURNS, TWO
from shards.serving import Sharded, sharded
from shards.sides import Load, add_rate, by_turns, measured, rate, ratio, server_us

PER_S = 2_000
LATENESS_S = 10
LATENESS_TURNS = 3
LATENESS_LEVEL = 1.25
"""Times the 99th percentile of one shard: what is left of the noise in the median of turns."""
MEMORY_LEVEL = 90
"""MB of a shard, idle."""
WAITING = 1_000_000
WAITING_QUICK = 4_000
UNFILED = ("--file-ms", "1h", "--checkpoint-ms", "1h", "--checkpoint-bytes", "1000000000")
"""Nothing is filed while a turn lasts …"""
UNFILED_MAX = ("--unfiled-max-bytes", "1000000000")
"""… and nothing has to wait for it."""


def lateness(bench: Bench) -> None:
    """Messages with keys, so many due each second, pulled by one consumer, wherever they are."""
    per_s = bench.size.of(quick=500, usual=PER_S)
    count = per_s * bench.size.of(quick=1, usual=LATENESS_S)
    p99_ms: dict[int, list[float]] = {1: [], SHARDS: []}
    figures: dict[int, Figure] = {}
    for number in range(bench.size.of(quick=1, usual=LATENESS_TURNS)):
        for shards in (1, SHARDS) if number % 2 == 0 else (SHARDS, 1):
            name = ONE if shards == 1 else TWO
            bench.step(f"lateness: {per_s:,} due/s, {name}, turn {number + 1}")
            with sharded(bench, f"late-{shards}-{number}", shards) as server:
                received = _received(bench, server, per_s, count)
            late_ms = received.lateness_ms
            p50, p99 = (float(one) for one in np.percentile(late_ms, [50, 99]))
            p99_ms[shards].append(p99)
            if shards not in figures:
                case = f"lateness p99, {per_s:,} due/s: {name}"
                figures[shards] = bench.add(Figure(case, 0.0, "ms"))
            figure = figures[shards]
            figure.p50_ms, figure.max_ms = p50, max(late_ms)
            ids = received.ids
            figure.expect("received", len(ids), count)
            figure.expect("received twice", len(ids) - len(set(ids)), 0)
            figure.expect("early", sum(ms < 0 for ms in late_ms), 0)
            figure.expect("acknowledged", received.acked, count)
    for shards, figure in figures.items():
        figure.value = figure.p99_ms = statistics.median(p99_ms[shards])
        figure.note = "receipt less deliver_at; turns: " + ", ".join(
            f"{one:.1f}" for one in p99_ms[shards]
        )
    beside = statistics.median(b / a for a, b in zip(*p99_ms.values(), strict=True))
    figures[SHARDS].ratios[ONE] = beside
    figures[SHARDS].demand(f"≤ {LATENESS_LEVEL} × one shard", beside <= LATENESS_LEVEL)


def _received(bench: Bench, server: Sharded, per_s: int, count: int) -> Received:
    name = "late"
    with LoadConnection(server.port) as connection:
        wanted = {"subject": name, "type": "pull"}
        connection.call("PUT", f"/v1/subscriptions/{name}", wanted)
    waiting = bench.pool.submit(pull_on_time, server.port, name, count, idle_max_ms(count))
    publish_ahead(bench, server.served, name, per_s, count, keyed=True)
    return waiting.result()


def memory(bench: Bench) -> None:
    """Resident memory of each shard and of the supervisor: idle, and with a million that wait."""
    count = bench.size.of(quick=WAITING_QUICK, usual=WAITING)
    with sharded(bench, "memory", SHARDS) as server:
        settled_memory(bench, server.served)
        bench.step("memory: idle")
        figure = _memory_figure(bench, server, "idle")
        figure.demand(f"≤ {MEMORY_LEVEL} MB", figure.value <= MEMORY_LEVEL)
        supervisor = server.served.memory().resident / MIB
        bench.add(Figure("memory of the supervisor", supervisor, "MB"))
        bench.step(f"memory: {count:,} due tomorrow")
        before = server.accepted()
        publish(bench, server.port, batches_tomorrow(keyed=True), count=count)
        settled_memory(bench, server.served)
        figure = _memory_figure(bench, server, f"{count:,} due tomorrow in all")
        figure.expect("accepted", server.accepted() - before, count)


def _memory_figure(bench: Bench, server: Sharded, what: str) -> Figure:
    each = [memory_of(pid) for pid in server.served.shards()]
    largest = max(one.resident for one in each) / MIB
    figure = bench.add(Figure(f"memory of a shard, {what}", largest, "MB"))
    figure.note = "the largest; " + ", ".join(
        f"{one.anonymous / MIB:.0f} anonymous and {one.file / MIB:.0f} of files" for one in each
    )
    return figure


def filing(bench: Bench) -> None:
    """Batches with and without the filing: the most that a replay in a process of its own gains."""
    batches = batches_tomorrow(keyed=True)
    first = 0
    with (
        sharded(bench, "filed", 1) as filed,
        sharded(bench, "unfiled", 1, *UNFILED, *UNFILED_MAX) as unfiled,
    ):

        def publishing(server: Sharded) -> Load:
            nonlocal first
            seconds = bench.size.of(quick=0.1, usual=float(TURN_S))
            sent = publish(bench, server.port, batches, seconds=seconds, first_process=first)
            first += PUBLISHERS
            p50_ms, p99_ms = (float(one) for one in np.percentile(latencies_of(sent), [50, 99]))
            return Load(sum(one.messages for one in sent), rate_of(sent), p50_ms, p99_ms)

        sides = {
            "with": lambda number: measured(
                lambda: publishing(filed), filed.served.cpu_s, filed.wait_until_filed
            ),
            "without": lambda number: measured(lambda: publishing(unfiled), unfiled.served.cpu_s),
        }
        turns = bench.size.of(quick=1, usual=TURNS)
        done = by_turns(bench, f"batch of {BATCH}, keys, filing", sides, turns)
        # What it has kept back would be filed at its end.
        unfiled.served.kill()
    figures = {
        name: add_rate(bench, f"batch of {BATCH}, keys, {name} filing", turns)
        for name, turns in done.items()
    }
    figure = figures["without"]
    figure.ratios["filed"] = ratio(done["without"], done["with"], rate)
    cpu = ratio(done["without"], done["with"], server_us)
    figure.note += (
        f"; {cpu:.2f} × the processor time with filing: this is what a replay in a process of its "
        "own would gain at most"
    )
