"""`scripts/crash`: the options, and what is told while it runs.

Threads: one.
"""

from collections.abc import Coroutine

from tests.crash.harness import CrashRun
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

    def start(begun: Begun) -> Coroutine[None, None, Outcome]:
        minutes: float | None = begun.arguments.minutes
        rounds: int = begun.arguments.rounds
        shards: int = begun.arguments.shards

        def report(run: CrashRun) -> None:
            text = f"{run.counts['kills']:,} kills, {len(run.ledger.orders):,} messages"
            if run.failures:
                text += f", {len(run.failures)} failures"
            begun.progress(run.rounds_done, None if minutes else rounds, text)

        run = (
            CrashRun(
                begun.directory, seed=begun.seed, rounds=rounds, minutes=minutes, report=report
            )
            if shards == 1
            else ShardsCrashRun(
                begun.directory,
                shards=shards,
                seed=begun.seed,
                rounds=rounds,
                minutes=minutes,
                report=report,
            )
        )
        return run.run()

    run_script(parser, "crash", start)


if __name__ == "__main__":
    main()
