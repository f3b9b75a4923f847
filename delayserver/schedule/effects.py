"""Effects: what filed records mean for the catalog, until the next checkpoint writes it there.

    records ── note ──▶ writes, table by table ─┐
                        keys, as columns       ─┼── Replay.checkpoint ──▶ catalog
                        changed hours          ─┘

The schedule files say where a message is. The catalog says what its id does not: that it was moved
or cancelled, which message holds a key, which subjects and subscriptions there are. Nothing of that
is written before the schedule files are durable (I6): else the catalog could name rows that a crash
has taken away.

Keys are columns and not pairs of objects: there may be 300,000 new ones in a second.

Cost: 0.1 µs per publish, 0.5 µs per key at the checkpoint, some 5 µs per other record.
Threads: belongs to the replay thread.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayserver.parts.part import Effect, Parts, checks_of, effects_of
from delayserver.records.message import Payload, decode_payload
from delayserver.records.tables import (
    KEYS_AHEAD_KEY,
    Change,
    ChangeState,
    change_key,
    damage_key,
    dead_letter_key,
    lost_subject,
    number_key,
    pack_cancels,
    pack_change,
    pack_checkpoint,
    pack_damage,
    pack_key_entries,
    pack_watch,
    parse_number_key,
    read_keys_ahead,
    unpack_key_entry,
    watch_key,
)
from delayserver.schedule.committed import ROWS_SLICE
from delayserver.schedule.expansion import ImportState, import_key, pack_import
from storage.catalog import Catalog, Table, Writes
from storage.catalog_columns import Columns, ascending
from storage.errors import UnknownKindError
from storage.frame import Damage, Rows, unseal
from storage.rows import (
    FLAG_WATCHES,
    MESSAGE_DTYPE,
    MOVES,
    NO_KEY,
    PUBLISHES,
    RecordKind,
    is_among,
    keep,
    select,
)

_KEYS_SLICE = 8_192
"""Keys in a transaction. Each may touch a page of its own, which is in memory until the end, and
the pages of one transaction are those that the next but one writes to."""


class MessageRow(NamedTuple):
    """A row of MESSAGE_DTYPE, for those records of which there are few."""

    seq: int
    due_ms: int
    message_seq: int
    target_seq: int
    target_due_ms: int
    key_hash: bytes
    subject_id: int
    subscription_id: int
    payload_offset: int
    payload_length: int
    payload_crc: int
    attempt: int
    kind: int
    flags: int


assert MessageRow._fields == MESSAGE_DTYPE.names


class Effects:
    """Collects catalog writes. `Replay.checkpoint` commits them and calls `clear`."""

    keys_slice = _KEYS_SLICE

    def __init__(self, catalog: Catalog, checkpoint_seq: int, parts: Parts) -> None:
        self._catalog = catalog
        self._of_parts = effects_of(parts)
        self.writes: dict[Table, list[tuple[bytes, bytes | None]]] = {
            table: [] for table in (*Table, *checks_of(parts))
        }
        """Pairs of key and value, or None to delete the key, in the order of their records."""
        self.keys: list[Columns] = []
        """For the table KEYS, behind what `writes` has for it, which is removed: a purge begins
        with a checkpoint, so whatever it removes is older."""
        self.changed_hours: set[int] = set()
        """Hours whose state in the table HOURS is not that of `Replay.hours`."""
        self._subject_ids: set[int] = set()
        """Of messages that were filed since the last checkpoint."""
        self._keys_ahead = range(checkpoint_seq + 1, read_keys_ahead(catalog) + 1)
        """Records whose keys the catalog may have, since a checkpoint was interrupted."""

    @property
    def has_new_names(self) -> bool:
        """Whether subjects or subscriptions were filed that no checkpoint has recorded."""
        return bool(self.writes[Table.SUBJECTS] or self.writes[Table.SUBSCRIPTIONS])

    @property
    def writes_count(self) -> int:
        """How many writes the next checkpoint has, but for columns."""
        return sum(map(len, self.writes.values()))

    # ── of records ─────────────────────────────────────────────────────────────────────────────

    def note_records(self, rows: Rows, blob: bytes) -> None:
        """Note what records mean.

        `rows`: MESSAGE_DTYPE, in seq order, without imports; `blob`: their payloads."""
        published = is_among(rows["kind"], np.array(PUBLISHES, np.uint8))
        self.note_published(keep(rows, published))
        watching = select(rows, published & (rows["flags"] & FLAG_WATCHES != 0))
        for start in range(0, len(watching), ROWS_SLICE):
            for row in watching[start : start + ROWS_SLICE].tolist():
                self._note_watches(MessageRow(*row), blob)
        cancels = (rows["kind"] == RecordKind.CANCEL) & (rows["payload_length"] == 0)
        # Another kind of publish is a new message, and also a step of a part, whose steps have an
        # order.
        others = select(rows, (rows["kind"] != RecordKind.PUBLISH) & ~cancels)
        for start in range(0, len(others), ROWS_SLICE):
            for row in others[start : start + ROWS_SLICE].tolist():
                self._note_effect(MessageRow(*row), blob)
        # Nothing changes a message after its cancel, so they may come last.
        cancelled = select(rows, cancels)
        for start in range(0, len(cancelled), ROWS_SLICE):
            self._note_cancels(cancelled[start : start + ROWS_SLICE])

    def note_published(self, rows: Rows) -> None:
        """Note new messages: MESSAGE_DTYPE, or SCHEDULE_DTYPE where they come from an import."""
        self._subject_ids.update(np.unique(rows["subject_id"]).tolist())
        keyed = keep(rows, rows["key_hash"] != np.void(NO_KEY))
        if len(keyed):
            values = pack_key_entries(keyed, content_digests(keyed))
            self.keys.append(Columns(np.ascontiguousarray(keyed["key_hash"]), values))

    def note_import(self, state: ImportState) -> None:
        """Note that all rows of an import are filed."""
        pair = (import_key(state.record.id), pack_import(state))
        self.writes[Table.IMPORTS].append(pair)

    def _note_cancels(self, rows: Rows) -> None:
        """Note cancels that no event made: many in one go."""
        keys, values = pack_cancels(rows["message_seq"], rows["target_seq"], rows["target_due_ms"])
        self.writes[Table.CHANGES] += zip(keys, values, strict=True)

    def _note_watches(self, row: MessageRow, blob: bytes) -> None:
        watch = _payload_of(row, blob).watch
        assert watch is not None
        value = pack_watch(row.due_ms, watch.on_event)
        self.writes[Table.WATCHES] += [(watch_key(key, row.seq), value) for key in watch.keys]

    def note_settled(self, watch_keys: Iterable[bytes]) -> None:
        """Note that messages are settled, which an event has come upon: they watch nothing."""
        self.writes[Table.WATCHES] += [(key, None) for key in watch_keys]

    def _note_effect(self, row: MessageRow, blob: bytes) -> None:
        subscription_id, target_seq = row.subscription_id, row.target_seq
        payload = None
        if row.payload_length:
            payload = unseal(blob[row.payload_offset : row.payload_offset + row.payload_length])
        writes = self.writes
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
                watch = _payload_of(row, blob).watch
                for name in watch.keys if watch is not None else ():
                    writes[Table.WATCHES].append((watch_key(name, row.message_seq), None))
            case RecordKind.RETRY | RecordKind.REDRIVE:
                state, entry_seq, due_ms = ChangeState.RETRYING, row.seq, row.due_ms
            case RecordKind.REPLAY:
                state, entry_seq, due_ms = ChangeState.RETRYING, row.seq, row.due_ms
                where = row.target_seq, row.target_due_ms
                replayed = Change(ChangeState.REPLAYED, *where, 0, row.subject_id)
                key = change_key(row.message_seq, 0)
                writes[Table.CHANGES].append((key, pack_change(replayed)))
            case RecordKind.DEAD:
                state, entry_seq, due_ms = ChangeState.DEAD, target_seq, row.target_due_ms
            case RecordKind.DISCARD:
                key = dead_letter_key(subscription_id, target_seq)
                writes[Table.DEAD_LETTERS].append((key, None))
                return
            case _:
                self._note_definition(row, payload)
                return
        change = Change(state, entry_seq, due_ms, row.attempt, row.subject_id)
        if row.kind in MOVES:
            subscription_id = 0  # whoever gets it
        key = change_key(row.message_seq, subscription_id)
        writes[Table.CHANGES].append((key, pack_change(change)))
        if row.kind == RecordKind.DEAD:
            key = dead_letter_key(subscription_id, target_seq)
            writes[Table.DEAD_LETTERS].append((key, payload))
        elif row.kind == RecordKind.REDRIVE:
            key = dead_letter_key(subscription_id, target_seq)
            writes[Table.DEAD_LETTERS].append((key, None))

    def _note_definition(self, row: MessageRow, payload: bytes | None) -> None:
        writes = self.writes
        if row.kind == RecordKind.SUBSCRIPTION:
            writes[Table.SUBSCRIPTIONS].append((number_key(row.subscription_id), payload))
            return
        assert payload is not None
        match row.kind:
            case RecordKind.SUBJECT:
                writes[Table.SUBJECTS].append((number_key(row.subject_id), payload))
            case _:
                for table, key, value in self._effect_of(row)(payload):
                    writes[table].append((key, value))

    def _effect_of(self, row: MessageRow) -> Effect:
        try:
            return self._of_parts[RecordKind(row.kind)]
        except (KeyError, ValueError) as error:
            raise UnknownKindError(row.kind, row.seq) from error

    # ── of damage ──────────────────────────────────────────────────────────────────────────────

    def note_damage(self, damage: Damage, now_ms: int) -> None:
        """Keep the name of a damaged place, for `check` and for people (I8)."""
        key = damage_key(damage.path, damage.offset)
        self.writes[Table.DAMAGE].append((key, pack_damage(damage, now_ms)))

    def name_lost_subjects(self) -> None:
        """Give a name to subjects whose record was damaged, so that no other gets their number.

        Nobody can publish under it or subscribe to it; a subscription to `*` gets the messages."""
        known = {parse_number_key(key) for key, _ in self._catalog.scan(Table.SUBJECTS)}
        known |= {parse_number_key(key) for key, _ in self.writes[Table.SUBJECTS]}
        for number in sorted(self._subject_ids - known):
            pair = (number_key(number), lost_subject(number).encode())
            self.writes[Table.SUBJECTS].append(pair)

    def remove_lost_keys(self, lost: Iterable[tuple[int, int]], next_seq: int) -> None:
        """Remove the keys of records that the message log does not hold any more.

        `lost`: first and last seqs of what is damaged in it; it ends before `next_seq`. The catalog
        has such keys where a checkpoint was interrupted. Other records are to get these seqs, so a
        publish with such a key would be answered with the id of a message that is not its own.

        Cost: nothing, or a look at every young key."""
        ahead = self._keys_ahead
        stretches = [*lost, (next_seq, ahead.stop - 1)]
        gone = [range(max(one, ahead.start), min(last + 1, ahead.stop)) for one, last in stretches]
        if any(gone):
            self.writes[Table.KEYS] += [
                (key_hash, None)
                for key_hash, value in self._catalog.scan_recent(Table.KEYS)
                if any(unpack_key_entry(value).seq in seqs for seqs in gone)
            ]
        if ahead:
            self.writes[Table.META].append((KEYS_AHEAD_KEY, None))

    # ── for the checkpoint ─────────────────────────────────────────────────────────────────────

    def commit_keys_ahead(self, filed_seq: int) -> None:
        """Commit all but the last slice of the keys, which stays.

        One transaction with all keys would hold all their pages in memory, unless there are so many
        that the catalog makes a run of them. It notes first how far it may be ahead
        (KEYS_AHEAD_KEY): after a crash `remove_lost_keys` begins there."""
        count = sum(len(part.keys) for part in self.keys)
        if count <= self.keys_slice:
            return
        removed, meta = self.writes[Table.KEYS], self.writes[Table.META]
        if count >= self._catalog.run_keys_min:
            # It may be there of a checkpoint that was tried with fewer.
            meta.append((KEYS_AHEAD_KEY, None))
            return
        columns = ascending(self.keys)
        if len(columns.keys) <= self.keys_slice:
            return  # of keys that are there twice the last one counts
        starts = range(0, len(columns.keys), self.keys_slice)
        parts = [Columns(*(one[at : at + self.keys_slice] for one in columns)) for at in starts]
        ahead = [(KEYS_AHEAD_KEY, pack_checkpoint(filed_seq))]
        first: Writes = {Table.META: ahead, Table.KEYS: removed}
        for part in parts[:-1]:
            self._catalog.commit(first, {Table.KEYS: [part]})
            first = {}
        removed.clear()
        meta.append((KEYS_AHEAD_KEY, None))
        self.keys[:] = parts[-1:]

    def clear(self) -> None:
        """All of it stands in the catalog."""
        self.keys.clear()
        for pairs in self.writes.values():
            pairs.clear()
        self.changed_hours.clear()
        self._subject_ids.clear()


def _payload_of(row: MessageRow, blob: bytes) -> Payload:
    sealed = blob[row.payload_offset : row.payload_offset + row.payload_length]
    return decode_payload(sealed, "messages", 0, row.seq)


def content_digests(rows: Rows) -> NDArray[np.uint64]:
    """For each PUBLISH what tells whether two messages have the same content
    (`delayserver.records.content`): what stands in the row; in an old one and in that of an import,
    where nothing does, length and crc of the payload."""
    lengths = rows["payload_length"].astype(np.uint64) << np.uint64(32)
    digests: NDArray[np.uint64] = lengths | rows["payload_crc"]
    if "target_due_ms" in (rows.dtype.names or ()):
        given = rows["target_due_ms"].astype(np.uint64)
        digests = np.where(given != 0, given, digests)
    return digests
