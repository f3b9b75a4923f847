"""An audit as a page to look at, and as a document for programs.

Cost: half a second for the drawings. Threads: one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter
from rich.console import Group
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from delayserver.pipeline.reports.audit import OUTCOMES, PERCENTILES, Audit
from delayserver.pipeline.reports.lateness import duration
from delayserver.pipeline.reports.page import (
    COLOURS,
    FAINT,
    INK,
    ReportPage,
    hours_below,
    legend,
    stacked,
)
from delayserver.times import format_time

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

EXAMPLES_SHOWN = 10
_EXAMPLE = ("subject", "subscription", "due")
SHOWN_MAX = 25
"""Subjects and subscriptions in a drawing or a table; the most, or the slowest."""
_UNBOUNDED = 100_000
USUAL = ("delivered", "cancelled", "dead", "pending")
_STATES = ("delivered", "retried", "dead", "cancelled", "moved", "dropped", "pending", "missing")
_TIMES = (*PERCENTILES, "max_ms")
_LINES = {"p50_ms": "#8bc8ea", "p99_ms": "#2f7ed8", "max_ms": "#7a8b99"}


def document(found: Audit) -> dict[str, Any]:
    """For --json."""
    return {
        "data_dir": found.data_dir,
        "shards": found.shards,
        "taken_at": format_time(found.taken_ms),
        "took_s": round(found.took_s, 1),
        "clean": found.is_clean,
        "messages": found.messages,
        "deliveries": found.deliveries,
        "violations": found.violations,
        "damage": found.damage,
        "examples": [_plain(row) for row in found.examples.to_dict("records")],
        "lateness": next(iter(_lines(found, "all")), {}),
        "hours": _lines(found, "hour"),
        "subjects": _lines(found, "subject"),
        "subscriptions": _lines(found, "subscription"),
    }


def _lines(found: Audit, dimension: str) -> list[dict[str, Any]]:
    lines = found.of(dimension).drop(columns=["key"])
    names = ["name", *(column for column in lines.columns if column != "name")]
    return [_plain(row) for row in lines[names].to_dict("records")]


def _plain(row: dict[Any, Any]) -> dict[str, Any]:
    return {str(name): _json_value(value) for name, value in row.items()}


def _json_value(value: Any) -> Any:
    """A value of a table as JSON has it."""
    if pd.isna(value):
        return None
    if isinstance(value, pd.Timestamp):
        return value.isoformat()
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    return value.item() if isinstance(value, np.generic) else value


def verdict(found: Audit) -> str:
    """One sentence."""
    if found.is_clean:
        return "Clean: every accepted message is accounted for, and none was settled twice."
    wrong = [
        f"{count:,} {name.replace('_', ' ')}" for name, count in found.violations.items() if count
    ]
    return f"Not clean: {', '.join(wrong)}."


def outcomes(found: Audit) -> list[str]:
    """The terms of the sum: the usual ones, and others where there are any."""
    return [name for name in OUTCOMES if name in USUAL or found.messages[name]]


def lines(found: Audit) -> Iterator["RenderableType"]:
    """For the terminal."""
    terms = " + ".join(f"{found.messages[name]:,} {name}" for name in outcomes(found))
    yield f"accepted {found.messages['accepted']:,} = {terms}"
    yield ", ".join(
        f"{name.replace('_', ' ')} {count:,}" for name, count in found.violations.items()
    )
    yield ""
    yield _table(found, "subject")
    yield ""
    yield _table(found, "subscription")
    for row in found.examples.head(EXAMPLES_SHOWN).to_dict("records"):
        subject, subscription, due = (_shown(row[name]) for name in _EXAMPLE)
        yield (
            f"[red]{row['problem']}[/]: {_of_shard(found, row['shard'])}seq {row['seq']} of "
            f"{subject or 'an unknown subject'}, "
            f"due {due}, subscription {subscription or '–'}"
        )
    for line in found.damage[:EXAMPLES_SHOWN]:
        yield f"[red]damaged[/]: {line['file']} at {line['offset']}: {line['reason']}"
    yield f"[{'green' if found.is_clean else 'bold red'}]{verdict(found)}[/] ({found.took_s:.1f} s)"


def _of_shard(found: Audit, shard: int) -> str:
    """Which shard a seq is of, where there are several."""
    return f"shard {shard}, " if found.shards > 1 else ""


@dataclass(frozen=True, slots=True)
class _Narrow:
    """A table, or where the screen is too narrow for it, lines for each of its rows."""

    table: Table
    lines: Group

    def __rich_console__(
        self, console: "Console", options: "ConsoleOptions"
    ) -> Iterator["RenderableType"]:
        unbounded = options.update(width=_UNBOUNDED)
        wanted = Measurement.get(console, unbounded, self.table).maximum
        yield self.table if wanted <= options.max_width else self.lines


def _table(found: Audit, dimension: str) -> "RenderableType":
    known = found.of(dimension).sort_values("delivered", ascending=False).head(SHOWN_MAX)
    states = [state for state in _STATES if known[state].any()]
    names = [dimension, *states, *map(_label, _LINES)]
    table = Table(box=None, padding=(0, 2), pad_edge=False, header_style="bold")
    for index, name in enumerate(names):
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    blocks: list[RenderableType] = []
    for _, line in known.iterrows():
        times = (duration(line[name]) if pd.notna(line[name]) else "–" for name in _LINES)
        cells = [escape(str(line["name"])), *(f"{line[state]:,}" for state in states), *times]
        table.add_row(*cells)
        block = Table.grid(padding=(0, 2))
        for name, cell in zip(names, cells, strict=True):
            block.add_row(f"[bold]{name}[/]", cell)
        blocks += [block, ""]
    return _Narrow(table, Group(*blocks[:-1]))


def page(found: Audit) -> str:
    """The page for --html."""
    made = ReportPage("Audit of a delay server")
    taken = datetime.fromtimestamp(found.taken_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    shards = f", {found.shards} shards" if found.shards > 1 else ""
    made.text(f"{found.data_dir}{shards}, {taken}; read in {found.took_s:.1f} s", "soft")
    made.text(verdict(found), f"verdict {'good' if found.is_clean else 'bad'}")
    terms: list[tuple[str, str, str] | str] = [(f"{found.messages['accepted']:,}", "accepted", "")]
    for index, name in enumerate(outcomes(found)):
        kind = "bad" if name == "missing" else ""
        terms += ["+" if index else "=", (f"{found.messages[name]:,}", name, kind)]
    made.tiles(terms)
    made.tiles(
        (f"{count:,}", name.replace("_", " "), "bad" if count else "good")
        for name, count in found.violations.items()
    )
    _violations(made, found)
    _hours(made, found)
    _lateness(made, found)
    _slowest(made, found, "subscription", "Slowest subscribers")
    _slowest(made, found, "subject", "Subjects")
    return made.render()


def _violations(made: ReportPage, found: Audit) -> None:
    if len(found.examples):
        made.heading("Violations")
        columns = ["problem", "subject", "subscription", "due", "settled", "seq", "message_id"]
        if found.shards > 1:
            columns.insert(columns.index("seq"), "shard")
        rows = found.examples[columns].astype(object).itertuples(index=False)
        made.table(columns, (tuple(_shown(value) for value in row) for row in rows))
    if found.damage:
        made.heading("Damage")
        places = ("file", "offset", "end", "reason", "first_seq", "last_seq")
        made.table(places, ([line[name] for name in places] for line in found.damage))


def _shown(value: Any) -> Any:
    if isinstance(value, pd.Timestamp):
        return value.strftime("%Y-%m-%d %H:%M:%S.") + f"{value.microsecond // 1000:03d}"
    return None if pd.isna(value) else value


def _hours(made: ReportPage, found: Audit) -> None:
    hours = found.of("hour")
    if not len(hours):
        return
    moments = pd.to_datetime(hours["name"]).dt.tz_localize(None).to_numpy()
    made.heading("What fell due, hour by hour")
    made.text("Each message counts once for each subscription that it was for.", "soft")

    def draw(axes: Axes) -> None:
        states = [state for state in _STATES if hours[state].any()]
        parts = ((state, hours[state].to_numpy(float), COLOURS[state]) for state in states)
        stacked(axes, moments, parts)

    made.drawing(draw)
    late = hours["p50_ms"].notna().to_numpy()
    if late.any():
        made.heading("Lateness, hour by hour")
        made.text("From due to recorded as delivered, the receiver's own time included.", "soft")

        def draw_late(axes: Axes) -> None:
            middle = moments[late] + np.timedelta64(27, "m")
            for name, colour in _LINES.items():
                values = np.maximum(hours[name].to_numpy(float)[late], 1)
                axes.plot(
                    middle, values, marker="o", markersize=4, color=colour, label=_label(name)
                )
            _time_axis(axes, "y")
            hours_below(axes)
            legend(axes)

        made.drawing(draw_late)


def _lateness(made: ReportPage, found: Audit) -> None:
    if not len(found.lateness):
        return
    overall = found.of("all").iloc[0]
    made.heading("Lateness of all deliveries")
    made.tiles((duration(float(overall[name])), _label(name), "") for name in _TIMES)

    def draw(axes: Axes) -> None:
        counts = found.lateness["count"].to_numpy(float)
        upper = np.maximum(found.lateness["upper_ms"].to_numpy(float), 1)
        # The share that is later: so the tail, which matters, is what is seen.
        later = 1 - np.cumsum(counts) / counts.sum()
        floor = 0.5 / counts.sum()
        axes.step(upper, np.maximum(later, floor), where="post", color="#2f7ed8", linewidth=2)
        axes.fill_between(
            upper, np.maximum(later, floor), floor, step="post", color="#2f7ed8", alpha=0.15
        )
        axes.set_yscale("log")
        axes.set_ylim(floor, 1)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value * 100:g} %"))
        axes.set_ylabel("of deliveries are later than")
        _time_axis(axes, "x")

    made.drawing(draw)


def _slowest(made: ReportPage, found: Audit, dimension: str, title: str) -> None:
    lines = found.of(dimension)
    if not len(lines):
        return
    made.heading(title)
    slow = lines[lines["p99_ms"].notna()].sort_values("p99_ms", ascending=False).head(SHOWN_MAX)

    def draw(axes: Axes) -> None:
        shown = slow.iloc[::-1]
        places = np.arange(len(shown))
        p50, p99, most = (
            np.maximum(shown[name].to_numpy(float), 1) for name in ("p50_ms", "p99_ms", "max_ms")
        )
        axes.hlines(places, p50, most, color=FAINT, linewidth=5)
        axes.hlines(places, p50, p99, color="#8bc8ea", linewidth=5)
        axes.scatter(p50, places, color="#2f7ed8", label="p50", zorder=3)
        axes.scatter(p99, places, color="#e69f00", label="p99", zorder=3)
        axes.scatter(most, places, color="#7a8b99", marker="|", s=90, label="max", zorder=3)
        axes.set_yticks(places, labels=[str(name)[:40] for name in shown["name"]], color=INK)
        axes.set_ylim(-0.7, len(shown) - 0.3)
        axes.grid(False, axis="y")
        _time_axis(axes, "x")
        legend(axes)

    if len(slow):
        made.drawing(draw, height=1.1 + 0.3 * len(slow))
    # The drawing shows the slowest, the table those with the most deliveries.
    order = lines.sort_values("delivered", ascending=False).head(SHOWN_MAX)
    states = [state for state in _STATES if lines[state].any()]
    columns = [dimension, *states, *(_label(name) for name in _TIMES)]
    made.table(
        columns,
        (
            [line["name"], *(int(line[state]) for state in states)]
            + [duration(line[name]) if pd.notna(line[name]) else None for name in _TIMES]
            for _, line in order.iterrows()
        ),
    )
    if len(lines) > SHOWN_MAX:
        made.text(f"{len(lines) - SHOWN_MAX:,} more are in the JSON and Parquet output.", "soft")


def _label(name: str) -> str:
    """`p999_ms` as `p99.9`."""
    text = name.removesuffix("_ms")
    return "p99.9" if text == "p999" else text


def _time_axis(axes: Axes, which: str) -> None:
    axis = axes.yaxis if which == "y" else axes.xaxis
    (axes.set_yscale if which == "y" else axes.set_xscale)("log")
    axis.set_major_formatter(FuncFormatter(lambda value, _: duration(value)))
    axis.set_minor_formatter(FuncFormatter(lambda value, _: ""))
