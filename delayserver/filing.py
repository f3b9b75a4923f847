"""From records of the message log to rows of the schedule log: which rows, and in which hour.

A record that schedules makes an entry in the hour it is due; one that removes makes a tombstone in
the hour of what it removes; MOVE and RETRY make both. The rows are a function of the records alone,
so filing them again gives the same rows (I7), and whoever reads both logs can tell what is filed.

Cost: about 0.1 µs per record, vectorised. Threads: pure functions.
"""

from collections.abc import Iterator

import numpy as np

from storage.frame import Rows
from storage.rows import (
    FLAG_REMOVAL,
    HOUR_MS,
    REMOVES,
    SCHEDULE_DTYPE,
    SCHEDULES,
    concatenate,
    select,
)

_MAKES_ENTRY, _MAKES_TOMBSTONE = np.zeros((2, 256), bool)
_MAKES_ENTRY[list(SCHEDULES)] = _MAKES_TOMBSTONE[list(REMOVES)] = True
"""By the kind of a record."""
_SHARED_FIELDS = ("seq", "subject_id", "subscription_id", "attempt", "kind")


def schedule_rows(rows: Rows) -> tuple[Rows, np.ndarray]:
    """Entries and tombstones that the records make, in seq order, and where their payloads are."""
    entering = select(rows, _MAKES_ENTRY[rows["kind"]])
    removing = select(rows, _MAKES_TOMBSTONE[rows["kind"]])
    entries = np.zeros(len(entering), SCHEDULE_DTYPE)
    tombstones = np.zeros(len(removing), SCHEDULE_DTYPE)
    for name in _SHARED_FIELDS:
        entries[name], tombstones[name] = entering[name], removing[name]
    for name in ("due_ms", "message_seq", "key_hash", "payload_length", "payload_crc", "flags"):
        entries[name] = entering[name]
    tombstones["due_ms"] = removing["target_due_ms"]
    tombstones["message_seq"] = removing["target_seq"]
    tombstones["flags"] = FLAG_REMOVAL
    scheduled = concatenate([entries, tombstones], SCHEDULE_DTYPE)
    starts = np.concatenate(
        [entering["payload_offset"].astype(np.int64), np.zeros(len(removing), np.int64)]
    )
    order = np.argsort(scheduled["seq"], kind="stable")
    return select(scheduled, order), starts[order]


def by_hour(rows: Rows) -> Iterator[tuple[int, np.ndarray]]:
    """The hours in `rows`, and the indexes of each one's rows, in seq order."""
    if not len(rows):
        return
    hours = rows["due_ms"] // HOUR_MS
    order = np.argsort(hours, kind="stable")
    cuts = np.flatnonzero(np.diff(hours[order])) + 1
    for here in np.split(order, cuts):
        yield int(hours[here[0]]), here
