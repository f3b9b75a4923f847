"""An audit in words: lines for a terminal, and a document for programs.

Cost: none. Threads: pure functions.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from delayserver.pipeline.audits.audit import OUTCOMES, Audit
from delayserver.pipeline.audits.open_hours import OpenHour
from delayserver.pipeline.reports.lateness import duration
from delayserver.times import format_time

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

EXAMPLES_SHOWN = 10
SHOWN_MAX = 25
"""Subjects and subscriptions in a table, by their deliveries or their lateness."""
USUAL = ("delivered", "cancelled", "dead", "pending")
STATES = ("delivered", "retried", "dead", "cancelled", "moved", "dropped", "pending", "missing")
TIMES_SHOWN = ("p50_ms", "p99_ms", "max_ms")
UNDOUBTED = (
    "the due time, subject and options of what waits (nothing is there to compare them with)",
    "a delivery whose record was taken out of an hour that is not retired: it is made again",
    "when a delivery ended and at which attempt, if that is possible",
    "which of two deleted subscriptions had a message",
    "which of two messages of one subject and one millisecond was cancelled",
    "whether a message was cancelled, moved or tried again, where all that is left agrees",
    "an hour that is over, if catalog and dispatch log know nothing of it: it was deleted",
    "the end of the message log: nothing says that more was accepted",
    "what only a repair reads (`delayserver check` does)",
)
"""The checks that no audit makes, whatever its options."""
_UNBOUNDED = 100_000


def document(found: Audit) -> dict[str, Any]:
    """For --json."""
    return {
        "data_dir": found.data_dir,
        "shards": found.shards,
        "taken_at": format_time(found.taken_ms),
        "took_s": round(found.took_s, 1),
        "clean": found.is_clean,
        "verdict": verdict(found),
        "not_looked_at": list(not_looked_at(found)),
        "messages": found.messages,
        "deliveries": found.deliveries,
        "violations": found.violations,
        "damage": found.damage,
        "examples": found.examples,
        "since": None if found.since_ms is None else format_time(found.since_ms),
        "hours_judged": found.hours_judged,
        "hours_kept": found.hours_kept,
        "hours_left_out": found.hours_left_out,
        "open_hours": [asdict(one) for one in found.open_hours],
        "bodies_verified": found.bodies,
        "lateness": next(iter(_lines(found, "all")), {}),
        "hours": _lines(found, "hour"),
        "subjects": _lines(found, "subject"),
        "subscriptions": _lines(found, "subscription"),
    }


def _lines(found: Audit, dimension: str) -> list[dict[str, Any]]:
    hidden = ("dimension", "key")
    return [
        {name: value for name, value in line.items() if name not in hidden}
        for line in found.of(dimension)
    ]


def verdict(found: Audit) -> str:
    """One sentence, and the checks that it does not cover."""
    if found.is_clean:
        said = "Clean: every accepted message is accounted for, and none was settled twice."
    else:
        wrong = [
            f"{count:,} {name.replace('_', ' ')}"
            for name, count in found.violations.items()
            if count
        ]
        said = f"Not clean: {', '.join(wrong)}."
    if found.since_ms is not None:
        since = format_time(found.since_ms)
        said += f" Hours before {since} were left out ({found.hours_left_out:,})."
    if found.hours_kept:
        said += f" {found.hours_kept:,} hours are as an earlier audit found them."
    if found.bodies is None:
        return f"{said} Bodies were not read."
    return f"{said} {found.bodies:,} bodies were read."


def not_looked_at(found: Audit) -> Iterator[str]:
    """The checks that this verdict does not cover."""
    if found.bodies is None:
        yield "bodies, keys and headers (--bodies reads those of what is in schedule files)"
    if found.since_ms is not None:
        yield f"hours before {format_time(found.since_ms)}"
    yield from UNDOUBTED


def outcomes(found: Audit) -> list[str]:
    """The terms of the sum: the usual ones, and others that are not zero."""
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
    for row in found.examples[:EXAMPLES_SHOWN]:
        yield (
            f"[red]{row['problem']}[/]: {_of_shard(found, row['shard'])}seq {row['seq']} of "
            f"{escape(row['subject'] or 'an unknown subject')}, "
            f"due {row['due']}, subscription {escape(row['subscription'] or '–')}"
        )
    for place in found.damage[:EXAMPLES_SHOWN]:
        yield f"[red]damaged[/]: {place['file']} at {place['offset']}: {escape(place['reason'])}"
    yield from _open_lines(found)
    yield f"[{'green' if found.is_clean else 'bold red'}]{verdict(found)}[/] ({found.took_s:.1f} s)"


def _open_lines(found: Audit) -> Iterator[str]:
    """The hours that are over and open, the oldest first."""
    for one in found.open_hours[:EXAMPLES_SHOWN]:
        yield f"[yellow]open[/]: {escape(open_text(found, one))}"
    rest = len(found.open_hours) - EXAMPLES_SHOWN
    if rest > 0:
        yield f"[yellow]open[/]: {rest:,} more, see --json"


def open_text(found: Audit, one: OpenHour) -> str:
    """In words, the messages that keep an hour open."""
    whose = f"{one.subject or 'an unknown subject'}"
    why = "no subscription matches" if one.is_unmatched else f"waits for {one.subscription}"
    first = f"message {one.message_id}" if one.message_id else f"seq {one.seq}"
    shard = _of_shard(found, one.shard)
    return f"{one.hour} is kept open by {one.count:,} of {whose} ({why}), {shard}first {first}"


def _of_shard(found: Audit, shard: int) -> str:
    """The shard of a seq, if there are several."""
    return f"shard {shard}, " if found.shards > 1 else ""


@dataclass(frozen=True, slots=True)
class _Narrow:
    """A table, or, on a narrow screen, lines for each of its rows."""

    table: Table
    lines: Group

    def __rich_console__(
        self, console: "Console", options: "ConsoleOptions"
    ) -> Iterator["RenderableType"]:
        unbounded = options.update(width=_UNBOUNDED)
        wanted = Measurement.get(console, unbounded, self.table).maximum
        yield self.table if wanted <= options.max_width else self.lines


def most_delivered(found: Audit, dimension: str) -> list[dict[str, Any]]:
    """The lines with the most deliveries."""
    return sorted(found.of(dimension), key=lambda line: -line["delivered"])[:SHOWN_MAX]


def shown_states(lines_shown: list[dict[str, Any]]) -> list[str]:
    """The states that any of the lines has."""
    return [state for state in STATES if any(line[state] for line in lines_shown)]


def _table(found: Audit, dimension: str) -> "RenderableType":
    known = most_delivered(found, dimension)
    states = shown_states(known)
    names = [dimension, *states, *map(label, TIMES_SHOWN)]
    table = Table(box=None, padding=(0, 2), pad_edge=False, header_style="bold")
    for index, name in enumerate(names):
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    blocks: list[RenderableType] = []
    for line in known:
        times = ("–" if line[name] is None else duration(line[name]) for name in TIMES_SHOWN)
        cells = [escape(str(line["name"])), *(f"{line[state]:,}" for state in states), *times]
        table.add_row(*cells)
        block = Table.grid(padding=(0, 2))
        for name, cell in zip(names, cells, strict=True):
            block.add_row(f"[bold]{name}[/]", cell)
        blocks += [block, ""]
    return _Narrow(table, Group(*blocks[:-1]))


def label(name: str) -> str:
    """`p999_ms` as `p99.9`."""
    text = name.removesuffix("_ms")
    return "p99.9" if text == "p999" else text
