"""Dead letters: messages that no attempt delivered, listed, delivered again, or deleted.

They stand in the catalog, so each call makes a checkpoint first and then reads what is there.

Cost: a checkpoint, then one range of the catalog, read outside of the event loop.
Threads: belongs to the event loop.
"""

import asyncio
import contextlib
from dataclasses import dataclass

import msgspec

from delayserver.errors import NotFoundError
from delayserver.records.message import Payload, decode_payload
from delayserver.records.subscriptions import Subscription
from delayserver.records.tables import (
    ChangeState,
    DeadLetter,
    dead_letter_key,
    number_key,
    parse_dead_letter_key,
)
from delayserver.server.calls import Calls
from storage.catalog import Table

REDRIVE_PAGE = 500


@dataclass(slots=True)
class DeadLetterView:
    """A message that no attempt delivered."""

    entry_seq: int
    message_id: str
    subject: str
    reason: str
    died_ms: int
    attempts: int
    payload: Payload


class DeadLetters:
    """The dead letters of one server."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def page(
        self, subscription: Subscription, from_seq: int, limit: int
    ) -> tuple[list[DeadLetterView], int | None]:
        """Up to `limit` dead letters of a subscription from one schedule row on, in the order of
        their rows, and where to go on. They are fewer where they are long."""
        await self._calls.checkpoint()
        return await asyncio.to_thread(self._scan, subscription, from_seq, limit)

    def _scan(
        self, subscription: Subscription, from_seq: int, limit: int
    ) -> tuple[list[DeadLetterView], int | None]:
        calls = self._calls
        prefix = number_key(subscription.id)
        pairs = calls.catalog.scan(
            Table.DEAD_LETTERS, dead_letter_key(subscription.id, from_seq), prefix=prefix
        )
        letters: list[DeadLetterView] = []
        total_bytes = 0
        for key, value in pairs:
            _, entry_seq = parse_dead_letter_key(key)
            total_bytes += len(value)
            is_long = letters and total_bytes > calls.settings.answer_max_bytes
            if is_long or len(letters) == limit:
                return letters, entry_seq
            letter = msgspec.msgpack.decode(value, type=DeadLetter)
            payload = decode_payload(letter.payload, "catalog", 0, entry_seq)
            origin = payload.origin
            assert origin is not None
            letters.append(
                DeadLetterView(
                    entry_seq,
                    calls.encode_id(origin.published_due_ms, origin.message_seq),
                    calls.subject_names[origin.subject_id],
                    letter.reason,
                    letter.died_ms,
                    letter.attempts,
                    payload,
                )
            )
        return letters, None

    async def redrive(self, subscription: Subscription, ids: set[str] | None) -> int:
        """Schedule dead letters again: those with these message ids, or all. Returns how many."""
        from_seq: int | None = 0
        count = 0
        while from_seq is not None:
            letters, from_seq = await self.page(subscription, from_seq, REDRIVE_PAGE)
            now_ms = self._calls.clock()
            for letter in letters:
                if ids is None or letter.message_id in ids:
                    # Another call may have taken it since it was listed.
                    with contextlib.suppress(NotFoundError):
                        self._calls.redrive(
                            subscription.id, letter.entry_seq, letter.payload, now_ms
                        )
                        count += 1
        await self._calls.durable(self._calls.not_durable())
        return count

    async def discard(self, subscription: Subscription, message_id: str) -> None:
        """Delete the dead letter of a message. Raises NotFoundError."""
        calls = self._calls
        found = calls.message_id(message_id)
        await calls.checkpoint()
        entry_seq = await self._find(subscription, found.seq, message_id)
        await calls.durable(calls.discard(subscription.id, entry_seq, found.seq))

    async def _find(self, subscription: Subscription, message_seq: int, message_id: str) -> int:
        change = self._calls.changes(message_seq).get(subscription.id)
        if change is not None:
            key = dead_letter_key(subscription.id, change.entry_seq)
            known = self._calls.catalog.get(Table.DEAD_LETTERS, key)
            if change.state == ChangeState.DEAD and known:
                return change.entry_seq
        else:
            # Its hour is past the retention: only the letter itself tells whose it is.
            from_seq: int | None = 0
            while from_seq is not None:
                letters, from_seq = await self.page(subscription, from_seq, REDRIVE_PAGE)
                for letter in letters:
                    if letter.message_id == message_id:
                        return letter.entry_seq
        raise NotFoundError(f"{subscription.name} has no dead letter {message_id!r}")
