"""The schedule log and the dispatch log: a file per UTC hour, and in the first per day that is far.

A file is frames, one behind the other, appended with positioned writes and made durable by `sync`,
which covers all files that were touched since the last one.

A file that was written stays open until it was synced. Linux reports an error of writing back once,
to the processes that had the file open when it happened. A descriptor that is opened later need not
hear of it, and its sync would succeed though bytes are missing. So where more files were written
than may be open, the half of them that were not used for longest are synced together, and are then
closed one by one as others are opened.

In the schedule log the rows of one frame, and the frames of one file, are in the order of their
seq; therefore a row is found by two bisections, over the frames and within one (`find`).

Cost: append is one write; `sync` is one fdatasync per file that was written, many of them at once;
`find` reads the columns of one frame; `scan_runs` reads columns only, as does `scan` unless asked
for payloads. The index of a file is 24 bytes per frame, built by reading its headers once. Indexes
and frames that were looked into take at most INDEXES_MAX_BYTES and DECODED_MAX_BYTES, 48 MiB in an
instance that is used for look-ups. A server has two of those, 96 MiB (101 MB). A single index, or
frame, that is larger than its bound is kept alone.
Threads: one instance belongs to one thread. Several threads read the same files through instances
of their own; only one of them writes.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from storage.buckets import bucket_path, parse_bucket_file
from storage.errors import DamageError, ShortageError, UnreadableError
from storage.files import Buffer, File, Files, read_past
from storage.frame import (
    ALIGNMENT,
    HEADER_BYTES,
    Damage,
    Frame,
    Rows,
    decode_header,
    decode_rows,
    encode_parts,
    scan,
)
from storage.frame_runs import FrameRun, Heads, scan_heads, scan_runs
from storage.kept import ENTRY_BYTES, BoundedCache
from storage.rows import FLAG_REMOVAL, SEQ_MAX, LogKind, concatenate

OPEN_FILES_MAX = 128
"""Unless told otherwise."""
INDEXES_MAX_BYTES = 32 * 1024 * 1024
"""Those of 65,000 hours of a frame each, or of an hour of a million frames."""
DECODED_MAX_BYTES = 16 * 1024 * 1024
DECODED_FRAMES_MAX = 64
"""Besides: to forget an hour is to walk over them."""

SET_ASIDE = ".damaged"
"""The ending of the name of a file that is not part of the log any more."""
_INDEX_DTYPE = np.dtype([("first_seq", "<u8"), ("last_seq", "<u8"), ("offset", "<u8")])


class HourLog:
    """All files of one of the two logs."""

    def __init__(
        self, files: Files, kind: LogKind, *, stamp: int, open_files_max: int = OPEN_FILES_MAX
    ) -> None:
        """`open_files_max`: at least 1; one more is open for a moment."""
        assert open_files_max >= 1, open_files_max
        self.kind = kind
        self._open_files_max = open_files_max
        self.directory = kind.name.lower()
        self.files = files
        self._stamp = stamp
        # The open files by hour, in the order in which they were used. Dirty: written, not synced.
        self._clean: OrderedDict[int, File] = OrderedDict()
        self._dirty: OrderedDict[int, File] = OrderedDict()
        # A process that was killed may have left names that are not durable yet.
        self._created = True
        self._indexes: BoundedCache[int, _Index] = BoundedCache(INDEXES_MAX_BYTES)
        self._decoded: BoundedCache[tuple[int, int], Rows] = BoundedCache(
            DECODED_MAX_BYTES, DECODED_FRAMES_MAX
        )
        files.make_directory(self.directory)

    def path(self, hour: int) -> str:
        """The path of an hour's file."""
        return bucket_path(self.kind, hour)

    def buckets(self) -> list[int]:
        """The buckets that have a file. Files of other names are left alone."""
        names = self.files.list(self.directory)
        buckets = (parse_bucket_file(self.kind, name) for name in names)
        return [bucket for bucket in buckets if bucket is not None]

    def size(self, hour: int) -> int:
        """Length of the hour's file in bytes, 0 where there is none."""
        file = self._file(hour)
        return file.size() if file else 0

    def _file(self, hour: int, *, create: bool = False) -> File | None:
        for used in (self._dirty, self._clean):
            file = used.get(hour)
            if file is not None:
                used.move_to_end(hour)
                return file
        path = self.path(hour)
        try:
            file = self.files.open(path)
        except FileNotFoundError:
            if not create:
                return None
            self._created = True  # Even if the call fails: it may have had its effect.
            file = self.files.open(path, create=True)
        self._clean[hour] = file
        while len(self._clean) + len(self._dirty) > self._open_files_max:
            if len(self._clean) == 1:
                self._sync(list(islice(self._dirty, (len(self._dirty) + 1) // 2)))
                self._clean.move_to_end(hour)
            _, oldest = self._clean.popitem(last=False)
            oldest.close()
        return file

    def _mark(self, hour: int) -> None:
        """Let an hour's open file stay open until it was synced: before it is written."""
        file = self._clean.pop(hour, None)
        if file is not None:
            self._dirty[hour] = file

    def _sync(self, hours: list[int]) -> None:
        self.files.sync_all([self._dirty[hour] for hour in hours])
        for hour in hours:
            self._clean[hour] = self._dirty.pop(hour)

    # ── writing ────────────────────────────────────────────────────────────────────────────────

    def append(
        self,
        hour: int,
        rows: Buffer,
        payload: Buffer,
        *,
        offset: int,
        first_seq: int,
        last_seq: int,
        created_ms: int,
    ) -> tuple[int, int]:
        """Write one frame at `offset`, the end of the file as the caller knows it.

        Returns where the payload blob begins and where the frame ends. Not durable before `sync`.
        Repeating the call after a ShortageError overwrites the same bytes."""
        assert offset % ALIGNMENT == 0, (hour, offset)
        parts = encode_parts(
            self.kind,
            rows,
            payload,
            first_seq=first_seq,
            last_seq=last_seq,
            created_ms=created_ms,
            stamp=self._stamp,
        )
        file = self._file(hour, create=True)
        assert file is not None
        self._mark(hour)
        file.pwrite(parts, offset)
        return offset + HEADER_BYTES + len(rows), offset + sum(map(len, parts))

    def sync(self) -> None:
        """Make everything that was appended durable. Raises SyncError."""
        self._sync(list(self._dirty))
        if self._created:
            self.files.sync_directory(self.directory)
            self._created = False

    def touch(self, hour: int) -> None:
        """Let the next `sync` cover an hour's file, if there is one."""
        if self._file(hour) is not None:
            self._mark(hour)

    def rewrite(self, hour: int, start: int) -> None:
        """Write the bytes from `start` on once more, so that the next `sync` makes them durable.

        For bytes that an earlier process wrote: if its sync failed, they can be read, but the
        system takes them for written, and a sync alone would not write them. A stretch that cannot
        be read stays as it is."""
        file = self._file(hour)
        if file is None or start >= file.size():
            return
        self._mark(hour)
        for offset, data, error in read_past(file.pread, file.size() - start, start):
            if error is None:
                file.pwrite([data], offset)

    def cut(self, hour: int, length: int) -> None:
        """Cut an hour's file back to `length` bytes, durably with the next `sync` (I7)."""
        file = self._file(hour)
        if file is not None and file.size() > length:
            self._mark(hour)
            file.truncate(length)
        self._forget(hour)

    def release(self, hour: int) -> None:
        """Forget an hour's open file and index: another thread may delete the file now."""
        file = self._dirty.get(hour)
        if file is not None:
            file.fdatasync()
        self._let_go(hour)

    def delete(self, hour: int) -> None:
        """Remove an hour's file, if there is one."""
        self._let_go(hour)
        path = self.path(hour)
        if self.files.exists(path):
            self.files.unlink(path)

    def set_aside(self, hour: int) -> None:
        """Take a file out of the log, and keep it under another name, which no reader looks for."""
        self._let_go(hour)
        path = self.path(hour)
        if self.files.exists(path):
            self.files.rename(path, path + SET_ASIDE)
            self._created = True

    def _let_go(self, hour: int) -> None:
        for files in (self._dirty, self._clean):
            file = files.pop(hour, None)
            if file is not None:
                file.close()
        self._forget(hour)

    # ── reading ────────────────────────────────────────────────────────────────────────────────

    def scan(
        self,
        hour: int,
        *,
        start: int = 0,
        end: int | None = None,
        payload: bool = False,
        after_seq: int = 0,
    ) -> Iterator[Frame | Damage]:
        """Frames and damage between two offsets of an hour's file (None: its end).

        `after_seq`: the last seq before `start`."""
        size = self.size(hour)
        yield from scan(
            _HourFile(self, hour, self.path(hour)),
            start,
            size if end is None else min(end, size),
            kind=self.kind,
            stamp=self._stamp,
            payload=payload,
            after_seq=after_seq,
        )

    def scan_runs(
        self, hour: int, *, start: int = 0, end: int | None = None, after_seq: int = 0
    ) -> Iterator[FrameRun | Damage]:
        """The rows and the damage between two offsets of an hour's file (None: its end); many small
        frames at once. `after_seq`: the last seq before `start`."""
        size = self.size(hour)
        yield from scan_runs(
            _HourFile(self, hour, self.path(hour)),
            start,
            size if end is None else min(end, size),
            kind=self.kind,
            stamp=self._stamp,
            after_seq=after_seq,
        )

    def read(self, hour: int, offset: int, length: int) -> bytes:
        """Bytes of an hour's file; the caller holds their checksum. Empty where no file is.

        Raises UnreadableError."""
        file = self._file(hour)
        return file.pread(length, offset) if file else b""

    def read_now(self, hour: int, offset: int, length: int) -> bytes | None:
        """Bytes of an hour's file if all of them are in memory; never waits for the disk.

        The caller holds their checksum. None where they are not, where no file is, and where it
        cannot be opened for now."""
        try:
            file = self._file(hour)
        except ShortageError:
            return None
        return file.pread_now(length, offset) if file else None

    def find(self, hour: int, seq: int) -> tuple[np.void, int] | None:
        """The schedule row with that seq, and the offset of its payload in the file.

        Tombstones are not found. Raises DamageError when the frame that may hold it is damaged."""
        index, damaged = self._index(hour, np.array([seq], np.uint64))
        position = int(np.searchsorted(index["first_seq"], seq, side="right")) - 1
        if position < 0 or seq > int(index["last_seq"][position]):
            return None
        offset = int(index["offset"][position])
        if (damage := damaged.get(offset)) is not None:
            raise _of(damage, seq)
        rows = self._decode(hour, offset, seq)
        at = int(np.searchsorted(rows["seq"], seq))
        while at < len(rows) and rows["seq"][at] == seq:
            if not rows["flags"][at] & FLAG_REMOVAL:
                start = offset + HEADER_BYTES + rows.nbytes
                return rows[at], start + int(rows["payload_offset"][at])
            at += 1
        return None

    def find_payloads(
        self, hour: int, seqs: NDArray[np.uint64]
    ) -> tuple[NDArray[np.uint64], NDArray[np.uint64], list[DamageError]]:
        """Offset and length of the payload of many schedule rows, frame by frame.

        A length of 0: the row is not there, or its frame is one of those that are damaged."""
        offsets, lengths = np.zeros((2, len(seqs)), np.uint64)
        damage: list[DamageError] = []
        index, damaged = self._index(hour, seqs)
        frames = np.searchsorted(index["first_seq"], seqs, side="right").astype(np.int64) - 1
        for frame in np.unique(frames[frames >= 0]).tolist():
            here = np.flatnonzero((frames == frame) & (seqs <= index["last_seq"][frame]))
            if not len(here):
                continue
            start = int(index["offset"][frame])
            if start in damaged:
                damage += [_of(damaged[start], seq) for seq in seqs[here].tolist()]
                continue
            try:
                rows = self._decode(hour, start, int(seqs[here[0]]))
            except DamageError as error:
                damage.append(error)
                continue
            last = len(rows) - 1
            at = np.minimum(np.searchsorted(rows["seq"], seqs[here]), last)
            # One record may have made a tombstone, too.
            at = np.minimum(at + (rows["flags"][at] & FLAG_REMOVAL), last)
            is_entry = (rows["seq"][at] == seqs[here]) & ((rows["flags"][at] & FLAG_REMOVAL) == 0)
            here, at = here[is_entry], at[is_entry]
            payload_start = np.uint64(start + HEADER_BYTES + rows.nbytes)
            offsets[here] = rows["payload_offset"][at] + payload_start
            lengths[here] = rows["payload_length"][at]
        return offsets, lengths, damage

    def _decode(self, hour: int, offset: int, seq: int) -> Rows:
        """The rows of one frame. The last few are kept, since look-ups come close together."""
        known = self._decoded.get((hour, offset))
        if known is not None:
            return known
        path = self.path(hour)
        try:
            header = decode_header(self.read(hour, offset, HEADER_BYTES), path, stamp=self._stamp)
            rows = header and decode_rows(
                header, self.read(hour, offset + HEADER_BYTES, header.rows_bytes)
            )
        except UnreadableError as error:
            raise DamageError(path, offset, error.reason, seq, seq) from error
        if rows is None:
            raise DamageError(path, offset, "the frame does not match its checksum", seq, seq)
        self._decoded.put((hour, offset), rows, rows.nbytes)
        return rows

    def _forget(self, hour: int) -> None:
        """Drop all that was read of an hour's file: it may not be true any more."""
        self._indexes.pop(hour)
        for key in [key for key in self._decoded if key[0] == hour]:
            self._decoded.pop(key)

    def _index(
        self, hour: int, seqs: NDArray[np.uint64]
    ) -> tuple[NDArray[np.void], Mapping[int, Damage]]:
        """The index of an hour for looking these up: its frames and damaged stretches, in order
        (_INDEX_DTYPE), and the damage, by offset."""
        known = self._indexes.get(hour) or _Index(np.empty(0, _INDEX_DTYPE), 0, {})
        # A stretch that could not be read may be readable again.
        for at, damage in known.damaged.items():
            if damage.is_unreadable and _may_hold(damage, seqs):
                known = known.before(at)
                break
        if (size := self.size(hour)) > known.end:
            known = self._indexed(hour, known, size)
        whole = known
        last = max(known.damaged, default=-1)
        if last >= 0 and known.damaged[last].end == known.end:
            # The entries behind it are unknown as long as there is no frame.
            known = known.before(last)
        known_bytes = known.entries.nbytes + len(known.damaged) * ENTRY_BYTES
        self._indexes.put(hour, known, known_bytes)
        return whole.entries, whole.damaged

    def _indexed(self, hour: int, known: "_Index", size: int) -> "_Index":
        """The index up to `size` of the file, built on the known index of its beginning."""
        parts, damaged, end = [known.entries], dict(known.damaged), known.end
        last_seq = int(known.entries["last_seq"][-1]) if len(known.entries) else 0
        file = _HourFile(self, hour, self.path(hour))
        # An hour may hold gigabytes: the content of a frame is verified when it is looked at.
        for heads in scan_heads(file, end, size, kind=self.kind, stamp=self._stamp):
            parts.append(_entries(heads))
            last_seq, end = heads.last_seq, heads.end
        for found in self.scan_runs(hour, start=end, end=size, after_seq=last_seq):
            if isinstance(found, FrameRun):
                parts.append(_entries(found.heads))
                end = found.heads.end
            elif found.torn:
                break
            else:
                # A look-up there finds the damage, so that it does not take a message for unknown.
                damaged[found.offset] = found
                entry = (found.first_seq, found.last_seq or SEQ_MAX, found.offset)
                parts.append(np.array([entry], _INDEX_DTYPE))
                end = found.end
        return _Index(concatenate(parts, _INDEX_DTYPE), end, damaged)

    def close(self) -> None:
        """Close all files. Bytes that were not synced are not durable."""
        for files in (self._dirty, self._clean):
            for file in files.values():
                file.close()
            files.clear()


def _entries(heads: Heads) -> NDArray[np.void]:
    """The index entries of frames (_INDEX_DTYPE)."""
    entries = np.empty(len(heads.offsets), _INDEX_DTYPE)
    entries["first_seq"] = heads.headers["first_seq"]
    entries["last_seq"] = heads.headers["last_seq"]
    entries["offset"] = heads.offsets
    return entries


@dataclass(frozen=True, slots=True)
class _Index:
    """The frames and damaged stretches of a file."""

    entries: NDArray[np.void]
    """Frames and damaged stretches, in order (_INDEX_DTYPE)."""
    end: int
    """How much of the file it is of."""
    damaged: Mapping[int, Damage]
    """The damaged stretches, by offset, in order."""

    def before(self, offset: int) -> "_Index":
        """As much of it as comes before an offset."""
        entries = self.entries[self.entries["offset"] < offset]
        damaged = {at: damage for at, damage in self.damaged.items() if at < offset}
        return _Index(entries, offset, damaged)


def _may_hold(damage: Damage, seqs: NDArray[np.uint64]) -> bool:
    """Whether any of them may stand where the damage is."""
    last_seq = np.uint64(damage.last_seq or SEQ_MAX)
    return bool(((seqs >= np.uint64(damage.first_seq)) & (seqs <= last_seq)).any())


def _of(damage: Damage, seq: int) -> DamageError:
    """The damage, as far as one seq is concerned."""
    return DamageError(damage.path, damage.offset, damage.reason, seq, seq)


@dataclass(frozen=True, slots=True)
class _HourFile:
    """An hour's file for a scan that may last: the open file may be closed and opened meanwhile."""

    log: HourLog
    hour: int
    path: str

    def pread(self, length: int, offset: int) -> bytes:
        return self.log.read(self.hour, offset, length)
