"""What two shards do each second, beside one shard and beside Redis, by turns."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import wrk
from levels.bench import (
    BATCH,
    IN_FLIGHT_EACH,
    PUBLISHERS,
    QUICK_CONNECTIONS,
    QUICK_KEYS,
    Bench,
    batches_tomorrow,
    latencies_of,
    one_message,
    publish,
    rate_of,
)
from levels.client import publish_tasks
from levels.posts import CANCEL_SUBJECT, publish_keys
from load import ARROW, JSON, BatchRequests
from report import Figure

from shards.redis import redis_side
from shards.serving import Apart, Asked, Sharded, all_sharded, apart
from shards.sides import (
    Load,
    Side,
    Turn,
    add_rate,
    by_turns,
    median,
    ours,
    rate,
    ratio,
    room,
    server_us,
    together,
)

TURNS = 5
TURN_S = 2
SHARDS = 2
ONE_LEVEL = 1.5
"""Times as much as one shard, where that can be at all beside the generator."""
POST_LEVELS = {64: 1.0, 256: 1.3}
"""Times as much as Redis, by connections."""
CLIENT_TASKS = 64
CLIENT_LEVEL = 1.8
BATCH_LEVELS = {"JSON": 2.0, "Arrow": 4.0}
CANCEL_CONNECTIONS = 64
CANCEL_LEVEL = 1.0
CANCEL_EACH = 120_000
"""More than can be cancelled in a turn."""
REDIS_CANCELS = 40_000
ONE = "1 shard"
APART = f"{SHARDS} servers"
"""That know nothing of one another, each with its part of the load: what two processes can do here
at all."""
TWO = f"{SHARDS} shards"
REDIS = "Redis"


def post(bench: Bench) -> None:
    """Single publishes with keys, by wrk, beside two servers with half of the connections each."""
    levels = bench.size.of(quick={QUICK_CONNECTIONS: 1.0}, usual=POST_LEVELS)
    with (
        all_sharded(bench, "post", (1, SHARDS)) as servers,
        apart(bench, "post", SHARDS) as others,
        ThreadPoolExecutor(SHARDS) as threads,
        redis_side(bench.directory / "redis") as redis,
    ):
        asked: dict[str, Asked] = {TWO: servers[SHARDS], ONE: servers[1], APART: others}
        for connections, level in levels.items():
            each = connections // SHARDS
            sides = {
                TWO: ours(servers[SHARDS], _posting(bench, servers[SHARDS], connections)),
                ONE: ours(servers[1], _posting(bench, servers[1], connections)),
                APART: ours(others, _posting_apart(bench, threads, others, each)),
            }
            if redis is not None:
                sides[REDIS] = redis.publishing(connections, _turn_s(bench))
            before = {name: server.accepted() for name, server in asked.items()}
            case = f"POST, keys, {connections} conn."
            figures = _compare(bench, case, sides, level)
            for name, server in asked.items():
                figure, turns = figures[name]
                sent = sum(turn.load.count for turn in turns)
                done = server.accepted() - before[name]
                # wrk does not count what is on its way when it ends.
                within = sent <= done <= sent + connections * len(turns)
                figure.expect("accepted, within those on their way", within, True)


def _posting(bench: Bench, server: Sharded, connections: int) -> Callable[[int], Load]:
    def work(number: int) -> Load:
        body = one_message(f"{connections}-{number}-{wrk.KEY_PLACE}")
        return load_of(wrk.post(server.port, "/v1/messages", body, connections, _turn_s(bench)))

    return work


def _posting_apart(
    bench: Bench, threads: ThreadPoolExecutor, others: Apart, connections: int
) -> Callable[[int], Load]:
    """So many connections to each."""
    posting = [_posting(bench, one, connections) for one in others.servers]

    def work(number: int) -> Load:
        return together(threads, (partial(post, number) for post in posting))

    return work


def client(bench: Bench) -> None:
    """Single publishes by awaiting tasks through the client library, with generated keys."""
    tasks = bench.size.of(quick=8, usual=CLIENT_TASKS)

    def publishing(server: Sharded) -> Callable[[int], Load]:
        def work(number: int) -> Load:
            seconds = bench.size.of(quick=0.2, usual=float(TURN_S))
            done = bench.pool.submit(
                publish_tasks, server.port, tasks, True, time.monotonic(), seconds
            ).result()
            p50_ms, p99_ms = (float(one) for one in np.percentile(done.latency_ms, [50, 99]))
            # What came before it was measured has cost processor time, too.
            count = done.count + done.warm_up_count
            return Load(count, done.count / done.seconds, p50_ms, p99_ms)

        return work

    with (
        all_sharded(bench, "client", (1, SHARDS)) as servers,
        redis_side(bench.directory / "redis") as redis,
    ):
        before = {count: server.accepted() for count, server in servers.items()}
        sides: dict[str, Side] = {
            name: ours(servers[count], publishing(servers[count]))
            for name, count in ((TWO, SHARDS), (ONE, 1))
        }
        if redis is not None:
            sides[REDIS] = redis.publishing(tasks, _turn_s(bench))
        case = f"client library, generated keys, {tasks} tasks"
        figures = _compare(bench, case, sides, CLIENT_LEVEL)
        for name, count in ((TWO, SHARDS), (ONE, 1)):
            figure, turns = figures[name]
            sent = sum(turn.load.count for turn in turns)
            figure.expect("accepted", servers[count].accepted() - before[count], sent)


def batch(bench: Bench) -> None:
    """Batches with keys, as JSON and as Arrow; Redis has pipelines of as many."""
    requests = {
        name: batches_tomorrow(content_type=content_type, keyed=True)
        for name, content_type in (("JSON", JSON), ("Arrow", ARROW))
    }
    first = 0

    def publishing(ports: list[int], batches: BatchRequests) -> Callable[[int], Load]:
        def work(number: int) -> Load:
            nonlocal first
            seconds = bench.size.of(quick=0.1, usual=float(TURN_S))
            sent = publish(bench, ports, batches, seconds=seconds, first_process=first)
            first += PUBLISHERS
            latencies_ms = latencies_of(sent)
            p50_ms, p99_ms = (float(one) for one in np.percentile(latencies_ms, [50, 99]))
            return Load(sum(one.messages for one in sent), rate_of(sent), p50_ms, p99_ms)

        return work

    with (
        all_sharded(bench, "batch", (1, SHARDS)) as servers,
        apart(bench, "batch", SHARDS) as others,
        redis_side(bench.directory / "redis") as redis,
    ):
        asked: dict[str, Asked] = {TWO: servers[SHARDS], ONE: servers[1], APART: others}
        for name, batches in requests.items():
            before = {side: server.accepted() for side, server in asked.items()}
            sides = {
                TWO: ours(servers[SHARDS], publishing([servers[SHARDS].port], batches)),
                ONE: ours(servers[1], publishing([servers[1].port], batches)),
                APART: ours(others, publishing(others.ports, batches)),
            }
            if redis is not None:
                sides[REDIS] = redis.publishing(
                    PUBLISHERS * IN_FLIGHT_EACH, _turn_s(bench), pipeline=BATCH
                )
            case = f"batch of {BATCH}, keys, {name}"
            figures = _compare(bench, case, sides, BATCH_LEVELS[name])
            for side, server in asked.items():
                figure, turns = figures[side]
                figure.note += f"; {PUBLISHERS * IN_FLIGHT_EACH} in flight, latency of a batch"
                sent = sum(turn.load.count for turn in turns)
                figure.expect("accepted", server.accepted() - before[side], sent)


def cancel(bench: Bench) -> None:
    """Cancels by key, one at a time by wrk."""
    each = bench.size.of(quick=QUICK_KEYS, usual=CANCEL_EACH)
    connections = bench.size.of(quick=QUICK_CONNECTIONS, usual=CANCEL_CONNECTIONS)

    def cancelling(server: Sharded) -> Side:
        def work(number: int) -> Load:
            path = f"/v1/subjects/{CANCEL_SUBJECT}/keys/{number}-{wrk.KEY_PLACE}"
            posts = wrk.post(
                server.port, path, b"", connections, _turn_s(bench), method="DELETE", keys=each
            )
            return load_of(posts)

        def turn(number: int) -> Turn:
            keys = [f"{number}-{wrk.key_of(1, count)}" for count in range(1, each + 1)]
            publish_keys(bench, server.served, keys)
            return ours(server, work)(number)

        return turn

    with (
        all_sharded(bench, "cancel", (1, SHARDS)) as servers,
        redis_side(bench.directory / "redis") as redis,
    ):
        sides = {TWO: cancelling(servers[SHARDS]), ONE: cancelling(servers[1])}
        if redis is not None:
            count = bench.size.of(quick=1_000, usual=REDIS_CANCELS)
            sides[REDIS] = redis.cancelling(bench.pool, connections, count)
        case = f"cancel by key, {connections} conn."
        figures = _compare(bench, case, sides, CANCEL_LEVEL)
        for name, count in ((TWO, SHARDS), (ONE, 1)):
            figure, turns = figures[name]
            sent = sum(turn.load.count for turn in turns)
            cancelled = servers[count].served.stats()["cancelled"]
            within = sent <= cancelled <= sent + connections * len(turns)
            figure.expect("cancelled, within those on their way", within, True)


# ---- what the cases share ----------------------------------------------------------------------


def _compare(
    bench: Bench, case: str, sides: dict[str, Side], level: float
) -> dict[str, tuple[Figure, list[Turn]]]:
    """A figure of each side; that of two shards has the ratios and the levels."""
    done = by_turns(bench, case, sides, bench.size.of(quick=1, usual=TURNS))
    figures = {
        name: (add_rate(bench, f"{case}: {name}", turns), turns) for name, turns in done.items()
    }
    figure, turns = figures[TWO]
    if REDIS in done:
        beside = figure.ratios[REDIS] = ratio(turns, done[REDIS], rate)
        figure.demand(f"≥ {level:.1f} × Redis", beside >= level)
    if APART in done:
        figure.ratios[APART] = ratio(turns, done[APART], rate)
    beside = figure.ratios[ONE] = ratio(turns, done[ONE], rate)
    most = room(done[ONE], min(SHARDS, os.cpu_count() or 1))
    if most >= ONE_LEVEL:
        figure.demand(f"≥ {ONE_LEVEL} × one shard", beside >= ONE_LEVEL)
    cpu = median(turns, server_us) / median(done[ONE], server_us)
    figure.note += (
        f"; {cpu:.2f} × the processor time of one shard; beside the generator there is room for "
        f"{most:.2f} × one shard"
    )
    return figures


def load_of(posts: wrk.Posts) -> Load:
    """What wrk has counted."""
    return Load(posts.requests, posts.rate, posts.p50_ms, posts.p99_ms)


def _turn_s(bench: Bench) -> int:
    return bench.size.of(quick=1, usual=TURN_S)
