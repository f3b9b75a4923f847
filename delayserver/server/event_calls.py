"""An event: all that watches its key is cancelled, or fires with its body, and is durable then.

Watchers are looked for, and their bodies read, a part at a time: there may be many, and long ones.
Cost: two turns of the event loop for each part, and a read for rows on the disk. Threads:
belongs to the event loop.
"""

import asyncio
from bisect import bisect_left
from operator import attrgetter

from delayserver.decisions.watches import Watcher
from delayserver.delivery.reader import Reader
from delayserver.records.message import Payload, ScheduleEntry
from delayserver.records.tables import OnEvent
from delayserver.server.futures import durable
from delayserver.server.shard import Shard
from delayserver.server.waits import Waits
from storage.errors import DamageError


class EventCalls:
    """Completes messages that watch a key."""

    def __init__(self, shard: Shard, waits: Waits) -> None:
        self._shard = shard
        self._engine = shard.engine
        self._waits = waits

    async def event(self, key: str) -> tuple[int, int]:
        """Complete all that watches a key; durable on return. How many were cancelled and fired."""
        events, before_seq = self._engine.events, self._engine.sequencer.next_seq
        cancelled = fired = 0
        from_seq: int | None = 0
        while from_seq is not None:
            watchers, from_seq = events.watchers(key, before_seq, from_seq)
            while watchers:
                bodies, count = await self._bodies_to_fire(watchers)
                done = events.complete(key, watchers[:count], bodies, self._shard.clock())
                self._shard.tick_soon()
                await durable(done.group)
                cancelled += len(done.cancelled)
                fired += len(done.fired)
                watchers = done.left + watchers[count:]
            # Also where nothing waited: others have their turn.
            await asyncio.sleep(0)
        # The decisions of another event must be durable, too.
        await self._waits.all_durable()
        return cancelled, fired

    async def _bodies_to_fire(
        self, watchers: list[Watcher]
    ) -> tuple[dict[int, tuple[Payload, int]], int]:
        """Payload and subject id by seq, and of how many of the watchers: they may be long."""
        bytes_max = self._shard.settings.answer_max_bytes
        bodies: dict[int, tuple[Payload, int]] = {}
        on_disk: list[tuple[int, ScheduleEntry]] = []
        for watcher in watchers:
            if watcher.on_event == OnEvent.FIRE:
                entry = self._engine.events.entry(watcher)
                if (found := self._shard.unfiled(entry)) is not None:
                    bodies[watcher.seq] = found.payload, found.subject_id
                else:
                    on_disk.append((watcher.seq, entry))

        def read(reader: Reader) -> int:
            total_bytes = 0
            for count, (seq, entry) in enumerate(on_disk):
                if total_bytes > bytes_max:
                    return count
                try:
                    found = reader.find(entry)
                except DamageError as error:
                    self._shard.on_damage(error)
                    continue
                if found is not None:
                    bodies[seq] = found.payload, found.subject_id
                    total_bytes += len(found.payload.body)
            return len(on_disk)

        count = await self._waits.read(read) if on_disk else 0
        if count < len(on_disk):
            return bodies, bisect_left(watchers, on_disk[count][0], key=attrgetter("seq"))
        return bodies, len(watchers)
