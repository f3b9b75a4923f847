"""A server with very many messages that wait: what of its costs grows with their number.

    scripts/bench billion [--quick] [--messages N] [--json FILE]
    scripts/bench billion --messages 100000000 --dir /mnt/large
    scripts/bench billion --hot --messages 100000000
    scripts/bench billion --keys --messages 100000000

A data directory with --messages (10 million, if not told otherwise), each with a body of 200 bytes
and no key, due at random times of 30 days, is made by the server's own parts, which file them as
they file an import; `delayserver check` must find the smaller one sound. Then a real server runs on
it, and the same is measured as on a directory of a million in the same run:

make       messages each second, and what they take on the disk
memory     anonymous memory of the server (RssAnon), some seconds after its start
publish    100,000 in batches of 500, due at random times of the 30 days: the server's processor
           time for each until a checkpoint covers them; the median of five such rounds
look up    1,000 random ones of those that wait, by id, one after the other
cancel     50,000 random ones of those that wait, by id, 500 at a time: processor time as above, the
           median of three rounds
lateness   500 due each second, pulled, beside 1,000 published each second over the 30 days: p99
restart    10,000 more over the 30 days, kill -9 with the last answer: from exec to the first 200 of
           /readyz

With --hot all are due in one hour, which the server has loaded, instead of 30 days: what is
published and cancelled then is of this hour, and a restart loads it. With --keys each has a key of
its own, also of those that are published later. The catalog is synced and mapped, and its keys come
in no order: 100 million take some ten minutes to make. A merge of keys falls into few of the
rounds, and is seen in the note.

The ratios are to the smaller directory. Memory and disk are extrapolated to a billion, and say so:
a straight line through what was measured. Each message needs 275 bytes of disk; the directories are
deleted at the end. 100 million take some minutes to make.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from consumers import pull_on_time
from directories import BATCH_ROWS, Maker
from levels.backlog import allocated_bytes
from levels.bench import (
    BATCH,
    BODY,
    DAY_MS,
    MIB,
    MINUTE_MS,
    SUBJECT,
    Bench,
    Size,
    idle_max_ms,
    latencies_of,
    now_ms,
    publish_ahead,
    random_batches,
    send_once,
    set_latency,
    settled_memory,
    subscribe,
)
from levels.calibration import calibrate_disk
from levels.lateness import BESIDE_BATCH, publish_beside
from levels.opening import open_bench
from load import LoadError, ask_each, http_request
from report import Figure, make_console, make_parser, parse, report
from rich.markup import escape
from servers import ROOT, BenchmarkError, Served, add_directory, demand_space

from delayserver.records.ids import IdCodec
from storage.rows import HOUR_MS

BILLION = 1_000_000_000
MESSAGES = 10_000_000
MESSAGES_QUICK = 20_000
BASE = 1_000_000
BASE_QUICK = 4_000
MESSAGE_BYTES = 300
"""On the disk, at the most."""
KEY_BYTES = 130
"""While its run is merged into another."""
ROOM_BYTES = 2 << 30
"""For the logs of the server, and what it keeps free."""

SPREAD_MS = 30 * DAY_MS
SPREAD_QUICK_MS = 2 * DAY_MS
HOT_OPTIONS = ("--lead-ms", "12h")
"""Whatever hour it is, it is loaded."""
STRETCHES = 10
"""The days are filled three at a time, so that no more files are open at once than a log keeps."""
MAKING_PER_S = 300_000
"""What a slow machine makes: nothing may be due before it is measured."""
AHEAD_MS = 20 * MINUTE_MS

PUBLISHED = 100_000
PUBLISHED_QUICK = 2_000
PUBLISH_ROUNDS = 5
CANCELLED = 50_000
CANCELLED_QUICK = 1_000
CANCEL_ROUNDS = 3
LOOKED_UP = 1_000
LOOKED_UP_QUICK = 100
PER_S = 500
BESIDE_PER_S = 1_000
LATENESS_S = 10
LATENESS_QUICK_S = 1
KILLED = 10_000
KILLED_QUICK = 1_000
FILED_MAX_S = 900.0
START_MAX_S = 900.0
SEED = 11


@dataclass(frozen=True, slots=True)
class Made:
    """A data directory, and some of what waits in it."""

    count: int
    ids: list[str]
    """Of random messages, in random order."""
    from_ms: int
    to_ms: int
    """Between these moments all is due."""


def make(
    bench: Bench, directory: Path, count: int, sampled: int, *, is_hot: bool, keyed: bool
) -> Made:
    """A data directory in which so many wait; its memory does not grow with them.

    Each frame has as many rows, however many messages there are: of all BATCH_ROWS that are filed
    at once, those that belong to one file. `sampled` ids, or fewer, are returned."""
    spread_ms = bench.size.of(quick=SPREAD_QUICK_MS, usual=SPREAD_MS)
    from_ms = now_ms() + AHEAD_MS + count * 1000 // MAKING_PER_S
    if is_hot:
        from_ms, spread_ms = (from_ms // HOUR_MS + 1) * HOUR_MS, HOUR_MS
    step_ms = spread_ms // STRETCHES
    rng = np.random.default_rng(SEED)
    maker = Maker(directory, msgspec.json.encode(BODY), (SUBJECT,))
    maker.define()
    codec = IdCodec(maker.identity.shard, maker.identity.id_secret)
    ids: list[str] = []
    made = 0
    for number in range(STRETCHES):
        until = count * (number + 1) // STRETCHES
        begin_ms = from_ms + number * step_ms
        while made < until:
            rows = min(BATCH_ROWS, until - made)
            dues_ms = rng.integers(begin_ms, begin_ms + step_ms, rows)
            filed = maker.publish(dues_ms, now_ms(), keyed=keyed)
            made += rows
            some = filed[rng.choice(rows, rows * sampled // count, replace=False)]
            due_ms, seqs = some["due_ms"].astype(np.int64), some["seq"].astype(np.uint64)
            ids += codec.texts(codec.encode_many(due_ms, seqs))
            bench.share(made / count)
    maker.close()
    return Made(count, [ids[at] for at in rng.permutation(len(ids))], from_ms, from_ms + spread_ms)


def check(directory: Path) -> int:
    """Exit status of `delayserver check`."""
    command = [sys.executable, "-m", "delayserver", "check", "--data-dir", str(directory), "--json"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode


class Pending:
    """The figures of one size."""

    def __init__(
        self, bench: Bench, count: int, *, is_checked: bool, is_hot: bool, keyed: bool
    ) -> None:
        self._bench = bench
        self._count = count
        self._is_checked = is_checked
        self._is_hot = is_hot
        self._keyed = keyed
        self._keys_sent = 0
        self._options = HOT_OPTIONS if is_hot else ()
        self._name = f"pending-{count}"
        self._directory = bench.directory / self._name

    def measure(self) -> None:
        """All of it; the directory is deleted."""
        try:
            self._measure()
        finally:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _measure(self) -> None:
        bench, of = self._bench, self._bench.size.of
        looked_up = of(quick=LOOKED_UP_QUICK, usual=LOOKED_UP)
        cancelled = of(quick=CANCELLED_QUICK, usual=CANCELLED)
        made = self._make(looked_up + CANCEL_ROUNDS * cancelled)
        asked = made.ids[:looked_up]
        # A few less than asked for, where they are drawn from many stretches.
        each = (len(made.ids) - looked_up) // CANCEL_ROUNDS // BATCH * BATCH
        starts = range(looked_up, looked_up + CANCEL_ROUNDS * each, each)
        ended = [made.ids[at : at + each] for at in starts]
        published = of(quick=PUBLISHED_QUICK, usual=PUBLISHED)
        killed = of(quick=KILLED_QUICK, usual=KILLED)
        with bench.server(self._name, *self._options, start_max_s=START_MAX_S) as server:
            self._step("memory")
            figure = self._figure("memory", settled_memory(bench, server).anonymous / MIB, "MB")
            figure.note = f"RssAnon; first start in {server.ready_s:.2f} s"
            self._publish(server, made, published)
            self._look_up(server, asked)
            self._cancel(server, ended)
            beside = self._late(server, made)
            self._step(f"publish {killed:,}, kill -9")
            send_once(bench, server.port, self._requests(made, killed), is_patient=True)
            server.kill()
        self._step("restart")
        with bench.server(self._name, *self._options, start_max_s=START_MAX_S) as server:
            figure = self._figure("restart after kill -9", server.ready_s, "s")
            figure.note = f"processor time until then: {server.ready_cpu_s:.2f} s"
            server.wait_until_filed(FILED_MAX_S)
            stats = server.stats()
            pending = stats["pending_loaded"] + stats["pending_later"]
            changed = PUBLISH_ROUNDS * published - CANCEL_ROUNDS * each
            wanted = self._count + changed + beside + killed
            figure.expect("pending", pending, wanted)
            server.kill()

    def _step(self, what: str) -> None:
        self._bench.step(f"{self._count:,} pending: {what}")

    def _figure(self, what: str, value: float, unit: str) -> Figure:
        case = f"{what}, {self._count:,} pending"
        return self._bench.add(Figure(case, value, unit, group=what))

    def _make(self, sampled: int) -> Made:
        self._step("make them")
        self._directory.mkdir()
        begun_at = time.monotonic()
        made = make(
            self._bench,
            self._directory,
            self._count,
            sampled,
            is_hot=self._is_hot,
            keyed=self._keyed,
        )
        rate = self._count / (time.monotonic() - begun_at)
        self._figure(
            "make", rate, "msg/s"
        ).note = "filed by the server's own parts, not by a server"
        disk = self._figure("disk", allocated_bytes(self._directory) / self._count, "B/msg")
        files = sum(1 for _ in (self._directory / "schedule").iterdir())
        disk.note = f"blocks of all files, {files:,} of them in schedule/"
        if self._is_checked:
            self._step("delayserver check")
            disk.expect("status of delayserver check", check(self._directory), 0)
        return made

    def _requests(self, made: Made, count: int) -> list[bytes]:
        """Messages at random times of the same days, each request BATCH of them."""
        batches = random_batches(made.from_ms, made.to_ms, count=count, keyed=self._keyed)
        if not self._keyed:
            return batches.requests
        first, self._keys_sent = self._keys_sent, self._keys_sent + count
        numbers = np.arange(first, first + count).reshape(-1, BATCH).tolist()
        return [
            request % tuple(keys) for request, keys in zip(batches.requests, numbers, strict=True)
        ]

    def _publish(self, server: Served, made: Made, count: int) -> None:
        self._step(f"publish {count:,}, {PUBLISH_ROUNDS} times")
        rounds = [self._requests(made, count) for _ in range(PUBLISH_ROUNDS)]
        self._in_rounds("publish", server, rounds, count)

    def _look_up(self, server: Served, ids: list[str]) -> None:
        self._step(f"look up {len(ids):,}")
        latency_ms = ask_each(server.port, "GET", ids)
        figure = self._figure("look up", float(np.median(latency_ms)), "ms")
        set_latency(figure, latency_ms)
        figure.note = f"{len(ids):,} random ones by id, one after the other"

    def _cancel(self, server: Served, rounds: list[list[str]]) -> None:
        count = len(rounds[0])
        self._step(f"cancel {count:,}, {len(rounds)} times")
        requests = [
            [
                http_request(
                    "POST",
                    "/v1/messages/cancel",
                    msgspec.json.encode({"ids": ids[at : at + BATCH]}),
                )
                for at in range(0, count, BATCH)
            ]
            for ids in rounds
        ]
        figure = self._in_rounds("cancel", server, requests, count)
        figure.expect("cancelled", server.stats()["cancelled"], len(rounds) * count)

    def _in_rounds(
        self, what: str, server: Served, rounds: list[list[bytes]], count: int
    ) -> Figure:
        """Processor time for each of the `count` messages of a round: the middle one of all, since
        what a checkpoint or a merge of keys takes falls into some of them only."""
        cpu_us, sent = [], []
        for requests in rounds:
            cpu_s = server.cpu_s()
            sent += send_once(self._bench, server.port, requests, is_patient=True)
            server.wait_until_filed(FILED_MAX_S)
            cpu_us.append((server.cpu_s() - cpu_s) / count * 1e6)
        figure = self._figure(what, float(np.median(cpu_us)), "µs CPU")
        set_latency(figure, latencies_of(sent))
        each = ", ".join(f"{one:.1f}" for one in cpu_us)
        figure.note = f"rounds {each}; {BATCH} at a time, whose latencies these are"
        return figure

    def _late(self, server: Served, made: Made) -> int:
        """Lateness; returns how many messages were published beside it."""
        self._step(f"{PER_S:,} due each second")
        bench, subject = self._bench, "bench.late"
        seconds = bench.size.of(quick=LATENESS_QUICK_S, usual=LATENESS_S)
        count = PER_S * seconds
        subscribe(server, subject, {"type": "pull"})
        idle_ms = idle_max_ms(count)
        receiving = bench.pool.submit(pull_on_time, server.port, subject, count, idle_ms)
        due_from_ms = publish_ahead(bench, server, subject, PER_S, count)
        batches = random_batches(made.from_ms, made.to_ms, size=BESIDE_BATCH)
        beside = publish_beside(bench, server, due_from_ms, BESIDE_PER_S, seconds, batches)
        assert beside is not None
        received = receiving.result()
        if not received.ids:
            raise BenchmarkError("nothing was delivered")
        p99_ms = float(np.percentile(received.lateness_ms, 99))
        figure = self._figure("lateness p99", p99_ms, "ms")
        set_latency(figure, received.lateness_ms)
        figure.note = f"{PER_S:,} due each second, {BESIDE_PER_S:,} published"
        figure.expect("received", len(set(received.ids)), count)
        figure.expect("early", sum(late_ms < 0 for late_ms in received.lateness_ms), 0)
        return beside.result().messages


# ---- the command -------------------------------------------------------------------------------


def add_ratios(figures: list[Figure], base: int) -> None:
    """Each figure in multiples of that of the smaller directory."""
    ending = f", {base:,} pending"
    known = {figure.group: figure.value for figure in figures if figure.case.endswith(ending)}
    for figure in figures:
        if known.get(figure.group):
            figure.ratios[f"{base:,}"] = figure.value / known[figure.group]


def extrapolated(figures: list[Figure], base: int, count: int) -> list[Figure]:
    """What a straight line through two sizes says of a billion."""
    values = {figure.case: figure.value for figure in figures}
    found = []
    small, large = (values.get(f"memory, {size:,} pending") for size in (base, count))
    if small is not None and large is not None:
        slope = max(0.0, (large - small) / (count - base))
        value = large + slope * (BILLION - count)
        found.append(_extrapolated("memory", value, "MB", f"from {base:,} and {count:,}"))
    if (disk := values.get(f"disk, {count:,} pending")) is not None:
        found.append(_extrapolated("disk", disk * BILLION / 1e9, "GB", f"from {count:,}"))
    return found


def _extrapolated(what: str, value: float, unit: str, whence: str) -> Figure:
    figure = Figure(f"{what}, {BILLION:,} pending (extrapolated)", value, unit, group=what)
    figure.note = f"not measured: a straight line {whence}"
    return figure


def main() -> int:
    """Exit status 1: counts were wrong, or a size could not be measured."""
    parser = make_parser("billion", __doc__)
    parser.add_argument(
        "--messages",
        type=int,
        metavar="N",
        default=MESSAGES,
        help=f"that wait (default: {MESSAGES:,}; more than {BASE:,} to have a ratio)",
    )
    parser.add_argument("--hot", action="store_true", help="all are due in one hour")
    parser.add_argument("--keys", action="store_true", help="each has a key of its own")
    add_directory(parser)
    options = parse(parser, messages=MESSAGES_QUICK)
    size = Size.QUICK if options.quick else Size.USUAL
    count, base = options.messages, size.of(quick=BASE_QUICK, usual=BASE)
    sizes = [base, count] if base < count else [count]
    if count < BASE_QUICK:
        parser.error(f"--messages: {BASE_QUICK:,} at the least")
    try:
        each_bytes = MESSAGE_BYTES + KEY_BYTES * options.keys
        demand_space(options.dir, ROOM_BYTES + count * each_bytes)
    except BenchmarkError as error:
        parser.error(str(error))
    console = make_console()
    complete = True
    with open_bench(options.dir, size, console) as bench:
        calibrate_disk(bench)
        for number, each in enumerate(sizes):
            try:
                Pending(
                    bench,
                    each,
                    is_checked=not number,
                    is_hot=options.hot,
                    keyed=options.keys,
                ).measure()
            except (BenchmarkError, LoadError, OSError) as error:
                console.print(f"[bold red]{each:,} failed:[/]", escape(str(error)))
                complete = False
    figures = bench.figures
    if len(sizes) > 1:
        add_ratios(figures, base)
        if not options.hot:
            figures += extrapolated(figures, base, count)
    where = " in one hour" if options.hot else ""
    where += ", with keys" if options.keys else ""
    return report(
        options,
        "billion",
        f"{count:,} messages that wait{where}",
        figures,
        console,
        complete=complete,
    )


if __name__ == "__main__":
    sys.exit(main())
