"""Archives: what somebody has a copy of, so that the server may let it go.

A job (`delayserver.pipeline.archive.archive`) copies retired hours to a place of its own, and tells
what the copy covers: how long the hour's two files were, and the last entry in them. An hour counts
as archived only as long as that is so: one that comes back, since a message is published or moved
into it, is longer then, and waits again. With the setting `archive` only archived hours are
deleted.

Cost: the list reads the table of hours, and the length of a file per hour that is retired.
Threads: functions without state.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from delayserver.records.tables import (
    Archived,
    Extent,
    HourState,
    read_archived,
    read_hours,
)
from storage.catalog import Catalog
from storage.files import Files, size_of
from storage.hour_log import hour_path
from storage.rows import LogKind


@dataclass(frozen=True, slots=True)
class RetiredHour:
    """An hour of which everything is settled."""

    hour: int
    retired_ms: int
    count: int
    extent: Extent
    archived: Archived | None
    """None: it waits for it."""

    @property
    def total_bytes(self) -> int:
        """Of both files."""
        return self.extent.schedule_bytes + self.extent.dispatch_bytes


def extent_of(state: HourState, dispatch_bytes: int) -> Extent:
    """What the files of an hour hold, as far as they are filed."""
    return Extent(state.length, dispatch_bytes, state.last_entry_seq)


def retired_hours(catalog: Catalog, files: Files) -> Iterator[RetiredHour]:
    """All retired hours that are kept, in order, as of the last checkpoint."""
    archived = read_archived(catalog)
    for hour, state in sorted(read_hours(catalog).items()):
        if not state.retired_ms:
            continue
        extent = extent_of(state, size_of(files, hour_path(LogKind.DISPATCH, hour)))
        known = archived.get(hour)
        if known is not None and known.extent != extent:
            known = None
        yield RetiredHour(hour, state.retired_ms, state.entries, extent, known)
