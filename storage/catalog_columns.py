"""Very many pairs of fixed length as two columns: sorted and checksummed, no object for each.

The checksum is linear: the checksum of a row is the checksum of a row of zeros, xor the change that
each of its bytes makes. So a table of 256 changes for each place gives the checksums of any number
of rows.

Cost: 0.1 µs per row to sort, 3 ns per row and byte for checksums; the tables of a length are made
once, in 1 ms. NumPy releases the GIL in all of it. Threads: pure functions.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import google_crc32c
import numpy as np
from numpy.typing import NDArray

_ROWS_SLICE = 8192
"""Rows whose bytes stay in the cache while one column after the other is looked up."""


class Columns(NamedTuple):
    """Keys and values, as many of one as of the other; later pairs win."""

    keys: NDArray[np.void]
    """Shape (n,), dtype V<length of a key>."""
    values: NDArray[np.void]
    """Shape (n,), dtype V<length of a value>."""


def as_columns(rows: NDArray[np.void]) -> NDArray[np.uint8]:
    """Rows as a table of bytes, of shape (rows, bytes of a row)."""
    return np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), rows.dtype.itemsize)


def ascending(parts: Sequence[Columns]) -> Columns:
    """All pairs in the order of their keys, of each key the last one."""
    keys = np.concatenate([part.keys for part in parts])
    values = np.concatenate([part.values for part in parts])
    length = keys.dtype.itemsize
    padded = np.zeros((len(keys), -(-length // 8) * 8), np.uint8)
    padded[:, :length] = as_columns(keys)
    words = padded.view(">u8").astype(np.uint64)
    first = np.ascontiguousarray(words[:, 0])
    order = np.argsort(first)
    first = first[order]
    if (first[1:] == first[:-1]).any():
        # The first eight bytes of a hash are nearly always enough. Here they are not.
        order = np.lexsort(words.T[::-1])
        words = words[order]
        is_last = np.ones(len(order), bool)
        is_last[:-1] = (words[1:] != words[:-1]).any(axis=1)
        order = order[is_last]
    return Columns(keys[order], values[order])


def row_checksums(prefix: bytes, rows: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """The crc32c of `prefix` and each row; shape of `rows`: (rows, bytes of a row)."""
    count, length = rows.shape
    changes = _changes(length)
    checksums = np.full(count, google_crc32c.value(prefix + bytes(length)), np.uint32)
    for start in range(0, count, _ROWS_SLICE):
        part, here = checksums[start : start + _ROWS_SLICE], rows[start : start + _ROWS_SLICE]
        for place in range(length):
            part ^= changes[place][here[:, place]]
    return checksums


@lru_cache
def _changes(length: int) -> NDArray[np.uint32]:
    """The changes that each byte at each place makes in a checksum; shape (length, 256)."""
    changes = np.zeros((length, 256), np.uint32)
    zeros = google_crc32c.value(bytes(length))
    for bit in (1 << number for number in range(8)):
        has_bit = np.flatnonzero(np.arange(256) & bit)
        for place in range(length):
            row = bytearray(length)
            row[place] = bit
            changes[place, has_bit] ^= np.uint32(google_crc32c.value(bytes(row)) ^ zeros)
    return changes
