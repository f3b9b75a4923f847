"""The twelve tables: what is packed is parsed again, and what is no entry is refused."""

import msgspec
import numpy as np
import pytest

from delayserver.parts.heartbeats.records import Heartbeat, heartbeat_key, unpack_heartbeat
from delayserver.parts.imports.records import (
    Archived,
    pack_archived,
)
from delayserver.parts.installed import PARTS
from delayserver.parts.part import checks_of
from delayserver.parts.schedules.records import Schedule, ScheduleState, pack_schedule
from delayserver.parts.sources.records import Source, SourceState, pack_source, pack_source_state
from delayserver.records.message import Payload, encode_payload
from delayserver.records.subscriptions import KafkaTarget, Subscription, encode_subscription
from delayserver.records.tables import (
    CHECKPOINT_KEY,
    CHECKS,
    KEYS_AHEAD_KEY,
    LIVE_KEY,
    UNREADABLE,
    Change,
    ChangeState,
    DeadLetter,
    HourState,
    NotUnderstoodError,
    OnEvent,
    can_be_read,
    change_key,
    change_prefix,
    check_entry,
    damage_key,
    dead_letter_key,
    hour_key,
    number_key,
    pack_cancels,
    pack_change,
    pack_checkpoint,
    pack_damage,
    pack_key_entry,
    pack_watch,
    parse_change_key,
    parse_dead_letter_key,
    parse_hour_key,
    parse_number_key,
    parse_watch_key,
    read_checkpoint,
    read_hour,
    read_hours,
    read_keys_ahead,
    read_live_through_hour,
    read_subjects,
    unpack_change,
    unpack_damage,
    unpack_key_entry,
    unpack_watch,
    watch_key,
)
from delayserver.schedule.expansion import (
    DUPLICATE_DTYPE,
    ImportRecord,
    ImportState,
    import_key,
    pack_import,
    unpack_import,
)
from storage.catalog import Table
from storage.frame import Damage
from tests.world.storage.catalog import MemoryCatalog

MORE = checks_of(PARTS)


@pytest.fixture
def catalog() -> MemoryCatalog:
    return MemoryCatalog()


def test_hours_are_read_as_they_were_written_and_in_order(catalog: MemoryCatalog) -> None:
    states = {hour: HourState(64 * hour, hour, 1, 2, -3, 4) for hour in (500_000, 7, 1 << 31)}
    catalog.commit({Table.HOURS: [(hour_key(hour), s.pack()) for hour, s in states.items()]})
    assert read_hours(catalog) == states
    assert list(read_hours(catalog)) == sorted(states)


def test_an_hour_that_was_written_before_there_was_a_first_seq(catalog: MemoryCatalog) -> None:
    value = HourState(64, 3, 1, 2, 5).pack()[:-8]
    catalog.commit({Table.HOURS: [(hour_key(7), value)]})
    assert read_hour(catalog, 7) == HourState(64, 3, 1, 2, 5, first_seq=0)


def test_without_a_checkpoint_nothing_is_filed(catalog: MemoryCatalog) -> None:
    assert read_checkpoint(catalog) == 0
    catalog.commit({Table.META: [(CHECKPOINT_KEY, pack_checkpoint(1 << 40))]})
    assert read_checkpoint(catalog) == 1 << 40


def test_cancels_are_packed_as_one_by_one() -> None:
    seqs, entries, dues_ms = [5, 1 << 40], [5, 7], [0, 1_700_000_000_123]
    keys, values = pack_cancels(
        np.array(seqs, np.uint64), np.array(entries, np.uint64), np.array(dues_ms, np.int64)
    )
    assert keys == [change_key(seq, 0) for seq in seqs]
    assert values == [
        pack_change(Change(ChangeState.CANCELLED, entry, due_ms, 0, 0))
        for entry, due_ms in zip(entries, dues_ms, strict=True)
    ]


def encode(value: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(value)


SEALED = encode_payload(Payload(b"{}"))
HEARTBEAT = Heartbeat("order-7", 5_000, 3, SEALED)
LETTER = DeadLetter("it answered 500", 1_700_000_000_000, 2, SEALED)
RECORD = ImportRecord("a", 3, [("a.0.part", 64, 3, 1)], bytes(DUPLICATE_DTYPE.itemsize), 1)
IMPORT = ImportState(7, 1_700_000_000_000, RECORD)
ARCHIVED = Archived(64, 40, 9, 2, "abc", "s3://x", 1_700_000_000_000)
SCHEDULE = Schedule("daily", 1, SEALED, "@daily", 0, "UTC", 0)
SOURCE = Source("orders", 1, KafkaTarget("h:9092", "orders"), "delay-until", "delays")
DAMAGED = Damage("schedule/x", 64, 128, "a checksum", torn=False, first_seq=3, last_seq=4)

ENTRIES = {
    Table.META: [
        (CHECKPOINT_KEY, pack_checkpoint(7)),
        (KEYS_AHEAD_KEY, pack_checkpoint(9)),
        (LIVE_KEY, hour_key(500_000)),
    ],
    Table.HOURS: [(hour_key(500_000), HourState(64, 1, 0, 7, 0, 7).pack())],
    Table.KEYS: [(bytes(range(16)), pack_key_entry(7, 1_700_000_000_000, 1 << 63))],
    Table.CHANGES: [(change_key(7, 2), pack_change(Change(ChangeState.DEAD, 9, 5, 3, 1)))],
    Table.SUBJECTS: [(number_key(1), "auftrag.über".encode())],
    Table.SUBSCRIPTIONS: [
        (number_key(2), encode_subscription(Subscription(2, "hook", "a", "webhook", 0)))
    ],
    Table.DEAD_LETTERS: [(dead_letter_key(2, 9), encode(LETTER))],
    Table.WATCHES: [(watch_key("order 1", 7), pack_watch(5, OnEvent.FIRE))],
    Table.HEARTBEATS: [(heartbeat_key("order-7"), encode(HEARTBEAT))],
    Table.IMPORTS: [(import_key("a"), pack_import(IMPORT))],
    Table.ARCHIVES: [(hour_key(500_000), pack_archived(ARCHIVED))],
    Table.SCHEDULES: [(b"daily", pack_schedule(SCHEDULE))],
    Table.SCHEDULE_STATES: [(b"daily", ScheduleState(9, 7, 1, 2).pack())],
    Table.SOURCES: [(b"orders", pack_source(SOURCE))],
    Table.SOURCE_STATES: [(b"orders", pack_source_state(SourceState(9, 7, 1, positions={0: 5})))],
    Table.DAMAGE: [(damage_key(DAMAGED.path, DAMAGED.offset), pack_damage(DAMAGED, 11))],
}


@pytest.mark.parametrize("table", Table)
def test_every_table_is_checked(table: Table) -> None:
    assert table in CHECKS or table in MORE
    for key, value in ENTRIES[table]:
        check_entry(table, key, value, MORE)
        assert can_be_read(table, key, value, MORE)
        # Only the tables whose keys say what the value says again know another key.
        says_nothing = (Table.SUBJECTS, Table.SCHEDULE_STATES, Table.SOURCE_STATES)
        assert not can_be_read(table, key + b"x", value, MORE) or table in says_nothing
        if table is not Table.SUBJECTS:
            assert not can_be_read(table, key, value[:-1], MORE)
            assert not can_be_read(table, key, b"", MORE)


@pytest.mark.parametrize(
    ("table", "key", "value"),
    [
        (Table.META, b"another", bytes(8)),
        (Table.CHANGES, change_key(7, 2), pack_change(Change(99, 9, 5, 3, 1))),
        (Table.SUBJECTS, number_key(1), b"\xff"),
        (Table.SUBJECTS, b"1", b"orders"),
        (Table.SUBSCRIPTIONS, number_key(3), ENTRIES[Table.SUBSCRIPTIONS][0][1]),
        (Table.DEAD_LETTERS, dead_letter_key(2, 9), encode(DeadLetter("x", 1, 1, b"no seal"))),
        (Table.WATCHES, watch_key("order 1", 7), pack_watch(5, 7)),
        (Table.HEARTBEATS, heartbeat_key("another"), encode(HEARTBEAT)),
        (Table.HEARTBEATS, heartbeat_key("order-7"), encode(Heartbeat("order-7"))),
        (Table.IMPORTS, import_key("b"), pack_import(IMPORT)),
        (Table.SCHEDULES, b"weekly", pack_schedule(SCHEDULE)),
        (
            Table.SCHEDULES,
            b"daily",
            pack_schedule(msgspec.structs.replace(SCHEDULE, payload=b"no seal")),
        ),
        (Table.SCHEDULE_STATES, b"\xff", ScheduleState(9, 7, 1, 2).pack()),
        (Table.SOURCES, b"invoices", pack_source(SOURCE)),
        (
            Table.SOURCE_STATES,
            b"orders",
            pack_source_state(SourceState(9, 7, 1, positions={0: -1})),
        ),
        (
            Table.IMPORTS,
            import_key("a"),
            pack_import(ImportState(7, 0, msgspec.structs.replace(RECORD, duplicates=b"short"))),
        ),
        (Table.DAMAGE, damage_key(DAMAGED.path, 65), pack_damage(DAMAGED, 11)),
    ],
)
def test_what_is_no_entry_is_refused(table: Table, key: bytes, value: bytes) -> None:
    with pytest.raises(UNREADABLE):
        check_entry(table, key, value, MORE)
    assert not can_be_read(table, key, value, MORE)


def newer(value: bytes) -> bytes:
    """With one element more."""
    return msgspec.msgpack.encode([*msgspec.msgpack.decode(value), "more"])


NO_SUBJECT = Subscription(2, "hook", "two words", "webhook", 0)
NOT_UNDERSTOOD = [
    (Table.SUBSCRIPTIONS, number_key(2), encode_subscription(NO_SUBJECT)),
    (Table.HEARTBEATS, heartbeat_key("order-7"), newer(encode(HEARTBEAT))),
    (Table.SCHEDULES, b"daily", pack_schedule(msgspec.structs.replace(SCHEDULE, every_ms=1000))),
    (Table.SCHEDULES, b"daily", pack_schedule(msgspec.structs.replace(SCHEDULE, catch_up=99))),
    (Table.SCHEDULE_STATES, b"daily", ScheduleState(9, 7, 1, 2).pack().ljust(130, b"x")),
    (Table.SOURCES, b"orders", pack_source(msgspec.structs.replace(SOURCE, on_error=99))),
    (Table.SOURCE_STATES, b"orders", newer(encode(SourceState(9, 7, 1)))),
]


@pytest.mark.parametrize(("table", "key", "value"), NOT_UNDERSTOOD)
def test_what_a_newer_server_wrote_is_no_damage(table: Table, key: bytes, value: bytes) -> None:
    """A repair keeps it."""
    with pytest.raises(NotUnderstoodError):
        check_entry(table, key, value, MORE)
    assert can_be_read(table, key, value, MORE)


def test_keys_come_back() -> None:
    assert parse_hour_key(hour_key(500_000)) == 500_000
    assert parse_number_key(number_key(1 << 31)) == 1 << 31
    assert parse_change_key(change_key(1 << 40, 7)) == (1 << 40, 7)
    assert change_key(1 << 40, 7).startswith(change_prefix(1 << 40))
    assert parse_dead_letter_key(dead_letter_key(7, 1 << 40)) == (7, 1 << 40)
    assert dead_letter_key(7, 1 << 40).startswith(number_key(7))
    assert parse_watch_key(watch_key("schlüssel", 1 << 40)) == ("schlüssel", 1 << 40)


def test_values_come_back() -> None:
    change = Change(ChangeState.MOVED, 9, 5, 3, 1)
    assert unpack_change(pack_change(change)) == change
    entry = unpack_key_entry(pack_key_entry(7, 5, 1 << 63))
    assert (entry.seq, entry.due_ms, entry.digest) == (7, 5, 1 << 63)
    assert unpack_watch(pack_watch(5, OnEvent.FIRE)) == (5, OnEvent.FIRE)
    assert unpack_heartbeat(encode(HEARTBEAT)) == HEARTBEAT
    assert unpack_import(pack_import(IMPORT)) == IMPORT
    found = unpack_damage(pack_damage(DAMAGED, 11))
    assert (found.path, found.offset, found.reason, found.found_ms) == (
        DAMAGED.path,
        DAMAGED.offset,
        DAMAGED.reason,
        11,
    )


def test_whole_tables_are_read(catalog: MemoryCatalog) -> None:
    assert (read_keys_ahead(catalog), read_live_through_hour(catalog)) == (0, -1)
    catalog.commit(ENTRIES)
    assert (read_keys_ahead(catalog), read_live_through_hour(catalog)) == (9, 500_000)
    assert read_subjects(catalog) == {1: "auftrag.über"}
