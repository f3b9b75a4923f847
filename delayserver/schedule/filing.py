"""From records of the message log to rows of the schedule log: which rows, and in which hour.

A record that schedules makes an entry in the hour it is due; one that removes makes a tombstone in
the hour of what it removes; MOVE and RETRY make both. The rows are a function of the records alone,
so filing them again gives the same rows (I7), and whoever reads both logs can tell what is filed.

Cost: about 0.05 µs per record, vectorised. Threads: pure functions.
"""

from collections.abc import Iterator

import numpy as np

from storage.frame import Rows
from storage.rows import (
    FLAG_REMOVAL,
    HOUR_MS,
    MESSAGE_DTYPE,
    REMOVES,
    SCHEDULE_DTYPE,
    SCHEDULES,
    concatenate,
    keep,
    select,
)

_MAKES_ENTRY, _MAKES_TOMBSTONE = np.zeros((2, 256), bool)
_MAKES_ENTRY[list(SCHEDULES)] = _MAKES_TOMBSTONE[list(REMOVES)] = True
"""By the kind of a record."""
_SHARED_FIELDS = ("seq", "subject_id", "subscription_id", "attempt", "kind")
_HEAD, _TAIL = 3, 5
"""Both dtypes begin with the same 3 words of 8 bytes, and end with the same 5."""
assert MESSAGE_DTYPE.names is not None and SCHEDULE_DTYPE.names is not None
assert MESSAGE_DTYPE.names[:3] + MESSAGE_DTYPE.names[5:] == SCHEDULE_DTYPE.names
_HOURS_SPAN = 1 << 16


def schedule_rows(rows: Rows) -> tuple[Rows, np.ndarray]:
    """Entries and tombstones that the records, in seq order, make, in that order, too; and where
    their payloads are."""
    entering = keep(rows, _MAKES_ENTRY[rows["kind"]])
    entries = np.empty(len(entering), SCHEDULE_DTYPE)
    source, target = _words(entering), _words(entries)
    target[:, :_HEAD], target[:, -_TAIL:] = source[:, :_HEAD], source[:, -_TAIL:]
    starts = entries["payload_offset"].astype(np.int64)
    entries["payload_offset"] = 0
    removes = _MAKES_TOMBSTONE[rows["kind"]]
    if not removes.any():
        return entries, starts
    removing = select(rows, removes)
    tombstones = np.zeros(len(removing), SCHEDULE_DTYPE)
    for name in _SHARED_FIELDS:
        tombstones[name] = removing[name]
    tombstones["due_ms"] = removing["target_due_ms"]
    tombstones["message_seq"] = removing["target_seq"]
    tombstones["flags"] = FLAG_REMOVAL
    scheduled = concatenate([entries, tombstones], SCHEDULE_DTYPE)
    starts = np.concatenate([starts, np.zeros(len(removing), np.int64)])
    order = np.argsort(scheduled["seq"], kind="stable")
    return select(scheduled, order), starts[order]


def _words(rows: Rows) -> np.ndarray:
    """The rows as a table of 8-byte words."""
    return np.ascontiguousarray(rows).view(np.uint64).reshape(len(rows), rows.dtype.itemsize // 8)


def by_hour(rows: Rows) -> Iterator[tuple[int, np.ndarray]]:
    """The hours in `rows`, in order, and the indexes of each one's rows, in seq order."""
    if not len(rows):
        return
    hours = rows["due_ms"] // HOUR_MS
    first = hours.min()
    if hours.max() - first < _HOURS_SPAN:
        # NumPy sorts short numbers by their digits, in a fifth of the time.
        order = np.argsort((hours - first).astype(np.uint16), kind="stable")
    else:
        order = np.argsort(hours, kind="stable")
    cuts = np.flatnonzero(np.diff(hours[order])) + 1
    for here in np.split(order, cuts):
        yield int(hours[here[0]]), here
