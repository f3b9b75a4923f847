"""The message log: everything that was accepted, in the order of `seq`; the write-ahead log.

One frame is one group, written and made durable by a single call on a segment that was filled with
zeros beforehand. (Overwriting allocated blocks needs no journal commit: 1.5 times the rate of
appending.) A segment is named by the seq of its first record, so the segment of a seq is found by
bisection, and the first record behind a segment is the next one's name: a missing frame cannot
hide. The old segment is cut to its frames, durably, before the new one gets its name; therefore
only the newest segment can have a torn tail.

A thread that copies the log elsewhere holds back the records that it does not have yet
(`hold_from`), up to so many bytes. Without that bound a copy that makes no progress would fill the
disk of the server.

Cost: one durable write per group. Reading back is one pass over the frames.
Threads: `append` and `has_room` belong to the committer, which is one at a time, in whatever
thread; `prepare_spare` and `delete_through` to the replay thread; `read` runs before either starts.
The list of segments only grows at one end and shrinks at the other, both atomically; `written` and
`hold_from` may be asked by any thread.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

from storage.errors import DamageError, ShortageError
from storage.files import File, Files, size_of
from storage.frame import (
    HEADER_BYTES,
    Damage,
    Frame,
    decode_header,
    encode,
    padded,
    scan,
    with_torn_payload,
)
from storage.rows import LogKind
from storage.write_ahead_log import WriteAheadLog

DIRECTORY = "messages"
SUFFIX = ".messages"
DAMAGED_SUFFIX = ".damaged"
SPARE_NAMES = ("spare", "spare.new")
_SPARE, _SPARE_NEW = (f"{DIRECTORY}/{name}" for name in SPARE_NAMES)
_FILL_BYTES = 1024 * 1024
_NAME = re.compile(rf"([0-9]{{20}}){SUFFIX}")


class Durability(StrEnum):
    """When an append counts as done."""

    FSYNC = "fsync"
    """On the device: survives power loss."""
    OS = "os"
    """In the page cache: survives kill -9, not power loss."""


def parse_segment_name(name: str) -> int | None:
    """The first seq of a segment from its file name, or None if it is not one."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


class Written(NamedTuple):
    """Which segments there are, and how much of them counts."""

    first_seqs: list[int]
    """They are named by these, oldest first."""
    tail_seq: int | None
    """The one that is being written; None: each counts as far as its file reaches."""
    tail_length: int
    """… and how much of it was answered, or may be."""


class MessageLog(WriteAheadLog):
    """Appends groups, reads them back after a crash, deletes groups that have been filed."""

    def __init__(
        self,
        files: Files,
        *,
        stamp: int,
        segment_bytes: int,
        durability: Durability,
        held_max_bytes: int = 0,
    ) -> None:
        """`held_max_bytes`: so much of the filed part is held back for a thread that copies it. All
        of it is held back until `hold_from` says otherwise. 0: no thread copies it."""
        self._files = files
        self._held_max_bytes = held_max_bytes
        self._held_from = 0 if held_max_bytes else None
        self.stamp = stamp
        """In the header of every frame."""
        self._segment_bytes = segment_bytes
        self._durability = durability
        self._tail: File | None = None
        self._tail_offset = 0
        self._tail_seq = 0
        self._tail_bytes = 0
        self._written: tuple[int, int] | None = None
        self._kept: set[str] = set()
        self.torn = None
        files.make_directory(DIRECTORY)
        # Files of other names are left alone.
        names = (parse_segment_name(name) for name in files.list(DIRECTORY))
        self._first_seqs = sorted(first_seq for first_seq in names if first_seq is not None)

    @staticmethod
    def path(first_seq: int) -> str:
        """The path of the segment that begins with `first_seq`."""
        return f"{DIRECTORY}/{first_seq:020d}{SUFFIX}"

    # ── reading, before the first append ──────────────────────────────────────────────────────

    def read(self, from_seq: int) -> Iterator[Frame | Damage]:
        """Every frame that holds a record at or after `from_seq`, and every damaged stretch.

        The torn end of the newest segment was never answered. It is cut off, and is reported in
        `torn` (damage of the very last group looks the same). After the iterator is exhausted the
        log is ready for `append`."""
        assert self._tail is None, "read() must come before append()"
        expected = from_seq
        segments = list(self._first_seqs)
        for first_seq, behind in zip(segments, [*segments[1:], None], strict=False):
            if behind is not None and behind <= from_seq:
                continue
            for found in self._read_segment(first_seq, behind):
                first, last = found.first_seq, found.last_seq
                if last < from_seq:
                    continue
                if isinstance(found, Frame) and first > expected:
                    yield _missing(found.path, found.offset, expected, first - 1)
                expected = max(expected, last + 1)
                yield found
            if behind is not None and expected < behind:
                yield _missing(self.path(behind), 0, expected, behind - 1)
                expected = behind

    def _read_segment(self, first_seq: int, behind: int | None) -> Iterator[Frame | Damage]:
        path = self.path(first_seq)
        file = self._files.open(path)
        try:
            end = 0
            size = file.size()
            items = self._scan(file, first_seq, size)
            # In an older segment a broken payload is damage, and the others of its group are not.
            for found in items if behind is not None else with_torn_payload(items):
                if isinstance(found, Damage) and found.torn:
                    if behind is not None and found.first_seq < behind:
                        yield replace(found, torn=False, last_seq=behind - 1)
                    elif behind is None:
                        self.torn = found
                    break
                end = found.end
                if isinstance(found, Damage) and behind is not None:
                    yield found.before(behind)
                else:
                    yield found
            if behind is None and end < size:
                if end == 0:
                    self._refuse_foreign(file)
                file.truncate(end)
                file.fdatasync()
        finally:
            file.close()
        if behind is None and end == 0:
            self._files.unlink(path)
            self._first_seqs.remove(first_seq)

    def _scan(self, file: File, first_seq: int, end: int) -> Iterator[Frame | Damage]:
        return scan(
            file,
            0,
            end,
            kind=LogKind.MESSAGE,
            stamp=self.stamp,
            payload=True,
            after_seq=first_seq - 1,
        )

    def _refuse_foreign(self, file: File) -> None:
        """Refuse another data directory's log: it must not pass for a torn tail and be deleted."""
        header = decode_header(file.pread(HEADER_BYTES, 0), file.path, stamp=None)
        if header is not None and header.stamp != self.stamp:
            raise DamageError(file.path, 0, "the segment was written in another data directory")

    # ── appending: the committer ───────────────────────────────────────────────────────────────

    def append(
        self, rows: bytes, payload: bytes, *, first_seq: int, last_seq: int, created_ms: int
    ) -> None:
        """Write one group; it is durable on return.

        Raises ShortageError (nothing of the group counts; it may be tried again or given up, and
        the same seqs used for another) and SyncError (the process has to end)."""
        frame = encode(
            LogKind.MESSAGE,
            rows,
            payload,
            first_seq=first_seq,
            last_seq=last_seq,
            created_ms=created_ms,
            stamp=self.stamp,
        )
        self.append_frame(frame, first_seq)

    def append_frame(self, frame: bytes, first_seq: int) -> None:
        """Write the frame of one group, which begins with `first_seq` and has the stamp of this
        log; otherwise as `append`."""
        if self._tail is None or self._tail_offset + len(frame) > self._tail_bytes:
            self._rotate(first_seq, len(frame))
        assert self._tail is not None
        try:
            if self._durability is Durability.FSYNC:
                self._tail.pwrite_durable([frame], self._tail_offset)
            else:
                self._tail.pwrite([frame], self._tail_offset)
        except ShortageError:
            # All of it may have reached the disk. It is taken back, durably, before a publisher
            # hears that it was refused. Otherwise a crash could bring it back behind records that
            # are answered later.
            self._end_tail()
            raise
        self._tail_offset += len(frame)
        self._written = self._tail_seq, self._tail_offset

    def has_room(self, total_bytes: int) -> bool:
        """Whether a group of so many bytes of rows and payload needs no new segment."""
        need_bytes = padded(HEADER_BYTES + total_bytes)
        return self._tail is not None and self._tail_offset + need_bytes <= self._tail_bytes

    def _rotate(self, first_seq: int, need_bytes: int) -> None:
        # Cut the old segment for good before there is a new one: a group that was refused half-way
        # may have left bytes behind the last good frame, and they must not come back in a crash.
        self._end_tail()
        path = self.path(first_seq)
        if self._files.exists(_SPARE) and need_bytes <= self._segment_bytes:
            self._files.rename(_SPARE, path)
        else:
            self._fill(path, max(need_bytes, self._segment_bytes))
        self._files.sync_directory(DIRECTORY)
        self._tail = self._files.open(path)
        self._tail_bytes = self._tail.size()
        self._tail_offset = 0
        self._tail_seq = first_seq
        self._written = first_seq, 0
        if first_seq not in self._first_seqs:
            self._first_seqs.append(first_seq)

    def _end_tail(self) -> None:
        if self._tail is not None:
            tail, self._tail = self._tail, None
            try:
                tail.truncate(self._tail_offset)
                self._written = None
                tail.fdatasync()
            finally:
                tail.close()

    def _fill(self, path: str, length: int) -> None:
        file = self._files.open(path, create=True)
        try:
            zeros = bytes(min(_FILL_BYTES, length))
            for offset in range(0, length, len(zeros)):
                file.pwrite([zeros[: length - offset]], offset)
                # Bit by bit: one sync of it all would hold up the committer's for 100 ms and more.
                file.fdatasync()
        finally:
            file.close()

    # ── housekeeping: the replay thread ────────────────────────────────────────────────────────

    def prepare_spare(self) -> None:
        """Fill the segment that the next rotation takes, so that no publish waits for it."""
        if self._files.exists(_SPARE):
            return
        self._fill(_SPARE_NEW, self._segment_bytes)
        self._files.rename(_SPARE_NEW, _SPARE)

    def delete_through(self, seq: int) -> None:
        """Delete the segments whose records are all at or below `seq`, a checkpoint (I6), and that
        no copying thread holds back."""
        seq = self._released(seq)
        while len(self._first_seqs) > 1 and self._first_seqs[1] <= seq + 1:
            path = self.path(self._first_seqs[0])
            if path in self._kept:
                self._files.rename(path, path + DAMAGED_SUFFIX)
            else:
                self._files.unlink(path)
            del self._first_seqs[0]

    def _released(self, seq: int) -> int:
        """The last seq that may be deleted after a checkpoint at `seq`."""
        held_from = self._held_from
        if held_from is None or held_from > seq:
            return seq
        filed = [first for first, behind in pairwise(self._first_seqs) if behind <= seq + 1]
        if sum(size_of(self._files, self.path(first)) for first in filed) <= self._held_max_bytes:
            return held_from - 1
        self._held_from = None
        return seq

    def keep_segment(self, path: str) -> None:
        """A segment has damage: `delete_through` renames it instead of deleting it, for people."""
        self._kept.add(path)

    def hold_from(self, seq: int | None) -> None:
        """The thread that copies the log has everything below `seq`; None: no thread copies it."""
        assert seq is None or self._held_max_bytes
        self._held_from = seq

    def written(self) -> Written:
        """The part of the log that other threads can read while it is appended to."""
        # In this order: the newest of the list is then the tail, or was cut to the bytes that
        # count.
        first_seqs = list(self._first_seqs)
        tail_seq, length = self._written or (None, 0)
        return Written(first_seqs, tail_seq, length)

    def first_seq(self) -> int | None:
        """The first seq that is still here; None when there is no segment."""
        return self._first_seqs[0] if self._first_seqs else None

    def segments(self) -> list[str]:
        """Paths of all segments, oldest first."""
        return [self.path(first_seq) for first_seq in self._first_seqs]

    def close(self) -> None:
        """Close the tail, cut back to the bytes that were written."""
        self._end_tail()


def _missing(path: str, offset: int, first_seq: int, last_seq: int) -> Damage:
    reason = "records are missing before this frame"
    return Damage(path, offset, offset, reason, torn=False, first_seq=first_seq, last_seq=last_seq)
