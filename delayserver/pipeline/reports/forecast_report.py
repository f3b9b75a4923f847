"""A forecast as a page to look at, and as a document for programs.

Cost: half a second for the drawings. Threads: one.
"""

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from rich.markup import escape
from rich.table import Table

from delayserver.pipeline.reports.forecast import MINUTE_MS, OTHERS, Forecast
from delayserver.pipeline.reports.page import (
    SERIES,
    ReportPage,
    cell,
    counts_beside,
    hours_below,
    legend,
    stacked,
)
from delayserver.times import format_time

if TYPE_CHECKING:
    from rich.console import RenderableType

_LINES = 10
_MIB = 1024 * 1024
_SHOWN_SUBJECTS = len(SERIES) - 1
_SHOWN_HOURS = 24


def document(found: Forecast) -> dict[str, Any]:
    """For --json."""
    return {
        "data_dir": found.data_dir,
        "taken_at": format_time(found.taken_ms),
        "took_s": round(found.took_s, 1),
        "days": found.days,
        "waiting": found.waiting,
        "overdue": found.overdue,
        "damaged": found.damaged,
        "subjects": [
            {"subject": name, "due": due}
            for name, due in zip(
                found.subjects["subject"], found.subjects["due"].tolist(), strict=True
            )
        ],
        "hours": [
            {"from": format_time(hour_ms), "due": due, "memory_bytes": memory}
            for hour_ms, due, memory in found.hours.itertuples(index=False)
        ],
        "hot_minutes": [
            {"from": format_time(minute_ms), "due": due}
            for minute_ms, due in found.hot.itertuples(index=False)
        ],
        "minutes": [
            [int(minute_ms), int(due)] for minute_ms, due in found.minutes.itertuples(index=False)
        ],
    }


def _subjects(found: Forecast) -> Iterator[tuple[str, int]]:
    return zip(found.subjects["subject"], found.subjects["due"].tolist(), strict=True)


def lines(found: Forecast) -> Iterator["RenderableType"]:
    """For the terminal."""
    yield f"{found.waiting:,} messages wait, {found.overdue:,} are due and not settled"
    if found.damaged:
        yield f"[red]{found.damaged:,} damaged places are left out[/]; see `delayserver check`"
    yield ""
    yield _table(("subject", "waiting"), list(_subjects(found))[:_LINES])
    yield ""
    hot = ((_minute(at), int(due), round(due / 60, 2)) for at, due in found.hot.head(_LINES).values)
    yield _table(("hot minute (UTC)", "due", "per second"), hot)
    yield ""
    hours = found.hours.nlargest(_LINES, "memory_bytes")
    yield _table(
        ("largest hour (UTC)", "due", "MiB"),
        ((_minute(at), int(due), round(memory / _MIB, 2)) for at, due, memory in hours.values),
    )
    yield f"({found.took_s:.1f} s)"


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    table = Table(box=None, padding=(0, 2), pad_edge=False, header_style="bold")
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left")
    for row in rows:
        table.add_row(*(escape(cell(value)) for value in row))
    return table


def _minute(at_ms: int) -> str:
    return str(pd.Timestamp(at_ms, unit="ms"))[:16]


def page(found: Forecast) -> str:
    """The page for --html."""
    made = ReportPage("Forecast of a delay server")
    taken = datetime.fromtimestamp(found.taken_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    made.text(f"{found.data_dir}, {taken}; read in {found.took_s:.1f} s", "soft")
    hot = found.hot
    most = int(hot["due"].iloc[0]) if len(hot) else 0
    largest = int(found.hours["memory_bytes"].max()) if len(found.hours) else 0
    made.tiles(
        [
            (f"{found.waiting:,}", "waiting", ""),
            (f"{found.overdue:,}", "due and not settled", "bad" if found.overdue else ""),
            (f"{most:,}", "in the hottest minute", ""),
            (f"{most / 60:,.0f}/s", "over that minute", ""),
            (f"{largest / _MIB:,.1f} MiB", "for the largest hour", ""),
        ]
    )
    if found.damaged:
        made.text(
            f"{found.damaged:,} damaged places are left out; see `delayserver check`.",
            "bad",
        )
    if not found.waiting:
        made.text("Nothing waits.")
        return made.render()
    _minutes(made, found)
    _by_subject(made, found)
    _memory(made, found)
    return made.render()


def _minutes(made: ReportPage, found: Forecast) -> None:
    minutes = found.minutes
    if not len(minutes):
        return
    made.heading(f"Due per minute, the next {found.days} days")
    moments, due = _filled(minutes)

    def draw(axes: Axes) -> None:
        axes.fill_between(moments, due, step="post", color=SERIES[0], alpha=0.25, linewidth=0)
        axes.step(moments, due, where="post", color=SERIES[0], linewidth=1)
        hot = found.hot
        axes.scatter(
            pd.to_datetime(hot["minute_ms"], unit="ms").to_numpy(),
            hot["due"].to_numpy(),
            color=SERIES[1],
            s=18,
            zorder=3,
            label="hot minutes",
        )
        axes.set_ylim(bottom=0)
        counts_beside(axes)
        hours_below(axes)
        legend(axes)

    made.drawing(draw)
    made.heading("Hot minutes")
    made.table(
        ("minute (UTC)", "due", "per second"),
        (
            (_minute(minute_ms), int(count), round(count / 60, 2))
            for minute_ms, count in found.hot.itertuples(index=False)
        ),
    )


def _filled(minutes: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """The minutes, and those beside them without a row, so that the drawing falls to zero there."""
    at = minutes["minute_ms"].to_numpy(np.int64)
    due = minutes["due"].to_numpy(np.int64)
    counts = dict(zip(at.tolist(), due.tolist(), strict=True))
    beside = np.unique(np.concatenate([at - MINUTE_MS, at, at + MINUTE_MS]))
    moments = pd.to_datetime(beside, unit="ms").to_numpy()
    return moments, np.array([counts.get(minute_ms, 0) for minute_ms in beside.tolist()])


def _by_subject(made: ReportPage, found: Forecast) -> None:
    if not len(found.by_subject):
        return
    made.heading("By hour and subject")
    table = found.by_subject.pivot_table(
        index="hour_ms", columns="subject", values="due", aggfunc="sum", fill_value=0
    )
    order = table.sum().sort_values(ascending=False).index
    named = [name for name in order if name != OTHERS][:_SHOWN_SUBJECTS]
    rest = table.drop(columns=named).sum(axis=1)
    moments = pd.to_datetime(table.index.to_numpy(), unit="ms").to_numpy()

    def draw(axes: Axes) -> None:
        parts = [(str(name), table[name].to_numpy(float)) for name in named]
        if rest.any():
            parts.append(("others", rest.to_numpy(float)))
        coloured = zip(parts, SERIES, strict=False)
        stacked(axes, moments, ((*part, colour) for part, colour in coloured))

    made.drawing(draw)
    made.table(
        ("subject", "waiting"),
        _subjects(found),
    )


def _memory(made: ReportPage, found: Forecast) -> None:
    made.heading("Memory of each hour")
    made.text(
        "From ten minutes before it begins until it is settled; while it is loaded, about as much "
        "again. Bodies are read when they are sent.",
        "soft",
    )
    hours = found.hours.nlargest(_SHOWN_HOURS, "memory_bytes").sort_values("hour_ms")
    made.table(
        ("hour (UTC)", "due", "MiB"),
        (
            (_minute(hour_ms), int(due), round(memory / _MIB, 2))
            for hour_ms, due, memory in hours.itertuples(index=False)
        ),
    )
    if len(found.hours) > _SHOWN_HOURS:
        made.text(f"The largest {_SHOWN_HOURS} of {len(found.hours):,} hours.", "soft")
