"""`scripts/crash`: the options, and what is told while it runs.

Threads: one.
"""

from collections.abc import Coroutine

from tests.crash.brokers import BrokersCrashRun, missing_programs
from tests.crash.harness import CrashRun, RunOptions
from tests.crash.shards import ShardsCrashRun
from tests.long_run import Begun, Outcome, run_script, script_parser


def main() -> None:
    """The script."""
    parser = script_parser(
        "crash", "Kill a server under load again and again, and count what it lost: nothing."
    )
    parser.add_argument("--rounds", type=int, default=20, help="kills under load (default: 20)")
    parser.add_argument("--minutes", type=float, help="go on for this long instead")
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

    def start(begun: Begun) -> Coroutine[None, None, Outcome]:
        minutes: float | None = begun.arguments.minutes
        rounds: int = begun.arguments.rounds
        shards: int = begun.arguments.shards

        def report(run: CrashRun) -> None:
            text = f"{run.counts['kills']:,} kills, {len(run.ledger.orders):,} messages"
            if run.failures:
                text += f", {len(run.failures)} failures"
            begun.progress(run.rounds_done, None if minutes else rounds, text)

        arguments = begun.arguments
        if arguments.brokers and shards > 1:
            parser.error("--brokers is for a server alone")
        if arguments.brokers and (missing := missing_programs()):
            parser.error(f"--brokers needs {', '.join(missing)}")
        options: RunOptions = {
            "seed": begun.seed,
            "rounds": rounds,
            "minutes": minutes,
            "report": report,
        }
        run: CrashRun
        if arguments.brokers:
            run = BrokersCrashRun(begun.directory, **options)
        elif shards == 1:
            run = CrashRun(begun.directory, **options)
        else:
            run = ShardsCrashRun(begun.directory, shards=shards, **options)
        return run.run()

    run_script(parser, "crash", start)


if __name__ == "__main__":
    main()
