"""The settler of a shard whose logs are replicated: files of its own, and a log for all replicas.

    rows ──▶ dispatch log, written ──▶ log of what is settled, at a quorum ──▶ answered
                     └──▶ synced now and then: so far a checkpoint may say that it goes

What others know is what the replicated log has, so the files need no sync before somebody is
answered. They are synced about once a second: a replica that starts again reads the log from there.

Rows of other processes come in, too: an owner before this one may say late what it has delivered.
An owner knows what it has appended, and reads the log only where there are offsets between that
it knows nothing of: such rows, and the markers of transactions.

What was delivered in a transaction stands in the log already (`write_recorded`). Only when it is in
the files, too, may a checkpoint say that they go so far.

Cost: an append of the engine for each sync; where there are transactions, a consumer that stays
open, and a look at what it has, which waits for nothing. Threads: the settler thread.
"""

from collections.abc import Callable, Iterable
from typing import Final

from delayserver.delivery.settler import Settler
from storage.frame import Rows
from storage.hour_log import HourLog
from storage.replicated.settled import SettledLog
from storage.rows import HOUR_MS, select

FILES_SYNC_MS: Final = 1000


class ReplicatedSettler(Settler):
    """Writes the dispatch logs, and appends the same rows to the replicated log."""

    def __init__(
        self,
        dispatch: HourLog,
        open_settled: Callable[[], SettledLog],
        place: int,
        stopwatch: Callable[[], int],
        told: Callable[[int], None] = lambda place: None,
    ) -> None:
        """`open_settled`: the log of all replicas, opened anew. `place`: the offset up to which the
        files on the disk have what the replicated log says; `told` hears of each other one."""
        super().__init__(dispatch)
        self._told = told
        # One to append to and one to read, since a log that is appended to reads nothing ahead.
        self._appended, self._read = open_settled(), open_settled()
        self._own_offsets: set[int] = set()
        """Of records whose rows are in the files, behind what was read."""
        self._stopwatch = stopwatch
        self._read_offset = place
        self._synced_ms = stopwatch()
        self._unsent: list[bytes] = []
        self._now_ms = 0

    @property
    def offset(self) -> int:
        """The offset up to which the files have it, on the disk or not."""
        return self._read_offset

    def write(self, rows_by_hour: dict[int, list[bytes]], now_ms: int) -> None:
        self._now_ms = now_ms
        while rows_by_hour:
            hour, rows = next(iter(rows_by_hour.items()))
            super().write({hour: rows}, now_ms)
            self._unsent += rows
            del rows_by_hour[hour]

    def write_recorded(
        self, rows_by_hour: dict[int, list[bytes]], offset: int, now_ms: int
    ) -> None:
        if offset < self._read_offset:
            return  # It was read, and so written, before the news of it came here.
        super().write(rows_by_hour, now_ms)
        self._own_offsets.add(offset)

    def sync(self) -> None:
        """Have a quorum know all that was written. Raises FencedError, SyncError."""
        if self._unsent:
            offsets = self._appended.append(b"".join(self._unsent), self._now_ms)
            self._unsent.clear()
            self._own_offsets.update(offsets)
        self._go_on()
        if self._stopwatch() - self._synced_ms >= FILES_SYNC_MS:
            self.sync_files()
        else:
            self.unsynced = False

    def _go_on(self) -> None:
        """Behind what is in the files."""
        while self._read_offset in self._own_offsets:
            self._own_offsets.remove(self._read_offset)
            self._read_offset += 1
        if self._own_offsets:
            # Something stands between. What comes of it later is taken in by a later sync.
            self.take_in(0)

    def sync_files(self) -> None:
        """Sync the files. Raises SyncError."""
        self._synced_ms = self._stopwatch()
        self.unsynced = True
        super().sync()
        self._told(self._read_offset)

    def prepare_append(self) -> None:
        """Connect, behind the caller's back, so that the first append takes no longer."""
        self._appended.prepare_append()

    def end(self) -> int | None:
        """Where the log of all replicas ends; None where that cannot be told now."""
        return self._read.end()

    def close(self) -> None:
        self._appended.close()
        self._read.close()

    def take_in(self, wait_s: float) -> bool:
        """Write what others have recorded; waits for the first record, at most `wait_s`. Whether
        there was any. Raises ReplicatedLogError, ShortageError."""
        has_any = False
        for offset, rows in self._read.read(self._read_offset, wait_s):
            if offset in self._own_offsets:
                self._own_offsets.remove(offset)
            else:
                super().write(rows_by_hour((rows,)), self._now_ms)
                has_any = True
            self._read_offset = offset + 1
        self._read_offset = max(self._read_offset, self._read.place)
        return has_any


def rows_by_hour(parts: Iterable[Rows]) -> dict[int, list[bytes]]:
    """Rows (DISPATCH_DTYPE) as `Settler.write` takes them."""
    found: dict[int, list[bytes]] = {}
    for rows in parts:
        hours = rows["due_ms"] // HOUR_MS
        for hour in sorted(set(hours.tolist())):
            found.setdefault(hour, []).append(select(rows, hours == hour).tobytes())
    return found
