"""An event loop for the simulation: what the API awaits runs on it, one callback or one thread's
piece of work at a time, when somebody outside says so.

Callbacks go into the queue of the simulated server, among all that its threads hand to the loop.
What was given to a thread (`asyncio.to_thread`) waits for `run_thread`: so any time may pass.

Rejected: a real event loop. It chooses the order by itself, and a seed could not repeat it.

Cost: some 10 µs per callback. Threads: none.
"""

import asyncio
from asyncio.events import _get_running_loop, _set_running_loop
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar, cast

T = TypeVar("T")


class SimulatedLoop:
    """As much of an event loop as futures, tasks and locks need."""

    def __init__(self, post: Callable[..., None]) -> None:
        """`post`: have a function called with arguments, later and in order."""
        self._post = post
        self._in_threads: deque[Callable[[], None]] = deque()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._as_loop = cast(asyncio.AbstractEventLoop, self)

    # ── what the simulation calls ──────────────────────────────────────────────────────────────

    def start(
        self, call: Coroutine[Any, Any, T], answered: Callable[[asyncio.Task[T]], None]
    ) -> None:
        """Begin a call; `answered` gets its task when that has ended."""
        task = asyncio.Task(call, loop=self._as_loop)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(answered)

    def run_thread(self) -> None:
        """Let a thread do its piece of work."""
        if self._in_threads:
            self._in_threads.popleft()()

    @property
    def has_threads(self) -> bool:
        """Whether a thread has something to do."""
        return bool(self._in_threads)

    def abandon(self) -> None:
        """The process is gone, and whoever waits gets no answer."""
        for task in self._tasks:
            coroutine = task.get_coro()
            assert isinstance(coroutine, Coroutine)
            coroutine.close()

    # ── what asyncio calls ─────────────────────────────────────────────────────────────────────

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Have a function called later, in order."""
        handle = asyncio.Handle(callback, args, self._as_loop, context)
        self._post(self._run, handle)
        return handle

    def _run(self, handle: asyncio.Handle) -> None:
        before = _get_running_loop()
        _set_running_loop(self._as_loop)
        try:
            if not handle.cancelled():
                handle._run()
        finally:
            _set_running_loop(before)

    def create_future(self) -> "asyncio.Future[Any]":
        """A future of this loop."""
        return asyncio.Future(loop=self._as_loop)

    def run_in_executor(
        self, executor: None, func: Callable[..., T], *args: Any
    ) -> "asyncio.Future[T]":
        """Have a function called by a thread; `run_thread` does it."""
        future: asyncio.Future[T] = asyncio.Future(loop=self._as_loop)

        def work() -> None:
            try:
                result = func(*args)
            except Exception as error:  # told to whoever asked
                future.set_exception(error)
            else:
                future.set_result(result)

        self._in_threads.append(work)
        return future

    def get_debug(self) -> bool:
        """What asyncio is to watch is in the ledger."""
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """A callback has raised; all else is that a life ended before what was under way in it."""
        if "handle" in context:
            raise context["exception"]
