"""What a server does, and whether it reaches the levels it was designed for.

    scripts/bench [levels] [--full | --quick] [--only CASES] [--compare BASE] [--rounds N]
                  [--json FILE] [--plot FILE.png]

Every case runs against a server process of its own, on loopback, with a new data directory on a
disk and the settings an operator gets by default (an answer means: synced). Each figure is checked:
what was sent must be what the server accepted, and what a receiver got must be all of it, once,
and never early. The load generators share the machine's cores with the server.

calibrate  how busy the machine is with other things.
           fdatasync of 4 KiB in a preallocated file, one after the other: what the disk does.
           A bare ASGI "hello" on the same uvicorn, POSTed the same bodies: what the machine does.
post       single POSTs by wrk, in rounds: hello, server, and both again with a key in the body.
           The figure is the median of the rounds, and so is the ratio of server to hello.
           64 and 128 connections; with --full 1, 32 and 512, too.
batch      batches of 500, JSON and MessagePack, prebuilt, eight in flight from two processes; due
           at random times of the day after tomorrow. With keys JSON and Arrow, by turns.
cancel     cancels by key: one at a time by wrk, and 500 at a time, eight in flight.
client     single publishes by 64 and 512 awaiting tasks through the client library, each answered
           when its own message is durable: without keys, and with generated keys (which make
           retries safe); then cancels by key. One process beside the server, three rounds.
lateness   1,000 and 2,000 due each second, and 5,000 beside 10,000 published each second; one
           client that pulls (long poll, acks on a second connection) takes the moment at which it
           has read a message, less `deliver_at`. All is published before the first is due.
           Beside it: how late the timers of a bare asyncio loop are on this machine.
           With --full: 20,000 each second, too.
turns      2,000 due each second, and a client with one connection that pulls, acknowledges and
           pulls again: with acks of their own, whose record each pull waits for, and with acks that
           the next pull carries.
webhook    the same with webhooks to a receiver that answers 200 at once: 1,000 due each second,
           and 2,000 beside 10,000 published each second; and 40,000 due at once.
neighbours 500 due each second, of 100 subscriptions: alone, and beside one whose receiver accepts
           connections and never answers. The level is a ratio of the two.
hour       1,000,000 (--full: and 10,000,000) due in an hour whose directory was made beforehand:
           publishes while it is loaded, and memory.
backlog    memory: of an empty server (fresh, and started again), with 1,000,000 due tomorrow, and
           with 1,000,000 more in the loaded hour after a restart: difference over the count, all
           that the process holds for them included. Disk: blocks of all files; each of the million
           is a body of 200 bytes under a key of 12. Restart: kill -9 as the last of 100,000 in the
           loaded hour is answered, with the million due later; time from exec to /readyz, the start
           of Python included. --full: 10,000,000 without keys, one of them in the loaded hour.
pull       100,000 due messages, pulled and acknowledged 500 at a time by two processes, for 8 s
           at most: first such that were published before they were due, then such that were due
           when they were published.
curves     publish, cancel and lateness with 1,000 to 100,000 (--full: 10,000,000) pending.

Before each case, disk, hello and the load of others are measured again: they stand beside every
figure, since figures of two machines, or of two moments of one, differ by as much as these do. The
level is that of the issue on performance, and the last column says whether it is reached.

With --compare BASE, each case runs on the server of that revision, too, by turns with this one in
--rounds rounds, and the figures of both stand side by side: the ratio is the figure. Both servers
run the code of their own tree, on data that this code made; the clients are those of this tree.

With --quick, all is as small as shows that it works, and no level is set. The test suite runs it.
"""

import argparse
import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import wrk
from report import (
    add_options,
    as_documents,
    make_console,
    new_drawing,
    show_figures,
    show_wrong,
    without_levels,
    write_json,
)
from rich.console import Console
from servers import ROOT, BenchmarkError, add_directory

from levels.backlog import backlog
from levels.batches import batch
from levels.bench import Bench, Size
from levels.calibration import calibrate, recalibrate
from levels.client import client
from levels.comparison import compare, show_comparison
from levels.curves import curves
from levels.hour import hour
from levels.lateness import lateness, turns, webhook
from levels.neighbours import neighbours
from levels.opening import open_bench, run_case
from levels.posts import cancel, post
from levels.pulls import pull

ROUNDS = 3
"""Of a comparison."""

CASES: dict[str, Callable[[Bench], None]] = {
    "post": post,
    "batch": batch,
    "cancel": cancel,
    "client": client,
    "lateness": lateness,
    "turns": turns,
    "webhook": webhook,
    "neighbours": neighbours,
    "hour": hour,
    "backlog": backlog,
    "pull": pull,
    "curves": curves,
}


def plot(bench: Bench, path: Path) -> None:
    """Rates in multiples of hello, how late messages were, and costs by the backlog."""
    figure, (left, right, curves) = new_drawing(3, figsize=(20, 5))
    rates = [one for one in bench.figures if "hello" in one.ratios]
    left.barh([one.case for one in rates], [one.ratios["hello"] for one in rates])
    left.invert_yaxis()
    left.set(xscale="log", xlabel="multiples of the bare uvicorn hello")
    left.axvline(1, color="black", linewidth=1)
    for case, lateness_ms in bench.lateness_ms.items():
        shares = np.arange(1, len(lateness_ms) + 1) / len(lateness_ms)
        right.plot(np.maximum(np.sort(lateness_ms), 0.01), 1 - shares + shares[0], label=case)
    right.set(xscale="log", yscale="log", xlabel="ms late", ylabel="share that is at least so late")
    right.grid(True, which="both", alpha=0.25)
    if bench.lateness_ms:
        right.legend(frameon=False)
    for what, points in bench.curves.items():
        curves.plot(list(points), list(points.values()), marker="o", label=what)
    curves.set(xscale="log", yscale="log", xlabel="messages pending")
    curves.grid(True, which="both", alpha=0.25)
    if bench.curves:
        curves.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def run_by_turns(base: Bench, head: Bench, case: str, rounds: int, console: Console) -> bool:
    """One case on both; who begins changes from round to round."""
    base.sync_per_s, base.hello_per_s = head.sync_per_s, head.hello_per_s
    base.busy_percent = head.busy_percent
    complete = True
    for number in range(rounds):
        for bench in (base, head) if number % 2 == 0 else (head, base):
            complete &= run_case(bench, case, CASES[case], console)
    return complete


@contextlib.contextmanager
def checked_out(revision: str) -> Iterator[Path]:
    """The source tree of a revision, until the block ends. Raises BenchmarkError."""
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory(prefix="delayserver-base-") as name:
        tree = str(Path(name) / "tree")
        made = subprocess.run(
            [*git, "add", "--detach", tree, revision], capture_output=True, text=True, check=False
        )
        if made.returncode:
            raise BenchmarkError(f"cannot check out {revision}: {made.stderr.strip()}")
        try:
            yield Path(tree)
        finally:
            subprocess.run([*git, "remove", "--force", tree], capture_output=True, check=False)


def main() -> int:
    """Exit status 1: a case failed, or counts were wrong. A missed level is not a failure."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench levels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser, "rates and lateness into this PNG file")
    parser.add_argument("--full", action="store_true", help="more connections, more load")
    parser.add_argument(
        "--rounds", type=int, metavar="N", help=f"of a comparison (default: {ROUNDS})"
    )
    parser.add_argument("--only", metavar="CASES", help=f"of {','.join(CASES)}; by commas")
    parser.add_argument(
        "--compare", metavar="BASE", help="beside the server of this revision, such as HEAD~3"
    )
    add_directory(parser)
    options = parser.parse_args()
    cases = options.only.split(",") if options.only else list(CASES)
    if unknown := set(cases) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    if options.quick and options.full:
        parser.error("either --quick or --full")
    if not wrk.is_installed():
        parser.error(wrk.MISSING)

    size = Size.QUICK if options.quick else Size.FULL if options.full else Size.USUAL
    rounds = options.rounds or size.of(quick=1, usual=ROUNDS)
    console = make_console()
    base: Bench | None = None
    with contextlib.ExitStack() as stack:
        head = stack.enter_context(open_bench(options.dir, size, console))
        calibrate(head)
        if options.compare is not None:
            try:
                tree = stack.enter_context(checked_out(options.compare))
            except BenchmarkError as error:
                parser.error(str(error))
            base = Bench(tree, head.directory / "base", head.pool, size, head.step)
        complete = True
        for case in cases:
            recalibrate(head)
            if base is None:
                complete &= run_case(head, case, CASES[case], console)
            else:
                complete &= run_by_turns(base, head, case, rounds, console)

    if options.quick:
        without_levels(head.figures)
    before = {}
    if base is None:
        show_figures("What the server does", head.figures, console)
    else:
        ratios = compare(base.figures, head.figures)
        title = f"{options.compare} and this tree, by turns in one run"
        show_comparison(title, base.figures, head.figures, ratios, console)
        show_wrong((*base.figures, *head.figures), console)
        before = {
            "base": as_documents(base.figures),
            "ratios": {ratio.case: ratio.median for ratio in ratios},
        }
    if options.json is not None:
        write_json(options.json, "levels", head.figures, **before)
    if options.plot is not None:
        plot(head, options.plot)
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
