"""`python -m tests.world.tampering --runs 10000`: tamper with data directories, and tell
which of it an audit did not notice.

Every world has a seed of its own, counted from `--seed`, and its directory is altered a few times.
What was missed is tried again in smaller worlds, and told with the options that repeat it. Exits
with 1 if anything was missed, or if anybody was accused though nothing was altered."""

import argparse
import gc
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import structlog
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tests.world.tampering.runs import (
    ALTERATIONS,
    TURNS,
    Noticed,
    TamperedWorld,
    shrink,
    tamper,
)
from tests.world.tampering.victims import LIVES, STEPS

SHOWN_MAX = 20
"""Failures that are told one by one."""


def _prepare() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 50, 100)


def _tampered(world: TamperedWorld) -> list[Noticed]:
    return [shrink(one) if one.failure else one for one in tamper(world)]


def _results(worlds: list[TamperedWorld], jobs: int) -> Iterator[list[Noticed]]:
    if jobs == 1:
        _prepare()
        yield from map(_tampered, worlds)
        return
    with ProcessPoolExecutor(jobs, initializer=_prepare) as pool:
        for task in as_completed([pool.submit(_tampered, world) for world in worlds]):
            yield task.result()


def _worlds(options: argparse.Namespace) -> list[TamperedWorld]:
    turns = tuple(range(TURNS)) if options.turn is None else (options.turn,)
    count = 1 if options.turn is not None else -(-options.runs // TURNS)
    return [
        TamperedWorld(seed, options.kind, options.lives, options.steps, turns)
        for seed in range(options.seed, options.seed + count)
    ]


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.world.tampering", description=__doc__)
    parser.add_argument("--runs", type=int, default=1000, help="alterations")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first world")
    parser.add_argument("--kind", default="", choices=["", *ALTERATIONS], metavar="KIND")
    parser.add_argument("--turn", type=int, help="only this alteration of the first world")
    parser.add_argument("--lives", type=int, default=LIVES, help="of each world, before its last")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each life")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts to this file")
    options = parser.parse_args()
    console, worlds = Console(), _worlds(options)
    done, names = Counter[str](), Counter[str]()
    failed: list[Noticed] = []
    began = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        bar = progress.add_task("worlds", total=len(worlds))
        for results in _results(worlds, options.jobs):
            for one in results:
                names.update(one.names)
                done[one.world.kind] += bool(one.done)
                if one.failure:
                    failed.append(one)
                    progress.update(bar, description=f"worlds ({len(failed)} missed)")
            progress.advance(bar)
    seconds = time.monotonic() - began
    _show(console, done, names, failed, f"{len(worlds):,} worlds, {seconds:,.0f} s")
    if options.json is not None:
        counts = {"alterations": done.total(), "missed": len(failed), "worlds": len(worlds)}
        figures = [{"case": case, "value": count, "unit": ""} for case, count in counts.items()]
        figures.append({"case": "took", "value": seconds, "unit": "s"})
        options.json.write_text(json.dumps({"benchmark": "tampering", "figures": figures}) + "\n")
    return 1 if failed else 0


def _show(
    console: Console, done: Counter[str], names: Counter[str], failed: list[Noticed], title: str
) -> None:
    table = Table("altered", "times", title=title)
    table.columns[1].justify = "right"
    for kind, count in sorted(done.items()):
        if count:
            table.add_row(kind, f"{count:,}")
    table.add_section()
    for name, count in names.most_common():
        table.add_row(f"called {name}", f"{count:,}")
    table.add_section()
    table.add_row("alterations", f"{done.total():,}", style="bold")
    table.add_row("missed", f"{len(failed):,}", style="bold red" if failed else "bold green")
    console.print(table)
    for one in failed[:SHOWN_MAX]:
        console.print(f"[bold]{one.command}[/bold]")
        console.print(one.failure, markup=False, highlight=False)


if __name__ == "__main__":
    sys.exit(main())
