"""The frame: the one unit in which all four logs are written, read, checked and repaired.

    header 64 B │ rows: count × dtype.itemsize │ payload blob │ zeros up to a multiple of 8

The header carries three checksums (crc32c): of itself, of the rows, of the payload blob. So a
reader that needs columns alone never touches the payloads, and still trusts nothing unchecked
(I8). Every payload in the blob begins with a checksum of its own besides (`seal`), so that one body
can be read alone.

Cost: one crc32c pass (8 GB/s) per frame to write, and one copy unless it is written in pieces;
`numpy.frombuffer` to read.
Threads: functions without state; a `Frame` is immutable.

A frame that does not verify is either a torn tail (nothing valid behind it: it was never answered)
or damage (something valid behind it). `scan` tells the two apart by searching on for the next
frame. Only frames with the stamp of this data directory count, a random number that no publisher
knows; otherwise a message body could be made to look like a frame.

A bad sector is damage like any other, and the scans read past it (`storage.files.read_past`). But
no crash makes one, so a stretch that ends in one is never taken for a torn tail.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from storage.errors import DamageError, FormatVersionError
from storage.files import Buffer, read_past
from storage.rows import DTYPES, MESSAGE_DTYPE, LogKind

MAGIC = b"DLY1"
VERSION = 1
HEADER = struct.Struct("<4sHHIIQQQqIIII")
HEADER_BYTES = HEADER.size
_CRC = struct.Struct("<I")
CRC_BYTES = _CRC.size
HEADER_DTYPE = np.dtype(
    [
        ("magic", "V4"),
        ("version", "<u2"),
        ("kind", "<u2"),
        ("count", "<u4"),
        ("rows_bytes", "<u4"),
        ("payload_bytes", "<u8"),
        ("first_seq", "<u8"),
        ("last_seq", "<u8"),
        ("created_ms", "<i8"),
        ("rows_crc", "<u4"),
        ("payload_crc", "<u4"),
        ("stamp", "<u4"),
        ("header_crc", "<u4"),
    ]
)
"""Headers of many frames, as columns."""
ALIGNMENT = 8
PAYLOAD_MAX_BYTES = 1 << 31

Rows = NDArray[np.void]

_READ_BYTES = 256 * 1024
_SEARCH_BYTES = 1024 * 1024
_CRC_SLICE_BYTES = 128 * 1024
_ZEROS = bytes(HEADER_BYTES)

assert HEADER_BYTES == 64


def crc32c(data: Buffer) -> int:
    """The Castagnoli checksum of `data`."""
    if isinstance(data, bytes):
        return google_crc32c.value(data)  # type: ignore[no-any-return]
    crc = 0
    for start in range(0, len(data), _CRC_SLICE_BYTES):
        # It takes bytes alone; a piece that is copied stays in the cache.
        crc = google_crc32c.extend(crc, bytes(data[start : start + _CRC_SLICE_BYTES]))
    return crc


class Header(NamedTuple):
    """The first 64 bytes of a frame; field by field in FORMAT.md."""

    magic: bytes
    version: int
    kind: int
    count: int  # type: ignore[assignment]  # not the method of a tuple
    rows_bytes: int
    payload_bytes: int
    first_seq: int
    last_seq: int
    created_ms: int
    rows_crc: int
    payload_crc: int
    stamp: int
    header_crc: int

    @property
    def frame_bytes(self) -> int:
        """Length on disk, padding included."""
        return padded(HEADER_BYTES + self.rows_bytes + self.payload_bytes)


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame that verified. `payload` is None when it was not asked for.

    `payload_intact` is False when the blob as a whole does not match its checksum: rows can be
    trusted then, and each payload only by the checksum in its own row. `unreadable` says which of
    its bytes the device did not give back, if that is why."""

    path: str
    offset: int
    header: Header
    rows: Rows
    payload: bytes | None
    payload_intact: bool = True
    unreadable: str = ""

    @property
    def end(self) -> int:
        """The offset behind the frame and its padding."""
        return self.offset + self.header.frame_bytes

    @property
    def first_seq(self) -> int:
        """The first seq that the header names."""
        return self.header.first_seq

    @property
    def last_seq(self) -> int:
        """The last seq that the header names; of an import, that of its last message."""
        return self.header.last_seq

    @property
    def payload_start(self) -> int:
        """Where the payload blob begins in the file."""
        return self.offset + HEADER_BYTES + self.header.rows_bytes


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes that are not a valid frame: `[offset, end)` of `path`.

    `torn`: nothing valid stands behind it, and all of it was read. `is_unreadable`: it was not all
    read. The seqs bound the missing records (0: unknown)."""

    path: str
    offset: int
    end: int
    reason: str
    torn: bool
    first_seq: int = 0
    last_seq: int = 0
    is_unreadable: bool = False

    def before(self, seq: int) -> "Damage":
        """The same, where the record `seq` is known to stand behind it."""
        return replace(self, last_seq=min(self.last_seq, seq - 1))

    def error(self) -> DamageError:
        """The damage as an error that can be raised."""
        return DamageError(self.path, self.offset, self.reason, self.first_seq, self.last_seq)


def seal(data: bytes) -> bytes:
    """A payload as it stands in a blob: its crc32c (u32), then the data."""
    return _CRC.pack(google_crc32c.value(data)) + data


def crcs_of(datas: list[bytes]) -> list[int]:
    """The checksum (crc32c) of each."""
    return list(map(google_crc32c.value, datas))


def seal_many(datas: list[bytes], crcs: list[int]) -> list[bytes]:
    """The pieces of the blob that `seal` makes of each: checksum, data, checksum, data, ..."""
    pieces = [b""] * (2 * len(datas))
    pieces[::2] = map(_CRC.pack, crcs)
    pieces[1::2] = datas
    return pieces


def sealed_crc(sealed: bytes) -> int:
    """The checksum that a sealed payload begins with."""
    return _CRC.unpack_from(sealed)[0]  # type: ignore[no-any-return]


def unseal(sealed: bytes) -> bytes | None:
    """The data of a sealed payload, or None if it does not match its checksum."""
    data = sealed[CRC_BYTES:]
    if len(sealed) < CRC_BYTES or _CRC.unpack_from(sealed)[0] != crc32c(data):
        return None
    return data


def unseal_many(sealed: Sequence[bytes]) -> list[bytes] | None:
    """The data of sealed payloads, in their order; None unless every one matches its checksum."""
    data = [one[CRC_BYTES:] for one in sealed]
    stored = b"".join([one[:CRC_BYTES] for one in sealed])
    counted = np.fromiter(map(google_crc32c.value, data), "<u4", len(data))
    return data if counted.tobytes() == stored else None


def padded(length: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-length // ALIGNMENT) * ALIGNMENT


def encode(
    kind: LogKind,
    rows: Buffer,
    payload: Buffer,
    *,
    first_seq: int,
    last_seq: int,
    created_ms: int,
    stamp: int,
) -> bytes:
    """One frame as bytes. `rows` is a whole number of rows of the kind's dtype."""
    return b"".join(
        encode_parts(
            kind,
            rows,
            payload,
            first_seq=first_seq,
            last_seq=last_seq,
            created_ms=created_ms,
            stamp=stamp,
        )
    )


def encode_parts(
    kind: LogKind,
    rows: Buffer,
    payload: Buffer,
    *,
    first_seq: int,
    last_seq: int,
    created_ms: int,
    stamp: int,
) -> tuple[Buffer, ...]:
    """One frame as header, rows, payload and padding, to be written one behind the other.

    `rows` and `payload` are handed on as they are; `encode` would copy them."""
    dtype = DTYPES[kind]
    count, rest = divmod(len(rows), dtype.itemsize)
    assert rest == 0 and count > 0, (len(rows), dtype.itemsize)
    assert len(payload) < PAYLOAD_MAX_BYTES
    header = HEADER.pack(
        MAGIC,
        VERSION,
        kind,
        count,
        len(rows),
        len(payload),
        first_seq,
        last_seq,
        created_ms,
        crc32c(rows),
        crc32c(payload),
        stamp,
        0,
    )
    header = header[:-4] + _CRC.pack(crc32c(header[:-4]))
    length = HEADER_BYTES + len(rows) + len(payload)
    return header, rows, payload, bytes(padded(length) - length)


def decode_header(data: Buffer, where: str, *, stamp: int | None) -> Header | None:
    """The header in the first 64 bytes, or None if they are not one with that stamp (None: any).

    Raises FormatVersionError when it verifies but a newer server wrote it."""
    if len(data) < HEADER_BYTES or data[:4] != MAGIC:
        return None
    head = bytes(data[:HEADER_BYTES])
    header = Header(*HEADER.unpack(head))
    if crc32c(head[:-4]) != header.header_crc:
        return None
    # Before the version: a publisher can write any version into a body, but does not know the
    # stamp.
    if stamp is not None and header.stamp != stamp:
        return None
    if header.version > VERSION:
        raise FormatVersionError(where, header.version, VERSION)
    dtype = DTYPES.get(header.kind)  # type: ignore[call-overload]
    if dtype is None or header.rows_bytes != header.count * dtype.itemsize or not header.count:
        return None
    return header


def decode_rows(header: Header, data: bytes) -> Rows | None:
    """The rows of a frame from the bytes behind its header, or None if they do not verify."""
    if len(data) != header.rows_bytes or crc32c(data) != header.rows_crc:
        return None
    return np.frombuffer(data, dtype=DTYPES[LogKind(header.kind)])


class Readable(Protocol):
    """The calls of a file that a scan needs."""

    @property
    def path(self) -> str: ...

    def pread(self, length: int, offset: int) -> bytes: ...


class Growing(Readable, Protocol):
    """A file that may be written while it is read."""

    def size(self) -> int: ...


class _Bad(NamedTuple):
    """Bytes that cannot be read, up to `end`."""

    end: int
    reason: str


class _Sectors:
    """A file, read past its unreadable stretches; `bad` lists those, by offset."""

    def __init__(self, file: Readable) -> None:
        self.path = file.path
        self.bad: dict[int, _Bad] = {}
        self._file = file

    def pread(self, length: int, offset: int) -> bytes:
        pieces = []
        for at, data, error in read_past(self._file.pread, length, offset):
            pieces.append(data)
            if error is not None:
                self.bad[at] = _Bad(at + len(data), error.cause)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class Window:
    """Reads a file front to back in pieces, so that small frames cost no call each."""

    def __init__(self, file: Readable, end: int, ahead_bytes: int) -> None:
        """`ahead_bytes`: how long a piece is, at least; it may be changed."""
        self._file = file
        self._end = end
        self.ahead_bytes = ahead_bytes
        self._start = 0
        self._data = b""

    def read(self, offset: int, length: int) -> bytes:
        """`length` bytes at `offset`, fewer at the end."""
        length = max(0, min(length, self._end - offset))
        if not (self._start <= offset and offset + length <= self._start + len(self._data)):
            ahead = max(0, min(max(length, self.ahead_bytes), self._end - offset))
            self._data = self._file.pread(ahead, offset)
            self._start = offset
        position = offset - self._start
        return self._data[position : position + length]

    def held(self, offset: int) -> tuple[bytes, int]:
        """The bytes read last, and where in them `offset` is: behind their end, if not read."""
        if offset < self._start:
            return b"", 0
        return self._data, offset - self._start


def scan(
    file: Readable,
    start: int,
    end: int,
    *,
    kind: LogKind,
    stamp: int,
    payload: bool,
    after_seq: int = 0,
) -> Iterator[Frame | Damage]:
    """All frames of `file` between two offsets in order, and every stretch that is not a frame.

    In the message log, whose segments are filled with zeros beforehand, zeros that no frame follows
    are neither. `after_seq`: the last seq before `start`. With `payload=False` the blobs are
    skipped without being read; `storage.frame_runs` does that for many frames at once. Raises
    FormatVersionError, DiskError."""
    scanner = Scanner(file, end, kind, stamp)
    offset, last_seq = start, after_seq
    while offset < end:
        found = scanner.frame(offset, payload)
        if isinstance(found, Frame):
            yield found
            offset, last_seq = found.end, found.last_seq
            continue
        damage = scanner.gap(offset, last_seq, found)
        if damage is None:
            return
        yield damage
        offset = damage.end


def scan_live(
    file: Growing,
    start: int,
    end: int | None = None,
    *,
    kind: LogKind,
    stamp: int,
    payload: bool,
    after_seq: int = 0,
) -> Iterator[Frame | Damage]:
    """All frames and damage, as `scan` yields them, of a file that a server may be writing.

    `end` None: up to the size that the file has by then. A stretch that is not sound may have been
    read half-written, so it is read a second time before it counts as damage. Without that, a frame
    that the server completed in between would be reported as a hole before the next one."""
    last_seq, suspect = after_seq, -1
    while True:
        size = file.size()
        for found in scan(
            file,
            start,
            size if end is None else min(end, size),
            kind=kind,
            stamp=stamp,
            payload=payload,
            after_seq=last_seq,
        ):
            is_sound = isinstance(found, Frame) and found.payload_intact
            if not is_sound and found.offset != suspect:
                start = suspect = found.offset
                break
            last_seq = max(last_seq, found.last_seq)
            yield found
        else:
            return


def damaged_payloads(frame: Frame) -> Iterator[tuple[int, Damage]]:
    """The rows of a frame with payloads whose payload is not intact, by index, and the damage."""
    if frame.payload_intact:
        return
    assert frame.payload is not None
    starts, lengths = frame.rows["payload_offset"].tolist(), frame.rows["payload_length"].tolist()
    for index, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        if length and unseal(frame.payload[start : start + length]) is None:
            seq, at = int(frame.rows["seq"][index]), frame.payload_start + start
            reason = frame.unreadable or "a payload does not match its checksum"
            yield index, Damage(frame.path, at, at + length, reason, False, seq, seq)


def with_torn_payload(items: Iterable[Frame | Damage]) -> Iterator[Frame | Damage]:
    """The items of a scan with payloads; a frame that was cut within them is a torn tail, too."""
    held: Frame | None = None
    for found in items:
        if held is not None:
            if isinstance(found, Damage) and found.torn:
                break
            yield held
            held = None
        if isinstance(found, Frame) and not found.payload_intact and not found.unreadable:
            held = found
        else:
            yield found
    if held is not None:
        reason = "the payloads do not match their checksum"
        first_seq = held.first_seq if held.header.kind in _ASCENDING else 0
        yield Damage(held.path, held.offset, held.end, reason, torn=True, first_seq=first_seq)


_ASCENDING = (LogKind.MESSAGE, LogKind.SCHEDULE)
"""Where each frame begins behind the last seq of the one before. (Deliveries end in any order.)"""
_ZEROS_FOUND = "zeros where a frame should be"


class Scanner:
    """Looks for frames of one log in one file, up to `end`."""

    def __init__(
        self, file: Readable, end: int, kind: LogKind, stamp: int, ahead_bytes: int | None = None
    ) -> None:
        """`ahead_bytes`: how much is read at once, at least."""
        self._file = _Sectors(file)
        self.end = end
        self.kind = kind
        self.stamp = stamp
        self._used_end = 0
        """As far as the last search has seen anything but zeros."""
        self.window = Window(self._file, end, ahead_bytes or _READ_BYTES)

    def header(self, offset: int) -> Header | str:
        """The header of the frame at `offset`, or in words why there is none."""
        head = self.window.read(offset, HEADER_BYTES)
        if head == _ZEROS[: len(head)]:
            return _ZEROS_FOUND
        header = decode_header(head, self._file.path, stamp=self.stamp)
        if header is None:
            return "there is no header of this data directory that matches its checksum"
        if header.kind != self.kind:
            return f"the frame belongs to the {LogKind(header.kind).name.lower()} log"
        if offset + header.frame_bytes > self.end:
            return "the frame is cut off"
        return header

    def frame(self, offset: int, payload: bool) -> Frame | str:
        """The frame at `offset`, or in words why there is none."""
        window, path = self.window, self._file.path
        header = self.header(offset)
        if isinstance(header, str):
            return header
        rows = decode_rows(header, window.read(offset + HEADER_BYTES, header.rows_bytes))
        if rows is None:
            return "the rows do not match their checksum"
        if not payload:
            return Frame(path, offset, header, rows, None)
        start = offset + HEADER_BYTES + header.rows_bytes
        blob = window.read(start, header.payload_bytes)
        if crc32c(blob) == header.payload_crc:
            return Frame(path, offset, header, rows, blob)
        unreadable = self.unreadable(start, start + header.payload_bytes)
        return Frame(path, offset, header, rows, blob, False, unreadable)

    def gap(self, offset: int, last_seq: int, reason: str) -> Damage | None:
        """The stretch from `offset` to the next frame, or to the end, since no frame is there for
        that `reason`. None if it is zeros that filled a segment of the message log beforehand.

        `last_seq`: that of the frame before."""
        path, is_ascending = self._file.path, self.kind in _ASCENDING
        following = self.search(offset + 1, last_seq)
        if following is None and reason == _ZEROS_FOUND and self.kind is LogKind.MESSAGE:
            return None
        first_missing = last_seq + 1 if is_ascending else 0
        stop = self.end if following is None else following.offset
        unreadable = self.unreadable(offset, stop)
        if following is None and not unreadable:
            return Damage(path, offset, stop, reason, torn=True, first_seq=first_missing)
        if not is_ascending:
            last_missing = 0
        elif following is None:
            last_missing = self.last_seq(offset, first_missing)
        else:
            last_missing = following.header.first_seq - 1
        return Damage(
            path,
            offset,
            stop,
            unreadable or reason,
            torn=False,
            first_seq=first_missing,
            last_seq=last_missing,
            is_unreadable=bool(unreadable),
        )

    def unreadable(self, start: int, end: int) -> str:
        """Which bytes between two offsets cannot be read, in words; empty if none."""
        bad = sorted(one for one in self._file.bad.items() if start < one[1].end and one[0] < end)
        if not bad:
            return ""
        (first, piece), more = bad[0], len(bad) - 1
        others = f", and {more} more" if more else ""
        return f"bytes {first}–{piece.end} cannot be read ({piece.reason}){others}"

    def last_seq(self, offset: int, first_seq: int) -> int:
        """A bound of the seqs lost with the stretch from `offset` on, if no frame follows.

        In the message log, where no later record may get them: those that a header claims, and as
        many as have room behind it. An hour's seqs have gaps: 0, unless that frame reaches the
        end."""
        header, last_seq = self.header(offset), first_seq
        if isinstance(header, Header):
            offset, last_seq = offset + header.frame_bytes, header.last_seq
        rest = max(0, self._used_end - offset)
        if self.kind is LogKind.MESSAGE:
            return last_seq + rest // MESSAGE_DTYPE.itemsize
        return 0 if rest else last_seq

    def search(self, start: int, last_seq: int) -> Frame | None:
        """The next frame from `start` on that verifies, without its payload."""
        start = padded(start)
        self._used_end = start
        while start < self.end:
            piece = self._file.pread(min(_SEARCH_BYTES + len(MAGIC), self.end - start), start)
            position = piece.find(MAGIC)
            while 0 <= position < _SEARCH_BYTES:
                if position % ALIGNMENT == 0:
                    found = self.frame(start + position, payload=False)
                    # An older frame is left over from a group that was refused and overwritten.
                    if isinstance(found, Frame) and (
                        self.kind not in _ASCENDING or found.header.first_seq > last_seq
                    ):
                        return found
                position = piece.find(MAGIC, position + 1)
            if used := len(piece.rstrip(b"\0")):
                self._used_end = start + used
            start += _SEARCH_BYTES
        return None
