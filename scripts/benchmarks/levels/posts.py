"""Single POSTs by wrk: publishes beside hello, in rounds, and cancels by key."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import msgspec
import wrk
from load import http_request
from report import Figure
from servers import Served, hello_server

from levels.bench import (
    BATCH,
    BODY,
    DAY_MS,
    IN_FLIGHT_EACH,
    POST_CONNECTIONS,
    PUBLISHERS,
    QUICK_CONNECTIONS,
    QUICK_KEYS,
    Bench,
    latencies_of,
    now_ms,
    one_message,
    post_once,
    rate_of,
    send_once,
)

POST_ROUNDS = 3
CONNECTIONS = (64, POST_CONNECTIONS)
SWEEP = (1, 32, *CONNECTIONS, 512)
LEVELS = {False: 60_000, True: 40_000}
"""Messages each second without and with a key."""
BULK_LEVEL = 200_000
CANCEL_CONNECTIONS = 64
CANCEL_EACH = 120_000
"""More keys for each thread of wrk than it can cancel in its time."""
CANCEL_SUBJECT = "bench.cancel"


def post(bench: Bench) -> None:
    """Single durable POSTs beside hello, in rounds."""
    sent, in_flight = 0, 0
    figures = []
    rounds_max = bench.size.of(quick=1, usual=POST_ROUNDS)
    with hello_server(bench.directory) as hello, bench.server("post") as server:
        for connections in bench.size.of(quick=(QUICK_CONNECTIONS,), usual=CONNECTIONS, full=SWEEP):
            rounds: dict[bool, list[Round]] = {False: [], True: []}
            for number, keyed in product(range(rounds_max), rounds):
                what = "with key" if keyed else "no key"
                bench.step(f"post: {connections} connections, {what}, round {number + 1}")
                key = f"{connections}-{number}-{wrk.KEY_PLACE}" if keyed else None
                body = one_message(key)
                base, _ = post_once(bench, hello, "/", body, connections)
                head, cpu_us = post_once(bench, server, "/v1/messages", body, connections)
                rounds[keyed].append(Round(base, head, cpu_us))
                sent += head.requests
                in_flight += connections
            for keyed, all_rounds in rounds.items():
                figures.append(_post_figure(bench, connections, keyed, all_rounds))
        accepted = server.stats()["accepted"]
    for figure in figures:
        # wrk does not count what is on its way when it ends.
        figure.expect(
            "accepted, within those on their way", sent <= accepted <= sent + in_flight, True
        )


@dataclass(frozen=True, slots=True)
class Round:
    """Hello and the server, one after the other."""

    base: wrk.Posts
    head: wrk.Posts
    cpu_us: float


def _post_figure(bench: Bench, connections: int, keyed: bool, rounds: list[Round]) -> Figure:
    def median(of: Callable[[wrk.Posts], float]) -> float:
        return statistics.median(of(one.head) for one in rounds)

    case = f"POST, {connections} conn., {'with key' if keyed else 'no key'}"
    figure = bench.add_rate(case, median(lambda posts: posts.rate), "msg/s", [])
    figure.p50_ms = median(lambda posts: posts.p50_ms)
    figure.p99_ms = median(lambda posts: posts.p99_ms)
    figure.max_ms = max(one.head.max_ms for one in rounds)
    figure.cpu_us = statistics.median(one.cpu_us for one in rounds)
    figure.ratios["hello"] = statistics.median(one.head.rate / one.base.rate for one in rounds)
    rates = ", ".join(f"{one.base.rate:,.0f}" for one in rounds)
    figure.note = f"hello beside it: {rates}"
    if connections in CONNECTIONS:
        figure.demand(f"≥ {LEVELS[keyed]:,}/s", figure.value >= LEVELS[keyed])
        figure.demand("p99 ≤ 5 ms", figure.p99_ms <= 5)
    return figure


# ---- cancels -----------------------------------------------------------------------------------


def cancel(bench: Bench) -> None:
    """Cancels by key: one at a time by wrk, then 500 at a time."""
    bench.step("cancel: publish what will be cancelled")
    each = bench.size.of(quick=QUICK_KEYS, usual=CANCEL_EACH)
    connections = bench.size.of(quick=QUICK_CONNECTIONS, usual=CANCEL_CONNECTIONS)
    with bench.server("cancel") as server:
        single = [
            wrk.key_of(thread, count)
            for thread in range(1, wrk.THREADS + 1)
            for count in range(1, each + 1)
        ]
        bulk = [f"bulk{number:09d}" for number in range(len(single))]
        publish_keys(bench, server, [*single, *bulk])
        server.wait_until_filed()

        bench.step(f"cancel: {connections} connections")
        cpu_s = server.cpu_s()
        path = f"/v1/subjects/{CANCEL_SUBJECT}/keys/{wrk.KEY_PLACE}"
        seconds = bench.size.of(quick=1, usual=2)
        ended = wrk.post(server.port, path, b"", connections, seconds, method="DELETE")
        cancelled = server.stats()["cancelled"]
        case = f"cancel by key, {connections} conn."
        figure = bench.add_rate(case, ended.rate, "msg/s", [])
        figure.p50_ms, figure.p99_ms, figure.max_ms = ended.p50_ms, ended.p99_ms, ended.max_ms
        figure.cpu_us = (server.cpu_s() - cpu_s) / ended.requests * 1e6
        within = ended.requests <= cancelled <= ended.requests + connections
        figure.expect("cancelled, within those on their way", within, True)

        bench.step(f"cancel: {BATCH} at a time")
        keys = [{"subject": CANCEL_SUBJECT, "key": key} for key in bulk]
        requests = [
            http_request("POST", "/v1/messages/cancel", msgspec.json.encode({"keys": part}))
            for part in (keys[at : at + BATCH] for at in range(0, len(keys), BATCH))
        ]
        cpu_s = server.cpu_s()
        sent = send_once(bench, server.port, requests)
        case = f"cancel by key, {BATCH} at a time"
        figure = bench.add_rate(case, rate_of(sent), "msg/s", latencies_of(sent))
        figure.demand(f"≥ {BULK_LEVEL:,}/s", figure.value >= BULK_LEVEL)
        figure.cpu_us = (server.cpu_s() - cpu_s) / len(bulk) * 1e6
        figure.note = f"{PUBLISHERS * IN_FLIGHT_EACH} in flight; latencies are those of a call"
        figure.expect("cancelled", server.stats()["cancelled"] - cancelled, len(bulk))


def publish_keys(bench: Bench, server: Served, keys: list[str]) -> None:
    """A message under each key, due tomorrow."""
    due_ms = now_ms() + DAY_MS
    messages = [
        {"subject": CANCEL_SUBJECT, "key": key, "body": BODY, "deliver_at": due_ms} for key in keys
    ]
    requests = [
        http_request("POST", "/v1/messages/batch", msgspec.json.encode(messages[at : at + BATCH]))
        for at in range(0, len(messages), BATCH)
    ]
    send_once(bench, server.port, requests)
