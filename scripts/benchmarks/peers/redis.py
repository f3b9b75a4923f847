"""Redis: a sorted set by due time, and a Lua script that takes what is due, every 10 ms.

It is what most teams build. A message is a member of the set, its due time the score. The script
moves what is due into a second set, of leases, so that a consumer that dies loses nothing; an
acknowledgement takes it out there. `appendfsync always` syncs before the answer.
"""

import asyncio
import shutil
import time

from peers.base import (
    LEASE_MS,
    POLL_S,
    ClosedLoop,
    ClosedLoopResult,
    Got,
    Peer,
    PeerError,
    Program,
    closed_loop,
    count_lines,
    make_body,
)

TAKE = b"""
local due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', ARGV[1], 'LIMIT', 0, 500)
for _, member in ipairs(due) do
  redis.call('ZREM', KEYS[1], member)
  redis.call('ZADD', KEYS[2], ARGV[2], member)
end
return due
"""


def command(*parts: bytes) -> bytes:
    """A request in Redis' protocol."""
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(p), p) for p in parts)


class RedisSortedSet(Peer):
    """One process."""

    name = "Redis sorted set"
    packages = "Debian: redis-server"
    durability = "appendfsync always"

    @classmethod
    def is_installed(cls) -> bool:
        return shutil.which("redis-server") is not None

    def start(self) -> None:
        start_redis(self)

    async def is_ready(self) -> bool:
        return await redis_is_ready(self.port)

    async def publish(self, load: ClosedLoop) -> ClosedLoopResult:
        number = 0

        def request(due_ms: int) -> bytes:
            nonlocal number
            number += 1
            due = b"%d" % due_ms
            # Members must differ.
            return command(b"ZADD", b"delayed", due, make_body(due_ms)[:-12] + b"%012d" % number)

        return await closed_loop(
            self.port,
            load,
            request,
            lambda: count_lines(b":1"),
            connections=load.in_flight,
        )

    async def cancel(self, load: ClosedLoop) -> ClosedLoopResult:
        assert load.count is not None
        members = [make_body(load.due_ms())[:-12] + b"%012d" % key for key in range(load.count)]
        added = iter(members)
        await closed_loop(
            self.port,
            load,
            lambda due_ms: command(b"ZADD", b"delayed", b"%d" % due_ms, next(added)),
            lambda: count_lines(b":1"),
            connections=load.in_flight,
        )
        removed = iter(members)
        return await closed_loop(
            self.port,
            load,
            lambda due_ms: command(b"ZREM", b"delayed", next(removed)),
            lambda: count_lines(b":1"),
            connections=load.in_flight,
        )

    async def consume(self, count: int, idle_max_s: float) -> Got:
        got = Got()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        last_at = time.monotonic()
        while len(got.due_ms) < count and time.monotonic() - last_at < idle_max_s:
            now = b"%d" % (time.time_ns() // 1_000_000)
            lease = b"%d" % (time.time_ns() // 1_000_000 + LEASE_MS)
            writer.write(command(b"EVAL", TAKE, b"2", b"delayed", b"leased", now, lease))
            members = await _members(reader)
            now_ns = time.time_ns()
            for member in members:
                got.add(now_ns, member)
            if members:
                last_at = time.monotonic()
                writer.write(command(b"ZREM", b"leased", *members))
                await reader.readline()
            if len(members) < 500:
                await asyncio.sleep(POLL_S)
        writer.close()
        return got


async def _members(reader: asyncio.StreamReader) -> list[bytes]:
    head = await reader.readline()
    if not head.startswith(b"*"):
        raise PeerError(f"not a list: {head!r}")
    members = []
    for _ in range(int(head[1:])):
        length = int((await reader.readline())[1:])
        members.append((await reader.readexactly(length + 2))[:-2])
    return members


def start_redis(peer: Program) -> None:
    """A Redis whose answers mean: synced."""
    options = {
        "bind": "127.0.0.1",
        "port": str(peer.port),
        "dir": str(peer.directory),
        "appendonly": "yes",
        "appendfsync": "always",
        "save": "",
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
    }
    arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
    peer.spawn("redis-server", *arguments)


async def redis_is_ready(port: int) -> bool:
    """Whether it has read its log."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(command(b"PING"))
    answer = await reader.readline()
    writer.close()
    return answer == b"+PONG\r\n"
