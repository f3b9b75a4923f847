"""The settler of a shard whose logs are replicated: files of its own, and a log for all replicas.

    rows ──▶ log of what is settled, at a quorum ──▶ dispatch log, written ──▶ answered
                                                          └──▶ synced now and then: so far a
                                                               checkpoint may say that it goes

What others know is what the replicated log has, so the files need no sync before somebody is
answered. They are synced about once a second: a replica that starts again reads the log from there.

The files have nothing that the log has not, and nothing before it. Rejected: writing them at once,
as a server on its own does. After a crash between the two this replica alone would take a row for
settled, and say so; and the next owner would deliver it again, maybe hours later.

Rows of other processes come in, too: an owner before this one may say late what it has delivered.

Cost: an append of the engine for each sync. Threads: the settler thread.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from delayserver.delivery.settler import Settler
from storage.frame import Rows
from storage.hour_log import HourLog
from storage.replicated.settled import Settled, SettledLog
from storage.rows import HOUR_MS, select

FILES_SYNC_MS: Final = 1000


class ReplicatedSettler(Settler):
    """Appends rows to the replicated log, and writes what that has to the dispatch logs."""

    is_shared = True

    def __init__(
        self,
        dispatch: HourLog,
        settled: SettledLog,
        place: int,
        stopwatch: Callable[[], int],
        told: Callable[[int], None] = lambda place: None,
    ) -> None:
        """`place`: the offset up to which the files on the disk have what the replicated log says;
        `told` hears of each other one."""
        super().__init__(dispatch)
        self._told = told
        self._settled = settled
        self._stopwatch = stopwatch
        self._read_offset = place
        self._synced_ms = stopwatch()
        self._unsent: list[bytes] = []
        self._sent: deque[Settled] = deque()
        """Own records that are not in the files; before them others may have written."""
        self._half_written: dict[int, list[bytes]] = {}
        """What is left of the record at `_read_offset`, by hour: there was no room for it."""
        self._now_ms = 0

    @property
    def offset(self) -> int:
        """The offset up to which the files have it, on the disk or not."""
        return self._read_offset

    def write(self, rows_by_hour: dict[int, list[bytes]], now_ms: int) -> None:
        """Keep rows for the next `sync`."""
        self._now_ms = now_ms
        for rows in rows_by_hour.values():
            self._unsent += rows
        rows_by_hour.clear()
        self.unsynced |= bool(self._unsent)

    def sync(self) -> None:
        """Have a quorum know all that was written, and write it to the files. Raises FencedError,
        SyncError; ShortageError: a quorum knows it, and the next call goes on with the files."""
        if self._unsent:
            self._sent += self._settled.append(b"".join(self._unsent), self._now_ms)
            self._unsent.clear()
        while self._sent:
            while self._read_offset < self._sent[0].offset:
                self.take_in(_WAIT_S, self._sent[0].offset)
            self._take(self._sent[0])
            self._sent.popleft()
        if self._stopwatch() - self._synced_ms >= FILES_SYNC_MS:
            self.sync_files()
        else:
            self.unsynced = False

    def sync_files(self) -> None:
        """Sync the files. Raises SyncError."""
        self._synced_ms = self._stopwatch()
        self.unsynced = True
        super().sync()
        self._told(self._read_offset)

    def close(self) -> None:
        self._settled.close()

    def take_in(self, wait_s: float, until: int) -> bool:
        """Write what others have recorded, up to the offset `until`; waits for the first record, at
        most `wait_s`. Whether there was any. Raises ReplicatedLogError; ShortageError: the next
        call goes on with what is left."""
        has_any = False
        for found in self._settled.read(self._read_offset, wait_s):
            if found.offset >= until:
                break
            self._take(found)
            has_any = True
        return has_any

    def _take(self, record: Settled) -> None:
        """Write the record at `_read_offset` to the files. Raises ShortageError."""
        self._half_written = self._half_written or rows_by_hour((record.rows,))
        super().write(self._half_written, self._now_ms)
        self._read_offset = record.offset + 1


def rows_by_hour(parts: Iterable[Rows]) -> dict[int, list[bytes]]:
    """Rows (DISPATCH_DTYPE) as `Settler.write` takes them."""
    found: dict[int, list[bytes]] = {}
    for rows in parts:
        hours = rows["due_ms"] // HOUR_MS
        for hour in sorted(set(hours.tolist())):
            found.setdefault(hour, []).append(select(rows, hours == hour).tobytes())
    return found


_WAIT_S = 1.0
