"""Reassignment: rows of a subscription that is gone are read, and get to whom they belong.

    left ──▶ `Orphans` ──▶ some are read in each turn ──▶ judged ──▶ dropped
                                                                ├─▶ recorded again
                                                                └─▶ an heir's, or parked

Cost: see `Orphans`. Threads: belongs to the event loop.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol

from delayserver.delivery.deliveries import Deliveries
from delayserver.delivery.handout import Handout
from delayserver.delivery.looks import LOOK_ITEMS
from delayserver.delivery.orphans import Fate, Orphans
from delayserver.delivery.parked import Parked
from delayserver.delivery.ports import DispatcherPorts
from delayserver.delivery.queue import Queue
from delayserver.delivery.queues import Queues
from delayserver.records.message import DueDelivery
from delayserver.records.subscriptions import Registry
from delayserver.schedule.wheel_rows import WHEEL_DTYPE, FiredRows
from delayserver.slices import Slices
from storage.frame import Rows
from storage.rows import concatenate


class Orphaned(Protocol):
    """Decides about deliveries that have lost their subscription."""

    def on_orphaned(self, delivery: DueDelivery, left_by: int, now_ms: int) -> None:
        """No file says that anybody waits for a delivery. Unless this is recorded, a crash loses
        the message."""


class Reassignment:
    """Finds a place for orphans."""

    def __init__(
        self,
        queues: Queues,
        ports: DispatcherPorts,
        slices: Slices,
        orphans: Orphans,
        parked: Parked,
        registry: Registry,
        run: Callable[[Queue, int], None],
        drop: Callable[[DueDelivery, int], None],
        orphaned: Callable[[], Orphaned],
        answer_max_bytes: int,
    ) -> None:
        """`run`: pumps a queue; `drop`: settles a delivery that no receiver may have."""
        self._queues = queues
        self._ports = ports
        self._slices = slices
        self._orphans = orphans
        self._parked = parked
        self._registry = registry
        self._run = run
        self._drop = drop
        self._orphaned = orphaned
        self._answer_max_bytes = answer_max_bytes
        self._is_reading = False
        """Orphans are being read, or are about to be."""

    def leave(self, fired: FiredRows, left_by: int) -> None:
        """Rows have lost their subscription `left_by`."""
        self._orphans.leave(fired, left_by)
        if not self._is_reading:
            self._read_some()

    def reassign(self, handout: Handout) -> None:
        """Rows were on their way when their subscription was deleted, and have not left."""
        for fired in handout.slices:
            self._orphans.remove(fired.rows["seq"].tolist())
            self.leave(fired, handout.subscription_id)

    def go_on(self) -> None:
        """Not in this turn of the loop: there may be very many."""
        if self._orphans.are_left and not self._is_reading:
            self._is_reading = True
            self._slices.soon(self._read_some, LOOK_ITEMS)

    def _read_some(self) -> None:
        found = self._orphans.next_slice(self._answer_max_bytes)
        self._is_reading = found is not None
        if found is not None:
            left_by, slices = found
            self._ports.read(Handout(0, slices, partial(self._on_read, left_by)))

    def _on_read(self, left_by: int, handout: Handout, deliveries: Deliveries, now_ms: int) -> None:
        passed_on: dict[tuple[int, int, int | None], list[Rows]] = {}
        for delivery in deliveries:
            match self._orphans.judge(delivery):
                case Fate.DROPPED:
                    self._drop(delivery, now_ms)
                case Fate.RECORDED:
                    self._orphaned().on_orphaned(delivery, left_by, now_ms)
                case Fate.PASSED_ON:
                    heir_id = self._orphans.heir_id(delivery, left_by)
                    whose = (delivery.entry.hour, delivery.origin.subject_id, heir_id)
                    passed_on.setdefault(whose, []).append(delivery.row)
        unread = handout.unread(deliveries)
        self._orphans.remove(unread)
        self._queues.unread.update(unread)
        for (hour, subject_id, heir_id), rows in passed_on.items():
            fired = FiredRows(hour, concatenate(rows, WHEEL_DTYPE))
            heir = None if heir_id is None else self._registry.by_id(heir_id)
            if heir is None:
                self._parked.add(subject_id, fired)
            else:
                queue = self._queues.of(heir)
                queue.rows.push(fired)
                self._run(queue, now_ms)
        self._is_reading = False
        self.go_on()
