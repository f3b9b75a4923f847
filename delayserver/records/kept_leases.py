"""Kept leases: a shard records them at a planned stop, so that the next process honours them.

A lease is a promise to a consumer: until it ends, no other consumer gets the message. A planned
restart does not break it. At the stop the leases that are left go into one small record, and the
next process holds them under the same tokens. The record also counts the starts that followed a
kill, since after a kill nothing is known of the leases, and a message may have been handed out.

    header │ starts after a kill, i64 each │ pulls │ leases │ attempts

The leases of a pull stand together, in the order of the pulls. A lease is kept as the length of
time that it had left, since a clock that is set meanwhile must not end it early.

Cost: columns; 30 bytes and 0.1 µs for a lease. Threads: values.
"""

import struct
from dataclasses import dataclass, field
from typing import Final

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from storage.errors import DamageError
from storage.frame import Rows

MAGIC: Final = b"DLL1"
HEADER: Final = struct.Struct("<4sIIIIIII")
"""Magic, checksum of all that follows it, stamp, 1 after a planned stop (else 0), and how many
starts, pulls, leases and attempts follow."""
STARTS_MAX: Final = 64
"""Starts that are remembered; the oldest is forgotten first."""
PULL_DTYPE: Final = np.dtype(
    [
        ("number", "<u8"),
        ("leased_ms", "<i8"),
        ("epoch", "<u4"),
        ("subscription_id", "<u4"),
        ("count", "<u4"),
    ]
)
"""A pull, whose messages a consumer got together: the two numbers of its tokens, when they were
handed out, for which subscription, and how many of its leases are kept."""
LEASE_DTYPE: Final = np.dtype(
    [
        ("seq", "<u8"),
        ("due_ms", "<i8"),
        ("left_ms", "<i8"),
        ("index", "<u4"),
        ("attempt", "<u2"),
    ]
)
"""A schedule row that a consumer holds, for how long still, the last number of its token, and which
attempt it is."""
ATTEMPT_DTYPE: Final = np.dtype([("seq", "<u8"), ("subscription_id", "<u4"), ("attempt", "<u2")])
"""A schedule row that came back from a consumer, and the attempt that comes next."""

LEASED_DTYPE: Final = np.dtype([("seq", "<u8"), ("due_ms", "<i8"), ("subscription_id", "<u4")])
"""A schedule row, and a subscription to which it is leased; in memory alone."""

_CRC_END: Final = 8
_START: Final = np.dtype("<i8")


def _rows(dtype: np.dtype[np.void]) -> Rows:
    return np.zeros(0, dtype)


@dataclass(frozen=True, slots=True)
class KeptLeases:
    """The leases and starts that a process leaves to the next one."""

    is_clean: bool = False
    """It was written at a planned stop. Else it was written at a start, and holds no leases."""
    starts_ms: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, _START))
    """When a process began after a kill (shape n, ascending)."""
    pulls: Rows = field(default_factory=lambda: _rows(PULL_DTYPE))
    leases: Rows = field(default_factory=lambda: _rows(LEASE_DTYPE))
    attempts: Rows = field(default_factory=lambda: _rows(ATTEMPT_DTYPE))

    def begun(self, now_ms: int, *, is_first: bool) -> "KeptLeases":
        """The record of the process that begins at `now_ms` and has read this one. `is_first`:
        nothing was in the directory before."""
        starts_ms = self.starts_ms
        if not (self.is_clean or is_first):
            starts_ms = np.sort(np.append(starts_ms, np.int64(now_ms)))[-STARTS_MAX:]
        return KeptLeases(starts_ms=starts_ms)

    def leased(self) -> Rows:
        """Which rows are leased, in the order of the leases (LEASED_DTYPE, shape n)."""
        found = np.zeros(len(self.leases), LEASED_DTYPE)
        found["seq"], found["due_ms"] = self.leases["seq"], self.leases["due_ms"]
        found["subscription_id"] = np.repeat(self.pulls["subscription_id"], self.pulls["count"])
        return found


NONE_KEPT: Final = KeptLeases()


def encode_kept_leases(kept: KeptLeases, stamp: int) -> bytes:
    """The record as bytes, of the directory with that stamp."""
    parts = kept.starts_ms.astype(_START), kept.pulls, kept.leases, kept.attempts
    counts = tuple(map(len, parts))
    body = b"".join([part.tobytes() for part in parts])
    head = HEADER.pack(MAGIC, 0, stamp, kept.is_clean, *counts)
    crc = google_crc32c.extend(google_crc32c.value(head[_CRC_END:]), body)
    return HEADER.pack(MAGIC, crc, stamp, kept.is_clean, *counts) + body


def decode_kept_leases(data: bytes, stamp: int, path: str) -> KeptLeases:
    """The record that these bytes are. Raises DamageError for bytes that are none, or that are of
    another directory; `path` is for that."""
    if len(data) < HEADER.size:
        raise DamageError(path, 0, "the record of the leases is too short")
    magic, crc, of_stamp, is_clean, *counts = HEADER.unpack_from(data)
    dtypes = _START, PULL_DTYPE, LEASE_DTYPE, ATTEMPT_DTYPE
    length = sum(count * dtype.itemsize for count, dtype in zip(counts, dtypes, strict=True))
    if magic != MAGIC or google_crc32c.value(data[_CRC_END:]) != crc:
        raise DamageError(path, 0, "the record of the leases does not match its checksum")
    if of_stamp != stamp or len(data) != HEADER.size + length or is_clean > 1:
        raise DamageError(path, 0, "the record of the leases is of another directory")
    parts, start = [], HEADER.size
    for count, dtype in zip(counts, dtypes, strict=True):
        parts.append(np.frombuffer(data, dtype, count, start))
        start += count * dtype.itemsize
    starts_ms, pulls, leases, attempts = parts
    if int(pulls["count"].sum()) != len(leases):
        raise DamageError(path, 0, "the record of the leases has others than its pulls say")
    return KeptLeases(bool(is_clean), starts_ms, pulls, leases, attempts)
