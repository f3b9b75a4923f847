"""Archives that were confirmed: the table ARCHIVES, whose keys are hours as in the table HOURS.

The table of imports is the filer's, which files them (`delayserver.schedule.expansion`).

Cost: 1 µs to decode. Threads: immutable values, pure functions.
"""

from contextlib import suppress

import msgspec

from delayserver.records.tables import Extent, hour_key, must, parse_hour_key
from storage.catalog import Catalog, Table


class Archived(msgspec.Struct, array_like=True, frozen=True):
    """A value of the table ARCHIVES (MessagePack): the extent of an archive of an hour."""

    schedule_bytes: int
    dispatch_bytes: int
    last_seq: int
    count: int
    """Entries: messages, and those that were moved or tried again."""
    checksum: str
    """A checksum by the archive's maker, for people who compare."""
    location: str
    archived_ms: int

    @property
    def extent(self) -> Extent:
        """The part of the hour that the archive covers."""
        return Extent(self.schedule_bytes, self.dispatch_bytes, self.last_seq)


def pack_archived(archived: Archived) -> bytes:
    """A value of the table ARCHIVES."""
    return msgspec.msgpack.encode(archived)


def unpack_archived(value: bytes) -> Archived:
    """The archive in a value of the table ARCHIVES. Raises msgspec.DecodeError."""
    return msgspec.msgpack.decode(value, type=Archived)


def read_archived(catalog: Catalog) -> dict[int, Archived]:
    """The whole table ARCHIVES. An entry that cannot be read is left out: its hour is archived
    again."""
    archived: dict[int, Archived] = {}
    for key, value in catalog.scan(Table.ARCHIVES):
        with suppress(msgspec.DecodeError, ValueError):
            archived[parse_hour_key(key)] = unpack_archived(value)
    return archived


def check_archived(key: bytes, value: bytes) -> None:
    """Check an entry of the table ARCHIVES. Raises one of `records.tables.UNREADABLE`."""
    must(len(key) == len(hour_key(0)), "a key of another length")
    unpack_archived(value)
