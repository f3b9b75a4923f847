"""Batches of 500, JSON and MessagePack."""

from load import JSON, MSGPACK

from levels.bench import (
    BATCH,
    IN_FLIGHT_EACH,
    PUBLISHERS,
    Bench,
    batches_tomorrow,
    latencies_of,
    publish,
    rate_of,
)

BATCH_S = 3.0
LEVEL = 500_000


def batch(bench: Bench) -> None:
    """Durable batches."""
    with bench.server("batch") as server:
        for name, content_type in (("JSON", JSON), ("msgpack", MSGPACK)):
            bench.step(f"batch: {name}")
            batches = batches_tomorrow(content_type=content_type)
            before, cpu_s = server.stats()["accepted"], server.cpu_s()
            seconds = bench.size.of(quick=0.2, usual=BATCH_S)
            sent = publish(bench, server.port, batches, seconds=seconds)
            count = sum(one.messages for one in sent)
            figure = bench.add_rate(
                f"batch of {BATCH}, {name}", rate_of(sent), "msg/s", latencies_of(sent)
            )
            figure.cpu_us = (server.cpu_s() - cpu_s) / count * 1e6
            figure.demand(f"≥ {LEVEL:,}/s", figure.value >= LEVEL)
            figure.note = f"{PUBLISHERS * IN_FLIGHT_EACH} in flight; latencies are those of a batch"
            figure.expect("accepted", server.stats()["accepted"] - before, count)
