"""A base and a head that were measured by turns in one run: the ratio of each figure, and of each
group of them.

A machine that others use moves figures by more than a change of the code does, but it moves those
of one round alike. So each round gives a ratio, and the median of the rounds is what is said.
"""

import statistics
from collections import defaultdict
from dataclasses import dataclass

from report import Figure, rounded
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Ratio:
    """How a head stands beside its base in one case, over the rounds of one run. A ratio above 1
    is in favour of the head: quicker, earlier or smaller."""

    group: str
    case: str
    rounds: list[float]
    """The ratio of each round: of the figure itself, or of p99 if that is what a case is about."""
    p99: float | None
    """Of the 99th percentiles, if the figure is another one."""
    cpu: float | None
    """Of the server's processor time."""

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)


def compare(base: list[Figure], head: list[Figure]) -> list[Ratio]:
    """Figures of the same case, round by round. Cases that only one side has are left out, as are
    figures that are wrong, and such as were nothing."""
    sides: dict[str, tuple[list[Figure], list[Figure]]] = defaultdict(lambda: ([], []))
    for which, figures in enumerate((base, head)):
        for figure in figures:
            sides[figure.case][which].append(figure)
    ratios = []
    for case, (befores, afters) in sides.items():
        pairs = [
            pair
            for pair in zip(befores, afters, strict=False)
            if not any(figure.wrong for figure in pair)
        ]
        rounds = [ratio for pair in pairs if (ratio := _of_figure(*pair)) is not None]
        if not rounds:
            continue
        is_p99 = _is_p99(afters[0])
        p99s = [] if is_p99 else [_less(one.p99_ms, other.p99_ms) for one, other in pairs]
        cpus = [_less(one.cpu_us, other.cpu_us) for one, other in pairs]
        ratios.append(Ratio(afters[0].group, case, rounds, _median(p99s), _median(cpus)))
    return ratios


def _is_p99(figure: Figure) -> bool:
    """Whether its value is only how many there were."""
    return figure.unit in ("msg", "due/s")


def _of_figure(base: Figure, head: Figure) -> float | None:
    if _is_p99(head):
        return _less(base.p99_ms, head.p99_ms)
    if head.unit.endswith("/s"):
        return _less(head.value, base.value)
    return _less(base.value, head.value)


def _less(base: float | None, head: float | None) -> float | None:
    """The ratio of two figures of which the smaller one is the better one."""
    return base / head if base is not None and head and base > 0 and head > 0 else None


def _median(ratios: list[float | None]) -> float | None:
    known = [ratio for ratio in ratios if ratio is not None]
    return statistics.median(known) if known else None


def show_comparison(
    title: str, base: list[Figure], head: list[Figure], ratios: list[Ratio], console: Console
) -> None:
    """Both sides of each case with their ratios, then one line for each group of cases."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column("case")
    names = ("base", "head", "ratio", "rounds", "base p99 ms", "head p99 ms", "ratio", "CPU ratio")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for ratio in ratios:
        before, after = (
            [figure for figure in side if figure.case == ratio.case] for side in (base, head)
        )
        table.add_row(
            ratio.case,
            *(f"{rounded(_middle(side, 'value'))} {side[0].unit}" for side in (before, after)),
            f"{ratio.median:.2f}",
            " ".join(f"{one:.2f}" for one in ratio.rounds),
            *(rounded(_middle(side, "p99_ms")) for side in (before, after)),
            *("" if one is None else f"{one:.2f}" for one in (ratio.p99, ratio.cpu)),
        )
    console.print(table)
    summary = Table(box=SIMPLE_HEAD)
    for name in ("level", "ratio", "CPU ratio", "least", "of"):
        summary.add_column(name, justify="left" if name in ("level", "of") else "right")
    groups: dict[str, list[Ratio]] = defaultdict(list)
    for ratio in ratios:
        groups[ratio.group].append(ratio)
    for group, members in groups.items():
        least = min(members, key=lambda one: one.median)
        cpus = [one.cpu for one in members if one.cpu is not None]
        summary.add_row(
            group,
            f"{statistics.geometric_mean(one.median for one in members):.2f}",
            f"{statistics.geometric_mean(cpus):.2f}" if cpus else "",
            f"{least.median:.2f}",
            least.case,
        )
    console.print(summary)
    console.print(
        "Above 1: head is quicker, earlier or smaller. Of rounds the median, of cases the mean.",
        style="dim",
    )


def _middle(figures: list[Figure], name: str) -> float | None:
    return _median([getattr(figure, name) for figure in figures])
