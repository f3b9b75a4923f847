"""`python -m tests.world --seed 7 --cycles 1000`: simulate, and print what was tried.

With `--shards 3` each world is a server of so many shards; a cycle is a life of one of them. With
`--replicas` each world is a shard on two or three nodes; a cycle is a tenure of its owner.

Every world has a seed of its own, counted from `--seed`; the table of a run that failed names the
seeds, and `--seed N --cycles 1` repeats one of them. Exits with 1 on any violation."""

import argparse
import gc
import json
import logging
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import structlog
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tests.world.replicas.world import LIVES as REPLICA_LIVES
from tests.world.replicas.world import run_replica_world
from tests.world.shards.world import LIVES as SHARD_LIVES
from tests.world.shards.world import run_shards_world
from tests.world.world import LIVES, run_world

WORLDS_PER_TASK = 5
REPLICAS = 0
"""Shards of a world that is one shard with replicas."""


class Result(NamedTuple):
    """What came of one world."""

    seed: int
    counts: Counter[str]
    failure: str
    """Empty if every promise was kept."""


def simulate(seed: int, shards: int = 1) -> Result:
    """One world; with `shards` REPLICAS of a shard that has replicas."""
    try:
        if shards == REPLICAS:
            replicated = run_replica_world(seed)
            return Result(seed, replicated.counts + replicated.ledger.counts, "")
        if shards > 1:
            return Result(seed, run_shards_world(seed, count=shards).all_counts, "")
        world = run_world(seed)
    except Exception:
        return Result(seed, Counter(), traceback.format_exc())
    return Result(seed, world.counts + world.ledger.counts, "")


def _simulate_some(seeds: range, shards: int) -> list[Result]:
    return [simulate(seed, shards) for seed in seeds]


def _prepare() -> None:
    """A world makes few cycles, and the collector would walk over all of it all the time. What a
    shard logs, that others come and go, is of no interest here."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 50, 100)


def _results(first_seed: int, worlds: int, jobs: int, shards: int) -> Iterator[Result]:
    if jobs == 1:
        _prepare()
        for seed in range(first_seed, first_seed + worlds):
            yield simulate(seed, shards)
        return
    with ProcessPoolExecutor(jobs, initializer=_prepare) as pool:
        tasks = [
            pool.submit(
                _simulate_some,
                range(start, min(start + WORLDS_PER_TASK, first_seed + worlds)),
                shards,
            )
            for start in range(first_seed, first_seed + worlds, WORLDS_PER_TASK)
        ]
        for task in as_completed(tasks):
            yield from task.result()


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.world", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first world")
    parser.add_argument("--cycles", type=int, default=1000, help="crash and recovery cycles")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--shards", type=int, default=1, help="of the server of each world")
    parser.add_argument("--replicas", action="store_true", help="of one shard, in each world")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts to this file")
    options = parser.parse_args()
    shards = REPLICAS if options.replicas else options.shards
    lives = {1: LIVES + 1, REPLICAS: REPLICA_LIVES + 1}.get(shards, SHARD_LIVES)
    worlds = -(-options.cycles // lives)
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
        bar = progress.add_task("cycles", total=worlds * lives)
        for result in _results(options.seed, worlds, options.jobs, shards):
            total += result.counts
            if result.failure:
                failed.append(result)
                progress.update(bar, description=f"cycles ({len(failed)} violations)")
            progress.advance(bar, lives)
    seconds = time.monotonic() - began
    table = Table(
        title=f"{worlds} worlds, seeds {options.seed}–{options.seed + worlds - 1}, "
        f"{lives} lives in each"
    )
    table.add_column("what")
    table.add_column("times", justify="right")
    for name, count in sorted(total.items()):
        table.add_row(name, f"{count:,}")
    cycles = worlds * lives
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
