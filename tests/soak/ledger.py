"""The ledger of a soak: that of the crash runs, for a server whose clock is set while it runs.

What is written down has the times of this machine. Due times are those of the server's clock, which
is the machine's and the steps that the run has made. So the promises read:

    early         between the publish (or the last move) and the delivery, the server's clock has
                  at no moment shown the due time. A clock that is set back does not count: what had
                  fallen due stays due.
    lost          the server's clock has shown the due time, LATE_MS ago, and it was not delivered
    pending       it has not: the server still has to know it

Tolerance: a step takes the time from its order to its confirmation. Within it both clocks count, in
favour of the server. Beyond it there is none.

Cost: as `delayserver.cli.demo.ledger`, and a comparison per step that the message lived through.
Threads: one.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Unpack

from delayserver.cli.demo.ledger import DemoLedger, Order, OrderFields

LOOK_MS = 1100
"""A server sees within a second that its clock was set, and may be late by that."""

LATE_MS = 10_000
"""What is due for less may be on its way, or leased to a consumer that was gone."""


@dataclass(frozen=True, slots=True)
class Step:
    """The server's clock shows `offset_ms` more than the machine's, from a moment between these."""

    ordered_ms: int
    confirmed_ms: int
    offset_ms: int


@dataclass(slots=True)
class ServerClock:
    """What the server's clock has shown."""

    steps: list[Step] = field(default_factory=lambda: [Step(0, 0, 0)])

    @property
    def offset_ms(self) -> int:
        """What it shows now more than the machine's."""
        return self.steps[-1].offset_ms

    def _stretches(self, since_ms: int, until_ms: int) -> Iterator[tuple[int, int, int]]:
        """Begin and end, by the machine's clock, of each stretch without a step; its offset."""
        end_ms = until_ms
        found = []
        for step in reversed(self.steps):
            if step.ordered_ms <= end_ms:
                found.append((max(step.ordered_ms, since_ms), end_ms, step.offset_ms))
            if step.confirmed_ms <= since_ms:
                break
            end_ms = min(end_ms, step.confirmed_ms)
        return reversed(found)

    def has_shown(self, due_ms: int, since_ms: int, until_ms: int) -> bool:
        """Whether it has shown a time, or a later one, between two moments of the machine's."""
        return any(
            end_ms + offset_ms >= due_ms
            for _, end_ms, offset_ms in self._stretches(since_ms, until_ms)
        )

    def reached(self, due_ms: int, since_ms: int, until_ms: int) -> int | None:
        """When it came to show a time, on the machine's clock; None if there was a step between
        that and `until_ms`, or shortly before it."""
        begin_ms, end_ms, offset_ms = list(self._stretches(since_ms, until_ms))[-1]
        at_ms = due_ms - offset_ms
        return at_ms if begin_ms + LOOK_MS < at_ms <= end_ms else None


@dataclass(slots=True)
class SoakOrder(Order):
    """A message of a soak."""

    clock: ServerClock = field(default_factory=ServerClock)

    def is_too_early(self, at_ms: int) -> bool:
        # Of what was not answered nobody knows when the server heard of it, and so when it is due.
        return self.answered and not self.clock.has_shown(self.earliest_ms, self.asked_ms, at_ms)

    @property
    def due_until_ms(self) -> int:
        """The latest due time that is possible."""
        return max(self.due_ms, self.moving_ms)

    moving_ms: int = 0
    """Where a move without an answer may have taken it."""

    def move_asked(self, due_ms: int) -> None:
        super(SoakOrder, self).move_asked(due_ms)
        self.moving_ms = max(self.moving_ms, due_ms)

    def move_refused(self, earliest_ms: int) -> None:
        super(SoakOrder, self).move_refused(earliest_ms)
        self.moving_ms = 0

    def move_answered(self, due_ms: int, now_ms: int) -> None:
        super(SoakOrder, self).move_answered(due_ms, now_ms)
        self.moving_ms = 0


class SoakLedger(DemoLedger):
    """All messages of a soak."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ServerClock()

    def server_ms(self) -> int:
        return self.now_ms() + self.clock.offset_ms

    def publish_asked(self, order: Order, delay_ms: int) -> None:
        if not order.asked_ms:
            order.asked_ms = self.now_ms()
            order.earliest_ms = self.server_ms() + delay_ms

    def publish_answered(self, order: Order, message_id: str, due_ms: int) -> None:
        super().publish_answered(order, message_id, due_ms)
        # The clock may have been set back before the server heard of a delay.
        order.earliest_ms = due_ms
        for receipts in order.receipts.values():
            order.is_early |= any(order.is_too_early(receipt.at_ms) for receipt in receipts)

    def is_due(self, order: Order, before_ms: int = 0) -> bool:
        """Whether it was to be delivered by now, or so long before."""
        assert isinstance(order, SoakOrder)
        until_ms = self.now_ms() - before_ms
        return order.is_open and self.clock.has_shown(order.due_until_ms, order.asked_ms, until_ms)

    def is_lost(self, order: Order) -> bool:
        return self.is_due(order, LATE_MS)

    @property
    def open_count(self) -> int:
        return sum(map(self.is_due, self.orders))

    def pending(self) -> list[Order]:
        """What is not due yet."""
        return [order for order in self.orders if order.is_open and not self.is_due(order)]

    def lateness_ms(self, order: Order, first_ms: int) -> int | None:
        if not order.answered or first_ms < order.last_change_ms:
            return None
        at_ms = self.clock.reached(order.due_ms, order.last_change_ms, first_ms)
        if at_ms is None or not self.was_up(order, at_ms, first_ms):
            return None
        return first_ms - at_ms

    def _open(self, **fields: Unpack[OrderFields]) -> Order:
        return SoakOrder(**fields, clock=self.clock)

    def step(self, offset_ms: int, ordered_ms: int) -> None:
        """The server has confirmed that its clock was set."""
        confirmed_ms = time.time_ns() // 1_000_000 + 1
        self.clock.steps.append(Step(ordered_ms, confirmed_ms, offset_ms))
