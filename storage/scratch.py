"""Arrays that may be larger than memory. The first so many bytes are memory. The rest stands in
files without a name, which the system writes out and reads back as it sees fit.

    empty(…) ── memory_bytes left? ── yes ──▶ memory of the process (RssAnon)
                        └──────────── no ───▶ a piece of a mapped file (page cache, RssFile)

Such a file ends with the last array in it, and with the process. Nothing in it outlives either, so
it is memory that the system may take back, as swap is, and has no checksums. Its space is taken
when it is made, because a page that finds no space later ends the process. Where there is no space,
or no descriptor, memory is used.

Cost: about 0.3 ms for a mapped piece, then that of memory, and a fault for each page of 4 KiB. Each
piece has a descriptor. Threads: it belongs to one thread; its arrays may be used by any other.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from storage.errors import DiskError
from storage.files import Files

PIECE_BYTES = 64 << 20
"""The size of a file that several arrays share. Each is twice as long as the one before, because
each costs a descriptor."""
_ALIGNMENT = 64


class Scratch:
    """Room for arrays of one job."""

    def __init__(self, files: Files, memory_bytes: int, *, piece_bytes: int = PIECE_BYTES) -> None:
        self._files = files
        self._memory_left = memory_bytes
        self._piece_bytes = piece_bytes
        self._piece = memoryview(b"")
        self._used = 0

    def empty(self, count: int, dtype: DTypeLike) -> NDArray[Any]:
        """An array of `count` items (shape (count,)); its content is not defined."""
        kind = np.dtype(dtype)
        length = count * kind.itemsize
        if length <= self._memory_left:
            self._memory_left -= length
            return np.empty(count, kind)
        try:
            mapped = self._mapped(length)
        except DiskError:
            return np.empty(count, kind)
        return np.frombuffer(mapped, kind, count)

    def join(self, parts: Sequence[NDArray[Any]], dtype: DTypeLike) -> NDArray[Any]:
        """A copy of all parts, one behind the other."""
        joined = self.empty(sum(map(len, parts)), dtype)
        if parts:
            # Without their fields: NumPy copies those one by one.
            plain = f"V{joined.itemsize}"
            np.concatenate([part.view(plain) for part in parts], out=joined.view(plain))
        return joined

    def _mapped(self, length: int) -> memoryview:
        if length >= self._piece_bytes:
            return self._files.scratch(length)
        if self._used + length > len(self._piece):
            self._piece, self._used = self._files.scratch(self._piece_bytes), 0
            self._piece_bytes *= 2
        mapped = self._piece[self._used : self._used + length]
        self._used += length + -length % _ALIGNMENT
        return mapped
