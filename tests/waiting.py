"""Waiting for other processes, threads and tasks, which do not tell a test how far they are.

    wait_until    looks every 10 ms
    until         the same while an event loop goes on, every millisecond
    Looks         the turns of a loop that looks itself: `for _ in Looks(10):`, or `async for`
    turns         lets the tasks of an event loop run that are ready, and those that they wake

No test sleeps for a time in which it hopes that something happens.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Self, TypeVar

T = TypeVar("T")
DEADLINE_S = 30.0
"""For what happens at once on a quiet machine."""


class Looks:
    """The turns of a loop that looks for something: the first at once, the others `period_s` apart,
    the last one when `timeout_s` are over. The loop ends by itself when all of them were in vain,
    so its `else`, or the line behind it, says what is missing."""

    def __init__(self, timeout_s: float, period_s: float = 0.01) -> None:
        self._end_s = time.monotonic() + timeout_s
        self._period_s = period_s
        self._is_first = True

    def _pause_s(self) -> float | None:
        """The pause before the next turn; None: there is none."""
        if self._is_first:
            self._is_first = False
            return 0.0
        return self._period_s if time.monotonic() < self._end_s else None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> None:
        pause_s = self._pause_s()
        if pause_s is None:
            raise StopIteration
        if pause_s:
            time.sleep(pause_s)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> None:
        pause_s = self._pause_s()
        if pause_s is None:
            raise StopAsyncIteration
        if pause_s:
            await asyncio.sleep(pause_s)


def wait_until(
    probe: Callable[[], T], timeout_s: float = DEADLINE_S, what: str = "what is awaited"
) -> T:
    """Return the first true value of `probe`."""
    for _ in Looks(timeout_s):
        if result := probe():
            return result
    raise AssertionError(f"not in time: {what}")


async def until(
    probe: Callable[[], T], timeout_s: float = DEADLINE_S, what: str = "what is awaited"
) -> T:
    """Return the first true value of `probe`."""
    async for _ in Looks(timeout_s, 0.001):
        if result := probe():
            return result
    raise AssertionError(f"not in time: {what}")


async def turns(count: int = 1) -> None:
    """Go on when the event loop has called, so many times, all that was ready."""
    for _ in range(count):
        await asyncio.sleep(0)
