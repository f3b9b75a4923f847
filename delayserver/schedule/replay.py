"""Replay: follows the message log and files its records into the schedule log.

About once a second everything that was accepted since is filed in one go. Rows are sorted by the
hour they are due, or, if that is far, by the day (`days`), and each file gets one frame. Then the
files are synced, and one catalog transaction records the effects together with the checkpoint. The
checkpoint says that every effect of every record up to that seq is durable (I6). After a crash the
files are cut back to the length in the catalog and the records behind the checkpoint are filed
again, by the same code, to the same rows (I7).

Because filing is lazy, an hour's file gets at most one frame per checkpoint, however the messages
arrived. Messages that fall due before they would be filed do not wait for it: the event loop puts
them into the wheel itself (`Group.express`).

Rows of loaded hours are handed to the wheel with the place of their payload. Loading an hour goes
through here, too. `snapshot` tells how much of the file holds the rows filed so far, and marks the
hour as live; rows that are filed later are handed over. So no message falls between the two (I3).

Cost: 0.3 to 0.5 µs per record, vectorised, and 0.5 µs per key at the checkpoint; per checkpoint one
fdatasync per touched hour and one commit. The event loop decides meanwhile: with 50,000 records no
step holds the GIL for longer than 0.5 ms, with 280,000 it takes 4 ms to give back their payloads.
An import belongs to the core as well: its record adds rows that no record of the log holds, so the
filer files it, a slice at a time (`Replay.file_import`). The part decides about it before.

Threads: belongs to the replay thread; in recovery and in the simulation it is called directly.
"""

import contextlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np

from delayserver.parts.part import HourKeeper, Parts
from delayserver.records.definitions import definitions_among, read_definitions
from delayserver.records.tables import (
    CHECKPOINT_KEY,
    DEFINITIONS_KEY,
    KEYS_AHEAD_KEY,
    LIVE_KEY,
    HourState,
    hour_key,
    pack_checkpoint,
    pack_definitions_place,
    read_checkpoint,
    read_definitions_place,
    read_hours,
    read_live_through_hour,
)
from delayserver.schedule.committed import Records, join_records
from delayserver.schedule.days import NEAR_MS, SLICE_BYTES, Days, add_by_hour
from delayserver.schedule.effects import Effects
from delayserver.schedule.expansion import Expansion, ImportRecord, ImportState, Staging, import_key
from delayserver.schedule.filing import BucketPart, parts_by_bucket, schedule_rows
from delayserver.schedule.purge import Purge
from delayserver.schedule.wheel_rows import wheel_rows
from storage.catalog import Catalog, Table
from storage.definitions_log import DefinitionsLog, DefinitionsPlace
from storage.errors import DamageError, ShortageError
from storage.frame import Damage, Rows, unseal
from storage.hour_log import HourLog
from storage.rows import FLAG_REMOVAL, HOUR_MS, RecordKind, buffer_of, keep, select
from storage.write_ahead_log import CheckpointedLog

K = TypeVar("K")


@dataclass(slots=True)
class Filed:
    """The result of one call of `file`."""

    last_seq: int
    live: list[tuple[int, Rows]] = field(default_factory=list)
    """Rows for the wheel, by hour (WHEEL_DTYPE)."""
    total_bytes: int = 0
    """In an import: the number of its bytes."""
    damage: list[Damage] = field(default_factory=list)
    """The parts of a staged import that cannot be read any more."""


class Snapshot(NamedTuple):
    """How much of an hour's schedule file was filed before the hour went live."""

    hour: int
    length: int


class Replay:
    """Files records, makes checkpoints, retires and deletes hours."""

    def __init__(
        self,
        catalog: Catalog,
        schedule: HourLog,
        dispatch: HourLog,
        message_log: CheckpointedLog,
        staging: Staging,
        definitions: DefinitionsLog,
        parts: Parts,
        *,
        keepers: Sequence[Callable[..., HourKeeper]] = (),
        purge: Callable[..., Purge] = Purge,
        day_slice_bytes: int = SLICE_BYTES,
    ) -> None:
        """`keepers`: make the objects of parts that may keep hours, as `Feature.keep` with the
        settings."""
        self._catalog = catalog
        self._definitions = definitions
        self._staging = staging
        self.schedule = schedule
        self._message_log = message_log
        self.hours = read_hours(catalog)
        """The filed rows, by hour, and by day if they are far off."""
        self._days = Days(schedule, self.hours, slice_bytes=day_slice_bytes)
        self.checkpoint_seq = read_checkpoint(catalog)
        self.has_checkpoint = catalog.get(Table.META, CHECKPOINT_KEY) is not None
        """Every start makes one, before anything is filed."""
        self.filed_seq = self.checkpoint_seq
        self.live_through_hour = -1
        self.live_once_through_hour = read_live_through_hour(catalog)
        """The newest hour that was ever live, also in an earlier process: it may have fired."""
        self.effects = Effects(catalog, self.checkpoint_seq, parts)
        self._keepers = [
            make(catalog, self.hours, dispatch, self.effects, self.checkpoint) for make in keepers
        ]
        self.purging = purge(
            catalog, schedule, dispatch, self.hours, self.effects, self._keepers, self.checkpoint
        )
        self._importing: Expansion | None = None
        self._imported: list[tuple[int, str]] = []
        """Imports that were filed: last seq and id; a checkpoint lets their staged files go."""

    def keeper(self, kind: type[K]) -> K:
        """The keeper of a part, by its class."""
        return next(one for one in self._keepers if isinstance(one, kind))

    # ── filing ─────────────────────────────────────────────────────────────────────────────────

    def file(self, batch: Sequence[Records], now_ms: int) -> Filed:
        """File committed records, in seq order, into their hours. Not durable before `checkpoint`.

        An import comes last in its batch: `is_importing` tells that `file_import` is to follow.
        Raises ShortageError: nothing of the batch is filed then, and it may be filed again."""
        assert not self.is_importing
        rows, blob, express = join_records(batch)
        if not len(rows):
            return Filed(self.filed_seq)
        self.purging.finish()
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
        buckets = self._days.buckets(scheduled["due_ms"], self.near_hour(now_ms))
        for part in parts_by_bucket(blob, scheduled, starts, buckets):
            state = self.hours.get(part.bucket, HourState())
            states[part.bucket], start = self._append(part, state, now_ms)
            self._hand_over(part, start, express, filed)
        # Only now, since a full disk in the middle must leave everything as it was.
        self.hours.update(states)
        self.effects.changed_hours.update(states)
        self.effects.note_records(rows, blob)
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

    def check_staged(self, records: Records) -> None:
        """Whether the import that these end with can be filed here: another node has adopted it.

        Raises StagingError where a staged file is not in this directory: its messages would be
        missing in this copy of the shard alone (I16)."""
        importing = self._expansion(records.rows[-1], records.payload)
        assert importing is not None
        if importing.last_seq > self.filed_seq:
            self._staging.check(importing.record)

    @property
    def is_importing(self) -> bool:
        """Whether an import is being filed; nothing else can be until it is."""
        return self._importing is not None

    def file_import(self, now_ms: int) -> Filed:
        """File the next slice of the import. Not durable before `checkpoint`, which may come in
        between. Raises ShortageError: nothing of the slice is filed then; call again."""
        importing = self._importing
        assert importing is not None
        self.purging.finish()
        pieces, damage, last_seq = importing.next_slice(self.filed_seq)
        filed = Filed(last_seq, damage=damage)
        states: dict[int, HourState] = {}
        firsts_ms = np.array([rows["due_ms"][0] for rows, _ in pieces], np.int64)
        buckets = self._days.buckets(firsts_ms, self.near_hour(now_ms)).tolist()
        for bucket, (rows, payload) in zip(buckets, pieces, strict=True):
            state = states.get(bucket) or self.hours.get(bucket, HourState())
            starts = rows["payload_offset"].astype(np.int64)
            (part,) = parts_by_bucket(payload, rows, starts, np.full(len(rows), bucket))
            states[bucket], start = self._append(part, state, now_ms)
            self._hand_over(part, start, (), filed)
        self.hours.update(states)
        self.effects.changed_hours.update(states)
        for rows, payload in pieces:
            self.effects.note_published(rows)
            filed.total_bytes += rows.nbytes + len(payload)
        for found in damage:
            self.effects.note_damage(found, now_ms)
        self.filed_seq = last_seq
        importing.advance()
        if last_seq == importing.last_seq:
            record = importing.record
            self.effects.note_import(ImportState(importing.first_seq, now_ms, record))
            self._imported.append((last_seq, record.id))
            self._importing = None
        return filed

    def _append(self, part: BucketPart, state: HourState, now_ms: int) -> tuple[HourState, int]:
        """One frame more in the file of an hour or a day; its state then, and where the payloads
        of the frame begin."""
        seqs = part.rows["seq"]
        first_seq = int(seqs[0])
        payload_start, end = self.schedule.append(
            part.bucket,
            buffer_of(part.rows),
            part.payload,
            offset=state.length,
            first_seq=first_seq,
            last_seq=int(seqs[-1]),
            created_ms=now_ms,
        )
        after = HourState(
            length=end,
            entries=state.entries + part.entries,
            removals=state.removals + len(part.rows) - part.entries,
            last_entry_seq=part.last_entry_seq or state.last_entry_seq,
            # An hour that gets a new message is open again (a clock that was set back does that).
            retired_ms=0 if part.entries else state.retired_ms,
            first_seq=state.first_seq if state.length else first_seq,
            by_hour=add_by_hour(state.by_hour, part.by_hour),
        )
        return after, payload_start

    def _hand_over(
        self, part: BucketPart, payload_start: int, express: Collection[int], filed: Filed
    ) -> None:
        """Hand the rows filed for a live hour to the wheel, except those that went as express."""
        hour, rows = part.bucket, part.rows
        if hour > self.live_through_hour:
            return
        entries = keep(rows, (rows["flags"] & FLAG_REMOVAL) == 0)
        if len(entries):
            live = wheel_rows(entries, hour, payload_start)
            if express:
                seqs = np.fromiter(express, np.uint64, len(express))
                live = select(live, ~np.isin(live["seq"], seqs))
            # Without rows, too: the hour is open again.
            filed.live.append((hour, live))

    def skip_to(self, seq: int) -> None:
        """Pass over records that are lost, up to `seq`: no other record may get their seqs."""
        self.filed_seq = max(self.filed_seq, seq)

    def resume_definitions(self, *, from_catalog: bool = False) -> Damage | None:
        """Cut the definitions log back to the checkpoint (I7); returns the missing stretch, if any.

        If something is missing, the next checkpoint writes the log again from the catalog, which
        holds the same. With `from_catalog` it always does: the directory is older than this log.
        Raises DamageError for a catalog that does not say how much of the log counts."""
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
        """Delete the staged files of imports that the catalog has; a crash may have left them."""
        for import_id in sorted(self._staging.ids()):
            if self._catalog.get(Table.IMPORTS, import_key(import_id)) is not None:
                self._staging.delete(import_id)

    # ── checkpoints ────────────────────────────────────────────────────────────────────────────

    def checkpoint(self) -> int:
        """Make everything that was filed durable; returns the checkpoint's seq (I6).

        The order is the promise: first the schedule files and the definitions log, then the catalog
        that speaks of them, then the message log that is not needed any more. In the catalog the
        keys come first, in transactions of some length, and the checkpoint with all the rest last.
        Until then the message log has every record of the keys, and files it again after a
        crash."""
        self.schedule.sync()
        writes = self.effects.writes
        place = self._definitions.record(definitions_among(writes), self.filed_seq)
        if (found := self._definitions.damage) is not None:
            self.effects.note_damage(found, 0)
        writes[Table.META].append((DEFINITIONS_KEY, pack_definitions_place(place)))
        for hour in self.effects.changed_hours:
            state = self.hours.get(hour)
            writes[Table.HOURS].append((hour_key(hour), state.pack() if state else None))
        writes[Table.META].append((CHECKPOINT_KEY, pack_checkpoint(self.filed_seq)))
        writes[Table.META] += self._message_log.places(self.filed_seq)
        if self.live_once_through_hour >= 0:
            writes[Table.META].append((LIVE_KEY, hour_key(self.live_once_through_hour)))
        self.effects.commit_keys_ahead(self.filed_seq)
        self._catalog.commit(writes, {Table.KEYS: self.effects.keys})
        self._definitions.committed()
        self.effects.clear()
        self.checkpoint_seq = self.filed_seq
        self._message_log.delete_through(self.checkpoint_seq)
        while self._imported:
            # The staged files are needed no more, and could not go one checkpoint earlier (I7).
            self._staging.delete(self._imported[0][1])
            del self._imported[0]
        # Without it the next segment is made when it is needed.
        with contextlib.suppress(ShortageError):
            self._message_log.prepare_spare()
        return self.checkpoint_seq

    def tidy(self) -> bool:
        """Do a slice of the work that keeps the catalog quick (`Catalog.tidy`); True: go on."""
        if self._catalog.get(Table.META, KEYS_AHEAD_KEY) is not None:
            return False  # Keys that no checkpoint covers yet may have to be taken out again.
        return self._catalog.tidy(if_pressing=self.is_importing)

    @property
    def is_dirty(self) -> bool:
        """Whether a checkpoint would record anything new."""
        return (
            self.filed_seq != self.checkpoint_seq
            or bool(self.effects.changed_hours)
            or self._message_log.wants_checkpoint(self.filed_seq)
        )

    # ── hours ──────────────────────────────────────────────────────────────────────────────────

    def near_hour(self, now_ms: int) -> int:
        """The day of this hour is near, and so are those before it."""
        return max(
            (now_ms + NEAR_MS) // HOUR_MS, self.live_through_hour, self.live_once_through_hour
        )

    def must_split(self, through_hour: int) -> bool:
        """Whether a day must be split that begins with this hour or before."""
        return self._days.first(through_hour) is not None

    def split(self, through_hour: int, now_ms: int) -> Filed:
        """Split the next slice of the first day that must be. Durable with the next checkpoint.

        Nothing is filed by that, but it may come across damage. Raises ShortageError: nothing of
        the slice counts then; call again."""
        day = self._days.first(through_hour)
        assert day is not None

        def append(part: BucketPart, state: HourState) -> HourState:
            return self._append(part, state, now_ms)[0]

        hours, damage = self._days.split(day, append)
        for found in damage:
            self.effects.note_damage(found, now_ms)
        if hours is not None:
            self.effects.changed_hours |= {day, *hours}
            self.purging.drop(day)
        return Filed(self.filed_seq, damage=damage)

    def is_retired(self, hour: int) -> bool:
        """Whether all messages of the hour are settled."""
        state = self.hours.get(hour)
        return state is not None and bool(state.retired_ms)

    def snapshot(self, through_hour: int) -> list[Snapshot]:
        """Mark all hours up to `through_hour` live; returns those to load that were not live.

        The replay thread takes a snapshot between two batches of records. So no row is loaded that
        a filed cancel has removed (I5, I11), and no row that is filed later is missed (I3). Settled
        hours and hours without messages are left out. Their days have been split (`split`)."""
        assert self._days.first(through_hour) is None, through_hour
        # After a crash the server must know which messages may have fired. Otherwise, if the clock
        # was set back, they would wait until it reaches their hour again.
        self.live_once_through_hour = max(self.live_once_through_hour, through_hour)
        self._message_log.note_live(self.live_once_through_hour)
        self.checkpoint()
        before, self.live_through_hour = self.live_through_hour, through_hour
        return [
            Snapshot(hour, state.length)
            for hour, state in sorted(self.hours.items())
            if before < hour <= through_hour and not state.retired_ms and state.length
        ]

    def retire(self, hour: int, through_seq: int, now_ms: int) -> None:
        """Retire an hour of which all messages up to `through_seq` are settled.

        An hour that got a message since, which was on its way here, stays open: it would never be
        loaded (I3)."""
        state = self.hours.get(hour)
        if state is not None and state.last_entry_seq <= through_seq and not state.retired_ms:
            state.retired_ms = now_ms
            self.effects.changed_hours.add(hour)

    def purge(self, now_ms: int, retention_ms: int) -> bool:
        """Go on deleting hours past their retention that no keeper keeps, a slice per call; True:
        there is more to do."""
        self.purging.finish()
        if self.filed_seq != self.checkpoint_seq:
            # Else a key that was used again would be taken for that of the purged message.
            self.checkpoint()
        return self.purging.step(now_ms, retention_ms)
