"""Calls that are made again while the server is away, from one event loop after the other, on both
sides of a fork.

    _call ──▶ is it this loop? ──▶ answered, with retries ──▶ transport ──▶ a success, or raise

Cost: none beyond that of the request. Threads: belongs to one event loop at a time.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Coroutine
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar
from urllib.parse import urlencode
from weakref import WeakSet

import msgspec

from delayserver.client.cutting import decoded_list
from delayserver.client.errors import ClientError, ClosedError, OtherLoopError, UnansweredError
from delayserver.client.options import ClientConfig
from delayserver.client.replacing import replaced
from delayserver.client.retries import Attempt, Time, answered, within
from delayserver.client.transport import HttpAnswer, Request, Transport
from delayserver.client.writing import encode

T = TypeVar("T", bound=msgspec.Struct)
EXIT_S = 5.0
"""Calls under way get this long when a block is left by an exception."""


class RetryingClient:
    """Asks one server, again and again while it is away. AsyncClient explains the options."""

    def __init__(self, options: ClientConfig, transport: Transport) -> None:
        self._transport = transport
        self._retry = options.retry
        self._time = options.time or Time()
        self._timeout_s = options.timeout_s
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        _clients.add(self)

    async def close(self, timeout_s: float | None = None) -> None:
        """Take nothing more, and disconnect."""
        self._closed = True
        await self._transport.close()

    # ── loops and processes ────────────────────────────────────────────────────────────────────

    def _settle(self) -> None:
        """Be in the event loop that runs. Raises as `_settle_in`."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._settle_in(loop)

    def _settle_in(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin anew in an event loop; calls under way in the one before end there. Raises
        ClosedError, OtherLoopError."""
        if self._closed:
            raise ClosedError("it is closed and takes nothing more")
        if self._loop is not None and self._loop.is_running():
            raise OtherLoopError(
                f"this {type(self).__name__} is in use in another event loop, which still runs: "
                "make one for each loop, or one for all threads, of the class without Async"
            )
        self._loop = loop

    def after_fork(self) -> None:
        """In the child: nothing of the parent is under way here."""
        self._loop = None

    # ── calls ──────────────────────────────────────────────────────────────────────────────────

    def _way_to(self, shard: int | None) -> Request:
        """The way to ask a shard; None: any shard will do."""
        return self._transport.request

    async def _call(
        self,
        method: str,
        path: str,
        document: object = None,
        *,
        shard: int | None = None,
        if_match: str | None = None,
        repeatable: bool = True,
        timeout_s: float | None = None,
    ) -> HttpAnswer:
        """One call; its answer, which is a success. Raises ClientError."""
        body = None if document is None else encode(document)
        # Asked again after a lost answer, it would find the version that it has made itself.
        repeatable = repeatable and if_match is None
        headers = {} if if_match is None else {"if-match": f'"{if_match}"'}
        request = partial(self._way_to(shard), method, path, body, headers=headers)
        return await self._made(self._answered(request, repeatable=repeatable), timeout_s)

    async def _pages(
        self, path: str, member: str, kind: type[T], page: int, **query: str | int | None
    ) -> AsyncIterator[T]:
        """The items that a path lists in `member`, with a request for each `page` of them. A query
        that is None is not sent. Raises as `_call`."""
        given = {name: value for name, value in query.items() if value is not None}
        wanted, cursor = {"limit": page, **given}, None
        while True:
            with_cursor = wanted if cursor is None else {**wanted, "cursor": cursor}
            answer = await self._call("GET", f"{path}?{urlencode(with_cursor)}")
            found, cursor = decoded_list(answer.body, member, kind)
            for one in found:
                yield one
            if cursor is None:
                return

    async def _replace(
        self, path: str, document: object, timeout_s: float | None, *, shard: int | None
    ) -> HttpAnswer:
        """PUT a message under its key. Raises as `_call`."""
        policy = self._retry, self._time, self._timeout_s
        return await self._made(
            replaced(self._way_to(shard), path, encode(document), *policy), timeout_s
        )

    async def _delete(
        self, path: str, timeout_s: float | None, *, shard: int | None = None
    ) -> None:
        """Delete something, which is gone already where an answer was lost. Raises as `_call`."""
        is_lost = False

        async def attempt(*, timeout_s: float) -> HttpAnswer:
            nonlocal is_lost
            try:
                answer = await self._way_to(shard)("DELETE", path, timeout_s=timeout_s)
            except UnansweredError:
                is_lost = True
                raise
            if is_lost and answer.status == HTTPStatus.NOT_FOUND:
                return HttpAnswer(HTTPStatus.NO_CONTENT, b"")
            is_lost = is_lost or answer.is_unknown
            return answer

        await self._made(self._answered(attempt), timeout_s)

    async def _made(
        self, asked: Coroutine[Any, Any, HttpAnswer], timeout_s: float | None
    ) -> HttpAnswer:
        try:
            self._settle()
        except ClientError:
            asked.close()
            raise
        answer = await (asked if timeout_s is None else within(timeout_s, asked))
        if not answer.is_success:
            raise answer.error()
        return answer

    async def _ask(
        self,
        shard: int | None,
        method: str,
        path: str,
        body: bytes | None,
        *,
        repeatable: bool = True,
    ) -> HttpAnswer:
        request = partial(self._way_to(shard), method, path, body)
        return await self._answered(request, repeatable=repeatable)

    async def _answered(self, request: Attempt, *, repeatable: bool = True) -> HttpAnswer:
        return await answered(
            request, self._retry, self._time, repeatable=repeatable, timeout_s=self._timeout_s
        )


# ── fork ───────────────────────────────────────────────────────────────────────────────────────

_clients: WeakSet[RetryingClient] = WeakSet()


def _after_fork() -> None:
    for client in tuple(_clients):
        client.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
