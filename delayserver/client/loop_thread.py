"""An event loop in a thread of its own, for callers without asyncio.

The thread begins with the first call. In the child of a fork, where the parent's thread is not,
another one begins with the first call there. When the owner is dropped without `stop`, the
connections are closed and the thread ends.

Cost: a task and two hand-overs between threads per call. Threads: `call` and `stop` are safe.
"""

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from delayserver.client.errors import ClosedError

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for threads that wait for them. `farewell` closes the connections when the
    owner is dropped without `stop`. It must not hold the owner."""

    def __init__(self, farewell: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._farewell = farewell
        self._stopped = False
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._dropped: weakref.finalize[..., LoopThread] | None = None
        _loop_threads.add(self)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine there, and wait for it. Raises ClosedError after `stop`."""
        with self._lock:
            if self._stopped:
                work.close()
                raise ClosedError("it is closed and takes nothing more")
            future = asyncio.run_coroutine_threadsafe(work, self._running())
        try:
            return future.result()
        except BaseException:
            future.cancel()  # ctrl-C here; a failure there, which is over
            raise

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            loop = self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=_run, args=(loop,), name="delayserver-client", daemon=True
            )
            self._thread.start()
            self._dropped = weakref.finalize(self, _end, loop, self._farewell)
            self._dropped.atexit = False  # the thread ends with the process
        return self._loop

    def stop(self) -> None:
        """Let every call end, then the thread."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            loop = self._loop
        if loop is None or self._dropped is None:
            return
        asyncio.run_coroutine_threadsafe(_others(), loop).result()
        self._dropped.detach()
        loop.call_soon_threadsafe(loop.stop)
        self._thread.join()

    def after_fork(self) -> None:
        """In the child: neither the thread is here, nor who held the lock."""
        self._lock = threading.Lock()
        if self._loop is not None and self._dropped is not None:
            self._dropped.detach()
            _inherited.append(self._loop)
            self._loop = None


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


async def _others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*others, return_exceptions=True)


def _end(
    loop: asyncio.AbstractEventLoop, farewell: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    async def ending() -> None:
        try:
            await farewell()
        finally:
            loop.stop()

    if not loop.is_closed():
        asyncio.run_coroutine_threadsafe(ending(), loop)


# ── fork ───────────────────────────────────────────────────────────────────────────────────────

_loop_threads: weakref.WeakSet[LoopThread] = weakref.WeakSet()
_inherited: list[asyncio.AbstractEventLoop] = []
"""The parent's loops, in the child. They are kept, since closing one here would take it out of the
parent's poll set, which both share."""


def _after_fork() -> None:
    for thread in tuple(_loop_threads):
        thread.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
