"""The columns: their sizes are on disk, and so are the numbers of the kinds."""

import pickle

import numpy as np
import pytest

from storage.catalog import Table
from storage.rows import (
    DTYPES,
    REMOVES,
    SCHEDULE_DTYPE,
    SCHEDULES,
    LogKind,
    Outcome,
    RecordKind,
    buffer_of,
    concatenate,
    keep,
    select,
)


@pytest.mark.parametrize(
    ("kind", "row_bytes"),
    [
        (LogKind.MESSAGE, 80),
        (LogKind.SCHEDULE, 64),
        (LogKind.DISPATCH, 40),
        (LogKind.DEFINITIONS, 24),
    ],
)
def test_rows_are_packed_and_little_endian(kind: LogKind, row_bytes: int) -> None:
    dtype = DTYPES[kind]
    assert dtype.itemsize == row_bytes
    assert row_bytes % 8 == 0
    fields = [dtype.fields[name] for name in dtype.names or () if dtype.fields is not None]
    assert sum(field[0].itemsize for field in fields) == row_bytes
    assert all(field[0].str[0] in "<|" for field in fields)


def test_kinds_keep_their_numbers() -> None:
    assert {kind.name: int(kind) for kind in LogKind} == {
        "MESSAGE": 1,
        "SCHEDULE": 2,
        "DISPATCH": 3,
        "DEFINITIONS": 4,
    }
    assert {kind.name: int(kind) for kind in RecordKind} == {
        "PUBLISH": 1,
        "CANCEL": 2,
        "MOVE": 3,
        "RETRY": 4,
        "DEAD": 5,
        "REDRIVE": 6,
        "SUBJECT": 7,
        "SUBSCRIPTION": 8,
        "DISCARD": 9,
        "IMPORT": 10,
        "HEARTBEAT": 11,
        "FIRE": 12,
        "RUN": 13,
        "SCHEDULE": 14,
        "REPLAY": 15,
        "SOURCE": 21,
    }
    assert {outcome.name: int(outcome) for outcome in Outcome} == {"DELIVERED": 1, "DROPPED": 2}


def test_a_part_has_a_kind_from_192_on() -> None:
    kind = RecordKind(192)
    assert kind == 192 and kind.name == "PART_192" and kind is RecordKind(192)
    for one in (kind, RecordKind.PUBLISH, Table("part_192"), Table.KEYS):
        assert pickle.loads(pickle.dumps(one)) is one
    assert kind not in set(RecordKind)
    for other in (0, 16, 191, 256):
        with pytest.raises(ValueError, match="not a valid RecordKind"):
            RecordKind(other)


def test_every_log_has_its_columns() -> None:
    assert set(DTYPES) == set(LogKind)
    deliveries = DTYPES.keys() - {LogKind.DEFINITIONS}
    for names in (DTYPES[kind].names or () for kind in deliveries):
        assert {"seq", "message_seq", "due_ms", "subscription_id", "attempt", "flags"} <= {*names}


def test_only_what_moves_a_row_both_removes_and_schedules() -> None:
    assert set(SCHEDULES) & set(REMOVES) == {RecordKind.MOVE, RecordKind.RETRY, RecordKind.FIRE}
    assert RecordKind.PUBLISH not in REMOVES
    assert RecordKind.CANCEL not in SCHEDULES


def test_rows_are_selected_and_joined_as_numpy_does_it() -> None:
    rng = np.random.default_rng(1)
    rows = np.frombuffer(rng.bytes(50 * 64), SCHEDULE_DTYPE)
    mask = rows["seq"] % 2 == 0
    indexes = rng.permutation(50)[:20]
    assert select(rows, mask).tolist() == rows[mask].tolist()
    assert select(rows[::-2], mask[:25]).tolist() == rows[::-2][mask[:25]].tolist()
    chosen = select(rows, indexes)
    assert chosen.dtype == SCHEDULE_DTYPE
    assert chosen.tolist() == rows[indexes].tolist()
    joined = concatenate([rows[:3], rows[:0], rows[7:]], SCHEDULE_DTYPE)
    assert joined.tolist() == np.concatenate([rows[:3], rows[7:]]).tolist()
    joined["seq"] = 0
    assert rows["seq"].any()
    assert len(concatenate([], SCHEDULE_DTYPE)) == 0


def test_what_is_kept_whole_is_not_copied() -> None:
    rows = np.zeros(3, SCHEDULE_DTYPE)
    rows["seq"] = [1, 2, 3]
    assert keep(rows, np.ones(3, bool)) is rows
    assert keep(rows, rows["seq"] != 2)["seq"].tolist() == [1, 3]
    assert bytes(buffer_of(rows[1:])) == rows[1:].tobytes()
