"""The subjects of deliveries: rows of the dispatch log do not name them, schedule rows do.

A row of the dispatch log settles a row of the schedule log of the same hour, which is found by its
seq. A message that was delivered before it was filed stands in the message log. Rows of an import
that is being filed just now stand in neither, so their subject is not known yet. The subject is not
known either if the schedule log is damaged. If rows are picked by subject, that damage is reported,
since the rows would be left out without a word.

Cost: one pass over the columns of an hour for each task that has rows of it, a sort of its seqs,
and 12 bytes per message of the hour. Threads: belongs to one task.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from delayserver.pipeline.logs import logs
from delayserver.pipeline.logs.logs import LogPiece, Range
from delayserver.schedule.filing import schedule_rows
from storage.buckets import bucket_path
from storage.files import Files
from storage.frame import Damage, Frame, Rows
from storage.rows import DISPATCH_DTYPE, FLAG_REMOVAL, HOUR_MS, LogKind

DISPATCHED_DTYPE = np.dtype([*DISPATCH_DTYPE.descr, ("subject_id", "<u4")])
"""A row of the dispatch log, and the subject of its message; 0 if that is not known."""
ROWS_TOGETHER = 128 * 1024


class Subjects:
    """Looks subjects up, hour by hour."""

    def __init__(
        self, files: Files, stamp: int, filed: Mapping[int, int], *, tells_damage: bool
    ) -> None:
        """`filed`: for each hour, the length of its file in the schedule log."""
        self._files = files
        self._stamp = stamp
        self._filed = filed
        self._tells_damage = tells_damage
        self._damage: dict[tuple[str, int], Damage] = {}
        """By file and offset, the damage that was found where subjects were looked up."""
        self._hour = -1
        self._known = (np.empty(0, np.uint64), np.empty(0, np.uint32))

    def added_to(self, items: Iterable[Frame | Damage]) -> Iterator[Frame | Damage]:
        """The frames and the damage of one file of the dispatch log; rows get their subjects.
        Frames are put together, since most are small."""
        frames: list[Frame] = []
        count = 0
        for found in items:
            if isinstance(found, Damage):
                yield found
                continue
            frames.append(found)
            count += len(found.rows)
            if count >= ROWS_TOGETHER:
                yield from self._together(frames)
                frames, count = [], 0
        if frames:
            yield from self._together(frames)

    def _together(self, frames: Sequence[Frame]) -> Iterator[Frame | Damage]:
        rows = np.concatenate([frame.rows for frame in frames])
        told = len(self._damage)
        named = replace(frames[-1], rows=self.add_to(rows))
        if self._tells_damage:
            yield from list(self._damage.values())[told:]
        yield named

    def add_to(self, rows: Rows) -> Rows:
        """Rows of one file, with their subjects."""
        found = np.zeros(len(rows), DISPATCHED_DTYPE)
        for name in DISPATCH_DTYPE.names or ():
            found[name] = rows[name]
        hour = int(rows["due_ms"][0]) // HOUR_MS
        if hour != self._hour:
            self._hour, self._known = hour, self._read(hour)
        found["subject_id"] = _looked_up(rows["seq"], *self._known)
        unknown = found["subject_id"] == 0
        if unknown.any():
            seqs = rows["seq"][unknown]
            found["subject_id"][unknown] = _looked_up(seqs, *self._unfiled(seqs))
        return found

    def _read(self, hour: int) -> tuple[np.ndarray, np.ndarray]:
        length = self._filed.get(hour, 0)
        path = bucket_path(LogKind.SCHEDULE, hour)
        return self._entries(LogPiece(LogKind.SCHEDULE, path, 0, length, length))

    def _unfiled(self, seqs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        wanted = Range(int(seqs.min()), int(seqs.max()))
        pieces = logs.message_pieces(self._files, wanted)
        total = sum(piece.end - piece.start for piece in pieces)
        return self._entries(
            *logs.cut(self._files, pieces, stamp=self._stamp, bytes_max=total, seqs=wanted)
        )

    def _entries(self, *pieces: LogPiece) -> tuple[np.ndarray, np.ndarray]:
        """Seqs in order, and their subjects. Damaged entries are left out, and noted."""
        seqs, subject_ids = [np.empty(0, np.uint64)], [np.empty(0, np.uint32)]
        for piece in pieces:
            for found in logs.read(self._files, piece, stamp=self._stamp, payload=False):
                if isinstance(found, Damage):
                    self._damage.setdefault((found.path, found.offset), found)
                    continue
                rows = found.rows
                if piece.kind is LogKind.MESSAGE:
                    rows, _ = schedule_rows(rows)
                rows = rows[rows["flags"] & FLAG_REMOVAL == 0]
                seqs.append(rows["seq"])
                subject_ids.append(rows["subject_id"])
        all_seqs, all_ids = np.concatenate(seqs), np.concatenate(subject_ids)
        order = np.argsort(all_seqs, kind="stable")
        return all_seqs[order], all_ids[order]


def _looked_up(seqs: np.ndarray, known_seqs: np.ndarray, subject_ids: np.ndarray) -> np.ndarray:
    """The subjects of seqs; 0 if there is none."""
    if not len(known_seqs):
        return np.zeros(len(seqs), np.uint32)
    at = np.minimum(np.searchsorted(known_seqs, seqs), len(known_seqs) - 1)
    found: np.ndarray = np.where(known_seqs[at] == seqs, subject_ids[at], np.uint32(0))
    return found
