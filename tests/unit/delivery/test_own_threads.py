"""Calls that may hang take no thread that others need."""

import asyncio
import threading

import pytest

from delayserver.delivery.own_threads import in_own_thread, post


def test_what_it_returns_and_raises() -> None:
    async def main() -> None:
        assert await in_own_thread("t", lambda a, b: a + b, 1, 2) == 3
        assert await in_own_thread("t", lambda: threading.current_thread().name) == "t"
        with pytest.raises(ZeroDivisionError):
            await in_own_thread("t", lambda: 1 / 0)

    asyncio.run(main())


def test_many_that_hang_hold_up_nobody_and_may_be_given_up() -> None:
    gate = threading.Event()

    async def main() -> None:
        tasks = [asyncio.create_task(in_own_thread("t", gate.wait, 30)) for _ in range(40)]
        # The pool of the loop has fewer threads than that.
        assert await asyncio.to_thread(lambda: 7) == 7
        for task in tasks[1:]:
            task.cancel()
        await asyncio.gather(*tasks[1:], return_exceptions=True)
        gate.set()
        assert await tasks[0]

    asyncio.run(main())


def test_a_loop_that_is_closed_is_told_nothing() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    post(loop, print, "never")
