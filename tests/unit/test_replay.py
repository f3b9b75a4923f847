"""Replay: filing, checkpoints that promise what is durable, hours that retire and are purged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayserver import replay as replay_module
from delayserver.archives import Archived, extent_of, read_archived, retired_hours
from delayserver.errors import ConflictError, NotFoundError
from delayserver.message import Origin, Payload, encode_payload
from delayserver.replay import DeadLetter, Records, Snapshot, content_digests
from delayserver.sequencer import (
    Group,
    KeyEntry,
    dead_letter_key,
    parse_dead_letter_key,
    unpack_key_entry,
)
from delayserver.subscriptions import encode_subscription
from delayserver.tables import (
    Change,
    ChangeState,
    HourState,
    change_key,
    read_checkpoint,
    read_hours,
    read_keys_ahead,
    unpack_change,
)
from delayserver.watches import OnEvent, pack_watch, watch_key
from delayserver.wheel import ROUTE_SUBSCRIPTION, unpack_locator
from storage.catalog import ManyWrites, Table, Writes
from storage.errors import DamageError, DiskFullError
from storage.frame import Damage, Frame, Rows, seal
from storage.rows import FLAG_REMOVAL, HOUR_MS, NO_KEY, SCHEDULE_DTYPE, RecordKind
from storage.testing import (
    Fault,
    FaultKind,
    Faults,
    FaultyFiles,
    MemoryCatalog,
    SimulatedFiles,
)
from tests.unit.fakes import HOUR, START_MS, Disk, Log, dispatch_row, records, subscription

KEY = bytes(range(16))
NEXT_MS = START_MS + HOUR_MS
END_MS = NEXT_MS
DAY_MS = 24 * HOUR_MS


def dead_letter(reason: str) -> bytes:
    """As it stands in the catalog."""
    payload = Payload(b"{}", origin=Origin(1, START_MS, 1, START_MS))
    return msgspec.msgpack.encode(DeadLetter(reason, START_MS, 9, encode_payload(payload)))


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def log() -> Log:
    return Log()


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
    offset, length = unpack_locator(int(rows["locator"][0]))
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
    assert disk.load(snapshot).run.rows["seq"].tolist() + rows["seq"].tolist() == [1, 2, 3]
    assert disk.replay.snapshot(HOUR + 5) == []


def test_nothing_to_file_is_nothing_done(disk: Disk) -> None:
    assert disk.replay.file([], START_MS).last_seq == 0
    assert not disk.replay.is_dirty
    assert disk.schedule.hours() == []


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


# ---- effects ---------------------------------------------------------------------------------


def change_of(disk: Disk, message_seq: int, subscription_id: int = 0) -> Change | None:
    value = disk.catalog.get(Table.CHANGES, change_key(message_seq, subscription_id))
    return None if value is None else unpack_change(value)


def test_the_newest_publish_of_a_key_is_the_one_in_the_catalog(disk: Disk, log: Log) -> None:
    log.publish(START_MS, key_hash=KEY)
    log.publish(NEXT_MS, key_hash=KEY, body=b"newer")
    log.publish(NEXT_MS)
    group = log.close()
    disk.file(group)
    disk.replay.checkpoint()
    value = disk.catalog.get(Table.KEYS, KEY)
    assert value is not None
    rows = records(group).rows
    assert unpack_key_entry(value) == KeyEntry(2, NEXT_MS, int(content_digests(rows)[1]))
    assert len(list(disk.catalog.scan(Table.KEYS))) == 1


def test_every_kind_of_change_is_in_the_catalog(disk: Disk, log: Log) -> None:
    for _ in range(4):
        log.publish(START_MS)
    log.cancel(1, START_MS)
    move = log.move(2, START_MS, NEXT_MS)
    retry = log.retry(3, START_MS, NEXT_MS, subscription_id=6)
    letter = dead_letter("gone")
    dead: dict[str, Any] = {"message_seq": 4, "target_seq": 4, "subscription_id": 6, "attempt": 9}
    log.sequencer.append(
        RecordKind.DEAD, target_due_ms=START_MS, subject_id=1, payload=seal(letter), **dead
    )
    disk.file(log.close())
    disk.replay.checkpoint()
    assert change_of(disk, 1) == Change(ChangeState.CANCELLED, 1, START_MS, 0, 0)
    assert change_of(disk, 2) == Change(ChangeState.MOVED, move, NEXT_MS, 0, 1)
    assert change_of(disk, 3, 6) == Change(ChangeState.RETRYING, retry, NEXT_MS, 2, 1)
    assert change_of(disk, 4, 6) == Change(ChangeState.DEAD, 4, START_MS, 9, 1)
    assert list(disk.catalog.scan(Table.DEAD_LETTERS)) == [(dead_letter_key(6, 4), letter)]


def test_a_cancel_is_the_last_word_on_a_message(disk: Disk, log: Log) -> None:
    for _ in range(3):
        log.publish(START_MS)
    first = log.move(1, START_MS, NEXT_MS)
    second = log.move(2, START_MS, NEXT_MS)
    log.cancel(first, NEXT_MS, message_seq=1)
    log.cancel(3, START_MS)
    watched = log.sequencer.append(
        RecordKind.CANCEL,
        message_seq=2,
        target_seq=second,
        target_due_ms=NEXT_MS,
        payload=seal(b"event"),
    )
    disk.catalog.commit(
        {Table.WATCHES: [(watch_key("event", 2), pack_watch(START_MS, OnEvent.CANCEL))]}
    )
    disk.file(log.close())
    disk.replay.checkpoint()
    assert watched == 8
    assert change_of(disk, 1) == Change(ChangeState.CANCELLED, first, NEXT_MS, 0, 0)
    assert change_of(disk, 2) == Change(ChangeState.CANCELLED, second, NEXT_MS, 0, 0)
    assert change_of(disk, 3) == Change(ChangeState.CANCELLED, 3, START_MS, 0, 0)
    assert list(disk.catalog.scan(Table.WATCHES)) == []


@pytest.mark.parametrize("kind", [RecordKind.REDRIVE, RecordKind.DISCARD])
def test_a_dead_letter_is_redriven_or_discarded_once(
    disk: Disk, log: Log, kind: RecordKind
) -> None:
    log.publish(START_MS)
    which: dict[str, Any] = {
        "message_seq": 1,
        "target_seq": 1,
        "subject_id": 1,
        "subscription_id": 6,
    }
    letter = seal(dead_letter("gone"))
    log.sequencer.append(RecordKind.DEAD, target_due_ms=START_MS, payload=letter, **which)
    disk.file(log.close())
    disk.replay.checkpoint()
    assert disk.catalog.get(Table.DEAD_LETTERS, dead_letter_key(6, 1)) is not None
    again = log.sequencer.append(
        kind, due_ms=NEXT_MS, payload=encode_payload(Payload(b"{}")), attempt=1, **which
    )
    disk.file(log.close())
    disk.replay.checkpoint()
    assert disk.catalog.get(Table.DEAD_LETTERS, dead_letter_key(6, 1)) is None
    if kind is RecordKind.REDRIVE:
        assert rows_of(disk, HOUR + 1) == [(again, False)]
        change = change_of(disk, 1, 6)
        assert change is not None
        assert (change.state, change.entry_seq) == (ChangeState.RETRYING, again)


def test_subjects_and_subscriptions_are_in_the_catalog(disk: Disk) -> None:
    log = Log(subjects=[])
    log.sequencer.subject_id("order.paid")
    old, new = (encode_subscription(subscription(3, paused=paused)) for paused in (True, False))
    log.sequencer.append(RecordKind.SUBSCRIPTION, subscription_id=3, payload=seal(old))
    log.sequencer.append(RecordKind.SUBSCRIPTION, subscription_id=3, payload=seal(new))
    disk.file(log.close())
    disk.replay.checkpoint()
    assert list(disk.catalog.scan(Table.SUBJECTS)) == [((1).to_bytes(4, "big"), b"order.paid")]
    assert list(disk.catalog.scan(Table.SUBSCRIPTIONS)) == [((3).to_bytes(4, "big"), new)]
    assert disk.schedule.hours() == []


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


class Commits(MemoryCatalog):
    """Which tables each transaction wrote to; the one with that number fails once."""

    def __init__(self, *, fails_at: int = -1) -> None:
        super().__init__()
        self.tables: list[set[Table]] = []
        self.fails_at = fails_at

    def commit(self, writes: Writes, many: ManyWrites | None = None) -> None:
        if len(self.tables) == self.fails_at:
            self.fails_at = -1
            raise DiskFullError("commit", "catalog", "full")
        written = {table for table, pairs in writes.items() if pairs}
        self.tables.append(written | {table for table, parts in (many or {}).items() if parts})
        super().commit(writes, many)


def keyed(log: Log, count: int, first: int = 0) -> Group:
    for number in range(first, first + count):
        log.publish(START_MS, key_hash=key_of(number))
    return log.close()


def key_of(number: int) -> bytes:
    """Not in the order of the numbers."""
    return (number * 71 % 256 + 1).to_bytes(16, "big")


def seqs_by_key(catalog: MemoryCatalog) -> dict[bytes, int]:
    return {key: unpack_key_entry(value).seq for key, value in catalog.scan(Table.KEYS)}


@pytest.mark.parametrize("fails_at", range(5))
def test_many_keys_are_recorded_piece_by_piece_and_the_checkpoint_last(
    log: Log, fails_at: int
) -> None:
    disk = Disk(catalog=(catalog := Commits(fails_at=fails_at)))
    disk.replay.keys_slice = 3
    disk.file(keyed(log, 10))
    if fails_at < 4:
        with pytest.raises(DiskFullError):
            disk.replay.checkpoint()
        assert read_checkpoint(catalog) == 0
        assert read_keys_ahead(catalog) == (10 if fails_at else 0)
        assert len(seqs_by_key(catalog)) == 3 * fails_at
        # What is filed meanwhile goes along.
        disk.file(keyed(log, 2, first=10))
    disk.replay.checkpoint()
    count = 10 if fails_at == 4 else 12
    assert read_checkpoint(catalog) == count
    assert read_keys_ahead(catalog) == 0
    assert seqs_by_key(catalog) == {key_of(number): number + 1 for number in range(count)}
    ahead = {Table.META, Table.KEYS}
    assert catalog.tables[0] == ahead
    assert all(tables <= ahead for tables in catalog.tables[:-1])
    assert catalog.tables[-1] == {Table.META, Table.KEYS, Table.HOURS}


def test_few_keys_are_recorded_with_the_checkpoint(log: Log) -> None:
    disk = Disk(catalog=(catalog := Commits()))
    disk.replay.keys_slice = 3
    disk.file(keyed(log, 3))
    disk.replay.checkpoint()
    assert catalog.tables == [{Table.META, Table.KEYS, Table.HOURS}]


def test_a_key_that_is_removed_and_used_again_stays(log: Log) -> None:
    disk = Disk()
    disk.replay.keys_slice = 1
    disk.file(keyed(log, 3))
    disk.replay.checkpoint()
    disk.replay._writes[Table.KEYS] += [(key, None) for key, _ in disk.catalog.scan(Table.KEYS)]
    disk.file(keyed(log, 2))
    disk.replay.checkpoint()
    assert seqs_by_key(disk.catalog) == {key_of(0): 4, key_of(1): 5}


def test_what_is_removed_goes_also_when_few_keys_came_often(log: Log) -> None:
    disk = Disk()
    disk.replay.keys_slice = 1
    disk.file(keyed(log, 2))
    disk.replay.checkpoint()
    disk.replay._writes[Table.KEYS].append((key_of(0), None))
    for _ in range(2):
        disk.file(keyed(log, 1, first=5))
    disk.replay.checkpoint()
    assert seqs_by_key(disk.catalog) == {key_of(1): 2, key_of(5): 4}


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


def retired(disk: Disk, *hours: int, through_seq: int | None = None) -> None:
    for hour in hours:
        seq = disk.replay.filed_seq if through_seq is None else through_seq
        disk.replay.retire(hour, seq, END_MS)


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


# ---- purge -----------------------------------------------------------------------------------


def purge(disk: Disk, now_ms: int, retention_ms: int = DAY_MS) -> int:
    """Purge until nothing is left to do; returns the number of slices."""
    slices = 0
    while disk.replay.purge(now_ms, retention_ms):
        slices += 1
        assert slices < 100
    return slices


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


def test_an_hour_is_kept_for_its_retention(disk: Disk, log: Log) -> None:
    settled_hour(disk, log)
    assert purge(disk, END_MS + DAY_MS - 1) == 0
    assert disk.schedule.hours() == [HOUR, HOUR + 1]
    purge(disk, END_MS + DAY_MS)
    assert disk.schedule.hours() == [HOUR + 1]
    assert disk.dispatch.hours() == []
    assert HOUR not in disk.replay.hours
    assert list(read_hours(disk.catalog)) == [HOUR + 1]


def test_an_hour_with_unsettled_messages_is_kept_for_good(disk: Disk, log: Log) -> None:
    log.publish(START_MS)
    disk.file(log.close())
    assert purge(disk, END_MS + 1000 * DAY_MS) == 0
    assert disk.schedule.hours() == [HOUR]


def test_a_purge_takes_the_index_entries_of_what_is_gone_and_of_nothing_else(
    disk: Disk, log: Log
) -> None:
    settled_hour(disk, log)
    purge(disk, END_MS + DAY_MS)
    assert [key for key, _ in disk.catalog.scan(Table.KEYS)] == [bytes([3] * 16)]
    assert change_of(disk, 2) is None
    moved = change_of(disk, 3)
    assert moved is not None
    assert moved.entry_seq == 5
    # When the message is gone from its new hour too, so are its key and its change.
    retired(disk, HOUR + 1)
    purge(disk, NEXT_MS + HOUR_MS + DAY_MS)
    assert list(disk.catalog.scan(Table.CHANGES)) == []
    assert list(disk.catalog.scan(Table.KEYS)) == []
    assert disk.schedule.hours() == []


def test_a_message_that_was_moved_to_an_earlier_hour_is_known_until_both_are_gone(
    disk: Disk, log: Log
) -> None:
    log.publish(NEXT_MS, key_hash=KEY)
    log.move(1, NEXT_MS, START_MS, key_hash=KEY)
    disk.file(log.close())
    disk.replay.checkpoint()
    retired(disk, HOUR)
    purge(disk, END_MS + DAY_MS)
    assert disk.schedule.hours() == [HOUR + 1]
    assert change_of(disk, 1) is not None
    assert disk.catalog.get(Table.KEYS, KEY) is not None
    retired(disk, HOUR + 1)
    purge(disk, NEXT_MS + HOUR_MS + DAY_MS)
    assert list(disk.catalog.scan(Table.CHANGES)) == []
    assert list(disk.catalog.scan(Table.KEYS)) == []


def test_an_hour_that_was_deleted_and_came_back_holds_no_message_of_before(
    disk: Disk, log: Log
) -> None:
    """The clock was set back in between."""
    log.publish(START_MS, key_hash=KEY)
    log.move(1, START_MS, NEXT_MS, key_hash=KEY)
    disk.file(log.close())
    disk.replay.checkpoint()
    retired(disk, HOUR + 1)
    purge(disk, NEXT_MS + HOUR_MS + DAY_MS)
    assert disk.schedule.hours() == [HOUR]
    log.publish(NEXT_MS)
    disk.file(log.close())
    log.publish(NEXT_MS)
    disk.file(log.close())
    assert disk.replay.hours[HOUR + 1].first_seq == 3
    retired(disk, HOUR)
    purge(disk, END_MS + DAY_MS)
    assert disk.schedule.hours() == [HOUR + 1]
    assert list(disk.catalog.scan(Table.CHANGES)) == []
    assert list(disk.catalog.scan(Table.KEYS)) == []


def test_a_key_that_was_used_again_is_not_purged(disk: Disk, log: Log) -> None:
    log.publish(START_MS, key_hash=KEY)
    log.publish(NEXT_MS, key_hash=KEY)
    disk.file(log.close())
    disk.replay.checkpoint()
    retired(disk, HOUR)
    purge(disk, END_MS + DAY_MS)
    value = disk.catalog.get(Table.KEYS, KEY)
    assert value is not None
    assert unpack_key_entry(value).seq == 2


def test_a_key_that_was_used_again_and_is_not_in_the_catalog_yet_is_not_purged(
    disk: Disk, log: Log
) -> None:
    log.publish(START_MS, key_hash=KEY)
    disk.file(log.close())
    disk.replay.checkpoint()
    retired(disk, HOUR)
    log.publish(NEXT_MS, key_hash=KEY)
    disk.file(log.close())
    purge(disk, END_MS + DAY_MS)
    assert disk.schedule.hours() == [HOUR + 1]
    assert disk.catalog.get(Table.KEYS, KEY) is not None


def test_a_purge_goes_on_behind_a_damaged_entry(
    disk: Disk, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the server would end, start, and come to the same entry again."""
    settled_hour(disk, log)
    read = disk.catalog.scan

    def scan(table: Table, *start: bytes, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        if table is Table.CHANGES and prefix:
            raise DamageError("catalog/data.mdb", 0, "an entry does not match its checksum")
        return read(table, *start, prefix=prefix)

    monkeypatch.setattr(disk.catalog, "scan", scan)
    purge(disk, END_MS + DAY_MS)
    assert disk.schedule.hours() == [HOUR + 1]
    assert [b"an entry does not match" in value for _, value in read(Table.DAMAGE)] == [True]


def test_a_purge_goes_on_in_slices(disk: Disk, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_module, "PURGE_ROWS", 2)
    for number in range(5):
        log.publish(START_MS, key_hash=bytes([number] * 16))
    disk.file(log.close())
    disk.replay.checkpoint()
    retired(disk, HOUR)
    assert purge(disk, END_MS + DAY_MS) >= 3
    assert list(disk.catalog.scan(Table.KEYS)) == []


def test_a_purge_stops_when_its_hour_gets_a_message(
    disk: Disk, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_module, "PURGE_ROWS", 1)
    log.publish(START_MS)
    log.publish(START_MS)
    disk.file(log.close())
    retired(disk, HOUR)
    assert disk.replay.purge(END_MS + DAY_MS, DAY_MS)
    log.publish(START_MS)
    disk.file(log.close())
    purge(disk, END_MS + DAY_MS)
    assert rows_of(disk) == [(1, False), (2, False), (3, False)]


def test_a_crash_during_a_purge_leaves_an_hour_that_can_be_purged_again(log: Log) -> None:
    files = SimulatedFiles()
    disk = Disk(files)
    settled_hour(disk, log)
    disk.replay.checkpoint()
    disk.replay.purge(END_MS + DAY_MS, DAY_MS)
    after = Disk(files.crash(), disk.catalog.crash())
    assert after.replay.is_retired(HOUR)
    purge(after, END_MS + DAY_MS)
    assert after.schedule.hours() == [HOUR + 1]


# ---- archive ---------------------------------------------------------------------------------


def archived(disk: Disk, hour: int = HOUR, **changes: int) -> Archived:
    """What an archive of an hour, as it is now, covers."""
    state = disk.replay.hours[hour]
    extent = extent_of(state, disk.dispatch.size(hour))
    return Archived(
        **{**extent._asdict(), "count": state.entries, **changes},
        checksum="c",
        location="/archive",
        archived_ms=END_MS,
    )


def purge_archived(disk: Disk, now_ms: int) -> None:
    """Purge, of what was archived alone, until nothing is left to do."""
    for _ in range(100):
        if not disk.replay.purge(now_ms, DAY_MS, archive=True):
            return
    raise AssertionError("it goes on and on")


def test_an_hour_is_kept_until_it_was_archived_and_for_its_retention(disk: Disk, log: Log) -> None:
    settled_hour(disk, log)
    purge_archived(disk, END_MS + 1000 * DAY_MS)
    assert HOUR in disk.schedule.hours()
    disk.replay.confirm(HOUR, archived(disk))
    purge_archived(disk, END_MS + DAY_MS - 1)
    assert HOUR in disk.schedule.hours()
    purge_archived(disk, END_MS + DAY_MS)
    assert disk.schedule.hours() == [HOUR + 1]
    assert disk.dispatch.hours() == []
    assert read_archived(disk.catalog) == {}


def test_without_the_setting_it_does_not_matter_what_was_archived(disk: Disk, log: Log) -> None:
    settled_hour(disk, log)
    purge(disk, END_MS + DAY_MS)
    assert disk.schedule.hours() == [HOUR + 1]


def test_a_confirmation_is_durable_when_it_returns(log: Log) -> None:
    files = SimulatedFiles()
    disk = Disk(files)
    settled_hour(disk, log)
    confirmed = archived(disk)
    disk.replay.confirm(HOUR, confirmed)
    after = Disk(files.crash(), disk.catalog.crash())
    assert read_archived(after.catalog) == {HOUR: confirmed}
    [retired_hour] = retired_hours(after.catalog, after.files)
    assert (retired_hour.hour, retired_hour.archived) == (HOUR, confirmed)
    assert retired_hour.total_bytes == confirmed.schedule_bytes + confirmed.dispatch_bytes
    purge_archived(after, END_MS + DAY_MS)
    assert after.schedule.hours() == [HOUR + 1]


def test_a_catalog_that_is_full_confirms_nothing(log: Log) -> None:
    faults = Faults()
    disk = Disk(catalog=MemoryCatalog(faults))
    settled_hour(disk, log)
    faults.faults.append(Fault(at=faults.call_count + 1, kind=FaultKind.NO_SPACE))
    confirmed = archived(disk)
    with pytest.raises(DiskFullError):
        disk.replay.confirm(HOUR, confirmed)
    assert read_archived(disk.catalog) == {}
    disk.replay.confirm(HOUR, confirmed)
    assert read_archived(disk.catalog) == {HOUR: confirmed}


@pytest.mark.parametrize("field", ["schedule_bytes", "dispatch_bytes", "last_seq", "count"])
def test_an_archive_of_something_else_is_refused(disk: Disk, log: Log, field: str) -> None:
    settled_hour(disk, log)
    other = getattr(archived(disk), field) - 1
    with pytest.raises(ConflictError, match="archive it again") as caught:
        disk.replay.confirm(HOUR, archived(disk, **{field: other}))
    assert caught.value.state == "changed"
    purge_archived(disk, END_MS + DAY_MS)
    assert HOUR in disk.schedule.hours()
    assert read_archived(disk.catalog) == {}


def test_an_hour_that_is_open_or_not_there_cannot_be_archived(disk: Disk, log: Log) -> None:
    log.publish(START_MS)
    disk.file(log.close())
    with pytest.raises(ConflictError) as caught:
        disk.replay.confirm(HOUR, archived(disk))
    assert caught.value.state == "open"
    with pytest.raises(NotFoundError):
        disk.replay.confirm(HOUR + 1, archived(disk))


def test_an_hour_that_comes_back_has_to_be_archived_again(disk: Disk, log: Log) -> None:
    settled_hour(disk, log)
    before = archived(disk)
    disk.replay.confirm(HOUR, before)
    log.publish(START_MS)
    disk.file(log.close())
    retired(disk, HOUR)
    disk.replay.checkpoint()
    assert [one.archived for one in retired_hours(disk.catalog, disk.files)] == [None]
    purge_archived(disk, END_MS + DAY_MS)
    assert HOUR in disk.schedule.hours()
    with pytest.raises(ConflictError):
        disk.replay.confirm(HOUR, before)
    disk.replay.confirm(HOUR, archived(disk))
    purge_archived(disk, END_MS + DAY_MS)
    assert disk.schedule.hours() == [HOUR + 1]


def test_an_hour_that_gets_a_delivery_has_to_be_archived_again(disk: Disk, log: Log) -> None:
    settled_hour(disk, log)
    disk.replay.confirm(HOUR, archived(disk))
    disk.settle(HOUR, dispatch_row(1, subscription_id=2))
    purge_archived(disk, END_MS + DAY_MS)
    assert HOUR in disk.schedule.hours()


def test_an_hour_that_was_deleted_and_came_back_is_another_one(disk: Disk, log: Log) -> None:
    """The same lengths do not make it the same: its last message is a later one."""
    log.publish(START_MS)
    disk.file(log.close())
    retired(disk, HOUR)
    before = archived(disk)
    disk.replay.confirm(HOUR, before)
    purge_archived(disk, END_MS + DAY_MS)
    assert disk.schedule.hours() == []
    log.publish(START_MS)
    disk.file(log.close())
    retired(disk, HOUR)
    assert archived(disk).schedule_bytes == before.schedule_bytes
    purge_archived(disk, END_MS + DAY_MS)
    assert disk.schedule.hours() == [HOUR]
    with pytest.raises(ConflictError):
        disk.replay.confirm(HOUR, before)


def test_a_purge_stops_when_its_hour_is_not_archived_any_more(
    disk: Disk, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_module, "PURGE_ROWS", 1)
    settled_hour(disk, log)
    disk.replay.confirm(HOUR, archived(disk))
    assert disk.replay.purge(END_MS + DAY_MS, DAY_MS, archive=True)
    log.cancel(1, START_MS)
    disk.file(log.close())
    purge_archived(disk, END_MS + DAY_MS)
    assert HOUR in disk.schedule.hours()


# ---- small things ----------------------------------------------------------------------------


def gathered(blob: bytes, starts: Sequence[int], lengths: Sequence[int]) -> bytes:
    rows = np.zeros(len(lengths), SCHEDULE_DTYPE)
    rows["payload_length"] = lengths
    payload = bytes(replay_module._gather(blob, np.array(starts, np.int64), rows))
    assert rows["payload_offset"].tolist() == list(accumulate(lengths, initial=0))[: len(lengths)]
    return payload


def test_payloads_that_are_scattered_are_gathered_in_order() -> None:
    blob = b"abcdefghij"
    starts, lengths = [0, 2, 9, 4, 0], [2, 2, 1, 3, 0]
    assert gathered(blob, starts, lengths) == b"abcdjefg"
    assert gathered(blob, starts[:2], lengths[:2]) == b"abcd"
    assert gathered(blob, starts[4:], lengths[4:]) == b""
    assert gathered(blob, [], []) == b""


def test_groups_are_filed_in_one_as_one_by_one(log: Log) -> None:
    groups, waiting = [], []
    for number in range(20):
        due_ms = START_MS + number * HOUR_MS // 7
        for body in range(1 + number % 3):
            waiting.append((log.publish(due_ms, body=bytes(number + body)), due_ms))
        log.cancel(*waiting.pop(0))
        groups.append(log.close())
    alone, together = Disk(SimulatedFiles()), Disk(SimulatedFiles())
    alone.file(*groups)
    express = frozenset((3, 4))
    whole = Records.of_groups([group.encode() for group in groups], express)
    assert whole.express_seqs == express
    together.replay.file([whole], START_MS)
    assert alone.replay.hours == together.replay.hours
    for hour, state in alone.replay.hours.items():
        assert alone.schedule.read(hour, 0, state.length) == together.schedule.read(
            hour, 0, state.length
        )


def test_records_that_lost_some_rows_to_damage_are_filed(disk: Disk, log: Log) -> None:
    for body in (b"one", b"two", b"three"):
        log.publish(START_MS, body=body)
    whole = records(log.close())
    rows: Rows = whole.rows[[0, 2]]
    disk.replay.file([Records(rows, whole.payload)], START_MS)
    [frame] = frames(disk)
    assert frame.payload == b"".join(encode_payload(Payload(body)) for body in (b"one", b"three"))


def test_damage_is_kept_in_the_catalog_once(disk: Disk) -> None:
    damage = Damage("schedule/x", 64, 128, "torn apart", torn=False, first_seq=3, last_seq=5)
    disk.replay.note_damage(damage, START_MS)
    disk.replay.note_damage(damage, START_MS)
    disk.replay.checkpoint()
    [(_, value)] = disk.catalog.scan(Table.DAMAGE)
    assert b"torn apart" in value
    assert b'"first_seq":3' in value


def test_keys_and_values_of_the_catalog_come_back_as_they_were() -> None:
    assert parse_dead_letter_key(dead_letter_key(7, 1 << 40)) == (7, 1 << 40)
    assert dead_letter_key(1, 9) < dead_letter_key(2, 1)
    letter = DeadLetter("gone", START_MS, 3, b"payload")
    assert letter.payload == b"payload"


@given(
    st.lists(st.tuples(st.integers(0, 400), st.sampled_from([0, 4, 5, 60, 61])), max_size=60),
    st.booleans(),
)
def test_payloads_are_gathered_in_their_order(
    places: list[tuple[int, int]], in_one_piece: bool
) -> None:
    blob = bytes(range(256)) * 2
    if in_one_piece:
        lengths = [length for _, length in places]
        places = list(zip(accumulate(lengths, initial=7), lengths, strict=False))
        places = [(start, length) for start, length in places if start + length <= len(blob)]
    expected = b"".join(blob[start : start + length] for start, length in places)
    starts, lengths = [start for start, _ in places], [length for _, length in places]
    assert gathered(blob, starts, lengths) == expected
