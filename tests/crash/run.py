"""`scripts/crash`: one server, or one of shards, or one with brokers beside it, is killed again and
again.

Threads: one.
"""

import argparse
from pathlib import Path

from tests.crash.brokers import Brokers, BrokerTraffic, missing_programs
from tests.crash.servers import Servers, schedule
from tests.harness.notes import Notes
from tests.harness.run import Run
from tests.harness.script import run_script, script_parser, seconds_of
from tests.harness.traffic import Traffic


class ShardsTraffic(Traffic):
    """Calls come in at all processes, and some batches have messages without a key."""

    MIXED_SHARE = 0.5


def crash(
    directory: Path,
    seed: int,
    *,
    rounds: int = 20,
    seconds: float | None = None,
    shards: int = 1,
) -> Run:
    """A server is killed under load and while it starts; of several shards each process is killed,
    and all together."""
    server = Servers(Notes(directory), seed, shards=shards)
    kind = Traffic if shards == 1 else ShardsTraffic
    traffic = kind(server.notes, server.client, seed + 1)
    return Run("crash", seed, server, schedule(shards), traffic, rounds, seconds)


def crash_brokers(
    directory: Path, seed: int, *, rounds: int = 20, seconds: float | None = None
) -> Run:
    """A server writes into a Redis, a NATS, a RabbitMQ and a Kafka; each of the five is killed."""
    brokers = Brokers(directory)
    server = Servers(Notes(directory), seed, brokers=brokers.by_kind)
    traffic = BrokerTraffic(server.notes, server.client, seed + 1, brokers)
    kills = schedule(1, brokers.by_kind)
    return Run("crash", seed, server, kills, traffic, rounds, seconds, grace_s=60)


def main() -> None:
    """The script."""
    about = "Kill a server under load again and again, and count what it lost: nothing."
    parser = script_parser("crash", about, rounds=20)
    parser.add_argument(
        "--shards",
        type=int,
        default=1,
        help="processes of the server, which are killed one by one as well (default: 1)",
    )
    parser.add_argument(
        "--brokers",
        action="store_true",
        help="kill a Redis, a NATS, a RabbitMQ and a Kafka as well, which the server writes to, "
        "and one of which it reads",
    )

    def make(directory: Path, seed: int, found: argparse.Namespace) -> Run:
        rounds, seconds = found.rounds, seconds_of(found)
        if not found.brokers:
            return crash(directory, seed, rounds=rounds, seconds=seconds, shards=found.shards)
        if found.shards > 1:
            parser.error("--brokers is for a server alone")
        if missing := missing_programs():
            parser.error(f"--brokers needs {', '.join(missing)}")
        return crash_brokers(directory, seed, rounds=rounds, seconds=seconds)

    run_script(parser, make)


if __name__ == "__main__":
    main()
