"""The sixteen tables of the catalog: keys, values, and whether an entry is one of its table.

The catalog (`storage.catalog`) knows bytes alone. The meaning of the bytes of each table stands
here, table by table, and nowhere else: replay writes them; recovery, check, repair and the pipeline
read them; FORMAT.md describes them.

    META            how far the logs are filed                        names
    HOURS           the extent of each hour's schedule file           hour
    KEYS            which message a key stands for                    key hash
    CHANGES         where a message is, if not where its id says      message seq, subscription
    SUBJECTS        names                                             number
    SUBSCRIPTIONS   definitions                                       number
    DEAD_LETTERS    deliveries that were given up, and why            subscription, schedule row
    WATCHES         which messages an event completes                 watch key, message seq
    HEARTBEATS      the message to publish if a renewal does not come key
    SCHEDULES       definitions that publish again and again          name
    SCHEDULE_STATES when each of them runs next, and ran last         name
    SOURCES         topics that messages are taken from               name
    SOURCE_STATES   how far each of them is                           name
    DAMAGE          places that a start found damaged                 path, offset

Ten of them follow from no hour file: `records.definitions`.

A section has the key of its table, the value, `pack_…` and its inverse `parse_…` or `unpack_…`, and
the rules by which `check_entry` judges an entry.

Cost: less than a microsecond per entry. Threads: functions without state.
"""

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from delayserver.records.direct import DIRECT_FIRST_ID, is_direct
from delayserver.records.message import Payload, decode_payload
from delayserver.records.subscriptions import DIRECT, StandIn, Subscription, decode_subscription
from delayserver.records.understanding import Understanding, parts_of
from storage.buckets import DAY_HOURS, is_day, places_of, start_ms
from storage.catalog import Catalog, Table
from storage.definitions_log import DefinitionsPlace
from storage.directory import CATALOG_DIRECTORY
from storage.errors import DamageError
from storage.frame import Damage
from storage.key_runs import RUNS_KEY, unpack_runs
from storage.replicated.log import (
    OFFICE_KEY,
    OWNER_KEY,
    SEIZED_KEY,
    SETTLED_KEY,
    office_of,
    owner_of,
    seized_of,
    settled_place_of,
)
from storage.replicated.office import OfficeState
from storage.rows import HOUR_MS, NO_KEY

T = TypeVar("T", bound=msgspec.Struct)


def must(condition: bool, otherwise: str) -> None:
    """Raises ValueError(otherwise) unless `condition` holds."""
    if not condition:
        raise ValueError(otherwise)


class NotUnderstoodError(ValueError):
    """An entry is whole, and stands still on this server; see `records.understanding`."""


def whole(kind: Understanding[T], value: bytes) -> tuple[T, str]:
    """A definition or its stand-in, and why it is not understood. Raises ValueError if it is
    damaged."""
    definition, problem = kind.read(value)
    must(not problem or kind.is_whole(value), problem)
    return definition, problem


def must_be_understood(problem: str) -> None:
    """Raises NotUnderstoodError(problem) unless that is empty."""
    if problem:
        raise NotUnderstoodError(problem)


def _must_be_long(key: bytes, length: int) -> None:
    must(len(key) == length, "a key of another length")


_NUMBER = struct.Struct(">I")


def number_key(number: int) -> bytes:
    """The key of a subject or a subscription, from its number."""
    return _NUMBER.pack(number)


def parse_number_key(key: bytes) -> int:
    """The number in a key of a subject or a subscription. Raises struct.error."""
    number: int = _NUMBER.unpack(key)[0]
    return number


# ── META ─────────────────────────────────────────────────────────────────────────────────────────

CHECKPOINT_KEY = b"checkpoint"
DEFINITIONS_KEY = b"definitions"
KEYS_AHEAD_KEY = b"keys_ahead"
LIVE_KEY = b"live_through_hour"

_CHECKPOINT_VALUE = struct.Struct(">Q")
_DEFINITIONS_VALUE = struct.Struct(">QQQ")


def pack_checkpoint(seq: int) -> bytes:
    """The value of CHECKPOINT_KEY, and of KEYS_AHEAD_KEY."""
    return _CHECKPOINT_VALUE.pack(seq)


def parse_checkpoint(value: bytes) -> int:
    """The seq in a value of CHECKPOINT_KEY or KEYS_AHEAD_KEY. Raises struct.error."""
    seq: int = _CHECKPOINT_VALUE.unpack(value)[0]
    return seq


def read_checkpoint(catalog: Catalog) -> int:
    """The seq up to which every effect is durable."""
    value = catalog.get(Table.META, CHECKPOINT_KEY)
    return parse_checkpoint(value) if value else 0


def read_keys_ahead(catalog: Catalog) -> int:
    """The seq up to which the table KEYS may be ahead of the checkpoint; 0: it is not."""
    value = catalog.get(Table.META, KEYS_AHEAD_KEY)
    return parse_checkpoint(value) if value else 0


def read_live_through_hour(catalog: Catalog) -> int:
    """The newest hour that was ever in the wheel; -1: none was. Its value is that of `hour_key`."""
    value = catalog.get(Table.META, LIVE_KEY)
    return parse_hour_key(value) if value else -1


def pack_definitions_place(place: DefinitionsPlace) -> bytes:
    """The value of DEFINITIONS_KEY."""
    return _DEFINITIONS_VALUE.pack(*place)


def parse_definitions_place(value: bytes) -> DefinitionsPlace:
    """The place in a value of DEFINITIONS_KEY. Raises struct.error."""
    return DefinitionsPlace(*_DEFINITIONS_VALUE.unpack(value))


def read_definitions_place(catalog: Catalog) -> DefinitionsPlace | None:
    """How much of the definitions log the checkpoint covers; None: there is no checkpoint, or it
    was made before there was such a log."""
    value = catalog.get(Table.META, DEFINITIONS_KEY)
    return parse_definitions_place(value) if value else None


def read_office(catalog: Catalog) -> OfficeState:
    """Where the checkpoint stands in the log of a shard that has replicas."""
    return office_of(catalog.get(Table.META, OFFICE_KEY))


def read_owner_address(catalog: Catalog) -> str:
    """Where the owner of a shard that has replicas is reached; empty: that is not known."""
    return owner_of(catalog.get(Table.META, OWNER_KEY))


def read_seized(catalog: Catalog) -> tuple[int, ...]:
    """When a shard that has replicas was taken from an owner that had not left in order (ascending,
    in ms since 1970)."""
    return seized_of(catalog.get(Table.META, SEIZED_KEY))


def read_settled_place(catalog: Catalog) -> int:
    """How far the dispatch logs have the settled deliveries of the log that all replicas share."""
    return settled_place_of(catalog.get(Table.META, SETTLED_KEY))


def _check_meta(key: bytes, value: bytes) -> None:
    parse: Callable[[bytes], object] | None = {
        CHECKPOINT_KEY: parse_checkpoint,
        DEFINITIONS_KEY: parse_definitions_place,
        KEYS_AHEAD_KEY: parse_checkpoint,
        LIVE_KEY: parse_hour_key,
        RUNS_KEY: unpack_runs,
        OFFICE_KEY: office_of,
        OWNER_KEY: owner_of,
        SEIZED_KEY: seized_of,
        SETTLED_KEY: settled_place_of,
    }.get(key)
    must(parse is not None, "a name that is not known")
    assert parse is not None
    parse(value)


# ── HOURS ────────────────────────────────────────────────────────────────────────────────────────

_HOUR_KEY = struct.Struct(">I")
NEVER_MS = 1 << 62
_HOUR_VALUE = struct.Struct(">QQQQqQ")
_DAY_HOURS = struct.Struct(f">{DAY_HOURS}q")


@dataclass(slots=True)
class HourState:
    """The catalog's record of an hour, or of a day that is not split yet."""

    length: int = 0
    """Bytes of the schedule file that are filed."""
    entries: int = 0
    removals: int = 0
    last_entry_seq: int = 0
    retired_ms: int = 0
    """When all its messages were settled; 0: not yet."""
    first_seq: int = 0
    """The first seq of its rows; 0: not known. An hour that was deleted and came back (a clock that
    was set back does that) does not hold older rows."""
    by_hour: tuple[int, ...] = ()
    """In a day: entries less removals of each of its hours."""

    def is_over(self, hour: int, now_ms: int, retention_ms: int) -> bool:
        """Whether it is past its retention: from now on it is being deleted."""
        return bool(self.retired_ms) and (hour + 1) * HOUR_MS + retention_ms <= now_ms

    def pack(self) -> bytes:
        """A value of the table HOURS."""
        return _HOUR_VALUE.pack(
            self.length,
            self.entries,
            self.removals,
            self.last_entry_seq,
            self.retired_ms,
            self.first_seq,
        ) + (_DAY_HOURS.pack(*self.by_hour) if self.by_hour else b"")

    @classmethod
    def unpack(cls, value: bytes) -> "HourState":
        """The state in a value of the table HOURS. Raises struct.error."""
        if len(value) == _HOUR_VALUE.size - 8:
            value += bytes(8)  # It was written before there was a last number.
        state = cls(*_HOUR_VALUE.unpack(value[: _HOUR_VALUE.size]))
        if by_hour := value[_HOUR_VALUE.size :]:
            state.by_hour = _DAY_HOURS.unpack(by_hour)
        return state


def hour_key(hour: int) -> bytes:
    """A key of the table HOURS: an hour or a day."""
    return _HOUR_KEY.pack(hour)


def parse_hour_key(key: bytes) -> int:
    """The hour in a key of the table HOURS. Raises struct.error."""
    hour: int = _HOUR_KEY.unpack(key)[0]
    return hour


def parse_hours(pairs: Iterable[tuple[bytes, bytes]]) -> dict[int, HourState]:
    """The whole table HOURS, from its keys and values."""
    return {parse_hour_key(key): HourState.unpack(value) for key, value in pairs}


def first_kept_ms(catalog: Catalog) -> int:
    """When the first hour begins that is kept, as of the last checkpoint: no row that is filed and
    kept is due earlier. One look-up."""
    for key, _ in catalog.scan(Table.HOURS):
        # Hours come before days, and days are far.
        return start_ms(parse_hour_key(key))
    return NEVER_MS


def read_hours(catalog: Catalog) -> dict[int, HourState]:
    """The whole table HOURS: hours and days."""
    return parse_hours(catalog.scan(Table.HOURS))


def read_hour(catalog: Catalog, hour: int) -> HourState | None:
    """The entry of the table HOURS for the rows of an hour: its own, or that of its day."""
    for bucket in places_of(hour):
        value = catalog.get(Table.HOURS, hour_key(bucket))
        if value is not None:
            return HourState.unpack(value)
    return None


def _check_hour(key: bytes, value: bytes) -> None:
    is_of_day = bool(HourState.unpack(value).by_hour)
    must(is_of_day == is_day(parse_hour_key(key)), "counts by hour are of days, and of each")


class Extent(NamedTuple):
    """The extent of an hour's files. They only grow: the same extent is the same content."""

    schedule_bytes: int
    dispatch_bytes: int
    last_seq: int
    """The last seq of its entries. An hour that was deleted and came back has a later one."""


# ── KEYS ─────────────────────────────────────────────────────────────────────────────────────────

_KEY_VALUE = struct.Struct(">QQQ")
NO_ENTRY = bytes(_KEY_VALUE.size)


class KeyEntry(msgspec.Struct, frozen=True, gc=False):
    """The message that a key stands for: the fields of its id, and a digest of its content."""

    seq: int
    due_ms: int
    digest: int


def pack_key_entry(seq: int, due_ms: int, digest: int) -> bytes:
    """A value of the table KEYS, from the fields of a KeyEntry."""
    return _KEY_VALUE.pack(seq, due_ms, digest)


def pack_key_values(
    seqs: Iterable[int], dues_ms: Iterable[int], digests: Iterable[int]
) -> list[bytes]:
    """Values of the table KEYS, one for each seq with its due time and its digest."""
    return list(map(_KEY_VALUE.pack, seqs, dues_ms, digests))


def pack_key_entries(rows: NDArray[np.void], digests: NDArray[np.uint64]) -> NDArray[np.void]:
    """Values of the table KEYS for rows with `seq` and `due_ms` (shape n), and their digests
    (shape n). Returns bytes (void, shape n)."""
    values = np.empty((len(rows), 3), ">u8")
    values[:, 0], values[:, 1], values[:, 2] = rows["seq"], rows["due_ms"], digests
    return values.view(f"V{_KEY_VALUE.size}")[:, 0]


def unpack_key_entry(value: bytes) -> KeyEntry:
    """The entry in a value of the table KEYS. Raises struct.error."""
    return KeyEntry(*_KEY_VALUE.unpack(value))


def _check_key(key: bytes, value: bytes) -> None:
    _must_be_long(key, len(NO_KEY))
    unpack_key_entry(value)


# ── CHANGES ──────────────────────────────────────────────────────────────────────────────────────

CHANGE_KEY = struct.Struct(">QI")
_CHANGE_VALUE = struct.Struct(">BQQHI")
_CHANGE_PREFIX = struct.Struct(">Q")


class ChangeState(IntEnum):
    """Why a message is not where its id says."""

    MOVED = 1
    CANCELLED = 2
    RETRYING = 3
    DEAD = 4
    DISCARDED = 5
    """The delivery is DEAD, and its dead letter was deleted. The catalog never holds this state:
    there a DEAD change without its letter says the same."""
    FIRED = 6
    """The message was moved, and it watches nothing any more, since an event has fired it."""
    REPLAYED = 7
    """The message is where this says, and was settled there; then it was delivered again, or is yet
    to be: it is never again to be cancelled or moved."""


class Change(msgspec.Struct, frozen=True, gc=False):
    """Where a message is now (subscription 0), or its delivery to one subscription.

    If many messages are cancelled each has one until the next checkpoint: the garbage collector
    must not walk over them."""

    state: int
    entry_seq: int
    due_ms: int
    attempt: int
    subject_id: int


def change_key(message_seq: int, subscription_id: int) -> bytes:
    """A key of the table CHANGES."""
    return CHANGE_KEY.pack(message_seq, subscription_id)


def change_prefix(message_seq: int) -> bytes:
    """The prefix of the keys of all changes of a message."""
    return _CHANGE_PREFIX.pack(message_seq)


def parse_change_key(key: bytes) -> tuple[int, int]:
    """Message seq and subscription id."""
    message_seq, subscription_id = CHANGE_KEY.unpack(key)
    return message_seq, subscription_id


def pack_change(change: Change) -> bytes:
    """A value of the table CHANGES."""
    return _CHANGE_VALUE.pack(
        change.state, change.entry_seq, change.due_ms, change.attempt, change.subject_id
    )


def unpack_change(value: bytes) -> Change:
    """The change in a value of the table CHANGES. Raises struct.error."""
    return Change(*_CHANGE_VALUE.unpack(value))


_CHANGE_KEYS = np.dtype([("message_seq", ">u8"), ("subscription_id", ">u4")])
_CHANGE_VALUES = np.dtype(
    [
        ("state", "u1"),
        ("entry_seq", ">u8"),
        ("due_ms", ">u8"),
        ("attempt", ">u2"),
        ("subject_id", ">u4"),
    ]
)
assert (_CHANGE_KEYS.itemsize, _CHANGE_VALUES.itemsize) == (CHANGE_KEY.size, _CHANGE_VALUE.size)


def pack_cancels(
    message_seqs: NDArray[np.uint64],
    entry_seqs: NDArray[np.uint64],
    dues_ms: NDArray[np.int64],
) -> tuple[list[bytes], list[bytes]]:
    """Keys and values of the table CHANGES for messages that were cancelled."""
    keys = np.zeros(len(message_seqs), _CHANGE_KEYS)
    keys["message_seq"] = message_seqs
    values = np.zeros(len(message_seqs), _CHANGE_VALUES)
    values["state"] = ChangeState.CANCELLED
    values["entry_seq"] = entry_seqs
    values["due_ms"] = dues_ms
    return keys.view(f"V{keys.itemsize}").tolist(), values.view(f"V{values.itemsize}").tolist()


def _check_change(key: bytes, value: bytes) -> None:
    _must_be_long(key, CHANGE_KEY.size)
    ChangeState(unpack_change(value).state)


# ── SUBJECTS ─────────────────────────────────────────────────────────────────────────────────────


def read_subjects(catalog: Catalog) -> dict[int, str]:
    """Names of subjects by their numbers."""
    found = ((parse_number_key(key), name) for key, name in catalog.scan(Table.SUBJECTS))
    return {number: _subject_name(number, name) for number, name in found}


def lost_subject(number: int) -> str:
    """A stand-in for a name that is lost: no client can publish or subscribe to it by that."""
    return f"(lost subject {number})"


def _subject_name(number: int, name: bytes) -> str:
    try:
        return name.decode()
    except UnicodeDecodeError:
        return lost_subject(number)


def _check_subject(key: bytes, value: bytes) -> None:
    _must_be_long(key, _NUMBER.size)
    value.decode()


# ── SUBSCRIPTIONS (a value: `records.subscriptions`) ─────────────────────────────────────────────


def read_subscriptions(catalog: Catalog) -> Iterator[Subscription]:
    """All subscriptions, oldest first, deleted ones too."""
    for key, value in catalog.scan(Table.SUBSCRIPTIONS):
        yield decode_subscription(value, parse_number_key(key))


def _check_subscription(key: bytes, value: bytes) -> None:
    must(bool(parts_of(value)), "no fields of a subscription")
    subscription = decode_subscription(value)
    must(parse_number_key(key) == subscription.id, "a key of another number")
    must_be_understood(subscription.problem if isinstance(subscription, StandIn) else "")


# ── DEAD_LETTERS ─────────────────────────────────────────────────────────────────────────────────

_DEAD_KEY = struct.Struct(">IQ")


class DeadLetter(msgspec.Struct, array_like=True, frozen=True):
    """A value of the table DEAD_LETTERS (MessagePack)."""

    reason: str
    died_ms: int
    attempts: int
    payload: bytes
    """The sealed payload of the message, with its origin."""


_DEAD_LETTERS = Understanding(
    DeadLetter, {"reason": "it cannot be read", "died_ms": 0, "attempts": 0, "payload": b""}
)


def dead_letter_key(subscription_id: int, entry_seq: int) -> bytes:
    """A key of the table DEAD_LETTERS."""
    return _DEAD_KEY.pack(subscription_id, entry_seq)


def parse_dead_letter_key(key: bytes) -> tuple[int, int]:
    """Subscription id and entry seq."""
    subscription_id, entry_seq = _DEAD_KEY.unpack(key)
    return subscription_id, entry_seq


def read_dead_letters(
    catalog: Catalog, subscription_id: int, from_seq: int = 0
) -> Iterator[tuple[int, DeadLetter]]:
    """Dead letters of a subscription with the seqs of their schedule rows, from one row on, in the
    order of the rows."""
    first, prefix = dead_letter_key(subscription_id, from_seq), number_key(subscription_id)
    for key, value in catalog.scan(Table.DEAD_LETTERS, first, prefix=prefix):
        yield parse_dead_letter_key(key)[1], _DEAD_LETTERS.read(value)[0]


def read_dead_letter(catalog: Catalog, subscription_id: int, entry_seq: int) -> DeadLetter | None:
    """The dead letter that a schedule row became."""
    value = catalog.get(Table.DEAD_LETTERS, dead_letter_key(subscription_id, entry_seq))
    return None if value is None else _DEAD_LETTERS.read(value)[0]


def read_letter(letter: DeadLetter, entry_seq: int) -> Payload | None:
    """The message of a dead letter; None: it cannot be read."""
    try:
        return decode_payload(letter.payload, CATALOG_DIRECTORY, 0, entry_seq)
    except DamageError:
        return None


def read_dead_letter_owners(catalog: Catalog, name: str) -> list[Subscription]:
    """Subscriptions of that name that were deleted and have left dead letters, oldest first."""
    return [
        one
        for one in read_subscriptions(catalog)
        if one.name == name
        and one.deleted
        and any(True for _ in read_dead_letters(catalog, one.id))
    ]


def count_dead_letters(catalog: Catalog, most: int) -> Iterator[tuple[Subscription, int]]:
    """The subscriptions that have dead letters, deleted or not, and how many, up to `most`; oldest
    first, the direct ones last. One look-up for each of them, and the count."""
    start = b""
    while (found := next(catalog.scan(Table.DEAD_LETTERS, start), None)) is not None:
        subscription_id, _ = parse_dead_letter_key(found[0])
        owner = _read_owner(catalog, subscription_id)
        if owner is not None:
            letters = catalog.scan(Table.DEAD_LETTERS, prefix=number_key(subscription_id))
            yield owner, sum(1 for _ in islice(letters, most))
        start = number_key(subscription_id + 1)


def _read_owner(catalog: Catalog, subscription_id: int) -> Subscription | None:
    if is_direct(subscription_id):
        return DIRECT[subscription_id - DIRECT_FIRST_ID]
    value = catalog.get(Table.SUBSCRIPTIONS, number_key(subscription_id))
    return None if value is None else decode_subscription(value, subscription_id)


def _check_dead_letter(key: bytes, value: bytes) -> None:
    _, entry_seq = parse_dead_letter_key(key)
    sealed = msgspec.msgpack.decode(value, type=DeadLetter).payload
    decode_payload(sealed, CATALOG_DIRECTORY, 0, entry_seq)


# ── WATCHES ──────────────────────────────────────────────────────────────────────────────────────

_WATCH_LENGTH = struct.Struct(">H")
WATCH_SEQ = struct.Struct(">Q")
WATCH_VALUE = struct.Struct(">QB")


class OnEvent(IntEnum):
    """The effect of an event on a message that watches its key."""

    CANCEL = 0
    FIRE = 1


def watch_key(key: str, message_seq: int) -> bytes:
    """A key of the table WATCHES."""
    return watch_prefix(key) + WATCH_SEQ.pack(message_seq)


def watch_prefix(key: str) -> bytes:
    """The prefix of the keys of all messages that watch `key`."""
    data = key.encode()
    return _WATCH_LENGTH.pack(len(data)) + data


def parse_watch_key(key: bytes) -> tuple[str, int]:
    """Watch key and message seq. Raises struct.error, ValueError."""
    (length,) = _WATCH_LENGTH.unpack_from(key)
    if len(key) != _WATCH_LENGTH.size + length + WATCH_SEQ.size:
        raise ValueError("a key of another length")
    text = key[_WATCH_LENGTH.size : -WATCH_SEQ.size].decode()
    return text, WATCH_SEQ.unpack(key[-WATCH_SEQ.size :])[0]


def pack_watch(due_ms: int, on_event: int) -> bytes:
    """A value of the table WATCHES."""
    return WATCH_VALUE.pack(due_ms, on_event)


def unpack_watch(value: bytes) -> tuple[int, OnEvent]:
    """Due time at publish, and the effect of an event, from a value of the table WATCHES.

    Raises struct.error, ValueError."""
    due_ms, on_event = WATCH_VALUE.unpack(value)
    return due_ms, OnEvent(on_event)


def _check_watch(key: bytes, value: bytes) -> None:
    parse_watch_key(key)
    unpack_watch(value)


# ── definitions under names, and their states: tables of parts ──────────────────────────────────


def named_key(name: str) -> bytes:
    """A key of these tables."""
    return name.encode()


def named_writes(
    tables: tuple[Table, Table], name: str, definition: bytes | None, state: bytes | None
) -> Iterator[tuple[Table, bytes, bytes | None]]:
    """The writes (table, key, value or None to delete) by which a record changes a definition and
    its state. `tables`: of definitions, of states."""
    definitions, states = tables
    if not name:
        return  # The record of a newer server says in another way whose it is.
    yield states, named_key(name), state
    if definition is not None or state is None:  # without a state it is over
        yield definitions, named_key(name), definition


# ── DAMAGE ───────────────────────────────────────────────────────────────────────────────────────

_DAMAGE_OFFSET = struct.Struct(">Q")


class KnownDamage(msgspec.Struct, frozen=True):
    """A value of the table DAMAGE (JSON): a damaged place, and when a start found it."""

    path: str
    offset: int
    end: int
    reason: str
    first_seq: int
    last_seq: int
    found_ms: int


def damage_key(path: str, offset: int) -> bytes:
    """A key of the table DAMAGE."""
    return damage_prefix(path) + _DAMAGE_OFFSET.pack(offset)


def damage_prefix(path: str) -> bytes:
    """The prefix of the keys of all damage of a file."""
    return path.encode() + b"\0"


def pack_damage(damage: Damage, found_ms: int) -> bytes:
    """A value of the table DAMAGE."""
    known = KnownDamage(
        damage.path,
        damage.offset,
        damage.end,
        damage.reason,
        damage.first_seq,
        damage.last_seq,
        found_ms,
    )
    return msgspec.json.encode(known)


def unpack_damage(value: bytes) -> KnownDamage:
    """The damage in a value of the table DAMAGE. Raises msgspec.DecodeError."""
    return msgspec.json.decode(value, type=KnownDamage)


def _check_damage(key: bytes, value: bytes) -> None:
    found = unpack_damage(value)
    must(damage_key(found.path, found.offset) == key, "a key of another place")


# ── all of them ──────────────────────────────────────────────────────────────────────────────────

UNREADABLE = (struct.error, ValueError, msgspec.DecodeError, DamageError)
"""The errors that `check_entry`, and any function that parses an entry, raises."""

Checks = Mapping[Table, Callable[[bytes, bytes], None]]

CHECKS: Checks = {
    Table.META: _check_meta,
    Table.HOURS: _check_hour,
    Table.KEYS: _check_key,
    Table.CHANGES: _check_change,
    Table.SUBJECTS: _check_subject,
    Table.SUBSCRIPTIONS: _check_subscription,
    Table.DEAD_LETTERS: _check_dead_letter,
    Table.WATCHES: _check_watch,
    Table.DAMAGE: _check_damage,
}


def check_entry(table: Table, key: bytes, value: bytes, more: Checks) -> None:
    """Check an entry of the catalog by the rules of its table. `more`: the checks of the tables of
    parts. Raises one of UNREADABLE; NotUnderstoodError where it is intact as far as can be
    told, or belongs to a part that this server does not have."""
    rule = CHECKS.get(table) or more.get(table)
    if rule is None:
        raise NotUnderstoodError("this server does not have the part that it belongs to")
    rule(key, value)


def can_be_read(table: Table, key: bytes, value: bytes, more: Checks) -> bool:
    """Whether an entry of the catalog is one of its table, of this version or a newer one. `more`:
    as `check_entry`."""
    try:
        check_entry(table, key, value, more)
    except NotUnderstoodError:
        return True
    except UNREADABLE:
        return False
    return True
