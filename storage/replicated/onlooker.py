"""Looks on a shard without a replica: which node owns it, now and from now on.

It begins a little before the end of the log, and reads all that comes. An owner's CLAIM says where
it is found. The CLAIM of an owner that has been there for longer than the piece that was read is
not seen, and its address has to be learnt elsewhere.

Cost: it fetches all that is written to the log, and takes 3 µs a record. Threads: one, the
caller's.

Rejected: to be told by others alone. The brokers know of an owner up to seven seconds later than
its CLAIM, and calls would wait for that at each take-over.
"""

from typing import Final

from storage.errors import OffsetRangeError
from storage.replicated.engine import EngineLog
from storage.replicated.envelope import NOBODY, decode
from storage.replicated.sighting import Sighting

TAIL_RECORDS: Final = 500
"""The records of a shard's log that show its owner: it writes at least two a second."""


class Onlooker:
    """The owner of one shard, as far as its log shows it."""

    def __init__(self, log: EngineLog) -> None:
        self._log = log
        self._seen = Sighting()
        self._offset: int | None = None
        """All records before it were read; None: it begins near the end."""

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
        """Take in the records that have come, waiting for them up to `wait_s`. Returns whether
        another node owns the shard, or its owner is found elsewhere.

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
            # Records that were not needed any more were deleted, or the log has lost its end:
            # nothing here depends on it.
            self._offset = error.first if error.offset < error.first else None
        return (self.epoch, self.address) != before

    def close(self) -> None:
        """Let go of the log."""
        self._log.close()
