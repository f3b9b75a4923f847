"""Redis beside the shards: the sorted set of `peers`, asked by redis-benchmark, in C as wrk is.

An answer means: synced (`appendfsync always`), as with us. A publish is a ZADD of a member of 200
bytes, which differs in its last 12 digits; a batch is a pipeline of as many. redis-benchmark cannot
remove each member once, so cancels come from the closed loop of `peers`, which is Python: it does
several times what Redis does. Where a turn adds, the set grows, as the directory of ours does.

Cost: one process, which sleeps while nobody asks.
"""

import csv
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from load import LoadError
from peers.base import BODY_BYTES, ClosedLoop, cancel, run
from peers.redis import RedisSortedSet
from servers import cpu_s_of

from delayserver.cli.demo.process import free_port
from shards.sides import Load, Side, Turn, measured

PROGRAM = "redis-benchmark"
MISSING = (
    "Redis is not installed, so there is nothing beside it. Debian: apt-get install redis-server"
)
MEMBERS = 1_000_000_000
_RANDOM = "__rand_int__"
"""redis-benchmark puts 12 digits in its place."""
_FIRST = 5_000
"""So many tell how many make a turn."""
_DAY_MS = 86_400_000


def is_installed() -> bool:
    """Whether there are the server and its generator."""
    return RedisSortedSet.is_installed() and shutil.which(PROGRAM) is not None


class RedisSide:
    """A Redis that is measured by turns."""

    def __init__(self, peer: RedisSortedSet) -> None:
        self._peer = peer

    def publishing(self, connections: int, seconds: float, pipeline: int = 1) -> Side:
        """ZADDs, so many in each pipeline of each connection."""

        def add(count: int) -> Load:
            return _benchmark(self._peer.port, connections, count, pipeline)

        def turn(number: int) -> Turn:
            first = max(_FIRST, connections * pipeline * 2)
            count = max(first, int(add(first).rate * seconds))
            return self._measured(lambda: add(count))

        return turn

    def cancelling(self, pool: ProcessPoolExecutor, connections: int, count: int) -> Side:
        """ZREMs of so many members that were added just before."""

        def remove() -> Load:
            load = ClosedLoop(connections, _DAY_MS, count=count)
            peer = self._peer
            done = pool.submit(cancel, type(peer), peer.directory, peer.port, load).result()
            assert done is not None
            p50_ms, p99_ms = (float(one) for one in np.percentile(done.latency_ms, [50, 99]))
            return Load(done.count, done.rate, p50_ms, p99_ms)

        return lambda number: self._measured(remove)

    def _measured(self, work: Callable[[], Load]) -> Turn:
        (process,) = self._peer.processes
        return measured(work, lambda: cpu_s_of(process.pid))


@contextmanager
def redis_side(directory: Path) -> Iterator[RedisSide | None]:
    """A Redis in a directory of its own, until the block ends; None: there is no Redis."""
    if not is_installed():
        yield None
        return
    directory.mkdir()
    peer = RedisSortedSet(directory, free_port())
    try:
        peer.start()
        run(peer.wait_until_ready)
        yield RedisSide(peer)
    finally:
        peer.kill()


def _benchmark(port: int, connections: int, count: int, pipeline: int) -> Load:
    member = "x" * (BODY_BYTES - len(_RANDOM)) + _RANDOM
    options = {"p": port, "c": connections, "P": pipeline, "n": count, "r": MEMBERS}
    words = [word for name, value in options.items() for word in (f"-{name}", str(value))]
    finished = subprocess.run(
        [PROGRAM, *words, "--csv", "ZADD", "delayed", f"1{_RANDOM}", member],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    rows = list(csv.DictReader(finished.stdout.splitlines()))
    if len(rows) != 1:
        raise LoadError(f"{PROGRAM} failed: {finished.stdout}{finished.stderr}")
    (row,) = rows
    p50_ms, p99_ms = float(row["p50_latency_ms"]), float(row["p99_latency_ms"])
    return Load(count, float(row["rps"]), p50_ms, p99_ms)
