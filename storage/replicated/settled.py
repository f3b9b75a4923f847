"""The settled deliveries of a shard, on a replicated log: a set that only grows.

A record is a frame of the dispatch log as it stands in the files, whatever hours its rows belong
to. The same row may stand there several times, from any owner, in any order. It is true each time,
so a node need not be in office to append it. A process that was stopped before it could report its
deliveries, and reports them hours later, saves a repeat.

Some records are parts of transactions (`storage.replicated.transactions`): they count if the
transaction was committed. The markers of transactions take offsets and are no records, so offsets
have gaps.

Cost: one crc32c pass, each way. Threads: belongs to one thread at a time.
"""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from storage.errors import FencedError
from storage.frame import Rows, encode
from storage.notes import framed, in_frames
from storage.replicated.engine import EngineLog
from storage.replicated.envelope import PART_MAX_BYTES
from storage.replicated.reader import frame_of
from storage.rows import DISPATCH_DTYPE, LogKind

ROWS_MAX: Final = PART_MAX_BYTES // DISPATCH_DTYPE.itemsize
"""The number of rows in one record."""


class Settled(NamedTuple):
    """A record: its offset, its rows (DISPATCH_DTYPE), and notes about them (`storage.notes`)."""

    offset: int
    rows: Rows
    notes: bytes = b""


def encode_settled(rows: Rows, stamp: int, now_ms: int, notes: bytes = b"") -> bytes:
    """A record that holds these rows (DISPATCH_DTYPE), ROWS_MAX at most."""
    assert 0 < len(rows) <= ROWS_MAX, len(rows)
    return encode(
        LogKind.DISPATCH,
        rows.tobytes(),
        notes,
        first_seq=int(rows["seq"].min()),
        last_seq=int(rows["seq"].max()),
        created_ms=now_ms,
        stamp=stamp,
    )


class SettledLog:
    """Appends rows, and reads them back."""

    def __init__(self, log: EngineLog, stamp: int) -> None:
        self._log = log
        self._stamp = stamp

    def prepare_append(self) -> None:
        """Connect the producer. Does not wait."""
        self._log.prepare_append()

    def append(self, items: Sequence[bytes], now_ms: int) -> list[Settled]:
        """Append rows, each of the bytes one or more, and notes among them; a quorum has them on
        return. Returns the records.

        Raises FencedError where that is not known. The rows are then appended again when their
        messages are delivered again, and this process must append with its connection no more."""
        framed_parts = (framed(part) for part in in_frames(items, PART_MAX_BYTES))
        parts = [(np.frombuffer(rows, DISPATCH_DTYPE), notes) for rows, notes in framed_parts]
        offsets = self._log.append(
            [encode_settled(rows, self._stamp, now_ms, notes) for rows, notes in parts]
        )
        records = [
            Settled(offset, *part)
            for offset, part in zip(offsets, parts, strict=True)
            if offset is not None
        ]
        if len(records) != len(parts):
            raise FencedError(self._log.name, "it is not known whether what is settled is recorded")
        return records

    def read(self, offset: int, wait_s: float) -> Iterator[Settled]:
        """The records from `offset` on that are at hand; waits for the first, at most `wait_s`.

        Raises ReplicatedLogError."""
        for at, data in self._log.read(offset, wait_s):
            frame = frame_of(data, LogKind.DISPATCH, self._stamp, self._log.name, at)
            yield Settled(at, frame.rows, frame.payload or b"")

    @property
    def place(self) -> int:
        """Every record before it was read, or does not count; of the last `read`, once that was
        taken to its end."""
        return self._log.place

    def end(self) -> int | None:
        """The offset behind the last record, whether it counts or not; None where that cannot be
        told now."""
        return self._log.end()

    def close(self) -> None:
        """Let go of the connections."""
        self._log.close()
