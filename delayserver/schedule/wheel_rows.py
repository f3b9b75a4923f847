"""A message as it waits in memory: a row of 24 bytes that says where its payload is.

    seq u64 │ locator u64: offset (40 bits) and length (24) in the hour's file │ due u32 │ route u32

The body stays on the disk until the row fires. The due time counts from the begin of the hour, so
that it fits into 32 bits; therefore rows are kept by their hour, here and in the queues. The length
of the payload stands in the row from the begin, so that a consumer of rows knows how many bytes
will be read for them.

Cost: some 10 ns per row; 20 µs for the bounds of 10,000 rows, once. Threads: pure functions;
`FiredRows` belongs to the thread that has it.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayserver.records.message import ScheduleEntry
from storage.buckets import start_ms
from storage.frame import Rows
from storage.rows import FLAG_OPTIONS, HOUR_MS, PRIORITY_OF_GROUP, PRIORITY_SHIFT, concatenate

WHEEL_DTYPE = np.dtype(
    [("seq", "<u8"), ("locator", "<u8"), ("due_offset_ms", "<u4"), ("route", "<u4")]
)
"""A waiting row: `seq` of its schedule row (0: removed), where its payload is (offset, 0 as long as
it is not filed, and length), due time within its hour, and the route: a subject id or, with
ROUTE_SUBSCRIPTION, a subscription id; in ROUTE_PRIORITY its priority, ROUTE_OPTIONS where its
payload has a time to live, and ROUTE_GROUP where it has a group: then that says the priority."""
ROUTE_SUBSCRIPTION = 1 << 31
_PRIORITY_SHIFT = 27
ROUTE_PRIORITY = 0xF << _PRIORITY_SHIFT
ROUTE_OPTIONS = 1 << 26
ROUTE_GROUP = 1 << 25
ROUTE_NUMBER = ROUTE_GROUP - 1
"""The bits of a route that are the id, without the flags."""
LOCATOR_LENGTH_BITS = 24
PAYLOAD_MAX_BYTES = (1 << LOCATOR_LENGTH_BITS) - 1
"""A locator's length; the bits above are the offset. An unfiled row has the length alone."""


def wheel_rows(entries: Rows, hour: int, payload_start: int | np.ndarray) -> Rows:
    """Entries (SCHEDULE_DTYPE) of one hour as they wait in the wheel (WHEEL_DTYPE); of a day, for a
    look at messages that are far off.

    `payload_start`: where in the hour's file the payloads of their frame begin, or of each one's
    frame."""
    rows = np.empty(len(entries), WHEEL_DTYPE)
    rows["seq"] = entries["seq"]
    offsets = entries["payload_offset"].astype(np.uint64)
    offsets += np.asarray(payload_start, np.uint64)
    rows["locator"] = offsets << np.uint64(LOCATOR_LENGTH_BITS) | entries["payload_length"]
    rows["due_offset_ms"] = entries["due_ms"] - start_ms(hour)
    subscription = entries["subscription_id"]
    rows["route"] = np.where(
        subscription == 0, entries["subject_id"], subscription | ROUTE_SUBSCRIPTION
    )
    flags = entries["flags"]
    if (flags >= FLAG_OPTIONS).any():  # or a priority
        rows["route"] |= _ROUTE_BITS[flags]
    return rows


def route_of(subject_id: int, subscription_id: int) -> int:
    """The route of a row of a subject or, if that is not 0, for one subscription."""
    return subscription_id | ROUTE_SUBSCRIPTION if subscription_id else subject_id


def route_bits(flags: int) -> int:
    """The flags in the route of a row, from the flags of its record (`row_flags`)."""
    priority = flags >> PRIORITY_SHIFT
    bits = ROUTE_GROUP if priority == PRIORITY_OF_GROUP else priority_bits(priority)
    return bits | ROUTE_OPTIONS if flags & FLAG_OPTIONS else bits


def priority_bits(priority: int) -> int:
    """The priority in the bits of a route."""
    return priority << _PRIORITY_SHIFT


def priority_of(route: int) -> int:
    """The priority that a route says."""
    return (route & ROUTE_PRIORITY) >> _PRIORITY_SHIFT


_ROUTE_BITS = np.array([route_bits(flags) for flags in range(256)], np.uint32)


class Bounds(NamedTuple):
    """Between which due times, in their hour, and seqs some rows are, or closer together."""

    first_offset_ms: int
    last_offset_ms: int
    first_seq: int
    last_seq: int


@dataclass(slots=True)
class FiredRows:
    """Rows of one hour that fired together, or wait together since (WHEEL_DTYPE)."""

    hour: int
    rows: Rows
    known_bounds: Bounds | None = None
    """The bounds, once a caller has asked for them."""

    def due_ms(self, count: int | None = None) -> NDArray[np.int64]:
        """When the first `count` rows are due; None: all of them."""
        offsets: NDArray[np.int64] = self.rows["due_offset_ms"][:count].astype(np.int64)
        return offsets + start_ms(self.hour)

    def first_ms(self) -> int:
        """When the first row is due."""
        return start_ms(self.hour) + int(self.rows["due_offset_ms"][0])

    def marks(self) -> int:
        """The flags in the route of any of the rows."""
        routes = self.rows["route"]
        return int(routes[0]) if len(routes) == 1 else int(np.bitwise_or.reduce(routes))

    def payload_bytes(self, count: int) -> NDArray[np.int64]:
        """How long the sealed payloads of the first `count` rows are."""
        lengths: NDArray[np.int64] = (self.rows["locator"][:count] & PAYLOAD_MAX_BYTES).astype(
            np.int64
        )
        return lengths

    def bounds(self) -> Bounds:
        """Between which due times and seqs they are."""
        if self.known_bounds is None:
            dues, seqs = self.rows["due_offset_ms"], self.rows["seq"]
            self.known_bounds = Bounds(
                int(dues.min()), int(dues.max()), int(seqs.min()), int(seqs.max())
            )
        return self.known_bounds

    def find(self, entry: ScheduleEntry) -> NDArray[np.intp]:
        """Where a row is among them, which may be asked of many: shape 0 or 1."""
        if self.hour != entry.hour:
            return NOWHERE
        first_offset_ms, last_offset_ms, first_seq, last_seq = self.bounds()
        if not first_seq <= entry.seq <= last_seq:
            return NOWHERE
        if not first_offset_ms <= entry.due_ms % HOUR_MS <= last_offset_ms:
            return NOWHERE
        return np.flatnonzero(self.rows["seq"] == entry.seq)

    def join(self, behind: "FiredRows") -> "FiredRows":
        """These rows, and those of the same hour behind them: a copy."""
        assert self.hour == behind.hour
        mine, others = self.known_bounds, behind.known_bounds
        bounds = None
        if mine is not None and others is not None:
            bounds = Bounds(
                min(mine.first_offset_ms, others.first_offset_ms),
                max(mine.last_offset_ms, others.last_offset_ms),
                min(mine.first_seq, others.first_seq),
                max(mine.last_seq, others.last_seq),
            )
        return FiredRows(self.hour, concatenate([self.rows, behind.rows], WHEEL_DTYPE), bounds)


NOWHERE = np.empty(0, np.intp)
