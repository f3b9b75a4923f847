"""beanstalkd: a work queue with delays in whole seconds, kept in memory, with a log of its own.

`-b DIR -f0` writes every put to the log and syncs it before it is answered. A delay is a number of
seconds, so lateness of up to a second is how it is made and not how it performs.
"""

import asyncio
import shutil
import time

from peers.base import (
    ClosedLoop,
    ClosedLoopResult,
    Got,
    Peer,
    PeerError,
    closed_loop,
    count_lines,
    make_body,
)


class Beanstalkd(Peer):
    """One process, one tube."""

    name = "beanstalkd"
    packages = "Debian: beanstalkd"
    durability = "-b DIR -f0"

    @classmethod
    def is_installed(cls) -> bool:
        return shutil.which("beanstalkd") is not None

    def start(self) -> None:
        log = self.directory / "binlog"
        log.mkdir(exist_ok=True)
        self.spawn("beanstalkd", "-l", "127.0.0.1", "-p", str(self.port), "-b", str(log), "-f0")

    async def is_ready(self) -> bool:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(b"list-tubes\r\n")
        answer = await reader.readline()
        writer.close()
        return answer.startswith(b"OK")

    async def publish(self, load: ClosedLoop) -> ClosedLoopResult:
        delay_s = -(-load.delay_ms // 1000)

        def request(due_ms: int) -> bytes:
            body = make_body(due_ms)
            return b"put 1 %d 60 %d\r\n%b\r\n" % (delay_s, len(body), body)

        return await closed_loop(
            self.port,
            load,
            request,
            lambda: count_lines(b"INSERTED"),
            connections=load.in_flight,
        )

    async def consume(self, count: int, idle_max_s: float) -> Got:
        got = Got()
        connections = 8

        async def work() -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            writer.write(b"reserve-with-timeout %d\r\n" % idle_max_s)
            while len(got.due_ms) < count:
                line = await reader.readline()
                if line.startswith((b"DELETED", b"TIMED_OUT")):
                    if line.startswith(b"TIMED_OUT"):
                        break
                    continue
                if not line.startswith(b"RESERVED"):
                    raise PeerError(f"not RESERVED: {line!r}")
                _, job, length = line.split()
                body = await reader.readexactly(int(length) + 2)
                got.add(time.time_ns(), body)
                writer.write(b"delete %b\r\nreserve-with-timeout %d\r\n" % (job, int(idle_max_s)))
            writer.close()

        await asyncio.gather(*(work() for _ in range(connections)))
        return got
