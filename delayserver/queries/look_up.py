"""Queries: the state of a message, the pending messages, and how much falls due when.

Nothing here changes anything. Answers show everything that was answered before the question.

Cost: a look-up reads one row, and the dispatch log of its hour once it has fired; the counts read
the hour table of the catalog. Threads: belongs to the event loop; files are read in the reader
thread.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

import delayserver
from delayserver.delivery.reader import Reader
from delayserver.errors import InputError
from delayserver.records.message import Payload, ScheduleEntry, State
from delayserver.records.message_state import OPEN, ArrivedDelivery, MessageState
from delayserver.records.tables import read_hours
from delayserver.server.calls import Calls
from delayserver.times import format_time
from storage.buckets import hours_of, is_day
from storage.catalog import Table
from storage.frame import Rows
from storage.rows import HOUR_MS, Outcome


@dataclass(slots=True)
class DeliveryView:
    """The state of a message at one subscription."""

    subscription: str
    state: str
    attempt: int
    at_ms: int


@dataclass(slots=True)
class MessageView:
    """A message as a look-up shows it."""

    message_id: str
    subject: str
    due_ms: int
    state: State
    attempts: int
    payload: Payload
    version: str
    deliveries: list[DeliveryView] = field(default_factory=list)


class Queries:
    """Questions to one server."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def look_up(self, seq: int, due_ms: int) -> MessageView:
        """A message, its state and its deliveries so far. Raises NotFoundError, DamageError."""
        calls = self._calls
        located, version = calls.locate(seq, due_ms), calls.version(seq)
        found = await calls.find_any(located.rows)
        subject = calls.subject_names[found.subject_id]
        # While the files are read, deliveries may end and others begin. The answer shows the moment
        # after the last read, by all rows that existed then.
        told: dict[ScheduleEntry, Rows] = {}
        matched = subject if found.payload.to is None else ""
        while unread := [row for row in _rows_to_read(located) if row not in told]:
            for row in unread:
                told[row] = await calls.read(partial(_settled, row))
            located = calls.message_state(seq, due_ms, matched, _arrived(told.values()))
            version = calls.version(seq)
        view = MessageView(
            message_id=calls.encode_id(due_ms, seq),
            subject=subject,
            due_ms=located.entry.due_ms,
            state=located.state,
            attempts=located.attempts,
            payload=found.payload,
            version=version,
        )
        for subscription_id, one in located.deliveries.items():
            subscription = calls.registry.by_id(subscription_id)
            if subscription is None and one.state is not State.DELIVERED:
                continue
            if not one.attempt and calls.is_known(one.entry):
                continue  # It is shown once it is recorded, within `settle_sync_ms`.
            name = subscription.name if subscription else ""
            view.deliveries.append(DeliveryView(name, one.state, one.attempt or 1, one.at_ms))
            view.attempts = max(view.attempts, one.attempt - (one.state in OPEN))
        return view

    async def stats(self) -> dict[str, object]:
        """Counters since the start of this process, and the messages that wait now."""
        await self.count_later()
        return {"version": delayserver.__version__, **self._calls.gauges.stats()}

    async def count_later(self) -> None:
        """Count the messages of hours that are not loaded and the dead letters, and have the parts
        count, as of the last checkpoint."""
        calls = self._calls
        through_hour = calls.live_through_hour()
        # There may be two years of hours.
        hours = await asyncio.to_thread(read_hours, calls.catalog)
        calls.gauges.dead_letters = calls.catalog.size(Table.DEAD_LETTERS)
        calls.gauges.pending_later = sum(
            max(0, state.entries - state.removals)
            for hour, state in hours.items()
            if hour > through_hour
        )
        await calls.look()

    async def forecast(self, bucket_ms: int) -> list[dict[str, object]]:
        """How many messages fall due per bucket, a whole number of hours. For hours in memory, it
        counts the deliveries that are still to be made. Raises InputError."""
        if bucket_ms < HOUR_MS or bucket_ms % HOUR_MS:
            raise InputError("a bucket is a whole number of hours, such as 1h or 1d", "/bucket")
        await self._calls.checkpoint()
        pending: dict[int, int] = {}
        for bucket, state in read_hours(self._calls.catalog).items():
            if is_day(bucket):
                pending |= zip(hours_of(bucket), state.by_hour, strict=True)
            elif not state.retired_ms:
                pending[bucket] = state.entries - state.removals
        # Delivered messages are among the entries, but do not fall due again.
        pending |= self._calls.unsettled_by_hour()
        counts: Counter[int] = Counter()
        for hour, count in pending.items():
            counts[hour * HOUR_MS // bucket_ms * bucket_ms] += max(0, count)
        return [
            {"from": format_time(bucket), "count": count}
            for bucket, count in sorted(counts.items())
            if count
        ]


def _rows_to_read(located: MessageState) -> list[ScheduleEntry]:
    """The rows of a message that the dispatch log may have; none before a first delivery."""
    is_untouched = located.state is State.SCHEDULED and not located.deliveries
    return [] if is_untouched else located.rows


def _arrived(told: Iterable[Rows]) -> dict[int, ArrivedDelivery]:
    """The last delivery of each subscription that has arrived."""
    rows = [row for rows in told for row in rows[rows["outcome"] == Outcome.DELIVERED]]
    rows.sort(key=lambda row: int(row["settled_ms"]))
    return {
        int(row["subscription_id"]): ArrivedDelivery(int(row["attempt"]), int(row["settled_ms"]))
        for row in rows
    }


def _settled(entry: ScheduleEntry, reader: Reader) -> Rows:
    return reader.settled(entry.hour, entry.seq)
