"""Ports: the work that parts of the dispatcher need done elsewhere, and by each other.

Cost: none. Threads: none.
"""

from typing import Protocol

from delayserver.delivery.backlog import Instant
from delayserver.delivery.delayed_fetch import PullRequest
from delayserver.delivery.deliveries import Deliveries
from delayserver.delivery.handout import Handout
from delayserver.delivery.queue import Queue
from delayserver.records.message import DueDelivery
from delayserver.records.subscriptions import Subscription
from delayserver.schedule.wheel_rows import FiredRows
from storage.notes import NoteBytes


class DispatcherPorts(Protocol):
    """Disk, sinks and consumers."""

    def read(self, handout: Handout) -> None:
        """Read the payloads; answer with `Handout.on_read`."""

    def send(self, subscription: Subscription, deliveries: list[DueDelivery]) -> None:
        """Have its sink deliver them; answer with `Outcomes.on_sent`."""

    def hand_out(
        self, subscription: Subscription, request: PullRequest, deliveries: Deliveries
    ) -> None:
        """Lease deliveries to the consumer that asked."""

    def settle(self, hour: int, rows: bytes, note: NoteBytes | None) -> None:
        """Append rows (DISPATCH_ROW) to the dispatch log of their hour, and a note about them."""

    def settle_recorded(self, hour: int, rows: bytes, offset: int) -> None:
        """Likewise, rows that stand in the log of all replicas already, at `offset`."""

    def tick_soon(self) -> None:
        """Call `Pump.wake`, through `Engine.advance`, earlier than it said last."""


class Pumping(Protocol):
    """Lets rows leave their queues (`delayserver.delivery.pump`)."""

    def run(self, queue: Queue, now_ms: int) -> None:
        """Let rows leave a queue as far as the subscriber can take them."""

    def soon(self, subscription_id: int) -> None:
        """Do so in a turn of the event loop to come, once for all that ask for it."""

    def again(self, subscription_id: int) -> None:
        """Do so now, if the subscription is still there."""

    def look_again(self, queue: Queue, instant: Instant) -> None:
        """No row may leave now, and it is unknown when one may again."""

    def lose(self, queue: Queue, seqs: list[int]) -> None:
        """Rows that left cannot be read, which was reported: no row waits behind them."""

    def go_on(self, queue: Queue, leaving: list[FiredRows]) -> None:
        """It is the turn of these rows of groups."""

    def reassign(self, handout: Handout) -> None:
        """Rows were read whose subscription is gone."""

    def without_expired(self, deliveries: Deliveries, now_ms: int) -> Deliveries:
        """Give up those of deliveries that have outlived their messages' time to live; returns the
        others."""
