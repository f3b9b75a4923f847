"""A group: records that are written and synced together, and answered together.

It holds all that each stage of its way needs: rows and payloads for the committer, the waiters to
tell when it is durable, the calls to make on the event loop then (`effects`, `express`), and the
calls that undo its decisions if it cannot be written (`undo`). After `tell_waiters` only rows and
payloads are left, from which bodies are read until the group is filed.

Rejected: one object per record. A group of 1,000 publishes is two lists of bytes, which become one
write; objects would be walked by the garbage collector until the group is filed.

Cost: none but the lists. Threads: belongs to the event loop until it is closed; from then until it
is durable the committer reads rows and payloads, and no thread changes them.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from delayserver.decisions.packing import MESSAGE_ROW
from delayserver.errors import OverloadedError
from storage.rows import MESSAGE_DTYPE

Waiter = Callable[[Exception | None], None]


@dataclass(slots=True)
class Group:
    """Records that are written and synced together; answered together."""

    first_seq: int
    created_ms: int = 0
    count: int = 0
    rows: list[bytes] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)
    payload_bytes: int = 0
    waiters: list[Waiter] = field(default_factory=list)
    is_ended: bool = False
    """The waiters have been told."""
    error: Exception | None = None
    undo: list[Callable[[], None]] = field(default_factory=list)
    effects: list[Callable[[], None]] = field(default_factory=list)
    """Calls on the event loop once the group is durable."""
    express: list[tuple[int, int, int]] = field(default_factory=list)
    """Rows that the event loop itself puts into the wheel once they are durable, since filing them
    first might be too late: seq, due_ms, route; by seq. Replay files them and no more."""
    import_count: int = 0
    """Not 0: the last row is an import, which takes so many seqs."""

    @property
    def last_seq(self) -> int:
        """The seq of its last record, or of the last message of its import."""
        return self.first_seq + self.count - 1 + max(0, self.import_count - 1)

    @property
    def import_last_seq(self) -> int:
        """The last seq of the import in it; 0 where there is none."""
        return self.last_seq if self.import_count else 0

    @property
    def total_bytes(self) -> int:
        """Length of its rows and payloads."""
        return self.count * MESSAGE_ROW.size + self.payload_bytes

    def is_express(self, seq: int) -> bool:
        """Whether the row of record `seq` goes to the wheel by the express way."""
        place = bisect_left(self.express, seq, key=itemgetter(0))
        return place < len(self.express) and self.express[place][0] == seq

    def when_durable(self, waiter: Waiter) -> None:
        """Call `waiter` when the group is durable, or with the error that kept it from being so."""
        if self.is_ended:
            waiter(self.error)
        else:
            self.waiters.append(waiter)

    def tell_waiters(self, error: Exception | None) -> None:
        """The group is durable, or `error` kept it from being so: call all waiters with that."""
        self.is_ended, self.error = True, error
        waiters, self.waiters = self.waiters, []
        # It lives on until it is filed: the garbage collector must not walk over these until then.
        self.undo, self.effects = [], []
        for waiter in waiters:
            waiter(error)

    def encode(self) -> tuple[bytes, bytes]:
        """Rows and payloads as they stand in the frame."""
        return _joined(self.rows), _joined(self.payloads)

    def payload_lengths(self) -> NDArray[np.uint32]:
        """How long the sealed payload of each record is, as it stands in its row."""
        rows, _ = self.encode()
        lengths: NDArray[np.uint32] = np.frombuffer(rows, MESSAGE_DTYPE)["payload_length"]
        return lengths

    def payload(self, seq: int) -> tuple[bytes, int]:
        """The sealed payload of one of its records, and the record's subject id.

        Raises OverloadedError for a message of an import, whose payload is not in memory."""
        index = seq - self.first_seq
        if self.import_count and index >= self.count - 1:
            raise OverloadedError("the message was imported a moment ago, and is being filed", 1000)
        rows, payloads = self.encode()
        row = MESSAGE_ROW.unpack_from(rows, index * MESSAGE_ROW.size)
        offset, length = row[8], row[9]
        return payloads[offset : offset + length], row[6]


def _joined(parts: list[bytes]) -> bytes:
    """The parts as one, which takes their place: it is asked for again."""
    if len(parts) > 1:
        parts[:] = [b"".join(parts)]
    return parts[0] if parts else b""
