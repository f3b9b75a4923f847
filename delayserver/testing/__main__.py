"""`python -m delayserver.testing --seed 7 --cycles 1000`: simulate, and print what was tried.

Every world has a seed of its own, counted from `--seed`; the table of a run that failed names the
seeds, and `--seed N --cycles 1` repeats one of them. Exits with 1 on any violation."""

import argparse
import gc
import json
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from delayserver.testing.world import LIVES, STEPS, run_world

WORLDS_PER_TASK = 5


class Result(NamedTuple):
    """What came of one world."""

    seed: int
    counts: Counter[str]
    failure: str
    """Empty if every promise was kept."""


def simulate(seed: int) -> Result:
    """One world."""
    try:
        world = run_world(seed)
    except Exception:
        return Result(seed, Counter(), traceback.format_exc())
    return Result(seed, world.counts + world.ledger.counts, "")


def _simulate_some(seeds: range) -> list[Result]:
    return [simulate(seed) for seed in seeds]


def _spare_the_collector() -> None:
    """A world makes few cycles, and the collector would walk over all of it all the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 50, 100)


def _results(first_seed: int, worlds: int, jobs: int) -> Iterator[Result]:
    if jobs == 1:
        _spare_the_collector()
        yield from map(simulate, range(first_seed, first_seed + worlds))
        return
    with ProcessPoolExecutor(jobs, initializer=_spare_the_collector) as pool:
        tasks = [
            pool.submit(
                _simulate_some, range(start, min(start + WORLDS_PER_TASK, first_seed + worlds))
            )
            for start in range(first_seed, first_seed + worlds, WORLDS_PER_TASK)
        ]
        for task in as_completed(tasks):
            yield from task.result()


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m delayserver.testing", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first world")
    parser.add_argument("--cycles", type=int, default=1000, help="crash and recovery cycles")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts to this file")
    options = parser.parse_args()
    worlds = -(-options.cycles // (LIVES + 1))
    console = Console()
    total: Counter[str] = Counter()
    failed: list[Result] = []
    began = time.monotonic()
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
    ) as progress:
        bar = progress.add_task("cycles", total=worlds * (LIVES + 1))
        for result in _results(options.seed, worlds, options.jobs):
            total += result.counts
            if result.failure:
                failed.append(result)
                progress.update(bar, description=f"cycles ({len(failed)} violations)")
            progress.advance(bar, LIVES + 1)
    seconds = time.monotonic() - began
    table = Table(
        title=f"{worlds} worlds, seeds {options.seed}–{options.seed + worlds - 1}, "
        f"{STEPS} steps in each of {LIVES} lives"
    )
    table.add_column("what")
    table.add_column("times", justify="right")
    for name, count in sorted(total.items()):
        table.add_row(name, f"{count:,}")
    cycles = worlds * (LIVES + 1)
    table.add_row("crash and recovery cycles", f"{cycles:,}", style="bold")
    table.add_row("cycles per second", f"{cycles / seconds:,.0f}")
    table.add_row("violations", f"{len(failed):,}", style="bold red" if failed else "bold green")
    console.print(table)
    if options.json is not None:
        counts = {"crash and recovery cycles": cycles, "violations": len(failed)}
        counts.update(sorted(total.items()))
        figures = [{"case": case, "value": count, "unit": ""} for case, count in counts.items()]
        options.json.write_text(json.dumps({"benchmark": "simulation", "figures": figures}) + "\n")
    for result in sorted(failed):
        console.print(f"[bold]seed {result.seed}[/bold]")
        console.print(result.failure, markup=False, highlight=False)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
