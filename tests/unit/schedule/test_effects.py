"""What records mean for the catalog, and how many keys are written to it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from delayserver.decisions.group import Group
from delayserver.parts.schedules.records import (
    Schedule,
    ScheduleChange,
    ScheduleState,
    pack_schedule,
    pack_schedule_change,
)
from delayserver.records.message import Origin, Payload, ScheduledRun, encode_payload
from delayserver.records.subscriptions import encode_subscription
from delayserver.records.tables import (
    Change,
    ChangeState,
    DeadLetter,
    KeyEntry,
    OnEvent,
    dead_letter_key,
    pack_watch,
    parse_dead_letter_key,
    read_checkpoint,
    read_keys_ahead,
    unpack_key_entry,
    watch_key,
)
from delayserver.schedule.effects import content_digests
from storage.catalog import ManyWrites, Table, Writes
from storage.errors import DiskFullError
from storage.frame import Damage, seal
from storage.rows import RecordKind
from tests.unit.fakes import HOUR, START_MS, Disk, Log, records, subscription
from tests.unit.schedule.samples import KEY, NEXT_MS, change_of, rows_of
from tests.world.storage.catalog import MemoryCatalog


def dead_letter(reason: str) -> bytes:
    """As it stands in the catalog."""
    payload = Payload(b"{}", origin=Origin(1, START_MS, 1, START_MS))
    return msgspec.msgpack.encode(DeadLetter(reason, START_MS, 9, encode_payload(payload)))


def test_the_newest_publish_of_a_key_is_the_one_in_the_catalog(disk: Disk, log: Log) -> None:
    log.publish(START_MS, key_hash=KEY)
    log.publish(NEXT_MS, key_hash=KEY, body=b"newer")
    log.publish(NEXT_MS)
    group = log.close()
    disk.file(group)
    disk.replay.checkpoint()
    value = disk.catalog.get(Table.KEYS, KEY)
    assert value is not None
    rows = records(group).rows
    assert unpack_key_entry(value) == KeyEntry(2, NEXT_MS, int(content_digests(rows)[1]))
    assert len(list(disk.catalog.scan(Table.KEYS))) == 1


def test_the_last_step_of_a_schedule_counts_whichever_record_made_it(disk: Disk, log: Log) -> None:
    """A run is a new message besides."""
    states = [ScheduleState(seq, 1, START_MS, START_MS + seq) for seq in (1, 2, 3)]
    packed = pack_schedule(Schedule("s", 1, encode_payload(Payload(b"1")), "@daily", 0, "UTC", 0))

    def change(state: ScheduleState | None, schedule: bytes | None = None) -> None:
        change = ScheduleChange("s", schedule, None if state is None else state.pack())
        payload = seal(pack_schedule_change(change))
        log.sequencer.append(RecordKind.SCHEDULE, payload=payload)

    change(states[0], packed)
    run = ScheduledRun("s", states[1].pack())
    log.sequencer.append(
        RecordKind.RUN,
        due_ms=START_MS,
        subject_id=1,
        key_hash=KEY,
        payload=encode_payload(Payload(b"1", key="s@", run=run)),
    )
    change(states[2])
    disk.file(log.close())
    disk.replay.checkpoint()
    assert dict(disk.catalog.scan(Table.SCHEDULES)) == {b"s": packed}
    assert dict(disk.catalog.scan(Table.SCHEDULE_STATES)) == {b"s": states[2].pack()}
    value = disk.catalog.get(Table.KEYS, KEY)
    assert value is not None and unpack_key_entry(value).seq == 2
    change(None)
    disk.file(log.close())
    disk.replay.checkpoint()
    assert not list(disk.catalog.scan(Table.SCHEDULES))
    assert not list(disk.catalog.scan(Table.SCHEDULE_STATES))


def test_every_kind_of_change_is_in_the_catalog(disk: Disk, log: Log) -> None:
    for _ in range(4):
        log.publish(START_MS)
    log.cancel(1, START_MS)
    move = log.move(2, START_MS, NEXT_MS)
    retry = log.retry(3, START_MS, NEXT_MS, subscription_id=6)
    letter = dead_letter("gone")
    dead: dict[str, Any] = {"message_seq": 4, "target_seq": 4, "subscription_id": 6, "attempt": 9}
    log.sequencer.append(
        RecordKind.DEAD, target_due_ms=START_MS, subject_id=1, payload=seal(letter), **dead
    )
    disk.file(log.close())
    disk.replay.checkpoint()
    assert change_of(disk, 1) == Change(ChangeState.CANCELLED, 1, START_MS, 0, 0)
    assert change_of(disk, 2) == Change(ChangeState.MOVED, move, NEXT_MS, 0, 1)
    assert change_of(disk, 3, 6) == Change(ChangeState.RETRYING, retry, NEXT_MS, 2, 1)
    assert change_of(disk, 4, 6) == Change(ChangeState.DEAD, 4, START_MS, 9, 1)
    assert list(disk.catalog.scan(Table.DEAD_LETTERS)) == [(dead_letter_key(6, 4), letter)]


def test_a_cancel_is_the_last_word_on_a_message(disk: Disk, log: Log) -> None:
    for _ in range(3):
        log.publish(START_MS)
    first = log.move(1, START_MS, NEXT_MS)
    second = log.move(2, START_MS, NEXT_MS)
    log.cancel(first, NEXT_MS, message_seq=1)
    log.cancel(3, START_MS)
    watched = log.sequencer.append(
        RecordKind.CANCEL,
        message_seq=2,
        target_seq=second,
        target_due_ms=NEXT_MS,
        payload=seal(b"event"),
    )
    disk.catalog.commit(
        {Table.WATCHES: [(watch_key("event", 2), pack_watch(START_MS, OnEvent.CANCEL))]}
    )
    disk.file(log.close())
    disk.replay.checkpoint()
    assert watched == 8
    assert change_of(disk, 1) == Change(ChangeState.CANCELLED, first, NEXT_MS, 0, 0)
    assert change_of(disk, 2) == Change(ChangeState.CANCELLED, second, NEXT_MS, 0, 0)
    assert change_of(disk, 3) == Change(ChangeState.CANCELLED, 3, START_MS, 0, 0)
    assert list(disk.catalog.scan(Table.WATCHES)) == []


@pytest.mark.parametrize("kind", [RecordKind.REDRIVE, RecordKind.DISCARD])
def test_a_dead_letter_is_redriven_or_discarded_once(
    disk: Disk, log: Log, kind: RecordKind
) -> None:
    log.publish(START_MS)
    which: dict[str, Any] = {
        "message_seq": 1,
        "target_seq": 1,
        "subject_id": 1,
        "subscription_id": 6,
    }
    letter = seal(dead_letter("gone"))
    log.sequencer.append(RecordKind.DEAD, target_due_ms=START_MS, payload=letter, **which)
    disk.file(log.close())
    disk.replay.checkpoint()
    assert disk.catalog.get(Table.DEAD_LETTERS, dead_letter_key(6, 1)) is not None
    again = log.sequencer.append(
        kind, due_ms=NEXT_MS, payload=encode_payload(Payload(b"{}")), attempt=1, **which
    )
    disk.file(log.close())
    disk.replay.checkpoint()
    assert disk.catalog.get(Table.DEAD_LETTERS, dead_letter_key(6, 1)) is None
    if kind is RecordKind.REDRIVE:
        assert rows_of(disk, HOUR + 1) == [(again, False)]
        change = change_of(disk, 1, 6)
        assert change is not None
        assert (change.state, change.entry_seq) == (ChangeState.RETRYING, again)


def test_subjects_and_subscriptions_are_in_the_catalog(disk: Disk) -> None:
    log = Log(subjects=[])
    log.sequencer.subject_id("order.paid")
    old, new = (encode_subscription(subscription(3, paused=paused)) for paused in (True, False))
    log.sequencer.append(RecordKind.SUBSCRIPTION, subscription_id=3, payload=seal(old))
    log.sequencer.append(RecordKind.SUBSCRIPTION, subscription_id=3, payload=seal(new))
    disk.file(log.close())
    disk.replay.checkpoint()
    assert list(disk.catalog.scan(Table.SUBJECTS)) == [((1).to_bytes(4, "big"), b"order.paid")]
    assert list(disk.catalog.scan(Table.SUBSCRIPTIONS)) == [((3).to_bytes(4, "big"), new)]
    assert disk.schedule.buckets() == []


class Commits(MemoryCatalog):
    """Which tables each transaction wrote to; the one with that number fails once."""

    def __init__(self, *, fails_at: int = -1) -> None:
        super().__init__()
        self.tables: list[set[Table]] = []
        self.fails_at = fails_at

    def commit(self, writes: Writes, many: ManyWrites | None = None) -> None:
        if len(self.tables) == self.fails_at:
            self.fails_at = -1
            raise DiskFullError("commit", "catalog", "full")
        written = {table for table, pairs in writes.items() if pairs}
        self.tables.append(written | {table for table, parts in (many or {}).items() if parts})
        super().commit(writes, many)


def keyed(log: Log, count: int, first: int = 0) -> Group:
    for number in range(first, first + count):
        log.publish(START_MS, key_hash=key_of(number))
    return log.close()


def key_of(number: int) -> bytes:
    """Not in the order of the numbers."""
    return (number * 71 % 256 + 1).to_bytes(16, "big")


def seqs_by_key(catalog: MemoryCatalog) -> dict[bytes, int]:
    return {key: unpack_key_entry(value).seq for key, value in catalog.scan(Table.KEYS)}


@pytest.mark.parametrize("fails_at", range(5))
def test_many_keys_are_recorded_piece_by_piece_and_the_checkpoint_last(
    log: Log, fails_at: int
) -> None:
    disk = Disk(catalog=(catalog := Commits(fails_at=fails_at)))
    disk.replay.effects.keys_slice = 3
    disk.file(keyed(log, 10))
    if fails_at < 4:
        with pytest.raises(DiskFullError):
            disk.replay.checkpoint()
        assert read_checkpoint(catalog) == 0
        assert read_keys_ahead(catalog) == (10 if fails_at else 0)
        assert len(seqs_by_key(catalog)) == 3 * fails_at
        # What is filed meanwhile goes along.
        disk.file(keyed(log, 2, first=10))
    disk.replay.checkpoint()
    count = 10 if fails_at == 4 else 12
    assert read_checkpoint(catalog) == count
    assert read_keys_ahead(catalog) == 0
    assert seqs_by_key(catalog) == {key_of(number): number + 1 for number in range(count)}
    ahead = {Table.META, Table.KEYS}
    assert catalog.tables[0] == ahead
    assert all(tables <= ahead for tables in catalog.tables[:-1])
    assert catalog.tables[-1] == {Table.META, Table.KEYS, Table.HOURS}


def test_few_keys_are_recorded_with_the_checkpoint(log: Log) -> None:
    disk = Disk(catalog=(catalog := Commits()))
    disk.replay.effects.keys_slice = 3
    disk.file(keyed(log, 3))
    disk.replay.checkpoint()
    assert catalog.tables == [{Table.META, Table.KEYS, Table.HOURS}]


def test_a_key_that_is_removed_and_used_again_stays(log: Log) -> None:
    disk = Disk()
    disk.replay.effects.keys_slice = 1
    disk.file(keyed(log, 3))
    disk.replay.checkpoint()
    disk.replay.effects.writes[Table.KEYS] += [
        (key, None) for key, _ in disk.catalog.scan(Table.KEYS)
    ]
    disk.file(keyed(log, 2))
    disk.replay.checkpoint()
    assert seqs_by_key(disk.catalog) == {key_of(0): 4, key_of(1): 5}


def test_what_is_removed_goes_also_when_few_keys_came_often(log: Log) -> None:
    disk = Disk()
    disk.replay.effects.keys_slice = 1
    disk.file(keyed(log, 2))
    disk.replay.checkpoint()
    disk.replay.effects.writes[Table.KEYS].append((key_of(0), None))
    for _ in range(2):
        disk.file(keyed(log, 1, first=5))
    disk.replay.checkpoint()
    assert seqs_by_key(disk.catalog) == {key_of(1): 2, key_of(5): 4}


def test_damage_is_kept_in_the_catalog_once(disk: Disk) -> None:
    damage = Damage("schedule/x", 64, 128, "torn apart", torn=False, first_seq=3, last_seq=5)
    disk.replay.effects.note_damage(damage, START_MS)
    disk.replay.effects.note_damage(damage, START_MS)
    disk.replay.checkpoint()
    [(_, value)] = disk.catalog.scan(Table.DAMAGE)
    assert b"torn apart" in value
    assert b'"first_seq":3' in value


def test_keys_and_values_of_the_catalog_come_back_as_they_were() -> None:
    assert parse_dead_letter_key(dead_letter_key(7, 1 << 40)) == (7, 1 << 40)
    assert dead_letter_key(1, 9) < dead_letter_key(2, 1)
    letter = DeadLetter("gone", START_MS, 3, b"payload")
    assert letter.payload == b"payload"
