"""The message log: everything that was accepted, in the order of `seq`; the write-ahead log.

One frame is one group, written and made durable by a single call on a segment that was filled with
zeros beforehand. (Overwriting allocated blocks needs no journal commit: 1.5 times the rate of
appending.) A segment is named by the seq of its first record, so the segment of a seq is found by
bisection, and the first record behind a segment is the next one's name: a missing frame cannot hide.

Cost: one durable write per group. Reading back is one pass over the frames.
Threads: `append` belongs to the committer; `prepare_spare` and `delete_through` to the replay
thread; `read` runs before either starts. The list of segments only grows at one end and shrinks at
the other, both atomically.
"""

from collections.abc import Iterator
from enum import StrEnum

from storage.files import File, Files
from storage.frame import Damage, Frame, encode, scan
from storage.rows import LogKind

DIRECTORY = "messages"
SUFFIX = ".messages"
DAMAGED_SUFFIX = ".damaged"
_SPARE = f"{DIRECTORY}/spare"
_FILL_BYTES = 1024 * 1024


class Durability(StrEnum):
    """When an append counts as done."""

    FSYNC = "fsync"
    """On the device: survives power loss."""
    OS = "os"
    """In the page cache: survives kill -9, not power loss."""


class MessageLog:
    """Appends groups, reads them back after a crash, deletes what has been filed."""

    def __init__(
        self, files: Files, *, stamp: int, segment_bytes: int, durability: Durability
    ) -> None:
        self._files = files
        self._stamp = stamp
        self._segment_bytes = segment_bytes
        self._durability = durability
        self._tail: File | None = None
        self._tail_offset = 0
        self._tail_bytes = 0
        self._kept: set[str] = set()
        files.make_directory(DIRECTORY)
        self._first_seqs = sorted(
            int(name.removesuffix(SUFFIX))
            for name in files.list(DIRECTORY)
            if name.endswith(SUFFIX)
        )

    @staticmethod
    def path(first_seq: int) -> str:
        """The path of the segment that begins with `first_seq`."""
        return f"{DIRECTORY}/{first_seq:020d}{SUFFIX}"

    # ── reading, before the first append ──────────────────────────────────────────────────────

    def read(self, from_seq: int) -> Iterator[Frame | Damage]:
        """Every frame that holds a record at or after `from_seq`, and every damaged stretch.

        What is torn at the very end was never answered: it is cut off, and not reported. After
        the iterator is exhausted the log is ready for `append`."""
        assert self._tail is None, "read() must come before append()"
        expected = from_seq
        segments = list(self._first_seqs)
        for index, first_seq in enumerate(segments):
            behind = segments[index + 1] if index + 1 < len(segments) else None
            if behind is not None and behind <= from_seq:
                continue
            last = behind is None or not any(self._has_frames(seq) for seq in segments[index + 1 :])
            for found in self._read_segment(first_seq, last):
                if isinstance(found, Frame):
                    if found.header.last_seq < from_seq:
                        continue
                    if found.header.first_seq > expected:
                        yield Damage(
                            found.path,
                            found.offset,
                            found.offset,
                            "records are missing before this frame",
                            torn=False,
                            first_seq=expected,
                            last_seq=found.header.first_seq - 1,
                        )
                    expected = found.header.last_seq + 1
                elif found.last_seq:
                    if found.last_seq < from_seq:
                        continue
                    expected = max(expected, found.last_seq + 1)
                yield found

    def _has_frames(self, first_seq: int) -> bool:
        file = self._files.open(self.path(first_seq))
        try:
            found = next(scan(file, 0, file.size(), payload=False, stamp=self._stamp), None)
            return found is not None and not (isinstance(found, Damage) and found.torn)
        finally:
            file.close()

    def _read_segment(self, first_seq: int, last: bool) -> Iterator[Frame | Damage]:
        path = self.path(first_seq)
        file = self._files.open(path)
        try:
            end = 0
            size = file.size()
            for found in scan(file, 0, size, payload=True, stamp=self._stamp):
                if isinstance(found, Damage) and found.torn:
                    if not last:
                        yield found
                    break
                end = found.end
                yield found
            if last and end < size:
                file.truncate(end)
                file.fdatasync()
        finally:
            file.close()
        if last and end == 0:
            self._files.unlink(path)
            self._first_seqs.remove(first_seq)

    # ── appending: the committer ───────────────────────────────────────────────────────────────

    def append(
        self, rows: bytes, payload: bytes, *, first_seq: int, last_seq: int, created_ms: int
    ) -> None:
        """Write one group; it is durable on return.

        Raises DiskFullError (nothing of the group counts; it may be tried again or given up, and
        the same seqs used for another) and SyncError (the process has to end)."""
        frame = encode(
            LogKind.MESSAGE,
            rows,
            payload,
            first_seq=first_seq,
            last_seq=last_seq,
            created_ms=created_ms,
            stamp=self._stamp,
        )
        if self._tail is None or self._tail_offset + len(frame) > self._tail_bytes:
            self._rotate(first_seq, len(frame))
        assert self._tail is not None
        if self._durability is Durability.FSYNC:
            self._tail.pwrite_durable([frame], self._tail_offset)
        else:
            self._tail.pwrite([frame], self._tail_offset)
        self._tail_offset += len(frame)

    def _rotate(self, first_seq: int, need_bytes: int) -> None:
        path = self.path(first_seq)
        if self._files.exists(_SPARE) and need_bytes <= self._segment_bytes:
            self._files.rename(_SPARE, path)
        else:
            self._fill(path, max(need_bytes, self._segment_bytes))
        self._files.sync_directory(DIRECTORY)
        if self._tail is not None:
            self._tail.truncate(self._tail_offset)
            self._tail.close()
        self._tail = self._files.open(path)
        self._tail_bytes = self._tail.size()
        self._tail_offset = 0
        if first_seq not in self._first_seqs:
            self._first_seqs.append(first_seq)

    def _fill(self, path: str, length: int) -> None:
        file = self._files.open(path, create=True)
        try:
            zeros = bytes(min(_FILL_BYTES, length))
            for offset in range(0, length, len(zeros)):
                file.pwrite([zeros[: length - offset]], offset)
            file.fdatasync()
        finally:
            file.close()

    # ── housekeeping: the replay thread ────────────────────────────────────────────────────────

    def prepare_spare(self) -> None:
        """Fill the segment that the next rotation takes, so that no publish waits for it."""
        if self._files.exists(_SPARE):
            return
        making = _SPARE + ".new"
        self._fill(making, self._segment_bytes)
        self._files.rename(making, _SPARE)

    def delete_through(self, seq: int) -> None:
        """Delete the segments whose records are all at or below `seq`, a checkpoint (I6)."""
        while len(self._first_seqs) > 1 and self._first_seqs[1] <= seq + 1:
            path = self.path(self._first_seqs[0])
            if path in self._kept:
                self._files.rename(path, path + DAMAGED_SUFFIX)
            else:
                self._files.unlink(path)
            del self._first_seqs[0]

    def keep(self, path: str) -> None:
        """A segment has damage: when it is not needed any more it is renamed, not deleted."""
        self._kept.add(path)

    def first_seq(self) -> int | None:
        """The first seq that is still here; None when there is no segment."""
        return self._first_seqs[0] if self._first_seqs else None

    def segments(self) -> list[str]:
        """Paths of all segments, oldest first."""
        return [self.path(first_seq) for first_seq in self._first_seqs]

    def close(self) -> None:
        """Close the tail, cut back to what was written."""
        if self._tail is not None:
            self._tail.truncate(self._tail_offset)
            self._tail.close()
            self._tail = None
