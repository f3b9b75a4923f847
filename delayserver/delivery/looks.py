"""Looks: waiting rows are read to learn facts that only their bodies tell.

    they may expire ──▶ some are read in each turn ──▶ `Deadlines` knows when
    they may be of a group ──▶ likewise ──▶ `SingleFile` knows of which; those at the head may leave

The rows stay where they are meanwhile. Nothing is read where nothing waits.

Cost: see the classes that keep the facts. Threads: belongs to the event loop.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from delayserver.delivery.deadlines import Deadlines
from delayserver.delivery.deliveries import Deliveries
from delayserver.delivery.handout import READ_ROWS_MAX, Handout
from delayserver.delivery.lane import Room
from delayserver.delivery.ports import DispatcherPorts, Pumping
from delayserver.delivery.queue import Queue
from delayserver.delivery.queues import Queues
from delayserver.delivery.single_file import SingleFile
from delayserver.records.message import ScheduleEntry
from delayserver.schedule.wheel_rows import FiredRows
from delayserver.slices import Slices
from storage.rows import select

LOOK_ITEMS = 200
"""A read of up to READ_ROWS_MAX rows counts for so many items, whatever it is for."""


class Looks:
    """Looks at rows that wait."""

    def __init__(
        self,
        queues: Queues,
        ports: DispatcherPorts,
        pump: Pumping,
        slices: Slices,
        has_not_fired: Callable[[ScheduleEntry], bool],
        answer_max_bytes: int,
    ) -> None:
        """`has_not_fired`: whether a row is still to come."""
        self._queues = queues
        self._ports = ports
        self._pump = pump
        self._slices = slices
        self._has_not_fired = has_not_fired
        self._answer_max_bytes = answer_max_bytes
        self.rows_max = READ_ROWS_MAX
        """Rows that are read in one turn to find out of which groups they are."""

    # ── when they expire ───────────────────────────────────────────────────────────────────────

    def for_deadlines(self, queue: Queue) -> None:
        """Find out when rows expire that wait still."""
        deadlines = queue.rows.deadlines
        if deadlines is None or not deadlines.are_unread:
            return
        if not queue.count:
            deadlines.forget_unread()
        elif not deadlines.is_reading:
            deadlines.is_reading = True
            look = partial(self._read_some, queue.subscription.id, deadlines)
            self._slices.soon(look, LOOK_ITEMS)

    def _read_some(self, subscription_id: int, deadlines: Deadlines) -> None:
        """Read rows whose expiry is unknown; some, as the next turn is for other queues."""
        queue = self._queues.get(subscription_id)
        if queue is None:
            return
        slices = deadlines.next_unread(Room(READ_ROWS_MAX, self._answer_max_bytes))
        if slices:
            self._ports.read(Handout(subscription_id, slices, self._on_expiries))
        else:
            deadlines.is_reading = False

    def _on_expiries(self, handout: Handout, deliveries: Deliveries, now_ms: int) -> None:
        """Waiting rows were read; a row that could not be is found out when it leaves."""
        queue = self._queues.get(handout.subscription_id)
        if queue is None:
            return  # Deleted meanwhile, and its rows with it.
        deadlines = queue.rows.deadlines
        assert deadlines is not None
        expiries_ms = deliveries.expiries_ms(np.arange(len(deliveries)))
        deadlines.add(deliveries.settled["seq"], expiries_ms)
        deadlines.is_reading = False
        self._pump.run(queue, now_ms)

    # ── of which groups they are ───────────────────────────────────────────────────────────────

    def for_groups(self, queue: Queue) -> None:
        """Find out of which groups the rows are that came."""
        single_file = queue.rows.single_file
        if single_file is not None and single_file.are_unread and not single_file.is_reading:
            single_file.is_reading = True
            find = partial(self._find_some, queue.subscription.id, single_file)
            self._slices.soon(find, LOOK_ITEMS)

    def _find_some(self, subscription_id: int, single_file: SingleFile) -> None:
        """Read rows whose group is unknown; some, as the next turn is for other queues."""
        queue = self._queues.get(subscription_id)
        if queue is None:
            return
        while slices := single_file.next_expected(self._room()):
            # Rows that have ended meanwhile need not be there any more.
            if slices := self._still_expected(queue, slices):
                self._ports.read(Handout(subscription_id, slices, self._on_expected))
                return
        if slices := single_file.next_unread(self._room()):
            self._ports.read(Handout(subscription_id, slices, self._on_groups))
        else:
            single_file.is_reading = False  # They have expired meanwhile.

    def _room(self) -> Room:
        return Room(self.rows_max, self._answer_max_bytes)

    def _still_expected(self, queue: Queue, slices: list[FiredRows]) -> list[FiredRows]:
        """Some rows waited in the wheel: those that still do, or have come to the queue since."""
        found = []
        for fired in slices:
            entries = map(ScheduleEntry, fired.rows["seq"].tolist(), fired.due_ms().tolist())
            waits = [self._has_not_fired(entry) or queue.holds(entry) for entry in entries]
            if any(waits):
                found.append(FiredRows(fired.hour, select(fired.rows, np.array(waits))))
        return found

    def _on_expected(self, handout: Handout, deliveries: Deliveries, now_ms: int) -> None:
        """Rows of the wheel were read that may be retries: those hold up their groups."""
        queue, single_file = self._end_reading(handout)
        if queue is None or single_file is None:
            return
        for delivery in deliveries:
            options, entry = delivery.payload.options, delivery.entry
            is_retry = delivery.attempt > 1
            if is_retry and (self._has_not_fired(entry) or queue.holds(entry)):
                assert options is not None and options.group is not None
                single_file.hold(options.group, delivery.origin.message_seq, entry.seq)
        self._pump.run(queue, now_ms)

    def _on_groups(self, handout: Handout, deliveries: Deliveries, now_ms: int) -> None:
        queue, single_file = self._end_reading(handout)
        if queue is None or single_file is None:
            return
        leaving, lost = single_file.on_read(deliveries)
        for fired in leaving:
            queue.rows.admit(fired)
        self._pump.go_on(queue, self._queues.lose(queue, lost))
        self._pump.run(queue, now_ms)

    def _end_reading(self, handout: Handout) -> tuple[Queue | None, SingleFile | None]:
        queue = self._queues.get(handout.subscription_id)
        if queue is None:
            return None, None  # Deleted meanwhile, and its rows with it.
        single_file = queue.rows.single_file
        assert single_file is not None
        single_file.is_reading = False
        return queue, single_file
