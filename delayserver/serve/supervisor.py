"""The supervisor: starts a process for each shard, watches them, starts them again, stops them.

    serve --shards N ──▶ lock DIR, fix N, hold the port ──▶ N × `delayserver.serve.shard`,
                                                            each a server, on one port of all

No byte of a client comes through here. A shard that ends is started again, at once the
first time and then after a wait that grows; one that cannot start at all ends the whole. A shard
whose supervisor has ended stops by itself: it holds the other end of a pipe.

The port is that of all: the system gives each connection to one of those that listen there
(SO_REUSEPORT), so one that is away gets none.

It serves nobody, so it imports nothing of a server.

Cost: 60 MB, more as that of a cluster's node, and nothing while all run. Threads: one event
loop; that of a node has another thread, which looks at the brokers.
"""

import asyncio
import contextlib
import gc
import os
import signal
import sys
import tempfile
import time
from collections.abc import Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from delayserver.config import Settings
from delayserver.errors import DelayServerError
from delayserver.serve import shard as shard_process
from delayserver.serve.hangups import Hangups, block
from delayserver.serve.listening import bind, url_of
from delayserver.serve.logs import set_up_logging
from delayserver.serve.reporting import EXIT_FENCED, EXIT_REFUSED, READY, RECOVERED
from delayserver.shards.place import ShardPlace
from storage.directory import LOCK_FILE
from storage.errors import StorageError
from storage.files import OsFiles
from storage.kinds import LIFE_BYTES, DirectoryMark, Kind, read_mark, require_servable, write_mark
from storage.shards import fix_shard_count, shard_directory

if TYPE_CHECKING:
    from delayserver.cluster.membership import Membership

WAIT_MIN_S = 0.05
WAIT_MAX_S = 5.0
"""Before a shard that has ended is started again."""
STEADY_S = 10.0
"""A shard that ran for so long is started again at once."""
STOP_GRACE_S = 30.0
"""Beyond `drain_ms`; then a shard that does not end is killed."""

log = structlog.get_logger()


def supervise(settings: Settings) -> int:
    """Serve with as many processes as `shards`, or the cluster, says until SIGTERM or SIGINT;
    returns the exit status."""
    block()  # Its shards begin so, too.
    set_up_logging(settings)
    try:
        membership = None
        if settings.cluster is not None:
            from delayserver.cluster.joining import join, open_watch
            from delayserver.cluster.news import tell_news

            membership = join(settings, time.sleep)
            settings = settings.model_copy(update={"shards": membership.identity.shards})
        count = settings.shards
        require_servable(str(settings.data_dir))
        files = OsFiles(str(settings.data_dir))
        with contextlib.ExitStack() as cleanup:
            if count > 1:
                cleanup.enter_context(files.lock(LOCK_FILE))
            fix_shard_count(files, count)
            if count > 1 and read_mark(files) is None:
                write_mark(files, DirectoryMark(Kind.SHARDS, os.urandom(LIFE_BYTES).hex()))
            # No other server may be there already; the shards' own sockets come later.
            bind(settings).close()
            held = cleanup.enter_context(bind(settings, shares=True))
            settings = settings.model_copy(update={"port": held.getsockname()[1]})
            sockets = Path()  # Those of a cluster meet over TCP.
            if membership is None:
                made = tempfile.TemporaryDirectory(prefix="delayserver-")
                sockets = Path(cleanup.enter_context(made))
            shards = [
                _Shard(settings, ShardPlace(k, count, settings.data_dir, sockets), membership)
                for k in range(count)
            ]
            for shard in shards:
                shard.others = shards
            url = url_of(held, settings.tls_cert is not None)
            besides: list[Coroutine[None, None, None]] = []
            if membership is not None:
                watch = open_watch(settings, count)
                besides.append(tell_news(partial(_tell_all, shards), watch, membership.node))
            besides.append(_tell_ready(shards, url))
            gc.enable()  # It was off for the imports of the command.
            return asyncio.run(_supervise(shards, besides))
    except (StorageError, DelayServerError, OSError) as error:
        log.critical("cannot start", error=str(error))
        return EXIT_REFUSED


async def _supervise(shards: "list[_Shard]", besides: Sequence[Coroutine[None, None, None]]) -> int:
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    Hangups(partial(_pass_hangup_on, loop, shards))
    running = [asyncio.create_task(shard.keep_running(stopping)) for shard in shards]
    others = [asyncio.create_task(one) for one in besides]
    statuses = await asyncio.gather(*running)
    for task in others:
        task.cancel()
    return max(statuses)


def _pass_hangup_on(loop: asyncio.AbstractEventLoop, shards: "list[_Shard]") -> None:
    log.info("SIGHUP is passed on to the shards")
    with contextlib.suppress(RuntimeError):  # The loop is closed, and all shards have ended.
        loop.call_soon_threadsafe(_hang_up, shards)


def _hang_up(shards: "list[_Shard]") -> None:
    for shard in shards:
        shard.hang_up()


async def _tell_ready(shards: "list[_Shard]", url: str) -> None:
    for shard in shards:
        await shard.ready.wait()
    log.info("all shards are there", url=url, shards=len(shards), pid=os.getpid())


def _tell_all(shards: "list[_Shard]", line: bytes) -> None:
    for shard in shards:
        shard.tell_news(line)


class _Shard:
    """One process after the other."""

    def __init__(
        self, settings: Settings, place: ShardPlace, membership: "Membership | None"
    ) -> None:
        directory = settings.data_dir
        if place.count > 1:
            directory /= shard_directory(place.shard)
        settings = settings.of_shard(directory)
        self.others: Sequence[_Shard] = ()
        """All of the node, this one too."""
        self._said = b""
        """The last report of its process, or of one before it, about the owner of the shard."""
        self._news = b""
        """The last news of the cluster."""
        self._process: asyncio.subprocess.Process | None = None
        self.ready = asyncio.Event()
        self._can_start = False
        """It has been there before."""
        self._place = place
        self._grace_s = settings.drain_ms / 1000 + STOP_GRACE_S
        self._order = shard_process.order(settings, place, membership)

    async def keep_running(self, stopping: asyncio.Event) -> int:
        """Until everything stops, which one that cannot start makes it do; the exit status."""
        loop, wait_s = asyncio.get_running_loop(), 0.0
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), wait_s)
            if stopping.is_set():
                return 0
            began_s = loop.time()
            status = await self._run(stopping)
            if stopping.is_set():
                return 0 if status in (0, -signal.SIGTERM, -signal.SIGINT) else EXIT_REFUSED
            if not self._can_start:
                log.critical("a shard cannot start", shard=self._place.shard, status=status)
                stopping.set()
                return EXIT_REFUSED
            is_steady = status == EXIT_FENCED or loop.time() - began_s >= STEADY_S
            wait_s = WAIT_MIN_S if is_steady else min(max(2 * wait_s, WAIT_MIN_S), WAIT_MAX_S)
            log.error(
                "a shard has ended and is started again",
                shard=self._place.shard,
                status=status,
                within_s=wait_s,
            )

    async def _run(self, stopping: asyncio.Event) -> int:
        """One process, from its start to its end."""
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                shard_process.__name__,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        except OSError as error:
            # The others go on, and this one is tried again: the machine has too little memory, or
            # too many processes, for now.
            log.error("a process was not made", shard=self._place.shard, error=str(error))
            return EXIT_REFUSED
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(self._order)
        process.stdin.writelines(other._said for other in self.others)
        process.stdin.write(self._news)
        self._process = process
        ended = asyncio.create_task(process.wait())
        told = asyncio.create_task(self._hear(process.stdout))
        stop = asyncio.create_task(stopping.wait())
        try:
            await asyncio.wait((ended, stop), return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                await self._stop(process, ended)
            await asyncio.wait((ended, told))  # the process has ended; its last lines follow
            return await ended
        finally:
            for task in (ended, told, stop):
                task.cancel()

    async def _hear(self, lines: asyncio.StreamReader) -> None:
        while line := await lines.readline():
            word = line.decode(errors="replace").strip()
            if word == RECOVERED:
                self._can_start = True
            elif word == READY:
                self.ready.set()
            elif word.startswith("{"):
                self._said = line
                for other in self.others:
                    if other is not self:
                        other.tell(line)

    def tell_news(self, line: bytes) -> None:
        """Give the news of the cluster to its process, and to those that come behind it."""
        self._news = line
        self.tell(line)

    def tell(self, line: bytes) -> None:
        """Give its process a line, if there is one."""
        process = self._process
        if process is not None and process.returncode is None:
            assert process.stdin is not None
            process.stdin.write(line)

    def hang_up(self) -> None:
        """Give its process a SIGHUP, if there is one."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGHUP)

    async def _stop(self, process: asyncio.subprocess.Process, ended: "asyncio.Task[int]") -> None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        done, _ = await asyncio.wait((ended,), timeout=self._grace_s)
        if not done:
            log.error("a shard does not stop, and is killed", shard=self._place.shard)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
