"""The filer: when groups are filed, and what a request waits for; `handle` without a thread."""

from __future__ import annotations

from typing import Any

import pytest

from delayserver.decisions.group import Group
from delayserver.errors import ConflictError
from delayserver.parts.imports.archives import confirming
from delayserver.parts.imports.records import Archived
from delayserver.records.tables import pack_watch, watch_key
from delayserver.schedule.replay import Filed, Snapshot
from delayserver.schedule.retired import extent_of
from delayserver.server.filer import (
    CheckpointRequest,
    FilerCall,
    FilerItem,
    FilerThread,
    FilingRules,
    ForgetRequest,
    LoadRequest,
    RetireRequest,
)
from storage.buckets import DAY_MS, day_of
from storage.catalog import Table
from storage.errors import DiskFullError
from storage.frame import Frame
from storage.rows import HOUR_MS
from tests.unit.fakes import HOUR, START_MS, Disk, Log
from tests.unit.server.thread_parts import Clock, Loop, fatal
from tests.world.storage.faults import Fault, FaultKind, Faults, FaultyFiles
from tests.world.storage.files import SimulatedFiles

NEXT_MS = START_MS + HOUR_MS


class Replaying:
    def __init__(self, *faults: Fault, archive: bool = False, **settings: Any) -> None:
        self.faults = Faults(*faults, only=["pwrite"])
        self.files = SimulatedFiles()
        self.disk = Disk(FaultyFiles(self.files, self.faults), archive=archive)
        self.loop = Loop()
        self.clock = Clock()
        self.log = Log()
        values = {"checkpoint_ms": 1000, "checkpoint_bytes": 1 << 20, "retention_ms": 0}
        values["file_ms"] = 5000  # no later than a checkpoint
        self.thread = FilerThread(
            self.disk.replay,
            self.clock,
            self.clock.stopwatch,
            self.loop.post,
            self.on_filed,
            self.on_checkpoint,
            self.on_loading,
            fatal,
            FilingRules(**{**values, **settings}),
            self.on_deleted,
        )
        self.deleted: list[int] = []

    def on_deleted(self, hours: list[int]) -> None: ...

    def on_filed(self, filed: Filed) -> None: ...

    def on_checkpoint(self, seq: int) -> None: ...

    def on_loading(self, before: int, snapshots: list[Snapshot]) -> None: ...

    def group(self, due_ms: int = START_MS, **more: Any) -> Group:
        self.log.publish(due_ms, **more)
        return self.log.close()

    def handle(self, *items: FilerItem) -> list[str]:
        """Handle the items; returns the names of what was posted."""
        waiting = list(items)
        self.thread.handle(waiting)
        assert waiting == []
        self.last = self.loop.take()
        for function, *arguments in self.last:
            if function == self.on_deleted:
                self.deleted += arguments[0]
        return [function.__name__ for function, *_ in self.last]


def test_groups_are_filed_together_when_it_is_time() -> None:
    parts = Replaying()
    assert parts.handle(parts.group()) == []
    parts.clock.now_ms += 999
    assert parts.handle(parts.group()) == []
    assert parts.thread.timeout_s() == pytest.approx(0.001)
    parts.clock.now_ms += 1
    assert parts.handle() == ["on_filed", "on_checkpoint"]
    assert parts.last[1][1] == 2
    assert len(list(parts.disk.schedule.scan(HOUR))) == 1
    assert parts.thread.timeout_s() == 1
    parts.clock.now_ms += 1000
    assert parts.handle() == []


@pytest.mark.parametrize("took_ms,next_ms", [(0, 100), (10, 100), (13, 130), (60, 150)])
def test_passes_that_take_long_are_further_apart(
    took_ms: int, next_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Replaying(file_ms=100, checkpoint_ms=10_000)
    file = parts.disk.replay.file

    def slow(*arguments: Any) -> Filed:
        parts.clock.now_ms += took_ms
        return file(*arguments)

    monkeypatch.setattr(parts.disk.replay, "file", slow)
    parts.clock.now_ms += 100
    assert parts.handle(parts.group()) == ["on_filed"]
    parts.clock.now_ms += next_ms - took_ms - 1
    assert parts.thread.timeout_s() == pytest.approx(0.001)
    assert parts.handle(parts.group()) == []
    parts.clock.now_ms += 1
    assert parts.handle() == ["on_filed"]


def test_what_was_filed_waits_for_its_checkpoint() -> None:
    parts = Replaying(file_ms=100, checkpoint_ms=1000)
    assert parts.thread.timeout_s() == 0.1
    posted = []
    for _ in range(20):
        parts.clock.now_ms += 50
        posted.append(parts.handle(parts.group()))
    assert posted[1::2] == [["on_filed"]] * 9 + [["on_filed", "on_checkpoint"]]
    assert posted[::2] == [[]] * 10
    assert parts.last[1][1] == 20
    assert len(list(parts.disk.schedule.scan(HOUR))) == 10


def test_new_names_have_a_checkpoint_when_they_are_filed() -> None:
    parts = Replaying(file_ms=100, checkpoint_ms=1000)
    parts.log.sequencer.subject_id("never.seen")
    parts.handle(parts.group())
    parts.clock.now_ms += 100
    assert parts.handle() == ["on_filed", "on_checkpoint"]
    assert b"never.seen" in dict(parts.disk.catalog.scan(Table.SUBJECTS)).values()
    parts.handle(parts.group())
    parts.clock.now_ms += 100
    assert parts.handle() == ["on_filed"]


def test_many_bytes_that_were_filed_have_a_checkpoint_at_once() -> None:
    parts = Replaying(file_ms=100, checkpoint_ms=100_000, checkpoint_bytes=1000)
    parts.handle(parts.group(body=bytes(600)))
    parts.clock.now_ms += 100
    assert parts.handle() == ["on_filed"]
    assert parts.handle(parts.group(body=bytes(600))) == ["on_filed", "on_checkpoint"]
    assert parts.handle(parts.group(body=bytes(600))) == []


def test_many_bytes_are_filed_at_once() -> None:
    parts = Replaying(checkpoint_bytes=1000)
    assert parts.handle(parts.group()) == []
    assert parts.handle(parts.group(body=bytes(1000))) == ["on_filed", "on_checkpoint"]
    assert parts.handle(parts.group()) == []


def test_what_is_filed_together_is_no_longer_than_a_frame_may_be() -> None:
    parts = Replaying(file_bytes_max=1000)
    groups = [parts.group(body=bytes(length)) for length in (400, 300, 300, 2000, 10)]
    assert parts.handle(*groups) == []
    parts.clock.now_ms += 1000
    assert parts.handle() == ["on_filed"] * 4 + ["on_checkpoint"]
    frames = [one for one in parts.disk.schedule.scan(HOUR) if isinstance(one, Frame)]
    assert [frame.rows["seq"].tolist() for frame in frames] == [[1, 2], [3], [4], [5]]


@pytest.mark.parametrize("set_by_ms", [-HOUR_MS, -500, 500, HOUR_MS])
def test_a_clock_that_is_set_changes_nothing_about_when_checkpoints_are_made(
    set_by_ms: int,
) -> None:
    parts = Replaying()
    parts.clock.set_by_ms = set_by_ms
    assert parts.thread.timeout_s() == 1
    parts.clock.now_ms += 999
    assert parts.handle(parts.group()) == []
    parts.clock.now_ms += 1
    assert parts.handle() == ["on_filed", "on_checkpoint"]


def test_what_came_before_a_load_request_is_filed_first_and_in_the_snapshot() -> None:
    parts = Replaying()
    before, behind = parts.group(), parts.group()
    posted = parts.handle(before, LoadRequest(HOUR), behind)
    assert posted[:2] == ["on_filed", "on_loading"]
    assert parts.last[0][1].live == []
    assert parts.last[1][1:] == (-1, [Snapshot(HOUR, parts.disk.schedule.size(HOUR))])
    parts.clock.now_ms += 1000
    assert parts.handle() == ["on_filed", "on_checkpoint"]
    [(_, rows)] = parts.last[0][1].live
    assert rows["seq"].tolist() == [2]


def test_express_rows_are_filed_and_not_handed_over() -> None:
    parts = Replaying()
    parts.handle(LoadRequest(HOUR))
    parts.handle(parts.group(express=True), parts.group(), CheckpointRequest(lambda: None))
    [(_, rows)] = parts.last[0][1].live
    assert rows["seq"].tolist() == [2]
    assert parts.disk.replay.hours[HOUR].entries == 2


def test_a_checkpoint_on_request_covers_what_came_before() -> None:
    parts = Replaying()

    def done() -> None: ...

    assert parts.handle(parts.group(), CheckpointRequest(done)) == [
        "on_filed",
        "on_checkpoint",
        "done",
    ]
    assert parts.disk.replay.checkpoint_seq == 1
    assert parts.handle(CheckpointRequest(done)) == ["done"]


def test_watch_keys_of_what_is_settled_go_with_the_next_checkpoint() -> None:
    parts = Replaying()
    key = watch_key("user:7", 1)
    parts.disk.catalog.commit({Table.WATCHES: [(key, pack_watch(START_MS, 0))]})
    parts.handle(parts.group(), ForgetRequest([key]))
    assert parts.disk.replay.filed_seq == 0
    parts.handle(CheckpointRequest(lambda: None))
    assert parts.disk.catalog.get(Table.WATCHES, key) is None


def confirmation(parts: Replaying, done: Any) -> FilerCall:
    """A request that confirms an archive of the hour as it is now."""
    state = parts.disk.replay.hours[HOUR]
    extent = extent_of(state, parts.disk.dispatch.size(HOUR))
    archived = Archived(*extent, state.entries, "", "", 0)
    return FilerCall(confirming(HOUR, archived), done)


def test_an_hour_that_is_to_be_archived_is_kept_until_it_was() -> None:
    parts = Replaying(archive=True)

    def done(error: Exception | None) -> None: ...

    parts.handle(parts.group(), CheckpointRequest(lambda: None))
    parts.clock.now_ms = NEXT_MS
    parts.handle(RetireRequest([HOUR], 1))
    assert parts.thread.timeout_s() == 1
    parts.handle(confirmation(parts, done))
    for _ in range(5):
        parts.clock.now_ms += 1000
        parts.handle()
    assert parts.deleted == [HOUR]


def test_what_came_before_a_confirmation_is_filed_before_it_is_looked_at() -> None:
    parts = Replaying(archive=True)

    def done(error: Exception | None) -> None: ...

    parts.handle(parts.group(), CheckpointRequest(lambda: None))
    parts.clock.now_ms = NEXT_MS
    parts.handle(RetireRequest([HOUR], 1))
    parts.handle(parts.group(), confirmation(parts, done))
    [(_, error)] = [posted for posted in parts.last if posted[0] is done]
    assert isinstance(error, ConflictError)
    assert parts.disk.replay.hours[HOUR].entries == 2


def test_a_full_disk_loses_and_doubles_nothing() -> None:
    parts = Replaying(Fault(at=2, kind=FaultKind.NO_SPACE))
    items: list[FilerItem] = [
        parts.group(),
        parts.group(NEXT_MS),
        LoadRequest(HOUR),
        parts.group(),
    ]
    with pytest.raises(DiskFullError):
        parts.thread.handle(items)
    assert parts.loop.take() == []
    assert parts.handle(*items)[:2] == ["on_filed", "on_loading"]
    parts.clock.now_ms += 1000
    parts.handle()
    states = parts.disk.replay.hours
    assert {hour: state.entries for hour, state in states.items()} == {HOUR: 2, HOUR + 1: 1}


def test_retired_hours_are_purged_in_slices_in_between() -> None:
    parts = Replaying()
    parts.handle(parts.group(), CheckpointRequest(lambda: None))
    parts.clock.now_ms = NEXT_MS
    parts.handle(RetireRequest([HOUR], 1))
    assert parts.disk.replay.is_retired(HOUR)
    assert parts.thread.timeout_s() == pytest.approx(0.001)
    for _ in range(5):
        parts.handle()
    assert parts.disk.schedule.buckets() == []
    assert parts.deleted == [HOUR]
    assert parts.thread.timeout_s() == 1


def test_keys_are_merged_in_slices_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Replaying()
    slices = [False, True, True, False]
    monkeypatch.setattr(parts.disk.catalog, "tidy", lambda **_: slices.pop(0))
    for left in (3, 2, 1, 0):
        if left in (3, 2):
            parts.clock.now_ms += 1000  # at a checkpoint
        parts.handle(parts.group())
        assert len(slices) == left
        is_more = left in (2, 1)
        assert parts.thread.timeout_s() == (pytest.approx(0.001) if is_more else 1)
    # There was nothing more to do, so nobody asks before the next checkpoint.
    parts.handle()


def test_at_the_end_everything_is_filed_and_durable() -> None:
    parts = Replaying()
    parts.handle(parts.group())
    parts.thread.close()
    after = Disk(parts.files.crash(), parts.disk.catalog.crash())
    assert after.replay.checkpoint_seq == 1
    assert after.replay.hours[HOUR].entries == 1


def test_a_clock_that_is_set_back_before_a_split_ends_nothing() -> None:
    parts = Replaying()
    far_ms = START_MS + 4 * DAY_MS
    parts.handle(parts.group(due_ms=far_ms), CheckpointRequest(lambda: None))
    assert day_of(far_ms // HOUR_MS) in parts.disk.replay.hours
    day = day_of(far_ms // HOUR_MS)
    parts.clock.set_by_ms = 4 * DAY_MS
    parts.clock.now_ms += 1000
    parts.handle()
    assert parts.thread.timeout_s() == 0.001
    parts.clock.set_by_ms = 0
    parts.handle()
    assert day in parts.disk.replay.hours
    assert parts.thread.timeout_s() == 1
    parts.clock.set_by_ms = 4 * DAY_MS
    for _ in range(3):
        parts.clock.now_ms += 1000
        parts.handle()
        parts.handle()
    assert far_ms // HOUR_MS in parts.disk.replay.hours
