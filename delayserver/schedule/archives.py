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
from typing import NamedTuple

import msgspec

from delayserver.records.tables import HOUR_KEY, HourState, read_hours
from storage.catalog import Catalog, Table
from storage.files import Files, size_of
from storage.hour_log import hour_path
from storage.rows import LogKind


class Extent(NamedTuple):
    """What an hour's files hold. They only grow: the same extent is the same content."""

    schedule_bytes: int
    dispatch_bytes: int
    last_seq: int
    """Of its entries. An hour that was deleted and came back has a later one."""


class Archived(msgspec.Struct, array_like=True, frozen=True):
    """A value of the table ARCHIVES (MessagePack): what an archive of an hour covers."""

    schedule_bytes: int
    dispatch_bytes: int
    last_seq: int
    count: int
    """Entries: messages, and those that were moved or tried again."""
    checksum: str
    """By whoever made it, for people who compare."""
    location: str
    archived_ms: int

    @property
    def extent(self) -> Extent:
        return Extent(self.schedule_bytes, self.dispatch_bytes, self.last_seq)


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


def pack_archived(archived: Archived) -> bytes:
    """A value of the table ARCHIVES."""
    return msgspec.msgpack.encode(archived)


def unpack_archived(value: bytes) -> Archived:
    """The inverse of `pack_archived`."""
    return msgspec.msgpack.decode(value, type=Archived)


def read_archived(catalog: Catalog) -> dict[int, Archived]:
    """The whole table ARCHIVES."""
    return {
        HOUR_KEY.unpack(key)[0]: unpack_archived(value)
        for key, value in catalog.scan(Table.ARCHIVES)
    }


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
