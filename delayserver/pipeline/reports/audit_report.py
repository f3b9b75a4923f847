"""An audit as one page to look at.

Cost: half a second for the drawings. Threads: one.
"""

from datetime import UTC, datetime
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from delayserver.pipeline.audits.audit import Audit
from delayserver.pipeline.audits.groups import PERCENTILES
from delayserver.pipeline.audits.telling import (
    SHOWN_MAX,
    TIMES_SHOWN,
    label,
    most_delivered,
    not_looked_at,
    outcomes,
    shown_states,
    verdict,
)
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
from storage.rows import HOUR_MS

_TIMES = (*PERCENTILES, "max_ms")
_LINES = dict(zip(TIMES_SHOWN, ("#8bc8ea", "#2f7ed8", "#7a8b99"), strict=True))


def page(found: Audit) -> str:
    """The page for --html."""
    made = ReportPage("Audit of a delay server")
    taken = datetime.fromtimestamp(found.taken_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    shards = f", {found.shards} shards" if found.shards > 1 else ""
    made.text(f"{found.data_dir}{shards}, {taken}; read in {found.took_s:.1f} s", "soft")
    made.text(verdict(found), f"verdict {'good' if found.is_clean else 'bad'}")
    made.text(f"Not looked at: {'; '.join(not_looked_at(found))}.", "soft")
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
    _open(made, found)
    _hours(made, found)
    _lateness(made, found)
    _slowest(made, found, "subscription", "Slowest subscribers")
    _slowest(made, found, "subject", "Subjects")
    return made.render()


def _violations(made: ReportPage, found: Audit) -> None:
    if found.examples:
        made.heading("Violations")
        columns = ["problem", "subject", "subscription", "due", "settled", "seq", "message_id"]
        if found.shards > 1:
            columns.insert(columns.index("seq"), "shard")
        made.table(columns, ([row[name] for name in columns] for row in found.examples))
    if found.damage:
        made.heading("Damage")
        places = ("file", "offset", "end", "reason", "first_seq", "last_seq")
        made.table(places, ([line[name] for name in places] for line in found.damage))


def _open(made: ReportPage, found: Audit) -> None:
    if found.open_hours:
        made.heading("Hours that are over and open")
        columns = ["hour", "subject", "subscription", "count", "message_id"]
        if found.shards > 1:
            columns.insert(1, "shard")
        shown = found.open_hours[:SHOWN_MAX]
        made.table(columns, ([getattr(one, name) for name in columns] for one in shown))
        if len(found.open_hours) > SHOWN_MAX:
            made.text(f"{len(found.open_hours) - SHOWN_MAX:,} more are in the JSON output.", "soft")


def _column(lines: list[dict[str, Any]], name: str) -> np.ndarray:
    """A column of the lines; a missing value is not a number."""
    return np.array([np.nan if line[name] is None else line[name] for line in lines], float)


def _hours(made: ReportPage, found: Audit) -> None:
    hours = found.of("hour")
    if not hours:
        return
    moments = np.array([line["key"] * HOUR_MS for line in hours], "datetime64[ms]")
    made.heading("What fell due, hour by hour")
    made.text("Each message counts once for each subscription that it was for.", "soft")

    def draw(axes: Axes) -> None:
        parts = ((one, _column(hours, one), COLOURS[one]) for one in shown_states(hours))
        stacked(axes, moments, parts)

    made.drawing(draw)
    late = ~np.isnan(_column(hours, "p50_ms"))
    if late.any():
        made.heading("Lateness, hour by hour")
        made.text("From due to recorded as delivered, the receiver's own time included.", "soft")

        def draw_late(axes: Axes) -> None:
            middle = moments[late] + np.timedelta64(27, "m")
            for name, colour in _LINES.items():
                values = np.maximum(_column(hours, name)[late], 1)
                axes.plot(middle, values, marker="o", markersize=4, color=colour, label=label(name))
            _time_axis(axes, "y")
            hours_below(axes)
            legend(axes)

        made.drawing(draw_late)


def _lateness(made: ReportPage, found: Audit) -> None:
    if not found.lateness:
        return
    (overall,) = found.of("all")
    made.heading("Lateness of all deliveries")
    made.tiles((duration(float(overall[name])), label(name), "") for name in _TIMES)

    def draw(axes: Axes) -> None:
        counts = _column(found.lateness, "count")
        upper = np.maximum(_column(found.lateness, "upper_ms"), 1)
        # The share of later deliveries is drawn, so that the tail is seen, which matters most.
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
    if not lines:
        return
    made.heading(title)
    slow = [line for line in lines if line["p99_ms"] is not None]
    slow = sorted(slow, key=lambda line: -line["p99_ms"])[:SHOWN_MAX]

    def draw(axes: Axes) -> None:
        shown = slow[::-1]
        places = np.arange(len(shown))
        p50, p99, most = (
            np.maximum(_column(shown, name), 1) for name in ("p50_ms", "p99_ms", "max_ms")
        )
        axes.hlines(places, p50, most, color=FAINT, linewidth=5)
        axes.hlines(places, p50, p99, color="#8bc8ea", linewidth=5)
        axes.scatter(p50, places, color="#2f7ed8", label="p50", zorder=3)
        axes.scatter(p99, places, color="#e69f00", label="p99", zorder=3)
        axes.scatter(most, places, color="#7a8b99", marker="|", s=90, label="max", zorder=3)
        axes.set_yticks(places, labels=[str(line["name"])[:40] for line in shown], color=INK)
        axes.set_ylim(-0.7, len(shown) - 0.3)
        axes.grid(False, axis="y")
        _time_axis(axes, "x")
        legend(axes)

    if slow:
        made.drawing(draw, height=1.1 + 0.3 * len(slow))
    # The drawing shows the slowest, the table those with the most deliveries.
    order = most_delivered(found, dimension)
    states = shown_states(order)
    columns = [dimension, *states, *(label(name) for name in _TIMES)]
    made.table(
        columns,
        (
            [line["name"], *(line[state] for state in states)]
            + [None if line[name] is None else duration(line[name]) for name in _TIMES]
            for line in order
        ),
    )
    if len(lines) > SHOWN_MAX:
        made.text(f"{len(lines) - SHOWN_MAX:,} more are in the JSON and Parquet output.", "soft")


def _time_axis(axes: Axes, which: str) -> None:
    axis = axes.yaxis if which == "y" else axes.xaxis
    (axes.set_yscale if which == "y" else axes.set_xscale)("log")
    axis.set_major_formatter(FuncFormatter(lambda value, _: duration(value)))
    axis.set_minor_formatter(FuncFormatter(lambda value, _: ""))
