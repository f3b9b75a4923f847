"""The scripts of the runs (`scripts/crash`, `scripts/chaos`, `scripts/soak`): options, a bar of
progress, a table, and the same as JSON. The status is 1 if a promise was broken, and the directory
is kept then.

Cost: none. Threads: one.
"""

import argparse
import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.harness.run import Outcome, Run


def script_parser(
    name: str, description: str, *, rounds: int | None = None, minutes: float | None = None
) -> argparse.ArgumentParser:
    """The options that all of them have; one of `rounds` and `minutes` is the default."""
    parser = argparse.ArgumentParser(prog=f"scripts/{name}", description=description)
    if rounds is not None:
        parser.add_argument(
            "--rounds", type=int, default=rounds, help=f"strikes (default: {rounds})"
        )
    parser.add_argument(
        "--minutes",
        type=float,
        default=minutes,
        help="go on for this long instead" if minutes is None else f"how long ({minutes:g})",
    )
    parser.add_argument("--seed", type=int, help="do the same again (default: a new one)")
    parser.add_argument("--keep", action="store_true", help="keep the directory in any case")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts to this file")
    return parser


def seconds_of(arguments: argparse.Namespace) -> float | None:
    """The length of the run, if it has one."""
    return None if arguments.minutes is None else 60 * arguments.minutes


def run_script(
    parser: argparse.ArgumentParser,
    make: Callable[[Path, int, argparse.Namespace], Run],
) -> None:
    """Make the run of these options, run it, show what came of it, and end the process."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    arguments = parser.parse_args()
    seed = time.time_ns() % 1_000_000 if arguments.seed is None else arguments.seed
    directory = Path(tempfile.mkdtemp(prefix=f"delayserver-{parser.prog.rpartition('/')[2]}-"))
    columns = (
        TextColumn("{task.description}"),
        *(BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()),
    )
    run = make(directory, seed, arguments)
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task(f"seed {seed}", total=run.seconds or run.rounds)

        def report(run: Run) -> None:
            text = f"{run.notes.doing}; {len(run.ledger.orders):,} messages"
            if run.notes.failures:
                text += f", {len(run.notes.failures)} failures"
            done = run.rounds_done if run.seconds is None else run.passed_s
            progress.update(bar, completed=done, description=text)

        run.report = report
        outcome = asyncio.run(run.run())
    _show(outcome)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report_of(outcome)) + "\n")
    if outcome.is_clean and not arguments.keep:
        shutil.rmtree(directory)
    else:
        run.ledger.write(directory / "ledger.jsonl")
        print(f"data, log and ledger: {directory}")
    raise SystemExit(0 if outcome.is_clean else 1)


def report_of(outcome: Outcome) -> dict[str, Any]:
    """The run in the form of the benchmarks: its figures, and how often each rule was broken."""
    run = outcome.run
    figures = [
        {"case": case, "value": value, "unit": "ms" if case.startswith("late, ") else ""}
        for case, value in (_figures_of(outcome) | _broken_in(outcome)).items()
        if value is not None
    ]
    return {"benchmark": run.name, "seed": run.seed, "figures": figures + run.notes.figures}


def _figures_of(outcome: Outcome) -> dict[str, int | None]:
    verdict = outcome.verdict
    names = ("published", "cancelled", "delivered", "repeated")
    percents = {"p50": 50, "p99": 99, "most": 100}
    return {
        **{name: getattr(verdict, name) for name in names},
        **dict(sorted(outcome.notes.counts.items())),
        **{f"late, {name}": verdict.lateness_percentile_ms(n) for name, n in percents.items()},
    }


def _broken_in(outcome: Outcome) -> dict[str, int | None]:
    broken = {name.replace("_", " "): len(found) for name, found in outcome.broken.items()}
    return {**broken, "failures": len(outcome.notes.failures)}


def _show(outcome: Outcome) -> None:
    from rich.console import Console
    from rich.table import Table

    title = f"{outcome.run.name} run, seed {outcome.run.seed}"
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in _figures_of(outcome).items():
        unit = " ms" if name.startswith("late, ") else ""
        table.add_row(name, "–" if value is None else f"{value:,}{unit}")
    table.add_section()
    for name, count in _broken_in(outcome).items():
        table.add_row(name, f"{count:,}", style="bold red" if count else "green")
    console = Console()
    console.print(table)
    if (another := outcome.run.topology.table()) is not None:
        console.print(another)
    for line in describe(outcome):
        console.print(line, markup=False, highlight=False)


def describe(outcome: Outcome) -> list[str]:
    """A line for everything that went wrong."""
    lines = [f"{name}: {one}" for name, found in outcome.broken.items() for one in found]
    return lines + outcome.notes.failures
