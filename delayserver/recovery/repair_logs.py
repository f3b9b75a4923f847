"""One file of the schedule log or the dispatch log, written again without its damaged parts.

Every row that verifies is kept, with its payload. The catalog still knows of a cancel, a move or a
death whose tombstone stood in a damaged frame. The tombstone is written again, with a seq that is
missing in that place, so that a cancelled message stays cancelled (I5).

Cost: two passes over the file. Memory: one frame, and 40 bytes per row of the hour. Threads: none.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from delayserver.records.tables import Change, ChangeState, HourState
from delayserver.schedule.days import add_by_hour
from delayserver.schedule.filing import counts_by_hour
from storage.buckets import is_day
from storage.files import File
from storage.frame import Damage, Frame, Readable, Rows, encode, scan
from storage.frame_rules import unsound_rows
from storage.rows import (
    FLAG_AFTER_SYNC,
    FLAG_REMOVAL,
    MOVES,
    PUBLISHES,
    SCHEDULE_DTYPE,
    LogKind,
    RecordKind,
    concatenate,
    select,
)

Changes = Mapping[int, Mapping[int, Change]]
"""By message, by subscription (0: the message itself)."""
Visit = Callable[[Rows, bytes], None]
_KINDS = {
    ChangeState.CANCELLED: RecordKind.CANCEL,
    ChangeState.MOVED: RecordKind.MOVE,
    ChangeState.FIRED: RecordKind.FIRE,
    ChangeState.REPLAYED: RecordKind.MOVE,  # unless it is where it was published
    ChangeState.DEAD: RecordKind.DEAD,
}


@dataclass(slots=True)
class Mended:
    """The result of mending a file."""

    state: HourState = field(default_factory=HourState)
    """The state of a schedule file."""
    kept_rows: int = 0
    dropped_rows: int = 0
    restored_rows: int = 0
    """Tombstones that were written again."""
    is_changed: bool = False
    """Whether the file that was read differs from the mended one in any byte."""


class Mender:
    """Mends one file. `through_seq`: rows behind it are left to be filed again."""

    def __init__(
        self,
        source: Readable,
        kind: LogKind,
        hour: int,
        *,
        stamp: int,
        end: int,
        through_seq: int,
        changes: Changes,
    ) -> None:
        self._source = source
        self._kind = kind
        self._hour = hour
        self._stamp = stamp
        self._end = end
        self._through_seq = through_seq
        self._changes = changes

    def mend(self, target: File | None, visit: Visit = lambda rows, payload: None) -> Mended:
        """Write the file again to `target` (None: only find out how it would come out).

        `visit` is called with the rows of each frame that is written, and its payloads."""
        tombstones = self._missing_tombstones() if self._kind is LogKind.SCHEDULE else {}
        entry_seqs = self._entry_seqs() if self._kind is LogKind.SCHEDULE else None
        mended = Mended(is_changed=bool(tombstones))
        for found, sound in self._items():
            if isinstance(found, Damage):
                mended.is_changed = True
                rows = tombstones.pop(found.offset, None)
                if rows is not None:
                    mended.restored_rows += len(rows)
                    self._put(target, rows, b"", 0, mended, visit)
                continue
            rows, keep = found.rows, sound
            if entry_seqs is not None:
                is_entry = (rows["flags"] & FLAG_REMOVAL) == 0
                keep = sound & (is_entry | np.isin(rows["message_seq"], entry_seqs))
            dropped = int((~keep).sum())
            mended.dropped_rows += dropped
            payload = found.payload or b""
            if dropped or not found.payload_intact:
                mended.is_changed = True
                rows, payload = _only(select(rows, keep), payload)
            if len(rows):
                self._put(target, rows, payload, found.header.created_ms, mended, visit)
        mended.is_changed |= mended.state.length != self._end
        return mended

    def _put(
        self,
        target: File | None,
        rows: Rows,
        payload: bytes,
        created_ms: int,
        mended: Mended,
        visit: Visit,
    ) -> None:
        if self._kind is LogKind.DISPATCH and not rows["flags"][0] & FLAG_AFTER_SYNC:
            # The frame that is written here is synced before it counts.
            rows = rows.copy()
            rows["flags"][0] |= FLAG_AFTER_SYNC
        frame = encode(
            self._kind,
            rows.tobytes(),
            payload,
            first_seq=int(rows["seq"].min()),
            last_seq=int(rows["seq"].max()),
            created_ms=created_ms,
            stamp=self._stamp,
        )
        state = mended.state
        if target is not None:
            target.pwrite([frame], state.length)
        mended.kept_rows += len(rows)
        if self._kind is LogKind.SCHEDULE:
            entries = select(rows, (rows["flags"] & FLAG_REMOVAL) == 0)
            if not state.length:
                state.first_seq = int(rows["seq"].min())
            state.entries += len(entries)
            state.removals += len(rows) - len(entries)
            if len(entries):
                state.last_entry_seq = int(entries["seq"][-1])
            if is_day(self._hour):
                (counts,) = counts_by_hour(rows, np.zeros(len(rows), np.int64)).tolist()
                state.by_hour = add_by_hour(state.by_hour, counts)
        state.length += len(frame)
        visit(rows, payload)

    def _items(self) -> Iterator[tuple[Frame | Damage, np.ndarray]]:
        """Everything in the file, and which rows of a frame are sound."""
        last_seq = 0
        for found in scan(
            self._source, 0, self._end, kind=self._kind, stamp=self._stamp, payload=True
        ):
            if isinstance(found, Damage):
                yield found, np.zeros(0, bool)
                continue
            keep = ~unsound_rows(found, self._hour, last_seq)
            if self._kind is LogKind.SCHEDULE:
                keep &= found.rows["seq"] <= np.uint64(self._through_seq)
            last_seq = found.last_seq
            yield found, keep

    def _kept(self) -> Iterator[Rows]:
        for found, keep in self._items():
            if isinstance(found, Frame):
                yield select(found.rows, keep)

    def _entry_seqs(self) -> np.ndarray:
        rows = concatenate(list(self._kept()), SCHEDULE_DTYPE)
        seqs: np.ndarray = rows["seq"][(rows["flags"] & FLAG_REMOVAL) == 0]
        return seqs

    # ── tombstones that were lost ──────────────────────────────────────────────────────────────

    def _missing_tombstones(self) -> dict[int, Rows]:
        """The tombstones to write in the place of each damaged stretch, by its offset."""
        gaps = [found for found, _ in self._items() if isinstance(found, Damage)]
        if not gaps or not self._changes:
            return {}
        rows = concatenate(list(self._kept()), SCHEDULE_DTYPE)
        is_entry = (rows["flags"] & FLAG_REMOVAL) == 0
        removed = set(
            zip(
                rows["message_seq"][~is_entry].tolist(),
                rows["subscription_id"][~is_entry].tolist(),
                strict=True,
            )
        )
        wanted = [
            tombstone
            for entry in rows[is_entry]
            for tombstone in self._tombstones_of(entry, removed)
        ]
        found: dict[int, Rows] = {}
        for gap in gaps:
            last_seq = min(gap.last_seq or self._through_seq, self._through_seq)
            here = []
            # A tombstone stands behind the entry that it removes.
            for seq, tombstone in zip(
                range(gap.first_seq, last_seq + 1),
                [one for one in wanted if one["message_seq"] < gap.first_seq],
                strict=False,
            ):
                tombstone["seq"] = seq
                here.append(tombstone)
                wanted = [one for one in wanted if one is not tombstone]
            if here:
                found[gap.offset] = np.array(here, SCHEDULE_DTYPE)
        return found

    def _tombstones_of(self, entry: np.void, removed: set[tuple[int, int]]) -> Iterator[np.void]:
        seq = int(entry["seq"])
        if (seq, 0) in removed:
            return
        for subscription_id, change in self._changes.get(int(entry["message_seq"]), {}).items():
            kind = _KINDS.get(ChangeState(change.state))
            is_here = change.entry_seq == seq
            is_elsewhere = kind in (RecordKind.MOVE, RecordKind.FIRE) and not is_here
            is_moved = is_elsewhere and int(entry["kind"]) in (*PUBLISHES, *MOVES)
            is_gone = is_here and kind in (RecordKind.CANCEL, RecordKind.DEAD)
            if not (is_moved or is_gone) or (seq, subscription_id) in removed:
                continue
            tombstone = np.zeros(1, SCHEDULE_DTYPE)[0]
            tombstone["message_seq"], tombstone["due_ms"] = seq, entry["due_ms"]
            tombstone["subject_id"], tombstone["kind"] = entry["subject_id"], kind
            tombstone["subscription_id"] = subscription_id
            tombstone["attempt"] = change.attempt if kind is RecordKind.DEAD else 0
            tombstone["flags"] = FLAG_REMOVAL
            yield tombstone


def _only(rows: Rows, payload: bytes) -> tuple[Rows, bytes]:
    """The rows with their payloads, one behind the other."""
    if "payload_offset" not in (rows.dtype.names or ()):
        return rows, b""
    rows = rows.copy()
    starts, lengths = rows["payload_offset"].tolist(), rows["payload_length"].astype(np.int64)
    pieces = [payload[a : a + b] for a, b in zip(starts, lengths.tolist(), strict=True)]
    rows["payload_offset"] = np.cumsum(lengths) - lengths
    return rows, b"".join(pieces)
