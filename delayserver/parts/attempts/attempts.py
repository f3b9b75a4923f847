"""Queries: how each attempt to deliver a message went.

    the row of each delivery ── its payload ──▶ attempts that failed (`History`)
                            └── dispatch log ─▶ the one that arrived, and its note
    a dead letter ── its payload ─────────────▶ attempts that failed

The server keeps the attempts as long as the message. Their records stand in the files of the
message's hours and are deleted with them.

Cost: as a look-up; for a dead letter, a checkpoint as well. Threads: belongs to the event loop;
files are read in the reader thread.
"""

import asyncio
import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from delayserver.decisions.redriving import Replayable
from delayserver.delivery.reader import EndedRow, Reader
from delayserver.errors import NotFoundError
from delayserver.records.attempts import DeliveryAttempt, History
from delayserver.records.message import ScheduleEntry, decode_payload
from delayserver.records.tables import Change, ChangeState, read_dead_letter
from delayserver.server.calls import Calls
from storage.rows import Outcome


@dataclass(slots=True)
class AttemptView:
    """An attempt, and the name of its subscription; empty if that was deleted."""

    subscription: str
    attempt: DeliveryAttempt


@dataclass(slots=True)
class AttemptsView:
    """The known attempts of a message, in the order in which they began."""

    attempts: list[AttemptView]
    dropped: int
    """How many attempts were left out; a history keeps only the first ones that failed."""


class AttemptQueries:
    """The attempts that one server has made."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def look_up(self, seq: int, due_ms: int) -> AttemptsView:
        """The attempts of a message. Raises NotFoundError, DamageError."""
        found, dropped = await self.find(seq, due_ms)
        registry = self._calls.registry
        views = []
        for attempt in found:
            subscription = registry.by_id(attempt.subscription_id)
            views.append(AttemptView(subscription.name if subscription else "", attempt))
        return AttemptsView(views, dropped)

    async def find(self, seq: int, due_ms: int) -> tuple[list[DeliveryAttempt], int]:
        """The attempts themselves, and how many were left out. Raises the errors of `look_up`."""
        calls = self._calls
        located = calls.locate(seq, due_ms)
        entry = located.entry
        changes = {key: change for key, change in calls.changes(seq).items() if key}
        # Raises if the message is not kept any more.
        histories = [(await calls.find_any(located.rows)).payload.history]
        arrived = await self._arrived(entry)
        for subscription_id, change in changes.items():
            histories.append(await self._history(subscription_id, change))
            if change.state == ChangeState.RETRYING:
                arrived += await self._arrived(ScheduleEntry(change.entry_seq, change.due_ms))
        return _together(histories, arrived)

    async def replayable(self, seq: int, due_ms: int) -> tuple[Replayable, list[int]]:
        """A message for `Calls.replay`, and the subscriptions that have settled it, in the order in
        which they received it. Raises the errors of `look_up`."""
        calls = self._calls
        await calls.settled()
        entry = calls.locate(seq, due_ms).entry
        if not calls.is_known(entry):
            raise NotFoundError("the message was settled, and its hour is past its retention")
        found = await calls.find(entry)
        attempts, _ = await self.find(seq, due_ms)
        origin = found.payload.origin
        first_due_ms = due_ms if origin is None else origin.due_ms
        settled = dict.fromkeys(one.subscription_id for one in attempts if not one.error)
        message = (seq, due_ms, found.subject_id, entry, first_due_ms, found.payload, attempts)
        return Replayable(*message), list(settled)

    async def _history(self, subscription_id: int, change: Change) -> History | None:
        calls, seq = self._calls, change.entry_seq
        if change.state == ChangeState.DEAD:
            await calls.checkpoint()
            letter = await asyncio.to_thread(read_dead_letter, calls.catalog, subscription_id, seq)
            if letter is not None:
                return decode_payload(letter.payload, "catalog", 0, seq).history
        # This also finds the attempts before the last one of a dead letter that was discarded.
        with contextlib.suppress(NotFoundError):
            return (await calls.find(ScheduleEntry(seq, change.due_ms))).payload.history
        return None

    async def _arrived(self, entry: ScheduleEntry) -> list[DeliveryAttempt]:
        ended = await self._calls.read(partial(_ended, entry))
        return [_attempt(one) for one in ended if one.row["outcome"] == Outcome.DELIVERED]


def _ended(entry: ScheduleEntry, reader: Reader) -> list[EndedRow]:
    return reader.ended(entry.hour, entry.seq)


def _attempt(ended: EndedRow) -> DeliveryAttempt:
    row, note = ended
    number, subscription_id = int(row["attempt"]), int(row["subscription_id"])
    if note is None:
        return DeliveryAttempt(number, subscription_id, int(row["settled_ms"]))
    told = (note.began_ms, note.duration_ms, note.status, note.answer)
    return DeliveryAttempt(number, subscription_id, *told)


def _together(
    histories: Iterable[History | None], arrived: Iterable[DeliveryAttempt]
) -> tuple[list[DeliveryAttempt], int]:
    """Each attempt once, in order. A row that was recorded twice may report an attempt twice, and
    the history of a later row repeats attempts of an earlier one."""
    found: dict[tuple[int, int, int], DeliveryAttempt] = {}
    dropped = 0
    for history in histories:
        if history is not None:
            dropped += history.dropped
            for one in history.attempts:
                found[one.subscription_id, one.number, one.began_ms] = one
    for one in arrived:
        found[one.subscription_id, one.number, one.began_ms] = one
    return sorted(found.values(), key=lambda one: (one.began_ms, one.number)), dropped
