"""The catalog, built again from the logs.

    hours           length and counts of each schedule file
    keys            the newest publish under each key
    changes         the effect of the newest record of a message (and subscription) on it
    watches         the keys that each message watches; a watch that an event has completed is there
                    again, and stays completed
    subjects, subscriptions, dead letters, imports, archives, definitions of parts
                    the definitions log. Where that is damaged, too, the missing names are listed; a
                    number in use is not given again: a subject is `(lost subject N)` then, and a
                    subscription a deleted one

Cost: some 5 µs per row; one pass over the files. Memory: the new catalog. Threads: none.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from delayserver.parts.part import Halves, Parts, Write, effects_of
from delayserver.records.content import content_digest
from delayserver.records.direct import is_direct
from delayserver.records.message import decode_payload, encode_payload, unseal_payload
from delayserver.records.subscriptions import Subscription, encode_subscription
from delayserver.records.tables import (
    CHECKPOINT_KEY,
    LIVE_KEY,
    Change,
    ChangeState,
    HourState,
    change_key,
    hour_key,
    number_key,
    pack_change,
    pack_checkpoint,
    pack_key_entry,
    pack_watch,
    parse_dead_letter_key,
    parse_number_key,
    watch_key,
)
from delayserver.records.tracecontext import TRACE_NAMES
from storage.catalog import Table
from storage.frame import Rows
from storage.rows import FLAG_REMOVAL, FLAG_WATCHES, MOVES, NO_KEY, PUBLISHES, RecordKind

_STATES = {RecordKind.MOVE: ChangeState.MOVED, RecordKind.FIRE: ChangeState.FIRED}
Values = dict[bytes, bytes]
Tables = dict[Table, Values]
_Place = tuple[int, int]
"""Message seq and subscription."""


@dataclass(slots=True)
class Rebuilt:
    """The tables as far as the schedule log knows them."""

    parts: Parts
    subject_ids: set[int] = field(default_factory=set)
    subscription_ids: set[int] = field(default_factory=set)
    _keys: dict[bytes, tuple[int, int, int]] = field(default_factory=dict)
    _changes: dict[_Place, tuple[int, Change]] = field(default_factory=dict)
    """With the seq of the record that made the change."""
    _replayed: dict[int, Change] = field(default_factory=dict)
    """By message: where it was published, if it was delivered again."""
    _watches: Values = field(default_factory=dict)
    _states: dict[tuple[Table, bytes], tuple[int, bytes]] = field(default_factory=dict)
    """The newest state of each definition that a message carries, and the seq of the message."""

    def hour(self) -> Callable[[Rows, bytes], None]:
        """A function to take in one hour: called with rows and payloads of each frame, in order."""
        entries: dict[int, int] = {}
        return lambda rows, blob: self._read(rows, blob, entries)

    def _read(self, rows: Rows, blob: bytes, entries: dict[int, int]) -> None:
        is_entry, effects = (rows["flags"] & FLAG_REMOVAL) == 0, effects_of(self.parts)
        self.subject_ids.update(rows["subject_id"][is_entry].tolist())
        self.subscription_ids.update(rows["subscription_id"].tolist())
        for row, entry in zip(rows, is_entry.tolist(), strict=True):
            seq, message_seq = int(row["seq"]), int(row["message_seq"])
            kind, subscription_id = RecordKind(int(row["kind"])), int(row["subscription_id"])
            due_ms, attempt = int(row["due_ms"]), int(row["attempt"])
            subject_id = int(row["subject_id"])
            if entry:
                start = int(row["payload_offset"])
                sealed = blob[start : start + int(row["payload_length"])]
                entries[seq] = message_seq
                key_hash = bytes(row["key_hash"])
                if int(row["flags"]) & FLAG_WATCHES:
                    self._put_watches(message_seq, due_ms, sealed)
                if kind in effects:
                    self._put_states(seq, effects[kind](unseal_payload(sealed, "schedule", 0, 0)))
                if kind in PUBLISHES:
                    if key_hash != NO_KEY:
                        self._put_key(key_hash, seq, due_ms, published_digest(sealed))
                    continue
                if kind is RecordKind.REPLAY:
                    self._put_replayed(message_seq, subject_id, sealed)
                state = _STATES.get(kind, ChangeState.RETRYING)
                change = Change(state, seq, due_ms, attempt, subject_id)
                whose = 0 if kind in MOVES else subscription_id
                self._put_change((message_seq, whose), seq, change)
                if key_hash != NO_KEY:
                    self._put_moved_key(key_hash, sealed)
                continue
            target_seq = message_seq
            if kind not in (RecordKind.CANCEL, RecordKind.DEAD) or target_seq not in entries:
                continue  # The new entry tells of a move or a retry.
            state = ChangeState.CANCELLED if kind is RecordKind.CANCEL else ChangeState.DEAD
            change = Change(state, target_seq, due_ms, attempt, subject_id)
            self._put_change((entries[target_seq], subscription_id), seq, change)

    def _put_key(self, key_hash: bytes, seq: int, due_ms: int, digest: int) -> None:
        known = self._keys.get(key_hash)
        if known is None or known[0] < seq:
            self._keys[key_hash] = (seq, due_ms, digest)

    def _put_moved_key(self, key_hash: bytes, sealed: bytes) -> None:
        """The publish may have been deleted with its hour: the moved row holds its content."""
        origin = decode_payload(sealed, "schedule", 0, 0).origin
        if origin is not None:
            digest = published_digest(sealed)
            self._put_key(key_hash, origin.message_seq, origin.published_due_ms, digest)

    def _put_watches(self, message_seq: int, due_ms: int, sealed: bytes) -> None:
        payload = decode_payload(sealed, "schedule", 0, 0)
        if payload.origin is not None:
            due_ms = payload.origin.published_due_ms
        if (watch := payload.watch) is not None:
            value = pack_watch(due_ms, watch.on_event)
            self._watches |= {watch_key(key, message_seq): value for key in watch.keys}

    def _put_states(self, seq: int, writes: Iterable[Write]) -> None:
        for table, key, state in writes:
            known = self._states.get((table, key))
            if state is not None and (known is None or known[0] < seq):
                self._states[table, key] = seq, state

    def _put_replayed(self, message_seq: int, subject_id: int, sealed: bytes) -> None:
        origin = decode_payload(sealed, "schedule", 0, 0).origin
        if origin is not None:
            published = message_seq, origin.published_due_ms
            self._replayed[message_seq] = Change(ChangeState.REPLAYED, *published, 0, subject_id)

    def _put_change(self, place: _Place, seq: int, change: Change) -> None:
        known = self._changes.get(place)
        if known is None or known[0] <= seq:
            self._changes[place] = (seq, change)

    # ── the tables ─────────────────────────────────────────────────────────────────────────────

    def keys(self) -> Values:
        """The table KEYS."""
        return {key_hash: pack_key_entry(*entry) for key_hash, entry in self._keys.items()}

    def changes(self) -> Values:
        """The table CHANGES."""
        changes = {place: change for place, (_, change) in self._changes.items()}
        for message_seq, published in self._replayed.items():
            # Where it was moved to, its own row tells.
            where = changes.get((message_seq, 0), published)
            changes[message_seq, 0] = msgspec.structs.replace(
                published, entry_seq=where.entry_seq, due_ms=where.due_ms
            )
        return {change_key(*place): pack_change(change) for place, change in changes.items()}

    def watches(self) -> Values:
        """The table WATCHES."""
        return self._watches

    def mend_parts(self, defined: Tables) -> list[str]:
        """Bring the definitions of parts in `defined` as far as the messages say that carry their
        state, so that no step is made again, and take out those of which a half is lost. Returns
        the losses in words."""
        return [
            loss
            for part in self.parts
            if part.halves is not None and part.halves.states is not None
            for loss in self._mend_halves(part.name, part.halves, part.halves.states, defined)
        ]

    def _mend_halves(self, word: str, halves: Halves, table: Table, defined: Tables) -> list[str]:
        definitions, states = defined[halves.definitions], defined[table]
        for key in definitions:
            found, known = self._states.get((table, key)), states.get(key)
            if found is not None and (known is None or halves.state_seq(known) < found[0]):
                states[key] = found[1]
        return _without_halves(word, definitions, states)


def _without_halves(word: str, definitions: Values, states: Values) -> list[str]:
    lost = definitions.keys() ^ states.keys()
    for key in lost:
        definitions.pop(key, None)
        states.pop(key, None)
    return [f"the {word} {key.decode()!r}: put it again" for key in sorted(lost)]


def published_digest(sealed: bytes) -> int:
    """A digest that tells whether two messages have the same content. A trace, an origin and the
    attempts are no part of it. (If the publisher has written a trace into the headers itself, it
    was a part of the digest; that cannot be told any more.)"""
    payload = decode_payload(sealed, "schedule", 0, 0)
    headers = payload.headers and {
        name: value for name, value in payload.headers.items() if name not in TRACE_NAMES
    }
    bare = msgspec.structs.replace(payload, origin=None, headers=headers or None, history=None)
    return content_digest(bare, encode_payload(bare))


# ── the catalog as a whole ─────────────────────────────────────────────────────────────────────


def rebuild(
    rebuilt: Rebuilt,
    defined: Tables,
    hours: Mapping[int, HourState],
    *,
    checkpoint: int,
    live_through_hour: int,
) -> Tables:
    """All tables, from the schedule log and the definitions log."""
    meta = {CHECKPOINT_KEY: pack_checkpoint(checkpoint)}
    if live_through_hour >= 0:
        meta[LIVE_KEY] = hour_key(live_through_hour)
    return {
        **defined,
        Table.META: meta,
        Table.HOURS: {hour_key(hour): state.pack() for hour, state in hours.items()},
        Table.KEYS: rebuilt.keys(),
        Table.CHANGES: rebuilt.changes(),
        Table.WATCHES: rebuilt.watches(),
    }


def name_what_is_lost(
    defined: Tables, rebuilt: Rebuilt, *, is_damaged: bool
) -> tuple[Tables, list[str]]:
    """Subjects and subscriptions that the schedule log speaks of and `defined` does not hold.

    `is_damaged`: others may be missing, too. Returns the stand-ins for them, and the losses in
    words."""
    nameless = {
        number_key(number): f"(lost subject {number})".encode()
        for number in _missing(defined[Table.SUBJECTS], rebuilt.subject_ids, is_damaged)
    }
    of_letters = {parse_dead_letter_key(key)[0] for key in defined[Table.DEAD_LETTERS]}
    gone = {
        number_key(number): _placeholder(number)
        for number in _missing(
            defined[Table.SUBSCRIPTIONS],
            {one for one in of_letters | rebuilt.subscription_ids if one and not is_direct(one)},
            is_damaged,
        )
    }
    losses = [f"the name of a subject: it is {name.decode()!r} now" for name in nameless.values()]
    losses += [
        f"subscription {number}: make it again (its dead letters: {_lost_name(number)})"
        for number in map(parse_number_key, gone)
    ]
    return {Table.SUBJECTS: nameless, Table.SUBSCRIPTIONS: gone}, losses


def _missing(known: Iterable[bytes], seen: Iterable[int], is_damaged: bool) -> list[int]:
    """Numbers that are not known: those that were seen, and if some may be lost all below them."""
    numbers, wanted = {parse_number_key(key) for key in known}, set(seen)
    if is_damaged:
        wanted |= set(range(1, max([*numbers, *wanted], default=0) + 1))
    return sorted(wanted - numbers)


def _placeholder(number: int) -> bytes:
    """A subscription of which nothing is known but its number, which must not be given again."""
    definition = Subscription(number, _lost_name(number), "*", "pull", 0, deleted=True)
    return encode_subscription(definition)


def _lost_name(number: int) -> str:
    """A name that can be asked for: it is where the dead letters are listed."""
    return f"lost-subscription-{number}"
