"""Feeds: records of a topic on their way to the event loop, a bounded number of them.

    the feed's thread ──▶ Handover.give (waits for room) ──▶ Handover.take ──▶ who publishes them

A kind of broker is a module with a `FeedOpener`. What is read ahead is BATCHES_MAX batches, so a
topic of millions waits at the broker and not here: as long as publishing is refused nobody reads.

Cost: one call of the event loop for each batch. Threads: as each method says.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final, Protocol

from delayserver.errors import DelayServerError
from delayserver.records.sources import Source, SourceRecord

BATCHES_MAX: Final = 2
BATCH_RECORDS_MAX: Final = 500
BATCH_MAX_BYTES: Final = 512 * 1024
"""Of keys and values, unless one record alone has more."""

Batch = Sequence[SourceRecord]


class FeedError(DelayServerError):
    """A topic cannot be read; says of what, and why. It is tried again."""


class Feed(Protocol):
    """Records of one source."""

    async def read(self) -> Batch:
        """The next ones, at least one, in the order of each partition. Raises FeedError."""
        ...

    def took(self, positions: Mapping[int, int]) -> None:
        """By partition the offset that is taken next: for those who look at the broker."""
        ...

    async def close(self) -> None:
        """Let go of everything."""
        ...


class FeedOpener(Protocol):
    """Makes feeds of one kind of broker."""

    async def open(self, source: Source, positions: Mapping[int, int]) -> Feed:
        """A feed that begins there. What is wrong is said by its first `read`."""
        ...


class Handover:
    """A bounded queue from one thread to the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._batches: deque[Batch] = deque()
        self._room = threading.Semaphore(BATCHES_MAX)
        self._news = asyncio.Event()
        self._error: FeedError | None = None

    def give(self, batch: Batch, wait_s: float) -> bool:
        """In the thread: hand it over as soon as there is room; False: there was none for so
        long."""
        if not self._room.acquire(timeout=wait_s):
            return False
        self._batches.append(batch)
        self._tell()
        return True

    def fail(self, error: FeedError) -> None:
        """In the thread: nothing more comes."""
        self._error = error
        self._tell()

    def _tell(self) -> None:
        # The loop is closed already when a server ends whose brokers are away.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._news.set)

    async def take(self) -> Batch:
        """On the event loop: the next batch. Raises FeedError behind the last one."""
        while not self._batches:
            if self._error is not None:
                raise self._error
            self._news.clear()
            if not self._batches and self._error is None:
                await self._news.wait()
        batch = self._batches.popleft()
        self._room.release()
        return batch
