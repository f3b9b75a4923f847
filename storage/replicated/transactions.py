"""Records for another operator's topics and settled rows, committed together or not at all.

    records ──┐
              ├──▶ one transaction ──▶ all of it can be read, or nothing ever
    rows ─────┘

The rows stand in the log of settled deliveries as any others (`storage.replicated.settled`). So a
reader of that log that takes only committed records knows of each message whether it has left.
Transactions never go into a shard's message log: their markers take offsets, and the office counts
on gapless ones.

Several transactions are under way at once, one in each slot. A slot has a name that is the same for
all owners of the shard: a process that opens it ends any transaction that another process has left
open there, and shuts that process out.

Threads: `commit` blocks; each slot belongs to one thread at a time, all else to any.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

SLOTS: Final = 4
"""The next transaction of a slot has to wait until the markers of the last are written."""

Header = tuple[str, str | bytes | None]


class TopicRecord(NamedTuple):
    """A record for a topic."""

    topic: str
    value: bytes
    key: bytes | None
    """Chooses the partition; None: any."""
    headers: list[Header]


@dataclass(frozen=True, slots=True)
class Committed:
    """All of it is there."""

    offset: int
    """The offset of the rows, in the log of settled deliveries."""


@dataclass(frozen=True, slots=True)
class Aborted:
    """Nothing of it is there, and nothing ever will be."""

    reason: str
    refused: Mapping[int, str]
    """By index the records that cannot be written, and why; none: it was not for them."""
    neighbours: frozenset[int] = frozenset()
    """Those of them that were refused in a batch, of which one may be the cause."""


class SettledTransactions(Protocol):
    """The transactions of one shard's owner."""

    def differs(self, bootstrap: str) -> str | None:
        """Why these brokers are not those of the log of settled deliveries; None: they are."""

    def open(self) -> None:
        """Shut out the processes that had the slots before, and end open transactions.

        Waits for brokers. A read of the log behind this returns all that there is. Called again, it
        does nothing. Raises EngineError."""

    def commit(
        self, slot: int, records: Sequence[TopicRecord], rows: bytes, now_ms: int
    ) -> Committed | Aborted:
        """One transaction. It has been opened before.

        Raises FencedError: another has opened the slots, or the outcome is not known."""

    def give_up(self) -> None:
        """From now on `commit` does not wait for brokers that are away. Called by any thread."""

    def close(self) -> None:
        """Let go of the connections. No transaction is under way."""
