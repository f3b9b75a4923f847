"""What the scripts of long runs (`scripts/crash`, `scripts/soak`) have in common: options, a bar of
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
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from delayserver.cli.demo.ledger import VIOLATIONS, DemoLedger, Verdict

if TYPE_CHECKING:
    from rich.table import Table


@dataclass
class Outcome:
    """A run, judged."""

    name: str
    seed: int
    directory: Path
    ledger: DemoLedger
    verdict: Verdict
    failures: list[str]
    """What went wrong beyond the ledger: answers that must not be, a server that did not start."""
    counts: Counter[str] = field(default_factory=Counter)
    figures: list[dict[str, Any]] = field(default_factory=list)
    """More of them, for the file."""
    tables: list["Table"] = field(default_factory=list)
    """... and for people."""

    @property
    def is_clean(self) -> bool:
        """Whether every promise was kept."""
        return self.verdict.is_clean and not self.failures and not self.ledger.strangers


@dataclass(frozen=True)
class Begun:
    """A run that was asked for."""

    arguments: argparse.Namespace
    seed: int
    directory: Path
    progress: Callable[[float, float | None, str], None]
    """What is done, of how much (None: nobody knows), and a few words."""


def script_parser(name: str, description: str) -> argparse.ArgumentParser:
    """The options that all of them have."""
    parser = argparse.ArgumentParser(prog=f"scripts/{name}", description=description)
    parser.add_argument("--seed", type=int, help="do the same again (default: a new one)")
    parser.add_argument("--keep", action="store_true", help="keep the directory in any case")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts to this file")
    return parser


def run_script(
    parser: argparse.ArgumentParser,
    name: str,
    start: Callable[[Begun], Coroutine[None, None, Outcome]],
) -> None:
    """Run, show what came of it, and end the process."""
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
    directory = Path(tempfile.mkdtemp(prefix=f"delayserver-{name}-"))
    columns = (
        TextColumn("{task.description}"),
        *(BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task(f"seed {seed}", total=None)

        def update(done: float, total: float | None, text: str) -> None:
            progress.update(bar, completed=done, total=total, description=text)

        outcome = asyncio.run(start(Begun(arguments, seed, directory, update)))
    _show(outcome)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report_of(outcome)) + "\n")
    if outcome.is_clean and not arguments.keep:
        shutil.rmtree(directory)
    else:
        outcome.ledger.write(directory / "ledger.jsonl")
        print(f"data, log and ledger: {directory}")
    raise SystemExit(0 if outcome.is_clean else 1)


def report_of(outcome: Outcome) -> dict[str, Any]:
    """What happened and what went wrong, in the form of the benchmarks."""
    verdict = outcome.verdict
    counts = {
        **{name: getattr(verdict, name) for name in ("published", "cancelled", "delivered")},
        **dict(sorted(outcome.counts.items())),
        **{name.replace("_", " "): len(getattr(verdict, name)) for name in VIOLATIONS},
        "failures": len(outcome.failures),
    }
    figures = [{"case": case, "value": count, "unit": ""} for case, count in counts.items()]
    figures += [
        {"case": f"late, {name}", "value": late_ms, "unit": "ms"}
        for name, late_ms in _lateness(verdict).items()
        if late_ms is not None
    ]
    return {"benchmark": outcome.name, "seed": outcome.seed, "figures": figures + outcome.figures}


def _lateness(verdict: Verdict) -> dict[str, int | None]:
    shown = {"p50": 50, "p99": 99, "most": 100}
    return {name: verdict.lateness_percentile_ms(percent) for name, percent in shown.items()}


def _show(outcome: Outcome) -> None:
    from rich.console import Console
    from rich.table import Table

    verdict = outcome.verdict
    title = f"{outcome.name} run, seed {outcome.seed}"
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name in ("published", "cancelled", "delivered", "repeated"):
        table.add_row(name, f"{getattr(verdict, name):,}")
    for name, count in sorted(outcome.counts.items()):
        table.add_row(name, f"{count:,}")
    for name, late_ms in _lateness(verdict).items():
        table.add_row(f"late, {name}", "–" if late_ms is None else f"{late_ms} ms")
    table.add_section()
    for name in VIOLATIONS:
        count = len(getattr(verdict, name))
        table.add_row(name.replace("_", " "), f"{count:,}", style="bold red" if count else "green")
    table.add_row("never published", str(len(outcome.ledger.strangers)))
    table.add_row("failures", str(len(outcome.failures)))
    console = Console()
    console.print(table)
    for another in outcome.tables:
        console.print(another)
    for line in describe(outcome):
        console.print(line, markup=False, highlight=False)


def describe(outcome: Outcome) -> list[str]:
    """A line for everything that went wrong."""
    lines = [
        f"{name}: {json.dumps(order.to_json())}" for name, order in outcome.verdict.violations()
    ]
    lines += [f"never published: {stranger}" for stranger in outcome.ledger.strangers]
    return lines + outcome.failures
