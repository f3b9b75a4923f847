"""A cluster on Kafka beside the same server on its own log; what a loss and a drain cost.

    scripts/bench cluster [--quick] [--only CASES] [--pending NUMBER] [--json FILE]
                          [--dir DIRECTORY]

Three brokers and two nodes with one shard run on loopback, with new directories on a disk: brokers,
server and generator share the cores, which costs a cluster more than it would with machines of its
own. Publishes ask the owner, as the client library does that knows it.

publish    single publishes by 64 and 512 tasks through the client library, with generated keys, by
           turns with a server on its own log; a figure is the median of its turns, a ratio that of
           the ratios of turns that came together.
takeover   how long no publish is answered, with --pending messages that wait: the owner is killed
           (SIGKILL), and hangs (SIGSTOP); the broker that leads the shard's log is killed. Nothing
           that was answered may be missing.
drain      publishes by 64 tasks while the owner is drained: how many fail, and their latency.
memory     of the owner and of the standby with as many pending, and of the supervisor.

With --quick there is one broker, all is as small as shows that it works, and no level is set. The
test suite runs it.
"""

import sys
from collections.abc import Callable
from functools import partial

from levels.bench import Bench, Size
from levels.calibration import calibrate_disk
from levels.opening import open_bench, run_case
from report import make_console, make_parser, parse, report
from servers import add_directory

from cluster.here import Here, cluster_here
from cluster.losses import drain, memory, takeover
from cluster.rates import publish

CASES: dict[str, Callable[[Bench, Here], None]] = {
    "publish": publish,
    "takeover": takeover,
    "drain": drain,
    "memory": memory,
}
PENDING = 100_000
PENDING_MAX = 1_100_000


def _run(case: Callable[[Bench, Here], None], here: Here, bench: Bench) -> None:
    case(bench, here)


def main() -> int:
    """Exit status 1: a case failed, or counts were wrong. A missed level is not a failure."""
    parser = make_parser("cluster", __doc__)
    parser.add_argument("--only", metavar="CASES", help=f"of {','.join(CASES)}; by commas")
    parser.add_argument(
        "--pending",
        metavar="NUMBER",
        type=int,
        default=PENDING,
        help=f"what waits when something is lost, at most {PENDING_MAX:,} (default: %(default)s)",
    )
    add_directory(parser)
    options = parse(parser, pending=2_000)
    cases = options.only.split(",") if options.only else list(CASES)
    if unknown := set(cases) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    if not 1 <= options.pending <= PENDING_MAX:
        parser.error(f"--pending is a number from 1 to {PENDING_MAX:,}")
    console = make_console()
    complete = True
    size = Size.QUICK if options.quick else Size.USUAL
    with open_bench(options.dir, size, console) as bench:
        calibrate_disk(bench)
        bench.step("brokers and nodes")
        with cluster_here(bench, options.pending) as here:
            for case in cases:
                complete &= run_case(bench, case, partial(_run, CASES[case], here), console)
    return report(options, "cluster", "Cluster", bench.figures, console, complete=complete)


if __name__ == "__main__":
    sys.exit(main())
