"""Hours that the server takes away while they are read: past their retention, or days that it
splits.

Cost: a read of the catalog. Threads: functions without state.
"""

from collections.abc import Iterator

from delayserver.pipeline.states.snapshot import Directory
from delayserver.records.tables import HourState, hour_key
from storage import buckets
from storage.catalog import Table
from storage.errors import CatalogError
from storage.frame import Rows
from storage.rows import HOUR_MS


def was_deleted(directory: Directory, bucket: int) -> bool:
    """Whether the server deleted an hour or a day meanwhile: the catalog loses it before its files
    are deleted."""
    try:
        with directory.catalog() as catalog:
            return catalog.get(Table.HOURS, hour_key(bucket)) is None
    except CatalogError:
        return False


def hours_instead(
    directory: Directory, day: int, unfiled: Rows
) -> Iterator[tuple[int, HourState, Rows]]:
    """The hours that a day has become meanwhile, each with its part of the rows not filed."""
    with directory.catalog() as catalog:
        states = {hour: catalog.get(Table.HOURS, hour_key(hour)) for hour in buckets.hours_of(day)}
    due = unfiled["due_ms"] // HOUR_MS
    for hour, value in states.items():
        if value is not None:
            yield hour, HourState.unpack(value), unfiled[due == hour]
