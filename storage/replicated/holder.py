"""The holder of a shard's office: every record that an owner appends goes through here.

    groups, beats, leases, release ──▶ Holder ──▶ engine ──▶ offsets ──▶ Tenure: do they count? (R1)

An offset may be behind the expected one for two reasons. An owner before this one sends late the
records that it had under way when it was cut off, or two nodes have claimed and this one was
quicker. The owner then reads the records in between. Every node judges them alike (I15), so if none
of them is a claim that counts, this record counts, as all others will see. To leave the office for
them would be a second outage for nothing.

An owner writes to other logs, too, for instance to the log of settled deliveries. Such a record is
answered when this log has confirmed that the office was still held behind it (`Holder.confirm`): a
node that claims later reads it.

The owner has to be heard of all the time, also while it recovers the shard that it took over, and
while the group that it appends is waited for. So it is one object from the claim on, for all that
write. Only the engine is waited for with its lock: a disk that stalls holds up no beat.

Cost: as the engine. Threads: any may call; one append is under way at a time.
"""

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Final

from storage.errors import FencedError, StorageError
from storage.replicated import envelope
from storage.replicated.engine import EngineLog
from storage.replicated.envelope import NOBODY, Beat, LogRecord, Release
from storage.replicated.lease import Tenure
from storage.replicated.office import Office, OfficeState

LEASES_PARTS: Final = 8
"""Parts of leases that are appended together: others hear of the owner when they are."""
READ_MS: Final = 1000
"""The owner reads the records between two of its own in this time, or it leaves."""


class Holder:
    """A node's office in one shard, from its claim that counts to its end."""

    def __init__(
        self,
        node: int,
        log: EngineLog,
        office: Office,
        tenure: Tenure,
        *,
        clock: Callable[[], int],
        stopwatch: Callable[[], int],
        leases: bytes = b"",
    ) -> None:
        """`office` has read up to the claim.

        `leases`: those that the last owner has left, if it has left in order.

        `clock`: milliseconds since the epoch; `stopwatch`: milliseconds that nothing sets, as for
        the tenure."""
        self.log: Final = log
        self.filed_seq = 0
        self.settled_offset = 0
        self.live_through_hour = 0
        """The newest live hour of the beats, as far as it is known."""
        self.leases: bytes | None = leases
        """The leases that this owner leaves to the next one. As long as it has handed out nothing,
        these are those that it was left itself. None: it leaves none, as if it had been killed."""
        self._node = node
        self._office = office
        self._tenure = tenure
        self.clock: Final = clock
        self._stopwatch = stopwatch
        self._lock = threading.RLock()
        self._begun_total = 0
        """Appends that were begun."""
        self.claimed: Final = office.state
        """The state behind the claim."""

    @property
    def state(self) -> OfficeState:
        """The state of the office in the log, as far as this owner has written it."""
        return self._office.state

    def resting_state(self) -> OfficeState | None:
        """The same, between two frames; None: an append is under way."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            return self._office.checkpoint()
        finally:
            self._lock.release()

    def may_deliver(self) -> bool:
        """Whether deliveries may leave now (R2)."""
        return self._tenure.holds(self._stopwatch())

    def append_frame(self, frame: bytes) -> OfficeState:
        """Append a frame of the message log. It counts on return; returns where the log stands
        behind it. Raises FencedError: the process must answer no more requests, and has to end."""
        with self._lock:
            parts = envelope.split(
                frame, node=self._node, epoch=self.state.epoch, clock_ms=self.clock()
            )
            self._append(list(parts))
            state = self.state
            self._renew()
            return state

    def _renew(self) -> None:
        """Hold the lease again, where the log was so slow to answer that it ran out meanwhile: the
        record that was appended counts, and may be answered."""
        if not self.may_deliver():
            self._beat()

    def beat(self) -> bool:
        """Be heard of, if nothing else was said for a while; whether something was said now.
        Raises FencedError."""
        if self._stopwatch() < self._tenure.beat_due_ms:
            return False
        with self._lock:
            if self._stopwatch() < self._tenure.beat_due_ms:
                return False
            self._beat()
            return True

    def confirm(self) -> None:
        """Confirm that the office is held behind all that this process has done before: a record
        counts that was sent after this call began. It is a beat, unless another record is sent
        meanwhile.

        Raises FencedError: another node may have claimed before, having read the records up to
        then."""
        begun_before = self._begun_total
        with self._lock:
            if self._tenure.is_over or self._begun_total == begun_before:
                self._beat()
            self._renew()

    def tell_live(self, hour: int) -> None:
        """Say that `hour` is in the wheel, before anything of it fires. The next owner has to know
        which messages may have fired, whatever its clock shows then. It counts on return. Raises
        FencedError."""
        with self._lock:
            if hour > self.live_through_hour:
                self.live_through_hour = hour
                self._beat()

    def _beat(self) -> None:
        how_far = (self.filed_seq, self.settled_offset, self.live_through_hour)
        self._append([Beat(self._node, self.state.epoch, self.clock(), *how_far)])

    def leave(self, successor: int = NOBODY) -> None:
        """Give the office away, in order: nothing is delivered, appended or settled any more.

        The next owner claims at once, `successor` before all others. If the record does not get
        there, others claim when the lease has run out."""
        with self._lock:
            if self._tenure.is_over or not self._append_leases():
                return
            self._tenure.end()
            release = Release(self._node, self.state.epoch, self.clock(), successor)
            self.log.append([envelope.encode(release)])

    def _append_leases(self) -> bool:
        """Leave the consumers' leases to the next owner; whether this one is still in office."""
        if self.leases is None:
            return True
        said = {"node": self._node, "epoch": self.state.epoch, "clock_ms": self.clock()}
        parts = envelope.split_leases(self.leases, **said)
        try:
            while some := list(itertools.islice(parts, LEASES_PARTS)):
                self._append(some)
        except FencedError:
            return False
        return True

    def _append(self, records: Sequence[LogRecord]) -> None:
        if self._tenure.is_over:
            raise FencedError(self.log.name, "this process is not in office any more")
        expected = self.state.next_offset
        self._begun_total += 1
        sent_ms = self._stopwatch()
        offsets = self.log.append([envelope.encode(record) for record in records])
        for record, offset in zip(records, offsets, strict=True):
            unread = None if offset is None else self._take_in(offset)
            if not self._tenure.appended(record, offset, sent_ms):
                assert offset != expected, (record, offset, self.state)
                got = "no answer came" if offset is None else f"it is at {offset}"
                reason = f"a record was expected at offset {expected}, and {got}"
                raise FencedError(self.log.name, reason) from unread
            expected = self.state.next_offset

    def _take_in(self, end: int) -> StorageError | None:
        """Judge the records that others have written before `end`, as far as they can be read in
        time. Returns the reason if they cannot be read."""
        give_up_ms = self._stopwatch() + READ_MS
        try:
            while self.state.next_offset < end and not self._tenure.is_over:
                if self._stopwatch() >= give_up_ms:
                    return None
                for offset, data in self.log.read(self.state.next_offset, READ_MS / 1000):
                    if offset < end:
                        self._office.apply(offset, envelope.decode(data, self.log.name, offset))
        except StorageError as error:
            # The outcome of the append is as unknown as without an answer.
            return error
        return None
