"""Packing: rows of the message log, from the columns of records that were decided together.

A single record is packed where it is appended (`Sequencer.append`). Many records write their common
parts once: a few rows are packed by one `map`, more of them column by column in an array. Both make
the same bytes, which a test compares.

Cost: 0.3 µs for a row of a few, 0.15 µs for one of hundreds. Threads: pure.
"""

import struct
from collections.abc import Sequence
from itertools import accumulate, repeat
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from storage.frame import CRC_BYTES
from storage.rows import MESSAGE_DTYPE, NO_KEY, RecordKind

MESSAGE_ROW = struct.Struct("<QqQQq16sIIIIIHBB")
"""One row of MESSAGE_DTYPE; packing one is five times faster than filling an array of one."""
assert MESSAGE_ROW.size == MESSAGE_DTYPE.itemsize
ARRAYS_MIN = 64
"""Fewer rows are packed one by one in less time. Measured: docs/decisions/0024-lanes.md."""


class Publishes(NamedTuple):
    """Records of kind PUBLISH, as columns."""

    dues_ms: Sequence[int]
    subject_ids: Sequence[int]
    payloads: list[bytes]
    """Not sealed."""
    crcs: list[int]
    """The checksums of the payloads."""
    key_hashes: Sequence[bytes] = ()
    """Empty: there are no keys."""
    digests: Sequence[int] | int = 0
    """The digests of the content, where there is a key."""
    flags: Sequence[int] | int = 0
    subscription_ids: Sequence[int] = ()
    """The only receiver of each message, 0: it has several; empty: that is so of all."""


def pack_publishes(publishes: Publishes, first_seq: int, payload_bytes: int) -> bytes:
    """The rows of publishes, whose payloads begin `payload_bytes` into the blob of their group."""
    pack = _pack_few if len(publishes.payloads) < ARRAYS_MIN else _pack_many
    return pack(publishes, first_seq, payload_bytes)


def _pack_few(publishes: Publishes, first_seq: int, payload_bytes: int) -> bytes:
    lengths = [len(payload) + CRC_BYTES for payload in publishes.payloads]
    seqs, none = range(first_seq, first_seq + len(lengths)), repeat(0)
    digests, flags = publishes.digests, publishes.flags
    return b"".join(
        map(
            MESSAGE_ROW.pack,
            seqs,
            publishes.dues_ms,
            seqs,
            none,
            repeat(digests) if isinstance(digests, int) else digests,
            publishes.key_hashes or repeat(NO_KEY),
            publishes.subject_ids,
            publishes.subscription_ids or none,
            accumulate(lengths, initial=payload_bytes),
            lengths,
            publishes.crcs,
            none,
            repeat(RecordKind.PUBLISH),
            repeat(flags) if isinstance(flags, int) else flags,
        )
    )


def _pack_many(publishes: Publishes, first_seq: int, payload_bytes: int) -> bytes:
    count = len(publishes.payloads)
    rows = np.zeros(count, MESSAGE_DTYPE)
    rows["seq"] = rows["message_seq"] = np.arange(first_seq, first_seq + count)
    rows["due_ms"] = publishes.dues_ms
    rows["target_due_ms"] = publishes.digests
    if publishes.key_hashes:
        rows["key_hash"] = np.frombuffer(b"".join(publishes.key_hashes), "V16")
    rows["subject_id"] = publishes.subject_ids
    if publishes.subscription_ids:
        rows["subscription_id"] = publishes.subscription_ids
    lengths = np.fromiter(map(len, publishes.payloads), np.int64, count) + CRC_BYTES
    rows["payload_offset"] = np.cumsum(lengths) + payload_bytes - lengths
    rows["payload_length"] = lengths
    rows["payload_crc"] = publishes.crcs
    rows["kind"] = RecordKind.PUBLISH
    rows["flags"] = publishes.flags
    return rows.tobytes()


def pack_cancels(
    message_seqs: NDArray[np.uint64], dues_ms: NDArray[np.int64], first_seq: int, payload_bytes: int
) -> bytes:
    """The rows of cancels, of messages that wait where their ids say, due at `dues_ms`."""
    count = len(message_seqs)
    rows = np.zeros(count, MESSAGE_DTYPE)
    rows["seq"] = np.arange(first_seq, first_seq + count, dtype=np.uint64)
    rows["message_seq"] = rows["target_seq"] = message_seqs
    rows["target_due_ms"] = dues_ms
    rows["payload_offset"] = payload_bytes
    rows["kind"] = RecordKind.CANCEL
    return rows.tobytes()
