"""What benchmarks share when they report: options, a JSON file, a drawing, a table of figures.

A `Figure` is one line: a value with its unit, latencies if it has any, what was counted to be sure
that it is true, and the level that is to be reached. Rates also get their ratio to what the machine
can do at all, measured in the same run; compare ratios, not rates, between machines and days.
"""

import argparse
import json
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

PLAIN_WIDTH = 180


@dataclass(slots=True)
class Figure:
    """One measured figure."""

    case: str
    value: float
    unit: str
    group: str = ""
    """What it belongs to, where there are several figures of one thing."""
    p50_ms: float | None = None
    p99_ms: float | None = None
    max_ms: float | None = None
    cpu_us: float | None = None
    """Processor time of the server for each of what `value` counts, all its threads together:
    the figure that others on the machine disturb least."""
    ratios: dict[str, float] = field(default_factory=dict)
    """The value in multiples of a calibration, by its name."""
    calibration: dict[str, float] = field(default_factory=dict)
    """What machine and disk did just before, by its name and unit."""
    level: str = ""
    """What is to be reached."""
    reached: bool | None = None
    note: str = ""
    """What the figure includes."""
    wrong: list[str] = field(default_factory=list)
    """Counts that do not agree: if there are any, the figure means nothing."""

    def expect(self, what: str, got: object, wanted: object) -> None:
        """Both must be equal."""
        if got != wanted:
            self.wrong.append(f"{what}: {_number(got)}, not {_number(wanted)}")

    def demand(self, level: str, reached: bool) -> None:
        """The level, and whether it was reached; two levels must both be."""
        self.level = f"{self.level}, {level}" if self.level else level
        self.reached = reached and self.reached is not False

    @property
    def verdict(self) -> str:
        """ok, missed or WRONG; empty where no level is set."""
        if self.wrong:
            return "WRONG"
        return {None: "", True: "ok", False: "missed"}[self.reached]


def without_levels(figures: Iterable[Figure]) -> None:
    """Take the levels away: these figures are of a run that was only to show that it works."""
    for figure in figures:
        figure.level, figure.reached = "", None


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def make_parser(name: str, description: str | None, plotted: str = "") -> argparse.ArgumentParser:
    """The options of `scripts/bench NAME`: --json and --quick; --plot for one that draws."""
    parser = argparse.ArgumentParser(
        prog=f"scripts/bench {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser, plotted)
    return parser


def report(
    options: argparse.Namespace,
    name: str,
    title: str,
    figures: list[Figure],
    console: Console,
    *,
    complete: bool = True,
) -> int:
    """Show the figures, and write them where `options` say. Returns the exit status: 1 where counts
    were wrong, or not all was measured."""
    if options.quick:
        without_levels(figures)
    show_figures(title, figures, console)
    if options.json is not None:
        write_json(options.json, name, figures)
    return 0 if complete and not any(figure.wrong for figure in figures) else 1


def add_options(parser: argparse.ArgumentParser, plotted: str = "") -> None:
    """--json and --quick; --plot for a benchmark that draws what is `plotted`."""
    if plotted:
        parser.add_argument("--plot", type=Path, metavar="FILE.png", help=f"draw {plotted}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    parser.add_argument(
        "--quick", action="store_true", help="as little as shows that it works, in seconds"
    )


def parse(parser: argparse.ArgumentParser, **quick: object) -> argparse.Namespace:
    """The options as they were given; with --quick, others are by default what `quick` says."""
    options = parser.parse_args()
    if options.quick:
        parser.set_defaults(**quick)
        options = parser.parse_args()
    return options


def write_json(path: Path, benchmark: str, figures: list[Figure], **more: Any) -> None:
    """One JSON document: which benchmark, on which Python, and its figures."""
    report = {
        "benchmark": benchmark,
        "python": platform.python_version(),
        "figures": as_documents(figures),
        **more,
    }
    path.write_text(json.dumps(report, indent=2) + "\n")


def new_drawing(panels: int, **options: Any) -> tuple[Any, Any]:
    """A figure with so many panels side by side, without a display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, panels, **options)
    return figure, axes


# ---- figures -----------------------------------------------------------------------------------


def make_console() -> Console:
    """The terminal as wide as it is; a file, or the log of a build, as wide as a table needs."""
    console = Console()
    return console if console.is_terminal else Console(width=PLAIN_WIDTH)


def show_figures(title: str, figures: list[Figure], console: Console) -> None:
    """All figures in one table, then what they include, and which counts do not agree."""
    names = list(dict.fromkeys(name for figure in figures for name in figure.ratios))
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column("case")
    table.add_column("figure", justify="right", no_wrap=True)
    beside = list(dict.fromkeys(name for figure in figures for name in figure.calibration))
    for name in ("p50 ms", "p99 ms", "max ms", "CPU µs", *(f"× {name}" for name in names)):
        table.add_column(name, justify="right", no_wrap=True)
    for name in beside:
        table.add_column(name, justify="right", style="dim")
    table.add_column("level")
    table.add_column("")
    colours = {"ok": "green", "missed": "yellow", "WRONG": "bold red", "": ""}
    for figure in figures:
        verdict, colour = figure.verdict, colours[figure.verdict]
        table.add_row(
            figure.case,
            f"{rounded(figure.value)} {figure.unit}",
            *(rounded(ms) for ms in (figure.p50_ms, figure.p99_ms, figure.max_ms, figure.cpu_us)),
            *(rounded(figure.ratios.get(name)) for name in names),
            *(rounded(figure.calibration.get(name)) for name in beside),
            figure.level,
            f"[{colour}]{verdict}[/]" if verdict else "",
        )
    console.print(table)
    levels = [figure for figure in figures if figure.reached is not None]
    if levels:
        reached = sum(figure.verdict == "ok" for figure in levels)
        console.print(f"{reached} of {len(levels)} levels are reached")
    for figure in figures:
        if figure.note:
            console.print(f"[bold]{figure.case}:[/] {figure.note}", style="dim", highlight=False)
    show_wrong(figures, console)


def show_wrong(figures: Iterable[Figure], console: Console) -> None:
    """Which counts do not agree."""
    for figure in figures:
        for wrong in figure.wrong:
            console.print(f"[bold red]{figure.case}: {wrong}")


def rounded(value: float | None) -> str:
    """A number as people read it; nothing for None."""
    if value is None:
        return ""
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 100 else f"{value:,.2f}"


def as_documents(figures: list[Figure]) -> list[dict[str, Any]]:
    """For JSON."""
    return [{**asdict(figure), "verdict": figure.verdict} for figure in figures]
