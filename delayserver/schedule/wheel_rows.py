"""A message as it waits in memory: a row of 24 bytes that says where its payload is.

    seq u64 │ locator u64: offset (40 bits) and length (24) in the hour's file │ due u32 │ route u32

The body stays on the disk until the row fires. The due time counts from the begin of the hour, so
that it fits into 32 bits; therefore rows are kept by their hour, here and in the queues.

Cost: some 10 ns per row. Threads: pure functions; `FiredRows` belongs to who has it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from delayserver.records.message import ScheduleEntry
from storage.frame import Rows
from storage.rows import HOUR_MS

WHEEL_DTYPE = np.dtype(
    [("seq", "<u8"), ("locator", "<u8"), ("due_offset_ms", "<u4"), ("route", "<u4")]
)
"""A waiting row: `seq` of its schedule row (0: removed), where its payload is (offset and length;
0: not filed yet), due time within its hour, and the route: a subject id or, with
ROUTE_SUBSCRIPTION, a subscription id."""
ROUTE_SUBSCRIPTION = 1 << 31
LOCATOR_LENGTH_BITS = 24
PAYLOAD_MAX_BYTES = (1 << LOCATOR_LENGTH_BITS) - 1
"""A locator's length; what is above is the offset."""


def wheel_rows(entries: Rows, hour: int, payload_start: int | np.ndarray) -> Rows:
    """Entries (SCHEDULE_DTYPE) of one hour as they wait in the wheel (WHEEL_DTYPE).

    `payload_start`: where in the hour's file the payloads of their frame begin, or of each one's
    frame."""
    rows = np.empty(len(entries), WHEEL_DTYPE)
    rows["seq"] = entries["seq"]
    offsets = entries["payload_offset"].astype(np.uint64) + np.uint64(payload_start)
    rows["locator"] = offsets << np.uint64(LOCATOR_LENGTH_BITS) | entries["payload_length"]
    rows["due_offset_ms"] = entries["due_ms"] - hour * HOUR_MS
    subscription = entries["subscription_id"]
    rows["route"] = np.where(
        subscription == 0, entries["subject_id"], subscription | ROUTE_SUBSCRIPTION
    )
    return rows


@dataclass(slots=True)
class FiredRows:
    """Rows of one hour that fired together (WHEEL_DTYPE), in the order of their due time."""

    hour: int
    rows: Rows

    def due_ms(self, count: int | None = None) -> NDArray[np.int64]:
        """When the first `count` rows are due; None: all of them."""
        offsets: NDArray[np.int64] = self.rows["due_offset_ms"][:count].astype(np.int64)
        return offsets + self.hour * HOUR_MS

    def first_ms(self) -> int:
        """When the first row is due."""
        return self.hour * HOUR_MS + int(self.rows["due_offset_ms"][0])

    def may_hold(self, entry: ScheduleEntry) -> bool:
        """Whether a row that is due at that time may be among them: to be asked of many."""
        if self.hour != entry.hour or not len(self.rows):
            return False
        dues = self.rows["due_offset_ms"]
        return bool(dues[0] <= entry.due_ms % HOUR_MS <= dues[-1])
