"""Reads a shard's replicated log on: which records count, and the frames that they complete.

    EngineLog.read ──▶ decode ──▶ Office.apply ──▶ parts of a frame ──▶ Frame

A reader that starts from a checkpoint comes to the same verdicts from there on, and the same
frames, as one that has read from the beginning (I15).

Where the log has lost its end, and goes on behind a replica that people have named, it is read on
from there (`storage.replicated.adoption`).

Cost: one crc32c pass over envelope and frame each, and one copy where a frame has several parts.
Threads: belongs to the thread that reads.
"""

from dataclasses import replace
from typing import NamedTuple

from storage.errors import (
    EngineError,
    LogReplacedError,
    OffsetRangeError,
    RecordDamageError,
)
from storage.frame import Frame, scan
from storage.replicated import adoption, envelope
from storage.replicated.adoption import Adoptions, nothing_decided
from storage.replicated.engine import EngineLog
from storage.replicated.envelope import (
    NOBODY,
    Adopt,
    Claim,
    FramePart,
    LeasesPart,
    LogRecord,
    Release,
)
from storage.replicated.lease import LEASE_MS
from storage.replicated.office import Office, OfficeState, RecordDecision
from storage.rows import LogKind


class RecordReading(NamedTuple):
    """A record that was read."""

    record: LogRecord
    verdict: RecordDecision
    frame: Frame | None
    """The frame that it completes. Its `offset` is that of the record."""
    place: OfficeState
    """Where a reader goes on that needs nothing up to here."""
    is_other_history: bool = False
    """The log goes on behind other frames than those that were read up to here."""
    has_missed_one: bool = False
    """People had decided before, too, and the records that followed were lost again, unread. Since
    then the log of settled deliveries may have other offsets, which cannot be compared."""
    seized_ms: int | None = None
    """For a CLAIM that counts where the last owner has not left in order, with its leases: when the
    next began. Whatever had fallen due before may have been handed out. In ms since 1970."""


class RecordReader:
    """Reads the log of one shard from a checkpoint on."""

    def __init__(
        self,
        log: EngineLog,
        stamp: int,
        state: OfficeState,
        adoptions: Adoptions = nothing_decided,
    ) -> None:
        """`stamp`: that of the shard's frames; `state`: of the checkpoint; `adoptions` is asked
        once, before anything is read behind a checkpoint."""
        self.office = Office(log.name, stamp, state)
        self._log = log
        self._stamp = stamp
        self._adoptions = adoptions
        self._parts: list[FramePart] = []
        self._leases: list[LeasesPart] = []
        self._is_known = state.last_offset < 0
        """Whether it is the log that the checkpoint speaks of."""
        self._has_gone_back = False
        """It reads an ADOPT next, from which on it is."""

    @property
    def is_known(self) -> bool:
        """Whether it is sure that the log goes on behind the checkpoint."""
        return self._is_known and not self._has_gone_back

    def read(self, wait_s: float) -> list[RecordReading]:
        """The records that are at hand; if there are none, waits for the first, at most `wait_s`.

        Raises ReplicatedLogError, FormatVersionError: no reader can go on from here; EngineError
        where the decisions of people are needed, and the cluster's log does not answer."""
        if not self._is_known:
            self._is_known = self._find_place(wait_s)
            if not self.is_known:
                return []
        return [
            self._take(offset, envelope.decode(data, self._log.name, offset))
            for offset, data in self._log.read(self.office.state.next_offset, wait_s)
        ]

    def _find_place(self, wait_s: float) -> bool:
        """Whether it is known where to read: at the checkpoint, or before that, where the log goes
        on behind a replica that people have named. False: it cannot be told yet. Raises
        ReplicatedLogError."""
        state = self.office.state
        try:
            offset = adoption.find_adopt(self._log, state, self._adoptions())
        except EngineError:
            return False
        if offset is None:
            return self._recognize(wait_s)
        self.office.state = state._replace(next_offset=offset)
        self._has_gone_back = True
        return True

    def _recognize(self, wait_s: float) -> bool:
        """Whether the last record that counts stands where it stood; False: it did not come yet.

        A log whose servers have all lost power may have lost its end, and have grown again with
        other records. A replica that went on from a place behind that would judge all of them by an
        office that never was, and might take it while another holds it. Raises
        ReplicatedLogError."""
        state = self.office.state
        try:
            found = self._log.read(state.last_offset, wait_s)
        except OffsetRangeError as error:
            if state.last_offset >= error.first:
                raise
            return True  # It was deleted long ago, so it was not lost.
        if not found:
            self._log.read(state.next_offset, 0)  # Raises where the log ends before.
            return False
        record = envelope.decode(found[0][1], self._log.name, state.last_offset)
        if (record.epoch, record.clock_ms) != (state.epoch, state.clock_ms):
            raise LogReplacedError(self._log.name, state.last_offset)
        return True

    @property
    def leases(self) -> bytes | None:
        """The leases that the last owner has left to the node that claims the vacant office next.
        None: a node is in office, or the last one has not left in order."""
        is_vacant = self.office.state.owner == NOBODY
        has_all = is_vacant and bool(self._leases) and self._leases[-1].is_last
        return envelope.join(self._leases) if has_all else None

    def _take_leases(self, record: LogRecord) -> None:
        """Gather the leases of an owner that leaves; the record counts."""
        gathered = self._leases
        if isinstance(record, LeasesPart):
            if record.part == 0:
                self._leases = [record]
            elif [(one.part, one.parts) for one in gathered[-1:]] == [
                (record.part - 1, record.parts)
            ]:
                gathered.append(record)
            else:
                self._leases = []
        elif not isinstance(record, Release):
            self._leases = []

    def _take(self, offset: int, record: LogRecord) -> RecordReading:
        before, leases = self.office.state, self._leases
        self._has_gone_back = False
        verdict = self.office.apply(offset, record)
        if verdict is not RecordDecision.VOID:
            self._take_leases(record)
        if isinstance(record, Adopt) and verdict is not RecordDecision.VOID:
            self._parts.clear()
            is_other = not adoption.continues(record, before)
            epochs = [one.epoch for one in self._adoptions()]
            has_missed_one = any(before.epoch < epoch < record.epoch for epoch in epochs)
            place = self.office.checkpoint()
            return RecordReading(record, verdict, None, place, is_other, has_missed_one)
        if not isinstance(record, FramePart) or verdict is RecordDecision.VOID:
            self._parts.clear()
            seized_ms = None
            if isinstance(record, Claim) and verdict is not RecordDecision.VOID:
                seized_ms = _seized_ms(record, before, leases)
            place = self.office.checkpoint()
            return RecordReading(record, verdict, None, place, seized_ms=seized_ms)
        if record.part == 0:
            self._parts.clear()
        self._parts.append(record)
        if verdict is not RecordDecision.COMPLETES:
            return RecordReading(record, verdict, None, self.office.checkpoint())
        frame = frame_of(
            envelope.join(self._parts), LogKind.MESSAGE, self._stamp, self._log.name, offset
        )
        self._parts.clear()
        return RecordReading(record, verdict, frame, self.office.checkpoint())


def _seized_ms(claim: Claim, before: OfficeState, leases: list[LeasesPart]) -> int | None:
    """See `RecordReading`. By its clock, the owner before has delivered nothing after its lease."""
    has_left = before.owner == NOBODY and (bool(leases) and leases[-1].is_last)
    if before.epoch == 0 or has_left:
        return None
    return max(claim.clock_ms, before.clock_ms + LEASE_MS)


def frame_of(data: bytes, kind: LogKind, stamp: int, log: str, offset: int) -> Frame:
    """The frame that these bytes of the record at `offset` are. Raises RecordDamageError."""
    found = next(scan(_Bytes(log, data), 0, len(data), kind=kind, stamp=stamp, payload=True), None)
    if not isinstance(found, Frame) or not found.payload_intact or found.end != len(data):
        # The envelope was intact: it was no frame already when it was appended.
        raise RecordDamageError(log, offset, "its frame does not match its checksum")
    return replace(found, offset=offset)


class _Bytes:
    """Bytes in memory, as `scan` reads them."""

    def __init__(self, path: str, data: bytes) -> None:
        self.path = path
        self._data = data

    def pread(self, length: int, offset: int) -> bytes:
        return self._data[offset : offset + length]
