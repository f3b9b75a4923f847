"""BullMQ: a job queue for Node.js on Redis, here with `appendfsync always`.

Its client is a Node.js program (`bullmq.mjs`), which is part of what is measured: nobody uses
BullMQ without it. The package is installed from npm into the environment once.
"""

import asyncio
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from peers.base import ClosedLoop, ClosedLoopResult, Got, Peer, PeerError
from peers.redis import RedisSortedSet, redis_is_ready, start_redis

PROGRAM = Path(__file__).with_name("bullmq.mjs")
MODULES = Path(sys.prefix) / "share" / "delayserver-bench"


class BullMQ(Peer):
    """One Redis; a client process per call."""

    name = "BullMQ"
    packages = f"Debian: redis-server, nodejs; npm: bullmq, ioredis (into {MODULES})"
    durability = "appendfsync always"

    @classmethod
    def is_installed(cls) -> bool:
        node = shutil.which("node") is not None and RedisSortedSet.is_installed()
        return node and (MODULES / "node_modules" / "bullmq").is_dir()

    def start(self) -> None:
        start_redis(self)

    async def is_ready(self) -> bool:
        return await redis_is_ready(self.port)

    async def _run(self, what: str, **options: Any) -> dict[str, Any]:
        # Node looks for packages above the program.
        link = MODULES / PROGRAM.name
        shutil.copyfile(PROGRAM, link)
        process = await asyncio.create_subprocess_exec(
            *("node", str(link), what, json.dumps({"port": self.port, **options})),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=1 << 26,
        )
        output, errors = await process.communicate()
        if process.returncode:
            raise PeerError(f"the client of BullMQ failed: {errors.decode()[-2000:]}")
        answer: dict[str, Any] = json.loads(output)
        return answer

    async def publish(self, load: ClosedLoop) -> ClosedLoopResult:
        answer = await self._run(
            "publish",
            inFlight=load.in_flight,
            delayMs=load.delay_ms,
            seconds=None if load.seconds == float("inf") else load.seconds,
            count=load.count,
            perS=load.per_s,
        )
        return ClosedLoopResult(len(answer["latencyMs"]), answer["seconds"], answer["latencyMs"])

    async def consume(self, count: int, idle_max_s: float) -> Got:
        answer = await self._run("consume", count=count, idleMaxS=idle_max_s)
        return Got([int(ms * 1e6) for ms in answer["receivedMs"]], answer["dueMs"])
