"""The thread `replay`: groups are filed about once a second; now and then there is a checkpoint.

A request, such as to load or to retire an hour, is answered when all before it is filed.
"""

from collections.abc import Callable
from dataclasses import dataclass

from delayserver.decisions.group import Group
from delayserver.errors import DelayServerError
from delayserver.recovery.snapshots import taken
from delayserver.schedule.committed import Records
from delayserver.schedule.replay import Filed, Replay, Snapshot
from delayserver.server.threads import Clock, Fatal, Post, Worker
from storage.errors import StorageError

FILE_BYTES_MAX = 32 * 1024 * 1024
"""Longer groups are filed alone, and so are those with more records than the next."""
FILE_RECORDS_MAX = 1 << 16
WRITES_MAX = 1 << 15
"""With so many changes for the catalog there is a checkpoint: sorting and freeing them, all at
once, holds up the event loop, too."""
PASSES_APART = 10
"""A pass over many files takes 0.2 s: the next begins after ten times as long, but soon enough that
everything is filed within two seconds."""


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


@dataclass(frozen=True, slots=True)
class FilingRules:
    """How often groups are filed, and how much at once."""

    file_ms: int
    checkpoint_ms: int
    checkpoint_bytes: int
    retention_ms: int
    file_bytes_max: int = FILE_BYTES_MAX


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
        rules: FilingRules,
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
        self._rules = rules
        self._file_ms = min(rules.file_ms, rules.checkpoint_ms)
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
        if present_ms - self._checkpoint_at_ms >= self._rules.checkpoint_ms:
            self._file()
            self._checkpoint()
            self._purge()
            self._more_to_split = self._replay.must_split(self._near_hour())
            self._more_to_tidy = self._replay.tidy()
        elif self._accepted_bytes >= self._rules.checkpoint_bytes:
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
        now_ms, rules = self._clock(), self._rules
        self._more_to_purge = self._replay.purge(now_ms, rules.retention_ms)

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
        if self._accepted_bytes >= self._rules.checkpoint_bytes or not self._replay.is_importing:
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
            if count and (total_bytes > self._rules.file_bytes_max or records > FILE_RECORDS_MAX):
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
