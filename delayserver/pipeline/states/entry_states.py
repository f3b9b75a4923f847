"""The states that an entry can be in, the guarantees that a row can break, and the row of both."""

from enum import IntEnum, IntFlag

import numpy as np


class EntryState(IntEnum):
    """The state of an entry at one subscription; for an entry as a whole, the greatest."""

    DROPPED = 1
    """Its subscription was deleted, and others had the message."""
    DELIVERED = 2
    CANCELLED = 3
    MOVED = 4
    """It goes on as the entry `successor_seq`."""
    RETRIED = 5
    """It goes on as the entry `successor_seq`."""
    DEAD = 6
    PENDING = 7
    MISSING = 8
    """Its hour is retired, which says that all is settled, and this is not."""


class BrokenGuarantee(IntFlag):
    """Promises that a row shows to be broken."""

    REPEATED = 1
    """Settled a second time at the same subscription (I4)."""
    AFTER_REMOVAL = 2
    """Delivered, though it was cancelled or moved (I5)."""
    EARLY = 4
    """Delivered before it was due (I1)."""
    UNKNOWN = 8
    """Settled, but there is no such entry."""
    MISSING = 16
    """Neither delivered nor anything else (I3)."""
    IN_THE_FUTURE = 32
    """Settled at a time that has not come yet, or before there was any."""
    MISMATCHED = 64
    """Two rows say different things of one message: which it is, when it was due, where it went."""
    UNKNOWN_OUTCOME = 128
    """Something happened to it that no server does; it counts as not settled by that."""
    UNKNOWN_SUBSCRIPTION = 256
    """Settled by a subscription that never was."""
    MISDIRECTED = 512
    """Settled by a subscription that it was not for."""
    WRONGLY_DROPPED = 1024
    """Dropped, though its subscription was not deleted, or nobody else had it."""


SETTLED_DTYPE = np.dtype(
    [
        ("seq", "<u8"),
        ("message_seq", "<u8"),
        ("due_ms", "<i8"),
        ("settled_ms", "<i8"),
        ("successor_seq", "<u8"),
        ("subject_id", "<u4"),
        ("subscription_id", "<u4"),
        ("attempt", "<u2"),
        ("kind", "u1"),
        ("state", "u1"),
        ("entry_state", "u1"),
        ("problems", "<u2"),
        ("is_first", "?"),
        ("has_history", "?"),
    ]
)
"""One entry at one subscription (0: none in particular).

settled_ms     when the delivery ended; 0 where no time is recorded
attempt        the attempt that was delivered; 0: it was not
kind           the kind of record that made the entry; 0 where there is no entry
state          0: nothing that is known
entry_state    the greatest state of the entry's rows
is_first       of each entry exactly one row, the first that has its greatest state
has_history    there are, or may be, other entries of the same message
"""
