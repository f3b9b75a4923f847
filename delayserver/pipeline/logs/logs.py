"""The files of a data directory, cut into pieces for the tasks of a job, and read beside a server.

    message log    the segments that are there
    schedule log   each hour up to its committed length, which stands in the catalog; bytes behind
                   it are not filed yet, and a start of the server may cut them off
    dispatch log   each hour up to the last whole frame

A piece is a whole number of frames of one file. Pieces are put together to partitions of about the
same size, since every task costs about 50 ms. A torn tail of a file that grows is left for the next
read; every other stretch that does not verify is damage. A file that is gone since the directory
was listed was deleted by the server after its retention, and is left out.

Cost: planning reads one header per frame, where a file must be cut or frames are picked by seq.
Threads: functions without state; plans are values that are sent to the tasks.
"""

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from delayserver.records.tables import HourState
from storage.buckets import bucket_path, hours_of, parse_bucket_file
from storage.errors import DiskError
from storage.files import File, Files, read_past, size_of
from storage.frame import (
    HEADER_BYTES,
    MAGIC,
    Damage,
    Frame,
    decode_header,
    scan_live,
    with_torn_payload,
)
from storage.message_log import DIRECTORY as MESSAGES
from storage.message_log import MessageLog, parse_segment_name
from storage.rows import LogKind

PARTITION_BYTES_MIN = 4 * 1024 * 1024
"""A smaller piece is not worth a task of its own."""
COLUMNS_BYTES_MIN = 256 * 1024 * 1024
"""Likewise, without payloads: the columns of so many bytes are worth the cost of a task."""
TAIL_BYTES = 64 * 1024


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Range:
    """A closed range of whole numbers."""

    first: int = 0
    last: int = (1 << 63) - 1

    def overlaps(self, first: int, last: int) -> bool:
        """Whether the two ranges have a number in common."""
        return first <= self.last and last >= self.first

    def holds(self, numbers: np.ndarray) -> np.ndarray:
        """Which of these numbers are in the range."""
        inside: np.ndarray = (numbers >= self.first) & (numbers <= self.last)
        return inside


ALL = Range()


@dataclass(frozen=True, slots=True)
class LogPiece:
    """Frames of one file, in bytes `[start, end)`."""

    kind: LogKind
    path: str
    start: int
    end: int
    promised_end: int = 0
    """Bytes before this that do not verify are damage, also if nothing follows them."""
    after_seq: int = 0
    """The last seq before `start`, as far as it is known."""


# ── which files ────────────────────────────────────────────────────────────────────────────────


def message_pieces(files: Files, seqs: Range = ALL) -> list[LogPiece]:
    """The segments of the message log that may hold records of these seqs."""
    names = (parse_segment_name(name) for name in files.list(MESSAGES))
    first_seqs = sorted(first_seq for first_seq in names if first_seq is not None)
    pieces = []
    for first_seq, behind in zip(first_seqs, [*first_seqs[1:], None], strict=False):
        if not seqs.overlaps(first_seq, ALL.last if behind is None else behind - 1):
            continue
        path = MessageLog.path(first_seq)
        size = size_of(files, path)
        # An older segment was cut to its frames; only the newest can have a torn tail.
        promised = 0 if behind is None else size
        pieces.append(LogPiece(LogKind.MESSAGE, path, 0, size, promised, first_seq - 1))
    return pieces


def schedule_pieces(states: Mapping[int, HourState], hours: Range = ALL) -> list[LogPiece]:
    """The filed parts of the schedule log, by the table of hours (and days), for these hours."""
    return [
        LogPiece(
            LogKind.SCHEDULE, bucket_path(LogKind.SCHEDULE, hour), 0, state.length, state.length
        )
        for hour, state in sorted(states.items())
        if state.length and hours.overlaps(hours_of(hour)[0], hours_of(hour)[-1])
    ]


def dispatch_pieces(files: Files, hours: Range = ALL) -> list[LogPiece]:
    """The files of the dispatch log."""
    kind = LogKind.DISPATCH
    numbers = (parse_bucket_file(kind, name) for name in files.list("dispatch"))
    paths = [
        bucket_path(kind, hour)
        for hour in numbers
        if hour is not None and hours.overlaps(hour, hour)
    ]
    return [LogPiece(kind, path, 0, size_of(files, path)) for path in paths]


def whole_end(files: Files, piece: LogPiece, *, stamp: int) -> int:
    """The end of the last whole frame of a piece; its start if it has none.

    In the dispatch log the search begins at the end, so that a long file costs no more than a short
    one. (Segments of the message log may hold stale frames behind the last one.)"""
    try:
        file = files.open(piece.path)
    except FileNotFoundError:
        return piece.start
    try:
        if piece.kind is not LogKind.DISPATCH:
            return _last_end(file, piece, stamp)
        end = min(piece.end, file.size())
        while end > piece.start:
            start = max(piece.start, (end - 1) // TAIL_BYTES * TAIL_BYTES)
            data = _bytes(file, end - start + HEADER_BYTES, start)
            at = end - start
            while (at := data.rfind(MAGIC, 0, at + len(MAGIC) - 1)) >= 0:
                head = data[at : at + HEADER_BYTES]
                if decode_header(head, piece.path, stamp=stamp) is not None:
                    here = replace(piece, start=start + at)
                    if (found := _last_end(file, here, stamp)) > here.start:
                        return found
            end = start
        return piece.start
    finally:
        file.close()


def _bytes(file: File, length: int, offset: int) -> bytes:
    """The bytes that are there, and no header if they cannot be read."""
    return b"".join(data for _, data, _ in read_past(file.pread, length, offset))


def _last_end(file: File, piece: LogPiece, stamp: int) -> int:
    end = piece.start
    for found in read_file(file, piece, stamp=stamp):
        end = found.end
    return end


def rows_end(files: Files, piece: LogPiece, *, stamp: int, rows_max: int) -> tuple[int, int]:
    """Where so many rows of a piece end, at a frame if there is one, and how many they are."""
    end, count = piece.start, 0
    if rows_max <= 0 or end == piece.end:
        return end, 0
    try:
        file = files.open(piece.path)
    except FileNotFoundError:
        return piece.end, 0
    try:
        while end < piece.end:
            header = decode_header(_bytes(file, HEADER_BYTES, end), piece.path, stamp=stamp)
            if header is None:
                return piece.end, count  # The task that reads it reports the damage.
            if count and count + header.count > rows_max:
                break
            end, count = end + header.frame_bytes, count + header.count
        return end, count
    finally:
        file.close()


# ── which frames ───────────────────────────────────────────────────────────────────────────────


def cut(
    files: Files, pieces: Iterable[LogPiece], *, stamp: int, bytes_max: int, seqs: Range = ALL
) -> list[LogPiece]:
    """Cut pieces into smaller ones of about `bytes_max`. Pieces that hold none of the seqs are left
    out."""
    found: list[LogPiece] = []
    for piece in pieces:
        if piece.end - piece.start <= bytes_max and seqs == ALL:
            found.append(piece)
        else:
            found += _cut(files, piece, stamp, bytes_max, seqs)
    return [piece for piece in found if piece.end > piece.start]


def _cut(
    files: Files, piece: LogPiece, stamp: int, bytes_max: int, seqs: Range
) -> Iterator[LogPiece]:
    try:
        file = files.open(piece.path)
    except FileNotFoundError:
        yield piece  # The task that reads it reports the damage.
        return
    try:
        open_piece: LogPiece | None = None
        offset, last_seq = piece.start, piece.after_seq
        while offset < piece.end:
            header = decode_header(_bytes(file, HEADER_BYTES, offset), piece.path, stamp=stamp)
            if header is None:
                break
            wanted = seqs.overlaps(header.first_seq, header.last_seq)
            if open_piece is not None and (not wanted or offset - open_piece.start >= bytes_max):
                yield replace(open_piece, end=offset)
                open_piece = None
            if wanted and open_piece is None:
                open_piece = replace(piece, start=offset, after_seq=last_seq)
            offset += header.frame_bytes
            last_seq = header.last_seq
        if open_piece is None:
            open_piece = replace(piece, start=offset, after_seq=last_seq)
        # The last piece includes the bytes without a header: a torn tail, zeros, or damage.
        yield open_piece
    finally:
        file.close()


def share(items: Sequence[T], sizes: Sequence[int], partitions: int) -> list[list[T]]:
    """Items in groups of about the same size: the largest goes first, each into the smallest group
    (LPT, Graham 1969). In a group they stand in the order that they came in."""
    groups: list[list[int]] = [[] for _ in range(max(1, min(partitions, len(items))))]
    heap = [(0, number) for number in range(len(groups))]
    for index in sorted(range(len(items)), key=lambda index: -sizes[index]):
        size, number = heapq.heappop(heap)
        groups[number].append(index)
        heapq.heappush(heap, (size + sizes[index], number))
    return [[items[index] for index in sorted(members)] for members in groups]


def plan(
    files: Files,
    pieces: list[LogPiece],
    *,
    stamp: int,
    partitions: int,
    seqs: Range = ALL,
    bytes_min: int = PARTITION_BYTES_MIN,
) -> list[list[LogPiece]]:
    """At most so many partitions of about the same size, each of `bytes_min` or more."""
    total = sum(piece.end - piece.start for piece in pieces)
    partitions = max(1, min(partitions, total // bytes_min))
    bytes_max = max(PARTITION_BYTES_MIN, -(-total // partitions))
    pieces = cut(files, pieces, stamp=stamp, bytes_max=bytes_max, seqs=seqs)
    return share(pieces, [piece.end - piece.start for piece in pieces], partitions)


# ── reading ────────────────────────────────────────────────────────────────────────────────────


def read(files: Files, piece: LogPiece, *, stamp: int, payload: bool) -> Iterator[Frame | Damage]:
    """Frames of a piece, and damage. A torn tail is left out, and so is a file that is gone."""
    try:
        file = files.open(piece.path)
    except FileNotFoundError:
        return
    try:
        yield from read_file(file, piece, stamp=stamp, payload=payload)
    finally:
        file.close()


def read_file(
    file: File, piece: LogPiece, *, stamp: int, payload: bool = False
) -> Iterator[Frame | Damage]:
    """Frames of a piece whose file the caller has opened, and damage; the file stays open."""
    try:
        yield from _read(file, piece, stamp, payload)
    except DiskError as error:
        yield Damage(piece.path, piece.start, piece.end, str(error), torn=False)


def _read(file: File, piece: LogPiece, stamp: int, payload: bool) -> Iterator[Frame | Damage]:
    # A group that was cut within its payloads was never answered; only the payloads show that.
    may_be_torn = piece.kind is LogKind.MESSAGE and not piece.promised_end
    items = scan_live(
        file,
        piece.start,
        piece.end,
        kind=piece.kind,
        stamp=stamp,
        payload=payload or may_be_torn,
        after_seq=piece.after_seq,
    )
    for found in with_torn_payload(items) if may_be_torn else items:
        if isinstance(found, Frame) or not found.torn:
            yield found
        elif found.offset < piece.promised_end:
            yield replace(found, torn=False)
    size = file.size()
    if size < piece.promised_end and size < piece.end:
        reason = "the file is shorter than the catalog says"
        yield Damage(piece.path, max(size, piece.start), piece.end, reason, torn=False)
