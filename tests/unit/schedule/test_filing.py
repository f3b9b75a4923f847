"""From records to schedule rows."""

import random
from collections import Counter

import numpy as np
import pytest

from delayserver.records.direct import DIRECT_FIRST_ID
from delayserver.schedule import filing
from delayserver.schedule.filing import by_bucket, parts_by_bucket, schedule_rows
from storage.buckets import DAY_MS, days_of, is_day
from storage.frame import Rows
from storage.rows import FLAG_REMOVAL, HOUR_MS, MESSAGE_DTYPE, SCHEDULE_DTYPE, RecordKind

HOUR = 500_000
DAY = 20_000
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


@pytest.mark.parametrize("kind", [RecordKind.MOVE, RecordKind.FIRE])
def test_what_is_moved_for_one_subscription_leaves_its_place_for_all(kind: RecordKind) -> None:
    start = HOUR * HOUR_MS
    made = records((2, start, 2, 0, 0, 0, RecordKind.PUBLISH), (3, start, 2, 2, start, 0, kind))
    made["subscription_id"] = DIRECT_FIRST_ID
    rows, _ = schedule_rows(made)
    assert rows["subscription_id"].tolist() == [DIRECT_FIRST_ID, DIRECT_FIRST_ID, 0]
    assert rows["flags"].tolist() == [0, 0, FLAG_REMOVAL]


def test_rows_of_an_hour_stay_in_the_order_of_their_seq() -> None:
    start = HOUR * HOUR_MS
    dues = [start + HOUR_MS, start + 5, start, start + HOUR_MS + 1]
    made = records(*((n, due, n, 0, 0, 0, RecordKind.PUBLISH) for n, due in enumerate(dues, 1)))
    rows, _ = schedule_rows(made)
    assert {h: rows["seq"][i].tolist() for h, i in by_bucket(rows["due_ms"] // HOUR_MS)} == {
        HOUR: [2, 3],
        HOUR + 1: [1, 4],
    }


def test_hours_that_are_far_apart_are_in_order() -> None:
    start = HOUR * HOUR_MS
    dues = [start + 100_000 * HOUR_MS, start, start + 100_000 * HOUR_MS + 1, start + 3 * HOUR_MS]
    made = records(*((n, due, n, 0, 0, 0, RecordKind.PUBLISH) for n, due in enumerate(dues, 1)))
    rows, _ = schedule_rows(made)
    assert [
        (h - HOUR, rows["seq"][i].tolist()) for h, i in by_bucket(rows["due_ms"] // HOUR_MS)
    ] == [
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
    assert list(by_bucket(schedule_rows(records())[0]["due_ms"])) == []


@pytest.mark.parametrize("gathered_bytes", [1, 100, 1 << 20])
@pytest.mark.parametrize("seed", range(8))
def test_each_bucket_gets_its_rows_with_their_payloads(
    seed: int, gathered_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filing, "GATHERED_BYTES", gathered_bytes)
    rng = random.Random(seed)
    kinds = (RecordKind.PUBLISH, RecordKind.CANCEL, RecordKind.MOVE)
    made = records(
        *(
            (seq, rng.choice((0, 1, 30)) * HOUR_MS + seq, seq, seq, HOUR_MS, 0, rng.choice(kinds))
            for seq in range(1, 200)
        )
    )
    made["due_ms"] += DAY * DAY_MS
    made["target_due_ms"] += DAY * DAY_MS
    lengths = [rng.choice((0, 7, 20)) for _ in made]
    made["payload_length"] = lengths
    made["payload_offset"] = np.cumsum(lengths) - lengths
    blob = rng.randbytes(sum(lengths))
    scheduled, starts = schedule_rows(made)
    first_day = scheduled["due_ms"] < (DAY + 1) * DAY_MS
    hours = scheduled["due_ms"] // HOUR_MS
    buckets = np.where(first_day, hours, days_of(hours)) if seed % 2 else hours
    expected = scheduled.copy()

    parts = list(parts_by_bucket(blob, scheduled, starts, buckets))
    assert [part.bucket for part in parts] == sorted(set(buckets.tolist()))
    for part in parts:
        here = buckets == part.bucket
        rows = expected[here]
        assert part.rows["seq"].tolist() == rows["seq"].tolist()
        assert len(part.payload) == rows["payload_length"].sum()
        for row, start in zip(part.rows, starts[here].tolist(), strict=True):
            offset, length = int(row["payload_offset"]), int(row["payload_length"])
            assert bytes(part.payload[offset : offset + length]) == blob[start : start + length]
        is_entry = rows["flags"] & FLAG_REMOVAL == 0
        assert part.entries == is_entry.sum()
        assert part.last_entry_seq == max(rows["seq"][is_entry].tolist(), default=0)
        counts = Counter[int]()
        for row, adds in zip(rows, is_entry, strict=True):
            counts[int(row["due_ms"]) // HOUR_MS % 24] += 1 if adds else -1
        wanted = [counts[hour] for hour in range(24)] if is_day(part.bucket) else []
        assert part.by_hour == wanted


def test_what_is_alone_in_its_bucket_is_not_copied() -> None:
    made = records(*((seq, HOUR * HOUR_MS, seq, 0, 0, 0, RecordKind.PUBLISH) for seq in (1, 2, 3)))
    made["payload_length"] = 100
    blob = bytes(range(100)) * 3
    rows, starts = schedule_rows(made)
    (part,) = parts_by_bucket(blob, rows, starts, np.full(3, HOUR))
    assert part.payload.obj is blob


def test_nothing_is_in_no_bucket() -> None:
    rows, starts = schedule_rows(records())
    assert list(parts_by_bucket(b"", rows, starts, starts)) == []
