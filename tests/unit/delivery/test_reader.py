"""The reader: bodies of rows in order, each checked; a damaged one is named and left out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from delayserver.delivery import reader as reader_module
from delayserver.delivery.handout import Handout
from delayserver.records.message import DueDelivery, Payload, ScheduleEntry, encode_payload
from delayserver.schedule.wheel_rows import ROUTE_SUBSCRIPTION, FiredRows
from storage.errors import DamageError
from storage.frame import Rows
from storage.hour_log import HourLog
from storage.notes import Note, encode_note
from storage.rows import HOUR_MS
from tests.unit.fakes import (
    HOUR,
    START_MS,
    SUBJECT,
    Disk,
    Log,
    dispatch_row,
    place_of,
    subscription,
)
from tests.world.storage.files import SimulatedFiles

ONE = subscription(3)


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def disk(log: Log) -> Disk:
    """Five messages in two frames, all live."""
    disk = Disk()
    disk.replay.snapshot(HOUR)
    for number in range(1, 4):
        log.publish(START_MS + number, body=b"body %d" % number)
    return disk


def file(disk: Disk, log: Log) -> Rows:
    [(hour, rows)] = disk.file(log.close()).live
    assert hour == HOUR
    return rows


def read(
    disk: Disk,
    rows: Rows,
    unfiled: dict[int, bytes] | None = None,
    attempts: dict[int, int] | None = None,
):
    return disk.reader.deliveries(
        Handout(ONE.id, [FiredRows(HOUR, rows)], attempts=attempts or {}), unfiled or {}
    )


def bodies(deliveries: Sequence[DueDelivery]) -> list[tuple[int, bytes]]:
    return [(one.entry.seq, one.payload.body) for one in deliveries]


def test_a_row_becomes_a_delivery(disk: Disk, log: Log) -> None:
    rows = file(disk, log)
    first, *_ = read(disk, rows)
    assert first.entry == ScheduleEntry(1, START_MS + 1)
    assert (first.origin.message_seq, first.origin.published_due_ms) == (1, START_MS + 1)
    assert (first.origin.subject_id, first.subject) == (1, SUBJECT)
    assert (first.attempt, first.subscription_id) == (1, ONE.id)
    assert first.payload == Payload(b"body 1")
    assert first.row["seq"].tolist() == [1]
    assert len(first.message_id) == 36


def test_deliveries_come_in_the_order_of_the_rows_and_not_of_the_file(disk: Disk, log: Log) -> None:
    rows = file(disk, log)
    assert bodies(read(disk, rows[[2, 0, 1]])) == [(3, b"body 3"), (1, b"body 1"), (2, b"body 2")]


def test_what_is_in_memory_is_read_at_once_and_else_nothing(
    disk: Disk, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = file(disk, log)[[2, 0, 1]]
    handout = Handout(
        ONE.id, [FiredRows(HOUR, rows[:2]), FiredRows(HOUR, rows[2:])], attempts={2: 4}
    )
    is_in_memory = True
    monkeypatch.setattr(SimulatedFiles, "is_in_memory", lambda self: is_in_memory)
    fetched = disk.reader.fetch_now(handout, {})
    assert fetched == disk.reader.fetch(handout, {})
    assert fetched is not None
    opened = disk.reader.open(handout, fetched)
    assert bodies(opened) == [(3, b"body 3"), (1, b"body 1"), (2, b"body 2")]
    assert [one.attempt for one in opened] == [1, 1, 4]
    is_in_memory = False
    assert disk.reader.fetch_now(handout, {}) is None


def test_what_is_not_filed_is_read_at_once_only_if_it_is_given(disk: Disk, log: Log) -> None:
    rows = file(disk, log).copy()
    rows["locator"] = 0
    unfiled = {seq: encode_payload(Payload(b"%d" % seq)) for seq in (1, 2, 3)}
    handout = Handout(ONE.id, [FiredRows(HOUR, rows)])
    fetched = disk.reader.fetch_now(handout, unfiled)
    assert fetched is not None
    assert bodies(disk.reader.open(handout, fetched)) == [(1, b"1"), (2, b"2"), (3, b"3")]
    del unfiled[2]
    assert disk.reader.fetch_now(handout, unfiled) is None
    assert disk.damage == []


def test_much_is_not_read_at_once(disk: Disk, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = file(disk, log)
    monkeypatch.setattr(SimulatedFiles, "is_in_memory", lambda self: True)
    handout = Handout(ONE.id, [FiredRows(HOUR, rows[:2]), FiredRows(HOUR, rows[2:])])
    total_bytes = sum(place_of(locator)[1] for locator in rows["locator"].tolist())
    monkeypatch.setattr(reader_module, "_NOW_BYTES_MAX", total_bytes)
    assert disk.reader.fetch_now(handout, {}) is not None
    monkeypatch.setattr(reader_module, "_NOW_BYTES_MAX", total_bytes - 1)
    assert disk.reader.fetch_now(handout, {}) is None


def test_what_needs_a_look_at_its_row_is_not_read_at_once(
    disk: Disk, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = file(disk, log).copy()
    rows["route"][1] = 3 | ROUTE_SUBSCRIPTION
    monkeypatch.setattr(SimulatedFiles, "is_in_memory", lambda self: True)
    assert disk.reader.fetch_now(Handout(ONE.id, [FiredRows(HOUR, rows)]), {}) is None


def test_what_is_cut_off_or_of_no_file_is_not_read_at_once(
    disk: Disk, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = file(disk, log)
    monkeypatch.setattr(SimulatedFiles, "is_in_memory", lambda self: True)
    offset, length = place_of(int(rows["locator"][2]))
    disk.files.open(disk.schedule.path(HOUR)).truncate(offset + length - 1)
    assert disk.reader.fetch_now(Handout(ONE.id, [FiredRows(HOUR, rows)]), {}) is None
    assert disk.reader.fetch_now(Handout(ONE.id, [FiredRows(HOUR + 1, rows)]), {}) is None
    assert disk.damage == []


def test_rows_of_several_hours_are_read_from_their_files(disk: Disk, log: Log) -> None:
    disk.replay.snapshot(HOUR + 1)
    log.publish(START_MS + HOUR_MS, body=b"next")
    live = disk.file(log.close()).live
    handout = Handout(ONE.id, [FiredRows(hour, rows) for hour, rows in reversed(live)])
    assert bodies(disk.reader.deliveries(handout, {}))[:2] == [(4, b"next"), (1, b"body 1")]


def test_rows_that_are_not_filed_are_read_from_memory(disk: Disk, log: Log) -> None:
    rows = file(disk, log).copy()
    rows["locator"][1] = 0
    unfiled = {2: encode_payload(Payload(b"from memory"))}
    assert bodies(read(disk, rows, unfiled)) == [
        (1, b"body 1"),
        (2, b"from memory"),
        (3, b"body 3"),
    ]


def test_rows_that_were_filed_since_they_fired_are_found(disk: Disk, log: Log) -> None:
    rows = file(disk, log).copy()
    rows["locator"] = 0
    assert bodies(read(disk, rows)) == [(1, b"body 1"), (2, b"body 2"), (3, b"body 3")]


def test_a_row_that_is_nowhere_is_named(disk: Disk, log: Log) -> None:
    rows = file(disk, log).copy()
    rows["locator"][1] = 0
    rows["seq"][1] = 99
    assert bodies(read(disk, rows)) == [(1, b"body 1"), (3, b"body 3")]
    [error] = disk.damage
    assert (error.path, error.first_seq) == (disk.schedule.path(HOUR), 99)


def test_a_damaged_body_is_named_and_the_rest_is_delivered(disk: Disk, log: Log) -> None:
    rows = file(disk, log)
    offset, length = place_of(int(rows["locator"][1]))
    disk.files.open(disk.schedule.path(HOUR)).pwrite([b"\xff"], offset + length - 1)
    assert bodies(read(disk, rows)) == [(1, b"body 1"), (3, b"body 3")]
    [error] = disk.damage
    assert (error.path, error.offset, error.first_seq, error.last_seq) == (
        disk.schedule.path(HOUR),
        offset,
        2,
        2,
    )


def test_a_body_that_is_cut_off_is_named(disk: Disk, log: Log) -> None:
    rows = file(disk, log)
    offset, length = place_of(int(rows["locator"][2]))
    disk.files.open(disk.schedule.path(HOUR)).truncate(offset + length - 1)
    assert bodies(read(disk, rows)) == [(1, b"body 1"), (2, b"body 2")]
    assert [error.first_seq for error in disk.damage] == [3]


def test_a_retry_keeps_the_identity_of_its_message(disk: Disk, log: Log) -> None:
    log.retry(1, START_MS + 1, START_MS + 50, subscription_id=3)
    rows = file(disk, log)
    first, *_, retry = read(disk, rows)
    assert retry.entry == ScheduleEntry(4, START_MS + 50)
    assert retry.message_id == first.message_id
    assert (retry.origin.message_seq, retry.origin.due_ms) == (1, START_MS + 1)
    assert (retry.attempt, retry.subject) == (2, SUBJECT)


def test_a_delivery_that_a_restart_left_open_learns_its_subject_from_its_row(
    disk: Disk, log: Log
) -> None:
    rows = file(disk, log).copy()
    rows["route"] = 3 | ROUTE_SUBSCRIPTION
    assert {one.subject for one in read(disk, rows)} == {SUBJECT}


def test_a_delivery_whose_row_is_damaged_is_named_and_the_rest_goes_out(
    disk: Disk, log: Log
) -> None:
    rows = file(disk, log).copy()
    rows["route"][1] = 3 | ROUTE_SUBSCRIPTION
    read(disk, rows)
    # The file is known, but its rows have to be read again.
    disk.reader._schedule._decoded.pop((HOUR, 0))
    disk.files.open(disk.schedule.path(HOUR)).pwrite([b"\xff"], 70)
    assert bodies(read(disk, rows)) == [(1, b"body 1"), (3, b"body 3")]
    assert [error.path for error in disk.damage] == [disk.schedule.path(HOUR)]


def test_the_attempt_counts_what_consumers_gave_back(disk: Disk, log: Log) -> None:
    rows = file(disk, log)
    assert [one.attempt for one in read(disk, rows, attempts={2: 4})] == [1, 4, 1]


def test_neighbours_are_read_in_one_call_and_far_ones_are_not(
    disk: Disk, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.publish(START_MS + 4, body=bytes(reader_module._GAP_BYTES_MAX + 1))
    log.publish(START_MS + 5, body=b"body 5")
    rows = file(disk, log)
    calls: list[int] = []
    read_file = HourLog.read

    def counting(self, hour: int, offset: int, length: int) -> bytes:
        calls.append(length)
        return read_file(self, hour, offset, length)

    monkeypatch.setattr(HourLog, "read", counting)
    read(disk, rows[[0, 1, 2]])
    assert len(calls) == 1
    calls.clear()
    assert bodies(read(disk, rows[[4, 0]])) == [(5, b"body 5"), (1, b"body 1")]
    assert len(calls) == 2
    calls.clear()
    monkeypatch.setattr(reader_module, "_SPAN_BYTES_MAX", 30)
    assert len(read(disk, rows[[0, 1, 2]])) == 3
    assert len(calls) > 1


def test_a_message_is_looked_up_by_its_row(disk: Disk, log: Log) -> None:
    log.retry(1, START_MS + 1, START_MS + 50, subscription_id=3)
    file(disk, log)
    found = disk.reader.find(ScheduleEntry(2, START_MS + 2))
    assert found is not None
    assert (found.payload, found.subject_id, found.subscription_id) == (Payload(b"body 2"), 1, 0)
    retry = disk.reader.find(ScheduleEntry(4, START_MS + 50))
    assert retry is not None
    assert retry.subscription_id == 3
    assert disk.reader.find(ScheduleEntry(99, START_MS)) is None
    assert disk.reader.find(ScheduleEntry(1, START_MS + 5 * HOUR_MS)) is None


def test_looking_up_what_is_damaged_is_an_error(disk: Disk, log: Log) -> None:
    rows = file(disk, log)
    offset, _ = place_of(int(rows["locator"][1]))
    disk.files.open(disk.schedule.path(HOUR)).pwrite([b"\xff"], offset)
    with pytest.raises(DamageError):
        disk.reader.find(ScheduleEntry(2, START_MS + 2))
    with pytest.raises(DamageError):
        disk.reader.decode(ScheduleEntry(2, START_MS + 2), b"nonsense", "messages")


def test_what_became_of_a_row_is_found_in_the_dispatch_log(disk: Disk) -> None:
    disk.settle(HOUR, dispatch_row(1), dispatch_row(2))
    disk.settle(HOUR, dispatch_row(1, subscription_id=2))
    disk.settle(HOUR, dispatch_row(3))
    assert disk.reader.settled(HOUR, 1)["subscription_id"].tolist() == [1, 2]
    assert len(disk.reader.settled(HOUR, 9)) == 0
    assert len(disk.reader.settled(HOUR + 1, 1)) == 0


def test_what_is_told_of_a_row_stands_in_the_frame_that_settles_it(disk: Disk) -> None:
    told = Note(HOUR, 1, 1, 1, START_MS, 7, 204, "thanks")
    disk.settle(HOUR, dispatch_row(2), dispatch_row(1), encode_note(told))
    disk.settle(HOUR, dispatch_row(1, subscription_id=2))
    first, second = disk.reader.ended(HOUR, 1)
    assert (first.note, second.note) == (told, None)
    assert [int(one.row["subscription_id"]) for one in (first, second)] == [1, 2]
    assert [one.note for one in disk.reader.ended(HOUR, 2)] == [None]
    assert disk.reader.ended(HOUR + 1, 1) == []


def test_a_row_counts_though_its_note_is_damaged(disk: Disk) -> None:
    told = Note(HOUR, 1, 1, 1, START_MS, 7, 204, "thanks")
    disk.settle(HOUR, dispatch_row(1), encode_note(told))
    path = disk.dispatch.path(HOUR)
    data = disk.files.open(path).pread(1 << 16, 0)
    disk.files.open(path).pwrite([b"X"], data.index(b"thanks"))
    [ended] = disk.reader.ended(HOUR, 1)
    assert (ended.note, int(ended.row["seq"])) == (None, 1)
    assert [error.reason for error in disk.damage] == [
        "what is told of its rows does not match its checksum"
    ]
