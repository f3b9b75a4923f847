"""A log engine in memory: what `storage.replicated.engine` asks for, without brokers.

A `MemoryLog` is one process's way to a log; `another` is that of a second process to the same one.
Outcomes can be planned:

    log.outcome = AppendOutcome.UNANSWERED    what is appended now is there, and nobody is told
    log.outcome = AppendOutcome.LOST          it is not there, and nobody is told
    log.is_reachable = False                  the end is not known, and nothing new is read

Tests of the contract run over this and over real brokers alike (tests/engine_contract.py).

Cost: a lock and a copy of the list of records that are read. Threads: each `MemoryLog` belongs to
one thread at a time, and several to several: a reader that waits is woken by an append.
"""

import threading
from collections.abc import Sequence
from enum import Enum
from typing import Final

from storage.errors import EngineError, OffsetRangeError

READ_RECORDS_MAX: Final = 512
"""Of one read: a reader has to come back for more, as with a real engine."""


class AppendOutcome(Enum):
    """What becomes of an append."""

    ANSWERED = 1
    UNANSWERED = 2
    """It is in the log."""
    LOST = 3
    """It is not."""


class _Records:
    """The records that all ways to a log share."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.first = 0
        self.kept: list[bytes | None] = []
        """None: an offset that no record has."""

    @property
    def end(self) -> int:
        return self.first + len(self.kept)


class MemoryLog:
    """A log in memory, as an `EngineLog`."""

    def __init__(self, name: str = "memory/0", records: _Records | None = None) -> None:
        self.name = name
        self.outcome = AppendOutcome.ANSWERED
        self.is_reachable = True
        self.place = 0
        self._records = _Records() if records is None else records
        self._has_failed = False

    def another(self) -> "MemoryLog":
        """The same log, opened by another process."""
        return MemoryLog(self.name, self._records)

    def prepare_append(self) -> None:
        """See `EngineLog`."""

    def append(self, records: Sequence[bytes]) -> list[int | None]:
        """See `EngineLog`."""
        assert not self._has_failed, f"{self.name}: an append has failed before"
        with self._records.changed:
            begin = self._records.end
            if self.outcome is not AppendOutcome.LOST:
                self._records.kept += map(bytes, records)
                self._records.changed.notify_all()
        if self.outcome is AppendOutcome.ANSWERED:
            return list(range(begin, begin + len(records)))
        self._has_failed = True
        return [None] * len(records)

    def read(self, offset: int, wait_s: float) -> list[tuple[int, bytes]]:
        """See `EngineLog`."""
        shared = self._records
        with shared.changed:
            if not shared.first <= offset <= shared.end:
                raise OffsetRangeError(self.name, offset, shared.first, shared.end)
            self.place = offset
            if not self.is_reachable:
                return []
            if offset == shared.end:
                shared.changed.wait_for(lambda: offset < shared.end, wait_s)
            begin = offset - shared.first
            found = shared.kept[begin : begin + READ_RECORDS_MAX]
        self.place = offset + len(found)
        return [(at, data) for at, data in enumerate(found, offset) if data is not None]

    def mark(self) -> None:
        """A transaction ends: an offset that no record has."""
        with self._records.changed:
            self._records.kept.append(None)
            self._records.changed.notify_all()

    def end(self) -> int | None:
        """See `EngineLog`."""
        with self._records.changed:
            return self._records.end if self.is_reachable else None

    def delete_before(self, offset: int) -> None:
        """See `EngineLog`. It is done at once."""
        shared = self._records
        with shared.changed:
            if offset > shared.end:
                reason = f"{offset} is behind the end, {shared.end}"
                raise EngineError("delete records", self.name, reason, "delete what is there")
            if offset > shared.first:
                del shared.kept[: offset - shared.first]
                shared.first = offset

    def close(self) -> None:
        """See `EngineLog`. The records stay."""
