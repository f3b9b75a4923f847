"""Sides that do the same work by turns, so that a machine that others use disturbs them alike.

Each turn is a few seconds of one side; what is said is the median of its turns, and of a ratio the
median of the ratios of turns that came together. Who begins changes from turn to turn. The
processor time of a turn is that of the server with all its shards, until what was accepted is filed
as well; that of the generator stands beside it, since it has the same cores.

Cost: none beside what is measured.
"""

import resource
import statistics
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from multiprocessing import active_children

from levels.bench import Bench
from report import Figure
from servers import cpu_s_of

from shards.serving import Asked


@dataclass(frozen=True, slots=True)
class Load:
    """What a generator has had answered."""

    count: int
    rate: float
    """Each second."""
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class Turn:
    """One side, once."""

    load: Load
    server_us: float
    """Processor time for each of what was answered."""
    generator_us: float


Side = Callable[[int], Turn]
"""Takes the number of the turn."""


def ours(server: Asked, work: Callable[[int], Load]) -> Side:
    """A server of ours, or several, under a load."""

    def turn(number: int) -> Turn:
        server.wait_until_filed()
        return measured(lambda: work(number), server.cpu_s, server.wait_until_filed)

    return turn


def together(threads: Executor, loads: Iterable[Callable[[], Load]]) -> Load:
    """Several loads at the same time: how many in all, and how long the slowest had to wait."""
    done = [running.result() for running in [threads.submit(load) for load in loads]]
    slowest = max(done, key=lambda one: one.p99_ms)
    count, rates = sum(one.count for one in done), sum(one.rate for one in done)
    return Load(count, rates, slowest.p50_ms, slowest.p99_ms)


def measured(
    work: Callable[[], Load],
    server_cpu_s: Callable[[], float],
    settle: Callable[[], None] = lambda: None,
) -> Turn:
    """A load, with the processor time of the server until it has settled, and of who asked."""
    server_s, own_s = server_cpu_s(), generator_cpu_s()
    load = work()
    own_us = (generator_cpu_s() - own_s) / load.count * 1e6
    settle()
    return Turn(load, (server_cpu_s() - server_s) / load.count * 1e6, own_us)


def generator_cpu_s() -> float:
    """Of the processes that publish here: those of the pool, and programs that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    alive = sum(cpu_s_of(child.pid) for child in active_children() if child.pid is not None)
    return ended.ru_utime + ended.ru_stime + alive


def by_turns(
    bench: Bench, case: str, sides: Mapping[str, Side], turns: int
) -> dict[str, list[Turn]]:
    """So many turns of each side."""
    done: dict[str, list[Turn]] = {name: [] for name in sides}
    names = list(sides)
    for number in range(turns):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            bench.step(f"{case}: {name}, turn {number + 1}")
            done[name].append(sides[name](number))
    return done


def median(turns: list[Turn], of: Callable[[Turn], float]) -> float:
    """Of the turns of a side."""
    return statistics.median(map(of, turns))


def ratio(turns: list[Turn], beside: list[Turn], of: Callable[[Turn], float]) -> float:
    """The median of the ratios of turns that came together."""
    return statistics.median(of(a) / of(b) for a, b in zip(turns, beside, strict=True))


def rate(turn: Turn) -> float:
    """Answers each second."""
    return turn.load.rate


def server_us(turn: Turn) -> float:
    """The server's processor time for each."""
    return turn.server_us


def add_rate(bench: Bench, case: str, turns: list[Turn], unit: str = "msg/s") -> Figure:
    """The figure of one side."""
    figure = bench.add(Figure(case, median(turns, rate), unit))
    figure.p50_ms = median(turns, lambda turn: turn.load.p50_ms)
    figure.p99_ms = median(turns, lambda turn: turn.load.p99_ms)
    figure.cpu_us = median(turns, server_us)
    generator_us = median(turns, lambda turn: turn.generator_us)
    rates = ", ".join(f"{rate(turn):,.0f}" for turn in turns)
    figure.note = f"turns: {rates}; the generator takes {generator_us:.1f} µs for each"
    return figure


def room(turns: list[Turn], cores: int) -> float:
    """How many times as much as one shard so many cores could do at most, beside the generator:
    `turns` are those of one shard, which has one of them."""
    server, generator = median(turns, server_us), median(turns, lambda turn: turn.generator_us)
    return cores * server / (server + generator)
