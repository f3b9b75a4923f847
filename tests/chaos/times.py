"""How long nobody was answered, and nothing was delivered, by kind of strike.

    next     from the strike to the next answer to a publish that was sent after it, and to the next
             delivery that was not under way any more
    silence  the longest time without one, from the strike until all was well again

A strike that does not stop a shard (a broker that does not lead) has a short `next` and shows in
`silence`, if at all.

Cost: two numbers for each publish. Threads: one.
"""

import itertools
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from delayserver.cli.demo.ledger import RECEIVE_MS

if TYPE_CHECKING:
    from rich.table import Table

FIGURES = ("next_answer_s", "answer_silence_s", "next_delivery_s", "delivery_silence_s")


@dataclass
class ShardTimes:
    """When a shard did something; seconds of a stopwatch, in the order in which they came."""

    asked_s: list[float] = field(default_factory=list)
    """When a publish was sent that was answered ..."""
    answered_s: list[float] = field(default_factory=list)
    """... at this time."""
    delivered_s: list[float] = field(default_factory=list)

    def answered(self, asked_s: float, at_s: float) -> None:
        """A publish was answered."""
        self.asked_s.append(asked_s)
        self.answered_s.append(at_s)

    def delivered(self, at_s: float) -> None:
        """A delivery came."""
        self.delivered_s.append(at_s)


@dataclass(frozen=True)
class Struck:
    """What a strike has cost a shard."""

    strike: str
    round: int
    shard: int
    handovers: int
    next_answer_s: float | None
    """None: there was none."""
    answer_silence_s: float
    next_delivery_s: float | None
    delivery_silence_s: float

    def to_json(self) -> dict[str, Any]:
        """As a figure of a run."""
        return {"case": f"strike, {self.strike}", **asdict(self)}


def measure(
    strike: str,
    number: int,
    shard: int,
    handovers: int,
    times: ShardTimes,
    from_s: float,
    to_s: float,
) -> Struck:
    """What happened to a shard between a strike and the time when all was well again."""
    answered = [
        at_s
        for asked_s, at_s in zip(times.asked_s, times.answered_s, strict=True)
        if asked_s >= from_s
    ]
    delivered = _behind(times.delivered_s, from_s + RECEIVE_MS / 1000)
    return Struck(
        strike,
        number,
        shard,
        handovers,
        _until(answered, from_s),
        _silence(_behind(times.answered_s, from_s), from_s, to_s),
        _until(delivered, from_s),
        _silence(_behind(times.delivered_s, from_s), from_s, to_s),
    )


def _behind(times_s: Sequence[float], from_s: float) -> Sequence[float]:
    return times_s[bisect_left(times_s, from_s) :]


def _until(times_s: Sequence[float], from_s: float) -> float | None:
    return min(times_s) - from_s if times_s else None


def _silence(times_s: Sequence[float], from_s: float, to_s: float) -> float:
    """The longest time without any."""
    marks = [from_s, *(at_s for at_s in times_s if at_s <= to_s), to_s]
    return max(after - before for before, after in itertools.pairwise(marks))


def table_of(some: Iterable[Struck]) -> "Table":
    """Median and maximum by kind of strike, in seconds."""
    from rich.table import Table

    by_kind: dict[str, list[Struck]] = defaultdict(list)
    for one in some:
        by_kind[one.strike].append(one)
    table = Table(title="seconds, median and most", title_justify="left")
    table.add_column("strike")
    for heading in ("times", "handovers", "next answer", "no answer", "next delivery", "none"):
        table.add_column(heading, justify="right")
    for kind in sorted(by_kind):
        found = by_kind[kind]
        cells = [_cell([getattr(one, name) for one in found]) for name in FIGURES]
        handovers = sum(one.handovers for one in found)
        table.add_row(kind, str(len(found)), str(handovers), *cells)
    return table


def _cell(values_s: Sequence[float | None]) -> str:
    known_s = [value_s for value_s in values_s if value_s is not None]
    if not known_s:
        return "–"
    missing = "" if len(known_s) == len(values_s) else f", {len(values_s) - len(known_s)} never"
    return f"{median(known_s):.1f}  {max(known_s):.1f}{missing}"
