"""Permits: the requests of a queue where several shards share the limits of a webhook.

    Queue ── want ──▶ Permit ──▶ the counter of all shards
          ◀─ places, rows ───┘ ◀── more of them come ──▶ the queue is pumped
          ── keep ──▶ unused ones go back

A server alone has none: there a queue counts what is in flight by itself, and `Backlog` has the
bucket of the rate.

Cost: that of the counter (`delayserver.shards.limits`). Threads: belongs to the event loop.
"""

from collections.abc import Callable
from typing import Protocol

from delayserver.records.subscriptions import Subscription
from delayserver.timers.rates import Rate


class Permit(Rate, Protocol):
    """The present rights of the queue of one webhook. As a `Rate`: how many rows may leave."""

    @property
    def places(self) -> int:
        """How many requests may be out at once, those that are out among them."""

    def want(self, places: int, rows: int) -> None:
        """So many requests more, with so many rows in them, could leave now. It may get `places`
        at once, or later: then the queue is pumped."""

    def keep(self, *, for_next: bool) -> None:
        """No more rows leave now: unused permits go back, unless they are `for_next`."""


class Permits(Protocol):
    """The permits of all queues."""

    def of(self, subscription: Subscription, used: Callable[[], int]) -> Permit:
        """The permit of a webhook. `used`: how many requests of its queue are out."""

    def define(self, subscription: Subscription) -> None:
        """A subscription was added, changed or removed."""
