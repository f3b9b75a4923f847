"""The files of an hour, as they are doubted though every checksum is right; and read in parts."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from delayserver.pipeline.logs.logs import ALL, Range
from delayserver.pipeline.states.hour_files import read_hour
from delayserver.pipeline.states.settlement import HourRows
from delayserver.pipeline.states.snapshot import open_directory, take_snapshot
from storage.frame import Damage, Rows
from storage.rows import FLAG_REMOVAL, HOUR_MS, SCHEDULE_DTYPE, LogKind, RecordKind
from tests.pipeline.store import HOUR, Store
from tests.world.resealing import read_frames, rewrite, write_frames

NOTHING = np.empty(0, SCHEDULE_DTYPE)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Three frames in the schedule file of HOUR, with a tombstone in the last."""
    store = Store(tmp_path / "data")
    store.subscribe("mail", "*")
    for due_in_ms in ([100_000, 200_000, 300_000], [150_000, 250_000]):
        seqs = store.publish("order", due_in_ms)
        store.checkpoint()
    store.cancel(seqs[1], 250_000)
    store.checkpoint()
    store.stop()
    return store


def read(store: Store, seqs: Range = ALL) -> tuple[HourRows, list[Damage]]:
    directory = open_directory(store.root)
    with directory.catalog() as catalog:
        snapshot = take_snapshot(directory.files, catalog, stamp=directory.stamp)
    assert snapshot.damage == []
    return read_hour(
        directory.files,
        HOUR,
        snapshot.hours[HOUR],
        snapshot.unfiled.get(HOUR, NOTHING),
        stamp=directory.stamp,
        checkpoint_seq=snapshot.checkpoint_seq,
        seqs=seqs,
    )


def test_a_sound_hour(store: Store) -> None:
    rows, damage = read(store)
    assert (len(rows.schedule), damage) == (6, [])


def test_parts_have_each_row_once_and_endings_with_their_entry(store: Store) -> None:
    rows, _ = read(store)
    middle = int(rows.schedule["seq"][2])
    parts = [read(store, seqs) for seqs in (Range(0, middle), Range(middle + 1))]
    assert [damage for _, damage in parts] == [[], []]
    assert [len(part.schedule) for part, _ in parts] == [3, 3]
    (first, _), (second, _) = parts
    assert int((first.schedule["flags"] & FLAG_REMOVAL).sum()) == 0
    assert second.schedule["flags"].tolist() == [0, 0, FLAG_REMOVAL]
    assert int(second.schedule["message_seq"][-1]) == int(second.schedule["seq"][1])


def another_hour(rows: Rows) -> Rows:
    rows["due_ms"][0] += HOUR_MS
    return rows


def another_kind(rows: Rows) -> Rows:
    rows["kind"][0] = RecordKind.HEARTBEAT
    return rows


def twice(rows: Rows) -> Rows:
    rows["seq"][1] = rows["seq"][0]
    return rows


def shortened(rows: Rows) -> Rows:
    return rows[1:].copy()


def swapped(rows: Rows) -> Rows:
    return rows[::-1].copy()


def another_last(rows: Rows) -> Rows | None:
    if (rows["flags"] & FLAG_REMOVAL).any() or len(rows) != 2:
        return None
    rows["seq"][-1] += 1
    return rows


@pytest.mark.damaged("rows that no server would file")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (another_hour, "rows of another hour than the file's"),
        (another_kind, "entries of a kind that makes none"),
        (twice, "two entries have the same seq"),
        (swapped, "its rows are not in the order of their seqs"),
        (shortened, "the file is shorter than the catalog says"),
        (another_last, "the file has as its last entry seq"),
    ],
)
def test_rows_that_no_server_files_are_damage(
    store: Store, change: Callable[[Rows], Rows | None], reason: str
) -> None:
    assert rewrite(store.path(LogKind.SCHEDULE), change)
    _, damage = read(store)
    assert any(reason in found.reason for found in damage), damage


@pytest.mark.damaged("frames that no server would file")
def test_frames_in_another_order_are_damage_and_judged_as_they_were(store: Store) -> None:
    path = store.path(LogKind.SCHEDULE)
    first, second, *rest = read_frames(path)
    wanted, _ = read(store)
    write_frames(path, [second, first, *rest])
    rows, damage = read(store)
    assert "its rows are not in the order of their seqs" in {found.reason for found in damage}
    assert rows.schedule["seq"].tolist() == wanted.schedule["seq"].tolist()
