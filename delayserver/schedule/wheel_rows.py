"""A row as it waits in the wheel: 24 bytes, and where its payload is.

Cost: none. Threads: pure functions.
"""

from dataclasses import dataclass

import numpy as np

from delayserver.records.message import Entry
from storage.frame import Rows
from storage.rows import HOUR_MS


def wheel_rows(entries: Rows, hour: int, payload_start: int | np.ndarray) -> Rows:
    """Schedule rows as they wait in the wheel; `payload_start`: of their frames' blobs."""
    rows = np.empty(len(entries), WHEEL_DTYPE)
    rows["seq"] = entries["seq"]
    offsets = entries["payload_offset"].astype(np.uint64) + np.uint64(payload_start)
    rows["locator"] = offsets << np.uint64(24) | entries["payload_length"]
    rows["due_offset_ms"] = entries["due_ms"] - hour * HOUR_MS
    subscription = entries["subscription_id"]
    rows["route"] = np.where(
        subscription == 0, entries["subject_id"], subscription | ROUTE_SUBSCRIPTION
    )
    return rows


WHEEL_DTYPE = np.dtype(
    [("seq", "<u8"), ("locator", "<u8"), ("due_offset_ms", "<u4"), ("route", "<u4")]
)
"""A waiting row: `seq` of its schedule row (0: removed), where its payload is (`pack_locator`; 0:
not filed yet), due time within its hour, and the route: a subject id or, with ROUTE_SUBSCRIPTION, a
subscription id."""
ROUTE_SUBSCRIPTION = 1 << 31
_LENGTH_BITS = 24
PAYLOAD_MAX_BYTES = (1 << _LENGTH_BITS) - 1


def pack_locator(offset: int, length: int) -> int:
    """Offset in the hour's file (40 bits) and length (24 bits) of a payload in one u64."""
    return offset << _LENGTH_BITS | length


def unpack_locator(locator: int) -> tuple[int, int]:
    """Offset and length again."""
    return locator >> _LENGTH_BITS, locator & PAYLOAD_MAX_BYTES


@dataclass(slots=True)
class Batch:
    """Rows of one hour, in the order of their due time."""

    hour: int
    rows: Rows

    def may_hold(self, entry: Entry) -> bool:
        """Whether a row that is due at that time may be among them: to be asked of many."""
        if self.hour != entry.hour or not len(self.rows):
            return False
        dues = self.rows["due_offset_ms"]
        return bool(dues[0] <= entry.due_ms % HOUR_MS <= dues[-1])
