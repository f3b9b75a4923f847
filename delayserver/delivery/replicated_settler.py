"""The settler of a shard whose logs are replicated: files of its own, and a log for all replicas.

    rows ──▶ log of settled deliveries, at a quorum ──▶ the shard's log: still in office
               ──▶ dispatch log, written ──▶ answered
                     └──▶ synced now and then: so far a checkpoint may say that it goes

The log of settled deliveries takes rows from any process, so it cannot tell whether a new owner has
read them. The log that decides who owns the shard can: an acknowledgement is answered behind a
record of this owner there that was sent after the rows were recorded. A new owner reads the settled
deliveries behind its claim, so it knows all that was answered. A former owner may record rows
later. They are true, and save a repeat; but no client is told that they are recorded, and that
process ends.

The other replicas know the rows from the replicated log, so the files need no sync before a client
is answered. They are synced about once a second: a replica that starts again reads the log from
there.

The files have no row that the log has not, and none before it. Rejected: writing them at once, as a
server on its own does. After a crash between the two this replica alone would take a row for
settled, and say so; and the next owner would deliver it again, maybe hours later.

Rows of other processes come in, too: an owner before this one may report deliveries late. An owner
knows the rows that it has appended, and reads the log only where offsets stand between that it
knows nothing of: such rows, and the markers of transactions. It does not wait for them.

Rows of a delivery in a transaction stand in the log already (`write_recorded`). Only when they are
in the files, too, may a checkpoint say that the files go so far.

Cost: an append of the engine for each sync; where there are transactions, a consumer that stays
open, and a look at its records. Threads: the settler thread.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from delayserver.delivery.settler import Settler
from storage.frame import Rows
from storage.hour_log import HourLog
from storage.notes import encode_note, unpack_notes
from storage.replicated.settled import Settled, SettledLog
from storage.rows import HOUR_MS, select

FILES_SYNC_MS: Final = 1000


class ReplicatedSettler(Settler):
    """Appends rows to the replicated log, and writes its records to the dispatch logs."""

    is_shared = True

    def __init__(
        self,
        dispatch: HourLog,
        open_settled: Callable[[], SettledLog],
        place: int,
        stopwatch: Callable[[], int],
        told: Callable[[int], None] = lambda place: None,
        confirm: Callable[[], None] = lambda: None,
    ) -> None:
        """`open_settled`: the replicated log, opened anew. `place`: the offset up to which the
        files on the disk have its records; `told` hears of each other one. `confirm` has the log of
        the shard say that this process still owned it when it was called."""
        super().__init__(dispatch)
        self._confirm = confirm
        self._told = told
        # One to append to and one to read, since a log that is appended to reads nothing ahead.
        self._appended, self._read = open_settled(), open_settled()
        self._stopwatch = stopwatch
        self._read_offset = place
        self._synced_ms = stopwatch()
        self._unsent: list[bytes] = []
        self._sent: deque[Settled] = deque()
        """Own records that are not in the files."""
        self._half_sent: dict[int, list[bytes]] = {}
        """The rest of the first of them, by hour: there was no room for it."""
        self._own_offsets: set[int] = set()
        """The offsets of own records that are in the files, behind the part that was read."""
        self._half_written: dict[int, list[bytes]] = {}
        """The rest of the record at `_read_offset`, likewise."""
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
        """Append all written rows at a quorum, and write them to the files.

        Raises FencedError: no client may be told that they are recorded, since another node may
        have claimed the shard before, and does not know them; SyncError; ShortageError: a quorum
        knows them, and the next call goes on with the files."""
        if self._unsent:
            self._sent += self._appended.append(self._unsent, self._now_ms)
            self._confirm()
            self._unsent.clear()
        while self._sent:
            self._write_sent(self._sent[0])
            self._sent.popleft()
        self._go_on()
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

    def _write_sent(self, record: Settled) -> None:
        if self._read_offset < record.offset:
            self._take_in(0, record.offset)  # Earlier records of others, if at hand.
        if self._half_sent or self._read_offset != record.offset:
            self._half_sent = self._half_sent or items_by_hour(record)
            super().write(self._half_sent, self._now_ms)
            self._own_offsets.add(record.offset)
        else:
            self._take(record)

    def write_recorded(
        self, rows_by_hour: dict[int, list[bytes]], offset: int, now_ms: int
    ) -> None:
        if offset < self._read_offset:
            rows_by_hour.clear()  # It was read, and so written, before the news of it came here.
            return
        super().write(rows_by_hour, now_ms)
        self._own_offsets.add(offset)

    def _go_on(self) -> None:
        """Go on behind the records that are in the files."""
        while self._read_offset in self._own_offsets:
            self._own_offsets.remove(self._read_offset)
            self._read_offset += 1
        if self._own_offsets:
            # Other records stand between. A later sync takes in those that come later.
            self._take_in(0, _NEVER)

    def go_back(self, offset: int) -> None:
        """The log has lost its records from `offset` on, and goes on there. Those that the files
        have are settled nevertheless. This process has appended nothing yet."""
        self._read_offset = min(self._read_offset, offset)
        self._half_written.clear()

    def prepare_append(self) -> None:
        """Connect the producer. Does not wait."""
        self._appended.prepare_append()

    def end(self) -> int | None:
        """Where the replicated log ends; None where that cannot be told now."""
        return self._read.end()

    def close(self) -> None:
        self._appended.close()
        self._read.close()

    def take_in(self, wait_s: float) -> bool:
        """Write the records of other processes; waits for the first one, at most `wait_s`. Returns
        whether there was any. Raises ReplicatedLogError; ShortageError: the next call goes on with
        the rest."""
        return self._take_in(wait_s, _NEVER)

    def _take_in(self, wait_s: float, until: int) -> bool:
        """The same, up to the offset `until`."""
        has_any = False
        for found in self._read.read(self._read_offset, wait_s):
            if found.offset >= until:
                # No record in between counts.
                self._read_offset = until
                return has_any
            if found.offset in self._own_offsets:
                self._own_offsets.remove(found.offset)
                self._read_offset = found.offset + 1
            else:
                self._take(found)
                has_any = True
        self._read_offset = max(self._read_offset, min(self._read.place, until))
        return has_any

    def _take(self, record: Settled) -> None:
        """Write the record at `_read_offset`, or the first behind it, to the files. Raises
        ShortageError."""
        self._half_written = self._half_written or items_by_hour(record)
        super().write(self._half_written, self._now_ms)
        self._read_offset = record.offset + 1


def items_by_hour(record: Settled) -> dict[int, list[bytes]]:
    """Rows and notes of a record as `Settler.write` takes them."""
    found = rows_by_hour((record.rows,))
    try:
        notes = unpack_notes(record.notes)
    except msgspec.DecodeError:
        notes = []  # A newer version has written them: the settled rows count.
    for note in notes:
        if (items := found.get(note.hour)) is not None:
            items.append(encode_note(note))
    return found


def rows_by_hour(parts: Iterable[Rows]) -> dict[int, list[bytes]]:
    """Rows (DISPATCH_DTYPE) as `Settler.write` takes them."""
    found: dict[int, list[bytes]] = {}
    for rows in parts:
        hours = rows["due_ms"] // HOUR_MS
        for hour in sorted(set(hours.tolist())):
            found.setdefault(hour, []).append(select(rows, hours == hour).tobytes())
    return found


_NEVER = 1 << 62
