"""How a connection is opened: to one of several addresses, and within a deadline.

    addresses ──▶ first ── 250 ms, or it has failed ──▶ second ── … ──▶ the first that is connected

A host with several addresses may have one that does not answer. So each attempt has a head start of
HEAD_START_S before the next one begins beside it, and the first that succeeds ends the others
(RFC 8305, section 5, with the order of the caller).

A deadline is over when its time has come and the sockets were looked at once more. An event loop
that was held up runs its timers before it reads its sockets. Without the second look an answer that
came in time would count as none.

Cost: one task for each attempt. Threads: belongs to the event loop.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Final, TypeVar

HEAD_START_S: Final = 0.25
LOOK_AGAIN_S: Final = 0.001
"""Longer than the rest of a turn of the event loop, in which sockets are read."""

T = TypeVar("T")


def call_when_over(
    loop: asyncio.AbstractEventLoop,
    deadline_s: float,
    on_over: Callable[..., object],
    *args: object,
) -> asyncio.TimerHandle:
    """Call a function once a deadline of the loop's time is over, unless the handle is cancelled
    before. A cancel between the two looks comes too late: the function must not mind."""
    return loop.call_at(deadline_s, loop.call_later, LOOK_AGAIN_S, on_over, *args)


@asynccontextmanager
async def until(deadline_s: float) -> AsyncIterator[None]:
    """Cancels its block when `deadline_s` of the loop's time is over. Raises TimeoutError."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as scope:
        is_inside = True

        def on_over() -> None:
            if is_inside:
                scope.reschedule(loop.time())

        timer = call_when_over(loop, deadline_s, on_over)
        try:
            yield
        finally:
            timer.cancel()
            is_inside = False


async def connect_to_any(
    addresses: Sequence[str],
    connect: Callable[[str], Awaitable[T]],
    close: Callable[[T], None],
    *,
    head_start_s: float = HEAD_START_S,
) -> tuple[str, T]:
    """The first address, in their order, to which `connect` succeeds, and the result of `connect`.

    `close` is called with a connection that came too late. Raises the OSError of the first attempt
    if all of them fail."""
    assert addresses
    loop = asyncio.get_running_loop()
    left = deque(addresses)
    pending: dict[asyncio.Future[T], str] = {}
    failure: OSError | None = None
    try:
        while left or pending:
            if left:
                address = left.popleft()
                pending[asyncio.ensure_future(connect(address), loop=loop)] = address
            done, _ = await asyncio.wait(
                pending,
                timeout=head_start_s if left else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            for attempt in done:
                address = pending.pop(attempt)
                try:
                    connection = attempt.result()
                except OSError as error:
                    failure = failure or error
                else:
                    return address, connection
        assert failure is not None
        raise failure
    finally:
        for attempt in pending:
            # A finished attempt is closed as well: it may have ended in the turn in which the
            # caller was cancelled, or in the same turn as the attempt that is used.
            attempt.cancel()
            attempt.add_done_callback(partial(_close_late, close))


def _close_late(close: Callable[[T], None], attempt: "asyncio.Future[T]") -> None:
    if not attempt.cancelled() and attempt.exception() is None:
        close(attempt.result())
