"""A log of the engine read once, from an offset to where it ends now.

Cost: that of the reads. Threads: those of the log.
"""

from collections.abc import Iterator
from typing import Final

from storage.errors import EngineError
from storage.replicated.engine import EngineLog

READ_WAIT_S: Final = 1.0
TRIES: Final = 15
"""Reads in a row without a record, though the engine says that there are some: longer than the
brokers of a partition need to elect another leader."""
END_TRIES: Final = 5
"""Questions in a row where the log ends; an engine on a busy machine may not answer the first."""


def read_to_end(log: EngineLog, offset: int, end: int | None = None) -> Iterator[tuple[int, bytes]]:
    """The records from `offset` to where the log ends now, or to `end`.

    Raises EngineError where the engine does not say where that is, or does not give them, and
    OffsetRangeError where the log does not hold `offset`."""
    if end is None:
        asked = (log.end() for _ in range(END_TRIES))
        end = next((found for found in asked if found is not None), None)
    if end is None:
        raise _unreadable(log, "the engine does not say where the log ends")
    tries = 0
    while offset < end:
        records = log.read(offset, READ_WAIT_S)
        yield from records
        if records:
            offset, tries = records[-1][0] + 1, 0
        elif (tries := tries + 1) == TRIES:
            raise _unreadable(log, f"there is no record {offset}, and the log ends at {end}")


def _unreadable(log: EngineLog, reason: str) -> EngineError:
    return EngineError("read", log.name, reason, "see whether the brokers run, then try again")
