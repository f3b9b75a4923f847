"""One self-contained HTML page: drawings as inline SVG, tiles, tables. It loads nothing.

It follows the reader's light or dark setting: drawings use placeholder colours, which become
variables of the page's style sheet.

Cost: about 0.2 s per drawing. Threads: one; matplotlib is used without its global state.
"""

import html
import io
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

INK, FAINT = "#010101", "#020202"
"""Text, and lines behind the data."""
COLOURS = {
    "delivered": "#2f7ed8",
    "cancelled": "#9aa5b1",
    "pending": "#8bc8ea",
    "dead": "#e69f00",
    "dropped": "#b8a0d0",
    "deleted": "#d0d5db",
    "missing": "#d7263d",
    "retried": "#c9a66b",
    "moved": "#7fb7a3",
}
SERIES = ("#2f7ed8", "#e69f00", "#2a9d8f", "#b5559b", "#7a8b99", "#d7263d", "#8bc8ea", "#5b8c2a")
"""Colours for series that have no meaning of their own."""
_VARIABLES = {INK: "var(--ink)", FAINT: "var(--faint)"}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "delayserver",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
}
_CSS = """
:root { --ink: #1c2733; --faint: #e3e8ee; --paper: #fff; --card: #f6f8fa; --good: #1a7f4b;
  --bad: #c21f39; --soft: #5b6b7c; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --faint: #323b45; --paper: #12171d;
  --card: #1b222a; --good: #4cc38a; --bad: #ff6b81; --soft: #9aa8b6; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 68rem; padding: 2rem 1.2rem 4rem; background: var(--paper);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.7rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2.4rem 0 .4rem; }
p { margin: .3rem 0; } .soft { color: var(--soft); }
.verdict { font-size: 1.25rem; font-weight: 600; margin: .8rem 0 1.2rem; }
.good { color: var(--good); } .bad { color: var(--bad); }
.tiles { display: flex; flex-wrap: wrap; gap: .6rem; align-items: center; margin: .6rem 0; }
.tile { background: var(--card); border-radius: .6rem; padding: .55rem .9rem; min-width: 6.5rem; }
.tile b { display: block; font-size: 1.35rem; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: .85rem; } .op { font-size: 1.3rem; color: var(--soft); }
svg { max-width: 100%; height: auto; } figure { margin: .6rem 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .25rem .8rem .25rem 0; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--faint); }
th { color: var(--soft); font-weight: 500; } th.text, td.text { text-align: left; }
"""


@dataclass(slots=True)
class ReportPage:
    """A page that is being written from top to bottom."""

    title: str
    parts: list[str] = field(default_factory=list)

    def heading(self, text: str) -> None:
        """A heading."""
        self.parts.append(f"<h2>{html.escape(text)}</h2>")

    def text(self, text: str, kind: str = "") -> None:
        """A paragraph; `kind`: verdict good, verdict bad, soft."""
        self.parts.append(f'<p class="{kind}">{html.escape(text)}</p>')

    def tiles(self, tiles: Iterable[tuple[str, str, str] | str]) -> None:
        """Numbers with their names and kinds (good, bad or empty); a text alone is an operator."""
        parts = []
        for tile in tiles:
            if isinstance(tile, str):
                parts.append(f'<div class="op">{html.escape(tile)}</div>')
            else:
                number, name, kind = map(html.escape, tile)
                parts.append(
                    f'<div class="tile"><b class="{kind}">{number}</b><span>{name}</span></div>'
                )
        self.parts.append(f'<div class="tiles">{"".join(parts)}</div>')

    def drawing(self, draw: Callable[[Axes], None], *, height: float = 3.0) -> None:
        """A drawing, 10 inches wide."""
        self.parts.append(f"<figure>{drawing(draw, height=height)}</figure>")

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """A table; numbers stand to the right."""
        body = []
        texts = [True] * len(columns)
        for row in rows:
            cells = []
            for index, value in enumerate(row):
                is_number = isinstance(value, int | float)
                texts[index] = texts[index] and not is_number
                kind = "" if is_number else ' class="text"'
                cells.append(f"<td{kind}>{html.escape(cell(value))}</td>")
            body.append(f"<tr>{''.join(cells)}</tr>")
        head = "".join(
            f"<th{' class=text' if text else ''}>{html.escape(name)}</th>"
            for name, text in zip(columns, texts, strict=True)
        )
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
        self.parts.append(f'<div class="wide">{table}</div>')

    def render(self) -> str:
        """The document."""
        title = html.escape(self.title)
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{title}</title><style>{_CSS}</style></head>\n<body><h1>{title}</h1>\n"
            + "\n".join(self.parts)
            + "\n</body></html>\n"
        )


def cell(value: object) -> str:
    """A value as people read it."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if value.is_integer() or abs(value) >= 100 else f"{value:,.2f}"
    return str(value)


def drawing(draw: Callable[[Axes], None], *, height: float) -> str:
    """The drawing of `draw`, as an SVG element."""
    with rc_context(_STYLE):
        figure = Figure(figsize=(10, height), layout="constrained")
        FigureCanvasSVG(figure)
        figure.patch.set_visible(False)
        axes = figure.add_subplot()
        axes.patch.set_visible(False)
        draw(axes)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    return svg


def legend(axes: Axes) -> None:
    """The names of the series, above the drawing."""
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=8, borderaxespad=0.2)


def stacked(axes: Axes, moments: np.ndarray, parts: Iterable[tuple[str, np.ndarray, str]]) -> None:
    """Bars of an hour, stacked: name, count at each moment, and colour of each part."""
    base = np.zeros(len(moments))
    for name, counts, colour in parts:
        axes.bar(
            moments,
            counts,
            width=np.timedelta64(54, "m"),
            bottom=base,
            align="edge",
            color=colour,
            label=name,
        )
        base += counts
    axes.grid(False, axis="x")
    counts_beside(axes)
    hours_below(axes)
    legend(axes)


def counts_beside(axes: Axes) -> None:
    """Whole numbers beside a drawing."""
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def hours_below(axes: Axes) -> None:
    """Dates and times of day below a drawing, each said once."""
    locator = AutoDateLocator()  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_locator(locator)
    labels = ConciseDateFormatter(locator)  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_formatter(labels)
