"""Feeds: records of a topic on their way to the event loop, a bounded number of them.

    the feed's thread ──▶ Handover.give (waits for room) ──▶ Handover.take ──▶ the publishing part

A kind of broker is a module with a `FeedOpener`. At most BATCHES_MAX batches are read ahead, so a
topic of millions waits at the broker and not here: as long as publishing is refused nothing is
read.

Cost: one call of the event loop for each batch. Threads: as each method says.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from delayserver.delivery.own_threads import post
from delayserver.errors import DelayServerError
from delayserver.parts.sources.records import KnownSource, SourceRecord

BATCHES_MAX: Final = 2
BATCH_RECORDS_MAX: Final = 500
BATCH_MAX_BYTES: Final = 512 * 1024
"""Keys, values and headers of a batch together, unless one record alone has more."""

Batch = Sequence[SourceRecord]
Health = Callable[[str | None], None]
"""On the event loop: why a topic, or a part of it, cannot be read now although its feed goes on by
itself; None: all of it is read."""


class FeedError(DelayServerError):
    """A topic cannot be read; names the topic and the reason. It is tried again."""


class Feed(Protocol):
    """Records of one source."""

    @property
    def identity(self) -> str:
        """Which topic it is that is read, whatever its name; empty: the broker does not say. Known
        when something was read."""

    async def read(self) -> Batch:
        """The next ones, at least one, in the order of each partition. Raises FeedError."""

    def took(self, positions: Mapping[int, int]) -> None:
        """By partition the offset that is taken next: for those who look at the broker."""

    async def close(self) -> None:
        """Let go of everything."""


class FeedOpener(Protocol):
    """Makes feeds of one kind of broker."""

    async def open(self, known: KnownSource, health: Health) -> Feed:
        """A feed that begins where the state says. Its first `read` says if something is wrong at
        the beginning; `health` says it later."""


class Handover:
    """A bounded queue from one thread to the event loop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, health: Health = lambda reason: None
    ) -> None:
        self._loop = loop
        self._health = health
        self._last_health: str | None = ""
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

    def tell(self, reason: str | None) -> None:
        """In the thread: whether all is well, see `Health`; the same again is not told."""
        if reason != self._last_health:
            self._last_health = reason
            post(self._loop, self._health, reason)

    def fail(self, error: FeedError) -> None:
        """In the thread: nothing more comes."""
        self._error = error
        self._tell()

    def _tell(self) -> None:
        post(self._loop, self._news.set)

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
