"""`scripts/chaos`: processes, networks, disks and clocks of a cluster are struck again and again.

Threads: one.
"""

import argparse
from pathlib import Path

from tests.chaos.cluster import Cluster, Durability
from tests.chaos.strikes import schedule
from tests.chaos.traffic import ClusterTraffic
from tests.harness.notes import Notes
from tests.harness.rules import EVERYWHERE, OFFICES
from tests.harness.run import Run
from tests.harness.script import run_script, script_parser, seconds_of


def chaos(
    directory: Path,
    seed: int,
    *,
    rounds: int = 27,
    seconds: float | None = None,
    shards: int = 2,
    durability: Durability = "fsync",
    only: str = "",
) -> Run:
    """Three nodes on three brokers are struck. `only`: words in the names of the strikes. Raises
    ValueError if no strike has them, or the machine permits none of those."""
    cluster = Cluster(Notes(directory), seed, shards=shards, durability=durability)
    traffic = ClusterTraffic(cluster, seed + 1)
    strikes = schedule(only, can_cut=cluster.stage.can_cut)
    rules = {**EVERYWHERE, **OFFICES}
    run = "chaos", seed, cluster, strikes, traffic, rounds, seconds
    return Run(*run, rules=rules, grace_s=45, quiet_s=2)


def main() -> None:
    """The script."""
    about = "Strike a cluster under load again and again, and count what it lost: nothing."
    parser = script_parser("chaos", about, rounds=27)
    parser.add_argument("--shards", type=int, default=2, help="of the cluster (default: 2)")
    parser.add_argument(
        "--durability",
        choices=("os", "fsync", "fsync-all"),
        default="fsync",
        help="when a message is answered (default: fsync)",
    )
    parser.add_argument(
        "--only", default="", metavar="WORDS", help="only strikes with these words in their name"
    )

    def make(directory: Path, seed: int, found: argparse.Namespace) -> Run:
        try:
            return chaos(
                *(directory, seed),
                rounds=found.rounds,
                seconds=seconds_of(found),
                shards=found.shards,
                durability=found.durability,
                only=found.only,
            )
        except ValueError as error:
            parser.error(str(error))

    run_script(parser, make)


if __name__ == "__main__":
    main()
