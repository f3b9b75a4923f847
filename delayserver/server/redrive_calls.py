"""Messages that are delivered again: dead letters, and messages that are kept.

    owners ──▶ redrive, or discard: the dead letters of a subscription, also of a deleted one
    receiver ─▶ replay: one message, to subscriptions that had it or would have it

Cost: a record for each delivery; some REDRIVE_MAX of them are decided in a turn of the event loop.
Threads: belongs to the event loop.
"""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Sequence

from delayserver.decisions.redriving import Replayable
from delayserver.errors import ConflictError, NotFoundError
from delayserver.records.direct import DIRECT_NAME
from delayserver.records.message import Payload
from delayserver.records.receivers import had
from delayserver.records.subscriptions import DIRECT, Subscription
from delayserver.records.tables import (
    ChangeState,
    dead_letter_key,
    lost_subject,
    read_dead_letter_owners,
    read_dead_letters,
    read_letter,
)
from delayserver.server.futures import durable
from delayserver.server.shard import Shard
from delayserver.server.waits import Waits
from storage.catalog import Table

REDRIVE_MAX = 64
"""Dead letters that are redriven in one turn of the event loop: a few ms."""
REDRIVE_BYTES_MAX = 4 * 1024 * 1024
"""Bytes of their payloads together, unless one alone has more."""


class RedriveCalls:
    """Deliveries that follow an end."""

    def __init__(self, shard: Shard, waits: Waits) -> None:
        self._shard = shard
        self._engine = shard.engine
        self._waits = waits
        self.redrive_max = REDRIVE_MAX

    async def owners(self, name: str) -> list[Subscription]:
        """The owners of the dead letters under that name, oldest first: subscriptions that were
        deleted, and the one that exists. The catalog shows their letters.

        Raises NotFoundError."""
        if name == DIRECT_NAME:
            await self._waits.checkpoint()
            return list(DIRECT)
        existing = self._engine.registry.by_name(name)
        await self._waits.checkpoint()
        owners = await asyncio.to_thread(read_dead_letter_owners, self._shard.catalog, name)
        if existing is not None:
            owners = [*(one for one in owners if one.id != existing.id), existing]
        if not owners:
            raise NotFoundError(f"there is no subscription {name!r}")
        return owners

    async def redrive(
        self,
        owners: Sequence[Subscription],
        heir: Subscription | None,
        ids: Collection[str] | None,
        may_read: Callable[[str], bool] = lambda subject: True,
    ) -> int:
        """Have dead letters of `owners` delivered again, to `heir` (None: each to its owner): those
        with these message ids, or all. `may_read`: asked for the subject of each. Durable on
        return. Returns how many.

        A letter that dies again meanwhile has another row, and is not taken again: else the call
        would not end while the receiver refuses. Raises ConflictError, OverloadedError,
        StoppingError; letters that were redriven by then stay so."""
        end_seq, count = self._engine.sequencer.next_seq, 0
        for owner in owners:
            taker, from_seq = heir or owner, 0
            while letters := await asyncio.to_thread(
                self._some_letters, owner, from_seq, end_seq, ids, may_read
            ):
                if self._engine.registry.by_id(taker.id) is None:
                    raise ConflictError(f"the subscription {taker.name!r} was deleted meanwhile")
                now_ms = self._shard.clock()
                for entry_seq, payload in letters:
                    # Another call may have taken it since it was read, and a checkpoint forgotten.
                    key = dead_letter_key(owner.id, entry_seq)
                    if self._shard.catalog.get(Table.DEAD_LETTERS, key) is None:
                        continue
                    with contextlib.suppress(NotFoundError):
                        self._engine.redriving.redrive(
                            owner.id, entry_seq, payload, taker.id, now_ms
                        )
                        count += 1
                await self._waits.all_durable()
                from_seq = letters[-1][0] + 1
        return count

    def receiver(self, name: str, found: Replayable) -> Subscription:
        """The subscription of that name, which gets such messages, or had this one; `_to` is that
        of a message which says itself where it goes, and no other. Raises NotFoundError,
        ConflictError."""
        direct = self._engine.registry.by_id(found.payload.direct_id)
        if name == DIRECT_NAME and direct is not None:
            return direct
        if name == DIRECT_NAME:
            raise ConflictError(
                f"the message does not say where it goes (`to`): {name} never has it"
            )
        wanted = self._engine.subscribing.subscription(name)
        if direct is not None:
            raise ConflictError(f"the message says where it goes (`to`): {name} never has it")
        subject = self._engine.sequencer.subject_names[found.subject_id]
        row = found.entry
        if not (wanted.matches(subject) or had(wanted, subject, row.seq, row.due_ms)):
            raise ConflictError(
                f"{name} gets {wanted.subject}, and the message is of the subject {subject}"
            )
        return wanted

    async def replay(
        self, found: Replayable, subscription_ids: Sequence[int]
    ) -> list[Subscription]:
        """Have a message delivered again; durable on return. Returns the subscriptions that get it.
        Raises as `Redriving.replay`, OverloadedError, StoppingError."""
        receivers, group = self._engine.redriving.replay(
            found, subscription_ids, self._shard.clock()
        )
        subscriptions = [self._engine.registry.by_id(one) for one in receivers]
        await durable(group)
        return [one for one in subscriptions if one is not None]

    def _some_letters(
        self,
        owner: Subscription,
        from_seq: int,
        end_seq: int,
        ids: Collection[str] | None,
        may_read: Callable[[str], bool] = lambda subject: True,
    ) -> list[tuple[int, Payload]]:
        """The next dead letters with these message ids, as many as are decided in one turn of the
        event loop: the seqs of their rows, from `from_seq` to before `end_seq`, and payloads."""
        letters: list[tuple[int, Payload]] = []
        total_bytes = 0
        for entry_seq, letter in read_dead_letters(self._shard.catalog, owner.id, from_seq):
            if entry_seq >= end_seq or len(letters) == self.redrive_max:
                break
            payload = read_letter(letter, entry_seq)
            origin = None if payload is None else payload.origin
            if payload is None or origin is None:
                continue  # The list of them names it.
            if not may_read(self._subject_name(origin.subject_id)):
                continue
            if (
                ids is None
                or self._engine.ids.encode(origin.published_due_ms, origin.message_seq) in ids
            ):
                total_bytes += len(letter.payload)
                if letters and total_bytes > REDRIVE_BYTES_MAX:
                    break
                letters.append((entry_seq, payload))
        return letters

    async def discard(
        self,
        owners: Sequence[Subscription],
        message_id: str,
        may_read: Callable[[str], bool] = lambda subject: True,
    ) -> None:
        """Delete a dead letter of one of `owners`; durable on return. `may_read`: asked for its
        subject. Raises NotFoundError."""
        message_seq = self._engine.messages.message_id(message_id).seq
        for owner in owners:
            change = self._engine.sequencer.changes(message_seq).get(owner.id)
            if change is None:
                # Its hour is past the retention: only the letter itself tells whose it is.
                letter = await asyncio.to_thread(self._find_letter, owner, message_seq)
            elif change.state == ChangeState.DEAD:
                letter = change.entry_seq, change.subject_id
            else:
                letter = None
            if letter is not None:
                entry_seq, subject_id = letter
                if not may_read(self._subject_name(subject_id)):
                    break
                discard = self._engine.redriving.discard
                await durable(discard(owner.id, entry_seq, message_seq, subject_id))
                return
        raise NotFoundError(f"{owners[-1].name} has no dead letter {message_id!r}")

    def _subject_name(self, subject_id: int) -> str:
        return self._engine.sequencer.subject_names.get(subject_id, lost_subject(subject_id))

    def _find_letter(self, owner: Subscription, message_seq: int) -> tuple[int, int] | None:
        """The row and the subject of a dead letter."""
        for entry_seq, letter in read_dead_letters(self._shard.catalog, owner.id):
            payload = read_letter(letter, entry_seq)
            origin = None if payload is None else payload.origin
            if origin is not None and origin.message_seq == message_seq:
                return entry_seq, origin.subject_id
        return None
