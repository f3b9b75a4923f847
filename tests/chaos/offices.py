"""The owners of a shard, as its log says, followed from the first record on.

    log of a shard ──▶ OfficeWatch (a thread) ──▶ Ledger.tenures, which the rules judge at the end

Times in tenures are those that the records carry, without the offset of the node's clock: the
machine has one clock.

Cost: that of `RecordReader`, some µs a record. Threads: one for each shard; the event loop may read
the tenures at any time.
"""

import threading
from collections.abc import Callable
from typing import Final

from storage.errors import StorageError
from storage.replicated.engine import EngineLog
from storage.replicated.envelope import Claim, Release
from storage.replicated.office import OfficeState, RecordDecision
from storage.replicated.reader import RecordReader, RecordReading
from tests.harness.ledger import Tenure
from tests.waiting import Looks

READ_S: Final = 0.2
PATIENCE_S: Final = 10.0


class OfficeWatch(threading.Thread):
    """Reads the log of one shard as long as it runs."""

    def __init__(
        self,
        shard: int,
        log: EngineLog,
        stamp: int,
        tenures: list[Tenure],
        node_of: Callable[[int], tuple[str, int]],
    ) -> None:
        """`tenures` is filled; `node_of`: name and offset of the clock of the node with a number,
        as they are just now."""
        super().__init__(name=f"chaos-offices-{shard}", daemon=True)
        self.tenures = tenures
        self.void = 0
        """Records that do not count."""
        self.failure: str | None = None
        self.shard = shard
        self._log = log
        self._reader = RecordReader(log, stamp, OfficeState())
        self._node_of = node_of
        self._ending = threading.Event()

    @property
    def owner(self) -> str | None:
        """The name of the node in office; None: it is vacant."""
        last = self.tenures[-1] if self.tenures else None
        return None if last is None or last.is_released else last.node

    def run(self) -> None:
        try:
            while not self._ending.is_set():
                for read in self._reader.read(READ_S):
                    self._see(read)
        except (StorageError, AssertionError) as error:
            self.failure = f"the log of shard {self.shard} cannot be read: {error!r}"

    def _see(self, read: RecordReading) -> None:
        record = read.record
        if read.verdict is RecordDecision.VOID:
            self.void += 1
            return
        node, offset_ms = self._node_of(record.node)
        at_ms = record.clock_ms - offset_ms
        if isinstance(record, Claim):
            self.tenures.append(Tenure(record.epoch, node, at_ms, at_ms))
            return
        tenure = self.tenures[-1]
        tenure.last_ms = at_ms
        tenure.is_released = isinstance(record, Release)

    def has_read(self, offset: int | None) -> bool:
        """Whether it has read up to `offset`. None: it is not known how far the log goes."""
        return offset is not None and self._reader.office.state.next_offset >= offset

    def end(self, offset: int | None) -> None:
        """Read up to `offset` if it can be, and end."""
        for _ in Looks(PATIENCE_S, READ_S):
            if not self.is_alive() or self.has_read(offset):
                break
        self._ending.set()
        self.join(PATIENCE_S)
