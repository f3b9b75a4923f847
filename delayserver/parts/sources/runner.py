"""Sources that run: what a feed reads is published, batch by batch, as long as its source wants it.

    feed ──▶ read ──▶ Sourcing.take ──▶ durable ──▶ the next batch
                          └── refused (too much, disk full) ──▶ waits, and gives it again

A source has one task, and its feed one client: at most `sources_max` of both. One batch is under
way at a time, so what was read and is not durable is little, and a roll-back is simple: the feed is
opened again, where the state says. A feed that fails is opened again after a pause that grows.

A change of a source ends its task, and another begins behind that one. A server that stops, or is
no owner of its shard any more, ends all of them before it lets go.

Cost: three turns of the event loop for each batch. Threads: belongs to the event loop.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

import structlog

from delayserver.delivery.complaints import Complaints
from delayserver.errors import DiskReserveError, OverloadedError, StoppingError
from delayserver.parts.sources.feeds import Batch, Feed, FeedError, FeedOpener, Health
from delayserver.parts.sources.records import KnownSource
from delayserver.parts.sources.sourcing import Sourcing
from delayserver.server.futures import durable
from storage.errors import StorageError

RETRY_S: Final = 1.0
"""After the first failure; doubled up to RETRY_MAX_S."""
RETRY_MAX_S: Final = 30.0
NONE: Final = -1
"""The version of a source that is not to run."""

log = structlog.get_logger()


class SourceRunner:
    """The tasks of all sources of a server."""

    def __init__(
        self,
        sources: Sourcing,
        make_opener: Callable[[], FeedOpener],
        clock: Callable[[], int],
        on_fatal: Callable[[BaseException], None],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`make_opener`: called once there is a source; raises ModuleNotFoundError."""
        self._sources = sources
        self._make_opener = make_opener
        self._opener: FeedOpener | None = None
        self._clock = clock
        self._on_fatal = on_fatal
        self._sleep = sleep
        self._tasks: dict[str, dict[asyncio.Task[None], int]] = {}
        """By name, with the version that each runs. All but the last are ending."""
        self._is_ended = False
        self._complaints = Complaints()
        self.errors = sources.errors

    def start(self) -> None:
        """Begin with those that there are."""
        self._sources.on_changed = self._look_at
        self._sources.look()
        for known in self._sources.all():
            self._look_at(known.definition.name)

    async def stop(self) -> None:
        """Take nothing any more."""
        self._is_ended = True
        tasks = [task for tasks in self._tasks.values() for task in tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def failing(self) -> int:
        """How many cannot be read now, or stand before a record that cannot be published."""
        known = self._sources.all()
        return sum(
            one.state.is_stopped or bool(one.problem) or one.definition.name in self.errors
            for one in known
        )

    def _look_at(self, name: str) -> None:
        known = self._sources.find(name)
        tasks = self._tasks.get(name, {})
        is_wanted = known is not None and not known.problem and not known.state.is_paused
        version = known.state.version if known is not None and is_wanted else NONE
        if self._is_ended or version == (list(tasks.values()) or [NONE])[-1]:
            return
        # Here, and not by the one that follows: that may be over before it begins.
        for task in tasks:
            task.cancel()
        task = asyncio.get_running_loop().create_task(self._run(name, version, list(tasks)))
        self._tasks.setdefault(name, {})[task] = version
        task.add_done_callback(partial(self._on_done, name))

    def _on_done(self, name: str, task: asyncio.Task[None]) -> None:
        tasks = self._tasks[name]
        del tasks[task]
        if not tasks:
            del self._tasks[name]
        error = None if task.cancelled() else task.exception()
        if error is not None:
            # Feeds answer for what goes wrong on the network; this is a mistake of ours.
            self._on_fatal(error)

    async def _run(self, name: str, version: int, before: Sequence[asyncio.Task[None]]) -> None:
        if before:
            await asyncio.wait(before)
        self.errors.pop(name, None)
        self._complaints.forget(name)
        retry_s = RETRY_S
        while (known := self._wanted(name, version)) is not None:
            has_read = False
            try:
                async with _Opened(
                    self._open(known, partial(self._on_health, name, version))
                ) as feed:
                    while self._wanted(name, version) is not None:
                        batch = await feed.read()
                        has_read = True
                        await self._publish(name, version, batch, feed)
            except (FeedError, StorageError) as error:
                retry_s = RETRY_S if has_read else min(2 * retry_s, RETRY_MAX_S)
                self._on_health(name, version, str(error))
                await self._sleep(retry_s)
            except Exception as error:
                # The client raised it, or what one topic holds: it harms this source alone.
                retry_s = RETRY_S if has_read else min(2 * retry_s, RETRY_MAX_S)
                said = f"an error that was not foreseen: {type(error).__name__}: {error}"
                self._on_health(name, version, said)
                await self._sleep(retry_s)

    def _on_health(self, name: str, version: int, reason: str | None) -> None:
        """`reason`: why a source cannot be read now; None: it is read. A reason that does not
        change is logged ever more rarely."""
        if self._wanted(name, version) is None:
            return
        if reason is None:
            self.errors.pop(name, None)
            over = self._complaints.right(name)
            if over is not None:
                log.info("a source is read again", source=name, error=over.words, times=over.total)
            return
        if self.errors.get(name) not in (None, reason):
            self._complaints.forget(name)
        self.errors[name] = reason
        said = self._complaints.wrong(name, reason)
        if said is not None:
            log.error("a source cannot be read", source=name, error=reason, times=said.total)

    def _wanted(self, name: str, version: int) -> KnownSource | None:
        known = self._sources.find(name)
        if known is None or known.problem or known.state.is_paused:
            return None
        return known if known.state.version == version else None

    async def _open(self, known: KnownSource, health: Health) -> Feed:
        if self._opener is None:
            try:
                self._opener = self._make_opener()
            except ModuleNotFoundError as error:
                raise FeedError(
                    "this server has no client for kafka: install it with pip install "
                    "'delayserver[kafka]'"
                ) from error
        return await self._opener.open(known, health)

    async def _publish(self, name: str, version: int, batch: Batch, feed: Feed) -> None:
        """Done when it is durable. Raises StorageError where it could not be written."""
        while True:
            try:
                group = self._sources.take(name, version, batch, self._clock(), feed.identity)
                break
            except OverloadedError as error:
                await self._sleep(error.retry_after_ms / 1000)
            except (DiskReserveError, StoppingError):
                await self._sleep(RETRY_S)
        if group is None:
            return
        await durable(group)
        known = self._sources.find(name)
        if known is not None:
            feed.took(known.state.positions)


class _Opened:
    """A feed that is closed behind its use, also where its task was cancelled."""

    def __init__(self, opening: Awaitable[Feed]) -> None:
        self._opening = opening

    async def __aenter__(self) -> Feed:
        self._feed = await self._opening
        return self._feed

    async def __aexit__(self, *_: object) -> None:
        await self._feed.close()
