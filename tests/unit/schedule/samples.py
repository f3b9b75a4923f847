"""An hour as tests of the schedule need it, and what is to be seen of it on the disk."""

from __future__ import annotations

from delayserver.records.tables import Change, change_key, unpack_change
from storage.catalog import Table
from storage.frame import Frame
from storage.rows import FLAG_REMOVAL, HOUR_MS
from tests.unit.fakes import HOUR, START_MS, Disk, Log, dispatch_row

KEY = bytes(range(16))
NEXT_MS = START_MS + HOUR_MS
END_MS = NEXT_MS
DAY_MS = 24 * HOUR_MS


def frames(disk: Disk, hour: int = HOUR) -> list[Frame]:
    found = list(disk.schedule.scan(hour, payload=True))
    assert all(isinstance(one, Frame) for one in found), found
    return [one for one in found if isinstance(one, Frame)]


def rows_of(disk: Disk, hour: int = HOUR) -> list[tuple[int, bool]]:
    """Seq of every row of an hour's file, and whether it is a tombstone."""
    return [
        (int(row["seq"]), bool(row["flags"] & FLAG_REMOVAL))
        for frame in frames(disk, hour)
        for row in frame.rows
    ]


def change_of(disk: Disk, message_seq: int, subscription_id: int = 0) -> Change | None:
    value = disk.catalog.get(Table.CHANGES, change_key(message_seq, subscription_id))
    return None if value is None else unpack_change(value)


def retired(disk: Disk, *hours: int, through_seq: int | None = None) -> None:
    for hour in hours:
        seq = disk.replay.filed_seq if through_seq is None else through_seq
        disk.replay.retire(hour, seq, END_MS)


def settled_hour(disk: Disk, log: Log) -> None:
    """An hour of three messages, one of them cancelled, one moved to the next hour."""
    log.publish(START_MS, key_hash=KEY)
    log.publish(START_MS, key_hash=bytes([2] * 16))
    log.publish(START_MS, key_hash=bytes([3] * 16))
    log.cancel(2, START_MS)
    log.move(3, START_MS, NEXT_MS, key_hash=bytes([3] * 16))
    disk.file(log.close())
    disk.replay.checkpoint()
    disk.settle(HOUR, dispatch_row(1))
    retired(disk, HOUR)


def purge(disk: Disk, now_ms: int, retention_ms: int = DAY_MS) -> int:
    """Purge until nothing is left to do; returns the number of slices."""
    slices = 0
    while disk.replay.purge(now_ms, retention_ms):
        slices += 1
        assert slices < 100
    return slices
