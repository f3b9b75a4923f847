"""From records to schedule rows."""

import random

import numpy as np

from delayserver.schedule.filing import by_hour, schedule_rows
from storage.frame import Rows
from storage.rows import HOUR_MS, MESSAGE_DTYPE, SCHEDULE_DTYPE, RecordKind

HOUR = 500_000
FIELDS = ("seq", "due_ms", "message_seq", "target_seq", "target_due_ms", "subscription_id", "kind")


def records(*values: tuple[int, ...]) -> Rows:
    rows = np.zeros(len(values), MESSAGE_DTYPE)
    for row, row_values in zip(rows, values, strict=True):
        for name, value in zip(FIELDS, row_values, strict=True):
            row[name] = value
    rows["payload_offset"] = np.arange(len(rows)) * 100
    return rows


def shown(rows: Rows) -> list[tuple[int, int, int, int]]:
    """seq, hour, message_seq, flags."""
    hours = rows["due_ms"] // HOUR_MS - HOUR
    return [
        (int(r["seq"]), int(hour), int(r["message_seq"]), int(r["flags"]))
        for r, hour in zip(rows, hours, strict=True)
    ]


def test_each_kind_makes_the_rows_that_the_format_says() -> None:
    start = HOUR * HOUR_MS
    rows, starts = schedule_rows(
        records(
            (1, 0, 1, 0, 0, 0, RecordKind.SUBJECT),
            (2, start, 2, 0, 0, 0, RecordKind.PUBLISH),
            (3, start + HOUR_MS, 2, 2, start, 0, RecordKind.MOVE),
            (4, start + 1, 2, 3, start + HOUR_MS, 7, RecordKind.RETRY),
            (5, 0, 2, 4, start + 1, 7, RecordKind.DEAD),
            (6, start + 2, 2, 4, 0, 7, RecordKind.REDRIVE),
            (7, 0, 2, 6, start + 2, 0, RecordKind.CANCEL),
            (8, 0, 2, 4, 0, 7, RecordKind.DISCARD),
        )
    )
    assert shown(rows) == [
        (2, 0, 2, 0),
        (3, 1, 2, 0),
        (3, 0, 2, 1),
        (4, 0, 2, 0),
        (4, 1, 3, 1),
        (5, 0, 4, 1),
        (6, 0, 2, 0),
        (7, 0, 6, 1),
    ]
    assert starts.tolist() == [100, 200, 0, 300, 0, 0, 500, 0]


def test_rows_of_an_hour_stay_in_the_order_of_their_seq() -> None:
    start = HOUR * HOUR_MS
    dues = [start + HOUR_MS, start + 5, start, start + HOUR_MS + 1]
    made = records(*((n, due, n, 0, 0, 0, RecordKind.PUBLISH) for n, due in enumerate(dues, 1)))
    rows, _ = schedule_rows(made)
    assert {h: rows["seq"][i].tolist() for h, i in by_hour(rows)} == {
        HOUR: [2, 3],
        HOUR + 1: [1, 4],
    }


def test_hours_that_are_far_apart_are_in_order() -> None:
    start = HOUR * HOUR_MS
    dues = [start + 100_000 * HOUR_MS, start, start + 100_000 * HOUR_MS + 1, start + 3 * HOUR_MS]
    made = records(*((n, due, n, 0, 0, 0, RecordKind.PUBLISH) for n, due in enumerate(dues, 1)))
    rows, _ = schedule_rows(made)
    assert [(h - HOUR, rows["seq"][i].tolist()) for h, i in by_hour(rows)] == [
        (0, [2]),
        (3, [4]),
        (100_000, [1, 3]),
    ]


def test_an_entry_is_its_record_without_what_it_removes() -> None:
    data = random.Random(0).randbytes(50 * MESSAGE_DTYPE.itemsize)
    made = np.frombuffer(data, MESSAGE_DTYPE).copy()
    made["seq"], made["kind"] = np.arange(50), RecordKind.PUBLISH
    rows, starts = schedule_rows(made)
    for name in set(SCHEDULE_DTYPE.names or ()) - {"payload_offset"}:
        assert rows[name].tobytes() == made[name].tobytes()
    assert starts.tolist() == made["payload_offset"].tolist()


def test_no_records_are_in_no_hour() -> None:
    assert list(by_hour(schedule_rows(records())[0])) == []
