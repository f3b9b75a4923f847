"""Pull and acknowledge what is due."""

import time

from consumers import pull_all
from load import make_batches, start_together
from servers import BenchmarkError

from levels.bench import BATCH, BODY, DISTINCT, Bench, now_ms, publish, subscribe

LEVEL = 200_000
PULL_COUNT = 100_000
PULL_COUNT_QUICK = 5_000
PULL_AHEAD_S = 8
PULL_AHEAD_QUICK_S = 3
PULL_MAX_S = 8.0
PULL_PROCESSES = 2


def pull(bench: Bench) -> None:
    """Pull and acknowledge what is due."""
    _pull(
        bench,
        "filed",
        "published before they were due",
        bench.size.of(quick=PULL_AHEAD_QUICK_S, usual=PULL_AHEAD_S),
    )
    _pull(bench, "at once", "due when they were published", 0)


def _pull(bench: Bench, name: str, what: str, ahead_s: int) -> None:
    case = f"pull and ack, {BATCH} at a time, {name}"
    subject = name.replace(" ", "-")
    count = bench.size.of(quick=PULL_COUNT_QUICK, usual=PULL_COUNT)
    with bench.server(f"pull-{subject}") as server:
        bench.step(f"pull: publish {count:,}, {what}")
        subscribe(server, subject, {"type": "pull", "lease": "5m"})
        due_ms = now_ms() + ahead_s * 1000
        batches = make_batches(subject, [due_ms] * DISTINCT, BODY, BATCH)
        publish(bench, server.port, batches, count=count)
        if ahead_s and now_ms() > due_ms:
            raise BenchmarkError(f"publishing {count:,} took more than {ahead_s} s")
        server.wait_until_filed()
        time.sleep(max(0, due_ms + 500 - now_ms()) / 1000)

        bench.step(f"pull: {PULL_PROCESSES} consumers, {BATCH} at a time, {what}")
        start_at, cpu_s = start_together(), server.cpu_s()
        futures = [
            bench.pool.submit(pull_all, server.port, subject, start_at, BATCH, PULL_MAX_S)
            for _ in range(PULL_PROCESSES)
        ]
        consumed = [future.result() for future in futures]
        seconds = max(one.ended_at for one in consumed) - min(one.began_at for one in consumed)
        ids = [message_id for one in consumed for message_id in one.ids]
        figure = bench.add_rate(case, len(ids) / seconds, "msg/s", [])
        figure.cpu_us = (server.cpu_s() - cpu_s) / len(ids) * 1e6
        figure.demand(f"≥ {LEVEL:,}/s", figure.value >= LEVEL)
        figure.note = f"{what}; {PULL_PROCESSES} consumers, answered acks"
        if seconds < PULL_MAX_S:
            figure.expect("received", len(ids), count)
        else:
            figure.note += f"; {count - len(ids):,} were left after {PULL_MAX_S:.0f} s"
        figure.expect("received twice", len(ids) - len(set(ids)), 0)
        figure.expect("acknowledged", sum(one.acked for one in consumed), len(ids))
        figure.expect("delivered, as the server counts", server.stats()["delivered"], len(ids))
