"""Looks on a shard without a replica: who owns it now, and who from now on.

It begins a little before the end of the log, and reads all that comes. Where an owner is found its
CLAIM says; that of an owner who has been there for longer than the piece that was read is not seen,
and has to be learnt elsewhere.

Cost: what is written to the log is fetched, and 3 µs a record. Threads: one, the caller's.

Rejected: to be told by others alone. What the brokers keep of an owner comes up to seven seconds
later than its CLAIM, and calls would wait for that at each take-over.
"""

from typing import Final

from storage.errors import OffsetRangeError
from storage.replicated.engine import EngineLog
from storage.replicated.envelope import NOBODY, decode
from storage.replicated.sighting import Sighting

TAIL_RECORDS: Final = 500
"""Of a shard's log, to see its owner: it writes at least two a second."""


class Onlooker:
    """What is seen of one shard."""

    def __init__(self, log: EngineLog) -> None:
        self._log = log
        self._seen = Sighting()
        self._offset: int | None = None
        """What stands before it was read; None: it begins near the end."""

    @property
    def epoch(self) -> int:
        """The highest in which an owner was seen; 0: none was."""
        return self._seen.epoch

    @property
    def address(self) -> str | None:
        """Where the owner is found; empty: there is none. None: it is not known."""
        seen = self._seen
        if not seen.epoch:
            return None
        return "" if seen.owner == NOBODY else seen.address

    @property
    def is_there(self) -> bool:
        """Whether it reads the log, so that it sees who owns the shard."""
        return self._offset is not None

    def step(self, wait_s: float) -> bool:
        """Take in what has come, waiting for it up to `wait_s`; whether somebody else owns the
        shard, or is found elsewhere.

        Raises EngineError where reading is refused, RecordDamageError, NewerRecordError."""
        if self._offset is None:
            end = self._log.end()  # It waits by itself where the engine is away.
            if end is None:
                return False
            self._offset = max(0, end - TAIL_RECORDS)
        before = self.epoch, self.address
        try:
            for offset, data in self._log.read(self._offset, wait_s):
                self._seen.see(decode(data, self._log.name, offset))
                self._offset = offset + 1
        except OffsetRangeError as error:
            # What was not needed any more was deleted, or the log has lost its end: nothing here
            # depends on it.
            self._offset = error.first if error.offset < error.first else None
        return (self.epoch, self.address) != before

    def close(self) -> None:
        """Let go of the log."""
        self._log.close()
