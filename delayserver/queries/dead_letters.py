"""Dead letters: messages that no attempt delivered, as lists.

A subscription that was deleted leaves its dead letters behind. They are found by its name, together
with those of a subscription that got the name after it.

Cost: a range of the catalog, read outside of the event loop. Threads: belongs to the event loop.
"""

import asyncio
import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from delayserver.records.direct import DIRECT_NAME, is_direct
from delayserver.records.message import Payload
from delayserver.records.subscriptions import Subscription
from delayserver.records.tables import (
    count_dead_letters,
    lost_subject,
    read_dead_letters,
    read_letter,
)
from delayserver.server.calls import Calls

log = structlog.get_logger()

COUNTED_MAX: Final = 1000
"""Dead letters of one subscription that are counted; there may be more."""


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

    async def counts(
        self, behind: str, limit: int, may_see: Callable[[str], bool]
    ) -> tuple[list[tuple[str, int]], str | None]:
        """Names of subscriptions with dead letters, in order, from the name after `behind` on, and
        how many each has (see COUNTED_MAX), as of the last checkpoint; and the last name of the
        page, if there are more. `may_see` is asked for the subject of each subscription."""
        return await asyncio.to_thread(self._count, behind, limit, may_see)

    def _count(
        self, behind: str, limit: int, may_see: Callable[[str], bool]
    ) -> tuple[list[tuple[str, int]], str | None]:
        counts: Counter[str] = Counter()
        for owner, count in count_dead_letters(self._calls.catalog, COUNTED_MAX):
            name = DIRECT_NAME if is_direct(owner.id) else owner.name
            if name > behind and may_see(owner.subject):
                counts[name] += count
        found = sorted(counts.items())
        following = found[limit - 1][0] if len(found) > limit else None
        return found[:limit], following

    async def page(
        self,
        owners: Sequence[Subscription],
        from_seq: int,
        limit: int,
        may_read: Callable[[str], bool],
    ) -> tuple[list[DeadLetterView], int | None]:
        """Up to `limit` dead letters of `Calls.dead_letter_owners`, in the order of their schedule
        rows, from one row on, and the row to go on with. Long letters make a page shorter.
        `may_read` is asked for the subject of each letter, because a subscription may have had
        other subjects before."""
        return await asyncio.to_thread(self._scan, owners, from_seq, limit, may_read)

    def _scan(
        self,
        owners: Sequence[Subscription],
        from_seq: int,
        limit: int,
        may_read: Callable[[str], bool],
    ) -> tuple[list[DeadLetterView], int | None]:
        each = (self._views(owner, from_seq) for owner in owners)
        letters: list[DeadLetterView] = []
        total_bytes = 0
        for letter in heapq.merge(*each, key=lambda letter: letter.entry_seq):
            if not may_read(letter.subject):
                continue
            total_bytes += len(letter.payload.body)
            is_long = letters and total_bytes > self._calls.settings.answer_max_bytes
            if is_long or len(letters) == limit:
                return letters, letter.entry_seq
            letters.append(letter)
        return letters, None

    def _views(self, owner: Subscription, from_seq: int) -> Iterator[DeadLetterView]:
        calls = self._calls
        for entry_seq, letter in read_dead_letters(calls.catalog, owner.id, from_seq):
            payload = read_letter(letter, entry_seq)
            origin = None if payload is None else payload.origin
            if payload is None or origin is None:
                log.error("a dead letter cannot be read", subscription=owner.name, row=entry_seq)
                continue
            yield DeadLetterView(
                entry_seq,
                calls.encode_id(origin.published_due_ms, origin.message_seq),
                calls.subject_names.get(origin.subject_id, lost_subject(origin.subject_id)),
                letter.reason,
                letter.died_ms,
                letter.attempts,
                payload,
            )
