"""Callbacks as futures; a future that is not waited for any more is left alone.

Cost: 1 µs. Threads: belongs to the event loop.
"""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from delayserver.decisions.group import Group

T = TypeVar("T")


def answering(future: "asyncio.Future[T]") -> Callable[[Any, Exception | None], None]:
    """A callback that ends the future: with a result, or with the error that prevented one."""

    def done(result: Any, error: Exception | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    return done


def ending(future: "asyncio.Future[None]") -> Callable[..., None]:
    """The same where there is no result: called with the error, if any."""
    answer = answering(future)
    return lambda error=None: answer(None, error)


def durable(group: Group | None) -> "asyncio.Future[None]":
    """Done when the group is durable; raises the error that kept it from being so."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    if group is None:
        future.set_result(None)
    else:
        group.when_durable(ending(future))
    return future
