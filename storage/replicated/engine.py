"""The five calls of an engine that keeps a shard's replicated log.

The engine keeps totally ordered logs to which several processes may append. An append is answered
with the record's offset once a quorum has it. Offsets follow one another without gaps, except in
the log of settled deliveries, where transactions leave marks that are no records. The rules by
which several processes agree are in the records (`storage.replicated.office`), so any engine that
offers these calls will do: `storage.replicated.kafka` is one, `tests.world.storage.engine` another.

Threads: an `EngineLog` belongs to one thread at a time. A process that reads in one thread and
appends in another opens the log twice.
"""

from collections.abc import Sequence
from typing import Protocol


class EngineLog(Protocol):
    """One log of the engine, as one process sees it."""

    name: str
    """For people: topic and partition."""
    place: int
    """The offset up to which the last `read` has looked: every record before it was returned, or
    does not count. In a log with transactions it may be behind the last record, once a read has
    come to the end."""

    def prepare_append(self) -> None:
        """Connect the producer, so that the first append does not wait for it. Does not wait."""

    def append(self, records: Sequence[bytes]) -> list[int | None]:
        """Append records in this order, and wait until the engine has answered for each.

        Returns the offset of each; None: it may be in the log, and it may not. After a None the
        process must not append again: an owner's tenure is over with it, and a process that starts
        anew opens the log anew."""

    def read(self, offset: int, wait_s: float) -> list[tuple[int, bytes]]:
        """Records from `offset` on, each with its own, in order; as many as are at hand.

        If there are none it waits for the first, at most `wait_s`, and returns an empty list where
        none came: the log may end there, and the engine may be away (`end` tells).
        Raises OffsetRangeError where the log does not hold `offset` any more, or ends before it."""

    def end(self) -> int | None:
        """The offset behind the last record a quorum has, as the engine says it now; None where
        it cannot say so within a second or two."""

    def delete_before(self, offset: int) -> None:
        """Have the engine delete the records before `offset`, some time. Raises EngineError."""

    def close(self) -> None:
        """Let go of the connections. Appended records without an answer may still arrive."""
