"""The threads: each runs one part of the server, fed by a queue, and reports to the event loop.

    committer   one group at a time: write and sync (or on the event loop, on a quick disk)
    replay      files groups (`delayserver.server.filer`)
    loader      hours that come near
    reader      bodies that go out; rows that somebody looks up
    settler     the tails of the dispatch logs

A part may bring one more (`delayserver.parts`).

The parts themselves know nothing of threads: the simulation calls them directly. A full disk,
or no descriptor for a file, makes a thread wait and try the same again, except the committer, whose
group is refused; any other error of the disk ends the server (I9).
"""

import contextlib
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

import structlog

from delayserver.decisions.group import Group
from delayserver.delivery.handout import Handout
from delayserver.delivery.reader import FetchedBodies, Reader
from delayserver.delivery.settler import Settler
from delayserver.records.subscriptions import Registry
from delayserver.schedule.loader import LoadedHour, Loader
from delayserver.schedule.replay import Snapshot
from storage.errors import ShortageError
from storage.write_ahead_log import GroupLog

SHORTAGE_WAIT_S = 1.0
QUICK_S = 0.0005
"""A commit that takes no longer, on average, is done where it is asked for: to hand it to a thread
and back costs the event loop about as much."""
QUICK_BYTES = 64 * 1024
"""A longer group keeps the disk busy for a time in which much can be decided."""
_RECENT = 1 / 8
"""The weight of the last commit in the average."""

log = structlog.get_logger()
Item = TypeVar("Item")
Post = Callable[..., None]
"""Calls a function on the event loop: `post(function, *arguments)`."""
Fatal = Callable[[BaseException], None]
Clock = Callable[[], int]


class Worker(threading.Thread, Generic[Item]):
    """A thread with an inbox.

    An item that is put without `wake` waits until the thread wakes for another reason or times out:
    a thread that wakes fights the event loop for the GIL, and that costs more than most work."""

    def __init__(self, name: str, fatal: Fatal) -> None:
        super().__init__(name=f"delayserver-{name}", daemon=True)
        self._inbox: deque[Item] = deque()
        self._wakes: SimpleQueue[bool] = SimpleQueue()
        self._fatal = fatal
        self._finish = False
        self._held: list[Item] = []

    def put(self, item: Item, *, wake: bool = True) -> None:
        """Hand something over; never waits."""
        self._inbox.append(item)
        if wake:
            self._wakes.put(True)

    def finish(self) -> None:
        """Let the thread end once its inbox is empty."""
        self._finish = True
        self._wakes.put(True)

    def timeout_s(self) -> float | None:
        """How long to wait for the next item before `handle` is called without any."""
        return None

    def run(self) -> None:
        try:
            while True:
                finish = self._finish
                with contextlib.suppress(Empty):
                    self._wakes.get(timeout=0 if finish or self._held else self.timeout_s())
                with contextlib.suppress(Empty):
                    # One turn for all that was put meanwhile, not one for each.
                    while True:
                        self._wakes.get_nowait()
                while self._inbox:
                    self._held.append(self._inbox.popleft())
                self._handle_until_done(self._held)
                if finish and not self.backlog:
                    self.close()
                    return
        except BaseException as error:
            self._fatal(error)

    def _handle_until_done(self, items: list[Item]) -> None:
        while True:
            try:
                self.handle(items)
                return
            except ShortageError as error:
                log.error("tried again soon", thread=self.name, error=str(error))
                time.sleep(SHORTAGE_WAIT_S)

    @property
    def backlog(self) -> int:
        """How many items `step` has before it."""
        return len(self._inbox) + len(self._held)

    def step(self, items_max: int) -> None:
        """One turn in the caller's thread instead of `run`, for the simulation; never waits.

        Raises the errors of `handle`; after a ShortageError the next step tries the same again."""
        if not self._held:
            while self._inbox and len(self._held) < items_max:
                self._held.append(self._inbox.popleft())
        self.handle(self._held)

    @abstractmethod
    def handle(self, items: list[Item]) -> None:
        """Deal with the items, and take each off the list when it is done.

        It is called again soon for items that it leaves on the list."""

    def close(self) -> None:
        """Called in the thread, after the last item."""


class CommitterThread(Worker[Group]):
    """Makes groups durable, one at a time: in its thread, or in that of the caller."""

    def __init__(
        self,
        message_log: GroupLog,
        monotonic: Callable[[], float],
        post: Post,
        on_committed: Callable[[], None],
        on_failed: Callable[[Exception], None],
        fatal: Fatal,
    ) -> None:
        super().__init__("committer", fatal)
        self._message_log = message_log
        self._monotonic = monotonic
        self._post = post
        self._on_committed = on_committed
        self._on_failed = on_failed
        self._average_s = 0.0
        """The average time of the last commits."""

    @property
    def is_quick(self) -> bool:
        """Whether the disk has been syncing quickly."""
        return self._average_s <= QUICK_S

    def takes_at_once(self, group: Group) -> bool:
        """Whether `commit` will not keep its caller for long; the thread has nothing to do."""
        return group.total_bytes <= QUICK_BYTES and self._message_log.has_room(group.total_bytes)

    def commit(self, group: Group, post: Post) -> None:
        """Make a group durable, and `post` the result. Raises StorageError: the server has to
        end (I9)."""
        rows, payload = group.encode()
        began_s = self._monotonic()
        try:
            self._message_log.append(
                rows,
                payload,
                first_seq=group.first_seq,
                last_seq=group.last_seq,
                created_ms=group.created_ms,
            )
        except ShortageError as error:
            post(self._on_failed, error)
        else:
            self._average_s += (self._monotonic() - began_s - self._average_s) * _RECENT
            post(self._on_committed)

    def handle(self, items: list[Group]) -> None:
        while items:
            self.commit(items.pop(0), self._post)

    def close(self) -> None:
        self._message_log.close()


@dataclass(slots=True)
class HourRequest:
    """Read one hour."""

    snapshot: Snapshot
    registry: Registry
    subject_names: dict[int, str]


class LoaderThread(Worker[HourRequest]):
    """Reads hours."""

    def __init__(
        self,
        loader: Loader,
        post: Post,
        on_loaded: Callable[[LoadedHour], None],
        fatal: Fatal,
    ) -> None:
        super().__init__("loader", fatal)
        self._loader = loader
        self._post = post
        self._on_loaded = on_loaded

    def handle(self, items: list[HourRequest]) -> None:
        while items:
            request = items[0]
            loaded = self._loader.load(request.snapshot, request.registry, request.subject_names)
            self._post(self._on_loaded, loaded)
            del items[0]


@dataclass(slots=True)
class HandoutRequest:
    """Read the bodies of rows that go out."""

    handout: Handout
    unfiled: dict[int, bytes]
    done: Callable[[Handout, FetchedBodies], None]


@dataclass(slots=True)
class CallRequest:
    """Run a function of the reader, and hand its result or error to the event loop."""

    function: Callable[[Reader], object]
    done: Callable[[object, Exception | None], None]


class ReaderThread(Worker[HandoutRequest | CallRequest]):
    """Reads bodies and rows."""

    def __init__(self, reader: Reader, post: Post, fatal: Fatal) -> None:
        super().__init__("reader", fatal)
        self._reader = reader
        self._post = post

    def handle(self, items: list[HandoutRequest | CallRequest]) -> None:
        while items:
            item = items[0]
            if isinstance(item, HandoutRequest):
                self._post(item.done, item.handout, self._reader.fetch(item.handout, item.unfiled))
                del items[0]
                continue
            try:
                result, error = item.function(self._reader), None
            except Exception as caught:  # handed to whoever asked
                result, error = None, caught
            self._post(item.done, result, error)
            del items[0]


@dataclass(slots=True)
class SettleRequest:
    """Append rows to the dispatch logs; `done` is called on the loop once they are durable."""

    rows_by_hour: dict[int, list[bytes]] = field(default_factory=dict)
    """Each of the bytes is one row or more (DISPATCH_ROW), or a note about those before it."""
    recorded: dict[int, dict[int, list[bytes]]] = field(default_factory=dict)
    """By offset in the log of all replicas, where they stand already: all rows of that record."""
    done: list[Callable[[], None]] = field(default_factory=list)
    settled_hours: list[int] = field(default_factory=list)
    """Hours whose files the settler may close: no row of them comes any more."""


class SettlerThread(Worker[SettleRequest]):
    """Writes at once; syncs when somebody waits, and otherwise in intervals."""

    def __init__(
        self,
        settler: Settler,
        clock: Clock,
        monotonic: Callable[[], float],
        post: Post,
        fatal: Fatal,
        *,
        sync_ms: int,
        durable: bool,
    ) -> None:
        super().__init__("settler", fatal)
        self._settler = settler
        self._clock = clock
        self._monotonic = monotonic
        self._post = post
        self._sync_s = sync_ms / 1000
        self._durable = durable
        self._synced_at = monotonic()
        self._pending = SettleRequest()

    def timeout_s(self) -> float | None:
        if not self._settler.unsynced or not self._durable:
            return None
        return max(0.0, self._synced_at + self._sync_s - self._monotonic())

    def handle(self, items: list[SettleRequest]) -> None:
        pending = self._pending
        for item in items:
            for hour, rows in item.rows_by_hour.items():
                pending.rows_by_hour.setdefault(hour, []).extend(rows)
            pending.recorded |= item.recorded
            pending.done += item.done
            pending.settled_hours += item.settled_hours
        items.clear()
        # If it fails for a time, the rows are still there when this is called again.
        self._settler.write(pending.rows_by_hour, self._clock())
        while pending.recorded:
            offset, rows_by_hour = next(iter(pending.recorded.items()))
            self._settler.write_recorded(rows_by_hour, offset, self._clock())
            del pending.recorded[offset]
        waited_for = bool(pending.done or pending.settled_hours)
        is_time = self._monotonic() - self._synced_at >= self._sync_s
        if self._durable and (waited_for or is_time):
            self._settler.sync()
            self._synced_at = self._monotonic()
        self._pending = SettleRequest()
        for hour in pending.settled_hours:
            self._settler.release_hour(hour)
        for done in pending.done:
            self._post(done)

    def close(self) -> None:
        self._settler.sync()
