"""An event loop for the simulation: what the API awaits runs on it, one callback or one thread's
piece of work at a time, when somebody outside says so.

Callbacks go into the queue of the simulated server, among all that its threads hand to the loop.
What was given to a thread (`asyncio.to_thread`) waits for `run_thread`: so any time may pass. What
waits for time is looked at by `look_at_clock`; what is connected to is what `sockets` has.

Rejected: a real event loop. It chooses the order by itself, and a seed could not repeat it.

Cost: some 10 µs per callback. Threads: none.
"""

import asyncio
import contextlib
from asyncio.events import _get_running_loop, _set_running_loop
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextvars import Context
from heapq import heappop, heappush
from itertools import count
from typing import Any, Protocol, TypeVar, cast

T = TypeVar("T")
MakeProtocol = Callable[[], asyncio.Protocol]


class Listening(Protocol):
    """A socket that others may connect to."""

    def close(self) -> None:
        """Let nobody come any more."""
        ...


class Sockets(Protocol):
    """The Unix sockets of a machine, as one of its event loops has them."""

    def listen(
        self, loop: "SimulatedLoop", make_protocol: MakeProtocol, path: str
    ) -> Listening: ...

    def connect(
        self, loop: "SimulatedLoop", make_protocol: MakeProtocol, path: str
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        """Raises OSError: nobody listens there."""
        ...


class SimulatedLoop:
    """As much of an event loop as futures, tasks, locks and links need."""

    def __init__(self, post: Callable[..., None], monotonic_s: Callable[[], float]) -> None:
        """`post`: have a function called with arguments, later and in order; `monotonic_s`: the
        seconds that passed."""
        self._post = post
        self.time = monotonic_s
        self._in_threads: deque[Callable[[], None]] = deque()
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timer_numbers = count()
        self._as_loop = cast(asyncio.AbstractEventLoop, self)
        self.sockets: Sockets | None = None

    # ── what the simulation calls ──────────────────────────────────────────────────────────────

    def start(
        self, call: Coroutine[Any, Any, T], answered: Callable[[asyncio.Task[T]], None]
    ) -> None:
        """Begin a call; `answered` gets its task when that has ended."""
        self.create_task(call).add_done_callback(answered)

    def run_thread(self) -> None:
        """Let a thread do its piece of work."""
        if self._in_threads:
            self._in_threads.popleft()()

    @property
    def has_threads(self) -> bool:
        """Whether a thread has something to do."""
        return bool(self._in_threads)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """What is called meanwhile is called on this loop."""
        before = _get_running_loop()
        _set_running_loop(self._as_loop)
        try:
            yield
        finally:
            _set_running_loop(before)

    def look_at_clock(self) -> None:
        """Have called what waited for the present."""
        while self._timers and self._timers[0][0] <= self.time():
            _, _, handle = heappop(self._timers)
            self._post(self._run, handle)

    def abandon(self) -> None:
        """The process is gone, and whoever waits gets no answer."""
        for task in list(self._tasks):
            coroutine = task.get_coro()
            assert isinstance(coroutine, Coroutine)
            coroutine.close()

    def silence(self) -> None:
        """Nothing is called any more that waits for it."""
        self._post = lambda function, *arguments: None

    def is_own(self, function: Callable[..., None]) -> bool:
        """Whether a function in the queue of the server came from here."""
        return function == self._run

    # ── what asyncio calls ─────────────────────────────────────────────────────────────────────

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Have a function called later, in order."""
        handle = asyncio.Handle(callback, args, self._as_loop, context)
        self._post(self._run, handle)
        return handle

    def _run(self, handle: asyncio.Handle) -> None:
        with self.running():
            if not handle.cancelled():
                handle._run()

    def call_later(
        self,
        delay_s: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Have a function called after so long."""
        return self.call_at(self.time() + delay_s, callback, *args, context=context)

    def call_at(
        self,
        when_s: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Have a function called when `time` shows that; of two at one time the first first."""
        handle = asyncio.TimerHandle(when_s, callback, args, self._as_loop, context)
        heappush(self._timers, (when_s, next(self._timer_numbers), handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It is not called when its time comes."""

    def create_future(self) -> "asyncio.Future[Any]":
        """A future of this loop."""
        return asyncio.Future(loop=self._as_loop)

    def create_task(self, call: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Begin what is awaited by nobody."""
        task = asyncio.Task(call, loop=self._as_loop)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

    async def create_unix_server(self, make_protocol: MakeProtocol, path: str) -> Listening:
        """Let others connect."""
        assert self.sockets is not None
        return self.sockets.listen(self, make_protocol, path)

    async def create_unix_connection(
        self, make_protocol: MakeProtocol, path: str
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        """Connect. Raises OSError."""
        assert self.sockets is not None
        return self.sockets.connect(self, make_protocol, path)

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
