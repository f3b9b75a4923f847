"""Replay: filing, checkpoints that promise what is durable, hours that retire."""

from __future__ import annotations

import pytest

from delayserver.records.message import Payload, encode_payload
from delayserver.records.tables import (
    KEYS_AHEAD_KEY,
    HourState,
    pack_checkpoint,
    read_checkpoint,
    read_hours,
)
from delayserver.schedule.committed import Records
from delayserver.schedule.replay import Snapshot
from delayserver.schedule.wheel_rows import ROUTE_SUBSCRIPTION
from storage.catalog import Table
from storage.errors import DiskFullError
from storage.frame import Rows
from storage.rows import HOUR_MS, NO_KEY
from tests.unit.fakes import HOUR, START_MS, Disk, Log, place_of, records, rows_in
from tests.unit.schedule.samples import END_MS, KEY, NEXT_MS, frames, retired, rows_of
from tests.world.storage.catalog import MemoryCatalog
from tests.world.storage.faults import Fault, FaultKind, Faults, FaultyFiles
from tests.world.storage.files import SimulatedFiles

# ---- filing ----------------------------------------------------------------------------------


def test_records_are_filed_under_their_hours_with_their_payloads(disk: Disk, log: Log) -> None:
    log.publish(NEXT_MS + 5, body=b"next", key_hash=KEY)
    log.publish(START_MS + 5, body=b"this")
    first = log.close()
    log.publish(NEXT_MS + 1, body=b"next again")
    filed = disk.file(first, log.close())
    assert filed.last_seq == disk.replay.filed_seq == 3
    assert filed.live == []
    [frame] = frames(disk, HOUR + 1)
    assert frame.payload_intact
    assert frame.payload is not None
    assert frame.rows["seq"].tolist() == frame.rows["message_seq"].tolist() == [1, 3]
    assert frame.rows["due_ms"].tolist() == [NEXT_MS + 5, NEXT_MS + 1]
    assert [bytes(key) for key in frame.rows["key_hash"]] == [KEY, NO_KEY]
    payloads = [
        frame.payload[offset : offset + length]
        for offset, length in frame.rows[["payload_offset", "payload_length"]].tolist()
    ]
    assert payloads == [encode_payload(Payload(body)) for body in (b"next", b"next again")]
    assert rows_of(disk) == [(2, False)]
    assert disk.replay.hours[HOUR + 1] == HourState(
        frame.end, entries=2, last_entry_seq=3, first_seq=1
    )


def test_removals_are_filed_in_the_hour_of_what_they_remove(disk: Disk, log: Log) -> None:
    log.publish(START_MS)
    log.publish(START_MS)
    log.cancel(1, START_MS)
    log.move(2, START_MS, NEXT_MS)
    disk.file(log.close())
    assert rows_of(disk) == [(1, False), (2, False), (3, True), (4, True)]
    [frame] = frames(disk)
    assert frame.rows["message_seq"][2:].tolist() == [1, 2]
    assert rows_of(disk, HOUR + 1) == [(4, False)]
    assert disk.replay.hours[HOUR] == HourState(frame.end, 2, 2, last_entry_seq=2, first_seq=1)


def test_a_move_within_an_hour_is_a_row_and_a_tombstone(disk: Disk, log: Log) -> None:
    log.publish(START_MS)
    log.move(1, START_MS, START_MS + 5)
    disk.file(log.close())
    assert rows_of(disk) == [(1, False), (2, False), (2, True)]


def test_rows_of_a_frame_are_in_the_order_of_their_seq(disk: Disk, log: Log) -> None:
    log.publish(START_MS)
    log.cancel(1, START_MS)
    log.publish(START_MS + 5, body=b"found")
    disk.file(log.close())
    assert rows_of(disk) == [(1, False), (2, True), (3, False)]
    found = disk.schedule.find(HOUR, 3)
    assert found is not None
    row, offset = found
    body = disk.schedule.read(HOUR, offset, int(row["payload_length"]))
    assert body == encode_payload(Payload(b"found"))


def test_only_rows_of_live_hours_that_are_not_in_the_wheel_are_handed_over(
    disk: Disk, log: Log
) -> None:
    assert disk.replay.snapshot(HOUR) == []
    log.publish(START_MS + 7, body=b"live")
    log.publish(START_MS + 8, express=True)
    log.publish(NEXT_MS)
    retry = log.retry(1, START_MS + 7, START_MS + 9, subscription_id=6)
    [(hour, rows)] = disk.file(log.close()).live
    assert hour == HOUR
    assert rows["seq"].tolist() == [1, retry]
    assert rows["due_offset_ms"].tolist() == [7, 9]
    assert rows["route"].tolist() == [1, 6 | ROUTE_SUBSCRIPTION]
    offset, length = place_of(int(rows["locator"][0]))
    assert disk.schedule.read(HOUR, offset, length) == encode_payload(Payload(b"live"))


def test_no_row_falls_between_the_snapshot_and_the_live_feed(disk: Disk, log: Log) -> None:
    log.publish(START_MS)
    disk.file(log.close())
    assert disk.replay.snapshot(HOUR - 1) == []
    log.publish(START_MS)
    assert disk.file(log.close()).live == []
    [snapshot] = disk.replay.snapshot(HOUR)
    assert snapshot == Snapshot(HOUR, disk.schedule.size(HOUR))
    log.publish(START_MS)
    [(_, rows)] = disk.file(log.close()).live
    assert rows_in(disk.load(snapshot))["seq"].tolist() + rows["seq"].tolist() == [1, 2, 3]
    assert disk.replay.snapshot(HOUR + 5) == []


def test_keys_that_may_have_to_be_taken_out_again_are_not_merged(disk: Disk, log: Log) -> None:
    asked: list[bool] = []

    def tidy(*, if_pressing: bool) -> bool:
        asked.append(True)
        return True

    disk.catalog.tidy = tidy  # type: ignore[method-assign, assignment]
    log.publish(START_MS)
    disk.file(log.close())
    disk.replay.checkpoint()
    assert disk.replay.tidy()
    assert len(asked) == 1
    # A checkpoint that was interrupted: keys of later records stand in the catalog.
    disk.catalog.commit({Table.META: [(KEYS_AHEAD_KEY, pack_checkpoint(5))]})
    assert not disk.replay.tidy()
    assert len(asked) == 1
    disk.catalog.commit({Table.META: [(KEYS_AHEAD_KEY, None)]})
    assert disk.replay.tidy()


def test_nothing_to_file_is_nothing_done(disk: Disk) -> None:
    assert disk.replay.file([], START_MS).last_seq == 0
    assert not disk.replay.is_dirty
    assert disk.schedule.buckets() == []


def test_a_full_disk_in_the_middle_leaves_everything_as_it_was() -> None:
    disk = SimulatedFiles()
    log = Log()
    for hours in (0, 1, 2):
        log.publish(START_MS + hours * HOUR_MS, key_hash=KEY)
    group = log.close()
    faults = Faults(only=["pwrite"])
    parts = Disk(FaultyFiles(disk, faults))
    parts.replay.snapshot(HOUR + 5)
    faults.faults.append(Fault(at=2, kind=FaultKind.NO_SPACE))
    with pytest.raises(DiskFullError):
        parts.file(group)
    assert parts.replay.hours == {}
    assert parts.replay.filed_seq == 0
    assert not parts.replay.is_dirty
    filed = parts.file(group)
    assert [hour for hour, _ in filed.live] == [HOUR, HOUR + 1, HOUR + 2]
    parts.replay.checkpoint()
    reference = Disk()
    reference.file(group)
    for hour in (HOUR, HOUR + 1, HOUR + 2):
        assert parts.schedule.size(hour) == reference.schedule.size(hour)
        assert rows_of(parts, hour) == rows_of(reference, hour)


# ---- checkpoints -----------------------------------------------------------------------------


def test_a_checkpoint_is_durable_as_a_whole(log: Log) -> None:
    files = SimulatedFiles()
    disk = Disk(files)
    log.publish(START_MS, key_hash=KEY)
    disk.file(log.close())
    assert disk.replay.is_dirty
    assert disk.replay.checkpoint() == 1
    assert not disk.replay.is_dirty
    length = disk.schedule.size(HOUR)
    for _ in range(10):
        after = Disk(files.crash(), disk.catalog.crash())
        assert after.replay.checkpoint_seq == after.replay.filed_seq == 1
        assert after.replay.hours == {HOUR: HourState(length, 1, 0, 1, first_seq=1)}
        assert rows_of(after) == [(1, False)]


def test_schedule_files_are_synced_before_the_catalog_speaks_of_them() -> None:
    order: list[str] = []

    class NotingCatalog(MemoryCatalog):
        def commit(self, writes, many=None) -> None:
            order.append("catalog")
            super().commit(writes, many)

    class NotingFaults(Faults):
        def next_fault(self, call, path, *, takes_space=False):
            if call in ("fdatasync", "unlink"):
                order.append(f"{call} {path.partition('/')[0]}")
            return super().next_fault(call, path, takes_space=takes_space)

    disk = Disk(FaultyFiles(SimulatedFiles(), NotingFaults()), NotingCatalog())
    log = Log()
    for _ in range(3):
        log.publish(START_MS, body=bytes(30_000))
        log.publish(START_MS, body=bytes(30_000))
        group = log.close()
        disk.log(group)
        disk.file(group)
    order.clear()
    disk.replay.checkpoint()
    wanted = ["fdatasync schedule", "catalog", "unlink messages"]
    assert [step for step in order if step in wanted] == [*wanted, "unlink messages"]


def test_a_catalog_that_is_full_keeps_what_is_to_be_recorded(log: Log) -> None:
    disk = Disk()
    disk.catalog.faults = Faults(Fault(at=1, kind=FaultKind.NO_SPACE))
    log.publish(START_MS, key_hash=KEY)
    disk.file(log.close())
    with pytest.raises(DiskFullError):
        disk.replay.checkpoint()
    assert disk.replay.is_dirty
    assert disk.replay.checkpoint_seq == 0
    log.publish(NEXT_MS)
    disk.file(log.close())
    assert disk.replay.checkpoint() == read_checkpoint(disk.catalog) == 2
    assert sorted(read_hours(disk.catalog)) == [HOUR, HOUR + 1]
    assert disk.catalog.get(Table.KEYS, KEY) is not None


def test_a_checkpoint_needs_no_room_for_the_next_segment(
    disk: Disk, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> None:
        raise DiskFullError("pwrite", "messages/spare", "no space")

    monkeypatch.setattr(disk.message_log, "prepare_spare", full)
    log.publish(START_MS)
    disk.file(log.close())
    assert disk.replay.checkpoint() == read_checkpoint(disk.catalog) == 1


# ---- hours retire ----------------------------------------------------------------------------


def test_a_retired_hour_is_not_loaded_again(disk: Disk, log: Log) -> None:
    log.publish(START_MS)
    disk.file(log.close())
    disk.replay.checkpoint()
    retired(disk, HOUR, HOUR + 7)
    assert disk.replay.is_retired(HOUR)
    assert not disk.replay.is_retired(HOUR + 7)
    assert disk.replay.is_dirty
    disk.replay.checkpoint()
    after = Disk(disk.files, disk.catalog)
    assert after.replay.hours[HOUR].retired_ms == END_MS
    assert after.replay.snapshot(HOUR) == []


def test_an_hour_is_not_retired_over_a_message_that_came_meanwhile(disk: Disk, log: Log) -> None:
    for _ in range(2):
        log.publish(START_MS)
        disk.file(log.close())
    retired(disk, HOUR, through_seq=1)
    assert not disk.replay.is_retired(HOUR)
    retired(disk, HOUR, through_seq=2)
    assert disk.replay.is_retired(HOUR)


def test_a_retired_hour_that_gets_a_message_is_open_again(disk: Disk, log: Log) -> None:
    log.publish(START_MS)
    disk.file(log.close())
    retired(disk, HOUR)
    log.cancel(1, START_MS)
    disk.file(log.close())
    assert disk.replay.is_retired(HOUR)
    log.publish(START_MS)
    disk.file(log.close())
    assert not disk.replay.is_retired(HOUR)
    assert [snapshot.hour for snapshot in disk.replay.snapshot(HOUR)] == [HOUR]


def test_records_that_lost_some_rows_to_damage_are_filed(disk: Disk, log: Log) -> None:
    for body in (b"one", b"two", b"three"):
        log.publish(START_MS, body=body)
    whole = records(log.close())
    rows: Rows = whole.rows[[0, 2]]
    disk.replay.file([Records(rows, whole.payload)], START_MS)
    [frame] = frames(disk)
    assert frame.payload == b"".join(encode_payload(Payload(body)) for body in (b"one", b"three"))
