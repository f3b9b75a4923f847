"""The own shard, as other shards ask it: the calls of a server alone, below access and router.

    PeerCall ──▶ internal? ─▶ its handler
             ──▶ else      ─▶ HotPath ──▶ PeerAnswer

Cost: 100 µs a call. Threads: belongs to the event loop.
"""

from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any
from urllib.parse import quote

from delayserver.api.hot.answers import Responder, problem_answer
from delayserver.api.hot.asgi import Asgi, Scope
from delayserver.api.hot.consume import WHEN_GONE
from delayserver.api.hot.publish import Hot
from delayserver.security.tokens import Caller
from delayserver.shards.link import answer_of
from delayserver.shards.peers import PeerAnswer, PeerCall

Handler = Callable[[PeerCall], Awaitable[PeerAnswer | None]]
"""Answers a call; None: it is not for it."""
_ALWAYS = (b"date", b"server")
"""Header fields that each answer gets where it goes out."""


class Local:
    """The shard itself. `handlers` know calls that no client makes."""

    def __init__(self, hot: Hot, app: Asgi, handlers: Sequence[Handler]) -> None:
        self._hot = hot
        self._app = app
        self._handlers = handlers

    def publish(self, responder: Responder, data: bytes, caller: Caller | None) -> None:
        """As `Application` says."""
        self._hot.gather_own(responder, data, caller)

    def cancel(
        self, responder: Responder, subject: str | None, text: str, caller: Caller | None
    ) -> None:
        """As `Application` says."""
        self._hot.cancels.gather_own(responder, subject, text, caller)

    async def call(self, call: PeerCall) -> PeerAnswer:
        """As `Application` says."""
        try:
            for handler in self._handlers:
                if (answer := await handler(call)) is not None:
                    return answer
            return await ask_app(self._app, call)
        except Exception as error:
            return answer_of(problem_answer(error))


async def ask_app(app: Asgi, call: PeerCall) -> PeerAnswer:
    """The answer of an ASGI application."""
    status, fields, parts = 0, list[tuple[bytes, bytes]](), list[bytes]()

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            fields.extend(tuple(field) for field in message.get("headers", ()))
        else:
            parts.append(message.get("body", b""))

    await app(scope_of(call), body_of(call), send)
    assert status, call.path
    kept = tuple(field for field in fields if field[0] not in _ALWAYS)
    return PeerAnswer(status, kept, b"".join(parts))


def scope_of(call: PeerCall) -> Scope:
    """A call as ASGI has it."""
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": call.method,
        "scheme": "http",
        "path": call.path,
        "raw_path": quote(call.path).encode(),
        "root_path": "",
        "query_string": call.query,
        "headers": [*call.headers, (b"content-length", b"%d" % len(call.body))],
        "client": None,
        "server": None,
        "state": {},
        "caller": call.caller,
        WHEN_GONE: _nobody_goes,
    }


def body_of(call: PeerCall) -> Callable[[], Awaitable[MutableMapping[str, Any]]]:
    """The body of a call as ASGI receives it."""
    is_given = False

    async def receive() -> MutableMapping[str, Any]:
        nonlocal is_given
        if is_given:
            return {"type": "http.disconnect"}
        is_given = True
        return {"type": "http.request", "body": call.body, "more_body": False}

    return receive


def _nobody_goes(leave: Callable[[], None] | None) -> None:
    """Another shard asks, and waits for the answer."""
