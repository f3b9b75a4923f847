"""The sequencer: decisions are taken once, here, in one order, and then logged.

    append ──▶ the next seq ──▶ a row in the open group ──▶ (committer)
                          └───▶ overlays: keys, changes, removed rows ──▶ catalog, at a checkpoint

It gives every record its `seq`, the one total order of the shard, and keeps the open group that the
committer will write next. The change that a record makes shows in an overlay at once, so that the
next request is decided on top of it; a look-up goes overlay, then catalog. No request is answered
before the group is durable.

Each change leaves in its group how to undo it. When the disk is full, the groups that were not
written are rolled back in reverse order, as if they had never been asked for: else a publish that
was refused would go on holding its key. A failed sync is never rolled back (I9), since it is
unknown which bytes of it a restart will find.

Cost: about 2 µs per record, 0.2 µs where many publishes are appended together.
Threads: belongs to the event loop. A closed group is handed over and not touched again.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from delayserver.decisions.group import Group
from delayserver.decisions.imported_keys import ImportedKeys
from delayserver.decisions.overlay import Overlay
from delayserver.decisions.packing import MESSAGE_ROW, Publishes, pack_cancels, pack_publishes
from delayserver.records.tables import (
    CHANGE_KEY,
    NO_ENTRY,
    Change,
    ChangeState,
    KeyEntry,
    change_prefix,
    dead_letter_key,
    pack_key_entry,
    unpack_change,
    unpack_key_entry,
)
from storage.catalog import Catalog, Table
from storage.frame import CRC_BYTES, seal, seal_many, sealed_crc
from storage.rows import NO_KEY, RecordKind, is_among

_TAKES_OUT = frozenset((RecordKind.CANCEL, RecordKind.MOVE, RecordKind.FIRE))


class Sequencer:
    """Assigns seqs, fills the open group, answers from overlay and catalog."""

    def __init__(self, catalog: Catalog, *, next_seq: int, subjects: dict[str, int]) -> None:
        self._view = catalog.view()
        # Values as they will stand in the catalog: one object for a key, and not a struct of three.
        self._keys: Overlay[bytes, bytes] = Overlay()
        self._changes: Overlay[int, dict[int, Change] | int] = Overlay()
        self._removed: Overlay[int, int] = Overlay()
        self._imported: ImportedKeys | None = None
        self.rolled_back_total = 0
        """How often decisions were undone."""
        self.next_seq = next_seq
        self.subjects = subjects
        self.subject_names = {number: name for name, number in subjects.items()}
        self.group = Group(next_seq)

    # ── records ────────────────────────────────────────────────────────────────────────────────

    def append(
        self,
        kind: RecordKind,
        *,
        due_ms: int = 0,
        message_seq: int = 0,
        target_seq: int = 0,
        target_due_ms: int = 0,
        key_hash: bytes = NO_KEY,
        subject_id: int = 0,
        subscription_id: int = 0,
        payload: bytes = b"",
        attempt: int = 0,
        flags: int = 0,
    ) -> int:
        """Put one record into the open group; returns its seq. `payload` is sealed."""
        group = self.group
        seq = self.next_seq
        self.next_seq = seq + 1
        group.count += 1
        group.rows.append(
            MESSAGE_ROW.pack(
                seq,
                due_ms,
                message_seq or seq,
                target_seq,
                target_due_ms,
                key_hash,
                subject_id,
                subscription_id,
                group.payload_bytes,
                len(payload),
                sealed_crc(payload) if payload else 0,
                attempt,
                kind,
                flags,
            )
        )
        if payload:
            group.payloads.append(payload)
            group.payload_bytes += len(payload)
        if target_seq and kind in _TAKES_OUT:
            group.undo.append(self._removed.put(seq, target_seq, seq))
        return seq

    def append_publishes(self, publishes: Publishes) -> int:
        """Put many records of kind PUBLISH into the open group; returns the seq of the first."""
        group, first_seq, payloads = self.group, self.next_seq, publishes.payloads
        count = len(payloads)
        group.rows.append(pack_publishes(publishes, first_seq, group.payload_bytes))
        group.payloads += seal_many(payloads, publishes.crcs)
        group.payload_bytes += sum(map(len, payloads)) + CRC_BYTES * count
        group.count += count
        self.next_seq = first_seq + count
        return first_seq

    def append_cancels(self, message_seqs: NDArray[np.uint64], dues_ms: NDArray[np.int64]) -> None:
        """Put a record of kind CANCEL into the open group for each message, which waits where its
        id says and has not changed before; the overlays show it."""
        group, count = self.group, len(message_seqs)
        first_seq, last_seq = self.next_seq, self.next_seq + count - 1
        group.rows.append(pack_cancels(message_seqs, dues_ms, first_seq, group.payload_bytes))
        group.count += count
        self.next_seq = last_seq + 1
        seqs = message_seqs.tolist()
        removed = dict(zip(seqs, range(first_seq, last_seq + 1), strict=True))
        # For each message only its due time: see `changes`.
        changes = dict(zip(seqs, dues_ms.tolist(), strict=True))
        group.undo.append(self._removed.put_many(last_seq, removed))
        group.undo.append(self._changes.put_many(last_seq, changes))

    def append_import(self, count: int, payload: bytes, keys: ImportedKeys) -> int:
        """Put the record of an import into the open group, as its last; returns its first seq.

        The group has to be closed next. The keys are seen from now on. The part `imports` calls
        this; the sequencer has it because an import takes a seq for each of its rows."""
        group = self.group
        assert not group.import_count and count > 0
        first_seq = self.append(RecordKind.IMPORT, payload=payload)
        self.next_seq = first_seq + count
        group.import_count = count
        before, self._imported = self._imported, keys
        keys.first_seq, keys.last_seq = first_seq, first_seq + count - 1

        def undo() -> None:
            self._imported = before

        group.undo.append(undo)
        return first_seq

    def close_group(self, now_ms: int) -> Group:
        """Take the open group away, to be committed; a new one is open."""
        self.refresh()
        group, self.group = self.group, Group(self.next_seq)
        group.created_ms = now_ms
        return group

    def roll_back(self, groups: list[Group]) -> None:
        """Undo groups that could not be written, the newest last in `groups`.

        In reverse order: the last value hides the one that stood there before, and gives it
        back."""
        for group in reversed(groups):
            for undo in reversed(group.undo):
                undo()
        self.rolled_back_total += 1
        self.next_seq = groups[0].first_seq
        self.group = Group(self.next_seq)

    def prune(self, through_seq: int) -> list[dict[Any, Any]]:
        """The catalog holds everything up to `through_seq`. Returns what is forgotten, as
        `Overlay.prune` does."""
        self.refresh()
        gone: list[dict[Any, Any]] = [*self._keys.prune(through_seq)]
        gone += self._changes.prune(through_seq)
        gone += self._removed.prune(through_seq)
        if self._imported is not None and self._imported.last_seq <= through_seq:
            self._imported = None
        return gone

    @property
    def fresh_keys(self) -> Overlay[bytes, bytes]:
        """Keys that changed since the last checkpoint, and their messages now, packed."""
        return self._keys

    def refresh(self) -> None:
        """Look at the newest state of the catalog from now on.

        Call it often: while a reader looks at the past, the catalog grows."""
        self._view.refresh()

    @property
    def removed(self) -> Overlay[int, int]:
        """Schedule rows whose removal was decided and may not be filed yet; by which record."""
        return self._removed

    # ── subjects ───────────────────────────────────────────────────────────────────────────────

    def subject_id(self, name: str) -> int:
        """The number of a subject; a new one is recorded in the open group."""
        number = self.subjects.get(name)
        if number is not None:
            return number
        # They stand in the order of their numbers.
        number = next(reversed(self.subject_names), 0) + 1
        self.append(RecordKind.SUBJECT, subject_id=number, payload=seal(name.encode()))
        self.subjects[name] = number
        self.subject_names[number] = name

        def undo() -> None:
            del self.subjects[name]
            del self.subject_names[number]

        self.group.undo.append(undo)
        return number

    # ── keys and changes ───────────────────────────────────────────────────────────────────────

    def key(self, key_hash: bytes) -> KeyEntry | None:
        """The message that a key stands for."""
        value = self._keys.get(key_hash)
        if self._imported is not None:
            found = self._imported.get(key_hash)
            if found is not None and (value is None or unpack_key_entry(value).seq < found[0]):
                return KeyEntry(*found)
        if value is None:
            value = self._view.get(Table.KEYS, key_hash)
        return None if value is None else unpack_key_entry(value)

    def under_keys(
        self, key_hashes: Sequence[bytes]
    ) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Seq and due time of the message that each key stands for; seq 0: there is none."""
        if self._imported is not None:
            found = {key_hash: self.key(key_hash) for key_hash in key_hashes}
            values = {
                key_hash: pack_key_entry(one.seq, one.due_ms, one.digest)
                for key_hash, one in found.items()
                if one is not None
            }
        else:
            values = self._keys.get_many(key_hashes)
            if len(values) < len(key_hashes):
                others = [one for one in key_hashes if one not in values] if values else key_hashes
                values |= self._view.get_many(Table.KEYS, others)
        packed = b"".join([values.get(one, NO_ENTRY) for one in key_hashes])
        columns = np.frombuffer(packed, ">u8").reshape(-1, 3)
        return columns[:, 0].astype(np.uint64), columns[:, 1].astype(np.int64)

    def put_key(self, seq: int, key_hash: bytes, entry: KeyEntry) -> None:
        """Record `seq` of the open group made the key stand for `entry`."""
        value = pack_key_entry(entry.seq, entry.due_ms, entry.digest)
        self.group.undo.append(self._keys.put(seq, key_hash, value))

    def has_any_key(self, key_hashes: Sequence[bytes]) -> bool:
        """Whether any of the keys stands for a message, in one look."""
        if self._keys.has_any(key_hashes):
            return True
        imported = self._imported
        if imported is not None and any(imported.get(one) is not None for one in key_hashes):
            return True
        return bool(self._view.get_many(Table.KEYS, key_hashes))

    def put_keys(self, seq: int, values: dict[bytes, bytes]) -> None:
        """Records up to `seq` of the open group made each key, by its hash, stand for a message:
        values as `pack_key_values` makes them."""
        self.group.undo.append(self._keys.put_many(seq, values))

    def changes(self, message_seq: int) -> dict[int, Change]:
        """Where a message is now, by subscription (0: the message itself)."""
        known = self._changes.get(message_seq)
        if isinstance(known, int):
            return {0: Change(ChangeState.CANCELLED, message_seq, known, 0, 0)}
        if known is not None:
            return known
        prefix = change_prefix(message_seq)
        changes: dict[int, Change] = {}
        for key, value in self._view.scan(Table.CHANGES, prefix):
            subscription_id, change = CHANGE_KEY.unpack(key)[1], unpack_change(value)
            if change.state == ChangeState.DEAD:
                letter_key = dead_letter_key(subscription_id, change.entry_seq)
                if self._view.get(Table.DEAD_LETTERS, letter_key) is None:
                    change = msgspec.structs.replace(change, state=ChangeState.DISCARDED)
            changes[subscription_id] = change
        return changes

    def unchanged(self, message_seqs: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Which of the messages, `message_seqs` ascending, never changed: they are where their ids
        say. Shape: that of `message_seqs`."""
        data = message_seqs.astype(">u8").tobytes()
        prefixes = [data[at : at + 8] for at in range(0, len(data), 8)]
        changed = {
            int.from_bytes(prefix, "big") for prefix in self._view.prefixes(Table.CHANGES, prefixes)
        }
        changed.update(self._changes.get_many(message_seqs.tolist()))
        if not changed:
            return np.ones(len(message_seqs), np.bool_)
        return ~is_among(message_seqs, np.fromiter(changed, np.uint64, len(changed)))

    def has_fresh_change(self, message_seq: int) -> bool:
        """Whether the message changed since the last checkpoint."""
        return self._changes.get(message_seq) is not None

    def put_change(
        self,
        seq: int,
        message_seq: int,
        subscription_id: int,
        change: Change | None,
        known: Mapping[int, Change] | None = None,
    ) -> None:
        """Record `seq` of the open group changed where a message is.

        `known`: the value that `changes` has for it, where the caller has it."""
        known = dict(self.changes(message_seq) if known is None else known)
        if change is None:
            known.pop(subscription_id, None)
        else:
            known[subscription_id] = change
        self.group.undo.append(self._changes.put(seq, message_seq, known))
