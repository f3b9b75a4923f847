"""A ledger with a clock of its own, for tests of its rules."""

import json
from typing import Any

from delayserver.cli.demo.ledger import Order, Receipt
from storage.replicated.lease import LEASE_MS, MARGIN_MS
from tests.harness.ledger import Delivery, Ledger, Tenure, TimedEntry
from tests.harness.rules import EVERYWHERE, OFFICES

ASKED = 1_800_000_000_000
DUE = ASKED + 100_000
IDS = ("0000" + 32 * "1", "0001" + 32 * "1")
"""Of shard 0 and of shard 1."""
OFFICE_MS = 10_000
LEASE_OVER_MS = OFFICE_MS + LEASE_MS - MARGIN_MS


class Book(Ledger):
    """A ledger with a clock of its own, and short words for what happens."""

    def __init__(self) -> None:
        super().__init__()
        self.at_ms = ASKED

    def now_ms(self) -> int:
        return self.at_ms

    def publish(self, *names: str, shard: int = 0, due_ms: int = DUE, answer: bool = True) -> Order:
        order = self.order("s", names or ("hook",))
        self.publish_asked(order, due_ms - self.server_ms())
        if answer:
            self.publish_answered(order, IDS[shard], due_ms)
        return order

    def deliver(self, order: Order, at_ms: int = DUE, *, name: str = "hook") -> Receipt:
        self.at_ms = at_ms
        message_id = min(order.message_ids, default=IDS[0])
        return self.receive(name, message_id, order.body, settled=True)

    def set_clock(self, offset_ms: int) -> None:
        self.clock.set(offset_ms, self.at_ms, self.at_ms + 1)

    def entry(
        self, order: Order, from_ms: int, to_ms: int | None = None, **more: Any
    ) -> TimedEntry:
        body = json.dumps(more.get("body", order.body)).encode()
        return TimedEntry({"delay-id": more.get("id", IDS[0])}, body, from_ms, to_ms or from_ms)

    def owned(self, claim_ms: int, *, is_released: bool = False) -> None:
        """n1 was in office until OFFICE_MS, and n2 claims."""
        first = Tenure(1, "n1", 0, OFFICE_MS, is_released)
        self.tenures[0] = [first, Tenure(2, "n2", claim_ms, claim_ms + 5000)]

    def sent(self, node: str, at_ms: int) -> None:
        self.owned(LEASE_OVER_MS)
        self.deliveries.append(Delivery(at_ms, 0, node, IDS[0]))


def broken(book: Book) -> set[str]:
    """The names of the rules that it breaks."""
    rules = {**EVERYWHERE, **OFFICES}
    return {name for name, rule in rules.items() if list(rule(book))}
