"""Hours of which somebody has a copy."""

from __future__ import annotations

import pytest

from delayserver.errors import ConflictError, NotFoundError
from delayserver.parts.imports.archives import Archives, kept_hours
from delayserver.parts.imports.records import Archived, read_archived
from delayserver.schedule import purge as purge_module
from delayserver.schedule.retired import extent_of
from storage.errors import DiskFullError
from tests.unit.fakes import HOUR, START_MS, Disk, Log, dispatch_row
from tests.unit.schedule.samples import DAY_MS, END_MS, purge, retired, settled_hour
from tests.world.storage.catalog import MemoryCatalog
from tests.world.storage.faults import Fault, FaultKind, Faults
from tests.world.storage.files import SimulatedFiles


@pytest.fixture
def disk() -> Disk:
    return Disk(archive=True)


@pytest.fixture
def log() -> Log:
    return Log()


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
        if not disk.replay.purge(now_ms, DAY_MS):
            return
    raise AssertionError("it goes on and on")


def test_an_hour_is_kept_until_it_was_archived_and_for_its_retention(disk: Disk, log: Log) -> None:
    settled_hour(disk, log)
    purge_archived(disk, END_MS + 1000 * DAY_MS)
    assert HOUR in disk.schedule.buckets()
    disk.replay.keeper(Archives).confirm(HOUR, archived(disk))
    purge_archived(disk, END_MS + DAY_MS - 1)
    assert HOUR in disk.schedule.buckets()
    purge_archived(disk, END_MS + DAY_MS)
    assert disk.schedule.buckets() == [HOUR + 1]
    assert disk.dispatch.buckets() == []
    assert read_archived(disk.catalog) == {}


def test_without_the_setting_it_does_not_matter_what_was_archived(log: Log) -> None:
    disk = Disk()
    settled_hour(disk, log)
    purge(disk, END_MS + DAY_MS)
    assert disk.schedule.buckets() == [HOUR + 1]


def test_a_confirmation_is_durable_when_it_returns(log: Log) -> None:
    files = SimulatedFiles()
    disk = Disk(files, archive=True)
    settled_hour(disk, log)
    confirmed = archived(disk)
    disk.replay.keeper(Archives).confirm(HOUR, confirmed)
    after = Disk(files.crash(), disk.catalog.crash(), archive=True)
    assert read_archived(after.catalog) == {HOUR: confirmed}
    [retired_hour] = kept_hours(after.catalog, after.files)
    assert (retired_hour.hour, retired_hour.archived) == (HOUR, confirmed)
    assert retired_hour.total_bytes == confirmed.schedule_bytes + confirmed.dispatch_bytes
    purge_archived(after, END_MS + DAY_MS)
    assert after.schedule.buckets() == [HOUR + 1]


def test_a_catalog_that_is_full_confirms_nothing(log: Log) -> None:
    faults = Faults()
    disk = Disk(catalog=MemoryCatalog(faults), archive=True)
    settled_hour(disk, log)
    faults.faults.append(Fault(at=faults.call_count + 1, kind=FaultKind.NO_SPACE))
    confirmed = archived(disk)
    with pytest.raises(DiskFullError):
        disk.replay.keeper(Archives).confirm(HOUR, confirmed)
    assert read_archived(disk.catalog) == {}
    disk.replay.keeper(Archives).confirm(HOUR, confirmed)
    assert read_archived(disk.catalog) == {HOUR: confirmed}


@pytest.mark.parametrize("field", ["schedule_bytes", "dispatch_bytes", "last_seq", "count"])
def test_an_archive_of_something_else_is_refused(disk: Disk, log: Log, field: str) -> None:
    settled_hour(disk, log)
    other = getattr(archived(disk), field) - 1
    with pytest.raises(ConflictError, match="archive it again") as caught:
        disk.replay.keeper(Archives).confirm(HOUR, archived(disk, **{field: other}))
    assert caught.value.state == "changed"
    purge_archived(disk, END_MS + DAY_MS)
    assert HOUR in disk.schedule.buckets()
    assert read_archived(disk.catalog) == {}


def test_an_hour_that_is_open_or_not_there_cannot_be_archived(disk: Disk, log: Log) -> None:
    log.publish(START_MS)
    disk.file(log.close())
    with pytest.raises(ConflictError) as caught:
        disk.replay.keeper(Archives).confirm(HOUR, archived(disk))
    assert caught.value.state == "open"
    with pytest.raises(NotFoundError):
        disk.replay.keeper(Archives).confirm(HOUR + 1, archived(disk))


def test_an_hour_that_comes_back_has_to_be_archived_again(disk: Disk, log: Log) -> None:
    settled_hour(disk, log)
    before = archived(disk)
    disk.replay.keeper(Archives).confirm(HOUR, before)
    log.publish(START_MS)
    disk.file(log.close())
    retired(disk, HOUR)
    disk.replay.checkpoint()
    assert [one.archived for one in kept_hours(disk.catalog, disk.files)] == [None]
    purge_archived(disk, END_MS + DAY_MS)
    assert HOUR in disk.schedule.buckets()
    with pytest.raises(ConflictError):
        disk.replay.keeper(Archives).confirm(HOUR, before)
    disk.replay.keeper(Archives).confirm(HOUR, archived(disk))
    purge_archived(disk, END_MS + DAY_MS)
    assert disk.schedule.buckets() == [HOUR + 1]


def test_an_hour_that_gets_a_delivery_has_to_be_archived_again(disk: Disk, log: Log) -> None:
    settled_hour(disk, log)
    disk.replay.keeper(Archives).confirm(HOUR, archived(disk))
    disk.settle(HOUR, dispatch_row(1, subscription_id=2))
    purge_archived(disk, END_MS + DAY_MS)
    assert HOUR in disk.schedule.buckets()


def test_an_hour_that_was_deleted_and_came_back_is_another_one(disk: Disk, log: Log) -> None:
    """The same lengths do not make it the same: its last message is a later one."""
    log.publish(START_MS)
    disk.file(log.close())
    retired(disk, HOUR)
    before = archived(disk)
    disk.replay.keeper(Archives).confirm(HOUR, before)
    purge_archived(disk, END_MS + DAY_MS)
    assert disk.schedule.buckets() == []
    log.publish(START_MS)
    disk.file(log.close())
    retired(disk, HOUR)
    assert archived(disk).schedule_bytes == before.schedule_bytes
    purge_archived(disk, END_MS + DAY_MS)
    assert disk.schedule.buckets() == [HOUR]
    with pytest.raises(ConflictError):
        disk.replay.keeper(Archives).confirm(HOUR, before)


def test_a_purge_stops_when_its_hour_is_not_archived_any_more(
    disk: Disk, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(purge_module, "PURGE_ROWS", 1)
    settled_hour(disk, log)
    disk.replay.keeper(Archives).confirm(HOUR, archived(disk))
    assert disk.replay.purge(END_MS + DAY_MS, DAY_MS)
    log.cancel(1, START_MS)
    disk.file(log.close())
    purge_archived(disk, END_MS + DAY_MS)
    assert HOUR in disk.schedule.buckets()
