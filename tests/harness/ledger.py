"""The ledger of all runs: the demo's, for servers that are struck in any way, and for any clock.

A run writes down the strikes themselves, and what each of them excuses stands here:

    excused   by shard or broker: spans in which it may have failed to record a delivery that was on
              its way. A delivery may come again if it was not recorded when such a span began.
    late      by shard: its owner was frozen or cut off until shortly before, so a delivery that it
              had sent long ago may arrive
    away      by shard: from a strike until it served again, for the figures of lateness alone
    skews     by how much the clocks of two nodes differed; a delivery may be early by no more
    clock     the steps of the server's clock

An acknowledgement that was answered is recorded: nothing excuses its repetition. A publish that was
held up and comes behind its repetition is not excused either: its key stays taken.

All times are ms of this machine. Due times are those of the server's clock, so a delivery is early
if that clock has at no moment between the publish and the delivery shown the due time. A clock that
is set back does not count, because a message that has fallen due stays due. A step takes the time
from its order to its confirmation; within it both clocks count, in favour of the server.

Cost: as the ledger below it, and a comparison per step that the message lived through. Threads:
one.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from delayserver.cli.demo.ledger import (
    RECEIVE_MS,
    DemoLedger,
    Order,
    Outage,
    Receipt,
    in_flight_ms,
)
from delayserver.delivery.leases import shard_of_lease
from delayserver.errors import NotFoundError
from delayserver.records.message_id import read_id
from tests.sinks.programs import Entry

LOOK_MS = 1100
"""A server sees within a second that its clock was set, and may be late by that."""
MARK = "mark"
"""The header of an entry that only says when it was made."""


class Span(NamedTuple):
    """From when to when, in ms since 1970."""

    from_ms: int
    to_ms: int


class Step(NamedTuple):
    """The server's clock shows `offset_ms` more than the machine's, from a moment between these."""

    ordered_ms: int
    confirmed_ms: int
    offset_ms: int


@dataclass(slots=True)
class ServerClock:
    """All that the server's clock has shown."""

    steps: list[Step] = field(default_factory=lambda: [Step(0, 0, 0)])

    @property
    def offset_ms(self) -> int:
        """By how much it is ahead of the machine's now."""
        return self.steps[-1].offset_ms

    def set(self, offset_ms: int, ordered_ms: int, confirmed_ms: int) -> None:
        """Note that it was set."""
        self.steps.append(Step(ordered_ms, confirmed_ms, offset_ms))

    def _stretches(self, since_ms: int, until_ms: int) -> Iterator[tuple[int, int]]:
        """The end, by the machine's clock, of each stretch without a step, and its offset; the
        latest first."""
        end_ms = until_ms
        for step in reversed(self.steps):
            if step.ordered_ms <= end_ms:
                yield end_ms, step.offset_ms
            if step.confirmed_ms <= since_ms:
                break
            end_ms = min(end_ms, step.confirmed_ms)

    def has_shown(self, due_ms: int, since_ms: int, until_ms: int) -> bool:
        """Whether it has shown a time, or a later one, between two moments of the machine's."""
        stretches = self._stretches(since_ms, until_ms)
        return any(end_ms + offset_ms >= due_ms for end_ms, offset_ms in stretches)

    def set_back_ms(self, since_ms: int, until_ms: int) -> int:
        """By how much it was set back at most between two moments."""
        offsets_ms = [offset_ms for _, offset_ms in self._stretches(since_ms, until_ms)]
        return offsets_ms[-1] - min(offsets_ms)

    def reached(self, due_ms: int, since_ms: int, until_ms: int) -> int | None:
        """When it came to show a time, on the machine's clock; None if there was a step between
        that and `until_ms`, or shortly before it."""
        step = next(step for step in reversed(self.steps) if step.ordered_ms <= until_ms)
        at_ms = due_ms - step.offset_ms
        is_told = max(since_ms, step.confirmed_ms + LOOK_MS) < at_ms <= until_ms
        return at_ms if is_told else None


class Delivery(NamedTuple):
    """A webhook, and the node that sent it."""

    at_ms: int
    shard: int
    node: str
    message_id: str


class Pulled(NamedTuple):
    """A pull that brought something, and the process of a shard that has leased it."""

    at_ms: int
    shard: int
    process: str


@dataclass(slots=True)
class Tenure:
    """A node in office at a shard, as the records of its log say. `claim_ms`, `last_ms`: when the
    claim and the last record that counts were sent, by the clock of the machine."""

    epoch: int
    node: str
    claim_ms: int
    last_ms: int
    is_released: bool = False
    """It has left in order."""


@dataclass(slots=True)
class StoredReceipt(Receipt):
    """An entry of a broker. `at_ms`: it was there by then."""

    kind: str = ""
    not_before_ms: int = 0

    @property
    def from_ms(self) -> int:
        return self.not_before_ms


class TimedEntry(NamedTuple):
    """An entry, and between which moments the broker got it."""

    headers: dict[str, str]
    body: bytes
    from_ms: int
    to_ms: int


class Ledger(DemoLedger):
    """Everything that was asked, answered, delivered and struck in a run."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ServerClock()
        self.excused: dict[int | str, list[Span]] = defaultdict(list)
        self.late: dict[int | str, list[Span]] = defaultdict(list)
        self.away: dict[int, list[Outage]] = defaultdict(list)
        self.skews: list[tuple[int, int]] = [(0, 0)]
        self.deliveries: list[Delivery] = []
        self.pulls: list[Pulled] = []
        self.tenures: dict[int, list[Tenure]] = defaultdict(list)
        """The owners of each shard, in the order of their epochs."""
        self._down_ms: dict[int, int] = {}

    def server_ms(self) -> int:
        return self.now_ms() + self.clock.offset_ms

    # ── strikes ────────────────────────────────────────────────────────────────────────────────

    def struck(self, places: Iterable[int | str], from_ms: int, to_ms: int) -> None:
        """Excuse what shards or brokers had on its way between two moments."""
        for place in places:
            self.excused[place].append(Span(from_ms, to_ms))

    def went_down(self, shards: Iterable[int]) -> None:
        """Note that shards are away from now on."""
        for shard in shards:
            self._down_ms.setdefault(shard, self.now_ms())

    def came_back(self) -> None:
        """Note that all shards serve again."""
        for shard, down_ms in self._down_ms.items():
            self.away[shard].append(Outage(down_ms, self.now_ms()))
        self._down_ms.clear()

    def thaws(self, shards: Iterable[int], late_ms: int) -> None:
        """Note that owners go on that were frozen or cut off."""
        for shard in shards:
            self.late[shard].append(Span(self.now_ms(), self.now_ms() + late_ms))

    def skewed(self, skew_ms: int) -> None:
        """Note by how much the clocks of two nodes differ from now on, at most."""
        self.skews.append((self.now_ms(), skew_ms))

    # ── answers and deliveries ─────────────────────────────────────────────────────────────────

    def publish_answered(self, order: Order, message_id: str, due_ms: int) -> None:
        now_ms = self.now_ms()
        # The clock may have been set back before the server heard of a delay.
        back_ms = self.clock.set_back_ms(order.asked_ms, now_ms)
        order.publish_answered(message_id, due_ms, now_ms, order.earliest_ms - back_ms)

    def delivered_by(self, node: str, message_id: str) -> None:
        """Note the node that sent a webhook."""
        if (shard := shard_of(message_id)) is not None:
            self.deliveries.append(Delivery(self.now_ms(), shard, node, message_id))

    def pulled(self, lease: str) -> None:
        """Note that a message came with a lease."""
        if (shard := shard_of_lease(lease)) is not None:
            self.pulls.append(Pulled(self.now_ms(), shard, lease.partition("-")[0]))

    def read(self, kind: str, entries: Iterable[TimedEntry], fed: str = "") -> None:
        """Take all that stands in a broker, in its order, for what was read there before.

        `kind`: the broker, and the subscription that writes to it. The subscription "all-KIND"
        writes to it, too, and `fed` to the Redis."""
        names = {kind, f"all-{kind}", fed if kind == "redis" else kind}
        for order in self.orders:
            for name in names & {*order.subscriptions}:
                order.receipts.pop(name, None)
        self.strangers = [one for one in self.strangers if not one.startswith(f"{kind}: ")]
        for entry in entries:
            body = json.loads(entry.body)
            number = body.get("order") if isinstance(body, dict) else None
            if not isinstance(number, int) or not 0 <= number < len(self.orders):
                self.strangers.append(f"{kind}: {entry.headers}: {str(body)[:200]}")
                continue
            order = self.orders[number]
            (name,) = names & {*order.subscriptions} or {kind}
            order.is_garbled |= body != order.body or name not in order.subscriptions
            message_id = entry.headers["delay-id"]
            order.add(
                name,
                StoredReceipt(
                    *(entry.to_ms, message_id, entry.to_ms), kind=kind, not_before_ms=entry.from_ms
                ),
            )

    # ── what the rules ask ─────────────────────────────────────────────────────────────────────

    def is_due(self, order: Order, late_ms: int = 0) -> bool:
        until_ms = self.now_ms() - late_ms
        due_ms = max(order.due_ms, order.moving_ms)
        return order.is_open and self.clock.has_shown(due_ms, order.asked_ms, until_ms)

    def pending(self) -> list[Order]:
        """The orders that are not due yet."""
        return [order for order in self.orders if order.is_open and not self.is_due(order)]

    def is_early(self, order: Order, receipt: Receipt) -> bool:
        earliest_ms = order.earliest_between(receipt.from_ms, receipt.at_ms)
        if earliest_ms is None:
            return True
        if not order.answered:
            # The moment at which the server heard of it, and so the begin of its delay, is unknown.
            earliest_ms -= self.clock.set_back_ms(order.asked_ms, receipt.at_ms)
        if len(self.skews) > 1:
            moments_ms = (order.asked_ms, order.answered_ms, receipt.at_ms)
            earliest_ms -= max(map(self._skew_at, moments_ms))
        return not self.clock.has_shown(earliest_ms, order.asked_ms, receipt.at_ms)

    def _skew_at(self, at_ms: int) -> int:
        return next(skew_ms for from_ms, skew_ms in reversed(self.skews) if from_ms <= at_ms)

    def lateness_ms(self, order: Order, first: Receipt) -> int | None:
        # A broker that is away has its entries late, which says nothing of the server.
        if not order.answered or isinstance(first, StoredReceipt):
            return None
        at_ms = self.clock.reached(order.due_ms, order.last_change_ms, first.at_ms)
        if at_ms is None or not self.was_up(order, at_ms, first.at_ms):
            return None
        return first.at_ms - at_ms

    def was_in_flight(self, order: Order, receipt: Receipt, before_ms: int) -> bool:
        if receipt.is_recorded:
            return False
        first_ms, last_ms = in_flight_ms(receipt, before_ms)
        places: list[int | str | None] = [shard_of_order(order)]
        if isinstance(receipt, StoredReceipt):
            places.append(receipt.kind)
        spans = [span for place in places if place is not None for span in self.excused[place]]
        return any(span.from_ms <= last_ms and first_ms <= span.to_ms for span in spans)

    def may_come_late(self, order: Order, at_ms: int) -> bool:
        shard = shard_of_order(order)
        return shard is not None and self.is_thaw(shard, at_ms)

    def is_thaw(self, shard: int, at_ms: int) -> bool:
        """Whether the owner of a shard had been cut off or frozen until shortly before."""
        return any(
            span.from_ms <= at_ms + RECEIVE_MS and at_ms <= span.to_ms for span in self.late[shard]
        )

    def outages_of(self, order: Order) -> Sequence[Outage]:
        shard = shard_of_order(order)
        return [] if shard is None else self.away[shard]

    def times(self) -> dict[str, object]:
        return {
            "clock_ms": self.clock.steps,
            "skews_ms": self.skews,
            "excused_ms": self.excused,
            "late_ms": self.late,
            "away_ms": {
                shard: [[one.down_ms, one.up_ms] for one in some]
                for shard, some in self.away.items()
            },
        }


def shard_of(message_id: str) -> int | None:
    """The shard that has given the id; None: it is no id."""
    try:
        return read_id(message_id).shard
    except NotFoundError:
        return None


def shard_of_order(order: Order) -> int | None:
    """The shard that has it; None as long as no answer and no delivery has named it."""
    return shard_of(min(order.message_ids)) if order.message_ids else None


def timed(entries: Iterable[Entry], now_ms: int) -> Iterator[TimedEntry]:
    """The entries of a broker, in its order, without the marks among them.

    A mark says when it was made, and is made when the one before it was confirmed. So an entry that
    stands before it in the queue was there by the moment that the next mark behind it names."""
    after_ms, marked, waiting = 0, list[TimedEntry](), list[Entry]()
    for entry in entries:
        mark_ms = int(entry.headers.get(MARK, 0))
        if mark_ms:
            yield from (one._replace(to_ms=mark_ms) for one in marked)
            marked = [TimedEntry(one.headers, one.body, after_ms, now_ms) for one in waiting]
            after_ms, waiting = mark_ms, []
        elif entry.stored_ms:
            yield TimedEntry(entry.headers, entry.body, entry.stored_ms, entry.stored_ms)
        else:
            waiting.append(entry)
    yield from marked
    yield from (TimedEntry(one.headers, one.body, after_ms, now_ms) for one in waiting)
