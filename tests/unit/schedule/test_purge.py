"""Hours that are past their retention are deleted, and what the index knows of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from delayserver.records.tables import Change, ChangeState, read_hours, unpack_key_entry
from delayserver.schedule import purge as purge_module
from storage.catalog import Table
from storage.errors import DamageError, ExhaustedError
from storage.rows import HOUR_MS, NO_KEY
from tests.unit.fakes import HOUR, START_MS, Disk, Log
from tests.unit.schedule.samples import (
    DAY_MS,
    END_MS,
    KEY,
    NEXT_MS,
    change_of,
    purge,
    retired,
    rows_of,
    settled_hour,
)
from tests.world.storage.faults import Fault, FaultKind, Faults, FaultyFiles
from tests.world.storage.files import SimulatedFiles


def test_an_hour_is_kept_for_its_retention(disk: Disk, log: Log) -> None:
    settled_hour(disk, log)
    assert purge(disk, END_MS + DAY_MS - 1) == 0
    assert disk.schedule.buckets() == [HOUR, HOUR + 1]
    purge(disk, END_MS + DAY_MS)
    assert disk.schedule.buckets() == [HOUR + 1]
    assert disk.dispatch.buckets() == []
    assert HOUR not in disk.replay.hours
    assert list(read_hours(disk.catalog)) == [HOUR + 1]


def test_an_hour_with_unsettled_messages_is_kept_for_good(disk: Disk, log: Log) -> None:
    log.publish(START_MS)
    disk.file(log.close())
    assert purge(disk, END_MS + 1000 * DAY_MS) == 0
    assert disk.schedule.buckets() == [HOUR]


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
    assert disk.schedule.buckets() == []


def test_a_message_that_was_moved_to_an_earlier_hour_is_known_until_both_are_gone(
    disk: Disk, log: Log
) -> None:
    log.publish(NEXT_MS, key_hash=KEY)
    log.move(1, NEXT_MS, START_MS, key_hash=KEY)
    disk.file(log.close())
    disk.replay.checkpoint()
    retired(disk, HOUR)
    purge(disk, END_MS + DAY_MS)
    assert disk.schedule.buckets() == [HOUR + 1]
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
    assert disk.schedule.buckets() == [HOUR]
    log.publish(NEXT_MS)
    disk.file(log.close())
    log.publish(NEXT_MS)
    disk.file(log.close())
    assert disk.replay.hours[HOUR + 1].first_seq == 3
    retired(disk, HOUR)
    purge(disk, END_MS + DAY_MS)
    assert disk.schedule.buckets() == [HOUR + 1]
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
    assert disk.schedule.buckets() == [HOUR + 1]
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
    assert disk.schedule.buckets() == [HOUR + 1]
    assert [b"an entry does not match" in value for _, value in read(Table.DAMAGE)] == [True]


def test_a_purge_goes_on_in_slices(disk: Disk, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(purge_module, "PURGE_ROWS", 2)
    for number in range(5):
        log.publish(START_MS, key_hash=bytes([number] * 16))
    disk.file(log.close())
    disk.replay.checkpoint()
    retired(disk, HOUR)
    assert purge(disk, END_MS + DAY_MS) >= 3
    assert list(disk.catalog.scan(Table.KEYS)) == []


def test_a_purge_that_lacks_a_descriptor_begins_again(log: Log) -> None:
    faults = Faults()
    disk = Disk(FaultyFiles(SimulatedFiles(), faults))
    settled_hour(disk, log)
    disk.schedule.release(HOUR)
    faults.faults.append(Fault(1, FaultKind.NO_DESCRIPTOR, for_good=True))
    with pytest.raises(ExhaustedError):
        purge(disk, END_MS + DAY_MS)
    faults.faults.clear()
    purge(disk, END_MS + DAY_MS)
    assert [key for key, _ in disk.catalog.scan(Table.KEYS)] == [bytes([3] * 16)]
    assert disk.schedule.buckets() == [HOUR + 1]


def test_a_purge_stops_when_its_hour_gets_a_message(
    disk: Disk, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(purge_module, "PURGE_ROWS", 1)
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
    assert after.schedule.buckets() == [HOUR + 1]


@pytest.mark.parametrize("key_hash", [NO_KEY, KEY])
@pytest.mark.parametrize(("settled_ms", "replayed_ms"), [(START_MS, NEXT_MS), (NEXT_MS, START_MS)])
def test_nothing_is_left_over_of_what_was_replayed(
    disk: Disk, log: Log, key_hash: bytes, settled_ms: int, replayed_ms: int
) -> None:
    """Whichever hour goes first: the clock may have been set back before the replay."""
    log.publish(settled_ms, key_hash=key_hash)
    log.replay(1, settled_ms, replayed_ms, key_hash=key_hash)
    disk.file(log.close())
    disk.replay.checkpoint()
    replayed = change_of(disk, 1)
    assert replayed == Change(ChangeState.REPLAYED, 1, settled_ms, 0, 1)
    assert change_of(disk, 1, 1) == Change(ChangeState.RETRYING, 2, replayed_ms, 1, 1)
    retired(disk, HOUR)
    purge(disk, END_MS + DAY_MS)
    retired(disk, HOUR + 1)
    purge(disk, NEXT_MS + HOUR_MS + DAY_MS)
    assert disk.schedule.buckets() == []
    assert list(disk.catalog.scan(Table.CHANGES)) == []
    assert list(disk.catalog.scan(Table.KEYS)) == []
