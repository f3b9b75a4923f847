"""What a cluster publishes each second, beside the same server on its own log, by turns."""

import time
from collections.abc import Callable

import numpy as np
from levels.bench import Bench
from levels.client import publish_tasks
from report import Figure
from servers import cpu_s_of
from shards.sides import Load, Turn, add_rate, by_turns, measured, median, rate, ratio

from cluster.here import Here

TASKS = (64, 512)
RATIO_LEVEL = 0.7
"""At most tasks."""
P50_MORE_MS = 2.0
TURNS = 5
TURN_S = 2.0
OWN = "own log"
CLUSTER = "cluster"


def publish(bench: Bench, here: Here) -> None:
    """Single publishes by awaiting tasks through the client library, with generated keys."""
    node, _ = here.settled()
    with bench.server("own") as alone:
        for tasks in bench.size.of(quick=(8,), usual=TASKS):
            sides = {
                CLUSTER: _publishing(
                    bench,
                    here.port_of(node),
                    tasks,
                    lambda: sum(map(cpu_s_of, here.pids(node))),
                ),
                OWN: _publishing(bench, alone.port, tasks, alone.cpu_s),
            }
            before = {CLUSTER: here.stats(node)["accepted"], OWN: alone.stats()["accepted"]}
            case = f"publish, {tasks} tasks"
            done = by_turns(bench, case, sides, bench.size.of(quick=1, usual=TURNS))
            figures = {
                name: add_rate(bench, f"{case}: {name}", turns) for name, turns in done.items()
            }
            after = {CLUSTER: here.stats(node)["accepted"], OWN: alone.stats()["accepted"]}
            for name, figure in figures.items():
                sent = sum(turn.load.count for turn in done[name])
                figure.expect("accepted", after[name] - before[name], sent)
            here.waiting += sum(turn.load.count for turn in done[CLUSTER])
            _compare(figures[CLUSTER], done[CLUSTER], done[OWN], is_most=tasks == max(TASKS))


def _compare(figure: Figure, turns: list[Turn], own: list[Turn], *, is_most: bool) -> None:
    beside = figure.ratios[OWN] = ratio(turns, own, rate)
    more_ms = median(turns, lambda one: one.load.p50_ms) - median(own, lambda one: one.load.p50_ms)
    if is_most:
        figure.demand(f"≥ {RATIO_LEVEL} × own log", beside >= RATIO_LEVEL)
    figure.demand(f"p50 ≤ +{P50_MORE_MS:.0f} ms", more_ms <= P50_MORE_MS)
    figure.note += f"; p50 {more_ms:+.1f} ms beside the own log"


def _publishing(
    bench: Bench, port: int, tasks: int, cpu_s: Callable[[], float]
) -> Callable[[int], Turn]:
    def work() -> Load:
        seconds = bench.size.of(quick=0.2, usual=TURN_S)
        done = bench.pool.submit(
            publish_tasks, port, tasks, True, time.monotonic(), seconds
        ).result()
        p50_ms, p99_ms = (float(one) for one in np.percentile(done.latency_ms, [50, 99]))
        count = done.count + done.warm_up_count
        return Load(count, done.count / done.seconds, p50_ms, p99_ms)

    return lambda number: measured(work, cpu_s)
