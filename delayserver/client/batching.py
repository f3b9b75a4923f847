"""Natural batching: items that gather while requests are under way go out with the next one.

    put ──▶ gathered ──flush, at the end of this turn of the loop──▶ send(batch) ──▶ each future
               ▲                                                        │
               └──────── while all requests are under way ◀─────────────┘

No timer waits for more: the first item leaves at once, and the busier the server is, the larger the
batches become. Two requests are under way by default, so that the server works on one while this
side works on the other; items that are there at once are shared out between them.

Items for different addresses gather in lanes of their own. Each lane may have one request under
way, and more only while all lanes together have fewer than they may: with 64 callers and two
shards, one request for each lane was 1.3 times as fast as two. The items that are put and not
answered are bounded, in number and in bytes, over all lanes; `reserve` waits for room.

Cost: a deque's append and pop per item, and one task per batch. Threads: belongs to the event loop.
"""

import asyncio
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Generic, TypeVar

from delayserver.client.errors import ClosedError

SHARE_MIN = 16
"""Fewer items are not worth a request of their own while they could go with others."""


class Item:
    """Something to be sent, and the future of the caller that waits for its result."""

    __slots__ = ("data", "future", "lane")

    def __init__(self, data: bytes, future: "asyncio.Future[Any]", lane: int | None = None) -> None:
        self.data = data
        self.future = future
        self.lane = lane
        """Items of one lane may go out together."""

    def succeed(self, result: object) -> None:
        """Tell the caller, unless it has gone."""
        if not self.future.done():
            self.future.set_result(result)

    def fail(self, error: Exception) -> None:
        """Raise in the caller, unless it has gone."""
        if not self.future.done():
            self.future.set_exception(error)


I = TypeVar("I", bound=Item)  # noqa: E741


class _Lane(Generic[I]):
    """Items that go out together."""

    __slots__ = ("flush_asked", "gathered", "in_flight")

    def __init__(self) -> None:
        self.gathered: deque[I] = deque()
        self.in_flight: dict[asyncio.Task[None], list[I]] = {}
        self.flush_asked = False


class Batcher(Generic[I]):
    """Sends items in natural batches, each of one lane. `send` has to succeed or fail every item of
    its batch. When it raises, the items that are left get its exception."""

    def __init__(
        self,
        send: Callable[[list[I]], Awaitable[None]],
        *,
        in_flight_max: int,
        batch_max: int,
        batch_max_bytes: int,
        pending_max: int,
        pending_max_bytes: int,
    ) -> None:
        self._send = send
        self._in_flight_max = in_flight_max
        self._batch_max = batch_max
        self._batch_max_bytes = batch_max_bytes
        self._pending_max = pending_max
        self._pending_max_bytes = pending_max_bytes
        self._lanes: defaultdict[int | None, _Lane[I]] = defaultdict(_Lane)
        self._under_way = 0
        """Requests, of all lanes."""
        self._waiters: deque[tuple[asyncio.Future[None], int]] = deque()
        self._closed = False
        self.pending = 0
        """Items for which room was reserved, and which are not answered."""
        self.pending_bytes = 0

    # ── the way in ─────────────────────────────────────────────────────────────────────────────

    def try_reserve(self, size_bytes: int) -> bool:
        """Take room for an item of that size, if there is room and no caller waits for it; the item
        is to be put before anything is awaited. Raises ClosedError."""
        if self._closed:
            raise ClosedError("it is closed and takes nothing more")
        if self._waiters or not self._fits(size_bytes):
            return False
        self.pending += 1
        self.pending_bytes += size_bytes
        return True

    async def reserve(self, size_bytes: int) -> None:
        """Wait until there is room for an item of that size, and take it; who came first gets it
        first. The item is to be put before anything else is awaited. Raises ClosedError."""
        if self.try_reserve(size_bytes):
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append((waiter, size_bytes))
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._release(1, size_bytes)
            raise

    def _fits(self, size_bytes: int) -> bool:
        if self.pending >= self._pending_max:
            return False
        # One that is larger than the bound goes alone.
        return self.pending_bytes + size_bytes <= self._pending_max_bytes or not self.pending

    def put(self, item: I) -> None:
        """Send an item, for which room was reserved, with the next batch of its lane."""
        lane = self._lanes[item.lane]
        lane.gathered.append(item)
        if lane.flush_asked:
            return
        if not lane.in_flight or self._under_way < self._in_flight_max:
            lane.flush_asked = True
            asyncio.get_running_loop().call_soon(self._flush, lane)

    # ── the way out ────────────────────────────────────────────────────────────────────────────

    def _flush(self, lane: _Lane[I]) -> None:
        lane.flush_asked = False
        while lane.gathered and (free := self._free(lane)) > 0:
            share = max(SHARE_MIN, -(-len(lane.gathered) // free))
            batch, total_bytes = self._take(lane.gathered, share)
            if batch:
                task = asyncio.get_running_loop().create_task(self._run(batch))
                lane.in_flight[task] = batch
                self._under_way += 1
                task.add_done_callback(partial(self._ended, lane, total_bytes))

    def _free(self, lane: _Lane[I]) -> int:
        """How many requests of a lane may be begun."""
        return max(self._in_flight_max - self._under_way, 0 if lane.in_flight else 1)

    def _take(self, gathered: deque[I], share: int) -> tuple[list[I], int]:
        """The next batch, of up to `share` items, and how many bytes it has."""
        batch, total_bytes = list[I](), 0
        for _ in range(min(share, self._batch_max, len(gathered))):
            item = gathered.popleft()
            size_bytes = len(item.data)
            if item.future.cancelled():
                self._release(1, size_bytes)
                continue
            total_bytes += size_bytes
            if total_bytes > self._batch_max_bytes and batch:
                gathered.appendleft(item)
                return batch, total_bytes - size_bytes
            batch.append(item)
        return batch, total_bytes

    async def _run(self, batch: list[I]) -> None:
        try:
            await self._send(batch)
        except Exception as error:
            for item in batch:
                item.fail(error)

    def _ended(self, lane: _Lane[I], total_bytes: int, task: "asyncio.Task[None]") -> None:
        # Called for a task that was cancelled before its first step, too.
        batch = lane.in_flight.pop(task)
        self._under_way -= 1
        if task.cancelled():
            for item in batch:
                item.fail(ClosedError("closed without an answer: it may have been done, or not"))
        self._release(len(batch), total_bytes)
        # The callers that were answered have run before this, so items that they put go along.
        self._flush(lane)

    def _release(self, count: int, size_bytes: int) -> None:
        """Items are answered: their room goes to those who have waited longest."""
        self.pending -= count
        self.pending_bytes -= size_bytes
        while self._waiters and (self._waiters[0][0].done() or self._fits(self._waiters[0][1])):
            waiter, waiting_bytes = self._waiters.popleft()
            if not waiter.done():  # else its caller has gone
                self.pending += 1
                self.pending_bytes += waiting_bytes
                waiter.set_result(None)

    # ── the end ────────────────────────────────────────────────────────────────────────────────

    async def close(self, timeout_s: float | None = None) -> None:
        """Take nothing more, and wait until everything is answered, at most so long. Items that are
        not answered by then fail with ClosedError. Items whose callers have gone are given up."""
        self._closed = True
        while self._waiters:
            waiter, _ = self._waiters.popleft()
            if not waiter.done():
                waiter.set_exception(ClosedError("closed before it was sent"))
        try:
            async with asyncio.timeout(timeout_s):
                while self.pending:
                    in_flight = self._all_in_flight()
                    for task, batch in in_flight.items():
                        if all(item.future.done() for item in batch):
                            task.cancel()
                    if in_flight:
                        await asyncio.wait(in_flight, return_when=asyncio.FIRST_COMPLETED)
                    await asyncio.sleep(0)  # in which the gathered items leave
        except TimeoutError:
            in_flight = self._all_in_flight()
            for task in in_flight:
                task.cancel()
            for lane in self._lanes.values():
                while lane.gathered:
                    item = lane.gathered.popleft()
                    item.fail(ClosedError("closed before it was sent"))
                    self._release(1, len(item.data))
            await asyncio.gather(*in_flight, return_exceptions=True)

    def _all_in_flight(self) -> dict["asyncio.Task[None]", list[I]]:
        found: dict[asyncio.Task[None], list[I]] = {}
        for lane in self._lanes.values():
            found |= lane.in_flight
        return found
