"""The exit of answers through ASGI: an answer leaves only if the process still owns its shard.

    Access ──▶ Leaving ──▶ Finish ──▶ everything that answers

The head of an answer asks (`delayserver.api.exit`), and so does each later piece of a long one. A
piece that may not leave ends the connection, since a head cannot be taken back.

Cost: 3 µs for a call. Threads: belongs to the event loop.
"""

from collections.abc import MutableMapping
from typing import Any

from delayserver.api.exit import Exit, speaks_of_shard
from delayserver.api.hot.asgi import Asgi, Receive, Scope, Send, send_answer


class CutOffError(Exception):
    """An answer has begun to leave, and its rest may not: the connection ends in the middle."""


class Leaving:
    """ASGI middleware behind the access, which says nothing of the shard."""

    def __init__(self, exit_: Exit, app: Asgi) -> None:
        self._exit = exit_
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and speaks_of_shard(scope["path"]):
            send = _Answer(self._exit, scope["path"], send)
        await self._app(scope, receive, send)


class _Answer:
    """Lets one answer leave."""

    def __init__(self, exit_: Exit, path: str, send: Send) -> None:
        self._exit = exit_
        self._path = path
        self._send = send
        self._has_asked = self._is_refused = False

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        if self._is_refused:
            return
        if message["type"] == "http.response.start":
            if await self._exit.holds_back(self._path, message["status"]):
                self._is_refused = True
                await send_answer(self._send, self._exit.refusal())
                return
            # The first piece of the body leaves in the same turn.
            self._has_asked = True
        elif not self._has_asked and not self._exit.is_open():
            raise CutOffError(f"{self._path}: the shard may have another owner by now")
        else:
            self._has_asked = False
        await self._send(message)
