"""`scripts/chaos`: the options, and what is told while it runs.

Threads: one.
"""

from collections.abc import Coroutine

from tests.chaos.harness import ChaosRun
from tests.long_run import Begun, Outcome, run_script, script_parser


def main() -> None:
    """The script."""
    parser = script_parser(
        "chaos", "Strike a cluster under load again and again, and count what it lost: nothing."
    )
    parser.add_argument("--rounds", type=int, default=27, help="strikes (default: 27)")
    parser.add_argument("--minutes", type=float, help="go on for this long instead")
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

    def start(begun: Begun) -> Coroutine[None, None, Outcome]:
        arguments = begun.arguments
        minutes: float | None = arguments.minutes

        def report(run: ChaosRun) -> None:
            text = f"{run.striking}; {len(run.ledger.orders):,} messages"
            if run.failures:
                text += f", {len(run.failures)} failures"
            begun.progress(run.rounds_done, None if minutes else arguments.rounds, text)

        run = ChaosRun(
            begun.directory,
            seed=begun.seed,
            rounds=arguments.rounds,
            minutes=minutes,
            shards=arguments.shards,
            durability=arguments.durability,
            only=arguments.only,
            report=report,
        )
        if not run.kinds:
            parser.error(f"no strike has {arguments.only!r} in its name, or needs namespaces")
        return run.run()

    run_script(parser, "chaos", start)


if __name__ == "__main__":
    main()
