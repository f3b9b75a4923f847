"""A server of two shards beside one shard and beside Redis, by turns; and what shards cost.

    scripts/bench shards [--quick] [--only CASES] [--json FILE] [--plot FILE.png] [--dir DIRECTORY]

Every side has a process (or processes) of its own on loopback, a new directory on a disk, and the
settings an operator gets by default; Redis syncs always. All sides of a case are there at the same
time, and are asked one after the other, in short turns: a figure is the median of its turns, a
ratio that of the ratios of turns that came together. The generators share the cores with the
servers, so two shards have no core to themselves on a machine of two. What two processes can do
there at all is shown by two servers that know nothing of one another, each with half of the load;
how many cores are left beside the generator stands in the note of each figure. Processor time
("CPU µs") is that of all processes of a server, until what it accepted is filed.

post       single POSTs with keys by wrk, 64 and 256 connections; Redis is asked by
           redis-benchmark. Half of the requests come to the shard that they do not belong to.
client     single publishes by 64 tasks through the client library, with generated keys.
batch      batches of 500 with keys, JSON and Arrow, eight in flight; Redis has pipelines of 500.
cancel     cancels by key by wrk, 64 connections; Redis by the closed loop of `peers`.
hop        POSTs with keys, all of them sent to the shard that they belong to, and all to the other
           one: processor time of both shards together.
lateness   2,000 messages with keys due each second, with one shard and with two.
memory     of each shard and of the supervisor, idle; of each shard, with a million due tomorrow.
curve      processor time for a message with 1, 2, 4 and 8 shards: POSTs, 64 connections to each
           shard, to the owner of each key and to the address of all; batches to that address.
           Beside it as many servers that know nothing of one another, with the same load each.
filing     batches with keys to one shard, as it is and with the filing put off: the most that
           filing in a process of its own would gain.

With --quick, all is as small as shows that it works, and no level is set. The test suite runs it.
Without Redis the other sides are measured, and it is said that it is missing.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import wrk
from levels.bench import Bench, Size
from levels.calibration import calibrate_disk
from levels.opening import open_bench, run_case
from report import make_console, make_parser, new_drawing, parse, report
from servers import add_directory

from shards import redis
from shards.hops import curve, hop
from shards.rates import batch, cancel, client, post
from shards.waiting import filing, lateness, memory

CASES: dict[str, Callable[[Bench], None]] = {
    "post": post,
    "client": client,
    "batch": batch,
    "cancel": cancel,
    "hop": hop,
    "lateness": lateness,
    "memory": memory,
    "curve": curve,
    "filing": filing,
}


def plot(bench: Bench, path: Path) -> None:
    """Processor time for a message by the number of shards."""
    figure, axis = new_drawing(1, figsize=(7, 5))
    for what, points in bench.curves.items():
        axis.plot(list(points), list(points.values()), marker="o", label=what)
    axis.set(
        xscale="log", xlabel="shards", ylabel="µs of processor time for a message", ylim=(0, None)
    )
    axis.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
    axis.grid(True, alpha=0.25)
    if bench.curves:
        axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> int:
    """Exit status 1: a case failed, or counts were wrong. A missed level is not a failure."""
    parser = make_parser("shards", __doc__, "the curve into this PNG file")
    parser.add_argument("--only", metavar="CASES", help=f"of {','.join(CASES)}; by commas")
    add_directory(parser)
    options = parse(parser)
    cases = options.only.split(",") if options.only else list(CASES)
    if unknown := set(cases) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    if not wrk.is_installed():
        parser.error(wrk.MISSING)
    console = make_console()
    if not redis.is_installed():
        console.print(f"[yellow]{redis.MISSING}[/]")
    complete = True
    with open_bench(options.dir, Size.QUICK if options.quick else Size.USUAL, console) as bench:
        calibrate_disk(bench)
        for case in cases:
            complete &= run_case(bench, case, CASES[case], console)
    status = report(options, "shards", "Shards", bench.figures, console, complete=complete)
    if options.plot is not None:
        plot(bench, options.plot)
    return status


if __name__ == "__main__":
    sys.exit(main())
