"""A server of this process, whose answers a test decides, and a clock that a test sets."""

import asyncio
import functools
import heapq
import itertools
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Self

import msgspec

from delayserver.client.calling import EXIT_S
from delayserver.client.errors import UnansweredError, UnreachableError
from delayserver.client.messages import AsyncClientMessages
from delayserver.client.options import ClientConfig
from delayserver.client.retries import Time
from delayserver.client.transport import NO_HEADERS, TIMEOUT_S, HttpAnswer
from tests.waiting import turns

TEST_MAX_S = 10
DUE_MS = 1_795_192_200_000
LOST = UnansweredError("the connection broke")
UNREACHABLE = UnreachableError("nobody listens")


def asynchronous(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """A test that is a coroutine."""

    @functools.wraps(test)
    def run(*arguments: Any, **fixtures: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*arguments, **fixtures), TEST_MAX_S))

    return run


class Producer(AsyncClientMessages):
    """The messages of a client, which a test closes by themselves."""

    def __init__(self, **options: Any) -> None:
        super().__init__(ClientConfig(**options))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self.close(None if kind is None else EXIT_S)


def message_id(seq: int, due_ms: int = DUE_MS, shard: int = 0) -> str:
    """An id as the server makes them; the check digits are not ours to know."""
    return f"{shard:04x}{due_ms:012x}{seq:012x}{0:08x}"


def answer(status: int, document: Any = None, **headers: str) -> HttpAnswer:
    """An answer with a document."""
    body = b"" if document is None else msgspec.json.encode(document)
    return HttpAnswer(
        status, body, {name.replace("_", "-"): text for name, text in headers.items()}
    )


def problem(status: int, detail: str = "no", **fields: Any) -> HttpAnswer:
    """A refusal; the header `Retry-After` with `retry_after`."""
    headers = {name: fields.pop(name) for name in ("retry_after",) if name in fields}
    document = {"type": "urn:x", "title": "Refused", "status": status, "detail": detail, **fields}
    return answer(status, document, **headers)


def invalid(*pointers: str, detail: str = "wrong") -> HttpAnswer:
    """422 that names fields."""
    return problem(422, errors=[{"pointer": one, "detail": detail} for one in pointers])


def stored(*seqs: int, duplicates: int = 0) -> HttpAnswer:
    """The answer to a batch."""
    ids = [message_id(seq) for seq in seqs]
    return answer(200, {"count": len(ids), "duplicates": duplicates, "ids": ids})


Reply = HttpAnswer | Exception | Callable[[Any], HttpAnswer] | None


class FakeTransport:
    """Gives the replies one after the other, then what `default` makes of the request.

    A reply is an answer, an error, a function of the request's document, or None for no answer at
    all. While `gate` is closed, everybody waits for it."""

    def __init__(self, *replies: Reply, default: Callable[[str, str, Any], Reply] | None = None):
        self.replies = list(replies)
        self.default = default
        self.requests: list[tuple[str, str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.timeouts_s: list[float] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.closed = False
        self.under_way = 0

    async def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        headers: Mapping[str, str] = NO_HEADERS,
        timeout_s: float = TIMEOUT_S,
    ) -> HttpAnswer:
        document = None if body is None else msgspec.json.decode(body)
        self.requests.append((method, path, document))
        self.headers.append(dict(headers))
        self.timeouts_s.append(timeout_s)
        self.under_way += 1
        try:
            reply: Reply
            if self.replies:
                reply = self.replies.pop(0)
            else:
                assert self.default is not None, (method, path, document)
                reply = self.default(method, path, document)
            await self.gate.wait()
            if reply is None:
                await asyncio.Event().wait()
            if isinstance(reply, Exception):
                raise reply
            found = reply(document) if callable(reply) else reply
            assert found is not None
            return found
        finally:
            self.under_way -= 1

    async def close(self) -> None:
        self.closed = True

    @property
    def documents(self) -> list[Any]:
        """What was asked, without method and path."""
        return [document for _, _, document in self.requests]


def publishing() -> Callable[[str, str, Any], HttpAnswer]:
    """Takes every batch, and gives ids in order."""
    seqs = itertools.count(1)
    return lambda method, path, document: stored(*(next(seqs) for _ in document))


class Clock:
    """A clock that a test moves on. `auto`: it moves by itself whenever somebody sleeps."""

    def __init__(self, *, auto: bool = False, draw: float = 0.0) -> None:
        self.now = 1000.0
        self.auto = auto
        self.slept: list[float] = []
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self.time = Time(lambda: self.now, self._sleep, lambda: draw)

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        if self.auto:
            self.now += seconds
            await turns()
            return
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self.now + seconds, next(self._numbers), future))
        await future

    async def advance(self, seconds: float) -> None:
        """Move on, waking everybody at their moment."""
        until = self.now + seconds
        while self._sleepers and self._sleepers[0][0] <= until:
            self.now, _, future = heapq.heappop(self._sleepers)
            if not future.done():
                future.set_result(None)
            await turns(20)
        self.now = until
        await turns(20)


async def settled(*work: Awaitable[Any]) -> list[Any]:
    """Results, errors among them."""
    return await asyncio.gather(*work, return_exceptions=True)
