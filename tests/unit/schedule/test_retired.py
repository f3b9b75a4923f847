"""Hours of which everything is settled, with the extent of their files."""

from delayserver.schedule.retired import RetiredHour, extent_of, retired_hours
from tests.unit.fakes import HOUR, Disk, Log
from tests.unit.schedule.samples import END_MS, settled_hour


def test_an_hour_is_listed_from_the_checkpoint_on_that_knows_it_as_retired(
    disk: Disk, log: Log
) -> None:
    settled_hour(disk, log)
    assert list(retired_hours(disk.catalog, disk.files)) == []
    disk.replay.checkpoint()
    state, dispatch_bytes = disk.replay.hours[HOUR], disk.dispatch.size(HOUR)
    extent = extent_of(state, dispatch_bytes)
    (found,) = retired_hours(disk.catalog, disk.files)
    assert found == RetiredHour(HOUR, END_MS, state.entries, extent)
    assert found.total_bytes == state.length + dispatch_bytes
