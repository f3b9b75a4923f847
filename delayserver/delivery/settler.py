"""The settler: appends finished deliveries to the dispatch log of their hour.

Rows are written at once and synced together: as soon as a caller waits for it (an acknowledgement
is answered when it is recorded), and otherwise at least every `settle_sync_ms`. A recorded delivery
is never repeated (I4).

Cost: one write per hour and batch, one fdatasync per hour and sync. Threads: the settler thread.
"""

import struct
from collections.abc import Iterable

import numpy as np

from delayserver.records.message import DueDelivery
from storage.frame import Damage
from storage.hour_log import HourLog
from storage.notes import framed
from storage.rows import DISPATCH_DTYPE, FLAG_AFTER_SYNC, Outcome

DISPATCH_ROW = struct.Struct("<QQqqIHBB")
assert DISPATCH_ROW.size == DISPATCH_DTYPE.itemsize


def pack_settled(delivery: DueDelivery, outcome: Outcome, settled_ms: int) -> bytes:
    """The row of a delivery that has ended (DISPATCH_ROW)."""
    return DISPATCH_ROW.pack(
        delivery.entry.seq,
        delivery.origin.message_seq,
        delivery.entry.due_ms,
        settled_ms,
        delivery.subscription_id,
        delivery.attempt,
        outcome,
        0,
    )


class Settler:
    """Writes the tails of the dispatch logs."""

    is_shared = False
    """Whether other replicas have to know the settled rows, whatever this disk is worth: no client
    is answered before `sync` then."""

    def __init__(self, dispatch: HourLog) -> None:
        self._dispatch = dispatch
        self._ends: dict[int, int] = {}
        self._unsynced_hours: set[int] = set()
        self.unsynced = False
        self.torn: list[Damage] = []
        """The torn tails that were cut off."""

    def hours(self) -> list[int]:
        """Hours that have a dispatch log."""
        return self._dispatch.buckets()

    def size_bytes(self, hour: int) -> int:
        """How long the dispatch log of an hour is; 0: it has none."""
        return self._dispatch.size(hour)

    def recover(self, hours: Iterable[int]) -> list[Damage]:
        """Cut the torn tails that a crash left; returns the damage in the synced part.

        A power loss may keep a later frame that was not synced, and lose an earlier one:
        FLAG_AFTER_SYNC tells such a hole from damage, and so does a device that does not give it
        back. No client was told about a delivery in a torn tail, so it is delivered again (I4). The
        intact part is written once more and synced: a process that was killed, or whose sync
        failed, may have left it in the page cache alone."""
        damage: list[Damage] = []
        for hour in hours:
            self._dispatch.touch(hour)
            self._ends[hour] = self._cut_torn_tail(hour, damage)
        self._dispatch.sync()
        return damage

    def _cut_torn_tail(self, hour: int, damage: list[Damage]) -> int:
        """Where the next frame of an hour goes."""
        holes: list[Damage] = []
        unsynced_from = 0
        for found in self._dispatch.scan_runs(hour):
            if isinstance(found, Damage):
                (damage if found.is_unreadable else holes).append(found)
                continue
            first_flags = found.rows["flags"][found.row_starts()]
            after_sync = np.flatnonzero(first_flags & FLAG_AFTER_SYNC)
            if len(after_sync):
                damage += holes
                holes.clear()
                unsynced_from = int(found.heads.offsets[after_sync[-1]])
        torn = self._first_torn(hour, unsynced_from)
        if torn is not None:
            self.torn += [one for one in holes if one.offset != torn.offset]
            self.torn.append(torn)
            self._dispatch.cut(hour, torn.offset)
        self._dispatch.rewrite(hour, unsynced_from)
        return self._dispatch.size(hour)

    def _first_torn(self, hour: int, unsynced_from: int) -> Damage | None:
        """The first place that does not verify, in the part that may not have been written whole. A
        frame whose notes do not verify is such a place, too: frames behind it could not be
        found."""
        for found in self._dispatch.scan(hour, start=unsynced_from, payload=True):
            if isinstance(found, Damage):
                if not found.is_unreadable:
                    return found
            elif not (found.payload_intact or found.unreadable):
                reason = "what is told of its rows does not match its checksum"
                return Damage(found.path, found.offset, found.end, reason, torn=True)
        return None

    def write(self, rows_by_hour: dict[int, list[bytes]], now_ms: int) -> None:
        """Append rows (DISPATCH_ROW), with notes among them (NoteBytes), to their hours, and take
        out the hours that are written.

        Raises ShortageError: call again with the rest."""
        while rows_by_hour:
            hour, rows = next(iter(rows_by_hour.items()))
            if hour not in self._ends:
                # An hour that recovery had no reason to look at: settled, or far in the future.
                self._ends[hour] = self._cut_torn_tail(hour, [])
                if self._ends[hour]:
                    # Rows of an earlier process are written once more, and not synced yet.
                    self._unsynced_hours.add(hour)
            data, notes = framed(rows)
            if hour not in self._unsynced_hours:
                data[DISPATCH_ROW.size - 1] |= FLAG_AFTER_SYNC
            seqs = np.frombuffer(data, DISPATCH_DTYPE)["seq"]
            self.unsynced = True
            _, self._ends[hour] = self._dispatch.append(
                hour,
                bytes(data),
                notes,
                offset=self._ends[hour],
                first_seq=int(seqs.min()),
                last_seq=int(seqs.max()),
                created_ms=now_ms,
            )
            self._unsynced_hours.add(hour)
            del rows_by_hour[hour]

    def write_recorded(
        self, rows_by_hour: dict[int, list[bytes]], offset: int, now_ms: int
    ) -> None:
        """Likewise, rows that other replicas learn from the record at `offset` of their log."""
        raise AssertionError("there are no other replicas")

    def sync(self) -> None:
        """Make all that was written durable. Raises SyncError."""
        if self.unsynced:
            self._dispatch.sync()
            self._unsynced_hours.clear()
            self.unsynced = False

    def close(self) -> None:
        """Let go of all open things besides the files."""

    def release_hour(self, hour: int) -> None:
        """Close the file of an hour that is settled: others may delete it."""
        self._ends.pop(hour, None)
        self._dispatch.release(hour)
