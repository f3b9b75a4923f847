"""The entrance of a shard, after the access check: finds the shard that a call belongs to.

    call ──▶ of a consumer, about this process, or refused? ──▶ passed on as it is
         ──▶ a handler knows whose it is?          ──▶ its answer
         ──▶ else                                  ──▶ passed on: it belongs here

The body is read before anything is decided, within the limits of the call. Calls that may stay on
the hot path (`Hot.gather`) do not come here. Cost: 20 µs a call.
Threads: belongs to the event loop.
"""

from collections.abc import Sequence

from delayserver.api.hot.answers import problem_answer
from delayserver.api.hot.asgi import (
    Asgi,
    GoneError,
    Receive,
    Scope,
    Send,
    is_utf8,
    limited,
    read_body,
    send_answer,
)
from delayserver.api.hot.belonging import shard_of_publish
from delayserver.api.hot.paths import MESSAGES_PATH, REST_MAX_BYTES, is_health, is_hot, parse_call
from delayserver.api.hot.publish import Hot
from delayserver.errors import DelayServerError
from delayserver.shards.link import Links, hot_answer
from delayserver.shards.local import Handler, body_of
from delayserver.shards.peers import PeerAnswer, PeerCall

_KEPT = frozenset(
    {
        b"content-type",
        b"delay-forward",
        b"host",
        b"if-match",
        b"if-none-match",
        b"traceparent",
        b"tracestate",
    }
)
"""Headers that an answer may depend on, behind the access."""


class Front:
    """The ASGI application of a shard among others."""

    def __init__(self, hot: Hot, path: Asgi, handlers: Sequence[Handler]) -> None:
        """`path`: it serves the calls that belong here."""
        self._hot = hot
        self._path = path
        self._handlers = handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] != "http"
            or parse_call(scope["method"], scope["path"]) is not None
            or is_health(scope["method"], scope["path"])
            or not is_utf8(scope)
        ):
            await self._path(scope, receive, send)
            return
        headers = scope["headers"]
        limit, about = self._limit(scope["method"], scope["path"])
        try:
            body = await read_body(limited(headers, receive, limit, about))
        except GoneError:
            return
        except DelayServerError as error:
            await send_answer(send, problem_answer(error))
            return
        call = PeerCall(
            scope["method"],
            scope["path"],
            scope["query_string"],
            tuple((name, value) for name, value in headers if name in _KEPT),
            body,
            scope.get("caller"),
        )
        for handler in self._handlers:
            if (answer := await handler(call)) is not None:
                await send_answer(send, hot_answer(answer))
                return
        await self._path(scope, body_of(call), send)

    def _limit(self, method: str, path: str) -> tuple[int, str]:
        hot = self._hot
        if is_hot(method, path):
            return hot.max_bytes(path), hot.about_limit(path)
        return max(hot.one_max_bytes, REST_MAX_BYTES), ""


class OneByOne:
    """Publishes of one message that do not stay on the hot path."""

    def __init__(self, links: Links) -> None:
        self._links = links

    async def answer(self, call: PeerCall) -> PeerAnswer | None:
        """POST /v1/messages"""
        if call.method != "POST" or call.path != MESSAGES_PATH:
            return None
        links = self._links
        shard = shard_of_publish(call.body, links)
        if shard == links.own:
            return None
        return links.misdirected(shard, call) or await links.ask(shard, call)
