"""The fixed-width columns of the four logs, and the kinds of their rows.

Every frame carries rows of one of these dtypes, little-endian and packed, followed by one payload
blob. A column is all that bulk work needs: an hour is loaded, filed, counted and audited without a
look at the payloads. FORMAT.md describes each field; a test keeps the two in step.

seq           the one total order of the shard (u64, from 1, no gaps in the message log)
message_seq   the seq of the publish that made the message; part of its id, never changes
target_seq    the schedule row that this record removes (0: none)
due_ms        milliseconds since the epoch, UTC
"""

from enum import IntEnum
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

PART_NUMBERS: Final = range(192, 256)
"""The numbers of the record kinds and of the tables that parts bring (`delayserver.parts`)."""


class LogKind(IntEnum):
    """Which log a frame belongs to; it selects the dtype of the rows."""

    MESSAGE = 1
    SCHEDULE = 2
    DISPATCH = 3
    DEFINITIONS = 4


class RecordKind(IntEnum):
    """The kind of decision that a row of the message log or the schedule log records.

    Each is a decision that was taken before it was logged: replay applies it and never judges."""

    PUBLISH = 1
    """A new message. In the schedule log: it is due at `due_ms`."""
    CANCEL = 2
    """Removes the schedule row `target_seq`, which was due at `target_due_ms`, for good."""
    MOVE = 3
    """Removes `target_seq` and schedules the message again at `due_ms`."""
    RETRY = 4
    """Removes `target_seq` for `subscription_id` alone, and schedules its delivery again at
    `due_ms`, as attempt number `attempt`."""
    DEAD = 5
    """Removes `target_seq` for `subscription_id`; the message is a dead letter of it now."""
    REDRIVE = 6
    """Takes the dead letter `target_seq` of `subscription_id` and schedules it at `due_ms`."""
    SUBJECT = 7
    """Gives the subject in the payload the number `subject_id`."""
    SUBSCRIPTION = 8
    """The payload is the new definition of `subscription_id`, or its removal."""
    DISCARD = 9
    """Deletes the dead letter `target_seq` of `subscription_id`."""
    IMPORT = 10
    """Takes the rows of a staged import as new messages: one for each seq from its own on, up to
    the last of its frame. It is the last row of its frame; the payload says which import."""
    HEARTBEAT = 11
    """The payload is the definition of a heartbeat, or its end (no subject)."""
    FIRE = 12
    """Removes `target_seq` and schedules the message again at `due_ms`. The message watches nothing
    from then on, since an event has fired it."""
    RUN = 13
    """A new message, as PUBLISH, that a schedule has made. Its payload says besides how the
    schedule stands then, so that message and next run are one record."""
    SCHEDULE = 14
    """The payload is how a schedule stands, with or without its definition, or its end."""
    REPLAY = 15
    """Schedules a message that is settled once more, at `due_ms` for `subscription_id`.
    `target_seq` and `target_due_ms` name the row where it was settled, which stays as it is."""
    SOURCE = 21
    """The payload is the state of a source, with or without its definition, or its end. It is in
    the frame of the messages that were made from the records it has taken."""

    @classmethod
    def _missing_(cls, value: object) -> "Self | None":
        """The kind of a part: `RecordKind(192)`. It is not among those that `RecordKind` lists."""
        if not isinstance(value, int) or value not in PART_NUMBERS:
            return None
        kind = int.__new__(cls, value)
        kind._name_, kind._value_ = f"PART_{value}", value
        cls._value2member_map_[value] = kind
        return kind

    def __reduce_ex__(self, protocol: object) -> tuple[type["RecordKind"], tuple[int]]:
        # Python 3.11.2 pickles by name, and finds no name of a part.
        return RecordKind, (int(self),)


PUBLISHES = (RecordKind.PUBLISH, RecordKind.RUN)
"""The kinds that make a new message."""

SCHEDULES = (
    *PUBLISHES,
    RecordKind.MOVE,
    RecordKind.RETRY,
    RecordKind.REDRIVE,
    RecordKind.FIRE,
    RecordKind.REPLAY,
)
"""The kinds that make a schedule row at `due_ms`."""

MOVES = (RecordKind.MOVE, RecordKind.FIRE)
"""The kinds that give a message another due time. `subscription_id` is for the new schedule row."""

REMOVES = (
    RecordKind.CANCEL,
    RecordKind.MOVE,
    RecordKind.RETRY,
    RecordKind.DEAD,
    RecordKind.FIRE,
)
"""The kinds that remove the schedule row `target_seq` at `target_due_ms`."""


class Outcome(IntEnum):
    """The result of a delivery. Results that are records of the message log do not stand here."""

    DELIVERED = 1
    DROPPED = 2
    """The subscription was deleted while the delivery waited, and others had the message."""


MESSAGE_DTYPE = np.dtype(
    [
        ("seq", "<u8"),
        ("due_ms", "<i8"),
        ("message_seq", "<u8"),
        ("target_seq", "<u8"),
        ("target_due_ms", "<i8"),
        ("key_hash", "V16"),
        ("subject_id", "<u4"),
        ("subscription_id", "<u4"),
        ("payload_offset", "<u4"),
        ("payload_length", "<u4"),
        ("payload_crc", "<u4"),
        ("attempt", "<u2"),
        ("kind", "u1"),
        ("flags", "u1"),
    ]
)
"""A record of the message log, 80 bytes. `payload_offset` counts from the frame's blob."""

SCHEDULE_DTYPE = np.dtype(
    [
        ("seq", "<u8"),
        ("due_ms", "<i8"),
        ("message_seq", "<u8"),
        ("key_hash", "V16"),
        ("subject_id", "<u4"),
        ("subscription_id", "<u4"),
        ("payload_offset", "<u4"),
        ("payload_length", "<u4"),
        ("payload_crc", "<u4"),
        ("attempt", "<u2"),
        ("kind", "u1"),
        ("flags", "u1"),
    ]
)
"""A row of the schedule log, 64 bytes, in the file of the hour of `due_ms`.

Either an entry (kind in SCHEDULES) or, with the flag REMOVAL, a tombstone: then `message_seq` holds
the seq of the entry of the same hour that it removes, for `subscription_id` (0: for all)."""

DISPATCH_DTYPE = np.dtype(
    [
        ("seq", "<u8"),
        ("message_seq", "<u8"),
        ("due_ms", "<i8"),
        ("settled_ms", "<i8"),
        ("subscription_id", "<u4"),
        ("attempt", "<u2"),
        ("outcome", "u1"),
        ("flags", "u1"),
    ]
)
"""A finished delivery of the schedule row `seq` to one subscription, 40 bytes."""

DEFINITION_DTYPE = np.dtype(
    [
        ("seq", "<u8"),
        ("table", "u1"),
        ("flags", "u1"),
        ("key_length", "<u2"),
        ("payload_offset", "<u4"),
        ("payload_length", "<u4"),
        ("payload_crc", "<u4"),
    ]
)
"""A change of a table of the catalog, 24 bytes. The payload is the key, then the value."""

DTYPES = {
    LogKind.MESSAGE: MESSAGE_DTYPE,
    LogKind.SCHEDULE: SCHEDULE_DTYPE,
    LogKind.DISPATCH: DISPATCH_DTYPE,
    LogKind.DEFINITIONS: DEFINITION_DTYPE,
}

FLAG_REMOVAL = 1
"""This schedule row is a tombstone."""

FLAG_REMOVED = 1
"""This row of the definitions log removes the key; there is no value."""

FLAG_WATCHES = 2
"""The payload of this record, or of the entry that it makes, names watch keys."""

FLAG_REPLAY = 4
"""This record, or the entry that it makes, delivers a message again at a client's request."""

FLAG_OPTIONS = 8
"""The payload of this record, or of the entry that it makes, has options besides a priority."""

PRIORITY_SHIFT = 4
"""The upper four bits of the flags are the priority, from 0 to 9, or PRIORITY_OF_GROUP."""
PRIORITY_MAX = 9
PRIORITY_OF_GROUP = 10
"""There instead of a priority: the message has a group. Its options say both."""

FLAG_AFTER_SYNC = 1
"""All bytes before the frame that begins with this row of the dispatch log were synced, so damage
there came later. A damaged frame behind the last such frame may never have been written whole."""

SEQ_MAX = (1 << 64) - 1
HOUR_MS = 3_600_000
NO_KEY = bytes(16)


# NumPy copies structured rows field by field. Taken as plain bytes of the same length they are
# copied whole, which is 3 to 15 times as fast.


def as_bytes(rows: NDArray[np.void]) -> NDArray[np.void]:
    """The same rows in the same memory, without their fields."""
    return rows.view(f"V{rows.dtype.itemsize}")


def select(rows: NDArray[np.void], which: NDArray[np.bool_ | np.integer]) -> NDArray[np.void]:
    """`rows[which]`, by indexes or by a mask: a copy."""
    chosen: NDArray[np.void] = as_bytes(rows)[which]
    return chosen.view(rows.dtype)


def keep(rows: NDArray[np.void], mask: NDArray[np.bool_]) -> NDArray[np.void]:
    """`rows[mask]`; if that is all of them, the rows themselves."""
    return rows if mask.all() else select(rows, mask)


def buffer_of(rows: NDArray[np.void]) -> memoryview:
    """The bytes of rows that stand one behind the other, in place."""
    return rows.view(np.uint8).data


_PAIRS_MAX = 4096
"""Beyond, it is worth sorting."""


def is_among(values: NDArray[Any], others: NDArray[Any]) -> NDArray[np.bool_]:
    """Which values are among the others: as `np.isin`, which takes its time also for a few."""
    if len(values) * len(others) > _PAIRS_MAX:
        return np.isin(values, others)
    found: NDArray[np.bool_] = (values[:, np.newaxis] == others).any(axis=1)
    return found


def concatenate(parts: list[NDArray[np.void]], dtype: np.dtype[np.void]) -> NDArray[np.void]:
    """All rows in one array, also when there are no parts."""
    if not parts:
        return np.empty(0, dtype)
    return np.concatenate([as_bytes(rows) for rows in parts]).view(dtype)
