"""Waits for the threads of a shard, as futures.

    decided ──▶ all_durable ──▶ checkpoint: the catalog shows it
    delivered ─▶ settled
    read ──────▶ the result of the reader thread

Cost: a future each, and that of the work itself. Threads: belongs to the event loop.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from delayserver.delivery.reader import Reader
from delayserver.schedule.replay import Replay
from delayserver.server.filer import CheckpointRequest, FilerCall
from delayserver.server.futures import answering, durable, ending
from delayserver.server.shard import Shard
from delayserver.server.threads import CallRequest

T = TypeVar("T")


class Waits:
    """How far a shard has come."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    async def all_durable(self) -> None:
        """Done when everything that was decided so far is durable; or raises."""
        await durable(self._shard.engine.groups.not_durable())

    async def settled(self) -> None:
        """Done when every delivery that ended so far is recorded."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._shard.when_settled(ending(future))
        await future

    async def checkpoint(self) -> None:
        """File everything that was accepted so far, so that the catalog shows it."""
        await self.all_durable()
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._shard.replayer.put(CheckpointRequest(ending(future)))
        await future

    async def on_filer(self, function: Callable[[Replay], None]) -> None:
        """Run something in the replay thread, behind everything that was accepted so far. Raises
        its DelayServerError."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._shard.replayer.put(FilerCall(function, ending(future)))
        await future

    def read(self, function: Callable[[Reader], T]) -> "asyncio.Future[T]":
        """Run something in the reader thread."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._shard.reading.put(CallRequest(function, answering(future)))
        return future
