"""From records of the message log to rows of the schedule log: which rows, and for which file.

A record that schedules makes an entry in the hour it is due. One that removes makes a tombstone in
the hour of the entry that it removes; MOVE and RETRY make both. The rows are a function of the
records alone, so filing them again gives the same rows (I7), and a reader of both logs can tell
which records are filed.

The rows of all files are put in the order of the files in one go, and so are the payloads of many
small files. Each file then gets slices. Two years are 770 files, and for each of them two dozen
calls of NumPy would cost more than its rows.

Cost: about 0.05 µs per record, 0.2 with its payload, and some µs per file. Threads: pure functions.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayserver.schedule.committed import gather_payloads
from storage.buckets import DAY_FLAG, DAY_HOURS, is_day
from storage.frame import Rows
from storage.rows import (
    FLAG_REMOVAL,
    HOUR_MS,
    MESSAGE_DTYPE,
    MOVES,
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
_SHORT_SPAN = 1 << 16
GATHERED_BYTES = 1 << 20
"""Payloads that are gathered in one go: few enough to be in the cache when they are written."""


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
    # A moved row leaves its place for all subscriptions; the record names those that get the new
    # one.
    tombstones["subscription_id"][np.isin(removing["kind"], MOVES)] = 0
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


class BucketPart(NamedTuple):
    """A bucket's part of a batch: a frame of its file, and the change of its state."""

    bucket: int
    rows: Rows
    """SCHEDULE_DTYPE, in seq order."""
    payload: memoryview
    entries: int
    last_entry_seq: int
    """0: it has tombstones alone."""
    by_hour: list[int]
    """In a day: entries less tombstones of each of its hours."""


def parts_by_bucket(
    blob: bytes, rows: Rows, starts: NDArray[np.int64], buckets: NDArray[np.int64]
) -> Iterator[BucketPart]:
    """Rows (SCHEDULE_DTYPE, in seq order) with their payloads by their buckets, hours before days.

    `starts`: where in `blob` the payload of each row is; `buckets`: where each row is filed. Sets
    `payload_offset` to where a payload is in that of the part."""
    if not len(rows):
        return
    order, firsts = _order(buckets)
    if len(firsts) > 1:
        rows, starts, buckets = select(rows, order), starts[order], buckets[order]
    bounds = np.append(firsts, len(rows))
    ends = np.cumsum(rows["payload_length"], dtype=np.int64)[bounds[1:] - 1]
    begin = gathered = 0
    while begin < len(firsts):
        end = int(np.searchsorted(ends, gathered + GATHERED_BYTES, side="right"))
        end = max(end, begin + 1)
        here = slice(bounds[begin], bounds[end])
        some = firsts[begin:end] - bounds[begin]
        yield from _parts(blob, rows[here], starts[here], buckets[here], some)
        begin, gathered = end, int(ends[end - 1])


def _parts(
    blob: bytes,
    rows: Rows,
    starts: NDArray[np.int64],
    buckets: NDArray[np.int64],
    firsts: NDArray[np.intp],
) -> list[BucketPart]:
    """Those of rows that are in order, and of which each bucket's begin at `firsts`."""
    payload = gather_payloads(blob, starts, rows)
    counts = np.diff(firsts, append=len(rows))
    bounds = np.append(rows["payload_offset"][firsts], len(payload)).astype(np.int64)
    rows["payload_offset"] -= np.repeat(bounds[:-1], counts).astype(rows["payload_offset"].dtype)
    is_entry = (rows["flags"] & FLAG_REMOVAL) == 0
    owners = np.repeat(np.arange(len(firsts)), counts)
    of_buckets = buckets[firsts].tolist()
    by_hour = counts_by_hour(rows, owners).tolist() if is_day(of_buckets[-1]) else None
    return [
        BucketPart(
            bucket,
            rows[first : first + count],
            payload[begin:end],
            entries,
            last_entry_seq,
            by_hour[number] if by_hour is not None and is_day(bucket) else [],
        )
        for number, (bucket, first, count, begin, end, entries, last_entry_seq) in enumerate(
            zip(
                of_buckets,
                firsts.tolist(),
                counts.tolist(),
                bounds[:-1].tolist(),
                bounds[1:].tolist(),
                np.add.reduceat(is_entry.astype(np.int64), firsts).tolist(),
                np.maximum.reduceat(np.where(is_entry, rows["seq"], 0), firsts).tolist(),
                strict=True,
            )
        )
    ]


def counts_by_hour(rows: Rows, owners: NDArray[np.int64]) -> NDArray[np.int64]:
    """Entries less tombstones by the hours of their days, for each owner: of shape (owners, 24).

    `owners`: of each row, from 0 without gaps."""
    hours = owners * DAY_HOURS + rows["due_ms"] // HOUR_MS % DAY_HOURS
    signs = np.where(rows["flags"] & FLAG_REMOVAL, -1, 1)
    counts = np.bincount(hours, signs, (int(owners[-1]) + 1) * DAY_HOURS)
    return counts.astype(np.int64).reshape(-1, DAY_HOURS)


def by_bucket(buckets: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.intp]]]:
    """Each bucket, hours before days, and the indexes of those that are in it, ascending."""
    if len(buckets):
        order, firsts = _order(buckets)
        for here in np.split(order, firsts[1:]):
            yield int(buckets[here[0]]), here


def _order(buckets: NDArray[np.int64]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The indexes of all, bucket by bucket, and where in them each bucket begins."""
    first, last = int(buckets.min()), int(buckets.max())
    if not is_day(first) and is_day(last):
        # Days as if they followed the hours.
        hours = buckets[buckets < DAY_FLAG]
        gap = int(buckets[buckets >= DAY_FLAG].min()) - int(hours.max()) - 1
        numbers = np.where(buckets >= DAY_FLAG, buckets - gap, buckets) - first
        last -= gap
    else:
        numbers = buckets - first
    # NumPy sorts short numbers by their digits, in a fifth of the time.
    short = np.uint16 if last - first < _SHORT_SPAN else np.int64
    order = np.argsort(numbers.astype(short), kind="stable")
    return order, np.flatnonzero(np.diff(buckets[order], prepend=-1))
