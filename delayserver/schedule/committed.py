"""Committed records on their way to their hours: many groups become one buffer of rows and one of
payloads; then the payloads of each hour are gathered, one behind the other.

    rows, blob │ rows, blob │ …  ── join ──▶  rows, blob  ── hour by hour ──▶  gathered payloads

Records come in groups as they were committed, a few rows each, and thousands of groups in a second.
NumPy is slow at small arrays, so all of a second are joined before anything is looked at.

Payloads are copied in one of three ways: as one piece if they already stand in a row, length by
length if many have the same (0.1 µs each), and one by one otherwise.

Cost: 0.1 µs per record. Threads: pure functions.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from storage.frame import Rows
from storage.rows import MESSAGE_DTYPE, concatenate

ROWS_SLICE = 1_000
"""Rows that are made objects, or copied, in one step: few enough to stay in the cache."""
_ALIKE_MIN = 16
"""Payloads of a length, on average, for them to be copied by their length."""


class Records(NamedTuple):
    """Committed records with their payloads, as they stand in one frame of the message log."""

    rows: Rows
    payload: bytes
    express_seqs: frozenset[int] = frozenset()
    """Rows that are in the wheel already."""

    @classmethod
    def from_bytes(cls, rows: bytes, payload: bytes, express_seqs: frozenset[int]) -> "Records":
        """Records as the committer wrote them."""
        return cls(np.frombuffer(rows, MESSAGE_DTYPE), payload, express_seqs)

    @classmethod
    def of_groups(
        cls, groups: Sequence[tuple[bytes, bytes]], express_seqs: frozenset[int]
    ) -> "Records":
        """Rows and payloads of many groups in one: there may be thousands in a second."""
        parts = [rows for rows, _ in groups]
        rows = np.frombuffer(bytearray().join(parts), MESSAGE_DTYPE)
        counts = [len(part) // MESSAGE_DTYPE.itemsize for part in parts]
        blob = _join_payloads(rows, counts, [payload for _, payload in groups])
        return cls(rows, blob, express_seqs)


def join_records(batch: Sequence[Records]) -> Records:
    """All records in one. `batch`: in seq order; the rows of one alone are not copied."""
    if len(batch) == 1:
        return batch[0]
    rows = concatenate([records.rows for records in batch], MESSAGE_DTYPE)
    counts = [len(records.rows) for records in batch]
    blob = _join_payloads(rows, counts, [records.payload for records in batch])
    return Records(rows, blob, frozenset().union(*(records.express_seqs for records in batch)))


def gather_payloads(blob: bytes, starts: NDArray[np.int64], rows: Rows) -> memoryview:
    """The payloads of one hour's rows (SCHEDULE_DTYPE), one behind the other.

    `starts`: where in `blob` the payload of each row is. Sets `payload_offset` of the rows to where
    it is in the result, which may be a view of `blob`."""
    lengths = rows["payload_length"].astype(np.int64)
    rows["payload_offset"] = np.cumsum(lengths) - lengths
    present = lengths > 0
    if not present.all():
        starts, lengths = starts[present], lengths[present]
    if not len(starts):
        return memoryview(b"")
    ends = np.cumsum(lengths)
    total = int(ends[-1])
    if np.array_equal(starts[1:], starts[0] + ends[:-1]):
        return memoryview(blob)[int(starts[0]) : int(starts[0]) + total]
    gathered = np.empty(total, np.uint8)
    places = ends - lengths
    by_length = np.argsort(lengths, kind="stable")
    cuts = np.flatnonzero(np.diff(lengths[by_length])) + 1
    if len(cuts) * _ALIKE_MIN > len(starts):
        view = memoryview(blob)
        for here in slices(np.arange(len(starts)), ROWS_SLICE):
            froms = starts[here]
            bounds = zip(froms.tolist(), (froms + lengths[here]).tolist(), strict=True)
            joined = b"".join([view[start:end] for start, end in bounds])
            gathered[places[here[0]] : ends[here[-1]]] = np.frombuffer(joined, np.uint8)
    else:
        # Most payloads are as long as many others: NumPy copies those of one length in one go.
        for here in np.split(by_length, cuts):
            length = int(lengths[here[0]])
            sources, targets = _windows(blob, length), _windows(gathered, length)
            for part in slices(here, ROWS_SLICE):  # through the cache
                targets[places[part]] = sources[starts[part]]
    return gathered.data


def slices(indexes: np.ndarray, length: int) -> Iterator[np.ndarray]:
    """The indexes in pieces of that length; at least one piece, which may be empty."""
    for start in range(0, max(1, len(indexes)), length):
        yield indexes[start : start + length]


def _join_payloads(rows: Rows, counts: list[int], payloads: list[bytes]) -> bytes:
    """The payloads of groups with so many rows each, in one piece. The rows of all groups counted
    from the begin of their own; now they count from the begin of that piece."""
    lengths = np.fromiter(map(len, payloads), np.int64, len(payloads))
    rows["payload_offset"] += np.repeat((np.cumsum(lengths) - lengths).astype(np.uint32), counts)
    return b"".join(payloads)


def _windows(buffer: bytes | np.ndarray, length: int) -> np.ndarray:
    """All stretches of that many bytes: an item for each place at which one begins."""
    count = len(buffer) - length + 1
    return np.ndarray((count,), f"V{length}", buffer=buffer, strides=(1,))
