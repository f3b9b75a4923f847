"""Replay: follows the message log and files its records into the schedule log.

About once a second everything that was accepted since is filed in one go: rows are sorted by the
hour they are due, and each hour gets one frame. Then the files are synced, and one catalog
transaction records the effects together with the checkpoint: that every effect of every record up
to that seq is durable (I6). After a crash the hour files are cut back to the length in the catalog
and the records behind the checkpoint are filed again, by the same code, to the same bytes (I7).

Filing lazily is what keeps an hour's file to at most one frame per checkpoint, however the messages
arrived. What falls due before it would be filed does not wait for it: the event loop puts it into
the wheel itself (`Group.express`).

Rows of loaded hours are handed to the wheel with the place of their payload. Loading an hour goes
through here, too: `snapshot` tells how much of the file holds what was filed so far and marks the
hour as live; whatever is filed later is handed over. So no message falls between the two (I3).

Cost: 0.3 to 0.5 µs per record, vectorised, and 0.5 µs per key at the checkpoint; per checkpoint one
fdatasync per touched hour and one commit. The event loop decides meanwhile: with 50,000 records no
step holds the GIL for longer than 0.5 ms, with 280,000 it takes 4 ms to give back their payloads.
Threads: belongs to the replay thread; in recovery and in the simulation it is called directly.
"""

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np

from delayserver.errors import ConflictError, NotFoundError
from delayserver.records.definitions import definitions_among, read_definitions
from delayserver.records.message import Payload, decode_payload
from delayserver.records.tables import (
    CHECKPOINT_KEY,
    DEFINITIONS_KEY,
    KEYS_AHEAD_KEY,
    LIVE_KEY,
    Archived,
    Change,
    ChangeState,
    HourState,
    ImportRecord,
    ImportState,
    change_key,
    change_prefix,
    damage_key,
    dead_letter_key,
    heartbeat_key,
    hour_key,
    import_key,
    number_key,
    pack_archived,
    pack_cancels,
    pack_change,
    pack_checkpoint,
    pack_damage,
    pack_definitions_place,
    pack_import,
    pack_key_entries,
    pack_watch,
    parse_number_key,
    parse_watch_key,
    read_archived,
    read_checkpoint,
    read_definitions_place,
    read_hours,
    read_keys_ahead,
    read_live_through_hour,
    unpack_change,
    unpack_heartbeat,
    unpack_key_entry,
    watch_key,
)
from delayserver.schedule.archives import extent_of
from delayserver.schedule.committed import (
    ROWS_SLICE,
    Records,
    gather_payloads,
    join_records,
    slices,
)
from delayserver.schedule.effects import MessageRow, content_digests, watch_of
from delayserver.schedule.expansion import Expansion, Staging
from delayserver.schedule.filing import by_hour, schedule_rows
from delayserver.schedule.wheel_rows import wheel_rows
from storage.catalog import Catalog, Table, Writes
from storage.catalog_columns import Columns, ascending
from storage.definitions_log import DefinitionsLog, DefinitionsPlace
from storage.errors import DamageError, DiskFullError
from storage.frame import Damage, Frame, Rows, unseal
from storage.hour_log import HourLog, hour_name
from storage.message_log import MessageLog
from storage.rows import (
    FLAG_REMOVAL,
    FLAG_WATCHES,
    HOUR_MS,
    MESSAGE_DTYPE,
    NO_KEY,
    RecordKind,
    buffer_of,
    is_among,
    keep,
    select,
)

PURGE_ROWS = 1_000
"""Per step, so that neither filing nor the event loop waits for long."""
_KEYS_SLICE = 8_192
"""Keys in a transaction. Each may touch a page of its own, which is in memory until the end, and
the pages of one transaction are those that the next but one writes to."""


assert MessageRow._fields == MESSAGE_DTYPE.names


@dataclass(slots=True)
class Filed:
    """What one call of `file` did."""

    last_seq: int
    live: list[tuple[int, Rows]] = field(default_factory=list)
    """Rows for the wheel, by hour (WHEEL_DTYPE)."""
    total_bytes: int = 0
    """Of an import: how much of it."""
    damage: list[Damage] = field(default_factory=list)
    """What of a staged import cannot be read any more."""


class Snapshot(NamedTuple):
    """How much of an hour's schedule file holds what was filed before the hour went live."""

    hour: int
    length: int


class Replay:
    """Files records, makes checkpoints, retires and deletes hours."""

    keys_slice = _KEYS_SLICE

    def __init__(
        self,
        catalog: Catalog,
        schedule: HourLog,
        dispatch: HourLog,
        message_log: MessageLog,
        staging: Staging,
        definitions: DefinitionsLog,
    ) -> None:
        self._catalog = catalog
        self._definitions = definitions
        self._staging = staging
        self._schedule = schedule
        self._dispatch = dispatch
        self._message_log = message_log
        self.hours = read_hours(catalog)
        self.checkpoint_seq = read_checkpoint(catalog)
        self.has_checkpoint = catalog.get(Table.META, CHECKPOINT_KEY) is not None
        """Every start makes one, before anything is filed."""
        self.filed_seq = self.checkpoint_seq
        self._keys_ahead = range(self.checkpoint_seq + 1, read_keys_ahead(catalog) + 1)
        """Records whose keys the catalog may have, since a checkpoint was interrupted."""
        self.live_through_hour = -1
        self.live_once_through_hour = read_live_through_hour(catalog)
        """The newest hour that was ever live, also in an earlier process: it may have fired."""
        self._dirty_hours: set[int] = set()
        self._writes: dict[Table, list[tuple[bytes, bytes | None]]] = {t: [] for t in Table}
        self._keys: list[Columns] = []
        """For the table KEYS, behind what `_writes` has for it, which is removed: a purge begins
        with a checkpoint, so whatever it removes is older."""
        self._archived = read_archived(catalog)
        self._purging: tuple[int, Iterator[None]] | None = None
        self._subject_ids: set[int] = set()
        """Of messages that were filed since the last checkpoint."""
        self._purged: list[int] = []
        self._importing: Expansion | None = None
        self._imported: list[tuple[int, str]] = []
        """Imports that were filed: last seq and id; a checkpoint lets their staged files go."""
        self.deleted_hours: list[int] = []
        """Hours whose files were deleted, for whoever has them open; the caller takes them out."""

    # ── filing ─────────────────────────────────────────────────────────────────────────────────

    def file(self, batch: Sequence[Records], now_ms: int) -> Filed:
        """File committed records, in seq order, into their hours. Not durable before `checkpoint`.

        An import comes last in its batch: `is_importing` tells that `file_import` is to follow.
        Raises DiskFullError: nothing of the batch is filed then, and it may be filed again."""
        assert not self.is_importing
        rows, blob, express = join_records(batch)
        if not len(rows):
            return Filed(self.filed_seq)
        if self._purged:
            self._delete_purged()
        importing = self._expansion(rows[-1], blob)
        if importing is not None:
            # A checkpoint may stand in the middle of an import.
            rows = rows[:-1][rows["seq"][:-1] > self.filed_seq]
        # Without damage in the message log it is the very next seq.
        assert not len(rows) or int(rows["seq"][0]) > self.filed_seq, (rows["seq"], self.filed_seq)
        last_seq = int(rows["seq"][-1]) if len(rows) else self.filed_seq
        if importing is not None:
            last_seq = max(last_seq, importing.first_seq - 1)
        filed = Filed(last_seq)
        scheduled, starts = schedule_rows(rows)
        states: dict[int, HourState] = {}
        for hour, indexes in by_hour(scheduled):
            state = self.hours.get(hour, HourState())
            here = scheduled if len(indexes) == len(scheduled) else select(scheduled, indexes)
            payload = gather_payloads(blob, starts[indexes], here)
            states[hour] = self._file_hour(hour, state, here, payload, now_ms, express, filed)
        # Only now, since a full disk in the middle must leave everything as it was.
        self.hours.update(states)
        self._dirty_hours.update(states)
        self._note_effects(rows, blob)
        self.filed_seq = filed.last_seq
        if importing is not None and importing.last_seq > self.filed_seq:
            self._importing = importing
        return filed

    def _expansion(self, row: np.void, blob: bytes) -> Expansion | None:
        if row["kind"] != RecordKind.IMPORT:
            return None
        start = int(row["payload_offset"])
        payload = unseal(blob[start : start + int(row["payload_length"])])
        assert payload is not None, "records are checked before they come here"
        record = msgspec.msgpack.decode(payload, type=ImportRecord)
        return self._staging.expansion(record, int(row["seq"]))

    @property
    def is_importing(self) -> bool:
        """Whether an import is being filed; nothing else can be until it is."""
        return self._importing is not None

    def file_import(self, now_ms: int) -> Filed:
        """File the next slice of the import. Not durable before `checkpoint`, which may come in
        between. Raises DiskFullError: nothing of the slice is filed then; call again."""
        importing = self._importing
        assert importing is not None
        if self._purged:
            self._delete_purged()
        pieces, damage, last_seq = importing.next_slice(self.filed_seq)
        filed = Filed(last_seq, damage=damage)
        states: dict[int, HourState] = {}
        for rows, payload in pieces:
            hour = int(rows["due_ms"][0]) // HOUR_MS
            state = states.get(hour) or self.hours.get(hour, HourState())
            here = gather_payloads(payload, rows["payload_offset"].astype(np.int64), rows)
            states[hour] = self._file_hour(hour, state, rows, here, now_ms, set(), filed)
        self.hours.update(states)
        self._dirty_hours.update(states)
        for rows, payload in pieces:
            self._note_published(rows)
            filed.total_bytes += rows.nbytes + len(payload)
        for found in damage:
            self.note_damage(found, now_ms)
        self.filed_seq = last_seq
        importing.advance()
        if last_seq == importing.last_seq:
            record = importing.record
            value = ImportState(importing.first_seq, now_ms, record)
            self._writes[Table.IMPORTS].append((import_key(record.id), pack_import(value)))
            self._imported.append((last_seq, record.id))
            self._importing = None
        return filed

    def _file_hour(
        self,
        hour: int,
        state: HourState,
        rows: Rows,
        payload: memoryview,
        now_ms: int,
        express: Collection[int],
        filed: Filed,
    ) -> HourState:
        payload_start, end = self._schedule.append(
            hour,
            buffer_of(rows),
            payload,
            offset=state.length,
            first_seq=int(rows["seq"][0]),
            last_seq=int(rows["seq"][-1]),
            created_ms=now_ms,
        )
        is_entry = (rows["flags"] & FLAG_REMOVAL) == 0
        entries = keep(rows, is_entry)
        if hour <= self.live_through_hour and len(entries):
            live = wheel_rows(entries, hour, payload_start)
            if express:
                seqs = np.fromiter(express, np.uint64, len(express))
                live = select(live, ~np.isin(live["seq"], seqs))
            # Without rows, too: the hour is open again.
            filed.live.append((hour, live))
        return HourState(
            length=end,
            entries=state.entries + len(entries),
            removals=state.removals + len(rows) - len(entries),
            last_entry_seq=int(entries["seq"][-1]) if len(entries) else state.last_entry_seq,
            # An hour that gets a new message is open again (a clock that was set back does that).
            retired_ms=0 if len(entries) else state.retired_ms,
            first_seq=state.first_seq if state.length else int(rows["seq"][0]),
        )

    def _note_effects(self, rows: Rows, blob: bytes) -> None:
        """Queue what the records mean for the catalog, for the next checkpoint."""
        published = rows["kind"] == RecordKind.PUBLISH
        self._note_published(keep(rows, published))
        watching = select(rows, published & (rows["flags"] & FLAG_WATCHES != 0))
        for start in range(0, len(watching), ROWS_SLICE):
            for row in watching[start : start + ROWS_SLICE].tolist():
                self._note_watches(MessageRow(*row), blob)
        cancels = (rows["kind"] == RecordKind.CANCEL) & (rows["payload_length"] == 0)
        others = select(rows, ~(published | cancels))
        for start in range(0, len(others), ROWS_SLICE):
            for row in others[start : start + ROWS_SLICE].tolist():
                self._note_effect(MessageRow(*row), blob)
        # Nothing changes a message after its cancel, so they may come last.
        cancelled = select(rows, cancels)
        for start in range(0, len(cancelled), ROWS_SLICE):
            self._note_cancels(cancelled[start : start + ROWS_SLICE])

    def _note_cancels(self, rows: Rows) -> None:
        """As `_note_effect`, for cancels that no event made."""
        keys, values = pack_cancels(rows["message_seq"], rows["target_seq"], rows["target_due_ms"])
        self._writes[Table.CHANGES] += zip(keys, values, strict=True)

    def _note_published(self, rows: Rows) -> None:
        self._subject_ids.update(np.unique(rows["subject_id"]).tolist())
        keyed = keep(rows, rows["key_hash"] != np.void(NO_KEY))
        if len(keyed):
            # Not a pair of objects for each: there may be 300,000 in a second.
            values = pack_key_entries(keyed, content_digests(keyed))
            self._keys.append(Columns(np.ascontiguousarray(keyed["key_hash"]), values))

    def _note_watches(self, row: "MessageRow", blob: bytes) -> None:
        watch = watch_of(row, blob)
        assert watch is not None
        value = pack_watch(row.due_ms, watch.on_event)
        self._writes[Table.WATCHES] += [(watch_key(key, row.seq), value) for key in watch.keys]

    def _note_effect(self, row: "MessageRow", blob: bytes) -> None:
        subscription_id, target_seq = row.subscription_id, row.target_seq
        payload = None
        if row.payload_length:
            payload = unseal(blob[row.payload_offset : row.payload_offset + row.payload_length])
        writes = self._writes
        match row.kind:
            case RecordKind.CANCEL:
                state, entry_seq, due_ms = ChangeState.CANCELLED, target_seq, row.target_due_ms
                if payload is not None:  # An event did it.
                    key = watch_key(payload.decode(), row.message_seq)
                    writes[Table.WATCHES].append((key, None))
            case RecordKind.MOVE:
                state, entry_seq, due_ms = ChangeState.MOVED, row.seq, row.due_ms
            case RecordKind.FIRE:
                state, entry_seq, due_ms = ChangeState.FIRED, row.seq, row.due_ms
                watch = watch_of(row, blob)
                for name in watch.keys if watch is not None else ():
                    writes[Table.WATCHES].append((watch_key(name, row.message_seq), None))
            case RecordKind.RETRY | RecordKind.REDRIVE:
                state, entry_seq, due_ms = ChangeState.RETRYING, row.seq, row.due_ms
            case RecordKind.DEAD:
                state, entry_seq, due_ms = ChangeState.DEAD, target_seq, row.target_due_ms
            case RecordKind.SUBJECT:
                assert payload is not None
                key = number_key(row.subject_id)
                writes[Table.SUBJECTS].append((key, payload))
                return
            case RecordKind.SUBSCRIPTION:
                key = number_key(subscription_id)
                writes[Table.SUBSCRIPTIONS].append((key, payload))
                return
            case RecordKind.HEARTBEAT:
                assert payload is not None
                heartbeat = unpack_heartbeat(payload)
                value = payload if heartbeat.subject_id else None
                writes[Table.HEARTBEATS].append((heartbeat_key(heartbeat.key), value))
                return
            case _:
                assert row.kind == RecordKind.DISCARD, row.kind
                key = dead_letter_key(subscription_id, target_seq)
                writes[Table.DEAD_LETTERS].append((key, None))
                return
        change = Change(state, entry_seq, due_ms, row.attempt, row.subject_id)
        key = change_key(row.message_seq, subscription_id)
        writes[Table.CHANGES].append((key, pack_change(change)))
        if row.kind == RecordKind.DEAD:
            key = dead_letter_key(subscription_id, target_seq)
            writes[Table.DEAD_LETTERS].append((key, payload))
        elif row.kind == RecordKind.REDRIVE:
            key = dead_letter_key(subscription_id, target_seq)
            writes[Table.DEAD_LETTERS].append((key, None))

    def skip_to(self, seq: int) -> None:
        """The records up to `seq` are lost, and their seqs must not be given again."""
        self.filed_seq = max(self.filed_seq, seq)

    def resume_definitions(self, *, from_catalog: bool = False) -> Damage | None:
        """Cut the definitions log back to the checkpoint (I7); what is missing of it, if anything.

        If something is, the next checkpoint writes it again from the catalog, which holds the same.
        `from_catalog`: so it does in any case, since the directory was not made with this log.
        Raises DamageError for a catalog that is older than the log."""
        place = read_definitions_place(self._catalog)
        if place is None and self.has_checkpoint and not from_catalog:
            reason = "it does not say how much of the definitions log counts: it is an older one"
            raise DamageError("catalog", 0, reason)
        if place is None or from_catalog:
            place = DefinitionsPlace()
        found = self._definitions.resume(place)
        if found is not None or (from_catalog and self.has_checkpoint):
            self._definitions.start_over(lambda: read_definitions(self._catalog))
        return found

    def delete_adopted(self) -> None:
        """Delete what was staged for imports that the catalog has; a crash may have left it."""
        for import_id in sorted(self._staging.ids()):
            if self._catalog.get(Table.IMPORTS, import_key(import_id)) is not None:
                self._staging.delete(import_id)

    # ── checkpoints ────────────────────────────────────────────────────────────────────────────

    def checkpoint(self) -> int:
        """Make everything that was filed durable; returns the checkpoint's seq (I6).

        The order is the promise: first the schedule files and the definitions log, then the catalog
        that speaks of them, then the message log that is not needed any more. Of the catalog the
        keys come first, in transactions of some length, and the checkpoint with all the rest last:
        until then the message log has every record of the keys, and files it again after a
        crash."""
        self._schedule.sync()
        writes = self._writes
        place = self._definitions.record(definitions_among(writes), self.filed_seq)
        if (found := self._definitions.damage) is not None:
            self.note_damage(found, 0)
        writes[Table.META].append((DEFINITIONS_KEY, pack_definitions_place(place)))
        for hour in self._dirty_hours:
            state = self.hours.get(hour)
            writes[Table.HOURS].append((hour_key(hour), state.pack() if state else None))
        writes[Table.META].append((CHECKPOINT_KEY, pack_checkpoint(self.filed_seq)))
        if self.live_once_through_hour >= 0:
            writes[Table.META].append((LIVE_KEY, hour_key(self.live_once_through_hour)))
        self._commit_keys_ahead()
        self._catalog.commit(writes, {Table.KEYS: self._keys})
        self._definitions.committed()
        self._keys.clear()
        for pairs in writes.values():
            pairs.clear()
        self._dirty_hours.clear()
        self._subject_ids.clear()
        self.checkpoint_seq = self.filed_seq
        self._message_log.delete_through(self.checkpoint_seq)
        while self._imported:
            # What was staged is needed no more, and not one checkpoint earlier (I7).
            self._staging.delete(self._imported[0][1])
            del self._imported[0]
        # Without it the next segment is made when it is needed.
        with contextlib.suppress(DiskFullError):
            self._message_log.prepare_spare()
        return self.checkpoint_seq

    @property
    def is_dirty(self) -> bool:
        """Whether a checkpoint would record anything new."""
        return self.filed_seq != self.checkpoint_seq or bool(self._dirty_hours)

    @property
    def has_new_names(self) -> bool:
        """Whether subjects or subscriptions were filed that no checkpoint has recorded."""
        return bool(self._writes[Table.SUBJECTS] or self._writes[Table.SUBSCRIPTIONS])

    def note_damage(self, damage: Damage, now_ms: int) -> None:
        """Keep the name of a damaged place, for `check` and for people (I8)."""
        key = damage_key(damage.path, damage.offset)
        self._writes[Table.DAMAGE].append((key, pack_damage(damage, now_ms)))

    def name_lost_subjects(self) -> None:
        """Give a name to subjects whose record was damaged, so that no other gets their number.

        Nobody can publish under it or subscribe to it; a subscription to `*` gets the messages."""
        known = {parse_number_key(key) for key, _ in self._catalog.scan(Table.SUBJECTS)}
        known |= {parse_number_key(key) for key, _ in self._writes[Table.SUBJECTS]}
        for number in sorted(self._subject_ids - known):
            pair = (number_key(number), f"(lost subject {number})".encode())
            self._writes[Table.SUBJECTS].append(pair)

    def _commit_keys_ahead(self) -> None:
        """Record all but the last slice of the keys, which stays."""
        if sum(len(part.keys) for part in self._keys) <= self.keys_slice:
            return
        removed, meta = self._writes[Table.KEYS], self._writes[Table.META]
        columns = ascending(self._keys)
        if len(columns.keys) <= self.keys_slice:
            return  # of keys that are there twice the last one counts
        starts = range(0, len(columns.keys), self.keys_slice)
        parts = [Columns(*(one[at : at + self.keys_slice] for one in columns)) for at in starts]
        ahead = [(KEYS_AHEAD_KEY, pack_checkpoint(self.filed_seq))]
        first: Writes = {Table.META: ahead, Table.KEYS: removed}
        for part in parts[:-1]:
            self._catalog.commit(first, {Table.KEYS: [part]})
            first = {}
        removed.clear()
        meta.append((KEYS_AHEAD_KEY, None))
        self._keys[:] = parts[-1:]

    def forget_lost_keys(self, lost: Iterable[tuple[int, int]], next_seq: int) -> None:
        """Keys of records that the message log does not hold any more: first and last seqs of what
        is damaged in it, and all from `next_seq` on. Others are to get these numbers.

        The catalog has such where a checkpoint was interrupted. Cost: nothing, or a look at every
        key."""
        ahead = self._keys_ahead
        stretches = [*lost, (next_seq, ahead.stop - 1)]
        gone = [range(max(one, ahead.start), min(last + 1, ahead.stop)) for one, last in stretches]
        if any(gone):
            self._writes[Table.KEYS] += [
                (key_hash, None)
                for key_hash, value in self._catalog.scan(Table.KEYS)
                if any(unpack_key_entry(value).seq in seqs for seqs in gone)
            ]
        if ahead:
            self._writes[Table.META].append((KEYS_AHEAD_KEY, None))

    # ── hours ──────────────────────────────────────────────────────────────────────────────────

    def is_retired(self, hour: int) -> bool:
        """Whether all messages of the hour are settled."""
        state = self.hours.get(hour)
        return state is not None and bool(state.retired_ms)

    def snapshot(self, through_hour: int) -> list[Snapshot]:
        """Mark all hours up to `through_hour` live, and tell what to load of those that were not.

        It makes a checkpoint, so that after a crash it is known what may have fired, whatever the
        clock says then. Settled hours and hours without messages are left out."""
        self.live_once_through_hour = max(self.live_once_through_hour, through_hour)
        self.checkpoint()
        before, self.live_through_hour = self.live_through_hour, through_hour
        return [
            Snapshot(hour, state.length)
            for hour, state in sorted(self.hours.items())
            if before < hour <= through_hour and not state.retired_ms and state.length
        ]

    def retire(self, hour: int, through_seq: int, now_ms: int) -> None:
        """All messages of the hour up to `through_seq` are settled."""
        state = self.hours.get(hour)
        if state is not None and state.last_entry_seq <= through_seq and not state.retired_ms:
            state.retired_ms = now_ms
            self._dirty_hours.add(hour)

    def confirm(self, hour: int, archived: Archived) -> None:
        """Somebody has an archive of a retired hour; durable on return.

        Raises NotFoundError; ConflictError where it does not cover what the hour holds now."""
        state, name = self.hours.get(hour), hour_name(hour)
        if state is None:
            raise NotFoundError(f"no hour {name} is kept: it was deleted, or nothing was due in it")
        if not state.retired_ms:
            raise ConflictError(
                f"messages of {name} wait or are on their way; archive it when all are settled",
                "open",
            )
        extent = extent_of(state, self._dispatch.size(hour))
        if (archived.extent, archived.count) != (extent, state.entries):
            raise ConflictError(
                f"{name} has changed since it was read: it holds {state.entries} entries up to "
                f"{extent.last_seq} in {extent.schedule_bytes} and {extent.dispatch_bytes} bytes; "
                "archive it again",
                "changed",
            )
        self._writes[Table.ARCHIVES].append((hour_key(hour), pack_archived(archived)))
        self.checkpoint()
        self._archived[hour] = archived

    def _is_archived(self, hour: int) -> bool:
        """Whether there is an archive of all that the hour holds: it may have come back since."""
        archived = self._archived.get(hour)
        if archived is None or archived.schedule_bytes != self.hours[hour].length:
            return False
        return archived.extent == extent_of(self.hours[hour], self._dispatch.size(hour))

    def purge(self, now_ms: int, retention_ms: int, *, archive: bool = False) -> bool:
        """Go on deleting what is past its retention, a slice per call; True: there is more to do.

        `archive`: only what was archived. First the index entries of the hour's messages go, then
        its row in the catalog, then its files."""
        if self._purged:
            self._delete_purged()
        if self.filed_seq != self.checkpoint_seq:
            self.checkpoint()  # What it looks up in the catalog must be up to date.
        if self._purging is None:
            for hour in self.hours:
                if self._is_over(hour, now_ms, retention_ms, archive):
                    self._purging = (hour, self._purge_hour(hour, now_ms))
                    break
            else:
                return False
        hour, steps = self._purging
        if not self._is_over(hour, now_ms, retention_ms, archive):
            # The clock was set back, and the hour may have got a message.
            self._purging = None
        elif next(steps, steps) is steps:
            self._purging = None
            del self.hours[hour]
            self._dirty_hours.add(hour)
            if self._archived.pop(hour, None) is not None:
                # If the hour comes back, it is another one.
                self._writes[Table.ARCHIVES].append((hour_key(hour), None))
            self._purged.append(hour)
            self._delete_purged()
        return True

    def _is_over(self, hour: int, now_ms: int, retention_ms: int, archive: bool) -> bool:
        state = self.hours.get(hour)
        if state is None or not state.is_over(hour, now_ms, retention_ms):
            return False
        return not archive or self._is_archived(hour)

    def _delete_purged(self) -> None:
        # Before anything else is filed, which may be of these hours.
        self.checkpoint()
        while self._purged:
            self.delete_files(self._purged[0])
            self.deleted_hours.append(self._purged.pop(0))

    def delete_files(self, hour: int) -> None:
        """Remove both files of an hour that the catalog does not know any more."""
        self._schedule.delete(hour)
        self._dispatch.delete(hour)

    def _purge_hour(self, hour: int, now_ms: int) -> Iterator[None]:
        parts = [np.empty(0, np.uint64)]
        for frame in self._frames(hour):
            is_removal = (frame.rows["flags"] & FLAG_REMOVAL) != 0
            parts.append(frame.rows["message_seq"][is_removal])
        removed = np.concatenate(parts)
        for frame in self._frames(hour):
            entries = select(frame.rows, (frame.rows["flags"] & FLAG_REMOVAL) == 0)
            # A row that was never removed is all there is of its message: only its key is indexed.
            alone = (entries["seq"] == entries["message_seq"]) & ~is_among(entries["seq"], removed)
            keyed = entries["key_hash"] != np.void(NO_KEY)
            watching = (entries["flags"] & FLAG_WATCHES) != 0
            for indexes in slices(np.flatnonzero(~alone | keyed | watching), PURGE_ROWS):
                for index in indexes.tolist():
                    row = entries[index]
                    try:
                        if alone[index] or not self._lives_elsewhere(
                            hour, row, frame.payload_start
                        ):
                            self._purge_message(int(row["message_seq"]), bytes(row["key_hash"]))
                            if watching[index]:
                                self._purge_watches(hour, row, frame.payload_start)
                    except DamageError as error:
                        # What is left over of one message must not keep the server from going on.
                        place = (error.path, error.offset, error.offset, error.reason)
                        self.note_damage(Damage(*place, torn=False), now_ms)
                yield

    def _frames(self, hour: int) -> Iterable[Frame]:
        for found in self._schedule.scan(hour, end=self.hours[hour].length):
            if isinstance(found, Frame):
                yield found

    def _lives_elsewhere(self, hour: int, row: np.void, payload_start: int) -> bool:
        """Whether another hour that is still kept holds a row of the message.

        The last of them takes the index entries with it: as long as there is one, the message may
        be asked for, and must not be taken for what its id alone says."""
        message_seq = int(row["message_seq"])
        changes = self._catalog.scan(Table.CHANGES, prefix=change_prefix(message_seq))
        rows = {
            (change.due_ms // HOUR_MS, change.entry_seq)
            for change in (unpack_change(value) for _, value in changes)
        }
        if row["seq"] != message_seq:
            try:
                payload = self._payload(hour, row, payload_start)
            except DamageError:
                return True
            if payload.origin is not None:
                rows.add((payload.origin.published_due_ms // HOUR_MS, message_seq))
        return any(other != hour and self._holds(other, seq) for other, seq in rows)

    def _holds(self, hour: int, seq: int) -> bool:
        state = self.hours.get(hour)
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
        self._writes[Table.WATCHES] += [(key, None) for key in keys]

    def _purge_message(self, message_seq: int, key_hash: bytes) -> None:
        for key, _ in self._catalog.scan(Table.CHANGES, prefix=change_prefix(message_seq)):
            self._writes[Table.CHANGES].append((key, None))
        if key_hash != NO_KEY:
            value = self._catalog.get(Table.KEYS, key_hash) or b""
            if value and unpack_key_entry(value).seq == message_seq:
                self._writes[Table.KEYS].append((key_hash, None))
