"""Waiting for other processes, threads and tasks, which do not tell a test how far they are.

    wait_until    looks every 10 ms
    until         the same while an event loop goes on, every millisecond
    turns         lets the tasks of an event loop run that are ready, and those that they wake

No test sleeps for a time in which it hopes that something happens.
"""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
DEADLINE_S = 30.0
"""For what happens at once on a quiet machine."""


def wait_until(
    probe: Callable[[], T], timeout_s: float = DEADLINE_S, what: str = "what is awaited"
) -> T:
    """What `probe` returns as soon as that is true."""
    deadline_s = time.monotonic() + timeout_s
    while not (result := probe()):
        assert time.monotonic() < deadline_s, f"not in time: {what}"
        time.sleep(0.01)
    return result


async def until(
    probe: Callable[[], T], timeout_s: float = DEADLINE_S, what: str = "what is awaited"
) -> T:
    """What `probe` returns as soon as that is true."""
    deadline_s = time.monotonic() + timeout_s
    while not (result := probe()):
        assert time.monotonic() < deadline_s, f"not in time: {what}"
        await asyncio.sleep(0.001)
    return result


async def turns(count: int = 1) -> None:
    """Go on when the event loop has called, so many times, all that was ready."""
    for _ in range(count):
        await asyncio.sleep(0)
