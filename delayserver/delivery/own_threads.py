"""Threads of their own for calls that may hang: a name server, or a client that waits for a broker.

The pool of the event loop is shared by lists, backups and compressed answers. A call that a far
side can hold up for seconds never takes one of its threads. The number of threads here is bounded
by those who call: an opening is one call, and openings are bounded (`outlets.OUTLETS_MAX`).

Cost: 50 µs for a thread. Threads: `in_own_thread` belongs to the event loop.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


async def in_own_thread(name: str, function: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a thread that ends with it. Raises what the function raises.

    If the caller is cancelled the thread goes on, and its result is lost."""
    loop = asyncio.get_running_loop()
    told: asyncio.Future[T] = loop.create_future()

    def call() -> None:
        try:
            result = function(*arguments)
        except Exception as error:
            post_error(told, error)
        else:
            post_result(told, result)

    threading.Thread(target=call, name=name, daemon=True).start()
    return await told


def post(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> None:
    """Have the event loop call it; nothing where the loop is closed, as it is when a server ends
    whose brokers are away. Called by any thread."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *arguments)


def post_result(future: "asyncio.Future[T]", result: T) -> None:
    """Have the event loop of a future give it that result, unless it has one. Called by any
    thread."""
    post(future.get_loop(), _set, future, result)


def post_error(future: "asyncio.Future[Any]", error: Exception) -> None:
    """The same with an error. Called by any thread."""
    post(future.get_loop(), _fail, future, error)


def _set(future: "asyncio.Future[T]", result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: "asyncio.Future[Any]", error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
