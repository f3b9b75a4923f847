"""The ledger of a cluster: what a strike excuses, and who has delivered what.

A strike alone excuses nothing. What it excuses, it excuses at the shards whose owner it has changed
(`Handover`) or cut off from those who receive, and only for what was under way then:

    a repetition    the first delivery was not recorded yet when the owner was struck, or it was
                    made between that and the claim of the next owner
    one too late    an owner that was frozen or cut off had sent it, and it comes when it thaws

An acknowledgement that was answered is recorded at a quorum: it excuses nothing. Nor does an owner
that has left in order, or a publish that was held up and comes behind its repetition: it has the
same key, which stays taken. Clocks that differ by `skew_ms` excuse a delivery that is early by no
more.

Cost: as the ledger below it. Threads: one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Unpack

from delayserver.cli.demo.ledger import (
    RECEIVE_MS,
    DemoLedger,
    Order,
    OrderFields,
    Outage,
    Receipt,
    in_flight_ms,
)
from delayserver.delivery.leases import shard_of_lease
from delayserver.errors import NotFoundError
from delayserver.records.message_id import read_id
from tests.crash.shards import shard_of_order

THAW_MS = 3000
"""Of a process that was frozen."""


class Span(NamedTuple):
    """From when to when, in ms since 1970."""

    from_ms: int
    to_ms: int


class Delivery(NamedTuple):
    """A webhook, and who sent it."""

    at_ms: int
    shard: int
    node: str
    message_id: str


class Pulled(NamedTuple):
    """A pull that brought something, and which process of a shard has leased it."""

    at_ms: int
    shard: int
    process: str


@dataclass(slots=True)
class SkewedOrder(Order):
    """An order that may have met clocks that differ."""

    skew_ms: int = 0
    """By how much they differed, at most, while it was asked for or delivered."""

    def is_too_early(self, at_ms: int) -> bool:
        return at_ms < self.earliest_ms - self.skew_ms


class ChaosLedger(DemoLedger):
    """Of `count` shards."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.skew_ms = 0
        """By how much the clocks of two nodes differ just now, at most."""
        self.handovers: list[list[Span]] = [[] for _ in range(count)]
        """Of each shard: the owner was struck, another has claimed."""
        self.cut_off: list[list[Span]] = [[] for _ in range(count)]
        """Of each shard: the owner could not hear the answers of those who receive."""
        self.thaws: list[list[Span]] = [[] for _ in range(count)]
        self.away: list[list[Outage]] = [[] for _ in range(count)]
        """Of each shard: from a strike until all was well again."""
        self.deliveries: list[Delivery] = []
        self.pulls: list[Pulled] = []

    def _open(self, **fields: Unpack[OrderFields]) -> Order:
        return SkewedOrder(**fields)

    def _skew(self, order: Order) -> None:
        assert isinstance(order, SkewedOrder)
        order.skew_ms = max(order.skew_ms, self.skew_ms)

    def publish_asked(self, order: Order, delay_ms: int) -> None:
        self._skew(order)
        super().publish_asked(order, delay_ms)

    def publish_answered(self, order: Order, message_id: str, due_ms: int) -> None:
        self._skew(order)
        super().publish_answered(order, message_id, due_ms)

    def receive(
        self, subscription: str, message_id: str, body: object, *, settled: bool
    ) -> Receipt:
        if self.skew_ms and isinstance(body, dict):
            number = body.get("order")
            if isinstance(number, int) and 0 <= number < len(self.orders):
                self._skew(self.orders[number])
        return super().receive(subscription, message_id, body, settled=settled)

    def delivered_by(self, node: str, message_id: str) -> int | None:
        """A webhook came from a node; the shard that it is of."""
        if (shard := shard_of(message_id)) is not None:
            self.deliveries.append(Delivery(self.now_ms(), shard, node, message_id))
        return shard

    def pulled(self, lease: str) -> None:
        """A message came with a lease."""
        shard = shard_of_lease(lease)
        if shard is not None:
            self.pulls.append(Pulled(self.now_ms(), shard, lease.partition("-")[0]))

    # ── what is excused ────────────────────────────────────────────────────────────────────────

    def was_in_flight(self, order: Order, receipt: Receipt, before_ms: int) -> bool:
        shard = shard_of_order(order)
        if receipt.is_recorded or shard is None:
            return False
        first_ms, last_ms = in_flight_ms(receipt, before_ms)
        spans = self.handovers[shard] + self.cut_off[shard]
        return any(span.from_ms <= last_ms and first_ms <= span.to_ms for span in spans)

    def may_come_late(self, order: Order, at_ms: int) -> bool:
        shard = shard_of_order(order)
        return shard is not None and self.is_thaw(shard, at_ms)

    def is_thaw(self, shard: int, at_ms: int) -> bool:
        """Whether an owner of the shard had been cut off or frozen until shortly before."""
        thaws = self.thaws[shard]
        return any(span.from_ms <= at_ms + RECEIVE_MS and at_ms <= span.to_ms for span in thaws)

    def outages_of(self, order: Order) -> Sequence[Outage]:
        shard = shard_of_order(order)
        return [] if shard is None else self.away[shard]

    def times(self) -> dict[str, object]:
        return {
            "shards": [
                {
                    "handovers_ms": self.handovers[shard],
                    "cut_off_ms": self.cut_off[shard],
                    "thaws_ms": self.thaws[shard],
                    "away_ms": [[one.down_ms, one.up_ms] for one in self.away[shard]],
                }
                for shard in range(len(self.handovers))
            ]
        }


def shard_of(message_id: str) -> int | None:
    """The shard that has given the id."""
    try:
        return read_id(message_id).shard
    except NotFoundError:
        return None
