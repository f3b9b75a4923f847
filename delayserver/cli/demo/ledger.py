"""The ledger: every request to a server and its answer, written down outside of it.

Every message is an `Order` with a number of its own in its body, so that it is recognised under any
id. After a run, `judge` compares the promises with the receipts, rule by rule (`RULES`):

    lost              the publish was answered, no cancel was, and it was not delivered
    early             it was received before it was due
    fired_cancelled   the cancel was answered "cancelled", and it was received all the same
    repeated_recorded it was acknowledged, or delivered long before any kill, and came again
    other_id          one message came under two ids
    garbled           the body differs from the one that was published
    refused_came      the publish was answered with a refusal, and it was received all the same

A delivery may be repeated if it was in flight at a kill: the server died before it had recorded a
delivery that was received. `RECORD_MS` is the most that recording takes. A cancel that is answered
after such a kill may also have come too late for such a delivery.

All times are ms of this machine, and due times those of the server's clock, which is the same here.
The tests strike servers in more ways: their ledger (`tests.harness.ledger`) overrides the methods
that say the faults that a strike excuses and the times that the server's clock has shown.

Cost: a small object per message and per delivery. Threads: one.
"""

import json
import time
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

RECORD_MS = 1000
"""After this time a delivery that was answered is certainly recorded: the server writes it at once,
and a process that is killed (unlike a machine without power) loses nothing that it wrote."""
LATE_MS = 10_000
"""A message that has been due for less may be on its way, or leased to a consumer that was gone."""
RECEIVE_MS = 250
"""A delivery may be read from the connection this long after its sender was killed."""


@dataclass(slots=True)
class Receipt:
    """One delivery as the receiver saw it."""

    at_ms: int
    message_id: str
    settled_ms: int | None
    """When the receiver was done with it: it answered the webhook with 2xx, or its acknowledgement
    was answered. None: not (yet)."""
    ack_asked: bool = False
    """An acknowledgement was sent; without an answer, it may have been recorded or not."""
    is_recorded: bool = False
    """The server has said that it recorded it."""

    @property
    def from_ms(self) -> int:
        """It had not come before."""
        return self.at_ms

    def acknowledged(self, now_ms: int) -> None:
        """Note that the acknowledgement was answered."""
        self.settled_ms = now_ms
        self.is_recorded = True


@dataclass(slots=True)
class Order:
    """One message, from the outside."""

    number: int
    subject: str
    key: str | None
    subscriptions: tuple[str, ...]
    """The subscriptions that are to receive it."""
    body: dict[str, object]
    asked_ms: int = 0
    """When it was first sent."""
    message_ids: set[str] = field(default_factory=set)
    """All ids under which it was answered or received."""
    answered: bool = False
    answered_ms: int = 0
    """When it was answered for the first time."""
    due_ms: int = 0
    """The due time in the last answer."""
    bounds: list[tuple[int, int]] = field(default_factory=list)
    """When it was known from when on a delivery is allowed: moments of this machine, due times."""
    moving_ms: int = 0
    """The due time that a move without an answer may have given it; 0: there is none."""
    last_change_ms: int = 0
    """When the answer with `due_ms` came."""
    refused: bool = False
    """The answer said that it was not accepted, and it was not published again."""
    cancel_asked: bool = False
    """A cancel was sent, and no answer has come."""
    cancelled_ms: int | None = None
    """When the answer "cancelled" came."""
    receipts: dict[str, list[Receipt]] = field(default_factory=lambda: defaultdict(list))
    """The deliveries of each subscription, in the order in which they came."""
    is_garbled: bool = False

    @property
    def earliest_ms(self) -> int:
        """The earliest time at which a delivery is allowed, by all requests and answers so far."""
        return self.bounds[-1][1] if self.bounds else 0

    def earliest_between(self, from_ms: int, to_ms: int) -> int | None:
        """The earliest allowed time that was known at a moment between these two; None: it had not
        been sent yet."""
        known = bisect_right(self.bounds, to_ms, key=lambda bound: bound[0])
        first = bisect_left(self.bounds, from_ms, key=lambda bound: bound[0])
        in_force = self.bounds[max(0, first - 1) : known]
        return min((earliest_ms for _, earliest_ms in in_force), default=None)

    def publish_asked(self, due_ms: int, now_ms: int) -> None:
        """Note that it is sent, for the first time or again: the first time counts."""
        if not self.asked_ms:
            self.asked_ms = now_ms
            self.bounds.append((now_ms, due_ms))

    def publish_answered(
        self, message_id: str, due_ms: int, now_ms: int, earliest_ms: int = 0
    ) -> None:
        """Note that the server has it. `earliest_ms`: the due time of the request, which a receiver
        may rely on, too; it was so from the request on."""
        self.answered = True
        self.answered_ms = self.answered_ms or now_ms
        self.message_ids.add(message_id)
        self.due_ms = due_ms
        self.bounds = [(self.asked_ms, max(due_ms, earliest_ms))]
        self.last_change_ms = now_ms

    def move_asked(self, due_ms: int, now_ms: int) -> None:
        """Note that a move was sent. Until it is answered with a due time, both due times are
        possible: the server may have moved it before its answer was lost, and refuse when it is
        asked again."""
        self.moving_ms = max(self.moving_ms, due_ms)
        self.bounds.append((now_ms, min(self.earliest_ms, due_ms)))

    def move_refused(self, earliest_ms: int, now_ms: int) -> None:
        """Note that it was not moved; `earliest_ms` is as it was before."""
        self.moving_ms = 0
        self.bounds.append((now_ms, earliest_ms))

    def move_answered(self, due_ms: int, now_ms: int) -> None:
        """Note its new due time."""
        self.due_ms, self.moving_ms = due_ms, 0
        self.bounds.append((now_ms, due_ms))
        self.last_change_ms = now_ms

    def received(self, subscription: str, message_id: str, at_ms: int, *, settled: bool) -> Receipt:
        """Note that it has come."""
        return self.add(subscription, Receipt(at_ms, message_id, at_ms if settled else None))

    def add(self, subscription: str, receipt: Receipt) -> Receipt:
        """Note a delivery."""
        self.receipts[subscription].append(receipt)
        self.message_ids.add(receipt.message_id)
        return receipt

    def is_settled(self, subscription: str) -> bool:
        """Whether it is done at that subscription, or may be."""
        return any(
            receipt.settled_ms is not None or receipt.ack_asked
            for receipt in self.receipts.get(subscription, ())
        )

    @property
    def is_delivered(self) -> bool:
        """Whether all its subscriptions have received it."""
        return all(self.is_settled(subscription) for subscription in self.subscriptions)

    @property
    def is_open(self) -> bool:
        """Whether it still has to be delivered."""
        return (
            self.answered
            and self.cancelled_ms is None
            and not self.cancel_asked
            and not self.is_delivered
        )

    def all_receipts(self) -> Iterator[Receipt]:
        """The deliveries of all subscriptions."""
        return chain.from_iterable(self.receipts.values())

    def to_json(self) -> dict[str, object]:
        """All but the body."""
        return {
            "order": self.number,
            "subject": self.subject,
            "key": self.key,
            "ids": sorted(self.message_ids),
            "asked_ms": self.asked_ms,
            "answered": self.answered,
            "due_ms": self.due_ms,
            "cancel_asked": self.cancel_asked,
            "cancelled_ms": self.cancelled_ms,
            "received": {
                name: [
                    {
                        "at_ms": receipt.at_ms,
                        "settled_ms": receipt.settled_ms,
                        "ack_asked": receipt.ack_asked,
                        "recorded": receipt.is_recorded,
                    }
                    for receipt in some
                ]
                for name, some in self.receipts.items()
            },
        }


@dataclass(frozen=True, slots=True)
class Outage:
    """The time between a kill and the moment when the server accepted messages again."""

    down_ms: int
    up_ms: int


class DemoLedger:
    """All orders and all outages of a run."""

    def __init__(self) -> None:
        self.orders: list[Order] = []
        self.outages: list[Outage] = []
        self.kills_ms: list[int] = []
        self.strangers: list[str] = []
        """Messages that came without ever having been published."""

    def now_ms(self) -> int:
        """The clock of this machine."""
        return time.time_ns() // 1_000_000

    def server_ms(self) -> int:
        """The clock by which due times are given."""
        return self.now_ms()

    def publish_asked(self, order: Order, delay_ms: int) -> None:
        """Note that an order is sent, for the first time or again."""
        order.publish_asked(self.server_ms() + delay_ms, self.now_ms())

    def publish_answered(self, order: Order, message_id: str, due_ms: int) -> None:
        """Note that the server has an order."""
        order.publish_answered(message_id, due_ms, self.now_ms(), order.earliest_ms)

    def is_due(self, order: Order, late_ms: int = 0) -> bool:
        """Whether an order that is still open ought to have been delivered by now, or `late_ms`
        ago."""
        return order.is_open

    def is_early(self, order: Order, receipt: Receipt) -> bool:
        """Whether a delivery came before it was allowed."""
        earliest_ms = order.earliest_between(receipt.from_ms, receipt.at_ms)
        return earliest_ms is None or receipt.at_ms < earliest_ms

    def lateness_ms(self, order: Order, first: Receipt) -> int | None:
        """How late the first delivery was; None if the ledger cannot tell."""
        if not order.answered or order.last_change_ms >= order.due_ms:
            return None
        was_up = self.was_up(order, order.due_ms, first.at_ms)
        return first.at_ms - order.due_ms if was_up else None

    def was_in_flight(self, order: Order, receipt: Receipt, before_ms: int) -> bool:
        """Whether an event before that time may have kept the server from recording a delivery that
        it made."""
        if receipt.is_recorded:
            return False
        first_ms, last_ms = in_flight_ms(receipt, before_ms)
        return any(first_ms <= kill_ms <= last_ms for kill_ms in self.kills_ms)

    def may_come_late(self, order: Order, at_ms: int) -> bool:
        """Whether a delivery that came then may have been sent long before: never, unless a network
        was cut."""
        return False

    def outages_of(self, order: Order) -> Sequence[Outage]:
        """When no process was there to deliver an order, one outage behind the other."""
        return self.outages

    def order(
        self,
        subject: str,
        subscriptions: tuple[str, ...],
        *,
        with_key: bool = True,
        filling: str = "",
    ) -> Order:
        """Open an order that has not been published yet."""
        number = len(self.orders)
        body: dict[str, object] = {"order": number}
        if filling:
            body["filling"] = filling
        key = str(number) if with_key else None
        order = Order(number, subject, key, subscriptions, body)
        self.orders.append(order)
        return order

    def receive(
        self, subscription: str, message_id: str, body: object, *, settled: bool
    ) -> Receipt:
        """Write a delivery down under the order that its body names."""
        now_ms = self.now_ms()
        number = body.get("order") if isinstance(body, dict) else None
        if not isinstance(number, int) or not 0 <= number < len(self.orders):
            self.strangers.append(f"{message_id} at {subscription}: {str(body)[:200]}")
            return Receipt(now_ms, message_id, None)
        order = self.orders[number]
        if body != order.body or subscription not in order.subscriptions:
            order.is_garbled = True
        return order.received(subscription, message_id, now_ms, settled=settled)

    @property
    def open_count(self) -> int:
        """How many orders still have to be delivered."""
        return sum(map(self.is_due, self.orders))

    def times(self) -> dict[str, object]:
        """The outages and the kills."""
        outages = [[outage.down_ms, outage.up_ms] for outage in self.outages]
        return {"outages_ms": outages, "kills_ms": self.kills_ms}

    def write(self, where: Path) -> None:
        """Lines of JSON: the outages and the kills, then a line for each order."""
        with where.open("w") as file:
            file.write(json.dumps(self.times()) + "\n")
            for order in self.orders:
                file.write(json.dumps(order.to_json()) + "\n")

    def was_up(self, order: Order, from_ms: int, to_ms: int) -> bool:
        """Whether the process that delivers an order was there all that time."""
        outages = self.outages_of(order)
        # The last change before that time counts.
        index = bisect_right(outages, to_ms, key=lambda outage: outage.down_ms) - 1
        return index < 0 or outages[index].up_ms <= from_ms


# ---- the judgement -----------------------------------------------------------------------------


def lost(ledger: DemoLedger, order: Order) -> bool:
    """The publish was answered, no cancel was, and it was not delivered."""
    return ledger.is_due(order, LATE_MS)


def early(ledger: DemoLedger, order: Order) -> bool:
    """It was received before it was due."""
    return any(ledger.is_early(order, receipt) for receipt in order.all_receipts())


def fired_cancelled(ledger: DemoLedger, order: Order) -> bool:
    """The cancel was answered "cancelled", and it was received all the same."""
    cancelled_ms = order.cancelled_ms
    return cancelled_ms is not None and any(
        _broke_cancel(ledger, order, receipt, cancelled_ms) for receipt in order.all_receipts()
    )


def repeated_recorded(ledger: DemoLedger, order: Order) -> bool:
    """It was acknowledged, or delivered long before any kill, and came again."""
    return any(_broke_record(ledger, order, some) for some in order.receipts.values())


def other_id(_: DemoLedger, order: Order) -> bool:
    """One message came under two ids."""
    return len(order.message_ids) > 1


def garbled(_: DemoLedger, order: Order) -> bool:
    """The body differs from the one that was published."""
    return order.is_garbled


def refused_came(_: DemoLedger, order: Order) -> bool:
    """The publish was answered with a refusal, and it was received all the same."""
    return order.refused and next(order.all_receipts(), None) is not None


Rule = Callable[[DemoLedger, Order], bool]
"""Whether an order broke a promise."""
RULES: Mapping[str, Rule] = {
    rule.__name__: rule
    for rule in (
        *(lost, early, fired_cancelled, repeated_recorded),
        *(other_id, garbled, refused_came),
    )
}


@dataclass(slots=True)
class Verdict:
    """Which orders broke a promise, and the figures of a run."""

    broken: dict[str, list[Order]]
    """The orders that broke a rule, by its name; all must be empty."""
    published: int = 0
    cancelled: int = 0
    delivered: int = 0
    repeated: int = 0
    """Deliveries beyond the first to each subscription."""
    lateness_ms: list[int] = field(default_factory=list)
    """Sorted; of first deliveries, if the server was up from their due time on."""

    def violations(self) -> Iterator[tuple[str, Order]]:
        """Every broken promise by its name."""
        for name, orders in self.broken.items():
            for order in orders:
                yield name, order

    @property
    def is_clean(self) -> bool:
        """Whether every promise was kept."""
        return not any(self.broken.values())

    def lateness_percentile_ms(self, percent: float) -> int | None:
        """The lateness that this many percent do not exceed."""
        if not self.lateness_ms:
            return None
        index = min(len(self.lateness_ms) - 1, int(len(self.lateness_ms) * percent / 100))
        return self.lateness_ms[index]


def judge(
    ledger: DemoLedger,
    orders: Sequence[Order] | None = None,
    rules: Mapping[str, Rule] = RULES,
) -> Verdict:
    """Compare the promises with the receipts, for all orders or some."""
    orders = ledger.orders if orders is None else orders
    verdict = Verdict(
        {name: [one for one in orders if rule(ledger, one)] for name, rule in rules.items()}
    )
    for order in orders:
        verdict.published += order.answered
        verdict.cancelled += order.cancelled_ms is not None
        verdict.delivered += order.is_delivered
        for some in order.receipts.values():
            verdict.repeated += len(some) - 1
            late_ms = ledger.lateness_ms(order, some[0])
            if late_ms is not None:
                verdict.lateness_ms.append(late_ms)
    verdict.lateness_ms.sort()
    return verdict


def in_flight_ms(receipt: Receipt, before_ms: int) -> tuple[int, int]:
    """The longest span in which a delivery was not recorded yet."""
    # The receiver may have taken its time to answer, and the server cannot record it before.
    answered_ms = receipt.at_ms if receipt.settled_ms is None else receipt.settled_ms
    last_ms = max(receipt.at_ms, answered_ms) + RECORD_MS
    return receipt.from_ms - RECEIVE_MS, min(last_ms, before_ms)


def _broke_cancel(ledger: DemoLedger, order: Order, receipt: Receipt, cancelled_ms: int) -> bool:
    if receipt.at_ms <= cancelled_ms and receipt.settled_ms is None:
        return False  # A delivery that failed may be cancelled before its next attempt.
    if receipt.at_ms > cancelled_ms and ledger.may_come_late(order, receipt.at_ms):
        return False
    return not ledger.was_in_flight(order, receipt, cancelled_ms)


def _broke_record(ledger: DemoLedger, order: Order, receipts: Sequence[Receipt]) -> bool:
    """Whether a delivery came again after it was recorded."""
    for index, first in enumerate(receipts):
        for again in receipts[index + 1 :]:
            if first.settled_ms is None or again.at_ms < first.settled_ms:
                continue
            if not (
                ledger.was_in_flight(order, first, again.at_ms)
                or ledger.may_come_late(order, again.at_ms)
            ):
                return True
    return False
