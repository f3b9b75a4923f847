"""What it costs that messages are due far apart: as many over an hour, and over two years.

    scripts/bench spread [--quick] [--messages N] [--keys] [--only SPREADS] [--json FILE]

For each spread (1 h, 24 h, 30 d, 2 y) a server process of its own, on a new data directory, with
the settings of an operator. The --messages are due at random times of the spread, from 5 minutes
on, with or without --keys.

publish      batches of 500, eight in flight from two processes, each message sent once. Beside them
             one single publish every 5 ms. What is answered 503 is sent again, and counted.
filed        from the last answer until everything is in the files of its hours or days (of the
             stats: `unfiled_bytes` is 0), and until a checkpoint covers it. The defaults alone make
             that 1 and 5 s at the most. The processor time is that of publishing and filing.
files        how many there are in schedule/
look up      of random messages by id, one after the other; then as many cancels, one by one
restart      as many messages once more, and kill -9 with the last answer: what was not filed is
             filed by the start. From exec to the first 200 of /readyz, beside an empty directory.
load         the fullest file of an hour, by the loader alone, in this process

steady       an hour as it is when 400 messages a second are due within 30 days of their publish:
             1.4 M rows, of which 12 % came one by one in the last days and have a frame each, the
             rest in long frames, as a day that was split leaves them. By the loader alone; beside
             it the same with long frames only, and a tenth of it with a frame for each row.

The ratios are to the figure of 24 h, that of an empty directory, or that of long frames of this
run: compare them, not the times. Counts are checked: what was published is pending behind the
restart.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

import msgspec
import numpy as np
from levels.bench import (
    BATCH,
    BODY,
    DAY_MS,
    HOUR_MS,
    MINUTE_MS,
    Bench,
    Size,
    latencies_of,
    now_ms,
    rate_of,
    send_once,
    set_latency,
)
from levels.calibration import calibrate_disk
from levels.opening import open_bench
from load import ConnectionResult, LoadConnection, LoadError, ask_each, http_request
from loading import time_fullest, time_load, write_hour
from report import Figure, make_console, make_parser, parse, report
from rich.markup import escape
from servers import BenchmarkError, Served, add_directory, demand_space

SPREADS_MS = {
    "1 h": HOUR_MS,
    "24 h": DAY_MS,
    "30 d": 30 * DAY_MS,
    "2 y": 730 * DAY_MS,
}
BASE = "24 h"
SUBJECT = "bench.spread"
MESSAGES = 200_000
MESSAGES_QUICK = 1_000
ONLY_QUICK = "24 h,2 y,steady"
MESSAGE_BYTES = 1_000
"""Room for one of them: log, file and key, and once more."""
ROOM_BYTES = 2 << 30
FIRST_DUE_MS = 5 * MINUTE_MS
SINGLE_EACH_S = 0.05
ASKED = 1_000
ASKED_QUICK = 100
"""Look-ups, and cancels."""
POLL_S = 0.01
FILED_MAX_S = 900.0
START_MAX_S = 900.0
SEED = 7

STEADY_ROWS = 1_400_000
STEADY_ROWS_QUICK = 14_000
SINGLE_SHARE = 0.12
LONG_ROWS = 65_536


class SpreadMessages:
    """Messages that are due at random times of a spread; no two runs of one seed differ."""

    def __init__(self, spread_ms: int, *, keyed: bool) -> None:
        self._spread_ms = spread_ms
        self._keyed = keyed
        self._rng = np.random.default_rng(SEED)
        self._made = 0

    def _documents(self, count: int) -> list[dict[str, object]]:
        dues_ms = now_ms() + self._rng.integers(FIRST_DUE_MS, self._spread_ms, count)
        documents: list[dict[str, object]] = [
            {"subject": SUBJECT, "body": BODY, "deliver_at": due_ms} for due_ms in dues_ms.tolist()
        ]
        if self._keyed:
            for number, document in enumerate(documents, self._made):
                document["key"] = f"{number:012d}"
        self._made += count
        return documents

    def batches(self, count: int) -> list[bytes]:
        """So many messages, as requests of BATCH."""
        documents = self._documents(count)
        return [
            _post("/v1/messages/batch", documents[at : at + BATCH]) for at in range(0, count, BATCH)
        ]

    def singles(self, count: int) -> list[bytes]:
        """So many messages, as a request each."""
        return [_post("/v1/messages", document) for document in self._documents(count)]


def _post(path: str, document: object) -> bytes:
    return http_request("POST", path, msgspec.json.encode(document))


class Singles:
    """Publishes one message at a time, at an even rate, from a thread, until the block ends."""

    def __init__(self, port: int, requests: Sequence[bytes]) -> None:
        self._port = port
        self._requests = requests
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._publish)
        self._error: Exception | None = None
        self.answered: list[tuple[float, float]] = []
        """When each was to be sent (CLOCK_MONOTONIC), and ms from then until it was answered."""

    def __enter__(self) -> Singles:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def since(self, moment: float) -> list[float]:
        """The latencies of those that were to be sent from then on, in ms."""
        return [ms for turn_at, ms in self.answered if turn_at >= moment]

    def _publish(self) -> None:
        try:
            with LoadConnection(self._port) as connection:
                begun_at = time.monotonic()
                for number, request in enumerate(self._requests):
                    turn_at = begun_at + number * SINGLE_EACH_S
                    if self._ended.wait(max(0.0, turn_at - time.monotonic())):
                        return
                    connection.send(request)
                    connection.receive_patiently(request)
                    self.answered.append((turn_at, (time.monotonic() - turn_at) * 1000))
        except (LoadError, OSError) as error:
            self._error = error


@dataclass(frozen=True, slots=True)
class FiledAfter:
    """How long after the last answer."""

    filed_s: float
    durable_s: float
    """Until a checkpoint covered it."""


def watch_filing(server: Served, answered_at: float) -> FiledAfter:
    """Until everything that was accepted is filed, and behind a checkpoint."""
    filed_s = None
    while (passed_s := time.monotonic() - answered_at) < FILED_MAX_S:
        stats = server.stats()
        if filed_s is None and not stats["unfiled_bytes"]:
            filed_s = passed_s
        if stats["checkpoint_seq"] == stats["last_seq"]:
            return FiledAfter(passed_s if filed_s is None else filed_s, passed_s)
        time.sleep(POLL_S)
    raise BenchmarkError(f"not everything was filed within {FILED_MAX_S:.0f} s")


# ---- one spread --------------------------------------------------------------------------------


class Spread:
    """The figures of one spread."""

    def __init__(self, bench: Bench, name: str, count: int, *, keyed: bool) -> None:
        self._bench = bench
        self._name = name
        self._count = count
        self._directory = f"spread-{name.replace(' ', '')}"
        self._messages = SpreadMessages(SPREADS_MS[name], keyed=keyed)
        self._asked = min(bench.size.of(quick=ASKED_QUICK, usual=ASKED), count)
        self._rng = np.random.default_rng(SEED)

    def measure(self, empty_s: float) -> None:
        """`empty_s`: the restart of an empty directory."""
        bench, count = self._bench, self._count
        with bench.server(self._directory) as server:
            cpu_s = server.cpu_s()
            sent, singles = self._publish(server)
            accepted = count + singles
            after = watch_filing(server, max(one.ended_at for one in sent))
            cpu_us = (server.cpu_s() - cpu_s) / accepted * 1e6
            figure = self._figure("filed", after.filed_s, "s")
            figure.cpu_us = cpu_us
            figure.note = "from the last answer; processor time of publishing and filing"
            figure.expect("accepted", server.stats()["accepted"], accepted)
            self._figure("behind a checkpoint", after.durable_s, "s")
            self._count_files()
            self._ask(server, sent)
            unfiled_bytes = self._publish_and_kill(server)
        bench.step(f"{self._name}: restart")
        with bench.server(self._directory, start_max_s=START_MAX_S) as server:
            figure = self._figure("restart after kill -9", server.ready_s, "s")
            figure.ratios["empty"] = server.ready_s / empty_s
            figure.note = (
                f"{unfiled_bytes / 1e6:.0f} MB were not filed; processor time until then: "
                f"{server.ready_cpu_s:.2f} s"
            )
            server.wait_until_filed(FILED_MAX_S)
            stats = server.stats()
            pending = stats["pending_loaded"] + stats["pending_later"]
            figure.expect("pending", pending, accepted + count - self._asked)
            server.kill()
        self._load()
        shutil.rmtree(bench.directory / self._directory)

    def _figure(self, what: str, value: float, unit: str) -> Figure:
        return self._bench.add(Figure(f"{self._name}: {what}", value, unit, group=what))

    def _publish(self, server: Served) -> tuple[list[ConnectionResult], int]:
        """What was sent in batches, and how many messages one by one."""
        self._bench.step(f"{self._name}: publish {self._count:,}")
        batches = self._messages.batches(self._count)
        singles = Singles(server.port, self._messages.singles(self._count))
        with singles:
            sent = send_once(self._bench, server.port, batches, is_patient=True, keep_answers=True)
        figure = self._figure("publish", rate_of(sent), "msg/s")
        set_latency(figure, latencies_of(sent))
        refused = sum(one.refused for one in sent)
        figure.note = f"latencies are those of a batch of {BATCH}; {refused:,} answers of 503"
        began_at = min(one.began_at for one in sent)
        # A quick run is over before one is sent.
        beside_ms = singles.since(began_at) or singles.since(0)
        figure = self._figure(
            "p99 of single publishes beside", float(np.percentile(beside_ms, 99)), "ms"
        )
        set_latency(figure, beside_ms)
        figure.note = f"{len(beside_ms):,} of them"
        return sent, len(singles.answered)

    def _count_files(self) -> None:
        directory = self._bench.directory / self._directory / "schedule"
        sizes = [path.stat().st_size for path in directory.glob("*.schedule")]
        figure = self._figure("files in schedule/", len(sizes), "files")
        figure.note = f"{sum(sizes) / 1e6:,.0f} MB in all"

    def _ask(self, server: Served, sent: list[ConnectionResult]) -> None:
        """Look up and cancel random messages, one by one."""
        self._bench.step(f"{self._name}: look up and cancel")
        ids = [
            message_id
            for one in sent
            for answer in one.answers
            for message_id in msgspec.json.decode(answer)["ids"]
        ]
        for what, method in (("look up", "GET"), ("cancel", "DELETE")):
            some = [ids[at] for at in self._rng.choice(len(ids), self._asked, replace=False)]
            latency_ms = ask_each(server.port, method, some)
            figure = self._figure(what, float(np.median(latency_ms)), "ms")
            set_latency(figure, latency_ms)
            figure.note = f"{self._asked:,} by id, one after the other"
        figure.expect("cancelled", server.stats()["cancelled"], self._asked)

    def _publish_and_kill(self, server: Served) -> int:
        """As many messages again, and kill -9; returns how many bytes were not filed then."""
        self._bench.step(f"{self._name}: publish {self._count:,}, kill -9")
        batches = self._messages.batches(self._count)
        send_once(self._bench, server.port, batches, is_patient=True)
        unfiled_bytes: int = server.stats()["unfiled_bytes"]
        server.kill()
        return unfiled_bytes

    def _load(self) -> None:
        self._bench.step(f"{self._name}: load an hour")
        timed = time_fullest(self._bench.directory / self._directory)
        if timed is not None:
            figure = self._figure("load an hour", timed.row_us, "µs/row")
            figure.note = f"{timed.rows:,} rows in {timed.seconds * 1000:,.1f} ms, loader alone"


def restart_empty(bench: Bench) -> Figure:
    """The restart of a directory in which nothing is."""
    bench.step("restart of an empty directory")
    with bench.server("empty") as server:
        server.kill()
    with bench.server("empty") as server:
        figure = bench.add(Figure("restart, empty", server.ready_s, "s", group="restart"))
        figure.note = f"processor time until then: {server.ready_cpu_s:.2f} s"
        server.kill()
    return figure


# ---- an hour of the steady state ---------------------------------------------------------------


def steady(bench: Bench, rows: int) -> None:
    """Load hours whose rows stand in frames of different lengths."""
    hour = now_ms() // HOUR_MS + 24
    singles = int(rows * SINGLE_SHARE)
    kinds = {
        "long frames": long_frames(rows),
        "steady state": [*long_frames(rows - singles), *repeat(1, singles)],
        "a frame for each row": [1] * (rows // 10),
    }
    base_us: float | None = None
    for name, frames in kinds.items():
        bench.step(f"an hour of {sum(frames):,} rows: {name}")
        directory = bench.directory / "steady"
        directory.mkdir()
        write_hour(directory, hour, msgspec.json.encode(BODY), frames)
        timed = time_load(directory, hour)
        shutil.rmtree(directory)
        base_us = base_us or timed.row_us
        case = f"load an hour of {sum(frames):,} rows, {name}"
        figure = bench.add(Figure(case, timed.row_us, "µs/row", group="steady"))
        figure.ratios["long frames"] = timed.row_us / base_us
        figure.note = f"{timed.seconds:.2f} s, {len(frames):,} frames, loader alone"
        figure.expect("rows", timed.rows, sum(frames))


def long_frames(rows: int) -> list[int]:
    """Frames of LONG_ROWS, and one with the rest."""
    whole, rest = divmod(rows, LONG_ROWS)
    return [LONG_ROWS] * whole + [rest] * bool(rest)


# ---- the command -------------------------------------------------------------------------------


def add_ratios(figures: list[Figure]) -> None:
    """Each figure of a spread in multiples of that of the BASE."""
    base = {figure.group: figure.value for figure in figures if figure.case.startswith(f"{BASE}: ")}
    for figure in figures:
        name, separator, what = figure.case.partition(": ")
        if separator and name in SPREADS_MS and base.get(what):
            figure.ratios[BASE] = figure.value / base[what]


def main() -> int:
    """Exit status 1: counts were wrong, or a spread could not be measured."""
    parser = make_parser("spread", __doc__)
    parser.add_argument(
        "--messages",
        type=int,
        metavar="N",
        default=MESSAGES,
        help=f"for each spread, in whole batches of {BATCH} (default: {MESSAGES:,})",
    )
    parser.add_argument("--keys", action="store_true", help="each message under a key of its own")
    parser.add_argument(
        "--only", metavar="SPREADS", help=f"of {','.join(SPREADS_MS)},steady; by commas"
    )
    add_directory(parser)
    options = parse(parser, messages=MESSAGES_QUICK, only=ONLY_QUICK)
    known = [*SPREADS_MS, "steady"]
    chosen = options.only.split(",") if options.only else known
    if unknown := set(chosen) - set(known):
        parser.error(f"no such spread: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    if options.messages < BATCH or options.messages % BATCH:
        parser.error(f"--messages: a multiple of {BATCH}")
    size = Size.QUICK if options.quick else Size.USUAL
    try:
        demand_space(options.dir, ROOM_BYTES + options.messages * MESSAGE_BYTES)
    except BenchmarkError as error:
        parser.error(str(error))
    console = make_console()
    complete = True
    with open_bench(options.dir, size, console) as bench:
        calibrate_disk(bench)
        empty_s = restart_empty(bench).value
        for name in known:
            if name not in chosen:
                continue
            try:
                if name == "steady":
                    steady(bench, size.of(quick=STEADY_ROWS_QUICK, usual=STEADY_ROWS))
                else:
                    Spread(bench, name, options.messages, keyed=options.keys).measure(empty_s)
            except (BenchmarkError, LoadError, OSError) as error:
                console.print(f"[bold red]{name} failed:[/]", escape(str(error)))
                complete = False
    add_ratios(bench.figures)
    title = f"{options.messages:,} messages over different spreads"
    return report(options, "spread", title, bench.figures, console, complete=complete)


if __name__ == "__main__":
    sys.exit(main())
