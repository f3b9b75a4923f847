"""Clients that misbehave, each in its own way. None of them may cost anybody else anything.

    slow       a request byte by byte; answers that are never read; a TLS handshake that stops
    greedy     bodies beyond the limits, a crowd of connections, a flood of requests in one piece,
               JSON that nests, MessagePack that announces more than there is
    broken     random bytes, with TLS and without; half a head; a reset, also behind a whole publish
    uninvited  no token, a wrong one, one for another subject

What comes back is counted by status. A 2xx to somebody uninvited is a failure; so is a 500 to
anybody, where no read fails on purpose.

Cost: a connection each, the crowd a hundred. Threads: belongs to the event loop.
"""

import asyncio
import contextlib
import json
import random
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from tests.harness.traffic import pause

PUBLISH, BATCH = "/v1/messages", "/v1/messages/batch"
JSON, MSGPACK = "application/json", "application/msgpack"
PATIENCE_S = 6.0
"""Longer than the server's limits on what is slow, in a soak."""
CLIENT_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
"""Its beginning."""
CROWD = 100
DEEP = 100_000
HUGE_BYTES = 3 << 20
FLOOD = 300


@dataclass
class Target:
    """Where to go, with which tokens, and what came of it."""

    port: int
    tls: ssl.SSLContext
    token: str
    narrow_token: str
    chance: random.Random
    counts: Counter[str]
    statuses: Counter[int]
    fail: Callable[[str], None]
    publish: Callable[[], bytes]
    """A message whose fate nobody knows."""

    @contextlib.asynccontextmanager
    async def connect(self, *, plain: bool = False) -> AsyncIterator["Wire"]:
        """A connection, which is reset at the end."""
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.port, ssl=None if plain else self.tls
        )
        try:
            yield Wire(self, reader, writer)
        finally:
            writer.transport.abort()

    def request(
        self,
        path: str,
        body: bytes,
        *,
        kind: str = JSON,
        token: str = "",
        length: int | None = None,
    ) -> bytes:
        """A whole request, or one that announces another length."""
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {kind}\r\n"
        head += f"authorization: Bearer {token or self.token}\r\n"
        head += f"content-length: {len(body) if length is None else length}\r\n\r\n"
        return head.encode() + body


@dataclass
class Wire:
    """One connection."""

    target: Target
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        """Send, and wait while the server does not take more."""
        self.writer.write(data)
        await self.writer.drain()

    async def statuses(self, count: int = 1) -> list[int]:
        """Of so many answers, or until the server ends the connection."""
        found: list[int] = []
        while len(found) < count:
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            found.append(int(head.split()[1]))
            if "content-length:" in head:
                length = int(head.partition("content-length:")[2].split()[0])
                await self.reader.readexactly(length)
        self.target.statuses.update(found)
        return found


async def trickle(target: Target) -> None:
    async with target.connect() as wire:
        for byte in target.request(PUBLISH, target.publish()):
            await wire.send(bytes([byte]))
            await pause(target.chance, 0, 0.05)
        await wire.statuses()


async def deaf(target: Target) -> None:
    data = b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n"
    async with target.connect() as wire:
        wire.writer.transport.pause_reading()  # type: ignore[attr-defined]
        while True:
            await wire.send(data)
            await asyncio.sleep(0.01)


async def half_handshake(target: Target) -> None:
    async with target.connect(plain=True) as wire:
        await wire.send(CLIENT_HELLO[: target.chance.randint(1, len(CLIENT_HELLO))])
        if target.chance.random() < 0.5:
            await wire.reader.read()


async def huge(target: Target) -> None:
    announced = target.chance.choice((HUGE_BYTES, 1 << 40))
    async with target.connect() as wire:
        request = target.request(target.chance.choice((PUBLISH, BATCH)), b"", length=announced)
        await wire.send(request + b'{"subject": "load.pull", "body": "')
        for _ in range(HUGE_BYTES >> 16):
            await wire.send(b"x" * (1 << 16))
        await wire.statuses()


async def crowd(target: Target) -> None:
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(CROWD):
            await stack.enter_async_context(target.connect(plain=True))
        await pause(target.chance, 0, 1)


async def flood(target: Target) -> None:
    async with target.connect() as wire:
        paths = [target.chance.choice(("/healthz", "/v1/stats", "/nowhere")) for _ in range(FLOOD)]
        await wire.send(
            b"".join(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode() for path in paths)
        )
        await wire.statuses(FLOOD)


async def deep_json(target: Target) -> None:
    opening, closing = target.chance.choice((("[", "]"), ('{"a":', "}")))
    nested = opening * DEEP + "1" + closing * target.chance.choice((0, DEEP))
    body = f'{{"subject": "load.pull", "body": {nested}}}'.encode()
    async with target.connect() as wire:
        await wire.send(target.request(PUBLISH, body))
        await wire.statuses()


async def bomb(target: Target) -> None:
    # An array, a map and bytes of 4 GiB; arrays within arrays.
    kinds = (*(kind + b"\xff" * 4 for kind in (b"\xdd", b"\xdf", b"\xc6")), b"\x91" * DEEP)
    body = b"\x91" * target.chance.randint(0, 3) + target.chance.choice(kinds)
    async with target.connect() as wire:
        await wire.send(target.request(BATCH, body, kind=MSGPACK))
        await wire.statuses()


async def garbage(target: Target) -> None:
    async with target.connect(plain=target.chance.random() < 0.5) as wire:
        await wire.send(target.chance.randbytes(target.chance.randint(1, 5000)))
        await wire.reader.read()


async def half_a_head(target: Target) -> None:
    data = target.request(PUBLISH, target.publish())
    async with target.connect() as wire:
        await wire.send(data[: target.chance.randint(1, len(data) - 1)])
        await pause(target.chance, 0, 0.5)


async def reset(target: Target) -> None:
    async with target.connect() as wire:
        await wire.send(target.request(PUBLISH, target.publish()))
        await asyncio.sleep(target.chance.choice((0, 0.001, 0.01)))


async def vanishing_consumer(target: Target) -> None:
    body = json.dumps({"max": 5, "wait": target.chance.choice((0, 500))}).encode()
    async with target.connect() as wire:
        await wire.send(target.request("/v1/subscriptions/pull/pull", body))
        await pause(target.chance, 0, 0.3)


async def uninvited(target: Target) -> None:
    token = target.chance.choice((target.narrow_token, "x" * 40, "é", target.token[:-1]))
    async with target.connect() as wire:
        await wire.send(target.request(PUBLISH, target.publish(), token=token))
        (status,) = await wire.statuses()
    if status < 400:
        target.fail(f"who has no right to publish got {status}")


KINDS: tuple[Callable[[Target], Awaitable[None]], ...] = (
    *(trickle, deaf, half_handshake, huge, crowd, flood, deep_json, bomb, garbage),
    *(half_a_head, reset, vanishing_consumer, uninvited),
)


async def misbehave(target: Target, pause_s: float) -> None:
    """One after the other, each kind as often as the others, for ever."""
    while True:
        for kind in target.chance.sample(KINDS, len(KINDS)):
            # Whom the server has cut off has got what he deserves.
            with contextlib.suppress(OSError, EOFError, asyncio.LimitOverrunError):
                async with asyncio.timeout(PATIENCE_S):
                    await kind(target)
            target.counts[f"bad: {kind.__name__.replace('_', ' ')}"] += 1
            await pause(target.chance, 0, pause_s)
