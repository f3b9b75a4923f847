"""The office: who owns a shard, and which records of its log count. A fold over the log.

    record     counts if
    CLAIM      its epoch follows the current one, and `after` is the last record that counts
    FRAME      its writer is in office, and it begins a frame at the next seq, or stands directly
               behind the part before it
    BEAT       its writer is in office
    RELEASE    its writer is in office; behind it the office is vacant
    ADOPT      it stands where it says that it does
    LEASES     its writer is in office

A node is in office with the CLAIM that counts, until the next one, or its own RELEASE. A record
that does not count is void: everybody skips it. No clock is looked at, so everybody who reads the
log comes to the same verdict on every record (I15), early or late, from its beginning or from a
checkpoint.

A CLAIM is a compare-and-set on the last record that counts. An owner that was heard of after the
claimant had made up its mind stays in office; and of several claims the first one wins, since it is
then the last record that counts for the others. For a claimant that has judged rightly the last
record is never *before* `after`, so "equal" refuses more than "not behind" only where a claimant
has judged wrongly. The rule holds in a vacant office, too: a claim that was long under way is not
heard there.

A part of a frame counts by itself as a sign of life: it stands in the log, so its writer held the
office there. The *frame* takes its seqs only with its last part, and only if all of them stand
together: any other record between two, even a void one, ends it, and nothing of it is filed. So a
part that a producer has sent twice ends its frame. Such an owner has seen an offset that it did not
expect, has read the records in between, and has answered no request (R1 in
`storage.replicated.lease`).

A frame that was completed counts, whatever follows: a later CLAIM stands behind it (I17).

An ADOPT is the decision of people about a log that has lost its end: the node that they have named
owns it from there on, with the seqs that it has. It is a compare-and-set on the end of the log, so
it comes once at the most, and not at all where a node has written meanwhile. Its epoch is later
than all epochs seen in the log, and than those of all known replicas. A reader's knowledge of the
log before it matters neither for the verdict nor for the state behind it. Whether a replica may go
on there with the records that it has filed is another question, which `chain` answers.

A checkpoint stands before the leases that an owner has left, until the next CLAIM. So a node that
claims the vacant office has read them, however often its process has started meanwhile.
`storage.replicated.reader` reads their content, and checks that all of it is there.

Cost: 2 µs for a record. The state is a few numbers, however long log and frames are: parts are not
kept here.
Threads: none of its own; an office belongs to the thread that reads the log.

Rejected: skipping void records between parts. A reader would have to sort them out a second time to
find the frame again, and no more frames would be answered than now. Rejected, too: a verdict on a
part that waits for the last one. A big frame would be a long silence, and others would claim.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, NamedTuple

import google_crc32c

from storage.errors import OffsetGapError, RecordDamageError
from storage.frame import Header, decode_header
from storage.replicated.envelope import (
    NOBODY,
    Adopt,
    Beat,
    Claim,
    FramePart,
    LeasesPart,
    LogRecord,
    Release,
)
from storage.rows import LogKind


class RecordDecision(IntEnum):
    """The verdict on a record of the log."""

    VOID = 0
    """It does not count."""
    COUNTS = 1
    COMPLETES = 2
    """It counts, and so does the frame that it completes."""


class OfficeState(NamedTuple):
    """The state of the office in the log up to an offset; a checkpoint keeps it."""

    next_offset: int = 0
    """The offset of the record that is applied next: where a reader goes on."""
    epoch: int = 0
    """The epoch of the last CLAIM or ADOPT that counts; 0: there was none."""
    owner: int = NOBODY
    """The node in office; NOBODY: it is vacant."""
    successor: int = NOBODY
    """Whom the last owner wants in the vacant office. Others may claim it as well."""
    next_seq: int = 1
    """The first seq that no complete frame has taken."""
    last_offset: int = -1
    """The last record that counts; -1: there was none."""
    claim_offset: int = -1
    """The last CLAIM or ADOPT that counts; -1: there was none."""
    clock_ms: int = 0
    """The wall clock of the last record's writer that counts. A new owner's time begins there, if
    its own clock is behind (R7)."""
    frame_epoch: int = 0
    """The epoch of the last complete frame; 0: there was none. The owner of that epoch or a later
    one has made all decisions that there are."""
    chain: int = 0
    """A checksum (crc32c) over those of the headers of all complete frames, in order. Two replicas
    with the same chain have the same frames, however the log went."""

    def pack(self) -> bytes:
        """As bytes, for the catalog."""
        return OFFICE.pack(*self)

    @classmethod
    def unpack(cls, data: bytes) -> "OfficeState | None":
        """The state that `pack` made these bytes of; None if it did not."""
        if len(data) == _OFFICE_BEFORE.size:
            return cls(*_OFFICE_BEFORE.unpack(data))
        return cls(*OFFICE.unpack(data)) if len(data) == OFFICE.size else None


OFFICE: Final = struct.Struct(">qIHHQqqqII")
"""The layout of OfficeState; big-endian, as all in the catalog."""
_OFFICE_BEFORE: Final = struct.Struct(">qIHHQqqqI")
"""Without `chain`, as in catalogs of clusters that were made before there was one. It begins at 0
there: such a replica is not taken for the same as any other, and that is the worst of it."""
_CHECKSUM = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class _Unfinished:
    """A frame whose last part was not read yet."""

    before: OfficeState
    """As it was when the first part was still to come."""
    header: Header
    last: FramePart
    length_bytes: int
    """The length of all parts so far."""


class Office:
    """Applies one record after the other, and says which of them count."""

    def __init__(self, log: str, stamp: int, state: OfficeState = OfficeState()) -> None:  # noqa: B008
        """`log` names the log in errors; `stamp` is that of the shard's frames; `state` comes from
        a checkpoint: the next record is that of `state.next_offset`."""
        self.state = state
        self._log = log
        self._stamp = stamp
        self._unfinished: _Unfinished | None = None
        self._before_leases: OfficeState | None = None
        """As it was when the first part of the leases that the owner leaves was still to come."""

    def checkpoint(self) -> OfficeState:
        """The place where another reader that may claim can go on.

        It stands before the leases that the last owner has left, as long as no node has claimed."""
        return self.frame_place() if self._before_leases is None else self._before_leases

    def frame_place(self) -> OfficeState:
        """Where another reader of frames can go on.

        Within a frame it is the place before its first part: the others make no frame without it.
        """
        return self.state if self._unfinished is None else self._unfinished.before

    def apply(self, offset: int, record: LogRecord) -> RecordDecision:
        """Take in the next record of the log.

        Raises OffsetGapError where it is not the next one, RecordDamageError where it counts and
        its frame is none, FormatVersionError where a newer server wrote the frame. Nothing is
        applied then."""
        if offset != self.state.next_offset:
            raise OffsetGapError(self._log, offset, self.state.next_offset)
        verdict, unfinished, changed = self._judge(offset, record)
        if verdict is not RecordDecision.VOID:
            changed |= {"last_offset": offset, "clock_ms": record.clock_ms}
            if isinstance(record, LeasesPart) and record.part == 0:
                self._before_leases = self.state
            elif not isinstance(record, LeasesPart | Release):
                self._before_leases = None
        self.state = self.state._replace(next_offset=offset + 1, **changed)
        self._unfinished = unfinished
        return verdict

    def _judge(
        self, offset: int, record: LogRecord
    ) -> tuple[RecordDecision, _Unfinished | None, dict[str, Any]]:
        """The verdict, the frame that goes on behind the record, and what it changes."""
        state = self.state
        changed: dict[str, Any] = {}
        if isinstance(record, Claim):
            if record.epoch != state.epoch + 1 or record.after != state.last_offset:
                return RecordDecision.VOID, None, changed
            changed = {
                "epoch": record.epoch,
                "owner": record.node,
                "successor": NOBODY,
                "claim_offset": offset,
            }
        elif isinstance(record, Adopt):
            if record.end != offset:
                return RecordDecision.VOID, None, changed
            changed = {
                "epoch": record.epoch,
                "owner": record.node,
                "successor": NOBODY,
                "claim_offset": offset,
                "next_seq": record.next_seq,
                "frame_epoch": record.frame_epoch,
                "chain": record.chain,
            }
        elif record.epoch != state.epoch or record.node != state.owner:
            return RecordDecision.VOID, None, changed
        elif isinstance(record, FramePart):
            frame = self._with_part(offset, record)
            if frame is None:
                return RecordDecision.VOID, None, changed
            if not record.is_last:
                return RecordDecision.COUNTS, frame, changed
            if frame.length_bytes != frame.header.frame_bytes:
                reason = f"its frame has {frame.length_bytes} bytes, and its header says otherwise"
                raise RecordDamageError(self._log, offset, reason)
            checksum = _CHECKSUM.pack(frame.header.header_crc)
            changed = {
                "next_seq": frame.header.last_seq + 1,
                "frame_epoch": state.epoch,
                "chain": google_crc32c.extend(state.chain, checksum),
            }
            return RecordDecision.COMPLETES, None, changed
        elif isinstance(record, Release):
            changed = {"owner": NOBODY, "successor": record.successor}
        else:
            assert isinstance(record, Beat | LeasesPart), record
        return RecordDecision.COUNTS, None, changed

    def _with_part(self, offset: int, part: FramePart) -> _Unfinished | None:
        """The frame as far as it goes with this part; None where the part belongs to none."""
        if part.part == 0:
            header = self._header(offset, part)
            if header.first_seq != self.state.next_seq:
                return None
            return _Unfinished(self.state, header, part, len(part.data))
        frame = self._unfinished
        if frame is None or (frame.last.part + 1, frame.last.parts) != (part.part, part.parts):
            return None
        length_bytes = frame.length_bytes + len(part.data)
        return _Unfinished(frame.before, frame.header, part, length_bytes)

    def _header(self, offset: int, part: FramePart) -> Header:
        where = f"{self._log} at offset {offset}"
        header = decode_header(part.data, where, stamp=self._stamp)
        if (
            header is None
            or header.kind != LogKind.MESSAGE
            or not 0 < header.first_seq <= header.last_seq
        ):
            reason = "it holds no frame of this shard's message log"
            raise RecordDamageError(self._log, offset, reason)
        return header
