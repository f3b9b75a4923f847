"""Key runs: very many pairs of a key hash and a value, sorted, in a file that never changes.

    keys/<number, 20 digits>.run

    head │ block 0 │ block 1 │ … │ first of each block │ filter

A block is 4 KiB: up to 102 rows of 40 bytes (key 16, value 24) and a checksum over its number and
its rows. Keys are hashes, so their first 8 bytes, as a number, order them (two keys with the same
8 bytes may stand either way round). The *first of each block* says which block a key is in. The
filter is a Bloom filter in words of 64 bits: a key has one word, and up to four bits in it
(Putze, Sanders, Singler: Cache-, Hash- and Space-Efficient Bloom Filters). It says of 97 in 100
keys that are not here that they are not, without a look at a block.

A value of NOTHING says that the key has none, whatever older runs say.

Cost: 42 bytes a key on the disk, of which 2 are mapped: those are verified when the file is opened,
0.5 ms per million keys. A key that is not here takes 0.15 µs, or 0.5 µs alone, one that is here 5
µs, once its block is in the system's memory. To write a run: 0.4 µs a row.
Threads: any may read; one writes.
"""

import struct
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from storage.catalog_columns import Columns
from storage.errors import DamageError, UnreadableError
from storage.files import File, Files
from storage.frame import Damage
from storage.scratch import Scratch

RUNS_KEY = b"key_runs"
"""In META: the runs."""
DIRECTORY = "keys"
SUFFIX = ".run"
KEY_BYTES = 16
VALUE_BYTES = 24
NOTHING = bytes(VALUE_BYTES)
ROW_DTYPE = np.dtype([("key", "V16"), ("value", "V24")])
BLOCK_BYTES = 4096
BLOCK_ROWS = (BLOCK_BYTES - 4) // ROW_DTYPE.itemsize
KEYS_PER_WORD = 5
"""12.8 bits of the filter for a key."""

_MAGIC = b"DLKR"
_VERSION = 1
_HEAD = struct.Struct("<4sHHQQQII")
"""Magic, version, bytes of a row, stamp, count of rows, words of the filter; checksums of the
mapped part and of the head until here."""
_HEAD_CRC = struct.Struct("<I")
_U64 = np.dtype("<u8")
_checksum: Callable[[bytes], int] = google_crc32c.value


def run_path(number: int) -> str:
    """Where a run is, relative to the data directory."""
    return f"{DIRECTORY}/{number:020d}{SUFFIX}"


class RunState(NamedTuple):
    """The catalog's record of a run."""

    number: int
    rows: int


def heads_of(keys: NDArray[np.void]) -> NDArray[np.uint64]:
    """The first 8 bytes of each key, as a number (shape n)."""
    table = np.ascontiguousarray(keys).view(">u8").reshape(-1, 2)
    heads: NDArray[np.uint64] = table[:, 0].astype(np.uint64)
    return heads


class FilterBits(NamedTuple):
    """The hashes by which filters know keys; the same for every run."""

    words: NDArray[np.uint64]
    """The word of each key, modulo the number of words of a filter (shape n)."""
    bits: NDArray[np.uint64]
    """The bits of each key, in its word (shape n)."""

    @classmethod
    def of(cls, keys: NDArray[np.void]) -> "FilterBits":
        """Those of keys (V16, shape n)."""
        tails = np.ascontiguousarray(keys).view(">u8").reshape(-1, 2)[:, 1].astype(np.uint64)
        bits = np.zeros(len(keys), np.uint64)
        for shift in (0, 6, 12, 18):
            bits |= np.uint64(1) << ((tails >> np.uint64(shift)) & np.uint64(63))
        return cls(tails >> np.uint64(24), bits)

    def places(self, words: int) -> NDArray[np.intp]:
        """The word of each key in a filter that has so many."""
        return (self.words % np.uint64(words)).astype(np.intp)


def _seal_block(number: int, rows: bytes) -> bytes:
    filled = rows.ljust(BLOCK_BYTES - 4, b"\0")
    return filled + _block_crc(number, filled)


def _block_crc(number: int, rows: bytes) -> bytes:
    crc: int = google_crc32c.extend(_checksum(number.to_bytes(8, "little")), rows)
    return crc.to_bytes(4, "little")


class RunWriter:
    """Writes a run, whose rows come in the order of their heads."""

    def __init__(self, files: Files, number: int, *, stamp: int, count_max: int) -> None:
        """`count_max`: there are no more rows than that. Raises ShortageError."""
        self._path = run_path(number)
        self._number = number
        self._stamp = stamp
        self._words = max(1, -(-count_max // KEYS_PER_WORD))
        scratch = Scratch(files, 1 << 20)
        self._filter: NDArray[np.uint64] = scratch.empty(self._words, _U64)
        self._filter[:] = 0
        self._firsts: list[NDArray[np.uint64]] = []
        self._left = np.empty(0, ROW_DTYPE)
        """Rows that do not fill a block."""
        self._blocks = 0
        self._count = 0
        self._file: File = files.open(self._path, create=True)
        self._is_closed = False
        self._files = files

    def append(self, columns: Columns) -> None:
        """Write these rows, whose heads follow those of all before. Raises ShortageError."""
        count = len(columns.keys)
        if not count:
            return
        rows = np.empty(len(self._left) + count, ROW_DTYPE)
        rows[: len(self._left)] = self._left
        rows["key"][len(self._left) :], rows["value"][len(self._left) :] = columns
        whole = len(rows) // BLOCK_ROWS * BLOCK_ROWS
        self._write(rows[:whole])
        self._left = rows[whole:]
        self._count += count
        known = FilterBits.of(columns.keys)
        np.bitwise_or.at(self._filter, known.places(self._words), known.bits)

    def _write(self, rows: NDArray[np.void]) -> None:
        if not len(rows):
            return
        data, step = rows.tobytes(), BLOCK_ROWS * ROW_DTYPE.itemsize
        blocks = [
            _seal_block(number, data[start : start + step])
            for number, start in enumerate(range(0, len(data), step), self._blocks)
        ]
        self._file.pwrite(blocks, (1 + self._blocks) * BLOCK_BYTES)
        # If this fails it is called again, so nothing has changed before.
        self._firsts.append(heads_of(rows["key"][::BLOCK_ROWS]))
        self._blocks += len(blocks)

    def finish(self) -> RunState:
        """Write the rest; durable on return. Raises SyncError, ShortageError: call it again."""
        self._write(self._left)
        self._left = self._left[:0]
        firsts = np.concatenate([np.empty(0, _U64), *self._firsts]).astype(_U64)
        mapped = firsts.tobytes() + self._filter.tobytes()
        head = _HEAD.pack(
            _MAGIC,
            _VERSION,
            ROW_DTYPE.itemsize,
            self._stamp,
            self._count,
            self._words,
            _checksum(mapped),
            0,
        )[: -_HEAD_CRC.size]
        head += _HEAD_CRC.pack(_checksum(head))
        self._file.pwrite([mapped], (1 + self._blocks) * BLOCK_BYTES)
        self._file.pwrite([head.ljust(BLOCK_BYTES, b"\0")], 0)
        self._file.fdatasync()
        self._files.sync_directory(DIRECTORY)
        self.close()
        return RunState(self._number, self._count)

    def close(self) -> None:
        """Give the descriptor back, if that has not been done."""
        if not self._is_closed:
            self._file.close()
            self._is_closed = True


class KeyRun:
    """A run that is complete."""

    def __init__(
        self, files: Files, state: RunState, *, stamp: int, path: str | None = None
    ) -> None:
        """Verify the mapped part. `path`: where the file is, if not in its place. Raises
        DamageError; FileNotFoundError where there is no file."""
        self.state = state
        self.path = path or run_path(state.number)
        self._file = files.open(self.path)
        try:
            self._open(files, stamp)
        except BaseException:
            self._file.close()
            raise

    def _open(self, files: Files, stamp: int) -> None:
        state = self.state
        head = self._file.pread(_HEAD.size, 0)
        body = head[: -_HEAD_CRC.size]
        if len(head) < _HEAD.size or _HEAD_CRC.pack(_checksum(body)) != head[-_HEAD_CRC.size :]:
            raise self._damage(0, "the head does not match its checksum")
        magic, version, row_bytes, found, count, words, crc, _ = _HEAD.unpack(head)
        if (magic, version, row_bytes) != (_MAGIC, _VERSION, ROW_DTYPE.itemsize):
            raise self._damage(0, "the head is not that of a key run of this version")
        if (found, count) != (stamp, state.rows):
            raise self._damage(0, "the file belongs to another data directory, or another catalog")
        self._blocks = -(-count // BLOCK_ROWS)
        begin = (1 + self._blocks) * BLOCK_BYTES
        mapped = files.map_to_read(self.path)[begin:]
        if len(mapped) != 8 * (self._blocks + words) or _checksum(bytes(mapped)) != crc:
            raise self._damage(begin, "the index does not match its checksum")
        self._firsts: NDArray[np.uint64] = np.frombuffer(mapped, _U64, self._blocks)
        self._filter: NDArray[np.uint64] = np.frombuffer(mapped, _U64, words, 8 * self._blocks)
        self._words = words
        # One word of these is read in less time than of an array.
        self._first_words = mapped[: 8 * self._blocks].cast("Q")
        self._filter_words = mapped[8 * self._blocks :].cast("Q")

    def close(self) -> None:
        """Give the descriptor back. There must be no look-up any more."""
        self._file.close()

    def _damage(self, offset: int, reason: str) -> DamageError:
        return DamageError(self.path, offset, reason)

    # ── looking up ─────────────────────────────────────────────────────────────────────────────

    def get(self, key: bytes) -> bytes | None:
        """The value of a key, perhaps NOTHING; None: it is not here. Raises DamageError."""
        tail = int.from_bytes(key[8:], "big")
        bits = (
            1 << (tail & 63)
            | 1 << (tail >> 6 & 63)
            | 1 << (tail >> 12 & 63)
            | 1 << (tail >> 18 & 63)
        )
        if self._filter_words[(tail >> 24) % self._words] & bits != bits:
            return None
        return self._find(key)

    def add_found(
        self, keys: Sequence[bytes], known: FilterBits, found: dict[bytes, bytes]
    ) -> None:
        """Add those of `keys` that are here to `found`, with their values, some of which may be
        NOTHING, unless they are in it. Raises DamageError."""
        bits = self._filter[known.places(self._words)] & known.bits
        for at in np.flatnonzero(bits == known.bits).tolist():
            key = keys[at]
            if key not in found and (value := self._find(key)) is not None:
                found[key] = value

    def _find(self, key: bytes) -> bytes | None:
        head = int.from_bytes(key[:8], "big")
        firsts = self._first_words
        following = bisect_left(firsts, head)
        if following:
            # The rows of a head may begin in the block before the first that begins with it.
            value = self._find_in(following - 1, key)
            if value is not None:
                return value
        while following < self._blocks and firsts[following] == head:
            value = self._find_in(following, key)
            if value is not None:
                return value
            following += 1
        return None

    def _find_in(self, number: int, key: bytes) -> bytes | None:
        rows = self._block(number)
        at = rows.find(key)
        while at >= 0:
            if at % ROW_DTYPE.itemsize == 0:
                return rows[at + KEY_BYTES : at + KEY_BYTES + VALUE_BYTES]
            at = rows.find(key, at + 1)
        return None

    def _block(self, number: int) -> bytes:
        """The rows of a block. Raises DamageError."""
        offset = (1 + number) * BLOCK_BYTES
        block = self._file.pread(BLOCK_BYTES, offset)
        rows = block[:-4]
        if _block_crc(number, rows) != block[-4:]:
            raise self._damage(offset, f"block {number} does not match its checksum")
        count = min(BLOCK_ROWS, self.state.rows - number * BLOCK_ROWS)
        return rows[: count * ROW_DTYPE.itemsize]

    # ── reading it all ─────────────────────────────────────────────────────────────────────────

    def between(self, first: int, until: int) -> Columns:
        """The rows whose heads are from `first` on and below `until`. Raises DamageError."""
        begin = max(int(np.searchsorted(self._firsts, np.uint64(first), side="left")) - 1, 0)
        end = self._blocks
        if until < 1 << 64:
            end = int(np.searchsorted(self._firsts, np.uint64(until), side="left"))
        rows = np.frombuffer(b"".join(map(self._block, range(begin, end))), ROW_DTYPE)
        heads = heads_of(rows["key"])
        here = heads >= np.uint64(first)
        if until < 1 << 64:
            here &= heads < np.uint64(until)
        rows = rows[here]
        return Columns(np.ascontiguousarray(rows["key"]), np.ascontiguousarray(rows["value"]))

    def verify(self) -> Iterator[Damage]:
        """Read every block. Returns the damage. Opening has verified index and filter."""
        for number in range(self._blocks):
            try:
                self._block(number)
            except (DamageError, UnreadableError) as error:
                offset = (1 + number) * BLOCK_BYTES
                yield Damage(self.path, offset, offset + BLOCK_BYTES, error.reason, torn=False)


def merged(parts: Sequence[Columns], *, drop_nothing: bool) -> Columns:
    """The rows of all parts in the order of their heads. A key that is in several parts gets the
    row of the last one. `drop_nothing`: leave out rows without a value, since there is nothing
    older."""
    keys = np.concatenate([part.keys for part in parts])
    values = np.concatenate([part.values for part in parts])
    heads = heads_of(keys)
    order = np.argsort(heads, kind="stable")  # which is quick where sorted stretches come together
    ascending = heads[order]
    if (ascending[1:] == ascending[:-1]).any():
        tails = np.ascontiguousarray(keys).view(">u8").reshape(-1, 2)[:, 1].astype(np.uint64)
        order = np.lexsort((tails, heads))
        tails, ascending = tails[order], heads[order]
        is_last = np.ones(len(order), bool)
        is_last[:-1] = (ascending[1:] != ascending[:-1]) | (tails[1:] != tails[:-1])
        order = order[is_last]
    keys, values = keys[order], values[order]
    if drop_nothing:
        there = values != np.void(NOTHING)
        keys, values = keys[there], values[there]
    return Columns(keys, values)


def numbers_in(files: Files) -> list[int]:
    """The numbers of all runs that have a file."""
    names = (name for name in files.list(DIRECTORY) if name.endswith(SUFFIX))
    return sorted(int(name[: -len(SUFFIX)]) for name in names if name[: -len(SUFFIX)].isdigit())


def pack_runs(runs: Iterable[RunState]) -> bytes:
    """The value of RUNS_KEY; newest first."""
    return b"".join(struct.pack(">QQ", *run) for run in runs)


def unpack_runs(value: bytes) -> list[RunState]:
    """The runs in a value of RUNS_KEY. Raises struct.error."""
    return [RunState(*pair) for pair in struct.iter_unpack(">QQ", value)]
