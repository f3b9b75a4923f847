"""The threads: each runs one part of the server, fed by a queue, and reports to the event loop.

    committer   one group at a time: write and sync (or on the event loop, on a quick disk)
    replay      groups, filed about once a second; now and then a checkpoint; loads and retirements
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
from delayserver.errors import DelayServerError
from delayserver.records.subscriptions import Registry
from delayserver.recovery.snapshots import taken
from delayserver.schedule.committed import Records
from delayserver.schedule.loader import LoadedHour, Loader
from delayserver.schedule.replay import Filed, Replay, Snapshot
from storage.errors import ShortageError, StorageError
from storage.write_ahead_log import GroupLog

SHORTAGE_WAIT_S = 1.0
QUICK_S = 0.0005
"""A commit that takes no longer, on average, is done where it is asked for: to hand it to a thread
and back costs the event loop about as much."""
FILE_BYTES_MAX = 32 * 1024 * 1024
"""Longer groups are filed alone, and so are those with more records than the next."""
FILE_RECORDS_MAX = 1 << 16
WRITES_MAX = 1 << 15
"""With so many changes for the catalog there is a checkpoint: sorting and freeing them, all at
once, holds up the event loop, too."""
PASSES_APART = 10
"""A pass over many files takes 0.2 s: the next begins after ten times as long, but soon enough that
everything is filed within two seconds."""
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
class LoadRequest:
    """Make all hours up to one live."""

    through_hour: int


@dataclass(slots=True)
class RetireRequest:
    """These hours are settled."""

    hours: list[int]
    through_seq: int


@dataclass(slots=True)
class CheckpointRequest:
    """File and make a checkpoint of everything before this, now; then call back on the loop."""

    done: Callable[[], None]


@dataclass(slots=True)
class FilerCall:
    """File everything before this, and call a function; then call back on the loop, with the error
    if it was refused."""

    function: Callable[[Replay], None]
    done: Callable[[Exception | None], None]


@dataclass(slots=True)
class SnapshotRequest:
    """File and make a checkpoint of everything before this, and take it down as it is, before
    anything else is filed; then call back on the loop with the snapshot, or with an error."""

    take: Callable[[], object]
    done: Callable[[object, StorageError | None], None]


@dataclass(slots=True)
class ForgetRequest:
    """Messages are settled: nothing watches them under these keys any more, from a checkpoint to
    come on."""

    watch_keys: list[bytes]


FilerItem = (
    Group
    | LoadRequest
    | RetireRequest
    | CheckpointRequest
    | FilerCall
    | SnapshotRequest
    | ForgetRequest
)


class FilerThread(Worker[FilerItem]):
    """Files groups lazily, in the order in which they and the requests came."""

    def __init__(
        self,
        replay: Replay,
        clock: Clock,
        stopwatch: Clock,
        post: Post,
        on_filed: Callable[[Filed], None],
        on_checkpoint: Callable[[int], None],
        on_loading: Callable[[int, list[Snapshot]], None],
        fatal: Fatal,
        *,
        file_ms: int,
        checkpoint_ms: int,
        checkpoint_bytes: int,
        retention_ms: int,
        file_bytes_max: int = FILE_BYTES_MAX,
        on_deleted: Callable[[list[int]], None] = lambda hours: None,
    ) -> None:
        super().__init__("replay", fatal)
        self._replay = replay
        self._clock = clock
        self._stopwatch = stopwatch
        self._post = post
        self._on_filed = on_filed
        self._on_checkpoint = on_checkpoint
        self._on_loading = on_loading
        self._on_deleted = on_deleted
        self._file_ms = min(file_ms, checkpoint_ms)
        self._checkpoint_ms = checkpoint_ms
        self._checkpoint_bytes = checkpoint_bytes
        self._retention_ms = retention_ms
        self._file_bytes_max = file_bytes_max
        self._waiting: list[Group] = []
        self._accepted_bytes = 0
        """Since the last checkpoint."""
        self._filed_ms = self._checkpoint_at_ms = stopwatch()
        self._file_in_ms = self._file_ms
        """Until the next pass, from the beginning of the last."""
        self._more_to_purge = False
        self._more_to_split = False
        self._more_to_tidy = False
        self._told_seq = replay.checkpoint_seq

    def timeout_s(self) -> float | None:
        if self._replay.is_importing:
            return 0
        if self._more_to_purge or self._more_to_split or self._more_to_tidy:
            return 0.001
        passed_ms = self._stopwatch() - self._filed_ms
        return max(self._file_in_ms - passed_ms, 1) / 1000

    @property
    def backlog(self) -> int:
        return super().backlog + self._replay.is_importing

    def handle(self, items: list[FilerItem]) -> None:
        if self._replay.is_importing:
            # A slice at a time: messages that it makes due meanwhile go to the wheel at once.
            self._file_import()
        else:
            self._take(items)
        present_ms = self._stopwatch()
        if present_ms - self._checkpoint_at_ms >= self._checkpoint_ms:
            self._file()
            self._checkpoint()
            self._purge()
            self._more_to_split = self._replay.must_split(self._near_hour())
            self._more_to_tidy = self._replay.tidy()
        elif self._accepted_bytes >= self._checkpoint_bytes:
            self._file()
            self._checkpoint()
        elif present_ms - self._filed_ms >= self._file_in_ms:
            self._file()
            if self._replay.effects.has_new_names:
                # Streams of the files look names up in the catalog only, and new ones are few.
                self._checkpoint()
        elif self._more_to_purge:
            self._purge()
        elif self._more_to_split and not self._replay.is_importing:
            # Nothing waits for it: a day is split long before it comes near.
            near_hour = self._near_hour()
            if self._replay.must_split(near_hour):  # The clock may have been set back.
                self._split(near_hour)
            self._more_to_split = self._replay.must_split(near_hour)
        elif self._more_to_tidy:
            self._more_to_tidy = self._replay.tidy()
        self._report()

    def _purge(self) -> None:
        now_ms = self._clock()
        self._more_to_purge = self._replay.purge(now_ms, self._retention_ms)

    def _near_hour(self) -> int:
        return self._replay.near_hour(self._clock())

    def _split(self, through_hour: int) -> None:
        filed = self._replay.split(through_hour, self._clock())
        if filed.damage:
            self._post(self._on_filed, filed)

    def _take(self, items: list[FilerItem]) -> None:
        if self._waiting and self._waiting[-1].import_count:
            self._file()  # The disk was full before; the import has to be the last in its batch.
            return
        while items:
            item = items[0]
            if isinstance(item, Group):
                self._waiting.append(item)
                self._accepted_bytes += item.total_bytes
                del items[0]
                if item.import_count:
                    self._file()
                    return
                continue
            if isinstance(item, ForgetRequest):
                self._replay.effects.note_settled(item.watch_keys)
                del items[0]
                continue
            # Whatever came before the request is filed before it is answered.
            self._file()
            match item:
                case LoadRequest(through_hour=through_hour):
                    # Only after a downtime, or when the clock was set ahead, is a day to be split.
                    while self._replay.must_split(through_hour):
                        self._split(through_hour)
                    before = self._replay.live_through_hour
                    self._post(self._on_loading, before, self._replay.snapshot(through_hour))
                case RetireRequest(hours=hours, through_seq=through_seq):
                    for hour in hours:
                        self._replay.retire(hour, through_seq, self._clock())
                case CheckpointRequest(done=done):
                    self._checkpoint()
                    self._post(done)
                case FilerCall(function=function, done=done):
                    self._post(done, self._call(function))
                case SnapshotRequest(take=take, done=done):
                    self._checkpoint()
                    self._post(done, *taken(take))
            del items[0]

    def _call(self, function: Callable[[Replay], None]) -> Exception | None:
        try:
            function(self._replay)
        except DelayServerError as refused:
            return refused  # told to whoever asked
        return None

    def _file_import(self) -> None:
        filed = self._replay.file_import(self._clock())
        self._post(self._on_filed, filed)
        self._accepted_bytes += filed.total_bytes
        # The last slice is not left to the next one: a bulk load waits until the catalog has the
        # import, and its staged rows take as much room again.
        if self._accepted_bytes >= self._checkpoint_bytes or not self._replay.is_importing:
            self._checkpoint()
            self._more_to_tidy = True  # A long import makes run after run of keys.

    def _file(self) -> None:
        self._filed_ms = self._stopwatch()
        while self._waiting:
            # All of it may be for one hour, and is one frame there.
            batch = self._waiting[: self._fitting()]
            groups = [group.encode() for group in batch]
            express = frozenset(row[0] for group in batch for row in group.express)
            filed = self._replay.file([Records.of_groups(groups, express)], self._clock())
            del self._waiting[: len(batch)]
            self._report()
            self._post(self._on_filed, filed)
            if self._replay.effects.writes_count >= WRITES_MAX:
                self._checkpoint()
        took_ms = self._stopwatch() - self._filed_ms
        self._file_in_ms = min(max(self._file_ms, PASSES_APART * took_ms), self._file_ms * 3 // 2)

    def _fitting(self) -> int:
        """How many of the groups that wait are filed together."""
        total_bytes = records = 0
        for count, group in enumerate(self._waiting):
            total_bytes += group.total_bytes
            records += group.count
            if count and (total_bytes > self._file_bytes_max or records > FILE_RECORDS_MAX):
                return count
        return len(self._waiting)

    def _checkpoint(self) -> None:
        self._checkpoint_at_ms = self._stopwatch()
        self._accepted_bytes = 0
        if self._replay.is_dirty:
            self._replay.checkpoint()
        self._report()

    def _report(self) -> None:
        replay = self._replay
        purging = replay.purging
        if purging.deleted_hours:
            deleted, purging.deleted_hours = purging.deleted_hours, []
            self._post(self._on_deleted, deleted)
        if replay.checkpoint_seq != self._told_seq:
            self._told_seq = replay.checkpoint_seq
            self._post(self._on_checkpoint, self._told_seq)

    def close(self) -> None:
        self._file()
        while self._replay.is_importing:
            self._replay.file_import(self._clock())
        if self._replay.is_dirty:
            self._replay.checkpoint()


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
