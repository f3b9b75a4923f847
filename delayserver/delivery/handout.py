"""Handouts: rows whose bodies are read together, and the next step with them.

    rows leave a queue ──▶ Handout ──▶ read ──▶ on_read: sent, leased, or given up
    rows wait ───────────▶ Handout ──▶ read ──▶ on_read: now it is known when they expire, …

The maker of a handout says by `on_read` how it goes on; no other code knows its purpose. Rows that
could not be read were reported, and are not among the deliveries.

Cost: a few objects for all rows together. Threads: made on the event loop, read by the reader.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from delayserver.delivery.deliveries import Deliveries
from delayserver.schedule.wheel_rows import FiredRows

READ_ROWS_MAX = 512
"""Rows that are read in one go, so that the event loop is not held up."""


def _unused(handout: "Handout", deliveries: Deliveries, now_ms: int) -> None:
    raise AssertionError("it was read by who made it")


@dataclass(slots=True)
class Handout:
    """Rows of one subscription that are read together; never empty."""

    subscription_id: int
    """0: rows of no subscription, or of several."""
    slices: list[FiredRows]
    on_read: Callable[["Handout", Deliveries, int], None] = _unused
    """Called once on the event loop (by `answer`), unless the maker has it read at once."""
    attempts: Mapping[int, int] = field(default_factory=dict)
    """Attempts of rows that were handed out before in this process, by seq."""
    is_to_leave: bool = False
    """The rows have left their queue to be delivered."""
    broker_bytes: int = 0
    """Bytes that they count for among those of a broker while they are read."""

    @property
    def first_seq(self) -> int:
        """By which a request that carries them is known (`Queue.posts`)."""
        return int(self.slices[0].rows["seq"][0])

    @property
    def count(self) -> int:
        """How many rows."""
        return sum(len(fired.rows) for fired in self.slices)

    @property
    def total_bytes(self) -> int:
        """Bytes of their payloads."""
        return sum(int(fired.payload_bytes(len(fired.rows)).sum()) for fired in self.slices)

    def answer(self, deliveries: Deliveries, now_ms: int) -> None:
        """It was read; `deliveries` are the rows that could be read."""
        self.on_read(self, deliveries, now_ms)

    def unread(self, deliveries: Deliveries) -> list[int]:
        """The seqs of its rows that could not be read; `deliveries` are those that could."""
        if self.count == len(deliveries):
            return []
        unread = Counter(seq for fired in self.slices for seq in fired.rows["seq"].tolist())
        unread.subtract(deliveries.settled["seq"].tolist())
        return list(unread.elements())
