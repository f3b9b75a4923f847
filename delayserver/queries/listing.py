"""Listing: the messages of a subject that wait, in due order, a page at a time.

A listing shows everything that the server answered before the question. So deliveries are recorded
first, and every accepted message is filed. Then the reader thread reads the files of the hours, one
hour at a time, whether an hour is loaded or not; deliveries go in between. A row is listed while a
subscription is still to receive it. So a message that is being retried is listed at the time of its
next attempt, once for each subscription that it is retried for. A message that no subscription
matches is listed too. The state is that of the message, as a look-up shows it.

A page goes on from a position (due time and seq), so nothing is listed twice or left out while
messages come and go around it. It ends early when many rows had to be looked at, or when the bodies
are long (`answer_max_bytes`): then it holds fewer than were asked for, or none, and a cursor.

Cost: a checkpoint, the columns of the hours that are passed, and the payloads of the page.
Threads: belongs to the event loop.
"""

import asyncio
from collections.abc import Generator
from dataclasses import dataclass
from functools import partial

from delayserver.delivery.handout import Handout
from delayserver.delivery.lane import Room
from delayserver.delivery.reader import Reader
from delayserver.records.message import Payload, State
from delayserver.records.tables import hour_key, read_hours
from delayserver.schedule.pending import Page, Position, Wanted, position_of
from delayserver.schedule.replay import Snapshot
from delayserver.schedule.wheel_rows import FiredRows
from delayserver.server.calls import Calls
from storage.buckets import end_ms, is_day, start_ms
from storage.catalog import Table

SCAN_ROWS_MAX = 4_000_000
"""A page ends after so many rows, at the end of an hour."""
STATES_TURN = 100
"""Messages whose states are looked up in one turn of the event loop."""


@dataclass(slots=True)
class PendingView:
    """A message that waits."""

    message_id: str
    subject: str
    due_ms: int
    state: State
    attempts: int
    payload: Payload
    entry_seq: int
    """The seq of the row, which is not always the message's; with the due time its `Position`."""


class Listing:
    """The lists of one server."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def page(
        self, subject: str, start: Position, until_ms: int, limit: int
    ) -> tuple[list[PendingView], Position | None]:
        """Up to `limit` messages from `start` on, due before `until_ms`; and the next position."""
        calls = self._calls
        subject_id = calls.subjects.get(subject)
        if subject_id is None:
            return [], None
        await calls.settled()
        await calls.checkpoint()
        views: list[PendingView] = []
        room = Room(limit, calls.settings.answer_max_bytes)
        scanned = 0
        for snapshot in await asyncio.to_thread(self._hours, start.due_ms, until_ms):
            if scanned >= SCAN_ROWS_MAX:
                return views, Position(max(start.due_ms, start_ms(snapshot.hour)), 0)
            wanted = Wanted(subject_id, subject, start, until_ms, limit + 1 - len(views))
            page = await self._find(snapshot, wanted)
            if is_day(snapshot.hour) and not self._is_there(snapshot.hour):
                # The day was split meanwhile: its hours have all of its rows.
                start = Position(max(start.due_ms, start_ms(snapshot.hour)), 0)
                return views, start
            scanned += page.scanned
            found = FiredRows(snapshot.hour, page.rows)
            count = room.take(found, min(room.rows, len(page.rows)))
            if count:
                views += await self._views(subject, FiredRows(snapshot.hour, page.rows[:count]))
            if count < len(page.rows):
                return views, position_of(snapshot.hour, page.rows[count])
        return views, None

    def _is_there(self, bucket: int) -> bool:
        return self._calls.catalog.get(Table.HOURS, hour_key(bucket)) is not None

    def _hours(self, from_ms: int, until_ms: int) -> list[Snapshot]:
        return [
            Snapshot(bucket, state.length)
            for bucket, state in sorted(
                read_hours(self._calls.catalog).items(), key=lambda item: start_ms(item[0])
            )
            if from_ms < end_ms(bucket)
            and start_ms(bucket) < until_ms
            and state.length
            and not state.retired_ms
        ]

    async def _find(self, snapshot: Snapshot, wanted: Wanted) -> Page:
        registry = self._calls.registry.snapshot()
        steps: Generator[None, None, Page] | None = None

        def step(reader: Reader) -> Page | None:
            nonlocal steps
            steps = steps or reader.pending(snapshot, wanted, registry)
            try:
                next(steps)
            except StopIteration as end:
                page: Page = end.value
                return page
            return None

        while (page := await self._calls.read(step)) is None:
            pass
        return page

    async def _views(self, subject: str, batch: FiredRows) -> list[PendingView]:
        handout = Handout(0, [batch])
        deliveries = await self._calls.read(partial(Reader.deliveries, handout=handout, unfiled={}))
        views = []
        for index, delivery in enumerate(deliveries):
            if index and index % STATES_TURN == 0:
                await asyncio.sleep(0)
            origin = delivery.origin
            state = self._calls.locate(origin.message_seq, origin.published_due_ms).state
            views.append(
                PendingView(
                    delivery.message_id,
                    subject,
                    delivery.entry.due_ms,
                    # A message that has ended since its row was found was under way at that time.
                    state if state is State.SCHEDULED else State.DELIVERING,
                    delivery.attempt - 1,
                    delivery.payload,
                    delivery.entry.seq,
                )
            )
        return views
