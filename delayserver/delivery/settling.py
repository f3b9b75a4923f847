"""Settling: the results of deliveries are recorded, and their places are free.

    arrived ──▶ a row of the dispatch log, its hour has one less ──▶ released
    not taken ──▶ released ──▶ in its queue again: next if it was handed out, else at its place
    settled, or lost ──▶ the next of its group may leave

A delivery is one row; those of a pull end together, and are columns.

Cost: 3 µs for a delivery, 1 µs for one of many. Threads: belongs to the event loop.
"""

from collections import Counter
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from delayserver.delivery.deliveries import Deliveries
from delayserver.delivery.orphans import Orphans
from delayserver.delivery.ports import DispatcherPorts, Pumping
from delayserver.delivery.queue import Queue
from delayserver.delivery.queues import Queues
from delayserver.delivery.reassignment import Reassignment
from delayserver.delivery.settler import pack_settled
from delayserver.delivery.sink import Recorded, Tried
from delayserver.records.message import DueDelivery
from delayserver.schedule.hours import Hours
from delayserver.schedule.wheel_rows import FiredRows
from storage.frame import Rows
from storage.notes import Note, NoteBytes, encode_note
from storage.rows import HOUR_MS, Outcome, select


class Settling:
    """Ends deliveries."""

    def __init__(
        self,
        queues: Queues,
        ports: DispatcherPorts,
        pump: Pumping,
        hours: Hours,
        orphans: Orphans,
        reassignment: Reassignment,
    ) -> None:
        self._queues = queues
        self._ports = ports
        self._pump = pump
        self._hours = hours
        self._orphans = orphans
        self._reassignment = reassignment
        self.delivered_by_subject: Counter[int] = Counter()
        self.delivered_by_subscription: Counter[int] = Counter()
        """How many deliveries arrived since the start, by subject id and by subscription id."""

    def settle_delivered(
        self,
        delivery: DueDelivery,
        now_ms: int,
        recorded: Recorded | None = None,
        tried: Tried | None = None,
    ) -> None:
        """Record a delivery that has arrived, so that a restart does not repeat it (I4).

        `recorded`: the delivering process has told all replicas, so this one writes the same row.
        `tried`: the note of the attempt."""
        self.delivered_by_subject[delivery.origin.subject_id] += 1
        self.delivered_by_subscription[delivery.subscription_id] += 1
        if recorded is None:
            self.settle(delivery, Outcome.DELIVERED, now_ms, tried)
        else:
            row = pack_settled(delivery, Outcome.DELIVERED, recorded.settled_ms)
            self._ports.settle_recorded(delivery.entry.hour, row, recorded.offset)
            self._hours.add(delivery.entry.hour, -1)
        self.release_delivery(delivery)
        self.end_turn(delivery.subscription_id, (delivery.origin.message_seq,))

    def settle_leased(self, deliveries: Deliveries, which: NDArray[np.intp], now_ms: int) -> None:
        """Record leased deliveries that have arrived (I4). `which`: their indexes (shape n)."""
        rows = select(deliveries.settled, which)
        rows["settled_ms"] = now_ms
        hours = rows["due_ms"] // HOUR_MS
        for hour, count in Counter(hours.tolist()).items():
            of_hour = rows if count == len(rows) else select(rows, hours == hour)
            self._ports.settle(hour, of_hour.tobytes(), _note_leased(deliveries, of_hour, now_ms))
            self._hours.add(hour, -count)
        subject_ids = deliveries.subject_ids
        self.delivered_by_subject.update([subject_ids[index] for index in which.tolist()])
        self.delivered_by_subscription[deliveries.subscription_id] += len(which)
        self._release_leased(deliveries.subscription_id, rows["seq"].tolist())
        self.end_turn(deliveries.subscription_id, rows["message_seq"].tolist())

    def settle(
        self, delivery: DueDelivery, outcome: Outcome, now_ms: int, tried: Tried | None = None
    ) -> None:
        note = None if tried is None else _note(delivery, tried)
        self._ports.settle(delivery.entry.hour, pack_settled(delivery, outcome, now_ms), note)
        self._hours.add(delivery.entry.hour, -1)

    @property
    def delivered_total(self) -> int:
        """Deliveries that arrived since the start."""
        return sum(self.delivered_by_subject.values())

    def may_be_the_cause(self, deliveries: Deliveries, which: NDArray[np.intp]) -> bool:
        """Whether leased deliveries whose leases are over are to blame. They are if consumers held
        no other message of their subscription, or no other one that had failed before. `which`:
        their indexes (shape n)."""
        queue = self._queues.get(deliveries.subscription_id)
        if queue is None or len(which) > 1:
            return len(which) == 1
        seq = int(deliveries.settled["seq"][which[0]])
        return queue.in_flight <= 1 or queue.rows.suspects.out == {seq}

    def _release_leased(self, subscription_id: int, seqs: list[int]) -> Queue | None:
        queue = self._queues.get(subscription_id)
        if queue is None:
            self._orphans.remove(seqs)
        elif queue.release_leased(seqs):
            self._pump.soon(subscription_id)  # The next suspects may leave.
        return queue

    def release_delivery(self, delivery: DueDelivery) -> None:
        """Free the place of a delivery that is not on its way any more, whatever came of it.

        It remains unsettled: a record of a retry, or a dead letter, settles its row."""
        seq = delivery.entry.seq
        queue = self._queues.get(delivery.subscription_id)
        if queue is None:
            self._orphans.remove((seq,))
            self._reassignment.go_on()
        elif queue.release(seq, self._queues.stopwatch()):
            queue.attempts.pop(seq, None)

    def return_delivery(self, delivery: DueDelivery, next_attempt: int) -> None:
        """Put a delivery that was not taken into its queue again: as the next one if it was handed
        out, else at its place.

        `next_attempt`: the number of its next attempt; that of this one, if it does not count."""
        seq, fired = delivery.entry.seq, FiredRows(delivery.entry.hour, delivery.row)
        queue = self._queues.get(delivery.subscription_id)
        was_handed_out = queue is None or not queue.subscription.is_pushed or seq in queue.begun
        self.release_delivery(delivery)
        if queue is None:
            self._reassignment.leave(fired, delivery.subscription_id)
            return
        if next_attempt != delivery.origin.attempt:
            queue.attempts[seq] = next_attempt
        if was_handed_out:
            queue.rows.come_back(fired)
        else:
            queue.rows.put_back(fired)

    def return_leased(
        self,
        deliveries: Deliveries,
        which: NDArray[np.intp],
        attempts_used: int = 1,
        *,
        are_suspects: bool = False,
    ) -> None:
        """Put deliveries of a pull into their queue again, for one attempt more, as the next ones.

        `which`: their indexes (shape n); `attempts_used`: 0 where no consumer was sent them: they
        go to their places; `are_suspects`: one of them may have ended the consumer that had all."""
        settled = select(deliveries.settled, which)
        seqs = settled["seq"].tolist()
        queue = self._release_leased(deliveries.subscription_id, seqs)
        if queue is not None:
            queue.attempts.update(
                zip(seqs, (settled["attempt"] + attempts_used).tolist(), strict=True)
            )
        for fired in deliveries.slices(which):
            if queue is None:
                self._reassignment.leave(fired, deliveries.subscription_id)
            elif are_suspects:
                queue.rows.suspect(fired)
            elif attempts_used:
                queue.rows.come_back(fired)
            else:
                queue.rows.put_back(fired)

    def keep_turn(self, subscription_id: int, message_seq: int, seq: int) -> None:
        """A message is retried as row `seq`: if it is the first of its group, that is still."""
        queue = self._queues.get(subscription_id)
        if queue is not None and queue.rows.single_file is not None:
            queue.rows.single_file.follow(message_seq, seq)

    def end_turn(self, subscription_id: int, message_seqs: Iterable[int]) -> None:
        """Messages are settled for a subscription: the rows that wait behind them in their groups
        are next."""
        queue = self._queues.get(subscription_id)
        if queue is None or queue.rows.single_file is None:
            return
        self._pump.go_on(queue, queue.rows.single_file.release(message_seqs))


def _note(delivery: DueDelivery, tried: Tried) -> NoteBytes:
    entry = delivery.entry
    return encode_note(
        Note(
            *(entry.hour, entry.seq, delivery.subscription_id, 1),
            *(tried.began_ms, tried.duration_ms, tried.status, tried.answer),
        )
    )


def _note_leased(deliveries: Deliveries, rows: Rows, now_ms: int) -> NoteBytes | None:
    """One for all rows of an hour that are acknowledged together."""
    began_ms = deliveries.leased_ms
    if not began_ms:
        return None
    first = rows[0]
    hour, seq = int(first["due_ms"]) // HOUR_MS, int(first["seq"])
    subscription_id, took_ms = deliveries.subscription_id, max(0, now_ms - began_ms)
    return encode_note(Note(hour, seq, subscription_id, len(rows), began_ms, took_ms))
