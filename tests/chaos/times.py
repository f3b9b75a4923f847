"""How long a strike kept the clients waiting, by kind of strike.

    next     from the strike to the next answer to a publish that was sent after it, and to the next
             delivery that was not on its way any more
    silence  the longest time without one, from the strike until all was well again

A strike that does not stop a shard (a broker that does not lead) has a short `next` and shows in
`silence`, if at all.

Cost: a pass over the messages of two rounds for each strike. Threads: one.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from delayserver.cli.demo.ledger import RECEIVE_MS, Order, Outage
from tests.harness.ledger import shard_of_order

if TYPE_CHECKING:
    from rich.table import Table

FIGURES = ("next_answer_s", "answer_silence_s", "next_delivery_s", "delivery_silence_s")


@dataclass(frozen=True)
class Struck:
    """The cost of a strike for a shard."""

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
    strike: str, number: int, shard: int, handovers: int, some: Iterable[Order], away: Outage
) -> Struck:
    """Measure a shard between a strike and the time when all was well again, by the messages that
    may have been answered or delivered meanwhile."""
    orders = [one for one in some if shard_of_order(one) == shard]
    from_ms, to_ms = away.down_ms, away.up_ms
    receipts = itertools.chain.from_iterable(one.all_receipts() for one in orders)
    delivered = sorted(one.at_ms for one in receipts if one.at_ms >= from_ms)
    answered = sorted(one.answered_ms for one in orders if one.answered_ms >= from_ms)
    asked_since = [one.answered_ms for one in orders if one.answered and one.asked_ms >= from_ms]
    return Struck(
        *(strike, number, shard, handovers),
        _until(asked_since, from_ms),
        _silence(answered, from_ms, to_ms),
        _until([at_ms for at_ms in delivered if at_ms >= from_ms + RECEIVE_MS], from_ms),
        _silence(delivered, from_ms, to_ms),
    )


def _until(times_ms: Sequence[int], from_ms: int) -> float | None:
    return (min(times_ms) - from_ms) / 1000 if times_ms else None


def _silence(times_ms: Sequence[int], from_ms: int, to_ms: int) -> float:
    """The longest time without any."""
    marks = [from_ms, *(at_ms for at_ms in times_ms if at_ms <= to_ms), to_ms]
    return max(after - before for before, after in itertools.pairwise(marks)) / 1000


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
