"""Publishing and cancelling through the client library, as an application does it.

So many tasks on one event loop (uvloop), each of which publishes a message, waits until it is
durable, and publishes the next one. What they wait for together goes out together; each has an
answer of its own. The application is one process beside the server; its own processor time per
message is part of the note. `publish_tasks` and `cancel_tasks` run in that process, and take and
give plain data.
"""

import asyncio
import statistics
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import uvloop
from load import wait_for
from report import Figure
from servers import Served

from delayserver.client import AsyncClient
from delayserver.client.messages import AsyncClientMessages
from levels.bench import BODY, DAY_MS, Bench

TASKS = (64, 512)
TASKS_QUICK = (8,)
LEVEL = 150_000
"""Messages each second by the most tasks."""
CANCEL_LEVEL = 59_000
ROUNDS = 3
ROUND_S = 2.0
WARM_UP_S = 0.3
LATENCY_TASKS = 16
"""Only so many tasks look at the clock."""
CANCELS = 40_000
SUBJECT = "bench.client"


@dataclass(frozen=True, slots=True)
class Done:
    """What the tasks did, all of it answered."""

    count: int
    warm_up_count: int
    seconds: float
    cpu_s: float
    """Of the process."""
    latency_ms: list[float]


def publish_tasks(port: int, tasks: int, keys: bool, start_at: float, seconds: float) -> Done:
    """Publish for so long, after a while that is not counted."""

    async def run(producer: AsyncClientMessages) -> Done:
        latency_ms: list[float] = []
        counts = [0] * tasks
        until = 0.0

        async def publish(index: int) -> None:
            measured = index < LATENCY_TASKS
            while (begun_at := time.monotonic()) < until:
                await producer.publish(SUBJECT, BODY, delay=DAY_MS)
                counts[index] += 1
                if measured:
                    latency_ms.append((time.monotonic() - begun_at) * 1000)

        until = time.monotonic() + WARM_UP_S
        await asyncio.gather(*map(publish, range(tasks)))
        warm_up_count = sum(counts)
        latency_ms.clear()
        begun_at, cpu_s = time.monotonic(), time.process_time()
        until = begun_at + seconds
        await asyncio.gather(*map(publish, range(tasks)))
        return Done(
            sum(counts) - warm_up_count,
            warm_up_count,
            time.monotonic() - begun_at,
            time.process_time() - cpu_s,
            latency_ms,
        )

    return _with_producer(port, run, start_at, generate_keys=keys)


def cancel_tasks(port: int, tasks: int, prefix: str, start_at: float, count: int) -> Done:
    """Publish so many messages under keys, then cancel them by key."""

    async def run(producer: AsyncClientMessages) -> Done:
        latency_ms: list[float] = []
        keys = [f"{prefix}-{number}" for number in range(count)]

        async def publish(index: int) -> None:
            for key in keys[index::512]:
                await producer.publish(SUBJECT, BODY, delay=DAY_MS, key=key)

        async def cancel(index: int) -> None:
            for key in keys[index::tasks]:
                begun_at = time.monotonic()
                await producer.cancel(subject=SUBJECT, key=key)
                if index < LATENCY_TASKS:
                    latency_ms.append((time.monotonic() - begun_at) * 1000)

        await asyncio.gather(*map(publish, range(512)))
        begun_at, cpu_s = time.monotonic(), time.process_time()
        await asyncio.gather(*map(cancel, range(tasks)))
        seconds = time.monotonic() - begun_at
        return Done(count, 0, seconds, time.process_time() - cpu_s, latency_ms)

    return _with_producer(port, run, start_at)


def _with_producer(port: int, run: Any, start_at: float, **options: Any) -> Done:
    async def main() -> Done:
        async with AsyncClient(f"http://127.0.0.1:{port}", **options) as client:
            work: Coroutine[Any, Any, Done] = run(client.messages)
            return await work

    wait_for(start_at)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


# ---- the case ----------------------------------------------------------------------------------


def client(bench: Bench) -> None:
    """Single durable publishes and cancels by many tasks through the client library."""
    all_tasks = bench.size.of(quick=TASKS_QUICK, usual=TASKS)
    seconds = bench.size.of(quick=0.2, usual=ROUND_S)
    with bench.server("client") as server:
        sent = 0
        figures = []
        for keys in (False, True):
            for tasks in all_tasks:
                how = "generated keys" if keys else "no keys"
                case = f"client, publish, {tasks} tasks, {how}"
                rounds, cpu_us = [], []
                for number in range(bench.size.of(quick=1, usual=ROUNDS)):
                    bench.step(f"{case}, round {number + 1}")
                    before_s = server.cpu_s()
                    future = bench.pool.submit(
                        publish_tasks, server.port, tasks, keys, time.monotonic(), seconds
                    )
                    done: Done = future.result()
                    sent += done.count + done.warm_up_count
                    used_s = server.cpu_s() - before_s
                    cpu_us.append(used_s / (done.count + done.warm_up_count) * 1e6)
                    rounds.append(done)
                figure = _figure(bench, case, rounds, cpu_us)
                if tasks == max(all_tasks):
                    figure.demand(f"≥ {LEVEL:,}/s", figure.value >= LEVEL)
                else:
                    figure.note += "; level: ahead of Redis, see scripts/bench peers"
                figures.append(figure)
        accepted = server.stats()["accepted"]
        for figure in figures:
            figure.expect("accepted", accepted, sent)
        for tasks in all_tasks:
            _cancel(bench, server, tasks, is_fewest=tasks == min(all_tasks))


def _cancel(bench: Bench, server: Served, tasks: int, *, is_fewest: bool) -> None:
    case = f"client, cancel by key, {tasks} tasks"
    bench.step(case)
    before = server.stats()["cancelled"]
    count = bench.size.of(quick=1_000, usual=CANCELS)
    done = bench.pool.submit(
        cancel_tasks, server.port, tasks, str(tasks), time.monotonic(), count
    ).result()
    figure = _figure(bench, case, [done], [])
    if is_fewest:
        figure.demand(f"> {CANCEL_LEVEL:,}/s", figure.value > CANCEL_LEVEL)
        figure.note += "; Redis with appendfsync always on a quiet machine; peers measures it"
    figure.expect("cancelled", server.stats()["cancelled"] - before, count)


def _figure(bench: Bench, case: str, rounds: list[Done], cpu_us: list[float]) -> Figure:
    rate = statistics.median(done.count / done.seconds for done in rounds)
    latency_ms = [one for done in rounds for one in done.latency_ms]
    figure = bench.add_rate(case, rate, "msg/s", latency_ms)
    if cpu_us:
        figure.cpu_us = statistics.median(cpu_us)
    own_us = statistics.median(done.cpu_s / done.count * 1e6 for done in rounds)
    figure.note = f"{own_us:.1f} µs of the application's processor for each, its tasks included"
    return figure
