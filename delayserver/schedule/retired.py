"""Retired hours: those of which everything is settled, and the extent of their files.

Cost: the list reads the table of hours, and the length of a file per hour that is retired.
Threads: functions without state.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from delayserver.records.tables import Extent, HourState, read_hours
from storage.buckets import bucket_path
from storage.catalog import Catalog
from storage.files import Files, size_of
from storage.rows import LogKind


@dataclass(frozen=True, slots=True)
class RetiredHour:
    """An hour of which everything is settled."""

    hour: int
    retired_ms: int
    count: int
    extent: Extent

    @property
    def total_bytes(self) -> int:
        """Bytes of the hour's two files."""
        return self.extent.schedule_bytes + self.extent.dispatch_bytes


def extent_of(state: HourState, dispatch_bytes: int) -> Extent:
    """The extent of an hour's files, as far as they are filed."""
    return Extent(state.length, dispatch_bytes, state.last_entry_seq)


def retired_hours(catalog: Catalog, files: Files) -> Iterator[RetiredHour]:
    """All retired hours that are kept, in order, as of the last checkpoint."""
    for hour, state in sorted(read_hours(catalog).items()):
        if state.retired_ms:
            extent = extent_of(state, size_of(files, bucket_path(LogKind.DISPATCH, hour)))
            yield RetiredHour(hour, state.retired_ms, state.entries, extent)
