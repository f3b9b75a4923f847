"""Purge: deletes hours that are settled and past their retention, a slice at a time.

    index entries of its messages ──▶ its row in the table HOURS ──▶ checkpoint ──▶ its two files

The order makes a crash harmless. Until the checkpoint the hour is there as a whole, and is purged
again; after it, a start deletes files that the catalog does not know.

The index entries of a message go with the last hour that holds a row of it. A message that was
moved has rows in two hours, and is known until both are gone.

Cost: 0.05 µs per message, and some 5 µs for each that has a key, was moved, or watches keys; the
columns of the file are read twice. Threads: belongs to the replay thread.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from delayserver.parts.part import HourKeeper
from delayserver.records.message import Payload, decode_payload
from delayserver.records.tables import (
    ChangeState,
    HourState,
    change_prefix,
    damage_prefix,
    parse_watch_key,
    unpack_change,
    unpack_key_entry,
    watch_key,
)
from delayserver.schedule.committed import slices
from delayserver.schedule.effects import Effects
from storage.buckets import day_of, is_day
from storage.catalog import Catalog, Table
from storage.errors import DamageError, ShortageError
from storage.frame import Damage
from storage.frame_runs import FrameRun
from storage.hour_log import HourLog
from storage.rows import (
    FLAG_REMOVAL,
    FLAG_REPLAY,
    FLAG_WATCHES,
    HOUR_MS,
    NO_KEY,
    is_among,
    select,
)

PURGE_ROWS = 1_000
"""Per step, so that neither filing nor the event loop waits for long."""


class Purge:
    """Deletes hours, one after the other."""

    def __init__(
        self,
        catalog: Catalog,
        schedule: HourLog,
        dispatch: HourLog,
        hours: dict[int, HourState],
        effects: Effects,
        keepers: Sequence[HourKeeper],
        checkpoint: Callable[[], int],
    ) -> None:
        """`hours`: the filed hours (`Replay.hours`), from which purged hours are taken;
        `checkpoint`: makes `effects` durable."""
        self._catalog = catalog
        self._schedule = schedule
        self._dispatch = dispatch
        self._hours = hours
        self._effects = effects
        self._keepers = keepers
        self._checkpoint = checkpoint
        self._purging: tuple[int, Iterator[None]] | None = None
        self._purged: list[int] = []
        """Hours that are not in `hours` any more, and whose files are still there."""
        self.deleted_hours: list[int] = []
        """Hours whose files were deleted, for code that has them open; the caller clears it."""

    def step(self, now_ms: int, retention_ms: int) -> bool:
        """Purge the next slice; True: there is more to do.

        The catalog must be up to date with the filed records.
        Raises ShortageError: call again."""
        if self._purging is None:
            for hour in self._hours:
                if self._is_over(hour, now_ms, retention_ms):
                    self._purging = (hour, self._purge_hour(hour, now_ms))
                    break
            else:
                return False
        hour, steps = self._purging
        if not self._is_over(hour, now_ms, retention_ms):
            # The clock was set back, and the hour may have got a message: it would be deleted
            # though its publish was answered (I3).
            self._purging = None
        elif self._is_last(steps):
            self._purging = None
            del self._hours[hour]
            self._effects.changed_hours.add(hour)
            for keeper in self._keepers:
                keeper.remove(hour)
            self._purged.append(hour)
            self.finish()
        return True

    def _is_last(self, steps: Iterator[None]) -> bool:
        try:
            return next(steps, steps) is steps
        except ShortageError:
            self._purging = None  # They have ended with that: all of them once more, next time.
            raise

    def drop(self, day: int) -> None:
        """A day is in the files of its hours now: its own goes, when a checkpoint says so."""
        self._purged.append(day)

    def finish(self) -> None:
        """Delete the files of hours that are purged: before anything else is filed.

        It may be due in one of these hours, and would be deleted with the old file."""
        if self._purged:
            self._checkpoint()
        while self._purged:
            self.delete_files(self._purged[0])
            self.deleted_hours.append(self._purged.pop(0))

    def delete_files(self, hour: int) -> None:
        """Delete both files of an hour that the catalog does not know any more, or that of a day.

        A day in which something was damaged when it was split is set aside: nothing else has it."""
        if is_day(hour) and self._is_damaged(hour):
            self._schedule.set_aside(hour)
        else:
            self._schedule.delete(hour)
        self._dispatch.delete(hour)

    def _is_damaged(self, hour: int) -> bool:
        notes = self._catalog.scan(Table.DAMAGE, prefix=damage_prefix(self._schedule.path(hour)))
        return any(True for _ in notes)

    def _is_over(self, hour: int, now_ms: int, retention_ms: int) -> bool:
        state = self._hours.get(hour)
        if state is None or not state.is_over(hour, now_ms, retention_ms):
            return False
        return all(keeper.lets_go(hour) for keeper in self._keepers)

    # ── index entries ──────────────────────────────────────────────────────────────────────────

    def _purge_hour(self, hour: int, now_ms: int) -> Iterator[None]:
        parts = [np.empty(0, np.uint64)]
        for run in self._runs(hour):
            is_removal = (run.rows["flags"] & FLAG_REMOVAL) != 0
            parts.append(run.rows["message_seq"][is_removal])
        removed = np.concatenate(parts)
        for run in self._runs(hour):
            is_entry = (run.rows["flags"] & FLAG_REMOVAL) == 0
            entries = select(run.rows, is_entry)
            payload_starts = np.broadcast_to(run.payload_starts(is_entry), len(entries))
            # A row that was never removed is all there is of its message: only its key is indexed.
            alone = (entries["seq"] == entries["message_seq"]) & ~is_among(entries["seq"], removed)
            keyed = entries["key_hash"] != np.void(NO_KEY)
            watching = (entries["flags"] & FLAG_WATCHES) != 0
            for indexes in slices(np.flatnonzero(~alone | keyed | watching), PURGE_ROWS):
                for index in indexes.tolist():
                    row, payload_start = entries[index], int(payload_starts[index])
                    try:
                        if alone[index] or not self._lives_elsewhere(hour, row, payload_start):
                            self._purge_message(int(row["message_seq"]), bytes(row["key_hash"]))
                            if watching[index]:
                                self._purge_watches(hour, row, payload_start)
                    except DamageError as error:
                        # The damaged rest of one message must not keep the server from going on.
                        place = (error.path, error.offset, error.offset, error.reason)
                        self._effects.note_damage(Damage(*place, torn=False), now_ms)
                yield

    def _runs(self, hour: int) -> Iterable[FrameRun]:
        for found in self._schedule.scan_runs(hour, end=self._hours[hour].length):
            if isinstance(found, FrameRun):
                yield found

    def _lives_elsewhere(self, hour: int, row: np.void, payload_start: int) -> bool:
        """Whether another hour that is still kept holds a row of the message.

        The last of them takes the index entries with it. As long as there is one, a client may ask
        for the message, and the server must not judge it by its id alone."""
        message_seq = int(row["message_seq"])
        # Where a replayed message was settled, no look-up may need its row when its hour goes; and
        # that comes later, if the clock was set back in between.
        flags, is_keyed = int(row["flags"]), row["key_hash"] != np.void(NO_KEY)
        is_last = bool(flags & FLAG_REPLAY) and not (flags & FLAG_WATCHES or is_keyed)
        changes = self._catalog.scan(Table.CHANGES, prefix=change_prefix(message_seq))
        rows = {
            (change.due_ms // HOUR_MS, change.entry_seq)
            for change in (unpack_change(value) for _, value in changes)
            if not (is_last and change.state == ChangeState.REPLAYED)
        }
        if row["seq"] != message_seq and not is_last:
            try:
                payload = self._payload(hour, row, payload_start)
            except DamageError:
                return True
            if payload.origin is not None:
                rows.add((payload.origin.published_due_ms // HOUR_MS, message_seq))
        return any(other != hour and self._holds(other, seq) for other, seq in rows)

    def _holds(self, hour: int, seq: int) -> bool:
        state = self._hours.get(hour) or self._hours.get(day_of(hour))
        return state is not None and state.first_seq <= seq

    def _payload(self, hour: int, row: np.void, payload_start: int) -> Payload:
        offset = payload_start + int(row["payload_offset"])
        sealed = self._schedule.read(hour, offset, int(row["payload_length"]))
        return decode_payload(sealed, self._schedule.path(hour), offset, int(row["seq"]))

    def _purge_watches(self, hour: int, row: np.void, payload_start: int) -> None:
        message_seq = int(row["message_seq"])
        try:
            watch = self._payload(hour, row, payload_start).watch
            keys = [watch_key(key, message_seq) for key in watch.keys] if watch is not None else []
        except DamageError:
            # Its keys cannot be read; the index knows them.
            names = (name for name, _ in self._catalog.scan(Table.WATCHES))
            keys = [name for name in names if parse_watch_key(name)[1] == message_seq]
        self._effects.writes[Table.WATCHES] += [(key, None) for key in keys]

    def _purge_message(self, message_seq: int, key_hash: bytes) -> None:
        writes = self._effects.writes
        for key, _ in self._catalog.scan(Table.CHANGES, prefix=change_prefix(message_seq)):
            writes[Table.CHANGES].append((key, None))
        if key_hash != NO_KEY:
            value = self._catalog.get(Table.KEYS, key_hash) or b""
            if value and unpack_key_entry(value).seq == message_seq:
                writes[Table.KEYS].append((key_hash, None))
