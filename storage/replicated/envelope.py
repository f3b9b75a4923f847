"""The records of a shard's replicated log: 32 bytes of envelope, then a body.

    CLAIM     "I take the office": how far the claimant has read, and where it can be found
    FRAME     a frame of the message log, byte for byte, or one part of it
    BEAT      "I am still here": how far the owner has come
    RELEASE   "I leave the office", and the node that is wanted there next
    ADOPT     "the log has lost its end here, and goes on behind my records", as people decided
    LEASES    "I leave in order, and consumers hold this", or one part of it, before a RELEASE

The envelope's checksum (crc32c) covers both, with itself as zero, so nothing is trusted before it:
not the type, not the epoch. The log's engine takes records up to a limit (1 MiB by default), and a
frame may be longer. Therefore it is cut into parts, each of them a record of its own. So are
leases, whose bytes mean nothing here.

The meaning that a number has in an older version stays for good. A body that needs another shape
gets a flag or a type, and a version that does not know it stops there: skipping a record that
counts would be a verdict of its own.

Cost: one crc32c pass (8 GB/s), and one copy of the body, each way; 3 µs for a small record.
Threads: functions without state; records are immutable.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

import google_crc32c

from storage.errors import NewerRecordError, RecordDamageError
from storage.frame import HEADER_BYTES

MAGIC: Final = b"DLR1"
ENVELOPE: Final = struct.Struct("<4sBBHHHIqII")
ENVELOPE_BYTES: Final = ENVELOPE.size
CLAIM_BODY: Final = struct.Struct("<q")
"""The part of a CLAIM's body before the address."""
BEAT_BODY: Final = struct.Struct("<QqI")
RELEASE_BODY: Final = struct.Struct("<H")
ADOPT_BODY: Final = struct.Struct("<qQIIqq")
PART_MAX_BYTES: Final = 900 * 1024
"""The longest part of a frame. With the envelope it stays below an engine's default limit."""
PARTS_MAX: Final = (1 << 16) - 1
NOBODY: Final = 0
"""No node has this number."""

_CRC = struct.Struct("<I")
_CRC_START = 24
_CRC_END = _CRC_START + _CRC.size

assert ENVELOPE_BYTES == 32


class RecordType(IntEnum):
    """The type of a record of the replicated log."""

    CLAIM = 1
    FRAME = 2
    BEAT = 3
    RELEASE = 4
    ADOPT = 5
    LEASES = 6


class Envelope(NamedTuple):
    """The first 32 bytes of a record; field by field in FORMAT.md."""

    magic: bytes
    type: int
    flags: int
    part: int
    parts: int
    node: int
    epoch: int
    clock_ms: int
    crc: int
    reserved: int


@dataclass(frozen=True, slots=True)
class _Record:
    """The fields of all records: the node that wrote it (from 1), its epoch (from 1), and the time
    of the node's wall clock, in ms since 1970."""

    node: int
    epoch: int
    clock_ms: int


@dataclass(frozen=True, slots=True)
class Claim(_Record):
    """`node` takes the office as the owner of `epoch`.

    `after` is the offset of the last record that counted, as far as the node has read (-1: none);
    `address` says where others find it."""

    after: int
    address: str


@dataclass(frozen=True, slots=True)
class FramePart(_Record):
    """Part number `part` (from 0) of a frame of the message log that was cut into `parts`."""

    part: int
    parts: int
    data: bytes

    @property
    def is_last(self) -> bool:
        """Whether the frame ends with it."""
        return self.part + 1 == self.parts


@dataclass(frozen=True, slots=True)
class Beat(_Record):
    """How far the owner has come.

    Every effect of the records up to the seq `filed_seq` is durable with it. The deliveries that it
    has settled stand before `settled_offset` in the log of settled deliveries. `live_through_hour`
    is the newest hour that was ever in its wheel (hours since 1970; 0: none)."""

    filed_seq: int
    settled_offset: int
    live_through_hour: int


@dataclass(frozen=True, slots=True)
class Release(_Record):
    """The owner leaves the office; `successor` shall claim it next (NOBODY: any node may)."""

    successor: int


@dataclass(frozen=True, slots=True)
class Adopt(_Record):
    """The log has lost the records from the offset `end` on. It goes on there behind the replica of
    `node`, whatever the log itself says up to here.

    `next_seq`, `frame_epoch` and `chain` are those of that replica (`OfficeState`). It knows the
    settled deliveries up to `settled_place` in their log, which ended at `settled_end` then."""

    end: int
    next_seq: int
    frame_epoch: int
    chain: int
    settled_place: int
    settled_end: int


@dataclass(frozen=True, slots=True)
class LeasesPart(_Record):
    """Part number `part` (from 0), of `parts`, of the leases that the owner leaves to the next one.

    The whole of it counts if the RELEASE of the same owner follows, and no other record that counts
    stands between."""

    part: int
    parts: int
    data: bytes

    @property
    def is_last(self) -> bool:
        """Whether nothing of the leases comes behind it."""
        return self.part + 1 == self.parts


LogRecord = Claim | FramePart | Beat | Release | Adopt | LeasesPart


def encode(record: LogRecord) -> bytes:
    """The record as bytes: envelope, then body."""
    part, parts = 0, 1
    match record:
        case Claim():
            kind = RecordType.CLAIM
            body = CLAIM_BODY.pack(record.after) + record.address.encode()
        case FramePart():
            kind, body = RecordType.FRAME, record.data
            part, parts = record.part, record.parts
        case Beat():
            kind = RecordType.BEAT
            body = BEAT_BODY.pack(record.filed_seq, record.settled_offset, record.live_through_hour)
        case Release():
            kind, body = RecordType.RELEASE, RELEASE_BODY.pack(record.successor)
        case LeasesPart():
            kind, body = RecordType.LEASES, record.data
            part, parts = record.part, record.parts
        case Adopt():
            kind = RecordType.ADOPT
            body = ADOPT_BODY.pack(
                record.end,
                record.next_seq,
                record.frame_epoch,
                record.chain,
                record.settled_place,
                record.settled_end,
            )
    assert record.node != NOBODY and record.epoch > 0, record
    assert part < parts, (part, parts)
    head = ENVELOPE.pack(
        MAGIC, kind, 0, part, parts, record.node, record.epoch, record.clock_ms, 0, 0
    )
    return head[:_CRC_START] + _CRC.pack(_crc(head, body)) + head[_CRC_END:] + body


def decode(data: bytes, log: str, offset: int) -> LogRecord:
    """The record that `data` is; `log` and `offset` are for the errors alone.

    Raises RecordDamageError where it is none, and NewerRecordError where it verifies but has a type
    or a flag that this version does not know."""
    if len(data) < ENVELOPE_BYTES or data[: len(MAGIC)] != MAGIC:
        raise RecordDamageError(log, offset, "it does not begin with an envelope")
    envelope = Envelope(*ENVELOPE.unpack_from(data))
    body = data[ENVELOPE_BYTES:]
    without_crc = data[:_CRC_START] + bytes(_CRC.size) + data[_CRC_END:ENVELOPE_BYTES]
    if _crc(without_crc, body) != envelope.crc:
        raise RecordDamageError(log, offset, "it does not match its checksum")
    if envelope.flags or envelope.reserved:
        what = f"flags {envelope.flags}, {envelope.reserved}"
        raise NewerRecordError(log, offset, what)
    if envelope.type not in set(RecordType):
        raise NewerRecordError(log, offset, f"type {envelope.type}")
    try:
        return _parse(envelope, body)
    except (ValueError, struct.error) as error:
        reason = f"it verifies, and yet is no {RecordType(envelope.type).name} ({error})"
        raise RecordDamageError(log, offset, reason) from error


def _parse(envelope: Envelope, body: bytes) -> LogRecord:
    """Raises ValueError, struct.error."""
    said = (envelope.node, envelope.epoch, envelope.clock_ms)
    if envelope.node == NOBODY or envelope.epoch == 0:
        raise ValueError("nobody wrote it, or in no epoch")
    if envelope.type in (RecordType.FRAME, RecordType.LEASES):
        if envelope.part >= envelope.parts:
            raise ValueError(f"part {envelope.part} of {envelope.parts}")
        of_type = FramePart if envelope.type == RecordType.FRAME else LeasesPart
        return of_type(*said, envelope.part, envelope.parts, body)
    if (envelope.part, envelope.parts) != (0, 1):
        raise ValueError("only frames and leases have parts")
    match envelope.type:
        case RecordType.CLAIM:
            (after,) = CLAIM_BODY.unpack_from(body)
            return Claim(*said, after, body[CLAIM_BODY.size :].decode())
        case RecordType.BEAT:
            return Beat(*said, *BEAT_BODY.unpack(body))
        case RecordType.RELEASE:
            return Release(*said, *RELEASE_BODY.unpack(body))
        case _:
            return Adopt(*said, *ADOPT_BODY.unpack(body))


def split(
    frame: bytes, *, node: int, epoch: int, clock_ms: int, part_bytes: int = PART_MAX_BYTES
) -> Iterator[FramePart]:
    """The parts of a frame of the message log, each of at most `part_bytes`.

    The first part holds the frame's header as a whole, so that it alone tells which seqs the frame
    takes: `part_bytes` is at least HEADER_BYTES."""
    assert part_bytes >= HEADER_BYTES <= len(frame), (part_bytes, len(frame))
    parts = -(-len(frame) // part_bytes)
    assert parts <= PARTS_MAX, parts
    for part in range(parts):
        data = frame[part * part_bytes : (part + 1) * part_bytes]
        yield FramePart(node, epoch, clock_ms, part, parts, data)


def split_leases(
    leases: bytes, *, node: int, epoch: int, clock_ms: int, part_bytes: int = PART_MAX_BYTES
) -> Iterator[LeasesPart]:
    """The parts of an owner's leases, each of at most `part_bytes`; one if there are no leases."""
    parts = max(1, -(-len(leases) // part_bytes))
    assert parts <= PARTS_MAX, parts
    for part in range(parts):
        data = leases[part * part_bytes : (part + 1) * part_bytes]
        yield LeasesPart(node, epoch, clock_ms, part, parts, data)


def join(parts: Sequence[FramePart] | Sequence[LeasesPart]) -> bytes:
    """The frame, or the leases, that were split into these: all of it, in order."""
    assert [part.part for part in parts] == list(range(parts[-1].parts)), parts
    return b"".join([part.data for part in parts])


def _crc(head: bytes, body: bytes) -> int:
    """The checksum over an envelope whose own checksum is zero, and the body behind it."""
    return google_crc32c.extend(google_crc32c.value(head), body)  # type: ignore[no-any-return]
