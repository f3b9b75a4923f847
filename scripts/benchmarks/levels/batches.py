"""Batches of 500: JSON and MessagePack, and with keys JSON and Arrow by turns."""

from load import ARROW, JSON, MSGPACK, ConnectionResult, LoadConnection

from levels.bench import (
    BATCH,
    IN_FLIGHT_EACH,
    KEYS_EACH,
    PUBLISHERS,
    Bench,
    batches_tomorrow,
    latencies_of,
    publish,
    rate_of,
)

BATCH_S = 3.0
LEVEL = 500_000
NOTE = f"{PUBLISHERS * IN_FLIGHT_EACH} in flight; latencies are those of a batch"
TURNS = 3


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
            figure.note = NOTE
            figure.expect("accepted", server.stats()["accepted"] - before, count)
    batch_with_keys(bench)


def batch_with_keys(bench: Bench) -> None:
    """The same messages as JSON and as Arrow, to one server by turns."""
    names = {"JSON": JSON, "Arrow": ARROW}
    turns: dict[str, list[list[ConnectionResult]]] = {name: [] for name in names}
    cpu_s = dict.fromkeys(names, 0.0)
    with bench.server("batch-keys") as server:
        requests = {
            name: batches_tomorrow(content_type=content_type, keyed=True)
            for name, content_type in names.items()
        }
        with LoadConnection(server.port) as connection:
            # One before there was Arrow may be compared with this.
            probe = requests["Arrow"].request(0, 100 * KEYS_EACH)
            if connection.request(probe)[0] != 200:
                return
        before = server.stats()["accepted"]
        for turn in range(TURNS * len(names)):
            name = list(names)[turn % len(names)]
            bench.step(f"batch: {name}, with keys")
            began_s = server.cpu_s()
            seconds = bench.size.of(quick=0.1, usual=BATCH_S)
            first = turn * PUBLISHERS
            sent = publish(bench, server.port, requests[name], seconds=seconds, first_process=first)
            turns[name].append(sent)
            cpu_s[name] += server.cpu_s() - began_s
        accepted = server.stats()["accepted"] - before
    figures, counted = [], 0
    for name, of_name in turns.items():
        count = sum(one.messages for sent in of_name for one in sent)
        counted += count
        latencies = [ms for sent in of_name for ms in latencies_of(sent)]
        rate = sum(map(rate_of, of_name)) / TURNS
        figure = bench.add_rate(f"batch of {BATCH}, keys, {name}", rate, "msg/s", latencies)
        figure.cpu_us = cpu_s[name] / count * 1e6
        figure.note = NOTE
        figures.append(figure)
    as_json, as_arrow = figures
    as_arrow.ratios["JSON"] = as_arrow.value / as_json.value
    as_arrow.expect("accepted", accepted, counted)
