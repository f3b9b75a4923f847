"""Days: what is far is filed by day, and a day becomes its hours before it comes near."""

from __future__ import annotations

import pytest

from delayserver.records.message import Payload, ScheduleEntry, encode_payload
from delayserver.records.tables import read_hour, read_hours
from delayserver.schedule.days import NEAR_MS, Days
from storage.buckets import DAY_MS, day_of, hours_of, start_ms
from storage.errors import DiskFullError
from storage.frame import Frame
from storage.hour_log import SET_ASIDE
from storage.rows import HOUR_MS
from tests.unit.fakes import HOUR, START_MS, Disk, Log
from tests.unit.schedule.samples import rows_of
from tests.world.storage.faults import Fault, FaultKind, Faults, FaultyFiles, Moment
from tests.world.storage.files import SimulatedFiles

DAY = day_of(HOUR) + 4
FAR_MS = start_ms(DAY)
FAR_HOUR = hours_of(DAY)[0]
NEAR_NOW_MS = FAR_MS - NEAR_MS


def split(disk: Disk, now_ms: int = NEAR_NOW_MS) -> int:
    """Split until nothing is left to do; returns the number of slices."""
    slices = 0
    while disk.replay.must_split(disk.replay.near_hour(now_ms)):
        step(disk, now_ms)
        slices += 1
    return slices


def step(disk: Disk, now_ms: int = NEAR_NOW_MS) -> None:
    disk.replay.split(disk.replay.near_hour(now_ms), now_ms)


def restarted(disk: Disk) -> Disk:
    assert isinstance(disk.files, SimulatedFiles)
    after = Disk(disk.files.kill(), disk.catalog.crash())
    after.recover()
    return after


# ---- where rows are filed --------------------------------------------------------------------


def test_what_is_far_is_filed_by_day_and_what_is_near_by_hour(disk: Disk, log: Log) -> None:
    log.publish(START_MS, body=b"near")
    log.publish(FAR_MS + 5, body=b"far")
    log.publish(FAR_MS + 7 * HOUR_MS, body=b"the same day")
    log.publish(FAR_MS + 3 * DAY_MS)
    log.cancel(3, FAR_MS + 7 * HOUR_MS)
    disk.file(log.close())
    assert sorted(disk.schedule.buckets()) == [HOUR, DAY, DAY + 3]
    assert rows_of(disk, DAY) == [(2, False), (3, False), (5, True)]
    state = disk.replay.hours[DAY]
    assert (state.entries, state.removals, state.first_seq) == (2, 1, 2)
    assert state.by_hour == (1, *[0] * 23)
    assert disk.replay.hours[HOUR].by_hour == ()
    disk.replay.checkpoint()
    assert read_hours(disk.catalog) == disk.replay.hours
    assert read_hour(disk.catalog, FAR_HOUR + 5) == state


def test_counts_by_hour_add_up(disk: Disk, log: Log) -> None:
    for hour in (0, 0, 23):
        log.publish(FAR_MS + hour * HOUR_MS)
        disk.file(log.close())
    log.cancel(1, FAR_MS)
    disk.file(log.close())
    assert disk.replay.hours[DAY].by_hour == (1, *[0] * 22, 1)


def test_the_boundary_is_the_end_of_the_day_that_is_near(disk: Disk, log: Log) -> None:
    end_ms = start_ms(day_of((START_MS + NEAR_MS) // HOUR_MS) + 1)
    log.publish(end_ms - 1)
    log.publish(end_ms)
    disk.file(log.close())
    assert sorted(disk.schedule.buckets()) == [(end_ms - 1) // HOUR_MS, day_of(end_ms // HOUR_MS)]


def test_a_day_of_which_hours_are_filed_goes_on_by_the_hour(disk: Disk, log: Log) -> None:
    """Those of a server that knew no days, or of a clock that was ahead and was set back."""
    log.publish(FAR_MS)
    disk.file(log.close(), now_ms=FAR_MS)
    log.publish(FAR_MS + HOUR_MS)
    disk.file(log.close(), now_ms=START_MS)
    assert sorted(disk.schedule.buckets()) == [FAR_HOUR, FAR_HOUR + 1]


def test_a_day_that_has_a_file_gets_all_of_its_rows_until_it_is_split(disk: Disk, log: Log) -> None:
    log.publish(FAR_MS)
    disk.file(log.close())
    log.publish(FAR_MS + HOUR_MS)
    disk.file(log.close(), now_ms=FAR_MS)
    assert rows_of(disk, DAY) == [(1, False), (2, False)]
    assert disk.schedule.buckets() == [DAY]


# ---- the split -------------------------------------------------------------------------------


def test_a_day_becomes_its_hours(disk: Disk, log: Log) -> None:
    log.publish(FAR_MS + 5, body=b"first")
    log.publish(FAR_MS + HOUR_MS, body=b"next hour")
    disk.file(log.close())
    log.publish(FAR_MS + 6, body=b"second")
    log.cancel(1, FAR_MS + 5)
    log.move(2, FAR_MS + HOUR_MS, FAR_MS + 2 * HOUR_MS)
    disk.file(log.close())
    disk.replay.checkpoint()
    assert not disk.replay.must_split(disk.replay.near_hour(NEAR_NOW_MS - 1))
    assert split(disk) == 1
    assert DAY not in disk.replay.hours
    log.publish(FAR_MS + 7)
    disk.file(log.close(), now_ms=NEAR_NOW_MS)
    assert sorted(disk.schedule.buckets()) == [FAR_HOUR, FAR_HOUR + 1, FAR_HOUR + 2]
    assert rows_of(disk, FAR_HOUR) == [(1, False), (3, False), (4, True), (6, False)]
    assert rows_of(disk, FAR_HOUR + 1) == [(2, False), (5, True)]
    state = disk.replay.hours[FAR_HOUR]
    assert (state.entries, state.removals, state.last_entry_seq, state.first_seq) == (3, 1, 6, 1)
    for seq, hour, body in ((3, FAR_HOUR, b"second"), (5, FAR_HOUR + 2, None)):
        found = disk.schedule.find(hour, seq)
        assert found is not None
        row, offset = found
        sealed = disk.schedule.read(hour, offset, int(row["payload_length"]))
        assert body is None or sealed == encode_payload(Payload(body))
    disk.replay.checkpoint()
    assert read_hours(disk.catalog) == disk.replay.hours


def test_a_split_goes_slice_by_slice_and_takes_along_what_is_filed_meanwhile(
    disk: Disk, log: Log
) -> None:
    disk.replay._days = Days(disk.schedule, disk.replay.hours, slice_bytes=1)
    for _ in range(3):
        log.publish(FAR_MS)
        disk.file(log.close())
    step(disk)
    assert rows_of(disk, FAR_HOUR) == [(1, False)]
    assert FAR_HOUR not in disk.replay.hours  # not before all of it is there
    log.publish(FAR_MS)
    disk.file(log.close(), now_ms=NEAR_NOW_MS)
    disk.replay.checkpoint()
    assert read_hours(disk.catalog).keys() == {DAY}
    assert split(disk) == 3
    assert rows_of(disk, FAR_HOUR) == [(seq, False) for seq in (1, 2, 3, 4)]


def test_a_split_that_a_crash_has_ended_begins_anew(disk: Disk, log: Log) -> None:
    disk.replay._days = Days(disk.schedule, disk.replay.hours, slice_bytes=1)
    for _ in range(3):
        log.publish(FAR_MS)
        disk.file(log.close())
    step(disk)
    disk.replay.checkpoint()  # makes what was copied durable, and does not count it
    after = restarted(disk)
    assert sorted(after.schedule.buckets()) == [DAY]
    assert split(after) == 1
    assert rows_of(after, FAR_HOUR) == [(1, False), (2, False), (3, False)]


def test_after_a_crash_behind_the_checkpoint_the_day_is_gone(disk: Disk, log: Log) -> None:
    log.publish(FAR_MS)
    disk.file(log.close())
    split(disk)
    disk.replay.checkpoint()
    assert DAY in disk.schedule.buckets()
    after = restarted(disk)
    assert after.schedule.buckets() == [FAR_HOUR]
    assert rows_of(after, FAR_HOUR) == [(1, False)]


def test_a_start_splits_the_days_that_are_due(disk: Disk, log: Log) -> None:
    """The server was down for days, or the clock was set ahead."""
    group = None
    for due_ms in (FAR_MS, FAR_MS + DAY_MS, FAR_MS + 9 * DAY_MS):
        log.publish(due_ms)
        group = log.close()
        disk.log(group)
        disk.file(group)
    disk.replay.checkpoint()
    after = Disk(disk.files, disk.catalog)
    recovered = after.recover(now_ms=FAR_MS + DAY_MS + 5)
    assert [hour.hour for hour in recovered.loaded] == [FAR_HOUR, FAR_HOUR + 24]
    assert [hour.count for hour in recovered.loaded] == [1, 1]
    assert sorted(after.schedule.buckets()) == [FAR_HOUR, FAR_HOUR + 24, DAY + 9]


def test_hours_are_not_live_before_their_day_is_split(disk: Disk, log: Log) -> None:
    log.publish(FAR_MS)
    disk.file(log.close())
    with pytest.raises(AssertionError):
        disk.replay.snapshot(FAR_HOUR)


def test_a_full_disk_in_the_middle_of_a_slice_leaves_everything_as_it_was(log: Log) -> None:
    faults = Faults()
    disk = Disk(FaultyFiles(SimulatedFiles(), faults))
    for hour in (0, 1, 2):
        log.publish(FAR_MS + hour * HOUR_MS)
    disk.file(log.close())
    disk.replay.checkpoint()
    before = dict(disk.replay.hours)
    # Of the three files of hours the second cannot be made.
    faults.faults[:] = [Fault(faults.call_count + 5, FaultKind.NO_SPACE, Moment.BEFORE)]
    with pytest.raises(DiskFullError):
        split(disk)
    assert disk.replay.hours == before
    faults.faults.clear()
    split(disk)
    assert [rows_of(disk, hour) for hour in hours_of(DAY)[:3]] == [
        [(1, False)],
        [(2, False)],
        [(3, False)],
    ]


def test_hours_are_loaded_while_a_later_day_is_split(disk: Disk, log: Log) -> None:
    disk.replay._days = Days(disk.schedule, disk.replay.hours, slice_bytes=1)
    log.publish(START_MS)
    for _ in range(2):
        log.publish(FAR_MS)
        disk.file(log.close())
    step(disk)
    assert not disk.replay.must_split(HOUR)
    assert [one.hour for one in disk.replay.snapshot(HOUR)] == [HOUR]


def test_an_earlier_day_that_a_clock_which_was_set_back_has_brought_goes_first(
    disk: Disk, log: Log
) -> None:
    disk.replay._days = Days(disk.schedule, disk.replay.hours, slice_bytes=1)
    for _ in range(3):
        log.publish(FAR_MS)
        disk.file(log.close())
    step(disk)
    log.publish(FAR_MS - DAY_MS)
    disk.file(log.close(), now_ms=START_MS)
    assert disk.replay.hours.keys() == {DAY, DAY - 1}
    step(disk)
    assert disk.replay.hours.keys() == {DAY, FAR_HOUR - 24}
    split(disk)
    assert rows_of(disk, FAR_HOUR) == [(1, False), (2, False), (3, False)]
    assert rows_of(disk, FAR_HOUR - 24) == [(4, False)]


# ---- who looks meanwhile ---------------------------------------------------------------------


def test_a_row_is_found_in_its_day_in_its_hour_and_in_between(disk: Disk, log: Log) -> None:
    disk.replay._days = Days(disk.schedule, disk.replay.hours, slice_bytes=1)
    for body in (b"one", b"two"):
        log.publish(FAR_MS, body=body)
        disk.file(log.close())

    def bodies() -> list[bytes]:
        found = [disk.reader.find(ScheduleEntry(seq, FAR_MS)) for seq in (1, 2)]
        return [one.payload.body for one in found if one is not None]

    assert bodies() == [b"one", b"two"]
    step(disk)
    assert bodies() == [b"one", b"two"]
    split(disk)
    assert bodies() == [b"one", b"two"]
    disk.replay.purging.finish()
    assert DAY not in disk.schedule.buckets()
    assert bodies() == [b"one", b"two"]  # from what the reader has open
    for day in disk.replay.purging.deleted_hours:
        disk.reader.release(day)
    assert bodies() == [b"one", b"two"]
    assert disk.damage == []


# ---- damage ----------------------------------------------------------------------------------


def test_a_damaged_day_is_set_aside_and_the_rest_of_it_is_in_its_hours(
    disk: Disk, log: Log
) -> None:
    assert isinstance(disk.files, SimulatedFiles)
    for body in (b"one", b"two", b"three"):
        log.publish(FAR_MS, body=body)
        disk.file(log.close())
    disk.replay.checkpoint()
    path = disk.schedule.path(DAY)
    frames = [one for one in disk.schedule.scan(DAY) if isinstance(one, Frame)]
    disk.files.open(path).pwrite([b"\xff"], frames[1].offset + 70)
    split(disk)
    disk.replay.purging.finish()
    assert rows_of(disk, FAR_HOUR) == [(1, False), (3, False)]
    assert disk.files.exists(path + SET_ASIDE)
    assert disk.schedule.buckets() == [FAR_HOUR]
    after = restarted(disk)
    assert after.files.exists(path + SET_ASIDE)


def test_a_damaged_payload_costs_its_row(disk: Disk, log: Log) -> None:
    for body in (b"one", b"two", b"three"):
        log.publish(FAR_MS, body=body)
    disk.file(log.close())
    [frame] = [one for one in disk.schedule.scan(DAY) if isinstance(one, Frame)]
    start = frame.payload_start + int(frame.rows["payload_offset"][1])
    disk.files.open(disk.schedule.path(DAY)).pwrite([b"\xff"], start + 6)
    split(disk)
    disk.replay.checkpoint()
    assert rows_of(disk, FAR_HOUR) == [(1, False), (3, False)]
    found = disk.reader.find(ScheduleEntry(3, FAR_MS))
    assert found is not None and found.payload.body == b"three"
