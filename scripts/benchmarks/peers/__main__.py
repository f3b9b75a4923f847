"""The delay server and the systems that engineers would use instead, side by side in one run.

    scripts/bench peers [--quick] [--only NAMES] [--pending N] [--seconds S] [--json FILE]
                        [--plot FILE.png] [--dir DIRECTORY]

Each is started on loopback with a new directory on the same disk, set so that an answer means: on
the disk. The same load for all, from one generator process, which shares the machine's cores:

publish    messages of 200 bytes that are due tomorrow, each answered on its own: with 1, 64, 128
           and 512 in flight. Rate, and the latency of 64.
cancel     messages that wait, by their key, 64 in flight, each answered when it is durable; of
           those that have such a call.
pending    what a waiting message costs in memory (anonymous and shared) and on the disk, from
           --pending messages; then kill -9, and the time until a client is served again.
lateness   2,000 messages a second for 5 seconds, each due 3 seconds after it is published; a
           consumer process receives and acknowledges them. Receipt less due time.

Those that are not installed are named, and the others are measured.

Below each figure stands who is ahead and by which factor: "we", or the peer ("ahead"). How each
peer is used stands at the head of its module, in scripts/benchmarks/peers.
"""

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from levels.calibration import LONG_S, QUICK_S, busy_percent, sync_times_ms
from report import Figure, add_options, make_console, new_drawing, parse, write_json
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from servers import add_directory, disk_directory

from delayserver.cli.demo.process import free_ports
from peers.base import ClosedLoop, ClosedLoopResult, Peer, PeerError, cancel, consume, publish, run
from peers.beanstalkd import Beanstalkd
from peers.bullmq import BullMQ
from peers.ours import ClientLibrary, DelayServer
from peers.postgresql import PostgreSQL
from peers.rabbitmq import RabbitMQ
from peers.redis import RedisSortedSet

PEERS: tuple[type[Peer], ...] = (
    DelayServer,
    ClientLibrary,
    RedisSortedSet,
    PostgreSQL,
    RabbitMQ,
    BullMQ,
    Beanstalkd,
)
DAY_MS = 86_400_000
IN_FLIGHT = 64
MORE = (128, 512)


@dataclass(frozen=True, slots=True)
class Amounts:
    """How much of each load there is."""

    publish_s: float
    pending: int
    cancels: int
    warm_s: float
    pace_per_s: int
    pace_s: int
    delay_ms: int
    settle_s: float


USUAL = Amounts(
    publish_s=4.0,
    pending=100_000,
    cancels=40_000,
    warm_s=1.0,
    pace_per_s=2_000,
    pace_s=5,
    delay_ms=3_000,
    settle_s=1.5,
)
QUICK = Amounts(
    publish_s=0.2,
    pending=1_000,
    cancels=1_000,
    warm_s=0.1,
    pace_per_s=200,
    pace_s=1,
    delay_ms=1_500,
    settle_s=0.1,
)


@dataclass(slots=True)
class PeerFigures:
    """What was measured of one peer."""

    name: str
    durability: str
    one_per_s: float = 0.0
    many_per_s: float = 0.0
    many_128_per_s: float = 0.0
    many_512_per_s: float = 0.0
    cancel_per_s: float = 0.0
    many_p99_ms: float = 0.0
    memory_bytes: float = 0.0
    disk_bytes: float = 0.0
    restart_s: float = 0.0
    late_p50_ms: float = 0.0
    late_p99_ms: float = 0.0
    failed: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    """One figure of the table."""

    field: str
    title: str
    more_is_better: bool


COLUMNS = (
    Column("one_per_s", "publish/s, 1 in flight", True),
    Column("many_per_s", f"publish/s, {IN_FLIGHT} in flight", True),
    Column("many_p99_ms", f"p99 ms, {IN_FLIGHT} in flight", False),
    *(Column(f"many_{count}_per_s", f"publish/s, {count} in flight", True) for count in MORE),
    Column("cancel_per_s", f"cancel/s, {IN_FLIGHT} in flight", True),
    Column("late_p50_ms", "late p50 ms", False),
    Column("late_p99_ms", "late p99 ms", False),
    Column("memory_bytes", "memory B/msg", False),
    Column("disk_bytes", "disk B/msg", False),
    Column("restart_s", "restart s", False),
)


def advantage(column: Column, ours: PeerFigures, row: PeerFigures) -> float | None:
    """Above 1: we are ahead by that factor."""
    mine, its = getattr(ours, column.field), getattr(row, column.field)
    if mine <= 0 or its <= 0:
        return None
    return float(mine / its if column.more_is_better else its / mine)


class Comparison:
    """All peers, one after the other."""

    def __init__(
        self,
        directory: Path,
        pool: ProcessPoolExecutor,
        amounts: Amounts,
        step: Callable[[str], None],
    ) -> None:
        self._directory = directory
        self._pool = pool
        self._amounts = amounts
        self._step = step

    def measure(self, kind: type[Peer]) -> PeerFigures:
        """All figures of one peer; `failed` says what kept it from the rest."""
        row = PeerFigures(kind.name, kind.durability)
        for what, case in (("publish", self._publish), ("lateness", self._lateness)):
            self._step(f"{kind.name}: {what}")
            directory = self._directory / f"{kind.__name__.lower()}-{what}"
            directory.mkdir()
            peer = kind(directory, free_ports(2))
            try:
                case(peer, row)
            except (PeerError, OSError, ConnectionError) as error:
                row.failed = f"{what}: {error}"
            finally:
                peer.kill()
        return row

    def _start(self, peer: Peer) -> float:
        peer.start()
        seconds: float = run(peer.wait_until_ready)
        return seconds

    def _load(self, peer: Peer, load: ClosedLoop) -> ClosedLoopResult:
        return self._pool.submit(publish, type(peer), peer.directory, peer.port, load).result()

    def _publish(self, peer: Peer, row: PeerFigures) -> None:
        amounts = self._amounts
        seconds = amounts.publish_s
        self._start(peer)
        self._load(peer, ClosedLoop(IN_FLIGHT, DAY_MS, seconds=amounts.warm_s))
        row.one_per_s = self._load(peer, ClosedLoop(1, DAY_MS, seconds=seconds / 2)).rate
        many = self._load(peer, ClosedLoop(IN_FLIGHT, DAY_MS, seconds=seconds))
        row.many_per_s = many.rate
        row.many_p99_ms = float(np.percentile(many.latency_ms, 99))
        for count in MORE:
            if count <= peer.in_flight_max:
                rate = self._load(peer, ClosedLoop(count, DAY_MS, seconds=seconds / 2)).rate
                setattr(row, f"many_{count}_per_s", rate)
        cancels = ClosedLoop(IN_FLIGHT, DAY_MS, count=amounts.cancels)
        cancelled = self._pool.submit(
            cancel, type(peer), peer.directory, peer.port, cancels
        ).result()
        if cancelled is not None:
            row.cancel_per_s = cancelled.rate
        peer.kill()

        # In a directory of its own, so that all that is there is what is counted.
        again = type(peer)(
            peer.directory.with_name(f"{peer.directory.name}-pending"), free_ports(2)
        )
        again.directory.mkdir()
        self._step(f"{peer.name}: {amounts.pending:,} pending")
        try:
            self._start(again)
            time.sleep(amounts.settle_s)
            memory, disk = again.memory_bytes(), again.disk_bytes()
            self._load(again, ClosedLoop(IN_FLIGHT, DAY_MS, count=amounts.pending))
            time.sleep(amounts.settle_s * 2)
            row.memory_bytes = (again.memory_bytes() - memory) / amounts.pending
            row.disk_bytes = (again.disk_bytes() - disk) / amounts.pending
            again.kill()
            self._step(f"{peer.name}: restart")
            row.restart_s = self._start(again)
        finally:
            again.kill()

    def _lateness(self, peer: Peer, row: PeerFigures) -> None:
        amounts = self._amounts
        self._start(peer)
        count = amounts.pace_per_s * amounts.pace_s
        receiving = self._pool.submit(consume, type(peer), peer.directory, peer.port, count)
        load = ClosedLoop(IN_FLIGHT, amounts.delay_ms, count=count, per_s=amounts.pace_per_s)
        self._load(peer, load)
        got = receiving.result()
        if len(got.due_ms) < count:
            raise PeerError(f"only {len(got.due_ms):,} of {count:,} came")
        late_ms = got.lateness_ms()
        row.late_p50_ms, row.late_p99_ms = (float(x) for x in np.percentile(late_ms, [50, 99]))


def make_table(rows: list[PeerFigures]) -> Table:
    """Figures, and below each what we are ahead by."""
    table = Table(title="The same work, the same durability", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for column in COLUMNS:
        table.add_column(column.title, justify="right")
    ours = rows[0]
    for row in rows:
        table.add_row(
            f"{row.name}\n[dim]{row.durability}[/]",
            *(_cell(column, ours, row) for column in COLUMNS),
        )
    return table


def _cell(column: Column, ours: PeerFigures, row: PeerFigures) -> str:
    value = getattr(row, column.field)
    if not value:
        return "–"
    text = f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.2f}"
    is_ours = row.name.startswith(ours.name)
    factor = None if is_ours else advantage(column, ours, row)
    if factor is None:
        return text
    if factor < 1:
        return f"{text}\n[bold yellow]ahead × {1 / factor:,.2f}[/]"
    return f"{text}\n[green]we × {factor:,.2f}[/]"


def figures(rows: list[PeerFigures]) -> list[Figure]:
    """By figure, all peers that have it; how many times as good ours is."""
    found = []
    for column in COLUMNS:
        for row in rows:
            value = getattr(row, column.field)
            if not value:
                continue
            figure = Figure(f"{column.title}: {row.name}", value, "", note=row.durability)
            factor = advantage(column, rows[0], row)
            if factor is not None and row is not rows[0]:
                figure.ratios["we"] = factor
            if row.failed:
                figure.wrong.append(row.failed)
            found.append(figure)
    return found


def plot(rows: list[PeerFigures], path: Path) -> None:
    """Four figures as bars, on logarithmic scales."""
    shown = [column for column in COLUMNS if column.field in PLOTTED]
    figure, axes = new_drawing(len(shown), figsize=(16, 3.6), sharey=True)
    colours = ["#2f6f4f"] + ["#9aa7b0"] * (len(rows) - 1)
    for axis, column in zip(axes, shown, strict=True):
        values = [max(getattr(row, column.field), 0.01) for row in rows]
        axis.barh([row.name for row in rows], values, color=colours)
        axis.set(xscale="log", xlabel=column.title)
        axis.grid(True, axis="x", alpha=0.25)
    axes[0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


PLOTTED = {"many_per_s", "late_p99_ms", "memory_bytes", "restart_s"}


def main() -> int:
    """Exit status 1: something failed. A peer that is ahead is not a failure."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser, "the figures of all into this PNG file")
    names = [kind.__name__.lower() for kind in PEERS]
    parser.add_argument("--only", metavar="NAMES", help=f"of {','.join(names)}; by commas")
    parser.add_argument(
        "--pending", type=int, metavar="N", default=USUAL.pending, help="messages that wait"
    )
    parser.add_argument(
        "--seconds", type=float, default=USUAL.publish_s, help="of each load (default: %(default)s)"
    )
    add_directory(parser)
    options = parse(parser, pending=QUICK.pending, seconds=QUICK.publish_s)
    wanted = options.only.split(",") if options.only else names
    if unknown := set(wanted) - set(names):
        parser.error(f"no such peer: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    # We are always measured, since everything is compared with it.
    kinds = [kind for kind in PEERS if kind is DelayServer or kind.__name__.lower() in wanted]
    usual = QUICK if options.quick else USUAL
    amounts = replace(usual, pending=options.pending, publish_s=options.seconds)
    console = make_console()
    missing = [kind for kind in kinds if not kind.is_installed()]
    for kind in missing:
        console.print(f"[yellow]{kind.name} is not installed:[/] {escape(kind.packages)}")
    progress = Progress(
        SpinnerColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=console,
        transient=True,
    )
    context = multiprocessing.get_context("spawn")
    with (
        disk_directory(options.dir) as directory,
        ProcessPoolExecutor(2, mp_context=context) as pool,
        progress,
    ):
        task = progress.add_task("begin")

        def step(what: str) -> None:
            progress.update(task, description=what)
            if not console.is_terminal:
                print(f"{what} …", file=sys.stderr, flush=True)

        seconds = QUICK_S if options.quick else LONG_S
        busy = busy_percent(seconds)
        sync_per_s = 1000 / float(np.mean(sync_times_ms(directory / "sync", seconds)))
        comparison = Comparison(directory, pool, amounts, step)
        rows = [comparison.measure(kind) for kind in kinds if kind not in missing]
    console.print(make_table(rows))
    console.print(
        f"others used {busy:.0f} % of the processors; fdatasync of 4 KiB {sync_per_s:,.0f}/s",
        style="dim",
    )
    for row in rows:
        if row.failed:
            console.print(f"[bold red]{row.name}:[/] {escape(row.failed)}")
    if options.json is not None:
        calibration = [
            Figure("processors, used by others", busy, "%"),
            Figure("fdatasync of 4 KiB", sync_per_s, "/s"),
        ]
        write_json(options.json, "peers", calibration + figures(rows))
    if options.plot is not None:
        plot(rows, options.plot)
    return 1 if any(row.failed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
